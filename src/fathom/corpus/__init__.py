"""Turns documents into cleaned, deduplicated, decontaminated and mixed token shards, with a report on every step.

- `recipe.py` has the keys; `pipeline.py` runs the stages (`stages.py`, `stage.py`), `executor.py` and `remote.py` their
  tasks.
- `ingest.py` reads files, PDF and markup in the process of `sandbox.py`; `fidelity.py` checks numbers.
- `clean.py` normalises (`normalization.py`, `private.py`) and filters (`quality.py`); `duplicates.py` deduplicates.
- `contamination.py`, `leak_rules.py`, `damaged.py` and `folding.py` find benchmark questions; `audit.py` only reports
  them.
- `conversations.py`, `traces.py`, `verbalizer.py` and `papers.py` make messages; `converse.py` makes their shards.
- `tokens.py` makes shards of documents, and `budget.py` plans the mixture.
- `publish.py`, `exports.py` and `card.py` write the result. `prepare.py` is `fathom prepare`.
"""

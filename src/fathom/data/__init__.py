"""From text to batches: checksummed token shards, and batches that are a pure function of the step.

- `sources.py` reads files, globs, compressed files, Parquet and `hf:`; `cloud.py` copies files from URLs and to them.
- `tokenizer.py` trains and loads tokenizers; `shards.py` reads, writes and checks shards, and holds documents out.
- `batches.py` decides which rows a step, rank and epoch read (`permutation.py`).
- `rows.py` cuts windows, separates documents and chooses the windows of an evaluation.
- `targets.py` packs conversations, and has the loss mask. `puzzles.py` generates data.
- `mixture.py` and `collections.py` mix collections. `../corpus/prepare.py` is `fathom prepare`.
"""

"""From text to batches: checksummed token shards, and batches that are a pure function of the step.

- `sources.py` reads files, globs, compressed files, Parquet and `hf:`; `cloud.py` opens URLs and copies to them.
- `tokenizer.py` trains and loads tokenizers; `shards.py` reads, writes and checks shards, and holds documents out.
- `batches.py` decides which rows a step, rank and epoch read (`permutation.py`), and how evaluation samples windows.
- `rows.py` cuts windows and separates documents; `targets.py` packs conversations, and has the loss mask.
- `mixture.py` and `collections.py` mix collections. `../corpus/prepare.py` is `fathom prepare`.
"""

"""Model directories, Fathom's and other projects': check them without trusting their files, open them, write them.

- `open.py` opens a model for inference, `runs.py` the model of a run or of its checkpoint, and the configuration of
  `model.from_pretrained`; `find.py` finds a run's or a comparison's model.
- `untrusted.py` refuses unsafe files, such as pickles; `hub.py` downloads `org/name`; `hashes.py` compares
  `weights.sha256`.
- `same_logits.py` is `fathom check`, on the small copy that `shrink.py` and `twin.py` make.
- `families/` translates other families' `config.json` and tensors; `../models/loading.py` refuses misfitting tensors.
- `export.py` writes a model, `to_gguf.py` a GGUF file; `from_gguf.py` opens one; `gguf.py` reads one for `lineage/`.
  `gguf_rope.py` translates scaled RoPE for both directions.
- `special_tokens.py` decides EOS, BOS and padding; `file_names.py` names files, and parses `RUN@step-400`.
"""

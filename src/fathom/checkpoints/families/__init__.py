"""Other projects' decoders as Fathom models, and back: one file for each family.

`import fathom.checkpoints.families` lets `FathomForCausalLM.from_pretrained` open every family of `FAMILIES`.

- `registry.py` chooses the reader of a checkpoint; `family.py` translates keys and follows `attn_implementation`.
- `keys.py` accepts, ignores or refuses each key of `config.json`, such as `sliding_window`.
- `lumia.py` reads released Depth-Attention, DenseFormer, AttnRes and mHC, `ponderlm.py` PonderLM.
- `nanbeige.py` and `ouro.py` read released loops; `published.py` is only a base class.
- `hosted.py` and `layouts.py` open families whose layers are transformers' own.
- `tensor_names.py` renames tensors; `models/loading.py` refuses those that are missing, unknown or misshapen.
"""

from fathom.checkpoints.families.registry import FAMILIES as FAMILIES
from fathom.checkpoints.families.registry import family_of as family_of
from fathom.checkpoints.families.registry import known as known
from fathom.checkpoints.families.registry import native_config as native_config
from fathom.checkpoints.families.registry import to_ours as to_ours
from fathom.checkpoints.families.registry import unlike as unlike
from fathom.checkpoints.families.tensor_names import to_theirs as to_theirs

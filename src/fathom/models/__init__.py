"""The decoder and its mechanisms. An export holds a flat copy of these files, so each name is unique (`packages.py`).

- `modeling.py`: attention, layer, model, how many iterations a pass makes, when logits are returned.
- `configuration.py`, `axes/fields.py`: the keys of `config.json`. `registry.py`: mechanisms by name, joined by `+`.
- `mixers/`, `residuals/`, `recurrences/`: a file for each mechanism. `axes/`: their base classes, `blend` and gates.
- `trips/`: how iterations run, what they read and store, caches, Jacobi rounds, drafts, engines.
- `pretrained.py`: initial values, activation checkpointing, schedules over training steps. `cost.py`: FLOPs and bytes.
- `generation.py`: changes to `generate`. `loading.py`: strict opening. `packages.py`: what an export copies, other
  packages' mechanisms.
- `decoder/`: norms, rotary embedding, head, loss. `hosts/`: families whose layers are transformers' own.
- Backward passes by hand, in eager training only: `rms_norm.py`, `rotary.py`, `depth_attention.py`,
  `attention_residuals.py`, `hyper_connections.py`; in compiled code too: `loss.py`, `vocabulary_mixture.py`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration import FathomConfig
from .modeling import FathomForCausalLM, FathomModel
from .packages import add_mechanism

__all__ = ["FathomConfig", "FathomForCausalLM", "FathomModel", "add_mechanism"]

AutoConfig.register(FathomConfig.model_type, FathomConfig, exist_ok=True)
AutoModel.register(FathomConfig, FathomModel, exist_ok=True)
AutoModelForCausalLM.register(FathomConfig, FathomForCausalLM, exist_ok=True)

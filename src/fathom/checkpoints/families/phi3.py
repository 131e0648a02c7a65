"""Phi-3: Llama with one matrix for queries, keys and values, and one for the MLP's two inputs.

Its dropout is not applied.

`models/generation.py` reads the whole text again when its length changes the angles of rotary embedding.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import RELATIVES, SHARED, Family, Rounding, Values, windows
from fathom.checkpoints.families.llama import with_window
from fathom.checkpoints.families.tensor_names import projections, renamed, stacked
from fathom.models import FathomConfig

KEYS = tuple(key for key in SHARED if key not in ("head_dim", "attention_bias", "mlp_bias"))


def switches(theirs: PreTrainedConfig) -> Values:
    """Phi-3's switches: a sliding window on all layers or none."""
    head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    return {"qk_norm": "none", "head_dim": head, **windows(theirs)}


def halves(config: FathomConfig) -> list[int]:
    """How many rows of the joint MLP matrix belong to the gate projection, and how many to the up projection."""
    return [config.intermediate_size, config.intermediate_size]


TOP, L, OURS = "[model.]", "[model.]layers.{i}.", "model.layers.{i}."
KEPT = ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
RULES = (
    stacked(f"{L}self_attn.qkv_proj.weight", [f"{OURS}self_attn.{n}_proj.weight" for n in "qkv"], projections),
    stacked(f"{L}mlp.gate_up_proj.weight", [f"{OURS}mlp.{n}_proj.weight" for n in ("gate", "up")], halves),
    *(renamed(f"{TOP}{name}.weight", f"model.{name}.weight") for name in ("embed_tokens", "norm")),
    *(renamed(f"{L}{name}.weight", f"{OURS}{name}.weight") for name in KEPT),
)

STRIDED = Rounding("the class applies SiLU to one half of a fused product, and torch rounds a strided tensor otherwise")

PHI3 = Family(
    "phi3",
    switches,
    with_window,
    RULES,
    (),
    KEYS,
    STRIDED,
    further=("head_dim", "sliding_window"),
    ignored=(*RELATIVES, "resid_pdrop", "embd_pdrop", "full_attn_mod", "interpolate_factor", "lm_head_bias"),
    rotates="parts",
    opens="Phi-3, Phi-4",
)

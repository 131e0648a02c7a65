"""Nanbeige 4.2: a Llama whose stack runs twice, the final norm between.

Its code has further depth options that the released weights do not use; a checkpoint that sets one is refused.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from fathom.checkpoints.families.family import SHARED, Values
from fathom.checkpoints.families.published import Published
from fathom.models import FathomConfig

REFUSED = ("enable_depth_attention", "loop_share_kv", "enable_double_loop_split", "use_mhc", "enable_mhc", "use_ngram")
"""Switches of its code that a model of ours cannot follow."""
PREFIXES = ("enable_", "mhc_", "ngram_", "loop_share", "depth_attention")
READ = ("num_loops", "skip_loop_final_norm")


def owns(config: Values) -> bool:
    """Whether a `config.json` is Nanbeige's."""
    return config.get("model_type") == "nanbeige"


def configuration(config: Values) -> Values:
    """Llama's values, and the loop."""
    for key, value in config.items():
        if value and (key in REFUSED or key.startswith(PREFIXES)):
            raise ValueError(f"{key}={value}: Fathom opens Nanbeige 4.2 with its depth switches off")
    llama = AutoConfig.for_model(**{**{k: v for k, v in config.items() if k not in READ}, "model_type": "llama"})
    ours = {key: getattr(llama, key) for key in SHARED if hasattr(llama, key)}
    loops = int(config.get("num_loops", 1))
    if loops > 1:
        norm = "none" if config.get("skip_loop_final_norm") else "final"
        ours |= {"recurrence": "loop", "recurrence_options": {"trips": loops, "norm_between": norm}}
    kept: Values = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    return {**ours, **kept, "qk_norm": "none", "model_type": FathomConfig.model_type}


def tensors(directory: Path, config: FathomConfig) -> None:
    """None: its tensors already have Llama's names."""


NANBEIGE = Published(("nanbeige",), owns, configuration, tensors)

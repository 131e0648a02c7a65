"""Nanbeige 4.2: a Llama whose layers run several times, all of them or those in the middle.

The released weights run the whole stack twice. Switches of the public code, which they do not use, give the keys and
values of the first time to the later ones, mix values over depth, and norm queries and keys. A checkpoint that sets any
other switch is refused.
"""

from __future__ import annotations

from fathom.checkpoints.families.family import Values, known_as
from fathom.checkpoints.families.llama import LLAMA
from fathom.checkpoints.families.published import Published
from fathom.checkpoints.families.tensor_names import renamed

READ = (
    *("num_loops", "loop_loss_weights", "skip_loop_final_norm", "qk_layernorm"),
    *("enable_double_loop_split", "loop_middle_layers", "loop_share_kv"),
    *("enable_depth_attention", "depth_attention_stride", "depth_attention_static_anchor_once"),
)
"""Keys that Llama does not have."""
REFUSED = {
    "enable_hyper_connection": "hyper-connections whose streams continue from one loop into the next",
    "emb_neighbor_num": "embeddings of n-grams",
}
"""Switches of the public code that Fathom cannot follow."""
SWITCHES = ("enable_", "loop_", "depth_attention_", "emb_")
"""How the names of further switches begin; those that are off are ignored."""
PARAMETERS = ("mhc_", "ngram_")
"""How the names of parameters begin that only refused switches use."""
RULES = (
    renamed("model.layers.{i}.self_attn.q_layernorm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    renamed("model.layers.{i}.self_attn.k_layernorm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
)


def configuration(config: Values) -> Values:
    """The values of Fathom's configuration: Llama's, and those of the loop and of depth attention."""
    for key, value in config.items():
        if value and key in REFUSED:
            raise ValueError(f"{key}={value}: Fathom does not have {REFUSED[key]}")
    off = [
        key for key, value in config.items() if key.startswith(PARAMETERS) or (key.startswith(SWITCHES) and not value)
    ]
    llama, ours = known_as(LLAMA, config, (*READ, *off))
    norm = "head" if config.get("qk_layernorm") else "none"
    loop, layers = _loop(config, llama.num_hidden_layers), llama.num_hidden_layers
    if loop:
        ours |= {"recurrence": "loop", "recurrence_options": loop}
    if config.get("enable_depth_attention"):
        if config.get("enable_double_loop_split"):
            raise ValueError(
                "enable_depth_attention with enable_double_loop_split is not supported: Nanbeige's configuration says "
                "that each depth source is read once, but its code reads each in every loop iteration"
            )
        stride = config.get("depth_attention_stride") or layers // 2
        grid = {"across_trips": "grid"} if loop else {}
        ours |= {"mixer": "depth_attention", "mixer_options": {"stride": stride, **grid}}
    return {**ours, "qk_norm": norm}


def _loop(config: Values, layers: int) -> Values:
    """Options of the recurrence `loop`; empty if every layer runs once."""
    if not config.get("enable_double_loop_split"):
        if config.get("loop_share_kv"):
            raise ValueError("loop_share_kv=True needs enable_double_loop_split=True")
        trips = len(config.get("loop_loss_weights") or ()) + 1
        trips = trips if trips > 1 else int(config.get("num_loops", 1))
        norm = "none" if config.get("skip_loop_final_norm") else "final"
        return {"trips": trips, "norm_between": norm} if trips > 1 else {}
    given = config.get("loop_middle_layers")
    middle = layers // 2 if given is None else int(given)
    if middle < 1 or layers % middle or (given is None and layers % 2):
        raise ValueError(f"loop_middle_layers must divide num_hidden_layers={layers}, got {given}")
    prelude = (layers - middle) // 2
    kv = "first" if config.get("loop_share_kv") else "own"
    return {"trips": layers // middle + 1, "prelude": prelude, "coda": layers - middle - prelude, "kv": kv}


NANBEIGE = Published(
    "nanbeige",
    configuration,
    RULES,
    opens="Nanbeige 4.2 as a `loop`: of the whole stack, or of the middle (`enable_double_loop_split`, "
    "`loop_share_kv`); `enable_depth_attention` without that split; `qk_layernorm`",
    note="refused by name: hyper-connections, n-gram embeddings, depth attention with the split, and any other switch. "
    "Depth attention rounds differently: up to 1e-5 in float32",
)

"""The released pondering models, PonderLM's (GPT-2, GPT-NeoX, Llama) and PonderLM-2's (GPT-NeoX, Llama).

Their weights are those of the family that `model_type` names, and the authors' loaders add keys of their own to its
`config.json`. The family reads everything else; this file says what the keys mean.

Refused by name: an `interpolation` of PonderLM-2 that is true or missing, a switch that is off among other keys of a
pondering model, an `auto_map` that names a baseline's file, and unknown keys that are named like these. A `ponder2`
model reads prompts with its own number of Jacobi rounds. `models/recurrences/ponder.py`, `ponder2.py` and
`pondering.py` compute what the options say.
"""

from __future__ import annotations

import re
from typing import Any

from fathom.checkpoints.families.family import Values

PONDER = ("ponderinglm", "pondering_steps", "mutiply_pondering_steps")  # the authors' spelling
PONDER2 = ("num_latent_thoughts", "num_jacobi_iterations", "random_jacobi_iterations", "interpolation")
READ = (*PONDER, *PONDER2, "recurrent_model", "scale_embeds", "softmax_temperature")
IDLE = ("interpolation_use_topk", "interpolation_topk", "hidden_layer_num", "checkpoint_num_layers")
"""Keys of the loaders that change nothing here: details of `interpolation`, which is refused, and of training."""
NAMES = re.compile(r"ponder|latent_|thoughts|jacobi|^interpolation|^recurrent_|^scale_embeds\Z|^softmax_temperature\Z")
"""How the keys of a pondering model are named; no family has such a key."""
BASELINES = re.compile(r"loop|pause|orin|addhidden|weightshare|addpausetoken")
"""Names of the public code files of PonderLM-2's baselines, which share its keys."""
UNREAD = (r"\Aadapter\.weight\Z",)
"""The tensor that PonderLM's GPT-NeoX class creates and never uses."""


def is_ponderlm(config: Values) -> bool:
    """Whether a `config.json` sets a key of a pondering model to anything but false, 0 or null."""
    return any(value and NAMES.search(key) for key, value in config.items())


def without(config: Values) -> Values:
    """A pondering model's `config.json` without the pondering keys, which leaves the keys of its base family."""
    return {key: value for key, value in config.items() if key not in IDLE and not NAMES.search(key)}


def meaning(config: Values, hidden_size: int) -> Values:
    """The values of Fathom's configuration for a pondering model's keys; empty for a `config.json` without such keys.

    A `ValueError` names a key that Fathom cannot follow, so that no pondering model opens as a plain one.
    """
    named = [key for key, value in config.items() if value and NAMES.search(key)]
    for key in named:
        if key not in (*READ, *IDLE):
            raise ValueError(f"{key}={config[key]}: Fathom does not know this key of a pondering model")
    first, second = (next((key for key in keys if key in named), None) for keys in (PONDER, PONDER2))
    if first and second:
        raise ValueError(f"{first} is a key of PonderLM and {second} of PonderLM-2: a model may have keys of one only")
    if named and not (first or second):
        raise ValueError(
            f"{named[0]}={config[named[0]]} needs another key that names the mechanism: pondering_steps (PonderLM), "
            "num_latent_thoughts (PonderLM-2) or use_depth_attention (Depth-Attention)"
        )
    return _ponder(config, hidden_size) if first else _ponder2(config, hidden_size) if second else {}


def _ponder(config: Values, hidden_size: int) -> Values:
    """PonderLM's keys as options of `ponder`: x_0 = s α U[token] and x_{k+1} = x_k + softmax(head(h_k)) α U.

    α is √d with `scale_embeds`, else 1. s is the number of pondering steps with `mutiply_pondering_steps`, else 1.
    """
    kind = _kind(config, "PonderLM", ("gpt2", "gpt_neox", "llama"))
    # The public GPT-2 class is switched on by a key that the public loader does not write.
    _switched_on(config, kind, ("ponderinglm", "recurrent_model") if kind == "gpt2" else ("ponderinglm",), PONDER)
    steps = _count(config, "pondering_steps")
    temperature = config.get("softmax_temperature") or 1.0
    if kind == "gpt_neox" and temperature != 1:
        raise ValueError(f"softmax_temperature={temperature}: PonderLM's public GPT-NeoX class ignores it; set it to 1")
    gain = steps if config.get("mutiply_pondering_steps") else 1
    alpha = hidden_size**0.5 if config.get("scale_embeds") else 1.0
    options = {"trips": steps + 1, "top_k": 0, "temperature": float(temperature), "mixture_gain": 1 / gain}
    return {"recurrence": "ponder", "recurrence_options": options, "embedding_scale": alpha * gain}


def _ponder2(config: Values, hidden_size: int) -> Values:
    """PonderLM-2's keys as options of `ponder2`: x_0 = α U[token] and x_{k+1} = h_k, in the weights' precision.

    α is √(2.5 d) with `scale_embeds`, else 1.
    """
    kind = _kind(config, "PonderLM-2", ("gpt_neox", "llama"))
    _switched_on(config, kind, ("recurrent_model",), PONDER2)
    if config.get("interpolation", True):  # the loader's default
        raise ValueError(
            "interpolation=true feeds back a mixture of token embeddings instead of the hidden state: not supported"
        )
    for code in (config.get("auto_map") or {}).values():
        if BASELINES.search(str(code)):
            raise ValueError(f"auto_map names {code}, a baseline of PonderLM-2 with the same keys: not supported")
    thoughts, rounds = _count(config, "num_latent_thoughts"), config.get("num_jacobi_iterations")
    rounds = 3 if rounds is None else rounds
    drawn = [2, 4 if kind == "gpt_neox" else 3] if config.get("random_jacobi_iterations") else [rounds, rounds]
    options = {"trips": thoughts + 1, "jacobi_train": drawn, "jacobi_eval": rounds, "jacobi_prefill": rounds}
    scale = (2.5 * hidden_size) ** 0.5 if config.get("scale_embeds") else 1.0
    scales = {"embedding_scale": scale, "round_embedding_scale": True}
    return {"recurrence": "ponder2", "recurrence_options": options, **scales}


def _kind(config: Values, name: str, allowed: tuple[str, ...]) -> str:
    kind = str(config.get("model_type"))
    if kind not in allowed:
        raise ValueError(
            f"model_type={kind} with keys of {name}: the code of {name}'s authors has only {', '.join(allowed)}"
        )
    return kind


def _switched_on(config: Values, kind: str, switches: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Refuse a `config.json` with pondering keys whose switch is off: the authors' loader would open it as a plain
    model."""
    if not any(config.get(key) for key in switches):
        there = ", ".join(key for key in (*keys, "scale_embeds") if key in config)
        raise ValueError(
            f"{' or '.join(switches)} is not true in config.json, so the authors' loader makes it a plain {kind} "
            f"model: to open it as a plain {kind} model, delete {there} from config.json"
        )


def _count(config: Values, key: str) -> int:
    count: Any = config.get(key)
    if type(count) is not int or count < 1:
        raise ValueError(f"{key} must be an integer of at least 1, got {count!r}")
    return count

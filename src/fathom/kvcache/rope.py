"""Rotating stored keys to other positions, as the model does, and refusing models for which that is not exact.

A compression moves entries: entry s is rotated back by s, compressed, and rotated forward again by s + F. Only
differences of positions matter to attention, so the tables hold small angles whatever the length of the text. The
tables and the rotation come from the model family's own code; a family is listed once the tests have run on it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.models.registry import recurrence_class
from fathom.models.roles import View
from fathom.models.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# model_type -> the modelling code whose rotation it uses
FAMILIES = {
    "fathom": "qwen3",
    "apertus": "apertus",
    "arcee": "arcee",
    "cohere": "cohere",
    "ernie4_5": "ernie4_5",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "glm": "glm",
    "glm4": "glm4",
    "gpt_neox": "gpt_neox",
    "granite": "granite",
    "helium": "helium",
    "llama": "llama",
    "ministral": "ministral",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "phi": "phi",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "seed_oss": "seed_oss",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}


class OurEmbedding(RotaryEmbedding):
    """Our decoder's angles, which may be of a part of each head, as its family's own code gives them."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[B, T, R]` each."""
        cos, sin = super().forward(x, position_ids)
        return cos, sin[..., sin.shape[-1] // 2 :].repeat(1, 1, 2)


POSITION_LINEAR = ("default", "linear", "llama3", "yarn")


class Rope:
    """One model's rotary embedding, without the attention factor of some scalings."""

    def __init__(self, config: PreTrainedConfig) -> None:
        family = FAMILIES[config.model_type]
        code = import_module(f"transformers.models.{family}.modeling_{family}")
        name = next(name for name in vars(code) if name.endswith("RotaryEmbedding"))
        with torch.device("cpu"):
            self._embed = OurEmbedding(config) if config.model_type == "fathom" else getattr(code, name)(config)
        self._apply: Callable[..., tuple[Tensor, Tensor]] = code.apply_rotary_pos_emb
        self.angles: bytes = self._embed.inv_freq.numpy().tobytes()
        """The angle per position of each pair of channels; models with equal angles can share keys."""
        self._tables: dict[tuple[int, int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def turn(self, x: Tensor, start: int, step: int = 1) -> Tensor:
        """Rotate entry s of `[B, H, n, D]` by `start + s · step` positions."""
        n = x.shape[2] if step else 1
        key = (start, n * step, x.dtype, x.device)
        if key not in self._tables:
            if len(self._tables) > 16:
                self._tables.clear()  # the table of a text's total shift is used once by each layer
            self._tables[key] = self._table(torch.arange(n) * step + start, x)
        cos, sin = self._tables[key]
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        # The function rotates queries and keys alike; there are no queries here.
        turned = self._apply(turned[:0], turned, cos, sin)[1]
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def turns_as(self, other: Rope) -> bool:
        """Whether both rotate by the same angles."""
        return self.angles == other.angles

    @torch.inference_mode(False)  # training may use them later
    @torch.no_grad()
    def _table(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        self._embed.to(x.device)
        cos, sin = self._embed(x, positions.to(x.device).unsqueeze(0))  # [1, n, R]
        scale = self._embed.attention_scaling
        return cos / scale, sin / scale


def refuse(config: PreTrainedConfig, window: int) -> None:
    """Refuse a model whose keys cannot be moved exactly; the error says what can be done instead."""
    kind = config.model_type
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{kind} keeps latent keys (MLA), which cannot be turned back; use method 'full'")
    if kind not in FAMILIES:
        raise ValueError(f"{kind} is not among the families this was tested on ({', '.join(FAMILIES)}); use 'full'")
    scaling = config.rope_parameters.get("rope_type", "one per layer type")
    if scaling not in POSITION_LINEAR:
        raise ValueError(
            f"RoPE scaling {scaling!r} changes its angles with the length of the text, so stored keys cannot be moved; "
            f"set rope_type to one of {', '.join(POSITION_LINEAR)}, or use method 'full'"
        )
    for layer, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer {layer} is {layer_type}, and only attention layers keep keys; use method 'full'")
    sliding = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    if sliding and sliding < window and "sliding_attention" in types:
        raise ValueError(
            f"this model's sliding layers see {sliding} tokens and the memory would hold {window}: "
            f"set window to {sliding} or less, or use method 'full'"
        )
    if kind == "fathom":
        _refuse_fathom(config)


def _refuse_fathom(config: PreTrainedConfig) -> None:
    if config.positions == "learned":
        raise ValueError("positions 'learned' are part of the keys, which cannot be moved; use method 'full'")
    if config.no_rope_layers is not None and not all(config.no_rope_layers):
        raise ValueError("no_rope_layers: layers that do not rotate keys are not supported; use method 'full'")
    if config.k_norm_position == "after_rope":
        raise ValueError("k_norm_position 'after_rope' scales turned keys, which cannot be turned back; use 'full'")
    recurrence = recurrence_class(config)
    view = recurrence.sees(config)
    if view is not View.SAME:
        raise ValueError(
            f"recurrence {config.recurrence!r} reads other trips (view {view.name}), so several entries share a "
            "position; use method 'full', or a recurrence of view SAME"
        )
    if recurrence.halts:
        raise ValueError(f"recurrence {config.recurrence!r} lets tokens halt one by one; use method 'full'")

"""Chooses packed or plain weights: the kind that this processor multiplies faster, measured when a server starts.

Packing takes between 0.6 and 1.2 of the time, by processor and number of threads, and eight bits between 0.3 and 1.7.

`packed.py` packs layers, and decides which can be packed. `checkpoints/int8.py` stores layers in eight bits, and
`huge_pages.py` moves both kinds to huge pages. `server.py` shows the choice in `/health`, and `launch.py` in the log.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from fathom.checkpoints.int8 import Int8Linear
from fathom.errors import SettingsError
from fathom.inference.packed import PackedLinear, available, pack, packable

Timed = nn.Linear | Int8Linear | PackedLinear
L = TypeVar("L", nn.Linear, Int8Linear)
LAYOUTS = ("auto", "packed", "plain")
"""The values of `--layout`."""
ROWS = {"a token": 1, "eight sequences": 8, "a prompt": 64}
"""Numbers of rows that are timed."""
SAMPLE = 1 << 26
"""Most bytes of the weights that are timed, more than most caches hold."""
TURNS = (0, 1, 1, 0) * 3
"""The order in which both are timed; the fastest turn of each counts, since other programs only slow them down."""
ROUNDS, ALIKE = 3, 1.1
"""How often that is done at most: until the two fastest turns of each are as alike as this."""
MOST = 2.0
"""A larger ratio counts as this: on a busy machine one can be forty, and packing never is."""
SLOWER = 1.05
"""From this ratio on, eight bits are refused."""


@dataclass(frozen=True)
class Layout:
    """How the weights of a served model are stored."""

    name: str
    """`packed`, `plain` or `int8`."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """The measured time over that of plain float32, by number of rows; empty if nothing was measured."""

    def __str__(self) -> str:
        """For the log."""
        said = ", ".join(f"{name} takes {ratio:.2f}" for name, ratio in self.ratios.items())
        return f"weights are {self.name}" + (f": of plain float32's time {said}" if said else "")


def lay_out(model: nn.Module, wanted: str = "auto") -> Layout:
    """Pack the linear layers of a model in place, or leave them unpacked, as `wanted` says or as timing decides.

    Args:
        model: The model.
        wanted: `packed`, `plain`, or `auto`, which times both; a model in eight bits is then refused if it is slower.
    """
    if wanted not in LAYOUTS:
        raise SettingsError(f"layout={wanted}: allowed: {', '.join(LAYOUTS)}")
    if any(isinstance(one, Int8Linear) for one in model.modules()):
        return _in_eight_bits(model, wanted)
    found = [one for one in model.modules() if isinstance(one, nn.Linear) and packable(one)]
    if wanted == "plain" or not (found and available()):
        return Layout("plain")
    layers = sample(found)
    ratios = compared(layers, [PackedLinear(one) for one in layers]) if wanted == "auto" else {}
    if math.prod(min(MOST, max(1 / MOST, ratio)) for ratio in ratios.values()) > 1:
        return Layout("plain", ratios)
    pack(model)
    return Layout("packed", ratios)


def _in_eight_bits(model: nn.Module, wanted: str) -> Layout:
    if wanted != "auto":
        return Layout("int8")
    layers = sample([one for one in model.modules() if isinstance(one, Int8Linear)])
    ratios = compared([_in_float32(one) for one in layers], layers)
    if (ratio := ratios["a token"]) > SLOWER:
        raise SettingsError(
            f"weights=int8: on this processor a token takes {ratio:.2f} times as long as in float32; leave weights "
            "out, or add layout=plain to keep int8 for its smaller memory"
        )
    return Layout("int8", ratios)


def _in_float32(layer: Int8Linear) -> nn.Linear:
    made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    made.weight = nn.Parameter(layer.weight, requires_grad=False)
    if layer.bias is not None:
        made.bias = layer.bias
    return made


def sample(layers: Sequence[L]) -> list[L]:
    """A sample of layers spread over the whole model: at most `SAMPLE` bytes in float32, but at least one layer."""
    sizes = [4 * one.in_features * one.out_features for one in layers]
    step = max(1, math.ceil(sum(sizes) / SAMPLE))
    chosen: list[L] = []
    left = SAMPLE
    for start in range(step):
        for layer, size in list(zip(layers, sizes, strict=True))[start::step]:
            if size <= left:
                chosen.append(layer)
                left -= size
    return chosen or [min(layers, key=lambda one: one.in_features * one.out_features)]


@torch.inference_mode()
def compared(plain: Sequence[Timed], others: Sequence[Timed]) -> dict[str, float]:
    """The time of packed or 8-bit layers divided by that of plain ones, by number of rows."""
    ratios, widths = {}, {one.in_features for one in plain}
    for name, rows in ROWS.items():
        given, taken = {width: torch.ones(rows, width) for width in widths}, (list[float](), list[float]())
        for which in TURNS * ROUNDS:
            began = time.perf_counter()
            for layer in (plain, others)[which]:
                layer(given[layer.in_features])
            taken[which].append(time.perf_counter() - began)
            if len(taken[0]) + len(taken[1]) >= len(TURNS) and all(map(_alike, taken)):
                break
        ratios[name] = min(taken[1]) / min(taken[0])
    return ratios


def _alike(seconds: Sequence[float]) -> bool:
    """Whether the two fastest measurements took about equally long, which shows that other load did not slow them."""
    first, second = sorted(seconds)[:2]
    return second <= ALIKE * first

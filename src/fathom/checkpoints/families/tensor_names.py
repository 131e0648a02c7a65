"""Convert tensors to and from other projects' names and shapes by rules; tensors are read one at a time.

A checkpoint is never in memory twice: a renamed tensor is read when the model requests it.

`models/loading.py` refuses a checkpoint that lacks tensors, or has unknown or misshapen ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fathom.checkpoints.file_names import INDEX, WEIGHTS
from fathom.models import FathomConfig

LAYER = "{i}"
"""Stands for a layer's number in a name."""


@dataclass(frozen=True)
class Rule:
    """One tensor of another project's checkpoint, and the Fathom tensors that it contains."""

    theirs: str
    """Its name; `{i}` is a layer's number, and a part in brackets is optional."""
    ours: tuple[str, ...]
    split: Callable[[Tensor, FathomConfig], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor], FathomConfig], Tensor]

    @property
    def pattern(self) -> re.Pattern[str]:
        """A pattern that matches the tensor's name in the other project's files."""
        text = re.escape(self.theirs).replace(r"\[", "(?:").replace(r"\]", ")?")
        return re.compile(text.replace(r"\{i\}", r"(?P<i>\d+)") + r"\Z")

    def name(self, layer: int) -> str:
        """Their complete name."""
        return self.theirs.replace("[", "").replace("]", "").replace(LAYER, str(layer))


def renamed(theirs: str, ours: str) -> Rule:
    """Rename a tensor."""
    return Rule(theirs, (ours,), lambda x, _: (x,), lambda parts, _: parts[0])


def transposed(theirs: str, ours: str) -> Rule:
    """Transpose a matrix."""
    return Rule(theirs, (ours,), lambda x, _: (x.T,), lambda parts, _: parts[0].T.contiguous())


def stacked(
    theirs: str, ours: Sequence[str], sizes: Callable[[FathomConfig], list[int]], flipped: bool = False
) -> Rule:
    """A rule for a tensor that holds several of Fathom's: concatenated by rows, or by columns if it is `flipped`."""

    def split(x: Tensor, config: FathomConfig) -> Sequence[Tensor]:
        return (x.T if flipped and x.ndim == 2 else x).split(sizes(config))

    def join(parts: Sequence[Tensor], config: FathomConfig) -> Tensor:
        whole = torch.cat(tuple(parts))
        return whole.T.contiguous() if flipped and whole.ndim == 2 else whole

    return Rule(theirs, tuple(ours), split, join)


def interleaved(theirs: str, ours: Sequence[str]) -> Rule:
    """A rule for a tensor that holds each head's query, key and value projections in turn: `[H, 3, D, ...]`."""

    def split(x: Tensor, config: FathomConfig) -> Sequence[Tensor]:
        heads = x.view(config.num_attention_heads, 3, config.head_dim, *x.shape[1:])
        return [part.flatten(0, 1) for part in heads.unbind(1)]

    def join(parts: Sequence[Tensor], config: FathomConfig) -> Tensor:
        heads = [x.view(config.num_attention_heads, config.head_dim, *x.shape[1:]) for x in parts]
        return torch.stack(heads, 1).flatten(0, 2)

    return Rule(theirs, tuple(ours), split, join)


def projections(config: FathomConfig) -> list[int]:
    """How many rows of a joint projection belong to queries, to keys and to values."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return [heads * config.head_dim, kv_heads * config.head_dim, kv_heads * config.head_dim]


class Piece:
    """A Fathom tensor within a file; it is read when indexed as `piece[...]`, as transformers does."""

    def __init__(self, file: Any, name: str, rule: Rule | None, part: int, config: FathomConfig) -> None:
        self.file, self.name, self.rule, self.part, self.config = file, name, rule, part, config

    def __getitem__(self, index: Any) -> Tensor:
        whole = self.file.get_tensor(self.name)
        if self.rule is None:
            return whole[index]
        try:
            part = self.rule.split(whole, self.config)[self.part]
        except RuntimeError:
            shape = list(whole.shape)
            raise ValueError(f"{self.name} of shape {shape} cannot be split by the sizes in config.json") from None
        if len(self.rule.ours) > 1:  # a copy, so that a part does not keep the whole tensor in memory
            return part.clone(memory_format=torch.contiguous_format)[index]
        return part.contiguous()[index]

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self[...].shape


def read_tensors(
    directory: Path, rules: Iterable[Rule], unread: Iterable[str], config: FathomConfig
) -> dict[str, Piece]:
    """The tensors of a directory under Fathom's names."""
    patterns = [(rule.pattern, rule) for rule in rules]
    dead = [re.compile(text) for text in unread]
    found: dict[str, Piece] = {}
    for part in sorted(_files(directory)):
        file = safe_open(directory / part, framework="pt")
        for name in file.keys():  # noqa: SIM118  # not a mapping
            if not any(text.search(name) for text in dead):
                found.update(_pieces(file, name, patterns, config))
    return found


def _files(directory: Path) -> set[str]:
    """The weight files: the single file if there is one, else the index's shards; transformers may leave an old
    index."""
    index = directory / INDEX
    if (directory / WEIGHTS).exists() or not index.exists():
        return {WEIGHTS}
    return set(json.loads(index.read_text())["weight_map"].values())


def _pieces(
    file: Any, name: str, patterns: Sequence[tuple[re.Pattern[str], Rule]], config: FathomConfig
) -> Iterator[tuple[str, Piece]]:
    for pattern, rule in patterns:
        if match := pattern.match(name):
            layer = match.groupdict().get("i") or ""
            for part, ours in enumerate(rule.ours):
                yield ours.replace(LAYER, layer), Piece(file, name, rule, part, config)
            return
    yield name, Piece(file, name, None, 0, config)


def to_theirs(tensors: Mapping[str, Tensor], rules: Iterable[Rule], config: FathomConfig) -> dict[str, Tensor]:
    """Fathom's tensors under the other project's names; tensors without a rule keep their names."""
    left = dict(tensors)
    made: dict[str, Tensor] = {}
    for rule in rules:
        for layer in range(config.num_hidden_layers if LAYER in rule.theirs else 1):
            names = [ours.replace(LAYER, str(layer)) for ours in rule.ours]
            if all(name in left for name in names):
                made[rule.name(layer)] = rule.join([left.pop(name) for name in names], config)
    return {**left, **made}

"""The table that `fathom mechanisms` prints: every registered mechanism, and its cost as `models/cost.py` computes
it.

The share is the added FLOPs over 2N, where N is the number of parameters without mechanisms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from fathom.models import FathomConfig
from fathom.models.axes.roles import Cost
from fathom.models.cost import cache_bytes_per_token, count_parameters, flops_per_token, mechanism_cost
from fathom.models.registry import AXES, DEFAULTS, known
from fathom.report.numbers import short
from fathom.report.tables import terminal_table

SEQUENCE = 2048


@dataclass(frozen=True, kw_only=True)
class MechanismRow(Cost):
    """One mechanism: what it is, what it adds to a model per token, and its share of the model's FLOPs."""

    name: str
    axis: str
    summary: str
    paper: str
    closed: dict[str, object] | None
    options: dict[str, object]
    flops_share: float


@dataclass(frozen=True)
class VanillaRow:
    """The cost of the decoder without a mechanism."""

    parameters: int
    flops: float
    sequence_length: int
    cache_bytes: int


OF_SEVERAL = ("across_trips", "per_visit")
"""Options of mixers and residuals that need a recurrence of several iterations."""


def with_mechanism(config: FathomConfig, axis: str, name: str) -> FathomConfig:
    """A model's configuration with one mechanism on one axis (such as `mixer`) and the other axes at their default; the
    options of a mechanism that was set already are kept."""
    keys = config.to_dict()
    if axis != "recurrence" or keys[axis] != name:
        keys["max_trips"] = None  # it depends on the model's own recurrence
    options = dict(keys[f"{axis}_options"]) if keys[axis] == name else {}
    if axis != "recurrence" and keys["recurrence"] != DEFAULTS["recurrence"]:
        options = {key: value for key, value in options.items() if key not in OF_SEVERAL}
    for other in AXES:
        keys |= {other: DEFAULTS[other], f"{other}_options": {}}
    return FathomConfig(**{**keys, axis: name, f"{axis}_options": options})


def mechanism_rows(config: FathomConfig) -> Iterator[MechanismRow]:
    """One row per mechanism: what it is, and what it adds to a model in bfloat16."""
    vanilla = with_mechanism(config, "mixer", "none")
    # 2N, the usual count of a forward pass, so that shares compare with those of the papers
    forward = 2 * count_parameters(vanilla)
    for mechanism in known().values():
        chosen = with_mechanism(config, mechanism.axis, mechanism.name)
        cost = mechanism_cost(chosen)
        yield MechanismRow(
            **vars(cost),
            name=mechanism.name,
            axis=mechanism.axis,
            summary=mechanism.summary,
            paper=mechanism.paper,
            closed=None if mechanism.closed is None else dict(mechanism.closed),
            options=getattr(chosen, f"{mechanism.axis}_options"),
            flops_share=cost.flops / forward,
        )


def vanilla_row(config: FathomConfig) -> VanillaRow:
    """The cost of the decoder without a mechanism: every axis has its default value."""
    vanilla = with_mechanism(config, "mixer", "none")
    return VanillaRow(
        parameters=count_parameters(vanilla),
        flops=flops_per_token(vanilla, SEQUENCE),
        sequence_length=SEQUENCE,
        cache_bytes=cache_bytes_per_token(vanilla),
    )


def mechanism_table(config: FathomConfig) -> Table:
    """The rows of `mechanism_rows` as a table for a terminal, at most 80 columns wide."""
    vanilla = vanilla_row(config)
    caption = (
        f"vanilla: {vanilla.parameters:,} parameters, {_short(vanilla.flops)} FLOPs at {SEQUENCE} tokens, "
        f"{vanilla.cache_bytes:,} cache bytes. Shares are relative to 2N FLOPs; state is freed after its token."
    )
    columns = ["mechanism", "paper", "parameters", "FLOPs", "share", "cache B", "state B"]
    rows: list[list[str]] = []
    for axis, found in groupby(mechanism_rows(config), key=lambda row: row.axis):
        rows.append([axis, *[""] * 6])
        for row in found:
            numbers = (f"{row.parameters:,}", _short(row.flops), _share(row.flops_share))
            state = (_short(row.cache_bytes), _short(row.transient_bytes))
            rows.append([f" {row.name}", row.paper.removeprefix("arXiv ").split(",")[0], *numbers, *state])
    table = terminal_table("Cost that each mechanism adds, per token of a forward pass", columns, rows, left=2)
    table.caption, table.caption_justify = caption, "left"
    return table


def _short(number: float) -> str:
    return short(number, digits=3, space="", whole=1e4)


def _share(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.0f}%"

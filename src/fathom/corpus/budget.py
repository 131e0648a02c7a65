"""How many tokens a mixture takes from each collection, how often each is read, and whether there are enough.

`data/mixture.py` orders the sequences so that every prefix keeps the shares; `publish.py` writes this order to
`mixture.u8`, or to `mixture.u16` for more than 256 collections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fathom.data.mixture import FINENESS, whole_weights
from fathom.errors import DataError

LEAST = 100
"""The smallest weight that shares are given, so that rounding changes no share by more than half a percent ..."""
FINEST = 1 << 19
"""... unless their sum would exceed this: the order of so many rows takes half a second to compute."""


@dataclass(frozen=True)
class Budget:
    """A feasible mixture, as in `mixture.json`."""

    tokens: int
    weights: dict[str, int]
    """Shares as the smallest whole numbers."""
    available: dict[str, int]
    epochs: dict[str, float]
    """How often each collection is read."""
    largest: int
    """Largest number of tokens that the limit on epochs allows."""
    limited_by: str
    """The collection that sets this limit."""


def plan_budget(
    available: Mapping[str, int], shares: Mapping[str, float], tokens: int | None, most_epochs: float
) -> Budget:
    """The budget of a mixture. If it is infeasible, the error names the scarce collection and the largest budget.

    Args:
        available: Tokens of each collection.
        shares: Share of the tokens read, by collection; empty for shares in proportion to `available`.
        tokens: The budget; None for one epoch of the collection that runs out first.
        most_epochs: How often a collection may be read.
    """
    for name in shares:
        if not available.get(name):
            raise DataError(
                f"mix.shares.{name}: this collection has no training tokens left: its text was unreadable, dropped or "
                "held out"
            )
    names = list(shares) or [name for name, count in available.items() if count]
    if not names:
        raise DataError("no tokens are left to train on in any collection")
    weights = _weights([shares.get(name, available[name]) for name in names])
    total = sum(weights)
    # N w / (W a) <= e, in whole numbers as far as e is one: N <= e a W / w.
    limits = {name: most_epochs * available[name] * total / weight for name, weight in zip(names, weights, strict=True)}
    scarce = min(limits, key=lambda name: limits[name])
    largest = int(limits[scarce])
    wanted = int(limits[scarce] / most_epochs) if tokens is None else tokens
    if wanted > largest:
        epochs = wanted * weights[names.index(scarce)] / total / available[scarce]
        raise DataError(
            f"mix.tokens={wanted}: {scarce} has {available[scarce]:,} tokens and would be read {epochs:.3g} times, "
            f"more often than mix.epochs={most_epochs:g}; allowed: at most {largest:,} tokens",
            1,
        )
    return Budget(
        tokens=wanted,
        weights=dict(zip(names, weights, strict=True)),
        available={name: available[name] for name in names},
        epochs={name: wanted * weight / total / available[name] for name, weight in zip(names, weights, strict=True)},
        largest=largest,
        limited_by=scarce,
    )


def _weights(shares: Sequence[float]) -> list[int]:
    """Shares as whole numbers, finer than four digits where one is small: rounded up, the smallest would run out
    first."""
    finer = math.ceil(LEAST * math.fsum(shares) / min(shares))
    return whole_weights(shares, max(FINENESS, min(finer, FINEST)))

"""The `ladder` section of a ladder's file. Nothing here waits for torch, so that the command's help can list it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fathom.settings import Rule, Section, recipes_folder

STEEPEST, WIDEST = 10, 1 << 20
"""Bounds of exponents and of the multiple of an MLP's width, beyond which numbers overflow."""


@dataclass(frozen=True)
class Rules(Section, section="ladder"):
    """The `ladder` section: sizes, budgets, seeds, and what is run beside the rungs."""

    layers: tuple[int, ...] = ()
    """depth of each rung, small to large; needed"""
    hidden: tuple[int, ...] = ()
    """width of each rung; heads keep their width, the MLP is 8/3 of it; needed"""
    seeds: tuple[int, ...] = ()
    """seeds of each rung; needed"""
    tokens_per_parameter: tuple[float, ...] = (10.0,)
    """tokens of a run over the control's parameters without embeddings; further budgets are for φ alone"""
    tokens: int | None = None
    """tokens of every run, whatever its size; null takes tokens_per_parameter"""
    mlp_multiple: int = 16
    """the MLP's width is rounded to a multiple of this"""
    batch_exponent: float = 0.5
    """the batch grows as (tokens of the rung / tokens of the first rung) to this power"""
    rate_exponents: tuple[float, float, float] | None = None
    """exponents of tokens, width and batch in the rule that scales the learning rate; null takes those of optim.name"""
    tune_points: tuple[int, ...] = (4, 3)
    """learning rates a factor 2 apart that each arm tries, at the first rung, the second, ...; empty tunes nothing"""
    tune_seeds: tuple[int, ...] = (2, 1)
    """seeds for each of these learning rates"""
    tune_domains: tuple[str, ...] = ()
    """held-out domains whose mean loss is tuned; empty tunes the loss of all"""
    twin: tuple[int, ...] = (5, 2)
    """seeds of the control with other initial values, at the first rung, the second, ..."""
    parameters: bool = True
    """add a control with a wider MLP for each arm that adds more than 0.5 % of parameters"""
    seal: bool = True
    """of three rungs or more: predict the last one, keep the prediction's hash, and only then run it"""
    check: bool = True
    """after the last rung, try half and twice the rate there"""
    pairs: int = 12
    """how often an arm is timed A B B A; 0 for not at all"""

    def rules(self) -> Iterator[Rule]:
        """Checks beyond the types of the fields."""
        for key in ("layers", "hidden", "seeds"):
            yield bool(getattr(self, key)), key, "allowed: one number for each size, at least one"
        count = len(self.layers)
        yield all(layers >= 1 for layers in self.layers), "layers", "allowed: 1 or more"
        yield len(self.hidden) == count, "hidden", f"allowed: as many as ladder.layers, {count}"
        yield len(self.seeds) == count, "seeds", f"allowed: as many as ladder.layers, {count}"
        yield all(seeds >= 1 for seeds in self.seeds), "seeds", "allowed: 1 or more for each rung"
        budgets = self.tokens_per_parameter
        positive = bool(budgets) and all(0 < ratio < math.inf for ratio in budgets)
        yield positive, "tokens_per_parameter", "allowed: positive numbers, at least one"
        alike = len(set(budgets)) < len(budgets)
        yield not alike, "tokens_per_parameter", "allowed: different numbers: φ stands on budgets that differ"
        yield abs(self.batch_exponent) <= STEEPEST, "batch_exponent", f"allowed: -{STEEPEST} to {STEEPEST}"
        steep = any(not abs(exponent) <= STEEPEST for exponent in self.rate_exponents or ())
        yield not steep, "rate_exponents", f"allowed: -{STEEPEST} to {STEEPEST} each, or null"
        yield self.tokens is None or self.tokens >= 1, "tokens", "allowed: 1 or more, or null"
        one = self.tokens is None or len(budgets) == 1
        yield one, "tokens", "allowed: null where ladder.tokens_per_parameter has several budgets"
        yield len(self.tune_points) <= count, "tune_points", f"allowed: at most one number for each of {count} rungs"
        parabola = all(points >= 3 for points in self.tune_points)
        yield parabola, "tune_points", "allowed: 3 or more: fewer make no parabola"
        enough = len(self.tune_seeds) >= len(self.tune_points) and all(seeds >= 1 for seeds in self.tune_seeds)
        yield enough, "tune_seeds", "allowed: a number of seeds for each of ladder.tune_points"
        yield all(seeds >= 0 for seeds in self.twin), "twin", "allowed: 0 or more"
        yield self.pairs >= 0, "pairs", "allowed: 0 or more"
        yield 1 <= self.mlp_multiple <= WIDEST, "mlp_multiple", f"allowed: 1 to {WIDEST}"

    @property
    def sealed(self) -> bool:
        """Whether the last rung is predicted before it runs."""
        return self.seal and len(self.layers) >= 3


def ladders_folder() -> Path:
    """Where the ladders that come with Fathom lie."""
    return recipes_folder() / "ladders"

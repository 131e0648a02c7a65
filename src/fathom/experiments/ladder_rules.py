"""The `ladder` section of a ladder's YAML file. It does not import torch, so that `--help` stays fast.

`rungs.py` applies the rules on sizes, tokens, batches and controls, and reads an arm's `ladder.layers`. `stages.py`
applies those on tuning, the seed control, the seal and the check. `multipliers.py` decides what a report may claim or
extrapolate.
"""

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
    """The `ladder` section: model sizes, budgets, seeds and controls."""

    layers: tuple[int, ...] = ()
    """number of layers of each model size, small to large; required"""
    hidden: tuple[int, ...] = ()
    """hidden size of each model size; required. The size of a head stays the same; the MLP is 8/3
    times as wide as the hidden size"""
    seeds: tuple[int, ...] = ()
    """number of seeds of each model size; required"""
    tokens_per_parameter: tuple[float, ...] = (10.0,)
    """tokens of a run divided by the control's parameters without embeddings; budgets after the first only serve to
    estimate φ, the value of a loop iteration"""
    tokens: int | None = None
    """tokens of every run, the same at every model size; null means that ladder.tokens_per_parameter decides"""
    mlp_multiple: int = 16
    """the MLP's width is rounded to a multiple of this"""
    batch_exponent: float = 0.5
    """the batch size grows as (tokens of a run at a model size / tokens at the first model size) to this power"""
    lr_exponents: tuple[float, float, float] | None = None
    """exponents of tokens, width and batch in the rule that scales the learning rate; null: those for
    optim.name"""
    tune_points: tuple[int, ...] = (4, 3)
    """number of learning rates, a factor 2 apart, that each arm tries at the first size, the second, ...; empty tunes
    nothing"""
    tune_seeds: tuple[int, ...] = (2, 1)
    """number of seeds for each learning rate of ladder.tune_points, at the first size, the second, ..."""
    tune_domains: tuple[str, ...] = ()
    """held-out domains on whose mean loss the learning rate is chosen; empty means all"""
    seed_control: tuple[int, ...] = (5, 2)
    """number of seeds of the seed control (the control with other initial values) at the first size, the second, ..."""
    parameters: bool = True
    """for each arm with over 0.5 % more parameters than the control: add a second control, whose wider MLP gives it as
    many parameters as the arm"""
    seal: bool = True
    """with three or more model sizes: predict the arms' differences and multipliers at the largest size, and fix the
    prediction by a hash before that size is trained"""
    check: bool = True
    """try half and twice the learning rate at the largest size"""
    contrasts: str = ""
    """sums of the losses of several arms, such as an interaction, to test at the largest size: comma-separated
    NAME=ARM - ARM - ARM + ARM"""
    pairs: int = 12
    """rounds in which each arm A is timed next to the control B, in the order A B B A; 0 for none"""

    def rules(self) -> Iterator[Rule]:
        """Rules for the section's values that go beyond the types of the fields."""
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
        yield not alike, "tokens_per_parameter", "allowed: different numbers, because φ needs different budgets"
        yield abs(self.batch_exponent) <= STEEPEST, "batch_exponent", f"allowed: -{STEEPEST} to {STEEPEST}"
        steep = any(not abs(exponent) <= STEEPEST for exponent in self.lr_exponents or ())
        yield not steep, "lr_exponents", f"allowed: -{STEEPEST} to {STEEPEST} each, or null"
        yield self.tokens is None or self.tokens >= 1, "tokens", "allowed: 1 or more, or null"
        one = self.tokens is None or len(budgets) == 1
        yield one, "tokens", "allowed: null, because ladder.tokens_per_parameter has several budgets"
        yield len(self.tune_points) <= count, "tune_points", f"allowed: at most one number for each of {count} rungs"
        parabola = all(points >= 3 for points in self.tune_points)
        yield parabola, "tune_points", "allowed: 3 or more: fewer make no parabola"
        enough = len(self.tune_seeds) >= len(self.tune_points) and all(seeds >= 1 for seeds in self.tune_seeds)
        yield enough, "tune_seeds", "allowed: a number of seeds for each of ladder.tune_points"
        yield all(seeds >= 0 for seeds in self.seed_control), "seed_control", "allowed: 0 or more"
        yield self.pairs >= 0, "pairs", "allowed: 0 or more"
        yield 1 <= self.mlp_multiple <= WIDEST, "mlp_multiple", f"allowed: 1 to {WIDEST}"

    @property
    def sealed(self) -> bool:
        """Whether a prediction for the largest size is sealed before that size is trained."""
        return self.seal and len(self.layers) >= 3


def ladders_folder() -> Path:
    """The directory of the packaged ladders."""
    return recipes_folder() / "ladders"

"""The `ladder` section of a ladder's file. Nothing here waits for torch, so that the command's help can list it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fathom.recipe import recipes_folder


@dataclass(frozen=True)
class Rules:
    """The `ladder` section: sizes, budgets, seeds, and what is run beside the rungs."""

    layers: tuple[int, ...]
    """depth of each rung, small to large"""
    hidden: tuple[int, ...]
    """width of each rung; heads keep their width, the MLP is 8/3 of it"""
    seeds: tuple[int, ...]
    """seeds of each rung"""
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

    @property
    def sealed(self) -> bool:
        """Whether the last rung is predicted before it runs."""
        return self.seal and len(self.layers) >= 3


def ladders_folder() -> Path:
    """Where the ladders that come with Fathom lie."""
    return recipes_folder() / "ladders"

"""HuRef's necessity experiment: a term of the loss that drives a model's weights away from another model's direction.

    L = L_CE + λ |cos(θ, θ₀)|        θ, θ₀: all matrices of the model and of the base, each as one vector

HuRef argues that a stolen model keeps the direction of its weights, because a model that is made to lose it breaks.
Train with this hook, and compare losses and scores of `fathom lineage compare` at several λ:
`benchmarks/lineage/necessity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fathom.errors import SettingsError
from fathom.training.hooks import Hook, ObservedRun

Pairs = list[tuple[Tensor, Tensor]]


class Away(Hook):
    """Adds the gradient of λ |cos(weights, base weights)| to each matrix's gradient: `train(recipe, run_dir,
    callbacks=[Away(base, 30.0)])`.

    Args:
        base: The base model's `state_dict`; parameters with fewer than two axes are left out.
        weight: λ.
    """

    def __init__(self, base: Mapping[str, Tensor], weight: float) -> None:
        if weight < 0:
            raise SettingsError(f"weight={weight:g}: allowed: 0 or more")
        self.base, self.weight = base, weight
        self._pairs: Pairs = []
        self._share = 1.0
        self._norm = self._cosine = 0.0

    def before_run(self, run: ObservedRun) -> None:
        """Register a gradient hook on every trainable matrix that the base model has too."""
        if run.ranks.world_size > 1:
            raise SettingsError("Away needs a single process, because every rank holds only a shard of the weights")
        named = run.training.model.named_parameters()
        self._pairs = [
            (weight, self.base[name].to(weight.device, weight.dtype))
            for name, weight in named
            if weight.ndim > 1 and weight.requires_grad and name in self.base
        ]
        if not self._pairs:
            raise SettingsError("Away: the base model has none of the weight matrices that this model trains")
        rows = run.recipe.rows_per_step
        self._share = min(run.recipe.train.micro_batch, rows) / rows  # each micro-batch adds its share
        for weight, base in self._pairs:
            weight.register_hook(self._added(weight, base))

    def before_step(self, run: ObservedRun) -> None:
        """Measure the cosine between the model's and the base's weights, once over all matrices together."""
        self._cosine, self._norm = cosine(self._pairs)
        if run.step % run.recipe.train.log_every == 0:
            run.log({"cosine": self._cosine})

    def _added(self, weight: Tensor, base: Tensor) -> Callable[[Tensor], Tensor]:
        length = math.sqrt(sum(float(one.double().square().sum()) for _, one in self._pairs))

        def add(gradient: Tensor) -> Tensor:
            """∂|cos| / ∂W = sign(cos) · (W₀ / (|θ| |θ₀|) − cos · W / |θ|²)."""
            with torch.no_grad():
                term = base / (self._norm * length) - weight * (self._cosine / self._norm**2)
                sign = math.copysign(self.weight * self._share, self._cosine)
                return gradient + sign * term.to(gradient.dtype)

        return add


@torch.no_grad()
def cosine(pairs: Pairs) -> tuple[float, float]:
    """cos(θ, θ₀) and |θ|."""
    dot = sum(float((weight.double() * base.double()).sum()) for weight, base in pairs)
    norm = math.sqrt(sum(float(weight.double().square().sum()) for weight, _ in pairs))
    other = math.sqrt(sum(float(base.double().square().sum()) for _, base in pairs))
    return dot / (norm * other), norm

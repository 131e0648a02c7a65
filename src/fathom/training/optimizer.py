"""Optimizers and learning-rate schedules, by name.

An optimizer is a class in `OPTIMIZERS`, made by `of(groups, optim)`, that declares two things:

- `only_matrices`: it updates the layers' matrices and adamw the rest; otherwise it updates everything.
- `reads_found_inf`: its step changes nothing if its attribute `found_inf` is 1. If false, the host reads whether to
  skip the step, which waits for the device.

`freeze` decides which weights train, by `optim.only`; without it all do. `shares` reads `optim.groups`. `decays`
decides which parameters have weight decay: all of two or more dimensions but those in their module's `no_weight_decay`,
which `models/hosts/build.py` sets for expert biases and state rates of hosted families. With muon, parameters of three
dimensions, such as stacked experts and convolution kernels, are adamw's.

`branching.py` decides when a branch must set `optim.schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fathom.errors import SettingsError
from fathom.recipe import Optim
from fathom.training.adamw import AdamW
from fathom.training.muon import Muon


class Kind(Protocol):
    """The interface that every class in `OPTIMIZERS` has."""

    only_matrices: bool
    reads_found_inf: bool

    @classmethod
    def of(cls, groups: Sequence[dict[str, Any]], optim: Optim) -> torch.optim.Optimizer:
        """Create the optimizer of some parameter groups, with the recipe's settings."""
        ...


OPTIMIZERS: dict[str, type[Kind]] = {"adamw": AdamW, "muon": Muon}
"""The optimizers by the name in `optim.name`, which `Optim` in recipe.py lists too."""


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0: the peak follows the warm-up, the last step is at the floor."""
    warmup = optim.rising(steps)
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    last = steps - 1
    start = last - optim.falling(steps) if optim.schedule == "wsd" else warmup
    progress = min(1.0, max(0, step - start) / max(1, last - start))
    shape = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "constant": 1.0,
    }[optim.schedule]
    return optim.lr * (optim.floor + (1 - optim.floor) * shape)


def leaves_peak(optim: Optim, step: int, steps: int) -> bool:
    """Whether a step, counted from 0, is past the peak, where the learning rate depends on `steps`."""
    if optim.schedule == "constant":
        return False
    return step > (steps - 1 - optim.falling(steps) if optim.schedule == "wsd" else optim.rising(steps))


def decays(model: nn.Module) -> dict[str, bool]:
    """For every parameter, by name, whether weight decay applies: it applies to matrices, unless their module exempts
    them."""
    answer = {}
    for prefix, module in model.named_modules():
        exempt = getattr(module, "no_weight_decay", ())
        for name, parameter in module.named_parameters(recurse=False):
            answer[f"{prefix}.{name}" if prefix else name] = parameter.ndim >= 2 and name not in exempt
    # A tied parameter is in two modules; its first name is used.
    return {name: answer[name] for name, _ in model.named_parameters()}


def named(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter's name, or is a prefix of the name that ends before a dot."""
    return name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def freeze(model: nn.Module, only: Sequence[str]) -> None:
    """Train the named parameters only: the others get no gradient, no optimizer state and no decay."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in only:
        if not any(named(name, pattern) for name in names):
            raise SettingsError(
                f"optim.only={pattern}: matches no parameter of this model, which has {', '.join(names[:3])}, …"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not only or any(named(name, pattern) for pattern in only))


class Share(NamedTuple):
    """Factors on a parameter's learning rate and weight decay."""

    lr: float = 1.0
    weight_decay: float = 1.0


def shares(model: nn.Module, optim: Optim) -> dict[str, tuple[str | None, Share]]:
    """For every trainable parameter, by name: the pattern of `optim.groups` that matches the name, and the parameter's
    factors."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    found: dict[str, tuple[str | None, Share]] = {name: (None, Share()) for name in trained}
    for pattern, factors in optim.groups.items():
        mine = [name for name in trained if named(name, pattern)]
        if not mine:
            raise SettingsError(
                f"optim.groups={pattern}: matches no trainable parameter; there are {', '.join(trained[:3])}, …"
            )
        for name in mine:
            if found[name][0] is not None:
                raise SettingsError(f"optim.groups: {name} is matched twice, by {found[name][0]} and by {pattern}")
            found[name] = (pattern, Share(**factors))
    return found


class Optimizer:
    """The optimizer of a run: one for all parameters, or one for the matrices combined with adamw for the rest."""

    def __init__(self, model: nn.Module, optim: Optim) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        decay, share = decays(model), {name: share for name, (_, share) in shares(model, optim).items()}
        hidden = {n for n, p in self.parameters.items() if ".layers." in n and p.ndim == 2 and decay[n]}
        kind = OPTIMIZERS[optim.name]
        chosen = hidden if kind.only_matrices else set(self.parameters)

        def groups(names: Iterable[str]) -> list[dict[str, Any]]:
            """Parameter groups by weight decay and learning-rate factor; groups with weight decay come first."""
            kinds: dict[tuple[bool, Share], list[Tensor]] = {}
            for name in sorted(names, key=lambda name: (not decay[name], order[name])):
                kinds.setdefault((decay[name], share[name]), []).append(self.parameters[name])
            return [
                {"params": found, "weight_decay": optim.weight_decay * of.weight_decay * decays, "share": of.lr}
                for (decays, of), found in kinds.items()
            ]

        order = {name: i for i, name in enumerate(self.parameters)}
        rest = [name for name in self.parameters if name not in chosen]
        made: list[tuple[type[Kind], Iterable[str]]] = [(AdamW, rest), (kind, chosen)]
        self.parts: list[torch.optim.Optimizer] = [kind.of(groups(names), optim) for kind, names in made if names]

    def step(self, lr: float, skip: Tensor) -> None:
        """Update the parameters, unless `skip` is 1. If all parts read `skip` on the device, the host does not wait."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["share"]
        on_device = [getattr(part, "reads_found_inf", False) for part in self.parts]
        if not all(on_device) and bool(skip.item()):
            return
        for part in self.parts:
            _tell(part, skip)
            part.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors by parameter name: `exp_avg.model.norm.weight` and so on, of every parameter.

        Parameters that had no gradient yet get their initial state, so that a checkpoint has the same names at every
        step.
        """
        self._complete()
        found = {}
        for name, parameter in self.parameters.items():
            for part in self.parts:
                for kind, tensor in part.state.get(parameter, {}).items():
                    if not isinstance(tensor, Tensor):
                        optimizer = type(part).__name__
                        raise TypeError(f"{optimizer}: the state {kind} of {name} is not a tensor: {tensor!r}")
                    found[f"{kind}.{name}"] = tensor
        return found

    def _complete(self) -> None:
        """Create the optimizer state that a first gradient would create; everything else is unchanged."""
        for part in self.parts:
            every = [parameter for group in part.param_groups for parameter in group["params"]]
            late = [parameter for parameter in every if parameter not in part.state]
            if not late:
                continue
            gradients = [parameter.grad for parameter in every]
            for parameter in every:
                parameter.grad = None if parameter in part.state else torch.zeros_like(parameter)
            rates = [(group["lr"], group["weight_decay"]) for group in part.param_groups]
            for group in part.param_groups:
                group["lr"] = group["weight_decay"] = 0.0
            _tell(part, torch.zeros((), device=every[0].device))
            part.step()
            for group, (lr, decay) in zip(part.param_groups, rates, strict=True):
                group["lr"], group["weight_decay"] = lr, decay
            for parameter in late:
                if (steps := part.state[parameter].get("step")) is not None:
                    steps.zero_()
            for parameter, gradient in zip(every, gradients, strict=True):
                parameter.grad = gradient


def _tell(part: torch.optim.Optimizer, skip: Tensor) -> None:
    """Set the attributes `found_inf` and `grad_scale`, by which an optimizer can skip a step on the device."""
    if getattr(part, "reads_found_inf", False):
        part.__dict__.update(found_inf=skip, grad_scale=None)

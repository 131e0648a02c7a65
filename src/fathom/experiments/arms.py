"""Arms of a comparison: recipes that differ only in their mechanism and the overrides written after it.

`as_large` replaces `as-large-as-ARM` by a number, also for ladders, and refuses a difference above 5 %. `rungs.py` has
the other rules for arms of a ladder: `ladder.layers`, the `as-large-as-` controls, and no learning rate of an arm's
own. `models/registry.py` (`parse_mechanism`) reads names that are joined by `+`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fathom.errors import SettingsError
from fathom.models import FathomConfig
from fathom.models.cost import count_parameters, training_visits
from fathom.models.registry import parse_mechanism
from fathom.recipe import Recipe, differences, parse_recipe
from fathom.training.trained_flops import step_flops

Equal = Literal["tokens", "flops", "trips"]
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
LONGEST = 100
"""Characters of an arm's name, which names files and directories."""
NEAR = 0.05
"""By how much of its parameters such an arm may differ from the other one."""
MOST_REFUSED = 1024
"""Numbers from 1 on that such a key is tried with, until it takes two."""
AS_LARGE = "as-large-as-"
"""In front of an arm's name as the value of a key: the number that gives both arms as many parameters."""
OPEN = ("model.experts", "model.intermediate_size")
"""Keys that may be so."""
SHARED = ("data", "evaluate", "train.seed", "train.tokens_per_step")
"""Keys that an arm may not override, because arms are paired."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    name: str
    mechanism: str
    overrides: tuple[str, ...] = ()
    """`key=value` on top of the mechanism."""

    def recipe(self, base: Recipe) -> Recipe:
        """The base recipe with this arm's mechanism and overrides."""
        self._refuse_shared([override.partition("=")[0].strip() for override in self.overrides])
        model = dict(base.model)
        try:
            axes = parse_mechanism(self.mechanism)
        except ValueError as error:
            raise SettingsError(f"arm {self.name}: {error}") from error
        for axis, chosen in axes.items():
            if model.get(axis) != chosen:
                model.pop(f"{axis}_options", None)  # they belong to another mechanism
            model[axis] = chosen
        try:
            recipe = parse_recipe({**base.to_dict(), "model": model}, self.overrides)
            recipe.config()
        except ValueError as error:
            raise SettingsError(f"arm {self.name}: {error}") from error
        self._refuse_shared(differences(base, recipe, ignore=()))  # as train={seed: 1} would
        return recipe

    def _refuse_shared(self, keys: Sequence[str]) -> None:
        for key in keys:
            if any(key == shared or key.startswith(f"{shared}.") for shared in SHARED):
                raise SettingsError(
                    f"arm {self.name}: {key} must be equal in all arms, because they are paired; an arm may set "
                    f"model.*, optim.*, train.steps and execution settings. {key}=... without an arm's name sets it "
                    "for all arms"
                )

    @property
    def open(self) -> list[int]:
        """Indices of the overrides whose value is `as-large-as-OTHER`, which a number must replace."""
        values = [word.partition("=")[2].strip(" '\"") for word in self.overrides]
        return [i for i, value in enumerate(values) if AS_LARGE in (value if "{" in value else value[: len(AS_LARGE)])]

    @property
    def own_steps(self) -> bool:
        """Whether the arm sets its own `train.steps` instead of the equal budget."""
        words = [override.partition("=") for override in self.overrides]
        return any(key == "train.steps" or (key == "train" and "steps" in value) for key, _, value in words)


def parse_arms(text: str) -> list[Arm]:
    """Parse arms from `vanilla,mine=depth_attention;model.mixer_options.stride=1`; the first arm is the control."""
    arms = [_parse_arm(part.strip()) for part in _parts(text)]
    for i, arm in enumerate(arms):
        if arm.name in [other.name for other in arms[:i]]:
            raise SettingsError(f"`arms`: {arm.name} appears twice; NAME={arm.mechanism} renames an arm")
    if len(arms) < 2:
        raise SettingsError(f"arms={text}: a comparison needs a control and at least one more arm")
    return arms


def arm_recipes(base: Recipe, arms: Sequence[Arm], equal: Equal) -> dict[str, Recipe]:
    """The recipe of every arm, with `train.steps` set so that the arm spends as many tokens, training FLOPs or layer
    passes as the control, unless the arm sets its own.

    Args:
        base: What all arms share.
        arms: The control first.
        equal: The budget.
    """
    # An arm's own steps may end before a phase begins; `_beside` adds the phases that it reaches.
    unphased = base.override("data.phases=[]") if base.data.phases else base
    recipes = {
        arm.name: as_large(arm, arms, base).recipe(unphased if arm.own_steps and arm != arms[0] else base)
        for arm in arms
    }
    control = recipes[arms[0].name]
    budget = _spent(control, equal)
    for arm in arms[1:]:
        recipe = recipes[arm.name]
        scaled = max(1, round(budget / (_spent(recipe, equal) / recipe.train.steps)))
        steps = recipe.train.steps if arm.own_steps else scaled
        recipes[arm.name] = _beside(control, recipe, steps)
    return recipes


def as_large(arm: Arm, arms: Sequence[Arm], base: Recipe) -> Arm:
    """An arm with `as-large-as-OTHER` (for instance as the value of `model.experts`) replaced by the integer that
    brings the arm's parameters nearest to those of the arm OTHER. The embedding and the head do not count.
    """
    if not arm.open:
        return arm
    place, *more = arm.open
    key, _, value = (word.strip(" '\"") for word in arm.overrides[place].partition("="))
    name, others = value.removeprefix(AS_LARGE), {one.name: one for one in arms if not one.open}
    if more or key not in OPEN or name not in others:
        raise SettingsError(
            f"arm {arm.name}: {key}={value}: allowed: {AS_LARGE}ARM for one of {' and '.join(OPEN)}, where ARM is "
            f"{' or '.join(others) or 'an arm with numbers'}"
        )

    def with_number(number: int) -> Arm:
        return replace(arm, overrides=(*arm.overrides[:place], f"{key}={number}", *arm.overrides[place + 1 :]))

    def parameters(number: int) -> int:
        return without_embeddings(with_number(number).recipe(base).config())

    wanted = without_embeddings(others[name].recipe(base).config())
    first, step = _allowed(parameters, key.rpartition(".")[2])
    least = parameters(first)
    each = max(parameters(first + step) - least, 1)  # parameters are linear in the number
    nearest = first + step * max(0, round((wanted - least) / each))
    if abs((found := parameters(nearest)) - wanted) > NEAR * wanted:
        raise SettingsError(
            f"arm {arm.name}: {key}={value}: the nearest number is {nearest}, with {found:,} instead of {wanted:,} "
            "parameters; write this number to accept it"
        )
    return with_number(nearest)


def _allowed(parameters: Callable[[int], int], key: str) -> tuple[int, int]:
    """The smallest value that a configuration key may have, and the distance to the next allowed value. Errors of other
    keys are raised."""
    found: list[int] = []
    for number in range(1, MOST_REFUSED + 1):
        try:
            parameters(number)
        except SettingsError as error:
            if key not in str(error):
                raise
            refused = error
            continue
        found.append(number)
        if len(found) == 2:
            return found[0], found[1] - found[0]
    raise refused


def without_embeddings(config: FathomConfig) -> int:
    """Number of parameters without the embedding and the head."""
    tables = 1 if config.tie_word_embeddings else 2
    return count_parameters(config) - tables * config.vocab_size * config.hidden_size


def _beside(control: Recipe, recipe: Recipe, steps: int) -> Recipe:
    """A recipe of `steps` steps that reads the same data as the control at every step: its data phases begin at the
    same steps. Phases that it does not reach are dropped; their collections stay, because the data order depends on all
    of them.
    """
    planned = control.data.later(control.train.steps)
    if steps == control.train.steps or not planned:
        return replace(recipe, data=control.data).override(f"train.steps={steps}")
    mixture = {name: control.data.mixture.get(name, 0.0) for name in control.data.collections}
    phases = [{"at": at, "mixture": shares} for at, shares in planned if at < steps]
    words = (f"data.{key}={json.dumps(value)}" for key, value in (("mixture", mixture), ("phases", phases)))
    return recipe.override(f"train.steps={steps}", *words)


def training_flops(recipe: Recipe) -> float:
    """Training FLOPs of a whole run, of the parameters that it trains; see `training/trained_flops.py`."""
    return step_flops(recipe) * tokens(recipe)


def tokens(recipe: Recipe) -> int:
    """Tokens a whole run sees."""
    return recipe.train.steps * recipe.train.tokens_per_step


def training_trips(recipe: Recipe) -> float:
    """Forward passes through the whole layer stack during training, summed over all tokens of a run."""
    config = recipe.config()
    return training_visits(config)[0] / config.num_hidden_layers * tokens(recipe)


def _spent(recipe: Recipe, equal: Equal) -> float:
    return {"tokens": tokens, "flops": training_flops, "trips": training_trips}[equal](recipe)


def _parts(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _parse_arm(text: str) -> Arm:
    head, *overrides = (part.strip() for part in text.split(";"))
    name, equals, mechanism = (part.strip() for part in head.partition("="))
    mechanism = mechanism if equals else name
    try:
        parse_mechanism(mechanism)
    except ValueError as error:
        raise SettingsError(f"arms={text}: {error}") from error
    if overrides and not equals:
        raise SettingsError(f"arms={text}: an arm with overrides needs a name, as in mine={text}")
    if len(name) > LONGEST:
        raise SettingsError(f"arms={name[:20]}…: a name of {len(name)} characters; allowed: {LONGEST} at most")
    if not NAME.fullmatch(name):
        raise SettingsError(f"arms={text}: an arm's name may contain letters, digits and _ . + -")
    return Arm(name, mechanism, tuple(overrides))

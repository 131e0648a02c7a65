"""The plan of a ladder: its model sizes by one rule, and the recipe of an arm at a size and learning rate.

`ladder_rules.py` has the keys and their defaults. `stages.py` decides an arm's learning rate, and `arms.py` the number
for `as-large-as-ARM`. `multipliers.py` decides what a report with added seeds may claim.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from fathom.checkpoints.file_names import LADDER
from fathom.checkpoints.places import require_folder
from fathom.data.puzzles import open_data
from fathom.errors import SettingsError
from fathom.experiments.arms import AS_LARGE, Arm, as_large, parse_arms, training_flops, without_embeddings
from fathom.experiments.contrasts import Contrast, parse_contrasts
from fathom.experiments.ladder_rules import Rules, ladders_folder
from fathom.experiments.plan import Plan, check, plan_file
from fathom.experiments.scaling import ESTIMATOR
from fathom.recipe import Recipe, differences, parse_recipe
from fathom.report.files import asdict, read_json, write_json
from fathom.report.results import restored
from fathom.settings import fill, read_values, require_kind

SECTION = "ladder"
PLANNED = "plan"
ADDED = "added.json"
"""The file of seeds that were added after the plan."""
RUNGS, TUNE, SEED_CONTROL, CHECK = "rungs", "tune", "seed_control", "check"
LAYERS = "ladder.layers"
"""Override of an arm: its depth as a share of the control's, as in ladder.layers=1/3."""
TUNING_SEED = 10_000
"""Offset of the seeds of tuning runs, which never enter the ladder, because the best of several is biased."""
SEED_CONTROL_SEED = 1_000_000
RATE_RULES = {"adamw": (-0.28, -0.37, 0.5), "muon": (-0.32, 0.0, 0.56)}
"""Exponents of tokens, width and batch in the rule that scales the learning rate, by optimizer."""
EXTRA = 0.005
"""Share of parameters that an arm may add before a control is widened to match it."""


@dataclass(frozen=True)
class Shape:
    """Depth and widths of the control."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that give a recipe's model this shape."""
        return (
            f"model.num_hidden_layers={self.layers}",
            f"model.hidden_size={self.hidden}",
            f"model.num_attention_heads={self.heads}",
            f"model.num_key_value_heads={self.kv_heads}",
            f"model.intermediate_size={self.mlp}",
        )


@dataclass(frozen=True)
class Size(Shape):
    """One rung (model size) of a ladder under one token budget."""

    index: int
    """From 1."""
    budget: int
    """Index of the token budget; the first is the ladder's own."""
    parameters: int
    """Parameters of the control without embeddings."""
    tokens: int
    rows: int
    """Sequences in a step."""
    steps: int

    @property
    def name(self) -> str:
        """The name of its directory."""
        return str(self.index) if self.budget == 0 else f"{self.index}-budget-{self.budget + 1}"


@dataclass(frozen=True)
class Added:
    """Seeds added to a ladder after it was planned, for all arms of a rung."""

    seeds: tuple[int, ...]
    """Number of seeds of each rung from then on."""
    date: str
    finished: int
    """Finished runs at that time, whose losses may have been seen."""


@dataclass(frozen=True)
class LadderPlan:
    """`ladder.json` without its hashes."""

    recipe: dict[str, object]
    rules: Rules
    arms: tuple[Arm, ...]
    estimator: str


@dataclass(frozen=True)
class Ladder:
    """Everything that defines a ladder."""

    recipe: Recipe
    rules: Rules
    arms: tuple[Arm, ...]
    added: tuple[Added, ...] = dataclasses.field(default=(), compare=False)
    """Seeds added later, which are not part of the plan."""

    @property
    def control(self) -> Arm:
        """The first arm, with which the others are compared."""
        return self.arms[0]

    @cached_property
    def sizes(self) -> list[Size]:
        """The rungs (model sizes) under the first token budget."""
        return [size for size in self.all_sizes if size.budget == 0]

    @cached_property
    def all_sizes(self) -> list[Size]:
        """Every rung under every token budget, i.e. every combination of model size and tokens per parameter."""
        made: list[Size] = []
        for budget in range(len(self.rules.tokens_per_parameter)):
            for index in range(len(self.rules.layers)):
                made.append(self._size(index, budget, made[0] if made else None))
        return made

    @cached_property
    def every_arm(self) -> tuple[Arm, ...]:
        """All arms: those of the plan, and the widened controls that match their parameters."""
        return (*self.arms, *(matched for matched in map(self._matched_name, self.arms[1:]) if matched is not None))

    @cached_property
    def contrasts(self) -> tuple[Contrast, ...]:
        """The contrasts of its arms."""
        return parse_contrasts(self.rules.contrasts, [arm.name for arm in self.arms])

    def first_seed(self) -> int:
        """The first seed of the ladder's runs."""
        return self.recipe.train.seed

    @property
    def seeds(self) -> tuple[int, ...]:
        """Number of seeds of each rung, including seeds that were added later."""
        return self.added[-1].seeds if self.added else self.rules.seeds

    def arm_at(self, arm: Arm, size: Size, rate: float | None = None) -> Arm:
        """An arm of a rung's comparison, with its depth, learning rate and weight decay at that rung."""
        if arm.name.startswith(MATCHED):
            arm = self._matched(arm, size)
        arm = as_large(_with_layers(arm, size), [_with_layers(one, size) for one in self.arms], self.bases[size])
        rate = self.recipe.optim.lr if rate is None else rate
        carried = (f"optim.lr={rate!r}", f"optim.weight_decay={self.decay(size, rate)!r}")
        return dataclasses.replace(arm, overrides=(*arm.overrides, *carried))

    @cached_property
    def bases(self) -> dict[Size, Recipe]:
        """For each rung, the recipe that all arms share."""
        return {size: self._base(size) for size in self.all_sizes}

    def _base(self, size: Size) -> Recipe:
        micro = self.recipe.train.micro_batch
        length = self.recipe.data.sequence_length
        return self.recipe.override(
            *size.overrides,
            f"train.tokens_per_step={size.rows * length}",
            f"train.micro_batch={next(m for m in range(min(micro, size.rows), 0, -1) if size.rows % m == 0)}",
            f"train.steps={size.steps}",
            f"train.checkpoint_every={max(1, min(self.recipe.train.checkpoint_every, size.steps))}",
            "track.display=none",
        )

    def plan(self, size: Size, rates: Mapping[str, float] | None = None) -> Plan:
        """The plan of a rung's comparison, with a learning rate for each arm; by default, that of the base recipe."""
        arms = tuple(self.arm_at(arm, size, None if rates is None else rates[arm.name]) for arm in self.every_arm)
        first, count = self.first_seed(), self.seeds[size.index - 1]
        return Plan(self.bases[size], arms, tuple(range(first, first + count)), "tokens", self.rules.pairs)

    def run(self, arm: Arm, size: Size, rate: float, seed: int) -> Recipe:
        """The recipe of a single run that belongs to no rung's comparison, for instance a tuning run."""
        return self.recipe_at(arm, size, rate).override(f"train.seed={seed}")

    def recipe_at(self, arm: Arm, size: Size, rate: float | None = None) -> Recipe:
        """The recipe of an arm at a rung; by default with the base recipe's learning rate."""
        return self.arm_at(arm, size, rate).recipe(self.bases[size])

    def decay(self, size: Size, rate: float) -> float:
        """The weight decay that gives a rung the time scale batch / (learning rate · weight decay · tokens) of the
        first rung."""
        first, optim = self.all_sizes[0], self.recipe.optim
        factor = (size.rows / first.rows) * (optim.lr / rate) * (first.tokens / size.tokens)
        return rounded(optim.weight_decay * factor)

    def rule(self, size: Size) -> float:
        """The factor by which the scaling rule changes the learning rate from the first rung to this one."""
        first, optim = self.all_sizes[0], self.recipe.optim.name
        by_tokens, by_width, by_batch = self.rules.lr_exponents or RATE_RULES[optim]
        return float(
            (size.tokens / first.tokens) ** by_tokens
            * (size.hidden / first.hidden) ** by_width
            * (size.rows / first.rows) ** by_batch
        )

    def flops(self, arm: Arm, size: Size) -> float:
        """Training FLOPs of a run."""
        return training_flops(self.recipe_at(arm, size))

    @property
    def plan_values(self) -> LadderPlan:
        """The values that define the ladder: its recipe, rules and arms, and the estimator."""
        return LadderPlan(self.recipe.to_dict(), self.rules, self.arms, ESTIMATOR)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the plan, which identifies the ladder."""
        return sha256_of(self.plan_values)

    def write(self, out: Path) -> None:
        """Write the plan with a hash of each of its parts."""
        values = asdict(self.plan_values)
        parts = {key: sha256_of(value) for key, value in values.items()}
        write_json(out / LADDER, {**values, "sha256": {**parts, PLANNED: self.sha256}})

    @classmethod
    def read(cls, out: Path) -> Ladder:
        """The plan of an existing ladder; a plan that was edited by hand is rejected."""
        path = plan_file(out, LADDER, "ladder")
        try:
            values = read_json(path)
            sealed = values.pop("sha256")
            del sealed[PLANNED]
            changed = [key for key in sealed if sha256_of(values.get(key)) != sealed[key]]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise SettingsError(f"{path} is damaged: it differs from the plan that was written") from None
        if changed:
            raise SettingsError(f"{path}: {', '.join(changed)} differs from the plan; another plan needs another `out`")
        if values["estimator"] != ESTIMATOR:
            raise SettingsError(
                f"{path}: the plan uses estimator {values['estimator']}; this version of Fathom has {ESTIMATOR}"
            )
        arms: tuple[Arm, ...] = restored(tuple[Arm, ...], values["arms"])
        return cls(parse_recipe(values["recipe"]), fill(Rules, values["rules"]), arms, _added(out))

    def changed(self, asked: Ladder) -> list[str]:
        """Keys on which this plan and a new one differ."""
        mine, theirs = asdict(self.rules), asdict(asked.rules)
        rules = [f"ladder.{key}" for key, value in mine.items() if theirs[key] != value]
        return differences(self.recipe, asked.recipe, ()) + rules + ["arms"] * (self.arms != asked.arms)

    def add_seeds(self, out: Path, seeds: Sequence[int], finished: int) -> Ladder:
        """The ladder with added seeds, which are written to its directory too; the last such request may be repeated.

        Args:
            out: The ladder's directory.
            seeds: Number of seeds of every rung, or one number for all.
            finished: Number of finished runs of the rungs.
        """
        wanted = tuple(seeds) * (len(self.seeds) if len(seeds) == 1 else 1)
        if self.added and wanted == self.added[-1].seeds:
            return self
        more = any(new > old for new, old in zip(wanted, self.seeds, strict=False))
        if len(wanted) != len(self.seeds) or not more or any(n < o for n, o in zip(wanted, self.seeds, strict=True)):
            have = ",".join(map(str, self.seeds))
            raise SettingsError(
                f"seeds={','.join(map(str, seeds))}: allowed: no fewer seeds than each size has now ({have}), and more "
                "for at least one"
            )
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        added = (*self.added, Added(wanted, date, finished))
        write_json(out / ADDED, {"added": added})
        return dataclasses.replace(self, added=added)

    def _shape(self, index: int) -> Shape:
        rules, model = self.rules, self.recipe.config()
        hidden, head_dim = rules.hidden[index], model.head_dim
        if hidden % head_dim:
            raise SettingsError(f"ladder.hidden={hidden}: allowed: a multiple of model.head_dim={head_dim}")
        heads = hidden // head_dim
        kv_heads = max(1, heads * model.num_key_value_heads // model.num_attention_heads)
        if heads % kv_heads:
            kv_heads = heads
        mlp = max(1, round(8 * hidden / 3 / rules.mlp_multiple)) * rules.mlp_multiple
        return Shape(rules.layers[index], hidden, heads, kv_heads, mlp)

    def _size(self, index: int, budget: int, first: Size | None) -> Size:
        rules, shape, length = self.rules, self._shape(index), self.recipe.data.sequence_length
        shaped = self.recipe.override(*shape.overrides)
        control = _with_layers(self.control, shape)
        parameters = without_embeddings(control.recipe(shaped).config())
        tokens = rules.tokens or parameters * rules.tokens_per_parameter[budget]
        rows = self.recipe.rows_per_step
        if first is not None:
            micro = min(self.recipe.train.micro_batch, rows)
            rows = max(1, round(rows * (tokens / first.tokens) ** rules.batch_exponent / micro)) * micro
        steps = max(1, round(tokens / (rows * length)))
        return Size(
            **vars(shape),
            index=index + 1,
            budget=budget,
            parameters=parameters,
            tokens=steps * rows * length,
            rows=rows,
            steps=steps,
        )

    def _matched_name(self, arm: Arm) -> Arm | None:
        """A widened control to compare with `arm`; None unless `arm` adds parameters at the first rung."""
        size = self.sizes[0]
        if not self.rules.parameters or arm.open or self._parameters(arm, size) <= (1 + EXTRA) * size.parameters:
            return None
        return Arm(f"{MATCHED}{arm.name}", self.control.mechanism, self.control.overrides)

    def _matched(self, matched: Arm, size: Size) -> Arm:
        """The control with the narrowest MLP that gives it at least as many parameters as the arm that it matches."""
        arm = next(arm for arm in self.arms if arm.name == matched.name.removeprefix(MATCHED))
        wanted = self._parameters(arm, size)
        control = self.recipe_at(self.control, size).config()
        width, step = control.intermediate_size, control.experts_per_token if control.experts else 1
        one = self._parameters(self._widened(matched, width + step), size) - size.parameters
        width += step * max(0, math.ceil((wanted - size.parameters) / one))
        return dataclasses.replace(self._widened(matched, width), name=matched.name)

    def _widened(self, arm: Arm, width: int) -> Arm:
        return Arm("widened", arm.mechanism, (*arm.overrides, f"model.intermediate_size={width}"))

    def _parameters(self, arm: Arm, size: Size) -> int:
        return without_embeddings(self.recipe_at(arm, size).config())


def _added(out: Path) -> tuple[Added, ...]:
    path = out / ADDED
    if not path.exists():
        return ()
    try:
        return restored(tuple[Added, ...], read_json(path)["added"])
    except (ValueError, KeyError):
        raise SettingsError(f"{path} is damaged: it differs from the seeds that were added") from None


MOST = 100
"""The largest share of layers, beyond which numbers overflow."""
SHARE = re.compile(r"\s*\d+(\s*/\s*\d+|\.\d*)?\s*", re.ASCII)
MATCHED = AS_LARGE
"""Prefix of the name of a control that matches an arm's parameters."""


def find_ladder(name: Path) -> Path:
    """The file of a ladder, given by path or by the name of a packaged ladder; an existing path takes precedence."""
    if name.is_file():
        return name
    packaged = {path.stem: path for path in sorted(ladders_folder().glob("*.yaml"))}
    wanted = str(name).removeprefix(f"{ladders_folder().name}/")  # as `fathom recipes` lists them
    if wanted not in packaged:
        raise SettingsError(f"{name}: no such ladder; there are {', '.join(packaged)}")
    return packaged[wanted]


def load_ladder(path: Path, arms: str, overrides: Sequence[str] = (), out: Path | None = None) -> Ladder:
    """Load a ladder from a file, which is a recipe with a `ladder` section, and check it.

    Args:
        path: A YAML file.
        arms: As for `fathom compare`; the first is the control.
        overrides: `key=value` words; `ladder.key=value` too.
        out: The output directory. A ladder that it already holds, with the same plan, is opened unchanged.
    """
    if out is not None:
        require_folder(out, "a ladder")
    values = read_values(path)
    if "collections" in values:
        require_kind(values, str(path), "ladder")
    rules = values.pop(SECTION, None)
    if not isinstance(rules, dict):
        raise SettingsError(f"{path}: a ladder file is a recipe with a section `{SECTION}`")
    own = [word for word in overrides if word.startswith(f"{SECTION}.")]
    for word in own:
        key, _, value = word.removeprefix(f"{SECTION}.").partition("=")
        rules[key] = value
    recipe = parse_recipe(values, [word for word in overrides if word not in own])
    ladder = Ladder(recipe, fill(Rules, rules), tuple(parse_arms(arms)))
    if out is not None and (out / LADDER).exists() and not (before := Ladder.read(out)).changed(ladder):
        return checked(before, begins=False)
    return checked(ladder)


def checked(ladder: Ladder, begins: bool = True) -> Ladder:
    """Check a ladder: open the data, build every arm's recipe and, if it `begins`, its model. Reject sizes that read a
    sequence twice or do not grow, arms with their own learning rate, and a control with its own steps."""
    if ladder.control.open:
        raise SettingsError(
            f"arm {ladder.control.name}: the ladder's sizes follow from the control, so write its numbers out"
        )
    for arm in ladder.arms:
        if arm.name.startswith(MATCHED):
            raise SettingsError(f"arms={arm.name}: names that begin with {MATCHED} are reserved for controls")
        _check_rate(ladder, arm)
    _ = ladder.contrasts  # refuses a wrong one
    if ladder.control.own_steps:
        raise SettingsError(
            f"arm {ladder.control.name}: train.steps follows from the tokens that the control trains on at each size; "
            f"{SECTION}.tokens or {SECTION}.tokens_per_parameter sets these tokens for all arms"
        )
    given = ladder.recipe.data
    data = open_data(given.directory, verify=False, collections=given.collections)
    _check_domains(ladder)
    _check_sizes(ladder)
    for size in ladder.all_sizes:
        if size.tokens > data.num_tokens:
            raise SettingsError(
                f"size {size.name} reads {size.tokens:,} tokens, but {data.directory} has only {data.num_tokens:,}: "
                "allowed: sizes that read no token twice"
            )
        check(ladder.plan(size), begins=begins)
    return ladder


def _check_rate(ladder: Ladder, arm: Arm) -> None:
    """Reject an arm's own learning rate or weight decay, which the ladder would overwrite."""
    size = ladder.sizes[0]
    kept = as_large(_with_layers(arm, size), [_with_layers(one, size) for one in ladder.arms], ladder.bases[size])
    own, base = kept.recipe(ladder.recipe).optim, ladder.recipe.optim
    written = {override.partition("=")[0].strip() for override in kept.overrides}
    for key in ("lr", "weight_decay"):
        if f"optim.{key}" in written or getattr(own, key) != getattr(base, key):
            raise SettingsError(
                f"arm {arm.name}: optim.{key} is set by the ladder, which tunes each arm's learning rate and scales lr "
                f"and weight_decay by one rule; optim.{key}=... without an arm's name sets the start for all arms"
            )


def _check_domains(ladder: Ladder) -> None:
    """Reject tuning on a held-out domain that does not exist."""
    data = ladder.recipe.data
    there = open_data(data.directory, "val", False, data.collections).domains
    for name in ladder.rules.tune_domains:
        if name not in there:
            raise SettingsError(f"{SECTION}.tune_domains={name}: allowed: held-out domains, {', '.join(there)}")


def _check_sizes(ladder: Ladder) -> None:
    """Reject sizes that do not grow, because the last one is treated as the largest."""
    flops = [ladder.flops(ladder.control, size) for size in ladder.sizes]
    for size, below, own in zip(ladder.sizes[1:], flops, flops[1:], strict=False):
        if own <= below:
            spent = f"size {size.name} takes {own:.3g} FLOPs, the size before it {below:.3g}"
            raise SettingsError(f"{SECTION}.layers, {SECTION}.hidden: {spent}: allowed: sizes from small to large")


def _with_layers(arm: Arm, shape: Shape) -> Arm:
    """The arm with its number of layers, given as a share of the rung's layers, replaced by the integer."""
    overrides = []
    for override in arm.overrides:
        key, _, value = override.partition("=")
        overrides.append(override if key != LAYERS else f"model.num_hidden_layers={share_of(shape.layers, value)}")
    return dataclasses.replace(arm, overrides=tuple(overrides))


def share_of(layers: int, text: str) -> int:
    """An arm's number of layers, from a share such as `1/3` of a rung's layers."""
    try:
        share = Fraction(text) if SHARE.fullmatch(text) else Fraction(0)
    except ZeroDivisionError:
        share = Fraction(0)
    if not 0 < share <= MOST:
        raise SettingsError(f"{LAYERS}={text}: allowed: a share such as 1/3, {MOST} at most")
    found = layers * share
    if found.denominator != 1 or found < 1:
        raise SettingsError(
            f"{LAYERS}={text}: this share of {layers} layers is {float(found):g}; allowed: a share that gives "
            "a whole number"
        )
    return int(found)


def rounded(value: float) -> float:
    """A learning rate rounded to four digits, which is readable and the same on every machine."""
    return float(f"{value:.4g}")


def sha256_of(value: object) -> str:
    """SHA-256 of a value as canonical JSON: sorted keys, no spaces."""
    text = json.dumps(asdict(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()

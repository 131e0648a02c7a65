"""A YAML file that describes a table of a paper: its arms, the tiers at which it can be made, and the published
numbers. For example:

    paper: Depth-Attention, arXiv 2606.05014
    table: Table 5, the mixing rule
    columns: [validation loss]
    rows:                   the first row is the control
      vanilla: {arm: vanilla, published: {500m: [2.2348]}}
    tiers:
      tiny: {sizes: {tiny: {recipe: tiny_pondering}}}
      full: {sizes: {500m: {recipe: 500m, parameters: 498165888}}}

`fathom compare papers/NAME/TABLE` makes every arm of every size of a tier and prints the table (`make_table` in
`paper_table.py`). Each size is an ordinary comparison in a directory of its own, so it resumes, and other machines may
join.

`planned` computes the dry run, and `cli/paper.py` ends with exit code 1 if the control differs from what the paper
says. The folder `checkpoints/families` opens the papers' released models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fathom.errors import SettingsError
from fathom.experiments.arms import Equal, parse_arms, tokens, training_flops
from fathom.experiments.plan import Plan
from fathom.models.cost import count_parameters, flops_per_token
from fathom.recipe import Recipe, find_recipe, load_recipe
from fathom.settings import Rule, Section, fill, read_values, require_kind
from fathom.training.meter import PEAKS

UTILISATION = 0.4
"""The share of a device's peak that a training step is assumed to reach."""
PLANNED = ("parameters", "tokens", "steps")
TIERS = ("tiny", "full")


@dataclass(frozen=True)
class PaperSize(Section):
    """One model size of a paper's table: a recipe, and what the paper says of this size."""

    recipe: str = ""
    """a packaged recipe, or a path"""
    overrides: tuple[str, ...] = ()
    """key=value on top of it, for all arms"""
    seeds: int = 1
    """runs of each arm"""
    parameters: int | None = None
    """the control's published parameters, which the recipe must have"""
    tokens: int | None = None
    """published training tokens of every arm"""
    steps: int | None = None
    """published steps"""

    def rules(self) -> Iterator[Rule]:
        """Checks beyond types."""
        yield bool(self.recipe), "recipe", "allowed: the name of a recipe"
        yield self.seeds >= 1, "seeds", "allowed: 1 or more"


@dataclass(frozen=True)
class PaperTier(Section):
    """A tier of a paper's table: sizes that are made together, such as `tiny` or `full`."""

    sizes: dict[str, PaperSize] = field(default_factory=dict)
    """by name"""
    prepare: tuple[str, ...] = ()
    """commands that make the data"""

    def rules(self) -> Iterator[Rule]:
        """Checks beyond types."""
        yield bool(self.sizes), "sizes", "allowed: one size or more"


@dataclass(frozen=True)
class PaperRow(Section):
    """One row of a table."""

    arm: str = ""
    """the arm as in `--arms`, without a name"""
    at: dict[str, str] = field(default_factory=dict)
    """other words for the arm, by size or tier: strides depend on the number of layers"""
    published: dict[str, list[float | None]] = field(default_factory=dict)
    """the paper's numbers by size, one for each column; null where it has none"""

    def words(self, tier: str, size: str) -> str:
        """The arm of a size."""
        return self.at.get(size, self.at.get(tier, self.arm))


@dataclass(frozen=True)
class PaperTable(Section):
    """A table of a paper."""

    paper: str = ""
    """the paper, with its number"""
    table: str = ""
    """which table or figure"""
    says: str = ""
    """what to know before comparing: what is unknown, and what is ours"""
    columns: tuple[str, ...] = ("perplexity",)
    """what the published numbers are"""
    equal: Equal = "tokens"
    """the budget that all arms share"""
    tasks: tuple[str, ...] = ()
    """lm-eval's tasks by which the paper scores"""
    rows: dict[str, PaperRow] = field(default_factory=dict)
    """the arms by name; the first is the control"""
    tiers: dict[str, PaperTier] = field(default_factory=dict)
    """`tiny`, minutes on two cores, and `full`, the paper's sizes, tokens and steps"""

    def rules(self) -> Iterator[Rule]:
        """Checks beyond types."""
        yield len(self.rows) > 1, "rows", "allowed: a control and at least one more row"
        for name in ("tiny", "full", *self.tiers):
            yield name in TIERS and name in self.tiers, f"tiers.{name}", "a table has the tiers tiny and full"
        sizes = {size for tier in self.tiers.values() for size in tier.sizes}
        for name, row in self.rows.items():
            yield bool(row.arm), f"rows.{name}.arm", "allowed: an arm"
            yield set(row.published) <= sizes, f"rows.{name}.published", f"allowed: {', '.join(sorted(sizes))}"
            short = all(len(numbers) == len(self.columns) for numbers in row.published.values())
            yield short, f"rows.{name}.published", f"allowed: {len(self.columns)} numbers, one for each column"

    def compared_with(self, size: str) -> str:
        """The name of the size whose published numbers are printed for a size: that size, or else the first with
        published numbers."""
        sizes = [size, *self.tiers["full"].sizes]
        return next((one for one in sizes if any(one in row.published for row in self.rows.values())), size)

    def plans(self, tier: str, overrides: tuple[str, ...] = ()) -> dict[str, Plan]:
        """The plan of a comparison for every size of a tier.

        Args:
            tier: `tiny` or `full`.
            overrides: key=value for all sizes and arms.
        """
        return {name: self._plan(tier, name, size, overrides) for name, size in self.tiers[tier].sizes.items()}

    def _plan(self, tier: str, name: str, size: PaperSize, overrides: tuple[str, ...]) -> Plan:
        recipe = load_recipe(find_recipe(size.recipe), [*size.overrides, *overrides])
        words = [f"{row}={one.words(tier, name)}" for row, one in self.rows.items()]
        seed = recipe.train.seed
        return Plan(recipe, tuple(parse_arms(",".join(words))), tuple(range(seed, seed + size.seeds)), self.equal, 0)


def load_table(path: Path) -> PaperTable:
    """Read and check the file of a table."""
    values = read_values(path)
    require_kind(values, str(path), "paper")
    try:
        return fill(PaperTable, values)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


@dataclass(frozen=True)
class PlannedArm:
    """The planned cost of one arm at one size."""

    size: str
    arm: str
    parameters: int
    tokens: int
    steps: int
    runs: int
    flops: float
    """Training FLOPs of all runs."""
    inference_flops: float
    """FLOPs of a token, if no token halts."""
    days: float
    """On one device."""


@dataclass(frozen=True)
class PaperPlan:
    """`--dry-run`."""

    paper: str
    table: str
    tier: Literal["tiny", "full"] | str
    device: str
    utilisation: float
    arms: list[PlannedArm]
    prepare: list[str]
    differs: list[str]
    """Where the recipes are not what the paper says."""


def planned(table: PaperTable, tier: str, plans: dict[str, Plan], device: str = "H100") -> PaperPlan:
    """Parameters, tokens, FLOPs and days of every arm, computed without opening any data."""
    peaks = dict(PEAKS)
    if device not in peaks:
        raise SettingsError(f"gpu={device}: allowed: {', '.join(peaks)}")
    arms, differs = [], []
    for size, plan in plans.items():
        for name, recipe in plan.recipes.items():
            arms.append(_planned(size, name, recipe, len(plan.seeds), peaks[device] * UTILISATION))
        published, control = table.tiers[tier].sizes[size], arms[-len(plan.recipes)]
        for key in PLANNED:
            said, found = getattr(published, key), getattr(control, key)
            if said is not None and said != found:
                differs.append(f"{size}: {found:,} {key}, published {said:,}")
    prepare = list(table.tiers[tier].prepare)
    return PaperPlan(table.paper, table.table, tier, device, UTILISATION, arms, prepare, differs)


def _planned(size: str, name: str, recipe: Recipe, runs: int, flops_per_second: float) -> PlannedArm:
    flops = runs * training_flops(recipe)
    return PlannedArm(
        size=size,
        arm=name,
        parameters=count_parameters(recipe.config()),
        tokens=tokens(recipe),
        steps=recipe.train.steps,
        runs=runs,
        flops=flops,
        inference_flops=flops_per_token(recipe.config(), recipe.data.sequence_length),
        days=flops / flops_per_second / 86400,
    )


def with_seeds(plans: dict[str, Plan], seeds: int | None) -> dict[str, Plan]:
    """The same plans with `seeds` seeds each; unchanged if `seeds` is None."""
    if seeds is None:
        return plans
    return {name: replace(one, seeds=tuple(range(one.seeds[0], one.seeds[0] + seeds))) for name, one in plans.items()}

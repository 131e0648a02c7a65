"""Computes the numbers and the verdict of a ladder from its runs.

`scaling.py` estimates the multiplier and `iteration_worth.py` φ. `acquisition.py` judges puzzles. `stages.py` makes the
prediction and the runs at half and twice the learning rate.

If seeds were added after results, no multiplier, difference or contrast counts as significant; otherwise their tests
are one family, which `report/statistics.py` adjusts. The tests of a puzzle are apart. If the intervals of the two
estimators of `scaling.py` do not overlap by half (`agree`), the verdict gives both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.interpolate import make_interp_spline

from fathom.experiments.acquisition import puzzle_result, puzzle_words
from fathom.experiments.arms import Arm, tokens, without_embeddings
from fathom.experiments.compare_results import TimeRatio
from fathom.experiments.contrasts import Contrast, sentence
from fathom.experiments.iteration_worth import Looped, worth
from fathom.experiments.ladder_results import (
    ArmRow,
    Cell,
    Check,
    ContrastRow,
    CrossedInterval,
    CurvePoint,
    DivergedRun,
    LadderReport,
    Law,
    Multiplier,
    Outcome,
    Phi,
    Prediction,
    PredictionRow,
    RungRow,
    SeedControl,
    SeedControlRung,
    SeedNoise,
    TimedInterval,
    Views,
)
from fathom.experiments.plan import Plan, read_measured
from fathom.experiments.rungs import MATCHED, Size, rounded
from fathom.experiments.scaling import (
    DECADE,
    ESTIMATOR,
    Floats,
    Horizontal,
    Interval,
    Posterior,
    Rung,
    agree,
    fitted,
    horizontal,
)
from fathom.experiments.stages import SURE, State, beyond, finite_losses
from fathom.experiments.tuning import EDGE, FLAT
from fathom.models.cost import as_decoded, cache_bytes_per_token
from fathom.models.registry import DEFAULTS, recurrence_class
from fathom.models.trips.slots import plan as visits
from fathom.recipe import Recipe
from fathom.report.provenance import Provenance
from fathom.report.statistics import Difference, adjust, paired_difference

UNSETTLED, OUTSIDE, DISAGREE = "rate not settled", "outside the control's range", "the two estimators disagree"
MATCHES = (0.9, 1.1)
"""A multiplier whose interval lies in this range counts as no effect."""
WIDEST = 2.0
"""An extrapolation whose interval spans more than this factor is withheld."""


@dataclass(frozen=True)
class Study:
    """One arm and the control of a ladder, with the posterior of their losses."""

    state: State
    arm: Arm
    at: dict[Size, Rung]
    """Losses of both at each rung at which they share a seed."""
    fit: Posterior

    @property
    def rungs(self) -> list[Rung]:
        """The losses at each rung, as a list in the order of the rungs."""
        return list(self.at.values())

    @cached_property
    def line(self) -> Horizontal:
        """The cross-check: a straight line through ln M of the rungs."""
        return horizontal(self.rungs)

    @property
    def top(self) -> float:
        """ln FLOPs of the arm at its last rung."""
        return self.rungs[-1].x_arm


def summarize(state: State, source: Provenance) -> LadderReport:
    """The contents of `report.json`, computed from the ladder's directory alone."""
    ladder = state.ladder
    stage, pending = progress(state)
    tuned = state.finished_tuning is not None
    arms = [_arm(state, arm) for arm in ladder.every_arm] if tuned else []
    contrasts = [_contrast(state, one) for one in ladder.contrasts] if tuned else []
    if not any(added.finished for added in ladder.added):  # seeds that came after results judge nothing
        tops = [row.rungs[ladder.sizes[-1].index] for row in contrasts if ladder.sizes[-1].index in row.rungs]
        if len(ladder.all_sizes) > 1:
            adjust([*arms, *tops])
        elif stage == "done":  # Holm's correction needs all arms
            _judge_losses([arm for arm in arms if not arm.matched], tops)
    report = LadderReport(
        **vars(source),
        ladder=ladder.sha256,
        estimator=ESTIMATOR,
        stage=stage,
        pending=pending,
        control=ladder.control.name,
        tokens_per_parameter=list(ladder.rules.tokens_per_parameter),
        rungs=[_rung(state, size, tuned) for size in ladder.all_sizes],
        arms=arms,
        tuning=state.tuning()[1],
        law=_law(arms),
        prediction=_prediction(state, arms) if tuned else None,
        seed_control=_seed_control(state) if tuned else None,
        contrasts=contrasts,
        phi=_phi(state) if tuned else None,
        puzzle=puzzle_result(state) if tuned else None,
        diverged=_diverged(state),
        seeds_added=ladder.added,
        plan=ladder.plan_values,
    )
    report.verdict = verdict(report)
    return report


def progress(state: State) -> tuple[str, int]:
    """The current stage of a ladder, and how many tasks of that stage are still to do."""
    stage, tasks = list(state.stages())[-1]
    left = sum(not task.settled for task in tasks)
    return (stage, left) if left else ("done", 0)


def _rung(state: State, size: Size, tuned: bool) -> RungRow:
    ladder = state.ladder
    sealed = ladder.rules.sealed and size == ladder.sizes[-1]
    seeds = ladder.seeds[size.index - 1]
    return RungRow(
        **vars(size),
        batch=size.rows * ladder.recipe.data.sequence_length,
        sealed=sealed,
        seeds=list(range(ladder.first_seed(), ladder.first_seed() + seeds)),
        flops=state.flops[ladder.control, size],
        rate=state.rate(ladder.control, size) if tuned else None,
    )


def _arm(state: State, arm: Arm) -> ArmRow:
    ladder = state.ladder
    check = _check(state, arm)
    values = ArmRow(
        name=arm.name,
        mechanism=arm.mechanism,
        overrides=arm.overrides,
        matched=arm.name.startswith(MATCHED),
        learning_rate_ratio=state.ratio(arm),
        rungs=[_cell(state, arm, size) for size in ladder.sizes],
        further=[_cell(state, arm, size) for size in ladder.all_sizes if size.budget],
        flags=_tuning_flags(state, arm) + ([UNSETTLED] if check and check.better else []),
        diverged=_lost(state, arm),
        check=check,
    )
    at = state.rungs(arm, ladder.sizes) if arm is not ladder.control else {}
    for row, size in zip(values.rungs, ladder.sizes, strict=True):
        if (rung := at.get(size)) is not None:
            row.difference = paired_difference(rung.arm, rung.control)
    if (fit := fitted(tuple(at.values()))) is not None:
        _add_posterior(values, Study(state, arm, at, fit))
    return values


def _cell(state: State, arm: Arm, size: Size) -> Cell:
    """An arm at a rung."""
    recipe = state.plans[size].recipes[arm.name]
    config, losses = recipe.config(), state.losses(size, arm)
    return Cell(
        index=size.index,
        budget=size.budget,
        tokens=tokens(recipe),
        rate=state.rate(arm, size),
        weight_decay=recipe.optim.weight_decay,
        layers=config.num_hidden_layers,
        parameters=without_embeddings(config),
        flops=state.flops[arm, size],
        seeds=list(losses),
        loss=list(losses.values()),
    )


def _add_posterior(row: ArmRow, study: Study) -> None:
    """Add the compute multiplier M at each rung, in the middle of the ladder and beyond the largest size, by both
    estimators; its trend per decade; and the p-value of M = 1 at the last rung."""
    fit, line = study.fit, study.line
    row.p = fit.sides(study.top)
    places = [("rung", rung.x_arm) for rung in study.rungs]
    for kind, x in (("middle", fit.centre), *places, *beyond(study.top)):
        crossed = _crossed(fit.log_multiplier(x), line.interval(x))
        row.multiplier.append(Multiplier(**vars(crossed), kind=kind, ln_flops=x))
    for size, h, error in zip(study.at, line.log_m, line.errors, strict=True):
        cell = next(cell for cell in row.rungs if cell.index == size.index)
        cell.ln_m, cell.error = float(h), float(error)
    row.per_decade = _crossed(fit.growth * DECADE, line.per_decade())
    first = min(study.rungs[0].x_control, study.rungs[0].x_arm)
    curve = np.append(np.linspace(first, study.top, 17), study.top + DECADE / 2 * np.linspace(0, 1, 5)[1:])
    row.curve = [
        CurvePoint(
            ln_flops=float(x),
            control=Interval.of(fit.control_loss(x)),
            arm=Interval.of(fit.arm_loss(x)),
            m=_factor(fit.log_multiplier(x)),
        )
        for x in curve.tolist()
    ]
    row.floor, row.slope, row.own_deviation = (Interval.of(draws) for draws in (fit.floor, fit.slope, fit.own))
    row.noise = SeedNoise(fit.noise.single, fit.noise.paired, fit.noise.correlation)
    row.views = _views(study)
    if _outside(study):
        row.flags.append(OUTSIDE)
    top = row.top
    if top.t_low is not None and top.t_high is not None and not agree((top.low, top.high), (top.t_low, top.t_high)):
        row.flags.append(DISAGREE)


def _crossed(logs: Floats, found: tuple[float, float, float] | None) -> CrossedInterval:
    """A factor with the numbers of the cross-check; the cross-check's numbers are None if there are only two rungs."""
    t, low, high = (None, None, None) if found is None else map(_exp, found)
    return CrossedInterval(**vars(_factor(logs)), t=t, t_low=low, t_high=high)


def _factor(logs: Floats) -> Interval:
    """The exponential of draws."""
    return Interval(*(_exp(value) for value in astuple(Interval.of(logs))))


def _exp(value: float) -> float:
    return math.exp(max(min(value, 700.0), -700.0))


def _outside(study: Study) -> bool:
    """Whether matching the arm would take the control to compute more than half a decade outside the range of its
    runs."""
    xs = [rung.x_control for rung in study.rungs]
    wanted = [rung.x_arm + float(h) for rung, h in zip(study.rungs, study.line.log_m, strict=True)]
    return min(wanted) < min(xs) - DECADE / 2 or max(wanted) > max(xs) + DECADE / 2


def _views(study: Study) -> Views:
    """The compute multiplier at the last rung, in other costs than FLOPs (time, parameters, bytes), from the same
    posterior draws."""
    state, name = study.state, study.arm.name
    plans = [state.plans[size] for size in study.at]
    places = [state.rung_dir(size) for size in study.at]
    time = None
    measured = [read_measured(plan, place, name) for plan, place in zip(plans, places, strict=True)]
    timed = [values for values in measured if values is not None]
    if len(timed) == len(plans):
        seconds = [_seconds(plan, name, values.time) for plan, values in zip(plans, timed, strict=True)]
        last = timed[-1]
        time = TimedInterval(**vars(_view(study, seconds)), clock=last.time.clock, hardware=last.hardware)
    configs = [(plan.recipes[plan.control.name], plan.recipes[name]) for plan in plans]
    sizes = [(without_embeddings(a.config()), without_embeddings(b.config())) for a, b in configs]
    return Views(
        time=time,
        parameters=_view(study, sizes),
        bytes_weights_once=_view(study, [(_read(a, False), _read(b, False)) for a, b in configs]),
        bytes_weights_each_trip=_view(study, [(_read(a, True), _read(b, True)) for a, b in configs]),
    )


def _seconds(plan: Plan, arm: str, time: TimeRatio) -> tuple[float, float]:
    """Seconds of a whole run of the control and of an arm, from training steps that were timed alternately."""
    control, own = (plan.recipes[name].train.steps for name in (plan.control.name, arm))
    return control * time.seconds[1], own * time.seconds[1] * time.median


def _read(recipe: Recipe, each_trip: bool) -> float:
    """Bytes that a device reads to decode one token at the end of the context: bfloat16 weights and the cache."""
    config = as_decoded(recipe.config())
    layers = without_embeddings(config)
    again = sum(map(len, visits(config))) / config.num_hidden_layers if each_trip else 1.0
    head = config.vocab_size * config.hidden_size
    return 2.0 * (layers * again + head) + cache_bytes_per_token(config) * recipe.data.sequence_length


def _view(study: Study, costs: Sequence[tuple[float, float]]) -> Interval:
    """The compute multiplier in another cost than FLOPs: the cost of a control that matches the arm's loss, divided by
    the arm's cost."""
    xs = np.array([rung.x_control for rung in study.rungs])
    wanted = study.top + study.fit.log_multiplier(study.top)
    control = make_interp_spline(xs, np.log([cost[0] for cost in costs]), k=1)  # extended linearly beyond both ends
    return _factor(control(wanted) - math.log(costs[-1][1]))


def _tuning_flags(state: State, arm: Arm) -> list[str]:
    if arm.name.startswith(MATCHED):
        return ["at the control's rate"]
    flags = []
    for number, rows in enumerate(state.tuned, 1):
        for flag in rows[arm.name].flags:
            words = {EDGE: "rate at an edge", FLAT: "rate not found"}
            flags.append(f"{words.get(flag, flag)} (rung {number})")
    return flags


def _check(state: State, arm: Arm) -> Check | None:
    """The losses at half, once and twice an arm's chosen learning rate, at the largest size with the same seed."""
    mine = [run for run in state.checks() if run.arm == arm.name]
    if not mine or not all(run.settled for run in mine):
        return None
    size, seed = state.ladder.sizes[-1], state.ladder.first_seed()
    chosen = state.losses(size, arm).get(seed)
    if chosen is None:
        return None
    fits = [state.fit(other, state.ladder.sizes) for other in state.ladder.every_arm[1:]]
    noise = max(fit.noise.paired for fit in fits if fit is not None)
    below, above = (run.loss() for run in mine)
    better = min(below, above) < chosen - 2 * noise * math.sqrt(2)
    excess = None
    bend = (below + above) / 2 - chosen
    if math.isfinite(bend) and bend > 0:
        excess = ((above - below) / 2) ** 2 / (4 * bend)
    rates = [rounded(state.rate(arm, size) * factor) for factor in (0.5, 1, 2)]
    return Check(rates, [below, chosen, above], better, excess)


def _lost(state: State, arm: Arm) -> tuple[int, int]:
    """The number of an arm's runs that diverged and were not resumed, and the number of all its runs."""
    mine = [run for size in state.ladder.all_sizes for run in state.runs(size, arm)]
    return sum(run.failure is not None for run in mine), len(mine)


def _diverged(state: State) -> list[DivergedRun]:
    """The runs that failed, in all stages of the ladder."""
    rows: list[DivergedRun] = []
    for stage, tasks in state.stages():
        for task in tasks:
            if task.failure is not None:
                run = str(task.run_dir.relative_to(state.out))
                rows.append(DivergedRun(**vars(task.failure), stage=stage, run=run))
    return rows


def _contrast(state: State, contrast: Contrast) -> ContrastRow:
    """A contrast of losses at every size at which its arms share a seed."""
    arms = [arm for arm in state.ladder.arms if arm.name in contrast.arms]
    found = {
        size.index: contrast.of({arm.name: state.losses(size, arm) for arm in arms}) for size in state.ladder.sizes
    }
    rungs = {index: value for index, value in found.items() if value is not None}
    return ContrastRow(contrast.name, str(contrast), rungs)


def _judge_losses(arms: Sequence[ArmRow], contrasts: Sequence[Difference]) -> None:
    """The p-values of equal losses, paired over seeds, for a ladder of one size, which has no multiplier."""
    gaps = [arm.rungs[0].difference for arm in arms]
    adjust([*(gap for gap in gaps if gap is not None), *contrasts])
    for arm, gap in zip(arms, gaps, strict=True):
        if gap is not None:
            arm.p, arm.p_holm = gap.p, gap.p_holm


def _law(arms: Sequence[ArmRow]) -> Law | None:
    """The floor and slope of the control's scaling law, from the first arm that has a posterior."""
    return next((Law(arm.floor, arm.slope) for arm in arms if arm.floor and arm.slope), None)


def _prediction(state: State, arms: Sequence[ArmRow]) -> PredictionRow | None:
    """The sealed prediction next to the observed results."""
    sealed = state.sealed()
    if sealed is None:
        return None
    rows: list[Outcome] = []
    for row in sealed.rows:
        gap = next(arm.rungs[-1].difference for arm in arms if arm.name == row.arm)
        observed, forecast = None if gap is None else gap.mean, row.difference
        inside = None
        if forecast is not None and observed is not None:
            inside = forecast.low <= observed <= forecast.high
        rows.append(Outcome(**vars(row), observed=observed, inside=inside))
    return PredictionRow(sealed.sha256, _stale(state, sealed), rows)


def _stale(state: State, sealed: Prediction) -> bool:
    """Whether results of smaller sizes changed after the prediction was sealed. Seeds that were added later to all arms
    do not count; the report names them elsewhere.
    """
    told, now = sealed.results, state.digests(state.ladder.sizes[:-1])
    first = state.ladder.first_seed()
    planned = {(rung, seed) for rung, count in enumerate(sealed.seeds, 1) for seed in range(first, first + count)}
    planned |= set(map(_rung_and_seed, told))
    late = any(path not in told and _rung_and_seed(path) in planned for path in now)
    return late or any(now.get(path) != before for path, before in told.items())


def _rung_and_seed(path: str) -> tuple[int, int]:
    """The rung and seed that a path such as `rungs/1/arms/ARM/seed-0/result.json` names."""
    parts = Path(path).parts
    return int(parts[1]), int(parts[4].removeprefix("seed-"))


def _seed_control(state: State) -> SeedControl | None:
    """The seed control: the control with other initial values, whose multiplier's interval must cover 1."""
    runs, at = state.seed_controls(), dict[Size, Rung]()
    for size in state.ladder.sizes:
        own = finite_losses(run for run in runs if run.run_dir.parent.name == size.name)
        if (rung := state.paired(size, own, state.flops[state.ladder.control, size])) is not None:
            at[size] = rung
    if not at:
        return None
    rows = [SeedControlRung(size.index, paired_difference(rung.arm, rung.control)) for size, rung in at.items()]
    fit = fitted(tuple(at.values()))
    multiplier = None if fit is None else _factor(fit.log_multiplier(fit.centre))
    covers = None if multiplier is None else multiplier.low <= 1 <= multiplier.high
    return SeedControl(rows, multiplier, covers)


def _phi(state: State) -> Phi | None:
    """φ, the value of an extra loop iteration, from the control and the plainly looped arms at every token budget; None
    without looped arms."""
    found: list[Looped] = []
    for size in state.ladder.all_sizes:
        for arm in state.ladder.arms:
            recipe = state.plans[size].recipes[arm.name]
            config = recipe.config()
            plain = config.mixer == DEFAULTS["mixer"] and config.residual == DEFAULTS["residual"]
            losses = list(state.losses(size, arm).values())
            alike = tokens(recipe) == size.tokens  # an arm with its own train.steps belongs to no cell
            if config.recurrence not in (DEFAULTS["recurrence"], "loop") or not plain or not alike or not losses:
                continue
            recurrence = recurrence_class(config)
            trips = recurrence.trips_of(config)
            first, last = recurrence.span(config)
            every = without_embeddings(config)
            inside = (last - first) * every / config.num_hidden_layers if trips > 1 else 0.0
            loss = statistics.fmean(losses)
            found.append(Looped(every - inside, inside, trips, size.tokens, loss, size.name))
    return None if all(run.trips == 1 for run in found) else worth(found)


UNDECIDED = (
    "undecided: a multiplier needs two model sizes, one of them with two seeds, and losses that fall with compute; "
    "a ladder of one size needs all its runs, and two seeds from the start"
)


def verdict(report: LadderReport) -> str:
    """The verdict by fixed rules, one sentence a line: first what is missing or doubtful, then the findings, then the
    outcome of the sealed prediction."""
    if not report.arms or not any(row.loss for arm in report.arms for row in arm.rungs):
        return _lines(["no run of a model size has a result yet", *_missing(report)], [])
    arms = [arm for arm in report.arms[1:] if not arm.matched]
    parts = [*_missing(report), *_doubts(report)]
    told = [arm for arm in arms if arm.multiplier]
    parts += [_finding(report, arm) for arm in told]
    if report.puzzle is not None:
        parts += puzzle_words(report.control, report.puzzle)
    elif not told:
        parts += _one_size(report, arms) or [UNDECIDED]
    parts += _contrast_words(report)
    parts += _seal_words(report)
    return _lines(parts, [arm.name for arm in report.arms])


def _contrast_words(report: LadderReport) -> list[str]:
    """Sentences on the contrasts at the largest size."""
    top = max((rung.index for rung in report.rungs), default=0)
    where = "" if len(report.rungs) == 1 else "at the largest size "
    return [where + sentence(row.name, row.arms, row.rungs[top]) for row in report.contrasts if top in row.rungs]


def _lines(parts: list[str], names: list[str]) -> str:
    """Lines of text, each sentence with a capital letter unless it begins with an arm's name."""
    own = tuple(f"{name} " for name in names)
    return "\n".join(f"{part if part.startswith(own) else part[0].upper() + part[1:]}." for part in parts)


def _missing(report: LadderReport) -> list[str]:
    found = []
    if report.stage != "done":
        found.append(f"not finished: {report.pending} runs remain in the stage `{report.stage}`")
    if any(added.finished for added in report.seeds_added):
        found.append("seeds were added after results, so this is exploratory and nothing counts as significant")
    counts = {arm.name: arm.diverged for arm in report.arms}
    lost = [f"{name} {count} of {runs}" for name, (count, runs) in counts.items() if count]
    counted = "" if report.puzzle is None else " from the losses and count as unsolved"
    return found + ([f"runs diverged and are excluded{counted}: {', '.join(lost)}"] if lost else [])


def _doubts(report: LadderReport) -> list[str]:
    flags = [(arm.name, arm.flags) for arm in report.arms if arm.flags and not arm.matched]
    words = ", ".join(f"{name} ({', '.join(found)})" for name, found in flags)
    found = [f"in doubt: {words}"] if flags else []
    seed_control = report.seed_control
    if seed_control is not None and seed_control.covers is False:
        found.append("the seed control differs significantly from the control, so the intervals are too narrow here")
    return found


def _seal_words(report: LadderReport) -> list[str]:
    sealed = report.prediction
    if sealed is None:
        return []
    inside = [row.inside for row in sealed.rows if row.inside is not None]
    if not inside:
        return []
    spans = [(row.difference.high - row.difference.low) for row in sealed.rows if row.difference]
    wide = f"{min(spans):.3f}" if len(spans) == 1 else f"{min(spans):.3f} to {max(spans):.3f}"
    words = f"of the sealed predictions {sum(inside)} of {len(inside)} came true, of intervals {wide} nats wide"
    return [words + (", but results of smaller sizes changed after the seal" if sealed.stale else "")]


def _finding(report: LadderReport, arm: ArmRow) -> str:
    """The finding on an arm."""
    top, trend = arm.top, arm.per_decade
    assert trend is not None
    count = sum(row.kind == "rung" for row in arm.multiplier)
    span = f"{top.low:.2f} to {top.high:.2f}"
    tokens = report.plan.rules.tokens
    read = f"{report.tokens_per_parameter[0]:g} tokens per parameter" if tokens is None else f"{tokens:,} tokens"
    at = f"at {math.exp(top.ln_flops):.2g} FLOPs and {read}"
    signs = [row.ln_m for row in arm.rungs if row.ln_m is not None][-2:]
    steady = all(value > 0 for value in signs) or all(value < 0 for value in signs)
    if MATCHES[0] <= top.low and top.high <= MATCHES[1]:
        said = f"{arm.name} has no effect above 10 % {at}: the multiplier lies in {span}"
    elif arm.p_holm is not None and arm.p_holm < SURE and steady:
        times = f"{top.median:.2f} times the compute (95 % interval {span})"
        said = f"{report.control} needs {times} to match {arm.name} {at}"
    else:
        said = f"{arm.name} and {report.control} do not differ significantly {at}: the multiplier lies in {span}"
    if DISAGREE in arm.flags:
        said += f" by the grid, between {top.t_low:.2f} and {top.t_high:.2f} by the line"
    return f"{said}; {_trend(trend, count)}{_extrapolation(report, arm)}"


def _one_size(report: LadderReport, arms: Sequence[ArmRow]) -> list[str]:
    """The findings of a ladder of one size, which has no compute multiplier: differences of loss."""
    if len(report.rungs) != 1:
        return []
    found, alike, unjudged = [], [], []
    for arm in arms:
        gap = arm.rungs[0].difference if arm.rungs else None
        if gap is None or gap.p_holm is None or gap.half_width is None:
            unjudged.append(arm.name)
        elif gap.significant:
            side = "lower" if gap.mean < 0 else "higher"
            amount = f"{abs(gap.mean):.3f} ± {gap.half_width:.3f} nats ({gap.pairs} seeds, Holm p {gap.p_holm:.2g})"
            found.append(f"{arm.name} has a {side} loss than {report.control}, by {amount}")
        else:
            alike.append(arm.name)
    if len(unjudged) == len(arms):
        return []
    found += [f"not significantly different from {report.control} in loss: {', '.join(alike)}"] if alike else []
    return found + ([f"not tested, for fewer than two seeds or no spread: {', '.join(unjudged)}"] if unjudged else [])


def _trend(trend: CrossedInterval, count: int) -> str:
    span = f"between × {trend.low:.2f} and × {trend.high:.2f} per decade"
    if trend.low <= 1 <= trend.high:
        return f"no significant trend: {span} are compatible"
    way = "grows" if trend.median > 1 else "shrinks"
    if count <= 3:
        return f"the {count} sizes suggest that it {way} with scale, {span}"
    return f"the multiplier {way} with scale, {span}"


def _extrapolation(report: LadderReport, arm: ArmRow) -> str:
    """A clause on the multiplier extrapolated by half a decade; empty if a rule withholds the extrapolation."""
    row = next((row for row in arm.multiplier if row.kind == "half a decade above"), None)
    sealed = report.prediction
    missed = sealed is not None and any(r.arm == arm.name and r.inside is False for r in sealed.rows)
    flags = arm.flags + report.arms[0].flags
    doubtful = any(flag == UNSETTLED or flag.startswith("rate at an edge") for flag in flags)
    if row is None or missed or doubtful or row.high / row.low > WIDEST:
        return ""
    return f"; if the law holds, {row.low:.2f} to {row.high:.2f} half a decade above"

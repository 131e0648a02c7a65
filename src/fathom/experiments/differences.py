"""Computes the numbers and the verdict of a comparison from its runs.

`plan_changed` decides whether the report is exploratory; an exploratory report calls no difference significant.

`compare_runs` decides which differences are one family: those of the final loss, and contrasts. `report/statistics.py`
adjusts them, and decides when a difference is significant and when it has no p-value.

`training/heldout.py` measures losses, iterations per token and their rank correlation, and `training/jacobi_gap.py` the
gap of Jacobi rounds. `timing.py` measures costs; `models/cost.py` calculates parameters, FLOPs and the cache.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from fathom.checkpoints.file_names import LADDER, MACHINE, PAGE, REPORT
from fathom.experiments.arms import Arm, tokens, training_flops
from fathom.experiments.compare_results import (
    ArmResult,
    ArmTrips,
    Band,
    CacheBytes,
    ComparisonReport,
    ContrastGap,
    Curve,
    DomainMean,
    FailedRun,
    PairGap,
    ParallelRun,
    RunRow,
    ShareOfGain,
    Shown,
    TrainingLoss,
    Validation,
)
from fathom.experiments.contrasts import Contrast, sentence
from fathom.experiments.plan import Plan, read_measured
from fathom.models.cost import cache_bytes_per_token, count_parameters, flops_per_token
from fathom.models.registry import recurrence_class
from fathom.recipe import Recipe
from fathom.report.numbers import in_words
from fathom.report.provenance import Provenance
from fathom.report.results import read_result
from fathom.report.statistics import Difference, adjust, paired_difference, paired_ratio
from fathom.training import read_metrics
from fathom.training.results import RunResult, held_out

SMOOTHED = 20
"""Points of the curve of training-loss differences, each the mean over consecutive steps."""


def summarize(plan: Plan, out: Path, source: Provenance) -> ComparisonReport:
    """The contents of `report.json`, computed from the comparison's directory alone. A seed counts once every arm has
    finished it or failed. A failed arm is excluded from that seed; if the control failed, the whole seed is excluded.
    """
    done = {seed: {arm.name: _result(plan, out, arm, seed) for arm in plan.arms} for seed in plan.seeds}
    failed = [FailedRun(**vars(why), arm=run.arm, seed=run.seed) for run in plan.runs(out) if (why := run.failure)]
    lost = {(row.arm, row.seed) for row in failed}
    whole = [seed for seed, runs in done.items() if all(run or (name, seed) in lost for name, run in runs.items())]
    control = plan.control.name
    seeds = [seed for seed in whole if done[seed][control] and sum(run is not None for run in done[seed].values()) > 1]
    arms = [_arm(plan, out, arm, [run for seed in seeds if (run := done[seed][arm.name])]) for arm in plan.arms]
    exploratory = plan_changed(plan, out)
    contrasts = contrasted(plan.contrasts, arms)
    between = compare_runs(arms, judged=not exploratory, contrasts=contrasts) if seeds else []
    report = ComparisonReport(
        **vars(source),
        equal=plan.equal,
        control=plan.control.name,
        seeds=seeds,
        seeds_planned=list(plan.seeds),
        exploratory=exploratory,
        failed=failed,
        arms=arms,
        between=between,
        contrasts=contrasts,
        share_of_uniform_depth=share_of_gain(arms, between) if seeds else None,
        recipe=plan.recipe.to_dict(),
        ladder=f"../../{PAGE}" if (out.parent.parent / LADDER).exists() else None,
    )
    report.verdict = verdict(report)
    return report


def plan_changed(plan: Plan, out: Path) -> bool:
    """Whether the plan's seeds or contrasts were changed after a report had shown results. Changing them until a
    difference is significant inflates false positives, so such a report and all later ones are exploratory and call
    nothing significant. A report of one seed shows no result.
    """
    path = out / REPORT
    if not path.exists():
        return False
    before = read_result(Shown, path, "delete it to discard its results")
    contrasts = [(one.name, one.arms) for one in before.contrasts]
    same = before.seeds_planned == list(plan.seeds) and contrasts == [(one.name, str(one)) for one in plan.contrasts]
    return before.exploratory or (len(before.seeds) > 1 and not same)


def awaited(report: ComparisonReport) -> list[int]:
    """Planned seeds that still lack a result, except seeds in which the control or every other arm has failed."""
    lost = {(row.arm, row.seed) for row in report.failed}
    control, *others = (arm.name for arm in report.arms)
    gone = {
        seed for seed in report.seeds_planned if (control, seed) in lost or all((name, seed) in lost for name in others)
    }
    return [seed for seed in report.seeds_planned if seed not in {*report.seeds, *gone}]


def verdict(report: ComparisonReport) -> str:
    """The verdict in one sentence: significant differences, limits, and whether learning rates were tuned."""
    control = report.arms[0]
    arms = report.compared
    count = len(report.seeds)
    left_out = _left_out(report)
    if not count:
        return f"No seed has been finished by every arm yet, so there is no result{left_out}."
    scope = f"at {in_words(control.parameters)} parameters and {_tokens(control, arms)}"
    if count == 1:
        parts = [f"{arm.name} ended {arm.direction} {control.name}" for arm in arms]
        words = "; ".join([f"{scope}, {_join(parts)}", "another seed may give another order", *_conditions(report)])
        return f"With one seed there is no interval: {words}{left_out}.{smoke_test(report)}"
    lower, higher = ([arm for arm in arms if arm.gap.significant and sign * arm.gap.mean > 0] for sign in (-1, 1))
    family = family_size(report)
    parts = [
        *_claim(lower, "lower than", control, family),
        *_claim(higher, "higher than", control, family),
        *_faint(arms, control, family),
        *_noise([arm for arm in arms if arm.gap.half_width is not None], control),
        *(f"{a.name} ended {a.direction} {control.name}, {_no_interval(a)}" for a in arms if a.gap.half_width is None),
        *([str(share)] if (share := report.share_of_uniform_depth) is not None else []),
        *_rivals(report),
        *(sentence(row.name, row.arms, row) for row in report.contrasts),
    ]
    limits = _conditions(report)
    return f"With {count} seeds, {scope}, {'; '.join([*parts, *limits])}{left_out}.{smoke_test(report)}"


def _conditions(report: ComparisonReport) -> list[str]:
    """Caveats of the verdict: planned seeds that are missing, and seeds or contrasts that were changed after a
    report."""
    done, coming = len(report.seeds), len(awaited(report))
    found = [f"{done} of {done + coming} planned seeds are done"] if coming else []
    if report.exploratory:
        found.append(
            "seeds or contrasts were changed after a report, so this is exploratory and no difference counts as "
            "significant"
        )
    return found


def smoke_test(report: ComparisonReport) -> str:
    """A warning for comparisons that are too short to decide anything, else empty."""
    control = report.arms[0]
    if control.tokens >= control.parameters or report.ladder is not None:
        return ""
    return (
        " This is a smoke test: it trains on fewer tokens than the model has parameters, at a learning rate that was "
        "not tuned for each arm, as `fathom ladder` tunes it."
    )


def _tokens(control: ArmResult, arms: Sequence[ArmResult]) -> str:
    """The control's number of tokens, and the arms that read another number of tokens, for instance at equal FLOPs."""
    words = in_words(control.tokens)
    others = [f"{arm.name} {own}" for arm in arms if (own := in_words(arm.tokens)) != words]
    return f"{words} tokens" + (f" ({', '.join(others)})" if others else "")


def family_size(report: ComparisonReport) -> int:
    """Number of final-loss differences tested together: to the control, between the other arms, and contrasts."""
    rows = [*(arm.gap for arm in report.compared), *report.between, *report.contrasts]
    return sum(row.p is not None for row in rows)


def _left_out(report: ComparisonReport) -> str:
    """A clause that names the failed runs, for the end of a sentence."""
    rows = report.failed
    if not rows:
        return ""
    names = _join([f"{row.arm} with seed {row.seed} (at step {row.step})" for row in rows])
    control = any(row.arm == report.control for row in rows)
    whole = f", and so are the seeds in which {report.control} failed, for every arm" if control else ""
    return f"; {names} failed and {'is' if len(rows) == 1 else 'are'} left out{whole}"


def _arm(plan: Plan, out: Path, arm: Arm, runs: Sequence[RunRow]) -> ArmResult:
    recipe = plan.recipes[arm.name]
    config = recipe.config()
    measured = read_measured(plan, out, arm.name) if arm != plan.control else None
    scalar = 2 if recipe.train.precision == "bf16" else 4
    cache = measured.cache_bytes_per_token[0] if measured else None
    values = ArmResult(
        name=arm.name,
        mechanism=arm.mechanism,
        overrides=arm.overrides,
        parameters=count_parameters(config),
        flops_per_token=flops_per_token(config, recipe.data.sequence_length),
        cache_bytes_per_token=CacheBytes(
            declared=cache_bytes_per_token(config, scalar),
            measured=_control_cache(plan, out) if arm == plan.control else cache,
        ),
        steps=recipe.train.steps,
        tokens=tokens(recipe),
        training_flops=training_flops(recipe),
        measured=measured,
        runs=list(runs),
    )
    if runs:
        values.loss = statistics.fmean(run.loss for run in runs)
        values.perplexity = math.exp(min(values.loss, 700.0))
        values.bits_per_byte = statistics.fmean(run.bits_per_byte for run in runs)
        values.domains = {name: _domain(runs, name) for name in runs[0].domains}
        values.position_loss = [_mean_of(row) for row in zip(*(run.position_loss for run in runs), strict=True)]
        values.curve = _curve(values)
        values.trips = _trips(recipe, runs)
    return values


def _trips(recipe: Recipe, runs: Sequence[RunRow]) -> ArmTrips:
    """Iterations per token of held-out text: counted if tokens may halt, else the fixed number."""
    config = recipe.config()
    most = recurrence_class(config).trips_of(config)
    counted = [run.trips for run in runs if run.trips is not None]
    solved = [ParallelRun(run.seed, run.jacobi_rounds, run.gap) for run in runs if run.jacobi_rounds]
    if not counted:
        return ArmTrips(float(most), most, None, [], solved)
    return ArmTrips(
        mean=statistics.fmean(trips.mean for trips in counted),
        most=most,
        shares=[statistics.fmean(row) for row in zip(*(trips.shares for trips in counted), strict=True)],
        correlations=[trips.correlation for trips in counted if trips.correlation is not None],
        solved=solved,
    )


def _result(plan: Plan, out: Path, arm: Arm, seed: int) -> RunRow | None:
    """One finished run: its last evaluation, its curve, the machine."""
    run = plan.run(out, arm.name, seed)
    if not run.done:
        return None
    run_dir = run.run_dir
    values, scores = RunResult.of(run_dir), held_out(run_dir)
    lines = read_metrics(run_dir)
    looks, losses = _by_step(lines, "val/loss"), _by_step(lines, "loss")
    machine = run_dir / MACHINE
    return RunRow(
        **{key: value for key, value in vars(scores).items() if key != "perplexity"},
        seed=seed,
        directory=str(run_dir.relative_to(out)),
        seconds=values.seconds,
        epochs=values.epochs,
        machine=read_result(dict[str, object], machine, "delete it") if machine.exists() else None,
        validation=Validation(
            step=[int(look["step"]) for look in looks],
            loss=[look["val/loss"] for look in looks],
            tokens=[int(look["tokens"]) for look in looks],
            seconds=[look["seconds"] for look in looks],
        ),
        training_loss=TrainingLoss([int(line["step"]) for line in losses], [line["loss"] for line in losses]),
    )


def _curve(arm: ArmResult) -> Curve:
    """Validation loss while training: its mean over seeds, and the lowest and highest seed."""
    looks = [run.validation for run in arm.runs]
    runs = [{row[0]: row for row in zip(run.step, run.tokens, run.seconds, run.loss, strict=True)} for run in looks]
    rows = [list(zip(*(run[step] for run in runs), strict=True)) for step in _common(runs)]
    return Curve(
        tokens=[tokens[0] for _, tokens, _, _ in rows],
        flops=[tokens[0] * arm.training_flops / arm.tokens for _, tokens, _, _ in rows],
        seconds=[statistics.fmean(seconds) for _, _, seconds, _ in rows],
        loss=[statistics.fmean(losses) for *_, losses in rows],
        low=[min(losses) for *_, losses in rows],
        high=[max(losses) for *_, losses in rows],
    )


def _by_step(lines: Sequence[dict[str, float]], key: str) -> list[dict[str, float]]:
    """The metrics lines that contain a key, one for each step: a resumed run may have logged a step twice."""
    found = {line["step"]: line for line in lines if key in line}
    return [found[step] for step in sorted(found)]


def _losses(run: RunRow) -> dict[int, float]:
    """Training loss by step."""
    return dict(zip(run.training_loss.step, run.training_loss.loss, strict=True))


def _common(runs: Sequence[Mapping[int, object]]) -> list[int]:
    """The steps that all runs have logged: a power cut may have lost lines of some runs."""
    return sorted(set(runs[0]).intersection(*runs[1:]))


def contrasted(contrasts: Sequence[Contrast], arms: Sequence[ArmResult]) -> list[ContrastGap]:
    """The values of those contrasts whose arms share a seed."""
    losses = {arm.name: {run.seed: run.loss for run in arm.runs} for arm in arms}
    found = ((one, one.of(losses)) for one in contrasts)
    return [
        ContrastGap(gap.mean, gap.pairs, gap.half_width, gap.p, name=one.name, arms=str(one))
        for one, gap in found
        if gap is not None
    ]


def compare_runs(
    arms: Sequence[ArmResult], judged: bool = True, contrasts: Sequence[ContrastGap] = ()
) -> list[PairGap]:
    """Add to every arm its paired difference to the control (the first arm); returns the paired differences between the
    other arms.

    All p values are adjusted as one family, so the chance of any false positive stays below 5 %, whatever the number of
    arms. If they are not `judged`, none is adjusted, and no difference is significant.
    """
    found = [arm for arm in arms[1:] if arm.runs]
    _add_differences(found, arms[0])
    between = _between(found)
    if judged:
        # Which pairs can be equal at once bounds a family of pairs alone.
        adjust([*(arm.gap for arm in found), *between, *contrasts], None if contrasts else len(found) + 1)
    return between


def _add_differences(arms: Sequence[ArmResult], control: ArmResult) -> None:
    """Add to each arm its differences to the control: of the final loss, of the loss by position and domain, and of the
    loss while training."""
    for arm in arms:
        pairs = _pairs(arm, control)
        arm.difference = _difference(pairs, lambda run: run.loss)
        places = range(len(control.position_loss))
        if len(arm.position_loss) == len(places):
            arm.difference_by_position = [_difference_at(place, pairs) for place in places]
        for name, domain in arm.domains.items():
            if name in control.domains:
                domain.difference = _difference(pairs, _of(name))
        arm.difference_while_training = _while_training(pairs, arm.tokens / arm.steps)


def _pairs(a: ArmResult, b: ArmResult) -> list[tuple[RunRow, RunRow]]:
    """Pairs of runs of two arms with the same seed."""
    partners = {run.seed: run for run in b.runs}
    return [(run, partners[run.seed]) for run in a.runs if run.seed in partners]


def _mean_of(losses: Sequence[float | None]) -> float | None:
    """The mean loss in a part of the context; None if the part has no target, so that every run's loss is None."""
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else None


def _difference_at(place: int, pairs: Sequence[tuple[RunRow, RunRow]]) -> Difference | None:
    """The paired difference of the loss in a part of the context; None if the part has no target."""
    losses = [(a.position_loss[place], b.position_loss[place]) for a, b in pairs]
    known = [(a, b) for a, b in losses if a is not None and b is not None]
    return paired_difference(*zip(*known, strict=True)) if len(known) == len(losses) else None


def _of(domain: str) -> Callable[[RunRow], float]:
    return lambda run: run.domains[domain].loss


def _difference(pairs: Sequence[tuple[RunRow, RunRow]], value: Callable[[RunRow], float]) -> Difference:
    """The paired difference of one value, such as the final loss, over pairs of runs."""
    return paired_difference([value(a) for a, _ in pairs], [value(b) for _, b in pairs])


def _while_training(pairs: Sequence[tuple[RunRow, RunRow]], step_tokens: float) -> Band:
    """Training loss minus the control's on the same batches, averaged over consecutive steps."""
    runs = [(_losses(a), _losses(b)) for a, b in pairs]
    steps = _common([run for pair in runs for run in pair])
    size = max(1, math.ceil(len(steps) / SMOOTHED))
    stretches = [steps[first : first + size] for first in range(0, len(steps), size)]
    gaps = [[statistics.fmean(a[step] - b[step] for step in stretch) for a, b in runs] for stretch in stretches]
    return Band(
        tokens=[(statistics.fmean(stretch) - 0.5) * step_tokens for stretch in stretches],
        mean=[statistics.fmean(row) for row in gaps],
        low=[min(row) for row in gaps],
        high=[max(row) for row in gaps],
    )


def _between(arms: Sequence[ArmResult]) -> list[PairGap]:
    """The paired difference between every two arms."""
    rows = []
    for a, b in combinations(arms, 2):
        if pairs := _pairs(a, b):
            gap = _difference(pairs, lambda run: run.loss)
            rows.append(PairGap(gap.mean, gap.pairs, gap.half_width, gap.p, a=a.name, b=b.name))
    return rows


def share_of_gain(arms: Sequence[ArmResult], between: Sequence[PairGap]) -> ShareOfGain | None:
    """The share of depth_attention's gain that uniform_depth, a plain average, reaches too, with its interval by
    Fieller's theorem. If the gain is not significantly different from zero, the interval is unbounded and no share is
    given.
    """
    found = {arm.mechanism: arm for arm in arms[1:] if not arm.overrides}
    depth, uniform = found.get("depth_attention"), found.get("uniform_depth")
    if depth is None or uniform is None or arms[0].mechanism != "vanilla":
        return None
    if [run.seed for run in depth.runs] != [run.seed for run in uniform.runs] or not depth.runs:
        return None  # gains over different seeds cannot be divided
    gains = ([b.loss - a.loss for a, b in _pairs(arm, arms[0])] for arm in (uniform, depth))
    ratio = paired_ratio(*gains)
    known = ratio is not None and depth.gap.mean < 0
    pair = next(row for row in between if {row.a, row.b} == {depth.name, uniform.name})
    value, low, high = (ratio.value, ratio.low, ratio.high) if ratio is not None and known else (None, None, None)
    return ShareOfGain(value, low, high, pair)


def _domain(runs: Sequence[RunRow], name: str) -> DomainMean:
    scores = [run.domains[name] for run in runs]
    return DomainMean(
        loss=statistics.fmean(score.loss for score in scores),
        bits_per_byte=statistics.fmean(score.bits_per_byte for score in scores),
    )


def _control_cache(plan: Plan, out: Path) -> float | None:
    found = (read_measured(plan, out, arm.name) for arm in plan.arms[1:])
    return next((values.cache_bytes_per_token[1] for values in found if values), None)


def _no_interval(arm: ArmResult) -> str:
    """Why an arm's difference has no interval."""
    if arm.gap.pairs < 2:
        return "without an interval"
    return "with the same difference for every seed, which is too coarse for an interval"


def _claim(found: Sequence[ArmResult], how: str, control: ArmResult, family: int) -> list[str]:
    """Differences that are significant after Holm's adjustment."""
    if not found:
        return []
    amounts = [f"{abs(arm.gap.mean):.4f} ± {arm.gap.half_width:.4f}" for arm in found]
    names = _join([f"{arm.name}'s" for arm in found])
    alone = len(found) == 1
    each = "" if alone else ", in that order"
    holds = "the 95 % interval over seeds excludes zero" if alone else "95 % intervals over seeds exclude zero"
    many = f", also by Holm's test for {family} comparisons" if family > 1 else ""
    loss = "held-out loss is" if alone else "held-out losses are"
    return [f"{names} {loss} {how} {control.name}'s by {_join(amounts)} nats{each} ({holds}{many})"]


def _faint(arms: Sequence[ArmResult], control: ArmResult, family: int) -> list[str]:
    """Differences whose own interval excludes zero but which are not significant after Holm's adjustment."""
    found = [arm for arm in arms if arm.gap.excludes_zero and not arm.gap.significant]
    if not found:
        return []
    shown = _join([f"{arm.name} ({arm.gap})" for arm in found])
    exclude = "interval excludes zero" if len(found) == 1 else "intervals exclude zero"
    tested = any(arm.gap.p_holm is not None for arm in found)
    but = f", but not by Holm's test for {family} comparisons" if tested else ""
    return [f"for {shown} the {exclude} taken alone{but}: a hint of a difference to {control.name}, not significant"]


def _noise(arms: Sequence[ArmResult], control: ArmResult) -> list[str]:
    found = [arm for arm in arms if not arm.gap.excludes_zero]
    if not found:
        return []
    if all(arm.gap.mean == 0 and arm.gap.half_width == 0 for arm in found):
        return [f"{_join([arm.name for arm in found])} and {control.name} have exactly equal losses"]
    shown = _join([f"{arm.name} ({arm.gap} nats)" for arm in found])
    differ = "the difference of" if len(found) == 1 else "the differences of"
    return [f"{differ} {shown} to {control.name} {'is' if len(found) == 1 else 'are'} not significant"]


def _rivals(report: ComparisonReport) -> list[str]:
    """Whether depth_attention beats uniform_depth, or else whether the best two of several arms differ."""
    if (share := report.share_of_uniform_depth) is not None:
        names = {share.difference.a, share.difference.b}
    else:
        names = {arm.name for arm in sorted(report.compared, key=lambda arm: arm.gap.mean)[:2]}
    row = next((row for row in report.between if {row.a, row.b} == names), None)
    if row is None:
        return []
    low, high = (row.a, row.b) if row.mean < 0 else (row.b, row.a)
    if row.significant:
        return [f"{low} is also lower than {high}, by {abs(row.mean):.4f} ± {row.half_width:.4f}"]
    return [f"{row.a} and {row.b} do not differ significantly"]


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

"""A comparison's numbers as a table in the terminal and as a page.

`differences.py` computes the numbers and the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from fathom.experiments.arms import Arm
from fathom.experiments.compare_results import ArmResult, ArmTrips, ComparisonReport, DomainMean
from fathom.experiments.differences import family_size
from fathom.report import html
from fathom.report.numbers import DASH, short
from fathom.report.plots import IntervalMark, Line, ends, interval_plot, reach
from fathom.report.tables import PlainTable, without
from fathom.settings import dump


def tables(report: ComparisonReport) -> list[PlainTable]:
    """Two tables for a terminal, which has no room for quartiles: the loss of each arm, and its cost."""
    return [quality_rows(report), without("quartiles", cost_rows(report))]


def quality_rows(report: ComparisonReport) -> PlainTable:
    """The loss of each arm."""
    arms = report.arms
    columns = ["arm", "loss", "difference", "Holm p", "perplexity", "bits/byte"]
    rows = []
    for arm in arms:
        if not arm.runs:
            rows.append([arm.name, *[DASH] * 5])
            continue
        gap = arm.difference
        holm = DASH if gap is None or gap.p_holm is None else f"{gap.p_holm:.3f}"
        numbers = [f"{arm.perplexity:.2f}", f"{arm.bits_per_byte:.4f}"]
        rows.append([arm.name, f"{arm.loss:.4f}", "control" if gap is None else str(gap), holm, *numbers])
    many = len(report.seeds)
    failed = "".join(f"; without {row.arm}, seed {row.seed}, which failed" for row in report.failed)
    if not many:
        return f"Held-out loss: no seed is finished by every arm yet{failed}", columns, rows
    interval = "with its 95 % interval over seeds" if many > 1 else "without an interval: one seed"
    mean = f"mean of {many} seeds" if many > 1 else "one seed"
    return (
        f"Held-out loss in nats per token, lower is better ({mean}); paired difference {interval}{failed}",
        columns,
        rows,
    )


def cost_rows(report: ComparisonReport) -> PlainTable:
    """The cost of each arm."""
    columns = ["arm", "parameters", "FLOPs/token", "cache B/token", "step time", "quartiles", "memory"]
    rows = []
    for arm in report.arms:
        cache, one = arm.cache_bytes_per_token.measured, "1" if arm.name == report.control else DASH
        cells = [one, DASH, one]
        if arm.measured:
            time, memory = arm.measured.time, arm.measured.memory_bytes
            spread = f"{time.low:.3f} … {time.high:.3f}"
            cells = [f"× {time.median:.3f}", spread, f"× {memory[0] / memory[1]:.3f}"]
        cell = DASH if cache is None else f"{cache:,.0f}"
        rows.append([arm.name, f"{arm.parameters:,}", short(arm.flops_per_token), cell, *cells])
    first = report.arms[0]
    step = f"a training step of {first.tokens // first.steps:,} tokens"
    return f"Cost; time and memory of {step} as ratios to the control", columns, rows


def page(report: ComparisonReport) -> str:
    """The whole report."""
    names = [arm.name for arm in report.arms]
    title = f"{', '.join(names[1:])} against {names[0]}"
    if not report.seeds:
        return html.page(title, report.verdict, _failed(report), _provenance(report))
    return html.page(
        title,
        html.clauses(report.verdict, names),
        html.table(*quality_rows(report)),
        _failed(report),
        _share_sentence(report),
        html.figures(_differences(report), _while_training(report)),
        html.section("Learning curves", html.legend(names), _curves(report)),
        html.section("Along the context", html.legend(names), _positions(report)),
        html.section("Loop iterations", _trips(report), _solved(report)),
        html.section("Domains", _domains(report)),
        html.section("Cost", html.table(*cost_rows(report)), *_cost_notes(report), _budget(report)),
        html.section("Between the arms", _between(report), _contrasts(report)),
        html.section("Every run", _runs(report)),
        html.section("How to read this", html.bullets(_method(report))),
        html.section("Where it comes from", _provenance(report)),
    )


def _compared(report: ComparisonReport) -> list[tuple[int, ArmResult]]:
    """Every arm, except the control, that has finished a seed, each with the index of its colour."""
    return [(i, arm) for i, arm in enumerate(report.arms) if arm.difference is not None]


def _failed(report: ComparisonReport) -> Markup:
    rows = [[f"{row.arm}, seed {row.seed}", str(row.step), row.error] for row in report.failed]
    return html.table("Excluded: runs that failed", ["run", "step", "why"], rows, prose=["why"])


def _differences(report: ComparisonReport) -> Markup:
    arms = _compared(report)
    items = [IntervalMark(arm.name, arm.gap.mean, arm.gap.low, arm.gap.high, i) for i, arm in arms]
    words = "; ".join(f"{arm.name} {arm.difference}" for _, arm in arms)
    control = report.control
    svg = interval_plot(items, "nats per token", f"Held-out loss minus {control}'s: {words}")
    caption = "Left of the dashed line is better. " + ("Bars are 95 % intervals." if len(report.seeds) > 1 else "")
    return html.figure(f"Held-out loss minus {control}'s", svg, caption)


def _while_training(report: ComparisonReport) -> Markup:
    lines = []
    for i, arm in _compared(report):
        curve = arm.difference_while_training
        if curve is not None and curve.mean:
            lines.append(Line(arm.name, curve.tokens, curve.mean, i, curve.low, curve.high, marks=False))
    caption = "On the same batches, averaged over consecutive steps. Bands span the seeds."
    title = f"Training loss minus {report.control}'s"
    return html.plot(title, lines, ("tokens", "nats per token"), ends(lines, "+.4f"), caption, zero=True)


def _curves(report: ComparisonReport) -> Markup:
    budget = f"the comparison is at equal {'FLOPs' if report.equal == 'flops' else report.equal}"
    machines = {str(run.machine) for arm in report.arms for run in arm.runs}
    where = (
        "on different machines" if len(machines) > 1 else "of wall-clock time, including any other load of the machine"
    )
    return html.figures(
        _curve(report, "tokens", "tokens"),
        _curve(report, "flops", "training FLOPs", f"By arithmetic; {budget}."),
        _curve(report, "seconds", "seconds in steps", f"Seconds {where}."),
    )


def _curve(report: ComparisonReport, key: str, x_label: str, caption: str = "Bands span the seeds.") -> Markup:
    lines = [
        Line(arm.name, getattr(arm.curve, key), arm.curve.loss, i, arm.curve.low, arm.curve.high)
        for i, arm in enumerate(report.arms)
        if arm.runs and arm.curve.loss
    ]
    return html.plot(f"Against {x_label}", lines, (x_label, "held-out loss, nats"), ends(lines, ".4f"), caption)


def _positions(report: ComparisonReport) -> Markup:
    """Plots of the loss, and of its difference to the control's, along the context, which is split into equal parts."""
    control = report.arms[0]
    length = report.recipe["data"]["sequence_length"]
    count = len(control.position_loss)
    read = [place for place, loss in enumerate(control.position_loss) if loss is not None]
    if len(read) < 2:
        return Markup()
    places = [(i + 0.5) * length / count for i in read]
    arms = [(i, arm) for i, arm in enumerate(report.arms) if len(arm.position_loss) == count]
    losses = [[loss for loss in arm.position_loss if loss is not None] for _, arm in arms]
    lines = [Line(arm.name, places, row, i) for (i, arm), row in zip(arms, losses, strict=True)]
    gaps = [_gap_along(i, arm, places) for i, arm in arms[1:]]
    empty = "Parts of the context without targets have no point." if len(read) < count else ""
    bands = "Bands are 95 % intervals of each part alone."
    across = "position in the context"
    return html.figures(
        html.plot("Held-out loss", lines, (across, "nats per token"), reach(lines, ".3f"), empty),
        html.plot(
            f"Held-out loss minus {control.name}'s",
            gaps,
            (across, "nats per token"),
            reach(gaps, "+.4f"),
            bands,
            zero=True,
        ),
    )


def _gap_along(series: int, arm: ArmResult, places: Sequence[float]) -> Line:
    """The curve of an arm's loss difference to the control along the context, for the parts that have targets."""
    rows = [row for row in arm.difference_by_position if row is not None]
    low = [row.low for row in rows if row.low is not None]
    high = [row.high for row in rows if row.high is not None]
    bands = (None, None) if len(low) < len(rows) else (low, high)
    return Line(arm.name, places, [row.mean for row in rows], series, *bands)


def _trips(report: ComparisonReport) -> Markup:
    """Iterations per token, the correlation of a token's loss with its iterations, and the arms' losses; empty if no
    arm lets tokens halt."""
    arms = [(i, arm, arm.trips) for i, arm in enumerate(report.arms) if arm.trips is not None]
    if not any(trips.shares for *_, trips in arms):
        return Markup()
    rows = [[arm.name, f"{trips.mean:.2f}", *_trips_cells(trips)] for _, arm, trips in arms]
    caption = "Iterations per token on held-out text; correlation of a token's loss with its iterations"
    columns = ["arm", "mean", "at most", "rank correlation", "95 % interval, by seed"]
    shares = [
        Line(arm.name, list(range(1, len(trips.shares) + 1)), trips.shares, i) for i, arm, trips in arms if trips.shares
    ]
    words = "; ".join(f"{line.name} {', '.join(f'{100 * share:.0f} %' for share in line.y)}" for line in shares)
    points = [Line(arm.name, [trips.mean], [arm.loss], i) for i, arm, trips in arms]
    at = "; ".join(f"{line.name} {line.y[0]:.4f} at {line.x[0]:.2f}" for line in points)
    pays = "Halting pays off for an arm that lies below those with a fixed number of iterations."
    note = (
        "A correlation above zero means that tokens which are harder to predict make more iterations. It is "
        "Spearman's; its bootstrap interval is over sequences and does not cover the seed."
    )
    return Markup().join(
        [
            html.table(caption, columns, rows, note=note),
            html.legend([arm.name for arm in report.arms]),
            html.figures(
                html.plot("When tokens halt", shares, ("iterations", "share of tokens"), words),
                html.plot(
                    "Loss over iterations", points, ("mean iterations per token", "held-out loss, nats"), at, pays
                ),
            ),
        ]
    )


def _solved(report: ComparisonReport) -> Markup:
    """For arms that read text in parallel by Jacobi rounds: how much their loss exceeds that of token-by-token
    decoding; empty without such arms."""
    rows = []
    for arm in report.arms:
        for found in arm.trips.solved if arm.trips is not None else ():
            gap, tokens = (DASH, DASH) if found.gap is None else (found.gap.with_interval, f"{found.gap.tokens:,}")
            rows.append([arm.name, str(found.seed), f"{found.jacobi_rounds:g}", gap, tokens])
    columns = ["arm", "seed", "Jacobi rounds", "nats over decoding, 95 % interval", "on tokens"]
    note = (
        "In these arms an iteration reads later iterations of earlier tokens, so text that is read in parallel takes "
        "rounds that approximate decoding, and every held-out loss here is that of the rounds. The gap is measured on "
        "a sample, after the last step; its interval is over windows of text."
    )
    return html.table("The loss of reading in parallel, minus that of decoding", columns, rows, note=note)


def _trips_cells(trips: ArmTrips) -> list[str]:
    found = trips.correlations
    if not found:
        return [str(trips.most), DASH, DASH]
    mean = sum(row.value for row in found) / len(found)
    ends = "; ".join(f"{row.low:+.3f} … {row.high:+.3f}" for row in found)
    return [str(trips.most), f"{mean:+.3f}", ends]


def _domains(report: ComparisonReport) -> Markup:
    names = list(report.arms[0].domains)
    if len(names) < 2:
        return Markup()
    rows = []
    for arm in (arm for arm in report.arms if arm.runs):
        found = [arm.domains.get(name) for name in names]
        rows.append([arm.name, *(DASH if score is None else _domain_cell(score) for score in found)])
    caption = "Bits per byte of each domain, and the paired difference of the loss in nats per token"
    if len(report.seeds) > 1:
        caption += " with its 95 % interval, uncorrected for the number of domains and arms and not part of Holm's test"
    return html.table(caption, ["arm", *names], rows)


def _domain_cell(score: DomainMean) -> str:
    if not math.isfinite(score.loss):  # the domain has no targets
        return DASH
    gap = "" if score.difference is None else f" ({score.difference})"
    return f"{score.bits_per_byte:.4f}{gap}"


def _between(report: ComparisonReport) -> Markup:
    rows = [
        [f"{row.a} − {row.b}", str(row), DASH if row.p_holm is None else f"{row.p_holm:.3f}"] for row in report.between
    ]
    caption = "Paired differences of the held-out loss, in nats per token, among the arms other than the control"
    if len(report.seeds) > 1:
        caption += "; intervals are uncorrected; Holm's p covers these and the differences to the control"
    return html.table(caption, ["pair", "difference", "Holm p"], rows)


def _contrasts(report: ComparisonReport) -> Markup:
    if not report.contrasts:
        return Markup()
    rows = [
        [row.name, row.arms, str(row), DASH if row.p_holm is None else f"{row.p_holm:.3f}"] for row in report.contrasts
    ]
    return html.table("Contrasts of several arms, seed by seed", ["contrast", "arms", "value", "Holm p"], rows)


def _share_sentence(report: ComparisonReport) -> Markup:
    share = report.share_of_uniform_depth
    if share is None:
        return Markup()
    gap = share.difference
    pair = f"{gap.a} minus {gap.b} is {gap}."
    why = (
        "by Fieller's theorem, uncorrected; uniform_depth averages where depth_attention attends."
        if share.share is not None
        else "depth_attention has no significant gain over these seeds."
    )
    return html.paragraph(f"Averaging compared with attending: {share}; {why} {pair}")


def _cost_notes(report: ComparisonReport) -> list[Markup]:
    found = [arm.measured for arm in report.arms if arm.measured]
    if not found:
        return [html.paragraph("Step time, memory and cache were not measured.", quiet=True)]
    time = found[0].time
    times = "1 time" if time.pairs == 1 else f"{time.pairs} times"
    text = (
        f"Step time: the arm and the control take turns A B B A in one process on the same batches, at steps that are "
        f"spread over the run, {times}, by {time.clock}; median of the ratios with quartiles. "
        f"The control's step took {time.seconds[1]:.3f} s. "
        f"Memory: {found[0].memory}. Cache: measured growth in bytes per decoded token."
    )
    return [html.paragraph(text, quiet=True)]


def _budget(report: ComparisonReport) -> Markup:
    rows = [[arm.name, f"{arm.steps:,}", f"{arm.tokens:,}", short(arm.training_flops)] for arm in report.arms]
    return html.table("Settings of each run of an arm", ["arm", "steps", "tokens", "training FLOPs"], rows)


def _runs(report: ComparisonReport) -> Markup:
    columns = ["run", "loss", "perplexity", "bits/byte", "seconds"]
    rows = [
        [
            f"{arm.name}, seed {run.seed}",
            *(f"{run.loss:.4f}", f"{run.perplexity:.2f}", f"{run.bits_per_byte:.4f}", f"{run.seconds:.0f}"),
        ]
        for arm in report.arms
        for run in arm.runs
    ]
    return html.table("Each is an ordinary training run in this directory", columns, rows)


def _method(report: ComparisonReport) -> list[str]:
    """Sentences on what all arms have in common, and on how to read the numbers."""
    equal = {
        "tokens": "All arms trained on the same number of tokens.",
        "trips": "All arms have the control's tokens times iterations, as counted in training (with Jacobi rounds and "
        "halting): steps and learning-rate schedule were scaled.",
        "flops": "All arms spent the control's training FLOPs: steps and learning-rate schedule were scaled.",
    }
    arms = (Arm(arm.name, arm.mechanism, tuple(arm.overrides)) for arm in report.arms[1:])
    own = [arm.name for arm in arms if arm.own_steps]
    budget = equal[report.equal] + (f" Except {', '.join(own)}, which have their own train.steps." if own else "")
    tests = family_size(report)
    lines = [
        f"Paired: for each seed, all arms read the same tokens in the same order. {_shared(report)}",
        budget + _epochs(report),
        *_held_out(report),
        "Intervals are Student's t over the seeds' paired differences. They cover the choice of seed (initial weights "
        "and data order), but not the corpus or the learning rate, which "
        + ("the ladder tuned for each arm." if report.ladder else "was not tuned for any arm."),
        _beyond(report),
    ]
    if tests > 1:
        lines.append(
            "To limit false alarms with several arms, the verdict calls a difference significant only if Holm's test "
            f"over all {tests} differences in this report, to the control and among the other arms, agrees (p below "
            "0.05, with Shaffer's counts of how many arms can still be equal). Intervals are uncorrected."
        )
    if len(report.seeds) in (2, 3):
        lines.append("With so few seeds, intervals are wide: a difference that is not significant may still be real.")
    if report.exploratory:
        lines.append(
            "Seeds were added after a report had shown results, so this report is exploratory: adding up to five "
            "seeds until an interval excludes zero finds a difference between equal arms in 10 % of cases."
        )
    lines.append("Perplexity is exp of the mean loss. FLOPs are by arithmetic: training costs three forward passes.")
    return lines


def _beyond(report: ComparisonReport) -> str:
    """A note that the results hold for one model size only, with a pointer to ladders."""
    if report.ladder:
        link = Markup('<a href="{}">the whole ladder</a>').format(report.ladder)
        return Markup("This is one model size of a ladder; see {} for the trend with size.").format(link)
    return (
        "Results at one size do not carry over to another. `fathom ladder` compares the arms at several sizes, each "
        "with a tuned learning rate, and estimates how much more compute the control would need."
    )


def _epochs(report: ComparisonReport) -> str:
    """Epochs over the corpus, if known."""
    counts = sorted(run.epochs for arm in report.arms for run in arm.runs)
    if not counts:
        return ""
    words = f"{counts[0]:.3g}" if counts[0] == counts[-1] else f"{counts[0]:.3g} to {counts[-1]:.3g}"
    return f" That is {words} epochs of the corpus."


def _held_out(report: ComparisonReport) -> list[str]:
    """Sentences on the held-out text on which the losses are measured."""
    run = next((run for arm in report.arms for run in arm.runs), None)
    if run is None or run.coverage is None:
        return []
    tokens, coverage = f"{run.tokens:,} predicted tokens", run.coverage
    if coverage == 1:
        where = "all of the validation split"
    else:
        where = (
            f"{100 * coverage:.3g} % of the validation split: one window from each of equally long parts of every "
            "domain, chosen by a fixed hash"
        )
    return [f"Held-out loss is on {tokens}, {where}; the same text for every arm and seed."]


def _shared(report: ComparisonReport) -> str:
    counts = [(a.name, *a.measured.shared_tensors) for a in report.arms if a.measured]
    if not counts:
        return "Parameters of equal name and shape start from equal values."
    if all(shared == equal for _, shared, equal in counts):
        return "Every parameter of equal name and shape started from bitwise equal values (checked)."
    words = ", ".join(f"{name} {equal} of {shared}" for name, shared, equal in counts)
    return f"Parameters of equal name and shape that started from bitwise equal values: {words}."


def _provenance(report: ComparisonReport) -> Markup:
    arms = [{"name": arm.name, "mechanism": arm.mechanism, "overrides": list(arm.overrides)} for arm in report.arms]
    text = dump({"arms": arms, "recipe": report.recipe})
    return html.source(report) + html.details("The recipe", text)

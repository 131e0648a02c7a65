"""A ladder's numbers as tables in the terminal and as a page.

`multipliers.py` computes the numbers and the verdict, with `acquisition.py` for a puzzle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from fathom.experiments.acquisition import SOLVED
from fathom.experiments.ladder_results import ArmRow, CurvePoint, LadderReport, PuzzleShares
from fathom.experiments.rungs import LAYERS
from fathom.experiments.scaling import DECADE
from fathom.report import html
from fathom.report.files import asdict, write_atomically
from fathom.report.numbers import DASH, short, signed
from fathom.report.plots import Line
from fathom.report.provenance import machine
from fathom.report.results import to_json
from fathom.report.tables import PlainTable, without
from fathom.settings import dump

RUNS = "runs.jsonl"
FLOPS = "training FLOPs, log10"


def write_report(report: LadderReport, out: Path) -> tuple[Path, Path]:
    """Write `report.json`, `report.html`, and `runs.jsonl`, whose rows suffice to repeat the fit."""
    rows = [
        {
            "arm": arm.name,
            "rung": cell.index,
            "budget": cell.budget,
            "seed": seed,
            "loss": loss,
            **{key: getattr(cell, key) for key in ("rate", "weight_decay", "layers", "parameters", "tokens", "flops")},
        }
        for arm in report.arms
        for cell in (*arm.rungs, *arm.further)
        for seed, loss in zip(cell.seeds, cell.loss, strict=True)
    ]
    write_atomically(out / RUNS, "".join(f"{to_json(row)}\n" for row in rows))
    return html.write(out, report, page(report))


def tables(report: LadderReport) -> list[PlainTable]:
    """Tables for a terminal; the multipliers' flags are in the verdict, because the table has no room for them."""
    return [
        without("flags", multiplier_rows(report)),
        *puzzle_tables(report),
        loss_rows(report),
        *contrast_rows(report),
    ]


def page(report: LadderReport) -> str:
    """The whole report."""
    names = [arm.name for arm in report.arms] or [arm.name for arm in report.plan.arms]
    own = [name for name in names[1:] if name not in {arm.name for arm in report.arms if arm.matched}]
    return html.page(
        f"{', '.join(own)} against {names[0]}, size by size",
        report.verdict,
        html.table(*multiplier_rows(report), prose=("flags",)),
        *(html.table(*rows) for rows in puzzle_tables(report)),
        html.section("Loss and multiplier", html.legend(names), html.figures(_losses(report), _multipliers(report))),
        html.section("Accuracy", *_accuracies(report)),
        html.section("Learning rates", html.figures(*_bowls(report)), _checks(report)),
        html.section("The sealed prediction", _sealed(report)),
        html.section("The value of an iteration", _phi(report)),
        html.section(
            "Size by size",
            html.table(*loss_rows(report)),
            *(html.table(*rows) for rows in contrast_rows(report)),
            _seed_control(report),
        ),
        html.section("The multiplier in other costs", _views(report)),
        html.section("The law and the noise", _law(report)),
        html.section("Sizes", html.table(*_sizes(report)), html.table(*_cells(report))),
        html.section("Runs that failed", _diverged(report)),
        html.section("How to read this", html.bullets(_method(report))),
        html.section("Where it comes from", _provenance(report)),
    )


def multiplier_rows(report: LadderReport) -> PlainTable:
    """The compute multipliers."""
    rows = []
    for arm in report.arms[1:]:
        trend = arm.per_decade
        if not arm.multiplier or trend is None:
            continue
        by_kind = {row.kind: row for row in arm.multiplier}
        rows.append(
            [
                arm.name,
                str(by_kind["middle"]),
                str(arm.top),
                str(trend),
                DASH if arm.p_holm is None else f"{arm.p_holm:.3f}",
                f"{arm.diverged[0]}/{arm.diverged[1]}",
                "; ".join(arm.flags) or DASH,
            ]
        )
    columns = ["arm", "middle", "largest size", "per decade", "Holm p", "diverged", "flags"]
    caption = (
        f"Compute multiplier: what {report.control} would need over what the arm spends, with 95 % intervals; per "
        "decade: its factor for ten times the compute"
    )
    found = caption, columns, rows
    return found if any(arm.diverged[0] for arm in report.arms[1:]) else without("diverged", found)


def puzzle_tables(report: LadderReport) -> list[PlainTable]:
    """Tables of a puzzle: accuracy by difficulty with the number of solved runs, and the control's FLOPs to solve the
    puzzle divided by an arm's."""
    puzzle = report.puzzle
    if puzzle is None:
        return []
    solved, sooner, said = list[list[str]](), list[list[str]](), dict[str, None]()
    for row in puzzle.rows:
        name = row.arm if len(report.rungs) == 1 else f"{row.arm}, rung {row.index}"
        shares = [row.domains[domain] for domain in puzzle.domains]
        ratios = [share.sooner for share in shares if share.sooner is not None]
        if row.seeds:
            solved.append([name, *map(_solved, shares), short(row.flops)])
        if ratios:
            said[ratios[0].basis] = None
            sooner.append([name, *map(str, ratios)])
    chance = f"chance is {puzzle.chance:.3f}"
    median = f"Median accuracy on held-out rows, and runs that solved it (accuracy {SOLVED} or more); {chance}"
    spent = (
        f"FLOPs until {report.control} solves it over those of the arm: {' or '.join(said)}. A run solves it "
        "between two evaluations, or not within its FLOPs"
    )
    return [(median, ["arm", *puzzle.domains, "FLOPs"], solved), (spent, ["arm", *puzzle.domains], sooner)]


def loss_rows(report: LadderReport) -> PlainTable:
    """Final loss and paired difference at every rung."""
    rows = []
    for arm in report.arms:
        cells = []
        for cell in arm.rungs:
            if not cell.loss:
                cells.append(DASH)
            elif cell.difference is None:
                cells.append(f"{sum(cell.loss) / len(cell.loss):.4f} ({len(cell.loss)})")
            else:
                cells.append(f"{cell.difference} ({cell.difference.pairs})")
        rows.append([arm.name, *cells])
    sizes = [rung for rung in report.rungs if rung.budget == 0]
    columns = ["arm", *(f"{short(rung.parameters, 3)}" for rung in sizes)]
    if len(report.rungs) == 1 and any(arm.p_holm is not None for arm in report.arms):  # no table of multipliers has it
        columns.append("Holm p")
        for row, arm in zip(rows, report.arms, strict=True):
            row.append(DASH if arm.p_holm is None else f"{arm.p_holm:.3f}")
    return (
        "Held-out loss of the control in nats per token, paired differences of the others (seeds), by parameters",
        columns,
        rows,
    )


def contrast_rows(report: LadderReport) -> list[PlainTable]:
    """A table of the contrasts at every size; no table if there are no contrasts."""
    sizes = [rung for rung in report.rungs if rung.budget == 0]
    rows = []
    for row in report.contrasts:
        values = [row.rungs.get(size.index) for size in sizes]
        top = values[-1].p_holm if values[-1] is not None else None
        cells = [DASH if value is None else f"{value} ({value.pairs})" for value in values]
        rows.append([row.name, row.arms, *cells, DASH if top is None else f"{top:.3f}"])
    columns = ["contrast", "arms", *(f"{short(size.parameters, 3)}" for size in sizes), "Holm p"]
    caption = (
        "Contrasts of several arms in nats per token, seed by seed (seeds), by parameters; Holm's p is that of the "
        "largest size, in one family with the arms' p"
    )
    return [(caption, columns, rows)] if rows else []


def _solved(row: PuzzleShares) -> str:
    if row.median is None:
        return DASH
    return f"{row.median:.3f}, {row.solved}/{len(row.accuracy)}"


def _losses(report: LadderReport) -> Markup:
    """A plot of the losses of all seeds, and of each arm's fitted scaling law with its band, dashed beyond the largest
    size."""
    lines: list[Line] = []
    for i, arm in enumerate(report.arms):
        dots = [(math.log10(cell.flops), loss) for cell in arm.rungs for loss in cell.loss if cell.loss]
        if dots:
            x, y = zip(*dots, strict=True)
            lines.append(Line(f"{arm.name}, seeds", x, y, i, joined=False))
        if arm.multiplier:
            lines += _law_lines(arm, True, arm.name, i)
    first = next((arm for arm in report.arms if arm.multiplier), None)
    if first is not None:
        lines += _law_lines(first, False, report.control, 0)
    words = "; ".join(f"{arm.name} ends at {arm.rungs[-1].loss[0]:.4f}" for arm in report.arms if arm.rungs[-1].loss)
    fitted = ", lines the fitted law with its 95 % band, dotted beyond the runs" if first else ""
    caption = f"Dots are seeds{fitted}."
    return html.plot("Loss over compute", lines, (FLOPS, "held-out loss, nats"), words, caption, x_from_zero=False)


def _law_lines(arm: ArmRow, own: bool, name: str, series: int) -> list[Line]:
    top = arm.top.ln_flops
    below = [row for row in arm.curve if row.ln_flops <= top + 1e-9]
    above = [row for row in arm.curve if row.ln_flops >= top - 1e-9]

    def line(rows: Sequence[CurvePoint], dashed: bool) -> Line:
        x, y = [row.ln_flops / DECADE for row in rows], [row.arm if own else row.control for row in rows]
        low, high = [loss.low for loss in y], [loss.high for loss in y]
        return Line(name, x, [loss.median for loss in y], series, low, high, marks=False, dashed=dashed)

    return [line(rows, dashed) for rows, dashed in ((below, False), (above, True)) if rows]


def _multipliers(report: LadderReport) -> Markup:
    """A plot of log2 M (M: the compute multiplier) at each rung with its error, and of the grid estimator's band; 0 is
    no effect."""
    lines: list[Line] = []
    for i, arm in enumerate(report.arms):
        if not arm.multiplier:
            continue
        rows = arm.curve
        x = [row.ln_flops / DECADE for row in rows]
        spans = [(row.m.median, row.m.low, row.m.high) for row in rows]
        middle, low, high = ([math.log2(m) for m in column] for column in zip(*spans, strict=True))
        lines.append(Line(arm.name, x, middle, i, low, high, marks=False))
        lines += _forecast(report, arm, i)
        for cell in arm.rungs:
            if cell.ln_m is not None and cell.error is not None:
                at, m, error = math.log10(cell.flops), cell.ln_m / math.log(2), cell.error / math.log(2)
                lines.append(Line(f"{arm.name}, rung {cell.index}", [at], [m], i, joined=False))
                lines.append(Line(f"{arm.name}, seeds' error", [at, at], [m - error, m + error], i, marks=False))
    told = "; ".join(f"{row[0]} {row[2]} at the largest size" for row in multiplier_rows(report)[2])
    caption = (
        "Doublings of compute that the control would need; 0 is no effect. Bars are one standard error of the seeds, "
        "dotted ones the sealed 95 %."
    )
    title = "Compute multiplier"
    return html.plot(title, lines, (FLOPS, "M, doublings"), told, caption, zero=True, x_from_zero=False)


def _forecast(report: LadderReport, arm: ArmRow, series: int) -> list[Line]:
    """The error bar of the sealed prediction of the compute multiplier at the largest size."""
    rows = [] if report.prediction is None else report.prediction.rows
    found = next((row.ln_m for row in rows if row.arm == arm.name), None)
    if found is None:
        return []
    at = math.log10(arm.rungs[-1].flops) + 0.02 * (series + 1)  # side by side
    bar = [end / math.log(2) for end in (found.low, found.high)]
    return [Line(f"{arm.name}, predicted", [at, at], bar, series, marks=False, dashed=True)]


def _accuracies(report: LadderReport) -> list[Markup]:
    """For each difficulty of a puzzle, two plots of every seed's accuracy: over the FLOPs of the rungs, and over the
    FLOPs spent so far in training."""
    puzzle = report.puzzle
    if puzzle is None:
        return []
    panels = []
    names = [arm.name for arm in report.arms]
    for domain in puzzle.domains:
        lines = [
            Line(
                row.arm,
                [math.log10(row.flops)] * len(row.seeds),
                row.domains[domain].accuracy,
                names.index(row.arm),
                joined=False,
            )
            for row in puzzle.rows
            if row.seeds
        ]
        words = "; ".join(f"{row.arm} {row.domains[domain].median:.2f}" for row in puzzle.rows if row.seeds)
        seeds = "Each dot is a seed."
        panels.append(
            html.plot(domain, lines, (FLOPS, "accuracy"), words, seeds, zero=True, x_from_zero=False, top=1.0)
        )
    last = max((row.index for row in puzzle.rows), default=0)
    for domain in puzzle.domains:
        learning = [
            Line(row.arm, [x for x, _ in curve], [y for _, y in curve], names.index(row.arm), marks=False)
            for row in puzzle.rows
            for curve in row.domains[domain].curves
            if row.index == last and curve
        ]
        title, words = f"{domain} while learning", "every seed of every arm"
        seeds = "Each line is a seed."
        panels.append(html.plot(title, learning, ("training FLOPs", "accuracy"), words, seeds, zero=True, top=1.0))
    return [html.legend(names), html.figures(*panels)]


def _bowls(report: LadderReport) -> list[Markup]:
    """A plot for each arm and tuned rung: the losses of all runs over the learning rate, the fitted parabola and its
    optimum."""
    panels = []
    for number, rows in enumerate(report.tuning, 1):
        for i, (name, tuned) in enumerate(rows.items()):
            runs = [
                (math.log10(tuned.rates[place]), loss)
                for place, losses in tuned.losses.items()
                for loss in losses
                if math.isfinite(loss)
            ]
            if not runs:
                continue
            rates, seen = zip(*runs, strict=True)
            lines = [Line("runs", rates, seen, i, joined=False)]
            if tuned.curvature is not None and tuned.least is not None:
                reach = [place for place, losses in tuned.losses.items() if all(map(math.isfinite, losses))]
                steps = [min(reach) + (max(reach) - min(reach)) * k / 24 for k in range(25)]
                x = [math.log10(tuned.centre * 2**step) for step in steps]
                y = [tuned.least + tuned.curvature * (step - tuned.place) ** 2 for step in steps]
                lines.append(Line("parabola", x, y, i, marks=False))
            lost = sum(not math.isfinite(loss) for losses in tuned.losses.values() for loss in losses)
            said = f"learning rate {tuned.rate:.3g}" + (f", {lost} diverged" if lost else "")
            said += f"; {', '.join(tuned.flags)}" if tuned.flags else ""
            title, caption = f"{name}, rung {number}", said.capitalize() + "."
            panels.append(
                html.plot(title, lines, ("learning rate, log10", "loss, nats"), said, caption, x_from_zero=False)
            )
    return panels


def _checks(report: LadderReport) -> Markup:
    rows = [
        [
            arm.name,
            *(f"{loss:.4f}" if math.isfinite(loss) else "diverged" for loss in arm.check.losses),
            DASH if arm.check.excess is None else f"{arm.check.excess:.4f}",
            "not settled" if arm.check.better else "settled",
        ]
        for arm in report.arms
        if arm.check
    ]
    columns = [
        "arm",
        "half the learning rate",
        "chosen",
        "twice the learning rate",
        "excess by a parabola",
        "learning rate",
    ]
    return html.table("Held-out loss by learning rate at the largest size, one seed, in nats per token", columns, rows)


def _sealed(report: LadderReport) -> Markup:
    found = report.prediction
    if found is None:
        return Markup()
    rows = []
    for row in found.rows:
        forecast = row.difference
        span = DASH if forecast is None else f"{signed(forecast.low)} … {signed(forecast.high)}"
        observed = DASH if row.observed is None else signed(row.observed)
        rows.append([row.arm, span, observed, {True: "inside", False: "outside", None: DASH}[row.inside]])
    stale = " Results of smaller sizes changed after the seal." if found.stale else ""
    caption = "Paired difference at the largest size: predicted 95 % interval and observed value"
    note = f"Sealed before the largest size was trained, SHA-256 {found.sha256}.{stale}"
    return html.table(caption, ["arm", "predicted", "observed", ""], rows, note=note)


def _phi(report: LadderReport) -> Markup:
    found = report.phi
    if found is None:
        return Markup()
    if found.refused:
        return html.paragraph(f"Not resolved: {found.refused}.")
    value, low, high = (f"{number:.3f}".replace("-", "−") for number in (found.value, found.low, found.high))
    return html.paragraph(
        f"φ = {value} ({low} … {high}), from {found.cells} cells of width and tokens: with φ = 1 an iteration "
        "is worth as much as a layer of its own, with φ = 0 nothing. φ values parameters, not FLOPs."
    )


def _seed_control(report: LadderReport) -> Markup:
    found = report.seed_control
    if found is None:
        return Markup()
    rows = [[f"rung {row.index}", str(row.difference)] for row in found.rungs]
    caption = "The control minus itself with other initial values, nats per token"
    note = "" if found.multiplier is None else f"Its multiplier is {found.multiplier}; the true value is 1."
    return html.table(caption, ["rung", "difference"], rows, note=note)


def _views(report: LadderReport) -> Markup:
    rows = []
    for arm in report.arms[1:]:
        if (views := arm.views) is not None:
            more = (views.parameters, views.bytes_weights_once, views.bytes_weights_each_trip)
            rows.append([arm.name, str(views.time or DASH), *map(str, more)])
    columns = ["arm", "seconds", "parameters", "bytes, weights once", "bytes, weights each iteration"]
    timed = next((arm.views.time for arm in report.arms[1:] if arm.views and arm.views.time), None)
    where = "" if timed is None else f"Seconds: {timed.clock} on {machine(timed.hardware)}. "
    note = f"{where}Bytes: read for a decoded token at the end of the context, bfloat16 weights and the cache."
    return html.table("At the largest size, from the same runs", columns, rows, note=note)


def _law(report: LadderReport) -> Markup:
    rows = []
    for arm in report.arms[1:]:
        if (noise := arm.noise) is None:
            continue
        parts = filter(None, (arm.floor, arm.slope, arm.own_deviation))
        spans = [f"{part.median:.4g} ({part.low:.4g} … {part.high:.4g})" for part in parts]
        numbers = [f"{noise.single:.4f}", f"{noise.paired:.4f}", f"{noise.correlation:.2f}"]
        rows.append([arm.name, *spans, *numbers])
    columns = ["arm", "E", "α", "τ of the arm", "σ of a run", "σ of a pair", "ρ"]
    caption = (
        "Posterior of the floor E, the exponent α and the deviation τ of a size; σ: noise over seeds; ρ: correlation "
        "of the arm with the control"
    )
    return html.table(caption, columns, rows)


def _sizes(report: LadderReport) -> PlainTable:
    columns = ["rung", "layers", "width", "parameters", "tokens", "batch", "steps", "FLOPs", "seeds", "learning rate"]
    rows = [
        [
            _named(rung.index, rung.budget) + (", sealed" if rung.sealed else ""),
            *(str(rung.layers), str(rung.hidden)),
            *(f"{count:,}" for count in (rung.parameters, rung.tokens, rung.batch, rung.steps)),
            short(rung.flops),
            str(len(rung.seeds)),
            DASH if rung.rate is None else f"{rung.rate:.3g}",
        ]
        for rung in report.rungs
    ]
    return "The sizes (rungs) of the control; parameters without embeddings", columns, rows


def _named(index: int, budget: int) -> str:
    """A rung's number as text, with the number of its token budget unless that is the ladder's first."""
    return f"{index}, budget {budget + 1}" if budget else str(index)


def _cells(report: LadderReport) -> PlainTable:
    columns = ["run", "layers", "parameters", "FLOPs", "learning rate", "weight decay", "losses by seed"]
    rows = [
        [
            f"{arm.name}, rung {_named(cell.index, cell.budget)}",
            str(cell.layers),
            f"{cell.parameters:,}",
            short(cell.flops),
            f"{cell.rate:.3g}",
            f"{cell.weight_decay:.3g}",
            ", ".join(f"{loss:.4f}" for loss in cell.loss) or DASH,
        ]
        for arm in report.arms
        for cell in (*arm.rungs, *arm.further)
    ]
    return "Every arm at every size", columns, rows


def _diverged(report: LadderReport) -> Markup:
    rows = [[row.run, str(row.step), row.error] for row in report.diverged]
    caption = "A diverged tuning run counts as infinitely bad"
    return html.table(caption, ["run", "step", "why"], rows, prose=("run", "why"))


def _method(report: LadderReport) -> list[str]:
    """Sentences on what all arms have in common, and on how to read the numbers."""
    rules = report.plan.rules
    lines = [
        "The multiplier M is the compute that the control, scaled along this ladder's own path, would need to reach "
        "the arm's loss, over what the arm spent. FLOPs are by arithmetic and include all iterations of a loop.",
        "Paired: at each size and seed, all arms read the same tokens in the same order, and start from equal values "
        "in shared parameters.",
        "Intervals of M come from a Bayesian grid over the law's floor and the deviations of sizes from the law. They "
        "cover seeds, deviations and the floor, but not the choice of text, shapes or learning-rate rule.",
        "Intervals of paired differences are Student's t over seeds, at that size alone.",
        "A multiplier holds only for these sizes, corpora and optimizers.",
    ]
    if len(set(rules.layers)) > 1 and len(set(rules.hidden)) > 1:
        lines.append("Depth and width grow together, so a trend is one with both.")
    for added in report.seeds_added:
        lines.append(
            f"Seeds were added to all arms on {added.date}, to {', '.join(map(str, added.seeds))} by rung, after "
            f"{added.finished} runs were finished, which inflates false positives."
        )
    if rules.tune_points:
        lines.append(
            "Every arm tried learning rates a factor 2 apart, with separate seeds. One rule scales the learning rate "
            "to larger sizes; only the ratio to the control's belongs to an arm."
        )
    else:
        lines.append(
            "No learning rate was tuned: every arm has the recipe's, which is unfair to arms that need another."
        )
    if any(arm.name.startswith("as-large-as-") for arm in report.arms):
        lines.append("`as-large-as-` arms are the control with a wider MLP and as many parameters as the arm.")
    if report.puzzle is not None:
        lines.append(
            "A puzzle measures how fast a skill is acquired within a budget, and does not predict results on text. "
            "Accuracy jumps, so solved runs are counted; with so few seeds their Wilson intervals are wide."
        )
    if any(LAYERS in override for arm in report.arms for override in arm.overrides):
        lines.append("Arms with a share of the layers have fewer layers than the control.")
    return lines


def _provenance(report: LadderReport) -> Markup:
    text = dump(asdict(report.plan))
    return html.source(report) + html.details(f"The ladder, SHA-256 {report.ladder}", text)

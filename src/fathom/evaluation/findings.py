"""From the runs of a comparison to its numbers, and to the one sentence that they bear."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from fathom.evaluation.arms import Arm, tokens, training_flops
from fathom.evaluation.compare import MACHINE, RESULT, Plan, Task, read_measured
from fathom.evaluation.statistics import Difference, holm, paired_difference
from fathom.models.cost import cache_bytes_per_token, count_parameters, flops_per_token
from fathom.training import read_metrics

SIGNIFICANT = 0.05
SMOOTHED = 20
"""Points of the curve of training-loss differences, each the mean of a stretch of steps."""

Values = dict[str, Any]


def summarize(plan: Plan, out: Path, source: Mapping[str, Any]) -> Values:
    """Everything that `report.json` holds, from the directory alone; only seeds that every arm has finished count."""
    done = {seed: {arm.name: _result(plan, out, arm, seed) for arm in plan.arms} for seed in plan.seeds}
    seeds = [seed for seed, runs in done.items() if all(runs.values())]
    arms = [_arm(plan, out, arm, [run for seed in seeds if (run := done[seed][arm.name])]) for arm in plan.arms]
    if seeds:
        _add_differences(arms)
    between = _between(arms[1:]) if seeds else []
    report = {
        **source,
        "equal": plan.equal,
        "control": plan.control.name,
        "seeds": seeds,
        "seeds_planned": list(plan.seeds),
        "arms": arms,
        "between": between,
        "share_of_uniform_depth": _share(arms, between) if seeds else None,
        "recipe": plan.recipe.to_dict(),
    }
    return {"verdict": verdict(report), **report}


def verdict(report: Values) -> str:
    """One sentence: what the evidence shows, what it does not, and how far it reaches."""
    control, *arms = report["arms"]
    count = len(report["seeds"])
    if not count:
        return "No seed has been finished by every arm yet, so there is nothing to say."
    scope = f"at {_millions(control['parameters'])} parameters and {_millions(control['tokens'])} tokens"
    if count == 1:
        parts = [f"{arm['name']} ended {_direction(arm)} {control['name']}" for arm in arms]
        return f"With one seed there is no interval: {scope}, {_join(parts)}, and another seed might say otherwise."
    parts = [
        *_claim(arms, lambda arm: _clear(arm) and _mean(arm) < 0, "lower than", control),
        *_claim(arms, lambda arm: _clear(arm) and _mean(arm) > 0, "higher than", control),
        *_faint(arms, control),
        *_noise(arms, control),
        *_rivals(report),
    ]
    return f"With {count} seeds, {scope}, {'; '.join(parts)}."


def best_arm(report: Values) -> Values:
    """The arm of the lowest mean validation loss."""
    scored = [arm for arm in report["arms"] if arm["runs"]]
    best: Values = min(scored, key=lambda arm: arm["loss"])
    return best


def _arm(plan: Plan, out: Path, arm: Arm, runs: Sequence[Values]) -> Values:
    recipe = plan.recipes[arm.name]
    config = recipe.config()
    measured = read_measured(plan, out, arm.name) if arm != plan.control else None
    scalar = 2 if recipe.train.precision == "bf16" else 4
    values: Values = {
        **asdict(arm),
        "parameters": count_parameters(config),
        "flops_per_token": flops_per_token(config, recipe.data.sequence_length),
        "cache_bytes_per_token": {"declared": cache_bytes_per_token(config, scalar), "measured": None},
        "steps": recipe.train.steps,
        "tokens": tokens(recipe),
        "training_flops": training_flops(recipe),
        "measured": measured and {k: v for k, v in measured.items() if k != "recipes"},
        "runs": list(runs),
    }
    if measured:
        values["cache_bytes_per_token"]["measured"] = measured["cache_bytes_per_token"][0]
    elif arm == plan.control:
        values["cache_bytes_per_token"]["measured"] = _control_cache(plan, out)
    if runs:
        loss = statistics.fmean(run["loss"] for run in runs)
        values |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        values["bits_per_byte"] = statistics.fmean(run["bits_per_byte"] for run in runs)
        values["domains"] = {name: _domain(runs, name) for name in runs[0]["domains"]}
        values["position_loss"] = [
            statistics.fmean(row) for row in zip(*(r["position_loss"] for r in runs), strict=True)
        ]
        values["curve"] = _curve(values)
    return values


def _result(plan: Plan, out: Path, arm: Arm, seed: int) -> Values | None:
    """One finished run: its last evaluation, its curve, the machine."""
    run_dir = Task(plan, out, arm.name, seed).run_dir
    if not (run_dir / RESULT).exists():
        return None
    values = json.loads((run_dir / RESULT).read_text(encoding="utf-8"))
    lines = read_metrics(run_dir)
    looks = [line for line in lines if "val/loss" in line]
    machine = run_dir / MACHINE
    return {
        "seed": seed,
        "directory": str(run_dir.relative_to(out)),
        **{key: value for key, value in values["evaluation"].items() if key != "tokens"},
        "evaluated_tokens": values["evaluation"]["tokens"],
        "seconds": values["seconds"],
        "machine": json.loads(machine.read_text()) if machine.exists() else None,
        "validation": {key: [look[name] for look in looks] for key, name in CURVE.items()},
        "training_loss": [line["loss"] for line in lines if "loss" in line],
    }


CURVE = {"step": "step", "tokens": "tokens", "seconds": "seconds", "loss": "val/loss"}


def _curve(arm: Values) -> Values:
    """Validation loss while training: its mean over seeds, and the lowest and highest seed."""
    looks = [run["validation"] for run in arm["runs"]]
    losses = list(zip(*(look["loss"] for look in looks), strict=True))
    return {
        "tokens": looks[0]["tokens"],
        "flops": [count * arm["training_flops"] / arm["tokens"] for count in looks[0]["tokens"]],
        "seconds": [statistics.fmean(row) for row in zip(*(look["seconds"] for look in looks), strict=True)],
        "loss": [statistics.fmean(row) for row in losses],
        "low": [min(row) for row in losses],
        "high": [max(row) for row in losses],
    }


def _add_differences(arms: Sequence[Values]) -> None:
    """Give every arm but the control its paired differences: final loss, bits per byte, by position, while training."""
    control = arms[0]
    for arm in arms[1:]:
        pairs = list(zip(arm["runs"], control["runs"], strict=True))
        arm["difference"] = _difference(pairs, "loss")
        arm["difference_bits_per_byte"] = _difference(pairs, "bits_per_byte")
        places = range(len(control["position_loss"]))
        if len(arm["position_loss"]) == len(places):
            arm["difference_by_position"] = [_difference(pairs, "position_loss", i) for i in places]
        for name, domain in arm["domains"].items():
            if name in control["domains"]:
                domain["difference"] = _difference(pairs, "domains", name, "loss")
        arm["difference_while_training"] = _while_training(pairs, arm["tokens"] / arm["steps"])
    adjusted = holm([arm["difference"]["p"] or 0.0 for arm in arms[1:]])
    for arm, p in zip(arms[1:], adjusted, strict=True):
        arm["difference"]["p_holm"] = p if arm["difference"]["p"] is not None else None


def _difference(pairs: Sequence[tuple[Values, Values]], *path: str | int) -> Values:
    """The paired difference of a value deep in the runs."""

    def value(run: Any) -> float:
        for key in path:
            run = run[key]
        return float(run)

    return _plain(paired_difference([value(a) for a, _ in pairs], [value(b) for _, b in pairs]))


def _plain(found: Difference) -> Values:
    return {**asdict(found), "low": found.low, "high": found.high, "excludes_zero": found.excludes_zero}


def _while_training(pairs: Sequence[tuple[Values, Values]], step_tokens: float) -> Values:
    """Training loss minus the control's on the very same batches, as means over stretches of steps."""
    steps = min(len(run["training_loss"]) for pair in pairs for run in pair)
    size = max(1, math.ceil(steps / SMOOTHED))
    stretches = [range(first, min(first + size, steps)) for first in range(0, steps, size)]
    gaps = [
        [statistics.fmean(a["training_loss"][i] - b["training_loss"][i] for i in stretch) for a, b in pairs]
        for stretch in stretches
    ]
    return {
        "tokens": [(stretch.start + len(stretch) / 2) * step_tokens for stretch in stretches],
        "mean": [statistics.fmean(row) for row in gaps],
        "low": [min(row) for row in gaps],
        "high": [max(row) for row in gaps],
    }


def _between(arms: Sequence[Values]) -> list[Values]:
    """Every two arms other than the control, with Holm's adjustment over these pairs."""
    rows = []
    for a, b in combinations(arms, 2):
        pairs = list(zip(a["runs"], b["runs"], strict=True))
        rows.append({"a": a["name"], "b": b["name"], **_difference(pairs, "loss")})
    for row, p in zip(rows, holm([row["p"] or 0.0 for row in rows]), strict=True):
        row["p_holm"] = p if row["p"] is not None else None
    return rows


def _share(arms: Sequence[Values], between: Sequence[Values]) -> Values | None:
    """How much of depth_attention's gain a plain average already has; a ratio of noise means nothing, so it says so."""
    found = {arm["mechanism"]: arm for arm in arms[1:] if not arm["overrides"]}
    depth, uniform = found.get("depth_attention"), found.get("uniform_depth")
    if depth is None or uniform is None or arms[0]["mechanism"] != "vanilla":
        return None
    gain = -depth["difference"]["mean"]
    known = depth["difference"]["excludes_zero"] and gain > 0
    pair = next(row for row in between if {row["a"], row["b"]} == {depth["name"], uniform["name"]})
    return {"share": -uniform["difference"]["mean"] / gain if known else None, "defined": known, "difference": pair}


def _domain(runs: Sequence[Values], name: str) -> Values:
    scores = [run["domains"][name] for run in runs]
    return {key: statistics.fmean(score[key] for score in scores) for key in ("loss", "bits_per_byte")}


def _control_cache(plan: Plan, out: Path) -> float | None:
    found = (read_measured(plan, out, arm.name) for arm in plan.arms[1:])
    return next((values["cache_bytes_per_token"][1] for values in found if values), None)


def _mean(arm: Values) -> float:
    return float(arm["difference"]["mean"])


def _clear(arm: Values) -> bool:
    found = arm["difference"]
    return bool(found["excludes_zero"]) and found["p_holm"] < SIGNIFICANT


def _claim(arms: Sequence[Values], chosen: Callable[[Values], bool], how: str, control: Values) -> list[str]:
    """What is sure, after as many comparisons as there were."""
    found = [arm for arm in arms if chosen(arm)]
    if not found:
        return []
    amounts = [f"{abs(_mean(arm)):.4f} ± {arm['difference']['half_width']:.4f}" for arm in found]
    names = _join([f"{arm['name']}'s" for arm in found])
    alone = len(found) == 1
    each = "" if alone else ", in that order"
    holds = "the 95 % interval over seeds excludes zero" if alone else "95 % intervals over seeds exclude zero"
    many = f", also by Holm's test for {len(arms)} comparisons" if len(arms) > 1 else ""
    loss = "validation loss is" if alone else "validation losses are"
    return [f"{names} {loss} {how} {control['name']}'s by {_join(amounts)} nats{each} ({holds}{many})"]


def _faint(arms: Sequence[Values], control: Values) -> list[str]:
    """Intervals that exclude zero, but would not if the other arms were taken into account."""
    found = [arm for arm in arms if arm["difference"]["excludes_zero"] and not _clear(arm)]
    if not found:
        return []
    shown = _join([f"{arm['name']} ({_signed(arm)})" for arm in found])
    exclude = "interval excludes zero" if len(found) == 1 else "intervals exclude zero"
    return [
        f"for {shown} the {exclude} taken alone, but not by Holm's test for {len(arms)} comparisons: "
        f"a hint of a difference to {control['name']}, no more"
    ]


def _noise(arms: Sequence[Values], control: Values) -> list[str]:
    found = [arm for arm in arms if not arm["difference"]["excludes_zero"]]
    if not found:
        return []
    if all(_mean(arm) == 0 and arm["difference"]["half_width"] == 0 for arm in found):
        return [f"{_join([arm['name'] for arm in found])} and {control['name']} have exactly equal losses"]
    shown = _join([f"{arm['name']} ({_signed(arm)} nats)" for arm in found])
    differ = "the difference of" if len(found) == 1 else "the differences of"
    return [f"{differ} {shown} to {control['name']} {'is' if len(found) == 1 else 'are'} within the noise of the seeds"]


def _rivals(report: Values) -> list[str]:
    """Whether attending beats averaging, or else whether the best two of several arms can be told apart."""
    rows = report["between"]
    share = report["share_of_uniform_depth"]
    if share is not None:
        row = share["difference"]
    elif rows:
        best = sorted(report["arms"][1:], key=lambda arm: arm["loss"])[:2]
        names = {arm["name"] for arm in best}
        row = next(r for r in rows if {r["a"], r["b"]} == names)
    else:
        return []
    low, high = (row["a"], row["b"]) if row["mean"] < 0 else (row["b"], row["a"])
    if row["excludes_zero"] and row["p_holm"] < SIGNIFICANT:
        return [f"{low} is also lower than {high}, by {abs(row['mean']):.4f} ± {row['half_width']:.4f}"]
    return [f"{row['a']} and {row['b']} cannot be told apart"]


def _direction(arm: Values) -> str:
    return f"{abs(_mean(arm)):.4f} nats {'below' if _mean(arm) < 0 else 'above'}"


def _signed(arm: Values) -> str:
    return f"{_mean(arm):+.4f} ± {arm['difference']['half_width']:.4f}".replace("-", "−")


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _millions(number: float) -> str:
    for size, suffix in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {suffix}"
    return f"{number:.0f}"

"""A zoo of small models whose ancestry is known, and what each method says of every pair.

    python benchmarks/lineage/zoo.py --size tiny --directory zoo --out benchmarks/results/lineage-zoo.json

Bases are trained by the loop of `fathom train` on the Python standard library; everything else is made from them. A
model is a directory: what exists is not made again, so a run may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import baselines
import figures
import numpy as np
import torch
from members import ALIKE, BASE, DERIVED, DISTILLED, PART, SEED, SIZES, STRESS, Member, members
from trained import Workshop

from fathom.lineage import Weights, comparison, evidence, nulls, open_weights, verdict
from fathom.lineage.pairs import SCORE_LABELS, Pair
from fathom.report.progress import ProgressBar

CONTROLS = 4
METHODS = {
    "parameter cosine (PCS)": "pcs",
    "sigma": "sigma",
    "REEF (activations)": "reef",
    "polar factor (MDIR-like)": "polar",
    "HuRef ICS, as coded": "ics",
    "AWM, as published": "awm",
    "ICS repaired, last two layers": "ics_canonical",
    "ICS repaired, all layers": "ics_all_layers",
    "AWM repaired": "awm_canonical",
    "AWM repaired, Procrustes": "procrustes",
    "best aligned score": "best",
    "evidence, −log₁₀ corrected p": "evidence",
}
COLUMNS = {
    "AWM": "awm",
    "AWM repaired": "awm_canonical",
    "Procrustes": "procrustes",
    "ICS": "ics",
    "T2": "t2",
    "T4": "t4",
}
FOUND = {verdict.SHARED, verdict.INITIALISATION, verdict.PARTIAL}
UNRELATED = "unrelated"


@dataclass
class Zoo:
    """The models, and every pair measured once."""

    shop: Workshop
    members: list[Member]
    texts: list[str] = field(default_factory=list)
    built: int = 0  # how many models this run made
    _opened: dict[str, Weights] = field(default_factory=dict)
    _pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)

    def build(self, say: ProgressBar) -> None:
        """Make what is not there yet."""
        for number, member in enumerate(self.members):
            say.update(number, description=member.name)
            if not self.shop.model(member.name).exists():
                started = time.process_time()
                member.make(self.shop)
                self.built += 1
                print(f"{member.name}: {time.process_time() - started:.0f} CPU s", file=sys.stderr)

    def weights(self, name: str) -> Weights:
        """An open model."""
        if name not in self._opened:
            self._opened[name] = open_weights(self.shop.model(name))
        return self._opened[name]

    def measured(self, a: str, b: str) -> Pair:
        """One pair, either way round."""
        key = (a, b) if a < b else (b, a)
        if key not in self._pairs:
            self._pairs[key] = comparison.measure(self.weights(key[0]), self.weights(key[1]), comparison.Options())
        return self._pairs[key]

    @property
    def bases(self) -> list[Member]:
        """Models trained from scratch that learned from text."""
        return [m for m in self.members if m.claim == BASE]

    def controls(self, a: Member, b: Member) -> list[str]:
        """What a careful user gives: unrelated models, first those whose pairs are of the same class as this one."""
        kind = nulls.structure_class(self.weights(a.name), self.weights(b.name))

        def unlike(other: Member) -> int:
            classes = [nulls.structure_class(self.weights(m.name), self.weights(other.name)) for m in (a, b)]
            return sum(found != kind for found in classes)

        strangers = [
            m for m in self.bases if m.name not in {*a.roots, *b.roots, "a" if DISTILLED in (a.claim, b.claim) else ""}
        ]
        return [m.name for m in sorted(strangers, key=unlike)[:CONTROLS]]  # the sort is stable: same data first

    def judged(self, a: Member, b: Member) -> dict[str, Any]:
        """A row of the results: what `compare a b --control …` says, and the other methods' scores."""
        pair, names = self.measured(a.name, b.name), self.controls(a, b)
        around = [(c, [self.measured(m.name, c) for m in (a, b)]) for c in names]
        found = comparison.judge(pair, around)
        tests = {t.name: [round(t.statistic, 4), float(f"{t.p:.3g}")] for t in found.tests}  # statistic, p
        decided = [t.corrected for t in found.tests if not t.name.startswith("T3")]
        return {
            "a": a.name,
            "b": b.name,
            "roots": sorted({*a.roots, *b.roots}),
            "controls": names,
            "verdict": found.verdict.label,
            "corrected_p": min(decided, default=1.0),
            "scores": {**self._scores(pair), "evidence": round(-np.log10(max(min(decided, default=1.0), 1e-300)), 3)},
            "tests": tests,
            "tampering": found.tampering,
        }

    def _scores(self, pair: Pair) -> dict[str, float | None]:
        own = {name: pair.value(name) for name in SCORE_LABELS}
        shares = [count.paired / count.of for counts in pair.neurons.values() for count in counts if count.of]
        own |= {
            "best": pair.scores[pair.best].score if pair.best else None,
            "t2": pair.head_agreement,
            "t4": max(shares, default=None),
            "reef": self._activations.cka(Path(pair.a.name), Path(pair.b.name)),
            **baselines.all_of(pair.a, pair.b),
        }
        return {name: value if value is None else round(float(value), 5) for name, value in own.items()}

    @property
    def _activations(self) -> baselines.Activations:
        if not hasattr(self, "_kept"):
            self._kept = baselines.Activations(self.texts)
        return self._kept

    def wanted(self) -> list[tuple[Member, Member]]:
        """All pairs of roots; each derived model with its roots and with a few strangers."""
        roots = [m for m in self.members if m.claim in (BASE, DISTILLED)]
        out = [(x, y) for i, x in enumerate(roots) for y in roots[i + 1 :]]
        for member in (m for m in self.members if m.claim not in (BASE, DISTILLED)):
            out += [(base, member) for base in roots if base.name in member.roots]
            out += [(base, member) for base in self.bases if base.name in self.controls(member, member)]
        for kind in ALIKE:
            some = [m for m in self.members if m.kind == kind]
            out += [(x, y) for i, x in enumerate(some) for y in some[i + 1 :]]
        return out


def relation(a: Member, b: Member) -> tuple[str, str]:
    """(claim, kind) of a pair; the first is a root, or both were treated alike."""
    if set(a.roots) & set(b.roots):
        return b.claim, b.kind
    if a.kind == b.kind and a.kind in ALIKE:
        return UNRELATED, f"both {a.kind}"
    if b.claim not in (BASE, DISTILLED):
        return UNRELATED, "derived against a stranger"
    if DISTILLED in (a.claim, b.claim):
        return UNRELATED, "distilled from it" if {a.name, b.name} & {"a"} else "distilled from another"
    if a.shape != b.shape:
        return UNRELATED, "other shape"
    if "cut" in a.data + b.data:
        return UNRELATED, "other tokenizer"
    return UNRELATED, "same data and order, other seed" if a.data == b.data else "other data"


def results(zoo: Zoo, say: ProgressBar) -> dict[str, Any]:
    """Every row, and what they add up to."""
    rows, wanted = [], zoo.wanted()
    for number, (a, b) in enumerate(wanted):
        say.update(number, description=f"{a.name} against {b.name}")
        claim, kind = relation(a, b)
        rows.append({"claim": claim, "kind": kind, **zoo.judged(a, b)})
    return {
        "methods": methods_of(rows),
        "p_values": calibration(rows),
        **totals(rows),
        "rows": rows,
    }


def kinds_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per kind of pair: verdicts, and the scores of every method."""
    out = []
    for claim, kind in dict.fromkeys((row["claim"], row["kind"]) for row in rows):
        here = [row for row in rows if (row["claim"], row["kind"]) == (claim, kind)]
        labels = [row["verdict"] for row in here]
        names = dict.fromkeys((*METHODS.values(), "t2", "t4"))
        out.append(
            {
                "claim": claim,
                "kind": kind,
                "pairs": len(here),
                "verdicts": {label: labels.count(label) for label in dict.fromkeys(labels)},
                "scores": {name: [row["scores"].get(name) for row in here] for name in names},
            }
        )
    return out


def methods_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How well each method parts derived pairs from unrelated ones."""
    out = {}
    for label, name in METHODS.items():
        here = [r for r in rows if r["claim"] in (DERIVED, UNRELATED)]
        if len({r["claim"] for r in here}) < 2:
            continue
        lowest = min((r["scores"][name] for r in here if r["scores"].get(name) is not None), default=0.0)
        # a method that cannot compare two shapes has found nothing there
        scores = np.array([lowest if r["scores"].get(name) is None else r["scores"][name] for r in here])
        related = np.array([r["claim"] == DERIVED for r in here])
        sample = figures.Sample(scores, related, [tuple(r["roots"]) for r in here])
        out[label] = {
            "auc": figures.bootstrapped(sample, figures.auc),
            "found_at_none": figures.bootstrapped(sample, figures.found_at_none),
            "lowest_related": float(scores[related].min()),
            "highest_unrelated": float(scores[~related].max()),
            "not_applicable": sum(r["scores"].get(name) is None for r in here),
        }
    return out


def calibration(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """p-values of pairs of roots, test by test, against uniform."""
    unrelated = [r for r in rows if r["claim"] == UNRELATED and r["kind"] != "derived against a stranger"]
    out = {}
    for name in dict.fromkeys(name for row in unrelated for name in row["tests"]):
        here = [r for r in unrelated if name in r["tests"]]
        values = [r["tests"][name][1] for r in here]
        apart = figures.disjoint([(r["a"], r["b"]) for r in here])
        out[name] = {
            "p": values,
            "ks": figures.too_small(values),
            "excess_interval": figures.excess_interval(np.array(values), [tuple(r["roots"]) for r in here]),
            "ks_disjoint_pairs": [len(apart), *figures.too_small([values[i] for i in apart])],
            "smallest": min(values),
        }
    return out


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the testbed must show, counted."""
    derived, unrelated = ([r for r in rows if r["claim"] == claim] for claim in (DERIVED, UNRELATED))
    named = lambda some: [f"{r['a']} | {r['b']}: {r['verdict']}" for r in some]  # noqa: E731
    return {
        "derived": len(derived),
        "missed": named(r for r in derived if r["verdict"] not in FOUND),
        "unrelated": len(unrelated),
        "falsely_shared": named(r for r in unrelated if r["verdict"] in FOUND),
        "unrelated_inconclusive": named(r for r in unrelated if r["verdict"] == verdict.INCONCLUSIVE),
        "bound_if_independent": evidence.false_positive_bound(len(unrelated)),
    }


def report(body: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    order = {DERIVED: 0, STRESS: 1, PART: 2, SEED: 3, UNRELATED: 4}
    kinds = sorted(kinds_of(body["rows"]), key=lambda row: order[row["claim"]])
    lines = [figures.methods_table(body["methods"]), ""]
    for claim in order:
        if some := [row for row in kinds if row["claim"] == claim]:
            lines += [claim, "", figures.kinds_table(some, COLUMNS), ""]
    lines += ["| test | pairs | KS, one-sided | disjoint pairs | smallest p |", "| --- | --- | --- | --- | --- |"]
    for name, row in body["p_values"].items():
        count, d, p = row["ks_disjoint_pairs"]
        all_d, all_p = row["ks"]
        cells = [name, str(len(row["p"])), f"D⁺ {all_d:.3f}, p {all_p:.2f}", f"{count}: D⁺ {d:.3f}, p {p:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {row['smallest']:.2g} |")
    lines += ["", f"missed: {body['missed'] or 'none'} of {body['derived']}"]
    lines += [f"falsely shared: {body['falsely_shared'] or 'none'} of {body['unrelated']}"]
    return "\n".join(lines)


def about(options: argparse.Namespace, zoo: Zoo, seconds: float) -> dict[str, Any]:
    """How the numbers came about."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    losses = {m.name: path.read_text() for m in zoo.members if (path := zoo.shop.model(m.name) / "loss.json").exists()}
    return {
        "what": "every method on models whose ancestry is known",
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "hardware": {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "machine": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "size": {"name": options.size, **vars(zoo.shop.size)},
        "models": len(zoo.members),
        "uninterrupted": zoo.built == len(zoo.members),  # every model and every pair in this one run
        "held_out_loss": {name: float(loss) for name, loss in losses.items()},
        "seconds": round(seconds, 1),
    }


def as_text(body: dict[str, Any]) -> str:
    """JSON with a line for each pair."""
    head = json.dumps({**body, "rows": []}, indent=1, ensure_ascii=False)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in body["rows"])
    return head.replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--directory", type=Path, default=Path("zoo"), help="where the models are made, once")
    parser.add_argument("--text", type=Path, help="a folder of text for the bases, in place of the standard library")
    parser.add_argument("--other-text", type=Path, help="a folder of other text, in place of PyTorch's C++ headers")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these members alone; parents among them")
    parser.add_argument("--build-only", action="store_true", help="make the models and stop")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--picture", type=Path, help="write the QQ plot here")
    parser.add_argument("--json", action="store_true", help="print the results instead of the tables")
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    shop = Workshop(options.directory, SIZES[options.size], options.text, options.other_text)
    chosen = [m for m in members(shop.size) if options.only is None or m.name in options.only]
    zoo, started = Zoo(shop, chosen), time.monotonic()
    with ProgressBar("zoo", len(chosen)) as say:
        zoo.build(say)
    if options.build_only:
        return 0
    zoo.texts = baselines.texts_of(shop.library())
    with ProgressBar("pairs", len(zoo.wanted())) as say:
        found = results(zoo, say)
    body = {**about(options, zoo, time.monotonic() - started), **found}
    if options.out:
        options.out.write_text(as_text(body), encoding="utf-8")
    if options.picture:
        figures.qq({name: row["p"] for name, row in body["p_values"].items()}, options.picture)
    print(json.dumps(body, ensure_ascii=False) if options.json else report(body))
    return 0


if __name__ == "__main__":
    sys.exit(main())

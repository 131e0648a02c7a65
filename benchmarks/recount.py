"""The tables of the notes on learned gates and on looped experts, from their logs by numpy alone.

    python benchmarks/recount.py [retrofit | looped-experts]

Nothing of Fathom is imported: whoever doubts its evaluation has here the arithmetic between log and note. A row is
printed for what the log holds; the registered contrasts of learned gates once all their runs are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
VARIANTS = ["gains", "queries", "depth_attention", "shuffled", "uniform_depth", "loop"]
PAIRS = [
    *(("depth_attention", "queries"), ("uniform_depth", "queries"), ("loop", "queries")),
    *(("depth_attention", "shuffled"), ("uniform_depth", "shuffled")),
    *(("queries", "gains"), ("depth_attention", "uniform_depth")),
]
PRIMARY = [f"{one} − queries" for one in ("depth_attention", "uniform_depth", "loop")]
"""On Wikipedia, with Holm's correction over the three."""
SEEDS, DRAWS = range(5), 10_000
SCREENS = {"screen-smollm2": "SmolLM2-135M", "screen-float32": "float32, 2 M"}
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Student's t at 0.975 by degrees of freedom."""
POWER = {1: 1.376, 2: 1.061, 3: 0.978, 4: 0.941}
"""Student's t at 0.8."""
TUNING = 10_000
"""The first of the two seeds that choose rates."""
ARMS = ["D once", "D loop", "M once", "M loop 8", "M loop 12"]
TUNED_AS = {"M loop 12": "M loop 8"}
WIDTHS = {"0.17 M": 48, "0.30 M": 64}
"""A rate is tuned at the first, and taken times the ratio of widths at the second."""
CONTRASTS = {
    "(M loop 8 − M once) − (D loop − D once)": {"M loop 8": 1, "M once": -1, "D loop": -1, "D once": 1},
    "M loop 12 − M once": {"M loop 12": 1, "M once": -1},
    "D loop − D once": {"D loop": 1, "D once": -1},
}


def lines(name: str) -> list[dict[str, Any]]:
    """The lines of a log; none if it has not begun."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def retrofit() -> Iterator[str]:
    """The base model's losses; what each run gains on it; contrasts of variants at one rate; and the two screens."""
    rows = lines("retrofit")
    scored = {
        (row["variant"], row["rate"], row["seed"]): {text: np.array(found) for text, found in row["losses"].items()}
        for row in rows
        if row["step"] == "score"
    }
    base = scored.pop((None, None, None), {})
    for text, losses in base.items():
        yield f"| base model | {text} | {len(losses)} | {losses.mean():.4f} | {losses.std(ddof=1):.4f} |"
    trained = {(row["variant"], row["rate"], row["seed"]): row for row in rows if row["step"] == "train"}
    for key, row in sorted(trained.items(), key=lambda item: (VARIANTS.index(item[0][0]), item[0][1:])):
        gates = np.concatenate([np.ravel(values) for values in row["gates"].values()])
        found = (paired(scored[key][text] - base[text]) if key in scored else "–" for text in base)
        cells = f"{np.sqrt((gates**2).mean()):.3f} | {100 * (gates < 0).mean():.0f} % | {row['validation']:.4f}"
        yield f"| {key[0]} | {key[1]:g} | {key[2]} | {len(gates)} | {cells} | {' | '.join(found)} |"
    yield from registered(base, scored, trained)
    for one, other in PAIRS:
        for rate in sorted({key[1] for key in scored}):
            seeds = [s for s in SEEDS if {(one, rate, s), (other, rate, s)} <= set(scored)]
            for text in base if seeds else ():
                gaps = np.stack([scored[one, rate, s][text] - scored[other, rate, s][text] for s in seeds])
                each = ", ".join(f"{gap:+.4f}" for gap in gaps.mean(1))
                yield f"| {one} − {other} | {rate:g} | {text} | {each} | {paired(gaps.mean(0))} |"
    for name, label in SCREENS.items():
        found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for mechanism, drawn in found["repaired"].items():
            scores = [gate for gate in found["gates"] if gate["mechanism"] == mechanism]
            plain, content = (np.mean([one[key] ** 2 for one in scores]) for key in ("without_gain", "content"))
            band = f"{drawn['low']:.2f} to {drawn['high']:.2f}"
            yield f"| {label} | {mechanism} | {len(scores)} | {plain:.1f} | {content:.1f} | {band} |"


Key = tuple[str, float, int]


def registered(
    base: dict[str, np.ndarray], scored: dict[Key, dict[str, np.ndarray]], trained: dict[Key, dict[str, Any]]
) -> Iterator[str]:
    """The registered contrasts at each variant's chosen rate, and of |z| and |λ|; nothing while a run is missing."""
    tried = {variant: {key[1]: row for key, row in trained.items() if key[::2] == (variant, 0)} for variant in VARIANTS}
    rates = {variant: min(rows, key=lambda rate: rows[rate]["validation"]) for variant, rows in tried.items()}
    if any((variant, rate, seed) not in scored for variant, rate in rates.items() for seed in SEEDS):
        return
    losses = {
        (variant, text): np.stack([scored[variant, rates[variant], seed][text] for seed in SEEDS])
        for variant in VARIANTS
        for text in base
    } | {("base model", text): values[None] for text, values in base.items()}
    found = {
        (f"{one} − {other}", text): judged(losses[one, text] - losses[other, text])
        for one, other in [*PAIRS, ("gains", "base model")]
        for text in base
    }
    ordered, worst, corrected = sorted(PRIMARY, key=lambda name: found[name, "wiki"][3]), 0.0, dict[str, float]()
    for rank, name in enumerate(ordered):
        worst = corrected[name] = max(worst, min(1.0, (len(ordered) - rank) * found[name, "wiki"][3]))
    for (name, text), (seeds, low, high, p, seen) in found.items():
        each = ", ".join(f"{seed:+.4f}" for seed in seeds)
        holm = f"{corrected[name]:.4f}" if text == "wiki" and name in corrected else "–"
        cells = f"{seeds.mean():+.4f} | {low:+.4f} to {high:+.4f} | {p:.4f} | {holm} | {seen:.4f}"
        yield f"| {name} | {text} | {each} | {cells} |"
    for variant in ("depth_attention", "uniform_depth", "loop"):
        yield screened(variant, [trained[variant, rates[variant], seed] for seed in SEEDS])


def judged(gaps: np.ndarray) -> tuple[np.ndarray, float, float, float, float]:
    """Means by seed; of seeds (Student) and documents (bootstrap) the wider interval, the larger p-value, and the
    larger effect that a test at 0.05 would see with a probability of 0.8.
    """
    seeds, documents = gaps.mean(1), gaps.mean(0)  # gaps: [seeds, documents]
    drawn = np.random.default_rng(0).choice(documents, (DRAWS, len(documents))).mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    error, free = seeds.std(ddof=1) / len(seeds) ** 0.5, len(seeds) - 1
    seen = max(error * (STUDENT[free] + POWER[free]), drawn.std() * (1.960 + 0.842))
    if (half := error * STUDENT[free]) > (high - low) / 2:
        low, high = seeds.mean() - half, seeds.mean() + half
    p = max(2 * min((drawn <= 0).mean(), (drawn >= 0).mean()), 1 / DRAWS, student(seeds.mean() / error))
    return seeds, float(low), float(high), float(p), float(seen)


def student(t: float) -> float:
    """Two-sided p-value of Student's t with four degrees of freedom."""
    s = abs(t) / (4 + t * t) ** 0.5
    return 1 - 1.5 * s * (1 - s * s / 3)


def screened(variant: str, runs: list[dict[str, Any]]) -> str:
    """Spearman's correlation of the screen's |z| with the trained |λ|, averaged over seeds; a loop's over layers."""
    found = json.loads((RESULTS / "screen-smollm2.json").read_text(encoding="utf-8"))["gates"]
    pairs = [(gate, size) for gate in found if gate["mechanism"] == variant and (size := trained_size(gate, runs))]
    kinds = ("z", "without_gain", "content")
    cells = [spearman([abs(gate[kind]) for gate, _ in pairs], [size for _, size in pairs]) for kind in kinds]
    return f"| {variant} | {len(pairs)} | {' | '.join(f'{cell:+.2f}' for cell in cells)} |"


def trained_size(gate: dict[str, Any], runs: list[dict[str, Any]]) -> float | None:
    """|λ| after training where the screen has a gate; None for a layer that the loop leaves out."""
    layer, head = f"model.layers.{gate['place']['layer']}", gate["place"]["head"]
    if head is not None:
        return float(np.mean([abs(run["gates"][f"{layer}.self_attn.mixer.blend_gates.mix"][head]) for run in runs]))
    names = [f"{layer}.again.0.{part}.gates.gain" for part in ("attn", "mlp")]
    sizes = [np.abs(run["gates"][name]) for run in runs for name in names if name in run["gates"]]
    return float(np.mean(sizes)) if sizes else None


def spearman(one: list[float], other: list[float]) -> float:
    """The rank correlation of values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def paired(differences: np.ndarray) -> str:
    """Mean difference over documents with its 95 % interval, which knows nothing of seeds."""
    half = 1.96 * differences.std(ddof=1) / len(differences) ** 0.5
    return f"{differences.mean():+.4f} ± {half:.4f}"


def looped_experts() -> Iterator[str]:
    """What the variants cost, the tuning, each run, and the registered contrasts of seeds that all their arms have."""
    rows = [row for row in lines("looped-experts") if row["step"] == "train"]
    for row in {(row["size"], row["arm"]): row for row in rows}.values():
        flops = row["flops_per_token"] / 1e6
        yield f"| {row['size']} | {row['arm']} | {row['parameters']:,} | {row['active']:,} | {flops:.3f} M |"
    loss = {
        (row["size"], row["arm"], row["rate"], row["seed"]): float(np.mean(list(row["losses"].values())))
        for row in rows
    }
    tried = sorted({key[:3] for key in loss if key[3] >= TUNING}, key=lambda key: (ARMS.index(key[1]), key[2]))
    means: dict[str, dict[float, float]] = {}
    for key in tried:
        found = [loss[(*key, seed)] for seed in (TUNING, TUNING + 1)]
        means.setdefault(key[1], {})[key[2]] = float(np.mean(found))
        yield f"| {key[1]} | {key[2]:g} | {' | '.join(f'{one:.4f}' for one in [*found, np.mean(found)])} |"
    chosen = {arm: min(found, key=found.__getitem__) for arm, found in means.items()}
    runs: dict[tuple[str, str, int], float] = {}
    for (size, arm, rate, seed), one in loss.items():
        if seed < TUNING:
            rule = chosen[TUNED_AS.get(arm, arm)] * WIDTHS[min(WIDTHS)] / WIDTHS[size]
            assert abs(rate / rule - 1) < 1e-9 and (size, arm, seed) not in runs, (size, arm, rate, seed)
            runs[size, arm, seed] = one
    for size, seed in sorted({(size, seed) for size, _, seed in runs}):
        cells = (f"{runs[size, arm, seed]:.4f}" if (size, arm, seed) in runs else "–" for arm in ARMS)
        yield f"| {size} | {seed} | {' | '.join(cells)} |"
    for size in sorted({size for size, _, _ in runs}):
        for name, weights in CONTRASTS.items():
            values = contrast(runs, size, weights)
            if len(values) > 1:
                mean, half, seen = interval(values)
                each = ", ".join(f"{value:+.3f}" for value in values)
                yield f"| {size} | {name} | {each} | {mean:+.4f} ± {half:.4f} | {seen:.4f} |"


def contrast(runs: dict[tuple[str, str, int], float], size: str, weights: dict[str, int]) -> np.ndarray:
    """Of each seed that has all arms."""
    seeds = [s for s in range(5) if all((size, arm, s) in runs for arm in weights)]
    return np.array([sum(w * runs[size, arm, s] for arm, w in weights.items()) for s in seeds])


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, half the width of Student's 95 % interval, and what a power of 0.8 needs."""
    error, free = values.std(ddof=1) / len(values) ** 0.5, len(values) - 1
    return float(values.mean()), float(error * STUDENT[free]), float(error * (STUDENT[free] + POWER[free]))


if __name__ == "__main__":
    tables = {"retrofit": retrofit, "looped-experts": looped_experts}
    for name in sys.argv[1:] or tables:
        print(*tables[name](), sep="\n")

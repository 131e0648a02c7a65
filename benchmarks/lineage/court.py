"""The court: tools that say whose weights these are, on pairs whose ancestry is known.

    python benchmarks/lineage/court.py --zoo zoo --strangers strangers --real SmolLM2-135M --text text.txt \\
        --directory court --kit env/bin/python --out benchmarks/results/lineage-court.json

`zoo`, `strangers` and `bystanders` are what zoo.py, strangers.py and bystanders.py made. Every tool with a score is
asked twice: with its published threshold, and calibrated on the controls of the case as Fathom is, max + 5 sd of the
scores of either model with each control. All are scored by two standards: *related* (any relation is said, a shared
start among them) and *lineage* (one came from the other or both from a third). Every answer is a line of
court/answers.jsonl; a run that was stopped resumes where it ended, and `--fresh` begins anew; several runs with other
`--tools` may share a directory.

A tool is a function from a case to an answer:

    @tool("name")
    def name(case: Case) -> Answer:
        return Answer(score, said(score >= 0.8))

False accusations are bounded by root, since pairs that share a model are not independent: r roots make r // 2 disjoint
pairs, and the bound is Clopper and Pearson's for as many.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import baselines
import bystanders
import court_real
import members as zoo_members
import named
import neutral
import numpy as np
import strangers as small
import torch
from figures import auc, found_at_none
from scipy import stats
from strangers import commit

from fathom.lineage import Weights, aligning, awm, canonical, comparison, evidence, huref, open_weights, verdict

RELATED, SEED, STRANGER = "related", "same seed", "stranger"
FOUND, NOT_FOUND, ABSTAINS = "found", "not found", "abstains"
HIGH = 0.8  # from which the follow-up papers call HuRef's score, and a cosine, high
DISGUISED = ("llama", "llama-tied", "qwen3", "qwen3-tied", "gpt2")
AWM_LOW, AWM_SD = 0.00375, 0.0028  # of unrelated pairs, as AWM's code has them
SAID = {
    verdict.SHARED: FOUND,
    verdict.PARTIAL: FOUND,
    verdict.INITIALISATION: FOUND,
    verdict.EMBEDDING: ABSTAINS,
    verdict.INCONCLUSIVE: ABSTAINS,
    verdict.NONE: NOT_FOUND,
}


@dataclass(frozen=True)
class Case:
    """A pair of models, and what is known of it."""

    kind: str
    truth: str
    a: Path
    b: Path
    roots: tuple[str, str]
    controls: tuple[Path, ...] = ()

    @property
    def key(self) -> str:
        """Its name in the log."""
        return f"{self.kind} | {self.a.name} | {self.b.name}"


@dataclass
class Answer:
    """What a tool said. `lineage`: it claims a lineage, and not merely a shared start."""

    score: float | None
    said: str
    words: str = ""
    lineage: bool | None = None
    seconds: float | None = None


TOOLS: dict[str, Callable[[Case], Answer]] = {}


def tool(name: str) -> Callable[[Callable[[Case], Answer]], Callable[[Case], Answer]]:
    """Enter a tool under this name."""

    def entered(ask: Callable[[Case], Answer]) -> Callable[[Case], Answer]:
        TOOLS[name] = ask
        return ask

    return entered


def by_threshold(score: float, high: float) -> Answer:
    """The answer of a tool that has one number and one threshold."""
    return Answer(float(score), FOUND if score >= high else NOT_FOUND)


def opened(case: Case) -> tuple[Weights, Weights]:
    """Both models, the wider one first."""
    a, b = open_weights(case.a), open_weights(case.b)
    return (b, a) if b.geometry.width > a.geometry.width else (a, b)


@tool("Fathom")
def fathom(case: Case) -> Answer:
    """`fathom lineage compare`, with the case's controls."""
    found = comparison.compare(*opened(case), case.controls, options=comparison.Options(extras=False))
    label, p = found.verdict.label, min((t.corrected for t in found.tests if not t.name.startswith("T3")), default=1.0)
    lineage = label in {verdict.SHARED, verdict.PARTIAL}
    return Answer(-float(np.log10(max(p, 1e-300))), SAID[label], label, lineage)


@tool("AWM, as published")
def awm_published(case: Case) -> Answer:
    """Raw weights, reordered; its code prints how many standard deviations a score is above 90 unrelated pairs."""
    a, b = opened(case)
    how = aligning.align(a, b, False, lambda _: None).ways["published"]
    layers = list(range(a.geometry.layers)), list(range(b.geometry.layers))
    scores = awm.score_layers((a, b), layers, [awm.MatchMethod("awm", how, published=True, channels=None)], 0)
    return by_threshold(scores["awm"].score, AWM_LOW + 5 * AWM_SD)


@tool("HuRef ICS, as published")
def huref_published(case: Case) -> Answer:
    """Invariant terms of the last two layers; 0.8 is what the follow-up papers ask."""
    a, b = opened(case)
    rows = comparison.shared_anchors(a, b, aligning.align(a, b, False, lambda _: None))
    return by_threshold(huref.ics(a, b, *rows, published=True), HIGH)


@tool("parameter cosine")
def parameter_cosine(case: Case) -> Answer:
    """All tensors of equal size, one cosine."""
    return by_threshold(baselines.pcs(*opened(case)), HIGH)


@tool("embedding cosine")
def embedding_cosine(case: Case) -> Answer:
    """Mean cosine of the embedding rows of shared strings."""
    a, b = opened(case)
    if a.geometry.width != b.geometry.width:
        return Answer(None, ABSTAINS, "another width")
    rows = aligning.paired_rows(a, b)[:2]
    one, other = (awm.unit_rows(awm.gathered(w, r, canonical.embedding)) for w, r in zip((a, b), rows, strict=True))
    return by_threshold(float(np.einsum("nd,nd->n", one, other).mean()), HIGH)


RIVALS = ("AWM, as published", "HuRef ICS, as published", "parameter cosine", "embedding cosine")
_scored: dict[tuple[str, Path, Path], float | None] = {}


def calibrated(name: str) -> Callable[[Case], Answer]:
    """A tool with the threshold that the case's controls give, by Fathom's rule."""

    def score(case: Case) -> float | None:
        key = (name, *sorted((case.a, case.b)))
        if key not in _scored:
            _scored[key] = TOOLS[name](case).score
        return _scored[key]

    def ask(case: Case) -> Answer:
        pairs = [replace(case, a=one, b=other) for one in (case.a, case.b) for other in case.controls]
        null = [found for pair in pairs if (found := score(pair)) is not None]
        own, bar = score(case), evidence.score_threshold(null)
        return Answer(own, ABSTAINS, "no controls") if own is None or bar is None else by_threshold(own, bar)

    return ask


for _name in RIVALS:
    TOOLS[f"{_name.removesuffix(', as published')}, calibrated"] = calibrated(_name)


@dataclass
class Kit:
    """Cisco's Model Provenance Kit, running in its own environment."""

    process: subprocess.Popen[str]
    last: tuple[tuple[Path, Path] | None, dict[str, Any]] = (None, {})

    @classmethod
    def start(cls, python: str, cache_directory: Path) -> Kit:
        """One process for all cases."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        command = [python, str(Path(__file__).with_name("court_kit.py")), str(cache_directory)]
        pipe = subprocess.PIPE
        quiet = subprocess.DEVNULL
        return cls(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True, env=environment))

    def ask(self, a: Path, b: Path) -> dict[str, Any]:
        """Its answer about one pair; two tools ask for it."""
        if self.last[0] == (a, b):
            return self.last[1]
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(a), str(b)]) + "\n")
        self.process.stdin.flush()
        self.last = ((a, b), dict(json.loads(self.process.stdout.readline())))
        return self.last[1]

    def whole(self, case: Case) -> Answer:
        """Its decision; a weak match counts as found."""
        found = self.ask(case.a, case.b)
        if found["score"] is None:
            return Answer(None, ABSTAINS, found["said"], seconds=found["seconds"])
        said = FOUND if "Match" in found["said"] and "Not" not in found["said"] else NOT_FOUND
        return Answer(found["score"], said, found["said"], said == FOUND, found["seconds"])

    def weights(self, case: Case) -> Answer:
        """Its score from weights, without what config.json says."""
        found = self.ask(case.a, case.b)
        score = found.get("weights alone")
        if score is None:
            return Answer(None, ABSTAINS, found["said"], seconds=found["seconds"])
        answer = by_threshold(score, 0.65)
        answer.seconds = found["seconds"]
        return answer


@dataclass
class Court:
    """Where the models are, and the cases about them."""

    directory: Path
    zoo: Path | None
    strangers: Path | None
    real: court_real.Real | None
    gguf: Path | None
    bystanders: Path | None = None

    def plain(self, name: str) -> Path:
        """A model of the zoo under the name of its public twin, which every tool can read."""
        source, target = self.zoo / "models" / name, self.directory / "zoo" / name  # type: ignore[operator]
        if not (target / "config.json").exists():
            target.mkdir(parents=True, exist_ok=True)
            config = json.loads((source / "config.json").read_text())
            inner = config.get("text_config")
            if inner is None and config.get("model_type") == "fathom":
                config = {k: v for k, v in config.items() if k != "auto_map"}
                config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
            for file in (f for pattern in ("*.safetensors*", "tokenizer*.json") for f in source.glob(pattern)):
                shutil.copyfile(file, target / file.name)
            (target / "config.json").write_text(json.dumps(config))
        return target

    def cases(self) -> Iterator[Case]:
        """All of them, the same in every run."""
        if self.real is not None:
            yield from self.of_real()
        if self.zoo is not None:
            yield from self.of_zoo()
        if self.strangers is not None:
            yield from self.of_strangers(np.random.default_rng(0))
        if self.bystanders is not None:
            yield from self.of_bystanders(self.bystanders)

    def of_bystanders(self, where: Path) -> Iterator[Case]:
        """Strangers that share a formula, a teacher, an embedding or data; runs of one seed; and disguises by name."""
        plain = [where / f"plain-{at}" for at in range(20)]

        def case(kind: str, truth: str, a: Path, b: Path, other: Path | None = None) -> Case:
            root = "one seed" if truth == SEED else ""
            roots = (root or a.name, root or b.name)
            return Case(kind, truth, a, other or b, roots, tuple(p for p in plain[17:] if p not in (a, b))[:2])

        for name, recipe in bystanders.RECIPES.items():
            models = [where / f"{name.replace(' ', '-')}-{at}" for at in range(4)]
            truth = SEED if name in bystanders.ONE_SEED else STRANGER
            for a, b in itertools.combinations(models, 2):
                yield case(name, truth, a, b)
                if (turned := where / "rotated" / f"{b.name}-rotated").exists() and recipe.turned:
                    yield case(f"{name}, rotated", truth, a, b, turned)
            if recipe.teacher and recipe.teacher != "embedding":
                yield from (case(f"{name}, and its teacher", truth, student, plain[0]) for student in models)
        for at in range(4):
            pair = [where / f"{name.replace(' ', '-')}-{at}" for name in bystanders.ONE_SEED[:2]]
            yield case("one seed and order", SEED, pair[0], pair[1])
        neutral.EDITS["two layers"] = named.two_layers
        for at, (name, kinds) in enumerate((n, k) for n, k in named.DISGUISES.items() for _ in range(3)):
            source = plain[at % 12]
            copy = named.made(source, kinds, self.directory / "named" / f"{name.replace(' ', '-')}-{at}", True)[0]
            yield case(f"disguised: {name}", RELATED, source, source, copy)

    def of_real(self) -> Iterator[Case]:
        """A real model with its children, and strangers of its shape."""
        assert self.real is not None
        base, name = self.real.base, self.real.base.name
        others = {n: court_real.built(self.real, n, build) for n, build in court_real.STRANGERS.items()}
        for child, build in court_real.CHILDREN.items():
            yield Case(f"real: {child}", RELATED, base, court_real.built(self.real, child, build), (name, name))
        if self.gguf is not None:
            yield Case("real: GGUF", RELATED, base, self.gguf, (name, name))
        first, second, again = others.values()
        yield Case("real: stranger", STRANGER, base, first, (name, "stranger 1"))
        yield Case("real: stranger", STRANGER, base, second, (name, "stranger 2"))
        yield Case("real: stranger", STRANGER, first, second, ("stranger 1", "stranger 2"))
        yield Case("real: same seed", SEED, first, again, ("stranger 1", "stranger 1"))

    def of_zoo(self) -> Iterator[Case]:
        """The zoo, as far as it was made: what comes from its bases, and its bases among each other."""
        made = self.zoo / "models"  # type: ignore[operator]
        everyone = [m for m in zoo_members.members(zoo_members.SIZES["tiny"]) if (made / m.name).exists()]
        bases = [m for m in everyone if m.claim == zoo_members.BASE]
        names = {m.name: self.plain(m.name) for m in everyone}

        def controls(*roots: str) -> tuple[Path, ...]:
            return tuple(names[m.name] for m in bases if m.name not in roots and m.shape == "standard")[:2]

        for m in everyone:
            if m.claim in (zoo_members.DERIVED, zoo_members.SEED) and m.roots[0] in names:
                truth = RELATED if m.claim == zoo_members.DERIVED else SEED
                root = m.roots[0]
                yield Case(f"zoo: {m.kind}", truth, names[root], names[m.name], (root, root), controls(*m.roots))
        for at, one in enumerate(bases):
            for other in bases[at + 1 :]:
                kind = "zoo: tied strangers" if {one.shape, other.shape} == {"tied"} else "zoo: strangers"
                roots = (one.name, other.name)
                yield Case(kind, STRANGER, names[one.name], names[other.name], roots, controls(*roots))

    def of_strangers(self, draw: np.random.Generator) -> Iterator[Case]:
        """Tied, rotated and other strangers, runs from one seed, and disguises of up to six edits."""
        where = self.strangers
        assert where is not None
        every = {m.name: m for m in small.members()}
        roots = [m for m in every.values() if "again" not in m.name]

        def path(m: small.Member) -> Path:
            return where / m.name

        def controls(*seeds: int) -> tuple[Path, ...]:
            family = next(m.family for m in every.values() if m.seed == seeds[0])
            usable = [m for m in roots if m.family == family and m.seed not in seeds]
            return tuple(path(m) for m in usable[:2])

        def case(kind: str, truth: str, a: small.Member, b: small.Member, other: Path | None = None) -> Case:
            names = (f"s{a.seed}", f"s{b.seed}")
            return Case(kind, truth, path(a), other or path(b), names, controls(a.seed, b.seed))

        tied = [m for m in roots if small.SHAPES[m.family][0].tied]
        untied = [m for m in roots if m not in tied]
        for kind, group, count in (("tied strangers", tied, 40), ("strangers", untied, 40)):
            for _ in range(count):
                family = draw.choice(sorted({m.family for m in group}))
                a, b = draw.choice([m for m in group if m.family == family], 2, replace=False)  # type: ignore[arg-type]
                yield case(kind, STRANGER, a, b)
        usable = [m for m in roots if m.family in {"llama", "llama-tied", "qwen3", "qwen3-tied"}]
        for number in range(24):
            a, b = (usable[i] for i in draw.choice(len(usable), 2, replace=False))
            sides = [self.axes(open_weights(path(m)), m.family, number, side) for side, m in enumerate((a, b))]
            yield Case("strangers in principal axes", STRANGER, sides[0], sides[1], (f"s{a.seed}", f"s{b.seed}"))
        siblings = [m for m in every.values() if "again" in m.name]
        for i in draw.choice(len(siblings), 32, replace=False):
            root = next(m for m in roots if m.seed == siblings[i].seed)
            yield case("same seed, other run", SEED, root, siblings[i])
        for number in range(40):
            family = DISGUISED[number % len(DISGUISED)]
            source = every[f"{family}-{draw.integers(6)}"]
            yield case("disguised", RELATED, source, source, self.disguise(path(source), family, number))

    def axes(self, weights: Weights, family: str, number: int, side: int) -> Path:
        """A model turned to its principal axes."""
        path = self.directory / "axes" / f"{number}-{side}"
        if not path.exists():
            self.moved(small.axes_of(weights, self.work / path.name, family), path)
        return path

    def disguise(self, source: Path, family: str, number: int) -> Path:
        """A copy after one to six edits, drawn by its number."""
        path = self.directory / "disguises" / str(number)
        if not path.exists():
            draw = np.random.default_rng(number)
            kinds = neutral.drawn(draw, family.split("-")[0])
            self.moved(neutral.composed(source, kinds, self.work, draw), path)
        return path

    @property
    def work(self) -> Path:
        """An empty directory of this process."""
        path = self.directory / f"work-{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def moved(self, made: Path, path: Path) -> None:
        """Put a model in its place, unless another run did."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            made.rename(path)
        shutil.rmtree(self.directory / f"work-{os.getpid()}", ignore_errors=True)


def answered(name: str, case: Case) -> Answer:
    """Ask a tool; what it cannot read is an abstention with its reason."""
    started = time.process_time()
    try:
        answer = TOOLS[name](case)
    except Exception as error:  # a tool that fails has said nothing
        answer = Answer(None, ABSTAINS, f"{type(error).__name__}: {error}"[:200])
    answer.seconds = answer.seconds if answer.seconds is not None else time.process_time() - started
    answer.lineage = answer.lineage if answer.lineage is not None else answer.said == FOUND
    return answer


def bound(accused: int, asked: int, roots: int) -> float:
    """Upper 95 % limit of the rate of false accusations, for as many independent pairs as the roots make."""
    pairs = min(asked, max(roots // 2, 1))
    hits = min(pairs, int(np.ceil(accused / max(asked, 1) * pairs)))
    return 1.0 if hits == pairs else float(stats.beta.ppf(0.95, hits + 1, pairs - hits))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each tool got right, and at what price."""
    out = {}
    for name in dict.fromkeys(row["tool"] for row in rows):
        here = [row for row in rows if row["tool"] == name]
        kinds = {t: [r for r in here if r["truth"] == t] for t in (RELATED, STRANGER, SEED)}
        accused = [r for r in kinds[STRANGER] if r["said"] == FOUND]
        roots = len({root for r in kinds[STRANGER] for root in r["roots"]})
        scored = [r for r in kinds[RELATED] + kinds[STRANGER] if r["score"] is not None]
        scores = np.array([r["score"] for r in scored])
        related = np.array([r["truth"] == RELATED for r in scored])
        both = len({r["truth"] for r in scored}) == 2
        asked = len(kinds[STRANGER])
        out[name] = {
            "related": len(kinds[RELATED]),
            "found": sum(r["said"] == FOUND for r in kinds[RELATED]),
            "found, as a lineage": sum(bool(r["lineage"]) for r in kinds[RELATED]),
            "strangers": asked,
            "stranger roots": roots,
            "falsely accused": len(accused),
            "falsely accused of a lineage": sum(bool(r["lineage"]) for r in kinds[STRANGER]),
            "bound by root": bound(len(accused), asked, roots),
            "same seed": len(kinds[SEED]),
            "same seed called related": sum(r["said"] == FOUND for r in kinds[SEED]),
            "same seed called a lineage": sum(bool(r["lineage"]) for r in kinds[SEED]),
            "abstained": sum(r["said"] == ABSTAINS for r in here),
            "area under the curve": auc(scores, related, np.ones(len(scored))) if both else None,
            "found with no false alarm": found_at_none(scores, related, np.ones(len(scored))) if both else None,
            "median CPU seconds": float(np.median([r["seconds"] for r in here])),
            "kinds": {
                kind: Counter(r["said"] for r in here if r["kind"] == kind)
                for kind in dict.fromkeys(r["kind"] for r in here)
            },
        }
    return out


def by_explanation(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Of the pairs of each kind that are not related: how many each tool called related."""
    out: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows if row["truth"] != RELATED):
        here = [row for row in rows if row["kind"] == kind]
        tools = dict.fromkeys(row["tool"] for row in here)
        out[kind] = {
            name: f"{sum(r['said'] == FOUND for r in here if r['tool'] == name)} of "
            f"{sum(r['tool'] == name for r in here)}"
            for name in tools
        }
    return out


def table(found: dict[str, dict[str, Any]]) -> str:
    """The court's table, in Markdown."""
    head = ("tool", "found related", "as a lineage", "strangers called related (95 % bound)", "as a lineage")
    head += ("same seed called related", "as a lineage", "abstained")
    head += ("area under the curve", "found with no false alarm", "CPU s, median")
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for name, row in found.items():
        share = row["found with no false alarm"]
        cells = [
            name,
            f"{row['found']} of {row['related']}",
            str(row["found, as a lineage"]),
            f"{row['falsely accused']} of {row['strangers']} (< {row['bound by root']:.0%})",
            str(row["falsely accused of a lineage"]),
            f"{row['same seed called related']} of {row['same seed']}",
            str(row["same seed called a lineage"]),
            str(row["abstained"]),
            "–" if row["area under the curve"] is None else f"{row['area under the curve']:.3f}",
            "–" if share is None else f"{share:.0%}",
            f"{row['median CPU seconds']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_all(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last answer of every tool to the cases that every tool has answered."""
    answers = {(row["tool"], row["key"]): row for row in rows}
    tools = {tool for tool, _ in answers}
    heard = {key for _, key in answers if all((tool, key) in answers for tool in tools)}
    return [row for (_, key), row in answers.items() if key in heard]


def shared_out(cases: Sequence[Case], share: float) -> list[Case]:
    """A share of each kind of case, at least one."""
    sizes, taken, out = Counter(case.kind for case in cases), Counter[str](), []
    for case in cases:
        if taken[case.kind] < max(1, round(share * sizes[case.kind])):
            taken[case.kind] += 1
            out.append(case)
    return out


def main(words: Sequence[str] | None = None) -> int:
    """Hear all cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="where children, disguises and the log go")
    parser.add_argument("--zoo", type=Path, help="what zoo.py made, whole or in part")
    parser.add_argument("--strangers", type=Path, help="what strangers.py made")
    parser.add_argument("--bystanders", type=Path, help="what bystanders.py made")
    parser.add_argument("--seconds", type=float, default=1e9, help="of processor time, after which this run ends")
    parser.add_argument("--real", type=Path, help="a real Llama model with tied embeddings")
    parser.add_argument("--text", type=Path, help="text for its fine-tunes")
    parser.add_argument("--gguf", type=Path, help="its GGUF file")
    parser.add_argument("--kit", help="python of an environment with Cisco's Model Provenance Kit")
    parser.add_argument("--tools", nargs="+", help="these tools alone")
    parser.add_argument("--share", type=float, default=1.0, help="hear this share of every kind of case, at least one")
    parser.add_argument("--backwards", action="store_true", help="begin with the last case, for a second run beside")
    parser.add_argument("--tally", action="store_true", help="ask nothing; sum up what was answered")
    parser.add_argument("--fresh", action="store_true", help="forget the answers of earlier runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    code = commit()  # of what is loaded now
    options.directory.mkdir(parents=True, exist_ok=True)
    real = court_real.Real(options.real, options.text, options.directory / "real") if options.real else None
    if options.kit:
        kit = Kit.start(options.kit, options.directory / "kit-cache")
        TOOLS["Model Provenance Kit"], TOOLS["Model Provenance Kit, weights alone"] = kit.whole, kit.weights
    log = options.directory / "answers.jsonl"
    if options.fresh:
        log.unlink(missing_ok=True)
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known, resumed = {(row["tool"], row["key"]) for row in rows}, bool(rows)
    court = Court(options.directory, options.zoo, options.strangers, real, options.gguf, options.bystanders)
    cases = list({case.key: case for case in court.cases()}.values())
    np.random.default_rng(0).shuffle(cases)  # so that a run that is stopped has heard some of every kind
    cases = shared_out(cases, options.share)
    for number, case in enumerate(cases[:: -1 if options.backwards else 1]):
        if time.process_time() > options.seconds:
            break
        for name in () if options.tally else options.tools or TOOLS:
            if (name, case.key) in known:
                continue
            row = {"tool": name, "key": case.key, "kind": case.kind, "truth": case.truth, "roots": case.roots}
            rows.append({**row, **asdict(answered(name, case))})
            with log.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        if not options.tally:
            print(f"{number + 1} of {len(cases)}: {case.key}", file=sys.stderr)
    heard = by_all([row for row in rows if row["key"] in {case.key for case in cases}])
    found = summary(heard)
    body = {
        "command": "python benchmarks/lineage/court.py " + " ".join(words or sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": code,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "uninterrupted": not resumed,
        "cases": len(cases),
        "heard by all tools": len({row["key"] for row in heard}),
        "summary": found,
        "related said of strangers and of one seed, by what they share": by_explanation(heard),
        "answers": [
            [r["tool"], r["key"], r["truth"], r["said"], bool(r["lineage"]), r["score"], r["words"]] for r in heard
        ],
    }
    if options.out:
        head, lines = json.dumps({**body, "answers": []}, indent=1), map(json.dumps, body["answers"])
        options.out.write_text(head.replace('"answers": []', '"answers": [\n  ' + ",\n  ".join(lines) + "\n ]") + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What specialising a model does to it: what it forgets by how much is replayed, what it learns, what a leak is worth.

    python benchmarks/specialise.py forgetting --work WORK --out benchmarks/results/specialise-forgetting.json
    python benchmarks/specialise.py knowledge --work WORK --out benchmarks/results/specialise-knowledge.json
    python benchmarks/specialise.py leaks --work WORK --out benchmarks/results/specialise-leaks.json
    python benchmarks/specialise.py exam --work EXAM --out benchmarks/results/specialise-exam.json
    python benchmarks/specialise.py crammed --work CRAMMED --out benchmarks/results/specialise-crammed.json

The steps are those of `make specialise`, with its recipes, at a larger size: 250 invented minerals, 2,000 facts, 400
questions, 50 of which are given away in a document. The base is made of equal parts of invented towns and of docstrings
of Python's own library, which each user has; `--prose` names other text. Killed and started again it goes on; `--work`
keeps corpora, runs and scores, which the first three share. All but `forgetting` need the extra `evaluate`.

`exam` asks both questions again where an answer can be expected: 50 minerals, 400 facts, one question on each, in steps
that read every fact about as often as `make specialise` does (20 times in documents, 10 in conversations). Beside the
documents lie 25 exam sheets of 8 questions with their answers, so that half of the questions are dirty, drawn at
random, and no document of the domain is lost where the sheets are dropped. Two worlds, seeds 1 and 2, each with a
base, an expert of documents without sheets, and one with. Decided before the first run:

1. Knowledge: the first expert against the base on all 400 questions by option text, in each seed. If the expert were
   right on 40 % only, McNemar's p would be below 0.01 with probability 0.97; 25 % is to be in the base's interval.
2. Leaks: dirty against clean questions, the expert that read the sheets, by option text, over the seeds together: an
   exact test of the number of dirty questions answered rightly, given each seed's totals. If they were answered as
   those of `leaks` are (54 against 43 %), 400 against 400 would give p < 0.05 with probability 0.89; its 50 against
   350 does with probability 0.3. The expert without sheets is the control.

`crammed` was added when the first seed of `exam` was seen: there the sheets taught the form of all questions, and the
clean ones, of which the documents tell the answers, were answered almost as well. Here a base reads the sheets alone,
as often, and neither a document nor a conversation on a mineral, so that clean questions can only be guessed. Seeds 3
and 4; test 2, with the base as the control.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fathom.corpus.documents import read_lines
from fathom.corpus.pipeline import build
from fathom.corpus.publish import SHARD_FOLDER
from fathom.corpus.recipe import load_corpus_recipe
from fathom.evaluation.scoring import EvaluationSettings, run
from fathom.evaluation.tuned import evaluate_pair, read_benchmarks
from fathom.recipe import parse_recipe
from fathom.report.files import read_json, write_atomically, write_json
from fathom.report.provenance import provenance
from fathom.report.statistics import Difference, mcnemar, paired_difference, wilson
from fathom.settings import read_values
from fathom.training import train

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from minerals import Question, World, write_world

RECIPES = Path(__file__).parents[1] / "recipes" / "specialise"
REPLAY = (0, 1, 5, 20)
"""Percent of the rows."""
TEXTS = ("minerals", "general", "prose")
"""Collections with held-out text: the domain, the invented towns, the docstrings or what `--prose` names."""
SIZES = {
    "minerals": 250,
    "questions": 400,
    "leaks": 50,
    "towns_texts": 1000,
    "base_steps": 600,
    "continue_steps": 300,
    "expert_steps": 2000,
    "tune_steps": 400,
    "tokens_per_step": 1024,
}
"""Chosen before the first run; the three kinds of held-out text are a twentieth of the documents each."""
EXAM = {
    "minerals": 50,
    "questions": 400,
    "leaks": 200,
    "on_a_sheet": 8,
    "towns_texts": 1000,
    "base_steps": 100,
    "expert_steps": 650,
    "tune_steps": 300,
    "tokens_per_step": 1024,
}
"""Sizes of `exam`."""
EXAM_SEEDS = (1, 2)
CRAMMED = {**EXAM, "sheet_steps": 200}
"""Sizes of `crammed`."""
CRAMMED_SEEDS = (3, 4)
PLAIN = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
"""Folders of the library that are not read."""


def main() -> int:
    """One of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forgetting", "knowledge", "leaks", "exam", "crammed"))
    parser.add_argument("--work", type=Path, required=True, help="where corpora, runs and scores are kept")
    parser.add_argument("--prose", nargs="+", metavar="FILE", help="general text in place of Python's docstrings")
    parser.add_argument("--seeds", type=int, default=3, help="of forgetting; one after the other (default: 3)")
    parser.add_argument("--small", action="store_true", help="a hundredth of the size: to see that it works")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: allowed: 1 or more; intervals need 2")
    sizes = {"exam": EXAM, "crammed": CRAMMED}.get(options.what, SIZES)
    if options.small:
        few = {"minerals": 20, "towns_texts": 100, "questions": 40, "on_a_sheet": 5, "tokens_per_step": 1024}
        sizes = {key: few.get(key, max(value // 100, 10)) for key, value in sizes.items()}
    began = time.perf_counter()
    measure = {"exam": exam, "crammed": crammed}.get(options.what, measured)
    for found in measure(options, sizes):
        log = {**vars(provenance()), "sizes": sizes, **found}
        log["seconds_of_this_call"] = round(time.perf_counter() - began, 1)
        log["niceness"] = os.nice(0)
        if options.out:
            write_json(options.out, log)
    print(json.dumps(log, indent=1))
    return 0


def measured(options: argparse.Namespace, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """One of the measurements on 250 minerals."""
    bench = Bench(options.work, sizes, options.prose)
    for found in getattr(bench, options.what)(options):
        yield {"corpora": bench.corpora, **found}


def exam(options: argparse.Namespace, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Each seed has a world, a base and two experts of its own; a log after each, with all seeds so far together."""
    rows = []
    for seed in EXAM_SEEDS:
        bench = Bench(options.work / f"seed-{seed}", sizes, options.prose, seed)
        rows.append({"seed": seed, **bench.exam(), "corpora": bench.corpora})
        print(f"seed {seed}: {json.dumps(rows[-1]['knowledge'])} {json.dumps(rows[-1]['leaks'])}", file=sys.stderr)
        yield {"together": together(rows), "seeds": rows}


def crammed(options: argparse.Namespace, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Each seed has a world and a base of its own; a log after each, with all seeds so far together."""
    rows = []
    for seed in CRAMMED_SEEDS:
        bench = Bench(options.work / f"seed-{seed}", sizes, options.prose, seed)
        rows.append({"seed": seed, **bench.crammed(), "corpora": bench.corpora})
        print(f"seed {seed}: {json.dumps(rows[-1]['questions'])}", file=sys.stderr)
        names = ("base", "crammed")
        summed = {"questions": parts(rows, "questions", names)}
        yield {"together": {**summed, "dirty_against_clean": halves(rows, "questions", names)}, "seeds": rows}


class Bench:
    """Corpora, runs and scores in one directory; what is there is not made again."""

    def __init__(self, work: Path, sizes: dict[str, int], prose: Sequence[str] | None, seed: int = 0) -> None:
        self.work, self.sizes, self.seed = work, sizes, seed
        self.corpora: dict[str, Any] = {}
        made = work / "sizes.json"
        if made.is_file() and read_json(made) != sizes:
            raise SystemExit(f"{work} was made with other sizes: {read_json(made)}")
        if not made.is_file():
            world = World(seed=seed, minerals=sizes["minerals"])
            planted = 0 if "on_a_sheet" in sizes else sizes["leaks"]
            files = write_world(work / "world", world, sizes["questions"], planted, sizes["towns_texts"])
            if "on_a_sheet" in sizes:
                add_sheets(files["domain"], world.questions(sizes["questions"]), sizes, seed)
            write_json(made, sizes)
        self.prose = [str(Path(one).absolute()) for one in prose or [self._docstrings()]]

    def _docstrings(self) -> Path:
        place = self.work / "world" / "docstrings.jsonl"
        if not place.is_file():
            write_atomically(place, "".join(json.dumps({"text": text}) + "\n" for text in docstrings()))
        return place

    def corpus(self, name: str, *words: str) -> Path:
        """A corpus by the recipe of `make specialise`, with other inputs and words."""
        place, world = self.work / name, self.work / "world"
        given = [
            f"collections.minerals.inputs={world}/domain.jsonl",
            f"collections.general.inputs={world}/general.jsonl",
            f"collections.talk.inputs={world}/conversations.jsonl",
            f"collections.prose={json.dumps({'inputs': self.prose, 'license': 'as it came'})}",
            f"decontaminate.benchmarks.minerals={world}/questions.jsonl",
            "mix.shares={minerals: 0.8, general: 0.1, prose: 0.1}",
            "executor.workers=1",
            "exports=[trl]",
            *words,
        ]
        report = build(load_corpus_recipe(RECIPES / "corpus.yaml", given), place)
        index = read_json(place / SHARD_FOLDER / "index.json")["splits"]
        self.corpora[name] = {
            "counts": {stage: report.stages[stage].counts for stage in ("clean", "duplicates", "contamination")},
            "splits": {split: {key: _tokens(one) for key, one in found.items()} for split, found in index.items()},
        }
        return place

    def clean(self) -> Path:
        """The corpus that everything is made of: documents that give a question away are dropped."""
        return self.corpus("clean")

    def trained(self, stage: str, name: str, corpus: Path, mixture: dict[str, float], *words: str) -> Path:
        """A run by a recipe of `make specialise`."""
        place = self.work / "runs" / name
        values = read_values(RECIPES / f"{stage}.yaml")
        values["data"] |= {"mixture": {key: share for key, share in mixture.items() if share}}
        given = [
            f"data.directory={corpus / SHARD_FOLDER}",
            f"train.tokens_per_step={self.sizes['tokens_per_step']}",
            "train.checkpoint_every=200",
            *words,
        ]
        train(parse_recipe(values, given), place)
        return place

    def base(self, seed: int) -> Path:
        """A model of general text alone."""
        words = (f"train.steps={self.sizes['base_steps']}", f"train.seed={seed}")
        return self.trained("base", f"base-{seed}", self.clean(), {"general": 0.5, "prose": 0.5}, *words)

    def continued(self, name: str, base: Path, corpus: Path, replay: float, steps: int, seed: int) -> Path:
        """A model that goes on with the domain; what is replayed is half towns and half prose."""
        shares = {"minerals": 1 - replay, "general": replay / 2, "prose": replay / 2}
        words = (f"model.from_pretrained={base}", f"train.steps={steps}", f"train.seed={seed}")
        return self.trained("continue", name, corpus, shares, *words)

    def expert(self, name: str, corpus: Path) -> Path:
        """The base of the world's seed, continued with a fifth of replay and tuned on conversations, by a corpus."""
        steps, seed = self.sizes["expert_steps"], self.seed
        before = self.continued(f"{name}-continued", self.base(seed), corpus, 0.2, steps, seed)
        words = (f"model.from_pretrained={before}", f"train.steps={self.sizes['tune_steps']}", f"train.seed={seed}")
        shares = {str(corpus / "conversations"): 0.85, "general": 0.075, "prose": 0.075}
        return self.trained("tune", name, corpus, shares, *words)

    def leaky(self, clean: Path) -> Path:
        """The corpus that keeps the documents which give a question away, in the tokens of the clean one's base."""
        return self.corpus("leaky", *self._reporting(clean))

    def sheets(self, clean: Path) -> Path:
        """The corpus of the sheets alone, in the same tokens."""
        where = f"collections.minerals.inputs={self.work}/world/sheets.jsonl"
        return self.corpus("sheets", *self._reporting(clean), where, "tokenize.held_out=0")

    def _reporting(self, clean: Path) -> tuple[str, ...]:
        tokenizer = clean / SHARD_FOLDER / "tokenizer"
        return "decontaminate.action=report", "tokenize.train=null", f"tokenize.tokenizer={tokenizer}"

    def bits(self, model: Path) -> dict[str, float]:
        """Bits per byte of held-out text, by collection."""
        shards = str(self.work / "clean" / SHARD_FOLDER)
        [scored], _ = run([model], EvaluationSettings(perplexity=(shards,), out=self.work / "scores"))
        return {name: scored.domains[name].bits_per_byte for name in TEXTS}

    def forgetting(self, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """Each seed has a base of its own, and from it a run for each share of replay; a log after each seed."""
        rows = []
        for seed in range(options.seeds):
            base = self.base(seed)
            row: dict[str, Any] = {"seed": seed, "base": self.bits(base)}
            for replay in REPLAY:
                steps = self.sizes["continue_steps"]
                name = f"replay-{replay}-{seed}"
                place = self.continued(name, base, self.clean(), replay / 100, steps, seed)
                row[str(replay)] = self.bits(place)
                print(f"seed {seed}, replay {replay} %: {row[str(replay)]} from {row['base']}", file=sys.stderr)
            rows.append(row)
            yield {"seeds": rows, "changes": changes(rows)}

    def knowledge(self, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """Base and expert on questions in unseen words, and on held-out text."""
        expert = self.expert("expert", self.clean())
        entries = [f"base={self.base(0)}", f"expert={expert}"]
        settings = EvaluationSettings(out=self.work / "knowledge")
        report = evaluate_pair(entries, self.work / "clean" / "benchmark", settings)
        yield {key: report[key] for key in ("verdict", "texts", "questions", "guessing", "runs")}

    def leaks(self, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """An expert of documents with leaks beside the one of documents without, on the same questions."""
        clean = self.clean()
        leaky = self.leaky(clean)
        experts = [f"clean={self.expert('expert', clean)}", f"leaky={self.expert('leaky-expert', leaky)}"]
        report = evaluate_pair(experts, leaky / "benchmark", EvaluationSettings(out=self.work / "leaks"))
        yield {
            "questions": report["questions"],
            "dirty_against_clean": dirty_against_clean(report["questions"]),
            "left": {name: self._left(name) for name in ("leaky", "clean")},
        }

    def exam(self) -> dict[str, Any]:
        """Base against the expert without sheets, and that against the one with, on the same questions."""
        clean = self.clean()
        leaky = self.leaky(clean)
        models = {"base": self.base(self.seed), "clean": self.expert("expert", clean)}
        models["leaky"] = self.expert("leaky-expert", leaky)
        settings = EvaluationSettings(out=self.work / "exam", perplexity=(str(clean / SHARD_FOLDER),))
        found: dict[str, Any] = {}
        for name, pair in {"knowledge": ("base", "clean"), "leaks": ("clean", "leaky")}.items():
            report = evaluate_pair([f"{one}={models[one]}" for one in pair], clean / "benchmark", settings)
            found[name] = [row for row in report["questions"] if row["way"] == "text"]
            found[f"{name}_in_other_ways"] = [row for row in report["questions"] if row["way"] != "text"]
            found[f"{name}_texts"] = report["texts"]
        kept = {name: _kept(place)[0] for name, place in {"clean": clean, "leaky": leaky}.items()}
        asked = [row["question"] for row in read_lines(self.work / "world" / "questions.jsonl")]
        found["questions_found_word_for_word"] = {
            name: sum(question in text for question in asked) for name, text in kept.items()
        }
        return found

    def crammed(self) -> dict[str, Any]:
        """Base against what it becomes by the sheets alone, on the same questions."""
        clean, steps = self.clean(), self.sizes["sheet_steps"]
        base = self.base(self.seed)
        crammer = self.continued("crammed", base, self.sheets(clean), 0.2, steps, self.seed)
        settings = EvaluationSettings(out=self.work / "exam", perplexity=(str(clean / SHARD_FOLDER),))
        report = evaluate_pair([f"base={base}", f"crammed={crammer}"], clean / "benchmark", settings)
        rows = report["questions"]
        return {
            "questions": [row for row in rows if row["way"] == "text"],
            "in_other_ways": [row for row in rows if row["way"] != "text"],
            "texts": report["texts"],
            "epochs": read_json(crammer / "result.json")["collections"],
        }

    def _left(self, name: str) -> dict[str, int]:
        """Questions that the kept documents still give away: by a second search, and by comparing texts as they are."""
        text, documents = _kept(self.work / name)
        files = sorted((self.work / name / "exports" / "trl").glob("*.jsonl"))
        again = self.corpus(
            f"{name}-again",
            f"collections.minerals.inputs={json.dumps([str(one) for one in files if one.stem == 'minerals'])}",
            f"collections.talk.inputs={json.dumps([str(one) for one in files if one.stem == 'talk'])}",
            "decontaminate.action=report",
        )
        found = [item for item in read_benchmarks(again / "benchmark")["minerals"] if item is not None]
        asked = [row["question"] for row in read_lines(self.work / "world" / "questions.jsonl")]
        return {
            "documents": documents,
            "dirty": sum(item.dirty is True for item in found),
            "asked": len(found),
            "questions_found_word_for_word": sum(question in text for question in asked),
        }


def _kept(corpus: Path) -> tuple[str, int]:
    """All kept documents as one text, and their number."""
    files = sorted((corpus / "exports" / "trl").glob("*.jsonl"))
    kept = [json.dumps(row, ensure_ascii=False) for one in files for row in read_lines(one)]
    return "\n".join(kept), len(kept)


def add_sheets(documents: Path, questions: Sequence[Question], sizes: dict[str, int], seed: int) -> None:
    """Append exam sheets to a file of documents, and write them beside it.

    Args:
        documents: The file.
        questions: From which those on the sheets are drawn at random, with their answers.
        sizes: How many in all, and on a sheet.
        seed: Of the draw.
    """
    chosen = random.Random(f"fathom sheets {seed}").sample(list(questions), sizes["leaks"])
    lines = [f"{one.question} {one.fact.value}." for one in chosen]
    sheets = [" ".join(lines[at : at + sizes["on_a_sheet"]]) for at in range(0, len(lines), sizes["on_a_sheet"])]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in sheets)
    write_atomically(documents.with_name("sheets.jsonl"), rows)
    write_atomically(documents, documents.read_text(encoding="utf-8") + rows)


def together(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answers of all seeds of `exam`, by option text, and the two tests that were decided on."""
    pairs = {"knowledge": ("base", "clean expert"), "leaks": ("clean expert", "leaky expert")}
    found: dict[str, Any] = {name: parts(seeds, name, names) for name, names in pairs.items()}
    return {**found, "dirty_against_clean": halves(seeds, "leaks", pairs["leaks"])}


def parts(seeds: Sequence[dict[str, Any]], key: str, names: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """All, clean and dirty questions: counts of all seeds summed, and McNemar's test of them."""
    found = {}
    for part in ("all", "clean", "dirty"):
        rows = [row for seed in seeds for row in seed[key] if row["part"] == part]
        asked, lost, won = (sum(row[count] for row in rows) for count in ("asked", "lost", "won"))
        right = [sum(row["right"][number] for row in rows) for number in (0, 1)]
        found[part] = {"asked": asked, "right": dict(zip(names, right, strict=True)), "lost": lost, "won": won}
        found[part] |= {"intervals": [wilson(count, asked) for count in right], "p": mcnemar(lost, won)}
    return found


def halves(seeds: Sequence[dict[str, Any]], key: str, names: tuple[str, str]) -> dict[str, dict[str, float]]:
    """Of either model the shares of dirty and of clean questions answered rightly, and the test over seeds."""
    found = {}
    for number, name in enumerate(names):
        tables = []
        for seed in seeds:
            rows = {row["part"]: row for row in seed[key]}
            tables.append([(rows[part]["right"][number], rows[part]["asked"]) for part in ("dirty", "clean")])
        shares = {
            part: sum(table[place][0] for table in tables) / sum(table[place][1] for table in tables)
            for place, part in enumerate(("dirty", "clean"))
        }
        found[name] = {**shares, "p": stratified(tables)}
    return found


def stratified(tables: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Exact two-sided p that two groups are right equally often in every table, given each table's totals.

    Args:
        tables: Of each stratum, right and asked in one group and in the other.
    """
    from scipy.stats import hypergeom

    chances, seen = np.ones(1), 0
    for (right, asked), (other_right, other_asked) in tables:
        possible = np.arange(asked + 1)
        chances = np.convolve(chances, hypergeom.pmf(possible, asked + other_asked, right + other_right, asked))
        seen += right
    return float(min(1.0, chances[chances <= chances[seen] * (1 + 1e-9)].sum()))


def docstrings() -> Iterator[str]:
    """Docstrings of twenty words or more of Python's own library, each once, in the order of its files."""
    root, seen = Path(sysconfig.get_path("stdlib")), set[str]()
    for path in sorted(root.rglob("*.py")):
        if PLAIN & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates of code, which are none yet
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text is not None and len(text.split()) >= 20 and text not in seen:
                    seen.add(text)
                    yield text


def changes(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By text and share of replay: bits per byte minus the base's and minus those without replay, paired by seed."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for text in TEXTS:
        base, none = ([row[arm][text] for row in rows] for arm in ("base", "0"))
        found[text] = {"base": {"mean": statistics.fmean(base)}}
        for replay in REPLAY:
            mine = [row[str(replay)][text] for row in rows]
            entry: dict[str, Any] = {"mean": statistics.fmean(mine), "from_base": _gap(paired_difference(mine, base))}
            if replay:
                entry["from_no_replay"] = _gap(paired_difference(mine, none))
                entry["less_than_no_replay_in_seeds"] = sum(a < b for a, b in zip(mine, none, strict=True))
            found[text][str(replay)] = entry
    return found


def _gap(gap: Difference) -> dict[str, float | int | None]:
    return {"mean": gap.mean, "low": gap.low, "high": gap.high, "p": gap.p, "pairs": gap.pairs}


def dirty_against_clean(questions: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By way of asking and expert: shares right on dirty and on clean questions; p is Fisher's exact, two-sided."""
    from scipy.stats import fisher_exact

    rows = {(row["way"], row["part"]): row for row in questions}
    found: dict[str, dict[str, Any]] = {}
    for way in dict.fromkeys(row["way"] for row in questions):
        dirty, clean = rows[way, "dirty"], rows[way, "clean"]
        found[way] = {}
        for number, name in enumerate(("clean expert", "leaky expert")):
            table = [[part["right"][number], part["asked"] - part["right"][number]] for part in (dirty, clean)]
            shares = [part["right"][number] / part["asked"] for part in (dirty, clean)]
            p = float(fisher_exact(table).pvalue)
            found[way][name] = {"dirty": shares[0], "clean": shares[1], "p": p}
    return found


def _tokens(found: Any) -> int:
    return sum(one["tokens"] for one in found)


if __name__ == "__main__":
    raise SystemExit(main())

"""What specialising a model does to it: what it forgets by how much is replayed, what it learns, what a leak is worth.

    python benchmarks/specialise.py forgetting --work WORK --out benchmarks/results/specialise-forgetting.json
    python benchmarks/specialise.py knowledge --work WORK --out benchmarks/results/specialise-knowledge.json
    python benchmarks/specialise.py leaks --work WORK --out benchmarks/results/specialise-leaks.json

The steps are those of `make specialise`, with its recipes, at a larger size: 250 invented minerals, 2,000 facts, 400
questions, 50 of which are given away in a document. The base is made of equal parts of invented towns and of docstrings
of Python's own library, which each user has; `--prose` names other text. Killed and started again it goes on; `--work`
keeps corpora, runs and scores, which the three share. `knowledge` and `leaks` need the extra `evaluate`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fathom.corpus.documents import read_lines
from fathom.corpus.pipeline import build
from fathom.corpus.publish import SHARD_FOLDER
from fathom.corpus.recipe import load_corpus_recipe
from fathom.corpus.synthetic import World, write_world
from fathom.evaluation.pairs import evaluate_pair, read_benchmarks
from fathom.evaluation.scoring import Settings, run
from fathom.recipe import parse_recipe, read_values
from fathom.report.files import read_json, write_atomically, write_json
from fathom.report.provenance import provenance
from fathom.report.statistics import Difference, paired_difference
from fathom.training import train

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
PLAIN = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
"""Folders of the library that are not read."""


def main() -> int:
    """One of the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forgetting", "knowledge", "leaks"))
    parser.add_argument("--work", type=Path, required=True, help="where corpora, runs and scores are kept")
    parser.add_argument("--prose", nargs="+", metavar="FILE", help="general text in place of Python's docstrings")
    parser.add_argument("--seeds", type=int, default=3, help="of forgetting; one after the other (default: 3)")
    parser.add_argument("--small", action="store_true", help="a hundredth of the size: to see that it works")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: allowed: 1 or more; intervals need 2")
    sizes = {key: max(value // 100, 10) for key, value in SIZES.items()} if options.small else SIZES
    if options.small:
        sizes |= {"minerals": 20, "towns_texts": 100, "questions": 40, "tokens_per_step": 1024}
    bench = Bench(options.work, sizes, options.prose)
    began = time.perf_counter()
    for found in getattr(bench, options.what)(options):
        log = {**provenance(), "sizes": sizes, "corpora": bench.corpora, **found}
        log["seconds_of_this_call"] = round(time.perf_counter() - began, 1)
        log["niceness"] = os.nice(0)
        if options.out:
            write_json(options.out, log)
    print(json.dumps(log, indent=1))
    return 0


class Bench:
    """Corpora, runs and scores in one directory; what is there is not made again."""

    def __init__(self, work: Path, sizes: dict[str, int], prose: Sequence[str] | None) -> None:
        self.work, self.sizes = work, sizes
        self.corpora: dict[str, Any] = {}
        made = work / "sizes.json"
        if made.is_file() and read_json(made) != sizes:
            raise SystemExit(f"{work} was made with other sizes: {read_json(made)}")
        if not made.is_file():
            world = World(seed=0, minerals=sizes["minerals"])
            write_world(work / "world", world, sizes["questions"], sizes["leaks"], sizes["towns_texts"])
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
        """The base of seed 0, continued with a fifth of replay and tuned on conversations, by a corpus."""
        steps = self.sizes["expert_steps"]
        before = self.continued(f"{name}-continued", self.base(0), corpus, 0.2, steps, 0)
        words = (f"model.from_pretrained={before}", f"train.steps={self.sizes['tune_steps']}", "train.seed=0")
        shares = {str(corpus / "conversations"): 0.85, "general": 0.075, "prose": 0.075}
        return self.trained("tune", name, corpus, shares, *words)

    def bits(self, model: Path) -> dict[str, float]:
        """Bits per byte of held-out text, by collection."""
        shards = str(self.work / "clean" / SHARD_FOLDER)
        [scored], _ = run([model], Settings(perplexity=(shards,), out=self.work / "scores"))
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
        report = evaluate_pair(entries, self.work / "clean" / "benchmark", Settings(out=self.work / "knowledge"))
        yield {key: report[key] for key in ("verdict", "texts", "questions", "guessing", "runs")}

    def leaks(self, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """An expert of documents with leaks beside the one of documents without, on the same questions."""
        clean = self.clean()
        tokenizer = clean / SHARD_FOLDER / "tokenizer"  # the base's, so that it can go on
        words = ("decontaminate.action=report", "tokenize.train=null", f"tokenize.tokenizer={tokenizer}")
        leaky = self.corpus("leaky", *words)
        experts = [f"clean={self.expert('expert', clean)}", f"leaky={self.expert('leaky-expert', leaky)}"]
        report = evaluate_pair(experts, leaky / "benchmark", Settings(out=self.work / "leaks"))
        yield {
            "questions": report["questions"],
            "dirty_against_clean": dirty_against_clean(report["questions"]),
            "left": {name: self._left(name) for name in ("leaky", "clean")},
        }

    def _left(self, name: str) -> dict[str, int]:
        """Questions that the kept documents still give away: by a second search, and by comparing texts as they are."""
        files = sorted((self.work / name / "exports" / "trl").glob("*.jsonl"))
        again = self.corpus(
            f"{name}-again",
            f"collections.minerals.inputs={json.dumps([str(one) for one in files if one.stem == 'minerals'])}",
            f"collections.talk.inputs={json.dumps([str(one) for one in files if one.stem == 'talk'])}",
            "decontaminate.action=report",
        )
        found = read_benchmarks(again / "benchmark")["minerals"]
        asked = [row["question"] for row in read_lines(self.work / "world" / "questions.jsonl")]
        kept = [json.dumps(row, ensure_ascii=False) for one in files for row in read_lines(one)]
        text = "\n".join(kept)
        return {
            "documents": len(kept),
            "dirty": sum(item.dirty is True for item in found),
            "asked": len(found),
            "questions_found_word_for_word": sum(question in text for question in asked),
        }


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

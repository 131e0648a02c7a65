"""The origin of a model, from disk: the runs between it and its base, and the corpus of a benchmark.

`tuned_page.py` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from fathom.checkpoints.file_names import METRICS, RECIPE, RESULT, run_and_step
from fathom.corpus.counts import CorpusCounts
from fathom.evaluation.results import PhaseShares, RunBetween
from fathom.recipe import Recipe, load_recipe
from fathom.report.files import read_json
from fathom.training.results import RunResult
from fathom.training.tracking import read_metrics

CORPUS_RUN = "run.json"


def runs_between(base: Path, new: Path) -> list[RunBetween]:
    """The training runs that lead from one model directory to another, first to last; empty if there are none.

    Args:
        base: Where to stop: any model.
        new: Where to begin; a run's model knows its run, and the run its `model.from_pretrained`.
    """
    found: list[RunBetween] = []
    seen: set[Path] = set()
    run, last = _run_of(new), _run_of(base)
    while run is not None and run != last and run not in seen:
        seen.add(run)
        recipe = load_recipe(run / RECIPE)
        found.append(_facts(run, recipe))
        source = recipe.model.get("from_pretrained")
        if source is not None and Path(source).resolve() == base.resolve():
            return found[::-1]
        run = None if source is None else _run_of(Path(source))
    return found[::-1] if run is not None and run == last else []


def _run_of(place: Path) -> Path | None:
    """The run directory that a path belongs to, where the path is a model directory, a run or a run's checkpoint."""
    for one in (place, place.parent):
        found = run_and_step(one)
        if found is not None:
            return found[0].resolve()
    return None


def _facts(run: Path, recipe: Recipe) -> RunBetween:
    losses = _losses(run)
    result = RunResult.of(run) if (run / RESULT).is_file() else None
    epochs = None if result is None else result.epochs
    return RunBetween(
        run=run.name,
        data=_whole(recipe.data.mixture) or {recipe.data.directory: 1.0},
        later=[PhaseShares(step, _whole(mixture)) for step, mixture in recipe.data.later(recipe.train.steps)],
        epochs={**result.collections} if result and result.collections else {recipe.data.directory: epochs},
        steps=None if result is None else result.step,
        tokens=None if result is None else result.tokens,
        seconds=None if result is None else result.seconds,
        rate=recipe.optim.lr,
        adapters=recipe.lora.rank,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        held_out_loss=result.evaluation.loss if result and result.evaluation else None,
    )


def _whole(mixture: Mapping[str, float]) -> dict[str, float]:
    """The shares divided by their sum."""
    return {name: share / sum(mixture.values()) for name, share in mixture.items()}


def _losses(run: Path) -> list[float]:
    """The loss of every step that was logged."""
    rows = read_metrics(run) if (run / METRICS).is_file() else []
    return [row["loss"] for row in rows if "grad_norm" in row and math.isfinite(row["loss"])]


def corpus_beside(benchmark: Path) -> CorpusCounts | None:
    """Counts of what `fathom corpus` read, left out and kept, for the corpus that holds a benchmark's directory."""
    path = benchmark.resolve().parent / CORPUS_RUN
    if not path.is_file():
        return None
    stages = read_json(path).get("stages", {})
    return CorpusCounts.of({name: stage.get("counts", {}) for name, stage in stages.items()})

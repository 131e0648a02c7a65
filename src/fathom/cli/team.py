"""`--workers`, `--threads`, `--executor` and `executor.KEY=value` of a comparison or a ladder.

`experiments/scheduler.py` starts the workers, `corpus/remote.py` those on Slurm or Ray. `experiments/task_claims.py`
decides when a worker takes over a run.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from fathom.cli.parser import refuse
from fathom.corpus.recipe import Executor
from fathom.experiments.workers import Team
from fathom.settings import fill, overridden

PREFIX = "executor."


def recipe_words(overrides: Sequence[str]) -> list[str]:
    """The `key=value` overrides of the recipe, without those of the executor."""
    return [word for word in overrides if not word.startswith(PREFIX)]


def team_of(options: Namespace) -> Team:
    """Who trains."""
    words = [word.removeprefix(PREFIX) for word in options.overrides if word.startswith(PREFIX)]
    chosen = fill(Executor, overridden({}, [f"name={options.executor}", *words]))
    return Team(options.workers, options.threads, chosen)


def refuse_unless_slurm(options: Namespace) -> None:
    """Refuse `--workers`, `--threads` and `--executor` with `--dry-run`, which uses them only to print a script for
    Slurm."""
    if options.executor != "slurm":
        why = "has no meaning with --dry-run, which runs nothing; --executor slurm prints its script"
        refuse(options.given, ("--workers", "--threads", "--executor"), why)

"""The worker process that every executor starts, on this machine or another one."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from fathom.checkpoints.file_names import PLAN
from fathom.corpus.children import answering
from fathom.corpus.stage import StageOf, Task, WorkspaceOf, perform, stage_folder
from fathom.corpus.stages import STAGES
from fathom.errors import FathomError
from fathom.report.files import read_json
from fathom.report.results import restored


@lru_cache(maxsize=1)
def open_plan(directory: Path, stage: str, written: int) -> tuple[StageOf[Any], list[Task]]:
    """A stage and its tasks, read from the plan file that another process wrote at the time `written`."""
    content = read_json(stage_folder(directory, stage) / PLAN)
    kind = STAGES[stage]
    recipe = restored(kind.recipe_class, content["recipe"])
    return kind(WorkspaceOf(directory, recipe)), restored(list[Task], content["tasks"])


def carry_out(directory: Path, stage: str, number: int) -> None:
    """Run a task of a stage's plan in this process."""
    performer, tasks = open_plan(directory, stage, (stage_folder(directory, stage) / PLAN).stat().st_mtime_ns)
    perform(performer, tasks[number])


def rank(directory: str, stage: str, data: object, number: int, world_size: int) -> None:
    """Run one task of a stage's plan; this is the function that a scheduler calls."""
    carry_out(Path(directory), stage, number)


def serve() -> None:
    """Answer each line `[directory, stage, number]` on standard input with one line, until the input closes.

    A second thread reads, so that this process ends at once when the one that started it dies, however that happens.
    """
    answer = answering()
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin, requests), daemon=True).start()
    while True:
        directory, stage, number = json.loads(requests.get())
        try:
            carry_out(Path(directory), stage, number)
            answer({"done": number})
        except FathomError as error:
            answer({"error": str(error), "code": error.exit_code})
        except OSError as error:
            answer({"error": f"{error.filename or directory}: {error.strerror or error}", "code": 1})
        except Exception:
            answer({"bug": traceback.format_exc()})


def _listen(stream: IO[str], requests: queue.Queue[str]) -> None:
    for line in stream:
        requests.put(line)
    os._exit(0)

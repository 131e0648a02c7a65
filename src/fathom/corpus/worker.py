"""The worker process that every executor starts, here or on another machine."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from fathom.checkpoints.layout import PLAN
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.corpus.stage import Stage, Task, Workspace, perform, stage_folder
from fathom.corpus.stages import STAGES
from fathom.errors import FathomError
from fathom.report.files import read_json
from fathom.report.results import restored


def open_plan(directory: Path, plan: Path) -> tuple[Stage, list[Task]]:
    """A stage and its tasks, from the plan file of the process that planned them."""
    content = read_json(plan)
    stage = STAGES[plan.parent.name](Workspace(directory, parse_corpus_recipe(content["recipe"])))
    return stage, restored(list[Task], content["tasks"])


def carry_out(directory: str, stage: str, numbers: Iterable[int]) -> None:
    """Run tasks of a stage's plan in this process."""
    place = Path(directory)
    performer, tasks = open_plan(place, stage_folder(place, stage) / PLAN)
    for number in numbers:
        perform(performer, tasks[number])


def serve() -> None:
    """Answer each line `[directory, stage, number]` on standard input with one line, until the input closes.

    A second thread reads, so that this process ends at once when the one that started it dies, however that happens.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # any other output goes to standard error
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin, requests), daemon=True).start()
    while True:
        directory, stage, number = json.loads(requests.get())
        try:
            carry_out(directory, stage, [number])
            answer = {"done": number}
        except FathomError as error:
            answer = {"error": str(error), "code": error.exit_code}
        except OSError as error:
            answer = {"error": f"{error.filename or directory}: {error.strerror or error}", "code": 1}
        except Exception:
            answer = {"bug": traceback.format_exc()}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _listen(stream: IO[str], requests: queue.Queue[str]) -> None:
    for line in stream:
        requests.put(line)
    os._exit(0)

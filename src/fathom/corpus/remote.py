"""datatrove as the scheduler of a stage's tasks: local processes, Slurm job arrays, or Ray. A task is one rank."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fathom.corpus.recipe import Executor
from fathom.corpus.stage import Task
from fathom.corpus.worker import carry_out
from fathom.errors import DataError, to_install

POLL_SECONDS = 10.0
LAUNCHER = "launch_pickled_pipeline"
"""datatrove's program that carries out a task of a job."""


def rank(directory: str, stage: str, data: object, number: int, world_size: int) -> None:
    """The function that datatrove calls for each task, on any machine."""
    carry_out(Path(directory), stage, number)


def require_scheduler(name: str) -> None:
    """Refuse an executor whose scheduler is not installed here, before datatrove looks for it."""
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise DataError("executor.name=ray: ray is not installed: pip install ray")
    if name == "slurm":
        missing = [program for program in ("sbatch", "squeue") if shutil.which(program) is None]
        if missing:
            raise DataError(f"executor.name=slurm: no {missing[0]} here: run this where Slurm's programs are")


def _same_programs() -> str:
    """The shell line that puts this Python's programs on PATH, so that jobs find datatrove's program."""
    place = Path(sys.executable).parent
    if shutil.which(LAUNCHER, path=os.pathsep.join((str(place), os.environ.get("PATH", "")))) is None:
        raise DataError(f"executor.name=slurm: no {LAUNCHER} here: install datatrove anew, or set executor.environment")
    return f'export PATH={shlex.quote(str(place))}:"$PATH"'


def remote(wanted: Executor, place: Path, stage: str, tasks: Sequence[Task], tick: Callable[[], None]) -> None:
    """Run the tasks of a corpus' directory on processes of datatrove; failures are in its logs, next to the stages."""
    try:
        from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
    except ImportError as error:
        raise DataError(f"executor.name: {error}: {to_install('corpus')}") from None
    logs = place / "logs" / stage
    shared: dict[str, object] = {
        "pipeline": [partial(rank, str(place), stage)],
        "tasks": len(tasks),
        "workers": wanted.workers or 100,
        "logging_dir": str(logs),
        "skip_completed": False,  # finished tasks are recognised by their folders
    }
    try:
        if wanted.name == "datatrove":
            LocalPipelineExecutor(**shared).run()
        elif wanted.name == "ray":
            RayPipelineExecutor(**shared, mem_per_cpu_gb=wanted.memory_gb).run()
        else:
            setting = {"env_command": wanted.environment or _same_programs(), "job_name": f"fathom-{stage}"}
            size = {"mem_per_cpu_gb": wanted.memory_gb, "tasks_per_job": -(-len(tasks) // 1000)}
            job = SlurmPipelineExecutor(**shared, **setting, **size, time=wanted.time, partition=wanted.partition)
            job.run()
            while subprocess.run(["squeue", "-h", "-j", str(job.job_id)], capture_output=True).stdout.strip():
                time.sleep(POLL_SECONDS)
    except DataError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise DataError(
            f"{stage}: {said or type(error).__name__}; see {logs}; run the same command to resume", 1
        ) from error
    for _ in tasks:
        tick()

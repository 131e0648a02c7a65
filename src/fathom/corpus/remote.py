"""datatrove as the scheduler of tasks: local processes, Slurm job arrays, or Ray. A task is one rank.

The default, a pool of processes without datatrove, is `Pool` in `executor.py`.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fathom.corpus.recipe import Executor
from fathom.errors import DataError, to_install
from fathom.report.provenance import cores

POLL_SECONDS = 10.0
LAUNCHER = "launch_pickled_pipeline"
"""datatrove's program that carries out a task of a job."""

Work = Callable[[object, int, int], None]
"""What datatrove calls for each task, on any machine, with its data, the task's number and the number of tasks."""


def require_scheduler(name: str) -> None:
    """Refuse an executor whose scheduler is not installed here, before datatrove looks for it."""
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise DataError("executor.name=ray: ray is not installed: pip install ray")
    if name == "slurm":
        missing = [program for program in ("sbatch", "squeue") if shutil.which(program) is None]
        if missing:
            raise DataError(f"executor.name=slurm: no {missing[0]} here: run this on a machine with Slurm's programs")


def _same_programs() -> str:
    """The shell line that puts this Python's programs on PATH, so that jobs find datatrove's program."""
    place = Path(sys.executable).parent
    if shutil.which(LAUNCHER, path=os.pathsep.join((str(place), os.environ.get("PATH", "")))) is None:
        raise DataError(f"executor.name=slurm: no {LAUNCHER} here: reinstall datatrove, or set executor.environment")
    return f'export PATH={shlex.quote(str(place))}:"$PATH"'


def schedule(wanted: Executor, work: Work, count: int, logs: Path, name: str) -> None:
    """Run tasks on processes of datatrove, and return when all have ended, whether or not they succeeded.

    Args:
        wanted: The scheduler and its settings.
        work: What each task does; importable by name.
        count: Tasks.
        logs: datatrove's folder for logs, on a disk that all machines share.
        name: What errors and the job are called.
    """
    try:
        job = _job(wanted, work, count, logs, name)
        job.run()
        while wanted.name == "slurm" and _is_queued(job.job_id):
            time.sleep(POLL_SECONDS)
    except DataError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise DataError(
            f"{name}: {said or type(error).__name__}; see {logs}; run the same command to resume", 1
        ) from error


def slurm_script(wanted: Executor, work: Work, count: int, logs: Path, name: str) -> str:
    """The script that `schedule` would submit with sbatch; writes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        job = _job(wanted, work, count, Path(folder), name)
        text: str = job.get_launch_file_contents(
            job.get_sbatch_args(count), f"srun -l -n 1 {LAUNCHER} {folder}/executor.pik"
        )
    return text.replace(folder, str(logs))


def _is_queued(job: object) -> bool:
    return bool(subprocess.run(["squeue", "-h", "-j", str(job)], capture_output=True).stdout.strip())


def _job(wanted: Executor, work: Work, count: int, logs: Path, name: str) -> Any:
    """The datatrove executor that runs a number of tasks."""
    try:
        from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
    except ImportError as error:
        raise DataError(f"executor.name: {error}: {to_install('corpus')}") from None
    shared: dict[str, Any] = {
        "pipeline": [work],
        "tasks": count,
        "workers": wanted.workers or (cores() if wanted.name == "datatrove" else 100),
        "logging_dir": str(logs),
        "skip_completed": False,  # finished tasks are recognised by what they wrote
    }
    if wanted.name == "datatrove":
        return LocalPipelineExecutor(**shared)
    shared |= {"mem_per_cpu_gb": wanted.memory_gb, "gpus_per_task": wanted.gpus}
    if wanted.name == "ray":
        return RayPipelineExecutor(**shared)
    if shlex.quote(str(logs)) != str(logs):
        raise DataError(f"executor.name=slurm: {logs}: give a directory without blanks and quotes in its path")
    return SlurmPipelineExecutor(
        **shared,
        time=wanted.time,
        partition=wanted.partition,
        job_name=f"fathom-{name}",
        env_command=wanted.environment or _same_programs(),
        tasks_per_job=-(-count // 1000),
    )

"""The Slurm script of the page on nodes, on two nodes that are one machine: stopped, queued again, and finished."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fathom
from fathom.training import read_metrics, train
from tests import processes
from tests.tiny import tiny_recipe

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "nodes.md"
STEPS = 150

# Slurm's commands, as far as the script needs them. Like Slurm's, this srun tells every process of a step.
STUBS = {
    "scontrol": 'case "$1" in show) echo 127.0.0.1; echo elsewhere;; requeue) echo "$2" >> requeued;; esac',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "srun": """set -m
SLURM_NODEID=0 "$@" & a=$!
SLURM_NODEID=1 "$@" & b=$!
trap 'for agent in $a $b; do pkill -TERM -P $agent; kill -TERM $agent; done' TERM
for agent in $a $b; do
    wait $agent; code=$?
    while kill -0 $agent 2>/dev/null; do wait $agent; code=$?; done
    [ $code = 0 ] || worst=$code
done
exit ${worst:-0}""",
}


class Job:
    """A place in which the script is started as Slurm would."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, commands = folder, folder / "bin"
        commands.mkdir()
        for name, text in STUBS.items():
            (commands / name).write_text(f"#!/bin/bash\n{text}\n")
            (commands / name).chmod(0o755)
        (folder / "recipes").mkdir()
        keys = ("parallel.name=hsdp", f"train.steps={STEPS}", "train.checkpoint_every=20", "evaluate.every=0")
        self.recipe = tiny_recipe(corpus, *keys)
        (folder / "recipes" / "3b.yaml").write_text(self.recipe.to_yaml())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (script,) = re.findall(r"```bash\n(#!.*?)```", PAGE.read_text(), re.S)
        assert script.count(":29500") == 1
        (folder / "job.sh").write_text(script.replace(":29500", f":{port}"))
        self.environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(fathom.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "two", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"},
        }

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "job.sh"], cwd=self.folder, env=self.environment)

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


@pytest.mark.slow
def test_two_nodes_under_slurm(corpus: Path, tmp_path: Path) -> None:
    job, run_dir = Job(tmp_path, corpus), tmp_path / "runs" / "3b"
    first = job.start()
    try:
        while not (run_dir / "latest").exists():
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 0 and job.requeued
        assert not (run_dir / "result.json").exists()
        stopped = int((run_dir / "latest").read_text().removeprefix("step-"))
        assert len(processes.losses(run_dir)) == stopped < STEPS, "what was computed was saved"

        (tmp_path / "requeued").unlink()
        assert job.start().wait(300) == 0 and not job.requeued
    finally:
        first.kill()
    assert (run_dir / "result.json").exists()
    train(job.recipe.override("parallel.name=single"), tmp_path / "alone")
    assert processes.losses(run_dir) == pytest.approx(processes.losses(tmp_path / "alone"), rel=1e-4)
    assert any(line.get("val/loss") for line in read_metrics(run_dir))

    shutil.rmtree(run_dir)
    (tmp_path / "recipes" / "3b.yaml").write_text("train: {steps: none}\n")
    assert job.start().wait(120) != 0 and not job.requeued, "what fails does not come again"

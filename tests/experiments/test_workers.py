"""Workers that a scheduler starts: a script for Slurm, and a ladder on two nodes of Ray of which one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fathom.cli.main import main
from fathom.corpus import remote
from fathom.corpus.recipe import Executor
from fathom.errors import TrainingError
from fathom.experiments.ladder import climb
from fathom.experiments.rungs import Ladder, find_ladder, load_ladder
from fathom.experiments.scheduler import carry_through
from fathom.experiments.workers import Team
from fathom.recipe import Recipe

RULES = [
    *("data.directory=puzzle:a5?elements=2", "data.sequence_length=3", "train.tokens_per_step=192"),
    *("train.micro_batch=64", "train.checkpoint_every=5", "train.log_every=5", "evaluate.every=0"),
    *("evaluate.tokens=600", "ladder.layers=[1, 1]", "ladder.hidden=[32, 64]", "ladder.seeds=[2, 2]"),
    *("ladder.seed_control=[]", "ladder.tune_points=[]", "ladder.tokens=12000"),
]
OF_THE_RUN = {"date", "command", "commit", "hardware", "versions"}


def ladder() -> Ladder:
    return load_ladder(find_ladder(Path("toys")), "vanilla,denseformer", RULES)


def bare(out: Path) -> dict[str, Any]:
    """The report without what it says of the moment it was written."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["prediction"] is None, "two sizes are too few for one"
    return {key: value for key, value in report.items() if key not in OF_THE_RUN}


def never(out: Path) -> bool:
    """The work of nobody."""
    raise AssertionError


def test_what_workers_leave_undone_is_said(tmp_path: Path, monkeypatch) -> None:
    """A scheduler whose jobs ended is no success; and nothing is sent where nothing is left."""
    sent: list[int] = []
    monkeypatch.setattr("fathom.experiments.scheduler.require_scheduler", lambda name: None)
    monkeypatch.setattr("fathom.experiments.scheduler.schedule", lambda wanted, work, count, *_: sent.append(count))
    team = Team(3, executor=Executor(name="ray"))
    with pytest.raises(TrainingError, match=r"2 tasks are not done; see .*logs; the same command resumes"):
        carry_through(never, tmp_path, team, lambda: 2)
    carry_through(never, tmp_path, team, lambda: 0)
    assert sent == [3]


def test_the_command_knows_its_scheduler(tmp_path: Path, small: Recipe, monkeypatch, capsys) -> None:
    (tmp_path / "small.yaml").write_text(small.to_yaml())
    words = ["compare", str(tmp_path / "small.yaml"), "--arms", "vanilla,loop", "--out", str(tmp_path / "out")]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*words, "--executor", "slurm"]) != 0
    assert "no sbatch here" in capsys.readouterr().err
    assert main([*words, "--executor", "ray", "executor.gpus=-1"]) == 2
    assert "executor.gpus=-1: allowed: 0 or more" in capsys.readouterr().err


def test_the_script_for_slurm(tmp_path: Path, small: Recipe, capsys) -> None:
    """Printed by --dry-run, without a trace on the disk, and to shellcheck's liking where there is one."""
    pytest.importorskip("datatrove")
    (tmp_path / "small.yaml").write_text(small.to_yaml())
    out = tmp_path / "out"
    words = ["compare", str(tmp_path / "small.yaml"), "--arms", "vanilla,loop", "--out", str(out), "--dry-run"]
    chosen = ["--executor", "slurm", "--workers", "4", "executor.partition=gpu", "executor.gpus=1"]
    assert main([*words, *chosen, "executor.environment=source /venv/bin/activate"]) == 0
    text = capsys.readouterr().out
    script = text[text.index("#!/bin/bash") :]
    for line in ("array=0-3%4", "partition=gpu", "gpus=1", "mem-per-cpu=2G", "time=24:00:00", "job-name=fathom-out"):
        assert f"#SBATCH --{line}\n" in script
    assert f"{remote.LAUNCHER} {out}/logs/executor.pik" in script and "source /venv/bin/activate" in script
    assert not out.exists()
    place = Path(sys.executable).with_name("shellcheck")
    if place.exists():
        checked = subprocess.run([place, "--exclude=SC1091", "-"], input=script, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_a_ladder_on_ray_of_which_a_node_dies(tmp_path: Path) -> None:
    """Two nodes; the second one is killed while it trains. The report is that of a ladder climbed here."""
    pytest.importorskip("datatrove")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    climb(ladder(), tmp_path / "here" / "out", quiet=True)
    source = os.pathsep.join(path for path in sys.path if path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": source}})
    killed = threading.Event()

    def kill() -> None:
        """Once two runs are being trained, so that each node has one."""
        while len(list((tmp_path / "ray").rglob("metrics.jsonl"))) < 2:
            time.sleep(0.1)
        cluster.remove_node(second, allow_graceful=False)
        killed.set()

    try:
        threading.Thread(target=kill, daemon=True).start()
        climb(ladder(), tmp_path / "ray" / "out", Team(2, executor=Executor(name="ray", memory_gb=1)), quiet=True)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed.is_set()
    assert bare(tmp_path / "ray" / "out") == bare(tmp_path / "here" / "out")

"""The kit goes on where it stopped, whatever stopped it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
spec = importlib.util.spec_from_file_location("kit", SCRIPT)
assert spec is not None and spec.loader is not None
kit = importlib.util.module_from_spec(spec)
sys.modules["kit"] = kit
spec.loader.exec_module(kit)
CELLS = [kit.Cell("train", "a"), kit.Cell("train", "b"), kit.Cell("decode", "c")]


def head() -> dict:
    return {"commit": "abc"}


def names(folder: Path) -> dict[str, list[str]]:
    return {
        file.stem: [row["cell"] for row in kit.Log(folder, file.stem).rows() if "cell" in row]
        for file in folder.iterdir()
    }


def test_a_second_call_makes_what_is_left(tmp_path):
    made = []

    def run(cell, seconds):
        made.append(cell.name)
        if len(made) == 2:
            raise KeyboardInterrupt
        return {"seconds": 1.0}

    with pytest.raises(KeyboardInterrupt):
        kit.work(CELLS, tmp_path, 60, run, head)
    assert kit.work(CELLS, tmp_path, 60, run, head) == 0
    assert made == ["a", "b", "b", "c"]
    assert names(tmp_path) == {"train": ["a", "b"], "decode": ["c"]}
    assert kit.Log(tmp_path, "train").rows()[0] == head()
    assert kit.work(CELLS, tmp_path, 60, run, head) == 0 and len(made) == 4


def test_a_line_that_was_cut_off_is_made_again(tmp_path):
    log = kit.Log(tmp_path, "train")
    log.add(head())
    log.path.write_text(log.path.read_text() + '{"cell": "a", "sec', encoding="utf-8")
    kit.work(CELLS[:1], tmp_path, 60, lambda cell, seconds: {"seconds": 1.0}, head)
    assert log.done() == {"a"} and len(log.rows()) == 2


def test_a_cell_that_had_all_the_time_is_not_tried_for_ever(tmp_path):
    assert kit.work(CELLS, tmp_path, 60, lambda cell, seconds: None if cell.name == "a" else {}, head) == 0
    assert "not done after" in kit.Log(tmp_path, "train").rows()[1]["failed"]


def test_one_that_ran_out_of_time_comes_first_next_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kit.time, "monotonic", lambda: now[0])

    def slow(cell, seconds):
        now[0] += 40.0
        return {} if seconds >= 40 else None

    assert kit.work(CELLS, tmp_path, 65, slow, head) == 2
    now[0] = 0.0
    assert kit.work(CELLS, tmp_path, 65, slow, head) == 1
    assert names(tmp_path) == {"train": ["a", "b"]}


def test_where_results_come_from_is_a_line(tmp_path):
    kit.work(CELLS[:1], tmp_path, 60, lambda cell, seconds: {"seconds": 1.0}, kit.head)
    first, _ = kit.Log(tmp_path, "train").rows()
    assert first["hardware"]["cpu"] and first["versions"]["torch"]


def test_no_time_begins_nothing(tmp_path):
    assert kit.work(CELLS, tmp_path, 0, lambda cell, seconds: pytest.fail("began"), head) == 3


def gone(process: int) -> bool:
    """Whether it has ended, though its parent may not have asked."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_a_cell_that_is_stopped_leaves_no_process(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/child; wait\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(kit.sys, "executable", str(script))
    assert kit.in_a_process(False, tmp_path)(CELLS[0], 0.5) is None
    child = int((tmp_path / "child").read_text())
    assert any(gone(child) or time.sleep(0.1) for _ in range(100)), "a kill takes a moment to arrive"


def test_plans_grow_and_every_mechanism_is_in_the_longest():
    found = kit.cells()
    assert len({(cell.step, cell.name) for cell in found}) == len(found)
    assert [cell.plan for cell in found] == sorted(cell.plan for cell in found)
    trained = {cell.name.split()[1] for cell in found if cell.step == "train"}
    from fathom.models.registry import DEFAULTS, MECHANISMS

    assert trained == (set(MECHANISMS) - set(DEFAULTS.values())) | {"hf", "vanilla"}


def test_the_bandwidth_of_every_kernel_of_ours_is_a_cell():
    files = (ROOT / "src" / "fathom" / "kernels").glob("*.py")
    ours = {file.stem for file in files if f'custom_op("fathom::{file.stem}"' in file.read_text(encoding="utf-8")}
    assert ours and {cell.name.split()[0] for cell in kit.cells() if cell.step == "bandwidth"} == ours


@pytest.mark.slow
def test_the_kit_itself_on_a_cpu(tmp_path):
    """One cell of each kind at sizes that say nothing; conformance is skipped where there is no GPU."""
    for step, cell in (
        ("conformance", "vanilla_is_qwen3"),
        ("bandwidth", "depth_mix 2"),
        ("bandwidth", "norm_rotate_mix 2"),
        ("bandwidth", "depth_pool 2"),
        ("train", "tiny hf eager"),
        ("train", "tiny depth_attention eager"),
        ("decode", "tiny vanilla eager 1"),
        ("decode", "tiny vanilla continuous 2"),
    ):
        words = [sys.executable, str(SCRIPT), "--tiny", "--out", str(tmp_path), "--cell", step, cell]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.strip().splitlines()[-1])
        assert found and "failed" not in found

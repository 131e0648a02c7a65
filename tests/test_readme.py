"""The README's Python runs as a script, as it is printed, on files of this repository; its numbers are in the logs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fathom.report.statistics import holm
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def script() -> str:
    """Every Python block, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", README, re.S))


@pytest.mark.slow
def test_the_python_lines_run_as_printed(tmp_path: Path) -> None:
    """With a small Llama in a directory of the name that stands there, which takes precedence over the Hub."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=len(tokenizer), tie_word_embeddings=True, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path / NAME)
    tokenizer.save_pretrained(tmp_path / NAME)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "lines.py").write_text(script())
    done = subprocess.run([sys.executable, "lines.py"], cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    *texts, more, perplexity = done.stdout.splitlines()
    assert len(texts) % 2 == 0 and texts[: len(texts) // 2] == texts[len(texts) // 2 :], "deeper, it says the same"
    assert more == "0 parameters more" and 1 < int(perplexity.removeprefix("perplexity ")) < 1024
    assert (tmp_path / "docs-model" / "config.json").is_file()


def read(name: str) -> dict:
    return json.loads((LOGS / name).read_text(encoding="utf-8"))


def row(text: str, beginning: str) -> list[str]:
    """The cells of a table's row."""
    (line,) = re.findall(rf"^\| {re.escape(beginning)}.*\|$", text, re.M)
    return [cell.strip() for cell in line.strip("|").split("|")]


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def evening() -> dict[str, dict]:
    return {arm["name"]: arm for arm in read("ladder-evening.json")["arms"]}


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("Depth-Attention minus", "depth_attention"),
        ("uniform depth minus", "uniform_depth"),
        ("attention residuals minus", "attention_residuals"),
        ("loop minus", "loop"),
    ],
)
def test_text(name: str, arm: str) -> None:
    rung = evening()[arm]["rungs"][0]
    gap = rung["difference"]
    cells = row(README, name)
    assert cells[1] == f"{read('ladder-evening.json')['rungs'][0]['parameters'] / 1e6:.2f} M parameters, 5 seeds"
    assert cells[2] == f"{signed(gap['mean'])} ± {gap['half_width']:.3f} nats" and len(rung["seeds"]) == 5
    note = row((ROOT / "docs/results/2026-11-24-depth-on-text.md").read_text(encoding="utf-8"), arm)
    assert note[1] == f"{signed(gap['mean'])} ± {gap['half_width']:.3f}"
    (prediction,) = (one for one in read("ladder-evening.json")["prediction"]["rows"] if one["arm"] == arm)
    ends = [signed(prediction["difference"][end]) for end in ("low", "high")]
    assert note[2:4] == [signed(prediction["observed"]), " to ".join(ends)] and prediction["inside"]


def test_what_is_significant() -> None:
    """At the first size, after Holm's correction: the loop, which is worse, and nothing else."""
    arms = [arm for name, arm in evening().items() if name in ("depth_attention", "uniform_depth", "loop")]
    arms += [evening()["attention_residuals"]]
    adjusted = holm([arm["rungs"][0]["difference"]["p"] for arm in arms])
    assert [arm["name"] for arm, p in zip(arms, adjusted, strict=True) if p < 0.05] == ["loop"]
    assert "The loop is significantly worse" in README and "no mechanism is\nsignificantly better" in README


def test_puzzles() -> None:
    solved = {
        one["arm"]: sum(accuracy >= 0.9 for accuracy in one["domains"]["hops-2"]["accuracy"])
        for one in read("ladder-hops.json")["puzzle"]["rows"]
    }
    (both,) = (name for name in solved if "loop" in name and "depth" in name)
    assert row(README, "two-hop puzzles")[2] == f"{solved[both]} of 5 and {solved['vanilla']} of 5"


def test_the_expert() -> None:
    (found,) = (one for one in read("specialise.json")["questions"] if (one["way"], one["part"]) == ("text", "clean"))
    base, new = (100 * right / found["asked"] for right in found["right"])
    low, high = (100 * end for end in found["intervals"][1])
    cells = row(README, "expert minus base")
    assert cells[1:3] == [
        f"1 M parameters, {found['asked']} questions",
        f"{base:.0f} % to {new:.0f} % ({low:.0f} to {high:.0f} %)",
    ]


def test_the_time_of_a_step() -> None:
    lines = [json.loads(line) for line in (LOGS / "train-cpu-eager.jsonl").read_text().splitlines() if line]
    first = next(one for one in lines if one.get("a") == "depth_attention" and one["shape"] == "tiny")
    low, high = first["quartiles"]
    assert row(README, "time of a training step")[2] == f"{first['ratio']:.3f} (quartiles {low:.3f} to {high:.3f})"

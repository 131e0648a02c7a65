"""The README's Python runs as a script, as it is printed, on files of this repository; its numbers are in the logs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fathom.report.statistics import holm
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "benchmarks" / "results"
DEPTH = (ROOT / "docs/results/2026-11-28-does-depth-help.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 160
"""Lines of the front page: what is added displaces something else."""
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def script() -> str:
    """Every Python block, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", README, re.S))


def test_the_front_page_is_short_and_names_the_first_commands() -> None:
    """An environment of one's own, which Debian's Python needs, and the commands that try everything."""
    install, _, rest = README.partition("## Sixty seconds")
    assert len(README.splitlines()) <= LONGEST
    assert "python3 -m venv .venv" in install and install.index("-m venv") < install.index("pip install")
    assert all(f"\nmake {target} " in rest for target in ("test", "demo"))


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


def section(title: str) -> str:
    """A section of the note on depth."""
    return DEPTH.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def evening() -> dict[str, dict]:
    return {arm["name"]: arm for arm in read("ladder-evening.json")["arms"]}


@pytest.mark.parametrize("arm", ["depth_attention", "uniform_depth", "attention_residuals", "loop"])
def test_text(arm: str) -> None:
    rung = evening()[arm]["rungs"][0]
    gap = rung["difference"]
    note = row(section("Four sizes and a sealed prediction").partition("cpu.yaml")[0], arm)
    assert note[1] == f"{signed(gap['mean'])} ± {gap['half_width']:.3f}" and len(rung["seeds"]) == 5
    (prediction,) = (one for one in read("ladder-evening.json")["prediction"]["rows"] if one["arm"] == arm)
    ends = [signed(prediction["difference"][end]) for end in ("low", "high")]
    assert note[4:6] == [signed(prediction["observed"]), " to ".join(ends)] and prediction["inside"]


def test_what_is_significant() -> None:
    """At the first size, after Holm's correction: the loop, which is worse, and nothing else."""
    arms = [arm for name, arm in evening().items() if name in ("depth_attention", "uniform_depth", "loop")]
    arms += [evening()["attention_residuals"]]
    adjusted = holm([arm["rungs"][0]["difference"]["p"] for arm in arms])
    assert [arm["name"] for arm, p in zip(arms, adjusted, strict=True) if p < 0.05] == ["loop"]
    assert (
        "`loop`, is significantly worse on text" in README
        and "No mechanism except `uniform_depth` is significantly better" in README
    )


def test_the_one_gain() -> None:
    """Of the four mechanisms of the newer comparison, after Holm's correction."""
    arms = [arm for arm in read("ladder-neighbours.json")["arms"][1:] if not arm["matched"]]
    gaps = [arm["rungs"][0]["difference"] for arm in arms]
    sure = [arm["name"] for arm, p in zip(arms, holm([gap["p"] for gap in gaps]), strict=True) if p < 0.05]
    assert sure == ["uniform_depth"]
    gap = gaps[[arm["name"] for arm in arms].index("uniform_depth")]
    (small, large, *_) = (
        rung["difference"]
        for arm in read("ladder-text.json")["arms"]
        if arm["name"] == "uniform_depth"
        for rung in arm["rungs"]
    )
    said = [f"{signed(one['mean'])} ± {one['half_width']:.3f}" for one in (gap, small, large)]
    assert row(README, "loss of an equal mean")[2] == f"{said[0]}, {said[1]} and {said[2]} nats"
    assert small["high"] < 0 < large["high"] and evening()["uniform_depth"]["rungs"][-1]["difference"]["mean"] > 0
    note = section("Five ways to read earlier layers")
    for arm, gap in zip(arms, gaps, strict=True):
        assert row(note, arm["name"])[3].strip("*") == f"{signed(gap['mean'])} ± {gap['half_width']:.3f}"


def test_puzzles() -> None:
    solved = {
        one["arm"]: sum(accuracy >= 0.9 for accuracy in one["domains"]["hops-2"]["accuracy"])
        for one in read("ladder-hops.json")["puzzle"]["rows"]
    }
    (both,) = (name for name in solved if "loop" in name and "depth" in name)
    note = section("Two-hop lookup")
    assert row(note, "loop with depth_attention")[2] == f"{solved[both]} of 5"
    assert row(note, "vanilla |")[2] == f"{solved['vanilla']} of 5"


def test_logits() -> None:
    assert read("smollm2.json")["logits equal to the last bit"] is True
    assert row(README, "logits of one checkpoint")[2] == "equal to the last bit"


def test_the_span() -> None:
    (span,) = (one for one in read("deepen-spans.json")["spans"] if one["layers"] == "9-10" and one["again"])
    found = span["again"]
    low, high = signed(found["low"]), signed(found["high"])
    assert row(README, "loss of looping layers 9 and 10")[1:3] == [
        f"SmolLM2-135M, {found['pairs']} articles",
        f"{signed(found['mean'])} ({low} to {high}) nats",
    ]


def test_the_deepened_model() -> None:
    """Each of the three is worse than the control on both texts, and the note has every number of the log."""
    note = (ROOT / "docs/results/2026-11-28-deepened.md").read_text(encoding="utf-8")
    names = {
        "depth_attention": "Depth-Attention |",
        "loop": "loop 9-10 |",
        "loop+depth_attention": "loop 9-10 and Depth",
    }
    logged = [one for one in read("deepen-smollm2.json")["effects, seed 0"] if one["model"] in names]
    for one in logged:
        said = [f"{effect['on']} {effect['against']} {effect['verdict']}" for effect in one["effects"]]
        assert said == ["domain control worse", "other control worse", "domain base better", "other base better"]
        cells = [f"{signed(g['value'], 4)} ({signed(g['low'], 4)} to {signed(g['high'], 4)})" for g in gaps(one)]
        first, second = (row(part, names[one["model"]]) for part in note.split("| minus the base"))
        assert first[1:3] + second[1:3] == cells
    assert len(logged) == 3
    (loop,) = (one for one in logged if one["model"] == "loop")
    gap = gaps(loop)[0]
    assert row(README, "loop over layers 9 and 10")[1:3] == [
        f"SmolLM2-135M, {gap['pairs']} documents",
        f"{signed(gap['value'], 4)} ({signed(gap['low'], 4)} to {signed(gap['high'], 4)}) bits per byte",
    ]


def gaps(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A model's differences: from the control on both texts, then from the base."""
    return [effect["gap"] for effect in one["effects"]]


def test_the_real_expert() -> None:
    text = read("expert.json")["reports"]["control"]["texts"]["domain"]
    gap = text["difference"]
    assert row(README, "expert on Python's proposals")[1:3] == [
        f"SmolLM2-135M, {text['documents']} documents",
        f"{signed(gap['value'])} ({signed(gap['low'])} to {signed(gap['high'])}) bits per byte",
    ]


def test_the_expert_in_miniature() -> None:
    cells = read("specialise-spread.json")["cells"]
    base, expert = ([100 * cell["right"][i] / cell["asked"] for cell in cells] for i in range(2))
    assert row(README, "correct answers on an invented domain")[1:3] == [
        f"1 M parameters, {len({cell['seed'] for cell in cells})} seeds",
        f"{min(base):.1f} to {max(base):.1f} % and {min(expert):.1f} to {max(expert):.1f} %",
    ]


def test_the_time_of_a_step() -> None:
    """Every measurement at this shape, the highest too."""
    note = (ROOT / "docs/results/2026-11-23-speed.md").read_text(encoding="utf-8")
    eager, tokens = re.findall(r"^\| depth_attention / vanilla \|(.*)\|$", note, re.M)[:2]
    epyc = re.findall(r"four ratios are ([\d., ]+) and", note)[0].split(", ")[1]
    found = sorted([eager.split()[0], tokens.split("|")[1].split()[0], epyc])
    assert row(README, "time of a training step")[2] == f"{found[0]}, {found[1]} and {found[2]}"


def test_eight_bits() -> None:
    _, middle, _ = read("int8.json")["decode, 1 rows"]["int8 / float32"]
    assert row(README, "time of a decoded token")[2].startswith(f"{middle:.2f} on an AMD EPYC, 0.70 on an Intel Xeon")


def test_losses_of_caches_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "results" / "2026-11-30-caches-bytes.md").read_text(encoding="utf-8")
    cell = row(README, "loss at a quarter of the full cache's bytes")[2]
    table = ([one.strip() for one in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|"))
    losses = {(name, share): loss for name, _, _, share, _, _, loss, _ in table}
    found = [losses[name, "0.251"].replace("±", "± ") for name in ("drop", "sinks", "sinks+int4")]
    assert cell == f"{', '.join(found)} nats"

"""The testbed runs from text to table; its statistics are right on cases done by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "lineage"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("zoo", "members", "figures", "trained", "edited", "baselines", "checkpoints"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def micro(directory: Path) -> list[str]:
    """The arguments for a zoo of the smallest models, trained on some text."""
    draw = np.random.default_rng(0)
    words = np.array(["read", "write", "self", "value", "return", "import", "for", "in", "if", "not", "of", "None"])
    for number in range(4):
        paragraphs = ["\n".join(" ".join(draw.choice(words, 8)) for _ in range(3)) for _ in range(120)]
        (directory / f"{number}.txt").write_text("\n\n".join(paragraphs))
    where = ["--text", str(directory), "--other-text", str(directory)]
    return ["--size", "micro", "--directory", str(directory / "zoo"), *where]


@pytest.mark.slow
def test_two_models_and_what_was_made_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import zoo

    words = micro(tmp_path)
    only = ["a", "b", "c", "a-int8", "a-depth-half", "a-rotate"]
    out, picture = tmp_path / "out.json", tmp_path / "qq.png"
    assert zoo.main([*words, "--only", *only, "--out", str(out), "--picture", str(picture)]) == 0
    body = json.loads(out.read_text())
    assert body["models"] == 6 and body["derived"] == 3 and body["unrelated"] == 3 + 3 * 2
    assert not body["missed"] and not body["falsely_shared"]
    rows = {(row["a"], row["b"]): row for row in body["rows"]}
    turned = rows["a", "a-rotate"]["scores"]
    assert turned["procrustes"] == pytest.approx(1, abs=1e-3) and turned["awm"] < 0.5
    assert rows["a", "a-int8"]["scores"]["awm"] > 0.99
    assert rows["a", "a-int8"]["controls"] == ["b", "c"]
    assert picture.stat().st_size > 10_000
    assert "AWM repaired" in capsys.readouterr().out
    made = (tmp_path / "zoo/models/a/model.safetensors").stat().st_mtime_ns
    assert zoo.main([*words, "--only", "a", "b", "c", "--json"]) == 0  # what exists is not made again
    assert (tmp_path / "zoo/models/a/model.safetensors").stat().st_mtime_ns == made
    assert json.loads(capsys.readouterr().out)["unrelated"] == 3


@pytest.mark.slow
def test_strangers_treated_alike_are_strangers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied models that store their head, and models padded with zeros: pairs in which only the treatment is shared."""
    import zoo

    words = micro(tmp_path)
    only = ["a", "b", "c", "tied", "tied-2", "tied-stored", "tied-2-stored", "a-padded", "b-padded"]
    assert zoo.main([*words, "--only", *only, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["uninterrupted"] and not body["missed"] and not body["falsely_shared"]
    alike = {row["kind"]: row for row in body["rows"] if row["kind"].startswith("both ")}
    assert set(alike) == {"both tied, head stored", "both zero-padded"}
    assert {row["claim"] for row in alike.values()} == {"unrelated"}
    assert "T2 embedding and output head" not in alike["both tied, head stored"]["tests"]
    assert {row["b"] for row in body["rows"] if row["claim"] == "derived"} == set(only[5:])
    assert zoo.main([*words, "--only", "a", "b", "c", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["uninterrupted"]  # they were there


@pytest.mark.slow
def test_every_member_can_be_made(tmp_path: Path) -> None:
    import members
    import zoo

    words = micro(tmp_path)
    assert zoo.main([*words, "--build-only"]) == 0
    assert {p.name for p in (tmp_path / "zoo/models").iterdir()} == {
        m.name for m in members.members(members.SIZES["micro"])
    }


def test_separation_and_its_interval_on_a_case_done_by_hand() -> None:
    import figures

    scores, related = np.array([0.9, 0.4, 0.5, 0.1]), np.array([True, True, False, False])
    roots = [("a",), ("b",), ("a", "b"), ("a", "c")]
    ones = np.ones(4)
    assert figures.auc(scores, related, ones) == 0.75
    assert figures.found_at_none(scores, related, ones) == 0.5
    sample = figures.Sample(scores, related, roots)
    assert sample.weights({"a": 2, "b": 1}).tolist() == [2, 1, 2, 0]  # a pair counts as often as both its bases
    middle, low, high = figures.bootstrapped(sample, figures.auc)
    assert low <= middle <= high


def test_p_values_that_are_too_small_are_noticed() -> None:
    import figures

    uniform = np.random.default_rng(0).random(200)
    assert figures.too_small(uniform.tolist())[1] > 0.05
    assert figures.too_small((uniform**2).tolist())[1] < 1e-6
    assert figures.too_small([1.0] * 50)[1] == 1  # conservative is not a fault
    assert figures.excess(np.array([0.1, 0.6]), np.ones(2)) == pytest.approx(0.4)
    kept = figures.disjoint([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    assert len(kept) == 2

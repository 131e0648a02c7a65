"""The court counts what it hears: accusations, abstentions, bounds by root; a tool is entered in a few lines."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import stats

from tests.lineage.zoo import build, save, tiny_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "lineage"
FOUND, NOT_FOUND, ABSTAINS = "found", "not found", "abstains"
RELATED, SEED, STRANGER = "related", "same seed", "stranger"


@pytest.fixture
def court(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in (
        "court",
        "court_real",
        "bystanders",
        "named",
        "members",
        "strangers",
        "neutral",
        "figures",
        "edited",
        "checkpoints",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("court")


def row(truth, said, score=0.0, roots=("a", "b"), lineage=None):
    lineage = said == FOUND if lineage is None else lineage
    what = {"tool": "t", "key": "", "kind": truth, "truth": truth, "roots": roots, "seconds": 1.0}
    return {**what, "said": said, "score": score, "lineage": lineage}


def test_the_summary_counts_what_was_said(court):
    rows = [row(RELATED, FOUND, 3.0), row(RELATED, ABSTAINS, 1.0), row(RELATED, NOT_FOUND, 0.5)]
    rows += [row(STRANGER, NOT_FOUND, 0.7, (f"s{i}", f"s{i + 1}")) for i in range(9)]
    rows += [row(STRANGER, FOUND, 2.0), row(SEED, FOUND, lineage=False), row(SEED, FOUND)]
    found = court.summary(rows)["t"]
    assert (found["found"], found["related"], found["falsely accused"], found["strangers"]) == (1, 3, 1, 10)
    assert (found["same seed called a lineage"], found["same seed"], found["abstained"]) == (1, 2, 1)
    assert found["found with no false alarm"] == pytest.approx(1 / 3)
    assert (found["found, as a lineage"], found["same seed called related"]) == (1, 2)
    explained = court.by_explanation(rows)
    assert explained == {STRANGER: {"t": "1 of 10"}, SEED: {"t": "2 of 2"}}
    assert "1 of 3" in court.table({"t": found}) and "1 of 10" in court.table({"t": found})


def test_tools_are_compared_on_the_cases_that_all_have_answered(court):
    rows = [{"tool": tool, "key": key, "said": said} for tool, key, said in ("axo", "ayo", "bxo", "axn")]
    assert [(r["tool"], r["key"], r["said"]) for r in court.by_all(rows)] == [("a", "x", "n"), ("b", "x", "o")]


def test_bounds_count_roots_and_not_pairs(court):
    """Twenty roots make ten disjoint pairs: a hundred pairs of them bound no better than ten."""
    assert court.bound(0, 100, 20) == pytest.approx(1 - 0.05 ** (1 / 10))
    assert court.bound(0, 100, 1000) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert court.bound(50, 100, 20) == pytest.approx(stats.beta.ppf(0.95, 6, 5)) and court.bound(10, 10, 40) == 1.0


def test_a_share_takes_some_of_every_kind(court):
    cases = [court.Case(kind, RELATED, Path("a"), Path(f"b{i}"), ("a", "a")) for kind in "xy" for i in range(8)]
    cases.append(court.Case("z", STRANGER, Path("a"), Path("c"), ("a", "c")))
    assert len(court.shared_out(cases, 0.25)) == 5 and court.shared_out(cases, 1.0) == cases


@pytest.mark.slow
def test_a_tool_that_fails_abstains_and_published_tools_say_what_they_say(court, tmp_path, monkeypatch):
    paths = [save(build(tiny_config("llama"), seed, torch.float32), tmp_path / str(seed), 512) for seed in (0, 1)]
    same = court.Case("copy", RELATED, paths[0], paths[0], ("0", "0"))
    apart = court.Case("strangers", STRANGER, *paths, ("0", "1"))
    for name in ("Fathom", "AWM, as published", "HuRef ICS, as published", "parameter cosine", "embedding cosine"):
        answers = [court.answered(name, case) for case in (same, apart)]
        assert answers[0].said == FOUND and answers[0].score > answers[1].score, name
        assert np.isfinite(answers[1].score) and answers[1].seconds >= 0
    assert court.answered("Fathom", apart).said == NOT_FOUND
    controls = tuple(
        save(build(tiny_config("llama"), seed, torch.float32), tmp_path / str(seed), 512) for seed in (2, 3)
    )
    asked = [court.replace(case, controls=controls) for case in (same, apart)]
    assert [court.answered("AWM, calibrated", case).said for case in asked] == [FOUND, NOT_FOUND]
    assert court.answered("AWM, calibrated", same).said == ABSTAINS, "without controls there is no threshold"
    monkeypatch.setattr(court, "TOOLS", dict(court.TOOLS))

    @court.tool("broken")
    def broken(case):
        raise ValueError("cannot read it")

    answer = court.answered("broken", same)
    assert answer.said == ABSTAINS and "cannot read it" in answer.words and json.dumps(vars(answer))

"""Stored results: used again under the same conditions, and a damaged one costs one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fathom.errors import SettingsError
from fathom.evaluation import scoring
from fathom.evaluation.perplexity import Domain, DomainScore, Passage
from fathom.evaluation.scoring import Checkpoint, EvaluationSettings, kept

MADE = DomainScore([2.0, float("inf")], [1, 1], [3, 3])


def ask(out: Path, key: int = 1) -> DomainScore:
    """A score of `sea` under a condition."""
    checkpoint = Checkpoint("model", out, opener=lambda path: pytest.fail(f"{path} is opened"))
    return kept(DomainScore, checkpoint, out, "perplexity", "sea", {"key": key}, lambda: MADE)


def test_a_stored_score_is_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(tmp_path) is MADE
    again = ask(tmp_path)
    assert again.nats[0] == 2.0 and again.nats[1] != again.nats[1], "null stands for what is not finite"
    assert "sea: done before" in capsys.readouterr().err
    assert ask(tmp_path, key=2) is MADE


def test_other_clusters_are_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that now say which of them belong together are scored again, though their texts are the same."""

    def score(model: None, tokenizer: None, domain: Domain, *settings: object) -> DomainScore:
        return DomainScore([1.0], [1], [1], clusters=[document.cluster for document in domain.documents])

    monkeypatch.setattr(scoring, "score_domain", score)
    checkpoint = Checkpoint("model", tmp_path, lambda path: (None, None))  # type: ignore[arg-type, return-value]
    for cluster in (None, "a", "b"):
        domain = Domain("sea", [Passage("x", None, 1, cluster)])
        scoring._score_text(checkpoint, domain, 8, EvaluationSettings(out=tmp_path / "out"))
        assert checkpoint.domains["sea"].clusters == [cluster]


@pytest.mark.parametrize("change", [{"value": None}, {"value": {"nats": "x"}}, {"key": 1, "value": []}])
def test_a_damaged_score_costs_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    ask(tmp_path)
    path = tmp_path / "model" / ".done" / "perplexity-sea.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    if "key" in change:  # other conditions: what it holds does not matter
        assert ask(tmp_path) is MADE
        return
    with pytest.raises(SettingsError, match=r"perplexity-sea\.json is damaged .*; delete it to compute it again"):
        ask(tmp_path)

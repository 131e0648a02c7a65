"""Runs of lm-eval that were made elsewhere, paired by question from their logged samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fathom.cli.main import main
from fathom.errors import DataError, SettingsError
from fathom.evaluation.samples import compare_samples

DATE = "2026-11-30T02-35-26.123456"


def logged(
    folder: Path, values, task="arc", metric="acc", date=DATE, results=None, prompts=None, of=None, **fields
) -> Path:
    """A run as lm-eval writes it: one task, a question for each value; None is a question that was not asked."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "doc_id": n,
            "doc": {"question": f"q{n}", **{key: some[n] for key, some in fields.items()}},
            "filter": "none",
            "metrics": [metric],
            "doc_hash": f"hash{n}",
            "prompt_hash": prompts[n] if prompts else "p",
            metric: value,
        }
        for n, value in enumerate(values)
        if value is not None
    ]
    (folder / f"samples_{task}_{date}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if results is not None or of is not None:
        numbers = {"results": {task: {f"{metric},none": results}}, "config": {"model_args": f"pretrained=m{of}"}}
        (folder / f"results_{date}.json").write_text(json.dumps(numbers))
    return folder


def drawn(seed: int, count: int = 200, p: float = 0.6) -> list[float]:
    return np.random.default_rng(seed).binomial(1, p, count).astype(float).tolist()


def test_a_difference_is_paired_by_question(tmp_path):
    a, b = drawn(0), drawn(1, p=0.8)
    logged(tmp_path / "a", a, results=float(np.mean(a)))
    logged(tmp_path / "b" / "model", b[::-1], results=float(np.mean(b)))
    file = next((tmp_path / "b").rglob("samples*"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:  # in another order, and as the questions are numbered
        row["doc_id"], row["doc_hash"] = 199 - row["doc_id"], f"hash{199 - row['doc_id']}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = compare_samples([tmp_path / "a", tmp_path / "b"]).rows
    gap, gaps = row.differences["b"], np.array(b) - np.array(a)
    assert (row.task, row.metric, row.scores) == ("arc", "acc", {"a": np.mean(a), "b": np.mean(b)})
    assert gap.pairs == 200 and math.isclose(gap.value, gaps.mean())
    half = 1.9719565 * gaps.std(ddof=1) / math.sqrt(200)  # Student's t, 199 degrees of freedom
    assert math.isclose(gap.high - gap.low, 2 * half, rel_tol=1e-6)


def test_what_is_not_in_every_run_is_left_out_and_said(tmp_path):
    a, b = drawn(0), [None] * 50 + drawn(1, 150)
    logged(tmp_path / "a", a), logged(tmp_path / "b", b, prompts=["other"] * 200)
    logged(tmp_path / "b", a, task="piqa_more")
    report = compare_samples([tmp_path / "a", tmp_path / "b"])
    (row,) = report.rows
    assert row.differences["b"].pairs == 150 and math.isclose(row.scores["a"], np.mean(a[50:]))
    assert report.notes == [
        "not in every run: piqa_more",
        "arc: 150 questions are in all runs; up to 50 of a run are left out",
        "arc: 150 of 150 prompts differ between runs: shots, template or wording",
    ]


def test_how_values_add_up_is_what_lm_eval_reported(tmp_path):
    """A perplexity is the exponential of a mean; a metric that no mean gives is left out."""
    for name, shift in (("a", 0.0), ("b", 0.1)):
        losses = [[-(n + 3 + shift * n), n + 1] for n in range(40)]
        total = sum(a for a, _ in losses) / sum(n for _, n in losses)
        logged(tmp_path / name, losses, "wikitext", "word_perplexity", results=math.exp(-total))
        logged(tmp_path / name, drawn(0, 40), "sts", "f1", "2026-11-30T03-00-00.0", results=0.123)
    report = compare_samples([f"old={tmp_path / 'a'}", f"new={tmp_path / 'b'}"])
    (row,) = report.rows
    assert row.task == "wikitext" and row.differences["new"].kind == "ratio" and row.differences["new"].value > 1
    assert report.notes == ["sts: f1 is left out: it is no mean over questions"]


def test_without_lm_evals_numbers_only_shares_are_shown(tmp_path):
    """A log-likelihood is not taken for a mean, and the file of results may have another name."""
    for name, scale in (("a", 1.0), ("b", 1.2)):
        losses = [-(n % 7 + 1) * scale for n in range(40)]
        logged(tmp_path / name, losses, "lambada", "perplexity", results=math.exp(-sum(losses) / 40))
        logged(tmp_path / name, drawn(0, 40), date="2026-11-30T03-00-00.0")
    report = compare_samples([tmp_path / "a", tmp_path / "b"])
    gaps = {row.task: row.differences["b"] for row in report.rows}
    assert gaps["lambada"].kind == "ratio" and gaps["lambada"].value > 1 and gaps["arc"].value == 0
    for name in "ab":
        (tmp_path / name / f"results_{DATE}.json").rename(tmp_path / name / f"run_{DATE}.json")
    assert {row.task for row in compare_samples([tmp_path / "a", tmp_path / "b"]).rows} == {"lambada", "arc"}
    (tmp_path / "b" / f"run_{DATE}.json").unlink()
    report = compare_samples([tmp_path / "a", tmp_path / "b"])
    assert [row.task for row in report.rows] == ["arc"]
    assert report.notes == [
        "lambada: perplexity is left out: lm-eval's results are not next to the samples of every run"
    ]


def test_numbers_that_contradict_the_samples_are_not_shown(tmp_path):
    """Also where the other run's are not there."""
    logged(tmp_path / "a", drawn(0), results=0.93), logged(tmp_path / "b", drawn(1))
    with pytest.raises(DataError, match="arc: acc is left out: it is no mean over questions"):
        compare_samples([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("damage", [{"metrics": [["x"]]}, {"doc_hash": ["x"]}, {"prompt_hash": ["z"]}])
def test_a_damaged_row_is_one_line(tmp_path, damage):
    logged(tmp_path / "a", drawn(0))
    (tmp_path / "b").mkdir()
    row = {"doc_id": 0, "filter": "none", "metrics": ["acc"], "acc": 1.0, "doc_hash": "hash0"} | damage
    (tmp_path / "b" / f"samples_arc_{DATE}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "b" / f"results_{DATE}.json").write_text('{"results": {"arc": [1]}, "config": [1]}')
    with pytest.raises(
        DataError, match=r"line 1: .*doc_hash and prompt_hash must be strings|no metric can be compared"
    ):
        compare_samples([tmp_path / "a", tmp_path / "b"])


def test_values_that_are_no_numbers(tmp_path):
    """GLUE's f1 logs the answer and the guess; a score of a broken model may be no number."""
    for name in "ab":
        logged(tmp_path / name, [[n % 2, 0] for n in range(40)], "mrpc", "f1", results=0.0)
        logged(tmp_path / name, [*drawn(0, 39), math.nan], "sciq", date="2026-11-30T03-00-00.0")
        logged(tmp_path / name, drawn(0, 40), date="2026-11-30T04-00-00.0")
        file = tmp_path / name / "samples_arc_2026-11-30T04-00-00.0.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        old = [
            {k: v for k, v in row.items() if k not in ("filter", "metrics")} | {"doc": ["a", "list"]} for row in rows
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in old))
    report = compare_samples([tmp_path / "a", tmp_path / "b"])
    assert [(row.task, row.metric) for row in report.rows] == [("arc", "acc")]
    assert {*report.notes} == {
        "mrpc: f1 is left out: it is no mean over questions",
        "sciq: acc is left out: some values are not finite",
    }


def test_questions_of_one_cluster_are_no_independent_draws(tmp_path):
    subjects = [n // 4 for n in range(200)]
    a, b = drawn(0), [x for x in drawn(2, 50) for _ in range(4)]
    logged(tmp_path / "a", a, subject=subjects), logged(tmp_path / "b", b, subject=subjects)
    alone, together = (
        compare_samples([tmp_path / "a", tmp_path / "b"], cluster).rows[0].differences["b"]
        for cluster in ("none", "subject")
    )
    assert alone.value == together.value and (alone.pairs, together.pairs) == (200, 50)
    assert together.high - together.low > 1.3 * (alone.high - alone.low)


def test_the_last_of_several_runs_counts(tmp_path):
    logged(tmp_path / "a", drawn(0)), logged(tmp_path / "b", drawn(0))
    logged(tmp_path / "b", drawn(5), date="2026-11-30T09-00-00.5")
    assert compare_samples([tmp_path / "a", tmp_path / "b"]).rows[0].differences["b"].value != 0


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda at: None, "no samples_TASK_DATE.jsonl in it: run lm-eval with --log_samples"),
        (lambda at: logged(at, drawn(0), task="piqa"), "no task is common to"),
        (
            lambda at: [logged(at / task, drawn(0), task) for task in ("arc", "piqa")],
            "give the folder of one model",
        ),
        (
            lambda at: [logged(at, drawn(0), t, date=f"{DATE}{n}", of=n) for n, t in enumerate(("arc", "sciq"))],
            "different",
        ),
        (lambda at: logged(at, [[n] for n in range(200)]), "no metric can be compared; arc: acc is left out"),
        (lambda at: (at / f"samples_arc_{DATE}.jsonl").write_text('{"a": 1}\n'), "line 1: no doc_id"),
        (lambda at: (at / f"samples_arc_{DATE}.jsonl").write_text('{"doc_id": 1}\n' * 2), "question 1 occurs twice"),
        (lambda at: (at / f"samples_arc_{DATE}.jsonl").write_text('{"doc_id": 999}\n'), "no question is in all runs"),
    ],
    ids=["empty", "other", "two", "mixed", "values", "broken", "twice", "apart"],
)
def test_what_cannot_be_paired_is_one_line(tmp_path, make, error):
    logged(tmp_path / "a", drawn(0))
    (tmp_path / "b").mkdir()
    make(tmp_path / "b")
    with pytest.raises(DataError, match=error):
        compare_samples([tmp_path / "a", tmp_path / "b"])


def test_the_command(tmp_path, capsys):
    logged(tmp_path / "a", drawn(0)), logged(tmp_path / "b", drawn(1, p=0.9))
    assert main(["evaluate", "samples", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "b against a" in out and "acc" in out and "An asterisk marks significance" in out
    assert main(["evaluate", "samples", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["differences"]["b"]["pairs"] == 200
    assert main(["evaluate", "samples", str(tmp_path / "a")]) == 2
    assert "two runs or more" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="two runs are called 'a'"):
        compare_samples([tmp_path / "a", tmp_path / "a"])

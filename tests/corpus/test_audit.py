"""An audit finds what was planted in files of every kind, says where, and counts what it would miss."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fathom.cli.main import main
from fathom.corpus import executor
from fathom.corpus.audit import _benchmark_files, audit
from fathom.corpus.forms import DAMAGED, FORMS
from tests.corpus.prose import Prose, write_jsonl

PROSE = Prose(61)
QUESTIONS = [
    {
        "question": PROSE.sentence(4 + n % 20)[:-1],
        "choices": [PROSE.sentence(2)[:-1] for _ in range(4)],
        "answer": n % 4,
    }
    for n in range(24)
] + [{"question": "Two words", "choices": ["one", "other"], "answer": 0}]


def said(number: int) -> tuple[str, str]:
    row = QUESTIONS[number]
    return row["question"], row["choices"][row["answer"]]


def lines(path: Path, *rows: dict[str, Any]) -> None:
    write_jsonl(path, rows)


def chat(number: int, *names: str) -> dict[str, Any]:
    messages, role, content, first, second = names
    asked, answer = said(number)
    return {
        messages: [
            {role: first, content: PROSE.document(24)},
            {role: first, content: asked},
            {role: second, content: answer},
        ]
    }


def as_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "q", "a"), (1, *said(5)), (2, PROSE.document(24), "no")])


def as_parquet(path: Path) -> None:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([QUESTIONS[7], {**QUESTIONS[7], "question": "x y z"}]), path)


FILES: dict[str, Callable[[Path], object]] = {
    "notes.txt": lambda path: path.write_text(f"{PROSE.document(60)} {' '.join(said(0))} {PROSE.document(60)}"),
    "openai.jsonl": lambda path: lines(path, chat(1, "messages", "role", "content", "user", "assistant")),
    "sharegpt.jsonl": lambda path: lines(path, chat(2, "conversations", "from", "value", "human", "gpt")),
    "alpaca.json": lambda path: path.write_text(
        json.dumps(
            [{"instruction": said(3)[0], "input": "", "output": said(3)[1]}, {"instruction": "a", "output": "b"}]
        )
    ),
    "columns.json": lambda path: path.write_text(
        json.dumps({"question": [said(4)[0], "x"], "target": [said(4)[1], "y"]})
    ),
    "table.csv": as_csv,
    "page.html": lambda path: path.write_text(f"<p>{PROSE.document(200)}</p><p>{said(6)[0]}</p><p>{said(6)[1]}</p>"),
}
if find_spec("pyarrow"):
    FILES["rows.parquet"] = as_parquet
"""Each holds one question, by its place here."""


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for name, write in FILES.items():
        write(tmp_path / "texts" / name)
    (tmp_path / "clean").mkdir()
    write_jsonl(tmp_path / "clean" / "a.jsonl", [PROSE.document() for _ in range(20)])
    write_jsonl(tmp_path / "asked.jsonl", QUESTIONS)
    return tmp_path


def test_a_question_is_found_in_files_of_every_kind(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["corpus", "audit", str(there / "texts"), "--benchmark", f"mine={there / 'asked.jsonl'}", "--plants", "0"]
    assert main([*words, "--out", str(there / "out"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {Path(row["document"]).name.partition(":")[0]: row["number"] for row in found["findings"]} == {
        name: number for number, name in enumerate(FILES)
    }
    for row in found["findings"]:
        asked, answer = said(row["number"])
        assert row["text"].startswith(asked[:20]) and (row["question"], row["answer"]) == (asked, answer)
    page = (there / "out" / "report.html").read_text()
    assert all(name in page for name in FILES) and found == json.loads((there / "out" / "report.json").read_text())


def test_exit_codes(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"mine={there / 'asked.jsonl'}"
    for words, code in (
        ([str(there / "clean"), "--benchmark", asked, "--plants", "0"], 0),
        ([str(there / "clean")], 2),
        ([str(there / "none"), "--benchmark", asked], 2),
        ([str(there / "clean"), "--benchmark", f"mine={there / 'none'}"], 2),
        ([str(there / "clean"), "--benchmark", asked, "--benchmark", asked], 2),
        ([str(there / "clean"), "--benchmark", asked, "--plants", "-1"], 2),
    ):
        assert main(["corpus", "audit", *words, "--out", str(there / f"out{len(words)}{words[-1][-4:]}")]) == code, (
            words
        )
        assert code != 2 or capsys.readouterr().err.count("\n") == 1


def test_unusable_input_is_no_result_and_leaves_nothing(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text that cannot be read is not free of questions, and a file without questions is no benchmark."""
    (there / "packed.txt").write_bytes(gzip.compress(b"words"))
    (there / "bare.jsonl").write_text('{"a": 1}\n')
    asked = there / "asked.jsonl"
    for text, benchmark, says in (
        (there / "packed.txt", asked, "no document to search: packed.txt:1: packed.txt contains gzip data"),
        (there / "clean", there / "bare.jsonl", "no question"),
    ):
        words = ["corpus", "audit", str(text), "--benchmark", str(benchmark), "--plants", "0", "--out"]
        assert main([*words, str(there / "new")]) == 2 and says in capsys.readouterr().err
        assert not (there / "new").exists()


@pytest.mark.slow
def test_recall_by_form_and_length_counts_the_unfindable(there: Path) -> None:
    found = audit([str(there / "clean")], [f"mine={there / 'asked.jsonl'}"], there / "out", plants=1).benchmarks["mine"]
    assert (found.questions, found.leaked, found.unfindable) == (25, 0, 1) and list(found.recall) == [*FORMS, *DAMAGED]
    for form, row in found.recall.items():
        assert row["1 to 2"] == (1, 0)  # the negative control: what cannot be found is planted too
        if form in FORMS:
            assert all(row[length] == (1, 1) for length in ("3 to 7", "8 to 15", "16 or more")), form


def test_benchmarks_in_the_layouts_of_chats(there: Path) -> None:
    """Also a folder of splits, whose files are benchmarks of their own."""
    (there / "chats").mkdir()
    lines(there / "chats" / "train.jsonl", chat(1, "messages", "role", "content", "user", "assistant"))
    lines(there / "chats" / "test.jsonl", chat(2, "conversations", "from", "value", "human", "gpt"))
    lines(there / "alpaca.jsonl", {"instruction": said(3)[0], "input": "", "output": said(3)[1]})
    named = [str(there / "chats"), str(there / "alpaca.jsonl")]
    found = audit([str(there / "texts")], named, there / "out", plants=0)
    assert [(row["benchmark"], Path(row["document"]).name) for row in found.findings] == [
        ("alpaca", "alpaca.json:1"), ("chats-test", "sharegpt.jsonl:1"), ("chats-train", "openai.jsonl:1"),
    ]  # fmt: skip


def test_a_path_of_a_benchmark_may_hold_the_sign_of_a_name(there: Path) -> None:
    (there / "split=test").mkdir()
    file = there / "split=test" / "asked.jsonl"
    file.write_bytes((there / "asked.jsonl").read_bytes())
    for given, name in ((f"{file}", "asked"), (f"mine={file}", "mine"), (f"my own={there / 'asked.jsonl'}", "my-own")):
        assert dict(_benchmark_files([given])).keys() == {name}


@pytest.mark.slow
def test_the_same_bytes_with_any_number_of_workers_and_after_a_kill(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "POOL_BYTES", 0)
    given = [str(there / "texts"), str(there / "clean")], [f"mine={there / 'asked.jsonl'}"]
    whole = [
        audit(*given, there / f"out{workers}", 1, workers=workers) and there / f"out{workers}" for workers in (1, 2)
    ]
    for stage in ("search", "plant"):  # as a kill leaves them: some tasks are done, and no manifest is there
        folder = whole[1] / "stages" / stage
        for path in [folder / "manifest.json", *sorted(one for one in folder.iterdir() if one.is_dir())[::2]]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    audit(*given, whole[1], 1, workers=2)
    for name in ("report.json", "report.html"):
        assert (whole[0] / name).read_bytes() == (whole[1] / name).read_bytes()

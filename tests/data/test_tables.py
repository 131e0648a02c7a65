"""Tables of separated values, and every reader of records: one entry of one table serves all that read documents."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, get_args

import pytest

from fathom.corpus.benchmarks import read_items
from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.data import sources
from fathom.data.shards import TokenDataset
from fathom.data.sources import READERS, Reader, Reading, Source, find_sources, lines_of
from fathom.errors import DataError
from fathom.evaluation.perplexity import read_domains
from fathom.evaluation.tasks import load_task
from fathom.inference.prompt_file import _read_records
from tests.corpus.prose import Prose, lines, recipe_values


def texts_of(path: Path, **settings: Any) -> list[str]:
    reading = Reading(**settings)
    return [
        one.text
        for source in find_sources([str(path)], reading)
        for one in source.documents(reading)
        if one is not None
    ]


def test_cells_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\r\n1,"one, ""two""\nthree"\r\n\r\n2,caf\xc3\xa9\r\n')
    assert texts_of(path) == ['one, "two"\nthree', "café"]
    (tmp_path / "a.tsv").write_text("text\tid\na, b\t1\n")
    assert texts_of(tmp_path / "a.tsv") == ["a, b"]
    with gzip.open(tmp_path / "b.csv.gz", "wb") as file:
        file.write(path.read_bytes())
    assert texts_of(tmp_path / "b.csv.gz") == texts_of(path)
    source = Source("lines", "a.csv", "", (path,), reader="csv")
    _, second = source.records(Reading())
    assert json.loads(second) == {"id": "2", "text": "café"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"text,text\na,b\n", "must name every column once"),
        (b"id,text\n1\n", "a.csv:2: 1 cells, and the header has 2"),
        (b'text\n"a\n', "a.csv:2: unexpected end of data"),
        (b"id,words\n1,a\n", "no field 'text': the record has id, words"),
        (b"text\nb\xff\n", "is not UTF-8"),
    ],
)
def test_what_is_no_table_is_named(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(DataError, match=said):
        texts_of(tmp_path / "a.csv")


def test_a_row_that_is_no_utf8_is_treated_like_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\na\xff\nb\n")
    assert texts_of(tmp_path / "a.csv", undecodable="skip") == ["b"]
    assert texts_of(tmp_path / "a.csv", undecodable="replace") == ["a\ufffd", "b"]


def paragraphs(file: TextIO, name: str) -> Iterator[dict[str, object]]:
    """Records of `key: value` lines, with blank lines between them."""
    for block in file.read().split("\n\n"):
        yield {key: value for key, value in (line.split(": ", 1) for line in block.strip().splitlines())}


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("\n\n".join("\n".join(f"{key}: {value}" for key, value in row.items()) for row in rows))
    return path


def test_a_reader_is_one_entry(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` and evaluated text, `corpus` with documents, conversations and benchmarks, tasks, and prompts."""
    monkeypatch.setitem(READERS, "records", Reader("records", (".rec",), sources._as_lines(paragraphs)))
    prose = Prose(5)
    texts = [prose.sentence(60) for _ in range(6)]
    written(tmp_path / "docs.rec", [{"text": text} for text in texts])
    assert texts_of(tmp_path) == texts, "found in a folder, too"
    (domain,) = read_domains([str(tmp_path / "docs.rec")], Reading())
    assert [one.text for one in domain.documents] == texts
    quiz = [{"question": "What is it called?", "A": "x", "B": "y", "answer": "B"}]
    assert read_items(written(tmp_path / "quiz.rec", quiz), "quiz")[0].gold == "y"
    talk = [{"instruction": f"Say {n}", "input": "", "output": prose.sentence(30)} for n in range(4)]
    values = recipe_values(
        {
            "docs": [tmp_path / "docs.rec"],
            "talk": {"inputs": [str(written(tmp_path / "talk.rec", talk))], "kind": "conversations"},
        },
        tokenize={"tokenizer": tokenizer},
        converse={"template": "alpaca", "max_tokens": 512},
        decontaminate={"benchmarks": {"quiz": str(tmp_path / "quiz.rec")}},
    )
    build(parse_corpus_recipe(values), tmp_path / "out")
    assert [
        row["text"] for row in lines(tmp_path / "out/stages/ingest/part-00000.jsonl") if row["collection"] == "docs"
    ] == texts
    assert TokenDataset.open(tmp_path / "out" / "conversations", "train").num_tokens
    prompts = written(tmp_path / "p.rec", [{"prompt": "once"}, {"prompt": "twice"}])
    assert [row["prompt"] for row in _read_records(prompts)] == ["once", "twice"]


def test_what_a_reader_trips_over_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it need not know: byte-order marks, and bytes that are no UTF-8."""
    monkeypatch.setitem(READERS, "records", Reader("records", (".rec",), sources._as_lines(paragraphs)))
    (tmp_path / "a.rec").write_bytes(b"\xef\xbb\xbftext: caf\xe9")
    assert texts_of(tmp_path / "a.rec", undecodable="replace") == ["caf\ufffd"]
    (tmp_path / "a.rec").write_bytes(b"no colon")
    with pytest.raises(DataError, match=r"a\.rec: cannot read it: not enough values to unpack"):
        texts_of(tmp_path / "a.rec")


def test_every_reader_can_be_asked_for() -> None:
    assert set(get_args(sources.FileFormat)) == {"auto", "text", *READERS}


def test_a_table_asks_and_answers(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("text,answer\nThe sky is,blue\n")
    assert [json.loads(line or b"") for line in lines_of(tmp_path / "q.csv")] == [
        {"text": "The sky is", "answer": "blue"}
    ]
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[evaluate]'")
    loaded, _ = load_task(f"cloze:{tmp_path / 'q.csv'}", None)
    (task,) = loaded["tasks"].values()
    assert task.doc_to_target(task.test_docs()[0]) == " blue"


def test_columns_of_parquet_that_hold_no_text(tmp_path: Path) -> None:
    """A missing column, and one of lists, which pyarrow refuses by their names in bytes; null rows are left out."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    name, rows = tmp_path / "a.parquet", {"text": ["one", None, "two"], "parts": [["a"], [], None]}
    parquet.write_table(pyarrow.table(rows), name)
    assert texts_of(name) == ["one", "two"]
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body': it has text, parts"):
        texts_of(name, text_field="body")
    with pytest.raises(DataError, match=r"\(document 1\): field 'parts' is list, not text"):
        texts_of(name, text_field="parts")


def test_rows_of_parquet_are_no_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected lines of JSON or of a table, not parquet"):
        next(lines_of(tmp_path / "a.parquet"))

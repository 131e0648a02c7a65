"""Files of many kinds, whole and broken: each broken one has its status, and the run goes on."""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fathom.corpus import sandbox
from fathom.corpus.extraction import Extracted
from fathom.corpus.html import ENCODINGS, all_text, decode
from fathom.corpus.ingest import Ingest, collection_files
from fathom.corpus.recipe import Collection, parse_corpus_recipe
from fathom.corpus.stage import Task, Workspace
from fathom.data import sources
from fathom.errors import DataError
from fathom.report.files import digest
from tests.corpus.files import pdf, tei, write
from tests.corpus.prose import Prose, lines, recipe_values
from tests.corpus.test_duplicates import until

PAGE = (
    "<html><head><title>no</title><script>no()</script></head><body><h1>Head</h1><p>One &amp; two<br>three</p></body>"
)


def ingested(tmp_path: Path, inputs: list[Path], collection: dict[str, Any] | None = None, **ingest: Any) -> Workspace:
    """The workspace after ingest."""
    one = {"inputs": [str(path) for path in inputs], **(collection or {})}
    return until("ingest", tmp_path / "out", recipe_values({"a": one}, ingest={"html": "plain", **ingest}))


def rows(workspace: Workspace) -> dict[str, dict[str, Any]]:
    found = lines(workspace.stage("ingest") / "part-00000.jsonl")
    return {row["path"]: row for row in found}


def failures(workspace: Workspace) -> dict[str, str]:
    return {row["path"]: row["status"] for row in lines(workspace.stage("ingest") / "failed.jsonl")}


def test_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    row = json.dumps({"text": "from json", "id": 7, "license": "CC0-1.0", "other": 1})
    write(folder / "a.jsonl", row + "\n\n" + json.dumps({"text": "second"}) + "\n")
    write(folder / "b.jsonl.gz", gzip.compress(json.dumps({"text": "zipped"}).encode()))
    write(folder / "c.jsonl.xz", lzma.compress(json.dumps({"text": "squeezed"}).encode()))
    write(folder / "deep" / "d.txt", "\ufeffplain text")
    write(folder / "e.html", PAGE)
    write(folder / "f.tei.xml", tei("<div><p>From TEI.</p></div>"))
    write(folder / "g.xml", tei("<div><p>Sniffed.</p></div>"))
    write(folder / "h.xml", "<other>kept as text</other>")
    write(folder / "ignored.bin", b"\x00")
    workspace = ingested(tmp_path, [folder], {"license": "mine"})
    texts = {path: row["text"] for path, row in rows(workspace).items()}
    assert texts == {
        "in/a.jsonl:1": "from json",
        "in/a.jsonl:3": "second",
        "in/b.jsonl.gz:1": "zipped",
        "in/c.jsonl.xz:1": "squeezed",
        "in/deep/d.txt": "plain text",
        "in/e.html": "Head\n\nOne & two\nthree",
        "in/f.tei.xml": "# A title\n\nFrom TEI.",
        "in/g.xml": "# A title\n\nSniffed.",
        "in/h.xml": "<other>kept as text</other>",
    }
    first = rows(workspace)["in/a.jsonl:1"]
    assert (first["license"], first["meta"]) == ("CC0-1.0", {"id": 7}) and rows(workspace)["in/e.html"][
        "license"
    ] == "mine"
    assert not failures(workspace)


def test_a_row_of_parquet_keeps_its_licence_and_id(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    given = [{"text": "one", "license": "MIT", "id": 7}, {"text": "two", "license": None, "id": 8}]
    parquet.write_table(pyarrow.Table.from_pylist(given), tmp_path / "a.parquet")
    found = rows(ingested(tmp_path, [tmp_path / "a.parquet"], {"license": "CC0-1.0"})).values()
    assert [(row["license"], row["meta"]) for row in found] == [("MIT", {"id": 7}), ("CC0-1.0", {"id": 8})]


def test_a_separator_that_is_not_found_makes_no_document_of_several(tmp_path: Path) -> None:
    """By its mark or name, the encoding of these texts has other bytes for the separator."""
    text = "one\n§\ntwo\n"
    for number, (named, encoding) in enumerate(
        {"utf-8": "utf-16", "utf-16-be": "utf-16-be", "latin-1": "latin-1"}.items()
    ):
        place = tmp_path / str(number)
        write(place / "a.txt", text.encode(encoding))
        (failed,) = failures(ingested(place, [place / "a.txt"], {"separator": "§", "encoding": named})).values()
        assert failed == "parse_error"
    write(tmp_path / "b.txt", "one\n--\nna\u00efve\n".encode("latin-1"))
    found = rows(ingested(tmp_path, [tmp_path / "b.txt"], {"separator": "--", "encoding": "latin-1"})).values()
    assert [row["text"].strip() for row in found] == ["one", "na\u00efve"]


def test_broken_records_have_a_status(tmp_path: Path) -> None:
    good = json.dumps({"text": "good"})
    bad = ["{bad", "[1]", '{"other": 1}', '{"text": 5}', '{"text": null}', '{"text": "\\ud800"}', "[" * 1900]
    bad += ['{"text": "a", "title": "\\ud800"}', '{"text": "a", "license": "\\ud800"}']
    long = json.dumps({"text": "x" * 5000})
    write(tmp_path / "in" / "a.jsonl", "\n".join([good, *bad, long, good]).encode() + b'\n{"text": "\xff"}\n')
    write(tmp_path / "in" / "cut.jsonl.gz", gzip.compress((good + "\n").encode() * 500)[:-30])
    write(tmp_path / "in" / "latin.txt", "naïve".encode("latin-1"))
    write(tmp_path / "in" / "void.txt", " \n")
    write(tmp_path / "in" / "void.html", "<html><body></body></html>")
    write(tmp_path / "in" / "bad.tei.xml", "<TEI><unclosed>")
    write(tmp_path / "in" / "bomb.tei.xml", '<!DOCTYPE a [<!ENTITY b "c">]><TEI>&b;</TEI>')
    workspace = ingested(tmp_path, [tmp_path / "in"], max_document_bytes=2000)
    found = failures(workspace)
    places = [f"in/a.jsonl:{number}" for number in (2, 3, 4, 5, 7, 8, 9, 10, 13)]
    assert {path for path, status in found.items() if status == "parse_error"} == {
        *(*places, "in/latin.txt", "in/bad.tei.xml", "in/bomb.tei.xml"),
        next(path for path in found if path.startswith("in/cut.jsonl.gz:")),
    }
    assert [path for path, status in found.items() if status == "too_large"] == ["in/a.jsonl:11"]
    assert {path for path, status in found.items() if status == "empty"} == {
        "in/a.jsonl:6",
        "in/void.txt",
        "in/void.html",
    }
    assert {"in/a.jsonl:1", "in/a.jsonl:12"} <= set(rows(workspace))
    assert workspace.manifest("ingest").counts["documents"] == len(rows(workspace)) + len(found)
    assert str(tmp_path) not in json.dumps(lines(workspace.stage("ingest") / "failed.jsonl"))


def test_a_list_of_rows_may_be_larger_than_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in small pieces, which end anywhere; damage loses no row before it."""
    monkeypatch.setattr(sources, "LIST_CHARACTERS", 7)
    texts = [f"row {number} [1, 2], \u00e9 " + "x" * (3000 if number == 2 else 50) for number in range(40)]
    data = b"\xef\xbb\xbf" + json.dumps([{"text": text} for text in texts], indent=1).encode()
    write(tmp_path / "a.json.gz", gzip.compress(data))
    write(tmp_path / "b.json", data[:-30])
    write(tmp_path / "c.json", '[{"text": "one"}, 5, {"text": "two"}] {"text": "three"}')
    workspace = ingested(tmp_path, [tmp_path / "*.json*"], max_document_bytes=2000)
    whole = {f"a.json.gz:{number}": text for number, text in enumerate(texts, 1) if number != 3}
    cut = {f"b.json:{number}": text for number, text in enumerate(texts[:-1], 1) if number != 3}
    found = {path: row["text"] for path, row in rows(workspace).items()}
    assert found == {**whole, **cut, "c.json:1": "one", "c.json:3": "two"}
    assert failures(workspace) == {
        **dict.fromkeys(("a.json.gz:3", "b.json:3"), "too_large"),
        **dict.fromkeys(("b.json:40", "c.json:2", "c.json:4"), "parse_error"),
    }


def test_a_bomb_is_never_held(tmp_path: Path) -> None:
    """Much more text than a document may have, in a few kilobytes."""
    write(tmp_path / "in" / "bomb.txt.xz", lzma.compress(b" " * (1 << 22), preset=0))
    found = failures(ingested(tmp_path, [tmp_path / "in"], max_document_bytes=1 << 20))
    assert found == {"in/bomb.txt.xz": "too_large"}


def test_conversations(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    good = [
        {"messages": turns},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"instruction": "Hi", "input": "", "output": "Yo"},
    ]
    bad = [{"messages": []}, {"messages": [{"role": "alien", "content": "x"}]}, {"text": "none"}]
    bad.append({"messages": [{"role": ["user"], "content": "x"}]})
    write(tmp_path / "a.jsonl", "\n".join(json.dumps(row) for row in [*good, *bad]))
    workspace = ingested(tmp_path, [tmp_path / "a.jsonl"], {"kind": "conversations"})
    found = rows(workspace)
    assert [row["messages"] for row in found.values()] == [turns] * 3
    assert {row["text"] for row in found.values()} == {"Hi\n\nYo"} and len(failures(workspace)) == 4


def test_what_utf8_lacks_is_named_as_json_escapes_it(tmp_path: Path) -> None:
    """One bad line is one failure: half a character, in its keys."""
    write(tmp_path / "a.jsonl", '{"text": "good"}\n{"\\ud800": 1}\n')
    workspace = ingested(tmp_path, [tmp_path / "a.jsonl"])
    assert [row["text"] for row in rows(workspace).values()] == ["good"]
    (failed,) = lines(workspace.stage("ingest") / "failed.jsonl")
    assert failed["status"] == "parse_error" and failed["detail"].endswith("the record has \ud800")


@pytest.mark.parametrize("kind", ["conversations", "table"])
def test_conversations_are_read_from_lines_alone(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "in" / "notes.txt", "Hi")
    write(tmp_path / "in" / "page.html", PAGE)
    workspace = ingested(tmp_path, [tmp_path / "in"], {"kind": kind})
    assert failures(workspace) == {"in/notes.txt": "parse_error", "in/page.html": "parse_error"}
    assert all(
        "lines of JSON or of a table" in row["detail"] for row in lines(workspace.stage("ingest") / "failed.jsonl")
    )


def test_what_cannot_be_found_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x.bin", b"")
    for name, message in (("nothing", "no such file"), ("x.bin", "unknown extension"), ("*.pdf", "no file matches")):
        with pytest.raises(DataError, match=rf"collections\.a: .*{message}"):
            list(collection_files("a", Collection(inputs=(str(tmp_path / name),))))


@pytest.mark.parametrize(
    ("name", "after", "said"),
    [("b.txt", None, "was deleted"), ("c.html", "longer than it was", "has 18 bytes now, and had 7")],
)
def test_a_file_that_changes_while_the_run_reads_ends_it(
    name: str, after: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outcome would be kept under the hash of what it was."""
    for one in ("a.txt", "b.txt", "c.html"):
        write(tmp_path / "in" / one, f"<p>{one[:4]}"[:7])
    run = Ingest.run

    def late(stage: Ingest, task: Task, folder: Path) -> dict[str, int]:
        place = tmp_path / "in" / name
        place.unlink(missing_ok=True)
        if after is not None:
            write(place, after)
        return run(stage, task, folder)

    monkeypatch.setattr(Ingest, "run", late)
    with pytest.raises(DataError, match=rf"in/{name} {said}"):
        ingested(tmp_path, [tmp_path / "in"])


def test_a_file_that_is_gone_before_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in" / "a.txt", "text")
    write(tmp_path / "in" / "b.txt", "text")

    def late(path: Path) -> Any:
        (tmp_path / "in" / "b.txt").unlink(missing_ok=True)
        return digest(path)

    monkeypatch.setattr("fathom.corpus.ingest.digest", late)
    with pytest.raises(DataError, match=r"in/b\.txt was deleted.*resume"):
        ingested(tmp_path, [tmp_path / "in"])


def test_a_name_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux lets a file's name be any bytes; no JSON can hold such a one."""
    monkeypatch.setattr("fathom.corpus.ingest.find_files", lambda *_: [Path("caf\udce9.txt")])
    with pytest.raises(DataError, match=r"collections\.a: 'caf\\udce9.txt': its name is not UTF-8"):
        list(collection_files("a", Collection(inputs=("x",))))


def test_a_missing_package_is_named_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write(tmp_path / "a.pdf", pdf([["x"]]))
    with pytest.raises(DataError, match=r"reading pdf needs pypdfium2: pip install '\.\[corpus\]'"):
        ingested(tmp_path, [tmp_path / "a.pdf"])


CRASH = "import os; os.abort()"
SLEEP = "import time; time.sleep(60)"
SWELL = """
from fathom.corpus import sandbox
from fathom.corpus.extraction import Extracted
def swell(path, settings):
    return Extracted("ok", str(len(bytearray(1 << 34))))
sandbox.EXTRACTORS["html"] = swell
sandbox.serve()
"""


BROKEN = """
from fathom.corpus import sandbox
def broken(path, settings):
    raise ImportError("No module named 'lxml_html_clean'")
sandbox.EXTRACTORS["html"] = broken
sandbox.serve()
"""


def test_a_broken_installation_is_no_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CHILD", BROKEN)
    with pytest.raises(DataError, match=r"reading html: No module named 'lxml_html_clean': pip install"):
        ingested(tmp_path, [write(tmp_path / "a.html", PAGE)])


@pytest.mark.parametrize(
    ("child", "status", "detail"),
    [(CRASH, "parse_error", "its reader died"), (SLEEP, "too_slow", "over 1"), (SWELL, "parse_error", "out of memory")],
)
def test_a_reader_that_dies_is_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, status: str, detail: str
) -> None:
    settings = {"max_file_bytes": 1000, "max_seconds": 1.0 if child == SLEEP else 60.0, "max_memory": 1 << 28}
    settings |= {"max_document_bytes": 1000, "html": "plain"}
    page = write(tmp_path / "a.html", PAGE)
    with closing(sandbox.Sandbox(settings)) as box:
        monkeypatch.setattr(sandbox, "CHILD", child)
        found = box.extract("html", page)
        assert found.status == status and detail in found.detail
        monkeypatch.undo()
        settings["max_seconds"] = 60.0
        assert box.extract("html", page).status == "ok"  # the next file has a new reader
        big = write(tmp_path / "big.html", "x" * 1001)
        assert box.extract("html", big) == Extracted("too_large", detail="1,001 bytes")


def test_adding_a_file_reads_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathom.corpus.ingest.TASK_FILES", 1)
    prose = Prose()
    for number in range(3):
        write(tmp_path / "in" / f"{number}.txt", prose.document())
    first = ingested(tmp_path, [tmp_path / "in"])
    stamps = {path: path.stat().st_mtime_ns for path in first.stage("ingest").glob("*/task.json")}
    write(tmp_path / "in" / "3.txt", prose.document())
    (tmp_path / "in" / "0.txt").touch()  # another time, the same content
    second = ingested(tmp_path, [tmp_path / "in"])
    after = {path: path.stat().st_mtime_ns for path in second.stage("ingest").glob("*/task.json")}
    assert len(after) == 4 and stamps.items() <= after.items()


def test_a_separator_and_an_encoding(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "first é\n%%\nsecond".encode("latin-1"))
    workspace = ingested(tmp_path, [tmp_path / "a.txt"], {"separator": "%%", "encoding": "latin-1"})
    assert {path: row["text"] for path, row in rows(workspace).items()} == {"a.txt:1": "first é\n", "a.txt:2": "second"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "utf-8"])
def test_a_byte_order_mark_names_the_encoding_of_a_text(encoding: str, tmp_path: Path) -> None:
    """Without a mark UTF-16 is no UTF-8, as before."""
    words = "The depth — of a river — is 2³² łódź.\nNext ਊ line"
    write(tmp_path / "a.txt", words.encode(encoding))
    write(tmp_path / "b.txt", words.encode("utf-16-le"))
    workspace = ingested(tmp_path, [tmp_path / "a.txt", tmp_path / "b.txt"])
    assert {path: row["text"] for path, row in rows(workspace).items()} == {"a.txt": words}
    assert failures(workspace) == {"b.txt": "parse_error"}


def test_a_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> dict[str, int]:
        raise OSError(28, "No space left on device")  # as a write has it, without a name

    monkeypatch.setattr(Ingest, "run", full)
    with pytest.raises(OSError) as caught:
        ingested(tmp_path, [write(tmp_path / "a.txt", "text")])
    assert caught.value.filename == str(tmp_path / "out" / "stages" / "ingest")


def test_identify_by_stamp(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    values = recipe_values({"a": [tmp_path / "a.txt"]}, ingest={"identify": "stamp"})
    (tmp_path / "out").mkdir()
    stage_of = Workspace(tmp_path / "out", parse_corpus_recipe(values))
    before = Ingest(stage_of).tasks()
    write(tmp_path / "a.txt", "texts")
    assert Ingest(stage_of).tasks() != before


@pytest.mark.parametrize(
    ("label", "encoding", "text"),
    [
        *(
            (label, "cp1252", "It’s the geologist’s “view” – doesn’t…")
            for label in ("iso-8859-1", "Latin1", "us-ascii")
        ),
        ("windows-1252", "cp1252", "naïve"),
        ("iso-8859-9", "cp1254", "“ışık”"),
        ("gb2312", "gb18030", "鎔"),
        ("shift_jis", "cp932", "①～髙"),
        ("euc-kr", "cp949", "똠방각하"),
        ("big5", "big5hkscs", "水深"),
        ("iso-8859-2", "iso-8859-2", "łódź"),
        *((label, "utf-8", "café ’") for label in ("utf-16", "utf-8", "UTF-16LE")),
        *(("iso-8859-1", encoding, "café ’") for encoding in ("utf-8-sig", "utf-16", "utf-32")),
    ],
)
def test_a_label_means_what_it_means_on_the_web(label: str, encoding: str, text: str) -> None:
    """A byte order mark is before it, and a tag that can be read as bytes is not in UTF-16."""
    page = f'<html><head><meta charset="{label}"><body><p>{text}</p>'
    assert decode(page.encode(encoding)) == page


def test_files_of_one_name_have_labels_of_their_own(tmp_path: Path) -> None:
    """An audit counts documents by their labels; a file of two inputs is one document."""
    for name in ("one/data/a.txt", "one/data/b.txt", "two/data/a.txt", "one/a.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    folders = str(tmp_path / "one" / "data"), str(tmp_path / "two" / "data")

    def labels(*inputs: str) -> list[str]:
        return [label for label, *_ in collection_files("a", Collection(inputs=inputs))]

    assert labels(*folders) == ["one/data/a.txt", "data/b.txt", "two/data/a.txt"]
    assert labels(f"{folders[0]}/a.txt", folders[0]) == ["a.txt", "a.txt", "data/b.txt"]
    assert labels(folders[0], f"{tmp_path}/two/../one/data") == ["data/a.txt", "data/b.txt"] * 2
    (tmp_path / "linked").symlink_to(tmp_path / "one" / "data")
    assert len(set(labels(f"{tmp_path}/a.txt", f"{tmp_path}/linked/../a.txt"))) == 2


def test_every_encoding_is_known_and_open_bytes_are_controls() -> None:
    assert all(codecs.lookup(one) for one in ENCODINGS.values())
    assert decode(b"<meta charset=iso-8859-1><p>\x81\x92") == "<meta charset=iso-8859-1><p>\x81’"
    assert decode(b"<?xml version='1.0' encoding='ISO-8859-1'?><p>\xe9").endswith("<p>é")


@pytest.mark.parametrize(
    ("label", "text", "encoding"),
    [
        *((label, "café", "utf-8") for label in ("iso-8859-1", "us-ascii", "x-mac-foo")),
        ("x-mac-foo", "cafe", "utf-8"),
        ("iso-2022-jp", "水深", "iso-2022-jp"),
    ],
)
def test_a_page_in_utf_8_may_have_another_xml_declaration(label: str, text: str, encoding: str) -> None:
    """Templates declare what their pages are not; ISO-2022-JP is valid UTF-8."""
    page = f'<?xml version="1.0" encoding="{label}"?><p>{text}</p>'
    assert decode(page.encode(encoding)) == page


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<html><head><title>a <b>t</title><meta charset=utf-8><body><p>text</p>", "text"),
        ("<html><head><title>t</title><style>p {}</style><p>text</p>", "text"),
        ("<head><link rel=x><base/><script>no()</script>\n<template><p>no</template>text", "text"),
        ("<head><title>t</title><br/>text", "text"),
        ("<head><noscript><style>p {}</style></noscript><title>t</title></head><p>text", "text"),
        ("<p>one</p><object data=x><p>two</p>", "one\n\ntwo"),
        ("<p>one <object data=x>no <object>no</object> <b>no</b></object>two</p></object> three", "one two\n\nthree"),
        ("<p>one</p><svg><title>no</title></svg><p>two</p>", "one\n\ntwo"),
        ("<body></pre><p>one  \n two</p><pre>a\nb</pre>", "one two\n\na\nb"),
        ("<nav>one</nav><aside>two</aside>three<details><summary>4</summary>5", "one\n\ntwo\nthree\n\n4\n5"),
        ("<select><option>one<option>two</select>", "one\ntwo"),
    ],
)
def test_elements_without_an_end_or_a_start(page: str, text: str) -> None:
    """The end tag of a head may be left out; an object that has none is not the rest of the page. The words of two
    blocks are not joined."""
    assert all_text(page) == text

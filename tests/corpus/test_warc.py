"""Archives of crawls: pages, texts and their metadata; damage keeps what stands before it."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pytest

from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from tests.corpus.files import pdf
from tests.corpus.prose import Prose, lines, recipe_values

warcio = pytest.importorskip("warcio")
PAGES = [Prose(seed).document(60) for seed in range(4)]


def archive(place: Path, records: list[tuple[str, str, bytes, str]], compressed: bool = True) -> bytes:
    """An archive by warcio: (kind, media type, payload, status) of each record."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as file:
        writer = WARCWriter(file, gzip=compressed)
        writer.write_record(writer.create_warcinfo_record("a.warc", {"software": "a test"}))
        for number, (kind, media, payload, status) in enumerate(records):
            given: dict[str, Any] = {"payload": io.BytesIO(payload)}
            if kind == "response":
                given["http_headers"] = StatusAndHeaders(status, [("Content-Type", media)], protocol="HTTP/1.1")
            else:
                given["warc_content_type"] = media
                given["warc_headers_dict"] = {"WARC-Identified-Content-Language": "eng"}
            writer.write_record(writer.create_warc_record(f"http://a.org/{number}", kind, **given))
    return place.read_bytes()


def page(text: str) -> bytes:
    return f"<html><body><p>{text} in all 2<sup>32</sup> bytes</p></body></html>".encode()


def read(folder: Path, out: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    values = recipe_values({"a": {"inputs": [str(folder)]}}, ingest={"html": "plain"}, filter={"min_stop_words": None})
    report = build(parse_corpus_recipe(values), out)
    return lines(out / "stages" / "ingest" / "part-00000.jsonl"), report.stages["ingest"].counts


def test_pages_and_texts(tmp_path: Path) -> None:
    """Successful responses of known types; the server's encoding decides; pictures, errors and requests are none."""
    latin = page(PAGES[1] + " é").decode().encode("latin-1")
    records = [
        ("response", "text/html", page(PAGES[0]), "200 OK"),
        ("response", "text/html; charset=ISO-8859-1", latin, "200 OK"),
        ("response", "image/png", b"\x89PNG", "200 OK"),
        ("response", "text/html", page("gone"), "404 Not Found"),
        ("request", "application/http; msgtype=request", b"GET / HTTP/1.1\r\n\r\n", ""),
        ("resource", "text/plain", PAGES[2].encode(), ""),
        ("conversion", "text/plain", PAGES[3].encode(), ""),
    ]
    archive(tmp_path / "in" / "a.warc.gz", records[:6])
    archive(tmp_path / "in" / "b.warc.wet", records[6:], compressed=False)
    rows, counts = read(tmp_path / "in", tmp_path / "out")
    assert [row["path"] for row in rows] == [*(f"in/a.warc.gz:{number}" for number in (1, 2, 3)), "in/b.warc.wet:1"]
    assert "2³² bytes" in rows[0]["text"] and "é" in rows[1]["text"] and rows[2]["text"] == PAGES[2]
    assert rows[3]["text"] == PAGES[3] and rows[3]["meta"]["language"] == "eng" and rows[0]["mime"] == "text/html"
    assert rows[1]["meta"]["url"] == "http://a.org/1" and "date" in rows[1]["meta"] and counts["documents"] == 4


def test_a_pdf_in_an_archive(tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    archive(tmp_path / "in" / "a.warc", [("response", "application/pdf", pdf([["A line of it."]]), "200 OK")], False)
    values = recipe_values(
        {"a": {"inputs": [str(tmp_path / "in")]}},
        filter=dict.fromkeys(("min_words", "min_word_length", "min_stop_words")),
    )
    build(parse_corpus_recipe(values), tmp_path / "out")
    assert "A line of it." in lines(tmp_path / "out" / "stages" / "ingest" / "part-00000.jsonl")[0]["text"]


@pytest.mark.parametrize("kind", ["cut", "cut, plain", "flipped", "no archive"])
def test_damage_keeps_what_is_before_it(kind: str, tmp_path: Path) -> None:
    data = archive(tmp_path / "in" / "a.warc.gz", [("response", "text/html", page(one), "200 OK") for one in PAGES])
    whole = gzip.decompress(data)
    if kind == "cut":
        (tmp_path / "in" / "a.warc.gz").write_bytes(data[: len(data) * 2 // 3])
    elif kind == "cut, plain":
        (tmp_path / "in" / "a.warc.gz").rename(tmp_path / "in" / "a.warc")
        (tmp_path / "in" / "a.warc").write_bytes(whole[:-200])
    elif kind == "flipped":
        at = len(data) * 2 // 3
        (tmp_path / "in" / "a.warc.gz").write_bytes(data[:at] + bytes(9) + data[at + 9 :])
    else:
        (tmp_path / "in" / "a.warc.gz").rename(tmp_path / "in" / "b.warc.gz")
        (tmp_path / "in" / "a.warc").write_bytes(b"something else of " + whole[:40])
    rows, counts = read(tmp_path / "in", tmp_path / "out")
    assert counts["parse_error"] == 1 and len(rows) == (4 if kind == "no archive" else counts["ok"]) >= 2
    (failed,) = lines(tmp_path / "out" / "stages" / "ingest" / "failed.jsonl")
    assert "a.warc" in failed["path"] and str(tmp_path) not in failed["detail"]

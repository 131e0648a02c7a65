"""Reads WARC and WET files, the archives of web crawls: pages as servers sent them, and texts already extracted from
pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fathom.corpus.html import decode_as
from fathom.data.shards import first_line
from fathom.data.sources import opened
from fathom.errors import DataError

KINDS = {
    "text/html": "html",
    "application/xhtml+xml": "html",
    "application/pdf": "pdf",
    "application/epub+zip": "epub",
    "text/plain": "text",
}
"""Media types of responses that are read; others, such as images, are passed over."""
BOM = b"\xef\xbb\xbf"


class Captured(NamedTuple):
    """A web page, or the extracted text of one, from an archive."""

    kind: str
    """`text`, or the reader that it needs."""
    data: bytes | None
    """None if there is more than the limit."""
    meta: dict[str, object]


def captured(path: Path, limit: int) -> Iterator[Captured]:
    """Yields the readable contents of an archive: successful responses, resources and conversions.

    Args:
        path: The archive, which may be compressed with gzip.
        limit: The most bytes of a page.
    """
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    with opened(path) as file:
        try:
            for record in ArchiveIterator(_Pieces(file)):
                if kind := _kind(record):
                    data = record.content_stream().read(limit + 1)
                    if len(data) <= limit:
                        record.raw_stream.read()
                        if getattr(record.raw_stream, "limit", 0) > 0:
                            raise EOFError("the archive ends within a record")
                    yield Captured(kind, _in_utf8(data, record, kind) if len(data) <= limit else None, _meta(record))
        except (ArchiveLoadFailed, EOFError, ValueError) as error:
            raise DataError(f"{path}: damaged: {first_line(error)}") from None


class _Pieces:
    """A file that is read in small pieces, none larger than a compressed record, so that damaged data loses no record
    before it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        """The next bytes of the file, at most `size` of them."""
        return bytes(self._file.read1(size if size > 0 else 1 << 16))


def _kind(record: Any) -> str:
    """The name of the reader for a record's content; empty if the record is skipped."""
    kind, http = record.rec_type, record.http_headers
    if kind == "conversion":
        return "text"
    if kind == "resource":
        return KINDS.get(_type(record.rec_headers.get_header("Content-Type")), "")
    if kind != "response" or http is None or http.get_statuscode() != "200":
        return ""
    return KINDS.get(_type(http.get_header("Content-Type")), "")


def _type(header: str | None) -> str:
    return (header or "").partition(";")[0].strip().lower()


def _in_utf8(data: bytes, record: Any, kind: str) -> bytes:
    """A page converted to UTF-8 with a byte-order mark, if the HTTP header names an encoding that can decode
    it; else the page unchanged."""
    http = record.http_headers
    header = http.get_header("Content-Type") if http is not None else None
    named = (header or "").lower().partition("charset=")[2].partition(";")[0].strip(" \"'")
    if not named or kind not in ("html", "text"):
        return data
    try:
        return BOM + decode_as(data, named).encode("utf-8")
    except (LookupError, UnicodeError):
        return data


def _meta(record: Any) -> dict[str, object]:
    headers = record.rec_headers
    names = {
        "url": "WARC-Target-URI",
        "date": "WARC-Date",
        "language": "WARC-Identified-Content-Language",
    }
    return {key: value for key, name in names.items() if (value := headers.get_header(name))}

"""Extracts the text of an EPUB book: its pages in reading order, each read as a web page."""

from __future__ import annotations

import posixpath
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree
from zipfile import BadZipFile, ZipFile

from fathom.corpus.extraction import POSSIBLE_NOTES, Extracted, IngestValues
from fathom.corpus.html import decode, visible_text
from fathom.corpus.typeset import typeset

CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"


def extract(path: Path, settings: IngestValues) -> Extracted:
    """The text of a book."""
    try:
        with ZipFile(path) as book:
            pages = _pages(book)
            if ENCRYPTION in book.namelist() and any(page.encode() in book.read(ENCRYPTION) for page in pages):
                return Extracted("encrypted", detail="its pages are encrypted")
            size = sum(book.getinfo(page).file_size for page in pages)
            if size > settings["max_document_bytes"]:
                return Extracted("too_large", detail=f"{size:,} bytes of pages")
            read = [typeset(decode(book.read(page))) for page in pages]
    except (BadZipFile, KeyError, ElementTree.ParseError, UnicodeDecodeError, LookupError) as error:
        return Extracted("parse_error", detail=" ".join(str(error).split())[:300] or type(error).__name__)
    text = "\n\n".join(filter(None, (visible_text(page.page) for page in read)))
    if not text.strip():
        return Extracted("empty", detail="a book without text")
    possible = sum(page.possible_notes for page in read)
    return Extracted("ok", text, meta={POSSIBLE_NOTES: possible} if possible else {})


def sources(path: Path) -> list[str]:
    """The HTML source of each page of a book."""
    with ZipFile(path) as book:
        return [decode(book.read(page)) for page in _pages(book)]


def _pages(book: ZipFile) -> list[str]:
    """The names of a book's pages, in reading order, without its table of contents."""
    container = ElementTree.fromstring(book.read(CONTAINER))
    root = next(one.get("full-path", "") for one in container.iter() if one.tag.endswith("}rootfile"))
    package = list(ElementTree.fromstring(book.read(root)).iter())
    items = {one.get("id"): one for one in package if one.tag.endswith("}item")}
    order = [items[one.get("idref")] for one in package if one.tag.endswith("}itemref")]
    pages = [
        one for one in order if "html" in one.get("media-type", "") and "nav" not in one.get("properties", "").split()
    ]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(one.get("href", "")))) for one in pages]

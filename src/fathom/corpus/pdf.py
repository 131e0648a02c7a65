"""Text of PDF files by PDFium: running heads removed, words and lines put together again, superscripts kept.

`pdf_scripts.py` finds superscripts and subscripts, only in words with a digit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fathom.corpus.extraction import POSSIBLE_NOTES, Extracted, IngestValues
from fathom.corpus.pdf_scripts import with_scripts

EDGE_LINES = 3
"""Lines at the top and at the bottom of a page that may be running heads."""
EDGE_SHARE = 0.4
"""A line is a running head if it occurs on this share of the pages, digits ignored."""
LAYER_CHARACTERS = 16
"""A page with pictures and less text than this, on average, has no text layer."""
FULL_LINE = 0.75
"""A line of at least this share of the usual length continues in the next one."""
PASSWORD, IMAGE = 4, 3  # PDFium's FPDF_ERR_PASSWORD and FPDF_PAGEOBJ_IMAGE


def extract(path: Path, settings: IngestValues) -> Extracted:
    """The text of a PDF file."""
    import pypdfium2

    if path.stat().st_size == 0:
        return Extracted("empty", detail="a file of no bytes")
    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) == PASSWORD or "password" in str(error).lower():
            return Extracted("encrypted", detail="it needs a password")
        return Extracted("parse_error", detail=" ".join(str(error).split()))
    try:
        pages, pictures, size, notes = [], 0, 0, 0
        for number in range(len(document)):
            try:
                page = document[number]
                text, marks = with_scripts(page.get_textpage())
                pages.append(text.replace("\r\n", "\n").replace("\r", "\n"))
                notes += marks
                pictures += any(True for _ in page.get_objects(filter=[IMAGE], max_depth=2))
                page.close()
            except pypdfium2.PdfiumError as error:
                return Extracted("parse_error", detail=f"page {number + 1}: {' '.join(str(error).split())}")
            size += len(pages[-1])
            if size > settings["max_document_bytes"]:
                return Extracted("too_large", detail=f"over {settings['max_document_bytes']:,} bytes of text")
    finally:
        document.close()
    letters = sum(len("".join(page.split())) for page in pages)
    if pictures and letters < LAYER_CHARACTERS * len(pages):
        return Extracted("no_text_layer", detail=f"{len(pages)} pages of pictures")
    if not letters:
        return Extracted("empty", detail=f"{len(pages)} pages without text")
    meta: dict[str, object] = {"pages": len(pages), **({POSSIBLE_NOTES: notes} if notes else {})}
    return Extracted("ok", flow(without_running_heads(pages)), meta=meta)


def without_running_heads(pages: Sequence[str]) -> list[list[str]]:
    """The lines of each page, without lines that most pages repeat at the top or bottom."""
    lines = [[line.rstrip() for line in page.split("\n")] for page in pages]
    if len(pages) != 2:
        return _without_edges(lines, EDGE_LINES)
    # With two pages only the outermost lines count; further in, a repeated line may be a coincidence.
    for _ in range(EDGE_LINES):
        lines = _without_edges(lines, 1)
    return lines


def _without_edges(lines: Sequence[Sequence[str]], depth: int) -> list[list[str]]:
    filled = [[number for number, line in enumerate(page) if line.strip()] for page in lines]
    edges = [{*one[:depth], *one[-depth:]} for one in filled]
    seen = Counter(
        key
        for page, places in zip(lines, edges, strict=True)
        for key in {_without_digits(page[number]) for number in places}
    )
    needed = max(min(3, len(lines)), 2, EDGE_SHARE * len(lines))
    return [
        [line for number, line in enumerate(page) if number not in places or seen[_without_digits(line)] < needed]
        for page, places in zip(lines, edges, strict=True)
    ]


def _without_digits(line: str) -> str:
    return " ".join(re.sub(r"\d+", "", line).split())


def _without_marks(lines: Sequence[str]) -> list[str]:
    """Lines in which U+FFFE is removed or replaced by a hyphen: PDFium writes this character where it joins a word that
    was divided between lines.

    The hyphen is written where the document has the word with a hyphen elsewhere, and not without one, and before a
    capital or a digit: no hyphenation divides a word there.
    """
    if not any("\ufffe" in line[:-1] for line in lines):
        return list(lines)
    whole = " ".join(lines).lower()

    def joined(match: re.Match[str]) -> str:
        one, other = match[1], match[2]
        spelled = f"{one}-{other}".lower() in whole and f"{one}{other}".lower() not in whole
        return f"{one}-{other}" if spelled or not other[0].islower() else one + other

    return [re.sub("(\\w+)\ufffe(\\w+)", joined, line) for line in lines]


def flow(pages: Sequence[Sequence[str]]) -> str:
    """Join lines to paragraphs: a full line continues in the next one.

    A hyphen at the end of a line is dropped if the joined word occurs elsewhere in the document, else kept.
    """
    lines = _without_marks([line.strip() for page in pages for line in page])
    lengths = sorted(len(line) for line in lines if line)
    if not lengths:
        return ""
    usual = lengths[min(len(lengths) - 1, int(0.9 * len(lengths)))]
    words = {word.lower() for line in lines for word in re.findall(r"\w+(?!\w*-$)", line)}
    text: list[str] = []
    joins = False
    for line in lines:
        if not line:
            joins = False
            if text and text[-1] != "\n\n":
                text.append("\n\n")
            continue
        if joins:
            tail = re.search(r"(\w+)[-\u00ad\u0002\ufffe]$", text[-1])
            head = re.match(r"\w+", line)
            if tail and head and head[0][0].islower():
                if (tail[1] + head[0]).lower() in words or text[-1][-1] != "-":
                    text[-1] = text[-1][:-1]
            elif tail and head:  # before a capital or a digit the hyphen belongs to the spelling
                text[-1] = f"{text[-1][:-1]}-"
            else:
                text.append(" ")
        elif text and text[-1] != "\n\n":
            text.append("\n")
        text.append(line)
        joins = len(line) >= FULL_LINE * usual
    return "".join(text).strip("\n")

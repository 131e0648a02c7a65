"""Text of web pages: the main text by trafilatura, or all visible text by the standard library.

Superscripts, subscripts and formulas are rewritten as text before either sees the page: `typeset.py` finds them,
`superscripts.py` and `mathml.py` write them.

`ingest.html` chooses between the two; `plain` keeps the white space of `<pre>`.
"""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

from fathom.corpus.extraction import POSSIBLE_NOTES, Extracted, IngestValues
from fathom.corpus.typeset import typeset

SILENT = ("script", "style", "template", "noscript", "head", "title", "svg", "math", "iframe")
IN_HEAD = {"base", "link", "meta", "noscript", "script", "style", "template", "title"}
"""What may stand in a head; anything else ends it, as its own end tag may be missing."""
BLOCKS = {
    *("p", "div", "br", "li", "tr", "table", "section", "article", "blockquote", "pre", "hr", "ul", "ol", "dl", "dt"),
    *("dd", "header", "footer", "main", "figure", "figcaption", *(f"h{level}" for level in range(1, 7))),
    *("address", "aside", "caption", "center", "details", "dialog", "dir", "fieldset", "form", "hgroup", "legend"),
    *("menu", "nav", "optgroup", "option", "search", "summary"),
}
PARAGRAPHS = {"p", "section", "article", "blockquote", "table", "pre", *(f"h{level}" for level in range(1, 7))}
CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
XML = re.compile(rb"""\s*<\?xml\b[^>]{0,200}?\bencoding\s*=\s*["']([\w-]+)""")
BOMS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),  # the first begins as UTF-16's does
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF8, "utf-8-sig")),
)
ENCODINGS = {
    label: encoding
    for encoding, labels in {
        "cp1252": "iso-8859-1 iso8859-1 iso_8859-1 latin1 latin-1 l1 ascii us-ascii x-cp1252 windows-1252",
        "cp1254": "iso-8859-9 iso8859-9 iso_8859-9 latin5 l5 windows-1254 x-cp1254",
        "cp874": "iso-8859-11 iso8859-11 tis-620 windows-874 dos-874",
        "gb18030": "gb2312 gb_2312-80 chinese csgb2312 gbk x-gbk gb18030",
        "cp932": "shift_jis shift-jis sjis x-sjis ms_kanji windows-31j",
        "cp949": "euc-kr euc_kr ks_c_5601-1987 ksc5601 korean windows-949",
        "big5hkscs": "big5 big5-hkscs cn-big5 x-x-big5",
        "utf-8": "utf-16 utf-16le utf-16be utf-32 unicode utf8",  # whose label could not be read as bytes
    }.items()
    for label in labels.split()
}
"""What labels mean on the web where that is not what Python takes them for (WHATWG's Encoding, in part)."""
KEPT = {" ": "\x01", "\t": "\x02", "\n": "\x03"}
"""White space inside of `pre`, as characters that no page holds, until that of the rest is collapsed."""
NO_MARKS = dict.fromkeys(map(ord, KEPT.values()))
HIDDEN, SHOWN = str.maketrans(KEPT), str.maketrans({mark: blank for blank, mark in KEPT.items()})
LICENSE = re.compile(r"""<(?:a|link)\b[^>]{0,500}?\brel\s*=\s*["']?license["']?[^>]{0,500}?>""", re.IGNORECASE)
ADDRESS = re.compile(r"""\bhref\s*=\s*["']([^"'>]+)""", re.IGNORECASE)


def extract(path: Path, settings: IngestValues) -> Extracted:
    """The text of a page, with the licence that it declares."""
    data = path.read_bytes()
    if not data.strip():
        return Extracted("empty", detail="a file of no text")
    try:
        page = decode(data)
    except (UnicodeDecodeError, LookupError) as error:
        return Extracted("parse_error", detail=str(error))
    rewritten = typeset(page)
    text = _main_text(rewritten.page) if settings["html"] == "trafilatura" else visible_text(rewritten.page)
    if not text.strip():
        return Extracted("empty", detail="a page without text")
    declared = LICENSE.search(page)
    address = ADDRESS.search(declared[0]) if declared else None
    meta: dict[str, object] = {"license": address[1]} if address else {}
    if rewritten.possible_notes:
        meta[POSSIBLE_NOTES] = rewritten.possible_notes
    return Extracted("ok", text, meta=meta)


def decode(data: bytes) -> str:
    """Decode a page by its byte-order mark, the encoding in a `meta` element, or as UTF-8.

    XML's declaration, which templates often get wrong, is used if the bytes are ASCII (as in ISO-2022-JP) or no UTF-8.
    """
    for mark, encoding in BOMS:
        if data.startswith(mark):
            return data.decode(encoding)
    if named := CHARSET.search(data[:4096]):
        return decode_as(data, named[1].decode("ascii").lower())
    named = XML.match(data[:4096])
    label = named[1].decode("ascii").lower() if named else "utf-8"
    first, last = (label, "utf-8") if data.isascii() else ("utf-8", label)
    with suppress(UnicodeDecodeError, LookupError):
        return decode_as(data, first)
    return decode_as(data, last)


def decode_as(data: bytes, label: str) -> str:
    """Decode a page by the label of its encoding."""
    encoding = ENCODINGS.get(label, label)
    return data.decode(encoding, "controls" if encoding in ("cp1252", "cp1254") else "strict")


def _controls(error: UnicodeError) -> tuple[str, int]:
    """Error handler for decoding: a byte that the code page leaves undefined becomes the control character with the
    same number."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return error.object[error.start : error.end].decode("latin-1"), error.end


codecs.register_error("controls", _controls)


def _main_text(page: str) -> str:
    import trafilatura

    return trafilatura.extract(page, include_comments=False, include_tables=True, deduplicate=False) or ""


def all_text(page: str) -> str:
    """All visible text of a page: a line for each block, blank lines between paragraphs; text in `pre` keeps its white
    space."""
    return visible_text(typeset(page).page)


def visible_text(page: str) -> str:
    """All visible text of a page in which superscripts, subscripts and formulas have already been rewritten as text."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    lines = (re.sub(r"[ \t\r\f\v]+", " ", line).strip() for line in "".join(reader.found).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n").translate(SHOWN)


class _Reader(HTMLParser):
    """Collects visible text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._silent: list[str] = []
        self._objects: list[int] = []
        """How much was found before each object that is open: its text is for readers that lack what it shows."""
        self._verbatim: list[int] = []
        """How much was found before each `pre` that is open."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._end_head(tag in IN_HEAD)
        if tag in SILENT:
            self._silent.append(tag)
        if tag == "object":
            self._objects.append(len(self.found))
        self._break(tag)
        if tag == "pre":
            self._verbatim.append(len(self.found))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._end_head(tag in IN_HEAD)
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            while self._silent.pop() != tag:
                pass
        if tag == "object" and self._objects:
            del self.found[self._objects.pop() :]
        if tag == "pre" and self._verbatim:
            self._end_verbatim()
        self._break(tag)

    def handle_data(self, data: str) -> None:
        self._end_head(not data.strip())
        if not self._silent:
            data = data.translate(NO_MARKS)
            self.found.append(data if self._verbatim else re.sub(r"\s+", " ", data))

    def close(self) -> None:
        """End the page, and with it all elements that have no end tag."""
        super().close()
        while self._verbatim:
            self._end_verbatim()

    def _end_verbatim(self) -> None:
        """Keep the white space of a `pre` element, except line breaks at its start and end."""
        start = self._verbatim.pop()
        text = "".join(self.found[start:]).replace("\r\n", "\n").replace("\r", "\n").strip("\n")
        self.found[start:] = [text.translate(HIDDEN)]

    def _end_head(self, belongs: bool) -> None:
        """End the head element at the first tag or text that may not occur in a head."""
        if not belongs and self._silent == ["head"]:
            self._silent.clear()

    def _break(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.found.append(" ")
        elif tag in BLOCKS:
            self.found.append("\n\n" if tag in PARAGRAPHS else "\n")

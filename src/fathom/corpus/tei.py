"""GROBID's TEI to Markdown: headings, paragraphs, tables, captions, and the visible text of references.

A figure or table appears once, where it is first referenced, or else at the end. With `sentinels` figures, tables,
formulas, notes and citations are enclosed in [START_X] and [END_X], and a citation becomes the title of the cited
work. Superscripts and subscripts are kept (2³²), but for the marks of notes: those that a `ref` or `note` encloses, or
whose text is one, and numbers of references that follow a word or a number without a blank.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element

from fathom.corpus.extraction import POSSIBLE_NOTES, Extracted, IngestValues, tag_of, xml_of
from fathom.corpus.mathml import formula
from fathom.corpus.superscripts import MARK, Script, as_script, may_be_note, named_script

IDENTITY = "{http://www.w3.org/XML/1998/namespace}id"
NOTES = ("ref", "note", "xref")
SECTION = re.compile(r"[1-9]\.[0-9]")


def extract(path: Path, settings: IngestValues) -> Extracted:
    """The Markdown of a TEI file."""
    root = parsed(path)
    if isinstance(root, Extracted):
        return root
    converter = Converter(root, settings["sentinels"])
    text = converter.markdown()
    if not text:
        return Extracted("empty", detail="a document without text")
    found = {"dangling_references": converter.dangling, POSSIBLE_NOTES: converter.possible_notes}
    return Extracted("ok", text, meta={name: count for name, count in found.items() if count})


def parsed(path: Path) -> Element | Extracted:
    """The root element of a TEI file; or a failed result with the reason why there is none."""
    root = xml_of(path)
    if isinstance(root, Extracted) or tag_of(root) == "TEI":
        return root
    return Extracted("parse_error", detail=f"a <{tag_of(root)}>, not TEI")


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _script(element: Element) -> Script | None:
    """Whether an element is set above or below the line."""
    if tag_of(element) in ("sup", "sub"):
        return "super" if tag_of(element) == "sup" else "sub"
    named = " ".join(element.get(name, "") for name in ("rend", "rendition", "style"))
    return named_script(named) if tag_of(element) in ("hi", "emph", "seg", "g", "c", "num") else None


def _is_raised(element: Element) -> bool:
    return _script(element) == "super" and not (element.tail or "").strip()


def _is_link(element: Element) -> bool:
    """Whether an element holds nothing but references and notes."""
    besides = "".join([element.text or "", *(one.tail or "" for one in element)])
    return len(element) > 0 and all(tag_of(one) in NOTES for one in element) and not any(map(str.isalnum, besides))


class Converter:
    """Converts a TEI document to Markdown."""

    def __init__(self, root: Element, sentinels: bool) -> None:
        self._root, self._sentinels = root, sentinels
        self.dangling = 0
        """Number of references whose target is missing."""
        self.possible_notes = 0
        """Number of superscripts that are kept and may be marks of notes."""
        self.blocks = {one.get(IDENTITY): one for one in root.iter() if tag_of(one) == "figure" and one.get(IDENTITY)}
        self._shown: set[str] = set()
        self.titles = {
            one.get(IDENTITY): self._title_of(one)
            for one in root.iter()
            if tag_of(one) == "biblStruct" and one.get(IDENTITY)
        }

    def markdown(self) -> str:
        """The whole document."""
        found = []
        title = self._root.find(".//{*}titleStmt//{*}title")
        if title is not None and (text := self.plain(title)):
            found.append(f"# {text}")
        abstract = self._root.find(".//{*}profileDesc//{*}abstract")
        if abstract is not None and (body := self._paragraphs(abstract)):
            found += ["## Abstract", *body]
        body_element = self._root.find(".//{*}text//{*}body")
        if body_element is not None:
            for division in body_element:
                if tag_of(division) == "div":
                    found += self._paragraphs(division)
            for name in self.blocks:
                if name not in self._shown:
                    found += self._block(str(name))
        return "\n\n".join(found)

    def _paragraphs(self, division: Element) -> list[str]:
        """Headings, paragraphs, formulas and notes of a division, in order; each figure follows its first reference."""
        found: list[str] = []
        for child in division:
            name = tag_of(child)
            wanted: list[str] = []
            if name == "head":
                if text := self.plain(child):
                    found.append(f"{'###' if SECTION.search(text) else '##'} {text}")
            elif name == "p":
                if text := _words(self.inline(child, wanted)).strip():
                    found.append(text)
            elif name in ("formula", "note"):
                if text := self.inline(child, wanted).strip():
                    found.append(self._marked(name, _words(text)))
            elif name == "div":
                found += self._paragraphs(child)
            for identity in wanted:
                found += self._block(identity)
        return found

    def inline(self, element: Element, wanted: list[str] | None) -> str:
        """The text of an element and everything inside; referenced figures are added to `wanted`.

        With None, which a title or cell has, references and notes are their visible text alone.
        """
        text = element.text or ""
        for child in element:
            name, script = tag_of(child), _script(child)
            if name == "math":
                text += formula(child)
            elif script == "super" and _is_link(child):  # the mark of a note: what it refers to alone
                text += "".join(self.reference(one, "", wanted) for one in child)
            elif script:
                inner = self.inline(child, wanted)
                self.possible_notes += script == "super" and may_be_note(inner, text)
                text += as_script(inner, script, text)
            elif name == "ref":
                text += self.reference(child, self._visible(child, text, wanted), wanted)
            else:
                inner = self.inline(child, wanted)
                parted = name == "note" and text[-1:].strip() and not self._sentinels
                if name in ("formula", "note") and inner.strip() and wanted is not None:
                    inner = self._marked(name, inner.strip())
                text += f" {inner}" if parted else inner
            text += child.tail or ""
        return text

    def _visible(self, reference: Element, before: str, wanted: list[str] | None) -> str:
        """The visible text of a reference; empty for a superscript mark, or for a number attached to the word before
        it, unless it refers to a figure or table."""
        inner = self.inline(reference, wanted)
        raised = len(reference) and all(map(_is_raised, reference)) and not (reference.text or "").strip()
        glued = before[-1:].isalnum() and inner[:1].isdigit() and MARK.fullmatch(inner)
        figure = (reference.get("target") or "").removeprefix("#") in self.blocks
        return "" if (raised or glued) and not figure else inner

    def reference(self, element: Element, shown: str, wanted: list[str] | None) -> str:
        """What stands for a reference."""
        target = (element.get("target") or "").removeprefix("#")
        if not target or wanted is None:
            return shown
        if target in self.blocks:
            wanted.append(target)
        elif target in self.titles:
            if self._sentinels and self.titles[target]:
                return f"{shown} [START_REF]{self.titles[target]}[END_REF]"
        else:
            self.dangling += 1
        return shown

    def _block(self, identity: str) -> list[str]:
        """The Markdown of a figure or table the first time it is referenced; empty afterwards."""
        if identity in self._shown:
            return []
        self._shown.add(identity)
        element = self.blocks[identity]
        kind = "table" if element.get("type") == "table" or element.find(".//{*}table") is not None else "figure"
        children = {tag_of(child): child for child in element}
        lines = [text for name in ("head", "figDesc") if name in children and (text := self.plain(children[name]))]
        if "table" in children and (rows := self._table(children["table"])):
            lines.append(rows)
        if "note" in children and (text := self.plain(children["note"])):
            lines.append(self._marked("note", text))
        if not lines:
            return []
        if not self._sentinels:
            return ["\n\n".join(lines)]
        return [f"[START_{kind.upper()}]\n" + "\n".join(lines) + f"\n[END_{kind.upper()}]"]

    def _table(self, table: Element) -> str:
        """A pipe table whose first row is its header."""
        rows = [
            [self.plain(cell).replace("|", "\\|") for cell in row if tag_of(cell) == "cell"]
            for row in table.iter()
            if tag_of(row) == "row"
        ]
        width = max((len(row) for row in rows), default=0)
        if not width:
            return ""
        lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in rows]
        return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])

    def plain(self, element: Element) -> str:
        """The visible text of an element, in one line."""
        return _words(self.inline(element, None)).strip()

    def _marked(self, name: str, text: str) -> str:
        already = text.startswith(f"[START_{name.upper()}]")
        return f"[START_{name.upper()}]{text}[END_{name.upper()}]" if self._sentinels and not already else text

    def _title_of(self, entry: Element) -> str:
        for level in ("a", "m", "j"):
            for one in entry.iter():
                if tag_of(one) == "title" and one.get("level") == level and (text := self.plain(one)):
                    return text
        return ""

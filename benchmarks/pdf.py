"""What is lost of a text that was a PDF: words recalled, broken words, running heads, by the program that set it.

    python benchmarks/pdf.py DATA/corpora/wiki/val.jsonl.xz --out LOG

Sets articles by reportlab, typst, LibreOffice and Chromium (those that are installed; the first two are packages of
these names), in one column and in two, justified, hyphenated where the program can, with a running head and numbered
pages; of each article also a version of two pages. Paragraphs with letters outside of Latin-1 are left out first.
"""

from __future__ import annotations

import argparse
import html
import json
import lzma
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from fathom.corpus.normalization import normalize
from fathom.corpus.pdf import extract
from fathom.corpus.recipe import IngestOptions
from fathom.report.files import write_json
from fathom.report.provenance import provenance

HEAD = "Annals of Running Heads"
SHORT = 7000
"""Characters of the version of two pages."""
LEAST = 12000
"""Characters of an article that is set."""
ODT = """<?xml version="1.0" encoding="UTF-8"?>
<office:document xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0"
 xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0"
 xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0"
 xmlns:fo="urn:oasis:names:tc:opendocument:xmlns:xsl-fo-compatible:1.0" office:version="1.2"
 office:mimetype="application/vnd.oasis.opendocument.text"><office:styles>
 <style:style style:name="Standard" style:family="paragraph"><style:paragraph-properties fo:text-align="justify"/>
 <style:text-properties fo:language="en" fo:country="US" fo:hyphenate="true" fo:font-size="11pt"/></style:style>
 </office:styles><office:automatic-styles><style:page-layout style:name="p"><style:page-layout-properties
 fo:page-width="21cm" fo:page-height="29.7cm" fo:margin="2cm"><style:columns fo:column-count="{columns}"
 fo:column-gap="0.6cm"/></style:page-layout-properties><style:header-style/><style:footer-style/></style:page-layout>
 </office:automatic-styles><office:master-styles><style:master-page style:name="Standard" style:page-layout-name="p">
 <style:header><text:p>{head}</text:p></style:header><style:footer><text:p><text:page-number/></text:p></style:footer>
 </style:master-page></office:master-styles><office:body><office:text>{body}</office:text></office:body>
</office:document>"""


def articles(place: Path, count: int) -> Iterator[list[str]]:
    """The paragraphs of articles that are long enough."""
    with lzma.open(place, "rt", encoding="utf-8") as lines:
        found = (json.loads(line)["text"] for line in lines)
        cleaned = (
            [one for one in re.split(r"\n+", normalize(text)) if one.strip() and all(ord(c) < 256 for c in one)]
            for text in found
        )
        yield from islice((paragraphs for paragraphs in cleaned if sum(map(len, paragraphs)) >= LEAST), count)


def by_reportlab(paragraphs: Sequence[str], columns: int, place: Path) -> None:
    from reportlab.lib.pagesizes import A4
    from reportlab.lib.styles import ParagraphStyle
    from reportlab.platypus import BaseDocTemplate, Frame, PageTemplate, Paragraph

    wide, high = A4
    width = (wide - 100) / columns
    frames = [Frame(50 + n * width, 60, width, high - 120, rightPadding=12) for n in range(columns)]

    def edges(canvas: Any, document: Any) -> None:
        canvas.drawString(50, high - 40, HEAD)
        canvas.drawString(wide / 2, 40, str(document.page))

    document = BaseDocTemplate(str(place), pagesize=A4)
    document.addPageTemplates([PageTemplate(frames=frames, onPage=edges)])
    style = ParagraphStyle("text", fontName="Times-Roman", fontSize=11, leading=14, alignment=4, spaceAfter=8)
    document.build([Paragraph(html.escape(one), style) for one in paragraphs])


def by_typst(paragraphs: Sequence[str], columns: int, place: Path) -> None:
    import typst

    body = "\n\n".join(f"#{json.dumps(one, ensure_ascii=False)}" for one in paragraphs)
    page = f'#set page(paper: "a4", columns: {columns}, header: [{HEAD}], numbering: "1")\n#set par(justify: true)\n'
    source = place.with_suffix(".typ")
    source.write_text(f'{page}#set text(lang: "en", hyphenate: true, size: 11pt)\n{body}', encoding="utf-8")
    typst.compile(str(source), output=str(place))


def by_libreoffice(paragraphs: Sequence[str], columns: int, place: Path) -> None:
    source = place.with_suffix(".fodt")
    body = "".join(f"<text:p>{html.escape(one)}</text:p>" for one in paragraphs)
    source.write_text(ODT.format(columns=columns, head=HEAD, body=body), encoding="utf-8")
    home = f"-env:UserInstallation=file://{place.parent}/office"
    command = ["soffice", home, "--headless", "--convert-to", "pdf", "--outdir", str(place.parent), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def by_chromium(paragraphs: Sequence[str], columns: int, place: Path) -> None:
    source = place.with_suffix(".html")
    body = "".join(f"<p>{html.escape(one)}</p>" for one in paragraphs)
    style = (
        f"body{{text-align:justify;hyphens:auto;font:11pt serif}}div{{columns:{columns if columns > 1 else 'auto'}}}"
    )
    page = f'<html lang="en"><head><meta charset="utf-8"><title>{HEAD}</title><style>{style}</style></head>'
    source.write_text(f"{page}<body><div>{body}</div></body></html>", encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--print-to-pdf={place}", str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


MAKERS: dict[str, tuple[Callable[[Sequence[str], int, Path], None], bool]] = {
    "reportlab": (by_reportlab, find_spec("reportlab") is not None),
    "typst": (by_typst, find_spec("typst") is not None),
    "LibreOffice": (by_libreoffice, shutil.which("soffice") is not None),
    "Chromium": (by_chromium, shutil.which("chromium") is not None),
}


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


def lost(paragraphs: Sequence[str], place: Path) -> dict[str, Any]:
    """What an extracted text lacks of what was set, and what it has beyond."""
    found = extract(place, asdict(IngestOptions()))
    wanted, there = words("\n".join(paragraphs)), words(normalize(found.text))
    missing = wanted - there
    return {
        "status": found.status,
        "pages": found.meta.get("pages"),
        "words": wanted.total(),
        "recalled": wanted.total() - missing.total(),
        "added": (there - wanted).total(),
        "noncharacters": found.text.count("\ufffe"),
        "heads": found.text.count(HEAD),
        "missing": sorted(missing)[:12],
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--articles", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, whole in enumerate(articles(options.file, options.articles)):
            for maker, (make, is_there) in MAKERS.items():
                for columns in (1, 2) if is_there else ():
                    for length in ("two pages", "whole"):
                        limit = SHORT if length == "two pages" else 60000
                        sizes = [sum(map(len, whole[:n])) for n in range(1, len(whole) + 1)]
                        some = whole[: max(1, sum(size <= limit for size in sizes))]
                        place = Path(folder) / f"{number}-{maker}-{columns}-{length.split()[0]}.pdf"
                        make(some, columns, place)
                        rows.append({"article": number, "maker": maker, "columns": columns, "length": length})
                        rows[-1] |= lost(some, place)
    cells: dict[str, dict[str, Any]] = {}
    for row in rows:
        cell = cells.setdefault(f"{row['maker']}, {row['columns']} columns, {row['length']}", Counter())
        cell.update({key: row[key] for key in ("words", "recalled", "added", "noncharacters", "heads")} | {"files": 1})
        cell["pages"] += row["pages"] or 0
    for name, cell in cells.items():
        share = cell["recalled"] / cell["words"]
        others = ", ".join(f"{key} {cell[key]}" for key in ("files", "pages", "added", "noncharacters", "heads"))
        print(f"{name:34} recalled {share:.4f} of {cell['words']:,} words; {others}")
    worst = min(row["recalled"] / row["words"] for row in rows)
    print(f"least of one file: {worst:.4f}")
    if options.out:
        write_json(options.out, {**vars(provenance()), "cells": cells, "least_recalled": worst, "files": rows})


if __name__ == "__main__":
    main()

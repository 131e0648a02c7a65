"""Small files of every kind that a folder may hold, whole and broken, written byte by byte."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path


def pdf(pages: Sequence[Sequence[str]], picture: bool = False, encrypted: bool = False) -> bytes:
    """A PDF of lines of text, or of one picture on each page; encrypted, it needs a password that nobody has.

    In a line 2^32^ is set with a small 32 above it, and x_1_ with a small 1 below.
    """
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", font]
    image = zlib.compress(bytes(range(48)))
    objects.append(
        "<< /Type /XObject /Subtype /Image /Width 4 /Height 4 /ColorSpace /DeviceRGB /BitsPerComponent 8 "
        f"/Filter /FlateDecode /Length {len(image)} >>\nstream\n" + image.decode("latin-1") + "\nendstream"
    )
    kids = []
    for lines in pages:
        shown = "".join(f"{_shown(line)} T*\n" for line in lines)
        content = "q 300 0 0 300 100 300 cm /Im1 Do Q" if picture else f"BT /F1 11 Tf 14 TL 72 720 Td\n{shown}ET"
        kids.append(len(objects) + 1)
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(objects) + 2} 0 R "
            "/Resources << /Font << /F1 3 0 R >> /XObject << /Im1 4 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content.encode('latin-1'))} >>\nstream\n{content}\nendstream")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(f'{kid} 0 R' for kid in kids)}] /Count {len(kids)} >>"
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = len(data)
    data += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    data += "".join(f"{place:010d} 00000 n \n" for place in places).encode()
    secret = "<" + "41" * 32 + ">"
    lock = f" /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O {secret} /U {secret} >> /ID [<00> <00>]"
    data += f"trailer << /Size {len(objects) + 1} /Root 1 0 R{lock if encrypted else ''} >>\n".encode()
    return data + f"startxref\n{table}\n%%EOF\n".encode()


def _shown(line: str) -> str:
    """The operators that show a line."""
    found = []
    for text, high, low in re.findall(r"((?:[^_^]|[_^](?![-\d]))+)|\^([-\d]+)\^|_(\d+)_", line):
        rise = f"/F1 {7 if high or low else 11} Tf {5 if high else -2 if low else 0} Ts"
        found.append(f"{rise} ({_escaped(text or high or low)}) Tj")
    return " ".join(found)


def _escaped(line: str) -> str:
    return line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")


def tei(body: str, title: str = "A title", abstract: str = "", back: str = "") -> str:
    """A document as GROBID writes it."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><fileDesc>'
        f"<titleStmt><title>{title}</title></titleStmt></fileDesc><profileDesc><abstract>{abstract}</abstract>"
        f"</profileDesc></teiHeader><text><body>{body}</body><back>{back}</back></text></TEI>"
    )


def epub(pages: Sequence[str], hidden: bool = False) -> bytes:
    """A book of pages, which lie in its archive in the reverse order."""
    items = "".join(
        f'<item id="p{n}" href="p%20{n}.xhtml" media-type="application/xhtml+xml"/>' for n in range(len(pages))
    )
    spine = "".join(f'<itemref idref="p{n}"/>' for n in range(len(pages)))
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    )
    rootfile = '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/>'
    container = f'<container xmlns="urn:container"><rootfiles>{rootfile}</rootfiles></container>'
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as book:
        for number, page in reversed(list(enumerate(pages))):
            book.writestr(f"OEBPS/p {number}.xhtml", page)
        book.writestr("OEBPS/book.opf", package)
        book.writestr("META-INF/container.xml", container)
        if hidden:
            book.writestr("META-INF/encryption.xml", '<a><CipherReference URI="OEBPS/p 0.xhtml"/></a>')
    return made.getvalue()


def jats(body: str, title: str = "A title", abstract: str = "", back: str = "") -> str:
    """An article as journals publish it."""
    return (
        '<?xml version="1.0"?>\n<article xmlns:mml="http://www.w3.org/1998/Math/MathML"><front><article-meta><title-group>'
        f"<article-title>{title}</article-title></title-group><abstract>{abstract}</abstract></article-meta></front>"
        f"<body>{body}</body><back>{back}</back></article>"
    )


def write(path: Path, data: bytes | str) -> Path:
    """A file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path

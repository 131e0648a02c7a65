"""Private data in documents: e-mail addresses, IP addresses, telephone numbers and secret keys become placeholders.

What only looks so stays: addresses of private networks, versions and numbers of sections, pictures (`a@2x.png`), ISBNs,
dates and figures. Names of people and postal addresses are not searched for. `clean.py` masks the kinds that
`normalize.mask` names.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, get_args

Private = Literal["email", "ip", "phone", "key"]
KINDS: tuple[Private, ...] = get_args(Private)
PLACEHOLDERS: dict[Private, str] = {kind: f"<{kind.upper()}>" for kind in KINDS}

AT, DOT = r"(?:\s*[\[({]\s*(?:at|@)\s*[\])}]\s*)", r"(?:\s*[\[({]\s*(?:dot|\.)\s*[\])}]\s*)"
EMAIL = re.compile(
    rf"(?<![\w.%+@\\/-])[\w%+-]+(?:\.[\w%+-]+)*(?:@|{AT})(?:[^\W_](?:[\w-]*[^\W_])?(?:\.|{DOT}))+[^\W\d_]{{2,24}}(?![^\W_]|@)"
)
FILES = ("png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "js", "ts", "css", "json", "html", "txt")
"""What names of files end in; no address does, unlike .py, .md and .so, which are domains of countries."""
SHELL_USERS = ("git", "svn", "hg")
"""Who is not a person: `git@host:path` is a repository."""
OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = re.compile(rf"(?<![\w.-])(?<![A-Za-z]/)(?:{OCTET}\.){{3}}{OCTET}(?!\w|-|\.\d)")
IPV6 = re.compile(r"(?<![\w:.])[23][0-9a-f]{3}:[0-9a-f:]{1,34}[0-9a-f:](?![\w:])", re.IGNORECASE)
NUMBERED = re.compile(
    r"(?<!\w)(?:versions?|v|ver|release|section|sec|chapter|clause|part|paragraph|figure|table|build|appendix|oid|§)[\s.:]*\Z",
    re.IGNORECASE,
)
"""What stands before a version, or the number of a section, and not before an address."""
GAP = r"[ .\u00a0\u2011-\u2013-]"
ABROAD = re.compile(
    rf"(?<![\w+)\]])(?:\+|\b00(?=[1-9]\d?{GAP}))[1-9]\d{{0,2}}(?:{GAP}{{0,2}}(?:\(\d{{1,4}}\)|\d{{1,5}})){{1,7}}(?![\w]|[.,]\d)"
)
AMERICAN = re.compile(
    rf"(?<![\w.+/-])(?:1{GAP})?(?:\([2-9]\d\d\) ?|[2-9]\d\d{GAP})[2-9]\d\d{GAP}\d{{4}}(?![\w-]|[.,]\d)"
)
CALLED = re.compile(
    r"\b(?:tel|telephone|phone|fax|mobile|cell|tél|téléphone|telefon|móvil|电话|電話)(?:\s+(?:no|number|nr)\b)?[.:\s]{0,3}"
    rf"(?P<number>\(?\d[\d()/]*(?:{GAP}[\d()/]+){{0,7}})(?![\w]|[.,]\d)",
    re.IGNORECASE,
)
KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:(?!-----).){20,20000}"
    r"-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    r"|(?<![\w-])(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_\w{36,255}|github_pat_\w{50,255}|glpat-[\w-]{20,64}"
    r"|sk-(?:[a-z]+\d*-){0,3}[\w-]{20,200}|hf_[A-Za-z0-9]{30,40}|xox[abeoprs]-[\w-]{10,250}|AIza[\w-]{35}"
    r"|ya29\.[\w-]{20,200}|[rsp]k_(?:live|test)_\w{16,250}|whsec_\w{24,64}|npm_\w{36}|pypi-[\w-]{50,250}"
    r"|SG\.[\w-]{16,32}\.[\w-]{16,64}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{16,})(?![\w-])",
    re.DOTALL,
)
ASSIGNED = re.compile(
    r"(?:api|access|secret|auth|private|client|account|encryption)?[\s_-]?(?:key|token|secret|passwd|password|pwd)"
    r"[\"']?\s*(?:=|:|=>|:=)\s*[\"']?(?P<secret>[\w/+=.~-]{16,200})(?![\w/+=.~-])",
    re.IGNORECASE,
)
IN_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{1,64}:(?P<secret>[^\s/:@]{3,128})@", re.IGNORECASE)
LEAST_BITS = 3.2
"""Of each character of a secret; words have fewer."""

Span = tuple[int, int, Private]


def masked(text: str, kinds: Collection[str]) -> tuple[str, Counter[str]]:
    """A text with private data of the given kinds replaced, and how often each kind was replaced."""
    spans: list[Span] = sorted(span for kind in KINDS if kind in kinds for span in FINDERS[kind](text))
    parts, end, counts = [], 0, Counter[str]()
    for start, stop, kind in spans:
        if start >= end:
            parts += [text[end:start], PLACEHOLDERS[kind]]
            counts[kind] += 1
            end = stop
    return "".join([*parts, text[end:]]) if parts else text, counts


def _emails(text: str) -> Iterator[Span]:
    if "@" not in text and " at" not in text and "(at" not in text and "[at" not in text:
        return
    for match in EMAIL.finditer(text):
        name, _, host = match[0].rpartition("@")
        repository = name in SHELL_USERS and text[match.end() : match.end() + 1] in (":", "/")
        library = host.endswith(".so") and re.match(r"\.\d", text[match.end() : match.end() + 2])
        if match[0].rpartition(".")[2].lower() not in FILES and not (repository or library or host.startswith("-")):
            yield *match.span(), "email"


def _addresses(text: str) -> Iterator[Span]:
    for pattern in (IPV4, IPV6):
        for match in pattern.finditer(text) if "." in text or ":" in text else ():
            if _is_global(match[0]) and not (pattern is IPV4 and _is_numbering(text, match)):
                yield *match.span(), "ip"


def _is_global(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _is_numbering(text: str, match: re.Match[str]) -> bool:
    """Whether four dotted numbers are a version or section number, not an IP address: small numbers at the start of a
    line, or any after a word such as "version"."""
    before = text[max(match.start() - 16, 0) : match.start()]
    small = all(int(part) < 30 for part in match[0].split("."))
    begins = before[-1:] in ("", "\n") and text[match.end() : match.end() + 1] in (" ", "\t")
    return bool(NUMBERED.search(before)) or (small and begins)


def _phones(text: str) -> Iterator[Span]:
    for pattern, least in ((ABROAD, 8), (AMERICAN, 10), (CALLED, 6)):
        for match in pattern.finditer(text):
            group = "number" if pattern is CALLED else 0
            digits = sum(map(str.isdecimal, match[group]))
            solid = pattern is ABROAD and digits == len(match[0]) - 1 and not 10 <= digits <= 14
            if least <= digits <= 15 and not solid:
                yield *match.span(group), "phone"


def _keys(text: str) -> Iterator[Span]:
    for match in KEY.finditer(text):
        if match[0].startswith(("-----", "eyJ")) or _is_random(match[0], 2.5):
            yield *match.span(), "key"
    for pattern in (ASSIGNED, IN_ADDRESS):
        for match in pattern.finditer(text):
            if pattern is IN_ADDRESS or _is_random(match["secret"]):
                yield *match.span("secret"), "key"


def _is_random(text: str, least: float = LEAST_BITS) -> bool:
    """Whether a text looks like a random string: it has letters and digits, and a high character entropy."""
    counts: Sequence[int] = list(Counter(text).values())
    bits = -sum(count / len(text) * math.log2(count / len(text)) for count in counts)
    return bits >= least and any(map(str.isdecimal, text)) and any(map(str.isalpha, text)) and text.count(".") < 2


FINDERS: dict[Private, Callable[[str], Iterator[Span]]] = {
    "email": _emails,
    "ip": _addresses,
    "phone": _phones,
    "key": _keys,
}

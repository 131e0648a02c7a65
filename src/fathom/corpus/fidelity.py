"""Checks whether the numbers in a page's source are unchanged in the text that a reader extracted from the page.

The page is read a second time, by one small parser that shares no code with the readers, and both are cut at their
words. Between the same words, two to each side, the same numbers must stand. A number with an exponent or an index is
one number: 2³² is not 232. Where the page's words are not in the text, the reader has left out the passage, and nothing
is compared. Marks of notes, which are links, may be left out.

`ingest.py` chooses the files (`ingest.check`) and writes `numbers.jsonl`; `card.py` says how many numbers were altered
or lost.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TypeAlias

INLINE = (
    *(
        "a",
        "abbr",
        "b",
        "bdi",
        "big",
        "bold",
        "c",
        "cite",
        "code",
        "data",
        "dfn",
        "em",
        "emph",
        "ext-link",
        "font",
        "g",
    ),
    *("hi", "i", "italic", "kbd", "label", "mark", "monospace", "num", "q", "ref", "s", "samp", "sc", "seg", "small"),
    *("span", "strike", "strong", "sub", "sup", "time", "tt", "u", "underline", "uri", "var", "wbr", "xref"),
)
"""Elements that do not part words."""
CLOSE = ("math", "mn", "mi", "mo", "mrow", "mstyle", "mtext", "semantics", "msup", "msub", "msubsup", "mpadded")
"""Those of formulas."""
SILENT = (
    "script",
    "style",
    "template",
    "noscript",
    "svg",
    "iframe",
    "object-id",
    "tex-math",
    "annotation",
    "annotation-xml",
)
EMPTY = ("area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
LINKS = ("a", "ref", "xref", "note", "fn", "label")
PLACES = {"msup": "^", "msub": "_", "munder": "_", "mover": "^", "mfrac": "/"}
BOTH = ("msubsup", "munderover")
RAISED = re.compile(r"(?:^|[\s:_-])(?:super|sup|exponent)(?:script)?(?![a-z-])", re.IGNORECASE)
LOWERED = re.compile(r"(?:^|[\s:_-])sub(?:script)?(?![a-z-])", re.IGNORECASE)
HIGHER, LOWER = (
    re.compile(rf"position:\s*relative.*\b(?:{up}:\s*-[\d.]*[1-9]|{down}:\s*[\d.]*[1-9])", re.IGNORECASE)
    for up, down in (("top", "bottom"), ("bottom", "top"))
)
SHEET = re.compile(r"\.([\w-]+)\s*\{[^{}]*?(vertical-align:\s*su(?:per|b))")
UNSEEN = re.compile(r"(?:display:\s*none|visibility:\s*hidden)", re.IGNORECASE)
NOTED = re.compile(r"note|cite|reference|bibr|\bfn|\bref\b", re.IGNORECASE)
OPTIONAL = "\ue000", "\ue001"
"""What encloses marks of notes in a page's text."""
LEFT_OUT = re.compile("\ue000[^\ue000\ue001]*\ue001")
MARK = re.compile(r"[\s(\[]*(?:[\^_]\{)?[\s(\[]*\d{1,3}[a-z]?(?:\s*[,;–-]\s*\d{1,3}[a-z]?)*[\s\])]*\}?[\s.\])]*")
DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\u207b\u208b", "-"))
ONE = r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)*|\d+(?:\.\d+)*|[\u00bc-\u00be\u2150-\u215e]"
SCRIPTED = r"[\^_]\{[^{}]*\d[^{}]*\}"
TOKEN = re.compile(rf"(?:{ONE})(?:{SCRIPTED})*|(?:{SCRIPTED})+|[^\W\d_]{{2,}}")
TEX = re.compile(r"\\\(.*?\\\)|\\\[.*?\\\]|\$[^$\n]{1,400}\$", re.DOTALL)
Place: TypeAlias = tuple[str, ...]
"""The two words on either side."""
Numbers: TypeAlias = "Counter[str]"
QUOTED = 60
"""Characters of a passage's words and numbers that an example shows."""


@dataclass
class Fidelity:
    """How many numbers of a page were compared with its extracted text, and which of them differ."""

    numbers: int = 0
    wrong: int = 0
    """Altered or lost."""
    examples: list[dict[str, str]] = field(default_factory=list)
    """What the page says, and what the text says."""


def compared(pages: Sequence[str], text: str) -> Fidelity:
    """Compare the numbers in pages (HTML, TEI, JATS) with those in the text that was extracted from them."""
    marked = "\n".join(map(_marked, pages))
    without, whole = (_gaps(_plain(one)) for one in (LEFT_OUT.sub("", marked), re.sub("[\ue000\ue001]", "", marked)))
    if [words for words, _ in without] != [words for words, _ in whole]:
        whole = without
    wanted: dict[Place, list[tuple[Numbers, Numbers]]] = defaultdict(list)
    for (words, one), (_, other) in zip(without, whole, strict=True):
        wanted[words].append((Counter(one), Counter(other)))
    there: dict[Place, list[Numbers]] = defaultdict(list)
    for words, numbers in _gaps(_plain(TEX.sub(lambda match: _from_tex(match[0]), text))):
        there[words].append(Counter(numbers))
    elsewhere: dict[Place, list[Numbers]] = defaultdict(list)
    for words, some in wanted.items():
        for half in _halves(words):
            elsewhere[half] += [one for one, _ in some if one]
    found = Fidelity()
    for words, some in wanted.items():
        if any(one for one, _ in some):
            _compare(words, some, [its for its in there.get(words, [])], elsewhere, found)
    return found


def _compare(
    words: Place,
    wanted: Sequence[tuple[Numbers, Numbers]],
    there: list[Numbers],
    elsewhere: Mapping[Place, Sequence[Numbers]],
    found: Fidelity,
) -> None:
    """Pair passages of the page and of the text that have the same words around them: first passages with equal
    numbers, then those in which the text has more numbers than the page."""
    for same in (_equal, _within):
        others = []
        for one in wanted:
            match = next((its for its in there if same(one, its)), None)
            if match is None:
                others.append(one)
            else:
                there.remove(match)
                found.numbers += one[0].total()
        wanted = [one for one in others if one[0]]
    # Numbers that the page has next to the same two words come from there: a text may leave out or move a passage.
    near = [one for half in _halves(words) for one in elsewhere[half]]
    there = [its for its in there if not its or not any(its <= one for one in near)]
    for (numbers, _), its in zip(wanted, there, strict=False):
        found.numbers += numbers.total()
        found.wrong += (numbers - its).total()
        found.examples.append({"page": _quoted(words, numbers), "text": _quoted(words, its)})


def _equal(one: tuple[Numbers, Numbers], its: Numbers) -> bool:
    return its in one


def _within(one: tuple[Numbers, Numbers], its: Numbers) -> bool:
    return any(some and some <= its for some in one)


def _halves(words: Place) -> tuple[Place, Place]:
    return ("before", *words[:2]), ("after", *words[2:])


def _quoted(words: Place, numbers: Mapping[str, int]) -> str:
    said = " ".join(numbers)
    return " ".join([*words[:2], said if len(said) <= QUOTED else f"{said[:QUOTED]}…", *words[2:]])


def _gaps(text: str) -> list[tuple[Place, list[str]]]:
    """For each gap between words: the two words on either side of it, and the numbers inside it."""
    words, gaps = ["", ""], list[list[str]]([[]])
    for token in TOKEN.findall(text):
        if token[0].isalpha():
            words.append(token.lower())
            gaps.append([])
        else:
            gaps[-1].append(token)
    words += ["", ""]
    return [(tuple(words[at : at + 4]), gap) for at, gap in enumerate(gaps)]


def _plain(text: str) -> str:
    """A text in which superscripts and subscripts are written as ^{…} and _{…}."""
    text = "".join(_scripts(text)).replace("\u00ad", "").translate(DASHES)
    text = re.sub(r"(?<=\})\s*(?=[\^_]\{)|(?<=\d)\s+(?=[\^_]\{)", "", text)
    return re.sub(r"[\^_]\{[^{}]*\}", lambda match: re.sub(r"[\s()]", "", match[0]), text)


def _scripts(text: str) -> Iterator[str]:
    """Yields a text in which each run of Unicode superscript or subscript characters is written as ^{…} or _{…}."""
    if text.isascii():
        yield text
        return
    last = ""
    for character in text:
        tag, *parts = unicodedata.decomposition(character).split() or [""]
        script = {"<super>": "^", "<sub>": "_"}.get(tag, "")
        if script != last:
            yield ("}" if last else "") + (f"{script}{{" if script else "")
        yield "".join(chr(int(part, 16)) for part in parts) if script else character
        last = script
    yield "}" if last else ""


def _from_tex(tex: str) -> str:
    """A TeX formula simplified so that its numbers, superscripts and subscripts can be compared."""
    tex = re.sub(r"\\[dt]?frac\s*(\d)\s*(\d)", r" \1 \2 ", tex)
    tex = re.sub(r"\{([,.])\}", r"\1", re.sub(r"\\[,;:! ]", "", tex))
    tex = re.sub(r"\\(?:mathrm|text|mathbf|mathit|rm|operatorname)\b|\\[A-Za-z]+", " ", tex)
    tex = re.sub(r"(?<![\^_])\{([\w.,]+)\}(?=\s*[\^_])", r"\1", tex)
    tex = re.sub(r"([\^_])\s*([a-zA-Z0-9-])", r"\1{\2}", tex)
    return f" {tex} "


@dataclass
class _Element:
    tag: str
    script: str
    note: bool
    text: str = ""
    children: int = 0
    named: tuple[str, ...] = ()
    """The number of its note, which may be long, if it calls itself the mark of one."""


def _marked(page: str) -> str:
    """The text of a page, with superscripts and subscripts as ^{…} and _{…}, and with note marks enclosed in special
    characters."""
    reader = _Reader(dict(SHEET.findall(page)))
    reader.feed(page)
    reader.close()
    return reader.whole()


class _Reader(HTMLParser):
    def __init__(self, sheet: Mapping[str, str]) -> None:
        super().__init__(convert_charrefs=True)
        self._sheet = sheet
        """The style of each class, if that sets text higher or lower."""
        self._open = [_Element("", "", False)]

    def whole(self) -> str:
        """The text."""
        while len(self._open) > 1:
            self._end()
        return self._open[0].text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        tag = tag.rpartition(":")[2]
        if tag in EMPTY:
            self._open[-1].text += "" if tag in INLINE else " "
            return
        values = {name: value or "" for name, value in attrs}
        for name in values.get("class", "").split():
            values["style"] = f"{values.get('style', '')};{self._sheet.get(name, '')}"
        above = self._open[-1]
        above.children += 1
        above.text += "" if tag in (*INLINE, *CLOSE) else " "
        named = values.get("class", "")
        hidden = tag in SILENT or "katex-html" in named or tag == "mjx-math"
        hidden |= (
            tag in INLINE
            and "math" not in named
            and ("hidden" in values or bool(UNSEEN.search(values.get("style", ""))))
        )
        named = " ".join(values.get(key, "") for key in ("class", "id", "role", "rel", "epub:type", "type"))
        script, noted = _script(tag, values, above), bool(NOTED.search(named))
        number = re.findall(r"\d+$", values.get("href", "")) if "noteref" in named else ()
        self._open.append(_Element("silent" if hidden else tag, script, noted, named=tuple(number)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].text += "" if tag in INLINE else " "
        self._open[-1].children += tag.rpartition(":")[2] in ("none", "mspace", "mrow", "mi")

    def handle_endtag(self, tag: str) -> None:
        tag = tag.rpartition(":")[2]
        names = [one.tag for one in self._open[1:]]
        if tag in names or (tag in SILENT and "silent" in names):
            while self._end() not in (tag, "silent"):
                pass

    def handle_data(self, data: str) -> None:
        if not data.strip() and any(one.tag == "math" for one in self._open):
            return
        self._open[-1].text += data.translate(dict.fromkeys(map(ord, OPTIONAL)))

    def _end(self) -> str:
        one = self._open.pop()
        if one.tag == "silent":
            return one.tag
        text = one.text
        bare = LEFT_OUT.sub("", text)
        said = any(map(str.isalnum, bare))
        if one.script and text.strip():
            text = f"/{text}" if one.script == "/" else f"{one.script}{{{text.strip()}}}"
            text = _optional(text) if one.note or not said else text
        elif (one.tag in LINKS or one.note) and (text.strip("[](). ") in one.named or _is_mark(text)):
            text = _optional(text)
        above = self._open[-1]
        above.text += text + ("" if one.tag in (*INLINE, *CLOSE) else " ")
        return one.tag


def _is_mark(text: str) -> bool:
    """Whether a link or a note contains no text except its number."""
    return bool(MARK.fullmatch(re.sub("[\ue000\ue001]", "", text)))


def _optional(text: str) -> str:
    inner = re.sub("[\ue000\ue001]", "", text)
    return f"{OPTIONAL[0]}{inner}{OPTIONAL[1]}"


def _script(tag: str, values: Mapping[str, str], above: _Element) -> str:
    """Where an element is set."""
    if tag in ("sup", "sub"):
        return "^" if tag == "sup" else "_"
    if above.children > 1 and above.tag in PLACES:
        return PLACES[above.tag]
    if above.children > 1 and above.tag in BOTH:
        return "_" if above.children == 2 else "^"
    if tag in INLINE:
        said = " ".join(values.get(name, "") for name in ("class", "style", "rend", "rendition"))
        raised, lowered = (any(one.search(said) for one in some) for some in ((RAISED, HIGHER), (LOWERED, LOWER)))
        return "^" if raised else "_" if lowered else ""
    return ""

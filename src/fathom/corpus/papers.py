"""Question-answer pairs made from a paper's own text, in the way GeoGalactica makes pairs from a bibliography.

The kinds of pairs:

| pair | question | answer |
| --- | --- | --- |
| title | an abstract | its title |
| abstract | a title | its abstract |
| caption | a sentence that names one figure or table; and the reverse | its caption |
| citation | a sentence that cites one work | the work's title |
| true_or_false | whether an abstract, or a cited work, belongs to a title or a sentence | true or false |

Titles and abstracts come from rows or from GROBID's TEI, the others from TEI alone. Which wording is used, and
whether a statement is true, depends on a hash of the paper alone.

`_References.paper` leaves out sentences that name several figures or works, or that contain the title of the work that
they cite; `_no_citation` numbers of equations, `_journals` works known by their journal. `_caption`, `sentences` and
`_fits` leave out captions and sentences that GROBID cut or joined. `ingest.py` passes the previous row, whose abstract
a false statement takes; `card.py` says how many pairs were made and kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias, get_args
from xml.etree.ElementTree import Element

from fathom.corpus.documents import ConversationMessage
from fathom.corpus.extraction import Extracted, IngestValues, tag_of
from fathom.corpus.tei import IDENTITY, Converter, parsed
from fathom.errors import DataError

Pair: TypeAlias = Literal["title", "abstract", "caption", "citation", "true_or_false"]
PAIRS: tuple[Pair, ...] = get_args(Pair)

WORDINGS: dict[str, tuple[str, ...]] = {
    "title": (
        "Write a title for the paper with this abstract.\n\n{0}",
        "{0}\n\nWhat is a fitting title for the paper that this abstract belongs to?",
        "Which title would you give a paper with the following abstract?\n\n{0}",
    ),
    "abstract": (
        "Write the abstract of a paper titled “{0}”.",
        "What could the abstract of “{0}” say?",
        "A paper is called “{0}”. Write its abstract.",
    ),
    "caption": (
        "A paper says: “{0}” Write the caption of the {1} that it refers to.",
        "Which caption could the {1} have that this sentence refers to?\n\n{0}",
    ),
    "sentence": (
        "Write a sentence of a paper that refers to the {1} with this caption.\n\n{0}",
        "A {1} has the caption “{0}” How could the text refer to it?",
    ),
    "citation": (
        "Which work is cited at [CITATION] in this sentence?\n\n{0}",
        "{0}\n\nWhat is the title of the work that belongs at [CITATION]?",
    ),
    "is_abstract": (
        "True or false: this is the abstract of the paper “{0}”.\n\n{1}",
        "Does this abstract belong to the paper “{0}”? Answer true or false.\n\n{1}",
    ),
    "is_cited": (
        "True or false: at [CITATION], this sentence cites “{0}”.\n\n{1}",
        "Is “{0}” the work that belongs at [CITATION]? Answer true or false.\n\n{1}",
    ),
}
OPEN, BETWEEN, CLOSE = "\ue000", "\ue001", "\ue002"
"""Around a reference in a text that is still to be cut into sentences: its number, and what it shows."""
MARK = re.compile(f"{OPEN}(\\d+){BETWEEN}([^{CLOSE}]*){CLOSE}")
ABBREVIATION = re.compile(
    r"\b(?:al|approx|ca|cf|ch|dr|e\.g|ed|eqs?|etc|figs?|i\.e|mrs?|ms|nos?|nr|pp?|prof|refs?|resp|sect?|st|tab|vol|vs)\.$",
    re.IGNORECASE,
)
INITIAL = re.compile(r"\b[A-Z]\.$")
"""What a full stop follows inside a sentence."""
END = re.compile(rf"[.!?][”\"')\]]*(?=\s+(?:[A-Z“\"(\[]|{OPEN}))")
LABEL = re.compile(
    r"^(?:(?:fig(?:ure)?|tab(?:le)?)\b\.?\s*(?:[A-Z]?\d+[a-z]?|[IVX]+)?|\d+)\s*[.:|–-]*\s*", re.IGNORECASE
)
VENUE = re.compile(r"\.\s+In\b:?.*$|\s+\|[^|]*$|^.*\b(?:19|20)\d\d\.\s+")
"""Behind a title, where GROBID takes the proceedings or the name of a site for a part of it; and authors and year
before it."""
JOURNAL = re.compile(r"^(?:Annals|Bulletin|Journal|Proceedings|Transactions)\b")
HEADING = re.compile(
    r"^(?:[\w-]+ ){1,6}(?:The|Since|To|We|Here|In|This|Our|These|For|An|It|As|If|When)\b|^([\w-]+) \1\b"
)
"""A heading without a full stop, which GROBID takes for the beginning of a sentence."""
FOOTNOTE = re.compile(
    r"(?:[a-z,] \d{1,2} ,?|[])]) ?(?:A|An|As|For|Here|In|It|Note|Our|See|That|The|These|This|We)\b"
    r"|[.?!] \d{1,2} [A-Z]|\w@\w"
)
"""A note or another sentence that GROBID takes for a part of this one, and a line of addresses."""
LETTERS = re.compile(r"(?:(?<!\S)[^\W\d_aAI](?!\S).*){4}")
"""A formula that came apart."""
CUT_LIST = re.compile(r"\b[\w.]+: [^:;]+; [\w.]+$")
"""A list of abbreviations whose last one is not explained."""
GOES_ON = (*"([,;'’",)
"""Behind a title's words they show, as small letters do, that these only begin the abstract's first sentence, unless
the title has an end."""
TITLE_ENDS = r"\s*\n|[.:]\s|(?<=[.?])\s"
NUMBERED = re.compile(r"\(\d+\)")
"""How equations and items are numbered, and rarely works."""
LEAST = {"title": 3, "abstract": 30, "caption": 5, "sentence": 8}
"""Words that each must have."""
MOST = {"title": 40, "abstract": 600, "caption": 150, "sentence": 80}


@dataclass
class Paper:
    """What a paper holds."""

    title: str = ""
    abstract: str = ""
    captions: list[tuple[str, str, str]] = field(default_factory=list)
    """A sentence, `figure` or `table`, and the caption of the one that it names."""
    citations: list[tuple[str, str]] = field(default_factory=list)
    """A sentence, and the title of the one work that it cites."""
    works: list[str] = field(default_factory=list)
    """Titles of all works that are cited."""


def extract(path: Path, settings: IngestValues) -> Extracted:
    """A TEI file as a paper in JSON."""
    root = parsed(path)
    if isinstance(root, Extracted):
        return root
    found = _References(root).paper()
    return Extracted("ok", json.dumps(asdict(found), ensure_ascii=False)) if found != Paper() else Extracted("empty")


def paper_of(row: Mapping[str, object], text_field: str = "text") -> Paper:
    """The paper in a row with a title and an abstract; a title that stands before the abstract is removed from it."""
    title = " ".join(str(row.get("title") or "").split())
    written = str(row.get("abstract") or "").strip() or str(row.get(text_field) or "").strip()
    abstract = " ".join(written.split())
    if not title or not abstract:
        raise DataError(f"no title and abstract: the record has {', '.join(map(str, row)) or 'nothing'}")
    if abstract.startswith(title):
        rest = abstract[len(title) :].lstrip(".:–—- ")
        words = r"\s+".join(map(re.escape, title.split()))
        apart = re.match(rf"{words}(?:{TITLE_ENDS})", written)
        if apart or (not rest[:1].islower() and not rest.startswith(GOES_ON)):
            abstract = rest
    return Paper(title, abstract)


def exchanges(
    paper: Paper, before: Paper | None, pairs: Sequence[str] = PAIRS
) -> Iterator[tuple[str, list[ConversationMessage]]]:
    """The question-answer pairs made from a paper, each with its kind.

    Args:
        paper: The paper.
        before: Another one, whose abstract a false statement may take; None if there is none.
        pairs: The kinds that are wanted.
    """
    title = paper.title if _fits("title", paper.title) else ""
    abstract = paper.abstract if _fits("abstract", paper.abstract) else ""
    if title and abstract and "title" in pairs:
        yield "title", _asked("title", title, abstract)
    if title and abstract and "abstract" in pairs:
        yield "abstract", _asked("abstract", abstract, title)
    if "caption" in pairs:
        for sentence, kind, caption in paper.captions:
            yield "caption", _asked("caption", caption, sentence, kind)
            yield "caption", _asked("sentence", sentence, caption, kind)
    if "citation" in pairs:
        for sentence, work in paper.citations:
            yield "citation", _asked("citation", work, sentence)
    if "true_or_false" in pairs:
        yield from (("true_or_false", one) for one in _statements(paper, title, abstract, before))


def _statements(paper: Paper, title: str, abstract: str, before: Paper | None) -> Iterator[list[ConversationMessage]]:
    """True/false questions on a paper's abstract and citations; the right answer is "true" for about half of them.
    Without another paper no abstract can be a wrong one, so none is asked for."""
    if title and abstract and before is not None and before.title != title and _fits("abstract", before.abstract):
        if _hash(title) % 2:
            yield _asked("is_abstract", "True.", title, abstract)
        else:
            yield _asked("is_abstract", f"False. It is the abstract of “{before.title}”.", title, before.abstract)
    for sentence, work in paper.citations:
        others = [one for one in paper.works if one != work]
        if others and _hash(sentence) % 2:
            yield _asked("is_cited", "True.", work, sentence)
        elif others:
            wrong = others[_hash(sentence + work) % len(others)]
            yield _asked("is_cited", f"False. It cites “{work}”.", wrong, sentence)


def _asked(wording: str, answer: str, *given: str) -> list[ConversationMessage]:
    choices = WORDINGS[wording]
    chosen = choices[_hash("\n".join(given)) // 2 % len(choices)]
    question = re.sub(r"\{(\d)\}", lambda field: given[int(field[1])], chosen)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _hash(text: str) -> int:
    return int.from_bytes(sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def _fits(kind: str, text: str) -> bool:
    """Whether a title, abstract, caption or sentence is fit for a question: complete, within length limits, and mostly
    words."""
    words = text.split()
    plain = sum(word.strip("“”\"'()[],.;:!?").isalpha() for word in words)
    whole = all(text.count(one) == text.count(other) for one, other in ("()", "[]", "“”"))
    whole = whole and (kind == "abstract" or text.count('"') % 2 == 0)
    begun = text[:1].isupper() or text[:1].isdigit() or kind != "caption"
    whole = whole and (kind != "sentence" or not LETTERS.search(text))
    return begun and whole and LEAST[kind] <= len(words) <= MOST[kind] and 2 * plain > len(words)


class _References(Converter):
    """A TEI document in which references stay marked until the text has been cut into sentences."""

    def __init__(self, root: Element) -> None:
        super().__init__(root, sentinels=False)
        journals = _journals(root)
        titles = {name: VENUE.sub("", title) for name, title in self.titles.items() if name not in journals}
        self.titles = {name: title for name, title in titles.items() if not JOURNAL.match(title)}
        self._body = root.find(".//{*}text//{*}body")
        self._head = root
        self._targets: list[str] = []

    def reference(self, element: Element, shown: str, wanted: list[str] | None) -> str:
        """The text of a reference, enclosed in a mark that holds the index of its target."""
        if wanted is None:
            return shown
        self._targets.append((element.get("target") or "").removeprefix("#"))
        return f"{OPEN}{len(self._targets) - 1}{BETWEEN}{shown}{CLOSE}"

    def paper(self) -> Paper:
        """What the document holds."""
        found = Paper(works=sorted({title for title in self.titles.values() if _fits("title", title)}))
        title = self._head.find(".//{*}titleStmt//{*}title")
        abstract = self._head.find(".//{*}profileDesc//{*}abstract")
        found.title = "" if title is None else self.plain(title)
        if abstract is not None:
            found.abstract = " ".join(self.plain(one) for one in abstract.iter() if tag_of(one) == "p")
        captions = {name: self._caption(block) for name, block in self.blocks.items()}
        found_sentences = [one for one in self._sentences() if not FOOTNOTE.search(MARK.sub(r"\2", one))]
        wrong = self._no_citation(found_sentences)
        for sentence in found_sentences:
            marks = [(self._targets[int(number)], shown) for number, shown in MARK.findall(sentence)]
            named = [target for target, _ in marks if target in captions]
            cited = [target for target, _ in marks if target in self.titles]
            if len(marks) == len(named) == 1 and _fits("caption", captions[named[0]][1]):
                text = MARK.sub(r"\2", sentence)
                if _fits("sentence", text):
                    found.captions.append((text, *captions[named[0]]))
            elif len(marks) == len(cited) == 1 and self.titles[cited[0]] in found.works and not wrong(marks[0][1]):
                text = MARK.sub("[CITATION]", sentence)
                if _fits("sentence", text) and self.titles[cited[0]].lower() not in text.lower():
                    found.citations.append((text, self.titles[cited[0]]))
        return found

    def _no_citation(self, found: Sequence[str]) -> Callable[[str], bool]:
        """Returns a test whether the text of a citation is an equation number instead: `(3)` is one if most citations
        look different."""
        works = [
            shown for one in found for number, shown in MARK.findall(one) if self._targets[int(number)] in self.titles
        ]
        rare = 2 * sum(bool(NUMBERED.fullmatch(shown.strip())) for shown in works) < len(works)
        return lambda shown: rare and NUMBERED.fullmatch(shown.strip()) is not None

    def _caption(self, block: Element) -> tuple[str, str]:
        """The kind of a block, `figure` or `table`, and its caption without the label."""
        kind = "table" if block.get("type") == "table" or block.find(".//{*}table") is not None else "figure"
        said = (LABEL.sub("", self.plain(one)).strip() for one in block if tag_of(one) in ("head", "figDesc"))
        parts = [part for part in said if part]
        if any(part[0].islower() or not part[0].isalnum() for part in parts):
            return kind, ""  # GROBID cut it in the middle
        if any(CUT_LIST.search(part) or ABBREVIATION.search(part.rstrip(".") + ".") for part in parts):
            return kind, ""  # or before its end
        return kind, " ".join([part if part.endswith((".", "?", "!", ":")) else f"{part}." for part in parts])

    def _sentences(self) -> Iterator[str]:
        """The sentences of the body's paragraphs, with references as marks."""
        for paragraph in _paragraphs(self._body):
            text = re.sub(r"\s+", " ", self.inline(paragraph, [])).strip()
            yield from sentences(re.sub(r"(?<=[(\[]) | (?=[)\]])", "", text))


def _journals(root: Element) -> set[str]:
    """The ids of cited works without a title of their own: GROBID knows only the journal or the volume that they are
    part of."""
    found = set()
    for work in root.iter():
        if tag_of(work) == "biblStruct":
            levels = {
                one.get("level") for one in work.iter() if tag_of(one) == "title" and "".join(one.itertext()).strip()
            }
            part = any(tag_of(one) == "biblScope" for one in work.iter())
            if "a" not in levels and ("m" not in levels or part):
                found.add(work.get(IDENTITY, ""))
    return found


def _paragraphs(element: Element | None) -> Iterator[Element]:
    """The paragraphs inside an element, without those of figures and notes."""
    for child in () if element is None else element:
        if tag_of(child) == "p":
            yield child
        elif tag_of(child) not in ("figure", "note"):
            yield from _paragraphs(child)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a paragraph, without headings and without those that do not begin with a capital or do not end
    with `.`, `!`, `?`, `.”` or `.)`."""
    start = 0
    for end in [*(match.end() for match in END.finditer(text)), len(text)]:
        piece = text[start:end].strip()
        if end < len(text) and (ABBREVIATION.search(piece) or INITIAL.search(piece)):
            continue
        start = end
        if piece[:1].isupper() and not HEADING.match(piece) and piece.endswith((".", "!", "?", ".”", ".)")):
            yield piece

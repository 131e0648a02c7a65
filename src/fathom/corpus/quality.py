"""Gopher's quality rules: the measures of a text, and the rules that it breaks.

`min_stop_words` counts eight English words, so by default it drops most texts in other languages; with
`filter.languages` it counts the stop words of each document's own language, if there is a list. `clean.py` drops the
documents, and lists each with the first rule and all rules that it broke.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fathom.corpus.recipe import Filter
from fathom.corpus.words import STANDING_ALONE, Numbers, Words, run_numbers, words_of

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
ENGLISH = "en"
"""The language of these."""
LISTS = dict(
    re.findall(
        r"(\w\w)=(\w+)",
        "af=Afrikaans an=Aragonese ar=Arabic az=Azerbaijani be=Belarusian bg=Bulgarian bn=Bengali br=Breton "
        "bs=Bosnian ca=Catalan cs=Czech cy=Welsh da=Danish de=German el=Greek eo=Esperanto es=Spanish et=Estonian "
        "eu=Basque fa=Persian fi=Finnish fr=French ga=Irish gl=Galician gu=Gujarati he=Hebrew hi=Hindi hr=Croatian "
        "ht=Haitian hu=Hungarian hy=Armenian id=Indonesian is=Icelandic it=Italian jv=Javanese ka=Georgian kk=Kazakh "
        "kn=Kannada ko=Korean ku=Kurdish ky=Kyrgyz la=Latin lb=Luxembourgish lt=Lithuanian lv=Latvian mk=Macedonian "
        "ml=Malayalam mr=Marathi ms=Malay mt=Maltese nb=Norwegian_Bokmal ne=Nepali nl=Dutch nn=Norwegian_Nynorsk "
        "no=Norwegian_Bokmal oc=Occitan pa=Western_Panjabi pl=Polish pt=Portuguese qu=Quechua ro=Romanian ru=Russian "
        "sk=Slovak sl=Slovenian sq=Albanian sr=Serbian sv=Swedish sw=Swahili ta=Tamil te=Telugu tl=Tagalog tr=Turkish "
        "uk=Ukrainian ur=Urdu vi=Vietnamese vo=Volapuk wa=Walloon",
    )
)
"""jusText's lists of the other languages, with the most frequent words first."""
FREQUENT = 50
"""Words of such a list that count as stop words."""
BULLETS = ("-", "*", "•", "‣", "◦", "▪", "●", "–")
ELLIPSES = ("...", "…")
LETTER = re.compile(r"[^\W\d_]")
TOP_RUNS, REPEATED_RUNS = (2, 3, 4), (5, 6, 7, 8, 9, 10)


@dataclass(frozen=True)
class Broken:
    """A rule that a document breaks, with the measured value and the limit."""

    rule: str
    value: object = None
    limit: object = None


def broken_rules(text: str, limits: Filter, language: str = ENGLISH) -> list[Broken]:
    """Every rule that a text breaks, in the order of the recipe's keys."""
    return [
        Broken(rule, round(value, 6), limit)
        for rule, value in measures(text, limits, language)
        if (limit := getattr(limits, rule)) is not None
        and (value < limit if rule.startswith("min_") else value > limit)
    ]


def measures(text: str, limits: Filter, language: str = ENGLISH) -> Iterator[tuple[str, float]]:
    """(rule, value) for each rule that can judge a text in this language, also for some that are off, which
    `broken_rules` skips."""
    words = words_of([text])
    count = len(words.numbers)
    yield "min_words", count
    yield "max_words", count
    if not count:
        return
    yield from _lengths(text, words)
    yield "max_symbol_ratio", max(text.count("#"), text.count("...") + text.count("…")) / count
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    yield "max_bullet_lines", sum(line.startswith(BULLETS) for line in lines) / len(lines)
    yield "max_ellipsis_lines", sum(line.endswith(ELLIPSES) for line in lines) / len(lines)
    spaced = text.split()
    yield "min_alphabetic_words", sum(1 for word in spaced if word.isalpha() or LETTER.search(word)) / len(spaced)
    if limits.min_stop_words is not None and len(wanted := stop_words(language)):
        yield "min_stop_words", int(np.isin(wanted, words.numbers).sum())
    for name, pieces in (("line", lines), ("paragraph", re.split(r"\n\s*\n", text.strip()))):
        again, characters = repeated(pieces)
        yield f"max_duplicate_{name}s", again / len(pieces)
        yield f"max_duplicate_{name}_characters", characters / max(sum(map(len, pieces)), 1)
    yield from _runs(words, limits)


def _lengths(text: str, words: Words) -> Iterator[tuple[str, float]]:
    """The mean length of words, unless most words are single characters: in Chinese, Japanese and Thai each character
    counts as a word."""
    alone = 0
    if not text.isascii():  # signs of these scripts, such as ฿ and ・, are no words
        single = words.starts[words.ends - words.starts == 1].tolist()
        alone = len(STANDING_ALONE.findall("".join(text[start] for start in single)))
    others = len(words.numbers) - alone
    if others >= alone:
        mean = (int((words.ends - words.starts).sum()) - alone) / others
        yield "min_word_length", mean
        yield "max_word_length", mean


@functools.cache
def stop_words(language: str) -> Numbers:
    """The stop words of a language; none if there is no list, as for Chinese, Japanese and Thai."""
    listed: Sequence[str] = STOP_WORDS if language == ENGLISH else ()
    if language in LISTS:
        data = pkgutil.get_data("justext", f"stoplists/{LISTS[language]}.txt") or b""
        listed = data.decode("utf-8").lower().split("\n")[:FREQUENT]
    return np.unique(words_of([" ".join(listed)]).numbers)


def repeated(pieces: list[str]) -> tuple[int, int]:
    """The number of pieces (such as lines) that repeat an earlier piece, and the number of characters in these
    repetitions."""
    counts = Counter(pieces)
    return len(pieces) - len(counts), sum((count - 1) * len(piece) for piece, count in counts.items() if count > 1)


def _runs(words: Words, limits: Filter) -> Iterator[tuple[str, float]]:
    lengths = words.ends - words.starts  # [W]
    total = int(lengths.sum())
    if not total:
        return
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for size in TOP_RUNS:
        if getattr(limits, f"max_top_{size}gram") is not None:
            yield f"max_top_{size}gram", _top(words.numbers, ends, size) / total
    for size in REPEATED_RUNS:
        if getattr(limits, f"max_duplicate_{size}grams") is not None:
            covered = _covered(words.numbers, lengths, size)
            yield f"max_duplicate_{size}grams", covered / total
            if not covered:  # if no run of this length repeats, no longer run does
                return


def _top(numbers: Numbers, ends: NDArray[np.int64], size: int) -> int:
    """The number of characters in all occurrences of the most frequent run of words (on a tie, the longest); 0 if no
    run occurs twice."""
    if len(numbers) <= size:
        return 0
    runs = run_numbers(numbers, size)
    _, first, counts = np.unique(runs, return_index=True, return_counts=True)
    most = int(counts.max())
    if most < 2:
        return 0
    places = first[counts == most]
    return most * int((ends[places + size] - ends[places]).max())


def _covered(numbers: Numbers, lengths: NDArray[np.int64], size: int) -> int:
    """The number of characters in words inside runs that repeat an earlier run of the text; each word counts once."""
    if len(numbers) <= size:
        return 0
    runs = run_numbers(numbers, size)
    first = np.unique(runs, return_index=True)[1]
    if len(first) == len(runs):
        return 0
    again = np.ones(len(runs), np.int64)
    again[first] = 0
    edges = np.zeros(len(numbers) + 1, np.int64)
    edges[: len(again)] += again
    edges[size:] -= again
    return int(lengths[np.cumsum(edges[:-1]) > 0].sum())


@functools.cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def language_of(text: str) -> str:
    """The ISO 639-1 code of the language that a text is most likely in, by its first 10,000 characters."""
    return str(_identifier().classify(text[:10_000])[0])

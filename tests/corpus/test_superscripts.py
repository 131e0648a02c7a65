"""From markup to the shard: no reader joins a superscript or a subscript to the number next to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.corpus.superscripts import as_script, may_be_note
from fathom.data.shards import TokenDataset
from fathom.data.tokenizer import plain_encoder
from tests.corpus.files import epub, jats, pdf, tei, write
from tests.corpus.prose import Prose, recipe_values
from tests.data.corpora import stream

HIGH, LOW = str.maketrans("0123456789-n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ"), str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
Pair = tuple[str, str]
"""What is written, and what a reader should see."""


@pytest.mark.parametrize(
    ("text", "script", "before", "shown"),
    [
        *(
            ("32", "super", "2", "³²"),
            ("−3", "super", "10", "⁻³"),
            ("n+1", "super", "x", "ⁿ⁺¹"),
            ("2", "sub", "H", "₂"),
        ),
        *(("a/b", "super", "2", "^{a/b}"), ("max", "sub", "x", "_{max}"), ("1.5", "super", "2", "^{1.5}")),
        *(("th", "super", "19", "th"), ("th", "super", "x", "^{th}"), ("TM", "super", "Word", "™")),
        *(("°", "super", "10", "°"), (" ", "super", "2", ""), ("x²", "super", "e", "^{x²}")),
    ],
)
def test_as_script(text: str, script: Any, before: str, shown: str) -> None:
    assert as_script(text, script, before) == shown


def test_what_may_be_a_note() -> None:
    assert all(may_be_note("2", before) for before in ("word", "in 1999", "so."))
    assert not any(may_be_note("2", before) for before in ("km", "x", "10", "61999", "")) and not may_be_note(
        "n", "word"
    )


def drawn(chance: random.Random) -> Iterator[tuple[str, str, str, str]]:
    """Two numbers, and the second above and below the line."""
    while True:
        a, b = str(chance.randrange(2, 999)), str(chance.randrange(1, 99))
        yield a, b, b.translate(HIGH), b.translate(LOW)


def powers(chance: random.Random) -> Iterator[Pair]:
    """Powers, indices, fractions and entities in HTML."""
    for a, b, high, low in drawn(chance):
        yield from (
            (f"{a}<sup>{b}</sup>", f"{a}{high}"),
            (f"{a}<SUP class='exp'> {b} </SUP>7", f"{a}{high}7"),
            (f"10<sup>&minus;{b}</sup>", f"10⁻{high}"),
            (f"10<sup><i>-{b}</i></sup>", f"10⁻{high}"),
            (f"x<sub>{b}</sub>{a}", f"x{low}{a}"),
            (f"x<sub>{b}</sub><sup>{b}</sup>", f"x{low}{high}"),
            (f"{a}<sup>{b}/{a}</sup>", f"{a}^{{{b}/{a}}}"),
            (f"{a} <sup>{b}</sup>/<sub>{b}</sub>", f"{a} {high}/{low}"),
            (f"{a}&frac12;", f"{a}½"),
            (f"{a}&sup2; &#179;", f"{a}² ³"),
            (f"{a}<span style='vertical-align: super; font-size: 70%'>{b}</span>", f"{a}{high}"),
            (f"{a}<span style='position: relative; top: -0.5em'>{b}</span>", f"{a}{high}"),
            (f"x<span style='font-size: 70%; position:relative; bottom:-2px'>{b}</span>{a}", f"x{low}{a}"),
            (f"{a}<span style='position: relative; top: 0'>{b}</span>", f"{a}{b}"),
            (f"{a}<span style='font-variant-position: super'>{b}</span>", f"{a}{high}"),
            (f"x<span style='baseline-shift: sub'>{b}</span>{a}", f"x{low}{a}"),
            (f"<a href='#s'>{a}<sup>{b}</sup></a>", f"{a}{high}"),
            (f"<a href='/wiki/Power'>10</a><sup><a href='/wiki/Exponent'>{b}</a></sup>", f"10{high}"),
            (f"e<sup>{b}<sub>{b}</sub></sup>", f"e^{{{b}{low}}}"),
        )


def notes(chance: random.Random) -> Iterator[Pair]:
    """Marks of notes in HTML, which are left out."""
    while True:
        a, b = str(chance.randrange(1000, 2030)), str(chance.randrange(1, 99))
        yield from (
            (f"{a}<sup><a href='#n{b}'>{b}</a></sup>", a),
            (f"{a}<a href='x.html#n{b}'><sup>{b}</sup></a>", a),
            (f"{a}<sup class='reference'>[{b}]</sup>", a),
            (f"{a}<a role='doc-noteref' href='y'><sup>{b}</sup></a>", a),
            (f"{a}<sup><xref>{b}</xref></sup>", a),
        )


def in_tei(chance: random.Random) -> Iterator[Pair]:
    """The same in TEI."""
    for a, b, high, low in drawn(chance):
        yield from (
            (f"{a}<hi rend='superscript'>{b}</hi>", f"{a}{high}"),
            (f"{a}<hi rend='italic sup'>&#8722;{b}</hi>", f"{a}⁻{high}"),
            (f"x<hi rend='subscript'>{b}</hi>{a}", f"x{low}{a}"),
            (f"{a}<hi rend='superscript'><ref target='#n' type='foot'>{b}</ref></hi>", a),
            (f"{a}<ref type='bibr' target='#b{b}'>{b}</ref>", a),
            (f"{a}<note place='foot'>{b} km</note>", f"{a} {b} km"),
        )


def in_jats(chance: random.Random) -> Iterator[Pair]:
    """Powers, formulas, entities and marks of notes in JATS."""
    for a, b, high, low in drawn(chance):
        yield from (
            (f"{a}<sup>{b}</sup> and {a}<sup>{b}/{a}</sup>", f"{a}{high} and {a}^{{{b}/{a}}}"),
            (f"10<sup><italic>&minus;{b}</italic></sup>&nbsp;m of x<sub>{b}</sub>{a}", f"10⁻{high} m of x{low}{a}"),
            (f"{a}<xref ref-type='bibr' rid='b'><sup>{b}</sup></xref>", a),
            (f"{a}<sup><xref ref-type='bibr' rid='b'>{b}</xref></sup>", a),
            (f"{a}<xref ref-type='fn' rid='n'>{b}</xref>", a),
            (f"in <xref ref-type='fig' rid='f'>Fig. {b}</xref>", f"in Fig. {b}"),
            (
                f"<inline-formula><alternatives><tex-math>x</tex-math><mml:math alttext='r^{{{b}}}'><mml:mi>r</mml:mi>"
                "</mml:math></alternatives></inline-formula>", f"\\(r^{{{b}}}\\)",
            ),
            (f"<inline-formula><tex-math>\\begin{{document}}$r^{{{a}}}$\\end{{document}}</tex-math></inline-formula>",
             f"\\(r^{{{a}}}\\)"),
        )  # fmt: skip


def sentences(pairs: Iterator[Pair], prose: Prose) -> tuple[list[str], list[str]]:
    """Paragraphs of 20 words with such pieces between them; and how they read."""
    written, shown = [], []
    for _ in range(12):
        words = [prose.sentence(5) for _ in range(4)]
        pieces = [next(pairs) for _ in words]
        written.append(" ".join(f"{words} {piece}" for words, (piece, _) in zip(words, pieces, strict=True)))
        shown.append(" ".join(f"{words} {piece}" for words, (_, piece) in zip(words, pieces, strict=True)))
    return written, shown


def web(paragraphs: list[str]) -> str:
    return f"<html><body><article>{''.join(f'<p>{one}</p>' for one in paragraphs)}</article></body></html>"


def learned(folder: Path, tokenizer: str, ingest: dict[str, Any]) -> str:
    """What a training run reads: the shards of a folder, decoded."""
    off = dict.fromkeys(("min_stop_words", "min_alphabetic_words", "max_symbol_ratio"))
    values = recipe_values(
        {"a": [folder]}, ingest=ingest, filter=off, tokenize={"tokenizer": tokenizer, "held_out": 0.0}
    )
    report = build(parse_corpus_recipe(values), folder.parent / "out")
    ids = stream(TokenDataset.open(report.directory / "shards", "train", "a"))
    assert report.card.read_text()
    return plain_encoder(Path(tokenizer) / "tokenizer.json").decode(np.asarray(ids).tolist())


def pages(folder: Path, copies: int) -> list[str]:
    """Files of every kind, each of 48 pieces of markup; and the paragraphs that a reader should see."""
    prose, chance, expected = Prose(5), random.Random(7), []
    kinds: list[tuple[str, Callable[[random.Random], Iterator[Pair]]]] = [("html", powers), ("html", notes)]
    kinds += [("tei.xml", in_tei), ("xml", in_jats), ("epub", powers)]
    for number in range(copies * len(kinds)):
        suffix, kind = kinds[number % len(kinds)]
        written, shown = sentences(kind(chance), prose)
        paragraphs = "".join(f"<p>{one}</p>" for one in written)
        whole: bytes | str = web(written)
        if kind is in_tei:
            whole = tei(f"<div>{paragraphs}</div>")
        elif kind is in_jats:
            whole = jats(f"<sec>{paragraphs}</sec>")
        elif suffix == "epub":
            whole = epub([web(written[:6]), web(written[6:])])
        write(folder / f"{number}.{suffix}", whole)
        expected += shown
    return expected


@pytest.mark.parametrize("reader", ["plain", "trafilatura"])
def test_numbers_survive_from_a_page_to_the_shard(reader: str, tokenizer: str, tmp_path: Path) -> None:
    """And so they do from TEI, JATS and EPUB; what may be a note is kept and counted. As a control, the numbers without
    the signs are not there."""
    if reader == "trafilatura":
        pytest.importorskip("trafilatura")
    expected = pages(tmp_path / "in", 1)
    bare = "The year 1999<sup>2</sup>, a word<sup>3</sup> of 5 km<sup>2</sup>"
    write(tmp_path / "in" / "note.html", web([Prose(6).document(60), bare]))
    expected.append("The year 1999², a word³ of 5 km²")
    text = learned(tmp_path / "in", tokenizer, {"html": reader})
    assert "2 superscripts may be marks of notes" in (tmp_path / "out" / "card.md").read_text()
    assert [one for one in expected if one not in text] == []
    assert next(one for one in expected if "³" in one).translate({ord("³"): "3"}) not in text


@pytest.mark.slow
def test_ten_thousand_pieces_of_markup_survive(tokenizer: str, tmp_path: Path) -> None:
    """None is altered or lost from HTML, TEI, JATS and EPUB to the decoded shard."""
    expected = pages(tmp_path / "in", 42)
    text = learned(tmp_path / "in", tokenizer, {"html": "plain"})
    assert 4 * len(expected) >= 10_000 and [one for one in expected if one not in text] == []


def test_numbers_survive_from_a_pdf(tokenizer: str, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    lines, shown = [], []
    chance = random.Random(3)
    for word in Prose(6).words[:20]:
        a, b = str(chance.randrange(2, 2030)), str(chance.randrange(1, 99))
        lines.append(f"{word} has {a}^{b}^ bytes of {word}, 10^-{b}^ of x_{b}_ and a third ^{b}^H in it")
        high, low = b.translate(HIGH), b.translate(LOW)
        shown.append(f"{word} has {a}{high} bytes of {word}, 10⁻{high} of x{low} and a third {high}H in it")
    write(tmp_path / "in" / "a.pdf", pdf([lines]))
    text = " ".join(learned(tmp_path / "in", tokenizer, {"html": "plain"}).split())
    assert [one for one in shown if one not in text] == []

"""Numbers that a reader alters or loses are seen, and those that it keeps in another spelling are not accused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fathom.corpus import sandbox
from fathom.corpus.fidelity import compared
from fathom.corpus.html import all_text
from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from tests.corpus.files import write
from tests.corpus.prose import Prose, recipe_values
from tests.corpus.test_superscripts import notes, powers, sentences, web

LOSES = """
from fathom.corpus import html, sandbox
from fathom.corpus.extraction import Extracted
def extract(path, settings):
    return Extracted("ok", html.visible_text(html.decode(path.read_bytes())))
sandbox.EXTRACTORS["html"] = extract
sandbox.serve()
"""
"""A reader that takes tags away, so that 2<sup>32</sup> becomes 232."""
FORMULA = (
    "<p>the radius is <math{}><mi>r</mi><msup><mn>10</mn><mrow><mo>−</mo><mn>15</mn></mrow></msup></math> metres "
    "in the <math><msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup><mfrac><mn>3</mn><mn>4</mn></mfrac></math> way</p>"
)


def test_what_the_readers_keep_is_not_accused() -> None:
    for number, kind in enumerate((powers, notes)):
        page = web(sentences(kind(random.Random(number)), Prose(number))[0])
        found = compared([page], all_text(page))
        assert found.wrong == 0 and found.numbers >= 40, found.examples
    for formula in (FORMULA.format(""), FORMULA.format(r" alttext='r=10^{-15}'")):
        found = compared([formula], all_text(formula))
        assert (found.numbers, found.wrong) == (4, 0), found.examples


@pytest.mark.parametrize(
    ("page", "text", "wrong"),
    [("of all 2<sup>32</sup> bytes in it", "of all 232 bytes in it", 1),
     ("of all 2<sup>32</sup> bytes in it", "of all 2³² bytes in it", 0),
     ("of all 10<sup>&minus;3</sup> and 5 bytes in it", "of all 10-3 and 5 bytes in it", 1),
     ("of all 1,234.5 bytes in it", "of all 1,234 bytes in it", 1), ("of all 7 bytes in it", "of all bytes in it", 1),
     ("of all 7 bytes in it", "something else of these", 0),
     ("since the year 1999<a href='#n'>2</a> or so", "since the year 1999 or so", 0),
     ("since the year 1999<sup><a href='#n'>2</a></sup> or so", "since the year 19992 or so", 1),
     ("in the maypole <a epub:type='noteref' href='#n1108'>1108</a> in the", "in the maypole in the", 0),
     ("in the maypole <a epub:type='noteref' href='#n7'>1884</a> in the", "in the maypole in the", 1),
     ("in the maypole <a class='reference' href='#n'>1998</a> in the", "in the maypole in the", 1),
     ("<tei>of all 2<hi rend='superscript'>32</hi> bytes in it</tei>", "of all 232 bytes in it", 1),
     (FORMULA.format(""), "the radius is metres in the way", 4)],
)  # fmt: skip
def test_altered_and_lost_numbers(page: str, text: str, wrong: int) -> None:
    assert compared([page], text).wrong == wrong


def test_the_card_sees_a_lost_exponent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says 0 of the pages as they are read, and quotes what another reader loses."""
    for number in range(3):
        write(
            tmp_path / "in" / f"{number}.html",
            web([Prose(number).document(60), "and in all 2<sup>32</sup> bytes of it"]),
        )
    for program, said in ((sandbox.CHILD, "lost: 0 of 3,"), (LOSES, "lost: 3 of 3,")):
        monkeypatch.setattr(sandbox, "CHILD", program)
        values = recipe_values({"a": [tmp_path / "in"]}, ingest={"html": "plain"}, filter={"min_stop_words": None})
        card = build(parse_corpus_recipe(values), tmp_path / said[6:7]).card.read_text()
        assert said in card and ("in all 232 bytes of" in card) == (program == LOSES)

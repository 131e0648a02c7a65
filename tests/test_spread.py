"""What the tutorial says of `make specialise` is what its log says, and the picture is that of the log."""

from __future__ import annotations

import copy
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import spread

from fathom.report.files import read_json

CELLS = [
    {"threads": 1, "seed": 0, "asked": 180, "right": [45, 90], "intervals": [[0.2, 0.3], [0.4, 0.6]], "p": 0.001},
    {"threads": 2, "seed": 0, "asked": 180, "right": [54, 60], "intervals": [[0.2, 0.4], [0.3, 0.4]], "p": 0.4},
]


def test_the_sentence_is_made_of_the_log() -> None:
    assert spread.sentence({"cells": CELLS}) == (
        "In 2 runs (1 training seed, 1 and 2 threads) the expert answers 33.3 to 50.0 % of the 180 uncontaminated "
        "questions rightly (mean 41.7 %), the base 25.0 to 30.0 %. The expert is significantly better in 1 of 2 runs."
    )


def test_the_page_quotes_its_log() -> None:
    log = read_json(spread.LOG)
    page = Path(spread.PAGE).read_text(encoding="utf-8")
    between = page.split(spread.BEGIN)[1].split(spread.END)[0]
    assert spread.sentence(log) in between and spread.PICTURE.read_text(encoding="utf-8") == spread.picture(log)
    other = copy.deepcopy(log)
    other["cells"][0]["right"][1] += 1
    assert spread.sentence(other) not in between, "a log of other numbers makes another sentence"


def test_the_picture_is_an_image_of_its_own() -> None:
    """Without a namespace and colours a browser shows nothing in its place."""
    root = ElementTree.fromstring(spread.PICTURE.read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "--series-0:" in (root[0].text or "")

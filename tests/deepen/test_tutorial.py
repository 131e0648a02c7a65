"""The tutorial on deepening shows what the command prints, word for word and number for number, for SmolLM2."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from fathom.cli.deepen import _words
from fathom.deepen.heal import Road
from fathom.deepen.request import parse_request
from fathom.deepen.write import Deepened, Sizes, deeper_config
from fathom.evaluation.deepened import Effect, Speed
from fathom.evaluation.results import ScoreGap
from fathom.models import FathomConfig

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "deepen.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S)
WIDEST = 76
SMOLLM2 = FathomConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    qk_norm="none",
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
"""The sizes in its config.json."""
CONTROL = "deep-control"


def commands() -> list[list[str]]:
    """The page's commands, as words."""
    text = "\n".join(body.replace("\\\n", " ") for language, body in BLOCKS if not language)
    return [shlex.split(line) for line in text.splitlines() if line.startswith("fathom ")]


def shown() -> list[str]:
    """The page's outputs, with folded lines as one; `console` is that of a run whose result is its own."""
    return [re.sub(r"\n  \(", " (", body).rstrip("\n") for language, body in BLOCKS if language in ("text", "console")]


def test_the_output_of_deepen() -> None:
    words = commands()[0]
    given = {flag: words[words.index(flag) + 1] for flag in ("--with", "--layers", "--out")}
    request, out = parse_request(given["--with"], given["--layers"]), Path(given["--out"])
    sizes = Sizes.of(SMOLLM2), Sizes.of(deeper_config(SMOLLM2, request))
    made = Deepened(out, request.name, out / "heal.yaml", *sizes, deviation=0, exact=True, tokenizer=True)
    assert _words(made, Road(out, words[2])) == shown()[0]
    assert _words(made, Road(Path("other"), words[2])) != shown()[0]


def test_the_commands_are_those_that_are_printed() -> None:
    road = Road(Path("deep"), commands()[0][2])
    printed = [
        shlex.split(one) for one in (road.prepare.replace("TEXT", "docs"), road.train, road.control, road.report)
    ]
    assert [sorted(words) for words in commands()[2:]] == [sorted(words) for words in printed]


def test_the_sentences_of_a_report() -> None:
    better, unsure = (
        ScoreGap("difference", *gap, 0.95, 9, None) for gap in ((-0.0123, -0.0171, -0.0075), (0, -0.002, 0.0031))
    )
    effects = [
        Effect("domain", "bits_per_byte", CONTROL, better, "better"),
        Effect("general", "bits_per_byte", CONTROL, unsure, "not significant"),
    ]
    said = [*map(str, effects), Speed(1.18, 1.15, 1.21, "process", 20).sentence(CONTROL)]
    assert said == shown()[1].splitlines()


def test_no_line_is_cut_on_the_site() -> None:
    lines = [line for _, body in BLOCKS for line in body.splitlines()]
    assert len(lines) > 20 and max(map(len, lines)) <= WIDEST

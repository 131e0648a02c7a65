"""Papers as questions: the pairs of a row and of a TEI file, and what no pair is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fathom.corpus.papers import PAIRS, Paper, exchanges, extract, paper_of, sentences
from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.errors import DataError, SettingsError
from fathom.report.results import restored
from tests.corpus.files import tei, write
from tests.corpus.prose import recipe_values, write_jsonl

ABSTRACT = " ".join(
    ["We measure the depth of rivers with rope and lead, and compare what we find with older maps."] * 3
)
OTHER = " ".join(["Sound reaches the bed of a lake and returns, so that its time tells how deep the water is."] * 3)
WORKS = (
    '<biblStruct xml:id="b0"><analytic><title level="a">Soundings of the lower Po. In Maps</title></analytic>'
    "</biblStruct>"
    '<biblStruct xml:id="b1"><analytic><title level="a">Rope and lead in practice</title></analytic></biblStruct>'
    '<biblStruct xml:id="b2"><monogr><title level="m">Bulletin of the River Society</title><imprint>'
    '<biblScope unit="page">3</biblScope></imprint></monogr></biblStruct>'
)
FIGURE = (
    '<figure xml:id="f0"><head>Figure 1 .</head><figDesc>Depth of the river at nine bridges.</figDesc></figure>'
    '<figure xml:id="f1"><head>Figure 2</head><figDesc>-waves that a tool cut from their caption.</figDesc></figure>'
    '<figure xml:id="f2"><figDesc>Depth of the river at all bridges. RI: river; LE: lead; TIBI.MCV</figDesc></figure>'
    '<figure xml:id="f3"><figDesc>Depth of the river at all bridges RIVERS (2003) Nr.</figDesc></figure>'
)


def cited(number: int) -> str:
    return f'<ref type="bibr" target="#b{number}">[{number}]</ref>'


def shown(number: int) -> str:
    return f'<ref type="figure" target="#f{number}">{number + 1}</ref>'


def paper(tmp_path: Path, *paragraphs: str) -> Paper:
    body = "".join(f"<p>{one}</p>" for one in paragraphs)
    found = extract(write(tmp_path / "a.tei.xml", tei(f"<div>{body}</div>{FIGURE}", back=WORKS)), {})
    assert found.status == "ok", found
    return restored(Paper, json.loads(found.text))


def test_the_pairs_of_rows() -> None:
    """The text of a row may begin with its title; a statement is false with the abstract of the row before."""
    first = paper_of({"title": "Depths of old rivers", "text": f"Depths of old rivers\n\n{ABSTRACT}"})
    assert first == Paper("Depths of old rivers", ABSTRACT)
    same = {"title": "Depths of old rivers", "abstract": "Depths of old rivers vary with the rain."}
    assert paper_of(same).abstract == same["abstract"]
    dotted = {"title": "Node", "text": "Node.js reads a river."}
    assert paper_of(dotted).abstract == dotted["text"]
    for between in ("\n\n", " \n", ". ", ": "):
        for text in ("mRNA levels vary.", "α-Synuclein varies.", "(1) p53 varies."):
            row = {"title": "Depths of old  rivers", "text": f"Depths of\nold rivers{between}{text}"}
            assert paper_of(row).abstract == text, row
    assert paper_of({"title": "Old rivers.", "abstract": "Old rivers. p53 varies."}).abstract == "p53 varies."
    made = dict(exchanges(first, None))
    assert made.keys() == {"title", "abstract"}
    assert ABSTRACT in made["title"][0]["content"] and made["title"][1]["content"] == first.title
    assert first.title in made["abstract"][0]["content"] and made["abstract"][1]["content"] == ABSTRACT
    before, answers = Paper("Sound in still lakes", OTHER), set()
    for number in range(20):
        one = Paper(f"Depths of old rivers {number}", ABSTRACT)
        ((kind, (asked, said)),) = exchanges(one, before, ["true_or_false"])
        true = said["content"] == "True."
        assert kind == "true_or_false" and one.title in asked["content"]
        assert (ABSTRACT in asked["content"]) is true and (OTHER in asked["content"]) is not true
        assert true or said["content"] == "False. It is the abstract of “Sound in still lakes”."
        answers.add(true)
    assert answers == {True, False}
    with pytest.raises(DataError, match="no title and abstract: the record has name"):
        paper_of({"name": "x"})


def test_the_pairs_of_a_tei_file(tmp_path: Path) -> None:
    found = paper(
        tmp_path,
        f"The river is deepest where it bends, as soundings have shown long ago {cited(0)}. We measured it again.",
        f"Near the ninth bridge it is deeper than anywhere else in the valley (Fig. {shown(0)}).",
    )
    assert found.title == "A title" and found.works == ["Rope and lead in practice", "Soundings of the lower Po"]
    assert found.captions == [
        (
            "Near the ninth bridge it is deeper than anywhere else in the valley (Fig. 1).",
            "figure",
            "Depth of the river at nine bridges.",
        )
    ]
    assert found.citations == [
        (
            "The river is deepest where it bends, as soundings have shown long ago [CITATION].",
            "Soundings of the lower Po",
        )
    ]
    kinds = [kind for kind, _ in exchanges(found, None)]
    assert kinds == ["caption", "caption", "citation", "true_or_false"]


@pytest.mark.parametrize(
    "sentence",
    [
        f"It is deeper here than at any of the other bridges, {cited(0)}, and others say so {cited(1)}.",
        f"It is deeper here than at any of the other bridges {cited(0)} as one sees in Fig. {shown(0)}.",
        f"It is deeper here than at any of the other bridges, a society says {cited(2)}.",
        f"It is deeper here than at any of the other bridges, which Rope and lead in practice says {cited(1)}.",
        f"it is deeper here than at any of the other bridges {cited(0)}.",
        f"It is deeper here than at (any of the other bridges {cited(0)}.",
        f"River depth The river is deeper here than at any of the other bridges {cited(0)}.",
        f"Lead Lead is the oldest of the means that are known for this purpose {cited(0)}.",
        f"It is deep {cited(0)}.",
        f"It is deeper here than at any of the other bridges 16 , Note that lead is heavy {cited(0)}.",
        f"It is deeper here than at any of the other bridges {cited(0)} The lead is heavy and sinks.",
        f"It is deeper here than at any of the other bridges {cited(0)}. 2 While lead is heavy, rope is not.",
        f"Letters to: rope@lead.it and others. It is deep at po@lead.it and at all bridges {cited(0)}.",
        f'It is "deeper here than at any of the other bridges {cited(0)}.',
        f"The depth is given by x k D w k I z of the bridges that we have measured {cited(0)}.",
        f"It is deeper here than at any of the other bridges (Fig. {shown(2)}).",
        f"It is deeper here than at any of the other bridges (Fig. {shown(3)}).",
        f"It is deeper here than at any of the other bridges (Fig. {shown(1)}).",
    ],
)
def test_no_pair_is_made_of(sentence: str, tmp_path: Path) -> None:
    """Two works, a figure beside a work, a journal, an answer in the question, pieces of sentences, headings, notes and
    formulas inside, captions that a tool cut."""
    found = paper(tmp_path, sentence)
    assert not found.citations and not found.captions


def test_the_number_of_an_equation_is_no_citation(tmp_path: Path) -> None:
    """`(3)` is one where most works are shown otherwise."""
    equation = '<ref type="bibr" target="#b1">(3)</ref>'
    stated = f"The depth at any of the bridges follows from the length of the rope by {equation}."
    others = [f"It is deeper at bridge {n} than at any of the others in this valley {cited(0)}." for n in range(3)]
    found = paper(tmp_path, stated, *others)
    assert [title for _, title in found.citations] == ["Soundings of the lower Po"] * 3
    assert [title for _, title in paper(tmp_path, stated).citations] == ["Rope and lead in practice"]


def test_brackets_and_sites(tmp_path: Path) -> None:
    works = WORKS.replace("Rope and lead in practice", "Rope and lead in practice | Rivers")
    body = f"<p>It is deeper here ( by far ) than at any of the other bridges [ {cited(1)} ].</p>"
    text = extract(write(tmp_path / "a.tei.xml", tei(f"<div>{body}</div>", back=works)), {}).text
    assert restored(Paper, json.loads(text)).citations == [
        ("It is deeper here (by far) than at any of the other bridges [[CITATION]].", "Rope and lead in practice")
    ]


def test_sentences() -> None:
    text = "As in Fig. 3 and by J. Smith et al. Depth varies. See e.g. Lead and rope. Not so? (Yes, it is.) and no"
    assert list(sentences(text)) == [
        "As in Fig. 3 and by J. Smith et al. Depth varies.",
        "See e.g. Lead and rope.",
        "Not so?",
    ]


def test_a_corpus_of_papers(tmp_path: Path, tokenizer: str) -> None:
    """Rows and TEI become conversations, and the card counts every kind."""
    rows = [{"title": f"Depths of old rivers {n}", "abstract": f"{ABSTRACT} {OTHER} {n * 7}"} for n in range(6)]
    sentence = f"The river is deepest where it bends, as soundings have shown long ago {cited(0)}."
    write(tmp_path / "b.tei.xml", tei(f"<div><p>{sentence}</p></div>{FIGURE}", back=WORKS))
    write(tmp_path / "c.txt", "Text is no paper.")
    inputs = [str(write_jsonl(tmp_path / "a.jsonl", rows)), str(tmp_path / "b.tei.xml"), str(tmp_path / "c.txt")]
    values: dict[str, Any] = recipe_values(
        {"papers": {"inputs": inputs, "kind": "papers"}},
        tokenize={"tokenizer": tokenizer, "held_out": 0.0},
        deduplicate={"near": False},
        converse={"template": "alpaca"},
    )
    report = build(parse_corpus_recipe(values), tmp_path / "out")
    card = report.card.read_text()
    rows_of = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines()]
    assert {cells[1]: int(cells[2]) for cells in rows_of if cells[0] == "papers" and cells[1] in PAIRS} == {
        **{"title": 6, "abstract": 6, "caption": 0, "citation": 1, "true_or_false": 6}
    }
    assert "unreadable: parse_error | 1" in card.replace("  ", " ")
    with pytest.raises(SettingsError, match="pairs"):
        parse_corpus_recipe({**values, "collections": {"p": {"inputs": inputs, "kind": "papers", "pairs": ["all"]}}})

"""Every planted leak is found, in every disguise and form, and nothing else is."""

from __future__ import annotations

import json
import quopri
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from fathom.corpus.benchmarks import Item, item_of
from fathom.corpus.folding import folded, rejoined
from fathom.corpus.leak_rules import Hit, Matcher, build_index
from fathom.corpus.recipe import Decontaminate
from tests.corpus.prose import Prose

WORDS = [f"{first}{second}rk" for first in "abcdefgh" for second in "abcdefgh"]


def disguises(text: str) -> list[str]:
    words = text.split()
    return [
        text,
        text.upper(),
        ", ".join(words) + "!",
        "\n".join(words),
        "“" + "” — “".join(words) + "”",
        "* ".join(words),
    ]


def hits(items: Sequence[Item], text: str, **rules: int) -> list[Hit]:
    index, _ = build_index(items, Decontaminate(**rules))
    return [hit for _, hit in next(Matcher([index], [items]).hits([text]))]


def finds(item: Item, text: str, **rules: int) -> bool:
    return bool(hits([item], text, **rules))


def around(text: str) -> str:
    """The text in the middle of prose that shares no word with it."""
    prose = Prose(8)
    return f"{prose.document(40)} {text} {prose.document(40)}"


@pytest.mark.parametrize("number", range(6))
def test_thirteen_words_in_every_disguise(number: int) -> None:
    item = Item("x", " ".join(WORDS[:30]))
    assert finds(item, around(disguises(" ".join(WORDS[7:20]))[number]))
    assert not finds(item, around(disguises(" ".join(WORDS[7:19]))[number]))  # twelve
    assert not finds(item, around(disguises(" ".join([*WORDS[7:13], "other", *WORDS[13:20]]))[number]))


@pytest.mark.parametrize("length", range(8, 13))
def test_short_items_whole_alone(length: int) -> None:
    item = Item("x", " ".join(WORDS[:length]))
    assert finds(item, around(" ".join(WORDS[:length])))
    assert not finds(item, around(" ".join(WORDS[1:length])))
    assert not finds(item, around(" ".join(WORDS[: length - 1])))


def test_shorter_items_with_their_answer_alone() -> None:
    item, bare = Item("x", " ".join(WORDS[:6]), ("fish", "fowl"), 0, "fish"), Item("x", " ".join(WORDS[:6]))
    assert finds(item, around(" ".join(WORDS[:6]) + "? Fish."))
    assert build_index([bare], Decontaminate())[1].short == ["x"] and not finds(bare, around(" ".join(WORDS[:6])))
    assert not finds(item, around(" ".join(WORDS[:6]) + "?"))
    assert not finds(item, around(" ".join(WORDS[:6]) + "? Fowl."))
    assert not finds(item, around(" ".join(WORDS[:6]) + "? Not at all: fish."))
    tiny = Item("x", "yes or else", (), None, "no")
    assert finds(tiny, around("yes or else? Answer: No")) and not finds(tiny, around("yes or else?"))
    assert not finds(tiny, around("yes or else? Answer: No"), shortest=5)
    assert build_index([Item("x", "or else", (), None, "no")], Decontaminate())[1].short == ["x"]


def test_an_offer_of_choices_is_no_answer() -> None:
    item = item_of({"question": " ".join(WORDS[:6]), "answer": True}, 0)
    stem = " ".join(WORDS[:6])
    assert finds(item, around(f"{stem}: true")) and finds(item, around(f"{stem}? Yes."))
    assert finds(item, around(f"{stem}. True or false? True."))
    assert not finds(item, around(f"{stem}. True or false?"))
    assert not finds(item, around(f"{stem}. False or true? Think."))
    assert not finds(item, around(f"{stem}: false"))


def test_choices_count_with_their_question_alone() -> None:
    """Neither a wrong choice nor the right one is a question; all of them after a short question are."""
    stem, right, wrong = " ".join(WORDS[:5]), " ".join(WORDS[30:45]), " ".join(WORDS[45:60])
    item = Item("x", stem, (wrong, right), 1, right)
    assert not finds(item, around(wrong)) and not finds(item, around(right))
    assert not finds(item, around(f"{wrong} {right}")) and not finds(item, around(f"{stem} {wrong}"))
    for before, after in (("(", ")"), ("", "."), ("* ", ":")):
        for labels in ("AB", "12"):
            listed = "\n".join(f"{before}{one}{after} {text}" for one, text in zip(labels, item.choices, strict=True))
            assert finds(item, around(f"{stem}?\n{listed}\n"))


@pytest.mark.parametrize(
    "between",
    ["?\nA: ", "?\nAnswer: ", "? He replied: “", "? The correct answer is (B) ", "?\n\n### Response:\n", " -> b) "],
)
def test_labels_may_stand_between_question_and_answer(between: str) -> None:
    stem, gold = " ".join(WORDS[:6]), "zinc oxide"
    item = Item("x", stem, ("tin", gold), 1, gold)
    assert finds(item, around(f"Q: {stem}{between}{gold}"))
    assert not finds(item, around(f"Q: {stem}{between}tin")) and not finds(
        item, around(f"Q: {stem}{between}nothing {gold}")
    )


def test_every_accepted_answer_counts() -> None:
    rows: list[dict[str, Any]] = [
        {"question": " ".join(WORDS[:6]), "answer": ["red lead", "minium"]},
        {"question": " ".join(WORDS[:6]), "answer": {"value": "red lead", "aliases": ["minium", "red lead"]}},
    ]
    for row in rows:
        item = item_of(row, 0)
        assert item.golds() == ["red lead", "minium"]
        assert finds(item, around(f"{item.stem}? Answer: minium")) and not finds(item, around(f"{item.stem}? Tin"))


def test_a_shared_preamble_gives_nothing_away() -> None:
    """Of many questions with one preamble the planted one is found; a document that quotes the preamble has none."""
    preamble = " ".join(WORDS[:20])
    items = [Item(str(n), f"{preamble} {' '.join(Prose(n).words[:9])}", ("yes", "no"), 0, "yes") for n in range(30)]
    assert not hits(items, around(preamble))
    assert {hit.item for hit in hits(items, around(items[7].stem))} == {7}
    short = [Item(str(n), " ".join(WORDS[:10]), (gold, "neither"), 0, gold) for n, gold in enumerate(("tin", "lead"))]
    _, unfound = build_index(short, Decontaminate())
    assert unfound.template == ["0", "1"] and not unfound.short
    assert not hits(short, around(short[0].stem)) and {
        hit.item for hit in hits(short, around(f"{short[0].stem} lead"))
    } == {1}


def test_a_question_that_begins_in_anothers_answer() -> None:
    """As in HellaSwag, a label, two sentences, and the next one as the answer; each item begins a sentence later."""
    story = [" ".join(Prose(n).words[:7]) for n in range(8)]
    items = [
        Item(str(n), f"Bathing dog: {a}. {b}.", (c, "none"), 0, c)
        for n, (a, b, c) in enumerate(zip(story[:-2], story[1:-1], story[2:], strict=True))
    ]
    before = Item("before", f"Bathing dog: {story[7]} on the dog. {story[0]}.", ("none", "one"), 0, "none")
    for number, item in enumerate(items):
        assert {hit.item for hit in hits([*items, before], around(f"{item.stem} {item.gold}"))} == {number}


def test_repetitions_of_a_question_are_found_together() -> None:
    items = [Item(str(n), " ".join(WORDS[:20]), ("yes", "no")[:: (-1) ** n], n % 2, "yes") for n in range(3)]
    assert {hit.item for hit in hits(items, around(" ".join(WORDS[2:17])))} == {0, 1, 2}


def test_labels_of_the_benchmarks_rows_are_no_part_of_its_questions() -> None:
    items = [Item(str(n), f"Question: {' '.join(Prose(n).words[:6])}?\nAnswer:", gold="zinc") for n in range(4)]
    for number, item in enumerate(items):
        asked = item.stem.split(":")[1].split("?")[0]
        assert {hit.item for hit in hits(items, around(f"Somebody asks: {asked}? He replied: zinc"))} == {number}


def test_a_blank_that_is_filled_in() -> None:
    stem = " ".join([*WORDS[:5], "____", *WORDS[5:11]])
    item = Item("x", stem, ("zinc", "tin"), 0, "zinc")
    assert finds(item, around(stem.replace("____", "zinc"))) and not finds(item, around(stem.replace("____", "tin")))


def test_nothing_in_generated_prose() -> None:
    prose = Prose(11)
    items = [Item(str(number), prose.sentence(length)) for number, length in enumerate([9, 20, 14] * 30)]
    index, unfound = build_index(items, Decontaminate())
    other = Prose(12)
    texts = [other.document(300) for _ in range(60)]
    assert not unfound.short and not unfound.template and not any(Matcher([index], [items]).hits(texts))


def test_numbers_that_agree_by_chance_are_no_leak() -> None:
    """An index whose numbers belong to other words finds nothing: the words decide."""
    item, liar = Item("x", " ".join(WORDS[:20])), Item("x", " ".join(WORDS[20:40]))
    index, _ = build_index([item], Decontaminate())
    assert next(Matcher([index], [[item]]).hits([item.stem])) and not next(Matcher([index], [[liar]]).hits([item.stem]))


def test_places_are_exact() -> None:
    stem = " ".join(WORDS[:13])
    text = around(stem)
    (hit,) = hits([Item("x", stem)], text)
    assert text[hit.start : hit.end] == stem


GREEK = "πόσοι μαθητές της πρώτης τάξης είδαν τους ωραίους κήπους πριν από τις μεγάλες γιορτές του"
LATIN = "which official office first defined the efficient affine flow of five different fields and offers straße"


MARKED = "which café serves the first official coffee at 10⁻³ degrees and offers x² or α beans as one"
"""A question with accents, powers and a letter of another alphabet."""


def homoglyphs(text: str) -> str:
    return text.translate(str.maketrans("aceopxy", "асеорху"))


@pytest.mark.parametrize(
    ("stem", "form"),
    [
        (LATIN, homoglyphs(LATIN)),
        (LATIN, " ".join(homoglyphs(word) if n % 6 == 0 else word for n, word in enumerate(LATIN.split()))),
        (LATIN, LATIN.replace(" ", "&nbsp;").replace("first", "&#102;irst&amp;#46;")),
        (LATIN, LATIN.replace("o", "ó").replace("i", "î").replace("d", "ḍ")),
        (LATIN, LATIN.replace("official", "<em>off</em>icial<br/>").replace("first", '<a href="x.html">first</a>')),
        (LATIN, LATIN.replace("official", "\\textbf{official}").replace("flow", "\\emph{flow}~\\cite{a,b}")),
        (
            LATIN,
            LATIN.replace("official", "official[12]").replace("flow", "flow¹").replace("fields", "fields<sup>3</sup>"),
        ),
        (LATIN, LATIN.replace("a", "𝐚").replace("f", "ｆ")),
        (LATIN, LATIN.replace("official", "[official](https://example.org/a)")),
        (MARKED, MARKED.replace("café", "caf\\'{e}").replace("10⁻³", "$10^{-3}$").replace("α", "$\\alpha$")),
        (MARKED, MARKED.replace("é", "é").replace("x²", "x<sup>2</sup>").replace("10⁻³", "10<sup>-3</sup>")),
    ],
)
def test_markup_and_letters_that_look_alike(stem: str, form: str) -> None:
    item, other = Item("x", stem), Item("y", " ".join(WORDS[:16]))
    text = around(form)
    found = hits([item, other], text)
    assert {hit.item for hit in found} == {0}
    passage = text[min(hit.start for hit in found) : max(hit.end for hit in found)]
    assert form.startswith(passage[:20]) or passage.startswith(form[:20])


def test_other_alphabets_are_left_alone() -> None:
    """Words of Greek and Cyrillic are no Latin ones, in capitals or not, though some of their letters look alike."""
    for text in ("москва и киев", "ποιος του"):
        item = Item("x", " ".join([text] * 5))
        assert finds(item, f"The {item.stem.upper()} of {item.stem}")


@pytest.mark.parametrize(
    ("stem", "form"),
    [
        (GREEK, GREEK.upper()),
        (LATIN, "for $5 " + LATIN.replace("ffi", "ﬃ").replace("fi", "ﬁ").replace("ff", "ﬀ") + " US$"),
        (LATIN.replace("fi", "ﬁ"), LATIN),
        (LATIN, LATIN.replace("f", "f\u200b")),
        (LATIN, LATIN.replace("effi", "e\u00adf\ufe0ffi")),
        (LATIN, LATIN.replace("ici", "i-\nci").replace("differ", "diff-\n   er")),
        (LATIN.replace("affine flow", "well-known flow"), LATIN.replace("affine flow", "well-\nknown flow")),
        (LATIN.replace("affine flow", "well-known flow"), LATIN.replace("affine flow", "well-\nknown fl‐\now")),
        (LATIN, LATIN.upper()),
    ],
)
def test_forms_of_type_and_layout(stem: str, form: str) -> None:
    """What is found is exactly the passage; an item of other words is not found in any of them."""
    item, other = Item("x", stem), Item("y", " ".join(WORDS[:16]))
    text = f"é {around('')} {form} {around('')}"
    found = hits([item, other], text)
    assert {hit.item for hit in found} == {0}
    start, end = min(hit.start for hit in found), max(hit.end for hit in found)
    assert text[start:end] == form.removeprefix("for $5 ").removesuffix(" US$")


@pytest.mark.parametrize("text", ["what´s", "what᾽s", "Windows™", "one℠ two"])
def test_a_sign_is_no_part_of_a_word(text: str) -> None:
    """Taken apart, an acute accent leaves a mark, and a trade mark letters: words that no item has."""
    assert folded(text).text == text


def test_words_are_joined_where_an_item_has_the_whole_alone() -> None:
    one = folded("a fi-\nle and a non-\nsense, and ﬁ-\n  les")
    assert rejoined(one, {"sense"}) is None
    again = rejoined(one, {"file", "files"})
    assert again is not None and again.text == "a file and a non-\nsense, and files"
    assert again.span(again.text.index("files"), len(again.text)) == (31, 39)


def forms(question: str, choices: Sequence[str], gold: str) -> dict[str, str]:
    """A question as benchmarks and chats are distributed: rows of files, chat templates, forums."""
    letters, place = "ABCDEFGH"[: len(choices)], choices.index(gold)
    said = {"from": "human", "value": question}, {"from": "gpt", "value": gold}
    chat = {"role": "user", "content": question}, {"role": "assistant", "content": gold}
    labelled = {"text": list(choices), "label": list(letters)}
    rows: dict[str, dict[str, Any]] = {
        "messages": {"messages": chat},
        "ShareGPT": {"conversations": said},
        "completion": {"prompt": question, "completion": gold},
        "label": {"query": question, "label": gold},
        "target": {"question": question, "target": gold},
        "MMLU": {"question": question, "subject": "abstract_algebra", "choices": choices, "answer": place},
        "ARC": {"id": "M_1", "question": question, "choices": labelled, "answerKey": letters[place]},
        "CommonsenseQA": {
            "question": question,
            "question_concept": "to punish",
            "choices": dict(sorted(labelled.items())),
        },
        "OpenBookQA": {"question": {"stem": question, "choices": [{"text": one} for one in choices]}},
        "SciQ": {"question": question, **{f"distractor{n}": one for n, one in enumerate(choices) if one != gold}}
        | {"correct_answer": gold},
    }
    found = {name: json.dumps(row) for name, row in rows.items()}
    found |= {f"{name}, sorted": json.dumps(rows[name], sort_keys=True) for name in ("MMLU", "ARC", "completion")}
    head = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
    return found | {
        "ChatML": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{gold}<|im_end|>",
        "INST": f"<s>[INST] {question} [/INST] {gold} </s>",
        "Llama 3": f"<|begin_of_text|>{head.format('user', question)}{head.format('assistant', gold)}",
        "Gemma": f"<start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n{gold}<end_of_turn>",
        "Alpaca": f"### Instruction:\n{question}\n\n### Response:\n{gold}",
        "AI": f"Human: {question}\nAI: {gold}",
        "sure": f"{question}\n\nSure! The answer is {gold}.",
        "only": f"{question} Give me only the answer.\n\n{gold}",
        "forum": f"{question}\nPosted by Ann at 12:30\n{gold}",
        "German": f"Frage: {question}\nAntwort: {gold}",
        "Chinese": f"问题：{question}\n答案：{gold}",
    }


SHAPES = list(forms("", ("a", "b"), "a"))


@pytest.mark.parametrize("shape", SHAPES)
def test_short_questions_in_the_forms_in_which_they_are_distributed(shape: str) -> None:
    """Questions of 3 to 7 words; the same text with a wrong answer, or with another question, leaks nothing."""
    length, prose = 3 + SHAPES.index(shape) % 5, Prose(SHAPES.index(shape), 400)
    stem, *choices = (prose.sentence(count)[:-1] for count in (length, 2, 2, 1, 2))
    item = Item("x", stem, tuple(choices), 1, choices[1])
    before, after = prose.document(24), prose.document(24)
    leak = forms(stem, choices, choices[1])[shape]
    assert finds(item, f"{before} {leak} {after}")
    for other in (
        forms(stem, [choices[0], *choices[2:]], choices[0]),
        forms(prose.sentence(length), choices, choices[1]),
    ):
        assert not finds(item, f"{before} {other[shape]} {after}")


@pytest.mark.parametrize("between", range(12))
def test_how_far_an_answer_may_be(between: int) -> None:
    """Eight words at most, and none that deny it."""
    item = Item("x", " ".join(WORDS[:6]), ("zinc oxide", "tin"), 0, "zinc oxide")
    others = " ".join(WORDS[20 : 20 + between])
    assert finds(item, around(f"{item.stem}? {others} zinc oxide")) is (between <= 8)
    assert finds(item, around(f"Zinc oxide {others}. {item.stem}?")) is (between <= 8)
    assert not finds(item, around(f"{item.stem}? {others} not zinc oxide"))


@pytest.mark.parametrize("gold", ["yes", "no", "3", "true"])
def test_an_answer_that_any_text_has_follows_label_words_alone(gold: str) -> None:
    item = Item("x", " ".join(WORDS[:6]), gold=gold)
    assert finds(item, around(f"{item.stem}? The answer is {gold}.")) and finds(
        item,
        around(
            json.dumps({"messages": [{"role": "user", "content": item.stem}, {"role": "assistant", "content": gold}]})
        ),
    )
    assert not finds(item, around(f"{item.stem}? Opinions differ, and {gold} doubt."))


CHANGES: dict[str, tuple[str, str]] = {
    "citations": (" [12, 13]", ""),
    "authors": (" (Smith et al., 2020; see Doe and Poe 2019, p. 4)", ""),
    "keys": (" [Smi20, Doe19]", ""),
    "numbers of notes": (" (7)", ""),
    "templates of notes": ("{{sfn|Smith|2020|p=4}}", ""),
    "notes": ('<ref name="x">Smith 2020, page four</ref>', ""),
    "links": ('](page.html "a title")', "["),
    "links by reference": ("][ref one]", "["),
    "wiki": ("]]", "[[some page|"),
    "RST": (" <https://a.org/b>`__", "`"),
    "roles": (" <target-one>`", ":ref:`"),
    "org": ("]]", "[[https://a.org]["),
    "boards": ("[/url]", "[url=http://a.b/c]"),
    "addresses": (" (https://a.b/c/d?e=f)", ""),
    "lines": ("\n 12  ", ""),
    "subtitles": ("\n\n7\n00:00:01,000 --> 00:00:02,500\n", ""),
    "times": ("\n[00:12] ", ""),
    "lists of notes": (" (12, 13)", ""),
    "figures": (" (see Figs. 2a and 3)", ""),
    "raised": ("^12^", ""),
    "inline notes": ("^[see there]", ""),
    "notes of org": ("[fn:1]", ""),
    "notes of AsciiDoc": ("footnote:[see there]", ""),
    "keys of Sphinx": (" :cite:`smith2020`", ""),
    "wanted": ("{{citation needed|date=May 2020}}", ""),
    "spans": ("]{.smallcaps}", "["),
    "colours": ("{color}", "{color:red}"),
    "identifiers": (" (doi:10.1234/abc.5)", ""),
    "comments": ("<!-- see there -->", ""),
    "footnotes": ("\\footnote{see there}", ""),
    "readings": ("<rt>xu</rt>", ""),
    "long links": ("</a>", f'<a href="https://a.org/?{"x=y&" * 200}">'),
    "pages": ("\n\fPage 12 of 30\n", ""),
    "strings": ('"\ntext += f"', ""),
    "logs": ("\n2026-01-01 12:00:00,123 INFO ", ""),
    "speakers": ("\nSPEAKER_00: ", ""),
    "frames": ("\n{100}{140}", ""),
    "cues": ("\n\n0:00:01.000,0:00:03.000\n", ""),
    "BASIC": ("\nREM ", ""),
}
"""What stands behind a word, and before it."""


@pytest.mark.quick("10")
@pytest.mark.parametrize("length", [5, 10, 20])
def test_what_editors_put_between_words_hides_nothing(length: int) -> None:
    item = Item("x", " ".join(WORDS[:length]), ("fish", "fowl"), 0, "fish")
    matcher = Matcher([build_index([item], Decontaminate())[0]], [[item]])
    for kind, (after, before) in CHANGES.items():
        words = [f"{before}{word}{after}" if at % 4 == 1 else word for at, word in enumerate(WORDS[:length])]
        text = " ".join(words)
        other = text.replace(WORDS[length // 2], "some other word")
        assert [bool(found) for found in matcher.hits([around(f"{one}? Fish.") for one in (text, other)])] == [
            True,
            False,
        ], kind


def test_what_no_reader_shows_is_searched() -> None:
    """Comments, footnotes, and attributes of tags, in which rows of XML have their texts."""
    item = Item("x", " ".join(WORDS[:6]), ("fish", "fowl"), 0, "fish")
    for form in (
        "<!-- {} Fish. -->",
        "\\footnote{{{} Fish.}}",
        '<img src="a.png" alt="{} Fish.">',
        "<div data-question='{}' data-answer='fish'></div>",
        '<row Id="4" Title="{}" Body="&lt;p&gt;Fish.&lt;/p&gt;" />',
    ):
        (hit,) = hits([item], text := around(form.format(f"{item.stem}?")))
        assert text[hit.start : hit.end].lower().startswith(item.stem) and text[hit.end - 4 : hit.end].lower() == "fish"
        assert not finds(item, around(form.format("Another question?")))


def test_reasons_may_stand_before_the_answer() -> None:
    """As many as a model writes, if the next answer is the question's; not one that any text has."""
    item = Item("x", " ".join(WORDS[:6]), ("zinc oxide", "tin"), 0, "zinc oxide")
    reasons = " ".join(WORDS[10:50])
    for end in ("So the answer is zinc oxide.", "\n\nAnswer: (b) zinc oxide", "Thus \\boxed{\\text{zinc oxide}}"):
        assert finds(item, around(f"{item.stem}? {reasons}. {end}"))
        assert not finds(item, around(f"{item.stem}? {reasons}. {end.replace('zinc', 'not zinc')}"))
        assert not finds(item, around(f"{item.stem}? {reasons}. The answer is tin. {end}"))
    for answer in ("zinc oxide", "42"):
        asked = Item("x", item.stem, gold=answer)
        assert finds(asked, around(f"{item.stem}? <think>{reasons}\n{reasons}</think>\n\n{answer}\n"))
    assert not finds(item, around(f"{item.stem}? {reasons}. Zinc oxide"))
    assert not finds(Item("y", item.stem, gold="yes"), around(f"{item.stem}? {reasons}. The answer is yes."))


def test_escapes_of_programs_and_of_other_code_pages() -> None:
    item = Item("x", f"{WORDS[0]}'s {' '.join(WORDS[1:6])}", ("fish", "fowl"), 0, "fish")
    asked = f"{item.stem.replace(chr(39), '’')}? Fish."
    for text in (
        repr(asked.encode()),
        asked.replace("’", "\\x27"),
        asked.replace("’", "\\'92"),
        asked.replace(" ", "%u0020"),
        asked.encode().decode("cp1252"),
        f"{item.stem}?\\tfish",
        "\u200b".join(asked.split()),
        "".join(chr(0x24D0 + ord(one) - ord("a")) if "a" <= one <= "z" else one for one in asked),
    ):
        assert finds(item, around(text)), text
        assert not finds(item, around(text.replace("sh", "wl"))) or "\u24d0" < text[-2] < "\u24ea"


def test_numbers_of_the_text_are_no_numbers_of_its_apparatus() -> None:
    """One that is the text of a link, unless it is a citation behind a word; and the first of a subtitle's text."""
    words, link = WORDS[:4], '(page.html "a title")'
    item = Item("x", f"{' '.join(words)} 3 fish", ("fish", "fowl"), 0, "fish")
    assert finds(item, around(f"{words[0]} [{words[1]}]{link} {words[2]} {words[3]} [3]{link} fish? Fish."))
    assert not finds(item, around(f"{words[0]} [{words[1]}]{link} {words[2]} {words[3]}[3](#3) fish? Fish."))
    cues = [f"\n\n{at}\n00:00:0{at},000 --> 00:00:0{at},900\n" for at in (1, 2)]
    assert finds(item, around(f"{cues[0]}{' '.join(words)}{cues[1]}3 fish? Fish."))
    assert not finds(item, around(f"{cues[0]}{' '.join(words)}{cues[1]}4 fish? Fish."))
    item = Item("x", " ".join(WORDS[:5]), ("fish", "fowl"), 0, "fish")
    assert finds(item, around(f"{WORDS[0]} {WORDS[1]}[3](#three) {' '.join(WORDS[2:5])}? Fish."))


def test_escapes_and_divided_words_in_quotes_hide_nothing() -> None:
    item = Item("x", " ".join(WORDS[:6]), ("fish", "fowl"), 0, "fish")
    asked = " ".join(WORDS[:6]) + "? Fish."
    for text in (quote(asked), quote(quote(asked)), f"https://a.org/s?q={quote_plus(asked)}"):
        assert finds(item, around(text))
    mail = quopri.encodestring(f"é {asked} {' '.join(WORDS)}".encode()).decode()
    assert "=\n" in mail and finds(item, around(mail))
    for mark in ("> ", "// ", " * ", "# "):
        assert finds(item, around(f"{mark}{asked[:7]}-\n{mark}{asked[7:]}"))
        assert not finds(item, around(f"{mark}{asked[:7]}-\n{mark}x{asked[7:]}"))


@pytest.mark.parametrize("written", ["80,000", "80000"])
def test_digits_are_grouped_in_any_way(written: str) -> None:
    item = Item("x", f"{' '.join(WORDS[:4])} {written} rk", ("fish", "fowl"), 0, "fish")
    for other in ("80,000", "80000", "80 000"):
        assert finds(item, around(f"{' '.join(WORDS[:4])} {other} rk? Fish."))
    assert not finds(item, around(f"{' '.join(WORDS[:4])} 80001 rk? Fish."))


@pytest.mark.parametrize("length", [5, 10])
def test_a_short_question_is_found_without_its_passage(length: int) -> None:
    item = Item("x", " ".join(WORDS[:length]), ("fish", "fowl"), 0, "fish", " ".join(WORDS[20:50]))
    text = " ".join(WORDS[:length])
    assert finds(item, around(f"{text}? Fish.")) and finds(item, around(" ".join(WORDS[20:50])))
    assert finds(item, around(text)) == (length >= Decontaminate().whole)
    assert not finds(item, around(f"{text[:-2]}x? Fish.")) and not build_index([item], Decontaminate())[1].short


def test_another_question_s_answer_is_none() -> None:
    """Reasons may stand between a question and what they conclude, not another question, nor all of it before."""
    asked = " ".join([word for word in Prose(71).words if len(word) > 3][:6])
    item, reasons = Item("x", asked, gold="marsupial"), " ".join(Prose(33).document(300).split()[:40])
    assert hits([item], around(f"{asked}? {reasons} So the answer is marsupial."))
    assert hits([item], around(f"{asked}? {reasons} Is that right? It is a marvel. So the answer is marsupial."))
    for clean in (
        f"{asked}? {reasons} What is a kangaroo？ Answer: marsupial.",
        f"{asked}? {reasons} What is a kangaroo? Answer: marsupial.",
        f"Which is larger, a placental or a marsupial? Answer: placental. {reasons} {asked}?",
        f"So the answer is marsupial. {reasons} {asked}?",
    ):
        assert not hits([item], around(clean)), clean

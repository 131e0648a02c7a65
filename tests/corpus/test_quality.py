"""Each rule, by a text that breaks it and no rule before it, and measures counted by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fathom.corpus.quality import broken_rules, language_of, measures
from fathom.corpus.recipe import Filter
from tests.corpus.prose import Prose

GOOD = Prose(1).document(120)
STOP = "the of "


def rules(text: str, **limits: object) -> list[str]:
    return [broken.rule for broken in broken_rules(text, replace(Filter(), **limits))]  # type: ignore[arg-type]


def test_prose_breaks_nothing() -> None:
    assert rules(GOOD) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("min_words", "the of few words"),
        ("max_words", GOOD),
        ("min_word_length", STOP + "a b c d e f g " * 10),
        ("max_word_length", STOP + " ".join(f"extraordinarily{number}long" for number in range(60))),
        ("max_symbol_ratio", GOOD + " #" * 40),
        ("max_bullet_lines", "\n".join(f"- {line}" for line in GOOD.replace(". ", ".\n").split("\n") if line)),
        ("max_ellipsis_lines", GOOD.replace(". ", "…\n")),
        ("min_alphabetic_words", GOOD + " " + " ".join(str(number) for number in range(1000, 1200))),
        ("min_stop_words", " ".join(f"{letter}{other}word" for letter in "abcdefgh" for other in "abcdefgh")),
        ("max_duplicate_lines", GOOD + "\n" + "\n".join(["a short line", "another one here"] * 8)),
        ("max_duplicate_paragraphs", GOOD + "\n\n" + "\n\n".join(["short one", "other"] * 8)),
    ],
)
def test_each_rule_can_drop(rule: str, text: str) -> None:
    found = rules(text, max_words=40) if rule == "max_words" else rules(text)
    assert rule in found
    # Without its threshold the rule says nothing.
    assert rule not in rules(text, **{rule: None})


def test_repetition_counted_by_hand() -> None:
    """Five words of four letters twice: the second half of the characters occurred before, in runs of five."""
    text = "aaaa bbbb cccc dddd eeee aaaa bbbb cccc dddd eeee"
    found = dict(measures(text, Filter()))
    assert found["max_duplicate_5grams"] == 0.5
    assert found["max_top_2gram"] == 2 * 8 / 40 and found["max_top_4gram"] == 2 * 16 / 40
    assert found["max_duplicate_6grams"] == 0  # each run of six occurs once, and no longer one is looked for
    assert "max_duplicate_7grams" not in found
    assert dict(measures("aaaa bbbb cccc dddd eeee ffff", Filter()))["max_top_2gram"] == 0


def test_lines_and_paragraphs_counted_by_hand() -> None:
    found = dict(measures("abcd\nabcd\nxy\n\nabcd\nabcd\nxy", Filter()))
    assert found["max_duplicate_lines"] == 4 / 6 and found["max_duplicate_line_characters"] == (3 * 4 + 2) / 20
    assert found["max_duplicate_paragraphs"] == 1 / 2 and found["max_duplicate_paragraph_characters"] == 0.5


def test_every_threshold_is_measured() -> None:
    """A key of the recipe that no measure answers would be a rule that never drops."""
    measured = {rule for rule, _ in measures(GOOD + "\n\n" + GOOD, Filter())}
    assert measured == {one.name for one in fields(Filter)} - {"languages"}


def test_languages_by_the_installed_identifier() -> None:
    """Whichever version pip installed: the way to open its model has changed."""
    pytest.importorskip("py3langid")
    assert {language: language_of(text) for language, text in PARAGRAPHS.items()} == {one: one for one in PARAGRAPHS}


PARAGRAPHS = {
    "de": "Der Fluss entspringt in den Bergen und mündet nach langem Lauf durch alte Städte und Wiesen in das Meer. ",
    "fr": "La rivière prend sa source dans les collines et coule vers la mer entre de vieilles villes et des prés. ",
    "ru": "Река берёт начало в горах и медленно течёт к морю мимо старых городов и широких лугов, где пасутся коровы. ",
    "zh": "这条河发源于山区，缓缓流过古老的城镇和宽阔的草地，最后注入大海，沿岸村庄的居民世世代代以捕鱼为生。",
    "ja": "この川は山に源を発し、古い町々と広い草原をゆっくりと流れ、小さな村を過ぎてから海に注いでいます。",
    "th": "แม่น้ำสายนี้มีต้นกำเนิดในภูเขาและไหลช้าๆผ่านเมืองเก่าและทุ่งหญ้ากว้างก่อนถึงหมู่บ้านแล้วลงสู่ทะเล",
    "el": "Το ποτάμι πηγάζει από τα βουνά και κυλάει αργά προς τη θάλασσα μέσα από παλιές πόλεις και πλατιά λιβάδια. ",
    "ar": "ينبع النهر من الجبال ويجري ببطء إلى البحر بين المدن القديمة والمروج الواسعة التي ترعى فيها الأبقار كل يوم. ",
    "hi": "यह नदी पहाड़ों से निकलती है और पुराने शहरों और चौड़े मैदानों से होकर धीरे धीरे समुद्र की ओर बहती है। ",
    "ko": "이 강은 산에서 시작하여 오래된 마을과 넓은 들판을 지나 천천히 흐르고 그 끝은 바다에 이른다. ",
    "en": "The river rises in the hills and flows slowly to the sea through old towns and meadows that cows graze. ",
}


@pytest.mark.parametrize("language", PARAGRAPHS)
def test_a_clean_paragraph_of_any_language(language: str) -> None:
    """Stop words apart, it breaks no rule; a few words of it, or the same many times, do."""
    alone = language in ("zh", "ja", "th")
    text = PARAGRAPHS[language] + (PARAGRAPHS[language][::-1] if alone else " ".join(Prose(7).words[:40]))
    assert rules(text, min_stop_words=None) == []
    assert ("min_stop_words" in rules(text)) is (language != "en")
    assert "min_words" in rules(text[:30]) and "max_duplicate_10grams" in rules((text + "\n") * 9)


@pytest.mark.parametrize("language", PARAGRAPHS)
def test_stop_words_of_a_document_in_its_own_language(language: str) -> None:
    """Ten scripts: prose has them, and the same words of another language have not, unless there is no list."""
    pytest.importorskip("justext")
    other = PARAGRAPHS["ru" if language != "ru" else "el"]

    def judged(text: str) -> bool:
        return "min_stop_words" in [one.rule for one in broken_rules(text, Filter(), language)]

    assert not judged(PARAGRAPHS[language])
    assert judged(other) is (language not in ("zh", "ja", "th"))


def test_words_are_counted_as_elsewhere() -> None:
    """Each character of Chinese is a word; signs and dashes are none; a mean length is that of spaced words."""
    found = dict(measures("这条河 - - # flows to sea", Filter()))
    assert found["min_words"] == 6 and found["min_word_length"] == (5 + 2 + 3) / 3
    assert "min_word_length" not in dict(measures("这条河发源于 flows", Filter()))
    assert dict(measures("costs ฿ or ・ " * 9, Filter()))["max_word_length"] == (5 + 2) / 2

"""What layout and type change about words is undone; what parts words parts them still."""

import pytest

from fathom.corpus.folding import folded


@pytest.mark.parametrize(("text", "plain"), [("o\ufb03ce", "office"), ("a\u200bb", "ab"), ("Ｗｉｄｅ", "wide")])
def test_forms_are_undone(text: str, plain: str) -> None:
    assert folded(text).text.lower() == plain


@pytest.mark.parametrize("text", ["what´s", "what᾽s", "Windows™", "one℠ two"])
def test_a_sign_is_no_part_of_a_word(text: str) -> None:
    """Taken apart, an acute accent leaves a mark, and a trade mark letters: words that no item has."""
    assert folded(text).text == text

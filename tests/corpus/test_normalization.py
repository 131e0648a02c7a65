"""One way to write a text, and twice is once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.corpus.normalization import normalize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ﬁsh and ﬂow", "fish and flow"),
        ("area in m² here", "area in m2 here"),
        ("a formula $x² + y²$ stays", "a formula $x² + y²$ stays"),
        ("also $$x²$$ and \\(y²\\) and [START_FORMULA]z²[END_FORMULA]", None),
        ("it cost $5 and m² cost $6", "it cost $5 and m2 cost $6"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\x85b\u2029c\u2028d", "a\nb\nc\nd"),
        ("a\x80b\x9fc", "abc"),
        ("hy\u00adphen, joi\u2060ner, \ufeffmark", "hyphen, joiner, mark"),
        ("a\x00b\x08c\td", "abc\td"),
        ("a\n\n\n\n\n\nb", "a\n\n\nb"),
        ("trailing   \nblanks\t", "trailing\nblanks"),
    ],
)
def test_rules(text: str, expected: str | None) -> None:
    assert normalize(text) == (text if expected is None else expected)


def test_what_is_stripped() -> None:
    text = "HEADER\nbody\nFOOTER 12"
    assert normalize(text, strip=(r"^HEADER$\n?", r"\n?^FOOTER \d+$")) == "body"


def test_control_compatibility_forms_are_what_nfkc_takes() -> None:
    """Without the exception for formulas the square would be lost."""
    import unicodedata

    assert unicodedata.normalize("NFKC", "$x²$") == "$x2$" != normalize("$x²$")


@given(st.text(alphabet=st.sampled_from("ab $\\()[]{}²ﬁ＄\u0301e\n\r\t\x0b\u2028\x85x"), max_size=60))
@settings(max_examples=300, deadline=None)
def test_twice_is_once(text: str) -> None:
    once = normalize(text, strip=("aa",), blank_lines=1)
    assert normalize(once, strip=("aa",), blank_lines=1) == once

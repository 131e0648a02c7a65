"""One way to write a text, and twice is once."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fathom.corpus.normalization import Form, normalize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ﬁsh and ﬂow", "ﬁsh and ﬂow"),
        ("cafe\u0301", "café"),
        ("area in m² here, 2³² bytes, 5½, 10⁻³, H₂O", None),
        ("a formula $x² + y²$ stays", "a formula $x² + y²$ stays"),
        ("also $$x²$$ and \\(y²\\) and [START_FORMULA]z²[END_FORMULA]", None),
        ("it cost $5 and m² cost $6", None),
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


def test_nfkc_leaves_powers_and_fractions() -> None:
    """Control: without the exceptions the numbers are others."""
    text = "ﬁsh, Ｗｉｄｅ, 2³² bytes, 5½ acres, 10⁻³, x₁, $ﬁ²$"
    assert normalize(text, form="nfkc") == "fish, Wide, 2³² bytes, 5½ acres, 10⁻³, x₁, $ﬁ²$"
    assert "232 bytes, 51⁄2 acres, 10−3" in unicodedata.normalize("NFKC", text)


NUMBERS = re.compile("[0-9⁰¹²³⁴-⁹⁺⁻₀-₉½⅓¼⅚−+±×÷/.,%^-]+")


@given(st.text(st.sampled_from("019²³⁻⁺₂½⅓−+±×/.%ab ﬁé\u0301$\n　"), max_size=60), st.sampled_from(["nfc", "nfkc"]))
@settings(max_examples=150, deadline=None)
def test_no_number_changes(text: str, form: Form) -> None:
    assert NUMBERS.findall(normalize(text, form=form)) == NUMBERS.findall(text)


@given(
    st.text(alphabet=st.sampled_from("ab $\\()[]{}²ﬁ＄\u0301e\n\r\t\x0b\u2028\x85x"), max_size=60),
    st.sampled_from(["nfc", "nfkc"]),
)
@example("$ﬁ$＄", "nfkc")  # a formula once the last sign is one of dollars
@settings(max_examples=150, deadline=None)
def test_twice_is_once(text: str, form: Form) -> None:
    once = normalize(text, strip=("aa",), blank_lines=1, form=form)
    assert normalize(once, strip=("aa",), blank_lines=1, form=form) == once

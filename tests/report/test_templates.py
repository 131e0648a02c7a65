"""Markup comes from templates, which escape what is put into them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from markupsafe import Markup

import fathom
from fathom.report.templates import ENVIRONMENT, macro

ROOT = Path(fathom.__file__).parent
TAG = re.compile(
    r"</?(html|head|body|main|section|p|h\d|div|span|table|tr|t[dh]|ul|li|svg|g|line|circle|rect|text|img)[ >/]"
)


def markup_in(code: str) -> list[str]:
    """String literals of Python code that hold HTML or SVG."""
    strings = (node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    return [text for text in strings if isinstance(text, str) and TAG.search(text)]


@pytest.mark.parametrize("code", ["x = '<p>'", "x = f'<td class=\"n\">{y}</td>'", "x = '<svg viewBox=\"0\">' + y"])
def test_markup_in_code_is_seen(code: str) -> None:
    assert markup_in(code)


def test_code_holds_no_markup() -> None:
    texts = {str(path): path.read_text() for path in ROOT.rglob("*.py")}
    assert {path: found for path, text in texts.items() if TAG.search(text) and (found := markup_in(text))} == {}


def test_every_template_escapes() -> None:
    names = ENVIRONMENT.list_templates(extensions=["j2"])
    assert "report/base.html.j2" in names and {"lens/lens.html.j2", "lineage/publishing/page.html.j2"} <= set(names)
    for name in names:
        assert not re.search(r"autoescape|\|\s*safe", (ROOT / name).read_text()), name


def test_blocks_are_markup_and_words_are_not() -> None:
    made = macro("bullets", "report/blocks.html.j2", ["<b>", Markup("<i>x</i>")], False)
    assert "<li>&lt;b&gt;</li>" in made and "<li><i>x</i></li>" in made

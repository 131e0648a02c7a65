"""What a page sets above the line, and its formulas, as text; everything else of the page is as it was."""

from __future__ import annotations

import pytest

from fathom.corpus.html import all_text
from fathom.corpus.typeset import typeset


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>10<sup>3 bytes<p>next</sup> one", "10^{3 bytes}\n\nnext one"),
        ("<p>10<b><sup>3</b></sup> bytes", "10³ bytes"),
        ("<table><tr><td>2<sup>3<td>4</table>", "2³ 4"),
        ("<p>19<sup>th</sup> of Word<sup>TM</sup> at 10<sup>&deg;</sup>", "19th of Word™ at 10°"),
        (
            "<style>p{a:b} .c3{color:red;vertical-align:super}</style><p>10<span class='c1 c3'>24</span> kg",
            "10²⁴ kg",
        ),
        ("<style>.d, span.low {font-size:70%; vertical-align: -0.4em}</style><p>x<span class='low'>2</span>1", "x₂1"),
        ("<style>.t {vertical-align: -1px}</style><p>10<span class='t'>24</span> kg", "1024 kg"),
        ("<p>10<span style='font-size: 0.7em; vertical-align: 0.5em'>24</span> kg", "10²⁴ kg"),
        ("<p>10<span style='vertical-align: 2px'>24</span> kg", "1024 kg"),
        ("<p>R&D a&b=c &copy 2<sup>3</sup> < 4", "R&D a&b=c © 2³ < 4"),
        ("<script>a<sup>2</sup></script><p>b<!-- <sup>2</sup> --><sup>3</sup>", "b³"),
        ("<p class=notes>1<sup>2</sup> <span class=note>one<sup>3</sup></span>", "1² one³"),
        ("<p>said<sup class='Inline-Template'>[<a href='/x'>citation needed</a>]</sup>.", "said."),
        ("<p>10<span class='align-super text-xs'>24</span> and 2<b class=exponent>5</b>", "10²⁴ and 2⁵"),
        (
            "<p><span style='display: none'>7003</span>8 and <i hidden>9</i>6, <b style='display:inline'>7</b>0",
            "8 and 6, 70",
        ),
        (
            "<p>said<a epub:type=noteref href='#n'>1</a>, see<a role=doc-noteref href='#n'> note one</a>",
            "said, see note one",
        ),
        ("<p>said<a class=x href='#n'>1</a>", "said1"),
        (
            "<p>said<a role=doc-noteref href='#n'><sup>65</sup></a>, <a epub:type=noteref href='#g'>dhow</a>",
            "said, dhow",
        ),
        (
            "<p>a<a epub:type=noteref href='#fn4'>iv</a> b<a epub:type=noteref href='#n1'>1.</a> c<a epub:type=noteref "
            "href='#n1001'>[1001]</a> d<a epub:type=noteref href='#n'>‖</a> <a epub:type=noteref href='#n'>civil</a>",
            "a b c d civil",
        ),
        (
            "<p>by<a epub:type=noteref href='e#note-1089'>1089</a> in <a epub:type=noteref href='#n7'>1884</a>",
            "by in 1884",
        ),
        ("<p>Sir<sup>a</sup> and H<sub>2</sub>O and \x01\x02", "Sirᵃ and H₂O and"),
    ],
)
def test_superscripts(page: str, text: str) -> None:
    assert all_text(page) == text


@pytest.mark.parametrize(
    "page", ["<p>2 sub 3 &amp; <b>c", "<p>a\r\n<sub >2</sub\n>b &lt; c", "<sup", "<p><sup></p>", ""]
)
def test_the_rest_of_a_page_is_as_it_was(page: str) -> None:
    """Byte for byte, tags, entities and line ends."""
    assert typeset(page).page == page.replace("<sub >2</sub\n>", "₂").replace("<sup></p>", "</p>")


FRACTION = "<mfrac><mn>1</mn><msup><mn>10</mn><mrow><mo>-</mo><mn>15</mn></mrow></msup></mfrac>"


@pytest.mark.parametrize(
    ("math", "text"),
    [
        ("<math alttext='an equation is shown here'><mi>r</mi><mo>=</mo><mn>7</mn></math>", "r=7"),
        ("<math alttext='r squared'><msup><mi>r</mi><mn>2</mn></msup></math>", "r²"),
        (
            "<math alttext='\\frac{\\sin 1}{\\mathrm{rank}}'><mi>sin</mi><mn>1</mn><mi>rank</mi></math>",
            "\\(\\frac{\\sin 1}{\\mathrm{rank}}\\)",
        ),
        (
            "<math><mn>1</mn><mo>.</mo><mn>2</mn><mn>8</mn><mo>×</mo><mn>1</mn><msup><mn>0</mn><mn>5</mn></msup></math>",
            "1.28×10⁵",
        ),
        ("<math><mn>5</mn><mfrac><mn>1</mn><mn>2</mn></mfrac></math>", "5 1/2"),
        ("<math alttext='r\\approx 10^{-15}'><mi>r</mi></math>", "\\(r\\approx 10^{-15}\\)"),
        (
            "<math><semantics><mi>x</mi><annotation encoding='application/x-tex'>x < 2</annotation></semantics></math>",
            "\\(x < 2\\)",
        ),
        (f"<math><mi>r</mi><mo>=</mo>{FRACTION}</math>", "r=1/10⁻¹⁵"),
        ("<math><msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup><mspace/><mn>3</mn></math>", "x₁² 3"),
        ("<math><msqrt><mi>a</mi><mo>+</mo><mn>2</mn></msqrt><mroot><mi>b</mi><mn>3</mn></mroot></math>", "√(a+2)³√b"),
        ("<math><mmultiscripts><mi>C</mi><mprescripts/><mn>6</mn><mn>14</mn></mmultiscripts></math>", "₆¹⁴C"),
        (
            "<math><munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover></math>",
            "∑ᵢ₌₁ⁿ",
        ),
        ("<math><mtable><mtr><mtd>1</mtd><mtd>2</mtd></mtr><mtr><mtd>3</mtd></mtr></mtable></math>", "1, 2; 3"),
        ("<math><mn>2</mn><mo>\u2062</mo><mn>3</mn></math>", "2\u20623"),
        ("<math><mi>x", "x"),
        ("<script type='math/tex; mode=display'>a<b^2</script>", "\\[a<b^2\\]"),
        (
            "<span class=katex><math><mi>x</mi><annotation encoding=TeX>x^2</annotation></math>"
            "<span class=katex-html>x<b>2</b></span></span>",
            "\\(x^2\\)",
        ),
        ("<img class=tex alt='x^2'><img alt='a map'>", "\\(x^2\\)"),
        ("<mml:math><mml:msup><mml:mn>2</mml:mn><mml:mn>8</mml:mn></mml:msup></mml:math>", "2⁸"),
        ("<img role=math alt='3/4'>", "\\(3/4\\)"),
        (
            "<span class=mwe-math-mathml-inline style='display: none;'><math alttext='2^{32}'></math></span>",
            "\\(2^{32}\\)",
        ),
        ("<math alttext='x^2'></math><img class=mwe-math-fallback-image-inline alt='x^2'>", "\\(x^2\\)"),
    ],
)
def test_formulas(math: str, text: str) -> None:
    assert all_text(f"<p>so {math} is</p>" if math.endswith(">") else f"<p>so {math}</p><p>is") in (
        f"so {text} is",
        f"so {text}\n\nis",
    )


def test_preformatted_text_keeps_its_blanks() -> None:
    code = "def f(x):\n    if x:\n\treturn  1\n\n\nprint(2)"
    assert all_text(f"<p>a  b</p><pre><code>\n{code}\n</code></pre><p>c\n d</p>") == f"a b\n\n{code}\n\nc d"
    assert all_text("<pre>  a\n  b") == "  a\n  b" and all_text("<p>  a\n  b") == "a b"

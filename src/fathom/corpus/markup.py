"""Markup between and inside words: entities, tags, chat tokens, LaTeX commands, footnote marks, links' targets.

Each is found by one regular expression and replaced by its visible text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

INLINE = "a|abbr|b|bdi|big|cite|code|em|font|i|ins|kbd|mark|q|s|samp|small|span|strong|sub|tt|u|var|wbr"
"""Tags that may stand within a word; all others part words."""
LONGEST = 2000
"""Characters of a tag's attributes, which a reading of their own searches."""
NAMED = (
    r"[a-z]*cite[a-z]*|[a-z]*ref|label|footnotemark|index|includegraphics|begin|end|[vh]space|bibitem|href"
    r"|color|textcolor|input"
)
"""LaTeX commands whose argument is no text of the document."""
FORMAT = (
    r"text(?:bf|it|rm|sf|tt|sc|sl|up|md|normal|superscript|subscript)?|emph|uline|underline|overline|boldsymbol|bm|mbox|hbox"
    r"|ensuremath|operatorname|math(?:rm|bf|it|sf|tt|cal|bb|frak|scr|normal)|[lL]arge|LARGE|[hH]uge|small|footnotesize|tiny"
    r"|normalsize|bf(?:series)?|it(?:shape)?|rm|em|sf|tt|sc|sl|left|right|[bB]igg?[lrm]?|display(?:style)?|textstyle"
    r"|[dt]?frac|sqrt|cdot|times|div|pm|mp|leq?|geq?|neq?|approx|sim|equiv|to|(?:long)?[lrLR](?:eft)?(?:ight)?arrow|infty"
    r"|[lc]?dots|q?quad|item|noindent|par|newline|linebreak|hline|centering|circ|degree|prime|section|subsection|paragraph"
    r"|caption|footnote(?:text)?|sum|int|prod|ldotp|textquote[a-z]*|textendash|textemdash|guillemot[a-z]*"
)
"""LaTeX commands that say how text is set, or that stand for a sign."""
SMALL = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi"
ALPHABET = dict(zip([*SMALL.split(" "), "omega"], "αβγδεζηθικλμνξπρστυφχψω", strict=True))
ALPHABET |= {name.capitalize(): letter.upper() for name, letter in ALPHABET.items()}
RAISED = {ord(high): str(digit) for digit, high in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}

PARTS = {
    "entity": r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,30});",
    "raised": r"<sup>\s*\[?(?P<sup>\d{1,3})\]?\s*</sup>|(?P<high>[⁰¹²³⁴-⁹]+)",
    "inline": rf"</?(?:{INLINE})(?:\s[^<>=]{{1,40}}=[^<>]{{0,{LONGEST}}})?\s?/?>",
    "tag": rf"</?[a-zA-Z][a-zA-Z0-9]{{0,14}}(?:\s[^<>=]{{1,40}}=[^<>]{{0,{LONGEST}}})?\s?/?>",
    "token": r"<\|[^<>|\s]{1,40}\|>|</?[a-zA-Z]{2,12}(?:_[a-zA-Z]{2,12}){1,3}>",
    "note": r"(?<=[\w.,;:!?\"”’)\]])\[(?:\d{1,3}|[a-z]|\^[\w-]{1,20}|note \d{1,3})\]",
    "link": r"\]\((?:https?:|/|\#)[^()\s]{0,300}\)",
    "accent": r"\{?\\(?:['`^~=.][ ]?\{?(?P<mild>[aeiouynczAEIOUYNCZ])|\"\{?(?P<dots>[aeiouyAEIOUY])"
    r"|[cvuHkbdr]\{(?P<hook>[a-zA-Z]))\}{0,2}",
    "named": rf"\\(?:{NAMED})\*?(?:\[[^\[\]]{{0,200}}\])?\{{[^{{}}]{{0,300}}\}}",
    "format": rf"\\(?:{FORMAT})(?![A-Za-z])",
    "greek": rf"\\(?P<letter>{'|'.join(ALPHABET)})(?![A-Za-z])",
    "escape": r"\\u(?P<code>[0-9a-fA-F]{4})",
    "break": r"\\n|\\[rt](?![a-z])",
}
MARKUP = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in PARTS.items()), re.DOTALL)
SIGNS = re.compile(
    r"[&<\\\[\]{⁰¹²³⁴-⁹](?:(?<=&)(?=[#a-zA-Z])|(?<=<)(?=[a-zA-Z/|])|(?<=\\)|(?<=\[)(?<![\s(=\[]\[)(?=[\^\da-z])"
    r"|(?<=\])(?=\()|(?<=\{)(?=\\)|(?<=[⁰¹²³⁴-⁹]))"
)
"""Where markup may begin. A search that begins with one class of characters is many times faster than one for all of
the forms."""


def changes(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, visible text) of each piece of markup in a text."""
    end = 0
    for sign in SIGNS.finditer(text):
        if sign.start() >= end and (match := MARKUP.match(text, sign.start())):
            yield *match.span(), _seen(text, match)
            end = match.end()


def _seen(text: str, match: re.Match[str]) -> str:
    kind = match.lastgroup
    if kind == "entity":
        return html.unescape(match[0]) if not match[0].startswith(("&nbsp", "&shy")) else " " * ("nb" in match[0])
    if kind == "raised":
        return _raised(text, match.start(), match["sup"] or match["high"].translate(RAISED))
    if kind == "accent":
        return match["mild"] or match["dots"] or match["hook"]
    if kind == "escape":
        return chr(int(match["code"], 16))
    if kind == "greek":
        return ALPHABET[match["letter"]]
    return "" if kind in ("inline", "note", "format") else " "


def _raised(text: str, start: int, digits: str) -> str:
    """Raised digits as a separate word if they are an exponent; empty if they are a footnote mark, which directly
    follows a word."""
    before = text[max(start - 2, 0) : start]
    mark = before[-1:] in set('.,;:!?"”’') or (len(before) == 2 and before.isalpha())
    return "" if mark else f" {digits}"

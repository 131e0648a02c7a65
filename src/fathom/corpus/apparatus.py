"""Finds text that editors, programs and video players insert between a document's own words: citations, notes, link
targets, time codes, line prefixes, and the escape sequences of URLs, e-mail and programming languages.

Decontamination reads a text a second time without them. So nothing is lost where a pattern takes away what belongs to
the text: the first reading still has it. Each pattern begins with a literal character, which a search finds fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

YEAR = r"(?:1[5-9]|20)\d\d[a-z]?"
TIME = r"\d{1,3}:\d\d(?::\d\d)?(?:[.,:]\d{1,3})?"
PAGES = r"(?:pp?\.[ ]?)?[\^#*]?\d{1,4}"
PLACES = rf"{PAGES}(?:[ ]?[,;–—-][ ]?{PAGES})*"
KEY = r"[A-Z][A-Za-z]{0,20}\+?[ ’']?\d\d(?:\d\d)?[a-z]?"
SEEN = (
    r"(?i:(?:see[ ])?(?:note|n|fn|refs?|references?|figs?|figures?|tables?|eqs?|equations?|sections?|sec|chapters?|pp?)"
    r"\.?[ ]?)\d{1,3}[a-z]?(?:(?:[ ]?[,;–—-]|[ ]and)[ ]?\d{1,3}[a-z]?)*"
)
"""Another place of the document: `see Figs. 2 and 3`."""
SOURCE = (
    r"[A-Za-z_][\w.]{0,30}[ ]?(?:\+=|\.=|=|<<)[ ]?[A-Za-z]{0,2}(?=[\"'])|[fFrRbBuU]{1,2}(?=[\"'])|(?:REM|rem|dnl)[ ]"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d{1,6})?Z?[ ](?:\[?(?:INFO|DEBUG|WARN(?:ING)?|ERROR)\]?:?[ ])?"
    r"|[A-Z][A-Z_]{1,20}[ ]?\d{0,3}:[ ]"
)
"""What lines of programs, logs and talks begin with."""
LINE = (
    rf"\n[ \t\f]*(?:(?:\d{{1,6}}[ \t]*\n[ \t]*)?{TIME}[ \t]*(?:-->|,{TIME})[^\n]*|Dialogue:(?:[^,\n]{{0,40}},){{9}}"
    rf"|{TIME}(?=[ \t\n])|[\[(<]{TIME}[\])>]|\{{\d{{1,7}}\}}\{{\d{{1,7}}\}}|{SOURCE}"
    r"|(?i:page)[ ]?\d{1,4}(?:[ ]?(?:of|/)[ ]?\d{1,4})?[ \t]*(?=\n)"
    r"|[\[(]?(?:L|[Ll]ine[ ])?\d{1,6}[\])]?(?:[.:|)][ \t]*|[ \t]+|(?=\n)))"
)
"""Cues of subtitles, times, numbers of lines and pages, and names, at the beginning of a line."""
CITED = (
    rf"\[(?<=\S\[){PLACES}\]\([^()\s]{{0,300}}\)|\[{PLACES}\](?![({{])_?|\[{KEY}(?:[,;][ ]?{KEY})*\]"
    rf"|\[{SEEN}\]|\[{TIME}\]"
    r"|\[[^\[\]\n@]{0,40}@[\w:.#$%&+?<>~/-]+[^\[\]\n]{0,120}\]"
    rf"|\[(?:[a-z.]{{2,9}},?[ ])?[A-Z][^\[\]]{{1,160}}?[\s,]{YEAR}(?:[,;:.][^\[\]]{{0,160}})?\]|\[{YEAR}\]"
    r"|\[(?:citation needed|sic|edit|who\?|when\?)\]|\[fn:[^\[\]]{0,300}\]"
)
PARENTHESES = (
    rf"\((?:\d{{1,3}}(?:[ ]?[,;–—-][ ]?\d{{1,3}})*\)|{SEEN}\)|{TIME}\)"
    r"|(?:https?://|www\.|(?:doi|DOI):?[ ]?10\.)[^\s()]{1,300}\)"
    rf"|(?<=al\.[ ]\(){YEAR}\)"
    rf"|(?:[a-z.]{{2,9}},?[ ])?[A-Z][^()\d]{{1,160}}(?:\d{{1,3}}(?!\d)[^()\d]{{1,80}}){{0,3}}(?<=[\s,]){YEAR}"
    r"(?:[,;:.][^()]{0,160})?\))"
)
NOTE_TEMPLATES = (
    r"(?i:s?fn[pm]?|efn|cite[ \w]{0,20}|citation[ \w]{0,20}|cn|fact|refn|rp|r|harv[a-z]*|note|ref|clarify|when|who)"
)
NOTES = {
    CITED: "[",
    PARENTHESES: "(",
    rf"\{{\{{{NOTE_TEMPLATES}(?:\|[^{{}}]{{0,300}})?\}}\}}": "{",
    r"<ref\b[^<>]{0,200}(?:/>|>[^<>]{0,500}</ref>)": "<ref",
    r"<r[tp]>[^<>]{0,60}</r[tp]>": "<r",
    r"<!--(?:[^<-]|<(?!!--)|-(?!->)){0,2000}-->": "<!--",
    r"<think(?:ing)?>(?:[^<]|<(?!/?think)){0,9000}</think(?:ing)?>\s*": "<think",
    r"\\footnote(?:text)?(?:\[\d{0,4}\])?\{[^{}]{0,300}\}": "\\foot",
    r"footnote:[\w-]{0,40}\[[^\[\]]{0,300}\]": "[",
    r"\^(?:\d{1,3}(?:[,–-]\d{1,3})*\^|\[[^\[\]]{0,300}\])": "^",
    r"(?:\{|:)(?:foot)?cite(?::?[a-z]{1,2})?(?:\}|:)`[^`\n]{1,120}`": "`",
}
"""They are left out without a trace, as is the blank before them. Each has a text, which begins with a rare
character, without which there is none. A number that is the text of a link is a citation only behind a word."""
LINKS = {
    r"\]\((?:<[^<>\n]{0,300}>|(?:[^()\s]|\([^()\s]{0,80}\)){1,300})(?:\s+(?:\"[^\"\n]{0,200}\"|'[^'\n]{0,200}'))?\)": "]",  # noqa: E501
    r"\]\[[^\[\]\n]{0,60}\]": "]",
    r"\[\[[^\[\]\n|]{1,300}(?:\]\[|\|(?:[^\[\]|\n]{0,200}\|)*)": "[",
    r"\[https?://[^\s\[\]]{1,300}[ ]": "[http",
    r"\{\{(?:[^{}|\n]{0,60}\|)+(?=[^{}|\n]{0,200}\}\})": "{",
    r":(?=[a-z]+:(?:[a-z]+:)?`)[a-z:]{1,60}(?=`)": "`",
    r"<[^<>\n`]{1,300}>(?=`)": "`",
    r"link:[^\s\[\]]{0,300}\[": "[",
    r"xref:[^\s\[\]]{0,300}\[": "[",
    r"<<[\w-]{1,60},": "<",
    r"<(?:https?:|mailto:|[@#!])[^|<>\s]{1,300}\|": "<",
    r"\[/?(?:url|b|i|u|s|quote|color|size|center|img|font)(?:=[^\[\]\n]{0,200})?\]": "[",
    r"@(?=[a-z]{1,12}\{)[a-z]+": "@",
    r"\\f[BIRP]": "\\",
    r"\{(?:[#.:][^{}\n]{1,100}|/?(?:color|font)(?::[^{}\n]{0,60})?|\\(?:an?\d|[bisu][01]|pos)[^{}\n]{0,60})\}": "{",
    "\u200b": "\u200b",
    r"https?://[^\s<>()\[\]|?%]{1,300}(?:\?[^\s<>()\[\]|+%]{0,300}(?=[\s)>\]]|\Z))?": "://",
    rf"<{TIME}>": "<",
}
"""What is not the visible text of a link or of a command."""
ESCAPES = {
    r"%(?:25)*[0-9A-Fa-f]{2}(?:%(?:25)*[0-9A-Fa-f]{2})*": "%",
    r"=\n": "=",
    r"=[0-9A-F]{2}(?:=[0-9A-F]{2})*": "=",
    r"%u[0-9a-fA-F]{4}": "%u",
    r"(?:\\x[0-9a-fA-F]{2})+": "\\x",
    r"(?:\\'[0-9a-f]{2})+": "\\'",
    r"(?<=[\w.?!,;:\"')\]])\\[tnr](?=\w)": "\\",
    r"\u00c3[\x80-\xbf\u0152-\u2122]": "\u00c3",
    r"\u00e2\u20ac[\x80-\xbf\u0152-\u2122]?": "\u00e2\u20ac",
}
THOUSANDS = r" (?=[0-9]{3}(?![0-9]))(?<=[0-9] )"
DEEPEST = 3
"""Times that a URL may be escaped."""

Change = tuple[int, int, str]
_NOTES, _LINKS, _ESCAPES = ({re.compile(one): needs for one, needs in some.items()} for some in (NOTES, LINKS, ESCAPES))
_LINE, _THOUSANDS = re.compile(LINE), re.compile(THOUSANDS)


def changes(text: str) -> list[Change]:
    """(start, end, replacement) of each citation, note, link target or other insertion in a text, in order."""
    found, end = [], 0
    for start, stop, new in sorted(_found(text), key=lambda one: (one[0], -one[1])):
        if start >= end:
            found.append((start, stop, new))
            end = stop
    return found


def _found(text: str) -> Iterator[Change]:
    cue = -1
    for match in _LINE.finditer(f"\n{text}"):
        if match.start() == cue and "-->" not in match[0]:  # a number with which the text of a subtitle begins
            continue
        cue = match.end() if "-->" in match[0] else -1
        yield max(match.start() - 1, 0), match.end() - 1, "\n" if match.start() else ""
    for match in _matches(_NOTES, text):
        start = match.start()
        yield start - (text[start - 1 : start] in (" ", "\t")), match.end(), ""
    for match in _matches(_LINKS, text):
        yield *match.span(), "" if match[0].startswith(("]", "[", "\\", "@", ":", "{")) else " "
    for match in _matches(_ESCAPES, text):
        yield *match.span(), _unescaped(match[0])
    for match in _THOUSANDS.finditer(text):
        yield *match.span(), ""


def _matches(patterns: Mapping[re.Pattern[str], str], text: str) -> Iterator[re.Match[str]]:
    for pattern, needs in patterns.items():
        if needs[0] in text and needs in text:
            yield from pattern.finditer(text)


def _unescaped(found: str) -> str:
    if found == "=\n":
        return ""
    if found.startswith("%u"):
        return chr(int(found[2:], 16))
    if found.startswith(("\\x", "\\'")):
        code = "utf-8" if found.startswith("\\x") else "cp1252"
        return bytes.fromhex(found.replace(found[:2], "")).decode(code, "replace")
    if found[0] in "\u00c3\u00e2":  # UTF-8 that was read as the code page of Windows
        return found.encode("cp1252", "replace").decode("utf-8", "replace")
    if found.startswith("\\"):
        return " "
    found = found.replace("=", "%")
    for _ in range(DEEPEST):
        found = unquote(found, errors="replace")
    return found

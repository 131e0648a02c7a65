"""The forms in which a benchmark question may leak into text: data files, chats, web pages, typography, notes, and
damaged text.

`fathom corpus audit` plants a benchmark's own items in them and prints how many its search finds. A form with `answers`
holds the answer only where the item has one. A form of `DAMAGED` changes the question's own words.
"""

from __future__ import annotations

import html
import json
import quopri
import random
import string
from collections.abc import Callable, Sequence
from urllib.parse import quote, quote_plus

from fathom.corpus.benchmarks import LETTERS, Item
from fathom.corpus.confusables import LOOKALIKES

Form = Callable[[Item, random.Random], str]
CYRILLIC = {latin: next(one for one in shapes if "\u0400" <= one <= "\u052f")
            for latin, shapes in LOOKALIKES.items() if any("\u0400" <= one <= "\u052f" for one in shapes)}  # fmt: skip
ACCENTED = dict(zip("aeioucn", "áêïöûçñ", strict=True))
OCR = {"e": "c", "l": "1", "o": "0", "i": "l", "t": "f", "h": "b", "n": "u", "a": "o", "m": "rn", "w": "vv", "c": "e"}
"""What a scanner reads instead of a letter."""
BRITISH = (("color", "colour"), ("center", "centre"), ("ize", "ise"), ("yze", "yse"), ("meter", "metre"),
           ("avor", "avour"), ("gray", "grey"), ("aluminum", "aluminium"), ("fense", "fence"))  # fmt: skip
SHORTENED = ((" is ", "'s "), (" are ", "'re "), (" not ", "n't "), (" will ", "'ll "), (" would ", "'d "))
REASONS = (
    "Let us think step by step. A careful reader first looks at what is asked, then at what is known of each thing, "
    "and rules out what cannot be so, which leaves one thing alone."
)
INSERTED = ("really", "then", "also", "quite", "always", "new", "very", "old")


def asked(item: Item) -> str:
    """The passage (if any) and the question of a benchmark item."""
    return f"{item.context}\n{item.stem}" if item.context else item.stem


def whole(item: Item) -> str:
    """The question and its answer."""
    return f"{asked(item)} {item.gold}".rstrip()


def listed(item: Item, mark: str = "A.") -> str:
    """An item's choices, one on each line, each after `mark` with its `A` or `1` replaced by the choice's label."""
    labels = LETTERS if "A" in mark else "123456789" + LETTERS
    first = "A" if "A" in mark else "1"
    return "\n".join(f"{mark.replace(first, labels[n])} {choice}" for n, choice in enumerate(item.choices[:26]))


def every(text: str, share: int, change: Callable[[str], str]) -> str:
    """A text in which every `share`-th word is changed."""
    return " ".join(change(word) if n % share == 0 and word else word for n, word in enumerate(text.split(" ")))


def put(text: str, share: int, between: str) -> str:
    """A text with `between` inserted after every `share`-th word."""
    return every(text, share, lambda word: f"{word}{between}")


def _choices(item: Item) -> list[str]:
    return list(item.choices) or [item.gold]


def _place(item: Item) -> int:
    return item.answer or 0


def _row(item: Item, question: str, answer: str, **more: object) -> str:
    return json.dumps({question: asked(item), **more, answer: item.gold}, ensure_ascii=False)


def _chat(item: Item, messages: str, role: str, content: str, names: tuple[str, str]) -> str:
    said = zip(names, (asked(item), item.gold), strict=True)
    return json.dumps({messages: [{role: name, content: text} for name, text in said]}, ensure_ascii=False)


def _mmlu(item: Item, sort_keys: bool = False) -> str:
    row = {"question": asked(item), "subject": "abstract_algebra", "choices": _choices(item), "answer": _place(item)}
    return json.dumps(row, ensure_ascii=False, sort_keys=sort_keys)


def _arc(item: Item, sort_keys: bool = False) -> str:
    labels = list(LETTERS[: len(_choices(item))])
    choices = {"text": _choices(item), "label": labels}
    row = {"id": "M_1", "question": asked(item), "choices": choices, "answerKey": labels[_place(item)]}
    return json.dumps(row, ensure_ascii=False, sort_keys=sort_keys)


def _distractors(item: Item) -> str:
    wrong = [one for one in item.choices if one != item.gold]
    row = {"question": asked(item), **{f"distractor{n}": one for n, one in enumerate(wrong, 1)}}
    return json.dumps(row | {"correct_answer": item.gold}, ensure_ascii=False)


def _solutions(item: Item) -> str:
    row = {"goal": asked(item), **{f"sol{n}": one for n, one in enumerate(_choices(item), 1)}, "label": _place(item)}
    return json.dumps(row, ensure_ascii=False)


def _csv(item: Item, comma: str) -> str:
    return comma.join('"' + one.replace('"', '""') + '"' for one in (asked(item), *item.choices, item.gold))


def _llama(item: Item) -> str:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
    return "<|begin_of_text|>" + head.format("user", asked(item)) + head.format("assistant", item.gold)


def _subtitles(item: Item) -> str:
    words = whole(item).split()
    cues = [" ".join(words[at : at + 6]) for at in range(0, len(words), 6)]
    time = "00:00:{0:02d},000 --> 00:00:{0:02d},900"
    return "\n\n".join(f"{n}\n{time.format(n % 60)}\n{cue}" for n, cue in enumerate(cues, 1))


def _lines(item: Item, begin: Callable[[int], str], width: int = 5) -> str:
    words = whole(item).split()
    return "\n".join(begin(n) + " ".join(words[at : at + width]) for n, at in enumerate(range(0, len(words), width), 1))


def _hyphenated(item: Item, mark: str) -> str:
    def divided(word: str) -> str:
        return f"{word[:3]}-\n{mark}{word[3:]}" if len(word) > 6 and word.isalpha() else word

    return mark + every(whole(item), 3, divided)


def _attributes(item: Item, tag: str) -> str:
    return tag.format(*(f'"{html.escape(text)}"' for text in (asked(item), item.gold)))


def _grouped(text: str, comma: str) -> str:
    return " ".join(
        f"{int(word):,}".replace(",", comma) if word.isdecimal() and word.isascii() and len(word) > 3 else word
        for word in text.split(" ")
    )


FORMS: dict[str, Form] = {
    "question answer": lambda item, _: whole(item),
    "Q: A:": lambda item, _: f"Q: {asked(item)}\nA: {item.gold}",
    "Question: Answer:": lambda item, _: f"Question: {asked(item)}\nAnswer: {item.gold}",
    "Correct answer:": lambda item, _: f"{asked(item)}\nCorrect answer: {item.gold}",
    "Show answer": lambda item, _: f"{asked(item)}\nShow answer\n{item.gold}",
    "Answer explanation": lambda item, _: f"{asked(item)}\nAnswer explanation: {item.gold}",
    "He replied:": lambda item, _: f"She asked: {asked(item)} He replied: {item.gold}",
    "the correct answer is (B)": lambda item, _: f"{asked(item)} The correct answer is (B) {item.gold}",
    "Sure!": lambda item, _: f"{asked(item)}\n\nSure! The answer is {item.gold}.",
    "only the answer": lambda item, _: f"{asked(item)} Give me only the answer.\n\n{item.gold}",
    "answer first": lambda item, _: f"Answer: {item.gold}\nQuestion: {asked(item)}",
    "forum": lambda item, _: f"{asked(item)}\nPosted by Ann at 12:30\n{item.gold}",
    "flashcard": lambda item, _: f"{asked(item)}\t{item.gold}",
    "French": lambda item, _: f"Question : {asked(item)}\nRéponse : {item.gold}",
    "German": lambda item, _: f"Frage: {asked(item)}\nAntwort: {item.gold}",
    "Spanish": lambda item, _: f"Pregunta: {asked(item)}\nRespuesta: {item.gold}",
    "Chinese": lambda item, _: f"问题：{asked(item)}\n答案：{item.gold}",
    "Russian": lambda item, _: f"Вопрос: {asked(item)}\nОтвет: {item.gold}",
    "options A.": lambda item, _: f"{asked(item)}\n{listed(item)}\nAnswer: {item.gold}",
    "options (1)": lambda item, _: f"{asked(item)}\n{listed(item, '(1)')}\nAnswer: {item.gold}",
    "options, no key": lambda item, _: f"{asked(item)}\n{listed(item, 'A)') or item.gold}",
    "check boxes": lambda item, _: f"{asked(item)}\n" + "\n".join(
        f"- [{'x' if one == item.gold else ' '}] {one}" for one in _choices(item)
    ),
    "row: messages": lambda item, _: _chat(item, "messages", "role", "content", ("user", "assistant")),
    "row: ShareGPT": lambda item, _: _chat(item, "conversations", "from", "value", ("human", "gpt")),
    "row: Alpaca": lambda item, _: _row(item, "instruction", "output", input=""),
    "row: prompt, completion": lambda item, _: _row(item, "prompt", "completion"),
    "row: query, label": lambda item, _: _row(item, "query", "label"),
    "row: question, target": lambda item, _: _row(item, "question", "target"),
    "row: problem, solution": lambda item, _: _row(item, "problem", "solution", level="Level 5"),
    "row: keys sorted": lambda item, _: json.dumps({"answer": item.gold, "id": "M_1", "question": asked(item)}),
    "row: MMLU's": lambda item, _: _mmlu(item),
    "row: MMLU's, sorted": lambda item, _: _mmlu(item, sort_keys=True),
    "row: ARC's": lambda item, _: _arc(item),
    "row: ARC's, sorted": lambda item, _: _arc(item, sort_keys=True),
    "row: SciQ's": lambda item, _: _distractors(item),
    "row: PIQA's": lambda item, _: _solutions(item),
    "row: escaped": lambda item, _: json.dumps({"question": asked(item), "answer": item.gold}),
    "row of CSV": lambda item, _: _csv(item, ","),
    "row of TSV": lambda item, _: f"{asked(item)}\t{item.gold}\t1",
    "row of a table": lambda item, _: f"| {asked(item)} | {item.gold} |",
    "YAML": lambda item, _: f"- question: {asked(item)}\n  answer: {item.gold}",
    "XML": lambda item, _: f"<question>{html.escape(asked(item))}</question><answer>{html.escape(item.gold)}</answer>",
    "HTML": lambda item, _: f"<dt>{html.escape(asked(item))}</dt>\n<dd>{html.escape(item.gold)}</dd>",
    "GIFT": lambda item, _: f"::Q1:: {asked(item)} {{ ={item.gold} }}",
    "Python": lambda item, _: f"    ({asked(item)!r}, {item.gold!r}),",
    "C, line by line": lambda item, _: _lines(item, lambda n: '"\n"' if n > 1 else '"'),
    "comments": lambda item, _: _lines(item, lambda n: "# "),
    "ChatML": lambda item, _: "<|im_start|>user\n"
    f"{asked(item)}<|im_end|>\n<|im_start|>assistant\n{item.gold}<|im_end|>",
    "[INST]": lambda item, _: f"<s>[INST] {asked(item)} [/INST] {item.gold} </s>",
    "Llama 3": lambda item, _: _llama(item),
    "Gemma": lambda item, _: f"<start_of_turn>user\n{asked(item)}<end_of_turn>\n<start_of_turn>model\n{item.gold}",
    "Alpaca": lambda item, _: f"### Instruction:\n{asked(item)}\n\n### Response:\n{item.gold}",
    "Human: AI:": lambda item, _: f"Human: {asked(item)}\nAI: {item.gold}",
    "upper case": lambda item, _: whole(item).upper(),
    "entities": lambda item, _: html.escape(whole(item)).replace(" ", "&nbsp;").replace("e", "&#101;"),
    "homoglyphs": lambda item, _: "".join(CYRILLIC.get(one, one) for one in whole(item)),
    "homoglyphs, a word in six": lambda item, _: every(
        whole(item), 6, lambda word: "".join(CYRILLIC.get(one, one) for one in word)
    ),
    "diacritics": lambda item, _: "".join(ACCENTED.get(one, one) for one in whole(item)),
    "combining marks": lambda item, _: "".join(f"{one}\u0301" if one.isalpha() else one for one in whole(item)),
    "soft hyphens": lambda item, _: every(whole(item), 2, lambda word: f"{word[:2]}\u00ad{word[2:]}"),
    "fullwidth": lambda item, _: "".join(chr(ord(one) + 0xFEE0) if "!" <= one <= "~" else one for one in whole(item)),
    "mathematical": lambda item, _: "".join(
        chr(0x1D41A + ord(one) - ord("a")) if "a" <= one <= "z" else one for one in whole(item)
    ),
    "tags": lambda item, _: every(
        html.escape(whole(item), quote=False), 3, lambda word: f"<b>{word[:2]}</b>{word[2:]}<br/>"
    ),
    "LaTeX": lambda item, _: every(whole(item), 4, lambda word: f"\\textbf{{{word}}}"),
    "emphasis": lambda item, _: every(whole(item), 1, lambda word: f"**{word}**"),
    "a word a line": lambda item, _: whole(item).replace(" ", "\n"),
    "footnote marks": lambda item, _: every(whole(item), 5, lambda word: f"{word}[{len(word)}]"),
    "citations [12, 13]": lambda item, _: put(whole(item), 5, " [12, 13]"),
    "citations (Smith et al., 2020)": lambda item, _: put(whole(item), 5, " (Smith et al., 2020)"),
    "notes (1)": lambda item, _: put(whole(item), 5, " (1)"),
    "<ref>": lambda item, _: put(whole(item), 5, "<ref>Smith 2020, p. 4</ref>"),
    "{{sfn}}": lambda item, _: put(whole(item), 5, "{{sfn|Smith|2020|p=4}}"),
    "links of Markdown": lambda item, _: every(whole(item), 4, lambda word: f'[{word}](page.html "a title")'),
    "links of wikis": lambda item, _: every(whole(item), 4, lambda word: f"[[some page|{word}]]"),
    "links of RST": lambda item, _: every(whole(item), 4, lambda word: f"`{word} <https://a.org/b>`__"),
    "roles of RST": lambda item, _: every(whole(item), 4, lambda word: f":ref:`{word} <target>`"),
    "links of org": lambda item, _: every(whole(item), 4, lambda word: f"[[https://a.org][{word}]]"),
    "links of boards": lambda item, _: every(whole(item), 4, lambda word: f"[url=http://a.b/c]{word}[/url]"),
    "bare addresses": lambda item, _: put(whole(item), 5, " (https://a.b/c/d?e=f)"),
    "subtitles": lambda item, _: _subtitles(item),
    "times [00:12]": lambda item, _: _lines(item, lambda n: f"[00:{n % 60:02d}] "),
    "numbered lines": lambda item, _: _lines(item, lambda n: f"{n:3d}  "),
    "quoted": lambda item, _: _lines(item, lambda n: "> "),
    "digit groups": lambda item, _: _grouped(whole(item), ","),
    "digit groups, blanks": lambda item, _: _grouped(whole(item), " "),
    "hyphenated": lambda item, _: _hyphenated(item, ""),
    "hyphenated, quoted": lambda item, _: _hyphenated(item, "> "),
    "hyphenated comments": lambda item, _: _hyphenated(item, "# "),
    "URL": lambda item, _: f"https://a.org/s?q={quote_plus(whole(item))}",
    "URL, twice": lambda item, _: quote(quote(whole(item))),
    "comment of HTML": lambda item, _: f"<!-- {asked(item)} Answer: {item.gold} -->",
    "attributes": lambda item, _: _attributes(item, "<quiz-card data-question={} data-answer={}></quiz-card>"),
    "rows of XML": lambda item, _: _attributes(item, '<row Id="4" Title={} Body={} Score="3"/>'),
    "footnote of LaTeX": lambda item, _: f"\\footnote{{{whole(item)}}}",
    "reasons": lambda item, _: f"{asked(item)}\n{REASONS} So the answer is {item.gold}.",
    "<think>": lambda item, _: f"{asked(item)}\n<think>\n{REASONS}\n</think>\n\n{item.gold}",
    "circled letters": lambda item, _: "".join(
        chr(0x24D0 + ord(one) - ord("a")) if "a" <= one <= "z" else one for one in whole(item).lower()
    ),
    "blanks without width": lambda item, _: whole(item).replace(" ", "\u200b"),
    "notes (12, 13)": lambda item, _: put(whole(item), 5, " (12, 13)"),
    "(see Fig. 2a)": lambda item, _: put(whole(item), 5, " (see Fig. 2a)"),
    "notes ^12^": lambda item, _: put(whole(item), 5, "^12^"),
    "{{citation needed}}": lambda item, _: put(whole(item), 5, "{{citation needed|date=May 2020}}"),
    "spans of Pandoc": lambda item, _: every(whole(item), 4, lambda word: f"[{word}]{{.smallcaps}}"),
    "page breaks": lambda item, _: _lines(item, lambda n: "\fPage 12 of 30\n" if n % 3 == 2 else ""),
    "Python, line by line": lambda item, _: _lines(item, lambda n: '"\ntext += f"' if n > 1 else 'text = f"'),
    "log": lambda item, _: _lines(item, lambda n: f"2026-01-01 12:00:{n % 60:02d},123 INFO "),
    "speakers": lambda item, _: _lines(item, lambda n: f"SPEAKER_0{n % 2}: "),
    "quoted-printable": lambda item, _: quopri.encodestring(whole(item).encode()).decode(),
}  # fmt: skip
"""A leak's text, by its form, with the question's words unchanged."""


def _words_changed(item: Item, change: Callable[[list[str]], Sequence[str]]) -> str:
    """An item's question with its words altered by `change`, followed by the item's answer."""
    return f"{' '.join(change(asked(item).split()))} {item.gold}".rstrip()


def _inserted(words: list[str], chance: random.Random) -> list[str]:
    at = chance.randrange(1, len(words)) if len(words) > 1 else 1
    return [*words[:at], chance.choice(INSERTED), *words[at:]]


def _deleted(words: list[str], chance: random.Random) -> list[str]:
    at = chance.randrange(len(words))
    return [*words[:at], *words[at + 1 :]]


def scanned(text: str, share: float, chance: random.Random) -> str:
    """A text with simulated OCR errors in a given share of its letters."""

    def read(letter: str) -> str:
        if letter.isspace() or chance.random() >= share:
            return letter
        return OCR.get(letter.lower(), chance.choice(string.ascii_lowercase))

    return "".join(map(read, text))


def _spelled(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for one, other in pairs:
        text = text.replace(one, other)
    return text


DAMAGED: dict[str, Form] = {
    "one word inserted": lambda item, chance: _words_changed(item, lambda words: _inserted(words, chance)),
    "one word deleted": lambda item, chance: _words_changed(item, lambda words: _deleted(words, chance)),
    "OCR, 1 %": lambda item, chance: scanned(whole(item), 0.01, chance),
    "OCR, 2 %": lambda item, chance: scanned(whole(item), 0.02, chance),
    "British spelling": lambda item, _: _spelled(whole(item), BRITISH),
    "'s and n't": lambda item, _: _spelled(whole(item), SHORTENED),
}
"""Forms that change words of the question itself; only a search with edit distance finds them."""
ALL = {**FORMS, **DAMAGED}
NEED_CHOICES = ("options", "check boxes")
"""What forms begin with that need an item with choices."""

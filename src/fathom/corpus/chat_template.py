"""Splits the output of a tokenizer's own chat template into pieces: the messages and the text around them, each with a
flag that says whether it is trained on.

A template is a program and does not say which part of its output is a message. It is therefore run on a conversation in
which a unique mark replaces every message; the text between the marks belongs to the template. With the messages put
back in place of the marks, the result must equal the template's output for the original conversation. A template that
rewrites messages, by removing earlier thoughts for example, is refused for these conversations.

`converse.py` lists such a conversation in `rejected.jsonl` as `no_template`. `templates.py` has the built-in templates,
and encodes the pieces: a message that spells a special token is encoded as text (`plain` in `data/tokenizer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fathom.corpus.templates import ChatMessage, TemplatePart, is_trained
from fathom.errors import DataError

MARKS = "\ue000{}\ue001"
"""Private characters of Unicode, so that no template treats a mark as anything but text."""


class TokenizerTemplate:
    """The chat template of a saved tokenizer.

    What the template marks with `{% generation %}` is trained on. If the template marks nothing, each assistant message
    is trained on, with the text after it up to and including the first special token, which ends the turn.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # None would ask
        if not self._tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template")
        self._marks_spans = re.search(r"\{%-?\s*generation\s*-?%\}", self._tokenizer.chat_template) is not None
        found = sorted(map(str, self._tokenizer.get_added_vocab()), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, found)) or r"(?!)")

    def __call__(self, messages: Sequence[ChatMessage]) -> Iterator[TemplatePart]:
        """The pieces of a conversation."""
        if any(re.search("[\ue000\ue001]", str(one["content"])) for one in messages):
            raise DataError("a message contains the reserved characters U+E000 or U+E001")
        marked, spans = self._render([{**one, "content": MARKS.format(n)} for n, one in enumerate(messages)])
        said, _ = self._render(messages)
        order = [int(number) for number in re.findall("\ue000(\\d+)\ue001", marked)]
        if len(set(order)) < len(order):
            raise DataError("the chat template writes a message twice")
        if left_out := {n for n, one in enumerate(messages) if one["role"] == "assistant"} - set(order):
            raise DataError(f"the chat template leaves message {min(left_out) + 1} out")
        around = re.split("\ue000\\d+\ue001", marked)
        contents = _contents(around, [str(messages[number]["content"]) for number in order], said)
        trained = self._trained(messages, order, around, spans)
        place = 0
        for number, text in enumerate(around):
            yield from self._fixed(text, trained[place : place + len(text)])
            place += len(text)
            if number < len(order):
                yield TemplatePart(contents[number], trained[place])
                place += len(MARKS.format(order[number]))

    def _render(self, messages: Sequence[ChatMessage]) -> tuple[str, list[tuple[int, int]]]:
        """The text that the template renders from messages, and the (start, end) spans that it marks as the
        assistant's."""
        from jinja2.exceptions import TemplateError as JinjaError
        from transformers.utils.chat_template_utils import render_jinja_template

        plain = [{key: value for key, value in one.items() if key != "train"} for one in messages]
        try:
            texts, spans = render_jinja_template(
                conversations=[plain],
                chat_template=self._tokenizer.chat_template,
                return_assistant_tokens_mask=self._marks_spans,
                **self._tokenizer.special_tokens_map,
            )
        except (JinjaError, TypeError, ValueError, KeyError) as error:  # the template's own code may raise any of them
            raise DataError(f"the chat template fails: {' '.join(str(error).split())}") from None
        return texts[0], [(start, stop) for start, stop in spans[0]] if self._marks_spans else []

    def _trained(
        self, messages: Sequence[ChatMessage], order: list[int], around: list[str], spans: list[tuple[int, int]]
    ) -> list[bool]:
        """For every character of the marked text, whether it is trained on."""
        begins, place = [], 0
        for text, number in zip(around, [*order, None], strict=True):
            place += len(text)
            begins.append(place)
            place += len(MARKS.format(number)) if number is not None else 0
        trained = [False] * place
        turns = [n for n, number in enumerate(order) if messages[number]["role"] == "assistant"]
        if not self._marks_spans:
            spans = [
                (begins[n], self._end_of_turn(around[n + 1], begins[n] + len(MARKS.format(order[n])))) for n in turns
            ]
        owners = [next((n for n in turns if start <= begins[n] < stop), None) for start, stop in spans]
        for (start, stop), owner in zip(spans, owners, strict=True):
            if owner is None or is_trained(messages[order[owner]]):
                trained[start:stop] = [True] * (stop - start)
        return trained

    def _end_of_turn(self, after: str, start: int) -> int:
        """The position after the special token that ends an answer."""
        found = self._tokens.search(after)
        if found is None or after[: found.start()].strip():
            raise DataError("the chat template ends an answer without a special token")
        return start + found.end()

    def _fixed(self, text: str, trained: Sequence[bool]) -> Iterator[TemplatePart]:
        """The template's own text in parts, cut at special tokens and wherever the loss mask changes."""
        edges = {0, len(text), *(n for n in range(1, len(text)) if trained[n] != trained[n - 1])}
        whole = {(found.start(), found.end()) for found in self._tokens.finditer(text)}
        cuts = sorted(edges | {edge for span in whole for edge in span})
        for start, stop in pairwise(cuts):
            yield TemplatePart(text[start:stop], trained[start], token=(start, stop) in whole)


def _contents(around: Sequence[str], messages: Sequence[str], said: str) -> list[str]:
    """Each message as the template writes it: unchanged, or stripped of white space at its start, its end or both."""
    found, place = [], len(around[0])
    if not said.startswith(around[0]):
        raise DataError("the chat template's text around the messages depends on the messages' content")
    for number, (content, after) in enumerate(zip(messages, around[1:], strict=True)):
        last = number == len(messages) - 1
        for one in dict.fromkeys((content, content.strip(), content.lstrip(), content.rstrip())):
            rest = said[place:]
            if rest == one + after if last else rest.startswith(one + after):
                found.append(one)
                place += len(one) + len(after)
                break
        else:
            raise DataError(f"the template rewrites message {number + 1}")
    return found

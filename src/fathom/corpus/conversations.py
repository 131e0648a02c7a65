"""Conversations: converts rows of several chat formats into one format, a list of messages.

`clean.py` keeps the text of messages as it is written, outer spaces included, except for private data that
`normalize.mask` replaces. `exports.py` writes preference pairs for TRL.

`ingest.py` reads the rows, and lists a file without rows as `parse_error`. `traces.py` makes conversations of ReAct
traces, `verbalizer.py` of tables, `papers.py` of papers, and `benchmarks/expert.py`, outside the package, of documents.
`converse.py` writes tokens, the loss mask and `rejected.jsonl`; `duplicates.py` compares conversations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from fathom.corpus.documents import ConversationMessage
from fathom.errors import DataError

TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"} | {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function": "tool",
}


def messages_of(row: Mapping[str, object]) -> list[ConversationMessage]:
    """The messages of a row.

    It holds `messages` of role and content, `conversations` of from and value, or instruction, input and output, which
    a `history` of earlier questions and answers may precede. A row may have a `system` message, and a message may say
    `train: false`.
    """
    given = next((row[key] for key in ("messages", "conversations") if row.get(key) is not None), None)
    if given is not None:
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise DataError("messages: expected a list that is not empty")
        return _with_system(row, [_message(number, one) for number, one in enumerate(given)])
    if "instruction" not in row or "output" not in row:
        raise DataError("expected the field messages, or the fields instruction and output")
    question = "\n\n".join(_text(row.get(key) or "", key) for key in ("instruction", "input") if row.get(key))
    exchanges = [*_history(row.get("history") or ()), (question, _text(row["output"], "output"))]
    return _with_system(row, [message for one in exchanges for message in _exchange(*one)])


def _with_system(row: Mapping[str, object], messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Messages after the row's system message, if it has one and they do not begin with their own."""
    if not row.get("system") or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": _text(row["system"], "system")}, *messages]


def _history(given: object) -> Iterator[tuple[str, str]]:
    if not isinstance(given, Sequence) or not all(isinstance(one, list) and len(one) == 2 for one in given):
        raise DataError("history: expected a list of pairs of a question and an answer")
    for question, answer in given:
        yield _text(question, "history"), _text(answer, "history")


def _exchange(question: str, answer: str) -> list[ConversationMessage]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def pair_of(row: Mapping[str, object]) -> tuple[list[ConversationMessage], list[ConversationMessage]]:
    """The conversation that ends with the chosen answer of a preference row, and the rejected answer to the same
    prompt.

    `chosen` and `rejected` are answers to `prompt`, as text or messages, or two conversations that begin alike, of
    which `prompt` may be a part.
    """
    if not all(row.get(key) for key in ("chosen", "rejected")):
        raise DataError("no chosen and rejected answer")
    given = row.get("prompt")
    before = messages_of({"messages": given}) if isinstance(given, list) else []
    if isinstance(given, str) and given:
        before = _turns(given) or [{"role": "user", "content": given}]
    chosen, rejected = (_answer(row[key], before) for key in ("chosen", "rejected"))
    if all(_holds(one, before) for one in (chosen, rejected)):
        before = []
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if [one["role"] for one in before + chosen[:shared]].count("user") == 0:
        raise DataError("no prompt: a user message must precede the two answers")
    answers = chosen[shared:], rejected[shared:]
    if any(one[at]["role"] != "assistant" for one in answers for at in (0, -1)):
        raise DataError("an answer does not begin and end with the assistant's message")
    if any(message["role"] == "user" for one in answers for message in one):
        raise DataError("the chosen and the rejected conversation differ before the last user message")
    if answers[0] == answers[1]:
        raise DataError("the chosen and the rejected answer are equal")
    return _with_system(row, before + chosen), answers[1]


def _holds(messages: Sequence[ConversationMessage], before: Sequence[ConversationMessage]) -> bool:
    """Whether the prompt's messages stand among others, such as behind a system message or an earlier exchange."""
    return any(list(messages[at : at + len(before)]) == list(before) for at in range(len(messages) - len(before)))


def _answer(value: object, before: Sequence[ConversationMessage]) -> list[ConversationMessage]:
    """An answer as messages, without the prompt's messages if the answer repeats them."""
    if isinstance(value, str):
        messages = _turns(value) or [{"role": "assistant", "content": value}]
    else:
        messages = messages_of({"messages": [value] if isinstance(value, Mapping) else value})
    return messages[len(before) :] if messages[: len(before)] == list(before) else messages


def _turns(text: str) -> list[ConversationMessage]:
    """The turns of a text that marks its speakers with `Human:` and `Assistant:`; empty if the text has no such
    turns."""
    parts = TURN.split(text.strip() if text.lstrip().startswith("Human:") else "")
    return [
        {"role": "user" if who == "Human" else "assistant", "content": said.strip()}
        for who, said in zip(parts[1::2], parts[2::2], strict=True)
        if said.strip()
    ]


def _message(number: int, one: object) -> ConversationMessage:
    if not isinstance(one, Mapping):
        raise DataError(f"message {number + 1} is {type(one).__name__}, not an object with role and content")
    role = one.get("role", one.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"message {number + 1}: role {role!r} is none of {', '.join(ROLES)}")
    if one.get("tool_calls"):
        raise DataError(f"message {number + 1}: tool_calls are not read: write the call into the content")
    content = _text(one.get("content", one.get("value")), f"message {number + 1}")
    train = one.get("train", True)
    if not isinstance(train, bool):
        raise DataError(f"message {number + 1}: train is {train!r}, neither true nor false")
    message: ConversationMessage = {"role": ROLES[role], "content": content}
    return message if train else {**message, "train": False}


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} is {type(value).__name__}, not text")
    return value


def contents(messages: Sequence[Mapping[str, object]]) -> str:
    """The contents of all messages, as one text."""
    return "\n\n".join(str(message["content"]) for message in messages)

"""Conversations: rows of several formats as one list of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fathom.corpus.documents import ConversationMessage
from fathom.errors import DataError

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"} | {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function": "tool",
}


def messages_of(row: Mapping[str, object]) -> list[ConversationMessage]:
    """The messages of a row.

    It holds `messages` of role and content, `conversations` of from and value, or instruction, input and output. A
    message may say `train: false`.
    """
    given = row.get("messages", row.get("conversations"))
    if given is not None:
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise DataError("messages: expected a list that is not empty")
        return [_message(number, one) for number, one in enumerate(given)]
    if "instruction" not in row or "output" not in row:
        raise DataError("neither messages nor instruction and output")
    question = "\n\n".join(_text(row.get(key) or "", key) for key in ("instruction", "input") if row.get(key))
    system: list[ConversationMessage] = (
        [{"role": "system", "content": _text(row["system"], "system")}] if row.get("system") else []
    )
    answer = _text(row["output"], "output")
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _message(number: int, one: object) -> ConversationMessage:
    if not isinstance(one, Mapping):
        raise DataError(f"message {number + 1} is {type(one).__name__}, not role and content")
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


def contents(messages: Sequence[ConversationMessage]) -> str:
    """The contents of all messages, as one text."""
    return "\n\n".join(str(message["content"]) for message in messages)

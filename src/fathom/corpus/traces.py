"""ReAct traces: converts a text of thoughts, actions and observations into a conversation with tool calls.

`ingest.py` (`_json`) looks for a trace in the fields `trace` and `text`. A trace with an action that is none of
the collection's `tools` (`require_tools`) is left out, as `parse_error` in `failed.jsonl`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fathom.corpus.documents import ConversationMessage
from fathom.errors import DataError

STEP = re.compile(r"^(Question|Thought|Action Input|Action|Observation|Final Answer)[ \t]*:[ \t]*", re.MULTILINE)


def is_trace(text: object) -> bool:
    """Whether a text is a trace: it has a thought and a final answer."""
    return isinstance(text, str) and {"Thought", "Final Answer"} <= {match[1] for match in STEP.finditer(text)}


def trace_messages(text: str) -> list[ConversationMessage]:
    """A trace as messages. Text before the question is the system message; observations are tool messages."""
    steps = list(STEP.finditer(text))
    ends = [*(step.start() for step in steps[1:]), len(text)]
    preamble = text[: steps[0].start()].strip() if steps else ""
    messages: list[ConversationMessage] = [{"role": "system", "content": preamble}] if preamble else []
    for step, end in zip(steps, ends, strict=True):
        name, said = step[1], text[step.end() : end].strip()
        if name in ("Question", "Observation"):
            messages.append({"role": "user" if name == "Question" else "tool", "content": said})
        elif messages and messages[-1]["role"] == "assistant":
            messages[-1]["content"] += f"\n{name}: {said}"
        else:
            messages.append({"role": "assistant", "content": f"{name}: {said}"})
    if not steps or messages[-1]["role"] != "assistant" or "Final Answer:" not in messages[-1]["content"]:
        raise DataError("the trace does not end with a Final Answer")
    if not any(one["role"] == "user" for one in messages):
        raise DataError("a trace without a Question")
    return messages


def require_tools(messages: Sequence[ConversationMessage], tools: Sequence[str]) -> None:
    """Refuse a trace that uses an undescribed tool."""
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    for name in map(str.strip, re.findall(r"^Action:[ \t]*(.+)$", "\n".join(said), re.MULTILINE)):
        if name not in tools:
            raise DataError(f"the trace calls {name!r}, which is not one of its tools: {', '.join(tools) or 'none'}")

"""What agents' libraries make of a server's answers; run by an environment of their own, which holds no Fathom.

    python agent_clients.py http://127.0.0.1:PORT/v1

Prints one JSON object: what each client got, for the test to judge.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MODEL, QUESTION = "deep", "How deep is it?"
FATHOMS = {"harbour": 3, "reef": 7}


class Depth(BaseModel):
    """A sounding."""

    place: Literal["harbour", "reef"]
    fathoms: int = Field(ge=0, le=9)


@tool
def sound(place: Literal["harbour", "reef"]) -> int:
    """The depth at a place."""
    return FATHOMS[place]


PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["harbour", "reef"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "sound", "description": "-", "parameters": PARAMETERS}}]
ASK: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]


def langchain(url: str) -> ChatOpenAI:
    """LangChain's model, greedy."""
    return ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=900, max_retries=0)


def openai_tools(url: str) -> dict[str, Any]:
    """A required call, whole and streamed."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = dict(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=900)
    asked["parallel_tool_calls"] = False
    (call,) = client.chat.completions.create(**asked, temperature=0).choices[0].message.tool_calls
    pieces = [
        part.function
        for chunk in client.chat.completions.create(**asked, temperature=0, stream=True)
        for part in (chunk.choices[0].delta.tool_calls or [] if chunk.choices else [])
    ]
    streamed = {
        "name": "".join(piece.name or "" for piece in pieces),
        "arguments": "".join(piece.arguments or "" for piece in pieces),
    }
    return {"whole": call.function.model_dump(include={"name", "arguments"}), "streamed": streamed}


def openai_parse(url: str) -> dict[str, Any]:
    """A pydantic class as the response format."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    message = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Depth, max_tokens=900)
    return message.choices[0].message.parsed.model_dump()


def langchain_bind_tools(url: str) -> list[dict[str, Any]]:
    """`bind_tools` with a call required."""
    return langchain(url).bind_tools([sound], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls


def langchain_structured(url: str) -> dict[str, Any]:
    """Both modes of `with_structured_output` that hold a model to a schema, and JSON alone."""
    made = {}
    for method in ("json_schema", "function_calling"):
        made[method] = langchain(url).with_structured_output(Depth, method=method).invoke(QUESTION).model_dump()
    return made


def langchain_stream(url: str) -> list[dict[str, Any]]:
    """A streamed call, put together by LangChain."""
    whole = None
    for chunk in langchain(url).bind_tools([sound], tool_choice="any", parallel_tool_calls=False).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    return whole.tool_calls


def agent_loop(url: str) -> dict[str, Any]:
    """Three calls, each answered by the tool, then a text."""
    model, messages, calls = langchain(url), [HumanMessage(QUESTION)], []
    for _ in range(3):
        answer = model.bind_tools([sound], tool_choice="sound", parallel_tool_calls=False).invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            calls.append(call["args"])
            messages.append(ToolMessage(str(sound.invoke(call["args"])), tool_call_id=call["id"]))
    last = model.bind_tools([sound], tool_choice="none").invoke(messages)
    return {
        "calls": calls,
        "messages": len(messages),
        "more_calls": last.tool_calls,
        "text": isinstance(last.content, str),
    }


def litellm_tools(url: str) -> dict[str, Any]:
    """litellm's `completion`: a call, a schema, and a stream."""
    common: dict[str, Any] = dict(model=f"openai/{MODEL}", api_base=url, api_key="none", messages=ASK, max_tokens=900)
    call = litellm.completion(**common, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0].function
    parsed = litellm.completion(**common, response_format=Depth).choices[0].message.content
    words = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**common, temperature=0, stream=True)]
    whole = litellm.completion(**common, temperature=0).choices[0].message.content
    return {
        "call": {"name": call.name, "arguments": call.arguments},
        "parsed": json.loads(parsed),
        "stream_is_whole": "".join(words) == whole,
    }


CLIENTS: tuple[Callable[[str], Any], ...] = (
    openai_tools,
    openai_parse,
    langchain_bind_tools,
    langchain_structured,
    langchain_stream,
    agent_loop,
    litellm_tools,
)

if __name__ == "__main__":
    print(json.dumps({client.__name__: client(sys.argv[1]) for client in CLIENTS}))

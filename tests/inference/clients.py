"""What today's agent libraries do with a server: a question with a tool, its result, and an answer with a schema.

    python -m tests.inference.clients   # with the libraries installed: writes recorded.jsonl, what each of them sends

`FLOWS` has one function for each library and protocol. Each is given the server's address, and returns what it found;
the model says `ANSWERS`, text after text.
"""

import asyncio
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import BaseModel, Field

from fathom.checkpoints.open import open_checkpoint
from fathom.inference import gate, server
from fathom.inference.sampling import Choice
from tests.inference.notations import HERMES
from tests.inference.served import in_thread
from tests.tiny import export_tiny

RECORDED = Path(__file__).with_name("recorded.jsonl")
QUESTION = "How deep?"
CALL = '<tool_call>\n{"name": "sound", "arguments": {"place": "reef"}}\n</tool_call>'
TEXT, DEPTH = "Three fathoms.", '{"depth": 3}'
SOUND = {
    "type": "function",
    "function": {
        "name": "sound",
        "description": "The depth at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
STRICT = {**SOUND, "function": {**SOUND["function"], "strict": True}}
SMALL = {"num_hidden_layers": 1, "mixer": "none", "max_position_embeddings": 2048}


class Depth(BaseModel):
    """A sounding."""

    depth: int = Field(ge=0, le=9)


def sound(place: str) -> int:
    """The depth at a place."""
    assert place == "reef"
    return 3


def openai_chat(url: str) -> list[Any]:
    """Chats: a stream with usage, a parsed answer, and a conversation with a tool's result."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_completion_tokens": 80}
    called = client.chat.completions.create(**ask, tools=[SOUND]).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "3"}
    messages = [*ask["messages"], called.model_dump(exclude_none=True), result]
    text = client.chat.completions.create(**{**ask, "messages": messages}, tools=[SOUND]).choices[0].message.content
    parsed = client.chat.completions.parse(**ask, response_format=Depth).choices[0].message.parsed
    with client.chat.completions.stream(**ask, tools=[STRICT], stream_options={"include_usage": True}) as stream:
        (again,) = stream.get_final_completion().choices[0].message.tool_calls
    return [called.tool_calls[0].function.arguments, text, parsed.depth, again.function.arguments]


def openai_responses(url: str) -> list[Any]:
    """The same by the Responses API, stateless: the output goes back as input."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    ask = {"model": "tiny", "max_output_tokens": 80, "store": False}
    tools = [{"type": "function", **STRICT["function"]}]
    question = [{"role": "user", "content": QUESTION}]
    made = client.responses.create(**ask, input=question, tools=tools)
    result = {"type": "function_call_output", "call_id": made.output[0].call_id, "output": "3"}
    text = client.responses.create(**ask, input=[*question, *made.output, result], tools=tools).output_text
    parsed = client.responses.parse(**ask, input=QUESTION, text_format=Depth).output_parsed
    with client.responses.stream(**ask, input=question, tools=tools) as stream:
        again = stream.get_final_response().output[0]
    return [made.output[0].arguments, text, parsed.depth, again.arguments]


def openai_agents(kind: str) -> Callable[[str], list[Any]]:
    """An agent with a tool and a type, whole and streamed."""

    def flow(url: str) -> list[Any]:
        import agents
        from openai import AsyncOpenAI
        from openai.types.shared import Reasoning

        agents.set_tracing_disabled(True)
        made = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[kind]
        model = made(model="tiny", openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
        settings = agents.ModelSettings(temperature=0, reasoning=Reasoning(effort="low"), max_tokens=80)
        tools = [agents.function_tool(sound)]
        pilot = agents.Agent(
            name="pilot", instructions="Sound.", tools=tools, model=model, output_type=Depth, model_settings=settings
        )

        async def both() -> list[Any]:
            whole = await agents.Runner.run(pilot, QUESTION)
            streamed = agents.Runner.run_streamed(replace(pilot, output_type=None), QUESTION)
            async for _ in streamed.stream_events():
                pass
            return [whole.final_output.depth, streamed.final_output]

        return asyncio.run(both())

    return flow


def pydantic_ai(kind: str) -> Callable[[str], list[Any]]:
    """An agent with a tool, streamed; and one with the model's own structured output."""

    def flow(url: str) -> list[Any]:
        from pydantic_ai import Agent, NativeOutput
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        made = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]
        model = made("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
        pilot = Agent(model, instructions="Sound.", tools=[sound])

        async def streamed() -> str:
            async with pilot.run_stream(QUESTION) as stream:
                return await stream.get_output()

        typed = Agent(model, output_type=NativeOutput(Depth)).run_sync(QUESTION).output
        return [typed.depth, pilot.run_sync(QUESTION).output, asyncio.run(streamed())]

    return flow


def langchain(kind: str) -> Callable[[str], list[Any]]:
    """A model with a tool, whole and streamed, and with a type."""

    def flow(url: str) -> list[Any]:
        from langchain_core.messages import HumanMessage, ToolMessage
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            model="tiny", base_url=url, api_key="none", max_tokens=80, use_responses_api=kind == "responses"
        )
        bound = model.bind_tools([tool(sound)])
        called = bound.invoke([HumanMessage(QUESTION)])
        result = ToolMessage("3", tool_call_id=called.tool_calls[0]["id"])
        text = "".join(piece.text for piece in bound.stream([HumanMessage(QUESTION), called, result]))
        typed = model.with_structured_output(Depth).invoke(QUESTION)
        return [called.tool_calls[0]["args"], text, typed.depth]

    return flow


def langgraph(url: str) -> list[Any]:
    """A graph's agent."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=url, api_key="none", max_tokens=80)
    agent = create_agent(model, tools=[sound], system_prompt="Sound.")
    return [agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text]


def litellm(url: str) -> list[Any]:
    """Chats with a tool, whole and streamed, a type, and a response."""
    with mock.patch.dict("os.environ", LITELLM_LOCAL_MODEL_COST_MAP="True"):
        import litellm as library

    given = {"model": "openai/tiny", "api_base": url, "api_key": "none"}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    called = library.completion(messages=messages, tools=[SOUND], max_tokens=80, **given).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "3"}
    history = [*messages, called.model_dump(), result]
    stream = library.completion(messages=history, tools=[SOUND], max_tokens=80, stream=True, **given)
    text = "".join(piece.choices[0].delta.content or "" for piece in stream)
    typed = library.completion(messages=messages, response_format=Depth, max_tokens=80, **given).choices[0].message
    made = library.responses(input=QUESTION, max_output_tokens=80, **given)
    return [called.tool_calls[0].function.arguments, text, typed.content, made.output[0].content[0].text]


ARGUMENTS = '{"place": "reef"}'


@dataclass(frozen=True)
class Flow:
    """What a library does, what the model says to it, and what it should find."""

    run: Callable[[str], list[Any]]
    package: str
    """The module that it needs."""
    answers: tuple[str, ...]
    found: tuple[Any, ...]


AGENT = (CALL, DEPTH, CALL, TEXT), (3, TEXT)
TYPED = (DEPTH, CALL, TEXT, CALL, TEXT), (3, TEXT, TEXT)
CHAIN = (CALL, TEXT, DEPTH), ({"place": "reef"}, TEXT, 3)
PLAIN = (CALL, TEXT, DEPTH, CALL), (ARGUMENTS, TEXT, 3, ARGUMENTS)
FLOWS = {
    "openai chat": Flow(openai_chat, "openai", *PLAIN),
    "openai responses": Flow(openai_responses, "openai", *PLAIN),
    "openai-agents chat": Flow(openai_agents("chat"), "agents", *AGENT),
    "openai-agents responses": Flow(openai_agents("responses"), "agents", *AGENT),
    "pydantic-ai chat": Flow(pydantic_ai("chat"), "pydantic_ai", *TYPED),
    "pydantic-ai responses": Flow(pydantic_ai("responses"), "pydantic_ai", *TYPED),
    "langchain chat": Flow(langchain("chat"), "langchain_openai", *CHAIN),
    "langchain responses": Flow(langchain("responses"), "langchain_openai", *CHAIN),
    "langgraph": Flow(langgraph, "langgraph", (CALL, TEXT), (TEXT,)),
    "litellm": Flow(litellm, "litellm", (CALL, TEXT, DEPTH, TEXT), (ARGUMENTS, TEXT, DEPTH, TEXT)),
}


@dataclass(frozen=True)
class Said(Choice):
    """A choice that takes the tokens of a text, then the end."""

    script: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """A script is no greedy choice."""
        return False

    def token(self, logits: Any, prompt: Any, made: Any) -> int:
        """The script's next token."""
        return self.script[len(made)]


@contextmanager
def saying(service: server.Service, answers: tuple[str, ...]):
    """The model says one text in each answer."""
    left, submit = iter(answers), service.engine.submit

    def scripted(jobs: Any) -> None:
        for job in jobs:
            ids = (*service.tokenizer.encode(next(left), add_special_tokens=False), 0)
            job.choice = Said(**{**vars(job.choice), "script": ids})
        submit(jobs)

    with mock.patch.object(service.engine, "submit", scripted):
        yield


def installed(flow: Flow) -> bool:
    """Whether the library is there."""
    return importlib.util.find_spec(flow.package) is not None


def tiny_service(folder: Path, template: str = HERMES) -> server.Service:
    """A server's model with a template that writes tools."""
    model, tokenizer = open_checkpoint(export_tiny(folder / "tiny", **SMALL), "cpu")
    tokenizer.chat_template = template
    return server.Service(model, tokenizer, "tiny")


def main() -> None:
    """Record what the libraries send."""
    lines: list[str] = []
    answer = gate.Gate._answer

    async def heard(self: Any, body: bytes, scope: Any, receive: Any, send: Any) -> None:
        if body:
            count = sum(f'"{name} ' in line[: len(name) + 12] for line in lines) + 1
            lines.append(
                json.dumps(
                    {"name": f"{name} {count}", "path": scope["path"], "body": json.loads(body)}, ensure_ascii=False
                )
            )
        await answer(self, body, scope, receive, send)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(gate.Gate, "_answer", heard):
        service = tiny_service(Path(folder))
        with in_thread(service) as served:
            for name, flow in FLOWS.items():
                if not installed(flow):
                    sys.exit(f"{flow.package} is not installed")
                with saying(service, flow.answers):
                    found = flow.run(f"http://127.0.0.1:{served.port}/v1")
                print(name, found == list(flow.found), found, flush=True)
    names = ("openai", "openai-agents", "pydantic-ai-slim", "langchain-openai", "langgraph", "litellm")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    RECORDED.write_text(json.dumps({"versions": versions}) + "\n" + "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()

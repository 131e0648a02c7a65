"""`/v1/responses`: what OpenAI's client and agents' libraries send, and what they make of the answers."""

import asyncio
import json
import time

import openai
import pytest
from starlette.requests import ClientDisconnect

from fathom.checkpoints.open import open_checkpoint
from fathom.inference import server
from fathom.inference.api import ChatBody
from fathom.inference.api_responses import ResponsesBody
from tests.inference.notations import ADD, HERMES
from tests.inference.served import in_thread, scripted
from tests.tiny import export_tiny

pytest.importorskip("llguidance", reason="llguidance is not installed (the extra serve brings it)")
SCHEMA = {
    "type": "object",
    "properties": {"depth": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["depth"],
    "additionalProperties": False,
}
FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "strict": True, **ADD["function"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    small = {"num_hidden_layers": 1, "mixer": "none", "max_position_embeddings": 2048}
    model, tokenizer = open_checkpoint(export_tiny(tmp_path_factory.mktemp("responses") / "tiny", **small), "cpu")
    tokenizer.chat_template = HERMES
    with in_thread(server.Service(model, tokenizer, "tiny")) as running:
        yield running


def ask(served, **fields):
    fields = {"input": "How deep?", "max_output_tokens": 60, "temperature": 0, **fields}
    return served.client.responses.create(model="tiny", **fields)


def events(served, **fields):
    found = list(ask(served, stream=True, **fields))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    return found


def test_the_answer_is_the_chats(served):
    """The same prompt and text as a chat's, whole and streamed."""
    chat = served.chat("How deep?", max_tokens=9)
    found = ask(served, max_output_tokens=9)
    assert found.output_text == chat.choices[0].message.content
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (chat.usage.prompt_tokens, 9)
    heard = events(served, max_output_tokens=9)
    assert "".join(one.delta for one in heard if one.type == "response.output_text.delta") == found.output_text
    assert heard[-1].type == "response.incomplete" and heard[-1].response.output_text == found.output_text


def test_a_text_in_its_events(served):
    with scripted(served.service, "Three fathoms."):
        heard = events(served)
    kinds = [event.type.removeprefix("response.") for event in heard if not event.type.endswith("delta")]
    inside = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *inside, "completed"]
    (item,) = heard[-1].response.output
    assert item.content[0].text == "Three fathoms." and item.status == "completed"
    assert len({event.item_id for event in heard if hasattr(event, "item_id")} | {item.id}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result(served, stream):
    asked = {"tools": [TOOL], "max_output_tokens": 200}
    with scripted(served.service, f"I add.\n{CALL}"):
        if stream:
            heard = events(served, **asked)
            found = heard[-1].response
            pieces = [one.delta for one in heard if one.type == "response.function_call_arguments.delta"]
            assert len(pieces) > 1 and "".join(pieces) == found.output[1].arguments
        else:
            found = ask(served, **asked)
    text, call = found.output
    assert found.status == "completed" and text.content[0].text == "I add."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1, "b": 2})
    history = [{"role": "user", "content": "1 + 2?"}, *(item.to_dict() for item in found.output)]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    with scripted(served.service, "Three."):
        assert ask(served, input=history, **asked).output_text == "Three."


def test_a_call_that_a_stop_string_cuts_is_incomplete(served):
    """As a chat's `finish_reason` says: an agent would run a call whose arguments are no JSON."""
    with scripted(served.service, CALL):
        call = events(served, tools=[TOOL], extra_body={"stop": '"b"'})[-1].response.output[-1]
    assert (call.type, call.arguments, call.status) == ("function_call", '{"a": 1, ', "incomplete")


def test_the_clients_own_stream_and_parser(served):
    with served.client.responses.stream(model="tiny", input="x", text=FORMAT, max_output_tokens=60) as stream:
        final = [event.type for event in stream][-1]
    assert final == "response.completed" and 0 <= json.loads(stream.get_final_response().output_text)["depth"] <= 9
    assert set(json.loads(ask(served, text=FORMAT, temperature=1).output_text)) == {"depth"}


def test_log_probabilities(served):
    found = ask(served, max_output_tokens=2, top_logprobs=2, include=["message.output_text.logprobs"])
    assert [len(one.top_logprobs) for one in found.output[0].content[0].logprobs] == [2, 2]


@pytest.mark.parametrize("thought", ["", "<think>Hm.</think>"])
def test_every_token_of_the_text_has_a_log_probability(served, monkeypatch, thought):
    """Those of a character of several tokens too, and those that may begin a stop string; none of the reasoning."""
    monkeypatch.setattr(served.service, "thoughts", ("<think>", "</think>"))
    asked = {"top_logprobs": 1, "extra_body": {"stop": "fell"}}
    with scripted(served.service, f"{thought}深 fall"):
        found = ask(served, **asked)
    with scripted(served.service, f"{thought}深 fall"):
        heard = events(served, **asked)
    tokens = served.service.tokenizer.encode("深 fall", add_special_tokens=False)
    for response in (found, heard[-1].response):
        text = response.output[-1].content[0]
        assert text.text == "深 fall" and len(text.logprobs) == len(tokens) + 1, "and of the end"
    streamed = [one.logprobs for one in heard if one.type == "response.output_text.delta"]
    assert sum(map(len, streamed)) == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_trips_and_reasoning_as_chats_have_them(served, monkeypatch, stream):
    """They were ignored without a word."""
    monkeypatch.setattr(served.service, "thoughts", ("<think>", "</think>"))
    said = "<think>Hm.</think>Six"
    asked = {"return_token_ids": True, "return_trips": True, "include_reasoning": False}
    with scripted(served.service, said):
        heard = events(served, extra_body=asked) if stream else [ask(served, extra_body=asked)]
    with scripted(served.service, said):
        chat = served.chat("How deep?", max_tokens=60, extra_body=asked)
    found = heard[-1].response if stream else heard[0]
    assert found.token_ids == chat.choices[0].token_ids == [*served.service.tokenizer.encode(said), 0]
    assert found.prompt_token_ids == chat.prompt_token_ids and found.trips == chat.choices[0].trips
    assert [item.type for item in found.output] == ["message"] and found.output_text == "Six"
    assert not [event for event in heard if "reasoning" in getattr(event, "type", "")]
    assert found.usage.output_tokens_details.reasoning_tokens > 0
    plain = ask(served, max_output_tokens=2).to_dict()
    assert not {"token_ids", "prompt_token_ids", "trips"} & plain.keys()


def test_a_tool_among_those_that_are_allowed(served):
    other = {**TOOL, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    for choice in (allowed, {"type": "function", "name": "other"}):
        (call,) = ask(served, tools=[TOOL, other], tool_choice=choice, parallel_tool_calls=False).output
        assert call.name == "other"


def rendered(**fields):
    return [(one.role, one.content, one.tool_calls) for one in ResponsesBody(**fields).chat().messages]


def test_how_items_become_messages():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": None, "status": None}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": parts},
        {"type": "reasoning", "id": "rs", "summary": []},
        call,
        {**call, "call_id": "c2", "arguments": '{"a": 1'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
    ]
    system, user, calls, result = rendered(input=items, instructions="You add.")
    assert system == ("system", "You add.\n\nBe brief.", None) and user[1] == "ab" and result[:2] == ("tool", "3")
    assert [one["function"]["arguments"] for one in calls[2]] == [{}, '{"a": 1']


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no answers"),
        ({"conversation": "c"}, "conversation", "stores no answers"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "stores no answers"),
        ({"store": True}, "store", "stores no answers"),
        ({"background": True}, "background", "False"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "function"}]}, "tools", "name"),
        ({"tool_choice": "required"}, "tool_choice", "no such tool"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", ""),
        ({"input": []}, "input", "no message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "images"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input", "call_id"),
        ({"input": [{"content": "x"}]}, "input", "role"),
        ({"input": [{"role": 3, "content": "x"}]}, "input", ""),
        ({"input": "x " * 3000}, "input", ""),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"reasoning": {"effort": "utmost"}}, "reasoning", ""),
        ({"utterly": 1}, "utterly", "not supported"),
        ({"metadata": {"a": float("nan")}}, "metadata", "finite"),
        ({"metadata": {"a": float("inf")}, "stream": True}, "metadata", "finite"),
        ({"metadata": {"\ud800": "x"}, "stream": True}, "metadata", "surrogate"),
        ({"text": {"format": {"type": "json_schema", "name": "\udfff", "schema": {}}}}, "text", "surrogate"),
    ],
)
def test_errors_name_the_field(served, fields, param, said):
    status, answer = served.post("/v1/responses", **{"input": "x", **fields})
    error = answer["error"]
    assert status == 400 and said in error["message"], error
    assert error["param"] == param or error["code"] == "context_length_exceeded", error


def test_a_stream_that_fails_says_so(served):
    model = served.service.model
    hook = model.lm_head.register_forward_hook(lambda module, given, logits: logits * float("nan"))
    try:
        heard = events(served)
        assert heard[-1].type == "response.failed" and heard[-1].response.error.code == "server_error"
        with pytest.raises(openai.InternalServerError):
            ask(served)
    finally:
        hook.remove()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_a_client_that_leaves_at_the_first_byte_stops_its_answer(path, served):
    """Before any event was made: nothing keeps the engine busy."""
    service, counts = served.service, served.service.engine.counts
    before = counts["cancelled"]
    asked = {"input": "x"} if path.endswith("responses") else {"messages": [{"role": "user", "content": "x"}]}
    kind = ResponsesBody if path.endswith("responses") else ChatBody
    body = kind(**asked, stream=True, ignore_eos=True)

    async def left(message):
        raise OSError

    async def leave():
        answer = await (service.respond(body) if path.endswith("responses") else service.answer(body))
        with pytest.raises((OSError, ClientDisconnect)):
            await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, None, left)

    asyncio.run(leave())
    until = time.monotonic() + 20
    while counts["cancelled"] == before and time.monotonic() < until:
        time.sleep(0.01)
    assert counts["cancelled"] == before + 1 and not service.engine.running

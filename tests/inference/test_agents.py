"""Structured output and tools over HTTP, as agents ask for them: whole, streamed, and several at once."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fathom.checkpoints.open import open_checkpoint
from fathom.inference import server
from fathom.inference.api import ChatBody
from fathom.inference.grammar_trial import LateError
from fathom.inference.metrics import exposition
from tests.inference.notations import ADD, HERMES, LLAMA, NOW, TOOLS, tool
from tests.inference.served import in_thread, scripted
from tests.tiny import export_tiny

pytest.importorskip("llguidance", reason="llguidance is not installed (the extra serve brings it)")
ASK = [{"role": "user", "content": "How deep?"}]
SCHEMA = {
    "type": "object",
    "properties": {"depth": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["m", "fathom"]}},
    "required": ["depth", "unit"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def service(folder, template=HERMES, **fields):
    model, tokenizer = open_checkpoint(folder, "cpu")
    tokenizer.chat_template = template
    return server.Service(model, tokenizer, "tiny", **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small = {"num_hidden_layers": 1, "mixer": "none", "max_position_embeddings": 2048}
    return export_tiny(tmp_path_factory.mktemp("agents") / "tiny", **small)


@pytest.fixture(scope="module")
def served(folder):
    with in_thread(service(folder)) as running:
        yield running


def ask(served, messages=ASK, **options):
    options = {"max_tokens": 300, "temperature": 1, "seed": 1, **options}
    return served.client.chat.completions.create(model="tiny", messages=messages, **options)


def heard(served, stream=True, **options):
    """Content, calls and why it ended, put together as OpenAI's clients do; and how many pieces arguments came in."""
    if not stream:
        choice = ask(served, **options).choices[0]
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason, len(calls)
    content, calls, why, pieces = "", [], None, 0
    for chunk in ask(served, stream=True, **options):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            if part.index == len(calls):
                assert part.id and part.type == "function"
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments or ""
            pieces += 1
        why = choice.finish_reason or why
    return content, calls, why, pieces


def follows(answer):
    found = json.loads(answer)
    return set(found) == {"depth", "unit"} and 0 <= found["depth"] <= 9 and found["unit"] in ("m", "fathom")


def test_json_of_a_schema(served):
    for seed in range(2):
        answer = ask(served, response_format=FORMAT, seed=seed).choices[0]
        assert answer.finish_reason == "stop" and follows(answer.message.content)
    text = served.complete("x", max_tokens=300, extra_body={"response_format": FORMAT}).choices[0]
    assert text.finish_reason == "stop" and follows(text.text)
    content, _, why, _ = heard(served, response_format=FORMAT)
    assert why == "stop" and follows(content)
    several = ask(served, response_format=FORMAT, n=3, temperature=2).choices
    assert all(follows(one.message.content) for one in several)
    assert len({one.message.content for one in several}) > 1


def test_a_grammar_that_takes_long_is_tried_twice(served, monkeypatch):
    """First for a short time, then in a process of its own; the next one finds it compiled."""
    grammars, tried = served.service.shapes.grammars, []
    real = grammars._tried

    def late(grammar, parts, quick):
        tried.append(quick)
        if quick:
            raise LateError("it takes long")
        return real(grammar, parts, quick)

    monkeypatch.setattr(grammars, "_tried", late)
    for _ in range(2):
        answer = ask(served, extra_body={"structured_outputs": {"choice": ["twice", "or not"]}})
        assert answer.choices[0].message.content in ("twice", "or not")
    assert tried == [True, False]


@pytest.mark.slow
def test_any_object(served):
    found = [ask(served, response_format={"type": "json_object"}, seed=seed).choices[0] for seed in range(3)]
    ended = [json.loads(one.message.content) for one in found if one.finish_reason == "stop"]
    assert ended and all(isinstance(one, dict) for one in ended)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[ab]{3}-\d"}, r"[ab]{3}-\d"),
        ({"choice": ["yes", "no, \"never\""]}, 'yes|no, "never"'),
        ({"grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"grammar": 'root ::= "y" [0-9]'}, "y[0-9]"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, r'\{"depth":\d,"unit":"(m|fathom)"\}'),
        ({"json": SCHEMA, "whitespace_pattern": ""}, r'\{"depth":\d,"unit":"(m|fathom)"\}'),
        ({"json": json.dumps(SCHEMA), "whitespace_pattern": "_?"}, r'\{_?"depth"_?:_?\d_?,_?"unit"_?:_?"\w+"_?\}'),
    ],
)  # fmt: skip
def test_what_vllm_calls_structured_outputs(served, asked, pattern):
    answer = ask(served, extra_body={"structured_outputs": asked}).choices[0]
    assert answer.finish_reason == "stop" and re.fullmatch(pattern, answer.message.content), answer


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_required(served, stream):
    for seed in range(2):
        content, calls, why, pieces = heard(served, stream, tools=TOOLS, tool_choice="required", seed=seed)
        assert not (stream and calls[0][1]) or pieces > len(calls)
        assert not content and calls and why in ("tool_calls", "length")
        for name, arguments in calls if why == "tool_calls" else calls[:-1]:
            keys = {"add": {"a", "b"}, "say": {"text", "loud"}, "now": set()}
            assert set(json.loads(arguments)) == keys[name]


def test_a_named_tool_and_one_call_at_a_time(served):
    chosen = {"type": "function", "function": {"name": "now"}}
    answer = ask(served, tools=TOOLS, tool_choice=chosen).choices[0]
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls] == [("now", "{}")]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    for seed in range(4):
        answer = ask(served, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
        assert len(answer.message.tool_calls) == 1 and answer.finish_reason == "tool_calls"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.mark.quick("True-*", "False-It is*")
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is six deep.", "It is six deep.", []),
        (CALL, None, [{"a": 2, "b": 3}]),
        (f"Let me add.\n\n{CALL}\n{CALL}", "Let me add.", [{"a": 2, "b": 3}] * 2),
        ("No <tool or {} here", "No <tool or {} here", []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_model_decides(served, text, content, calls, stream):
    with scripted(served.service, text):
        said, made, why, _ = heard(served, stream, tools=[ADD, NOW], temperature=0)
    assert said == (content or "") and [json.loads(arguments) for _, arguments in made] == calls
    assert why == ("tool_calls" if calls else "stop") and {name for name, _ in made} <= {"add"}


@pytest.mark.quick("3}*-True", "</tool*-False")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "arguments", "why"), [("3}", '{"a": 2, "b": ', "stop"), ("</tool", '{"a": 2, "b": 3}', "tool_calls")]
)
def test_a_stop_string_within_a_call(served, stop, arguments, why, stream):
    """Arguments that it cuts are no JSON, so an agent must not run them."""
    with scripted(served.service, CALL):
        _, ((_, made),), found, _ = heard(served, stream, tools=[ADD, NOW], temperature=0, stop=stop)
    assert (made, found) == (arguments, why)


def test_many_tools_are_compiled_once(served):
    shapes, asked = served.service.shapes, [tool(f"dig_{i}", depth={"type": "integer"}) for i in range(20)]
    wanted = shapes.wanted(ChatBody.model_validate({"messages": ASK, "tools": asked}))
    assert shapes.ready(wanted) is None
    assert shapes.compiled(wanted).grammar is shapes.ready(wanted).grammar


def test_arguments_that_are_nested_too_deeply(served):
    nested = '{"a": ' * 900 + "{}" + "}" * 900
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "NESTED"}}]}]
    body = json.dumps({"messages": messages}).replace('"NESTED"', nested)
    status, answer = served.raw("POST", "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["message"] == "messages: nested too deeply"


def test_llamas_notation(folder):
    own = service(folder, LLAMA)
    with in_thread(own) as served:
        answer = ask(served, tools=TOOLS, tool_choice="required").choices[0]
        assert len(answer.message.tool_calls) == 1 and answer.finish_reason == "tool_calls"
        with scripted(own, '{"name": "add", "parameters": {"a": 2, "b": 3}}'):
            found = heard(served, tools=[ADD], temperature=0)
        assert found[1:3] == ([["add", '{"a": 2, "b": 3}']], "tool_calls")


def test_a_conversation_with_calls_and_results(served):
    """The client's own answer goes back, and the template writes it as the model did."""
    message = ask(served, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    call = message.tool_calls[0]
    history = [*ASK, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "6"}]
    tokens = served.post("/tokenize", messages=history)[1]["tokens"]
    text = served.post("/detokenize", tokens=tokens)[1]["prompt"]
    assert f'<tool_call>\n{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}' in text
    assert "<tool_response>6</tool_response>" in text
    assert ask(served, messages=history, tools=TOOLS, max_tokens=4).choices[0].finish_reason


BY_KEY = HERMES.replace("call.function.arguments | tojson", "dict(call.function.arguments.items()) | tojson")


@pytest.mark.parametrize(
    ("template", "arguments", "written"),
    [
        (HERMES, '{"city": "London",', json.dumps('{"city": "London",')),
        (HERMES, "[1]", '"[1]"'),
        (HERMES, "", "{}"),
        (HERMES, " \n", "{}"),
        (HERMES, None, "{}"),
        (HERMES, '{"a": 2}', '{"a": 2}'),
        (BY_KEY, '{"a": 2', json.dumps({"arguments": '{"a": 2'})),
        (BY_KEY, '{"a": 2}', '{"a": 2}'),
    ],
)
def test_a_call_that_was_cut_off_is_history(served, monkeypatch, template, arguments, written):
    """As agents send it back, with the error of the tool; by a template that takes text, and by one that needs keys."""
    monkeypatch.setattr(served.service.tokenizer, "chat_template", template)
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    history = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "call_1", "content": "no JSON"})
    status, found = served.post("/tokenize", messages=history)
    assert status == 200, found
    text = served.post("/detokenize", tokens=found["tokens"])[1]["prompt"]
    assert f'{{"name": "add", "arguments": {written}}}' in text
    call["function"]["arguments"] = 5
    assert served.post("/tokenize", messages=history)[0] == 400, "which no client sends"


def schema(**schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def function(name, **function):
    return {"type": "function", "function": {"name": name, **function}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (schema(type="objekt"), "response_format", "objekt"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "Field required"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        (schema(**{"$ref": "#"}), "response_format", "no text follows"),
        ({"structured_outputs": {"regex": "((("}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": FORMAT},
            "structured_outputs",
            "use only one of this",
        ),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs", "and tools"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", ""),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"json": {}, "backend": "x"}}, "structured_outputs", "backend: not supported"),
        ({"tools": [NOW, NOW]}, "tools", "one name"),
        ({"tools": [function("a b")]}, "tools", "pattern"),
        ({"tools": [function("a", parameters={"type": "string"})]}, "tools", "object"),
        ({"tools": [function("x", parameters={"not": {}})]}, "tools.0.function.parameters", "not"),
        ({"tools": [ADD, function("x", parameters={"not": {}})]}, "tools.1.function.parameters", "not"),
        ({"tools": TOOLS, "tool_choice": function("dig")}, "tool_choice", "no such tool"),
        ({"tool_choice": "required"}, "tool_choice", "no such tool"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", ""),
    ],
)
def test_what_cannot_be_followed_is_one_line(served, fields, param, words):
    status, body = served.post("/v1/chat/completions", messages=ASK, **fields)
    error = body["error"]
    assert status == 400 and error["param"] == param and "\n" not in error["message"], error
    assert error["message"].startswith(param) and words in error["message"]


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function(name) for name in names]}}


def test_some_of_the_tools_are_allowed(served):
    """Those that are not named are never called."""
    for seed in range(3):
        options = {"tools": TOOLS, "seed": seed, "parallel_tool_calls": False}
        answer = ask(served, tool_choice=allowed("required", "add", "now"), **options).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls[0].function.name in ("add", "now")
    with scripted(served.service, CALL):
        _, calls, _, _ = heard(served, tools=TOOLS, tool_choice=allowed("auto", "now"), temperature=0)
    assert not [name for name, _ in calls if name != "now"]
    status, body = served.post("/v1/chat/completions", messages=ASK, tools=TOOLS, tool_choice=allowed("auto", "dig"))
    assert status == 400 and body["error"]["param"] == "tool_choice"


def test_half_a_surrogate_pair_is_named(served):
    half = chr(0xD83D)
    asked = [{"regex": half}, {"grammar": f'start: "{half}"'}]
    for fields in ({"messages": [{"role": "user", "content": half}]}, *({"structured_outputs": one} for one in asked)):
        status, body = served.post("/v1/chat/completions", **{"messages": ASK, **fields})
        assert status == 400 and "half of a surrogate pair" in body["error"]["message"], body


def test_bounds_with_too_many_digits_are_named(served):
    status, body = served.post("/v1/chat/completions", messages=ASK, **schema(type="integer", minimum=-(10**20)))
    assert status == 400 and "too many digits" in body["error"]["message"]


def test_json_is_not_padded(served):
    """Between two of its parts a space, or a new line and its indent."""
    for seed in range(3):
        text = ask(served, response_format=FORMAT, seed=seed, temperature=2).choices[0].message.content
        parts = re.findall(r"[\s]+", re.sub(r'"[^"]*"', "x", text))
        assert all(re.fullmatch(r" |\n[ \t]{0,32}", part) for part in parts), repr(text)


def test_a_template_without_tools_says_so(folder):
    with in_thread(service(folder, "{{ messages[0].content }}")) as served:
        status, body = served.post("/v1/chat/completions", messages=ASK, tools=TOOLS)
    assert status == 400 and body["error"]["message"] == "tools: this model's chat template does not support tools"


def test_without_the_library_the_answer_says_what_to_install(served, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    body = served.post("/v1/chat/completions", messages=ASK, **schema(const="not compiled yet"))[1]
    assert "pip install '.[serve]'" in body["error"]["message"]
    assert served.post("/v1/chat/completions", messages=ASK, max_tokens=2)[0] == 200


NAMES = ["<|im_end|>", "<|endoftext|>", "a<|im_start|>b"]


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        (schema(enum=NAMES), [json.dumps(name) for name in NAMES]),
        (schema(const=NAMES[0]), [json.dumps(NAMES[0])]),
        ({"structured_outputs": {"choice": NAMES}}, NAMES),
        ({"structured_outputs": {"regex": r"x<\|im_end\|>y"}}, ["x<|im_end|>y"]),
        ({"structured_outputs": {"grammar": 'start: "<|im_end|>" "z"'}}, ["<|im_end|>z"]),
    ],
)
def test_texts_that_look_like_special_tokens(served, fields, texts):
    """A text of the grammar, and not what stands before the name of a token that ends texts."""
    for seed in range(2):
        body = {"messages": ASK, "temperature": 1, "seed": seed, "max_tokens": 60, "return_token_ids": True}
        choice = served.post("/v1/chat/completions", **body, **fields)[1]["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] in texts
        assert not {0, 1} & set(choice["token_ids"][:-1]), "special tokens stand for themselves"


def test_arguments_that_look_like_special_tokens(served):
    own = tool("cut", end={"enum": NAMES})
    answer = ask(served, tools=[own], tool_choice="required", parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert json.loads(answer.message.tool_calls[0].function.arguments)["end"] in NAMES


def test_a_grammar_that_needs_an_end_token_is_refused(served):
    """It is no end, but a part of the text, that such a grammar asks for."""
    asked = {"grammar": 'start: "a" <|endoftext|> "b"'}
    status, body = served.post("/v1/chat/completions", messages=ASK, structured_outputs=asked, max_tokens=9)
    assert status == 400 and "needs a token that ends texts" in body["error"]["message"]


def test_others_do_not_wait_for_a_grammar(served, monkeypatch):
    """Neither texts without a grammar nor those whose grammar is compiled; other new grammars do."""
    free, entered = threading.Event(), threading.Event()
    grammars = served.service.shapes.grammars
    compiled = type(grammars).compile
    assert follows(ask(served, response_format=FORMAT).choices[0].message.content)

    def slow(self, grammar, parts=(), quick=False):
        entered.set()
        assert free.wait(60)
        return compiled(self, grammar, parts, quick)

    monkeypatch.setattr(type(grammars), "compile", slow)
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(ask, served, extra_body={"structured_outputs": {"regex": f"[{x}]{{5}}"}}) for x in "xy"]
        assert entered.wait(60)
        assert ask(served, max_tokens=3).choices[0].finish_reason == "length"
        assert follows(ask(served, response_format=FORMAT).choices[0].message.content)
        assert not any(one.done() for one in late)
        free.set()
        assert [one.result().choices[0].message.content for one in late] == ["xxxxx", "yyyyy"]


def test_what_a_hostile_pattern_costs(served):
    """A pattern of 20 characters that forces a million letters: it took a second, and again for every text."""
    asked = {"structured_outputs": {"regex": "(a{1000}){1000}z2"}, "n": 8, "max_tokens": 4}
    began = time.process_time()
    status, body = served.post("/v1/chat/completions", messages=ASK, **asked)
    spent = time.process_time() - began
    assert status == 400 or [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 8
    assert spent < 0.6


@pytest.mark.slow
def test_at_once_as_one_at_a_time(served):
    kinds = [
        {},
        {"response_format": FORMAT},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS},
        {"extra_body": {"structured_outputs": {"regex": "[a-z ]{5,40}!"}}},
    ]
    asked = [{**kinds[i % 5], "seed": i, "max_tokens": 30} for i in range(10)]

    def said(options):
        message = ask(served, **options).choices[0].message
        return message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls or []]

    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(said, asked))
    assert together == [said(options) for options in asked]


@pytest.mark.quick("loop")
@pytest.mark.parametrize("recurrence", ["adaponder", "loop"])
def test_models_that_think(tmp_path, recurrence):
    """Halting models, and those of several iterations with drafts, follow as well."""
    small = {"num_hidden_layers": 1, "mixer": "none", "max_position_embeddings": 2048}
    folder = export_tiny(tmp_path / "tiny", recurrence=recurrence, **small)
    own = service(folder, speculate=1 if recurrence == "loop" else None)
    with in_thread(own) as served:
        assert follows(ask(served, response_format=FORMAT).choices[0].message.content)
        answer = ask(served, tools=[NOW, ADD], tool_choice="required", parallel_tool_calls=False).choices[0]
        assert answer.finish_reason == "tool_calls"
        with ThreadPoolExecutor(4) as pool:
            some = list(pool.map(lambda seed: ask(served, response_format=FORMAT, seed=seed), range(4)))
        assert all(follows(one.choices[0].message.content) for one in some)


def test_a_prompt_that_was_read_before_is_counted(folder):
    own = service(folder)
    own.engine.prefixes.budget = 1 << 24
    with in_thread(own) as served:
        first = ask(served, tools=TOOLS, max_tokens=4)
        again = ask(served, tools=TOOLS, max_tokens=4)
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens > 100
        assert first.choices[0].message == again.choices[0].message
        *_, last = ask(served, tools=TOOLS, max_tokens=4, stream=True, stream_options={"include_usage": True})
        assert last.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens
        assert own.engine.counts["hits"] == 2
        assert f"fathom_prefix_tokens_total {2 * again.usage.prompt_tokens}" in exposition(own.engine)

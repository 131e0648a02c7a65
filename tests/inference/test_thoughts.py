"""Thoughts that a model marks are apart from its answer: whole, streamed, and by the Responses API."""

import itertools
import json

import pytest

from fathom.inference.thoughts import Thoughts, marks_of
from tests.inference.clients import CALL, SOUND, saying, tiny_service
from tests.inference.notations import HERMES
from tests.inference.served import in_thread
from tests.tiny import tiny_tokenizer

MARKS = ("<think>", "</think>")
THINKING = HERMES.replace(
    "{{ m.content }}{% endif %}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% endif %}",
)
SAID = "<think>\nHm, 3 < 4.\n</think>\n\nThree."
ASK = [{"role": "user", "content": "How deep?"}]


@pytest.mark.parametrize(
    ("said", "begun", "thought", "text"),
    [
        (SAID, False, "Hm, 3 < 4.", "Three."),
        ("\n\n" + SAID, False, "Hm, 3 < 4.", "Three."),
        ("Hm.\n</think>\n\nThree.\n", True, "Hm.", "Three.\n"),
        ("<think>\n\n</think>\n\nThree.", False, "", "Three."),
        ("<think>cut off\n", False, "cut off\n", ""),
        ("<think>cut off </thi", False, "cut off </thi", ""),
        ("  Three.\n", False, "", "  Three.\n"),
        ("<thin ice", False, "", "<thin ice"),
        ("a <think>b</think> c", False, "", "a <think>b</think> c"),
        ("", False, "", ""),
    ],
)
def test_however_a_text_is_cut(said, begun, thought, text):
    for size in (1, 2, 3, 5, 100):
        thoughts, heard = Thoughts(MARKS, begun), []
        for i in range(0, len(said), size):
            heard.append(thoughts.hear(said[i : i + size]))
        heard.append(thoughts.hear("", last=True))
        assert tuple("".join(part) for part in zip(*heard, strict=True)) == (thought, text), size


def test_whether_the_template_began_a_thought():
    tokenizer = tiny_tokenizer()
    assert marks_of(tokenizer) is None
    tokenizer.chat_template = THINKING
    assert marks_of(tokenizer) == MARKS
    cases = ("a<think>\n", True), ("<think>\n\n</think>\n\n", False), ("a", False)
    for prompt, begun in (*cases, ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False)):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert Thoughts.after(MARKS, tokenizer, ids).inside == begun
    assert Thoughts.after(MARKS, tokenizer, [5], "<think>\nHm").inside
    assert not Thoughts.after(MARKS, tokenizer, [5], "<think>\nHm\n</think>\n\nThr").inside


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with in_thread(tiny_service(tmp_path_factory.mktemp("thoughts"), THINKING)) as running:
        yield running


def ask(served, said, **fields):
    with saying(served.service, (said,)):
        status, answer = served.post("/v1/chat/completions", messages=ASK, max_tokens=80, **fields)
    assert status == 200, answer
    return answer["choices"][0]["message"], answer["usage"]


def test_a_chat(served):
    message, usage = ask(served, SAID)
    assert (message["reasoning_content"], message["content"]) == ("Hm, 3 < 4.", "Three.")
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert "reasoning_content" not in ask(served, SAID, include_reasoning=False)[0]
    message, usage = ask(served, "Three.")
    assert message == {"role": "assistant", "content": "Three."} and "completion_tokens_details" not in usage
    turn = {"role": "assistant", "content": "<think>\nHm,"}
    with saying(served.service, (" 3 < 4.\n</think>\n\nThree.",)):
        asked = {"messages": [*ASK, turn], "continue_final_message": True, "max_tokens": 80}
        message = served.post("/v1/chat/completions", **asked)[1]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" 3 < 4.", "Three.")
    message, _ = ask(served, f"<think>Hm.</think>\n{CALL}", tools=[SOUND])
    assert message["reasoning_content"] == "Hm." and message["tool_calls"][0]["function"]["name"] == "sound"
    asked = {"response_format": {"type": "json_object"}}
    assert ask(served, '{"a": "<think>"}', **asked)[0]["content"] == '{"a": "<think>"}'


def test_a_stream(served):
    with saying(served.service, (SAID,)):
        parts = [chunk.choices[0].delta for chunk in served.chat("How deep?", max_tokens=80, stream=True)]
    said = [(getattr(part, "reasoning_content", None) or "", part.content or "") for part in parts]
    assert tuple("".join(part) for part in zip(*said, strict=True)) == ("Hm, 3 < 4.", "Three.")
    kinds = ["thought" if thought else "text" for thought, text in said if thought or text]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["thought", "text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response(served, stream):
    with saying(served.service, (SAID,)):
        made = served.client.responses.create(model="tiny", input="How deep?", max_output_tokens=80, stream=stream)
        if stream:
            events = list(made)
            assert "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == "Hm, 3 < 4."
            made = events[-1].response
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.output[0].content[0].text == "Hm, 3 < 4." and made.output_text == "Three."
    assert made.usage.output_tokens_details.reasoning_tokens > 0


def test_a_thought_of_an_earlier_turn_reaches_the_template(served):
    turn = {"role": "assistant", "content": "Three.", "reasoning_content": "Hm."}
    status, answer = served.post("/tokenize", messages=[*ASK, turn, *ASK])
    assert status == 200
    text = served.service.tokenizer.decode(answer["tokens"])
    assert "<think>\nHm.\n</think>\n\nThree." in text, json.dumps(text)

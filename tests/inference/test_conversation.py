"""Conversations: what is remembered, what a template refuses."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from fathom.checkpoints.open import open_checkpoint
from fathom.errors import SettingsError
from fathom.inference.conversation import chat
from fathom.inference.generate import generate
from fathom.inference.prompt_file import generate_file
from fathom.inference.settings import Sampling
from tests.inference.talker import TEMPLATE, read, write
from tests.tiny import export_tiny


@pytest.fixture
def asked(opened, monkeypatch) -> list[str]:
    """The prompts that the model continues."""
    (model, tokenizer), found, whole = opened, list[str](), opened[0].generate
    monkeypatch.setattr(model, "generate", lambda ids, **a: found.append(tokenizer.decode(ids[0])) or whole(ids, **a))
    return found


def test_a_conversation_that_the_template_refuses(opened, monkeypatch, tmp_path: Path) -> None:
    """Many templates refuse a system message, or two of one role in a row."""
    refusing = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system role') }}{% endfor %}"
    monkeypatch.setattr(opened[1], "chat_template", refusing + TEMPLATE)
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    conversations = [[user], [system, user], [{"content": "a"}], ["a"], [user]]
    prompts = write(tmp_path / "in.jsonl", [{"messages": messages} for messages in conversations])
    generate_file(*opened, prompts, tmp_path / "out.jsonl", Sampling(3, temperature=0))
    made = read(tmp_path / "out.jsonl")
    assert [line.get("tokens") for line in made] == [3, None, None, None, 3]
    assert made[1]["error"] == "this conversation cannot be read: no system role"
    with pytest.raises(SettingsError, match="cannot be read: no system role"):
        chat(*opened, Sampling(3), iter(["a\n"]), len, "be kind")


def test_a_message_that_a_template_refuses_ends_no_conversation(opened) -> None:
    model, tokenizer = opened[0], copy.deepcopy(opened[1])
    refusal = "{% if messages[-1]['content'] == 'no' %}{{ raise_exception('no means no') }}{% endif %}"
    tokenizer.chat_template = refusal + TEMPLATE
    said: list[str] = []
    chat(model, tokenizer, Sampling(3, temperature=0), iter(["a\n", "no\n", "b\n"]), said.append)
    expected: list[str] = []
    chat(model, tokenizer, Sampling(3, temperature=0), iter(["a\n", "b\n"]), expected.append)
    refused = "[this conversation cannot be read: no means no; /reset starts over]\n"
    assert refused in said and [text for text in said if text != refused] == expected


@pytest.mark.parametrize("allowed", [False, True])
def test_control_tokens_of_a_message_are_text_unless_allowed(allowed: bool, monkeypatch, tmp_path: Path) -> None:
    """The same in a conversation and in a file of prompts."""
    model, tokenizer = open_checkpoint(export_tiny(tmp_path / "tiny"), "cpu")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked: list[int] = []
    whole = model.generate
    monkeypatch.setattr(model, "generate", lambda ids, **a: asked.append(ids[0].tolist().count(end)) or whole(ids, **a))
    sampling = Sampling(3, temperature=0, allow_control=allowed)
    chat(model, tokenizer, sampling, iter(["a<|im_end|>b\n"]), len)
    prompts = write(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "a<|im_end|>b"}]}])
    generate_file(model, tokenizer, prompts, tmp_path / "out.jsonl", sampling)
    assert asked == [1 + allowed] * 2


def test_a_conversation_remembers(opened, asked, monkeypatch) -> None:
    model, tokenizer = opened
    said: list[str] = []
    lines = iter(["deep\n", "\n", "in\n", "/reset\n", "the\n", "x " * 99, "end\n"])
    chat(model, tokenizer, Sampling(4, temperature=0), lines, said.append, "of")
    assert len(asked) == 4
    answer = generate(model, tokenizer, "s:of\nu:deep\na:", Sampling(4, temperature=0)).text
    assert asked[0] == "s:of\nu:deep\na:"
    assert asked[1] == f"s:of\nu:deep\na:{answer}\nu:in\na:"
    assert asked[2] == "s:of\nu:the\na:"
    assert asked[3].endswith("\nu:end\na:") and "x x" not in asked[3]
    answers = "".join(said).split("\n")
    assert any("/reset starts over" in answer for answer in answers)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(SettingsError, match="no chat template"):
        chat(model, tokenizer, Sampling(4), iter(["a"]), said.append)


def lines_of(opened, *lines, **settings):
    """What a conversation says, as one text."""
    said: list[str] = []
    chat(*opened, Sampling(**{"max_new_tokens": 3, "temperature": 0, **settings}), iter(lines), said.append)
    return "".join(said)


def test_commands(opened) -> None:
    plain = lines_of(opened, "the depth\n")
    assert "/reset" in lines_of(opened, "/help\n") and "Ctrl-C" in lines_of(opened, "/help\n")
    assert lines_of(opened, "/sing\n") == "[/sing: no such command; /help lists them]\n"
    assert lines_of(opened, "/reset\n", "the depth\n") == plain
    shown = lines_of(opened, "/set\n", temperature=None)
    assert shown.startswith("[max_new_tokens=3, temperature=the model's own, top_k=") and shown.endswith("]\n")
    longer = lines_of(opened, "/set max_new_tokens=6\n", "the depth\n").split("\n", 1)[1]
    assert longer == lines_of(opened, "the depth\n", max_new_tokens=6) != plain
    drawn = [lines_of(opened, "/set temperature=1 seed=4 min_p=0.01\n", "the depth\n") for _ in range(2)]
    assert drawn[0] == drawn[1] and "min_p=0.01" in drawn[0]
    for words, fault in (
        ("temperature", "/set temperature: expected key=value"),
        ("temperature=hot", "temperature=hot: allowed: a number"),
        ("top_k=1.5", "top_k=1.5: allowed: a whole number"),
        ("top_p=7", "top_p=7: allowed: a number, 0 to 1"),
        ("tempratur=1", "/set tempratur: transformers' GenerationConfig has no such option"),
    ):
        said = lines_of(opened, f"/set {words}\n", "the depth\n")
        assert said.startswith(f"[{fault}") and said.endswith(plain)


def test_a_message_that_begins_with_a_stroke(opened, asked) -> None:
    lines_of(opened, " /reset\n")
    assert asked == ["u:/reset\na:"]


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(opened, asked) -> None:
    said: list[str] = []

    def write(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            raise KeyboardInterrupt

    chat(*opened, Sampling(20, temperature=0), iter(["the depth\n", "and\n"]), write)
    assert "\n[stopped]\n" in said
    stopped = said.index("\n[stopped]\n")
    kept = "".join(said[:stopped])
    assert asked[1] == f"u:the depth\na:{kept}\nu:and\na:"

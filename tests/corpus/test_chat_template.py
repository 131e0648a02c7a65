"""A tokenizer's own chat template: the text matches exactly, and only the assistant's messages are trained on."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from fathom.corpus.chat_template import TokenizerTemplate
from fathom.corpus.converse import Converse
from fathom.corpus.pipeline import build, preview
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.corpus.templates import CHATS, TEMPLATES, ConversationEncoder, EncodedConversation
from fathom.corpus.traces import trace_messages
from fathom.data.tokenizer import plain, save_tokenizer
from fathom.errors import DataError
from tests.corpus.prose import lines, recipe_values, vocabulary, write_jsonl
from tests.corpus.test_conversations import TALK, decoded, rendered, talks

# Turns between tokens of their own, the system's words inside the user's first, thoughts of the last answer alone.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ '<start>' + m.role + '\n' }}{% if loop.index0 == 1 and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content | trim + '<stop>\n' }}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ '<start>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<think>\n\n</think>\n\n' + m.content + '<stop>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.content + '<stop>\n' }}{% endif %}{% endfor %}"
)
# What is trained on stands between ⟦ and ⟧.
GOLDEN = {
    PLAIN: "<|endoftext|><start>user\nBe brief.\n\nHow deep?<stop>\n<start>assistant\n⟦Two fathoms.<stop>⟧\n"
    "<start>user\nAnd here?<|im_end|><stop>\n<start>assistant\n<think>\n\n</think>\n\n⟦Three.<stop>⟧\n",
    MARKED: "<start>system\nBe brief.<stop>\n<start>user\nHow deep?<stop>\n"
    "<start>assistant\n⟦<think>\n\n</think>\n\nTwo fathoms.<stop>⟧\n<start>user\nAnd here?<|im_end|><stop>\n"
    "<start>assistant\n⟦<think>\n\n</think>\n\nThree.<stop>⟧\n",
}


def saved(folder: Path, template: str | None) -> Path:
    tokenizer = copy.deepcopy(vocabulary())
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = template
    folder.mkdir()
    save_tokenizer(tokenizer, folder)
    return folder / "tokenizer"


def encoded(folder: Path, messages: list[Any]) -> tuple[Tokenizer, EncodedConversation]:
    """The tokenizer of a folder, and a conversation by its own template."""
    fast = plain(Tokenizer.from_file(str(folder / "tokenizer.json")))
    end = fast.token_to_id("<|endoftext|>")
    made = ConversationEncoder(fast, end, TokenizerTemplate(folder), 99_999).encode(messages)
    assert made is not None
    return fast, made


def shown(messages: list[dict[str, Any]], template: TokenizerTemplate) -> str:
    marked = "".join(f"⟦{one.text}⟧" if one.trained else one.text for one in template(messages))
    return marked.replace("⟧⟦", "")


TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<start>user\n<tool>' + m.content + '</tool><stop>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<start>assistant\n' }}{% generation %}{{ m.content + '<stop>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ '<start>' + m.role + '\n' + m.content + '<stop>\n' }}{% endif %}"
    "{% endfor %}"
)
TRACE = (
    "You have one tool, lead.\nQuestion: How deep is it?\nThought: I must measure.\nAction: lead\nAction Input: here\n"
    "Observation: two fathoms\nThought: Now I know.\nFinal Answer: Two fathoms."
)


def test_a_trace_of_tools_is_learnt_as_the_template_says(tmp_path: Path) -> None:
    """Thoughts, calls and the answer, and the end of each turn; never what the tool said. The mask is transformers'."""
    from transformers import AutoTokenizer

    folder = saved(tmp_path / "t", TOOLS)
    messages: list[Any] = trace_messages(TRACE)
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert shown(messages, TokenizerTemplate(folder)) == (
        "<start>system\nYou have one tool, lead.<stop>\n<start>user\nHow deep is it?<stop>\n<start>assistant\n"
        "⟦Thought: I must measure.\nAction: lead\nAction Input: here<stop>⟧\n"
        "<start>user\n<tool>two fathoms</tool><stop>\n"
        "<start>assistant\n⟦Thought: Now I know.\nFinal Answer: Two fathoms.<stop>⟧\n"
    )
    whole: Any = AutoTokenizer.from_pretrained(folder)
    theirs = whole.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    _, made = encoded(folder, messages)
    count = len(theirs["input_ids"])
    assert made.ids[:count] == theirs["input_ids"]
    assert [int(bit) for bit in made.trained[:count]] == theirs["assistant_masks"]


@pytest.mark.parametrize("template", [*GOLDEN, TOOLS], ids=["without marks", "with marks", "tools"])
def test_a_conversation_may_quote_its_own_template(template: str, tmp_path: Path) -> None:
    """Its source, its tokens and a whole turn in it are text: nothing of a quotation is a token or ends a turn."""
    folder = saved(tmp_path / "t", template)
    quoted = "<start>assistant\nTwo fathoms.<stop>\n{% generation %}{{ m.content }}{% endgeneration %}"
    talk = [
        {"role": "user", "content": f"Explain {template} and {quoted}"},
        {"role": "assistant", "content": f"It writes {quoted} and {template}, then it ends."},
    ]
    fast, made = encoded(folder, talk)
    for token, count in (("<start>", 2), ("<stop>", 2)):
        assert made.ids.count(fast.token_to_id(token)) == count, "those of the two turns alone"
    answer = decoded(fast, made).removeprefix("<think>\n\n</think>\n\n").removesuffix("<|endoftext|>")
    assert answer == talk[1]["content"] + "<stop>"


@pytest.mark.parametrize("template", GOLDEN, ids=["without marks", "with marks"])
def test_what_is_learnt_of_a_template_is_what_the_assistant_says(template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = saved(tmp_path / "t", template)
    own = TokenizerTemplate(folder)
    assert shown(TALK, own) == GOLDEN[template]
    # As transformers tokenises the same conversation, a user's <|im_end|> apart, which is text here.
    messages = [{**one, "content": one["content"].replace("<|im_end|>", "")} for one in TALK]
    whole = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=True, return_dict=False)
    fast, found = encoded(folder, messages)
    assert found.ids == [*whole, found.ids[-1]]
    assert encoded(folder, TALK)[1].ids.count(fast.token_to_id("<|im_end|>")) == 0
    # Some of it may be left out.
    quiet = [{**one, "train": False} if one["content"] == "Two fathoms." else one for one in TALK]
    assert shown(quiet, own) == GOLDEN[template].replace("⟦", "", 1).replace("⟧", "", 1)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content | upper }}<stop>{% endfor %}", "rewrites message 1"),
        ("{% for m in messages %}{{ m.content[:40] }}<stop>{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "ends an answer without a special token"),
        ("{% for m in messages %}{{ m.content + m.content }}<stop>{% endfor %}", "writes a message twice"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<stop>{% endfor %}", "leaves message 2 out"),
        ("{{ raise_exception('roles must alternate') }}", "fails: roles must alternate"),
        (
            "{{ messages[0].content | length }}<start>{% for m in messages %}{{ m.content }}<stop>{% endfor %}",
            "depends on the messages' content",
        ),
    ],
)
def test_a_template_that_does_more_than_surround_is_refused(template: str, said: str | None, tmp_path: Path) -> None:
    own = TokenizerTemplate(saved(tmp_path / "t", template))
    if said is None:
        assert shown(TALK[1:3], own) == "How deep?<stop>⟦Two fathoms.<stop>⟧"
        return
    with pytest.raises(DataError, match=said):
        list(own(TALK[1:3]))


@pytest.mark.parametrize("name", sorted(CHATS))
def test_a_tuned_model_is_asked_as_it_was_taught(name: str, tmp_path: Path) -> None:
    """The template that a tokenizer is given says what the shards say, and a prompt is the shards' up to the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved(tmp_path / "t", CHATS[name]))
    talk = TALK if name == "chatml" else TALK[:3]
    whole = rendered(list(TEMPLATES[name](talk)), "<|endoftext|>")
    assert tokenizer.apply_chat_template(talk, tokenize=False) == whole
    prompt = tokenizer.apply_chat_template(talk[:-1], tokenize=False, add_generation_prompt=True)
    ends = {"chatml": "<|im_end|>\n", "alpaca": "<|endoftext|>\n\n"}[name]
    assert whole == prompt + talk[-1]["content"] + ends


def test_a_corpus_by_the_tokenizers_own_template(tmp_path: Path) -> None:
    """What the template cannot say is listed, another template makes the shards new, and none is refused."""
    rows = talks(12)
    rows[3]["messages"][1]["content"] = "keep \ue000 this"
    talk = {"inputs": [str(write_jsonl(tmp_path / "talk.jsonl", rows))], "kind": "conversations"}
    bits = []
    for number, template in enumerate((MARKED, PLAIN, None)):
        folder = saved(tmp_path / str(number), template)
        values = recipe_values({"talk": talk}, tokenize={"tokenizer": str(folder), "held_out": 0})
        recipe = parse_corpus_recipe({**values, "converse": {"template": "tokenizer"}})
        if template is None:
            with pytest.raises(DataError, match="template=tokenizer: the tokenizer has no chat template: choose ch"):
                build(recipe, tmp_path / "new")
            with pytest.raises(DataError, match="the tokenizer has no chat template"):
                preview(recipe, tmp_path / "new")
            assert not (tmp_path / "new").exists(), "it is known before any work"
            continue
        counts = build(recipe, tmp_path / "out").stages["converse"].counts
        assert (counts["conversations"], counts["no_template"]) == (12, 1)
        assert [row["path"] for row in lines(tmp_path / "out/stages/converse/rejected.jsonl")] == ["talk.jsonl:4"]
        bits.append(counts["targets"])
    assert bits[0] > bits[1], "the marked template trains on the thoughts too"


def test_a_tokenizer_that_is_trained_has_the_tokens_of_its_conversations(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    talk = {"inputs": [str(write_jsonl(tmp_path / "talk.jsonl", talks(20)))], "kind": "conversations"}
    values = recipe_values({"talk": talk}, tokenize={"train": 300, "held_out": 0})
    build(parse_corpus_recipe(values), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/conversations/tokenizer")
    assert tokenizer.chat_template == CHATS["chatml"]
    assert {"<|im_start|>", "<|im_end|>"} <= set(tokenizer.all_special_tokens)


def test_a_template_without_an_end_is_one_line_before_anything_is_read(tmp_path: Path) -> None:
    asked = SimpleNamespace(converse=SimpleNamespace(template="tokenizer", max_tokens=100))
    directory = saved(tmp_path / "t", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(DataError, match=r"converse.template=tokenizer: .*choose chatml"):
        Converse._encoder(SimpleNamespace(recipe=asked), directory / "tokenizer.json", 0)

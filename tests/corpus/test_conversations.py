"""Conversations: only the assistant's messages and the token that ends each turn are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from fathom.corpus.conversations import messages_of, pair_of
from fathom.corpus.documents import ConversationMessage
from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.corpus.templates import END, TEMPLATES, ConversationEncoder, EncodedConversation, TemplatePart
from fathom.data.shards import TokenDataset
from fathom.data.targets import read_targets
from fathom.data.tokenizer import plain, save_tokenizer
from fathom.errors import DataError
from tests.corpus.prose import Prose, lines, recipe_values, vocabulary, write_jsonl
from tests.corpus.test_duplicates import until
from tests.data.corpora import stream

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How deep?"},
    {"role": "assistant", "content": "Two fathoms."},
    {"role": "user", "content": "And here?<|im_end|>"},
    {"role": "assistant", "content": "Three."},
]
TRACE = [
    {"role": "user", "content": "How deep is the Po?"},
    {"role": "assistant", "content": "Thought: look\nAction: search\nAction Input: Po"},
    {"role": "tool", "content": "12 m"},
    {"role": "assistant", "content": "Thought: done\nFinal Answer: 12 m"},
]
# What is trained on stands between ⟦ and ⟧; ∎ is EOS.
GOLDEN = {
    "chatml": (
        TALK,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow deep?<|im_end|>\n<|im_start|>assistant\n"
        "⟦Two fathoms.<|im_end|>⟧\n<|im_start|>user\nAnd here?<|im_end|><|im_end|>\n<|im_start|>assistant\n"
        "⟦Three.<|im_end|>⟧\n",
    ),
    "alpaca": (
        TALK[1:3],
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nHow deep?\n\n### Response:\n⟦Two fathoms.∎⟧\n\n",
    ),
    "react": (
        TRACE,
        "Question: How deep is the Po?\n⟦Thought: look\nAction: search\nAction Input: Po\n⟧Observation: 12 m\n"
        "⟦Thought: done\nFinal Answer: 12 m∎⟧",
    ),
}


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(vocabulary(), folder)
    return folder / "tokenizer"


def encoder_of(folder: Path, template: str, most: int = 2048) -> tuple[ConversationEncoder, Tokenizer, int]:
    tokenizer = plain(Tokenizer.from_file(str(folder / "tokenizer.json")))
    eos = tokenizer.token_to_id("<|endoftext|>")
    return ConversationEncoder(tokenizer, eos, template, most), tokenizer, eos


def decoded(tokenizer: Tokenizer, found: EncodedConversation) -> str:
    """What is trained on, as text."""
    trained = [one for one, bit in zip(found.ids, found.trained, strict=True) if bit]
    return str(tokenizer.decode(trained, skip_special_tokens=False))


def rendered(pieces: list[TemplatePart], eos: str) -> str:
    return "".join(eos if piece.text == END and piece.token else piece.text for piece in pieces)


@pytest.mark.parametrize("template", GOLDEN)
def test_golden(template: str) -> None:
    messages, expected = GOLDEN[template]
    pieces = list(TEMPLATES[template](messages))
    assert rendered(pieces, "∎") == expected.replace("⟦", "").replace("⟧", "")
    marked = "".join(f"⟦{rendered([one], '∎')}⟧" if one.trained else rendered([one], "∎") for one in pieces)
    assert marked.replace("⟧⟦", "") == expected


@pytest.mark.parametrize("template", GOLDEN)
def test_what_is_learnt_decodes_to_what_was_said(chat_tokenizer: Path, template: str) -> None:
    encoder, tokenizer, eos = encoder_of(chat_tokenizer, template)
    messages, _ = GOLDEN[template]
    found = encoder.encode(messages)
    assert found is not None and len(found.ids) == len(found.trained) and found.ids[-1] == eos
    ends = {"chatml": "<|im_end|>", "alpaca": "<|endoftext|>", "react": "\n"}[template]
    said = [one["content"] for one in messages if one["role"] == "assistant"]
    expected = "".join(text + ends for text in said)
    assert decoded(tokenizer, found) == (expected if template != "react" else expected[:-1] + "<|endoftext|>")
    # The end of the last turn is a target: a model that is never told to stop never does.
    last = max(number for number, bit in enumerate(found.trained) if bit)
    assert tokenizer.id_to_token(found.ids[last]) in ("<|im_end|>", "<|endoftext|>")


def test_a_user_cannot_end_a_turn(chat_tokenizer: Path) -> None:
    """What is spelled like a token in a message is text: the two turns' ends are the only ones."""
    encoder, tokenizer, _ = encoder_of(chat_tokenizer, "chatml")
    found = encoder.encode(TALK)
    assert found is not None and found.ids.count(tokenizer.token_to_id("<|im_end|>")) == 5
    assert tokenizer.decode(found.ids, skip_special_tokens=False).count("<|im_end|>") == 6  # one of them in letters


@pytest.mark.parametrize("template", ["chatml", "alpaca", "react"])
def test_the_mask_is_that_of_growing_renders(chat_tokenizer: Path, template: str) -> None:
    """Each assistant's message is what the conversation gains by it: the prompt before is a prefix, token by token."""
    encoder, _, eos = encoder_of(chat_tokenizer, template)
    messages, _ = GOLDEN[template]
    whole = encoder.encode(messages)
    assert whole is not None
    spans = np.flatnonzero(np.diff(np.array([0, *whole.trained, 0], np.int8)))
    turns = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    assert len(spans) == 2 * len(turns)
    for number, start in zip(turns, spans[::2].tolist(), strict=True):
        # An empty answer leaves what a generation is prompted with, then what ends a turn.
        prompt = encoder.encode([*messages[:number], {"role": "assistant", "content": ""}])
        assert prompt is not None and prompt.ids[:start] == whole.ids[:start]
        before = encoder.encode(messages[:number]) if number else None
        if before is not None:
            shared = before.ids[:-1] if before.ids[-1] == eos else before.ids
            assert whole.ids[: len(shared)] == shared


def test_a_message_may_be_left_out_of_what_is_learnt(chat_tokenizer: Path) -> None:
    encoder, tokenizer, _ = encoder_of(chat_tokenizer, "chatml")
    messages = [{**one, "train": False} if one["content"] == "Two fathoms." else one for one in TALK]
    found = encoder.encode(messages)
    assert found is not None
    assert decoded(tokenizer, found) == "Three.<|im_end|>"


def test_the_oldest_exchanges_go_first(chat_tokenizer: Path) -> None:
    encoder, _, _ = encoder_of(chat_tokenizer, "chatml")
    whole, short = encoder.encode(TALK), encoder.encode([TALK[0], *TALK[3:]])
    assert whole is not None and short is not None and whole.dropped == 0
    tight, _, _ = encoder_of(chat_tokenizer, "chatml", most=len(whole.ids) - 1)
    found = tight.encode(TALK)
    assert found is not None and found.ids == short.ids and found.dropped == 1
    assert whole.kept == TALK and found.kept == [TALK[0], *TALK[3:]]
    assert encoder_of(chat_tokenizer, "chatml", most=len(short.ids) - 1)[0].encode(TALK) is None


def talks(count: int) -> list[dict[str, Any]]:
    prose = Prose(42)
    return [
        {
            "messages": [
                {"role": "user", "content": prose.sentence(9)},
                {"role": "assistant", "content": prose.sentence(12)},
            ]
        }
        for _ in range(count)
    ]


def test_shards_of_conversations(chat_tokenizer: Path, tmp_path: Path) -> None:
    rows = talks(40)
    rows.append({"messages": [{"role": "user", "content": "only a question of mine, and none answers it at all"}]})
    rows.append({"messages": [*talks(1)[0]["messages"], {"role": "assistant", "content": "very long " * 300}]})
    rows.append(rows[3])
    values = recipe_values(
        {"talk": {"inputs": [str(write_jsonl(tmp_path / "talk.jsonl", rows))], "kind": "conversations"}},
        tokenize={"tokenizer": str(chat_tokenizer), "held_out": 0.2},
        converse={"max_tokens": 200},
    )
    report = build(parse_corpus_recipe(values), tmp_path / "out")
    assert report.budget is None and not (tmp_path / "out" / "shards").exists()
    counts = report.stages["converse"].counts
    assert f"out: {counts['tokens']:,} tokens of 40 conversations; " in str(report)
    assert "43 documents read: 1 duplicates, 2 rejected as conversations. 40 conversations remain." in str(report)
    assert "rejected: too long 1, without an answer 1, refused by the template 0" in str(report)
    assert (counts["conversations"], counts["too_long"], counts["no_target"]) == (42, 1, 1)
    rejected = lines(tmp_path / "out" / "stages" / "converse" / "rejected.jsonl")
    assert {row["path"]: row["reason"] for row in rejected} == {
        "talk.jsonl:41": "no_target",
        "talk.jsonl:42": "too_long",
    }
    tokenizer = Tokenizer.from_file(str(chat_tokenizer / "tokenizer.json"))
    answers = {row["messages"][1]["content"] for row in rows[:40]}
    found = set()
    for split in ("train", "val"):
        data = TokenDataset.open(tmp_path / "out" / "conversations", split)
        tokens = stream(data)
        bits = read_targets(tmp_path / "out" / "conversations" / split / "talk" / "00000.bin", data.num_tokens)
        ends = np.flatnonzero(tokens == data.eos_token_id)
        assert len(ends) == data.num_documents
        for ids, mine in zip(np.split(tokens, ends[:-1] + 1), np.split(bits, ends[:-1] + 1), strict=True):
            said = tokenizer.decode(ids[mine].tolist(), skip_special_tokens=False)
            assert said.endswith("<|im_end|>")
            found.add(said.removesuffix("<|im_end|>"))
    assert found == answers and "| duplicate | 1 |" in report.card.read_text()
    assert json.loads((tmp_path / "out" / "conversations" / "index.json").read_text())["targets_crc32"].keys() == {
        "train/talk/00000.targets",
        "val/talk/00000.targets",
    }


def test_a_template_that_the_tokenizer_cannot_say(tokenizer: str, tmp_path: Path) -> None:
    talk = {"inputs": [str(write_jsonl(tmp_path / "talk.jsonl", talks(3)))], "kind": "conversations"}
    values = recipe_values({"talk": talk}, tokenize={"tokenizer": tokenizer, "held_out": 0})
    with pytest.raises(
        DataError, match=r"converse\.template=chatml: the tokenizer has no token <\|im_end\|>, <\|im_start"
    ):
        build(parse_corpus_recipe(values), tmp_path / "out")
    build(parse_corpus_recipe({**values, "converse": {"template": "alpaca"}}), tmp_path / "out")


def test_conversations_are_learnt_as_they_are_written(tmp_path: Path) -> None:
    """Ligatures, powers, blank lines and trailing blanks stay, so that the targets are the answer to the letter."""
    answer = "ﬁve is 2³²  \n\n\n\n\n  end \t"
    row = {"messages": [{"role": "user", "content": " ½?\n"}, {"role": "assistant", "content": answer}]}
    collections = {"talk": {"inputs": str(write_jsonl(tmp_path / "talk.jsonl", [row])), "kind": "conversations"}}
    workspace = until("clean", tmp_path / "out", recipe_values(collections))
    (kept,) = lines(workspace.stage("clean") / "part-00000.jsonl")
    assert kept["messages"] == row["messages"]


QUESTION: ConversationMessage = {"role": "user", "content": "How deep?"}
TWO: ConversationMessage = {"role": "assistant", "content": "Two fathoms."}
SAID = {"chosen": "Two fathoms.", "rejected": "Blue."}
BRIEF: ConversationMessage = {"role": "system", "content": "Be brief."}
BLUE: ConversationMessage = {"role": "assistant", "content": "Blue."}


@pytest.mark.quick("row0", "row5")
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How deep?", "chosen": "Two fathoms.", "rejected": "Blue."},
        {"prompt": [QUESTION], "chosen": [TWO], "rejected": [BLUE]},
        {"prompt": "How deep?", "chosen": [QUESTION, TWO], "rejected": [QUESTION, BLUE]},
        {"chosen": [QUESTION, TWO], "rejected": [QUESTION, BLUE]},
        {"prompt": "How deep?", "chosen": TWO, "rejected": BLUE},
        {key: f"\n\nHuman: How deep?\n\nAssistant: {said}" for key, said in SAID.items()},
    ],
)  # fmt: skip
def test_pairs_of_preferences_in_every_layout(row: dict[str, Any], tmp_path: Path, tokenizer: str) -> None:
    """From a row to TRL's export, with the same question, answers and mask; the chosen answer is a conversation. Its
    bytes leave out the rejected answer, as its tokens do."""
    assert pair_of(row) == ([QUESTION, TWO], [BLUE])
    pairs = write_jsonl(tmp_path / "a.jsonl", [row, {"prompt": "x", "chosen": "same", "rejected": "same"}])
    values = recipe_values(
        {"a": {"inputs": [str(pairs)], "kind": "preferences"}}, exports=["trl", "axolotl"],
        converse={"template": "alpaca"}, tokenize={"tokenizer": tokenizer, "held_out": 0.0},
    )  # fmt: skip
    out = build(parse_corpus_recipe(values), tmp_path / "out").directory
    assert lines(out / "exports" / "trl" / "a.jsonl") == [{"prompt": [QUESTION], "chosen": [TWO], "rejected": [BLUE]}]
    assert lines(out / "exports" / "axolotl" / "a.jsonl") == []
    assert "equal" in lines(out / "stages" / "ingest" / "failed.jsonl")[0]["detail"]
    assert TokenDataset.open(out / "conversations").num_bytes == len("How deep?\n\nTwo fathoms.")
    assert (
        "not in exports/axolotl" in (out / "card.md").read_text() and (out / "conversations" / "index.json").is_file()
    )


@pytest.mark.parametrize("first", [[BRIEF], [{**QUESTION, "content": "Hi"}, {**TWO, "content": "Yo"}]])
def test_a_prompt_that_both_answers_repeat_further_on_is_not_asked_twice(first: list[ConversationMessage]) -> None:
    whole = [*first, QUESTION]
    row = {"prompt": "How deep?", "chosen": [*whole, TWO], "rejected": [*whole, BLUE]}
    assert pair_of(row) == ([*whole, TWO], [BLUE])


def test_nothing_of_a_row_is_left_out() -> None:
    """A system message and earlier exchanges may stand in fields of their own; a field may be null."""
    turns = [QUESTION, TWO]
    asked = {"instruction": "How deep?", "output": "Two fathoms."}
    assert messages_of({**asked, "history": [["How deep?", "Two fathoms."]]}) == turns * 2
    row = {"messages": None, "conversations": turns}
    assert messages_of(row) == messages_of({**row, "system": None}) == turns
    assert messages_of({**row, "system": "Be brief."}) == [BRIEF, *turns]
    assert messages_of({"messages": [BRIEF, *turns], "system": "Be long."}) == [BRIEF, *turns]
    assert pair_of({"system": "Be brief.", "prompt": "How deep?", **SAID})[0] == [BRIEF, *turns]
    with pytest.raises(DataError, match="history: expected a list of pairs"):
        messages_of({**asked, "history": ["How deep?"]})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "a"}, "no chosen and rejected"),
        ({"chosen": "a", "rejected": "b"}, "no prompt"),
        ({"prompt": "q", "chosen": [QUESTION], "rejected": "b"}, "does not begin and end"),
        ({"prompt": "q", "chosen": [TWO, QUESTION, TWO], "rejected": [BLUE]}, "differ before the last"),
    ],
)
def test_rows_that_are_no_pair(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        pair_of(row)

"""Which tokens of a conversation are trained on, compared with TRL's training templates, family by family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fathom.corpus.chat_template import TokenizerTemplate
from fathom.corpus.templates import ConversationEncoder
from fathom.data.tokenizer import plain, save_tokenizer, train_bpe
from fathom.errors import DataError

trl = pytest.importorskip("trl")
FOLDER = Path(trl.__file__).parent / "chat_templates"
TALK = [
    {"role": "user", "content": "How deep?"},
    {"role": "assistant", "content": "Two fathoms."},
    {"role": "user", "content": "And here?"},
    {"role": "assistant", "content": "Three."},
]
PICTURES = {"idefics3", "llava_next", "smolvlm"}  # a message there is a list of texts and pictures
FAMILIES = sorted({path.stem.removesuffix("_training") for path in FOLDER.glob("*_training.jinja")} - PICTURES)
ENDLESS = {"glm4moe"}  # whose turns end where the next begins
# What TRL trains on in addition to an answer and the token after it: text of the prompt, or text after the end.
BESIDE = re.compile(
    r"<think>\s*</think>\s*|<｜Assistant｜>|<\|start\|>assistant(<\|channel\|>final| to=user)?<\|message\|>"
)


def encoded(template: str, folder: Path) -> tuple[Path, list[int], list[bool], str]:
    """Tokens and loss mask of a conversation, and the trained text, by a tokenizer that has the family's tokens."""
    found = {token for path in FOLDER.glob("*.jinja") for token in re.findall(r"<[|｜/\w▁]+>", path.read_text())}
    tokens = sorted(found - {"<|endoftext|>", "<|pad|>"})
    tokenizer = train_bpe(["How deep is it? Two fathoms. And here? Three."] * 3, 300, tokens)
    tokenizer.bos_token, tokenizer.chat_template = "<|endoftext|>", template
    save_tokenizer(tokenizer, folder)
    place = folder / "tokenizer"
    fast = plain(Tokenizer.from_file(str(place / "tokenizer.json")))
    made = ConversationEncoder(fast, fast.token_to_id("<|endoftext|>"), TokenizerTemplate(place), 9999).encode(TALK)
    assert made is not None
    trained = [one for one, bit in zip(made.ids, made.trained, strict=True) if bit]
    return place, made.ids, made.trained, fast.decode(trained, skip_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_those_of_trls_template(family: str, tmp_path: Path) -> None:
    """If a template marks what is trained on: tokens and mask equal those of transformers, bit by bit."""
    from transformers import AutoTokenizer

    place, ids, bits, _ = encoded((FOLDER / f"{family}_training.jinja").read_text(), tmp_path)
    whole = AutoTokenizer.from_pretrained(place).apply_chat_template(
        TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    count = len(whole["input_ids"])
    assert ids[:count] == whole["input_ids"]
    assert [int(bit) for bit in bits[:count]] == whole["assistant_masks"]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_marks_answers_and_the_tokens_after_them_are_learnt(family: str, tmp_path: Path) -> None:
    """The family's own template trains on what TRL trains on, less prompt text and text after the end."""
    template = (FOLDER / f"{family}.jinja").read_text()
    if family in ENDLESS:
        with pytest.raises(DataError, match="ends an answer without a special token"):
            encoded(template, tmp_path)
        return
    *_, ours = encoded(template, tmp_path)
    (tmp_path / "trl").mkdir()
    *_, theirs = encoded((FOLDER / f"{family}_training.jinja").read_text(), tmp_path / "trl")
    turns = re.fullmatch(r"Two fathoms\.(<[^>]+>)Three\.(<[^>]+>)", ours)
    assert turns, ours
    wanted = re.sub(r"\s+(?=Two|Three|$)|<\|endoftext\|>\Z", "", BESIDE.sub("", theirs)).strip()
    first, last = (re.search(rf"{answer}\.(<[^>]+>)", wanted) for answer in ("Two fathoms", "Three"))
    assert first and last and turns.groups() == (first[1], last[1])


def test_a_tuned_model_goes_on_in_dpo(tmp_path: Path) -> None:
    """A run's export is what TRL's trainer of preferences opens, and what that saves Fathom opens and continues."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fathom.corpus.prepare import prepare
    from fathom.training import train
    from tests.data.corpora import write_documents
    from tests.tiny import tiny_recipe

    write_documents(tmp_path / "texts.jsonl", 60)
    prepare([str(tmp_path / "texts.jsonl")], tmp_path / "data", train_tokenizer=304, held_out=0.1)
    onward = ("train.export=true", "train.steps=2", "model.mixer=none", "model.max_position_embeddings=128")
    train(tiny_recipe(tmp_path / "data", *onward), tmp_path / "run")
    place = tmp_path / "run" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = [{"prompt": f"How deep is {n}?", "chosen": " Two fathoms.", "rejected": " Blue."} for n in range(8)]
    settings = trl.DPOConfig(
        str(tmp_path / "dpo"), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, use_cpu=True,
        report_to="none", bf16=False, save_strategy="no", max_length=64,
    )  # fmt: skip
    trainer = trl.DPOTrainer(model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    trainer.save_model(str(tmp_path / "preferred"))
    source = f"model={{from_pretrained: {tmp_path / 'preferred'}}}"
    assert train(tiny_recipe(tmp_path / "data", "train.steps=1", source), tmp_path / "again").finished

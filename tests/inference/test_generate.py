"""Text from an exported model: streamed, seeded, in batches, in files that survive a kill, in conversation."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fathom.checkpoints.export import export
from fathom.checkpoints.find import find_model
from fathom.checkpoints.open import open_checkpoint
from fathom.cli.main import main
from fathom.data.tokenizer import train_bpe
from fathom.inference.generate import (
    GenerateError,
    Sampling,
    chat,
    encode,
    generate,
    generate_batch,
    generate_file,
)
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.report.files import lock
from tests.models.cases import build, config_of
from tests.processes import Command
from tests.tiny import export_tiny, in_pieces, piece_tokenizer, say, tiny_config, tiny_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
PROMPTS = ["the depth", "a", "of a river — measured in fathoms é", "river", "the the the", "in", "depth of", "é"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = train_bpe(["the depth of a river — measured in fathoms é"] * 20, 300)
    tokenizer.chat_template = TEMPLATE
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**shape, mixer="depth_attention", initializer_range=0.5))
    return export(model, tmp_path_factory.mktemp("run") / "model", tokenizer)


@pytest.fixture(scope="module")
def opened(exported: Path):
    return open_checkpoint(exported, "cpu")


def test_what_is_streamed_is_the_text(opened) -> None:
    pieces: list[str] = []
    made = generate(*opened, "the depth", Sampling(12, seed=3), pieces.append)
    assert "".join(pieces) == made.text and len(pieces) > 3
    assert made.tokens == 12 and made.tokens_per_second > 0


def test_blanks_that_begin_a_line_are_streamed() -> None:
    """Where decoding strips a leading blank; each line was decoded alone."""
    model, tokenizer, pieces = FathomForCausalLM(tiny_config()).eval(), piece_tokenizer(), list[str]()
    answer = tokenizer("def f\n  a\n\n   b,\n c")["input_ids"]
    say(model, answer)
    made = generate(model, tokenizer, "The", Sampling(len(answer), temperature=0), pieces.append)
    assert "".join(pieces) == made.text and "\n  a\n\n   b,\n c" in made.text
    assert len(pieces) > 10, "token by token"


def test_a_seed_decides(opened) -> None:
    texts = [generate(*opened, "", Sampling(12, temperature=2.0, seed=seed)).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("static_cache", [False, True])
def test_greedy_is_the_likeliest_token_each_time(opened, static_cache: bool, recwarn) -> None:
    model, tokenizer = opened
    made = generate(model, tokenizer, "the", Sampling(6, temperature=0, static_cache=static_cache))
    ids = tokenizer("the", return_tensors="pt").input_ids
    for _ in range(6):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert made.text == tokenizer.decode(ids[0, made.prompt_tokens :], skip_special_tokens=True)
    assert not [w for w in recwarn if "generation" in str(w.message)]


@pytest.mark.slow
def test_compiled_decoding_says_the_same(opened) -> None:
    plain, compiled = (generate(*opened, "the", Sampling(6, temperature=0, compile=c)) for c in (False, True))
    assert plain.text == compiled.text


def test_the_context_ends_the_text(opened) -> None:
    made = generate(*opened, "the", Sampling(1000, seed=0, options={"eos_token_id": None}))
    assert made.prompt_tokens + made.tokens == 64 and made.finish == "length"
    with pytest.raises(GenerateError, match="context is 64"):
        generate(*opened, "the depth of a river " * 40)


BATCHES = [{"num_beams": 3, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}]
BATCHES += [{"no_repeat_ngram_size": 1, "eos_token_id": None}]
BATCHES += [{"encoder_repetition_penalty": 1.5, "forced_eos_token_id": 7}]


@pytest.mark.parametrize("options", BATCHES)
def test_a_batch_equals_one_at_a_time(opened, options: dict) -> None:
    """Greedy, with prompts of many lengths, some of which end and some of which meet the end of the context.

    In float64: in float32, kernels that add in another order for another batch may settle a near tie the other way.
    """
    model, tokenizer = copy.deepcopy(opened[0]).double(), opened[1]
    sampling = Sampling(59, temperature=0, options=options)
    ids = [encode(tokenizer, prompt) for prompt in PROMPTS]
    together = generate_batch(model, tokenizer, ids, sampling)
    alone = [generate(model, tokenizer, prompt, sampling) for prompt in PROMPTS]
    for a, b in zip(together, alone, strict=True):
        assert (a.text, a.tokens, a.prompt_tokens, a.finish) == (b.text, b.tokens, b.prompt_tokens, b.finish)
    assert any(a.prompt_tokens + a.tokens == 64 for a in together)


def test_drafts_of_a_batch_leave_padding_out_of_penalties(opened) -> None:
    """A penalty so small that any token of a prompt with a logit above 0 comes next."""
    tokenizer, shape = opened[1], {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300, "initializer_range": 0.5}
    torch.manual_seed(1)
    model = FathomForCausalLM(FathomConfig(**shape, recurrence="loop", recurrence_options={"trips": 2})).double().eval()
    ids = [encode(tokenizer, prompt) for prompt in PROMPTS]
    sampling = Sampling(4, temperature=0, options={"encoder_repetition_penalty": 1e9})
    alone = [generate_batch(model, tokenizer, [row], sampling)[0].text for row in ids]
    drafted = generate_batch(model, tokenizer, ids, replace(sampling, speculate=1))
    assert [made.text for made in drafted] == alone


def test_a_least_length_counts_no_padding(opened) -> None:
    """It is of prompt and answer together, as transformers has it."""
    model, tokenizer = opened
    ids = [encode(tokenizer, prompt) for prompt in PROMPTS]
    stop = int(model.generate(torch.tensor([ids[1]]), max_new_tokens=1, do_sample=False)[0, -1])
    sampling = Sampling(8, temperature=0, options={"eos_token_id": stop, "min_length": max(map(len, ids))})
    alone = [generate_batch(model, tokenizer, [row], sampling)[0].text for row in ids]
    assert [made.text for made in generate_batch(model, tokenizer, ids, sampling)] == alone


def test_a_stop_ends_one_row_only(opened) -> None:
    """Whatever token is made the end of text, rows that meet it stop there and the others go on."""
    model, tokenizer = opened
    free = Sampling(20, temperature=0, options={"eos_token_id": None})
    ids = [encode(tokenizer, prompt) for prompt in PROMPTS]
    rows = [encode(tokenizer, made.text) for made in generate_batch(model, tokenizer, ids, free)]
    token = next(t for t in rows[0] if any(t not in row for row in rows))
    made = generate_batch(model, tokenizer, ids, Sampling(20, temperature=0, options={"eos_token_id": token}))
    alone = [
        generate(model, tokenizer, p, Sampling(20, temperature=0, options={"eos_token_id": token})) for p in PROMPTS
    ]
    assert [(m.text, m.tokens, m.finish) for m in made] == [(m.text, m.tokens, m.finish) for m in alone]
    assert {m.finish for m in made} == {"stop", "length"}


def test_a_last_token_that_is_also_the_padding_is_kept(opened) -> None:
    """Where no row can have ended early, none is padded behind."""
    model, tokenizer = opened
    free, ids = Sampling(20, temperature=0, options={"eos_token_id": None}), encode(tokenizer, "the")
    last = model.generate(torch.tensor([ids]), **{"max_new_tokens": 20, **free.arguments()})[0, -1]
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = tokenizer.convert_ids_to_tokens(int(last))
    made = generate(model, padded, "the", free)
    assert (made.tokens, made.finish) == (20, "length")


def test_a_stop_string(opened) -> None:
    text = generate(*opened, "the depth", Sampling(20, temperature=0)).text
    word = next(c for c in text[1:] if c.isascii() and c.isalpha())
    made = generate(*opened, "the depth", Sampling(20, temperature=0, options={"stop_strings": word}))
    assert made.finish == "stop" and text.startswith(made.text) and made.text.count(word) == 1


def test_a_stop_string_that_a_padding_token_completes() -> None:
    """It ends the text there, as it does a server's; and as many are kept as were drawn."""
    model, tokenizer = FathomForCausalLM(tiny_config(num_hidden_layers=1)).eval(), tiny_tokenizer()
    pad, a = tokenizer.convert_tokens_to_ids(["<|im_end|>", "a"])
    tokenizer.pad_token = "<|im_end|>"
    for stop, row in (("a<|im_end|>", [a, pad]), ("a<|im_end|><|im_end|>", [a, pad, pad])):
        for count in (len(row), len(row) + 2):
            handle = say(model, [*row, pad, pad])
            options = {"stop_strings": stop, "eos_token_id": None}
            made = generate(model, tokenizer, "The", Sampling(count, temperature=0, options=options))
            handle.remove()
            assert (made.text, made.tokens, made.finish) == ("a", len(row), "stop")


def test_a_continuation_keeps_its_first_blank(tmp_path: Path) -> None:
    """Where decoding strips a leading one; an answer of a conversation, which is a text of its own, has none."""
    model, tokenizer, pieces = (
        FathomForCausalLM(tiny_config(num_hidden_layers=1)).eval(),
        piece_tokenizer(),
        list[str](),
    )
    tokenizer.chat_template = TEMPLATE
    row = tokenizer("lead")["input_ids"]
    say(model, row * 4)
    made = generate(model, tokenizer, "The", Sampling(len(row), temperature=0), pieces.append)
    assert "".join(pieces) == made.text == " lead"
    lines = write(tmp_path / "in.jsonl", [{"prompt": "The"}, {"messages": [{"role": "user", "content": "a"}]}])
    generate_file(model, tokenizer, lines, tmp_path / "out.jsonl", Sampling(len(row), temperature=0), batch_size=1)
    assert [one["completion"] for one in read(tmp_path / "out.jsonl")] == [" lead", "lead"]
    chat(model, tokenizer, Sampling(len(row), temperature=0), iter(["a"]), pieces.append)
    assert "".join(pieces) == " leadlead\n"


def test_half_a_character_at_the_limit_is_streamed_as_it_is_returned() -> None:
    """Decoding takes back what a run of bytes said before."""
    model, tokenizer, pieces = FathomForCausalLM(tiny_config(num_hidden_layers=1)).eval(), in_pieces(), list[str]()
    row = tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "<0xF0>", "<0x9F>"])
    say(model, row)
    made = generate(model, tokenizer, "a", Sampling(len(row), temperature=0), pieces.append)
    assert "".join(pieces) == made.text == "a\n\ufffd\ufffd" != tokenizer.decode(row)


def test_a_stop_string_ends_one_row_only(opened) -> None:
    """A row that met it is padded, here with a token that ends texts, which is no part of it."""
    model, tokenizer = opened[0], copy.deepcopy(opened[1])
    tokenizer.pad_token = tokenizer.eos_token
    ids = [encode(tokenizer, prompt) for prompt in PROMPTS]
    texts = [made.text for made in generate_batch(model, tokenizer, ids, Sampling(12, temperature=0))]
    word = next(c for c in texts[0] if c.isascii() and c.isalpha() and not all(c in text for text in texts))
    sampling = Sampling(12, temperature=0, options={"stop_strings": word})
    made = generate_batch(model, tokenizer, ids, sampling)
    alone = [generate(model, tokenizer, prompt, sampling) for prompt in PROMPTS]
    assert [(m.text, m.tokens, m.finish) for m in made] == [(m.text, m.tokens, m.finish) for m in alone]
    assert {m.finish for m in made} == {"stop", "length"}
    last = Sampling(alone[0].tokens, temperature=0, options={"stop_strings": word})
    assert generate(model, tokenizer, PROMPTS[0], last).finish == "stop", "though there is no room for more"


def test_trips_of_a_row_that_ends_first_are_counted_as_alone(opened) -> None:
    """Its last token, which nothing reads alone, is read while the others go on."""
    model, tokenizer = build(config_of("adaponder", vocab_size=300, num_hidden_layers=1), 2).double(), opened[1]
    sampling = Sampling(7, temperature=0, options={"stop_strings": ["t"]})
    ids = [encode(tokenizer, prompt) for prompt in PROMPTS[:4]]
    together = generate_batch(model, tokenizer, ids, sampling)
    alone = [generate_batch(model, tokenizer, [row], sampling)[0] for row in ids]
    assert [made.trips for made in together] == [made.trips for made in alone]
    assert len({made.tokens for made in together}) > 1


def test_memory_that_runs_out_halves_the_batch(opened, monkeypatch) -> None:
    model, tokenizer = opened
    whole, sizes = model.generate, []

    def small(ids: torch.Tensor, **arguments: object) -> torch.Tensor:
        if len(ids) > 3:
            raise torch.OutOfMemoryError("too much")
        sizes.append(len(ids))
        return whole(ids, **arguments)

    ids = [encode(tokenizer, prompt) for prompt in PROMPTS]
    expected = [made.text for made in generate_batch(model, tokenizer, ids, Sampling(5, temperature=0))]
    monkeypatch.setattr(model, "generate", small)
    found = [made.text for made in generate_batch(model, tokenizer, ids, Sampling(5, temperature=0))]
    assert found == expected and sizes == [2, 2, 2, 2]


def test_the_checkpoints_own_sampling_is_the_default() -> None:
    silent, own = SimpleNamespace(do_sample=None), SimpleNamespace(do_sample=True)
    assert Sampling().arguments(silent) == {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95}
    assert Sampling(top_k=5).arguments(own) == {"top_k": 5}
    assert Sampling(options={"min_p": 0.1}).arguments(own) == {"min_p": 0.1, "top_k": 0}
    assert Sampling(temperature=0).arguments(own)["do_sample"] is False


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("sampling", [Sampling(7, temperature=0), Sampling(7, temperature=2.0, seed=5)])
def test_a_file_goes_on_wherever_it_was_cut(opened, tmp_path: Path, sampling: Sampling) -> None:
    records = [{"prompt": prompt, "id": i} for i, prompt in enumerate(PROMPTS)]
    records[5] = {"messages": [{"role": "user", "content": "how deep?"}], "id": 5}
    prompts = write(tmp_path / "in.jsonl", records)
    generate_file(*opened, prompts, tmp_path / "whole.jsonl", sampling, batch_size=3)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    made = read(tmp_path / "whole.jsonl")
    assert [{key: m[key] for key in r} for r, m in zip(records, made, strict=True)] == records
    assert all(m["tokens"] <= 7 and m["finish"] in ("stop", "length") for m in made)
    for cut in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        (tmp_path / "cut.jsonl").write_bytes(whole[:cut])
        generate_file(*opened, prompts, tmp_path / "cut.jsonl", sampling, batch_size=3)
        assert (tmp_path / "cut.jsonl").read_bytes() == whole


def test_a_kill_loses_and_doubles_nothing(exported: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"prompt": f"{PROMPTS[i % 8]} {i}"} for i in range(60)])
    out = tmp_path / "out.jsonl"
    words = ["generate", str(exported), "--prompts", str(prompts), "--out", str(out), "--device", "cpu"]
    words += ["--temperature", "0", "--batch-size", "2", "--max-new-tokens", "30"]
    process = Command(words, tmp_path, tmp_path)
    while not out.exists() or not out.stat().st_size:
        assert process.running, process.err
        time.sleep(0.01)
    process.kill()
    half = out.read_bytes()
    assert main(words) == 0
    done = out.read_bytes()
    assert 0 < half.count(b"\n") < 60 and done.startswith(half[: half.rfind(b"\n") + 1])
    assert [record["prompt"] for record in read(tmp_path / "out.jsonl")] == [r["prompt"] for r in read(prompts)]


def test_a_prompt_that_cannot_be_continued_does_not_stop_the_others(opened, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "the depth " * 70}, {"prompt": ""}])
    generate_file(*opened, prompts, tmp_path / "out.jsonl", Sampling(3, temperature=0))
    made = read(tmp_path / "out.jsonl")
    assert "context is 64" in made[1]["error"] and made[0]["tokens"] == made[2]["tokens"] == 3


@pytest.mark.parametrize("damaged", ["z", "<|endoftext|>"])
def test_a_prompt_of_no_numbers_does_not_stop_the_others(tmp_path: Path, damaged: str) -> None:
    """The second token pads shorter prompts, so that rows beside each other are damaged that are not alone."""
    tokenizer, prompts = tiny_tokenizer(), ["The lead", f"{damaged}z", "depth of a dark", "To", "the sailors let"]
    torch.manual_seed(0)
    model = FathomForCausalLM(tiny_config(initializer_range=0.6, tie_word_embeddings=False)).eval()
    bad = tokenizer.convert_tokens_to_ids(damaged)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad], model.lm_head.weight[bad] = torch.nan, 0
    lines = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    for size in (1, 2, 5):
        generate_file(model, tokenizer, lines, tmp_path / f"{size}.jsonl", Sampling(6, temperature=0), batch_size=size)
        made = read(tmp_path / f"{size}.jsonl")
        assert [one.get("error", "")[:36] for one in made] == ["", "the model's scores are not finite: i", "", "", ""]
        assert made == read(tmp_path / "1.jsonl")
    drawn = Sampling(6, temperature=1.0, seed=3)
    generate_file(model, tokenizer, lines, tmp_path / "drawn.jsonl", drawn, batch_size=5)
    whole = (tmp_path / "drawn.jsonl").read_bytes()
    (tmp_path / "drawn.jsonl").write_bytes(whole[: len(whole) // 2])
    generate_file(model, tokenizer, lines, tmp_path / "drawn.jsonl", drawn, batch_size=5)
    assert (tmp_path / "drawn.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', "nonsense"], "in.jsonl:2: bad JSON"),
        (['{"prompt": 3}'], "in.jsonl:1: expected"),
        (['{"prompt": "a", "tokens": 3}'], "the field 'tokens'"),
        (['{"prompt": "a"}', '{"prompt": "\\ud83d"}'], r"in.jsonl:2: \\ud83d is half of a surrogate pair"),
        (['{"prompt": "\udcff"}'], "in.jsonl:1: not UTF-8"),
    ],
)
def test_prompts_are_checked_before_work(opened, tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", errors="surrogateescape")
    with pytest.raises(GenerateError, match=message):
        generate_file(*opened, tmp_path / "in.jsonl", tmp_path / "out.jsonl", Sampling(3))
    assert not (tmp_path / "out.jsonl").exists()


def test_prompts_may_begin_with_a_byte_order_mark(opened, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "in"}\r\n')
    generate_file(*opened, tmp_path / "in.jsonl", tmp_path / "out.jsonl", Sampling(3))
    assert [record["prompt"] for record in read(tmp_path / "out.jsonl")] == ["a", "in"]


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
    with pytest.raises(GenerateError, match="cannot be read: no system role"):
        chat(*opened, Sampling(3), iter(["a\n"]), len, "be kind")


def test_a_message_that_a_template_refuses_ends_no_conversation(opened) -> None:
    model, tokenizer = opened[0], copy.deepcopy(opened[1])
    refusal = "{% if messages[-1]['content'] == 'no' %}{{ raise_exception('no means no') }}{% endif %}"
    tokenizer.chat_template = refusal + TEMPLATE
    said: list[str] = []
    chat(model, tokenizer, Sampling(3, temperature=0), iter(["a\n", "no\n", "b\n"]), said.append)
    expected: list[str] = []
    chat(model, tokenizer, Sampling(3, temperature=0), iter(["a\n", "b\n"]), expected.append)
    refused = "[this conversation cannot be read: no means no; /new starts over]\n"
    assert refused in said and [text for text in said if text != refused] == expected


def test_beams_and_stop_strings_may_be_the_checkpoints_own(opened, monkeypatch) -> None:
    model, tokenizer = opened
    with pytest.raises(GenerateError, match="--set num_beams=None: allowed: a whole number, 1 or more"):
        Sampling(options={"num_beams": None})
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    assert generate(model, tokenizer, "the", Sampling(6, temperature=0), len).tokens == 6, "no streamer reads beams"
    monkeypatch.setattr(model.generation_config, "num_beams", 1)
    monkeypatch.setattr(model.generation_config, "stop_strings", ["fathom"])
    assert generate(model, tokenizer, "the", Sampling(6, temperature=0), len).tokens == 6, "the tokenizer is given"


@pytest.mark.parametrize("empty", ["", [], [""]])
def test_a_checkpoints_empty_stop_strings_end_nothing(opened, monkeypatch, empty: str | list[str]) -> None:
    """They stand at the beginning of every text; one beside them still ends it."""
    free = Sampling(20, temperature=0)
    alone = generate(*opened, "the depth", free)
    word = next(c for c in alone.text[1:] if c.isascii() and c.isalpha())
    monkeypatch.setattr(opened[0].generation_config, "stop_strings", empty)
    assert generate(*opened, "the depth", free).text == alone.text
    monkeypatch.setattr(opened[0].generation_config, "stop_strings", ["", word])
    stopped = generate(*opened, "the depth", Sampling(20, temperature=0, options={"stop_strings": word}))
    assert generate(*opened, "the depth", free).text == stopped.text != alone.text


def test_another_files_output_is_left_alone(opened, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    other = write(tmp_path / "out.jsonl", [{"prompt": "b", "completion": "c"}])
    before = other.read_bytes()
    with pytest.raises(GenerateError, match=r"out.jsonl:1: not an answer to .*in.jsonl"):
        generate_file(*opened, prompts, other, Sampling(3))
    assert other.read_bytes() == before


def test_a_second_writer_is_refused(opened, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with lock(tmp_path / ".out.jsonl.lock"), pytest.raises(GenerateError, match="another process"):
        generate_file(*opened, prompts, tmp_path / "out.jsonl", Sampling(3))


def test_a_conversation_remembers(opened, monkeypatch) -> None:
    model, tokenizer = opened
    asked: list[str] = []
    whole = model.generate
    monkeypatch.setattr(model, "generate", lambda ids, **a: asked.append(tokenizer.decode(ids[0])) or whole(ids, **a))
    said: list[str] = []
    lines = iter(["deep\n", "\n", "in\n", "/new\n", "the\n", "x " * 99, "end\n"])
    chat(model, tokenizer, Sampling(4, temperature=0), lines, said.append, "of")
    assert len(asked) == 4
    answer = generate(model, tokenizer, "s:of\nu:deep\na:", Sampling(4, temperature=0)).text
    assert asked[0] == "s:of\nu:deep\na:"
    assert asked[1] == f"s:of\nu:deep\na:{answer}\nu:in\na:"
    assert asked[2] == "s:of\nu:the\na:"
    assert asked[3].endswith("\nu:end\na:") and "x x" not in asked[3]
    answers = "".join(said).split("\n")
    assert any("/new starts over" in answer for answer in answers)
    tokenizer.chat_template, kept = None, tokenizer.chat_template
    with pytest.raises(GenerateError, match="no chat template"):
        chat(model, tokenizer, Sampling(4), iter(["a"]), said.append)
    tokenizer.chat_template = kept


def test_a_run_and_a_comparison_lead_to_their_model(exported: Path, tmp_path: Path) -> None:
    assert find_model(exported.parent) == exported
    runs = [{"loss": 2.0, "directory": "elsewhere"}, {"loss": 1.0, "directory": "arms/b/seed-1"}]
    arms = [{"loss": 3.0, "runs": [{"loss": 3.0, "directory": "arms/a/seed-0"}]}, {"loss": 1.5, "runs": runs}]
    (tmp_path / "report.json").write_text(json.dumps({"arms": arms}))
    (tmp_path / "arms/b").mkdir(parents=True)
    (tmp_path / "arms/b/seed-1").symlink_to(exported.parent)
    assert find_model(tmp_path) == tmp_path / "arms/b/seed-1/model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere"], "no such directory"),
        (["."], "neither a model directory"),
        (["MODEL", "--top-p", "0"], "--top-p 0.0: allowed"),
        (["MODEL", "--temperature", "-1"], "--temperature -1.0: allowed"),
        (["MODEL", "--max-new-tokens", "0"], "--max-new-tokens 0: allowed"),
        (["MODEL", "a", "--set", "tempratur=1"], "--set tempratur: transformers' GenerationConfig has no such option"),
        (
            ["MODEL", "a", "--set", "token_healing=true"],
            "--set token_healing: transformers' GenerationConfig has no such",
        ),
        (["MODEL", "a", "--set", "min_p"], "--set min_p: expected key=value"),
        (["MODEL", "a", "--chat"], "one of them"),
        (["MODEL", "--prompts", "x.jsonl"], "--prompts and --out belong together"),
        (["MODEL", "a", "--set", "min_p=7"], "min_p=7: allowed: a number"),
        (
            ["MODEL", "a", "--set", "repetition_penalty=1e-320"],
            "repetition_penalty=1e-320: allowed: a number from 1e-6 to",
        ),
        (
            ["MODEL", "a", "--set", "encoder_repetition_penalty=1e308"],
            "encoder_repetition_penalty=1e+308: allowed: a number",
        ),
        (["MODEL", "a", "--set", "repetition_penalty=Infinity"], "repetition_penalty=inf: allowed: a number from"),
        (["MODEL", "a", "--seed", "9" * 23], f"--seed {'9' * 23}: allowed: "),
        (["MODEL", "a", "--set", "num_beams=0"], "--set num_beams=0: allowed: a whole number, 1 or more"),
        (["MODEL", "a", "--set", "num_beams=two"], "--set num_beams=two: allowed: a whole number, 1 or more"),
        (["MODEL", "a", "--set", "num_beams=2.5"], "--set num_beams=2.5: allowed"),
        (["MODEL", "a", "--set", "min_new_tokens=two"], "--set min_new_tokens=two: allowed: a whole number, 0 or more"),
        (["MODEL", "a", "--set", "eos_token_id=end"], "--set eos_token_id=end: allowed: a token id"),
        (["MODEL", "a", "--set", "suppress_tokens=3"], "--set suppress_tokens=3: allowed: a list"),
        (["MODEL", "a", "--system", "Be brief."], "--system says how to answer: give --chat with it"),
        (["MODEL", "a", "--batch-size", "4"], "--batch-size 4: allowed: 1 or more, with --prompts"),
        (["MODEL", "--prompts", "x", "--out", "y", "--batch-size", "0"], "--batch-size 0: allowed: 1 or more"),
        (["MODEL", "--chat", "--json"], "--json is for a prompt"),
        (["MODEL", "\udcff"], "the prompt is not UTF-8"),
        (["MODEL", "--chat", "--system", "\udcff"], "--system is not UTF-8"),
        (["MODEL", "a", "--set", "max_time=a"], "--set max_time: transformers: "),
        (["MODEL", "a", "--set", "num_beams=2", "length_penalty=a"], "--set num_beams length_penalty: transformers: "),
        (["MODEL", "a", "--set", "forced_eos_token_id=99999"], "--set forced_eos_token_id: transformers: "),
        (["MODEL", "a", "--device", "cuda:99"], "--device cuda:99: "),
        (["MODEL", "a", "--device", "gpu"], "--device gpu: "),
    ],
)
def test_errors_are_one_line(exported: Path, tmp_path: Path, monkeypatch, capsys, words: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in words else ["--device", "cpu"]
    assert main(["generate", *(str(exported) if word == "MODEL" else word for word in words), *device]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fathom: ")]
    assert len(said) == 1 and message in said[0]


def test_the_command(exported: Path, capsys, monkeypatch) -> None:
    words = ["generate", str(exported), "the", "--max-new-tokens", "5", "--seed", "1", "--device", "cpu"]
    assert main([*words, "--set", "min_p=0.01", "repetition_penalty=1.1"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("the") and "tokens/s" in printed.err
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 5
    monkeypatch.setattr(sys, "stdin", iter(["how deep\n"]))
    monkeypatch.setattr("fathom.cli.generate.typed_lines", lambda: sys.stdin)
    assert main(["generate", str(exported), "--chat", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert "tokens/s" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-"], []])
def test_standard_input_is_a_prompt(exported: Path, tmp_path: Path, capsys, monkeypatch, words: list[str]) -> None:
    (tmp_path / "prompt").write_bytes("the depth — é\n".encode("utf-8-sig"))
    command = ["generate", str(exported), *words, "--max-new-tokens", "2", "--json", "--device", "cpu"]
    with (tmp_path / "prompt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "the depth — é"
    (tmp_path / "prompt").write_bytes(b"\xff")
    with (tmp_path / "prompt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(command) == 2
    assert capsys.readouterr().err == "fathom: standard input is not UTF-8 (byte 0)\n"


def test_a_conversation_on_an_input_that_is_no_text(exported: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "lines").write_bytes(b"the depth\n\xff\n")
    command = ["generate", str(exported), "--chat", "--max-new-tokens", "2", "--device", "cpu"]
    with (tmp_path / "lines").open(encoding="utf-8") as file:
        for stdin, message in ((file, "standard input is not UTF-8"), (None, "--chat reads standard input")):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(command) == 2
            assert message in capsys.readouterr().err.splitlines()[-1]


LINES = "from fathom.cli.generate import typed_lines; print([ascii(line) for line in typed_lines()])"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(("typed", "said"), [("é".encode(), "\\xe9"), (b"\xe9", "standard input is not UTF-8")])
def test_typed_lines_are_text_in_every_locale(typed: bytes, said: str, terminal: bool) -> None:
    """In the locale C, Python lets bytes in that are no text."""
    keyboard, ours = pytest.importorskip("pty").openpty() if terminal else os.pipe()[::-1]
    ends = {"stdin": ours, "stdout": ours if terminal else subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = subprocess.Popen([sys.executable, "-c", LINES], env={**os.environ, "LC_ALL": "C"}, **ends)
    os.close(ours)
    shown = b""
    while terminal and b"> " not in shown:
        shown += os.read(keyboard, 1000)
    os.write(keyboard, b"caf" + typed + b"\n" + b"\x04" * terminal)
    if terminal:
        with contextlib.suppress(OSError):  # the end of a terminal
            while some := os.read(keyboard, 1000):
                shown += some
    os.close(keyboard)
    if not terminal:
        shown = running.communicate(timeout=60)[0]
    running.wait(60)
    assert said in shown.decode(errors="replace"), shown


def test_a_temperature_however_small(opened) -> None:
    likeliest = generate(*opened, "the", Sampling(6, temperature=0)).text
    for temperature in (5e-324, 1e-300, 1e-40, 1e-21, 1e-20):
        assert generate(*opened, "the", Sampling(6, temperature=temperature, top_k=0, seed=1)).text == likeliest


def test_penalties_to_their_limits_leave_something_to_draw(opened) -> None:
    """At any temperature; a penalty of 1e-320 left nothing, which torch found out."""
    limits = [{"repetition_penalty": 1e-6, "encoder_repetition_penalty": 1e9}, {"repetition_penalty": 1e9}]
    for options in (*limits, {"encoder_repetition_penalty": 1e-6}):
        for temperature in (1e-20, 1.0, 1e20):
            assert (
                generate(*opened, "the the", Sampling(6, temperature=temperature, seed=1, options=options)).tokens == 6
            )


def test_a_stop_string_is_looked_for_in_the_text_alone(opened) -> None:
    """transformers also finds one that the prompt begins, so that a text ended without it."""
    model, tokenizer = opened
    for prompt in PROMPTS:
        whole = generate(model, tokenizer, prompt, Sampling(6, temperature=0))
        stop = prompt[-1] + whole.text[:1]
        if stop not in whole.text:
            break
    stopping = Sampling(6, temperature=0, options={"stop_strings": stop})
    alone = generate(model, tokenizer, prompt, stopping)
    assert (alone.text, alone.tokens, alone.finish) == (whole.text, whole.tokens, whole.finish)
    ids = [encode(tokenizer, text) for text in (prompt, "the depth of a river")]
    assert generate_batch(model, tokenizer, ids, stopping)[0].tokens == whole.tokens


def test_a_checkpoint_that_samples_is_sampled_as_it_says(opened, monkeypatch) -> None:
    """From all tokens where it names no top_k; one text, whatever it says of several."""
    own = opened[0].generation_config
    for name, value in {"do_sample": True, "top_k": None, "num_return_sequences": 2, "token_healing": True}.items():
        monkeypatch.setattr(own, name, value, raising=False)
    assert Sampling().arguments(own)["top_k"] == 0 and Sampling(top_k=3).arguments(own)["top_k"] == 3
    drawn = generate(*opened, "the", Sampling(12, seed=1))
    assert drawn == replace(generate(*opened, "the", Sampling(12, seed=1, top_k=0)), seconds=drawn.seconds)
    whole = Sampling(4, seed=1, options={"repetition_penalty": 2})
    assert generate(*opened, "the", whole).tokens == 4


OWN = [{name: 2} for name in ("temperature", "repetition_penalty", "encoder_repetition_penalty")]
OWN += [{"min_p": 1}, {"temperature": 0.0}, {"temperature": 0}, {"temperature": 1e-320}]


@pytest.mark.parametrize("own", OWN)
def test_a_checkpoints_own_numbers_are_those_of_the_command(opened, monkeypatch, own: dict) -> None:
    """Whole numbers, of which transformers takes none, and temperatures below the coldest; alone and in a batch."""
    config, ids = opened[0].generation_config, [encode(opened[1], prompt) for prompt in PROMPTS[:2]]
    monkeypatch.setattr(config, "do_sample", True)
    name, value = next(iter(own.items()))
    asked = {name: value} if name == "temperature" else {"options": {name: float(value)}}

    def texts(**settings: Any) -> list[str]:
        one = generate(*opened, "the", Sampling(8, seed=2, **settings)).text
        torch.manual_seed(2)
        return [one, *(made.text for made in generate_batch(*opened, ids, Sampling(8, **settings)))]

    expected = texts(**asked)
    monkeypatch.setattr(config, name, value)
    assert texts() == expected
    if name != "temperature":  # where the likeliest token is taken too
        assert generate(*opened, "the", Sampling(8, temperature=0)).tokens == 8


def test_logits_that_are_no_numbers_are_refused(exported: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """The likeliest of them was the first token of the vocabulary, and a draw ended with torch's traceback."""
    model, tokenizer = open_checkpoint(exported, "cpu")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    directory = str(export(model, tmp_path / "broken", tokenizer))
    for temperature in ("0", "1"):
        assert main(["generate", directory, "the", "--temperature", temperature, "--device", "cpu"]) == 2
        shown = capsys.readouterr()
        assert shown.out == "the\n" and shown.err.startswith("fathom: the model's scores are not finite"), shown
    with pytest.raises(GenerateError, match="not finite"):
        generate_batch(model, tokenizer, [encode(tokenizer, text) for text in PROMPTS[:3]], Sampling(4, temperature=0))
    ruled_out = Sampling(4, options={"suppress_tokens": list(range(300))})
    with pytest.raises(GenerateError, match="leave no token"):
        generate(*open_checkpoint(exported, "cpu"), "the", ruled_out)
    monkeypatch.setattr("fathom.inference.generate.Finite.__call__", lambda self, ids, scores: scores)
    assert generate(model, tokenizer, "the", Sampling(4, temperature=0)).finish == "stop"  # token 0 ends a text


def test_a_closed_or_null_input_is_a_new_document(exported: Path, capsys, monkeypatch) -> None:
    command = ["generate", str(exported), "--max-new-tokens", "2", "--json", "--device", "cpu"]
    with open("/dev/null") as null:
        for stdin in (null, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(command) == 0
            assert json.loads(capsys.readouterr().out)["prompt"] == ""


def test_drafts_are_refused_before_anything_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
    once, loop = export_tiny(tmp_path / "once"), export_tiny(tmp_path / "loop", **shape)
    for directory, message in ((once, "this model makes one trip"), (loop, "draft_trips must be between 1 and 1")):
        assert main(["generate", str(directory), "deep", "--speculate", "9", "--device", "cpu"]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("fathom: --speculate 9: ") and message in shown.err
    command = ["generate", str(loop), "deep", "--device", "cpu", "--json", "--speculate"]
    for words, message in (
        (["--max-trips", "1"], "of one trip, as --max-trips or the checkpoint has it, there is nothing to draft with"),
        (["--set", "num_beams=2"], "each row is one text; leave out beams"),
    ):
        assert main([*command, *words]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"fathom: --speculate 1: {message}"

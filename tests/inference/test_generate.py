"""Text from an exported model: streamed, seeded, in batches."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fathom.checkpoints.export import export
from fathom.checkpoints.open import open_checkpoint
from fathom.cli.main import main
from fathom.errors import RequestError, SettingsError
from fathom.inference.conversation import chat
from fathom.inference.generate import generate, generate_batch
from fathom.inference.prompt import encode
from fathom.inference.prompt_file import generate_file
from fathom.inference.settings import Sampling
from fathom.kvcache.policy import CacheOptions, choose
from fathom.models import FathomConfig, FathomForCausalLM
from tests.inference.talker import PROMPTS, TEMPLATE, read, write
from tests.models.cases import build, config_of
from tests.tiny import in_pieces, piece_tokenizer, say, shape, tiny_config, tiny_tokenizer


def test_what_is_streamed_is_the_text(opened) -> None:
    pieces: list[str] = []
    made = generate(*opened, "the depth", Sampling(12, seed=3), pieces.append)
    assert "".join(pieces) == made.text and len(pieces) > 3
    assert made.tokens == 12 and made.tokens_per_second > 0


def test_a_seed_decides(opened) -> None:
    texts = [generate(*opened, "", Sampling(12, temperature=2.0, seed=seed)).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_greedy_is_the_likeliest_token_each_time(opened, recwarn) -> None:
    model, tokenizer = opened
    made = generate(model, tokenizer, "the", Sampling(6, temperature=0))
    ids = tokenizer("the", return_tensors="pt").input_ids
    for _ in range(6):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert made.text == tokenizer.decode(ids[0, made.prompt_tokens :], skip_special_tokens=True)
    assert not [w for w in recwarn if "generation" in str(w.message)]


@pytest.mark.slow
def test_compiled_decoding_says_the_same(opened) -> None:
    plain, compiled = (generate(*opened, "the", Sampling(6, temperature=0, compile=c)) for c in (False, True))
    assert plain.text == compiled.text


@pytest.mark.slow
def test_compiled_decoding_in_a_compressed_cache(opened, tmp_path) -> None:
    """Over two compressions, by the command line too."""
    cache = choose(opened[0], "sinks", CacheOptions(window=16, kept=8), static=True)
    plain, compiled = (
        generate(*opened, "the depth", Sampling(24, temperature=0, compile=c, memory=cache)).text for c in (False, True)
    )
    assert plain == compiled
    options = "--kvcache sinks --kvcache-window 16 --kvcache-kept 8 --max-new-tokens 24 --temperature 0 --compile"
    opened[0].save_pretrained(tmp_path), opened[1].save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "the depth", "--device", "cpu", *options.split()]) == 0


def test_prompts_in_a_static_cache_have_company_of_their_length(opened, monkeypatch) -> None:
    """It takes no padding; the texts are those of the cache that grows. What is compiled is another test."""
    model, tokenizer = opened
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *_: False)
    cache = choose(model, "sinks", CacheOptions(window=16, kept=8))
    prompts = [tokenizer(text).input_ids for text in ("the depth of it", "a", "the depth of us", "b")]
    growing, static = (
        [
            one.text
            for one in generate_batch(model, tokenizer, prompts, Sampling(20, temperature=0, memory=cache, compile=c))
        ]
        for c in (False, True)
    )
    assert growing == static


def test_the_context_ends_the_text(opened) -> None:
    made = generate(*opened, "the", Sampling(1000, seed=0, options={"eos_token_id": None}))
    assert made.prompt_tokens + made.tokens == 64 and made.finish == "length"
    with pytest.raises(SettingsError, match="context is 64"):
        generate(*opened, "the depth of a river " * 40)


BATCHES = [{"num_beams": 3, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}]
BATCHES += [{"no_repeat_ngram_size": 1, "eos_token_id": None}]
BATCHES += [{"encoder_repetition_penalty": 1.5, "forced_eos_token_id": 7}]
BATCHES += [{"encoder_no_repeat_ngram_size": 2, "eos_token_id": None}]


@pytest.mark.slow
@pytest.mark.parametrize("options", BATCHES)
def test_a_batch_equals_one_at_a_time(opened, options: dict) -> None:
    """Greedy, with prompts of many lengths, some of which end and some of which meet the end of the context.

    In float64: in float32, kernels that add in another order for another batch may settle a near tie the other way.
    """
    model, tokenizer = copy.deepcopy(opened[0]).double(), opened[1]
    sampling = Sampling(59, temperature=0, options=options)
    prompts = PROMPTS[:5]
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    together = generate_batch(model, tokenizer, ids, sampling)
    alone = [generate(model, tokenizer, prompt, sampling) for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert (a.text, a.tokens, a.prompt_tokens, a.finish) == (b.text, b.tokens, b.prompt_tokens, b.finish)
    assert any(a.prompt_tokens + a.tokens == 64 for a in together)


def test_where_padding_would_count_prompts_of_one_length_run_together(opened, monkeypatch) -> None:
    """A ban of words or a least length met padding, and a prompt of one token was not told beside longer ones."""
    (model, tokenizer), seen, whole = opened, list[int](), opened[0].generate
    monkeypatch.setattr(model, "generate", lambda ids, **a: seen.append(len(ids)) or whole(ids, **a))

    def sizes(**options: object) -> list[int]:
        seen.clear()
        generate_batch(model, tokenizer, [[5, 6], [5], [6, 7]], Sampling(2, temperature=0, options=options))
        return sorted(seen)

    assert sizes(no_repeat_ngram_size=2) == sizes(encoder_no_repeat_ngram_size=2) == [1, 2]
    assert sizes(min_length=3) == sizes(forced_bos_token_id=0) == sizes(bad_words_ids=[[5, 5, 7]]) == [1, 2]
    assert sizes(min_length=0, repetition_penalty=2) == [3]
    monkeypatch.setattr(model.generation_config, "min_length", 3)
    assert sizes() == [1, 2]


def test_guidance_makes_as_many_trips_as_the_text(opened) -> None:
    """For it transformers calls the model without the call's options: all trips were made."""
    tokenizer = opened[1]
    torch.manual_seed(1)
    config = FathomConfig(**shape(recurrence="loop", recurrence_options={"trips": 3}, initializer_range=0.5))
    model = FathomForCausalLM(config).double().eval()
    ids = encode(tokenizer, "the depth")
    text, rest = torch.tensor([ids]), torch.tensor([ids[-1:]])
    for _ in range(6):
        with torch.no_grad():
            given, free = (model(x, max_trips=1).logits[:, -1].log_softmax(-1) for x in (text, rest))
        token = (free + 3 * (given - free)).argmax(-1, keepdim=True)
        text, rest = torch.cat([text, token], 1), torch.cat([rest, token], 1)
    sampling = Sampling(6, temperature=0, max_trips=1, options={"guidance_scale": 3.0, "eos_token_id": None})
    made = generate_batch(model, tokenizer, [ids], sampling)[0]
    assert made.text == tokenizer.decode(text[0, len(ids) :], skip_special_tokens=True)


def other_positions(kind: str):
    """A model whose context is 32: of learned positions, or whose angles depend on the longest row of a call."""
    shape = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 299, "initializer_range": 0.5}
    torch.manual_seed(0)
    if kind == "learned":
        return GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=2, **shape)).eval()
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 100.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
    shape |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope)).eval()


@pytest.mark.parametrize("kind", ["learned", "dynamic", "longrope"])
def test_prompts_that_meet_the_contexts_end_apart(kind: str, monkeypatch) -> None:
    """A long row was carried past the context while short ones went on: an error, or other tokens in all of them."""
    model = other_positions(kind)
    prompts = [torch.randint(1, 299, (length,)).tolist() for length in (4, 27, 9, 29)]
    sampling = Sampling(40, temperature=0)
    alone = [generate_batch(model, tiny_tokenizer(), [one], sampling)[0].text for one in prompts]
    together = [one.text for one in generate_batch(model, tiny_tokenizer(), prompts, sampling)]
    assert together == alone
    monkeypatch.setattr("fathom.inference.generate._runs_with", lambda *given: ())
    with contextlib.suppress(SettingsError, IndexError):
        assert [one.text for one in generate_batch(model, tiny_tokenizer(), prompts, sampling)] != alone


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


@pytest.mark.parametrize("drafts", [1, 2, 3, 10])
def test_a_stop_string_within_a_draft_ends_the_text(drafts: int) -> None:
    """transformers looks at the last token of a step alone, so a text went on behind the string."""
    model, tokenizer, pieces = FathomForCausalLM(tiny_config(num_hidden_layers=1)).eval(), tiny_tokenizer(), list[str]()
    cycle = tokenizer.convert_tokens_to_ids([*"abcd"])
    read: list[torch.Tensor] = []

    def head(module: torch.nn.Module, given: object, logits: torch.Tensor) -> torch.Tensor:
        after = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        follow = torch.tensor([[after[int(token)] for token in read[-1][0, -logits.shape[1] :]]])
        return torch.nn.functional.one_hot(follow, logits.shape[-1]).float()

    model.model.embed_tokens.register_forward_pre_hook(lambda module, given: read.append(given[0]))
    model.lm_head.register_forward_hook(head)
    for stop, text in (("ab", "bcdab"), ("cd", "bcd"), ("da", "bcda"), ("bcdabcdab", "bcdabcdab")):
        options = {"stop_strings": stop, "prompt_lookup_num_tokens": drafts, "eos_token_id": None}
        made = generate(model, tokenizer, "abcda", Sampling(12, temperature=0, options=options), pieces.append)
        assert (made.text, made.tokens, made.finish) == (text, len(text), "stop")
        assert pieces.pop() == text and not pieces


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
    for whole, m in zip(texts, made, strict=True):
        assert whole.startswith(m.text) and m.text.count(word) == (m.finish == "stop")
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


def test_logits_that_are_no_numbers_are_refused(exported: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """The likeliest of them was the first token of the vocabulary, and a draw ended with torch's traceback."""
    model, tokenizer = open_checkpoint(exported, "cpu")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    directory = str(export(model, tmp_path / "broken", tokenizer))
    for temperature in ("0", "1"):
        assert main(["generate", directory, "the", "--temperature", temperature, "--device", "cpu"]) == 2
        shown = capsys.readouterr()
        assert shown.out == "the\n" and shown.err.startswith("fathom: the model's logits are not finite"), shown
    with pytest.raises(RequestError, match="not finite"):
        generate_batch(model, tokenizer, [encode(tokenizer, text) for text in PROMPTS[:3]], Sampling(4, temperature=0))
    ruled_out = Sampling(4, options={"suppress_tokens": list(range(300))})
    with pytest.raises(SettingsError, match="exclude every token"):
        generate(*open_checkpoint(exported, "cpu"), "the", ruled_out)
    monkeypatch.setattr("fathom.inference.processing.Finite.__call__", lambda self, ids, scores: scores)
    assert generate(model, tokenizer, "the", Sampling(4, temperature=0)).finish == "stop"  # token 0 ends a text

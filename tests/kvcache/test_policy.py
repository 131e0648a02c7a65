"""Which cache a model gets, and generating and serving from one past the context of the weights."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from pathlib import Path

import pytest
import torch

from fathom.checkpoints.open import open_checkpoint
from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.inference import engine, gate
from fathom.inference.conversation import chat
from fathom.inference.engine import Engine, Job
from fathom.inference.generate import generate
from fathom.inference.sampling import Choice
from fathom.inference.settings import Sampling
from fathom.kvcache import Schedule, build_cache, compress_in_training
from fathom.kvcache.policy import CacheOptions, Policy, choose
from tests.inference.talker import TEMPLATE
from tests.tiny import TEXT, export_tiny

FREQKV = Policy("freqkv", 16, 2, 0.5)
WORDS = ("--kvcache", "freqkv", "--kvcache-window", "16", "--kvcache-sinks", "2")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("memory") / "tiny", max_position_embeddings=64)


@pytest.fixture(scope="module")
def opened(directory: Path):
    return open_checkpoint(directory, "cpu")


def recomputed(model, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, each from the whole text anew, by the training form of the same compression."""
    ids = list(ids)
    with torch.no_grad(), compress_in_training(model, "freqkv", window=16, sinks=2):
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.quick("prompt2")
@pytest.mark.parametrize("prompt", ["To", TEXT[0], " ".join(TEXT)])
def test_greedy_text_is_the_recomputed_one(opened, prompt: str) -> None:
    model, tokenizer = opened
    ids = tokenizer(prompt)["input_ids"]
    expected = tokenizer.decode(recomputed(model, ids, 18), skip_special_tokens=True)
    made = generate(model, tokenizer, prompt, Sampling(18, temperature=0, memory=FREQKV, options={"eos_token_id": 383}))
    assert made.text == expected
    if len(ids) < 40:  # the control: an ordinary cache, for which there is room, says something else
        full = generate(model, tokenizer, prompt, Sampling(18, temperature=0, options={"eos_token_id": 383}))
        assert full.text != expected


def test_a_text_may_outgrow_the_context(opened) -> None:
    model, tokenizer = opened
    sampling = Sampling(70, temperature=0, memory=FREQKV, options={"eos_token_id": 383, "repetition_penalty": 1.3})
    assert generate(model, tokenizer, TEXT[0], sampling).tokens == 70 > model.config.max_position_embeddings


def test_a_conversation_may_outgrow_the_context(opened) -> None:
    model, tokenizer = opened
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    for memory in (Policy("drop", 16, 2), None):
        said: list[str] = []
        chat(model, tokenizer, Sampling(2, temperature=0, memory=memory), iter([f"{TEXT[0]}\n"] * 3), said.append)
        assert ("starts over" in "".join(said)) == (memory is None)  # the control: without one there is no room


@pytest.mark.parametrize("policy", [FREQKV, Policy("sinks", 16, 2, 0.5)])
def test_beams(opened, policy: Policy) -> None:
    """The prompt is read once, and says what it says where `generate` reads it for every beam."""
    model, tokenizer = opened
    ids = torch.tensor([tokenizer(TEXT[0])["input_ids"]])
    common = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 383, "num_beams": 3}
    cache = build_cache(model, **vars(policy))
    by_itself = {"past_key_values": cache, "prefill_chunk_size": cache.schedule.chunk}
    rows: list[int] = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    arguments = policy.read(model, ids, beams=3)
    handle.remove()
    assert rows and set(rows) == {1}
    expected = model.generate(ids, **by_itself, **common)
    assert torch.equal(model.generate(ids, **arguments, **common), expected)
    several = Sampling(12, temperature=0, memory=policy, options={"num_beams": 3, "eos_token_id": 383})
    made = generate(model, tokenizer, TEXT[0], several)
    assert made.text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)


def test_fewer_trips(tmp_path: Path) -> None:
    """The prompt is read with as many trips as the text is made with."""
    loop = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
    model, tokenizer = open_checkpoint(export_tiny(tmp_path / "loop", **loop), "cpu")

    def made(trips: int | None) -> tuple[str, float | None]:
        one = generate(model, tokenizer, TEXT[0], Sampling(6, temperature=0, memory=FREQKV, max_trips=trips))
        return one.text, one.trips

    whole, fewer = made(None), made(1)
    model.config.max_trips = 1
    assert fewer == made(None) != whole and (fewer[1], whole[1]) == (1.0, 2.0)


@pytest.mark.slow
def test_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(directory), TEXT[0], "--temperature", "0", "--json", "--device", "cpu", *WORDS]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["tokens"] > 0
    assert shown.err.count("warning: this checkpoint was not tuned under compression") == 1
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TEXT[0], "To", " ".join(TEXT * 3))))
    files = ["generate", str(directory), "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "3"]
    assert main([*files, "--temperature", "0", *WORDS]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tokens"] > 0 for row in rows] == [True] * 3  # unequal lengths, one longer than the context
    out.unlink()
    assert main([*files, "--temperature", "0", *WORDS, "--batch-size", "1"]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows  # batched or not


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kvcache", "nonsense"], "--kvcache nonsense: allowed: full, average"),
        (["--kvcache", "learned", "--kvcache-window", "8"], "--kvcache learned: allowed: full, average"),
        (["--kvcache", "full_fp8"], "--kvcache full_fp8: allowed: full, average"),
        (["--kvcache", "freqkv"], "--kvcache freqkv needs --kvcache-window"),
        (["--kvcache", "dct", "--kvcache-window", "8"], "--kvcache dct: allowed: full, average"),
        (["--kvcache-window", "8"], "--kvcache-window 8: give --kvcache with it"),
        ([*WORDS[:4], "--kvcache-sinks", "9"], "--kvcache freqkv: a window of 16 with 9 sinks"),
        (["--kvcache", "full", "--kvcache-ratio", "0.5"], "--kvcache-ratio 0.5: --kvcache full keeps every entry"),
        (["--kvcache-kept", "7"], "--kvcache-kept 7: give --kvcache with it"),
        ([*WORDS, "--kvcache-kept", "14"], "--kvcache freqkv: a window of 16 with 2 sinks can keep 1 to 13"),
        (
            [*WORDS, "--kvcache-kept", "7", "--kvcache-ratio", "0.5"],
            "--kvcache-ratio 0.5 and --kvcache-kept 7: give only one of them",
        ),
        (["--kvcache", "drop", *WORDS[2:], "--json", "--set", "prompt_lookup_num_tokens=3"], "take tokens back"),
    ],
)
def test_bad_words_are_one_line(directory: Path, words: list[str], message: str, capsys) -> None:
    assert main(["generate", str(directory), "To", "--device", "cpu", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_checkpoint_knows_its_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = export_tiny(tmp_path / "tuned", kvcache=vars(FREQKV))
    model, _ = open_checkpoint(tuned, "cpu")
    assert choose(model, "freqkv") == FREQKV and capsys.readouterr().err == ""
    assert choose(model, None) is None and choose(model, "full") is None
    assert choose(model, "average", CacheOptions(ratio=0.25)) == Policy("average", 16, 2, 0.25)
    assert "was tuned for freqkv, window 16, sinks 2, ratio 0.5" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="kvcache_ratio"):
        choose(model, None, CacheOptions(ratio=0.5))
    for method in ("sinks", "drop", "snapkv", "key_norm"):  # their entries are tokens' own: nothing to be tuned for
        assert choose(model, method) == Policy(method, 16, 2, 0.5) and capsys.readouterr().err == ""


def test_entries_may_be_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that was tuned to keep so many keeps them, unless another window or share is asked for."""
    counted = Policy("freqkv", 16, 2, 0.5, kept=7)
    model, _ = open_checkpoint(export_tiny(tmp_path / "tuned", kvcache=vars(counted)), "cpu")
    assert (
        choose(model, "freqkv") == counted == choose(model, "freqkv", CacheOptions(kept=7))
        and capsys.readouterr().err == ""
    )
    assert counted.empty(model).schedule == Schedule(16, 2, 7) != FREQKV.empty(model).schedule
    assert choose(model, "freqkv", CacheOptions(ratio=0.25)) == Policy("freqkv", 16, 2, 0.25)
    assert "was tuned for freqkv, window 16, sinks 2, kept 7; past 16 tokens" in capsys.readouterr().err
    assert choose(model, "drop", CacheOptions(window=12)) == Policy("drop", 12, 2, 0.5)
    assert choose(model, "sinks") == Policy("sinks", 16, 2, 0.5)
    assert choose(model, "sinks", CacheOptions(kept=7)) == Policy("sinks", 16, 2, 0.5, kept=7)
    shared = {"method": "freqkv", "window": 16, "sinks": 2, "ratio": 0.25}  # as earlier exports have it
    model, _ = open_checkpoint(export_tiny(tmp_path / "earlier", kvcache=shared), "cpu")
    assert choose(model, "freqkv") == Policy("freqkv", 16, 2, 0.25) and capsys.readouterr().err == ""
    assert choose(model, "freqkv", CacheOptions(kept=7)) == counted and "ratio 0.25; past" in capsys.readouterr().err


def test_a_method_without_a_ratio(opened, tmp_path: Path) -> None:
    """One that is given is refused; the one that another method was tuned with is not meant for it."""
    for ratio in (0.25, 0.5):  # the default is refused too, once it is requested
        with pytest.raises(SettingsError, match=rf"kvcache_ratio={ratio}`: method sinks removes one entry at a time"):
            choose(opened[0], "sinks", CacheOptions(window=16, sinks=2, ratio=ratio))
    model, _ = open_checkpoint(export_tiny(tmp_path / "tuned", kvcache={**vars(FREQKV), "ratio": 0.25}), "cpu")
    assert choose(model, "sinks") == Policy("sinks", 16, 2, 0.5)


def test_a_server_reads_past_the_context(opened) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from fathom.inference.server import Service, build_app

    model, tokenizer = opened
    prompt = " ".join(TEXT * 2)
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) > model.config.max_position_embeddings
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    with testclient.TestClient(build_app(Service(model, tokenizer, "tiny", policy=FREQKV))) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        expected = tokenizer.decode(recomputed(model, ids, 12), skip_special_tokens=True)
        assert answer.json()["choices"][0]["text"] == expected
    with testclient.TestClient(build_app(Service(model, tokenizer, "tiny"))) as client:
        assert client.post("/v1/completions", json=body).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("waiting", [True, False])
def test_nobody_reads_for_a_client_that_left(opened, monkeypatch: pytest.MonkeyPatch, waiting: bool) -> None:
    """A request that was given up before its turn, or while its prompt is read."""
    monkeypatch.setattr(engine, "chunk", lambda seconds: 16)
    running, free, read = Engine(opened[0], 1 << 30, FREQKV), threading.Event(), []
    job = Job([5] * 200, 2, Choice(), lambda event: pytest.fail(f"it was answered: {event}"))

    def look(*args: object) -> None:
        read.append(1)
        if len(read) == 3:
            running.cancel([job])

    handle = opened[0].model.register_forward_hook(look)
    running.call(free.wait)
    running.submit([job])
    if waiting:
        running.cancel([job])
    free.set()
    running.call(lambda: None).result(60)  # after the turn in which it is read, or left out
    while not running.counts["cancelled"]:
        running.call(lambda: None).result(60)
    handle.remove()
    running.join(60)
    assert len(read) == (0 if waiting else 3)


def test_bodies_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODIES", 250)
    said: list[int] = []

    async def app(scope: object, receive: object, send: object) -> None:
        await asyncio.sleep(0.01)  # the others come meanwhile

    async def send(message: dict) -> None:
        said.append(message["status"]) if "status" in message else None

    def client(size: int):
        messages = [{"type": "http.request", "body": b"x" * size}]

        async def receive() -> dict:
            return messages.pop() if messages else await asyncio.Event().wait()

        return receive

    async def ask() -> None:
        scope = {"type": "http", "path": "/v1/completions", "headers": []}
        await asyncio.gather(*(outermost(scope, client(100), send) for _ in range(3)))
        assert said == [429] and outermost.held == 0
        await outermost(scope, client(100), send)
        await outermost(scope, client(201), send)
        assert said == [429, 413] and outermost.held == 0

    outermost = gate.Gate(app, None, body_limit=200)
    asyncio.run(ask())

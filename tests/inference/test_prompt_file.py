"""A file of prompts: continued after a kill, one bad prompt beside good ones."""

from __future__ import annotations

import copy
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.inference.made_by import record_of, weights_digest
from fathom.inference.prompt_file import generate_file
from fathom.inference.settings import Sampling
from fathom.models import FathomForCausalLM
from fathom.report.files import lock
from tests.inference.talker import PROMPTS, read, write
from tests.processes import Command
from tests.tiny import tiny_config, tiny_tokenizer


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
        shutil.copy(record_of(tmp_path / "whole.jsonl"), record_of(tmp_path / "cut.jsonl"))
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
    summary = generate_file(*opened, prompts, tmp_path / "out.jsonl", Sampling(3, temperature=0))
    made = read(tmp_path / "out.jsonl")
    assert "context is 64" in made[1]["error"] and made[0]["tokens"] == made[2]["tokens"] == 3
    again = generate_file(*opened, prompts, tmp_path / "out.jsonl", Sampling(3, temperature=0))
    assert [(one.prompts, one.done_before, one.errors) for one in (summary, again)] == [(3, 0, 1), (3, 3, 1)]
    assert summary.tokens == 6 and again.tokens == 0


@pytest.mark.quick("z")
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
        assert [one.get("error", "")[:36] for one in made] == ["", "the model's logits are not finite: i", "", "", ""]
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
        (['{"prompt": "a"}', "nonsense"], r'in.jsonl:2: bad JSON: .*; expected lines of {"prompt": "..."} or'),
        ([], "in.jsonl: no prompts; expected lines of"),
        (['{"prompt": "a", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}"], "in.jsonl:1: bad JSON"),
        (['{"prompt": 3}'], "in.jsonl:1: expected"),
        (['{"prompt": "a", "tokens": 3}'], "the field 'tokens'"),
        (['{"prompt": "a"}', '{"prompt": "\\ud83d"}'], r"in.jsonl:2: \\ud83d is half of a surrogate pair"),
        (['{"prompt": "\udcff"}'], "in.jsonl:1: not UTF-8"),
    ],
)
def test_prompts_are_checked_before_work(opened, tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", errors="surrogateescape")
    with pytest.raises(SettingsError, match=message):
        generate_file(*opened, tmp_path / "in.jsonl", tmp_path / "out.jsonl", Sampling(3))
    assert not (tmp_path / "out.jsonl").exists()


def test_messages_are_read_as_a_server_reads_them(opened, tmp_path: Path) -> None:
    """Contents of several parts are one text, and a null one is none; a list of conversations is no conversation."""
    talk = {"role": "user", "content": "the depth"}
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "depth"}]
    called = {"role": "assistant"}
    records = [
        {"messages": messages}
        for messages in (
            [talk],
            [talk | {"content": parts}],
            [talk, called],
            [talk, called | {"content": None}],
            [[talk]],
            [talk | {"content": 5}],
            [talk | {"content": [{"type": "image_url", "text": "x"}]}],
        )
    ]
    generate_file(
        *opened, write(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl", Sampling(5, temperature=0), batch_size=1
    )
    made = read(tmp_path / "out.jsonl")
    assert made[0]["completion"] == made[1]["completion"] and made[2]["completion"] == made[3]["completion"]
    assert ["error" in one for one in made] == [False] * 4 + [True] * 3


def test_prompts_may_begin_with_a_byte_order_mark(opened, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "in"}\r\n')
    generate_file(*opened, tmp_path / "in.jsonl", tmp_path / "out.jsonl", Sampling(3))
    assert [record["prompt"] for record in read(tmp_path / "out.jsonl")] == ["a", "in"]


def test_another_files_output_is_left_alone(opened, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    other = write(tmp_path / "out.jsonl", [{"prompt": "b", "completion": "c"}])
    before = other.read_bytes()
    with pytest.raises(SettingsError, match=r"out.jsonl:1: not an answer to .*in.jsonl"):
        generate_file(*opened, prompts, other, Sampling(3))
    assert other.read_bytes() == before


def test_another_models_answers_are_not_continued(opened, tmp_path: Path) -> None:
    """Half of a file or all of it; whatever differs, down to a weight, is named. The same again is nothing to do."""
    prompts, out = write(tmp_path / "in.jsonl", [{"prompt": text} for text in PROMPTS[:4]]), tmp_path / "out.jsonl"
    model, tokenizer = opened
    sampling = Sampling(3, temperature=0)
    generate_file(model, tokenizer, prompts, out, sampling)
    whole = out.read_bytes()
    weight = next(iter(model.parameters()))
    for before in (whole, whole[: len(whole) // 2]):
        out.write_bytes(before)
        for other, named in [
            (replace(sampling, temperature=1.0, seed=3), "temperature=0"),
            (replace(sampling, max_new_tokens=4), "max_new_tokens=3"),
            (replace(sampling, options={"repetition_penalty": 2.0}), "options={}"),
        ]:
            with pytest.raises(SettingsError, match=f"made with {named}; choose another `out`"):
                generate_file(model, tokenizer, prompts, out, other)
        held = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[-1] += 1
        try:
            with pytest.raises(SettingsError, match="another model"):
                generate_file(model, tokenizer, prompts, out, sampling)
        finally:
            with torch.no_grad():
                weight.copy_(held)
        assert out.read_bytes() == before
        record = record_of(out).read_bytes()
        record_of(out).unlink()
        with pytest.raises(SettingsError, match="is missing"):
            generate_file(model, tokenizer, prompts, out, sampling)
        record_of(out).write_bytes(record)
        generate_file(model, tokenizer, prompts, out, replace(sampling, compile=False), batch_size=3)
        assert out.read_bytes() == whole


def test_a_digest_is_that_of_the_weights(opened) -> None:
    model = opened[0]
    before, threads = weights_digest(model), torch.get_num_threads()
    torch.set_num_threads(2)
    assert weights_digest(model) == before
    torch.set_num_threads(threads)
    assert weights_digest(copy.deepcopy(model).to(torch.bfloat16)) != before


def test_a_second_writer_is_refused(opened, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with lock(tmp_path / ".out.jsonl.lock"), pytest.raises(SettingsError, match="another process"):
        generate_file(*opened, prompts, tmp_path / "out.jsonl", Sampling(3))


def test_without_out_the_answers_are_printed(exported: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts, out = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS]), tmp_path / "out.jsonl"
    words = ["generate", str(exported), "--prompts", str(prompts), "--temperature", "0", "--max-new-tokens", "3"]
    assert main(words) == 0
    said = capfd.readouterr()
    assert f"{len(PROMPTS)} completions" in said.err
    assert main([*words, "--out", str(out)]) == 0
    assert said.out == out.read_text()

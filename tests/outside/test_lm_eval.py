"""lm-eval's own command line opens an export by the code that travels with it, or asks `fathom serve` for it, and
scores it as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from fathom.checkpoints.export import export
from fathom.evaluation.samples import compare_samples
from fathom.inference.generate import generate_batch
from fathom.inference.settings import Sampling
from tests.outside.models import CLIENTS, build, exported
from tests.processes import Command
from tests.tiny import tiny_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

ITEMS = [
    {
        "question": f"How deep is it at {i} o'clock?",
        "choices": [" a fathom", " two ells", " no lead", " dark"],
        "gold": i % 4,
    }
    for i in range(6)
]
EITHER = {"dataset_path": "json", "test_split": "test", "doc_to_text": "question"}
TASKS: dict[str, dict[str, Any]] = {
    "fathoms": {
        **EITHER,
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "words": {
        **EITHER,
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["%%"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_command_line_scores_as_the_model_does(name: str, tmp_path: Path) -> None:
    directory = exported(name, tmp_path)
    model = f"pretrained={directory},trust_remote_code=True,dtype=float32"
    (rows,) = scored(tmp_path, ["--model", "hf", "--device", "cpu", "--model_args", model], "fathoms")
    assert torch.allclose(likelihoods_of(rows), log_likelihoods(directory), atol=1e-3)


def test_its_runs_are_paired_by_question(tmp_path: Path) -> None:
    """What `--log_samples` wrote of two models, by `fathom evaluate samples`, with lm-eval's own numbers."""
    right = {}
    for name in ("vanilla", "loop"):
        (tmp_path / name).mkdir()
        directory = exported(name, tmp_path / name)
        model = ["--model", "hf", "--model_args", f"pretrained={directory},trust_remote_code=True,dtype=float32"]
        (rows,) = scored(tmp_path / name, model, "fathoms")
        right[name] = [float(row["acc"]) for row in rows]
    folders = [f"{name}={tmp_path / name / 'out'}" for name in right]
    found = {row.metric: row for row in compare_samples(folders).rows}["acc"]
    assert found.scores == {name: sum(some) / len(some) for name, some in right.items()}
    assert found.differences["loop"].pairs == len(ITEMS)


@pytest.mark.parametrize("name", ["vanilla", "loop"])
def test_the_command_line_asks_a_server(name: str, tmp_path: Path) -> None:
    """`--model local-completions`, several requests at a time: likelihoods, and texts as they are offline."""
    directory = exported(name, tmp_path)
    server = Command(["serve", str(directory), "--name", "deep", "--port", "0", "--device", "cpu"], tmp_path, tmp_path)
    try:
        address = server.first_line().split(" at ")[1].split(",")[0]
        model = f"model=deep,base_url={address}/completions,tokenizer={directory},num_concurrent=4"
        likely, words = scored(tmp_path, ["--model", "local-completions", "--model_args", model], "fathoms", "words")
    finally:
        server.kill()
    assert torch.allclose(likelihoods_of(likely), log_likelihoods(directory), atol=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = [tokenizer(item["question"])["input_ids"] for item in ITEMS]
    opened = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    made = [generate_batch(opened, tokenizer, [ids], Sampling(12, temperature=0))[0].text for ids in asked]
    assert [row["resps"][0][0] for row in words] == made


def test_the_command_line_chats_with_a_server(tmp_path: Path) -> None:
    """`--model local-chat-completions`: messages, written by the server's own template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    directory = export(build("vanilla"), tmp_path / "model", tokenizer)
    server = Command(["serve", str(directory), "--name", "deep", "--port", "0", "--device", "cpu"], tmp_path, tmp_path)
    try:
        address = server.first_line().split(" at ")[1].split(",")[0]
        model = ["--model", "local-chat-completions", "--apply_chat_template", "--model_args"]
        (words,) = scored(tmp_path, [*model, f"model=deep,base_url={address}/chat/completions"], "words")
    finally:
        server.kill()
    opened = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for row, item in zip(words, ITEMS, strict=True):
        ids = tokenizer(f"user: {item['question']}\nassistant:", add_special_tokens=False)["input_ids"]
        assert row["resps"][0][0] == generate_batch(opened, tokenizer, [ids], Sampling(12, temperature=0))[0].text


def scored(place: Path, model: list[str], *tasks: str) -> list[list[dict[str, Any]]]:
    """The samples of each task, in order, as lm-eval's command line logs them."""
    file = place / "items.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    for name, task in TASKS.items():
        whole = {"task": name, "dataset_kwargs": {"data_files": {"test": str(file)}}, **task}
        (place / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    command = [
        *(sys.executable, "-m", "lm_eval", "run", *model, "--tasks", ",".join(tasks)),
        *("--include_path", str(place), "--output_path", str(place / "out"), "--log_samples"),
    ]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    found = []
    for task in tasks:
        (samples,) = (place / "out").rglob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        found.append(sorted(rows, key=lambda row: row["doc_id"]))
    return found


def likelihoods_of(rows: list[dict[str, Any]]) -> torch.Tensor:
    """Of each choice, `[items, choices]`."""
    return torch.tensor([[float(answer[0][0]) for answer in row["resps"]] for row in rows])


@torch.no_grad()
def log_likelihoods(directory: Path) -> torch.Tensor:
    """Of each choice after its question, `[items, choices]`, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    answers = []
    for item in ITEMS:
        start = len(tokenizer(item["question"])["input_ids"])
        for choice in item["choices"]:
            ids = tokenizer(f"{item['question']}{choice}", return_tensors="pt")["input_ids"]
            scores = model(ids[:, :-1], use_cache=False).logits.log_softmax(-1)
            answers.append(scores.gather(-1, ids[:, 1:, None])[0, start - 1 :].sum())
    return torch.stack(answers).view(len(ITEMS), -1)

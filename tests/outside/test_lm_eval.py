"""lm-eval's own command line opens an export by the code that travels with it, and scores it as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.outside.models import CLIENTS, exported

ITEMS = [
    {
        "question": f"How deep is it at {i} o'clock?",
        "choices": [" a fathom", " two ells", " no lead", " dark"],
        "gold": i % 4,
    }
    for i in range(6)
]
TASK = """\
task: fathoms
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.mark.parametrize("name", CLIENTS)
def test_the_command_line_scores_as_the_model_does(name: str, tmp_path: Path) -> None:
    directory = exported(name, tmp_path)
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    (tmp_path / "fathoms.yaml").write_text(TASK.format(file=file))
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", "fathoms", "--device", "cpu"),
        *("--model_args", f"pretrained={directory},trust_remote_code=True,dtype=float32"),
        *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"),
    ]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    (samples,) = (tmp_path / "out").rglob("samples_fathoms_*.jsonl")
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    found = torch.tensor([[float(answer[0][0]) for answer in row["resps"]] for row in rows])
    assert torch.allclose(found, log_likelihoods(directory), atol=1e-3)


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

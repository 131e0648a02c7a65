"""A model that answers, prompts for it, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fathom.checkpoints.export import export
from fathom.data.tokenizer import train_bpe
from fathom.models import FathomConfig, FathomForCausalLM

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
PROMPTS = ["the depth", "a", "of a river — measured in fathoms é", "river", "the the the", "in", "depth of", "é"]


def export_talker(directory: Path) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    tokenizer = train_bpe(["the depth of a river — measured in fathoms é"] * 20, 300)
    tokenizer.chat_template = TEMPLATE
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**shape, mixer="depth_attention", initializer_range=0.5))
    return export(model, directory, tokenizer)


def write(path: Path, records: list[dict]) -> Path:
    """Records as lines of JSON."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict]:
    """The records of such a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]

"""llama.cpp's converter reads the stock exports, and writes the file that `export --as gguf` writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathom.checkpoints.export import export
from tests.outside.models import build
from tests.outside.sources import LLAMA_CPP

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's, from the vocabulary that llama.cpp tests itself with: the converter knows tokenizers by their output."""
    fields = gguf.GGUFReader(LLAMA_CPP / "models" / "ggml-vocab-gpt-2.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END)


def convert(directory: Path, file: Path) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, LLAMA_CPP / "convert_hf_to_gguf.py", directory, "--outfile", file, "--outtype", "f32"]
    return subprocess.run(script, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)


def read(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Everything a file says and holds."""
    reader = gguf.GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    return facts, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


@pytest.mark.parametrize("form,mechanism", [("qwen3", "vanilla"), ("unrolled", "loop")])
def test_the_converter_writes_our_file(
    form: str, mechanism: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    size = len(tokenizer)
    model = build(mechanism, vocab_size=size, hidden_size=32, head_dim=8, bos_token_id=size - 1, eos_token_id=size - 1)
    directory = export(model, tmp_path / form, tokenizer, form)
    done = convert(directory, tmp_path / "theirs.gguf")
    assert done.returncode == 0, done.stderr[-5000:]
    export(model, tmp_path / "ours.gguf", tokenizer, "gguf")
    (facts, tensors), (our_facts, our_tensors) = read(tmp_path / "theirs.gguf"), read(tmp_path / "ours.gguf")
    assert tensors.keys() == our_tensors.keys() and len(tensors) == 11 * (8 if form == "unrolled" else 4) + 3
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, our_tensors[name]), name
    shared = {name for name in facts if name.startswith(("qwen3.", "tokenizer."))} & our_facts.keys()
    different = {name: (facts[name], our_facts[name]) for name in shared if facts[name] != our_facts[name]}
    assert not different, json.dumps(different)[:2000]
    assert {"qwen3.block_count", "qwen3.rope.freq_base", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"} <= shared


def test_the_converter_refuses_what_llama_cpp_cannot_run(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = build("depth_attention", vocab_size=len(tokenizer), hidden_size=32, head_dim=8)
    done = convert(export(model, tmp_path / "fathom", tokenizer), tmp_path / "theirs.gguf")
    assert done.returncode != 0 and "FathomForCausalLM" in done.stderr

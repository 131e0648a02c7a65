"""llama.cpp opens the file that `export --as gguf` writes and says what transformers says; its converter, which reads
the stock exports, writes the same file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import xllamacpp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathom.checkpoints.export import export
from tests.outside.models import build
from tests.outside.sources import LLAMA_CPP
from tests.tiny import tiny_tokenizer

END = "<|endoftext|>"
LENGTH = 24
PROMPT = torch.randint(3, 384, (1, 23), generator=torch.Generator().manual_seed(0))
LLAMA: dict[str, Any] = {"qk_norm": "none"}
QWEN2: dict[str, Any] = {**LLAMA, "attention_bias": True, "output_bias": False, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("vanilla", LLAMA),
    "tied": ("vanilla", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("vanilla", QWEN2),
    "qwen3": ("vanilla", {}),
    "unrolled": ("loop", LLAMA),
}


def continued(file: Path) -> list[int]:
    """What llama.cpp's server says after the prompt, greedily and in float32, without the tokens that end a text."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(file), 128, 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.cpuparams.n_threads, settings.warmup, settings.verbosity = 1, False, 0
    server = xllamacpp.Server(settings)
    asked = {"prompt": PROMPT[0].tolist(), "n_predict": LENGTH, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps({**asked, "return_tokens": True}).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["tokens"]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_same(name: str, tmp_path: Path) -> None:
    mechanism, changes = MODELS[name]
    model = build(mechanism, **changes)
    said = continued(export(model, tmp_path / "m.gguf", tiny_tokenizer(), "gguf"))
    ends = {"suppress_tokens": [0, 1, 2], "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(PROMPT, do_sample=False, max_new_tokens=LENGTH, **ends)[0, PROMPT.shape[1] :].tolist()
    assert said == wanted and len(set(said)) > LENGTH // 2
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[: model.config.head_dim].neg_()
    assert continued(export(model, tmp_path / "other.gguf", tiny_tokenizer(), "gguf")) != wanted, "a fault is seen"


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

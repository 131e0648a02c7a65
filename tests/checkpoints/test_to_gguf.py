"""GGUF exports: read back by our own reader and by the gguf package, they are the stock model, name by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="pip install '.[gguf]'")

import gguf
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from fathom.checkpoints.export import as_unrolled, export
from fathom.checkpoints.from_gguf import open_gguf
from fathom.checkpoints.gguf import GgufStore
from fathom.checkpoints.origin import LocalOrigin
from fathom.checkpoints.to_gguf import write_gguf
from fathom.cli.main import main
from fathom.data.tokenizer import train_bpe
from fathom.errors import ModelError
from tests.models.cases import SHAPE as SMALL
from tests.models.cases import build, config_of
from tests.tiny import CHATML, TEXT, tiny_tokenizer

SHAPE = {"vocab_size": 390, "max_position_embeddings": 96, "rms_norm_eps": 3e-6}
SHAPE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}
LINEAR = {"rope_type": "linear", "rope_theta": 12345.0, "factor": 2.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def value(reader, key):
    return reader.fields[key].contents()


@pytest.mark.quick("vanilla-True-*", "vanilla-False-dtype0", "loop-middle-False-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case,tied", [("vanilla", True), ("vanilla", False), ("loop-middle", False)])
def test_every_tensor_comes_back(case, tied, dtype, tmp_path: Path) -> None:
    model = build(config_of(case, **SHAPE, tie_word_embeddings=tied)).to(dtype)
    file = export(model, tmp_path / "m.gguf", tiny_tokenizer(), "gguf")
    stock = as_unrolled(model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, stock.config.num_hidden_layers)
    wanted = {names.get_name(k, (".weight",)): v for k, v in stock.state_dict().items()}
    if tied:
        del wanted["output.weight"]
    ours = GgufStore(LocalOrigin(tmp_path), "m.gguf")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert set(ours.tensors) == set(theirs) == set(wanted)
    for name, tensor in wanted.items():
        values = tensor.float().numpy()
        assert np.array_equal(ours.read(name), values), name
        one = theirs[name]
        assert tuple(reversed(one.shape.tolist())) == tuple(values.shape), name
        assert np.array_equal(gguf.quants.dequantize(one.data, one.tensor_type).reshape(values.shape), values), name
        full = tensor.ndim == 1 or dtype == torch.float32
        stored = "F32" if full else {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
        assert one.tensor_type.name == ours.tensors[name].dtype == stored
    assert ours.config["num_hidden_layers"] == stock.config.num_hidden_layers
    name = "blk.1.attn_q.weight"
    with torch.no_grad():
        wanted[name][0, 0] += 1
    assert not np.array_equal(ours.read(name), wanted[name].float().numpy()), "a planted fault is seen"


def test_shape_and_tokenizer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = build(config_of("loop", **SHAPE, eos_token_id=2))
    reader = gguf.GGUFReader(export(model, tmp_path / "m.gguf", tokenizer, "gguf"))
    layers = as_unrolled(model).config.num_hidden_layers
    numbers = {"block_count": layers, "context_length": 96, "embedding_length": 32, "feed_forward_length": 48}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8, "vocab_size": 390}
    for key, number in numbers.items():
        assert value(reader, f"qwen3.{key}") == number
    assert value(reader, "qwen3.rope.freq_base") == 12345.0
    assert value(reader, "qwen3.attention.layer_norm_rms_epsilon") == pytest.approx(3e-6, rel=1e-6)
    tokens, types = (value(reader, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    assert len(tokens) == len(types) == 390
    vocabulary = tokenizer.get_vocab()
    assert all(tokens[token] == word for word, token in vocabulary.items())
    assert types[:3] == [gguf.TokenType.CONTROL] * 3 and types[3] == gguf.TokenType.NORMAL
    assert types[len(vocabulary) :] == [gguf.TokenType.UNUSED] * (390 - len(vocabulary))
    assert value(reader, "tokenizer.ggml.eos_token_id") == 2 and value(reader, "tokenizer.ggml.eot_token_id") == 0
    assert value(reader, "tokenizer.ggml.pre") == "gpt-2" and value(reader, "tokenizer.chat_template") == CHATML
    assert not value(reader, "tokenizer.ggml.add_bos_token")
    merges = value(reader, "tokenizer.ggml.merges")
    assert len(merges) == len(vocabulary) - 256 - 3 and all(merge.replace(" ", "") in vocabulary for merge in merges)


def test_our_own_tokenizers_are_qwens_kind(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(
        export(build(config_of("vanilla", **SHAPE)), tmp_path / "m.gguf", train_bpe(TEXT, 300), "gguf")
    )
    assert value(reader, "tokenizer.ggml.pre") == "qwen2"
    assert value(reader, "tokenizer.ggml.padding_token_id") == 1


@pytest.mark.quick("*-rope1", "*-rope2")
@pytest.mark.parametrize("config,rope", [(Qwen2Config, LINEAR), (Qwen3Config, YARN), (LlamaConfig, LLAMA3)])
def test_scaled_rope_comes_back(config, rope, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SMALL, **SHAPE, "num_hidden_layers": 1, "max_position_embeddings": 1 << 15, "initializer_range": 0.3}
    stock = AutoModelForCausalLM.from_config(config(**{**sizes, "rope_parameters": {**rope}}))
    write_gguf(tmp_path / "m.gguf", stock.eval(), tiny_tokenizer(), "m")
    if rope is YARN:
        reader = gguf.GGUFReader(tmp_path / "m.gguf")
        said = [value(reader, f"qwen3.rope.scaling.{key}") for key in ("type", "factor", "original_context_length")]
        assert said == ["yarn", 4.0, 1024]
    with pytest.warns(UserWarning, match="unpacked"):
        model = open_gguf(tmp_path / "m.gguf")[0].eval()
    assert model.config.rope_parameters == rope
    ids = torch.randint(3, 390, (1, 200))
    with torch.no_grad():
        logits = stock(ids).logits
        assert torch.equal(model(ids).logits, logits)
        stock.model.rotary_emb.inv_freq.copy_(rope["rope_theta"] ** -(torch.arange(4) / 4))
        assert not torch.allclose(stock(ids).logits, logits), "RoPE that is not scaled would be seen"


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    qwen2 = {"qk_norm": "none", "attention_bias": True, "output_bias": False, "head_dim": 16}  # of width 32, 4 heads
    olmo2 = {"norm": "rms_wide", "norm_placement": "after", "qk_norm": "full", "rope_float32": True}
    refused = (({"attention_bias": True}, "attention_bias"), (windows, "sliding windows"), (qwen2, "no head_dim 16"))
    llama3 = {**SHAPE, "rope_parameters": {**LLAMA3}}
    for fields, says in (*refused, (olmo2, "not a olmo2 model"), (llama3, "qwen3 has no rope_type llama3")):
        with pytest.raises(ModelError, match=says):
            export(build(config_of("vanilla", **{**SHAPE, **fields})), tmp_path / "m.gguf", tokenizer, "gguf")
    model = build(config_of("vanilla", **SHAPE))
    with pytest.raises(ModelError, match="must contain a tokenizer"):
        export(model, tmp_path / "m.gguf", None, "gguf")
    tokenizer.backend_tokenizer.pre_tokenizer = None
    with pytest.raises(ModelError, match="split text differently"):
        export(model, tmp_path / "m.gguf", tokenizer, "gguf")
    (tmp_path / "m.gguf").write_text("a novel")
    with pytest.raises(ModelError, match="not an earlier export"):
        export(model, tmp_path / "m.gguf", tiny_tokenizer(), "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_the_command(tmp_path: Path, capsys) -> None:
    export(build(config_of("loop", **SHAPE)), tmp_path / "a", tiny_tokenizer())
    words = ["export", str(tmp_path / "a"), "--to", str(tmp_path / "b.gguf"), "--as", "gguf"]
    assert main(words) == 0 == main(words)
    made = (tmp_path / "b.gguf").read_bytes()
    assert made[:4] == b"GGUF"
    (tmp_path / "b.gguf").write_bytes(made.replace(b"Exported by Fathom", b"Quantized by Llama"))  # a downloaded one
    assert main(words) == 2 and "not an earlier export" in capsys.readouterr().err
    assert b"by Llama" in (tmp_path / "b.gguf").read_bytes()


def test_reading_names_the_extra_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever package transformers misses; another error keeps its own words."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))  # no keys and no tensors
    needs = r"needs gguf and accelerate: pip install '\.\[gguf\]'"
    for error, says in ((ImportError("Accelerate"), needs), (OSError("damaged"), "a.gguf: damaged$")):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fails)
        with pytest.raises(ModelError, match=says):
            open_gguf(tmp_path / "a.gguf")

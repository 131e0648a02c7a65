"""Write a stock Llama, Qwen2 or Qwen3 and its tokenizer as a GGUF file, for llama.cpp and programs based on it.

For a `llama`, llama.cpp rotates pairs of neighbouring channels, not the two halves of a head: the rows of queries and
keys are reordered accordingly.

`_check` refuses other families, sliding windows and other switches that llama.cpp lacks, `gguf_rope.py` other RoPE;
`_splitting` refuses tokenizers other than a byte-level BPE that splits words as in GPT-2, SmolLM, Llama 3 or Qwen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.checkpoints.gguf_rope import FACTORS, write_rope
from fathom.checkpoints.special_tokens import known, stop_tokens
from fathom.errors import ModelError, to_install

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PretrainedConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""The `model_type`s that are written, under llama.cpp's names."""
MAGIC = b"GGUF"
MARK = "Exported by Fathom"
"""In the card of an exported directory, and in a GGUF file's description."""
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
    """Write a GGUF file: the weights in their own dtype (norms in float32), the configuration and the tokenizer.

    Args:
        path: The file to write.
        model: A stock model of one of `ARCHITECTURES`.
        tokenizer: The model's tokenizer, a byte-level BPE.
        name: The model's name in llama.cpp.
    """
    try:
        from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
    except ModuleNotFoundError:
        raise ModelError(f"`form=gguf` needs the gguf package: {to_install('gguf')}") from None
    if tokenizer is None:
        raise ModelError("a GGUF file must contain a tokenizer, and this model has none")
    _check(model.config)
    rope, factors = write_rope(model.config.rope_parameters, _head_dim(model.config))
    writer = GGUFWriter(path, model.config.model_type)
    _add_shape(writer, model.config, name)
    for part, value in rope.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{model.config.model_type}.{part}", value)
    _add_tokenizer(writer, tokenizer, model)
    names = get_tensor_name_map(MODEL_ARCH[model.config.model_type.upper()], model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for key, tensor in model.state_dict().items():
        if not (tied and key == "lm_head.weight"):  # llama.cpp then uses the embedding
            _add_tensor(writer, names.get_name(key, (".weight", ".bias")), in_pairs(key, tensor, model.config))
    if factors is not None:
        writer.add_tensor(FACTORS, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_pairs(key: str, tensor: Tensor, config: PretrainedConfig) -> Tensor:
    """A tensor of a `llama`, with the rows of queries and keys in llama.cpp's rotary order."""
    if config.model_type != "llama" or not any(f"self_attn.{name}_proj." in key for name in "qk"):
        return tensor
    halves = tensor.view(-1, 2, config.head_dim // 2, *tensor.shape[1:])  # [H, 2, D / 2, ...]
    return halves.transpose(1, 2).reshape(tensor.shape)


def _check(config: PretrainedConfig) -> None:
    if config.model_type not in ARCHITECTURES:
        raise ModelError(f"`form=gguf` writes {', '.join(ARCHITECTURES)}, not a {config.model_type} model")
    width = config.num_attention_heads * _head_dim(config)
    wrong = {
        "head_dim": config.model_type == "qwen2" and width != config.hidden_size and _head_dim(config),
        "attention_bias": config.model_type == "qwen3" and config.attention_bias,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "hidden_act": config.hidden_act != "silu" and config.hidden_act,
        "rope_type llama3": config.model_type != "llama" and config.rope_parameters["rope_type"] == "llama3",
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
    }
    for what, found in wrong.items():
        if found:
            raise ModelError(
                f"llama.cpp's {config.model_type} has no {what}{'' if found is True else ' ' + str(found)}"
            )


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_shape(writer: GGUFWriter, config: PretrainedConfig, name: str) -> None:
    writer.add_name(name)
    writer.add_description(MARK)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head = _head_dim(config)
    writer.add_key_length(head)
    writer.add_value_length(head)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    from gguf import TokenType

    config = model.config
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = _splitting(backend)
    tokens = [f"[PAD{token}]" for token in range(config.vocab_size)]
    types = [TokenType.UNUSED] * config.vocab_size
    added = tokenizer.added_tokens_decoder
    for word, token in tokenizer.get_vocab().items():
        if token >= config.vocab_size:
            raise ModelError(f"the tokenizer has token id {token}, but the model only {config.vocab_size} embeddings")
        special = added[token].special if token in added else None
        tokens[token] = word
        types[token] = {None: TokenType.NORMAL, True: TokenType.CONTROL, False: TokenType.USER_DEFINED}[special]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    stops = stop_tokens(model.generation_config.eos_token_id, tokenizer)
    for ids, add in (
        (stops, writer.add_eos_token_id),
        (stops[1:], writer.add_eot_token_id),
        (known(tokenizer.bos_token_id, tokenizer), writer.add_bos_token_id),
        (known(tokenizer.pad_token_id, tokenizer), writer.add_pad_token_id),
    ):
        if ids:
            add(ids[0])
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    writer.add_add_bos_token(bool(first) and first[0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _splitting(backend: dict[str, Any]) -> str:
    """llama.cpp's name for this tokenizer's pre-tokenizer, which splits text into words before byte-level BPE."""
    if backend["model"]["type"] != "BPE":
        raise ModelError(f"`form=gguf` needs a byte-level BPE tokenizer, not a {backend['model']['type']} tokenizer")
    steps = backend["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    plain = [(step.get("type"), step.get("add_prefix_space"), step.get("use_regex")) for step in steps]
    normal = (backend["normalizer"] or {}).get("type")
    if normal is None and plain == [("ByteLevel", False, True)]:
        return "gpt-2"
    digits = normal is None and steps[0] == {"type": "Digits", "individual_digits": True}
    if digits and plain[1:] == [("ByteLevel", False, True)]:
        return "smollm"
    split = {QWEN: "qwen2", LLAMA: "llama-bpe"}.get(str((steps[0].get("pattern") or {}).get("Regex")))
    whole = steps[0].get("behavior") == "Isolated" and plain[1:] == [("ByteLevel", False, False)]
    if normal in (None, "NFC") and split and whole:
        return split
    raise ModelError(
        "llama.cpp would split text differently: this tokenizer's pre-tokenizer is not that of GPT-2, SmolLM, Llama or "
        "Qwen"
    )


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    from gguf import GGMLQuantizationType

    tensor = tensor.detach().cpu().contiguous()
    if tensor.ndim == 1 or tensor.dtype not in (torch.bfloat16, torch.float16):
        writer.add_tensor(name, tensor.float().numpy())
    elif tensor.dtype == torch.float16:
        writer.add_tensor(name, tensor.numpy())
    else:  # numpy has no bfloat16: raw bytes with their type
        raw = tensor.view(torch.uint8).numpy().astype(np.uint8, copy=False)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)

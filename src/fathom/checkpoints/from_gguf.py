"""A GGUF file opened as a Fathom model: llama.cpp's Llama, Qwen2 or Qwen3, with quantised weights unpacked.

transformers reads a GGUF file open: it leaves out metadata and tensors that it does not know, scaled RoPE among them.
`require_read` refuses such a file by the name of the key or tensor. `gguf_rope.py` translates scaled RoPE if
transformers can compute the same.

`gguf.py` reads the tensors of a GGUF file for `fathom lineage`, and `to_gguf.py` writes one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from fathom.checkpoints.families import FAMILIES, to_ours
from fathom.checkpoints.gguf import read_gguf_header, read_gguf_vector
from fathom.checkpoints.gguf_rope import FACTORS, read_rope
from fathom.checkpoints.origin import LocalOrigin
from fathom.checkpoints.tensors import Array
from fathom.checkpoints.to_gguf import ARCHITECTURES
from fathom.errors import ModelError, to_install
from fathom.models import FathomConfig, FathomForCausalLM

SUFFIX = ".gguf"
READ = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.freq_base"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
)
"""The metadata of a model that transformers follows."""
ROPE = ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length")
"""The metadata of scaled RoPE that `read_rope` follows."""
UNREAD = ("attention.layer_norm_epsilon", "pooling_type", "tensor_data_layout", "rope.scaling.finetuned")
"""Metadata that llama.cpp does not follow either in these models."""
HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""The width of a head, all of which is rotated."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **{"expert_count": (0,), "expert_used_count": (0,), "attention.causal": (True,), "attention.sliding_window": (0,)},
    **{"rope.scaling.type": ("none", "linear", "yarn"), "rope.scaling.attn_factor": (1.0,)},
    **{"rope.scaling.yarn_beta_fast": (32.0,), "rope.scaling.yarn_beta_slow": (1.0,)},
    **{"rope.scaling.yarn_log_multiplier": (0.0,), "logit_scale": (0.0, 1.0), "nextn_predict_layers": (0,)},
}
"""Metadata that transformers leaves out, and the values that say nothing or that `read_rope` follows."""
TENSORS = r"(token_embd|output|output_norm|blk\.\d+\.(attn_(q|k|v|output|norm)|ffn_(gate|up|down|norm)))\.weight"
MORE = {
    **{"llama": re.escape(FACTORS), "qwen2": r"blk\.\d+\.attn_[qkv]\.bias"},
    **{"qwen3": r"blk\.\d+\.attn_[qk]_norm\.weight"},
}
"""The names of tensors that are read: of all architectures, and those of one in addition."""
INSTEAD = "open the checkpoint that it was made from"


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


class Named(LocalOrigin):
    """Files that the user named, whose names may hold any character."""

    def at(self, path: str) -> Path:
        """Where a file lies."""
        return self.directory / path


def open_gguf(path: Path, dtype: str = "auto", **changes: object) -> tuple[FathomForCausalLM, PreTrainedTokenizerBase]:
    """Model and tokenizer of a GGUF file.

    Args:
        path: FILE.gguf.
        dtype: `auto` and `float32` use float32, which represents every quantised weight exactly; or another dtype.
        changes: Keys of the configuration, such as `mixer`.
    """
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    try:
        header = read_gguf_header(origin := Named(Path()), str(path))
        factors = read_gguf_vector(origin, str(path), header, FACTORS)
        own = require_read(header[0], (name for name, *_ in header[1]), factors)
        stock: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=wanted, local_files_only=True, **_unpacked(), **own
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except ImportError:
        raise ModelError(f"{path}: reading GGUF needs gguf and accelerate: {to_install('gguf')}") from None
    except (ValueError, OSError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}") from error
    # What transformers notes for itself is no key of a config.json.
    theirs = {key: value for key, value in stock.config.to_dict().items() if not key.startswith("_")}
    kind = theirs.get("model_type")
    if kind not in FAMILIES or FAMILIES[kind].rules:
        raise ModelError(f"{path} is a {kind} model; of GGUF files, Fathom opens only llama, qwen2 and qwen3")
    theirs.pop("quantization_config", None)
    config = FathomConfig.from_dict(to_ours(FAMILIES[kind], theirs), **changes)
    warnings.warn(f"{path.name}: its weights are unpacked to {str(wanted).removeprefix('torch.')}", stacklevel=2)
    model = FathomForCausalLM.from_pretrained(None, config=config, state_dict=stock.state_dict(), dtype=wanted)
    model.generation_config = stock.generation_config
    return model, tokenizer


def require_read(
    metadata: Mapping[str, Any], tensors: Iterable[str], factors: Array | None = None
) -> dict[str, object]:
    """Refuse metadata and tensors that transformers would leave out; returns the keys of a configuration that it must
    be told.

    Args:
        metadata: All of a file's.
        tensors: The names of its tensors.
        factors: The one that scales RoPE, `rope_freqs.weight`, if there is one.
    """
    kind = str(metadata.get("general.architecture"))
    if kind not in ARCHITECTURES:
        return {}  # refused by its name once transformers has read it
    given = {key.removeprefix(f"{kind}."): value for key, value in metadata.items() if key.startswith(f"{kind}.")}
    heads, width = given.get("attention.head_count"), given.get("embedding_length")
    head = given.get("attention.key_length") or (width // heads if isinstance(heads, int) and heads and width else None)
    for key, value in given.items():
        said = f"{kind}.{key}={value!r:.40}"
        if key in HEAD and value != head:
            raise ValueError(f"{said}: keys, values and rotation of a head of {head} channels must be as wide")
        known = key in (*READ, *ROPE, *UNREAD, *HEAD) or value in NEUTRAL.get(key, ())
        if key == "attention.sliding_window" and value >= given.get("context_length", value + 1):
            known = True  # no text is longer
        if not known:
            raise ValueError(f"{said}: a GGUF file with this key is not read; {INSTEAD}")
    names = re.compile("|".join(filter(None, (TENSORS, MORE.get(kind)))))
    if strange := next((name for name in tensors if not names.fullmatch(name)), None):
        raise ValueError(f"{strange}: not a tensor of a plain {kind}; {INSTEAD}")
    try:
        rope = read_rope(given, head or 0, factors)
    except ValueError as error:
        raise ValueError(f"{error}; {INSTEAD}") from None
    own = {"head_dim": head} if kind == "qwen3" and head else {}
    return {**own, "rope_parameters": rope} if rope else own


def _unpacked() -> dict[str, object]:
    """The argument that makes transformers dequantise weights; empty for versions of transformers that always do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}

"""Read GGUF files of Llama- and Qwen-like models as the Hugging Face tensors from which they were converted.

`from_gguf.py` opens a GGUF file as a model, and `to_gguf.py` writes one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fathom.checkpoints.origin import Origin
from fathom.checkpoints.tensors import Array, Ranges, TensorInfo, decode, read_rows
from fathom.errors import ModelError, to_install

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# number type -> (name, values per block, bytes per block)
_TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 8: ("Q8_0", 32, 34), 2: ("Q4_0", 32, 18)},
    **{3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176)},
    **{14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136)},
}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_COUNT_LIMIT = 1 << 22
_HEADER_LIMIT = 256 << 20


@dataclass
class _Cursor:
    """Reads the header front to back, a megabyte at a time, and never past the end of the file."""

    origin: Origin
    file: str
    size: int
    position: int = 0
    buffer: bytes = b""
    """Bytes read ahead, from `buffer_start` on."""
    buffer_start: int = 0

    def take(self, count: int) -> bytes:
        stop = self.position + count
        if stop > min(self.size, _HEADER_LIMIT):
            raise ModelError(f"{self.file}: truncated or oversized header")
        if stop > self.buffer_start + len(self.buffer):
            self.buffer_start = self.position
            self.buffer = bytes(
                self.origin.read(self.file, self.position, min(self.size, max(stop, self.position + (1 << 20))))
            )
        piece = self.buffer[self.position - self.buffer_start : stop - self.buffer_start]
        self.position = stop
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.file}: a string in the header is not UTF-8") from None

    def count(self, code: str = "Q") -> int:
        value = self.scalar(code)
        if value > _COUNT_LIMIT:
            raise ModelError(f"{self.file}: the file is damaged: it declares {value:,} entries")
        return int(value)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner = self.scalar("I")
            if inner == _ARRAY:
                raise ModelError(f"{self.file}: nested arrays")
            return [self.value(inner) for _ in range(self.count())]
        if kind not in _SCALARS:
            raise ModelError(f"{self.file}: metadata type {kind} is not known")
        return self.scalar(_SCALARS[kind])


Entry: TypeAlias = tuple[str, tuple[int, ...], int, int]
"""A tensor's name, shape, number type and offset."""


Header: TypeAlias = tuple[dict[str, Any], list[Entry], int]
"""A file's metadata, the entries of its tensors, and the position after them."""


def read_gguf_header(origin: Origin, file: str) -> Header:
    """What a GGUF file says before its tensors."""
    cursor = _Cursor(origin, file, origin.size(file))
    if cursor.take(4) != b"GGUF" or cursor.scalar("I") not in (2, 3):
        raise ModelError(f"{file}: not a GGUF file of version 2 or 3")
    tensor_count, pair_count = cursor.count(), cursor.count()
    metadata = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata, [_entry(cursor) for _ in range(tensor_count)], cursor.position


def _entry(cursor: _Cursor) -> Entry:
    name = cursor.string()
    rank = cursor.count("I")
    if rank > 4:
        raise ModelError(f"{cursor.file}: tensor {name!r:.120} has rank {rank}; at most 4 is allowed")
    sides = tuple(cursor.scalar("Q") for _ in range(rank))
    return name, sides[::-1], cursor.scalar("I"), cursor.scalar("Q")  # GGUF lists the fastest axis first


def read_gguf_vector(origin: Origin, file: str, header: Header, name: str) -> Array | None:
    """A vector of a GGUF file, in float32; None if the file has no tensor of this name."""
    found = next((entry for entry in header[1] if entry[0] == name), None)
    if found is None:
        return None
    _, shape, kind, offset = found
    start = _tensors_start(file, header) + offset
    if kind != 0 or len(shape) != 1 or start + 4 * shape[0] > origin.size(file):
        raise ModelError(f"{file}: tensor {name!r:.120} is not a vector in F32")
    return decode(origin.read(file, start, start + 4 * shape[0]), "F32")


def _tensors_start(file: str, header: Header) -> int:
    metadata, _, position = header
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise ModelError(f"{file}: alignment {alignment!r:.20}")
    return -(-position // alignment) * alignment


class GgufStore:
    """One GGUF file; `config` and `tokens` have the keys and form of Hugging Face's `config.json` and vocabulary."""

    def __init__(self, origin: Origin, file: str):
        self.origin, self.file = origin, file
        header = read_gguf_header(origin, file)
        metadata, entries, _ = header
        size = origin.size(file)
        start = _tensors_start(file, header)
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            if name in self.tensors:
                raise ModelError(f"{file}: tensor {name!r:.120} is given twice")
            self.tensors[name] = self._info(name, shape, kind, start + offset, size)
        self.config = _config(metadata, file, self.tensors)
        self.tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
        self.byte_level: bool = metadata.get("tokenizer.ggml.model") == "gpt2"
        self._permuted = metadata["general.architecture"] == "llama"

    def _info(self, name: str, shape: tuple[int, ...], kind: int, start: int, size: int) -> TensorInfo:
        if kind not in _TYPES:
            accepted = ", ".join(label for label, _, _ in _TYPES.values())
            raise ModelError(f"{self.file}: tensor {name!r:.120} has number type {kind}; allowed: {accepted}")
        label, block, block_bytes = _TYPES[kind]
        if shape and shape[-1] % block:
            raise ModelError(
                f"{self.file}: tensor {name!r:.120}: rows of {shape[-1]} numbers cannot be cut into blocks of {block}"
            )
        stop = start + math.prod(shape) // block * block_bytes
        if stop > size:
            raise ModelError(f"{self.file}: tensor {name!r:.120} extends past the end of the file")
        return TensorInfo(label, shape, self.file, start, stop)

    def read(self, name: str, rows: Ranges | None = None) -> Array:
        """Rows of a tensor as floats; llama.cpp's reordering of query and key rows is undone."""
        info = self.tensors[name]
        if self._permuted and name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = self.config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
            assert isinstance(heads, int)
            values = self._plain(info, None)
            # The converter splits each head's rows (2, half) and swaps them to (half, 2); this is the way back.
            pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
            return values if rows is None else np.concatenate([values[a:b] for a, b in rows])
        return self._plain(info, rows)

    def _plain(self, info: TensorInfo, rows: Ranges | None) -> Array:
        if not info.dtype.startswith(("Q", "IQ")):
            return read_rows(self.origin, info, rows)
        rows = [(0, info.shape[0])] if rows is None else rows
        row_bytes = (info.stop - info.start) // info.shape[0]
        parts = [self.origin.read(info.file, info.start + a * row_bytes, info.start + b * row_bytes) for a, b in rows]
        return _dequantised(b"".join(parts), info.dtype).reshape(-1, *info.shape[1:])


def _dequantised(raw: bytes, dtype: str) -> Array:
    """Dequantise blocks of values: Q8_0 and Q4_0 are decoded here, all other types by the gguf package.

    Simple blocks have 32 values: a float16 scale, then int8, or nibbles with the first sixteen values in the low
    halves.
    """
    if dtype not in {"Q8_0", "Q4_0"}:
        return _by_package(raw, dtype)
    width = {"Q8_0": 34, "Q4_0": 18}[dtype]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, width)
    scale = decode(blocks[:, :2].tobytes(), "F16")[:, None]
    if dtype == "Q8_0":
        return scale * blocks[:, 2:].view(np.int8)
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return scale * (nibbles.astype(np.float32) - 8)


def _by_package(raw: bytes, dtype: str) -> Array:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ModuleNotFoundError:
        raise ModelError(f"tensors of type {dtype} need the gguf package: {to_install('gguf')}") from None
    width = next(size for label, _, size in _TYPES.values() if label == dtype)
    values: Array = dequantize(np.frombuffer(raw, np.uint8).reshape(-1, width), GGMLQuantizationType[dtype])
    return values.astype(np.float32, copy=False)


def _config(metadata: Mapping[str, object], file: str, tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ModelError(f"{file}: architecture {kind!r:.40}; allowed: {', '.join(_ARCHITECTURES)}")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{file}: no token_embd.weight")
    wanted = {
        "num_hidden_layers": f"{kind}.block_count",
        "hidden_size": f"{kind}.embedding_length",
        "num_attention_heads": f"{kind}.attention.head_count",
    }
    complaint = "is missing or not a size"
    sizes = {name: _size(metadata.get(key), f"{file}: {key} {complaint}") for name, key in wanted.items()}
    kv_heads = metadata.get(f"{kind}.attention.head_count_kv", sizes["num_attention_heads"])
    sizes["num_key_value_heads"] = _size(kv_heads, f"{file}: num_key_value_heads is not a size")
    width = metadata.get(f"{kind}.attention.key_length", sizes["hidden_size"] // sizes["num_attention_heads"])
    sizes["head_dim"] = _size(width, f"{file}: head_dim is not a size")
    return {"model_type": kind, **sizes}


def _size(value: object, complaint: str) -> int:
    if type(value) is not int or not 0 < value < 1 << 20:
        raise ModelError(complaint)
    return value

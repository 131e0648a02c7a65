"""Tensors on disk: safetensors headers, number formats, shards and adapters, read row by row.

The safetensors format is eight bytes of little-endian header length, a JSON header `{name: dtype, shape,
data_offsets}`, then the raw numbers. Everything in a header is checked before any data is read.

`is_pickle` says which formats may hold a pickle. `untrusted.py` decides which files of a directory are refused.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypeGuard

import numpy as np

from fathom.checkpoints.file_names import INDEX, INDEX_SUFFIX, WEIGHTS
from fathom.checkpoints.origin import Origin, parse_json, read_json, safe_name
from fathom.errors import ModelError

Array: TypeAlias = np.ndarray
"""An array of any shape and any type of number."""
Ranges = Sequence[tuple[int, int]]

HEADER_LIMIT = 100_000_000  # the format's own limit
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
PICKLES = (
    *(".bin", ".bin.index.json", ".pt", ".pt2", ".pth", ".ckpt", ".mar", ".nemo", ".t7"),
    *(".pkl", ".pickle", ".pck", ".p", ".dill", ".joblib", ".cloudpickle"),
    *(".npy", ".npz", ".msgpack", ".h5", ".hdf5", ".keras"),
)
"""Endings, in lower case, of files that may run code when they are opened."""
FLOATS = {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}
_PACKED = re.compile(
    r"\.(qweight|qzeros|weight_packed|absmax|quant_map|weight\.(absmax|quant_\w+|nested_\w+)|SCB)(\.|$)|_proj_(blocks|scales)$"
)
_SCALE = re.compile(r"\.weight_scale(_inv)?$|\.(input|activation)_scale$")


@dataclass(frozen=True)
class TensorInfo:
    """The entry of one tensor in a file; offsets are absolute within the file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int


class TensorStore(Protocol):
    """Protocol of a checkpoint's tensors, read by name and row ranges as float32 (or float64 if they are stored in
    float64)."""

    @property
    def origin(self) -> Origin:
        """Where the files are."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The entry of every tensor, by name."""

    def read(self, name: str, rows: Ranges | None = None) -> Array:
        """A tensor's rows in the given half-open ranges; all rows by default."""


def parse_header(raw: bytes, data_start: int, size: int, file: str) -> dict[str, TensorInfo]:
    """A validated safetensors header: known types, consistent sizes, offsets inside the file, no overlap, no hole."""
    table = parse_json(raw, f"{file}: header", unique=True)
    found: dict[str, TensorInfo] = {}
    for name, entry in table.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(word, str) for word in entry.values()):
                raise ModelError(f"{file}: header: __metadata__ must be an object whose values are strings")
            continue
        found[name] = _tensor_info(name, entry, data_start, size, file)
    cursor = data_start
    for name, info in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != cursor:
            fault = "overlaps the tensor before it" if info.start < cursor else "leaves a hole before it"
            raise ModelError(f"{file}: tensor {name!r:.120} {fault}")
        cursor = info.stop
    if cursor != size:
        raise ModelError(f"{file}: header describes {cursor:,} bytes, the file has {size:,}")
    return found


def _tensor_info(name: str, entry: object, data_start: int, size: int, file: str) -> TensorInfo:
    what = f"{file}: tensor {name!r:.120}"
    if not isinstance(entry, dict):
        raise ModelError(f"{what}: its entry in the header is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{what}: number type {dtype!r:.40} is not known")
    if not _naturals(shape) or len(shape) > 8 or not _naturals(offsets) or len(offsets) != 2:
        raise ModelError(f"{what}: shape or data_offsets are not lists of natural numbers")
    start, stop = offsets
    if stop < start or data_start + stop > size:
        raise ModelError(f"{what}: bytes {start}–{stop} are outside the file")
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ModelError(f"{what}: {stop - start:,} bytes cannot hold shape {shape} of {dtype}")
    return TensorInfo(dtype, tuple(shape), file, data_start + start, data_start + stop)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def read_header(origin: Origin, file: str) -> dict[str, TensorInfo]:
    """The header of one safetensors file."""
    size = origin.size(file)
    if size < 10:
        raise ModelError(f"{file}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(origin.read(file, 0, 8), "little")
    if length > HEADER_LIMIT or 8 + length > size:
        raise ModelError(f"{file}: a header of {length:,} bytes does not fit a file of {size:,}")
    return parse_header(bytes(origin.read(file, 8, 8 + length)), 8 + length, size, file)


def read_index(origin: Origin, file: str) -> dict[str, str]:
    """The weight map of a sharded checkpoint; every shard name is checked to stay in the directory."""
    weight_map = read_json(origin, file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{file}: no weight_map")
    for shard in set(map(str, weight_map.values())):
        if not safe_name(shard).endswith(".safetensors"):
            raise ModelError(f"{file}: shard {shard!r:.80} is not a safetensors file")
    return weight_map


class SafetensorsStore:
    """The tensors of one safetensors file, or of all shards of one checkpoint."""

    def __init__(self, origin: Origin, files: Iterable[str], weight_map: Mapping[str, str] | None = None):
        self.origin = origin
        self.tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in read_header(origin, file).items():
                if weight_map is not None and weight_map.get(name) != file:
                    raise ModelError(f"{file}: tensor {name!r:.120} is not where the index says")
                if name in self.tensors:
                    raise ModelError(f"tensor {name!r:.120} is in {self.tensors[name].file} and in {file}")
                self.tensors[name] = info
        if weight_map is not None and (missing := set(weight_map) - set(self.tensors)):
            raise ModelError(f"the index names tensor {min(missing)!r:.120}, which its shard does not have")

    def raw(self, name: str) -> bytearray:
        """The stored bytes of a tensor."""
        info = self.tensors[name]
        return self.origin.read(info.file, info.start, info.stop)

    def read(self, name: str, rows: Ranges | None = None) -> Array:
        """A tensor's rows in the given half-open ranges (all by default); 8-bit weights are multiplied by their
        scales."""
        info = self.tensors[name]
        if info.dtype not in FLOATS:
            raise ModelError(f"{name}: stored as {info.dtype}; wanted one of {', '.join(sorted(FLOATS))}")
        values = read_rows(self.origin, info, rows)
        if info.dtype.startswith("F8"):
            values *= self._scale(name, info, rows)
        return values

    def _scale(self, name: str, info: TensorInfo, rows: Ranges | None) -> Array:
        for suffix in ("_scale_inv", "_scale"):
            if name + suffix in self.tensors:
                scale = self.read(name + suffix)
                break
        else:
            return np.ones((), np.float32)
        if scale.size == 1 or len(info.shape) != 2:
            return scale.reshape(())
        scale = scale.reshape(len(scale), -1)  # [row blocks, column blocks]
        block = [-(-side // count) for side, count in zip(info.shape, scale.shape, strict=True)]
        spread = np.repeat(np.repeat(scale, block[0], 0)[: info.shape[0]], block[1], 1)[:, : info.shape[1]]
        return spread if rows is None else np.concatenate([spread[a:b] for a, b in rows])


def read_rows(origin: Origin, info: TensorInfo, rows: Ranges | None) -> Array:
    """Read ranges of rows of a stored tensor; neighbouring ranges are read by one request."""
    if rows is None or not info.shape:
        return decode(origin.read(info.file, info.start, info.stop), info.dtype).reshape(info.shape)
    row_bytes = math.prod(info.shape[1:]) * ITEM_BYTES[info.dtype]
    for start, stop in rows:
        if not 0 <= start <= stop <= info.shape[0]:
            raise ModelError(f"rows {start}–{stop} are outside a tensor of {info.shape[0]} rows")
    total = sum(stop - start for start, stop in rows)
    values = np.empty((total, *info.shape[1:]), np.float64 if info.dtype == "F64" else np.float32)
    done = 0
    for span in _spans(rows, origin.gap_bytes // row_bytes):
        first, last = span[0][0], span[-1][1]
        chunk = origin.read(info.file, info.start + first * row_bytes, info.start + last * row_bytes)
        block = decode(chunk, info.dtype).reshape(-1, *info.shape[1:])
        for start, stop in span:
            values[done : done + stop - start] = block[start - first : stop - first]
            done += stop - start
    return values


def _spans(rows: Ranges, gap: int) -> Iterator[list[tuple[int, int]]]:
    """Group ascending ranges that lie within `gap` rows of each other."""
    span: list[tuple[int, int]] = []
    for start, stop in rows:
        if span and not 0 <= start - span[-1][1] <= gap:
            yield span
            span = []
        span.append((start, stop))
    if span:
        yield span


def decode(raw: bytes | bytearray, dtype: str) -> Array:
    """Raw little-endian numbers as float32 (float64 stays float64)."""
    if dtype == "F64":
        return np.frombuffer(raw, "<f8")
    if dtype == "F32":
        return np.frombuffer(raw, "<f4")
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    if dtype == "BF16":
        wide = np.frombuffer(raw, "<u2").astype(np.uint32)  # bf16 is the upper half of a float32
        wide <<= 16
        return wide.view(np.float32)
    import torch  # numpy has no 8-bit floats

    kind = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[dtype]
    return torch.tensor(np.frombuffer(raw, np.uint8)).view(kind).float().numpy()


class AdapterStore:
    """A base checkpoint with a LoRA adapter: W + scale · B A is computed for the rows that are read."""

    def __init__(self, base: TensorStore, adapter: SafetensorsStore, config: Mapping[str, object]):
        kind = config.get("peft_type")
        if kind != "LORA" or config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
            raise ModelError(
                f"adapter of type {kind}: allowed: LORA without use_dora, rank_pattern and alpha_pattern; merge any "
                "other adapter into its base model first"
            )
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise ModelError("adapter_config.json: r and lora_alpha must be numbers")
        self.scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        self.transposed = bool(config.get("fan_in_fan_out"))
        self.base, self.adapter = base, adapter
        self.origin: Origin = base.origin
        self.tensors: dict[str, TensorInfo] = dict(base.tensors)
        self.pairs: dict[str, tuple[str, str]] = {}
        self.replaced: dict[str, str] = {}
        self._match()

    def _match(self) -> None:
        for name in self.adapter.tensors:
            plain = name.removeprefix("base_model.model.")
            if ".lora_A." in plain or plain.endswith(".lora_A"):
                target = plain.split(".lora_A")[0] + ".weight"
                partner = name.replace(".lora_A", ".lora_B")
                if target not in self.tensors or partner not in self.adapter.tensors:
                    raise ModelError(
                        f"adapter tensor {name!r:.120} has no lora_B, or the base model has no {target!r:.120}"
                    )
                self._check(target, name, partner)
                self.pairs[target] = (name, partner)
            elif ".lora_B" not in plain:
                target = plain.replace(".modules_to_save", "").replace(".base_layer", "")
                if target not in self.tensors:
                    raise ModelError(f"adapter tensor {name!r:.120}: no LoRA matrix, and no tensor of the base model")
                wanted, found = self.base.tensors[target].shape, self.adapter.tensors[name].shape
                if wanted[1:] != found[1:]:  # rows may have been added, as for a larger vocabulary
                    raise ModelError(
                        f"adapter tensor {name!r:.120} is {_by(found)}, but {target!r:.120} of the base model is "
                        f"{_by(wanted)}"
                    )
                self.replaced[target] = name
                self.tensors[target] = self.adapter.tensors[name]

    def _check(self, target: str, a: str, b: str) -> None:
        """Refuse LoRA factors whose product does not have the weight's shape."""
        wanted = self.base.tensors[target].shape
        first, second = self.adapter.tensors[a].shape, self.adapter.tensors[b].shape  # [r, in], [out, r]
        made = (second[0], first[1]) if len(first) == len(second) == 2 and first[0] == second[1] else ()
        if wanted != (made[::-1] if self.transposed else made):
            raise ModelError(
                f"adapter tensors {a!r:.120} ({_by(first)}) and its B ({_by(second)}) do not fit {target!r:.120} "
                f"({_by(wanted)}) of the base model"
            )

    def read(self, name: str, rows: Ranges | None = None) -> Array:
        """Rows of the merged weight."""
        if name in self.replaced:
            return self.adapter.read(self.replaced[name], rows)
        values = self.base.read(name, rows)
        if name in self.pairs:
            lora_a, lora_b = (self.adapter.read(part) for part in self.pairs[name])  # [r, in], [out, r]
            left, right = (lora_a.T, lora_b.T) if self.transposed else (lora_b, lora_a)
            if rows is not None:
                left = np.concatenate([left[a:b] for a, b in rows])
            values = values + self.scale * (left @ right)
        return values


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


_SKIPPED = re.compile(r"^(consolidated|adapter_|optimizer|training_|rng_state|scheduler)")


def open_safetensors(origin: Origin, file: str | None = None) -> SafetensorsStore:
    """Open the checkpoint at an origin: the named file, else `model.safetensors`, the index's shards, or all
    safetensors files."""
    if file is not None:
        if file.endswith(".safetensors"):
            return _usable(SafetensorsStore(origin, [file]))
        if not file.endswith(INDEX_SUFFIX):
            raise ModelError(f"{file}: expected .safetensors, its index or .gguf{_pickle_hint([file])}")
    names = origin.names()
    if file is None and origin.exists(WEIGHTS):  # an index in the same directory is left over
        warn_of_unread(origin.name, names, {WEIGHTS})
        return _usable(SafetensorsStore(origin, [WEIGHTS]))
    index = file or INDEX
    if origin.exists(index):
        weight_map = read_index(origin, index)
        if file is None:
            warn_of_unread(origin.name, names, set(weight_map.values()))
        return _usable(SafetensorsStore(origin, sorted(set(weight_map.values())), weight_map))
    files = [name for name in names if name.endswith(".safetensors") and not _SKIPPED.match(name)]
    if not files:
        raise ModelError(f"{origin.name}: no safetensors weights{_pickle_hint(names)}")
    warn_of_unread(origin.name, names, set(files))
    return _usable(SafetensorsStore(origin, files))


def warn_of_unread(directory: str | Path, names: Iterable[str], read: set[str]) -> None:
    """Warn which weight files are read if the directory has further ones, such as another format of the same model."""
    kinds = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
    unread = sorted(name for name in names if name.lower().endswith(kinds) and not _SKIPPED.match(name))
    if read and (unread := [name for name in unread if name not in read]):
        chosen = min(read) if len(read) == 1 else f"{min(read)} and the {len(read) - 1} other shards"
        others = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        warnings.warn(f"{directory}: the weights are read from {chosen}, not from {others}", stacklevel=3)


def is_pickle(name: str) -> bool:
    """Whether opening a file with this name may run code."""
    return name.lower().endswith(PICKLES)


def _pickle_hint(names: Iterable[str]) -> str:
    if any(map(is_pickle, names)):
        return "; pickled weights are never opened: load them once where you trust them and save_pretrained() again"
    return ""


def _usable(store: SafetensorsStore) -> SafetensorsStore:
    for name in store.tensors:
        if _PACKED.search(name):
            raise ModelError(f"{name}: packed low-bit weights are not read; dequantise the checkpoint first")
    return store


def is_scale(name: str) -> bool:
    """Whether a tensor's name is that of the scales of another, quantised tensor."""
    return bool(_SCALE.search(name))

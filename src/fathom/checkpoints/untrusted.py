"""Check a checkpoint directory without trusting it, and without importing torch or transformers.

Names, links, the configuration and every safetensors header are checked before a weight is loaded. Pickles are never
opened, nothing is downloaded, and no code of the directory runs.

`fathom check`, which compares the logits with those of the family's own class, is `same_logits.py`. `families/keys.py`
refuses keys of `config.json`, and `models/loading.py` missing, unknown and misshapen tensors. `tensors.py` says which
formats may hold a pickle (`is_pickle`), and checks indexes and headers. After these checks, `open.py` lets transformers
run Python files of the directory only with `trust_remote_code`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from fathom.checkpoints.file_names import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    INDEX_SUFFIX,
    TOKENIZER_CONFIG,
    WEIGHTS,
)
from fathom.checkpoints.origin import LocalOrigin, read_json
from fathom.checkpoints.tensors import (
    FLOATS,
    SafetensorsStore,
    TensorInfo,
    is_pickle,
    read_header,
    read_index,
    warn_of_unread,
)
from fathom.errors import ModelError

NEVER_OPENED = {"training_args.bin"}
"""Pickles that other trainers save next to the weights, and that neither Fathom nor transformers opens."""
OWN = "fathom"
"""The `model_type` of exports, in which every tensor is a weight."""
WEIGHT = re.compile(r"(\.weight|\.bias|_proj)$")
"""Names of weights in other families' files, where GPT-2's masks `[1, 1, T, T]` are called biases, too."""
QUANTISED = ("quantization_config", "compression_config")
"""Keys that say in which packed format weights are stored."""


def check_checkpoint(directory: str | Path, weights: bool = True) -> dict[str, object]:
    """Refuse a model directory that is unsafe to open; otherwise return its configuration.

    It raises a `ModelError` for pickles, links and shard names that leave the directory, weights that are missing,
    truncated, oversized or overlapping, adapters, settings that are not JSON objects, and configurations that name code
    to download.

    Args:
        directory: The model directory.
        weights: Whether there must be weights; those that are there are always checked.
    """
    directory = Path(directory)
    files = _files(directory)
    for name in sorted(files):
        if is_pickle(name) and name not in NEVER_OPENED:
            raise ModelError(
                f"{directory}: {name} is a pickle or a format that may contain one, which may run code when opened; "
                "convert it where you trust it (save_pretrained writes safetensors) and delete it here"
            )
    if ADAPTER_CONFIG in files:
        raise ModelError(f"{directory}: {ADAPTER_CONFIG}: an adapter is not a model; merge it into its base first")
    if CONFIG not in files:
        raise ModelError(f"{directory}: no {CONFIG}")
    origin = LocalOrigin(directory)
    try:
        config = read_json(origin, CONFIG)
        for name in files & {GENERATION_CONFIG, TOKENIZER_CONFIG}:
            read_json(origin, name)
        for key in ("attn_implementation", "_attn_implementation"):
            if "/" in str(config.get(key, "")):
                raise ModelError(f"config.json: {key} names code on the Hub ({config[key]!r:.80}); delete this key")
        tensors = _check_weights(origin, files, weights)
        _require_floats(tensors, config)
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from None
    read = {info.file for info in tensors.values()}
    warn_of_unread(directory, [name for name in files if "/" not in name], read)
    return config


def _require_floats(tensors: Mapping[str, TensorInfo], config: Mapping[str, object]) -> None:
    """Refuse weights that are stored as integers, which transformers would convert, unless they are quantised."""
    if _is_quantised(config):
        return
    for name, info in tensors.items():
        is_weight = config.get("model_type") == OWN or (WEIGHT.search(name) and len(info.shape) < 4)
        if is_weight and info.dtype not in FLOATS:
            said = (
                f"is stored as {info.dtype}, not as floats, and {CONFIG} names no packed format that transformers opens"
            )
            raise ModelError(f"{info.file}: tensor {name!r:.120} {said}")


def _is_quantised(config: object) -> bool:
    """Whether a configuration, or a part of it at any depth, names a packed format."""
    return isinstance(config, dict) and (
        any(key in config for key in QUANTISED) or any(_is_quantised(part) for part in config.values())
    )


def _files(directory: Path) -> set[str]:
    """The names of all files below a directory, relative to it and separated by `/`. Links may stay inside or point to
    the Hub cache's blobs."""
    home = directory.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":  # the Hub cache: a snapshot has links to its repository's blobs
        allowed.append(home.parent.parent / "blobs")
    found = set()
    for place, folders, names in os.walk(home):
        for path in (Path(place) / name for name in (*folders, *names)):
            name = path.relative_to(home).as_posix()
            if path.is_symlink() and not any(path.resolve().is_relative_to(root) for root in allowed):
                raise ModelError(f"{directory}: {name!r:.120} is a symbolic link that points outside the directory")
            if path.is_file():
                found.add(name)
            elif not path.is_dir():
                raise ModelError(f"{directory}: {name!r:.120} is neither a file nor a directory")
    return found


def _check_weights(origin: LocalOrigin, files: set[str], needed: bool) -> dict[str, TensorInfo]:
    """Check all weight files; returns the tensors of those files that opening the model will read."""
    read: dict[str, TensorInfo] = {}
    single = {name for name in files if name.endswith(".safetensors")}
    if needed and not single and not any(name.endswith(INDEX_SUFFIX) for name in files):
        raise ModelError("no safetensors weights")
    for index in sorted(name for name in files if name.endswith(INDEX_SUFFIX)):
        weight_map = read_index(origin, index)
        if index == INDEX and WEIGHTS in files:  # the single file is opened, and the index is left over
            continue
        shards = set(weight_map.values())
        if absent := sorted(shards - files):
            raise ModelError(f"{index}: shard {absent[0]!r:.80} is missing")
        store = SafetensorsStore(origin, sorted(shards), weight_map)
        single -= shards
        read = store.tensors if index == INDEX else read
    headers = {name: read_header(origin, name) for name in sorted(single)}
    if WEIGHTS in files:
        return headers[WEIGHTS]
    return read or {name: info for file, found in headers.items() if "/" not in file for name, info in found.items()}

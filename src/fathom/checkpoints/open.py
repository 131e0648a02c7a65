"""Open a checkpoint directory without trusting it.

Names, links, the configuration and every safetensors header are checked before a weight is loaded. A pickle is never
opened, nothing is fetched, and no code of the directory runs unless the caller says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fathom.checkpoints.origin import LocalOrigin, Refused, read_json
from fathom.checkpoints.tensors import SafetensorsStore, read_header, read_index

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
INDEX = ".safetensors.index.json"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_checkpoint(directory: str | Path) -> dict[str, Any]:
    """Refuse a model directory that could harm whoever opens it; otherwise its configuration.

    Refused are pickles, links and shard names that leave the directory, weights that are missing, truncated,
    oversized or overlapping, adapters, and a configuration that names code to fetch.
    """
    directory = Path(directory)
    files = _files(directory)
    for name in sorted(files):
        if name.endswith(PICKLES) or name.endswith(".bin.index.json"):
            raise Refused(
                f"{directory}: {name} is a pickle, which may run code when it is opened; "
                "convert it where you trust it (save_pretrained writes safetensors) and remove it here"
            )
    if "adapter_config.json" in files:
        raise Refused(f"{directory}: adapter_config.json: an adapter is not a model; merge it into its base first")
    if "config.json" not in files:
        raise Refused(f"{directory}: no config.json")
    origin = LocalOrigin(directory)
    try:
        config = read_json(origin, "config.json")
        for key in ("attn_implementation", "_attn_implementation"):
            if "/" in str(config.get(key, "")):
                raise Refused(f"config.json: {key} names code to download ({config[key]!r:.80})")
        _check_weights(origin, files)
    except Refused as error:
        raise Refused(f"{directory}: {error}") from None
    return config


def _files(directory: Path) -> set[str]:
    """Every file below, as `/`-separated relative names; links may stay inside or lead to the hub cache's blobs."""
    home = directory.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":  # the layout of the hub cache: a snapshot is links to its repository's blobs
        allowed.append(home.parent.parent / "blobs")
    found = set()
    for place, folders, names in os.walk(home):
        for path in (Path(place) / name for name in (*folders, *names)):
            name = path.relative_to(home).as_posix()
            if path.is_symlink() and not any(path.resolve().is_relative_to(root) for root in allowed):
                raise Refused(f"{directory}: {name!r:.120} is a link that leaves the directory")
            if path.is_file():
                found.add(name)
            elif not path.is_dir():
                raise Refused(f"{directory}: {name!r:.120} is neither a file nor a directory")
    return found


def _check_weights(origin: LocalOrigin, files: set[str]) -> None:
    single = {name for name in files if name.endswith(".safetensors")}
    if not single and not any(name.endswith(INDEX) for name in files):
        raise Refused("no safetensors weights")
    for index in sorted(name for name in files if name.endswith(INDEX)):
        weight_map = read_index(origin, index)
        shards = set(weight_map.values())
        if absent := sorted(shards - files):
            raise Refused(f"{index}: shard {absent[0]!r:.80} is missing")
        SafetensorsStore(origin, sorted(shards), weight_map)
        single -= shards
    for name in sorted(single):
        read_header(origin, name)


def open_checkpoint(
    path: str | Path,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    into_fathom: bool = False,
) -> tuple[Any, Any]:
    """Model, ready for inference, and tokenizer of a model directory, a run or a comparison.

    Args:
        path: An exported directory, any Hugging Face directory, a run, or a comparison (its best arm).
        device: `cpu`, `cuda`, ...; by default cuda where there is one.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        trust_remote_code: Let transformers run Python files of the directory, for architectures that neither it nor
            Fathom knows. Those that they know never need it.
        into_fathom: Open a stock Qwen3 as `FathomForCausalLM` too, the same to the last bit; the lens needs it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import fathom
    from fathom.inference.generate import find_model
    from fathom.models import FathomConfig, FathomForCausalLM
    from fathom.models.published import is_published

    if dtype not in DTYPES:
        raise Refused(f"dtype {dtype!r}: allowed: {', '.join(DTYPES)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    directory = find_model(path)
    config = check_checkpoint(directory)
    logging.disable_progress_bar()  # a second's work on a local disk, and not all standard errors are terminals
    fathom.register()
    kind = config.get("model_type")
    ours = kind == FathomConfig.model_type or is_published(config) or (into_fathom and kind == "qwen3")
    trust = {} if ours else {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
        model = (FathomForCausalLM if ours else AutoModelForCausalLM).from_pretrained(
            directory, dtype=dtype, local_files_only=True, use_safetensors=True, **trust
        )
        return model.eval().to(device), tokenizer
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        hint = "; --trust-remote-code allows it" if "trust_remote_code" in str(error) else ""
        raise Refused(f"{directory}: {' '.join(str(error).split())}{hint}") from error

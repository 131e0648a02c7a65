"""Resolve the name of a checkpoint in a recipe, open the checkpoint, and compute the fingerprint that identifies a
teacher.

`loop.py` refuses to resume with another teacher. `checkpoints/runs.py` finds a run's newest checkpoint, and puts the
recipe's keys, such as another mixer, over the checkpoint's (`config_of`); `models/loading.py` refuses those that change
a shape (`require_shapes`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from fathom.checkpoints.file_names import CONFIG, MANIFEST
from fathom.checkpoints.hashes import changed
from fathom.checkpoints.runs import Saved, config_of, find_checkpoint, is_settled, model_directory, read_weights
from fathom.checkpoints.untrusted import check_checkpoint
from fathom.errors import SettingsError
from fathom.models.configuration import FathomConfig
from fathom.models.modeling import FathomForCausalLM

SAMPLE, SAMPLES = 1 << 12, 1 << 8
"""Bytes of a sample of a file, and the number of samples."""


def source_of(source: str, key: str) -> Path | Saved:
    """The model directory or the run's checkpoint that a key of a recipe names, after checking it."""
    if (directory := model_directory(source)) is not None:
        check_checkpoint(directory)
        if problem := changed(directory):
            raise SettingsError(f"{key}={source}: {problem}")
        return directory
    saved = find_checkpoint(source)
    if not is_settled(source, saved):  # the next reader may find a newer one
        one = f"{source}@step-{saved.step}"
        raise SettingsError(f"{key}={source}: this run is not finished; name one of its checkpoints, as in {one}")
    return saved


def fingerprint(source: str) -> str:
    """A digest of a checkpoint: of the hashes in a run's checkpoint, or of a model's configuration and samples of its
    weights."""
    found, digest = model_directory(source), hashlib.blake2b(digest_size=16)
    if found is None:
        digest.update((find_checkpoint(source).directory / MANIFEST).read_bytes())
        return digest.hexdigest()
    digest.update((found / CONFIG).read_bytes())
    for path in sorted(found.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(size // SAMPLES, SAMPLE)):
                file.seek(at)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def model_of(source: str, key: str, config: FathomConfig | None = None) -> tuple[FathomForCausalLM, dict[str, Any]]:
    """The fp32 model that a key of a recipe names, and transformers' loading info.

    Args:
        source: A model directory, or a run's checkpoint.
        key: The key, for messages.
        config: The model's configuration, if it is to differ from the checkpoint's.
    """
    found, settings = source_of(source, key), dict[str, Any](config=config) if config is not None else {}
    if isinstance(found, Saved):
        own = config_of({"from_pretrained": source})
        settings = {"config": own, **settings, "state_dict": read_weights(found), "state_config": own.to_dict()}
    directory = None if isinstance(found, Saved) else found
    logging.disable_progress_bar()
    try:
        return FathomForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **settings)
    except ValueError as error:
        raise SettingsError(f"{key}={source}: {error}") from error

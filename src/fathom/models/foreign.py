"""Where the reader of other projects' checkpoints is registered; an exported model has no such reader.

`fathom.checkpoints.families` sets it on import, which `fathom.register()` triggers, and so does the first checkpoint
of another project that a model opens. An exported checkpoint is Fathom's own, so its copy of this folder needs no
reader.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

if TYPE_CHECKING:
    from .axes.fields import DecoderConfig

HUB_KEYS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
"""Arguments of `from_pretrained` that say where on the Hub a checkpoint is."""
PLACE = (*HUB_KEYS, "subfolder")
"""These and the folder within it, or within a directory."""


class Reader:
    """Base class of readers of other projects' checkpoints; it opens none itself."""

    def configuration(self, theirs: dict[str, Any], where: str) -> dict[str, Any]:
        """The values of Fathom's configuration for another family's `config.json`; raises a one-line `ValueError`
        if it cannot be opened.

        Args:
            theirs: `config.json`, parsed.
            where: The directory's name for errors.
        """
        raise ValueError(
            f"{where} is a {theirs.get('model_type')} model: open it with fathom.load or "
            "fathom.FathomForCausalLM.from_pretrained"
        )

    def tensors(self, directory: Path, theirs: dict[str, Any], config: DecoderConfig) -> Mapping[str, Tensor] | None:
        """A directory's tensors under Fathom's names, read lazily; None if the files use these names already.

        Args:
            directory: A directory with safetensors files.
            theirs: Its `config.json`, parsed.
            config: The result of `configuration`, with later changes of the caller.
        """
        return None


def without(theirs: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A copy of `config.json` without some keys; a name such as `rope_scaling.factor` removes a nested key."""
    for key in keys:
        outer, _, inner = key.partition(".")
        if inner and isinstance(theirs.get(outer), dict):
            theirs = {**theirs, outer: without(theirs[outer], [inner])}
    return {key: value for key, value in theirs.items() if key not in keys}


_readers: list[Reader] = []


def reader() -> Reader:
    """The registered reader of other projects' checkpoints; the first call lets the installed package register it."""
    if not _readers:
        register = getattr(sys.modules.get(__name__.partition(".")[0]), "register", None)
        if register is not None:
            register()
    return _readers[-1] if _readers else Reader()


def read_with(found: Reader) -> None:
    """Set the reader."""
    _readers[:] = [found]


def opened(
    path: str | PathLike[str] | None, config_class: type[DecoderConfig], kwargs: dict[str, Any]
) -> tuple[str | PathLike[str] | None, dict[str, Any]]:
    """Prepare path and arguments for transformers' `from_pretrained`: if a checkpoint's tensors have other names than
    Fathom's, they are passed as a `state_dict`, without a path."""
    if path is None or kwargs.get("state_dict") is not None:
        return path, kwargs
    place = {key: kwargs[key] for key in PLACE if key in kwargs}
    theirs = PretrainedConfig.get_config_dict(path, **place)[0]
    if theirs.get("model_type") in (config_class.model_type, None):
        return path, kwargs
    types = {key: kwargs[key] for key in ("dtype", "torch_dtype") if key in kwargs}  # may be "auto"
    config, left = kwargs.get("config"), {key: v for key, v in kwargs.items() if key not in ("config", *types)}
    if config is None:
        config, left = config_class.from_pretrained(path, return_unused_kwargs=True, **left)
    local = Path(path)
    if not local.is_dir():
        hub = {key: value for key, value in place.items() if key in HUB_KEYS}
        local = Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json"], **hub))
    local /= place.get("subfolder") or ""
    tensors = reader().tensors(local, without(theirs, config.ignore_keys or ()), config)
    if tensors is None:
        return path, kwargs
    if config.dtype is None:
        config.dtype = next(iter(tensors.values()))[...].dtype
    left = {key: value for key, value in left.items() if key not in (*PLACE, "use_safetensors")} | types
    if "generation_config" not in left and (local / GENERATION_CONFIG_NAME).is_file():
        left["generation_config"] = GenerationConfig.from_pretrained(local)
    return None, {**left, "config": config, "state_dict": tensors}

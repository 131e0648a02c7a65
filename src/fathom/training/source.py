"""Resolve the name of a checkpoint in a recipe."""

from __future__ import annotations

from pathlib import Path

from fathom.checkpoints.check import check_checkpoint
from fathom.checkpoints.hashes import changed
from fathom.checkpoints.runs import Saved, find_checkpoint, is_settled, model_directory
from fathom.errors import SettingsError


def source_of(source: str, key: str) -> Path | Saved:
    """The directory or the checkpoint of a run that a key of a recipe names, checked."""
    if (directory := model_directory(source)) is not None:
        check_checkpoint(directory)
        if problem := changed(directory):
            raise SettingsError(f"{key}={source}: {problem}")
        return directory
    saved = find_checkpoint(source)
    if not is_settled(source, saved):  # the next reader may find a newer one
        one = f"{source}@step-{saved.step}"
        raise SettingsError(f"{key}={source}: not finished; name one of its checkpoints, as in {one}")
    return saved

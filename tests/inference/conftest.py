"""A model with a tokenizer, exported and opened."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fathom.checkpoints.open import open_checkpoint


@pytest.fixture(scope="module")
def exported(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(talker, tmp_path_factory.mktemp("run") / "model")


@pytest.fixture(scope="module")
def opened(exported: Path):
    return open_checkpoint(exported, "cpu")

"""A model with a tokenizer, exported and opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.checkpoints.open import open_checkpoint
from tests.inference.talker import export_talker


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_talker(tmp_path_factory.mktemp("run") / "model")


@pytest.fixture(scope="module")
def opened(exported: Path):
    return open_checkpoint(exported, "cpu")

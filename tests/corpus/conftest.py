"""One tokenizer for all tests of corpora: training one anew costs a second each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.data.tokenizer import save_tokenizer, train_bpe
from tests.corpus.prose import Prose


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained tokenizer's directory."""
    folder: Path = tmp_path_factory.mktemp("corpus-tokenizer")
    prose = Prose(99)
    save_tokenizer(train_bpe((prose.document() for _ in range(30)), 400), folder)
    return str(folder / "tokenizer")

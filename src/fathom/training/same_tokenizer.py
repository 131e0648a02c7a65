"""Checks that a corpus was made with the tokenizer of the checkpoint that a run continues, or of its teacher.

For a run that resumes or branches only the teacher's tokenizer is checked here: `loop.py` refuses another corpus, and
with it another tokenizer. `data/tokenizer.py` trains and opens tokenizers.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fathom.checkpoints.file_names import (
    RECIPE,
    SENTENCEPIECE_MODEL,
    TOKENIZER,
    TOKENIZER_IDENTITY,
    TOKENIZER_JSON,
    VOCABULARY,
)
from fathom.checkpoints.runs import find_checkpoint, model_directory
from fathom.checkpoints.tokenizers import identity
from fathom.data.shards import TokenDataset
from fathom.data.tokenizer import load_tokenizer
from fathom.errors import DataError, SettingsError
from fathom.recipe import Recipe, load_recipe
from fathom.training.checkpoint import trainer_state


def require_tokenizer(recipe: Recipe, data: TokenDataset) -> None:
    """Reject a corpus whose tokenizer differs from that of the recipe's checkpoint. A checkpoint without a tokenizer is
    not checked.
    """
    if (source := recipe.model.get("from_pretrained")) is not None:
        require_same_tokenizer(source, f"model.from_pretrained={source}", recipe, data)


def require_same_tokenizer(source: str, key: str, recipe: Recipe, data: TokenDataset) -> None:
    """Reject a corpus whose tokenizer differs from that of a checkpoint; `key` names the checkpoint in the message."""
    if recipe.data.other_tokenizer:
        return
    theirs, ours = _of_source(source), _known(data.tokenizer_directory) or {data.tokenizer_identity}
    if theirs and not theirs & ours:
        one, other = (sorted(map(str, known))[0][:12] for known in (theirs, ours))
        raise SettingsError(
            f"{key}: its tokenizer ({one}) is not that of data.directory={data.directory} "
            f"({other}): prepare the corpus with that tokenizer, or set data.other_tokenizer=true"
        )


def _of_source(source: str) -> set[str | None]:
    directory = model_directory(source)
    if directory is not None:
        kept = directory / TOKENIZER_IDENTITY
        return _known(directory) or ({kept.read_text(encoding="utf-8").strip()} if kept.exists() else set())
    saved = find_checkpoint(source)
    if (kept_in_run := trainer_state(saved).tokenizer) is not None:
        return {kept_in_run}
    return _known(Path(load_recipe(saved.directory / RECIPE).data.directory) / TOKENIZER)


def _known(directory: Path) -> set[str | None]:
    """Hashes of a tokenizer: of its files, and of the files that transformers writes for it."""
    found: set[str | None] = set()
    if (directory / TOKENIZER_JSON).exists():
        found.add(identity((directory / TOKENIZER_JSON).read_text(encoding="utf-8")))
    elif not any((directory / name).exists() for name in (SENTENCEPIECE_MODEL, VOCABULARY)):
        return found
    with suppress(DataError):  # no corpus can be prepared with this tokenizer
        found.add(identity(load_tokenizer(str(directory)).backend_tokenizer.to_str()))
    return found

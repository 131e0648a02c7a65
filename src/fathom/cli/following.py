"""The next commands that a finished command suggests: deepen, prepare, train, evaluate, chat."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.checkpoints.file_names import CHAT_TEMPLATE, HEAL, PUZZLE, TOKENIZER_CONFIG
from fathom.settings import assignment

if TYPE_CHECKING:
    from fathom.corpus.prepare import Summary
    from fathom.recipe import Recipe
    from fathom.training import TrainResult

TEXT = "TEXT"
"""The placeholder for the reader's own text in a printed command."""


def following(*commands: str) -> str:
    """The printed lines that suggest the next commands; empty if there is no next command."""
    if not commands:
        return ""
    more = f", with a file or folder of your own for {TEXT}" if any(TEXT in one.split() for one in commands) else ""
    return "\n".join([f"\nnext{more}:", *(f"  {one}" for one in commands)])


def after_prepare(made: Summary, tokenizer: str | None) -> list[str]:
    """The command that trains on a prepared corpus: the deepened model whose tokenizer made the corpus, else a small
    model from scratch."""
    data = [assignment("data.directory", made.directory)]
    if "val" not in made.splits:
        data.append("evaluate.every=0")
    if tokenizer is not None and (Path(tokenizer) / HEAL).is_file():
        recipe, run = Path(tokenizer) / HEAL, f"{Path(tokenizer)}-healed"
        return [shlex.join(["fathom", "train", str(recipe), *data, "--run", run])]
    size = f"model.vocab_size={made.vocab_size}"
    return [shlex.join(["fathom", "train", "tiny", *data, size, "--run", f"runs/{made.directory.resolve().name}"])]


def after_train(result: TrainResult, recipe: Recipe) -> list[str]:
    """The next commands after training: score the run next to its base model, and chat or generate with it."""
    if result.model is None or recipe.data.directory.startswith(PUZZLE):
        return []
    base = recipe.distill.teacher or recipe.model.get("from_pretrained")
    models = [str(name) for name in (base, result.run_dir) if name is not None]
    text = recipe.data.directory if result.evaluation is not None else TEXT
    score = shlex.join(["fathom", "evaluate", *models, "--perplexity", text])
    return [score, using(result.run_dir, result.model)]


def using(name: str | Path, directory: Path) -> str:
    """The command that tries a model: `fathom chat` if it has a chat template, else `fathom generate`."""
    config = directory / TOKENIZER_CONFIG
    inside = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    if inside or (directory / CHAT_TEMPLATE).is_file():
        return shlex.join(["fathom", "chat", str(name)])
    return f"{shlex.join(['fathom', 'generate', str(name)])} 'It is'"

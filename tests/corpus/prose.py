"""Generated prose, near-copies of it, and recipes over it."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fathom.data.tokenizer import train_bpe

COMMON = ["the", "of", "and", "to", "be", "that", "have", "with"]


class Prose:
    """Documents of invented words; two of one writer share words but no long run."""

    def __init__(self, seed: int = 0, vocabulary: int = 3000) -> None:
        self.chance = random.Random(seed)
        letters = "abcdefghijklmnoprstuvw"
        self.words = ["".join(self.chance.choices(letters, k=self.chance.randint(3, 9))) for _ in range(vocabulary)]

    def sentence(self, count: int) -> str:
        """So many words, a fourth of them common ones."""
        pick = (COMMON if self.chance.random() < 0.25 else self.words for _ in range(count))
        text = " ".join(self.chance.choice(words) for words in pick)
        return text[0].upper() + text[1:] + "."

    def document(self, words: int = 150) -> str:
        """Paragraphs of sentences of a dozen words."""
        sentences = [self.sentence(12) for _ in range(-(-words // 12))]
        paragraphs = [" ".join(sentences[at : at + 4]) for at in range(0, len(sentences), 4)]
        return "\n\n".join(paragraphs)

    def edited(self, text: str, changes: int) -> str:
        """The text with so many words replaced, evenly spread."""
        words = text.split(" ")
        for number in range(changes):
            place = int((number + 0.5) * len(words) / changes)
            words[place] = f"edit{self.chance.randrange(10**9)}"
        return " ".join(words)


TOKENS = ["<|im_start|>", "<|im_end|>", "<start>", "<stop>", "<think>", "</think>"]


@functools.cache
def vocabulary() -> Any:
    """A byte-level tokenizer with the tokens of several chat templates, and an EOS that is none of them."""
    prose = Prose(41)
    return train_bpe((prose.document() for _ in range(20)), 400, TOKENS)


def write_jsonl(path: Path, texts: Iterable[str | dict[str, Any]]) -> Path:
    """Texts, or whole rows, as JSON lines."""
    rows = ({"text": text} if isinstance(text, str) else text for text in texts)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe_values(collections: dict[str, Sequence[Path] | dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """A recipe's values; a collection may be its inputs alone."""
    named = {
        name: one if isinstance(one, dict) else {"inputs": [str(path) for path in one]}
        for name, one in collections.items()
    }
    return {
        "collections": named,
        "tokenize": {"train": 300, "held_out": 0.1},
        "mix": {"block": 64},
        "executor": {"workers": 1},
        **sections,
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines of all files of this name below a folder."""
    found = []
    for file in sorted(path.parent.rglob(path.name)):
        found += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return found


def tree(directory: Path) -> dict[str, bytes]:
    """Everything that must not depend on who made it, where, or how long that took."""
    apart = {"times.json", "run.json", "recipe.yaml", ".digests.json", ".verified.json"}
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in apart)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}

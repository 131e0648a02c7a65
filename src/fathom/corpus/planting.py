"""Measures how many leaked benchmark questions a search finds, by planting questions in excerpts of documents, in every
form of leak.

The forms of leak, and the damaged ones among them, are listed in `forms.py`. `--plants` limits the number of
questions of each form and length, and `--seed` chooses them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fathom.corpus.benchmarks import Item
from fathom.corpus.contamination import read_index_items
from fathom.corpus.documents import read_part, write_lines
from fathom.corpus.forms import ALL, NEED_CHOICES
from fathom.corpus.leak_rules import Matcher, groups_of
from fathom.corpus.search import AuditRecipe, indices_of, names_of, parts_of
from fathom.corpus.stage import StageOf, Task
from fathom.corpus.words import count_words

LENGTHS = {"1 to 2": 2, "3 to 7": 7, "8 to 15": 15, "16 or more": 10**9}
"""Words of a question, and the most that a class holds."""
COVERS, EXCERPT = 200, 300
"""Excerpts of documents in which items are planted, and the most characters of one."""
PLANT_TASKS = 8
"""Tasks into which the forms of a benchmark are divided."""


class Plant(StageOf[AuditRecipe]):
    """Each task counts, for some forms of leak of one benchmark, how many planted items are found, by form and question
    length."""

    name = "plant"
    version = 2
    recipe_class: ClassVar[type[Any]] = AuditRecipe

    def settings(self) -> dict[str, object]:
        """The recipe values that this stage's results depend on."""
        return {"plants": self.recipe.plants, "seed": self.recipe.seed}

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        covers = parts_of(self.workspace)[:1]
        forms = list(ALL)
        return [
            Task.of([index], [items], covers, benchmark=name, forms=forms[first::PLANT_TASKS])
            for name, index, items in zip(names_of(self.workspace), *indices_of(self.workspace), strict=True)
            for first in range(PLANT_TASKS if self.recipe.plants else 0)
        ]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        (index,), (lines,), parts = ([self.workspace.path(one) for one in group] for group in task.groups)
        items = read_index_items(lines)
        covers = [_excerpt(one.text) for part in parts for one in islice(read_part(part), COVERS)] or [""]
        planting = Planting(items, Matcher([dict(np.load(index))], [items]), covers)
        seed = f"{self.recipe.seed} {task.arguments['benchmark']}"
        rows: list[dict[str, object]] = []
        for form in task.arguments["forms"]:
            for length in LENGTHS:
                planted, found = planting.recall(
                    form, length, self.recipe.plants, random.Random(f"{seed} {form} {length}")
                )
                rows.append({"form": form, "length": length, "planted": planted, "found": found})
        write_lines(folder / "recall.jsonl", rows)
        return {"planted": sum(int(str(row["planted"])) for row in rows)}


def _excerpt(text: str) -> str:
    """The beginning of a document, cut between two words."""
    return text if len(text) <= EXCERPT else text[:EXCERPT].rpartition(" ")[0]


class Planting:
    """A benchmark's items, by the length of their questions, and excerpts in which they are planted."""

    def __init__(self, items: Sequence[Item], matcher: Matcher, covers: Sequence[str]) -> None:
        self._items, self._matcher, self._covers = items, matcher, covers
        self._groups = groups_of(items)
        self._by_length: dict[str, list[int]] = {length: [] for length in LENGTHS}
        for number, item in enumerate(items):
            words = count_words(item.stem)
            self._by_length[next(name for name, most in LENGTHS.items() if words <= most)].append(number)

    def recall(self, form: str, length: str, plants: int, chance: random.Random) -> tuple[int, int]:
        """How many items with questions of a given length are planted in one form of leak, and how many of these are
        found."""
        numbers = [
            number
            for number in self._by_length[length]
            if self._items[number].gold and (self._items[number].choices or not form.startswith(NEED_CHOICES))
        ]
        chosen = chance.sample(numbers, min(plants, len(numbers)))
        texts, ranges = [], []
        for number in chosen:
            before, leak = chance.choice(self._covers), ALL[form](self._items[number], chance)
            texts.append(f"{before}\n{leak}\n{chance.choice(self._covers)}")
            ranges.append((len(before), len(before) + len(leak) + 2))
        found = 0
        for number, (start, end), hits in zip(chosen, ranges, self._matcher.hits(texts), strict=True):
            mine = (hit for _, hit in hits if hit.start < end and hit.end > start)
            found += any(self._groups[hit.item] == self._groups[number] for hit in mine)
        return len(chosen), found

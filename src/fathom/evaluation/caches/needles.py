"""Needle retrieval: needles are planted in a text, asked for once, and counted by the number of compressions in
between.

A needle binds a key to a value. After a question the text continues, so answers are predicted but never read. A cache
can carry one needle as a constant over the whole memory, but not several, so several are the real test.

`natural.py` has needles in words, and `ruler.py` the tasks of RULER. `evaluate.py` chooses texts and numbers of
needles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fathom.errors import SettingsError
from fathom.kvcache.schedule import Schedule
from fathom.report.statistics import wilson

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Ids `[B, T]`, and n tokens of interest, to the logits of these, `[B, T, n]`."""


@dataclass(frozen=True)
class Needles:
    """The tokens of needles, of questions and of answers, for K keys and V values."""

    planted: Tensor
    """`[K, V, p]`: the needle of a key and a value."""
    asked: Tensor
    """`[K, q]`: the question for a key; the answer is predicted at its last token."""
    answers: Tensor
    """`[V]`: the answer token of a value."""

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1 / len(self.answers)

    @classmethod
    def synthetic(cls, keys: int = 16, values: int = 16, first: int = 0) -> Needles:
        """Needles for a model that was trained on them: each needle is a single token, so that only memory is tested.

        The tokens from `first` on are the answers, the questions and the needles, `values + keys + keys · values`.
        """
        pairs = torch.arange(keys * values).view(keys, values, 1) + first + values + keys
        asked = torch.arange(keys).view(keys, 1) + first + values
        return cls(pairs, asked, torch.arange(values) + first)

    @classmethod
    def drawn(
        cls, ids: Tensor, generator: torch.Generator, keys: int = 64, values: int = 16, length: int = 2
    ) -> Needles:
        """Needles for any language model: a key is `length` tokens, a needle is a key and a value, and a question
        repeats the key.

        Args:
            ids: Tokens to choose from.
            generator: Draws the tokens.
            keys: Number of keys.
            values: Number of values.
            length: Tokens of a key.
        """
        if len(ids) < values + 2 * length:
            raise SettingsError(f"{len(ids)} tokens are too few to make needles from")
        order = ids[torch.randperm(len(ids), generator=generator)]
        answers, rest = order[:values], order[values:]
        asked = rest[torch.randint(0, len(rest), (keys, length), generator=generator)]
        planted = torch.cat([asked[:, None].expand(-1, values, -1), answers[None, :, None].expand(keys, -1, 1)], dim=-1)
        return cls(planted, asked, answers)


@dataclass(frozen=True)
class Rows:
    """Texts with needles in them."""

    ids: Tensor
    """`[B, T]`."""
    value: Tensor
    """`[B, n]`: the value that each needle holds."""
    planted: Tensor
    """`[B, n]`: where each needle ends; from then on it is in the memory."""
    asked: Tensor
    """`[B, n]`: where each question ends, which is where the answer is predicted."""

    def compressions(self, schedule: Schedule) -> Tensor:
        """The number of compressions, `[B, n]`, that each needle went through before its answer is predicted."""
        # The question's last token may itself trigger a compression.
        asked, planted = ((at + 1).clone().apply_(schedule.compressions) for at in (self.asked, self.planted))
        return asked - planted

    def pick(self, chosen: Tensor | slice) -> Rows:
        """Select some of the texts, by index, mask or slice."""
        return Rows(self.ids[chosen], self.value[chosen], self.planted[chosen], self.asked[chosen])

    def cut(self) -> Rows:
        """The texts, all cut after the last question in any of them."""
        return replace(self, ids=self.ids[:, : int(self.asked.max()) + 1])


def plant(
    text: Tensor,
    needles: Needles,
    count: int,
    generator: torch.Generator,
    within: int | None = None,
    after: int = 0,
) -> Rows:
    """Plant `count` needles in every sequence of the texts `[B, T]`, and a question for each needle.

    Args:
        text: The text; it is not changed.
        needles: What to plant.
        count: Needles in a row, all of different keys.
        generator: Draws keys, values and places.
        within: Plant in the first three quarters of this many tokens and ask after them; None for anywhere, planting
            before asking.
        after: Leave this many first tokens alone: a needle among the sinks would never be compressed.
    """
    batch, length = text.shape
    wide = max(needles.planted.shape[-1], needles.asked.shape[-1])
    first, slots = -(-after // wide), length // wide
    border = 3 * within // (4 * wide) if within else (first + slots) // 2
    if count > len(needles.asked) or count > border - first or 2 * count > slots - first:
        raise SettingsError(f"{count} needles of {wide} tokens do not fit into {within or length} tokens")

    def drawn(n: int, k: int) -> Tensor:
        return torch.rand(batch, n, generator=generator).argsort(1)[:, :k]

    key = drawn(len(needles.asked), count)
    value = torch.randint(0, len(needles.answers), (batch, count), generator=generator)
    if within:
        here, there = first + drawn(border - first, count), border + drawn(slots - border, count)
    else:
        here, there = (first + drawn(slots - first, 2 * count)).view(batch, count, 2).sort(-1).values.unbind(-1)
    ids = text.clone()
    for places, tokens in ((here, needles.planted[key, value]), (there, needles.asked[key])):
        spots = places.unsqueeze(-1) * wide + torch.arange(tokens.shape[-1])  # [B, n, p]
        ids.scatter_(1, spots.flatten(1), tokens.flatten(1))
    planted = here * wide + needles.planted.shape[-1] - 1
    return Rows(ids, value, planted, there * wide + needles.asked.shape[-1] - 1)


IDLE = 50
"""Drawing stops after this many batches in a row without a wanted question."""


def enough(draw: Callable[[], Rows], schedule: Schedule, compressions: Sequence[int], questions: int) -> Rows:
    """Draw texts until every number in `compressions` has enough questions.

    A row is kept if it has a question after a number of compressions that still lacks questions. Numbers that are never
    drawn get none.
    """
    most = max(compressions)
    taken, lacks, idle = [], torch.zeros(most + 1, dtype=torch.long), 0
    lacks[list(compressions)] = questions
    while (lacks > 0).any() and idle < IDLE:
        rows = draw()
        counts, chosen = rows.compressions(schedule), []
        for row, here in enumerate(counts):
            here = here[here <= most]
            if (lacks[here] > 0).any():
                chosen.append(row)
                lacks -= torch.bincount(here, minlength=most + 1)
        idle = 0 if chosen else idle + 1
        taken.append(rows.pick(torch.tensor(chosen, dtype=torch.long)))
    parts = ([getattr(part, name) for part in taken] for name in ("ids", "value", "planted", "asked"))
    found = Rows(*(torch.cat(part) for part in parts))
    return found.pick(found.asked.max(1).values.argsort(stable=True))


@dataclass
class Recall:
    """The numbers of right answers and of questions, by how many compressions came between needle and question."""

    right: list[int]
    asked: list[int]

    @classmethod
    def of(cls, right: Tensor, compressions: Tensor, most: int) -> Recall:
        """Count the answers that came after 0 to `most` compressions; answers after more compressions are left out."""
        counts = (torch.bincount(made, minlength=most + 1) for made in (compressions[right], compressions))
        return cls(*(count[: most + 1].tolist() for count in counts))

    @property
    def accuracy(self) -> list[float | None]:
        """Accuracy by number of compressions; None where nothing was asked."""
        return [r / n if n else None for r, n in zip(self.right, self.asked, strict=True)]

    @property
    def intervals(self) -> list[tuple[float, float] | None]:
        """The 95 % confidence intervals of the accuracies, by number of compressions."""
        return [wilson(r, n) if n else None for r, n in zip(self.right, self.asked, strict=True)]


def recall(score: Scorer, batches: Iterable[Rows], needles: Needles, schedule: Schedule, compressions: int) -> Recall:
    """Ask a model about every planted needle; the value with the highest logit is the model's answer.

    Args:
        score: The model with its cache.
        batches: Texts with needles.
        needles: The needles that were planted in them.
        schedule: Compressions are counted by it, for every cache alike.
        compressions: Count up to this many.
    """
    right, made = [], []
    for rows in batches:
        logits = score(rows.ids, needles.answers)  # [B, T, V]
        at = rows.asked.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        answer = logits.cpu().gather(1, at).argmax(-1)  # [B, n]
        right.append((answer == rows.value).flatten())
        made.append(rows.compressions(schedule).flatten())
    return Recall.of(torch.cat(right), torch.cat(made), compressions)

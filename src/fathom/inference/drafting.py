"""Decides whether to draft the next tokens of the sequences in a batch, and how: by prompt lookup, or with the first
loop iterations.

A draft is a guess that one forward pass checks together with the token before it. No text depends on its drafts: each
token is the one that would be chosen without them, and those behind the first wrong guess are discarded. So drafts only
decide how long a text takes. Which kind pays is measured: the seconds of a step, and in each text the share of guesses
that were right. A text in which drafts lose pauses them, and longer each time.

Drafts by lookup are made here, those of the first iterations in `batches.py`, which checks both kinds. `Choice.settled`
in `sampling.py` accepts them. `models/trips/speculation.py` drafts for `fathom generate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

PLAIN, LOOKUP, TRIPS = "plain", "lookup", "trips"
"""Kinds of steps: a token for each text; and those that check drafts."""
GRAMS = (3, 2)
"""Numbers of tokens that are looked up, the first that is found counts."""
FIRST, MOST = 4, 15
"""Tokens of a draft by lookup, at first and at most."""
CHECKED = 64
"""Most tokens that a step checks, all texts together: each of them needs logits over the vocabulary."""
HOPE = 0.5
"""Share of right guesses that is expected where nothing is known."""
RECENT = 0.5
"""Weight of the last step in a mean."""
PAUSE, LONGEST = 16, 512
"""Tokens for which a text pauses a kind of drafts after it lost, at first and at most."""
SURE, AGAIN = 3, 32
"""Plain steps that are timed before others are tried, and steps after which another one is."""


class Lookup:
    """Prompt-lookup drafts: the tokens that followed at an earlier occurrence of a sequence's last tokens."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._read = 0

    def after(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens that may follow; none if the last tokens did not occur before. A repetition continues."""
        for end in range(self._read, len(tokens)):
            for size in GRAMS:
                self._places[tuple(tokens[max(0, end - size) : end])] = end
        self._read = len(tokens)
        found = (self._places.get(tuple(tokens[-size:])) for size in GRAMS)
        start = next((place for place in found if place is not None), None)
        if start is None:
            return []
        made = list(tokens[start : start + count])
        while len(made) < count:
            made.append(made[start - len(tokens)])
        return made


@dataclass
class Fortune:
    """Statistics of one kind of draft (by lookup, or by loop iterations) for one sequence."""

    share: float = HOPE
    """The share of guesses that were right lately."""
    count: int = FIRST
    """Guesses to make."""
    pause: int = PAUSE
    until: int = 0
    """Length of the text before which it makes none."""

    def learn(self, drafted: int, accepted: int) -> None:
        """Record how many of a step's drafted tokens were right."""
        self.share += RECENT * (accepted / drafted - self.share)
        self.count = min(2 * self.count, MOST) if accepted >= self.count else max(accepted + 1, 2)
        self.pause = PAUSE if accepted == drafted else self.pause

    def lose(self, made: int) -> None:
        """Pause, and hope again afterwards."""
        self.share, self.count, self.until, self.pause = HOPE, FIRST, made + self.pause, min(2 * self.pause, LONGEST)


@dataclass
class TextDrafts:
    """The drafts of one text."""

    lookup: Lookup = field(default_factory=Lookup)
    by: dict[str, Fortune] = field(default_factory=lambda: {LOOKUP: Fortune(), TRIPS: Fortune()})


class Drafted(Protocol):
    """The attributes that a generated sequence needs so that tokens can be drafted for it."""

    prompt: Sequence[int]
    new_tokens: int
    made: list[int]
    drafts: TextDrafts


J = TypeVar("J", bound=Drafted)


@dataclass(frozen=True)
class NextStep:
    """The plan of the next decoding step."""

    kind: str
    drafts: Sequence[Sequence[int]] = ()
    """The drafts of each text, by lookup."""
    size: int = 1
    """The size of the step, on which its seconds depend."""


class Drafting:
    """Plans the drafts of sequences that are generated together in a batch.

    Args:
        kinds: Of LOOKUP and TRIPS those that are possible.
    """

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.seconds: dict[tuple[str, int], float] = {}
        """Of a step, by kind and size; with TRIPS, of each of its tokens."""
        self._plain: dict[int, int] = {}
        self._since = 0

    def plan(self, texts: Sequence[J], trips: int = 0) -> NextStep:
        """Plan the next step of some sequences; `trips` is how many tokens the first loop iterations would draft."""
        rows = len(texts)
        plans = {PLAIN: NextStep(PLAIN, size=rows)}
        if not self.kinds or self._plain.get(rows, 0) < SURE or self._since >= AGAIN:
            return plans[PLAIN]
        values = {PLAIN: rows / self._seconds(plans[PLAIN])}
        if LOOKUP in self.kinds and any(drafts := self._looked_up(texts)):
            width = 1 + max(map(len, drafts))
            plans[LOOKUP] = NextStep(LOOKUP, drafts, 1 << (rows * width - 1).bit_length())
            right = sum(one.drafts.by[LOOKUP].share * len(mine) for one, mine in zip(texts, drafts, strict=True))
            values[LOOKUP] = (rows + right) / self._seconds(plans[LOOKUP])
        if TRIPS in self.kinds and any(len(one.made) >= one.drafts.by[TRIPS].until for one in texts):
            plans[TRIPS] = NextStep(TRIPS, size=rows)
            right = sum(min(trips, 1 + one.drafts.by[TRIPS].share * trips) for one in texts)
            values[TRIPS] = right / (trips * self._seconds(plans[TRIPS]))
        kind = self.best(values)
        for other in plans.keys() - {kind, PLAIN}:
            for one in texts:
                if len(one.made) >= one.drafts.by[other].until:
                    one.drafts.by[other].lose(len(one.made))
        return plans[kind]

    def best(self, values: Mapping[str, float]) -> str:
        """The kind of step that makes the most tokens per second; a kind that was not timed yet is tried."""
        return max(values, key=lambda kind: values[kind])

    def learn(self, plan: NextStep, texts: Sequence[J], kept: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record how long a step took, how many tokens each sequence drafted, and how many of them were right."""
        if not self.kinds:
            return
        if plan.kind == PLAIN:
            self._plain[plan.size] = self._plain.get(plan.size, 0) + 1
        elif plan.kind == TRIPS:
            seconds /= max(drafted for drafted, _ in kept)
        self._since = 0 if plan.kind == PLAIN else self._since + 1
        known = self.seconds.get((plan.kind, plan.size), seconds)
        # Other programs make a step slower, never faster.
        self.seconds[plan.kind, plan.size] = min(seconds, known + RECENT * (seconds - known))
        for one, (drafted, accepted) in zip(texts, kept, strict=True):
            if drafted:
                one.drafts.by[plan.kind].learn(drafted, accepted)

    def _seconds(self, plan: NextStep) -> float:
        return self.seconds.get((plan.kind, plan.size), 0.0) or 1e-9

    def _looked_up(self, texts: Sequence[J]) -> list[list[int]]:
        left = min(one.new_tokens - len(one.made) for one in texts)  # padding of a text stays within its room
        most, drafts = min(CHECKED // len(texts), left) - 1, []
        for one in texts:
            mine = one.drafts.by[LOOKUP]
            count = 0 if len(one.made) < mine.until else max(0, min(mine.count, most))
            drafts.append(one.drafts.lookup.after([*one.prompt, *one.made], count) if count else [])
        return drafts

"""Contrasts: signed sums of several arms' losses, such as an interaction, computed for each seed. For example:

    interaction=m_loop - m_once - d_loop + d_once

The weights of a contrast sum to zero, so adding a constant to all losses does not change it. Its p-value is corrected
with the others: by `differences.py` in a comparison, and by `multipliers.py` in a ladder, at the largest size. Both
files decide whether a report is exploratory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fathom.errors import SettingsError
from fathom.report.statistics import Difference, paired_difference

ALLOWED = "allowed: NAME=ARM - ARM - ARM + ARM, with as many + as -, separated by commas"


@dataclass(frozen=True)
class Contrast:
    """One contrast of a plan."""

    name: str
    added: tuple[str, ...]
    """The arms with a plus; one that counts twice is there twice."""
    taken: tuple[str, ...]
    """Those with a minus."""

    def __str__(self) -> str:
        """The arms with their signs."""
        return " ".join([" + ".join(self.added), *(f"− {name}" for name in self.taken)])

    @property
    def arms(self) -> set[str]:
        """Every arm of it."""
        return {*self.added, *self.taken}

    def of(self, losses: Mapping[str, Mapping[int, float]]) -> Difference | None:
        """The contrast's value over the seeds that all of its arms have, from losses by arm and seed; None if no seed
        is shared."""
        if not self.arms <= set(losses):
            return None
        seeds = sorted(set.intersection(*(set(losses[name]) for name in self.arms)))
        sides = [[sum(losses[name][seed] for name in side) for seed in seeds] for side in (self.added, self.taken)]
        return paired_difference(*sides) if seeds else None


def sentence(name: str, arms: str, value: Difference) -> str:
    """A contrast's value in words."""
    if value.half_width is None:
        return f"the contrast {name} ({arms}) is {value}, without an interval"
    said = "not tested" if value.p_holm is None else "significant" if value.significant else "not significant"
    return f"the contrast {name} ({arms}) is {value} nats, {said}"


def parse_contrasts(text: str, arms: Collection[str]) -> tuple[Contrast, ...]:
    """Parse contrasts from `NAME=ARM - ARM - ARM + ARM, ...`; an arm's name may contain a hyphen, so signs stand
    between spaces."""
    found: list[Contrast] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, words = (piece.strip() for piece in part.partition("="))
        signed = words.split()
        signed = signed if signed[:1] in (["+"], ["-"]) else ["+", *signed]
        signs, names = signed[::2], signed[1::2]
        sides = {sign: tuple(arm for s, arm in zip(signs, names, strict=False) if s == sign) for sign in "+-"}
        if not (name and equals) or len(signs) != len(names) or not set(signs) <= set("+-"):
            raise SettingsError(f"contrasts={part}: {ALLOWED}")
        if unknown := [arm for arm in names if arm not in arms]:
            raise SettingsError(f"contrasts={part}: {unknown[0]} is not an arm; the arms are {', '.join(arms)}")
        if len(sides["+"]) != len(sides["-"]) or set(sides["+"]) & set(sides["-"]):
            raise SettingsError(f"contrasts={part}: {ALLOWED}; no arm may have both signs")
        if name in [other.name for other in found]:
            raise SettingsError(f"contrasts={part}: {name} appears twice")
        found.append(Contrast(name, sides["+"], sides["-"]))
    return tuple(found)

"""Signs of tampering: the weights were changed without changing what they compute.

A sign is a gap between two scores. It counts only if a matching test says that the models are related, the score is
high, and no unrelated pair has such a gap. Unrelated models with ties, for example, match better once their channels
are reordered.

`comparison.py` asks for signs only if a matching test is significant, and adds those that are no gaps: shifted layers,
and rotary planes that agree too seldom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CLEAR, WIDE, NARROW, BEYOND = 0.2, 0.3, 0.02, 0.1

WORDS = {
    "rotated": "rotation suspected: only a rotation of the residual stream aligns the models",
    "regauged": "re-gauging suspected: the score rises once gains and head scales are brought to canonical form",
    "rows": "embedding rows out of proportion: channels match only after every row is brought to the same length",
    "permuted": "permutation suspected: channels match only after reordering",
    "replaced": "embedding replaced: attention matches in order, the embedding does not",
    "relabelled": "vocabulary relabelled: the models match without a tokenizer and not by their tokens",
    "shifted": "layers shifted or reordered",
    "opposed": "training against the test of rotary planes suspected: they agree less often than by chance",
}


def gaps(scores: Mapping[str, float], alike: float) -> dict[str, float]:
    """The gap of each sign.

    Args:
        scores: Scores by name.
        alike: Share of channels that AWM as published matches the same way.
    """
    lap, rotated, order, published = (scores.get(name) for name in ("awm_canonical", "procrustes", "order", "awm"))
    untold = scores.get("axes", scores.get("blind"))
    out: dict[str, float] = {}
    if lap is not None and rotated is not None:
        out["rotated"] = rotated - lap
    if lap is not None and published is not None:
        out["regauged" if alike >= 0.9 else "rows"] = lap - published
    if lap is not None and order is not None:
        out["permuted"] = lap - order
        out["replaced"] = order - max(lap, rotated or lap)
    if untold is not None:
        out["relabelled"] = untold - max(lap or 0.0, rotated or 0.0, order or 0.0)
    return out


def suspected(
    own: Mapping[str, float], null: Mapping[str, Sequence[float]], best: float, threshold: float | None
) -> list[str]:
    """The signs of tampering in a pair of models that a matching test calls related.

    Args:
        own: The gaps of the pair.
        null: The gaps of unrelated pairs.
        best: The pair's best repaired score.
        threshold: The value from which a score is high, if known.
    """
    if best <= max(CLEAR, threshold or CLEAR):
        return []
    out = []
    for name, gap in own.items():
        least = NARROW if name in {"regauged", "rows"} else WIDE
        if gap > max(least, max(null.get(name, ()), default=0.0) + (0 if least == NARROW else BEYOND)):
            out.append(WORDS[name])
    return out

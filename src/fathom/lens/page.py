"""Write the lens page as one self-contained HTML file: `lens.html.j2` with its style, its script and the data.

Per-token numbers are base64 of little-endian integers, a fifth of their size as JSON, and become markup only for the
token that is selected; so a page of two thousand tokens is a few megabytes and stays fast.

`look.py` computes the numbers. `lens.js` draws them: *settled*, *borrowed*, keys and clicks, B − A, and the POST to
`live_endpoint`, which `live.py` answers in `fathom serve`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fathom.report.templates import render

if TYPE_CHECKING:
    from fathom.lens.look import LensData

Array = np.ndarray
BITS = 1024
"""Steps per bit of surprisal."""
NONE = 65535
"""Code for a token without a surprisal, the first one."""
MANY = 500_000
"""With more depth weights than this, each is stored in one byte instead of two."""


def lens_page(
    data: LensData, live_endpoint: str | None = None, compare: LensData | None = None, nonce: str | None = None
) -> str:
    """The page.

    Args:
        data: What to show.
        live_endpoint: Where the page may send `{"text": ...}` by POST; the answer is `pack(...)`, or `{"error": ...}`
            in one line. Without it the page has no input and makes no requests.
        compare: A second model to show next to the first, for the same tokens.
        nonce: The nonce of a server's content-security policy.
    """
    payload = pack(data, *([compare] if compare else ()))
    names = " and ".join(item.model for item in (data, compare) if item)
    return render(
        "lens/lens.html.j2",
        title=f"{names} · Fathom lens",
        data={**payload, "live": live_endpoint},
        nonce=nonce,
    )


def pack(*data: LensData) -> dict[str, object]:
    """The lens page's data as a dictionary for JSON, with arrays packed in base64."""
    return {"models": [_pack(item) for item in data]}


def quantise(weights: Array, steps: int) -> Array:
    """Round weights to integers proportional to them, such that these sum to exactly `steps` along the last axis."""
    scaled = weights.astype(np.float64) * steps
    floor = np.floor(scaled)
    missing = np.rint(steps - floor.sum(-1, keepdims=True))
    by_remainder = np.argsort(np.argsort(floor - scaled, axis=-1, kind="stable"), axis=-1, kind="stable")
    return (floor + (by_remainder < missing)).astype(np.int64)


def _pack(data: LensData) -> dict[str, object]:
    averages, shown = data.averages(), not data.unshown
    weights = data.weights if shown else []
    steps = 255 if sum(row.size for row in weights) > MANY else 65535
    return {
        "name": data.model,
        "mechanism": data.mechanism,
        "parameters": data.parameters,
        "dropped": data.dropped,
        "tokens": data.tokens,
        "labels": _encode(data.labels),
        "trips": data.trips,
        "surprisal": _encode(_bits(data.surprisal)),
        "visits": data.visits,
        "vocabulary": data.vocabulary,
        "top": data.predictions.shape[-1],
        "predictions": _encode(data.predictions),
        "probabilities": _encode(np.rint(data.probabilities * 65535)),
        "said": _encode(data.said),
        "saidProbabilities": _encode(np.rint(data.said_probabilities * 65535)),
        "nextSurprisal": _encode(_bits(data.next_surprisal)),
        "sources": data.sources if shown else [],
        "unshown": data.unshown,
        "steps": steps,
        "alphas": [[*row.shape[:2], *_encode(quantise(row, steps))] for row in weights],
        "meanWeights": _rounded(averages.weights),
        "meanOrigins": _rounded(averages.origins),
        "entropy": _rounded([averages.entropy])[0],
        "layerWeights": data.layer_weights and _rounded(data.layer_weights),
    }


def _encode(values: Array) -> tuple[str, str]:
    """The smallest unsigned integer type that holds the values, and the values in it as base64."""
    whole = values.astype(np.int64)
    name = next(name for name in ("u1", "u2", "u4") if whole.size == 0 or whole.max() < 256 ** int(name[1]))
    return name, base64.b64encode(whole.astype(f"<{name}").tobytes()).decode()


def _bits(values: Array) -> Array:
    return np.where(np.isnan(values), NONE, np.minimum(np.rint(np.nan_to_num(values) * BITS), NONE - 1))


def _rounded(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    return [[None if x is None or not math.isfinite(x) else round(x, 5) for x in row] for row in rows]

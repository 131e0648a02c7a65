"""Loop iterations per token: the limit at run time (`--max-trips`), and the number that a token actually used.

A `max_trips` above the iterations of training is refused here for commands, by `models/modeling.py` (`trips_asked`) for
a forward pass, by `models/configuration.py` in a configuration, and by `inference/server.py` (`Service.trips`) in a
request. `Service.trips` also decides what `reasoning_effort` means. `evaluation/scoring.py` (`under_budgets`) scores a
model under several limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.errors import SettingsError

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from fathom.models.modeling import FathomModelOutput


def most_trips(model: PreTrainedModel) -> int:
    """The maximum number of loop iterations per token; 1 for a model that is not Fathom's."""
    recurrence = getattr(getattr(model, "model", None), "recurrence", None)
    return 1 if recurrence is None else recurrence.most_trips(model.config)


def check_trips(model: PreTrainedModel, asked: int | None) -> None:
    """Reject a limit on loop iterations if the model has none, or if the limit exceeds the iterations of its
    training."""
    most = most_trips(model)
    if asked is not None and most == 1:
        raise SettingsError(f"max_trips={asked}: this model has no loop iterations to limit")
    if asked is not None and not 1 <= asked <= most:
        raise SettingsError(f"max_trips={asked}: this model was trained for {most} iterations; allowed: 1 to {most}")


def check_chunks(model: PreTrainedModel, size: int | None) -> None:
    """Reject reading a prompt in chunks if the chunks would change a looped model's result."""
    if most_trips(model) > 1:
        try:
            model.check_chunks(size)
        except ValueError as error:
            raise SettingsError(str(error)) from error


def limited(model: PreTrainedModel, most: int | None) -> PreTrainedModel:
    """The model, with the limit on loop iterations applied to every later forward pass."""
    check_trips(model, most)
    if most is not None:
        model.forward = partial(model.forward, max_trips=most)
    return model


def stored_trips(
    model: PreTrainedModel, cache: Cache, rows: int, columns: list[int], most: int | None = None
) -> list[float | None]:
    """Mean iterations of the tokens in the cache after generation, by sequence. None for a model without iterations,
    and for beam search with a halting model, whose cache holds only the surviving beams.

    Args:
        model: The model that filled the cache.
        cache: The cache.
        rows: Number of prompts.
        columns: How many columns of each prompt's row count, padding on the left included.
        most: The limit that was applied.
    """
    if most_trips(model) == 1:
        return [None] * rows
    layers = getattr(cache, "layers", None)
    halt = getattr(getattr(layers[0], "table", None), "halt", None) if layers else None
    if halt is None:
        return [float(most or model.config.max_trips or model.model.recurrence.trips)] * rows
    if halt.shape[0] != rows:
        return [None] * rows
    made = [row[:count] for row, count in zip(halt, columns, strict=True)]
    return [float((row[row >= 0] + 1).double().mean()) for row in made]


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list to which every forward pass appends the iterations of its tokens: `[B, T]`, or one number for all. A model
    that is not Fathom's appends nothing.
    """
    made: list[Tensor] = []
    if most_trips(model) == 1:
        yield made
        return

    def note(_: object, __: object, given: dict[str, object], out: FathomModelOutput) -> None:
        fixed = given.get("max_trips") or model.config.max_trips or model.model.recurrence.trips
        made.append((out.recurrence_state or {}).get("trips", torch.tensor(fixed)))

    handle = model.model.register_forward_hook(note, with_kwargs=True)
    try:
        yield made
    finally:
        handle.remove()

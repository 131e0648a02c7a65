"""The cache that a model generates with: an ordinary one, or a memory of constant size."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.cache_utils import Cache

from fathom.errors import SettingsError
from fathom.kvcache import NAMES, UntunedWarning, build_cache, prefill
from fathom.kvcache.build import config_of, untuned
from fathom.kvcache.memory import MemoryCache
from fathom.recipe import CacheWishes, cache_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_WISHES = CacheWishes()


@dataclass(frozen=True)
class Policy:
    """A compression method with its schedule."""

    method: str
    window: int
    sinks: int
    ratio: float
    kept: int | None = None

    def empty(self, model: PreTrainedModel) -> Cache:
        """An empty cache of this policy; `choose` has given the warning that belongs to it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntunedWarning)
            return build_cache(model, self.method, self.window, self.sinks, self.ratio, self.kept)

    def read(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        beams: int = 1,
        after_chunk: Callable[[], None] | None = None,
        max_trips: int | None = None,
    ) -> dict[str, object]:
        """Arguments for `generate`: a cache that holds a prompt `[B, T]` without its last token.

        Args:
            model: The model that reads the prompt.
            prompt: Rows of one length, without padding.
            beams: Rows that each row becomes in `generate`.
            after_chunk: As `prefill` takes it.
            max_trips: As `prefill` takes it.
        """
        cache = self.empty(model)
        if prompt.shape[1] > 1:
            prefill(model, prompt[:, :-1], cache, after_chunk=after_chunk, max_trips=max_trips)
            cache.batch_repeat_interleave(beams)
        return {"past_key_values": cache}


def choose(model: PreTrainedModel, method: str | None, wishes: CacheWishes = NO_WISHES) -> Policy | None:
    """The policy that the `--kvcache` options mean for a model; None for an ordinary cache.

    A checkpoint that was tuned under compression has its schedule in its configuration. For any other, a method that
    mixes entries gives a warning once, since text past the window is expected to be bad.
    """
    if method in (None, "full"):
        for name, value in wishes.said().items():
            raise SettingsError(f"--kvcache-{name} {value}: give --kvcache METHOD with it")
        return None
    if method not in NAMES:
        raise SettingsError(f"--kvcache {method}: method must be one of {', '.join(NAMES)}")
    recorded = getattr(model.config, "kvcache", None)
    chosen = cache_policy(method, recorded, wishes)
    assert chosen["window"] is not None  # `cache_policy` asks for one
    policy = Policy(method, chosen["window"], chosen["sinks"], chosen["ratio"], chosen["kept"])
    try:
        cache = policy.empty(model)
    except ValueError as error:
        raise SettingsError(f"--kvcache {method}: {error}") from error
    if isinstance(cache, MemoryCache) and (words := untuned(config_of(model), cache.method)):
        print(f"fathom: warning: {words}", file=sys.stderr)
    return policy

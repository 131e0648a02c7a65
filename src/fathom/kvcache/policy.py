"""Decides which cache a model gets: an ordinary one, or the requested method's. Each value of the method's schedule is
the requested one, else the checkpoint's, else the default.

Of methods that select entries, `Selection.choose` in `method.py` chooses which stay, by the scores of the method's own
file. `build.py` builds the cache, and `rope.py` (`refuse`) refuses models. With such a cache a text may be longer than
the model's context (`Sampling.room` in `inference/settings.py`).
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from fathom.errors import SettingsError
from fathom.models.axes.cache_name import CACHE

from .build import METHODS, NAMES, UntunedWarning, base, build_cache, config_of, untuned
from .cache import MemoryCache
from .compressed import compressed
from .prefill import prefill
from .schedule import RATIO, SINKS
from .whole import WHOLE


@dataclass(frozen=True)
class CacheOptions:
    """The schedule that a caller requests. None leaves a field to the checkpoint or the defaults."""

    window: int | None = None
    """Entries that a cache may hold."""
    sinks: int | None = None
    """First entries that are never compressed."""
    ratio: float | None = None
    """Share of the window that a compression leaves."""
    kept: int | None = None
    """Entries that a compression leaves in addition to the sinks, instead of `ratio`."""

    @classmethod
    def of(cls, options: object) -> CacheOptions:
        """Make the options from the arguments `kvcache_window`, `kvcache_sinks`, `kvcache_ratio` and `kvcache_kept`."""
        return cls(**{one.name: getattr(options, f"kvcache_{one.name}") for one in dataclasses.fields(cls)})

    def given(self) -> dict[str, int | float]:
        """The options that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Policy:
    """A cache method with its schedule, and the way entries are stored, as in `build_cache`."""

    method: str
    window: int | None
    """None only for an uncompressed cache."""
    sinks: int = SINKS
    ratio: float = RATIO
    kept: int | None = None

    def empty(self, model: PreTrainedModel, static: bool = False) -> Cache:
        """An empty cache of this policy; unlike `build_cache`, without a warning about a model that was not tuned."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntunedWarning)
            try:
                return build_cache(model, **vars(self), static=static)
            except ValueError as error:
                reason = str(error).replace("static=True: ", "`compile`: ")
                raise SettingsError(f"kvcache={self.method}: {reason}") from error

    def try_on(self, model: PreTrainedModel, static: bool = False) -> None:
        """Raise an error if the model cannot use this policy, and warn if the model was not tuned under a method that
        mixes entries."""
        cache = self.empty(model, static)
        if isinstance(cache, MemoryCache) and (words := untuned(config_of(model), cache.method)):
            print(f"fathom: warning: {words}", file=sys.stderr)

    @contextmanager
    def throughout(self, model: PreTrainedModel) -> Iterator[None]:
        """Within the block, read every input of the model into an empty cache of this policy; `try_on` reports
        beforehand if the model cannot use the policy."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntunedWarning)
            with compressed(model, **vars(self)):
                yield

    def read(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        attention_mask: Tensor | None = None,
        beams: int = 1,
        max_trips: int | None = None,
        static: bool = False,
    ) -> dict[str, object]:
        """Read a prompt `[B, T]`, except its last token, into a new cache; returns this cache as keyword arguments for
        `generate`.

        Args:
            model: The model that reads the prompt.
            prompt: Sequences, padded on the left if their lengths differ.
            attention_mask: Zeros on padding, `[B, T]`.
            beams: Number of beams in `generate`.
            static: Whether the cache is for decoding that is compiled; see `build_cache`.
        """
        cache = self.empty(model, static)
        if isinstance(cache, MemoryCache):
            cache.admit(attention_mask)
        if prompt.shape[1] > 1:
            prefill(model, prompt[:, :-1], cache, max_trips=max_trips)
            cache.batch_repeat_interleave(beams)
        return {CACHE: cache}


PLAIN = CacheOptions()


def cache_policy(method: str, recorded: object, options: CacheOptions) -> Policy:
    """The policy of a method: each value is the requested one, else the checkpoint's, else the default.

    Args:
        method: A name of `METHODS` or of `WHOLE`, also with a plus (`drop+int8`).
        recorded: `kvcache` of the checkpoint's configuration, or None.
        options: The requested values.
    """
    name = base(method)
    if name not in NAMES and name not in WHOLE:
        raise SettingsError(f"kvcache={method}: allowed: {', '.join(NAMES)}")
    window, ratio, kept = options.window, options.ratio, options.kept
    if ratio is not None and kept is not None:
        raise SettingsError(f"`kvcache_ratio={ratio}` and `kvcache_kept={kept}`: give only one of them")
    was: dict[str, object] = recorded if isinstance(recorded, dict) else {}
    known = {"sinks": SINKS, "ratio": RATIO, "kept": None, **was}
    has_ratio = name not in METHODS or METHODS[name].has_ratio
    if ratio is not None and not has_ratio:
        raise SettingsError(without_ratio(name, ratio))
    # the recorded values may belong to another schedule than the requested one
    if kept is not None or not has_ratio:
        known["ratio"] = RATIO
    if window is not None or ratio is not None or (not has_ratio and was.get("method") != name):
        known["kept"] = None
    known |= options.given()
    if name not in WHOLE and known.get("window") is None:
        raise SettingsError(
            f"`kvcache={method}` needs `kvcache_window`: this checkpoint was not tuned for a compressed cache"
        )
    schedule = {key: known.get(key) for key in ("window", "sinks", "ratio", "kept")}
    return Policy(method, **schedule)  # type: ignore[arg-type]


def without_ratio(method: str, ratio: float) -> str:
    """The error message for a ratio that was given to a method without one."""
    return f"`kvcache_ratio={ratio}`: method {method} removes one entry at a time; for several, give `kvcache_kept`"


def choose(
    model: PreTrainedModel, method: str | None, options: CacheOptions = PLAIN, static: bool = False
) -> Policy | None:
    """The cache policy that a command's options select for a model; None for an ordinary cache.

    A checkpoint that was tuned under compression has the schedule in its configuration. For any other checkpoint, a
    method that mixes entries warns once, because text past the window is expected to be bad. `static` is for decoding
    that is compiled.
    """
    if method in (None, "full"):
        for name, value in options.given().items():
            reason = (
                "give `kvcache` with it"
                if method is None
                else "`kvcache=full` keeps every entry and has no such option"
            )
            raise SettingsError(f"kvcache_{name}={value}: {reason}")
        return None
    if base(method) not in NAMES:
        raise SettingsError(f"kvcache={method}: allowed: {', '.join(NAMES)}")
    policy = cache_policy(method, getattr(model.config, "kvcache", None), options)
    policy.try_on(model, static)
    return policy

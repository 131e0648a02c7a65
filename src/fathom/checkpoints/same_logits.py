"""Test on a small copy of a configuration whether Fathom computes the same logits as the family's own class.

The copy (`shrink.py`) has random weights (`twin.py`). transformers' class and Fathom open it and run it in several
ways, and their logits must be equal, to the last bit unless the family says why they cannot be (`Family.rounding`).

The model's own weights are not used. `ignore_keys` are ignored by Fathom alone; the family's class reads them
(`open_both` in `twin.py`).
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from fathom.checkpoints.families.family import Rounding, Values
from fathom.checkpoints.families.layouts import HOSTS
from fathom.checkpoints.families.registry import FAMILIES
from fathom.checkpoints.file_names import CONFIG
from fathom.checkpoints.find import find_model
from fathom.checkpoints.from_gguf import SUFFIX, is_gguf
from fathom.checkpoints.hub import local
from fathom.checkpoints.runs import read_config, reason
from fathom.checkpoints.shrink import Small, read_as_class, shrink
from fathom.checkpoints.twin import (
    VIEWS,
    View,
    difference,
    make_batch,
    open_both,
    quiet,
    runs_in_sdpa,
    whole,
    write_twin,
)
from fathom.checkpoints.untrusted import check_checkpoint
from fathom.errors import ModelError
from fathom.models import FathomConfig
from fathom.models.registry import mechanism_name
from fathom.report.progress import ProgressBar

DTYPES = ("float32", "bfloat16")
EAGER = "whole texts, eager attention"
BROKEN = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError),
    *(ValueError, StrictDataclassError),
)
"""The errors that a class of transformers raises for a value that it cannot use."""
LEFT_OUT = ("quantization_config",)
"""Keys that describe stored weights only."""


@dataclass(frozen=True)
class Comparison:
    """The result of running both models in one way: how far their logits differ, and how far they may."""

    way: str
    """How they were run."""
    dtype: str
    """The number format of weights and computation."""
    difference: float
    """The largest difference of two logits, relative to the largest logit; 0 if all bits are equal."""
    allowed: float
    """The largest difference that the family allows."""
    agrees: bool
    """Whether the difference is allowed."""


@dataclass(frozen=True)
class Check:
    """The result of `check`."""

    model: str
    """The directory or repository, as given."""
    model_type: str
    """The family, as `config.json` names it."""
    compared_with: str
    """transformers' class."""
    weights: bool
    """Whether the directory has weights, of which only the headers were read."""
    tokens: int
    """The length of the texts."""
    crossed: tuple[str, ...]
    """The lengths that the texts cross, in words."""
    left_out: tuple[str, ...]
    """Keys of `config.json` that say nothing about a copy with random weights."""
    rounding: str | None
    """Why last bits may differ; None if they may not."""
    comparisons: tuple[Comparison, ...]
    """The results."""
    agrees: bool
    """Whether all comparisons agree: Fathom computes what transformers' class computes."""


def check(where: str | Path, ignore_keys: Collection[str] = ()) -> Check:
    """Test whether Fathom opens a model as transformers' own class does.

    Both classes open a small copy of `config.json`, in which sizes and lengths are scaled down, with the same random
    weights. Their logits are compared on whole and left-padded texts, token by token with a cache, and in `generate`,
    in float32 and bfloat16. The model's own weights are not used. A configuration that Fathom does not open raises a
    `ModelError`.

    Args:
        where: A model directory, or one with a `config.json` alone, or `org/name[@revision]` on the Hub, of which only
            `config.json` is downloaded.
        ignore_keys: Keys of `config.json` that Fathom reads the model without; transformers' class reads them.
    """
    directory = _directory(where)
    config = check_checkpoint(directory, weights=False)
    with quiet():
        kind = _kind(where, config, directory, ignore_keys)
        theirs: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
        rounding = FAMILIES[kind].rounding if kind in FAMILIES else None  # the others run the class's own layers
        left_out = tuple(key for key in LEFT_OUT if key in config)
        try:
            small = shrink({key: value for key, value in config.items() if key not in left_out})
            found = tuple(_compare(theirs, small, rounding, ignore_keys))
        except BROKEN as error:
            raise ModelError(
                f"{where}: {theirs.__name__} cannot run a small copy of the model: {reason(error)}"
            ) from error
    return Check(
        model=str(where),
        model_type=kind,
        compared_with=theirs.__name__,
        weights=any(directory.glob("*.safetensors")),
        tokens=small.tokens,
        crossed=small.crossed,
        left_out=left_out,
        rounding=None if rounding is None else rounding.reason,
        comparisons=found,
        agrees=all(one.agrees for one in found),
    )


def _directory(where: str | Path) -> Path:
    """The model's directory; raises a `ModelError` for a GGUF file, which has no `config.json` to compare."""
    path = local(where, files=(CONFIG,))
    holds_gguf = path.is_dir() and not (path / CONFIG).exists() and any(path.glob(f"*{SUFFIX}"))
    if is_gguf(path) or holds_gguf:
        raise ModelError(
            f"{where}: a GGUF file has no {CONFIG}, and Fathom reads GGUF through transformers: nothing to check"
        )
    return find_model(path)


def _kind(where: str | Path, config: Values, directory: Path, ignore_keys: Collection[str]) -> str:
    """The `model_type` to compare; raises a `ModelError` if Fathom or transformers has no class for it."""
    kind = str(config.get("model_type"))
    if kind == FathomConfig.model_type:
        raise ModelError(f"{where} is an export of Fathom, which no class of transformers opens: nothing to compare")
    if kind not in FAMILIES and kind not in HOSTS:
        code = "; the directory's own code is never run" if "auto_map" in config else ""
        known = ", ".join(sorted({*FAMILIES, *HOSTS}))
        raise ModelError(
            f"{where} is a {kind} model; allowed: models that both Fathom and transformers have a class for: "
            f"{known}{code}"
        )
    ours = read_config(directory, ignore_keys)  # its refusals name the key
    if (name := mechanism_name(ours)) != "vanilla":
        raise ModelError(f"{where} has the mechanism {name}, which no class of transformers has: nothing to compare")
    return kind


def _compare(
    theirs: type[PreTrainedModel], small: Small, rounding: Rounding | None, ignore_keys: Collection[str]
) -> Iterator[Comparison]:
    """Compare both models in every way of running them with SDPA (with eager if the class has no SDPA), and once with
    eager."""
    runs: dict[str, dict[str, View]] = {"sdpa": VIEWS, "eager": {EAGER: whole}}
    if not runs_in_sdpa(theirs, small.config):
        runs = {"eager": VIEWS}
    batch = make_batch(small.tokens, read_as_class(small.config).vocab_size)
    many, done = len(DTYPES) * sum(map(len, runs.values())), 0
    with tempfile.TemporaryDirectory() as folder, ProgressBar(f"comparing with {theirs.__name__}", many) as bar:
        write_twin(small.config, Path(folder))
        for dtype, (attention, views) in itertools.product(DTYPES, runs.items()):
            allowed = 0.0 if rounding is None else getattr(rounding, dtype)
            pair = open_both(Path(folder), getattr(torch, dtype), attention, ignore_keys)
            for way, view in views.items():
                found = difference(view, *pair, batch)
                yield Comparison(way, dtype, found, allowed, found <= allowed)
                bar.update(done := done + 1)

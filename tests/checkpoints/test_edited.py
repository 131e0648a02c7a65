"""An edited configuration opens as the family's own class opens it, or it is refused: none opens as something else.

Edits are compared on whole texts in float32, on small copies with random weights.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from fathom.checkpoints.families import FAMILIES
from fathom.checkpoints.shrink import read_as_class, shrink
from fathom.checkpoints.twin import make_batch, off, quiet, runs_in_sdpa, whole, write_twin

from .edits import Config, another, declared, draw
from .test_same_logits import config_of

BASES = {
    **{"llama": "llama-gqa", "mistral": "mistral-window", "qwen2": "qwen2-window", "qwen3": "qwen3"},
    **{"smollm3": "smollm3", "gpt_neox": "gpt_neox", "gpt2": "gpt2", "opt": "opt", "olmo2": "olmo2"},
    **{"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "granite": "granite", "phi3": "phi3"},
}
"""The case of each family that is edited."""
HARMLESS = ("bookkeeping", "order")
"""Kinds of edits that change no logit."""
STRANGE = ("undeclared", "of another family")
"""Kinds of edits that name a key which the family's class does not declare, and which Fathom may refuse."""
STRANGE_ROPE = ("my_new_rope_key", "full_attention")
"""Parameters of RoPE that most classes do not know, and pass over."""


@dataclass(frozen=True)
class Trial:
    """What became of an edited configuration."""

    end: str
    """`equal`, `other` (it opens as something else), `refused` by Fathom, or `broken`: its own class cannot run it."""
    why: str = ""
    ignored: bool = False
    """Whether the class computes what it computes without the edit."""


def attempt(config: Config, base: Config, place: Path) -> Trial:
    """Open an edited configuration with both classes."""
    expected = run(AutoModelForCausalLM, config, place)
    if isinstance(expected, str):
        return Trial("broken", expected)
    unedited = of_class(json.dumps(base), place)
    ignored = expected.shape == unedited.shape and torch.equal(expected, unedited)
    (place / "config.json").write_text(json.dumps(config))
    try:
        FathomConfig.from_pretrained(place)
    except Exception as error:
        return Trial("refused", str(error), ignored)
    found = run(FathomForCausalLM, config, place)
    if isinstance(found, str):
        return Trial("refused", found, ignored)
    rounding, difference = FAMILIES[config["model_type"]].rounding, off(expected, found)
    same = difference <= (0.0 if rounding is None else rounding.float32)
    return Trial("equal" if same else "other", f"{difference:.2g}", ignored)


def run(kind: Any, config: Config, place: Path) -> Tensor | str:
    """The logits of a small copy, or why there are none."""
    try:
        small = shrink(config)
        capable = runs_in_sdpa(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[config["model_type"]]], small.config)
        if kind is not FathomForCausalLM:  # they are written first
            write_twin(small.config, place / "small")
        settings = {"dtype": torch.float32, "attn_implementation": "sdpa" if capable else "eager"}
        model = kind.from_pretrained(place / "small", **settings).eval()
        with torch.no_grad():
            logits = whole(model, make_batch(small.tokens, read_as_class(small.config).vocab_size))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return logits if logits.isfinite().all() else "its logits are not finite"


@cache
def of_class(config: str, place: Path) -> Tensor:
    """The class's logits for a configuration without an edit."""
    found = run(AutoModelForCausalLM, json.loads(config), place.parent / "unedited")
    assert isinstance(found, Tensor)
    return found


def edited(base: Config, seed: int) -> tuple[str, str, Config]:
    """The kind of an edit, its words, and the configuration; in every eighth a key that another family declares."""
    if seed % 8:
        edit = draw(base, seed)
        return edit.kind, edit.words, edit.config
    chance = random.Random(seed)
    others = {(family, key) for family in BASES for key in declared({"model_type": family})}
    family, key = chance.choice(sorted((family, key) for family, key in others if key not in declared(base)))
    value = another(key, getattr(CONFIG_MAPPING[family], key, None), base, chance)
    return "of another family", f"{key}={json.dumps(value)}", {**base, key: value}


def sweep(family: str, seeds: range, place: Path) -> tuple[Counter[Any], list[str]]:
    """Try edits of a family; count their ends, and name those that must not be."""
    base, ends, wrong = config_of(BASES[family]), Counter[Any](), list[str]()
    with quiet():
        for seed in seeds:
            kind, words, config = edited(base, seed)
            one = attempt(config, base, place)
            ends[one.end] += 1
            if one.ignored and not is_strange(kind, words, base):
                ends["ignored", one.end] += 1
            if one.end == "other" or (one.end == "refused" and kind in HARMLESS):
                wrong.append(f"{family}, seed {seed}, {kind}: {words:.200}: {one.end}: {one.why:.200}")
    return ends, wrong


def is_strange(kind: str, words: str, base: Config) -> bool:
    """Whether an edit says something that the family's class does not know."""
    unknown = "rope_parameters" not in declared(base) or any(key in words for key in STRANGE_ROPE)
    return kind in STRANGE or (kind == "rope" and unknown)


@pytest.mark.quick("gpt2", "llama", "gpt_neox", "gemma3_text", "qwen3", "phi3")
@pytest.mark.parametrize("family", BASES)
def test_an_edit_of_every_family(family: str, tmp_path: Path) -> None:
    start = 8 * sorted(BASES).index(family)  # others for each family
    assert not sweep(family, range(start + 1, start + 2), tmp_path)[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", BASES)
def test_no_edit_opens_as_something_else(family: str, tmp_path: Path) -> None:
    ends, wrong = sweep(family, range(1000, 1500), tmp_path)
    print(family, dict(ends))
    assert not wrong, "\n".join(wrong)
    assert ends["ignored", "refused"] <= 0.02 * ends["ignored", "equal"] and ends["equal"] > 250, ends


def test_every_family_is_edited() -> None:
    assert BASES.keys() == FAMILIES.keys()


def test_an_edit_that_opens_as_something_else_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that drops a key is planted."""
    base = config_of("mistral-window")
    assert attempt({**base, "sliding_window": 3}, base, tmp_path).end == "equal"
    opened: Callable[..., Any] = FathomForCausalLM.from_pretrained
    monkeypatch.setattr(FathomForCausalLM, "from_pretrained", lambda *a, **k: opened(*a, **{**k, "sliding_window": 60}))
    assert attempt({**base, "sliding_window": 3}, base, tmp_path).end == "other"
    assert attempt({**base, "hidden_act": "none"}, base, tmp_path).end == "broken"
    assert attempt({**base, "use_cache": False}, base, tmp_path).ignored

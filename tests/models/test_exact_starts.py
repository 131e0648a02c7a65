"""What starts as the model that it was given: the table of docs/tutorials/deepen.md, measured."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import DEFAULTS, MECHANISMS

from .cases import BACKBONES, SHAPE, tokens, with_gains

KINDS = {
    "Qwen3": {},
    "Llama": BACKBONES["llama"],
    "GPT-NeoX": BACKBONES["neox"],
    "GPT-2": BACKBONES["gpt2"],
    "OLMo 2": BACKBONES["olmo2"],
    "Gemma": BACKBONES["gemma"],
}
TOGETHER = ("depth_attention", "attention_residuals", "loop")


@cache
def base(kind: str) -> tuple[FathomForCausalLM, torch.Tensor]:
    """A model without mechanisms whose queries and keys have gains of 3, and its logits."""
    torch.manual_seed(0)
    model = with_gains(FathomForCausalLM(FathomConfig(**SHAPE, initializer_range=0.1, **KINDS[kind])).eval())
    with torch.no_grad():
        return model, model(tokens(2, 24)).logits


def start(kind: str, *names: str) -> str:
    """How the logits of the model with closed mechanisms compare with those of the model without."""
    model, wanted = base(kind)
    keys: dict[str, object] = {}
    for one in (MECHANISMS[name] for name in names):
        keys |= {one.axis: one.name, f"{one.axis}_options": dict(one.closed or {})}
    torch.manual_seed(1)
    deeper = FathomForCausalLM(FathomConfig(**SHAPE, **KINDS[kind], **keys)).eval()
    deeper.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        found = deeper(tokens(2, 24), use_cache=False).logits
    return "exact" if torch.equal(found, wanted) else "no"


@cache
def starts() -> dict[str, tuple[str, str]]:
    """The closed options of each mechanism, and of three together, and how a model with it starts."""
    found = {}
    added = [name for name in MECHANISMS if name not in DEFAULTS.values()]
    for names in [*((name,) for name in added), TOGETHER]:
        closed = MECHANISMS[names[0]].closed
        options = ", ".join(f"`{key}: {value:g}`" for key, value in (closed or {}).items())
        by_kind = {kind: start(kind, *names) for kind in KINDS}
        alike = set(by_kind.values())
        said = alike.pop() if len(alike) == 1 else ", ".join(f"{kind}: {how}" for kind, how in by_kind.items())
        found["+".join(names)] = options, said
    return found


def table() -> str:
    """One row for each kind of start, with its mechanisms."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, start_of in starts().items():
        alike.setdefault(start_of, []).append(f"`{name}`")
    rows = [("options", ", ".join(KINDS), "mechanisms"), ("---",) * 3]
    rows += [(*start_of, ", ".join(names)) for start_of, names in alike.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.mark.slow
def test_all_but_two_start_exactly():
    """To the last bit, on every kind of backbone."""
    for name, (_, said) in starts().items():
        assert said == ("no" if name in ("ponder2", "ponder3") else "exact"), name

"""What starts as the model that it was given: the table of docs/tutorials/deepen.md, measured.

`python -m tests.models.test_exact_starts` writes it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import DEFAULTS, MECHANISMS

from .cases import BACKBONES, SHAPE, tokens, with_gains

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "deepen.md"
BEGIN, END = "<!-- exact starts: python -m tests.models.test_exact_starts -->\n", "<!-- end -->"
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
def table() -> str:
    """One row for each mechanism, and one for three together."""
    rows = [("mechanism", "options", *KINDS), ("---",) * (len(KINDS) + 2)]
    added = [name for name in MECHANISMS if name not in DEFAULTS.values()]
    for names in [*((name,) for name in added), TOGETHER]:
        closed = MECHANISMS[names[0]].closed
        options = ", ".join(f"`{key}: {value:g}`" for key, value in (closed or {}).items())
        cells = [start(kind, *names) for kind in KINDS]
        rows.append((f"`{'+'.join(names)}`", options, *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.mark.slow
def test_the_page_has_the_table():
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    assert before and rest.partition(END)[0] == table()


@pytest.mark.parametrize("residual", ["denseformer", "attention_residuals", "hyper_connections", "mudd"])
def test_a_parallel_layer_sums_as_its_family_does(residual: str) -> None:
    """In bfloat16 another order of the sums shows in most logits."""
    torch.manual_seed(0)
    model = with_gains(FathomForCausalLM(FathomConfig(**SHAPE, initializer_range=0.1, **KINDS["GPT-NeoX"])).eval())
    closed = {"residual": residual, "residual_options": dict(MECHANISMS[residual].closed or {})}
    deeper = FathomForCausalLM(FathomConfig(**SHAPE, **KINDS["GPT-NeoX"], **closed)).eval()
    deeper.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        one, other = (each.bfloat16()(tokens(2, 9), use_cache=False).logits for each in (model, deeper))
    assert torch.equal(one, other)


@pytest.mark.slow
def test_all_but_two_start_exactly():
    """To the last bit, on every kind of backbone."""
    for line in table().splitlines()[2:]:
        name, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert set(cells) == {"no" if name in ("`ponder2`", "`ponder3`") else "exact"}, name


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")

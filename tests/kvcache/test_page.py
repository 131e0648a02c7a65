"""The types of models that the page on compressed caches names: `python -m tests.kvcache.test_page` writes the list."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from fathom.kvcache import METHODS
from fathom.kvcache.rope import Rope, refuse

from .cases import MODELS
from .test_recursion import THEIRS
from .test_states import CHANGES

PAGE = Path(__file__).parents[2] / "docs/how-to/kvcache.md"
SHARING = ("gemma4_text",)
FAMILIES = sorted({MODELS[case][0] for case in THEIRS} | {*CHANGES, *SHARING})
LISTED = re.compile(r"(?<=published defaults:\n\n).*?(?=\n\nRefused)", re.DOTALL)


def listed() -> str:
    """The list, in lines of the page's width."""
    lines, line = [], ""
    for name in (f"`{family}`" for family in FAMILIES):
        if len(line) + len(name) > 150:
            lines, line = [*lines, line], ""
        line = f"{line}, {name}" if line else name
    return ",\n".join([*lines, line])


def test_the_page_names_what_the_oracle_is_compared_with():
    assert LISTED.search(PAGE.read_text())[0] == listed()


def test_the_page_has_every_method():
    text = PAGE.read_text()
    ours = {name for name, method in METHODS.items() if method.__module__.startswith("fathom.")}
    assert len(ours) > 10 and {name for name in ours if f"`{name}`" not in text} == set()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_published_defaults(family):
    """Sizes and layers as the family's own configuration has them, not as a small test has."""
    config = AutoConfig.for_model(family)
    windows = getattr(config, "layer_types", None) or getattr(config, "sliding_window", None)
    if family == "granitemoehybrid":  # these have no attention by default
        config.layer_types = ["linear_attention", "full_attention"] * (config.num_hidden_layers // 2)
    if family == "bamba":
        config.attn_layer_indices = [9, 18, 27]
    refuse(config, 1024 if windows else 1 << 40)
    Rope(config)


if __name__ == "__main__":
    PAGE.write_text(LISTED.sub(lambda _: listed(), PAGE.read_text()))

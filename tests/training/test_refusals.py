"""Values of a recipe that mean nothing together: one line names the key, the value and what is allowed."""

from __future__ import annotations

import re

import pytest

from fathom.errors import SettingsError
from fathom.recipe import Recipe

FREQKV = ("data.packing=windows", "kvcache.method=freqkv", "kvcache.window=16", "kvcache.sinks=2")
SINKS = (*FREQKV, "kvcache.method=sinks")
MIXED = ("data.mixture={rivers: 0.25, seas: 0.75}",)
SHARES = "shares of 0 or more, one of them above 0"
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("kvcache.method=dct",), "kvcache.method=dct: allowed: one of full, average, drop, expected_attention, freqkv"),
    (("kvcache.window=16",), "kvcache.window=16: allowed: null"),
    (("kvcache.sinks=2",), "kvcache.sinks=2: allowed: 4, because kvcache.method=full compresses nothing"),
    (("kvcache.ratio=0.25",), "kvcache.ratio=0.25: allowed: 0.5, because"),
    ((*FREQKV, "kvcache.window=null"), "kvcache.window=null: kvcache.method=freqkv needs it"),
    ((*FREQKV, "kvcache.window=32"), "kvcache.window=32: allowed: less than data.sequence_length=32"),
    ((*FREQKV, "kvcache.sinks=8"), "kvcache.sinks=8: allowed: 0 to 7"),
    ((*SINKS, "kvcache.sinks=15"), "kvcache.sinks=15: allowed: 0 to 14 with this window"),
    ((*SINKS, "kvcache.ratio=0.25"), "kvcache.ratio=0.25: allowed: 0.5, with kvcache.method=sinks"),
    ((*FREQKV, "kvcache.ratio=1.5"), "kvcache.ratio=1.5: allowed: a share"),
    (("kvcache.kept=7",), "kvcache.kept=7: allowed: null, because"),
    ((*FREQKV, "kvcache.kept=14"), "kvcache.kept=14: allowed: 1 to 13 with this window and sinks"),
    ((*FREQKV, "kvcache.kept=7", "kvcache.ratio=0.25"), "kvcache.ratio=0.25: allowed: 0.5, with kvcache.kept"),
    ((*FREQKV, "kvcache.kept=7", "kvcache.sinks=15"), "kvcache.sinks=15: allowed: 0 to 14 with this window"),
    ((*FREQKV, "data.packing=documents"), "data.packing=documents: allowed: windows"),
    (("lora.rank=4",), "lora.rank=4: allowed: null, without model.from_pretrained"),
    (("lora.rank=0",), "lora.rank=0: allowed: 1 or more, or null"),
    (("lora.dropout=1",), "lora.dropout=1.0: allowed: a share"),
    (("lora.rank=4", "model.from_pretrained=BASE", "optim.only=[lm_head]"), "empty, with lora.rank"),
    (("distill.weight=0",), "distill.weight=0.0: allowed: a share above 0 and up to 1"),
    (("distill.temperature=0",), "distill.temperature=0.0: allowed: a positive number"),
    (("distill.teacher=x", *FREQKV), "distill.teacher=x: allowed: null, with kvcache.method"),
    (("data.mixture={rivers: -1}",), SHARES),
    (("data.mixture={rivers: 0}",), SHARES),
    (("data.mixture={rivers: .inf}",), "data.mixture="),
    (("data.mixture=[rivers]",), "a mapping of names to a number"),
    (("data.phases=[{at: 0.5, mixture: {rivers: 1}}]",), "none, without data.mixture"),
    (("data.directory=puzzle:hops", "data.mixture={rivers: 1}"), "none, with data.directory=puzzle:hops"),
    *(
        ((*MIXED, f"data.phases={phases}"), "data.phases=")
        for phases in (
            "[{at: 0.5}]",
            "[{at: 1.5, mixture: {seas: 1}}]",
            "[{at: 0, mixture: {seas: 1}}]",
            "[{at: 8, mixture: {seas: 1}}]",
            "[{at: 5, mixture: {seas: 1}}, {at: 0.5, mixture: {seas: 1}}]",
            "[{at: 0.5, mixture: {}}]",
        )
    ),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_what_contradicts_itself_is_refused(recipe: Recipe, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(says)) as error:
        recipe.override(*words)
    assert "\n" not in str(error.value) and str(error.value).startswith(
        ("kvcache.", "lora.", "distill.", "data.", "optim.")
    )

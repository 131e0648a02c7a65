"""Values of a recipe that mean nothing together: one line names the key, the value and what is allowed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.recipe import Recipe
from tests.tiny import export_tiny

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
    (("data.mixture={rivers: 1, seas: 1e-5}",), "shares of 0, or of at least 1 in 20,000 of their sum"),
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


FROM_BASE = ("model=null", "model.from_pretrained=BASE")
AT_THE_START = [
    (FROM_BASE, "its tokenizer"),
    (
        (*FROM_BASE, "data.other_tokenizer=true", "distill.teacher=./nowhere"),
        "distill.teacher=./nowhere: neither a directory with a config.json",
    ),
    (("data.other_tokenizer=true", "distill.teacher=BASE"), "the teacher has vocab_size=384, but the model 304"),
    (("distill.teacher=BASE",), "its tokenizer"),
    ((*FROM_BASE, "lora.rank=4"), "LoRA needs peft"),
    (("train.micro_batch=3",), "allowed: a divisor of 8 sequences per rank"),
    (("model.vocab_size=200",), "does not fit a model with vocab_size=200"),
]
"""What contradicts the data, the checkpoint or the installation, and not the recipe itself."""


@pytest.mark.parametrize(("words", "says"), AT_THE_START)
def test_a_dry_run_refuses_what_the_run_refuses(
    recipe: Recipe,
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    base = export_tiny(tmp_path / "base", mixer="none")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    capsys.readouterr()
    given = ["train", str(tmp_path / "recipe.yaml"), "--run", str(tmp_path / "run")]
    given += [word.replace("BASE", str(base)) for word in words]
    complaints = []
    for more in ([], ["--dry-run"]):
        assert main([*given, *more]) == 2
        complaints.append(capsys.readouterr().err)
    assert complaints[0] == complaints[1] and says in complaints[0]
    assert main([*given[:4], "--dry-run"]) == 0, "the recipe itself is not refused"

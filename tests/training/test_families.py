"""Other families' checkpoints, continued: with mechanisms, with adapters, under a compressed cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fathom.checkpoints.export import export
from fathom.kvcache import build_cache, compress_in_training
from fathom.models import FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training.loop import train
from tests.checkpoints.families.cases import KINDS, stock
from tests.tiny import tiny_recipe

VOCAB = 304
LORA = ("lora.rank=2", "optim.weight_decay=0")
ADAPTED = ("lora.rank=2", "lora.targets=[q_proj, k_proj, v_proj, o_proj]", "lora.whole=[embed_tokens, '*norm']")
FREQKV = ("kvcache.method=freqkv", "kvcache.window=16", "kvcache.sinks=2", *ADAPTED)


def continued(corpus: Path, base: Path, *words: str) -> Recipe:
    short = ("train.steps=2", "evaluate.every=0", "evaluate.tokens=256")
    recipe = tiny_recipe(corpus, *short, "train.export=true", "data.packing=windows")
    return recipe.override("model=null", f"model.from_pretrained={base}", *words)


def saved(case: str, folder: Path) -> Path:
    stock(KINDS[case], vocab_size=VOCAB).save_pretrained(folder / "base")
    return folder / "base"


@pytest.mark.quick("learned-words2", "parallel-words4", "rms-words1")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("parallel", ("model.recurrence=adaponder", "model.recurrence_options={trips: 2}")),
        ("rms", ("model.recurrence=latent_cot", "model.recurrence_options={trips: 2}")),
        ("learned", ("model.recurrence=ponder", "model.recurrence_options={trips: 2}")),
        ("after", ("model.mixer=depth_attention",)),
        ("parallel", ("model.residual=hyper_connections",)),
    ],
)
def test_a_checkpoint_goes_on_with_a_mechanism(kind: str, words: tuple[str, ...], corpus: Path, tmp_path: Path) -> None:
    result = train(continued(corpus, saved(kind, tmp_path), *words), tmp_path / "run")
    model = FathomForCausalLM.from_pretrained(result.model)
    axis, _, value = words[0].removeprefix("model.").partition("=")
    assert getattr(model.config, axis) == value and result.finished


@pytest.mark.quick("learned", "rms")
@pytest.mark.parametrize("kind", KINDS)
def test_continued_without_mechanisms_it_goes_back(kind: str, corpus: Path, tmp_path: Path) -> None:
    result = train(continued(corpus, saved(kind, tmp_path)), tmp_path / "run")
    export(FathomForCausalLM.from_pretrained(result.model), tmp_path / "back", form="native")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    ours = FathomForCausalLM.from_pretrained(result.model).eval()
    assert theirs.config.model_type == stock(KINDS[kind]).config.model_type
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)


@pytest.mark.quick("after", "parallel")
@pytest.mark.parametrize("kind", KINDS)
def test_adapters(kind: str, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert train(continued(corpus, saved(kind, tmp_path), *LORA), tmp_path / "run").finished


def test_a_llama_is_tuned_for_freqkv_as_the_paper_does(corpus: Path, tmp_path: Path) -> None:
    """By one command: adapters, embeddings and norms under compression. What is exported is that family's own model,
    which says what it was tuned for, and reads through the cache what training saw."""
    pytest.importorskip("peft")
    base = saved("rms", tmp_path)
    result = train(continued(corpus, base, *FREQKV, "train.steps=8", "optim.lr=1e-2"), tmp_path / "run")
    assert result.finished
    export(FathomForCausalLM.from_pretrained(result.model), tmp_path / "back", form="native")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    before = AutoModelForCausalLM.from_pretrained(base).eval()
    assert type(theirs) is type(before) and theirs.config.model_type == "llama"
    moved = {name for name, p in theirs.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert any("q_proj" in name for name in moved) and not any("mlp" in name for name in moved)
    assert any("embed_tokens" in name for name in moved) and any("layernorm" in name for name in moved)
    ids = torch.randint(3, VOCAB, (4, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        through = theirs(ids, past_key_values=build_cache(theirs, "freqkv", window=16, sinks=2)).logits
        with compress_in_training(theirs, "freqkv", window=16, sinks=2):
            assert (theirs(ids, use_cache=False).logits - through).abs().max() < 1e-5

"""Adapters in place of weights: what trains, what is written beside the checkpoints, and what the export is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fathom.checkpoints.export import export
from fathom.errors import ModelError, SettingsError
from fathom.models import FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training import build_training, train
from fathom.training.estimate import estimate
from tests import processes
from tests.tiny import tiny_recipe

from .conftest import StopAt

IDS = torch.arange(32).view(1, 32)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_adapters_train_and_are_merged_and_resume(recipe: Recipe, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = train(recipe.override("train.export=true"), tmp_path / "base").model
    tuned = recipe.override(
        *(f"model.from_pretrained={base}", "train.export=true", "train.steps=4", "train.checkpoint_every=2"),
        *("lora.rank=2", "lora.targets=[q_proj, v_proj, up_proj]", "optim.lr=0.02", "train.keep_last=5"),
    )
    training = build_training(tuned)
    trained = {name for name, p in training.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 3 * 2 and all(".lora_" in name for name in trained)
    held, adapters = (
        sum(p.numel() for p in numbers.values()) for numbers in (training.weights(), training.optimizer.parameters)
    )
    cost = estimate(tuned)
    assert cost.parameters == held - adapters and cost.trained_parameters == adapters
    assert cost.state_bytes == 4 * held + 12 * adapters, "frozen weights have no gradient and no moments"
    assert {name.removesuffix(".weight") for name in training.optimizer.parameters} == {
        name.removesuffix(".weight") for name in trained
    }

    whole = train(tuned, tmp_path / "whole")
    assert whole.model is not None and base is not None
    plain, merged = (FathomForCausalLM.from_pretrained(path) for path in (base, whole.model))
    moved = {name for name, p in plain.named_parameters() if not torch.equal(p, merged.get_parameter(name))}
    assert moved == {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
    }
    # The adapters beside the checkpoints, put on the base by peft itself, are the exported model.
    adapter = tmp_path / "whole" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    found = peft.PeftModel.from_pretrained(FathomForCausalLM.from_pretrained(base), adapter)
    assert torch.allclose(logits(found), logits(merged), atol=1e-5)
    assert not torch.allclose(logits(plain), logits(merged), atol=1e-3)

    # Stopped half-way and gone on with, the same weights; what goes on from it begins with the merged ones.
    half = build_training(tuned)
    for step in range(2):
        half.step(step)
    (tmp_path / "whole" / "result.json").unlink()
    (tmp_path / "whole" / "step-000004").rename(tmp_path / "gone")
    again = train(tuned, tmp_path / "whole")
    assert again.step == 4
    assert torch.equal(logits(FathomForCausalLM.from_pretrained(again.model)), logits(merged))
    onward = build_training(recipe.override(f"model.from_pretrained={tmp_path / 'whole'}"))
    assert torch.equal(logits(onward.model), logits(merged))
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "recipe.yaml").write_text(tuned.to_yaml())
    with pytest.raises(ModelError, match="adapters"):
        export(tmp_path / "unfinished", tmp_path / "out")


def test_a_module_that_is_not_there(recipe: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = train(recipe.override("train.export=true", "train.steps=1"), tmp_path / "base").model
    with pytest.raises(SettingsError, match=r"lora\.targets: this model has no module c_attn"):
        build_training(recipe.override(f"model.from_pretrained={base}", "lora.rank=2", "lora.targets=[c_attn]"))


@pytest.mark.parametrize("key", ["lora.targets=[q_proj, lm_head]", "lora.whole=[lm_head]"])
def test_a_tied_head_takes_no_adapter_of_its_own(recipe: Recipe, key: str, tmp_path: Path) -> None:
    """Its export could not be what was trained: the embedding would change too, or the trained head be lost."""
    pytest.importorskip("peft")
    base = train(recipe.override("train.export=true", "model.tie_word_embeddings=true", "train.steps=1"), tmp_path)
    with pytest.raises(SettingsError, match=r"lm_head shares its weight with the input embedding.*embed_tokens"):
        build_training(recipe.override(f"model.from_pretrained={base.model}", "lora.rank=2", key))


@pytest.mark.slow
def test_adapters_are_merged_in_half_precision_too(recipe: Recipe, tmp_path: Path) -> None:
    """Where the model is sharded, even over one process, so that it can be neither copied nor merged."""
    pytest.importorskip("peft")
    base = train(recipe.override("train.export=true", "train.steps=1"), tmp_path / "base").model
    words = (f"model.from_pretrained={base}", "train.precision=bf16", "train.export=true", "lora.rank=2")
    run = train(recipe.override(*words), tmp_path / "run")
    assert run.model is not None
    FathomForCausalLM.from_pretrained(run.model)


def adapted(corpus: Path, base: Path, *words: str) -> Recipe:
    """Adapters and an embedding that trains whole beside them."""
    lora = ("lora.rank=2", "lora.whole=[embed_tokens]", f"model.from_pretrained={base}")
    return tiny_recipe(corpus, *lora, "train.export=true", "optim.lr=0.02", *words)


def train_on_two_ranks(corpus: Path, base: Path, folder: Path) -> None:
    for name in ("ddp", "fsdp"):
        train(adapted(corpus, base, f"parallel.name={name}"), folder / name)
    train(adapted(corpus, base, "parallel.name=fsdp"), folder / "one-then-two")
    assert not train(adapted(corpus, base), folder / "two-then-one", callbacks=[StopAt(4)]).finished


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One base, adapted by one process, by two ranks, and by one after the other."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapted")
    base = train(tiny_recipe(corpus, "train.export=true"), folder / "base").model
    assert base is not None
    train(adapted(corpus, base), folder / "single")
    train(adapted(corpus, base, "lora.alpha=2"), folder / "weaker")
    assert not train(adapted(corpus, base), folder / "one-then-two", callbacks=[StopAt(4)]).finished
    processes.run_ranks(2, train_on_two_ranks, corpus, base, folder)
    train(adapted(corpus, base), folder / "two-then-one")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "one-then-two", "two-then-one"])
def test_two_ranks_adapt_like_one(runs: Path, name: str) -> None:
    """Losses as of whole weights (`test_parallel.py`); what peft opens and what is merged, tensor by tensor."""
    single = processes.losses(runs / "single")
    assert processes.losses(runs / name) == pytest.approx(single, rel=1e-6)
    assert processes.losses(runs / "weaker") != pytest.approx(single, rel=1e-4), "adapters that count half would show"
    for file in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        ours, theirs = load_file(runs / name / file), load_file(runs / "single" / file)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.allclose(tensor, theirs[key], atol=1e-5), key
        weaker = load_file(runs / "weaker" / file)
        assert not all(torch.allclose(tensor, theirs[key], atol=1e-3) for key, tensor in weaker.items())

"""Training under a compressed cache: what is computed, what the export says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.checkpoints.export import export
from fathom.cli.main import main
from fathom.errors import ModelError, SettingsError
from fathom.kvcache import METHODS, NAMES, build_cache, chunks, compress_in_training
from fathom.models import FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training import build_training, train
from fathom.training.kvcache import compressions

FREQKV = ("data.packing=windows", "kvcache.method=freqkv", "kvcache.window=16", "kvcache.sinks=2")
ADAPTED = ("lora.rank=2", "lora.targets=[q_proj, k_proj, v_proj, o_proj]", "lora.whole=[embed_tokens, '*norm']")
"""As FreqKV's paper tunes."""


def logits_through_a_cache(model: Any, ids: torch.Tensor, kept: int | None = None) -> torch.Tensor:
    cache = build_cache(model, "freqkv", window=16, sinks=2, kept=kept)
    return torch.cat([model(chunk, past_key_values=cache, use_cache=True).logits for chunk in chunks(ids, cache)], 1)


def test_a_step_trains_what_the_cache_will_compute(recipe: Recipe) -> None:
    training = build_training(recipe.override(*FREQKV))
    batch = training.plan.batch(0, micro_batch=2)[0]
    assert compressions(training.recipe) == 2
    seen = training.model(batch.input_ids, use_cache=False).logits
    plain = FathomForCausalLM(recipe.config())
    plain.load_state_dict(training.model.state_dict())
    with torch.no_grad():
        assert torch.allclose(seen, logits_through_a_cache(plain.eval(), batch.input_ids), atol=1e-5)
    # The control, with gradients as a step has them: without compression it is something else, beyond the window only.
    full = plain(batch.input_ids).logits
    assert torch.equal(full[:, :16], seen[:, :16])
    assert not torch.allclose(full[:, 16:], seen[:, 16:], atol=1e-3)


def test_a_recipe_may_count_what_is_kept(recipe: Recipe) -> None:
    """The published schedule, L = γ(N − S), is no share of the window: seven of fourteen entries, not six."""
    counted, shared = recipe.override(*FREQKV, "kvcache.kept=7"), recipe.override(*FREQKV)
    training, plain = build_training(counted), build_training(shared)
    plain.model.load_state_dict(training.model.state_dict())
    ids = training.plan.batch(0, micro_batch=2)[0].input_ids
    assert training.model.config.kvcache == {
        "method": "freqkv",
        "window": 16,
        "sinks": shared.kvcache.sinks,
        "ratio": 0.5,
        "kept": 7,
    }
    seen = training.model(ids, use_cache=False).logits
    weights = FathomForCausalLM(recipe.config())
    weights.load_state_dict(training.model.state_dict())
    with torch.no_grad():
        assert torch.allclose(seen, logits_through_a_cache(weights.eval(), ids, kept=7), atol=1e-5)
    assert not torch.allclose(seen, plain.model(ids, use_cache=False).logits, atol=1e-3), "the control: six are kept"
    assert [compressions(each) for each in (counted, shared)] == [3, 2]


def test_recomputing_activations_changes_nothing(recipe: Recipe) -> None:
    losses = []
    for again in ("false", "true"):
        training = build_training(recipe.override(*FREQKV, f"train.activation_checkpointing={again}"))
        losses.append([training.step(step).loss.item() for step in range(3)])
    assert losses[0] == losses[1]


def test_an_export_says_what_it_was_tuned_for(recipe: Recipe, tmp_path: Path) -> None:
    tuned = recipe.override(*FREQKV, "train.export=true", "train.steps=2")
    result = train(tuned, tmp_path / "run")
    recorded = {"method": "freqkv", "window": 16, "sinks": 2, "ratio": 0.5, "kept": None}
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert result.model is not None and config["kvcache"] == recorded
    assert "fathom_kvcache" not in json.dumps(config)  # anybody opens it, with an ordinary cache
    assert FathomForCausalLM.from_pretrained(result.model).config.kvcache == recorded

    # Tuned on without compression, the weights are no longer those of that schedule.
    back = recipe.override(f"model.from_pretrained={result.model}", "train.export=true", "train.steps=1")
    assert train(back, tmp_path / "back").model is not None
    assert json.loads((tmp_path / "back" / "model" / "config.json").read_text())["kvcache"] is None


@pytest.mark.slow
def test_adapters_are_merged_in_the_export(recipe: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tied = recipe.override("train.export=true", "model.tie_word_embeddings=true")  # as most small models are
    base = FathomForCausalLM.from_pretrained(train(tied, tmp_path / "base").model)
    words = (*FREQKV, *ADAPTED, f"model.from_pretrained={tmp_path / 'base' / 'model'}")
    tuned = recipe.override(*words, "train.export=true", "train.steps=4")

    whole = train(tuned, tmp_path / "whole")
    half = build_training(tuned)
    for step in range(4):
        half.step(step)
    model = FathomForCausalLM.from_pretrained(whole.model)
    ids = torch.arange(32).view(1, 32)
    assert half.adapters is not None
    with torch.no_grad(), compress_in_training(model.eval(), "freqkv", window=16, sinks=2):
        assert torch.allclose(model(ids).logits, half.model.eval()(ids, use_cache=False).logits, atol=1e-5)
    moved = {name for name, p in base.named_parameters() if not torch.equal(p, model.get_parameter(name))}
    assert {n for n in moved if "proj" in n} == {
        f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qkvo"
    }
    assert {n for n in moved if "norm" in n or "embed" in n} and not any("mlp" in name for name in moved)
    with pytest.raises(ModelError, match="adapters"):
        (tmp_path / "unfinished").mkdir()
        (tmp_path / "unfinished" / "recipe.yaml").write_text(tuned.to_yaml())
        export(tmp_path / "unfinished", tmp_path / "out")


def test_every_method_of_a_recipe_exists() -> None:
    """Left out: `learned`, which has weights of its own."""
    assert set(NAMES) == {"full", *METHODS} - {"learned"}


def test_a_model_that_cannot_is_refused(recipe: Recipe) -> None:
    with pytest.raises(SettingsError, match=r"kvcache\.method=freqkv: k_norm_position"):
        build_training(recipe.override(*FREQKV, "model.k_norm_position=after_rope"))


def test_a_dry_run_counts_compressions(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert main(["train", str(path), *FREQKV, "--dry-run"]) == 0
    assert "compressions     2 per sequence, freqkv" in capsys.readouterr().out
    assert main(["train", str(path), "--dry-run"]) == 0
    assert "compressions" not in capsys.readouterr().out

"""FLOPs of a step that trains a part of a model are those of a counter on the model itself."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fathom.data.batches import Batch
from fathom.experiments.arms import arm_recipes, parse_arms
from fathom.models import FathomForCausalLM
from fathom.models.cost import training_flops_per_token
from fathom.recipe import Recipe, load_recipe
from fathom.training.build import forward
from fathom.training.distill import distilled
from fathom.training.estimate import estimate
from fathom.training.optimizer import freeze
from fathom.training.trained_flops import step_flops, trained_share

LENGTH = 63
SMALL = [f"data.sequence_length={LENGTH}", "train.tokens_per_step=126", "train.micro_batch=2", "model.mixer=none"]


def small(*words: str) -> Recipe:
    """The tiny recipe with short sequences."""
    return load_recipe("recipes/tiny.yaml", [*SMALL, *words])


def counted(recipe: Recipe, prepare) -> float:
    """FLOPs per token of a real step on real numbers."""
    model = FathomForCausalLM(recipe.config()).train()
    model.set_attn_implementation("eager")
    model = prepare(model)
    ids = torch.randint(3, 50, (2, (LENGTH + 1) // 2))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.quick("model.layers.1.*")
@pytest.mark.parametrize("only", ["model.layers.1.*", "model.layers.3.mlp.*", "lm_head.*", "model.layers.2.*, experts"])
def test_frozen_weights_are_counted_as_a_counter_does(only):
    only, *sparse = only.split(", ")
    recipe = small(f"optim.only=[{only}]", "model.tie_word_embeddings=false", *(f"model.{key}=5" for key in sparse))

    def prepare(model):
        freeze(model, recipe.optim.only)
        return model

    found, whole = counted(recipe, prepare), training_flops_per_token(recipe.config(), LENGTH)
    assert step_flops(recipe) == pytest.approx(found, rel=0.02)
    assert whole > 1.2 * found, "all weights cost more"


@pytest.mark.quick("scaled")
@pytest.mark.parametrize(
    "head",
    [["model.logits_scaling=2.0"], ["model.recurrence=loop", "model.recurrence_options={early_loss: 0.5}"]],
    ids=["scaled", "early"],
)
def test_logits_that_a_frozen_model_makes_again_are_counted(head):
    """A scaled head's twice on every device; of the losses of early iterations, each once."""
    recipe = small("optim.only=[lm_head.*]", "model.tie_word_embeddings=false", "model.vocab_size=1000", *head)

    def prepare(model):
        freeze(model, recipe.optim.only)
        return model

    assert step_flops(recipe) == pytest.approx(counted(recipe, prepare), rel=0.01)


@pytest.mark.slow
def test_gates_alone_cost_two_thirds_of_a_step():
    """Forward and the gradients of activations, but none of the weights: 4 P in place of 6 P."""
    share = trained_share(small("optim.only=['*gates*']", "model.mixer=value_gain"))
    assert 0.6 < share < 0.72


def test_adapters_are_counted_as_a_counter_does():
    peft = pytest.importorskip("peft")
    base = small("model.mixer=none")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    found = counted(base, lambda model: peft.get_peft_model(model, config))
    words = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
    recipe = base
    object.__setattr__(recipe, "lora", type(base.lora)(**words["lora"]))  # a recipe with LoRA must have a model
    assert step_flops(recipe) == pytest.approx(found, rel=0.02)
    assert training_flops_per_token(recipe.config(), LENGTH) > 1.2 * found


def test_all_weights_cost_what_they_did():
    recipe = small()
    assert trained_share(recipe) == 1.0
    assert step_flops(recipe) == training_flops_per_token(recipe.config(), LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("recurrence", ["loop", "ponder2", "adaponder", "latent_cot"])
def test_every_recurrence_is_counted(recurrence):
    """With tokens that halt and are left out too."""
    halts = ["model.recurrence_options={skip_dead_rows: true}"] if recurrence in ("adaponder", "latent_cot") else []
    share = trained_share(small(f"model.recurrence={recurrence}", "optim.only=[model.layers.1.*]", *halts))
    assert 0.6 < share < 0.9


@pytest.mark.slow
def test_a_frozen_arm_gets_more_steps_at_equal_flops():
    """And its estimate says what it costs."""
    base = small("train.steps=100")
    arms = parse_arms("vanilla,frozen=vanilla;optim.only=[model.layers.1.*]")
    recipes = arm_recipes(base, arms, "flops")
    share = trained_share(recipes["frozen"])
    assert recipes["frozen"].train.steps == round(100 / share) > 125
    assert estimate(recipes["frozen"]).training_flops == pytest.approx(
        estimate(recipes["vanilla"]).training_flops, rel=0.01
    )


@pytest.mark.parametrize("only", [[], ["model.norm"], ["lm_head"]])
def test_distillation_is_counted_as_a_counter_does(tmp_path: Path, only: list[str]) -> None:
    """The teacher reads every token, and the divergence needs the model's logits."""
    teacher = FathomForCausalLM(small("model.num_hidden_layers=2").config()).eval().requires_grad_(False)
    teacher.save_pretrained(tmp_path)
    trains = f"optim.only={json.dumps(only)}", "model.tie_word_embeddings=false"
    recipe = small(f"distill.teacher={tmp_path}", *trains)
    model = FathomForCausalLM(recipe.config()).train()
    freeze(model, recipe.optim.only)
    for one in (model, teacher):
        one.set_attn_implementation("eager")
    ids = torch.randint(3, 50, (2, (LENGTH + 1) // 2))
    batch = Batch(ids, ids, None, ids.numel())
    with FlopCounterMode(display=False) as counter:
        distilled(forward(model, batch, with_logits=True), teacher, batch, recipe.distill).loss.backward()
    found, alone = counter.get_total_flops() / ids.numel(), step_flops(small(*trains))
    assert step_flops(recipe) == pytest.approx(found, rel=0.02)
    assert found > 1.2 * alone
    assert estimate(recipe).training_flops == pytest.approx(step_flops(recipe) * estimate(recipe).tokens)

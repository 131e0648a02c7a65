"""The families' own loss that balances experts: one trip's is the family's, several trips' is the mean of each."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from fathom import FathomForCausalLM
from fathom.models.hosts.router import Balance, Router
from tests.tiny import tiny_config

from .cases import SHAPES, ours_of, theirs_of, tokens

LOOP: dict[str, Any] = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
FAST = ("qwen3_moe", "gpt_oss", "granitemoehybrid")


def balanced() -> list[Any]:
    """The families that have the loss."""
    rest = ("qwen2_moe", "olmoe", "flex_olmo", "mixtral", "phimoe", "minimax_m2", "ernie4_5_moe", "granitemoe")
    rest += ("granitemoeshared", "qwen3_next", "qwen3_5_moe_text", "jamba", "flint", "mellum")
    return [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in rest)]


def trained(model: Any, seed: int = 5, **inputs: Any) -> Any:
    """The output of a pass of training with labels, some of which are ignored."""
    ids = tokens()
    labels = ids.clone()
    labels[0, :5] = -100
    torch.manual_seed(seed)  # Phi's router draws
    return model.train()(ids, labels=labels, **inputs)


@pytest.mark.parametrize("name", balanced())
@pytest.mark.parametrize("padded", [False, True])
def test_one_trip_has_the_familys_loss(name, padded):
    theirs = theirs_of(name, **ASKED)
    if "router_logits" not in theirs.model._can_record_outputs:
        pytest.skip("this transformers does not record its routers")
    ours = ours_of(theirs)
    mask = torch.ones_like(tokens())
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # the family's class would count the padding
    inputs = {"attention_mask": mask, "position_ids": positions} if padded else {}
    got, expected = trained(ours, **inputs), trained(theirs, **inputs)
    assert torch.equal(got.aux_losses["router"], 0.7 * expected.aux_loss)
    assert (got.loss - expected.loss).abs() <= 2e-6 * expected.loss
    got.loss.backward(), expected.loss.backward()
    mine = dict(ours.named_parameters())
    routers = [key for key, part in ours.named_modules() if isinstance(part, Router)]
    assert len(routers) >= 2
    for key in routers:
        for part, parameter in theirs.get_submodule(key).named_parameters(prefix=key):
            if parameter.grad is not None:
                assert parameter.grad.abs().max() > 0
                assert (mine[part].grad - parameter.grad).abs().max() <= 1e-5 * (1 + parameter.grad.abs().max())


def test_the_load_of_the_busiest_expert():
    """Over the tokens that count: in the first layer expert 0 is chosen by all, in the second each of four once."""
    logits = torch.zeros(2, 6, 4)
    logits[0, :, 0] = 1
    logits[1, range(6), [0, 1, 2, 3, 0, 0]] = 1
    balance, mask = Balance(lambda *_: torch.zeros(()), 1.0, 1), torch.tensor([[True] * 4 + [False] * 2])
    assert balance.load(logits, mask).item() == (4 + 1) / 2
    assert balance.load(logits, None).item() == (4 + 2) / 2


def test_a_family_that_records_no_routers_is_refused(monkeypatch):
    """As Granite's hybrid in transformers 5.16, whose own loss is 0 there without a word."""
    theirs = theirs_of("qwen3_moe", **ASKED)
    monkeypatch.setattr(type(theirs.model), "_can_record_outputs", {})
    with pytest.raises(
        ValueError, match=r"qwen3_moe: transformers .* records no router logits, .* set output_router_logits"
    ):
        ours_of(theirs)
    ours_of(theirs_of("qwen3_moe"))  # the control asks for no loss


@pytest.mark.slow
def test_every_family_with_the_loss_is_tried():
    having = {getattr(case, "values", [case])[0] for case in balanced()}
    for name in SHAPES:
        module = inspect.getmodule(MODEL_MAPPING[CONFIG_MAPPING[name]])
        assert hasattr(module, "load_balancing_loss_func") == (name in having), name


def test_it_is_added_in_training_and_if_asked_for():
    model = ours_of(theirs_of("qwen3_moe"))
    assert trained(model).aux_losses is None
    model = ours_of(theirs_of("qwen3_moe", **ASKED))
    assert model.eval()(tokens(), labels=tokens()).aux_losses is None
    assert ours_of(theirs_of("qwen3_moe", **{**ASKED, "router_aux_loss_coef": 0.0})).model.balance is None


def test_trips_do_not_balance_each_other(monkeypatch):
    """All tokens to one expert in trip 1, to the other in trip 2: each trip's loss is the worst, 2."""
    settings = {"num_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True, "router_aux_loss_coef": 1.0}
    model = ours_of(theirs_of("qwen3_moe", **settings), **LOOP)
    given: list[torch.Tensor] = []

    def planted(router: Router) -> torch.Tensor:
        shape, expert = router.logits.shape, len(given) // len(model.model.layers)  # type: ignore[union-attr]
        given.append(torch.full(shape, -50.0).index_fill(1, torch.tensor([expert]), 50.0))
        return given[-1]

    monkeypatch.setattr(Router, "taken", planted)
    found = trained(model)
    assert found.aux_losses["router"].item() == pytest.approx(2.0)
    assert found.metrics["expert_load"].item() == 2.0, "one of two experts gets all, in each trip"
    pooled = model.model.balance.function(tuple(given), 2, 1, None)
    assert pooled.item() == pytest.approx(1.0), "the control: pooled over trips, nothing is seen"


def gradients(model: FathomForCausalLM) -> dict[str, torch.Tensor]:
    """Of a pass of training."""
    model.zero_grad()
    trained(model).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mechanism", [{**LOOP, "residual": "hyper_connections"}, {"recurrence": "adaponder"}])
def test_recomputed_layers_count_once(mechanism, monkeypatch):
    model = ours_of(theirs_of("qwen3_moe", **ASKED), **mechanism)
    model.set_step(0, 1)
    counted: list[int] = []
    call = Balance.__call__
    monkeypatch.setattr(Balance, "__call__", lambda self, x, mask: (counted.append(len(x)), call(self, x, mask))[1])
    plain = gradients(model)
    assert counted and set(counted) == {len(model.model.layers)}
    model.gradient_checkpointing_enable()
    again = gradients(model)
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


def test_micro_batches_add_up():
    """Of two passes with half of the targets each, each counts half."""
    model = ours_of(theirs_of("qwen3_moe", **ASKED), **LOOP)
    whole = trained(model).aux_losses["router"]
    count = int(2 * (tokens().numel() - 2 - 4))
    assert torch.allclose(trained(model, num_items_in_batch=count).aux_losses["router"], whole / 2)


def test_an_argument_of_a_call_may_only_repeat_the_configuration():
    plain, routed = ours_of(theirs_of("qwen3_moe")), ours_of(theirs_of("qwen3_moe", **ASKED))
    plain(tokens(), output_router_logits=False), routed(tokens(), output_router_logits=True)
    with pytest.raises(ValueError, match="output_router_logits is read when a model opens"):
        plain(tokens(), output_router_logits=True)


def test_the_implementation_of_experts_reaches_them():
    model = ours_of(theirs_of("qwen3_moe"))
    for name in ("batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        assert model.model.layers[0].mlp.experts.config._experts_implementation == name


def test_models_and_classes_are_asked_whether_an_implementation_of_experts_can_be_set():
    """transformers' own tests ask a class, which has no family."""
    asked = "_can_set_experts_implementation"
    assert getattr(ours_of(theirs_of("qwen3_moe")), asked)() and not getattr(FathomForCausalLM, asked)()
    assert not getattr(FathomForCausalLM(tiny_config()), asked)()

"""The contract of the residual role: a layer may read twice before it writes twice.

`ParallelLayer` is such a layer. The numbers of a mechanism with a backward pass of its own must be those that it
evaluates with; `lose_the_update` is the fault that this contract forbids.
"""

import pytest
import torch

from fathom.models import FathomForCausalLM
from fathom.models.axes.roles import valid_mean
from fathom.models.modeling import DecoderLayer
from fathom.models.residuals.attention_residuals import AttentionResiduals

from .cases import build, config_of, tokens

RESIDUALS = [
    "vanilla",
    "denseformer",
    "attention_residuals",
    "attention_residuals-snapshot",
    "attention_residuals-delta",
    "attention_residuals-delta_block",
    "mudd",
    "hyper_connections",
    "hyper_connections-four",
    "hyper_connections-free",
    "latent_cot+hyper_connections",
    "loop+depth_attention+hyper_connections",
]


def test_a_mean_over_what_has_a_target():
    targets = torch.tensor([[3, -100, 5]])
    assert valid_mean(torch.tensor([[1.0, 9.0, 4.0]]), targets).item() == 2.5
    assert valid_mean(torch.tensor([[[1, 3], [9, 9], [2, 6]]]), targets).item() == 3
    assert valid_mean(torch.tensor([[7.0, 9.0, 4.0]]), torch.tensor([[3, -100, -100]])).item() == 7
    assert valid_mean(torch.tensor([[1.0, 9.0, 4.0]]), torch.full_like(targets, -100)).item() == 0


def parallel(self, *state, sources=(), **kwargs):
    """Attention and MLP of one input: two reads of the residual, then two writes."""
    x, state, attended = self.attn_residual(state)
    y, state, fed = self.mlp_residual(state)
    update, key, value = self.mix_tokens(x, self.attn_residual.gained, sources=sources, **kwargs)
    state = self.attn_residual(state, update, attended)
    state = self.mlp_residual(state, self.mix_channels(y), fed)
    return *state, key, value


@pytest.fixture(autouse=True)
def parallel_layers(monkeypatch):
    monkeypatch.setattr(DecoderLayer, "forward", parallel)


def model_of(case: str) -> FathomForCausalLM:
    if case == "loop+depth_attention+hyper_connections":
        config = config_of("loop+depth_attention", residual="hyper_connections", residual_options={"streams": 2})
    elif case == "hyper_connections-four":
        config = config_of("hyper_connections", residual_options={"streams": 4})  # a single token's own path
    else:
        config = config_of(case)
    config.recurrence_options |= {"penalty_steps": [9, 9]} if "latent_cot" in case else {}
    return build(config, dtype=torch.float64)


def losses(model: FathomForCausalLM) -> tuple[float, float]:
    ids = tokens(2, 9)
    trained = model.train()(ids, labels=ids)
    added = sum((trained.aux_losses or {}).values())
    with torch.no_grad():
        evaluated = model.eval()(ids, labels=ids).loss
    return (trained.loss - added).item(), evaluated.item()


@pytest.mark.quick("vanilla", "denseformer", "attention_residuals-delta", "mudd", "*hyper_connections")
@pytest.mark.parametrize("case", RESIDUALS)
def test_a_parallel_layer_trains_what_it_evaluates(case):
    trained, evaluated = losses(model_of(case))
    assert abs(trained - evaluated) < 1e-12


def test_a_lost_update_is_seen(monkeypatch):
    """The negative control: `write` goes back to the state that its own `read` was given."""
    read, write = AttentionResiduals.read, AttentionResiduals.write

    def keep(self, state):
        x, state, _ = read(self, state)
        return x, state, state

    def lose_the_update(self, state, update, context):
        return write(self, context if torch.is_grad_enabled() else state, update, None)

    monkeypatch.setattr(AttentionResiduals, "read", keep)
    monkeypatch.setattr(AttentionResiduals, "write", lose_the_update)
    trained, evaluated = losses(model_of("attention_residuals"))
    assert abs(trained - evaluated) > 1e-3


@pytest.mark.quick("vanilla", "denseformer", "attention_residuals-delta", "mudd", "*hyper_connections")
@pytest.mark.parametrize("case", RESIDUALS)
def test_a_parallel_layer_decodes_what_it_reads(case):
    model, ids = model_of(case), tokens(1, 7)
    with torch.no_grad():
        whole = model(ids).logits
        cache, found = None, []
        for t in range(ids.shape[1]):
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-11)


@pytest.mark.quick("vanilla", "denseformer", "attention_residuals-delta", "mudd", "*hyper_connections")
@pytest.mark.parametrize("case", RESIDUALS)
def test_a_parallel_layers_gradients_are_those_of_the_equations(case, monkeypatch):
    """Backward passes that are written out, against autograd through the plain form, which compiled code sees."""
    model, ids = model_of(case).train(), tokens(2, 9)
    found = gradients(model, ids)
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        expected = gradients(model, ids)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("case", ["attention_residuals", "hyper_connections"])
def test_a_parallel_layer_is_recomputed_exactly(case):
    model, ids = model_of(case).train(), tokens(2, 9)
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable()
    found = gradients(model, ids)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13, msg=name)


def gradients(model: FathomForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

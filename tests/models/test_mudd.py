"""`mudd` and the seam that it stands on, a read of three inputs; test_equations.py has the equations."""

import pytest
import torch
from transformers import DynamicCache

from fathom.models import FathomForCausalLM, modeling
from fathom.models.residuals.mudd import Mudd

from .cases import build, config_of, tokens


@pytest.mark.parametrize("norm", ["none", "prepost"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_starts_as_itself_through_three_inputs(dtype, norm):
    """Bitwise, also with other weights in the MLP's first matrix, and with gradients on."""
    vanilla = build(config_of("vanilla"), dtype=dtype)
    torch.manual_seed(3)
    model = FathomForCausalLM(config_of("mudd", residual_options={"norm": norm})).eval().to(dtype)
    model.load_state_dict(vanilla.state_dict(), strict=False)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, vanilla(ids).logits)
    assert torch.equal(model(ids).logits, vanilla(ids).logits)


def test_the_first_step_moves_the_last_matrix_alone():
    """W2 = 0 hides W1 from the first gradient, and from no other."""
    torch.manual_seed(0)
    model, ids = FathomForCausalLM(config_of("mudd")).train(), tokens(2, 9)

    def moved() -> dict[str, bool]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        weigher = model.model.layers[2].attn_residual.weigher
        return {"w1": bool(weigher.w1.weight.grad.any()), "w2": bool(weigher.w2.weight.grad.any())}

    assert moved() == {"w1": False, "w2": True}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert moved() == {"w1": True, "w2": True}


def test_attention_gets_one_norm_for_each_input_of_its_own(monkeypatch):
    """Three of three ways, two where queries and keys read the stream, and one without ways."""
    for options, norms in (({}, 3), ({"ways": "vr"}, 2), ({"ways": "r"}, 1)):
        model, calls = build(config_of("mudd", residual_options=options)), []
        model.model.layers[3].input_layernorm.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        model(tokens(1, 4))
        assert len(calls) == norms, options


def test_swapped_inputs_are_seen(monkeypatch):
    """The negative control of the seam: keys made of what values read."""
    model, ids = build(config_of("mudd"), dtype=torch.float64), tokens(1, 6)
    with torch.no_grad():
        right = model(ids).logits
        project = modeling.Attention._projected
        monkeypatch.setattr(modeling.Attention, "_projected", lambda self, q, k, v: project(self, q, v, k))
        assert (model(ids).logits - right).abs().max() > 1e-2


def test_a_token_is_what_a_text_is():
    """Few tokens are summed as a stack, many as a list."""
    model, ids = build(config_of("mudd"), dtype=torch.float64), tokens(1, 600)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids).logits
        model(ids[:, :-1], past_key_values=cache)
        one = model(ids[:, -1:], past_key_values=cache).logits
    assert (one[:, 0] - whole[:, -1]).abs().max() < 1e-11


def test_decay_leaves_the_static_weights_alone():
    """They would be pulled from the one-hot to nothing."""
    from fathom.training.optimizer import decays

    answer = decays(FathomForCausalLM(config_of("mudd")))
    static = [name for name in answer if name.endswith("attn_residual.static")]
    assert len(static) == 3 and not any(answer[name] for name in static)
    assert answer["model.layers.1.attn_residual.weigher.w1.weight"]


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_an_engine_that_fuses_the_projections_is_refused(backend):
    """It would compute keys and values of the queries' input."""
    model = build(config_of("mudd"))
    model.config._attn_implementation = backend
    with pytest.raises(ValueError, match=f"attn_implementation={backend} makes queries, keys and values of one input"):
        model(tokens(1, 3))


def test_only_attention_has_several_inputs():
    model = FathomForCausalLM(config_of("mudd"))
    for i, layer in enumerate(model.model.layers):
        assert isinstance(layer.attn_residual, Mudd)
        assert layer.attn_residual.multiway == (i > 0) and not layer.mlp_residual.multiway
    assert not model.model.final_residual.multiway and model.model.multiway

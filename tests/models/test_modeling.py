"""How the models live with the rest of transformers: Trainer, checkpointing, offloading, the Auto classes."""

import warnings
from collections import Counter

import pytest
import torch
from transformers import AutoModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fathom.checkpoints.export import export
from fathom.models import FathomForCausalLM, sublayers
from fathom.models.axes import roles
from fathom.models.axes.roles import MechanismModule, Residual

from .cases import CASES, SHAPE, build, config_of, in_turn, tokens
from .test_operations import Operations


def test_checkpointing_by_every_name_transformers_has():
    """Trainer calls the newer one with arguments that the older one had not."""
    model = build(config_of("depth_attention")).train()
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers has one name for it")
    model.activation_checkpointing_enable(every_n_layers=2)
    assert [layer.gradient_checkpointing for layer in model.model.layers].count(True) == 2


def test_checkpointing_is_switched_on_without_a_warning():
    """By the trainer, by peft, which asks for the state by its earlier name, and in this class itself."""
    model = build(config_of("depth_attention")).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.activation_checkpointing_enable()
        assert model.is_gradient_checkpointing
    with pytest.raises(ValueError, match="use_reentrant=True loses"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable({"use_reentrant": True})  # the earlier name checks the same


def test_label_smoothing_knows_that_labels_shift():
    """Trainer decides by the class's name; missing there, it would train on unshifted labels without a word."""
    assert "FathomForCausalLM" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


@pytest.mark.parametrize("case", ["hyper_connections", "loop@olmo2"])
def test_offloaded_parameters_are_found(case):
    """Hooks see calls only, so whatever holds a parameter must be called."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = build(config_of(case)), tokens(1, 9)
    with torch.no_grad():
        wanted = model(ids, labels=ids, return_logits=True)
        accelerate.cpu_offload(model, execution_device="cpu")
        found = model(ids, labels=ids, return_logits=True)
    assert torch.equal(found.logits, wanted.logits)
    assert found.loss.item() == pytest.approx(wanted.loss.item(), abs=1e-6)


def lend(module):
    """Gives a module its parameters for the time of a call only, as offloading does."""
    own = dict(module._parameters)
    away = {name: value if value is None else torch.nn.Parameter(value.to("meta")) for name, value in own.items()}
    module._parameters.update(away)
    module.register_forward_pre_hook(lambda *_: module._parameters.update(own))
    module.register_forward_hook(lambda *_: module._parameters.update(away))


HOLDERS = ("hyper_connections-v41", "ponder-pause")
"""Cases with parameters of their own that no fast case has."""


@torch.no_grad()
@pytest.mark.parametrize("case", [*HOLDERS, *in_turn(case for case in CASES if case not in HOLDERS)])
def test_parameters_are_read_inside_calls(case):
    """What the test above asks of accelerate, without it."""
    model, ids = build(config_of(case)), tokens(1, 9)
    wanted = model(ids, labels=ids, return_logits=True)
    for module in model.modules():
        lend(module)
    found = model(ids, labels=ids, return_logits=True)
    assert torch.equal(found.logits, wanted.logits) and (found.loss - wanted.loss).abs() < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_head_scales_and_caps_as_before(tied, tmp_path):
    """transformers makes a plain linear layer of it."""
    model, ids = build(config_of("vanilla@gemma", tie_word_embeddings=tied)), tokens(2, 7)
    wanted = model(ids).logits
    model.lm_head.weight.requires_grad_(False)
    model.resize_token_embeddings(70)
    assert not model.lm_head.weight.requires_grad
    found = model(ids).logits
    assert found.shape[-1] == 70 and (found[..., :61] - wanted).abs().max() < 1e-5
    model.save_pretrained(tmp_path)
    assert (FathomForCausalLM.from_pretrained(tmp_path)(ids).logits - found).abs().max() < 1e-5


def test_an_adapter_around_a_capped_head_is_refused():
    """It would be added to capped logits; merged, it would be capped with them."""
    model = build(config_of("vanilla@gemma"))
    adapter = torch.nn.Module()
    adapter.base_layer = model.lm_head
    model.lm_head = adapter
    with pytest.raises(ValueError, match="lm_head scales or caps its logits"):
        model(tokens(1, 5))


def test_training_makes_no_logits_unless_asked():
    model, ids = build(config_of("vanilla")).train(), tokens(2, 9)
    assert model(ids, labels=ids).logits is None
    assert model(ids, labels=ids, return_logits=True).logits.shape == (2, 9, 61)
    assert model.eval()(ids, labels=ids).logits.shape == (2, 9, 61)
    assert model(ids, labels=ids, return_logits=False).logits is None


def test_attentions_and_hidden_states_by_visit():
    model, ids = build(config_of("loop+depth_attention")), tokens(1, 7)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 8 and len(out.hidden_states) == 9
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)


@torch.no_grad()
@pytest.mark.parametrize("case", ["vanilla", "hyper_connections", "loop", "ponder2"])
def test_hidden_states_by_number(case):
    """Some are asked for by their place, which may be 0 or counted from the end; None stands for the others."""
    model, ids = build(config_of(case)), tokens(2, 5)
    every = model(ids, output_hidden_states=True).hidden_states
    for wanted, found in ((0, {0}), (-1, {len(every) - 1}), ([0, 2, -1, 99], {0, 2, len(every) - 1})):
        some = model(ids, output_hidden_states=wanted).hidden_states
        assert [i for i, hidden in enumerate(some) if hidden is not None] == sorted(found)
        assert all(torch.equal(some[i], every[i]) for i in found)
    assert model(ids, output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("case", ["vanilla", "loop", "adaponder"])
def test_outputs_are_ordered_as_qwen3s(case):
    """Everything that takes outputs by position, `model(ids)[0]` first of all."""
    model, ids = build(config_of(case)), tokens(1, 6)
    theirs = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    for keys in ({}, {"labels": ids}, {"use_cache": True}, {"labels": ids, "output_hidden_states": True}):
        with torch.no_grad():
            found, wanted = model(ids, **keys), theirs(ids, **keys)
        order = [key for key in found if key in wanted]
        assert order == [key for key in wanted if key in order] and "logits" in order
        position = list(wanted).index("logits")
        with torch.no_grad():
            assert model(ids, **keys, return_dict=False)[position].shape == (1, 6, 61)
    assert model(ids)[0].shape == (1, 6, 61)
    loss, logits = model.train()(ids, labels=ids, return_logits=True, return_dict=False)[:2]
    assert loss.ndim == 0 and logits.shape == (1, 6, 61)


@pytest.mark.parametrize("case", ["vanilla", "depth_attention", "hyper_connections", "loop", "adaponder", "latent_cot"])
def test_gradients_reach_hidden_states(case):
    """What is returned is what the layers computed with, not a copy beside the graph."""
    model, ids = build(config_of(case)), tokens(1, 6)
    out = model(ids, output_hidden_states=True, use_cache=False)
    for hidden in out.hidden_states:
        hidden.retain_grad()
    out.logits.square().sum().backward()
    beside = [i for i, hidden in enumerate(out.hidden_states) if hidden.grad is None]
    # Between its layers the state of hyper-connections is several streams, of which a hidden state is the mean.
    assert beside == ([1, 2, 3] if case == "hyper_connections" else [])


def in_memory(model):
    """Each parameter copied out of its file: places that are not aligned are summed in another order on some CPUs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


@pytest.mark.parametrize("case,tied", [("ponder", True), ("adaponder", False), ("loop", False)])
def test_the_decoder_alone_is_whole(case, tied, tmp_path):
    """`AutoModel`, for embeddings and features, also where the next trip is made of logits."""
    model, ids = build(config_of(case, tie_word_embeddings=tied)), tokens(2, 7)
    export(model, tmp_path / "whole")
    decoder = in_memory(AutoModel.from_pretrained(tmp_path / "whole"))
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        assert torch.equal(decoder(ids, use_cache=False).last_hidden_state, wanted)
        decoder.save_pretrained(tmp_path / "decoder")
        again = in_memory(AutoModel.from_pretrained(tmp_path / "decoder"))
        assert torch.equal(again(ids, use_cache=False).last_hidden_state, wanted)
    assert hasattr(decoder, "lm_head") == (case != "loop")
    if case != "loop":
        assert (decoder.lm_head.weight is decoder.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    "case,streams", [("vanilla", 1), ("loop", 3), ("ponder", 3), ("ponder-hidden-duo", 1), ("ponder2", 1)]
)
def test_scaled_output_projections(case, streams):
    """The same draw, divided by the root of whatever adds to one stream; everything else as it was."""
    models = []
    for output_init in ("plain", "depth"):
        torch.manual_seed(0)
        models.append(FathomForCausalLM(config_of(case, output_init=output_init)))
    plain, scaled = (model.state_dict() for model in models)
    layer = "model.layers.3."
    norms = [w[layer + "self_attn.o_proj.weight"].norm() for w in (plain, scaled)]
    assert norms[0] / norms[1] == pytest.approx((2 * 4 * streams) ** 0.5, rel=0.1)
    norms = [w[layer + "mlp.down_proj.weight"].norm() for w in (plain, scaled)]
    assert norms[0] / norms[1] == pytest.approx((2 * 4 * streams) ** 0.5, rel=0.1)
    assert scaled[layer + "mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)


@torch.no_grad()
def test_a_head_that_scales_its_logits_is_resized():
    keys = {"logits_scaling": 3.0, "final_logit_softcapping": 0.5, "tie_word_embeddings": False}
    model, ids = build(config_of("vanilla", **keys)).eval(), tokens(1, 5)
    before, words = model(ids).logits, model.config.vocab_size
    model.resize_token_embeddings(words + 7, mean_resizing=False)
    after = model(ids).logits
    torch.testing.assert_close(after[..., :words], before)
    assert after.shape[-1] == words + 7 and model.lm_head.weight is not model.model.embed_tokens.weight


def of_a_token(model):
    """The operations of one token after a prompt."""
    with torch.no_grad():
        cache = model(tokens(1, 3), use_cache=True).past_key_values
        with Operations() as operations:
            model(tokens(1, 1), past_key_values=cache, use_cache=True)
    return operations.seen


def test_a_decoded_token_makes_no_operation_that_qwen3s_does_not():
    """One that only we make is fetched from memory anew after each projection, which takes longer than itself."""
    theirs = of_a_token(Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval())
    ours = {case: of_a_token(build(config_of(case))) for case in ("vanilla", "depth_attention", "attention_residuals")}
    assert ours["vanilla"].total() < theirs.total()
    assert not set(ours["vanilla"]) - set(theirs) and not set(ours["depth_attention"]) - set(theirs)
    assert set(ours["attention_residuals"]) - set(theirs), "a stack is seen"


def test_a_decoded_token_of_hyper_connections_is_few_operations():
    """Per sub-layer, beyond vanilla's: the maps of four streams are Python's numbers, those of three are tensors."""
    vanilla, added = of_a_token(build(config_of("vanilla"))).total(), []
    for streams in (4, 3):
        model = build(config_of("hyper_connections", residual_options={"streams": streams}))
        added.append((of_a_token(model).total() - vanilla) / (2 * model.config.num_hidden_layers))
    assert added[0] < 30 and added[1] > 80


@pytest.mark.parametrize("name", ["vanilla", "depth_attention"])
def test_a_mixer_is_called_directly_without_hooks_and_seen_by_them(name):
    model, seen = build(config_of(name)), []
    with torch.no_grad():
        expected = model(tokens(1, 3)).logits
        mixers = [layer.self_attn.mixer for layer in model.model.layers]
        mixers[1].register_forward_hook(lambda _, given, out: seen.append(out is given[2]))
        mixers[2].register_forward_pre_hook(lambda *given: seen.append(len(given)))
        assert torch.equal(model(tokens(1, 3)).logits, expected)
    assert roles.direct(mixers[0]) == mixers[0].forward and roles.direct(mixers[1]) is mixers[1]
    assert seen == [name == "vanilla", 2]


@pytest.mark.parametrize("parallel", [False, True])
def test_a_hook_sees_the_calls_of_a_plain_residual(parallel):
    """The sum of a parallel layer's two updates is written once; the numbers are the same."""
    model, ids, seen = build(config_of("vanilla", parallel_residual=parallel)), tokens(1, 3), []
    with torch.no_grad():
        expected = model(ids).logits
        layer = model.model.layers[1]
        hook = layer.mlp_residual.register_forward_hook(lambda *_: seen.append("mlp"))
        assert torch.equal(model(ids).logits, expected) and seen == ["mlp"] * (1 if parallel else 2)
        hook.remove()


@pytest.mark.parametrize("parallel", [False, True])
@torch.no_grad()
def test_a_residual_that_is_replaced_is_used(parallel):
    """A layer adds its updates itself where its residuals are plain, whenever they became so."""

    class Doubled(Residual):
        def write(self, state, update, context):
            return (state[0] + 2 * update,)

    model, ids = build(config_of("vanilla", parallel_residual=parallel)), tokens(1, 3)
    expected = model(ids).logits
    for layer in model.model.layers:
        layer.mlp_residual = Doubled(model.config, 1)
    assert (model(ids).logits - expected).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_sees_every_call_of_a_mechanism(kind, monkeypatch):
    """Only without one is `forward` called without the way through torch's hooks."""
    model, seen = build(config_of("depth_attention", residual="attention_residuals")), []
    for name, module in model.model.layers[1].named_modules():
        if isinstance(module, MechanismModule):
            getattr(module, f"register_{kind}_hook")(lambda *_, name=name: seen.append(name))
    model(tokens(1, 3)).logits.sum().backward()
    calls = Counter(seen)
    assert calls == {"self_attn.mixer": 1, "attn_residual": 2, "mlp_residual": 2}
    monkeypatch.setattr(roles, "direct", lambda module: module.forward)
    monkeypatch.setattr(sublayers, "ways", lambda residual: (residual.read, residual.write))
    model(tokens(1, 3)).logits.sum().backward()
    assert Counter(seen) == calls

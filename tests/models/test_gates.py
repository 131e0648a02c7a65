"""Learned gates: y = (1 + g) a + λ m by hand, by the oracle, from an exact start, and which parameters they are."""

from dataclasses import fields

import pytest
import torch
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.blend import Blended
from fathom.models.axes.gates import Gates
from fathom.models.configuration import LOCAL
from fathom.models.cost import count_parameters, mechanism_cost
from fathom.models.registry import MECHANISMS
from fathom.training.optimizer import decays
from tests.tiny import seeded

from .cases import BACKBONES, CASES, SHAPE, build, config_of, tokens, with_gains
from .oracle import agree, oracle_of, truth

LEARNED = [case for case in CASES if case.endswith("-learned")]
GAINS = ["value_gain-queries", "branch_gain", "loop+branch_gain+value_gain"]


def closed_pair(case: str, backbone: str | None = None) -> tuple[FathomForCausalLM, FathomForCausalLM]:
    """The case as it starts, and the model of the same weights without mechanisms."""
    switches = BACKBONES[backbone] if backbone else {}
    torch.manual_seed(0)
    plain = with_gains(FathomForCausalLM(FathomConfig(**SHAPE, initializer_range=0.1, **switches)).eval())
    torch.manual_seed(1)
    model = FathomForCausalLM(config_of(case, **switches)).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    return model, plain


def test_the_equation():
    """Of a scalar, a head and a channel, and with the base 0; in bfloat16 the arithmetic is float32's."""
    torch.manual_seed(0)
    a, m = torch.randn(2, 2, 3, 5, 8, dtype=torch.float64)
    for shape in ((1,), (3, 1, 1), (3, 1, 8)):
        gates = Gates(shape).double()
        torch.nn.init.normal_(gates.gain)
        torch.nn.init.normal_(gates.mix)
        g, mix = gates.gain.view(shape), gates.mix.view(shape)
        assert torch.allclose(gates(a, m), (1 + g) * a + mix * m, rtol=0, atol=1e-14)
        assert torch.allclose(gates(a, start=0.0), g * a, rtol=0, atol=1e-14)
        half = gates.float()(a.bfloat16(), m.bfloat16())
        exact = (1 + g.float()) * a.bfloat16().float() + mix.float() * m.bfloat16().float()
        assert half.dtype == torch.bfloat16 and torch.allclose(half.float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.quick("depth_attention-learned", "value_gain-queries")
@pytest.mark.parametrize("case", LEARNED + GAINS)
def test_the_oracle_agrees(case):
    """Logits and a directional derivative, with every gate away from zero."""
    agree(build(config_of(case), dtype=torch.float64), tokens(2, 7))


def test_the_oracle_sees_a_lost_gain():
    model = build(config_of("depth_attention-learned"), dtype=torch.float64)
    oracle = oracle_of(model)
    oracle.w |= {name: 0 * w for name, w in oracle.w.items() if name.endswith("gates.gain")}
    assert (truth(oracle, tokens(2, 7)) - model(tokens(2, 7)).logits).abs().max() > 1e-3


@pytest.mark.quick("llama-depth_attention-learned", "neox-branch_gain")
@pytest.mark.parametrize("case", LEARNED + GAINS)
@pytest.mark.parametrize("backbone", [None, *BACKBONES])
def test_the_start_is_exact(backbone, case):
    """To the last bit, on every kind of backbone; and with a gate open it is another model."""
    model, plain = closed_pair(case, backbone)
    with torch.no_grad():
        wanted = plain(tokens(2, 11), use_cache=False).logits
        assert torch.equal(model(tokens(2, 11), use_cache=False).logits, wanted)
        for gates in (part for part in model.modules() if isinstance(part, Gates)):
            for gate in gates.parameters():
                gate.uniform_(0.2, 0.4)
        assert not torch.equal(model(tokens(2, 11), use_cache=False).logits, wanted)


@pytest.mark.parametrize("case", ["depth_attention-learned", "loop+branch_gain+value_gain"])
def test_gates_do_not_decay_and_are_counted(case):
    config = config_of(case)
    model = FathomForCausalLM(config)
    gates = [name for name, _ in model.named_parameters() if "gates." in name]
    assert gates and not any(decays(model)[name] for name in gates)
    plain = count_parameters(FathomConfig(**SHAPE))
    assert count_parameters(config) == plain + mechanism_cost(config).parameters
    assert sum(dict(model.named_parameters())[name].numel() for name in gates) == mechanism_cost(config).parameters


@pytest.mark.parametrize("case", ["depth_attention-learned", "loop-learned", "loop+branch_gain+value_gain"])
def test_a_saved_model_keeps_its_gates(case, tmp_path):
    model = build(config_of(case))
    model.save_pretrained(tmp_path)
    again = FathomForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        wanted, found = (one(tokens(2, 9), use_cache=False).logits for one in (model, again))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6)


def test_a_gate_of_a_plain_gain_asks_for_a_gain():
    """Where all that helps is a smaller value, λ of v + λ (m - v) has a gradient, λ of the split form next to none."""
    torch.manual_seed(0)
    v, m, d = torch.randn(3, 4, 2, 50, 8)
    d = -v  # the loss falls if v shrinks, whatever m is
    tied = (d * (m - v)).sum()
    split = (d * m).sum()
    assert tied > 0.9 * (v * v).sum() and abs(split) < 0.1 * tied


@pytest.mark.parametrize("name", [name for name, one in MECHANISMS.items() if one.closed and "blend" in one.closed])
def test_who_learns(name):
    """Mixers, residuals and the loop; the others refuse in words, as do a schedule, heads of a stream and shuffling."""
    axis, options = MECHANISMS[name].axis, MECHANISMS[name].options
    keys = {axis: name, f"{axis}_options": {"blend": "learned"}}
    if not options.learns:
        assert name in ("ponder", "adaponder", "latent_cot")
        with pytest.raises(ValueError, match="no learned gates"):
            FathomConfig(**SHAPE, **keys)
        return
    FathomConfig(**SHAPE, **keys)
    wrong = [({"blend": "learned", "blend_steps": 3}, "blend_steps"), ({"gates": "channel"}, "gates")]
    if axis != "mixer":
        wrong.append(({"blend": "learned", "gates": "head"}, "gates"))
    if "shuffled" in {one.name for one in fields(options)}:
        wrong.append(({"shuffled": True}, "shuffled"))
    for given, word in wrong:
        with pytest.raises(ValueError, match=f"{axis}_options.{word}"):
            FathomConfig(**SHAPE, **{axis: name, f"{axis}_options": given})


def test_queries_have_no_gain_by_channel():
    """Rotation turns two channels together, so unequal gains would make attention depend on absolute positions."""
    with pytest.raises(ValueError, match=r"mixer_options\.queries"):
        FathomConfig(**SHAPE, mixer="value_gain", mixer_options={"gates": "channel", "queries": True})


def test_a_prelude_that_reads_nothing_has_no_mix():
    """Its λ would never get a gradient; a looped layer 0 reads its own earlier iteration, that of `ponder` does not."""
    options = {"stride": 2, "blend": "learned"}
    loops = [("loop", {"trips": 2, "prelude": prelude}, prelude == 0) for prelude in (0, 1)]
    for name, given, mixes in (*loops, ("loop", {"kv": "first"}, False), ("ponder", {}, False)):
        keys = {"recurrence": name, "recurrence_options": given}
        model = FathomForCausalLM(FathomConfig(**SHAPE, mixer="depth_attention", mixer_options=options, **keys))
        gates = model.model.layers[0].self_attn.mixer.blend_gates
        assert (gates.mix is not None) == mixes


def test_shuffled_sources_are_the_neighbours():
    """The same mix of another row: its own row's content is lost, and a batch of one row has no other."""
    torch.manual_seed(0)
    own, other = (
        build(config_of("depth_attention-learned", mixer_options={"blend": "learned", "stride": 1, "shuffled": on}))
        for on in (False, True)
    )
    ids = tokens(2, 9)
    with torch.no_grad():
        twice = ids[:1].expand(2, -1)
        assert torch.allclose(other(twice).logits, own(twice).logits, atol=1e-6), "a row is its own neighbour's equal"
        assert not torch.allclose(other(ids).logits, own(ids).logits, atol=1e-3)
        with pytest.raises(ValueError, match="two sequences"):
            other(ids[:1])


def test_blended_parts_without_gates_have_none():
    """Gates cost nothing where λ is a number."""
    model = FathomForCausalLM(config_of("depth_attention-blend"))
    assert all(part.blend_gates is None for part in model.modules() if isinstance(part, Blended))


def test_gates_of_heads_are_split_with_them_and_not_broadcast():
    """Tensor parallelism gives a process some heads: the whole gates against one head would make two heads of it."""
    gates, value = Gates((2, 1, 3)), torch.randn(2, 2, 5, 3, generator=seeded(0))
    with torch.no_grad():
        gates.gain.copy_(torch.arange(6.0)), gates.mix.copy_(torch.arange(6.0, 12.0))
    whole, part = gates(value, value), Gates((2, 1, 3))
    for head in (0, 1):
        for name in ("gain", "mix"):
            setattr(part, name, torch.nn.Parameter(getattr(gates, name)[3 * head : 3 * head + 3]))
        assert torch.equal(part(value[:, [head]], value[:, [head]]), whole[:, [head]])
    with pytest.raises(ValueError, match="parts of 1 of 2 key-value heads"):
        gates(value[:, :1])
    config = FathomConfig(**SHAPE, mixer="value_gain")
    assert ("layers.*.self_attn.mixer.gates.gain" in config.base_model_tp_plan) == (LOCAL in ALL_PARALLEL_STYLES)

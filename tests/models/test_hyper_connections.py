"""Hyper-connections: Sinkhorn in all its forms, start and precision; test_equations.py has the equations."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fathom.models import FathomForCausalLM
from fathom.models.cost import count_parameters, mechanism_cost
from fathom.models.registry import MECHANISMS
from fathom.models.residuals.hyper_connections import FLOOR, HyperConnections, sinkhorn, sinkhorn_logs, sinkhorn_numbers

from .cases import build, config_of, tokens


def case(streams=4, iterations=20, layers=2, **keys):
    options = {"streams": streams, "sinkhorn_iterations": iterations, **keys}
    return config_of("hyper_connections", num_hidden_layers=layers, residual_options=options)


def as_plain(alpha, **options):
    """Largest difference from the plain residual, freshly initialised, in float64."""
    torch.manual_seed(0)
    plain = FathomForCausalLM(config_of("vanilla")).eval()
    model = FathomForCausalLM(case(layers=4, alpha=alpha, **options)).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    ids = tokens(2, 9)
    plain, model = plain.double(), model.double()
    if alpha == 0 and options.get("iterations") != 0:  # log(0.99) is rounded to float32 in the weights; redo it
        n = 4
        exact = torch.full((n, n), 0.01 / (n - 1), dtype=torch.float64).fill_diagonal_(0.99).log()
        for module in model.modules():
            if isinstance(module, HyperConnections) and not module.final:
                assert torch.allclose(module.residual_logits, exact, atol=1e-6)
                module.residual_logits.data.copy_(exact)
                assert module.pre_logits.sigmoid().tolist() == pytest.approx([1 / n] * n)
                module.pre_logits.data.fill_(-torch.tensor(n - 1.0, dtype=torch.float64).log())
    with torch.no_grad():
        return (model(ids).logits - plain(ids).logits).abs().max().item()


def test_without_the_dynamic_part_it_is_plain():
    assert as_plain(0.0) < 1e-12
    assert 1e-9 < as_plain(0.01) < 0.05, "near, and not exact"


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_unconstrained_without_the_dynamic_part_is_plain(streams):
    assert as_plain(0.0, streams=streams, iterations=0) < 1e-12


def test_without_sinkhorn_it_is_mhc_without_its_constraint():
    """And cited as such: a joint norm and projection over all streams, which the earlier paper does not have."""
    module, other = (HyperConnections(case(3, iterations), 0) for iterations in (0, 20))
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in other.named_parameters()}
    assert module.norm.weight.shape == (3 * 32,) and module.projection.weight.shape == (15, 3 * 32)
    assert "2409.19606" not in MECHANISMS["hyper_connections"].paper


def test_columns_are_exact_and_rows_converge():
    """The card's measured errors: rows 7e-4 at noise 0.02, 0.03 at 1, 0.065 at 3."""
    torch.manual_seed(0)
    base = torch.full((4, 4), 0.01 / 3).fill_diagonal_(0.99).log()
    for noise, rows in [(0.0, 1e-3), (0.02, 1e-3), (1.0, 0.1), (3.0, 0.3)]:
        matrix = sinkhorn(base + noise * torch.randn(500, 4, 4), 20)
        assert (matrix > 0).all()
        assert (matrix.sum(-2) - 1).abs().max() < 1e-6
        assert (matrix.sum(-1) - 1).abs().max() < rows
    hard = base + 3.0 * torch.randn(500, 4, 4)
    errors = [(sinkhorn(hard, k).sum(-1) - 1).abs().max().item() for k in (1, 20, 500)]
    assert errors[0] > errors[1] > errors[2], "double stochasticity is a limit, not a fact"
    assert errors[1] > 1e-6


def test_sinkhorn_survives_extreme_logits():
    huge, zeros = [-1e4, -1e4], [0.0, 0.0]
    for logits in ([huge, huge], [[0.0, -1e4], [-1e4, 0.0]], [zeros, huge]):
        matrix = sinkhorn(torch.tensor(logits), 20)
        assert matrix.isfinite().all()
        assert (matrix.sum(-2) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_a_sinkhorn_of_logarithms_is_the_same(n, iterations):
    """What a decoded token takes on a CPU is what training takes, the floor included."""
    torch.manual_seed(n)
    logits = torch.cat([scale * torch.randn(50, n, n, dtype=torch.float64) for scale in (0.01, 1.0, 30.0, 300.0)])
    expected = sinkhorn(logits, iterations)
    assert (sinkhorn_logs(logits, iterations) - expected).abs().max() < 1e-12
    assert n == 1 or (sinkhorn_logs(logits.mT, iterations).mT - expected).abs().max() > 1e-3


@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_a_sinkhorn_of_numbers_is_the_same(iterations):
    torch.manual_seed(iterations)
    logits = torch.cat([scale * torch.randn(8, 4, 4, dtype=torch.float64) for scale in (0.01, 1.0, 30.0, 300.0)])
    expected = sinkhorn(logits, iterations).flatten(1)
    kernels = (logits - logits.amax((1, 2), keepdim=True)).exp().clamp(min=FLOOR)
    for found, other in ((kernels.flatten(1), False), (kernels.mT.flatten(1), True)):
        found = torch.tensor([sinkhorn_numbers(row, iterations) for row in found.tolist()], dtype=torch.float64)
        assert (found - expected).abs().max() > 1e-3 if other else (found - expected).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_one_token_in_numbers_is_as_in_tensors(scale, monkeypatch):
    """And where numbers are not all there is, in tensors: under a hook, and in a trace, which would keep them."""
    module = build(case(4, 3), dtype=torch.float64).model.layers[1].mlp_residual
    module.requires_grad_(False).projection.weight.mul_(scale)
    streams, other = torch.randn(2, 1, 1, 4, 32, dtype=torch.float64)
    update, taken, read = torch.randn(1, 1, 32, dtype=torch.float64), [], module.read_token
    monkeypatch.setattr(module, "read_token", lambda streams: taken.append(streams) or read(streams))

    def step(streams):
        x, state, context = module.read((streams,))
        return x, module.write(state, update.expand(len(streams), -1, -1), context)[0]

    found, expected = step(streams), step(streams.repeat(2, 1, 1, 1))  # two rows
    assert len(taken) == 1
    for a, b, c in zip(found, expected, step(other), strict=True):
        assert (a - b).abs().max() < 1e-12 and (a - c).abs().max() > 1e-3
    assert step(streams * torch.nan)[1].isnan().all() and len(taken) == 3
    traced = torch.jit.trace(lambda streams: step(streams)[1], streams, check_trace=False)
    assert (traced(other) - step(other)[1]).abs().max() < 1e-12 and len(taken) == 4
    module.norm.register_forward_hook(lambda module, given, out: -out)
    assert (step(streams)[1] - found[1]).abs().max() > 1e-6 and len(taken) == 4


@torch.no_grad()
def test_one_token_of_zeros_without_eps_is_as_in_tensors():
    """Zero over zero."""
    config = config_of("hyper_connections", residual_options={"streams": 4}, rms_norm_eps=0.0)
    model = build(config)
    model.model.embed_tokens.weight[5] = 0
    assert all(model(torch.full((1, length), 5)).logits.isnan().all() for length in (1, 2))


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_no_sum_of_sinkhorn_falls_below_its_floor(n):
    """So that guarding every sum against the floor would change no bit of it."""
    torch.manual_seed(n)
    logits = torch.cat([scale * torch.randn(200, n, n) for scale in (0.01, 1.0, 30.0, 300.0)])
    logits[::3, :, 0] = logits[1::5, -1] = -1e4
    logits[0] = -1e4
    logits[0, 0, 0] = 0.0

    def guarded(floor):
        matrix = (logits - logits.amax((-2, -1), keepdim=True)).exp().clamp(min=FLOOR)
        for _ in range(20):
            matrix = matrix / matrix.sum(-1, keepdim=True).clamp(min=floor)
            matrix = matrix / matrix.sum(-2, keepdim=True).clamp(min=floor)
        return matrix

    assert torch.equal(sinkhorn(logits, 20), guarded(FLOOR))
    before = logits.clone()
    with torch.no_grad():
        assert torch.equal(sinkhorn(logits, 20), guarded(FLOOR)) and torch.equal(logits, before)
    assert n == 1 or not torch.equal(sinkhorn(logits, 20), guarded(0.9)), "a floor that some sum meets"


@pytest.mark.parametrize("sublayer", [0, 1])
def test_calls_do_not_grow_with_tokens(sublayer):
    """The first streams are one tensor expanded, of which a batched product may go token by token."""
    module, counts = HyperConnections(config_of("hyper_connections", hidden_size=128), sublayer), []
    for length in (16, 16, 32):  # the first call alone makes the parameters' gradients
        x = torch.randn(1, length, 128, requires_grad=True)
        (streams,) = module.begin(x)
        state = (streams if sublayer == 0 else streams.clone(),)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            read, state, context = module.read(state)
            module.write(state, read, context)[0].square().sum().backward()
        counts.append(sum(event.count for event in seen.key_averages()))
    assert counts[1] == counts[2]


def test_maps_are_single_precision_in_a_half_precision_model():
    model = build(case(), dtype=torch.bfloat16)
    streams = torch.randn(1, 3, 4, 32).bfloat16()
    module = model.model.layers[0].attn_residual
    pre, post, res = module.maps(streams)
    assert pre.dtype == post.dtype == res.dtype == torch.float32
    assert (res.sum(-2) - 1).abs().max() < 1e-6
    x, _, _ = module.read((streams,))
    assert x.dtype == torch.bfloat16


def test_the_end_is_the_mean_of_streams_at_init():
    final = FathomForCausalLM(case()).model.final_residual
    streams = torch.randn(1, 3, 4, 32)
    assert torch.allclose(final.read((streams,))[0], streams.mean(2), atol=1e-6)
    assert [name for name, _ in final.named_parameters()] == ["reduce_logits"]


def test_mixing_logits_are_spared_weight_decay():
    module = HyperConnections(case(), 0)
    for name in module.no_weight_decay:
        assert module.get_parameter(name).ndim > 1, "others are spared for their dimensions"


# --- parameters for each visit ----------------------------------------------------------------------------------------


def visiting(**residual):
    loop = {"trips": 3, "prelude": 1}
    residual = {"streams": 2, **residual}
    return config_of("hyper_connections", recurrence="loop", recurrence_options=loop, residual_options=residual)


def test_equal_parameters_for_each_visit_are_shared_ones():
    shared, ids = build(visiting()), tokens(2, 9)
    model = FathomForCausalLM(visiting(per_visit=True)).eval()
    weights = shared.state_dict()
    for name in model.state_dict():
        layer, again, rest = name.partition(".again.")
        if again:
            half, parameter = rest.split(".", 1)[1].split(".", 1)
            weights[name] = weights[f"{layer}.{half}_residual.{parameter}"]
    model.load_state_dict(weights)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, shared(ids).logits)


@pytest.mark.parametrize("trip", [1, 2])
def test_a_trip_reads_its_own_parameters(trip):
    """And no other trip does: with fewer trips they are not read."""
    model, ids = build(visiting(per_visit=True)), tokens(2, 9)
    with torch.no_grad():
        before = {trips: model(ids, max_trips=trips).logits for trips in (1, 2, 3)}
        for layer in model.model.layers[1:]:
            layer.again[trip - 1]["mlp"].post_logits.add_(1)
        after = {trips: model(ids, max_trips=trips).logits for trips in (1, 2, 3)}
    assert [torch.equal(before[trips], after[trips]) for trips in (1, 2, 3)] == [k < trip for k in range(3)]


def test_layers_outside_the_loop_have_one_set():
    model = FathomForCausalLM(visiting(per_visit=True))
    assert [len(layer.again) for layer in model.model.layers] == [0, 2, 2, 2]
    assert mechanism_cost(model.config).parameters == count_parameters(model.config) - count_parameters(
        config_of("vanilla")
    )

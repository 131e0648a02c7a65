"""Attention residuals against their equations, both published variants."""

import math

import pytest
import torch

from fathom.models import FathomForCausalLM
from fathom.models.attention_residuals import AttentionResiduals, pool, pool_stacked, source_counts
from fathom.models.cost import count_parameters
from fathom.models.slots import plan

from .cases import build, config_of, tokens
from .oracle import Oracle, agree

VARIANTS = ["block_sum", "snapshot"]


def aggregate(oracle, prefix, sources, snapshot):
    """Σ_s α_s s, one source after another."""
    w = oracle.w
    query = w[f"{prefix}.norm.weight"] * w[f"{prefix}.pseudo_query"]
    scores = [(oracle.normed(s) * query).sum(-1) for s in sources]
    if snapshot:
        scores[-1] = scores[-1] + w[f"{prefix}.recency_bias"]
    alpha = torch.stack(scores).softmax(0)
    return sum(a[..., None] * s for a, s in zip(alpha, sources, strict=True))


def run_trip(oracle, x, layers, block_size, variant, reset=True):
    """One trip: what the final aggregator returns, and how many sources every read had."""
    snapshot, counts = variant == "snapshot", []
    done, current = [x], (x if snapshot else None)  # the embeddings or snapshots or sums; the running one

    def read(prefix):
        sources = done + ([current] if current is not None else [])
        counts.append(len(sources))
        return aggregate(oracle, prefix, sources, snapshot)

    for i in layers:
        for part, kind in enumerate(("attn", "mlp")):
            sublayer = 2 * i + part
            if not snapshot and reset and sublayer % block_size == 0 and current is not None:
                done, current = [*done, current], None
            h = read(f"model.layers.{i}.{kind}_residual")
            update = oracle.attention(i, h) if part == 0 else oracle.mlp(i, h)
            current = update if current is None else current + update
            if snapshot and (sublayer + 1) % block_size == 0:
                done = [*done, current]
    return read("model.final_residual"), counts


def case(variant, block_size, layers=4):
    options = {"block_size": block_size, "variant": variant}
    return config_of("attention_residuals", num_hidden_layers=layers, residual_options=options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 12])
def test_equations(variant, block_size):
    """At every parity of block and layer, and with a block that never ends."""
    model = build(case(variant, block_size), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(2, 7)
    stream, _ = run_trip(oracle, oracle.embedding[ids], range(4), block_size, variant)
    agree(model, ids, oracle.logits(stream), oracle)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prelude,coda", [(0, 0), (1, 1), (2, 0)])
def test_every_trip_of_a_loop_starts_afresh(variant, prelude, coda):
    config = config_of(
        "loop",
        num_hidden_layers=5,
        residual="attention_residuals",
        residual_options={"block_size": 3, "variant": variant},
        recurrence_options={"trips": 3, "prelude": prelude, "coda": coda},
    )
    model = build(config, dtype=torch.float64)
    oracle, ids, counts = Oracle(model), tokens(1, 6), []
    x = oracle.embedding[ids]
    for start, stop in [(0, 5 - coda), (prelude, 5 - coda), (prelude, 5)]:
        x, seen = run_trip(oracle, x, range(start, stop), 3, variant)
        counts += seen
    agree(model, ids, oracle.logits(x), oracle)
    assert sources_of(model.config) == counts


def sources_of(config):
    return [sources for sources, _ in source_counts(config, [visit for trip in plan(config) for visit in trip])]


def test_the_oracle_tells_the_variants_apart():
    model = build(case("block_sum", 3), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(1, 6)
    never_reset, _ = run_trip(oracle, oracle.embedding[ids], range(4), 3, "block_sum", reset=False)
    assert (oracle.logits(never_reset) - model(ids).logits).abs().max() > 1e-2
    with torch.no_grad():
        for name, t in oracle.w.items():
            if name.endswith("pseudo_query"):
                t.zero_()
    unscored, _ = run_trip(oracle, oracle.embedding[ids], range(4), 3, "block_sum")
    assert (oracle.logits(unscored) - model(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("variant,sublayers,final", [("block_sum", 520, 9), ("snapshot", 528, 10)])
def test_source_counts_at_three_billion(variant, sublayers, final):
    counts = sources_of(case(variant, 12, layers=48))
    assert len(counts) == 97
    assert (sum(counts[:-1]), counts[-1]) == (sublayers, final)
    rule = {
        "block_sum": [1 + i // 12 + (i % 12 > 0) for i in range(96)],
        "snapshot": [i // 12 + 2 for i in range(96)],
    }
    assert counts[:-1] == rule[variant]


@pytest.mark.parametrize("variant", VARIANTS)
def test_source_counts_are_the_states_that_are_read(variant):
    """The declared number against what the modules are handed."""
    model, seen = build(case(variant, 3)), []
    for module in model.modules():
        if isinstance(module, AttentionResiduals):
            read = module.read
            module.read = lambda state, read=read: (seen.append(len(state)), read(state))[1]
    model(tokens(1, 3))
    assert seen == sources_of(model.config)


@pytest.mark.parametrize("variant,each", [("block_sum", 0), ("snapshot", 1)])
def test_parameters(variant, each):
    added = count_parameters(case(variant, 3)) - count_parameters(config_of("vanilla"))
    assert added == 9 * (2 * 32 + each)


def fresh(variant, block_size=12):
    torch.manual_seed(0)
    return FathomForCausalLM(case(variant, block_size)).eval()


@pytest.mark.parametrize("others,percent", [(1, 95.3), (8, 71.5), (9, 69.1)])
def test_initial_weight_of_the_running_stream(others, percent):
    """Of `others` + 1 sources; e³ / (e³ + N) restated, and read off the module with one-hot sources."""
    assert 100 * math.exp(3) / (math.exp(3) + others) == pytest.approx(percent, abs=0.06)
    module = fresh("snapshot").model.final_residual
    sources = tuple(torch.eye(others + 1, 32)[i].view(1, 1, 32) for i in range(others + 1))
    weights = module.read(sources)[0].flatten()[: others + 1]
    assert 100 * weights[-1].item() == pytest.approx(percent, abs=0.06)
    assert torch.allclose(weights[:-1], weights[0].expand(others))


def test_initial_bias_is_an_option():
    options = {"variant": "snapshot", "recency_bias": 0.0}
    module = FathomForCausalLM(config_of("attention_residuals", residual_options=options)).model.final_residual
    assert module.read((torch.zeros(1, 1, 32), torch.ones(1, 1, 32)))[0].flatten().tolist() == [0.5] * 32


def test_block_sum_begins_with_the_embeddings_and_a_uniform_average():
    model = fresh("block_sum", block_size=1)
    x = torch.randn(1, 2, 32)
    first = model.model.layers[0].attn_residual
    assert torch.equal(first.read(first.begin(x))[0], x)
    sources = tuple(torch.randn(1, 2, 32) for _ in range(3))
    mean = model.model.layers[1].attn_residual.read(sources)[0]
    assert torch.allclose(mean, sum(sources) / 3, atol=1e-6)


def test_sources_are_scored_normed_and_summed_as_they_are():
    """Scaling a source leaves its weight and scales its share."""
    module = build(case("block_sum", 3), dtype=torch.float64).model.final_residual
    torch.manual_seed(0)
    a, b = torch.randn(2, 1, 1, 32, dtype=torch.float64)
    alpha = ((module.read((a, b))[0] - b) / (a - b)).mean()
    assert torch.allclose(module.read((1000 * a, b))[0], alpha * 1000 * a + (1 - alpha) * b, rtol=1e-5)


@pytest.mark.parametrize("bias", [None, torch.tensor([1.5], dtype=torch.float64)])
@pytest.mark.parametrize("sources", [1, 4])
def test_a_stack_is_the_list(sources, bias):
    """What a decoded token takes on a CPU is what training takes."""
    made = torch.Generator().manual_seed(sources)
    query, *states = (
        torch.randn(*shape, 8, generator=made, dtype=torch.float64) for shape in [()] + [(2, 3)] * sources
    )
    expected = pool(states, query, 1e-2, bias)
    assert (pool_stacked(states, query, 1e-2, bias) - expected).abs().max() < 1e-14
    if sources > 1:
        assert (pool_stacked(states, query, 1.0, bias) - expected).abs().max() > 1e-3


def test_gradients_of_sources_of_two_types():
    """Under autocast the embeddings are float32 and sums of updates bfloat16: each gets a gradient of its own."""
    module = build(case("block_sum", 3)).model.final_residual
    made = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(module.pseudo_query, generator=made)
    embeddings, *sums = (torch.randn(2, 3, 32, generator=made) for _ in range(3))
    sources = [embeddings, *(s.bfloat16() for s in sums)]
    wide = [s.clone().float() for s in sources]
    for those in (sources, wide):
        module.read(tuple(s.requires_grad_() for s in those))[0].square().sum().backward()
    for source, same in zip(sources, wide, strict=True):
        assert source.grad.dtype == source.dtype
        assert (source.grad.float() - same.grad).abs().max() < 2**-6 * same.grad.abs().max()


def test_half_precision_scores_are_wide():
    """Scores and softmax in float32: the weights of bf16 sources are those of the same sources widened."""
    model = build(case("snapshot", 3))
    module, half = model.model.final_residual, build(case("snapshot", 3), dtype=torch.bfloat16).model.final_residual
    module.load_state_dict(half.state_dict())
    sources = tuple(10 * torch.randn(1, 3, 32).bfloat16() for _ in range(4))
    wide, narrow = module.read(tuple(s.float() for s in sources))[0], half.read(sources)[0]
    assert narrow.dtype == torch.bfloat16
    assert (wide - narrow).abs().max() < 3 * 2**-8 * max(s.abs().max() for s in sources)


@pytest.mark.parametrize("options,says", [({"block_size": 0}, "block_size"), ({"variant": "sum"}, "variant")])
def test_bad_options_name_the_key(options, says):
    with pytest.raises(ValueError, match=f"residual_options.{says}"):
        config_of("attention_residuals", residual_options=options)


# --- delta: what is pooled is added to the running stream -------------------------------------------------------------


def run_delta(oracle, x, layers, block_size, published=False):
    """One trip of `delta` (no block size) or `delta_block`: the stream, and how many sources every read had.

    `published` is the recurrence of the public code: each block's end less the source before it.
    """
    blocks, start, counts, sources = [], x, [], []
    for i in layers:
        for part, kind in enumerate(("attn", "mlp")):
            if published and sources:
                found = sources
            else:
                closed = blocks if block_size is None else blocks[:-1]
                found = [start, *(sum(block) for block in closed)] if blocks else []
            counts.append(len(found))
            h = x
            if len(found) == 1:
                h = x + found[0]
            if len(found) > 1:
                h = x + aggregate(oracle, f"model.layers.{i}.{kind}_residual", found, snapshot=False)
            update = oracle.attention(i, h) if part == 0 else oracle.mlp(i, h)
            if block_size is None or not blocks or (2 * i + part) % block_size == 0:
                blocks.append([])
                sources = [*sources, x - sources[-1] if sources else x] if published else []
            blocks[-1].append(update)
            x = x + update
    return x, [*counts, 0]


def delta(block_size, layers=4, **options):
    named = {"variant": "delta"} if block_size is None else {"variant": "delta_block", "block_size": block_size}
    return config_of("attention_residuals", num_hidden_layers=layers, residual_options=named | options)


@pytest.mark.parametrize("block_size", [None, 1, 2, 3, 12])
def test_deltas_equations(block_size):
    model = build(delta(block_size), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(2, 7)
    stream, counts = run_delta(oracle, oracle.embedding[ids], range(4), block_size)
    agree(model, ids, oracle.logits(stream), oracle)
    assert sources_of(model.config) == counts


@pytest.mark.parametrize("block_size", [None, 3])
def test_deltas_start_afresh_in_every_trip(block_size):
    config = config_of(
        "loop",
        num_hidden_layers=5,
        residual="attention_residuals",
        residual_options=delta(block_size).residual_options,
        recurrence_options={"trips": 2, "prelude": 1, "coda": 1},
    )
    model = build(config, dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(1, 6)
    x, first = run_delta(oracle, oracle.embedding[ids], range(4), block_size)
    x, second = run_delta(oracle, x, range(1, 5), block_size)
    agree(model, ids, oracle.logits(x), oracle)
    assert sources_of(model.config) == first + second


@pytest.mark.parametrize("layers,same", [(4, True), (5, False)])
def test_the_published_delta_block_has_other_sources_from_the_third_on(layers, same):
    """With blocks of two layers the MLP of the fifth is the first to read a third source."""
    model = build(delta(4, layers=layers), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(1, 6)
    stream, _ = run_delta(oracle, oracle.embedding[ids], range(layers), 4, published=True)
    with torch.no_grad():
        off = (oracle.logits(stream) - model(ids).logits).abs().max()
    assert off < 1e-9 if same else off > 1e-3


@pytest.mark.parametrize("block_size", [None, 3])
def test_a_closed_delta_is_vanilla(block_size):
    vanilla = build(config_of("vanilla"))
    model = build(delta(block_size, blend=0.0), seed=1)
    model.load_state_dict(vanilla.state_dict(), strict=False)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, vanilla(ids).logits)


def test_only_reads_of_several_sources_have_a_query():
    """One for each sub-layer but the first; with blocks of three, for those after the second block has begun."""
    for block_size, reads in ((None, 7), (3, 4), (12, 0)):
        assert count_parameters(delta(block_size)) - count_parameters(config_of("vanilla")) == reads * 2 * 32

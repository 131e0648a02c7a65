"""The conformance suite: what it takes to be a supported mechanism, over the registry and the sensible compositions."""

import copy
import json
import subprocess
import sys
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from fathom.checkpoints.export import export
from fathom.models import FathomForCausalLM
from fathom.models.axes.roles import Residual, ValueMixer, View
from fathom.models.cost import cache_bytes_per_token, count_parameters, mechanism_cost
from fathom.models.decoder.rotary import signed
from fathom.models.mixers.depth_attention import depth_weights
from fathom.models.registry import AXES, MECHANISMS, mechanism, parse_mechanism

from .cases import (
    CASES,
    FAST,
    SHAPE,
    build,
    closed,
    config_of,
    in_turn,
    set_options,
    tokens,
    vanilla_of,
    with_every_mechanism,
    with_gains,
)
from .ranks import on_two_ranks, sharded_gradients

every_case = pytest.mark.parametrize("case", in_turn(CASES))


def recurrence_of(case):
    return parse_mechanism(CASES[case][0])["recurrence"]


def in_two_lots(some):
    """Cases of which many go into one process: some at once, and the others, which are slow."""
    others = pytest.param([case for case in CASES if case not in some], marks=pytest.mark.slow)
    return pytest.mark.parametrize("cases", [some, others], ids=["some", "the others"])


EXACT = 1e-11  # float64
CLOSE = 1e-4  # float32, as logits


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits


def in_chunks(model, ids, sizes, cache, **kwargs):
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache, **kwargs).logits for part in ids.split(sizes, 1)], 1)


def worst(a, b):
    return (a.double() - b.double()).abs().max().item()


def test_a_new_mechanism_is_a_case():
    """So the registry is covered without a list that somebody must keep."""
    few = {"both": ("loop+denseformer", {"recurrence": {"trips": 2}})}
    assert with_every_mechanism(few, ["loop", "new"]) == {**few, "new": ("new", {})}
    used = {name for case, _ in CASES.values() for name in case.split("+")}
    assert {*MECHANISMS, "vanilla"} - {"none", "plain", "once"} == used


# --- the baseline -----------------------------------------------------------------------------------------------------


@pytest.mark.quick("shape0-*", "*-sdpa-dtype0", "*-eager-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"layers": "sliding"}])
def test_vanilla_is_qwen3_bitwise(dtype, backend, shape):
    if "layers" in shape:
        shape = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    ours = build(config_of("vanilla", **shape), dtype=dtype)
    theirs = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **shape)).eval().to(dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model.set_attn_implementation(backend)
    ids = tokens(2, 19)
    assert torch.equal(logits(ours, ids), logits(theirs, ids))
    assert torch.equal(ours(ids).logits, theirs(ids).logits), "also with gradients on"
    sizes = [7, 1, 1, 10]
    caches = [DynamicCache(config=m.config) for m in (ours, theirs)]
    assert torch.equal(in_chunks(ours, ids, sizes, caches[0]), in_chunks(theirs, ids, sizes, caches[1]))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 1e4,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_rope_scaling_is_qwen3s(rope):
    ours = build(config_of("vanilla", rope_parameters=rope))
    theirs = Qwen3ForCausalLM(Qwen3Config(**SHAPE, rope_parameters=rope)).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = tokens(1, 100)
    assert torch.equal(logits(ours, ids), logits(theirs, ids))


# --- one function, however it is called -------------------------------------------------------------------------------


@every_case
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_full_is_chunked_is_static(case, data):
    model = _cached_model(case)
    cuts = sorted(data.draw(st.sets(st.integers(1, 11), max_size=11), label="cuts"))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
    ids = tokens(2, 12)
    full = logits(model, ids)
    assert worst(in_chunks(model, ids, sizes, DynamicCache(config=model.config)), full) < EXACT
    assert worst(in_chunks(model, ids, sizes, StaticCache(config=model.config, max_cache_len=14)), full) < EXACT


_models: dict = {}


def _cached_model(case):
    if case not in _models:
        _models[case] = build(config_of(case), dtype=torch.float64)
    return _models[case]


@pytest.mark.quick("attention_residuals", "hyper_connections", "ponder3", "ponder@gpt2", "latent_cot@gemma")
@every_case
def test_token_by_token_in_single_precision(case):
    model, ids = build(config_of(case)), tokens(2, 12)
    stepwise = in_chunks(model, ids, 1, DynamicCache(config=model.config))
    assert worst(stepwise, logits(model, ids)) < CLOSE


@every_case
def test_left_padded_rows_are_single_rows(case):
    model = _cached_model(case)
    rows = [tokens(1, n, seed=n) for n in (5, 9, 12)]
    padded = torch.zeros(3, 12, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for i, row in enumerate(rows):
        padded[i, 12 - row.shape[1] :], mask[i, 12 - row.shape[1] :] = row, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    together = logits(model, padded, attention_mask=mask)  # by the mask alone
    assert torch.equal(together, logits(model, padded, attention_mask=mask, position_ids=positions))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():  # prefill, then decode the last token
        model(padded[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
        step = model(padded[:, -1:], attention_mask=mask, past_key_values=cache)
    for i, row in enumerate(rows):
        alone = logits(model, row)[0]
        assert worst(together[i, 12 - row.shape[1] :], alone) < EXACT
        assert worst(step.logits[i, 0], alone[-1]) < EXACT


@pytest.mark.quick("hyper_connections", "attention_residuals")
@every_case
def test_shapes_alone_are_computed(case):
    """On the meta device a model too large for the memory is read and trained without a number."""
    with torch.device("meta"):
        model, ids = FathomForCausalLM(config_of(case)), torch.zeros(2, 9, dtype=torch.long)
    with torch.no_grad():
        assert model.eval()(ids, use_cache=False).logits.shape == (2, 9, model.config.vocab_size)
    assert model.train()(ids, labels=ids).loss.shape == ()


@every_case
def test_all_positions_may_move(case):
    """But for learned positions, and up to the rounding of rotary angles."""
    model, ids = _cached_model(case), tokens(1, 9)
    at = torch.arange(9).unsqueeze(0)
    apart = worst(logits(model, ids, position_ids=at), logits(model, ids, position_ids=at + 50))
    chosen = model.config.recurrence_options.get("halting") in ("uniform", "geometric")  # by position
    assert (apart > 1e-2) if model.config.positions == "learned" or chosen else (apart < CLOSE)


@every_case
def test_packed_documents_are_single_rows(case):
    model = _cached_model(case)
    documents = [tokens(1, n, seed=n) for n in (4, 7, 6)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents]).unsqueeze(0)
    alone = torch.cat([logits(model, d) for d in documents], 1)
    for use_cache in (False, True):
        with torch.no_grad():
            packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=use_cache).logits
        assert worst(packed, alone) < EXACT, use_cache


@pytest.mark.quick("vanilla", "depth_attention", "ponder-hidden-duo", "ponder2", "adaponder", "latent_cot@gemma")
@every_case
def test_gradients_of_packed_documents_are_their_own(case):
    """And in single precision not a bit of a document depends on the one before it; read as one text, it does."""
    model, sizes = _cached_model(case), (4, 5, 3)
    documents = [tokens(1, n, seed=n) for n in sizes]
    row = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(n) for n in sizes]).unsqueeze(0)

    def gradients(parts):
        losses = [cross_entropy(part[0, :-1], ids[0, 1:]) for part, ids in zip(parts, documents, strict=True)]
        wanted = [one for one in model.parameters() if one.requires_grad]
        return torch.autograd.grad(sum(losses), wanted, allow_unused=True)

    packed = gradients(model(row, position_ids=positions, use_cache=False).logits.split(sizes, 1))
    alone = gradients([model(ids, use_cache=False).logits for ids in documents])
    assert [one is None for one in packed] == [one is None for one in alone]
    pairs = [pair for pair in zip(packed, alone, strict=True) if pair[0] is not None]
    largest = max(b.abs().max().item() for _, b in pairs)
    assert max(worst(a, b) for a, b in pairs) < EXACT * max(1.0, largest)
    if case == "vanilla":  # the control: without positions they are one text, and the gradients are others
        joined = gradients(model(row, use_cache=False).logits.split(sizes, 1))
        assert max(worst(a, b) for a, b in zip(joined, alone, strict=True)) > 1e-3 * largest
    single, changed = copy.deepcopy(model).float(), row.clone()
    changed[:, :4] = tokens(1, 4, seed=77)
    for where, same in ((positions, True), (None, False)):
        one, other = (logits(single, ids, position_ids=where)[:, 4:] for ids in (row, changed))
        # An expert's product may round otherwise with another number of rows, and others' tokens are among them.
        equal = worst(one, other) < CLOSE if single.config.experts else torch.equal(one, other)
        assert equal is same


@pytest.mark.quick("True-*")
@every_case
@pytest.mark.parametrize("use_cache", [False, True])
def test_with_a_mask_nothing_is_packed(case, use_cache):
    """Positions that stand still in a hole, and such that begin anew: one row either way, as in transformers."""
    model, ids = _cached_model(case), tokens(1, 9)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
    here = mask.bool()[0]
    with torch.no_grad():
        holed = model(ids, attention_mask=mask, position_ids=mask.cumsum(1) - 1, use_cache=use_cache).logits
        assert worst(holed[:, here], logits(model, ids[:, here])) < EXACT
        anew = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        first = model(ids, attention_mask=torch.ones_like(ids), position_ids=anew, use_cache=use_cache).logits
        other = torch.cat([tokens(1, 4, seed=5), ids[:, 4:]], 1)
        second = model(other, attention_mask=torch.ones_like(ids), position_ids=anew, use_cache=use_cache).logits
    assert worst(first[:, 4:], second[:, 4:]) > 1e-3, "the tokens before the new beginning are read"


@every_case
def test_prefix_invariance(case):
    model, ids = _cached_model(case), tokens(1, 14)
    changed = ids.clone()
    changed[:, 8:] = tokens(1, 6, seed=99)
    before, after = logits(model, ids), logits(model, changed)
    assert worst(before[:, :8], after[:, :8]) < EXACT
    assert worst(before[:, 8:], after[:, 8:]) > 1e-3, "the change must be visible somewhere"


@every_case
@pytest.mark.quick("beam-*")
@pytest.mark.parametrize("how", ["beam", "greedy", "sampled"])
def test_generate_is_its_uncached_self(case, how):
    """By beams of all cases: they also change places in the cache."""
    model = build(config_of(case))
    arguments = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "top_k": 20},
        "beam": {"do_sample": False, "num_beams": 3},
    }[how]
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens(1, 4)], 1)
    batch = torch.cat([ids, tokens(1, 7, seed=5)])  # one row is padded
    mask = (batch != 0).long()
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        outputs.append(model.generate(batch, attention_mask=mask, max_new_tokens=4, use_cache=use_cache, **arguments))
    assert torch.equal(*outputs)


# The two faults of the published code must be visible to the property above: a suite that cannot see them is worthless.


def _step_errors(fault):
    """Largest error of token-by-token decoding when past values are re-mixed with the current query."""
    model = build(config_of("depth_attention", num_hidden_layers=6), dtype=torch.float64)
    ids = tokens(1, 12)
    full = logits(model, ids)
    raw: dict[int, list] = {}

    for layer in model.model.layers:
        mixer, index = layer.self_attn.mixer, layer.self_attn.layer_idx
        raw[index] = []

        def remix(query, key, value, sources, *, mixer=mixer, index=index):
            raw[index].append((key, value))
            keys, values = (torch.cat(t, 2) for t in zip(*raw[index], strict=True))
            if not sources:
                history[index] = (keys, values)
                return values
            stride = model.config.mixer_options["stride"]
            past = [history[i] for i in range(index) if i % stride == 0]
            flat = tuple(t for pair in past for t in pair)
            spread = query.expand(-1, -1, keys.shape[2], -1)  # the current query for every past token
            weights, _ = depth_weights(spread, keys, flat)
            mixed = sum(w * v for w, v in zip(weights, (*flat[1::2], values), strict=True))
            history[index] = (keys, mixed)
            return mixed

        mixer.forward = remix

    history: dict = {}
    steps = []
    for t in range(ids.shape[1]):
        history.clear()
        cache = _KeysOnly(model, raw, top_left=fault == "top_left_mask")
        steps.append(cache.step(ids[:, t : t + 1], t))
    return worst(torch.cat(steps, 1), full)


class _KeysOnly:
    """Stands in for a cache in the published code's place: attention sees what the faulty mixer returns."""

    def __init__(self, model, raw, top_left):
        self.model, self.raw, self.top_left = model, raw, top_left

    def update(self, key, value, layer):
        keys = torch.cat([k for k, _ in self.raw[layer]], 2)
        if self.top_left and layer > 0:  # `is_causal` aligned to the top left: one query sees key 0 alone
            return keys[:, :, :1], value[:, :, :1]
        return keys, value

    def step(self, token, position):
        model = self.model.model
        x = model.embed_tokens(token)
        rotary = signed(model.rotary_emb(x, torch.tensor([[position]])))
        state, kept = (x,), {}
        with torch.no_grad():
            for visit in model.plan[0]:
                sources = tuple(t for i in visit.sources for t in kept[i])
                layer = model.layers[visit.layer]
                *state, key, value = layer(
                    *state,
                    sources=sources,
                    attention_mask=None,
                    rotation=rotary,
                    past_key_values=self,
                    is_causal=False,
                )
                kept[visit.index] = (key, value)
            return self.model.lm_head(model.norm(state[0]))


def test_the_published_faults_are_seen():
    assert _step_errors("remix") > 0.05
    assert _step_errors("top_left_mask") > 0.5


@pytest.mark.quick("shape1-vanilla", "shape0-loop@olmo2", "shape1-ponder3", "shape0-latent_cot@gemma")
@every_case
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_an_empty_input_is_an_error_in_one_line(case, shape):
    """And leaves a cache as it was."""
    model, ids = build(config_of(case)), torch.zeros(shape, dtype=torch.long)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(2, 3), past_key_values=cache)
        for kwargs in ({}, {"use_cache": False}, {"labels": ids}, {"past_key_values": cache}):
            with pytest.raises(ValueError, match=f"^the input is empty: {shape[0]} sequences of {shape[1]} tokens$"):
                model(ids, **kwargs)
        assert cache.get_seq_length() == 3
        model(tokens(2, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="the input is empty"):
        model.train()(inputs_embeds=torch.zeros(*shape, 32), labels=ids)


# --- training ---------------------------------------------------------------------------------------------------------


def gradients(model, ids, **kwargs):
    model.train()
    model.zero_grad()
    model(ids, labels=ids, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_case
def test_every_parameter_gets_a_gradient(case):
    """Also where activations are computed again, by either kind of checkpointing, unless that is refused."""
    model = build(config_of(case), dtype=torch.float64)
    ids = tokens(2, 32 if model.config.experts else 16)  # enough for every expert to be chosen
    found = gradients(model, ids)
    assert set(found) == {name for name, _ in model.named_parameters()}
    dead = {name for name, g in found.items() if not g.abs().sum() > 0}
    # A softmax over one source is constant, so nothing can move its query; in a parallel layer both reads have one.
    alone = ("attn_residual", "mlp_residual") if model.config.parallel_residual else ("attn_residual",)
    assert all(name.startswith(tuple(f"model.layers.0.{part}." for part in alone)) for name in dead), dead
    model.activation_checkpointing_enable()
    again = gradients(model, ids)
    assert max(worst(found[name], again[name]) for name in found) < 1e-12
    more = any(visit.sources or visit.borrows for trip in model.model.plan for visit in trip)
    more |= model.config.recurrence in ("ponder2", "ponder3", "adaponder", "latent_cot")
    if more or model.config.recurrence_options.get("view", "same") != "same":
        with pytest.raises(ValueError, match="use_reentrant=True loses the gradients"):
            model.activation_checkpointing_enable({"use_reentrant": True})
        return
    model.activation_checkpointing_enable({"use_reentrant": True})
    again = gradients(model, ids)
    assert max(worst(found[name], again[name]) for name in found) < 1e-12


SEVERAL_PASSES = [case for case in CASES if recurrence_of(case) not in ("once", "loop")]


def small_graph(case, backend="aot_eager"):
    """A graph holds every pass; of two layers one has a source, and of three one is looped."""
    torch._dynamo.reset()
    few = dict.fromkeys((*SEVERAL_PASSES, "vanilla", "depth_attention", "loop+depth_attention"), 2) | {"loop-damped": 3}
    layers = {"num_hidden_layers": few[case]} if case in few else {}
    model = build(config_of(case, **layers), dtype=torch.float64)
    return model, torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.quick("depth_attention")  # tracing takes long
@pytest.mark.parametrize("case", CASES)
def test_training_is_one_graph(case):
    (model, whole), ids = small_graph(case), tokens(2, 16)
    plain = gradients(model, ids)
    model.zero_grad()
    whole(ids, labels=ids).loss.backward()
    compiled = {name: p.grad for name, p in model.named_parameters()}
    assert max(worst(plain[name], compiled[name]) for name in plain) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_evaluation_is_one_graph(case):
    (model, whole), ids = small_graph(case, "eager"), tokens(2, 16)  # training lowers it further
    if model.model.recurrence.exact():  # a hundred passes in one graph would only be slow
        set_options(model, prefill="jacobi")
    with torch.no_grad():
        assert worst(whole(ids, use_cache=False).logits, logits(model, ids)) < 1e-10


@pytest.mark.slow
@in_two_lots(FAST[::4])
def test_two_fsdp_ranks_are_one_process(tmp_path, cases):
    """Many cases in one launch, since starting two processes costs more than the comparison."""
    on_two_ranks(sharded_gradients, tmp_path, list(cases))
    for case in cases:
        model, ids = build(config_of(case), dtype=torch.float64), tokens(4, 16)
        whole = gradients(model, ids)
        sharded = torch.load(tmp_path / f"{case}.pt", weights_only=True)
        assert set(sharded) == set(whole), case
        assert max(worst(whole[name], sharded[name]) for name in whole) < 1e-10, case


# --- life of a checkpoint ---------------------------------------------------------------------------------------------


@every_case
def test_initialised_from_nothing(case):
    config = config_of(case)
    fresh = FathomForCausalLM(config)
    with torch.device("meta"):
        empty = FathomForCausalLM(config)
    empty.to_empty(device=torch.get_default_device())
    assert any(p.isnan().any() for p in empty.parameters()), "the poison must work"
    for module in empty.modules():
        module._is_hf_initialized = False
    empty.init_weights()
    for model in (fresh, empty):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert tensor.isfinite().all(), name


ONCE = [case for case in CASES if recurrence_of(case) == "once"]
ROUNDING = 1e-6
"""Of a logit, where sums are made in another order. Everywhere else a start is exact."""


@every_case
def test_the_start_is_exact_where_declared(case):
    """With the options that close every mechanism of a case, and queries and keys of three times the size."""
    config = config_of(case)
    parts = [mechanism(axis, getattr(config, axis)) for axis in AXES]
    torch.manual_seed(0)
    vanilla = with_gains(FathomForCausalLM(config_of(vanilla_of(case), initializer_range=0.1)).eval())
    torch.manual_seed(1)
    model = FathomForCausalLM(config_of(case, initializer_range=0.1, **closed(config))).eval()
    model.load_state_dict(vanilla.state_dict(), strict=False)
    ids = tokens(2, 16)
    found, expected = logits(model, ids), logits(vanilla, ids)
    same = torch.equal(found, expected)
    if config.parallel_residual and config.residual != "plain":
        same = torch.allclose(found, expected, rtol=0, atol=ROUNDING)
    if config.recurrence == "ponder" and model.model.recurrence.view is View.DUO:  # trips read equal ones: more to sum
        same = worst(logits(model.double(), ids), logits(vanilla.double(), ids)) < EXACT
        model, vanilla = model.float(), vanilla.float()
    assert same == (all(part.closed is not None for part in parts) and model.model.recurrence.view is not View.ALL)
    opened = FathomForCausalLM(config_of(case, initializer_range=0.1)).eval()
    opened.load_state_dict(vanilla.state_dict(), strict=False)
    learned = [axis for axis in AXES if getattr(config, f"{axis}_options").get("blend") == "learned"]
    if config.residual_options.get("gates"):  # a loop with gates for each visit is closed by them
        learned.append("recurrence")
    if any(part.closed for part in parts if part.axis not in learned):
        assert not torch.equal(logits(opened, ids), expected), "open, it is another function"


CLEAN_ROOM = """
import json, sys
sys.modules["fathom"] = None  # importing it raises
import torch
from transformers import AutoModel, AutoModelForCausalLM
torch.set_num_threads(1)

def opened(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    for p in model.parameters():  # a file's bytes lie where they lie; narrow products round by where that is
        p.data = p.data.clone()
    return model

for directory in json.loads(sys.argv[1]):
    saved = torch.load(directory + ".pt", weights_only=True)
    model = opened(directory)
    with torch.no_grad():
        assert torch.equal(model(saved["ids"]).logits, saved["logits"]), directory
    generated = model.generate(saved["ids"], max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, saved["generated"]), directory
    model.save_pretrained(directory + "-again")
    again = opened(directory + "-again")
    with torch.no_grad():
        assert torch.equal(again(saved["ids"]).logits, saved["logits"]), directory
    AutoModel.from_pretrained(directory, trust_remote_code=True)
print("all equal")
"""


@pytest.mark.slow
def test_exports_open_in_a_clean_process(tmp_path, monkeypatch):
    """All cases in one process that cannot import Fathom; `tests/checkpoints/test_export.py` opens one."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    directories = []
    for case in CASES:
        model, ids = build(config_of(case)), tokens(2, 9)
        directory = export(model, tmp_path / case.replace("+", "-and-"))
        with torch.no_grad():
            expected = {
                "ids": ids,
                "logits": model(ids).logits,
                "generated": model.generate(ids, max_new_tokens=4, do_sample=False),
            }
        torch.save(expected, f"{directory}.pt")
        directories.append(str(directory))
    command = [sys.executable, "-c", CLEAN_ROOM, json.dumps(directories)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert "all equal" in result.stdout, result.stderr[-3000:]


# --- cost -------------------------------------------------------------------------------------------------------------


class Arithmetic(TorchDispatchMode):
    """Counts multiplications and additions, element-wise ones included."""

    def __init__(self):
        super().__init__()
        self.products, self.elementwise = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__.rstrip("_")  # in place or not
        if name in ("mm", "addmm", "bmm"):
            a, b = args[-2], args[-1]
            self.products += 2 * a.numel() * b.shape[-1]
        elif "scaled_dot_product" in name:
            query, key = args[:2]
            self.products += 4 * query.numel() * key.shape[-2]
        elif name in ("mul", "add", "sub", "div", "maximum", "exp", "sigmoid", "pow", "lerp", "addcmul", "rsqrt"):
            self.elementwise += out.numel() * {"lerp": 3, "addcmul": 2}.get(name, 1)
        elif name in ("sum", "mean", "amax"):
            self.elementwise += args[0].numel()
        return out


WIDE = {"num_attention_heads": 8, "head_dim": 32, "hidden_size": 256, "num_hidden_layers": 12}


@cache
def counted(case, length):
    """Operations per token of the wide shape."""
    model, ids = build(config_of(case, **WIDE, max_position_embeddings=512)), tokens(1, length)
    with Arithmetic() as counter, torch.no_grad():
        model(ids, use_cache=False)
    return (counter.products + counter.elementwise) / ids.numel()


@every_case
def test_declared_cost_is_measured(case):
    config = config_of(case)
    cost = mechanism_cost(config, bytes_per_scalar=4)
    model, vanilla = build(config), config_of(vanilla_of(case))
    assert cost.parameters == count_parameters(config) - count_parameters(vanilla)

    cache = DynamicCache(config=config)
    in_chunks(model, tokens(1, 9), [5, 1, 1, 1, 1], cache)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    declared = cache_bytes_per_token(config, 4)
    if model.model.slotted:
        table = cache.layers[0].table
        bias = 4 * ("bias" in table.extra)
        assert table.end == (1 + table.halt).sum()
        trips = model.model.recurrence.trips
        assert held + bias * table.end == table.end * declared / trips
        assert table.end == 9 * trips or model.model.recurrence.halts
    else:
        assert held == 9 * declared
    assert cost.cache_bytes == declared - cache_bytes_per_token(vanilla, 4)
    recurrence = model.model.recurrence
    if recurrence.view is not View.ALL and not recurrence.halts:  # what is left out or solved at once varies
        assert transient_bytes(model) == cost.transient_bytes


def transient_bytes(model):
    """Bytes per token beyond one stream: every source handed to a mixer, and the residual state at its largest."""
    ids, sources, states = tokens(1, 8), {}, []
    stream = ids.numel() * model.config.hidden_size * 4

    def look(module, args):
        sources.update({t.data_ptr(): t for t in args[3]})  # kept: no address is used twice

    def watch(residual):
        read = residual.read

        def watched(state):
            states.append(sum({id(t): t.nbytes for t in state}.values()) - stream)
            return read(state)

        residual.read = watched

    for module in model.modules():
        if isinstance(module, ValueMixer):
            module.register_forward_pre_hook(look)
        if isinstance(module, Residual):
            watch(module)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return (sum(t.nbytes for t in sources.values()) + max(states)) / ids.numel()


@pytest.mark.parametrize("case", in_turn(ONCE))  # every recurrence counts its trips in a test of its own
def test_declared_flops_are_measured(case):
    cost = mechanism_cost(config_of(case, **WIDE))
    length = 288 if "normed" in case else 72  # more than `few`; normed queries are pooled first
    extra = counted(case, length) - counted(vanilla_of(case), length)
    declared = cost.flops + cost.elementwise_flops
    # The papers count an addition for every term of a sum; the first term needs none.
    assert extra == pytest.approx(declared, rel=0.12, abs=1)

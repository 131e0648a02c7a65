"""What the five thinking recurrences have in common, against an oracle that makes one slot after another."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, TrainerState

from fathom.models import FathomForCausalLM
from fathom.models.axes.numerics import lowest_mean
from fathom.models.axes.roles import View
from fathom.models.cost import mechanism_cost
from fathom.models.decoder.arithmetic import layer_flops
from fathom.models.recurrences.ponder2 import Ponder2Options
from fathom.models.recurrences.pondering import Pondering, lowest_sum
from fathom.models.trips import walk
from fathom.models.trips.slot_table import gathering_pays
from fathom.training.callback import FollowSteps

from .cases import SHAPE, set_options, tokens
from .slot_oracle import HALTING, METHODS, OPEN, Decoder, thinker

EXACT, CLOSE = 1e-12, 1e-5  # float64, float32: relative to the largest logit
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}

every_method = pytest.mark.parametrize("method", METHODS)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits


def stepwise(model, ids, sizes=1, cache=None, **kwargs):
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache, **kwargs).logits for part in ids.split(sizes, 1)], 1)


def error(found, truth):
    """Largest error, relative to the largest logit."""
    return ((found.double() - truth).abs().max() / truth.abs().max()).item()


@functools.cache
def oracle(method, mixer="", open_=False, **shape):
    """A model, the truth of two rows, and which trip each token stops at."""
    model = thinker(method, mixer, shape=shape, **(OPEN.get(method, {}) if open_ else {}))
    decoder, ids, truths, halts = Decoder.of(model), tokens(2, 9), [], []
    with torch.no_grad():
        for row in ids:
            truths.append(decoder.truth(row))
            halts.append(list(decoder.halt.values()))
    return model, ids, torch.stack(truths), torch.tensor(halts)


# --- one function -----------------------------------------------------------------------------------------------------


@pytest.mark.quick(
    "+depth_attention-False-ponder-all",
    "+depth_attention-False-ponder3",
    "+depth_attention-False-adaponder",
    "+depth_attention-False-latent_cot",
)
@every_method
@pytest.mark.parametrize(
    ("mixer", "open_"), [(mixer, open_) for mixer in ("", "+depth_attention") for open_ in (True, False)]
)
def test_every_way_of_computing_is_the_oracle(method, mixer, open_):
    """All at once, in chunks and token by token, with tokens that halt where the data says and without."""
    model, ids, truth, halt = oracle(method, mixer, open_)
    depth = model.model.recurrence.trips - 1
    ragged = method in HALTING and not open_
    assert set(halt.flatten().tolist()) >= ({0, depth} if ragged else {depth})
    assert error(logits(model, ids), truth) < EXACT
    cache = DynamicCache(config=model.config)
    assert error(stepwise(model, ids, 1, cache), truth) < EXACT
    if model.model.slotted:
        assert torch.equal(cache.layers[0].table.halt, halt)
    assert error(stepwise(model, ids, [4, 1, 3, 1]), truth) < EXACT


@pytest.mark.quick("ponder-all", "latent_cot")
@every_method
def test_single_precision(method):
    model, ids, truth, _ = oracle(method, "+depth_attention")
    ids, truth = ids[:, :5], truth[:, :5]  # under ALL every slot stands on the errors of all slots before it
    single = FathomForCausalLM(model.config).eval()
    single.load_state_dict(model.state_dict())
    assert error(logits(single, ids), truth) < CLOSE
    assert error(stepwise(single, ids), truth) < CLOSE


@pytest.mark.parametrize(
    "method,use_cache",
    [("adaponder", True), *itertools.product(["ponder-duo", "ponder3", "latent_cot"], [False, True])],
)
def test_backends_without_masks_are_refused(method, use_cache):
    """Without a cache `adaponder` replaces keys and values, and needs none."""
    model = thinker(method)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match="needs attn_implementation sdpa, eager or flex_attention, not flash_attention_2"
    ) as found:
        logits(model, tokens(1, 6)) if not use_cache else stepwise(model, tokens(1, 6))
    assert "\n" not in str(found.value)


@pytest.mark.quick("ponder-all", "ponder3", "adaponder")
@every_method
@settings(max_examples=4, deadline=None)
@given(rounds=st.integers(0, 4), cut=st.integers(1, 8))
def test_prefix_invariance_at_any_number_of_rounds(method, rounds, cut):
    model, ids, _, _ = oracle(method)
    before = dict(model.config.recurrence_options)
    set_options(model, **({"prefill": "jacobi", "jacobi_eval": rounds} if "jacobi_eval" in before else {}))
    try:
        changed = torch.cat([ids[:, :cut], tokens(2, 9 - cut, seed=9)], 1)
        a, b = logits(model, ids), logits(model, changed)
    finally:
        set_options(model, **before)
    assert error(a[:, :cut], b[:, :cut]) < EXACT
    assert error(a[:, cut:], b[:, cut:]) > 1e-2


@every_method
def test_hidden_states_are_the_slots(method):
    """Trip by trip, every layer's input, and last what the head reads."""
    model, ids, _, halt = oracle(method)
    decoder = Decoder.of(model)
    with torch.no_grad():
        decoder.truth(ids[0])
        out = model.model(ids, head=model.lm_head, use_cache=False, output_hidden_states=True)
    depth, layers = model.model.recurrence.trips - 1, model.config.num_hidden_layers
    last = out.hidden_states[-1]
    trips = [out.hidden_states[-1 - (depth + 1 - k) * layers] for k in range(depth + 1)]
    assert torch.equal(last, out.last_hidden_state)
    for t in range(ids.shape[1]):
        for k in range(int(halt[0, t]) + 1):
            assert (trips[k][0, t] - decoder.x[t, k]).abs().max() < 1e-11


@pytest.mark.quick("ponder-duo", "ponder3", "latent_cot")
@every_method
def test_half_precision(method):
    """Training under autocast is training, and a model kept in half precision decodes."""
    model, ids = thinker(method, dtype=torch.float32, **OPEN.get(method, {})).train(), tokens(2, 7)
    plain = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        half = model(ids, labels=ids).loss
        cached = greedy(model.eval(), ids)
    half.backward()
    assert half.item() == pytest.approx(plain.item(), rel=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    low = greedy(model.bfloat16(), ids)
    assert all(x.isfinite().all() for x in (*cached.logits, *low.logits))


# --- vanilla inside ---------------------------------------------------------------------------------------------------


def vanilla_of(model):
    qwen = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "num_hidden_layers": 2})).eval()
    found = {n: p for n, p in model.state_dict().items() if "recurrence" not in n}
    qwen.load_state_dict(found)
    qwen.generation_config.eos_token_id = None
    return qwen


def greedy(model, ids):
    return model.generate(ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)


SHUT = {
    "adaponder": {"gate_bias": -20.0, "tau": 1e-4},
    "latent_cot": {"router_bias": -10.0, "tau": 1e-2},
    "ponder3": {"router_bias": 20.0, "tau": 1e-4},
}


@pytest.mark.quick("ponder-shut0", "ponder3-shut9", "adaponder-shut7", "latent_cot-shut6")
@pytest.mark.parametrize("method,shut", [*((m, {"trips": 1}) for m in METHODS), *SHUT.items()])
def test_vanilla_inside(method, shut):
    """No further trip is no recurrence, bit for bit; under ALL, dead slots still take part in the solver's sums."""
    dtype = torch.float64 if shut == SHUT["ponder3"] else torch.float32
    model = thinker(method, dtype=dtype, shape={"embedding_scale": 1.0}.items(), **shut)
    qwen, ids = vanilla_of(model).to(dtype), tokens(2, 9)
    truth = logits(qwen, ids)
    if shut == SHUT["ponder3"]:  # in float64; what differs is Qwen3, whose norms are float32
        set_options(model, prefill="jacobi")
        assert error(logits(model, ids), truth) < 1e-6
        assert error(stepwise(model, ids, [6, 1, 2]), truth) < 1e-6
        set_options(model, prefill="exact")
        assert error(stepwise(model, ids, 1), truth) < 1e-6
    else:
        assert torch.equal(logits(model, ids), truth)
        assert torch.equal(model(ids, use_cache=False).logits, truth), "also with gradients on"
        assert torch.equal(stepwise(model, ids, [6, 1, 2]), stepwise(qwen, ids, [6, 1, 2]))
    ours, theirs = greedy(model, ids), greedy(qwen, ids)
    assert torch.equal(ours.sequences, theirs.sequences)
    if shut != SHUT["ponder3"]:
        assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.quick("ponder2-*", "latent_cot-*")
@pytest.mark.parametrize(("mixer", "beams"), [(mixer, beams) for mixer in ("", "+depth_attention") for beams in (1, 3)])
@every_method
def test_rows_of_a_batch_are_single_rows(method, mixer, beams):
    """Prompts of unequal lengths, padded on the left, whose tokens halt where they like."""
    model = oracle(method, mixer)[0]
    rows = [tokens(1, n, seed=n) for n in (3, 7, 5)]
    batch = torch.cat([torch.nn.functional.pad(row, (7 - row.shape[1], 0)) for row in rows])
    how = dict(max_new_tokens=5, do_sample=False, num_beams=beams, return_dict_in_generate=True)
    together = model.generate(batch, attention_mask=(batch != 0).long(), **how)
    for row, found in zip(rows, together.sequences, strict=True):
        alone = model.generate(row, attention_mask=torch.ones_like(row), **how)
        assert torch.equal(found[7 - row.shape[1] :], alone.sequences[0])
    if method in HALTING and beams == 1:
        halt = together.past_key_values.layers[0].table.halt[:, 7:]
        assert len({tuple(row) for row in halt.tolist()}) == len(halt), "rows halt apart from one another"


# --- cost -------------------------------------------------------------------------------------------------------------


def passes(model, call):
    """Tokens that go through the first layer."""
    seen = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[:2].numel()))
    try:
        call()
    finally:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    "method,options,rounds,multiple",
    [
        ("ponder", {"trips": 4}, None, 4),
        ("ponder-duo", {"trips": 4}, None, 4),
        ("adaponder", {"trips": 4}, None, 4),
        ("latent_cot", {"trips": 4}, None, 4),
        ("ponder2", {"trips": 2}, 2, 7),
        ("ponder2", {"trips": 2}, 3, 9),
        ("ponder2", {"trips": 4}, 2, 18),
        ("ponder2", {"trips": 4}, 3, 22),
        ("ponder3", {"trips": 4}, 4, 26),
        ("ponder3", {"trips": 4}, 5, 30),
        ("ponder3", {"trips": 4}, 6, 34),
    ],
)
def test_passes_of_a_training_step(method, options, rounds, multiple):
    solver = {} if rounds is None else {"jacobi_train": [rounds, rounds]}
    model, ids = thinker(method, **options, **solver).train(), tokens(2, 5)
    assert sum(passes(model, lambda: model(ids, labels=ids))) == multiple * ids.numel()


@pytest.mark.quick("ponder", "ponder3", "adaponder", "latent_cot")
@pytest.mark.parametrize("method", METHODS)
def test_decoding_skips_what_has_halted(method):
    model, ids, _, halt = oracle(method)
    made = passes(model, lambda: stepwise(model, ids))
    assert sum(made) == (1 + halt).sum()
    assert (max(made), sum(made) < 2 * ids.shape[1] * (model.model.recurrence.trips)) == (2, method in HALTING)


@pytest.mark.quick("ponder-duo", "ponder3", "adaponder")
@every_method
def test_decoding_costs_what_is_declared(method):
    """Nobody halting; attention scores apart: a trip reads what its view shows, or all slots if copying costs more."""
    few = {"top_k": 3} if "top_k" in METHODS[method][1] and method != "ponder-all" else {}
    model = thinker(method, dtype=torch.float32, **OPEN.get(method, {}), **few)
    config, length = model.config, 8
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=config)
    stepwise(model, tokens(1, length - 1), cache=cache)
    with FlopCounterMode(display=False) as counter:
        stepwise(model, tokens(1, 1), cache=cache)
    trips, view = config.recurrence_options["trips"], model.model.recurrence.view
    keys = 0
    for k in range(trips):
        stored, seen = trips * (length - 1) + k + 1, length * (1 if view is View.SAME else k + 1)
        gathers = view is not View.ALL and gathering_pays(1, seen, stored, False)
        keys += seen if gathers or not model.model.slotted else stored
    scores = config.num_hidden_layers * keys * 4 * config.num_attention_heads * config.head_dim
    head = 2 * config.hidden_size * config.vocab_size
    declared = config.num_hidden_layers * layer_flops(config) + head + mechanism_cost(config).flops
    assert counter.get_total_flops() - scores == pytest.approx(declared, rel=0.01)


# --- a budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick("ponder-all", "latent_cot")
@pytest.mark.parametrize("method", ["ponder", "ponder-duo", "ponder-all", "ponder2", "latent_cot"])
def test_a_budget_is_a_shallower_model(method):
    model, ids = oracle(method)[0], tokens(2, 7)
    shallow = thinker(method, trips=2)
    shallow.load_state_dict(model.state_dict())
    assert error(logits(model, ids, max_trips=2), logits(shallow, ids)) < EXACT
    assert error(stepwise(model, ids, max_trips=2), logits(shallow, ids)) < EXACT
    ours, theirs = (
        m.generate(ids, max_new_tokens=4, do_sample=False, **k) for m, k in ((model, {"max_trips": 2}), (shallow, {}))
    )
    assert torch.equal(ours, theirs)


@every_method
def test_budgets_nobody_trained_for(method):
    model = oracle(method)[0]
    for trips in (0, model.model.recurrence.trips + 1):
        with pytest.raises(ValueError, match=rf"max_trips must be between 1 and \d, .*: {trips}") as found:
            model(tokens(1, 3), max_trips=trips)
        assert "\n" not in str(found.value)
    assert logits(model, tokens(1, 3), max_trips=1).isfinite().all()


# --- losses -----------------------------------------------------------------------------------------------------------

PENALTIES = [
    ("adaponder", {"penalty_fraction": 0.5}),
    ("adaponder", {"penalty_fraction": 0.5, "penalty_on": "logit"}),
    ("latent_cot", {"penalty_token_fraction": 0.5}),
    ("ponder3", {"penalty_steps": [0, 0], "penalty_token_fraction": 0.5, "prefill": "jacobi"}),
    ("ponder3", {"penalty_steps": [0, 0], "penalty": "expected_trips", "prefill": "jacobi"}),
]


def penalty(model, ids, labels, **kwargs):
    model.train()
    model.set_step(10, 10)
    return model(ids, labels=labels, **kwargs)


@pytest.mark.quick("adaponder-options0", "latent_cot-options2", "ponder3-options4")
@pytest.mark.parametrize("method,options", PENALTIES)
def test_micro_batches_add_up_to_the_whole(method, options):
    model, ids = thinker(method, **options), tokens(4, 9)
    labels = ids.clone()
    labels[0, :6], labels[3] = -100, -100
    items = int((labels[:, 1:] != -100).sum())
    whole = penalty(model, ids, labels)
    parts = [penalty(model, ids[i], labels[i], num_items_in_batch=items) for i in (slice(1), slice(1, 4))]
    assert whole.aux_losses["penalty"] > 0
    assert sum(p.loss for p in parts).item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert sum(p.aux_losses["penalty"] for p in parts).item() == pytest.approx(
        whole.aux_losses["penalty"].item(), rel=1e-12
    )


@pytest.mark.quick("adaponder-options0", "latent_cot-options2", "ponder3-options4")
@pytest.mark.parametrize("method,options", PENALTIES)
def test_what_is_no_target_never_counts(method, options):
    """Tokens after the last target change nothing; nor does padding before the first."""
    whole = {} if method == "adaponder" else {"penalty_token_fraction": 1.0}
    model, ids = thinker(method, **{**options, **whole}), tokens(2, 9)
    labels = ids.clone()
    labels[:, 0], labels[:, 7:] = -100, -100
    changed = torch.cat([ids[:, :7], tokens(2, 2, seed=5)], 1)
    a, b = (penalty(model, x, labels).aux_losses["penalty"].item() for x in (ids, changed))
    assert a == pytest.approx(b, rel=1e-12)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    padded = torch.nn.functional.pad(ids, (3, 0)), torch.nn.functional.pad(labels, (3, 0), value=-100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    c = penalty(model, *padded, attention_mask=mask, position_ids=positions).aux_losses["penalty"].item()
    assert a == pytest.approx(c, rel=1e-12)


def test_lowest_fraction():
    values = torch.tensor([[3.0, 1.0, 2.0, 0.0], [5.0, 9.0, 7.0, 6.0]])
    valid = torch.tensor([[True, True, True, False], [True, True, True, True]])
    assert lowest_mean(values, valid, 0.5).tolist() == pytest.approx([(1 + 0.5 * 2) / 1.5, 5.5])
    assert lowest_mean(values, valid, 0.0).tolist() == [0, 0]
    assert lowest_mean(values, valid, torch.tensor([1.0, 0.25])).tolist() == [2, 5]
    # At the edge a value counts in part; below one value the mean falls with the fraction.
    assert lowest_mean(values, valid, torch.tensor([0.5, 0.375])).tolist() == pytest.approx([4 / 3, 16 / 3])
    assert lowest_mean(values, valid, torch.tensor([0.25, 0.125])).tolist() == [0.75 * 1, 0.5 * 5]
    assert lowest_mean(values, valid, 1e-6).tolist() == pytest.approx([3e-6, 2e-5])
    targets = torch.where(valid, 1, -100)
    assert lowest_sum(values.unsqueeze(2), targets, 0.5, "row").item() == pytest.approx(2 / 1.5 * 3 + 5.5 * 4)
    assert lowest_sum(values.unsqueeze(2), targets, 0.5, "batch").item() == pytest.approx(
        (1 + 2 + 3 + 0.5 * 5) / 3.5 * 7
    )


def test_metrics_count_the_trips():
    model, ids, _, halt = oracle("latent_cot")
    model.train()
    found = model(ids, labels=ids).metrics
    model.eval()
    trips = 1.0 + halt[:, :-1].float()  # the last token has no target
    assert found["trips"].item() == pytest.approx(trips.mean().item())
    for k in range(1, 5):
        assert found[f"trips_{k}"].item() == pytest.approx((trips == k).float().mean().item())


# --- weights, budgets, and calls out of the ordinary ------------------------------------------------------------------


def test_a_trained_router_comes_back(tmp_path):
    """The bias where training began must not replace the one that training found."""
    model = thinker("ponder3", router_bias=3.0)
    with torch.no_grad():
        model.model.recurrence.router.bias.copy_(torch.arange(len(model.model.recurrence.router.bias)))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again.model.recurrence.router.bias, model.model.recurrence.router.bias)


@pytest.mark.parametrize(
    "method,options", [("ponder3", {"penalty_steps": [5, 5]}), ("adaponder", {"penalty_span": [0.5, 0.5]})]
)
def test_a_schedule_may_be_a_step(method, options):
    policy = thinker(method, **options).model.recurrence
    now = policy.weight if method == "ponder3" else policy.fraction
    policy.set_step(4, 10)
    assert float(now) == 0
    policy.set_step(5, 10)
    assert float(now) > 0


def test_no_more_trips_than_were_drawn():
    model = thinker("ponder", trips=3, trips_range=[2, 3])
    with pytest.raises(ValueError, match="between 1 and 3"):
        model(tokens(1, 4), max_trips=4)


@pytest.mark.parametrize("method", ["adaponder", "latent_cot", "ponder3"])
def test_evaluation_has_no_penalties(method):
    model, ids = thinker(method), tokens(2, 9)
    model.set_step(5000, 5001)
    with torch.no_grad():
        assert model(ids, labels=ids).aux_losses is None
        assert model.train()(ids, labels=ids).aux_losses
        assert all(value.isfinite() for value in model(ids, labels=torch.full_like(ids, -100)).metrics.values())


def test_gates_are_not_dropped(tmp_path):
    thinker("adaponder", trips=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"recurrence\.gates"):
        type(thinker("adaponder")).from_pretrained(tmp_path, recurrence_options={"trips": 2})


@pytest.mark.parametrize("method", ["adaponder", "latent_cot"])
def test_a_long_prompt_is_read_in_parts(method, monkeypatch):
    model, ids = thinker(method), tokens(2, 13)
    with torch.no_grad():
        whole = model(ids, use_cache=True).logits
        monkeypatch.setattr(walk, "AT_ONCE", 5)
        assert error(model(ids, use_cache=True).logits, whole) < 1e-12


def test_the_trainers_own_callback_follows_the_steps():
    model = thinker("adaponder", penalty_span=[0.0, 1.0])
    state = TrainerState(global_step=5, max_steps=10)
    FollowSteps().on_step_begin(None, state, None, model=model)
    assert float(model.model.recurrence.fraction) == pytest.approx(0.05)


def test_a_solvers_options_need_the_solver():
    """With the rounds of the base class, none, a recurrence of view ALL would quietly compute something else."""
    kind = type("Mine", (Pondering,), {"options_class": Ponder2Options, "reads": View.ALL})
    with pytest.raises(TypeError, match="Mine: the options of the Jacobi solver need the base class Solved"):
        kind(thinker("ponder2").config)

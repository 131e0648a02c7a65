"""The plan of visits, stated a second time from the card's rules, and the banks of a cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from fathom.models import modeling
from fathom.models.axes.visit import Out
from fathom.models.trips import slots
from fathom.models.trips.slots import TokenSubset, jacobi, joined, plan, sweep, with_banks
from tests.tiny import seeded

from .cases import build, config_of, tokens


def looped(layers=4, count=3, prelude=0, coda=0, mixer="depth_attention", **options):
    shape = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2} if options.pop("slide", 0) else {}
    name = "loop" if mixer == "none" else f"loop+{mixer}"
    loop = {"trips": count, "prelude": prelude, "coda": coda}
    return config_of(name, num_hidden_layers=layers, recurrence_options=loop, mixer_options=options, **shape)


def visits_of(config):
    return [visit for trip in plan(config) for visit in trip]


def order_of(layers, count, prelude, coda):
    """(layer, trip) of every visit, in order."""
    before = [(i, 0) for i in range(prelude)]
    after = [(i, count - 1) for i in range(layers - coda, layers)]
    return before + [(i, k) for k in range(count) for i in range(prelude, layers - coda)] + after


def sources_of(order, position, stride, window, rule):
    """Positions of earlier visits, from the words of the card."""
    layer = order[position][0]
    earlier = range(position)
    below = {i for i in range(layer) if i % stride == 0 or layer - window <= i}
    own_trip = {max(p for p in earlier if order[p][0] == i) for i in below}
    if rule == "same_layer":
        return own_trip | {p for p in earlier if order[p][0] == layer}
    if rule == "first":  # what was passed first, of all layers that a later trip's top would read
        top = {i for i, _ in order if i % stride == 0 or max(order)[0] + 1 - window <= i}
        named = below | (top if order[position][1] else set())
        return {min(p for p in earlier if order[p][0] == i) for i in named if i in {order[p][0] for p in earlier}}
    if rule == "grid":
        assert window == 0
        return {p for p in earlier if order[p][0] % stride == 0}
    return own_trip


@st.composite
def schedules(draw):
    layers = draw(st.integers(1, 9))
    prelude = draw(st.integers(0, layers - 1))
    coda = draw(st.integers(0, layers - 1 - prelude))
    rule = draw(st.sampled_from(["none", "same_layer", "grid", "first"]))
    window = 0 if rule == "grid" else draw(st.integers(0, layers))
    return layers, draw(st.integers(1, 4)), prelude, coda, draw(st.integers(1, layers)), window, rule


@settings(max_examples=80, deadline=None)
@given(schedules())
def test_plan_is_the_rules(schedule):
    layers, count, prelude, coda, stride, window, rule = schedule
    options = {"stride": stride, "recent_layers": window, "across_trips": rule}
    visits = visits_of(looped(layers, count, prelude, coda, **options))
    order = order_of(layers, count, prelude, coda)
    assert [(v.layer, v.trip) for v in visits] == order
    assert [v.index for v in visits] == list(range(len(order)))
    for v in visits:
        assert list(v.sources) == sorted(sources_of(order, v.index, stride, window, rule)), "oldest first, none twice"
        assert all(source < v.index for source in v.sources)
    read = {source for v in visits for source in v.sources}
    assert [v.kept for v in visits] == [v.index in read for v in visits]
    assert [v.bank for v in visits] == list(range(len(order))), "one for each visit, in the order of writing"
    assert not any(v.borrows for v in visits)


@settings(max_examples=50, deadline=None)
@given(schedules())
def test_a_plan_that_shares_keys_has_a_bank_for_each_layer(schedule):
    layers, count, prelude, coda, stride, window, _ = schedule
    loop = {"trips": count, "prelude": prelude, "coda": coda, "kv": "first"}
    mixer = {"stride": stride, "recent_layers": window}
    config = config_of("loop+depth_attention", num_hidden_layers=layers, recurrence_options=loop, mixer_options=mixer)
    order = order_of(layers, count, prelude, coda)
    first = {layer: order.index((layer, trip)) for layer, trip in reversed(order)}
    for v in visits_of(config):
        assert v.bank == v.layer and v.borrows == (v.index != first[v.layer])
        below = {i for i in range(v.layer) if i % stride == 0 or v.layer - window <= i}
        assert set(v.sources) == (set() if v.borrows else {first[i] for i in below})


def test_without_recurrence_the_plan_is_the_stack():
    for name in ("vanilla", "depth_attention", "value_residual"):
        (trip,) = plan(config_of(name))
        assert [(v.index, v.layer, v.trip) for v in trip] == [(i, i, 0) for i in range(4)]
    assert not any(v.kept for v in plan(config_of("vanilla"))[0])


@pytest.mark.parametrize("max_trips", [None, 1])
@pytest.mark.parametrize("case", ["vanilla", "depth_attention-dense", "loop+depth_attention-grid", "latent_cot"])
def test_a_plan_is_made_once(case, max_trips, monkeypatch):
    made = []
    for module in (slots, modeling):
        monkeypatch.setattr(module, "plan", lambda *of: (made.append(of), plan(*of))[1])
    model, ids = build(config_of(case)), tokens(1, 7)
    assert len(made) == 1
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache, max_trips=max_trips)
        made.clear()
        for token in ids[:, 1:].split(1, 1):
            model(token, past_key_values=cache, max_trips=max_trips)
    assert cache.get_seq_length() == 7 and not made


# --- banks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("prelude,coda,total", [(0, 0, 12), (1, 0, 10), (1, 2, 6)])
def test_every_trip_gets_a_bank_of_its_own_kind(kind, prelude, coda, total):
    config = looped(4, 3, prelude, coda, slide=True)
    cache = kind(config=config, **({"max_cache_len": 16} if kind is StaticCache else {}))
    kinds = [type(layer) for layer in cache.layers]
    assert len(set(kinds)) == 2, "full and sliding"
    assert with_banks(cache, plan(config)) is cache
    assert len(cache.layers) == total == len({id(layer) for layer in cache.layers})
    for v in visits_of(config):
        assert type(cache.layers[v.index]) is kinds[v.layer]
    before = list(cache.layers)
    with_banks(cache, plan(config))
    assert cache.layers == before, "idempotent"


def test_no_bank_without_a_second_trip():
    for config in (config_of("vanilla"), looped(count=1)):
        assert len(with_banks(DynamicCache(config=config), plan(config)).layers) == 4


@pytest.mark.parametrize("lazy", [False, True])
def test_a_filled_cache_of_one_trip_is_refused(lazy):
    vanilla, config = config_of("vanilla"), looped(mixer="none")
    cache = DynamicCache() if lazy else DynamicCache(config=vanilla)
    build(vanilla)(tokens(1, 3), past_key_values=cache)
    with pytest.raises(ValueError, match="filled by a model without iterations"):
        build(config)(tokens(1, 3), past_key_values=cache)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_cache_of_other_trips_is_refused(lazy, count):
    cache = DynamicCache() if lazy else DynamicCache(config=looped(count=2))
    build(looped(count=2))(tokens(1, 3), past_key_values=cache)
    with pytest.raises(ValueError, match="8 layers"):
        build(looped(count=count))(tokens(1, 3), past_key_values=cache)


def test_banks_hold_different_keys():
    """Were a bank shared between trips, it would hold twice the tokens; were it copied, the same keys."""
    model, cache = build(looped(4, 2)), DynamicCache(config=looped(4, 2))
    model(tokens(1, 5), past_key_values=cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [5] * 8
    assert not torch.allclose(cache.layers[0].keys, cache.layers[4].keys)


# --- the driver -------------------------------------------------------------------------------------------------------


class Adds:
    """Feeds what a trip made; tokens halt once they reach 3."""

    halts = True

    def __init__(self):
        self.log = []

    def gate(self, out, state):
        self.log.append(("gate", out.trip))
        value = state.get("value", torch.zeros_like(out.residual)) + out.residual
        return {"value": value, "alive": value[..., 0] < 3}

    def feed(self, x, out, state):
        self.log.append("feed")
        return x + out.residual

    def key_bias(self, state, trip):
        return None


def made(turn):
    return Out(turn.tokens.take(turn.x) * 2, lambda x: x, trip=turn.trip)


def test_sweep_gates_and_feeds_in_order():
    policy = Adds()
    policy.halts = False
    state, turns = sweep(policy, torch.ones(1, 1, 1), made, 3)
    assert [float(turn.x) for turn in turns] == [1, 3, 9]
    assert float(state["value"]) == 2 + 6 + 18
    assert policy.log == [("gate", 0), "feed", ("gate", 1), "feed", ("gate", 2)]


def test_halted_tokens_are_left_out_or_kept_as_they_were():
    x = torch.tensor([[[0.1], [1.0], [2.0]], [[5.0], [0.2], [6.0]], [[7.0], [8.0], [9.0]]])
    dense, _ = sweep(Adds(), x, made, 4)
    picked, turns = sweep(Adds(), x, made, 4, pick=TokenSubset.pick)
    assert dense.keys() == picked.keys()
    assert all(torch.equal(dense[name], picked[name]) for name in dense)
    assert dense["trips"].tolist() == [[4, 2, 1], [1, 3, 1], [1, 1, 1]]
    assert [len(turn.tokens.take(x)) for turn in turns] == [3, 2, 2, 1], "rows of the batch without a living token go"


def test_padding_makes_one_trip():
    live = torch.tensor([[False, True, True]])
    for pick in (None, TokenSubset.pick, TokenSubset.pack):
        state, _ = sweep(Adds(), torch.full((1, 3, 1), 0.1), made, 3, live=live, pick=pick)
        assert state["trips"].tolist() == [[1, 3, 3]]


def test_rows_put_back_what_they_took():
    x = torch.randn(4, 5, 3)
    alive = torch.rand(4, 5, generator=seeded(0)) < 0.4
    alive[2] = False
    rows = TokenSubset.pick(alive)
    assert torch.equal(rows.put(x, rows.take(x)), x)
    assert torch.equal(rows.put(x, rows.take(x) + 1), x + alive[..., None])


def test_out_norms_once_and_only_when_asked():
    calls = []
    out = Out(torch.ones(1), lambda x: (calls.append("norm"), 2 * x)[1])
    assert out.residual.item() == 1
    assert not calls
    assert out.hidden.item() == out.hidden.item() == 2
    assert calls == ["norm"]
    with pytest.raises(ValueError, match="head"):
        _ = out.tables


# --- the solver -------------------------------------------------------------------------------------------------------


class Chain:
    """Feeds what a trip made; a trip adds all later trips of the token before: the smallest view ALL."""

    halts = foreseen = False

    def gate(self, out, state):
        return {"value": out.residual}

    def feed(self, x, out, state):
        return out.residual

    def key_bias(self, state, trip):
        return None

    def carry(self, state):
        return None


def chained(x, depth):
    """One token after another, `[T]`: input and output of every slot."""
    inputs, outputs = torch.zeros(len(x), depth + 1), torch.zeros(len(x), depth + 1)
    for t in range(len(x)):
        for k in range(depth + 1):
            inputs[t, k] = x[t] if k == 0 else outputs[t, k - 1]
            outputs[t, k] = 0.5 * inputs[t, k] + (outputs[t - 1].sum() if t else 0)
    return inputs, outputs


def pass_of(lengths, seen):
    """A parallel pass: every slot reads the outputs its own pass makes for the token before, from old inputs."""

    def through(turns, final):
        lengths.append((len(turns), final))
        inputs = torch.cat([turn.x[0] for turn in turns], 1)  # [T, m + 1]
        seen.append(inputs)
        outputs = torch.zeros_like(inputs)
        for t in range(len(inputs)):
            outputs[t] = 0.5 * inputs[t] + (outputs[t - 1].sum() if t else 0)
        return [Out(outputs[None, :, j : j + 1], lambda r: r, trip=j, last=j == 2) for j in range(len(turns))]

    return through


@pytest.mark.parametrize("rounds", range(7))
def test_jacobi_grows_turns_and_ends(rounds):
    """K (K + 1) / 2 + (n + 1)(K + 1) passes over the tokens, and slot (t, j) exact from n = (t - 1) K + j on."""
    x, lengths, seen = torch.tensor([1.0, -2.0, 0.5, 3.0]), [], []
    state = jacobi(Chain(), x.view(1, 4, 1), pass_of(lengths, seen), 3, rounds)
    assert lengths == [(1, False), (2, False), *[(3, False)] * rounds, (3, True)]
    assert sum(m for m, _ in lengths) == 3 + (rounds + 1) * 3
    inputs, outputs = chained(x, 2)
    for t in range(4):
        for j in range(1, 3):
            if t == 0 or rounds >= (t - 1) * 2 + j:
                assert seen[-1][t, j] == inputs[t, j]
        if rounds >= 2 * t:
            assert state["value"][0, t, 0] == outputs[t, 2]


@pytest.mark.parametrize("rounds", range(7))
def test_jacobi_feeds_in_turn(rounds):
    """Where a feed adds to its input: from one pass, S_{j+1} = S_j + H_j with the S_j just made, not the one before."""
    policy, x, seen, depth = Chain(), torch.tensor([1.0, -2.0, 0.5, 3.0]), [], 2
    policy.feed = lambda x, out, state: x + out.residual
    jacobi(policy, x.view(1, 4, 1), pass_of([], seen), depth + 1, rounds)

    def by_rule(old_input):
        stages = [x]
        for turn in range(depth + rounds):
            before = torch.stack(stages, 1)  # [T, m + 1]
            made = torch.zeros_like(before)
            for t in range(4):
                made[t] = 0.5 * before[t] + (made[t - 1].sum() if t else 0)
            stages = [x]
            for j in range(min(turn + 1, depth)):
                stages.append((before[:, j] if old_input else stages[j]) + made[:, j])
        return torch.stack(stages, 1)

    assert torch.equal(seen[-1], by_rule(False))
    assert torch.equal(by_rule(True), by_rule(False)) == (rounds >= 6), "another rule, with the same end"


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_the_last_pass_feeds_nothing(rounds):
    """Nobody would read it, and a feed may be as dear as a mixture of the vocabulary."""
    policy, fed = Chain(), []
    policy.feed = lambda x, out, state: (fed.append(out.trip), out.residual)[1]
    jacobi(policy, torch.ones(1, 4, 1), pass_of([], []), 3, rounds)
    assert fed == [0, 0, 1, *[0, 1] * rounds]


def test_jacobi_stops_when_nothing_moves():
    lengths = []
    x = torch.tensor([1.0, -2.0, 0.5, 3.0]).view(1, 4, 1)
    state = jacobi(Chain(), x, pass_of(lengths, []), 3, 100, until_still=True)
    assert len(lengths) <= 2 + 7 + 1
    assert state["jacobi_residual"] == 0
    assert torch.equal(state["value"], jacobi(Chain(), x, pass_of([], []), 3, 6)["value"])


def test_jacobi_without_a_second_trip_is_one_pass():
    lengths = []
    jacobi(Chain(), torch.ones(1, 3, 1), pass_of(lengths, []), 1, 5)
    assert lengths == [(1, True)]


def test_states_of_tokens_join():
    parts = [{"a": torch.zeros(1, 1), "b": torch.ones(1, 1, 2)}, {"a": torch.ones(1, 1)}]
    assert {name: t.tolist() for name, t in joined(parts).items()} == {"a": [[0, 1]]}


def test_a_round_remembers_what_it_is_told():
    """`carry` reaches the gates of the next pass, and of no other."""
    policy, told = Chain(), []
    policy.carry = lambda state: {"before": state["value"]}
    gate = policy.gate
    policy.gate = lambda out, state: (told.append((out.trip, "before" in state)), gate(out, state))[1]
    jacobi(policy, torch.ones(1, 2, 1), pass_of([], []), 2, 3)
    by_pass = [told[0], *told[1::2]]
    assert [before for _, before in by_pass] == [False, True, True, False, False]


def test_inputs_that_depend_on_no_pass_take_one_pass():
    """The same chain by its inputs alone: no growing, no rounds."""

    class Known(Chain):
        foreseen = True

        def feed(self, x, out, state):
            return x + 1

    lengths, seen = [], []
    jacobi(Known(), torch.ones(1, 4, 1), pass_of(lengths, seen), 3, 5)
    assert len(lengths) == 1

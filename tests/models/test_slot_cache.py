"""The slot cache: a token takes a place for every trip it made, and none it did not make."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache, cache_utils

from fathom.kvcache.kivi import Int8
from fathom.models.axes.roles import View
from fathom.models.cost import cache_bytes_per_token
from fathom.models.trips import walk
from fathom.models.trips.fixed_table import FixedTable
from fathom.models.trips.slot_cache import SlotLayer, drop_row, trim_slots, with_slots

from .cases import build, config_of, tokens
from .slot_oracle import METHODS, thinker
from .test_pondering import error, logits, oracle, stepwise

SLOTTED = [m for m in METHODS if m != "ponder"]
every_method = pytest.mark.parametrize("method", SLOTTED)
each_kind = pytest.mark.quick("ponder2", "ponder3", "latent_cot")
"""Every view, tokens that halt and such that do not, and biases of keys."""
EXACT = 1e-12


def filled(method, ids, sizes=1, **kwargs):
    model = oracle(method)[0]
    cache = DynamicCache(config=model.config)
    stepwise(model, ids, sizes, cache, **kwargs)
    return model, cache, cache.layers[0].table


def goes_on(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **kwargs).logits


@every_method
def test_slots_and_bytes(method):
    """Σ (1 + halt) places in every row, at the declared bytes for each, and one bias for all layers."""
    model, ids, _, halt = oracle(method)
    _, cache, table = filled(method, ids, [4, 1, 4])
    assert table.count.tolist() == (1 + halt).sum(1).tolist()
    assert table.end == table.count.max() and cache.get_seq_length() == 9
    trips, config = model.model.recurrence.trips, model.config
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert len(cache.layers) == config.num_hidden_layers
    per_slot = cache_bytes_per_token(config, 8) / trips
    bias = 4 if method == "ponder3" else 0  # kept once, whatever the type of keys and values
    assert held == 2 * table.end * (per_slot - bias)
    assert set(table.extra) == ({"bias"} if method == "ponder3" else set())
    # A table entry for every slot that was made, in the order in which tokens came.
    for row in range(2):
        slots = list(zip(table.token[row].tolist(), table.trip[row].tolist(), strict=True))[: table.count[row]]
        assert sorted(slots) == [(t, k) for t in range(9) for k in range(halt[row, t] + 1)]


@pytest.mark.quick("3-ponder-duo", "3-ponder3", "9-ponder3", "3-latent_cot")
@every_method
@pytest.mark.parametrize("forgotten", [0, 3, 4, 8, 9, 20])
def test_crop_forgets_tokens(method, forgotten):
    """With everything that would give them away: what comes next stands in their places."""
    ids, other = tokens(2, 9), tokens(2, 4, seed=8)
    model, cache, table = filled(method, ids, [3, 1, 1, 4])
    cache.crop(-forgotten)
    kept = max(0, 9 - forgotten)
    assert cache.get_seq_length() == kept
    fresh = logits(model, torch.cat([ids[:, :kept], other], 1))[:, kept:]
    assert error(goes_on(model, cache, other), fresh) < EXACT
    assert table.halt.shape[1] == kept + 4


@each_kind
@every_method
def test_crop_back_to_padding(method):
    """No slot is left, and yet columns are: what comes next reads itself alone, beside the padding."""
    model, ids = oracle(method)[0], tokens(2, 6)
    mask, cache = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]), DynamicCache(config=model.config)
    goes_on(model, cache, tokens(2, 4, seed=8), attention_mask=mask)
    cache.crop(-2)
    for t in range(0, 6, 2):  # twice more beside what has come since
        mask = torch.tensor([[0, 0] + [1] * (t + 2)] * 2)
        where = torch.arange(t, t + 2).unsqueeze(0)
        found = goes_on(model, cache, ids[:, t : t + 2], attention_mask=mask, position_ids=where)
        assert error(found, logits(model, ids)[:, t : t + 2]) < EXACT


@pytest.mark.quick("ponder-duo", "ponder3", "latent_cot")
@every_method
def test_guesses_are_taken_back(method):
    """Prompt look-up guesses ahead and crops what was wrong."""
    model, ids = oracle(method)[0], tokens(1, 7)
    plain, guessed = (
        model.generate(ids, max_new_tokens=12, do_sample=False, **how) for how in ({}, {"prompt_lookup_num_tokens": 3})
    )
    assert torch.equal(plain, guessed)


@each_kind
@every_method
def test_generate_with_a_static_cache(method):
    model, ids = oracle(method)[0], torch.nn.functional.pad(tokens(2, 7), (1, 0))
    how = dict(attention_mask=(ids != 0).long(), max_new_tokens=4, do_sample=False)
    plain, static = (model.generate(ids, cache_implementation=kind, **how) for kind in (None, "static"))
    assert torch.equal(plain, static)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ponder-duo", "ponder3", "adaponder", "latent_cot"])
def test_compiled_decoding_is_one_program(method):
    """Padded rows that halt apart, ten tokens of each."""
    torch.compiler.reset()
    counters.clear()
    model, ids = oracle(method)[0], torch.nn.functional.pad(tokens(2, 7), (1, 0))
    ids[1, 1] = 0
    how = dict(attention_mask=(ids != 0).long(), max_new_tokens=10, do_sample=False)
    plain = model.generate(ids, **how)
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiling._compile_all_devices = True
    compiled = model.generate(ids, cache_implementation="static", compile_config=compiling, **how)
    assert torch.equal(plain, compiled) and counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("sizes", [1, [3, 1, 2]], ids=["tokens", "chunks"])
@pytest.mark.parametrize("method", ["adaponder", "latent_cot"])
def test_a_trip_that_was_not_made_is_not_read(method, sizes, monkeypatch):
    """Its fixed place is masked under DUO and repeats the last trip under SAME; it is read if that is left out."""
    model, ids = oracle(method)[0], tokens(2, 6)

    def wrong():
        return error(stepwise(model, ids, sizes, StaticCache(config=model.config, max_cache_len=6)), logits(model, ids))

    assert wrong() < EXACT
    tags = FixedTable.tags
    if method == "adaponder":
        monkeypatch.setattr(walk, "repeat_last", lambda *where: None)
    else:
        monkeypatch.setattr(FixedTable, "tags", lambda self, placement: replace(tags(self, placement), live=None))
    assert wrong() > 1e-3


@each_kind
@every_method
def test_a_static_cache_has_an_end(method):
    """And its room from the start."""
    model, ids = oracle(method)[0], tokens(2, 5)
    cache, room = StaticCache(config=model.config, max_cache_len=5), 5 * model.model.recurrence.trips
    stepwise(model, ids, [2, 1, 2], cache)
    assert cache.layers[0].table.capacity == room
    assert all(layer.stored[0].shape[1] == room + 1 for layer in cache.layers)
    with pytest.raises(ValueError, match="this static cache has room for 5 tokens of this model, no more"):
        goes_on(model, cache, tokens(2, 1))
    cache.crop(-2)
    assert error(goes_on(model, cache, ids[:, 3:]), logits(model, ids)[:, 3:]) < EXACT
    cache.reset()
    assert error(stepwise(model, ids, 2, cache), logits(model, ids)) < EXACT


@pytest.mark.parametrize("mechanism", ["ponder2", "ponder3"])
def test_the_solver_reads_its_own_slots_at_fixed_places(mechanism):
    """Parts of several tokens, each solved for at once, also behind what was forgotten."""
    options = {"trips": 3, "jacobi_prefill": 12} | ({"tau": 0.3} if mechanism == "ponder3" else {})
    config = config_of(mechanism, num_hidden_layers=2, recurrence_options=options)
    model, ids = build(config, dtype=torch.float64), tokens(2, 9)

    def read(cache):
        stepwise(model, ids[:, :5], [2, 3], cache)
        cache.crop(-2)
        return torch.cat([goes_on(model, cache, part) for part in ids[:, 3:].split([4, 2], 1)], 1)

    found = [read(c) for c in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=9))]
    assert error(*found) < EXACT


@each_kind
@every_method
def test_rows_move_with_everything_they_own(method):
    ids, more = tokens(2, 7), tokens(3, 2, seed=4)
    model, cache, _ = filled(method, ids)
    order = torch.tensor([1, 0, 1])
    cache.batch_select_indices(order)
    whole = torch.cat([ids[order], more], 1)
    assert error(goes_on(model, cache, more), logits(model, whole)[:, 7:]) < EXACT
    cache.batch_repeat_interleave(2)
    whole, last = whole.repeat_interleave(2, 0), tokens(6, 1, seed=6)
    assert error(goes_on(model, cache, last), logits(model, torch.cat([whole, last], 1))[:, -1:]) < EXACT


@each_kind
@every_method
def test_what_rows_leave_is_freed(method):
    """Of a dropped row its buffers, of the others what they have no use for; and they go on as they would have."""
    ids, other = tokens(3, 9), tokens(3, 4, seed=8)
    model, cache, table = filled(method, ids, [4, 1, 4])
    table.resize(4 * table.end)
    drop_row(cache, 0)
    kept, free = [2, 1], table.end + 2
    trim_slots(cache, free)
    assert table.capacity == free and len(table.token) == 2
    for layer in cache.layers:
        for stored in layer.stored:
            assert stored.untyped_storage().nbytes() == stored[0, 0].nbytes * 2 * (free + 1)
    before = [x for layer in cache.layers for x in layer.stored]
    trim_slots(cache, free)
    assert all(x is y for x, y in zip(before, (x for layer in cache.layers for x in layer.stored), strict=True))
    fresh = logits(model, torch.cat([ids, other], 1)[kept])[:, 9:]
    assert error(goes_on(model, cache, other[kept]), fresh) < EXACT
    trim_slots(cache, 0)
    assert table.capacity == table.end, "what is in use stays"


@each_kind
@every_method
def test_a_reset_cache_is_a_new_one(method):
    model, cache, _ = filled(method, tokens(2, 5))
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = tokens(3, 4, seed=5)
    assert error(stepwise(model, ids, 1, cache), logits(model, ids)) < EXACT


@each_kind
@every_method
def test_a_copy_goes_its_own_way(method):
    ids, ends = tokens(2, 5), [tokens(2, 2, seed=s) for s in (4, 5)]
    model, cache, _ = filled(method, ids)
    twin = copy.deepcopy(cache)
    for c, end in zip((cache, twin), ends, strict=True):
        assert error(goes_on(model, c, end), logits(model, torch.cat([ids, end], 1))[:, 5:]) < EXACT


@each_kind
@every_method
def test_padding_takes_no_place(method):
    ids = tokens(2, 6)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :5], mask[1, :2] = 0, 0
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), ids], 1) * mask
    model, cache = oracle(method)[0], DynamicCache(config=oracle(method)[0].config)
    goes_on(model, cache, padded, attention_mask=mask)
    table = cache.layers[0].table
    assert torch.equal(table.halt >= 0, mask.bool())
    assert table.count.tolist() == ((1 + table.halt) * mask).sum(1).tolist()
    assert cache.get_seq_length() == 8, "tokens, as the caller counts them"


MOVES = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 4)),
    st.tuples(st.just("crop"), st.integers(1, 2)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
)


@pytest.mark.quick("latent_cot", "ponder-duo")
@every_method
@settings(max_examples=3, deadline=None)
@given(pads=st.permutations([0, 1, 3]), moves=st.lists(MOVES, min_size=2, max_size=5))
def test_any_course_is_a_fresh_read(method, pads, moves):
    """Padded rows that halt apart are read on, taken back and exchanged; each stays the row that it is."""
    model, pads = oracle(method)[0], torch.tensor(pads)
    cache, ids = DynamicCache(config=model.config), tokens(3, 0)
    for step, (move, value) in enumerate([("read", 4), *moves, ("read", 1)]):
        if move == "crop" and ids.shape[1] > 5:
            cache.crop(-value)
            ids = ids[:, :-value]
        if move == "reorder":
            cache.reorder_cache(torch.tensor(value))
            ids, pads = ids[value], pads[value]
        if move == "read":
            ids = torch.cat([ids, tokens(3, value, seed=step)], 1)
            mask = (torch.arange(ids.shape[1]) >= pads[:, None]).long()
            how = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -value:]}
            found = goes_on(model, cache, ids[:, -value:], **how)
            for row, pad, last in zip(ids, pads.tolist(), found[:, -1], strict=True):
                assert error(last, logits(model, row[None, pad:])[0, -1]) < EXACT


def test_refusals():
    model, ids = thinker("latent_cot"), tokens(1, 3)
    vanilla = build(config_of("vanilla", num_hidden_layers=2), dtype=torch.float64)
    cache = DynamicCache(config=vanilla.config)
    stepwise(vanilla, ids, 1, cache)
    with pytest.raises(ValueError, match="filled by another model; start from an empty cache"):
        goes_on(model, cache, ids)
    with pytest.raises(ValueError, match="the cache of this recurrence cannot be offloaded"):
        offloaded = DynamicCache(config=model.config)
        offloaded.offloading = True
        goes_on(model, offloaded, ids)
    with pytest.raises(ValueError, match="as a negative number, got 2"):
        filled("latent_cot", tokens(1, 3))[1].crop(2)
    with pytest.raises(TypeError, match="only the model that made this cache"):
        SlotLayer(filled("latent_cot", ids)[2], []).update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))


def test_quantised_caches_are_refused():
    """Whatever their backend."""

    class Quantised(cache_utils.QuantizedLayer):
        def _quantize(self, tensor, axis):
            raise NotImplementedError

        _dequantize = _quantize

    for layer in (Quantised(nbits=4), Int8()):
        cache = DynamicCache(config=thinker("ponder2").config)
        cache.layers = [layer]
        with pytest.raises(ValueError, match=f"cannot store its keys in a {type(layer).__name__}"):
            with_slots(cache, 2, 3, View.ALL, 1, torch.device("cpu"))


def test_making_slots_twice_is_making_them_once():
    cache = DynamicCache(config=thinker("ponder2").config)
    table = with_slots(cache, 2, 3, View.ALL, 1, torch.device("cpu"))
    assert with_slots(cache, 2, 3, View.ALL, 1, torch.device("cpu")) is table
    assert {id(layer.table) for layer in cache.layers} == {id(table)}
    assert [layer.first for layer in cache.layers] == [True, False]
    other = with_slots(cache, 2, 3, View.ALL, 2, torch.device("cpu"))  # nothing is stored, so the rows may be others
    assert other is not table and len(other.count) == 2
    assert {id(layer.table) for layer in cache.layers} == {id(other)}


def test_buffers_grow_by_a_part():
    """A step at a time, not a copy at a time."""
    model, cache = thinker("ponder2", trips=2), DynamicCache()
    sizes = set()
    for part in tokens(1, 60).split(1, 1):
        goes_on(model, cache, part)
        sizes.add(cache.layers[0].stored[0].shape[1])
    assert len(sizes) < 35 and max(sizes) <= 121 + 121 // 8


@pytest.mark.parametrize("method", ["ponder2", "latent_cot"])
def test_no_slots_are_stored_while_gradients_are_wanted(method):
    """They are written in place, which autograd cannot follow: no cache unless asked for, and then one clear line."""
    model, ids = thinker(method), tokens(1, 4)
    out = model(ids)
    assert out.past_key_values is None
    out.logits.sum().backward()
    with pytest.raises(ValueError, match="no_grad"):
        model(ids, use_cache=True)
    with torch.no_grad():
        assert model(ids, use_cache=True).past_key_values.get_seq_length() == 4

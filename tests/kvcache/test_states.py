"""Models whose layers keep a state, alone or beside attention: entries are compressed, states are left alone.

The oracle is attention in float64 numpy within the family's own layers, which read a text at once, without a cache.
"""

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.kvcache import METHODS, build_cache, compress_in_training, compressed, load_cache, save_cache
from fathom.kvcache.rope import Turn
from fathom.kvcache.states import State
from tests.models.hosts import cases
from tests.models.hosts.cases import ours_of, theirs_of
from tests.tiny import seeded

from .test_families import Family

N, S, L, LENGTH, LIMIT = 16, 4, 4, 45, 1e-5
TWO = dict(num_hidden_layers=2, layer_types=cases.DELTAS[:2])
MAMBA = dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1, conv_kernel=3, chunk_size=8)
PLAIN = dict(rope_type="default", rope_theta=10_000.0)
MORE = {
    "falcon_h1": dict(**cases.MAMBA, head_dim=8, mamba_d_ssm=64, num_hidden_layers=2),
    "nemotron_h": dict(**MAMBA, layers_block_type=["linear_attention", "mlp", *["full_attention"] * 2], head_dim=8),
}
CHANGES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "olmo_hybrid"), TWO),
    **{name: {} for name in ("lfm2", "lfm2_moe", "granitemoehybrid", "jamba", "bamba", "falcon_h1", "nemotron_h")},
    "lfm3": dict(rope_parameters={"full_attention": PLAIN, "sliding_attention": PLAIN}),
}
STILL = ("granitemoehybrid", "jamba", "nemotron_h")
"""Families whose keys hold no position."""
WHOLE = ("snapkv", "expected_attention", "freqkv")
SETTING = dict(method="drop", once=0)


class Small(Family):
    """The oracle with a small window; with `once`, compressed once, after that many tokens."""

    def __init__(self, module, scale, method, once):
        super().__init__(module, method, scale, None, module.config.model_type not in STILL)
        self.once = once
        self.n, self.s, self.l = (once, S, once // 2 - S) if once else (N, S, N - S - 1 if method == "sinks" else L)

    def recursion(self, q, k, v):
        if not self.once:
            return super().recursion(q, k, v)
        n = self.n
        prompt = self.stored(k[:, :n])
        keys, values = self.compress(prompt, v[:, :n], q[:, :n])
        first = self.attend(q[:, :n], prompt, v[:, :n])
        keys = np.concatenate([keys, self.stored(k[:, n:], keys.shape[1])], 1)
        return np.concatenate([first, self.attend(q[:, n:], keys, np.concatenate([values, v[:, n:]], 1))], 1)


def attention(module, query, key, value, mask=None, scaling=None, **kwargs):
    out = []
    for row in zip(query, key, value, strict=True):
        oracle = Small(module, scaling, **SETTING)
        q, k, v = (x.detach().double().numpy() for x in row)
        out.append(torch.from_numpy(oracle.recursion(oracle.rotate(q, 0, -1), oracle.rotate(k, 0, -1), v)))
    return torch.stack(out).transpose(1, 2).contiguous().to(query.dtype), None


def model_of(name, hosted=False, **changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases.SHAPES, name, MORE.get(name) or cases.SHAPES.get(name, {}))
        model = theirs_of(name, **(CHANGES.get(name, {}) if hosted else CHANGES.get(name, changes)))
    model = ours_of(model, **changes) if hosted else model
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = "eager"  # the only one in float64
    return model.double()


@torch.no_grad()
def truth_of(model, ids, method, once=0):
    SETTING.update(method=method, once=once)
    with pytest.MonkeyPatch.context() as patch:  # under this name, since Fathom's walk knows which keep a cache
        patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attention)
        return model(ids, use_cache=False).logits


@torch.no_grad()
def read(model, ids, cache, cuts):
    return torch.cat([model(x, past_key_values=cache).logits for x in ids.split(list(cuts), 1)], 1)


def tokens(*shape, seed=3):
    return torch.randint(3, cases.VOCABULARY, shape, generator=seeded(seed))


@torch.no_grad()
@pytest.mark.parametrize("quantized", [None, "int8"])
def test_branches_have_states_of_their_own(quantized):
    model, ids = model_of("falcon_h1").float(), tokens(1, 30)
    cache = build_cache(model, "drop", window=N, sinks=S, kept=L, quantized=quantized)
    model(ids[:, :12], past_key_values=cache)
    one, other = (model(ids[:, 12:13], past_key_values=cache.branch()).logits for _ in range(2))
    assert torch.equal(one, other) and torch.equal(one, model(ids[:, 12:13], past_key_values=cache).logits)


@torch.no_grad()
def test_a_reset_branch_of_padded_rows_leaves_the_state():
    model, ids, mask = model_of("falcon_h1").float(), tokens(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[1, :5] = 0
    cache = build_cache(model, "drop", window=N, sinks=S, kept=L)
    model(ids[:, :12], attention_mask=mask[:, :12], past_key_values=cache)
    expected = model(ids[:, 12:], attention_mask=mask, past_key_values=cache.branch()).logits
    cache.branch().reset()
    assert torch.equal(model(ids[:, 12:], attention_mask=mask, past_key_values=cache).logits, expected)


@torch.no_grad()
def test_a_padded_batch_counts_its_states_once(tmp_path):
    model, ids, mask = model_of("falcon_h1").float(), tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    plain, padded = (build_cache(model, "drop", window=N, sinks=S, kept=L) for _ in range(2))
    model(ids, past_key_values=plain)
    mask[1, :5] = 0
    model(ids, attention_mask=mask, past_key_values=padded)
    save_cache(padded, tmp_path / "context")
    entry = sum(layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes for layer in plain.layers)
    for cache in (padded, padded.branch(), load_cache(model, tmp_path / "context")):
        assert cache.memory_bytes() == plain.memory_bytes() - 5 * entry
    padded.reset()
    model(ids, past_key_values=padded)
    assert padded.memory_bytes() == plain.memory_bytes()


@pytest.mark.quick("lfm2-tova", "falcon_h1-freqkv", "jamba-snapkv")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CHANGES)
def test_oracle_on_hybrids(name, method):
    """A window that is full again and again, read at once, in chunks and by tokens; and a prompt compressed once."""
    model, ids = model_of(name), tokens(1, LENGTH)
    truth = truth_of(model, ids, method)
    for cuts in ((LENGTH,), (9, 1, 1, 20, 14)):
        cache = build_cache(model, method, window=N, sinks=S, kept=None if method == "sinks" else L)
        assert (read(model, ids, cache, cuts) - truth).abs().max() < LIMIT
    if method in ("sinks", "learned"):
        return
    once = truth_of(model, ids, method, once=30)
    with compressed(model, method, ratio=0.5):
        own = DynamicCache(config=model.config)
        assert (read(model, ids, own, (30, *[1] * 5, 10)) - once).abs().max() < LIMIT
    assert own.entries == 30


@pytest.mark.quick("lfm2-loop", "jamba-none")
@pytest.mark.parametrize("recurrence", ["loop", "none"])
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in MORE])
def test_hosted(name, recurrence):
    """Fathom's walk over these layers, also in a loop, where each trip has entries and states of its own."""
    loop = dict(recurrence="loop", recurrence_options=dict(trips=2)) if recurrence == "loop" else {}
    model, ids = model_of(name, hosted=True, **loop), tokens(1, LENGTH)
    for method in ("tova", "freqkv"):
        truth = truth_of(model, ids, method)
        cache = build_cache(model, method, window=N, sinks=S, kept=L)
        assert (read(model, ids, cache, (9, 1, 1, 20, 14)) - truth).abs().max() < LIMIT


@pytest.mark.quick("lfm2", "falcon_h1")
@pytest.mark.parametrize("name", CHANGES)
def test_padded_rows(name):
    """Each row is compressed, and its state made, as if it were alone."""
    model, ids, mask = model_of(name).float(), tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :13] = 0
    greedy = dict(do_sample=False, max_new_tokens=6, eos_token_id=None)
    for while_decoding in (False, True):
        with compressed(model, "tova", while_decoding=while_decoding):
            together = model.generate(ids, attention_mask=mask, **greedy)[:, 40:]
            for row, length, text in zip(ids, (40, 27), together, strict=True):
                assert torch.equal(model.generate(row[None, -length:], **greedy)[0, length:], text)


@torch.no_grad()
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_a_state_is_transformers_own(name, tmp_path):
    """After a prompt it is bitwise that of an ordinary cache. Branches, files and beams keep it."""
    model, ids, more = model_of(name), tokens(2, 30), tokens(2, 5, seed=4)
    plain = DynamicCache(config=model.config)
    model(ids, past_key_values=plain)
    with compressed(model, "tova"):
        cache = model(ids).past_key_values
    for layer, own in zip(cache.states.layers, plain.layers, strict=True):
        if isinstance(layer, State):
            for states, theirs in zip(
                (layer.conv_states, layer.recurrent_states), (own.conv_states, own.recurrent_states), strict=True
            ):
                assert states[0] is theirs[0] is None or torch.equal(states[0], theirs[0])
    save_cache(cache, tmp_path / "context.safetensors")
    stored, branches = load_cache(model, tmp_path / "context.safetensors"), [cache.branch(), cache.branch()]
    twice = cache.branch()
    twice.batch_repeat_interleave(2)
    first = model(more, past_key_values=branches[0]).logits
    assert torch.equal(model(more, past_key_values=branches[1]).logits, first)
    assert torch.equal(model(more, past_key_values=stored).logits, first)
    again = model(more.repeat_interleave(2, 0), past_key_values=twice).logits[::2]
    assert (again - first).abs().max() < 1e-9
    cache.reset()
    with compressed(model, "tova"):
        model(ids[:1], past_key_values=cache)
    assert cache.entries == 15


@torch.no_grad()
def test_a_loop_is_stored_with_its_states(tmp_path):
    """After a prelude iterations do not begin with the first layer."""
    options = {"recurrence": "loop", "recurrence_options": {"trips": 2, "prelude": 1}}
    model, ids = model_of("lfm2", hosted=True, **options), tokens(1, 30)
    cache = build_cache(model, "drop", window=N)
    model(ids, past_key_values=cache)
    save_cache(cache, tmp_path / "context")
    again = load_cache(model, tmp_path / "context")
    assert torch.equal(*(model(ids[:, :3], past_key_values=each).logits for each in (cache, again)))
    with pytest.raises(ValueError, match="a model with other layers or iterations"):
        load_cache(model_of("lfm2"), tmp_path / "context")


def state_touched(monkeypatch):
    """A compression empties the state."""
    update = State.update_conv_state

    def touched(self, states, *args, **kwargs):
        for x in self.conv_states.values():
            if x is not None:
                x.zero_()
        return update(self, states, *args, **kwargs)

    monkeypatch.setattr(State, "update_conv_state", touched)


def turned_twice(monkeypatch):
    """A key is rotated twice."""
    turn = Turn.turn_each
    monkeypatch.setattr(Turn, "turn_each", lambda self, x, *by: turn(self, turn(self, x, *by), *by))


def nothing_wrong(monkeypatch):
    """The control."""


@pytest.mark.parametrize("fault", [nothing_wrong, state_touched, turned_twice])
def test_the_oracle_sees(fault, monkeypatch):
    model, ids = model_of("lfm2"), tokens(1, LENGTH)
    fault(monkeypatch)
    cache = build_cache(model, "tova", window=N, sinks=S, kept=L)
    error = (read(model, ids, cache, (9, 1, 1, 20, 14)) - truth_of(model, ids, "tova")).abs().max()
    assert error < LIMIT if fault is nothing_wrong else error > 0.01


def test_states_are_not_taken_back():
    model, ids = model_of("lfm2"), tokens(1, 30)
    options = dict(do_sample=False, max_new_tokens=8, prompt_lookup_num_tokens=2)
    with compressed(model, "drop"), pytest.raises(NotImplementedError, match="assisted and speculative decoding"):
        model.generate(ids, **options)


def test_what_has_no_keys_to_compress_is_refused():
    wrong = {
        "deepseek_v3": ({}, "stores latents"),
        "lfm2": (dict(layer_types=["conv"] * 4), "no layer keeps keys"),
    }
    for name, (changes, words) in wrong.items():
        for make in (lambda model: model, ours_of):
            with pytest.raises(ValueError, match=words):
                build_cache(make(theirs_of(name, **changes)), "drop", window=N)


def test_keys_that_layers_share():
    """Gemma 4: later layers read the keys of an earlier one, whose memory takes the queries of that layer alone."""
    kinds = ["sliding_attention", "full_attention"]
    shape = dict(head_dim=8, global_head_dim=16, sliding_window=20, hidden_size_per_layer_input=8)
    shape |= dict(layer_types=kinds * 2, num_kv_shared_layers=2, vocab_size_per_layer_input=cases.VOCABULARY)
    model, ids = model_of("gemma4_text", **shape, rope_parameters=dict.fromkeys(kinds, PLAIN)), tokens(1, LENGTH)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):  # the cache has a layer for those as well
        with pytest.raises(ValueError, match=r"^gemma4_text stores keys of 2 layers, which other layers share"):
            build_cache(model, "freqkv", window=N, sinks=S, kept=L)
        return
    for method in ("key_norm", "freqkv"):  # the oracle of a later layer has its own queries
        cache = build_cache(model, method, window=N, sinks=S, kept=L)
        truth = truth_of(model, ids, method)
        assert (read(model, ids, cache, (9, 1, 1, 20, 14)) - truth).abs().max() < LIMIT
        with torch.no_grad(), compress_in_training(model, method, window=N, sinks=S, kept=L):
            assert (model(ids, use_cache=False).logits - truth).abs().max() < LIMIT
    with pytest.raises(ValueError, match="read keys that an earlier layer's queries select"):
        compress_in_training(model, "tova", window=N, sinks=S, kept=L)
    caches = [build_cache(model, "tova", window=N, sinks=S, kept=L) for _ in range(2)]
    a, b = (read(model, ids, cache, cuts) for cache, cuts in zip(caches, ((LENGTH,), [1] * LENGTH), strict=True))
    assert (a - b).abs().max() < LIMIT and all(layer.queries.shape[2] == 1 for layer in caches[0].layers[:2])

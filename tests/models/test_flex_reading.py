"""FlexAttention reads what SDPA reads: view by view, padded, packed, stored and compiled.

torch has no backward pass of it on a CPU and refuses one; its reference, which makes all scores, has. That is what
gradients are taken through here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from transformers.cache_utils import StaticCache

from fathom.models import FathomForCausalLM
from fathom.models.axes.roles import View
from fathom.models.trips import flex_reading, walk
from fathom.models.trips.flex_reading import attend_by_rule, read_rule
from fathom.models.trips.reading import read_mask
from fathom.models.trips.slot_table import Tags
from tests.tiny import seeded

from .cases import build, config_of, tokens

EXACT = 1e-9
SLOTTED = ["ponder-hidden-duo", "ponder-all", "ponder2", "ponder3", "adaponder", "latent_cot"]
MIXED = ["ponder2+depth_attention", "ponder3+depth_attention", "adaponder+depth_attention"]
MIXED += ["latent_cot+depth_attention", "latent_cot+hyper_connections"]
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
TWO = {"num_hidden_layers": 2}
slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # which is meant here


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets gradients through torch's reference on a CPU."""
    monkeypatch.setattr(walk, "NO_BACKWARD", ())
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


def both(model: FathomForCausalLM, call) -> tuple:
    """What a call gives with SDPA and with FlexAttention."""
    model.set_attn_implementation("sdpa")
    theirs = call()
    model.set_attn_implementation("flex_attention")
    return theirs, call()


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def masked(rows: int, length: int, padding: int) -> Tensor:
    """A mask of which the last row begins with padding."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, :padding] = 0
    return mask


def learned(model: FathomForCausalLM, ids: Tensor, **arguments: Tensor) -> dict[str, Tensor]:
    """The loss and every parameter's gradient."""
    model.zero_grad()
    loss = model(ids, labels=ids, num_items_in_batch=12, **arguments).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def hold_learnt(model: FathomForCausalLM, ids: Tensor, **arguments: Tensor) -> None:
    theirs, ours = both(model.train(), lambda: learned(model, ids, **arguments))
    assert theirs.keys() == ours.keys() and len(ours) > 1
    for name, gradient in theirs.items():
        assert far(ours[name], gradient) < EXACT, name


def ranked(cases: list[str], fast: str) -> list:
    return [case if case == fast else pytest.param(case, marks=slow) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("case", ranked(SLOTTED + MIXED, "latent_cot"))
def test_forward_and_padded(case):
    model, ids, mask = build(config_of(case, **TWO), dtype=torch.float64), tokens(2, 5), masked(2, 5, 2)
    with torch.no_grad():
        for theirs, ours in (
            both(model, lambda: model(ids).logits),
            both(model, lambda: model(ids, attention_mask=mask).logits[mask.bool()]),
        ):
            assert far(ours, theirs) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", ranked(SLOTTED + MIXED, "latent_cot"))
def test_gradients(case, reference):
    """Through every pass, and of the router through the biases that it puts on keys."""
    hold_learnt(build(config_of(case, **TWO), dtype=torch.float64), tokens(2, 5))


@slow
@pytest.mark.parametrize("case", ["adaponder", "latent_cot"])
def test_gradients_without_halted_tokens_and_in_packed_rows(case, reference):
    model = build(config_of(case), dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]])
    for skip in (False, True):
        model.model.recurrence.skip_dead_rows = skip
        hold_learnt(model, tokens(2, 7), position_ids=positions)


@slow
@pytest.mark.parametrize("case", SLOTTED)
def test_sliding_windows(case, reference):
    hold_learnt(build(config_of(case, **SLIDING), dtype=torch.float64), tokens(2, 9))


@pytest.mark.slow
@pytest.mark.parametrize("case", ranked(SLOTTED, "ponder3"))
def test_capped_logits(case):
    """Biases of keys are added to what the cap has left; `eager` does what the oracle does."""
    capped = build(config_of(case, **TWO, attn_logit_softcapping=1.5), dtype=torch.float64)
    ids, mask = tokens(2, 5), masked(2, 5, 2)
    found = []
    for backend in ("eager", "flex_attention"):
        capped.set_attn_implementation(backend)
        with torch.no_grad():
            found.append(capped(ids, attention_mask=mask).logits[mask.bool()])
    assert far(*found) < EXACT
    free = build(config_of(case, **TWO), dtype=torch.float64)
    with torch.no_grad():
        assert far(free(ids, attention_mask=mask).logits[mask.bool()], found[0]) > 1e-3


@slow
@pytest.mark.parametrize("case", [*SLOTTED, "ponder3+depth_attention", "latent_cot+depth_attention"])
def test_cached(case):
    """A padded prompt, a token, and two at once."""
    model, ids, mask = build(config_of(case), dtype=torch.float64), tokens(2, 9), masked(2, 9, 3)

    def call() -> Tensor:
        cache, found = None, []
        for a, b in ((0, 6), (6, 7), (7, 9)):
            out = model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
        return torch.cat(found, 1)[mask.bool()]

    with torch.no_grad():
        theirs, ours = both(model, call)
        assert far(ours, theirs) < EXACT
        theirs, ours = both(model, lambda: model.generate(ids[:, :5], max_new_tokens=6, do_sample=False))
        assert torch.equal(theirs, ours)


@slow
@pytest.mark.parametrize("case", SLOTTED)
def test_a_compiled_step(case, reference):
    """One graph; of torch 2.13, what it writes over an attribute behind FlexAttention is lost."""
    model, ids = build(config_of(case, num_hidden_layers=2), dtype=torch.float64).train(), tokens(2, 7)
    model.set_attn_implementation("flex_attention")
    eager = learned(model, ids)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    compiled = learned(model, ids)
    assert eager.keys() == compiled.keys()
    assert all(far(compiled[name], gradient) < EXACT for name, gradient in eager.items())


@slow
@pytest.mark.parametrize("case", ["ponder", "loop"])
def test_trips_that_read_none_other(case):
    """Their masks are transformers' own, and its kernel is compiled on a CPU."""
    model, ids, mask = build(config_of(case)), tokens(2, 9), masked(2, 9, 3)
    with torch.no_grad():
        theirs, ours = both(model, lambda: model(ids, attention_mask=mask).logits[mask.bool()])
    assert far(ours, theirs) < 1e-5


# --- blocks -----------------------------------------------------------------------------------------------------------


def drawn(count: int, rows: int, seed: int, plain: bool = False, by_token: bool = False) -> Tags:
    """Three trips of tokens, one after another or those of each token side by side."""
    generator = seeded(seed)
    length = -(-count // 3)
    token, trip = torch.arange(length).repeat(3), torch.arange(3).repeat_interleave(length)
    if by_token:
        token, trip = torch.arange(length).repeat_interleave(3), torch.arange(3).repeat(length)
    token, trip = token[None, :count], trip[None, :count]
    if plain:
        return Tags(token, trip, halt=torch.full_like(token, 2))
    halt = torch.randint(0, 3, (rows, length), generator=generator).gather(1, token.expand(rows, -1))
    live = torch.rand(rows, count, generator=generator) < 0.9
    live[:, :128] = True  # a whole block
    bias = torch.randn(rows, count, generator=generator)
    return Tags(token, trip, live, bias, token * 3 // length, halt)


def pairs(module: ModuleType, view: View, tags: Tags, reach: int | None) -> Tensor:
    """Which slot the blocks and the function let read which, `[B, N, N]`."""
    blocks = module.read_rule(view, tags, tags, reach).blocks
    rows, count = blocks.kv_num_blocks.shape[0], tags.token.shape[1]
    inside = flex.create_mask(blocks.mask_mod, rows, None, count, count, device="cpu")[:, 0]
    whole = [flex._ordered_to_dense(n, i, i.shape[-1])[:, 0] for n, i in _tables(blocks)]
    some, every = (x.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :count, :count].bool() for x in whole)
    return (some & inside) | every


def _tables(blocks: flex.BlockMask) -> list[tuple[Tensor, Tensor]]:
    return [(blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices)]


def hold_pairs(module: ModuleType) -> None:
    """Complain of a pair that blocks or function take otherwise than the mask does."""
    for seed, view in enumerate(View):
        for plain, reach, by_token in ((False, None, True), (False, 30, False), (True, None, True), (True, 100, False)):
            tags = drawn(1400, 2, seed, plain, by_token)
            mask = read_mask(view, tags, tags, reach, torch.float32)[:, 0] > torch.finfo(torch.float32).min
            found = pairs(module, view, tags, reach)
            readers = found.any(-1, keepdim=True)  # a row that reads nothing reads everything in a mask
            assert torch.equal(found, mask & readers), (view, plain, reach, by_token)


@pytest.mark.slow
def test_blocks_lose_no_pair_and_add_none():
    hold_pairs(flex_reading)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("of <= last_t, last_of < t", "of < t, last_of < t"),
        pytest.param("of <= last_t, last_of < t", "of <= last_t, last_of <= last_t", marks=slow),
        pytest.param("t - last_of < reach", "last_t - of < reach", marks=slow),
        pytest.param("(last_at <= k)", "(at <= k)", marks=slow),
        pytest.param("every & (least != 0)", "every & (most != 0)", marks=slow),
        pytest.param("(a == last_a) & (b == last_b) & (a == b)", "(a == b)", marks=slow),
        pytest.param("found & (live[b, j] != 0)", "found", marks=slow),
    ],
)
def test_planted_faults_are_seen(right, wrong, tmp_path):
    source = Path(flex_reading.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1
    file = tmp_path / "planted.py"
    file.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("fathom.models.trips.planted_flex", file)
    planted = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, planted)
        spec.loader.exec_module(planted)
    with pytest.raises(AssertionError):
        hold_pairs(planted)


def test_blocks_that_nothing_reads_are_left_out():
    """Of 12 by 12 blocks in causal order: a triangle, whole but for its diagonal and for tokens cut by a border."""
    tags = drawn(1536, 1, 0, plain=True, by_token=True)
    (some, _), (every, _) = _tables(read_rule(View.ALL, tags, tags, None).blocks)
    for row, (cut, whole) in enumerate(zip(some[0, 0].tolist(), every[0, 0].tolist(), strict=True)):
        assert row + 1 <= cut + whole <= row + 2 and cut <= 3


@slow
@pytest.mark.parametrize("view", list(View))
@pytest.mark.parametrize("plain", [False, True])
def test_the_kernel_equals_the_mask(view, plain):
    """As Inductor makes it for a CPU, which looks at the blocks too."""
    tags, reach = drawn(700, 2, 3, plain, view is View.ALL), None if plain else 100
    query, key, value = (torch.randn(2, heads, 700, 16) for heads in (4, 2, 2))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        torch._dynamo.reset()
        patch.setattr(flex_reading, "flex_attention", torch.compile(flex.flex_attention, dynamic=False, fullgraph=True))
        rule = read_rule(view, tags, tags, reach)
        ours, _ = attend_by_rule(SimpleNamespace(), query, key, value, rule, 0.25)
        mask = read_mask(view, tags, tags, reach, torch.float32)
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.25, enable_gqa=True)
        readers = pairs(flex_reading, view, tags, reach).any(-1).expand(2, -1)
    assert far(ours[readers], theirs.transpose(1, 2)[readers]) < 1e-5


@pytest.mark.slow
def test_three_heads():
    """Its kernels share keys among powers of two of heads only."""
    tags = drawn(9, 2, 0)
    query, key, value = (torch.randn(2, heads, 9, 4, dtype=torch.float64) for heads in (6, 2, 2))
    ours, _ = attend_by_rule(SimpleNamespace(), query, key, value, read_rule(View.DUO, tags, tags, None), 0.5)
    mask = read_mask(View.DUO, tags, tags, None, torch.float64)
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.5, enable_gqa=True)
    readers = pairs(flex_reading, View.DUO, tags, None).any(-1)
    assert far(ours[readers], theirs.transpose(1, 2)[readers]) < EXACT


# --- what it cannot ---------------------------------------------------------------------------------------------------


def test_what_it_cannot_is_refused_by_name():
    model = build(config_of("latent_cot"))
    model.set_attn_implementation("flex_attention")
    ids = tokens(1, 5)
    with pytest.raises(ValueError, match="flex_attention has no backward pass on cpu: use sdpa"):
        model(ids, labels=ids)
    with torch.no_grad(), pytest.raises(ValueError, match="flex_attention cannot read this static cache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=8), use_cache=True)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        attend_by_rule(model, *(torch.zeros(1, 1, 1, 2),) * 3, rule=None, scaling=1.0, dropout=0.1)

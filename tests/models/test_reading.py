"""Who reads whom, restated from the card slot by slot."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fathom.models.axes.roles import View
from fathom.models.trips.reading import read_mask, side_by_side, with_key_bias
from fathom.models.trips.slot_table import Tags
from fathom.models.trips.walk import Inputs
from tests.tiny import seeded

from .cases import tokens
from .slot_oracle import thinker
from .test_pondering import error


def tags(slots, **others):
    token, trip = (torch.tensor([column]) for column in zip(*slots, strict=True))
    return Tags(token, trip, **others)


@st.composite
def tables(draw):
    """Slots of a few tokens that halted somewhere, in any order."""
    halts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    slots = draw(st.permutations([(t, k) for t, halt in enumerate(halts) for k in range(halt + 1)]))
    return halts, slots


@given(tables(), st.sampled_from(View), st.sampled_from([None, 1, 2, 3]), st.booleans())
def test_views_are_the_cards(table, view, window, split):
    halts, slots = table
    document = [t // 2 if split else 0 for t, _ in slots]
    live = [(t + k) % 3 > 0 for t, k in slots]
    key = tags(
        slots,
        halt=torch.tensor([[halts[t] for t, _ in slots]]),
        live=torch.tensor([live]),
        document=torch.tensor([document]) if split else None,
    )
    found = read_mask(view, key, key, window, None)[0, 0]
    for i, (t, k) in enumerate(slots):
        row = []
        for j, (of, at) in enumerate(slots):
            seen = {
                View.SAME: of <= t and at == min(k, halts[of]),
                View.DUO: of <= t and at <= k,
                View.ALL: of < t or (of == t and at <= k),
            }[view]
            row.append(seen and (window is None or t - of < window) and document[i] == document[j] and live[j])
        assert found[i].tolist() == (row if any(row) else [True] * len(row)), "whoever can see nothing sees anything"


@pytest.mark.parametrize("view,multiple", [(View.SAME, 4), (View.DUO, 10), (View.ALL, 16)])
def test_keys_read_at_equal_context(view, multiple):
    """K + 1, (K + 1)(K + 2) / 2, (K + 1)² times vanilla's, for K = 3."""
    context, trips = 6, range(4)
    key = tags([(t, k) for t in range(context) for k in trips], halt=torch.full((1, 4 * context), 3))
    query = tags([(context, k) for k in trips])
    assert read_mask(view, query, key, None, None).sum() == multiple * context


def test_masks_as_numbers():
    """The bias of a key goes to everybody who reads it."""
    key = tags([(0, 0), (0, 1), (1, 0)], bias=torch.tensor([[0.0, -2.0, 0.0]]))
    found = read_mask(View.ALL, key, key, None, torch.float64)[0, 0]
    low = torch.finfo(torch.float64).min
    assert found.tolist() == [[0, low, low], [0, -2, low], [0, -2, 0]]


def test_nobody_reads_nothing():
    """A query whose every key is dead sees all of them rather than divide by zero."""
    key = tags([(0, 0), (1, 0)], live=torch.zeros(1, 2, dtype=torch.bool), halt=torch.zeros(1, 2, dtype=torch.long))
    query = tags([(2, 0)])
    assert read_mask(View.SAME, query, key, None, None).all()


def test_interleaving_goes_by_token():
    parts = [tags([(t, k) for t in range(3)], bias=None if k == 0 else torch.full((2, 3), -1.0)) for k in range(2)]
    found = side_by_side(parts, interleave=True)
    assert found.token.tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert found.trip.tolist() == [[0, 1] * 3] * 2
    assert found.bias.tolist() == [[0, -1] * 3] * 2
    assert found.live is None
    assert side_by_side(parts).trip.tolist() == [[0] * 3 + [1] * 3] * 2


def test_documents_start_where_positions_restart():
    inputs = Inputs(**dict.fromkeys(Inputs.__dataclass_fields__))
    assert inputs.documents() is None
    inputs.packed = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]])
    assert inputs.documents().tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]


@pytest.mark.parametrize("method", ["ponder3", "adaponder", "latent_cot"])
def test_masks_made_elsewhere_are_refused(method):
    model, ids = thinker(method), tokens(1, 4)
    with pytest.raises(ValueError, match=rf"recurrence={method} makes its own masks: pass a padding mask \[B, T\]"):
        model(ids, attention_mask=torch.ones(1, 1, 4, 4))


# --- a bias of keys without a mask ------------------------------------------------------------------------------------


def attended(query, key, value, mask, bias, scaling, channels=with_key_bias):
    """By channels and a mask of bools; `channels` None adds the bias to the mask."""
    group, width = query.shape[1] // key.shape[1], query.shape[-1]
    if channels is not None:
        query, key, value = channels(query, key, value, bias, scaling)
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    else:
        mask = torch.where(mask, bias[:, None, None].to(query.dtype), -torch.inf)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return ((query @ key.mT * scaling + mask).softmax(-1) @ value)[..., :width]


def drawn(heads, kv_heads, width, dtype=torch.float64):
    generator = seeded(heads * width)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    bias = (6 * torch.rand(2, 7, generator=generator) - 9).requires_grad_()  # about log 1e-4 and above
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    return (normal(2, heads, 7, width), *(normal(2, kv_heads, 7, width) for _ in range(2)), mask, bias, width**-0.5)


@pytest.mark.parametrize("heads,kv_heads,width", [(1, 1, 4), (4, 2, 6), (4, 1, 64), (2, 2, 10)])
def test_channels_are_the_bias(heads, kv_heads, width):
    query, key, value, mask, bias, scaling = drawn(heads, kv_heads, width)
    inputs = query, key, value, bias.double().detach().requires_grad_()
    found, truth = (
        attended(query, key, value, mask, inputs[-1], scaling, channels) for channels in (with_key_bias, None)
    )
    assert error(found, truth) < 1e-14
    weights = torch.randn_like(truth)
    for a, b in zip(*(torch.autograd.grad(out, inputs, weights) for out in (found, truth)), strict=True):
        assert error(a, b) < 1e-13


def test_a_scale_by_the_wider_head_is_seen():
    """1 / √(D + 8): the content's own scale would change, as in third-party code."""
    query, key, value, mask, bias, scaling = drawn(4, 2, 64)
    truth = attended(query, key, value, mask, bias.double(), scaling, None)
    assert error(attended(query, key, value, mask, bias.double(), 72**-0.5), truth) > 1e-3


def test_half_precision_needs_the_rest_of_the_bias():
    """One channel rounds log w, and so errs by up to 3 % of a weight; the second holds what the first has lost."""
    query, key, value, _, bias, scaling = drawn(2, 2, 64, torch.bfloat16)
    truth = query.double() @ key.double().mT * scaling + bias[:, None, None]
    query, key, _ = with_key_bias(query, key, value, bias, scaling)

    def off(width):
        found = query[..., :width].double() @ key[..., :width].double().mT * scaling
        return float((found - truth).detach().abs().max())

    assert query.shape[-1] == 66 and off(66) < 2e-4
    assert 5e-3 < off(65) < 0.04

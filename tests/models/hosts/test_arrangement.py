"""States neither leak into the next document nor decay over padding."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

from fathom import FathomForCausalLM
from fathom.models import modeling
from tests.tiny import seeded

from .cases import ours_of, theirs_of, tokens

LOOP = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
STATES = [
    "lfm2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_text", "granitemoehybrid", "jamba")),
]
LENGTHS = [5, 4, 3]


def packed(model: FathomForCausalLM, ids: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return model(ids, position_ids=positions, return_logits=True).logits


def masked(model: FathomForCausalLM, ids: Tensor, dead: list[int], **kwargs) -> tuple[Tensor, Tensor]:
    """Logits of a row with padding at some columns, next to one without; and of the row without these columns."""
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, dead] = 0
    live = mask[1].bool()
    return model(ids.repeat(2, 1), attention_mask=mask, **kwargs).logits[1, live], model(ids[:, live]).logits[0]


@pytest.mark.quick("lfm2-loop")
@pytest.mark.parametrize("mechanism", [{}, LOOP], ids=["vanilla", "loop"])
@pytest.mark.parametrize("name", STATES)
@torch.no_grad()
def test_documents_of_a_row_are_read_alone(name, mechanism, monkeypatch):
    model, ids = ours_of(theirs_of(name), **mechanism), tokens(1, sum(LENGTHS))
    alone = torch.cat([model(part).logits for part in ids.split(LENGTHS, 1)], 1)
    for mode in (True, False):
        assert (packed(model.train(mode), ids) - alone).abs().max() < 2e-5
    assert model(ids, position_ids=torch.arange(12)[None] % 6).past_key_values is None, "no state to go on from"
    monkeypatch.setattr(modeling, "of_documents", lambda *_: None)
    assert (packed(model, ids) - alone).abs().max() > 1e-2, "a state that runs on is seen"


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_gradients_of_documents(name):
    model, ids = ours_of(theirs_of(name)).train(), tokens(1, sum(LENGTHS))
    weight = torch.randn(model.config.vocab_size, generator=seeded(0))
    (packed(model, ids) @ weight).sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    sum((model(part, return_logits=True).logits @ weight).sum() for part in ids.split(LENGTHS, 1)).backward()
    for ours, theirs in zip(found, (parameter.grad for parameter in model.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", STATES)
@torch.no_grad()
def test_padding_leaves_a_state_as_it_is(name, monkeypatch):
    model, ids = ours_of(theirs_of(name)), tokens(1, 10)
    for dead in ([0, 1], [3], [8, 9], [0, 5, 9]):
        found, expected = masked(model, ids, dead)
        assert (found - expected).abs().max() < 2e-5
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    out = model(ids[:, :8].repeat(2, 1), attention_mask=mask, use_cache=True)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    step = {"past_key_values": out.past_key_values, "position_ids": torch.tensor([[8], [6]])}
    found = model(ids[:, 8:9].repeat(2, 1), attention_mask=mask, **step).logits[1, 0]
    assert (found - model(torch.cat((ids[:, :6], ids[:, 8:9]), 1)).logits[0, -1]).abs().max() < 2e-5
    mask = torch.nn.functional.pad(mask, (0, 2), value=0)
    with pytest.raises(ValueError, match="padding after cached tokens"):
        model(ids[:, :2].repeat(2, 1), attention_mask=mask, past_key_values=out.past_key_values)
    monkeypatch.setattr(modeling, "of_padding", lambda *_: None)
    found, expected = masked(model, ids, [3])
    assert (found - expected).abs().max() > 1e-3, "a state that decays is seen"


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("olmo3", marks=pytest.mark.slow)])
@torch.no_grad()
def test_padding_takes_no_place_of_a_window(name):
    """A window counts what it sees: padding on the left is exact, padding between tokens is refused."""
    model, ids = ours_of(theirs_of(name)), tokens(1, 12)
    for dead in ([0, 1, 2], [11]):
        found, expected = masked(model, ids, dead)
        assert (found - expected).abs().max() < 2e-5
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    out = model(ids[:, :8].repeat(2, 1), attention_mask=mask, use_cache=True)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    with pytest.raises(ValueError, match="would use up a layer's sliding window: pad on the left"):
        model(ids[:, 8:9].repeat(2, 1), attention_mask=mask, past_key_values=out.past_key_values)
    short = torch.tensor([[1, 0, 1, 1]])
    assert (model(ids[:, :4], attention_mask=short).logits[0, -1]).isfinite().all(), "within the window nothing is lost"


@pytest.mark.parametrize("name", STATES)
@torch.no_grad()
def test_rows_of_states_are_selected_and_repeated(name):
    model, ids = ours_of(theirs_of(name), **LOOP), tokens(2, 8)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    found = model(ids[:, 6:7].repeat_interleave(2, 0), past_key_values=cache).logits
    expected = model(ids[:, :7]).logits[:, -1:]
    assert (found - expected.repeat_interleave(2, 0)).abs().max() < 2e-5
    cache.batch_select_indices(torch.tensor([3, 0]))
    found = copy.deepcopy(model)(ids[[1, 0], 7:], past_key_values=copy.deepcopy(cache)).logits
    assert (found - model(ids).logits[[1, 0], -1:]).abs().max() < 2e-5


@pytest.mark.slow
@torch.no_grad()
def test_a_part_that_forgets_its_state_reads_token_by_token():
    """transformers' Jamba starts again where it reads several tokens after others."""
    model, ids = ours_of(theirs_of("jamba")), tokens(1, 9)
    out = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], past_key_values=out.past_key_values).logits
    assert (rest - model(ids).logits[:, 5:]).abs().max() < 2e-5
    for layer in model.model.layers:
        layer.forgets = False
    out = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], past_key_values=out.past_key_values).logits
    assert (rest - model(ids).logits[:, 5:]).abs().max() > 1e-2


@torch.no_grad()
def test_the_rest_of_a_padded_prompt_is_read_with_a_mask():
    """Which is as long as the text: Jamba would lay it over one token."""
    model, ids = ours_of(theirs_of("jamba")), tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = model(ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5], use_cache=True)
    given = {"attention_mask": mask, "position_ids": positions[:, 5:], "past_key_values": first.past_key_values}
    rest = model(ids[:, 5:], **given).logits
    assert (rest[0] - model(ids[:1]).logits[0, 5:]).abs().max() < 2e-5
    assert (rest[1] - model(ids[1:, 4:]).logits[0, 1:]).abs().max() < 2e-5


@torch.no_grad()
def test_padding_is_not_read_alone():
    """A step of one token has no place before it where every state is zero."""
    model, ids = ours_of(theirs_of("lfm2")), tokens(2, 3)
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    with pytest.raises(ValueError, match=r"^a padding token read alone would change the recurrent state: read it with"):
        model(ids[:, :1], attention_mask=mask[:, :1], use_cache=True)
    assert model(ids[:, :1], attention_mask=mask[:, :1], use_cache=False).logits.shape[1] == 1, "no state is stored"
    first = model(ids[:, :2], attention_mask=mask[:, :2], use_cache=True)
    last = model(ids[:, 2:], attention_mask=mask, past_key_values=first.past_key_values).logits
    assert (last[1] - model(ids[1:, 2:]).logits[0]).abs().max() < 2e-5, "the control"


@pytest.mark.parametrize(
    ("name", "keys"),
    [("phi", {"resid_pdrop": 0.5}), ("phi", {"embd_pdrop": 0.5}), ("starcoder2", {"embedding_dropout": 0.5})],
)
def test_dropout_that_training_would_leave_out_is_refused(name, keys):
    model, ids = ours_of(theirs_of(name, **keys)), tokens(1, 5)
    model(ids)  # the control: there is none in evaluation
    with pytest.raises(ValueError, match=f"^{name}: Fathom does not apply this family's dropout, "):
        model.train()(ids, labels=ids)
    ours_of(theirs_of(name, attention_dropout=0.5)).train()(ids, labels=ids)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.model.host.embedding_dropout = 0.0
    model(ids, labels=ids)


def test_drafts_need_states_that_can_be_rolled_back():
    model = ours_of(theirs_of("lfm2"), **LOOP)
    with pytest.raises(ValueError, match="draft_trips: lfm2 has layers whose state cannot be rolled back"):
        model.generate(tokens(1, 5), max_new_tokens=3, draft_trips=1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "lfm2", "nemotron_h"])
def test_a_hosted_model_is_copied_pickled_and_resized(name, tmp_path):
    """Some call their embedding, or the last norm, by another name."""
    theirs = theirs_of(name, **({"output_router_logits": True} if name == "qwen3_moe" else {}))
    model, ids, buffer = ours_of(theirs, **LOOP), tokens(), io.BytesIO()
    expected = model(ids).logits
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(ids).logits, expected)
    grown = copy.deepcopy(model)
    grown.resize_token_embeddings(120)
    grown.save_pretrained(tmp_path)
    opened = FathomForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(opened(ids).logits, grown(ids).logits) and opened.config.vocab_size == 120


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_text"])
@torch.no_grad()
def test_attention_weights_are_the_familys(name):
    theirs, ids = theirs_of(name, "eager"), tokens()
    expected = theirs(ids, output_attentions=True).attentions
    found = ours_of(theirs)(ids, output_attentions=True).attentions
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    looped = ours_of(theirs, **LOOP)(ids, output_attentions=True).attentions
    assert len(looped) == 2 * len(expected)

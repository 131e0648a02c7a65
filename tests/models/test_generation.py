"""`generate` where the angles of RoPE change with the length of a text."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from fathom.inference.batches import DraftBatch
from fathom.models import FathomForCausalLM
from fathom.models.trips import walk
from fathom.training.jacobi_gap import _decoded

from .cases import SHAPE, SOLVED, build, config_of, tokens

CROSSING = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 3.0, 5.0, 7.0],
    "original_max_position_embeddings": CROSSING,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
THEIRS = {key: value for key, value in SHAPE.items() if key != "eos_token_id"} | {
    "initializer_range": 0.3,
    "eos_token_id": None,
}
NEW = {"max_new_tokens": 8, "do_sample": False}


def both(directory, seed, kind, rope, **shape):
    """A random model of transformers, and the same opened by Fathom."""
    torch.manual_seed(seed)
    config, model = {"phi3": (Phi3Config, Phi3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
    shape = {key: value for key, value in THEIRS.items() if kind != "phi3" or key != "head_dim"} | shape
    theirs = model(config(**shape, rope_parameters=rope)).eval()
    theirs.save_pretrained(directory)
    return theirs, FathomForCausalLM.from_pretrained(directory).eval()


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.slow)], ids=len)
def test_phi3_reads_again_where_its_angles_change(tmp_path, seeds):
    """Each of 20 models gives its own class's tokens, which are the uncached ones; the control keeps the cache."""
    kept = 0
    for seed in seeds:
        shape = {"num_hidden_layers": 2, "original_max_position_embeddings": CROSSING}
        theirs, ours = both(tmp_path, seed, "phi3", LONGROPE, **shape)
        ids, mask = tokens(2, 11, seed=seed), torch.ones(2, 11, dtype=torch.long)
        mask[1, :3] = 0
        given = {"attention_mask": mask, **NEW}
        expected = theirs.generate(ids, **given)
        assert torch.equal(ours.generate(ids, **given), expected)
        assert torch.equal(ours.generate(ids, use_cache=False, **given), expected)
        ours.model.rereads = False
        kept += not torch.equal(ours.generate(ids, **given), expected)
    assert kept >= len(seeds) // 2


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_other_families_keep_their_cache_as_their_classes_do(tmp_path, rope):
    shape = {"max_position_embeddings": CROSSING if rope is DYNAMIC else 64, "num_hidden_layers": 2}
    theirs, ours = both(tmp_path, 1, "llama", rope, **shape)
    for length, extra in ((18, {}), (12, {"num_beams": 2}), (11, {"prompt_lookup_num_tokens": 2})):
        ids = tokens(1, length)
        assert torch.equal(ours.generate(ids, **NEW, **extra), theirs.generate(ids, **NEW, **extra))


CASES = {
    "loop+depth_attention": {"trips": 2},
    "loop": {"trips": 3, "kv": "first"},
    "ponder2": {"trips": 2, **SOLVED},
    "adaponder+depth_attention": {"trips": 3, "tau": 0.4},
}


def deep(case, rope):
    """A model with a mechanism, and angles that change at CROSSING."""
    shape = {"max_position_embeddings": CROSSING if rope is DYNAMIC else 64, "eos_token_id": None}
    config = config_of(case, rope_parameters=rope, recurrence_options=CASES[case], **shape)
    return build(config, dtype=torch.float64)


@pytest.mark.quick("loop+depth_attention-dynamic", "loop-longrope")
@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("case", CASES)
def test_with_a_mechanism_generate_is_its_uncached_self(case, rope, monkeypatch):
    """Also where a prompt crosses in the middle, with a padded row, a static cache and beams."""
    monkeypatch.setattr(walk, "AT_ONCE", 5)
    model, ids = deep(case, rope), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"attention_mask": mask, **NEW, "max_new_tokens": 6}
    expected = model.generate(ids, use_cache=False, **given)
    assert torch.equal(model.generate(ids, **given), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids, **static, **given), expected)
    beams = [model.generate(ids, num_beams=2, use_cache=cached, **given) for cached in (True, False)]
    assert torch.equal(*beams)
    long = tokens(1, 19)
    crossed = [model.generate(long, use_cache=cached, max_new_tokens=4, do_sample=False) for cached in (True, False)]
    assert torch.equal(*crossed)
    with torch.no_grad():  # in parts of five, each with the angles of the whole
        whole = model(long, use_cache=False).logits
        assert (model(long, use_cache=True).logits - whole).abs().max() < 1e-11


def test_what_cannot_be_read_again_is_refused():
    model, ids = deep("loop+depth_attention", LONGROPE), tokens(1, 19)
    with pytest.raises(ValueError, match="leave out prefill_chunk_size"):
        model.generate(ids, prefill_chunk_size=6, **NEW)
    short = ids[:, :10]
    expected = model.generate(short, use_cache=False, **NEW)
    assert torch.equal(model.generate(short, prefill_chunk_size=6, **NEW), expected)
    for drafts in ({"draft_trips": 1}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(drafts))}: .* within 18 tokens"):
            model.generate(short, **drafts, **NEW)
        few = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(short, **drafts, **few), expected[:, :16])
    with pytest.raises(ValueError, match=r"guidance_scale: .* within 18 tokens"):
        model.generate(short, guidance_scale=2.0, **NEW)
    with pytest.raises(ValueError, match="change with the length of a sequence"):
        DraftBatch(model, 2, 1)
    with pytest.raises(ValueError, match="depend on other requests"):
        model.init_continuous_batching()


def test_embeddings_of_a_prompt_and_a_cache_of_before_are_read_again():
    model, ids = deep("loop+depth_attention", LONGROPE), tokens(1, 12)
    expected = model.generate(ids, use_cache=False, **NEW)
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **NEW), expected[:, 12:])
    first = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    again = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=6, do_sample=False)
    assert torch.equal(again, expected)


@torch.no_grad()
def test_decoded_losses_cross_as_well():
    model, ids = deep("loop+depth_attention", LONGROPE), tokens(1, 20)
    last = torch.cat([model(ids[:, :n], use_cache=False).logits[:, -1] for n in range(1, 20)])
    expected = torch.nn.functional.cross_entropy(last.float(), ids[0, 1:], reduction="none")
    assert torch.allclose(_decoded(model, ids)[0], expected, atol=1e-5)

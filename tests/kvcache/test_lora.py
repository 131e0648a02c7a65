"""The paper's cheap tuning, by PEFT: adapters of attention, and all of the embeddings and norms."""

import pytest
import torch

from fathom.kvcache import build_cache, compress_in_training, prefill

from .cases import SCHEDULE, cached, model_of, tokens

peft = pytest.importorskip("peft")


@pytest.fixture(params=["qwen3", "depth_attention"])
def model(request):
    return model_of(request.param)


def with_lora(model):
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    config = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=sorted(leaf for leaf in leaves if leaf.endswith("norm") or leaf == "embed_tokens"),
        ensure_weight_tying=bool(model.config.tie_word_embeddings),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def tuned(model, steps=4):
    ids, losses = tokens(4, 150), []
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    with compress_in_training(model, **SCHEDULE):
        for _ in range(steps):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    return losses


def test_it_learns_and_serves(model):
    ids = tokens(1, 150)
    adapted = with_lora(model)
    losses = tuned(adapted)
    assert losses[-1] < losses[0]
    with compress_in_training(adapted, **SCHEDULE), torch.no_grad():
        truth = adapted(input_ids=ids).logits
    cache = build_cache(adapted, **SCHEDULE)
    with torch.no_grad():
        output = prefill(adapted, ids, cache)
    assert (output.logits[:, -1] - truth[:, -1]).abs().max() < 1e-5
    merged = adapted.merge_and_unload()
    assert (cached(merged, ids, build_cache(merged, **SCHEDULE)) - truth).abs().max() < 1e-4


def test_padding_is_seen_behind_the_wrapper(model):
    """On the left it is each row's own; on the right it is refused."""
    adapted, ids, mask = with_lora(model), tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    found = adapted(input_ids=ids, attention_mask=mask, past_key_values=build_cache(adapted, **SCHEDULE)).logits[0, 3:]
    alone = adapted(input_ids=ids[:1, 3:], past_key_values=build_cache(adapted, **SCHEDULE)).logits[0]
    assert (found - alone).abs().max() < 1e-5
    with pytest.raises(ValueError, match="pad sequences on the left"):
        adapted(input_ids=ids, attention_mask=mask.flip(1), past_key_values=build_cache(adapted, **SCHEDULE))


def test_embeddings_and_norms_are_saved(model, tmp_path):
    adapted, ids = with_lora(model), tokens(1, 50)
    case = "depth_attention" if model.config.model_type == "fathom" else "qwen3"
    tuned(adapted)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model_of(case), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, adapted(input_ids=ids).logits)
        assert not torch.equal(again(input_ids=ids).logits, model_of(case)(ids).logits)


def test_tied_embeddings_stay_tied():
    model = model_of("qwen3", tie_word_embeddings=True)
    adapted = with_lora(model)
    tuned(adapted)
    merged = adapted.merge_and_unload()
    assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()

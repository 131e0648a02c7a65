"""Models in eight bits: a sequence's logits are those that it has alone, to the bit."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fathom.checkpoints.int8 import quantise
from fathom.inference.batches import batch_for
from fathom.inference.by_rows import NAME, OF_SLOTS, attend_by_rows, needs_rows
from fathom.inference.engine import Engine
from fathom.inference.sampling import Choice
from tests.inference.test_engine import Collected, submitted_at_once
from tests.models.cases import build, config_of, tokens

CASES = ("vanilla", "depth_attention", "loop", "adaponder", "latent_cot", "ponder3", "ponder2+depth_attention")
LENGTHS = (12, 30, 7, 19)
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 400}


def model_of(case: str, by_rows: bool):
    model = build(config_of(case, **WIDE))
    quantise(model)
    if by_rows:
        attend_by_rows(model)
    return model


def steps(model, prompts: list[list[int]], count: int = 4) -> list[torch.Tensor]:
    """Logits `[rows, V]` of some steps after prompts that were read one by one."""
    batch = batch_for(model)
    with torch.inference_mode():
        batch.reserve(len(prompts), 64)
        for prompt in prompts:
            batch.read(prompt)
            batch.join()
        return [batch.step([50 + step + prompt[0] % 7 for prompt in prompts]) for step in range(count)]


def differing(model) -> int:
    """How many logits of sequences in company differ from those alone."""
    prompts = [(tokens(1, length, seed=length)[0] % 400).tolist() for length in LENGTHS]
    together = steps(model, prompts)
    found = 0
    for row, prompt in enumerate(prompts):
        for alone, company in zip(steps(model, [prompt]), together, strict=True):
            found += int((alone[0] != company[row]).sum())
    return found


@pytest.mark.quick("vanilla", "adaponder")
@pytest.mark.parametrize("case", CASES)
def test_company_changes_no_bit(case):
    model = model_of(case, by_rows=True)
    assert needs_rows(model) and model.config._attn_implementation in (NAME, OF_SLOTS)
    assert differing(model) == 0


@pytest.mark.quick("loop", "adaponder")
@pytest.mark.parametrize("case", CASES)
def test_the_attention_is_the_same(case):
    """In float64, where only the last digits differ; prompts read whole, in company, and tokens after them."""
    prompts = [(tokens(1, length, seed=length)[0] % 400).tolist() for length in LENGTHS]
    found = []
    for by_rows in (False, True):
        model = build(config_of(case, **WIDE), dtype=torch.float64)
        if by_rows:
            attend_by_rows(model)
        ids = tokens(3, 11) % 400
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        with torch.inference_mode():
            whole = [model(ids[:1]).logits, model(ids, attention_mask=mask).logits[:, 4:]]
        found.append([*whole, *steps(model, prompts)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_model_of_transformers():
    torch.manual_seed(0)
    shape = {**WIDE, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    quantise(model)
    assert differing(model) > 0
    attend_by_rows(model)
    assert differing(model) == 0


@pytest.mark.quick("vanilla")
@pytest.mark.parametrize("case", ["vanilla", "adaponder"])
def test_prompts_are_cut_at_the_same_places(case, monkeypatch):
    """However many others are read in the same turn: the length of a product can decide a last bit."""
    monkeypatch.setattr("fathom.inference.engine.BY_ROWS", 32)
    model = model_of(case, by_rows=False)
    prompts = [(tokens(1, length, seed=length)[0] % 400).tolist() for length in (30, 20, 50, 9, 44, 33)]
    engine = Engine(model, 1 << 26)

    def asked(some: list[list[int]]) -> list[list[object]]:
        jobs = [Collected(one, 12, Choice(), logprobs=3) for one in some]
        submitted_at_once(engine, jobs)
        assert [one.wait() for one in jobs] == ["length"] * len(jobs)
        return [one.events for one in jobs]

    together = asked(prompts)
    assert together == [asked([prompt])[0] for prompt in prompts]
    engine.join(10)


def test_a_kernel_for_the_whole_batch_would_change_some():
    assert differing(model_of("vanilla", by_rows=False)) > 0


def test_other_backends_and_other_models_stay():
    model = build(config_of("vanilla"))
    assert not needs_rows(model)
    model.set_attn_implementation("eager")
    attend_by_rows(model)
    assert model.config._attn_implementation == "eager"

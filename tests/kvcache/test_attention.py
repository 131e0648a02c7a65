"""Training under compression; that it equals the cache is shown in test_recursion.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fathom.kvcache import METHODS, Compression, compress_in_training
from fathom.kvcache.method import Held

from .cases import SCHEDULE, N, model_of, tokens


def switched(model, method="freqkv", **options):
    return compress_in_training(model, method, **{**SCHEDULE, **options})


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.quick("freqkv-qwen3", "snapkv-depth_attention", "freqkv-loop")
@pytest.mark.parametrize("case", ["qwen3", "depth_attention", "loop"])
@pytest.mark.parametrize("method", ["freqkv", "snapkv"])
def test_checkpointing_is_exact(case, method):
    model, ids = model_of(case).train(), tokens(2, 150)
    with switched(model, method):
        plain = gradients(model, ids)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        assert all(map(torch.equal, gradients(model, ids), plain))


@pytest.mark.quick("freqkv", "learned", "snapkv")
@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_learns(method):
    model, ids = model_of("depth_attention").train(), tokens(2, 150)
    with switched(model, method) as run:
        assert isinstance(run, Compression)
        assert all(gradient.abs().max() > 0 for gradient in gradients(model, ids))


@pytest.mark.quick("freqkv", "snapkv")
@pytest.mark.parametrize("method", METHODS)
def test_padding_behind_rows(method):
    """No token sees it, through any compression: gradients are those of the rows alone. In front it would be seen."""
    model, ids = model_of("qwen3").train(), tokens(2, 150)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, 100:], mask[0, 100:] = -100, 0
    real = int(mask[:, 1:].sum())

    def learned(*rows):
        model.zero_grad()
        for inputs, targets in rows:
            given = mask if len(inputs) == 2 else None
            model(inputs, attention_mask=given, labels=targets, num_items_in_batch=real).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with switched(model, method):
        alone = learned((ids[:1, :100], labels[:1, :100]), (ids[1:], labels[1:]))
        behind = learned((ids, labels))
        in_front = learned((ids[:1].roll(50, 1), labels[:1].roll(50, 1)), (ids[1:], labels[1:]))
    apart = [max((a - b).abs().max() for a, b in zip(alone, other, strict=True)) for other in (behind, in_front)]
    assert apart[0] < 1e-5 and apart[1] > 1e-3


@pytest.mark.parametrize("method", ["freqkv", "drop"])
@torch.no_grad()
def test_eager_and_sdpa(method):
    ids, logits = tokens(2, 150), []
    for backend in ("sdpa", "eager"):
        with switched(model := model_of("qwen3", attn_implementation=backend), method):
            logits.append(model(ids).logits)
        first = model(ids[:, :N]).logits
        assert torch.equal(logits[-1][:, :N], first)
    assert (logits[0] - logits[1]).abs().max() < 1e-5


@torch.no_grad()
def test_autocast_leaves_the_matrix_alone():
    """The transform stays in float32 although autocast would take it for a matrix product like any other."""
    model, ids = model_of("qwen3"), tokens(1, 150)
    run = switched(model)
    x = torch.randn(1, 2, N, 16)
    exact = run.method.compress(Held(x, x), x[:, :, :4], 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run.method.reduce(x[:, :, 4:]).dtype == torch.bfloat16  # what would happen otherwise
        for a, b in zip(run.method.compress(Held(x, x), x[:, :, :4], 0), exact, strict=True):
            assert torch.equal(a, b)
        assert torch.isfinite(model(ids).logits).all()
    run.stop()


@torch.no_grad()
def test_switching_back():
    model, ids = model_of("qwen3"), tokens(1, 150)
    stock, keys = model(ids).logits, list(model.state_dict())
    with switched(model):
        assert not torch.equal(model(ids).logits, stock)
        assert list(model.state_dict()) == keys
        with pytest.raises(ValueError, match=r"already compresses in training: call stop\(\) of the first"):
            switched(model)
    assert torch.equal(model(ids).logits, stock)
    with pytest.raises(KeyError), switched(model):
        raise KeyError
    assert torch.equal(model(ids).logits, stock)


def test_a_checkpoint_saved_meanwhile_is_an_ordinary_one(tmp_path):
    model, ids = model_of("qwen3"), tokens(1, 150)
    with switched(model):
        model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)


def test_without_a_schedule():
    model = model_of("qwen3")
    model.set_attn_implementation("fathom_kvcache")
    with pytest.raises(RuntimeError, match=r"set it by compress_in_training\(model, …\)"):
        model(tokens(1, 10))


def test_other_backends_are_refused():
    model = model_of("qwen3")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match=r"call model.set_attn_implementation\('sdpa'\) first"):
        switched(model)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fathom", "depth_attention"])
def test_a_few_steps_help_beyond_the_window(case):
    """Tuned under compression, the model predicts what it could not before: the word of 100 tokens ago, over again."""
    model = model_of(case).train()
    ids = tokens(8, 32).repeat(1, 6)  # a period of 32 survives no round without tuning
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with switched(model):
        for _ in range(12):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_fullgraph_compile():
    """The number of groups is the shape's, so there is one graph."""
    model, ids = model_of("fathom"), tokens(1, 150)
    with switched(model), torch.no_grad():
        truth = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert (compiled(ids, use_cache=False).logits - truth).abs().max() < 1e-5


def test_a_training_that_never_compresses_is_told(recwarn):
    """Rows no longer than the window tune nothing; one longer row among them is enough."""
    model = model_of("qwen3").train()
    with switched(model):
        for step in range(7):
            model(tokens(1, N - step))
        assert not recwarn
        for _ in range(9):
            model(tokens(1, N))
    (warning,) = recwarn
    assert "longest row so far has 64 tokens and the window 64" in str(warning.message)
    assert "sequences of more than 64 tokens, at best 160" in str(warning.message)


@pytest.mark.parametrize("train", [True, False])
def test_a_training_that_compresses_is_left_in_peace(train, recwarn):
    """Nor is a model that is only read with."""
    model = model_of("qwen3").train(train)
    with switched(model):
        for step in range(12):
            model(tokens(1, N + 1 if train and step == 5 else 20))
    assert not recwarn

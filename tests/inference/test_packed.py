"""Packed weights: the same numbers to rounding, one copy, and nothing that could be changed without being noticed."""

import threading
import weakref

import pytest
import torch
from torch import nn

from fathom.checkpoints.open import open_checkpoint
from fathom.inference import packed, packed_or_plain, server
from fathom.inference.packed import MOST, PackedLinear, cut, pack, padded
from fathom.lens.look import look
from tests.inference.served import in_thread
from tests.models.cases import build, config_of, tokens
from tests.models.test_engines import batched
from tests.tiny import export_tiny

CASES = [
    "vanilla",
    "depth_attention",
    "hyper_connections",
    "loop-middle",
    "ponder",
    "ponder3",
    "adaponder",
    "latent_cot",
]
WIDE = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 2000}

pytestmark = pytest.mark.skipif(not packed.available(), reason="torch was built without oneDNN")


def linear(rows_in=96, rows_out=160, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(rows_in, rows_out, bias)


def apart(layer, reference, given):
    """The largest difference, relative to the largest number."""
    with torch.inference_mode():
        out, right = layer(given), reference(given)
    assert out.shape == right.shape and out.dtype == right.dtype
    return float((out - right).abs().max() / right.abs().max()) if right.numel() else 0.0


# Numbers.


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 63, 64, 65, 200, MOST, MOST + 1, 1300])
def test_products_are_those_of_the_layer(rows, bias):
    layer = linear(bias=bias)
    assert apart(PackedLinear(layer), layer, torch.randn(rows, 96)) < 1e-6


@pytest.mark.parametrize("shape", [(96,), (1, 1, 96), (2, 5, 96), (0, 96), (3, 0, 96)])
def test_any_shape(shape):
    layer = linear()
    assert apart(PackedLinear(layer), layer, torch.randn(shape)) < 1e-6
    assert apart(PackedLinear(layer), layer, torch.randn(*shape[:-1], 192)[..., ::2]) < 1e-6


@pytest.mark.quick("hyper_connections")
@pytest.mark.parametrize("case", CASES)
def test_models_compute_the_same(case, monkeypatch):
    """Every linear layer of a mechanism too, however small."""
    monkeypatch.setattr(packed, "LEAST", 1)
    model, same = (build(config_of(case, **WIDE)) for _ in range(2))
    assert pack(same) == sum(isinstance(module, nn.Linear) for module in model.modules()) > 14
    ids = tokens(3, 20)
    with torch.inference_mode():
        right, made = model(ids).logits, same(ids).logits
        assert (made - right).abs().max() / right.abs().max() < 1e-4
        right = torch.cat([same(row).logits for row in ids.split(1)])
        assert (made - right).abs().max() / right.abs().max() < 1e-4
    prompt = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        assert torch.equal(same.generate(ids, **prompt), model.generate(ids, **prompt))


def test_generate_batch_runs_on_packed_weights():
    model, same = (build(config_of("loop", **WIDE)) for _ in range(2))
    assert pack(same) and batched(same) == batched(model)


@torch.inference_mode()
def test_the_lens_counts_packed_weights(tmp_path):
    directory = export_tiny(tmp_path / "tiny", hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    model, tokenizer = open_checkpoint(directory, "cpu")
    whole = model.num_parameters()
    assert pack(model) and look(model, tokenizer, "The sailors").parameters == whole > model.num_parameters()


# What is kept.


def test_one_weight_at_a_time_exists_twice(monkeypatch):
    model, alive = nn.ModuleList([linear(bias=False) for _ in range(6)]), []
    weights = [weakref.ref(layer.weight) for layer in model]

    class Counting(PackedLinear):
        def __init__(self, layer):
            super().__init__(layer)
            alive.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(packed, "PackedLinear", Counting)
    assert pack(model) == 6 and alive == [6, 5, 4, 3, 2, 1]
    assert not any(weight() is not None for weight in weights)


def test_another_bias_is_added():
    layer, given = PackedLinear(linear()), torch.randn(9, 96)
    with torch.inference_mode():
        before = layer(given)
        layer.bias = nn.Parameter(layer.bias + 1)
        torch.testing.assert_close(layer(given), before + 1)


def test_few_programs_are_made():
    """oneDNN keeps one for each number of rows that it was given."""
    sizes = {padded(part) for rows in range(1, 3000) for part in cut(rows)}
    assert len(sizes) < 20 and all(sum(cut(rows)) == rows for rows in range(1, 3000))
    assert all(sum(map(padded, cut(rows))) < rows + packed.GRAIN for rows in range(1, 3000))


# What is left alone.


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer, self.lora_a = linear(), linear(96, 64)


class Scaled(nn.Linear):
    pass


def hooked(name):
    layer = linear()
    getattr(layer, name)(lambda *_: None)
    return layer


def overridden():
    layer = linear()
    layer.forward = lambda given: given
    return layer


class Quantized(torch.Tensor):
    """As that of a package for quantization: stored in another type, and called float32."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, stored):
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32, device="cpu")

    def __init__(self, stored):
        self.stored = stored

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].stored)
        raise NotImplementedError(f"{function} of a quantized weight")


def quantized():
    layer = linear()
    layer.weight = nn.Parameter(Quantized(layer.weight.detach().to(torch.int8)), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        Adapted,
        quantized,
        overridden,
        lambda: Scaled(96, 160),
        lambda: hooked("register_forward_hook"),
        lambda: hooked("register_forward_pre_hook"),
        lambda: linear().double(),
        lambda: linear().bfloat16(),
        lambda: linear(96, 8),
        lambda: linear().to("meta"),
        lambda: nn.utils.parametrizations.weight_norm(linear()),
    ],
)
def test_what_is_no_plain_layer(make):
    model = nn.ModuleList([make(), linear()])
    kinds = [type(module) for module in model[0].modules()]
    assert pack(model) == 1 and isinstance(model[1], PackedLinear)
    assert [type(module) for module in model[0].modules()] == kinds


def test_a_shared_layer_stays_shared():
    one = linear()
    model = nn.ModuleDict({"a": one, "b": nn.Sequential(one), "c": one})
    assert pack(model) == 1 and isinstance(model["a"], PackedLinear)
    assert model["a"] is model["b"][0] is model["c"]


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack(nn.Sequential(linear())) == 0


# Serving.


def test_served_texts_are_the_same(tmp_path, monkeypatch):
    """The engine's thread packs: workers of another thread's would count beside its own."""
    directory = export_tiny(tmp_path / "tiny", hidden_size=64, intermediate_size=128)
    threads, prompts = [], ["To fathom", "The sailors let", "a", "the depth of a river " * 9]
    monkeypatch.setattr(
        packed_or_plain, "pack", lambda model: threads.append(threading.current_thread().name) or pack(model)
    )
    with in_thread(server.Service(*open_checkpoint(directory, "cpu"), "tiny", 1 << 26)) as asked:
        plain = [one.text for one in asked.complete(prompts).choices]
        assert asked.service.lay_out("packed") == packed_or_plain.Layout("packed")
        assert asked.raw("GET", "/health")[1] == {"status": "ok", "weights": "packed", "ratios": {}}
        assert [one.text for one in asked.complete(prompts).choices] == plain and len(set(plain)) == 4
        assert isinstance(asked.service.model.lm_head, PackedLinear) and threads == ["engine"]

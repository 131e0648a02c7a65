"""Every mechanism on a GPU that is not there: fake tensors on `cuda`, and `meta` where gradients flow.

They need torch's CUDA build and no GPU: `make gpu-dry`. Fake tensors know devices, shapes and types and no numbers, so
a tensor left on the CPU and a read by the host end in an error. Autograd asks the device itself for a stream; so
backward runs on `meta`, under a mode that refuses what `meta` lets pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import flex_attention as flex
from transformers.initialization import no_init_weights

from fathom.models import FathomForCausalLM
from fathom.models.decoder import loss
from fathom.models.recurrences import vocabulary_mixture
from fathom.models.trips import flex_reading, slot_table, slots, walk
from fathom.recipe import Optim
from fathom.training.build import clip_gradients
from fathom.training.guard import Guard
from fathom.training.optimizer import Optimizer
from tests.models.cases import CASES, config_of

from .watch import ModelError, OneDevice

pytestmark = [
    *(pytest.mark.dry, pytest.mark.slow),
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]


READ_BY_RULE = ["ponder2", "ponder3", "adaponder", "latent_cot", "latent_cot+depth_attention"]
"""Models whose trips read one another or halt."""


def answered(x: Tensor) -> Any:
    """In place of a fake tensor's numbers: of tokens, every second goes on; of counts, one."""
    if x.ndim == 2:
        return [[(row + column) % 2 == 0 for column in range(x.shape[1])] for row in range(x.shape[0])]
    return [1] * x.shape[0]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake tensors on `cuda`, and answers for the host where it asks on purpose."""
    for module in (walk, slot_table, slots):
        monkeypatch.setattr(module, "to_host", answered)
    with FakeTensorMode():
        yield


def model_on(device: str, case: str, **shape: int) -> FathomForCausalLM:
    """Not initialised, since there are no numbers."""
    with torch.device(device), no_init_weights():
        return FathomForCausalLM(config_of(case, **shape))


def words(device: str, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long, device=device)


@pytest.mark.parametrize("case", CASES)
def test_training_goes_forward(case, pretended):
    model, ids = model_on("cuda", case).train(), words("cuda", 2, 7)
    assert model(ids, labels=ids).loss.device.type == "cuda"
    if model.model.recurrence.halts:
        model.model.recurrence.skip_dead_rows = True
        assert model(ids, labels=ids).loss.device.type == "cuda"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_decoding(case, padded, pretended):
    decode(model_on("cuda", case).eval(), padded)


def decode(model: FathomForCausalLM, padded: bool) -> None:
    """A prompt and two tokens."""
    cache = None
    with torch.no_grad():
        for length, seen in ((5, 5), (1, 6), (1, 7)):
            mask = words("cuda", 2, seen) if padded else None
            out = model(words("cuda", 2, length), attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            assert out.logits.device.type == "cuda" and out.logits.shape[:2] == (2, length)


@pytest.fixture
def by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without its kernels, which need the device."""
    monkeypatch.setattr(flex_reading, "compiled", lambda: flex.flex_attention)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # it knows no `meta`


@pytest.mark.parametrize("case", READ_BY_RULE)
def test_flex_attention_goes_forward_and_decodes(case, pretended, by_rule):
    """Without gradients: it differentiates its function beforehand, which asks the device."""
    model, ids = model_on("cuda", case), words("cuda", 2, 7)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        for skip in (False, True) if model.model.recurrence.halts else (False,):
            model.model.recurrence.skip_dead_rows = skip
            assert model.train()(ids, labels=ids).loss.device.type == "cuda"
    for padded in (False, True):
        decode(model.eval(), padded)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizer_and_its_guard(name, pretended):
    model = model_on("cuda", "vanilla")
    optimizer, guard = Optimizer(model, Optim(name=name)), Guard(10.0, torch.device("cuda"))
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    norm = clip_gradients(model.parameters(), 1.0)
    optimizer.step(1e-3, guard.refuse(norm, norm))


@pytest.fixture
def as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `meta` alone lacks: on it a head is taken for one whose weights are offloaded, and there is no autocast."""

    def is_bare(head: Any) -> bool:
        return type(head) is torch.nn.Linear

    for module in (loss, vocabulary_mixture):
        monkeypatch.setattr(module, "is_bare", is_bare)
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)


def step(model: Any) -> None:
    """Forward and backward."""
    ids = words("meta", 2, 7)
    model(ids, labels=ids, num_items_in_batch=12).loss.backward()


@pytest.mark.parametrize("case", CASES)
def test_a_training_step_on_one_device_without_a_read(case, as_elsewhere):
    model = model_on("meta", case).train()
    with OneDevice():
        step(model)
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("case", READ_BY_RULE)
def test_a_step_of_flex_attention(case, as_elsewhere, by_rule, monkeypatch):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # what it compiles inside sees no mode
    model = model_on("meta", case).train()
    model.set_attn_implementation("flex_attention")
    with OneDevice():
        step(model)
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("case", READ_BY_RULE)
def test_a_compiled_step_of_flex_attention(case, as_elsewhere, by_rule):
    compiled_step(case, "flex_attention")


def test_a_rule_on_the_host_is_seen(as_elsewhere, by_rule, monkeypatch):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    made = walk.read_rule

    def on_the_host(view: Any, query: Any, key: Any, reach: Any) -> Any:
        bias = torch.zeros(1, key.token.shape[1], device="cpu")
        return replace(made(view, query, key, reach), bias=bias)

    monkeypatch.setattr(walk, "read_rule", on_the_host)
    model = model_on("meta", "latent_cot").train()
    model.set_attn_implementation("flex_attention")
    with OneDevice(), pytest.raises(ModelError, match="tensors on cpu and meta"):
        step(model)


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step(case, as_elsewhere):
    """One graph forward and one backward; the kernels that Inductor would write need the device."""
    compiled_step(case, "sdpa")


def compiled_step(case: str, backend: str) -> None:
    torch._dynamo.reset()
    layers = (
        {"num_hidden_layers": 2} if config_of(case).recurrence not in ("once", "loop") else {}
    )  # it holds each pass
    model = model_on("meta", case, **layers).train()
    model.set_attn_implementation(backend)
    step(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


def test_what_the_host_decides_is_no_single_graph(as_elsewhere):
    torch._dynamo.reset()
    model = with_planted(model_on("meta", "vanilla").train(), lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(Unsupported, match=r"[Dd]ata-dependent"):
        step(torch.compile(model, backend="aot_eager", fullgraph=True))


def with_planted(model: FathomForCausalLM, fault: Any) -> FathomForCausalLM:
    model.model.norm.register_forward_hook(lambda module, arguments, out: fault(out))
    return model


def linear_on_the_host(x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, torch.ones(x.shape[-1], x.shape[-1], device="cpu"))


def read(x: Tensor) -> Tensor:
    return x * x.detach().sum().item()


@pytest.mark.parametrize(
    ("fault", "words"), [(linear_on_the_host, "tensors on cpu and meta"), (read, "read by the host")]
)
def test_planted_faults_are_seen_on_meta(fault, words, as_elsewhere):
    with OneDevice(), pytest.raises(ModelError, match=words):
        step(with_planted(model_on("meta", "vanilla").train(), fault))


def test_meta_alone_lets_a_tensor_of_the_host_pass(as_elsewhere):
    step(with_planted(model_on("meta", "vanilla").train(), linear_on_the_host))


@pytest.mark.parametrize("fault", [linear_on_the_host, read])
def test_planted_faults_are_seen_by_fake_tensors(fault, pretended):
    ids = words("cuda", 2, 7)
    with torch.no_grad(), pytest.raises((RuntimeError, DataDependentOutputException)):
        with_planted(model_on("cuda", "vanilla"), fault)(ids)

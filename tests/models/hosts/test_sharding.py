"""A family's layers sharded over two ranks, and built on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from fathom import FathomForCausalLM
from fathom.checkpoints.families import hosted
from fathom.models import FathomConfig
from tests.models.ranks import on_two_ranks

from .cases import configured, ours_of, theirs_of, tokens

LOOP: dict[str, Any] = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**LOOP, "residual": "hyper_connections"},
    "qwen3_5_text": {**LOOP, "residual": "attention_residuals"},
    "deepseek_v3": {**LOOP, "mixer": "depth_attention", "mixer_options": {"stride": 1}},
}


def whole(name: str) -> FathomForCausalLM:
    """A model in training, in double precision; its experts run one by one."""
    model = ours_of(theirs_of(name), **CASES[name]).double().train()
    model.set_experts_implementation("eager")
    return model  # type: ignore[return-value]


def sharded(rank: int, directory: Path) -> None:
    """Gradients of each rank's half of a batch, gathered."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for name in CASES:
        model, ids = whole(name), tokens(4)[2 * rank : 2 * rank + 2]
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(ids, labels=ids).loss.backward()
        found = {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.grad is not None}
        if rank == 0:
            torch.save(found, directory / f"{name}.pt")


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one(tmp_path):
    on_two_ranks(sharded, tmp_path)
    for name in CASES:
        model, ids = whole(name), tokens(4)
        model(ids, labels=ids).loss.backward()
        own = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        found = torch.load(tmp_path / f"{name}.pt")
        assert own.keys() == found.keys()
        for key, grad in own.items():
            # states and routers are in float32
            assert (found[key] - grad).abs().max() <= 1e-6 * (1 + grad.abs().max()), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_weights_made_after_the_meta_device_are_the_familys(name):
    """As sharded training makes them: empty, then initialised. Buffers, such as angles, are there too."""
    config = configured(name, hidden_size=256)
    values = hosted.configuration(config.to_dict() | {"model_type": name})
    with torch.device("meta"):
        model = FathomForCausalLM(FathomConfig(**values, **LOOP))
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan"))
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    made, family = model.state_dict(), theirs_of_config(config)
    for key, tensor in family.state_dict().items():
        assert made[key].isfinite().all(), key
        if tensor.numel() >= 1024:  # of a few draws nothing can be said
            ours, own = (x.float() for x in (made[key], tensor))
            assert (ours.std() - own.std()).abs() <= 0.15 * own.std() + 1e-6, key
            assert (ours.mean() - own.mean()).abs() <= 0.15 * own.std() + 1e-6, key
    model.load_state_dict(family.state_dict(), strict=False)
    plain = FathomForCausalLM(FathomConfig(**values, **LOOP)).eval()
    plain.load_state_dict(family.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens()).logits, plain(tokens()).logits)


def theirs_of_config(config: Any) -> Any:
    """The family's own model as it initialises itself."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)

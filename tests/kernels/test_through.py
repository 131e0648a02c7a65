"""The operators of ours in a model that torch.compile traces, torch.export writes down, or FSDP2 shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.distributed.fsdp import fully_shard
from torch.fx import GraphModule

pytest.importorskip("triton")

from fathom.kernels import use
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.replaceable import replace
from tests.gpu.watch import Calls
from tests.models.cases import SHAPE
from tests.models.ranks import on_two_ranks

from .held import DEVICE

AXES = {
    **{"mixer": "depth_attention", "mixer_options": {"stride": 1, "self_bias": 0.5}},
    **{"residual": "attention_residuals", "residual_options": {"block_size": 3, "variant": "snapshot"}},
}
OURS = ("depth_mix", "depth_pool"), ("norm_rotate_mix", "depth_pool")


@pytest.fixture(autouse=True)
def empty_table():
    yield
    replace({}, DEVICE)


def model_of() -> FathomForCausalLM:
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**SHAPE | {"num_hidden_layers": 2}, **AXES)).train()
    for name, parameter in model.named_parameters():
        if "pseudo_query" in name:
            nn.init.normal_(parameter)
    return model


def words(rows: int = 1) -> Tensor:
    return torch.randint(3, SHAPE["vocab_size"], (rows, 5), generator=torch.Generator().manual_seed(3))


def gradients(model: Any, ids: Tensor) -> list[Tensor]:
    model(ids, labels=ids).loss.backward()
    return [p.grad for p in model.parameters()]


def called(graph: GraphModule) -> set[str]:
    """Our operators in a graph."""
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    return {name.split(".")[1] for name in names if name.startswith("fathom")}


@pytest.mark.parametrize("names", OURS)
def test_compiled_in_one_graph(names):
    """Traced by their fake kernels, forward and backward."""
    ids = words().to(DEVICE)
    wanted = gradients(model_of().to(DEVICE), ids)
    use(names, DEVICE)
    torch._dynamo.reset()
    record = AotEagerAndRecordGraphs()
    model = model_of().to(DEVICE)
    torch.compile(model, backend=record, fullgraph=True)(ids, labels=ids).loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, atol=2e-6, rtol=2e-4)
    (forward,), (backward,) = record.fw_graphs, record.bw_graphs
    assert called(forward) == set(names)
    assert called(backward) == {f"{name}_backward" for name in names}


class Logits(nn.Module):
    """A model's logits alone, which is what one exports."""

    def __init__(self, model: FathomForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


@pytest.mark.parametrize("names", OURS)
def test_exported(names):
    ids = words(2).to(DEVICE)
    model = Logits(model_of().eval().to(DEVICE))
    with torch.no_grad():
        wanted = model(ids)
        use(names, DEVICE)
        program = torch.export.export(model, (ids,))
    assert called(program.graph_module) == set(names)
    replace({}, DEVICE)
    torch.testing.assert_close(program.module()(ids), wanted, atol=2e-6, rtol=2e-4)


def sharded_gradients(rank: int, directory: Path, names: tuple[str, ...]) -> None:
    """FSDP2 gradients on half a batch each; rank 0 writes them whole."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = model_of()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    use(names, "cpu")
    ids = words(4)[2 * rank : 2 * rank + 2]
    with Calls() as calls:
        found = gradients(model, ids)
    assert {*names, *(f"{name}_backward" for name in names)} <= set(calls.counts)
    whole = [grad.full_tensor() for grad in found]
    if rank == 0:
        torch.save(whole, directory / "gradients.pt")


@pytest.mark.skipif(DEVICE != "cpu", reason="two ranks on the CPU")
@pytest.mark.parametrize("names", OURS)
def test_sharded_over_two_ranks(names, tmp_path):
    wanted = gradients(model_of(), words(4))
    on_two_ranks(sharded_gradients, tmp_path, names)
    torch.testing.assert_close(torch.load(tmp_path / "gradients.pt"), wanted, atol=2e-6, rtol=2e-4)

"""Two gloo ranks on this machine, for the tests that need them."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests import processes

from .cases import build, config_of, tokens


def on_two_ranks(function, *args) -> None:
    """Run `function(rank, *args)` on both ranks of a fresh process group."""
    processes.run_ranks(2, _rank, function, args)


def _rank(function, args) -> None:
    dist.init_process_group("gloo")
    try:
        function(dist.get_rank(), *args)
    finally:
        dist.destroy_process_group()


def sharded_gradients(rank: int, directory: Path, cases: list[str]) -> None:
    """FSDP2 gradients of every case on half a batch each; rank 0 writes them whole."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for case in cases:
        model = build(config_of(case), dtype=torch.float64).train()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ids = tokens(4, 16)[2 * rank : 2 * rank + 2]
        model(ids, labels=ids).loss.backward()
        whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        if rank == 0:
            torch.save(whole, directory / f"{case}.pt")

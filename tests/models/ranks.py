"""Two gloo ranks on this machine, for the tests that need them."""

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from .cases import build, config_of, tokens


def on_two_ranks(function, *args) -> None:
    """Run `function(rank, *args)` on both ranks of a fresh process group."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_rank, args=(port, function, args), nprocs=2)


def _rank(rank: int, port: int, function, args) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        function(rank, *args)
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

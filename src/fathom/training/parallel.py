"""Ranks and the strategy by which they share a model: single, ddp, fsdp or hsdp.

Everything but a single fp32 process uses FSDP2, with another mesh for each name: under ddp a sharding group has one
rank, under fsdp it has all ranks, and hsdp has several such groups. Precision, clipping and checkpoints therefore have
one code path, and a checkpoint opens under any strategy.

`data/batches.py` divides a step's sequences among ranks and micro-batches; `build.py` divides the loss by the targets
of all ranks. `loop.py` stops all ranks at a signal. Under torchrun, `experiments/compare.py` trains the runs of a
comparison one after another.
"""

from __future__ import annotations

import atexit
import os
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fathom.errors import SettingsError
from fathom.recipe import ParallelRecipe, Recipe

if TYPE_CHECKING:
    from fathom.models import FathomForCausalLM


@dataclass(frozen=True)
class Ranks:
    """This process in its group."""

    name: str = "single"
    """The strategy: single, ddp, fsdp or hsdp."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: dist.ProcessGroup | None = None
    """Gloo group for agreement between hosts, without the accelerator. None in a single process."""

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all ranks get the same answer."""
        if self.control is None:
            return flag
        seen = torch.tensor(int(flag))
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.control)
        return bool(seen.item())

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, on the value's device."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def share(self, value: object) -> Any:
        """Broadcast the first rank's value to every rank."""
        box = [value]
        if self.control is not None:
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.control is not None:
            dist.barrier(group=self.control)


def start(recipe: Recipe) -> Ranks:
    """Join the ranks that torchrun started; without torchrun, a single process.

    The process group is kept until the process ends, because reopening it at the same address is a race.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = device_of(recipe.train.device)
    name = strategy_of(recipe.parallel, world_size)
    if name == "single" and recipe.train.precision == "fp32":
        return Ranks(device=device)
    if not dist.is_initialized():
        _join(device)
    control = host_group("control") if world_size > 1 else None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Ranks(name, dist.get_rank(), local_rank, world_size, device, control)


@cache
def host_group(purpose: str) -> dist.ProcessGroup:
    """A gloo group of all ranks for one purpose, because two threads must not share the collectives of a group."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=2))


def parallelize(model: nn.Module, ranks: Ranks, recipe: Recipe) -> None:
    """Prepare a model in place, in the required order: checkpoint activations, compile layers, shard."""
    layers: nn.ModuleList = cast("FathomForCausalLM", model).model.layers
    if recipe.train.activation_checkpointing:
        cast("FathomForCausalLM", model).activation_checkpointing_enable({"use_reentrant": False})
    if recipe.train.compile:
        # Layers share one code object but differ in how many sources they read: each may need a graph of its own.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(layers) + 8)
        for layer in layers:
            layer.compile()
    if ranks.name == "single" and recipe.train.precision == "fp32":
        return
    lowered = torch.bfloat16 if recipe.train.precision == "bf16" else None
    settings: dict[str, Any] = {
        "mesh": _mesh(recipe.parallel, ranks),
        # Inputs are not cast: fp32 state that a mechanism passes between layers stays fp32.
        "mp_policy": MixedPrecisionPolicy(lowered, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "reshard_after_forward": recipe.parallel.reshard_after_forward and ranks.name in ("fsdp", "hsdp"),
    }
    # A layer returns its key and value, which are views and never modified in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def synchronize_gradients(model: nn.Module, last: bool) -> None:
    """Set up the next micro-batch so that replicas sum their gradients only once, after the step's last micro-batch.

    Sharded gradients are still reduced after each one, because a rank has no memory for full gradients.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)


def release_gathered(model: nn.Module) -> None:
    """Return to sharded master weights: a forward pass without a backward pass leaves the gathered bf16 copies in
    place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def strategy_of(parallel: ParallelRecipe, world_size: int) -> str:
    """The parallel strategy that `parallel.name` selects for `world_size` ranks."""
    name = parallel.name
    if name == "auto":
        return "fsdp" if world_size > 1 else "single"
    if name == "single" and world_size > 1:
        raise SettingsError(f"parallel.name=single: allowed with {world_size} ranks: auto, ddp, fsdp, hsdp")
    return name


def device_of(name: str) -> torch.device:
    """The device that a recipe's `train.device` means for this process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise SettingsError("train.device=cuda: no CUDA device here; allowed: auto, cpu")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _join(device: torch.device) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


def _mesh(parallel: ParallelRecipe, ranks: Ranks) -> DeviceMesh:
    kind, world = ranks.device.type, ranks.world_size
    if ranks.name in ("single", "fsdp"):
        return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    shard = 1 if ranks.name == "ddp" else parallel.shard_size or machine
    if world % shard:
        raise SettingsError(f"parallel.shard_size={shard}: allowed: a divisor of {world} ranks")
    return init_device_mesh(kind, (world // shard, shard), mesh_dim_names=("replicate", "shard"))

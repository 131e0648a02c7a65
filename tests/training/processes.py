"""Fresh processes for what must not happen in this one: several ranks, and sudden death."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# A server that has imported torch once and forks cheaply, and that never ran autograd, which does not survive a fork.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fathom.training", "fathom.models.modeling", "tests.training.conftest"])


def start(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Start `function(*arguments)` in a process."""
    process = _context.Process(target=_enter, args=(dict(environment or {}), function, arguments), daemon=True)
    process.start()
    return process


def run(function: Callable[..., Any], *arguments: Any) -> int:
    """The exit code of `function(*arguments)` in a process; negative for a signal."""
    process = start(function, *arguments)
    process.join(120)
    assert process.exitcode is not None, "the process hangs"
    return int(process.exitcode)


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Run `function(*arguments)` on every rank, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
    common["LOCAL_WORLD_SIZE"] = str(world_size)
    ranks = [
        start(function, *arguments, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.join(120)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * world_size, codes


def _enter(environment: Mapping[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function(*arguments)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def losses(run_dir: Path) -> list[float]:
    """The loss of every step, first to last."""
    from fathom.training import read_metrics

    lines = [line for line in read_metrics(run_dir) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def weights(run_dir: Path, step: int) -> dict[str, Any]:
    """Every tensor of a checkpoint that one process wrote."""
    from safetensors.torch import load_file

    (path,) = (run_dir / f"step-{step:06d}").glob("*.safetensors")
    return dict(load_file(path))

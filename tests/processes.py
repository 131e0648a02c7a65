"""Fresh processes for what must not happen in this one: several ranks, signals and sudden death."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# A server that has imported torch once and forks cheaply, and that never ran autograd, which does not survive a fork.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fathom.training", "fathom.models.modeling", "tests.training.conftest"])


def start(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    daemon: bool = True,
) -> Any:
    """Start `function(*arguments)` in a process; one that is no daemon may start others."""
    process = _context.Process(target=_enter, args=(dict(environment or {}), function, arguments), daemon=daemon)
    process.start()
    return process


class Command:
    """`fathom WORDS`, begun in a folder; what it writes goes to files in another."""

    def __init__(self, words: list[str], folder: Path, written: Path) -> None:
        self._written = written
        self._process = start(_command, words, folder, written)

    @property
    def pid(self) -> int:
        """The process."""
        return int(self._process.pid)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return bool(self._process.is_alive())

    @property
    def out(self) -> str:
        """Standard output so far."""
        path = self._written / "stdout"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def err(self) -> str:
        """Standard error so far."""
        return (self._written / "stderr").read_text(encoding="utf-8")

    def first_line(self) -> str:
        """The first line of standard output, as soon as it is there; what there is if the command ends before."""
        while "\n" not in self.out and self.running:
            time.sleep(0.02)
        return self.out.partition("\n")[0]

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> int:
        """The exit code; negative for a signal."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, "the command hangs"
        return int(self._process.exitcode)

    def kill(self) -> None:
        """End it at once, if it runs."""
        self._process.kill()
        self._process.join()


def _command(words: list[str], folder: Path, written: Path) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(written / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    os.environ.pop("FATHOM_API_KEY", None)
    from fathom.cli.main import main

    sys.argv = ["fathom", *words]
    sys.exit(main(words))


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

"""The default of `--cache-memory`: the bytes that the keys and values of all sequences may take.

Whether a prompt waits for room is decided in `engine.py`. `launch.py` decides the default of `--prefix-memory`, a
quarter of `--cache-memory`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FREE = 1 << 32
"""Bytes, where a system does not say."""


def default_memory(model: PreTrainedModel) -> int:
    """The default budget in bytes: 80 % of a GPU's free memory, or a quarter of a CPU machine's free memory."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0] * 0.8)
    return free_memory() // 4


def free_memory() -> int:
    """Bytes of free memory on this machine, or in the container if that is less."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):  # not Linux
        return FREE
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        return max(0, min(free, limit - used))
    except (OSError, ValueError):  # no container, or one without a limit
        return free

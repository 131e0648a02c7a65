"""Speed, memory and losses of a run, read from the device only when shown.

MFU is computed here, against `track.peak_flops` or the device's dense bf16 peak. `models/cost.py` counts the FLOPs of a
step that trains every weight, with the head but not the embedding; `trained_flops.py` counts what frozen weights,
adapters and a teacher change.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fathom.training.build import Training
from fathom.training.results import StepMetrics
from fathom.training.trained_flops import step_flops


@dataclass
class Meter:
    """Collects the metrics of steps on the device and reads them together, with speed, memory and remaining time."""

    training: Training
    seconds: float
    """Seconds in steps over the life of the run."""
    refused_in_a_row: int = 0
    _steps: list[StepMetrics] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        recipe = self.training.recipe
        self.refused_in_a_row = int(self.training.guard.refused_in_a_row.item())
        self._flops = step_flops(recipe)
        self._peak = recipe.track.peak_flops or peak_flops(self.training.ranks.device)

    def start(self) -> None:
        """Begin to count the time: what came before was no step."""
        self._since = time.perf_counter()

    @property
    def unread(self) -> bool:
        """Whether there are steps whose metrics were not read yet."""
        return bool(self._steps)

    def add(self, metrics: StepMetrics) -> None:
        """Add the metrics of a step without reading them from the device."""
        self._steps.append(metrics)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of this block from the time of the steps."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def read(self) -> list[dict[str, float]]:
        """The metrics of each step since the last call; those of the last step include the speed. This waits for the
        device."""
        if not self._steps:
            return []
        steps, self._steps = self._steps, []
        # Steps that drew fewer iterations lack a term of the loss.
        names, absent = list(dict.fromkeys(name for m in steps for name in m.extra)), torch.zeros_like(steps[-1].loss)
        columns = [[m.loss, m.grad_norm, m.skipped, *(m.extra.get(name, absent) for name in names)] for m in steps]
        table = torch.stack([torch.stack([value.float() for value in column]) for column in columns]).tolist()
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        self.seconds += elapsed
        lines = []
        for metrics, (loss, norm, skipped, *extra) in zip(steps, table, strict=True):
            self.refused_in_a_row = self.refused_in_a_row + 1 if skipped else 0
            line = {"step": metrics.step + 1, "tokens": (metrics.step + 1) * metrics.tokens, "loss": loss}
            line |= {
                "grad_norm": norm,
                "lr": metrics.lr,
                "skipped": int(skipped),
                **{name: value for name, value in zip(names, extra, strict=True) if name in metrics.extra},
            }
            lines.append(line)
        lines[-1] |= self._speed(len(steps), elapsed, steps[-1])
        return lines

    def _speed(self, steps: int, elapsed: float, last: StepMetrics) -> dict[str, float]:
        ranks = self.training.ranks
        rate = steps * last.tokens / elapsed
        speed = {"seconds": self.seconds, "tokens_per_second": rate, "memory_bytes": float(memory_bytes(ranks.device))}
        if self._peak:
            speed["mfu"] = rate * self._flops / (self._peak * ranks.world_size)
        return {**speed, "eta_seconds": (self.training.recipe.train.steps - last.step - 1) * elapsed / steps}


PEAKS = (
    *(("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H200 NVL", 835e12), ("H100", 989e12), ("H200", 989e12)),
    *(("GH200", 989e12), ("B200", 2250e12), ("A100", 312e12), ("L40S", 362e12), ("L4", 121e12), ("A10", 125e12)),
    *(("RTX 4090", 165e12), ("RTX 3090", 71e12), ("RTX 5090", 209e12), ("MI300X", 1307e12), ("MI325X", 1307e12)),
)
"""Dense bf16 FLOP/s by part of a device's name, with sums in fp32; the first that fits."""


def peak_flops(device: torch.device) -> float | None:
    """The peak dense bf16 FLOP/s of common accelerators, from their data sheets; None for other devices."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAKS if re.search(rf"\b{key}\b", name)), None)


def memory_bytes(device: torch.device) -> int:
    """Peak memory: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""What autograd keeps for a training step's backward pass, in bytes, for every mechanism beside vanilla.

    python benchmarks/saved.py                                  # every mechanism, one small shape, float32 and bfloat16
    python benchmarks/saved.py --only ponder3 --length 2048     # one, at the papers' length
    python benchmarks/saved.py --only ponder3 --dtype bfloat16 --length 2048 --recompute --peak   # a whole step

Counted by `saved_tensors_hooks`: every storage that is not a parameter, once, however many views of it are kept. The
unit is one vanilla forward pass over the same tokens. `passes` is how many of those the mechanism makes in training, so
that `per pass` says what is kept beyond the arithmetic.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.cost import training_visits
from fathom.models.registry import DEFAULTS, MECHANISMS, parse_mechanism
from fathom.report.provenance import provenance

SOLVER = {"jacobi_train": [5, 5]}
MMAP_THRESHOLD = -3
"""What `mallopt` calls the size from which a block is a mapping of its own."""
ARMS: dict[str, tuple[str, dict[str, dict[str, object]]]] = {
    "vanilla": ("vanilla", {}),
    "depth_attention": ("depth_attention", {}),
    "depth_attention, every layer": ("depth_attention", {"mixer": {"stride": 1}}),
    "uniform_depth": ("uniform_depth", {}),
    "value_residual": ("value_residual", {}),
    "denseformer": ("denseformer", {}),
    "attention_residuals": ("attention_residuals", {}),
    "attention_residuals, blocks of 4": ("attention_residuals", {"residual": {"block_size": 4}}),
    "attention_residuals, snapshot": ("attention_residuals", {"residual": {"variant": "snapshot"}}),
    "attention_residuals, delta": ("attention_residuals", {"residual": {"variant": "delta"}}),
    "mudd": ("mudd", {}),
    "hyper_connections": ("hyper_connections", {}),
    "hyper_connections, no Sinkhorn": ("hyper_connections", {"residual": {"sinkhorn_iterations": 0}}),
    "loop": ("loop", {}),
    "ponder": ("ponder", {}),
    "adaponder": ("adaponder", {}),
    "latent_cot": ("latent_cot", {}),
    "ponder2": ("ponder2", {"recurrence": {"jacobi_train": [3, 3]}}),
    "ponder3": ("ponder3", {"recurrence": SOLVER}),
}
ARMS |= {name: (name, {}) for name in MECHANISMS if name not in ARMS and name not in DEFAULTS.values()}


@dataclass
class Kept:
    """What one forward pass of training keeps."""

    arm: str
    dtype: str
    length: int
    passes: float
    """Vanilla forward passes over the same tokens."""
    bytes: int
    times: float
    """Vanilla's bytes."""
    per_pass: float


def config_of(arm: str, layers: int = 8, width: int = 256, **recurrence: object) -> FathomConfig:
    """The arm at one shape: heads of 64, one key-value head for two."""
    name, options = ARMS[arm]
    options = {f"{axis}_options": dict(values) for axis, values in options.items()}
    if recurrence:
        options["recurrence_options"] = {**options.get("recurrence_options", {}), **recurrence}
    heads = width // 64
    shape = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 3 * width, "head_dim": 64}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2), "vocab_size": 1024}
    return FathomConfig(**shape, **parse_mechanism(name), **options)


class _Held:
    """A tensor that autograd keeps, and that goes with its graph: gates of a pass whose output nothing reads."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(model: FathomForCausalLM, ids: Tensor) -> int:
    """Bytes that a training forward pass of the decoder keeps, without parameters and without the loss."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[weakref.ref[_Held]] = []

    def pack(x: Tensor) -> _Held:
        held = _Held(x)
        kept.append(weakref.ref(held))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        out = model.model(input_ids=ids, use_cache=False, head=model.lm_head)
    assert out.last_hidden_state.requires_grad
    gc.collect()
    alive = [held.tensor.untyped_storage() for ref in kept if (held := ref()) is not None]
    return sum({x.data_ptr(): x.nbytes() for x in alive if x.data_ptr() not in own}.values())


def measure(arm: str, dtype: torch.dtype, length: int, batch: int = 1, **recurrence: object) -> Kept:
    """One arm beside vanilla."""
    config = config_of(arm, **recurrence)
    passes = training_visits(config)[0] / config.num_hidden_layers
    found = _kept_by(config, dtype, length, batch)
    times = found / _kept_by_vanilla(dtype, length, batch)
    return Kept(arm, str(dtype).removeprefix("torch."), length, passes, found, times, times / passes)


def _kept_by(config: FathomConfig, dtype: torch.dtype, length: int, batch: int) -> int:
    torch.manual_seed(0)
    ids = torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(0))
    return saved_bytes(FathomForCausalLM(config).to(dtype).train(), ids)


@cache
def _kept_by_vanilla(dtype: torch.dtype, length: int, batch: int) -> int:
    return _kept_by(config_of("vanilla"), dtype, length, batch)


def return_what_is_freed() -> None:
    """Have glibc return each large block as it is freed. By itself it begins to keep them, and a process then holds
    more than twice what it ever had in use."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, 1 << 18)


def peak_bytes(arm: str, dtype: torch.dtype, length: int, **recurrence: object) -> tuple[int, int]:
    """Peak of a training step above the process that holds the model, and the bytes of its weights. Only the first such
    step of a process says anything: what the first one alone loads is in it."""
    return_what_is_freed()
    torch.manual_seed(0)
    model = FathomForCausalLM(config_of(arm, **recurrence)).to(dtype).train()
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    saved_bytes(model, ids[:, :32])  # what the first call alone loads
    before = status("VmRSS")
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return status("VmHWM") - before, sum(p.nbytes for p in model.parameters())


def status(name: str) -> int:
    """A number of bytes from /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def table(rows: Sequence[Kept]) -> str:
    """As the log and the page show it."""
    lines = [
        "| arm | dtype | T | passes | MB | × vanilla | per pass |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        numbers = f"{row.passes:g} | {row.bytes / 1e6:.1f} | {row.times:.2f} | {row.per_pass:.3f}"
        lines.append(f"| {row.arm} | {row.dtype} | {row.length} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--recompute", action="store_true", help="make every pass again in backward")
    parser.add_argument("--peak", action="store_true", help="a whole step of one arm, and its peak")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, help="also write a JSON log")
    options = parser.parse_args()
    more = {"recompute": True} if options.recompute else {}
    found: dict[str, object] = {}
    if options.peak:
        (arm,), (name,) = options.only, options.dtype
        peak, weights = peak_bytes(arm, getattr(torch, name), options.length, **more)
        print(f"{arm} {name} T={options.length} {more}: {peak / 1e9:.2f} GB above weights of {weights / 1e9:.2f} GB")
        found = {"arm": arm, "dtype": name, "length": options.length, **more, "peak": peak, "weights": weights}
    else:
        rows = []
        for arm in options.only:
            for name in options.dtype:
                rows.append(measure(arm, getattr(torch, name), options.length, **more))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
        print("\n" + table(rows))
        found = {"rows": [asdict(row) for row in rows]}
    if options.out is not None:
        options.out.write_text(json.dumps({**vars(provenance()), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

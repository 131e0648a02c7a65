"""What autograd keeps for a training step's backward pass, in bytes, for every mechanism beside vanilla.

    python benchmarks/saved.py                                  # every mechanism, one small shape, float32 and bfloat16
    python benchmarks/saved.py --only ponder3 --length 2048     # one, at the papers' length

Counted by `saved_tensors_hooks`: every storage that is not a parameter, once, however many views of it are kept. The
unit is one vanilla forward pass over the same tokens. `passes` is how many of those the mechanism makes in training, so
that `per pass` says what is kept beyond the arithmetic.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.cost import training_visits
from fathom.models.registry import parse_mechanism
from fathom.report.provenance import provenance

SOLVER = {"jacobi_train": [5, 5]}
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
    "hyper_connections": ("hyper_connections", {}),
    "hyper_connections, no Sinkhorn": ("hyper_connections", {"residual": {"sinkhorn_iterations": 0}}),
    "loop": ("loop", {}),
    "ponder": ("ponder", {}),
    "adaponder": ("adaponder", {}),
    "latent_cot": ("latent_cot", {}),
    "ponder2": ("ponder2", {"recurrence": {"jacobi_train": [3, 3]}}),
    "ponder3": ("ponder3", {"recurrence": SOLVER}),
}


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


def saved_bytes(model: FathomForCausalLM, ids: Tensor) -> int:
    """Bytes that a training forward pass of the decoder keeps, without parameters and without the loss."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)  # held, so that no other storage takes its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.model(input_ids=ids, use_cache=False, head=model.lm_head)
    assert out.last_hidden_state.requires_grad
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in own)


def measure(arm: str, dtype: torch.dtype, length: int, batch: int = 1, **recurrence: object) -> Kept:
    """One arm beside vanilla."""
    ids = torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(0))
    found = {}
    for name in ("vanilla", arm):
        torch.manual_seed(0)
        config = config_of(name, **(recurrence if name == arm else {}))
        found[name] = saved_bytes(FathomForCausalLM(config).to(dtype).train(), ids)
    passes = training_visits(config)[0] / config.num_hidden_layers
    times = found[arm] / found["vanilla"]
    return Kept(arm, str(dtype).removeprefix("torch."), length, passes, found[arm], times, times / passes)


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
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, help="also write a JSON log")
    options = parser.parse_args()
    rows = []
    for arm in options.only:
        for dtype in options.dtype:
            rows.append(measure(arm, getattr(torch, dtype), options.length))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(rows))
    if options.out is not None:
        options.out.write_text(json.dumps({**provenance(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

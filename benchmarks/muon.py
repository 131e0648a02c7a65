"""A step of our Muon against one of torch's, over the matrices of a model's layers.

    python benchmarks/muon.py                                      # two CPU shapes, one thread
    python benchmarks/muon.py --shape 410m --device cuda

Both take the same gradients, A B B A in one process: the median of the ratios ours by torch's and their quartiles, and
the milliseconds of a step. `direction` is the largest angle between the first updates of a matrix, in degrees: torch's
are made in bfloat16 on every device, ours on a GPU alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

from fathom.evaluation.clock import Clock
from fathom.report.provenance import provenance
from fathom.training.muon import Muon

# layers, hidden, MLP, width of all keys
SHAPES = {
    "demo": (6, 96, 256, 96),
    "tiny": (6, 128, 384, 64),
    "512x8": (8, 512, 1536, 256),
    "410m": (32, 1024, 2816, 256),
}


def matrices(shape: str, device: str) -> list[Tensor]:
    """Those of every layer, with a gradient each."""
    torch.manual_seed(0)
    layers, hidden, mlp, keys = SHAPES[shape]
    square, narrow, wide = (hidden, hidden), (keys, hidden), (mlp, hidden)
    sizes = [square, narrow, narrow, square, wide, wide, (hidden, mlp)]
    found = []
    for size in sizes * layers:
        parameter = nn.Parameter(0.02 * torch.randn(size, device=device))
        parameter.grad = torch.randn(size, device=device)
        found.append(parameter)
    return found


def apart(ours: list[Tensor], theirs: list[Tensor], start: list[Tensor]) -> float:
    """The largest angle between two updates of one matrix, in degrees."""
    cosines = [
        float(nn.functional.cosine_similarity((a - s).flatten(), (b - s).flatten(), dim=0))
        for a, b, s in zip(ours, theirs, start, strict=True)
    ]
    return math.degrees(math.acos(min(1.0, min(cosines))))


def measure(shape: str, options: argparse.Namespace) -> dict[str, object]:
    """One row: both optimizers at a shape."""
    ours, theirs, start = (matrices(shape, options.device) for _ in range(3))
    a = Muon(ours, lr=1e-2, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    a.found_inf = torch.zeros((), device=options.device)
    a.step()
    b.step()
    with torch.no_grad():
        direction = apart(ours, theirs, start)
    clock = Clock(torch.device(options.device))
    ratios, times = [], []
    for _ in range(options.pairs):
        one, two, three, four = (clock.seconds(optimizer.step) for optimizer in (a, b, b, a))
        ratios.append((one + four) / (two + three))
        times.append(((one + four) / 2, (two + three) / 2))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "shape": shape,
        "parameters": sum(p.numel() for p in ours),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "milliseconds": [round(1e3 * statistics.median(side), 2) for side in zip(*times, strict=True)],
        "direction": round(direction, 2),
    }


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["demo", "tiny"])
    parser.add_argument("--pairs", type=int, default=4, help="turns A B B A (default: 4)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--out", type=Path, help="write the log there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(shape, options) for shape in options.shape]
    text = json.dumps({"provenance": vars(provenance()), "threads": options.threads, "rows": rows}, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

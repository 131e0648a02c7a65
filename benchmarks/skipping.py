"""What leaving halted tokens out of a training step gains: `skip_dead_rows` against computing and discarding them.

    python benchmarks/skipping.py > benchmarks/results/skipping.json

Two models of the same weights take turns A B B A on the same tokens; the ratio is the processor time of a step (forward
and backward) with the option over that without it. Which tokens go on is drawn, each with the same chance in each trip,
so that both models halt alike; an untrained gate would not halt.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor

from against import SHAPE
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.roles import TripState
from fathom.models.axes.visit import Out

METHODS, BATCH, LENGTH = ("adaponder", "latent_cot"), 4, 128
SETTINGS = ((2, 0.9), (2, 0.5), (4, 0.9), (4, 0.7), (4, 0.5))
"""Trips at most, and the chance of a token to go on after each."""


def model_of(method: str, trips: int, chance: float, skip: bool) -> FathomForCausalLM:
    """A model whose tokens go on by chance."""
    torch.manual_seed(0)
    options = {"trips": trips, "skip_dead_rows": skip}
    model = FathomForCausalLM(FathomConfig(**SHAPE, recurrence=method, recurrence_options=options)).train()
    gate, lots = (
        model.model.recurrence.gate,
        torch.rand(trips, BATCH, LENGTH, generator=torch.Generator().manual_seed(1)),
    )

    def drawn(out: Out, state: TripState) -> TripState:
        new = gate(out, state)
        if "alive" in new and not out.last:
            lot: Tensor = lots[out.trip] < chance
            # Of tokens that were left out nothing is known here; as many of the others go on.
            new["alive"] = lot if lot.shape == new["alive"].shape else lot[:, : new["alive"].shape[1]]
        return new

    model.model.recurrence.gate = drawn
    return model


def seconds(model: FathomForCausalLM, ids: Tensor) -> float:
    """Of a step."""
    start = time.process_time()
    model(ids, labels=ids).loss.backward()
    model.zero_grad()
    return time.process_time() - start


def main() -> None:
    """Print a line for each method and setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(0, SHAPE["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    for method in METHODS:
        for trips, chance in SETTINGS:
            dense, skipping = (model_of(method, trips, chance, skip) for skip in (False, True))
            ratios: list[float] = []
            for model in (dense, skipping):
                seconds(model, ids)
            for _ in range(given.pairs // 2):
                a, b, c, d = (seconds(model, ids) for model in (skipping, dense, dense, skipping))
                ratios += [a / b, d / c]
            ratios.sort()
            low, median, high = (round(ratios[int(share * (len(ratios) - 1))], 3) for share in (0.25, 0.5, 0.75))
            row = {"method": method, "trips": trips, "goes_on": chance, "ratio": median, "quartiles": [low, high]}
            print(json.dumps({**row, "pairs": len(ratios)}), flush=True)


if __name__ == "__main__":
    main()

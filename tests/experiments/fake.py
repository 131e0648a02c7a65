"""A trainer that trains nothing: it writes the loss that a planted law gives a recipe, so that ladders take seconds."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fathom.checkpoints.file_names import RECIPE, RESULT
from fathom.errors import TrainingError
from fathom.experiments.arms import training_flops
from fathom.recipe import Recipe, parse_recipe
from fathom.report.files import write_atomically
from fathom.training import TrainResult

FIRST = 1e9
BASE_RATE = 1e-2


def ladder_values(**rules: object) -> dict[str, object]:
    """Four rungs of a few thousand parameters on a puzzle, and a rate rule that changes nothing."""
    return {
        "model": {
            **{"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 32},
        },
        "data": {"directory": "puzzle:z60?elements=4", "sequence_length": 5},
        "optim": {"lr": BASE_RATE, "weight_decay": 0.1},
        "train": {"steps": 1, "tokens_per_step": 80, "micro_batch": 8, "device": "cpu", "export": False},
        "evaluate": {"every": 0, "tokens": 640, "position_buckets": 1},
        "track": {"display": "none"},
        "ladder": {
            **{"layers": [2, 2, 3, 4], "hidden": [16, 24, 32, 48], "seeds": [5, 3, 3, 2]},
            **{"lr_exponents": [0, 0, 0], "tune_points": [3, 3], "tune_seeds": [2, 1], "pairs": 0, **rules},
        },
    }


@dataclass
class Planted:
    """What a recipe's final loss is."""

    multipliers: dict[str, float] = field(default_factory=lambda: {"depth_attention": 1.5})
    """By mixer."""
    rates: dict[str, float] = field(default_factory=lambda: {"depth_attention": 1.0})
    """Doublings by which an arm's best rate lies above the control's, by mixer."""
    drift: dict[str, float] = field(default_factory=dict)
    """Further doublings at rungs wider than the second, by mixer."""
    diverges: float = math.inf
    """A rate from which runs diverge."""
    dies: dict[tuple[str, str], float] = field(default_factory=dict)
    """Runs (arm, seed) that diverge, and their accuracy before."""
    noise: float = 0.002
    mortal: random.Random | None = None
    """Dies by SIGKILL before or after every other run or so."""
    done: list[str] = field(default_factory=list)

    def loss(self, recipe: Recipe) -> float:
        """The planted law, a bowl in doublings of the rate, and the seed's noise."""
        mixer = recipe.config().mixer
        x = math.log(training_flops(recipe) * self.multipliers.get(mixer, 1.0) / FIRST)
        best = BASE_RATE * 2 ** self.rates.get(mixer, 0.0)
        if recipe.model["hidden_size"] > 24:
            best *= 2 ** self.drift.get(mixer, 0.0)
        off = math.log2(recipe.optim.lr / best)
        names = (recipe.train.seed, recipe.data_seed, mixer, recipe.train.steps, round(off, 3))
        data, own = (np.random.default_rng(zlib.crc32(repr(part).encode())) for part in (names[1:2], names))
        seed = 0.7 * data.normal() + 0.7 * own.normal()
        return 1.7 + 2.6 * math.exp(-0.15 * x) + 0.02 * off**2 + self.noise * float(seed)

    def train(self, recipe: Recipe, run_dir: Path, callbacks: Sequence[object] = (), **_: object) -> TrainResult:
        """As `fathom.training.train` from afar."""
        self.chance_to_die()
        share = self.dies.get((run_dir.parts[-2], run_dir.name))
        if recipe.optim.lr >= self.diverges or share is not None:
            before = {f"val/z60-{level}/accuracy": share or 0.0 for level in (2, 4)}
            rows = [{"step": 1, **before}, {"step": 3, "skipped": 1}]
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            raise TrainingError("stopped at step 3: diverged", 3)
        loss = self.loss(recipe)
        names = [f"z60-{level}" for level in (2, 4)]
        score = {"loss": loss, "bits_per_byte": loss / math.log(2), "tokens": 10, "accuracy": 0.5}
        evaluation = {**score, "domains": dict.fromkeys(names, score), "position_loss": [loss], "trips": None}
        values = {"step": recipe.train.steps, "tokens": 1, "seconds": 0.0, "epochs": 0.0}
        write_atomically(run_dir / RECIPE, recipe.to_yaml())
        (run_dir / "metrics.jsonl").touch()
        with (run_dir / "finished").open("a") as file:
            file.write("once\n")
        write_atomically(run_dir / RESULT, json.dumps({**values, "evaluation": {**evaluation, "perplexity": 9.0}}))
        self.done.append(str(run_dir))
        self.chance_to_die()
        return TrainResult(run_dir, recipe.train.steps, True, 1, 0.0)

    def chance_to_die(self) -> None:
        """By SIGKILL, if mortal."""
        if self.mortal is not None and self.mortal.random() < 0.08:
            os.kill(os.getpid(), signal.SIGKILL)


def write_ladder(path: Path, **rules: object) -> Path:
    """A ladder file."""
    path.write_text(json.dumps(ladder_values(**rules)))  # JSON is YAML
    parse_recipe({key: value for key, value in ladder_values().items() if key != "ladder"})
    return path

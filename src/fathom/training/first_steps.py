"""Checks on the first steps of a run that continues from a checkpoint.

They detect two faults: a training loss that differs from the evaluation loss of the same tokens, and an optimizer that
destroys the weights within a few steps, so that the loss rises towards ln(vocab_size), that of an untrained model.

Either fault ends the run with a `TrainingError`, whose exit code is 1. `guard.py` decides which steps are skipped, and
`loop.py` stops a run after too many of them in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from fathom.checkpoints.file_names import METRICS
from fathom.errors import TrainingError
from fathom.training.hooks import Hook, ObservedRun
from fathom.training.jacobi_gap import token_losses_and_trips
from fathom.training.results import CROSS_ENTROPY
from fathom.training.tracking import read_metrics

WATCHED = 10
"""Number of steps to check after each start."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Allowed relative difference of the first loss from the evaluation, by precision."""
INFORMED = 0.8
"""The model counts as trained if its loss is below this share of ln(vocab_size)."""


class FirstSteps(Hook):
    """Compares a run's first loss with an evaluation of the same batch, and stops a run whose rising loss shows that it
    destroys its weights. A resumed run is checked again, relative to the loss that it had reached.
    """

    every_rank = True

    def __init__(self) -> None:
        self._expected: float | None = None
        """The evaluation loss of the first batch."""
        self._known: float | None = None
        """The current loss: first that of the first batch, later a running mean."""
        self._watched = range(0)

    def before_run(self, run: ObservedRun) -> None:
        """Evaluate the first batch of a run that begins from `model.from_pretrained`, unless training and
        evaluation may differ in the loss."""
        self._run = run
        self._watched = range(run.step + 1, run.step + 1 + WATCHED)
        recipe, config = run.recipe, run.training.config
        self._known = _last_loss(run.run_dir) if run.step else None
        begins = run.step == 0 and recipe.model.get("from_pretrained") is not None
        # With several iterations, a compressed cache or dropout the training loss differs from the evaluation loss.
        plain = config.recurrence == "once" and recipe.kvcache.method == "full" and not config.attention_dropout
        if begins and plain and not recipe.lora.dropout:
            self._expected = self._evaluated(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Check the loss of one of the first steps."""
        loss = values.get(CROSS_ENTROPY, values.get("loss"))
        if loss is None or not math.isfinite(loss) or values.get("skipped"):
            return
        if step == 1 and self._expected is not None:
            self._require_equal(loss, "ce" if CROSS_ENTROPY in values else "loss")
        if step in self._watched:
            self._require_kept(step, loss)
        self._known = loss if self._known is None else 0.9 * self._known + 0.1 * loss

    def _evaluated(self, run: ObservedRun) -> float:
        training, ranks = run.training, run.ranks
        training.model.set_step(0, run.recipe.train.steps)
        training.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        for batch in training.plan.batch(0, ranks.rank, ranks.world_size, training.micro_batch):
            batch = batch.to(ranks.device)
            losses, _ = token_losses_and_trips(training.model, batch.input_ids, batch.labels, batch.position_ids)
            total += losses.double().sum() / batch.num_targets
        training.model.train()
        return float(ranks.sum(total))

    def _require_equal(self, loss: float, name: str) -> None:
        assert self._expected is not None
        tolerance = TOLERANCE[self._run.recipe.train.precision]
        if abs(loss - self._expected) > tolerance * max(1.0, self._expected):
            raise TrainingError(
                f"the first batch has a loss of {loss:.5f} in training and of {self._expected:.5f} in evaluation. "
                "These must be equal; try train.compile=false and parallel.name=single to find the cause"
            )
        self._run.say(f"first batch: {name} {loss:.4f}, equal to its evaluation")

    def _require_kept(self, step: int, loss: float) -> None:
        """Raise an error if the loss is more than half-way from the run's earlier loss to ln(vocab_size)."""
        nothing = math.log(self._run.training.config.vocab_size)
        if self._known is None or self._known > INFORMED * nothing:
            return
        if loss > (self._known + nothing) / 2:
            raise TrainingError(
                f"step {step}: the loss went from {self._known:.3f} to {loss:.3f}, towards the {nothing:.2f} of an "
                f"untrained model: optim.lr={self._run.recipe.optim.lr:g} is too high or its warm-up too "
                "short, or the optimizer state was lost",
                step,
            )


def _last_loss(run_dir: Path) -> float | None:
    """The mean loss of the last logged steps; None if no step was logged or the file of metrics is damaged."""
    rows = read_metrics(run_dir) if (run_dir / METRICS).is_file() else []
    taken = [row for row in rows if "grad_norm" in row and math.isfinite(row["loss"]) and not row["skipped"]]
    losses = [row.get(CROSS_ENTROPY, row["loss"]) for row in taken]
    return math.fsum(losses[-WATCHED:]) / len(losses[-WATCHED:]) if losses else None

"""The training loop, and what surrounds it: resuming, logging, evaluating, saving, stopping."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fathom.checkpoints.export import export
from fathom.checkpoints.layout import ARMS, LOCK, MODEL, RECIPE, RESULT, TRAINER
from fathom.checkpoints.runs import Saved
from fathom.data.puzzles import is_puzzle, open_data
from fathom.data.shards import TokenDataset, read_index
from fathom.errors import FathomError
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Recipe, RecipeError, differences, load_recipe
from fathom.report.files import HeldError, lock, read_json, write_atomically, write_json
from fathom.training.build import Training, build_training
from fathom.training.change import CHANGEABLE, Change, begin, record
from fathom.training.checkpoint import Checkpointer
from fathom.training.heldout import Evaluation, evaluate
from fathom.training.kvcache import merged
from fathom.training.meter import Meter
from fathom.training.parallel import Ranks, start, whole
from fathom.training.tracking import Display, Tracker, open_trackers, require_backends

FORWARDED = 3.0
"""Seconds in which signals count as one: a scheduler tells every process, and launchers tell theirs again."""


class TrainingError(FathomError):
    """Training cannot go on; the message is one line."""

    exit_code = 1


@dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended."""

    run_dir: Path
    step: int
    """Steps taken over the life of the run."""
    finished: bool
    """False if a signal ended it early; calling `train` again continues."""
    tokens: int
    seconds: float
    """Seconds spent in steps over the life of the run: evaluation, checkpoints and downtime left out."""
    evaluation: Evaluation | None = None
    """The last held-out evaluation, if the run finished."""
    model: Path | None = None
    """The Hugging Face directory, if one was written."""


def train(
    recipe: Recipe | Change,
    run_dir: str | Path | None = None,
    *,
    resume: bool = True,
    callbacks: Sequence[Tracker] = (),
    command: str = "",
) -> TrainResult:
    """Train a recipe in a run directory, continuing where an earlier call ended.

    Args:
        recipe: What to train; or what `extension` or `branch` made, which knows its directory.
        run_dir: Where the resolved recipe, metrics and checkpoints go.
        resume: Whether a run that exists may be continued; if not, one that exists is an error.
        callbacks: Receive the same numbers as the trackers; on the first rank alone.
        command: How the run's history names what changed it.
    """
    change = recipe if isinstance(recipe, Change) else _as_planned(recipe, run_dir)
    change.recipe.config()
    require_backends(change.recipe)
    ranks = start(change.recipe)
    if not resume and (change.run_dir / RECIPE).exists():
        raise RecipeError(f"{change.run_dir} holds a run already")
    result = _result(change)
    if result is not None:
        return result
    with ExitStack() as stack:
        if ranks.first:
            stack.enter_context(claimed(change.run_dir))
        return Run(change, ranks, callbacks, stack, command).train()


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for this process alone; the system lets go of it however the process ends.

    A directory in which nothing was begun is taken away again.
    """
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        with ExitStack() as stack:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock(run_dir / LOCK))
            except HeldError as held:
                raise RecipeError(f"{run_dir}: another process is training this run{held.advice}") from None
            except OSError as error:
                raise RecipeError(f"{run_dir}: {error.strerror or error}") from None
            yield
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


class Run:
    """One run directory being trained."""

    def __init__(
        self, change: Change, ranks: Ranks, callbacks: Sequence[Tracker], stack: ExitStack, command: str = ""
    ) -> None:
        self.recipe, self.run_dir, self.ranks = change.recipe, change.run_dir, ranks
        recipe, run_dir = self.recipe, self.run_dir
        self.display = Display(recipe.track.display if ranks.first else "none", run_dir.name, recipe.train.steps)
        stack.callback(self.display.close)
        verify = recipe.data.verify and ranks.local_rank == 0
        self.held_out: TokenDataset | None = None
        directory = recipe.data.directory
        if recipe.evaluate.every or is_puzzle(directory) or "val" in read_index(Path(directory))["splits"]:
            self.held_out = open_data(directory, "val", verify)
        self.training = build_training(recipe, ranks)
        keep, later = recipe.train.keep_last, recipe.train.async_save
        self.checkpoints = Checkpointer(run_dir, ranks, keep, later, self.display.say)
        stack.callback(self.checkpoints.close)
        saved = change.origin or self.checkpoints.newest()
        self._require_corpus(saved)
        ranks.barrier()  # whatever a rank refuses, it has refused by now
        if ranks.first:
            self._settle(change, saved, command)
        ranks.barrier()
        self.step, seconds = self._restore(saved)
        self.trackers: list[Tracker] = [self.display, *callbacks] if ranks.first else []
        if ranks.first:
            self.trackers += open_trackers(recipe, run_dir, self.step, self.display.say)
        for tracker in self.trackers[1:]:
            stack.callback(tracker.close)
        self.meter = Meter(self.training, seconds)
        self.evaluation: Evaluation | None = None
        self._look_at = self._next_look()
        if self.epochs > 1:
            data = self.training.data
            self.display.say(f"{self.epochs:.3g} epochs: every one of {data.num_tokens:,} tokens is read so many times")

    @property
    def epochs(self) -> float:
        """How many times the run reads the corpus."""
        return self.recipe.train.steps * self.recipe.rows_per_step / self.training.plan.num_windows

    def train(self) -> TrainResult:
        """The loop."""
        settings, training = self.recipe.train, self.training
        with stop_signals() as stopped:
            for step, batches in training.batches(self.step, settings.steps):
                self.meter.add(training.step(step, batches))
                self.step = step + 1
                stopping = self.ranks.any(bool(stopped))
                if stopping or self._due(settings.log_every) or self._refused_too_often():
                    self._log()
                if self._due(self.recipe.evaluate.every):
                    self.evaluation = self._evaluate()
                if stopping or self._due(settings.checkpoint_every):
                    self._save()
                if stopping:
                    break
            return self._finish()

    def _due(self, every: int) -> bool:
        return bool(every) and (self.step % every == 0 or self.step == self.recipe.train.steps)

    def _refused_too_often(self) -> bool:
        """Whether the run must stop; the device is asked no sooner than that could have come about."""
        if self.step < self._look_at:
            return False
        self._look_at = self._next_look()
        return self._look_at <= self.step

    def _next_look(self) -> int:
        refused = int(self.training.guard.refused_in_a_row.item())
        return self.step + self.recipe.train.max_skipped - refused

    def _log(self) -> None:
        """Read the steps since the last look, and stop if too many in a row were refused."""
        for line in self.meter.read():
            step = int(line.pop("step"))
            for tracker in self.trackers:
                tracker.log(step, line)
            if line["skipped"]:
                self.display.say(f"step {step} skipped: loss {line['loss']:.4g}, gradient norm {line['grad_norm']:.4g}")
        if self.meter.refused_in_a_row >= self.recipe.train.max_skipped:
            self.checkpoints.wait()
            kept = self.checkpoints.steps()
            where = f"the checkpoint of step {kept[-1]} is intact" if kept else "no checkpoint was written yet"
            raise TrainingError(
                f"stopped at step {self.step}: {self.meter.refused_in_a_row} steps in a row had a non-finite loss or a "
                f"gradient spike and were skipped; {where}; {self._advice()}"
            )

    def _advice(self) -> str:
        """What may help a run that diverges, as its directory accepts it."""
        if self.run_dir.resolve().parent.parent.name == ARMS:
            return "a comparison with a lower optim.lr may help"
        return f"`fathom train {self.run_dir} optim.lr={self.recipe.optim.lr / 2:g}` goes on at half the rate"

    def _evaluate(self) -> Evaluation | None:
        """Score the held-out split, if the corpus has one."""
        if self.held_out is None:
            return None
        self._log()
        with self.meter.paused():
            last = self.step == self.recipe.train.steps
            evaluation = evaluate(self.training.model, self.held_out, self.recipe, self.ranks, decode=last)
            values = {"tokens": self.step * self.recipe.train.tokens_per_step, "seconds": self.meter.seconds}
            for tracker in self.trackers:
                tracker.log(self.step, {**values, **evaluation.flat()})
            self.display.say(
                f"step {self.step}: held-out loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}, "
                f"{evaluation.bits_per_byte:.4f} bits per byte{evaluation.how}"
            )
        return evaluation

    def _save(self) -> None:
        self._log()
        with self.meter.paused():
            trainer = {
                "seconds": self.meter.seconds,
                "tokens": self.step * self.recipe.train.tokens_per_step,
                "corpus": self.training.data.fingerprint,
                "tokenizer": self.training.data.tokenizer_identity,
                "world_size": self.ranks.world_size,
                "torch": torch.__version__,
            }
            self.checkpoints.save(self.step, self.training.state(), trainer, self.recipe.to_yaml())

    def _finish(self) -> TrainResult:
        """Wait for the last checkpoint; after the last step, evaluate and export."""
        if not self.checkpoints.wait():
            raise TrainingError(f"step {self.step} is not on disk; free some space and run the same command again")
        tokens = self.step * self.recipe.train.tokens_per_step
        if self.step < self.recipe.train.steps:
            self.display.say(f"stopped after step {self.step}; the same command continues")
            return TrainResult(self.run_dir, self.step, False, tokens, self.meter.seconds)
        evaluation = self.evaluation or self._evaluate()
        scores = evaluation and evaluation.to_dict()
        facts = {"step": self.step, "tokens": tokens, "evaluation": scores}
        model = export_model(self.training, self.run_dir / MODEL, facts) if self.recipe.train.export else None
        result = TrainResult(self.run_dir, self.step, True, tokens, self.meter.seconds, evaluation, model)
        if self.ranks.first:
            values = {
                "step": self.step,
                "tokens": tokens,
                "seconds": result.seconds,
                "epochs": self.epochs,
                "evaluation": scores,
            }
            write_json(self.run_dir / RESULT, values)
        return result

    def _require_corpus(self, saved: Saved | None) -> None:
        """Refuse tokens other than those that a checkpoint was trained on."""
        if saved is None:
            return
        if not self.training.data.has_fingerprint(read_json(saved.directory / TRAINER)["corpus"]):
            raise RecipeError(f"data.directory={self.recipe.data.directory}: not the tokens that this run began with")

    def _settle(self, change: Change, saved: Saved | None, command: str) -> None:
        """From here on, the directory is this recipe's. The recipe comes last: without it, nothing has begun."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        before = load_recipe(self.run_dir / RECIPE) if (self.run_dir / RECIPE).exists() else change.before
        record(self.run_dir, before, self.recipe, saved.step if saved else 0, command, change.origin)
        if change.origin is not None:
            begin(change)
        write_atomically(self.run_dir / RECIPE, self.recipe.to_yaml())
        if change.keys:
            self.display.say(str(change))

    def _restore(self, saved: Saved | None) -> tuple[int, float]:
        """Continue from a checkpoint; (steps, seconds) so far."""
        if saved is None:
            return 0, 0.0
        self.training.optimizer.materialize()
        tensors = self.training.state()
        trainer = self.checkpoints.load(saved, tensors)
        self.training.guard.load({k.removeprefix("guard."): v for k, v in tensors.items() if k.startswith("guard.")})
        self.display.say(f"continuing after step {saved.step} from {saved.directory}")
        return saved.step, float(trainer["seconds"])


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that fills when SIGTERM or SIGINT arrives; a later one, past `FORWARDED`, acts as it always did."""
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if received and time.monotonic() - first >= FORWARDED:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
            return
        first = first if received else time.monotonic()
        received.append(number)

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: whoever owns the process decides when it ends
        pass
    try:
        yield received
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def export_model(training: Training, directory: Path, facts: dict[str, Any]) -> Path:
    """Gather the weights and write a Hugging Face directory, in the precision that the run computed in.

    Args:
        training: What was trained.
        directory: Where to write.
        facts: How it went, for the model card.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    found = training.weights() if training.adapters is None else merged(training.adapters)
    weights = {name: whole(tensor).cpu() for name, tensor in found.items()}
    if training.ranks.first:
        with torch.device("meta"):
            model = FathomForCausalLM(training.model.settled_config())
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        if training.recipe.train.precision == "bf16":
            model.to(torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(training.data.tokenizer_directory)
        export(model, directory, tokenizer, facts={**facts, "recipe": training.recipe.to_yaml()})
    training.ranks.barrier()
    return directory


def _as_planned(recipe: Recipe, run_dir: str | Path | None) -> Change:
    """A run that begins or goes on under its own recipe; a directory that belongs to another one is refused."""
    if run_dir is None:
        raise TypeError("train(recipe, run_dir): a recipe needs a directory")
    run_dir = Path(run_dir)
    before = load_recipe(run_dir / RECIPE) if (run_dir / RECIPE).exists() else recipe
    if differing := differences(before, recipe):
        able = not differences(before, recipe, ignore=CHANGEABLE)
        hint = f"; `fathom train {run_dir} key=value` changes them on the way" if able else ""
        raise RecipeError(f"{run_dir} holds a run of another recipe; different: {', '.join(differing)}{hint}")
    return Change(recipe, run_dir, before, 0)


def _result(change: Change) -> TrainResult | None:
    """The result of a run that finished earlier; that of fewer steps than are wanted now is none."""
    run_dir = change.run_dir
    path = run_dir / RESULT
    if not path.exists():
        return None
    try:
        values = read_json(path)
        evaluation = values["evaluation"] and Evaluation.from_dict(values["evaluation"])
        model = run_dir / MODEL if (run_dir / MODEL).exists() else None
        if values["step"] != change.recipe.train.steps:
            return None
        return TrainResult(run_dir, values["step"], True, values["tokens"], values["seconds"], evaluation, model)
    except (ValueError, KeyError, TypeError):
        raise RecipeError(f"{path} is damaged: delete it, and the same command writes it again") from None

"""The training loop, with resuming, logging, evaluating, saving and stopping.

A run directory that holds a run of another recipe is refused (`require_same`). A run stops at SIGTERM or SIGINT: all
ranks finish the step and write a checkpoint. Signals that come within three seconds count as one. `result.json` is
written only after the last step. An exception in a hook ends the run, since nothing catches it.

`build.py` makes a step, `guard.py` decides whether it is skipped, and `first_steps.py` stops a run whose first losses
are wrong. `branching.py` decides what a branch may change. `cli/train.py` sets the exit code of a run that a signal
stopped.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from fathom.checkpoints.export import export
from fathom.checkpoints.file_names import MODEL, RECIPE, RESULT, step_name
from fathom.checkpoints.find import Facts, checkpoint_steps, experiment_of, finished_model
from fathom.checkpoints.hashes import changed
from fathom.checkpoints.places import contents, require_folder
from fathom.checkpoints.runs import Saved, changes_of, load_tensors
from fathom.data.puzzles import has_split, open_data
from fathom.data.shards import TokenDataset
from fathom.errors import SettingsError, TrainingError
from fathom.models.loading import described, kept_buffers
from fathom.models.modeling import FathomForCausalLM
from fathom.models.registry import AXES
from fathom.recipe import Recipe, differences, load_recipe
from fathom.report.files import LOCK, asdict, write_atomically, write_json
from fathom.report.files import claimed as locked
from fathom.training.adapters import AdapterFiles, merged
from fathom.training.branching import CHANGEABLE, Branch, begin
from fathom.training.build import Training, build_training
from fathom.training.checkpoint import Checkpointer, trainer_state
from fathom.training.first_steps import FirstSteps
from fathom.training.heldout import HeldOut
from fathom.training.hooks import Hook, Hooks
from fathom.training.meter import Meter
from fathom.training.parallel import Ranks, start, whole
from fathom.training.probe import ProbeReport, is_probe
from fathom.training.results import Evaluation, RunResult, TrainerState
from fathom.training.tracking import Display, open_trackers, require_backends

FORWARDED = 3.0
"""Signals within this many seconds count as one: a scheduler and a launcher may both signal every process."""
STOPPING = b"\nstopping after this step, with a checkpoint; a second signal, 3 seconds later, ends it at once\n"


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`."""

    run_dir: Path
    step: int
    """Steps taken over the life of the run."""
    finished: bool
    """False if a signal, or a callback, stopped it; the same call resumes it."""
    tokens: int
    seconds: float
    """Seconds spent in steps over the life of the run, without evaluation, checkpoints and downtime."""
    evaluation: Evaluation | None = None
    """The last held-out evaluation, if the run finished."""
    model: Path | None = None
    """The Hugging Face directory, if one was written."""
    signal: int | None = None
    """The signal that stopped it, if this process received one."""


def train(
    recipe: Recipe | Branch | str | Path,
    run_dir: str | Path | None = None,
    *,
    resume: bool = True,
    callbacks: Sequence[Hook] = (),
    command: str = "",
) -> TrainResult:
    """Train a recipe in a run directory, or resume the run in this directory.

    Args:
        recipe: The recipe, its file or name; or the result of `branch`, which contains its directory.
        run_dir: Directory for the resolved recipe, metrics and checkpoints.
        resume: Whether an existing run may be resumed; otherwise it is an error.
        callbacks: Hooks, called at fixed points of the run.
        command: The command for the history of a branch.
    """
    if isinstance(run_dir, Recipe | Branch):
        raise SettingsError("train(recipe, run_dir): the recipe comes first")
    recipe = load_recipe(recipe) if isinstance(recipe, str | Path) else recipe
    if not isinstance(recipe, Recipe | Branch):
        raise SettingsError(f"train(recipe, run_dir): recipe must be a Recipe, its file or name, got {recipe!r}")
    planned = recipe.recipe if isinstance(recipe, Branch) else recipe
    place = recipe.run_dir if isinstance(recipe, Branch) else run_dir
    if place is None:
        raise SettingsError("train(recipe, run_dir): a recipe needs run_dir, the directory of the run")
    place = Path(place)
    require_place(planned, place)
    if not resume and (place / RECIPE).exists():
        raise SettingsError(f"{place} already contains a run")
    result = _result(place)
    if result is not None:
        return result
    planned.config()
    require_backends(planned)
    ranks = start(planned)
    with ExitStack() as stack:
        if ranks.first:
            stack.enter_context(claimed(place))
        return Run(recipe, place, ranks, callbacks, stack, command).train()


def _require_same_inputs(saved: Saved, trainer: TrainerState, training: Training) -> None:
    """Refuse to resume or branch with another corpus, which includes its tokenizer, or another teacher."""
    recipe, data = training.recipe, training.data
    collections = load_recipe(saved.directory / RECIPE).data.collections
    if collections != recipe.data.collections:  # later phases of a branch may read others
        data = open_data(recipe.data.directory, "train", False, collections)
    if trainer.corpus != data.fingerprint:
        raise SettingsError(
            f"data.directory={recipe.data.directory}: differs from the corpus with which this run began"
        )
    if trainer.teacher not in (None, training.teacher_fingerprint):
        raise SettingsError(
            f"distill.teacher={recipe.distill.teacher}: differs from the teacher with which this run began"
        )


def claimed(run_dir: Path) -> AbstractContextManager[None]:
    """Lock a run directory for this process."""
    return locked(run_dir, ": another process is training this run", SettingsError)


def in_words(epochs: Mapping[str, float]) -> str:
    """The epochs of each collection of a mixture, as text."""
    return ", ".join(f"{name} {value:.3g}" for name, value in epochs.items())


class Run:
    """One run directory being trained."""

    def __init__(
        self,
        planned: Recipe | Branch,
        run_dir: Path,
        ranks: Ranks,
        callbacks: Sequence[Hook],
        stack: ExitStack,
        command: str = "",
    ) -> None:
        branch = planned if isinstance(planned, Branch) and planned.begins else None
        recipe = planned.recipe if isinstance(planned, Branch) else planned
        self.recipe, self.run_dir, self.ranks = recipe, run_dir, ranks
        self._recipe_text = recipe.to_yaml()
        self.display = Display(recipe.track.display if ranks.first else "none", recipe.train.steps)
        if name := recipe.model.get("from_pretrained"):
            self.display.say(f"opening {name}")
        verify = recipe.data.verify and ranks.local_rank == 0
        split: TokenDataset | None = None
        if recipe.evaluate.every or has_split(recipe.data.directory, "val", recipe.data.collections):
            split = open_data(
                recipe.data.directory, "val", verify, recipe.data.collections, recipe.model.get("from_pretrained")
            )
        self.held_out = HeldOut(split)
        keep, later = recipe.train.keep_last, recipe.train.async_save
        self.checkpoints = Checkpointer(run_dir, ranks, keep, later, self.say)
        stack.callback(self.checkpoints.close)
        saved = self.checkpoints.newest() if branch is None else branch.origin
        self.training = build_training(recipe, ranks, begins=saved is None)
        trainer = None if saved is None else trainer_state(saved)
        if saved is not None and trainer is not None:
            _require_same_inputs(saved, trainer, self.training)
        ranks.barrier()  # checks that may fail on one rank are done
        if ranks.first:
            self._settle(branch, command)
        ranks.barrier()
        if saved is not None:
            self._restore(saved)
        self.step = trainer.step if trainer else 0
        self.meter = Meter(self.training, trainer.seconds if trainer else 0.0)
        self._look_at = self._next_look()
        self._stopping = False
        self._unannounced: int | None = None
        """The step of a save that was not reported to the hooks yet."""
        if saved is None and (changes := changes_of(recipe.model)):
            self.say(f"changed from {recipe.model['from_pretrained']}: {described(changes)}")
        for axis in AXES:
            steps = (getattr(self.training.config, f"{axis}_options") or {}).get("blend_steps", 0)
            if steps > recipe.train.steps:
                key, share = f"model.{axis}_options.blend_steps={steps}", recipe.train.steps / steps
                self.say(
                    f"{key} exceeds train.steps={recipe.train.steps}: the run will end with only {share:.0%} of the "
                    "mechanism blended in"
                )
        collections = self.training.plan.epochs(recipe.train.steps)
        if collections:
            self.say(f"epochs: {in_words(collections)}")
        elif self.epochs > 1:
            data = self.training.data
            self.say(f"{self.epochs:.3g} epochs: every one of {data.num_tokens:,} tokens is read this often")
        trackers = open_trackers(recipe, run_dir, self.step, self.say) if ranks.first else []
        own: list[Hook] = [FirstSteps()]
        own += [AdapterFiles()] if self.training.adapters is not None else []
        probe = [ProbeReport()] if is_probe(recipe) else []  # last, because it reads what the trackers wrote
        self.hooks = Hooks([self.display, *own, *callbacks, self.held_out, *trackers, *probe], ranks.first)
        self._hook_states = trainer.hooks if trainer else {}

    @property
    def epochs(self) -> float:
        """The epochs over the corpus in all steps of the run."""
        return self.recipe.train.steps * self.recipe.rows_per_step / self.training.plan.num_windows

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.step * self.recipe.train.tokens_per_step

    def train(self) -> TrainResult:
        """Train the remaining steps, then evaluate and export the model."""
        settings, training = self.recipe.train, self.training
        self._follow()
        with self.hooks.around(self, self._hook_states), stop_signals(self.ranks.first) as stopped:
            self.meter.start()
            for step, batches in training.batches(self.step, settings.steps):
                for hook in self.hooks:
                    hook.before_step(self)
                metrics = training.step(step, batches)
                self.meter.add(metrics)
                self.step = step + 1
                self._follow()
                stopping = self.ranks.any(self._stopping or bool(stopped))
                if stopping or self.due(settings.log_every) or self._refused_too_often():
                    self.read()
                self._announce()
                for hook in self.hooks:
                    hook.after_step(self, metrics)
                if stopping or self.due(settings.checkpoint_every):
                    self._save()
                if stopping:
                    break
            return self._finish(stopped[0] if stopped else None)

    def _follow(self) -> None:
        """Set schedules to the steps made, as whoever opens a checkpoint does: evaluations and the export read them."""
        self.training.model.set_step(self.step, self.recipe.train.steps)

    def due(self, every: int) -> bool:
        """Whether this step is a multiple of `every` or the run's last step; False if `every` is 0."""
        return bool(every) and (self.step % every == 0 or self.step == self.recipe.train.steps)

    def log(self, values: Mapping[str, float]) -> None:
        """Pass numbers that are known after this step to the display, the trackers and every other hook.

        They wait for the numbers of earlier steps, because wandb ignores a step that comes late.
        """
        if self.meter.unread:
            self.hooks.log_later(self.step, values)
        else:
            self.hooks.log(self.step, values)

    def say(self, text: str) -> None:
        """Show a message."""
        self.display.say(text)

    def stop(self) -> None:
        """Stop the run after the next training step, as a signal does, with a checkpoint from which the same command
        resumes."""
        self._stopping = True

    def read(self) -> None:
        """Read the metrics of the steps since the last reading, and end the run if too many steps in a row were
        skipped."""
        for line in self.meter.read():
            step = int(line.pop("step"))
            self.hooks.log(step, line)
            if line["skipped"]:
                self.say(f"step {step} skipped: loss {line['loss']:.4g}, gradient norm {line['grad_norm']:.4g}")
        self.hooks.log_waiting()
        if self.meter.refused_in_a_row >= self.recipe.train.max_skipped:
            self._settle_save()
            kept = self.checkpoints.steps()
            where = f"the checkpoint of step {kept[-1]} is intact" if kept else "no checkpoint was written yet"
            raise TrainingError(
                f"stopped at step {self.step}: {self.meter.refused_in_a_row} steps in a row had a non-finite loss or a "
                f"gradient spike and were skipped; {where}; {self._advice()}",
                self.step,
            )

    def _refused_too_often(self) -> bool:
        """Whether too many steps in a row were skipped; the device is read only once so many steps can have been
        skipped."""
        if self.step < self._look_at:
            return False
        self._look_at = self._next_look()
        return self._look_at <= self.step

    def _next_look(self) -> int:
        refused = int(self.training.guard.refused_in_a_row.item())
        return self.step + self.recipe.train.max_skipped - refused

    def _advice(self) -> str:
        """The advice to the user of a diverging run: a command that may help."""
        if experiment := experiment_of(self.run_dir):
            return f"a {experiment} with a lower optim.lr may help"
        slower = f"--run {shlex.quote(f'{self.run_dir}-slower')} optim.lr={self.recipe.optim.lr / 2:g}"
        if self.checkpoints.steps():
            source = f"--from {shlex.quote(str(self.run_dir))}"
            return f"`fathom train {source} {slower}` continues from there at half the learning rate"
        source = shlex.quote(str(self.run_dir / RECIPE))
        return f"`fathom train {source} {slower}` begins again at half the learning rate"

    def _save(self) -> None:
        self.read()
        with self.meter.paused():
            self._settle_save()
            trainer = TrainerState(
                step=self.step,
                seconds=self.meter.seconds,
                tokens=self.tokens,
                corpus=self.training.data.fingerprint,
                tokenizer=self.training.data.tokenizer_identity,
                teacher=self.training.teacher_fingerprint,
                world_size=self.ranks.world_size,
                torch=str(torch.__version__),
                hooks=self.hooks.state(),
            )
            self.checkpoints.save(self.training.state(), trainer, self._recipe_text)
        self._unannounced = self.step
        self._announce()

    def _announce(self) -> None:
        """Tell the hooks about a checkpoint as soon as every rank has finished writing it."""
        if self._unannounced is not None and not self.ranks.any(not self.checkpoints.written):
            with self.meter.paused():
                self._settle_save()

    def _settle_save(self) -> bool:
        """Wait for a save under way and tell the hooks; returns whether the last one succeeded."""
        step, self._unannounced = self._unannounced, None
        succeeded = self.checkpoints.wait()
        if step is not None and succeeded:
            for hook in self.hooks:
                hook.after_save(self, self.run_dir / step_name(step))
        return succeeded

    def _finish(self, number: int | None) -> TrainResult:
        """Wait until the last checkpoint is written; after the run's last step, evaluate and export the model. `number`
        is the signal that came."""
        if not self._settle_save():
            raise TrainingError(
                f"the checkpoint of step {self.step} could not be written; free disk space and run the same command "
                "again"
            )
        if self.step < self.recipe.train.steps:
            experiment = experiment_of(self.run_dir)
            resumes = "the same command" if experiment else f"`fathom train {shlex.quote(str(self.run_dir))}`"
            self.say(f"stopped after step {self.step} of {self.recipe.train.steps}; {resumes} resumes")
            return TrainResult(self.run_dir, self.step, False, self.tokens, self.meter.seconds, signal=number)
        evaluation = self.held_out.last if self.held_out.last_step == self.step else self.held_out.score(self)
        collections = self.training.plan.epochs(self.step)
        found = RunResult(self.step, self.tokens, self.meter.seconds, self.epochs, evaluation, collections)
        facts = Facts(self._recipe_text, found.step, found.tokens, asdict(evaluation))
        model = export_model(self.training, self.run_dir / MODEL, facts) if self.recipe.train.export else None
        if self.ranks.first:
            write_json(self.run_dir / RESULT, found)
        return TrainResult(self.run_dir, found.step, True, found.tokens, found.seconds, evaluation, model)

    def _settle(self, branch: Branch | None, command: str) -> None:
        """Write a branch's first files, and the recipe last, because a run without a recipe counts as not begun."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if branch is not None:
            begin(branch, command)
        write_atomically(self.run_dir / RECIPE, self._recipe_text)
        if branch is not None:
            self.say(str(branch))

    def _restore(self, saved: Saved) -> None:
        """Load a checkpoint."""
        tensors = self.training.state()
        load_tensors(saved.directory, tensors)
        self.training.guard.load({k.removeprefix("guard."): v for k, v in tensors.items() if k.startswith("guard.")})
        self.say(f"resuming after step {saved.step} from {saved.directory}")


@contextmanager
def stop_signals(says: bool = False) -> Iterator[list[int]]:
    """A list that collects SIGTERM and SIGINT; a signal at least `FORWARDED` seconds after the first has its default
    effect.

    Args:
        says: Whether to write to stderr that the first signal was received, since a step may take minutes.
    """
    received: list[int] = []
    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if received and time.monotonic() - first >= FORWARDED:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
            return
        if not received:
            first = time.monotonic()
            if says:
                os.write(2, STOPPING)  # a handler may have interrupted the display
        received.append(number)

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, note)
    except ValueError:  # only the main thread may handle signals
        pass
    try:
        yield received
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def export_model(training: Training, directory: Path, facts: Facts) -> Path:
    """Gather the weights and write a Hugging Face directory, in the precision of the run.

    Args:
        training: The training.
        directory: Where to write.
        facts: Facts about the training, for the model card.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    own = {**training.weights(), **kept_buffers(training.model)}
    found = own if training.adapters is None else merged(training.adapters)
    weights = {name: whole(tensor).cpu() for name, tensor in found.items()}
    if training.ranks.first:
        with torch.device("meta"):
            model = FathomForCausalLM(training.model.settled_config())
        if training.recipe.train.precision == "bf16":
            kept = kept_buffers(model)  # families keep theirs in fp32
            weights = {name: one if name in kept else one.to(torch.bfloat16) for name, one in weights.items()}
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        tokenizer = AutoTokenizer.from_pretrained(
            training.data.tokenizer_directory,
            trust_remote_code=False,  # None would ask
        )
        export(model, directory, tokenizer, facts=facts)
    training.ranks.barrier()
    return directory


def require_place(recipe: Recipe, run_dir: Path) -> None:
    """Refuse a run directory that holds a run of another recipe, anything that is not a run, or a recipe that no run
    wrote."""
    require_folder(run_dir, "a run", "a recipe")
    path = run_dir / RECIPE
    if not path.exists():
        if finished_model(run_dir):
            raise SettingsError(f"{run_dir} holds a model ({MODEL}) that no run wrote; choose another directory")
        return
    begun = (run_dir / LOCK).exists()  # a run that was stopped before its first step
    if (
        not begun
        and contents(run_dir) == ("a recipe", RECIPE)
        and path.read_text("utf-8") != load_recipe(path).to_yaml()
    ):
        raise SettingsError(f"{path} does not belong to a run, and a run would overwrite it; choose another directory")
    require_same(recipe, run_dir)


def require_same(recipe: Recipe, run_dir: Path) -> None:
    """Reject a directory that contains a run of another recipe."""
    before = load_recipe(run_dir / RECIPE)
    if differing := differences(before, recipe):
        able = not differences(before, recipe, ignore=CHANGEABLE)
        hint = f"; `fathom train --from {run_dir} --run NEW key=value` branches it with changes" if able else ""
        if not checkpoint_steps(run_dir) and not (run_dir / RESULT).exists():
            hint = "; it has no checkpoint: delete it, or choose another --run"
        raise SettingsError(f"{run_dir} contains a run of another recipe; different: {', '.join(differing)}{hint}")


def _result(run_dir: Path) -> TrainResult | None:
    """The stored result of a run that has finished before; None if there is none."""
    path = run_dir / RESULT
    if not path.exists():
        return None
    found = RunResult.of(run_dir)
    model = finished_model(run_dir)
    if model is not None and (problem := changed(model)):
        raise SettingsError(f"{problem}; to export the model again from the checkpoint, delete {path} and train again")
    return TrainResult(run_dir, found.step, True, found.tokens, found.seconds, found.evaluation, model)

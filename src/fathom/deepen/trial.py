"""`fathom try`: try one mechanism on a model that you have: deepen it, train it, train a control in the same way, and
compare the two.

Each step is what its own command does, in a directory below `out`. A finished step is noted in `try.json` and not done
again, and training resumes from its checkpoints. `heal.py` decides which keys the control has (`control_keys`), and
`evaluation/deepened.py` which differences are too small to count (`NOISE`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

from fathom.checkpoints.file_names import HEAL
from fathom.checkpoints.hub import repository
from fathom.checkpoints.places import is_empty
from fathom.checkpoints.runs import read_config
from fathom.corpus.prepare import check_inputs, prepare
from fathom.data.shards import INDEX
from fathom.deepen.heal import Healing, anywhere, control_keys
from fathom.deepen.request import parse_request
from fathom.deepen.write import deepen
from fathom.errors import FathomError, SettingsError
from fathom.evaluation.deepened import NOISE, REPORT, DeepenedReport, Effect, compare
from fathom.evaluation.scores_page import NO_SPREAD
from fathom.evaluation.scoring import EvaluationSettings
from fathom.evaluation.scoring import run as score
from fathom.recipe import load_recipe
from fathom.report.files import read_json, write_atomically, write_json
from fathom.report.results import restored
from fathom.settings import assignment
from fathom.training import train

NOTES = "try.json"
DOCUMENT = 1200
"""Characters of a document of the text that comes with Python."""
HELD_OUT = 0.1
"""Share of the documents that are held out."""
SCORED = 40
"""Maximum held-out documents."""


@dataclass(frozen=True)
class Trial:
    """The settings of a trial. A directory holds one trial."""

    model: str
    """A model directory, a GGUF file, a run, or org/name on the Hub."""
    mechanism: str = "depth_attention:blend=learned"
    """The mechanisms, as in `fathom deepen --with`."""
    layers: str | None = None
    """First and last layer of a loop."""
    text: tuple[str, ...] = ()
    """The text to train on; by default Python's own language reference, which every Python has."""
    steps: int = 120
    """Optimizer steps of each training."""
    tokens: int = 256
    """Tokens of a step, one sequence."""

    def __post_init__(self) -> None:
        if self.tokens < 16:
            raise SettingsError(f"tokens={self.tokens}: allowed: 16 or more")
        parse_request(self.mechanism, self.layers)
        Healing(self.steps)


@dataclass
class Spent:
    """The time that one step of a trial took, summed over all calls of the command."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    """Seconds of all threads and worker processes."""


@dataclass
class Notes:
    """`try.json`: what was asked, the steps that are finished, and the time of each step so far."""

    trial: Trial
    done: list[str] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """The result of a trial."""

    trial: Trial
    out: Path
    compared: DeepenedReport
    spent: dict[str, Spent]

    @property
    def effect(self) -> Effect:
        """The difference between the deepened model and its control on the held-out text."""
        return next(effect for effect in self.compared.effects if effect.against == self.compared.control)

    @property
    def verdict(self) -> str:
        """The verdict on the mechanism, with the caution that a trial with one seed needs."""
        return f"{self._difference()} {CAUTION}"

    def _difference(self) -> str:
        effect = self.effect
        if not effect.ends and not effect.gap.few:
            return f"The difference to the control has no interval: {NO_SPREAD}."
        if not effect.ends:
            return "There are too few held-out documents for an interval: give more --text."
        ends = f"{effect.ends} bits per byte (95 % interval over {effect.gap.pairs} documents)"
        if effect.verdict == "not significant":
            return f"With {self.trial.mechanism} the model is neither better nor worse than its control: {ends}."
        if effect.negligible:
            return (
                f"With {self.trial.mechanism} the model is neither better nor worse than its control: {ends}. "
                f"A difference below {NOISE} does not count here, as another seed may differ by as much."
            )
        return f"With {self.trial.mechanism} the model is {effect.verdict} than its control: {ends}."


CAUTION = (
    "One seed and a short training compare these two models; they bear no verdict on the mechanism. "
    "fathom compare trains small models from scratch, with several seeds."
)


def attempt(trial: Trial, out: Path, say: Callable[[str], None]) -> Finding:
    """Run the steps of a trial that are not finished yet, and report.

    Args:
        trial: What to try.
        out: The directory of all that is made. The same call resumes a trial that was stopped.
        say: Called with a line before each step.
    """
    model = Path(trial.model)
    if not model.exists() and repository(trial.model) is None:
        raise SettingsError(f"{trial.model}: neither a directory nor a name on the Hub (org/name)")
    if trial.text and not (out / "data" / INDEX).exists():
        check_inputs(trial.text, out / "data", HELD_OUT)
    notes = _opened(trial, out)
    for number, (name, words, step) in enumerate(_steps(trial, out), 1):
        if name in notes.done:
            say(f"{number}/5  {words}: done")
            continue
        say(f"{number}/5  {words}")
        began = time.monotonic(), _processor()
        try:
            step()
            notes.done.append(name)
        finally:
            before = notes.spent.get(name, Spent())
            seconds, cpu = time.monotonic() - began[0], _processor() - began[1]
            notes.spent[name] = Spent(before.seconds + seconds, before.processor_seconds + cpu)
            write_json(out / NOTES, notes)
    compared = restored(DeepenedReport, read_json(out / "report" / REPORT))
    return Finding(trial, out, compared, notes.spent)


def _opened(trial: Trial, out: Path) -> Notes:
    """The stored notes of the trial in a directory; new notes if the directory is new or empty."""
    place = out / NOTES
    if place.is_file():
        try:
            notes = restored(Notes, read_json(place))
        except ValueError as error:
            raise SettingsError(f"{place} is damaged ({error}); choose another directory") from None
        if notes.trial != trial and not notes.done:  # its first step failed, so there is nothing to lose
            return Notes(trial)
        if notes.trial != trial:
            now, then = asdict(trial), asdict(notes.trial)
            key = next(key for key in now if now[key] != then[key])
            was = " ".join(then[key]) if key == "text" else then[key]
            typed = f"with `{key}={was}`" if was else f"without `{key}`"
            raise SettingsError(f"`out={out}` holds a trial that was run {typed}; choose another directory")
        return notes
    if out.exists() and (not out.is_dir() or not is_empty(out)):
        raise SettingsError(f"`out={out}` exists and holds no trial; choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    notes = Notes(trial)
    write_json(place, notes)
    return notes


def _steps(trial: Trial, out: Path) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """The steps of a trial: the name of each step, a description, and the function that runs it."""
    base = anywhere(trial.model)
    yield "deeper", f"Adding {trial.mechanism} to {trial.model}", lambda: _deepen(trial, out)
    yield "data", "Turning text into tokens", lambda: _prepare(trial, out)
    yield "healed", f"Training the deepened model, {trial.steps} steps", lambda: _train(trial, out, "healed", [])
    yield "control", "Training the control, the same model without it", lambda: _control(trial, out, base)
    yield "report", "Scoring both and the model on held-out text", lambda: _compare(trial, out, base)


def _deepen(trial: Trial, out: Path) -> object:
    return deepen(trial.model, parse_request(trial.mechanism, trial.layers), out / "deeper", Healing(trial.steps))


def _prepare(trial: Trial, out: Path) -> object:
    texts = list(trial.text) or [str(_language_reference(out / "text"))]
    return prepare(texts, out / "data", tokenizer=str(out / "deeper"), held_out=HELD_OUT)


def _train(trial: Trial, out: Path, name: str, overrides: list[str]) -> object:
    """Train the deepened model or its control with the same recipe, without a teacher, since a trial has only
    minutes."""
    small = [
        assignment("data.directory", out / "data"),
        f"data.sequence_length={trial.tokens}",
        f"train.tokens_per_step={trial.tokens}",
        "distill.teacher=null",
        "train.activation_checkpointing=false",
        f"train.checkpoint_every={max(20, trial.steps // 3)}",
        "train.keep_last=1",
        "evaluate.every=0",
        f"evaluate.tokens={8 * trial.tokens}",
    ]
    result = train(load_recipe(out / "deeper" / HEAL, [*small, *overrides]), out / name)
    if not result.finished:
        code = 128 + (result.signal or signal.SIGINT)
        raise FathomError(f"stopped at step {result.step} of {trial.steps}; the same command resumes", code)
    return result


def _control(trial: Trial, out: Path, base: str) -> object:
    request = parse_request(trial.mechanism, trial.layers)
    keys = control_keys(request, read_config(out / "deeper"), Healing(trial.steps))
    return _train(trial, out, "control", ["model=null", assignment("model.from_pretrained", base), *keys])


def _compare(trial: Trial, out: Path, base: str) -> DeepenedReport:
    names = [f"base={base}", f"deepened={out / 'healed'}", f"control={out / 'control'}"]
    texts = (f"held-out={out / 'data'}",)
    checkpoints, _ = score(
        names, EvaluationSettings(perplexity=texts, context=trial.tokens, limit=SCORED, out=out / "report")
    )
    return compare(checkpoints, out / "report")


def _language_reference(folder: Path) -> Path:
    """Write Python's language reference, as the interpreter's `help()` has it, as documents that are cut at
    paragraphs."""
    folder.mkdir(exist_ok=True)
    for name, text in sorted(topics.items()):
        for number, document in enumerate(_documents(text)):
            write_atomically(folder / f"{name}-{number:03}.txt", document)
    return folder


def _documents(text: str) -> Iterator[str]:
    held: list[str] = []
    for paragraph in text.split("\n\n"):
        held.append(paragraph)
        if sum(map(len, held)) >= DOCUMENT:
            yield "\n\n".join(held)
            held = []
    if held:
        yield "\n\n".join(held)


def _processor() -> float:
    """CPU seconds of this process and of the worker processes that it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system

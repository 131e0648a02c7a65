"""The recipe that trains a deepened model: the mechanisms are blended in, and the unchanged model is the teacher.

By default `blend_steps` opens them (`opening` in `request.py`). Learned gates (`blend: learned`) open themselves, with
a learning rate of their own, `optim.groups={'*gates*': ...}`; their control has as many gains (`gains_of`).
A mechanism that the base model holds closed opens in the model and in the control (`control_keys`).

The weight of the teacher's KL divergence is set here; `training/distill.py` computes the loss. `cli/deepen.py` prints
the first two commands of `Road`, and the recipe's header has all. `write.py` keeps an edited `heal.yaml` as
`heal.yaml.old`. `evaluation/deepened.py` compares the model with its control and decides which differences count.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from fathom.checkpoints.file_names import HEAL
from fathom.checkpoints.hub import repository
from fathom.deepen.request import Request
from fathom.errors import SettingsError
from fathom.models.axes.gates import LEARNED
from fathom.models.configuration import FathomConfig
from fathom.models.cost import mechanism_cost
from fathom.models.registry import DEFAULTS
from fathom.recipe import parse_recipe
from fathom.settings import assignment, dump

STEPS = 600
"""Default optimizer steps. A step has up to 8,192 tokens, so about 5 million tokens in all."""
OPENING = 0.5
"""Share of the steps over which a mechanism is blended in."""
GATES = "*gates*"
"""The parameters of learned gates, whose learning rate is 0.01: a gate moves by tenths, a weight by hundredths."""
LONGEST = 1024
"""Maximum tokens in a sequence."""
ROWS = 8
"""Sequences per step."""

HEADER = """\
# Trains {directory}, {name}, further: the mechanisms are blended in over the first {opening} of {steps} steps.
#   {prepare}
#   {train}
# The control is the same training of the base model:
#   {control}
# The report on both:
#   {report}
# Replay against forgetting: 'data.mixture={{SHARDS: 0.8, GENERAL: 0.2}}'.
# {other}
"""
FULL = "Adapters in place of all weights need peft: lora.rank=16 optim.lr=2e-4"
ADAPTED = "All weights instead of LoRA: lora.rank=null optim.lr=2e-5"


@dataclass(frozen=True)
class Healing:
    """How the deepened model is to be trained."""

    steps: int = STEPS
    """Optimizer steps; the mechanisms open over the first half."""
    lora: bool = False
    """Train LoRA adapters instead of all weights."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise SettingsError(f"steps={self.steps}: allowed: 2 or more")

    @property
    def opening(self) -> int:
        """The steps over which the mechanisms are blended in."""
        return round(OPENING * self.steps)


@dataclass(frozen=True)
class Road:
    """The commands that train a deepened model and its control and report on both. TEXT stands for the user's text."""

    directory: Path
    base: str
    """The base model, as named on the command line."""
    keys: tuple[str, ...] = ()
    """Keys of the control's recipe (`control_keys`)."""

    @property
    def prepare(self) -> str:
        """The command that prepares the corpus with the model's own tokenizer."""
        out = self._beside("data")
        return shlex.join(
            ["fathom", "prepare", "TEXT", "--tokenizer", str(self.directory), "--held-out", "0.1", "--out", out]
        )

    @property
    def train(self) -> str:
        """Trains the deepened model."""
        return self._training("healed")

    @property
    def control(self) -> str:
        """The command that trains the control, i.e. the base model, in the same way as the deepened model."""
        return self._training("control", "model=null", assignment("model.from_pretrained", self.base), *self.keys)

    @property
    def report(self) -> str:
        """Compares the two."""
        runs = [self._beside("healed"), self._beside("control")]
        texts = ["--perplexity", f"domain={self._beside('data')}", "--out", self._beside("report")]
        return shlex.join(["fathom", "evaluate", "deepened", self.base, *runs, *texts])

    def _training(self, name: str, *overrides: str) -> str:
        words = [str(self.directory / HEAL), assignment("data.directory", self._beside("data")), *overrides]
        return shlex.join(["fathom", "train", *words, "--run", self._beside(name)])

    def _beside(self, name: str) -> str:
        """The name of a directory next to the model's: the model's name, a dash and `name`."""
        return f"{self.directory}-{name}"


def heal_recipe(road: Road, config: FathomConfig, request: Request, healing: Healing) -> str:
    """The recipe as YAML, with its usage in a header. Its paths are absolute, so it may be used from any directory.

    Args:
        road: The deepened model, and the base.
        config: The deepened model's configuration.
        request: What was added.
        healing: How it is to be trained.
    """
    opening = healing.opening
    length = min(LONGEST, config.max_position_embeddings)
    earlier = request.reopening(config, opening)
    gates = request.learns or request.base_learns(config)
    values: dict[str, object] = {
        "model": {"from_pretrained": absolute(road.directory), **earlier, **request.opening(opening)},
        "data": {"sequence_length": length},
        "optim": {
            **{"lr": 2.0e-4 if healing.lora else 2.0e-5, "warmup": 0.05, "floor": 0.1, "weight_decay": 0.0},
            **({"groups": {GATES: {"lr": 50.0 if healing.lora else 500.0}}} if gates else {}),
        },
        "lora": {"rank": 16 if healing.lora else None, "mechanisms": mechanism_cost(config).parameters > 0},
        "distill": {"teacher": _teacher(road, config, request), "weight": 0.5},
        "train": {
            "steps": healing.steps,
            "tokens_per_step": ROWS * length,
            "micro_batch": 1,
            "activation_checkpointing": config.recurrence == "once",
            "checkpoint_every": 50,
        },
        "evaluate": {"every": 100, "tokens": 65536},
    }
    parse_recipe(values)  # never write an invalid recipe
    base = absolute(road.base) if road.base == str(road.directory) else anywhere(road.base)
    paths = Road(Path(absolute(road.directory)), base, control_keys(request, config, healing))
    commands = {name: getattr(paths, name) for name in ("prepare", "train", "control", "report")}
    words = {"directory": paths.directory, "name": request.name, "opening": opening, "steps": healing.steps}
    header = HEADER.format(**words, **commands, other=ADAPTED if healing.lora else FULL)
    return header + "\n" + dump(values)


def control_keys(request: Request, config: FathomConfig, healing: Healing) -> tuple[str, ...]:
    """Recipe keys with which the base model is the control: what the recipe opens in the base model opens in the
    control too, and learned gates have gains in their place; `config` is the deepened model's configuration."""
    earlier = request.reopening(config, healing.opening)
    opened = [f"model.{key}.{name}={value}" for key, options in earlier.items() for name, value in options.items()]
    return (*opened, *gains_of(request, config))


def gains_of(request: Request, config: FathomConfig) -> tuple[str, ...]:
    """Recipe keys that give the control of learned gates as many gains but nothing to mix, because much of a closed
    gate's gradient asks for a mere gain. A mechanism that the base model has in the gains' place stays there."""
    if not request.learns:
        return ()
    for part in request.parts:
        options = request.options.get(part.name, {})
        if options.get("blend") == LEARNED:
            axis, gain = ("mixer", "value_gain") if part.axis == "mixer" else ("residual", "branch_gain")
            if axis not in {one.axis for one in request.parts} and getattr(config, axis) != DEFAULTS[axis]:
                continue
            return f"model.{axis}={gain}", f"model.{axis}_options.gates={options.get('gates', 'layer')}"
    # The mechanism is a gain itself, or the control has no place for gains.
    return () if request.base_learns(config) else ("optim.groups={}",)


def _teacher(road: Road, config: FathomConfig, request: Request) -> str | None:
    """The teacher: the base model, or the deepened model if it has replaced the base and computes the same; else
    None."""
    if road.base == str(road.directory):
        return absolute(road.directory) if request.exact(config) else None
    return anywhere(road.base)


def anywhere(name: str) -> str:
    """The name of a model as it may be used from any directory: a path is made absolute, a Hub name is unchanged."""
    path, at, step = name.partition("@")
    if at and not Path(name).exists() and Path(path).exists():
        return f"{absolute(path)}{at}{step}"
    return name if repository(name) is not None else absolute(name)


def absolute(path: str | Path) -> str:
    """The absolute path, without `..`; symbolic links are not resolved, because the user chose their names."""
    return os.path.abspath(path)

"""Open the models of runs and comparisons on disk, without importing the training code.

`newest_checkpoint` chooses the newest checkpoint of a run that is intact.

`config_of` makes the configuration of a recipe's model block, also one with `from_pretrained`; `models/loading.py`
refuses keys that contradict the checkpoint's shapes. `find.py` finds a comparison's best run.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from fathom.checkpoints.families import known
from fathom.checkpoints.file_names import (
    CONFIG,
    MANIFEST,
    RECIPE,
    RESULT,
    TOKENIZER,
    TOKENIZER_CONFIG,
    run_and_step,
    step_name,
)
from fathom.checkpoints.find import (
    Facts,
    best_run,
    checkpoint_steps,
    finished_model,
    holds_comparison,
    require_there,
)
from fathom.checkpoints.from_gguf import is_gguf, open_gguf
from fathom.checkpoints.hashes import warn_if_changed
from fathom.checkpoints.hub import local, repository
from fathom.checkpoints.tokenizers import open_tokenizer
from fathom.checkpoints.untrusted import check_checkpoint
from fathom.errors import FathomError, ModelError, TrainingError
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.loading import differing, kept_buffers, require_shapes
from fathom.models.registry import known as known_mechanisms
from fathom.report.files import Digest, digest, read_json
from fathom.report.results import restored

# Expected, because checkpoints are often read and written by a single process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    directory: Path
    step: int
    """Optimizer steps taken, skipped ones included."""


@dataclass(frozen=True)
class Opened:
    """An opened model with its tokenizer and what is known of its training."""

    model: FathomForCausalLM
    tokenizer: PreTrainedTokenizerBase | None
    facts: Facts


def open_source(source: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Opened:
    """Open the model of a run (finished, or its newest checkpoint), of a comparison's best run, or of a model
    directory.

    Args:
        source: One of these, a run's checkpoint (`RUN@step-400`), or `org/name[@revision]` on the Hub.
        tokenizer: Replaces the directory's own.
    """
    facts = Facts()
    if is_gguf(source):
        unpacked, own = open_gguf(source)
        return Opened(unpacked, tokenizer or own, facts)
    source = local(source)
    found = run_and_step(source)
    if found is not None and found[1] is not None:
        text = (found[0] / RECIPE).read_text(encoding="utf-8")
        return _open_checkpoint(found[0], tokenizer, Facts(recipe=text), find_checkpoint(source))
    require_there(source)
    source = best_run(source) if holds_comparison(source) else source
    directory = source
    if (source / RECIPE).exists():
        facts = replace(Facts.of(source), recipe=(source / RECIPE).read_text(encoding="utf-8"))
        model = finished_model(source)
        if model is None:
            return _open_checkpoint(source, tokenizer, facts, newest_checkpoint(source))
        directory = model
    if not (directory / CONFIG).exists():
        raise ModelError(f"{source} is neither a run ({RECIPE}) nor a comparison nor a model directory ({CONFIG})")
    check_checkpoint(directory)
    warn_if_changed(directory)
    config = read_config(directory)
    if tokenizer is None and (directory / TOKENIZER_CONFIG).exists():
        tokenizer = open_tokenizer(directory, config)
    return Opened(open_decoder(directory, config), tokenizer, facts)


def read_config(directory: Path, ignore_keys: Collection[str] = ()) -> FathomConfig:
    """The configuration of a model directory, which is Fathom's own or of a family that Fathom can open.

    Args:
        directory: The model directory.
        ignore_keys: Keys of another family's `config.json` to read it without.
    """
    if not (directory / CONFIG).is_file():
        raise ModelError(f"{directory}: no {CONFIG}")
    try:
        kind = read_json(directory / CONFIG).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{directory / CONFIG}: {reason(error)}") from error
    if kind not in (*known(), None):
        raise ModelError(f"{directory} is a {kind} model; Fathom opens {', '.join(known())}")
    try:
        return FathomConfig.from_pretrained(directory, ignore_keys=ignore_keys)
    except Exception as error:  # the class depends on the value in the file
        raise ModelError(f"{directory / CONFIG}: {reason(error)}") from error


def open_decoder(directory: Path, config: FathomConfig, **settings: object) -> FathomForCausalLM:
    """Open the model in a directory that `check_checkpoint` has accepted.

    Args:
        directory: The model directory.
        config: The result of `read_config`.
        settings: Arguments of `from_pretrained`.
    """
    _check_size(directory, config)
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers' warning is an error here
    try:
        ignored = {"ignore_keys": config.ignore_keys} if config.ignore_keys else {}
        return FathomForCausalLM.from_pretrained(directory, local_files_only=True, **ignored, **settings)
    except (FathomError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(f"{directory}: {reason(error)}") from error
    finally:
        logging.set_verbosity(before)


def _check_size(directory: Path, config: FathomConfig) -> None:
    """Refuse a configuration that needs more parameters than the weights file holds, before memory is allocated."""
    held = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    words = f"{directory}: {CONFIG} describes a larger model than the weights ({held:,} bytes) can hold"
    if config.num_hidden_layers * config.hidden_size > held:
        raise ModelError(words)
    try:
        with torch.device("meta"):
            needed = sum(parameter.numel() for parameter in FathomForCausalLM(config).parameters())
    except Exception as error:  # such as an attn_implementation that does not exist or is not installed
        raise ModelError(f"{directory / CONFIG}: {reason(error)}") from error
    if needed > held:  # a parameter takes at least one byte
        raise ModelError(f"{words}: {needed:,} parameters")


def _open_checkpoint(run: Path, tokenizer: PreTrainedTokenizerBase | None, facts: Facts, saved: Saved | None) -> Opened:
    """Open a checkpoint of a run; training facts that were recorded at another step are left out."""
    recipe = _recipe_of(run)
    _refuse_adapters(run)
    if saved is None:
        raise ModelError(f"{run} has neither a finished model nor a checkpoint yet")
    weights = read_weights(saved)
    try:
        model = FathomForCausalLM(config_of(recipe.model))
    except (ValueError, StrictDataclassError) as error:
        raise ModelError(f"{run / RECIPE}: model: {reason(error)}") from error
    model.load_state_dict(weights, strict=False)
    model.set_step(saved.step, recipe.steps)
    home = Path(str(recipe.data["directory"])) / TOKENIZER
    if tokenizer is None and home.exists():
        tokenizer = open_tokenizer(home)
    known = facts if facts.step == saved.step else Facts(facts.recipe, saved.step)
    return Opened(model, tokenizer, known)


def config_of(block: Mapping[str, object]) -> FathomConfig:
    """The configuration of a recipe's model block; with `from_pretrained`, the block's keys override the checkpoint's.

    A key that contradicts the shapes of the checkpoint's tensors is a `ModelError`.
    """
    keys = dict(block)
    source = keys.pop("from_pretrained", None)
    if source is None:
        return _built(keys)
    try:
        stored = _stored(str(source), keys)
    except ValueError as error:
        raise ModelError(f"model.from_pretrained={source}: {error}") from error
    try:
        require_shapes(stored, keys)
    except ValueError as error:
        whole = f"model=null model.from_pretrained={source} drops the recipe's whole model block"
        raise ModelError(f"model.from_pretrained={source}: {error}; {whole}") from error
    return _configured(str(source), **keys)


_configs: dict[str, FathomConfig] = {}
"""Configurations by their keys: a ladder asks for a few hundreds of times, and a copy takes a twentieth of the time."""


def _built(keys: dict[str, object]) -> FathomConfig:
    """A fresh copy of the configuration with these keys, which is cached as long as the registered mechanisms do not
    change."""
    values = repr((sorted(keys.items()), list(map(id, known_mechanisms().values()))))
    if values not in _configs:
        _configs[values] = FathomConfig(**copy.deepcopy(keys))
    return copy.deepcopy(_configs[values])


def changes_of(block: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The keys whose value in a recipe's model block differs from the `from_pretrained` checkpoint's, as (checkpoint's,
    recipe's)."""
    keys = dict(block)
    source = keys.pop("from_pretrained", None)
    return {} if source is None else differing(_stored(str(source), keys), config_of(block), keys)


def _stored(source: str, keys: Mapping[str, object]) -> FathomConfig:
    """The configuration of the checkpoint that `from_pretrained` names, without the recipe's changes."""
    return _configured(source, **{key: keys[key] for key in ("ignore_keys",) if key in keys})


def _configured(source: str, **keys: object) -> FathomConfig:
    """The configuration of the checkpoint that `from_pretrained` names, overridden by the given keys."""
    directory = model_directory(source)
    if directory is not None:
        if not (directory / CONFIG).is_file():
            raise ModelError(f"{directory}: neither a run nor a directory with a {CONFIG}")
        return FathomConfig.from_pretrained(directory, **keys)
    run, step = run_and_step(source) or (Path(source), None)
    recipe = _recipe_of(run)
    try:
        config = config_of(recipe.model)
    except ModelError as error:
        finished = finished_model(run) if step is None else None  # of the same shape, where the run's source is gone
        if finished is None:
            raise ModelError(f"its recipe's {error}") from error
        return FathomConfig.from_pretrained(finished, **keys)
    with torch.device("meta"):
        model = FathomForCausalLM(config)
    # As in the run's export at this step, by default the last: schedules have their value there.
    model.set_step(max(checkpoint_steps(run), default=0) if step is None else step, recipe.steps)
    return FathomConfig.from_dict(model.settled_config().to_dict(), **keys)


def model_directory(source: str | Path) -> Path | None:
    """The model directory that `from_pretrained` names; None for a run with checkpoints, which are opened instead in
    fp32.

    For a run without checkpoints, or with trained adapters, it is the finished model.
    """
    found = run_and_step(source)
    if found is None:
        return local(source)
    run, step = found
    return finished_model(run) if step is None and (_adapters(run) or not checkpoint_steps(run)) else None


def is_source(source: str | Path) -> bool:
    """Whether a name has a form that `from_pretrained` accepts; the Hub is not contacted."""
    return (Path(source) / CONFIG).is_file() or run_and_step(source) is not None or repository(source) is not None


def find_checkpoint(where: str | Path) -> Saved:
    """The checkpoint that `RUN@step-400`, `RUN/step-000400` or `RUN` (the newest intact one) names; raises if it is
    damaged."""
    found = run_and_step(where)
    if found is None:
        raise ModelError(f"{where}: no run ({RECIPE}) there; a checkpoint is named as in RUN@step-400")
    run, step = found
    if step is None:
        saved = newest_checkpoint(run)
        if saved is None:
            raise ModelError(f"{run} has no intact checkpoint")
        return saved
    saved = Saved(run / step_name(step), step)
    if not saved.directory.is_dir():
        steps = ", ".join(map(str, checkpoint_steps(run))) or "none"
        raise ModelError(f"{run} has no checkpoint of step {step}; it has {steps}")
    if problem := damage(saved.directory):
        raise ModelError(f"{saved.directory} is damaged ({problem})")
    return saved


def is_settled(where: str | Path, saved: Saved) -> bool:
    """Whether a checkpoint's name will always mean this checkpoint, because it has a step or the run is finished."""
    found = run_and_step(where)
    return found is None or found[1] is not None or (found[0] / RESULT).exists()


def read_weights(saved: Saved) -> dict[str, Tensor]:
    """The fp32 weights of a run's checkpoint by name, with the buffers that belong to them."""
    _refuse_adapters(saved.directory.parent)
    with torch.device("meta"):
        model = FathomForCausalLM(config_of(_recipe_of(saved.directory).model))
    named = (*model.named_parameters(), *kept_buffers(model).items())
    weights = {name: torch.empty(tensor.shape, dtype=torch.float32) for name, tensor in named}
    load_tensors(saved.directory, {f"model.{name}": tensor for name, tensor in weights.items()})
    return weights


@dataclass(frozen=True)
class Blocks:
    """The blocks of a run's recipe that are needed to open its model."""

    model: dict[str, object]
    data: dict[str, object] = field(default_factory=dict)
    kvcache: dict[str, object] | None = None
    lora: dict[str, object] | None = None
    train: dict[str, object] = field(default_factory=dict)

    @property
    def steps(self) -> int | None:
        """The number of steps of the run, by which some mechanisms change over training."""
        steps = self.train.get("steps")
        return steps if isinstance(steps, int) else None


@lru_cache(maxsize=8)
def _blocks(text: str) -> Blocks:
    return restored(Blocks, yaml.safe_load(text))


def _recipe_of(directory: Path) -> Blocks:
    try:
        return copy.deepcopy(_blocks((directory / RECIPE).read_text(encoding="utf-8")))  # an opening asks several times
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ModelError(f"{directory / RECIPE} cannot be read: {reason(error)}") from None


def _refuse_adapters(run: Path) -> None:
    if _adapters(run):
        raise ModelError(
            f"{run} trains LoRA adapters, which are merged only when the run finishes: open the finished run, not "
            "a checkpoint"
        )


def _adapters(run: Path) -> bool:
    return (_recipe_of(run).lora or {}).get("rank") is not None


def newest_checkpoint(run: Path, say: Callable[[str], None] | None = None) -> Saved | None:
    """The newest intact checkpoint of a run; damaged ones are skipped.

    Args:
        run: A run's directory.
        say: Called with a line about each damaged checkpoint.
    """
    for step in reversed(checkpoint_steps(run)):
        directory = run / step_name(step)
        problem = damage(directory)
        if problem is None:
            return Saved(directory, step)
        if say is not None:
            say(f"{directory} is damaged ({problem}); trying the one before")
    return None


def load_tensors(directory: Path, tensors: Mapping[str, Tensor], alone: bool = False) -> None:
    """Read a checkpoint into existing tensors; both may be sharded in any way, and all ranks or one rank may read."""
    reader = dcp.HuggingFaceStorageReader(str(directory))
    try:
        dcp.load(dict(tensors), storage_reader=reader, no_dist=alone or not dist.is_initialized())
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise TrainingError(f"{directory} does not fit this model: {reason(error)}") from error


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None if they are intact."""
    try:
        files = restored(dict[str, Digest], read_json(directory / MANIFEST)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for file, expected in files.items():
        path = directory / file
        if not path.is_file():
            return f"{file} is missing"
        if path.stat().st_size != expected.bytes:
            return f"{file} has {path.stat().st_size} bytes instead of {expected.bytes}"
    for file, expected in files.items():
        if digest(directory / file) != expected:
            return f"{file} has another checksum"
    return None


def reason(error: BaseException) -> str:
    """The innermost error's message in one line, because torch.distributed.checkpoint wraps errors in long messages."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return " ".join(str(error).split()) or type(error).__name__

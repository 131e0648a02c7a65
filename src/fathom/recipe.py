"""Recipes, each of which describes a whole training run as data.

A path in a recipe is used as it is written, so a relative one counts from the current folder; `base` alone counts from
the recipe's folder (`read_values` in `settings.py`).

`settings.py` reads YAML and `key=value` words. Of the folder `training/`, `build.py` decides the size of a
micro-batch, `optimizer.py` what `optim.only` and `optim.groups` match, `branching.py` what a branch may change besides
`FREE_ON_RESUME`, and `parallel.py` what `parallel.name` and `train.device` mean. `training/same_tokenizer.py` refuses a
corpus with another tokenizer than the checkpoint's.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fathom import settings
from fathom.checkpoints.file_names import PUZZLE
from fathom.errors import ModelError, SettingsError
from fathom.settings import (
    Rule,
    Section,
    check_keys,
    fill,
    overridden,
    packaged_recipes,
    read_values,
    require_kind,
    show,
)

if TYPE_CHECKING:
    from fathom.models.configuration import FathomConfig


LEAST_SHARE = 1 / 20_000
"""The least share of a mixture that `data/mixture.py` does not raise by rounding."""


@dataclass(frozen=True)
class Data(Section, section="data"):
    """The training data and its order."""

    directory: str = "data"
    """directory of token shards from `fathom prepare`; or puzzle:NAME for synthetic data, where NAME is hops, a5, z60,
    arithmetic or recall"""
    mixture: dict[str, float] = field(default_factory=dict)
    """share of the training sequences from each domain of data.directory, or from each other directory: {web: 0.8,
    papers: 0.2}; empty reads everything in proportion to its size"""
    phases: tuple[dict[str, float | dict[str, float]], ...] = ()
    """mixtures that replace data.mixture later in the run: [{at: 0.8, mixture: {papers: 1}}]; `at` is a step, or below
    1 a fraction of train.steps"""
    sequence_length: int = 2048
    """tokens per sequence"""
    packing: Literal["windows", "documents"] = "windows"
    """windows: a sequence is cut from documents that are concatenated with EOS between them; documents: there is also
    no attention across documents, and positions restart at each document"""
    seed: int | None = None
    """seed of the data order; null means train.seed"""
    verify: bool = True
    """verify the checksum of every shard before training"""
    other_tokenizer: bool = False
    """allow fine-tuning on data made with a different tokenizer"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        yield self.sequence_length > 1, "sequence_length", "allowed: 2 or more"
        yield self.seed is None or self.seed >= 0, "seed", "allowed: 0 or more, or null"
        words = "allowed: shares of 0 or more, one of them above 0"
        yield not self.mixture or _shares(self.mixture), "mixture", words
        yield bool(self.mixture) or not self.phases, "phases", "allowed: none, without data.mixture"
        words = "allowed: a list of {at: a share of the steps or a step, mixture: shares of 0 or more}"
        yield all(map(_phase, self.phases)), "phases", words
        words = "allowed: shares of 0, or of at least 1 in 20,000 of their sum"
        yield _distinct(self.mixture), "mixture", words
        yield all(_distinct(shares) for _, shares in self.later(1)), "phases", words

    @property
    def collections(self) -> tuple[str, ...]:
        """Every collection that a phase names, in order."""
        named = [self.mixture, *(shares for _, shares in self.later(1))]
        return tuple(dict.fromkeys(name for shares in named for name in shares))

    def later(self, steps: int) -> list[tuple[int, dict[str, float]]]:
        """The phases after the first in a run of `steps` steps, each as (first step, shares)."""
        found = []
        for phase in self.phases:
            at = typing.cast("float", phase["at"])
            shares = typing.cast("dict[str, float]", phase["mixture"])
            found.append((round(at * steps) if at < 1 else int(at), shares))
        return found


def _shares(mixture: dict[str, float]) -> bool:
    values = mixture.values()
    return all(0 <= share < math.inf for share in values) and any(share > 0 for share in values)


def _distinct(mixture: dict[str, float]) -> bool:
    """Whether every share is 0, or large enough for the four digits to which shares are rounded."""
    return not any(0 < share < LEAST_SHARE * math.fsum(mixture.values()) for share in mixture.values())


def _phase(phase: dict[str, float | dict[str, float]]) -> bool:
    at, mixture = phase.get("at"), phase.get("mixture")
    when = isinstance(at, float) and (0 < at < 1 or (at >= 1 and at.is_integer()))
    return set(phase) == {"at", "mixture"} and when and isinstance(mixture, dict) and _shares(mixture)


GROUP_FACTORS = ("lr", "weight_decay")
"""Keys of `optim.groups`: the settings that a group of parameters may scale."""


@dataclass(frozen=True)
class Optim(Section, section="optim"):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw everywhere, or muon for the matrices inside layers and adamw for everything else"""
    lr: float = 1e-3
    """peak learning rate; muon's update is scaled to adamw's size, so the same value suits both"""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw's decay rates of the first and second moment"""
    eps: float = 1e-8
    """adamw's denominator offset"""
    momentum: float = 0.95
    """muon's momentum"""
    weight_decay: float = 0.1
    """decoupled weight decay of matrices; parameters with fewer than two dimensions get none"""
    clip: float | None = 1.0
    """maximum global gradient norm; null disables clipping"""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """shape of the learning rate after warm-up: cosine or linear falls to optim.floor; constant stays; wsd stays, then
    decays"""
    warmup: float = 0.02
    """fraction of the steps with linear warm-up from zero"""
    warmup_steps: int | None = None
    """warm-up steps, independent of train.steps; null means optim.warmup"""
    decay: float = 0.2
    """fraction of the steps, at the end of the run, over which the schedule wsd decays the learning rate"""
    decay_steps: int | None = None
    """number of last steps over which the schedule wsd decays the learning rate; null means optim.decay"""
    floor: float = 0.1
    """final learning rate as a fraction of the peak"""
    only: tuple[str, ...] = ()
    """trainable parameters, by name, prefix or pattern (model.recurrence, *.mlp.*); empty trains all"""
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    """factors that multiply optim.lr and optim.weight_decay for some parameters, which are named as in optim.only:
    {model.recurrence: {lr: 0.1}}"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        yield self.lr > 0, "lr", "allowed: a positive number"
        yield all(0 <= beta < 1 for beta in self.betas), "betas", "allowed: two numbers in [0, 1)"
        yield self.eps > 0, "eps", "allowed: a positive number"
        yield 0 <= self.momentum < 1, "momentum", "allowed: a number in [0, 1)"
        yield self.weight_decay >= 0, "weight_decay", "allowed: 0 or more"
        yield self.clip is None or self.clip > 0, "clip", "allowed: a positive number, or null"
        for key in ("warmup", "decay", "floor"):
            yield 0 <= getattr(self, key) <= 1, key, "allowed: a share between 0 and 1"
        factors = [pair for group in self.groups.values() for pair in group.items()]
        known = all(name in GROUP_FACTORS and 0 <= factor < math.inf for name, factor in factors)
        yield known and all(self.groups.values()), "groups", "allowed: by pattern, lr and weight_decay, 0 or more"
        for key in ("warmup_steps", "decay_steps"):
            value = getattr(self, key)
            yield value is None or value >= 0, key, "allowed: 0 or more, or null"
        if self.schedule == "wsd" and self.warmup_steps is None and self.decay_steps is None:
            fits = self.warmup + self.decay <= 1
            yield fits, "decay", f"allowed: at most 1 - optim.warmup={show(self.warmup)}"

    def rising(self, steps: int) -> int:
        """The number of warm-up steps in a run of `steps` steps."""
        return round(self.warmup * steps) if self.warmup_steps is None else self.warmup_steps

    def falling(self, steps: int) -> int:
        """The number of decay steps of the schedule wsd in a run of `steps` steps."""
        return round(self.decay * steps) if self.decay_steps is None else self.decay_steps


@dataclass(frozen=True)
class Train(Section, section="train"):
    """Length, batch size, precision and checkpoints."""

    steps: int = 1000
    """optimizer steps"""
    tokens_per_step: int = 524288
    """tokens per optimizer step over all ranks; determines gradient accumulation"""
    micro_batch: int = 8
    """sequences per forward pass of a rank; must divide the number of sequences that a rank processes per step"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes in bfloat16 on fp32 master weights, with fp32 gradient sums and optimizer state"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses cuda if available"""
    compile: bool = False
    """torch.compile for each layer"""
    kernels: tuple[str, ...] = ()
    """functions to replace by GPU kernels: any of depth_mix, depth_pool, norm_rotate_mix, rms_norm, swiglu,
    linear_cross_entropy"""
    attention: Literal["sdpa", "eager", "flex_attention"] = "sdpa"
    """attention backend; flex_attention has no backward pass on a CPU"""
    activation_checkpointing: bool = False
    """recompute each layer in the backward pass instead of keeping its activations"""
    seed: int = 0
    """seed of the initial weights and of all randomness in a step"""
    skip_spikes: float | None = 10.0
    """skip a step whose gradient norm exceeds both this many times its running mean and this many times optim.clip;
    null skips only steps whose loss or gradient is not finite"""
    max_skipped: int = 10
    """stop after this many skipped steps in a row"""
    log_every: int = 10
    """number of steps between two reads of metrics from the device; the metrics of every step are logged"""
    checkpoint_every: int = 500
    """steps between checkpoints; the last step is always saved"""
    keep_last: int = 3
    """number of checkpoints to keep"""
    async_save: bool = True
    """write checkpoints in the background"""
    export: bool = True
    """write a Hugging Face directory at the end of the run"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        for key in ("steps", "tokens_per_step", "micro_batch", "max_skipped", "log_every"):
            yield getattr(self, key) >= 1, key, "allowed: 1 or more"
        for key in ("checkpoint_every", "keep_last"):
            yield getattr(self, key) >= 1, key, "allowed: 1 or more"
        yield self.seed >= 0, "seed", "allowed: 0 or more"
        yield self.skip_spikes is None or self.skip_spikes > 1, "skip_spikes", "allowed: more than 1, or null"
        if self.kernels:
            from fathom.kernels import NAMES

            yield set(self.kernels) <= set(NAMES), "kernels", f"allowed: any of {', '.join(NAMES)}"


@dataclass(frozen=True)
class ParallelRecipe(Section, section="parallel"):
    """Data parallelism over the ranks of torchrun."""

    name: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = "auto"
    """auto: single without torchrun, else fsdp; hsdp shards within groups and replicates across groups"""
    shard_size: int | None = None
    """ranks per sharding group of hsdp; null means the ranks of one machine"""
    reshard_after_forward: bool = True
    """free a layer's gathered weights after its forward pass: less memory, one more all-gather"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        yield self.shard_size is None or self.shard_size >= 1, "shard_size", "allowed: 1 or more"


@dataclass(frozen=True)
class Evaluate(Section, section="evaluate"):
    """Evaluation on held-out text during training."""

    every: int = 1000
    """steps between evaluations; 0 evaluates only at the end"""
    tokens: int = 1048576
    """held-out tokens per evaluation, divided evenly among the domains and spread over the text of each domain"""
    micro_batch: int | None = None
    """batch size; null means train.micro_batch"""
    position_buckets: int = 8
    """number of equal parts of the context for each of which the loss is reported"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        yield self.every >= 0, "every", "allowed: 0 or more"
        yield self.tokens >= 1, "tokens", "allowed: 1 or more"
        yield self.micro_batch is None or self.micro_batch >= 1, "micro_batch", "allowed: 1 or more"
        yield self.position_buckets >= 1, "position_buckets", "allowed: 1 or more"


@dataclass(frozen=True)
class Track(Section, section="track"):
    """Experiment trackers. metrics.jsonl in the run directory is always written."""

    backends: tuple[str, ...] = ()
    """any of wandb, trackio, tensorboard"""
    project: str = "fathom"
    """project name for wandb and trackio"""
    display: Literal["lines", "none"] = "lines"
    """lines shows one line per log interval"""
    peak_flops: float | None = None
    """peak FLOP/s of one device, for MFU; null looks up common accelerators"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        known = set(self.backends) <= {"wandb", "trackio", "tensorboard"}
        yield known, "backends", "allowed: any of wandb, trackio, tensorboard"
        yield self.peak_flops is None or self.peak_flops > 0, "peak_flops", "allowed: a positive number, or null"


@dataclass(frozen=True)
class KVCache(Section, section="kvcache"):
    """The KV cache during training: full, or compressed to tune the weights for it."""

    method: str = "full"
    """compression method under which the weights are tuned; full means an ordinary cache"""
    window: int | None = None
    """maximum entries of the cache, less than data.sequence_length; usually the context length of the checkpoint"""
    sinks: int = 4
    """number of first entries of the cache, which are never compressed"""
    ratio: float = 0.5
    """share of the window that a compression keeps, sinks included"""
    kept: int | None = None
    """number of entries that a compression keeps in addition to the sinks; replaces kvcache.ratio"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        if self.method == "full":
            for key in ("window", "kept", "sinks", "ratio"):
                default = getattr(KVCache, key)
                words = f"allowed: {show(default)}, because kvcache.method=full compresses nothing"
                yield getattr(self, key) == default, key, words
            return
        from fathom.kvcache import METHODS, NAMES

        yield self.method in NAMES, "method", f"allowed: one of {', '.join(NAMES)}"
        needs = f"kvcache.method={self.method} needs it; allowed: less than data.sequence_length"
        yield self.window is not None, "window", needs
        window = self.window or 0
        yield window >= 1, "window", "allowed: 1 or more"
        yield 0 < self.ratio < 1, "ratio", "allowed: a share between 0 and 1"
        if self.kept is None and METHODS[self.method].has_ratio:
            most = int(round(self.ratio * window, 6)) - 1
            yield 0 <= self.sinks <= most, "sinks", f"allowed: 0 to {most} with this window and ratio"
        else:
            instead = "kvcache.kept" if self.kept is not None else f"kvcache.method={self.method}"
            yield self.ratio == KVCache.ratio, "ratio", f"allowed: {KVCache.ratio}, with {instead}"
            yield 0 <= self.sinks <= window - 2, "sinks", f"allowed: 0 to {window - 2} with this window"
            most = window - self.sinks - 1
            holds = self.kept is None or 1 <= self.kept <= most
            yield holds, "kept", f"allowed: 1 to {most} with this window and sinks, or null"


@dataclass(frozen=True)
class Lora(Section, section="lora"):
    """LoRA adapters on a frozen checkpoint."""

    rank: int | None = None
    """rank of the adapters, which are merged into the exported weights; null disables LoRA. LoRA needs peft"""
    alpha: float | None = None
    """the output of an adapter is scaled by alpha / rank; null means an alpha of twice the rank"""
    dropout: float = 0.0
    """dropout on the inputs of the adapters"""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """modules that get an adapter, by the last part of their names"""
    whole: tuple[str, ...] = ()
    """modules that are trained in full, by name or pattern, such as [embed_tokens, '*norm']"""
    mechanisms: bool = False
    """whether parameters of mechanisms are trained in full; the merged export contains these parameters, the adapter in
    RUN/adapter does not"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        yield self.rank is None or self.rank >= 1, "rank", "allowed: 1 or more, or null"
        yield self.alpha is None or self.alpha > 0, "alpha", "allowed: a positive number, or null"
        yield 0 <= self.dropout < 1, "dropout", "allowed: a share from 0 to less than 1"
        yield bool(self.targets), "targets", "allowed: one or more names"


@dataclass(frozen=True)
class Distill(Section, section="distill"):
    """Distillation from a frozen teacher, in addition to the cross-entropy."""

    teacher: str | None = None
    """the teacher's checkpoint, named as in model.from_pretrained; null for none"""
    weight: float = 0.5
    """w in the loss (1 - w) cross-entropy + w forward KL to the teacher"""
    temperature: float = 1.0
    """temperature of both softmaxes in the KL; the KL is multiplied by the square of the temperature"""

    def rules(self) -> Iterator[Rule]:
        """The rules that the fields' values must obey beyond their types."""
        yield 0 < self.weight <= 1, "weight", "allowed: a share above 0 and up to 1"
        yield self.temperature > 0, "temperature", "allowed: a positive number"


@dataclass(frozen=True)
class Recipe(Section):
    """A training run."""

    model: dict[str, Any] = field(default_factory=dict)
    """any key of config.json, and from_pretrained, the model to start from: a model directory, org/name on the Hub, a
    run or RUN@step-N"""
    data: Data = field(default_factory=Data)
    """training data"""
    optim: Optim = field(default_factory=Optim)
    """optimizer and schedule"""
    train: Train = field(default_factory=Train)
    """length, batch size, precision, checkpoints"""
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)
    """data parallelism"""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """held-out text"""
    track: Track = field(default_factory=Track)
    """experiment trackers"""
    kvcache: KVCache = field(default_factory=KVCache)
    """tuning for a compressed KV cache"""
    lora: Lora = field(default_factory=Lora)
    """LoRA adapters"""
    distill: Distill = field(default_factory=Distill)
    """distillation"""

    def rules(self) -> Iterator[Rule]:
        """Checks between sections."""
        data, train, length = self.data, self.train, self.data.sequence_length
        context = self.model.get("max_position_embeddings")
        fits = not isinstance(context, int) or length <= context
        yield fits, "data.sequence_length", f"allowed: at most model.max_position_embeddings={context}"
        yield from _schedule_rules(self.optim, train)
        puzzle, given = data.directory.startswith(PUZZLE), f"with data.directory={data.directory}"
        yield not (train.export and puzzle), "train.export", f"allowed: false {given}, which has no tokenizer"
        yield not (data.mixture and puzzle), "data.mixture", f"allowed: none, {given}"
        begins = [0, *(step for step, _ in data.later(train.steps)), train.steps]
        rising = all(a < b for a, b in itertools.pairwise(begins))
        yield rising, "data.phases", f"allowed: steps that rise, from 1 to train.steps - 1 = {train.steps - 1}"
        rows = train.tokens_per_step % length == 0
        yield rows, "train.tokens_per_step", f"allowed: a multiple of data.sequence_length={length}"
        yield from _lora_rules(self)
        whole = self.distill.teacher is None or self.kvcache.method == "full"
        yield whole, "distill.teacher", "allowed: null, with kvcache.method"
        buckets = self.evaluate.position_buckets < length
        yield buckets, "evaluate.position_buckets", "allowed: 1 to data.sequence_length - 1, the targets of a sequence"
        kvcache = self.kvcache
        if kvcache.method == "full":
            return
        shorter = (
            f"allowed: less than data.sequence_length={length} (a window as long as a sequence is never compressed)"
        )
        yield (kvcache.window or 0) < length, "kvcache.window", shorter
        one_text = data.packing == "windows"
        yield one_text, "data.packing", "allowed: windows, because a compressed cache cannot separate documents"

    @property
    def rows_per_step(self) -> int:
        """Sequences per step over all ranks."""
        return self.train.tokens_per_step // self.data.sequence_length

    @property
    def data_seed(self) -> int:
        """Seed of the data order."""
        return self.train.seed if self.data.seed is None else self.data.seed

    def config(self) -> FathomConfig:
        """The model block as a configuration; with `from_pretrained`, the checkpoint's configuration, overridden by the
        block's other keys."""
        return _config(self.model)

    def override(self, *assignments: str) -> Recipe:
        """This recipe with `key=value` overrides applied."""
        return parse_recipe(self.to_dict(), assignments)


# Keys that change how a run is carried out, not what it computes: a resumed run may change them.
FREE_ON_RESUME = (
    *("data.directory", "data.verify", "data.other_tokenizer", "parallel", "track", "evaluate.micro_batch"),
    *(f"train.{key}" for key in ("micro_batch", "device", "compile", "kernels", "attention")),
    "train.activation_checkpointing",
    *(f"train.{key}" for key in ("log_every", "checkpoint_every", "keep_last", "async_save", "export", "max_skipped")),
)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and its bases, apply overrides, check everything.

    Args:
        path: A YAML file, or the name of a recipe that comes with Fathom.
        overrides: `key=value` words that override the file.
    """
    if isinstance(overrides, str):
        raise SettingsError(f"overrides={overrides!r}: allowed: a list of strings, such as [{overrides!r}]")
    values = read_values(find_recipe(path))
    require_kind(values, str(path), "train")
    return parse_recipe(values, overrides)


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, given by path or by the name of a packaged recipe; an existing path takes precedence."""
    path = Path(name)
    if path.is_file():
        return path
    packaged = packaged_recipes()
    if str(name) in packaged:
        return packaged[str(name)]
    wanted = str(path.with_suffix("")) if path.suffix in (".yaml", ".yml") else str(name)
    wanted = wanted.removeprefix("recipes/")
    close = difflib.get_close_matches(wanted, packaged, n=1)
    hint = f"did you mean {close[0]}?" if close else "`fathom recipes` lists them"
    what = "file" if path.suffix in (".yaml", ".yml") else "recipe"
    raise SettingsError(f"{name}: no such {what}; {hint}")


def summary_of(recipe: Path) -> str:
    """The first sentence of the comment at the head of a recipe file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    return re.split(r"(?<=\.) ", " ".join(line.lstrip("# ") for line in lines), maxsplit=1)[0].rstrip(".")


def parse_recipe(values: dict[str, object], overrides: Sequence[str] = ()) -> Recipe:
    """A checked recipe from nested values and `key=value` overrides."""
    return fill(Recipe, overridden(values, overrides))


def values_of(recipe: Recipe) -> dict[str, object]:
    """Every value of a recipe, by its dotted key."""
    return dict(_leaves(recipe.to_dict()))


def differences(a: Recipe, b: Recipe, ignore: Sequence[str] = FREE_ON_RESUME) -> list[str]:
    """Dotted keys on which two recipes disagree, without those under a prefix in `ignore`."""
    left, right = values_of(a), values_of(b)
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key) or (key in left) != (key in right)]
    keys += [key for key, names in _orders(a).items() if names != _orders(b)[key] and not _under(keys, key)]
    return [key for key in keys if not any(_under([key], prefix) for prefix in ignore)]


def _orders(recipe: Recipe) -> dict[str, object]:
    """The order of collections in each mixture, which decides which sequences a run draws from them."""
    phases = [list(typing.cast("dict[str, float]", phase["mixture"])) for phase in recipe.data.phases]
    return {"data.mixture": list(recipe.data.mixture), "data.phases": phases}


def _under(keys: Sequence[str], prefix: str) -> bool:
    """Whether one of some dotted keys is a given one or lies below it."""
    return any(key == prefix or key.startswith(prefix + ".") for key in keys)


def describe() -> list[tuple[str, str, str, str]]:
    """Every key as (dotted key, allowed values, default, help), for `fathom train --help`."""
    rows = list(settings.describe(Recipe))
    return [("model.*", "see config.json", "", rows[0][-1]), *rows[1:]]


def _lora_rules(recipe: Recipe) -> Iterator[Rule]:
    if recipe.lora.rank is None:
        return
    yield "from_pretrained" in recipe.model, "lora.rank", "allowed: null, without model.from_pretrained"
    yield not recipe.optim.only, "optim.only", "allowed: empty, with lora.rank"


def _schedule_rules(optim: Optim, train: Train) -> Iterator[Rule]:
    if optim.schedule != "wsd" or (optim.warmup_steps is None and optim.decay_steps is None):
        return
    key, warmup = "decay" if optim.decay_steps is None else "decay_steps", optim.rising(train.steps)
    fits = warmup + optim.falling(train.steps) <= train.steps
    yield fits, f"optim.{key}", f"allowed: what {warmup} steps of warm-up leave of train.steps={train.steps}"


def _config(model: dict[str, object]) -> FathomConfig:
    """The configuration of the recipe's model block; errors in the block become a one-line `SettingsError`."""
    from huggingface_hub.errors import StrictDataclassError

    from fathom.checkpoints.runs import config_of, is_source
    from fathom.models.configuration import FathomConfig

    keys = dict(model)
    source = keys.pop("from_pretrained", None)
    check_keys(keys, _keys_of(FathomConfig), "model")
    if not isinstance(source, (str, Path, types.NoneType)):
        raise SettingsError(f"model.from_pretrained={show(source)}: allowed: a path, or null")
    if source is not None and not is_source(source):
        raise SettingsError(f"model.from_pretrained={source}: neither a directory with a config.json nor a run")
    try:
        return config_of(model)
    except ModelError as error:
        raise SettingsError(str(error)) from error
    except StrictDataclassError as error:
        raise SettingsError(_of_another_type(" ".join(str(error).split()), keys)) from error
    except (ValueError, OSError) as error:
        raise SettingsError(f"model: {' '.join(str(error).split())}") from error


def _of_another_type(words: str, keys: dict[str, object]) -> str:
    """The message of huggingface_hub about a value of the wrong type, rewritten in the form of Fathom's own
    messages."""
    names = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null"}
    names |= {"dict": "a mapping", "list": "a list", "tuple": "a list"}
    field, types_ = re.search(r"field '(\w+)'", words), dict.fromkeys(re.findall(r"expected (\w+), got", words))
    if field is None or field[1] not in keys or not types_:
        return f"model: {words}"
    allowed = " or ".join(names.get(one, one) for one in types_)
    return f"model.{field[1]}={show(keys[field[1]])}: allowed: {allowed}"


@lru_cache
def _keys_of(config: type[FathomConfig]) -> tuple[str, ...]:
    """The keys of a model block, cached because building a configuration takes a millisecond."""
    return tuple(sorted({f.name for f in dataclasses.fields(config)} | set(config().to_dict())))


def _leaves(values: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value

"""The cost of a recipe without running it: `fathom train --dry-run`.

`cli/train.py` prints it, with the changes that a branch makes. `models/cost.py` counts FLOPs, and `trained_flops.py`
what frozen weights and adapters change. The epochs in a run's log are counted by `data/batches.py`
(`BatchPlan.epochs`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from fathom.checkpoints.runs import changes_of, config_of
from fathom.data.collections import collection_sizes, locate
from fathom.data.puzzles import is_puzzle, open_data
from fathom.data.shards import read_index
from fathom.errors import DataError
from fathom.models.axes.roles import View
from fathom.models.configuration import FathomConfig
from fathom.models.cost import (
    active_parameters,
    cache_bytes_per_token,
    count_parameters,
    flops_per_token,
    kept_visits,
    mechanism_cost,
    vanilla_flops_per_token,
)
from fathom.models.decoder.loss import chunk_rows
from fathom.models.hosts.layer_cost import layer_costs
from fathom.models.loading import described
from fathom.models.modeling import FathomForCausalLM
from fathom.models.recurrences.pondering import MixtureOptions
from fathom.models.registry import mechanism, mechanism_name, recurrence_class
from fathom.recipe import Recipe
from fathom.training.adapters import adapt
from fathom.training.build import mixture_of
from fathom.training.distill import teacher_of
from fathom.training.kvcache import compressions
from fathom.training.optimizer import Share, freeze, shares
from fathom.training.trained_flops import step_flops_range


@dataclass(frozen=True)
class Group:
    """A group of parameters with its own learning rate and weight decay."""

    pattern: str
    parameters: int
    lr: float
    """Peak learning rate."""
    weight_decay: float
    """Weight decay of those parameters that decay."""


@dataclass(frozen=True)
class Estimate:
    """The estimated sizes and costs of a run, computed by arithmetic alone."""

    mechanism: str
    parameters: int
    """Exact, without adapters."""
    trained_parameters: int
    """Those that train: all, those of `optim.only`, or with `lora.rank` the adapters and what trains beside them."""
    active_parameters: int
    """Those that one token uses: all but the experts that it does not visit."""
    flops_per_token: float
    """FLOPs of decoding a token: causal attention counted once, the head but not the embedding."""
    training_multiple: tuple[float, float, float]
    """Cost of a training step relative to vanilla's: minimum, mean and maximum over the random draws."""
    cache_bytes_per_token: int
    """Bytes of keys and values, at two bytes a number."""
    tokens: int
    """Tokens that the run trains on."""
    epochs: float | None
    """Epochs over the corpus; None for puzzles, mixtures, conversations, and a corpus that is not prepared yet."""
    collections: dict[str, float]
    """Epochs over each collection of a mixture; empty without a mixture, or if a collection is not prepared yet."""
    training_flops: float
    """FLOPs of the whole run, forward and backward."""
    ranks: int
    state_bytes: int
    """Per rank: fp32 weights, the gradients and optimizer moments of those that train, the bf16 weights in use, and a
    teacher's weights."""
    activation_bytes: int
    """Per rank and micro-batch: activations that a fused implementation keeps for the backward pass, and the logits of
    distillation; an estimate."""
    evaluation_bytes: int
    """Per rank: peak of evaluating a batch of held-out text, with the logits of one chunk; an estimate."""
    compressions: int
    """Compressions of the cache per sequence; 0 without a cache policy."""
    groups: list[Group]
    """The parameter groups of `optim.groups`."""
    changed: dict[str, tuple[object, object]]
    """Keys on which the model differs from `model.from_pretrained`, as (the checkpoint's, the recipe's)."""

    @property
    def changes_in_words(self) -> str:
        """`changed`, as text."""
        return described(self.changed)


def estimate(recipe: Recipe) -> Estimate:
    """Estimate a recipe's cost without allocating anything or reading tokens."""
    config = recipe.config()
    _require_vocabulary(recipe, config)
    parameters = count_parameters(config)
    length = recipe.data.sequence_length
    least, mean, most = step_flops_range(recipe)
    vanilla = 3 * vanilla_flops_per_token(config, length)
    tokens = recipe.train.steps * recipe.train.tokens_per_step
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sharers = {"single": 1, "ddp": 1, "hsdp": recipe.parallel.shard_size or ranks}.get(recipe.parallel.name, ranks)
    model = _planned_model(recipe, config)
    held, trained = _numbers(model), _numbers(model, trained=True)
    # Weights in fp32, and of those that train gradients and two moments (muon keeps one, but only of some). bf16 adds a
    # copy of all weights, gathered or not.
    state = (4 * held + 12 * trained) // sharers + (2 * held if recipe.train.precision == "bf16" else 0) // sharers
    teacher = _teacher_bytes(recipe) // sharers
    return Estimate(
        mechanism=mechanism_name(config),
        parameters=parameters,
        trained_parameters=trained,
        active_parameters=active_parameters(config),
        flops_per_token=flops_per_token(config, length),
        training_multiple=(least / vanilla, mean / vanilla, most / vanilla),
        cache_bytes_per_token=cache_bytes_per_token(config),
        tokens=tokens,
        epochs=_epochs(recipe),
        collections=_collections(recipe),
        training_flops=mean * tokens,
        ranks=ranks,
        state_bytes=state + teacher,
        activation_bytes=_activation_bytes(recipe, config) + _distill_bytes(recipe, config),
        evaluation_bytes=_evaluation_bytes(recipe, config),
        compressions=compressions(recipe),
        groups=_groups(recipe, model),
        changed=changes_of(recipe.model),
    )


def _require_vocabulary(recipe: Recipe, config: FathomConfig) -> None:
    try:
        data = open_data(
            recipe.data.directory, "train", False, recipe.data.collections, recipe.model.get("from_pretrained")
        )
    except DataError:
        return  # not prepared yet
    data.require_vocabulary(config.vocab_size)


def _planned_model(recipe: Recipe, config: FathomConfig) -> FathomForCausalLM:
    """The run's model on the meta device, with its adapters; only the parameters that train require a gradient."""
    with torch.device("meta"):
        model = FathomForCausalLM(config)
    freeze(model, recipe.optim.only)
    adapt(model, recipe)
    return model


def _numbers(model: FathomForCausalLM, trained: bool = False) -> int:
    """Number of a model's parameters, or of those that train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad or not trained)


def _groups(recipe: Recipe, model: FathomForCausalLM) -> list[Group]:
    """The optimizer's parameter groups, made from the names of the model's parameters."""
    optim = recipe.optim
    numbers = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts: dict[tuple[str, Share], int] = {}
    for name, (pattern, share) in shares(model, optim).items():
        if pattern is not None:
            counts[pattern, share] = counts.get((pattern, share), 0) + numbers[name]
    return [
        Group(pattern, count, optim.lr * share.lr, optim.weight_decay * share.weight_decay)
        for (pattern, share), count in counts.items()
    ]


def _epochs(recipe: Recipe) -> float | None:
    if is_puzzle(recipe.data.directory) or recipe.data.mixture:
        return None  # a puzzle never repeats a sequence, and collections differ in epochs
    try:
        index = read_index(Path(recipe.data.directory))
    except DataError:
        return None
    if index.targets_crc32:
        return None  # the number of sequences is known only after packing
    domains = index.splits["train"]
    tokens = sum(shard.tokens for shards in domains.values() for shard in shards)
    windows = tokens // recipe.data.sequence_length
    return recipe.train.steps * recipe.rows_per_step / windows if windows else None


def _collections(recipe: Recipe) -> dict[str, float]:
    mixture, names = mixture_of(recipe), recipe.data.collections
    if mixture is None:
        return {}
    try:
        sizes = collection_sizes(recipe.data.directory, names)
    except DataError:
        if Path(recipe.data.directory).exists():
            raise  # the run would fail with it too
        return {}
    counts = mixture.counts(recipe.train.steps * recipe.rows_per_step)
    windows = [size // recipe.data.sequence_length for size in sizes]
    told = {name: had / each for name, had, each in zip(names, counts, windows, strict=True) if each}
    # The number of sequences of conversations is known only after packing.
    return {name: n for name, n in told.items() if not read_index(locate(recipe.data.directory, name)[0]).targets_crc32}


def _activation_bytes(recipe: Recipe, config: FathomConfig) -> int:
    visits, layers = kept_visits(config), _layer_numbers(config)
    recomputed = visits * config.hidden_size + max(layers)
    per_token = recomputed if recipe.train.activation_checkpointing else visits * sum(layers) // len(layers)
    rows = min(recipe.train.micro_batch, recipe.rows_per_step)
    return rows * recipe.data.sequence_length * per_token * _scalar(recipe)


def _layer_numbers(config: FathomConfig) -> list[int]:
    """How many numbers every layer keeps per token for the backward pass."""
    if config.host:
        return [cost.kept for cost in layer_costs(config)]
    queries, keys = _widths(config)
    # 4 of the residual's width, 3 of queries and of keys, 4 of the MLP's; tokens are sorted by expert and put back.
    own = 4 * config.hidden_size + 3 * queries + 3 * keys + 4 * config.intermediate_size
    return [own + (3 * config.experts_per_token * config.hidden_size if config.experts else 0)]


def _teacher_bytes(recipe: Recipe) -> int:
    """Bytes of the teacher's weights in fp32, and of their bf16 copies if the run computes in bf16."""
    if (teacher := teacher_of(recipe)) is None:
        return 0
    return count_parameters(config_of({"from_pretrained": teacher})) * (6 if recipe.train.precision == "bf16" else 4)


def _distill_bytes(recipe: Recipe, config: FathomConfig) -> int:
    """Bytes of the logits of the model and of its teacher, and of the gradient of the model's logits."""
    if recipe.distill.teacher is None:
        return 0
    rows = min(recipe.train.micro_batch, recipe.rows_per_step)
    return 3 * rows * recipe.data.sequence_length * config.vocab_size * _scalar(recipe)


def _evaluation_bytes(recipe: Recipe, config: FathomConfig) -> int:
    """Bytes of an evaluation: the larger of a layer's activations and a chunk's logits, plus the tensors that later
    layers and iterations read."""
    recurrence, scalar = recurrence_class(config), _scalar(recipe)
    tokens = (recipe.evaluate.micro_batch or recipe.train.micro_batch) * recipe.data.sequence_length
    trips, view = recurrence.trips_of(config), recurrence.sees(config)
    slots = trips if view is View.ALL else 1  # under view ALL the iterations of a token run in parallel
    kept, seen = _kept_numbers(config, trips, view, recurrence.stops(config))
    between = 5 * config.hidden_size if trips > 1 else 0  # inputs, outputs and states between iterations
    # Sources and histories, as mechanisms declare them; streams that are rewritten count 4 times.
    transient = mechanism_cost(config, scalar).transient_bytes * (4 if config.residual == "hyper_connections" else 1)
    held = tokens * slots * ((kept + between) * scalar + transient)
    queries, keys = _widths(config)
    own = 4 * config.hidden_size + max(4 * config.intermediate_size, 3 * queries + 3 * keys)
    work = (max(_layer_numbers(config)) if config.host else own) + seen
    layer = tokens * slots * work * scalar + _mask_bytes(recipe, trips, view)
    cuda = recipe.train.device == "cuda" or (recipe.train.device == "auto" and torch.cuda.is_available())
    rows = chunk_rows(tokens, config.vocab_size, "cuda" if cuda else "cpu")
    # Logits in the precision of the run, an fp32 copy if that is another, and their log-probabilities in fp32.
    head = rows * config.vocab_size * (8 if scalar == 4 else 10)
    mixes = issubclass(mechanism("recurrence", config.recurrence).options, MixtureOptions)
    if mixes and recurrence.needs_head(config):  # index, logit and weight of each word
        head += tokens * min(MixtureOptions.of(config).top_k or 0, config.vocab_size) * 20
    return held + max(layer, head + tokens * config.hidden_size * scalar)


def _kept_numbers(config: FathomConfig, trips: int, view: View, halts: bool) -> tuple[int, int]:
    """How many numbers are kept per token slot: keys and values for later iterations, and their concatenation for the
    iteration that reads them."""
    queries, keys = _widths(config)
    if view is View.DUO:
        return 2 * keys * config.num_hidden_layers * trips, 2 * (keys + queries) * trips
    if view is View.SAME and halts:  # old and new ones side by side
        return 4 * keys * config.num_hidden_layers + 8 * config.hidden_size, 0
    return 0, 0


def _mask_bytes(recipe: Recipe, trips: int, view: View) -> int:
    """Bytes of attention masks that are not plainly causal: one byte for each pair of positions, and as much again for
    the mask that it is combined with."""
    if trips == 1 or view is not View.DUO:
        return 0
    rows, length = recipe.evaluate.micro_batch or recipe.train.micro_batch, recipe.data.sequence_length
    return 2 * rows * length * length * trips


def _widths(config: FathomConfig) -> tuple[int, int]:
    """The total width of a token's queries, and of its keys, over all heads."""
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def _scalar(recipe: Recipe) -> int:
    return 2 if recipe.train.precision == "bf16" else 4

"""From a recipe to a `Training`, which can take steps: the core of `train`, `compare` and the benchmarks.

A batch that ranks and micro-batches do not divide into whole sequences is refused here, and so is a sequence longer
than the model's `max_position_embeddings`. Each micro-batch's loss is divided by the targets of the global batch. A
step's random draws are seeded with (seed, step, rank), the initial weights of a module with (seed, module name).

`data/batches.py` divides a batch among ranks and micro-batches, and `first_steps.py` compares the loss of the first
batch with its evaluation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fathom.data.batches import Batch, BatchPlan
from fathom.data.mixture import Mixture, Phase
from fathom.data.puzzles import open_data
from fathom.data.shards import TokenDataset
from fathom.errors import SettingsError
from fathom.kernels import require, use
from fathom.models.configuration import FathomConfig
from fathom.models.loading import kept_buffers
from fathom.models.modeling import FathomCausalLMOutput, FathomForCausalLM
from fathom.models.trips.flex_reading import FLEX, NO_BACKWARD
from fathom.recipe import Recipe
from fathom.training.adapters import adapt, require_peft
from fathom.training.distill import check_teacher, distilled, open_teacher
from fathom.training.guard import Guard
from fathom.training.kvcache import compress
from fathom.training.optimizer import Optimizer, freeze, learning_rate, shares
from fathom.training.parallel import (
    Ranks,
    device_of,
    parallelize,
    release_gathered,
    start,
    strategy_of,
    synchronize_gradients,
    whole,
)
from fathom.training.results import CROSS_ENTROPY, StepMetrics
from fathom.training.same_tokenizer import require_tokenizer
from fathom.training.source import fingerprint, model_of, source_of
from fathom.training.tracking import require_backends

if TYPE_CHECKING:
    from peft import PeftModel

FROM = "model.from_pretrained"


@dataclass
class Training:
    """Model, data, optimizer and guard: everything that a training step needs."""

    recipe: Recipe
    ranks: Ranks
    config: FathomConfig
    model: FathomForCausalLM
    optimizer: Optimizer
    guard: Guard
    data: TokenDataset
    plan: BatchPlan
    adapters: PeftModel | None = None
    """peft's wrapper of the model, if only adapters are trained."""
    teacher: FathomForCausalLM | None = None
    """The model from which this one is distilled."""
    teacher_fingerprint: str | None = None
    """A digest of its checkpoint, by which a resumed run knows it."""

    @property
    def micro_batch(self) -> int:
        """Sequences per forward pass of a rank."""
        return min(self.recipe.train.micro_batch, self.recipe.rows_per_step // self.ranks.world_size)

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, Sequence[Batch]]]:
        """This rank's micro-batches of a range of steps, prefetched by a thread."""
        return self.plan.prefetch(start, stop, self.ranks.rank, self.ranks.world_size, self.micro_batch)

    def step(self, step: int, batches: Sequence[Batch] | None = None) -> StepMetrics:
        """One optimizer step. A pure function of the weights, the optimizer's state and `step`.

        It reads nothing back from the device but how many tokens each expert has, unless an optimizer lacks
        `reads_found_inf`: its numbers stay tensors until `meter.py` reads them for the log.
        """
        recipe, ranks, model = self.recipe, self.ranks, self.model
        if batches is None:
            batches = self.plan.batch(step, ranks.rank, ranks.world_size, self.micro_batch)
        _draw_from(_seed(recipe.train.seed, "step", step, ranks.rank), ranks.device)
        model.train()
        model.set_step(step, recipe.train.steps)
        loss = torch.zeros((), device=ranks.device)
        extra: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            synchronize_gradients(model, last=number == len(batches) - 1)
            placed = batch.to(ranks.device)
            if self.teacher is None:
                out = forward(model, placed)
            else:
                out = distilled(forward(model, placed, with_logits=True), self.teacher, placed, recipe.distill)
            # FSDP averages gradients over ranks, but the loss is already divided by the targets of all ranks.
            (out.loss * ranks.world_size).backward()
            loss += out.loss.detach().float()
            terms = dict(out.aux_losses or {})
            if terms:
                terms.setdefault(CROSS_ENTROPY, out.loss - sum(terms.values()))
            # Penalties of micro-batches are summed, as their losses are; metrics are averaged.
            for found, parts in ((terms, 1), (out.metrics or {}, len(batches) * ranks.world_size)):
                for name, value in found.items():
                    extra[name] = extra.get(name, torch.zeros_like(loss)) + value.detach().float() / parts
        loss = ranks.sum(loss)
        extra = {name: ranks.sum(value) for name, value in sorted(extra.items())}
        norm = clip_gradients(self.optimizer.parameters.values(), recipe.optim.clip)
        skipped = self.guard.refuse(loss, norm)
        lr = learning_rate(recipe.optim, step, recipe.train.steps)
        self.optimizer.step(lr, skipped)
        self.optimizer.zero_grad()
        return StepMetrics(step, lr, recipe.train.tokens_per_step, loss, norm, skipped, extra)

    def weights(self) -> dict[str, Tensor]:
        """The fp32 master weights by parameter name, each with its sharding."""
        release_gathered(self.model)
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint must hold, by name."""
        weights = {f"model.{name}": tensor for name, tensor in {**self.weights(), **kept_buffers(self.model)}.items()}
        optimizer = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        return {**weights, **optimizer, **{f"guard.{name}": tensor for name, tensor in self.guard.state().items()}}


def build_training(
    recipe: Recipe, ranks: Ranks | None = None, data: TokenDataset | None = None, begins: bool = True
) -> Training:
    """Check a recipe against its data, then build model and optimizer, placed and sharded.

    Args:
        recipe: What to build.
        ranks: This process; by default it joins the ranks of torchrun, as `start` does.
        data: The training split, if it is already open.
        begins: Whether to load the weights of `model.from_pretrained`; a run with a checkpoint of its own does not.
    """
    ranks = ranks or start(recipe)
    check_device(recipe, ranks.device.type)
    require_peft(recipe)
    use(recipe.train.kernels, ranks.device.type)
    config = recipe.config()
    _require_context(recipe, config)
    _require_rows_per_rank(recipe, ranks.world_size)
    if data is None:
        # One rank of each machine verifies the checksums for all.
        verify = recipe.data.verify and ranks.local_rank == 0
        data = open_data(
            recipe.data.directory, "train", verify, recipe.data.collections, recipe.model.get("from_pretrained")
        )
    data.require_vocabulary(config.vocab_size)
    if begins:
        require_tokenizer(recipe, data)
    check_teacher(recipe, data, config.vocab_size)
    plan = batch_plan(recipe, data)
    if "seed" in config.recurrence_options and config.recurrence_options["seed"] is None:
        config.recurrence_options["seed"] = recipe.train.seed
    model = build_model(recipe, config, ranks.device, begins)
    model.set_attn_implementation(recipe.train.attention)
    freeze(model, recipe.optim.only)
    compress(model, recipe)
    adapters = adapt(model, recipe)
    parallelize(model, ranks, recipe)
    optimizer = Optimizer(model, recipe.optim)
    guard = Guard(recipe.train.skip_spikes, ranks.device, recipe.optim.clip or 0.0)
    teacher = open_teacher(recipe, ranks)
    known = None if recipe.distill.teacher is None else fingerprint(recipe.distill.teacher)
    return Training(recipe, ranks, config, model, optimizer, guard, data, plan, adapters, teacher, known)


def check_device(recipe: Recipe, device: str) -> None:
    """Reject kernels and attention backends that cannot train on this type of device."""
    require(recipe.train.kernels, device)
    if recipe.train.attention == FLEX and device in NO_BACKWARD:
        raise SettingsError(f"train.attention={FLEX}: no backward pass on {device}; allowed: sdpa, eager")


def check_training(recipe: Recipe, begins: bool = True) -> None:
    """Reject a recipe that a run would reject at its start, without creating or reading weights. Only the device may be
    missing, so that a run may be planned on another machine.

    Args:
        recipe: What is to be trained.
        begins: Whether the run starts with the weights of `model.from_pretrained`, not with a checkpoint of its own.
    """
    if recipe.train.device != "cuda" or torch.cuda.is_available():
        check_device(recipe, device_of(recipe.train.device).type)
    require_peft(recipe)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    strategy_of(recipe.parallel, world_size)
    _require_rows_per_rank(recipe, world_size)
    settings = recipe.data
    data = open_data(settings.directory, "train", False, settings.collections, recipe.model.get("from_pretrained"))
    if recipe.evaluate.every:
        open_data(settings.directory, "val", False, settings.collections)
    config = recipe.config()
    data.require_vocabulary(config.vocab_size)
    batch_plan(recipe, data)
    check_model(recipe, data, begins)
    check_teacher(recipe, data, config.vocab_size)


def check_model(recipe: Recipe, data: TokenDataset, begins: bool = True) -> None:
    """Reject models that `build_training` would reject, without creating or reading weights."""
    require_backends(recipe)
    if begins:
        require_tokenizer(recipe, data)
    config, source = recipe.config(), recipe.model.get("from_pretrained")
    _require_context(recipe, config)
    if source is not None and begins:
        source_of(source, FROM)
    with torch.device("meta"):
        model = FathomForCausalLM(config)
    freeze(model, recipe.optim.only)
    compress(model, recipe)
    adapt(model, recipe)
    shares(model, recipe.optim)


def batch_plan(recipe: Recipe, data: TokenDataset) -> BatchPlan:
    """The order in which a recipe reads its training split."""
    settings = recipe.data
    return BatchPlan(
        data, settings.sequence_length, recipe.rows_per_step, recipe.data_seed, settings.packing, mixture_of(recipe)
    )


def mixture_of(recipe: Recipe) -> Mixture | None:
    """The mixture that says which collection each sequence of a run comes from; None without `data.mixture`."""
    names = recipe.data.collections
    if not names:
        return None
    begun = [(0, recipe.data.mixture), *recipe.data.later(recipe.train.steps)]
    return Mixture(
        [Phase(step * recipe.rows_per_step, tuple(shares.get(name, 0.0) for name in names)) for step, shares in begun]
    )


def build_model(recipe: Recipe, config: FathomConfig, device: torch.device, begins: bool = True) -> FathomForCausalLM:
    """The recipe's model in fp32 with initial weights, or if `begins` is set with the weights of
    `model.from_pretrained`."""
    source = recipe.model.get("from_pretrained")
    if source is not None and begins:
        model, info = model_of(source, FROM, config)
        initialize(model.to(device), recipe.train.seed, info["missing_keys"])
        return model
    with device:
        model = FathomForCausalLM(config)
    model.float()
    initialize(model, recipe.train.seed)
    return model


def initialize(model: FathomForCausalLM, seed: int, missing: Set[str] | None = None) -> None:
    """Initialise the weights of each module from a generator seeded with the module's name, so that two models with
    different mechanisms start from equal values in all shared parameters.

    Args:
        model: The model.
        seed: The seed that is combined with each module's name.
        missing: Parameters that a checkpoint lacks; only modules that consist of these are initialised.
    """
    named = list(model.named_parameters(remove_duplicate=False))  # a tied head belongs to the embedding
    held = {id(p) for name, p in named if missing is not None and name not in missing}
    for name, module in reversed(list(model.named_modules())):  # children first, as transformers does
        own = {id(p) for p in module.parameters()}
        if missing is not None and (not own or own & held):
            continue
        _draw_from(_seed(seed, "init", name), model.device)
        model._init_weights(module)
    model.tie_weights()


def _draw_from(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for one device. For a CPU it seeds only the CPU's generator: torch would seed every kind of
    device, and formats the stack for each missing kind, a millisecond per call.
    """
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)


def forward(model: nn.Module, batch: Batch, with_logits: bool = False) -> FathomCausalLMOutput:
    """Forward pass of a batch; the loss is this batch's share of the mean over the global batch."""
    return model(
        input_ids=batch.input_ids,
        labels=batch.labels,
        position_ids=batch.position_ids,
        num_items_in_batch=batch.num_targets,
        use_cache=False,
        **({"return_logits": True} if with_logits else {}),
    )


def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Clip the global gradient norm to `limit`; returns the norm before clipping, as a tensor."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm.float()


def _require_context(recipe: Recipe, config: FathomConfig) -> None:
    if recipe.data.sequence_length > config.max_position_embeddings:
        raise SettingsError(
            f"data.sequence_length={recipe.data.sequence_length}: allowed: at most the model's "
            f"max_position_embeddings={config.max_position_embeddings}"
        )


def _require_rows_per_rank(recipe: Recipe, world_size: int) -> None:
    rows, remainder = divmod(recipe.rows_per_step, world_size)
    if remainder:
        raise SettingsError(
            f"train.tokens_per_step={recipe.train.tokens_per_step}: allowed: a multiple of data.sequence_length"
            f"={recipe.data.sequence_length} times {world_size} ranks"
        )
    if rows % min(recipe.train.micro_batch, rows):
        raise SettingsError(
            f"train.micro_batch={recipe.train.micro_batch}: allowed: a divisor of {rows} sequences per rank"
        )


def _seed(*parts: object) -> int:
    """A random seed that is a hash of the arguments."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")

"""Measured costs of an arm and the control: time and memory of a training step, and cache growth. Two models take turns
A B B A in one process on the same batches, and each A B B A gives one ratio, so that other load slows both. On a CPU
with one thread the clock is that thread's CPU time.

The iterations of a loop may change from step to step, so the timed steps are spread over each recipe's run, and memory
is that of the step with the most iterations.

`plan.py` decides whether a measurement is made again (`read_measured`): if more rounds are planned, or if a recipe
differs in more than the choice of data, tracking, checkpoints, export and logging. `evaluation/clock.py` decides
between CPU time and wall time.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fathom.evaluation.clock import Clock
from fathom.experiments.compare_results import Measured, TimeRatio
from fathom.kernels import use
from fathom.kvcache import cache_bytes
from fathom.models.axes.cache_name import passed, returned
from fathom.recipe import Recipe
from fathom.report.provenance import hardware
from fathom.training import Training, build_training, start
from fathom.training.build import forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL, DECODED = 8, 16
MOST_STEPS = 100
"""Steps among which the one with the most iterations is looked for."""


def measure(arm: Recipe, control: Recipe, pairs: int) -> Measured:
    """Measure time and memory of a training step of an arm and the control, both built from one seed, in the order A B
    B A."""
    ranks = start(control)
    base = _allocated(ranks.device)
    a = build_training(arm, ranks)
    start_a = {name: tensor.clone() for name, tensor in a.weights().items()}
    memory_a = step_memory(a) - base
    base = _allocated(ranks.device)
    b = build_training(control, ranks)
    shared = _shared(start_a, b.weights())
    del start_a
    memory_b = step_memory(b) - base
    one, other = _stepper(a, pairs), _stepper(b, pairs)
    if arm.train.kernels != control.train.kernels:  # the table of kernels is shared by the process
        one, other = _with_kernels(one, arm, ranks.device), _with_kernels(other, control, ranks.device)
    ratio = interleaved(one, other, pairs, Clock(ranks.device))
    for training in (a, b):
        steps = training.recipe.train.steps
        training.model.set_step(steps, steps)  # the cache is that of the trained model
    cuda = ranks.device.type == "cuda"
    return Measured(
        time=ratio,
        memory_bytes=(memory_a, memory_b),
        memory="peak device memory of a step"
        if cuda
        else "tensors saved for backward, parameters, gradients and optimizer state",
        cache_bytes_per_token=(cache_growth(a.model), cache_growth(b.model)),
        shared_tensors=shared,
        hardware=hardware(),
    )


def _with_kernels(step: Callable[[], object], recipe: Recipe, device: torch.device) -> Callable[[], object]:
    def with_its_own() -> object:
        use(recipe.train.kernels, device.type)
        return step()

    return with_its_own


def interleaved(a: Callable[[], object], b: Callable[[], object], pairs: int, clock: Clock | None = None) -> TimeRatio:
    """Time two functions alternately, in the order A B B A, after one warm-up.

    Args:
        a: One step of the first.
        b: One step of the second.
        pairs: How often A B B A is timed; each time gives one ratio.
        clock: By default one for the CPU.
    """
    clock = clock or Clock(torch.device("cpu"))
    for step in (a, b, b, a):
        step()
    ratios, times = [], ([], [])  # type: ignore[var-annotated]
    collecting = gc.isenabled()
    gc.disable()  # a pause would count for one side only
    try:
        for _ in range(pairs):
            a1, b1, b2, a2 = (clock.seconds(step) for step in (a, b, b, a))
            ratios.append((a1 + a2) / (b1 + b2))
            times[0].extend((a1, a2))
            times[1].extend((b1, b2))
    finally:
        if collecting:
            gc.enable()
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    return TimeRatio(median, low, high, pairs, (statistics.median(times[0]), statistics.median(times[1])), clock.words)


def step_memory(training: Training) -> int:
    """Peak memory in bytes of the training step with the most iterations, after a first step that is not counted."""
    step = _fullest_step(training)
    training.step(step)
    device = training.ranks.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        training.step(step)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    state = training.optimizer.state().values()
    weights, trained = training.weights().values(), training.optimizer.parameters.values()
    return saved_bytes(training) + _bytes(weights) + _bytes(trained) + _bytes(state)


def saved_bytes(training: Training) -> int:
    """Bytes that a forward pass of one micro-batch keeps for its backward pass, not counting weights."""
    weights = {p.untyped_storage().data_ptr() for p in training.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = training.plan.batch(0, micro_batch=training.micro_batch)[0]
    training.model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward(training.model, batch.to(training.ranks.device))
        total = sum(kept.values())
        del out
    return total


@torch.no_grad()
def cache_growth(model: PreTrainedModel) -> float:
    """Bytes by which the model's cache grows for each decoded token, measured."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.arange(PREFILL, device=device).unsqueeze(0) % model.config.vocab_size
    cache, sizes = None, []
    for _ in range(DECODED + 1):
        out = model(input_ids=tokens, use_cache=True, **passed(model, cache))
        cache = returned(out)
        tokens = out.logits[:, -1:].argmax(-1)
        sizes.append(cache_bytes(cache))
    model.train(was_training)
    return (sizes[-1] - sizes[0]) / DECODED


def _stepper(training: Training, pairs: int) -> Callable[[], object]:
    """A function that makes one training step on preloaded, repeated batches: first twice the last step of the run, to
    warm up, then each of `pairs` steps twice, spread over the run."""
    batches = list(training.plan.batch(2, micro_batch=training.micro_batch))
    steps = training.recipe.train.steps
    upcoming = iter([steps - 1] * 2 + [step for step in spread_steps(steps, pairs) for _ in range(2)])
    return lambda: training.step(next(upcoming), batches)


def spread_steps(steps: int, count: int) -> list[int]:
    """The middle step of each of `count` equal parts of a run of `steps` steps."""
    return [steps * (2 * part + 1) // (2 * count) for part in range(count)]


def _fullest_step(training: Training) -> int:
    """The step with the most iterations and Jacobi rounds, of the last step and others that are spread over the run."""
    steps, recurrence = training.recipe.train.steps, training.model.model.recurrence

    def held(step: int) -> tuple[int, int]:
        training.model.set_step(step, steps)
        return recurrence.drawn_trips, getattr(recurrence, "drawn_rounds", 0)

    return max([steps - 1, *spread_steps(steps, MOST_STEPS)], key=held)


def _shared(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[int, int]:
    names = [name for name in a if name in b and a[name].shape == b[name].shape]
    return len(names), sum(torch.equal(a[name], b[name]) for name in names)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

"""The cost of a forward pass, by arithmetic: parameters, FLOPs, cache.

FLOPs are per token and count a multiply-add as two. Causal attention is counted once, (T + 1) / 2 positions, or fewer
in a sliding window or in chunks; the head is counted, the embedding look-up is not. A training step is three passes of
training (with Jacobi rounds, where decoding needs none), and what a mechanism declares beyond that. Tokens that halt
count as if they did not. All weights train; `training/trained_flops.py` counts what freezing and adapters change.

Norms, softmaxes and pooling are left out of FLOPs, as in papers; `elementwise_flops` counts them. Each mechanism's file
declares what it adds, at its end; `experiments/catalogue.py` prints the table.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from .axes.roles import Cost, Recurrence, View
from .configuration import FathomConfig
from .decoder.arithmetic import (
    attention_flops,
    head_flops,
    idle_parameters,
    keys_read,
    layer_cache_bytes,
    layer_flops,
    loss_flops,
)
from .hosts.layer_cost import layer_costs, mixer_cost
from .modeling import FathomForCausalLM
from .registry import AXES, mechanism, recurrence_class
from .trips.slots import plan

_counted: dict[str, int] = {}
"""Parameters, by the values of a configuration: a ladder asks for those of a few sizes hundreds of times."""


def count_parameters(config: FathomConfig) -> int:
    """The exact number of parameters, counted on a model that is built on the meta device."""
    values = repr(vars(config))
    if values not in _counted:
        with torch.device("meta"):
            model = FathomForCausalLM(config)
        _counted[values] = sum(p.numel() for p in model.parameters())
    return _counted[values]


def active_parameters(config: FathomConfig) -> int:
    """The parameters that one token uses: all except the experts to which it is not routed."""
    if config.host:
        return count_parameters(config) - sum(cost.idle for cost in layer_costs(config))
    return count_parameters(config) - config.num_hidden_layers * idle_parameters(config)


def mechanism_cost(config: FathomConfig, bytes_per_scalar: int = 2) -> Cost:
    """The cost that the three mechanisms add to the vanilla decoder, without the attention scores of further
    iterations."""
    total, visits = Cost(), [visit for trip in plan(config) for visit in trip]
    for axis in AXES:
        cost = mixer_cost if config.host and axis == "mixer" else mechanism(axis, getattr(config, axis)).cost
        total = total + cost(config, visits, bytes_per_scalar)
    return total


def attention_reads(config: FathomConfig) -> list[int]:
    """How many keys of an earlier token each layer reads in all iterations of a token together; one in the vanilla
    decoder.

    With K + 1 iterations a looped layer reads K + 1 in view SAME, (K + 1)(K + 2) / 2 in DUO and (K + 1)² in ALL.
    """
    trips, view = plan(config), recurrence_class(config).sees(config)
    banks = {View.SAME: [1] * len(trips), View.DUO: range(1, len(trips) + 1), View.ALL: [len(trips)] * len(trips)}
    reads = [0] * config.num_hidden_layers
    for trip, read in zip(trips, banks[view], strict=True):
        for visit in trip:
            reads[visit.layer] += read
    return reads


def _attention(config: FathomConfig, sequence_length: int, reads: Sequence[float]) -> float:
    """Attention scores and weighted sums of a token, from the number of keys that each layer reads per earlier
    token."""
    if config.host:
        each = enumerate(zip(reads, layer_costs(config), strict=True))
        return sum(read * cost.flops_per_key * keys_read(config, i, sequence_length) for i, (read, cost) in each)
    return sum(read * attention_flops(config, i, sequence_length) for i, read in enumerate(reads))


def vanilla_flops_per_token(config: FathomConfig, sequence_length: int) -> float:
    """FLOPs per token of a forward pass of the vanilla decoder, without any mechanism."""
    layers = config.num_hidden_layers
    stack = sum(cost.flops for cost in layer_costs(config)) if config.host else layers * layer_flops(config)
    return stack + _attention(config, sequence_length, [1] * layers) + head_flops(config)


def flops_per_token(config: FathomConfig, sequence_length: int) -> float:
    """FLOPs per token of decoding with the mechanisms, counting all iterations up to `max_trips` as if no token
    halted."""
    return _forward_flops(as_decoded(config), sequence_length)


def _forward_flops(config: FathomConfig, sequence_length: int) -> float:
    attention = _attention(config, sequence_length, attention_reads(config))
    return head_flops(config) + _linear_flops(config) + attention


def training_flops_per_token(config: FathomConfig, sequence_length: int) -> float:
    """Mean FLOPs per token of a training step, forward and backward."""
    return training_flops_range(config, sequence_length)[1]


def training_flops_range(config: FathomConfig, sequence_length: int) -> tuple[float, float, float]:
    """Minimum, mean and maximum FLOPs per token of a training step, forward and backward."""
    shares, draws = zip(*_draws(config), strict=True)
    costs = [_training_flops(drawn, sequence_length, rounds) for drawn, rounds in draws]
    return min(costs), _mean(costs, shares), max(costs)


def training_visits(config: FathomConfig) -> tuple[float, int]:
    """How often a token passes through a layer in one training forward pass: mean and maximum."""
    shares, draws = zip(*_draws(config), strict=True)
    found = [sum(_passes(drawn, rounds)) for drawn, rounds in draws]
    return _mean(found, shares), max(found)


def kept_visits(config: FathomConfig) -> int:
    """The maximum number of a token's passes through a layer for which a training step keeps activations."""
    passes = [_passes(drawn, rounds) for _, (drawn, rounds) in _draws(config)]
    return max(sum(each[len(each) - _kept(config, len(each)) :]) for each in passes)


def _draws(config: FathomConfig) -> list[tuple[float, tuple[FathomConfig, int]]]:
    """Every number of iterations that a training step may make, with the fewest and the most solver rounds; and its
    share of steps. The cost is linear in the rounds, which are drawn uniformly, so the mean over this list is that of a
    run."""
    recurrence = recurrence_class(config)
    shares, rounds = recurrence.training_shares(config), recurrence.training_rounds(config)
    return [(share, (_of_trips(config, trips), n)) for trips, share in shares.items() for n in rounds]


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    """The mean of values weighted by their shares; a plain mean if all shares are equal, to avoid rounding."""
    if len(set(shares)) == 1:
        return sum(values) / len(values)
    return sum(v * share for v, share in zip(values, shares, strict=True)) / sum(shares)


def _passes(config: FathomConfig, rounds: int) -> list[int]:
    """The number of layer visits in each pass of the Jacobi solver; without the solver, all iterations count as one
    pass."""
    sizes = [config.num_hidden_layers * size for size in _stages(config, rounds)]
    return sizes or [sum(len(trip) for trip in plan(config))]


def _stages(config: FathomConfig, rounds: int) -> list[int]:
    """The number of iterations that each pass of the Jacobi solver holds side by side; empty without the solver."""
    recurrence = recurrence_class(config)
    trips = recurrence.trips_of(config)
    if recurrence.sees(config).depth_parallel or trips == 1:
        return []
    if recurrence.foresees(config):
        return [trips]
    return [*range(1, trips), *[trips] * (rounds + 1)]


def _training_flops(config: FathomConfig, sequence_length: int, rounds: int) -> float:
    """FLOPs of training per token; n Jacobi rounds of K + 1 iterations cost Σ m + (n + 1)(K + 1) forward passes, and
    attention Σ m² + (n + 1)(K + 1)²."""
    sizes = _stages(config, rounds)
    penalty = recurrence_class(config).penalty_flops(config, sequence_length)
    beyond = mechanism_cost(config).training_flops
    if not sizes:
        layers = 3 * (_forward_flops(config, sequence_length) - head_flops(config))
        again = _scores_again(config, sequence_length) - _unread(config, sequence_length)
        return layers + loss_flops(config) + again + beyond + penalty
    trips, kept = sizes[-1], _kept(config, len(sizes))
    trip = _linear_flops(_of_trips(config, 1))
    between = _linear_flops(config) - trips * trip  # for all trips: gates, mixtures
    # A bias on keys is one more channel of queries, keys and values.
    wider = 1 + (recurrence_class(config).key_bias is not Recurrence.key_bias) / config.head_dim
    total = loss_flops(config) + penalty
    for number, size in enumerate(sizes, 1):
        last, times = number == len(sizes), 3 if number > len(sizes) - kept else 1  # forward only
        fed = 0.0 if last else min(size, trips - 1) / (trips - 1)  # the last pass makes no further input
        reads = size * size * (wider if size > 1 else 1)
        attention = _attention(config, sequence_length, [reads] * config.num_hidden_layers)
        total += times * (size * trip + fed * between + attention) + (fed * beyond if times > 1 else 0.0)
    return total


def _kept(config: FathomConfig, passes: int) -> int:
    """The number of passes of the Jacobi solver that gradients flow through."""
    return min(recurrence_class(config).kept_passes(config) or passes, passes)


def _scores_again(config: FathomConfig, sequence_length: int) -> float:
    """The extra FLOPs of view DUO: the backward pass recomputes attention in iterations that read earlier ones."""
    first, *later = plan(config)
    if not later or recurrence_class(config).sees(config) is not View.DUO:
        return 0.0
    reads = list(attention_reads(config))
    for visit in first:
        reads[visit.layer] -= 1
    return _attention(config, sequence_length, reads) / 2


def _unread(config: FathomConfig, sequence_length: int) -> float:
    """The FLOPs of backward passes that a fed pause saves: no iteration reads the output of an earlier one, so in
    these the last layer has no gradients beyond its keys and values. A loss that balances experts reads every router,
    and thus all but the experts."""
    recurrence, (*earlier, _) = recurrence_class(config), plan(config)
    if not recurrence.foresees(config) or config.recurrence_options.get("early_loss"):
        return 0.0
    last, reads = config.num_hidden_layers - 1, range(1, len(earlier) + 1)  # in view DUO, the only one here
    if config.host:
        layer = layer_costs(config)[last]
        if layer.idle:  # a family may balance its experts
            return 0.0
        flops, stored = layer.flops, layer.stored
    elif config.experts and config.router_aux_loss_coef:
        return 4 * len(earlier) * config.hidden_size * (3 if config.gated_mlp else 2) * config.intermediate_size
    else:
        flops, stored = float(layer_flops(config)), layer_cache_bytes(config, 1)
    scores = _attention(config, sequence_length, [0] * last + [sum(reads)])
    return 2 * (len(earlier) * (flops - 2 * config.hidden_size * stored) + scores)


def _linear_flops(config: FathomConfig) -> float:
    """FLOPs of the layers in all iterations and of the mechanisms, without the head and attention scores."""
    flops = config.num_hidden_layers * layer_flops(config) + mechanism_cost(config).flops
    if config.host:  # a recurrence counts every visit as one of Fathom's own layers
        costs = layer_costs(config)
        flops += sum(costs[visit.layer].flops - layer_flops(config) for trip in plan(config) for visit in trip)
    return flops


def as_decoded(config: FathomConfig) -> FathomConfig:
    """The configuration for decoding, with the iterations that `max_trips` allows; training makes all iterations."""
    return config if config.max_trips is None else _of_trips(config, config.max_trips)


def _of_trips(config: FathomConfig, trips: int) -> FathomConfig:
    """A copy of the configuration with another number of iterations, if the recurrence has the option `trips`."""
    if "trips" not in config.recurrence_options:
        return config
    other = copy.copy(config)
    other.recurrence_options = {**config.recurrence_options, "trips": trips}
    return other


def cache_bytes_per_token(config: FathomConfig, bytes_per_scalar: int = 2) -> int:
    """Cache bytes per token: keys and values, or latents, in every layer and iteration up to `max_trips`. A layer's
    state is as large for every text, and not counted."""
    config = as_decoded(config)
    own = layer_cache_bytes(config, bytes_per_scalar)
    held = config.num_hidden_layers * own + mechanism_cost(config, bytes_per_scalar).cache_bytes
    if config.host:
        costs, visits = layer_costs(config), [visit for trip in plan(config) for visit in trip if not visit.borrows]
        held += sum(costs[visit.layer].stored * bytes_per_scalar - own for visit in visits)
    return held

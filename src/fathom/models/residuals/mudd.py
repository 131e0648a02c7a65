"""`mudd` (multiway dynamic dense connections): layers read sums of all earlier layers' outputs, weighted for each token
and each way (query, key, value, residual).

X_0 are the embeddings, X_i is the output of layer i - 1, and N divides by the root mean square. Layer i ≥ 1 reads, for
each way c of `ways` (query, key, value, residual):

    A^c = (gelu(N(X_i) W1) W2)^c + a^c          X̄^c = Σ_{j ≤ i} A^c_j X_j
    x   = Attention(norm(X̄^q), norm(X̄^k) ⊙ g_k, norm(X̄^v) ⊙ g_v) + X̄^r          X_{i+1} = x + MLP(norm(x))

The final norm reads such a sum with weights of its own, over way r alone. The gains g give each way its own norm. A way
that `ways` lacks reads the stream: X̄^r, or X_i without way r. W2 = 0, and a is a one-hot on X_i, so a pretrained model
starts as itself, to the last bit.

With `norm: prepost`, for deep models, N(X_j) ⊙ p_j are the sources and the sums are added to X_i:

    X̄^c = X_i + Σ_{j ≤ i} A^c_j N(X_j) ⊙ p_j          X̄^r = X_i + N(Σ_{j ≤ i} A^r_j N(X_j) ⊙ p_j) ⊙ g_r

p starts as 1, g_r as 0.001, and a as 0, so this too starts as the pretrained model.

With `last` n only the last n layers and the final norm read sums. With `sources: few` these are sums of the embeddings,
of what enters the middle layer, and of X_i.

In a loop each iteration ends with the final sum (`trips/walk.py`). Queries, keys and values read different inputs
unless `ways` is `r`; where they do, `trips/engines.py` refuses vLLM and SGLang, and `hosts/refusals.py` a family's own
layers. The mixed inputs go through the layer's projections (`modeling.py`). MUDDFormer's checkpoints do not open: the
decoder has one feed-forward width (`intermediate_size`) for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..axes.numerics import few, weighted_sum
from ..axes.roles import Cost, Mechanism, Residual, ResidualOptions, ResidualState, Ways, WriteContext
from ..decoder.norms import unit

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.visit import Visit

WAYS = "qkvr"
SOURCES = ("all", "few")
NORM_PLACES = ("none", "prepost")
STREAM_GAIN = 1e-3
"""The first value of g_r."""


@dataclass(frozen=True)
class MuddOptions(ResidualOptions):
    """Options of `mudd`."""

    ways: str = WAYS
    """The inputs that are mixed: letters of `qkvr` for query, key, value and the residual stream."""
    last: int | None = None
    """Number of last layers that read sums; by default all but the first, which has one source."""
    sources: str = "all"
    """Sources: `all` earlier layers' outputs, or a `few`: the embeddings, the middle layer's input, the newest
    output."""
    hidden: int | None = None
    """Inner width of the MLP that computes the weights; by default the number of weights."""
    norm: str = "none"
    """`prepost` norms each source, and the sum for the residual stream, and adds the sums to the newest output: for
    models of some 24 layers or more."""

    def check(self, config: DecoderConfig) -> None:
        """Refuse invalid values of `ways`, `last`, `sources`, `hidden` and `norm`."""
        super().check(config)
        ordered, layers = "".join(way for way in WAYS if way in self.ways), config.num_hidden_layers
        self.require("ways", bool(self.ways) and ordered == self.ways, f"be some of the letters {WAYS}, in order")
        within = self.last is None or 1 <= self.last <= layers
        self.require("last", within, f"be between 1 and {layers} (the number of layers)")
        self.require_one_of("sources", SOURCES)
        self.require("hidden", self.hidden is None or self.hidden >= 1, "be at least 1")
        self.require_one_of("norm", NORM_PLACES)


def mixing(config: DecoderConfig, layer: int) -> tuple[str, int]:
    """The ways (query, key, value, residual) for which a layer mixes sources, and its number of sources; the final norm
    counts as a last layer."""
    options, layers = MuddOptions.of(config), config.num_hidden_layers
    first = 1 if options.last is None else max(1, layers - options.last)
    ways = options.ways if layer < layers else "r"
    return (ways, len(sources_of(config, layer))) if first <= layer else ("", 0)


def sources_of(config: DecoderConfig, layer: int) -> list[int]:
    """The indices j of the layer outputs X_j that a layer may read, oldest first."""
    return [j for j in range(layer) if is_kept(config, j)] + [layer]


def is_kept(config: DecoderConfig, layer: int) -> bool:
    """Whether a layer's input is kept as a source for later layers."""
    return MuddOptions.of(config).sources == "all" or layer in (0, config.num_hidden_layers // 2)


def norms_of(config: DecoderConfig, layer: int) -> tuple[bool, bool]:
    """Whether a layer's input is normed before it becomes a source, and whether the sum for the residual way is
    normed."""
    (ways, _), normed = mixing(config, layer), MuddOptions.of(config).norm == "prepost"
    return normed and (bool(ways) or is_kept(config, layer)), normed and "r" in ways


class Gain(nn.Module):
    """A learned factor for each channel, like the weight of a norm."""

    def __init__(self, width: int, start: float = 1.0) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each channel of `[B, T, hidden_size]` by its factor."""
        return x * self.weight


class Weigher(nn.Module):
    """The MLP that computes a layer's mixing weights for each token from the layer's input."""

    def __init__(self, width: int, inner: int, made: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, made, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The mixing weights `[B, T, made]` from a layer's input `[B, T, hidden_size]`."""
        return self.w2(nn.functional.gelu(self.w1(unit(x, self.eps).to(x.dtype))))


class Mudd(Residual):
    """MUDD connections; the state is the stream, then the sources that later layers read, oldest first."""

    no_weight_decay = ("static",)
    adds = True

    def __init__(self, config: DecoderConfig, sublayer: int) -> None:
        super().__init__(config, sublayer)
        layer, mlp = divmod(sublayer, 2)
        self.begins_layer, self.keeps = not mlp, is_kept(config, layer)
        self.ways, sources = ("", 0) if mlp else mixing(config, layer)
        self.multiway = not set(self.ways) <= {"r"}
        width, made, self.eps = config.hidden_size, len(self.ways) * sources, config.rms_norm_eps
        self.key_gain = Gain(width) if "k" in self.ways else None
        self.value_gain = Gain(width) if "v" in self.ways else None
        if self.ways:
            self.weigher = Weigher(width, MuddOptions.of(config).hidden or made, made, self.eps)
            self.static = nn.Parameter(torch.empty(len(self.ways), sources))  # a
        self.added = MuddOptions.of(config).norm == "prepost"
        norms_source, norms_stream = (False, False) if mlp else norms_of(config, layer)
        self.source_gain = Gain(width) if norms_source else None
        self.stream_gain = Gain(width, STREAM_GAIN) if norms_stream else None

    def init_weights(self, std: float) -> None:
        """Initialise W2 to 0 and the static weights to 1 on the newest output, or to 0 with `norm: prepost`."""
        for gain in (self.key_gain, self.value_gain, self.source_gain, self.stream_gain):
            if gain is not None:
                init.constant_(gain.weight, gain.start)
        if not self.ways:
            return
        init.normal_(self.weigher.w1.weight, std=self.weigher.w1.in_features**-0.5)
        init.zeros_(self.weigher.w2.weight)
        newest = torch.eye(self.static.shape[1])[-1] * (not self.added)
        init.copy_(self.static, newest.expand_as(self.static))

    def read(self, state: ResidualState) -> tuple[Tensor | Ways, ResidualState, WriteContext]:
        """The weighted sums that a layer's attention reads; the MLP reads the stream as it is."""
        newest, *history = state
        if not self.begins_layer:
            return newest, state, None
        source = newest if self.source_gain is None else self.normed(newest, self.source_gain)
        mixed = self.mixed(newest, (*history, source)) if self.ways else {}
        stream = mixed.get("r", newest)
        state = (stream, *history, source) if self.keeps else (stream, *history)
        if not self.multiway:
            return stream, state, None
        return (mixed.get("q", stream), mixed.get("k", stream), mixed.get("v", stream)), state, None

    def normed(self, x: Tensor, gain: Gain) -> Tensor:
        """N(x) ⊙ g."""
        return gain(unit(x, self.eps).to(x.dtype))

    def mixed(self, newest: Tensor, sources: Sequence[Tensor]) -> dict[str, Tensor]:
        """The mixed input X̄ for each way (query, key, value, residual), `[B, T, hidden_size]` each. A later iteration
        of a loop may have fewer sources: the newest ones."""
        weights = self.weigher(newest).unflatten(-1, self.static.shape) + self.static
        sums = self.sums(weights[..., -len(sources) :], sources)  # of weights [B, T, ways, sources]
        if self.stream_gain is not None:
            sums["r"] = self.normed(sums["r"], self.stream_gain)
        return {way: newest + x for way, x in sums.items()} if self.added else sums

    def sums(self, weights: Tensor, sources: Sequence[Tensor]) -> dict[str, Tensor]:
        """The weighted sum of sources for each way (query, key, value, residual)."""
        if few(sources[-1]):
            sums = torch.matmul(weights, torch.stack(tuple(sources), 2)).unbind(2)
            return dict(zip(self.ways, sums, strict=True))
        newest_first = [weights[..., j, None].unbind(2) for j in reversed(range(len(sources)))]
        return {
            way: weighted_sum([source[c] for source in newest_first], sources[::-1]) for c, way in enumerate(self.ways)
        }

    def write(self, state: ResidualState, update: Tensor, context: WriteContext) -> ResidualState:
        """Write to the stream."""
        return (state[0] + update, *state[1:])

    def gained(self, ways: Ways) -> Ways:
        """Multiply the inputs of keys and of values by gains of their own."""
        query, key, value = ways
        return (
            query,
            key if self.key_gain is None else self.key_gain(key),
            value if self.value_gain is None else self.value_gain(value),
        )


def cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """Cost: the MLP that computes weights, and a weighted sum for each way; an iteration's layer outputs X_j stay in
    memory."""
    options, width, layers = MuddOptions.of(config), config.hidden_size, config.num_hidden_layers
    added = options.norm == "prepost"
    trips = [[visit.layer for visit in trip] for _, trip in groupby(visits, lambda visit: visit.trip)]
    total = Cost()
    for layer in range(layers + 1):
        ways, sources = mixing(config, layer)
        made, gains = len(ways) * sources, sum(way in ways for way in "kv")
        inner = options.hidden or made
        vectors = width * inner + inner * made
        normed = sum(norms_of(config, layer))
        total += Cost(parameters=(vectors + made + gains * width if ways else 0) + normed * width)
        for trip in trips:
            if layer < layers and layer not in trip:
                continue
            total += Cost(elementwise_flops=4 * normed * width)
            if not ways:
                continue
            read = min(sources, sum(is_kept(config, j) for j in trip if j < layer) + 1)
            norms = len(set(ways) & set("qkv")) - (ways[:3] == "qkv")  # in addition to the layer's own norm
            total += Cost(
                flops=2 * vectors + 2 * len(ways) * read * width,
                elementwise_flops=width * (4 + gains + 4 * norms + added * len(ways)) + made,
                io_bytes=scalar * width * len(ways) * (2 * read + 1),
            )
    alive = max(sum(is_kept(config, layer) for layer in trip) for trip in trips)
    return total + Cost(transient_bytes=scalar * width * alive)


MUDD = Mechanism(
    name="mudd",
    axis="residual",
    summary="sums over all layer outputs, weighed anew for queries, keys, values and the stream",
    paper="arXiv 2502.12170",
    build=Mudd,
    cost=cost,
    options=MuddOptions,
    closed={},
)

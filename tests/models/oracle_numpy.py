"""Every backbone, recurrence, residual and mixer together, one slot after another, in numpy's float64.

Written from the equations of `docs/`. A model is a dictionary (its configuration) and arrays by the names of its
checkpoint; nothing of Fathom, torch or transformers is imported. One row of a batch is read at a time, and padding
never enters, so what a batch, a cache or a mask does can only agree by being right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
erf = np.vectorize(math.erf, otypes=[np.float64])


class Token(NamedTuple):
    """One token to be read."""

    column: int
    """Its place in the batch's table of ids; sliding windows are measured in columns."""
    position: int
    """Its index among rotations, or in the table of learned positions."""
    x: Array
    """Its embedding before `embedding_scale`, `[d]`."""


class Slot(NamedTuple):
    """What one layer keeps of one trip of one token."""

    column: int
    trip: int
    key: Array  # [H_kv, D]
    value: Array  # [H_kv, D]
    bias: float
    """Added to the logit of every query that reads it."""


@dataclass
class Step:
    """A trip that is planned: its input and key bias, and whether the token makes it."""

    x: Array
    bias: float = 0.0
    alive: bool = True
    entry: Array | float = 0.0
    """What entered the layers that repeat, once it was made."""


class Row:
    """What one row of a batch has read so far: its slots by layer, and the last trip of every token."""

    def __init__(self, layers: int) -> None:
        self.slots: list[list[Slot]] = [[] for _ in range(layers)]
        self.halt: dict[int, int] = {}

    def copy(self) -> Row:
        """A row that goes its own way."""
        other = Row(0)
        other.slots, other.halt = [list(slots) for slots in self.slots], dict(self.halt)
        return other

    def crop(self, columns: int) -> None:
        """Forget the tokens from a column on."""
        self.slots = [[slot for slot in slots if slot.column < columns] for slots in self.slots]
        self.halt = {column: trip for column, trip in self.halt.items() if column < columns}


@dataclass
class Walk:
    """The trips of one token: what was planned, and what the head reads in the end."""

    steps: list[Step]
    readout: Array | float = 0.0
    share: Array | None = None
    """`ponder3`: the router's output."""
    reach: float = 1.0
    """`latent_cot`: what is left for later trips."""
    thoughts: Array | float = 0.0
    """`latent_cot`: what the trips add up to."""
    begun: Array | None = None
    """`latent_cot`: the first trip's hidden state."""
    first: Array | None = None
    """The stream that the first trip ended in."""
    left: float = 1.0
    """`loop` with an exit gate: the probability of further trips."""
    position: int = 0
    """The token's."""

    @property
    def trips(self) -> int:
        """How many the token makes."""
        return sum(step.alive for step in self.steps)


def softmax(x: Array, axis: int = -1) -> Array:
    """Over one axis."""
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def sigmoid(x: Array) -> Array:
    """Of numbers of any sign."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def gelu(x: Array) -> Array:
    """x Φ(x)."""
    return x * 0.5 * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    """`gelu` as GPT-2 and Gemma approximate it."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def capped(x: Array, cap: float | None) -> Array:
    """c · tanh(x / c), or x without a cap."""
    return x if cap is None else cap * np.tanh(x / cap)


class Held(NamedTuple):
    """The first passes of a solver, as they are by weights that stay while others move."""

    passes: int
    oracle: Oracle
    tokens: Sequence[Token]


# --- residuals: the stream of one trip --------------------------------------------------------------------------------


def between(without: Array, result: Array, options: dict[str, Any]) -> Array:
    """a + λ (b - a)."""
    assert options["blend"] != "learned"
    return without + options["blend"] * (result - without)


class Plain:
    """One sum."""

    trip = 0

    def __init__(self, oracle: Oracle, x: Array) -> None:
        self.o, self.x = oracle, x

    def weight(self, sublayer: int, name: str) -> Array:
        """A parameter of a sub-layer's residual; the read before the final norm counts as one more sub-layer."""
        layer, half = divmod(sublayer, 2)
        last = layer == self.o.layers
        place = "model.final_residual" if last else f"model.layers.{layer}.{('attn', 'mlp')[half]}_residual"
        if self.trip and self.o.repeats(layer) and self.o.residual.get("per_visit"):
            place = f"model.layers.{layer}.again.{self.trip - 1}.{('attn', 'mlp')[half]}"
        return self.o.w[f"{place}.{name}"]

    def read(self, sublayer: int) -> Any:
        """What the sub-layer's norm gets; three of it where queries, keys and values read different things."""
        return self.x

    def gained(self, sublayer: int, ways: list[Array]) -> list[Array]:
        """What queries, keys and values are made of, of what the layer's norm made."""
        return ways

    def write(self, sublayer: int, update: Array) -> None:
        """Take in what the sub-layer made."""
        self.x = self.x + update

    def blended(self, sublayer: int, x: Array, found: Array) -> Array:
        """x + λ (h - x), or (1 + g) x + λ h."""
        if self.o.residual["blend"] != "learned":
            return between(x, found, self.o.residual)
        return (1 + self.weight(sublayer, "blend_gates.gain")) * x + self.weight(sublayer, "blend_gates.mix") * found


class BranchGain(Plain):
    """A gain on every update; in further trips of its own, a factor."""

    def write(self, sublayer: int, update: Array) -> None:
        """Add its multiple."""
        further = self.trip and self.o.repeats(sublayer // 2) and self.o.residual["per_visit"]
        super().write(sublayer, ((0 if further else 1) + self.weight(sublayer, "gates.gain")) * update)


class DenseFormer(Plain):
    """x = sum_j alpha_j X_j over raw block outputs, counted back from the newest."""

    def __init__(self, oracle: Oracle, x: Array) -> None:
        super().__init__(oracle, x)
        self.history = [x]

    def write(self, sublayer: int, update: Array) -> None:
        """After the MLP a block ends."""
        super().write(sublayer, update)
        if sublayer % 2 == 0:
            return
        self.history.append(self.x)
        if (sublayer // 2 + 1) % self.o.residual["period"] == 0:
            newest_first = self.history[::-1][:: self.o.residual["dilation"]]
            alpha = self.weight(sublayer, "alpha")[::-1]
            self.x = sum(a * x for a, x in zip(alpha, newest_first, strict=False))  # a later trip's history is shorter


class AttentionResiduals(Plain):
    """A learned query attends over the embeddings and sums, or snapshots, of blocks."""

    def __init__(self, oracle: Oracle, x: Array) -> None:
        super().__init__(oracle, x)
        self.snapshots = oracle.residual["variant"] == "snapshot"
        self.earlier = [x]
        self.current: Array | None = x if self.snapshots else None

    def read(self, sublayer: int) -> Array:
        """A weighted sum of un-normed sources."""
        sources = np.stack(self.earlier + ([] if self.current is None else [self.current]))
        query = self.weight(sublayer, "norm.weight") * self.weight(sublayer, "pseudo_query")
        scores = self.o.unit(sources) @ query
        if self.snapshots:
            scores[-1] += self.weight(sublayer, "recency_bias")[0]
        return self.blended(sublayer, self.x, softmax(scores) @ sources)

    def write(self, sublayer: int, update: Array) -> None:
        """Into the current sum; sums start anew with a block, the running stream never does."""
        super().write(sublayer, update)
        size = self.o.residual["block_size"]
        if not self.snapshots and sublayer % size == 0 and self.current is not None:
            self.earlier.append(self.current)
            self.current = None
        self.current = update if self.current is None else self.current + update
        if self.snapshots and (sublayer + 1) % size == 0:
            self.earlier.append(self.current)


class Delta(Plain):
    """What a learned query finds among earlier updates, or sums of them by block, is added to the stream."""

    def __init__(self, oracle: Oracle, x: Array) -> None:
        super().__init__(oracle, x)
        self.start = x
        self.blocks: list[list[Array]] = []

    def read(self, sublayer: int) -> Array:
        """The open block is no source."""
        if not self.blocks or sublayer == 2 * self.o.layers:
            return self.x
        closed = self.blocks[:-1] if self.o.residual["variant"] == "delta_block" else self.blocks
        sources = np.stack([self.start, *(sum(block) for block in closed)])
        found = sources[0]
        if len(sources) > 1:
            query = self.weight(sublayer, "norm.weight") * self.weight(sublayer, "pseudo_query")
            found = softmax(self.o.unit(sources) @ query) @ sources
        learned = self.o.residual["blend"] == "learned"
        return self.blended(sublayer, self.x, found) if learned else self.x + self.o.residual["blend"] * found

    def write(self, sublayer: int, update: Array) -> None:
        """`delta` has a block for each sub-layer."""
        super().write(sublayer, update)
        by_block = self.o.residual["variant"] == "delta_block"
        if not self.blocks or not by_block or sublayer % self.o.residual["block_size"] == 0:
            self.blocks.append([])
        self.blocks[-1].append(update)


class Mudd(Plain):
    """An MLP on what enters a layer weighs what entered earlier ones, way by way."""

    def __init__(self, oracle: Oracle, x: Array) -> None:
        super().__init__(oracle, x)
        self.kept: list[Array] = []

    def read(self, sublayer: int) -> Any:
        """Sums of the newest sources first; the MLP reads the stream."""
        layer, mlp = divmod(sublayer, 2)
        options, layers, newest = self.o.residual, self.o.layers, self.x
        if mlp:
            return self.x
        added = options["norm"] == "prepost"
        mixes = layer >= max(1, layers - (options["last"] or layers))
        keeps = layer < layers and (options["sources"] == "all" or layer in (0, layers // 2))
        source = newest
        if added and (mixes or keeps):
            source = self.weight(sublayer, "source_gain.weight") * self.o.unit(newest)
        sources, sums = [source, *self.kept[::-1]], {}
        if mixes:
            ways = options["ways"] if layer < layers else "r"
            hidden = gelu(self.weight(sublayer, "weigher.w1.weight") @ self.o.unit(newest))
            made = (self.weight(sublayer, "weigher.w2.weight") @ hidden).reshape(len(ways), -1)
            made = made + self.weight(sublayer, "static")
            for way, row in zip(ways, made, strict=True):
                sums[way] = sum(a * x for a, x in zip(row[::-1], sources, strict=False))
                if added and way == "r":
                    sums[way] = self.weight(sublayer, "stream_gain.weight") * self.o.unit(sums[way])
                sums[way] = sums[way] + newest * added
        stream = sums.pop("r", newest)
        if layer == layers:
            return stream
        if keeps:
            self.kept.append(source)
        self.x = stream
        return tuple(sums.get(way, stream) for way in "qkv")

    def gained(self, sublayer: int, ways: list[Array]) -> list[Array]:
        """Keys' and values' norms are others where they are mixed."""
        names = {1: "key_gain", 2: "value_gain"}
        layer, options = sublayer // 2, self.o.residual
        if layer < max(1, self.o.layers - (options["last"] or self.o.layers)):
            return ways
        mixed = [i for i in names if "qkv"[i] in options["ways"]]
        return [self.weight(sublayer, f"{names[i]}.weight") * x if i in mixed else x for i, x in enumerate(ways)]


class HyperConnections(Plain):
    """Several streams, mixed around every sub-layer by maps that depend on the token."""

    def __init__(self, oracle: Oracle, x: Array) -> None:
        super().__init__(oracle, np.tile(x, (oracle.residual["streams"], 1)))
        self.sum = x
        self.maps: dict[int, tuple[Array, Array]] = {}  # of each sub-layer, since a parallel layer reads twice first

    def read(self, sublayer: int) -> Array:
        """Sum_i H_pre[i] S_i; in the end the learned mean."""
        if sublayer == 2 * self.o.layers:
            return self.blended(sublayer, self.sum, softmax(self.weight(sublayer, "reduce_logits")) @ self.x)
        n, rounds = len(self.x), self.o.residual["sinkhorn_iterations"]
        z = self.o.unit(self.x.reshape(-1)) * self.weight(sublayer, "norm.weight")
        dynamic = self.weight(sublayer, "projection.weight") @ z
        if not rounds:
            dynamic = np.tanh(dynamic)
        parts = {"pre": dynamic[:n], "post": dynamic[n : 2 * n], "res": dynamic[2 * n :].reshape(n, n)}
        static = {"pre": "pre_logits", "post": "post_logits", "res": "residual_logits"}
        pre, post, res = (
            self.weight(sublayer, f"alpha_{name}") * part + self.weight(sublayer, static[name])
            for name, part in parts.items()
        )
        if rounds:
            pre, post, res = sigmoid(pre), 2 * sigmoid(post), balanced(res, rounds)
        self.maps[sublayer] = post, res
        return self.blended(sublayer, self.sum, pre @ self.x)

    def write(self, sublayer: int, update: Array) -> None:
        """S_i = sum_j H_res[i, j] S_j + H_post[i] F."""
        self.sum = self.sum + update
        post, mixing = self.maps[sublayer]
        self.x = mixing @ self.x + np.outer(post, update)


def balanced(logits: Array, rounds: int) -> Array:
    """Sinkhorn: rows, then columns."""
    m = np.maximum(np.exp(logits - logits.max()), 1e-12)
    for _ in range(rounds):
        m = m / np.maximum(m.sum(1, keepdims=True), 1e-12)
        m = m / np.maximum(m.sum(0, keepdims=True), 1e-12)
    return m


class ReleasedStreams(Plain):
    """Streams as DeepSeek-V4, V4.1, GLM-5.3 and Hy4 mix them: sums over streams written out."""

    def __init__(self, oracle: Oracle, x: Array) -> None:
        super().__init__(oracle, x)
        self.form: str = oracle.residual["form"]
        self.streams = [x] * oracle.residual["streams"]
        self.next_read = np.eye(len(self.streams))[0]  # deepseek_v41
        self.maps: dict[int, tuple[Array, ...]] = {}

    def collapsed(self, weights: Array) -> Array:
        """A weighted sum of the streams."""
        return sum(w * s for w, s in zip(weights, self.streams, strict=True))

    def read(self, sublayer: int) -> Array:
        """By the token's own weights, or those of the sub-layer before."""
        n, final, carried = len(self.streams), sublayer == 2 * self.o.layers, self.form == "deepseek_v41"
        if final and self.form == "glm5_next":
            return between(self.x, sum(self.streams) / n, self.o.residual)
        if final and carried:
            return between(self.x, self.collapsed(self.next_read), self.o.residual)
        made = self.weight(sublayer, "projection.weight") @ self.o.unit(np.concatenate(self.streams))
        sizes = [n] if final else [n, n, n * n][: len(self.weight(sublayer, "scale"))]
        shift, parts = self.weight(sublayer, "shift"), []
        for scale, size in zip(self.weight(sublayer, "scale"), sizes, strict=True):
            at = sum(len(part) for part in parts)
            parts.append(scale * made[at : at + size] + shift[at : at + size])
        pre = sigmoid(parts[0]) + 1e-6
        x = self.collapsed(self.next_read if carried else pre)
        if not final:
            post = 2 * sigmoid(parts[1]) + (1e-6 if self.form == "hy_v4" else 0.0)
            mixing = np.eye(n) if self.form == "hy_v4" else doubly(parts[2].reshape(n, n), self.o.residual)
            self.maps[sublayer] = post, mixing, pre
        return between(self.x, x, self.o.residual)

    def write(self, sublayer: int, update: Array) -> None:
        """S_k = sum_j H[j, k] S_j + post_k F."""
        super().write(sublayer, update)
        post, mixing, self.next_read = self.maps[sublayer]
        n = len(self.streams)
        self.streams = [sum(mixing[j, k] * self.streams[j] for j in range(n)) + post[k] * update for k in range(n)]


def doubly(logits: Array, options: dict[str, Any]) -> Array:
    """A softmax over rows, then columns and rows divided by their sums."""
    m = np.stack([softmax(row) for row in logits]) + 1e-6
    m = m / (m.sum(0) + 1e-6)
    for _ in range(options["sinkhorn_iterations"] - 1):
        m = m / (m.sum(1, keepdims=True) + 1e-6)
        m = m / (m.sum(0) + 1e-6)
    return m


class GatedStreams(Plain):
    """Qwen4-Exp's: normed streams, gated channel by channel, and a weight for each to write."""

    def __init__(self, oracle: Oracle, x: Array) -> None:
        super().__init__(oracle, x)
        self.streams = np.tile(x, (oracle.residual["streams"], 1))
        self.injects: dict[int, Array] = {}

    def read(self, sublayer: int) -> Array:
        """Their mean."""
        n = len(self.streams)
        z = self.o.unit(self.streams).reshape(-1) * (1 + self.weight(sublayer, "norm_weight"))
        inner = self.weight(sublayer, "down.weight") @ z / n
        gates = sigmoid(self.weight(sublayer, "up.weight") @ (inner * sigmoid(inner)))
        if sublayer < 2 * self.o.layers:
            self.injects[sublayer] = 2 * sigmoid(self.weight(sublayer, "inject.weight") @ z / n)
        return between(self.x, (gates * z).reshape(n, -1).mean(0), self.o.residual)

    def write(self, sublayer: int, update: Array) -> None:
        """Each by its weight."""
        super().write(sublayer, update)
        self.streams = self.streams + np.outer(self.injects[sublayer], update)


class NormedPooling(Plain):
    """Inkling-2's: normed sums of blocks, one read for each query."""

    def __init__(self, oracle: Oracle, x: Array) -> None:
        super().__init__(oracle, x)
        self.blocks, self.open = [x], np.array([])

    def queries(self, sublayer: int) -> int:
        """Three for a layer of full attention, none for the first sub-layer."""
        layer, mlp = divmod(sublayer, 2)
        if not sublayer:
            return 0
        whole = layer < self.o.layers and not mlp and self.o.config["layer_types"][layer] == "full_attention"
        return 3 if whole and self.o.residual["queries"] == 3 else 1

    def read(self, sublayer: int) -> Any:
        """A softmax over the blocks for each query."""
        sources = self.o.unit(np.stack([*self.blocks, *([self.open] if len(self.open) else [])]))
        if not (count := self.queries(sublayer)):
            return self.x
        found = []
        for query in self.weight(sublayer, "query"):
            h = softmax(sources @ query / math.sqrt(len(query))) @ sources
            found.append(between(self.x, h, self.o.residual))
        return tuple(found) if count == 3 else found[0]

    def gained(self, sublayer: int, ways: list[Array]) -> list[Array]:
        """Keys' and values' norms have gains of their own."""
        if self.queries(sublayer) < 3:
            return ways
        names = ("gains.key", "gains.value")
        return [ways[0], *(self.weight(sublayer, name) * x for name, x in zip(names, ways[1:], strict=True))]

    def write(self, sublayer: int, update: Array) -> None:
        """Into the open block."""
        super().write(sublayer, update)
        if len(self.open) and sublayer % self.o.residual["block_size"]:
            self.open = self.open + update
            return
        self.blocks += [self.open] if len(self.open) else []
        self.open = update


def attention_residuals(oracle: Oracle, x: Array) -> Plain:
    """By variant."""
    variant = oracle.residual["variant"]
    if variant == "inkling2":
        return NormedPooling(oracle, x)
    return (Delta if variant.startswith("delta") else AttentionResiduals)(oracle, x)


def hyper_connections(oracle: Oracle, x: Array) -> Plain:
    """By form."""
    kinds = {"paper": HyperConnections, "qwen4_exp": GatedStreams}
    return kinds.get(oracle.residual["form"], ReleasedStreams)(oracle, x)


STREAMS: dict[str, Callable[[Oracle, Array], Plain]] = {
    "plain": Plain,
    "denseformer": DenseFormer,
    "attention_residuals": attention_residuals,
    "hyper_connections": hyper_connections,
    "mudd": Mudd,
    "branch_gain": BranchGain,
}


# --- the model --------------------------------------------------------------------------------------------------------


Angles = tuple[Array, Array]


def rotations(theta: float, width: int, length: int) -> Angles:
    """Cosines and sines of every position for the `width` channels that are turned, `[length, width / 2]`."""
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, width, 2) / width)
    return np.cos(angles), np.sin(angles)


@dataclass
class Oracle:
    """A model."""

    config: dict[str, Any]
    w: dict[str, Array]
    """Its weights, float64, by name."""
    angles: dict[str, Angles]
    """By layer type: cosines and sines by position, `[positions, R / 2]`, as the family has them: rounded to float32.
    Compare `rotations`."""
    margin: float = field(default=math.inf)
    """How near any yes or no (a threshold, the last of the top k) came to the other answer."""

    def __post_init__(self) -> None:
        self.layers, self.eps = self.config["num_hidden_layers"], self.config["rms_norm_eps"]
        self.mixer, self.residual, self.options = (
            self.config[f"{axis}_options"] for axis in ("mixer", "residual", "recurrence")
        )
        self.recurrence: str = self.config["recurrence"]
        default = {"loop": "same", "once": "same", "adaponder": "same", "latent_cot": "duo"}
        self.view = self.options.get("view") or default.get(self.recurrence, "all")
        self.prelude, self.coda = self.options.get("prelude", 0), self.options.get("coda", 0)
        self.table = self.config["embedding_scale"] * self.w["model.embed_tokens.weight"]
        tied = self.config["tie_word_embeddings"]
        self.head = self.w["model.embed_tokens.weight" if tied else "lm_head.weight"]
        scale = self.config["attention_scale"]
        self.scale = 1 / math.sqrt(self.config["head_dim"]) if scale is None else scale

    @property
    def depth(self) -> int:
        """Trips beyond the first, without a budget."""
        return self.options.get("trips", 1) - 1

    def repeats(self, layer: int) -> bool:
        """Whether every trip goes through a layer."""
        return self.prelude <= layer < self.layers - self.coda

    def borrows(self, layer: int, trip: int) -> bool:
        """Whether a visit reads what the layer's first one made, and makes no keys and values."""
        return trip > 0 and self.repeats(layer) and self.options.get("kv") == "first"

    # --- sub-layers ---

    def unit(self, x: Array) -> Array:
        """x / rms(x)."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)

    def rms(self, x: Array, name: str) -> Array:
        """RMS norm by the weight of that name; mechanisms have it whatever the backbone's norm."""
        return self.unit(x) * self.w[f"{name}.weight"]

    def normed(self, x: Array, name: str) -> Array:
        """The backbone's norm, by the parameters of that name."""
        kind = self.config["norm"]
        if kind in ("layer", "layer_plain"):
            x = self.unit(x - x.mean(-1, keepdims=True))
            return x if kind == "layer_plain" else x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]
        return self.unit(x) * (self.w[f"{name}.weight"] + (kind == "rms_offset"))

    def logits(self, h: Array) -> Array:
        """What the head says, `[..., V]`."""
        return capped(h @ self.head.T / self.config["logits_scaling"], self.config["final_logit_softcapping"])

    def linear(self, x: Array, name: str) -> Array:
        """With a bias if the model has one."""
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def rotate(self, x: Array, layer: int, position: int) -> Array:
        """`[heads, D]`: pairs are (i, i + R/2) of the first R channels; the others stay."""
        where = self.config["no_rope_layers"]
        if self.config["positions"] == "learned" or (where is not None and not where[layer]):
            return x
        cos, sin = (table[position] for table in self.angles[self.config["layer_types"][layer]])
        half = len(cos)
        a, b = x[:, :half], x[:, half : 2 * half]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[:, 2 * half :]], -1)

    def mlp(self, x: Array, name: str) -> Array:
        """With a gate or without; of experts, those with the k largest logits of the router."""
        if self.config["experts"] and ".experts." not in name:
            logits = self.linear(x, f"{name}.router")
            best = sorted(range(len(logits)), key=lambda e: -logits[e])[: self.config["experts_per_token"]]
            shares = np.exp(logits[best] - logits[best[0]])
            made = [self.mlp(x, f"{name}.experts.{e}") for e in best]
            return sum(share * one for share, one in zip(shares / shares.sum(), made, strict=True))
        act, up = ACTIVATIONS[self.config["hidden_act"]], self.linear(x, f"{name}.up_proj")
        inner = act(self.linear(x, f"{name}.gate_proj")) * up if self.config["gated_mlp"] else act(up)
        return self.linear(inner, f"{name}.down_proj")

    def turns_alike(self) -> bool:
        """Whether all layers rotate by the same angles, so that scores between layers see no position."""
        where, kinds = self.config["no_rope_layers"] or [1] * self.layers, self.config["layer_types"]
        return len({self.angles[kinds[i]][1].tobytes() if where[i] else b"" for i in range(self.layers)}) == 1

    def project(self, ways: Sequence[Array], layer: int, position: int) -> tuple[Array, ...]:
        """Query `[H, D]`, key and raw value `[H_kv, D]`, each of an input of its own; and what mixers score, a query
        and a key."""
        name, width, over = f"model.layers.{layer}.self_attn", self.config["head_dim"], self.config["qk_norm"]
        query, key, value = (self.linear(x, f"{name}.{part}_proj") for x, part in zip(ways, "qkv", strict=True))
        if over == "full":
            query, key = self.normed(query, f"{name}.q_norm"), self.normed(key, f"{name}.k_norm")
        query, key, value = (part.reshape(-1, width) for part in (query, key, value))
        late = self.config["k_norm_position"] == "after_rope"
        if over == "head":
            query = self.normed(query, f"{name}.q_norm")
            key = key if late else self.normed(key, f"{name}.k_norm")
        still = query, key
        query, key = self.rotate(query, layer, position), self.rotate(key, layer, position)
        key = self.normed(key, f"{name}.k_norm") if late else key
        scored = (query, key) if late or self.config["positions"] == "learned" or self.turns_alike() else still
        return query, key, value, *scored

    def attend(self, query: Array, slots: Sequence[Slot], layer: int) -> Array:
        """Attention of one query over slots; a slot's bias is added to what the cap has left."""
        group = len(query) // self.config["num_key_value_heads"]
        keys = np.repeat(np.array([slot.key for slot in slots]), group, 1)  # [N, H, D]
        values = np.repeat(np.array([slot.value for slot in slots]), group, 1)
        logits = capped(np.einsum("hd,nhd->hn", query, keys) * self.scale, self.config["attn_logit_softcapping"])
        weights = softmax(logits + np.array([slot.bias for slot in slots]))
        heads = np.einsum("hn,nhd->hd", weights, values)
        return self.linear(heads.reshape(-1), f"model.layers.{layer}.self_attn.o_proj")

    # --- norms around sub-layers ---

    def before(self, x: Array, layer: int, half: int) -> Array:
        """The input of attention (half 0) or of the MLP (half 1)."""
        names = {
            "before": ("input_layernorm", "post_attention_layernorm"),
            "both": ("input_layernorm", "pre_feedforward_layernorm"),
        }.get(self.config["norm_placement"])
        return x if names is None else self.normed(x, f"model.layers.{layer}.{names[half]}")

    def update(self, x: Array, layer: int, half: int) -> Array:
        """What attention or the MLP adds to the stream."""
        if self.config["norm_placement"] != "before":
            name = ("post_attention_layernorm", "post_feedforward_layernorm")[half]
            x = self.normed(x, f"model.layers.{layer}.{name}")
        return self.config["residual_multiplier"] * x

    # --- mixers ---

    def sources(self, layer: int, trip: int, own: dict[tuple[int, int], tuple[Array, Array]]) -> set[tuple[int, int]]:
        """The (layer, trip) of this token that a mixer reads beside its own value."""

        def ran(other: int, k: int) -> tuple[int, int]:
            alone = other < self.prelude or self.borrows(other, k)
            return (other, 0) if alone else (other, k)  # the prelude stands for itself in every trip

        if self.config["mixer"] == "value_residual":
            return {ran(0, trip)} if layer else set()
        if self.config["mixer"] == "value_gain":
            return set()
        stride, window = self.mixer["stride"], self.mixer["recent_layers"]

        def grid(top: int) -> list[int]:
            return [i for i in range(top) if i % stride == 0 or i >= top - window]

        own_trips = self.recurrence == "loop" and self.options["kv"] == "own"
        rule = self.mixer["across_trips"] or ("same_layer" if own_trips else "none")
        if rule == "first":  # the first time that a source was passed, whenever that was, of all passed before
            passed = {i for i in range(self.layers) if (i in grid(self.layers) and trip) or i in grid(layer)}
            return {min(p for p in own if p[0] == i) for i in passed if any(p[0] == i for p in own)}
        found = {ran(i, trip) for i in grid(layer)}
        if rule == "same_layer":
            found |= {(layer, k) for k in range(trip)}
        if rule == "grid":
            found |= {ran(i, k) for k in range(trip) for i in grid(self.layers)}
        return {place for place in found if place in own and place != (layer, trip)}

    def gate(self, layer: int, name: str) -> Array:
        """A mixer's gate by key-value head and channel."""
        found, heads = self.w[f"model.layers.{layer}.self_attn.mixer.{name}"], self.config["num_key_value_heads"]
        return found.reshape(heads, -1) if len(found) > 1 else found

    def mixed(
        self, query: Array, key: Array, value: Array, sources: Sequence[tuple[Array, Array]], layer: int
    ) -> tuple[Array, Array]:
        """The key, as mixers score it, and the value that attention stores and reads."""
        kind, which = self.config["mixer"], self.mixer.get("mixes", "value")
        if kind == "value_gain":
            return key, (1 + self.gate(layer, "gates.gain")) * value
        if kind != "none" and self.mixer["blend"] == "learned":
            gained = (1 + self.gate(layer, "blend_gates.gain")) * value
            alone = sources and self.mix(query, *sources[-1], sources[:-1])  # without the layer's own value
            return key, gained + self.gate(layer, "blend_gates.mix") * alone if sources else gained
        if kind == "none" or not sources:
            return key, value
        found = {"key": key, "value": value}
        if which in ("value", "both"):
            found["value"] = between(value, self.mix(query, key, value, sources), self.mixer)
        if which in ("key", "both"):
            keys = [(k, k) for k, _ in sources]
            found["key"] = between(key, self.mix(query, key, key, keys), self.mixer)
        return found["key"], found["value"]

    def mix(self, query: Array, key: Array, value: Array, sources: Sequence[tuple[Array, Array]]) -> Array:
        """The mechanism's value alone."""
        kind = self.config["mixer"]
        values = np.stack([v for _, v in sources] + [value])  # [M, H_kv, D]
        if kind != "depth_attention":
            return values.mean(0)
        pooled = query.reshape(len(key), -1, key.shape[1]).mean(1)
        keys = np.stack([k for k, _ in sources] + [key])
        if self.mixer["norm_scores"]:
            pooled, keys = self.unit(pooled), self.unit(keys)
        scores = (pooled * keys).sum(-1) / math.sqrt(key.shape[1])
        scores[-1] += self.mixer["self_bias"]
        return (softmax(scores, 0)[..., None] * values).sum(0)

    # --- one slot ---

    def visible(self, row: Row, token: Token, trip: int, slot: Slot, layer: int) -> bool:
        """Whether the slot (token, trip) reads another one."""
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        if sliding and token.column - slot.column >= self.config["sliding_window"]:
            return False
        if self.view == "all":
            return slot.column < token.column or slot.trip <= trip
        if self.view == "duo":
            return slot.trip <= trip
        return slot.trip == min(trip, row.halt[slot.column])

    def stack(
        self, row: Row, token: Token, trip: int, depth: int, step: Step, own: dict, first: Array | None = None
    ) -> Array:
        """Once through the layers: the stream after them, un-normed. `own` holds this token's keys and mixed values,
        and `first` is what the first trip's looped layers made."""
        stream = STREAMS[self.config["residual"]](self, step.x)
        stream.trip = trip
        if step.alive:
            row.halt[token.column] = trip
        begin, last = self.prelude if trip else 0, self.layers - (0 if trip == depth else self.coda)
        coda = self.layers - self.coda
        for layer in range(begin, last):
            if layer == coda and self.leaves(first):
                stream = STREAMS[self.config["residual"]](self, self.left(stream.read(2 * self.layers), step.x, first))
            if (trip, layer) == (0, self.prelude):
                step.entry = stream.read(2 * self.layers) if layer else step.x
            x = stream.read(2 * layer)
            beside = stream.read(2 * layer + 1) if self.config["parallel_residual"] else None
            ways = [self.before(way, layer, 0) for way in (x if isinstance(x, tuple) else (x, x, x))]
            query, key, value, asked, scored = self.project(stream.gained(2 * layer, ways), layer, token.position)
            borrows = self.borrows(layer, trip)
            if self.config["mixer"] != "none" and not borrows:
                found = [own[place] for place in sorted(self.sources(layer, trip, own))]
                as_stored = scored is key
                scored, value = self.mixed(asked, scored, value, found, layer)
                if self.mixer.get("mixes", "value") != "value":
                    key = scored if as_stored else self.rotate(scored, layer, token.position)
            if self.mixer.get("queries"):
                gain = 1 + self.gate(layer, "query_gates.gain")
                query = query * gain if len(gain) == 1 else query * np.repeat(gain, len(query) // len(key), 0)
            if not borrows:
                own[layer, trip] = scored, value
            if step.alive and not borrows:
                row.slots[layer].append(Slot(token.column, trip, key, value, step.bias))
            read = 0 if borrows else trip
            seen = [slot for slot in row.slots[layer] if self.visible(row, token, read, slot, layer)]
            stream.write(2 * layer, self.update(self.attend(query, seen, layer), layer, 0))
            x = stream.read(2 * layer + 1) if beside is None else beside
            made = self.mlp(self.before(x, layer, 1), f"model.layers.{layer}.mlp")
            stream.write(2 * layer + 1, self.update(made, layer, 1))
        made = stream.read(2 * self.layers)
        at_the_end = trip == depth and coda == self.layers and self.leaves(first)
        return self.left(made, step.x, first) if at_the_end else made

    def leaves(self, first: Array | None) -> bool:
        """Whether a loop hands on something else than its layers made, which only further trips do."""
        loops = self.recurrence == "loop" and first is not None
        return loops and not (self.options["damping"] == 1 and self.options["blend"] == 1)

    def left(self, made: Array, x: Array, first: Array | None) -> Array:
        """What a loop's last trip hands on, in place of what its layers made of x."""
        assert first is not None
        if self.options["blend"] == "learned":
            gain, mix = (self.w[f"model.recurrence.blend_gates.{name}"] for name in ("gain", "mix"))
            return (1 + gain) * first + mix * (x + self.options["damping"] * (made - x) - first)
        return between(first, x + self.options["damping"] * (made - x), self.options)

    # --- recurrences ---

    def above(self, value: float, threshold: float) -> bool:
        """A decision, whose margin is noted."""
        self.margin = min(self.margin, abs(value - threshold))
        return bool(value > threshold)

    def mixture(self, h: Array) -> Array:
        """The mean word, weighted by what would be said."""
        logits = self.logits(h) / self.options["temperature"]
        count = self.options["top_k"] or len(logits)
        if count < len(logits):
            order = np.argsort(-logits)
            self.margin = min(self.margin, logits[order[count - 1]] - logits[order[count]])
            logits[order[count:]] = -np.inf
        return self.options["mixture_gain"] * softmax(logits) @ self.table

    def onward(self, walk: Walk, k: int, r: Array, depth: int) -> Step | None:
        """What trip k, which ended in the stream r, means for the readout and for the next trip."""
        h, x, last = self.normed(r, "model.norm"), walk.steps[k].x, k == depth
        if not k:
            walk.first = r
        if self.recurrence == "ponder3":
            return self._by_shares(walk, k, h, last)
        if self.recurrence == "latent_cot":
            return self._by_reach(walk, h, last)
        walk.readout = self._chosen(walk, k, h) if self.options.get("exit", "none") != "none" else h
        if last:
            return None
        if self.recurrence == "adaponder" and self.options["halting"] in ("uniform", "geometric"):
            made, kept = (k + 1) / self.depth, self.options["kept"]
            share = 1 - (1 - kept) * made if self.options["halting"] == "uniform" else kept**made
            turn = walk.position * 2654435769 % 2**32 / 2**32
            return Step(x + self.options["blend"] * self.mixture(h)) if self.above(share, turn) else None
        if self.recurrence == "adaponder":
            gate = f"model.recurrence.gates.{0 if self.options['halting'] == 'shared' else k}"
            sigma = sigmoid(self.gate_mlp(h, gate))
            return (
                Step(x + self.options["blend"] * sigma * self.mixture(h))
                if self.above(sigma, self.options["tau"])
                else None
            )
        if self.recurrence == "ponder" and self.options["feed"] == "mixture":
            return Step(x + self.options["blend"] * self.mixture(h))
        if self.recurrence == "ponder":
            fed = {
                "hidden": lambda: h,
                "projected": lambda: self.w["model.recurrence.projector.weight"] @ h,
                "pause": lambda: self.config["embedding_scale"] * self.w["model.recurrence.pause"],
            }[self.options["feed"]]()
            return Step(between(x, fed, self.options))
        return Step(self._looped(walk, k, r, h) if self.recurrence == "loop" else h)

    def _chosen(self, walk: Walk, k: int, h: Array) -> Array | float:
        """What a token is read out as once trip k is made: with an exit gate, nothing new once it is sure enough."""
        threshold = self.options["exit_threshold"]
        if threshold == 1:
            return h
        gone = k > 0 and self.above(1 - walk.left, threshold)
        walk.left *= 1 - float(sigmoid(self.linear(h, "model.recurrence.exit_gate"))[0])
        return walk.readout if gone else h

    def _looped(self, walk: Walk, k: int, r: Array, h: Array) -> Array:
        """The next trip's input, by what it is given of the first one's."""
        entry = walk.steps[0].entry
        if self.options["damping"] < 1:
            x = walk.steps[k].x if k else entry
            return x + self.options["damping"] * (r - x)
        name, injection = "model.recurrence", self.options.get("injection", "none")
        between = self.options.get("norm_between", "none")
        stream = {"none": lambda: r, "final": lambda: h, "own": lambda: self.rms(r, f"{name}.norm")}[between]()
        if injection == "none":
            return stream
        if self.options.get("entry_norm"):
            entry = self.rms(entry, f"{name}.entry_norm")
        if injection == "add":
            return stream + entry
        step = np.log1p(np.exp(self.w[f"{name}.step_size"]))
        return np.exp(-step * np.exp(self.w[f"{name}.rate"])) * stream + step * (self.w[f"{name}.entry_map"] @ entry)

    def _by_shares(self, walk: Walk, k: int, h: Array, last: bool) -> Step | None:
        if k == 0:
            share = softmax(self.linear(h, "model.recurrence.router"))
            damping = self.options["router_damping"]
            walk.share = share if walk.share is None else (1 - damping) * walk.share + damping * share
        assert walk.share is not None
        tail = walk.share[k:].sum()
        walk.readout = walk.readout + (tail if last else walk.share[k]) * h
        left = tail - walk.share[k]
        if last or not self.above(left, self.options["tau"]):
            return None
        return Step(h, math.log(left))

    def gate_mlp(self, h: Array, name: str) -> float:
        """A logit by an MLP of two layers."""
        return float(self.linear(gelu(self.linear(h, f"{name}.up")), f"{name}.down")[0])

    def _by_reach(self, walk: Walk, h: Array, last: bool) -> Step | None:
        name = "model.recurrence.router"
        logit = self.gate_mlp(h, name) if self.options["router"] == "mlp" else float(self.linear(h, name)[0])
        gate = 0.0 if last else float(sigmoid(logit))
        onward = walk.reach * gate
        goes_on = not last and self.above(onward, self.options["tau"])
        walk.thoughts = walk.thoughts + (walk.reach - onward if goes_on else walk.reach) * h
        walk.begun = h if walk.begun is None else walk.begun
        walk.readout = between(walk.begun, walk.thoughts, self.options)
        walk.reach = onward
        return Step(h) if goes_on else None

    def walk(self, start: Walk, trips: int, depth: int, after: Callable[[int, Step], Array]) -> Walk:
        """Make trips; `after(k, step)` is the stream that trip k ends in. Who has halted keeps the last input."""
        for k in range(trips):
            step = start.steps[k]
            following = self.onward(start, k, after(k, step), depth) if step.alive else None
            if k < depth:
                start.steps.append(following or Step(step.x, 0.0, False))
        return start

    # --- a prompt, or what follows it ---

    def read(
        self,
        row: Row,
        tokens: Sequence[Token],
        depth: int,
        rounds: int | None = None,
        held: Held | None = None,
    ) -> tuple[Array, list[int]]:
        """Logits `[T, V]` of tokens that follow a row, and their numbers of trips; the row has read them afterwards.

        Without `rounds` one token after another, which is what every model means; with them all at once, by a
        Jacobi solver of so many, whose first passes may be `held`.
        """
        known = self.options.get("feed") == "pause"  # no input depends on a pass, so a solver is exact
        if rounds is None or not depth or known or (len(tokens) == 1 and held is None):
            walks = [self._decode(row, token, depth) for token in tokens]
        else:
            walks = self._solve(row, tokens, depth, rounds, held)
        logits = self.logits(np.stack([walk.readout for walk in walks]))
        return logits, [walk.trips for walk in walks]

    def _start(self, token: Token) -> Walk:
        x = self.config["embedding_scale"] * token.x
        if self.config["positions"] == "learned":
            x = x + self.w["model.embed_positions.weight"][token.position + self.config["position_offset"]]
        return Walk([Step(x)], position=token.position)

    def _decode(self, row: Row, token: Token, depth: int) -> Walk:
        own: dict = {}
        walk = self._start(token)
        return self.walk(
            walk, depth + 1, depth, lambda k, step: self.stack(row, token, k, depth, step, own, walk.first)
        )

    def _solve(self, row: Row, tokens: Sequence[Token], depth: int, rounds: int, held: Held | None) -> list[Walk]:
        """Grow the trips one by one, refine all their inputs `rounds` times, read out."""
        passes = [(m + 1, False) for m in range(depth)]
        passes += [(depth + 1, n + 1 < rounds) for n in range(rounds)] + [(depth + 1, False)]
        walks, seen = [self._start(token) for token in tokens], row
        for i, (trips, damped) in enumerate(passes):
            reader, read = (held.oracle, held.tokens) if held is not None and i < held.passes else (self, tokens)
            walks, seen = reader._together(row, read, depth, walks, trips, damped)
        row.slots, row.halt = seen.slots, seen.halt
        return walks

    def _together(
        self, row: Row, tokens: Sequence[Token], depth: int, walks: list[Walk], trips: int, damped: bool
    ) -> tuple[list[Walk], Row]:
        """One pass over what was planned: the following plan, and the row afterwards."""
        seen, following = row.copy(), []
        for token, walk in zip(tokens, walks, strict=True):
            own: dict = {}
            start = self._start(token)
            planned = [*start.steps, *walk.steps[1:]]
            streams = [self.stack(seen, token, k, depth, step, own) for k, step in enumerate(planned)]
            start.share = walk.share if damped else None
            following.append(self.walk(start, trips, depth, lambda k, step, of=streams: of[k]))
        return following, seen

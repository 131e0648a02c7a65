"""What a model computes for a text: the layers from which attention's values were mixed, and the prediction at each
depth.

Nothing here changes the forward pass. Hooks on the mixers take what the mixer was given, and measure its weights with
that. Hooks on the layers read the residual stream after every visit (one layer in one iteration) and send it through
the model's last norm and head (the logit lens).

Of several Jacobi rounds (`ponder2`, `ponder3`) the final pass is shown; the option `prefill` (`pondering.py`) chooses
between a few rounds and as many as make it exact. After a visit the prediction is that of the iteration by itself
(`Says.after`). Where the readout mixes iterations (`ponder3`, `latent_cot`), only `said` and `surprisal` are the
model's own (`Says.final`).

`models/axes/roles.py` measures a mixer's weights (`ValueMixer.source_weights`: unit vectors in place of the values, and
a check with the real ones). `models/residuals/denseformer.py` has the weights of `layer_weights` (`stream_weights`).
`page.py` rounds and packs the numbers; `lens.js` draws them, and computes *settled* and *borrowed*.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.checkpoints.special_tokens import unknown_token
from fathom.checkpoints.tokenizers import added_text, byte_letters
from fathom.errors import SettingsError
from fathom.models import FathomForCausalLM
from fathom.models.axes.numerics import widen
from fathom.models.axes.roles import ResidualState, ValueMixer
from fathom.models.axes.visit import Visit
from fathom.models.cost import count_parameters
from fathom.models.registry import mechanism_name

if TYPE_CHECKING:
    from fathom.models.modeling import DecoderLayer

Array = np.ndarray
BYTES = byte_letters()
"""The alphabet in which byte-level vocabularies are written."""
LOGITS_AT_ONCE = 1 << 22
"""Logits computed at a time: all tokens at once would take gigabytes with a large vocabulary, and a second."""


@dataclass(frozen=True)
class Averages:
    """Averages over a text's tokens and the heads, with one row for each visit (a layer in one iteration)."""

    weights: list[list[float]]
    """Weights of the visits in `LensData.sources`, the visit's own value last. Where they are shares, as in every mixer
    of Fathom's, a row sums to 1, and so do those of `origins`."""
    origins: list[list[float]]
    """Shares of the visits' *raw* values in each mixed value, traced through sources that are mixtures: `[V, V]`."""
    entropy: list[float]
    """Entropy of the weights, in bits."""

    @property
    def own(self) -> list[float]:
        """For each visit, the mean weight of the layer's own value in what its mixer stores."""
        return [row[-1] for row in self.weights]


@dataclass(frozen=True)
class LensData:
    """One model and one text. A *visit* is one layer in one iteration; arrays have an axis of visits, then one of
    tokens."""

    model: str
    mechanism: str
    parameters: int
    tokens: list[str]
    """The text that each token adds; empty if the text ends inside a character, or the token has no text."""
    labels: Array
    """`[T]`, each token's entry in `vocabulary`."""
    dropped: int
    """Number of tokens at the end of the text that were dropped."""
    visits: list[tuple[int, int]]
    """(layer, trip), in order."""
    trips: list[int]
    """Number of trips of each token."""
    surprisal: Array
    """`[T]`, surprisal in bits; NaN for the first token, which is not predicted."""
    vocabulary: list[str]
    """The text of all tokens that occur below."""
    predictions: Array
    """`[V, T, top]`: the next tokens predicted after each visit, likeliest first, as entries of `vocabulary`."""
    probabilities: Array
    """`[V, T, top]`: their probabilities."""
    said: Array
    """`[T, top]`: the next tokens predicted by the model itself, from its recurrence's readout."""
    said_probabilities: Array
    """`[T, top]`: their probabilities."""
    next_surprisal: Array
    """`[V, T]`: surprisal of the next token after each visit, in bits; NaN at the last token."""
    sources: list[tuple[int, ...]]
    """The visits whose values each visit read, itself last; empty if the weights are unknown."""
    weights: list[Array]
    """One `[T, heads, len(sources)]` per visit; a dimension of size 1 applies to all."""
    layer_weights: list[list[float | None]] | None = None
    """The static weights of a residual (`denseformer`): one row per layer, its weights of the embeddings and of every
    layer's output; None is not read."""

    @property
    def bits_per_token(self) -> float:
        """The mean surprisal of a text's tokens in bits; NaN for a single token."""
        return float(self.surprisal[1:].mean()) if len(self.tokens) > 1 else math.nan

    @property
    def read(self) -> str:
        """How much of the text was read, in words."""
        count = len(self.tokens)
        return (
            f"the first {count:,} of {count + self.dropped:,} tokens"
            if self.dropped
            else f"{count:,} token{'s' * (count > 1)}"
        )

    @property
    def unshown(self) -> str:
        """Why the page cannot show mixing weights, in a few words; empty if it shows them."""
        if not self.weights:
            return "not every layer pass adds up values with weights"
        shares = all((row > -1e-4).all() and np.abs(row.sum(-1) - 1).max() < 1e-2 for row in self.weights)
        return "" if shares else "weights are not shares of 1"

    @property
    def halts(self) -> bool:
        """Whether some tokens made fewer loop iterations than others."""
        return len(set(self.trips)) > 1

    def averages(self) -> Averages:
        """For each visit (a layer in one iteration), the mean weights by which it mixes its sources, over the tokens
        that made it."""
        rows = [self._visitors(i, weights).astype(np.float64) for i, weights in enumerate(self.weights)]
        return Averages(
            [row.mean((0, 1)).tolist() for row in rows],
            [self._visitors(i, row).mean((0, 1)).tolist() for i, row in enumerate(self.origins())],
            [float(-(row * np.log2(np.where(row > 0, row, 1))).sum(-1).mean()) for row in rows],
        )

    def _visitors(self, visit: int, values: Array) -> Array:
        made = np.array(self.trips) > self.visits[visit][1]
        return values[made] if len(values) == len(made) and made.any() else values

    def origins(self) -> Iterator[Array]:
        """The share of each visit's raw value in each visit's mixed value, `[T, heads, V]`: C_ℓ = α_ℓ e_ℓ + Σ_j α_j
        C_j."""
        read = {j for i, row in enumerate(self.sources) for j in row if j != i}
        kept: dict[int, Array] = {}
        for i, (sources, weights) in enumerate(zip(self.sources, self.weights, strict=True)):
            raw = np.zeros((*weights.shape[:2], len(self.visits)))
            raw[..., i] = weights[..., -1]
            for m, j in enumerate(sources[:-1]):
                raw = raw + weights[..., m, None].astype(np.float64) * kept[j]
            if i in read:
                kept[i] = raw
            yield raw

    def to_dict(self) -> dict[str, object]:
        """Plain numbers, for JSON."""
        averages, bits = self.averages(), self.bits_per_token
        return {
            **{name: _plain(value) for name, value in vars(self).items()},
            "visits": [{"layer": layer, "trip": trip} for layer, trip in self.visits],
            "bits_per_token": None if math.isnan(bits) else round(bits, 6),
            "mean_weights": averages.weights,
            "mean_origins": averages.origins,
            "own": averages.own,
            "entropy": averages.entropy,
        }


def mixture(mixer: ValueMixer, *given: Tensor | tuple[Tensor, ...]) -> Tensor | None:
    """The weights with which a mixer adds up its sources' values and, last, its own: `[T, heads, sources + 1]`, or size
    1 in a dimension along which all are equal; None if it is no weighted sum.

    Args:
        mixer: The mixer, which is measured in at least single precision.
        given: What its `forward` was given.
    """
    *tensors, sources = given
    query, key, value = map(widen, cast("list[Tensor]", tensors))
    wide = copy.deepcopy(mixer).to(value.dtype)
    found = wide.source_weights(query, key, value, tuple(map(widen, sources)))
    if found is None:
        return None
    found = found[0].transpose(0, 1)
    for dim in (0, 1):
        first = found.narrow(dim, 0, 1)
        found = first if torch.equal(first.expand_as(found), found) else found
    return found


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether two tokenizers have the same vocabulary and give the same tokens for this text, so that models are
    comparable."""
    ids, others = (tokenizer(text, verbose=False)["input_ids"] for tokenizer in (one, other))
    return one.get_vocab() == other.get_vocab() and ids == others


def require_decoder(model: object) -> None:
    """Refuse a model that is not a Fathom decoder, because the lens hooks into its layers and residual."""
    if not isinstance(model, FathomForCausalLM):
        raise SettingsError(f"the lens needs a FathomForCausalLM; this model is a {type(model).__name__}")


@torch.no_grad()
def look(
    model: FathomForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    top: int = 5,
    max_tokens: int = 2000,
    name: str = "model",
    progress: Callable[[int], None] | None = None,
    breathe: Callable[[], None] | None = None,
) -> LensData:
    """Record what a model computes for a text.

    Args:
        model: A `FathomForCausalLM` of any family that Fathom opens.
        tokenizer: Its tokenizer.
        text: The text.
        top: Predictions to keep at every visit.
        max_tokens: Maximum tokens; never more than the model's context.
        name: The model's name on the page.
        progress: Called after every visit with the number of visits done.
        breathe: Called several times in each visit, so that a server can do other work in between.
    """
    require_decoder(model)
    every_id, pieces = checked(model, tokenizer, text, top, max_tokens)
    length = min(len(every_id), max_tokens, model.config.max_position_embeddings)
    ids = torch.tensor(every_id[:length], device=model.device)
    trips = model.model.plan_of(model.model.served_trips)
    visits = [visit for trip in trips for visit in trip]
    says = Says(model, ids[1:], min(top, model.config.vocab_size), breathe=breathe)
    weights: list[Tensor | None] = []

    def mixed(mixer: ValueMixer, *given: Tensor | tuple[Tensor, ...]) -> None:
        found = mixture(mixer, *given)
        weights.append(None if found is None else widen(found).cpu())

    made = record(model, ids, says, mixed, progress=progress)
    if (stages := stages_of(model, len(trips))) > 1:
        weights = _by_stage(weights[-model.config.num_hidden_layers :], stages)
    known = [w.numpy() for w in weights if w is not None]
    shown = len(known) == len(visits)
    return LensData(
        model=name,
        mechanism=mechanism_name(model.config),
        parameters=count_parameters(model.config),  # the model's own parameters may be packed
        tokens=pieces[:length],
        dropped=len(every_id) - length,
        visits=[(visit.layer, visit.trip) for visit in visits],
        trips=made.tolist(),
        **says.found(tokenizer, ids),
        sources=[(*visit.sources, visit.index) for visit in visits] if shown else [],
        weights=known if shown else [],
        layer_weights=_layer_weights(model, visits),
    )


def checked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, top: int, max_tokens: int
) -> tuple[list[int], list[str]]:
    """Token ids and pieces of a text; rejects an empty text and tokens outside the model's vocabulary."""
    for option, value in (("top", top), ("max_tokens", max_tokens)):
        if value < 1:
            raise SettingsError(f"{option}={value}: allowed: 1 or more")
    ids, pieces = _tokenise(tokenizer, text)
    if not ids:
        raise SettingsError("there is no text to look at")
    if (fault := unknown_token(ids, model)) is not None:
        raise SettingsError(fault)
    return ids, pieces


def _by_stage(weights: Sequence[Tensor | None], stages: int) -> list[Tensor | None]:
    """The weights of slots that one forward pass interleaves, separated into one entry for each iteration and layer."""
    return [w if w is None or len(w) == 1 else w[stage::stages] for stage in range(stages) for w in weights]


def stages_of(model: FathomForCausalLM, trips: int) -> int:
    """How many iterations each pass through the layers computes: all of them side by side under the view ALL, else
    1."""
    return 1 if model.model.recurrence.view.depth_parallel else trips


@torch.no_grad()
def record(
    model: FathomForCausalLM,
    ids: Tensor,
    says: Says,
    mixed: Callable[..., None],
    max_trips: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Run a forward pass in which `says` records predictions after every layer; returns each token's number of
    iterations, `[T]`.

    Args:
        model: The model.
        ids: The text, `[T]`.
        says: Records predictions.
        mixed: Called with every mixer's inputs.
        max_trips: Loop iterations per token at most; None for the model's own number.
        progress: Called after every visit with the number of visits done.
    """
    trips = len(model.model.plan_of(max_trips or model.model.served_trips))
    stages = stages_of(model, trips)
    passed: deque[ResidualState] = deque(maxlen=model.config.num_hidden_layers)  # of several rounds the last counts

    def left(state: ResidualState) -> None:
        if stages > 1:
            passed.append(state)
            return
        says.after(state)
        if progress is not None:
            progress(len(says.chosen))

    def mixing(*arguments: Any) -> None:
        says.breathe()
        mixed(*arguments)

    with watched(model, mixing, left):
        out = model.model(ids[None], use_cache=False, head=model.lm_head, max_trips=max_trips)
        for stage in range(stages if passed else 0):
            for state in passed:
                says.after(tuple(part[:, stage::stages] for part in state))
    says.final(out.last_hidden_state[0])
    return out.recurrence_state.get("trips", torch.full((1, len(ids)), trips))[0]


class Says:
    """The logit lens: predictions from the residual stream after every layer pass, by the final norm and the head.

    Args:
        model: The model.
        following: The tokens that follow the positions, `[T]`, or `[T - 1]` if the last one has none.
        top: Predictions to keep.
        last: Whether to look at the last position alone.
        breathe: As `look` takes it.
    """

    def __init__(
        self,
        model: FathomForCausalLM,
        following: Tensor,
        top: int,
        last: bool = False,
        breathe: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.following, self.top, self.breathe = model, following, top, breathe or (lambda: None)
        self.rows = slice(-1, None) if last else slice(None)
        self.chosen: list[Array] = []
        self.probabilities: list[Array] = []
        self.next_surprisal: list[Array] = []

    def after(self, state: ResidualState) -> None:
        """Record the predictions from the residual stream after a layer, as if it were the last layer."""
        decoder, there = self.model.model, tuple(part[:, self.rows] for part in state)
        chosen, probabilities, bits = self._read(decoder.norm(decoder.final_residual.read(there)[0])[0])
        self.chosen.append(chosen)
        self.probabilities.append(probabilities)
        self.next_surprisal.append(bits)

    def final(self, hidden: Tensor) -> None:
        """Record the predictions of the model itself, from its readout, `[T, hidden_size]`."""
        self.said, self.said_probabilities, self.surprisal = self._read(hidden[self.rows])
        if not np.isfinite(self.said_probabilities).all():
            raise SettingsError("the model's scores are not finite: its weights are damaged, or its numbers overflow")

    def found(self, tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> dict[str, Any]:
        """The fields of `LensData` that hold predictions and surprisals, for a text's token ids `[T]`."""
        predicted, own = np.stack(self.chosen), ids.cpu().numpy()
        distinct = np.unique(np.concatenate([predicted.ravel(), self.said.ravel(), own]))
        fields = {"predictions": predicted, "said": self.said, "labels": own}
        return {
            **{name: np.searchsorted(distinct, tokens) for name, tokens in fields.items()},
            "vocabulary": [spell(tokenizer, int(i)) for i in distinct],
            "probabilities": np.stack(self.probabilities),
            "said_probabilities": self.said_probabilities,
            "next_surprisal": np.pad(np.stack(self.next_surprisal), ((0, 0), (0, 1)), constant_values=np.nan),
            "surprisal": np.pad(self.surprisal, (1, 0), constant_values=np.nan),
        }

    def _read(self, hidden: Tensor) -> tuple[Array, Array, Array]:
        """Apply the head to `[T, hidden_size]`: returns the likeliest next tokens, their probabilities, and the actual
        ones' surprisal."""
        chosen, probabilities, bits = [], [], []
        rows = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        for start in range(0, len(hidden), rows):
            self.breathe()
            logprobs = widen(self.model.lm_head(hidden[start : start + rows])).log_softmax(-1)
            following = self.following[start : start + rows, None]
            values, indices = logprobs.topk(self.top)
            chosen.append(indices)
            probabilities.append(values.exp())
            bits.append(-logprobs[: len(following)].gather(1, following)[:, 0] / math.log(2))
        return tuple(torch.cat(parts).cpu().numpy() for parts in (chosen, probabilities, bits))  # type: ignore[return-value]


@contextmanager
def watched(
    model: FathomForCausalLM, mixed: Callable[..., None], after: Callable[[ResidualState], None]
) -> Iterator[None]:
    """A context in which a model in evaluation mode calls `mixed` with each mixer's inputs and `after` with each
    layer's residual state, in execution order."""
    caller, training = threading.get_ident(), model.training  # a server's other threads use the same modules
    beside = model.model.beside

    def on_mixer(mixer: ValueMixer, arguments: tuple[Tensor, ...], _: Tensor) -> None:
        if threading.get_ident() == caller:
            mixed(mixer, *arguments)

    def on_layer(_: torch.nn.Module, __: tuple[object, ...], output: ResidualState) -> None:
        if threading.get_ident() == caller:
            after(output[:-beside])

    handles = []
    try:
        for layer in cast("Iterable[DecoderLayer]", model.eval().model.layers):
            if (mixer := layer.depth_mixer) is not None:
                handles.append(mixer.register_forward_hook(on_mixer))
            handles.append(layer.register_forward_hook(on_layer))
        yield
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[str]]:
    """The token ids of a text, and the piece of text that each adds; `look` truncates texts longer than the model's
    context."""
    if not getattr(tokenizer, "is_fast", False):
        ids = tokenizer(text, verbose=False)["input_ids"]
        return ids, [spell(tokenizer, i) for i in ids]
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    pieces, done = [], 0
    for _, end in encoded["offset_mapping"]:
        # Offsets leave out text that a normaliser drops, and repeat for tokens that share a character.
        pieces.append(text[done : max(done, end)])
        done = max(done, end)
    return encoded["input_ids"], pieces


def spell(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    """A token as text; shown as its bytes in hexadecimal if it is only a part of a character."""
    spelled = added_text(tokenizer, index)
    if spelled and "\ufffd" not in spelled:
        return spelled
    token = tokenizer.convert_ids_to_tokens(index)
    if token is None:
        return f"#{index}"  # the head often has more entries than the vocabulary
    if all(letter in BYTES for letter in token):
        return "⟨" + " ".join(f"{BYTES[letter]:02X}" for letter in token) + "⟩"
    return token


def _layer_weights(model: FathomForCausalLM, visits: list[Visit]) -> list[list[float | None]] | None:
    layers = model.config.num_hidden_layers
    rows = [layer.mlp_residual.stream_weights() for layer in cast("Iterable[DecoderLayer]", model.model.layers)]
    if len(visits) > layers or None in rows:
        return None  # in a loop, the output that a weight belongs to changes from trip to trip
    return [[row.get(output) for output in range(layers + 1)] for row in rows if row is not None]


def _plain(value: object) -> object:
    """Convert NumPy arrays to nested lists, also arrays inside lists."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        rounded = np.round(value.astype(np.float64), 6).astype(object)
        rounded[np.isnan(value)] = None  # JSON has no NaN
        return rounded.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value

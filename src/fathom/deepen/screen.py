"""Gradients of closed gates: one backward pass over text scores every mechanism at every possible gate, without
training.

A gate λ adds λ m to a value or to the stream, and a gain g adds g a, where a is there already. With δ the gradient of a
document's loss there, the gradients of closed gates are inner products:

    ∂λ = ⟨δ, m⟩        ∂g = ⟨δ, a⟩

Every document gives one number for each gate; z is their mean over its standard error. Two controls are taken off:

    without the gain    s = ∂λ - Σ_i a_i ∂g_i, fitted over documents by least squares: what a gain cannot do
    content             ∂λ minus the mean of ⟨δ, m'⟩ over the m' of the batch's other documents, without the gain too:
                        what a source of the same statistics cannot do

Without any effect the mean of z² over gates is (n - 1) / (n - 3) for n documents. A negative gradient asks for a
positive gate, so the reported signs are those of the gate.

Screened are all mixers that can have learned gates, the weight of every fourth earlier block in the stream, and each
layer run twice; no other mechanism. `gradients` refuses a model that has mechanisms, or whose family runs the layers of
transformers. `screen_page.py` writes `screen.html` and `screen.json`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from fathom.errors import SettingsError
from fathom.evaluation.perplexity import WHOLE, beginning, encoder, read_domains
from fathom.models.axes.blend import BlendedMixer
from fathom.models.axes.numerics import widen
from fathom.models.configuration import FathomConfig
from fathom.models.decoder.rotary import signed
from fathom.models.modeling import FathomForCausalLM
from fathom.models.registry import AXES, DEFAULTS, known

Array = np.ndarray
STRIDE = 4
"""Every so many layers is a source of mixers on a grid and of `stream`."""
BATCH = 8
"""Documents in a forward pass; for `content` each one also reads the others' sources."""


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The amount of text."""

    documents: int = 32
    tokens: int = 256
    """Tokens of each document, from its beginning; shorter documents are left out."""

    def __post_init__(self) -> None:
        if self.documents < 2 * BATCH or self.documents % BATCH:
            raise SettingsError(f"documents={self.documents}: allowed: multiples of {BATCH}, at least {2 * BATCH}")
        if self.tokens < 2:
            raise SettingsError(f"tokens={self.tokens}: allowed: 2 or more")


class Place(NamedTuple):
    """Where a gate stands."""

    layer: int
    head: int | None = None
    source: int | None = None
    """The block whose output it adds; None if its mechanism has one mix."""


@dataclass
class Gradients:
    """The gradients of a mechanism's closed gates, by document."""

    places: list[Place] = field(default_factory=list)
    own: list[Array] = field(default_factory=list)
    """For each gate `[n, B]`: ⟨δ, m'⟩ for every document's δ and the m' of its batch, the document's own first."""
    gains: list[Array] = field(default_factory=list)
    """For each gate `[n, r]`: the gradients of the gains that could stand in for it."""

    def drawn(self, gate: int, column: int = 0) -> Array:
        """The gradient of a gate's λ for each document, `[n]`; a `column` above 0 takes the sources of another
        document."""
        return self.own[gate][:, column]

    def content(self, gate: int, column: int = 0) -> Array:
        """Each document's gradient of a gate minus the mean gradient with the other documents' sources."""
        crossed = self.own[gate]
        return crossed[:, column] - np.delete(crossed, column, axis=1).mean(1)

    def without(self, values: Array, gate: int) -> Array:
        """Subtract from per-document values their least-squares fit by the gradients of the gains."""
        gains = self.gains[gate]
        return values - gains @ np.linalg.lstsq(gains, values, rcond=None)[0]


def z_score(values: Array, fitted: int = 0) -> float:
    """The mean of per-document values divided by its standard error, after `fitted` degrees of freedom were used up; 0
    if all values are equal."""
    freedom = len(values) - 1 - fitted
    spread = float(np.square(values - values.mean()).sum() / max(freedom, 1) / len(values)) ** 0.5
    return float(values.mean()) / spread if spread else 0.0


@dataclass(frozen=True)
class Gate:
    """A gate's scores. A positive z asks for a positive gate."""

    mechanism: str
    place: Place
    z: float
    without_gain: float
    content: float


@dataclass(frozen=True)
class Summary:
    """The scores of one mechanism, summarised over all its gates."""

    mechanism: str
    gates: int
    z2: float
    z2_without_gain: float
    z2_content: float
    left: float
    """Share of the squared gradients that is left without the gain."""
    negative: float
    """Share of the gates that ask for a negative λ, without the gain."""


@dataclass(frozen=True)
class Screened:
    """The result of a screen."""

    documents: int
    chance: float
    """Mean z² of gates without an effect."""
    summaries: list[Summary]
    gates: list[Gate]
    """The strongest first, by content."""
    cpu_seconds: float


def screen(
    model: FathomForCausalLM, tokenizer: PreTrainedTokenizerBase, text: Sequence[str], asked: Screen
) -> Screened:
    """Score every mechanism at every possible gate of a model.

    Args:
        model: A model without mechanisms.
        tokenizer: Its tokenizer.
        text: What `fathom evaluate --perplexity` takes.
        asked: The amount of text.
    """
    begun = time.process_time()
    found = gradients(model, read_rows(tokenizer, text, asked))
    return scores(found, asked.documents, time.process_time() - begun)


def read_rows(tokenizer: PreTrainedTokenizerBase, text: Sequence[str], asked: Screen) -> Tensor:
    """Documents chosen at random, but the same in every call, as token ids `[n, T + 1]` with a start token first."""
    found = []
    for domain in read_domains(text):
        encode = encoder(tokenizer, domain)
        found += [(encode, document) for document in domain.documents]
    rows = []
    for place in np.random.default_rng(0).permutation(len(found)).tolist():
        encode, document = found[place]
        ids = [beginning(tokenizer), *encode(document)[: asked.tokens]]
        if len(ids) == asked.tokens + 1:
            rows.append(ids)
        if len(rows) == asked.documents:
            return torch.tensor(rows)
    raise SettingsError(
        f"{', '.join(text)}: {len(rows)} documents have at least {asked.tokens} tokens, but {asked.documents} such "
        f"documents are needed; give more text, or lower `documents` or `tokens`. {WHOLE}"
    )


def scores(found: Mapping[str, Gradients], documents: int, seconds: float = 0.0) -> Screened:
    """Score gates and mechanisms from the gradients of the gates."""
    gates, summaries = [], []
    for name, one in found.items():
        mine, left, total = [], 0.0, 0.0
        for i, place in enumerate(one.places):
            drawn, fitted = one.drawn(i), one.gains[i].shape[1]
            rest = one.without(drawn, i)
            content = one.without(one.content(i), i)
            left, total = left + float(rest @ rest), total + float(drawn @ drawn)
            mine.append(Gate(name, place, -z_score(drawn), -z_score(rest, fitted), -z_score(content, fitted)))
        raw, rest2, content2 = (
            float(np.mean(np.square([getattr(gate, key) for gate in mine]))) for key in ("z", "without_gain", "content")
        )
        negative = sum(gate.without_gain < 0 for gate in mine) / len(mine)
        share = left / total if total else 0.0
        summaries.append(Summary(name, len(mine), raw, rest2, content2, share, negative))
        gates += mine
    gates.sort(key=lambda gate: -abs(gate.content))
    return Screened(documents, (documents - 1) / (documents - 3), summaries, gates, seconds)


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(model: FathomForCausalLM, rows: Tensor) -> dict[str, Gradients]:
    """The gradients of every mechanism's closed gates, from one backward pass over `[n, T + 1]` tokens."""
    for axis in AXES:
        if (name := getattr(model.config, axis)) != DEFAULTS[axis]:
            raise SettingsError(f"a screen needs a model without mechanisms, this one has {axis}={name}")
    if model.config.host:
        raise SettingsError(
            f"a screen needs a model family that Fathom's own decoder computes; {model.config.host} runs the layers of "
            "transformers"
        )
    training, asks = model.training, [p.requires_grad for p in model.parameters()]
    model.eval().requires_grad_(False)
    parts: dict[str, list[Gradients]] = {}
    for batch in rows.split(BATCH):
        for name, one in _of_batch(model, batch.to(model.device)).items():
            parts.setdefault(name, []).append(one)
    model.train(training)
    for parameter, ask in zip(model.parameters(), asks, strict=True):
        parameter.requires_grad_(ask)
    return {
        name: Gradients(
            several[0].places,
            [np.concatenate(each) for each in zip(*(one.own for one in several), strict=True)],
            [np.concatenate(each) for each in zip(*(one.gains for one in several), strict=True)],
        )
        for name, several in parts.items()
    }


@dataclass
class Taps:
    """Tensors that hooks take from a forward pass; each `leaf` is a tensor of zeros that is added to the hooked output,
    so that the leaf's gradient is δ."""

    query: dict[int, Tensor] = field(default_factory=dict)
    key: dict[int, Tensor] = field(default_factory=dict)
    value: dict[int, Tensor] = field(default_factory=dict)
    value_leaf: dict[int, Tensor] = field(default_factory=dict)
    update: dict[int, list[Tensor]] = field(default_factory=dict)
    """The updates of each layer's sub-layers."""
    stream: list[Tensor] = field(default_factory=list)
    """The embeddings, then the stream after each layer."""
    stream_leaf: list[Tensor] = field(default_factory=list)
    """The leaf at the end of each layer."""
    update_leaf: dict[int, list[Tensor]] = field(default_factory=dict)


@contextmanager
def tapped(model: FathomForCausalLM) -> Iterator[Taps]:
    """Register hooks on mixers, residuals and layers that collect a forward pass's tensors in `Taps`."""
    taps, hooks = Taps(), []

    def on_mixer(layer: int) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], value: Tensor) -> Tensor:
            taps.query[layer], taps.key[layer], taps.value[layer] = (x.detach() for x in given[:3])
            taps.value_leaf[layer] = torch.zeros_like(value, requires_grad=True)
            return value + taps.value_leaf[layer]

        return hook

    def on_residual(layer: int) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], made: Any) -> Any:
            if len(given) == 1:
                return made  # a read
            taps.update.setdefault(layer, []).append(given[1].detach())
            leaf = torch.zeros_like(made[0], requires_grad=True)
            taps.update_leaf.setdefault(layer, []).append(leaf)
            return (made[0] + leaf, *made[1:])

        return hook

    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.self_attn.mixer.register_forward_hook(on_mixer(i)))  # type: ignore[union-attr]
        for part in (layer.attn_residual, layer.mlp_residual):
            hooks.append(part.register_forward_hook(on_residual(i)))  # type: ignore[union-attr]
    try:
        yield taps
    finally:
        for hook in hooks:
            hook.remove()


def _of_batch(model: FathomForCausalLM, rows: Tensor) -> dict[str, Gradients]:
    """The gradients for one batch of documents."""
    with tapped(model) as taps, torch.enable_grad():
        out = model.model(rows[:, :-1], use_cache=False, output_hidden_states=True)
        _loss(model, out.last_hidden_state, rows[:, 1:]).backward()
    layers = len(model.model.layers)
    taps.stream = [x.detach() for x in out.hidden_states[:-1]]
    taps.stream_leaf = [taps.update_leaf[i][-1] for i in range(layers)]
    with torch.no_grad():
        found = {name: _mixer(model.config, taps, build) for name, build in mixers(model.config).items()}
        again = Again(model, rows[:, :-1])
        ends = [*taps.stream[1:], again.layer(taps.stream[-1], layers - 1)]
        found |= {"stream": _stream(taps, ends), "loop": _loop(taps, ends, again)}
    return found


def _loss(model: FathomForCausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """The sum over documents of each document's mean loss per token."""
    logits = widen(model.lm_head(hidden))
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.shape[1]


def mixers(config: FathomConfig) -> dict[str, type[BlendedMixer]]:
    """Every mixer that can have learned gates, including the mixers of other packages."""
    named = {name: one.build for name, one in known().items() if one.axis == "mixer"}
    return {name: build for name, build in named.items() if isinstance(build, type) and issubclass(build, BlendedMixer)}


def _mixer(config: FathomConfig, taps: Taps, build: type[BlendedMixer]) -> Gradients:
    """Gradients of a mixer's gates λ, one for each layer and key-value head; the gain scales the head's values."""
    name = next(name for name, one in known().items() if one.build is build)
    options: dict[str, object] = {"blend": "learned", "gates": "head"}
    if "stride" in {one.name for one in fields(known()[name].options)}:
        options["stride"] = min(STRIDE, config.num_hidden_layers)
    opened = FathomConfig.from_dict(config.to_dict(), mixer=name, mixer_options=options)
    found = Gradients()
    for layer, delta in taps.value_leaf.items():
        sources = tuple(x for j in build.source_layers(opened, layer) for x in (taps.key[j], taps.value[j]))
        if not sources:
            continue
        mix = build(opened, layer).to(delta.device).of_sources(taps.query[layer], sources)
        assert delta.grad is not None
        for head in range(delta.shape[1]):
            grad = delta.grad[:, head]
            found.places.append(Place(layer, head))
            found.own.append(crossed(grad, mix[:, head]))
            found.gains.append(crossed(grad, taps.value[layer][:, head])[:, :1])
    return found


def _stream(taps: Taps, ends: Sequence[Tensor]) -> Gradients:
    """Gradients of the coefficients c of every STRIDE-th earlier block output at the end of every layer, as in
    `denseformer`; the gain scales the residual stream."""
    found = Gradients()
    for layer, leaf in enumerate(taps.stream_leaf):
        assert leaf.grad is not None
        gain = crossed(leaf.grad, ends[layer])[:, :1]
        for source in range(0, layer + 1, STRIDE):
            found.places.append(Place(layer, source=source))
            found.own.append(crossed(leaf.grad, taps.stream[source]))
            found.gains.append(gain)
    return found


def _loop(taps: Taps, ends: Sequence[Tensor], again: Again) -> Gradients:
    """Gradients of the gates λ of a loop over a single layer, for every layer; the gains scale the outputs of the
    layer's sub-layers."""
    found = Gradients()
    for layer, leaf in enumerate(taps.stream_leaf):
        assert leaf.grad is not None
        found.places.append(Place(layer))
        found.own.append(crossed(leaf.grad, again.layer(ends[layer], layer) - ends[layer]))
        pairs = zip(taps.update_leaf[layer], taps.update[layer], strict=True)
        gains = [crossed(each.grad, update)[:, :1] for each, update in pairs if each.grad is not None]
        found.gains.append(np.concatenate(gains, 1))
    return found


class Again:
    """Runs single layers of the model on residual streams of the same tokens."""

    def __init__(self, model: FathomForCausalLM, ids: Tensor) -> None:
        decoder, self.kinds = model.model, model.config.layer_types
        x = decoder.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        self.layers, self.masks = decoder.layers, decoder.causal_masks(x, None, None, None)
        self.given = {"rotation": signed(decoder.rotary_emb(x, positions)), "position_ids": positions}

    def layer(self, x: Tensor, layer: int) -> Tensor:
        """The residual stream after one layer that gets `x` as its input."""
        return self.layers[layer](x, attention_mask=self.masks[self.kinds[layer]], **self.given)[0]


def crossed(delta: Tensor, mix: Tensor) -> Array:
    """The inner products ⟨δ_b, m_{b+k}⟩ for every document b of a batch, `[B, k]`; column 0 pairs each document with
    itself."""
    products = (delta.flatten(1).double() @ mix.flatten(1).double().T).cpu().numpy()
    count = len(products)
    return np.stack([products[np.arange(count), (np.arange(count) + k) % count] for k in range(count)], 1)

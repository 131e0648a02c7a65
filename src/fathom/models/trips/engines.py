"""Run looped models in inference engines with their own KV cache (vLLM, SGLang, continuous batching), or refuse
them.

Background:

transformers' continuous batching, vLLM and SGLang look keys and values up by a layer's `layer_idx`. A model of several
iterations needs a bank for each visit (layer, iteration): if iterations shared a bank, a later iteration would
overwrite an earlier one, and the tokens would be wrong without an error. So the engine gets a configuration with as
many layers as the plan has visits (`engine_config`), and its attention gets a `Seat`: the layer's module under the
index of the visit's bank. vLLM attaches a cache to each module that calls attention, so it finds a `Bank` for each
visit (`take_banks`). A model that cannot be served so is refused by name (`RULES`): one with `kv: first`, or whose
tokens halt, or whose iterations read others, since such an engine stores one key and value of each token wherever it
attends; and one whose queries, keys and values read different inputs (such as `mudd`), since vLLM fuses their
projections. This file is part of every export, so exports refuse it too.

`inference/vllm_plugin.py` registers models with vLLM, `inference/vllm_model.py` has the class that vLLM runs, and
`generation.py` prepares transformers' continuous batching (`generate_batch`). `fathom serve` has its own batches
(`inference/batches.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..axes.cache_name import CACHE
from ..axes.visit import Plan
from ..registry import DEFAULTS
from .slots import banks_of

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig
    from ..axes.roles import Recurrence

BACKENDS = ("sdpa", "eager", "paged|eager", "flash", "flex", "kernels-community/", "fathom_")
"""Prefixes of the attention backends that leave the cache to the model, or find it through a seat."""
ENGINES = ("vllm", "sglang")
"""Backends that find their cache in `attention_instances`, by `layer_idx`."""
HUNG = "attn"
"""The attribute under which vLLM attaches its attention layer, and so the cache, to a module."""
HANDED_OVER = ("cache", "attention_instances", "forward_batch")
"""Keyword arguments by which an engine passes its own cache: continuous batching; vLLM and SGLang; SGLang."""

COMPANY = (
    "the angles of this model's RoPE depend on the longest text of a batch, so a text's tokens would depend on other "
    "requests: use `generate`"
)
"""Why no engine that mixes requests runs a model whose rotary angles change with the length."""


class CachedAttention(nn.Module):
    """Base class of attention modules whose cache an inference engine may hold; declares what `Seat` and `Bank` use."""

    config: DecoderConfig
    layer_idx: int
    num_key_value_groups: int
    scaling: float
    is_causal: bool
    sliding_window: int | None
    banks: dict[int, nn.Module]
    """Modules by index, for engines that attach their cache to modules."""


class Seat:
    """A proxy of a layer's attention module for one iteration, whose `layer_idx` is the cache layer of that
    iteration."""

    def __init__(self, attention: CachedAttention, bank: int) -> None:
        self.attention, self.layer_idx = attention, bank

    def __getattr__(self, name: str) -> object:
        return getattr(self.attention, name)


class Bank(nn.Module):
    """The cache layer of one iteration of a layer as a module, since vLLM attaches a cache to each module that calls
    attention."""

    def __init__(self, attention: CachedAttention, bank: int) -> None:
        super().__init__()
        self.layer_idx, self.config, self.scaling = bank, attention.config, attention.scaling
        self.num_key_value_groups, self.is_causal = attention.num_key_value_groups, attention.is_causal
        self.sliding_window = attention.sliding_window

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **kwargs: object
    ) -> object:
        """Attention over this bank. The call is spelled out, since vLLM searches the source of `forward` for it."""
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return attend(self, query, key, value, mask, scaling=self.scaling, **kwargs)


def take_banks(attentions: Iterable[CachedAttention], plan: Plan) -> nn.ModuleDict:
    """Create a `Bank` (cache layer) for each iteration of each layer after its first, by the bank's index.

    Sets `banks` of every attention module, and its `layer_idx` to the index of its first visit.
    """
    layers, made = list(attentions), nn.ModuleDict()
    for attention in layers:
        attention.banks = {}
    for visit in (visit for trip in plan for visit in trip):
        attention = layers[visit.layer]
        if not attention.banks:
            attention.layer_idx = visit.bank
            attention.banks[visit.bank] = attention
        else:
            made[str(visit.bank)] = attention.banks[visit.bank] = Bank(attention, visit.bank)
    return made


def seat(attention: CachedAttention, bank: int | None, arguments: Mapping[str, object]) -> nn.Module | Seat:
    """The module to pass to the attention backend: the layer's own, or a `Seat` or `Bank` if an engine holds the
    cache."""
    if bank is None or bank == attention.layer_idx:
        return attention
    if any(name in arguments for name in HANDED_OVER):
        return Seat(attention, bank)
    return attention.banks[bank] if attention.banks else attention


def handed(
    key: Tensor, value: Tensor, bank: int, arguments: dict[str, Any], installed: str = CACHE
) -> tuple[Tensor, Tensor]:
    """Store keys and values in the cache that continuous batching passes, if any; returns those to attend to.

    From transformers 5.24 on the model stores them, as in any cache; earlier, the attention function does.
    """
    held = arguments.pop("cache", None) if installed == "cache" else None
    return (key, value) if held is None else held.update(key, value, bank, kwargs=arguments)


def engine_config(config: DecoderConfig, plan: Plan) -> DecoderConfig:
    """The configuration to show to an engine, with one layer for each cache layer (bank) that the model needs."""
    unrolled = copy.deepcopy(config)
    layers = banks_of(plan)
    unrolled.num_hidden_layers = len(layers)
    unrolled.layer_types = [config.layer_types[layer] for layer in layers]
    return unrolled


def check_engine(
    config: DecoderConfig,
    recurrence: Recurrence,
    plan: Plan,
    arguments: Mapping[str, object] | None = None,
    attentions: Iterable[CachedAttention] = (),
    multiway: bool = False,
) -> None:
    """Refuse an inference engine with which a model would silently give wrong results.

    Args:
        config: The model's configuration; its attention backend names the engine.
        recurrence: The model's recurrence.
        plan: The visits of a forward pass.
        arguments: Further keyword arguments of the forward pass; None while the model is built.
        attentions: The attention modules of its layers, which may have banks.
        multiway: Whether queries, keys and values have different inputs.
    """
    if len(plan) > 1 or multiway:
        asked = EngineCase(config, recurrence, plan, arguments, attentions, multiway)
        if (why := next((why for holds, why in RULES if holds(asked)), None)) is not None:
            raise ValueError(why.format(asked))


@dataclass
class EngineCase:
    """A model and the inference engine that is to run it, for `check_engine`, which describes the fields."""

    config: DecoderConfig
    recurrence: Recurrence
    plan: Plan
    arguments: Mapping[str, object] | None
    attentions: Iterable[CachedAttention]
    multiway: bool

    def __post_init__(self) -> None:
        self.backend = str(self.config._attn_implementation)
        self.named = self.backend.startswith(ENGINES)
        self.passed = next((name for name in HANDED_OVER if name in (self.arguments or ())), None)
        """The keyword under which the engine passes its cache."""
        self.engine = f"an engine that passes {self.passed}=" if self.passed else f"attn_implementation={self.backend}"
        own = self.passed is None and self.backend.startswith(BACKENDS)
        self.stores = len(self.plan) > 1 and not own
        """Whether the engine's cache must have a layer for each bank."""
        self.trips, self.needed = len(self.plan), len(banks_of(self.plan))

    @property
    def held(self) -> int:
        """The number of layers in the engine's cache; assumed to be enough if only the first forward pass can show
        it."""
        if self.arguments is not None and self.passed is not None:
            return _banks(self.arguments[self.passed])
        if self.arguments is None and self.named:
            return self.needed
        return sum(hasattr(bank, HUNG) for attention in self.attentions for bank in attention.banks.values())

    @property
    def or_unrolled(self) -> str:
        """A further suggestion for the error message, an unrolled export, if the model's iterations equal further plain
        layers."""
        plain = all(getattr(self.config, axis) == DEFAULTS[axis] for axis in ("mixer", "residual"))
        return ", or an export with form='unrolled'" if plain and self.recurrence.unrolls else ""


SLOTS = "{0.engine} keeps one key and value for each token and layer, and {0.config.recurrence} needs slots: "
INSTEAD = "Use `generate` or `fathom serve`"
RULES: tuple[tuple[Callable[[EngineCase], bool], str], ...] = (
    (
        lambda asked: asked.multiway and asked.named,
        "{0.engine} makes queries, keys and values of one input; with residual={0.config.residual} each has its own. "
        + INSTEAD,
    ),
    (
        lambda asked: asked.stores and asked.recurrence.halts,
        SLOTS + "tokens halt at different trips. " + INSTEAD,
    ),
    (
        lambda asked: asked.stores and asked.recurrence.slotted,
        SLOTS + "trips read other trips. " + INSTEAD,
    ),
    (
        lambda asked: asked.stores and asked.recurrence.lends,
        "{0.engine} stores keys and values wherever it attends, and with recurrence_options.kv="
        "{0.config.recurrence_options[kv]} later trips make none. " + INSTEAD,
    ),
    (
        lambda asked: asked.stores and asked.held < asked.needed,
        "{0.engine} is not known to keep a cache for each trip: {0.config.recurrence} makes {0.trips} trips, which "
        "need {0.needed} layers of cache and find {0.held}, and the answers would be wrong. Use `generate`, "
        "`generate_batch` or `fathom serve`{0.or_unrolled}",
    ),
)
"""Engines that a model cannot have: whether the rule holds, and what it says."""


def _banks(cache: object) -> int:
    """The number of layers in an engine's cache, which is a mapping by layer or transformers' paged cache."""
    if isinstance(cache, Sized):
        return len(cache)
    return int(getattr(getattr(cache, "config", None), "num_hidden_layers", 0))

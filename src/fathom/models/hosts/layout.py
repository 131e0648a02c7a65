"""Layouts name the modules of a family's layer, so that Fathom's residuals can act between the sub-layers.

Most decoders of transformers are one of three kinds: norms before the sub-layers, norms after them, or both. A layout
names the parts; everything else (projections, gates, sinks, experts, rotation) stays the family's own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..axes.fields import DecoderConfig


@dataclass(frozen=True)
class Layout:
    """The names of the modules in a family's decoder that are its norms, token mixers, MLPs and embeddings."""

    token: tuple[str, ...] = ("self_attn",)
    """The names of parts that mix tokens; a layer has one of them."""
    channel: tuple[str, ...] = ("mlp",)
    """The names of parts that mix channels; the updates of several are added."""
    before: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm")
    """The norms of the inputs of both."""
    after: tuple[str | None, str | None] = (None, None)
    """The norms of their outputs."""
    multiplier: str | None = None
    """The layer's attribute by which both outputs are multiplied."""
    parallel: str = ""
    """`steps` if both read the layer's input and are added one after the other, `sum` if their sum is added; else
    empty."""
    norms_embedding: bool = False
    """Whether the final norm also norms the embeddings."""
    embedding: str = "embed_tokens"
    norm: str = "norm"
    rotary: str = "rotary_emb"
    """The embedding, the final norm, and what makes angles, if anything does."""
    latent: bool = False
    """Whether attention stores a latent, not keys and values."""
    forgets: bool = False
    """Whether a state is forgotten where a part reads several tokens at once, as in Jamba."""
    sealed: str = ""
    """Why a layer is called whole, so that no residual can stand between its parts; empty if it is not."""

    @classmethod
    def all_of(cls, config: DecoderConfig) -> tuple[Layout, ...]:
        """The layouts in a hosted model's configuration: one, or one for each kind of layer."""
        return tuple(cls(**{key: _tuples(value) for key, value in one.items()}) for one in config.host_layouts)

    def fits(self, held: set[str]) -> bool:
        """Whether a layer with these module names has this layout."""
        if self.sealed:
            return bool(held & {*self.token})
        norms = {name for name in (*self.before, *self.after) if name is not None}
        return norms <= held and bool(held & {*self.token}) and bool(held & {*self.channel})


def _tuples(value: Any) -> Any:
    """Convert a list back to a tuple, since JSON stores tuples as lists."""
    return tuple(value) if isinstance(value, list) else value

"""The logit lens on a causal model that transformers runs and Fathom does not open.

The residual stream after each layer goes through whatever the model itself runs between its last layer and its logits.
Nothing is known of the architecture: a first forward pass records which modules those are, and they must give the
model's own logits again, or the model is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.checkpoints.open import longest_context
from fathom.errors import ModelError
from fathom.lens.look import LensData, Says, checked, evaluating

LIKE = 1e-3
"""Largest allowed difference of the last token's probabilities between the lens and the model itself."""
Calls = list[tuple[nn.Module, Tensor]]
"""Modules and what they returned, in order."""


@torch.no_grad()
def look_plain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    top: int = 5,
    max_tokens: int = 2000,
    name: str = "model",
    progress: Callable[[int], None] | None = None,
) -> LensData:
    """What a model would have predicted after every layer, without the weights of mixers.

    Args:
        model: Any causal language model of transformers whose layers pass one residual stream on.
        tokenizer: Its tokenizer.
        text: The text.
        top: Predictions to keep after every layer.
        max_tokens: Look at no more tokens than this, and never at more than the model's context holds.
        name: The model's name on the page.
        progress: Called after every layer with the number of layers done.
    """
    every_id, pieces = checked(model, tokenizer, text, top, max_tokens)
    length = min(len(every_id), max_tokens, longest_context(model.config) or max_tokens)
    ids = torch.tensor(every_id[:length], device=model.device)
    layers = layers_of(model)
    short = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with evaluating(model):
        with _recorded(model, layers) as (streams, calls):
            logits = model(input_ids=ids[None], use_cache=False, **short).logits[0, -1]
        norm, head = _way(model, logits, calls)
        again = head(norm(streams[-1])[-1:])[0].float().softmax(-1)
        if len(streams) != len(layers) or not torch.allclose(logits.float().softmax(-1), again, atol=LIKE):
            raise _unknown(model)
        says = Says(norm, head, ids, min(top, len(logits)))
        for done, stream in enumerate(streams):
            says.after(stream)
            if progress is not None:
                progress(done + 1)
        says.final(norm(streams[-1]))
    return LensData(
        model=name,
        mechanism=str(model.config.model_type),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens=pieces[:length],
        dropped=len(every_id) - length,
        visits=[(layer, 0) for layer in range(len(layers))],
        trips=[1] * length,
        **says.found(tokenizer),
        sources=[],
        weights=[],
    )


def _way(
    model: PreTrainedModel, logits: Tensor, calls: Calls
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Two functions: from a layer's residual stream `[1, T, C]` to the head's input `[T, C]`, and from there to
    logits."""
    if not calls or calls[-1][0] is not model.get_output_embeddings():
        raise _unknown(model)
    *before, (head, made) = calls
    scaled = _scaling(model, logits, made[0, -1])

    def norm(stream: Tensor) -> Tensor:
        for module, _ in before:
            stream = module(stream)
        return stream[0]

    return norm, lambda hidden: scaled(head(hidden))


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers: the outermost list that has as many modules as the configuration has layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise _unknown(model)


@contextmanager
def _recorded(model: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[list[Tensor], Calls]]:
    """Lists that a forward pass fills: the residual stream after every layer, and the modules that are called after the
    last layer, with their outputs."""
    streams: list[Tensor] = []
    calls: Calls = []

    def on_layer(_: nn.Module, __: object, output: Any) -> None:
        streams.append(_tensor(output))
        calls.clear()

    def on_other(module: nn.Module, _: object, output: Any) -> None:
        if streams and isinstance(output, Tensor):
            calls.append((module, output))

    above = [module for module in model.modules() if module is not layers and layers in set(module.modules())]
    beside = {child for module in above for child in module.children()} - {*above, layers}
    handles = [layer.register_forward_hook(on_layer) for layer in layers]
    handles += [module.register_forward_hook(on_other) for module in beside]
    try:
        yield streams, calls
    finally:
        for handle in handles:
            handle.remove()


def _scaling(model: PreTrainedModel, logits: Tensor, made: Tensor) -> Callable[[Tensor], Tensor]:
    """How the model turns its head's output into logits: unchanged, scaled, or capped."""
    made, logits = made.float(), logits.float()
    factor = float(logits.norm() / made.norm())
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    ways: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x * factor]
    if cap is not None:
        ways.insert(0, lambda x: (x / cap).tanh() * cap)
    for way in ways:
        if torch.allclose(way(made), logits, rtol=1e-2, atol=1e-3):
            return way
    raise _unknown(model)


def _tensor(output: Any) -> Tensor:
    """A module's output, or the first of several."""
    return output[0] if isinstance(output, tuple | list) else output


def _unknown(model: PreTrainedModel) -> ModelError:
    return ModelError(
        f"the lens cannot compute the logits of a {type(model).__name__} from its layers: it supports one list of "
        "layers, then norms, then the head"
    )

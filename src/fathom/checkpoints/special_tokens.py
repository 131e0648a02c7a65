"""The tokens that begin, end and pad texts, from a checkpoint's configuration and its tokenizer.

`fathom generate` (`inference/settings.py`), `fathom serve` (`inference/server.py`) and an exported
`generation_config.json` (`export.py`) take their stop tokens from `stop_tokens`, so all stop at the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

Ids = int | Sequence[int] | None
"""A field of token ids in a configuration: one, several or none."""


def stop_tokens(own: Ids, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end generation: those of the checkpoint, such as a chat model's end of turn, and the tokenizer's
    EOS.

    Args:
        own: The `eos_token_id` of a configuration.
        tokenizer: The tokenizer. Ids of `own` that are not its special tokens belong to another one and are ignored.
    """
    return list(dict.fromkeys([*known(own, tokenizer), *as_list(tokenizer.eos_token_id)]))


def pad_token(own: Ids, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> int | None:
    """The padding token: the checkpoint's own, else the tokenizer's, else a token that ends a text."""
    return next(iter([*known(own, tokenizer), *as_list(tokenizer.pad_token_id), *stops]), None)


def known(own: Ids, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids in a configuration's entry that are special tokens of its tokenizer."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [token for token in as_list(own) if token in special]


def as_list(ids: Ids) -> list[int]:
    """Convert a token id, a list of ids or None to a list; values that are not integers are ignored."""
    several = [ids] if isinstance(ids, int) else ids if isinstance(ids, Sequence) else []
    return [token for token in several if isinstance(token, int)]


def as_field(ids: Sequence[int]) -> Ids:
    """Convert a list of token ids to the form that a configuration has: a single id, a list, or None if it is empty."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def unknown_token(ids: Iterable[int], model: PreTrainedModel) -> str | None:
    """An error message if a model has no embedding for one of these tokens of its tokenizer; None otherwise."""
    size, largest = model.config.get_text_config(decoder=True).vocab_size, max(ids, default=0)
    if largest < size:
        return None
    return f"the tokenizer makes token {largest}, and the model has {size}: the two do not belong together"


def settle_generation(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the tokens that begin, end and pad texts in a generation configuration to those of this tokenizer."""
    stops = stop_tokens(config.eos_token_id, tokenizer)
    config.eos_token_id = as_field(stops)
    config.pad_token_id = pad_token(config.pad_token_id, tokenizer, stops)
    config.bos_token_id = as_field([*known(config.bos_token_id, tokenizer), *as_list(tokenizer.bos_token_id)][:1])

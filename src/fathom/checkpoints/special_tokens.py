"""Which tokens begin, end and fill a text, as a checkpoint's configuration and its tokenizer say together."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import GenerationConfig, PreTrainedTokenizerBase

Ids = int | Sequence[int] | None
"""As configurations hold them: a token, several, or nothing said."""


def stop_tokens(own: Ids, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The checkpoint's own, which for a model that talks end an answer, and the tokenizer's end of text.

    Args:
        own: The `eos_token_id` of a configuration.
        tokenizer: What it says to an id decides whether it stands: one that it has as a word is another tokenizer's.
    """
    return list(dict.fromkeys([*known(own, tokenizer), *as_list(tokenizer.eos_token_id)]))


def pad_token(own: Ids, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> int | None:
    """What fills up rows: the checkpoint's own, else the tokenizer's, else a token that ends a text."""
    return next(iter([*known(own, tokenizer), *as_list(tokenizer.pad_token_id), *stops]), None)


def known(own: Ids, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Those of a configuration's ids that are special tokens of its tokenizer."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [token for token in as_list(own) if token in special]


def as_list(ids: Ids) -> list[int]:
    """One, several or no tokens as a list."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def as_field(ids: Sequence[int]) -> Ids:
    """A list as configurations hold it."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def settle_generation(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make generation begin, end and fill rows with tokens of this tokenizer."""
    stops = stop_tokens(config.eos_token_id, tokenizer)
    config.eos_token_id = as_field(stops)
    config.pad_token_id = pad_token(config.pad_token_id, tokenizer, stops)
    config.bos_token_id = as_field([*known(config.bos_token_id, tokenizer), *as_list(tokenizer.bos_token_id)][:1])

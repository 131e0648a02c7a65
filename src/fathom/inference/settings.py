"""Combines the sampling settings of `fathom generate` with the checkpoint's own, in transformers' form.

Settings of `generation_config.json` that the server does not support are listed in `sampling.py`; `launch.py` warns of
them. `checkpoints/special_tokens.py` decides which EOS tokens end a text by default, and `kvcache/policy.py` which
cache `--kvcache` means.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fathom.checkpoints.special_tokens import as_list, stop_tokens, unknown_token
from fathom.errors import SettingsError
from fathom.inference.sampling import OWN
from fathom.kvcache.policy import Policy

# Options that Fathom sets itself, and options that make `generate` return something other than tokens.
RESERVED = {
    *("max_length", "pad_token_id", "return_dict_in_generate", "num_return_sequences", "compile_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "watermarking_config"),
    "token_healing",  # rewrites the prompt
}
KNOWN = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
KNOWN -= RESERVED | {"max_new_tokens", "transformers_version"}
"""Names of `options`."""
LARGEST, HOTTEST, SEEDS = 1 << 31, 3e38, 1 << 63
WHOLE: dict[str, tuple[int, int]] = {
    "max_new_tokens": (1, sys.maxsize),
    **dict.fromkeys(("num_beams", "num_beam_groups", "prefill_chunk_size"), (1, LARGEST)),
    "prompt_lookup_num_tokens": (1, LARGEST),
    **dict.fromkeys(("top_k", "min_length", "min_new_tokens"), (0, LARGEST)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0, LARGEST)),
    "seed": (-SEEDS, SEEDS - 1),
}
"""Settings that are whole numbers, and the range of each."""
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, HOTTEST),
    **dict.fromkeys(("top_p", "min_p", "epsilon_cutoff", "eta_cutoff"), (0.0, 1.0)),
    **dict.fromkeys(("typical_p", "top_h"), (math.ulp(0.0), 1.0)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (1e-6, 1e9)),
}
"""Settings that are numbers, and the range of each; they may be written as whole numbers, which transformers does not
take. Penalties are kept to what float32 holds once logits are divided by both of them and by the coldest temperature;
past it there is nothing to draw from."""
NEEDED = {"max_new_tokens", "num_beams"}
"""Settings that may not be null."""
LISTS = {"suppress_tokens", "begin_suppress_tokens"}
TOKENS = {"eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", *LISTS}
DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Options by which transformers drafts tokens, so that a step may add several."""
COUNTING = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "bad_words_ids", "sequence_bias")
"""Options that would take padding for tokens of the prompt."""
COLDEST = 1e-20
"""The lowest temperature that logits are divided by; below, they overflow, and the likeliest token is all there is."""
ASKED = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
"""Settings that are no `options`."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. None means the value of the checkpoint's generation_config.json."""

    max_new_tokens: int = 128
    """Maximum new tokens; fewer if the context or the text ends."""
    temperature: float | None = None
    """Divides the logits; 0 takes the likeliest token. 0.8 if the checkpoint has no sampling settings."""
    top_k: int | None = None
    """Draw from the k likeliest tokens; 0 draws from all."""
    top_p: float | None = None
    """Draw from the likeliest tokens with this total probability; 0.95 if the checkpoint has no sampling settings."""
    seed: int | None = None
    """Seed of the draws; None gives a different text every time."""
    options: dict[str, Any] = field(default_factory=dict)
    """Any other argument of transformers' `GenerationConfig`."""
    compile: bool = False
    """Compile decoding, with a static cache: slow to start, then fast on a GPU."""
    memory: Policy | None = None
    """A constant-size cache: the context is not limited."""
    max_trips: int | None = None
    """Maximum trips per token, up to the number that the model was trained for."""
    allow_control: bool = False
    """Let message texts contain the chat template's control tokens, such as `<|im_end|>`."""
    speculate: int | None = None
    """Draft with this many first trips and verify with the rest: the output is the same, and often faster."""

    def __post_init__(self) -> None:
        for name in ASKED:
            if (allowed := refusal(name, getattr(self, name))) is not None:
                raise SettingsError(f"{name}={getattr(self, name)}: allowed: {allowed}")
        if self.speculate is not None and (self.memory is not None or self.compile):
            raise SettingsError("`speculate` must remove tokens from the cache: leave out `kvcache` and `compile`")
        if unknown := sorted(set(self.options) - KNOWN):
            raise SettingsError(
                f"`options` {unknown[0]}: transformers' GenerationConfig has no such option, or Fathom sets it"
            )
        for name, value in self.options.items():
            if (allowed := refusal(name, value)) is not None:
                raise SettingsError(f"`options` {name}={value}: allowed: {allowed}")

    def arguments(self, own: GenerationConfig | None = None) -> dict[str, Any]:
        """These settings as arguments of transformers' `generate`.

        Args:
            own: The model's `generation_config`.
        """
        if own is not None and (fault := refused(own)) is not None:
            raise SettingsError(fault)
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        made: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        draws = getattr(own, "do_sample", None)
        temperature = getattr(own, "temperature", None) if self.temperature is None and draws else self.temperature
        if temperature is not None and temperature < COLDEST:
            made = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}  # defaults
        elif not draws:
            made = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95, **made}
        else:
            made = {"top_k": int(getattr(own, "top_k", None) or 0), **made}  # transformers' default is 50
        if self.compile:
            from transformers import CompileConfig

            made["compile_config"] = CompileConfig()
            made["compile_config"]._compile_all_devices = True
            if self.memory is None:
                made["cache_implementation"] = "static"
        if self.max_trips is not None:
            made["max_trips"] = self.max_trips
        own_whole = {key: value for key in NUMBERS if type(value := getattr(own, key, None)) is int}
        made = {**own_whole, **made, **self.options}
        return {key: float(value) if key in NUMBERS and type(value) is int else value for key, value in made.items()}

    def chosen(self, name: str, model: PreTrainedModel) -> Any:
        """The value of an option, or the checkpoint's value if the option is not set."""
        return self.options.get(name, getattr(model.generation_config, name, None))

    def beams(self, model: PreTrainedModel) -> int:
        """Number of beams."""
        return int(self.chosen("num_beams", model) or 1)

    def stop_strings(self, model: PreTrainedModel) -> list[str]:
        """Strings that end a text."""
        return as_strings(self.chosen("stop_strings", model))

    def stop_tokens(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokens that end a text."""
        if "eos_token_id" in self.options:
            return as_list(self.options["eos_token_id"])
        return stop_tokens(model.generation_config.eos_token_id, tokenizer)

    def assisted(self, model: PreTrainedModel) -> bool:
        """Whether transformers drafts tokens."""
        return any(self.chosen(name, model) for name in DRAFTS)

    def end_decides(self, model: PreTrainedModel) -> bool:
        """Whether the generated text depends on its length limit, as with beam search or a forced last token."""
        return self.beams(model) > 1 or self.chosen("forced_eos_token_id", model) is not None

    def counts_padding(self, model: PreTrainedModel) -> bool:
        """Whether the generated text would depend on the padding before its prompt."""
        begins = self.chosen("forced_bos_token_id", model) is not None  # after a prompt of one token
        return begins or any(self.chosen(name, model) for name in COUNTING)

    def room(self, model: PreTrainedModel, ids: Sequence[int]) -> int:
        """The number of tokens that fit into the context after `ids`; a prompt that fills the context is refused."""
        if (fault := unknown_token(ids, model)) is not None:
            raise SettingsError(fault)
        if self.memory is not None:
            return sys.maxsize
        limit = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
        if len(ids) >= limit:
            raise SettingsError(f"the prompt has {len(ids)} tokens; this model's context is {limit}")
        return limit - len(ids)

    def most_new(self, model: PreTrainedModel, ids: Sequence[int]) -> int:
        """Maximum new tokens after these."""
        return min(self.max_new_tokens, self.room(model, ids))


def refused(own: GenerationConfig) -> str | None:
    """An error message for the first checkpoint setting that is out of range, with its allowed values; transformers
    checks too late."""
    for name in (*OWN, "bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(own, name, None)
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if (allowed := refusal(name, number)) is not None:
            return f"generation_config.json: {name}={value!r:.80}: allowed: {allowed}"
    return None


def refusal(name: str, value: object) -> str | None:
    """The allowed values of a setting if `value` is not allowed, else None; transformers checks too late."""
    if value is None and name not in NEEDED:
        return None
    if (limits := {**WHOLE, **NUMBERS}.get(name)) is not None:
        number = isinstance(value, Integral if name in WHOLE else Real) and not isinstance(value, bool)
        return None if number and limits[0] <= value <= limits[1] else _range(*limits)  # type: ignore[operator]
    if name == "stop_strings":
        texts = value if isinstance(value, list) and value else [value]
        return None if all(isinstance(text, str) and text for text in texts) else "a text or a list of them"
    if name in TOKENS:
        several = isinstance(value, list) and all(type(token) is int for token in value)
        if not several and (type(value) is not int or name in LISTS):
            return "a list of token ids" if name in LISTS else "a token id or a list of them"
    if name == "early_stopping" and not (isinstance(value, bool) or value == "never"):
        return "true, false or never"
    if name == "assistant_ensemble_weight" and not isinstance(value, int | float):
        return "a number"
    return None


def _range(least: float, most: float) -> str:
    kind = "a whole number" if isinstance(least, int) else "a number"
    first, last = (f"{end:g}" if isinstance(end, float) else str(end) for end in (least, most))
    first = "above 0" if least == math.ulp(0.0) else first
    return f"{kind}, {first} or more" if most in (LARGEST, sys.maxsize, HOTTEST) else f"{kind}, {first} to {last}"


def as_strings(given: object) -> list[str]:
    """A list of strings from one, several or none, without empty strings, which occur everywhere and would end every
    text."""
    several = [given] if isinstance(given, str) else given if isinstance(given, Iterable) else []
    return [str(one) for one in several if one != ""]


def read_options(words: Sequence[str]) -> dict[str, object]:
    """Parse `key=value` words; values are JSON, or text if they are not valid JSON."""
    made: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise SettingsError(f"`options` {word}: expected key=value")
        try:
            made[key] = json.loads(value)
        except ValueError:
            made[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return made

"""A conversation with a model, line by line."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.errors import RequestError, SettingsError
from fathom.inference.generate import generate_stream, report_speed, seed_draws
from fathom.inference.processing import Write
from fathom.inference.prompt import encode
from fathom.inference.settings import Sampling


def chat(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    lines: Iterator[str],
    write: Write,
    system: str | None = None,
) -> None:
    """A conversation: every line is answered with the whole conversation as context; `/new` starts another.

    Args:
        model: Any Hugging Face causal language model.
        tokenizer: Its tokenizer, with a chat template.
        sampling: How tokens are drawn.
        lines: What the user says.
        write: Receives the answers as they come.
        system: A first message that says how to answer.
    """
    opening = [{"role": "system", "content": system}] if system else []
    encode(tokenizer, [*opening, {"role": "user", "content": ""}])  # no template: say so before the first line is typed
    messages = list(opening)
    seed_draws(sampling.seed)
    for line in lines:
        if not line.strip():
            continue
        if line.strip() == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        try:
            ids = encode(tokenizer, messages, allow_control=sampling.allow_control)
            sampling.room(model, ids)
        except (SettingsError, RequestError) as error:
            messages.pop()
            write(f"[{error}; /new starts over]\n")
            continue
        made = generate_stream(model, tokenizer, ids, sampling, write, talk=True)
        messages.append({"role": "assistant", "content": made.text})
        write("\n")
        report_speed(made.tokens, made.seconds, made.trips, made.acceptance)

"""An interactive conversation with a model, line by line.

`prompt.py` turns the messages into tokens, for which it needs a chat template, and decides whether their control tokens
become plain text. `cli/chat.py` reads the lines from standard input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.errors import RequestError, SettingsError
from fathom.inference.generate import generate_stream, report_speed, seed_draws
from fathom.inference.processing import Write
from fathom.inference.prompt import encode
from fathom.inference.settings import ASKED, Sampling, read_options

HELP = """/help   lists these commands
/reset  starts a new conversation
/set    shows the sampling settings; with KEY=VALUE changes them:
        /set temperature=0.7 top_p=0.9 max_new_tokens=200 seed=1
Put a space before a message that begins with /. Ctrl-C stops an answer, Ctrl-D
ends.
"""


def chat(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    lines: Iterator[str],
    write: Write,
    system: str | None = None,
) -> None:
    """Run a conversation: each line is answered with the whole conversation as context, unless the line is a command
    (`HELP`).

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
        command, _, words = line.rstrip().partition(" ")
        if not line.strip():
            continue
        try:
            if command == "/reset":
                messages = list(opening)
            elif command == "/help":
                write(HELP)
            elif command == "/set":
                sampling = _set(sampling, words.split())
                write(_settings(sampling))
            elif command.startswith("/"):
                write(f"[{command}: no such command; /help lists them]\n")
            else:
                messages = _answered(model, tokenizer, sampling, [*messages, _turn(line)], write)
        except (SettingsError, RequestError) as error:
            remedy = "" if command == "/set" else "; /reset starts over"
            write(f"[{str(error).replace('`options` ', '/set ')}{remedy}]\n")


def _turn(line: str) -> dict[str, str]:
    text = line.rstrip("\n")
    return {"role": "user", "content": text[1:] if text.startswith(" /") else text}


def _answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    messages: list[dict[str, str]],
    write: Write,
) -> list[dict[str, str]]:
    """The conversation with the model's answer appended; after Ctrl-C, with the part of the answer that was
    generated."""
    ids = encode(tokenizer, messages, allow_control=sampling.allow_control)
    sampling.room(model, ids)
    said: list[str] = []

    def heard(text: str) -> None:
        said.append(text)
        write(text)

    try:
        made = generate_stream(model, tokenizer, ids, sampling, heard, talk=True)
    except KeyboardInterrupt:
        write("\n[stopped]\n")
        return [*messages, {"role": "assistant", "content": "".join(said)}]
    write("\n")
    report_speed(made.tokens, made.seconds, made.trips, made.acceptance)
    return [*messages, {"role": "assistant", "content": made.text}]


def _set(sampling: Sampling, words: list[str]) -> Sampling:
    """The sampling settings changed by a command; a new seed restarts the random numbers."""
    given = read_options(words)
    own = {key: given.pop(key) for key in ASKED if key in given}
    made = replace(sampling, **own, options={**sampling.options, **given})  # type: ignore[arg-type]
    if "seed" in own:
        seed_draws(made.seed)
    return made


def _settings(sampling: Sampling) -> str:
    own = {name: getattr(sampling, name) for name in ASKED}
    shown = {name: "the model's own" if value is None else value for name, value in own.items()}
    return "[" + ", ".join(f"{name}={value}" for name, value in {**shown, **sampling.options}.items()) + "]\n"

"""Text from a trained model: streamed, in conversation, or for a file of prompts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypedDict

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import (
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from fathom.checkpoints.special_tokens import as_list, pad_token, stop_tokens
from fathom.errors import FathomError
from fathom.evaluation.budgets import most_trips, stored_trips
from fathom.inference.cache import Policy
from fathom.inference.sampling import NO_NUMBERS, finite, refused
from fathom.inference.texts import AnswerWords
from fathom.models.speculation import Speculation, check_speculation
from fathom.report.files import HeldError, lock
from fathom.report.progress import ProgressBar

Write = Callable[[str], object]
BATCH = {"cpu": 8, "other": 32}
# Options that are set here, and those that would make `generate` return something other than tokens.
RESERVED = {
    *("max_length", "pad_token_id", "return_dict_in_generate", "num_return_sequences", "compile_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "watermarking_config"),
    "token_healing",  # rewrites the prompt
}
WHOLE = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "prefill_chunk_size", "prompt_lookup_num_tokens"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
}
"""Options that are whole numbers, and the least value of each."""
TOKENS = {"eos_token_id", "bos_token_id", "decoder_start_token_id", "suppress_tokens", "begin_suppress_tokens"}
LISTS = {"suppress_tokens", "begin_suppress_tokens"}
SHARES = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (0.0, 1.0)),
    **dict.fromkeys(("typical_p", "top_h"), (math.ulp(0.0), 1.0)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (1e-6, 1e9)),
}
"""Options that are numbers, and the range of each. Penalties are kept to what float32 holds once logits are divided by
both of them and by the coldest temperature; past it there is nothing to draw from."""
FLOATS = ("temperature", "top_p", *SHARES)
"""Settings that may be written as whole numbers, which transformers does not take."""
DRAFTING = "draft_trips: "
"""How errors of drafting begin."""
COLDEST = 1e-20
"""The lowest temperature that logits are divided by; below, they overflow, and the likeliest token is all there is."""
LARGEST = 1 << 31
SEEDS = 1 << 63


class GenerateError(FathomError, ValueError):
    """A request to generate that cannot be carried out; the message is one line."""


class NoNumbersError(GenerateError):
    """Scores from which no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(NO_NUMBERS)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; None stands for the value in the checkpoint's generation_config.json."""

    max_new_tokens: int = 128
    """Most new tokens; fewer if the context or the text ends."""
    temperature: float | None = None
    """Divides the logits; 0 takes the likeliest token. 0.8 if the checkpoint has no sampling settings."""
    top_k: int | None = None
    """Draw from the k likeliest tokens; 0 from all."""
    top_p: float | None = None
    """Draw from the likeliest tokens that make up this probability. 0.95 if the checkpoint has no sampling settings."""
    seed: int | None = None
    """Seed of the draws; None for another text every time."""
    options: dict[str, Any] = field(default_factory=dict)
    """Any other argument of transformers' `GenerationConfig`."""
    static_cache: bool = False
    """Allocate the cache for the whole text at once."""
    compile: bool = False
    """Compile decoding, with a static cache: slow to begin, then fast on a GPU."""
    memory: Policy | None = None
    """A cache of constant size: prompts are processed one by one, and the context is not limited."""
    max_trips: int | None = None
    """Most trips per token, up to the number that the model was trained for."""
    speculate: int | None = None
    """Draft with this many first trips and check with the rest: the same texts, faster if drafts are good."""

    def __post_init__(self) -> None:
        allowed = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (self.temperature is None or 0 <= self.temperature < math.inf, "0 or more"),
            "top_k": (self.top_k is None or self.top_k >= 0, "0 or more"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0, up to 1"),
            "seed": (self.seed is None or -SEEDS <= self.seed < SEEDS, f"{-SEEDS} to {SEEDS - 1}"),
        }
        for name, (holds, words) in allowed.items():
            if not holds:
                raise GenerateError(f"--{name.replace('_', '-')} {getattr(self, name)}: allowed: {words}")
        if self.memory is not None and (self.static_cache or self.compile):
            raise GenerateError(
                "--kvcache makes a cache that grows and shrinks: leave out --static-cache and --compile"
            )
        if self.speculate is not None and (self.memory is not None or self.static_cache or self.compile):
            raise GenerateError("--speculate crops its cache: leave out --kvcache, --static-cache and --compile")
        if unknown := sorted(set(self.options) - _generation_options()):
            raise GenerateError(f"--set {unknown[0]}: transformers' GenerationConfig has no such option to set here")
        for name, value in self.options.items():
            if (allowed_values := refusal(name, value)) is not None:
                raise GenerateError(f"--set {name}={value}: allowed: {allowed_values}")

    def arguments(self, own: GenerationConfig | None = None) -> dict[str, Any]:
        """These settings as arguments of transformers' `generate`.

        Args:
            own: The model's `generation_config`.
        """
        if own is not None and (fault := refused(own)) is not None:
            raise GenerateError(fault)
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        made: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        draws = getattr(own, "do_sample", None)
        temperature = getattr(own, "temperature", None) if self.temperature is None and draws else self.temperature
        if temperature is not None and temperature < COLDEST:
            made = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}  # defaults
        elif not draws:
            made = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95, **made}
        else:
            made = {"top_k": int(getattr(own, "top_k", None) or 0), **made}  # transformers takes 50 where none is said
        if self.static_cache or self.compile:
            made |= {"cache_implementation": "static", "disable_compile": not self.compile}
        if self.compile:
            from transformers import CompileConfig

            made["compile_config"] = CompileConfig()
            made["compile_config"]._compile_all_devices = True
        if self.max_trips is not None:
            made["max_trips"] = self.max_trips
        own_whole = {key: value for key in FLOATS if type(value := getattr(own, key, None)) is int}
        made = {**own_whole, **made, **self.options}
        return {key: float(value) if key in FLOATS and type(value) is int else value for key, value in made.items()}


def refusal(name: str, value: object) -> str | None:
    """The allowed values of an option of `GenerationConfig`, if this one is not; transformers checks too late."""
    if value is None and name != "num_beams":
        return None
    if name in WHOLE and not (type(value) is int and WHOLE[name] <= value < LARGEST):
        return f"a whole number, {WHOLE[name]} or more"
    if name in SHARES:
        least, most = SHARES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            return "a number from 1e-6 to 1e9" if most > 1 else f"a number {'above' if least else 'from'} 0, up to 1"
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


@dataclass(frozen=True)
class Generated:
    """A generated text, with token counts and time."""

    text: str
    """Without the prompt."""
    prompt_tokens: int
    tokens: int
    seconds: float
    finish: str = "length"
    """`stop` where the model ended the text, else `length`."""
    trips: float | None = None
    """Mean trips per token, the prompt's included; None for a model of one trip."""
    acceptance: float | None = None
    """Share of drafted tokens that were right, of all rows of a batch; None without drafts."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second; reading the prompt counts as time."""
        return self.tokens / self.seconds if self.seconds else 0.0


def check_drafts(model: PreTrainedModel, draft_trips: int | None, max_trips: int | None) -> None:
    """Refuse to draft with trips that the model does not make, before any text is shown."""
    if draft_trips is None:
        return
    if most_trips(model) == 1:
        raise GenerateError(f"--speculate {draft_trips}: this model makes one trip, there is nothing to draft with")
    try:
        trips = max_trips or model.config.max_trips or model.model.recurrence.trips
        if trips == 1:
            raise ValueError("of one trip, as --max-trips or the checkpoint has it, there is nothing to draft with")
        check_speculation(model, Speculation(draft_trips), trips)
    except ValueError as error:
        raise GenerateError(f"--speculate {draft_trips}: {error}") from error


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    sampling: Sampling | None = None,
    write: Write | None = None,
) -> Generated:
    """Continue a prompt.

    Args:
        model: Any Hugging Face causal language model.
        tokenizer: Its tokenizer.
        prompt: What to continue; an empty one starts a new document.
        sampling: How tokens are drawn.
        write: Receives the text as it comes, whole characters at a time.
    """
    sampling = sampling or Sampling()
    ids = encode(tokenizer, prompt)
    _room(model, ids, sampling)
    _seed(sampling.seed)
    return _stream(model, tokenizer, ids, sampling, write)


def generate_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[Generated]:
    """Continue several prompts, given as ids, at once; where memory runs out, half of them at a time."""
    made: list[Generated] = []
    for one in _each(model, tokenizer, prompts, sampling, [False] * len(prompts)):
        if isinstance(one, NoNumbersError):
            raise one
        made.append(one)
    return made


def _each(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    talks: Sequence[bool],
) -> list[Generated | NoNumbersError]:
    """As `generate_batch`, with the error of each prompt whose scores are no numbers, which halves find."""
    rooms = [_most_new(model, prompt, sampling) for prompt in prompts]
    if len(set(rooms)) > 1 and _end_decides(model, sampling):
        made: dict[int, Generated | NoNumbersError] = {}
        for room in set(rooms):
            rows = [i for i, one in enumerate(rooms) if one == room]
            some = _each(model, tokenizer, [prompts[i] for i in rows], sampling, [talks[i] for i in rows])
            made.update(zip(rows, some, strict=True))
        return [made[i] for i in range(len(prompts))]
    try:
        return list(_run(model, tokenizer, prompts, sampling, None, talks))
    except torch.OutOfMemoryError:
        if len(prompts) == 1:
            raise
        torch.cuda.empty_cache()
    except NoNumbersError as error:  # of one row; or of padding's own embedding, which a row alone has not
        if len(prompts) == 1:
            return [error]
    half = len(prompts) // 2
    parts = ((prompts[:half], talks[:half]), (prompts[half:], talks[half:]))
    return [one for some, kinds in parts for one in _each(model, tokenizer, some, sampling, kinds)]


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[dict[str, Any]], /, **variables: object
) -> list[int]:
    """A text as ids, an empty one as the token that begins a document; or the messages of a conversation.

    Args:
        tokenizer: For a conversation it has a template.
        prompt: What to read.
        variables: Further ones for the template.
    """
    if isinstance(prompt, str):
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        # Too long a prompt is reported later.
        ids = list(tokenizer(prompt, verbose=False)["input_ids"]) if prompt else [begin] if begin is not None else []
    elif tokenizer.chat_template:
        whole = written(tokenizer, prompt, **variables)
        ids = list(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])
    else:
        raise GenerateError("this model has no chat template: it continues texts, give it a prompt")
    if not ids:
        raise GenerateError("this prompt has no tokens, and there is nothing to continue")
    return ids


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], /, **variables: object) -> str:
    """A conversation as text, by the tokenizer's chat template; one that it does not take is a `GenerateError`.

    Args:
        tokenizer: It has a template.
        messages: As `role` and `content`.
        variables: Further ones for the template.
    """
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GenerateError(f"this conversation cannot be read: {reason}") from error


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
    _seed(sampling.seed)
    for line in lines:
        if not line.strip():
            continue
        if line.strip() == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        try:
            ids = encode(tokenizer, messages)
            _room(model, ids, sampling)
        except GenerateError as error:
            messages.pop()
            write(f"[{error}; /new starts over]\n")
            continue
        made = _stream(model, tokenizer, ids, sampling, write, talk=True)
        messages.append({"role": "assistant", "content": made.text})
        write("\n")
        report_speed(made.tokens, made.seconds, made.trips, made.acceptance)


class FileSummary(TypedDict):
    """What `generate_file` did; `done_before` lines were there from a stopped run."""

    prompts: int
    done_before: int
    tokens: int
    seconds: float


class Answer(TypedDict, total=False):
    """The fields that are added to a line: the first three, with `trips` if tokens may halt; or `error`."""

    completion: str
    tokens: int
    finish: str
    trips: float
    error: str


class Prompt(TypedDict, total=False):
    """The fields of a line of prompts that are read."""

    prompt: str
    messages: list[dict[str, str]]


def generate_file(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Path,
    out: Path,
    sampling: Sampling,
    batch_size: int | None = None,
) -> FileSummary:
    """Continue every prompt of a JSONL file; a run that was stopped is continued by the same call.

    A line has `prompt`, or `messages` for a chat model; line n of the output is line n of the input with
    `completion`, `tokens` and `finish` added, or `error`. Batches are consecutive lines and each has its own seed, made
    of the seed and its place, so what a stopped and continued run draws is what an uninterrupted one draws.
    """
    if batch_size is not None and batch_size < 1:
        raise GenerateError(f"--batch-size {batch_size}: allowed: 1 or more")
    if out.exists() and prompts.exists() and out.samefile(prompts):
        raise GenerateError(f"--out {out} is the file of prompts; choose another")
    records = _read_records(prompts)
    size = batch_size or BATCH["cpu" if model.device.type == "cpu" else "other"]
    if sampling.memory is not None:
        if batch_size not in (None, 1):
            raise GenerateError(
                f"--batch-size {batch_size}: with --kvcache prompts go one by one, since none is padded"
            )
        size = 1
    with _locked(out) as file, ProgressBar("generating", len(records)) as bar:
        done = began_with = _resume(file, records, prompts, out)
        tokens, began = 0, time.perf_counter()
        for start in range(done - done % size, len(records), size):
            batch = records[start : start + size]
            _seed(None if sampling.seed is None else sampling.seed + start)
            made = _answer(model, tokenizer, batch, sampling)
            lines = [json.dumps({**r, **a}, ensure_ascii=False) + "\n" for r, a in zip(batch, made, strict=True)]
            # After a stop the first batch may be half written.
            file.write("".join(lines[done - start :]).encode())
            file.flush()
            os.fsync(file.fileno())
            tokens += sum(answer.get("tokens", 0) for answer in made)
            done = start + len(batch)
            bar.update(done)
    seconds = time.perf_counter() - began
    return {"prompts": len(records), "done_before": began_with, "tokens": tokens, "seconds": seconds}


def to_terminal(text: str) -> None:
    """Show text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    sampling: Sampling,
    write: Write | None,
    talk: bool = False,
) -> Generated:
    if write is None or _beams(model, sampling) > 1:  # with beams the text is known only at the end
        made = _run(model, tokenizer, [ids], sampling, None, [talk])[0]
        (write or len)(made.text)
        return made
    return _run(model, tokenizer, [ids], sampling, Streamer(_words(tokenizer, ids, talk), write), [talk])[0]


def _words(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], talk: bool) -> AnswerWords:
    """For what continues a prompt, or answers a conversation, which is a text of its own."""
    return AnswerWords(tokenizer, after=() if talk else ids)


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    streamer: Streamer | None,
    talks: Sequence[bool],
) -> list[Generated]:
    """Generate for several prompts at once, padded on the left so that all continue at the last column."""
    stops, strings = _stop_tokens(model, tokenizer, sampling), _stop_strings(model, sampling)
    pad = pad_token(None, tokenizer, stops) or 0
    ids, mask = (rows.to(model.device) for rows in _padded(prompts, pad))
    width = ids.shape[1]
    # All rows get the largest limit; rows with a shorter one are cut off below.
    rooms = [_most_new(model, prompt, sampling) for prompt in prompts]
    arguments = {
        "max_new_tokens": max(rooms),
        "pad_token_id": pad,
        **sampling.arguments(model.generation_config),
        "eos_token_id": stops or None,
        **dict.fromkeys(("stop_strings", "token_healing"), None),  # the checkpoint's too
        "num_return_sequences": 1,
    }
    if strings:
        arguments["stopping_criteria"] = StoppingCriteriaList(
            [OfTheText(StopStringCriteria(tokenizer, strings), width)]
        )
    check_drafts(model, sampling.speculate, sampling.max_trips)
    drafts = None if sampling.speculate is None else Speculation(sampling.speculate)
    if drafts is not None:
        arguments["speculation"] = drafts
    arguments |= _processing(model, sampling, stops, ids, mask)
    began = time.perf_counter()
    with _in_one_line(sampling):
        if sampling.memory is not None:
            arguments |= sampling.memory.read(model, ids, _beams(model, sampling), max_trips=sampling.max_trips)
        out = model.generate(
            ids,
            attention_mask=mask,
            streamer=streamer,
            return_dict_in_generate=True,
            **arguments,
        )
    seconds = time.perf_counter() - began
    made = []
    for prompt, row, room, talk in zip(prompts, out.sequences[:, width:].tolist(), rooms, talks, strict=True):
        kept, finish = _ended(row[:room], room, stops, strings, pad, tokenizer)
        text = _words(tokenizer, prompt, talk).add(kept, last=True)  # as it is streamed
        made.append(Generated(text, len(prompt), len(kept), seconds, finish))
    columns = [width + one.tokens - 1 for one in made]  # a last token is read only while other rows go on
    trips = stored_trips(model, out.past_key_values, len(made), columns, sampling.max_trips)
    share = None if drafts is None else drafts.acceptance
    return [replace(one, trips=mean, acceptance=share) for one, mean in zip(made, trips, strict=True)]


@contextlib.contextmanager
def _in_one_line(sampling: Sampling) -> Iterator[None]:
    """What transformers says of settings, as a `GenerateError`."""
    try:
        yield
    except GenerateError:
        raise
    except (ValueError, NotImplementedError) as error:  # contradictory options
        words = " ".join(str(error).split())
        option = f"--speculate {sampling.speculate}" if words.startswith(DRAFTING) else "transformers"
        raise GenerateError(f"{option}: {words.removeprefix(DRAFTING)}") from error
    except (TypeError, IndexError, ImportError) as error:  # values of options of which transformers checks nothing
        if not sampling.options:
            raise
        raise GenerateError(f"--set {' '.join(sampling.options)}: transformers: {error}") from error


def _padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts beside each other, padded on the left, `[B, T]`, and a mask that is 0 on padding."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    return ids, mask


def _ended(
    row: list[int],
    room: int,
    stops: Sequence[int],
    strings: Sequence[str],
    pad: int,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[int], str]:
    """A row up to its end, and why it ended. After a stop string comes padding, which may be a stop token."""
    end = next((i for i, token in enumerate(row) if token in stops), len(row))
    if strings:
        last = end
        while last and row[last - 1] == pad:
            last -= 1
        before = tokenizer.decode(row[: max(0, last - 1)])
        for n in range(last, end + 1):  # a token that is also the padding may complete a string
            text = tokenizer.decode(row[:n])
            if any(string in text and string not in before for string in strings):
                return row[:n], "stop"
            before = text
    return row[: end + 1], "stop" if end < room else "length"


class OfTheText(StoppingCriteria):
    """A criterion that sees what was generated, and nothing of the prompt.

    Args:
        inner: The criterion.
        width: Tokens of the prompt, with its padding.
    """

    def __init__(self, inner: StoppingCriteria, width: int) -> None:
        self.inner, self.width = inner, width

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **more: Any) -> torch.BoolTensor:
        """Which rows `[B, T]` end."""
        made: torch.BoolTensor = self.inner(input_ids[:, self.width :], scores, **more)
        return made


class Streamer(BaseStreamer):
    """Writes an answer's words as its tokens come. Transformers' own loses blanks that begin a line.

    Args:
        words: What makes them of tokens.
        write: Receives them.
    """

    def __init__(self, words: AnswerWords, write: Write) -> None:
        self.words, self.write, self.prompt = words, write, True

    def put(self, value: Tensor) -> None:
        """New tokens; the first ones are the prompt."""
        if not self.prompt:
            self.write(self.words.add(value.flatten().tolist()))
        self.prompt = False

    def end(self) -> None:
        """No more tokens."""
        self.write(self.words.add([], last=True))


class Finite(LogitsProcessor):
    """Refuses logits from which no token can be chosen; of these, transformers takes the first, or raises."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` as they are."""
        if not finite(scores).all():
            none_left = bool((scores.amax(-1) == -math.inf).any())
            raise GenerateError("the settings leave no token to choose from") if none_left else NoNumbersError()
        return scores


class Unpadded(LogitsProcessor):
    """A processor of logits that reads each row from where its text begins, without the padding before it.

    Args:
        process: What it does to one row.
        first: The column where each row's text begins.
    """

    def __init__(self, process: LogitsProcessor, first: Sequence[int]) -> None:
        self.process, self.first = process, first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` after `[B, T]`."""
        rows = zip(input_ids, scores, self.first, strict=True)
        return torch.cat([self.process(ids[None, first:], row[None]) for ids, row, first in rows])


def _processing(
    model: PreTrainedModel, sampling: Sampling, stops: list[int], ids: Tensor, mask: Tensor
) -> dict[str, Any]:
    """Arguments of `generate` that check logits, and keep padding out of what depends on a row's tokens or length."""
    if mask.all():
        return {"logits_processor": LogitsProcessorList([Finite()])}

    def chosen(name: str) -> Any:
        return sampling.options.get(name, getattr(model.generation_config, name))

    again, prompt = (float(chosen(name) or 1) for name in ("repetition_penalty", "encoder_repetition_penalty"))
    size, least = chosen("no_repeat_ngram_size") or 0, 0 if chosen("min_new_tokens") else chosen("min_length") or 0
    inner, off = list[LogitsProcessor](), {}
    if again != 1:
        inner.append(RepetitionPenaltyLogitsProcessor(again))
        off["repetition_penalty"] = 1.0
    if size:
        inner.append(NoRepeatNGramLogitsProcessor(size))
        off["no_repeat_ngram_size"] = 0
    if least and stops:
        inner.append(MinLengthLogitsProcessor(least, stops, device=str(model.device)))
        off["min_length"] = 0
    first = mask.argmax(1).repeat_interleave(_beams(model, sampling)).tolist()
    processors = LogitsProcessorList([Finite(), *(Unpadded(one, first) for one in inner)])
    if prompt != 1:
        processors.append(EncoderRepetitionPenaltyLogitsProcessor(prompt, ids.where(mask == 1, ids[:, -1:])))
        off["encoder_repetition_penalty"] = 1.0
    return {**off, "logits_processor": processors}


def _room(model: PreTrainedModel, ids: Sequence[int], sampling: Sampling) -> int:
    if sampling.memory is not None:
        return sys.maxsize
    limit = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    if len(ids) >= limit:
        raise GenerateError(f"the prompt has {len(ids)} tokens; this model's context is {limit}")
    return limit - len(ids)


def _most_new(model: PreTrainedModel, ids: Sequence[int], sampling: Sampling) -> int:
    return min(sampling.max_new_tokens, _room(model, ids, sampling))


def _end_decides(model: PreTrainedModel, sampling: Sampling) -> bool:
    """Whether a text depends on where it must end: the best of several beams does, and a last token that is forced."""
    own = getattr(model.generation_config, "forced_eos_token_id", None)
    return _beams(model, sampling) > 1 or sampling.options.get("forced_eos_token_id", own) is not None


def _beams(model: PreTrainedModel, sampling: Sampling) -> int:
    return int(sampling.options.get("num_beams") or model.generation_config.num_beams or 1)


def _stop_strings(model: PreTrainedModel, sampling: Sampling) -> list[str]:
    own = as_strings(model.generation_config.stop_strings)
    return as_strings(sampling.options["stop_strings"]) if "stop_strings" in sampling.options else own


def as_strings(given: object) -> list[str]:
    """One, several or no strings as a list, without empty ones, which stand everywhere and so would end every text."""
    several = [given] if isinstance(given, str) else given if isinstance(given, Iterable) else []
    return [str(one) for one in several if one != ""]


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> list[int]:
    if "eos_token_id" in sampling.options:
        return as_list(sampling.options["eos_token_id"])
    return stop_tokens(model.generation_config.eos_token_id, tokenizer)


def _answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Prompt], sampling: Sampling
) -> list[Answer]:
    """The fields to add to each line; one that cannot be continued gets `error` and does not stop the others."""
    answers: list[Answer] = []
    prompts: list[list[int]] = []
    for record in batch:
        try:
            ids = encode(tokenizer, record["prompt"] if "prompt" in record else record["messages"])
            _room(model, ids, sampling)
            prompts.append(ids)
            answers.append({})
        except GenerateError as error:
            answers.append({"error": str(error)})
    talks = ["prompt" not in record for record, answer in zip(batch, answers, strict=True) if not answer]
    made = iter(_each(model, tokenizer, prompts, sampling, talks) if prompts else ())
    for answer in answers:
        if not answer:
            one = next(made)
            if isinstance(one, NoNumbersError):
                answer["error"] = str(one)
                continue
            answer.update({"completion": one.text, "tokens": one.tokens, "finish": one.finish})
            if one.trips is not None:
                answer["trips"] = round(one.trips, 3)
    return answers


def _read_records(path: Path) -> list[Prompt]:
    """Every line, checked before the first token is drawn."""
    if not path.is_file():
        raise GenerateError(f"--prompts {path}: no such file")
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
                json.dumps(record, ensure_ascii=False).encode()
            except UnicodeDecodeError:
                raise GenerateError(f"{path}:{number}: not UTF-8") from None
            except UnicodeEncodeError as error:  # it could not be written again
                half = ascii(error.object[error.start])[1:-1]
                raise GenerateError(f"{path}:{number}: {half} is half of a surrogate pair, and no text") from None
            except ValueError as error:
                raise GenerateError(f"{path}:{number}: bad JSON: {error}") from None
            good = isinstance(record, dict) and (
                isinstance(record.get("prompt"), str)
                or ("prompt" not in record and isinstance(record.get("messages"), list))
            )
            if not good:
                raise GenerateError(f'{path}:{number}: expected {{"prompt": "..."}} or {{"messages": [...]}}')
            if taken := {"completion", "tokens", "finish", "trips", "error"} & set(record):
                raise GenerateError(f"{path}:{number}: the field {min(taken)!r} is where the output goes")
            records.append(record)
    return records


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[IO[bytes]]:
    """The output file, locked against a second process that writes it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(out.with_name(f".{out.name}.lock")))
        except HeldError as held:
            raise GenerateError(f"{out}: another process is writing it{held.advice}") from None
        yield stack.enter_context(out.open("a+b"))


def _resume(file: IO[bytes], records: Sequence[Prompt], prompts: Path, out: Path) -> int:
    """The number of finished lines; a half-written last line is removed."""
    file.seek(0)
    done = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            if done == len(records) or not _half(line, records[done]):
                raise GenerateError(f"{out}:{done + 1}: not an answer to {prompts}; choose another --out")
            break
        try:
            before = json.loads(line)
        except ValueError:
            before = None
        if done == len(records) or not isinstance(before, dict) or not records[done].items() <= before.items():
            raise GenerateError(f"{out}:{done + 1}: not an answer to {prompts}; choose another --out")
        done += 1
        end = file.tell()
    file.truncate(end)
    file.seek(end)
    return done


def _half(line: bytes, record: Prompt) -> bool:
    """Whether a line without an end is the beginning of an answer to a record."""
    answer = json.dumps(record, ensure_ascii=False).encode()[:-1]
    return line.startswith(answer) or answer.startswith(line)


def _generation_options() -> set[str]:
    from transformers import GenerationConfig

    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return known - RESERVED - {"max_new_tokens", "transformers_version"}


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


def report_speed(tokens: int, seconds: float, trips: float | None = None, acceptance: float | None = None) -> None:
    """Tokens, seconds and their ratio, on standard error."""
    speed = tokens / seconds if seconds else 0.0
    depth = "" if trips is None else f", {trips:.2f} trips per token"
    depth += "" if acceptance is None else f", {acceptance:.0%} of drafts right"
    print(f"{tokens} tokens, {seconds:.1f} s, {speed:.1f} tokens/s{depth}", file=sys.stderr, flush=True)

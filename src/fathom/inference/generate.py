"""Generate text with a trained model: complete, streamed, or for several prompts at once.

`_runs_with` decides which prompts of a batch run separately. `settings.py` decides how tokens are drawn, when a text
ends, and which settings would mistake padding for text. `prompt_file.py` forms the batches of a file and resumes, and
`models/trips/speculation.py` makes drafts. Tokens are drawn by transformers; `sampling.py` is for `fathom serve`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from fathom.checkpoints.special_tokens import pad_token
from fathom.errors import FathomError, RequestError, SettingsError
from fathom.inference.positions import depends_on_company, passes_the_context
from fathom.inference.processing import Finite, OfTheText, Streamer, Write
from fathom.inference.prompt import encode
from fathom.inference.settings import Sampling
from fathom.inference.texts import AnswerWords
from fathom.iterations import most_trips, stored_trips
from fathom.models.axes.cache_name import returned
from fathom.models.trips.speculation import Speculation, check_speculation

USUAL = {"bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p"} | {
    "transformers_version",
    "_from_model_config",
}
"""Settings of a checkpoint whose values are checked, or that choose no way of generating."""
DRAFTING = "draft_trips: "
"""How errors of drafting begin."""


@dataclass(frozen=True)
class Generated:
    """A generated text, with token counts and time."""

    text: str
    """The text, without the prompt."""
    prompt_tokens: int
    tokens: int
    seconds: float
    finish: str = "length"
    """`stop` if the model ended the text, else `length`."""
    trips: float | None = None
    """Mean loop iterations per token, the prompt's included; None with one trip, or with beam search and halting."""
    acceptance: float | None = None
    """Share of drafted tokens that were accepted, over the whole batch; None without drafts."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole call, in which reading the prompt counts as time."""
        return self.tokens / self.seconds if self.seconds else 0.0


def check_drafts(model: PreTrainedModel, draft_trips: int | None, max_trips: int | None) -> None:
    """Raise an error, before any text is shown, if the model cannot draft with its first `draft_trips` iterations."""
    if draft_trips is None:
        return
    if most_trips(model) == 1:
        raise SettingsError(f"speculate={draft_trips}: this model has no loop iterations to draft with")
    try:
        trips = max_trips or model.config.max_trips or model.model.recurrence.trips
        if trips == 1:
            raise ValueError("drafting needs two iterations or more; `max_trips` or the checkpoint allows one")
        check_speculation(model, Speculation(draft_trips), trips)
    except ValueError as error:
        raise SettingsError(f"speculate={draft_trips}: {error}") from error


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
        sampling: How tokens are sampled.
        write: Called with each new piece of text; pieces end at whole characters. With beams, and with stop strings
            while tokens are drafted, the text is one piece.
    """
    if not hasattr(model, "generate") or hasattr(tokenizer, "generate") or not callable(tokenizer):
        raise SettingsError("generate takes a model and a tokenizer: `fathom.load(DIRECTORY)` opens both")
    sampling = sampling or Sampling()
    ids = encode(tokenizer, prompt)
    sampling.room(model, ids)
    seed_draws(sampling.seed)
    return generate_stream(model, tokenizer, ids, sampling, write)


def generate_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[Generated]:
    """Continue several prompts (token ids) in one batch; if memory runs out, each half of the batch is generated
    separately."""
    made: list[Generated] = []
    for one in generate_each(model, tokenizer, prompts, sampling, [False] * len(prompts)):
        if isinstance(one, RequestError):
            raise one
        made.append(one)
    return made


def generate_each(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    talks: Sequence[bool],
) -> list[Generated | RequestError]:
    """Like `generate_batch`, but returns an error for each prompt with non-finite logits, which it finds by halving the
    batch."""
    kinds = [_runs_with(model, prompt, sampling) for prompt in prompts]
    if len(set(kinds)) > 1:
        made: dict[int, Generated | RequestError] = {}
        for kind in set(kinds):
            rows = [i for i, one in enumerate(kinds) if one == kind]
            some = generate_each(model, tokenizer, [prompts[i] for i in rows], sampling, [talks[i] for i in rows])
            made.update(zip(rows, some, strict=True))
        return [made[i] for i in range(len(prompts))]
    try:
        return list(_run(model, tokenizer, prompts, sampling, None, talks))
    except torch.OutOfMemoryError:
        if len(prompts) == 1:
            raise
        torch.cuda.empty_cache()
    except RequestError as error:  # of one sequence, or of the padding behind one that has ended
        if len(prompts) == 1:
            return [error]
    half = len(prompts) // 2
    parts = ((prompts[:half], talks[:half]), (prompts[half:], talks[half:]))
    return [one for some, talk in parts for one in generate_each(model, tokenizer, some, sampling, talk)]


def _runs_with(model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling) -> tuple[int, ...]:
    """A key by which prompts are grouped into batches: prompts with equal keys may share a batch. The key is their room
    for new tokens, or their length."""
    static = sampling.memory is not None and sampling.compile
    if static or depends_on_company(model) or sampling.counts_padding(model):
        return (len(prompt),)
    if sampling.end_decides(model) or not passes_the_context(model):
        return (sampling.most_new(model, prompt),)
    return ()


def generate_stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    sampling: Sampling,
    write: Write | None,
    talk: bool = False,
) -> Generated:
    """Continue token ids, streaming words; an answer in a conversation (`talk`) is decoded separately from its
    prompt."""
    late = sampling.beams(model) > 1 or (sampling.assisted(model) and sampling.stop_strings(model))
    if write is None or late:  # the text is only known at the end
        made = _run(model, tokenizer, [ids], sampling, None, [talk])[0]
        (write or len)(made.text)
        return made
    words = AnswerWords(tokenizer, after=() if talk else ids)
    return _run(model, tokenizer, [ids], sampling, Streamer(words, write), [talk])[0]


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    streamer: Streamer | None,
    talks: Sequence[bool],
) -> list[Generated]:
    """Generate for several prompts in one batch, padded on the left so that all continue at the last column."""
    stops, strings = sampling.stop_tokens(model, tokenizer), sampling.stop_strings(model)
    pad = pad_token(None, tokenizer, stops) or 0
    ids, mask = (rows.to(model.device) for rows in _padded(prompts))
    width = ids.shape[1]
    # All sequences get the largest limit; those with a smaller one are cut off below.
    rooms = [sampling.most_new(model, prompt) for prompt in prompts]
    arguments = {
        "max_new_tokens": max(rooms),
        "pad_token_id": pad,
        **sampling.arguments(model.generation_config),
        "eos_token_id": stops or None,
        **dict.fromkeys(("stop_strings", "token_healing"), None),  # including those of the checkpoint
        "num_return_sequences": 1,
        "logits_processor": LogitsProcessorList([Finite()]),
    }
    ending = None
    if strings:
        ending = OfTheText(StopStringCriteria(tokenizer, strings), width, sampling.assisted(model))
        arguments["stopping_criteria"] = StoppingCriteriaList([ending])
    check_drafts(model, sampling.speculate, sampling.max_trips)
    drafts = None if sampling.speculate is None else Speculation(sampling.speculate)
    if drafts is not None:
        arguments["speculation"] = drafts
    began = time.perf_counter()
    with _in_one_line(sampling, model.generation_config):
        if sampling.memory is not None:
            beams, limit = sampling.beams(model), sampling.max_trips
            arguments |= sampling.memory.read(model, ids, mask, beams, max_trips=limit, static=sampling.compile)
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
        row = row if ending is None else row[: ending.end]
        kept, finish = _ended(row[:room], room, stops, strings, pad, tokenizer)
        text = AnswerWords(tokenizer, after=() if talk else prompt).add(kept, last=True)  # as in streaming
        made.append(Generated(text, len(prompt), len(kept), seconds, finish))
    columns = [width + one.tokens - 1 for one in made]  # a last token is read only while other sequences continue
    trips = stored_trips(model, returned(out), len(made), columns, sampling.max_trips)
    share = None if drafts is None else drafts.acceptance
    return [replace(one, trips=mean, acceptance=share) for one, mean in zip(made, trips, strict=True)]


@contextlib.contextmanager
def _in_one_line(sampling: Sampling, own: GenerationConfig) -> Iterator[None]:
    """Convert errors that transformers raises about settings to a `SettingsError` of one line."""
    try:
        yield
    except FathomError:
        raise
    except (ValueError, NotImplementedError) as error:  # contradictory options
        words = " ".join(str(error).split())
        option = f"`speculate={sampling.speculate}`" if words.startswith(DRAFTING) else "transformers"
        raise SettingsError(f"{option}: {words.removeprefix(DRAFTING)}") from error
    # For values that transformers does not check.
    except (TypeError, IndexError, ImportError, AssertionError, ArithmeticError, StrictDataclassError) as error:
        named = {key for key, value in own.to_diff_dict().items() if value is not False} - {"use_cache"}
        theirs = sorted(named - USUAL - sampling.options.keys())
        if not sampling.options and not theirs:
            raise
        where = [f"`options` {' '.join(sampling.options)}"] if sampling.options else []
        where += [f"generation_config.json: {', '.join(theirs)}"] if theirs else []
        words = " ".join(str(error).split())
        raise SettingsError(f"{'; '.join(where)}: transformers: {type(error).__name__}: {words}") from error


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, `[B, T]`, and a mask that is 0 on padding.

    A prompt's padding is its own first token, so a penalty on tokens that occurred meets no others.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[prompt[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _ended(
    row: list[int],
    room: int,
    stops: Sequence[int],
    strings: Sequence[str],
    pad: int,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[int], str]:
    """The tokens of a sequence up to its end, and the reason why it ended. After a stop string comes padding, which may
    be a stop token."""
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


def seed_draws(seed: int | None) -> None:
    """Seed torch's random number generators if a seed is given."""
    if seed is not None:
        torch.manual_seed(seed)


def report_speed(tokens: int, seconds: float, trips: float | None = None, acceptance: float | None = None) -> None:
    """Print tokens, seconds and tokens per second on standard error."""
    speed = tokens / seconds if seconds else 0.0
    depth = "" if trips is None else f", {trips:.2f} iterations per token"
    depth += "" if acceptance is None else f", {acceptance:.0%} of drafts accepted"
    print(f"{tokens} tokens, {seconds:.1f} s, {speed:.1f} tokens/s{depth}", file=sys.stderr, flush=True)

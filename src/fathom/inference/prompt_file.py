"""A file of prompts, continued; a run that was stopped goes on."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TypedDict

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.data.sources import lines_of
from fathom.errors import HeldError, RequestError, SettingsError
from fathom.inference.generate import generate_each, seed_draws
from fathom.inference.prompt import encode
from fathom.inference.settings import Sampling
from fathom.report.files import lock
from fathom.report.progress import ProgressBar

BATCH = {"cpu": 8, "other": 32}


class FileSummary(TypedDict):
    """What `generate_file` did; `done_before` lines were there from a stopped run, `errors` have no completion."""

    prompts: int
    done_before: int
    errors: int
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
    out: Path | None,
    sampling: Sampling,
    batch_size: int | None = None,
) -> FileSummary:
    """Continue every prompt of a JSONL file; a run that was stopped is continued by the same call.

    Without `out` the lines go to standard output as they are made, and a stopped run begins again.

    A line has `prompt`, or `messages` for a chat model; line n of the output is line n of the input with
    `completion`, `tokens` and `finish` added, or `error`. Batches are consecutive lines and each has its own seed, made
    of the seed and its place, so what a stopped and continued run draws is what an uninterrupted one draws.
    """
    if batch_size is not None and batch_size < 1:
        raise SettingsError(f"--batch-size {batch_size}: allowed: 1 or more")
    if out is not None and out.exists() and prompts.exists() and out.samefile(prompts):
        raise SettingsError(f"--out {out} is the file of prompts; choose another")
    records = _read_records(prompts)
    size = batch_size or BATCH["cpu" if model.device.type == "cpu" else "other"]
    if sampling.memory is not None:
        if batch_size not in (None, 1):
            raise SettingsError(
                f"--batch-size {batch_size}: with --kvcache prompts go one by one, since none is padded"
            )
        size = 1
    with _opened(out) as file, ProgressBar("generating", len(records)) as bar:
        done, errors = (0, 0) if out is None else _resume(file, records, prompts, out)
        began_with = done
        tokens, began = 0, time.perf_counter()
        # The batch that a stop left half written is made again; nothing is where all lines are there.
        for start in range(done - done % size, len(records) if done < len(records) else 0, size):
            batch = records[start : start + size]
            seed_draws(None if sampling.seed is None else sampling.seed + start)
            made = _answer(model, tokenizer, batch, sampling)
            lines = [json.dumps({**r, **a}, ensure_ascii=False) + "\n" for r, a in zip(batch, made, strict=True)]
            file.write("".join(lines[done - start :]).encode())
            file.flush()
            if out is not None:
                os.fsync(file.fileno())
            tokens += sum(answer.get("tokens", 0) for answer in made)
            errors += sum("error" in answer for answer in made[done - start :])
            done = start + len(batch)
            bar.update(done)
    seconds = time.perf_counter() - began
    return {
        "prompts": len(records),
        "done_before": began_with,
        "errors": errors,
        "tokens": tokens,
        "seconds": seconds,
    }


def _answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Prompt], sampling: Sampling
) -> list[Answer]:
    """The fields to add to each line; one that cannot be continued gets `error` and does not stop the others."""
    answers: list[Answer] = []
    prompts: list[list[int]] = []
    for record in batch:
        try:
            asked = record["prompt"] if "prompt" in record else record["messages"]
            ids = encode(tokenizer, asked, allow_control=sampling.allow_control)
            sampling.room(model, ids)
            prompts.append(ids)
            answers.append({})
        except (SettingsError, RequestError) as error:
            answers.append({"error": str(error)})
    talks = ["prompt" not in record for record, answer in zip(batch, answers, strict=True) if not answer]
    made = iter(generate_each(model, tokenizer, prompts, sampling, talks) if prompts else ())
    for answer in answers:
        if not answer:
            one = next(made)
            if isinstance(one, RequestError):
                answer["error"] = str(one)
                continue
            answer.update({"completion": one.text, "tokens": one.tokens, "finish": one.finish})
            if one.trips is not None:
                answer["trips"] = round(one.trips, 3)
    return answers


def _read_records(path: Path) -> list[Prompt]:
    """Every line, checked before the first token is drawn."""
    if not path.is_file():
        raise SettingsError(f"--prompts {path}: no such file")
    records = []
    for number, line in enumerate(lines_of(path), 1):
        if line and line.strip():
            try:
                record = json.loads(line.decode("utf-8-sig"))
                json.dumps(record, ensure_ascii=False).encode()
            except UnicodeDecodeError:
                raise SettingsError(f"{path}:{number}: not UTF-8") from None
            except UnicodeEncodeError as error:  # it could not be written again
                half = ascii(error.object[error.start])[1:-1]
                raise SettingsError(f"{path}:{number}: {half} is half of a surrogate pair, and no text") from None
            except (ValueError, RecursionError) as error:
                raise SettingsError(f"{path}:{number}: bad JSON: {error}") from None
            good = isinstance(record, dict) and (
                isinstance(record.get("prompt"), str)
                or ("prompt" not in record and isinstance(record.get("messages"), list))
            )
            if not good:
                raise SettingsError(f'{path}:{number}: expected {{"prompt": "..."}} or {{"messages": [...]}}')
            if taken := {"completion", "tokens", "finish", "trips", "error"} & set(record):
                raise SettingsError(f"{path}:{number}: the field {min(taken)!r} is where the output goes")
            records.append(record)
    return records


@contextlib.contextmanager
def _opened(out: Path | None) -> Iterator[IO[bytes]]:
    """The output file, locked against a second process that writes it; without one, standard output."""
    if out is None:
        yield sys.stdout.buffer
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(out.with_name(f".{out.name}.lock")))
        except HeldError as held:
            raise SettingsError(f"{out}: another process is writing it{held.advice}") from None
        yield stack.enter_context(out.open("a+b"))


def _resume(file: IO[bytes], records: Sequence[Prompt], prompts: Path, out: Path) -> tuple[int, int]:
    """How many lines are finished, and how many of them are errors; a half-written last line is removed."""
    file.seek(0)
    done = errors = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            if done == len(records) or not _half(line, records[done]):
                raise SettingsError(f"{out}:{done + 1}: not an answer to {prompts}; choose another --out")
            break
        try:
            before = json.loads(line)
        except ValueError:
            before = None
        if done == len(records) or not isinstance(before, dict) or not records[done].items() <= before.items():
            raise SettingsError(f"{out}:{done + 1}: not an answer to {prompts}; choose another --out")
        done += 1
        errors += "error" in before
        end = file.tell()
    file.truncate(end)
    file.seek(end)
    return done, errors


def _half(line: bytes, record: Prompt) -> bool:
    """Whether a line without an end is the beginning of an answer to a record."""
    answer = json.dumps(record, ensure_ascii=False).encode()[:-1]
    return line.startswith(answer) or answer.startswith(line)

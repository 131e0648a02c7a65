"""Generates answers to a file of prompts; an interrupted run resumes.

`made_by.py` records the model and the settings, and refuses to continue with others. `generate.py` pads a batch on the
left, halves it if memory runs out, and decides which prompts run separately. `cli/generate.py` sets the exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.data.sources import lines_of
from fathom.errors import HeldError, RequestError, SettingsError
from fathom.inference.generate import Generated, generate_each, seed_draws
from fathom.inference.made_by import keep_record, made_by
from fathom.inference.prompt import encode
from fathom.inference.settings import Sampling
from fathom.report.files import lock
from fathom.report.progress import ProgressBar

BATCH = {"cpu": 8, "other": 32}
Record = dict[str, Any]
"""A line of prompts: `prompt` or `messages`, and fields that the output repeats."""
FIELDS = 'lines of {"prompt": "..."} or {"messages": [...]}'
"""The content of a file of prompts, for errors."""


@dataclass(frozen=True)
class FileSummary:
    """The result of `generate_file`."""

    prompts: int
    done_before: int
    """Lines that an interrupted run had finished."""
    errors: int
    """Lines without a completion."""
    tokens: int
    seconds: float


def generate_file(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Path,
    out: Path | None,
    sampling: Sampling,
    batch_size: int | None = None,
) -> FileSummary:
    """Generate an answer to every prompt of a JSONL file. The same call resumes an interrupted run.

    `OUT.settings.json` keeps a digest of the model and the settings: answers of another model, or with other settings,
    are not continued. Without `out` the lines go to standard output, and an interrupted run starts from the beginning.

    A line has `prompt`, or `messages` for a chat model; line n of the output is line n of the input with `completion`,
    `tokens` and `finish` added, or `error`. Batches are consecutive lines. Each has its own seed, derived from the seed
    and its position, so a resumed run draws the same tokens as an uninterrupted one.
    """
    if batch_size is not None and batch_size < 1:
        raise SettingsError(f"batch_size={batch_size}: allowed: 1 or more")
    records = check_files(prompts, out)
    size = batch_size or BATCH["cpu" if model.device.type == "cpu" else "other"]
    with _opened(out) as file, ProgressBar("generating", len(records)) as bar:
        done, errors = (0, 0)
        if out is not None:
            done, errors, end = _answered(file, records, prompts, out)
            keep_record(out, made_by(model, tokenizer, sampling, size), done)
            file.truncate(end)  # a half-written last line
            file.seek(end)
        began_with = done
        tokens, began = 0, time.perf_counter()
        # A half-written batch is generated again; nothing is generated if all lines exist.
        for start in range(done - done % size, len(records) if done < len(records) else 0, size):
            batch = records[start : start + size]
            seed_draws(None if sampling.seed is None else sampling.seed + start)
            made = _answer(model, tokenizer, batch, sampling)
            answers = [{**record, **fields} for record, fields in zip(batch, made, strict=True)]
            lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
            file.write("".join(lines[done - start :]).encode())
            file.flush()
            if out is not None:
                os.fsync(file.fileno())
            tokens += sum(fields.get("tokens", 0) for fields in made)
            errors += sum("error" in fields for fields in made[done - start :])
            done = start + len(batch)
            bar.update(done)
    return FileSummary(len(records), began_with, errors, tokens, time.perf_counter() - began)


def check_files(prompts: Path, out: Path | None) -> list[Record]:
    """The prompts of a file, after a check that all can be read and that the lines already in `out` answer them."""
    if out is not None and out.exists() and prompts.exists() and out.samefile(prompts):
        raise SettingsError(f"`out={out}` is the file of prompts; choose another")
    records = _read_records(prompts)
    if out is not None and out.is_file():
        with out.open("rb") as file:
            _answered(file, records, prompts, out)
    return records


def _answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Record], sampling: Sampling
) -> list[Record]:
    """The fields to add to each line of a batch; a prompt that fails gets `error`, and the others get their
    completions."""
    failed: list[Record | None] = []
    prompts: list[list[int]] = []
    for record in batch:
        try:
            ids = encode(tokenizer, _asked(record), allow_control=sampling.allow_control)
            sampling.room(model, ids)
            prompts.append(ids)
            failed.append(None)
        except (SettingsError, RequestError) as error:
            failed.append({"error": str(error)})
    talks = ["prompt" not in record for record, fault in zip(batch, failed, strict=True) if fault is None]
    made = iter(generate_each(model, tokenizer, prompts, sampling, talks) if prompts else ())
    return [_fields(next(made)) if fault is None else fault for fault in failed]


def _asked(record: Record) -> Any:
    return record.get("prompt", record.get("messages"))


def _fields(made: Generated | RequestError) -> Record:
    """The fields that are added to a prompt's line: the completion and its counts, or an error."""
    if isinstance(made, RequestError):
        return {"error": str(made)}
    fields = {"completion": made.text, "tokens": made.tokens, "finish": made.finish}
    return fields if made.trips is None else {**fields, "trips": round(made.trips, 3)}


def _read_records(path: Path) -> list[Record]:
    """The records of all lines of a prompt file, checked before the first token is generated."""
    if not path.is_file():
        raise SettingsError(f"prompts={path}: {'not a file' if path.exists() else 'no such file'}")
    records = []
    for number, line in enumerate(lines_of(path), 1):
        if line and line.strip():
            try:
                record = json.loads(line.decode("utf-8-sig"))
                json.dumps(record, ensure_ascii=False).encode()
            except UnicodeDecodeError:
                raise SettingsError(f"{path}:{number}: not UTF-8") from None
            except UnicodeEncodeError as error:  # the line could not be written again
                half = ascii(error.object[error.start])[1:-1]
                raise SettingsError(f"{path}:{number}: {half} is half of a surrogate pair") from None
            except (ValueError, RecursionError) as error:
                raise SettingsError(f"{path}:{number}: bad JSON: {error}; expected {FIELDS}") from None
            if not isinstance(record, dict) or not isinstance(_asked(record), str if "prompt" in record else list):
                raise SettingsError(f"{path}:{number}: expected {FIELDS}")
            if taken := {"completion", "tokens", "finish", "trips", "error"} & set(record):
                raise SettingsError(f"{path}:{number}: the field {min(taken)!r} is reserved for the output")
            records.append(record)
    if not records:
        raise SettingsError(f"prompts={path}: no prompts; expected {FIELDS}")
    return records


@contextlib.contextmanager
def _opened(out: Path | None) -> Iterator[IO[bytes]]:
    """The output file, locked against a second process that writes; standard output if no file is given."""
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


def _answered(file: IO[bytes], records: Sequence[Record], prompts: Path, out: Path) -> tuple[int, int, int]:
    """The number of finished lines in the output file, how many of them are errors, and their size in bytes."""
    file.seek(0)
    done = errors = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            if done == len(records) or not _half(line, records[done]):
                raise SettingsError(f"{out}:{done + 1}: not an answer to {prompts}; choose another `out`")
            break
        try:
            before = json.loads(line)
        except ValueError:
            before = None
        if done == len(records) or not isinstance(before, dict) or not records[done].items() <= before.items():
            raise SettingsError(f"{out}:{done + 1}: not an answer to {prompts}; choose another `out`")
        done += 1
        errors += "error" in before
        end = file.tell()
    return done, errors, end


def _half(line: bytes, record: Record) -> bool:
    """Whether an incomplete last line of the output file is the beginning of an answer to this prompt."""
    answer = json.dumps(record, ensure_ascii=False).encode()[:-1]
    return line.startswith(answer) or answer.startswith(line)

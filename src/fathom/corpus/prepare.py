"""`fathom prepare`: turns text into checksummed token shards, in parallel and with constant memory; a stopped run can
be resumed.

The stages `read` and `encode` work in the folder `.prepare` of the output directory, as those of `fathom corpus` do
in theirs: a killed run loses the tasks that were under way. The shards of their tasks are then written as one corpus,
in the order of the inputs, so the output does not depend on the number of workers.

`choose_split` in `data/shards.py` decides which documents are held out. `data/sources.py` tells files, globs, URLs and
`hf:` apart, decompresses, drops empty documents and names domains. `tokens.py` (`training_texts`) decides which texts
train a tokenizer. Duplicates stay: `duplicates.py` belongs to `fathom corpus`.
"""

from __future__ import annotations

import re
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from fathom.checkpoints.file_names import TOKENIZER
from fathom.corpus.documents import read_part
from fathom.corpus.executor import executing
from fathom.corpus.pipeline import carry_out
from fathom.corpus.plain import AdvisedReading, Encode, PrepareSettings, Read
from fathom.corpus.publish import index_of
from fathom.corpus.recipe import Executor
from fathom.corpus.stage import DRAFT, MANIFEST, REMEDY, TASK, WorkspaceOf, owned, sweep, sync_tree
from fathom.corpus.tokens import FACTS, SHARDS, require_few_domains, store_tokenizer, training_texts
from fathom.data.shards import (
    FORMAT,
    INDEX,
    UNFINISHED,
    VERIFIED,
    Shards,
    ShardWriter,
    file_crc32,
    first_line,
    read_index,
    shard_files,
    token_dtype,
    write_index,
)
from fathom.data.sources import FileFormat, Source, parts_of, suffix_of
from fathom.data.tokenizer import load_tokenizer, train_bpe
from fathom.errors import DataError
from fathom.report.files import LOCK, asdict, read_json

MAX_RECORD_BYTES = 3 << 20
SMALLEST_RECORD = 64
HELD_OUT = {"test", "tests", "val", "valid", "validation", "dev", "eval"}
"""What files of a split that is not for training are named after."""


@dataclass
class Summary:
    """The result of `prepare`, and its duration."""

    directory: Path
    """Where the corpus is."""
    vocab_size: int
    """Embedding rows that its tokens need."""
    splits: dict[str, dict[str, dict[str, int]]]
    """Tokens, documents and bytes of every domain of every split."""
    left_out: int
    """Records over the size limit, which were skipped."""
    seconds: float
    """Duration of this run; 0 if the corpus was finished earlier."""
    files: dict[str, int] = field(default_factory=dict)
    """How many files were read, by extension."""
    divided: str = ""
    """What a single text file was divided into so that some can be held out: `paragraphs of FILE`."""

    def __str__(self) -> str:
        """One line for people."""
        parts = [f"vocabulary of {self.vocab_size:,}"]
        for split, domains in self.splits.items():
            tokens, documents = (sum(counts[key] for counts in domains.values()) for key in ("tokens", "documents"))
            several = f" in {len(domains)} domains" if len(domains) > 1 else ""
            parts.append(f"{split} {tokens:,} tokens of {documents:,} documents{several}")
        if self.left_out:
            parts.append(f"{self.left_out:,} records skipped because they are too long")
        parts.append(f"{self.seconds:.1f} s" if self.seconds else "finished earlier")
        held_out = sum(counts["documents"] for counts in self.splits.get("val", {}).values())
        note = f"\nheld out: {held_out:,} {self.divided}" if self.divided else ""
        if len(self.files) > 1:
            note += f"\nfiles: {', '.join(f'{count:,} {name}' for name, count in self.files.items())}"
        return f"{self.directory}: {'; '.join(parts)}{note}"


@dataclass(frozen=True)
class PrepareOptions(AdvisedReading):
    """Options of `prepare`: how it reads its inputs, writes shards and trains a tokenizer."""

    max_record_bytes: int = MAX_RECORD_BYTES
    """Maximum bytes of a record: a line, a file, or the text between two separators."""
    eos_token: str | None = None
    """The token that ends every document; by default the tokenizer's EOS."""
    file_format: FileFormat = "auto"
    """Read every file as this format, regardless of its extension."""
    shard_tokens: int = 1 << 27
    """Number of tokens after which a shard is closed and the next one begins."""
    tokenizer_bytes: int = 1 << 28
    """Train the tokenizer on at most this many bytes of text, taken in equal shares from the start of every input."""

    @property
    def reading(self) -> AdvisedReading:
        """The options that determine how documents are read."""
        return AdvisedReading(**{one.name: getattr(self, one.name) for one in fields(AdvisedReading)})


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    tokenizer: str | Path | None = None,
    train_tokenizer: int | None = None,
    held_out: float = 0.01,
    workers: int | None = None,
    overwrite: bool = False,
    options: PrepareOptions | None = None,
) -> Summary:
    """Turn documents into token shards.

    If the process is killed, the same call resumes and produces the same bytes.

    Args:
        inputs: Files, directories, globs or `hf:ORG/NAME?name=CONFIG&split=SPLIT`; `NAME=` in front sets the domain.
        out: The output directory.
        tokenizer: A tokenizer directory, a tokenizer.json, or a name on the Hugging Face Hub.
        train_tokenizer: Train a byte-level BPE of this many tokens on the training documents, in place of a finished
            tokenizer.
        held_out: Share of documents for the validation split, chosen by a hash of their text.
        workers: Number of tokenising processes, which does not change the output; by default one per available core.
        overwrite: Replace a corpus in the output directory that was made with other arguments, or before an input was
            last changed.
        options: Further options.
    """
    chosen = options or PrepareOptions()
    if not isinstance(tokenizer, str | Path | None):
        raise DataError(f"tokenizer must be a path or a name on the Hub, got a {type(tokenizer).__name__}")
    tokenizer = None if tokenizer is None else str(tokenizer)
    _check_arguments(tokenizer, train_tokenizer, held_out, workers, chosen)
    out = Path(out)
    settings = _settings(inputs, tokenizer or train_tokenizer, held_out, chosen)
    settings, sources, divided = _checked_inputs(settings, out)
    made = partial(_summary, out, sources, divided)
    _warn_of_others(sources)
    with owned(out, _is_ours, "prepared"):
        for draft in _drafts(out):
            draft.unlink()
        if (out / INDEX).exists():
            difference, newer = _difference(out, settings), _newer(out, sources)
            if difference and not overwrite:
                raise DataError(f"{out}: {difference}: choose another directory, or set `overwrite`")
            if not difference and not (newer and overwrite):
                shutil.rmtree(out / UNFINISHED, ignore_errors=True)
                _warn_of(newer, out)
                return made(0.0)
        started = time.monotonic()
        _make(WorkspaceOf(out / UNFINISHED, settings), out, Executor(workers=workers))
        return made(time.monotonic() - started)


def check_inputs(inputs: Sequence[str | Path], out: Path, held_out: float) -> None:
    """Refuse, before other work, inputs that `prepare` would refuse; the arguments are those of `prepare`."""
    _checked_inputs(_settings(inputs, None, held_out, PrepareOptions()), out)


def _settings(
    inputs: Sequence[str | Path], tokenizer: str | int | None, held_out: float, chosen: PrepareOptions
) -> PrepareSettings:
    return PrepareSettings(
        inputs=[str(name) for name in ([inputs] if isinstance(inputs, str | Path) else inputs)],
        tokenizer=tokenizer,
        eos_token=chosen.eos_token,
        reading=chosen.reading,
        file_format=chosen.file_format,
        held_out=held_out,
        shard_tokens=chosen.shard_tokens,
        tokenizer_bytes=chosen.tokenizer_bytes if isinstance(tokenizer, int) else None,
        input_bytes=0,
    )


def _checked_inputs(settings: PrepareSettings, out: Path) -> tuple[PrepareSettings, list[Source], str]:
    """The settings and the inputs; the first document of each local input is read, so that a wrong field or a damaged
    file is reported at once. A single text file is divided into several documents if some are to be held out; the text
    says into what."""
    sources, divided = settings.sources(out), ""
    settings = replace(settings, input_bytes=sum(source.size for source in sources))
    only = sources[0].paths[0] if len(sources) == 1 and len(sources[0].paths) == 1 else None
    if only is None or sources[0].kind != "files" or not settings.held_out:
        only = None
    elif (parts := parts_of(only)) is not None:
        settings = replace(settings, reading=replace(settings.reading, separator=parts.separator))
        sources, divided = settings.sources(out), f"{parts.name} of {only}"
    first = [list(islice(source.documents(settings.reading), 1)) for source in sources if source.paths]
    if only is not None and not any(document is None or document.text.strip() for document in first[0]):
        raise DataError(f"{only}: no documents: there is no text in it")
    if only is not None and not divided:
        raise DataError(f"{only} is a single line, so no part can be held out: `held_out=0` trains on all of it")
    return settings, sources, divided


def _make(workspace: WorkspaceOf[PrepareSettings], out: Path, executor: Executor) -> None:
    """Run the tasks that are not finished yet, and write the corpus."""
    place = workspace.directory
    begun = place.exists()
    place.mkdir(exist_ok=True)
    try:
        sweep(place)
        with executing(executor) as execute:
            if isinstance(workspace.recipe.tokenizer, str):
                _save_tokenizer(workspace)
            carry_out(Read(workspace), execute)
            if isinstance(workspace.recipe.tokenizer, int):
                _save_tokenizer(workspace)
            carry_out(Encode(workspace), execute)
        shards = _checked(workspace)
        _clear(out)
        _publish(workspace, out, shards)
    except OSError as error:
        raise DataError(
            f"{error.filename or out}: {error.strerror or error}; run the same command to resume"
        ) from error
    except DataError:
        if not begun and not _worth_keeping(workspace):  # the directory can be used again
            shutil.rmtree(place)
        raise
    shutil.rmtree(place)


def _worth_keeping(workspace: WorkspaceOf[PrepareSettings]) -> bool:
    """Whether an interrupted run left work to resume: some documents are encoded, or some, but not all, inputs are
    read."""
    read = workspace.stage(Read.name)
    return any(workspace.stage(Encode.name).glob(f"*/{TASK}")) or (
        any(read.glob(f"*/{TASK}")) and not (read / MANIFEST).exists()
    )


def _save_tokenizer(workspace: WorkspaceOf[PrepareSettings]) -> None:
    """Load or train the tokenizer, and save it with the vocabulary size and the EOS id, which the shards need."""
    settings, place = workspace.recipe, workspace.directory
    if isinstance(settings.tokenizer, int):
        parts = [
            (task.arguments["source"], partial(read_part, workspace.path(part)))
            for task, parts in workspace.parts_by_task("read")
            for part in parts
        ]
        texts = training_texts(parts, settings.tokenizer_bytes or 0, settings.held_out)
        tokenizer = train_bpe(texts, settings.tokenizer)
    else:
        tokenizer = load_tokenizer(settings.tokenizer or "", settings.eos_token)
    shutil.rmtree(place / TOKENIZER, ignore_errors=True)
    store_tokenizer(tokenizer, place)


def _checked(workspace: WorkspaceOf[PrepareSettings]) -> list[tuple[str, str, Path, Path]]:
    """(split, domain, token file, file of document ends) of the shards of all tasks, whose checksums are verified."""
    found = []
    for one in workspace.outputs("encode", SHARDS):
        folder = workspace.path(one).parent
        for split, domain, entry in read_json(workspace.path(one))["shards"]:
            tokens, ends = shard_files(folder, split, domain, 0)
            if (file_crc32(tokens), file_crc32(ends)) != (entry["tokens_crc32"], entry["index_crc32"]):
                raise DataError(f"{folder} is corrupt: a checksum does not match: {REMEDY}")
            found.append((split, domain, tokens, ends))
    require_few_domains({domain for _, domain, *_ in found})
    return found


def _publish(workspace: WorkspaceOf[PrepareSettings], out: Path, shards: Sequence[tuple[str, str, Path, Path]]) -> None:
    """Write the shards of all tasks as one corpus. The index is last, and makes it a finished one."""
    settings, place = workspace.recipe, workspace.directory
    dtype = token_dtype(read_json(place / FACTS)["vocab_size"])
    writers: dict[tuple[str, str], ShardWriter] = {}
    for split, domain, tokens, ends in shards:
        if (split, domain) not in writers:
            writers[split, domain] = ShardWriter(out, split, domain, dtype, settings.shard_tokens)
        lengths = np.diff(np.fromfile(ends, "<i8").reshape(-1, 2), axis=0, prepend=0)
        writers[split, domain].append(np.fromfile(tokens, dtype), lengths[:, 0], lengths[:, 1])
    splits: dict[str, Shards] = {}
    for (split, domain), writer in writers.items():
        splits.setdefault(split, {})[domain] = writer.shards
    if settings.held_out and "val" not in splits:
        documents = sum(shard.documents for shards in splits["train"].values() for shard in shards)
        warnings.warn(
            f"{out}: none of {documents} documents fell into the held-out {settings.held_out:.2%}: "
            "there is no validation split, which a larger `held_out` makes",
            stacklevel=4,
        )
    shutil.copytree(place / TOKENIZER, out / TOKENIZER)
    for name in (*splits, TOKENIZER):
        sync_tree(out / name)
    left_out = workspace.manifest("read").counts["left_out"]
    write_index(out, index_of(place, splits, asdict(settings), left_out=left_out))


def _check_arguments(
    tokenizer: str | None, train_size: int | None, held_out: float, workers: int | None, options: PrepareOptions
) -> None:
    if (tokenizer is None) == (train_size is None):
        raise DataError("give either `tokenizer` or `train_tokenizer`")
    if not 0 <= held_out < 1:
        raise DataError(f"held_out={held_out}: allowed: from 0 to below 1")
    least = {"shard_tokens": 1, "max_record_bytes": SMALLEST_RECORD, "tokenizer_bytes": 1, "workers": 1}
    for option, smallest in least.items():
        value = workers if option == "workers" else getattr(options, option)
        if value is not None and value < smallest:
            raise DataError(f"{option}={value}: allowed: {smallest} or more")


def _difference(out: Path, settings: PrepareSettings) -> str | None:
    """How the finished corpus in `out` differs from the requested one, in words; None if it does not."""
    try:
        old, new = read_index(out).settings, asdict(settings)
    except DataError as error:
        return first_line(error)
    reading = old.get("reading")
    old |= reading if isinstance(reading, dict) else {}
    new |= new.pop("reading")
    for key, value in new.items():
        if old.get(key) != value:
            before, after = (_named(key, one) for one in (old.get(key), value))
            return f"was prepared with {before}, not {after if key == 'tokenizer' else _briefly(value)}"
    return None


def _named(key: str, value: object) -> str:
    """A setting as text: the argument's name and its value; for a trained tokenizer the argument is
    `train_tokenizer`."""
    name = "train_tokenizer" if key == "tokenizer" and isinstance(value, int) else key
    return f"`{name}` {_briefly(value)}"


def _briefly(value: object) -> str:
    """A setting for a message; a long list is shortened to its beginning and its length."""
    if not isinstance(value, list) or len(value) <= 3:
        return repr(value)
    return f"[{', '.join(map(repr, value[:2]))}, … {len(value)} in all]"


def _newer(out: Path, sources: list[Source]) -> list[Path]:
    """Input files that were modified after the corpus was finished; the index alone cannot detect a change that keeps a
    file's size."""
    made = (out / INDEX).stat().st_mtime_ns
    return [path for source in sources for path in source.paths if path.stat().st_mtime_ns > made]


def _warn_of(newer: Sequence[Path], out: Path) -> None:
    if newer:
        others = f" and {len(newer) - 1:,} more" if len(newer) > 1 else ""
        changed = f"{newer[0]}{others} changed after {out} was made, which is left unchanged"
        warnings.warn(f"{changed}; `overwrite` reads everything again", stacklevel=3)


def _warn_of_others(sources: Sequence[Source]) -> None:
    """Warn of input files of a downloaded data set that are seldom meant for training: its card, and splits other than
    the training split."""
    for domain in dict.fromkeys(source.domain for source in sources):
        mine = [(path, source.kind) for source in sources if source.domain == domain for path in source.paths]
        splits = {path: set(re.split(r"[^a-z]+", "/".join(path.parts[-2:]).lower())) for path, _ in mine}
        trained = any("train" in words for words in splits.values())
        others = [path for path, _ in mine if trained and "train" not in splits[path] and splits[path] & HELD_OUT]
        if any(kind != "files" for _, kind in mine):
            others += [path for path, kind in mine if kind == "files" and path.name.lower() == "readme.md"]
        if others:
            named = f"{others[0]}{f' and {len(others) - 1:,} more' if len(others) > 1 else ''}"
            warnings.warn(
                f"{named}: read, too, though by name no training text: list the files to leave it out", stacklevel=3
            )


def _summary(out: Path, sources: Sequence[Source], divided: str, seconds: float) -> Summary:
    index = read_index(out)
    splits = {
        split: {
            domain: {key: sum(getattr(entry, key) for entry in entries) for key in ("tokens", "documents", "bytes")}
            for domain, entries in domains.items()
        }
        for split, domains in index.splits.items()
    }
    suffixes = [suffix_of(path) for source in sources for path in (*source.paths, *(one.path for one in source.remote))]
    files = dict(sorted(Counter(suffixes).items(), key=lambda one: (-one[1], one[0])))
    return Summary(out, index.vocab_size, splits, index.left_out, seconds, files, divided)


def _drafts(out: Path) -> list[Path]:
    """Temporary files that a killed run left next to the files that it was replacing."""
    return [path for name in (INDEX, VERIFIED) for path in out.glob(f".{name}.[0-9]*{DRAFT}") if not path.is_dir()]


def _is_ours(out: Path) -> bool:
    """Whether a directory may be overwritten: it is empty, or a corpus (finished or not, even if damaged)."""
    names = {path.name for path in out.iterdir()} - {LOCK, f"{LOCK}.held", *(path.name for path in _drafts(out))}
    if UNFINISHED in names or not names:
        return True
    return INDEX in names and FORMAT.encode() in (out / INDEX).read_bytes()


def _clear(out: Path) -> None:
    """Remove an earlier corpus, its index first."""
    for path in (out / INDEX, out / VERIFIED):
        path.unlink(missing_ok=True)
    for folder in ("train", "val", TOKENIZER):
        shutil.rmtree(out / folder, ignore_errors=True)

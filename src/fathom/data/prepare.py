"""`fathom prepare`: text in, checksummed token shards out; parallel, in constant memory, and resumable.

One process reads records in order, workers parse and tokenise them, and the same process appends the results in order,
so the output does not depend on the number of workers. Shards only ever grow. From time to time they are synced to disk
and a journal records their lengths and the position in the input; after a crash they are cut back to the journal and
work continues from there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fathom.checkpoints.layout import LOCK, TOKENIZER_JSON
from fathom.checkpoints.tokenizers import identity
from fathom.data.encode import Chunk, Encoded, Encoding, Reached, choose_split, encode_chunks
from fathom.data.shards import (
    FORMAT,
    INDEX,
    JOURNAL,
    TOKENIZER,
    VERIFIED,
    CorpusIndex,
    Shard,
    Shards,
    ShardWriter,
    extents,
    file_crc32,
    first_line,
    read_index,
    token_dtype,
    write_index,
)
from fathom.data.sources import (
    COMPRESSIONS,
    FileFormat,
    Oversize,
    Payload,
    Reading,
    Source,
    Undecodable,
    find_sources,
    parse,
)
from fathom.data.tokenizer import (
    WORDS_AT_MOST,
    TrainingWords,
    load_tokenizer,
    save_tokenizer,
    tokenizer_checksums,
    train_bpe,
    vocabulary_size,
)
from fathom.errors import DataError, HeldError
from fathom.report.files import asdict, lock, read_json, write_json
from fathom.report.progress import ProgressBar
from fathom.report.results import restored

CHUNK_BYTES = 1 << 20
CHUNK_RECORDS = 4096
CHECKPOINT_SECONDS = 5.0
# Starting a pool takes about a second per worker; less text than this is tokenised faster without one.
POOL_BYTES = 8 << 20
# Tokenising takes up to 300 bytes of memory for each byte of a document.
MAX_RECORD_BYTES = 3 << 20
MOST_DOMAINS = 1000
SMALLEST_RECORD = 64
DRAFTS = ".*.new"  # temporary files that a crash may leave behind


class AdvisedReading(Reading):
    """A reading whose errors name the options that allow more."""

    advises = True


@dataclass(frozen=True)
class PrepareSettings:
    """The settings that determine the tokens."""

    inputs: list[str]
    tokenizer: str | int | None
    eos_token: str | None
    reading: Reading
    file_format: str
    held_out: float
    shard_tokens: int
    tokenizer_bytes: int | None
    input_bytes: int


@dataclass(frozen=True)
class Journal:
    """The progress of an unfinished run."""

    settings: dict[str, object]
    inputs_stamp: str
    position: tuple[int, int]
    documents: int
    left_out: int
    vocab_size: int
    eos_token_id: int
    shards: list[tuple[str, str, list[Shard]]]


@dataclass
class Summary:
    """The result of `prepare`, and its speed."""

    directory: Path
    """Where the corpus is."""
    vocab_size: int
    """Embedding rows that its tokens need."""
    splits: dict[str, dict[str, dict[str, int]]]
    """Tokens, documents and bytes of every domain of every split."""
    left_out: int
    """Records over the size limit, which were skipped."""
    resumed_documents: int
    """Documents that an interrupted run had finished."""
    seconds: float
    """Duration of this run, without tokenizer training."""
    documents_per_second: float
    """Documents per second of this run."""

    def __str__(self) -> str:
        """One line for people."""
        parts = [f"vocabulary of {self.vocab_size:,}"]
        for split, domains in self.splits.items():
            tokens, documents = (sum(counts[key] for counts in domains.values()) for key in ("tokens", "documents"))
            several = f" in {len(domains)} domains" if len(domains) > 1 else ""
            parts.append(f"{split} {tokens:,} tokens of {documents:,} documents{several}")
        if self.left_out:
            parts.append(f"{self.left_out:,} records skipped because they are too long")
        if not self.seconds:
            parts.append("finished earlier")
        else:
            resumed = f", {self.resumed_documents:,} documents from before" if self.resumed_documents else ""
            parts.append(f"{self.seconds:.1f} s, {self.documents_per_second:,.0f} documents/s{resumed}")
        return f"{self.directory}: {'; '.join(parts)}"


@dataclass(frozen=True)
class PrepareOptions:
    """How `prepare` reads its inputs, writes shards and trains a tokenizer."""

    eos_token: str | None = None
    """The token that ends every document; by default the tokenizer's EOS."""
    text_field: str = "text"
    """The JSON field or Parquet column that holds the text."""
    domain_field: str | None = None
    """The JSON field or Parquet column that names the domain of each document."""
    separator: str | None = None
    """A line that separates documents within text files (may be empty); by default a file is a document."""
    file_format: FileFormat = "auto"
    """Read every file as this format, regardless of its extension."""
    undecodable: Undecodable = "error"
    """What to do with text that is not UTF-8: stop, replace invalid bytes, or skip the document."""
    oversize: Oversize = "error"
    """What to do with a record over the size limit: stop, or skip it."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """Maximum bytes of a line, a file, or the text between separators."""
    shard_tokens: int = 1 << 27
    """Tokens after which a shard is closed."""
    tokenizer_bytes: int = 1 << 28
    """Train the tokenizer on at most this many bytes of text, an equal share from the start of every input."""

    @property
    def reading(self) -> Reading:
        """The options that determine how documents are read."""
        return AdvisedReading(
            self.text_field,
            self.domain_field,
            self.separator,
            self.undecodable,
            self.oversize,
            self.max_record_bytes,
        )


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    tokenizer: str | None = None,
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
        train_tokenizer: Train a byte-level BPE of this many tokens on the training documents instead.
        held_out: Share of documents for the validation split, chosen by a hash of their text.
        workers: Tokenising processes; by default one per available core. The output does not depend on the number.
        overwrite: Replace a corpus in `out` that was made with other arguments, or before an input was written.
        options: Further options.
    """
    chosen = options or PrepareOptions()
    reading = chosen.reading
    _check_arguments(tokenizer, train_tokenizer, held_out, chosen)
    _check_least({"workers": workers, "tokenizer_bytes": chosen.tokenizer_bytes})
    out = Path(out)
    names = [str(name) for name in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    sources = find_sources(names, reading, chosen.file_format, out)
    _require_two_documents(sources, held_out)
    settings = PrepareSettings(
        inputs=names,
        tokenizer=tokenizer or train_tokenizer,
        eos_token=chosen.eos_token,
        reading=reading,
        file_format=chosen.file_format,
        held_out=held_out,
        shard_tokens=chosen.shard_tokens,
        tokenizer_bytes=chosen.tokenizer_bytes if train_tokenizer else None,
        input_bytes=sum(source.size for source in sources),
    )
    _probe(sources, reading)
    with _locked(out):
        difference = _difference(out, settings, sources) or _damage(out)
        if difference and not overwrite:
            raise DataError(f"{out}: {difference}: choose another directory, or set `overwrite`")
        newer = _newer(out, sources)
        if difference or (newer and overwrite):
            _clear(out)
        if (out / INDEX).exists():
            (out / JOURNAL).unlink(missing_ok=True)
            if newer:
                others = f" and {len(newer) - 1:,} more" if len(newer) > 1 else ""
                changed = f"{newer[0]}{others} changed after {out} was made, which is left unchanged"
                warnings.warn(f"{changed}; `overwrite` reads everything again", stacklevel=2)
            return _summary(out, 0, 0.0, resumed=None)
        begun = (out / JOURNAL).exists()
        try:
            run = _Run(out, sources, settings)
            run.prepare_tokenizer(tokenizer, train_tokenizer, chosen.tokenizer_bytes)
            started, resumed = time.monotonic(), run.documents
            run.tokenize(_worker_count(workers, sources))
            run.finish()
        except OSError as error:
            raise DataError(
                f"{error.filename or out}: {error.strerror or error}; run the same command to resume"
            ) from error
        except DataError:
            if not begun and not _read_journal(out).documents:
                _clear(out)  # nothing is lost, and the directory can be used again
            raise
        return _summary(out, run.documents - resumed, time.monotonic() - started, resumed)


@dataclass
class _Run:
    """One run of `prepare`. `position`, `documents` and the writers' shards survive a crash in the journal."""

    out: Path
    sources: list[Source]
    settings: PrepareSettings
    position: tuple[int, int] = (0, 0)
    """(source, record) at which reading continues."""
    documents: int = 0
    left_out: int = 0
    """Records over the size limit."""
    vocab_size: int = 0
    """0 until the tokenizer is saved."""
    eos_token_id: int = 0
    writers: dict[tuple[str, str], ShardWriter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held_out, self.reading = self.settings.held_out, self.settings.reading
        self.inputs_stamp = _stamp(self.sources)
        self.journal: Journal | None = None
        if (self.out / JOURNAL).exists():
            self.journal = _read_journal(self.out)
            self.position, self.documents = self.journal.position, self.journal.documents
            self.left_out = self.journal.left_out
            self.vocab_size, self.eos_token_id = self.journal.vocab_size, self.journal.eos_token_id
        else:
            self._write_journal()

    def prepare_tokenizer(self, name: str | None, train_size: int | None, train_bytes: int) -> None:
        """Load or train the tokenizer, unless an earlier run saved it already."""
        if not self.vocab_size:
            shutil.rmtree(self.out / TOKENIZER, ignore_errors=True)
            if train_size is not None:
                tokenizer = train_bpe(self._training_texts(train_bytes), train_size)
            else:
                assert name is not None
                tokenizer = load_tokenizer(name, self.settings.eos_token)
            save_tokenizer(tokenizer, self.out)
            self.vocab_size, self.eos_token_id = vocabulary_size(tokenizer), int(tokenizer.eos_token_id)
            self._write_journal()
        self._restore_writers()

    def tokenize(self, workers: int) -> None:
        """Read, encode and append everything from the journal's position on."""
        encoding = Encoding(
            self.out / TOKENIZER / TOKENIZER_JSON, self.vocab_size, self.eos_token_id, self.held_out, self.reading
        )
        total = self.settings.input_bytes if all(source.size for source in self.sources) else None
        started, before, saved = time.monotonic(), self.documents, time.monotonic()
        with ProgressBar("tokenising", total) as bar:
            for (position, bytes_read), encoded in encode_chunks(self._chunks(), encoding, workers):
                for group in encoded.groups:
                    self._append(group)
                self.left_out += encoded.left_out
                self.position = position
                now = time.monotonic()
                if now - saved >= CHECKPOINT_SECONDS:
                    self._write_journal()
                    saved = now
                bar.update(bytes_read, f"{(self.documents - before) / max(now - started, 1e-9):,.0f} documents/s")

    def finish(self) -> None:
        """Write the index. The corpus is then complete, and the journal is no longer needed."""
        if not self.documents:
            raise DataError(f"{', '.join(self.settings.inputs)}: no documents: every record is empty")
        self._write_journal()
        splits: dict[str, Shards] = {"train": {}, "val": {}}
        for (split, domain), writer in sorted(self.writers.items()):
            splits[split][domain] = writer.shards
        if not splits["train"]:
            raise DataError(f"{self.out}: every document was held out, none is left to train on: lower `held_out`")
        if self.held_out and not splits["val"]:
            warnings.warn(
                f"{self.out}: none of {self.documents} documents fell into the held-out {self.held_out:.2%}: "
                "there is no validation split, which a larger `held_out` makes",
                stacklevel=3,
            )
        index = CorpusIndex(
            settings=asdict(self.settings),
            left_out=self.left_out,
            vocab_size=self.vocab_size,
            eos_token_id=self.eos_token_id,
            dtype=token_dtype(self.vocab_size).name,
            tokenizer_crc32=tokenizer_checksums(self.out),
            tokenizer_sha256=identity((self.out / TOKENIZER / TOKENIZER_JSON).read_text(encoding="utf-8")),
            splits={split: domains for split, domains in splits.items() if domains},
        )
        write_index(self.out, index)
        (self.out / JOURNAL).unlink()

    def _append(self, group: Encoded) -> None:
        key = group.split, group.domain
        if key not in self.writers:
            if len(self.writers) >= 2 * MOST_DOMAINS:
                raise DataError(
                    f"more than {MOST_DOMAINS} domains: `domain_field={self.reading.domain_field}` has too many values"
                )
            self.writers[key] = self._writer(*key)
        self.writers[key].append(group.tokens, group.lengths, group.byte_lengths)
        self.documents += len(group.lengths)

    def _chunks(self) -> Iterator[tuple[Reached, Chunk]]:
        """Chunks from the current position on, each with the input position after it."""
        first_source, first_record = self.position
        base = sum(source.size for source in self.sources[:first_source])
        for number in range(first_source, len(self.sources)):
            source = self.sources[number]
            record = first_record if number == first_source else 0
            chunk = Chunk(source.kind, source.name, source.domain, record)
            bytes_read = 0
            for payload, bytes_read in source.records(self.reading, record):
                chunk.payloads.append(payload)
                record += 1
                chunk.size += _payload_bytes(payload, self.reading)
                if chunk.size >= CHUNK_BYTES or len(chunk.payloads) >= CHUNK_RECORDS:
                    yield ((number, record), base + bytes_read), chunk
                    chunk = Chunk(source.kind, source.name, source.domain, record)
            base += source.size
            yield ((number + 1, 0), base), chunk

    def _training_texts(self, limit: int) -> Iterator[str]:
        """Training documents from the start of every source, without the held-out ones.

        Each source has an equal share of the text and of the distinct words, which training keeps in memory. Later
        sources get the share of words that one source leaves unused.
        """
        words, cut, taken = TrainingWords(), 0, 0
        with ProgressBar("training the tokenizer", None) as bar:
            for place, source in enumerate(self.sources, 1):
                room, most = limit // len(self.sources), WORDS_AT_MOST * place // len(self.sources)
                for number, record in enumerate(source.records(self.reading)):
                    documents = parse(source.kind, source.name, source.domain, number, record.payload, self.reading)
                    for document in documents or ():
                        if choose_split(document.text, self.held_out) == "train":
                            yield document.text
                            room -= document.size
                            taken += document.size
                            words.add(document.text)
                            bar.update(0)
                    if room <= 0:
                        break
                    if words.bytes >= most:
                        cut += 1
                        break
        if cut:
            warnings.warn(
                f"{self.out}: the tokenizer was trained on {taken / 1e6:,.1f} MB of text: the different words in it "
                "fill "
                f"the {WORDS_AT_MOST / 1e6:,.1f} MB that training takes in; {cut} of {len(self.sources)} inputs were "
                "truncated",
                stacklevel=2,
            )

    def _write_journal(self) -> None:
        for writer in self.writers.values():
            writer.sync()
        journal = Journal(
            settings=asdict(self.settings),
            inputs_stamp=self.inputs_stamp,
            position=self.position,
            documents=self.documents,
            left_out=self.left_out,
            vocab_size=self.vocab_size,
            eos_token_id=self.eos_token_id,
            shards=[(*key, writer.shards) for key, writer in self.writers.items()],
        )
        write_json(self.out / JOURNAL, journal)

    def _writer(self, split: str, domain: str, shards: list[Shard] | None = None) -> ShardWriter:
        dtype = token_dtype(self.vocab_size)
        return ShardWriter(self.out, split, domain, dtype, self.settings.shard_tokens, shards)

    def _restore_writers(self) -> None:
        """Restore the writers from the journal; shards are cut back to their journaled lengths."""
        for split, domain, shards in self.journal.shards if self.journal else []:
            self.writers[split, domain] = self._writer(split, domain, shards)
        wanted: dict[Path, tuple[int, int]] = {}
        for writer in self.writers.values():
            wanted.update(writer.files())
        for path in [*self.out.glob("train/*/*"), *self.out.glob("val/*/*")]:
            if path not in wanted:
                path.unlink()
        for path, (size, _) in wanted.items():
            os.truncate(path, size)


def _check_arguments(tokenizer: str | None, train_size: int | None, held_out: float, options: PrepareOptions) -> None:
    if (tokenizer is None) == (train_size is None):
        raise DataError("give either `tokenizer` or `train_tokenizer`")
    if not 0 <= held_out < 1:
        raise DataError(f"held_out={held_out}: allowed: from 0 to below 1")
    if options.shard_tokens < 1:
        raise DataError(f"shard_tokens={options.shard_tokens}: allowed: 1 or more")
    if options.max_record_bytes < SMALLEST_RECORD:
        raise DataError(f"max_record_bytes={options.max_record_bytes}: allowed: {SMALLEST_RECORD} or more")


def _check_least(given: dict[str, int | None]) -> None:
    for option, value in given.items():
        if value is not None and value < 1:
            raise DataError(f"{option}={value}: allowed: 1 or more")


def _require_two_documents(sources: list[Source], held_out: float) -> None:
    """Refuse to hold out a part of a single text file, which is one document and belongs to one split."""
    if held_out and len(sources) == 1 and sources[0].kind == "files" and len(sources[0].paths) == 1:
        raise DataError(
            f"{sources[0].paths[0]} is a single document, of which no part can be held out: `separator=''` makes a "
            "document of every paragraph, and `held_out=0` trains on the whole file"
        )


def _probe(sources: list[Source], reading: Reading) -> None:
    """Read the first record of every source, so that a wrong field or a damaged file is reported at once."""
    for source in sources:
        if source.kind != "hub":
            for record in itertools.islice(source.records(reading), 1):
                parse(source.kind, source.name, source.domain, 0, record.payload, reading)


def _worker_count(workers: int | None, sources: list[Source]) -> int:
    if workers is not None:
        return workers
    if all(source.size for source in sources) and sum(source.size for source in sources) < POOL_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _payload_bytes(payload: Payload, reading: Reading) -> int:
    if payload is None:
        return 0
    if isinstance(payload, Path):
        # The decompressed size is not known yet, but it is at most the limit for a record.
        return reading.max_record_bytes if payload.suffix.lower() in COMPRESSIONS else payload.stat().st_size
    return len(payload[0] or "") if isinstance(payload, tuple) else len(payload)


def _stamp(sources: list[Source]) -> str:
    """A hash that changes if any input file changes."""
    stamps = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for source in sources for p in source.paths]
    return hashlib.blake2b(json.dumps(stamps).encode(), digest_size=16).hexdigest()


def _newer(out: Path, sources: list[Source]) -> list[Path]:
    """Inputs written after a finished corpus; the index cannot detect a change that keeps a file's size."""
    if not (out / INDEX).exists():
        return []
    made = (out / INDEX).stat().st_mtime_ns
    return [path for source in sources for path in source.paths if path.stat().st_mtime_ns > made]


def _difference(out: Path, settings: PrepareSettings, sources: list[Source]) -> str | None:
    """How the corpus in `out`, finished or not, differs from the requested one, in words; None if it does not."""
    try:
        if (out / INDEX).exists():
            before, begun = read_index(out).settings, None
        elif (out / JOURNAL).exists():
            begun = _read_journal(out)
            before = begun.settings
        else:
            return None
    except DataError as error:
        return first_line(error)
    old, new = (_flat(values) for values in (before, asdict(settings)))
    for key, value in new.items():
        # Everything that passed under `error` passes under every other choice.
        if old.get(key) != value and not (old.get(key) == "error" and begun is not None):
            return f"was prepared with {_option(key)} {_briefly(old.get(key))}, not {_briefly(value)}"
    if begun is not None and begun.inputs_stamp != _stamp(sources):
        return "the inputs changed since the interrupted run began"
    return None


def _flat(settings: dict[str, object]) -> dict[str, object]:
    """Settings, with those of the reading as entries."""
    reading = settings.get("reading")
    rest = {key: value for key, value in settings.items() if key != "reading"}
    return {**rest, **(reading if isinstance(reading, dict) else {})}


def _briefly(value: object) -> str:
    """A setting for a message; a long list is shortened to its beginning and its length."""
    if not isinstance(value, list) or len(value) <= 3:
        return repr(value)
    return f"[{', '.join(map(repr, value[:2]))}, … {len(value)} in all]"


def _option(key: str) -> str:
    """A setting for a message."""
    return {"inputs": "inputs", "input_bytes": "input bytes"}.get(key, f"`{key}`")


def _read_journal(out: Path) -> Journal:
    """The journal of an interrupted run."""
    path = out / JOURNAL
    try:
        return restored(Journal, read_json(path))
    except ValueError:
        raise DataError(f"{path} is damaged") from None


def _damage(out: Path) -> str | None:
    """What is missing or altered in an interrupted run's files, in words; None if nothing."""
    if (out / INDEX).exists() or not (out / JOURNAL).exists():
        return None
    journal = _read_journal(out)
    if not journal.vocab_size:
        return None
    if not (out / TOKENIZER / TOKENIZER_JSON).is_file():
        return f"{out / TOKENIZER} is missing"
    dtype = token_dtype(journal.vocab_size)
    files: dict[Path, tuple[int, int]] = {}
    for split, domain, shards in journal.shards:
        files |= extents(out, split, domain, dtype, shards)
    done = 0
    with ProgressBar("verifying", sum(size for size, _ in files.values())) as bar:
        for path, (size, crc32) in files.items():
            if not path.is_file() or path.stat().st_size < size:
                return f"{path} is shorter than the journal says"
            if file_crc32(path, size) != crc32:
                return f"{path} is corrupt: its checksum is not the journal's"
            done += size
            bar.update(done)
    return None


def _summary(out: Path, documents: int, seconds: float, resumed: int | None) -> Summary:
    index = read_index(out)
    splits = {
        split: {
            domain: {key: sum(getattr(entry, key) for entry in entries) for key in ("tokens", "documents", "bytes")}
            for domain, entries in domains.items()
        }
        for split, domains in index.splits.items()
    }
    if resumed is None:
        resumed = sum(counts["documents"] for domains in splits.values() for counts in domains.values())
    return Summary(
        out,
        index.vocab_size,
        splits,
        index.left_out,
        resumed,
        seconds,
        documents / seconds if seconds else 0.0,
    )


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the output directory for this process; the operating system unlocks it however the process ends."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is not a directory")
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not _is_ours(out):
            raise DataError(f"{out} contains other files: choose another directory")
    except OSError as error:
        raise DataError(f"{out}: {error.strerror}") from None
    with ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            stack.enter_context(lock(out / LOCK))
        except HeldError as held:
            raise DataError(f"{out} is being prepared by another process{held.advice}") from None
        except OSError as error:
            raise DataError(f"{out}: {error.strerror}") from None
        for draft in out.glob(DRAFTS):
            draft.unlink()
        yield


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove empty folders, the innermost first."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _is_ours(out: Path) -> bool:
    """Whether a directory may be overwritten: it is empty, or a corpus (finished or not, even if damaged)."""
    drafts = {path.name for path in out.glob(DRAFTS)}
    names = {path.name for path in out.iterdir()} - {JOURNAL + ".tmp", LOCK, f"{LOCK}.held"} - drafts
    if INDEX in names and JOURNAL not in names:
        return FORMAT.encode() in (out / INDEX).read_bytes()
    return not names or JOURNAL in names


def _clear(out: Path) -> None:
    # An empty journal is written first and removed last, so that after a crash the rest is recognised as unfinished.
    write_json(out / JOURNAL, {"settings": {}})
    for path in (out / INDEX, out / VERIFIED):
        path.unlink(missing_ok=True)
    for folder in ("train", "val", TOKENIZER):
        shutil.rmtree(out / folder, ignore_errors=True)
    (out / JOURNAL).unlink()

"""Token shards on disk: the format, its reader, its writer, and the checksums that guard it.

A corpus is a directory::

    index.json                      what follows, with counts and checksums; written last
    tokenizer/                      a Hugging Face tokenizer
    SPLIT/DOMAIN/00000.bin          token ids, little-endian uint16 or uint32; every document ends with EOS
    SPLIT/DOMAIN/00000.idx          int64 [documents, 2]: where each document ends, in tokens and in UTF-8 bytes

The checksum is CRC-32: it finds every error burst of up to 32 bits and all but one in four billion of the others,
and `zlib` computes it several times faster than any hash in the standard library. It guards against accidents, not
against adversaries.

`corpus/prepare.py` is `fathom prepare`, which writes shards and resumes after `kill -9`. `choose_split` decides which
documents are held out. `_check` names the file that is damaged; `verify="cached"` reads only changed files.
`ShardWriter` never cuts a document between shards. `corpus/tokens.py` (`TextEncoder`) encodes documents.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import shlex
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from fathom.checkpoints.file_names import TOKENIZER
from fathom.errors import DataError
from fathom.report.files import asdict, write_json
from fathom.report.progress import ProgressBar
from fathom.report.results import restored

FORMAT = "fathom-tokens"
VERSION = 1
INDEX = "index.json"
UNFINISHED = ".prepare"
"""The folder of an unfinished `fathom prepare`."""
VERIFIED = ".verified.json"
READ_BYTES = 1 << 23
# The keys of the index that identify the tokens, not how they were made.
CONTENT = ("vocab_size", "eos_token_id", "dtype", "tokenizer_crc32", "splits")


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or the exception's type if it has no message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@dataclass
class Shard:
    """The entry of one shard in the index; the checksums are of its two files."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    tokens_crc32: int = 0
    index_crc32: int = 0


Shards = dict[str, list[Shard]]
"""The shards by domain, in order."""


@dataclass(frozen=True)
class CorpusIndex:
    """`index.json` of a prepared corpus, with a checksum of itself."""

    settings: dict[str, object]
    left_out: int
    vocab_size: int
    eos_token_id: int
    dtype: str
    tokenizer_crc32: dict[str, int]
    tokenizer_sha256: str
    """Checksum of the vocabulary and rules."""
    splits: dict[str, Shards]
    targets_crc32: dict[str, int] | None = None
    """Checksums of the loss mask files, if there are any."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type on disk that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def shard_files(directory: Path, split: str, domain: str, number: int) -> tuple[Path, Path]:
    """The token file and the document index of one shard."""
    # A domain is any string. Quoted, it is one folder below its split; leading dots cannot lead out of it.
    folder = directory / split / (quote(domain, safe=" ").replace(".", "%2E") or "%")
    return folder / f"{number:05d}.bin", folder / f"{number:05d}.idx"


def _seal(index: Mapping[str, object]) -> int:
    body = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def write_index(directory: Path, index: CorpusIndex) -> None:
    """Seal and write the index, which makes the directory a finished corpus."""
    body = {"format": FORMAT, "version": VERSION, **asdict(index)}
    if index.targets_crc32 is None:
        del body["targets_crc32"]
    write_json(directory / INDEX, {**body, "crc32": _seal(body)})


class NoCorpus(DataError):
    """Raised for a directory that holds no corpus, not even an unfinished one; the message begins with the
    directory."""


def _to_prepare(text: str | Path, out: str | Path, tokenizer: str | None) -> str:
    of = ["--train-tokenizer", "4096"] if tokenizer is None else ["--tokenizer", tokenizer]
    return shlex.join(["fathom", "prepare", str(text), *of, "--out", str(out)])


def read_index(directory: Path, name: str = INDEX, tokenizer: str | None = None) -> CorpusIndex:
    """Read and check the index of a finished corpus, or an index that was set aside under another file name.

    Args:
        directory: The corpus.
        name: The file in it.
        tokenizer: The model whose tokenizer a new corpus must have, for the advice where there is none.
    """
    path = directory / name
    if not path.is_file():
        if directory.is_file():
            raise NoCorpus(
                f"{directory} is a file, not a corpus: `{_to_prepare(directory, 'DIR', tokenizer)}` makes it a corpus"
            )
        if not directory.is_dir():
            raise NoCorpus(
                f"{directory}: no such directory: `{_to_prepare('TEXT', directory, tokenizer)}` makes a corpus"
            )
        if (directory / UNFINISHED).is_dir():
            raise DataError(f"{directory} is an unfinished corpus: run the same `fathom prepare` again to complete it")
        advice = f"`{_to_prepare(directory, 'DIR', tokenizer)}` makes one of its texts"
        raise NoCorpus(f"{directory} is not a prepared corpus, since it has no {INDEX}: {advice}")
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is corrupt: {first_line(error)}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f"{path} is not the index of a prepared corpus")
    if index.get("version") != VERSION:
        raise DataError(f"{path}: version {index.get('version')} of the format cannot be read, only version {VERSION}")
    if index.get("crc32") != _seal(index):
        raise DataError(f"{path} is corrupt: its checksum does not match")
    try:
        return restored(CorpusIndex, index)
    except ValueError as error:
        raise DataError(f"{path} is corrupt: {error}") from None


def file_crc32(path: Path) -> int:
    """The CRC-32 of a file, read in pieces."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            value = zlib.crc32(piece, value)
    return value


def choose_split(text: str, held_out: float) -> str:
    """The split of a text: `val` for the share `held_out` of all texts, decided by the text's content; runs of white
    space count as one space."""
    digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8"), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") < held_out * 2.0**64 else "train"


def targets_file(token_file: Path) -> Path:
    """The path of the loss mask of a shard's token file."""
    return token_file.with_suffix(".targets")


def extents(directory: Path, index: CorpusIndex, split: str, domain: str) -> dict[Path, tuple[int, int]]:
    """Length and checksum of each file of one (split, domain)."""
    files = {}
    for number, shard in enumerate(index.splits[split][domain]):
        token_file, index_file = shard_files(directory, split, domain, number)
        files[token_file] = (shard.tokens * np.dtype(index.dtype).itemsize, shard.tokens_crc32)
        files[index_file] = (shard.documents * 16, shard.index_crc32)
        if index.targets_crc32:
            bits = targets_file(token_file)
            files[bits] = (-(-shard.tokens // 8), index.targets_crc32[f"{split}/{domain}/{bits.name}"])
    return files


class ShardWriter:
    """Appends documents to the shards of one (split, domain).

    A shard is closed after the document that brings it to `shard_tokens`. Documents are never split, and shard
    boundaries depend only on the documents, not on how calls of `append` group them.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        domain: str,
        dtype: np.dtype[np.unsignedinteger],
        shard_tokens: int,
    ) -> None:
        self.directory, self.split, self.domain = directory, split, domain
        self.dtype, self.shard_tokens = dtype, shard_tokens
        self.shards: list[Shard] = []

    def append(self, tokens: NDArray[np.integer], lengths: NDArray[np.int64], byte_lengths: NDArray[np.int64]) -> None:
        """Append documents: their concatenated tokens, and the length of each in tokens and in bytes."""
        token_ends, byte_ends = np.cumsum(lengths), np.cumsum(byte_lengths)
        done = 0
        while done < len(lengths):
            if not self.shards or self.shards[-1].tokens >= self.shard_tokens:
                self.shards.append(Shard())
            shard = self.shards[-1]
            token_base, byte_base = (int(token_ends[done - 1]), int(byte_ends[done - 1])) if done else (0, 0)
            room = token_base + self.shard_tokens - shard.tokens
            stop = min(int(np.searchsorted(token_ends, room)) + 1, len(lengths))
            ends = np.stack([token_ends[done:stop] - token_base, byte_ends[done:stop] - byte_base], axis=1)
            self._write(shard, tokens[token_base : int(token_ends[stop - 1])], ends.astype("<i8"))
            done = stop

    def _write(self, shard: Shard, tokens: NDArray[np.integer], ends: NDArray[np.int64]) -> None:
        ends += np.array([shard.tokens, shard.bytes])
        token_bytes, index_bytes = tokens.astype(self.dtype, copy=False).tobytes(), ends.tobytes()
        token_file, index_file = shard_files(self.directory, self.split, self.domain, len(self.shards) - 1)
        token_file.parent.mkdir(parents=True, exist_ok=True)
        for path, data in ((token_file, token_bytes), (index_file, index_bytes)):
            with path.open("ab") as file:
                file.write(data)
        shard.tokens, shard.bytes = int(ends[-1, 0]), int(ends[-1, 1])
        shard.documents += len(ends)
        shard.tokens_crc32 = zlib.crc32(token_bytes, shard.tokens_crc32)
        shard.index_crc32 = zlib.crc32(index_bytes, shard.index_crc32)


Opened = TypeVar("Opened", bound="TokenDataset")


class TokenDataset:
    """One split of a corpus, all domains or one: a stream of tokens in which every document ends with EOS.

    Shards are memory-mapped: opening costs no memory, and processes on a machine share the pages.
    """

    def __init__(self, directory: Path, index: CorpusIndex, split: str, domains: Iterable[str]) -> None:
        self.directory = directory
        self.split = split
        self.domains = tuple(domains)
        self.vocab_size: int = index.vocab_size
        self.eos_token_id: int = index.eos_token_id
        self.dtype = np.dtype(index.dtype)
        self.tokenizer_identity: str | None = index.tokenizer_sha256
        """Hash of the tokenizer's vocabulary and rules; None of a puzzle."""
        self._index = index
        content = {key: asdict(getattr(index, key)) for key in CONTENT}
        self.fingerprint: int = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        """A checksum of the checksums in the index: equal for equal tokens, whatever they were made from."""
        files = [files for _, files in self._shard_files()]
        # A plain view of the map: np.memmap's own indexing is several times slower.
        tokens = [np.asarray(np.memmap(token_file, self.dtype, "r")) for token_file, _ in files]
        documents = [np.asarray(np.memmap(index_file, "<i8", "r")).reshape(-1, 2) for _, index_file in files]
        self._join(tokens, documents)

    def _join(self, tokens: list[NDArray[np.integer]], documents: list[NDArray[np.int64]]) -> None:
        """Join shards into one token stream, given the tokens of each shard and where its documents end."""
        self._tokens, self._documents = tokens, documents
        self._starts = [0, *np.cumsum([len(one) for one in tokens]).tolist()]
        self._byte_starts = [0, *np.cumsum([one[-1, 1] for one in documents]).tolist()]
        self.num_tokens: int = self._starts[-1]
        self.num_bytes: int = self._byte_starts[-1]
        self.num_documents = sum(map(len, documents))

    @classmethod
    def open(
        cls: type[Opened],
        directory: str | Path,
        split: str = "train",
        domain: str | None = None,
        verify: bool | Literal["cached"] = True,
    ) -> Opened:
        """Open a split and check it.

        Args:
            directory: A directory written by `prepare`.
            split: `train` or `val`.
            domain: The name of one domain; by default all domains, concatenated.
            verify: True reads every file and compares its checksum. `cached` does so only for files whose size or
                modification time changed since the last check. False compares only sizes.
        """
        directory = Path(directory)
        index = read_index(directory)
        splits = index.splits
        if split not in splits:
            remedy = ""
            if split == "val":
                remedy = "; prepare with a larger `held_out` makes one, and `evaluate.every=0` trains without"
            raise DataError(f"{directory} has no split {split!r}: it has {', '.join(splits)}{remedy}")
        if domain is not None and domain not in splits[split]:
            raise DataError(f"{directory}: split {split!r} has no domain {domain!r}: it has {', '.join(splits[split])}")
        domains = [domain] if domain is not None else list(splits[split])
        files: dict[Path, tuple[int, int]] = {}
        for name in domains:
            files |= extents(directory, index, split, name)
        for name, crc32 in index.tokenizer_crc32.items():
            path = directory / TOKENIZER / name
            files[path] = (path.stat().st_size if path.exists() else -1, crc32)
        _check(directory, files, verify)
        return cls(directory, index, split, domains)

    @property
    def tokenizer_directory(self) -> Path:
        """The Hugging Face tokenizer that made these tokens."""
        return self.directory / TOKENIZER

    def select(self, domain: str) -> TokenDataset:
        """The part of this dataset that belongs to one domain, without verifying it again."""
        if domain not in self.domains:
            raise DataError(f"{self.directory}: no domain {domain!r}; allowed: {', '.join(self.domains)}")
        return type(self)(self.directory, self._index, self.split, [domain])

    def require_vocabulary(self, model_vocab_size: int) -> None:
        """Refuse a model whose embedding has too few rows for this corpus."""
        if self.vocab_size > model_vocab_size:
            tokens = f"a vocabulary of {self.vocab_size} tokens"
            raise DataError(f"{self.directory}: {tokens} does not fit a model with vocab_size={model_vocab_size}")

    def read(self, start: int, out: NDArray[np.int64]) -> None:
        """Copy the tokens from `start` of the stream into `out`, across shards if needed."""
        done = 0
        number = bisect.bisect_right(self._starts, start) - 1
        while done < len(out):
            local = start + done - self._starts[number]
            piece = self._tokens[number][local : local + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            number += 1

    def document_ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """The positions `start < p < stop` of the stream at which a new document begins."""
        found = []
        number = bisect.bisect_right(self._starts, start) - 1
        while number < len(self._documents) and self._starts[number] < stop:
            base, ends = self._starts[number], self._documents[number][:, 0]
            first = np.searchsorted(ends, start - base, side="right")
            last = np.searchsorted(ends, stop - base, side="left")
            found.append(ends[first:last] + base)
            number += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def bytes_before(self, position: int) -> int:
        """The number of bytes of text that the first `position` tokens stand for.

        The number is exact at the end of a document. Within a document, its bytes are spread evenly over its tokens,
        and EOS has none. Neighbouring windows therefore add up to exactly the bytes of the documents that they cover.
        """
        number = bisect.bisect_right(self._starts, position) - 1
        if number == len(self._documents):
            return self.num_bytes
        documents, local = self._documents[number], position - self._starts[number]
        document = int(np.searchsorted(documents[:, 0], local, side="right"))
        token_start, byte_start = documents[document - 1].tolist() if document else (0, 0)
        token_end, byte_end = documents[document].tolist()
        length = max(token_end - token_start - 1, 1)
        inside = (byte_end - byte_start) * min(local - token_start, length) // length
        return self._byte_starts[number] + byte_start + inside

    def _shard_files(self) -> Iterable[tuple[Shard, tuple[Path, Path]]]:
        for domain in self.domains:
            for number, shard in enumerate(self._index.splits[self.split][domain]):
                yield shard, shard_files(self.directory, self.split, domain, number)


def _check(directory: Path, files: Mapping[Path, tuple[int, int]], verify: bool | Literal["cached"]) -> None:
    """Compare files with the (size, checksum) in the index; the error names the first difference."""
    stamps: dict[str, list[int]] = {}
    for path, (size, crc32) in files.items():
        try:
            status = path.stat()
        except OSError:
            raise DataError(f"{path} is missing") from None
        if status.st_size != size:
            what = "is truncated" if status.st_size < size else "has grown"
            raise DataError(f"{path} {what}: {status.st_size} bytes where the index says {size}")
        stamps[str(path.relative_to(directory))] = [status.st_size, status.st_mtime_ns, crc32]
    if not verify:
        return
    known = _read_verified(directory)
    pending = [
        path
        for path, (name, stamp) in zip(files, stamps.items(), strict=True)
        if verify != "cached" or known.get(name) != stamp
    ]
    done = 0
    with ProgressBar("verifying", sum(files[path][0] for path in pending)) as bar, ThreadPoolExecutor(4) as pool:
        for path, found in zip(pending, pool.map(file_crc32, pending), strict=True):
            if found != files[path][1]:
                pool.shutdown(cancel_futures=True)
                raise DataError(f"{path} is corrupt: checksum {found:08x} where the index says {files[path][1]:08x}")
            done += files[path][0]
            bar.update(done)
    # A read-only disk cannot record the check, so the corpus is verified again next time.
    with contextlib.suppress(OSError):
        write_json(directory / VERIFIED, {**known, **stamps})


def _read_verified(directory: Path) -> dict[str, list[int]]:
    try:
        known = json.loads((directory / VERIFIED).read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}

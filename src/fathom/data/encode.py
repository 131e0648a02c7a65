"""The work of a `prepare` worker: parse records, choose their split, tokenise them.

A worker is a plain subprocess that serves requests on its standard input until that closes, which also happens when the
parent dies. Unlike multiprocessing it needs no `__main__` guard in the caller's script.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from fathom.data.shards import first_line, token_dtype
from fathom.data.sources import Kind, Payload, Reading, SourceText, parse
from fathom.data.tokenizer import plain_encoder
from fathom.errors import DataError

# Python started with -c imports modules from the working directory first, so a user's html.py could shadow Python's
# own. Ctrl-C reaches the whole process group, but the parent decides what it means. Replies have standard output to
# themselves; any other output goes to standard error.
WORKER = """
import sys
sys.path[:] = [path for path in sys.path if path]
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from fathom.data.encode import serve
replies = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
serve(sys.stdin.buffer, replies)
"""


BATCH_BYTES = 1 << 18
# Only one worker at a time processes a chunk with more text than this.
LARGE_BYTES = 3 << 19

Reached: TypeAlias = tuple[tuple[int, int], int]
"""A place in the input: the source and the record that come next, and the bytes read before them."""


@dataclass(frozen=True)
class Encoding:
    """The settings that determine how records become tokens of a split."""

    tokenizer_file: Path
    vocab_size: int
    eos_token_id: int
    held_out: float
    reading: Reading


@dataclass
class Chunk:
    """Records that are sent to a worker together."""

    kind: Kind
    name: str
    domain: str
    first: int
    """The number of the first record in its source."""
    payloads: list[Payload] = field(default_factory=list)
    size: int = 0
    """Bytes of the payloads, if known."""


@dataclass
class EncodedChunk:
    """The result of encoding a chunk."""

    groups: list[Encoded] = field(default_factory=list)
    left_out: int = 0
    """Records over the size limit."""


@dataclass
class Encoded:
    """The documents of a chunk that belong to one (split, domain), in order."""

    split: str
    domain: str
    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    byte_lengths: NDArray[np.int64]


def choose_split(text: str, held_out: float) -> str:
    """`val` for the given share of all texts, decided by their content; runs of white space count as one."""
    digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8"), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") < held_out * 2.0**64 else "train"


class Encoder:
    """Encodes chunks in this process."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._dtype = token_dtype(encoding.vocab_size)
        self._tokenizer = plain_encoder(encoding.tokenizer_file)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Tokenise a chunk."""
        result = EncodedChunk()
        groups: dict[tuple[str, str], list[Encoded]] = {}
        for documents in self._batches(chunk, result):
            for group in self._encode(documents, chunk.name):
                groups.setdefault((group.split, group.domain), []).append(group)
        result.groups = [
            Encoded(
                *key,
                np.concatenate([part.tokens for part in parts]),
                np.concatenate([part.lengths for part in parts]),
                np.concatenate([part.byte_lengths for part in parts]),
            )
            for key, parts in groups.items()
        ]
        return result

    def _batches(self, chunk: Chunk, result: EncodedChunk) -> Iterator[list[SourceText]]:
        """The documents of a chunk, in groups that fit in the tokenizer's memory."""
        batch: list[SourceText] = []
        size = 0
        for number, payload in enumerate(chunk.payloads, chunk.first):
            documents = parse(chunk.kind, chunk.name, chunk.domain, number, payload, self._encoding.reading)
            result.left_out += documents is None
            for document in documents or ():
                if batch and size + document.size > BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
                batch.append(document)
                size += document.size
        if batch:
            yield batch

    def _encode(self, documents: list[SourceText], name: str) -> list[Encoded]:
        try:
            encodings = self._tokenizer.encode_batch_fast(
                [document.text for document in documents], add_special_tokens=False
            )
        except Exception as error:
            raise DataError(
                f"{name}: {self._encoding.tokenizer_file} cannot encode a document ({first_line(error)}): it needs a "
                "token for unknown text"
            ) from None
        groups: dict[tuple[str, str], tuple[list[int], list[int], list[int]]] = {}
        for document, encoding in zip(documents, encodings, strict=True):
            key = choose_split(document.text, self._encoding.held_out), document.domain
            tokens, lengths, byte_lengths = groups.setdefault(key, ([], [], []))
            ids = encoding.ids
            tokens.extend(ids)
            tokens.append(self._encoding.eos_token_id)
            lengths.append(len(ids) + 1)
            byte_lengths.append(document.size)
        return [
            Encoded(*key, np.array(tokens, self._dtype), np.array(lengths, np.int64), np.array(sizes, np.int64))
            for key, (tokens, lengths, sizes) in groups.items()
        ]


class _EncodingProcess:
    """A process that encodes, and its pipe."""

    def __init__(self, encoding: Encoding) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._encoding: Encoding | None = encoding

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            if self._encoding is not None:
                pickle.dump(self._encoding, self.process.stdin)
                self._encoding = None
            pickle.dump(chunk, self.process.stdin)
            self.process.stdin.flush()
            result = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            status = self.process.wait()
            raise DataError(
                f"a tokenising process died (exit status {status}); run the same command to resume"
            ) from None
        if isinstance(result, Exception):
            raise result
        return cast(EncodedChunk, result)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # Closing flushes the pipe, whose reader may have exited.
                with contextlib.suppress(OSError):
                    pipe.close()


def encode_chunks(
    chunks: Iterator[tuple[Reached, Chunk]], encoding: Encoding, workers: int
) -> Iterator[tuple[Reached, EncodedChunk]]:
    """Encode chunks on `workers` processes and yield the results in order, each with the input position after it.

    With one worker everything happens in this process. At most two chunks per worker are in memory.
    """
    if workers <= 1:
        encoder = Encoder(encoding)
        for reached, chunk in chunks:
            yield reached, encoder(chunk)
        return
    local = threading.local()
    started: list[_EncodingProcess] = []

    large = threading.Lock()

    def work(chunk: Chunk) -> EncodedChunk:
        if not hasattr(local, "worker"):
            local.worker = _EncodingProcess(encoding)
            started.append(local.worker)
        with large if chunk.size > LARGE_BYTES else contextlib.nullcontext():
            result: EncodedChunk = local.worker(chunk)
        return result

    pool = ThreadPoolExecutor(workers, thread_name_prefix="fathom-encode")
    pending: deque[tuple[Reached, Future[EncodedChunk]]] = deque()
    try:
        for reached, chunk in chunks:
            pending.append((reached, pool.submit(work, chunk)))
            if len(pending) >= 2 * workers:
                reached, future = pending.popleft()
                yield reached, future.result()
        while pending:
            reached, future = pending.popleft()
            yield reached, future.result()
    finally:
        for _, future in pending:
            future.cancel()
        for worker in started:
            worker.process.kill()
        pool.shutdown()
        for worker in started:
            worker.stop()


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer each chunk with its encoding or an exception, until standard input closes."""
    encoder = None
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        if encoder is None:
            encoder = Encoder(request)
            continue
        try:
            result: EncodedChunk | Exception = encoder(request)
        except Exception as error:
            result = error if isinstance(error, DataError) else RuntimeError(f"{type(error).__name__}: {error}")
        try:
            pickle.dump(result, replies)
            replies.flush()
        except BrokenPipeError:
            return

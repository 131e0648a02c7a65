"""The loss mask of a shard, one bit per token in a file next to the tokens; and sequences packed from whole documents.

Bit n says whether token n is predicted in training. Token 0 is the lowest bit of byte 0. Whole conversations are packed
by best fit (`pack_rows`); each has its own positions, and EOS with label -100 fills the rest (`fill`).

For a tokenizer's own chat template, `corpus/chat_template.py` decides what the loss mask covers: what the template
marks by `{% generation %}`, else the assistant's messages. For the built-in templates, `corpus/templates.py` decides.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fathom.data.permutation import Permutation
from fathom.data.shards import CorpusIndex, TokenDataset, targets_file
from fathom.errors import DataError

NOT_TRAINED = -100  # the label that Hugging Face losses skip


def write_targets(token_file: Path, targets: NDArray[np.bool_]) -> None:
    """Write the loss mask of a whole shard."""
    targets_file(token_file).write_bytes(np.packbits(targets, bitorder="little").tobytes())


def read_targets(token_file: Path, tokens: int) -> NDArray[np.bool_]:
    """The loss mask of a shard of `tokens` tokens."""
    packed = np.fromfile(targets_file(token_file), np.uint8)
    return np.unpackbits(packed, count=tokens, bitorder="little").astype(np.bool_)


@dataclass(frozen=True)
class PackedRows:
    """The documents of each packed sequence: number r holds `documents[bounds[r] : bounds[r + 1]]`, concatenated."""

    documents: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.bounds) - 1

    def row(self, number: int) -> NDArray[np.int64]:
        """The documents of a row."""
        return self.documents[self.bounds[number] : self.bounds[number + 1]]


def pack_rows(lengths: NDArray[np.int64], width: int, seed: int) -> PackedRows:
    """Pack whole documents into sequences of at most `width` tokens, by best fit, longest first.

    The order of equally long documents depends on the seed.
    """
    shuffled = Permutation(len(lengths), seed)(np.arange(len(lengths)))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(width + 1)]  # by remaining room
    some = np.zeros(width + 1, np.bool_)
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fits = int(some[length:].argmax()) + length
        if some[fits]:
            row = open_rows[fits].pop()
            some[fits] = bool(open_rows[fits])
        else:
            row, fits = len(rows), width
            rows.append([])
        rows[row].append(document)
        open_rows[fits - length].append(row)
        some[fits - length] = True
    bounds = np.cumsum([0, *map(len, rows)])
    return PackedRows(np.array([document for row in rows for document in row], np.int64), bounds)


class TargetDataset(TokenDataset):
    """One split of a corpus that has a loss mask, such as a corpus of conversations."""

    def __init__(self, directory: Path, index: CorpusIndex, split: str, domains: Iterable[str]) -> None:
        super().__init__(directory, index, split, domains)
        ends = self.document_ends(0, self.num_tokens)
        self._spans = np.stack([np.r_[0, ends], np.r_[ends, self.num_tokens]], axis=1)  # [documents, 2]
        bits = [read_targets(token_file, shard.tokens) for shard, (token_file, _) in self._shard_files()]
        self._bits = np.packbits(np.concatenate(bits))  # positions in the whole stream
        self._rows: dict[tuple[int, int], PackedRows] = {}
        self.fingerprint = zlib.crc32(json.dumps([self.fingerprint, index.targets_crc32], sort_keys=True).encode())

    def packed(self, width: int, seed: int) -> PackedRows:
        """The rows of every epoch."""
        if (width, seed) not in self._rows:
            lengths = self._spans[:, 1] - self._spans[:, 0]
            if lengths.max() > width:
                raise DataError(
                    f"data.sequence_length={width}: {int((lengths > width).sum())} documents of {self.directory} are "
                    f"longer and would be cut; allowed: {int(lengths.max())} or more"
                )
            self._rows[width, seed] = pack_rows(lengths, width, seed)
        return self._rows[width, seed]

    def trained(self, start: int, stop: int) -> NDArray[np.bool_]:
        """The loss mask of the tokens from `start` to `stop`."""
        first = start // 8
        bits = np.unpackbits(self._bits[first : -(-stop // 8)])
        return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)

    def count_targets(self, documents: NDArray[np.int64]) -> int:
        """The number of tokens with a loss in some documents."""
        return sum(int(self.trained(start + 1, stop).sum()) for start, stop in self._spans[documents].tolist())

    def target_bytes(self, documents: NDArray[np.int64]) -> int:
        """The number of bytes of text that the tokens with a loss in some documents stand for; a document's bytes are
        spread evenly over its tokens, as in `bytes_before`."""
        found = 0
        for start, stop in self._spans[documents].tolist():
            length, size = max(stop - start - 1, 1), self.bytes_before(stop) - self.bytes_before(start)
            before = size * np.minimum(np.arange(stop - start + 1), length) // length
            found += int(np.diff(before)[1:][self.trained(start + 1, stop)].sum())
        return found

    def fill(
        self,
        documents: NDArray[np.int64],
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        """Write documents into one sequence `[T]`; the rest is filled with EOS tokens that have no labels."""
        tokens[:], labels[:] = self.eos_token_id, NOT_TRAINED
        place = 0
        for start, stop in self._spans[documents].tolist():
            end = place + stop - start
            self.read(start, tokens[place:end])
            trained = self.trained(start, stop)
            trained[0] = False  # nothing precedes it
            labels[place:end][trained] = tokens[place:end][trained]
            positions[place:end] = np.arange(stop - start)
            place = end
        positions[place:] = np.arange(len(tokens) - place)

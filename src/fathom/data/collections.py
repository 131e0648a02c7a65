"""Several collections of tokens read as one dataset: domains of a corpus, or corpora that share a tokenizer.

`mixture.py` decides which collection a sequence comes from, by the shares of a phase; share 0 reads nothing. A name
in `data.mixture` is a domain of `data.directory`, or another directory (`locate`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from fathom.data.shards import INDEX, TokenDataset, read_index
from fathom.data.targets import TargetDataset
from fathom.errors import DataError


class MixedDataset(TokenDataset):
    """Several collections concatenated into one dataset; no training sequence spans two collections."""

    def __init__(self, collections: Mapping[str, TokenDataset]) -> None:
        first = next(iter(collections.values()))
        for name, one in collections.items():
            _require_same_tokenizer(first, name, one)
        self.collections = dict(collections)
        """Collections by their names in the mixture."""
        self.directory, self.split, self.domains = first.directory, first.split, tuple(collections)
        self.vocab_size, self.eos_token_id, self.dtype = first.vocab_size, first.eos_token_id, first.dtype
        self.tokenizer_identity = first.tokenizer_identity
        found = [one.fingerprint for one in collections.values()]
        self.fingerprint = zlib.crc32(json.dumps(found).encode())
        parts = list(collections.values())
        self._join([one for part in parts for one in part._tokens], [one for part in parts for one in part._documents])

    def select(self, domain: str) -> TokenDataset:
        """One collection with all its domains."""
        if domain not in self.collections:
            raise DataError(f"data.mixture: no collection {domain!r}; allowed: {', '.join(self.collections)}")
        return self.collections[domain]


def open_mixture(
    directory: str | Path, names: Sequence[str], split: str = "train", verify: bool | Literal["cached"] = True
) -> MixedDataset:
    """Open a split of several collections, in the given order; collections without a `val` split are skipped for `val`.

    Args:
        directory: The corpus whose domains may be named.
        names: A domain of the corpus, or the directory of another corpus.
        split: `train` or `val`.
        verify: See `TokenDataset.open`.
    """
    found = {}
    for name in names:
        place, domain = locate(directory, name)
        index = read_index(place)
        kind = TargetDataset if index.targets_crc32 else TokenDataset
        domains = index.splits.get(split, {})
        if split == "train" or (domains if domain is None else domain in domains):
            found[name] = kind.open(place, split, domain, verify)
    if not found:
        raise DataError(f"data.mixture: none of {', '.join(names)} has a split {split!r}")
    return MixedDataset(found)


def collection_sizes(directory: str | Path, names: Sequence[str]) -> list[int]:
    """The number of training tokens of each collection, read from the corpus indexes alone."""
    sizes = []
    for name in names:
        place, domain = locate(directory, name)
        domains = read_index(place).splits.get("train", {})
        shards = [shard for one, shards in domains.items() if domain in (None, one) for shard in shards]
        sizes.append(sum(shard.tokens for shard in shards))
    return sizes


def locate(directory: str | Path, name: str) -> tuple[Path, str | None]:
    """The directory of the corpus that a collection names, and the domain in this corpus; None for all domains."""
    directory, place = Path(directory), Path(name)
    domains: list[str] = []
    if (directory / INDEX).is_file():
        domains = sorted({domain for split in read_index(directory).splits.values() for domain in split})
    if name in domains:
        return directory, name
    if not place.is_dir():
        beside = f": {directory} has {', '.join(domains)}" if domains else ""
        raise DataError(f"data.mixture.{name}: no such directory, and no domain of data.directory={directory}{beside}")
    return place, None


def _require_same_tokenizer(first: TokenDataset, name: str, one: TokenDataset) -> None:
    ours, theirs = ((data.vocab_size, data.eos_token_id, data.tokenizer_identity) for data in (first, one))
    if ours != theirs:
        raise DataError(
            f"data.mixture.{name}: its tokenizer ({str(theirs[2])[:12]}) is not that of {first.directory} "
            f"({str(ours[2])[:12]}): prepare both with the same tokenizer"
        )

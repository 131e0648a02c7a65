"""Commitments: a hash that fixes a model's weights today, so that a later claim can be checked by recomputation.

A Merkle root over SHA-256 leaves: one per tensor, one for config.json, one for the tokenizer (of a GGUF file: what
comes before its first tensor) and one for the statement: who commits, when, and what the sketch is. With a blinding key
the leaves reveal nothing about the weights until the key is published. The date is the owner's claim, so publish the
root where someone else records the date. Nothing here is zero-knowledge: a verifier must see the weights, or trust a
party that did. A commitment shows that *these* weights were held at the time, not that they are deployed or were the
first.

`verification.py` verifies a report.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as day
from datetime import datetime, timezone

import numpy as np

from fathom._version import __version__
from fathom.checkpoints.file_names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    QWEN_TIKTOKEN,
    SENTENCEPIECE_MODEL,
    TOKENIZER_JSON,
    VOCABULARY,
)
from fathom.checkpoints.origin import LocalOrigin, Origin, safe_name
from fathom.checkpoints.tensors import AdapterStore, TensorInfo, TensorStore
from fathom.errors import ModelError
from fathom.lineage import huref
from fathom.lineage.publishing.cards import sketch
from fathom.lineage.publishing.results import Content
from fathom.lineage.weights import Weights
from fathom.report.files import digest as file_digest

VERSION = 3
NAMED = 200  # characters of an owner's name
CHUNK = 64 << 20
SAME_SKETCH = 0.9999


def leaf(weights: Weights, name: str, key: bytes = b"") -> bytes:
    """Hash of one tensor: its name, type, shape and bytes; keyed if there is a key."""
    info = weights.store.tensors[name]
    head = json.dumps([name, info.dtype, list(info.shape)]).encode()
    digest = hashlib.sha256(b"\0" + len(head).to_bytes(8, "little") + head)
    for start in range(info.start, info.stop, CHUNK):
        digest.update(weights.origin.read(info.file, start, min(start + CHUNK, info.stop)))
    return hmac.digest(key, digest.digest(), "sha256") if key else digest.digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The root of a binary Merkle tree; the last node of an odd level moves up unchanged. Leaves and nodes are hashed
    under different prefixes."""
    level = list(leaves)
    if not level:
        raise ModelError("nothing to commit to")
    while len(level) > 1:
        pairs = [hashlib.sha256(b"\1" + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def header_digest(tensors: Mapping[str, TensorInfo]) -> str:
    """The hash of all tensors' names, types and shapes, which is equal for all models of one structure."""
    listed = [[name, tensors[name].dtype, list(tensors[name].shape)] for name in sorted(tensors)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


TOKENIZERS = (TOKENIZER_JSON, SENTENCEPIECE_MODEL, QWEN_TIKTOKEN, VOCABULARY)


def files_of(store: TensorStore) -> dict[str, tuple[Origin, str]]:
    """The files of a model: weights, config, tokenizer; for an adapter, the base model's files are marked with
    `base:`."""
    if isinstance(store, AdapterStore):
        above = {name: (store.adapter.origin, name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
        return above | {f"base: {name}": place for name, place in files_of(store.base).items()}
    names = {info.file for info in store.tensors.values()} | set(side_files(store))
    return {name: (store.origin, name) for name in sorted(names)}


def side_files(store: TensorStore) -> list[str]:
    """The config and tokenizer files next to the weights; a GGUF file contains its own."""
    if all(info.file.endswith(".gguf") for info in store.tensors.values()):
        return []
    tokenizer = [name for name in TOKENIZERS if store.origin.exists(name)][:1]
    return [CONFIG, *tokenizer]


def content(weights: Weights) -> Content:
    """The SHA-256 of every local file of a model, and a root hash over them; files of a repository are identified by
    its commit."""
    digests = {name: _digest(origin, file) for name, (origin, file) in files_of(weights.store).items()}
    leaves = [hashlib.sha256(f"{name}\0{digest}".encode()).digest() for name, digest in digests.items() if digest]
    whole = len(leaves) == len(digests)
    return Content(digests, merkle_root(leaves).hex() if whole else None)


def _digest(origin: Origin, file: str) -> str | None:
    # read past the origin, and not counted: nothing is compared
    return file_digest(origin.directory / safe_name(file)).sha256 if isinstance(origin, LocalOrigin) else None


def file_leaf(store: TensorStore, name: str, key: bytes = b"") -> bytes:
    """The hash of one config or tokenizer file, or of a GGUF file up to its first tensor; keyed if there is a key."""
    stop = store.origin.size(name)
    if name.endswith(".gguf"):
        stop = min(info.start for info in store.tensors.values() if info.file == name)
    head = name.encode()
    digest = hashlib.sha256(b"\2" + len(head).to_bytes(8, "little") + head)
    digest.update(store.origin.read(name, 0, stop))
    return hmac.digest(key, digest.digest(), "sha256") if key else digest.digest()


def leaves_of(weights: Weights, key: bytes = b"") -> dict[str, bytes]:
    """The leaves of a commitment's hash tree: one for each tensor, and one for each file that gives the tensors their
    meaning."""
    store = weights.store
    files = side_files(store) or sorted({info.file for info in store.tensors.values()})
    tensors = {name: leaf(weights, name, key) for name in sorted(store.tensors)}
    return tensors | {f"file: {name}": file_leaf(store, name, key) for name in files}


BOUND = ("fathom_commitment", "owner", "date", "tensors", "blinded")
"""Entries that the statement's leaf covers, with the sketch and the tool."""
ENTRIES = {*BOUND, "tool", "root", "leaves", "sketch"}
STATEMENT = "statement"


def statement_leaf(body: Mapping[str, object], key: bytes = b"") -> bytes:
    """The hash of a commitment's statements, without its leaves and its root; keyed if there is a key."""
    said = {name: body.get(name) for name in (*BOUND, "tool", "sketch")}
    digest = hashlib.sha256(b"\3" + json.dumps(said, sort_keys=True).encode())
    return hmac.digest(key, digest.digest(), "sha256") if key else digest.digest()


def commit(
    weights: Weights, blind: bool = False, owner: str | None = None, date: str | None = None
) -> tuple[dict[str, object], str | None]:
    """A commitment to a model's weights, and if it is blinded the key that opens it.

    Args:
        weights: A model that is not an adapter.
        blind: Hash the leaves with a key, and publish neither leaves nor sketch.
        owner: Name of the owner.
        date: The date, such as 2026-11-25; by default today.
    """
    if isinstance(weights.store, AdapterStore):
        raise ModelError("commit to the base and to the merged model; an adapter alone is not a model")
    if owner is not None and not 0 < len(owner) <= NAMED:
        raise ModelError(f"the owner's name has {len(owner)} characters; wanted 1 to {NAMED}")
    key = secrets.token_bytes(32) if blind else b""
    body: dict[str, object] = {
        "fathom_commitment": VERSION,
        "tool": __version__,
        "owner": owner,
        "date": _day(date) if date is not None else datetime.now(timezone.utc).date().isoformat(),
        "tensors": len(weights.store.tensors),
        "blinded": blind,
    }
    if not blind:
        body["sketch"] = sketch(weights).tobytes().hex()
    leaves = {**leaves_of(weights, key), STATEMENT: statement_leaf(body, key)}
    body["root"] = merkle_root(list(leaves.values())).hex()
    if not blind:
        body["leaves"] = {name: value.hex() for name, value in leaves.items()}
    return body, key.hex() if blind else None


def _day(text: str) -> str:
    try:
        return day.fromisoformat(text).isoformat()
    except ValueError:
        raise ModelError(f"date {text!r:.40}: wanted a day, such as 2026-11-25") from None


@dataclass(frozen=True)
class Verification:
    """Whether a commitment matches a model, and the differences if not."""

    holds: bool
    findings: list[str]
    not_recomputed: list[str] = field(default_factory=list)


def verify(
    weights: Weights, body: Mapping[str, object], key: str | None = None, name: str = "commitment"
) -> Verification:
    """Recompute a commitment from weights; the sketch is compared by cosine, since rounding differs between machines.

    Args:
        weights: The model to which the commitment is claimed to belong.
        body: The commitment.
        key: The key of a blinded commitment.
        name: The commitment's name in error messages.
    """
    if body.get("fathom_commitment") != VERSION or not isinstance(body.get("root"), str):
        raise ModelError(f"{name}: not a commitment of version {VERSION}")
    if bool(body.get("blinded")) != bool(key):
        raise ModelError("a blinded commitment needs its key, and any other commitment takes no key")
    if key and not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ModelError("the key is not 32 bytes in hexadecimal")
    if unknown := sorted(set(body) - ENTRIES):
        raise ModelError(f"{name}: {unknown[0]!r:.40} is no entry of a commitment; the root hash would not cover it")
    secret = bytes.fromhex(key) if key else b""
    leaves = {**leaves_of(weights, secret), STATEMENT: statement_leaf(body, secret)}
    findings = _unfounded(body, len(weights.store.tensors), leaves)
    if merkle_root(list(leaves.values())).hex() != body["root"]:
        findings.append("the root differs: these are not the committed weights, config, tokenizer and statement")
    if body.get("blinded"):
        return Verification(not findings, findings)
    said = body.get("sketch")
    if not isinstance(said, str) or not re.fullmatch(r"([0-9a-f]{2})+", said):
        return Verification(False, [*findings, "the sketch is not hexadecimal"])
    published = np.frombuffer(bytes.fromhex(said), np.int8)
    again = sketch(weights)
    likeness = huref.sketch_cosine(published, again) if published.shape == again.shape else 0.0
    if likeness < SAME_SKETCH:
        findings.append(f"the sketch differs: cosine {likeness:.4f}")
    return Verification(not findings, findings)


def _listed(names: Sequence[object], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def _unfounded(body: Mapping[str, object], tensors: int, leaves: Mapping[str, bytes]) -> list[str]:
    """Findings on published parts of a commitment that neither the weights nor the root confirm."""
    findings = (
        [] if body.get("tensors") == tensors else [f"it speaks of {body.get('tensors')!r:.20} tensors, not {tensors}"]
    )
    if body.get("blinded"):
        return findings
    said = body.get("leaves")
    if not isinstance(said, dict) or not said:
        return [*findings, "it publishes no leaves"]
    if not all(isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) for value in said.values()):
        return [*findings, "its leaves are not hashes"]
    if merkle_root([bytes.fromhex(value) for value in said.values()]).hex() != body["root"]:
        findings.append("its leaves do not give its root")
    parts = {
        "changed": [name for name in leaves if name in said and said[name] != leaves[name].hex()],
        "missing": [name for name in leaves if name not in said],
        "not of this model": [name for name in said if name not in leaves],
    }
    findings += [f"{what}: {_listed(some)}" for what, some in parts.items() if some]
    if not any(parts.values()) and list(said) != list(leaves):
        findings.append("its leaves are not in their order")
    return findings

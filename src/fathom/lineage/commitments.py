"""Commitments: a hash that fixes a model's weights today, so that a later claim can be checked by recomputation.

A Merkle root over one leaf per tensor (SHA-256, names sorted). With a blinding key the leaves say nothing about the
weights until the key is shown. Nothing here is zero-knowledge: whoever verifies must see the weights, or trust
somebody who did. A commitment shows that *these* weights were held, not that they are the deployed or the first ones.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fathom._version import __version__
from fathom.checkpoints.origin import Refused
from fathom.checkpoints.tensors import AdapterStore, Array, TensorInfo
from fathom.lineage import huref
from fathom.lineage.cards import sketches
from fathom.lineage.weights import Weights

VERSION = 1
CHUNK = 64 << 20
SAME_SKETCH = 0.9999
MODULUS = (1 << 31) - 1


def leaf(weights: Weights, name: str, key: bytes = b"") -> bytes:
    """Hash of one tensor: its name, type, shape and bytes; keyed if there is a key."""
    info = weights.store.tensors[name]
    head = json.dumps([name, info.dtype, list(info.shape)]).encode()
    digest = hashlib.sha256(b"\0" + len(head).to_bytes(8, "little") + head)
    for start in range(info.start, info.stop, CHUNK):
        digest.update(weights.origin.read(info.file, start, min(start + CHUNK, info.stop)))
    return hmac.digest(key, digest.digest(), "sha256") if key else digest.digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root of a binary tree; an odd node is carried up. Leaves and nodes are hashed under different prefixes."""
    level = list(leaves)
    if not level:
        raise Refused("nothing to commit to")
    while len(level) > 1:
        pairs = [hashlib.sha256(b"\1" + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def header_digest(tensors: Mapping[str, TensorInfo]) -> str:
    """Hash of all names, types and shapes: cheap, and enough to tell two checkpoints apart by structure."""
    listed = [[name, tensors[name].dtype, list(tensors[name].shape)] for name in sorted(tensors)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def commit(weights: Weights, blind: bool = False) -> tuple[dict[str, Any], str | None]:
    """A commitment, and the key that opens it if it is blinded.

    Args:
        weights: Any model that is not an adapter.
        blind: Key the leaves and publish neither them nor the sketch.
    """
    if isinstance(weights.store, AdapterStore):
        raise Refused("commit to the base and to the merged model; an adapter alone is not a model")
    key = secrets.token_bytes(32) if blind else b""
    leaves = {name: leaf(weights, name, key) for name in sorted(weights.store.tensors)}
    body: dict[str, Any] = {
        "fathom_commitment": VERSION,
        "tool": __version__,
        "root": merkle_root(list(leaves.values())).hex(),
        "tensors": len(leaves),
        "blinded": blind,
    }
    if not blind:
        body["leaves"] = {name: value.hex() for name, value in leaves.items()}
        body["sketch"] = huref.quantised(sketches(weights)["z_last"]).tobytes().hex()
    return body, key.hex() if blind else None


@dataclass(frozen=True)
class Verification:
    """Whether a commitment opens to a model, and what differs if not."""

    holds: bool
    findings: list[str]


def verify(weights: Weights, body: Mapping[str, Any], key: str | None = None) -> Verification:
    """Recompute a commitment from weights; the sketch by cosine, since rounding differs between machines."""
    if body.get("fathom_commitment") != VERSION or not isinstance(body.get("root"), str):
        raise Refused(f"not a commitment of version {VERSION}")
    if bool(body.get("blinded")) != bool(key):
        raise Refused("a blinded commitment needs its key, and only that")
    secret = bytes.fromhex(key) if key else b""
    leaves = {name: leaf(weights, name, secret) for name in sorted(weights.store.tensors)}
    findings = []
    if merkle_root(list(leaves.values())).hex() != body["root"]:
        findings.append("the root differs: these are not the committed weights")
        said = body.get("leaves") if isinstance(body.get("leaves"), dict) else {}
        changed = [name for name in leaves if said and said.get(name) != leaves[name].hex()]
        missing = [name for name in said or {} if name not in leaves]
        findings += [
            f"{what}: {', '.join(map(str, some[:8]))}"
            for what, some in (("changed", changed), ("missing", missing))
            if some
        ]
    if isinstance(body.get("sketch"), str):
        published = np.frombuffer(bytes.fromhex(body["sketch"]), np.int8)
        again = huref.quantised(sketches(weights)["z_last"])
        likeness = huref.sketch_cosine(published, again) if published.shape == again.shape else 0.0
        if likeness < SAME_SKETCH:
            findings.append(f"the sketch differs: cosine {likeness:.4f}")
    return Verification(not findings, findings)


def freivalds(claim: Array, factors: Sequence[Array], draw: np.random.Generator, rounds: int = 2) -> bool:
    """Check an integer matrix product without multiplying: claim·r ≡ F₁(F₂(…r)) modulo 2³¹ − 1.

    The verifier draws r after the claim is fixed; a wrong claim passes with probability (2³¹ − 1)^−rounds.
    """
    for _ in range(rounds):
        vector: Array = np.asarray(draw.integers(0, MODULUS, claim.shape[1]))
        right: Array = vector
        for factor in reversed(factors):
            right = _times(factor, right)
        if not np.array_equal(_times(claim, vector), right):
            return False
    return True


def _times(matrix: Array, vector: Array) -> Array:
    # residues are below 2³¹: products fit 64 bits if they are reduced before they are summed
    return (matrix.astype(np.int64) % MODULUS * vector % MODULUS).sum(1) % MODULUS

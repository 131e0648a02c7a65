"""A zero-knowledge proof, at toy size, that a sketch came from committed weights. Needs the extra `proof` (ezkl).

    python benchmarks/lineage/proof.py --out benchmarks/results/lineage-proof.json

The owner publishes a Poseidon hash of W_q and W_k. A verifier then names anchor strings, and so X and the sketch B. The
proof says: whoever made it knows W_q, W_k with these hashes and z = B vec(X W_qᵀ W_k Xᵀ). It reveals z and the hashes.
What it does not say is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fathom.lineage import Weights, canonical, huref, open_weights, vocabulary

Array = NDArray[np.float32]
BUCKETS, SCALE = 32, 10  # numbers in the sketch; fixed point: 10 bits after the binary point
NOT_PROVED = (
    "that the committed weights are the ones being served, or anybody's original ones",
    "that nobody committed a disguised copy: the term is invariant, its hash is not",
    "anything about the other layers and tensors, which are not in the circuit",
    "soundness against whoever made the reference string: this one is generated here, not by a ceremony",
    "that it can be done at real size: proving grows with weights x anchors, and memory is gone long before 7B",
)


@dataclass
class Statement:
    """Private W_q, W_k [m, d] with heads that share a key summed; public X [N, d], rows centred, and B [32, N²]."""

    query: Array
    key: Array
    anchors: Array
    buckets: Array

    def value(self) -> Array:
        """z = B vec(X W_qᵀ W_k Xᵀ)."""
        term = self.anchors @ self.query.T @ self.key @ self.anchors.T
        return self.buckets @ term.reshape(-1)


def of_model(weights: Weights, count: int) -> Statement:
    """The attention term of the last layer, canonical, at the model's anchor strings."""
    layer = weights.layer(weights.geometry.layers - 1, canonical.QK_ROLES)
    form = canonical.balance_qk(canonical.fold(layer, weights.geometry), weights.geometry)
    query, key = form["q"], form["k"]
    blocks = list(canonical.blocks(weights.geometry))
    words = weights.vocabulary() or vocabulary.rows_as_strings(weights.geometry.vocab)
    texts = vocabulary.anchors(words, weights.geometry.vocab, count)
    x = huref.anchor_embeddings(weights, np.array([words[text] for text in texts]))
    summed = np.concatenate([query[block.query].sum(0) for block in blocks])
    return statement(summed, np.concatenate([key[block.key] for block in blocks]), x, texts)


def random(width: int, count: int) -> Statement:
    """Random weights and anchors."""
    draw = np.random.default_rng(0)
    query, key = draw.normal(0, width**-0.5, (2, width, width))
    return statement(query, key, draw.normal(size=(count, width)), [b"anchor %d" % i for i in range(count)])


def statement(query: Array, key: Array, x: Array, texts: list[bytes]) -> Statement:
    """Centred anchors, so that the term is double-centred; the 512-bucket sketch folded to 32."""
    centred = (x - x.mean(0)) / x.std()
    cells = np.eye(len(texts) ** 2, dtype=np.float32).reshape(-1, len(texts), len(texts))
    columns = [np.rint(huref.sketch([cell], texts) / np.sqrt(huref.SKETCH)) for cell in cells]  # one ±1 in 512
    buckets = np.stack(columns, 1).reshape(-1, BUCKETS, len(cells)).sum(0)
    return Statement(*(np.asarray(part, np.float32) for part in (query, key, centred, buckets)))


def write_graph(stated: Statement, path: Path) -> None:
    """The computation as ONNX; X and B are constants of the circuit."""
    from onnx import TensorProto, helper, numpy_helper, save

    cells = stated.buckets.shape[1]
    steps = [
        ("Transpose", ["q"], "qt", {"perm": [1, 0]}),
        ("MatMul", ["x", "qt"], "xq", {}),
        ("MatMul", ["k", "xt"], "kx", {}),
        ("MatMul", ["xq", "kx"], "term", {}),
        ("Reshape", ["term", "flat"], "cells", {}),
        ("MatMul", ["b", "cells"], "z", {}),
    ]
    constants = {"x": stated.anchors, "xt": stated.anchors.T.copy(), "b": stated.buckets, "flat": np.array([cells, 1])}
    graph = helper.make_graph(
        [helper.make_node(op, names, [out], **how) for op, names, out, how in steps],
        "sketch",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, stated.query.shape) for name in "qk"],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [BUCKETS, 1])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@dataclass
class Demonstration:
    """The steps, each timed."""

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)

    def at(self, name: str) -> str:
        """A file of the demonstration."""
        return str(self.folder / name)

    def timed(self, name: str, step: Callable[..., Any], *words: object) -> Any:
        """Run a step and remember how long it took."""
        print(f"{name} …", file=sys.stderr, flush=True)
        started = time.monotonic()
        found = step(*words)
        self.seconds[name] = round(time.monotonic() - started, 2)
        return found

    def run(self, stated: Statement, logrows: int | None) -> dict[str, Any]:
        """Commit, prove, verify, and try to cheat."""
        import ezkl

        write_graph(stated, self.folder / "net.onnx")
        asked = ezkl.PyRunArgs()
        asked.input_visibility, asked.param_visibility, asked.output_visibility = "hashed", "fixed", "public"
        asked.input_scale = asked.param_scale = SCALE
        if logrows:
            asked.logrows = logrows
        net, settings, srs, witness = map(self.at, ("net.compiled", "settings.json", "kzg.srs", "witness.json"))
        vk, pk, proof = map(self.at, ("vk.key", "pk.key", "proof.json"))
        Path(self.at("input.json")).write_text(
            json.dumps({"input_data": [stated.query.ravel().tolist(), stated.key.ravel().tolist()]})
        )
        published = self.timed("commit", commitments, stated)
        ezkl.gen_settings(self.at("net.onnx"), settings, asked)
        ezkl.compile_circuit(self.at("net.onnx"), net, settings)
        shape = json.loads(Path(settings).read_text())
        self.timed("reference string (test)", ezkl.gen_srs, srs, shape["run_args"]["logrows"])
        self.timed("witness", ezkl.gen_witness, self.at("input.json"), net, witness)
        self.timed("setup", ezkl.setup, net, vk, pk, srs)
        self.timed("prove", ezkl.prove, witness, net, pk, proof, srs)
        accepted = self.timed("verify", ezkl.verify, proof, settings, vk, srs)
        shown = json.loads(Path(proof).read_text())["pretty_public_inputs"]
        z = np.array(shown["rescaled_outputs"][0], float)
        return {
            "rows": shape["num_rows"],
            "logrows": shape["run_args"]["logrows"],
            "seconds": self.seconds,
            "bytes": {
                name: Path(self.at(name)).stat().st_size for name in ("proof.json", "vk.key", "pk.key", "kzg.srs")
            },
            "accepted": bool(accepted),
            "hashes_are_the_published_ones": published == commitments_in(Path(witness)),
            "other_sketch_refused": not self.accepts_other(Path(proof), settings, vk, srs),
            "error_of_fixed_point": float(np.abs(z - stated.value()).max()),
            "largest_entry": float(np.abs(stated.value()).max()),
        }

    def accepts_other(self, proof: Path, settings: str, vk: str, srs: str) -> bool:
        """Whether the same proof passes for a sketch with one number changed."""
        import ezkl

        body = json.loads(proof.read_text())
        values = body["instances"][0]
        values[-1] = values[-2] if values[-2] != values[-1] else values[-3]
        changed = proof.with_name("changed.json")
        changed.write_text(json.dumps(body))
        try:
            return bool(ezkl.verify(str(changed), settings, vk, srs))
        except RuntimeError:
            return False


def commitments(stated: Statement) -> list[str]:
    """Poseidon hashes of the two matrices in fixed point, made before any anchor is named."""
    import ezkl

    return [
        ezkl.poseidon_hash([ezkl.float_to_felt(float(value), SCALE) for value in matrix.ravel()])[0]
        for matrix in (stated.query, stated.key)
    ]


def commitments_in(witness: Path) -> list[str]:
    """The hashes that the circuit computed."""
    found: list[str] = json.loads(witness.read_text())["processed_inputs"]["poseidon_hash"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of width 32 or less; random weights of width 16 if not given")
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--logrows", type=int, help="log₂ of the circuit's rows; ezkl's own choice if not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the results here")
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    try:
        import ezkl
        import onnx  # noqa: F401
    except ImportError as error:
        sys.exit(f"{error.name} is not installed: pip install '.[proof]'")
    stated = of_model(open_weights(options.model), options.anchors) if options.model else random(16, options.anchors)
    with tempfile.TemporaryDirectory() as folder:
        found = Demonstration(Path(folder)).run(stated, options.logrows)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    body = {
        "what": "proof that 32 numbers are the sketch of two committed matrices",
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "hardware": {"cpus": os.cpu_count(), "threads": options.threads, "machine": platform.machine()},
        "versions": {"python": platform.python_version(), "ezkl": ezkl.__version__},
        "weights": [list(stated.query.shape), list(stated.key.shape)],
        "anchors": options.anchors,
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        **found,
        "not_proved": NOT_PROVED,
    }
    text = json.dumps(body, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    good = ("accepted", "hashes_are_the_published_ones", "other_sketch_refused")
    return 0 if all(body[key] for key in good) else 1


if __name__ == "__main__":
    sys.exit(main())

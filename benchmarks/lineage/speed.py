"""Time, memory and bytes of `fathom lineage compare` on a synthetic pair of Llama-2-7B shape.

    python benchmarks/lineage/speed.py --modes fast exact remote > benchmarks/results/lineage-speed.json

Writes two sharded random bf16 checkpoints (27 GB) to a temporary directory and removes them afterwards. Every mode
runs in its own process, so that its peak memory is its own. `remote` reads the pair over loopback in fast mode.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, HEADS, FFN, VOCAB = 4096, 32, 11008, 32_000


def shapes(layers: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors of each shard: the ends, then four layers at a time."""
    shards: list[dict[str, tuple[int, ...]]] = [
        {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    ]
    for layer in range(layers):
        if layer % 4 == 0:
            shards.append({})
        base = f"model.layers.{layer}."
        shards[-1] |= {f"{base}self_attn.{x}_proj.weight": (WIDTH, WIDTH) for x in "qkvo"}
        shards[-1] |= {f"{base}mlp.{x}_proj.weight": (FFN, WIDTH) for x in ("gate", "up")}
        shards[-1] |= {f"{base}mlp.down_proj.weight": (WIDTH, FFN)}
        shards[-1] |= {f"{base}{x}_layernorm.weight": (WIDTH,) for x in ("input", "post_attention")}
    return shards


def random_bf16(draw: np.random.Generator, count: int) -> np.ndarray:
    """Values ±[2⁻⁷, 2⁻⁵): random sign, mantissa and lowest exponent bit. Cheap, and of full rank."""
    return (draw.integers(0, 1 << 16, count, np.uint16) & 0x80FF) | np.uint16(0x3C00)


def write_model(path: Path, layers: int, seed: int, noise: int | None = None) -> int:
    """One checkpoint; returns its bytes. With `noise`, a seed, the four lowest bits of a mantissa are drawn anew."""
    path.mkdir(parents=True)
    draw, weight_map, total = np.random.default_rng(seed), {}, 0
    other = None if noise is None else np.random.default_rng(noise)
    for number, tensors in enumerate(shapes(layers)):
        name, header, offset = f"model-{number:05d}.safetensors", {}, 0
        for key, shape in tensors.items():
            size = 2 * int(np.prod(shape))
            header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
            weight_map[key], offset = name, offset + size
        raw = json.dumps(header).encode()
        with open(path / name, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for shape in tensors.values():
                left = int(np.prod(shape))
                while left:
                    part = min(left, 1 << 24)
                    values = random_bf16(draw, part)
                    if other is not None:
                        values ^= other.integers(0, 16, part, np.uint16)
                    file.write(values.tobytes())
                    left -= part
        total += offset
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = dict(
        model_type="llama",
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=layers,
        intermediate_size=FFN,
        vocab_size=VOCAB,
    )
    (path / "config.json").write_text(json.dumps(config))
    return total


class RangeServer(BaseHTTPRequestHandler):
    """Serves `/org/name/resolve/main/file` by ranges, and nothing else."""

    root = Path()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        place = re.fullmatch(r"/\w+/(\w+)/resolve/main/([\w.-]+)", self.path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = self.root / place[1] / place[2] if place else None
        if path is None or not path.is_file() or not wanted:
            return self.send_error(404)
        size = path.stat().st_size
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, size)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(start)
            while start < stop and (block := file.read(min(stop - start, 1 << 22))):
                self.wfile.write(block)
                start += len(block)
        return None


def watch(origin: Any) -> list[tuple[str, int, int]]:
    """The places of a file that an origin reads from now on."""
    seen: list[tuple[str, int, int]] = []
    name = "_fetch" if hasattr(origin, "_fetch") else "_read"
    inner = getattr(origin, name)

    def read(path: str, start: int, stop: int) -> bytearray:
        seen.append((path, start, stop))
        return inner(path, start, stop)

    setattr(origin, name, read)
    return seen


def distinct(places: list[tuple[str, int, int]]) -> int:
    """Bytes that were read at least once."""
    total, end = 0, ("", 0)
    for path, start, stop in sorted(places):
        end = end if end[0] == path else (path, 0)
        total += max(0, stop - max(start, end[1]))
        end = (path, max(end[1], stop))
    return total


def child(a: str, b: str, mode: str) -> None:
    """One comparison; prints its own measurements as JSON."""
    from fathom.lineage import Options, compare, open_weights

    started, marks = time.monotonic(), []

    def mark(what: str) -> None:
        marks.append((round(time.monotonic() - started, 1), what))

    first, second = open_weights(a), open_weights(b)
    places = [watch(model.origin) for model in (first, second)]
    found = compare(first, second, options=Options(mode=mode), progress=mark)
    used = resource.getrusage(resource.RUSAGE_SELF)
    read = first.origin.bytes_read + second.origin.bytes_read
    held = first.file_bytes + second.file_bytes
    print(
        json.dumps(
            {
                "seconds": round(time.monotonic() - started, 1),
                "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
                "peak_rss_gb": round(used.ru_maxrss * 1024 / 1e9, 3),
                "bytes_read": read,
                "read_twice": round(read / sum(map(distinct, places)) - 1, 4),
                "bytes_in_files": held,
                "share_read": round(read / held, 4),
                "verdict": found.verdict.label,
                "scores": {name: round(s.score, 5) for name, s in found.pair.scores.items()},
                "layers_scored": len(found.pair.layers[0]),
                "skipped": found.pair.skipped,
                "steps": marks,
            }
        )
    )


def run(mode: str, root: Path, threads: int) -> dict[str, object]:
    """Measure one mode in a fresh process."""
    environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))}
    a, b = str(root / "a"), str(root / "b")
    server = None
    if mode == "remote":
        RangeServer.root = root
        server = ThreadingHTTPServer(("127.0.0.1", 0), RangeServer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"
        a, b = "bench/a", "bench/b"
    command = [sys.executable, __file__, "--child", a, b, "exact" if mode == "exact" else "fast"]
    before = os.getloadavg()[0]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    if server:
        server.shutdown()
    if done.returncode:
        return {"mode": mode, "failed": done.stderr[-2000:]}
    return {"mode": mode, "load_before": round(before, 2), **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=["fast", "exact", "remote"], choices=["fast", "exact", "remote"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--related", action="store_true", help="the second model is a noisy copy of the first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=None, help="where the temporary checkpoints go")
    parser.add_argument("--child", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    root = Path(tempfile.mkdtemp(prefix="lineage-speed-", dir=options.directory))
    try:
        needed = 2 * sum(2 * int(np.prod(shape)) for shard in shapes(options.layers) for shape in shard.values())
        if shutil.disk_usage(root).free < needed * 1.1:
            sys.exit(f"{needed / 1e9:.0f} GB are needed under {root}")
        started = time.monotonic()
        size = write_model(root / "a", options.layers, 0)
        if options.related:
            write_model(root / "b", options.layers, 0, noise=1)
        else:
            write_model(root / "b", options.layers, 1)
        written = time.monotonic() - started
        results = [run(mode, root, options.threads) for mode in options.modes]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    body = {
        "what": "fathom lineage compare, synthetic pair of Llama-2-7B shape, random bf16, sharded safetensors",
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "hardware": {
            "cpus": os.cpu_count(),
            "threads": options.threads,
            "machine": platform.processor() or platform.machine(),
        },
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "layers": options.layers,
        "bytes_per_model": size,
        "seconds_to_write": round(written, 1),
        "results": results,
    }
    print(json.dumps(body, indent=1))
    return None


if __name__ == "__main__":
    main()

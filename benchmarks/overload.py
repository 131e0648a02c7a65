"""What bad clients of `fathom serve` cost good ones: waiting behind oversized prompts, and memory after bad requests.

    python benchmarks/overload.py --out benchmarks/results/overload.json
    python benchmarks/overload.py --tokenizer DIRECTORY   # a large vocabulary; by default one is trained on docs/

`starve`: a client asks for one token of a short prompt, alone and while eight others send prompts of 500,000 words.

`memory`: six clients send 500 bad requests of twelve kinds, of up to 1.5 MB each. The server's resident memory is read
after a few requests of each kind, at its peak, and at the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fathom.checkpoints.export import export
from fathom.data.tokenizer import train_bpe
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.report.provenance import provenance

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
OVERSIZED, WORDS = 8, 500_000
REQUESTS, CLIENTS, WARM = 500, 6, 12
PADDING = "深さ of a river " * 30_000
"""About 600 kB in UTF-8."""
JSON_HEAD = {"Content-Type": "application/json"}


def talk(**more: object) -> bytes:
    """The body of a chat."""
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **more}).encode()


def bad_requests() -> dict[str, tuple[str, bytes]]:
    """Route and body by kind; none of them is answered with a text."""
    completions, chats = "/v1/completions", "/v1/chat/completions"
    many = 100_000
    return {
        "oversized prompt": (completions, json.dumps({"prompt": "a " * WORDS}).encode()),
        "oversized in another alphabet": (completions, json.dumps({"prompt": PADDING}).encode()),
        "oversized message": (chats, json.dumps({"messages": [{"role": "user", "content": PADDING}]}).encode()),
        "body over the limit": (completions, json.dumps({"prompt": "a " * 750_000}).encode()),
        "cut off": (completions, b'{"prompt": "' + PADDING.encode()),
        "prompt of fractions": (completions, json.dumps({"prompt": [1.5] * many}).encode()),
        "prompt of small lists": (completions, json.dumps({"prompt": [[1.5]] * many}).encode()),
        "messages that are numbers": (chats, json.dumps({"messages": [1] * many}).encode()),
        "stops that are numbers": (completions, json.dumps({"prompt": "x", "stop": [1] * many}).encode()),
        "many unknown fields": (completions, json.dumps({f"field{i}": i for i in range(40_000)}).encode()),
        "many biases": (chats, talk(logit_bias={f"t{i}": 1 for i in range(40_000)})),
        "another model": (completions, json.dumps({"prompt": PADDING, "model": "other"}).encode()),
    }


class Server:
    """`fathom serve` in a process of its own; of another checkout, or as a program that calls the command line."""

    def __init__(self, directory: Path, *options: str, source: Path | None = None, program: str = "") -> None:
        command = [sys.executable, *(["-c", program] if program else ["-m", "fathom"])]
        command += ["serve", str(directory), "--port", "0", "--device", "cpu", *options]
        environment = dict(os.environ) if source is None else {**os.environ, "PYTHONPATH": str(source / "src")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1].split("/")[0])

    def post(self, route: str, body: bytes) -> int:
        """The status of the answer; 0 where the connection was closed before one was read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", route, body, JSON_HEAD)
            response = connection.getresponse()
            response.read()
        except OSError:
            return 0
        finally:
            connection.close()
        return response.status

    def memory(self, field: str) -> float:
        """MB resident now (`VmRSS`) or at most (`VmHWM`)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1000

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(60)


def build(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A small random model, exported."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048}
    tokenizer.chat_template = TEMPLATE
    export(FathomForCausalLM(FathomConfig(vocab_size=len(tokenizer), **shape)).eval(), directory, tokenizer)


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def starve(server: Server) -> dict[str, Any]:
    """Seconds of a small request: alone, and while oversized prompts are under way."""
    small = json.dumps({"prompt": "the depth of a river", "max_tokens": 1}).encode()
    large = json.dumps({"prompt": "a " * WORDS}).encode()

    def ask() -> float:
        return seconds(lambda: server.post("/v1/completions", small))

    alone = [ask() for _ in range(10)]
    beside: list[float] = []
    for _ in range(3):
        threads = [threading.Thread(target=server.post, args=("/v1/completions", large)) for _ in range(OVERSIZED)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            beside.append(ask())
        for thread in threads:
            thread.join()
    return {"alone_worst": max(alone), "beside_worst": max(beside), "beside": beside, "oversized_prompts": OVERSIZED}


def memory(server: Server, requests: int = REQUESTS) -> dict[str, Any]:
    """MB before, at the peak and after the bad requests."""
    kinds = bad_requests()
    names = list(kinds)

    def one(i: int) -> tuple[str, int]:
        name = names[i % len(names)]
        return name, server.post(*kinds[name])

    for i in range(WARM):
        one(i)
    before = server.memory("VmRSS")
    with ThreadPoolExecutor(CLIENTS) as pool:
        heard = Counter(f"{name}: {status}" for name, status in pool.map(one, range(requests)))
    time.sleep(3)
    found = {"before_mb": before, "peak_mb": server.memory("VmHWM"), "after_mb": server.memory("VmRSS")}
    return {**found, "growth_mb": found["after_mb"] - before, "requests": requests, "clients": CLIENTS, "heard": heard}


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["both", "starve", "memory"], nargs="?", default="both")
    parser.add_argument("--tokenizer", type=Path, help="a directory with a tokenizer")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="bad ones, of the second measurement")
    parser.add_argument("--note", default="", help="what else the machine did, for the log")
    parser.add_argument("--out", type=Path, help="write the log there")
    arguments = parser.parse_args()
    if arguments.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    else:
        docs = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
        tokenizer = train_bpe([path.read_text(encoding="utf-8") for path in docs], 8192)
    results: dict[str, Any] = {"vocabulary": len(tokenizer)}
    with tempfile.TemporaryDirectory() as work:
        build(Path(work) / "model", tokenizer)
        for what in ("starve", "memory") if arguments.what == "both" else (arguments.what,):
            server = Server(Path(work) / "model")
            try:
                results[what] = starve(server) if what == "starve" else memory(server, arguments.requests)
            finally:
                server.stop()
            print(json.dumps({what: results[what]}, indent=1), flush=True)
    if arguments.out is not None:
        log = {"provenance": vars(provenance()), "note": arguments.note, "results": results}
        arguments.out.write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()

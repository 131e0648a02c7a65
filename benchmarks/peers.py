"""`fathom serve` beside other engines on one model: one client, eight clients, a long prompt, the same prompt again.

    python benchmarks/peers.py MODEL --gguf f32=FILE Q8_0=FILE --vllm .venv-vllm/bin/python --before CHECKOUT --out FILE
    python benchmarks/peers.py random --to DIR --tokenizer DIR           # Qwen3, 8 layers of 512, 49 M parameters
    python benchmarks/peers.py quantize FILE.gguf --to OTHER.gguf        # Q8_0

All engines are started first, each in a process of its own, and asked in turn over HTTP for greedy text, with prompts
of random tokens; the order of the engines is reversed in every turn, and the first turn does not count. Seconds are of
the clock, and of the processor for the engine's processes. transformers is asked without HTTP. CHECKOUT is an older
Fathom. A server that waits while others start and answer may be slower than the same one started last, by a tenth (the
kernel takes pages that nobody reads). With `--abba` only this Fathom and the older one are asked, A B B A; halfway both
are started anew, in the other order.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fathom.report.files import write_json
from fathom.report.provenance import provenance

TOKENS, CLIENTS = 64, 8
SHORT, MIDDLE, LONG = 16, 32, 512
"""Tokens of a prompt: of one client, of each of eight, and of a long one."""
TICK = os.sysconf("SC_CLK_TCK")
FATHOM, THREADS = "fathom", "PEERS_THREADS"
"""Fathom's name, and the variable that says how many threads an engine has."""


@dataclass
class Engine:
    """A server, or transformers behind a pipe."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ends: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    """What a request says so that it gets all its tokens."""
    threads: int = 2

    def start(self, port: int, log: Path) -> None:
        """Start it, and wait until it answers."""
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", THREADS)}
        self.port = port
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [word.replace("PORT", str(port)) for word in self.command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE if self.piped else out, stderr=out, text=True,
                env={**os.environ, **threads, **self.environment}, start_new_session=True,
            )  # fmt: skip
        began = time.perf_counter()
        while not self.piped and not self.answers():
            if self.process.poll() is not None or time.perf_counter() - began > 900:
                raise SystemExit(f"{self.name} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)

    @property
    def piped(self) -> bool:
        """Whether it reads requests from standard input."""
        return self.name.startswith("transformers")

    def answers(self) -> bool:
        """Whether it gives a token."""
        try:
            return bool(self.post([5, 6, 7], 1))
        except (OSError, http.client.HTTPException, KeyError):
            return False

    def post(self, prompt: list[int], tokens: int) -> str:
        """The text after a prompt."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "model": "model", **self.ends}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer["choices"][0]["text"]

    def ask(self, prompts: list[list[int]], tokens: int) -> list[str]:
        """The texts after prompts, asked for at once."""
        if self.piped:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.write(json.dumps([prompts, tokens]) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.post(prompt, tokens), prompts))

    def worked(self) -> float:
        """Seconds of the processor that its processes took."""
        seconds = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == self.process.pid:
                seconds += (int(fields[11]) + int(fields[12])) / TICK
        return seconds

    def stop(self) -> None:
        """End it and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 15)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, 9)


def engines(options: argparse.Namespace) -> list[Engine]:
    """Those that the command names."""
    serve = [sys.executable, "-m", "fathom", "serve", str(options.model), "--device", "cpu", "--port", "PORT"]
    serve += ["--name", "model"]
    found = [Engine(FATHOM, serve), Engine("fathom --layout plain", [*serve, "--layout", "plain"])]
    found.append(Engine("fathom --weights int8", [*serve, "--weights", "int8"]))
    if options.before:
        older = {"PYTHONPATH": str(options.before / "src")}
        ends = {"ignore_eos": True} if options.before_ignores else {}
        found.append(Engine(f"fathom at {options.before.name}", serve, older, ends))
    if options.abba:
        return [found[0], found[-1]]
    found.append(Engine("transformers, no HTTP", [sys.executable, __file__, "generate", str(options.model)]))
    for name, _, file in (word.partition("=") for word in options.gguf):
        found.append(Engine(f"llama.cpp {name}", [sys.executable, __file__, "llama", file, "--port", "PORT"]))
    if options.vllm:
        words = [str(options.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
        words += ["--served-model-name", "model", "--dtype", "float32", "--port", "PORT", "--max-model-len", "1024"]
        kept = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": ""}
        found.append(Engine("vLLM", words, kept))
    return found


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def random_prompts(seed: int, count: int, length: int, size: int) -> list[list[int]]:
    """Tokens that no turn shares."""
    import numpy as np

    return np.random.default_rng(seed).integers(100, size, (count, length)).tolist()


def timed(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[dict[str, float], list[str]]:
    """Seconds of the clock and of the processor, and the texts."""
    began, before = time.perf_counter(), engine.worked()
    texts = engine.ask(prompts, tokens)
    return {"seconds": time.perf_counter() - began, "processor": engine.worked() - before}, texts


def turn(engine: Engine, seed: int, size: int) -> dict[str, tuple[dict[str, float], list[str]]]:
    """Every question, once."""
    long = random_prompts(seed, 1, LONG, size)
    return {
        "one client": timed(engine, random_prompts(seed + 1, 1, SHORT, size), TOKENS),
        "eight clients": timed(engine, random_prompts(seed + 2, CLIENTS, MIDDLE, size), TOKENS),
        "long prompt": timed(engine, long, 1),
        "the same again": timed(engine, long, 1),
    }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All turns of all engines."""
    size = min(json.loads((options.model / "config.json").read_text())["vocab_size"], 49_000)
    every = [replace(one, threads=options.threads) for one in engines(options)]
    every = [one for one in every if not options.only or one.name in (FATHOM, *options.only)]
    runs: dict[str, dict[str, list[dict[str, float]]]] = {engine.name: {} for engine in every}
    texts: dict[str, list[str]] = {engine.name: [] for engine in every}
    try:
        for engine in every:
            print(f"starting {engine.name}", flush=True)
            engine.start(
                free_port(), options.out.with_suffix(f".{engine.name.replace(' ', '-').replace('/', '-')}.log")
            )
        for number in range(options.turns + 1):
            for engine in every if number % 2 else reversed(every):
                for question, (cost, said) in turn(engine, 10 * number, size).items():
                    if number:
                        runs[engine.name].setdefault(question, []).append(cost)
                        texts[engine.name] += said if "client" in question else []
            print(f"turn {number} of {options.turns}, load {os.getloadavg()[0]:.1f}", flush=True)
    finally:
        for engine in every:
            engine.stop()
    same = {name: sum(map(str.__eq__, said, texts[FATHOM])) for name, said in texts.items()}
    return {
        "threads": options.threads,
        "runs": runs,
        "ratios": ratios(runs),
        "texts": len(texts[FATHOM]),
        "equal to fathom's": same,
    }


def ratios(runs: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Fathom's seconds over another's in the same turn, by question: median and quartiles; above 1 Fathom is slower."""
    found: dict[str, Any] = {}
    for name, questions in runs.items():
        for question, costs in questions.items():
            for unit in ("seconds", "processor"):
                pairs = zip(runs[FATHOM][question], costs, strict=True)
                each = sorted(ours[unit] / max(theirs[unit], 1 / TICK) for ours, theirs in pairs)
                entry = found.setdefault(name, {}).setdefault(question, {})
                entry[unit] = [round(each[int(q * (len(each) - 1) + 0.5)], 3) for q in (0.25, 0.5, 0.75)]
                entry[f"median {unit}"] = round(statistics.median(cost[unit] for cost in costs), 4)
    again = {name: statistics.median(c["seconds"] for c in q["the same again"]) for name, q in runs.items()}
    first = {name: statistics.median(c["seconds"] for c in q["long prompt"]) for name, q in runs.items()}
    return found | {"the same again / first": {name: round(again[name] / first[name], 4) for name in again}}


def abba(options: argparse.Namespace) -> dict[str, Any]:
    """This Fathom's seconds over the older one's, turn by turn, after starts in both orders."""
    size = min(json.loads((options.model / "config.json").read_text())["vocab_size"], 49_000)
    pair = [replace(engine, threads=options.threads) for engine in engines(options)]
    ours, older = pair
    turns: list[dict[str, dict[str, dict[str, float]]]] = []
    for first in pair:
        both = (first, older if first is ours else ours)
        try:
            for engine in both:
                engine.start(free_port(), options.out.with_suffix(".log"))
            for number in range(options.turns + 1):
                asked = {}
                for engine in pair if number % 2 else reversed(pair):
                    asked[engine.name] = turn(engine, 10 * len(turns) + 10 if number else 0, size)
                if number:
                    turns.append({q: {name: asked[name][q][0] for name in asked} for q in asked[ours.name]})
                print(f"turn {number} of {options.turns}, load {os.getloadavg()[0]:.1f}", flush=True)
        finally:
            for engine in both:
                engine.stop()
    ratios = {
        question: {
            unit: middle(
                [
                    max(one[question][ours.name][unit], 1 / TICK) / max(one[question][older.name][unit], 1 / TICK)
                    for one in turns
                ]
            )
            for unit in ("seconds", "processor")
        }
        for question in turns[0]
    }
    return {"order": "both started twice, each once first; in turn A B B A", "turns": turns, "this / older": ratios}


def middle(ratios: list[float]) -> dict[str, Any]:
    """The median, its 95 % interval by ranks, and the quartiles."""
    ordered, count = sorted(ratios), len(ratios)
    rank = max(0, int(count / 2 - 0.98 * count**0.5))
    low, median, high = (round(q, 3) for q in statistics.quantiles(ordered, n=4))
    return {
        "median": median,
        "interval": [round(ordered[rank], 3), round(ordered[-1 - rank], 3)],
        "quartiles": [low, high],
    }


def generate(options: argparse.Namespace) -> None:
    """transformers' `generate`: prompts by line, texts by line; all rows of a line in one batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(int(os.environ[THREADS]))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        rows = torch.tensor(prompts)
        made = model.generate(
            rows, attention_mask=torch.ones_like(rows), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        print(json.dumps(tokenizer.batch_decode(made[:, rows.shape[1] :])), flush=True)


def llama(options: argparse.Namespace) -> None:
    """llama.cpp's server, as xllamacpp builds it."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(options.model), 1024 * CLIENTS, CLIENTS
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = int(os.environ[THREADS])
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.port, settings.verbosity = options.port, 0
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


def random(options: argparse.Namespace) -> None:
    """A random Qwen3 with a tokenizer's vocabulary, in its own family."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, "initializer_range": 0.2}
    shape |= {"vocab_size": len(tokenizer), "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None}
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(options.to)
    tokenizer.save_pretrained(options.to)


def quantize(options: argparse.Namespace) -> None:
    """Matrices of a float32 GGUF file in Q8_0; everything else as it is."""
    import gguf

    reader = gguf.GGUFReader(options.model)
    writer = gguf.GGUFWriter(options.to, reader.fields["general.architecture"].contents())
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, value in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            of = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], of)
    for tensor in reader.tensors:
        if len(tensor.shape) == 2 and tensor.shape[0] % 32 == 0:
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Measure, or do what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works: dict[str, Callable[[argparse.Namespace], None]] = {
        "generate": generate, "llama": llama, "random": random, "quantize": quantize,
    }  # fmt: skip
    work = works.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if work is not random:
        parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--vllm", type=Path, help="the Python of vLLM's environment")
    parser.add_argument("--before", type=Path, help="a checkout of an older Fathom, by whose name it is called")
    parser.add_argument("--before-ignores", action="store_true", help="that Fathom knows ignore_eos")
    parser.add_argument("--abba", action="store_true", help="this Fathom and the older one, each alone")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--only", nargs="*", metavar="ENGINE", help="beside fathom, these")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(sys.argv[2:] if work else None)
    if work:
        work(options)
        return
    measure = abba if options.abba else compare
    write_json(options.out, {"provenance": vars(provenance()), **measure(options)})


if __name__ == "__main__":
    main()

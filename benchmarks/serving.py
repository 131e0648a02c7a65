"""What `fathom serve` makes of several clients: tokens per second, work per token, time to the first token.

    python benchmarks/serving.py                                      # 25M parameters, random; minutes on two cores
    python benchmarks/serving.py --mechanism adaponder --device cuda  # any mechanism, any device

Takes turns A B B A: one client, several clients, the same prompts offline one by one (`generate`) and at once
(`generate_batch`, where transformers' engine can run the model). Greedy; prompts are token ids. Answers of all are
compared. On a CPU also clients that ask for whole answers in place of streams, clients of a server with plain weights,
and `generate_batch` of a model that was packed. Then many clients at once: errors, and how long each waits for its
first token. Seconds are of the clock and of the processor; on a machine that others use, look at the latter and at
ratios, which are medians over turns. Last, what can be had at all: the bare matrix products of the model's own weights,
as they are served, for one row, for several and for prompts, in turns. They are what eight clients cannot save; the log
has the sum.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

from fathom.checkpoints.export import export
from fathom.checkpoints.open import open_checkpoint
from fathom.inference.packed import PackedLinear, pack
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import parse_mechanism
from fathom.report.provenance import provenance

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
TICK = os.sysconf("SC_CLK_TCK")
Prompts = Sequence[Sequence[int]]
Way = tuple[Callable[[], list[list[int]]], Callable[[], float]]
"""Makes texts; tells seconds of the processor that does."""


def build(mechanism: str, directory: Path) -> FathomForCausalLM:
    """A random model, exported with a tokenizer of numbered words."""
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**{**SHAPE, **parse_mechanism(mechanism)})).eval()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SHAPE["vocab_size"])}, unk_token="w0"))  # type: ignore[arg-type]
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    export(model, directory, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0"))
    return model


def processor(pid: int) -> float:
    """Seconds that a process has worked."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


class Server:
    """`fathom serve` in a process of its own."""

    def __init__(self, directory: Path, device: str, *more: str) -> None:
        command = [sys.executable, "-m", "fathom", "serve", str(directory), "--port", "0", "--device", device, *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.rsplit(":", 1)[1].split("/")[0])

    def ask(self, prompt: Sequence[int], tokens: int, stream: bool = True) -> dict[str, Any]:
        """A text, and when it and its first token came."""
        body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": stream, "logprobs": 0}
        began, first, made = time.perf_counter(), None, []
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        for raw in response:
            line = raw.decode().strip().removeprefix("data: ")
            if line.startswith("{"):
                chunk = json.loads(line)
                first = first or time.perf_counter() - began
                for choice in chunk.get("choices", ()):
                    made += (choice["logprobs"] or {}).get("tokens", ())
        connection.close()
        ids = [int(word[1:]) for word in made]
        return {"status": response.status, "ids": ids, "first": first, "whole": time.perf_counter() - began}

    def many(self, prompts: Prompts, tokens: int, stream: bool = True) -> list[dict[str, Any]]:
        """All of them at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, tokens, stream), prompts))

    def ways(self, prompts: Prompts, tokens: int, name: str = "", stream: bool = True) -> dict[str, Way]:
        """One client and several, by a name."""

        def one() -> list[list[int]]:
            return [self.ask(prompt, tokens, stream)["ids"] for prompt in prompts]

        def several() -> list[list[int]]:
            return [answer["ids"] for answer in self.many(prompts, tokens, stream)]

        worked = partial(processor, self.process.pid)
        return {f"one client{name}": (one, worked), f"clients{name}": (several, worked)}

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(60)


class Offline:
    """A model in a process of its own, which only one way uses: there OpenMP has no workers but those of that way.

    With more workers than cores, such as those of two threads, it would let them sleep between two products.
    """

    model: FathomForCausalLM

    def __init__(self, directory: Path, device: str, packs: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=self.open, initargs=(directory, device, packs))
        self.pid = self.pool.submit(os.getpid).result()

    @classmethod
    def open(cls, directory: Path, device: str, packs: bool) -> None:
        """Open the model, in that process; pack it in a thread that ends, and its workers with it."""
        cls.model = open_checkpoint(directory, device)[0]
        cls.model.generation_config.eos_token_id = None
        if packs:
            thread = threading.Thread(target=pack, args=(cls.model,))
            thread.start()
            thread.join()

    @classmethod
    def one_by_one(cls, prompts: Prompts, tokens: int) -> list[list[int]]:
        """With `generate`."""
        rows = [torch.tensor([list(prompt)], device=cls.model.device) for prompt in prompts]
        return [
            cls.model.generate(row, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0, row.shape[1] :].tolist()
            for row in rows
        ]

    @classmethod
    def at_once(cls, prompts: Prompts, tokens: int) -> list[list[int]]:
        """With transformers' continuous batching."""
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        pages = ContinuousBatchingConfig(page_size=32, num_blocks=256, max_batch_tokens=512)
        found = cls.model.generate_batch([list(p) for p in prompts], config, pages, progress_bar=False)
        return [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]

    def way(self, work: Callable[[Prompts, int], list[list[int]]], prompts: Prompts, tokens: int) -> Way:
        """One of these two, done there."""
        return lambda: self.pool.submit(work, prompts, tokens).result(), partial(processor, self.pid)

    def stop(self) -> None:
        """End the process."""
        self.pool.shutdown()


def timed(work: Callable[[], list[list[int]]], seconds: Callable[[], float]) -> dict[str, Any]:
    """Tokens made, and seconds of clock and processor."""
    began, before = time.perf_counter(), seconds()
    made = work()
    return {"made": made, "seconds": time.perf_counter() - began, "processor": seconds() - before}


@torch.inference_mode()
def products(layers: Sequence[nn.Module], rows: Sequence[int]) -> dict[int, float]:
    """Milliseconds of processor for the products of all of these, by number of rows: the least of ten, in turns."""
    device = layers[0].weight.device
    inputs = {(n, x.in_features): torch.randn(n, x.in_features, device=device) for n in rows for x in layers}
    least = dict.fromkeys(rows, float("inf"))
    for n in [*rows, *reversed(rows)] * 5:
        began = time.process_time()
        for layer in layers:
            layer(inputs[n, layer.in_features])
        if device.type == "cuda":
            torch.cuda.synchronize()
        least[n] = min(least[n], time.process_time() - began)
    return {n: 1000 * seconds for n, seconds in least.items()}


def ceiling(model: FathomForCausalLM, prompt: int, tokens: int, clients: int, work: dict[str, float]) -> dict[str, Any]:
    """What is left to gain for several clients: the matrix products of their rows are work that nothing else saves.

    Every trip of a pondering model passes the head too. Prompts are read in one call, and only their last tokens pass
    it; the rest of what a text costs may at best be free.

    Args:
        model: Its layers, as they are served.
        prompt: Tokens of each prompt.
        tokens: New tokens of each text.
        clients: How many.
        work: Measured milliseconds of processor for a token, by way.
    """
    layers = {name: one for name, one in model.named_modules() if isinstance(one, (nn.Linear, PackedLinear))}
    trips = model.model.served_trips
    step = products([*layers.values()], [1, clients, 2 * clients])
    read = products([layer for name, layer in layers.items() if name != "lm_head"], [prompt, clients * prompt])
    floor = {n: trips * (read[n * prompt] + (tokens - 1) * step[n]) / (n * tokens) for n in (1, clients)}
    one, several, ratio = work["one client"], work["clients"], step[clients] / step[1]
    words = (
        f"{clients} rows cost {ratio:.2f} times one, so products alone gain {floor[1] / floor[clients]:.1f} times.",
        f"A token costs one client {one:.1f} ms, each of several {several:.2f}, of it products {floor[clients]:.2f}.",
        f"To gain 5 times, all else may take {one / 5 - floor[clients]:.2f}; it takes {several - floor[clients]:.2f}.",
    )
    return {
        "step_ms": step,
        "prompts_ms": read,
        "several_rows_by_one": ratio,
        "products_ms_per_token": floor,
        "products_alone": floor[1] / floor[clients],
        "all_else_free": one / floor[clients],
        "in_words": " ".join(words),
    }


def ratios(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Medians over turns of one way's seconds by another's, which the machine's pace of the moment does not change."""

    def by(way: str, other: str) -> float:
        pairs = zip(found[way], found[other], strict=True)
        return statistics.median(one["seconds"] / two["seconds"] for one, two in pairs)

    pairs = {"one client to generate": ("one client", "generate")}
    pairs |= {
        f"one client to clients{x}": (f"one client{x}", f"clients{x}") for x in ("", ", whole answers", ", plain")
    }
    pairs |= {f"{way}, plain, to packed": (f"{way}, plain", way) for way in ("one client", "clients")}
    pairs |= {f"{way} to clients": (way, "clients") for way in ("generate_batch", "generate_batch, packed")}
    return {name: by(*pair) for name, pair in pairs.items() if set(pair) <= set(found)}


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything, for one mechanism."""
    directory, device = work / "model", arguments.device
    model = build(arguments.mechanism, directory).to(device)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 8192, (32,), generator=generator).tolist() for _ in range(arguments.many)]
    several, tokens, cpu = prompts[: arguments.clients], arguments.tokens, device == "cpu"
    servers = [
        Server(directory, device, *words) for words in (["--layout", "packed"], ["--layout", "plain"])[: 1 + cpu]
    ]
    others = [Offline(directory, device)]
    ways = servers[0].ways(several, tokens) | {"generate": others[0].way(Offline.one_by_one, several, tokens)}
    batched = {"generate_batch": False} | ({"generate_batch, packed": True} if cpu else {})
    for name, packs in batched.items() if not model.model.slotted else ():
        others.append(Offline(directory, device, packs))
        ways[name] = others[-1].way(Offline.at_once, several, tokens)
    if cpu:
        ways |= servers[0].ways(several, tokens, ", whole answers", stream=False)
        ways |= servers[1].ways(several, tokens, ", plain")
    try:
        for once, _ in ways.values():  # what is made once
            once()
        turns = [*ways, *reversed(ways)] * arguments.repeats
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for name in turns:
            found[name].append(timed(*ways[name]))
        answers = {name: [run.pop("made") for run in runs] for name, runs in found.items()}
        right = answers["generate"][0]
        crowd = servers[0].many(prompts, tokens)
    finally:
        for process in (*servers, *others):
            process.stop()
    parameters = sum(p.numel() for p in model.parameters())
    pack(model)
    made = len(several) * tokens
    speed = {name: made / min(run["seconds"] for run in runs) for name, runs in found.items()}
    work_of = {name: min(run["processor"] for run in runs) / made for name, runs in found.items()}
    waits = sorted(one["first"] or one["whole"] for one in crowd)
    return {
        "mechanism": arguments.mechanism,
        "parameters": parameters,
        "clients": len(several),
        "new_tokens": tokens,
        "threads": torch.get_num_threads(),
        "identical": {name: all(run == right for run in runs) for name, runs in answers.items()},
        "tokens_per_second": speed,
        "processor_ms_per_token": {name: 1000 * value for name, value in work_of.items()},
        "ratios": ratios(found),
        "clients_to_one": {
            "clock": speed["clients"] / speed["one client"],
            "work": work_of["one client"] / work_of["clients"],
        },
        "ceiling": ceiling(model, len(prompts[0]), tokens, len(several), {k: 1000 * v for k, v in work_of.items()}),
        "crowd": {
            "clients": len(crowd),
            "errors": sum(one["status"] != 200 or len(one["ids"]) != tokens for one in crowd),
            "first_token_p50": statistics.median(waits),
            "first_token_p95": waits[int(0.95 * (len(waits) - 1))],
        },
        "runs": found,
    }


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mechanism", nargs="+", default=["vanilla"], help="one or several (default: vanilla)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--many", type=int, default=64, help="clients of the last measurement (default: 64)")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each answer (default: 24)")
    parser.add_argument("--repeats", type=int, default=2, help="turns A B B A (default: 2)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--note", default="", help="what else the machine did, for the log")
    parser.add_argument("--out", type=Path, help="write the log there")
    arguments = parser.parse_args()
    results = []
    for mechanism in arguments.mechanism:
        with tempfile.TemporaryDirectory() as work:
            results.append(measure(argparse.Namespace(**{**vars(arguments), "mechanism": mechanism}), Path(work)))
        print(json.dumps({key: value for key, value in results[-1].items() if key != "runs"}, indent=1), flush=True)
        if arguments.out is not None:  # after each, since the next may take long
            log = {"provenance": vars(provenance()), "note": arguments.note, "results": results}
            arguments.out.write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What `fathom serve` makes of several clients: tokens per second, work per token, time to the first token.

    python benchmarks/serving.py                                      # 25M parameters, random; minutes on two cores
    python benchmarks/serving.py --mechanism adaponder --device cuda  # any mechanism, any device

Takes turns A B B A: one client, several clients, the same prompts offline one by one (`generate`) and at once
(`generate_batch`, where transformers' engine can run the model). Greedy; prompts are token ids. Answers of all four are
compared. Then many clients at once: errors, and how long each waits for its first token. Seconds are of the clock and
of the processor; on a machine that others use, look at the latter and at ratios. Last, what can be had at all: the bare
matrix products of the model's own weights, for one row, for several and for prompts, in turns. They are what eight
clients cannot save; the log has the sum.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

from fathom.checkpoints.export import export
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


def build(mechanism: str, directory: Path) -> FathomForCausalLM:
    """A random model, exported with a tokenizer of numbered words."""
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**{**SHAPE, **parse_mechanism(mechanism)})).eval()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SHAPE["vocab_size"])}, unk_token="w0"))  # type: ignore[arg-type]
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    export(model, directory, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0"))
    return model


class Server:
    """`fathom serve` in a process of its own."""

    def __init__(self, directory: Path, device: str) -> None:
        command = [sys.executable, "-m", "fathom", "serve", str(directory), "--port", "0", "--device", device]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.rsplit(":", 1)[1].split("/")[0])

    def processor(self) -> float:
        """Seconds that it has worked."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def ask(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """A text, and when it and its first token came."""
        body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True, "logprobs": 0}
        began, first, made = time.perf_counter(), None, []
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        for raw in response:
            line = raw.decode().strip()
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                first = first or time.perf_counter() - began
                for choice in chunk.get("choices", ()):
                    made += (choice["logprobs"] or {}).get("tokens", ())
        connection.close()
        ids = [int(word[1:]) for word in made]
        return {"status": response.status, "ids": ids, "first": first, "whole": time.perf_counter() - began}

    def many(self, prompts: Prompts, tokens: int) -> list[dict[str, Any]]:
        """All of them at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, tokens), prompts))


def timed(work: Callable[[], list[list[int]]], processor: Callable[[], float]) -> dict[str, Any]:
    """Tokens made, and seconds of clock and processor."""
    began, before = time.perf_counter(), processor()
    made = work()
    return {"made": made, "seconds": time.perf_counter() - began, "processor": processor() - before}


def offline(model: FathomForCausalLM, prompts: Prompts, tokens: int) -> list[list[int]]:
    """One by one with `generate`."""
    rows = [torch.tensor([list(prompt)], device=model.device) for prompt in prompts]
    return [
        model.generate(row, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0, row.shape[1] :].tolist()
        for row in rows
    ]


def at_once(model: FathomForCausalLM, prompts: Prompts, tokens: int) -> list[list[int]]:
    """With transformers' continuous batching."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(page_size=32, num_blocks=256, max_batch_tokens=512)
    found = model.generate_batch([list(p) for p in prompts], config, pages, progress_bar=False)
    return [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]


@torch.no_grad()
def products(weights: Sequence[torch.Tensor], rows: Sequence[int]) -> dict[int, float]:
    """Milliseconds of processor for the products with all of these, by number of rows: the least of ten, in turns."""
    inputs = {(n, w.shape[1]): torch.randn(n, w.shape[1], device=w.device) for n in rows for w in weights}
    least = dict.fromkeys(rows, float("inf"))
    for n in [*rows, *reversed(rows)] * 5:
        began = time.process_time()
        for weight in weights:
            torch.nn.functional.linear(inputs[n, weight.shape[1]], weight)
        if weights[0].is_cuda:
            torch.cuda.synchronize()
        least[n] = min(least[n], time.process_time() - began)
    return {n: 1000 * seconds for n, seconds in least.items()}


def ceiling(model: FathomForCausalLM, prompt: int, tokens: int, clients: int, work: dict[str, float]) -> dict[str, Any]:
    """What is left to gain for several clients: the matrix products of their rows are work that nothing else saves.

    Every trip of a pondering model passes the head too. Prompts are read in one call, and only their last tokens pass
    it; the rest of what a text costs may at best be free.

    Args:
        model: Its weights.
        prompt: Tokens of each prompt.
        tokens: New tokens of each text.
        clients: How many.
        work: Measured milliseconds of processor for a token, by way.
    """
    linear = {name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    trips = model.model.served_trips
    step = products([*linear.values()], [1, clients, 2 * clients])
    read = products([weight for name, weight in linear.items() if name != "lm_head"], [prompt, clients * prompt])
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


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything, for one mechanism."""
    model = build(arguments.mechanism, work / "model").to(arguments.device)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 8192, (32,), generator=generator).tolist() for _ in range(arguments.many)]
    several, tokens = prompts[: arguments.clients], arguments.tokens
    server = Server(work / "model", arguments.device)
    ways = {
        "one client": (lambda: [server.ask(p, tokens)["ids"] for p in several], server.processor),
        "clients": (lambda: [one["ids"] for one in server.many(several, tokens)], server.processor),
        "generate": (lambda: offline(model, several, tokens), time.process_time),
    }
    if not model.model.slotted:
        ways["generate_batch"] = (lambda: at_once(model, several, tokens), time.process_time)
    try:
        server.many(several, 2), offline(model, several[:1], 2)  # what is made once
        turns = [*ways, *reversed(ways)] * arguments.repeats
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for name in turns:
            found[name].append(timed(*ways[name]))
        answers = {name: [run.pop("made") for run in runs] for name, runs in found.items()}
        right = answers["generate"][0]
        crowd = server.many(prompts, tokens)
    finally:
        server.process.terminate()
        server.process.wait(60)
    made = len(several) * tokens
    speed = {name: made / min(run["seconds"] for run in runs) for name, runs in found.items()}
    work_of = {name: min(run["processor"] for run in runs) / made for name, runs in found.items()}
    waits = sorted(one["first"] or one["whole"] for one in crowd)
    return {
        "mechanism": arguments.mechanism,
        "parameters": sum(p.numel() for p in model.parameters()),
        "clients": len(several),
        "new_tokens": tokens,
        "threads": torch.get_num_threads(),
        "identical": {name: all(run == right for run in runs) for name, runs in answers.items()},
        "tokens_per_second": speed,
        "processor_ms_per_token": {name: 1000 * value for name, value in work_of.items()},
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
            log = {"provenance": provenance(), "note": arguments.note, "results": results}
            arguments.out.write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()

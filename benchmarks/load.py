"""Whether `fathom serve` answers under load as it answers alone, and stays well under bad requests.

    python benchmarks/load.py --out benchmarks/results/load.json

`mixed`: for four mechanisms and a hosted mixture of experts with a loop, in float32 and in int8, 100 requests of twelve
kinds: text, chats and responses, whole or streamed, greedy or drawn with a seed, some with a long prefix that others
share, with several answers, tools or a JSON schema. Each is asked alone and then by 16 clients at once, of one server
with a prefix cache. Then some clients read slowly and some leave in the middle. The texts are compared; of a client
that left, what it read. Afterwards nothing may run, wait or hold a cache.

`bad`: clients send 1,000 bad requests in parallel, while `/health` is asked in turn. The server's memory is read
before, at its peak and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from fathom.checkpoints.export import export
from fathom.checkpoints.families import hosted
from fathom.data.tokenizer import train_bpe
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import parse_mechanism
from fathom.report.files import write_json
from fathom.report.provenance import provenance
from overload import JSON_HEAD, Server, bad_requests

HOSTED = "qwen3_moe, loop"
MODELS = ("depth_attention", "loop", "adaponder", "latent_cot", HOSTED)
CLIENTS = 16
SLOW, LEFT = "slow", "left"
"""Clients that read their stream slowly, and that leave in the middle of it."""
GAUGES = "texts_running", "texts_waiting", "cache_bytes"
"""What is 0 when nobody asks."""
BAD, BAD_CLIENTS = 1000, 64
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048, "initializer_range": 0.2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}assistant:"""
TOOL = {
    "type": "function",
    "function": {
        "name": "sound",
        "description": "The depth at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["harbour", "reef"]}, "fathoms": {"type": "integer", "maximum": 9}},
            "required": ["place", "fathoms"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "deep": {"type": "boolean"},
        "names": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["deep", "names"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
WORDS = [
    "depth",
    "river",
    "ice",
    "winter",
    "layers",
    "above",
    "hold",
    "back",
    "how",
    "long",
    "tells",
    "under",
    "the",
    "of",
]


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Bodies; those with `messages` are chats, those with `input` are of the Responses API."""
    draw = random.Random(0)
    prefixes = [" ".join(draw.choices(WORDS, k=150)) for _ in range(3)]
    flat = {"type": "function", **TOOL["function"], "strict": False}
    made = []
    for i in range(count):
        text = " ".join(draw.choices(WORDS, k=draw.randint(3, 40)))
        chat = {"messages": [{"role": "user", "content": text}]}
        shared = [{"role": "system", "content": draw.choice(prefixes)}, *chat["messages"]]
        few = {"max_tokens": draw.randint(8, 48), "seed": i}
        kinds: list[dict[str, Any]] = [
            {"prompt": text, **few},
            {"prompt": f"{draw.choice(prefixes)} {text}", **few},
            {**chat, "top_p": 0.9, **few},
            {"messages": shared, **few},
            {**chat, **few, "tools": [TOOL], "tool_choice": "required", "max_tokens": 160},
            {"messages": shared, "tools": [TOOL], "tool_choice": "auto", **few},
            {**chat, **few, "response_format": FORMAT, "max_tokens": 120},
            {"prompt": text, "stop": ["river"], "frequency_penalty": 0.5, **few},
            {"prompt": [text, text[::-1]], "n": 2, **few},
            {"input": shared, "seed": i, "max_output_tokens": few["max_tokens"]},
            {"input": text, "seed": i, "tools": [flat], "tool_choice": "required", "max_output_tokens": 160},
            {"input": text, "seed": i, "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        ]
        made.append({"temperature": draw.choice([0, 0.8, 1.2]), "stream": i % 3 == 0, **kinds[i % len(kinds)]})
    return made


def said(port: int, body: dict[str, Any], manner: str = "") -> tuple[int, list[list[Any]]]:
    """Status, and of each answer its text, calls' names and arguments, and why it ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    path = "chat/completions" if "messages" in body else "responses" if "input" in body else "completions"
    try:
        connection.request(
            "POST", f"/v1/{path}", json.dumps(body | {"stream": bool(manner) or body["stream"]}), JSON_HEAD
        )
        response = connection.getresponse()
        if not manner:
            raw = response.read().decode()
        else:
            pieces = []
            while piece := response.read1(100):
                pieces.append(piece)
                if manner == LEFT and len(pieces) > 8:
                    break
                time.sleep(0.01)
            raw = b"".join(pieces).decode(errors="ignore")
        if response.status != 200:
            return response.status, [[raw[:200]]]
        whole = not (manner or body["stream"])
        if path == "responses":
            return 200, [response_parts(json.loads(raw)) if whole else response_together(raw)]
        return 200, [parts(one, "message") for one in json.loads(raw)["choices"]] if whole else together(raw)
    finally:
        connection.close()


def parts(choice: dict[str, Any], key: str) -> list[Any]:
    """Text, name and arguments of calls, and why it ended."""
    inner = choice.get(key) or {}
    calls = [call["function"] for call in inner.get("tool_calls") or []]
    text = choice.get("text", inner.get("content")) or ""
    names, arguments = ("".join(call.get(part) or "" for call in calls) for part in ("name", "arguments"))
    return [text, names, arguments, choice["finish_reason"]]


def events(raw: str) -> list[dict[str, Any]]:
    """The whole events of a stream."""
    found = []
    for line in raw.splitlines():
        if line.startswith("data: {"):
            with contextlib.suppress(ValueError):  # the last one that a client read before it left
                found.append(json.loads(line[6:]))
    return found


def together(raw: str) -> list[list[Any]]:
    """The same of a stream."""
    found: dict[int, list[Any]] = {}
    for event in events(raw):
        for choice in event.get("choices", []):
            old, new = found.get(choice["index"], ["", "", "", None]), parts(choice, "delta")
            found[choice["index"]] = [*(a + b for a, b in zip(old[:3], new[:3], strict=True)), new[3] or old[3]]
    return [found.get(i, ["", "", "", None]) for i in range(max(found, default=-1) + 1)]


def response_parts(answer: dict[str, Any]) -> list[Any]:
    """The same of the Responses API."""
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    text = "".join(one["text"] for item in answer["output"] for one in item.get("content", []))
    return [text, *("".join(call[part] for call in calls) for part in ("name", "arguments")), answer["status"]]


def response_together(raw: str) -> list[Any]:
    """The same of a stream."""
    found: list[Any] = ["", "", "", None]
    for event in events(raw):
        kind = event["type"]
        found[0] += event["delta"] if kind == "response.output_text.delta" else ""
        found[1] += event["item"].get("name", "") if kind == "response.output_item.added" else ""
        found[2] += event["delta"] if kind == "response.function_call_arguments.delta" else ""
        found[3] = event["response"]["status"] if kind in ("response.completed", "response.incomplete") else found[3]
    return found


def alike(one: tuple[int, list[list[Any]]], other: tuple[int, list[list[Any]]], manner: str) -> bool:
    """Whether an answer is the one alone; of a client that left, as much as it read."""
    if manner != LEFT:
        return one == other
    pairs = zip(one[1], other[1], strict=False)
    return one[0] == other[0] and all(a[i].startswith(b[i]) for a, b in pairs for i in range(3))


def gauges(server: Server) -> dict[str, float]:
    """What runs, waits and is held, once that is nothing or ten seconds have passed."""
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/metrics")
        lines = [line.split() for line in connection.getresponse().read().decode().splitlines()]
        connection.close()
        values = {line[0].removeprefix("fathom_"): float(line[1]) for line in lines if len(line) == 2}
        if not any(values[name] for name in GAUGES):
            break
        time.sleep(0.1)
    names = ("texts_finished_total", "texts_cancelled_total", "texts_failed_total", "prefix_hits_total")
    return {name: values[name] for name in (*GAUGES, *names)}


def mixed(server: Server, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """How many requests are answered alike alone and in company."""
    alone = [said(server.port, body) for body in requests]
    manners = [{5: SLOW, 8: LEFT}.get(i % 10, "") for i in range(len(requests))]
    with ThreadPoolExecutor(CLIENTS) as pool:
        crowd = list(pool.map(lambda asked: said(server.port, *asked), zip(requests, manners, strict=True)))
    differ = [
        {"request": {key: value for key, value in body.items() if key != "tools"}, "alone": one, "in_company": other}
        for body, one, other, manner in zip(requests, alone, crowd, manners, strict=True)
        if not alike(one, other, manner)
    ]
    ends = Counter(str(text[-1]) for status, texts in alone for text in texts if status == 200)
    ends.update(f"status {status}" for status, _ in alone if status != 200)
    same = len(requests) - len(differ)
    return {
        "requests": len(requests), "clients": CLIENTS, "manners": Counter(manners), "same": same, "differ": differ,
        "ends": ends, "afterwards": gauges(server),
    }  # fmt: skip


def bad(server: Server) -> dict[str, Any]:
    """Memory and the longest wait for `/health` while bad requests come."""
    kinds = bad_requests()
    names, waits, over = list(kinds), [], threading.Event()

    def watch() -> None:
        while not over.is_set():
            began = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("GET", "/health")
            connection.getresponse().read()
            waits.append(time.perf_counter() - began)
            time.sleep(0.05)

    for name in names:  # each kind once: what is imported and compiled at first is no growth
        server.post(*kinds[name])
    before = server.memory("VmRSS")
    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(BAD_CLIENTS) as pool:
        heard = Counter(pool.map(lambda i: server.post(*kinds[names[i % len(names)]]), range(BAD)))
    over.set()
    watcher.join()
    time.sleep(3)
    waits.sort()
    memory = {"before_mb": before, "peak_mb": server.memory("VmHWM"), "after_mb": server.memory("VmRSS")}
    health = {"worst": waits[-1], "p99": waits[int(len(waits) * 0.99)], "median": waits[len(waits) // 2]}
    statuses = {str(status): count for status, count in heard.items()}
    asked = {"requests": BAD, "clients": BAD_CLIENTS, "health_requests": len(waits)}
    growth = memory["after_mb"] - before
    return {**asked, **memory, "growth_mb": growth, "statuses": statuses, "health_seconds": health}


def configured(name: str, size: int) -> FathomConfig:
    """A small model of a mechanism, or of a hosted family with one."""
    if name != HOSTED:
        return FathomConfig(vocab_size=size, **SHAPE, **parse_mechanism(name))
    family = AutoConfig.for_model("qwen3_moe", vocab_size=size, **SHAPE, **EXPERTS)
    values = hosted.configuration(family.to_dict() | {"model_type": "qwen3_moe"})
    return FathomConfig(**values, recurrence="loop", recurrence_options={"trips": 2})


def with_server(directory: Path, work: Callable[[Server], dict[str, Any]], *options: str) -> dict[str, Any]:
    """Start a server, measure, stop it."""
    server = Server(directory, *options)
    try:
        return work(server)
    finally:
        server.stop()


def main() -> None:
    """Measure, print, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="of each model (default: 100)")
    parser.add_argument("--only", choices=["mixed", "bad"])
    parser.add_argument("--weights", nargs="+", default=["float32", "int8"], choices=["float32", "int8"])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    docs = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    tokenizer = train_bpe([path.read_text(encoding="utf-8") for path in docs], 2048)
    tokenizer.chat_template = TEMPLATE
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for name in options.models:
            torch.manual_seed(0)
            config = configured(name, len(tokenizer))
            export(FathomForCausalLM(config).eval(), Path(work) / name, tokenizer)
        if options.only != "bad":
            requests = mixed_requests(options.requests)
            for name in options.models:
                for weights in options.weights:
                    more = ["--weights", "int8"] if weights == "int8" else []
                    more += ["--layout", "plain"]  # named: a measurement would refuse eight bits for so small a model
                    found = with_server(Path(work) / name, lambda server: mixed(server, requests), *more)
                    results[f"{name}, {weights}"] = found
                    same = f"{found['same']} of {found['requests']} alike"
                    print(f"{name}, {weights}: {same}, {dict(found['ends'])}, {found['afterwards']}", flush=True)
                    write(options.out, results)
        if options.only != "mixed":
            results["bad"] = with_server(Path(work) / options.models[0], bad)
            print(json.dumps(results["bad"]))
            write(options.out, results)


def write(out: Path | None, results: dict[str, Any]) -> None:
    """The log so far."""
    if out is not None:
        write_json(out, {"provenance": vars(provenance()), "load": os.getloadavg()[0], "results": results})


if __name__ == "__main__":
    main()

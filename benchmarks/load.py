"""Whether `fathom serve` answers under load as it answers alone, and stays well under bad requests.

    python benchmarks/load.py --out benchmarks/results/load.json

`mixed`: for each mechanism, in float32 and in int8, requests of eight kinds: text and chats, streamed or whole, greedy
or drawn with a seed, some with a long prefix that others share, some with tools or a JSON schema. Each is asked alone
and then by many clients at once, of one server with a prefix cache. The texts are compared.

`bad`: clients send 1,000 bad requests in parallel, while `/health` is asked in turn. The server's memory is read
before, at its peak and at the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
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

from fathom.checkpoints.export import export
from fathom.data.tokenizer import train_bpe
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import parse_mechanism
from fathom.report.provenance import provenance
from overload import JSON_HEAD, Server, bad_requests

MECHANISMS = ("vanilla", "depth_attention", "loop", "adaponder", "latent_cot")
CLIENTS = 16
BAD, BAD_CLIENTS = 1000, 64
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048, "initializer_range": 0.2}
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
    """Bodies; those with `messages` are chats."""
    draw = random.Random(0)
    prefixes = [" ".join(draw.choices(WORDS, k=150)) for _ in range(3)]
    made = []
    for i in range(count):
        text = " ".join(draw.choices(WORDS, k=draw.randint(3, 40)))
        chat = {"messages": [{"role": "user", "content": text}]}
        shared = [{"role": "system", "content": draw.choice(prefixes)}, *chat["messages"]]
        kinds: list[dict[str, Any]] = [
            {"prompt": text},
            {"prompt": f"{draw.choice(prefixes)} {text}"},
            {**chat, "top_p": 0.9},
            {"messages": shared},
            {**chat, "tools": [TOOL], "tool_choice": "required", "max_tokens": 160},
            {"messages": shared, "tools": [TOOL], "tool_choice": "auto"},
            {**chat, "response_format": FORMAT, "max_tokens": 120},
            {"prompt": text, "stop": ["river"], "frequency_penalty": 0.5},
        ]
        body = {"max_tokens": draw.randint(8, 48), "temperature": draw.choice([0, 0.8, 1.2]), "seed": i}
        made.append({**body, "stream": i % 3 == 0, **kinds[i % len(kinds)]})
    return made


def said(port: int, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """Status, and what was said: texts, calls' names and arguments, and why it ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        connection.request("POST", route, json.dumps(body), JSON_HEAD)
        response = connection.getresponse()
        raw = response.read().decode()
        if response.status != 200:
            return response.status, [raw[:200]]
        return 200, together(raw) if body["stream"] else parts(json.loads(raw)["choices"][0], "message")
    finally:
        connection.close()


def parts(choice: dict[str, Any], key: str) -> list[Any]:
    """Text, name and arguments of calls, and why it ended."""
    inner = choice.get(key) or {}
    calls = [call["function"] for call in inner.get("tool_calls") or []]
    text = choice.get("text", inner.get("content")) or ""
    names, arguments = ("".join(call.get(part) or "" for call in calls) for part in ("name", "arguments"))
    return [text, names, arguments, choice["finish_reason"]]


def together(raw: str) -> list[Any]:
    """The same of a stream."""
    found: list[Any] = ["", "", "", None]
    for line in raw.splitlines():
        if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
            text, names, arguments, why = parts(choices[0], "delta")
            found = [found[0] + text, found[1] + names, found[2] + arguments, why or found[3]]
    return found


def mixed(server: Server, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """How many requests are answered alike alone and in company."""
    alone = [said(server.port, body) for body in requests]
    with ThreadPoolExecutor(CLIENTS) as pool:
        crowd = list(pool.map(lambda body: said(server.port, body), requests))
    differ = [
        {"request": {key: value for key, value in body.items() if key != "tools"}, "alone": one, "in_company": other}
        for body, one, other in zip(requests, alone, crowd, strict=True)
        if one != other
    ]
    ends = Counter(str(one[1][-1]) if one[0] == 200 else f"status {one[0]}" for one in alone)
    same = len(requests) - len(differ)
    return {"requests": len(requests), "clients": CLIENTS, "same": same, "differ": differ, "ends": ends}


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
    parser.add_argument("--requests", type=int, default=60, help="of each model (default: 60)")
    parser.add_argument("--only", choices=["mixed", "bad"])
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    docs = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    tokenizer = train_bpe([path.read_text(encoding="utf-8") for path in docs], 2048)
    tokenizer.chat_template = TEMPLATE
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for name in options.mechanisms:
            torch.manual_seed(0)
            config = FathomConfig(vocab_size=len(tokenizer), **SHAPE, **parse_mechanism(name))
            export(FathomForCausalLM(config).eval(), Path(work) / name, tokenizer)
        if options.only != "bad":
            requests = mixed_requests(options.requests)
            for name in options.mechanisms:
                for weights in ("float32", "int8"):
                    more = ["--weights", "int8"] if weights == "int8" else []
                    found = with_server(Path(work) / name, lambda server: mixed(server, requests), *more)
                    results[f"{name}, {weights}"] = found
                    alike = f"{found['same']} of {found['requests']} alike"
                    print(f"{name}, {weights}: {alike}, {dict(found['ends'])}", flush=True)
        if options.only != "mixed":
            results["bad"] = with_server(Path(work) / options.mechanisms[0], bad)
            print(json.dumps(results["bad"]))
    if options.out is not None:
        options.out.write_text(json.dumps({"provenance": vars(provenance()), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

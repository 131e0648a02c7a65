"""What one client's attacks on `fathom serve` cost another client: its longest wait for a token, here and before.

    python benchmarks/attacks.py MODEL --before CHECKOUT --out benchmarks/results/attacks.json

The server has one thread for its products; one that an attack leaves slow or swollen is replaced. Beside the attack a
second client asks for one token of a short prompt, again and again. The table has its longest wait, alone and beside
the attack; the most processor seconds that the server's process took during one of these waits, which is the wait on a
free core; and the processor seconds of the attack, helpers included. CHECKOUT is an older Fathom. Two servers have a
planted fault that the measurement must see: one reads prompts as they come, the other calls a dead engine alive.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fathom.report.files import write_json
from fathom.report.provenance import provenance
from overload import JSON_HEAD, Server, bad_requests

TICK, PAUSE, PATIENCE = os.sysconf("SC_CLK_TCK"), 0.02, 120.0
"""The system's clock tick; seconds between two questions of the second client, and until an attacker gives up."""
ALONE, LIE = 10, 20.0
"""Questions that are asked before the attack; seconds for which a server that lies is watched."""
BAD, CLIENTS = 1000, 64
GRAMMARS, TEXTS, SWOLLEN, MOST = 100, 4, 100, 4000
"""Hostile grammars, the texts of each; MB by which a server may grow before it is replaced, and before it is killed."""
LONG, WAITING = 800, 4
"""Tokens of a long prompt, and long prompts at once."""
FIRST_COME = """
import sys, fathom.inference.engine as engine
from fathom.cli.main import main
engine.in_order, engine.interrupts = lambda jobs, first=False: list(jobs), lambda *of: False
sys.exit(main(sys.argv[1:]))
"""
"""A server that reads prompts in the order in which they came."""
DEAD = """
import sys, fathom.inference.engine as engine, fathom.inference.launch as launch
from fathom.cli.main import main
make_room = engine.Engine._make_room
def fail(self, *given):
    raise MemoryError
engine.Engine._drop_cancelled = lambda self: fail(self) if self.waiting else None
if "LYING" in sys.argv:
    sys.argv.remove("LYING")
    engine.Engine.alive, launch._Server.on_tick = True, launch.uvicorn.Server.on_tick
sys.exit(main(sys.argv[1:]))
"""
"""A server whose engine dies with its first request; LYING, it does not say so."""

Attack = Callable[["Watched"], Counter[str]]
"""Attacks a server; counts the answers by status."""


class Watched(Server):
    """A server whose processor time is read, helpers included."""

    def worked(self) -> float:
        """Processor seconds of the server, its children and theirs."""
        every = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has ended
                continue
            every[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICK
        family = {self.process.pid}
        for _ in range(3):
            family |= {pid for pid, (parent, _) in every.items() if parent in family}
        return sum(every[pid][1] for pid in family if pid in every)

    def send(self, route: str, body: object, seconds: float = PATIENCE) -> tuple[int, bytes]:
        """Status and answer; 0 where none came in time."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("POST", route, json.dumps(body), JSON_HEAD)
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def used(self) -> float:
        """Processor seconds of the server's own threads."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(one.read_text().split()[0]) for one in threads) / 1e9

    def wait(self) -> tuple[float, float]:
        """How long one token of a short prompt takes: seconds, and processor seconds of the server meanwhile."""
        began, before = time.perf_counter(), self.used()
        self.send("/v1/completions", {"prompt": "the depth of a river", "max_tokens": 1}, 2 * PATIENCE)
        return time.perf_counter() - began, self.used() - before

    def settle(self) -> None:
        """Wait until nothing happens: weights move into huge pages after the start."""
        for _ in range(60):
            before = self.used()
            time.sleep(2)
            if self.used() - before < 0.02:
                return

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()

    def grown(self, field: str, since: float) -> float:
        """MB of memory that it has taken since; of one that is killed, as many as it may take."""
        return self.memory(field) - since if self.process.poll() is None else MOST


def once(route: str, **body: object) -> Attack:
    """One request."""
    return lambda server: Counter([str(server.send(route, body)[0])])


def pattern(regex: str, n: int = 1) -> Attack:
    """A request whose texts follow a pattern."""
    body = {"prompt": "x", "max_tokens": 8, "n": n, "structured_outputs": {"regex": regex}}
    return once("/v1/completions", **body)


def schema(made: object) -> Attack:
    """A request whose text follows a schema."""
    return once("/v1/completions", prompt="x", max_tokens=8, structured_outputs={"json": made})


def long_prompts(server: Watched) -> Counter[str]:
    """A text that runs, and prompts of 800 tokens at once."""
    bodies = [{"prompt": [5] * 4, "max_tokens": 400, "ignore_eos": True}]
    bodies += [{"prompt": [100 + i, *range(1000, 1000 + LONG)], "max_tokens": 2} for i in range(WAITING)]
    return at_once(server, [("/v1/completions", body) for body in bodies])


def lens(words: int) -> Attack:
    """A text for the lens."""
    return once("/lens/data", text="the depth of a river " * (words // 5))


def bad(server: Watched) -> Counter[str]:
    """1,000 bad requests by 64 clients."""
    kinds = list(bad_requests().values())
    with ThreadPoolExecutor(CLIENTS) as pool:
        return Counter(str(status) for status in pool.map(lambda i: server.post(*kinds[i % len(kinds)]), range(BAD)))


def lists(count: int) -> Attack:
    """1,000 bodies full of empty lists, three bytes for each, by 64 clients."""
    body = b'{"prompt":[' + b"[]," * count + b"[]]}"

    def attack(server: Watched) -> Counter[str]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            heard = pool.map(lambda _: server.post("/v1/completions", body), range(BAD))
            return Counter(str(status) for status in heard)

    return attack


def grammars(server: Watched) -> Counter[str]:
    """A hundred hostile grammars of five kinds, each for four texts."""
    asked = [
        {"prompt": "x", "max_tokens": 4, "n": TEXTS, "temperature": 1, "structured_outputs": hostile(i)}
        for i in range(GRAMMARS)
    ]
    return Counter(str(server.send("/v1/completions", body)[0]) for body in asked)


def hostile(i: int) -> dict[str, object]:
    """A grammar that takes much time or memory."""
    many = {f"p{j}_{i}": {"type": "integer"} for j in range(5000)}
    kinds: list[dict[str, object]] = [
        {"regex": f"(a{{1000}}){{1000}}z{i}"},
        {"json": {"type": "object", "properties": many}},
        {"json": {"allOf": [{"type": "string", "pattern": f"a{{{j}}}"} for j in range(1, 30 + i % 7)]}},
        {"regex": rf"(\w|\s)*[aeiou](\w|\s){{{24 + i}}}z"},
        {"grammar": f"start: x x x x x x x x\nx: y* z*\ny: /[a-z]/ | y y\nz: /[a-z{i % 10}]/ | z z z |"},
    ]
    return kinds[i % len(kinds)]


def at_once(server: Watched, asked: Sequence[tuple[str, object]]) -> Counter[str]:
    """Requests at the same time."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return Counter(str(status) for status, _ in pool.map(lambda one: server.send(*one), asked))


ATTACKS: dict[str, Attack] = {
    "64 texts without a pattern": once("/v1/completions", prompt="x", max_tokens=8, n=64),
    "a pattern of 54 bytes, n=64": pattern("(a{1000}){1000}z2", 64),
    "a pattern of 54 bytes": pattern("(a{1000}){1000}z3"),
    "a schema of 5,000 properties": schema(
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}
    ),
    "a schema of sixty patterns": schema({"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, 60)]}),
    "four prompts of 800 tokens": long_prompts,
    "400 words for the lens": lens(400),
    "600 words for the lens": lens(600),
    "1,000 bad requests": bad,
    "1,000 bodies of empty lists": lists(21_700),
    "1,000 bodies of 15 kB": lists(5_000),
    "100 hostile grammars": grammars,
}


def measured(server: Watched, attack: Attack) -> dict[str, Any]:
    """What an attack costs."""
    alone = [server.wait() for _ in range(ALONE)]
    before, resident = server.worked(), server.memory("VmRSS")
    waits, over = list[tuple[float, float]](), threading.Event()

    def beside() -> None:
        while not over.is_set():
            waits.append(server.wait())
            time.sleep(PAUSE)

    def guard() -> None:
        while not over.wait(0.5):
            if server.grown("VmRSS", resident) >= MOST:
                server.kill()

    second = threading.Thread(target=beside)
    began = time.perf_counter()
    second.start()
    threading.Thread(target=guard).start()
    time.sleep(PAUSE)
    statuses = attack(server)
    seconds = time.perf_counter() - began
    over.set()
    second.join()
    time.sleep(1)
    seconds_of, processor_of = ([one[i] for one in waits] for i in (0, 1))
    return {
        "alone": [max(one[i] for one in alone) for i in (0, 1)],
        "beside": [max(seconds_of), max(processor_of)],
        "median beside": [statistics.median(seconds_of), statistics.median(processor_of)],
        "questions": len(waits),
        "seconds": seconds,
        "processor": server.worked() - before,
        "memory_mb": server.grown("VmRSS", resident),
        "peak_mb": server.grown("VmHWM", resident),
        "statuses": statuses,
        "load": os.getloadavg()[0],
    }


def attacked(model: Path, source: Path, program: str, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The attacks, on one server as long as it stays well."""
    server: Watched | None = None
    try:
        for name in names:
            if server is None:
                server = Watched(model, "--lens", source=source, program=program)
                server.send("/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "a"}})
                server.settle()
            found = measured(server, ATTACKS[name])
            yield name, found
            if server.process.poll() is not None or found["statuses"]["0"] or found["memory_mb"] > SWOLLEN:
                server.kill()
                server = None
    finally:
        if server is not None:
            server.kill()


def dead(model: Path, *lying: str) -> dict[str, Any]:
    """What `/health` says, and how the process ends, after the engine has died."""
    server = Watched(model, *lying, program=DEAD)
    try:
        asked, health = server.send("/v1/completions", {"prompt": "x", "max_tokens": 1}, 60)[0], None
        until = time.monotonic() + (LIE if lying else PATIENCE)
        while server.process.poll() is None and time.monotonic() < until:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            try:
                connection.request("GET", "/health")
                health = health or connection.getresponse().status
            except OSError:
                pass  # it closes its door before it ends
            time.sleep(0.2)
        return {"request": asked, "health": health, "exit": server.process.poll()}
    finally:
        server.kill()


def main() -> None:
    """Measure, print the table, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--before", type=Path, help="a checkout of an older Fathom")
    parser.add_argument("--only", nargs="+", default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="`here`, `before`, and those with a planted fault")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    here = Path(__file__).parents[1]
    results: dict[str, Any] = {}
    servers: dict[str, tuple[Path, str]] = {"here": (here, "")}
    if options.before:
        servers["before"] = options.before, ""
    servers["first come, first served"] = here, FIRST_COME
    print(f"{'attack':30} {'server':24} {'alone':>6} {'beside':>7} {'CPU s':>6} {'attack':>7} {'MB':>6}  answers, load")
    for which, (source, program) in servers.items():
        if which not in (options.servers or servers):
            continue
        names = [name for name in options.only if not program or ATTACKS[name] is long_prompts]
        for name, found in attacked(options.model, source, program, names):
            results.setdefault(name, {})[which] = found
            numbers = f"{found['alone'][0]:6.2f} {found['beside'][0]:7.2f} {found['beside'][1]:6.2f}"
            numbers += f" {found['processor']:7.1f} {found['memory_mb']:6.0f}"
            print(f"{name:30} {which:24} {numbers}  {dict(found['statuses'])}, {found['load']:.1f}", flush=True)
            write(options.out, results)
    for which, lying in (("the engine died", ()), ("and is called alive", ("LYING",))):
        if which not in (options.servers or [which]):
            continue
        results[which] = dead(options.model, *lying)
        print(f"{which}: {results[which]}", flush=True)
    write(options.out, results)


def write(out: Path | None, results: dict[str, Any]) -> None:
    """The log so far."""
    if out is not None:
        write_json(out, {"provenance": vars(provenance()), "results": results})


if __name__ == "__main__":
    main()

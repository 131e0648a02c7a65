"""This checkout's speed against another commit's, in ratios of interleaved runs.

    python benchmarks/against.py 1156794                                  # a decoded token and a training step
    python benchmarks/against.py 1156794 --mechanism ponder2 --work decode --pairs 80

Each side is a process with its own source, the same weights and the same tokens. The two take turns A B B A; the ratio
is this checkout's processor time over the other's, pair by pair, and its median and quartiles are printed. Processes
are started anew `--restarts` times, since where a process lies in memory shifts its speed by a hundredth.
With `--control` both sides are the other commit, and the ratio's distance from 1 is what the measurement cannot see.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
FAMILIES = {"qwen3": SHAPE, "llama": SHAPE | {"qk_norm": "none"}}
MECHANISMS = ("vanilla", "depth_attention", "hyper_connections", "attention_residuals", "loop", "ponder2", "latent_cot")
WORK = ("decode", "step")
PROMPT, TOKENS, BATCH, LENGTH = 32, 24, 4, 128


def work(name: str, kind: str, family: str) -> Callable[[], None]:
    """What one side does in one turn."""
    import torch

    from fathom.models import FathomConfig, FathomForCausalLM
    from fathom.models.registry import parse_mechanism

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**FAMILIES[family], **parse_mechanism(name)))
    ids = torch.randint(0, SHAPE["vocab_size"], (BATCH, LENGTH))
    if kind == "step":
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

        def step() -> None:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    model.eval()

    @torch.inference_mode()
    def decode() -> None:
        cache = model(ids[:1, :PROMPT], use_cache=True).past_key_values
        start = time.process_time()
        for t in range(PROMPT, PROMPT + TOKENS):
            model(ids[:1, t : t + 1], past_key_values=cache, use_cache=True)
        decode.seconds = time.process_time() - start  # type: ignore[attr-defined]  # the prompt is not timed

    return decode


def serve(name: str, kind: str, family: str) -> None:
    """One side: a turn for every line of standard input."""
    turn = work(name, kind, family)
    for _ in range(3):
        turn()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        turn()
        print(getattr(turn, "seconds", time.process_time() - start), flush=True)


def side(source: Path, *what: str) -> subprocess.Popen[str]:
    """A process with the source of one side, ready to take turns."""
    command = [sys.executable, str(HERE), "--serve", *what]
    environment = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert one.stdout is not None
    if one.stdout.readline().strip() != "ready":
        raise SystemExit(f"{source} cannot run {what[0]}")
    return one


def seconds(one: subprocess.Popen[str]) -> float:
    """Of one turn."""
    assert one.stdin is not None and one.stdout is not None
    one.stdin.write("\n")
    one.stdin.flush()
    return float(one.stdout.readline())


def compare(sources: list[Path], what: tuple[str, str, str], pairs: int, restarts: int) -> dict[str, object]:
    """Ratios of the first source to the second, with an interval of their median over the processes' restarts."""
    rounds: list[list[float]] = []
    for restart in range(restarts):
        first = restart % 2  # neither side always starts first
        begun = [side(sources[(first + i) % 2], *what) for i in range(2)]
        ours, theirs = begun[first], begun[1 - first]
        ratios: list[float] = []
        for _ in range(max(1, pairs // (2 * restarts))):
            a, b, c, d = seconds(ours), seconds(theirs), seconds(theirs), seconds(ours)
            ratios += [a / b, d / c]
        for one in (ours, theirs):
            one.communicate()
        rounds.append(ratios)
    drawn = random.Random(0)
    medians = sorted(median(chain(*drawn.choices(rounds, k=restarts))) for _ in range(2000))
    every = sorted(chain(*rounds))
    return {
        **dict(zip(("mechanism", "work", "family"), what, strict=True)),
        "ratio": round(median(every), 4),
        "interval": [round(medians[50], 4), round(medians[1949], 4)],
        "quartiles": [round(every[len(every) // 4], 3), round(every[3 * len(every) // 4], 3)],
        "pairs": len(every),
        "restarts": restarts,
    }


def main() -> None:
    """Compare, print one line each."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:5])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--mechanism", nargs="+", default=MECHANISMS)
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=["qwen3"])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--control", action="store_true", help="compare the commit with itself")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", given.commit, "src"], cwd=HERE.parents[1], capture_output=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        other = Path(folder, "src")
        ours = other if given.control else HERE.parents[1] / "src"
        for what in product(given.mechanism, given.work, given.family):
            print(json.dumps(compare([ours, other], what, given.pairs, given.restarts)), flush=True)


if __name__ == "__main__":
    main()

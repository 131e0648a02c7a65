"""Every arm by which the papers argue, in random cases of its own, against the numpy oracles of the tests.

    python benchmarks/oracle_arms.py --cases 500 --minutes 9 --log benchmarks/results/oracle-arms.json

The arms of models are counted in the seeds of `tests/models/test_oracle.py` from 24,000 on; `python -m
tests.models.test_oracle SEED` runs one again. FreqKV's arms have seeds of their own: a model, a schedule, and a text
that is read in chunks through the cache.

A case counts for an arm if the arm acts in it, its arithmetic is float64, and no threshold lies so near that rounding
decides. The command resumes from its log, and stops after `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from tests.kvcache.cases import cached, double_angles, model_of, tokens
from tests.kvcache.oracle import Oracle
from tests.models.test_oracle import PAPERS, Case, draw, trips_of

from fathom.kvcache import build_cache
from fathom.report.provenance import provenance
from oracle import run_case

LIMIT = 1e-11
CACHES = ("freqkv_high", "freqkv_unscaled", "freqkv_after_rope")
ARMS = (
    *("mixes=key", "mixes=both", "feed=projected", "feed=pause"),
    *("halting=shared", "halting=uniform", "halting=geometric", "router=mlp"),
)
EVERY = 25
"""Cases between two writes of the log."""


def arms_of(case: Case) -> list[str]:
    """The arms that act in a case: several trips are made, and λ is not 0."""
    mixer, recurrence = case.config["mixer_options"], case.config["recurrence_options"]
    trips = trips_of(case.config) if case.budget is None else case.budget
    found = [f"mixes={mixer['mixes']}"] if mixer.get("mixes", "value") != "value" and mixer.get("blend") != 0.0 else []
    if trips > 1 and recurrence.get("blend") != 0.0:
        chosen = [f"{key}={recurrence.get(key)}" for key in ("feed", "halting", "router")]
        found += [arm for arm in chosen if arm in ARMS]
    if recurrence.get("halting") in ("uniform", "geometric") and recurrence["kept"] == 1:
        found = [arm for arm in found if not arm.startswith("halting")]  # no token halts
    return found


def wanted(counts: dict[str, int], first: int, cases: int) -> Iterator[tuple[int, list[str]]]:
    """Seeds of which some arm needs more cases."""
    seed = first
    while any(counts[arm] < cases for arm in ARMS):
        case = draw(seed)
        arms = [arm for arm in arms_of(case) if counts[arm] < cases]
        if arms and case.precision != "eager":  # its softmax is float32
            yield seed, arms
        seed += 1


@torch.no_grad()
def run_cache(arm: str, seed: int) -> float:
    """A random model and schedule: how far logits through the cache are from the oracle's."""
    rng = random.Random(f"{arm} {seed}")
    window, sinks = rng.randint(12, 64), rng.randint(0, 4)
    kept = rng.randint(2, window - sinks - 4)
    heads, kv_heads = rng.choice(((4, 1), (4, 2), (4, 4), (2, 1), (2, 2)))
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": rng.choice((1, 2, 3))}
    shape |= {"head_dim": rng.choice((4, 8, 16)), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = model_of("fathom", torch.float64, seed, **shape)
    ids = tokens(1, rng.randint(window + 1, 3 * window), seed=seed)
    cache = build_cache(model, arm, window=window, sinks=sinks, kept=kept)
    found = cached(model, ids, cache, rng.choice((None, 1, 5)) if len(ids[0]) < 80 else None)[0]
    expected = Oracle(model, arm, window, sinks, kept)(ids[0].numpy())
    return float((found - torch.from_numpy(expected)).abs().max())


def read(log: Path) -> dict[str, Any]:
    """The log so far."""
    if log.exists():
        found: dict[str, Any] = json.loads(log.read_text(encoding="utf-8"))
        return found
    arms = {arm: {"cases": 0, "worst": 0.0} for arm in (*ARMS, *CACHES)}
    return {**vars(provenance()), "limit": LIMIT, "arms": arms, "next_seed": PAPERS, "seconds": 0.0, "set_aside": []}


def count(row: dict[str, Any], worst: float) -> None:
    """One more case."""
    row["cases"], row["worst"] = row["cases"] + 1, max(row["worst"], worst)


def steps(log: dict[str, Any], cases: int) -> Iterator[None]:
    """Run the cases that are missing, one a step."""
    counts = {arm: log["arms"][arm]["cases"] for arm in ARMS}
    for seed, arms in wanted(counts, log["next_seed"], cases):
        found = run_case(seed)
        if "error" in found or found["undecided"] or found["deviation"] > LIMIT:
            log["set_aside"].append({"arms": arms} | found)
        else:
            for arm in arms:
                count(log["arms"][arm], found["deviation"])
                counts[arm] += 1
        log["next_seed"] = seed + 1
        yield
    with pytest.MonkeyPatch.context() as patch:
        double_angles(patch)
        for arm in CACHES:
            for seed in range(log["arms"][arm]["cases"], cases):
                count(log["arms"][arm], run_cache(arm, seed))
                yield


def main() -> int:
    """Run what the log lacks; 1 if a case deviates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="of each arm")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so long")
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    log, start = read(options.log), time.monotonic()
    before = log["seconds"]
    warnings.simplefilter("ignore", UserWarning)  # that nothing was tuned, or follows a schedule
    for number, _ in enumerate(steps(log, options.cases)):
        log["seconds"] = round(before + time.monotonic() - start, 1)
        late = time.monotonic() - start > 60 * options.minutes
        if late or number % EVERY == 0:
            options.log.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
        if late:
            break
    options.log.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    wrong = [case for case in log["set_aside"] if not case.get("undecided") and not case.get("right")]
    print(json.dumps({"arms": log["arms"], "set_aside": len(log["set_aside"]), "wrong": wrong}, indent=1))
    return int(bool(wrong) or any(log["arms"][arm]["worst"] > LIMIT for arm in CACHES))


if __name__ == "__main__":
    raise SystemExit(main())

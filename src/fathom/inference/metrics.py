"""`GET /metrics`: what the engine counted, in the format of Prometheus.

`server.py` has the route. `answers.py` reports the tokens of one answer (`usage_of`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fathom.inference.histogram import value

if TYPE_CHECKING:
    from fathom.inference.engine import Engine

COUNTERS = {
    "prompt_tokens_total": ("prompt_tokens", "Tokens of prompts that were read."),
    "generation_tokens_total": ("tokens", "Tokens that were generated."),
    "steps_total": ("steps", "Forward passes that made a token for every running sequence."),
    "texts_finished_total": ("finished", "Sequences that ended with stop or length."),
    "texts_cancelled_total": ("cancelled", "Sequences whose client left or whose deadline passed."),
    "texts_failed_total": ("failed", "Sequences that ended with an error."),
    "drafted_tokens_total": ("drafted", "Tokens that were drafted."),
    "accepted_tokens_total": ("accepted", "Drafted tokens that were accepted."),
    "requests_refused_total": ("refused", "Requests that the engine did not take."),
    "prefix_hits_total": ("hits", "Prompts whose beginning was in the prefix cache."),
    "prefix_tokens_total": ("cached", "Tokens of prompts that were found in the prefix cache."),
}
"""The engine's name of each metric, and its help."""
TIMES = {
    "first_token_seconds": ("first", "Seconds from a request's submission to its first token."),
    "inter_token_seconds": ("between", "Seconds between two tokens of a sequence."),
    "queue_seconds": ("queue", "Seconds from a request's submission until its prompt is read."),
}
"""The engine's name of each histogram, and its help."""


def exposition(engine: Engine) -> str:
    """All metrics of an engine."""
    gauges = {
        "texts_running": (engine.running, "Sequences that generate."),
        "texts_waiting": (len(engine.waiting), "Sequences that wait for room."),
        "cache_bytes": (engine.cache_bytes, "Bytes of keys and values."),
        "cache_budget_bytes": (engine.budget, "Most bytes of keys and values (--cache-memory)."),
        "prefix_bytes": (engine.prefixes.bytes, "Bytes of the prefix cache."),
        "prefix_budget_bytes": (engine.prefixes.budget, "Most bytes of the prefix cache (--prefix-memory)."),
        "engine_alive": (int(engine.alive), "1 while the engine works."),
    }
    lines: list[str] = []
    for name, (which, about) in COUNTERS.items():
        lines += value(f"fathom_{name}", "counter", about, engine.counts[which])
    for name, (number, about) in gauges.items():
        lines += value(f"fathom_{name}", "gauge", about, number)
    for name, (which, about) in TIMES.items():
        lines += engine.times[which].lines(f"fathom_{name}", about)
    return "\n".join([*lines, ""])

"""Is it the frequency? What four maps of equal rank keep of a model's keys and values, layer by layer.

    python benchmarks/kvcache_frequency.py MODEL --text NAME=FILE --out FILE.json [--window 512] [--windows 8]

`freqkv` keeps the lowest L frequencies of M entries, `average` the means of neighbours, `orthogonal` the mean and
random directions, and `learned` the L directions with most energy over half of the windows. Energy is measured on the
other half: the share of the variation around the mean, over entries, that lies in the row space of each map, of keys
without their rotation and of values. White noise would keep (L − 1) / (M − 1) in any of them.

`output` is the relative error of attention's output, of the queries of the next 32 tokens to the compressed window
and their own entries, beside methods that choose entries.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fathom.evaluation.perplexity import read_domains
from fathom.kvcache import METHODS, Schedule
from fathom.kvcache.average import Average
from fathom.kvcache.build import cache_of, config_of
from fathom.kvcache.cache import MemoryCache
from fathom.kvcache.freqkv import FreqKV
from fathom.kvcache.method import Held, Linear, Method
from fathom.kvcache.rope import Rope
from fathom.report.provenance import provenance

LINEAR = ("freqkv", "average", "orthogonal", "learned")
CHOOSING = ("drop", "snapkv", "tova", "expected_attention", "key_norm", "keydiff")
NEXT = 32


class Everything(Method):
    """Holds a window and all its queries."""

    name = "everything"

    def condense(self, held: Held) -> tuple[Tensor, Tensor]:
        """Never asked for."""
        raise AssertionError


class Given(Linear):
    """A matrix that is given."""

    name = "given"
    c: Tensor

    def reduce(self, x: Tensor) -> Tensor:
        """C x."""
        return self.c.to(x) @ x


def windows(model: Any, tokenizer: Any, text: str, size: int, number: int) -> Iterator[MemoryCache]:
    """Caches that hold a window and the next tokens' entries, with all queries."""
    config = config_of(model)
    found = 0
    for document in read_domains([text])[0].documents:
        ids = torch.tensor([tokenizer(str(document)[: 40 * size], add_special_tokens=False)["input_ids"]])
        for start in range(size, ids.shape[1] - size - NEXT, 4 * size):
            keeps = Everything(Schedule.at(size + NEXT, 4, 0.5), Rope(config))
            keeps.observed = size + NEXT
            cache = cache_of(keeps, config, model)
            with torch.no_grad():
                model(ids[:, start : start + size + NEXT], past_key_values=cache, logits_to_keep=1)
            yield cache
            found += 1
            if found == number:
                return


def basis(c: Tensor) -> Tensor:
    """Orthonormal rows that span the row space of a map, without the mean: `[L − 1, M]`."""
    m = c.shape[1]
    constant = torch.full((m, 1), m**-0.5, dtype=c.dtype)
    rows = c.T - constant @ (constant.T @ c.T)
    u, s, _ = torch.linalg.svd(rows, full_matrices=False)
    return u[:, s > 1e-9 * s[0]].T


def share(rows: Tensor, x: Tensor) -> float:
    """The share of the variation of `[…, M, D]` around its mean that lies in some directions."""
    varying = x - x.mean(-2, keepdim=True)
    return float((rows @ varying).square().sum() / varying.square().sum())


def measured(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the log says."""
    schedule = Schedule.at(options.window, 4, 0.5)
    kept, m = schedule.kept, schedule.compressed
    caches = list(windows(model, tokenizer, options.text, options.window, options.windows))
    rope = caches[0].method.rope
    layers = len(caches[0].layers)

    def bare(cache: MemoryCache, layer: int) -> tuple[Tensor, Tensor]:
        held = cache.layers[layer]
        keys, values = held.keys[:, :, : options.window], held.values[:, :, : options.window]
        return rope.plan[layer].turn(keys.double(), 0, -1)[:, :, 4:], values.double()[:, :, 4:]

    total = torch.zeros(m, m, dtype=torch.float64)
    for cache in caches[: len(caches) // 2]:
        for layer in range(layers):
            for x in bare(cache, layer):
                x = x - x.mean(-2, keepdim=True)
                x = (x / x.norm()).movedim(-2, 0).flatten(1)  # layers count alike
                total += x @ x.T
    best = torch.linalg.eigh(total).eigenvectors[:, -(kept - 1) :].T
    mean = torch.full((1, m), m**-0.5, dtype=torch.float64)
    maps = {
        "freqkv": FreqKV.build(kept, m),
        "average": Average.build(kept, m),
        "orthogonal": METHODS["orthogonal"](schedule, rope).reduce(torch.eye(m, dtype=torch.float64)[None, None])[0, 0],
    }
    # A learned map brings its directions into the order of time as the low-pass that is nearest to it would.
    u, _, v = torch.linalg.svd(maps["freqkv"] @ torch.cat([mean, best]).T)
    maps["learned"] = (kept / m) ** 0.5 * (u @ v) @ torch.cat([mean, best])
    rows = {name: basis(c) for name, c in maps.items()}
    found: dict[str, Any] = {"white": (kept - 1) / (m - 1), "keys": {}, "values": {}, "output": {}}
    test = caches[len(caches) // 2 :]
    for name, directions in rows.items():
        for i, kind in enumerate(("keys", "values")):
            found[kind][name] = [
                sum(share(directions, bare(cache, layer)[i]) for cache in test) / len(test) for layer in range(layers)
            ]
    for name in (*LINEAR, *CHOOSING):
        method = method_of(name, schedule, rope, maps)
        found["output"][name] = [
            sum(error(cache, layer, method, options.window) for cache in test) / len(test) for layer in range(layers)
        ]
        print(f"{name}: {sum(found['output'][name]) / layers:.3f}", flush=True)
    return found


def method_of(name: str, schedule: Schedule, rope: Rope, maps: dict[str, Tensor]) -> Method:
    """A method of the schedule; a linear one by its matrix."""
    if name not in maps:
        return METHODS[name](schedule, rope)
    method = Given(schedule, rope)
    method.c = maps[name]
    return method


def error(cache: MemoryCache, layer: int, method: Method, size: int) -> float:
    """‖output with the compressed window − with the whole one‖ / ‖with the whole one‖, of the next tokens' queries."""
    held = cache.layers[layer]
    queries, turn = held.queries, cache.method.rope.plan[layer]
    noted = method.note(None, queries[:, :, :size], 0, turn) if method.observed else None
    full = Held(held.keys[:, :, :size], held.values[:, :, :size], noted, turn)
    keys, values = method.compress(full, full.keys[:, :, :4], 0)
    now = held.keys[:, :, size:], held.values[:, :, size:]
    found = []
    for k, v in ((full.keys, full.values), (keys, values)):
        k, v = torch.cat([k, now[0]], 2), torch.cat([v, now[1]], 2)
        weights = Held(k, v, queries[:, :, size:], turn).attention()  # [B, H_kv, G, w, N]
        found.append(weights @ v.unsqueeze(2))
    return float((found[1] - found[0]).norm() / found[0].norm())


def table(found: dict[str, Any]) -> Iterator[str]:
    """Markdown: means over the first, middle and last third of the layers."""
    thirds = "first third | middle | last"
    yield f"| | keys: all layers | {thirds} | values: all | {thirds} | output error |"
    yield "| --- |" + " ---: |" * 9
    for name in (*LINEAR, *CHOOSING):
        cells = []
        for kind in ("keys", "values"):
            by_layer = found[kind].get(name)
            if by_layer is None:
                cells += [""] * 4
                continue
            third = len(by_layer) // 3
            parts = by_layer, by_layer[:third], by_layer[third:-third], by_layer[-third:]
            cells += [f"{sum(part) / len(part):.3f}" for part in parts]
        output = found["output"][name]
        yield f"| {name} | {' | '.join(cells)} | {sum(output) / len(output):.3f} |"
    yield f"| white noise | {found['white']:.3f} |" + " |" * 8


def main() -> None:
    """Measure, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", required=True, metavar="NAME=FILE")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="sdpa").eval()
    found = measured(model, AutoTokenizer.from_pretrained(options.model), options)
    options.out.write_text(
        json.dumps({**vars(provenance()), "window": options.window, **found}) + "\n", encoding="utf-8"
    )
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()

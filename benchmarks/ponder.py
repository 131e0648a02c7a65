"""Pondering: what halting saves in seconds and bytes, and how fast Jacobi rounds reach what decoding computes.

    python benchmarks/ponder.py decode                          # adaponder and latent_cot, trained here for a minute
    python benchmarks/ponder.py decode --checkpoint runs/NAME --corpus data/NAME
    python benchmarks/ponder.py jacobi --plot docs/pictures/jacobi.svg

Decoding takes turns A B B A in one process, on the same weights and the same held-out tokens, one token at a time. It
is held against three other ways: *forgotten* makes every trip of every token and forgets those of halted ones, so its
output is the same; *all trips* never halts (τ → 0); *random* halts as often after each trip, but anybody.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fathom.checkpoints.find import find_model
from fathom.corpus.prepare import prepare
from fathom.data.shards import TokenDataset
from fathom.experiments.timing import interleaved
from fathom.models import FathomForCausalLM
from fathom.recipe import load_recipe
from fathom.report.provenance import provenance
from fathom.training import train

RECIPES = Path(__file__).parent.parent / "recipes"
SMALL = ("model.num_hidden_layers=4", "train.tokens_per_step=512", "train.micro_batch=4", "evaluate.tokens=4096")
SMALLER = ("model.num_hidden_layers=2", "train.tokens_per_step=512", "data.sequence_length=64", "evaluate.tokens=4096")
HALTING = {
    "adaponder": {"penalty_span": "[0.2,0.6]", "penalty_fraction": 0.3, "tau": 1e-4},
    "latent_cot": {"penalty": 0.1, "tau": 1e-3},
}
"""Options of the models that are trained here; τ is set afterwards, to the mean trips that --trips asks for."""
SOLVED = {"ponder2, K = 1": ("ponder2", 1), "ponder2, K = 3": ("ponder2", 3), "ponder3, K = 3": ("ponder3", 3)}
PUBLISHED = {"ponder2, K = 1": 0.345, "ponder3, K = 3": 0.433}
"""Contraction per round of trained Pythia-410M and LLaMA-410M."""
FLOOR = 1e-11
"""Errors below are rounding, and belong to no fit."""


def trained(
    work: Path, name: str, steps: int, overrides: Sequence[str], options: Mapping[str, Any]
) -> FathomForCausalLM:
    """A recipe of `tiny`, smaller and shorter, on the demo's text; kept under `work`."""
    library = sysconfig.get_path("stdlib")
    texts = [f"{library}/*.py", *(f"{library}/{part}" for part in ("asyncio", "email", "json"))]
    prepare(texts, work / "data", train_tokenizer=1024, held_out=0.05, workers=1)
    words = [f"data.directory={work / 'data'}", f"train.steps={steps}", f"train.checkpoint_every={steps}"]
    words += [f"evaluate.every={steps}", "track.display=none", *overrides]
    words += [f"model.recurrence_options.{key}={value}" for key, value in options.items()]
    recipe = load_recipe(RECIPES / f"tiny_{name}.yaml", words)
    kept = work / "-".join([name, *(f"{key}={value}" for key, value in options.items()), str(steps)])
    return FathomForCausalLM.from_pretrained(train(recipe, kept).model).eval()


def held_out(corpus: Path, rows: int, length: int) -> Tensor:
    """Rows of a corpus' validation split, evenly spaced, `[rows, length]`."""
    data = TokenDataset.open(corpus, "val", verify="cached")
    ids = np.empty((rows, length), np.int64)
    for i in range(rows):
        data.read(i * (data.num_tokens - length) // max(1, rows - 1), ids[i])
    return torch.from_numpy(ids)


# Decoding.


@torch.no_grad()
def at_once(model: FathomForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Trips and loss of every token that predicts one, `[B, T - 1]` each."""
    out = model.model(ids[:, :-1], head=model.lm_head, use_cache=False)
    losses = F.cross_entropy(model.lm_head(out.last_hidden_state).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    made = out.recurrence_state.get("trips", torch.ones_like(ids[:, 1:]) * model.model.recurrence.trips)
    return made, losses.view_as(made)


def set_threshold(model: FathomForCausalLM, ids: Tensor, trips: float) -> float:
    """τ at which tokens make so many trips in the mean, by bisection."""
    recurrence, low, high = model.model.recurrence, -25.0, 25.0
    for _ in range(14):
        middle = (low + high) / 2
        recurrence.options = replace(recurrence.options, tau=1 / (1 + math.exp(-middle)))
        made = float(at_once(model, ids)[0].double().mean())
        low, high = (middle, high) if made > trips else (low, middle)
    return recurrence.options.tau


@contextmanager
def threshold(model: FathomForCausalLM, tau: float) -> Iterator[None]:
    """Another τ for a while."""
    recurrence = model.model.recurrence
    before, recurrence.options = recurrence.options, replace(recurrence.options, tau=tau)
    try:
        yield
    finally:
        recurrence.options = before


@contextmanager
def at_random(model: FathomForCausalLM, made: Tensor) -> Iterator[None]:
    """Halt after each trip as many of those who made it as the gates did, whoever they are."""
    policy = model.model.recurrence
    gate, chance = policy.gate, torch.Generator().manual_seed(0)
    going = [float((made > k + 1).sum() / (made > k).sum().clamp(min=1)) for k in range(policy.trips - 1)]

    def drawn(out: Any, state: Any) -> Any:
        if out.last:
            return gate(out, state)
        stays = torch.rand(out.hidden.shape[:2], generator=chance) < going[out.trip]
        with threshold(model, torch.where(stays, -1.0, math.inf)):  # type: ignore[arg-type]
            return gate(out, state)

    policy.gate = drawn
    try:
        yield
    finally:
        del policy.gate


@torch.no_grad()
def decode(model: FathomForCausalLM, ids: Tensor, prompt: int, forget: bool = False) -> tuple[Tensor, Any]:
    """Read a prompt, then the rest token by token: the last logits of every step, and the cache."""
    out = model(ids[:, :prompt], use_cache=True, logits_to_keep=1)
    logits = []
    for t in range(prompt, ids.shape[1]):
        out = model(
            ids[:, t : t + 1],
            past_key_values=out.past_key_values,
            use_cache=True,
            output_hidden_states=forget,  # of every token in every trip, so none can be left out
        )
        logits.append(out.logits)
    return torch.cat(logits, 1), out.past_key_values


def bytes_of(cache: Any) -> int:
    """Of the keys and values of the slots in use."""
    count = cache.layers[0].table.count
    per_slot = sum(x[0, :, 0].numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    return int(count.sum()) * per_slot


def run_decode(options: argparse.Namespace) -> dict[str, Any]:
    """Ratios, bytes, and who halts."""
    runs = []
    if options.checkpoint is not None:
        models = [(options.checkpoint.name, FathomForCausalLM.from_pretrained(find_model(options.checkpoint)).eval())]
    else:
        models = [(name, trained(options.work, name, options.steps, SMALL, HALTING[name])) for name in HALTING]
    for name, model in models:
        if not model.model.recurrence.halts:
            raise SystemExit(f"{name}: tokens of this model never halt")
        length = options.prompt + options.new
        some = held_out(options.corpus or options.work / "data", 16, length + 1)
        if options.trips is not None:
            set_threshold(model, some[:8], options.trips)
        tau = model.model.recurrence.options.tau
        made, losses = at_once(model, some)
        with threshold(model, 1e-12):
            unlimited = float(at_once(model, some)[1].mean())
        with at_random(model, made):
            drawn, random_losses = at_once(model, some)
        found = {
            "model": name,
            "tau": tau,
            "trips_at_most": model.model.recurrence.trips,
            "mean_trips": float(made.double().mean()),
            "histogram": [float((made == k + 1).double().mean()) for k in range(model.model.recurrence.trips)],
            "loss": {"halting": float(losses.mean()), "all trips": unlimited, "random": float(random_losses.mean())},
            "random_mean_trips": float(drawn.double().mean()),
            "rank_correlation": correlation(losses.numpy(), made.numpy()),
            "batches": [_timed(model, some[:n, :-1], options, made[:n, options.prompt :]) for n in options.batch],
        }
        runs.append(found)
        print(json.dumps(found), flush=True)
    return {"prompt": options.prompt, "new": options.new, "steps": options.steps, "runs": runs}


def _timed(model: FathomForCausalLM, ids: Tensor, options: argparse.Namespace, made: Tensor) -> dict[str, Any]:
    prompt = options.prompt
    logits, cache = decode(model, ids, prompt)
    same, _ = decode(model, ids, prompt, forget=True)
    with threshold(model, 1e-12):
        _, whole = decode(model, ids, prompt)

    def all_trips() -> None:
        with threshold(model, 1e-12):
            decode(model, ids, prompt)

    def random() -> None:
        with at_random(model, made):
            decode(model, ids, prompt)

    others = {"forgotten": lambda: decode(model, ids, prompt, forget=True), "all trips": all_trips, "random": random}
    found: dict[str, Any] = {
        "batch": len(ids),
        "output_difference": float((logits - same).abs().max()),
        "cache_bytes": [bytes_of(cache), bytes_of(whole)],
        "ratios": {},
    }
    for name, other in others.items():
        ratio = interleaved(other, lambda: decode(model, ids, prompt), options.pairs)
        found["ratios"][name] = [round(x, 3) for x in (ratio.median, ratio.low, ratio.high)]
        found["clock"] = ratio.clock
        found["tokens_per_second"] = round(len(ids) * (ids.shape[1] - prompt) / ratio.seconds[1], 1)
    return found


def correlation(a: np.ndarray, b: np.ndarray, draws: int = 400) -> dict[str, float]:
    """Spearman's, with a 95 % interval over rows drawn again."""
    chance = np.random.default_rng(0)
    sample = [chance.integers(0, len(a), len(a)) for _ in range(draws)]
    low, high = np.nanquantile([_spearman(a[rows].ravel(), b[rows].ravel()) for rows in sample], (0.025, 0.975))
    return {"rho": _spearman(a.ravel(), b.ravel()), "low": float(low), "high": float(high)}


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    def ranks(x: np.ndarray) -> np.ndarray:
        _, place, count = np.unique(x, return_inverse=True, return_counts=True)
        return (count.cumsum() - (count - 1) / 2)[place]

    if a.min() == a.max() or b.min() == b.max():
        return math.nan
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def decode_table(report: dict[str, Any]) -> Iterator[str]:
    """One line per model and batch."""
    for run in report["runs"]:
        rho, loss = run["rank_correlation"], run["loss"]
        yield (
            f"{run['model']}: {run['mean_trips']:.2f} of {run['trips_at_most']} trips (tau {run['tau']:.3g}), loss "
            f"{loss['halting']:.3f}, with all trips {loss['all trips']:.3f}, halting at random {loss['random']:.3f}; "
            f"rank correlation of loss and trips {rho['rho']:+.3f} ({rho['low']:+.3f} to {rho['high']:+.3f})"
        )
    yield "| model | batch | forgotten / halting | all trips / halting | random / halting | tokens/s | cache bytes |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for run in report["runs"]:
        for timed in run["batches"]:
            cells = [f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high in timed["ratios"].values()]
            kept, whole = timed["cache_bytes"]
            numbers = f"{timed['tokens_per_second']:.0f} | {kept:,} of {whole:,}"
            yield f"| {run['model']} | {timed['batch']} | {' | '.join(cells)} | {numbers} |"


# Jacobi.


@torch.no_grad()
def errors(model: FathomForCausalLM, ids: Tensor, rounds: int) -> list[float]:
    """RMSE of the hidden states that the head reads, beside those of decoding, after 0, 1, ... rounds."""
    cache, exact = None, []
    for t in range(ids.shape[1]):
        out = model.model(ids[:, t : t + 1], past_key_values=cache, use_cache=True, head=model.lm_head)
        cache = out.past_key_values
        exact.append(out.last_hidden_state)
    whole, recurrence = torch.cat(exact, 1), model.model.recurrence
    found = []
    for n in range(rounds + 1):
        recurrence.options = replace(recurrence.options, jacobi_eval=n)
        made = model.model(ids, use_cache=False, head=model.lm_head).last_hidden_state
        found.append(float((made - whole).square().mean().sqrt() / whole.square().mean().sqrt()))
    return found


def contraction(values: Sequence[float]) -> dict[str, float]:
    """The factor per round of a straight line through the logarithms, and its R²."""
    kept = [(n, math.log(x)) for n, x in enumerate(values) if x > FLOOR]
    n, y = np.array(kept).T
    slope, start = np.polyfit(n, y, 1)
    rest = y - (slope * n + start)
    return {"factor": math.exp(slope), "r2": float(1 - rest.var() / y.var()), "rounds": len(kept) - 1}


def run_jacobi(options: argparse.Namespace) -> dict[str, Any]:
    """Error by round for every model, and the fit."""
    runs = []
    for name, (recurrence, depth) in SOLVED.items():
        settings = {"trips": depth + 1} | ({"penalty": "none"} if recurrence == "ponder3" else {})
        model = trained(options.work, recurrence, options.steps, SMALLER, settings).double()
        ids = held_out(options.work / "data", 4, options.length)
        made = errors(model, ids, options.rounds)
        torch.manual_seed(0)
        fresh = errors(FathomForCausalLM(model.config).double().eval(), ids, options.rounds)
        runs.append({"model": name, "errors": made, **contraction(made), "untrained": contraction(fresh)})
        runs[-1]["published"] = PUBLISHED.get(name)
        print(json.dumps(runs[-1]), flush=True)
    if options.plot is not None:
        options.plot.write_text(picture(runs), encoding="utf-8")
    return {"length": options.length, "steps": options.steps, "runs": runs}


def jacobi_table(report: dict[str, Any]) -> Iterator[str]:
    """One line per model."""
    yield "| model | error after 0, 1, 3, 10 rounds | per round | R² | untrained | published |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for run in report["runs"]:
        shown = ", ".join(f"{run['errors'][n]:.1e}" for n in (0, 1, 3, 10) if n < len(run["errors"]))
        published = f"x {run['published']}" if run["published"] else ""
        fits = f"x {run['factor']:.3f} | {run['r2']:.3f} | x {run['untrained']['factor']:.3f}"
        yield f"| {run['model']} | {shown} | {fits} | {published} |"


def picture(runs: Sequence[dict[str, Any]]) -> str:
    """Errors by round, the vertical axis logarithmic, as one SVG; dashes continue the published rates."""
    width, height, left, top, right, bottom = 620, 360, 70, 20, 170, 50
    most = max(len(run["errors"]) for run in runs) - 1
    low = math.floor(math.log10(max(FLOOR / 10, min(x for run in runs for x in run["errors"] if x > 0))))

    def at(n: float, error: float) -> tuple[float, float]:
        down = (0.5 - math.log10(max(error, 10.0**low))) / (0.5 - low)
        return left + n / most * (width - left - right), top + down * (height - top - bottom)

    style = "font: 13px system-ui, sans-serif; background: #fff"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{style}">']
    parts.append(f'<title>Jacobi error by round</title><rect width="{width}" height="{height}" fill="#fff"/>')
    for power in range(0, low - 1, -2):
        _, y = at(0, 10.0**power)
        parts.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#ddd"/>')
        exponent = str(power).replace("-", "−")
        label = f'10<tspan dy="-5" font-size="10">{exponent}</tspan>'
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{label}</text>')
    for n in range(0, most + 1, 2):
        x, y = at(n, 10.0**low)
        parts.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle" fill="#444">{n}</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">Jacobi rounds</text>')
    turned = f'transform="rotate(-90 16 {height / 2 - 15})"'
    parts.append(f'<text x="16" y="{height / 2 - 15}" text-anchor="middle" {turned}>error beside decoding</text>')
    for run, colour in zip(runs, ("#0b5c8a", "#d9730d", "#4a8f3c"), strict=False):
        points = [at(n, x) for n, x in enumerate(run["errors"])]
        parts.append(f'<polyline points="{_points(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        if run["published"]:
            line = [at(n, run["errors"][0] * run["published"] ** n) for n in range(most + 1)]
            parts.append(f'<polyline points="{_points(line)}" fill="none" stroke="{colour}" stroke-dasharray="3 5"/>')
        row = top + 14 + 52 * runs.index(run)
        words = (run["model"], f"× {run['factor']:.2f} per round")
        published = f"published × {run['published']}" if run["published"] else ""
        for i, text in enumerate((*words, published)):
            bold = ' font-weight="600"' if i == 0 else ""
            fill = colour if i == 0 else "#444"
            parts.append(f'<text x="{width - right + 14}" y="{row + 16 * i}" fill="{fill}"{bold}>{escape(text)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("decode", "jacobi"))
    parser.add_argument("--checkpoint", type=Path, help="decode with this trained model instead")
    parser.add_argument("--corpus", type=Path, help="prepared corpus of the checkpoint's tokenizer, for --checkpoint")
    parser.add_argument("--trips", type=float, help="set tau to so many trips in the mean (default: 2 if trained here)")
    parser.add_argument("--steps", type=int, help="of training here (default: 120 for decode, 60 for jacobi)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=32, help="tokens read at once")
    parser.add_argument("--new", type=int, default=64, help="tokens decoded")
    parser.add_argument("--pairs", type=int, default=5, help="how often A B B A is timed")
    parser.add_argument("--length", type=int, default=48, help="tokens in a row, for jacobi")
    parser.add_argument("--rounds", type=int, default=16, help="Jacobi rounds at most")
    parser.add_argument("--plot", type=Path, help="where to draw jacobi, as SVG")
    parser.add_argument("--work", type=Path, default=Path("runs/ponder-benchmark"), help="corpus and trained models")
    parser.add_argument("--out", type=Path, help="the log, as JSON")
    options = parser.parse_args()
    if (options.checkpoint is None) != (options.corpus is None):
        parser.error("--checkpoint and --corpus belong together")
    if options.trips is None and options.checkpoint is None:
        options.trips = 2.0
    options.steps = options.steps or {"decode": 120, "jacobi": 60}[options.part]
    torch.set_num_threads(1)
    run, table = {"decode": (run_decode, decode_table), "jacobi": (run_jacobi, jacobi_table)}[options.part]
    report = {**vars(provenance()), "threads": torch.get_num_threads(), **run(options)}
    print("\n".join(table(report)))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

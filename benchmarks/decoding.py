"""Decoding: what mechanisms, trips and slots cost a token, and what drafting with a loop's first trips saves.

    python benchmarks/decoding.py plain                             # a minute or two; --compile: many
    python benchmarks/decoding.py drafts                            # trains two small loops on bytes, minutes
    python benchmarks/decoding.py drafts --device cuda --width 512 --steps 2000
    python benchmarks/decoding.py slots                             # half an hour; --compile with --cache fixed

`plain`: one token after another, batch 1, every model with the same weights and fed the same text, whatever it would
have said itself. Pairs take turns A B B A, prompt by prompt: our vanilla beside transformers' Qwen3, each mechanism
beside our vanilla. Prompts are read outside the clock. What the two would have said is compared.

`drafts`: two loops of four trips are trained alike on this Python's own library, one with `early_loss`. Decoding then
takes turns A B B A, plain and drafting, on the same prompts, at budgets of two, three and four trips. Greedy; texts are
compared. Seconds are of the processor.

`slots`: a token after a long context of which only a part made all trips (keys and values are drawn, not read), when a
trip reads what it may see and when it reads all slots under a mask. Both take turns A B B A on one model, context by
context; a growing cache copies what is read, here whether or not the rule would (`chosen` says), a fixed one does not.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, StaticCache
from transformers.cache_utils import Cache

from fathom.evaluation.clock import Clock
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.roles import View
from fathom.models.registry import parse_mechanism
from fathom.models.trips import slot_table
from fathom.models.trips.fixed_table import FixedTable
from fathom.models.trips.slot_cache import repeat_last, with_slots
from fathom.models.trips.slot_table import Tags
from fathom.models.trips.speculation import Speculation
from fathom.report.provenance import provenance

TRIPS = 4
TWO = {"recurrence_options": {"trips": 2}}
PAIRS = {
    "vanilla": "qwen3",
    "depth_attention": "vanilla",
    "attention_residuals": "vanilla",
    "hyper_connections": "vanilla",
    "loop": "vanilla",
    "ponder2": "vanilla",
}
"""What is timed beside what; `loop` and `ponder2` make two trips."""


# Plain decoding.


def shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of every model; the weights are wide, so that texts are not one token over and over."""
    return {
        "vocab_size": 4096,
        "hidden_size": arguments.width,
        "intermediate_size": 11 * arguments.width // 4,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.width // 64,
        "num_key_value_heads": max(1, arguments.width // 128),
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
    }


def build(name: str, weights: dict[str, Tensor], arguments: argparse.Namespace) -> PreTrainedModel:
    """transformers' Qwen3 or one of our mechanisms, on the given weights where they fit."""
    torch.manual_seed(0)
    if name == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**shape(arguments)))
    else:
        trips = TWO if name in ("loop", "ponder2") else {}
        model = FathomForCausalLM(FathomConfig(**shape(arguments), **parse_mechanism(name), **trips))
    model.load_state_dict(weights, strict=False, assign=True)  # the same memory, which is no faster for one side
    model.generation_config.eos_token_id = None
    return model.to(arguments.device, getattr(torch, arguments.dtype)).eval()


class Decoder:
    """One side of a pair: reads a prompt, then is fed a text token by token."""

    def __init__(self, model: PreTrainedModel, room: int, compiled: bool) -> None:
        self.model, self.room, self.compiled = model, room, compiled
        self.call = torch.compile(model, dynamic=False) if compiled else model
        self.clock = Clock(model.device)

    def seconds(self, text: Tensor, prompt: int) -> tuple[float, Tensor]:
        """For each token of `text` (`[1, T]`) after the prompt; and what it would have said in their places."""
        cache = StaticCache(config=self.model.config, max_cache_len=self.room) if self.compiled else None
        cache = self.model(text[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        positions, said = torch.arange(text.shape[1], device=text.device).unsqueeze(0), []

        def feed() -> None:
            for t in range(prompt, text.shape[1]):
                out = self.call(
                    input_ids=text[:, t : t + 1],
                    position_ids=positions[:, t : t + 1],
                    past_key_values=cache,
                    use_cache=True,
                )
                said.append(out.logits[:, -1].argmax(-1))

        return self.clock.seconds(feed) / (text.shape[1] - prompt), torch.cat(said)


@torch.no_grad()
def plain(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each pair."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    reference = Qwen3ForCausalLM(Qwen3Config(**shape(arguments)))
    weights = reference.state_dict()
    qwen3 = build("qwen3", weights, arguments)
    chance = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 4096, (arguments.prompts, arguments.prompt), generator=chance).to(arguments.device)
    texts = [written(qwen3, prompt.unsqueeze(0), arguments.tokens) for prompt in prompts]
    rows = []
    for name in arguments.mechanism or PAIRS:
        other = PAIRS.get(name, "vanilla")
        torch._dynamo.reset()
        a, b = (
            Decoder(build(side, weights, arguments), arguments.prompt + arguments.tokens, arguments.compile)
            for side in (name, other)
        )
        row = beside(a, b, texts, arguments.prompt)
        if name == "vanilla":
            own = [written(a.model, prompt.unsqueeze(0), arguments.tokens) for prompt in prompts]
            row["texts_equal"] = all(map(torch.equal, own, texts))
        rows.append({"a": name, "b": other, "compiled": arguments.compile, "clock": a.clock.words, **row})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def written(model: PreTrainedModel, prompt: Tensor, tokens: int) -> Tensor:
    """A prompt and what the model itself says after it, `[1, T]`."""
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def beside(a: Decoder, b: Decoder, texts: Sequence[Tensor], prompt: int) -> dict[str, Any]:
    """Ratios a / b, one for each text."""
    for side in (a, b):
        side.seconds(texts[0], prompt)
    ratios, equal = [], 0
    times: tuple[list[float], list[float]] = ([], [])
    gc.disable()  # its pauses belong to neither side
    for text in texts:
        (a1, said), (b1, other), (b2, _), (a2, _) = (side.seconds(text, prompt) for side in (a, b, b, a))
        ratios.append((a1 + a2) / (b1 + b2))
        times[0].extend((a1, a2))
        times[1].extend((b1, b2))
        equal += int((said == other).sum())
        gc.collect()
    gc.enable()
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    return {
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "ms_per_token": [round(1000 * statistics.median(side), 3) for side in times],
        "pairs": len(texts),
        "tokens_alike": equal / (len(texts) * (texts[0].shape[1] - prompt)),
    }


# Drafts.


def corpus() -> Tensor:
    """The standard library's own source, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def trained(text: Tensor, arguments: argparse.Namespace, early_loss: float) -> FathomForCausalLM:
    """A loop after so many steps; all but the last hundredth of the text is for training."""
    torch.manual_seed(0)
    config = FathomConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.width // 4,
        max_position_embeddings=2048,
        recurrence="loop",
        recurrence_options={"trips": TRIPS, "early_loss": early_loss},
    )
    model = FathomForCausalLM(config).to(arguments.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=arguments.steps)
    generator, last = torch.Generator().manual_seed(0), int(0.99 * len(text)) - arguments.length
    for step in range(arguments.steps):
        starts = torch.randint(0, last, (arguments.batch,), generator=generator)
        rows = torch.stack([text[i : i + arguments.length].long() for i in starts.tolist()]).to(arguments.device)
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"early_loss {early_loss}: step {step}, loss {float(loss):.3f}", flush=True)
    return model.eval()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor; of the clock where a device does the work."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = clock()
    found = work()
    return clock() - began, found


@torch.no_grad()
def compare(model: FathomForCausalLM, text: Tensor, trips: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding against drafting with one trip."""
    model.generation_config.eos_token_id = None
    start = int(0.99 * len(text))
    prompts = [text[start + 997 * i :][:64].long().unsqueeze(0).to(arguments.device) for i in range(arguments.prompts)]
    drafts = Speculation(1, arguments.drafts)

    def decode(prompt: Tensor, **more: Any) -> list[int]:
        out = model.generate(
            prompt, max_new_tokens=arguments.tokens, do_sample=False, pad_token_id=0, max_trips=trips, **more
        )
        return out[0, prompt.shape[1] :].tolist()

    decode(prompts[0]), decode(prompts[0], draft_trips=1)
    plain = drafting = 0.0
    same = True
    for prompt in prompts:
        a, expected = timed(lambda p=prompt: decode(p))
        b, first = timed(lambda p=prompt: decode(p, speculation=drafts))
        c, second = timed(lambda p=prompt: decode(p, speculation=drafts))
        d, _ = timed(lambda p=prompt: decode(p))
        plain, drafting, same = plain + a + d, drafting + b + c, same and first == second == expected
    made = 2 * len(prompts) * arguments.tokens
    return {
        "trips": trips,
        "identical": same,
        "plain_ms_per_token": 1000 * plain / made,
        "drafting_ms_per_token": 1000 * drafting / made,
        "ratio": drafting / plain,
        "acceptance": drafts.acceptance,
        "tokens_per_verification": drafts.tokens_per_verification,
    }


def drafts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each loop and budget."""
    text, rows = corpus(), []
    for weight in arguments.early_loss:
        model = trained(text, arguments, weight)
        for trips in range(2, TRIPS + 1):
            rows.append({"early_loss": weight, **compare(model, text, trips, arguments)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


# Slots.


class ReadWhole(FixedTable):
    """A table of fixed places that are all read. dynamo tells types apart, but two tables by their view it does not."""


class Reader:
    """One side of a pair: reads tokens after a filled slot cache, and takes them back."""

    def __init__(self, model: FathomForCausalLM, halt: Tensor, view: View, arguments: argparse.Namespace, fixed: bool):
        self.model, self.always = model, view is not View.ALL and not fixed and model.config.recurrence == "adaponder"
        self.call = torch.compile(model, dynamic=False) if arguments.compile else model
        self.clock, self.cache = Clock(model.device), filled(model, halt, view, arguments.tokens, fixed)

    def seconds(self, ids: Tensor) -> tuple[float, Tensor]:
        """For each of the tokens `[B, T]`; and the last logits."""
        rule, said = slot_table.gathering_pays, []
        context = int(self.cache.get_seq_length())

        def feed() -> None:
            for t, part in enumerate(ids.split(1, 1)):
                where = torch.full_like(part, context + t)
                out = self.call(input_ids=part, position_ids=where, past_key_values=self.cache, use_cache=True)
                said.append(out.logits[:, -1])

        if self.always:
            slot_table.gathering_pays = lambda *sizes: True
        seconds = self.clock.seconds(feed) / ids.shape[1]
        slot_table.gathering_pays = rule
        self.cache.crop(-ids.shape[1])
        return seconds, said[-1]


def filled(model: FathomForCausalLM, halt: Tensor, view: View, room: int, fixed: bool) -> Cache:
    """A slot cache in which each token made the trips up to `halt`, `[B, T]`, as decoding would have left it.

    Args:
        model: Whose cache it is.
        halt: The last trip of each token.
        view: What passes read: the model's own view, or ALL, for all slots under a mask.
        room: How many more tokens a fixed cache has room for.
        fixed: Whether every trip of every token has its place.
    """
    batch, columns = halt.shape
    config, trips = model.config, model.model.recurrence.trips
    cache = StaticCache(config=config, max_cache_len=columns + room) if fixed else DynamicCache()
    table = with_slots(cache, config.num_hidden_layers, trips, view, batch, halt.device)
    if fixed and view is View.ALL:
        table.__class__ = ReadWhole
    table.open(table.columns + columns)
    table.columns += columns
    token = torch.arange(columns, device=halt.device).repeat_interleave(trips).unsqueeze(0)
    trip = torch.arange(trips, device=halt.device).repeat(columns).unsqueeze(0)
    live = trip <= halt.repeat_interleave(trips, 1)
    query = Tags(token, trip, None if bool(live.all()) else live)
    placement = table.place(query, None)
    table.note(query, placement, trips - 1)
    chance = torch.Generator(halt.device).manual_seed(0)
    shape = (batch, config.num_key_value_heads, columns * trips, config.head_dim)
    for layer in cache.layers:
        pair = (torch.randn(shape, generator=chance, device=halt.device).to(model.dtype) for _ in range(2))
        layer.exchange(placement, tuple(pair))
    table.commit(query, placement)
    if fixed and view is View.SAME:
        repeat_last(cache, torch.arange(columns, device=halt.device).expand(batch, -1))
    return cache


@torch.no_grad()
def slots(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model, kind of cache, batch, context and mean number of trips."""
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in arguments.mechanism or ("adaponder", "latent_cot"):
        torch.manual_seed(0)
        options = {"recurrence_options": {"trips": TRIPS, "tau": 1e-9}}  # the tokens that are timed make all trips
        model = FathomForCausalLM(FathomConfig(**shape(arguments), **parse_mechanism(name), **options))
        model = model.to(arguments.device, getattr(torch, arguments.dtype)).eval()
        same = model.model.recurrence.view is View.SAME
        kinds = [kind == "fixed" for kind in arguments.cache if same or kind == "growing"]  # DUO reads all fixed places
        for fixed, batch, context in itertools.product(kinds, arguments.batch, arguments.context):
            for trips in arguments.trips[-1:] if fixed else arguments.trips:  # of a fixed cache all places are read
                torch._dynamo.reset()
                rows.append(slots_beside(model, batch, context, trips, fixed, arguments))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def slots_beside(
    model: FathomForCausalLM, batch: int, context: int, trips: float, fixed: bool, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Reading what may be seen beside reading everything; a token makes all trips or one, `trips` in the mean."""
    chance = torch.Generator().manual_seed(1)
    halt = (torch.rand(batch, context, generator=chance) < (trips - 1) / (TRIPS - 1)) * (TRIPS - 1)
    ids = torch.randint(0, 4096, (batch, arguments.tokens), generator=chance).to(model.device)
    halt, view = halt.to(model.device), model.model.recurrence.view
    a, b = (Reader(model, halt, each, arguments, fixed) for each in (view, View.ALL))
    stored = int((1 + halt).sum(1).max())
    found = [context * (1 if view is View.SAME else k + 1) for k in range(TRIPS)]
    off = max(float((one - other).abs().max()) for one, other in [(a.seconds(ids)[1], b.seconds(ids)[1])])
    ratios, times = [], ([], [])  # type: ignore[var-annotated]
    gc.disable()
    for _ in range(arguments.pairs):
        (a1, _), (b1, _), (b2, _), (a2, _) = (side.seconds(ids) for side in (a, b, b, a))
        ratios.append((a1 + a2) / (b1 + b2))
        times[0].extend((a1, a2))
        times[1].extend((b1, b2))
        gc.collect()
    gc.enable()
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    return {
        **{"model": model.config.recurrence, "cache": "fixed" if fixed else "growing", "compiled": arguments.compile},
        **{"batch": batch, "context": context, "stored_per_token": round(stored / context, 3)},
        "chosen": None if fixed else [slot_table.gathering_pays(1, n, stored, False) for n in found],
        **{"ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]},
        "ms_per_token": [round(1000 * statistics.median(side), 2) for side in times],
        "logits_differ_by": off,
        "clock": a.clock.words,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    sizes = (("plain", 512, 12, 12, 64), ("drafts", 96, 2, 4, 96), ("slots", 512, 4, 0, 4))
    for part, width, layers, prompts, tokens in sizes:
        one = parts.add_parser(part)
        one.add_argument("--device", default="cpu")
        one.add_argument("--width", type=int, default=width)
        one.add_argument("--layers", type=int, default=layers)
        if prompts:
            one.add_argument("--prompts", type=int, default=prompts)
        one.add_argument("--tokens", type=int, default=tokens, help=f"new tokens of each prompt (default: {tokens})")
        one.add_argument("--out", type=Path, help="write the log there")
        if part == "plain":
            one.add_argument("--mechanism", nargs="+", help=f"some of {', '.join(PAIRS)}, or others (default: these)")
            one.add_argument("--prompt", type=int, default=32, help="tokens of each prompt (default: 32)")
        if part == "slots":
            one.add_argument("--mechanism", nargs="+", help="adaponder, latent_cot (default: both)")
            one.add_argument("--context", type=int, nargs="+", default=[256, 512, 1024, 2048])
            one.add_argument("--batch", type=int, nargs="+", default=[1, 8])
            one.add_argument("--trips", type=float, nargs="+", default=[2, 3, 4], help="mean of the context's tokens")
            one.add_argument("--cache", nargs="+", choices=("growing", "fixed"), default=["growing", "fixed"])
            one.add_argument("--pairs", type=int, default=3, help="how often A B B A is timed")
        if part != "drafts":
            one.add_argument("--dtype", default="float32")
            one.add_argument("--threads", type=int, default=1)
            one.add_argument("--compile", action="store_true", help="compile decoding, over a static cache")
        else:
            one.add_argument("--steps", type=int, default=300)
            one.add_argument("--batch", type=int, default=16)
            one.add_argument("--length", type=int, default=64)
            one.add_argument("--drafts", type=int, default=6)
            one.add_argument("--early-loss", type=float, nargs="+", default=[0.0, 0.5])
    arguments = parser.parse_args()
    results = {"plain": plain, "drafts": drafts, "slots": slots}[arguments.part](arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"provenance": vars(provenance()), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What it costs that a family's own layers stand in our walk: a training step and a decoded token.

    python benchmarks/hosting.py --out benchmarks/results/hosting.json      # half an hour on one thread

Three comparisons, each on the same weights, as median ratios of pairs that take turns A B B A, in thread CPU time:

`hosted`   Qwen3, Llama and Gemma 2 with transformers' layers in our walk, over Fathom's own decoder.
`overhead` a mixture of experts in our walk, over the family's own class.
`own`      GPT-NeoX, GPT-2 and OPT, which are not hosted: the family's own class over Fathom's decoder. With the
           overhead above, it tells what hosting them would cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from fathom import FathomForCausalLM
from fathom.checkpoints.families import hosted
from fathom.models import FathomConfig
from fathom.report.provenance import provenance

SHAPE: dict[str, Any] = dict(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": dict(head_dim=64),
    "gemma2": dict(head_dim=64, attn_implementation="eager"),
    "qwen3_moe": dict(head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=704),
    "opt": dict(ffn_dim=2048, word_embed_proj_dim=512),
    "gpt2": dict(n_embd=512, n_layer=8, n_head=8, n_positions=1024),
}
COMPARISONS = {"hosted": ("qwen3", "llama", "gemma2"), "overhead": ("qwen3_moe",), "own": ("gpt_neox", "gpt2", "opt")}
BATCH, LENGTH, PROMPT, TOKENS = 1, 128, 64, 16


def theirs_of(name: str) -> PreTrainedModel:
    """The family's own model."""
    torch.manual_seed(0)
    values = {**SHAPE, **CHANGES.get(name, {})}
    backend = values.pop("attn_implementation", "sdpa")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **values), attn_implementation=backend)


def hosted_of(theirs: PreTrainedModel) -> FathomForCausalLM:
    """Its layers in our walk."""
    values = hosted.configuration(theirs.config.to_dict() | {"model_type": theirs.config.model_type})
    model = FathomForCausalLM(FathomConfig(**values, attn_implementation=theirs.config._attn_implementation))
    model.load_state_dict(theirs.state_dict())
    return model


def native_of(theirs: PreTrainedModel) -> PreTrainedModel:
    """Fathom's own decoder with its weights."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        backend = theirs.config._attn_implementation
        opened: PreTrainedModel = FathomForCausalLM.from_pretrained(folder, attn_implementation=backend)
    return opened


def pair_of(kind: str, name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model in question and the one that it is compared with."""
    theirs = theirs_of(name)
    if kind == "hosted":
        return hosted_of(theirs), native_of(theirs)
    return (hosted_of(theirs), theirs) if kind == "overhead" else (theirs, native_of(theirs))


def step(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], None]:
    """A training step without its optimizer."""

    def run() -> None:
        model.train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def tokens(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], None]:
    """Some tokens after a prompt; the prompt is read once, its cache cropped after each run."""
    model.eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :PROMPT], past_key_values=cache, use_cache=True)

    def run() -> None:
        model.eval()
        with torch.no_grad():
            for t in range(TOKENS):
                model(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache.crop(-TOKENS)

    return run


def ratio(a: Callable[[], None], b: Callable[[], None], pairs: int) -> dict[str, Any]:
    """Median of a / b over pairs in turns A B B A, its 95 % interval by bootstrap, and the median milliseconds of b."""
    for one in (a, b, a, b):
        one()
    ratios, seconds = [], []
    for i in range(pairs):
        taken = {}
        for key, one in ((0, a), (1, b)) if i % 2 == 0 else ((1, b), (0, a)):
            start = time.thread_time()
            one()
            taken[key] = time.thread_time() - start
        ratios.append(taken[0] / taken[1])
        seconds.append(taken[1])
    draws = np.random.default_rng(0).choice(ratios, (10_000, pairs))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    found = {"ratio": statistics.median(ratios), "low": float(low), "high": float(high)}
    return {key: round(value, 4) for key, value in found.items()} | {
        "pairs": pairs,
        "milliseconds": round(1000 * statistics.median(seconds), 2),
    }


def main() -> None:
    """Run every comparison, and write the log after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    log: dict[str, Any] = {"provenance": vars(provenance()), "shape": SHAPE, "rows": []}
    ids = torch.randint(3, SHAPE["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    for kind, names in COMPARISONS.items():
        for name in names:
            a, b = pair_of(kind, name)
            for what, make in (("token", tokens), ("step", step)):
                row = {
                    "comparison": kind,
                    "family": name,
                    "what": what,
                    **ratio(make(a, ids), make(b, ids), options.pairs),
                }
                log["rows"].append(row)
                print(row, flush=True)
                options.out.write_text(json.dumps(log, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

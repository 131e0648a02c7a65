"""kvpress's thirteen scorers in Fathom's frame beside kvpress itself: logits after a prompt that was compressed once.

    PYTHONPATH=FOLDER python benchmarks/kvcache_presses.py --ours OURS.pt
    OLD/bin/python benchmarks/kvcache_presses.py --theirs THEIRS.pt
    python benchmarks/kvcache_presses.py --compare OURS.pt THEIRS.pt > LOG.json

FOLDER holds kvpress, installed without its dependencies beside today's transformers; OLD is an environment with kvpress
and a transformers below 5.3. Models are tiny, random and in float64, random draws are seeded, and 120 different words
are read, so that no two keys are equal. The keys that stay keep their positions, as in kvpress, or are rotated to
consecutive ones (`KeyRerotationPress`). Where more scores are equal than there are places, either choice is right: the
log counts both.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

PRESSES: dict[str, dict[str, int]] = {
    "CapPress": {},
    "CompactorPress": {"sketch_dimension": 8, "chunk_size": 32},
    "CURPress": {},
    "ExpectedAttentionPress": {},
    "KeyDiffPress": {},
    "KnormPress": {},
    "LagKVPress": {"lag_size": 16},
    "LeverageScorePress": {"sketch_dimension": 8},
    "NonCausalAttnPress": {"chunk_size": 32},
    "ObservedAttentionPress": {},
    "SnapKVPress": {"window_size": 16},
    "StreamingLLMPress": {},
    "TOVAPress": {},
}
FAMILIES = ("llama", "qwen3", "phi3")
REMOVED = (0.3, 0.5, 0.8)
SHAPE = dict(
    vocab_size=211,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
CLOSE = 2e-5


def model_of(family: str, attention: str) -> tuple[Any, torch.Tensor]:
    """A random model, the same under every transformers, and a prompt of different words."""
    windows = {"sliding_window": None} if family == "phi3" else {}
    config = AutoConfig.for_model(family, **SHAPE, **windows)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.15 * torch.randn(parameter.shape, generator=draw)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.double(), torch.randperm(200, generator=draw)[:120].unsqueeze(0) + 5


def counting(method: Any, ties: set[str]) -> Any:
    """A method of Fathom that notes where equal scores compete for fewer places."""
    choose = method.choose

    def counted(self: Any, scores: torch.Tensor) -> torch.Tensor:
        kept = self.schedule.kept
        least = scores.topk(kept, dim=-1).values[..., -1:]
        equal, places = (scores == least).sum(-1), kept - (scores > least).sum(-1)
        for one in (equal > places).nonzero().tolist():
            ties.add(f"{int(equal[tuple(one)])} equal scores for {int(places[tuple(one)])} places")
        return choose(self, scores)

    method.choose = counted
    return method


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor, press: Any, moved: bool, ours: bool) -> tuple[torch.Tensor, list[str]]:
    """Logits of seven further tokens, and ties (of ours)."""
    press = importlib.import_module("kvpress").KeyRerotationPress(press) if moved else press
    question, ties = torch.arange(10, 17).unsqueeze(0), set[str]()
    torch.manual_seed(3)
    if ours:
        kvcache = importlib.import_module("fathom.kvcache")
        with kvcache.compressed(model, counting(kvcache.press(press), ties)):
            cache = model(ids).past_key_values
        return model(question, past_key_values=cache).logits, sorted(ties)
    cache = DynamicCache()
    with press(model):
        model(ids, past_key_values=cache)
    at = torch.arange(7) + cache.get_seq_length()
    places = at if moved else torch.arange(7) + ids.shape[1]
    return model(question, past_key_values=cache, position_ids=places[None], cache_position=at).logits, []


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The largest difference of each cell, and the ties of those that differ."""
    names = {one: " ".join(map(str, one)) for one in ours["found"]}
    gaps = {name: float((ours["found"][one][0] - theirs["found"][one][0]).abs().max()) for one, name in names.items()}
    ties = {name: ours["found"][one][1] for one, name in names.items() if gaps[name] > CLOSE}
    versions = {side: given["versions"] for side, given in (("ours", ours), ("theirs", theirs))}
    close = sum(gap <= CLOSE for gap in gaps.values())
    return {"versions": versions, "close": close, "of": len(gaps), "ties": ties, "gaps": gaps}


def main() -> None:
    """One of the three calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--theirs", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    options = parser.parse_args()
    if options.compare:
        print(json.dumps(compare(*(torch.load(path) for path in options.compare)), indent=1))
        return
    kvpress, found = importlib.import_module("kvpress"), {}
    for family in FAMILIES:
        for name, given in PRESSES.items():
            model, ids = model_of(family, "eager" if name == "ObservedAttentionPress" else "sdpa")
            for removed, moved in itertools.product(REMOVED, (False, True)):
                press = getattr(kvpress, name)(compression_ratio=removed, **given)
                cell = family, name, removed, "moved" if moved else "in place"
                found[cell] = logits_of(model, ids, press, moved, options.ours is not None)
    versions = {name: metadata.version(name) for name in ("kvpress", "transformers", "torch")}
    torch.save({"versions": versions, "found": found}, options.ours or options.theirs)


if __name__ == "__main__":
    main()

"""Two tables of docs/how-to/papers.md, read from the code: which table of which paper is one command, and where
Fathom's defaults are the paper's, the authors' code's, or ours."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fathom.experiments.paper import load_table
from fathom.kvcache import METHODS
from fathom.lineage.comparison import ANCHORS
from fathom.models import FathomConfig
from fathom.models.registry import MECHANISMS
from fathom.recipe import KVCache
from fathom.report.tables import markdown_table
from fathom.settings import default_of, packaged_recipes

UNKNOWN = "unknown; ours"


class Choice(NamedTuple):
    """An option on which sources disagree or are silent."""

    mechanism: str
    option: str
    paper: str
    code: str
    """The authors' public code."""
    why: str


CHOICES = (
    Choice(
        "depth_attention",
        "stride",
        "half the layers",
        "1 where the config has none",
        "null: half the layers, stored when resolved",
    ),
    Choice("depth_attention", "recent_layers", "0", "0", "the paper's"),
    Choice(
        "depth_attention",
        "across_trips",
        UNKNOWN,
        "no code",
        "null: `same_layer` in a loop, the literal reading; three rules fit the text",
    ),
    Choice(
        "depth_attention", "mixes", "`value`; keys are an ablation", "`value`", "how mixed keys are handed on is ours"
    ),
    Choice(
        "depth_attention",
        "k_norm_position",
        "not stated",
        "after RoPE under sdpa, before it under flash attention",
        "a key of the model: Qwen3's order; `after_rope` opens the released weights",
    ),
    Choice(
        "attention_residuals",
        "variant",
        "not stated which ran",
        "`snapshot` in the released file",
        "the paper of record's block sums give the published cost",
    ),
    Choice(
        "ponder",
        "top_k",
        "100 in a footnote; all words in the equations",
        "all words",
        "0.01 perplexity apart, and far cheaper; full tiers take the public code's 0",
    ),
    Choice(
        "ponder", "mixture_gain", "1", "1/K beside a first input times K, from 410M on", "full tiers take the scripts'"
    ),
    Choice("ponder", "trips", "4", "4", "the paper's"),
    Choice(
        "ponder",
        "feed",
        "`mixture`; others are ablations",
        "`mixture`",
        "where the projector and the learnt pause start, and that all iterations share one, is ours",
    ),
    Choice("ponder2", "trips", "2", "2", "the paper's"),
    Choice(
        "ponder2",
        "jacobi_train",
        "2 or 3",
        "2 or 3 (Llama), 2 to 4 (NeoX)",
        "the paper's; the Pythia table takes 2 to 4",
    ),
    Choice("ponder2", "jacobi_eval", "not stated", "3", "the code's"),
    Choice("ponder2", "jacobi_prefill", "not stated", "10 where the config has none", "the code's"),
    Choice("ponder3", "tau", "1e-4", "no code", "the paper's"),
    Choice("ponder3", "jacobi_train", UNKNOWN, "no code", "trips to trips + 2"),
    Choice("ponder3", "jacobi_eval", UNKNOWN, "no code", "ours"),
    Choice("ponder3", "router_damping", UNKNOWN, "no code", "replaced outright, so that rounds become exact"),
    Choice("ponder3", "penalty", UNKNOWN, "no code", "the estimator of the quality is ours"),
    Choice("ponder3", "penalty_max", UNKNOWN, "no code", "0.1 from step 4000 on"),
    Choice("ponder3", "penalty_over", UNKNOWN, "no code", "a row, so that ranks and micro-batches change nothing"),
    Choice("adaponder", "tau", "1e-4", "no code", "the paper's"),
    Choice("adaponder", "gate_bias", UNKNOWN, "no code", "starts open; the gate's activation is ours too"),
    Choice("adaponder", "penalty_max", "0.1", "no code", "the paper's"),
    Choice("adaponder", "penalty_fraction", "0.1", "no code", "the paper's"),
    Choice("adaponder", "penalty_span", UNKNOWN, "no code", "10 to 30 % of the steps"),
    Choice("adaponder", "penalty_on", UNKNOWN, "no code", "σ, or its logit"),
    Choice("adaponder", "penalty_over", "the batch", "no code", "a row, as in ponder3"),
    Choice(
        "adaponder",
        "halting",
        "`own`; others are ablations",
        "no code",
        "which tokens a fixed schedule prunes is ours: by position",
    ),
    Choice("latent_cot", "tau", UNKNOWN, "no code", "ours"),
    Choice(
        "latent_cot",
        "router",
        "`linear`; an MLP is an ablation",
        "no code",
        "one router for all trips, and the MLP's width, are ours",
    ),
    Choice("latent_cot", "router_bias", UNKNOWN, "no code", "starts by going on"),
    Choice(
        "latent_cot",
        "penalty",
        UNKNOWN,
        "no code",
        "the formula and its weight are ours; they match the trends that the paper reports",
    ),
    Choice("latent_cot", "penalty_beta", UNKNOWN, "no code", "ours"),
    Choice("freqkv", "window", "4096 for LLaMA-2", "4096", "null: name the length that the weights were trained at"),
    Choice("freqkv", "sinks", "4", "4", "the paper's"),
    Choice("freqkv", "ratio", "0.5", "0.5", "the paper's γ"),
    Choice(
        "freqkv",
        "kept",
        "γN",
        "γ(N − S), rounded down",
        "null: γN − S, so that sinks and kept entries fill γN; the FreqKV table takes the code's 2046",
    ),
    Choice("freqkv", "transform", "a DCT", "FFT", "the same numbers; a stored matrix below 512 entries"),
    Choice(
        "loop",
        "injection",
        UNKNOWN,
        "no code",
        "the stream itself goes round; the looped Depth-Attention models are not described further",
    ),
    Choice(
        "ics",
        "anchors",
        "each model's 4,096 rarest tokens",
        "the same, counted on Wikipedia",
        "strings that both tokenizers have; `ics_rarest` of exact mode has HuRef's own, by order of merges",
    ),
)
"""The default is read from the option."""


def faithfulness() -> str:
    """Every choice beside the default."""
    rows = []
    for choice in CHOICES:
        default = _default(choice.mechanism, choice.option)
        rows.append(
            (f"`{choice.mechanism}`", f"`{choice.option}`", choice.paper, choice.code, f"`{default}`", choice.why)
        )
    head = ("mechanism", "option", "paper", "authors' code", "default", "why")
    return "\n".join(_text(head, rows)) + "\n"


def _default(mechanism: str, option: str) -> object:
    """Of a mechanism's option; of a cache's, which is a key of the recipe or a parameter of its class; of a key of the
    model; or how many anchors a score has."""
    if mechanism == "ics":
        return ANCHORS
    if hasattr(FathomConfig, option):
        return getattr(FathomConfig, option)
    options = KVCache if mechanism in METHODS else MECHANISMS[mechanism].options
    fields = {field.name: field for field in dataclasses.fields(options)}
    if option in fields:
        return default_of(fields[option])
    return inspect.signature(METHODS[mechanism]).parameters[option].default


def tables() -> str:
    """Every table of a paper, with its command and the sizes of its tiers."""
    rows = []
    for name, path in packaged_recipes().items():
        if name.startswith("papers/"):
            table = load_table(path)
            sizes = ", ".join(table.tiers["full"].sizes)
            rows.append((table.paper, table.table, f"`fathom compare {name}`", str(len(table.rows)), sizes))
    return "\n".join(_text(("paper", "table", "command", "arms", "sizes of `--tier full`"), rows)) + "\n"


def _text(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a table whose columns are all text."""
    first, _, *rest = markdown_table(head, rows)
    yield from (first, "| " + " | ".join(["---"] * len(head)) + " |", *rest)

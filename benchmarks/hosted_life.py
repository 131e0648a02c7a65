"""A family's own layers through everything: trained, killed, resumed, exported, opened elsewhere, served, deepened.

    python benchmarks/hosted_life.py qwen3_moe --out benchmarks/results/hosted-life-qwen3_moe.json
    python benchmarks/hosted_life.py qwen3_5_text --out benchmarks/results/hosted-life-qwen3_5_text.json

A small Qwen3-MoE or Qwen3.5 gets a loop and hyper-connections and is trained 200 steps by `fathom train`. A second run
is sent SIGKILL in the middle and resumed: its weights must have the hash of the first run's. The export is opened in a
process without Fathom and served. The plain model is exported as its family and deepened.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fathom.checkpoints.open import open_checkpoint
from fathom.cli.main import main as cli
from fathom.report.provenance import provenance

TREE = Path(__file__).parents[1]
SIZE: dict[str, Any] = dict(vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
SIZE |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, output_router_logits=True)
DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
)
DELTA |= dict(layer_types=["linear_attention", "full_attention"])
SHAPES: dict[str, dict[str, Any]] = {"qwen3_moe": EXPERTS, "qwen3_5_text": DELTA}
MECHANISMS = ("model.recurrence=loop", "model.recurrence_options={trips: 2}", "model.residual=hyper_connections")
STEPS, KILLED, WORDS = 200, 110, 16
"""Of training; the step in whose log it is killed; tokens of every completion."""
PROMPT = "A mixture of experts"
ELSEWHERE = """
import sys
sys.modules["fathom"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = tokenizer(sys.argv[2], return_tensors="pt")
print(model.generate(**ids, max_new_tokens=int(sys.argv[3]), do_sample=False)[0, ids.input_ids.shape[1] :].tolist())
"""


def main() -> int:
    """One family; the exit code is 0 if everything holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(SHAPES))
    parser.add_argument("--work", type=Path, help="a folder in which it goes on where it was stopped")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {**vars(provenance()), "steps": STEPS, "mechanisms": MECHANISMS}
    with tempfile.TemporaryDirectory() as place:
        folder = options.work or Path(place)
        if not (folder / "data").exists():
            fathom("prepare", TREE / "docs", "--train-tokenizer", 384, "--held-out", 0.1, "--out", folder / "data")
        found |= life(options.family, folder / "data", folder)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if all(value for key, value in found.items() if key.startswith("same_")) else 1


def life(name: str, data: Path, folder: Path) -> dict[str, Any]:
    """One family."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZE, **SHAPES[name])
    if not (folder / "base").exists():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
        AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(folder / "base")
    recipe = train_words(folder / "base", data)
    fathom(*recipe, *MECHANISMS, "--run", folder / "whole")
    killed([*recipe, *MECHANISMS, "--run", folder / "killed"], folder / "killed")
    fathom("train", folder / "killed")
    hashes = [weights_hash(folder / run / "model") for run in ("whole", "killed")]
    fathom("export", folder / "killed", "--to", folder / "export")
    model, tokenizer = open_checkpoint(folder / "export")
    ids = tokenizer(PROMPT, return_tensors="pt")
    texts = model.generate(**ids, max_new_tokens=WORDS, do_sample=False)[0, ids.input_ids.shape[1] :].tolist()
    alone = run([sys.executable, "-c", ELSEWHERE, str(folder / "export"), PROMPT, str(WORDS)], cwd=folder)
    fathom("export", folder / "base", "--to", folder / "family", "--as", "native")
    deep = ("--with", "loop+hyper_connections", "--out", folder / "deep")
    fathom("deepen", folder / "family", *deep)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "family")
    deepened, _ = open_checkpoint(folder / "deep")
    with torch.no_grad():
        change = (theirs(**ids).logits - deepened(**ids).logits).abs().max().item()
    losses = [json.loads(line).get("loss") for line in (folder / "whole/metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": [losses[0], losses[-1]],
        "killed_after_step": KILLED,
        "sha256": hashes,
        "same_weights_after_kill": hashes[0] == hashes[1],
        "same_text_without_fathom": json.loads(alone.splitlines()[-1]) == texts,
        "same_text_served": served(folder / "export") == tokenizer.decode(texts),
        "deepened_has": [deepened.config.recurrence, deepened.config.residual],
        "deepened_moves_logits_by": change,
        "same_logits_deepened": change < 1e-5,
    }


def train_words(base: Path, data: Path) -> list[Any]:
    """`fathom train` of a family's directory."""
    model = ("model=null", f"model.from_pretrained={base}", f"data.directory={data}", "data.sequence_length=32")
    often = ("train.checkpoint_every=25", "train.keep_last=9", "train.log_every=1", "evaluate.every=0")
    size = ("train.tokens_per_step=128", "train.micro_batch=4", "evaluate.tokens=1024", "optim.lr=3e-3")
    return ["train", "tiny", *model, f"train.steps={STEPS}", *often, *size, "train.device=cpu"]


def command(words: tuple[Any, ...] | list[Any]) -> list[str]:
    """`fathom WORDS`."""
    return [sys.executable, "-m", "fathom", *map(str, words)]


def run(words: list[str], **where: Any) -> str:
    """What a command prints; it must end well."""
    done = subprocess.run(words, capture_output=True, text=True, **where)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr[-3000:]}")
    return done.stdout


def fathom(*words: Any) -> None:
    """`fathom WORDS` in this process."""
    print("fathom", *words, file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli([str(word) for word in words])
    if code:
        raise SystemExit(f"it ended with {code}")


def killed(words: list[Any], out: Path) -> None:
    """Begin a run and kill it past its middle, once."""
    log, marker = out / "metrics.jsonl", out.parent / "killed.marker"
    if marker.exists():
        return
    process = subprocess.Popen(command(words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not log.exists() or log.read_text().count("\n") < KILLED):
        time.sleep(0.1)
    process.kill()  # SIGKILL
    if process.wait() != -9:
        raise SystemExit("the run ended before it was killed")
    marker.touch()


def weights_hash(directory: Path) -> str:
    """Of every weight file of a model."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def served(directory: Path) -> str:
    """The text of one completion over HTTP."""
    words = command(["serve", directory, "--port", 0, "--trust-remote-code"])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as server:
        try:
            assert server.stdout is not None
            match = re.search(r"http://[\d.]+:\d+", server.stdout.readline())
            assert match is not None
            body = {"model": directory.name, "prompt": PROMPT, "max_tokens": WORDS, "temperature": 0}
            request = urllib.request.Request(f"{match[0]}/v1/completions", json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=120) as answer:
                made = json.load(answer)
        finally:
            server.terminate()
    return str(made["choices"][0]["text"])


if __name__ == "__main__":
    raise SystemExit(main())

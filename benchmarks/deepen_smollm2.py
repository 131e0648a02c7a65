"""What depth is worth to a real model: SmolLM2 deepened and healed with LoRA, beside a control that is trained alike.

    python benchmarks/deepen_smollm2.py MODEL --shards DIR [--replay DIR] --layers A-B --text domain=FILE other=FILE
        --work DIR --out FILE.json [--tokens 300000] [--precision bf16]

The models are Depth-Attention, a loop over the layers A to B, both, and the control, which has no mechanism. Each one's
learning rate is the best of three at a sixth of the tokens; then each is trained once for every seed, no teacher.
With bf16, training and scoring compute in bfloat16, the base's scoring too.
Before they are trained, the deepened models are compared with the base: logits of a prompt, and greedy text.
FILE.json is written after every run, with the score of each held-out document, and is read first: what it holds is not
run again, on another machine neither. A run that was stopped resumes in the working directory. Intervals are over
documents.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from fathom.checkpoints.open import open_checkpoint
from fathom.deepen.heal import HEAL, Healing
from fathom.deepen.request import parse_request
from fathom.deepen.write import deepen
from fathom.evaluation.deepened import effects_of, time_decoding
from fathom.evaluation.perplexity import DomainScore
from fathom.evaluation.scoring import Checkpoint, EvaluationSettings, name_checkpoints, run
from fathom.recipe import load_recipe
from fathom.report.files import read_json, write_json
from fathom.report.provenance import provenance
from fathom.training import train

RATES = (1e-4, 3e-4, 1e-3)
REPLAY = 0.2
"""The share of the replayed text."""
LENGTH = 256
ROWS = 8
"""Sequences in a step."""
HELD_OUT = 32_768
"""Tokens of the validation that chooses the rate."""
PROMPT, GREEDY = "The depth of a sounding is told in fathoms, since", 200
BASE, CONTROL = "base", "control"

Arm = tuple[str, str | None] | None
"""A mechanism and the layers of its loop; the control has none."""


def main() -> None:
    """Train what is missing, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shards", type=Path, required=True, help="of `fathom prepare`, by the model's tokenizer")
    parser.add_argument("--replay", type=Path, help="shards of general text, a fifth of the training")
    parser.add_argument("--layers", required=True, help="the loop's, from deepen_spans.py")
    parser.add_argument("--damping", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--text", nargs="+", required=True, help="held-out texts, the training's domain first")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    loop = f"loop:damping={options.damping}"
    arms: dict[str, Arm] = {
        CONTROL: None,
        "depth_attention": ("depth_attention", None),
        "loop": (loop, options.layers),
        "loop+depth_attention": (f"{loop}+depth_attention", options.layers),
    }
    log: dict[str, Any] = read_json(options.out) if options.out.exists() else {"tuning": {}, "runs": {}}
    log["provenance"] = vars(provenance())
    if BASE not in log["runs"]:
        log["runs"][BASE] = {"scores": scores(options.model, BASE, options)}
        write_json(options.out, log)
    for name, arm in arms.items():
        if arm and name not in log.setdefault("identity", {}):
            log["identity"][name] = identity(deepened(name, arm, options), options.model)
            write_json(options.out, log)
        for rate in RATES:
            if f"{rate:g}" not in log["tuning"].setdefault(name, {}):
                log["tuning"][name][f"{rate:g}"] = trained(name, arm, options, rate, options.tokens // 6, 0)
                write_json(options.out, log)
    for seed in range(options.seeds):
        for name, arm in arms.items():
            if (key := f"{name}, seed {seed}") not in log["runs"]:
                tuned = log["tuning"][name]
                rate = float(min(tuned, key=lambda each: tuned[each]["held_out_loss"]))
                found = trained(name, arm, options, rate, options.tokens, seed)
                model = place_of(name, rate, options.tokens, seed, options) / "model"
                log["runs"][key] = {"lr": rate, **found, "scores": scores(model, name, options)}
                write_json(options.out, log)
        log[f"effects, seed {seed}"] = effects(log["runs"], list(arms), seed, options)
        write_json(options.out, log)


def place_of(name: str, rate: float, tokens: int, seed: int, options: argparse.Namespace) -> Path:
    """The run's directory."""
    return options.work / "runs" / f"{name}-rate{rate:g}-tokens{tokens}-seed{seed}"


def deepened(name: str, arm: tuple[str, str | None], options: argparse.Namespace) -> Path:
    """The base with a mechanism, made once."""
    directory = options.work / "models" / name
    if not (directory / HEAL).exists():
        deepen(options.model, parse_request(*arm), directory, Healing(lora=True))
    return directory


@torch.inference_mode()
def identity(deeper: Path, base: Path) -> dict[str, Any]:
    """How far the logits of a prompt are apart, and how many greedy tokens are equal before the first that is not."""
    logits, texts = [], []
    for directory in (deeper, base):
        model, tokenizer = open_checkpoint(directory, "cpu", "float32")
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        logits.append(model(ids).logits)
        settings = {"max_new_tokens": GREEDY, "min_new_tokens": GREEDY, "do_sample": False, "pad_token_id": 0}
        texts.append(model.generate(ids, **settings)[0, ids.shape[1] :])
    unequal = (texts[0] != texts[1]).nonzero().flatten().tolist()
    found = {"bitwise": torch.equal(*logits), "logits": float((logits[0] - logits[1]).abs().max())}
    return {**found, "greedy": GREEDY, "greedy equal": unequal[0] if unequal else GREEDY}


def trained(name: str, arm: Arm, options: argparse.Namespace, rate: float, tokens: int, seed: int) -> dict[str, float]:
    """Train a model, or read what was trained; its held-out loss and seconds."""
    directory = deepened(name if arm else "depth_attention", arm or ("depth_attention", None), options)
    steps = tokens // (ROWS * LENGTH)
    words = [f"data.directory={options.shards}", f"data.sequence_length={LENGTH}", f"optim.lr={rate}"]
    words += [f"train.steps={steps}", f"train.tokens_per_step={ROWS * LENGTH}", "train.micro_batch=4"]
    words += ["train.checkpoint_every=10", "train.keep_last=1", f"train.seed={seed}", "evaluate.every=0"]
    words += [f"train.precision={options.precision}", f"evaluate.tokens={HELD_OUT}"]
    words += ["distill.teacher=null", "train.activation_checkpointing=false"]
    if options.replay:
        words[0] = f"data.mixture={{{options.shards}: {1 - REPLAY}, {options.replay}: {REPLAY}}}"
    if arm is None:
        words += ["model=null", f"model.from_pretrained={options.model}"]
    else:
        words += [f"model.{part}.blend_steps={steps // 2}" for part in parse_request(*arm).opening(steps // 2)]
    result = train(load_recipe(directory / HEAL, words), place_of(name, rate, tokens, seed, options))
    assert result.evaluation is not None
    return {"held_out_loss": result.evaluation.loss, "seconds": result.seconds, "tokens": result.tokens}


def scores(model: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Every held-out document's score, by text."""
    dtype = "bfloat16" if options.precision == "bf16" else "float32"
    settings = EvaluationSettings(perplexity=tuple(options.text), context=LENGTH, dtype=dtype)
    (found,), _ = run([f"{name.replace('+', '_')}={model}"], settings)
    return {text: vars(score) for text, score in found.domains.items()}


def effects(runs: dict[str, Any], names: list[str], seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every model beside the control and the base on every text, in words; and the time of a decoded token."""
    base = checkpoint(BASE, options.model, runs[BASE])
    control, *others = [checkpoint(name, options.model, runs[f"{name}, seed {seed}"]) for name in names]
    found: list[dict[str, Any]] = [said(control, base, None)]
    for one in others:
        deeper = options.work / "models" / one.name
        timed = name_checkpoints([f"deeper={deeper}", f"control={options.model}"], EvaluationSettings())
        speed = time_decoding(timed[0], timed[1])
        found.append(said(one, base, control) | {"speed": speed})
        if speed is not None:
            found[-1]["sentences"].append(speed.sentence(CONTROL))
    return found


def said(one: Checkpoint, base: Checkpoint, control: Checkpoint | None) -> dict[str, Any]:
    """The differences from the base and the control."""
    found = [effect for other in (control, base) if other is not None for effect in effects_of(one, other)]
    return {"model": one.name, "effects": found, "sentences": [*map(str, found)]}


def checkpoint(name: str, directory: Path, logged: dict[str, Any]) -> Checkpoint:
    """A model with the scores that the log holds."""
    domains = {text: DomainScore(**score) for text, score in logged["scores"].items()}
    return Checkpoint(name, directory, EvaluationSettings().open, domains=domains)


if __name__ == "__main__":
    main()

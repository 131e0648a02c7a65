"""What depth is worth to a real model: SmolLM2 deepened and healed with LoRA, beside a control that is trained alike.

    python benchmarks/deepen_smollm2.py MODEL --shards DIR --layers A-B --work DIR --out FILE.json [--tokens 300000]
        [--text domain=FILE other=FILE ...]

Arms: Depth-Attention, a loop over the layers A to B, both, and the control, which has no mechanism. Each arm's learning
rate is the best of three at a sixth of the tokens; then each arm is trained once for every seed. Every run is a run of
`fathom train` in the working directory, so what was stopped resumes; FILE.json is written again after every run with
what has finished, and says which comparisons are missing. Intervals are over documents.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from fathom.deepen.heal import HEAL
from fathom.deepen.request import parse_request
from fathom.deepen.write import deepen
from fathom.evaluation.deepened import effects_of, sentence, speed_sentence, time_decoding
from fathom.evaluation.scoring import Settings, run
from fathom.recipe import load_recipe
from fathom.report.files import write_json
from fathom.report.provenance import provenance
from fathom.training import train

RATES = (1e-4, 3e-4, 1e-3)
LENGTH = 256
ROWS = 8
"""Rows of a step."""
CONTROL = "control"


def main() -> None:
    """Train what is missing, and write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shards", type=Path, required=True, help="of `fathom prepare`, by the model's tokenizer")
    parser.add_argument("--layers", required=True, help="the loop's, from deepen_spans.py")
    parser.add_argument("--damping", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--text", nargs="+", default=(), help="held-out texts, the training's domain first")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    loop = f"loop:damping={options.damping}"
    arms = {
        CONTROL: None,
        "depth_attention": ("depth_attention", None),
        "loop": (loop, options.layers),
        "loop+depth_attention": (f"{loop}+depth_attention", options.layers),
    }
    log: dict[str, object] = {"provenance": provenance(), "arms": {}, "effects": [], "sentences": []}
    rates = {name: tuned(name, arm, options) for name, arm in arms.items()}
    for seed in range(options.seeds):
        for name, arm in arms.items():
            steps = options.tokens // (ROWS * LENGTH)
            found = healed(name, arm, options, rates[name], steps, seed, f"{name}-seed{seed}")
            log["arms"][f"{name}, seed {seed}"] = {"lr": rates[name], **found}  # type: ignore[index]
            write_json(options.out, log)
        log["effects"] += compared(options, list(arms), seed, log)  # type: ignore[operator]
        write_json(options.out, log)


def tuned(name: str, arm: tuple[str, str | None] | None, options: argparse.Namespace) -> float:
    """The learning rate with the least held-out loss after a sixth of the tokens."""
    steps = options.tokens // 6 // (ROWS * LENGTH)
    losses = {
        rate: healed(name, arm, options, rate, steps, 0, f"{name}-rate{rate:g}")["held_out_loss"] for rate in RATES
    }
    return min(losses, key=lambda rate: losses[rate])


def healed(
    name: str,
    arm: tuple[str, str | None] | None,
    options: argparse.Namespace,
    rate: float,
    steps: int,
    seed: int,
    place: str,
) -> dict[str, float]:
    """Train an arm, or read what was trained; its held-out loss and seconds."""
    directory = options.work / "models" / (name if arm else "depth_attention")
    if not (directory / HEAL).exists():
        deepen(options.model, parse_request(*(arm or ("depth_attention", None))), directory)
    words = [f"data.directory={options.shards}", f"data.sequence_length={LENGTH}", f"optim.lr={rate}"]
    words += [f"train.steps={steps}", f"train.tokens_per_step={ROWS * LENGTH}", "train.micro_batch=4"]
    words += ["train.checkpoint_every=10", "train.keep_last=1", f"train.seed={seed}", "evaluate.every=0"]
    if arm is None:
        words += ["model=null", f"model.from_pretrained={options.model}"]
    else:
        for part in parse_request(*arm).opening(steps // 2):
            words.append(f"model.{part}.blend_steps={steps // 2}")
    result = train(load_recipe(directory / HEAL, words), options.work / "runs" / place)
    assert result.evaluation is not None
    return {"held_out_loss": result.evaluation.loss, "seconds": result.seconds, "tokens": result.tokens}


def compared(options: argparse.Namespace, names: list[str], seed: int, log: dict[str, object]) -> list[object]:
    """Every arm beside the control and the base, on every text, and the time of a decoded token."""
    if not options.text:
        return []
    runs = [f"{name.replace('+', '_')}={options.work / 'runs' / f'{name}-seed{seed}' / 'model'}" for name in names]
    settings = Settings(perplexity=tuple(options.text), out=options.work / f"scores-seed{seed}", context=LENGTH)
    (base, control, *others), _ = run([f"base={options.model}", *runs], settings)
    found: list[object] = []
    for one in others:
        effects = [*effects_of(one, control), *effects_of(one, base)]
        speed = time_decoding(one, control)
        found.append({"arm": one.name, "effects": effects, "speed": speed, "settings": asdict(settings)["perplexity"]})
        words = [*map(sentence, effects), *([] if speed is None else [speed_sentence(speed, control.name)])]
        log["sentences"] += [f"{one.name}: {text}" for text in words]  # type: ignore[operator]
    return found


if __name__ == "__main__":
    main()

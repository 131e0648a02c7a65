"""HuRef's necessity experiment, small: what is left of a model whose weights are driven away from their direction.

    python benchmarks/lineage/necessity.py --work DIR --out benchmarks/results/lineage-necessity.json

A small model is trained on demo/data (`make demo` writes it). It is then trained on with λ |cos(θ, θ₀)| added to the
loss, for several λ. λ = 0 is the control, and a new model trained for as many steps is what a thief could have without
the base. Losses are those of held-out text. A run that was stopped resumes.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fathom.checkpoints.open import load
from fathom.lineage.comparison import compare
from fathom.lineage.weights import open_weights
from fathom.recipe import find_recipe, load_recipe
from fathom.report.files import write_json
from fathom.report.provenance import provenance
from fathom.training import train
from fathom.training.away import Away, cosine

SCORES = ("awm_canonical", "ics", "ics_rarest", "ics_canonical", "ics_all_layers", "pcs_2d")


def main() -> None:
    """Train what is missing, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300, help="of the base")
    parser.add_argument("--further", type=int, default=150, help="of every model that goes on")
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 10.0, 30.0, 100.0, 300.0], help="λ")
    options = parser.parse_args()
    work: Path = options.work
    base = made(work / "base", options.steps)
    first, _ = load(work / "base/model")
    theta = {name: weight.detach() for name, weight in first.state_dict().items()}
    log: dict[str, Any] = {**asdict(provenance()), "base": base, "further": options.further, "rows": []}
    for weight in options.weights:
        place = work / f"away-{weight:g}"
        words = ["model=null", f"model.from_pretrained={work / 'base/model'}"]
        row = {"model": f"λ = {weight:g}", **made(place, options.further, words, Away(theta, weight))}
        log["rows"].append(row | measured(work / "base/model", place / "model", theta))
        write_json(options.out, log)
    row = {"model": "new", **made(work / "new", options.further, ["train.seed=1"])}
    log["rows"].append(row | measured(work / "base/model", work / "new/model", theta))
    write_json(options.out, log)


def made(place: Path, steps: int, words: list[str] | None = None, hook: Away | None = None) -> dict[str, Any]:
    """Train a model, or read what was trained; its held-out loss."""
    given = [f"train.steps={steps}", "train.checkpoint_every=50", "evaluate.every=0", *(words or [])]
    recipe = load_recipe(find_recipe("tiny_pondering"), given)
    found = train(recipe, place, callbacks=[] if hook is None else [hook])
    if not found.finished:
        raise SystemExit("stopped; the same command resumes")
    return {"loss": found.evaluation.loss}


def measured(base: Path, place: Path, theta: dict[str, Any]) -> dict[str, Any]:
    """The cosine of all matrices, and the scores of `fathom lineage compare`."""
    model, _ = load(place)
    pairs = [(weight, theta[name]) for name, weight in model.named_parameters() if weight.ndim > 1 and name in theta]
    found = compare(open_weights(base), open_weights(place))
    scores = {name: round(value, 4) for name in SCORES if (value := found.pair.value(name)) is not None}
    return {"cosine": round(cosine(pairs)[0], 4), **scores, "verdict": found.verdict.label}


if __name__ == "__main__":
    main()

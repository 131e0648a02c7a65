"""A mechanism of your own, without a change to Fathom: trained, exported, and opened again."""

from pathlib import Path

import fathom
from gated_mean import GATED_MEAN

RECIPE = Path(__file__).with_name("small.yaml")

if __name__ == "__main__":
    fathom.add_mechanism(GATED_MEAN)  # a package declares an entry point instead
    recipe = fathom.load_recipe(RECIPE, ["model.mixer=gated_mean"])
    result = fathom.train(recipe, "runs/mechanism")
    print(f"held-out loss {result.evaluation.loss:.3f}")
    model, _ = fathom.load("runs/mechanism")
    gates = [f"{layer.self_attn.mixer.gate.sigmoid().item():.2f}" for layer in model.model.layers[1:]]
    print(f"weight of a layer's own value: {', '.join(gates)}")
    print(f"its file travels with the model: {(result.model / 'gated_mean.py').exists()}")

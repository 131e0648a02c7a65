"""Text to token shards, a recipe from Python, a training run, a sample."""

import json
from pathlib import Path

import fathom

TEXT = f"{Path(json.__file__).parent}/*.py"  # files that every Python has; name your own
RECIPE = Path(__file__).with_name("small.yaml")

if __name__ == "__main__":
    # Paragraphs are documents here; with separator=None a file is one.
    options = fathom.PrepareOptions(separator="", file_format="text")
    print(fathom.prepare([TEXT], "data/example", train_tokenizer=512, held_out=0.2, workers=1, options=options))

    recipe = fathom.load_recipe(RECIPE, ["model.mixer=depth_attention", "train.seed=1"])
    result = fathom.train(recipe, "runs/example")
    print(f"held-out loss {result.evaluation.loss:.3f} after {result.step} steps; the model is {result.model}")

    model, tokenizer = fathom.load("runs/example")
    print(fathom.generate(model, tokenizer, "def ", fathom.Sampling(max_new_tokens=20, seed=0)).text)

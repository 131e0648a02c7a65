"""Fathom: decoder language models whose depth does more work.

    import fathom

    fathom.prepare(["corpus"], "data/mine", train_tokenizer=4096)
    recipe = fathom.load_recipe("tiny", ["data.directory=data/mine", "model.mixer=depth_attention"])
    fathom.train(recipe, "runs/mine")
    model, tokenizer = fathom.load("runs/mine")
    print(fathom.generate(model, tokenizer, "It was", fathom.Sampling(max_new_tokens=20)).text)

Importing the package loads none of this, and no torch: a name brings its module when it is first touched. A model's
name, `register()` and `import fathom.models` make our classes known to transformers' Auto classes. What a caller can
put right is a `FathomError`.
"""

import importlib
from typing import TYPE_CHECKING

from fathom._version import __version__

if TYPE_CHECKING:
    from fathom.checkpoints.export import export
    from fathom.checkpoints.open import load
    from fathom.comparison.work import compare_arms as compare
    from fathom.data.prepare import prepare
    from fathom.errors import FathomError
    from fathom.evaluation.scoring import Settings, evaluate
    from fathom.inference.generate import Sampling, generate
    from fathom.lens.look import lens_data as look
    from fathom.lineage.weights import open_model as open_weights
    from fathom.models import FathomConfig, FathomForCausalLM
    from fathom.recipe import Recipe, load_recipe
    from fathom.training.loop import train

__all__ = [
    "FathomConfig",
    "FathomError",
    "FathomForCausalLM",
    "Recipe",
    "Sampling",
    "Settings",
    "__version__",
    "compare",
    "evaluate",
    "export",
    "generate",
    "load",
    "load_recipe",
    "look",
    "open_weights",
    "prepare",
    "register",
    "train",
]

# Where each name lives, and what it is called there.
_HOMES = {
    "FathomConfig": ("fathom.models", "FathomConfig"),
    "FathomError": ("fathom.errors", "FathomError"),
    "FathomForCausalLM": ("fathom.models", "FathomForCausalLM"),
    "Recipe": ("fathom.recipe", "Recipe"),
    "Sampling": ("fathom.inference.generate", "Sampling"),
    "Settings": ("fathom.evaluation.scoring", "Settings"),
    "compare": ("fathom.comparison.work", "compare_arms"),
    "evaluate": ("fathom.evaluation.scoring", "evaluate"),
    "export": ("fathom.checkpoints.export", "export"),
    "generate": ("fathom.inference.generate", "generate"),
    "load": ("fathom.checkpoints.open", "load"),
    "load_recipe": ("fathom.recipe", "load_recipe"),
    "look": ("fathom.lens.look", "lens_data"),
    "open_weights": ("fathom.lineage.weights", "open_model"),
    "prepare": ("fathom.data.prepare", "prepare"),
    "train": ("fathom.training.loop", "train"),
}


def register() -> None:
    """Make Fathom's models known to transformers' Auto classes, as importing `fathom.models` does."""
    importlib.import_module("fathom.models")


if not TYPE_CHECKING:  # or a type checker would take every misspelt name for one of ours

    def __getattr__(name: str) -> object:
        """A public name, from its module (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'fathom' has no attribute {name!r}")
        module, attribute = _HOMES[name]
        value = globals()[name] = getattr(importlib.import_module(module), attribute)
        return value


def __dir__() -> list[str]:
    """The public names, and whatever is already loaded."""
    return sorted({*globals(), *__all__})

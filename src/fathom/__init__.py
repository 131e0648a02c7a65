"""Fathom: decoder language models whose depth does more work.

    import fathom

    fathom.prepare(["corpus"], "data/mine", train_tokenizer=4096)
    recipe = fathom.load_recipe("tiny", ["data.directory=data/mine", "model.mixer=depth_attention"])
    fathom.train(recipe, "runs/mine")
    model, tokenizer = fathom.load("runs/mine")
    print(fathom.generate(model, tokenizer, "It was", fathom.Sampling(max_new_tokens=20)).text)

`import fathom` does not import torch: a name imports its module when it is first used. A model's
name, `register()` and `import fathom.models` register Fathom's classes with transformers' Auto classes. Errors that a
caller can correct are `FathomError`s.
"""

import importlib
from typing import TYPE_CHECKING

from fathom._version import __version__

if TYPE_CHECKING:
    from fathom.checkpoints.export import export as export
    from fathom.checkpoints.families.layouts import add_family as add_family
    from fathom.checkpoints.open import load as load
    from fathom.checkpoints.same_logits import check as check
    from fathom.corpus.prepare import PrepareOptions as PrepareOptions
    from fathom.corpus.prepare import prepare as prepare
    from fathom.errors import FathomError as FathomError
    from fathom.evaluation.scoring import EvaluationSettings as EvaluationSettings
    from fathom.evaluation.scoring import evaluate as evaluate
    from fathom.experiments.compare import compare as compare
    from fathom.inference.generate import generate as generate
    from fathom.inference.settings import Sampling as Sampling
    from fathom.lens.look import look as look
    from fathom.lineage.weights import open_weights as open_weights
    from fathom.models import FathomConfig as FathomConfig
    from fathom.models import FathomForCausalLM as FathomForCausalLM
    from fathom.models import add_mechanism as add_mechanism
    from fathom.recipe import Recipe as Recipe
    from fathom.recipe import load_recipe as load_recipe
    from fathom.training.hooks import Hook as Hook
    from fathom.training.loop import train as train

# The module that each name comes from.
_HOMES = {
    "EvaluationSettings": "fathom.evaluation.scoring",
    "FathomConfig": "fathom.models",
    "FathomError": "fathom.errors",
    "FathomForCausalLM": "fathom.models",
    "Hook": "fathom.training.hooks",
    "PrepareOptions": "fathom.corpus.prepare",
    "Recipe": "fathom.recipe",
    "Sampling": "fathom.inference.settings",
    "add_family": "fathom.checkpoints.families.layouts",
    "add_mechanism": "fathom.models",
    "check": "fathom.checkpoints.same_logits",
    "compare": "fathom.experiments.compare",
    "evaluate": "fathom.evaluation.scoring",
    "export": "fathom.checkpoints.export",
    "generate": "fathom.inference.generate",
    "load": "fathom.checkpoints.open",
    "load_recipe": "fathom.recipe",
    "look": "fathom.lens.look",
    "open_weights": "fathom.lineage.weights",
    "prepare": "fathom.corpus.prepare",
    "train": "fathom.training.loop",
}
__all__ = ["__version__", "register", *_HOMES]


def register() -> None:
    """Register Fathom's models with transformers' Auto classes, and the model families that Fathom opens as its own."""
    importlib.import_module("fathom.checkpoints.families")


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from the module that defines it, when the name is first used (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'fathom' has no attribute {name!r}")
        if _HOMES[name] == "fathom.models":
            register()
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    """The public names and the package's current globals, for `dir(fathom)`."""
    return sorted({*globals(), *__all__})

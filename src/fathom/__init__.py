"""Fathom: decoder language models whose depth does more work.

Importing it registers `FathomConfig` and the models with transformers' Auto classes. The command line registers them
when a command needs a model, so that `fathom --help` does not wait for torch.
"""

import sys
from pathlib import Path

from fathom._version import __version__

__all__ = ["__version__", "register"]


def register() -> None:
    """Tell transformers' Auto classes what a `fathom` model is."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from fathom.models import FathomConfig, FathomForCausalLM, FathomModel

    AutoConfig.register(FathomConfig.model_type, FathomConfig, exist_ok=True)
    AutoModel.register(FathomConfig, FathomModel, exist_ok=True)
    AutoModelForCausalLM.register(FathomConfig, FathomForCausalLM, exist_ok=True)


if Path(getattr(sys, "argv", [""])[0] or "").stem != "fathom":
    register()

"""The decoder and its mechanisms. This folder is flat because it travels inside every exported checkpoint."""

from .configuration import FathomConfig
from .modeling import FathomForCausalLM, FathomModel

__all__ = ["FathomConfig", "FathomForCausalLM", "FathomModel"]

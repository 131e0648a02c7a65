"""Checkpoints of the zoo: a config, named tensors and a tokenizer in a directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fathom.models import FathomConfig
from fathom.models.modeling import FathomForCausalLM

NESTED = "model.language_model."


@dataclass
class Checkpoint:
    """A model at rest."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: Path

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Everything of a single-file checkpoint."""
        config = json.loads((path / "config.json").read_text())
        return cls(config, load_file(path / "model.safetensors"), path / "tokenizer.json")

    def write(self, path: Path) -> None:
        """Whole or not at all: the directory appears when it is complete."""
        new = path.with_name(f".{path.name}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        (new / "config.json").write_text(json.dumps(self.config, indent=1))
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}, new / "model.safetensors"
        )
        shutil.copyfile(self.tokenizer, new / "tokenizer.json")
        new.rename(path)

    def model(self) -> FathomForCausalLM:
        """The live decoder; what surrounds it in a multimodal checkpoint is left out."""
        config = self.config.get("text_config", self.config)
        names = {name.replace(NESTED, "model."): tensor for name, tensor in self.tensors.items()}
        model = FathomForCausalLM(
            FathomConfig(**{k: v for k, v in config.items() if k not in {"auto_map", "model_type"}})
        )
        model.load_state_dict(names, strict=False)
        model.tie_weights()
        return model.float()

    def of(self, model: FathomForCausalLM) -> Checkpoint:
        """The same directory with the weights that a live model has by now."""
        tied = model.config.tie_word_embeddings
        tensors = {n: t.detach() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
        return Checkpoint(dict(self.config), tensors, self.tokenizer)

    def map(self, edit: Callable[[str, Tensor], Tensor]) -> Checkpoint:
        """Every tensor edited by (name, tensor)."""
        return Checkpoint(dict(self.config), {name: edit(name, t) for name, t in self.tensors.items()}, self.tokenizer)

    @property
    def layers(self) -> int:
        """How deep it is."""
        return int(self.config["num_hidden_layers"])


def in_layers(name: str) -> bool:
    """Whether a tensor belongs to a layer; the ends of the stack do not."""
    return ".layers." in name


def layer_of(name: str) -> int:
    """The layer that a tensor belongs to."""
    return int(name.split(".layers.")[1].split(".")[0])


def renumbered(name: str, index: int) -> str:
    """The same tensor in another layer."""
    before, after = name.split(".layers.")
    return f"{before}.layers.{index}.{after.split('.', 1)[1]}"


def matrix(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is one of a layer's weight matrices."""
    return in_layers(name) and tensor.ndim == 2


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)

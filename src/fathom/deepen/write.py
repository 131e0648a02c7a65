"""Add mechanisms to a pretrained model and write a checkpoint, which computes the same function as the model if the
mechanisms start switched off.

`request.py` switches off those whose declaration has `closed`. `heal.py` makes the recipe that opens them in training;
`models/pretrained.py` (`set_step`) warns of a training that never opens them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

from fathom.checkpoints.export import export, require_replaceable
from fathom.checkpoints.file_names import CONFIG, HEAL, MODEL
from fathom.checkpoints.from_gguf import is_gguf
from fathom.checkpoints.hub import repository
from fathom.checkpoints.runs import Opened, open_decoder, open_source, read_config
from fathom.deepen.heal import Healing, Road, heal_recipe
from fathom.deepen.request import Request
from fathom.errors import SettingsError
from fathom.models.configuration import FathomConfig
from fathom.models.cost import cache_bytes_per_token, count_parameters, flops_per_token
from fathom.models.modeling import FathomForCausalLM
from fathom.report.files import require_directory
from fathom.training.build import initialize

SAMPLE = "To fathom a thing is to measure its depth, and after much thought to understand it. The sea is deep."
CONTEXT = 512
"""Length of the context over which FLOPs are averaged."""


@dataclass(frozen=True)
class Sizes:
    """A model's number of parameters, and its FLOPs and cache bytes per token."""

    parameters: int
    flops_per_token: float
    """FLOPs of decoding a token, mean over a context of `context` tokens."""
    cache_bytes_per_token: int
    """Bytes of keys and values, at two bytes a number."""
    context: int
    """`CONTEXT`, or less for a model that reads less."""

    @classmethod
    def of(cls, config: FathomConfig) -> Sizes:
        """The sizes of a model."""
        length = min(CONTEXT, config.max_position_embeddings)
        return cls(count_parameters(config), flops_per_token(config, length), cache_bytes_per_token(config), length)


@dataclass(frozen=True)
class Deepened:
    """A summary of the written checkpoint."""

    directory: Path
    mechanism: str
    recipe: Path
    """The healing recipe."""
    base: Sizes
    deeper: Sizes
    deviation: float
    """The largest difference of a logit from the base model's, on a short text; 0 means bitwise equal."""
    exact: bool
    """Whether the model computes the same as the base, up to rounding, because the mechanisms are switched off."""
    tokenizer: bool
    """Whether the model has a tokenizer."""
    kept: Path | None = None
    """The recipe that was there, such as an edited one, if it differs from the new one."""
    opened: tuple[str, ...] = ()
    """Mechanisms that the base model holds closed, as `axis=name`; the recipe opens them too."""


def deepen(source: str | Path, request: Request, out: str | Path, healing: Healing | None = None) -> Deepened:
    """Write a model with added mechanisms, and the recipe that trains it; returns a summary.

    Args:
        source: A model directory of any family that opens, a GGUF file, a run, or `org/name[@revision]` on the Hub.
        request: Which mechanisms, as `parse_request` reads them.
        out: The directory to write.
        healing: How the recipe trains it.
    """
    where, out = Path(source), Path(out)
    if not where.exists() and repository(str(source)) is None:
        raise SettingsError(f"{source}: neither a directory nor a name on the Hub (org/name)")
    require_replaceable(out, where, where / MODEL)
    if (out / CONFIG).exists() and not (out / HEAL).exists():
        raise SettingsError(f"{out} holds a model that `fathom deepen` did not write; choose another directory")
    require_directory(out, SettingsError)
    logging.disable_progress_bar()
    opened = open_source(where)
    base = opened.model.eval()
    config = deeper_config(base.config, request)
    model = deeper_model(base, config)
    # No recipe may name a GGUF file; the closed mechanism computes what the file's model does.
    base_name = str(out) if is_gguf(where) else str(source)
    text = heal_recipe(Road(out, base_name), config, request, healing or Healing())
    recipe = out / HEAL
    kept, earlier = _earlier(recipe, text.encode())
    export(model, out, opened.tokenizer, also={**earlier, HEAL: text.encode()})  # replaces the directory
    deviation = written_deviation(opened, out)
    sizes = Sizes.of(base.config), Sizes.of(config)
    exact = deviation == 0 or request.exact(config)
    reopened = tuple(f"{axis}={getattr(config, axis)}" for axis in request.left_closed(config))
    return Deepened(out, request.name, recipe, *sizes, deviation, exact, opened.tokenizer is not None, kept, reopened)


def _earlier(recipe: Path, text: bytes) -> tuple[Path | None, dict[str, bytes]]:
    """Earlier recipes of a directory to keep as `heal.yaml.old` and so on: the path for the current recipe if the new
    text differs from it, and the contents of all."""
    paths = sorted(recipe.parent.glob(f"{recipe.name}.old*"))
    found = {path.name: path.read_bytes() for path in paths if path.is_file()}
    held = recipe.read_bytes() if recipe.is_file() else text
    if held == text:
        return None, found
    names = (f"{recipe.name}.old{number or ''}" for number in count())
    kept = next(name for name in names if found.get(name, held) == held)
    return recipe.with_name(kept), found | {kept: held}


def deeper_config(config: FathomConfig, request: Request) -> FathomConfig:
    """The model's configuration with the mechanisms; an invalid option is a `SettingsError` of one line."""
    keys = request.keys(config)
    try:
        return FathomConfig.from_dict(config.to_dict(), **keys)
    except ValueError as error:
        raise SettingsError(f"mechanism={request.name}: {' '.join(str(error).split())}") from error


def deeper_model(base: FathomForCausalLM, config: FathomConfig) -> FathomForCausalLM:
    """Load a model's weights into a new model with another configuration. New parameters are initialised as in
    training, with a fixed seed."""
    model, info = FathomForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=base.state_dict(),
        state_config=base.config.to_dict(),
        dtype=base.dtype,
        output_loading_info=True,
    )
    initialize(model, 0, info["missing_keys"])
    model.generation_config = base.generation_config
    return model.eval()


@torch.no_grad()
def written_deviation(opened: Opened, out: Path) -> float:
    """The largest difference of a logit, on a short text, between the model and the written checkpoint when it is read
    back."""
    again = open_decoder(out, read_config(out), dtype=opened.model.dtype).eval()
    ids = _sample(opened)
    logits = [model(input_ids=ids, use_cache=False).logits.float() for model in (opened.model, again)]
    return float((logits[0] - logits[1]).abs().max())


def _sample(opened: Opened) -> Tensor:
    """The tokens of a short text, or random tokens if the model has no tokenizer."""
    config = opened.model.config
    if opened.tokenizer is None:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (1, 32), generator=draw)
    else:
        ids = torch.tensor([opened.tokenizer(SAMPLE)["input_ids"]])
    return ids[:, : config.max_position_embeddings].to(opened.model.device)

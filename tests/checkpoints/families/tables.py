"""The tables of families in `docs/how-to/checkpoints.md`, read from the families' declarations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from fathom.checkpoints.families import hosted as hosted_reader
from fathom.checkpoints.families.family import Family
from fathom.checkpoints.families.layouts import CLOSED, HOSTS
from fathom.checkpoints.families.registry import NATIVE, PUBLISHED, is_hosted
from fathom.models import FathomConfig, FathomModel
from tests.models.hosts.cases import configured
from tests.reference import table


def families() -> str:
    """Every family that opens as Fathom's decoder: what it opens, and its exceptions."""
    rows = [(f"`{one.name}`", one.opens, "; ".join(exceptions(one))) for one in NATIVE]
    rows += [(f"`{one.kind}`", one.opens, one.note) for one in PUBLISHED if one.opens]
    return "\n".join(table(("family", "opens", "exceptions"), rows)) + "\n"


def exceptions(family: Family) -> Iterator[str]:
    """What a family refuses, and where it differs from its own class."""
    if family.note:
        yield family.note
    if family.off:
        yield "refused: " + ", ".join(f"`{key}`" for key in family.off)
    if family.rounding is not None:
        most = f"{family.rounding.float32:.0e}".replace("e-0", "e-")
        yield f"logits differ by up to {most} of the largest in float32: {family.rounding.reason}"


TRIED: dict[str, dict[str, Any]] = {
    "loops": {"recurrence": "loop"},
    "residuals": {"residual": "hyper_connections"},
    "mixers": {"mixer": "depth_attention", "mixer_options": {"stride": 1}},
    "halting, views, `kv: first`": {"recurrence": "ponder3"},
}
"""By column of the table: a mechanism for which the code is asked."""


def hosted() -> str:
    """Every family with its own layers: of what kind they are, which backends its class has, and what it can have."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(filter(is_hosted, HOSTS)):
        config = small(name)
        backends = "eager, SDPA" if MODEL_MAPPING[CONFIG_MAPPING[name]]._supports_sdpa else "eager"
        alike.setdefault((kind(config), backends, *(can(name, **one) for one in TRIED.values())), []).append(
            f"`{name}`"
        )
    rows = [(", ".join(names), *row) for row, names in sorted(alike.items())]
    return "\n".join(table(("families", "kind", "float32 and bfloat16", *TRIED), rows)) + "\n"


def small(name: str, **mechanism: Any) -> FathomConfig:
    """A family's small shape, read as from its file."""
    theirs = configured(name)
    return FathomConfig(**hosted_reader.configuration({**theirs.to_dict(), "model_type": name}), **mechanism)


def can(name: str, **mechanism: Any) -> str:
    """Whether the code allows a mechanism."""
    try:
        with torch.device("meta"):
            FathomModel(small(name, **mechanism))
    except ValueError:
        return "no"
    return "yes"


def closed() -> str:
    """Every other type of transformers with a causal language model, by the reason why it does not open."""
    reasons: dict[str, list[str]] = {}
    for name in sorted(CLOSED):
        reasons.setdefault(CLOSED[name], []).append(f"`{name}`")
    return "\n".join(table(("why", "types"), [(why, ", ".join(reasons[why])) for why in sorted(reasons)])) + "\n"


def kind(config: FathomConfig) -> str:
    """What sets a family's layers apart: layers with a state, latent keys and values, experts, or nothing."""
    parts = {
        "states": len(config.keyed_layers) < config.num_hidden_layers,
        "latents": any(one["latent"] for one in config.host_layouts),
        "experts": any("expert" in key for key in CONFIG_MAPPING[config.host].__dataclass_fields__),
    }
    return ", ".join(part for part, has in parts.items() if has) or "dense"

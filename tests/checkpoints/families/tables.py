"""The tables of families in `docs/how-to/checkpoints.md`, read from the families' declarations."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import CONFIG_MAPPING

from fathom.checkpoints.families.family import Family
from fathom.checkpoints.families.layouts import HOSTS
from fathom.checkpoints.families.registry import NATIVE, PUBLISHED, is_hosted
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


def hosted() -> str:
    """Every family with its own layers, by what they are made of."""
    kinds: dict[str, list[str]] = {}
    for name in filter(is_hosted, HOSTS):
        kinds.setdefault(kind(name), []).append(f"`{name}`")
    return "\n".join(table(("kind", "families"), [(one, ", ".join(kinds[one])) for one in sorted(kinds)])) + "\n"


def kind(name: str) -> str:
    """What sets a family's layers apart: parts with a state, latent keys and values, experts, or nothing."""
    layouts, keys = HOSTS[name].layouts, CONFIG_MAPPING[name].__dataclass_fields__
    parts = {
        "states": len({part for one in layouts for part in one.token}) > 1,
        "latent attention": any(one.latent for one in layouts),
        "experts": any("expert" in key for key in keys),
    }
    return " and ".join(part for part, has in parts.items() if has) or "dense"

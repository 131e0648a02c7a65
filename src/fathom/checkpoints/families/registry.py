"""The supported model families, and how checkpoints of each are read and written.

`Families.configuration` decides which reader gets a `config.json`: `lumia.py`, `nanbeige.py` and `ouro.py` for released
models with a depth mechanism, then `hosted.py`, then a family's own file, with `ponderlm.py` for the keys of a
pondering model. `keys.py` refuses keys by name. `../export.py` (`as_native`) refuses to write a model with a mechanism
as another family.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from fathom.checkpoints.families import hosted, ponderlm
from fathom.checkpoints.families.family import Family, Values, kept
from fathom.checkpoints.families.gemma import GEMMA, GEMMA2, GEMMA3
from fathom.checkpoints.families.gpt2 import GPT2
from fathom.checkpoints.families.gpt_neox import GPT_NEOX
from fathom.checkpoints.families.granite import GRANITE
from fathom.checkpoints.families.layouts import CLOSED, HOSTS
from fathom.checkpoints.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from fathom.checkpoints.families.lumia import LUMIA
from fathom.checkpoints.families.nanbeige import NANBEIGE
from fathom.checkpoints.families.olmo2 import OLMO2
from fathom.checkpoints.families.opt import OPT
from fathom.checkpoints.families.ouro import OURO
from fathom.checkpoints.families.phi3 import PHI3
from fathom.checkpoints.families.smollm3 import SMOLLM3
from fathom.checkpoints.families.tensor_names import read_tensors
from fathom.models import FathomConfig, foreign

NATIVE = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GPT_NEOX, GPT2, OPT, OLMO2, GEMMA, GEMMA2, GEMMA3, GRANITE, PHI3)
"""Families that transformers has a class of its own for, in the order in which one is looked for."""
FAMILIES = {family.name: family for family in NATIVE}
PUBLISHED = (LUMIA, NANBEIGE, OURO)
"""Checkpoints with depth of their own, which transformers alone does not open."""
ORIGIN = ("architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Keys of a `config.json` that say who wrote it, not what the model is."""


class Families(foreign.Reader):
    """Reads `config.json` and tensors of every family."""

    def configuration(self, theirs: Values, where: str) -> Values:
        """The values of Fathom's configuration for a `config.json`; raises a one-line `ValueError` if it cannot be
        opened."""
        for published in PUBLISHED:
            if published.owns(theirs):
                return published.configuration(theirs)
        theirs = hosted.text_of(theirs)
        if is_hosted(theirs.get("model_type")):
            return hosted.configuration(theirs)
        family = FAMILIES.get(str(theirs.get("model_type")))
        if family is None:
            kind = str(theirs.get("model_type"))
            why = f": {CLOSED[kind]}" if kind in CLOSED else f"; Fathom opens {', '.join(known())}"
            raise ValueError(f"{where} is a {kind} model{why}")
        try:
            ours = to_ours(family, ponderlm.without(theirs))
        except (StrictDataclassError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
        return {**ours, **ponderlm.meaning(theirs, ours["hidden_size"])}

    def tensors(self, directory: Path, theirs: Values, config: FathomConfig) -> Mapping[str, Any] | None:
        """A checkpoint's tensors under Fathom's names; None if it uses these names already."""
        for published in PUBLISHED:
            if published.owns(theirs):
                return published.tensors(directory, config)
        if config.host:
            return None
        family = FAMILIES[str(theirs["model_type"])]
        unread = (*family.unread, *ponderlm.UNREAD) if ponderlm.is_ponderlm(theirs) else family.unread
        return read_tensors(directory, family.rules, unread, config) if family.rules else None


def is_hosted(kind: object) -> bool:
    """Whether Fathom runs a `model_type` with transformers' own layers, not with its own decoder."""
    return kind in HOSTS and kind not in FAMILIES


def known() -> list[str]:
    """Every supported `model_type`."""
    return sorted({*FAMILIES, *HOSTS, *(published.kind for published in PUBLISHED), FathomConfig.model_type})


def to_ours(family: Family, theirs: Values) -> Values:
    """The values of Fathom's configuration for a family's `config.json`."""
    native = {key: value for key, value in theirs.items() if key not in ORIGIN}
    return {**family.read(theirs), **kept(theirs), "model_type": FathomConfig.model_type, "native": native}


def family_of(config: FathomConfig) -> Family | None:
    """The family that a configuration was opened from, else the first that can represent it."""
    named = FAMILIES.get(str(config.native.get("model_type")))
    for family in [named] if named is not None else NATIVE:
        if unlike(family, config) is None:
            return family
    return None


def unlike(family: Family, config: FathomConfig) -> str | None:
    """Why a configuration does not fit a family, in words that name a key; None if it fits."""
    try:
        again = FathomConfig(**family.read(_native_values(family, config)))
    except (ValueError, TypeError, StrictDataclassError):
        return "this configuration"  # the family's own class refuses it
    skipped = {
        "native",
        "ignore_keys",
        "dtype",
        "transformers_version",
        "architectures",
        "use_sliding_window",
        "max_window_layers",
    }
    skipped.add("base_model_tp_plan")  # it follows from the others
    for key in FathomConfig.__dataclass_fields__:
        if key not in skipped and getattr(again, key, None) != (value := getattr(config, key, None)):
            return f"{key}={value}"
    return None


def native_config(family: Family, config: FathomConfig) -> PreTrainedConfig:
    """Convert a Fathom configuration to a family's configuration class."""
    return AutoConfig.for_model(**_native_values(family, config))


def _native_values(family: Family, config: FathomConfig) -> Values:
    opened = config.native if config.native.get("model_type") == family.name else {}
    cls = CONFIG_MAPPING[family.name]
    fields = {*cls.__dataclass_fields__, *cls.attribute_map, *opened}
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        fields.add("head_dim")
    shared = {key: getattr(config, key) for key in family.shared if key in fields}
    values = {**opened, **shared, **family.back(config), "model_type": family.name}
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"):
        values.pop(key, None)  # they are in rope_parameters
    return copy.deepcopy(values)  # transformers completes rotary parameters in place


foreign.read_with(Families())

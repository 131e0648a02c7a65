"""Open checkpoints strictly: which keys the checkpoint decides, and which missing or misshapen tensors are refused.

`pretrained.py` initialises weights.

The shapes and whether the head is tied are decided by the checkpoint's `config.json`; another value is refused here,
unless `ignore_mismatched_sizes=True` allows other shapes. `registry.py` (`resolve_options`) refuses options that a
mechanism lacks, and `checkpoints/families/keys.py` keys of other families' `config.json`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .axes.gates import Gates
from .axes.roles import MechanismModule, Recurrence, Residual, ValueMixer
from .foreign import PLACE, opened
from .registry import AXES

SHAPING = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "attention_bias", "output_bias", "mlp_bias", "gated_mlp"),
    *("experts", "experts_per_token"),
    *("norm", "norm_placement", "qk_norm", "positions", "head_bias", "tie_word_embeddings"),
)
"""Configuration keys that name the decoder's tensors, give them their shapes, or tie two of them."""
ROLES: dict[str, type[MechanismModule]] = {"mixer": ValueMixer, "residual": Residual, "recurrence": Recurrence}
PLACES = ("depth_mixer", "again")
"""Names of modules that some layers lack: a hosted layer's mixer, and the residuals of further trips."""
BLOCKS = ("mxfp4", "fp8", "compressed-tensors")
"""Methods of `quantization_config` with tensors of their own, which no hosted layer has."""
LEARNED = ("max_position_embeddings", "position_offset")
"""Those that do so only where positions are a learned table."""


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint of the model must hold, by name, such as `e_score_correction_bias` of a family."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def require_shapes(theirs: PreTrainedConfig, wanted: Mapping[str, object], keys: Collection[str] = SHAPING) -> None:
    """Refuse values of keys that determine tensor shapes if they differ from the checkpoint's.

    Args:
        theirs: The checkpoint's configuration.
        wanted: The caller's values by key; keys that are absent agree.
        keys: The shaping keys to compare.
    """
    if getattr(theirs, "positions", None) == "learned" and keys is SHAPING:
        keys = (*SHAPING, *LEARNED)
    wrong = [key for key in keys if key in wanted and wanted[key] != getattr(theirs, key)]
    if wrong:
        said = ", ".join(f"{key}={_shown(getattr(theirs, key))} (not {_shown(wanted[key])})" for key in wrong)
        these = "this key" if len(wrong) == 1 else "these keys"
        raise ValueError(f"the checkpoint has {said}; its config.json decides, so leave {these} out")


def differing(
    theirs: PreTrainedConfig, ours: PreTrainedConfig, keys: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """The keys whose value differs from the checkpoint's, as (checkpoint's, new value); a mechanism's options are
    compared singly.

    Args:
        theirs: The checkpoint's configuration.
        ours: That configuration under `keys`.
        keys: The keys that the caller set.
    """
    found: dict[str, tuple[object, object]] = {}
    for key, value in keys.items():
        before, after = getattr(theirs, key, None), getattr(ours, key, None)
        if not isinstance(value, dict) or not isinstance(before, dict) or not isinstance(after, dict):
            found[key] = before, after
            continue
        for inner in value:
            if inner in before:  # an option of another mechanism has no earlier value
                found[f"{key}.{inner}"] = before[inner], after.get(inner)
    return {key: (before, after) for key, (before, after) in found.items() if before != after}


def described(changes: Mapping[str, tuple[object, object]]) -> str:
    """Format the result of `differing` as text."""
    return ", ".join(f"{key} {_shown(before)} → {_shown(after)}" for key, (before, after) in changes.items())


def _shown(value: object) -> str:
    """A value in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def require_one_head(model: PreTrainedModel) -> None:
    """Refuse a checkpoint that has a separate head although its config.json says `tie_word_embeddings`.

    transformers leaves both untied after a warning, and the next call of `tie_weights` would discard the head. The
    classes of some families never tie, whatever config.json says.
    """
    if not model._tied_weights_keys:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not model.config.tie_word_embeddings or not isinstance(head, nn.Module) or not isinstance(embedding, nn.Module):
        return
    if head.weight is not embedding.weight and not head.weight.is_meta and not embedding.weight.is_meta:
        raise ValueError(
            "config.json says tie_word_embeddings=true, but lm_head.weight differs from the embedding; "
            "write tie_word_embeddings=false there to keep the head, or delete lm_head.weight"
        )


@contextmanager
def without_report() -> Iterator[None]:
    """Hide transformers' table of missing, unexpected and misshapen tensors; the caller raises errors about them."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_no_report)


def _no_report(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "LOAD REPORT" not in text and "so we will NOT tie them" not in text


class StrictLoading(PreTrainedModel):
    """Base class whose `from_pretrained` refuses checkpoints with missing tensors, which transformers would initialise
    at random."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str] | None, *args: object, **kwargs: object
    ) -> Any:
        """Open a checkpoint of Fathom or, if the package `fathom` is installed, of any family that it supports.
        `mixer=`, `residual=` and `recurrence=` add mechanisms to it.

        This is stricter than transformers, which initialises missing tensors at random. A decoder tensor that is
        missing or has another shape is an error, and so is a key that would change a shape or tie the head. A mechanism
        without tensors in the checkpoint is initialised. `state_dict={}` stands for no checkpoint and initialises
        everything. Pickles are not opened. `state_config` is the configuration that a `state_dict` was made with.
        `ignore_keys=[...]` opens another family's checkpoint as if its `config.json` did not have these keys.
        """
        kwargs.setdefault("use_safetensors", True)
        wants_info = kwargs.pop("output_loading_info", False)
        tolerant = kwargs.pop("ignore_mismatched_sizes", False)
        place = {key: kwargs[key] for key in PLACE if key in kwargs}
        own: dict[str, object] = kwargs.pop("state_config", None) or {}  # type: ignore[assignment]
        given, config = pretrained_model_name_or_path, kwargs.get("config")
        if config is not None and getattr(config, "model_type", None) != cls.config_class.model_type:
            raise ValueError(
                f"config must be a {cls.config_class.__name__}, got a {type(config).__name__}; leave it out, or give "
                f"{cls.config_class.__name__}.from_pretrained(...)"
            )
        if given is not None:
            ignored = getattr(config, "ignore_keys", None) or kwargs.get("ignore_keys")
            own = cls.config_class.get_config_dict(given, ignore_keys=ignored, **place)[0]
        if config is not None:
            kwargs.pop("ignore_keys", None)
        trained = kwargs.get("state_dict") != {}
        if own and trained:
            wanted = vars(config) if isinstance(config, PreTrainedConfig) else kwargs
            keys = ("tie_word_embeddings",) if tolerant else SHAPING
            require_shapes(cls.config_class.from_dict(own), wanted, keys)
        _require_plain_numbers(own)
        path, kwargs = opened(given, cls.config_class, kwargs)
        with without_report():
            model, info = super().from_pretrained(
                path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        require_one_head(model)
        _require_places(model, info, own, renamed=path is not given, tolerant=bool(tolerant))
        if trained:
            _require_tensors(model, info, own)
        return (model, info) if wants_info else model


def _require_plain_numbers(own: Mapping[str, Any]) -> None:
    """Refuse files of a hosted family whose experts or matrices are stored in a block-quantised format."""
    method = (own.get("quantization_config") or {}).get("quant_method")
    if own.get("host") and method in BLOCKS:
        raise ValueError(
            f"{own['host']}: the weights are stored in {method}, which hosted layers do not read: open the model with "
            "transformers (AutoModelForCausalLM, dtype=torch.bfloat16, a quantization_config with dequantize=True), "
            "save_pretrained with save_original_format=False, and open that directory"
        )


def _further_layers(own: Mapping[str, Any]) -> str:
    """A pattern of the names of multi-token-prediction layers, which DeepSeek-V3 and GLM files have after the last
    layer."""
    further = (own.get("native") or {}).get("num_nextn_predict_layers") or 0
    numbers = "|".join(str(own["num_hidden_layers"] + i) for i in range(further))
    return rf"^model\.layers\.({numbers})\." if numbers else r"^mtp\."


def _require_places(
    model: PreTrainedModel, info: Mapping[str, Any], own: Mapping[str, object], renamed: bool, tolerant: bool
) -> None:
    """Refuse a checkpoint with tensors that the model does not have, or has in another shape.

    Args:
        model: The opened model.
        info: transformers' loading info.
        own: The checkpoint's configuration.
        renamed: Whether the tensors were renamed to Fathom's names, so that none may be left over.
        tolerant: Whether the caller allows other shapes and additional tensors.
    """
    for name, found, needed in sorted(info["mismatched_keys"]) if not tolerant else ():
        raise ValueError(f"{name} has shape {list(found)} in the checkpoint, this configuration needs {list(needed)}")
    head = r"lm_head\.weight$" if "lm_head" in model._modules else r"lm_head\.(weight|bias)$"  # a decoder reads none
    passed = re.compile(head if not own.get("host") else rf"{head}|{_further_layers(own)}")
    unread = sorted(name for name in info["unexpected_keys"] if not passed.search(name))
    of_mechanism = [name for name in unread if _of_mechanism(model, name)]
    stray = [name for name in unread if name not in of_mechanism and not name.endswith(".inv_freq")]
    if not tolerant and ((stray and own.get("native")) or (unread and renamed)):
        raise ValueError(f"this checkpoint holds the tensor {(stray or unread)[0]}, which the model does not have")
    if of_mechanism and all(own.get(axis) == getattr(model.config, axis) for axis in AXES):
        raise ValueError(f"the checkpoint holds {of_mechanism[0]}, which a model with these options does not have")


def _of_mechanism(model: nn.Module, name: str) -> bool:
    """Whether a tensor that the model does not have belongs, by its name, to a mechanism's module."""
    module: Any = model
    for part in name.split("."):
        if isinstance(module, tuple(ROLES.values())) or part in PLACES:
            return True
        module = getattr(module, part, None)
    return False


def _require_tensors(model: StrictLoading, info: Mapping[str, Any], own: Mapping[str, object]) -> None:
    """Refuse a checkpoint that lacks tensors, other than all tensors of a mechanism that its configuration does not
    name, and closed gates λ of layers that read something only under another recurrence, such as a looped layer 0."""
    missing, new = set(info["missing_keys"]), set[str]()
    for axis, role in ROLES.items():
        if own.get(axis) == getattr(model.config, axis):
            continue
        parts = [(name, module) for name, module in model.named_modules() if isinstance(module, role)]
        tensors = {f"{name}.{p}" for name, module in parts for p, _ in module.named_parameters()}
        new |= tensors if tensors <= missing else set()
    if any(own.get(key) != getattr(model.config, key) for key in ("recurrence", "recurrence_options")):
        gates = [name for name, module in model.named_modules() if isinstance(module, Gates)]
        new |= {f"{name}.mix" for name in gates if f"{name}.gain" not in missing}
    if lost := sorted(missing - new):
        raise ValueError(f"the checkpoint lacks {lost[0]}" + (f" and {len(lost) - 1} more" if lost[1:] else ""))

"""Base class of all Fathom models: weight initialisation, activation checkpointing, saving, schedules over training
steps.

A training with `blend_steps` stops at its second forward pass if `set_step` was not called, and one with another
schedule warns (`expect_steps`); `training/callback.py` calls `set_step` for transformers' Trainer. `save_pretrained`
saves schedules at their current values, so with `blend_steps` a model saved before training has its mechanism switched
off. In a run, `training/build.py` seeds the initial weights of each module with the module's name. `loading.py` refuses
missing tensors.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

from .axes.roles import MechanismModule
from .configuration import FathomConfig
from .decoder.norms import OffsetRMSNorm
from .loading import StrictLoading
from .registry import AXES, recurrence_class

CAPPED = ("eager", "flex_attention")
"""Attention backends that can cap logits."""

_NAMES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_ENABLE = next(name for name in _NAMES if hasattr(Qwen3PreTrainedModel, name))
"""transformers renamed the method; the earlier name warns where the later one exists."""


class _ExpertsOfFamily:
    """Whether transformers can set an experts implementation: of a hosted model, its family's own class answers. A
    class without a configuration, which transformers asks too, answers for itself."""

    def __get__(self, model: FathomPreTrainedModel | None, owner: type) -> Callable[[], bool]:
        host = "" if model is None else model.config.host
        kind: Any = MODEL_MAPPING[CONFIG_MAPPING[host]] if host else super(FathomPreTrainedModel, owner)
        asked: Callable[[], bool] = kind._can_set_experts_implementation
        return asked


class FathomPreTrainedModel(StrictLoading, Qwen3PreTrainedModel):
    """Base class of all Fathom models, on top of transformers' `Qwen3PreTrainedModel`."""

    config: FathomConfig
    config_class = FathomConfig
    _no_split_modules = ["DecoderLayer"]
    _pp_plan: dict[str, object] = {}  # sources would have to be sent from stage to stage
    _step_known = False
    """Whether `set_step` was called, nothing follows the steps, or a warning was given."""
    _can_set_experts_implementation: Any = _ExpertsOfFamily()
    _said = False
    """Whether a warning of a closed mechanism was given."""
    _passed = False
    """Whether a training pass was made before that."""

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise a module like transformers, which skips modules without tensors of their own in remote code. A
        mechanism also initialises the parameters of its children: it is skipped only if all of them were loaded."""
        tensors = module.parameters() if isinstance(module, MechanismModule) else ()
        new = not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)
        super()._initialize_weights(module, is_custom_code and not new)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MechanismModule):
            module.init_weights(self.config.initializer_range)
            return
        if (host := self.base_model.host) is not None:
            host._init_weights(module)
            return
        super()._init_weights(module)
        if isinstance(module, OffsetRMSNorm):
            init.zeros_(module.weight)
        if self.config.output_init == "depth" and getattr(module, "writes_residual", False):
            writes = 2 * self.config.num_hidden_layers * recurrence_class(self.config).additions(self.config)
            init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(writes))

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Choose the attention backend like transformers; if attention logits are capped, allow only backends that
        support caps."""
        if self.config.attn_logit_softcapping is not None:
            attn_implementation = attn_implementation or "eager"
            if attn_implementation not in CAPPED:
                raise ValueError(
                    f"attn_logit_softcapping needs attn_implementation {' or '.join(CAPPED)}, got {attn_implementation}"
                )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def set_experts_implementation(self, experts_implementation: Any) -> None:
        """Like transformers' method; also sets it in the configuration that a hosted family's experts read."""
        super().set_experts_implementation(experts_implementation)
        if (host := self.base_model.host) is not None:
            host.set_experts_implementation(experts_implementation)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, object] | None = None, **kwargs: object
    ) -> None:
        """Turn on activation checkpointing: each layer is recomputed in the backward pass. `use_reentrant=True` is
        refused where a layer reads more than the layer below it."""
        chosen = dict(activation_checkpointing_kwargs or {})
        model = self.base_model
        if chosen.setdefault("use_reentrant", False):
            visits = [visit for trip in model.plan for visit in trip]
            sources = any(visit.sources for visit in visits)
            if sources or model.slotted or any(visit.borrows for visit in visits):
                further = "depth sources" if sources else "other iterations"
                raise ValueError(f"checkpointing with use_reentrant=True loses the gradients to {further}; use False")
        getattr(super(), _ENABLE)(chosen, **kwargs)

    if _ENABLE == "gradient_checkpointing_enable":

        def gradient_checkpointing_enable(
            self, gradient_checkpointing_kwargs: dict[str, object] | None = None, **kwargs: object
        ) -> None:
            """The same as `activation_checkpointing_enable`, under its name in earlier releases of transformers."""
            self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether any layer is recomputed in the backward pass; peft reads this attribute."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())

    def settled_config(self) -> FathomConfig:
        """A copy of the configuration with every schedule fixed at its current value."""
        config = copy.deepcopy(self.config)
        for module in self.modules():
            if isinstance(module, MechanismModule):
                module.settle(config)
        return config

    def save_pretrained(self, *args: object, **kwargs: object) -> object:
        """Like transformers' method, but saves schedules at their current values, so that the saved model computes what
        was trained."""
        config, self.config = self.config, self.settled_config()
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            self.config = config

    def set_step(self, step: int, steps: int | None = None) -> None:
        """Tell every mechanism the number of optimizer steps made, and the total if known."""
        self.base_model._step_known = True
        if not self._said and (axes := self.closed_axes()):
            self._said = True
            named = ", ".join(f"{axis}={getattr(self.config, axis)}" for axis in axes)
            warnings.warn(
                f"{named}: closed for good (blend=0): its output is left out. To open it, open the model with "
                f"{axes[0]}_options={{'blend': 1.0, 'blend_steps': N}}",
                stacklevel=2,
            )
        for module in self.modules():
            if isinstance(module, MechanismModule):
                module.set_step(step, steps)

    def closed_axes(self) -> list[str]:
        """The axes whose mechanism has `blend` 0 and no schedule, so that it never has an effect."""
        given = {axis: getattr(self.config, f"{axis}_options") for axis in AXES}
        return [axis for axis, keys in given.items() if keys.get("blend") == 0 and not keys.get("blend_steps")]

    def expect_steps(self) -> None:
        """Warn, or raise, if training passes run without calls of `set_step`; called before each pass until `set_step`
        is called.

        A mechanism whose λ rises with the steps has no effect until somebody does. One pass may be a look at gradients;
        the second is training, and fails. Other schedules and draws stay at step 0, of which the first pass warns.
        """
        if torch._C._current_graph_task_id() != -1:  # recomputed in a backward pass, so not another one
            return
        parts = [one for one in self.modules() if isinstance(one, MechanismModule) and one.scheduled]
        closed = any(getattr(one, "blend_steps", 0) for one in parts)
        if closed and not self._passed:
            self._passed = True
            return
        self._step_known = not closed
        if not parts:
            return
        names = sorted({f"{one.axis}={getattr(self.config, one.axis)}" for one in parts})
        effect = "λ stays 0, and the mechanism has no effect" if closed else "its schedules stay at step 0"
        words = (
            f"{', '.join(names)}: nobody called `set_step`: {effect}. With transformers' Trainer, pass "
            "callbacks=[fathom.training.callback.FollowSteps()]; in your own loop, call model.set_step(step, steps) "
            "before each step"
        )
        if closed:
            raise RuntimeError(words)
        warnings.warn(words, stacklevel=2)

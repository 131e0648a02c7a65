"""transformers' own common tests, of the version that is installed, on Fathom's models and on Qwen3 beside them."""

from __future__ import annotations

import contextlib
import inspect
import unittest
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from fathom.models import FathomConfig, FathomForCausalLM, FathomModel
from fathom.models.registry import parse_mechanism
from tests.outside.accepted import ACCEPTED
from tests.outside.models import ONE_TRIP, SEVERAL_TRIPS
from tests.outside.sources import common

CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ONE_TRIP},
    **{name: {"recurrence_options": {"trips": 2}} for name in SEVERAL_TRIPS},
}
"""Every mechanism of the registry by itself."""

# The tests tell a bare decoder from one with a head by these tables, which know transformers' own models only.
MODEL_MAPPING_NAMES["fathom"] = FathomModel.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["fathom"] = FathomForCausalLM.__name__
# And whether it can be asked for attentions, by a parameter of its forward or by the type of its keyword arguments.
for model in (FathomModel, FathomForCausalLM):
    parameters = [*inspect.signature(model.forward).parameters.values()]
    asked = inspect.Parameter("output_attentions", inspect.Parameter.KEYWORD_ONLY, default=None)
    model.forward.__signature__ = inspect.Signature([*parameters[:-1], asked, parameters[-1]])  # type: ignore[attr-defined]


class Small:
    """What the common tests ask of a model: its classes, a small configuration and a batch."""

    is_training = True
    batch_size = 13
    seq_length = 7
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    pad_token_id = 0

    def __init__(self, case: str) -> None:
        self.case = case
        stock = case == "qwen3"
        self.base_model_class = Qwen3Model if stock else FathomModel
        self.causal_lm_class = Qwen3ForCausalLM if stock else FathomForCausalLM
        self.expected_num_hidden_layers = self.num_hidden_layers * (2 if case in SEVERAL_TRIPS else 1) + 1

    def get_config(self) -> Qwen3Config:
        shape = dict(
            vocab_size=99,
            hidden_size=self.hidden_size,
            intermediate_size=32,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            pad_token_id=self.pad_token_id,
            bos_token_id=1,
            eos_token_id=2,
        )
        if self.case == "qwen3":
            return Qwen3Config(**shape)
        return FathomConfig(**shape, **parse_mechanism(self.case), **CASES[self.case])

    def prepare_config_and_inputs_for_common(self) -> tuple[Qwen3Config, dict[str, torch.Tensor]]:
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class Case:
    """The part of a test class that is ours."""

    case: str
    model_tester: Small | None = None
    # The tests tell a model's age by a copyright line that our files do not have.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        self.model_tester = Small(self.case)
        self.all_model_classes = (self.model_tester.base_model_class, self.model_tester.causal_lm_class)

    def subTest(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        """No test in a test: the whole is accepted, or nothing."""
        return contextlib.nullcontext()


MODELING = common("test_modeling_common")
MIXINS = (
    *(MODELING.GenerationTesterMixin, MODELING.ModelTesterMixin, MODELING.ExportTesterMixin),
    common("test_training_mixin").TrainingTesterMixin,
)


def make(case: str) -> type:
    """Everybody's mixins over one case; those that another one brings along are not named twice."""
    bases = [m for m in MIXINS if not any(m is not other and issubclass(other, m) for other in MIXINS)]
    return type(f"Test_{case}", (Case, *bases, unittest.TestCase), {"case": case, "__module__": __name__})


globals().update({f"Test_{case}": make(case) for case in ("qwen3", *CASES)})


class Test_configuration(unittest.TestCase):
    """The tests of configurations, which are one test."""

    def test_qwen3(self) -> None:
        common("test_configuration_common").ConfigTester(self, Qwen3Config, hidden_size=32).run_common_tests()

    def test_fathom(self) -> None:
        tester = common("test_configuration_common").ConfigTester(
            self, FathomConfig, hidden_size=32, mixer="depth_attention", residual="hyper_connections", recurrence="loop"
        )
        tester.run_common_tests()


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_list_names_tests_that_exist(case: str) -> None:
    assert [name for name in ACCEPTED[case] if not hasattr(globals()[f"Test_{case}"], name)] == []


def test_the_list_is_short() -> None:
    """One trip: four names beyond Qwen3's own, which are none."""
    assert ACCEPTED["qwen3"] == {}
    assert len({name for case in ONE_TRIP for name in ACCEPTED[case]}) <= 4

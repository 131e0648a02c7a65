"""What a model's positions let a batch do."""

from types import SimpleNamespace

import pytest

from fathom.inference.positions import depends_on_company, passes_the_context
from fathom.models import FathomForCausalLM
from tests.models.hosts.cases import ours_of, theirs_of
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("rope", "passes", "depends"),
    [
        ({"rope_type": "llama3"}, True, False),
        ({"rope_type": "dynamic"}, False, False),
        ({"rope_type": "longrope"}, False, True),
        ({"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}, False, True),
        ({"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}}, True, False),
        (None, False, False),
    ],
)
def test_kinds_of_angles(rope: dict | None, passes: bool, depends: bool) -> None:
    model = SimpleNamespace(config=SimpleNamespace(rope_parameters=rope))
    assert (passes_the_context(model), depends_on_company(model)) == (passes, depends)


def test_our_own_models_share_batches() -> None:
    model = FathomForCausalLM(tiny_config())
    assert passes_the_context(model) and not depends_on_company(model)


def test_a_familys_own_layers_have_its_own_angles() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.0, "long_mscale": 1.2}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    model = ours_of(theirs_of("phimoe", num_hidden_layers=1, rope_parameters=longrope))
    assert not passes_the_context(model) and depends_on_company(model)

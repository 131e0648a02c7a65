"""`--with` and `--layers`: what they mean, and what is one line."""

import pytest

from fathom.deepen.request import parse_request
from fathom.deepen.write import deeper_config
from fathom.errors import SettingsError
from fathom.models import FathomConfig
from tests.models.cases import SHAPE


def test_options_and_layers():
    request = parse_request("loop:trips=3,damping=0.5+depth_attention:stride=1", "1-2")
    assert request.name == "loop+depth_attention" and request.layers == (1, 2)
    config = deeper_config(FathomConfig(**SHAPE), request)
    loop = {"trips": 3, "prelude": 1, "coda": 1, "damping": 0.5, "blend": 0.0}
    assert loop.items() <= config.recurrence_options.items()
    assert {"stride": 1, "blend": 0.0}.items() <= config.mixer_options.items()
    opening = {"blend": 1.0, "blend_steps": 7}
    assert request.opening(7) == {"recurrence_options": opening, "mixer_options": opening}


def test_what_is_not_said():
    """Two iterations, all layers; a blend that was given is not opened; what has no blend needs no opening."""
    config = deeper_config(FathomConfig(**SHAPE), parse_request("loop"))
    assert {"trips": 2, "prelude": 0, "coda": 0}.items() <= config.recurrence_options.items()
    assert parse_request("loop:blend=0.5").opening(9) == {} == parse_request("denseformer").opening(9)
    ranged = parse_request("loop:trips_range=[1, 3],trips=2")
    assert deeper_config(FathomConfig(**SHAPE), ranged).recurrence_options["trips_range"] == [1, 3]


@pytest.mark.parametrize(
    "text,layers,words",
    [
        ("depth_atention", None, r"mechanism=depth_atention: no such mechanism; did you mean depth_attention\?"),
        ("vanilla", None, "mechanism=vanilla: no such mechanism"),
        ("none", None, "mechanism=none: no such mechanism"),
        ("", None, "no such mechanism; allowed: depth_attention"),
        ("loop+ponder", None, r"mechanism=loop\+ponder: two mechanisms of the recurrence axis"),
        ("loop:times=2", None, "mechanism=loop:times=2: allowed: .*trips"),
        ("loop:trips", None, "mechanism=loop:trips: allowed: .* each as key=value"),
        ("depth_attention", "1-2", "layers=1-2: needs loop in `mechanism`"),
        ("loop", "2-1", "layers=2-1: allowed: one layer, as in 12, or FIRST-LAST"),
        ("loop", "middle", "layers=middle: allowed: one layer"),
        ("loop", "2-4", "layers=2-4: this model has the layers 0 to 3"),
        ("loop:prelude=1", "1-2", "remove prelude and coda from `mechanism`"),
        ("loop:damping=2", None, "mechanism=loop: .*damping must lie above 0"),
        ("loop+denseformer", "1-2", r"mechanism=loop\+denseformer: .*blend with a coda needs residual=plain"),
        ("denseformer", None, "this model has residual=denseformer already"),
    ],
)
def test_what_cannot_be_is_one_line(text, layers, words):
    residual = {"residual": "denseformer"} if words.endswith("already") else {}
    with pytest.raises(SettingsError, match=words) as error:
        deeper_config(FathomConfig(**SHAPE, **residual), parse_request(text, layers))
    assert "\n" not in str(error.value)

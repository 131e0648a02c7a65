"""A model of one trip runs in `FathomModel.forward`, top to bottom."""

import pytest

from fathom.models import modeling, slots

from .cases import CASES, build, config_of, tokens


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if "pon" not in name])
def test_one_trip_needs_no_driver(case, monkeypatch):
    model = build(config_of(case))

    def driven(*args, **kwargs):
        raise AssertionError("driven")

    monkeypatch.setattr(modeling, "run_trips", driven)
    for name in ("sweep", "jacobi"):
        monkeypatch.setattr(slots, name, driven)
    if model.config.recurrence == "once":
        assert model(tokens(1, 3)).logits.isfinite().all()
    else:
        with pytest.raises(AssertionError, match="driven"):
            model(tokens(1, 3))

"""Trips that grow over training: when, from an exact start, at a declared cost, and alike after a resume."""

import math

import pytest
import torch

from fathom.models.cost import training_flops_per_token, training_flops_range, training_visits
from fathom.models.recurrences.growth import GrowthOptions

from .cases import build, config_of, tokens

STEPS = 200


def loop(**options):
    keys = {"trips": 4, "growth": "sqrt", "growth_share": 0.5, "growth_open": 0.1, **options}
    return config_of("loop", recurrence_options=keys)


def course(config, steps=STEPS):
    """Trips and λ of every step."""
    model, found = build(config), []
    for step in range(steps):
        model.set_step(step, steps)
        found.append((model.model.recurrence.drawn_trips, model.model.recurrence.newest[0].item()))
    return found


def test_trips_grow_to_the_last():
    linear, late = ([trips for trips, _ in course(loop(growth=curve))] for curve in ("linear", "sqrt"))
    assert linear == [1 + math.ceil(3 * min(1.0, s / 100) - 1e-9) for s in range(STEPS)]
    assert late == [1 + math.ceil(3 * (1 - math.sqrt(1 - min(1.0, s / 100))) - 1e-9) for s in range(STEPS)]
    assert all(a >= b for a, b in zip(linear, late, strict=True)) and linear != late, "slow first"
    assert {trips for trips, _ in course(loop(growth_from=3))} == {3, 4}, "a loop of three trips"


def test_a_new_trip_opens():
    found = course(loop(growth="linear"))
    for trips in (2, 3, 4):
        opened = [one for at, one in found if at == trips]
        assert opened[:20] == pytest.approx([s / 20 for s in range(20)]) and [*opened, 1.0][20] == 1.0
    assert found[0] == (1, 1.0)


@pytest.mark.parametrize("options", [{}, {"prelude": 1, "coda": 1}, {"growth_from": 2}])
def test_the_loss_is_continuous_to_the_last_bit(options):
    """At each step of growth, against one trip fewer; and half a step later it is another."""
    model, ids = build(loop(growth="linear", **options)).train(), tokens(2, 9)
    recurrence, grown = model.model.recurrence, []
    for step in range(STEPS):
        before = recurrence.drawn_trips if step else None
        model.set_step(step, STEPS)
        if before is None or recurrence.drawn_trips == before:
            continue
        grown.append(recurrence.drawn_trips)
        after = model(ids, labels=ids).loss
        recurrence.newest.fill_(1.0)
        recurrence.drawn_trips -= 1
        assert torch.equal(model(ids, labels=ids).loss, after)
        recurrence.drawn_trips += 1
        assert not torch.equal(model(ids, labels=ids).loss, after), "the trip itself is no identity"
        model.set_step(step, STEPS)
    assert grown == list(range(options.get("growth_from", 1) + 1, 5))


def test_drawn_trips_grow_too():
    found = course(loop(trips_range=[1, 4], growth="linear", seed=1))
    most = [1 + math.ceil(3 * min(1.0, s / 100) - 1e-9) for s in range(STEPS)]
    assert all(1 <= trips <= bound for (trips, _), bound in zip(found, most, strict=True))
    assert all(opened == 1.0 for (trips, opened), bound in zip(found, most, strict=True) if trips < bound)
    assert {trips for trips, _ in found[100:]} == {1, 2, 3, 4}


def test_evaluation_does_not_ask_what_a_step_drew():
    model, ids, found = build(loop(trips_range=[1, 4], growth="linear", seed=1)).eval(), tokens(1, 6), {}
    recurrence = model.model.recurrence
    for step in range(34, 60):
        model.set_step(step, STEPS)
        fewer = recurrence.drawn_trips < recurrence.growth.most(step, STEPS)
        assert recurrence.newest[1] == pytest.approx(recurrence.growth.opened(step, STEPS))
        with torch.no_grad():
            found.setdefault(fewer, []).append(model(ids).logits[0, -1])
            recurrence.newest[0] = 0.3  # of training alone
            assert torch.equal(model(ids).logits[0, -1], found[fewer][-1])
    assert len(found) == 2, "some steps drew fewer, some did not"


@pytest.mark.parametrize(("step", "made", "saved"), [(34, 2, 2), (36, 2, 3), (36, 3, 3)])
def test_a_budget_or_a_save_before_the_newest_trip_has_opened(step, made, saved):
    """A trip that opened long ago is whole, and one that is shut is not saved."""
    model, ids = build(loop(growth="linear")).eval(), tokens(1, 6)
    model.set_step(step, STEPS)
    assert model.settled_config().recurrence_options["trips"] == saved and model.model.recurrence.grown == 3
    plain = build(config_of("loop", recurrence_options={"trips": made})).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        same = torch.equal(model(ids, max_trips=made).logits, plain(ids).logits)
    assert same is (made < 3), "the control: the newest itself is half open"


def test_a_resumed_run_goes_on_alike():
    """Whatever was made before, a step's trips and λ are those of the step."""
    config = loop(trips_range=[1, 4], seed=3)
    whole, resumed = course(config), build(config)
    for step in (150, 34, 33, 101):
        resumed.set_step(step, STEPS)
        recurrence = resumed.model.recurrence
        assert (recurrence.drawn_trips, recurrence.newest[0].item()) == whole[step]


def test_what_is_saved_and_read_out_meanwhile():
    model, ids = build(loop(growth="linear")).eval(), tokens(1, 6)
    assert model.model.served_trips == 4, "a loaded model has grown"
    model.set_step(40, STEPS)
    assert model.model.served_trips == 3
    saved = model.settled_config().recurrence_options
    assert (saved["trips"], saved["growth"], saved["growth_from"]) == (3, "none", 1)
    model.set_step(STEPS)
    assert model.settled_config().recurrence_options["trips"] == 4, "of an unknown number of steps, the last"
    with torch.no_grad():
        plain = build(config_of("loop", recurrence_options={"trips": 4})).eval()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("options", [{}, {"trips_range": [2, 4]}, {"growth_from": 2, "growth": "linear"}])
def test_the_declared_cost_is_the_mean_over_the_run(options):
    config, model = loop(**options), build(loop(**options))
    each = {n: training_flops_per_token(config_of("loop", recurrence_options={"trips": n}), 64) for n in range(1, 5)}
    trips = []
    for step in range(1000):
        model.set_step(step, 1000)
        trips.append(model.model.recurrence.drawn_trips)
    least, mean, most = training_flops_range(config, 64)
    assert mean == pytest.approx(sum(each[n] for n in trips) / 1000, rel=0.02)
    assert (least, most) == pytest.approx((each[min(trips)], each[max(trips)])) and least < mean < most
    assert training_visits(config)[0] == pytest.approx(4 * sum(trips) / 1000, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"growth": "cubic"},
        {"growth_from": 5},
        {"growth_share": 0},
        {"growth_open": 0.6},
        {"injection": "add"},
        {"damping": 0.5},
    ],
)
def test_what_cannot_grow_is_refused(options):
    with pytest.raises(ValueError, match=r"recurrence_options\.growth"):
        loop(**options)
    assert GrowthOptions().grows is False

"""Contrasts of several arms: what they are over seeds, how they are tested, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.verdict import arms_of

from fathom.errors import SettingsError
from fathom.experiments.contrasts import parse_contrasts
from fathom.experiments.differences import compare_runs, contrasted
from fathom.report.statistics import holm, paired_difference

ARMS = ("d", "d-loop", "m", "m-loop")
INTERACTION = "interaction=m-loop - m - d-loop + d"


def test_an_interaction_is_that_of_every_seed() -> None:
    """Whatever a seed or a kind does to all of its arms cancels."""
    (one,) = parse_contrasts(INTERACTION, ARMS)
    assert str(one) == "m-loop + d − m − d-loop" and one.arms == set(ARMS)
    chance = np.random.default_rng(0)
    kind, loop, seed = (chance.normal(size=n) for n in (2, 2, 4))
    losses = kind[:, None, None] + np.stack([np.zeros(2), loop], 1)[:, :, None] + seed
    by_arm = dict(zip(ARMS, ({s: float(x) for s, x in enumerate(row)} for row in losses.reshape(4, 4)), strict=True))
    found = one.of(by_arm)
    assert found is not None and found.pairs == 4 and found.mean == pytest.approx(loop[1] - loop[0])
    assert found.half_width is None or found.half_width < 1e-9
    del by_arm["m"][2]
    fewer = one.of(by_arm)
    assert fewer is not None and fewer.pairs == 3
    assert one.of({name: row for name, row in by_arm.items() if name != "d"}) is None
    assert one.of({**by_arm, "d": {9: 1.0}}) is None


def test_contrasts_are_in_the_family() -> None:
    """Of three pairs and one contrast the smallest p counts four times; without the contrast Shaffer's steps count."""
    losses = np.random.default_rng(3).normal(size=(3, 5)) + np.array([[0.0], [1.0], [2.5]])
    alone, together = arms_of(losses), arms_of(losses)
    (one,) = parse_contrasts("bend=arm0 + arm2 - arm1 - arm1", [arm.name for arm in together])
    gaps = contrasted([one], together)
    assert gaps[0].mean == pytest.approx(float((losses[0] - 2 * losses[1] + losses[2]).mean()))
    pairs = compare_runs(together, contrasts=gaps)
    rows = [*(arm.gap for arm in together[1:]), *pairs, *gaps]
    assert [row.p_holm for row in rows] == pytest.approx(holm([row.p or 0.0 for row in rows]))
    assert gaps[0].p == paired_difference(losses[0] + losses[2], 2 * losses[1]).p
    compare_runs(alone)
    assert min(arm.gap.p_holm for arm in alone[1:]) < min(arm.gap.p_holm for arm in together[1:])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m-loop - m", "allowed: NAME="),
        ("a=m-loop - m - d", "as many"),
        ("a=m-loop - m + m - d", "both signs"),
        ("a=m-loop m", "allowed: NAME="),
        ("a=m-loop - x", "x is not an arm; the arms are d, d-loop"),
        ("a=m-loop - m, a=d-loop - d", "appears twice"),
    ],
)
def test_what_is_no_contrast_is_refused(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_contrasts(text, ARMS)

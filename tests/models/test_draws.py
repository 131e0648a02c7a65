"""What is drawn for a step is a function of the seed and the step."""

import pytest
import torch
import torch.distributed as dist

from fathom.models.recurrences.draws import between, draw

from .ranks import on_two_ranks
from .slot_oracle import thinker


def test_draws_are_pinned():
    """Another number here is another training run for everybody who resumes one."""
    assert draw(0, 0, "rounds") == 13245970666626307425
    assert [between([2, 5], 0, step, "rounds") for step in range(12)] == [3, 5, 2, 2, 4, 5, 3, 2, 4, 3, 3, 2]


def test_draws_depend_on_each_argument():
    base = draw(1, 2, "rounds")
    assert len({base, draw(2, 2, "rounds"), draw(1, 3, "rounds"), draw(1, 2, "depth"), draw(12, 2, "rounds")}) == 5


def test_draws_are_uniform_and_inclusive():
    counts = torch.bincount(torch.tensor([between([2, 4], 0, step, "rounds") for step in range(3000)]))
    assert counts[:2].sum() == 0 and len(counts) == 5
    assert (counts[2:] - 1000).abs().max() < 130  # five standard deviations
    assert between([7, 7], 3, 9, "depth") == 7


def drawn(model, step):
    model.set_step(step, 100)
    policy = model.model.recurrence
    first = int(policy.first) if hasattr(policy, "first") else None
    return policy.drawn_trips, getattr(policy, "drawn_rounds", None), first


@pytest.mark.parametrize(
    "method,options",
    [
        ("ponder", {"trips_range": [2, 7]}),
        ("ponder2", {"jacobi_train": [1, 6]}),
        ("ponder3", {"jacobi_train": [1, 6]}),
        ("latent_cot", {}),
    ],
)
def test_every_rank_and_every_resume_draws_the_same(method, options):
    """Whatever a process has drawn, made or seen before."""
    first, second = thinker(method, **options), thinker(method, **options)
    course = [drawn(first, step) for step in range(20)]
    torch.manual_seed(99)
    torch.rand(7)
    assert [drawn(second, step) for step in range(13, 20)] == course[13:]
    assert len(set(course)) > 3, "and steps differ"


def agree_on_draws(rank):
    """Two processes with generators of their own; what they drew must be one and the same."""
    torch.manual_seed(rank)
    torch.rand(rank + 1)
    model = thinker("ponder3", jacobi_train=[1, 6])
    mine = [drawn(model, step) for step in range(8)]
    both = [None, None]
    dist.all_gather_object(both, mine)
    assert both[0] == both[1] and len(set(mine)) > 2


@pytest.mark.slow
def test_two_ranks_draw_the_same():
    on_two_ranks(agree_on_draws)

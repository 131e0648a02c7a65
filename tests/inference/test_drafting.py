"""Drafts, by lookup and with the first trips: the same texts, and only where that is faster."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from fathom.errors import SettingsError
from fathom.inference import batches
from fathom.inference.drafting import LOOKUP, PLAIN, TRIPS, Drafting, Lookup, TextDrafts
from fathom.inference.engine import Engine
from fathom.inference.sampling import Choice
from fathom.kvcache.policy import Policy
from tests.inference.test_engine import BUDGET, Collected, alone, drawn, engine, prompts_of, submitted_at_once  # noqa: F401
from tests.models.cases import build, config_of


def test_what_followed_the_same_tokens():
    lookup = Lookup()
    assert lookup.after([1, 2, 3, 4, 9, 2, 3], 3) == [4, 9, 2]
    assert lookup.after([1, 2, 3, 4, 9, 2, 3, 8], 3) == [], "new tokens"
    assert lookup.after([1, 2, 3, 4, 9, 2, 3, 8, 1, 2, 3], 2) == [4, 9], "three tokens count before two"
    assert Lookup().after([7, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5], "a repetition continues"
    assert Lookup().after([7], 5) == Lookup().after([], 5) == []


@dataclass
class Told:
    """A text that is known."""

    all: list
    made: list = field(default_factory=list)
    prompt: list = field(default_factory=list)
    drafts: TextDrafts = field(default_factory=TextDrafts)

    @property
    def new_tokens(self):
        return len(self.all)


def seconds_of(texts, drafting, extra=0.2, right=0.9):
    """What texts take together, where a step takes a second and `extra` for each further token of the batch; drafts of
    trips cost 0.4 for each token, and `right` of them are."""
    whole, chance, trips = 0.0, random.Random(0), 4
    while texts := [one for one in texts if len(one.made) < len(one.all)]:
        plan, kept = drafting.plan(texts, trips), []
        if plan.kind == LOOKUP:
            cost = 1 + extra * (len(texts) * (1 + max(map(len, plan.drafts))) - 1)
        else:
            cost = 1 + extra * (len(texts) - 1) if plan.kind == PLAIN else 0.4 * trips
        for i, one in enumerate(texts):
            left = one.all[len(one.made) :]
            count = accepted = 0
            if plan.kind == LOOKUP:
                count = len(plan.drafts[i])
                accepted = next((k for k, token in enumerate(plan.drafts[i]) if token != left[k]), count)
            elif plan.kind == TRIPS:
                count = trips
                accepted = next((k for k in range(trips) if chance.random() > right), trips)
            one.made += left[: min(accepted + 1, count) if plan.kind == TRIPS else accepted + 1]
            kept.append((count, accepted))
        drafting.learn(plan, texts, kept, cost)
        whole += cost
    return whole


def told(repeated, seed=0, count=600):
    """A text that repeats itself, or one whose pairs of tokens come again with other tokens behind them."""
    chance = random.Random(seed)
    return Told([i % 12 for i in range(count)] if repeated else chance.choices(range(9), k=count))


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_are_made_where_they_pay(rows, monkeypatch):
    """A text that repeats itself takes 0.6 of its time at most; one in which lookup only fails, 4 % more at most.
    Drafts without a measure take a fifth more there."""
    costs = {}
    for repeated in (True, False):
        texts = [[told(repeated, seed) for seed in range(rows)] for _ in range(2)]
        costs[repeated] = seconds_of(texts[0], Drafting(LOOKUP)) / seconds_of(texts[1], Drafting())
    assert costs[True] < 0.6 and 0.9 < costs[False] <= 1.04, costs
    monkeypatch.setattr(Drafting, "best", always(LOOKUP))
    lost = [[told(False, seed) for seed in range(rows)] for _ in range(2)]
    assert seconds_of(lost[0], Drafting(LOOKUP)) > 1.15 * seconds_of(lost[1], Drafting())


def test_the_better_of_two_kinds_is_chosen():
    """Trips where they are right and nothing repeats; lookup where all repeats; and neither where both fail."""
    plain = seconds_of([told(False)], Drafting())
    assert seconds_of([told(False)], Drafting(LOOKUP, TRIPS), right=0.99) < 0.6 * plain
    assert seconds_of([told(True)], Drafting(LOOKUP, TRIPS), right=0.1) < 0.5 * plain
    assert seconds_of([told(False)], Drafting(LOOKUP, TRIPS), right=0.1) < 1.06 * plain


def always(kind):
    """A choice of drafts that no measurement decides."""
    return lambda self, values: kind if kind in values else PLAIN


def tame(model):
    """Later trips then change little, so that drafts are often right."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(0.2)
            layer.self_attn.o_proj.weight.mul_(0.2)
    return model


@pytest.mark.parametrize("case", ["loop+depth_attention-grid", pytest.param("ponder", marks=pytest.mark.slow)])
def test_drafted_texts_are_those_of_generate(engine, case, monkeypatch):  # noqa: F811
    """Greedy, with an end token, a penalty, and budgets of trips, one of which leaves nothing to draft with."""
    monkeypatch.setattr(Drafting, "best", always(TRIPS))
    running, model = engine(case, draft_trips=1)
    tame(model)
    prompts = prompts_of(random.Random(4), 6)
    asked = [(None, Choice()), (2, Choice()), (1, Choice()), (None, Choice(repetition_penalty=1.5))] + [
        (None, Choice())
    ] * 2
    jobs = [
        Collected(prompt, 5 + 2 * i, choice, trips=trips, logprobs=1 if i == 4 else None)
        for i, (prompt, (trips, choice)) in enumerate(zip(prompts, asked, strict=True))
    ]
    expected = [
        alone(model, prompt, 5 + 2 * i, max_trips=trips, repetition_penalty=choice.repetition_penalty)
        for i, (prompt, (trips, choice)) in enumerate(zip(prompts, asked, strict=True))
    ]
    jobs[5].job.stops = frozenset([expected[5][9]])
    submitted_at_once(running, jobs)
    assert [one.wait() for one in jobs] == ["length"] * 5 + ["stop"]
    expected[5] = expected[5][: expected[5].index(expected[5][9]) + 1]
    assert [one.tokens for one in jobs] == expected
    with torch.no_grad():
        ids = torch.tensor([prompts[4] + expected[4]])
        logs = model(ids).logits[0, len(prompts[4]) - 1 : -1].log_softmax(-1)
    found = [event.logprob for event in jobs[4].events if hasattr(event, "logprob")]
    torch.testing.assert_close(
        found, logs.gather(1, torch.tensor([expected[4]]).T)[:, 0].tolist(), rtol=1e-4, atol=1e-4
    )
    counts = running.counts
    assert 0 < counts["accepted"] < counts["drafted"] and counts["steps"] < sum(map(len, expected)), counts


KINDS = {TRIPS: ("loop", {"draft_trips": 1}), LOOKUP: ("vanilla", {"lookup": True})}


# Guesses by lookup are right where a text repeats itself, which a random model does at low temperatures.
@pytest.mark.parametrize(
    ("kind", "temperature"), [pytest.param(TRIPS, 0.8, marks=pytest.mark.slow), (LOOKUP, 0.0), (LOOKUP, 0.01)]
)
def test_drafts_change_no_text(engine, monkeypatch, kind, temperature):  # noqa: F811
    """Greedy or drawn, alone or in company: as without drafts, with the same seeds. Drafts that all pass, and what was
    not right but stays in the cache, would be other texts."""
    case, settings = KINDS[kind]
    monkeypatch.setattr(Drafting, "best", always(kind))
    (running, model), (plain, _) = engine(case, **settings), engine(case)
    tame(model)
    plain.model.load_state_dict(model.state_dict())
    prompts = [(i, [*prompt, *prompt]) for i, prompt in enumerate(prompts_of(random.Random(0), 4))]
    expected = drawn(plain, prompts, temperature)
    assert drawn(running, prompts, temperature) == expected
    assert [drawn(running, [pair], temperature)[0] for pair in prompts] == expected
    assert 0 < running.counts["accepted"] < running.counts["drafted"], running.counts
    with monkeypatch.context() as planted:
        keep = batches.SlabBatch.keep
        planted.setattr(batches.SlabBatch, "keep", lambda self, kept: keep(self, [one + 1 for one in kept]))
        assert drawn(running, prompts, temperature) != expected
    monkeypatch.setattr(Choice, "settled", lambda self, drafts, logits, *more: [*drafts, 5][: len(logits)])
    assert drawn(running, prompts, temperature) != expected


def test_a_text_that_ends_leaves_the_drafts_of_others(engine, monkeypatch):  # noqa: F811
    """Texts of different lengths, stops and log-probabilities, of which drafts pass the end."""
    monkeypatch.setattr(Drafting, "best", always(LOOKUP))
    running, model = engine("vanilla", lookup=True)
    prompts = [[*prompt, *prompt] for prompt in prompts_of(random.Random(2), 5)]
    expected = [alone(model, prompt, 4 + 9 * i) for i, prompt in enumerate(prompts)]
    jobs = [Collected(prompt, 4 + 9 * i, Choice(), logprobs=i % 2 or None) for i, prompt in enumerate(prompts)]
    jobs[4].job.stops = frozenset([expected[4][17]])
    submitted_at_once(running, jobs)
    assert [one.wait() for one in jobs] == ["length"] * 4 + ["stop"]
    expected[4] = expected[4][: expected[4].index(expected[4][17]) + 1]
    assert [one.tokens for one in jobs] == expected
    assert running.counts["accepted"] and running.counts["steps"] < max(map(len, expected))


def test_what_cannot_be_looked_up_is_refused():
    for case, settings in (("adaponder", {}), ("vanilla", {"policy": Policy("sinks", 16, 2, 0.5)})):
        with pytest.raises(SettingsError, match="cannot remove tokens"):
            Engine(build(config_of(case)), BUDGET, lookup=True, **settings)

"""Prompts that begin alike read what they share once, with the result of reading the same chunks anew."""

import random
import time

import pytest
import torch

from fathom.inference import engine as engines
from fathom.inference.batches import SlabBatch, batch_for
from fathom.inference.engine import Engine
from fathom.inference.prefixes import LEAST, NOTHING, Prefixes
from fathom.inference.sampling import Choice
from tests.inference.test_engine import Collected
from tests.models.cases import build, config_of

CASES = ["vanilla", "depth_attention", "loop+depth_attention-grid", "adaponder+depth_attention", "latent_cot"]
BUDGET = 1 << 26
LONG = {"max_position_embeddings": 512}


def tokens_of(seed, count):
    chance = random.Random(seed)
    return [chance.randrange(3, 61) for _ in range(count)]


class Watched(Engine):
    """An engine that notes how prompts are read, and the logits that first tokens are chosen from."""

    def __init__(self, *given, **settings):
        self.first = {}
        super().__init__(*given, **settings)

    def _take(self, lane, jobs, logits):
        for job, row in zip(jobs, logits, strict=True):
            if not job.made:
                self.first[id(job)] = row.clone()
        super()._take(lane, jobs, logits)


def ask(engine, prompt, new=6, **settings):
    """The job, once it has ended, and its tokens."""
    one = Collected(prompt, new, Choice(), **settings)
    engine.submit([one.job])
    assert one.wait() == "length", one.events
    return one.job, one.tokens


def anew(model, prompt, cuts, new):
    """First logits and greedy tokens of a prompt that is read in these chunks, alone."""
    batch, first = batch_for(model, None), 0
    with torch.inference_mode():
        batch.reserve(1, 256)
        for cut in sorted({*cuts, len(prompt)}):
            if first < cut <= len(prompt):
                logits = batch.read(prompt[first:cut])
                first = cut
        batch.join()
        made, begun = [int(logits[-1].argmax())], logits[-1].clone()
        while len(made) < new:
            made.append(int(batch.step([made[-1]])[0].argmax()))
    return begun, made


@pytest.fixture(params=CASES)
def model(request):
    return build(config_of(request.param, **LONG))


@pytest.fixture
def engine(model, monkeypatch):
    monkeypatch.setattr("fathom.inference.engine.chunk", lambda seconds: 512)
    engine = Watched(model, BUDGET, prefix_budget=BUDGET)
    yield engine
    engine.join(10)


def check(engine, model, prompt, cached, cuts):
    """A prompt takes over so many tokens, and its logits are to the bit those of the chunks."""
    job, made = ask(engine, prompt)
    assert job.cached == cached
    begun, tokens = anew(model, prompt, cuts, 6)
    assert torch.equal(engine.first[id(job)], begun) and made == tokens
    return job


@pytest.mark.quick("depth_attention", "adaponder+depth_attention")
def test_to_the_bit(engine, model):
    """The same prompt again is not read; one that goes on reads its rest; of those that part, the third gains."""
    shared, first, second, third = tokens_of(1, 90), tokens_of(2, 40), tokens_of(3, 37), tokens_of(4, 11)
    check(engine, model, shared + first, 0, [])
    check(engine, model, shared + first, 130, [])
    check(engine, model, shared + first + second, 130, [130])
    check(engine, model, shared + second, 0, [90])
    check(engine, model, shared + third, 90, [90])
    assert engine.counts["hits"] == 3 and engine.counts["cached"] == 130 + 130 + 90
    assert engine.counts["prompt_tokens"] == 130 + 37 + 127 + 11


@pytest.mark.quick("vanilla", "latent_cot")
def test_a_conversation_goes_on_from_its_answer(engine, model):
    prompt = tokens_of(5, 60)
    job, made = ask(engine, prompt, new=20)
    again = prompt + made + tokens_of(6, 9)
    known = 79 if type(batch_for(model)).keeps_steps else 60
    job, _ = ask(engine, again)
    assert job.cached == known
    assert ask(engine, again)[0].cached == len(again)


@pytest.mark.parametrize("model", ["vanilla"], indirect=True)
def test_logits_behind_a_longer_prompt_belong_to_its_tokens(engine, model):
    """A prompt that is asked again, and answered in another way, does not keep the logits of the prompt that continued
    the first answer."""
    prompt = tokens_of(5, 60)
    longer = prompt + ask(engine, prompt, new=3)[1] + tokens_of(6, 4)
    ask(engine, longer)
    other = Collected(prompt, 20, Choice(1.0, seed=1))
    engine.submit([other.job])
    assert other.wait() == "length" and other.job.cached == 60
    again = (prompt + other.tokens)[: len(longer)]
    job, made = ask(engine, again)
    begun, tokens = anew(model, again, [], 6)
    assert torch.allclose(engine.first[id(job)], begun, atol=1e-4) and made == tokens


@pytest.mark.quick("depth_attention")
def test_other_requests_do_not_matter(engine, model):
    """In company, with jobs that score their prompts or count their iterations, which read them themselves."""
    prompt = tokens_of(7, 70)
    ask(engine, prompt)
    some = [Collected(prompt + tokens_of(seed, 5), 8, Choice(1.0, seed=seed)) for seed in range(6)]
    plain = [
        Collected(prompt, 4, Choice(), score_prompt=True, logprobs=0),
        Collected(prompt, 4, Choice(), tell_trips=True),
    ]
    engine.submit([one.job for one in some + plain])
    assert [one.wait() for one in some + plain] == ["length"] * 8
    assert [one.job.cached for one in some] == [70] * 6 and [one.job.cached for one in plain] == [0, 0]
    alone = Watched(model, BUDGET)
    for one in some:
        assert ask(alone, list(one.job.prompt), 8)[0].made is not None
        fresh = Collected(one.job.prompt, 8, one.job.choice)
        alone.submit([fresh.job])
        fresh.wait()
        assert fresh.tokens == one.tokens
    alone.join(10)


def test_a_planted_fault_is_seen(monkeypatch):
    """Without the rule about chunks, first logits are not those of the same chunks."""
    model = build(config_of("vanilla", **LONG))
    found = engines.Prefixes.find

    def anywhere(self, prompt, *given):
        for kept in self._all.values():
            kept.cuts = list(range(len(kept)))
            kept.scores = {n: next(iter(kept.scores.values())) for n in range(len(kept) + 1)}
        return found(self, prompt, *given)

    monkeypatch.setattr(engines.Prefixes, "find", anywhere)
    engine = Watched(model, BUDGET, prefix_budget=BUDGET)
    prompt = tokens_of(8, 90)
    ask(engine, prompt)
    job, _ = ask(engine, prompt[:60])
    assert not torch.equal(engine.first[id(job)], anew(model, prompt[:60], [], 2)[0])
    engine.join(10)


@pytest.mark.quick("vanilla", "adaponder*")
def test_bytes_are_bounded_and_the_latest_stay(model):
    one = Watched(model, BUDGET, prefix_budget=BUDGET)
    ask(one, tokens_of(1, 64), new=1)
    size = one.prefixes.bytes
    one.join(10)
    small = Watched(model, BUDGET, prefix_budget=3 * size + size // 2)
    for seed in (1, 2, 3):
        ask(small, tokens_of(seed, 64), new=1)
    assert ask(small, tokens_of(1, 64), new=1)[0].cached == 64
    ask(small, tokens_of(4, 64), new=1)
    assert 0 < small.prefixes.bytes <= small.prefixes.budget and len(small.prefixes) == 3
    assert ask(small, tokens_of(2, 64), new=1)[0].cached == 0, "the one that was not used for the longest time"
    ask(small, tokens_of(5, 500), new=1)
    assert small.prefixes.bytes <= small.prefixes.budget and len(small.prefixes) == 3, "too large a one changes nothing"
    small.join(10)


def test_a_row_that_cannot_be_kept_is_not_copied(monkeypatch):
    copied = []
    monkeypatch.setattr(SlabBatch, "kept", lambda self, row=None: copied.append(row))
    engine = Watched(build(config_of("vanilla", **LONG)), BUDGET, prefix_budget=1000)
    ask(engine, tokens_of(1, 64))
    engine.join(10)
    assert not copied


def test_a_waiting_prompt_is_not_looked_up_anew_for_each_that_joins_it(monkeypatch):
    engine = Watched(build(config_of("vanilla", **LONG)), BUDGET, prefix_budget=BUDGET)
    ask(engine, tokens_of(1, 64))
    found, looked = engine.prefixes.find, []
    monkeypatch.setattr(engine.prefixes, "find", lambda *given: looked.append(1) or found(*given))
    some = [Collected(tokens_of(seed, 32), 400, Choice()) for seed in range(2, 18)]
    engine.submit([one.job for one in some])
    while not all(one.tokens for one in some):
        time.sleep(0.001)
    assert len(looked) <= 2 * len(some)
    again = [Collected(one.job.prompt, 3, Choice()) for one in some]  # each was kept, though they were read at once
    engine.submit([one.job for one in again])
    for one, other in zip(some, again, strict=True):
        assert other.wait() == "length" and other.job.cached == 32 and other.tokens == one.tokens[:3]
    engine.join(10)


@pytest.mark.quick("vanilla")
def test_without_a_budget_nothing_is_kept(model):
    engine = Watched(model, BUDGET)
    for _ in range(2):
        assert ask(engine, tokens_of(1, 64))[0].cached == 0
    assert engine.prefixes.bytes == 0 and len(engine.prefixes) == 0
    engine.join(10)


def test_what_can_be_taken_over():
    store, row = Prefixes(1000), tokens_of(1, 100)
    assert store.find(row, None) is NOTHING
    store.keep(row, None, [40, 100], {100: torch.zeros(1, 4)}, (None, 10))
    assert store.find(row, None).count == 100 and store.find(row, 2) is NOTHING
    assert store.find(row[: LEAST - 1], None) is NOTHING
    assert store.find(row[:70] + [1] * 30, None, in_parts=False) is NOTHING
    found = store.find(row[:70] + [1] * 30, None)
    assert (found.count, found.cut) == (40, 0), "cutting would save fewer than LEAST tokens"
    found = store.find(row[:80] + [1] * 30, None)
    assert (found.count, found.cut) == (40, 80)
    assert store.find(row[:70], None).count == 40, "its last logits are not known"
    found = store.find([*row, 1], None)
    assert (found.count, found.cut) == (100, 0)
    store.keep([*row, 5], None, [40, 100, 101], {}, (None, 1200))
    assert store.find(row, None).count == 100, "a row that is larger than all room takes no other's"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ponder2", "ponder3"])
def test_prompts_that_are_solved_as_a_whole(case, monkeypatch):
    """Nothing of theirs can be taken over but all of it."""
    monkeypatch.setattr(engines, "may_chunk", lambda model: False)
    model = build(config_of(case, **LONG))
    engine = Watched(model, BUDGET, prefix_budget=BUDGET)
    prompt = tokens_of(1, 60)
    _, made = ask(engine, prompt)
    again, same = ask(engine, prompt)
    assert (again.cached, same) == (60, made)
    assert ask(engine, [*prompt, 5])[0].cached == 0
    engine.join(10)

"""The order in which prompts are read, counted in tokens and steps: nobody waits for much longer ones, or for ever."""

import random
import threading
from dataclasses import dataclass

import pytest

from fathom.inference import engine as engines
from fathom.inference.batches import LoneBatch, SlabBatch, SlotBatch, token_bytes
from fathom.inference.engine import Engine
from fathom.inference.reading_order import (
    BOUND,
    CHUNK,
    FEW,
    FIRST_PART,
    LEAST,
    PASS,
    PATIENCE,
    READ,
    YIELDED,
    chunk,
    in_order,
    interrupts,
    learned,
    most_rows,
    piece,
    rest,
    taken,
)  # fmt: skip
from fathom.inference.sampling import Choice
from fathom.kvcache.policy import Policy
from tests.inference.test_engine import BUDGET, Collected, alone, submitted_at_once
from tests.models.cases import build, config_of

LONG = {"max_position_embeddings": 512, "num_hidden_layers": 2}
KINDS = {"vanilla": SlabBatch, "adaponder": SlotBatch, "sinks": LoneBatch}


@dataclass
class Prompt:
    left: int
    passed: int = 0
    in_a_row: int = 0
    further: bool = False


@pytest.mark.parametrize(("fixed", "each"), [(0.03, 0.0007), (0.0, 0.003), (0.05, 1e-9), (0.3, 0.01)])
def test_a_chunk_takes_the_time_that_is_stated(fixed, each):
    """Also where part of its time does not depend on its size. A shorter prompt changes nothing: in proportion, too
    few of its tokens would fit."""
    fitting = None
    for _ in range(12):
        fitting = learned(fitting, chunk(fitting), fixed + each * chunk(fitting))
        assert LEAST <= chunk(fitting) <= READ
        assert chunk(fitting) == LEAST or fixed + each * chunk(fitting) <= CHUNK
    assert chunk(fitting) in (LEAST, READ) or fixed + each * (chunk(fitting) + 2 * LEAST) > CHUNK
    assert learned(fitting, LEAST, fixed + each * LEAST) == pytest.approx(fitting) or chunk(fitting) == LEAST
    assert chunk(None) < READ and learned(fitting, LEAST, 10.0) < fitting  # a slow machine
    assert learned(fitting, 1, 10.0) == fitting or chunk(fitting) == LEAST  # or one that stood still for a moment
    recovered = learned(0.1, LEAST - 5, 0.1)  # beside short prompts, never a whole chunk
    for _ in range(5):
        recovered = learned(recovered, LEAST - 5, 0.1)
    assert recovered > 0.9 * LEAST


def test_the_shortest_is_read_first_but_none_for_ever():
    """A long prompt beside short ones that never end: it is read after `PATIENCE` times its own length."""
    assert [one.left for one in in_order([Prompt(9), Prompt(2), Prompt(5)])] == [2, 5, 9]
    many, other = [Prompt(1), Prompt(1, further=True), Prompt(1, YIELDED, further=True)], Prompt(5)
    assert in_order([*many, other]) == [many[2], many[0], other, many[1]]
    long, read = Prompt(100), 0
    while in_order([long, Prompt(10)])[0] is not long:
        long.passed += 10
        read += 10
    assert (PATIENCE - 1) * 100 < read <= PATIENCE * 100
    assert interrupts(Prompt(10), Prompt(100)) and not interrupts(Prompt(60), Prompt(100))
    waited = Prompt(100, 100 * PATIENCE)
    assert not interrupts(Prompt(10), waited) and in_order([Prompt(10), waited])[0] is waited


def test_a_prompt_of_a_few_tokens_is_first_in_a_turn():
    """However long others have waited, and they are read in the rest of it; further texts of a request go after all."""
    few, waited = Prompt(10), Prompt(100, 200 * PATIENCE)
    assert in_order([waited, few], first=True)[0] is few and interrupts(few, waited, first=True)
    assert not interrupts(Prompt(40), waited, first=True) and not interrupts(few, Prompt(19), first=True)
    assert not interrupts(Prompt(1, further=True), few, first=True)
    assert interrupts(Prompt(1, further=True), Prompt(9, further=True))
    for share in (LEAST, 48, READ):
        assert piece(share + 7, share) == share + 7 and piece(share + 8, share) == share
        assert rest(0.0, share) == share and taken(share, share) == 1
        assert rest(taken(5, share), share) >= LEAST and rest(FIRST_PART, share) <= max(LEAST, share // 2)


def test_one_request_has_as_many_rows_as_a_step_has_time_for():
    assert most_rows(None) == most_rows((1, 10.0)) == most_rows((64, 10.0)) == FEW
    for each in (0.001, 0.0075, 0.02):
        assert most_rows((16, 16 * each)) * each == pytest.approx(max(BOUND, FEW * each), abs=each)


class Counted(Engine):
    """An engine that notes, for every forward pass, how many tokens it reads or that it is a step."""

    def __init__(self, *given, **settings):
        self.log = []
        super().__init__(*given, **settings)

    def _read(self, lane, jobs, left):
        count = super()._read(lane, jobs, left)
        self.log.append(count)
        return count

    def _step(self, lane):
        self.log.append("step")
        return super()._step(lane)


def model_of(kind):
    """A model whose batch is of a kind, and the policy of its cache."""
    policy = Policy("sinks", 400, 2, 0.5) if kind == "sinks" else None
    return build(config_of("vanilla" if kind == "sinks" else kind, **LONG)), policy


def waited(running, long, short):
    """How many tokens of others are read before each of the short prompts that a client sends one after the other while
    long ones are read."""
    stream, found, begun = Collected([5, 6], 400, Choice()), [], []
    running.submit([stream.job])
    while not stream.tokens:
        threading.Event().wait(0.001)
    jobs, over = [Collected(prompt, 2, Choice()) for prompt in long], threading.Event()

    def late():
        one = Collected(short, 2, Choice())
        begun.append(running.counts["prompt_tokens"])
        one.job.deliver = lambda event, take=one.take: (heard(one, event), take(event))
        return one

    def heard(one, event):
        if not one.tokens:
            found.append(running.counts["prompt_tokens"] - begun[-1])
        if isinstance(event, str) and not all(job.done.is_set() for job in jobs):
            running.submit([late().job])
        elif isinstance(event, str):
            over.set()

    submitted_at_once(running, [*jobs, first := late()])
    assert [one.wait() for one in [first, *jobs]] == ["length"] * (len(jobs) + 1) and over.wait(60)
    running.cancel([stream.job])
    return found, [*jobs, first], stream


@pytest.mark.quick("sinks")
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_prompt_does_not_wait_for_long_ones(kind, monkeypatch):
    """Beside six of 200 tokens it waits for a chunk or two, also when those have waited for one another; first come
    first served, for all of them. Texts are as alone, and between two steps no more than a chunk is read."""
    monkeypatch.setattr(engines, "chunk", lambda seconds: 32)
    model, policy = model_of(kind)
    chance = random.Random(0)
    long = [[chance.randrange(3, 61) for _ in range(200 - i)] for i in range(6)]
    running = Counted(model, BUDGET, policy)
    try:
        waits, jobs, stream = waited(running, long, [7, 8, 9])
        between = " ".join(map(str, running.log)).split("step")
        assert max(sum(map(int, part.split())) for part in between) < 32 + PASS // 2 + len([7, 8, 9])
        assert len(waits) > 3 and max(waits) <= 2 * 32
        if policy is None:
            assert [one.tokens for one in jobs] == [alone(model, [*one.job.prompt], 2) for one in jobs]
            assert stream.tokens == alone(model, [5, 6], len(stream.tokens))
        with monkeypatch.context() as planted:  # first come, first served
            planted.setattr(engines, "in_order", lambda jobs, first=False: list(jobs))
            planted.setattr(engines, "interrupts", lambda *given: False)
            assert max(waited(running, long, [7, 8, 9])[0]) > 1000
    finally:
        running.join(10)


@pytest.mark.parametrize("kind", ["vanilla", "adaponder"])
def test_a_prompt_is_interrupted_and_resumed(kind, monkeypatch):
    """Prompts that come while another is read, each shorter than half of the rest: every text is as alone, and so is
    one that follows a prompt that was given up while it was set aside."""
    monkeypatch.setattr(engines, "chunk", lambda seconds: 16)
    model, _ = model_of(kind)
    chance, arrived = random.Random(1), []
    prompts = [[chance.randrange(3, 61) for _ in range(size)] for size in (300, 120, 40, 2)]
    running = Counted(model, BUDGET, prefix_budget=1 << 22)
    jobs = [Collected(prompt, 5, Choice()) for prompt in prompts]
    read, depths = running._read, []

    def reading(lane, now, left):
        depths.append(len(running.paused))
        if len(arrived) + 1 < len(jobs) and now[0] is jobs[len(arrived)].job and now[0].read:
            arrived.append(jobs[len(arrived) + 1])
            running.submit([arrived[-1].job])
        return read(lane, now, left)

    running._read = reading
    try:
        running.submit([jobs[0].job])
        assert [one.wait() for one in jobs] == ["length"] * 4
        assert max(depths) == 3 and not running.paused
        assert [one.tokens for one in jobs] == [alone(model, prompt, 5) for prompt in prompts]
        arrived.clear()
        jobs[:] = [Collected([9, *prompts[0]], 5, Choice()), Collected([9, *prompts[3]], 5, Choice())]
        depths.clear()
        running.submit([jobs[0].job])
        assert jobs[1].wait() == "length"
        running.cancel([jobs[0].job])
        after = Collected(prompts[2][::-1], 5, Choice())
        running.submit([after.job])
        assert after.wait() == "length" and after.tokens == alone(model, prompts[2][::-1], 5)
        assert 1 in depths and not running.paused
    finally:
        running.join(10)


def test_a_long_prompt_is_read_beside_short_ones_that_never_end(monkeypatch):
    """After so many tokens of theirs; without ageing, only when they end."""
    monkeypatch.setattr(engines, "chunk", lambda seconds: 16)
    model, _ = model_of("vanilla")
    running = Counted(model, BUDGET)

    def overtaken():
        long, made, done = Collected([7] * 100, 1, Choice()), [], threading.Event()

        def again(event=None):
            if not isinstance(event, str | None) or done.is_set() or len(made) > 150:
                return
            made.append(Collected([5] * 8, 1, Choice()))
            made[-1].job.deliver = again
            running.submit([made[-1].job])

        held = threading.Event()
        running.call(lambda: held.wait(60))
        running.submit([long.job])
        for _ in range(3):
            again()
        held.set()
        long.wait()
        done.set()
        return 8 * len(made)

    try:
        assert 100 * (PATIENCE - 1) < overtaken() <= 100 * (PATIENCE + 2)
        monkeypatch.setattr(engines, "in_order", lambda jobs, first=False: sorted(jobs, key=lambda job: job.left))
        monkeypatch.setattr(engines, "interrupts", lambda new, reading, first: 2 * new.left <= reading.left)
        assert overtaken() > 8 * 150
    finally:
        running.join(10)


def test_a_prompt_gets_the_room_that_it_waits_for(monkeypatch):
    """Short prompts that never end do not take it for ever, though each goes first where there is room."""
    monkeypatch.setattr(engines, "chunk", lambda seconds: 32)
    monkeypatch.setattr(engines, "ROWS", 4)
    running, made, over = Engine(model_of("vanilla")[0], BUDGET), [], threading.Event()
    long = Collected([7] * 40, 2, Choice())

    def again(event=None):
        if isinstance(event, str | None) and not over.is_set():
            made.append(Collected([5] * 8, 2 + len(made) if len(made) < 4 else 5, Choice()))
            made[-1].job.deliver = again
            running.submit([made[-1].job])

    try:
        held = threading.Event()
        running.call(lambda: held.wait(60))
        for _ in range(8):
            again()
        running.submit([long.job])
        held.set()
        threading.Timer(5, over.set).start()
        assert long.wait() == "length" and not over.is_set()
        assert 8 * len(made) <= 40 * (PATIENCE + 4)
    finally:
        over.set()
        running.join(10)


def test_what_waits_for_room_lets_those_go_on_that_have_some(monkeypatch):
    """A long prompt is set aside for a short one, and what waits does not fit beside it: it is read on."""
    monkeypatch.setattr(engines, "chunk", lambda seconds: 32)
    model = build(config_of("vanilla", **LONG | {"max_position_embeddings": 4096})).eval()
    prompts = {"long": ([7] * 640, 2), "wide": ([9] * 130, 1100), "short": ([5] * 20, 4)}
    long, wide, short = (Collected(*given, Choice()) for given in prompts.values())
    later = [(544, short), (32, wide)]  # when so much of the long prompt has been read

    class Watched(Engine):
        def _read(self, lane, jobs, most):
            count = super()._read(lane, jobs, most)
            if jobs[0] is long.job and later and long.job.read >= later[-1][0]:
                self.submit([later.pop()[1].job])
            return count

    running = Watched(model, 2100 * token_bytes(model, None))
    try:
        running.submit([long.job])
        assert [one.wait() for one in (long, short)] == ["length"] * 2 and not later
        wide.job.cancelled = "cancelled"
    finally:
        running.join(10)


def test_known_prompts_take_no_pass(monkeypatch):
    """Prompts that are in the prefix cache join together, as many as a turn has tokens."""
    monkeypatch.setattr(engines, "chunk", lambda seconds: 16)
    running, joins = Counted(model_of("vanilla")[0], BUDGET, prefix_budget=1 << 24), []
    try:
        first = Collected([5 + i for i in range(40)], 2, Choice())
        running.submit([first.job])
        first.wait()
        running.log.clear()
        jobs = [Collected([*first.job.prompt], 4, Choice()) for _ in range(12)]
        submitted_at_once(running, jobs)
        assert [one.wait() for one in jobs] == ["length"] * 12
        joins = [part.split().count("0") for part in " ".join(map(str, running.log)).split("step")]
        assert max(joins) >= 10
    finally:
        running.join(10)


def test_what_is_set_aside_counts_as_memory(monkeypatch):
    """A short prompt waits rather than that a copy of the long one exceeds the budget."""
    monkeypatch.setattr(engines, "chunk", lambda seconds: 16)
    monkeypatch.setattr(engines, "GRAIN", 16)
    model, _ = model_of("vanilla")
    for room in (2 * 208, 3 * 208):
        running = Counted(model, token_bytes(model, None) * room)
        jobs, most = [Collected([7] * 200, 2, Choice()), Collected([5] * 8, 2, Choice())], []
        read = running._read

        def reading(lane, now, left, running=running, jobs=jobs, most=most, read=read):
            copied = sum(job.paused[1] for _, job in running.paused if job.paused)
            most.append(copied + running.cache_bytes)
            if now[0] is jobs[0].job and 0 < now[0].read < 32:
                running.submit([jobs[1].job])
            return read(lane, now, left)

        running._read = reading
        running.submit([jobs[0].job])
        while not jobs[1].job.began:
            threading.Event().wait(0.001)
        assert [one.wait() for one in jobs] == ["length"] * 2
        running.join(10)
        assert max(most) <= running.budget
        assert [one.tokens for one in jobs] == [alone(model, [*one.job.prompt], 2) for one in jobs]


@pytest.mark.parametrize("scarce", ["memory", "rows"])
def test_a_request_of_many_texts_leaves_room_for_others(scarce, monkeypatch):
    """Another request's text is made while the many run and wait; if they took all the room, only after one of them."""
    monkeypatch.setattr(engines, "GRAIN", 16)
    model, _ = model_of("vanilla")
    if scarce == "rows":
        monkeypatch.setattr(engines, "ROWS", 4)
        monkeypatch.setattr(engines, "OTHERS", 1)
    running = Engine(model, token_bytes(model, None) * (4 * 48 if scarce == "memory" else 100 * 48))

    def finished_before(request):
        many = [Collected([5 + i], 40, Choice(), request=request) for i in range(6)]
        running.submit([one.job for one in many])
        while not many[1].tokens:
            threading.Event().wait(0.001)
        late = Collected([7, 8], 2, Choice(), request=object())
        running.submit([late.job])
        assert late.wait() == "length"
        ended = sum(one.done.is_set() for one in many)
        assert [one.wait() for one in many] == ["length"] * 6 and late.tokens == alone(model, [7, 8], 2)
        return ended

    try:
        assert finished_before(object()) == 0
        assert finished_before(None) > 0
    finally:
        running.join(10)


def test_further_texts_of_a_request_are_read_after_others():
    """Also where their prompts are shorter."""
    model, _ = model_of("vanilla")
    running, order = Engine(model, BUDGET), []
    read = running._read
    running._read = lambda lane, jobs, left: (order.extend(jobs), read(lane, jobs, left))[1]
    try:
        for request in (object(), None):
            order.clear()
            many = [Collected([5], 2, Choice(), request=request) for _ in range(6)]
            held = threading.Event()
            running.call(lambda held=held: held.wait(60))
            running.submit([one.job for one in many])
            running.submit([(late := Collected([7, 8, 9, 7, 8], 2, Choice())).job])
            held.set()
            assert [one.wait() for one in [*many, late]] == ["length"] * 7
            assert order.index(late.job) == (6 if request is None else 1)
    finally:
        running.join(10)


def test_no_prompt_is_read_in_crumbs(monkeypatch):
    """A pass over a token takes nearly as long as one over sixteen: no prompt of five is read in several, whatever the
    turn has left of its share."""
    monkeypatch.setattr(engines, "chunk", lambda seconds: 16)
    model, _ = model_of("vanilla")
    running = Counted(model, BUDGET)
    held = threading.Event()
    running.call(lambda: held.wait(60))
    jobs = [Collected([5 + i] * size, 2, Choice()) for i, size in enumerate((13, 5, 21, 5, 14))]
    submitted_at_once(running, jobs)
    held.set()
    try:
        assert [one.wait() for one in jobs] == ["length"] * 5
        assert [count for count in running.log if count != "step" and count < 5] == []
        assert sum(count != "step" for count in running.log) <= 5
    finally:
        running.join(10)


@pytest.mark.parametrize("slow", [True, False])
def test_texts_of_a_request_wait_where_steps_are_slow(slow, monkeypatch):
    """Further texts of one request, unlike those of several, join only as long as a step keeps to its time."""
    monkeypatch.setattr(engines, "most_rows", lambda step: most_rows(step and (step[0], 1.0 if slow else 1e-4)))
    model, _ = model_of("vanilla")
    running, rows = Counted(model, BUDGET), []
    step = running._step
    monkeypatch.setattr(running, "_step", lambda lane: (rows.append(len(lane.jobs)), step(lane)))

    def most(request):
        rows.clear()
        many = [Collected([5 + i], 8, Choice(), request=request or object()) for i in range(24)]
        submitted_at_once(running, many)
        assert [one.wait() for one in many] == ["length"] * 24
        assert [many[i].tokens for i in (0, 23)] == [alone(model, [5 + i], 8) for i in (0, 23)]
        return max(rows)

    try:
        assert most(object()) == (FEW if slow else 24)
        assert most(None) == 24
    finally:
        running.join(10)

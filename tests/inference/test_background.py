"""Long work beside texts that run: a step between two slices, and an end when nobody waits for it."""

import asyncio
import itertools
import threading

import pytest

from fathom.errors import RequestError
from fathom.inference.background import Background
from fathom.inference.engine import Engine
from fathom.inference.sampling import Choice
from fathom.lens import look as looking
from fathom.lens.look import look
from tests.inference.test_engine import BUDGET, Collected, alone
from tests.models.cases import build, config_of
from tests.tiny import tiny_config, tiny_tokenizer


@pytest.fixture
def running():
    engine = Engine(build(config_of("vanilla", num_hidden_layers=2)), BUDGET)
    yield engine
    engine.join(10)


def beside(engine, work):
    """What sliced work makes while a text runs, and the text."""
    stream = Collected([5, 6], 400, Choice())
    engine.submit([stream.job])
    while not stream.tokens:
        threading.Event().wait(0.001)
    made = asyncio.run(Background(engine).run(work(stream)))
    engine.cancel([stream.job])
    return made, stream


def test_a_text_goes_on_between_two_slices(running):
    """A step for every slice; work that never breathes lets none be made."""

    def work(stream):
        return lambda breathe: [(breathe(), running.counts["steps"])[1] for _ in range(6)]

    steps, stream = beside(running, work)
    assert all(later > earlier for earlier, later in itertools.pairwise(steps)), steps
    assert stream.tokens == alone(running.model, [5, 6], len(stream.tokens))
    held, _ = beside(running, lambda stream: lambda breathe: [running.counts["steps"] for _ in range(6)])
    assert len(set(held)) == 1


def test_work_that_is_given_up_ends(running):
    done, ended = [], threading.Event()

    def work(breathe):
        try:
            while True:
                done.append(1)
                breathe()
        finally:
            ended.set()

    async def leave():
        background = Background(running)
        task = asyncio.create_task(background.run(work))
        while len(done) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await background.run(lambda breathe: 7) == 7, "and the next is done"

    asyncio.run(leave())
    assert ended.wait(10)


def test_errors_and_the_engines_end_are_told(running):
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Background(running).run(lambda breathe: 1 / 0))

    def closing(breathe):
        running.close()
        while True:
            breathe()

    with pytest.raises(RequestError, match="shutting down"):
        asyncio.run(Background(running).run(closing))


@pytest.mark.parametrize("fields", [{}, {"recurrence": "ponder2", "mixer": "none"}])
def test_the_lens_breathes_in_every_layer(fields, monkeypatch):
    """And between pieces of the logits, of which none is larger than the limit."""
    model, tokenizer, breaths = build(tiny_config(**fields)), tiny_tokenizer(), []
    text = "The sailors let out the lead. " * 3
    seen = look(model, tokenizer, text, breathe=lambda: breaths.append(1))
    assert len(breaths) > 2 * model.config.num_hidden_layers
    monkeypatch.setattr(looking, "LOGITS_AT_ONCE", 8 * model.config.vocab_size)
    few, breaths[:] = len(breaths), []
    again = look(model, tokenizer, text, breathe=lambda: breaths.append(1))
    assert len(breaths) > 2 * few and again.tokens == seen.tokens

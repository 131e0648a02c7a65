"""Who tokenises, in which order, and how many may wait; by the order of things, not by seconds."""

import asyncio
import threading

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fathom.errors import RequestError
from fathom.inference import tokenising
from fathom.inference.api import ApiError
from fathom.inference.prompt import PROBE, SLACK, encode
from fathom.inference.tokenising import SHORT, Tokenising, written_size
from tests.tiny import piece_tokenizer, tiny_tokenizer


def test_a_short_text_does_not_wait_for_long_ones():
    """Eight long ones, of which none ends before the short one has ended."""
    pool, free, order = Tokenising(), threading.Event(), []

    async def one(size, name):
        await pool.run(size, lambda: free.wait(30) if size > SHORT else None)
        order.append(name)

    async def all_of_them():
        long = [asyncio.create_task(one(SHORT + 1, "long")) for _ in range(8)]
        await asyncio.sleep(0)
        await one(SHORT, "short")
        free.set()
        await asyncio.gather(*long)

    asyncio.run(all_of_them())
    assert order == ["short", *["long"] * 8]


def test_the_size_of_what_is_written():
    """Everything that a template or a grammar writes counts, and what is nested beyond measure is large."""
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    assert written_size([{"content": "a" * 9, "tool_calls": [{"arguments": {"x": ["b"] * 9_000}}]}]) > SHORT
    assert written_size(["a" * 100]) < 200 < SHORT < written_size(deep)


def test_so_many_may_wait(monkeypatch):
    """One more is refused at once; once the others are done, it is taken."""
    monkeypatch.setattr(tokenising, "QUEUES", {"short": 256, "long": 2})
    pool, free = Tokenising(), threading.Event()

    async def all_of_them():
        long = [asyncio.create_task(pool.run(SHORT + 1, lambda: free.wait(30))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="wait to be tokenised") as caught:
            await pool.run(SHORT + 1, lambda: True)
        assert caught.value.status_code == 429
        assert await pool.run(5, lambda: "short") == "short", "others are taken"
        free.set()
        assert await asyncio.gather(*long) == [True, True]
        return await pool.run(SHORT + 1, lambda: "late")

    assert asyncio.run(all_of_them()) == "late"


def test_a_grammar_does_not_wait_for_those_that_take_long():
    pool, free = Tokenising(), threading.Event()

    async def both():
        long = asyncio.create_task(pool.compile(lambda: free.wait(30), long=True))
        await asyncio.sleep(0)
        assert await pool.compile(lambda: "made") == "made" and not long.done()
        free.set()
        assert await long

    asyncio.run(both())


@pytest.mark.parametrize("make", [tiny_tokenizer, piece_tokenizer])
def test_what_is_far_too_long_is_known_by_its_beginning(make, monkeypatch):
    tokenizer, context, read = make(), 64, []
    whole = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, text, **how: read.append(text) or whole(self, text, **how)
    )
    text = "the depth of a river " * 100_000
    for prompt in (text, [{"role": "user", "content": text}]):
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        with pytest.raises(RequestError, match="context is 64 tokens"):
            encode(tokenizer, prompt, context=context)
    assert max(map(len, read)) <= PROBE * (context + SLACK), "the rest was never tokenised"
    assert len(encode(tokenizer, text[: 4 * context], context=context)) > context, "counted and reported elsewhere"


def test_a_long_text_of_few_tokens_is_read():
    """A word that the vocabulary lacks is one token, however long."""
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    assert encode(PreTrainedTokenizerFast(tokenizer_object=words), "a" * 1_000_000, context=64) == [0]

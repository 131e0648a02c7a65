"""The eleven synthetic tasks of RULER (arXiv 2404.06654), made here, with its scoring.

The score of an answer is the share of the expected strings that appear in it, whatever the case. Kinds of haystacks,
keys and values, their numbers and the tokens to generate are RULER's; the wording and the words are not, so scores do
not compare with its leaderboard.

    niah_single_1 … 3      one needle: in noise, in text, in text with a UUID as its value
    niah_multikey_1 … 3    one of four needles in text; one needle among needles; the same with UUIDs
    niah_multivalue        four values of one key
    niah_multiquery        four keys at once
    vt                     variables assigned from one another, four hops
    cwe                    the ten words of a list that come most often
    fwe                    the three most frequent words of a coded text (Zipf, α = 2)
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

from .natural import sentences
from .prompts import Parts

NOISE = (
    "The lake is calm.",
    "The road is long.",
    "The moon is pale.",
    "Here they come.",
    "Round and round they go.",
)
FIRST = (
    "amber brave calm dusty eager faint gentle hollow ivory jolly keen lively mellow narrow olive plain "
    "quiet rapid silent tidy urban vivid warm yellow zesty ancient bright clever distant empty"
)
SECOND = (
    "anchor basket candle dragon engine forest garden harbor island jacket kettle ladder mirror needle "
    "orchard pencil quarry ribbon saddle tunnel umbrella valley window yard zebra bridge castle desert "
    "feather glacier"
)


@dataclass(frozen=True)
class Needle:
    """A task of needles."""

    haystack: str
    """noise, text, or needles."""
    keys: int = 1
    values: int = 1
    queries: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False


NEEDLES = {
    "niah_single_1": Needle("noise"),
    "niah_single_2": Needle("text"),
    "niah_single_3": Needle("text", uuid_values=True),
    "niah_multikey_1": Needle("text", keys=4),
    "niah_multikey_2": Needle("needles"),
    "niah_multikey_3": Needle("needles", uuid_keys=True, uuid_values=True),
    "niah_multivalue": Needle("text", values=4),
    "niah_multiquery": Needle("text", keys=4, queries=4),
}
TASKS = (*NEEDLES, "vt", "cwe", "fwe")
MOST = {"vt": 30, "cwe": 120, "fwe": 50}
"""Tokens to generate; 128 for needles."""

Room = Callable[[Parts], int]
"""Tokens for the context of a prompt with these parts."""


def make(task: str, texts: Sequence[str], draw: random.Random, room: Room, count: Callable[[str], int]) -> Parts:
    """One question of a task.

    Args:
        task: A name of `TASKS`.
        texts: Text for the tasks that need it; noise where there is none.
        draw: The random generator.
        room: How many tokens are left for the context; for the tasks whose list fills the prompt.
        count: The number of tokens of a string.
    """
    if task in NEEDLES:
        return _needles(NEEDLES[task], texts, draw)
    if task == "vt":
        return _variables(draw)
    empty = _list_parts(task, "", ())
    return {"cwe": _common, "fwe": _frequent}[task](draw, room(empty), count)


def _name(draw: random.Random) -> str:
    return f"{draw.choice(FIRST.split())}-{draw.choice(SECOND.split())}"


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _needles(kind: Needle, texts: Sequence[str], draw: random.Random) -> Parts:
    made: dict[str, list[str]] = {}
    new_key = _uuid if kind.uuid_keys else _name

    def value() -> str:
        return _uuid(draw) if kind.uuid_values else str(draw.randrange(10**6, 10**7))

    while len(made) < kind.keys:
        made.setdefault(new_key(draw), [value() for _ in range(kind.values)])
    what = "code" if kind.uuid_values else "number"

    def needle(key: str, value: str) -> str:
        return f"One of the special {what}s of {key} is: {value}."

    def others() -> Iterator[str]:
        while True:
            key = new_key(draw)
            if key not in made:
                yield needle(key, value())

    filler = {
        "noise": lambda: cycle(NOISE),
        "needles": others,
        "text": lambda: sentences(texts or [" ".join(NOISE)], draw),
    }
    asked = draw.sample(list(made), kind.queries)
    planted = [needle(key, value) for key, values in made.items() for value in values]
    draw.shuffle(planted)
    names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    return Parts(
        before=f"Special {what}s are hidden in the text below. Memorise them: you will be asked for some afterwards.",
        filler=filler[kind.haystack](),
        planted=planted,
        question=f"Which special {what}s of {names} does the text name?",
        lead=f"The special {what}{'s' if kind.values * kind.queries > 1 else ''} of {names} named in the text:",
        answers=tuple(value for key in asked for value in made[key]),
        most=128,
    )


def _variables(draw: random.Random, hops: int = 4) -> Parts:
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))
        names += [] if name in names else [name]
    value = draw.randrange(10_000, 100_000)
    planted = [f"VAR {names[0]} = {value}"]
    planted += [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]
    return Parts(
        before="Follow the chain of variable assignments that is hidden in the text below.",
        filler=cycle(NOISE),
        planted=planted,
        question=f"Which variables have the value {value}?",
        lead=f"The {hops + 1} variables that have the value {value} are:",
        answers=tuple(names),
        most=MOST["vt"],
    )


def _list_parts(task: str, context: str, answers: tuple[str, ...]) -> Parts:
    before, question, lead = {
        "cwe": (
            "Below is a numbered list of words, some of which come more often than others. Memorise those.",
            "Which ten words come most often in the list?",
            "The ten words that come most often in the list are:",
        ),
        "fwe": (
            "Below is a coded text. Count how often each coded word comes.",
            "Do not explain, and ignore the dots. Which three coded words come most often?",
            "The three coded words that come most often are:",
        ),
    }[task]
    return Parts(before, cycle(NOISE), [context] if context else [], question, lead, answers, MOST[task])


def _common(draw: random.Random, room: int, count: Callable[[str], int]) -> Parts:
    """The common-words task: ten words six times each (30 times in long lists), and as many others as fit once each (3
    times)."""
    names = [a + b for a in FIRST.split() for b in SECOND.split()]
    draw.shuffle(names)
    common, others = names[:10], names[10:]
    often, seldom = (30, 3) if room >= 4096 else (6, 1)

    def shown(n: int) -> str:
        words = common * often + others[:n] * seldom
        random.Random(n).shuffle(words)
        return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))

    n = 0
    while n + 10 <= len(others) and count(shown(n + 10)) + 8 < room:
        n += 10
    return _list_parts("cwe", shown(n), tuple(common))


def _frequent(draw: random.Random, room: int, count: Callable[[str], int]) -> Parts:
    """The frequent-words task: invented words whose frequency falls with the square of their rank; the most frequent
    word is `....`."""
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(200)]
    vocabulary = ["....", *dict.fromkeys(words)]

    def shown(n: int) -> str:
        each = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(n / rank**2 / 1.6449))]
        random.Random(n).shuffle(each)
        return " ".join(each)

    n = 16
    while count(shown(n + n // 8)) + 8 < room:
        n += n // 8
    return _list_parts("fwe", shown(n), tuple(vocabulary[1:4]))

"""Puzzles: answers are right, rows are a function of their numbers, and a bag of tokens does not solve them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from fathom.data.batches import BatchPlan, evaluation_batches
from fathom.data.puzzles import KINDS, MODULUS, PuzzleDataset, open_puzzle
from fathom.data.rows import IGNORED
from fathom.errors import DataError, SettingsError
from fathom.recipe import parse_recipe
from fathom.training import train

ROWS = 2_000


def solve_hops(row: list[int]) -> dict[int, int]:
    """Answers by place, by following the arrows one by one."""
    arrow = {row[1 + 2 * i]: row[2 + 2 * i] for i in range(17)}
    found = {}
    for place in range(35, 67, 4):
        hop, name, tell, _ = row[place : place + 4]
        assert 64 <= hop < 72 and tell == 72
        for _ in range(hop - 63):
            name = arrow[name]
        found[place + 3] = name
    return found


EVEN = [p for p in itertools.permutations(range(5)) if np.linalg.det(np.eye(5)[list(p)]) > 0]


def solve_a5(row: list[int]) -> dict[int, int]:
    """Compose the permutations themselves."""
    even = EVEN
    image, found = list(range(5)), {}
    for place, element in enumerate(row[:16]):
        image = [even[element][i] for i in image]
        found[place + 1] = even.index(tuple(image))
    return found


def solve_z60(row: list[int]) -> dict[int, int]:
    return {place + 1: sum(row[: place + 1]) % 60 for place in range(16)}


def solve_arithmetic(row: list[int]) -> dict[int, int]:
    """A stack from the right."""
    found = {}
    for first in range(0, len(row), 16):
        size = row[first] - MODULUS - 3 + 1
        stack: list[int] = []
        for token in reversed(row[first + 1 : first + 2 + 2 * size]):
            if token < MODULUS:
                stack.append(token)
                continue
            a, b = stack.pop(), stack.pop()
            stack.append([a + b, a - b, a * b][token - MODULUS] % MODULUS)
        assert len(stack) == 1 and row[first + 2 + 2 * size] == MODULUS + 3 + 6
        found[first + 3 + 2 * size] = stack[0]
    return found


def solve_recall(row: list[int]) -> dict[int, int]:
    told = dict(zip(row[1:33:2], row[2:33:2], strict=True))
    return {place + 2: told[row[place]] for place in range(33, 57, 3)}


SOLVERS: dict[str, Callable[[list[int]], dict[int, int]]] = {
    **{"hops": solve_hops, "a5": solve_a5, "z60": solve_z60},
    **{"arithmetic": solve_arithmetic, "recall": solve_recall},
}


def held_out(name: str, level: int) -> PuzzleDataset:
    return open_puzzle(f"puzzle:{name}", "val").select(f"{name}-{level}")


@pytest.mark.quick("hops", "z60", "recall")
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_agrees(name: str) -> None:
    """Every label is what one finds by hand, nothing else is asked, and all of a row's answers are."""
    data = open_puzzle(f"puzzle:{name}")
    rows = data.rows(np.arange(ROWS))
    assert rows.tokens.shape == (ROWS, data.puzzle.traits.length) and rows.tokens.max() < data.vocab_size
    for tokens, labels in zip(rows.tokens.tolist(), rows.labels.tolist(), strict=True):
        asked = {place: label for place, label in enumerate(labels) if label != IGNORED}
        assert asked == SOLVERS[name](tokens) and len(asked) == data.puzzle.traits.answers


def test_a_row_by_hand() -> None:
    """What is asked of the smallest row, place by place."""
    data = open_puzzle("puzzle:hops?names=3&hops=1&queries=1&words=3")
    rows = data.rows(np.array([5]))
    tokens, labels = rows.tokens[0].tolist(), rows.labels[0].tolist()
    assert len(tokens) == 11 and tokens[0] == data.eos_token_id == 5
    assert sorted(tokens[1:7:2]) == sorted(tokens[2:8:2]) == [0, 1, 2]
    assert tokens[7] == 3 and tokens[9] == 4
    assert tokens[10] == tokens[tokens[1:7:2].index(tokens[8]) * 2 + 2]
    assert labels == [IGNORED] * 10 + [tokens[10]]


@pytest.mark.parametrize("name", SOLVERS)
def test_rows_are_a_function_of_their_numbers(name: str) -> None:
    data = open_puzzle(f"puzzle:{name}")
    numbers = np.array([7, 1 << 39, 3])
    together = data.rows(numbers)
    for i, number in enumerate(numbers):
        alone = open_puzzle(f"puzzle:{name}").rows(np.array([number]))
        assert (alone.tokens[0] == together.tokens[i]).all() and (alone.labels[0] == together.labels[i]).all()
    other = open_puzzle(f"puzzle:{name}?seed=1")
    assert (other.rows(numbers).tokens != together.tokens).any()
    assert other.fingerprint != data.fingerprint


def test_rows_stay_what_they_are() -> None:
    """A run of another year reads the same rows."""
    sums = {
        name: int((open_puzzle(f"puzzle:{name}").rows(np.arange(100)).tokens @ np.arange(1, n + 1)).sum() % 65521)
        for name, n in ((name, open_puzzle(f"puzzle:{name}").puzzle.traits.length) for name in KINDS)
    }
    assert sums == FROZEN


FROZEN = {"hops": 62936, "a5": 30146, "z60": 52638, "arithmetic": 31984, "recall": 51608}


@pytest.mark.parametrize(("name", "level"), [("hops", 8), ("a5", 16), ("z60", 16), ("arithmetic", 4), ("recall", 1)])
@pytest.mark.parametrize("count", [4_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_training_row_is_held_out(name: str, level: int, count: int) -> None:
    """Expressions of four operators recur as often as chance has it, a few in 100,000 rows; others never do."""
    ours = open_puzzle(f"puzzle:{name}").rows(np.arange(count)).tokens
    theirs = held_out(name, level).rows(np.arange(count)).tokens
    if name == "arithmetic":  # item by item, those of as many operators
        ours, theirs = (rows.reshape(-1, 16) for rows in (ours, theirs))
        ours = ours[ours[:, 0] == theirs[0, 0]]
    known = {row.tobytes() for row in np.ascontiguousarray(ours)}
    assert len(known) > 0.9 * len(ours)
    again = sum(row.tobytes() in known for row in np.ascontiguousarray(theirs))
    alike = 0.0903 / (MODULUS**5 * 3**4) if name == "arithmetic" else 0.0  # two trees of four nodes, two expressions
    expected = len(ours) * len(theirs) * alike
    assert again <= expected + 5 * math.sqrt(expected)
    assert sum(row.tobytes() in known for row in np.ascontiguousarray(ours[:99])) == 99  # who trains on them is seen


def test_held_out_rows_are_of_their_difficulty() -> None:
    for level in (1, 2, 4, 8):
        tokens = held_out("hops", level).rows(np.arange(50)).tokens
        assert (tokens[:, 35::4] == 63 + level).all()
    labels = held_out("a5", 4).rows(np.arange(50)).labels
    assert ((labels != IGNORED).sum(1) == 1).all() and (labels[:, 4] != IGNORED).all()
    tokens = held_out("arithmetic", 3).rows(np.arange(50)).tokens
    assert (tokens[:, ::16] == MODULUS + 3 + 2).all()
    with pytest.raises(DataError, match="select a single domain"):
        open_puzzle("puzzle:hops", "val").rows(np.arange(1))


@pytest.mark.parametrize(("name", "level"), [("hops", 8), ("a5", 16)])
def test_a_bag_of_tokens_stays_at_chance(name: str, level: int) -> None:
    """The first answer from how often each token occurs, by ridge regression: no better than guessing.

    As a control the readout is told the answer, and must see it.
    """
    data = open_puzzle(f"puzzle:{name}", "val").select(f"{name}-{level}")
    rows = data.rows(np.arange(6000))
    place = np.flatnonzero(rows.labels[0] != IGNORED)[0]
    seen, answer = rows.tokens[:, :place], rows.labels[:, place]
    bag = np.stack([np.bincount(row, minlength=data.vocab_size) for row in seen]).astype(float)
    target = np.eye(data.vocab_size)[answer]

    def accuracy(features: np.ndarray) -> float:
        x = np.concatenate([features, np.ones((len(features), 1))], 1)
        solution = np.linalg.solve(x[:4000].T @ x[:4000] + 10 * np.eye(x.shape[1]), x[:4000].T @ target[:4000])
        return float(np.mean((x[4000:] @ solution).argmax(1) == answer[4000:]))

    # Only so many names are on the cycle, and the bag knows which.
    assert accuracy(bag) < data.puzzle.traits.chance + 0.03
    assert accuracy(np.concatenate([bag, target], 1)) > 0.9


def test_chance_of_arithmetic_is_not_even() -> None:
    """Products make 0 likelier than 1 in 23."""
    labels = held_out("arithmetic", 1).rows(np.arange(4000)).labels
    values = labels[labels != IGNORED]
    assert np.mean(values == 0) > 1.2 / MODULUS


def test_batches_and_evaluation() -> None:
    data = open_puzzle("puzzle:arithmetic")
    plan = BatchPlan(data, data.puzzle.traits.length, rows_per_step=6, seed=3)
    whole = plan.batch(5)[0]
    assert whole.num_targets == int((whole.labels != IGNORED).sum()) == 24
    assert whole.position_ids is not None and whole.position_ids[0, 16] == 0
    (batch,) = evaluation_batches(held_out("arithmetic", 2), 64, 8, max_tokens=5 * 64)
    assert batch.num_targets == batch.num_bytes == int((batch.labels != IGNORED).sum()) == 20
    with pytest.raises(DataError, match=r"data.sequence_length=32: allowed: 64, the length of puzzle:arithmetic"):
        BatchPlan(data, 32, rows_per_step=6, seed=3)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("puzzle:chess", "no such puzzle; there are hops, a5, z60, arithmetic, recall"),
        ("puzzle:hops?depth=3", "depth=3: allowed options: hops, names, queries, words, seed, each"),
        ("puzzle:hops?names=many", "names=many: allowed options: "),
        ("puzzle:hops?names=0", "names=0: allowed: 1 or more"),
        ("puzzle:hops?names=8", "hops < names"),
        ("puzzle:recall?queries=17", "queries <= pairs"),
        ("puzzle:z60?elements=1", "elements=1: allowed: 2 or more"),
    ],
)
def test_what_cannot_be_is_refused(where: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_puzzle(where)


def values(**train_: object) -> dict[str, object]:
    return {
        "model": {
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 32},
        },
        "data": {"directory": "puzzle:z60?elements=4", "sequence_length": 5},
        "optim": {"lr": 1e-2},
        "train": {"steps": 60, "tokens_per_step": 160, "micro_batch": 32, "device": "cpu", "export": False, **train_},
        "evaluate": {"every": 0, "tokens": 640, "position_buckets": 1},
        "track": {"display": "none"},
    }


def test_a_run_learns_and_says_how_much(tmp_path) -> None:
    """The first element is its own product: even a layer learns that, and accuracy says so by difficulty."""
    recipe = parse_recipe(values())
    result = train(recipe, tmp_path / "run")
    assert result.evaluation is not None
    domains = result.evaluation.domains
    assert set(domains) == {"z60-2", "z60-4"} and result.evaluation.accuracy is not None
    assert all(score.accuracy is not None and 0 <= score.accuracy <= 1 for score in domains.values())
    assert result.evaluation.flat()["val/z60-2/accuracy"] == domains["z60-2"].accuracy
    again = train(recipe, tmp_path / "run")
    assert again.evaluation == result.evaluation
    with pytest.raises(SettingsError, match=r"differs from the corpus with which this run began|another recipe"):
        train(recipe.override("data.directory=puzzle:a5?elements=4", "train.steps=80"), tmp_path / "run")


def test_an_export_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"train.export=true: allowed: false with data.directory=puzzle:z60"):
        parse_recipe(values(export=True))

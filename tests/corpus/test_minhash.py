"""MinHash beside its theory, and beside hashes computed one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from benchmarks.corpus import found_share

from fathom.corpus import minhash
from fathom.corpus.minhash import band_numbers, jaccard, run_set, signatures
from fathom.corpus.words import words_of
from tests.corpus.prose import Prose


def test_theory() -> None:
    table = {1.0: 1.0, 0.95: 1.0, 0.9: 0.9996, 0.8: 0.9235, 0.7: 0.5645, 0.5: 0.0533, 0.3: 0.0009}
    assert {similarity: round(found_share(similarity), 4) for similarity in table} == table


def test_jaccard_of_sets() -> None:
    sets = [{1, 2, 3, 9}, {2, 3, 4}, {7}, set()]
    arrays = [np.array(sorted(one), np.uint64) for one in sets]
    for one, a in zip(sets, arrays, strict=True):
        for other, b in zip(sets, arrays, strict=True):
            expected = len(one & other) / len(one | other) if one and other else 0.0
            assert jaccard(a, b) == expected


def test_signatures_are_least_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pieces the runs are hashed in; a text without runs keeps the largest number."""
    chance = np.random.default_rng(0)
    runs = chance.integers(0, 1 << 32, 500, dtype=np.uint32)
    bounds = np.array([0, 0, 7, 7, 300, 499, 500, 500])
    whole = signatures(runs, bounds, 6, seed=3)
    for step in (1, 50, 64):
        monkeypatch.setattr(minhash, "STEP", step)
        assert (signatures(runs, bounds, 6, seed=3) == whole).all()
    masks, factors = minhash._functions(6, 3)
    for number in range(6):
        values = (runs ^ masks[number]) * factors[number]
        values = (values ^ (values >> np.uint32(15))) * minhash.FINAL
        parts = [values[a:b] for a, b in pairwise(bounds)]
        assert whole[number].tolist() == [int(part.min()) if len(part) else 0xFFFFFFFF for part in parts]


def test_a_text_without_runs_meets_no_other() -> None:
    bands = band_numbers(words_of(["too short", "", "long enough for one run at least"]), 5, 3, 2, 0)
    assert (bands[:, :2] == 0).all() and (bands[:, 2] != 0).all()


def planted(pairs: int, words: int, edits: list[int]) -> tuple[list[str], list[float]]:
    """Documents, then their edited copies; and the exact similarity of each pair."""
    prose = Prose(5)
    texts = [prose.document(words) for _ in range(pairs)]
    copies = [prose.edited(text, edits[number % len(edits)]) for number, text in enumerate(texts)]
    sets = [run_set(words_of([text]), 5) for text in texts + copies]
    return texts + copies, [jaccard(sets[number], sets[pairs + number]) for number in range(pairs)]


@pytest.mark.slow
def test_recall_is_what_theory_says() -> None:
    """Four groups around .91, .83, .69 and .51, each within three standard errors of the mean over its pairs."""
    pairs = 1600
    texts, similar = planted(pairs, 300, [3, 6, 12, 22])
    bands = band_numbers(words_of(texts), 5, 14, 8, seed=1)
    met = (bands[:, :pairs] == bands[:, pairs:]).any(axis=0)
    for group in range(4):
        mine = slice(group, pairs, 4)
        chances = np.array([found_share(one) for one in similar[mine]])
        error = np.sqrt((chances * (1 - chances)).sum()) / len(chances)
        assert abs(met[mine].mean() - chances.mean()) <= max(3 * error, 1 / len(chances)), (
            group,
            np.mean(similar[mine]),
        )
    # Hashes that are no permutations at all would not pass: with two rows a band of .51 is met far too often.
    loose = band_numbers(words_of(texts), 5, 14, 2, seed=1)
    often = (loose[:, 3:pairs:4] == loose[:, pairs + 3 :: 4]).any(axis=0).mean()
    assert often > np.mean([found_share(one) for one in similar[3::4]]) + 0.5


def test_seeds_differ() -> None:
    words = words_of([Prose(2).document()])
    assert (band_numbers(words, 5, 4, 4, 0) != band_numbers(words, 5, 4, 4, 1)).all()

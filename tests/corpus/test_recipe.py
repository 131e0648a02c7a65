"""What is wrong with a recipe is said in one line, before a document is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fathom.corpus.recipe import CorpusRecipe, load_corpus_recipe, parse_corpus_recipe
from fathom.errors import SettingsError
from fathom.settings import describe

PLAIN = {"collections": {"a": {"inputs": "x.jsonl"}}, "tokenize": {"train": 300}}


def merged(**sections: Any) -> dict[str, Any]:
    return {**PLAIN, **sections}


def test_short_forms_and_defaults() -> None:
    recipe = parse_corpus_recipe(
        merged(executor="local", decontaminate={"benchmarks": {"quiz": "quiz.jsonl"}}, filter={"min_words": None})
    )
    assert recipe.collections["a"].inputs == ("x.jsonl",)
    assert recipe.decontaminate.benchmarks["quiz"].path == "quiz.jsonl"
    assert recipe.filter_of("a").min_words is None and recipe.filter_of("a").max_words == 100_000


def test_a_collection_has_its_own_thresholds() -> None:
    recipe = parse_corpus_recipe(merged(collections={"a": {"inputs": ["x"], "filter": {"min_words": 5}}}))
    assert recipe.filter_of("a").min_words == 5 and recipe.filter.min_words == 50


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"filtr": {}}, "filtr: unknown key; did you mean filter?"),
        ({"filter": {"min_word": 3}}, "filter.min_word: unknown key; did you mean filter.min_words?"),
        ({"filter": {"min_words": "few"}}, "filter.min_words=few: allowed: an integer or null"),
        ({"collections": {"a": {"inputs": ["x"], "filter": {"words": 1}}}}, "collections.a.filter.words: unknown key"),
        ({"collections": {}}, "collections: name at least one"),
        ({"collections": {"a/b": {"inputs": ["x"]}}}, "collections.a/b: a name is made of letters"),
        (
            {"collections": {"a": {"inputs": ["x"], "encoding": "utf-99"}}},
            "collections.a.encoding=utf-99: no such encoding",
        ),
        ({"collections": {"a": {"inputs": ["x"], "encoding": "hex"}}}, "collections.a.encoding=hex: no such encoding"),
        (
            {"collections": {"a": {"inputs": ["x"], "encoding": "undefined"}}},
            "collections.a.encoding=undefined: no such encoding",
        ),
        (
            {"deduplicate": {"seed": 99999999999999999999999}},
            "9: allowed: 0 to 2^64 - 1",
        ),
        ({"tokenize": {"train": 99999999999}}, "tokenize.train=99999999999: allowed: 4,194,304 at most"),
        ({"mix": {"shares": {"b": 1.0}}}, "mix.shares.b=1.0: no such collection of documents; there are a"),
        ({"mix": {"shares": {"a": 0.5}}}, "mix.shares={a: 0.5}: they add up to 0.5, not to 1"),
        ({"tokenize": {}}, "tokenize.tokenizer=null: set either tokenize.tokenizer or tokenize.train"),
        ({"normalize": {"strip": ["("]}}, "normalize.strip=[(]: allowed: regular expressions"),
        ({"decontaminate": {"whole": 14}}, "decontaminate.whole=14: allowed: 1 <= shortest <= whole <= words"),
        ({"decontaminate": {"benchmarks": {"q": {}}}}, "decontaminate.benchmarks.q.path: name a file"),
        ({"executor": "threads"}, "executor.name=threads: allowed: one of local"),
        ({"mix": {"epochs": float("inf")}}, "mix.epochs=inf: allowed: a finite number"),
        ({"filter": {"min_word_length": float("nan")}}, "filter.min_word_length=nan: allowed: a finite number"),
        (
            {"deduplicate": {"bands": 1000000}},
            "bands=1000000: allowed: 512 at most with deduplicate.rows=8",
        ),
        ({"deduplicate": {"jaccard": 0}}, "deduplicate.jaccard=0.0: allowed: a share above 0"),
    ],
)
def test_what_is_wrong_is_named(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        parse_corpus_recipe(merged(**sections))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_yaml_comes_back(tmp_path: Path) -> None:
    recipe = parse_corpus_recipe(merged(mix={"shares": {"a": 1.0}, "tokens": 5}))
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    assert load_corpus_recipe(tmp_path / "r.yaml") == recipe
    assert load_corpus_recipe(tmp_path / "r.yaml", ["mix.tokens=7"]).mix.tokens == 7
    with pytest.raises(SettingsError, match="no such file"):
        load_corpus_recipe(tmp_path / "other.yaml")


def test_every_key_has_help() -> None:
    rows = list(describe(CorpusRecipe))
    assert all(text for *_, text in rows)
    sections = {key.split(".")[0] for key, *_ in rows}
    assert sections == {field.name for field in dataclasses.fields(CorpusRecipe)}

"""Leaks: every planted one is found in every collection, and what is found is dropped, cut or reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fathom.corpus.benchmarks import Item, plain
from fathom.corpus.kept import kept_documents, kept_parts
from fathom.corpus.stage import Workspace
from fathom.errors import DataError
from fathom.evaluation.tuned import read_benchmarks
from tests.corpus.prose import Prose, lines, recipe_values, write_jsonl
from tests.corpus.test_duplicates import until
from tests.corpus.test_leak_rules import around, disguises


@pytest.fixture(scope="module")
def leaks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Item]]:
    """Three collections, each with every disguise of an item of its own; and items that no document holds."""
    folder, prose = tmp_path_factory.mktemp("leaks"), Prose(13)
    items = [Item(f"q{number}", prose.sentence(18)) for number in range(24)]
    rows: list[list[Any]] = []
    for start in (0, 6, 12):
        held = [
            f"{prose.document(150)}\n\n{disguises(items[start + number].stem)[number]}\n\n{prose.document(150)}"
            for number in range(6)
        ]
        rows.append([*(prose.document(120) for _ in range(10)), *held])
    rows[2] = [
        {"messages": [{"role": "user", "content": "the question of"}, {"role": "assistant", "content": text}]}
        for text in rows[2]
    ]
    places = [write_jsonl(folder / f"{name}.jsonl", texts) for name, texts in zip("abc", rows, strict=True)]
    collections: dict[str, Any] = {
        "domain": [places[0]],
        "replay": [places[1]],
        "talk": {"inputs": [str(places[2])], "kind": "conversations"},
    }
    write_jsonl(folder / "quiz.jsonl", [{"id": one.id, "question": one.stem} for one in items])
    return folder, collections, items


def searched(leaks: tuple[Path, dict[str, Any], list[Item]], **rules: Any) -> Workspace:
    """The corpus after a search; what comes before is done once for all of them."""
    folder, collections, _ = leaks
    quiz = {"benchmarks": {"quiz": str(folder / "quiz.jsonl")}, **rules}
    return until("flags", folder / "out", recipe_values(collections, decontaminate=quiz))


def remaining(workspace: Workspace) -> list[Any]:
    return [one for part in kept_parts(workspace) for one in kept_documents(workspace, part)]


def test_dropped_in_all_collections_and_flagged(leaks: Any) -> None:
    workspace, items = searched(leaks), leaks[-1]
    hits = lines(workspace.stage("contamination") / "hits.jsonl")
    found = {(hit["collection"], hit["item"]) for hit in hits}
    names = ("domain", "replay", "talk")
    assert found == {(names[number // 6], f"q{number}") for number in range(18)}
    kept = remaining(workspace)
    assert len(kept) == 30
    assert not [item for item in items for one in kept if plain(item.stem) in plain(one.text)]
    flags = lines(workspace.stage("flags") / "quiz.jsonl")
    assert [row["dirty"] for row in flags] == [number < 18 for number in range(24)]


def test_cut_leaves_the_rest(leaks: Any) -> None:
    workspace, items = searched(leaks, action="cut", margin=30), leaks[-1]
    kept = remaining(workspace)
    assert not [item for item in items for one in kept if plain(item.stem) in plain(one.text)]
    originals = {row["path"]: row["text"] for row in lines(workspace.stage("clean") / "part-00000.jsonl")}
    pieces = [one for one in kept if re.search(r"#\d$", one.path)]
    assert len(pieces) == 24 and len({one.id for one in pieces}) == 24
    for one in pieces:  # all of the text on either side, but for the margin
        whole = originals[one.path[:-2]]
        assert one.text in whole and one.n_words >= 130
    assert not [one for one in kept if one.collection == "talk" and "#" in one.path]  # a conversation is never cut


def test_report_keeps_everything(leaks: Any) -> None:
    workspace = searched(leaks, action="report")
    assert len(remaining(workspace)) == 48
    assert workspace.manifest("flags").counts["dirty"] == 18


def test_contradictions_can_stop_the_work(tmp_path: Path) -> None:
    quiz = write_jsonl(
        tmp_path / "q.jsonl",
        [{"question": "one two three", "choices": ["yes", "no"], "answer": number} for number in (0, 1)],
    )
    file = write_jsonl(tmp_path / "a.jsonl", [Prose().document()])
    rules = {"benchmarks": {"quiz": str(quiz)}, "strict": True}
    with pytest.raises(DataError, match="1 questions have two different answers") as raised:
        until("flags", tmp_path / "out", recipe_values({"a": [file]}, decontaminate=rules))
    assert raised.value.exit_code == 1
    until("flags", tmp_path / "out", recipe_values({"a": [file]}, decontaminate={**rules, "strict": False}))


def test_a_piece_that_is_too_short_is_listed(tmp_path: Path) -> None:
    """A document with no other piece is dropped, not cut; ends without a word are none."""
    prose = Prose(17)
    leak = prose.sentence(18)
    texts = [f"{prose.document(48)}\n\n{leak}", f"{prose.document(48)}\n\n{leak}\n\n{prose.document(144)}"]
    quiz = write_jsonl(tmp_path / "q.jsonl", [{"question": leak}])
    rules = {"benchmarks": {"quiz": str(quiz)}, "action": "cut", "margin": 30}
    values = recipe_values({"a": [write_jsonl(tmp_path / "a.jsonl", texts)]}, decontaminate=rules)
    short = {"a.jsonl:1#0": 60, "a.jsonl:2#0": 60}
    for least, listed, kept, done in ((30, {}, ["1#0", "2#0", "2#1"], (0, 2)), (60, short, ["2#1"], (1, 1))):
        workspace = until("flags", tmp_path / "out", {**values, "filter": {"min_words": least}})
        found = lines(workspace.stage("contamination") / "dropped.jsonl")
        assert {row["path"]: row["limit"] for row in found} == listed and all(row["value"] < 60 for row in found)
        assert [one.path.removeprefix("a.jsonl:") for one in remaining(workspace)] == kept
        counts = workspace.manifest("contamination").counts
        assert (counts["dropped"], counts["cut"], counts["short_pieces"]) == (*done, len(listed))


def test_what_cannot_be_asked_is_searched_for_and_left_out(tmp_path: Path) -> None:
    """`fathom evaluate` reads all that is written; an item without choices, or a right one, is none that it asks."""
    stems = [Prose(18 + number).sentence(18) for number in range(5)]
    given: list[tuple[list[str], int | None]] = [
        (["a", "b"], 1),
        (["a", " "], 0),
        (["a"], 0),
        ([], None),
        (["", "b"], None),
    ]
    quiz = [
        {"question": stem, "choices": choices, "answer": answer}
        for stem, (choices, answer) in zip(stems, given, strict=True)
    ]
    place = write_jsonl(tmp_path / "a.jsonl", [f"{around('')} {stems[1]}", Prose(30).document()])
    rules = {"benchmarks": {"quiz": str(write_jsonl(tmp_path / "q.jsonl", quiz))}}
    workspace = until("flags", tmp_path / "out", recipe_values({"a": [place]}, decontaminate=rules))
    (flags,) = (workspace.path(one) for one in workspace.outputs("flags", ".jsonl"))
    assert [row["number"] for row in lines(flags)] == [0, 3, 4]
    assert workspace.manifest("flags").counts == {"dirty": 1, "items": 5, "left_out": 2}
    assert [item.question for item in read_benchmarks(flags.parent)["quiz"] if item] == [stems[0]]

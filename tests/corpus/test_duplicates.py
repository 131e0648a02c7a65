"""Duplicates, from files to the list of what was removed: all planted, no other, in any order, each with its match."""

from __future__ import annotations

import html
import random
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.corpus_book import agreement

from fathom.corpus.duplicates import _meeting
from fathom.corpus.executor import executing, write_plan
from fathom.corpus.minhash import jaccard, run_set
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.corpus.stage import Workspace, conclude
from fathom.corpus.stages import ORDER
from fathom.corpus.words import words_of
from tests.corpus.prose import Prose, lines, recipe_values, write_jsonl


def until(last: str, directory: Path, values: dict[str, Any]) -> Workspace:
    """Run the stages up to one of them."""
    directory.mkdir(exist_ok=True)
    workspace = Workspace(directory, parse_corpus_recipe(values))
    with executing(workspace.recipe.executor) as execute:
        for kind in ORDER:
            stage = kind(workspace)
            tasks = stage.tasks()
            write_plan(workspace, stage.name, tasks)
            execute(workspace, stage.name, tasks, lambda: None)
            conclude(stage, tasks)
            if stage.name == last:
                break
    return workspace


def similarity(one: str, other: str) -> float:
    return jaccard(*(run_set(words_of([text]), 5) for text in (one, other)))


def test_planted_copies_are_found_and_named(tmp_path: Path) -> None:
    prose = Prose(3)
    texts = [prose.document(240) for _ in range(60)]
    near = [prose.edited(text, 2) for text in texts[:20]]  # about .92
    far = [prose.edited(text, 40) for text in texts[20:40]]  # below .5
    exact = texts[40:45]
    assert min(similarity(*pair) for pair in zip(texts, near, strict=False)) >= 0.9
    assert max(similarity(*pair) for pair in zip(texts[20:], far, strict=False)) <= 0.5
    a, b = write_jsonl(tmp_path / "a.jsonl", texts), write_jsonl(tmp_path / "b.jsonl", [*near, *far, *exact])
    values = recipe_values({"a": {"inputs": [str(a)], "priority": 1}, "b": [b]})
    until("duplicates", tmp_path / "out", values)
    removed = lines(tmp_path / "out" / "stages" / "duplicates" / "duplicates.jsonl")
    by_path = {row["path"]: row for row in removed}
    for number in range(20):
        row = by_path[f"b.jsonl:{number + 1}"]
        assert row["kept"]["path"] == f"a.jsonl:{number + 1}"
        assert row["kind"] == "near" and abs(row["jaccard"] - similarity(texts[number], near[number])) < 1e-5
    for number in range(5):
        row = by_path[f"b.jsonl:{41 + number}"]
        assert row["kept"]["path"] == f"a.jsonl:{41 + number}" and (row["kind"], row["jaccard"]) == ("exact", 1.0)
    assert len(removed) == 25  # none of the far ones, and none of the originals


def test_any_order_keeps_the_same_documents(tmp_path: Path) -> None:
    """Clusters of several sizes, one a chain, over several files; priorities decide before length."""
    prose = Prose(4)
    rows = [{"id": f"single {number}", "text": prose.document(100)} for number in range(20)]
    for cluster in range(6):
        text = prose.document(200)
        for copy in range(cluster + 1):
            longer = "".join(f" more{number}" for number in range(copy))
            rows.append({"id": f"{cluster}/{copy}", "text": prose.edited(text, 1) + longer})
            text = rows[-1]["text"] if cluster == 5 else text
    rows += [{"id": "twin", "text": rows[0]["text"]}]
    kept = []
    for order in range(3):
        shuffled = random.Random(order).sample(rows, len(rows))
        cuts = sorted(random.Random(order).sample(range(1, len(rows)), 3))
        files = [
            write_jsonl(tmp_path / f"{order}-{number}.jsonl", shuffled[a:b])
            for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True))
        ]
        workspace = until("duplicates", tmp_path / f"out{order}", recipe_values({"a": files}))
        removed = lines(workspace.stage("duplicates") / "duplicates.jsonl")
        cleaned = lines(workspace.stage("clean") / "part-00000.jsonl")
        gone = {row["path"] for row in removed}
        kept.append({row["id"] for row in cleaned if row["path"] not in gone})
        assert len(removed) == sum(range(6)) + 1 - chain_stays(rows)
    assert kept[0] == kept[1] == kept[2]


def chain_stays(rows: list[dict[str, Any]]) -> int:
    """How many more than one of the last cluster stay, longest first."""
    stay: list[str] = []
    for text in sorted((row["text"] for row in rows if str(row["id"]).startswith("5/")), key=len, reverse=True):
        if all(similarity(text, other) < 0.8 for other in stay):
            stay.append(text)
    return len(stay) - 1


def test_every_removed_document_is_like_one_that_stays(tmp_path: Path) -> None:
    """Windows of 200 words, each 16 words on: neighbours are alike, the ends of a series are not."""
    prose = Prose(21)
    rows = []
    for series in range(4):
        words = prose.document(320).split()
        rows += [{"id": f"{series}/{n}", "text": " ".join(words[16 * n : 16 * n + 200])} for n in range(8)]
    rows += [{"id": "copy", "text": row["text"]} for row in rows[::3]]
    workspace = until("duplicates", tmp_path / "out", recipe_values({"a": [write_jsonl(tmp_path / "a.jsonl", rows)]}))
    removed = lines(workspace.stage("duplicates") / "duplicates.jsonl")
    texts = {f"a.jsonl:{number + 1}": row["text"] for number, row in enumerate(rows)}
    gone = {row["path"] for row in removed}
    for row in removed:
        assert row["kept"]["path"] not in gone, "what it is like was removed, too"
        found = similarity(texts[row["path"]], texts[row["kept"]["path"]])
        assert found >= 0.8 and abs(found - row["jaccard"]) < 1e-5
    stays = [text for path, text in texts.items() if path not in gone]
    assert max(similarity(a, b) for a in stays for b in stays if a is not b) < 0.8, "and no two that stay are alike"
    assert similarity(texts["a.jsonl:1"], texts["a.jsonl:8"]) < 0.4 and len(stays) >= 12


def test_one_book_in_three_files(tmp_path: Path) -> None:
    """As text with hard line ends, as a page, and an older revision: the highest priority keeps it."""
    prose = Prose(7)
    paragraphs = [prose.sentence(60) for _ in range(60)]
    wrapped = "\n\n".join(textwrap.fill(text, 70) for text in paragraphs)
    page = "<html><body>" + "".join(f"<p>{html.escape(text)}</p>" for text in paragraphs) + "</body></html>"
    older = "\n\n".join(prose.edited(text, 1) if number % 2 else text for number, text in enumerate(paragraphs))
    files = {"new.txt": wrapped, "new.html": page, "old.txt": older, "other.txt": prose.document(2000)}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    collections: dict[str, Any] = {
        "pages": {"inputs": [str(tmp_path / "new.html")], "priority": 1},
        "texts": {"inputs": [str(tmp_path / name) for name in ("new.txt", "old.txt", "other.txt")]},
    }
    workspace = until("duplicates", tmp_path / "out", recipe_values(collections, ingest={"html": "plain"}))
    found = {row["path"]: row for row in lines(workspace.stage("duplicates") / "duplicates.jsonl")}
    assert found.keys() == {"new.txt", "old.txt"}
    assert {row["kept"]["path"] for row in found.values()} == {"new.html"}
    assert found["new.txt"]["jaccard"] == 1.0 and found["new.txt"]["kind"] == "near"  # other line ends, the same words
    assert 0.8 <= found["old.txt"]["jaccard"] < 1


def test_agreement_counts_characters_of_common_runs() -> None:
    """Eight words or more in the same order; a run that moved is in one place alone, and seven words are none."""
    one = [f"w{number:03}" for number in range(100)]
    assert agreement(one, one) == [1.0, 1.0]
    assert agreement(one, [*one[:50], "another", *one[51:]]) == [0.99, round(99 * 4 / (99 * 4 + 7), 5)]
    assert agreement(one, [*one[60:], *one[:60]]) == [0.6, 0.6]
    assert agreement(one, [word for at in range(0, 98, 7) for word in (*one[at : at + 7], "x")]) == [0.0, 0.0]


def test_one_bucket_or_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prose = Prose(6)
    texts = [prose.document(100) for _ in range(40)]
    file = write_jsonl(tmp_path / "a.jsonl", [*texts, *(prose.edited(text, 1) for text in texts[:10]), *texts[5:9]])
    values = recipe_values({"a": [file]}, deduplicate={"bands": 5, "rows": 4})
    first = until("duplicates", tmp_path / "one", values)
    monkeypatch.setattr("fathom.corpus.duplicates.BUCKET_DOCUMENTS", 20)
    monkeypatch.setattr("fathom.corpus.duplicates.VERIFY_PAIRS", 3)
    second = until("duplicates", tmp_path / "many", values)
    assert len(second.manifest("exact").tasks) == 3 and len(second.manifest("verify").tasks) > 3
    one, many = (lines(place.stage("duplicates") / "duplicates.jsonl") for place in (first, second))
    assert one == many and len(one) == 14


def test_a_crowd_is_compared_with_its_neighbours() -> None:
    """Of hundreds of documents that agree in a band, thousands of pairs, not all; a small group gives all."""
    places = np.arange(500, dtype=np.uint64)
    numbers = np.where(places < 400, 1, 2 + places % 50).astype(np.uint64)
    sizes, digests = np.arange(500)[::-1].astype(np.int64), places[::-1].copy()
    pairs = _meeting(numbers, places, sizes, digests)
    crowd = pairs[pairs[:, 1] < 400]
    assert len(crowd) < 400 * 34 and len(pairs) - len(crowd) == 50  # fifty groups of two
    assert {tuple(pair) for pair in crowd.tolist()} >= {(0, other) for other in range(1, 400)}
    again = _meeting(numbers[::-1].copy(), places[::-1].copy(), sizes[::-1].copy(), digests[::-1].copy())
    assert (again == pairs).all()


def talk(*said: str, roles: str = "ua", **last: bool) -> dict[str, Any]:
    """A conversation; what is named belongs to its last message."""
    names = {"u": "user", "a": "assistant", "s": "system"}
    messages: list[dict[str, Any]] = [
        {"role": names[role], "content": text} for role, text in zip(roles, said, strict=True)
    ]
    messages[-1] |= last
    return {"messages": messages}


def stays(tmp_path: Path, rows: list[dict[str, Any]], kind: str = "conversations", **near: Any) -> list[int]:
    """The lines that are no duplicate of another."""
    collection = {"inputs": [str(write_jsonl(tmp_path / "a.jsonl", rows))], "kind": kind}
    workspace = until("duplicates", tmp_path / "out", recipe_values({"a": collection}, deduplicate=near))
    gone = {row["path"] for row in lines(workspace.stage("duplicates") / "duplicates.jsonl")}
    return [number for number in range(len(rows)) if f"a.jsonl:{number + 1}" not in gone]


def test_who_says_it_and_whether_it_is_learnt_are_part_of_a_conversation(tmp_path: Path) -> None:
    """Whether a conversation is trained on must not depend on an untrained copy, nor on file names."""
    question, answer = Prose(9).sentence(12), Prose(10).sentence(30)
    rows = [
        talk(question, answer, train=False),
        talk(question, answer),
        talk(question, answer, roles="sa"),
        talk(question, answer, train=True),  # the second again
        talk(question, answer),
    ]
    rows[4]["messages"][0]["train"] = False  # questions are never trained on anyway
    assert stays(tmp_path, rows, near=False) == [0, 1, 2]


def test_conversations_are_near_in_what_is_learnt_and_in_the_rest(tmp_path: Path) -> None:
    """Questions on one passage stay, and answers to one question; near copies go, however short one side is."""
    prose = Prose(14)
    passage, question, answer = prose.document(200), prose.sentence(20), prose.sentence(60)
    rows = [talk(f"{passage}\n\n{prose.sentence(9)}", prose.sentence(30)) for _ in range(4)]
    rows += [talk(question, answer), talk(question, prose.sentence(60)), talk(prose.sentence(20), answer)]
    rows += [talk("3 + 4?", answer), talk("3 - 4?", answer), talk(question, answer, train=False)]
    distinct = list(range(len(rows)))
    rows += [talk(question, prose.edited(answer, 1)), talk("3 + 4?", prose.edited(answer, 1))]
    rows += [talk(prose.edited(f"{passage}\n\n{question}", 2), answer), talk(f"{passage}\n\n{question}", answer)]
    kept = stays(tmp_path, rows)
    assert kept[: len(distinct) - 2] == [*distinct[:4], 5, 6, 8, 9]
    assert sum(number in kept for number in (4, 10)) == sum(number in kept for number in (7, 11)) == 1
    assert sum(number in kept for number in (12, 13)) == 1 and len(kept) == 11


def test_pairs_with_other_rejected_answers_stay(tmp_path: Path) -> None:
    prose = Prose(17)
    pair = {"prompt": prose.sentence(30), "chosen": prose.sentence(900), "rejected": prose.sentence(60)}
    rows = [pair, {**pair, "rejected": prose.sentence(60)}, {**pair, "rejected": prose.edited(pair["rejected"], 1)}]
    assert len(stays(tmp_path, rows, "preferences")) == 2


def test_a_document_is_no_duplicate_of_a_conversation(tmp_path: Path) -> None:
    prose = Prose(15)
    question, answer = prose.sentence(30), prose.sentence(60)
    text = write_jsonl(tmp_path / "d.jsonl", [f"{question}\n\n{answer}"])
    asked = write_jsonl(tmp_path / "t.jsonl", [talk(question, answer)])
    collections: dict[str, Any] = {"d": [text], "t": {"inputs": [str(asked)], "kind": "conversations"}}
    workspace = until("duplicates", tmp_path / "out", recipe_values(collections))
    assert workspace.manifest("duplicates").counts["removed"] == 0


def test_a_table_asks_for_long_values_in_every_way(tmp_path: Path) -> None:
    """Of two equal rows one stays."""
    rows = [{"name": name, "history": Prose(16).sentence(80)} for name in ("Zorbite", "Zorbite", "Ulite")]
    table = {"inputs": [str(write_jsonl(tmp_path / "a.jsonl", rows))], "kind": "table"}
    removed = until("duplicates", tmp_path / "out", recipe_values({"a": table})).manifest("duplicates").counts
    assert (removed["removed"], removed["exact"]) == (5, 5)

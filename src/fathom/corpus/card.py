"""card.md: the contents of a corpus, written from the manifests of its stages.

Below `stages/` are lists of what was left out or leaked: `failed.jsonl` (`ingest.py`), `dropped.jsonl` (`clean.py`),
`duplicates.jsonl` (`duplicates.py`), `hits.jsonl` (`contamination.py`) and `rejected.jsonl` (`converse.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from fathom.corpus.clean import LANGUAGE, LEFT, MASKED, RULES, STOPPED
from fathom.corpus.contamination import checks_of
from fathom.corpus.counts import REASONS
from fathom.corpus.documents import read_lines
from fathom.corpus.extraction import FAILURES, PAIR, POSSIBLE_NOTES
from fathom.corpus.ingest import NUMBERS
from fathom.corpus.kept import clean_parts
from fathom.corpus.stage import MANIFEST, Workspace
from fathom.corpus.tokens import SHARDS
from fathom.report.files import digest, read_json, write_atomically
from fathom.report.tables import markdown_table

CARD = "card.md"
EXAMPLES = 10
"""Altered numbers that it quotes."""
PRIVATE = {
    "email": ("e-mail address", "e-mail addresses"),
    "ip": ("IP address", "IP addresses"),
    "phone": ("telephone number", "telephone numbers"),
    "key": ("secret key", "secret keys"),
}
"""Kinds of private data, one and many."""
ACTIONS = {"drop": "dropped", "cut": "cut", "report": "reported", "piece of too few words": "short_pieces"}
"""What is done about a document that contains an item, and how it is counted."""


def write_card(workspace: Workspace) -> Path:
    """Write the card; returns where."""
    path = workspace.directory / CARD
    write_atomically(path, "\n".join(_lines(workspace)) + "\n")
    return path


def _lines(workspace: Workspace) -> Iterator[str]:
    yield f"# A corpus of {', '.join(workspace.recipe.collections)}"
    yield ""
    yield "Made by `fathom corpus` from `recipe.yaml`; every number here is of the manifests below `stages/`."
    yield from _section("Collections", _collections(workspace))
    yield from _section("Numbers", _numbers(workspace)) if workspace.manifest("ingest").counts.get("checked") else ()
    yield from _section("What was removed", _dropped(workspace))
    if any(one.kind == "papers" for one in workspace.recipe.collections.values()):
        yield from _section("Pairs of papers", _pairs(workspace))
    yield from _section("The mixture", _mixture(workspace))
    yield from _section("Benchmarks", _benchmarks(workspace))
    yield from _section("Hashes", _hashes(workspace))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", *lines)


def _collections(workspace: Workspace) -> Iterator[str]:
    counts = _token_counts(workspace)
    licenses: dict[str, Counter[str]] = {}
    for one in [*workspace.outputs("tokenize", SHARDS), *workspace.outputs("converse", SHARDS)]:
        facts = read_json(workspace.path(one))
        licenses.setdefault(facts["collection"], Counter()).update(facts["licenses"])
    rows = []
    for name in workspace.recipe.collections:
        found = [f"{key} ({count:,})" for key, count in sorted(licenses.get(name, {}).items())]
        of_split = [
            counts.get(f"{name} {split} {key}", 0) for split in ("train", "val") for key in ("documents", "tokens")
        ]
        rows.append([name, ", ".join(found) or "none left", *of_split])
    head = ("collection", "licences (documents)", "train documents", "train tokens", "val documents", "val tokens")
    yield from markdown_table(head, rows)


def _token_counts(workspace: Workspace) -> dict[str, int]:
    """The numbers of documents (or conversations) and of tokens in each split of every collection."""
    found: dict[str, int] = {}
    for one in [*workspace.outputs("tokenize", SHARDS), *workspace.outputs("converse", SHARDS)]:
        facts = read_json(workspace.path(one))
        for split, entry in facts["shards"].items():
            for key in ("documents", "tokens"):
                name = f"{facts['collection']} {split} {key}"
                found[name] = found.get(name, 0) + entry[key]
    return found


def _numbers(workspace: Workspace) -> Iterator[str]:
    """Lines on how many numbers of the source pages the file readers altered or lost, with examples."""
    counts = workspace.manifest("ingest").counts
    yield f"Numbers altered or lost: {counts['wrong']:,} of {counts['numbers']:,}, in a sample of {counts['checked']:,}"
    yield "pages, papers and books (HTML, TEI, JATS, EPUB) whose markup was compared with the text that was read."
    rows = (row for one in workspace.outputs("ingest", NUMBERS) for row in read_lines(workspace.path(one)))
    if examples := list(islice(rows, EXAMPLES)):
        yield ""
        quoted = ([one["file"], *(f"`{one[key].replace('`', ' ')}`" for key in ("page", "text"))] for one in examples)
        yield from markdown_table(("file", "the page says", "the text says"), quoted)


def _by_collection(workspace: Workspace, stage: str) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {name: Counter() for name in workspace.recipe.collections}
    for task in workspace.manifest(stage).tasks:
        found[task.arguments["collection"]].update(task.counts)
    return found


def _dropped(workspace: Workspace) -> Iterator[str]:
    """A table of how many documents were read, dropped and kept: one row for each reason, one column for each
    collection."""
    names = list(workspace.recipe.collections)
    read, cleaned = _by_collection(workspace, "ingest"), _by_collection(workspace, "clean")
    gone = workspace.manifest("duplicates").counts
    rows = [["read", *(read[name]["documents"] for name in names)]]
    rows += [[f"unreadable: {status}", *(read[name][status] for name in names)] for status in FAILURES]
    rows += [[f"filter: {rule}", *(cleaned[name][rule] for name in names)] for rule in ("empty", *RULES)]
    rows.append(["duplicate", *(gone.get(f"removed from {name}", 0) for name in names)])
    actions = _actions(workspace)
    rows += [[f"contaminated: {word}", *(actions[name][word] for name in names)] for word in ACTIONS]
    kept = _token_counts(workspace)
    rejected: dict[str, Counter[str]] = {name: Counter() for name in names}
    for task in workspace.manifest("converse").tasks:
        rejected[task.arguments["collection"]].update({key: task.counts[key] for key in REASONS})
    rows += [[f"conversation: {reason}", *(rejected[name][reason] for name in names)] for reason in REASONS]
    for task in workspace.manifest("export").tasks:
        if (form := task.arguments["form"]) != "lm_eval":
            rows.append([f"not in exports/{form}", *(task.counts.get(f"left out of {name}", 0) for name in names)])
    last = ["kept", *(sum(kept.get(f"{name} {split} documents", 0) for split in ("train", "val")) for name in names)]
    yield from markdown_table(("documents", *names), [row for row in rows if row[0] == "read" or any(row[1:])] + [last])
    yield ""
    yield "Each document that a rule left out is in `stages/clean/*/dropped.jsonl`, each duplicate with what it is like"
    yield "in `stages/duplicates/*/duplicates.jsonl`, each unreadable file in `stages/ingest/*/failed.jsonl`, what"
    yield "leaks an item in `stages/contamination/*/hits.jsonl`, with pieces that are too short in the same folder."
    few, other = (sum(one[rule] for one in cleaned.values()) for rule in (STOPPED, LANGUAGE))
    if few or other:
        yield ""
        yield f"For their language: {few:,} documents have too few stop words (`filter.min_stop_words`: eight English"
        yield "words, which texts in other languages lack; with `languages`, those of each document's own language);"
        yield f"{other:,} are in none of `filter.languages`{_languages(cleaned.values())}."
    yield from _masked(cleaned.values())
    if marks := sum(one[POSSIBLE_NOTES] for one in read.values()):
        yield ""
        yield f"{marks:,} superscripts may be marks of notes: they follow a word, a year or a sentence, and no link or"
        yield "class names them. They are kept as superscripts (1999²), so they change no number."


def _masked(cleaned: Iterable[Counter[str]]) -> Iterator[str]:
    """How much private data `normalize.mask` replaced."""
    total = sum(cleaned, Counter[str]())
    if found := [(total[MASKED.format(kind)], names) for kind, names in PRIVATE.items() if total[MASKED.format(kind)]]:
        yield ""
        yield f"Masked: {', '.join(f'{count:,} {one if count == 1 else many}' for count, (one, many) in found)}."


def _languages(cleaned: Iterable[Counter[str]]) -> str:
    """The languages of documents that were dropped because of their language or because they contain too few stop
    words."""
    before = LEFT.format("")
    found: Counter[str] = Counter()
    for one in cleaned:
        found.update({key.removeprefix(before): n for key, n in one.items() if key.startswith(before)})
    often = sorted(found.items(), key=lambda one: (-one[1], one[0]))
    return f" (in all, by language: {', '.join(f'{name} {count:,}' for name, count in often)})" if often else ""


def _pairs(workspace: Workspace) -> Iterator[str]:
    """A table of how many question-answer pairs of each kind were made from papers, and how many of them were kept."""
    made, kept = _by_collection(workspace, "ingest"), _by_collection(workspace, "converse")
    rows = [
        [name, pair, made[name][f"{PAIR} {pair}"], kept[name][f"{PAIR} {pair}"]]
        for name, collection in workspace.recipe.collections.items()
        if collection.kind == "papers"
        for pair in collection.pairs
    ]
    yield from markdown_table(("collection", "pair", "made", "kept"), rows)


def _actions(workspace: Workspace) -> dict[str, Counter[str]]:
    """For each collection, the number of documents that contain a benchmark item, by what was done about the
    document."""
    found: dict[str, Counter[str]] = {name: Counter() for name in workspace.recipe.collections}
    # One task for each file of documents, in their order; none without a benchmark.
    for (arguments, _), task in zip(clean_parts(workspace), workspace.manifest("contamination").tasks, strict=False):
        found[arguments["collection"]].update({word: task.counts[count] for word, count in ACTIONS.items()})
    return found


def _mixture(workspace: Workspace) -> Iterator[str]:
    if not (workspace.directory / "mixture.json").is_file():
        yield "Conversations alone: each is seen once in an epoch."
        return
    mixture = read_json(workspace.directory / "mixture.json")
    total = sum(mixture["weights"].values())
    rows = [
        [name, f"{weight / total:.4f}", mixture["available"][name], f"{mixture['epochs'][name]:.3f}"]
        for name, weight in mixture["weights"].items()
    ]
    yield from markdown_table(("collection", "share of tokens", "train tokens", "epochs"), rows)
    yield ""
    cap = workspace.recipe.mix.epochs
    yield (
        f"A budget of {mixture['tokens']:,} tokens in rows of {mixture['block']:,}; with at most {cap:g} epochs of a "
        f"collection {mixture['largest']:,} would be possible, limited by {mixture['limited_by']}."
    )


def _benchmarks(workspace: Workspace) -> Iterator[str]:
    checks = checks_of(workspace)
    if not checks:
        yield "No benchmark was named, so it is not known which questions these documents contain."
        return
    dirty = {task.arguments["benchmark"]: task.counts for task in workspace.manifest("flags").tasks}
    rows = [
        [
            check.benchmark,
            check.items,
            dirty[check.benchmark]["dirty"],
            len(check.template_only),
            len(check.too_short_to_find),
            *(check.counts[key] for key in ("duplicate_stems", "contradictory", "repeated_options", "empty_options")),
            check.counts["answer_out_of_range"],
            check.counts["unread_options"],
            dirty[check.benchmark]["left_out"],
        ]
        for check in checks
    ]
    head = ("benchmark", "items", "dirty", "template only", "too short to find", "duplicate stems", "contradictory")
    yield from markdown_table(
        (*head, "repeated options", "empty options", "answer out of range", "unread options", "left out"), rows
    )
    yield ""
    rules = workspace.recipe.decontaminate
    yield (
        f"An item is dirty if a document holds {rules.words} words in a row of its question that no other question of "
        f"the benchmark has, all of a question of {rules.whole} to {rules.words - 1} words, or a question with "
        "its answer next to it. The questions of items that are template only are shared with others, so they are "
        "found with their answer alone. What was done with the documents is counted above. `benchmark/NAME.jsonl` "
        "flags every item but those that cannot be asked: with an empty option, or fewer than 2 or more than 26."
    )


def _hashes(workspace: Workspace) -> Iterator[str]:
    rows = []
    for place in sorted((workspace.directory / "stages").glob(f"*/{MANIFEST}")):
        rows.append([place.parent.name, f"`{digest(place).sha256[:32]}`"])
    yield from markdown_table(("stage", "SHA-256 of its manifest, first half"), rows)

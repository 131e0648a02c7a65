"""Deduplication, exact and near, in five stages, none of which holds all texts in memory.

The stages:

1. `signatures` computes a few numbers for each document.
2. `exact` finds equal documents.
3. `candidates` finds documents that agree in a band.
4. `verify` compares the word runs of these pairs.
5. `duplicates` keeps the first document of each cluster of pairs, and every other that resembles no kept document. It
   records how similar each removed document is to a kept one.

A document's address is its file's number and its row.

Two conversations are similar if both their trained messages and the remaining ones are, and pairs of answers if their
rejected answers are, too. Documents, conversations and pairs are never similar to one another. Rows of a table are
duplicates only if they are equal, since its templates make similar ones on purpose.

`document_digest` in `clean.py` decides which conversations are equal: those with equal roles, contents and loss masks.
`minhash.py` computes the bands and the similarity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fathom.corpus.clean import document_digest, text_digest
from fathom.corpus.conversations import contents
from fathom.corpus.documents import Document, read_at, write_lines
from fathom.corpus.kept import clean_parts
from fathom.corpus.minhash import NOTHING, band_numbers, jaccard, run_set
from fathom.corpus.recipe import Deduplicate
from fathom.corpus.stage import Input, Stage, Task, Workspace, grouped
from fathom.corpus.templates import is_trained
from fathom.corpus.words import BLOCK, Numbers, words_of
from fathom.report.mixing import mixed

ROW_BITS = 32
BUCKET_DOCUMENTS = 1 << 24
"""Documents per bucket: a task holds one number of each in memory."""
VERIFY_PAIRS = 1 << 16
"""Approximate number of pairs that a task compares."""
CROWD, NEIGHBOURS = 64, 32
"""If more than CROWD documents agree in a band, each is compared only with its NEIGHBOURS in length and the longest."""
COMPARED = 64
"""Documents of a cluster that stay with which a document is compared if it was not compared with any before."""
CACHED_RUNS = 1 << 24


def address(part: int, rows: NDArray[np.int64]) -> Numbers:
    """Addresses of documents in one file: the file's number and the row, packed into one integer."""
    return (np.uint64(part) << np.uint64(ROW_BITS)) | rows.astype(np.uint64)


class Signatures(Stage):
    """Computes the digest, length, position and MinHash bands of every document."""

    name = "signatures"
    version = 2

    def settings(self) -> dict[str, object]:
        """The recipe values that this stage's results depend on."""
        near = self.recipe.deduplicate
        tables = {"tables": sorted(self._tables())} if self._tables() else {}
        return {key: getattr(near, key) for key in ("near", "shingle", "bands", "rows", "seed")} | tables

    def _tables(self) -> set[str]:
        return {name for name, one in self.recipe.collections.items() if one.kind == "table"}

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        return [Task((part,)) for part in self.workspace.parts("clean")]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        near = self.recipe.deduplicate
        facts: list[tuple[bytes, int, int]] = []
        bands: list[Numbers] = []
        with self.workspace.path(task.inputs[0]).open("rb") as file:
            for batch in grouped(_texts(file, self._tables(), facts), len, BLOCK):
                if near.near:
                    bands.append(band_numbers(words_of(batch), near.shingle, near.bands, near.rows, near.seed))
        table = np.array(facts, [("digests", "V16"), ("offsets", "<i8"), ("sizes", "<i8")])
        for name in ("digests", "offsets", "sizes"):
            np.save(folder / f"{name}.npy", table[name])
        if near.near:
            np.save(folder / "bands.npy", np.concatenate(bands, axis=1) if bands else np.empty((near.bands, 0), "<u8"))
        return {"documents": len(facts)}


def _texts(file: IO[bytes], tables: set[str], facts: list[tuple[bytes, int, int]]) -> Iterator[str]:
    """Yields the text of each document in a file (empty for rows of tables), and appends its digest, byte offset and
    length to `facts`."""
    offset = 0
    for line in file:
        document = Document.from_json(line)
        facts.append((document_digest(document)[:16], offset, document.n_chars))
        offset += len(line)
        yield "" if document.collection in tables else document.text


class _Global(Stage):
    """A stage whose tasks read the signatures of all documents."""

    def signatures(self, name: str) -> list[Input]:
        """The signature files with this name, one for each file of documents and in the same order."""
        return self.workspace.outputs("signatures", name)

    def buckets(self) -> int:
        """The number of buckets into which documents are divided, so that each bucket fits in memory."""
        return -(-self.workspace.manifest("signatures").counts.get("documents", 0) // BUCKET_DOCUMENTS) or 1

    def priorities(self) -> list[int]:
        """For each file of documents, the priority of its collection in deduplication."""
        names = [arguments["collection"] for arguments, _ in clean_parts(self.workspace)]
        return [self.recipe.collections[name].priority for name in names]


class Exact(_Global):
    """Finds exact duplicates, as pairs of a duplicate and the equal document that is kept."""

    name = "exact"

    def settings(self) -> dict[str, object]:
        """The recipe values that this stage's results depend on."""
        return {"exact": self.recipe.deduplicate.exact, "priorities": self.priorities()}

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        files = self.workspace.parts("clean"), self.signatures("digests.npy"), self.signatures("offsets.npy")
        count = self.buckets()
        return [Task.of(*files, bucket=bucket, of=count) for bucket in range(count)]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        parts, files, offsets = task.groups
        pairs: Numbers = np.empty((0, 2), "<u8")
        if self.recipe.deduplicate.exact:
            digests, places = self._read(task, files)
            pairs = _equal_pairs(digests, places, _Rows(self.workspace, parts, offsets), self.priorities())
        np.save(folder / "pairs.npy", pairs)
        return {"pairs": len(pairs)}

    def _read(self, task: Task, files: Sequence[Input]) -> tuple[NDArray[np.integer], Numbers]:
        """The digests of the documents in one bucket, and these documents' addresses."""
        bucket, count = task.arguments["bucket"], task.arguments["of"]
        digests, places = [], []
        for part, one in enumerate(files):
            found = np.load(self.workspace.path(one))
            numbers = np.frombuffer(found.tobytes(), "<u8").reshape(-1, 2)[:, 0]
            mine = np.flatnonzero(numbers % np.uint64(count) == np.uint64(bucket))
            digests.append(found[mine])
            places.append(address(part, mine))
        return np.concatenate(digests), np.concatenate(places)


def _equal_pairs(digests: NDArray[np.integer], places: Numbers, rows: _Rows, priorities: Sequence[int]) -> Numbers:
    """Pairs (duplicate, kept document): of equal documents, the one with the highest priority is kept, on a tie the
    first path."""
    keys = np.frombuffer(digests.tobytes(), ">u8").reshape(-1, 2)
    order = np.lexsort((places, keys[:, 1], keys[:, 0]))
    keys, places = keys[order], places[order]
    same = (keys[1:] == keys[:-1]).all(axis=1)
    found: list[tuple[int, int]] = []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        members = places[first : last + 1].tolist()
        best = min(members, key=lambda one: (-priorities[one >> ROW_BITS], rows.read(one).path, one))
        found += [(one, best) for one in members if one != best]
    return np.array(found, "<u8").reshape(-1, 2)


class Candidates(_Global):
    """Finds candidate pairs: documents whose MinHash signatures agree in a band; of several equal texts only one takes
    part."""

    name = "candidates"

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        near = self.recipe.deduplicate
        if not near.near:
            return []
        signatures = (self.signatures(f"{name}.npy") for name in ("bands", "sizes", "digests"))
        files, count = (self.workspace.outputs("exact", "pairs.npy"), *signatures), self.buckets()
        places = product(range(near.bands), range(count))
        return [Task.of(*files, band=band, bucket=bucket, of=count) for band, bucket in places]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        exact, *signatures = task.groups
        gone = np.concatenate([np.load(self.workspace.path(one))[:, 0] for one in exact])
        gone.sort()
        numbers, places, sizes, digests = [], [], [], []
        for part, inputs in enumerate(zip(*signatures, strict=True)):
            files = [self.workspace.path(one) for one in inputs]
            band = np.load(files[0], mmap_mode="r")[task.arguments["band"]]
            mine = (band != NOTHING) & (band % np.uint64(task.arguments["of"]) == np.uint64(task.arguments["bucket"]))
            rows = np.flatnonzero(mine)
            here = address(part, rows)
            stays = ~_contains(gone, here)
            rows, here = rows[stays], here[stays]
            numbers.append(band[rows])
            places.append(here)
            sizes.append(np.load(files[1], mmap_mode="r")[rows])
            digests.append(np.frombuffer(np.load(files[2], mmap_mode="r")[rows].tobytes(), "<u8").reshape(-1, 2)[:, 0])
        pairs = _meeting(
            np.concatenate(numbers), np.concatenate(places), np.concatenate(sizes), np.concatenate(digests)
        )
        np.save(folder / "pairs.npy", pairs)
        return {"pairs": len(pairs)}


def _contains(sorted_numbers: Numbers, numbers: Numbers) -> NDArray[np.bool_]:
    if not len(sorted_numbers):
        return np.zeros(len(numbers), np.bool_)
    places = np.minimum(np.searchsorted(sorted_numbers, numbers), len(sorted_numbers) - 1)
    return sorted_numbers[places] == numbers


def _meeting(numbers: Numbers, places: Numbers, sizes: NDArray[np.int64], digests: Numbers) -> Numbers:
    """Pairs of documents that have the same band number, the smaller address first.

    Groups are sorted by length, longest first, so that the pairs of a large group depend on the texts, not their order.
    """
    order = np.lexsort((places, digests, -sizes, numbers))
    numbers, places = numbers[order], places[order]
    found = []
    begins = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    group = np.cumsum(np.concatenate([[0], (numbers[1:] != numbers[:-1]).astype(np.int64)]))
    counts = np.diff(np.concatenate([begins, [len(numbers)]]))
    largest = int(counts.max(initial=0))
    for step in range(1, largest if largest <= CROWD else max(CROWD, NEIGHBOURS + 1)):
        same = numbers[step:] == numbers[:-step]
        if step > NEIGHBOURS:
            same &= counts[group[step:]] <= CROWD
        if not same.any():
            break
        found.append(np.stack([places[:-step][same], places[step:][same]], axis=1))
    crowded = np.flatnonzero(counts[group] > CROWD)
    if len(crowded):
        longest = places[begins[group[crowded]]]
        found.append(np.stack([longest, places[crowded]], axis=1)[longest != places[crowded]])
    pairs = np.concatenate(found) if found else np.empty((0, 2), np.uint64)
    return np.unique(np.sort(pairs, axis=1), axis=0).astype("<u8")


class Verify(_Global):
    """Computes the exact similarity of the candidate pairs, and keeps the pairs that reach the threshold."""

    name = "verify"
    version = 3
    uses = ("deduplicate.jaccard", "deduplicate.shingle")

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        pairs = self.workspace.outputs("candidates", "pairs.npy")
        count = -(-self.workspace.manifest("candidates").counts.get("pairs", 0) // VERIFY_PAIRS)
        files = self.workspace.parts("clean"), self.signatures("offsets.npy"), pairs
        return [Task.of(*files, share=share, of=count) for share in range(count)]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        parts, offsets, files = task.groups
        pairs = self._mine(task, files)
        runs = _RunSets(_Rows(self.workspace, parts, offsets), self.recipe.deduplicate.shingle)
        similar = np.array([_alike(runs.of(one), runs.of(other)) for one, other in pairs.tolist()], "<f8")
        kept = similar >= self.recipe.deduplicate.jaccard
        np.save(folder / "edges.npy", pairs[kept])
        np.save(folder / "similarities.npy", similar[kept])
        return {"pairs": len(pairs), "verified": int(kept.sum())}

    def _mine(self, task: Task, files: Sequence[Input]) -> Numbers:
        """The candidate pairs of all bands that this task verifies, without repetitions; pairs are assigned to tasks by
        their first document."""
        found = [np.empty((0, 2), "<u8")]
        for one in files:
            pairs = np.load(self.workspace.path(one))
            share = mixed(pairs[:, 0]) % np.uint64(task.arguments["of"])
            found.append(pairs[share == np.uint64(task.arguments["share"])])
        return np.unique(np.concatenate(found), axis=0)


class _Rows:
    """Documents by address, read from their files on demand."""

    def __init__(self, workspace: Workspace, parts: Sequence[Input], offsets: Sequence[Input]) -> None:
        self._paths = [workspace.path(one) for one in parts]
        self._offsets = [np.load(workspace.path(one), mmap_mode="r") for one in offsets]
        self._files: OrderedDict[int, IO[bytes]] = OrderedDict()

    def read(self, place: int) -> Document:
        """One document."""
        part, row = place >> ROW_BITS, place & ((1 << ROW_BITS) - 1)
        if part not in self._files:
            if len(self._files) >= 64:
                self._files.popitem(last=False)[1].close()
            self._files[part] = self._paths[part].open("rb")
        return read_at(self._files[part], int(self._offsets[part][row]))


Sides = tuple[Numbers, ...]
"""The word runs of a document's text, or of a conversation's trained messages, of the remaining ones, and of the
rejected answer if there is one."""


def _alike(one: Sides, other: Sides) -> float:
    """The similarity of two documents, or of two conversations (the lowest of the similarities of their trained
    messages, of their other messages and of their rejected answers); 0 between a document and a conversation."""
    return min(map(jaccard, one, other)) if len(one) == len(other) else 0.0


def _sides(document: Document, shingle: int) -> Sides:
    if document.messages is None:
        return (run_set(words_of([document.text]), shingle),)
    trained = contents([one for one in document.messages if is_trained(one)])
    rest = contents([one for one in document.messages if not is_trained(one)])
    rejected = [] if document.rejected is None else [contents(document.rejected)]
    return tuple(_runs_or_text(text, shingle) for text in (trained, rest, *rejected))


def _runs_or_text(text: str, shingle: int) -> Numbers:
    """The word runs of a text; a text too short for a run is its own run, similar to equal texts only."""
    runs = run_set(words_of([text]), shingle)
    return runs if len(runs) else np.frombuffer(text_digest(text)[:8], "<u8")


class _RunSets:
    """Reads the word runs of documents, with a cache of the most recently used ones."""

    def __init__(self, rows: _Rows, shingle: int) -> None:
        self._rows, self._shingle = rows, shingle
        self._known: OrderedDict[int, Sides] = OrderedDict()
        self._held = 0

    def of(self, place: int) -> Sides:
        """The sets of word runs of one document: one set for a text, two for a conversation, three for a pair."""
        if place in self._known:
            self._known.move_to_end(place)
            return self._known[place]
        found = _sides(self._rows.read(place), self._shingle)
        self._known[place] = found
        self._held += sum(map(len, found))
        while self._held > CACHED_RUNS and len(self._known) > 2:
            self._held -= sum(map(len, self._known.popitem(last=False)[1]))
        return found


class Duplicates(_Global):
    """Lists the rows to remove from each file, and for each removed document the kept document that it matched.

    It is a single task, so it runs on one machine, and all verified pairs are in memory: two addresses and a similarity
    each. Documents are ranked by the collection's priority, then length (longest first), then id and path.
    """

    name = "duplicates"
    version = 2

    def settings(self) -> dict[str, object]:
        """The recipe values that this stage's results depend on."""
        return {"priorities": self.priorities(), "deduplicate": asdict(self.recipe.deduplicate)}

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        exact = self.workspace.outputs("exact", "pairs.npy")
        near = (self.workspace.outputs("verify", f"{name}.npy") for name in ("edges", "similarities"))
        return [Task.of(self.workspace.parts("clean"), self.signatures("offsets.npy"), exact, *near)]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        parts, offsets, *files = task.groups
        exact, edges, similarities = ([np.load(self.workspace.path(one)) for one in group] for group in files)
        same, near = (np.concatenate([np.empty((0, 2), "<u8"), *pairs]) for pairs in (exact, edges))
        similar = np.concatenate([np.empty(0), *similarities])
        rows = _Rows(self.workspace, parts, offsets)
        removed = list(_Choice(rows, self.recipe.deduplicate, self.priorities()).removed(same, near, similar))
        gone: dict[int, list[int]] = {}
        for place, _ in removed:
            gone.setdefault(place >> ROW_BITS, []).append(place & ((1 << ROW_BITS) - 1))
        for part in range(len(parts)):
            np.save(folder / f"removed-{part:06d}.npy", np.array(sorted(gone.get(part, [])), "<i8"))
        write_lines(folder / "duplicates.jsonl", (row for _, row in removed))
        found = {"removed": len(removed), "exact": sum(row["kind"] == "exact" for _, row in removed)}
        for name in self.recipe.collections:
            found[f"removed from {name}"] = sum(row["collection"] == name for _, row in removed)
        return found


Place = tuple[tuple[object, ...], str, str, str]
"""A document's rank, its id, path and collection."""


class _Choice:
    """Chooses the documents to keep: in order of rank, every document that duplicates none of those already kept."""

    def __init__(self, rows: _Rows, rules: Deduplicate, priorities: Sequence[int]) -> None:
        self._rows, self._rules, self._priorities = rows, rules, priorities
        self._runs = _RunSets(rows, rules.shingle)
        self._known: dict[int, Place] = {}

    def removed(
        self, same: Numbers, near: Numbers, similar: NDArray[np.float64]
    ) -> Iterator[tuple[int, dict[str, object]]]:
        """Yields (address, report entry) of each document that is removed as a duplicate.

        Args:
            same: Pairs of a copy and its original.
            near: Pairs above the threshold; no copy is in them.
            similar: The similarity of each.
        """
        copies: dict[int, list[int]] = {}
        for copy, original in same.tolist():
            copies.setdefault(original, []).append(copy)
        for members, neighbours in _clusters(near, similar):
            self._known.clear()
            stays = self._staying(members, neighbours)
            for one in sorted(members, key=self._rank):
                kept, value = stays[one]
                if one != kept:
                    yield one, self._said(one, kept, value)
                for copy in sorted(copies.pop(one, []), key=self._rank):
                    yield copy, self._said(copy, kept, value)
        for original, equal in sorted(copies.items()):
            for copy in sorted(equal, key=self._rank):
                yield copy, self._said(copy, original, 1.0)

    def _staying(
        self, members: Sequence[int], neighbours: Mapping[int, Mapping[int, float]]
    ) -> dict[int, tuple[int, float]]:
        """For each document of a cluster: the document that is kept instead (itself if it is kept), and the similarity
        of the two."""
        found: dict[int, tuple[int, float]] = {}
        stay: list[int] = []
        for one in sorted(members, key=self._rank):
            known = {other: value for other, value in neighbours[one].items() if found.get(other, (None,))[0] == other}
            if not known:  # in a large group, not every pair was a candidate
                likely = [other for other in stay[:COMPARED] if other not in neighbours[one]]
                measured = ((other, _alike(self._runs.of(one), self._runs.of(other))) for other in likely)
                known = {other: value for other, value in measured if value >= self._rules.jaccard}
            if known:
                found[one] = min(known.items(), key=lambda pair: (-pair[1], self._rank(pair[0])))
            else:
                found[one] = one, 1.0
                stay.append(one)
        return found

    def _place(self, address: int) -> Place:
        if address not in self._known:
            document = self._rows.read(address)
            rank = (-self._priorities[address >> ROW_BITS], -document.n_chars, document.id, document.path, address)
            self._known[address] = rank, document.id, document.path, document.collection
        return self._known[address]

    def _rank(self, address: int) -> tuple[object, ...]:
        return self._place(address)[0]

    def _said(self, one: int, kept: int, value: float) -> dict[str, object]:
        names = ("id", "path", "collection")
        mine, theirs = self._place(one)[1:], self._place(kept)[1:]
        return {
            **dict(zip(names, mine, strict=True)),
            "kind": "exact" if mine[0] == theirs[0] else "near",
            "jaccard": round(value, 6),
            "kept": dict(zip(names, theirs, strict=True)),
        }


def _clusters(near: Numbers, similar: NDArray[np.float64]) -> Iterator[tuple[list[int], dict[int, dict[int, float]]]]:
    """The documents of each cluster of pairs, with the documents that each is paired with, and their similarities."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if not len(near):
        return
    places, indices = np.unique(near, return_inverse=True)
    indices = indices.reshape(-1, 2)
    graph = coo_array((np.ones(len(near), np.int8), (indices[:, 0], indices[:, 1])), shape=(len(places),) * 2)
    _, labels = connected_components(graph, directed=False)
    within = labels[indices[:, 0]]  # a pair's cluster
    documents, pairs = np.argsort(labels, kind="stable"), np.argsort(within, kind="stable")
    last, last_pair = np.cumsum(np.bincount(labels)), np.cumsum(np.bincount(within))
    for number in range(len(last)):  # by slices: millions of clusters are not held as objects
        start, first = (last[number - 1], last_pair[number - 1]) if number else (0, 0)
        members, its = places[documents[start : last[number]]].tolist(), pairs[first : last_pair[number]]
        neighbours: dict[int, dict[int, float]] = {member: {} for member in members}
        for (one, other), value in zip(near[its].tolist(), similar[its].tolist(), strict=True):
            neighbours[one][other] = neighbours[other][one] = value
        yield members, neighbours

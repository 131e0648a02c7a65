"""Reads files of many kinds into rows of text; a document that cannot be read is recorded with a status and skipped.

`sandbox.py` is the separate process that ends at `ingest.max_memory` or `ingest.max_seconds`; `html.py`, `pdf.py`,
`tei.py`, `epub.py` and `jats.py` extract text there, and `fidelity.py` rereads a sample of files (`ingest.check`).
`data/sources.py` finds local files and reads their records; `data/cloud.py` copies files from URLs, and recognises them
by URL, size and ETag. A row's messages come from `conversations.py`, `traces.py`, `verbalizer.py` or `papers.py`.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from fathom.checkpoints.file_names import RECIPE
from fathom.corpus.conversations import contents, messages_of, pair_of
from fathom.corpus.documents import ConversationMessage, Document, PartWriter, write_lines
from fathom.corpus.extraction import FAILURES, PAIR, POSSIBLE_NOTES, Extracted, IngestValues, Status
from fathom.corpus.html import BOMS
from fathom.corpus.papers import Paper, exchanges, paper_of
from fathom.corpus.recipe import Collection
from fathom.corpus.sandbox import CHECKED, EXTRACTORS, Sandbox
from fathom.corpus.stage import Input, Stage, Task, grouped
from fathom.corpus.traces import is_trace, require_tools, trace_messages
from fathom.corpus.verbalizer import TEMPLATES, pairs_of
from fathom.corpus.warc import Captured, captured
from fathom.data.cloud import RemoteFile, find_remote, is_url, local
from fathom.data.sources import (
    ALL_FIELDS,
    COMPRESSIONS,
    JSON,
    READERS,
    TEXT,
    Payload,
    Reading,
    Source,
    find_files,
    is_list,
    json_object,
    list_items,
    opened,
    reader_of,
    record_suffixes,
    suffix_of,
    text_of,
)
from fathom.errors import DataError, to_install
from fathom.report.files import digest, read_json, write_json
from fathom.report.progress import ProgressBar
from fathom.report.results import restored

TASK_BYTES, TASK_FILES = 1 << 27, 512
"""A task reads files up to this total size and number; a larger file is a task of its own."""
HTML, PDF, TEI = (".html", ".htm", ".xhtml"), (".pdf",), (".tei",)
EPUB, JATS, WARC = (".epub",), (".jats", ".nxml"), (".warc", ".wet")
MIMES = {"html": "text/html", "pdf": "application/pdf", "tei": "application/tei+xml"}
MIMES |= {"epub": "application/epub+zip", "jats": "application/jats+xml"}
"""What is not text/plain."""
NEEDS = {"pdf": "pypdfium2", "html": "trafilatura", "warc": "warcio"}
WIDE = tuple(mark for mark, named in BOMS if named != "utf-8-sig")
PAGE = ".page"
"""A page of an archive while it is read."""
NUMBERS = "numbers.jsonl"
"""What a page says, and its text, where numbers differ."""
KEPT_FIELDS, LICENSE = ("id", "title", "url", "source", "date"), "license"
"""Fields of a row that its document keeps in `meta`, and the one that overrides the collection's licence."""
DIGESTS = ".digests.json"


def kind_of(path: PurePath, begins: Callable[[int], bytes] | None = None) -> str | None:
    """The kind of a file, which decides how it is read; None for an unknown kind.

    Args:
        path: Its path.
        begins: Reads its first bytes if it is not on this machine.
    """
    suffix = suffix_of(path)
    if suffix in WARC:
        return "warc"
    if (reader := reader_of(path)) is not None or suffix == JSON:
        return reader.name if reader else "jsonl"
    if suffix in (*HTML, *PDF, *TEI, *EPUB, *JATS, ".xml") and path.suffix.lower() in COMPRESSIONS:
        return None
    if suffix in PDF:
        return "pdf"
    if suffix in HTML:
        return "html"
    if suffix in TEI or suffix == ".xml":
        head = b"<TEI" if suffix in TEI else (begins or partial(_head, Path(path)))(1 << 12)
        return "tei" if b"<TEI" in head else "jats" if b"<article" in head else "text"
    if suffix in (*EPUB, *JATS):
        return "epub" if suffix in EPUB else "jats"
    return "text" if suffix in TEXT else None


def _head(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def size_of(path: Path | RemoteFile) -> int:
    """A file's bytes."""
    return path.size if isinstance(path, RemoteFile) else path.stat().st_size


class Ingest(Stage):
    """Reads what the collections name."""

    name = "ingest"
    version = 8

    def settings(self) -> dict[str, object]:
        """The recipe values that this stage's results depend on."""
        return asdict(self.recipe.ingest) | {"identify": None, "max_seconds": None}

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        try:
            return self._tasks()
        except FileNotFoundError as error:
            raise DataError(
                f"{error.filename} was deleted since the run began; run the same command to resume", 1
            ) from None

    def _tasks(self) -> list[Task]:
        files = [
            (name, label, path, kind)
            for name, collection in self.recipe.collections.items()
            for label, path, kind in collection_files(name, collection, self.workspace.directory)
        ]
        self._require({kind for *_, kind in files})
        identities = self._identities([path for _, _, path, _ in files if isinstance(path, Path)])
        identities |= {str(path): path.identity() for _, _, path, _ in files if isinstance(path, RemoteFile)}
        groups = grouped(files, lambda file: size_of(file[2]), TASK_BYTES, TASK_FILES, lambda file: file[0])
        return [self._task(group, identities) for group in groups]

    def _task(self, group: list[tuple[str, str, Path | RemoteFile, str]], identities: dict[str, str]) -> Task:
        collection = asdict(self.recipe.collections[group[0][0]])
        keys = ("kind", "license", "text_field", "separator", "encoding", "entity_field", "templates", "tools", "pairs")
        arguments = {key: collection[key] for key in keys} | {
            "collection": group[0][0],
            "files": [[label, kind] for _, label, _, kind in group],
        }
        places = [(path if isinstance(path, RemoteFile) else path.absolute(), path) for _, _, path, _ in group]
        inputs = (Input(str(place), identities[str(path)], size_of(path)) for place, path in places)
        return Task(tuple(inputs), arguments)

    def _require(self, kinds: set[str]) -> None:
        for kind in sorted(kinds):
            needed = READERS[kind].needs if kind in READERS else NEEDS.get(kind, "")
            if kind == "html" and self.recipe.ingest.html == "plain":
                continue
            if needed and importlib.util.find_spec(needed) is None:
                extra = "data" if kind in READERS else "corpus"
                raise DataError(f"reading {kind} needs {needed}: {to_install(extra)}")

    def _identities(self, paths: list[Path]) -> dict[str, str]:
        """A digest of each file's contents. Files are not read again while size and modification time stay the same."""
        stamps = {path: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
        if self.recipe.ingest.identify == "stamp":
            names = {path: json.dumps([path.name, *stamp]) for path, stamp in stamps.items()}
            return {str(path): hashlib.sha256(name.encode()).hexdigest() for path, name in names.items()}
        place = self.workspace.directory / DIGESTS
        known = read_json(place) if place.is_file() else {}
        found: dict[Path, str] = {}
        fresh = [path for path in paths if known.get(str(path.absolute()), [None])[:-1] != stamps[path]]
        total = sum(stamps[path][0] for path in fresh)
        with ProgressBar("reading inputs", total) as bar, ThreadPoolExecutor(4) as pool:
            done = 0
            for path, facts in zip(fresh, pool.map(digest, fresh), strict=True):
                found[path] = facts.sha256
                done += stamps[path][0]
                bar.update(done)
        found |= {path: known[str(path.absolute())][-1] for path in paths if path not in found}
        if fresh and (self.workspace.directory / RECIPE).is_file():  # a preview may name any directory
            write_json(place, {str(path.absolute()): [*stamps[path], found[path]] for path in paths})
        return {str(path): identity for path, identity in found.items()}

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        reader = _Reader(task.arguments, asdict(self.recipe.ingest), folder / PAGE)
        counts = dict.fromkeys(
            ("documents", "bytes", "ok", *FAILURES, POSSIBLE_NOTES, "checked", "numbers", "wrong"), 0
        )
        failures: list[Failed] = []
        differing: list[dict[str, str]] = []
        sample = self._sample(task)
        with closing(PartWriter(folder)) as writer, closing(reader.sandbox):
            for (label, kind), file in zip(task.arguments["files"], task.inputs, strict=True):
                _require_unchanged(label, file)
                with local(file.path, folder, file.bytes) as path:
                    for found in reader.read(label, kind, path):
                        counts["documents"] += 1
                        if isinstance(found, Failed):
                            counts[found.status] += 1
                            failures.append(found)
                            continue
                        counts["ok"] += 1
                        counts["bytes"] += len(found.text.encode("utf-8"))
                        counts[POSSIBLE_NOTES] += int(str(found.meta.get(POSSIBLE_NOTES, 0)))
                        if PAIR in found.meta:
                            counts[f"{PAIR} {found.meta[PAIR]}"] = counts.get(f"{PAIR} {found.meta[PAIR]}", 0) + 1
                        writer.write(found)
                        if label in sample and (same := reader.sandbox.compare(kind, path, found.text)):
                            counts["checked"] += 1
                            counts["numbers"] += same.numbers
                            counts["wrong"] += same.wrong
                            differing += [{"file": label, **example} for example in same.examples]
        write_lines(folder / "failed.jsonl", map(vars, failures))
        write_lines(folder / NUMBERS, differing)
        return counts

    def _sample(self, task: Task) -> set[str]:
        """The sample of files whose numbers are compared with the extracted text: the files with the lowest hashes."""
        files = zip(task.inputs, task.arguments["files"], strict=True)
        hashes = sorted((one.sha256, label) for one, (label, kind) in files if kind in CHECKED)
        return {label for _, label in hashes[: self.recipe.ingest.check]}


def _require_unchanged(label: str, file: Input) -> None:
    """Refuse a file that changed during the run: its result would be stored under the hash of the earlier contents."""
    if is_url(file.path):  # its copy is compared
        return
    try:
        size = Path(file.path).stat().st_size
    except FileNotFoundError:
        raise DataError(f"{label} was deleted since the run began; run the same command to resume", 1) from None
    if size != file.bytes:
        said = f"has {size:,} bytes now, and had {file.bytes:,} when the run began"
        raise DataError(f"{label} {said}; run the same command to resume", 1)


def collection_files(
    name: str, collection: Collection, out: Path | None = None
) -> list[tuple[str, Path | RemoteFile, str]]:
    """(label, path, kind) of each file of a collection, in a fixed order.

    A label is the path from the input on, with as many more folders in front as tell two files apart. A file of
    two inputs has one label.
    """
    files = list(_collection_files(name, collection, out))
    labels: dict[tuple[str, ...], str] = {}
    for label, path, _ in files:
        labels.setdefault(_parts(path), label)
    while len(set(labels.values())) < len(labels):
        often = Counter(labels.values())
        for parts, label in labels.items():
            if often[label] > 1:
                labels[parts] = "/".join(parts[-label.count("/") - 2 :])
    return [(labels[_parts(path)], path, kind) for _, path, kind in files]


def _parts(path: Path | RemoteFile) -> tuple[str, ...]:
    if isinstance(path, RemoteFile):
        return path.path.parts
    found = path.absolute()
    if ".." in found.parts:
        plain = Path(os.path.normpath(found))
        found = plain if plain.exists() and plain.samefile(path) else found  # behind a link, .. is another folder
    return found.parts


def _collection_files(
    name: str, collection: Collection, out: Path | None
) -> Iterator[tuple[str, Path | RemoteFile, str]]:
    words = f"known are {' '.join([*record_suffixes(), *PDF, *HTML, '.tei.xml', *EPUB, *JATS, *WARC, *TEXT[:4]])} ..."
    for text in collection.inputs:
        if is_url(text):
            yield from _remote_files(name, text, words)
            continue
        try:
            paths = find_files(text, lambda file: kind_of(file) is not None, words, out)
        except DataError as error:
            raise DataError(f"collections.{name}: {error}") from None
        place = Path(text).expanduser()
        base = place.parent if place.exists() else Path(text.split("*")[0].split("?")[0].split("[")[0] + "x").parent
        for path in paths:
            try:
                str(path).encode("utf-8")
            except UnicodeEncodeError:
                raise DataError(f"collections.{name}: {str(path)!a}: its name is not UTF-8: rename it") from None
            kind = kind_of(path)
            if kind is None:
                raise DataError(f"collections.{name}: {path}: unknown extension; {words}")
            yield path.relative_to(base.expanduser()).as_posix(), path, kind


def _remote_files(name: str, url: str, words: str) -> Iterator[tuple[str, RemoteFile, str]]:
    """(label, file, kind) of each file at a URL that fsspec opens."""
    try:
        files = find_remote(url, lambda path: kind_of(path, lambda _: b"") is not None, words)
    except DataError as error:
        raise DataError(f"collections.{name}: {error}", error.exit_code) from None
    named = re.split(r"[*?\[]", url.rstrip("/"))[0]
    base = RemoteFile(named + ("x" if glob.has_magic(url) else "")).path.parent
    for file in files:
        kind = kind_of(file.path, file.begins)
        if kind is None:
            raise DataError(f"collections.{name}: {file.url}: unknown extension; {words}")
        yield file.path.relative_to(base).as_posix(), file, kind


@dataclass(frozen=True)
class Failed:
    """A file or record that yielded no document, and the reason."""

    path: str
    status: Status
    detail: str


def _facts(row: Mapping[str, object]) -> tuple[dict[str, object], str | None]:
    """What a document keeps of its row: some fields, and the row's licence if it names one."""
    meta: dict[str, object] = {key: row[key] for key in KEPT_FIELDS if isinstance(row.get(key), (str, int))}
    license_ = row.get(LICENSE)
    return meta, license_ if isinstance(license_, str) else None


def rows_in(data: bytes) -> Sequence[object] | None:
    """The rows of a JSON file that holds an object of columns of one length, or of one list of rows; None for any
    other."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, Mapping):
        return None
    lists = [one for one in value.values() if isinstance(one, list)]
    if len(lists) == len(value) > 1 and len({len(one) for one in lists}) == 1:
        return [dict(zip(value, row, strict=True)) for row in zip(*lists, strict=True)]
    return lists[0] if len(lists) == 1 and all(isinstance(one, Mapping) for one in lists[0]) else None


class _Reading(Reading):
    """Reads what a document keeps of its row, too."""

    also = (*KEPT_FIELDS, LICENSE)


class _Reader:
    """Reads the files of one task."""

    def __init__(self, arguments: dict[str, Any], settings: IngestValues, page: Path) -> None:
        self._arguments, self._settings, self._page = arguments, settings, page
        self._limit = settings["max_document_bytes"]
        self.sandbox = Sandbox(settings)
        self._rejected: list[ConversationMessage] | None = None
        """The rejected answer of the row that is read, among preferences."""

    def read(self, label: str, kind: str, path: Path) -> Iterator[Document | Failed]:
        """The documents of a file, and a `Failed` for each record that yielded no document."""
        lines = kind in READERS and READERS[kind].gives == "lines"
        if self._arguments["kind"] == "papers" and kind == "tei":
            yield from self._paper(label, path)
            return
        if self._arguments["kind"] != "documents" and not lines:
            or_tei = ", or from TEI" if self._arguments["kind"] == "papers" else ""
            said = f"{self._arguments['kind']} are read from lines of JSON or of a table{or_tei}, not from {kind}"
            yield Failed(label, "parse_error", said)
            return
        if kind in EXTRACTORS:
            yield self._outcome(label, kind, self.sandbox.extract(kind, path))
            return
        number, before = 0, None
        try:
            if kind == "warc":
                for number, one in enumerate(captured(path, self._settings["max_file_bytes"]), 1):
                    yield self._captured(f"{label}:{number}", one)
                return
            for payload in self._records(kind, path):
                number += 1
                place = label if kind == "text" and self._arguments["separator"] is None else f"{label}:{number}"
                if payload is None:
                    yield Failed(place, "too_large", f"over {self._limit:,} bytes")
                elif self._arguments["kind"] == "table":
                    yield from self._pairs(place, payload)
                elif self._arguments["kind"] == "papers":
                    before, made = self._paper_row(place, payload, before)
                    yield from made
                elif (found := self._row(place, kind, payload)) is not None:
                    yield found
        except DataError as error:
            # Documents before the damage are kept. The path is removed, since results must not depend on where files
            # are.
            said = str(error).replace(str(path), label)
            yield Failed(f"{label}:{number + 1}", "parse_error", said)

    def _captured(self, place: str, one: Captured) -> Document | Failed:
        """A page or text of a web archive (WARC, WET), as a document."""
        if one.data is None:
            return Failed(place, "too_large", f"over {self._settings['max_file_bytes']:,} bytes")
        if one.kind == "text":
            return self._row(place, "text", one.data, one.meta) or Failed(place, "empty", "")
        self._page.write_bytes(one.data)
        try:
            extracted = self.sandbox.extract(one.kind, self._page)
        finally:
            self._page.unlink()
        return self._outcome(place, one.kind, replace(extracted, meta={**one.meta, **extracted.meta}))

    def _records(self, kind: str, path: Path) -> Iterator[Payload]:
        reading = _Reading(
            self._arguments["text_field"],
            separator=self._arguments["separator"],
            oversize="skip",
            max_record_bytes=self._limit,
        )
        rows: Iterable[object] | None = None
        if kind == "text" and reading.separator is not None:
            self._require_dividable(path, reading.separator)
        if suffix_of(path) == JSON and is_list(path):
            rows = list_items(path)
        elif path.suffix == JSON and self._arguments["text_field"] == ALL_FIELDS:
            rows = rows_in(path.read_bytes()) if path.stat().st_size <= self._limit else None
        if rows is not None:
            lines = (json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") for row in rows)
            return (line if len(line) <= self._limit else None for line in lines)
        gives = READERS[kind].gives if kind in READERS else "text"
        return Source(gives, str(path), "", (path,), reader=kind).records(reading)

    def _require_dividable(self, path: Path, separator: str) -> None:
        """Refuse a text in which a separator is not found, since its bytes are not those of UTF-8."""
        line, encoding = f"{separator}\n\n", self._arguments["encoding"]
        with opened(path) as file:
            wide = encoding == "utf-8" and file.read(4).startswith(WIDE)
        if wide or not line.encode(encoding, "replace").endswith(line.encode("utf-8")):
            raise DataError(f"{path}: the separator is looked for in UTF-8, and this file is not: convert the file")

    def _row(
        self, place: str, kind: str, payload: Payload, known: Mapping[str, object] | None = None
    ) -> Document | Failed | None:
        """One record as a document, with its metadata; None for an empty line."""
        meta: dict[str, object] = dict(known or {})
        messages = license_ = None
        try:
            if kind in READERS and READERS[kind].gives == "rows":
                text = text_of(payload, self._arguments["text_field"])
                meta, license_ = _facts(payload)
            elif kind == "text":
                encoding = self._arguments["encoding"]
                marked = next((named for mark, named in BOMS if payload.startswith(mark)), encoding)
                text = payload.decode(marked if encoding == "utf-8" else encoding)
            elif not payload.strip():
                return None
            else:
                text, meta, messages, license_ = self._json(payload)
        except (ValueError, RecursionError) as error:
            said = " ".join(str(error).split())[:300]
            return Failed(place, "parse_error", said or type(error).__name__)
        extracted = Extracted("ok" if text.strip() else "empty", text, meta=meta)
        return self._outcome(place, kind, extracted, messages, license_)

    def _pairs(self, place: str, line: bytes) -> Iterator[Document | Failed]:
        """Yields the conversations that question templates make from one record of a table."""
        if not line.strip():
            return
        templates = self._arguments["templates"]
        chosen = list(zip(templates[::2], templates[1::2], strict=True)) or TEMPLATES
        try:
            pairs = list(pairs_of(json_object(line), self._arguments["entity_field"], chosen))
        except (ValueError, RecursionError) as error:
            yield Failed(place, "parse_error", " ".join(str(error).split())[:300])
            return
        for number, messages in enumerate(pairs, 1):
            text = Extracted("ok", contents(messages))
            yield self._outcome(f"{place}.{number}", "jsonl", text, messages)

    def _paper(self, label: str, path: Path) -> Iterator[Document | Failed]:
        """A TEI file as conversations."""
        found = self.sandbox.extract("paper", path)
        if found.status != "ok":
            yield Failed(label, found.status, found.detail)
            return
        yield from self._exchanges(label, restored(Paper, json.loads(found.text)), None)

    def _paper_row(
        self, place: str, line: bytes, before: Paper | None
    ) -> tuple[Paper | None, Iterable[Document | Failed]]:
        """The paper in a row with a title and an abstract, and the conversations made from it; `before` is the previous
        row's paper."""
        if not line.strip():
            return before, ()
        try:
            paper = paper_of(json_object(line), self._arguments["text_field"])
        except (ValueError, RecursionError) as error:
            return before, [Failed(place, "parse_error", " ".join(str(error).split())[:300])]
        return paper, self._exchanges(place, paper, before)

    def _exchanges(self, place: str, paper: Paper, before: Paper | None) -> Iterator[Document | Failed]:
        made = list(exchanges(paper, before, self._arguments["pairs"]))
        if not made:
            yield Failed(place, "empty", "a paper of which no pair can be made")
        for number, (pair, messages) in enumerate(made, 1):
            text = Extracted("ok", contents(messages), meta={PAIR: pair})
            yield self._outcome(f"{place}.{number}", "jsonl", text, messages)

    def _json(self, line: bytes) -> tuple[str, dict[str, object], list[ConversationMessage] | None, str | None]:
        values = json_object(line)
        meta, license_ = _facts(values)
        if self._arguments["kind"] == "preferences":
            messages, self._rejected = pair_of(values)
            return contents([*messages, *self._rejected]), meta, messages, license_
        if self._arguments["kind"] == "conversations":
            text = next((values[key] for key in ("trace", "text") if is_trace(values.get(key))), None)
            messages = trace_messages(text) if text is not None else messages_of(values)
            if self._arguments["tools"]:
                require_tools(messages, self._arguments["tools"])
            return contents(messages), meta, messages, license_
        return text_of(values, self._arguments["text_field"]), meta, None, license_

    def _outcome(
        self,
        place: str,
        kind: str,
        extracted: Extracted,
        messages: list[ConversationMessage] | None = None,
        license_: str | None = None,
    ) -> Document | Failed:
        if extracted.status != "ok":
            return Failed(place, extracted.status, extracted.detail)
        meta = dict(extracted.meta)
        declared = license_ or str(meta.pop("license", "") or self._arguments["license"])
        try:
            for words in (extracted.text, declared, *map(str, meta.values())):
                words.encode("utf-8")
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
            return Failed(place, "parse_error", str(error))
        return Document(
            text=extracted.text,
            path=place,
            collection=self._arguments["collection"],
            mime=MIMES.get(kind, "text/plain"),
            license=declared,
            meta=meta,
            messages=messages,
            rejected=self._rejected,
        )

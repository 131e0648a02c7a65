"""Normalise documents, give every document and conversation an id, and drop what breaks a rule, with the reason.

`quality.py` has the rules and the stop words, `private.py` finds what `normalize.mask` replaces, and `normalization.py`
decides the Unicode form. Of conversations only empty ones are dropped, and only `mask` changes their text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path

from fathom.corpus.conversations import contents
from fathom.corpus.documents import Document, PartWriter, read_part, write_lines
from fathom.corpus.normalization import normalize
from fathom.corpus.private import masked
from fathom.corpus.quality import Broken, broken_rules, language_of
from fathom.corpus.recipe import Filter
from fathom.corpus.stage import Stage, Task
from fathom.corpus.templates import is_trained
from fathom.corpus.words import count_words
from fathom.errors import DataError, to_install

STOPPED, LANGUAGE = "min_stop_words", "language"
RULES = (*(one.name for one in fields(Filter) if one.name != "languages"), LANGUAGE)
LEFT = "dropped in {}"
"""The count of documents in a language that these two rules drop."""
MASKED = "masked {}"
"""The count of a kind of private data."""
ONE_PART = 1 << 62


def text_digest(text: str) -> bytes:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def document_digest(document: Document) -> bytes:
    """SHA-256 of a document's text, or of a conversation's roles, messages and loss mask."""
    if document.messages is None:
        return text_digest(document.text)
    said = [[one["role"], is_trained(one), one["content"]] for one in (*document.messages, *(document.rejected or ()))]
    return text_digest(json.dumps(said, ensure_ascii=False))


class Clean(Stage):
    """One task for each file of documents; dropped documents are listed in a file next to the kept ones."""

    name = "clean"
    version = 8
    uses = ("normalize",)

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        filters = map(self.recipe.filter_of, self.recipe.collections)
        judged = [one for one in filters if one.languages]
        listed = [one for one in judged if one.min_stop_words is not None]
        for package, wanted in (("py3langid", judged), ("justext", listed)):
            if wanted and importlib.util.find_spec(package) is None:
                raise DataError(f"filter.languages needs {package}: {to_install('corpus')}")
        found = []
        for entry, parts in self.workspace.parts_by_task("ingest"):
            collection = entry.arguments["collection"]
            kind = "documents" if entry.arguments["kind"] == "documents" else "conversations"
            limits = asdict(self.recipe.filter_of(collection)) if kind == "documents" else None
            arguments = {"collection": collection, "kind": kind, "filter": limits}
            found += [Task((part,), arguments) for part in parts]
        return found

    def finish(self, counts: dict[str, int]) -> None:
        """Refuse an empty result; the error names the rule that dropped most documents."""
        if counts.get("kept"):
            return
        if not counts.get("documents"):
            raise DataError(f"clean: no document could be read: see failed.jsonl in {self.workspace.stage('ingest')}")
        rule = max(("empty", *RULES), key=lambda rule: counts[rule])
        raise DataError(
            f"clean: all {counts['documents']:,} documents are dropped, {counts[rule]:,} by the rule {rule}: "
            f"see dropped.jsonl in {self.workspace.stage(self.name)}"
        )

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        limits = None
        if task.arguments["filter"] is not None:
            values = task.arguments["filter"]
            limits = Filter(**values | {"languages": tuple(values["languages"])})
        counts = Counter(dict.fromkeys(("documents", "kept", "bytes", "empty", *RULES), 0))
        with closing(PartWriter(folder, limit=ONE_PART)) as writer:
            dropped = self._dropped(self.workspace.path(task.inputs[0]), limits, writer, counts)
            write_lines(folder / "dropped.jsonl", dropped)
        return counts

    def _dropped(
        self, path: Path, limits: Filter | None, writer: PartWriter, counts: Counter[str]
    ) -> Iterator[dict[str, object]]:
        """Yields a report line for each dropped document, and passes each kept document to the writer."""
        for document in read_part(path):
            counts["documents"] += 1
            for name, count in self._normalize(document).items():
                counts[name] += count
            reasons = _reasons(document, limits)
            if not reasons:
                counts["kept"] += 1
                counts["bytes"] += len(document.text.encode("utf-8"))
                writer.write(document)
                continue
            counts[reasons[0].rule] += 1
            if reasons[0].rule in (STOPPED, LANGUAGE) and document.lang:
                counts[LEFT.format(document.lang)] += 1
            yield {"id": document.id, "path": document.path, "reason": reasons[0].rule, "all": list(map(vars, reasons))}

    def _normalize(self, document: Document) -> Counter[str]:
        """Normalise a document in place; returns how many pieces of private data were masked in it, by kind."""
        normal = self.recipe.normalize
        counts: Counter[str] = Counter()
        if document.messages is None:
            text = normalize(document.text, normal.strip, normal.blank_lines, normal.form)
            document.text, counts = masked(text, normal.mask)
        else:  # train on exactly what was written, including outer spaces
            messages = [*document.messages, *(document.rejected or ())]
            for message in messages if normal.mask else ():
                message["content"], found = masked(message["content"], normal.mask)
                counts += found
            document.text = contents(messages)
        document.id = document_digest(document).hex()[:16]
        document.n_chars, document.n_words = len(document.text), count_words(document.text)
        return Counter({MASKED.format(kind): count for kind, count in counts.items()})


def _reasons(document: Document, limits: Filter | None) -> list[Broken]:
    """Every rule that a document breaks, in the order of the checks."""
    if not document.text.strip():
        return [Broken("empty")]
    if limits is None:
        return []
    if not limits.languages:
        return broken_rules(document.text, limits)
    document.lang = language_of(document.text)
    reasons = broken_rules(document.text, limits, document.lang)
    if document.lang not in limits.languages:
        reasons.append(Broken(LANGUAGE, document.lang, list(limits.languages)))
    return reasons

"""The stages of `fathom prepare`: inputs as files of documents, and these as token shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fathom.checkpoints.layout import TOKENIZER, TOKENIZER_JSON
from fathom.corpus.documents import PART_BYTES, Document, PartWriter, read_part
from fathom.corpus.stage import Input, StageOf, Task, grouped
from fathom.corpus.tokens import FACTS, SHARDS, TextEncoder, write_shards
from fathom.data.sources import FileFormat, Reading, Source, find_sources
from fathom.errors import DataError
from fathom.report.files import asdict, digest, read_json, write_json

TASK_BYTES, TASK_FILES = 1 << 27, 4096


@dataclass(frozen=True)
class AdvisedReading(Reading):
    """A reading whose errors name the options that allow more."""

    advises = True


@dataclass(frozen=True)
class PrepareSettings:
    """The settings that determine the tokens."""

    inputs: list[str]
    tokenizer: str | int | None
    eos_token: str | None
    reading: AdvisedReading
    file_format: FileFormat
    held_out: float
    shard_tokens: int
    tokenizer_bytes: int | None
    input_bytes: int

    def sources(self, out: Path) -> list[Source]:
        """The inputs; files in the output directory are left out."""
        return find_sources(self.inputs, self.reading, self.file_format, out)


class Read(StageOf[PrepareSettings]):
    """One task for each input file, or for many files that are a document each."""

    name = "read"
    recipe_class = PrepareSettings

    def settings(self) -> dict[str, object]:
        """The values that this stage's results depend on."""
        return {"reading": asdict(self.recipe.reading)}

    def tasks(self) -> list[Task]:
        """The tasks in the order of the inputs."""
        found = []
        for number, source in enumerate(self.recipe.sources(self.workspace.directory.parent)):
            values = {key: getattr(source, key) for key in ("kind", "name", "domain", "reader")}
            groups = grouped(source.paths, lambda path: path.stat().st_size, TASK_BYTES, TASK_FILES)
            for paths in groups if source.paths else [[]]:  # a data set of the Hub has none
                found.append(Task(tuple(map(_stamped, paths)), {"source": number, **values}))
        return found

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Write the documents of a source, or of some of its files, with their domains as collections."""
        values = {key: value for key, value in task.arguments.items() if key != "source"}
        source = Source(**values, paths=tuple(Path(one.path) for one in task.inputs))
        left_out = 0
        with PartWriter(folder) as writer:
            for document in source.documents(self.recipe.reading):
                if document is None:
                    left_out += 1
                else:
                    writer.write(Document(document.text, source.name, document.domain))
        return {"left_out": left_out}


def _stamped(path: Path) -> Input:
    """A file, recognised by its path, size and modification time."""
    facts = path.stat()
    stamp = json.dumps([str(path), facts.st_size, facts.st_mtime_ns])
    return Input(str(path.absolute()), hashlib.sha256(stamp.encode()).hexdigest(), facts.st_size)


class Encode(StageOf[PrepareSettings]):
    """One task for some files of documents; each domain in it becomes a shard."""

    name = "encode"
    recipe_class = PrepareSettings

    def settings(self) -> dict[str, object]:
        """The values that this stage's results depend on."""
        return {"held_out": self.recipe.held_out}

    def tasks(self) -> list[Task]:
        """The tasks, once everything is read and there is a tokenizer."""
        paths = (f"{TOKENIZER}/{TOKENIZER_JSON}", FACTS)
        tokenizer = tuple(Input.of(path, digest(self.workspace.directory / path)) for path in paths)
        parts = grouped(self.workspace.parts("read"), lambda part: part.bytes, PART_BYTES)
        return [Task((*tokenizer, *group)) for group in parts]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        file, facts, *parts = map(self.workspace.path, task.inputs)
        encoder = TextEncoder(file, **read_json(facts))
        shards = write_shards(folder, _documents(parts), encoder, self.recipe.held_out)
        write_json(folder / SHARDS, {"shards": [[*key, shard] for key, shard in shards.items()]})
        return {"documents": sum(shard.documents for shard in shards.values())}

    def finish(self, counts: dict[str, int]) -> None:
        """Refuse inputs without a document."""
        if not counts.get("documents"):
            raise DataError(f"{', '.join(self.recipe.inputs)}: no documents: every record is empty")


def _documents(parts: list[Path]) -> Iterator[Document]:
    for part in parts:
        yield from read_part(part)

"""The stages of `fathom prepare`: inputs are read into files of documents, and these are encoded into token shards.

`data/sources.py` finds and reads the inputs, and `tokens.py` encodes documents. `prepare.py` loads or trains the
tokenizer, joins the shards and removes `.prepare`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from fathom.checkpoints.file_names import TOKENIZER, TOKENIZER_JSON
from fathom.corpus.documents import PART_BYTES, Document, PartWriter, read_part
from fathom.corpus.stage import Input, StageOf, Task, grouped
from fathom.corpus.tokens import FACTS, SHARDS, TextEncoder, write_shards
from fathom.data.cloud import RemoteFile, is_url, local
from fathom.data.sources import FileFormat, Reading, Source, SourceText, find_sources
from fathom.errors import DataError
from fathom.report.files import digest, read_json, write_json

TASK_BYTES, TASK_FILES = 1 << 27, 4096
AnyFile: TypeAlias = Path | RemoteFile | None


@dataclass(frozen=True)
class AdvisedReading(Reading):
    """Reading options with error messages that name the option of `fathom prepare` which lets reading continue."""

    advises = True


@dataclass(frozen=True)
class PrepareSettings:
    """The settings of `fathom prepare` that determine the tokens it writes."""

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
    """One task for many small files, or for one large file. If a tokenizer is trained, inputs are kept apart."""

    name = "read"
    uses = ("reading",)
    recipe_class = PrepareSettings

    def tasks(self) -> list[Task]:
        """The tasks in the order of the inputs."""
        trains = isinstance(self.recipe.tokenizer, int)
        files = [
            (number, source, path)
            for number, source in enumerate(self.recipe.sources(self.workspace.directory.parent))
            for path in source.paths or source.remote or (None,)  # a data set of the Hub has none
        ]

        def alike(file: tuple[int, Source, AnyFile]) -> object:
            number, source, path = file
            return source.kind, source.domain, source.reader, number if trains or path is None else None

        groups = grouped(files, lambda file: _bytes(file[2]), TASK_BYTES, TASK_FILES, alike)
        return [self._task(group) for group in groups]

    def _task(self, group: list[tuple[int, Source, AnyFile]]) -> Task:
        number, source, _ = group[0]
        names = [source.name for _, source, _ in group]
        shared = {"source": number, "kind": source.kind, "domain": source.domain, "reader": source.reader}
        return Task(tuple(_stamped(path) for *_, path in group if path), {**shared, "names": names})

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Write the documents of input files to files of documents, with each document's domain as its collection."""
        kind, domain, reader, names = (task.arguments[key] for key in ("kind", "domain", "reader", "names"))
        left_out = 0
        with closing(PartWriter(folder)) as writer:
            for name, file in zip(names, task.inputs or [None], strict=True):
                for document in self._documents(Source(kind, name, domain, reader=reader), file, folder):
                    if document is None:
                        left_out += 1
                    else:
                        writer.write(Document(document.text, name, document.domain))
        return {"left_out": left_out}

    def _documents(self, source: Source, file: Input | None, folder: Path) -> Iterator[SourceText | None]:
        """Read the documents of an input file, or of a data set on the Hugging Face Hub."""
        if file is None:
            yield from source.documents(self.recipe.reading)
            return
        with local(file.path, folder, file.bytes if is_url(file.path) else 0) as path:
            try:
                yield from replace(source, paths=(path,)).documents(self.recipe.reading)
            except DataError as error:
                raise DataError(str(error).replace(str(path), file.path), error.exit_code) from None


def _bytes(file: AnyFile) -> int:
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size if file else 0


def _stamped(path: Path | RemoteFile) -> Input:
    """An input file, recognised by its path, size and modification time."""
    if isinstance(path, RemoteFile):
        return Input(path.url, path.identity(), path.size)
    facts = path.stat()
    stamp = json.dumps([str(path), facts.st_size, facts.st_mtime_ns])
    return Input(str(path.absolute()), hashlib.sha256(stamp.encode()).hexdigest(), facts.st_size)


class Encode(StageOf[PrepareSettings]):
    """One task for some files of documents; each domain in it becomes a shard."""

    name = "encode"
    uses = ("held_out",)
    recipe_class = PrepareSettings

    def tasks(self) -> list[Task]:
        """This stage's tasks; they can be listed once all inputs are read and the tokenizer exists."""
        paths = (f"{TOKENIZER}/{TOKENIZER_JSON}", FACTS)
        tokenizer = tuple(Input.of(path, digest(self.workspace.directory / path)) for path in paths)
        parts = grouped(self.workspace.parts("read"), lambda part: part.bytes, PART_BYTES)
        return [Task((*tokenizer, *group)) for group in parts]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        file, facts, *parts = map(self.workspace.path, task.inputs)
        encoder = TextEncoder(file, **read_json(facts))
        documents = chain.from_iterable(map(read_part, parts))
        shards = write_shards(folder, documents, encoder, self.recipe.held_out)
        write_json(folder / SHARDS, {"shards": [[*key, shard] for key, shard in shards.items()]})
        train = sum(shard.documents for (split, _), shard in shards.items() if split == "train")
        return {"documents": sum(shard.documents for shard in shards.values()), "train": train}

    def finish(self, counts: dict[str, int]) -> None:
        """Refuse inputs that contain no document, or whose documents are all held out from training."""
        if not counts.get("documents"):
            raise DataError(f"{', '.join(self.recipe.inputs)}: no documents: every record is empty")
        if not counts.get("train"):
            out = self.workspace.directory.parent
            raise DataError(f"{out}: every document was held out, none is left to train on: lower `held_out`")

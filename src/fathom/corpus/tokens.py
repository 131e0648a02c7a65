"""Kept documents as token shards: a tokenizer, then shards for each group of files of one collection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from fathom.checkpoints.layout import TOKENIZER_JSON
from fathom.corpus.documents import Document
from fathom.corpus.kept import KeptPart, kept_documents, kept_parts
from fathom.corpus.stage import Input, Stage, Task, Workspace
from fathom.corpus.templates import CHATS, TEMPLATES, tokens_of
from fathom.data.encode import choose_split
from fathom.data.shards import ShardWriter, token_dtype
from fathom.data.tokenizer import load_tokenizer, plain_encoder, save_tokenizer, train_bpe, vocabulary_size
from fathom.errors import DataError
from fathom.report.files import digest, read_json, write_json

FACTS, SHARDS = "facts.json", "shards.json"
BATCH_CHARACTERS = 1 << 18
PIECE_CHARACTERS = 1 << 20
"""Longer texts are tokenised in pieces, since tokenising takes up to 300 bytes of memory for each byte of text."""
ENDLESS = 1 << 62


class Tokenizer(Stage):
    """The tokenizer: a given one, or one trained on the kept training documents."""

    name = "tokenizer"

    def settings(self) -> dict[str, object]:
        """The recipe values that this stage's results depend on."""
        tokens = self.recipe.tokenize
        keys = ("eos_token",) if tokens.train is None else ("train", "train_bytes", "held_out")
        template = self._template()
        return {**{key: getattr(tokens, key) for key in keys}, **({"template": template} if template else {})}

    def _template(self) -> str | None:
        """The chat template for the tokenizer; None if there are no conversations, or it has its own."""
        talks = any(one.kind != "documents" for one in self.recipe.collections.values())
        name = self.recipe.converse.template
        return name if talks and name in TEMPLATES else None

    def tasks(self) -> list[Task]:
        """The tasks, once the earlier stages are finished."""
        name = self.recipe.tokenize.tokenizer
        if name is None:
            parts = kept_parts(self.workspace)
            arguments = [[part.collection, len(part.inputs()), part.min_words] for part in parts]
            return [Task(tuple(one for part in parts for one in part.inputs()), {"parts": arguments})]
        place = Path(name).expanduser()
        files = sorted(path for path in place.iterdir() if path.is_file()) if place.is_dir() else [place]
        if not place.exists():  # a name on the Hub, whose current contents are unknown
            return [Task((), {"name": name})]
        inputs = tuple(Input.of(str(path.absolute()), digest(path)) for path in files)
        return [Task(inputs, {"folder": place.is_dir()})]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        settings, template = self.recipe.tokenize, self._template()
        if "parts" in task.arguments:
            tokens = tokens_of(TEMPLATES[template]) if template else []
            tokenizer = train_bpe(self._texts(task), settings.train or 0, tokens)
        else:
            name = task.arguments.get("name")
            if name is None:
                first = Path(task.inputs[0].path)
                name = str(first.parent if task.arguments["folder"] else first)
            tokenizer = load_tokenizer(name, settings.eos_token)
        if template in CHATS and tokenizer.chat_template is None:
            tokenizer.chat_template = CHATS[template]
        save_tokenizer(tokenizer, folder)
        facts = {"vocab_size": vocabulary_size(tokenizer), "eos_token_id": int(tokenizer.eos_token_id)}
        write_json(folder / FACTS, facts)
        return facts

    def _texts(self, task: Task) -> Iterator[str]:
        """Training documents from the start of every collection, an equal share of each."""
        names = [name for name, *_ in task.arguments["parts"]]
        room = dict.fromkeys(names, self.recipe.tokenize.train_bytes // len(set(names)))
        inputs = iter(task.inputs)
        for name, count, min_words in task.arguments["parts"]:
            mine = tuple(islice(inputs, count))
            if room[name] <= 0:
                continue
            for document in kept_documents(self.workspace, mine, min_words):
                if choose_split(document.text, self.recipe.tokenize.held_out) == "train":
                    yield document.text
                    room[name] -= len(document.text.encode("utf-8"))
                    if room[name] <= 0:
                        break


class Tokenize(Stage):
    """One task for the files of a collection that form one shard."""

    name = "tokenize"

    def settings(self) -> dict[str, object]:
        """The recipe values that this stage's results depend on."""
        return {"held_out": self.recipe.tokenize.held_out}

    def tasks(self) -> list[Task]:
        """The tasks, once the earlier stages are finished."""
        parts = [part for part in kept_parts(self.workspace) if part.kind == "documents"]
        return groups_of(self.workspace, parts, self.recipe.tokenize.shard_bytes)

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        facts = read_json(self.workspace.path(task.inputs[1]))
        encoder = _Encoder(self.workspace.path(task.inputs[0]), facts["vocab_size"], facts["eos_token_id"])
        collection, dtype = task.arguments["collection"], token_dtype(facts["vocab_size"])
        writers = {split: ShardWriter(folder, split, collection, dtype, ENDLESS) for split in ("train", "val")}
        licenses: dict[str, int] = {}
        for batch in _batches(self._documents(task, licenses)):
            for split, writer in writers.items():
                mine = [text for text in batch if choose_split(text, self.recipe.tokenize.held_out) == split]
                if mine:
                    writer.append(*encoder(mine))
        keys = ("documents", "tokens", "bytes")
        counts = dict.fromkeys(keys, 0)
        shards = {}
        for split, writer in writers.items():
            if writer.shards:
                (entry,) = writer.shards
                shards[split] = entry
                for key in keys:
                    counts[key] += getattr(entry, key)
                    counts[f"{collection} {split} {key}"] = getattr(entry, key)
        write_json(folder / SHARDS, {"collection": collection, "shards": shards, "licenses": licenses})
        return counts

    def _documents(self, task: Task, licenses: dict[str, int]) -> Iterator[Document]:
        inputs = iter(task.inputs[2:])
        for count in task.arguments["parts"]:
            for document in kept_documents(self.workspace, tuple(islice(inputs, count)), task.arguments["min_words"]):
                licenses[document.license] = licenses.get(document.license, 0) + 1
                yield document


def groups_of(workspace: Workspace, parts: list[KeptPart], shard_bytes: int) -> list[Task]:
    """Tasks of consecutive files of one collection, about `shard_bytes` each, with the tokenizer as an input."""
    tokenizer = tuple(one for name in (TOKENIZER_JSON, FACTS) for one in workspace.outputs("tokenizer", name))
    found: list[Task] = []
    group: list[KeptPart] = []
    for part in [*parts, None]:
        size = sum(one.documents.bytes for one in group)
        ends = part is None or (group and part.collection != group[0].collection)
        if group and (ends or size >= shard_bytes):
            inputs = tuple(one for member in group for one in member.inputs())
            arguments = {
                "collection": group[0].collection,
                "parts": [len(member.inputs()) for member in group],
                "min_words": group[0].min_words,
            }
            found.append(Task((*tokenizer, *inputs), arguments))
            group = []
        if part is not None:
            group.append(part)
    return found


def _batches(documents: Iterator[Document]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        if batch and size + len(document.text) > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(document.text)
        size += len(document.text)
    if batch:
        yield batch


class _Encoder:
    """Encodes texts for a shard writer."""

    def __init__(self, file: Path, vocab_size: int, eos_token_id: int) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizer, self._file, self._eos = plain_encoder(file), file, eos_token_id
        self._dtype = token_dtype(vocab_size)

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens with EOS after each document, and document lengths in tokens and in bytes."""
        ids = [self._encode(text) for text in texts]
        tokens = np.fromiter((token for one in ids for token in one), self._dtype, sum(map(len, ids)))
        lengths = np.array([len(one) for one in ids], np.int64)
        return tokens, lengths, np.array([len(text.encode("utf-8")) for text in texts], np.int64)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        try:
            for encoding in self._tokenizer.encode_batch_fast(list(_cut(text)), add_special_tokens=False):
                ids += encoding.ids
        except Exception as error:
            said = next(iter(str(error).splitlines()), "")
            raise DataError(
                f"{self._file} cannot encode a document ({said}): it needs a token for unknown text", 1
            ) from None
        ids.append(self._eos)
        return ids


def _cut(text: str) -> Iterator[str]:
    """A long text in pieces that end before a space or at a line's end."""
    begin = 0
    while len(text) - begin > PIECE_CHARACTERS:
        middle, most = begin + PIECE_CHARACTERS // 2, begin + PIECE_CHARACTERS
        cut = max(text.rfind("\n", middle, most), text.rfind(" ", middle, most))
        end = cut if cut > 0 else most
        yield text[begin:end]
        begin = end
    yield text[begin:]

"""Kept documents as token shards: a tokenizer, then shards for each group of files of one collection.

`training_texts` chooses the text that a tokenizer is trained on: training documents alone, up to `tokenize.train_bytes`
or `--tokenizer-bytes`, or less if their different words exceed `WORDS_AT_MOST`. `Tokenizer` stores the chat template
`chatml` or `alpaca` (`CHATS` in `templates.py`) in a tokenizer for conversations that has none. `data/tokenizer.py`
trains the tokenizer, and makes it encode special tokens in documents as text; `data/shards.py` writes shards.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np

from fathom.checkpoints.file_names import TOKENIZER_JSON
from fathom.corpus.documents import Document
from fathom.corpus.kept import KeptPart, kept_documents, kept_parts, part_task, parts_of
from fathom.corpus.stage import Input, Stage, Task, Workspace, grouped
from fathom.corpus.templates import CHATS, TEMPLATES, tokens_of
from fathom.corpus.words import pieces
from fathom.data.shards import Shard, ShardWriter, choose_split, first_line, token_dtype
from fathom.data.tokenizer import (
    PIECE,
    WORDS_AT_MOST,
    AnyTokenizer,
    load_tokenizer,
    plain_encoder,
    save_tokenizer,
    train_bpe,
    vocabulary_size,
)
from fathom.errors import DataError
from fathom.report.files import digest, read_json, write_json

FACTS, SHARDS = "facts.json", "shards.json"
BATCH_CHARACTERS = 1 << 18
PIECE_CHARACTERS = 1 << 20
"""Longer texts are tokenised in pieces, since tokenising takes up to 300 bytes of memory for each byte of text."""
ENDLESS = 1 << 62
MOST_COLLECTIONS = 1000


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
        """The built-in chat template to store in the tokenizer; None if there are no conversations, or if the
        tokenizer's own template is used."""
        talks = any(one.kind != "documents" for one in self.recipe.collections.values())
        name = self.recipe.converse.template
        return name if talks and name in TEMPLATES else None

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        name = self.recipe.tokenize.tokenizer
        if name is None:
            return [part_task(kept_parts(self.workspace))]
        place = Path(name).expanduser()
        files = sorted(path for path in place.iterdir() if path.is_file()) if place.is_dir() else [place]
        if not place.exists():  # a name on the Hub, whose current contents are unknown
            return [Task((), {"name": name})]
        inputs = tuple(Input.of(str(path.absolute()), digest(path)) for path in files)
        return [Task(inputs, {"folder": place.is_dir()})]

    def check(self) -> None:
        """Refuse, before any work, a named tokenizer that cannot be loaded, unless an earlier run has already loaded
        it."""
        name = self.recipe.tokenize.tokenizer
        if name is not None and not all(self.done(task) for task in self.tasks()):
            place = Path(name).expanduser()
            load_tokenizer(str(place) if place.exists() else name, self.recipe.tokenize.eos_token)

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
        return store_tokenizer(tokenizer, folder)

    def _texts(self, task: Task) -> Iterator[str]:
        texts = [(part.collection, partial(kept_documents, self.workspace, part)) for part in parts_of(task)]
        return training_texts(texts, self.recipe.tokenize.train_bytes, self.recipe.tokenize.held_out)


def store_tokenizer(tokenizer: AnyTokenizer, folder: Path) -> dict[str, int]:
    """Save a tokenizer with its vocabulary size and EOS id, which the shards need."""
    save_tokenizer(tokenizer, folder)
    facts = {"vocab_size": vocabulary_size(tokenizer), "eos_token_id": int(cast("int", tokenizer.eos_token_id))}
    write_json(folder / FACTS, facts)
    return facts


def training_texts(
    parts: Sequence[tuple[object, Callable[[], Iterator[Document]]]], limit: int, held_out: float
) -> Iterator[str]:
    """Yields documents from the start of every source, without held-out ones, as training text for a tokenizer.

    Each source has an equal share of the text and of the distinct words, which training keeps in memory. Later sources
    get the share of words that one source leaves unused.

    Args:
        parts: For every file of documents: the source that it belongs to, and a function that opens it.
        limit: Bytes of all texts.
        held_out: The share of documents that are held out.
    """
    words: set[str] = set()
    held = cut = taken = 0
    sources: dict[object, list[Callable[[], Iterator[Document]]]] = {}
    for source, read in parts:
        sources.setdefault(source, []).append(read)
    for place, files in enumerate(sources.values(), 1):
        room, most = limit // len(sources), WORDS_AT_MOST * place // len(sources)
        for document in chain.from_iterable(read() for read in files):
            if choose_split(document.text, held_out) == "train":
                yield document.text
                size = len(document.text.encode("utf-8"))
                room, taken = room - size, taken + size
                new = set(PIECE.findall(document.text)) - words
                words |= new
                held += sum(len(word.encode("utf-8", "replace")) for word in new)
            if room <= 0:
                break
            if held >= most:
                cut += 1
                break
    if cut:
        warnings.warn(
            f"the tokenizer was trained on {taken / 1e6:,.1f} MB of text: the different words in it fill "
            f"the {WORDS_AT_MOST / 1e6:,.1f} MB that training takes in; {cut} of {len(sources)} inputs were truncated",
            stacklevel=2,
        )


class Tokenize(Stage):
    """One task for the files of a collection that form one shard."""

    name = "tokenize"
    uses = ("tokenize.held_out",)

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        parts = [part for part in kept_parts(self.workspace) if part.kind == "documents"]
        return groups_of(self.workspace, parts, self.recipe.tokenize.shard_bytes)

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        facts = read_json(self.workspace.path(task.inputs[1]))
        encoder = TextEncoder(self.workspace.path(task.inputs[0]), facts["vocab_size"], facts["eos_token_id"])
        collection = task.arguments["collection"]
        licenses: dict[str, int] = {}
        documents = self._documents(task, licenses)
        keys = ("documents", "tokens", "bytes")
        counts = dict.fromkeys(keys, 0)
        shards = {}
        for (split, _), entry in write_shards(folder, documents, encoder, self.recipe.tokenize.held_out).items():
            shards[split] = entry
            for key in keys:
                counts[key] += getattr(entry, key)
                counts[f"{collection} {split} {key}"] = getattr(entry, key)
        write_json(folder / SHARDS, {"collection": collection, "shards": shards, "licenses": licenses})
        return counts

    def _documents(self, task: Task, licenses: dict[str, int]) -> Iterator[Document]:
        for part in parts_of(task):
            for document in kept_documents(self.workspace, part):
                licenses[document.license] = licenses.get(document.license, 0) + 1
                yield document


def groups_of(workspace: Workspace, parts: list[KeptPart], shard_bytes: int) -> list[Task]:
    """Tasks of consecutive files of one collection, about `shard_bytes` each, with the tokenizer as an input."""
    tokenizer = tuple(one for name in (TOKENIZER_JSON, FACTS) for one in workspace.outputs("tokenizer", name))
    groups = grouped(parts, lambda part: part.documents.bytes, shard_bytes, key=lambda part: part.collection)
    return [part_task(group, tokenizer, collection=group[0].collection) for group in groups]


def write_shards(
    folder: Path, documents: Iterator[Document], encoder: TextEncoder, held_out: float
) -> dict[tuple[str, str], Shard]:
    """Write documents as one shard for each split and collection."""
    writers: dict[tuple[str, str], ShardWriter] = {}
    for batch in grouped(documents, lambda document: len(document.text), BATCH_CHARACTERS):
        apart: dict[tuple[str, str], list[Document]] = {}
        for document in batch:
            apart.setdefault((choose_split(document.text, held_out), document.collection), []).append(document)
        for key, mine in apart.items():
            if key not in writers:
                writers[key] = ShardWriter(folder, *key, encoder.dtype, ENDLESS)
            writers[key].append(*encoder(mine))
        require_few_domains({domain for _, domain in writers})
    return {key: writer.shards[0] for key, writer in sorted(writers.items())}


def require_few_domains(domains: Collection[str]) -> None:
    """Refuse more domains than a corpus may have, each of which is a folder."""
    if len(domains) > MOST_COLLECTIONS:
        raise DataError(f"more than {MOST_COLLECTIONS} domains: the field that names them has too many values")


class TextEncoder:
    """Encodes documents as the token ids and lengths that a shard writer takes."""

    def __init__(self, file: Path, vocab_size: int, eos_token_id: int) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizer, self._eos = plain_encoder(file), eos_token_id
        self.dtype = token_dtype(vocab_size)

    def __call__(self, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens with EOS after each document, and document lengths in tokens and in bytes."""
        ids = [self._encode(document) for document in documents]
        tokens = np.fromiter((token for one in ids for token in one), self.dtype, sum(map(len, ids)))
        lengths = np.array([len(one) for one in ids], np.int64)
        return tokens, lengths, np.array([len(one.text.encode("utf-8")) for one in documents], np.int64)

    def _encode(self, document: Document) -> list[int]:
        ids: list[int] = []
        try:
            texts = list(pieces(document.text, PIECE_CHARACTERS))
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                ids += encoding.ids
        except Exception as error:
            said = f"cannot encode a document ({first_line(error)}): it needs a token for unknown text"
            raise DataError(f"{document.path}: the tokenizer {said}") from None
        ids.append(self._eos)
        return ids

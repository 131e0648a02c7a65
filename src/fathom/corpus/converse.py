"""Kept conversations as token shards with a loss mask of one bit per token.

`rejected.jsonl` lists conversations whose last exchange alone is too long (`too_long`), in which nothing is trained on
(`no_target`), or which the template refuses or rewrites (`no_template`). `templates.py` drops the oldest exchanges of a
long conversation and encodes the rest. It decides the loss mask, with `chat_template.py` for a tokenizer's own
template, and `data/targets.py` writes it. `tokens.py` stores a chat template in a tokenizer that has none.
`conversations.py` (`pair_of`) makes a conversation of a preference pair's chosen answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from fathom.checkpoints.file_names import TOKENIZER_CONFIG
from fathom.corpus.chat_template import TokenizerTemplate
from fathom.corpus.conversations import contents
from fathom.corpus.counts import REASONS
from fathom.corpus.documents import Document, write_lines
from fathom.corpus.extraction import PAIR
from fathom.corpus.kept import kept_documents, kept_parts, parts_of
from fathom.corpus.recipe import CorpusRecipe
from fathom.corpus.stage import Stage, Task
from fathom.corpus.templates import ConversationEncoder, EncodedConversation
from fathom.corpus.tokens import ENDLESS, SHARDS, groups_of
from fathom.data.shards import ShardWriter, choose_split, shard_files, token_dtype
from fathom.data.targets import write_targets
from fathom.data.tokenizer import load_tokenizer, plain_encoder
from fathom.errors import DataError
from fathom.report.files import read_json, write_json

OWN = "tokenizer"
"""The value of `converse.template` that means the tokenizer's own."""


def check_template(recipe: CorpusRecipe) -> None:
    """Refuse `template: tokenizer`, before any work, if the tokenizer has no chat template."""
    talks = any(one.kind != "documents" for one in recipe.collections.values())
    if not talks or recipe.converse.template != OWN:
        return
    tokens = recipe.tokenize
    own = None if tokens.tokenizer is None else load_tokenizer(tokens.tokenizer, tokens.eos_token).chat_template
    if not own:
        raise DataError(f"converse.template={OWN}: the tokenizer has no chat template: choose chatml, alpaca or react")


class Converse(Stage):
    """Makes one task for the conversation files of each shard, and lists the conversations that the template
    rejects."""

    name = "converse"
    version = 2
    uses = ("tokenize.held_out", "converse")

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        parts = [part for part in kept_parts(self.workspace) if part.kind == "conversations"]
        own = self._own_template() if parts and self.recipe.converse.template == OWN else {}
        return [
            replace(task, arguments={**task.arguments, **own})
            for task in groups_of(self.workspace, parts, self.recipe.tokenize.shard_bytes)
        ]

    def _own_template(self) -> dict[str, str]:
        """Hashes of the tokenizer's own chat template, as task arguments, so that a changed template invalidates the
        tasks."""
        names = ("chat_template.jinja", TOKENIZER_CONFIG)
        return {name: one.sha256 for name in names for one in self.workspace.outputs("tokenizer", name)}

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        facts = read_json(self.workspace.path(task.inputs[1]))
        collection, dtype = task.arguments["collection"], token_dtype(facts["vocab_size"])
        encoder = self._encoder(self.workspace.path(task.inputs[0]), facts["eos_token_id"])
        writers = {split: ShardWriter(folder, split, collection, dtype, ENDLESS) for split in ("train", "val")}
        bits: dict[str, list[np.ndarray]] = {split: [] for split in writers}
        counts = dict.fromkeys(("conversations", "tokens", "targets", "shortened", *REASONS), 0)
        rejected: list[dict[str, str]] = []
        licenses: dict[str, int] = {}
        for document in self._documents(task):
            counts["conversations"] += 1
            found = self._encoded(encoder, document)
            if isinstance(found, str):
                counts[found] += 1
                rejected.append({"id": document.id, "path": document.path, "reason": found})
                continue
            ids, trained, dropped, kept = found
            split = choose_split(document.text, self.recipe.tokenize.held_out)
            sizes = np.array([len(ids)], np.int64), np.array([len(contents(kept).encode("utf-8"))], np.int64)
            writers[split].append(np.array(ids, dtype), *sizes)
            bits[split].append(np.array(trained, np.bool_))
            licenses[document.license] = licenses.get(document.license, 0) + 1
            counts["tokens"] += len(ids)
            counts["targets"] += sum(trained)
            counts["shortened"] += dropped > 0
            if PAIR in document.meta:
                counts[f"{PAIR} {document.meta[PAIR]}"] = counts.get(f"{PAIR} {document.meta[PAIR]}", 0) + 1
            counts[f"{collection} {split} conversations"] = counts.get(f"{collection} {split} conversations", 0) + 1
        shards = {}
        for split, writer in writers.items():
            if writer.shards:
                (shards[split],) = writer.shards
                write_targets(shard_files(folder, split, collection, 0)[0], np.concatenate(bits[split]))
        write_lines(folder / "rejected.jsonl", rejected)
        write_json(folder / SHARDS, {"collection": collection, "shards": shards, "licenses": licenses})
        return counts

    def _encoder(self, file: Path, eos_token_id: int) -> ConversationEncoder:
        wanted = self.recipe.converse
        try:
            template = TokenizerTemplate(file.parent) if wanted.template == OWN else wanted.template
            encoder = ConversationEncoder(plain_encoder(file), eos_token_id, template, wanted.max_tokens)
            missing = encoder.missing_tokens()
        except DataError as error:
            raise DataError(f"converse.template={OWN}: {error}: choose chatml, alpaca or react") from None
        if missing:
            raise DataError(
                f"converse.template={wanted.template}: the tokenizer has no token {', '.join(missing)}: choose another "
                "template or another tokenizer"
            )
        return encoder

    @staticmethod
    def _encoded(encoder: ConversationEncoder, document: Document) -> EncodedConversation | str:
        """A conversation as tokens, or the reason why it cannot be encoded."""
        try:
            found = encoder.encode(document.messages or [])
        except DataError:
            return "no_template"
        if found is None:
            return "too_long"
        return found if any(found.trained) else "no_target"

    def _documents(self, task: Task) -> Iterator[Document]:
        for part in parts_of(task):
            yield from kept_documents(self.workspace, part)

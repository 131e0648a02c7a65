"""The recipe of `fathom corpus`: collections of documents and how they are processed.

The section `ingest` is read by `ingest.py` and `sandbox.py`, `normalize` and `filter` by `clean.py` and `quality.py`,
`deduplicate` by `duplicates.py`, `decontaminate` by `contamination.py` and `leak_rules.py`, `tokenize` by `tokens.py`,
`converse` by `converse.py` and `templates.py`, `mix` by `budget.py` and `publish.py`, `exports` by `exports.py`, and
`executor` by `executor.py` and `remote.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fathom.corpus.papers import PAIRS, Pair
from fathom.errors import SettingsError
from fathom.settings import Rule, Section, fill, overridden, read_values, require_kind

MOST_TOKENS = 1 << 22
"""Of a tokenizer that is trained: room for all of them is taken at once."""

MOST_HASHES = 4096
"""Hashes of a document's signature; 14 bands of 8 rows are 112."""


@dataclass(frozen=True)
class Collection(Section):
    """A named body of documents with one licence and one mixing weight."""

    inputs: tuple[str, ...] = ()
    """files, directories and globs; a directory is searched to any depth for known extensions"""
    kind: Literal["documents", "conversations", "preferences", "table", "papers"] = "documents"
    """what the inputs are: documents; conversations; preferences (a chosen and a rejected answer); table (JSON rows) or
    papers (TEI, or rows with a title and an abstract), both of which are turned into conversations"""
    pairs: tuple[Pair, ...] = PAIRS
    """for kind papers: the types of question that are made from each paper"""
    entity_field: str = "name"
    """for kind table: the column that names what a row is about"""
    templates: tuple[str, ...] = ()
    """for kind table: question and answer templates by turns, with {entity}, {key} and {value}; empty takes five
    built-in pairs"""
    tools: tuple[str, ...] = ()
    """for ReAct traces: the allowed tools; traces that use other tools are dropped; empty allows all tools"""
    license: str = "unknown"
    """licence of those documents that do not name their own licence"""
    priority: int = 0
    """priority of the collection: of duplicates, exact or near, the one whose collection has the highest priority is
    kept"""
    text_field: str = "text"
    """the JSON field or Parquet column that holds the text; * takes all values of a record, each on a line"""
    separator: str | None = None
    """a line that separates the documents of a text file; null makes each text file one document"""
    encoding: str = "utf-8"
    """encoding of text files; utf-8 also reads UTF-16 and UTF-32 with a byte-order mark"""
    filter: dict[str, object] = field(default_factory=dict)
    """keys of the filter section whose values are different for this collection"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        yield bool(self.inputs), "inputs", "name at least one file, directory or glob"
        paired = len(self.templates) % 2 == 0 and all("{entity}" in one for one in self.templates[::2])
        yield paired, "templates", "write a question with {entity} in it, then its answer, and so on"
        yield _is_encoding(self.encoding), "encoding", "no such encoding"


@dataclass(frozen=True)
class IngestOptions(Section, section="ingest"):
    """How files become text."""

    html: Literal["trafilatura", "plain"] = "trafilatura"
    """how the text of a web page is found: trafilatura (its main text), or plain (all visible text)"""
    identify: Literal["content", "stamp"] = "content"
    """how an unchanged input is recognised: content, by its bytes; stamp, which is faster, by name, size and time"""
    max_file_bytes: int = 1 << 28
    """maximum bytes of a PDF, HTML, TEI, EPUB or JATS file; larger files are skipped as too_large"""
    max_document_bytes: int = 1 << 24
    """maximum bytes of text of a document; larger documents are skipped as too_large"""
    max_seconds: float = 60.0
    """time limit for reading a PDF or a web page; one that takes longer is skipped as too_slow"""
    max_memory: int = 1 << 30
    """memory limit in bytes for reading a PDF or a web page; one that needs more is skipped as parse_error"""
    check: int = 32
    """number of web pages, books and papers in every 512 input files that are read a second time, to count numbers that
    the extraction altered or lost"""
    sentinels: bool = False
    """mark figures, tables, formulas and citations of TEI files, such as [START_FIGURE]...[END_FIGURE]"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        for key in ("max_file_bytes", "max_document_bytes", "max_seconds", "max_memory"):
            yield getattr(self, key) > 0, key, "allowed: a positive number"
        yield self.check >= 0, "check", "allowed: 0 or more"


@dataclass(frozen=True)
class Normalize(Section, section="normalize"):
    """How documents are normalised; conversations stay unchanged, except for what `mask` replaces."""

    form: Literal["nfc", "nfkc"] = "nfc"
    """Unicode normal form; nfkc also replaces ligatures and fullwidth letters, but keeps powers and fractions"""
    strip: tuple[str, ...] = ()
    """regular expressions whose matches are removed, such as a library's header; ^ and $ match at
    the beginning and end of a line"""
    blank_lines: int = 2
    """maximum consecutive blank lines; longer runs are cut to this many"""
    mask: tuple[Literal["email", "ip", "phone", "key"], ...] = ()
    """kinds of private data to replace by a placeholder such as <EMAIL>, also in conversations: e-mail addresses,
    public IP addresses, telephone numbers, secret keys"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        yield all(map(_compiles, self.strip)), "strip", "allowed: regular expressions"
        yield self.blank_lines >= 0, "blank_lines", "allowed: 0 or more"


@dataclass(frozen=True)
class Filter(Section):
    """Which documents are kept; null turns a rule off. Values as in Gopher's rules."""

    min_words: int | None = 50
    """minimum number of words; in languages without spaces, such as Chinese, Japanese and Thai, a character is a
    word"""
    max_words: int | None = 100_000
    """maximum words"""
    min_word_length: float | None = 3.0
    """minimum mean characters per word"""
    max_word_length: float | None = 10.0
    """maximum mean characters per word"""
    max_symbol_ratio: float | None = 0.1
    """maximum number of # signs per word, and of ellipses per word"""
    max_bullet_lines: float | None = 0.9
    """maximum share of lines that begin with a bullet"""
    max_ellipsis_lines: float | None = 0.3
    """maximum share of lines that end in an ellipsis"""
    min_alphabetic_words: float | None = 0.8
    """minimum share of words that contain a letter"""
    min_stop_words: int | None = 2
    """minimum number of the English words the, be, to, of, and, that, have, with that a document must contain; null for
    other languages. With `languages` each document is judged by the 50 most frequent words of its own language
    (jusText's lists)"""
    max_duplicate_lines: float | None = 0.3
    """maximum share of lines that repeat an earlier line of the document"""
    max_duplicate_line_characters: float | None = 0.2
    """maximum share of characters in lines that repeat an earlier line of the document"""
    max_duplicate_paragraphs: float | None = 0.3
    """maximum share of paragraphs that repeat an earlier paragraph of the document"""
    max_duplicate_paragraph_characters: float | None = 0.2
    """maximum share of characters in paragraphs that repeat an earlier paragraph of the document"""
    max_top_2gram: float | None = 0.20
    """maximum share of characters in the most frequent pair of words"""
    max_top_3gram: float | None = 0.18
    """maximum share of characters in the most frequent run of three words"""
    max_top_4gram: float | None = 0.16
    """maximum share of characters in the most frequent run of four words"""
    max_duplicate_5grams: float | None = 0.15
    """maximum share of characters in runs of five words that occur earlier in the document"""
    max_duplicate_6grams: float | None = 0.14
    """maximum share of characters in runs of six words that occur earlier in the document"""
    max_duplicate_7grams: float | None = 0.13
    """maximum share of characters in runs of seven words that occur earlier in the document"""
    max_duplicate_8grams: float | None = 0.12
    """maximum share of characters in runs of eight words that occur earlier in the document"""
    max_duplicate_9grams: float | None = 0.11
    """maximum share of characters in runs of nine words that occur earlier in the document"""
    max_duplicate_10grams: float | None = 0.10
    """maximum share of characters in runs of ten words that occur earlier in the document"""
    languages: tuple[str, ...] = ()
    """allowed languages, as ISO 639-1 codes of py3langid; empty disables the check"""


@dataclass(frozen=True)
class Deduplicate(Section, section="deduplicate"):
    """Which documents count as duplicates of each other."""

    exact: bool = True
    """keep only one of several documents with the same text, or of several conversations with the same messages"""
    near: bool = True
    """keep only one of several documents that share most runs of words; conversations are near-duplicates if both their
    trained messages and their other messages are"""
    jaccard: float = 0.8
    """two documents are near-duplicates if the Jaccard similarity of their shingles is at least this"""
    shingle: int = 5
    """number of consecutive words in a shingle"""
    bands: int = 14
    """number of MinHash bands (groups of hashes); two documents are compared if all hashes of one band agree"""
    rows: int = 8
    """number of hashes in each MinHash band"""
    seed: int = 0
    """seed of the MinHash functions"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        yield 0 < self.jaccard <= 1, "jaccard", "allowed: a share above 0, 1 at most"
        for key in ("shingle", "bands", "rows"):
            yield getattr(self, key) >= 1, key, "allowed: 1 or more"
        most = max(1, MOST_HASHES // self.rows)
        yield self.bands <= most, "bands", f"allowed: {most:,} at most with deduplicate.rows={self.rows}"
        yield 0 <= self.seed < 1 << 64, "seed", "allowed: 0 to 2^64 - 1"


@dataclass(frozen=True)
class BenchmarkFile(Section, short="path"):
    """Where a benchmark's items are, and what is done with documents that contain one of these items."""

    path: str = ""
    """file of JSON lines, or a JSON list, with the fields question, choices and answer; the key `question` may name
    another field for the question"""
    question: str | None = None
    """the field that holds the question or text; null tries the fields question, stem, query, sentence, text"""
    action: Literal["drop", "cut", "report"] | None = None
    """what to do with leaks of this benchmark; null takes decontaminate.action"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        yield bool(self.path), "path", "name a file"


@dataclass(frozen=True)
class Decontaminate(Section, section="decontaminate"):
    """Benchmarks whose items must not occur in the training text."""

    benchmarks: dict[str, BenchmarkFile] = field(default_factory=dict)
    """their files, by name"""
    action: Literal["drop", "cut", "report"] = "drop"
    """what to do with a leak: drop the document, cut out the passage, or only report the leak"""
    words: int = 13
    """a document leaks a question if it contains this many consecutive words of the question that no other question
    has"""
    whole: int = 8
    """a question of at least this many words and fewer than decontaminate.words is leaked if it occurs in full; a
    shorter question only if it occurs with its answer"""
    shortest: int = 4
    """minimum words of a question together with its answer; shorter questions are not searched for"""
    margin: int = 200
    """for action cut: number of characters to cut on either side of a leaked passage"""
    strict: bool = False
    """end with exit code 1 if a benchmark has the same question with two different answers"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        ordered = 1 <= self.shortest <= self.whole <= self.words
        yield ordered, "whole", "allowed: 1 <= shortest <= whole <= words"
        yield self.margin >= 0, "margin", "allowed: 0 or more"
        named = all(map(_is_name, self.benchmarks))
        yield named, "benchmarks", "allowed: names of letters, digits, - and _"


@dataclass(frozen=True)
class TokenizeOptions(Section, section="tokenize"):
    """How text becomes tokens."""

    tokenizer: str | None = None
    """a tokenizer's directory or file, or a name on the Hub"""
    train: int | None = None
    """instead of tokenize.tokenizer: train a byte-level BPE of this many tokens on the kept documents"""
    train_bytes: int = 1 << 28
    """maximum bytes of text to train the tokenizer on, taken in equal shares from the collections"""
    eos_token: str | None = None
    """the token that ends a document; null means the tokenizer's EOS"""
    held_out: float = 0.01
    """share of documents that go to the validation split, chosen by a hash of their text"""
    shard_bytes: int = 1 << 28
    """approximate bytes of text in one shard"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        one = (self.tokenizer is None) != (self.train is None)
        yield one, "tokenizer", "set either tokenize.tokenizer or tokenize.train"
        small = self.train is None or self.train <= MOST_TOKENS
        yield small, "train", f"allowed: {MOST_TOKENS:,} at most"
        yield 0 <= self.held_out < 1, "held_out", "allowed: a share from 0 to less than 1"
        for key in ("train_bytes", "shard_bytes"):
            yield getattr(self, key) >= 1, key, "allowed: 1 or more"


@dataclass(frozen=True)
class ConverseOptions(Section, section="converse"):
    """How conversations become tokens, with a loss mask."""

    template: Literal["chatml", "alpaca", "react", "tokenizer"] = "chatml"
    """format of conversations: chatml is Qwen's; alpaca has headings; react has thoughts, actions and observations;
    tokenizer is the tokenizer's own chat template"""
    max_tokens: int = 2048
    """maximum tokens of a conversation: a longer one loses its oldest exchanges, and is rejected if its last exchange
    alone is longer"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        yield self.max_tokens >= 2, "max_tokens", "allowed: 2 or more"


@dataclass(frozen=True)
class Mix(Section, section="mix"):
    """The mixture that a training run reads."""

    shares: dict[str, float] = field(default_factory=dict)
    """share of the tokens that comes from each collection; empty takes collections in proportion to their sizes"""
    tokens: int | None = None
    """number of tokens of the mixture; null: as many as one epoch of the collection that runs out first
    allows"""
    epochs: float = 4.0
    """maximum number of times that any collection is read"""
    block: int = 2048
    """tokens per training sequence"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        for name, share in self.shares.items():
            yield share > 0, f"shares.{name}", "allowed: a positive number"
        total = sum(self.shares.values())
        yield not self.shares or abs(total - 1) < 1e-9, "shares", f"they add up to {total:g}, not to 1"
        yield self.tokens is None or self.tokens >= 1, "tokens", "allowed: 1 or more, or null"
        yield self.epochs > 0, "epochs", "allowed: a positive number"
        yield self.block >= 2, "block", "allowed: 2 or more"


@dataclass(frozen=True)
class Executor(Section, section="executor", short="name"):
    """How the tasks of a stage are run; the results do not depend on it."""

    name: Literal["local", "datatrove", "slurm", "ray"] = "local"
    """local: processes of this machine; datatrove: datatrove's processes of this machine; slurm and ray: Slurm's job
    arrays and Ray, through datatrove"""
    workers: int | None = None
    """number of processes at a time; null: one for each core of this machine, or 100 under Slurm and Ray"""
    partition: str = "cpu"
    """for slurm: the partition in which jobs run"""
    time: str = "24:00:00"
    """for slurm: time limit of a job"""
    memory_gb: int = 2
    """for slurm and ray: memory of each worker, in GB"""
    gpus: int = 0
    """for slurm and ray: number of GPUs of each worker, in fathom compare and fathom ladder"""
    environment: str = ""
    """for slurm: a shell command that sets up a job, such as the activation of a Python environment"""

    def rules(self) -> Iterator[Rule]:
        """Checks on the values of the fields, beyond their types."""
        yield self.workers is None or self.workers >= 1, "workers", "allowed: 1 or more"
        yield self.gpus >= 0, "gpus", "allowed: 0 or more"


@dataclass(frozen=True)
class CorpusRecipe(Section):
    """A corpus: collections, and what is done to them."""

    collections: dict[str, Collection] = field(default_factory=dict)
    """collections, by name"""
    ingest: IngestOptions = field(default_factory=IngestOptions)
    """text extraction"""
    normalize: Normalize = field(default_factory=Normalize)
    """text normalisation"""
    filter: Filter = field(default_factory=Filter)
    """quality filter"""
    deduplicate: Deduplicate = field(default_factory=Deduplicate)
    """deduplication"""
    decontaminate: Decontaminate = field(default_factory=Decontaminate)
    """decontamination"""
    tokenize: TokenizeOptions = field(default_factory=TokenizeOptions)
    """tokenizer and shards"""
    converse: ConverseOptions = field(default_factory=ConverseOptions)
    """conversation templates"""
    mix: Mix = field(default_factory=Mix)
    """mixture of the training run"""
    exports: tuple[Literal["llamafactory", "axolotl", "trl", "lm_eval"], ...] = ()
    """formats for other programs, written in addition to the shards"""
    executor: Executor = field(default_factory=Executor)
    """scheduler; the name alone is enough"""

    def rules(self) -> Iterator[Rule]:
        """Checks between sections."""
        yield bool(self.collections), "collections", "name at least one"
        for name in self.collections:
            yield _is_name(name), f"collections.{name}", "a name is made of letters, digits, - and _"
        names = [name for name, one in self.collections.items() if one.kind == "documents"]
        for name in self.mix.shares:
            there = f"no such collection of documents; there are {', '.join(names)}"
            yield name in names, f"mix.shares.{name}", there
        for name in self.collections:
            self.filter_of(name)

    def filter_of(self, collection: str) -> Filter:
        """The filter of a collection: the recipe's `filter` section, overridden by the collection's own keys."""
        own = dataclasses.asdict(self.filter) | self.collections[collection].filter
        return fill(Filter, own, f"collections.{collection}.filter")

    def digest(self) -> str:
        """A digest of every value."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def load_corpus_recipe(path: Path, overrides: Sequence[str] = ()) -> CorpusRecipe:
    """Read a recipe, apply overrides, check everything that can be checked without looking at a document."""
    if not path.is_file():
        raise SettingsError(f"{path}: no such file")
    values = read_values(path)
    require_kind(values, str(path), "corpus")
    return parse_corpus_recipe(overridden(values, overrides))


def parse_corpus_recipe(values: dict[str, object]) -> CorpusRecipe:
    """Make a recipe from nested values, and check it."""
    return fill(CorpusRecipe, values)


def _is_name(name: str) -> bool:
    return bool(re.fullmatch(r"[\w-]+", name))


def _is_encoding(name: str) -> bool:
    try:
        "".encode(name)
    except (LookupError, ValueError):  # there is none, or one that encodes nothing
        return False
    return True


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True

"""Where documents come from: text, JSONL, Parquet and Hub datasets, read as streams of raw records.

Reading is split in two. `Source.records` only finds where records begin; `Source.documents` checks each and makes it a
document.

`find_sources` tells paths, URLs and `hf:` apart, `find_files` files, folders and globs, and `_kind` formats; `cloud.py`
lists the files of a URL. `opened` decompresses, `_oversize` refuses long records unless they are skipped, and
`Source._parsed` refuses, repairs or skips text that is not UTF-8. `corpus/prepare.py` sets the default of
`max_record_bytes` for `fathom prepare`. `read_domains` in `evaluation/perplexity.py` sorts the inputs of `--perplexity`
by domain.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import importlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TextIO, TypeAlias, cast
from urllib.parse import parse_qsl

from fathom.data.cloud import RemoteFile, find_remote, is_url
from fathom.data.shards import FORMAT, INDEX, first_line
from fathom.data.tables import table_rows
from fathom.errors import DataError, to_install

if TYPE_CHECKING:
    from pyarrow.parquet import RowGroupMetaData

FileFormat = Literal["auto", "text", "jsonl", "csv", "tsv", "parquet"]
"""The format: by its extension, as text, or by a name in `READERS`."""
Undecodable = Literal["error", "replace", "skip"]
Oversize = Literal["error", "skip"]
Kind = Literal["files", "text", "lines", "rows", "hub"]
"""Records are paths of files, texts between separators, lines of JSON, rows of fields, or rows of the Hub."""

DEFAULT_DOMAIN = "default"
CLUSTER = "cluster"
"""The field by which texts, or items of a task, say that they belong together."""
PARAGRAPHS, LINES = "", "\n"
"""Separators: a blank line, and none, since every line is a document."""
HUB = "hf:"
ALL_FIELDS = "*"
"""The name of a text field that stands for all fields of a record."""
COMPRESSIONS = {".gz": "gzip", ".xz": "lzma", ".bz2": "bz2", ".zst": "zstandard"}
PACKED = {
    "gzip": (rb"\x1f\x8b", ".gz"),
    "xz": (rb"\xfd7zXZ\x00", ".xz"),
    "bzip2": (rb"BZh[1-9]1AY&SY", ".bz2"),
    "zstd": (rb"\x28\xb5\x2f\xfd", ".zst"),
    "zip": (rb"PK\x03\x04", ""),
}
"""How packed files begin, and the extension with which they are read."""
JSON = ".json"  # JSON lines, as C4 names them
TEXT = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".css", ".go"),
    *(".html", ".java", ".jl", ".js", ".kt", ".lua", ".php", ".pl", ".r", ".rb", ".rs", ".scala", ".sh", ".sql"),
    *(".swift", ".ts", ".xml", ".yaml", ".yml", ".toml"),
)
MAX_TEXT_BYTES = 1 << 28
# One compressed piece of this size decompresses to at most 128 MB.
COMPRESSED_BYTES = 1 << 12
XZ_MEMORY = 1 << 28
PARQUET_BYTES = 1 << 23
LIST_CHARACTERS = 1 << 20
LONGEST_TOKEN = 16
"""More than the characters of any token of JSON that is no string or number, such as -Infinity or an escape."""
BETWEEN = re.compile(r"[\s,]*")
"""What stands between two items of a JSON list."""


@dataclass(frozen=True)
class Reading:
    """How records become documents."""

    advises: ClassVar[bool] = False
    """Whether errors name the options of `fathom prepare` that let reading continue."""
    also: ClassVar[tuple[str, ...]] = ()
    """Further columns of a Parquet file to read, where it has them."""
    text_field: str = "text"
    """The JSON field or Parquet column that holds the text; `*` takes all values of a record, each on a line."""
    domain_field: str | None = None
    """The JSON field or Parquet column that names the domain of each document."""
    separator: str | None = None
    """A line that separates the documents of a text file; an empty one stands for a blank line, and a line break makes
    every line a document. By default a text file is one document."""
    undecodable: Undecodable = "error"
    """What to do with text that is not UTF-8: error (stop), replace (the invalid bytes) or skip (the document)."""
    oversize: Oversize = "error"
    """What to do with a record larger than `max_record_bytes`: error (stop) or skip (leave it out)."""
    max_record_bytes: int = MAX_TEXT_BYTES
    """Maximum bytes of a line, file, text between separators or Parquet value."""


class SourceText(NamedTuple):
    """Text to tokenise."""

    text: str
    domain: str
    size: int
    """Its length in UTF-8."""
    cluster: str | None = None
    """The record's `cluster`: texts of one cluster, such as pieces of a document, depend on one another."""


Row: TypeAlias = Mapping[str, object]
Payload: TypeAlias = Any
"""A record before it is decoded: a file's path, a line or text as bytes, or a row's fields; None if it is left out."""


@dataclass(frozen=True)
class Source:
    """An input whose records are read in order; error messages number them from 1."""

    kind: Kind
    name: str
    domain: str
    paths: tuple[Path, ...] = ()
    size: int = 0
    """Bytes on disk; 0 if unknown."""
    reader: str = ""
    """The key of its reader in `READERS`."""
    remote: tuple[RemoteFile, ...] = ()
    """Files that are not on this machine; `fathom prepare` and `fathom corpus` copy each while they read it."""

    def records(self, reading: Reading) -> Iterator[Payload]:
        """Read the records; None marks a record over the size limit."""
        if self.remote:
            raise DataError(
                f"{self.name}: only `fathom prepare` and `fathom corpus` read remote data; copy the data here first"
            )
        if self.kind == "files":
            return iter(self.paths)
        if self.kind == "hub":
            return _hub(self.name, reading)
        if self.kind == "text":
            return _separated(self.paths[0], reading)
        return READERS[self.reader].records(self.paths[0], reading)

    def documents(self, reading: Reading) -> Iterator[SourceText | None]:
        """Read the documents; None marks a record over the size limit."""
        for number, payload in enumerate(self.records(reading), 1):
            found = self._parsed(number, payload, reading)
            yield from [None] if found is None else found

    def _parsed(self, number: int, payload: Payload, reading: Reading) -> list[SourceText] | None:
        """A list with the document of record `number`, empty if there is none; None if the record is over the size
        limit."""
        where = f"{self.name}:{number}" if self.kind == "lines" else f"{self.name} (document {number})"
        if self.kind == "files":
            where, payload = str(payload), _read_file(payload, reading)
        if payload is None:
            return None
        try:
            text, domain, cluster = self._record(payload, reading, where)
            data, _ = text.encode("utf-8"), domain.encode("utf-8")
        except UnicodeError as error:
            if reading.undecodable == "skip":
                return []
            if reading.undecodable == "error":
                reason = error.reason if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError)) else error
                way = ": `undecodable=replace` or skip continues" if reading.advises else ""
                raise DataError(f"{where} is not UTF-8 ({reason}){way}") from None
            payload = payload.decode("utf-8", "replace").encode() if isinstance(payload, bytes) else payload
            text, domain, cluster = self._record(payload, reading, where)
            # JSON may contain a lone surrogate, which UTF-8 cannot encode.
            text, domain = (one.encode("utf-8", "replace").decode("utf-8") for one in (text, domain))
            data = text.encode("utf-8")
        if len(data) > reading.max_record_bytes:
            _oversize(where, reading)
            return None
        return [SourceText(text, domain, len(data), cluster)] if text else []

    def _record(self, payload: Payload, reading: Reading, where: str) -> tuple[str, str, str | None]:
        """A record's text (empty if it has none), its domain (the input's if the record names none) and its cluster."""
        if self.kind in ("files", "text"):
            return payload.decode("utf-8"), self.domain, None
        if self.kind == "lines" and not payload.strip():
            return "", self.domain, None
        try:
            fields = json_object(payload) if self.kind == "lines" else payload
            text = text_of(fields, reading.text_field)
            named = None if reading.domain_field is None else field_of(fields, reading.domain_field)
            cluster = fields.get(CLUSTER)
            return text, self.domain if named is None else str(named), None if cluster is None else str(cluster)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None


def find_sources(
    inputs: Iterable[str], reading: Reading, file_format: FileFormat = "auto", out: Path | None = None
) -> list[Source]:
    """Resolve `[NAME=]INPUT`s to sources in a fixed order, and refuse unreadable ones; `out` as in `find_files`."""
    sources: list[Source] = []
    seen: set[tuple[str, str]] = set()
    for text in inputs:
        given, name = split_name(text)
        domain = given or DEFAULT_DOMAIN
        if is_url(name):
            sources += _remote_sources(name, domain, reading, file_format)
            continue
        if name.startswith(HUB):
            _require("datasets", name)
            sources.append(Source("hub", name, domain))
            continue
        whole_files: list[Path] = []
        for path in find_files(name, lambda file: file_format != "auto" or _is_known(file), _known_suffixes(), out):
            if (place := (domain, os.path.realpath(path))) in seen:
                raise DataError(f"{path} is given twice: give each input once")
            seen.add(place)
            if file_format == "auto" and suffix_of(path) == JSON:
                _refuse_list(path)
            kind, reader = _kind(path, reading, file_format)
            if kind == "files":
                whole_files.append(path)
            else:
                sources.append(Source(kind, str(path), domain, (path,), path.stat().st_size, reader))
        if whole_files and sources and (sources[-1].kind, sources[-1].domain) == ("files", domain):
            # Files of a glob that the shell expanded become one source too, so that small files share chunks.
            whole_files = [*sources.pop().paths, *whole_files]
        if whole_files:
            size = sum(path.stat().st_size for path in whole_files)
            sources.append(Source("files", name, domain, tuple(whole_files), size))
    if not sources:
        raise DataError("no inputs: give at least one file, directory, glob or hf:NAME")
    if all(source.kind in ("files", "text") for source in sources):
        plain = Reading()
        for key in ("text_field", "domain_field"):
            if (given := getattr(reading, key)) != getattr(plain, key):
                raise DataError(f"{key}={given}: all inputs are text files, which have no fields")
    return sources


def _remote_sources(url: str, domain: str, reading: Reading, file_format: FileFormat) -> Iterator[Source]:
    """The sources at a URL that fsspec opens; small text files together become one source, as the text files of a
    folder do."""
    whole: list[RemoteFile] = []
    for file in find_remote(url, lambda path: file_format != "auto" or _is_known(path), _known_suffixes()):
        kind, reader = _kind(file.path, reading, file_format)
        if kind == "files":
            whole.append(file)
        else:
            yield Source(kind, file.url, domain, (), file.size, reader, (file,))
    if whole:
        yield Source("files", url, domain, (), sum(file.size for file in whole), "", tuple(whole))


def _oversize(where: str, reading: Reading) -> None:
    """Raise a `DataError` for a record over the size limit, unless such records may be skipped."""
    if reading.oversize == "error":
        ways = ": `oversize=skip` continues, `max_record_bytes` allows more (at 300 bytes of memory each)"
        raise DataError(f"{where} is over {reading.max_record_bytes:,} bytes{ways if reading.advises else ''}")


def json_object(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object; a line that is not UTF-8 raises a `UnicodeError`."""
    text = line.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"bad JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"bad JSON: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object, found {type(value).__name__}")
    return value


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """A field of a record."""
    if name not in fields:
        raise DataError(f"no field {name!r}: the record has {', '.join(fields) or 'none'}")
    return fields[name]


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """The text in a field of a record; null counts as an empty text."""
    if name == ALL_FIELDS:
        return "\n".join(values_in(fields))
    value = field_of(fields, name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"field {name!r} is {type(value).__name__}, not text")
    return value or ""


def values_in(value: object) -> Iterator[str]:
    """Every text and number in a record, in the order of its fields, also inside lists and nested objects such as
    messages and choices."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from values_in(one)
    elif value is not None and not isinstance(value, bytes):
        yield str(value)


def split_name(text: str) -> tuple[str | None, str]:
    """Split `NAME=INPUT` into name and input; a path that exists is an input without a name."""
    match = re.match(r"([\w.-]+)=(.+)", text, re.DOTALL)
    return (match[1], match[2]) if match and not Path(text).exists() else (None, text)


def find_files(name: str, is_known: Callable[[Path], bool], known_words: str, out: Path | None = None) -> list[Path]:
    """The files that a path, a directory or a glob means, in a fixed order.

    Args:
        name: The path as the user wrote it.
        is_known: Whether a file of a directory is to be read.
        known_words: The names of such files, for the error if there is none.
        out: The output directory: its files are not inputs, unless it is named itself.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _apart(_below(path, lambda names: not _hidden(names), _hidden), path, out)
        known = [file for file in files if is_known(file)]
        if not known:
            _refuse_prepared(path)
        # Next to other files a .json is usually some program's settings; alone it is data.
        if not (known := known or [file for file in files if suffix_of(file) == JSON]):
            raise DataError(f"{name}: a directory without any readable file ({known_words})")
        return known
    if glob.has_magic(name):
        if files := _apart(_matches(path), path, out):
            return files
        raise DataError(f"{name}: no file matches")
    if path.exists():
        raise DataError(f"{name}: neither a file nor a directory")
    raise DataError(f"{name}: no such file or directory")


def _refuse_prepared(folder: Path) -> None:
    """Refuse a folder that holds no text files but a corpus that the library datasets or `fathom prepare` has
    written."""
    described = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if described and any(folder.rglob("*.arrow")):
        remedy = "write each split as Parquet, `load_from_disk(DIR)[SPLIT].to_parquet(FILE)`, and give that file"
        raise DataError(f"{folder} was written by `save_to_disk` of datasets: {remedy}")
    index = folder / INDEX
    if index.is_file() and FORMAT.encode() in index.read_bytes():
        raise DataError(f"{folder} is a prepared corpus already: `fathom train RECIPE data.directory=FOLDER` reads it")


def is_list(file: Path) -> bool:
    """Whether a `.json` file begins as a JSON list does."""
    with _unpacked(file) as data:
        return data.read(COMPRESSED_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def list_items(file: Path) -> Iterator[object]:
    """The items of a file that is a JSON list, read one at a time."""
    with opened(file) as data, _text_of(data) as text:
        buffer, at, decode = text.read(LIST_CHARACTERS).lstrip().removeprefix("["), 0, json.JSONDecoder().raw_decode
        while not buffer.startswith("]", at := _item(buffer, at)):
            try:
                value, end = decode(buffer, at)
            except (ValueError, RecursionError) as error:
                value, end, problem = None, len(buffer), first_line(error)
                if not _may_be_cut(error, buffer):
                    raise DataError(f"{file}: bad JSON list: {problem}") from None
            else:
                problem = "it does not end"
                if buffer.startswith((".", "e", "E"), end):  # a number such as 1.5e+3, cut before its last digits
                    if end < len(buffer) - 2:
                        raise DataError(f"{file}: bad JSON list: Expecting ',' delimiter")
                    end = len(buffer)
            if end == len(buffer):  # an item that may go on
                if len(buffer) - at > MAX_TEXT_BYTES:
                    raise DataError(f"{file}: an item of more than {MAX_TEXT_BYTES:,} characters")
                if not (more := text.read(max(LIST_CHARACTERS, len(buffer) - at))):
                    raise DataError(f"{file}: bad JSON list: {problem}")
                buffer, at = buffer[at:] + more, 0
                continue
            yield value
            at = end
        if buffer[at + 1 :].strip() or text.read().strip():
            raise DataError(f"{file}: bad JSON list: text after its end")


def _may_be_cut(error: Exception, buffer: str) -> bool:
    """Whether a text may be JSON that continues beyond the end of the buffer, without a fault before that."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos > len(buffer) - LONGEST_TOKEN


def _item(buffer: str, at: int) -> int:
    """Where the next item of a list, or its end, begins."""
    found = BETWEEN.match(buffer, at)
    return found.end() if found else at


def _refuse_list(file: Path) -> None:
    """Refuse a `.json` file that is a single JSON list; Fathom reads one JSON object per line."""
    if is_list(file):
        remedy = f"`jq -c '.[]' {shlex.quote(str(file))} > FILE.jsonl` writes its items as lines"
        raise DataError(f"{file} is a JSON list, not a JSON object on every line: {remedy}")


def _apart(files: list[Path], named: Path, out: Path | None) -> list[Path]:
    """The files that lie outside the output directory; all files if the input is that directory or lies in it."""
    if out is None or named.resolve().is_relative_to(out.resolve()):
        return files
    inside = {folder for folder in {file.parent for file in files} if folder.resolve().is_relative_to(out.resolve())}
    return [file for file in files if file.parent not in inside]


def _is_known(file: PurePath) -> bool:
    suffix = suffix_of(file)
    return suffix in TEXT or reader_of(file) is not None or (suffix == JSON and file.suffix.lower() in COMPRESSIONS)


def _below(
    folder: Path, wanted: Callable[[Sequence[str]], bool], unread: Callable[[Sequence[str]], bool] = lambda _: False
) -> list[Path]:
    """The files below a folder whose path passes a test, sorted. A file with several paths appears once, by its own
    path if that one passes. Folders with a name in `unread` are not entered."""
    files, links = _walk(folder, unread)
    found = {file: file for file in files if wanted(file.relative_to(folder).parts)}
    for link, own in links:
        for file in files:
            if file not in found and file.is_relative_to(own):
                linked = link / file.relative_to(own)
                if wanted(linked.relative_to(folder).parts):
                    found[file] = linked
    return sorted(found.values())


def _walk(folder: Path, unread: Callable[[Sequence[str]], bool]) -> tuple[list[Path], list[tuple[Path, Path]]]:
    """All files below a folder, each by one path (its own rather than one through a link), and the other paths to
    folders that links lead to again."""
    found: list[Path] = []
    again: list[tuple[Path, Path]] = []
    seen: dict[tuple[int, int], Path] = {}
    linked = [folder]
    while linked:
        here, linked = sorted(linked), []
        for start in here:
            for root, folders, names in os.walk(start, onerror=partial(_refuse, folder)):
                status = os.stat(root)
                known = seen.setdefault((status.st_dev, status.st_ino), Path(root))
                if known != Path(root):
                    again.append((Path(root), known))
                    folders.clear()
                    continue
                folders[:] = [name for name in folders if not unread([name])]
                linked += [Path(root, name) for name in folders if Path(root, name).is_symlink()]
                found += [Path(root, name) for name in names if Path(root, name).is_file()]
    return found, again


def _refuse(folder: Path, error: OSError) -> None:
    """Raise a `DataError` for an unreadable folder, which would otherwise count as empty. Folders that are never read
    may be unreadable."""
    if not _hidden(Path(error.filename).relative_to(folder).parts):
        raise DataError(f"{error.filename}: {error.strerror}")


def _matches(pattern: Path) -> list[Path]:
    """The files that a glob matches, sorted; below `**` each file counts once, even if links lead to it."""
    parts = pattern.parts
    if "**" not in parts:
        return [path for path in map(Path, sorted(glob.glob(str(pattern)))) if path.is_file()]
    place = parts.index("**")
    starts = [Path(start) for start in glob.glob(str(Path(*parts[:place])))]
    fits = partial(_matched, patterns=parts[place:])
    asks_hidden = any(part.startswith(".") for part in parts[place:])
    unread = (lambda _: False) if asks_hidden else (lambda names: names[0].startswith("."))
    found = {file for start in starts if start.is_dir() for file in _below(start, fits, unread)}
    return sorted(found, key=str)  # like glob's own, which are text


def _matched(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether a glob matches a path, compared part by part; as in a shell, `*` and `**` do not match hidden names."""
    if not patterns or not names:
        return not patterns and not names
    first, *rest = patterns
    shown = not names[0].startswith(".") or first.startswith(".")
    if first == "**":
        here = _matched(names, rest) if rest else len(names) == 1 and shown
        return here or (shown and _matched(names[1:], patterns))
    return shown and fnmatch.fnmatch(names[0], first) and _matched(names[1:], rest)


def _hidden(names: Sequence[str]) -> bool:
    return any(name.startswith(".") or name in ("__pycache__", "lost+found") for name in names)


def suffix_of(path: PurePath) -> str:
    """The extension of a path in lower case, without extensions of compression such as `.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _known_suffixes() -> str:
    return f"known are {' '.join([*record_suffixes(), *TEXT[:6]])} ..., also with {' '.join(COMPRESSIONS)}"


def record_suffixes() -> list[str]:
    """The file extensions of the record files that `READERS` can read."""
    return [suffix for reader in READERS.values() for suffix in reader.suffixes]


def reader_of(path: PurePath) -> Reader | None:
    """The reader of a record file, by its extension; None for a text, a `.json` and an unknown extension."""
    suffix = suffix_of(path)
    return next((reader for reader in READERS.values() if suffix in reader.suffixes), None)


def lines_of(path: Path) -> Iterator[bytes | None]:
    """The records of a file as JSON lines, read by its extension; a file with an unknown extension is read as JSONL.
    None marks a lost record."""
    reader = reader_of(path) or READERS["jsonl"]
    if reader.gives != "lines":
        raise DataError(f"{path}: expected lines of JSON or of a table, not {reader.name}")
    yield from reader.records(path, Reading())


def _kind(path: PurePath, reading: Reading, file_format: FileFormat) -> tuple[Kind, str]:
    suffix, compression = suffix_of(path), path.suffix.lower()
    if compression in COMPRESSIONS:
        _require(COMPRESSIONS[compression], str(path))
    reader = reader_of(path) if file_format == "auto" else READERS.get(file_format)
    if reader is None and file_format == "auto" and suffix == JSON:
        reader = READERS["jsonl"]
    if reader is not None:
        if reader.needs:
            _require(reader.needs, str(path))
        return reader.gives, reader.name
    if file_format == "text" or suffix in TEXT:
        return ("files" if reading.separator is None else "text"), ""
    raise DataError(f"{path}: unknown extension {suffix!r}: {_known_suffixes()}; or set `file_format` to text or jsonl")


def _require(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        if module in ("datasets", "pyarrow", "pyarrow.parquet", "zstandard"):
            hint = to_install("data")
        else:
            hint = "this Python was built without it"
        raise DataError(f"{name}: reading it needs the module {module.split('.')[0]}: {hint}") from None


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file as bytes, decompressed by its extension; damage becomes a `DataError`."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    try:
        with path.open("rb") as raw:
            if compression is None:
                yield raw
            else:
                with _decompressed(raw, compression, path) as file:
                    yield file
    except (EOFError, OSError) as error:
        raise DataError(f"{path}: cannot read it: {error}") from None
    except Exception as error:
        if type(error).__name__ in ("LZMAError", "ZstdError", "error"):
            raise DataError(f"{path}: damaged {compression} data: {error}") from None
        raise


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a text file as bytes; refuse a file that is packed or compressed in a way that its extension does not
    tell."""
    with opened(path) as file:
        begins = cast("io.BufferedReader", file).peek(16)
        for name, (magic, suffix) in PACKED.items():
            if re.match(magic, begins):
                rename = suffix and path.suffix.lower() not in COMPRESSIONS
                way = f"name it {path.name}{suffix}, or unpack it" if rename else "unpack it"
                raise DataError(f"{path} contains {name} data, not text: {way}")
        yield file


def _decompressed(raw: IO[bytes], compression: str, path: Path) -> IO[bytes]:
    module = _require(compression, str(path))
    if compression == "zstandard":
        decompressor = module.ZstdDecompressor()
        return io.BufferedReader(_Frames(raw, decompressor.decompressobj), 1 << 20)
    if compression == "lzma":
        frames = _Frames(raw, lambda: module.LZMADecompressor(memlimit=XZ_MEMORY), padding=4)
        return io.BufferedReader(frames, 1 << 20)
    file: IO[bytes] = module.open(raw, "rb")
    return file


class _Frames(io.RawIOBase):
    """Read the compressed frames of a file as one stream, in bounded memory.

    The libraries' own readers either end silently at a truncated file, or allocate as much memory as a file demands.
    Zeros between and after frames are skipped in groups of `padding` bytes, or refused if it is 0.
    """

    def __init__(self, raw: IO[bytes], decompressor: Callable[[], Any], padding: int = 0) -> None:
        self._raw, self._decompressor, self._padding = raw, decompressor, padding
        self._frame: Any = None
        self._frames = 0
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._raw.read(COMPRESSED_BYTES)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            if self._padding and self._frame is None and self._frames:
                zeros = len(self._compressed) - len(self._compressed.lstrip(b"\0"))
                self._compressed = self._compressed[zeros - zeros % self._padding :]
                if not self._compressed:
                    continue
            self._frame = self._frame or self._decompressor()
            self._ready, self._compressed = memoryview(self._frame.decompress(self._compressed)), b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
                self._frames += 1
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _lines(path: Path, reading: Reading) -> Iterator[bytes | None]:
    limit = reading.max_record_bytes
    with _unpacked(path) as file:
        number = 0
        while line := file.readline(limit + 1):
            number += 1
            if len(line) <= limit or line.endswith(b"\n"):
                yield line
                continue
            _oversize(f"{path}:{number}", reading)
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)
            yield None


def _as_lines(rows: Callable[[TextIO, str], Iterator[Mapping[str, object]]]) -> Records:
    """Turn a function that reads an open text file as mappings into a reader that yields the file's rows as JSON lines.

    What the function raises becomes a `DataError` of one line. Invalid UTF-8 reaches it as surrogates, and is then
    treated as in any other line; a byte-order mark does not reach it.
    """

    def records(path: Path, reading: Reading) -> Iterator[bytes | None]:
        with _foreign(str(path)), _unpacked(path) as file, _text_of(file) as text:
            for number, row in enumerate(rows(text, str(path))):
                line = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape")
                if len(line) > reading.max_record_bytes:
                    _oversize(f"{path}:{number + 1}", reading)
                yield line if len(line) <= reading.max_record_bytes else None

    return records


@contextmanager
def _text_of(file: IO[bytes]) -> Iterator[TextIO]:
    """Read an open binary file as text, with line ends as they are; the binary file stays open afterwards."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield text
    finally:
        with suppress(ValueError):  # already closed if reading ended early
            text.detach()


def _separated(path: Path, reading: Reading) -> Iterator[bytes | None]:
    """Yield the documents of a text file, which lines equal to the separator divide; blank lines at a document's ends
    are kept."""
    separator = None if reading.separator is None else reading.separator.encode()
    blank, lines = separator is not None and not separator.strip(), reading.separator == LINES
    document: bytearray | None = bytearray()  # at most a record's length of it is in memory; None if it is left out
    number, first, begins = 1, True, True
    with _unpacked(path) as file:
        while line := file.readline(reading.max_record_bytes):
            line, first = line.removeprefix(codecs.BOM_UTF8) if first else line, False
            ends = begins and (not line.strip() if blank else line.rstrip(b"\r\n") == separator)
            begins = line.endswith(b"\n")
            if document is not None and not ends:
                document += line
                if len(document) > reading.max_record_bytes:
                    _oversize(f"{path} (document {number})", reading)
                    document = None
            if ends or (lines and begins):
                yield None if document is None else bytes(document)
                document, number = bytearray(), number + 1
    if document is None or document:
        yield None if document is None else bytes(document)


class Parts(NamedTuple):
    """A way to divide a text file into documents: the separator and its name."""

    separator: str
    name: str


def parts_of(path: Path) -> Parts | None:
    """How to divide a text file into several documents: at blank lines if it has paragraphs, else at lines; None if it
    is one line."""
    texts, blank = 0, False
    with _unpacked(path) as file:
        while line := file.readline(COMPRESSED_BYTES):
            if line.strip():
                if blank and texts:
                    return Parts(PARAGRAPHS, "paragraphs")
                texts, blank = texts + line.endswith(b"\n"), False
            else:
                blank = True
    return Parts(LINES, "lines") if texts > 1 else None


def _read_file(path: Path, reading: Reading) -> bytes | None:
    with _unpacked(path) as file:
        data = file.read(reading.max_record_bytes + 1)
    if len(data) <= reading.max_record_bytes:
        return data.removeprefix(codecs.BOM_UTF8)
    _oversize(str(path), reading)
    return None


def _parquet(path: Path, reading: Reading) -> Iterator[Row | None]:
    parquet = _require("pyarrow.parquet", str(path))
    columns = [reading.text_field] + ([reading.domain_field] if reading.domain_field else [])
    with _foreign(str(path)):
        schema = parquet.read_schema(path)
        if reading.text_field == ALL_FIELDS:
            columns = list(schema.names)
        for column in columns:
            if column not in schema.names:
                raise DataError(f"{path}: no column {column!r}: it has {', '.join(schema.names)}")
        columns += [one for one in (CLUSTER, *reading.also) if one in schema.names and one not in columns]
        # Dictionary-encoded columns hold one copy of a value that many rows share; a list cannot be encoded so.
        flat = [column for column in columns if not schema.field(column).type.num_fields]
        file = parquet.ParquetFile(path, read_dictionary=flat, pre_buffer=False)
    number = 0
    for group in range(file.num_row_groups):
        with _foreign(str(path)):
            for batch in file.iter_batches(_batch_rows(file.metadata.row_group(group)), [group], columns):
                for values in zip(*(batch.column(column) for column in columns), strict=True):
                    number += 1
                    row = {column: value.as_py() for column, value in zip(columns, values, strict=True)}
                    yield _bounded(row, f"{path} (document {number})", reading)


def _batch_rows(group: RowGroupMetaData) -> int:
    """How many Parquet rows to decode together, so that they take about `PARQUET_BYTES`."""
    return max(1, min(1024, PARQUET_BYTES * group.num_rows // max(group.total_byte_size, 1)))


def _bounded(row: Row, where: str, reading: Reading) -> Row | None:
    """The row itself; None if its text is over the size limit and may be skipped."""
    text = row.get(reading.text_field)
    if not isinstance(text, str) or len(text) <= reading.max_record_bytes:
        return row
    _oversize(where, reading)
    return None


def _hub(name: str, reading: Reading) -> Iterator[Row | None]:
    """`hf:ORG/NAME?name=CONFIG&split=SPLIT&revision=REVISION`, streamed."""
    datasets = _require("datasets", name)
    path, _, query = name.removeprefix(HUB).partition("?")
    options = {"split": "train", **dict(parse_qsl(query))}
    with _foreign(name):
        stream = datasets.load_dataset(path, streaming=True, **options)
        for number, row in enumerate(stream):
            yield _bounded(row, f"{name} (document {number + 1})", reading)


@contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Turn any exception of another library into a `DataError` of one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: cannot read it: {first_line(error)}") from None


Records: TypeAlias = Callable[[Path, Reading], Iterator[Payload]]


@dataclass(frozen=True)
class Reader:
    """A reader that turns files with certain extensions into records."""

    name: str
    suffixes: tuple[str, ...]
    records: Records
    gives: Kind = "lines"
    """`lines` are JSON objects; `rows` contain only the requested fields."""
    needs: str = ""
    """A module that the reader needs."""


READERS = {
    reader.name: reader
    for reader in (
        Reader("jsonl", (".jsonl", ".ndjson"), _lines),
        Reader("csv", (".csv",), _as_lines(partial(table_rows, delimiter=","))),
        Reader("tsv", (".tsv",), _as_lines(partial(table_rows, delimiter="\t"))),
        Reader("parquet", (".parquet",), _parquet, "rows", "pyarrow"),
    )
}
"""Every kind of file that holds records: `prepare`, `corpus`, prompts, benchmarks and evaluated text read these."""

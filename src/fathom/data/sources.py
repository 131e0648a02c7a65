"""Where documents come from: text, JSONL, Parquet and Hub datasets, read as streams of raw records.

Reading is split in two. `Source.records` runs in the main process and only finds where records begin; `parse` runs in
the workers and does what costs time: JSON, UTF-8, checks.
"""

from __future__ import annotations

import glob
import importlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import parse_qsl

from fathom.data.shards import DataError, first_line

FileFormat = Literal["auto", "text", "jsonl", "parquet"]
Undecodable = Literal["error", "replace", "skip"]
Kind = Literal["files", "text", "jsonl", "parquet", "hub"]

DEFAULT_DOMAIN = "default"
HUB = "hf:"
COMPRESSIONS = {".gz": "gzip", ".xz": "lzma", ".bz2": "bz2", ".zst": "zstandard"}
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
TEXT = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".css", ".go"),
    *(".html", ".java", ".jl", ".js", ".kt", ".lua", ".php", ".pl", ".r", ".rb", ".rs", ".scala", ".sh", ".sql"),
    *(".swift", ".ts", ".xml", ".yaml", ".yml", ".toml"),
)
MAX_FILE_BYTES = 1 << 28


@dataclass(frozen=True)
class Reading:
    """How records become documents."""

    text_field: str = "text"
    """The field of a JSON object, or the column, that holds the text."""
    domain_field: str | None = None
    """The field or column that names the domain."""
    separator: str | None = None
    """The line that separates documents within a text file; without one, a file is a document."""
    undecodable: Undecodable = "error"
    """What to do with text that is not UTF-8."""


class Record(NamedTuple):
    """One undecoded document, and how far into its source (in bytes on disk) reading has come."""

    payload: Any
    position: int


@dataclass(frozen=True)
class Source:
    """An input whose records are read in order and counted from 0."""

    kind: Kind
    name: str
    domain: str
    paths: tuple[Path, ...] = ()
    size: int = 0
    """Bytes on disk; 0 where unknown."""

    def records(self, reading: Reading, start: int = 0) -> Iterator[Record]:
        """Read the records from number `start` on."""
        if self.kind == "files":
            return self._files(start)
        if self.kind == "parquet":
            return _parquet(self.paths[0], reading, start)
        if self.kind == "hub":
            return _hub(self.name, reading, start)
        if self.kind == "text":
            assert reading.separator is not None
            return _skip(_separated(self.paths[0], reading.separator.encode()), start)
        return _skip(_lines(self.paths[0]), start)

    def _files(self, start: int) -> Iterator[Record]:
        position = sum(path.stat().st_size for path in self.paths[:start])
        for path in self.paths[start:]:
            position += path.stat().st_size
            yield Record(path, position)


def find_sources(inputs: Iterable[str], reading: Reading, file_format: FileFormat = "auto") -> list[Source]:
    """Resolve `[NAME=]INPUT`s to sources in a fixed order, and refuse what cannot be read."""
    sources: list[Source] = []
    for text in inputs:
        domain, name = _split_domain(text)
        if name.startswith(HUB):
            _require("datasets", name)
            sources.append(Source("hub", name, domain))
            continue
        whole_files: list[Path] = []
        for path in _expand(name, file_format):
            kind = _kind(path, reading, file_format)
            if kind == "files":
                whole_files.append(path)
            else:
                sources.append(Source(kind, str(path), domain, (path,), path.stat().st_size))
        if whole_files and sources and (sources[-1].kind, sources[-1].domain) == ("files", domain):
            # A glob that the shell expanded is one source too: its small files share chunks.
            whole_files = [*sources.pop().paths, *whole_files]
        if whole_files:
            size = sum(path.stat().st_size for path in whole_files)
            sources.append(Source("files", name, domain, tuple(whole_files), size))
    if not sources:
        raise DataError("no inputs: give at least one file, directory, glob or hf:NAME")
    return sources


def parse(
    kind: Kind, name: str, domain: str, number: int, payload: Any, reading: Reading
) -> tuple[str, str, int] | None:
    """Turn record `number` into (text, domain, UTF-8 bytes), or None where it holds no document."""
    where = f"{name}:{number + 1}" if kind == "jsonl" else f"{name} (document {number + 1})"
    if kind == "files":
        where, payload = str(payload), _read_file(payload)
    try:
        if kind == "jsonl":
            fields = _json_fields(payload, reading, where)
            if fields is None:
                return None
            text, domain = fields[0], domain if reading.domain_field is None else fields[1]
        elif kind in ("parquet", "hub"):
            text, domain = payload[0], domain if reading.domain_field is None else str(payload[1])
            text = _require_text(text, reading, where)
        else:
            text = payload.decode("utf-8")
        size = len(text.encode("utf-8"))
    except UnicodeError as error:
        if reading.undecodable == "skip":
            return None
        if reading.undecodable == "error":
            reason = error.reason if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError)) else error
            raise DataError(f"{where} is not UTF-8 ({reason}): --undecodable replace or skip goes on") from None
        text, domain = _repair(kind, domain, payload, reading, where)
        size = len(text.encode("utf-8"))
    return (text, domain, size) if text else None


def _repair(kind: Kind, domain: str, payload: Any, reading: Reading, where: str) -> tuple[str, str]:
    if kind == "jsonl":
        fields = _json_fields(payload.decode("utf-8", "replace").encode(), reading, where) or ("", domain)
        text, domain = fields[0], domain if reading.domain_field is None else fields[1]
    else:
        text = payload[0] if isinstance(payload, tuple) else payload.decode("utf-8", "replace")
    # JSON may spell a lone surrogate, which no UTF-8 can hold.
    return text.encode("utf-8", "replace").decode("utf-8"), domain


def _json_fields(line: bytes, reading: Reading, where: str) -> tuple[str, str] | None:
    if not line.strip():
        return None
    text = line.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: bad JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: bad JSON: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    for field in (reading.text_field, reading.domain_field):
        if field is not None and field not in value:
            raise DataError(f"{where}: no field {field!r}: it has {', '.join(value) or 'none'}")
    domain = "" if reading.domain_field is None else str(value[reading.domain_field])
    return _require_text(value[reading.text_field], reading, where), domain


def _require_text(value: Any, reading: Reading, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: field {reading.text_field!r} is {type(value).__name__}, not text")
    return value


def _split_domain(text: str) -> tuple[str, str]:
    match = re.match(r"([\w.-]+)=(.+)", text, re.DOTALL)
    if match and not Path(text).exists():
        return match[1], match[2]
    return DEFAULT_DOMAIN, text


def _expand(name: str, file_format: FileFormat) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file.relative_to(path))]
        known = [file for file in files if file_format != "auto" or _suffix(file) in (*JSONL, *PARQUET, *TEXT)]
        if not known:
            raise DataError(f"{name}: a directory without any readable file ({_known_suffixes()})")
        return known
    if glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if files := [match for match in matches if match.is_file()]:
            return files
        raise DataError(f"{name}: no file matches")
    raise DataError(f"{name}: no such file or directory")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _known_suffixes() -> str:
    return f"known are {' '.join([*JSONL, *PARQUET, *TEXT[:6]])} ..., also with {' '.join(COMPRESSIONS)}"


def _kind(path: Path, reading: Reading, file_format: FileFormat) -> Kind:
    suffix, compression = _suffix(path), path.suffix.lower()
    if compression in COMPRESSIONS:
        _require(COMPRESSIONS[compression], str(path))
    if file_format == "parquet" or (file_format == "auto" and suffix in PARQUET):
        _require("pyarrow", str(path))
        return "parquet"
    if file_format == "jsonl" or (file_format == "auto" and suffix in JSONL):
        return "jsonl"
    if file_format == "text" or suffix in TEXT:
        return "files" if reading.separator is None else "text"
    raise DataError(f"{path}: unknown extension {suffix!r}: {_known_suffixes()}; or say --file-format text")


def _require(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        if module in ("datasets", "pyarrow", "pyarrow.parquet", "zstandard"):
            hint = "pip install 'fathom-lm[data]'"
        else:
            hint = "this Python was built without it"
        raise DataError(f"{name}: reading it needs the module {module.split('.')[0]}: {hint}") from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file as bytes, decompressed by its extension, with the file on disk below it; damage becomes a `DataError`."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    try:
        with path.open("rb") as raw:
            if compression is None:
                yield raw, raw
            else:
                with _decompressed(raw, compression, path) as file:
                    yield file, raw
    except (EOFError, OSError) as error:
        raise DataError(f"{path}: cannot read it: {error}") from None
    except Exception as error:
        if type(error).__name__ in ("LZMAError", "ZstdError", "error"):
            raise DataError(f"{path}: damaged {compression} data: {error}") from None
        raise


def _decompressed(raw: IO[bytes], compression: str, path: Path) -> IO[bytes]:
    module = _require(compression, str(path))
    if compression == "zstandard":
        return io.BufferedReader(_ZstdReader(raw, module.ZstdDecompressor()), 1 << 20)
    file: IO[bytes] = module.open(raw, "rb")
    return file


class _ZstdReader(io.RawIOBase):
    """Zstandard frames as one stream; the library's own reader ends without a word where a file was cut off."""

    def __init__(self, raw: IO[bytes], decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None
        self._compressed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._raw.read(1 << 16)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("compressed file ended before the end-of-stream marker was reached")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready, self._compressed = self._frame.decompress(self._compressed), b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _lines(path: Path) -> Iterator[Record]:
    position = 0
    with _opened(path) as (file, raw):
        for number, line in enumerate(file):
            if file is raw:
                position += len(line)
            elif number % 256 == 0:
                position = raw.tell()
            yield Record(line, position)


def _separated(path: Path, separator: bytes) -> Iterator[Record]:
    """Documents between lines that equal the separator; blank lines at either end of a document are kept."""
    document: list[bytes] = []
    position = 0
    for line, position in _lines(path):
        if line.rstrip(b"\r\n") == separator:
            yield Record(b"".join(document), position)
            document = []
        else:
            document.append(line)
    if document:
        yield Record(b"".join(document), position)


def _skip(records: Iterator[Record], count: int) -> Iterator[Record]:
    for number, record in enumerate(records):
        if number >= count:
            yield record


def _read_file(path: Path) -> bytes:
    with _opened(path) as (file, _):
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{path}: over {MAX_FILE_BYTES >> 20} MiB in one document: give a separator line to divide it")
    return data


def _parquet(path: Path, reading: Reading, start: int) -> Iterator[Record]:
    parquet = _require("pyarrow.parquet", str(path))
    columns = [reading.text_field] + ([reading.domain_field] if reading.domain_field else [])
    with _foreign(str(path)):
        file = parquet.ParquetFile(path)
    names = file.schema_arrow.names
    for column in columns:
        if column not in names:
            raise DataError(f"{path}: no column {column!r}: it has {', '.join(names)}")
    size, total = path.stat().st_size, max(file.metadata.num_rows, 1)
    row = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows > start:
            number = row
            with _foreign(str(path)):
                for batch in file.iter_batches(1024, row_groups=[group], columns=columns):
                    values = [batch.column(column).to_pylist() for column in columns]
                    for payload in zip(*values, strict=True):
                        if number >= start:
                            yield Record(payload, size * number // total)
                        number += 1
        row += rows


def _hub(name: str, reading: Reading, start: int) -> Iterator[Record]:
    """`hf:ORG/NAME?name=CONFIG&split=SPLIT&revision=REVISION`, streamed."""
    datasets = _require("datasets", name)
    path, _, query = name.removeprefix(HUB).partition("?")
    options = {"split": "train", **dict(parse_qsl(query))}
    with _foreign(name):
        stream = datasets.load_dataset(path, streaming=True, **options)
        for row in stream.skip(start) if start else stream:
            for field in (reading.text_field, reading.domain_field):
                if field is not None and field not in row:
                    raise DataError(f"{name}: no field {field!r}: it has {', '.join(row)}")
            yield Record((row[reading.text_field], row.get(reading.domain_field)), 0)


@contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Whatever another library raises while it reads, said in one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: cannot read it: {first_line(error)}") from None

"""Memory that does not depend on the input: long records, compressed bombs, and what may become of them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import pytest

from fathom.data import sources
from fathom.data.sources import Reading
from fathom.data.tokenizer import PIECE, train_bpe
from fathom.errors import DataError
from tests.data.corpora import write_documents
from tests.data.test_prepare import documents

from .making import prepare

PROGRAM = """
import json, resource, sys
from fathom.corpus.prepare import PrepareOptions, prepare
from fathom.data.shards import DataError

folder, tokenizer, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
found = []
prepare([folder + "/small.jsonl"], folder + "/small", tokenizer, held_out=0)
before = peak()
for number, (names, options) in enumerate(cases):
    try:
        inputs = [f"{folder}/{name}" for name in names]
        workers = options.pop("workers", None)
        options = PrepareOptions(**options)
        made = prepare(inputs, f"{folder}/out{number}", tokenizer, held_out=0, workers=workers, options=options)
        found.append([made.left_out, sum(domain["bytes"] for domain in made.splits["train"].values())])
    except DataError as error:
        found.append(str(error))
print(json.dumps([before, peak(), found]))
"""


def measured(folder: Path, tokenizer: str, cases: list) -> tuple[int, list]:
    """What became of each case, and by how many MiB the process grew over all of them."""
    (folder / "small.jsonl").write_text('{"text": "small"}\n')
    command = [sys.executable, "-c", PROGRAM, str(folder), tokenizer, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after, found = json.loads(done.stdout.splitlines()[-1])
    return after - before, found


@pytest.mark.slow
def test_long_records_take_no_memory(tmp_path: Path, tokenizer: str) -> None:
    """Everything here is one record of 60 MB, of which no more than a few pieces are ever in memory."""
    size = 60_000_000
    line = b'{"text": "' + b"deep " * (size // 5) + b'"}\n'
    names = ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "a.txt", "a.txt.gz"]
    (tmp_path / "a.jsonl").write_bytes(line)
    (tmp_path / "a.txt").write_bytes(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line, 1))
    (tmp_path / "a.txt.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes())
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(line, preset=0))
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(line[:6_000_000], 1))
    del line
    cases = [([name], {"max_record_bytes": 1 << 16}) for name in names]
    cases += [(["small.jsonl", name], {"max_record_bytes": 1 << 16, "oversize": "skip"}) for name in names]
    cases += [(["a.txt"], {"max_record_bytes": 1 << 16, "separator": ""})]
    grown, found = measured(tmp_path, tokenizer, cases)
    assert grown < 40, found
    for name, message in zip([*names, "a.txt"], [*found[: len(names)], found[-1]], strict=True):
        assert name in message and "over 65,536 bytes: `oversize=skip` continues" in message
    assert found[len(names) : -1] == [[1, len("small")]] * len(names)


def test_a_bomb_of_zstandard(tmp_path: Path, tokenizer: str) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b"a" * 1_000_000_000))
    grown, found = measured(tmp_path, tokenizer, [(["small.jsonl", "a.jsonl.zst"], {"oversize": "skip"})])
    assert found == [[1, len("small")]]
    assert grown < 400


def test_an_xz_file_cannot_ask_for_any_memory(tmp_path: Path, tokenizer: str) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 16}]
    plain = lzma.compress(b'{"text": "x"}\n', lzma.FORMAT_XZ, filters=filters)
    # The dictionary's size is one byte of the block header, which has a checksum of its own.
    (tmp_path / "a.jsonl.xz").write_bytes(_with_dictionary(plain, 37))
    with pytest.raises(DataError, match=r"a\.jsonl\.xz: damaged lzma data: Memory usage limit exceeded"):
        prepare([str(tmp_path / "a.jsonl.xz")], tmp_path / "out", tokenizer, held_out=0)
    (tmp_path / "a.jsonl.xz").write_bytes(_with_dictionary(plain, 28))
    prepare([str(tmp_path / "a.jsonl.xz")], tmp_path / "out", tokenizer, held_out=0)


def _with_dictionary(stream: bytes, code: int) -> bytes:
    start = 12
    length = (stream[start] + 1) * 4
    header = bytearray(stream[start : start + length - 4])
    at = header.index(b"\x21\x01") + 2
    header[at] = code
    return stream[:start] + bytes(header) + zlib.crc32(header).to_bytes(4, "little") + stream[start + length :]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_longest_allowed_records_fit(tmp_path: Path, tokenizer: str, workers: int) -> None:
    """Digits are what tokenising takes most memory for."""
    text = "".join(random.Random(0).choices("0123456789", k=(3 << 20) - 20))
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}\n' * 4)
    grown, found = measured(tmp_path, tokenizer, [(["a.jsonl"], {"workers": workers})])
    assert found == [[0, 4 * len(text)]]
    assert grown < 1300


def test_what_an_error_let_pass_may_be_continued(tmp_path: Path, tokenizer: str) -> None:
    """A run that stopped at a long record goes on where it was, once it is told what to do with it."""
    write_documents(tmp_path / "a.jsonl", 30)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "x" * 5000}) + "\n")
    options = {"max_record_bytes": 4000, "workers": 1}
    with pytest.raises(DataError, match=r"a\.jsonl:31 is over 4,000 bytes"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, **options)
    made = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, oversize="skip", **options)
    assert made.left_out == 1
    with pytest.raises(DataError, match="was prepared with `oversize` 'skip', not 'error'"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, **options)


def test_parquet_rows(tmp_path: Path, tokenizer: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["x" * 3000 + "\n" + "y" * 3000, "short"] * 500
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    arguments = ([str(tmp_path / "a.parquet")],)
    with pytest.raises(DataError, match=r"a\.parquet \(document 1\) is over 4,096 bytes"):
        prepare(*arguments, tmp_path / "out", tokenizer, held_out=0, max_record_bytes=4096)
    made = prepare(*arguments, tmp_path / "skipped", tokenizer, held_out=0, max_record_bytes=4096, oversize="skip")
    assert made.left_out == 500 and set(documents(tmp_path / "skipped", "train")) == {"short"}


@pytest.mark.slow
def test_a_value_that_many_rows_share(tmp_path: Path, tokenizer: str) -> None:
    """3,000 rows of 200 kB, 600 megabytes, in a file of some kilobytes."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 3_000, pyarrow.int32()), ["deep " * 40_000])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    options = {"oversize": "skip", "max_record_bytes": 1 << 16}
    grown, found = measured(tmp_path, tokenizer, [(["small.jsonl", "a.parquet"], options)])
    assert found == [[3_000, len("small")]]
    assert grown < 250


def test_the_reader_alone_is_unchanged(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", 20)
    (source,) = sources.find_sources([str(tmp_path / "a.jsonl")], Reading())
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    assert list(source.records(Reading())) == lines
    # A separator is a whole line, also where a record's limit cuts a longer one before it.
    (tmp_path / "b.txt").write_bytes(b"x" * 64 + b"---\n---\nend")
    reading = Reading(separator="---", oversize="skip", max_record_bytes=64)
    (source,) = sources.find_sources([str(tmp_path / "b.txt")], reading)
    assert list(source.records(reading)) == [None, b"end"]


def different_words(path: Path, count: int, seed: int) -> Path:
    """So many words of eight letters, hardly any of them twice, a hundred in a document."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(count)]
    lines = (json.dumps({"text": " ".join(words[i : i + 100])}) + "\n" for i in range(0, count, 100))
    path.write_text("".join(lines))
    return path


def test_a_tokenizer_takes_in_so_many_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different words alone fill it, whatever the order of the inputs; text that repeats itself is read to the end."""
    seen: list[str] = []

    def note(texts, size):
        seen[:] = texts
        return train_bpe(seen, size)

    monkeypatch.setattr("fathom.corpus.prepare.train_bpe", note)
    monkeypatch.setattr("fathom.corpus.tokens.WORDS_AT_MOST", 60_000)
    a, b = (different_words(tmp_path / f"{name}.jsonl", 10_000, seed) for seed, name in enumerate("ab"))
    lines = "the depth of a river is measured with rope and lead\n" * 4_000
    (tmp_path / "c.txt").write_text(lines)
    out = tmp_path / "out"
    with pytest.warns(UserWarning, match=r"trained on 0\.\d MB of text: .* fill the 0\.1 MB .* 2 of 3 inputs"):
        prepare([str(a), str(b), str(tmp_path / "c.txt")], out, train_tokenizer=300, held_out=0, workers=1)
    words = {piece for text in seen for piece in PIECE.findall(text)}
    assert 60_000 * 2 // 3 <= sum(map(len, words)) < 60_000 * 2 // 3 + 2 * 900
    shares = [sum(text in path.read_text() for text in seen[:-1]) for path in (a, b)]
    assert abs(shares[0] - shares[1]) <= 1 and seen[-1] == lines
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare([str(tmp_path / "c.txt")], tmp_path / "c", train_tokenizer=300, held_out=0, workers=1)
    assert seen == [lines]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_a_tokenizer_that_meets_new_words_only(tmp_path: Path) -> None:
    """Twenty times the limit in different words; unbounded they took 40 bytes of memory for each of theirs."""
    program = """
import re, sys, warnings
from pathlib import Path
from fathom.corpus import prepare as data, tokens
from fathom.data.tokenizer import train_bpe
warnings.simplefilter("ignore")
tokens.WORDS_AT_MOST = int(sys.argv[3])
# ru_maxrss would begin with what the process that started this one took.
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
train_bpe(["a word or two"], 300)
before = peak()
data.prepare([sys.argv[1]], sys.argv[2], train_tokenizer=300, held_out=0, workers=1)
print(peak() - before)
"""
    path = different_words(tmp_path / "a.jsonl", 1_000_000, 0)

    def grown(limit: int) -> float:
        command = [sys.executable, "-c", program, str(path), str(tmp_path / f"out{limit}"), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return float(done.stdout.split()[-1])

    assert grown(450_000) < 150 < 300 < grown(1 << 30)

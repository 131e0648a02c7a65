"""Inputs as they are found in the world, and work that was damaged since: one line each, nothing lost."""

from __future__ import annotations

import bz2
import errno
import glob
import gzip
import io
import json
import lzma
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fathom.cli.main import main
from fathom.corpus import prepare as prepare_module
from fathom.data import sources
from fathom.data.shards import TokenDataset
from fathom.data.sources import Reading, find_files, find_sources
from fathom.errors import DataError
from tests.corpus.files import write
from tests.corpus.prose import tree
from tests.data.corpora import write_documents
from tests.data.test_prepare import documents, interrupt
from tests.data.test_shards import flip

from .making import prepare


def test_linked_folders_are_read_once(tmp_path: Path, tokenizer: str) -> None:
    for name in ("in/a.txt", "real/b.txt", "real/deep/c.txt", "in/z/d.txt"):
        write(tmp_path / name, name)
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "real")
    (tmp_path / "in" / "a_z").symlink_to(tmp_path / "in" / "z")
    (tmp_path / "real" / "cycle").symlink_to(tmp_path / "in")
    prepare([str(tmp_path / "in")], tmp_path / "out", tokenizer, held_out=0)
    assert sorted(documents(tmp_path / "out", "train")) == ["in/a.txt", "in/z/d.txt", "real/b.txt", "real/deep/c.txt"]


def test_circles_under_a_glob_are_walked_once(tmp_path: Path) -> None:
    """Two links to their own folder are 2^40 paths to `glob`. Without links the files are those that it finds."""
    for name in ("in/a.txt", "in/deep/b.txt", "in/deep/deeper/c.txt", "in/deep/deeper/c.md", "in/.hidden/d.txt"):
        write(tmp_path / name, name)
    patterns = ("in/**/*.txt", "**/deep/**/c.*", "*/**/deeper/*", "in/**", "in/d*/**/?.txt", "in/**/.hidden/*.txt")
    wanted = {
        pattern: [Path(one) for one in glob.glob(str(tmp_path / pattern), recursive=True) if Path(one).is_file()]
        for pattern in patterns
    }
    assert all(wanted.values())
    for _ in range(2):
        for pattern, files in wanted.items():
            assert find_files(str(tmp_path / pattern), lambda _: True, "") == sorted(files, key=str), pattern
        for link in ("in/x", "in/y"):  # and once more with circles
            (tmp_path / link).unlink(missing_ok=True)
            (tmp_path / link).symlink_to(tmp_path / "in")


def test_hidden_folders_are_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what their links lead to, which may be the whole disk; a pattern may ask for them."""
    for name in ("in/a.txt", "in/deep/b.txt", "in/.venv/c.txt", "big/one/d.txt"):
        write(tmp_path / name, name)
    (tmp_path / "in/.venv/profile").symlink_to(tmp_path / "big")
    walk, entered = os.walk, []

    def watched(*arguments: Any, **others: Any) -> Iterator[Any]:
        for one in walk(*arguments, **others):
            entered.append(Path(one[0]).name)
            yield one

    monkeypatch.setattr(os, "walk", watched)
    for name in ("in", "in/**/*.txt"):
        entered.clear()
        found = find_files(str(tmp_path / name), lambda _: True, "")
        assert [file.name for file in found] == ["a.txt", "b.txt"] and sorted(entered) == ["deep", "in"]
    hidden = find_files(str(tmp_path / "in/**/.venv/**/*.txt"), lambda _: True, "")
    assert [file.name for file in hidden] == ["c.txt", "d.txt"]


def test_a_link_may_be_what_a_pattern_names(tmp_path: Path) -> None:
    """A file has its own path where that one fits; else a link's, be its own a hidden one."""
    for name in ("in/real/a.txt", "in/real/deep/b.txt", "in/.store/c.txt"):
        write(tmp_path / name, name)
    for link, target in (("link", "real"), ("shown", ".store"), ("real/up", "../../in")):
        (tmp_path / "in" / link).symlink_to(target)
    wanted = {
        "in/**/link/*.txt": ["in/link/a.txt"],
        "in/**/link/**/*.txt": ["in/link/a.txt", "in/link/deep/b.txt"],
        "in/**/l*/deep/*": ["in/link/deep/b.txt"],
        "in/**/up/real/a.txt": ["in/real/up/real/a.txt"],
        "in/**/*.txt": ["in/real/a.txt", "in/real/deep/b.txt", "in/shown/c.txt"],
        "in": ["in/real/a.txt", "in/real/deep/b.txt", "in/shown/c.txt"],
    }
    for name, files in wanted.items():
        found = find_files(str(tmp_path / name), lambda _: True, "")
        assert [str(file.relative_to(tmp_path)) for file in found] == files, name


def test_files_below_a_glob_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    """As text, with or without `**`: in another order a directory that was prepared before could not go on."""
    for name in ("a/x.txt", "a-b/x.txt", "a.txt"):
        write(tmp_path / name, name)
    found = find_files(str(tmp_path / "**" / "*.txt"), lambda _: True, "")
    assert [str(file.relative_to(tmp_path)) for file in found] == ["a-b/x.txt", "a.txt", "a/x.txt"]


def test_a_folder_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was passed over without a word; root may open any, so the refusal is played."""
    closed = tmp_path / "in" / "closed"
    closed.mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("a")
    scandir = os.scandir

    def refusing(path: Any = ".") -> Any:
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for name in ("in", "in/**/*.txt"):
        with pytest.raises(DataError, match=r"in/closed: Permission denied"):
            find_files(str(tmp_path / name), lambda _: True, "")


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    """Beside files it is none of them; named, it is refused, and nothing waits for its other end."""
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.txt")
    assert find_files(str(tmp_path), lambda _: True, "") == [tmp_path / "a.txt"]
    with pytest.raises(DataError, match=r"pipe\.txt: neither a file nor a directory"):
        find_files(str(tmp_path / "pipe.txt"), lambda _: True, "")


def test_json_that_is_lines(tmp_path: Path, tokenizer: str) -> None:
    """C4's files are called .json.gz."""
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "c4-train.00000-of-01024.json.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "plain.json").write_bytes(lines)
    for number, name in enumerate(("in", "in/c4-train.00000-of-01024.json.gz", "plain.json", "*.json")):
        prepare([str(tmp_path / name)], tmp_path / f"out{number}", tokenizer, held_out=0)
        assert list(documents(tmp_path / f"out{number}", "train")) == ["one", "two"]
    (tmp_path / "in" / "settings.json").write_text("[]")
    prepare([str(tmp_path / "in")], tmp_path / "beside", tokenizer, held_out=0)
    assert list(documents(tmp_path / "beside", "train")) == ["one", "two"]


def _zipped(text: bytes) -> bytes:
    with zipfile.ZipFile(held := io.BytesIO(), "w") as archive:
        archive.writestr("text", text)
    return held.getvalue()


@pytest.mark.parametrize(
    ("pack", "says"),
    [
        (gzip.compress, "gzip data, not text: name it {}.gz, or unpack it"),
        (lzma.compress, "xz data, not text: name it {}.xz, or unpack it"),
        (bz2.compress, "bzip2 data, not text: name it {}.bz2, or unpack it"),
        (lambda text: b"\x28\xb5\x2f\xfd" + text, "zstd data, not text: name it {}.zst, or unpack it"),
        (_zipped, "zip data, not text: unpack it"),
    ],
    ids=["gzip", "xz", "bzip2", "zstd", "zip"],
)
def test_packed_data_under_the_name_of_a_text_is_never_read(pack: Callable[[bytes], bytes], says: str, tmp_path: Path):
    text = b'{"text": "PK BZh fathoms"}\n'
    for name, separator in (("a.jsonl", None), ("a.txt", None), ("a.txt", ""), ("a.csv", None)):
        reading = Reading(separator=separator, undecodable="replace")
        (tmp_path / name).write_bytes(pack(text))
        with pytest.raises(DataError, match=re.escape(f"{name} contains {says.format(name)}")):
            next(find_sources([str(tmp_path / name)], reading)[0].documents(reading))
    (tmp_path / "a.txt").write_bytes(text[10:])  # letters that are also the beginning of a zip
    (source,) = find_sources([str(tmp_path / "a.txt")], Reading())
    assert next(source.documents(Reading())).text == text[10:].decode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(gzip.compress(text)))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz contains gzip data, not text: unpack it"):
        next(find_sources([str(tmp_path / "a.jsonl.gz")], Reading())[0].documents(Reading()))


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer: str) -> None:
    """At the start of a file, which without it gives the same documents; within one it is a character like others."""
    for name, mark in (("marked", b"\xef\xbb\xbf"), ("plain", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_bytes(mark + "---\none\n---\ntwo \ufeff\n".encode())
        for options in ({}, {"separator": "---"}):
            out = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
            prepare([str(tmp_path / name)], out, tokenizer, held_out=0, **options)
            assert list(documents(out, "train")) == (
                ["one\n", "two \ufeff\n"] if "separator" in options else ["---\none\n---\ntwo \ufeff\n"]
            )


def test_a_record_without_a_domain_is_in_the_input_s(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "topic": null}\n{"text": "y", "topic": "sea"}\n')
    made = prepare([f"web={tmp_path / 'a.jsonl'}"], tmp_path / "out", tokenizer, domain_field="topic", held_out=0)
    assert set(made.splits["train"]) == {"web", "sea"}


def test_a_domain_that_is_no_text(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "topic": "\\ud800"}\n')
    inputs, options = [str(tmp_path / "a.jsonl")], {"domain_field": "topic", "held_out": 0}
    with pytest.raises(DataError, match=r"a\.jsonl:1 is not UTF-8"):
        prepare(inputs, tmp_path / "out", tokenizer, **options)
    made = prepare(inputs, tmp_path / "replaced", tokenizer, undecodable="replace", **options)
    assert set(made.splits["train"]) == {"?"}


def test_paths_are_inputs_as_texts_are(tmp_path: Path, tokenizer: str) -> None:
    """Texts, paths, a tuple of them or one alone: the same corpus, which a second call finds finished."""
    (tmp_path / "a.txt").write_text("deep", encoding="utf-8")
    file, out = tmp_path / "a.txt", tmp_path / "out"
    made = prepare([str(file)], str(out), tokenizer, held_out=0)
    for inputs in ([file], (file,), str(file), file):
        assert prepare(inputs, out, tokenizer, held_out=0).splits == made.splits, inputs


def test_a_tokenizer_without_unknown(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"x": 0, "<|endoftext|>": 1})).save(str(tmp_path / "words.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "y"}\n')
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl: the tokenizer cannot encode .* token for unknown text"):
            prepare(
                [str(tmp_path / "a.jsonl")], tmp_path / f"out{workers}", str(tmp_path / "words.json"), workers=workers
            )


@pytest.mark.parametrize("cut", [True, False])
def test_damaged_work_is_found_before_it_is_published(cut: bool, tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    """Work of another length or with another byte is named and done again."""
    write_documents(tmp_path / "a.jsonl", 200)
    arguments = [str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "_publish", interrupt)
        prepare(*arguments, held_out=0.2)
    tokens = next(tmp_path.glob("out/.prepare/stages/encode/*/train/*/00000.bin"))
    if cut:
        tokens.write_bytes(b"")
    else:
        flip(tokens, 100)
    with pytest.warns(match=r"00000\.bin: damaged"):
        prepare(*arguments, held_out=0.2)
    prepare(arguments[0], tmp_path / "whole", tokenizer, held_out=0.2)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_fingerprint_is_of_the_tokens(tmp_path: Path, tokenizer: str) -> None:
    write_documents(tmp_path / "a.jsonl", 50)
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "moved.jsonl")
    write_documents(tmp_path / "other.jsonl", 50, seed=1)
    found = []
    for name in ("a", "moved", "other"):
        prepare([str(tmp_path / f"{name}.jsonl")], tmp_path / name, tokenizer, held_out=0.2, workers=1)
        found.append(TokenDataset.open(tmp_path / name))
    assert found[0].fingerprint == found[1].fingerprint != found[2].fingerprint


def test_the_command_says_what_it_made(tmp_path: Path, tokenizer: str, capsys) -> None:
    write_documents(tmp_path / "a.jsonl", 200)
    words = ["prepare", str(tmp_path / "a.jsonl"), "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    words += ["--held-out", "0.2"]
    assert main(words) == 0
    line, *after = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'out'}: vocabulary of 320; train ") and "next:" in after
    assert "documents; val" in line and "Summary(" not in line
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["directory"] == str(tmp_path / "out")
    assert sum(split["default"]["documents"] for split in values["splits"].values()) == 200


@pytest.mark.parametrize(
    ("files", "inputs", "says"),
    [
        ({"state.json": "{}", "data.arrow": ""}, ["."], "save_to_disk.*to_parquet"),
        ({"dataset_dict.json": "{}", "train/state.json": "{}", "train/data.arrow": ""}, ["."], "save_to_disk"),
        ({"index.json": '{"format": "fathom-tokens"}'}, ["."], "a prepared corpus already.*data.directory="),
        ({"a.json": '\n[{"text": "a"}]'}, ["a.json"], r"a\.json is a JSON list.*jq -c"),
        ({"a.txt": "a"}, ["x=a.txt", "x=./a.txt"], "a.txt is given twice"),
        ({"a.txt": "a", "b.txt": "b"}, [".", "b.txt"], "b.txt is given twice"),
        ({"a.txt": "a"}, ["a.txt", "x=a.txt"], ""),
        ({"state.json": '{"text": "CA"}'}, ["."], ""),
        ({"a.txt": "a", "index.json": '{"format": "fathom-tokens"}', "state.json": "{}"}, ["."], ""),
        ({"a.json": '{"text": "a"}'}, ["a.json"], ""),
    ],
)
def test_what_is_no_text_names_the_remedy(
    files: dict[str, str], inputs: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the negative controls, which are read."""
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if not says:
        assert find_sources(inputs, Reading())
        return
    with pytest.raises(DataError, match=says):
        find_sources(inputs, Reading())


def test_a_number_of_a_list_may_go_on_in_the_next_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("[12, 1500.0, 1.5e3, -0.25]")
    for size in range(1, 16):
        monkeypatch.setattr(sources, "LIST_CHARACTERS", size)
        assert list(sources.list_items(tmp_path / "a.json")) == [12, 1500.0, 1500.0, -0.25], size


def test_zeros_between_and_after_the_streams_of_an_xz_file(tmp_path: Path) -> None:
    streams = [lzma.compress(text) for text in (b"one ", b"two")]
    (tmp_path / "a.txt.xz").write_bytes(streams[0] + bytes(8192) + streams[1] + bytes(4))
    (source,) = find_sources([str(tmp_path / "a.txt.xz")], Reading())
    assert [found and found.text for found in source.documents(Reading())] == ["one two"]


@pytest.mark.parametrize("count", [3, 4096, 8190])
def test_zeros_that_no_format_allows_are_damage(tmp_path: Path, count: int) -> None:
    """Those of a partial download, as in .zst files, and in xz other than a multiple of four."""
    frames = sources._Frames(io.BytesIO(zlib.compress(b"one") + bytes(count)), zlib.decompressobj)
    with pytest.raises((zlib.error, EOFError)):
        frames.readall()
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"one") + bytes(count - count % 4 + 3))
    (source,) = find_sources([str(tmp_path / "a.txt.xz")], Reading())
    with pytest.raises(DataError):
        list(source.documents(Reading()))


def test_a_fault_in_a_list_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the file, here damaged too, is not read; a list that only goes on in the next piece has no fault."""
    good = [{"a\u20ac\\": [True, None, float("inf"), -1.5e3, "\ud83d\ude00\n"], "b": {}}] * 2
    for size in range(1, 40):
        monkeypatch.setattr(sources, "LIST_CHARACTERS", size)
        for text in (json.dumps(good), json.dumps(good, indent=3, ensure_ascii=False).replace("\ud83d\ude00", "x")):
            (tmp_path / "a.json").write_text(text, encoding="utf-8")
            assert json.dumps(list(sources.list_items(tmp_path / "a.json"))) == json.dumps(json.loads(text)), size
    rest = ", ".join(str(number**5) for number in range(40_000))
    for fault in ("oops", '{"a" 1}', '"\\q"', "1" * 5000, "1.", "1e", "1.5.5", "-2e+", "1.5e3e"):
        (tmp_path / "a.json.gz").write_bytes(gzip.compress(f'["ok", {fault}, {rest}]'.encode())[:-9])
        items = sources.list_items(tmp_path / "a.json.gz")
        assert next(items) == "ok"
        with pytest.raises(DataError, match="bad JSON list"):
            next(items)
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 1000)
    for item in ('"' + "a" * 5000 + '"', "1." + "0" * 5000):
        (tmp_path / "a.json").write_text(f'["ok", {item}]')
        with pytest.raises(DataError, match=r"a\.json: an item of more than 1,000 characters"):
            list(sources.list_items(tmp_path / "a.json"))

"""From text to shards: nothing lost, nothing leaked, the same bytes from any number of workers and after any crash."""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from fathom.corpus import documents as parts
from fathom.corpus import executor, plain, stage
from fathom.corpus import prepare as prepare_module
from fathom.corpus.stage import DRAFT
from fathom.data import sources
from fathom.data.shards import UNFINISHED, TokenDataset, choose_split
from fathom.errors import DataError
from fathom.report.files import lock
from tests.corpus.files import write
from tests.corpus.prose import tree
from tests.data.corpora import stream, write_documents

from .making import prepare


def documents(directory: Path, split: str) -> Iterator[str]:
    """The texts of a split, decoded."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
    dataset = TokenDataset.open(directory, split)
    tokens = stream(dataset)
    edges = [0, *dataset.document_ends(0, len(tokens)).tolist(), len(tokens)]
    for start, stop in pairwise(edges):
        assert tokens[start:stop].tolist().index(dataset.eos_token_id) == stop - start - 1
        yield tokenizer.decode(tokens[start : stop - 1])


def leaked(directory: Path) -> set[str]:
    """Texts that are on both sides of the split."""
    return set(documents(directory, "train")) & set(documents(directory, "val"))


@pytest.mark.parametrize(
    "text", ["plain", " \t spaces\r\n\n  kept ", "naïve 水深 🌊", "<|endoftext|> and <|pad|> are text", "x\u200b\ufeff"]
)
def test_texts_come_back_as_they_were(tmp_path: Path, tokenizer: str, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": text}) + "\n" + json.dumps({"text": "other"}), encoding="utf-8"
    )
    (tmp_path / "b.txt").write_bytes(text.encode())
    summary = prepare([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")], tmp_path / "out", tokenizer, held_out=0)
    assert list(documents(tmp_path / "out", "train")) == [text, "other", text]
    assert summary.splits["train"]["default"]["bytes"] == 2 * len(text.encode()) + len("other")


def test_both_splits_together_are_the_input(corpus: Path) -> None:
    texts = write_documents(corpus.parent / "a.jsonl", 400, seed=1) + write_documents(
        corpus.parent / "b.jsonl", 200, seed=2
    )
    train, val = list(documents(corpus, "train")), list(documents(corpus, "val"))
    assert sorted(train + val) == sorted(texts)
    assert train == [text for text in texts if text in set(train)], "documents keep their order"
    assert 30 < len(val) < 90
    assert not leaked(corpus)


def test_equal_texts_stay_on_one_side(tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    texts = write_documents(tmp_path / "a.jsonl", 150)
    again = [json.dumps({"id": f"copy {i}", "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "b.jsonl").write_text("\n".join(again), encoding="utf-8")
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    prepare(inputs, tmp_path / "out", tokenizer, held_out=0.3)
    assert len(list(documents(tmp_path / "out", "val"))) > 40
    assert not leaked(tmp_path / "out")
    assert all(choose_split(f" {text}\n", 0.3) == choose_split(text, 0.3) for text in texts)

    # The control: a split by anything but the text is one that this test sees through.
    turn = iter(range(10**6))
    monkeypatch.setattr("fathom.corpus.tokens.choose_split", lambda text, share: ["train", "val"][next(turn) % 7 < 2])
    prepare(inputs, tmp_path / "leaking", tokenizer, held_out=0.3)
    assert leaked(tmp_path / "leaking")


def test_the_split_is_stable() -> None:
    """Fixed by the text alone, for every machine and for all time; and a larger share only adds to a smaller one."""
    chosen = [i for i in range(200) if choose_split(f"document {i}", 0.05) == "val"]
    assert chosen == HELD_OUT
    assert set(chosen) <= {i for i in range(200) if choose_split(f"document {i}", 0.2) == "val"}
    assert {choose_split("any", 0.0), choose_split("any", 1.0)} == {"train", "val"}


HELD_OUT = [40, 70, 100, 118, 123, 129, 148, 163]


def small_tasks(monkeypatch: pytest.MonkeyPatch, size: int = 4096) -> None:
    """Tasks of so many bytes, none of them too small for a process of its own."""
    monkeypatch.setattr(executor, "POOL_BYTES", 0)
    monkeypatch.setattr(plain, "TASK_FILES", 1)
    monkeypatch.setattr(plain, "PART_BYTES", size)
    monkeypatch.setattr(plain, "PartWriter", partial(parts.PartWriter, limit=size))


@pytest.mark.slow
def test_workers_do_not_change_a_byte(tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    """Nor does a user's own random.py where they are started, which is no module of theirs."""
    small_tasks(monkeypatch)
    (tmp_path / "random.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "a.jsonl", 300)
    for name in ("x", "y", "z"):
        (tmp_path / f"{name}.txt").write_text(f"file {name}\n" * 50)
    inputs = [str(tmp_path / "a.jsonl"), f"files={tmp_path}/*.txt"]
    trees = []
    for workers in (1, 3):
        prepare(inputs, tmp_path / f"out{workers}", tokenizer, held_out=0.2, shard_tokens=1000, workers=workers)
        trees.append(tree(tmp_path / f"out{workers}"))
    assert trees[0] == trees[1]
    assert len(trees[0]) > 10


def test_a_worker_reports_its_error(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tasks(monkeypatch)
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' * 10 + '{"text": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:11: field 'text' is int, not text"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, workers=2)


def run(arguments: dict[str, object], delay: float | None = None) -> bool:
    """Prepare in a forked process, killed after a delay; whether it finished.

    Its tasks are small, so that a kill finds it in every state.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                small_tasks(patch)
                os.write(send, b"ready")
                prepare(**arguments)
            os.write(send, b"done")
        finally:
            os._exit(1)
    os.close(send)
    with os.fdopen(receive, "rb", 0) as channel:
        assert channel.read(5) == b"ready"
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        answer = channel.read(4)
    status = os.waitpid(child, 0)[1]
    assert answer or os.WIFSIGNALED(status)
    return bool(answer)


def finished_tasks(out: Path) -> dict[Path, int]:
    """The records of finished tasks, and when they were written."""
    found = out.glob(f"{UNFINISHED}/stages/*/*/task.json")
    return {path: path.stat().st_mtime_ns for path in found if path.parent.suffix != ".new"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_resumed_gives_the_same_bytes(tmp_path: Path, tokenizer: str, workers: int) -> None:
    """Runs are killed at random moments, then one finishes."""
    write_documents(tmp_path / "a.jsonl", 1500)
    write_documents(tmp_path / "b.jsonl", 500, seed=1)
    arguments: dict[str, object] = {
        "inputs": [f"a={tmp_path / 'a.jsonl'}", f"b={tmp_path / 'b.jsonl'}"],
        "tokenizer": tokenizer,
        "held_out": 0.2,
        "shard_tokens": 5000,
        "workers": workers,
    }
    started = time.monotonic()
    assert run({**arguments, "out": tmp_path / "whole"})
    length = time.monotonic() - started
    expected = tree(tmp_path / "whole")
    chance = random.Random(workers)
    kills = attempt = resumed = 0
    while kills < 25 or not resumed:
        out = tmp_path / f"killed{attempt}"
        before: dict[Path, int] = {}
        while not run({**arguments, "out": out}, chance.uniform(0, 1.1 * length)):
            kills += 1
            found = finished_tasks(out)
            published = (out / "index.json").exists()  # killed while it removed what it no longer needs
            assert published or before.items() <= found.items(), "what is finished is not done again"
            before = found
        # It outran the signal, on its own or after runs that did not.
        assert tree(out) == expected
        resumed += len(before)
        attempt += 1


def test_a_resumed_run_does_what_is_left(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in this process, before the first task, before a later one, and before the corpus is whole."""
    small_tasks(monkeypatch)
    write_documents(tmp_path / "a.jsonl", 100)
    options = {"tokenizer": tokenizer, "held_out": 0.2, "shard_tokens": 2000, "workers": 1}
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "whole", **options)
    real = plain.Encode.run
    for crash in (0, 3):
        out, calls = tmp_path / f"out{crash}", iter(range(10**6))

        def encode(self, task, folder, crash=crash, calls=calls):
            if next(calls) == crash:
                raise KeyboardInterrupt
            return real(self, task, folder)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(plain.Encode, "run", encode)
            prepare([str(tmp_path / "a.jsonl")], out, **options)
        assert len(finished_tasks(out)) == 1 + crash
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(prepare_module, "write_index", interrupt)
            prepare([str(tmp_path / "a.jsonl")], out, **options)
        monkeypatch.setattr(plain.Read, "run", None)
        with monkeypatch.context() as patch:
            patch.setattr(plain.Encode, "run", None)
            prepare([str(tmp_path / "a.jsonl")], out, **options)
        monkeypatch.undo()
        small_tasks(monkeypatch)
        assert tree(out) == tree(tmp_path / "whole")


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_unfinished_corpus_binds_nobody(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other options change is read and encoded anew."""
    rows = [{"text": f"Paragraph {i}", "note": f"Note {i} of a book."} for i in range(40)]
    file = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_publish", interrupt)
        for options in ({"held_out": 0}, {"held_out": 0.5, "text_field": "note"}):
            with pytest.raises(KeyboardInterrupt):
                prepare([file], tmp_path / "out", tokenizer, **options)
    for out in ("out", "new"):
        prepare([file], tmp_path / out, tokenizer, held_out=0.2, text_field="note")
    assert tree(tmp_path / "out") == tree(tmp_path / "new")


@pytest.mark.parametrize("moment", ["prepare.train_bpe", "tokens.vocabulary_size"])
def test_a_crash_around_the_tokenizer(tmp_path: Path, monkeypatch, moment: str) -> None:
    write_documents(tmp_path / "a.jsonl", 100)
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "whole", train_tokenizer=300)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"fathom.corpus.{moment}", interrupt)
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", train_tokenizer=300)
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", train_tokenizer=300)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_finished_work_is_not_done_again(tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    write_documents(tmp_path / "a.jsonl", 50)
    first = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)
    monkeypatch.setattr(prepare_module, "_make", None)
    second = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)
    assert second.splits == first.splits and not second.seconds
    with pytest.raises(DataError, match=r"was prepared with `held_out` 0\.01, not 0\.5: choose another directory"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, held_out=0.5)
    many = [f"{name}={tmp_path / 'a.jsonl'}" for name in range(40)]
    with pytest.raises(DataError, match=r"with `inputs` \['[^,]*'\], not \['[^,]*', '[^,]*', … 40 in all\]: choose"):
        prepare(many, tmp_path / "out", tokenizer)


def test_what_only_looks_like_a_draft_is_kept(tmp_path: Path, tokenizer: str) -> None:
    """A folder with somebody's hidden files is refused as before, whatever their names end with."""
    write_documents(tmp_path / "a.jsonl", 20)
    (tmp_path / "out" / ".photos.new").mkdir(parents=True)
    (tmp_path / "out" / ".index.json.x.new").symlink_to(tmp_path)
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(DataError, match="contains other files"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, held_out=0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    made = tmp_path / "made"
    prepare([str(tmp_path / "a.jsonl")], made, tokenizer, held_out=0)
    (made / ".mine.new").write_text("mine")
    prepare([str(tmp_path / "a.jsonl")], made, tokenizer, held_out=0, shard_tokens=100, overwrite=True)
    assert (made / ".mine.new").read_text() == "mine"


def test_many_files_are_read_by_one_look_at_the_manifest(tmp_path: Path, monkeypatch) -> None:
    """Of each stage, however many files there are; once it was read for each file, which took minutes for thousands."""
    looked = []
    read = stage.WorkspaceOf.manifest
    monkeypatch.setattr(stage.WorkspaceOf, "manifest", lambda self, name: [looked.append(name), read(self, name)][1])
    counts = []
    for files in (3, 12):
        looked.clear()
        (tmp_path / f"in{files}").mkdir()
        for number in range(files):
            write_documents(tmp_path / f"in{files}" / f"{number}.jsonl", 4, seed=number)
        prepare([str(tmp_path / f"in{files}")], tmp_path / f"out{files}", train_tokenizer=300, held_out=0, workers=1)
        counts.append(len(looked))
    assert counts[0] == counts[1] <= 6


def test_overwriting_replaces_and_resumes(tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    write_documents(tmp_path / "a.jsonl", 100)
    inputs, out = [str(tmp_path / "a.jsonl")], tmp_path / "out"
    prepare(inputs, out, tokenizer, held_out=0.3, shard_tokens=500)
    prepare(inputs, out, tokenizer, held_out=0.2, overwrite=True)
    prepare(inputs, tmp_path / "fresh", tokenizer, held_out=0.2)
    assert tree(out) == tree(tmp_path / "fresh")
    (out / "index.json").write_text((out / "index.json").read_text()[:-9])
    with pytest.raises(DataError, match="corrupt"):
        prepare(inputs, out, tokenizer, held_out=0.2)
    prepare(inputs, out, tokenizer, held_out=0.2, overwrite=True)
    assert tree(out) == tree(tmp_path / "fresh")


def test_a_resume_reads_changed_inputs_again(tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    """Also other inputs and options: an unfinished corpus binds nobody."""
    write_documents(tmp_path / "a.jsonl", 50)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "_publish", interrupt)
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)
    (text, *_) = write_documents(tmp_path / "a.jsonl", 1, seed=7)
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, held_out=0)
    assert list(documents(tmp_path / "out", "train")) == [text]


def test_a_full_disk_is_one_line_and_resumable(tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    write_documents(tmp_path / "a.jsonl", 50)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "00000.bin")

    with monkeypatch.context() as patch:
        patch.setattr(plain.Encode, "run", full)
        with pytest.raises(DataError, match=r"00000\.bin: No space left on device; run the same command to resume"):
            prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)
    assert prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer).splits["train"]


def test_two_runs_do_not_share_a_directory(tmp_path: Path, tokenizer: str) -> None:
    write_documents(tmp_path / "a.jsonl", 5)
    (tmp_path / "out").mkdir()
    with (
        lock(tmp_path / "out" / prepare_module.LOCK),
        pytest.raises(DataError, match="is being prepared by another process"),
    ):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)
    assert prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer).splits


def test_every_format_gives_the_same_shards(tmp_path: Path, tokenizer: str) -> None:
    texts = write_documents(tmp_path / "a.jsonl", 60)
    plain = (tmp_path / "a.jsonl").read_bytes()
    compressions = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    with suppress(ImportError):
        compressions[".zst"] = importlib.import_module("zstandard").ZstdCompressor().compress
    for suffix, compress in compressions.items():
        (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(plain[:999]) + compress(plain[999:]))
    (tmp_path / "a.txt").write_text("".join(f"{text}\n---\n" for text in texts), encoding="utf-8", newline="")
    names = ["a.jsonl", *(f"a.jsonl{suffix}" for suffix in compressions)]
    with suppress(ImportError):
        table = importlib.import_module("pyarrow").table({"text": texts})
        importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet", row_group_size=7)
        names.append("a.parquet")
    for name in names:
        prepare([str(tmp_path / name)], tmp_path / f"out-{name}", tokenizer, held_out=0)
        assert list(documents(tmp_path / f"out-{name}", "train")) == texts
        source = sources.find_sources([str(tmp_path / name)], sources.Reading())[0]
        assert [document.text for document in source.documents(sources.Reading())] == texts
    prepare([str(tmp_path / "a.txt")], tmp_path / "out-txt", tokenizer, held_out=0, separator="---")
    assert list(documents(tmp_path / "out-txt", "train")) == [f"{text}\n" for text in texts]


def test_hub_datasets_are_streamed(tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    asked = []

    def load_dataset(path: str, **options: object) -> list[dict[str, str]]:
        asked.append((path, options))
        return [{"body": f"row {i}", "topic": "odd" if i % 2 else "even"} for i in range(10)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    name = "hf:org/name?name=en&split=validation"
    prepare([name], tmp_path / "out", tokenizer, text_field="body", domain_field="topic", held_out=0, workers=1)
    assert asked[0] == ("org/name", {"streaming": True, "name": "en", "split": "validation"})
    assert list(documents(tmp_path / "out", "train")) == [f"row {i}" for i in (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)]


def test_a_directory_is_its_known_files_in_order(tmp_path: Path, tokenizer: str) -> None:
    for name in ("b/z.py", "b/a.md", "a.txt", "c.bin", ".hidden.txt", ".git/x.txt", "__pycache__/y.txt"):
        write(tmp_path / "in" / name, name)
    prepare([str(tmp_path / "in")], tmp_path / "out", tokenizer, held_out=0)
    assert list(documents(tmp_path / "out", "train")) == ["a.txt", "b/a.md", "b/z.py"]
    files = [str(tmp_path / "in" / name) for name in ("a.txt", "b/a.md", "b/z.py")]
    assert len(sources.find_sources(files, sources.Reading())) == 1
    assert len(sources.find_sources([files[0], f"other={files[1]}"], sources.Reading())) == 2
    prepare([str(tmp_path / "in" / "c.bin")], tmp_path / "forced", tokenizer, held_out=0, file_format="text")
    assert list(documents(tmp_path / "forced", "train")) == ["c.bin"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have only names in Unicode")
def test_a_file_whose_name_is_not_utf8_is_read(tmp_path: Path, tokenizer: str) -> None:
    write(tmp_path / "in" / "caf\udce9.txt", "café")
    prepare([str(tmp_path / "in")], tmp_path / "out", tokenizer, held_out=0)
    assert list(documents(tmp_path / "out", "train")) == ["café"]
    with pytest.raises(DataError, match=r"caf\\udce9': its name is not UTF-8"):  # no tokenizer can be saved there
        prepare([str(tmp_path / "in")], tmp_path / "caf\udce9", tokenizer, held_out=0)


def test_files_of_a_downloaded_data_set_are_counted_and_named(
    tmp_path: Path, tokenizer: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Its card and its test split are read, since they are inputs, but not in silence; code with tests is."""
    for name in (
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "data/test-00000-of-00001.jsonl",
    ):
        write(tmp_path / "clone" / name, json.dumps({"text": name}))
    write(tmp_path / "clone" / "README.md", "A card.")
    made = prepare([tmp_path / "clone"], tmp_path / "out", tokenizer, held_out=0)
    assert made.files == {".jsonl": 3, ".md": 1} and "\nfiles: 3 .jsonl, 1 .md" in str(made)
    (warned,) = [str(one.message) for one in recwarn]
    assert "data/test-00000-of-00001.jsonl and 1 more: read, too" in warned
    split = [f"{name}={path}" for path in (tmp_path / "clone" / "data").iterdir() if (name := path.name.split("-")[0])]
    write(tmp_path / "code" / "README.md", "A program."), write(tmp_path / "code" / "tests" / "test_a.py", "x = 1")
    for number, inputs in enumerate((split, [tmp_path / "code"])):
        assert len(prepare(inputs, tmp_path / f"out{number}", tokenizer, held_out=0).files) == 1 + number
    assert len(recwarn) == 1


def test_domains_by_field(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": f"text {i}", "source": ["a", "b/c", "..", ""][i % 4]} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, domain_field="source", held_out=0)
    assert {domain: counts["documents"] for domain, counts in summary.splits["train"].items()} == dict.fromkeys(
        ["", "..", "a", "b/c"], 10
    )
    assert TokenDataset.open(tmp_path / "out", domain="b/c").num_documents == 10
    assert {path.parent.parent for path in (tmp_path / "out").rglob("*.bin")} == {tmp_path / "out" / "train"}


def test_undecodable_text(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "good"}\n{"text": "lone \\ud800"}\n{"text": "caf\xe9"}\n\n{"text": null}\n'
    )
    for name, where in (
        ("a.txt", r"a\.txt is not UTF-8"),
        ("b.jsonl", r"b\.jsonl:2 is not UTF-8.*`undecodable=replace`"),
    ):
        with pytest.raises(DataError, match=where):
            prepare([str(tmp_path / name)], tmp_path / f"out-{name}", tokenizer, held_out=0)
    inputs = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    prepare(inputs, tmp_path / "replaced", tokenizer, held_out=0, undecodable="replace")
    assert list(documents(tmp_path / "replaced", "train")) == ["caf�", "good", "lone ?", "caf�"]
    prepare(inputs, tmp_path / "skipped", tokenizer, held_out=0, undecodable="skip")
    assert list(documents(tmp_path / "skipped", "train")) == ["good"]


def write_bad_inputs(folder: Path) -> None:
    (folder / "good.jsonl").write_text('{"text": "good"}\n{"text": "also"}\n')
    (folder / "bad.jsonl").write_text('{"text": "good"}\n\n{"text": oops}\n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "field.jsonl").write_text('{"id": 1, "body": "x"}\n')
    (folder / "number.jsonl").write_text('{"text": 5}\n')
    (folder / "blank.jsonl").write_text("\n\n" + '{"text": ""}\n')
    (folder / "empty.txt").write_text("")
    (folder / "odd.xyz").write_text("x")
    (folder / "bare").write_text("x")
    (folder / "short.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x"}\n' * 999)[:-20])
    (folder / "broken.jsonl.gz").write_bytes(b"not gzip")
    (folder / "hollow").mkdir()


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([], {}, "no inputs: give at least one file"),
        (["none.jsonl"], {}, r"none\.jsonl: no such file or directory"),
        (["*.none"], {}, r"\*\.none: no file matches"),
        (["hollow"], {}, "hollow: a directory without any readable file"),
        (["odd.xyz"], {}, r"odd\.xyz: unknown extension '\.xyz': known are \.jsonl .*`file_format` to text"),
        (["bare"], {}, "bare: unknown extension ''"),
        (["bad.jsonl"], {}, r"bad\.jsonl:3: bad JSON: Expecting value at column 10"),
        (["list.jsonl"], {}, r"list\.jsonl:1: expected a JSON object, found list"),
        (["field.jsonl"], {}, r"field\.jsonl:1: no field 'text': the record has id, body"),
        (["good.jsonl"], {"domain_field": "topic"}, r"good\.jsonl:1: no field 'topic': the record has text"),
        (["number.jsonl"], {}, r"number\.jsonl:1: field 'text' is int, not text"),
        (["blank.jsonl", "empty.txt"], {}, "no documents: every record is empty"),
        (["short.jsonl.xz"], {}, r"short\.jsonl\.xz: cannot read it: Compressed file ended"),
        (["broken.jsonl.gz"], {}, r"broken\.jsonl\.gz: cannot read it: Not a gzipped file"),
        (["good.jsonl"], {"tokenizer": None}, "give either `tokenizer` or `train_tokenizer`"),
        (["good.jsonl"], {"train_tokenizer": 300}, "give either `tokenizer` or `train_tokenizer`"),
        (["good.jsonl"], {"tokenizer": "good.jsonl"}, r"good\.jsonl: cannot load the tokenizer"),
        (["good.jsonl"], {"held_out": 1.0}, r"held_out=1\.0: allowed: from 0 to below 1"),
        (["good.jsonl"], {"held_out": 0.999999999}, "every document was held out"),
        (["good.jsonl"], {"shard_tokens": 0}, "shard_tokens=0: allowed: 1 or more"),
        (["good.jsonl"], {"workers": 0}, "workers=0: allowed: 1 or more"),
        (["good.jsonl"], {"max_record_bytes": 1}, "max_record_bytes=1: allowed: 64 or more"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path: Path, tokenizer: str, monkeypatch, inputs, options, message) -> None:
    write_bad_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        prepare(inputs, tmp_path / "out", **{"tokenizer": tokenizer, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard"), ("hf:org/name", "datasets")]
)
def test_a_missing_extra_is_named(tmp_path: Path, tokenizer: str, monkeypatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.jsonl.zst").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"needs the module {module}: pip install '\.\[data\]'"):
        prepare([name], tmp_path / "out", tokenizer)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path, tokenizer: str) -> None:
    write_documents(tmp_path / "a.jsonl", 5)
    for overwrite in (False, True):
        with pytest.raises(DataError, match="contains other files: choose another directory"):
            prepare([str(tmp_path / "a.jsonl")], tmp_path, tokenizer, overwrite=overwrite)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.json").write_text('{"weight_map": {}}')
    with pytest.raises(DataError, match="contains other files"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "other", tokenizer, overwrite=True)
    with pytest.raises(DataError, match="is not a directory"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "a.jsonl", tokenizer)


def test_an_empty_validation_split_is_said(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "only"}\n')
    with pytest.warns(UserWarning, match="none of 1 documents fell into the held-out"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, held_out=0.001)
    with pytest.raises(DataError, match="has no split 'val': it has train"):
        TokenDataset.open(tmp_path / "out", "val")


@pytest.mark.parametrize(("between", "name"), [("\n\n", "paragraphs"), ("\n", "lines"), ("\r\n \r\n", "paragraphs")])
def test_a_single_text_file_is_divided_so_that_some_is_held_out(
    between: str, name: str, tmp_path: Path, tokenizer: str
) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(between.join(f"Paragraph {i} of a book." for i in range(40)).encode())
    made = prepare([text], tmp_path / "out", tokenizer, held_out=0.5, workers=1)
    train, val = (made.splits[split]["default"]["documents"] for split in ("train", "val"))
    assert train + val == 40 and f"\nheld out: {val} {name} of {text}" in str(made)
    assert prepare([text], tmp_path / "out", tokenizer, held_out=0.5, workers=1).splits == made.splits, "found finished"
    whole = prepare([text], tmp_path / "whole", tokenizer, held_out=0, workers=1)
    assert whole.splits["train"]["default"]["documents"] == 1 and "held out" not in str(whole)
    text.rename(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_text("another")
    both = prepare([tmp_path / "b.txt", tmp_path / "c.txt"], tmp_path / "both", tokenizer, held_out=0.5, workers=1)
    assert "held out" not in str(both), "two files are two documents"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no text in it"),
        (b"\n \n\n", "no text in it"),
        ("Fünf Faden".encode("latin-1"), "is not UTF-8"),
        ("Fünf Faden\n\nund sechs".encode("latin-1"), "is not UTF-8"),
        ("Fünf Faden\nund sechs\n".encode("utf-16"), "is not UTF-8"),
        (b"a single line", "a single line, so no part can be held out: `held_out=0`"),
    ],
)
def test_the_fault_of_a_single_text_file_is_told_first(data: bytes, says: str, tmp_path: Path) -> None:
    """Before the tokenizer is looked for, and before anything is written."""
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(DataError, match=says):
        prepare([tmp_path / "a.txt"], tmp_path / "out", "no/tokenizer")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_not_there_is_told_of_a_single_file_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    with pytest.raises(DataError, match=r"nowhere.*: no such directory or file; as a name on the Hub: "):
        prepare([tmp_path / "a.txt"], tmp_path / "out", str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_imports_are_light() -> None:
    """Nothing optional in this process; in a worker not even torch."""
    program = "import sys, fathom.corpus.prepare, fathom.data.batches; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"datasets", "pyarrow", "zstandard"} & set(modules)
    program = executor.WORKER.replace("serve()", "import sys; print(*sys.modules, file=sys.stderr)")
    arguments = [sys.executable, "-c", program]
    modules = subprocess.run(arguments, capture_output=True, text=True, check=True).stderr.split()
    assert "fathom.corpus.plain" in modules
    assert not {"torch", "transformers"} & set(modules)


def test_a_corpus_below_its_inputs_does_not_read_itself(tmp_path: Path, tokenizer: str) -> None:
    """Beside nothing else a .json is data, and a corpus has some."""
    (tmp_path / "c.json").write_text("".join(json.dumps({"text": f"{i} fathoms"}) + "\n" for i in range(50)))
    first = prepare([tmp_path], tmp_path / "out", tokenizer, held_out=0)
    again = prepare([tmp_path], tmp_path / "out", tokenizer, held_out=0)
    assert first.splits == again.splits and not again.seconds


def test_an_input_that_changed_since_is_named(tmp_path: Path, tokenizer: str, recwarn: pytest.WarningsRecorder) -> None:
    """One of as many bytes looks the same to the index: the corpus stays, and a warning says that it is the older."""
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_text('{"text": "deep"}\n')
    prepare([path], out, tokenizer, held_out=0)
    prepare([path], out, tokenizer, held_out=0)
    assert not recwarn.list
    path.write_text('{"text": "high"}\n')
    after = (out / "index.json").stat().st_mtime_ns + 1
    os.utime(path, ns=(after, after))
    with pytest.warns(UserWarning, match=r"a\.jsonl changed after .*out was made.*`overwrite`"):
        prepare([path], out, tokenizer, held_out=0)
    assert list(documents(out, "train")) == ["deep"]
    prepare([path], out, tokenizer, held_out=0, overwrite=True)
    assert list(documents(out, "train")) == ["high"]


def test_small_files_share_a_task(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the inputs, with the bytes that single tasks give."""
    for number in range(20):
        (tmp_path / f"{number:02}.jsonl").write_text(json.dumps({"text": f"number {number}"}) + "\n")
    inputs = [str(tmp_path / "*.jsonl")]
    done: list[object] = []
    run = plain.Read.run
    monkeypatch.setattr(plain.Read, "run", lambda self, task, folder: [done.append(task), run(self, task, folder)][1])
    prepare(inputs, tmp_path / "out", tokenizer, held_out=0.2, workers=1)
    assert len(done) == 1
    small_tasks(monkeypatch)
    prepare(inputs, tmp_path / "single", tokenizer, held_out=0.2, workers=1)
    assert len(done) == 21 and tree(tmp_path / "out") == tree(tmp_path / "single")


def test_names_that_are_not_utf8(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "in").mkdir()
    for name in (b"caf\xe9.txt", b"b.txt"):
        (tmp_path / "in" / os.fsdecode(name)).write_text("a text of some words")
    assert prepare([str(tmp_path / "in")], tmp_path / "out", tokenizer, held_out=0).splits["train"]


def test_files_are_on_disk_before_the_index_says_so(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path / "a.jsonl", 50)
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: [synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)][1])
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer, held_out=0.2, workers=1)
    files = [path for path in sorted((tmp_path / "out").rglob("*")) if path.is_file() and path.name != "index.json"]
    index = next(at for at, name in enumerate(synced) if ".index.json" in name)
    assert {str(path) for path in files if not path.name.startswith(".")} <= {*synced[:index]}


def test_a_corpus_is_not_lost_for_one_that_cannot_be_made(tmp_path: Path, tokenizer: str, monkeypatch) -> None:
    write_documents(tmp_path / "a.jsonl", 20)
    arguments = [str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer
    prepare(*arguments, held_out=0)
    before = tree(tmp_path / "out")
    with pytest.raises(DataError, match="every document was held out"):
        prepare(*arguments, held_out=0.9999999, overwrite=True)
    assert {name: data for name, data in tree(tmp_path / "out").items() if ".prepare" not in str(name)} == before
    (tmp_path / "b.jsonl").write_text('{"text": "another"}\n' * 9)
    with monkeypatch.context() as damaged:
        damaged.setattr(prepare_module, "file_crc32", lambda path: 0)
        with pytest.raises(DataError, match="corrupt: a checksum does not match"):
            prepare([*arguments[0], str(tmp_path / "b.jsonl")], *arguments[1:], held_out=0, overwrite=True)
    assert tree(tmp_path / "out").items() >= before.items()
    prepare(*arguments, held_out=0)
    (tmp_path / "out" / f".index.json.1{DRAFT}").write_text("{")
    prepare(*arguments, held_out=0, overwrite=True)
    assert tree(tmp_path / "out") == before

"""Inputs and outputs in object stores: the same corpus as from local files, byte for byte."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from fathom.cli.main import main
from fathom.corpus.pipeline import build, preview
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.data.cloud import RemoteFile, find_remote, is_url, local, upload
from fathom.errors import DataError
from tests.corpus.files import epub, write
from tests.corpus.prose import Prose, recipe_values, tree, write_jsonl


def inputs(folder: Path) -> Path:
    """A text, a page, a book, and compressed rows."""
    write(folder / "a.txt", Prose(1).document(80))
    write(folder / "b" / "c.html", f"<p>{Prose(2).document(80)} 2<sup>32</sup></p>")
    write(folder / "b" / "d.epub", epub([f"<p>{Prose(3).document(80)}</p>"]))
    write_jsonl(folder / "e.jsonl", [Prose(seed).document(60) for seed in range(4, 8)])
    return folder


def put(folder: Path, url: str) -> None:
    """The files of a folder in a store."""
    upload(folder, url)


def same_corpus(folder: Path, url: str, tokenizer: str, out: Path) -> None:
    """From a folder and from its copy in a store, and the result copied there."""
    made = {}
    for name, place in (("here", str(folder)), ("there", url)):
        values = recipe_values({"a": {"inputs": [place]}}, ingest={"html": "plain"}, tokenize={"tokenizer": tokenizer})
        made[name] = build(parse_corpus_recipe(values), out / name).directory
    here, there = (tree(made[name]) for name in ("here", "there"))
    made_of = {
        name for name in here if name.startswith("stages/") or name.endswith((".bin", ".idx", ".u8", "tokenizer.json"))
    }
    tasks = {name for name in made_of if name.endswith(("task.json", "manifest.json")) or "/ingest/" in name}
    assert len(made_of - tasks) > 10 and {n: here[n] for n in made_of - tasks} == {
        n: there.get(n) for n in made_of - tasks
    }
    count = upload(made["there"], f"{url}-made", ("stages",))
    found = find_remote(f"{url}-made", lambda _: True, "")
    assert len(found) == count and any(one.url.endswith("shards/index.json") for one in found)
    assert not any("/stages/" in one.url for one in found)
    with local(next(one.url for one in found if one.url.endswith("card.md")), out) as card:
        assert card.read_bytes() == (made["there"] / "card.md").read_bytes()
    assert not list(out.rglob(".input"))


@pytest.mark.slow
def test_memory(tmp_path: Path, tokenizer: str) -> None:
    folder, url = inputs(tmp_path / "in"), "memory://bucket/in"
    put(folder, url)
    same_corpus(folder, url, tokenizer, tmp_path)
    values = recipe_values({"a": {"inputs": [f"{url}/**/*.jsonl"]}}, tokenize={"tokenizer": tokenizer})
    recipe = parse_corpus_recipe(values)
    assert preview(recipe, tmp_path / "new").inputs["a"].files == 1
    first = build(recipe, tmp_path / "glob").stages["ingest"]
    assert (first.counts["ok"], first.done) == (4, 1) and build(recipe, tmp_path / "glob").stages["ingest"].done == 0
    (tmp_path / "more").mkdir()
    put(write_jsonl(tmp_path / "more" / "e.jsonl", [Prose(9).document(60)]).parent, url)
    assert build(recipe, tmp_path / "glob").stages["ingest"].counts["ok"] == 1


def test_prepare_reads_and_writes(tmp_path: Path, tokenizer: str) -> None:
    folder, url = inputs(tmp_path / "in"), "memory://shelf/in"
    put(folder, url)
    for name, place in (("here", str(folder)), ("there", url)):
        words = [f"{place}/a.txt", f"{place}/e.jsonl", "--tokenizer", tokenizer, "--held-out", "0", "--workers", "1"]
        assert main(["prepare", *words, "--out", str(tmp_path / name), "--upload", f"memory://shelf/{name}"]) == 0
    train = [
        sorted((one.path.name, one.size) for one in find_remote(f"memory://shelf/{name}/train", lambda _: True, ""))
        for name in ("here", "there")
    ]
    assert train[0] == train[1] != []
    assert tree(tmp_path / "here" / "train") == tree(tmp_path / "there" / "train")


def test_an_upload_to_nowhere_is_refused_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write(tmp_path / "a.txt", "the depth\n\nof a river\n")
    recipe = write(tmp_path / "r.yaml", f"collections: {{a: {{inputs: [{text}]}}}}\ntokenize: {{train: 300}}\n")
    for url in ("shelf", "nowhere://shelf/a"):
        for words in (["prepare", str(text), "--train-tokenizer", "300"], ["corpus", str(recipe)]):
            assert main([*words, "--out", str(tmp_path / "out"), "--upload", url]) == 2
            assert url in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://nothing/here.jsonl", "no such file"),
        ("memory://nothing/*.jsonl", "no file matches"),
        ("nowhere://a/b.txt", "nowhere"),
    ],
)
def test_a_store_that_lacks_it_is_one_line(url: str, said: str, tmp_path: Path) -> None:
    recipe = parse_corpus_recipe(recipe_values({"a": {"inputs": [url]}}))
    with pytest.raises(DataError, match=said) as error:
        build(recipe, tmp_path / "out")
    assert "\n" not in str(error.value) and url.partition("*")[0] in str(error.value)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/x.txt", b"four")
    assert RemoteFile("memory://a", 4, "1").identity() != RemoteFile("memory://a", 4, "2").identity()
    with pytest.raises(DataError, match="changed since"), local("memory://bucket/x.txt", tmp_path, 5):
        pass
    assert list(tmp_path.iterdir()) == [] and is_url("s3://a") and not is_url("C:/a") and not is_url("hf:a/b")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> Iterator[None]:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    fsspec.config.set_conf_env(fsspec.config.conf, os.environ)
    yield
    for kind in ("s3", "gs", "gcs"):
        fsspec.config.conf.pop(kind, None)


@pytest.mark.slow
def test_s3(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against moto's server."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=(port := free_port()))
    server.start()
    try:
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        with environment(monkeypatch, **keys, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}"):
            fsspec.filesystem("s3").mkdir("bucket")
            put(inputs(tmp_path / "in"), "s3://bucket/in")
            same_corpus(tmp_path / "in", "s3://bucket/in", tokenizer, tmp_path)
            with pytest.raises(DataError, match="s3://nobody/x"):
                find_remote("s3://nobody/x", lambda _: True, "")
    finally:
        server.stop()


@pytest.mark.slow
def test_gs(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against gcp-storage-emulator, which lacks the gRPC interface that gcsfs asks for the kind of a bucket."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs")
    server = pytest.importorskip("gcp_storage_emulator.server")
    emulator = server.create_server("127.0.0.1", port := free_port(), in_memory=True, default_bucket="bucket")
    emulator.start()
    try:
        with environment(monkeypatch, STORAGE_EMULATOR_HOST=f"http://127.0.0.1:{port}", FSSPEC_GS_TOKEN="anon"):
            put(inputs(tmp_path / "in"), "gs://bucket/in")
            same_corpus(tmp_path / "in", "gs://bucket/in", tokenizer, tmp_path)
    finally:
        emulator.stop()

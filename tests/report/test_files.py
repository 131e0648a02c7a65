"""Locks that tell a holder from a file system without locks; files that are replaced whole."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import filelock._unix
import numpy as np
import pytest
from safetensors.numpy import save_file

import fathom
from fathom.errors import HeldError
from fathom.lineage import nulls
from fathom.report import files
from fathom.report.files import Digest, as_usual, asdict, digest, lock, read_json, write_atomically, write_json


def hold_and_die(path: Path) -> None:
    lock(path).__enter__()
    os._exit(9)


def other_process(path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=hold_and_die, args=(path,))
    process.start()
    process.join(60)


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    with lock(tmp_path / "x"):
        with pytest.raises(HeldError) as caught, lock(tmp_path / "x"):
            pass
        assert caught.value.advice == "", "nothing to do by hand: the system frees it"
    with lock(tmp_path / "x"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    other_process(tmp_path / "x")
    with lock(tmp_path / "x"):
        pass


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_called_held(tmp_path: Path, monkeypatch, code: int) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(filelock._unix.fcntl, "flock", flock)
    with lock(tmp_path / "x"):
        # The marker that stands in for the lock keeps a second process out, and is named, for a crash leaves it behind.
        with pytest.raises(HeldError, match=f"if that process has ended, delete {tmp_path}/x") as caught:
            lock(tmp_path / "x").__enter__()
        assert Path(caught.value.advice.rpartition(" ")[2]).exists()
    assert not list(tmp_path.iterdir())


def test_other_errors_stay_what_they_are(tmp_path: Path, monkeypatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(filelock._unix.fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output error"), lock(tmp_path / "x"):
        pass


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch) -> None:
    write_json(tmp_path / "a.json", {"x": "水"})
    before = (tmp_path / "a.json").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(files.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
        write_json(tmp_path / "a.json", {"x": 2})
    assert (tmp_path / "a.json").read_bytes() == before
    assert digest(tmp_path / "a.json") == Digest(len(before), hashlib.sha256(before).hexdigest())


@pytest.mark.parametrize("write", [write_json, nulls.write], ids=["json", "null"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch, write: Callable[[Path, dict], object]) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(files.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
        write(path, {})
    assert path.read_text() == "old"


def test_weights_have_the_permissions_of_other_files(tmp_path: Path) -> None:
    """safetensors gives its files to the owner alone; whoever writes one says otherwise."""
    old = os.umask(0o027)
    try:
        save_file({"x": np.ones(2)}, tmp_path / "a.safetensors")
        assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o600, "safetensors itself does it now"
        as_usual(tmp_path / "a.safetensors")
    finally:
        os.umask(old)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640 and len(list(tmp_path.iterdir())) == 1
    writers = [path for path in Path(fathom.__file__).parent.rglob("*.py") if "save_file(" in path.read_text("utf-8")]
    assert writers and all("as_usual(" in path.read_text("utf-8") for path in writers)


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    write_json(tmp_path / "some" / "where" / "a.json", {})
    assert read_json(tmp_path / "some" / "where" / "a.json") == {}


def test_only_an_object_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", [1])
    with pytest.raises(ValueError, match=r"a\.json is not a JSON object"):
        read_json(tmp_path / "a.json")


def test_what_is_not_a_number_becomes_null() -> None:
    assert asdict({"a": (1.0, float("inf")), "b": [float("nan"), "x"]}) == {"a": [1.0, None], "b": [None, "x"]}


def test_what_cannot_be_replaced_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(IsADirectoryError) as failed:
        write_atomically(tmp_path / "page.html", "new")
    assert failed.value.filename == str(tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]

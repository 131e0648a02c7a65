"""Repositories over HTTP range requests, from a server on loopback that counts what it sends."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from fathom.checkpoints import origin as origins
from fathom.checkpoints.origin import RemoteOrigin
from fathom.cli import lineage as commands
from fathom.errors import ModelError
from fathom.lineage import comparison
from fathom.lineage.comparison import Options, measure
from fathom.lineage.weights import holding, open_weights
from tests.lineage.zoo import build, save, tiny_config

from .hub_server import commit, running

COMMIT = commit("main")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """Two related models whose layers are a small part of what is in the files, as in fast mode at real size; and two
    of few layers."""
    root = tmp_path_factory.mktemp("hub")
    for seed, name in enumerate(("few", "others")):
        save(build(tiny_config("qwen3"), seed, torch.bfloat16), root / "org" / name / "main", 512)
    config = tiny_config("qwen3", num_hidden_layers=24, intermediate_size=640)
    for seed, name in enumerate(("base", "other")):
        model = build(config, seed, torch.bfloat16)
        save(model, root / "org" / name / "main", 512)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    save(model, root / "org" / "child" / "main", 512)
    return root


@pytest.fixture
def hub(repositories, monkeypatch):
    monkeypatch.setattr(origins.time, "sleep", lambda _: None)
    with running(repositories) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_remote_model_is_the_local_one(hub, repositories):
    remote, local = open_weights("org/base@main"), open_weights(repositories / "org" / "base" / "main")
    for role, layer in (("q", 3), ("down", 0), ("embed", None)):
        assert np.array_equal(remote.tensor(role, layer), local.tensor(role, layer))
    assert remote.vocabulary() == local.vocabulary()
    rows = np.array([1, 5, 6, 400])
    assert np.array_equal(remote.tensor("embed", rows=rows), local.tensor("embed", rows=rows))


def test_the_ledger_counts_what_the_server_sent(hub):
    remote = open_weights("org/base")
    remote.tensor("q", 1)
    assert remote.origin.bytes_read == hub.sent > 0
    assert remote.file_bytes > 2 * hub.sent


@pytest.mark.slow
@pytest.mark.parametrize(("one", "share"), [("other", 0.39), ("base", 0.66)])
def test_fast_mode_moves_a_part_of_the_bytes(hub, monkeypatch, one, share):
    """With the limits of a large model, a related pair over loopback reads two fifths of its files: pairing neurons
    takes three matrices of a layer. Of strangers the blind frame reads fifteen layers more."""
    monkeypatch.setattr("fathom.lineage.comparison.SMALL_BYTES", 0)
    models = open_weights(f"org/{one}"), open_weights("org/child")
    with holding(*models):
        pair = measure(*models, Options())
    assert (pair.scores["awm_canonical"].score < 0.2) == (one == "base")
    assert len(pair.scores["awm_canonical"].pairs) == 12
    total = sum(w.file_bytes for w in models)
    assert hub.sent <= share * total + 2 * 60_000  # and two tokenizers with configs and headers, fixed costs


def test_later_reads_stay_on_the_commit_that_answered_first(hub):
    remote = open_weights("org/base@main")
    assert remote.origin.revision == COMMIT
    before = len(hub.log)
    remote.tensor("q", 0)
    assert len(hub.log) > before and all(f"/{COMMIT}/" in path for path, _ in hub.log[before:])


def test_a_token_goes_to_the_endpoint_only(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "not-a-real-token")
    hub.redirect = True
    open_weights("org/base")
    carried = {("blobs" in path, "Authorization" in headers) for path, headers in hub.log}
    assert carried == {(False, True), (True, False)}


@pytest.mark.quick("logged in")
@pytest.mark.parametrize("known", [True, False], ids=["logged in", "not logged in"])
def test_a_gated_repository_opens_with_the_token_of_a_login(hub, tmp_path, known):
    """The file that `hf auth login` writes; where the endpoint sends us on, nothing of it is said."""
    hub.gate, hub.redirect = "Bearer not-a-real-token", True
    if known:
        (tmp_path / "token").write_text("not-a-real-token\n")
    hidden = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_OIDC_RESOURCE")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"HF_HOME": str(tmp_path)}
    code = "from fathom.lineage.weights import open_weights; print(open_weights('org/base').origin.revision)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    if not known:
        assert done.returncode and "the endpoint answers 401" in done.stderr and "`hf auth login`" in done.stderr
        assert "HF_TOKEN" in done.stderr
        return
    assert done.stdout.strip() == COMMIT, done.stderr
    carried = {("blobs" in path, headers.get("Authorization")) for path, headers in hub.log}
    assert carried == {(False, "Bearer not-a-real-token"), (True, None)}


def test_a_hiccup_is_retried_and_an_outage_is_told(hub):
    hub.fail = 2
    open_weights("org/base")
    hub.fail = 99
    with pytest.raises(ModelError, match="503"):
        open_weights("org/base")


@pytest.mark.parametrize("where", ["org/missing", "org/base@nobranch/../..", "org/ba se"])
def test_what_is_not_there_is_refused(hub, where):
    with pytest.raises((ModelError, FileNotFoundError)):
        open_weights(where)


def test_a_server_without_ranges_is_refused_before_its_files_are_read(hub):
    hub.ranges = False
    with pytest.raises(ModelError, match="ignores range requests"):
        open_weights("org/base")


def test_local_directories_win_and_endpoints_must_be_http(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match=r"http\(s\)"):
        RemoteOrigin("org/base", endpoint="file:///etc")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "base").mkdir(parents=True)
    with pytest.raises(ModelError, match="no safetensors weights"):
        open_weights("org/base")


@pytest.mark.slow
def test_a_report_on_a_repository_is_verified_at_its_commit(hub, repositories, tmp_path):
    result = commands.compare("org/few@main", "org/others", out=tmp_path / "out")
    assert result.data["inputs"][0]["revision"] == COMMIT and result.data["inputs"][0]["content"]["root"] is None
    hub.log.clear()
    again = commands.verify(tmp_path / "out" / "report.json")
    assert again.exit_code == 0, again.text
    assert f"not recomputed: org/few@main: the files behind commit {COMMIT}" in again.text
    assert hub.log and all(f"/resolve/{COMMIT}/" in path for path, _ in hub.log)


def distinct(log: list[tuple[str, dict[str, str]]]) -> int:
    """Bytes that a client asked for at least once."""
    asked = []
    for path, headers in log:
        start, stop = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", headers["Range"]).groups())
        asked.append((path.rpartition("/")[2] + path.split("/")[2], start, stop + 1))
    total, last, end = 0, "", 0
    for file, start, stop in sorted(asked):
        begin = max(start, end if file == last else 0)
        total, last, end = total + max(0, stop - begin), file, max(begin, stop)
    return total


@pytest.mark.quick("small-few")
@pytest.mark.parametrize(
    ("size", "other"),
    [("small", "few"), ("small", "base"), ("small", "child"), ("large", "base"), ("large", "child")],
)
def test_a_comparison_moves_each_byte_once(hub, monkeypatch, size, other):
    """Portraits included; of large models what is looked at. Bytes are read again from where they were kept."""
    if size == "large":
        monkeypatch.setattr("fathom.lineage.comparison.SMALL_BYTES", 0)
        monkeypatch.setattr(RemoteOrigin, "gap_bytes", 0)
    commands.compare("org/others@main" if other == "few" else "org/other@main", f"org/{other}")
    assert hub.sent <= 1.01 * distinct(hub.log)


def test_each_byte_of_a_small_model_is_read_from_disk_once(repositories):
    models = [open_weights(repositories / "org" / name / "main") for name in ("few", "others")]
    comparison.compare(*models)
    for one in models:
        assert one.origin.bytes_read <= 1.05 * sum(one.origin.size(name) for name in one.origin.names())


@pytest.mark.parametrize("spill", [False, True], ids=["memory", "disk"])
def test_a_shelf_returns_what_a_file_holds_and_fetches_only_what_is_new(spill):
    draw, whole, fetched = np.random.default_rng(0), bytes(range(256)), []

    def fetch(path: str, start: int, stop: int) -> bytearray:
        fetched.append((start, stop))
        return bytearray(whole[start:stop])

    shelf = origins.Shelf(spill)
    for _ in range(200):
        start, stop = sorted(draw.integers(0, 257, 2).tolist())
        assert shelf.read("file", start, stop, fetch) == whole[start:stop]
    assert sum(stop - start for start, stop in fetched) == len({at for part in fetched for at in range(*part)}) <= 256

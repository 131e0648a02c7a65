"""Names of the Hub wherever a directory is taken, against a small Hub on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from fathom.checkpoints import hub
from fathom.cli.main import main
from fathom.errors import ModelError
from fathom.recipe import load_recipe, parse_recipe
from tests.tiny import export_tiny, tiny_recipe

from .hub_server import Hub, running


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a pickle beside it, another revision of it, and a repository of pickles alone."""
    root = tmp_path_factory.mktemp("repositories")
    export_tiny(root / "org/tiny/main")
    export_tiny(root / "org/tiny/v2", num_hidden_layers=2)
    shutil.copytree(root / "org/tiny/main", root / "org/pickled/main", ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("tiny", "pickled"):
        (root / "org" / name / "main/pytorch_model.bin").write_bytes(b"a pickle")
    return root


@pytest.fixture
def served(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub._snapshot.cache_clear()
    with running(repositories) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        where = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", where)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield server
    hub._snapshot.cache_clear()


def test_revisions_and_what_is_downloaded(served: Hub) -> None:
    main_, other = (json.loads((hub.local(name) / "config.json").read_text()) for name in ("org/tiny", "org/tiny@v2"))
    assert (main_["num_hidden_layers"], other["num_hidden_layers"]) == (4, 2)
    assert "model.safetensors" in served.files
    assert not [name for name in served.files if name.endswith((".bin", ".py", ".md"))]
    hub.local("org/tiny", code=True)
    assert "modeling.py" in served.files


def test_check_downloads_the_configuration_alone(served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "org/tiny"]) == 2
    assert "org/tiny is an export of Fathom" in capsys.readouterr().err
    assert "config.json" in served.files and not [name for name in served.files if "safetensors" in name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/none", "has no such repository"),
        ("org/tiny@v9", "has no revision v9 of org/tiny"),
        ("org/pickled", "holds no safetensors weights"),
    ],
)
def test_refusals_are_one_line(served: Hub, capsys: pytest.CaptureFixture[str], name: str, says: str) -> None:
    for words in (["generate", name, "hi"], ["export", name, "--to", "new"], ["lens", name, "hi"]):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"fathom: {name}") and says in line, line
    assert not [name for name in served.files if name.endswith(".bin")]


def test_offline_is_one_line_unless_the_cache_has_it(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hub.local("org/tiny")
    hub._snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.local("org/tiny") == first
    with pytest.raises(
        ModelError, match=r"^org/tiny@v2: .*HF_HUB_OFFLINE is set; the cache does not hold the model either$"
    ):
        hub.local("org/tiny@v2")


def test_a_hub_that_does_not_answer_is_one_line(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ModelError, match=r"^org/tiny: .*it cannot be reached; the cache does not hold the model either$"
    ):
        hub.local("org/tiny")


def test_paths_are_no_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what exists nor a misspelt run asks the Hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/tiny").mkdir(parents=True)
    assert [hub.repository(name) for name in ("org/tiny", "org/tyni", "./a/b", "tiny", "/a/b", "a/b/c")] == [None] * 6
    assert hub.repository("other/tiny@v2") == ("other/tiny", "v2")


def test_every_command_takes_a_name(served: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("To fathom a thing is to measure its depth.\n" * 40)
    for words in (
        ["generate", "org/tiny", "To fathom", "--max-new-tokens", "2"],
        ["evaluate", "org/tiny", "--perplexity", "text.txt"],
        ["lens", "org/tiny@v2", "To fathom"],
        ["export", "org/tiny", "--to", "exported"],
        ["prepare", "text.txt", "--tokenizer", "org/tiny", "--held-out", "0", "--out", "corpus", "--workers", "1"],
    ):
        assert main(words) == 0, capsys.readouterr().err
    assert (tmp_path / "exported/model.safetensors").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)


def test_lineage_reads_repositories_by_ranges(served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is downloaded whole: the weights that the scores need are asked for by their bytes."""
    assert main(["lineage", "compare", "org/tiny", "org/tiny@v2", "--json"]) == 0
    told = capsys.readouterr().out
    assert '"org/tiny"' in told and '"org/tiny@v2"' in told
    assert main(["lineage", "card", "org/tiny", "--out", "card.json"]) == 0, capsys.readouterr().err
    assert not [name for name in served.files if name.endswith(".bin")]
    assert main(["lineage", "compare", "org/tiny", "org/nowhere"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "fathom: org/nowhere@main: no safetensors weights"


@pytest.mark.slow
def test_a_repository_is_served(served: Hub, tmp_path: Path) -> None:
    """From the name to an answer, in a process of its own."""
    command = [sys.executable, "-m", "fathom", "serve", "org/tiny@v2", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        where = re.search(r"http://[\w.]+:\d+", first)
        assert where is not None, first
        body = json.dumps({"prompt": "the depth", "max_tokens": 2}).encode()
        asked = urllib.request.Request(f"{where[0]}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
        process.terminate()
        assert process.wait(60) == 0
    assert "model.safetensors" in served.files


def test_training_begins_with_a_repository(served: Hub, corpus: Path, tmp_path: Path) -> None:
    values = {**tiny_recipe(corpus).to_dict(), "model": {"from_pretrained": "org/tiny@v2"}}
    recipe = parse_recipe(values, ["data.other_tokenizer=true", "train.steps=1", "evaluate.every=0"])
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    assert main(["train", "r.yaml", "--run", "run"]) == 0
    kept = load_recipe(tmp_path / "run/recipe.yaml")
    assert kept.model["from_pretrained"] == "org/tiny@v2" and kept.config().num_hidden_layers == 2

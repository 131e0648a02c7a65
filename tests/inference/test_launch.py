"""How `fathom serve` starts, or says why it does not; that it serves and ends is part of `test_server.py`."""

import json
import shutil
import socket
import warnings
from types import SimpleNamespace

import pytest

from fathom.cli.main import main
from fathom.inference import launch
from fathom.inference.sampling import Choice
from fathom.inference.settings import refused
from tests.tiny import export_tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("launch") / "tiny", max_position_embeddings=8192)


def test_asked_wrongly(directory, capsys, monkeypatch):
    def refused(*words):
        assert main(["serve", *words]) == 2
        return capsys.readouterr().err

    assert "no such directory" in refused("nowhere", "--port", "0")
    assert "the API key is empty" in refused(str(directory), "--api-key", "")
    never_sent = ("https://app.example:443", "http://app.example:80", "https://bücher.example", "https://app.example:")
    for origin in ("app.example", "https://app.example/page", "HTTPS://app.example", "https://*", *never_sent):
        assert "allowed: * or a scheme and a host" in refused(str(directory), "--allow-origin", origin)
    assert "allowed: auto" in refused(str(directory), "--port", "0", "--dtype", "int3")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen on 127.0.0.1" in refused(str(directory), "--port", str(taken.getsockname()[1]))
    assert "has no loop iterations" in refused(str(directory), "--port", "0", "--speculate", "--device", "cpu")
    assert "leave out --kvcache" in refused("nowhere", "--speculate", "--kvcache", "sinks", "--kvcache-window", "9")
    assert "allowed: 0 to 65535" in refused(str(directory), "--port", "99999")
    assert "cannot listen on 192.0.2.1" in refused(str(directory), "--port", "0", "--host", "192.0.2.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused("nowhere", "--port", "0")
    with pytest.warns(UserWarning, match="any client that reaches this machine can use the model"):
        refused("nowhere", "--port", "0", "--host", "0.0.0.0")
    monkeypatch.setenv("FATHOM_API_KEY", "secret")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused("nowhere", "--port", "0", "--host", "0.0.0.0")


def test_the_process_ends_with_its_engine(directory, capsys, monkeypatch):
    """With code 1, so that a supervisor starts it again; told to stop, it ends with 0."""
    words = ["serve", str(directory), "--port", "0", "--device", "cpu"]
    with monkeypatch.context() as planted:
        planted.setattr(launch.Engine, "_serve", lambda self: 1 / 0)
        planted.setattr(launch.Service, "lay_out", lambda self, wanted: None)
        assert main(words) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "fathom: the engine failed: ZeroDivisionError"
    monkeypatch.setattr(launch._Server, "startup", lambda self, sockets: self.engine.close() or stop(self))
    assert main(words) == 0


async def stop(running):
    running.should_exit = True
    running.servers = []


def test_the_layout_is_timed_unless_it_is_named(monkeypatch):
    asked = []
    monkeypatch.setattr(launch, "serve", lambda *given: asked.append(given[-1]))
    for words in ([], ["--layout", "plain"]):
        assert main(["serve", "somewhere", *words]) == 0
    assert [options.layout for options in asked] == ["auto", "plain"]


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"typical_p": 0.5, "num_beams": 1}, ["typical_p=0.5"]),
        ({"forced_eos_token_id": 0}, ["forced_eos_token_id=0"]),
        ({"bad_words_ids": [[5, 6]]}, ["bad_words_ids=[[5, 6]]"]),
        ({"bad_words_ids": [[i, 7] for i in range(90)], "num_beams": 2}, ["num_beams=2", "bad_words_ids (90 of them)"]),
        ({"max_time": 2.0}, ["max_time=2.0"]),
        ({"no_repeat_ngram_size": 0, "suppress_tokens": [], "top_k": 5, "stop_strings": ["a"]}, []),
        ({"penalty_alpha": 0.0, "token_healing": True}, []),  # fathom generate heals none either
    ],
)
def test_a_checkpoints_settings_that_are_not_done_are_named(own, named):
    assert Choice.left_out(SimpleNamespace(**own)) == named


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: allowed: a number, 0 or more"),
        ({"top_k": -1}, "top_k=-1: allowed: a whole number, 0 or more"),
        ({"top_k": 2.5}, "top_k=2.5: allowed: a whole number"),
        ({"top_k": 50.0, "top_p": 0, "temperature": 0.0}, None),
        ({"min_p": 2}, "min_p=2: allowed: a number, 0 to 1"),
        ({"top_p": float("nan")}, "top_p=nan: allowed: a number, 0 to 1"),
        ({"repetition_penalty": 1e-320}, "allowed: a number, 1e-06 to 1e+09"),
        ({"pad_token_id": "x"}, "pad_token_id='x': allowed: a token id or a list of them"),
    ],
)
def test_a_checkpoints_settings_out_of_range_are_refused(own, said):
    """Before a request meets them: it failed, and those that were answered beside it."""
    fault = refused(SimpleNamespace(**own))
    assert fault is None if said is None else fault.startswith("generation_config.json: ") and said in fault


@pytest.mark.slow
def test_both_commands_read_a_checkpoints_settings(directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch._Server, "run", lambda self, sockets: self.engine.close())
    there = shutil.copytree(directory, tmp_path / "tiny")
    file = there / "generation_config.json"
    before = json.loads(file.read_text())
    serve, generate = ["serve", str(there), "--port", "0", "--device", "cpu"], ["generate", str(there), "a"]
    file.write_text(json.dumps(before | {"max_time": 2.0}))
    assert main(serve) == 0
    assert "warning: generation_config.json: max_time=2.0 is not supported" in capsys.readouterr().err
    file.write_text(json.dumps(before | {"do_sample": True, "min_p": 2}))
    for words in (serve, [*generate, "--device", "cpu"]):
        assert main(words) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("fathom: generation_config.json: min_p=2: allowed")

"""How `fathom serve` starts, or says why it does not; that it serves and ends is part of `test_server.py`."""

import json
import shutil
import socket
import warnings

import pytest

from fathom.cli.main import main
from fathom.inference import launch
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


def test_packed_unless_told(monkeypatch):
    asked = []
    monkeypatch.setattr(launch, "serve", lambda *given: asked.append(given[-1]))
    for words in ([], ["--no-pack"]):
        assert main(["serve", "somewhere", *words]) == 0
    assert [options.pack for options in asked] == [True, False]


@pytest.mark.parametrize(
    ("own", "warned"),
    [
        ({"typical_p": 0.5, "num_beams": 1}, "generation_config.json: typical_p=0.5 is not supported"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id=0 is not supported"),
        ({"bad_words_ids": [[5, 6]]}, "bad_words_ids=[[5, 6]] is not supported"),
        (
            {"bad_words_ids": [[i, 7] for i in range(3, 90)], "num_beams": 2},
            "num_beams=2, bad_words_ids (87 of them) is not supported",
        ),
        ({"max_time": 2.0}, "max_time=2.0 is not supported"),
        ({"no_repeat_ngram_size": 0, "suppress_tokens": [], "top_k": 5, "stop_strings": ["a"]}, None),
        ({"penalty_alpha": 0.0, "token_healing": True}, None),  # fathom generate heals none either
    ],
)
def test_a_checkpoints_settings_that_are_not_done_are_named(directory, tmp_path, capsys, monkeypatch, own, warned):
    monkeypatch.setattr(launch._Server, "run", lambda self, sockets: self.engine.close())
    there = shutil.copytree(directory, tmp_path / "tiny")
    file = there / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    assert main(["serve", str(there), "--port", "0", "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert warned in said if warned else "warning" not in said


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: allowed: a number, 0 or more"),
        ({"top_k": -1}, "top_k=-1: allowed: a whole number, 0 or more"),
        ({"top_k": 2.5}, "top_k=2.5: allowed: a whole number"),
        ({"min_p": 2}, "min_p=2: allowed: a number, 0 to 1"),
        ({"top_p": float("nan")}, "top_p=nan: allowed: a number, 0 to 1"),
        ({"repetition_penalty": 1e-320}, "allowed: a number, 1e-06 to 1e+09"),
    ],
)
def test_a_checkpoints_settings_out_of_range_are_refused(directory, tmp_path, capsys, own, said):
    """Before a request meets them: it failed, and those that were answered beside it."""
    there = shutil.copytree(directory, tmp_path / "tiny")
    file = there / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sample": True, **own}))
    for words in (["serve", str(there), "--port", "0"], ["generate", str(there), "a"]):
        assert main([*words, "--device", "cpu"]) == 2
        shown = capsys.readouterr().err
        assert shown.splitlines()[-1].startswith("fathom: generation_config.json: ") and said in shown

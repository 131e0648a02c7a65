"""A commitment holds for the files it was made of; what it publishes gives its root; products are checked exactly."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from fathom.cli import lineage as commands
from fathom.errors import ModelError
from fathom.lineage.publishing import commitments
from tests.lineage.zoo import build, save, tiny_config


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    for seed, name in enumerate(("base", "stranger")):
        save(build(tiny_config("qwen3"), seed, torch.float32), root / name, 512)
    return root


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_commitment_covers_config_and_tokenizer(family, tmp_path, blind, file):
    model = tmp_path / "model"
    model.mkdir()
    for path in (family / "base").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    key = tmp_path / "key" if blind else None
    assert commands.commit(str(model), tmp_path / "c.json", blind=blind, key_out=key).exit_code == 0
    assert commands.verify(tmp_path / "c.json", str(model), key).exit_code == 0
    if file == "config.json":
        config = json.loads((model / file).read_text()) | {"rms_norm_eps": 0.5}
        (model / file).write_text(json.dumps(config))
    else:
        (model / file).write_bytes((family / "stranger" / file).read_bytes() + (b" " if "json" in file else b""))
    result = commands.verify(tmp_path / "c.json", str(model), key)
    assert result.exit_code == 1 and (blind or ("changed" if file == "model.safetensors" else file) in result.text)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda body: body.update(leaves={n: "00" * 32 for n in body["leaves"]}), "do not give its root"),
        (lambda body: body["leaves"].popitem(), "do not give its root"),
        (lambda body: body.update(tensors=3), "it speaks of 3 tensors"),
        (lambda body: body.update(leaves={}), "publishes no leaves"),
        (lambda body: body.update(leaves={"a": "zz"}), "not hashes"),
        (lambda body: body.update(sketch="zz"), "not hexadecimal"),
    ],
)
def test_what_a_commitment_publishes_must_give_its_root(family, tmp_path, change, why):
    commands.commit(str(family / "base"), tmp_path / "c.json")
    body = json.loads((tmp_path / "c.json").read_text())
    change(body)
    (tmp_path / "c.json").write_text(json.dumps(body))
    result = commands.verify(tmp_path / "c.json", str(family / "base"))
    assert result.exit_code == 1 and why in result.text


def test_a_blinded_commitment_says_nothing_without_its_key(family, tmp_path):
    made = [
        commands.commit(
            str(family / "base"), tmp_path / name, owner="Ada", blind=True, key_out=tmp_path / f"{name}.key"
        )
        for name in ("c.json", "d.json")
    ]
    assert not {"leaves", "sketch"} & set(made[0].data) and made[0].data["root"] != made[1].data["root"]
    with pytest.raises(ModelError, match="needs its key"):
        commands.verify(tmp_path / "c.json", str(family / "base"))
    (tmp_path / "key").write_text("not a key")
    with pytest.raises(ModelError, match="hexadecimal"):
        commands.verify(tmp_path / "c.json", str(family / "base"), tmp_path / "key")
    (tmp_path / "c.json").write_text(json.dumps({**made[0].data, "owner": "Eve"}))
    assert commands.verify(tmp_path / "c.json", str(family / "base"), tmp_path / "c.json.key").exit_code == 1


def test_merkle_root_by_hand():
    a, b, c = (sha256(x).digest() for x in (b"a", b"b", b"c"))
    ab = sha256(b"\1" + a + b).digest()
    assert commitments.merkle_root([a]) == a
    assert commitments.merkle_root([a, b, c]) == sha256(b"\1" + ab + c).digest()
    assert commitments.merkle_root([a, b]) != commitments.merkle_root([b, a])


def relabelled(body):
    body["leaves"] = {f"innocent_{i}": value for i, value in enumerate(body["leaves"].values())}


def swapped(body):
    (one, a), (two, b), *rest = body["leaves"].items()
    body["leaves"] = {two: a, one: b, **dict(rest)}


LIES = {
    "leaves under other names": relabelled,
    "two names swapped": swapped,
    "another owner": lambda body: body.update(owner="somebody else"),
    "another day": lambda body: body.update(date="2019-01-01"),
    "no sketch": lambda body: body.pop("sketch"),
    "another tool": lambda body: body.update(tool="9.9"),
    "an entry that nothing binds": lambda body: body.update(licence="MIT"),
}


@pytest.mark.parametrize("lie", LIES)
def test_every_word_of_a_commitment_is_bound(family, tmp_path, lie):
    body = dict(commands.commit(str(family / "base"), tmp_path / "c.json", owner="Ada", date="2026-11-25").data)
    assert commands.verify(tmp_path / "c.json", str(family / "base")).exit_code == 0
    LIES[lie](body)
    (tmp_path / "c.json").write_text(json.dumps(body))
    try:
        result = commands.verify(tmp_path / "c.json", str(family / "base"))
    except ModelError as error:
        assert "'licence' is no entry" in str(error)
        return
    assert result.exit_code == 1 and result.text.splitlines()[0] == "does not hold"


def test_a_date_is_a_day(family, tmp_path):
    with pytest.raises(ModelError, match="wanted a day"):
        commands.commit(str(family / "base"), tmp_path / "c.json", date="yesterday")

"""A commitment holds for the files it was made of; what it publishes gives its root; products are checked exactly."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fathom.checkpoints.origin import Refused
from fathom.cli import lineage as commands
from fathom.lineage import commitments
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
    assert result.exit_code == 1 and (blind or file == "model.safetensors" or file in result.text)


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


def test_a_key_that_is_none_is_one_line(family, tmp_path):
    commands.commit(str(family / "base"), tmp_path / "c.json", blind=True, key_out=tmp_path / "key")
    (tmp_path / "key").write_text("not a key")
    with pytest.raises(Refused, match="hexadecimal"):
        commands.verify(tmp_path / "c.json", str(family / "base"), tmp_path / "key")


def test_freivalds_is_about_integers():
    """No modulus to hide behind, no rounding: a claim off by any number in any entry fails."""
    draw = np.random.default_rng(0)
    factors = [draw.integers(-(1 << 62), 1 << 62, (6, 6)) for _ in range(3)]
    claim = functools.reduce(np.matmul, [factor.astype(object) for factor in factors])
    assert commitments.freivalds(claim, factors, draw)
    for off in (1, -1, (1 << 31) - 1, (1 << 61) - 1, 1 << 64, 1 << 200):
        wrong = claim.copy()
        wrong[2, 3] += off
        assert not commitments.freivalds(wrong, factors, draw), off
    for floats in (claim.astype(float), np.array([[0.9]]), np.ones((2, 2), bool)):
        with pytest.raises(Refused, match="integer"):
            commitments.freivalds(floats, factors, draw)

"""Damaged inputs of every kind: an answer or one line of refusal, in bounded time and memory."""

from __future__ import annotations

import copy
import functools
import json
import resource
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fathom.cli import lineage as commands
from fathom.errors import FathomError, ModelError
from fathom.lineage import comparison
from fathom.lineage.publishing import verification
from fathom.lineage.weights import open_weights
from tests.lineage.test_weights import as_gguf, gguf
from tests.lineage.zoo import COMMON, build, save, save_adapter, tiny_config

SECONDS, GROWTH = 20, 1 << 20  # of one input; kilobytes over all
ODD = (None, True, -1, 0, 1, 3, 1 << 31, 1 << 62, -0.5, 1e308, "", "llama", "x" * 300, [], [1], {}, {"a": 1}, "../x")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One undamaged input of each kind."""
    root = tmp_path_factory.mktemp("whole")
    for seed, name in enumerate(("base", "other", "third")):
        save(build(tiny_config("llama", **COMMON, head_dim=8), seed, torch.float32), root / name, 96)
    save_adapter(root / "adapter", 32, base_model_name_or_path=str(root / "base"))
    commands.attack(str(root / "base"), root / "sharded", ["permute"])
    commands.calibrate([str(root / name) for name in ("base", "other", "third")], root / "null.json")
    commands.commit(str(root / "base"), root / "commitment.json", owner="somebody")
    commands.compare(str(root / "base"), str(root / "other"), out=root / "report")
    (root / "gguf").mkdir()
    gguf(root / "gguf" / "model.gguf", *as_gguf(open_weights(root / "base"), "llama"))
    return root


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def mutated(draw: np.random.Generator, body: Any) -> Any:
    """A JSON value with one entry replaced, removed or moved."""
    body = copy.deepcopy(body)
    everywhere = places(body)[1:]
    place = everywhere[draw.integers(len(everywhere))]
    parent = functools.reduce(lambda value, key: value[key], place[:-1], body)
    what = draw.integers(4)
    if what == 0:
        del parent[place[-1]]
    elif what == 1 and isinstance(parent[place[-1]], int | float):
        parent[place[-1]] = parent[place[-1]] * int(draw.choice([-1, 2, 1000])) + int(draw.integers(2))
    else:
        parent[place[-1]] = ODD[draw.integers(len(ODD))]
    return body


def flipped(draw: np.random.Generator, raw: bytes, within: int) -> bytes:
    """Some bytes changed, or the end cut off."""
    if draw.random() < 0.2:
        return raw[: draw.integers(len(raw))]
    out = bytearray(raw)
    for at in draw.integers(0, min(within, len(raw)), draw.integers(1, 9)):
        out[at] = draw.integers(256)
    return bytes(out)


def damage(draw: np.random.Generator, file: Path) -> None:
    """One file, one fault."""
    raw = file.read_bytes()
    if file.suffix == ".json":
        if draw.random() < 0.8:
            file.write_text(json.dumps(mutated(draw, json.loads(raw))))
        else:
            file.write_bytes(flipped(draw, raw, len(raw)))
    elif file.suffix == ".safetensors" and draw.random() < 0.6:
        length = int.from_bytes(raw[:8], "little")
        head = json.dumps(mutated(draw, json.loads(raw[8 : 8 + length]))).encode()
        file.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])
    else:
        file.write_bytes(flipped(draw, raw, 4096))


MODELS = {
    "base": ("config.json", "tokenizer.json", "model.safetensors"),
    "sharded": ("model.safetensors.index.json", "model-00001.safetensors"),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "gguf": ("model.gguf",),
}
STATEMENTS = ("null.json", "commitment.json", "report")


def tried(draw: np.random.Generator, whole: Path, work: Path) -> str:
    """Damage one input and use it; what came of it."""
    shutil.rmtree(work, ignore_errors=True)
    kind = str(draw.choice([*MODELS, *STATEMENTS]))
    other = str(whole / "other")
    if kind in MODELS:
        shutil.copytree(whole / kind, work)
        damage(draw, work / str(draw.choice(MODELS[kind])))
        where = work / "model.gguf" if kind == "gguf" else work
        comparison.compare(open_weights(where), open_weights(other), options=comparison.Options(extras=False))
        return f"{kind}: answered"
    work.mkdir()
    if kind == "report":
        file = work / "report.json"
        shutil.copy(whole / "report" / "report.json", file)
        damage(draw, file)
        return f"report: {commands.verify(file).text.splitlines()[0]}"
    file = work / kind
    shutil.copy(whole / kind, file)
    damage(draw, file)
    if kind == "commitment.json":
        return f"commitment: {commands.verify(file, str(whole / 'base')).text.splitlines()[0]}"
    commands.compare(str(whole / "base"), other, null=file)
    return "null: answered"


def too_long(*_: object) -> None:
    raise TimeoutError


def fuzzed(whole: Path, work: Path, count: int, seed: int) -> Counter[str]:
    """What came of so many damaged inputs."""
    draw, found = np.random.default_rng(seed), Counter[str]()
    before = signal.signal(signal.SIGALRM, too_long)
    for _ in range(count):
        signal.alarm(SECONDS)
        try:
            found[tried(draw, whole, work)] += 1
        except FathomError as error:
            assert str(error) and "\n" not in str(error).strip()
            found["refused"] += 1
        finally:
            signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_inputs_are_answered_or_refused(whole, tmp_path, monkeypatch, count):
    """No traceback, no hang, no memory beyond a gigabyte; a damaged statement holds only where nothing was said."""
    known: dict[str, Any] = {}

    def remembered(*models: Any, **options: Any) -> Any:
        key = repr([m.name for m in models[:2]]) + repr(models[2:]) + repr(options)
        if key not in known:
            known[key] = comparison_compare(*models, **options)
        return known[key]

    comparison_compare = comparison.compare
    monkeypatch.setattr(verification.comparison, "compare", remembered)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = fuzzed(whole, tmp_path / "work", count, seed=count)
    print(dict(found))
    assert sum(found.values()) == count
    assert found["refused"] > count // 8 and found["base: answered"] > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


def test_damaged_gguf_headers_are_refused(tmp_path):
    """Small ones, so that every entry is met; a whole one lacks layers, and is refused too."""
    draw, file = np.random.default_rng(0), tmp_path / "m.gguf"
    meta = {"general.architecture": "qwen3", "qwen3.block_count": 1, "qwen3.embedding_length": 8, "x": ["a", "b"]}
    meta["qwen3.attention.head_count"] = 2
    good = gguf(file, meta, {"token_embd.weight": (0, (4, 8), bytes(128))}).read_bytes()
    for _ in range(300):
        file.write_bytes(flipped(draw, good, len(good) - 128))
        with pytest.raises(ModelError):
            open_weights(file)

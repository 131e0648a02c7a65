"""Weights that are not numbers and configs that are no configs: one line, no crash, and no hiding place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.cli import lineage as commands
from fathom.errors import ModelError
from fathom.lineage import comparison, nulls, verdict
from tests.lineage.zoo import build, edited, save, tiny_config

LAYER = "model.layers.1."
TENSORS = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    LAYER + "input_layernorm.weight",
    LAYER + "post_attention_layernorm.weight",
    LAYER + "self_attn.q_proj.weight",
    LAYER + "self_attn.k_proj.weight",
    LAYER + "self_attn.v_proj.weight",
    LAYER + "self_attn.o_proj.weight",
    LAYER + "self_attn.q_norm.weight",
    LAYER + "mlp.gate_proj.weight",
    LAYER + "mlp.up_proj.weight",
    LAYER + "mlp.down_proj.weight",
)
VALUES = (float("nan"), float("inf"), float("-inf"), 3e38, 1e14)


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two strangers, and the null file of the strangers."""
    root = tmp_path_factory.mktemp("whole")
    for name, seed in (("base", 0), ("control", 1), ("control2", 2)):
        save(build(tiny_config("qwen3"), seed, torch.float32), root / name, 512)
    commands.calibrate([str(root / name) for name in ("base", "control", "control2")], root / "null.json")
    return root


def damaged(base: Path, out: Path, name: str, value: float, whole: bool = False) -> Path:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][... if whole else (3,) * tensors[name].ndim] = value

    return edited(base / "base", out, spoil)


@pytest.mark.quick(
    "model.embed_tokens.weight-nan", "*up_proj.weight-inf", "model.norm.weight--inf", "*down_proj.weight-3e+38"
)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", TENSORS)
def test_one_bad_number_neither_stops_nor_hides(base, tmp_path, name, value):
    copy = damaged(base, tmp_path / "copy", name, value)
    result = commands.compare(str(base / "base"), str(copy), null=base / "null.json")
    body = strict(json.dumps(result.data, default=str))
    said = [line for line in body["structure"]["skipped"] if name in line]
    if value == 1e14:  # a number, if a silly one: used as it is, where one entry of a matrix may well drown the others
        assert not said
        return
    assert body["verdict"]["label"] == verdict.SHARED
    assert said and "1 value" in said[0] and said[0] in result.text


@pytest.mark.quick("model.embed_tokens.weight", "*up_proj.weight")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_without_numbers_is_named(base, tmp_path, name):
    copy = damaged(base, tmp_path / "copy", name, float("nan"), whole=True)
    result = commands.compare(str(base / "base"), str(copy), out=tmp_path / "out")
    body = strict((tmp_path / "out" / "report.json").read_text())
    assert any(name in line for line in body["structure"]["skipped"]) and result.exit_code == 0


@pytest.mark.slow
def test_huge_weights_are_weights(base, tmp_path):
    """The residual stream a million million times as large is the same function, and the same lineage."""
    out = tmp_path / "huge"
    assert commands.attack(str(base / "base"), out, ["permute"]).exit_code == 0

    def grow(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
                tensors[name] *= 1e12

    out = edited(out, tmp_path / "grown", grow)
    controls = [str(base / "control"), str(base / "control2")]
    result = commands.compare(str(base / "base"), str(out), control=controls)
    # neither was trained, so that one seed may have made both
    assert result.data["verdict"]["label"] == verdict.INITIALISATION and not result.data["structure"]["skipped"]


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": ["llama"]},
        {"model_type": {"a": 1}},
        {"model_type": 7},
        {"partial_rotary_factor": "half"},
        {"partial_rotary_factor": -1.0},
        {"partial_rotary_factor": True},
        {"rotary_pct": "0.25"},
        {"rotary_pct": [1]},
        {"rope_parameters": {"partial_rotary_factor": "x"}},
        {"rope_parameters": {"partial_rotary_factor": float("nan")}},
        {"text_config": {"model_type": []}},
        {"head_dim": -1},
        {"head_dim": 1.5},
        {"num_attention_heads": True},
        {"num_attention_heads": "4"},
        {"hidden_size": -64},
        {"hidden_size": "64"},
        {"hidden_size": 128},
        {"intermediate_size": -1},
        {"vocab_size": {"rows": 512}},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": -4},
    ],
    ids=str,
)
def test_an_odd_config_is_one_line(base, tmp_path, change):
    copy = damaged(base, tmp_path / "copy", TENSORS[0], 0.0)
    config = json.loads((copy / "config.json").read_text())
    for key in change:
        config.pop("rope_parameters" if "rotary" in key else key, None)
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=r"^config\.json: [^\n]*$"):
        commands.compare(str(base / "base"), str(copy))


@pytest.mark.parametrize(
    "change",
    [
        {"scores": []},
        {"scores": {"order": 1}},
        {"scores": {"order": ["x"]}},
        {"scores": {"order": [float("nan")]}},
        {"witnesses": 3},
        {"witnesses": ["3"]},
        {"witnesses": [-1]},
        {"neurons": [1.0]},
        {"neurons": {"order": [-0.5]}},
        {"per_layer": {"order": [1.0]}},
        {"pairs": "many"},
        {"pairs": [["a", "a"], ["b", "c"]]},
        {"pairs": [["a", "b"], ["b", "a"]]},
        {"pairs": [["a", "b"], ["b", "unlisted"]]},
        {"scores": {"order": [0.0] * 999}},  # each would tighten the bound, and none was measured
        {"scores": {"awm_canonical": [-5.0]}},
        {"scores": {"order": [0.0, 0.9]}},  # a score would have to pass 1 to be high
        {"extra": 1},
    ],
    ids=str,
)
def test_an_odd_null_file_is_one_line(base, tmp_path, change, monkeypatch):
    """Before anything is measured."""
    kind = "width 64/64, equal depth"
    null = {"scores": {"order": [0.0, 0.1]}, "witnesses": [1], "neurons": {"order": [0.1]}, "gaps": {}, "per_layer": {}}
    null["pairs"] = [["a", "b"], ["b", "c"]]
    body = {"fathom_null": nulls.VERSION, "models": dict.fromkeys("abc", "a model")}
    path = tmp_path / "null.json"
    path.write_text(json.dumps(body | {"classes": {kind: null}}))
    assert nulls.read(path, kind).models == 3
    path.write_text(json.dumps(body | {"classes": {kind: null | change}}))
    monkeypatch.setattr(comparison, "measure", None)
    with pytest.raises(ModelError, match=r"^[^\n]*null.json: class [^\n]*$"):
        commands.compare(str(base / "base"), str(base / "control"), null=path)

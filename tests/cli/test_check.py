"""`fathom check`: exit code 0 if all agrees, 1 on a difference, 2 where there is nothing to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fathom.checkpoints import same_logits
from fathom.checkpoints.twin import open_both
from fathom.cli.main import main

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"num_hidden_layers": 8, "intermediate_size": 100, "vocab_size": 500},
}


def said(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str, **keys: object) -> tuple[int, str, str]:
    """Exit code, output and errors for a directory with this configuration."""
    (directory / "config.json").write_text(json.dumps({**LLAMA, **keys}))
    code = main(["check", str(directory), *flags])
    out, errors = capsys.readouterr()
    return code, out, errors


def test_a_configuration_alone_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    code, out, errors = said(Path(), capsys, quantization_config={"quant_method": "gptq"})
    assert code == 0 and not errors and max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert words.count(" equal") == 10 and "LlamaForCausalLM computes (the directory has no weights)" in words
    assert "quantization_config: not compared" in words


def test_a_difference_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> tuple[Any, Any]:
        theirs, ours = open_both(*arguments)
        ours.model.norm.weight.data[0] += 1
        return theirs, ours

    monkeypatch.setattr(same_logits, "open_both", broken)
    monkeypatch.setattr(same_logits, "DTYPES", ("float32",))
    code, out, _ = said(tmp_path, capsys)
    assert code == 1 and out.count("DIFFERS") == 5 and "something else than LlamaForCausalLM" in " ".join(out.split())
    code, out, _ = said(tmp_path, capsys, "--json")
    found = json.loads(out)
    assert code == 1 and found["agrees"] is False and found["compared_with"] == "LlamaForCausalLM"
    assert {one["dtype"] for one in found["comparisons"]} == {"float32"}
    assert all(one["difference"] > one["allowed"] == 0 for one in found["comparisons"])


def test_an_ignored_key_is_one_that_the_class_ignores_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_logits, "DTYPES", ("float32",))
    keys = {"my_new_switch": 1, "is_causal": False}
    for key in keys:
        code, _, errors = said(tmp_path, capsys, **{key: keys[key]})
        assert code == 2 and f"{key}=" in errors
    code, out, _ = said(tmp_path, capsys, "--ignore-keys", "my_new_switch", my_new_switch=1)
    assert code == 0 and "DIFFERS" not in out
    code, out, _ = said(tmp_path, capsys, "--ignore-keys", "my_new_switch,is_causal", **keys)
    assert code == 1 and "DIFFERS" in out


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model_type": "fathom"}, "is an export of Fathom"),
        (
            {"model_type": "bloom"},
            "is a bloom model; allowed: models that both Fathom and transformers have a class for: afmoe, ",
        ),
        ({"model_type": "odd", "auto_map": {"AutoModel": "a.B"}}, "the directory's own code is never run"),
        ({"model_type": "nanbeige", "num_loops": 2}, "is a nanbeige model"),
        ({"recurrent_model": True, "num_latent_thoughts": 2, "interpolation": False}, "has the mechanism ponder2"),
        (
            {"recurrent_model": True, "use_depth_attention": True, "depth_attention_stride": 2},
            "has the mechanism depth_attention",
        ),
        ({"num_latent_thoughts": 2, "latent_new": 1}, "latent_new=1"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"rope_scaling": {"rope_type": "odd"}}, "odd"),
    ],
)
def test_what_has_no_counterpart_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], says: str
) -> None:
    code, out, errors = said(tmp_path, capsys, **keys)
    assert code == 2 and not out and len(errors.splitlines()) == 1 and says in errors


def test_other_directories_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    expected = {"gguf": "GGUF file", "gguf/model.gguf": "GGUF file", "pickle": "config.json", "none": "no such"}
    for name, says in expected.items():
        assert main(["check", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err
    assert said(tmp_path / "pickle", capsys)[0] == 2


@pytest.mark.slow
def test_a_file_that_drafts_by_layers_that_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As MiniMax M2's, whose class would look for these layers in `generate`."""
    carried = {"use_mtp": True, "num_mtp_modules": 3, "attn_type_list": [1, 1], "use_qk_norm": True}
    shape = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 97}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minimax_m2", **shape, **carried}))
    assert main(["check", str(tmp_path)]) == 0
    assert "generate" in capsys.readouterr().out

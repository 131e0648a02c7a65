"""Exports: three forms, one card, whole or not at all. The conformance suite holds that they open without Fathom."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from fathom.checkpoints.export import ExportError, export
from fathom.cli.main import main
from fathom.models import FathomForCausalLM
from tests.models.cases import CASES, build, config_of, tokens


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_vanilla_as_a_stock_qwen3(tmp_path):
    model, ids = build(config_of("vanilla")), tokens(2, 9)
    stock = AutoModelForCausalLM.from_pretrained(export(model, tmp_path / "q", form="qwen3"))
    assert type(stock) is Qwen3ForCausalLM and torch.equal(logits(stock, ids), logits(model, ids))
    assert not list((tmp_path / "q").glob("*.py")), "a stock model needs no code"


@pytest.mark.parametrize("case", ["loop", "loop-middle"])
def test_loop_as_a_deeper_qwen3(case, tmp_path):
    model, ids = build(config_of(case)), tokens(2, 9)
    stock = AutoModelForCausalLM.from_pretrained(export(model, tmp_path / "q", form="unrolled"))
    assert type(stock) is Qwen3ForCausalLM
    assert stock.config.num_hidden_layers == sum(len(trip) for trip in model.model.plan) > 4
    assert torch.equal(logits(stock, ids), logits(model, ids))
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(stock.generate(ids, max_new_tokens=5, do_sample=False), wanted)


def test_an_embedding_scale_is_folded_in(tmp_path):
    model, ids = build(config_of("vanilla", embedding_scale=3.0)), tokens(1, 9)
    stock = AutoModelForCausalLM.from_pretrained(export(model, tmp_path / "q", form="qwen3"))
    assert torch.allclose(logits(stock, ids), logits(model, ids), atol=1e-5)


@pytest.mark.parametrize(
    "case,form,says",
    [
        ("depth_attention", "qwen3", "mixer=depth_attention is not a Qwen3"),
        ("denseformer", "qwen3", "residual=denseformer"),
        ("loop", "qwen3", "recurrence=loop"),
        ("loop+depth_attention", "unrolled", "mixer=depth_attention is no plain deeper Qwen3"),
        ("ponder+depth_attention", "unrolled", "recurrence=ponder has no unrolled form, since only a loop"),
        ("vanilla", "gguf", "must be one of fathom, qwen3, unrolled"),
    ],
)
def test_forms_that_cannot_be(case, form, says, tmp_path):
    with pytest.raises(ExportError, match=says):
        export(build(config_of(case)), tmp_path / "q", form=form)
    assert not (tmp_path / "q").exists(), "nothing is left of a failed export"


def test_card_says_what_how_and_how_well(tmp_path):
    facts = {
        "step": 1200,
        "tokens": 3_456_000,
        "evaluation": {"loss": 2.5, "domains": {}},
        "recipe": "model:\n  a: 1\n",
    }
    card = (export(build(config_of("depth_attention")), tmp_path / "q", facts=facts) / "README.md").read_text()
    for text in ("depth_attention", "trust_remote_code=True", "1,200 steps, 3,456,000 tokens", "loss 2.5000", "  a: 1"):
        assert text in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_other_peoples_files_stay(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ExportError, match="not an earlier export"):
        export(build(config_of("vanilla")), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("case", CASES)
def test_command_exports_an_export_again(case, tmp_path, capsys):
    model, ids = build(config_of(case)), tokens(1, 9)
    export(model, tmp_path / "a")
    assert main(["export", str(tmp_path / "a"), "--to", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["form"] == "fathom"
    first, again = (FathomForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    weights = again.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    # Beside the first, not the model in memory: how a file aligns a small tensor can decide a last bit.
    assert torch.equal(logits(again, ids), logits(first, ids))
    assert (logits(again, ids) - logits(model, ids)).abs().max() < 1e-4


def test_command_complains_in_one_line(tmp_path, capsys):
    for words in ([str(tmp_path), "--to", str(tmp_path / "b")], [str(tmp_path / "no"), "--to", str(tmp_path / "b")]):
        assert main(["export", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "neither a run" in error

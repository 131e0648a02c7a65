"""Weights in eight bits: close to the stored ones, and each token's numbers are its own."""

import copy
import json

import pytest
import torch
from torch import nn

from fathom.checkpoints.int8 import Int8Linear, fits, quantise
from fathom.checkpoints.open import Opening, open_checkpoint
from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.models import FathomForCausalLM
from tests.tiny import export_tiny, tiny_config

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 4}
IDS = torch.randint(3, 384, (3, 17), generator=torch.Generator().manual_seed(0))


def model_of(**fields):
    torch.manual_seed(0)
    return FathomForCausalLM(tiny_config(**{**WIDE, "initializer_range": 0.2, **fields})).eval()


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_what_its_weight_says(bias):
    """To half a step of a token's second digit; its weight is the linear layer's, to half a step of each output's."""
    torch.manual_seed(0)
    plain = nn.Linear(96, 130, bias=bias)
    with torch.no_grad():
        plain.weight[7] *= 100
        plain.weight[9] = 0
    layer = Int8Linear(plain)
    steps = plain.weight.abs().amax(1, keepdim=True) / 127
    assert ((layer.weight - plain.weight).abs() <= 0.5001 * steps).all()
    x = torch.randn(5, 3, 96) * torch.logspace(-3, 3, 5)[:, None, None]
    stored = nn.functional.linear(x.double(), layer.weight.double(), plain.bias.double() if bias else None)
    step = x.abs().amax(-1, keepdim=True) / (2 * 63**2 if layer._seven_bits else 2 * 127**2)
    assert ((layer(x) - stored).abs() <= 0.51 * step * layer.weight.abs().sum(1) + 1e-5 * stored.abs() + 1e-12).all()
    assert layer(x[:0]).shape == (0, 3, 130) and layer(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(layer(torch.zeros(2, 96)), torch.zeros(2, 130) if not bias else plain.bias.expand(2, -1))


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_company():
    """To the bit, however large the others are. FBGEMM alone has one scale for all of them: the planted fault."""
    layer, x = Int8Linear(nn.Linear(64, 64)), torch.randn(1, 64)
    others = torch.randn(30, 64) * torch.logspace(-4, 4, 30)[:, None]
    for rows in (2, 9, 31):
        assert torch.equal(layer(torch.cat((x, others[: rows - 1])))[:1], layer(x))
    bare = torch.ops.quantized.linear_dynamic
    assert not torch.equal(bare(torch.cat((x, others)), layer._held)[:1], bare(x, layer._held))


@torch.inference_mode()
def test_numbers_that_are_none_stay_in_their_row():
    layer, x = Int8Linear(nn.Linear(64, 64)), torch.randn(4, 64)
    x[1], x[2, 3] = torch.nan, torch.inf
    made = layer(x)
    assert made.isnan().sum(1).tolist() == [0, 64, 64, 0] and torch.equal(made[::3], layer(x[::3]))
    assert layer(x[1:2]).isnan().all()


@pytest.mark.parametrize("fields", [{}, {"recurrence": "adaponder", "mixer": "none"}, {"tie_word_embeddings": True}])
@torch.inference_mode()
def test_a_model_is_close_and_company_matters_less(fields):
    """Attention rounds in float32 as ever, and eight bits enlarge that, but to far less than they change themselves."""
    model = model_of(**fields)
    small = copy.deepcopy(model)
    assert quantise(small) >= 7 * 4 + 1
    one, other = (each(IDS).logits.log_softmax(-1) for each in (model, small))
    alone = torch.cat([small(row[None]).logits for row in IDS]).log_softmax(-1)
    changed, company = (one - other).abs().mean(), (alone - other).abs().mean()
    assert company < 0.01 * changed < 0.001
    assert torch.equal(small.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_what_is_left_as_it_is():
    hooked, large = nn.Linear(64, 64), nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    assert fits(large) and not fits(hooked) and not fits(nn.Linear(64, 8)) and not fits(nn.Linear(8, 64))
    assert not fits(Int8Linear(large))
    layer = Int8Linear(large)
    with pytest.raises(RuntimeError, match="no gradients"):
        layer(torch.randn(1, 64, requires_grad=True))
    with pytest.raises(RuntimeError, match="runs only on a CPU"):
        layer.to("meta")
    with pytest.raises(SettingsError, match="no linear layers"):
        quantise(nn.Sequential(nn.Linear(8, 8)))


def test_the_command_line(tmp_path, capsys):
    folder = export_tiny(tmp_path / "tiny", **WIDE)
    model, _ = Opening(device="cpu", weights="int8").open(folder)
    assert isinstance(model.model.layers[0].mlp.up_proj, Int8Linear)
    stored, _ = open_checkpoint(folder, "cpu")
    assert isinstance(stored.model.layers[0].mlp.up_proj, nn.Linear)
    assert main(["generate", str(folder), "x", "--weights", "int8", "--max-new-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 3
    for words, fault in (
        (["generate", str(folder), "x", "--weights", "int4"], "--weights int4: allowed: stored, int8"),
        (["generate", str(folder), "x", "--weights", "int8", "--compile"], "does not work with --compile"),
        (["evaluate", str(folder), "--weights", "int4", "--perplexity", str(folder)], "--weights int4: allowed"),
    ):
        assert main(words) == 2 and fault in capsys.readouterr().err


def test_scores_are_kept_apart(tmp_path, capsys):
    """Results of stored weights are not those of eight bits."""
    folder, text = export_tiny(tmp_path / "tiny", **WIDE), tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "To fathom a thing is to measure its depth. " * 4}) + "\n")
    found = {}
    for weights in ("stored", "int8", "stored"):
        words = ["evaluate", str(folder), "--perplexity", str(text), "--out", str(tmp_path / "out"), "--json"]
        assert main([*words, "--weights", weights, "--device", "cpu"]) == 0
        report = capsys.readouterr().out
        assert found.setdefault(weights, report) == report
    assert found["stored"] != found["int8"]

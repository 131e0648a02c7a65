"""Classifiers and question answering: they train, they are saved, and they open again, with Fathom and without."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from fathom.checkpoints.export import export
from fathom.errors import ModelError
from fathom.models import (
    FathomForQuestionAnswering,
    FathomForSequenceClassification,
    FathomForTokenClassification,
)

from .cases import build, config_of, tokens

IDS = tokens(3, 9)
HEADS = {
    "sequence": (
        FathomForSequenceClassification,
        AutoModelForSequenceClassification,
        {"labels": torch.tensor([0, 2, 1])},
    ),
    "token": (FathomForTokenClassification, AutoModelForTokenClassification, {"labels": IDS % 3}),
    "answer": (
        FathomForQuestionAnswering,
        AutoModelForQuestionAnswering,
        {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 4, 8])},
    ),
}
# One trip, trips that feed on logits, and tokens that halt.
MODELS = ("depth_attention", "ponder", "adaponder")
every_head = pytest.mark.parametrize("kind", HEADS)
every_model = pytest.mark.parametrize("case", MODELS)


def made(kind, case, **fields):
    torch.manual_seed(0)
    return HEADS[kind][0](config_of(case, num_hidden_layers=2, num_labels=3, **fields))


def answers(model, ids=IDS, **kwargs):
    with torch.no_grad():
        out = model(ids, **kwargs)
    return torch.stack([out.start_logits, out.end_logits]) if hasattr(out, "start_logits") else out.logits


def trained(kind, case, steps=4):
    """A head after a few steps, in evaluation mode, and its losses."""
    model = made(kind, case).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        torch.manual_seed(1)
        loss = model(IDS, **HEADS[kind][2]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


@every_model
@every_head
def test_it_learns_is_saved_and_opens(kind, case, tmp_path):
    model, losses = trained(kind, case)
    assert losses[-1] < losses[0]
    directory = export(model, tmp_path / "export")
    again = HEADS[kind][1].from_pretrained(directory)
    assert type(again) is HEADS[kind][0] and again.config.num_labels == model.config.num_labels
    assert torch.allclose(answers(again), answers(model), atol=1e-6)
    assert set(json.loads((directory / "config.json").read_text())["auto_map"]) >= {HEADS[kind][1].__name__}
    assert HEADS[kind][1].__name__ in (directory / "README.md").read_text()
    untrained = made(kind, case).eval()
    assert not torch.allclose(answers(untrained), answers(model), atol=1e-3), "other weights are seen"


@pytest.mark.parametrize("tied", [False, True])
@every_model
def test_a_language_model_becomes_a_classifier(case, tied, tmp_path):
    """Its decoder as it was, and with it the head that a recurrence feeds on; what it lacks is an error as ever."""
    language = build(config_of(case, num_hidden_layers=2, tie_word_embeddings=tied))
    directory = export(language, tmp_path / "lm")
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=3)
    with torch.no_grad():
        wanted = language.model(IDS, head=language.lm_head, use_cache=False).last_hidden_state
        found = model.model(IDS, use_cache=False).last_hidden_state
    assert torch.allclose(found, wanted, atol=1e-6)
    model.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert torch.equal(answers(again), answers(model))


def test_what_the_decoder_lacks_is_an_error():
    model = made("sequence", "depth_attention")
    weights = {name: tensor for name, tensor in model.state_dict().items() if "norm" not in name}
    with pytest.raises(ValueError, match=r"the checkpoint lacks model\.layers\.0\.input_layernorm"):
        FathomForSequenceClassification.from_pretrained(None, config=model.config, state_dict=weights)


@every_model
def test_padding_changes_no_label(case):
    model = trained("sequence", case, steps=1)[0].double()
    padded = torch.zeros(1, 12, dtype=torch.long)
    padded[0, 3:] = IDS[0]
    mask = (padded != 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = answers(model, IDS[:1])
    assert (answers(model, padded, attention_mask=mask, position_ids=positions) - alone).abs().max() < 1e-11
    assert (answers(model, padded) - alone).abs().max() > 1e-6, "without a mask padding is text"


def test_a_classifier_has_one_form(tmp_path):
    with pytest.raises(ModelError, match="a FathomForSequenceClassification has no form qwen3"):
        export(made("sequence", "vanilla"), tmp_path / "q", form="qwen3")


def test_a_pipeline_knows_it(tmp_path):
    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = made("sequence", "depth_attention", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    assert classify("the depth")[0]["label"] in model.config.label2id


CLEAN_ROOM = """
import sys; sys.modules["fathom"] = None
import json, torch, transformers
for directory, auto in json.loads(sys.argv[1]):
    saved = torch.load(directory + ".pt", weights_only=True)
    model = getattr(transformers, auto).from_pretrained(directory, trust_remote_code=True)
    def answers(model):
        with torch.no_grad():
            out = model(saved["ids"])
        return torch.stack([out.start_logits, out.end_logits]) if hasattr(out, "start_logits") else out.logits
    assert torch.allclose(answers(model), saved["answers"], atol=1e-6), directory
    model.save_pretrained(directory + "-again")
    again = getattr(transformers, auto).from_pretrained(directory + "-again", trust_remote_code=True)
    assert torch.equal(answers(again), answers(model)), directory
print("all open")
"""


@pytest.mark.slow
def test_exports_open_without_fathom(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    places = []
    for kind, (_, auto, _) in HEADS.items():
        for case in MODELS:
            model = trained(kind, case)[0]
            directory = export(model, tmp_path / f"{kind}-{case}")
            torch.save({"ids": IDS, "answers": answers(model)}, f"{directory}.pt")
            places.append((str(directory), auto.__name__))
    language = export(build(config_of("depth_attention")), tmp_path / "lm")
    opened = AutoModelForTokenClassification.from_pretrained(language)
    opened.save_pretrained(tmp_path / "unused")
    done = subprocess.run([sys.executable, "-c", CLEAN_ROOM, json.dumps(places)], capture_output=True, text=True)
    assert done.stdout.strip() == "all open", done.stderr

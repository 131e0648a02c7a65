"""Instruction tuning: only masked-in tokens are trained on, no conversation sees another, a run resumes bit for bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.minerals import EXCHANGES, World

from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.data.batches import Batch
from fathom.data.rows import IGNORED
from fathom.data.targets import TargetDataset
from fathom.data.tokenizer import load_tokenizer
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import Recipe
from fathom.training import build_training, train
from fathom.training.build import forward
from tests import processes
from tests.corpus.prose import recipe_values, write_jsonl
from tests.tiny import make_conversations, tiny_recipe

from .conftest import StopAt

ROLES = ("user", "assistant")
EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def tuning(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return tiny_recipe(make_conversations(corpus, tmp_path_factory.mktemp("talk") / "talk"))


def alone(model: FathomForCausalLM, batch: Batch) -> torch.Tensor:
    """The mean loss of what is trained on, each conversation read by itself."""
    total, count = torch.zeros(()), 0
    for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, stop in pairwise(edges):
            logits = (
                model(input_ids=ids[None, start : stop - 1], use_cache=False).logits[0] if stop - start > 1 else None
            )
            for place in range(start + 1, stop):
                if labels[place] != IGNORED:
                    total -= logits[place - start - 1].log_softmax(-1)[ids[place]]
                    count += 1
    assert count == batch.num_targets
    return total / count


def test_a_row_is_its_conversations_alone(tuning: Recipe) -> None:
    training = build_training(tuning.override("train.micro_batch=8"))
    model = training.model.eval()
    (batch,) = training.plan.batch(0)
    assert int((batch.position_ids == 0).sum()) > len(batch.input_ids), "rows must hold several"
    with torch.no_grad():
        packed = forward(model, batch)
        assert float(packed.loss) == pytest.approx(float(alone(model, batch)), abs=1e-5)
        # Not a bit of a conversation depends on the one before it; negative control: read as one text, it does.
        row = int((batch.position_ids == 0).sum(1).argmax())
        second = int((batch.position_ids[row] == 0).nonzero()[1])
        changed = batch.input_ids[row : row + 1].clone()
        changed[0, :second] = (changed[0, :second] + 7) % 290
        for positions, same in ((batch.position_ids[row : row + 1], True), (None, False)):
            one, other = (
                model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, second:]
                for ids in (batch.input_ids[row : row + 1], changed)
            )
            assert torch.equal(one, other) is same


@pytest.mark.slow
def test_a_resumed_tuning_ends_where_an_undisturbed_one_ends(tuning: Recipe, tmp_path: Path) -> None:
    whole = train(tuning, tmp_path / "whole")
    assert not train(tuning, tmp_path / "parts", callbacks=[StopAt(3)]).finished
    parts = train(tuning, tmp_path / "parts")
    found, expected = processes.weights(parts.run_dir, 8), processes.weights(whole.run_dir, 8)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert whole.evaluation is not None
    assert list(whole.evaluation.domains) == ["talk"]
    assert whole.evaluation.tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("template", "end"), [("chatml", "<|im_end|>"), ("alpaca", EOS), ("react", EOS)])
def test_twenty_conversations_learnt_by_heart_end_by_themselves(template: str, end: str, tmp_path: Path) -> None:
    """From messages to an answer that stops: greedy decoding gives each answer and the token that ends it."""
    facts = World(5, 20).facts()[::8]
    rows = [
        {"messages": [{"role": r, "content": fact.said(frame)} for r, frame in zip(ROLES, EXCHANGES[1], strict=True)]}
        for fact in facts
    ]
    talk = {"inputs": [str(write_jsonl(tmp_path / "talk.jsonl", rows))], "kind": "conversations"}
    values = recipe_values(
        {"talk": talk},
        tokenize={"train": 400, "held_out": 0},
        converse={"template": template},
        deduplicate={"near": False},
    )
    build(parse_corpus_recipe(values), tmp_path / "out")
    place = tmp_path / "out" / "conversations"
    data = TargetDataset.open(place)
    assert data.num_documents == 20
    shape = ("model.vocab_size=400", "model.hidden_size=64", "model.max_position_embeddings=256")
    long = ("train.steps=400", "train.tokens_per_step=1024", "train.micro_batch=4", "evaluate.every=0")
    run = train(
        tiny_recipe(place, *shape, *long, "data.sequence_length=256", "optim.lr=1e-2", "train.export=true"),
        tmp_path / "run",
    )
    model = FathomForCausalLM.from_pretrained(run.model).eval()
    last_token = load_tokenizer(str(place / "tokenizer")).convert_tokens_to_ids(end)
    ends = [*data.document_ends(0, data.num_tokens).tolist(), data.num_tokens]
    for start, stop in pairwise([0, *ends]):
        ids, trained = np.empty(stop - start, np.int64), data.trained(start, stop)
        data.read(start, ids)
        first, last = trained.argmax(), len(ids) - trained[::-1].argmax()
        prompt = torch.from_numpy(ids[None, :first])
        found = model.generate(prompt, do_sample=False, max_new_tokens=64, eos_token_id=last_token)
        assert found[0, first:].tolist() == ids[first:last].tolist()
        assert found[0, -1] == last_token

"""Held-out losses without the logits of a batch: the values, and the largest tensor that is made for them."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fathom.data.shards import TokenDataset
from fathom.experiments.compare_page import _solved
from fathom.experiments.compare_results import ArmTrips, ParallelRun
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.numerics import IGNORE
from fathom.models.decoder.loss import CHUNK_ROWS
from fathom.recipe import Recipe
from fathom.report.results import restored, to_json
from fathom.training.estimate import estimate
from fathom.training.heldout import Tally, decoding_gap, evaluate
from fathom.training.jacobi_gap import token_losses_and_trips
from fathom.training.parallel import Ranks
from fathom.training.results import Evaluation, Score
from tests.models.cases import with_rounds
from tests.tiny import shape, tiny_recipe

WORDS, ROWS, LENGTH = 20_000, 16, 32
KINDS: list[dict[str, Any]] = [
    {},
    {"mixer": "depth_attention"},
    {"residual": "attention_residuals"},
    *({"recurrence": name} for name in ("loop", "ponder", "ponder2", "ponder3", "adaponder", "latent_cot")),
]


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.numbers = max(self.numbers, *sizes, 0)
        return out


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors alive that operations made, and remembers the most."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.most, self.alive = 0, dict[int, int]()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is None or storage.data_ptr() in self.given or storage._cdata in self.alive:
                continue
            self.alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, storage._cdata, None)
            self.most = max(self.most, sum(self.alive.values()))
        return out


@pytest.mark.quick("logits")
@pytest.mark.parametrize("words", [100, 3000], ids=["layers", "logits"])
def test_the_memory_of_an_evaluation_is_what_a_dry_run_says(
    corpus: Path, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 10 % below and 35 % above, whether a layer or the logits of a chunk take most, for every other kind."""
    monkeypatch.setattr("fathom.training.estimate._require_vocabulary", lambda *_: None)  # the corpus has 300
    fields = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": words}
    kinds = [*KINDS, {"residual": "denseformer"}, {"residual": "hyper_connections"}]
    kinds += [{"recurrence": "loop", "mixer": "depth_attention"}]
    length = 128 if words == 100 else 64
    for kind in kinds[::2] if words == 100 else kinds[1::4]:
        model = FathomForCausalLM(FathomConfig(**shape(**fields, **kind))).eval()
        keys = [f"model.{key}={value}" for key, value in {"mixer": "none", **fields, **kind}.items()]
        keys += [f"data.sequence_length={length}", "evaluate.micro_batch=4", "evaluate.position_buckets=2"]
        declared = estimate(tiny_recipe(corpus, *keys)).evaluation_bytes
        ids = torch.randint(words, (4, length))
        with Peak(*model.parameters(), *model.buffers(), ids) as seen:
            token_losses_and_trips(model, ids, ids)
        assert 0.9 < declared / seen.most < 1.35, (kind, declared, seen.most)


def made(kind: dict[str, Any]) -> tuple[FathomForCausalLM, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**shape(vocab_size=WORDS, **kind))).eval()
    ids = torch.randint(WORDS, (ROWS, LENGTH))
    labels = ids.clone()
    labels[3, 5:9] = IGNORE
    return model, ids, labels


@pytest.mark.quick("vanilla", "attention_residuals", "loop", "ponder2", "latent_cot")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind.values()), "vanilla"))
def test_no_logits_of_a_batch(kind: dict[str, Any]) -> None:
    model, ids, labels = made(kind)
    with Largest() as seen:
        losses, _ = token_losses_and_trips(model, ids, labels)
    assert seen.numbers <= CHUNK_ROWS * WORDS < ROWS * LENGTH * WORDS
    with torch.no_grad(), Largest() as plain:
        logits = model(ids, use_cache=False).logits
    assert plain.numbers == ROWS * LENGTH * WORDS, "the count sees logits where they are made"
    rows = [F.cross_entropy(x[:-1], y[1:], reduction="none") for x, y in zip(logits, labels, strict=True)]
    torch.testing.assert_close(losses, torch.stack(rows), rtol=1e-6, atol=1e-6)
    assert (losses[3, 4:8] == 0).all() and (losses[3, 8:] > 0).all()


def test_an_adapted_head_is_called(kind: dict[str, Any] = KINDS[0]) -> None:
    model, ids, labels = made(kind)
    plain, _ = token_losses_and_trips(model, ids, labels)
    model.lm_head.register_forward_hook(lambda head, inputs, logits: 2 * logits)
    hooked, _ = token_losses_and_trips(model, ids, labels)
    assert not torch.allclose(plain, hooked)


def test_token_losses_are_the_mean_loss_in_parts() -> None:
    model, ids, labels = made({})
    with torch.no_grad():
        parts = model(ids, labels=labels, return_token_losses=True)
        whole = model(ids, labels=labels)
    assert parts.logits is None and parts.loss is None and parts.token_losses.shape == ids.shape
    count = (labels[:, 1:] != IGNORE).sum()
    torch.testing.assert_close(parts.token_losses.sum() / count, whole.loss)
    with pytest.raises(ValueError, match="return_token_losses needs labels"):
        model(ids, return_token_losses=True)


def test_a_dry_run_tells_what_evaluation_takes(corpus: Path) -> None:
    def taken(*overrides: str) -> int:
        recipe: Recipe = tiny_recipe(corpus, f"model.vocab_size={WORDS}", "evaluate.micro_batch=16", *overrides)
        return estimate(recipe).evaluation_bytes

    logits = 4 * ROWS * LENGTH * WORDS
    assert 4 * CHUNK_ROWS * WORDS < taken() < 3 * 4 * CHUNK_ROWS * WORDS + logits // 10
    assert taken("evaluate.micro_batch=64") < 1.2 * taken(), "the logits of a batch do not count"
    assert taken("train.micro_batch=4") == taken() < taken("model.vocab_size=40000")


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_the_last_evaluation_decodes_a_sample(corpus: Path, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(corpus, "model.recurrence=ponder2", "model.mixer=none", f"data.packing={packing}")
    recipe.config().recurrence_options["jacobi_eval"] = 1
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**shape(recurrence="ponder2", initializer_range=0.6))).train()
    with_rounds(model, 1)
    data = TokenDataset.open(corpus, split="val")
    monkeypatch.setattr("fathom.training.heldout.SAMPLE", 100)
    early, last = (evaluate(model, data, recipe, Ranks(), decode) for decode in (False, True))
    assert (early.gap, early.jacobi_rounds) == (None, 1) and model.training
    assert last.gap is not None and last.gap.tokens <= 8 * 31 and abs(last.gap.value) > 1e-3
    assert last.how == f", {last.gap}" and early.how == ", 1 Jacobi rounds"
    assert restored(Evaluation, json.loads(to_json(last))) == last
    assert last.flat()["val/decoding_gap"] == last.gap.value

    with_rounds(model, 31)  # a row's worth: exact
    exact = decoding_gap(model.eval(), data, recipe, torch.device("cpu"))
    assert exact is not None and abs(exact.value) < 1e-5
    plain = evaluate(made({})[0], data, recipe, Ranks(), decode=True)
    assert (plain.gap, plain.jacobi_rounds, plain.how) == (None, None, "")

    trips = ArmTrips(1.0, 1, None, [], [ParallelRun(7, 1.0, last.gap)])
    arms = [SimpleNamespace(name="thinks", trips=trips), SimpleNamespace(name="plain", trips=None)]
    shown = str(_solved(SimpleNamespace(arms=arms)))
    assert f"{last.gap.value:+.4f}".replace("-", "−") in shown and "thinks" in shown and "plain" not in shown


def test_what_is_no_number_is_null_in_json_and_comes_back() -> None:
    lost = Score(math.nan, math.nan, 0)
    found = Evaluation(math.nan, math.nan, 0, domains={"talk": lost}, position_loss=[None, 3.5])
    again = restored(Evaluation, json.loads(to_json(found)))
    assert math.isnan(again.loss) and math.isnan(again.domains["talk"].loss) and again.position_loss == [None, 3.5]
    assert math.isnan(found.perplexity)
    assert [name for name in found.flat() if name.startswith("val/position")] == ["val/position/1"]


def test_sequences_that_fill_a_batch_are_no_cluster() -> None:
    """Batches of evaluation have one shape: beyond the end of the text they hold sequences without a target."""
    draw = torch.Generator().manual_seed(0)
    losses, trips = torch.rand(8, 5, generator=draw), torch.randint(1, 4, (8, 5), generator=draw)
    counts = (torch.arange(8) < 3).unsqueeze(1).expand(8, 5)
    exact, filled = Tally(), Tally()
    exact.add(losses[:3], trips[:3], counts[:3])
    filled.add(losses, trips, counts)
    found = filled.trips(Ranks(), 3)
    assert found is not None and found.correlation is not None and found.correlation.clusters == 3
    assert found == exact.trips(Ranks(), 3)

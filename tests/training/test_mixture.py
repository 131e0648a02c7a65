"""A run on a mixture: resumed bit for bit, evaluated by collection, extended without another past."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fathom.errors import DataError, SettingsError
from fathom.recipe import Recipe, load_recipe
from fathom.training import branch, build_training, train
from fathom.training.estimate import estimate
from tests import processes
from tests.tiny import tiny_recipe

from .conftest import StopAt

MIXED = ("data.mixture={rivers: 0.25, seas: 0.75}", "data.phases=[{at: 0.5, mixture: {rivers: 1}}]")


@pytest.fixture
def mixed(corpus: Path) -> Recipe:
    return tiny_recipe(corpus, *MIXED)


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_undisturbed_one_ends(mixed: Recipe, tmp_path: Path) -> None:
    whole = train(mixed, tmp_path / "whole")
    assert not train(mixed, tmp_path / "parts", callbacks=[StopAt(3)]).finished
    parts = train(mixed, tmp_path / "parts")
    found, expected = processes.weights(parts.run_dir, 8), processes.weights(whole.run_dir, 8)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert found.keys() == expected.keys()
    assert whole.evaluation is not None
    assert list(whole.evaluation.domains) == ["rivers", "seas"]
    epochs = json.loads((whole.run_dir / "result.json").read_text())["collections"]
    assert epochs == pytest.approx(estimate(mixed).collections)
    assert estimate(mixed).epochs is None
    assert epochs["rivers"] == 40 / (build_training(mixed).data.select("rivers").num_tokens // 32)
    # Negative control: other shares, other weights.
    other = train(mixed.override("data.mixture.rivers=0.5"), tmp_path / "other")
    assert not all(torch.equal(t, expected[name]) for name, t in processes.weights(other.run_dir, 8).items())


def test_a_longer_run_keeps_the_rows_that_it_has_read(mixed: Recipe, tmp_path: Path) -> None:
    """Half of 16 steps is the eighth, but the shares changed at the fourth, and what was read stays read."""
    steady = mixed.override("optim.schedule=constant")
    run = train(steady, tmp_path / "run").run_dir
    longer = branch(run, tmp_path / "new", ["train.steps=16"]).recipe
    assert longer.data.later(16) == [(4, {"rivers": 1.0})]
    planned = build_training(steady).plan
    now = build_training(longer).plan
    for step in range(8):
        assert torch.equal(planned.batch(step)[0].input_ids, now.batch(step)[0].input_ids)
    later = '[{"at": 4, "mixture": {"rivers": 1}}, {"at": 8, "mixture": {"seas": 1}}]'
    annealed = branch(f"{run}@step-8", tmp_path / "new", ["train.steps=16", f"data.phases={later}"]).recipe
    assert [at for at, _ in annealed.data.later(16)] == [4, 8]
    with pytest.raises(SettingsError, match="cannot change before step 8"):
        branch(run, tmp_path / "new", ["train.steps=16", 'data.phases=[{"at": 8, "mixture": {"seas": 1}}]'])
    with pytest.raises(SettingsError, match=r"data.mixture.rivers cannot change in a branch"):
        branch(run, tmp_path / "new", ["train.steps=16", "data.mixture.rivers=0.5"])


def test_a_branch_may_leave_out_a_phase_and_its_collection_or_read_another(corpus: Path, tmp_path: Path) -> None:
    """The sequences that were read stay the same, and the corpus is still that of the run."""
    phases = "data.phases=[{at: 2, mixture: {seas: 1}}]"
    words = ("train.steps=3", "train.checkpoint_every=1", "evaluate.every=0", "evaluate.tokens=32")
    train(tiny_recipe(corpus, "data.mixture={rivers: 1}", phases, *words), tmp_path / "run")
    cooled = branch(tmp_path / "run@step-1", tmp_path / "cooled", cooldown=1)
    assert cooled.recipe.data.phases == () and train(cooled).step == 2
    given = ["train.steps=3", "optim.schedule=constant", phases]
    more = train(branch(tmp_path / "cooled", tmp_path / "more", given)).evaluation
    assert more is not None and list(more.domains) == ["rivers", "seas"]
    with pytest.raises(SettingsError, match="already taken 3 steps"):
        branch(tmp_path / "run", tmp_path / "new", ["train.steps=2"])


def test_a_recipe_is_read_back(mixed: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(mixed.to_yaml())
    assert load_recipe(path) == mixed
    assert mixed.data.collections == ("rivers", "seas")


def test_a_dry_run_knows_the_collections(mixed: Recipe, tmp_path: Path) -> None:
    """A name that the prepared directory lacks is refused, as by the run; one still to be made may hold it."""
    other = mixed.override("data.mixture={lakes: 1}", "data.phases=[]")
    with pytest.raises(DataError, match="lakes"):
        estimate(other)
    assert not estimate(other.override(f"data.directory={tmp_path / 'later'}")).collections

"""The tree of a family: its edges, their support, what is said of direction, and what is not."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.cli import lineage as commands
from fathom.errors import ModelError
from fathom.lineage import tree
from tests.lineage.test_direction import changed, moved, pruned
from tests.lineage.zoo import build, save, tiny_config


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """base → tuned → further, base → sparse, a mean of two of them, and two strangers."""
    root = tmp_path_factory.mktemp("tree")
    config = tiny_config("llama", num_hidden_layers=4)
    base = save(build(config, 3, torch.float32, trained=True), root / "base", 512)
    tuned = changed(base, root / "tuned", moved(0.2, 1))
    changed(tuned, root / "further", moved(0.2, 2))
    changed(base, root / "sparse", pruned)
    one, two = (load_file(root / name / "model.safetensors") for name in ("base", "further"))
    mean = changed(base, root / "mean", lambda t: t)
    save_file({n: (0.9 * one[n] + 0.1 * two[n]).contiguous() for n in one}, mean / "model.safetensors")
    for seed, name in ((11, "stranger"), (12, "another")):
        save(build(config, seed, torch.float32, trained=True), root / name, 512)
    return root


@pytest.mark.slow
def test_the_tree_of_a_family(models):
    names = ["further", "sparse", "base", "tuned", "stranger", "mean"]
    result = commands.tree([str(models / name) for name in names])
    data = json.loads(json.dumps(result.data))
    family, alone = data["families"]
    short = {str(models / name): name for name in names}
    edges = {frozenset((short[e["a"]], short[e["b"]])): e for e in family["edges"]}
    assert len(family["models"]) == 5 and len(edges) == 3 and not any("mean" in pair for pair in edges)
    assert [short[model] for model in alone["models"]] == ["stranger"]
    assert {frozenset(("tuned", "further")), frozenset(("base", "sparse"))} <= set(edges)
    assert frozenset(("base", "further")) not in edges  # two steps apart
    assert all(0.4 <= e["support"] <= 1 and e["p"] < 1e-6 for e in edges.values())
    sparse = edges[frozenset(("base", "sparse"))]["direction"]
    assert short[sparse["made"]] == "sparse" and short[sparse["source"]] == "base"
    assert edges[frozenset(("tuned", "further"))]["direction"]["made"] is None
    (merge,) = family["merges"]
    assert short[merge["child"]] == "mean"
    assert {short[s["parent"]]: round(s["share"], 3) for s in merge["found"]["shares"]} == {"base": 0.9, "further": 0.1}
    assert "it is not a confidence" in result.text and "mean: two parents" in result.text
    assert all(len(line) <= 80 for line in result.text.splitlines())
    assert all("no parent is missing" in " ".join(text.split()) for text in (result.text, data["merges_note"]))
    assert "direction: cannot be told" in result.text and "sparse from " in " ".join(result.text.split())


def test_siblings_without_their_parent_are_joined_and_it_is_said(models):
    result = commands.tree([str(models / name) for name in ("tuned", "sparse")])
    (edge,) = result.data["families"][0]["edges"]
    assert edge["direction"]["made"] is None and result.data["note"] == tree.MISSING
    assert tree.MISSING in " ".join(result.text.split())


def test_unrelated_models_have_no_tree(models):
    found = tree.tree([models / "stranger", models / "another"])
    assert [family.edges for family in found.families] == [(), ()]
    with pytest.raises(ModelError, match="at least two"):
        tree.tree([models / "base", models / "base"])


def test_a_spanning_tree_joins_the_nearest_first():
    """A chain of drifts that add up comes back as that chain, whatever the order of the models."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        order = draw.permutation(6)
        place = np.argsort(order)
        drifts = {(i, j): float(abs(place[i] - place[j]) ** 0.5) for i in range(6) for j in range(i + 1, 6)}
        chosen = {frozenset(edge) for edge in tree.spanning(range(6), drifts)}
        assert chosen == {frozenset((int(order[k]), int(order[k + 1]))) for k in range(5)}


def test_components_are_what_edges_connect():
    assert tree.grouped(5, [(0, 3), (3, 4)]) == [[0, 3, 4], [1], [2]]


@pytest.mark.slow
def test_a_root_is_claimed_where_its_children_go_alike(models, tmp_path):
    """Three children of one base that share a part of their steps; one has a child of its own."""
    base = models / "base"
    alike = changed(base, tmp_path / "alike", moved(0.15, 20))
    one, two, three = (changed(alike, tmp_path / str(seed), moved(0.2, seed)) for seed in (5, 6, 7))
    below = changed(one, tmp_path / "below", moved(0.2, 8))
    (family,) = tree.tree([three, below, one, two, base]).families
    assert family.root == (str(base),) and not any(edge.undecided for edge in family.edges)
    assert tree.tree([three, below, one, two]).families[0].root == ()  # without it, nobody is
    apart = [changed(base, tmp_path / f"apart{seed}", moved(0.2, seed)) for seed in (5, 6)]
    assert tree.tree([base, *apart]).families[0].root == ()  # steps at right angles have no direction


@pytest.mark.slow
def test_a_merge_has_two_parents_and_takes_no_edge_from_them(models, tmp_path):
    """Two children of one base and their mean, which is nearer to the base than either."""
    children = [changed(models / "base", tmp_path / name, moved(0.2, seed)) for name, seed in (("one", 5), ("two", 6))]
    first, second = (load_file(path / "model.safetensors") for path in children)
    middle = changed(models / "base", tmp_path / "middle", lambda t: t)
    save_file({n: (0.5 * first[n] + 0.5 * second[n]).contiguous() for n in first}, middle / "model.safetensors")
    found = tree.tree([models / "base", *children, middle])
    (family,) = found.families
    (merge,) = family.merges
    assert merge.child == str(middle) and merge.parents == {str(path) for path in children} and not merge.undecided
    base = str(models / "base")
    assert {frozenset((e.a, e.b)) for e in family.edges} == {frozenset((base, str(path))) for path in children}
    assert not any(edge.undecided for edge in family.edges)  # the children's own base, although the merge is nearer
    later = changed(middle, tmp_path / "later", moved(0.2, 8))  # made from the merge, which has no edge
    (edge,) = (e for e in tree.tree([models / "base", *children, middle, later]).families[0].edges if "later" in e.b)
    assert edge.undecided == f"the merge {middle} is nearer"
    again = tree.tree([*children, middle, changed(middle, tmp_path / "again", moved(1e-4, 7))])
    assert all(one.undecided == "" or "other pairs" in one.undecided for one in again.families[0].merges)

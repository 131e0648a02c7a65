"""Tables of papers: the files say what was published, a small one is made, resumed, and fails if a mechanism is off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.experiments.arms import tokens
from fathom.experiments.paper import load_table, planned
from fathom.experiments.paper_table import TABLE, make_table
from fathom.models.cost import count_parameters
from fathom.recipe import Recipe
from fathom.settings import packaged_recipes

TABLES = {name: path for name, path in packaged_recipes().items() if name.startswith("papers/")}

# What papers, authors' scripts and configurations say of each full tier: parameters, tokens, steps, as exactly as they
# say it; a number without digits after its B is one that the source gives rounded.
PYTHIA = {
    **{"70m": "70426624", "160m": "162322944", "410m": "405334016", "1b": "1011781632"},
    **{"1.4b": "1414647808", "2.8b": "2775208960"},
}
DEPTH = {"360m": "360672192", "500m": "498165888", "710m": "716068096", "1.5b": "1343774208", "3b": "2747998208"}
LLAMA = {"125m": "163M", "410m": "0.41B", "410m-deep": "0.71B", "834m": "838M", "1.4b": "1.42B", "2.8b": "2.63B"}
PUBLISHED: dict[str, dict[str, tuple[str, str, str]]] = {
    **{
        f"depth-attention/{name}": {size: (DEPTH[size], "32.77B", "15625") for size in sizes}
        for name, sizes in {
            **dict.fromkeys(("figure4", "looped", "table5", "table6"), ("500m",)),
            "figure2": tuple(DEPTH),
            "table1": ("1.5b", "3b"),
        }.items()
    },
    "ponderlm/pythia": {size: (count, "300B", "143000") for size, count in PYTHIA.items()},
    "ponderlm/feedback": {size: (PYTHIA["70m"], "30B", "") for size in ("70m-3", "70m-6")},
    "ponderlm/top_k": {"70m": ("", "", "")},
    "ponderlm/scaling": {
        f"{family}-{size}": ("0.41B" if size == "405m" else LLAMA[size], "", "")
        for family in ("gpt2", "llama")
        for size in ("405m", "834m", "1.4b")
    },
    "ponderlm/continued": {"1b": (PYTHIA["1b"], "30B", "")},
    "ponderlm/alpaca": {size: (PYTHIA[size], "", "2031") for size in ("1b", "1.4b")},
    "ponderlm-2/pythia": {size: (PYTHIA[size], "300B", "143000") for size in ("410m", "1.4b")},
    "ponderlm-2/table3": {"1.4b": (LLAMA["1.4b"], "26B", "50000")},
    "ponderlm-2/thoughts": {"410m": (LLAMA["410m"], "26B", "50000")},
    "ponderlm-2/scaling": {size: (count, "26B", "50000") for size, count in LLAMA.items()},
    "ponderlm-2/continued": {"3b": ("3.21B", "6B", "")},
    "ponderlm-3/table": {"410m": (LLAMA["410m"], "26B", "50000")},
    "adaponderlm/table": {size: (PYTHIA[size], "26B", "") for size in ("70m", "410m")},
    "adaponderlm/continued": {size: ("", "", "") for size in ("1.4b", "2.8b")},
    "latent-cot/table": {size: (LLAMA[size], "26B", "50000") for size in ("410m", "1.4b")},
    "latent-cot/router": {"70m": ("", "", "")},
    "latent-cot/penalty": {"70m": ("", "", "")},
    "freqkv/bands": {"llama-2-7b": ("6738415616", "", "1000")},
}
UNITS = {"": 1, "M": 10**6, "B": 10**9}


def agrees(found: int, said: str) -> bool:
    """Whether a number is the published one, to the digits that the source gives."""
    if not said:
        return True
    digits, unit = (said[:-1], said[-1]) if said[-1] in "MB" else (said, "")
    decimals = len(digits.partition(".")[2])
    return round(found / UNITS[unit], decimals) == float(digits)


def written(tmp_path: Path, small: Recipe, **rows: str) -> Path:
    """The file of a table with these arms, which are made from the small recipe."""
    (tmp_path / "small.yaml").write_text(small.to_yaml())
    numbers = {name: f"{{arm: '{arm}', published: {{one: [{i}.5]}}}}" for i, (name, arm) in enumerate(rows.items())}
    text = "paper: none\ntable: none\nrows:\n" + "".join(f"  {name}: {row}\n" for name, row in numbers.items())
    size = f"{{sizes: {{one: {{recipe: {tmp_path / 'small.yaml'}}}}}}}"
    path = tmp_path / "table.yaml"
    path.write_text(f"{text}tiers:\n  tiny: {size}\n  full: {size}\n")
    return path


def made(path: Path, out: Path):
    table = load_table(path)
    return make_table(table, "tiny", table.plans("tiny"), out, quiet=True)


def test_every_table_is_a_table():
    """Read and checked, which needs neither data nor models, and each says which table."""
    papers = {load_table(path).paper.split(",")[0] for path in TABLES.values()}
    assert papers == {
        *("Depth-Attention", "PonderLM", "PonderLM-2", "PonderLM-3", "AdaPonderLM"),
        *("Token-level adaptive latent CoT", "FreqKV"),
    }
    assert all(load_table(path).table for path in TABLES.values())


def test_a_small_size_stands_next_to_the_papers():
    """Its own numbers where it has any, else those of the first size that has."""
    table = load_table(TABLES["papers/adaponderlm/table"])
    assert [table.compared_with(size) for size in ("tiny", "70m", "410m")] == ["70m", "70m", "410m"]
    assert load_table(TABLES["papers/depth-attention/figure2"]).compared_with("360m") == "500m"


@pytest.mark.slow
def test_full_tiers_are_what_was_published():
    """Controls alone, whose models are what the sources count; every size of every table stands in `PUBLISHED`."""
    found = {name.removeprefix("papers/"): load_table(path) for name, path in TABLES.items()}
    assert {name: set(table.tiers["full"].sizes) for name, table in found.items()} == {
        name: set(sizes) for name, sizes in PUBLISHED.items()
    }
    for name, table in found.items():
        for size, said in PUBLISHED[name].items():
            recipe = table.plans("full")[size].recipe
            made = (count_parameters(recipe.config()), tokens(recipe), recipe.train.steps)
            assert all(map(agrees, made, said)), (name, size, made)
    assert not agrees(405_334_017, PYTHIA["410m"]) and not agrees(25_400_000_000, "26B")


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_full_tiers_plan_all_arms(name):
    """Every arm is made, none differs from what its file says, and no two arms are written alike."""
    table = load_table(TABLES[name])
    for tier in table.tiers:
        plans = table.plans(tier)
        for plan in plans.values():
            whole = [json.dumps(recipe.to_dict(), sort_keys=True, default=str) for recipe in plan.recipes.values()]
            assert len(set(whole)) == len(whole)
    assert planned(table, "full", plans).differs == []


def test_a_plan_that_is_not_the_papers_is_seen(tmp_path, small: Recipe, capsys):
    path = written(tmp_path, small, vanilla="vanilla", uniform="uniform_depth")
    path.write_text(path.read_text().replace("small.yaml}", "small.yaml, steps: 7}"))
    assert main(["compare", str(path), "--dry-run"]) == 1
    assert f"Not the paper's: one: {small.train.steps} steps, published 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("one: [0.5]", "two: [0.5]"), "rows.vanilla.published=.*: allowed: one"),
        (("one: [0.5]", "one: [1, 2]"), "rows.vanilla.published=.*: allowed: 1 numbers, one for each column"),
        (("  full:", "  huge:"), "tiers.full: a table has the tiers tiny and full"),
    ],
)
def test_a_file_that_is_no_table(change, words, tmp_path, small: Recipe):
    path = written(tmp_path, small, vanilla="vanilla", uniform="uniform_depth")
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(SettingsError, match=words):
        load_table(path)


def test_options_of_a_table_belong_to_tables(tmp_path, small: Recipe, capsys):
    (tmp_path / "small.yaml").write_text(small.to_yaml())
    assert main(["compare", str(tmp_path / "small.yaml"), "--arms", "vanilla,loop", "--tier", "full"]) == 2
    assert "--tier belongs to a paper's table" in capsys.readouterr().err
    table = written(tmp_path, small, vanilla="vanilla", uniform="uniform_depth")
    assert main(["compare", str(table), "--arms", "vanilla,loop"]) == 2
    assert "a paper's table has its own arms" in capsys.readouterr().err
    assert main(["train", str(table)]) == 2
    assert "is a file of `fathom compare`" in capsys.readouterr().err


@pytest.mark.slow
def test_a_table_beside_the_published_numbers(tmp_path, small: Recipe):
    """Also after a death between two runs: the same bytes."""
    path, out = written(tmp_path, small, vanilla="vanilla", uniform="uniform_depth"), tmp_path / "out"
    report = made(path, out)
    assert [row.row for row in report.rows] == ["vanilla", "uniform"] and not report.same
    assert [row.published for row in report.rows] == [{"perplexity": 0.5}, {"perplexity": 1.5}]
    assert report.rows[0].difference is None and report.rows[1].difference is not None
    before = (out / TABLE).read_bytes()
    (out / TABLE).unlink()
    (out / "one/arms/uniform/seed-0/result.json").unlink()
    made(path, out)
    assert (out / TABLE).read_bytes() == before


@pytest.mark.slow
def test_a_mechanism_that_is_off_fails_the_table(tmp_path, small: Recipe, capsys):
    path = written(tmp_path, small, vanilla="vanilla", closed="uniform_depth;model.mixer_options.blend=0.0")
    assert made(path, tmp_path / "out").same == ["one: vanilla and closed"]
    assert main(["compare", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "a mechanism is off: one: vanilla and closed" in capsys.readouterr().out

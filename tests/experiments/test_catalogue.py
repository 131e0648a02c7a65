"""`fathom mechanisms`: every registered mechanism, with the published numbers where there are some."""

import io
import json

import pytest
from rich.console import Console

from fathom.cli.main import main
from fathom.experiments.catalogue import mechanism_rows, mechanism_table, with_mechanism
from fathom.models.registry import MECHANISMS
from tests.models.cases import CASES, FAST, config_of
from tests.models.test_cost import paper_config


def test_rows_at_three_billion():
    rows = {row.name: row for row in mechanism_rows(paper_config("3b"))}
    assert set(rows) == set(MECHANISMS)
    depth = rows["depth_attention"]
    assert (depth.parameters, depth.flops, depth.io_bytes, depth.transient_bytes) == (
        0,
        239_616,
        288_768,
        4096,
    )
    assert f"{depth.flops_share:.3%}" == "0.004%"
    added = {name: rows[name].parameters for name in ("denseformer", "attention_residuals", "hyper_connections")}
    assert added == {"denseformer": 1224, "attention_residuals": 397_312, "hyper_connections": 19_663_396}


@pytest.mark.parametrize("cases", [FAST[::4], pytest.param(list(CASES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_composition_has_a_table(cases):
    for case in cases:
        assert {row.name for row in mechanism_rows(config_of(case))} == set(MECHANISMS)


def test_own_options_are_kept():
    config = paper_config("3b", mixer="depth_attention", mixer_options={"stride": 12}, residual="denseformer")
    chosen = with_mechanism(config, "mixer", "depth_attention")
    assert chosen.mixer_options["stride"] == 12 and chosen.residual == "plain"


def test_a_limit_of_trips_is_of_its_own_recurrence():
    config = config_of("loop", recurrence_options={"trips": 3})
    rows = [row.name for row in mechanism_rows(config)]
    config.max_trips = 2
    assert [row.name for row in mechanism_rows(config)] == rows
    assert with_mechanism(config, "recurrence", "loop").max_trips == 2
    assert with_mechanism(config, "recurrence", "ponder2").max_trips is None


def test_table_fits_a_terminal():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(mechanism_table(paper_config("3b")))
    text = console.export_text()
    assert "…" not in text and all(name in text for name in MECHANISMS)
    assert max(map(len, text.splitlines())) <= 80


def test_command(capsys, tmp_path):
    paper_config("tiny", mixer="depth_attention", mixer_options={"stride": 1}).save_pretrained(tmp_path)
    assert main(["mechanisms", "--config", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vanilla"]["parameters"] == 193_216
    assert {row["name"] for row in found["mechanisms"]} == set(MECHANISMS)
    assert main(["mechanisms", "--config", str(tmp_path / "nothing")]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and "no such recipe" in complaint

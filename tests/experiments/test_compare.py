"""The paired experiment: it finds what is there and only that, survives its own death, and refuses nonsense."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fathom.checkpoints.find import best_run
from fathom.cli.main import main
from fathom.data.puzzles import open_data
from fathom.errors import DataError, SettingsError
from fathom.experiments import scheduler
from fathom.experiments.arms import arm_recipes, parse_arms, tokens, training_flops
from fathom.experiments.compare import carry_out, rewrite_report
from fathom.experiments.compare_page import page, quality_rows, tables
from fathom.experiments.compare_results import ComparisonReport
from fathom.experiments.contrasts import parse_contrasts
from fathom.experiments.differences import summarize
from fathom.experiments.plan import Plan, make_plan, read_measured
from fathom.experiments.workers import Team
from fathom.models.cost import count_parameters
from fathom.recipe import Recipe, parse_recipe
from fathom.report.files import write_json
from fathom.report.provenance import provenance
from fathom.training import read_metrics
from fathom.training.build import batch_plan
from tests import processes
from tests.tiny import shape


@pytest.fixture(scope="module")
def planted(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[ComparisonReport, Path]:
    """The control again under another name, and an arm that learns where the control hardly does."""
    out = tmp_path_factory.mktemp("planted")
    arms = "vanilla,again=vanilla,better=vanilla;optim.lr=1e-2"
    plan = make_plan(small.override("optim.lr=1e-4", "model.num_hidden_layers=2"), arms, seeds=3, pairs=1, out=out)
    return carry_out(plan, out, quiet=True), out


def test_a_planted_improvement_is_found_and_an_arm_against_itself_shows_nothing(planted):
    report, _ = planted
    again, better = report.arms[1], report.arms[2].difference
    assert again.difference.low <= 0 <= again.difference.high and not again.difference.excludes_zero
    assert all(row.low <= 0 <= row.high for row in again.difference_by_position)
    assert "again and vanilla have exactly equal losses" in report.verdict
    assert better.mean < -0.05 and better.high < 0 and better.p_holm < 0.05
    assert "better's held-out loss is lower than vanilla's" in report.verdict


def test_runs_are_paired(planted):
    """Same tokens, same initial values: before the first update, the losses of all arms are equal to the bit."""
    _, out = planted
    for seed in range(3):
        first = [read_metrics(out / f"arms/{arm}/seed-{seed}")[0]["loss"] for arm in ("vanilla", "again", "better")]
        assert len(set(first)) == 1
    seeds = [read_metrics(out / f"arms/vanilla/seed-{seed}")[0]["loss"] for seed in range(3)]
    assert len(set(seeds)) == 3


def test_everything_is_reported(planted):
    report, out = planted
    assert json.loads((out / "report.json").read_text())["verdict"] == report.verdict
    written = json.loads((out / "report.json").read_text())
    for key in ("command", "date", "commit", "hardware", "versions", "recipe", "seeds", "equal", "control"):
        assert key in written
    for arm in report.arms:
        assert set(arm.domains) == {"rivers", "seas"}
        assert len(arm.position_loss) == 4
        assert arm.cache_bytes_per_token.measured == arm.cache_bytes_per_token.declared
        assert len(arm.curve.loss) == len(arm.curve.seconds) == len(arm.curve.flops) == 3
        assert arm.curve.flops[-1] == pytest.approx(arm.training_flops)
        last = [run.validation.loss[-1] for run in arm.runs]
        assert (arm.curve.low[-1], arm.curve.high[-1]) == (min(last), max(last)) and min(last) < max(last)


def test_finished_work_is_kept_and_the_report_made_from_it(planted, monkeypatch):
    report, out = planted
    (out / "report.json").unlink()
    monkeypatch.setattr("fathom.experiments.scheduler.train", None)  # nothing may run
    again = carry_out(Plan.read(out), out, quiet=True)
    assert replace(again, date="", command="") == replace(report, date="", command="")


def test_a_partial_comparison_says_so(planted, tmp_path: Path):
    _, out = planted
    shutil.copytree(out, tmp_path / "part")
    shutil.rmtree(tmp_path / "part/arms/better/seed-1")
    report = summarize(Plan.read(out), tmp_path / "part", provenance())
    assert report.seeds == [0, 2] and len(report.arms[0].runs) == 2


@pytest.mark.slow
def test_stretches_of_the_context_without_targets_are_empty(tmp_path: Path):
    """The first stretches of a puzzle hold no answer: no loss there."""
    values = {
        "model": shape(vocab_size=130, max_position_embeddings=57),
        "data": {"directory": "puzzle:recall", "sequence_length": 57},
        "train": {"steps": 2, "tokens_per_step": 228, "micro_batch": 4},
        "evaluate": {"tokens": 570},
    }
    recipe = parse_recipe(values, ("train.export=false", "train.device=cpu"))
    plan = make_plan(recipe, "vanilla,depth_attention", seeds=2, pairs=0, out=tmp_path)
    report = carry_out(plan, tmp_path, quiet=True)
    control, arm = report.arms
    known = [loss is not None for loss in control.position_loss]
    assert len(known) == 8 and 2 <= sum(known) < 8
    assert known == [row is not None for row in arm.difference_by_position]
    text = page(report)
    assert "Parts of the context without targets have no point." in text
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)

    results = sorted(tmp_path.glob("arms/*/*/result.json"))
    assert len(results) == 4 and not any("NaN" in path.read_text() for path in results)


def test_metrics_of_a_killed_run_may_repeat_or_lack_lines(planted, tmp_path: Path):
    report, out = planted
    shutil.copytree(out, tmp_path / "killed")
    again = tmp_path / "killed/arms/better/seed-1/metrics.jsonl"
    lines = again.read_text().splitlines()
    last = next(line for line in reversed(lines) if "val/loss" in line)
    again.write_text("\n".join([*lines, last, ""]))
    lost = tmp_path / "killed/arms/vanilla/seed-2/metrics.jsonl"
    kept = [line for line in lost.read_text().splitlines() if json.loads(line)["step"] not in (3, 4)]
    lost.write_text("\n".join([*kept, ""]))
    found = summarize(Plan.read(out), tmp_path / "killed", provenance())
    assert found.arms[2].curve == report.arms[2].curve
    assert found.arms[0].curve.tokens == [8 * 256, 12 * 256]
    assert len(found.arms[2].difference_while_training.mean) == 10
    assert set(found.arms[1].difference_while_training.mean) == {0.0}
    lost.write_text("")
    page(summarize(Plan.read(out), tmp_path / "killed", provenance()))


@pytest.mark.slow
def test_a_diverging_arm_is_left_out_and_named(small: Recipe, tmp_path: Path, capsys):
    base = small.override("train.max_skipped=2", "train.skip_spikes=null", "train.log_every=1")
    arms = "vanilla,wild=vanilla;optim.lr=1e30;optim.clip=null;optim.warmup=0,again=vanilla"
    plan = make_plan(base, arms, seeds=2, pairs=0, out=tmp_path)
    report = carry_out(plan, tmp_path)
    assert "wild-seed-0: failed at step" in capsys.readouterr().err
    assert [(row.arm, row.seed) for row in report.failed] == [("wild", 0), ("wild", 1)]
    assert "again and vanilla have exactly equal losses" in report.verdict
    assert "wild with seed 0 (at step" in report.verdict and report.seeds == [0, 1]
    assert "without wild, seed 1, which failed" in quality_rows(report)[0]
    assert "steps in a row" in page(report) and "wild, seed 1" in page(report)
    failure = tmp_path / "arms/wild/seed-0/failed.json"
    before = failure.stat().st_mtime_ns
    carry_out(plan, tmp_path, quiet=True)
    assert failure.stat().st_mtime_ns == before
    carry_out(plan, tmp_path, quiet=True, retry_failed=True)
    assert failure.stat().st_mtime_ns > before


def test_a_seed_whose_control_failed_is_left_out(planted, tmp_path: Path, monkeypatch):
    _, out = planted
    shutil.copytree(out, tmp_path / "part")
    plan = Plan.read(out)
    for arm, seed in (("vanilla", 1), ("better", 2)):
        run = tmp_path / f"part/arms/{arm}/seed-{seed}"
        (run / "result.json").unlink()
        (run / "failed.json").write_text(json.dumps({"error": "stopped", "step": 7}))
    shutil.rmtree(tmp_path / "part/arms/again/seed-1")
    monkeypatch.setattr("fathom.experiments.scheduler.train", None)  # it is not trained for nothing
    report = carry_out(plan, tmp_path / "part", quiet=True)
    assert report.seeds == [0, 2] and [len(arm.runs) for arm in report.arms] == [2, 2, 1]
    assert "better ended" in report.verdict and "without an interval" in report.verdict
    assert "vanilla with seed 1 (at step 7) and better with seed 2 (at step 7) failed" in report.verdict
    assert best_run(tmp_path / "part").parent.name == "better" and "planned seeds are done" not in report.verdict


def test_nothing_finished_is_said(planted, tmp_path: Path):
    report = summarize(Plan.read(planted[1]), tmp_path, provenance())
    assert quality_rows(report)[0] == "Held-out loss: no seed is finished by every arm yet"
    assert all(rows for *_, rows in tables(report)) and "there is no result" in page(report)


def test_what_torchrun_may_not_start(planted, monkeypatch, capsys):
    """Several workers, whose ranks would wait for each other's runs, and measurements, which are of one process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["compare", str(planted[1]), "--workers", "2"]) == 2
    assert "its ranks train one arm after another: leave --workers at 1" in capsys.readouterr().err
    assert main(["compare", str(planted[1])]) == 2
    assert "set --pairs to 0" in capsys.readouterr().err


def _on_all_ranks(plan: Plan, out: Path) -> None:
    report = carry_out(plan, out, quiet=True)
    assert [arm.name for arm in report.arms] == ["vanilla", "uniform"]


@pytest.mark.slow
def test_two_ranks_train_one_arm_after_another(small: Recipe, tmp_path: Path):
    """Under torchrun: the losses of one process, in one report."""
    arms = tuple(parse_arms("vanilla,uniform=uniform_depth"))
    plan = Plan(small.override("parallel.name=ddp"), arms, (0,), pairs=0)
    processes.run_ranks(2, _on_all_ranks, plan, tmp_path / "two")
    processes.run(_on_all_ranks, Plan(small, arms, (0,), pairs=0), tmp_path / "one")
    one, two = (
        [processes.losses(tmp_path / name / "arms" / arm.name / "seed-0") for arm in arms] for name in ("one", "two")
    )
    assert two[0] == pytest.approx(one[0], rel=1e-5) and two[1] == pytest.approx(one[1], rel=1e-5)
    assert one[0] != pytest.approx(one[1], rel=1e-5)
    assert json.loads((tmp_path / "two/report.json").read_text())["seeds"] == [0]


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("train.keep_last=9", True),
        ("track.project=x", True),
        ("train.micro_batch=4", False),
        ("train.compile=true", False),
    ],
)
def test_a_measurement_is_kept_only_where_it_still_holds(planted, override: str, kept: bool):
    _, out = planted
    plan = Plan.read(out)
    changed = replace(plan, recipe=plan.recipe.override(override))
    assert (read_measured(changed, out, "again") is not None) == kept


def _compare(out: Path, method: str) -> None:
    scheduler.multiprocessing = SimpleNamespace(get_context=lambda _: multiprocessing.get_context(method))
    carry_out(Plan.read(out), out, Team(workers=2), quiet=True)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_killed_and_continued_by_two_workers(small: Recipe, tmp_path: Path, method: str):
    """Kill everything in the middle: the rerun ends with the very losses of an undisturbed comparison. Workers that are
    spawned, as everywhere else, import torch anew."""
    recipe = small.override("train.checkpoint_every=4")
    calm = make_plan(recipe, "vanilla,depth_attention", seeds=1, pairs=0, out=tmp_path / "calm")
    expected = carry_out(calm, tmp_path / "calm", quiet=True)
    out = tmp_path / "killed"
    out.mkdir()
    shutil.copy(tmp_path / "calm/plan.json", out)
    process = processes.start(_compare, out, method, daemon=False)
    while process.is_alive() and not list(out.glob("arms/*/*/step-*")):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    report = carry_out(Plan.read(out), out, quiet=True)
    for mine, theirs in zip(report.arms, expected.arms, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-6)


def test_equal_flops(small: Recipe):
    arms = parse_arms("vanilla,loop,larger=vanilla;model.num_hidden_layers=8,shorter=vanilla;train.steps=5")
    recipes = arm_recipes(small.override("train.steps=1000"), arms, "flops")
    spent = {name: training_flops(recipe) for name, recipe in recipes.items()}
    assert spent["loop"] == pytest.approx(spent["vanilla"], rel=1e-3)
    assert spent["larger"] == pytest.approx(spent["vanilla"], rel=1e-3)
    assert recipes["loop"].train.steps < recipes["vanilla"].train.steps
    assert recipes["shorter"].train.steps == 5  # what an arm says itself is left alone


def test_an_arm_as_large_as_another(small: Recipe):
    """A loop holds the experts that bring its parameters nearest to those of as many layers without one."""
    looped = "model.num_hidden_layers=4;model.recurrence_options.trips=2;model.experts="
    arms = parse_arms(f"once=vanilla;model.num_hidden_layers=6;model.experts=8,loop=loop;{looped}as-large-as-once")
    recipes = arm_recipes(small.override("model.intermediate_size=64"), arms, "flops")
    once, loop = (count_parameters(recipes[name].config()) for name in ("once", "loop"))
    found = recipes["loop"].model["experts"]
    aside = [count_parameters(recipes["loop"].override(f"model.experts={found + by}").config()) for by in (-1, 1)]
    assert abs(loop - once) < min(abs(other - once) for other in aside)
    assert isinstance(found, int) and found > 8
    wide = parse_arms("six=vanilla;model.num_hidden_layers=6,wide=loop;model.intermediate_size=as-large-as-six")
    one, other = (count_parameters(recipe.config()) for recipe in arm_recipes(small, wide, "tokens").values())
    assert other == pytest.approx(one, rel=0.01)
    many = "model.num_hidden_layers=1;model.experts=70;model.experts_per_token=70;model.intermediate_size"
    wide = parse_arms(f"six=vanilla;model.num_hidden_layers=6,wide=vanilla;{many}='as-large-as-six'")
    found = arm_recipes(small, wide, "tokens")["wide"].model["intermediate_size"]
    assert isinstance(found, int) and found % 70 == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("model.experts=as-large-as-nobody", "where ARM is vanilla"),
        ("model.experts=as-large-as-loop", "where ARM is vanilla"),
        ("model.experts=as-large-as-vanilla;model.intermediate_size=as-large-as-vanilla", "one of model.experts and"),
        ("train.steps=as-large-as-vanilla", "one of model.experts and"),
        ("model.recurrence_options.trips=as-large-as-vanilla", "one of model.experts and"),
        ("model.recurrence_options.tripz=2;model.experts=as-large-as-vanilla", "tripz"),
        ("model.num_hidden_layers=30;model.intermediate_size=as-large-as-vanilla", "the nearest number is"),
        ("model={intermediate_size: as-large-as-vanilla}", "one of model.experts and"),
    ],
)
def test_a_number_that_cannot_be_found(small: Recipe, words: str, why: str):
    with pytest.raises(SettingsError, match=why):
        arm_recipes(small, parse_arms(f"vanilla,loop=loop;{words}"), "tokens")


def test_arms_of_fewer_steps_read_what_the_control_reads(small: Recipe):
    """Phases begin at the control's steps; one that an arm does not reach changes nothing before."""
    phases = "[{at: 0.3, mixture: {seas: 1}}, {at: 0.9, mixture: {rivers: 1}}]"
    base = small.override("train.steps=40", "data.mixture={rivers: 1}", f"data.phases={phases}")
    arms = parse_arms("vanilla,loop,shorter=vanilla;train.steps=5,same=depth_attention;train.steps=40")
    recipes = arm_recipes(base, arms, "flops")
    data = open_data(base.data.directory, collections=base.data.collections)
    plans = {name: batch_plan(recipe, data) for name, recipe in recipes.items()}
    assert 12 < recipes["loop"].train.steps < 36 and recipes["shorter"].train.steps == 5
    for name in ("loop", "shorter", "same"):
        for step in range(recipes[name].train.steps):
            read, expected = (plans[one].batch(step)[0].input_ids for one in (name, "vanilla"))
            assert torch.equal(read, expected), f"{name}, step {step}"
    assert recipes["same"].data == base.data
    fixed = base.override("data.phases=[{at: 30, mixture: {seas: 1}}]")  # at a step, not at a share of the steps
    recipes = arm_recipes(fixed, parse_arms("vanilla,short=vanilla;train.steps=20,same=loop;train.steps=40"), "tokens")
    assert recipes["short"].data.phases == () and list(recipes["short"].data.mixture) == ["rivers", "seas"]
    assert recipes["same"].data == fixed.data


@pytest.mark.parametrize(
    "phases", ["[{at: 7, mixture: {seas: 1}}]", "[{at: .1, mixture: {seas: 1}}, {at: .2, mixture: {rivers: 1}}]"]
)
def test_a_phase_that_an_arm_does_not_reach(small: Recipe, tmp_path: Path, phases: str):
    """A comparison is planned, opened and continued without it."""
    base = small.override("train.steps=8", "data.mixture={rivers: 1, seas: 0}", f"data.phases={phases}")
    plan = make_plan(base, "vanilla,loop", seeds=1, equal="flops", pairs=0, out=tmp_path)
    write_json(tmp_path / "plan.json", plan.written())
    assert Plan.read(tmp_path) == plan


def test_equal_trips(small: Recipe):
    arms = parse_arms("vanilla,loop,ponder,ponder2,half=loop;model.recurrence_options={trips: 2, prelude: 1, coda: 1}")
    recipes = arm_recipes(small.override("train.steps=1000"), arms, "trips")
    layers = recipes["half"].config().num_hidden_layers
    half = round(1000 / (1 + (layers - 2) / layers))
    expected = {"vanilla": 1000, "loop": 333, "ponder": 250, "ponder2": 125, "half": half}
    assert {name: recipe.train.steps for name, recipe in recipes.items()} == expected


@pytest.mark.slow
def test_halting_arms_tell_their_trips(small: Recipe, tmp_path: Path):
    halting = "halting=latent_cot;model.recurrence_options={trips: 3, tau: 0.5, router_bias: 0.2}"
    plan = make_plan(small, f"vanilla,loop,{halting}", seeds=2, pairs=0, out=tmp_path)
    report = carry_out(plan, tmp_path, quiet=True)
    vanilla, loop, found = (arm.trips for arm in report.arms)
    assert (vanilla.mean, vanilla.shares, loop.mean) == (1.0, None, 3.0)
    assert 1 < found.mean < 3 and sum(found.shares) == pytest.approx(1) and len(found.shares) == 3
    assert found.mean == pytest.approx(sum(k * share for k, share in enumerate(found.shares, 1)))
    assert len(found.correlations) == 2
    for row in found.correlations:
        assert -1 <= row.low <= row.value <= row.high <= 1
    shown = page(report)
    assert "When tokens halt" in shown and "Loss over iterations" in shown
    lines = read_metrics(tmp_path / "arms/halting/seed-0")
    assert all(1 <= line["trips"] <= 3 for line in lines if "grad_norm" in line)
    assert any("val/trips" in line for line in lines)


def test_equal_tokens(small: Recipe):
    arms = parse_arms("vanilla,loop,betas=vanilla;optim.betas=[0.8,0.9]")
    recipes = arm_recipes(small, arms, "tokens")
    assert len({tokens(recipe) for recipe in recipes.values()}) == 1
    assert recipes["betas"].optim.betas == (0.8, 0.9)


def test_an_arm_drops_options_of_another_mechanism(small: Recipe):
    base = small.override("model.mixer=depth_attention", "model.mixer_options.stride=1")
    recipes = arm_recipes(base, parse_arms("vanilla,depth_attention,denseformer"), "tokens")
    assert "mixer_options" not in recipes["vanilla"].model
    assert recipes["depth_attention"].model["mixer_options"] == {"stride": 1}
    assert recipes["denseformer"].model["mixer"] == "none"


def test_whole_seeds_come_first(small: Recipe, tmp_path: Path):
    plan = make_plan(small, "vanilla,loop", seeds=2, out=tmp_path)
    assert [(task.arm, task.seed) for task in plan.tasks(tmp_path)][:2] == [("vanilla", 0), ("loop", 0)]


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("vanilla,vanilla", "vanilla appears twice"),
        ("vanilla", "at least one more arm"),
        ("vanilla,magic", "unknown mechanism 'magic'"),
        ("vanilla,a=depth_attention+uniform_depth", "two mechanisms of the mixer axis"),
        ("vanilla,depth_attention;optim.lr=1", "needs a name"),
        ("vanilla,../x=vanilla", "name may contain letters"),
        ("vanilla,a=vanilla;optim.rate=1", "optim.rate: unknown key; allowed: name, lr"),
        ("vanilla,a=depth_attention;model.mixer_options.pace=1", "mixer_options.pace is not an option"),
        ("vanilla,a=vanilla;model.vocab_size=200", "200"),
        (
            "vanilla," + "a" * 300 + "=loop",
            "a name of 300 characters; allowed: 100 at most",
        ),
        ("vanilla,a=vanilla;data.directory=/nowhere", "arm a: data.directory must be equal in all arms"),
        ("vanilla,a=vanilla;evaluate.tokens=9", "arm a: evaluate.tokens must be equal"),
        ("vanilla,a=vanilla;train.seed=9", "arm a: train.seed must be equal"),
        ("vanilla,a=vanilla;train={seed: 9}", "arm a: train.seed must be equal"),
        ("vanilla,a=vanilla;train.tokens_per_step=512", "arm a: train.tokens_per_step must be equal"),
        ("vanilla,a=vanilla;train.micro_batch=3", "allowed: a divisor of 8"),
        ("vanilla,a=vanilla;optim.only=[gates]", "optim.only=gates: matches no parameter"),
        ("vanilla,a=vanilla;optim.groups={gates: {lr: 2}}", "optim.groups=gates: matches no trainable parameter"),
        ("vanilla,a=vanilla;model.max_position_embeddings=8", "max_position_embeddings"),
    ],
)
def test_errors_come_before_work(small: Recipe, tmp_path: Path, capsys, arms: str, message: str):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(small.to_yaml())
    assert main(["compare", str(recipe), "--arms", arms, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_no_run_could_begin_with_is_said_before_work(small: Recipe, planted, tmp_path: Path, capsys, monkeypatch):
    """Kernels and attention that cannot train here, a source whose context is too short, and one not finished."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source, recipe = tmp_path / "source", tmp_path / "recipe.yaml"
    shutil.copytree(planted[1] / "arms/vanilla/seed-0", source)

    def said(values: dict, *overrides: str) -> str:
        recipe.write_text(json.dumps(values))
        words = ["compare", str(recipe), "--arms", "vanilla,loop", "--out", str(tmp_path / "out"), *overrides]
        assert main(words) == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err

    own = small.to_dict()
    assert said(own, "train.kernels=[swiglu]", "train.device=cpu").startswith("fathom: kernel swiglu needs an NVIDIA")
    assert "no backward pass on cpu" in said(own, "train.attention=flex_attention", "train.device=cpu")
    begun = {**own, "model": {"from_pretrained": str(source)}}
    assert "allowed: at most the model's max_position_embeddings=32" in said(begun, "data.sequence_length=64")
    (source / "result.json").unlink()
    assert "not finished; name one of its checkpoints" in said(begun)


def test_another_recipe_is_refused(small: Recipe, planted):
    _, out = planted
    with pytest.raises(SettingsError, match=r"another recipe; different: optim\.eps"):
        make_plan(
            small.override("optim.lr=1e-4", "model.num_hidden_layers=2", "optim.eps=1e-6"),
            "vanilla,again=vanilla",
            out=out,
        )


def test_a_report_is_written_where_no_run_could_go_on(planted, monkeypatch):
    """On a login node, say, which has no GPU."""

    def refuse(name: str) -> None:
        raise SettingsError("no CUDA device here")

    monkeypatch.setattr("fathom.experiments.plan.device_of", refuse)
    assert main(["compare", str(planted[1]), "--report"]) == 0


def test_the_command_prints_tables(planted, capsys):
    _, out = planted
    assert main(["compare", str(out), "--report"]) == 0
    printed = capsys.readouterr().out
    assert "With 3 seeds" in printed and "report.html" in printed
    tables = printed[: printed.index("With 3 seeds")]
    assert all(len(line) <= 80 for line in tables.splitlines()) and "…" not in tables
    assert main(["compare", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["control"] == "vanilla"


@pytest.fixture
def finished(planted, tmp_path: Path, monkeypatch) -> tuple[Plan, Path]:
    """A copy of finished runs that no report was written of; nothing may run."""
    _, out = planted
    shutil.copytree(out, tmp_path / "copy")
    (tmp_path / "copy" / "report.json").unlink(missing_ok=True)
    monkeypatch.setattr("fathom.experiments.scheduler.train", None)
    return Plan.read(out), tmp_path / "copy"


def test_seeds_that_are_added_after_a_report_make_it_exploratory(finished):
    """It never says sure, and neither do those after it; the same plan, whole at last, does."""
    plan, out = finished
    first = carry_out(replace(plan, seeds=(0, 1)), out, quiet=True)
    assert not first.exploratory and "exploratory" not in page(first)
    for seeds in ((0, 1, 2), (0, 1, 2), (0, 1)):  # written again, and planned as it was at first
        report = carry_out(replace(plan, seeds=seeds), out, quiet=True)
        assert report.exploratory and "exploratory and no difference counts as significant" in report.verdict
        assert not any(arm.difference.significant for arm in report.arms[1:]) and "exploratory" in page(report)


def test_contrasts_are_planned_before_a_report(finished):
    """They are kept in the plan and resumed with it; one that comes later makes the report exploratory."""
    plan, out = finished
    names = [arm.name for arm in plan.arms]
    planned = replace(plan, contrasts=parse_contrasts(f"twice={names[1]} - {names[0]}", names))
    first = carry_out(planned, out, quiet=True)
    assert not first.exploratory and "the contrast twice" in first.verdict and "twice" in page(first)
    assert first.contrasts[0].mean == pytest.approx(first.arms[1].gap.mean)
    assert not carry_out(Plan.read(out), out, quiet=True).exploratory
    later = carry_out(plan, out, quiet=True)
    assert later.exploratory and not later.contrasts


def test_an_interrupted_comparison_that_ends_as_planned_is_not_blamed(finished):
    plan, out = finished
    first, second = (out / f"arms/better/seed-{seed}/result.json" for seed in (1, 2))
    for run, words in ((second, "2 of 3 planned seeds are done"), (first, "another order; 1 of 3 planned seeds are")):
        run.rename(run.with_name("kept"))
        assert words in rewrite_report(plan, out).verdict
    for run in (first, second):
        run.with_name("kept").rename(run)
    report = carry_out(plan, out, quiet=True)
    assert not report.exploratory and any(arm.difference.significant for arm in report.arms[1:])


def test_one_seed_shows_no_result(finished):
    plan, out = finished
    carry_out(replace(plan, seeds=(0,)), out, quiet=True)
    assert not carry_out(plan, out, quiet=True).exploratory


def test_a_seed_that_failed_is_not_awaited(finished):
    plan, out = finished
    for arm in ("again", "better"):
        (out / f"arms/{arm}/seed-2/result.json").unlink()
        (out / f"arms/{arm}/seed-2/failed.json").write_text(json.dumps({"error": "stopped", "step": 7}))
    report = carry_out(plan, out, quiet=True)
    assert report.seeds == [0, 1] and "planned seeds are done" not in report.verdict


def test_a_damaged_report_is_an_error_before_work(finished):
    plan, out = finished
    (out / "report.json").write_text("{")
    with pytest.raises(DataError, match=r"report\.json is damaged.* delete it to discard its results"):
        carry_out(plan, out, quiet=True)


def test_commas_within_brackets_are_an_arms_own():
    loop = "l=loop;model.recurrence_options={injection: diagonal, norm_between: own, trips_range: [1, 3], trips: 2}"
    more = 'm=vanilla;optim.groups={"*.a, b": {lr: 2, weight_decay: 0}, c: {lr: 1}};optim.betas=[0.9, 0.99]'
    arms = parse_arms(f"vanilla, {loop},{more},n=none")
    assert [arm.name for arm in arms] == ["vanilla", "l", "m", "n"]
    assert arms[1].overrides == (loop.partition(";")[2],) and len(arms[2].overrides) == 2


def test_a_dry_run_counts_what_the_comparison_does(small, tmp_path, monkeypatch, capsys):
    """The runs of the plan with their own FLOPs; nothing is written, and what the comparison refuses is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(small.to_yaml())
    words = ["compare", "small.yaml", "--arms", "vanilla,loop", "--seeds", "2", "--equal", "flops", "--dry-run"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = make_plan(small, "vanilla,loop", seeds=2, equal="flops")
    runs = [task.recipe for task in plan.runs(tmp_path)]
    assert (found["runs"], found["flops"]) == (len(runs), pytest.approx(sum(map(training_flops, runs))))
    vanilla, loop = found["arms"]
    assert loop["steps"] < vanilla["steps"] and loop["flops"] == pytest.approx(vanilla["flops"], rel=0.1)
    assert found["hours"] == pytest.approx(vanilla["hours"] + loop["hours"]) and vanilla["hours"] > 0
    assert main(words) == 0 and "4 runs, " in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]
    assert main([*words, "train.micro_batch=3"]) == 2 and "allowed: a divisor of" in capsys.readouterr().err
    assert main([*words, "--report"]) == 2

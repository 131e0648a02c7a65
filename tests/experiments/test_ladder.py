"""A ladder from its file to its sentence, on a trainer whose losses are planted."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.experiments.arms import training_flops, without_embeddings
from fathom.experiments.dry_run import budget
from fathom.experiments.ladder import add_seeds, climb, rewrite
from fathom.experiments.ladder_results import ArmRow, LadderReport
from fathom.experiments.multipliers import _read as read_bytes
from fathom.experiments.multipliers import verdict
from fathom.experiments.rungs import LAYERS, Ladder, load_ladder
from fathom.experiments.scheduler import Task
from fathom.experiments.stages import STAGES, State
from fathom.experiments.tuning import FLAT
from fathom.models.cost import count_parameters
from fathom.recipe import load_recipe
from fathom.report.statistics import holm
from tests.experiments.fake import Planted, write_ladder

ARMS = "vanilla,again=vanilla;model.mixer=uniform_depth,better=depth_attention"
CONTRASTS = "gain=better - again, twice=better + better - vanilla - again"


def planted(monkeypatch: pytest.MonkeyPatch, **what: object) -> Planted:
    trainer = Planted(**what)  # type: ignore[arg-type]
    monkeypatch.setattr("fathom.experiments.scheduler.train", trainer.train)
    monkeypatch.setattr("fathom.experiments.scheduler.tidy", lambda: None)  # no model was made
    return trainer


def make(tmp_path: Path, arms: str = ARMS, **rules: object) -> Ladder:
    rules = {"contrasts": CONTRASTS if arms == ARMS else "", **rules}
    return load_ladder(write_ladder(tmp_path / "ladder.yaml", **rules), arms)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[LadderReport, Path]:
    """A finished ladder: an arm that is worth 1.5 times the compute at twice the rate, and one worth nothing."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        planted(patch)
        ladder = make(place)
        return climb(ladder, place / "out", quiet=True), place / "out"


def arm_of(report: LadderReport, name: str) -> ArmRow:
    return next(arm for arm in report.arms if arm.name == name)


def test_the_planted_multiplier_is_found(whole) -> None:
    report, _ = whole
    better, again = arm_of(report, "better"), arm_of(report, "again")
    for row in better.multiplier:
        assert row.low <= 1.5 <= row.high, row
    assert again.top.low <= 1 <= again.top.high
    assert better.p_holm < 0.05 < again.p_holm
    assert better.learning_rate_ratio == pytest.approx(2.0, rel=0.15)
    assert again.learning_rate_ratio == pytest.approx(1.0, rel=0.15)
    assert better.per_decade.low <= 1 <= better.per_decade.high
    of_parameters = better.views.parameters  # FLOPs grow with their square, as tokens do with parameters
    assert of_parameters.low < math.sqrt(1.5) < of_parameters.high < 1.4
    assert report.arms[0].multiplier == [] and report.arms[0].p is None
    assert all(cell.difference.p_holm is None for cell in better.rungs), "of several sizes M is judged, not a loss"
    assert report.stage == "done" and report.diverged == []
    assert "times the compute (95 % interval" in report.verdict and "to match better" in report.verdict
    assert "again and vanilla do not differ significantly" in report.verdict
    assert "2 of 2 came true" in report.verdict


def test_contrasts_are_tested_with_the_arms(whole) -> None:
    report, out = whole
    names = ("vanilla", "again", "better")
    *_, top = losses = [[arm_of(report, name).rungs[i].loss for name in names] for i in range(len(report.rungs))]
    gain, twice = report.contrasts
    for (_, again, better), difference in zip(losses, gain.rungs.values(), strict=True):
        assert difference.mean == pytest.approx(fmean(better) - fmean(again)) and difference.pairs == len(again)
    last = twice.rungs[len(losses)]
    assert last.mean == pytest.approx(2 * fmean(top[2]) - fmean(top[0]) - fmean(top[1]))
    family = [*(arm for arm in report.arms if arm.p is not None), gain.rungs[len(losses)], last]
    assert [one.p_holm for one in family] == holm([one.p for one in family])
    assert gain.rungs[1].p_holm is None, "smaller sizes are shown, not tested"
    assert f"At the largest size the contrast gain (better − again) is {gain.rungs[len(losses)]} nats" in report.verdict
    untested = replace(last, p_holm=None)
    told = verdict(replace(report, contrasts=[replace(twice, rungs={**twice.rungs, len(losses): untested})]))
    assert f"is {untested} nats, not tested" in told
    assert "Contrasts of several arms" in (out / "report.html").read_text(encoding="utf-8")


def test_tuning_reports_the_rates_that_ran(whole) -> None:
    """Whole seeds first, so that all arms have been tried once before any is tried again."""
    report, out = whole
    tuned = report.tuning[0]["better"]
    runs = {place: load_recipe(out / f"tune/1/better/lr{place:+d}/seed-1/recipe.yaml") for place in tuned.losses}
    assert tuned.rates == {place: recipe.optim.lr for place, recipe in runs.items()} and len(runs) > 3
    order = [run.run_dir.name for run in State(Ladder.read(out), out).tuning()[0]]
    cells = [len(one.losses) for rows in report.tuning for one in rows.values()]
    first = sum(cells[:3])
    assert order == ["seed-0"] * first + ["seed-1"] * first + ["seed-0"] * sum(cells[3:])


def test_the_seed_control_is_no_better_than_the_control(whole) -> None:
    seed_control = whole[0].seed_control
    assert seed_control.covers and [row.index for row in seed_control.rungs] == [1, 2]
    assert seed_control.rungs[0].difference.pairs == 5


def test_the_check_settles_the_rate(whole) -> None:
    report, out = whole
    check = arm_of(report, "better").check
    assert not check.better and check.losses[1] < min(check.losses[0], check.losses[2])
    assert check.excess == pytest.approx(0.0, abs=0.01)
    assert arm_of(report, "again").check is None  # nothing is claimed of it
    assert sorted(path.name for path in (out / "check").iterdir()) == ["better", "vanilla"]


def test_every_run_of_the_last_rung_keeps_the_seals_hash(whole) -> None:
    """Runs of other stages do not."""
    _, out = whole
    sealed = json.loads((out / "prediction.json").read_text())["sha256"]
    sealed_runs = set(out.glob("rungs/4/arms/*/*/machine.json"))
    every = set(out.rglob("machine.json"))
    assert sealed_runs and every - sealed_runs
    assert {path: json.loads(path.read_text()).get("prediction") for path in every} == {
        path: sealed if path in sealed_runs else None for path in every
    }


def test_a_rung_is_a_comparison(whole, capsys) -> None:
    _, out = whole
    assert main(["compare", str(out / "rungs/2"), "--report", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seeds"] == [0, 1, 2] and [arm["name"] for arm in report["arms"]] == ["vanilla", "again", "better"]
    assert report["arms"][2]["difference"]["mean"] < 0


@pytest.mark.slow
def test_the_report_is_a_function_of_the_directory(whole, tmp_path: Path) -> None:
    report, out = whole
    before = {name: (out / name).read_bytes() for name in ("report.json", "report.html", "runs.jsonl")}
    rewrite(Ladder.read(out), out)
    assert {name: (out / name).read_bytes() for name in before} == before
    shutil.copytree(out, tmp_path / "elsewhere")
    again = rewrite(Ladder.read(tmp_path / "elsewhere"), tmp_path / "elsewhere")
    assert again.verdict == report.verdict and again.arms == report.arms


def test_nothing_is_run_twice(whole, monkeypatch) -> None:
    _, out = whole
    trainer = planted(monkeypatch)
    assert main(["ladder", str(out), "--json"]) == 0
    assert trainer.done == []


def test_what_begins_no_run_asks_nothing_of_models(whole, tmp_path: Path, monkeypatch, capsys) -> None:
    """What is not installed here ends a ladder that begins, and not the report of one that has begun."""

    def refuse(recipe: object) -> None:
        raise SettingsError("not installed")

    monkeypatch.setattr("fathom.training.build.require_backends", refuse)
    assert main(["ladder", str(whole[1]), "--report", "--json"]) == 0
    words = ["ladder", str(write_ladder(tmp_path / "ladder.yaml")), "--arms", ARMS, "--out", str(tmp_path / "new")]
    assert main(words) == 2 and capsys.readouterr().err.endswith("not installed\n")


def test_what_cannot_train_here_is_said_before_a_plan_is_written(tmp_path: Path, capsys) -> None:
    words = ["ladder", str(write_ladder(tmp_path / "ladder.yaml")), "--arms", "vanilla,loop"]
    assert main([*words, "train.attention=flex_attention", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("no backward pass on cpu; allowed: sdpa, eager\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_permutation_of_arms_changes_no_number(whole, tmp_path: Path, monkeypatch) -> None:
    planted(monkeypatch)
    arms = "vanilla,better=depth_attention,again=vanilla;model.mixer=uniform_depth"
    report = climb(make(tmp_path, arms), tmp_path / "out", quiet=True)
    for name in ("better", "again"):
        one, other = arm_of(whole[0], name), arm_of(report, name)
        assert one.multiplier == other.multiplier and one.rungs == other.rungs


@pytest.mark.slow
def test_stages_come_one_after_the_other(tmp_path: Path, monkeypatch) -> None:
    planted(monkeypatch)
    ladder, out = make(tmp_path), tmp_path / "out"
    for reached, (stage, following) in enumerate(zip(STAGES, ("rungs", "last", "last", "check", "done"), strict=True)):
        report = climb(ladder, out, until=stage, quiet=True)
        assert report.stage == following and ("Not finished: " in report.verdict) == (following != "done")
        assert (out / "rungs/1/arms").exists() == (reached >= 1) and (out / "prediction.json").exists() == (
            reached >= 2
        )
        assert (out / "rungs/4/arms").exists() == (reached >= 3) and (out / "check").exists() == (reached >= 4)


@pytest.mark.slow
def test_the_last_rung_waits_for_its_seal(tmp_path: Path, monkeypatch) -> None:
    trainer = planted(monkeypatch)
    out = tmp_path / "out"
    climb(make(tmp_path), out, until="seal", quiet=True)
    sealed = json.loads((out / "prediction.json").read_text())
    climb(Ladder.read(out), out, quiet=True)
    shutil.rmtree(out / "rungs/4/arms")
    changed = {**sealed, "rung": 3}
    (out / "prediction.json").write_text(json.dumps(changed))
    trainer.done.clear()
    with pytest.raises(SettingsError, match=r"prediction.json: wrong sha256"):
        climb(Ladder.read(out), out, quiet=True)
    assert trainer.done == []


def test_the_seal_tells_late_results(whole, tmp_path: Path) -> None:
    _, out = whole
    shutil.copytree(out, tmp_path / "late")
    result = tmp_path / "late/rungs/2/arms/better/seed-1/result.json"
    result.write_text(result.read_text() + "\n")
    report = rewrite(Ladder.read(tmp_path / "late"), tmp_path / "late")
    assert report.prediction.stale and "results of smaller sizes changed after the seal" in report.verdict
    assert not whole[0].prediction.stale


@pytest.mark.parametrize("key", ["rules", "recipe", "arms"])
def test_a_changed_plan_is_refused(whole, tmp_path: Path, key: str, capsys) -> None:
    _, out = whole
    (tmp_path / "out").mkdir()
    values = json.loads((out / "ladder.json").read_text())
    {"rules": values["rules"], "recipe": values["recipe"]["optim"], "arms": values["arms"][1]}[key]["lr"] = 1
    (tmp_path / "out/ladder.json").write_text(json.dumps(values))
    assert main(["ladder", str(tmp_path / "out"), "--report"]) == 2
    assert f"ladder.json: {key} differs from the plan" in capsys.readouterr().err


def test_another_plan_needs_another_directory(whole, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"a ladder with another plan; different: ladder\.seeds$"):
        climb(make(tmp_path, seeds=[4, 3, 3, 2]), whole[1], quiet=True)


def test_a_report_is_of_the_plan_that_ran(whole, tmp_path: Path, capsys) -> None:
    """Results are read by their place alone: another plan would lend them its tokens and FLOPs."""
    _, out = whole
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out/prediction.json").unlink()  # which would tell; a ladder of two rungs has none
    before = (tmp_path / "out/report.json").read_bytes()
    other = write_ladder(tmp_path / "l.yaml", tokens_per_parameter=[11], contrasts=CONTRASTS)
    words = ["ladder", str(other), "--arms", ARMS, "--report"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "a ladder with another plan; different: ladder.tokens_per_parameter\n" in capsys.readouterr().err
    assert (tmp_path / "out/report.json").read_bytes() == before
    assert main([*words, "--out", str(tmp_path / "none")]) == 2
    assert "contains no ladder" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_the_sentence_names_the_tokens_that_were_read(whole) -> None:
    report, _ = whole
    assert "10 tokens per parameter" in verdict(report)
    plan = replace(report.plan, rules=replace(report.plan.rules, tokens=3_000_000))
    said = verdict(replace(report, plan=plan))
    assert "FLOPs and 3,000,000 tokens" in said and "per parameter" not in said


@pytest.mark.slow
def test_a_rate_that_drifts_is_not_settled(tmp_path: Path, monkeypatch) -> None:
    """The best rate at the top is not what the rule carries there: the check sees it, and withholds extrapolation."""
    planted(monkeypatch, multipliers={"depth_attention": 3.0}, drift={"depth_attention": 1.3})
    report = climb(make(tmp_path, "vanilla,better=depth_attention"), tmp_path / "out", quiet=True)
    better = arm_of(report, "better")
    assert "rate not settled" in better.flags and better.check.excess > 0.01
    assert "n doubt: better (rate not settled" in report.verdict and "if the law holds" not in report.verdict


@pytest.mark.slow
def test_a_diverging_rate_brackets_and_is_listed(tmp_path: Path, monkeypatch) -> None:
    planted(monkeypatch, diverges=0.039)
    report = climb(make(tmp_path), tmp_path / "out", quiet=True)
    assert report.diverged and {row.stage for row in report.diverged} == {"tune", "check"}
    assert arm_of(report, "better").learning_rate_ratio == pytest.approx(2.0, rel=0.25)


@pytest.mark.slow
def test_lost_runs_begin_the_verdict(tmp_path: Path, monkeypatch) -> None:
    planted(monkeypatch)
    out = tmp_path / "out"
    climb(make(tmp_path), out, until="rungs", quiet=True)
    run = out / "rungs/2/arms/better/seed-1"
    (run / "result.json").unlink()
    (run / "failed.json").write_text(json.dumps({"error": "stopped", "step": 7}))
    report = rewrite(Ladder.read(out), out)
    assert arm_of(report, "better").diverged == (1, 13)
    assert "uns diverged and are excluded from the losses" in report.verdict.splitlines()[1]
    assert "count as unsolved: better 1 of 13" in report.verdict.splitlines()[1]
    assert "are excluded: better 1 of 13" in verdict(replace(report, puzzle=None))
    assert [len(cell.loss) for cell in arm_of(report, "better").rungs] == [5, 2, 3, 0]


@pytest.mark.slow
def test_seeds_may_be_added_to_all_arms(whole, tmp_path: Path, monkeypatch, capsys) -> None:
    """What is finished stays, the plan keeps its hash, and the report says when; what is no addition is refused."""
    _, first = whole
    out = tmp_path / "out"
    shutil.copytree(first, out)
    before = json.loads((out / "report.json").read_text())
    trainer = planted(monkeypatch)
    assert main(["ladder", str(out), "--seeds", "6,3,3,2"]) == 0
    after = json.loads((out / "report.json").read_text())
    new = sorted(set(trainer.done))
    assert len(new) == len(after["arms"]) and all("seed-5" in name for name in new)
    assert after["ladder"] == before["ladder"] and [len(rung["seeds"]) for rung in after["rungs"]] == [6, 3, 3, 2]
    assert [row["seeds"] for row in after["seeds_added"]] == [[6, 3, 3, 2]] and before["seeds_added"] == []
    assert "Seeds were added to all arms on" in (out / "report.html").read_text()
    assert (
        "exploratory and nothing counts as significant" in after["verdict"]
        and "times the compute" not in after["verdict"]
    )
    assert "times the compute" in before["verdict"], "the control"
    assert not after["prediction"]["stale"], "no earlier result is another one"
    plans = {path: path.stat().st_mtime_ns for path in out.glob("rungs/*/plan.json")}
    assert main(["ladder", str(out)]) == 0 and plans == {path: path.stat().st_mtime_ns for path in plans}
    assert main(["ladder", str(out), "--seeds", "6,3,3,2"]) == 0, "as after a kill: the same command goes on"
    assert json.loads((out / "report.json").read_text())["seeds_added"] == after["seeds_added"]
    assert sorted(set(trainer.done)) == new
    capsys.readouterr()
    for given, says in (
        ("2", "no fewer seeds than each size has now (6,3,3,2)"),
        ("7,3", "no fewer seeds"),
        ("x", "whole numbers"),
    ):
        assert main(["ladder", str(out), "--seeds", given]) == 2
        assert says in capsys.readouterr().err


def test_a_rung_links_to_its_ladder(whole) -> None:
    _, out = whole
    text = (out / "rungs/1/report.html").read_text()
    assert '<a href="../../report.html">the whole ladder</a>' in text and "not tuned for any arm" not in text
    assert (out / "rungs/1/../../report.html").exists()


@pytest.mark.slow
def test_one_size_is_judged_by_losses(tmp_path: Path, monkeypatch) -> None:
    """No multiplier can be told, so paired losses decide, after Holm; seeds that came later decide nothing."""
    planted(monkeypatch)
    rules = {"layers": [2], "hidden": [16], "seeds": [4], "tune_points": [3], "seed_control": [], "check": False}
    out = tmp_path / "out"
    report = climb(make(tmp_path, **rules, seal=False), out, quiet=True)
    assert "loss than" not in report.verdict  # a puzzle is told by solved runs
    better, again = arm_of(report, "better"), arm_of(report, "again")
    assert better.p_holm < 0.05 and better.p_holm == better.rungs[0].difference.p_holm >= better.p
    assert again.p_holm > 0.05
    text = replace(report, puzzle=None)
    assert "better has a lower loss than vanilla, by 0." in verdict(text)
    assert "Not significantly different from vanilla in loss: again." in verdict(text)
    later = replace(better.rungs[0].difference, p_holm=None)
    late = replace(better, rungs=[replace(better.rungs[0], difference=later)])
    said = verdict(replace(text, arms=[report.arms[0], again, late]))
    assert "in loss: again." in said and "Not tested, for fewer than two seeds or no spread: better." in said
    alone = replace(text, arms=[replace(arm, rungs=[replace(arm.rungs[0], difference=None)]) for arm in report.arms])
    assert "a ladder of one size needs all its runs" in verdict(alone)
    for run in out.glob("rungs/1/arms/again/seed-*"):
        shutil.rmtree(run)
    part = rewrite(make(tmp_path, **rules, seal=False), out)
    assert part.stage != "done" and all(arm.p_holm is None for arm in part.arms), "Holm's correction needs all arms"


@pytest.mark.slow
def test_one_seed_everywhere_cannot_tell(tmp_path: Path, monkeypatch) -> None:
    planted(monkeypatch)
    rules = {"seeds": [1, 1, 1, 1], "tune_points": [], "seed_control": []}
    report = climb(make(tmp_path, **rules), tmp_path / "out", quiet=True)
    assert arm_of(report, "better").multiplier == [] and report.prediction.rows[0].difference is None
    assert report.stage == "done" and not (tmp_path / "out/check").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_again_and_again(whole, tmp_path: Path, monkeypatch, workers: int) -> None:
    """By SIGKILL, at every stage, one or two processes at a time: the numbers are those of a run without."""
    _, out = whole
    ladder = make(tmp_path)
    deaths, attempt, alive = 0, 0, {}
    while True:
        while len(alive) < workers:
            attempt += 1
            child = os.fork()
            if not child:
                planted(monkeypatch, mortal=random.Random(attempt) if attempt < 60 else None)
                climb(ladder, tmp_path / "out", quiet=True)
                os._exit(0)
            alive[child] = attempt
        child, status = os.wait()
        del alive[child]
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        deaths += 1
    for child in alive:
        os.waitpid(child, 0)
    report = rewrite(Ladder.read(tmp_path / "out"), tmp_path / "out")
    before = json.loads((out / "report.json").read_text())
    after = json.loads((tmp_path / "out/report.json").read_text())
    same = [key for key in before if key not in ("date", "command", "commit", "hardware", "versions")]
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert deaths >= 5 and report.stage == "done"
    for path in (tmp_path / "out").rglob("finished"):
        assert path.read_text() in ("once\n", "once\nonce\n")  # twice, if it was killed between its two last lines


SMALL = {"layers": [2, 2], "hidden": [16, 24], "seeds": [2, 2], "seed_control": []}


@pytest.mark.slow
def test_a_dry_run_counts_the_runs_that_there_are(tmp_path: Path, monkeypatch) -> None:
    """Arms that are all told apart are all checked at the top, controls as large as an arm are not."""
    planted(monkeypatch, multipliers={"depth_attention": 2.0}, rates={}, noise=0.0005)
    rules = {"layers": [2, 2, 2], "hidden": [16, 24, 32], "seeds": [2, 2, 1], "seed_control": [2], "tune_points": [3]}
    ladder = make(tmp_path, "vanilla,better=depth_attention+hyper_connections", **rules)
    climb(ladder, tmp_path / "out", quiet=True)
    assert [arm.name for arm in ladder.every_arm] == ["vanilla", "better", "as-large-as-better"]
    told, recipes = budget(ladder), [load_recipe(path) for path in (tmp_path / "out").rglob("recipe.yaml")]
    assert (told.runs, told.flops) == (len(recipes), pytest.approx(math.fsum(map(training_flops, recipes))))


def test_sizes(tmp_path: Path) -> None:
    ladder = make(tmp_path, tokens_per_parameter=[10, 40])
    assert len(ladder.all_sizes) == 8 and len(ladder.sizes) == 4
    for size in ladder.all_sizes:
        config = ladder.run(ladder.control, size, 1e-2, 0).config()
        assert config.head_dim == 8 and config.hidden_size == size.hidden
        own = count_parameters(config) - 64 * size.hidden * (1 if config.tie_word_embeddings else 2)
        assert size.parameters == own == without_embeddings(config)
        budget = (10, 40)[size.budget]
        assert size.tokens == pytest.approx(budget * size.parameters, rel=0.05)
    first, last = ladder.sizes[0], ladder.sizes[-1]
    assert last.rows / first.rows == pytest.approx(math.sqrt(last.tokens / first.tokens), rel=0.3)
    assert ladder.decay(first, 2e-2) == pytest.approx(0.05)
    scale = [size.rows / (ladder.decay(size, 1e-2) * size.tokens) for size in ladder.sizes]
    assert scale == pytest.approx([scale[0]] * 4, rel=1e-3)


def test_the_rate_rule(tmp_path: Path) -> None:
    ladder = make(tmp_path, lr_exponents=[-0.32, 0, 0.56])
    first, last = ladder.sizes[0], ladder.sizes[-1]
    expected = (last.tokens / first.tokens) ** -0.32 * (last.rows / first.rows) ** 0.56
    assert ladder.rule(last) == pytest.approx(expected) and ladder.rule(first) == 1


def test_a_control_is_widened(tmp_path: Path) -> None:
    """An arm that adds parameters gets a control that has them too, no more than half a percent above."""
    arms = "vanilla,hyper_connections,depth_attention"
    ladder = make(tmp_path, arms)
    names = [arm.name for arm in ladder.every_arm]
    assert names == ["vanilla", "hyper_connections", "depth_attention", "as-large-as-hyper_connections"]
    for size in ladder.sizes:
        plan = ladder.plan(size, dict.fromkeys(names, 1e-2))
        wide, arm = (without_embeddings(plan.recipes[name].config()) for name in (names[3], names[1]))
        one = 3 * size.hidden * size.layers  # parameters of a unit of the MLP's width
        assert 0 <= wide - arm < one
    assert "as-large-as" not in str([arm.name for arm in make(tmp_path, arms, parameters=False).every_arm])


@pytest.mark.parametrize("experts", ["", ";model.experts=8"])
def test_an_arm_is_as_large_as_the_control_at_every_size(tmp_path: Path, experts: str) -> None:
    """A width or a number of experts, which no base recipe's depth decides; such an arm gets no wider control."""
    key = "model.experts" if experts else "model.intermediate_size"
    arms = f"once=vanilla{experts},wide=loop;{LAYERS}=1/2;{key}=as-large-as-once"
    ladder = make(tmp_path, arms, **{**SMALL, "layers": [4, 6]})
    assert [arm.name for arm in ladder.every_arm] == ["once", "wide"]
    for size in ladder.sizes:
        wide, control = (ladder.recipe_at(arm, size).config() for arm in reversed(ladder.arms))
        assert wide.num_hidden_layers == control.num_hidden_layers // 2
        assert without_embeddings(wide) == pytest.approx(without_embeddings(control), rel=0.05)
        assert (wide.experts > control.experts) if experts else (wide.intermediate_size > control.intermediate_size)


def test_a_sparse_control_is_widened(tmp_path: Path) -> None:
    ladder = make(tmp_path, "once=vanilla;model.experts=2,more=vanilla;model.experts=3", **SMALL)
    for size in ladder.sizes:
        wide, arm = (ladder.recipe_at(ladder.every_arm[i], size).config() for i in (2, 1))
        assert without_embeddings(arm) <= without_embeddings(wide) <= 1.05 * without_embeddings(arm)


def test_an_open_control_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="the ladder's sizes follow from the control"):
        make(tmp_path, "open=vanilla;model.experts=as-large-as-b,b=loop")


def test_losses_of_a_puzzle_that_is_learnt_are_alike(tmp_path: Path, monkeypatch) -> None:
    """Below 0.01 nats a lower loss is noise, so that no rate is tried beyond."""
    ladder = make(tmp_path, "vanilla,loop=loop;model.recurrence_options.trips=2", tune_points=[3], tune_seeds=[1])
    monkeypatch.setattr(Task, "settled", True)
    monkeypatch.setattr(Task, "loss", lambda run, _: 1e-6 * run.recipe.optim.lr / ladder.recipe.optim.lr)
    assert sorted(State(ladder, tmp_path / "out").tuned[0]["vanilla"].losses) == [-1, 0, 1]
    monkeypatch.setattr(Task, "loss", lambda run, _: 1 + run.recipe.optim.lr / ladder.recipe.optim.lr)
    assert len(State(ladder, tmp_path / "out").tuned[0]["vanilla"].losses) == 6, "losses that are not"


def test_a_control_that_learns_at_any_rate_leaves_an_arm_its_own(tmp_path: Path, monkeypatch) -> None:
    """The loop learns at a quarter of the rate where the search begins, and there alone."""
    ladder = make(tmp_path, "vanilla,loop=loop;model.recurrence_options.trips=2", tune_points=[3], tune_seeds=[1])

    def loss(run: Task, domains: object) -> float:
        away = math.log2(run.recipe.optim.lr / ladder.recipe.optim.lr)
        return 1e-4 if run.recipe.model["recurrence"] == "once" or away == -2 else 1.2 + 0.1 * away

    monkeypatch.setattr(Task, "settled", True)
    monkeypatch.setattr(Task, "loss", loss)
    state = State(ladder, tmp_path / "out")
    vanilla, loop = (state.rate(arm, ladder.sizes[0]) / ladder.recipe.optim.lr for arm in ladder.arms)
    assert FLAT in state.tuned[0]["vanilla"].flags and vanilla == 1
    assert 0.2 < loop < 0.4


def test_an_arm_carries_its_own_optima_where_the_control_has_none(tmp_path: Path, monkeypatch) -> None:
    """By the rule from rung to rung: not by what noise made of the control's rates, which are flat here."""
    ladder = make(tmp_path, "vanilla,better=depth_attention", tune_points=[3, 3], lr_exponents=[-0.3, 0, 0])
    best = ladder.recipe.optim.lr

    def loss(run: Task, domains: object) -> float:
        rung = 1 + (run.recipe.model["hidden_size"] == 24)
        away = math.log2(run.recipe.optim.lr / (best * ladder.rule(ladder.sizes[rung - 1])))
        if run.recipe.config().mixer == "none":
            noise = 0.05 if run.run_dir.name == "seed-1" else -0.05
            return 3.3 + noise - (0.001 if run.run_dir.parent.name == ("lr+1", "lr-1")[rung - 1] else 0)
        return 3.2 + 0.06 * away**2

    monkeypatch.setattr(Task, "settled", True)
    monkeypatch.setattr(Task, "loss", loss)
    state = State(ladder, tmp_path / "out")
    assert all(FLAT in rows["vanilla"].flags and rows["better"].known for rows in state.tuned)
    arm, size = ladder.arms[1], ladder.sizes[-1]
    assert state.rate(arm, size) == pytest.approx(best * ladder.rule(size), rel=0.02)
    ratios = [rows["better"].rate / rows["vanilla"].rate for rows in state.tuned]
    assert math.sqrt(math.prod(ratios)) < 0.9 * state.ratio(arm), "the control: ratios to what noise made"


def test_a_share_of_the_layers(tmp_path: Path) -> None:
    arms = "vanilla,loop=loop;ladder.layers=1/2;model.recurrence_options.trips=2"
    ladder = make(tmp_path, arms, layers=[2, 2, 4, 4])
    plan = ladder.plan(ladder.sizes[2], {"vanilla": 1e-2, "loop": 1e-2})
    assert plan.recipes["loop"].model["num_hidden_layers"] == 2
    with pytest.raises(SettingsError, match=r"ladder.layers=1/2: this share of 3 layers is 1.5"):
        make(tmp_path, arms)
    for share in ("1e400", "1e99999999999", "-1", "101", "half"):
        with pytest.raises(SettingsError, match=rf"ladder.layers={share}: allowed: a share such as 1/3"):
            make(tmp_path, arms.replace("1/2", share))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"hidden": [16, 24, 32]}, r"ladder.hidden=\[16, 24, 32\]: allowed: as many as ladder.layers, 4"),
        ({"hidden": [16, 24, 32, 50]}, "ladder.hidden=50: allowed: a multiple of model.head_dim=8"),
        ({"colour": 1}, "ladder.colour: unknown key; allowed: layers, hidden, seeds, "),
        ({"tune_points": [2]}, "3 or more: fewer make no parabola"),
        ({"tokens": 4000, "tokens_per_parameter": [10, 40]}, "ladder.tokens=4000: allowed: null, because"),
        ({"tokens_per_parameter": [10, 10]}, r"ladder.tokens_per_parameter=\[10.0, 10.0\]: allowed: different numbers"),
        ({"batch_exponent": 5000}, "ladder.batch_exponent=5000.0: allowed: -10 to 10"),
        ({"lr_exponents": "[.nan, 0, 0]"}, r"ladder.lr_exponents=\[nan, 0.0, 0.0\]: allowed: a finite number"),
        ({"lr_exponents": [0, -5000, 0]}, r"ladder.lr_exponents=\[0.0, -5000.0, 0.0\]: allowed: -10 to 10 each"),
        ({"mlp_multiple": 10**22}, f"ladder.mlp_multiple={10**22}: allowed: 1 to 1048576"),
        (
            {"contrasts": "gain=better - nobody"},
            "contrasts=gain=better - nobody: nobody is not an arm; the arms are vanilla, ",
        ),
        ({"tune_domains": ["z60-3"]}, "ladder.tune_domains=z60-3: allowed: held-out domains, z60-2, z60-4"),
        ({"layers": [2, 2, 2, 2], "hidden": [16, 48, 32, 48]}, "size 3 takes .* allowed: sizes from small to large"),
        ({"layers": [2, 2, 2, 2], "hidden": [16, 24, 24, 48]}, "size 3 takes .* allowed: sizes from small to large"),
    ],
)
def test_a_wrong_rule_is_said_in_a_line(tmp_path: Path, rules: dict, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make(tmp_path, **rules)


@pytest.mark.parametrize("own", ["optim.lr=1e-5", "optim.lr=0.01", "optim.weight_decay=0", "optim={lr: 1e-5}"])
def test_an_arm_has_no_rate_of_its_own(tmp_path: Path, own: str) -> None:
    """The ladder tunes and carries it: a rate written after an arm would not be the one that runs."""
    for arms in (f"vanilla,mine=vanilla;{own}", f"mine=vanilla;{own},depth_attention"):
        with pytest.raises(SettingsError, match=r"arm mine: optim.(lr|weight_decay) is set by the ladder"):
            make(tmp_path, arms)
    assert make(tmp_path, "vanilla,mine=vanilla;optim.warmup=0.2").arms[1].name == "mine"


@pytest.mark.parametrize("own", ["train.steps=9", "train={steps: 9}"])
def test_the_control_has_no_steps_of_its_own(tmp_path: Path, own: str) -> None:
    """FLOPs, rates and tokens of every size are counted with the size's steps; an arm may have its own."""
    with pytest.raises(SettingsError, match=r"arm mine: train.steps follows from the tokens.* ladder.tokens"):
        make(tmp_path, f"mine=vanilla;{own},depth_attention")
    assert make(tmp_path, f"vanilla,mine=vanilla;{own}").arms[1].own_steps


def test_a_control_with_a_share_of_the_layers_counts_its_own(tmp_path: Path) -> None:
    """Its tokens follow its own parameters, and an arm of all layers gets a control as large."""
    rules = {"layers": [2, 4, 4, 4], "hidden": [16, 16, 24, 32]}
    ladder = make(tmp_path, "two=vanilla;ladder.layers=1/2,all=vanilla", **rules)
    for size in ladder.sizes:
        two, whole, wide = (without_embeddings(ladder.recipe_at(arm, size).config())
                            for arm in ladder.every_arm)  # fmt: skip
        assert size.parameters == two < whole <= wide < 1.02 * whole
        assert size.tokens == pytest.approx(10 * two, rel=0.05)


def test_a_control_with_its_own_mlp_is_widened_from_there(tmp_path: Path) -> None:
    ladder = make(tmp_path, "slim=vanilla;model.intermediate_size=24,whole=vanilla")
    for size in ladder.sizes:
        found = [without_embeddings(ladder.recipe_at(arm, size).config())
                 for arm in ladder.every_arm]  # fmt: skip
        assert found[0] == size.parameters < found[1] == found[2]


@pytest.mark.slow
def test_diverged_tuning_is_retried_only_until_its_optimum_is_used(tmp_path: Path, monkeypatch) -> None:
    """Finished runs would else be told at a rate that they did not have."""
    out = tmp_path / "out"
    planted(monkeypatch, diverges=0.0199)
    words = {**SMALL, "tune_points": [3]}
    ladder = make(tmp_path, "vanilla,better=depth_attention", **words)
    climb(ladder, out, until="tune", quiet=True)
    shutil.copytree(out, tmp_path / "early")
    before = climb(ladder, out, quiet=True)
    trainer = planted(monkeypatch)
    after = climb(ladder, out, quiet=True, retry_failed=True)
    assert trainer.done == [] and after.arms == before.arms and len(after.diverged) == 4
    early = climb(ladder, tmp_path / "early", quiet=True, retry_failed=True)
    assert early.diverged == [] and arm_of(early, "better").rungs[0].rate > 0.015


@pytest.mark.slow
def test_a_rate_that_was_not_found_is_not_said_to_be_anothers(tmp_path: Path, monkeypatch) -> None:
    """The control has nobody else's, and an arm whose optimum is known at one rung takes its ratio from there."""
    planted(monkeypatch, diverges=0.012)
    report = climb(make(tmp_path, **{**SMALL, "tune_points": [3]}), tmp_path / "out", quiet=True, until="rungs")
    assert report.arms[0].flags == ["rate not found (rung 1)"]
    assert "in doubt: vanilla (rate not found (rung 1))" in report.verdict.lower()


@pytest.mark.slow
def test_runs_of_all_stages_are_retried(tmp_path: Path, monkeypatch) -> None:
    """What diverged while tuning stays; what diverged at a rung goes on, and the seal tells."""
    out = tmp_path / "out"
    planted(monkeypatch)
    rules = {"layers": [2, 2, 2], "hidden": [16, 24, 32], "seeds": [2, 2, 1], "seed_control": [], "check": False}
    ladder = make(tmp_path, "vanilla,better=depth_attention", **rules, tune_points=[3])
    for stage, lost in (("tune", "tune/1/better/lr-1/seed-0"), ("rungs", "rungs/2/arms/better/seed-1")):
        climb(ladder, out, until=stage, quiet=True)
        (out / lost / "result.json").unlink()
        (out / lost / "failed.json").write_text(json.dumps({"error": "stopped", "step": 7}))
    climb(ladder, out, quiet=True)
    assert not rewrite(ladder, out).prediction.stale
    trainer = planted(monkeypatch)
    report = climb(ladder, out, quiet=True, retry_failed=True)
    assert [Path(name).parts[-5:] for name in trainer.done] == [("rungs", "2", "arms", "better", "seed-1")]
    assert [row.stage for row in report.diverged] == ["tune"] and report.prediction.stale


@pytest.mark.slow
def test_a_seed_that_had_failed_everywhere_makes_the_seal_stale(tmp_path: Path, monkeypatch) -> None:
    """Once it comes back."""
    out = tmp_path / "out"
    planted(monkeypatch)
    rules = {"layers": [2, 2, 2], "hidden": [16, 24, 32], "seeds": [2, 2, 1], "seed_control": [], "check": False}
    ladder = make(tmp_path, "vanilla,better=depth_attention", **rules, tune_points=[])
    climb(ladder, out, until="rungs", quiet=True)
    for arm in ("vanilla", "better"):
        run = out / "rungs/2/arms" / arm / "seed-1"
        (run / "result.json").unlink()
        (run / "failed.json").write_text(json.dumps({"error": "stopped", "step": 7}))
    climb(ladder, out, quiet=True)
    path = out / "prediction.json"
    sealed = json.loads(path.read_text())
    assert sealed["seeds"] == [2, 2] and not any("rungs/2/arms/vanilla/seed-1" in name for name in sealed["results"])
    assert not rewrite(ladder, out).prediction.stale
    more = climb(add_seeds(out, [3, 2, 1]), out, quiet=True)
    assert not more.prediction.stale, "seeds that were added are no earlier results"
    report = climb(Ladder.read(out), out, quiet=True, retry_failed=True)
    assert report.diverged == [] and report.prediction.stale


def test_the_seed_control_reads_the_controls_batches(tmp_path: Path, monkeypatch) -> None:
    """Those of data.seed too, where the recipe has one."""
    planted(monkeypatch)
    file = write_ladder(tmp_path / "ladder.yaml", tune_points=[])
    for words, orders in (([], [0, 1]), (["data.seed=7"], [7, 7])):
        ladder = load_ladder(file, ARMS, words)
        state = State(ladder, tmp_path / "out")
        control = [state.plans[ladder.sizes[0]].run_recipe("vanilla", seed) for seed in (0, 1)]
        seed_controls = [run.recipe for run in state.seed_controls()[:2]]
        assert [recipe.data_seed for recipe in seed_controls] == [recipe.data_seed for recipe in control] == orders
        assert not {recipe.train.seed for recipe in seed_controls} & {recipe.train.seed for recipe in control}


def test_a_decoded_token_reads_the_layers_that_decoding_visits(tmp_path: Path) -> None:
    """Training that draws fewer trips changes nothing of it."""
    trips = "model.recurrence_options.trips=3"
    ladder = make(tmp_path, f"vanilla,fixed=loop;{trips},drawn=loop;{trips};model.recurrence_options.trips_range=[1,3]")
    size = ladder.sizes[0]
    once, fixed, drawn = (read_bytes(ladder.recipe_at(arm, size), True) for arm in ladder.arms)
    assert once < fixed == drawn


def test_a_ladder_whose_runs_all_diverged_says_so(tmp_path: Path, monkeypatch) -> None:
    planted(monkeypatch, diverges=0.0)
    report = climb(make(tmp_path, **SMALL, tune_points=[]), tmp_path / "out", quiet=True)
    assert report.stage == "done" and "No run of a model size has a result yet" in report.verdict
    assert "uns diverged and are excluded from the losses and count as unsolved: vanilla 4 of 4" in report.verdict


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    planted(monkeypatch)
    file = write_ladder(tmp_path / "small.yaml", seeds=[2, 2, 1, 1], tune_points=[], seed_control=[])
    words = ["ladder", str(file), "--arms", "vanilla,depth_attention", "--out", str(tmp_path / "out")]
    assert main([*words, "--dry-run", "--json"]) == 0
    budget = json.loads(capsys.readouterr().out)
    assert budget["runs"] == 12 + 4 and budget["flops"] > 0 and budget["resolution"]["text"]["last_rung"] > 1
    assert not (tmp_path / "out").exists()
    assert main([*words, "--until", "seal"]) == 0
    shown = capsys.readouterr()
    assert "prediction of the largest size sealed" in shown.out and "Not finished" in shown.out
    assert "rung 1, vanilla-seed-0: held-out loss " in shown.err and "  (1 of 10 in rungs)" in shown.err
    assert main(["ladder", str(file)]) == 2
    assert "--arms is missing" in capsys.readouterr().err
    assert main(["ladder", str(tmp_path / "out"), "--arms", "vanilla,loop"]) == 2
    assert "a planned ladder resumes" in capsys.readouterr().err


def test_a_puzzle_is_told_by_solved_runs(whole) -> None:
    report, out = whole
    assert report.puzzle.domains == ["z60-2", "z60-4"]
    assert "On z60-4, vanilla solved 0 of 2 (median accuracy 0.50)" in report.verdict
    assert "by solved runs no arm differs significantly from vanilla" in report.verdict
    page = (out / "report.html").read_text()
    for heading in (
        "Loss and multiplier",
        "Learning rates",
        "The sealed prediction",
        "The law and the noise",
        "How to read this",
    ):
        assert f">{heading}<" in page


ONE_RUNG = {
    "layers": [2],
    "hidden": [16],
    "seeds": [4],
    "tune_points": [],
    "tune_seeds": [],
    "seed_control": [],
    "tokens": 4000,
}


def test_what_diverged_has_not_solved_a_puzzle(tmp_path: Path, monkeypatch) -> None:
    """Not if it had solved it before; and a control that diverged takes no runs of others with it."""
    trainer = planted(monkeypatch, dies={("vanilla", "seed-1"): 0.0, ("better", "seed-2"): 0.95})
    report = climb(make(tmp_path, "vanilla,better=depth_attention", **ONE_RUNG), tmp_path / "out", quiet=True)
    found = {row.arm: row.domains["z60-4"] for row in report.puzzle.rows}
    assert [len(row.accuracy) for row in found.values()] == [4, 4] and "better/seed-1" in " ".join(trainer.done)
    assert found["better"].accuracy == [0.5, 0.5, 0.0, 0.5]
    assert found["better"].sooner.pairs == 4
    assert len(arm_of(report, "better").rungs[0].loss) == 3
    assert arm_of(report, "better").rungs[0].difference.pairs == 2


def test_a_loss_that_is_no_number_is_a_failure(tmp_path: Path, monkeypatch) -> None:
    """Few steps at an absurd rate end without being stopped; `--retry-failed` finds such a run."""
    trainer = planted(monkeypatch, multipliers={})
    law = trainer.loss
    monkeypatch.setattr(trainer, "loss", lambda r: math.nan if r.config().mixer == "depth_attention" else law(r))
    out = tmp_path / "out"
    report = climb(make(tmp_path, "vanilla,better=depth_attention", **ONE_RUNG), out, quiet=True)
    assert arm_of(report, "better").diverged == (4, 4) and arm_of(report, "vanilla").diverged == (0, 4)
    assert not list(out.glob("rungs/1/arms/better/*/result.json"))
    trainer.done.clear()
    monkeypatch.setattr(trainer, "loss", law)
    again = climb(Ladder.read(out), out, quiet=True, retry_failed=True)
    assert len(trainer.done) == 4 and arm_of(again, "better").diverged == (0, 4)


def test_a_rung_goes_on_with_the_recipes_that_it_began_with(tmp_path: Path, monkeypatch) -> None:
    """Runs at two rates are not one arm: a plan that would change them is refused, unless nothing has run."""
    planted(monkeypatch)
    ladder, out = make(tmp_path, "vanilla,better=depth_attention", **ONE_RUNG), tmp_path / "out"
    climb(ladder, out, quiet=True)
    arm, file = out / "rungs/1/arms/better", out / "rungs/1/plan.json"
    (arm / "seed-0/recipe.yaml").write_text(load_recipe(arm / "seed-0/recipe.yaml").override("optim.lr=2e-2").to_yaml())
    plan = file.read_text()
    file.write_text(plan.replace("optim.lr=0.01", "optim.lr=0.02"))
    (arm / "seed-3/result.json").unlink()
    with pytest.raises(SettingsError, match=r"better/seed-0 contains a run of another recipe; different: optim\.lr$"):
        climb(ladder, out, quiet=True)
    assert file.read_text() != plan
    shutil.rmtree(arm)
    climb(ladder, out, quiet=True)
    assert file.read_text() == plan


@pytest.mark.slow
def test_every_run_of_every_budget_has_a_line(tmp_path: Path, monkeypatch) -> None:
    """With φ's further budgets, and tokens that tell them apart; the multipliers' rungs are those of the first."""
    planted(monkeypatch)
    rules = {**SMALL, "tune_points": [], "tokens_per_parameter": [10, 40]}
    out = tmp_path / "out"
    report = climb(make(tmp_path, "vanilla,better=depth_attention", **rules), out, quiet=True)
    rows = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    keys = [(row["arm"], f"{row['rung']}" + ("-budget-2" if row["budget"] else ""), row["seed"]) for row in rows]
    runs = [path.parent.relative_to(out).parts for path in out.glob("rungs/*/arms/*/*/result.json")]
    assert sorted(keys) == sorted((arm, rung, int(seed[5:])) for _, rung, _, arm, seed in runs) and len(keys) == 16
    for row, (arm, rung, seed) in zip(rows, keys, strict=True):
        place = out / "rungs" / rung / "arms" / arm / f"seed-{seed}"
        recipe = load_recipe(place / "recipe.yaml")
        assert row["tokens"] == recipe.train.steps * recipe.train.tokens_per_step and row["rate"] == recipe.optim.lr
        assert row["loss"] == json.loads((place / "result.json").read_text())["evaluation"]["loss"]
    assert [cell.budget for arm in report.arms for cell in arm.rungs] == [0] * 4
    assert "better, rung 2, budget 2" in (out / "report.html").read_text()
    rungs = [out / "rungs" / name / "report.html" for name in ("1", "2", "1-budget-2", "2-budget-2")]
    assert all(path.exists() for path in rungs) and not (out / "tune").exists(), "where nothing is tuned"


@pytest.mark.slow
def test_phi_needs_two_budgets(tmp_path: Path, monkeypatch) -> None:
    planted(monkeypatch)
    arms = "vanilla,loop=loop;ladder.layers=1/2;model.recurrence_options.trips=2"
    rules = {"layers": [2, 2, 2, 2], "tune_points": [], "seed_control": [], "check": False}
    report = climb(make(tmp_path, arms, **rules), tmp_path / "out", quiet=True)
    assert "one token budget" in report.phi.refused
    (tmp_path / "two").mkdir()
    ladder = make(tmp_path / "two", arms, **rules, tokens_per_parameter=[10, 40])
    report = climb(ladder, tmp_path / "two/out", quiet=True)
    assert report.phi.refused is None and report.phi.cells == 8 and report.phi.budgets == 2
    assert State(ladder, tmp_path / "two/out").sealed() is not None


@pytest.mark.slow
def test_an_arm_of_its_own_steps_says_nothing_of_a_trip(tmp_path: Path, monkeypatch) -> None:
    """It read other tokens than its cell."""
    planted(monkeypatch)
    arms = "vanilla,loop=loop;ladder.layers=1/2;model.recurrence_options.trips=2;train.steps=3"
    rules = {**SMALL, "tune_points": [], "tokens_per_parameter": [10, 40], "check": False}
    assert climb(make(tmp_path, arms, **rules), tmp_path / "out", quiet=True).phi is None


DAMAGED = [
    *("report.json", "rungs/1/report.json", "tune/1/better/lr+0/seed-0/result.json"),
    *(f"rungs/1/arms/better/seed-0/{name}" for name in ("result.json", "failed.json", "machine.json")),
]


@pytest.mark.slow
def test_a_damaged_file_is_named(whole, tmp_path: Path, monkeypatch, capsys) -> None:
    """Also in a comparison, whose functions read the rungs; where all are deleted, the report is written."""
    planted(monkeypatch)
    out = tmp_path / "out"
    shutil.copytree(whole[1], out)
    for file in (out / name for name in DAMAGED):
        kept = file if file.exists() else file.with_name("result.json")  # a run has failed, or it has a result
        before = kept.read_bytes()
        kept.unlink()
        file.write_text("{" if file.name == "machine.json" else "{}")
        assert main(["ladder", str(out), "--report"]) == 2, file
        assert capsys.readouterr().err.startswith(f"fathom: {file} is damaged: delete it")
        file.unlink()
        kept.write_bytes(before)
    for name in DAMAGED:
        (out / name).unlink(missing_ok=True)
    assert main(["ladder", str(out), "--json"]) == 0

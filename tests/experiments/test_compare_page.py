"""The page in a real browser: nothing to complain about, nothing beyond the edge, by day and by night."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import Markup

from fathom.experiments.compare_page import page
from fathom.experiments.compare_results import (
    ArmResult,
    Band,
    CacheBytes,
    ComparisonReport,
    Curve,
    DomainMean,
    FailedRun,
    Measured,
    PairGap,
    RunRow,
    ShareOfGain,
    TimeRatio,
    TrainingLoss,
    Validation,
)
from fathom.experiments.differences import verdict
from fathom.report import html as blocks
from fathom.report.html import clauses
from fathom.report.plots import LETTER, IntervalMark, Line, interval_plot, line_plot, ticks
from fathom.report.provenance import Provenance
from fathom.report.statistics import Difference
from fathom.report.templates import glued, number, parted, prose

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
PROBE = """<script>addEventListener('load',()=>{const f=document.querySelector('iframe'),d=f.contentDocument,
s=getComputedStyle(d.body),t=getComputedStyle(d.querySelector('svg text'));
const clipped=[...d.querySelectorAll('p,h1,h2,li,figcaption,figure,svg,summary')].filter(e=>
e.getBoundingClientRect().right>f.clientWidth+0.5&&!e.closest('.scroll,pre')).length;
document.title=JSON.stringify({width:d.documentElement.scrollWidth,clipped:clipped,paper:s.backgroundColor,ink:s.color,
text:parseFloat(t.fontSize)*d.querySelector('svg[role=img]').getBoundingClientRect().width/360,
cut:[...d.querySelectorAll('.scroll')].filter(e=>e.scrollWidth>e.clientWidth+1).map(e=>e.ariaLabel),
tables:d.querySelectorAll('table').length,pictures:d.querySelectorAll('svg[role=img]').length})})</script>"""


def gap(mean: float, half_width: float | None, p: float | None, p_holm: float | None = None) -> Difference:
    return Difference(mean, 1 if half_width is None else 3, half_width, p, p if p_holm is None else p_holm)


def arm(name: str, loss: float, difference: Difference | None) -> ArmResult:
    score = {"loss": loss, "bits_per_byte": loss / 3}
    run = RunRow(
        **{**score, "tokens": 32_767, "domains": {}, "position_loss": [], "seed": 0, "directory": "", "seconds": 9.0},
        **{"epochs": 1.0, "machine": None},
        validation=Validation([], [], [], []),
        training_loss=TrainingLoss([], []),
    )
    seconds = TimeRatio(1.01, 1.0, 1.02, 12, (0.2, 0.2), "wall time")
    curve = {"loss": [loss + 1, loss], "low": [loss + 0.9, loss - 0.1], "high": [loss + 1.1, loss + 0.1]}
    return ArmResult(
        **{"name": name, "mechanism": name, "overrides": (), "parameters": 1_600_000, "flops_per_token": 3.4e6},
        **{"cache_bytes_per_token": CacheBytes(1, 3072.0), "steps": 100, "tokens": 2_000_000, "training_flops": 1e13},
        **score,
        measured=Measured(seconds, (11, 10), "peak", (1.0, 1.0), (5, 5), {}) if difference else None,
        runs=[run] * 3,
        perplexity=40.0,
        domains={domain: DomainMean(**score) for domain in ("code", "prose")},
        position_loss=[4.0, 3.5, 3.2],
        curve=Curve([1_000_000, 2_000_000], [1e12, 2e12], [5.0, 9.0], **curve),
        difference=difference,
        difference_by_position=[difference] * 3 if difference else [],
        difference_while_training=Band([1e6, 2e6], [0.0, -0.02], [-0.01, -0.03], [0.01, -0.01]) if difference else None,
    )


def report_of(
    *arms: ArmResult, between: tuple[PairGap, ...] = (), seeds: int = 3, share: ShareOfGain | None = None
) -> ComparisonReport:
    hardware = {"cpu": "a processor", "cores": 2, "system": "Linux"}
    report = ComparisonReport(
        **vars(Provenance("fathom compare " + "x" * 120, "2026-01-01", None, hardware, {"torch": "2"})),
        equal="tokens",
        control=arms[0].name,
        seeds=list(range(seeds)),
        seeds_planned=list(range(seeds)),
        exploratory=False,
        failed=[],
        arms=list(arms),
        between=list(between),
        share_of_uniform_depth=share,
        recipe={"data": {"sequence_length": 256}},
        ladder=None,
    )
    report.verdict = verdict(report)
    return report


def with_runs(report: ComparisonReport, **values: float) -> ComparisonReport:
    """The report of runs that differ in some values."""
    arms = [replace(one, runs=[_with(run, **values) for run in one.runs]) for one in report.arms]
    return replace(report, arms=arms)


def _with(run: RunRow, **values: float) -> RunRow:
    return RunRow(**{key: value for key, value in vars(run).items() if key != "perplexity"} | values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"coverage": 0.127}, "32,767 predicted tokens, 12.7 % of the validation split: one window"),
        ({"coverage": 1.0}, "32,767 predicted tokens, all of the validation split"),
        ({}, "12 times, by wall time; median of the ratios with quartiles"),
        ({}, "That is 1 epochs of the corpus."),
    ],
)
def test_the_report_says_what_was_read_and_timed(values: dict[str, float], words: str) -> None:
    report = report_of(arm("vanilla", 4.0, None), arm("loop", 3.9, gap(-0.1, 0.01, 0.01)))
    assert words in html.unescape(page(with_runs(report, **values))).replace("\u00a0", " ")


def test_the_report_says_how_often_the_corpus_was_read_by_some_arm() -> None:
    one, other = arm("vanilla", 4.0, None), arm("loop", 3.9, gap(-0.1, 0.01, 0.01))
    more, less = (with_runs(report_of(one, other), epochs=epochs).arms for epochs in (2.5, 1.25))
    assert "That is 1.25 to 2.5 epochs of the corpus." in page(report_of(more[0], less[1]))


@pytest.fixture(scope="module")
def full() -> ComparisonReport:
    uniform, depth = gap(-0.02, 0.008, 0.01), gap(-0.021, 0.03, 0.2)
    pair = PairGap(0.001, 3, 0.02, 0.8, 0.8, a="uniform_depth", b="depth_attention")
    return report_of(
        *(arm("vanilla", 4.0, None), arm("uniform_depth", 3.98, uniform), arm("depth_attention", 3.979, depth)),
        between=(pair,),
        share=ShareOfGain(None, None, None, pair),
    )


def test_the_sentence_follows_from_the_intervals(full: ComparisonReport):
    said = full.verdict
    assert said.startswith("With 3 seeds, at 1.6 million parameters and 2 million tokens, ")
    assert "uniform_depth's held-out loss is lower than vanilla's by 0.0200 ± 0.0080 nats" in said
    assert "the difference of depth_attention (−0.0210 ± 0.0300 nats) to vanilla is not significant" in said
    assert said.endswith("uniform_depth and depth_attention do not differ significantly.")


def test_equal_gaps_are_too_coarse_to_judge() -> None:
    found = Difference(-0.1, 3, None, None)
    said = report_of(arm("vanilla", 4.0, None), arm("loop", 3.9, found)).verdict
    assert "loop ended 0.1000 nats below vanilla, with the same difference for every seed, which is too" in said
    assert "nats lower" not in said


def test_an_exploratory_report_is_never_sure() -> None:
    """Its p values are withheld, so that an interval that excludes zero is a hint."""
    report = report_of(arm("vanilla", 4.0, None), arm("loop", 3.9, Difference(-0.1, 3, 0.01, 0.001)))
    said = verdict(replace(report, exploratory=True))
    assert (
        "interval excludes zero taken alone: a hint" in said
        and "exploratory and no difference counts as significant" in said
    )


def test_a_share_of_the_gain_has_an_interval_or_is_not_said(full: ComparisonReport) -> None:
    for text in (full.verdict, html.unescape(page(full))):
        assert "the share of depth_attention's gain that uniform_depth reaches is undefined" in text
    pair = full.share_of_uniform_depth.difference
    known = ShareOfGain(0.5, -0.06, 0.93, pair)
    said = report_of(*full.arms, between=(pair,), share=known)
    for text in (said.verdict, html.unescape(page(said)).replace("\u00a0", " ")):
        assert "uniform_depth has 50 % of depth_attention's gain (95 % interval −6 to 93 %)" in text


def test_the_page_says_what_its_numbers_mean(full: ComparisonReport) -> None:
    control, text = full.arms[0], html.unescape(page(full))
    assert f"a training step of {control.tokens // control.steps:,} tokens" in text
    assert "fathom ladder" in text and "not tuned for any arm" in text and "the whole ladder" not in text
    assert "uncorrected for the number of domains and arms" in text
    assert "× 1.010" in text and "1.000 … 1.020" in text and "× 1.100" in text, "time and memory over the control's"
    single = report_of(*full.arms[:1], arm("loop", 3.9, gap(-0.1, None, None)), seeds=1)
    assert "uncorrected" not in page(single)


def test_a_worse_arm_and_a_hint_are_called_that():
    worse = arm("slow", 4.1, gap(0.1, 0.01, 0.001))
    hint = arm("maybe", 3.9, gap(-0.1, 0.09, 0.04, 0.08))
    said = verdict(report_of(arm("vanilla", 4.0, None), worse, hint))
    assert "slow's held-out loss is higher than vanilla's by 0.1000 ± 0.0100" in said
    assert "not by Holm's test for 2 comparisons: a hint of a difference to vanilla, not significant" in said
    third, pairs = arm("third", 3.95, gap(-0.05, 0.09, 0.4)), (("slow", "maybe"), ("slow", "third"), ("maybe", "third"))
    between = tuple(PairGap(0.0, 3, 0.02, 0.8, 0.8, a=a, b=b) for a, b in pairs)
    best = verdict(report_of(arm("vanilla", 4.0, None), worse, hint, third, between=between))
    assert best.endswith("maybe and third do not differ significantly."), "the two that are lowest"


def test_a_sentence_gives_no_arm_the_tokens_of_another():
    worse = arm("slow", 4.1, gap(0.1, 0.01, 0.001))
    assert "at 1.6 million parameters and 2 million tokens, slow" in report_of(arm("vanilla", 4.0, None), worse).verdict
    fewer = report_of(arm("vanilla", 4.0, None), replace(worse, tokens=900_000), arm("b", 4.1, worse.difference))
    assert "parameters and 2 million tokens (slow 900 thousand), " in fewer.verdict
    one = report_of(arm("vanilla", 4.0, None), replace(worse, tokens=3_000_000), seeds=1)
    assert one.verdict.startswith(
        "With one seed there is no interval: at 1.6 million parameters and 2 million tokens ("
    )
    assert "(slow 3 million), slow ended 0.1000 nats above vanilla" in one.verdict
    equal = report_of(arm("vanilla", 4.0, None), arm("idle", 4.0, gap(0.0, None, None)), seeds=1)
    assert "idle ended at the loss of vanilla;" in equal.verdict, "not 0.0000 nats above it"


def test_names_cannot_break_the_page():
    told = blocks.page("<script>", "a & b", blocks.table("<b>", ["<i>"], [["<u>", "<s>"]]), blocks.legend(["<q>"]))
    assert not re.search(r"<(script|b|i|u|s|q)>", told)
    assert "<script>" not in line_plot([Line("<script>", [0, 1], [0, 1], 0)], "x", "y", '"<script>')


def test_nothing_is_fetched(full: ComparisonReport):
    assert not re.findall(r'(?:src|href)="(?!data:)|url\(|@import', page(full))


@pytest.mark.parametrize("low, high", [(0, 1), (-0.013, 0.002), (3.9, 4.4), (0, 123456), (5, 5)])
def test_ticks_are_few_and_inside(low: float, high: float):
    found = ticks(low, high)
    assert 1 <= len(found) <= 8 and all(low <= tick <= high for tick in found)


def test_plots_bear_gaps_and_single_points():
    assert "nan" not in line_plot([Line("a", [1, 2, 3], [1, float("nan"), 2], 0)], "x", "y", "").lower()
    assert line_plot([], "x", "y", "") == ""


def test_layers_have_no_halves() -> None:
    """Whole numbers on the x axis have ticks at whole numbers only; others keep theirs."""
    layers, shares = (
        str(line_plot([Line("a", xs, [1, 2, 3], 0)], "x", "y", "", x_from_zero=False))
        for xs in ([1, 2, 3], [1, 1.9, 3])
    )
    assert ">2</text>" in layers and ">1.5</text>" not in layers and ">1.5</text>" in shares
    far = str(line_plot([Line("a", [0, 1234e9], [1, 2], 0), Line("b", [3.0], [1.5], 0, marks=False)], "x", "y", ""))
    places = [
        (float(x), text) for x, text in re.findall(r'<text x="([\d.]+)" y="212" text-anchor="middle">([^<]+)<', far)
    ]
    assert places and all(x + LETTER * len(text) / 2 <= 360 for x, text in places)
    assert far.count("<circle") == 3, "one point is marked"
    assert "no interval" in interval_plot([IntervalMark("a", 0.1, None, None, 1)], "x", "")


NAMES = re.compile(r'<text class="name" x="([\d.]+)" y="[\d.-]+" text-anchor="(start|end)">([^<]*)</text>')
LONG = "a_very_long_name_of_an_arm_that_says_everything_about_it"


@pytest.mark.parametrize("shift", [-0.9, -0.3, 0.0, 0.3, 0.9])
def test_no_name_crosses_the_line_of_no_difference(shift: float):
    """Wherever the line is, and however long the name: it is shortened, and whole for a screen reader."""
    values = [(name, shift + at) for at in (-0.2, 0.0, 0.2) for name in ("loop+depth_attention", "a", LONG)]
    drawn = str(interval_plot([IntervalMark(name, x, x - 0.3, x + 0.3, 0) for name, x in values], "nats", ""))
    (zero,) = {float(x) for x in re.findall(r'<line class="zero" x1="([\d.]+)"', drawn)}
    found = NAMES.findall(drawn)
    assert len(found) == len(values) and drawn.count(f"<title>{LONG}:") == 3
    for at, anchor, name in found:
        start = float(at) - (WIDEST * len(name) if anchor == "end" else 0)
        assert zero <= start or start + WIDEST * len(name) <= zero, (name, start, zero)


WIDEST = 6.9
"""Width of an average letter of a name, in a browser."""


def test_numbers_keep_their_units_and_names_break_after_underscores(full: ComparisonReport):
    shown = page(full)
    told = re.sub(r"<(style|pre|script).*?</\1>|<svg.*?</svg>|aria-label=\"[^\"]*\"", "", shown, flags=re.S)
    assert "95\u00a0%" in told and not re.search(r"\d %|± | ±", re.sub(r"<td>.*?</td>", "", told))
    assert ">uniform_<wbr>depth</th>" in shown
    assert glued("a − b, 95 % of 3 ± 1") == "a − b, 95\u00a0% of 3\u00a0±\u00a01"
    assert parted("<_x:y") == "&lt;_<wbr>x:<wbr>y" and parted(Markup("<a>_x</a>")) == "<a>_x</a>"
    assert number("-1.5 [-2, -.5] 3-4 1e-6 a-7 --8") == "−1.5 [−2, -.5] 3-4 1e-6 a-7 --8", "signs of numbers alone"
    assert prose("see `a <b>` - x") == "see <code>a &lt;b&gt;</code> - x"


def test_a_long_verdict_is_told_clause_by_clause(full: ComparisonReport):
    said = clauses("With 2 seeds, a is lower; for b it is not; a_b and b are alike. This is short.", ["a", "b", "a_b"])
    lines = ["With 2 seeds, a is lower.", "For b it is not.", "a_b and b are alike.", "This is short."]
    assert said.splitlines() == lines and "\n" not in full.verdict and page(full).count("<p>With ") == 1
    assert clauses("b is better (0 %; p = 1); so is a.", ["b"]) == "b is better (0 %; p = 1).\nSo is a."
    assert (
        clauses("It is so, e.g. here; b-c, a and d are alike.", ["b-c"])
        == "It is so, e.g. here.\nb-c, a and d are alike."
    )


@pytest.mark.quick("390-True")
@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False)])
def test_in_a_browser(full: ComparisonReport, tmp_path: Path, width: int, dark: bool):
    why = "the loss is not finite at step 40: a smaller learning rate (optim.lr=0.01) may help; see " + "deep/" * 30
    shown = page(replace(full, failed=[FailedRun(why, 40, "uniform_depth", 3)]))
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(shown)}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!doctype html><meta charset=utf-8>{frame}{PROBE}", encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1400,1000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command = [BROWSER, *options, "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found, done.stderr
    seen = json.loads(html.unescape(found[1]))
    assert seen["width"] <= width and seen["clipped"] == 0
    assert not {"Excluded: runs that failed", "Provenance"} & set(seen["cut"])
    assert width > 1000 or seen["cut"], "numbers do not wrap: their tables scroll"
    assert seen["text"] >= 10.5  # pixels, in a plot as drawn
    assert seen["tables"] >= 5 and seen["pictures"] >= 5
    paper, ink = (sum(map(int, re.findall(r"\d+", seen[key])[:3])) for key in ("paper", "ink"))
    assert (paper < 150 < 600 < ink) if dark else (ink < 150 < 600 < paper)

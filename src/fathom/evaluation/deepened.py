"""The effect of deepening: a base, the deepened model, and a control without the mechanism that had the same training.
The difference to the control is the effect of the mechanism. The difference to the base includes the effect of the
training. Texts are paired by document and tasks by item, and intervals are over these, not over seeds (`paired.py`). A
decoded token is timed on the deepened model and the control in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from fathom.evaluation.clock import Clock
from fathom.evaluation.paired import Scored, rows
from fathom.evaluation.results import WHOLE, ScoreGap, ScoresReport
from fathom.evaluation.scores_page import NO_SPREAD, page
from fathom.models.axes.cache_name import passed, returned
from fathom.report import PAGE
from fathom.report import REPORT as SCORES
from fathom.report.files import read_json, write_atomically, write_json
from fathom.report.provenance import provenance
from fathom.report.results import restored
from fathom.report.statistics import paired_ratio

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fathom.evaluation.scoring import Checkpoint

REPORT = "deepened.json"
JUDGED = ("bits_per_byte", "acc", "acc_norm", "exact_match", "f1", "mcc")
"""Metrics in the verdict; of all but the first, higher is better."""
NOISE = 0.005
"""Bits per byte below which a difference does not count: another seed of the same training may differ by as much."""
PAIRS = 9
"""How often both models are timed."""
DECODED, PROMPT = 24, 48
"""Number of timed tokens, after a prompt of as many tokens."""


@dataclass
class Effect:
    """The deeper model's score minus another model's, and the verdict on this difference."""

    on: str
    metric: str
    against: str
    gap: ScoreGap
    verdict: str
    """`better`, `worse`, or `not significant`."""

    @property
    def negligible(self) -> bool:
        """Whether a significant difference of bits per byte is below `NOISE`."""
        return self.verdict != "not significant" and self.metric == "bits_per_byte" and abs(self.gap.value) < NOISE

    @property
    def ends(self) -> str:
        """The ends of the difference's interval as text; empty if there is no interval."""
        low, high = self.gap.low, self.gap.high
        return "" if low is None or high is None else f"{_signed(low)} to {_signed(high)}"

    def __str__(self) -> str:
        """An effect in words."""
        unit = "bits per byte" if self.metric == "bits_per_byte" else self.metric
        if not self.ends:
            why = "too few documents for an interval" if self.gap.few else f"no interval: {NO_SPREAD}"
            return f"{self.on}: against {self.against}: not significant ({why})."
        ends = f"95 % interval of the difference {self.ends}"
        if self.verdict == "not significant":
            return f"{self.on}: against {self.against}: not significant ({ends} {unit})."
        if self.negligible:
            return f"{self.on}: against {self.against}: no difference above {NOISE} {unit} ({ends})."
        return f"{self.on}: {self.verdict} than {self.against} by {abs(self.gap.value):.4f} {unit} ({ends})."


def _signed(value: float) -> str:
    """Format a difference with its sign; a small difference gets an exponent, because `+0.0000` would hide its size."""
    return f"{value:+.4f}" if abs(value) >= 0.0005 or value == 0 else f"{value:+.1e}"


@dataclass
class Speed:
    """The decoding time per token of the deeper model divided by that of the control."""

    ratio: float
    low: float
    high: float
    clock: str
    pairs: int

    def sentence(self, control: str) -> str:
        """A sentence that compares the decoding time with the control's."""
        ends = f"95 % interval of the ratio {self.low:.2f} to {self.high:.2f}"
        if self.low <= 1 <= self.high:
            return f"Decoding: neither slower nor faster than {control} ({ends})."
        word = "slower" if self.ratio > 1 else "faster"
        return f"Decoding: {word} than {control} by {100 * abs(self.ratio - 1):.0f} % ({ends})."


@dataclass
class DeepenedReport:
    """`deepened.json`."""

    base: str
    deeper: str
    control: str
    effects: list[Effect]
    speed: Speed | None
    sentences: list[str]


def compare(checkpoints: Sequence[Checkpoint], out: Path | None = None) -> DeepenedReport:
    """The report on three checkpoints that were scored: base, deeper, control."""
    base, deeper, control = checkpoints
    effects = [*effects_of(deeper, control), *effects_of(deeper, base)]
    speed = time_decoding(deeper, control)
    sentences = [*map(str, effects), *([] if speed is None else [speed.sentence(control.name)])]
    report = DeepenedReport(base.name, deeper.name, control.name, effects, speed, sentences)
    if out is not None:
        write_json(out / REPORT, report)
        scores = restored(ScoresReport, read_json(out / SCORES))
        write_atomically(out / PAGE, page(scores, provenance(), sentences))
    return report


def effects_of(deeper: Checkpoint, other: Checkpoint) -> list[Effect]:
    """The differences between two models on every text and task, with Holm's adjustment over all of them."""
    found = []
    for row in rows({one.name: _judged(one) for one in (other, deeper)}):
        gap = row.differences.get(deeper.name)
        if gap is None:
            continue
        better = -1 if row.metric == "bits_per_byte" else 1
        verdict = "not significant"
        if gap.significant:
            verdict = "better" if gap.value * better > 0 else "worse"
        found.append(Effect(on=row.task, metric=row.metric, against=other.name, gap=gap, verdict=verdict))
    return found


def _judged(checkpoint: Checkpoint) -> dict[tuple[str, str], Scored]:
    """The scores that are judged: that of every single text and of every task, without the score of all texts
    together."""
    found = checkpoint.scored().items()
    return {key: items for key, items in found if key[0] != WHOLE and key[1].split(",")[0] in JUDGED}


def time_decoding(deeper: Checkpoint, control: Checkpoint) -> Speed | None:
    """Time the decoding of a token on the two models in the order A B B A; None if the ratio's interval has no
    bounds."""
    models = [checkpoint.open()[0] for checkpoint in (deeper, control)]
    clock = Clock(models[0].device)
    times: list[list[float]] = [[], []]
    for pair in range(PAIRS + 1):
        for i in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds = _seconds(models[i], clock)
            if pair:  # the first one warms up
                times[i].append(seconds)
    for checkpoint in (deeper, control):
        checkpoint.close()
    found = paired_ratio(*times)
    if found is None:
        return None
    return Speed(ratio=found.value, low=found.low, high=found.high, clock=clock.words, pairs=PAIRS)


@torch.no_grad()
def _seconds(model: PreTrainedModel, clock: Clock) -> float:
    """Seconds for one decoded token."""
    vocabulary = min(int(model.config.vocab_size), 1000)
    ids = (torch.arange(PROMPT, device=model.device) * 7 % vocabulary).unsqueeze(0)
    out = model(input_ids=ids, use_cache=True, **passed(model, DynamicCache(config=model.config)))

    def decode() -> None:
        cache, token = returned(out), ids[:, -1:]
        for _ in range(DECODED):
            token = model(input_ids=token, use_cache=True, **passed(model, cache)).logits[:, -1:].argmax(-1)

    return clock.seconds(decode) / DECODED

"""The schema of `report.json` of `fathom evaluate`: for scores, and for a pair on a benchmark.

For scores, `paired.py` computes the differences and decides which are `skewed`. `tuned.py` makes the report on a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fathom.corpus.counts import CorpusCounts
from fathom.kvcache.policy import Policy
from fathom.report.provenance import Provenance
from fathom.report.statistics import LEAST_DOCUMENTS, mcnemar, wilson
from fathom.training.results import DecodingGap

WHOLE = "all text"
"""The name of all texts together, where there are several."""


@dataclass
class ScoreGap:
    """A checkpoint's score relative to the first checkpoint's, paired over items: a `difference`, or a `ratio` of
    perplexities."""

    kind: str
    value: float
    low: float | None
    high: float | None
    confidence: float
    pairs: int
    p: float | None
    p_holm: float | None = None
    skewed: bool = False
    """Whether a few documents decide the difference, so that Student's t may be too narrow."""
    few: bool = False
    """Whether there is no interval because there are too few documents, items or clusters."""

    @property
    def significant(self) -> bool:
        """Whether a difference is significant after Holm's adjustment."""
        return self.p_holm is not None and self.p_holm < 1 - self.confidence

    def __str__(self) -> str:
        """The difference or ratio with its interval, and an asterisk if it is significant."""
        form = "×{:.4f}" if self.kind == "ratio" else "{:+.4f}"
        if self.low is None:
            return form.format(self.value)
        ends = "[{:.4f}, {:.4f}]" if self.kind == "ratio" else "[{:+.4f}, {:+.4f}]"
        return f"{form.format(self.value)} {ends.format(self.low, self.high)}{'*' if self.significant else ' '}"


@dataclass
class ScoreRow:
    """One task and metric: the score of each checkpoint, and the difference of each later checkpoint from the first."""

    task: str
    metric: str
    scores: dict[str, float]
    differences: dict[str, ScoreGap]


@dataclass
class PlaceLoss:
    """The mean loss of the tokens that were predicted from a context of `from` to `to` tokens."""

    from_: int
    to: int
    loss: float
    tokens: int


@dataclass
class TextScore:
    """The loss on a text."""

    documents: int
    tokens: int
    bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float
    by_context: list[PlaceLoss]
    trips_per_token: float | None = None
    """Iterations per token, for a recurrent model."""
    decoding: DecodingGap | None = None
    """The gap to decoding, for a model that reads text in rounds."""


@dataclass
class CheckpointScores:
    """The results of one checkpoint: lm-eval's JSON by task, why tasks failed, and the text scores."""

    directory: str
    max_trips: int | None
    kvcache: Policy | None
    tasks: dict[str, dict[str, object]]
    failed: dict[str, str]
    notes: list[str]
    perplexity: dict[str, TextScore]

    @property
    def text(self) -> str:
        """The name of the score over all texts together, or of the only text's score."""
        return WHOLE if WHOLE in self.perplexity else next(iter(self.perplexity))


@dataclass
class ScoresReport:
    """`report.json` of scores."""

    fathom: str
    checkpoints: dict[str, CheckpointScores]
    context: int | None
    stride: int | None
    rows: list[ScoreRow]

    def gaps(self) -> list[ScoreGap]:
        """Every difference of a later checkpoint's score from the first checkpoint's."""
        return [gap for row in self.rows for gap in row.differences.values()]

    def texts(self) -> Iterator[tuple[str, str, TextScore]]:
        """Every checkpoint's score on every text, as (checkpoint, text, score)."""
        for name, entry in self.checkpoints.items():
            yield from ((name, text, score) for text, score in entry.perplexity.items())


@dataclass
class RatioGap:
    """A difference of ratios with its 95 % interval; both ends are None if there are too few documents or
    clusters."""

    value: float
    low: float | None
    high: float | None


@dataclass
class TextPair:
    """Bits per byte of two models on the same documents."""

    documents: int
    bytes: int
    base: float
    new: float
    difference: RatioGap
    clusters: int | None = None
    """Clusters of documents, which count as one draw each; None if no document names one."""

    @property
    def interval(self) -> str:
        """The interval of the difference as text; with too few documents, their number and the number needed."""
        low, high = self.difference.low, self.difference.high
        if low is None or high is None:
            seen = f"documents {self.documents}" if self.clusters is None else f"clusters {self.clusters}"
            return f"no interval: {seen}, needed {LEAST_DOCUMENTS}"
        return f"[{low:+.4f}, {high:+.4f}]"


@dataclass(frozen=True)
class Answered:
    """The answers of two models to the same questions, counted."""

    benchmark: str
    way: str
    part: str
    """Which questions: `all`, or the `clean` or `dirty` ones."""
    asked: int
    right: tuple[int, int]
    """Base and new."""
    lost: int
    """Answered correctly only by the base."""
    won: int
    """Answered correctly only by the new model."""
    p: float = field(init=False)
    """McNemar's exact test, two-sided."""
    intervals: list[tuple[float, float]] = field(init=False)
    """Wilson's 95 % intervals of both shares."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", mcnemar(self.lost, self.won))
        object.__setattr__(self, "intervals", [wilson(right, self.asked) for right in self.right])


@dataclass
class NamedModel:
    """The name of a model and its directory."""

    name: str
    directory: str


@dataclass
class ExampleRow:
    """A question, and whether the base and the new model answer it correctly."""

    question: str
    answer: str
    wrong: list[str]
    right: tuple[bool, bool]


@dataclass
class PhaseShares:
    """The shares of a mixture by collection, and the step from which they apply."""

    step: int
    data: dict[str, float]


@dataclass
class RunBetween:
    """A training run between a base and a new model; values that the run's directory does not record are None."""

    run: str
    data: dict[str, float]
    """Shares by collection, of the first phase."""
    later: list[PhaseShares]
    """The phases after it."""
    epochs: dict[str, float | None]
    steps: int | None
    tokens: int | None
    seconds: float | None
    rate: float
    adapters: int | None
    first_loss: float | None
    last_loss: float | None
    held_out_loss: float | None


@dataclass
class Asking:
    """How many of a benchmark's questions were asked, and why the others were not."""

    asked: int
    of: int
    skipped: dict[str, int]
    """How many, by reason."""
    checked: bool
    """Whether contamination was checked."""

    def __str__(self) -> str:
        """The counts of asked and skipped questions, as the end of a sentence."""
        left = ", ".join(f"{count:,} {why}" for why, count in self.skipped.items())
        drawn = " drawn at random" if "not drawn" in self.skipped else ""
        skipped = f"; skipped: {left}" if left else ""
        return f"asked {self.asked:,} of {self.of:,} questions{drawn}{skipped}."


@dataclass(kw_only=True)
class PairReport(Provenance):
    """`report.json` of a pair on a benchmark."""

    verdict: str = ""
    base: NamedModel
    new: NamedModel
    texts: dict[str, TextPair]
    questions: list[Answered]
    asked: dict[str, Asking]
    guessing: dict[str, dict[str, float]]
    examples: list[ExampleRow]
    runs: list[RunBetween]
    corpus: CorpusCounts | None

"""Identify: from which models of a library may a model come?

The card of the model is compared with all cards of the library. The nearest five are opened and compared with the model
as `compare` does. The library supplies the controls too: models of the same shape with the least similar cards, each
measured against the model and against the candidate. A control that is related to the model becomes a candidate.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from fathom.errors import FathomError
from fathom.lineage import evidence, verdict
from fathom.lineage.comparison import Comparison, Options, judge, measure
from fathom.lineage.pairs import Pair
from fathom.lineage.publishing import cards
from fathom.lineage.publishing.results import Card
from fathom.lineage.weights import Told, Weights, holding, open_weights
from fathom.report import html

NEAREST, CONTROLS, TRIED = 5, 2, 6
NOT_COMPARED = "not compared"
NO_CONTROLS = (
    "no control: no score can be called high, and the verdict cannot be shared lineage; add unrelated models of this "
    "shape to the library, or run `fathom lineage compare --control MODEL`"
)
STRENGTH = (verdict.SHARED, verdict.INITIALISATION, verdict.PARTIAL, verdict.EMBEDDING, verdict.INCONCLUSIVE)
RELATED = STRENGTH[:3]
NOTES = (
    "A candidate is a relative, not a parent: direction is not claimed. Siblings and children are candidates too.",
    "Only the models with the nearest cards were compared. A relative with a distant card, or without one, is missed.",
)


@dataclass(frozen=True)
class Candidate:
    """A model of the library that was compared with the model in question, or the reason why it could not be
    compared."""

    name: str
    card: str
    cosine: float  # of the cards
    label: str  # of the verdict
    meaning: str
    p: float | None = None  # smallest corrected p-value of the matching tests
    score: float | None = None
    identical: bool = False
    alternatives: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def rank(self) -> tuple[float, ...]:
        """The sort key of a candidate: strongest verdict first, then the higher score, then the more similar card."""
        place = STRENGTH.index(self.label) if self.label in STRENGTH else len(STRENGTH)
        return not self.identical, place, -(self.score or 0.0), -self.cosine


@dataclass(frozen=True)
class Control:
    """A model of the library that was measured as a control; if it could not be used as one, also the reason."""

    name: str
    refused: str = ""


@dataclass(frozen=True)
class Identification:
    """The candidates from which a model may come, the one with the strongest verdict first."""

    model: str
    searched: int  # cards
    nonce: int | None
    candidates: tuple[Candidate, ...]
    controls: tuple[Control, ...]
    notes: tuple[str, ...] = field(default=NOTES)

    @property
    def related(self) -> tuple[Candidate, ...]:
        """The candidates for which the comparison reports a shared lineage or a shared initialisation."""
        return tuple(one for one in self.candidates if one.label in RELATED)

    @property
    def exit_code(self) -> int:
        """The exit code of the strongest verdict, as in `compare`; inconclusive if no candidate was compared."""
        known = [one.label for one in self.candidates if one.label != NOT_COMPARED]
        return verdict.EXIT_CODES[known[0] if known else verdict.INCONCLUSIVE]

    @property
    def sentence(self) -> str:
        """The finding."""
        compared = sum(one.label != NOT_COMPARED for one in self.candidates)
        if not compared:
            return f"None of the {len(self.candidates)} nearest models could be compared."
        if not self.related:
            return f"No relative was found among the {compared} models that were compared."
        return f"{len(self.related)} of the {compared} models that were compared are candidates for an ancestor."


def identify(
    weights: Weights, library: Path, top: int = NEAREST, options: Options | None = None, progress: Told = lambda _: None
) -> Identification:
    """Search a library by the model's card and compare the model with the nearest.

    Args:
        weights: The model.
        library: A directory of cards.
        top: How many models to compare.
        options: How much of the models to read.
        progress: Called with a few words before each step.
    """
    options = options or Options(extras=False)
    options = replace(options, nonce=secrets.randbelow(1 << 32)) if options.nonce is None else options
    progress("card")
    own = cards.card(weights)
    hits = cards.search(own, library)
    alike = list(islice(_of_shape(hits[top:], own), TRIED))
    used = list(_controls(weights, alike, options, progress))
    controls = [(other, pair) for _, other, pair in used if not pair.convicts()]
    kin = {hit.file for hit, _, pair in used if pair.convicts()}
    near = hits[:top] + [hit for hit in hits[top:] if hit.file in kin]
    found = [_candidate(weights, hit, controls, options, progress) for hit in near]
    why = f"related to {weights.name}, so it is a candidate"
    told = tuple(Control(other.name, why if hit.file in kin else "") for hit, other, _ in used)
    none = (
        f"The library has no model of this shape beyond the nearest {top}, so there are no controls."
        if not alike
        else f"Of {len(alike)} further models of this shape {len(alike) - len(used)} could not be compared and "
        f"{len(kin)} are related, so there are no controls."
    )
    notes = () if controls else (none,)
    ranked = tuple(sorted(found, key=lambda one: one.rank))
    return Identification(weights.name, len(hits), options.nonce, ranked, told, (*notes, *NOTES))


def _where(hit: cards.Hit) -> str:
    """The path of the model that a card describes: as the card names it, or next to the card's file."""
    beside = Path(hit.file).parent / hit.name
    return str(beside) if not Path(hit.name).exists() and beside.exists() else hit.name


def _opened(hit: cards.Hit) -> Weights:
    card, where = cards.read_card(Path(hit.file)), _where(hit)
    remote = card.revision is not None and not Path(where).exists() and "@" not in where
    return open_weights(f"{where}@{card.revision}" if remote else where)


def _of_shape(hits: Sequence[cards.Hit], own: Card) -> Iterator[cards.Hit]:
    """Yields the library's models that have the same shape as the model in question, the least similar first."""
    for hit in reversed(hits):
        with suppress(FathomError, OSError):
            if cards.read_card(Path(hit.file)).structure == own.structure:
                yield hit


def _controls(
    weights: Weights, hits: Sequence[cards.Hit], options: Options, progress: Told
) -> Iterator[tuple[cards.Hit, Weights, Pair]]:
    """Yields the models of the library that can be compared, with their cards, until enough of them are unrelated to
    the model in question."""
    usable, quick = 0, options.of_controls()
    for hit in hits:
        if usable == CONTROLS:
            return
        try:
            other = _opened(hit)
            with holding(weights, other):
                pair = measure(weights, other, quick, lambda at, name=hit.name: progress(f"control {name}: {at}"))  # type: ignore[misc]
        except (FathomError, OSError):
            continue
        usable += not pair.convicts()
        yield hit, other, pair


def _candidate(
    weights: Weights, hit: cards.Hit, controls: Sequence[tuple[Weights, Pair]], options: Options, progress: Told
) -> Candidate:
    """The comparison with one model of the library."""

    def told(at: str) -> None:
        progress(f"{hit.name}: {at}")

    try:
        other = _opened(hit)
        with holding(weights, other):
            pair = measure(weights, other, options, told)
            measured = [(c.name, [first, measure(other, c, options.of_controls(), told)]) for c, first in controls]
            found = judge(pair, measured, None, options)
    except (FathomError, OSError) as error:
        return Candidate(hit.name, hit.file, hit.cosine, NOT_COMPARED, f"It could not be compared: {error}")
    said, matching = found.verdict, [t for t in found.tests if t.matches and not t.void]
    return Candidate(
        *(hit.name, hit.file, hit.cosine, said.label, said.meaning),
        p=min((test.corrected for test in matching), default=1.0),
        score=_best(found),
        identical=pair.identical is not None and pair.identical.whole,
        alternatives=said.alternatives,
        reasons=tuple(NO_CONTROLS if one == verdict.GIVE_CONTROLS else one for one in said.reasons),
    )


def _best(found: Comparison) -> float:
    return found.pair.scores[found.pair.best].score if found.pair.best else 0.0


def rows(found: Identification) -> list[list[str]]:
    """The candidates as rows of a table: model, verdict, p-value, score, similarity of the cards."""
    return [
        [
            one.name,
            one.label + (", identical" if one.identical else ""),
            "" if one.p is None else evidence.probability(one.p),
            "" if one.score is None else f"{one.score:.3f}",
            f"{one.cosine:.3f}",
        ]
        for one in found.candidates
    ]


def write(out: Path, found: Identification) -> None:
    """The result as report.json and report.html in a directory."""
    out.mkdir(parents=True, exist_ok=True)
    html.write(out, found, page(found))


COLUMNS = ("model", "verdict", "p", "score", "likeness of cards")


def page(found: Identification) -> str:
    """The result as one HTML page."""
    details = [
        html.section(
            one.name,
            html.paragraph(one.meaning),
            html.bullets(one.reasons),
            html.details("Other explanations", "\n".join(one.alternatives)) if one.alternatives else "",
        )
        for one in found.candidates
    ]
    controls = [one.name + (f": refused, {one.refused}" if one.refused else "") for one in found.controls]
    return html.page(
        f"Lineage: candidates for {found.model}",
        found.sentence,
        html.table(f"{found.searched:,} cards were searched", COLUMNS, rows(found), prose=("verdict",)),
        html.section("What this does not claim", html.bullets(found.notes)),
        *details,
        html.section("Controls from the library", html.bullets(controls)) if controls else "",
        html.paragraph(f"Layers and neurons were drawn by the nonce {found.nonce}.", quiet=True),
    )

"""Verify a report: its files by their hashes, every number and sentence by recomputation.

`commitments.py` verifies a commitment, and hashes the files of a model. `report.py` decides what a report holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from fathom.checkpoints.origin import parse_json
from fathom.errors import ModelError
from fathom.lineage import comparison, huref
from fathom.lineage.comparison import Given, Options
from fathom.lineage.publishing import page, report
from fathom.lineage.publishing.cards import sketch_bytes
from fathom.lineage.publishing.commitments import SAME_SKETCH, Verification
from fathom.lineage.publishing.results import LineageReport, ModelIdentity
from fathom.lineage.weights import Weights, open_weights
from fathom.report.files import asdict
from fathom.report.results import restored

SCORE, DRIFT = 1e-3, 0.05  # tolerances of scores and statistics, and of the drift
P, PRINTED_P = 0.01, 0.1  # tolerances of log p: as a number, and as printed with two digits
READ = 2.0  # tolerance of the number of bytes read, as a factor
COSTS = {"bytes_read", "seconds"}
MADE = {"version", "numpy", "platform"}
SENTENCES = {
    "sentence",
    "meaning",
    "alternatives",
    "sure",
    "reasons",
    "skipped",
    "tampering",
    "null",
    "note",
    "per_layer",
}
_HASH = re.compile(r"[0-9a-f]{32,}")
"""Compared as it is: read as a number, 851e718… is infinite, and 12e3… equals what differs in its last letter."""
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![0-9A-Za-z])")


def read_statement(file: Path) -> dict[str, object]:
    """Read a commitment, or a report, from a file."""
    return parse_json(file.read_bytes(), str(file))


def verify(body: Mapping[str, object], name: str = "report", page_text: str | None = None) -> Verification:
    """Recompute a report from its models, and list the differences and the entries that were not recomputed.

    Args:
        body: The report.
        name: The report's name in error messages.
        page_text: The HTML page of the report, which is compared word by word with the page rendered from the report.
    """
    if body.get("fathom_lineage_report") != report.SCHEMA:
        raise ModelError(f"{name}: not a report of version {report.SCHEMA}; make it again")
    said = _typed(body, name)
    first, second = (_opened(item.origin, item, said.given) for item in said.inputs)
    controls = [_opened(item.model, item, Given()) for item in said.controls]
    found = comparison.compare(first, second, controls, said.given.null, said.options)
    found.given = said.given
    again = report.made(found, hashed=True)
    findings = [*unidentified(said), *differences(body, asdict(again))]
    if page_text is not None:
        findings += page_differences(page_text, page.render(found, again))
    return Verification(not findings, findings, not_recomputed(said, page_text is not None))


_MARKUP = re.compile(r"<(svg|style)\b.*?</\1>|<[^>]*>", re.DOTALL)
_COSTS = re.compile(r"[\d.,]+ ?(kB|MB|GB|B) read|\d+ s for the pair|Fathom [^,]*, numpy [^,]*, .*")


def page_differences(said: str, again: str) -> list[str]:
    """The lines of a report's page that differ from the expected ones; drawings are not compared, since they are made
    from numbers of the report."""
    lines = [
        [_COSTS.sub("", line.strip()) for line in _MARKUP.sub("\n", text).splitlines() if line.strip()]
        for text in (said, again)
    ]
    scripts = [
        len(re.findall(r"<script|javascript:| on\w+=|http-equiv", text, re.IGNORECASE)) for text in (said, again)
    ]
    if scripts[0] != scripts[1]:
        return ["report.html: holds code that the page does not have"]
    if len(lines[0]) != len(lines[1]):
        return [f"report.html: {len(lines[0])} lines of text, where the report gives {len(lines[1])}"]
    pairs = zip(*lines, strict=True)
    return [
        f"report.html: says {one!r:.100}, the report gives {other!r:.100}"
        for one, other in pairs
        if one != other and not _same_sentence(one, other)
    ]


def _typed(body: Mapping[str, object], name: str) -> LineageReport:
    """The report with every entry checked for its type: 0 is not accepted for `false`, nor an empty text for a path."""
    try:
        said = restored(LineageReport, body)
        for section, kind in (("given", Given), ("options", Options)):
            values = body[section]
            assert isinstance(values, dict)
            if set(values) != {field.name for field in fields(kind)} or "" in values.values():
                raise ValueError(f"{section}: entries are missing, unknown or empty")
        if len(said.inputs) != 2:
            raise ValueError(f"{len(said.inputs)} inputs")
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{name}: not a complete report: {error}") from None
    return said


def _opened(name: str, item: ModelIdentity, given: Given) -> Weights:
    """Open a model by its name in the report; for a repository, at the commit that the report states."""
    where = name if item.revision is None else f"{name.partition('@')[0]}@{item.revision}"
    return replace(open_weights(where, given.adapter_base), name=name)


def _models(body: LineageReport) -> Iterator[tuple[str, ModelIdentity]]:
    yield from ((item.origin, item) for item in body.inputs)
    yield from ((item.model, item) for item in body.controls)


def _is_commit(revision: object) -> bool:
    return isinstance(revision, str) and bool(re.fullmatch(r"[0-9a-f]{40}", revision))


def unidentified(body: LineageReport) -> list[str]:
    """Messages on models that the report does not identify, neither by file hashes nor by a commit."""
    return [
        f"{name}: the report holds neither hashes of its files nor a commit"
        for name, item in _models(body)
        if not (item.content and item.content.root) and not _is_commit(item.revision)
    ]


def not_recomputed(body: LineageReport, with_page: bool = False) -> list[str]:
    """Statements of a report that recomputation cannot check."""
    out = [
        "versions, platform and seconds: of the run that made the report; bytes read, within a factor of two",
        "the drawings in report.html and the portrait files"
        if with_page
        else "report.html: it is not in the folder of the report",
    ]
    if body.given.null:
        out.append("what the null file says of its models: the file itself is checked by its SHA-256")
    out += [
        f"{name}: the files behind commit {item.revision}, for which the endpoint answers"
        for name, item in _models(body)
        if _is_commit(item.revision)
    ]
    return out


def differences(said: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """The paths of all report entries that differ after recomputation."""
    known = {key: value for key, value in said.items() if key != "portraits"}
    found = list(_differences(known, {key: value for key, value in again.items() if key != "portraits"}, ()))
    return [*found, *_portraits(said.get("portraits"), again["portraits"])]


def _differences(said: object, again: object, path: tuple[str, ...]) -> Iterator[str]:
    where = ".".join(path)
    if path and (path[-1] in COSTS or (path[0] == "tool" and path[-1] in MADE)):
        if not _may_be(said, again, path[-1]):
            yield f"{where}: the report says {_short(said)}, which it cannot be"
        return
    if isinstance(said, dict) and isinstance(again, dict):
        for key in [*again, *(key for key in said if key not in again)]:
            if key not in said or key not in again:
                yield f"{'.'.join((*path, key))}: {'not in the report' if key not in said else 'not found again'}"
            else:
                yield from _differences(said[key], again[key], (*path, key))
    elif isinstance(said, list) and isinstance(again, list) and len(said) == len(again):
        for place, (one, other) in enumerate(zip(said, again, strict=True)):
            yield from _differences(one, other, (*path, str(place)))
    elif not _same(said, again, path):
        yield f"{where}: the report says {_short(said)}, recomputed {_short(again)}"


def _may_be(said: object, again: object, key: str) -> bool:
    """Whether an entry that may differ between runs is plausible: text, seconds, or a number of bytes read near the
    present one."""
    if not _is_number(again):
        return type(said) is type(again)
    if key == "bytes_read":
        return type(said) is int and again <= READ * said and said <= READ * again
    return _is_number(said) and 0 <= said < math.inf


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value!r:.100}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(said: object, again: object, path: tuple[str, ...]) -> bool:
    if _is_number(said) and _is_number(again):
        return _close(float(said), float(again), path) if float in (type(said), type(again)) else bool(said == again)
    if isinstance(said, str) and isinstance(again, str) and SENTENCES & set(path) and not _HASH.fullmatch(again):
        return said == again or _same_sentence(said, again)
    return type(said) is type(again) and bool(said == again)


def _close(said: float, again: float, path: tuple[str, ...]) -> bool:
    if path[-1] in {"p", "corrected", "false_positive_rate_below"}:
        return _close_p(said, again)
    if path[-1] == "minimum_detectable_drift":
        return abs(said - again) <= DRIFT * abs(again)
    return abs(said - again) <= SCORE * max(1.0, abs(again))


def _close_p(said: float, again: float, slack: float = P) -> bool:
    if min(said, again) <= 0:
        return said == again
    apart = abs(math.log(said) - math.log(again))
    return apart <= slack + 0.005 * abs(math.log(again))


def _same_sentence(said: str, again: str) -> bool:
    """Whether two sentences have equal words and nearly equal numbers: the last printed digit may differ between
    machines."""
    if _NUMBER.sub("#", said) != _NUMBER.sub("#", again):
        return False
    for one, other in zip(_NUMBER.findall(said), _NUMBER.findall(again), strict=True):
        x, y = (float(text.replace(",", "")) for text in (one, other))
        if "e" in one + other:
            close = _close_p(abs(x), abs(y), PRINTED_P)
        else:
            close = x == y if "." not in one + other else abs(x - y) <= 2 * SCORE * max(1.0, abs(y))
        if not close:
            return False
    return True


def _portraits(said: object, again: Mapping[str, Any]) -> Iterator[str]:
    """Compare the portraits of a report: sketches by cosine, since rounding differs between machines; words and hashes
    must follow from the stated sketch."""
    if not isinstance(said, dict) or list(said) != list(again):
        yield "portraits: not of the two models"
        return
    for name, item in said.items():
        try:
            sketch = sketch_bytes(item["sketch"])
            stated = asdict(report.portrait_of(sketch))
        except (KeyError, TypeError, ValueError, IndexError):
            yield f"portraits.{name}: no sketch"
            continue
        likeness = huref.sketch_cosine(sketch, sketch_bytes(again[name]["sketch"]))
        if len(sketch) != huref.SKETCH or likeness < SAME_SKETCH:
            yield f"portraits.{name}: the sketch differs, cosine {likeness:.4f}"
        if stated != item:
            yield f"portraits.{name}: words or hashes are not those of its sketch"

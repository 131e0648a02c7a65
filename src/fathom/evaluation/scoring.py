"""What `fathom evaluate` does: every checkpoint on every task and text, kept as it goes, and one table at the end."""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fathom.data.shards import write_json
from fathom.data.sources import Reading
from fathom.errors import FathomError
from fathom.evaluation.budgets import limited
from fathom.evaluation.paired import rows, table

if TYPE_CHECKING:
    from fathom.evaluation.harness import TaskResult
    from fathom.evaluation.perplexity import Domain, DomainScore

Opener = Callable[[Path], tuple[Any, Any]]
WHOLE = "all text"


class EvaluateError(FathomError, ValueError):
    """Something that cannot be evaluated as asked; the message is one line."""


@dataclass
class Checkpoint:
    """A model directory, opened when something is left to do."""

    name: str
    directory: Path
    opener: Opener
    opened: tuple[Any, Any] | None = None
    lm: Any = None
    max_trips: int | None = None
    """A budget of trips per token."""
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    domains: dict[str, DomainScore] = field(default_factory=dict)

    def open(self) -> tuple[Any, Any]:
        """Model and tokenizer."""
        if self.opened is None:
            print(f"{self.name}: opening {self.directory}", file=sys.stderr)
            model, tokenizer = self.opener(self.directory)
            self.opened = limited(model, self.max_trips), tokenizer
        return self.opened

    def close(self) -> None:
        """Make room for the next."""
        self.opened = self.lm = None

    def fingerprint(self) -> str:
        """Changes whenever the directory's weights, configuration or tokenizer do."""
        names = ("*.safetensors", "config.json", "tokenizer*", "vocab*", "merges.txt")
        return _digest([_stamp(path) for pattern in names for path in sorted(self.directory.glob(pattern))])


def run_evaluate(options: Namespace, find: Callable[[str], Path], opener: Callable[..., tuple[Any, Any]]) -> int:
    """`fathom evaluate`: score, keep, print.

    Args:
        options: The command's words.
        find: From a path of the command line to a model directory.
        opener: Opens one: `open_checkpoint`.
    """
    if options.kvcache:
        if options.max_trips is not None:
            raise EvaluateError("--max-trips and --kvcache: ask one question at a time")
        from fathom.evaluation.caches.evaluate import run_kvcache

        return run_kvcache(options, find, opener)
    for name in ("window", "sinks", "ratio"):
        if (value := getattr(options, f"kvcache_{name}")) is not None:
            raise EvaluateError(f"--kvcache-{name} {value}: give --kvcache METHODS with it")
    if not options.tasks and not options.perplexity:
        raise EvaluateError("nothing to do: give --tasks, --perplexity or --kvcache")
    open_one = partial(opener, device=options.device, dtype=options.dtype, trust_remote_code=options.trust_remote_code)
    checkpoints = under_budgets(name_checkpoints(options.checkpoints, find, open_one), options.max_trips)
    names = _task_names(options.tasks) if options.tasks else []
    reading = Reading(text_field=options.text_field, domain_field=options.domain_field)
    domains = _read(options, reading) if options.perplexity else []
    context = options.context or _common_context(checkpoints)
    for checkpoint in checkpoints:
        for name in names:
            checkpoint.tasks[name] = _task(checkpoint, name, options)
        for domain in domains:
            checkpoint.domains[domain.name] = _domain(checkpoint, domain, context, options)
        checkpoint.close()
    report = summarize(checkpoints, context if domains else None, options.stride)
    if options.out is not None:
        write_json(options.out / "report.json", report)
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        show(checkpoints, report)
    return 0


def name_checkpoints(entries: Sequence[str], find: Callable[[str], Path], opener: Opener) -> list[Checkpoint]:
    """`[NAME=]PATH` as checkpoints; a nameless one is called after its directory."""
    made: list[Checkpoint] = []
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals or "/" in name or Path(entry).exists():
            name, path = "", entry
        directory = find(path)
        place = directory.resolve()
        name = name or (place.parent.name if place.name == "model" else place.name)
        if any(other.name == name for other in made):
            raise EvaluateError(f"two checkpoints are called {name!r}; name them: NAME=PATH")
        made.append(Checkpoint(name, directory, opener))
    return made


def under_budgets(checkpoints: Sequence[Checkpoint], words: str | None) -> list[Checkpoint]:
    """Each checkpoint once for every budget of trips in `1,2,3`."""
    if words is None:
        return list(checkpoints)
    budgets = [word.strip() for word in words.split(",")]
    if not all(word.isdecimal() and int(word) for word in budgets) or len(set(budgets)) < len(budgets):
        raise EvaluateError(f"--max-trips {words}: expected different numbers from 1 on, comma between")
    return [
        Checkpoint(f"{checkpoint.name}@{budget}", checkpoint.directory, checkpoint.opener, max_trips=int(budget))
        for checkpoint in checkpoints
        for budget in budgets
    ]


def summarize(checkpoints: Sequence[Checkpoint], context: int | None, stride: int | None) -> dict[str, Any]:
    """Everything for a program: lm-eval's JSON as it is, the text scores, and the table's rows."""
    import fathom

    scores: dict[str, dict[tuple[str, str], Any]] = {}
    for checkpoint in checkpoints:
        mine = scores[checkpoint.name] = {}
        if checkpoint.tasks:
            from fathom.evaluation.harness import items_of

            mine.update(items_of(list(checkpoint.tasks.values())))
        for name, score in _with_whole(checkpoint.domains).items():
            mine.update({(name, metric): items for metric, items in score.items().items()})
    return {
        "fathom": fathom.__version__,
        "checkpoints": {
            checkpoint.name: {
                "directory": str(checkpoint.directory),
                "max_trips": checkpoint.max_trips,
                "tasks": {name: result.results for name, result in checkpoint.tasks.items()},
                "notes": [note for result in checkpoint.tasks.values() for note in result.notes],
                "perplexity": {name: score.summary() for name, score in _with_whole(checkpoint.domains).items()},
            }
            for checkpoint in checkpoints
        },
        "context": context,
        "stride": (stride or context) if context else None,
        "rows": rows(scores),
    }


def show(checkpoints: Sequence[Checkpoint], report: Mapping[str, Any]) -> None:
    """lm-eval's tables, then one for all checkpoints."""
    from rich.console import Console

    # Tables are as wide as they are: a pipe has no width to fit them into.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    for checkpoint in checkpoints:
        if checkpoint.tasks:
            from fathom.evaluation.harness import tables

            print(f"{checkpoint.name} ({checkpoint.directory})\n\n{tables(list(checkpoint.tasks.values()))}")
        for note in report["checkpoints"][checkpoint.name]["notes"]:
            print(note)
    names = [checkpoint.name for checkpoint in checkpoints]
    if len(names) > 1 or checkpoints[0].domains:
        shown = report["rows"] if len(names) > 1 else [row for row in report["rows"] if row["task"] in _texts(report)]
        console.print(table(shown, names))
    if checkpoints[0].domains:
        console.print("", _by_context(report))
    if any(checkpoint.max_trips for checkpoint in checkpoints):
        console.print("", _by_trips(report))
    if len(names) > 1:
        print(
            "\nIntervals: 95 %, Student's t over paired documents or items; × is the ratio of perplexities. "
            "An asterisk: significant after Holm's adjustment over all rows."
        )


def _task(checkpoint: Checkpoint, name: str, options: Namespace) -> TaskResult:
    from importlib.metadata import version

    from fathom.evaluation.harness import TaskResult, TaskSettings, open_lm, run_task

    settings = TaskSettings(options.num_fewshot, options.limit, options.context, options.apply_chat_template)
    data = options.task_data
    # lm-eval's own data sets are versioned by its tasks; a folder's are what lies in it.
    stamps = [_stamp(path) for path in sorted(data.rglob("*")) if path.is_file()] if data else []
    key = {
        "checkpoint": checkpoint.fingerprint(),
        **({} if checkpoint.max_trips is None else {"max_trips": checkpoint.max_trips}),
        "settings": asdict(settings),
        "dtype": options.dtype,
        "data": _digest(stamps),
        "lm_eval": version("lm_eval"),
    }

    def make() -> dict[str, Any]:
        model, tokenizer = checkpoint.open()
        if checkpoint.lm is None:
            checkpoint.lm = open_lm(model, tokenizer, options.batch_size, options.context)
        return asdict(run_task(checkpoint.lm, name, settings, data))

    found = TaskResult(**kept(checkpoint, options.out, "tasks", name, key, make))
    if options.out is not None:
        write_json(options.out / quote(checkpoint.name, safe=" ") / f"{quote(name, safe=' ')}.json", found.results)
    return found


def _domain(checkpoint: Checkpoint, domain: Domain, context: int, options: Namespace) -> DomainScore:
    from fathom.evaluation.perplexity import DomainScore, score

    text = hashlib.sha256()
    for document in domain.documents:
        text.update(document.text.encode() if document.text is not None else document.ids.tobytes())  # type: ignore[union-attr]
        text.update(b"\0")
    key = {
        "checkpoint": checkpoint.fingerprint(),
        **({} if checkpoint.max_trips is None else {"max_trips": checkpoint.max_trips}),
        "context": context,
        "stride": options.stride or context,
        "dtype": options.dtype,
        "data": text.hexdigest(),
    }

    def make() -> dict[str, Any]:
        return score(*checkpoint.open(), domain, context, options.stride, options.batch_size).to_dict()

    return DomainScore(**kept(checkpoint, options.out, "perplexity", domain.name, key, make))


def kept(
    checkpoint: Checkpoint, out: Path | None, kind: str, name: str, key: Mapping[str, Any], make: Callable[[], Any]
) -> dict[str, Any]:
    """What was computed before under the same conditions; else computed now, and kept where there is a place."""
    path = out and out / quote(checkpoint.name, safe=" ") / ".done" / f"{kind}-{quote(name, safe=' ')}.json"
    if path and path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] == key:
            print(f"{checkpoint.name}: {name}: done before", file=sys.stderr)
            return kept["value"]
        print(f"{checkpoint.name}: {name}: done before under other conditions; computing it anew", file=sys.stderr)
    print(f"{checkpoint.name}: {name}", file=sys.stderr)
    value = make()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": key, "value": value})
    return value


def _task_names(words: str) -> list[str]:
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError:
        raise EvaluateError("--tasks needs lm-eval: pip install 'fathom-lm[evaluate]'") from None
    from fathom.evaluation.tasks import task_names

    return task_names(word.strip() for word in words.split(",") if word.strip())


def _read(options: Namespace, reading: Reading) -> list[Domain]:
    from fathom.evaluation.perplexity import read_domains

    return read_domains(options.perplexity, reading, options.split, options.limit)


def _common_context(checkpoints: Sequence[Checkpoint]) -> int:
    """The largest context that all have, so that all predict the same tokens from the same ones."""
    from fathom.evaluation.perplexity import LONGEST_DEFAULT_CONTEXT

    own = [json.loads((c.directory / "config.json").read_text()).get("max_position_embeddings") for c in checkpoints]
    return min([LONGEST_DEFAULT_CONTEXT, *(size for size in own if isinstance(size, int))])


def _with_whole(domains: Mapping[str, DomainScore]) -> dict[str, DomainScore]:
    from fathom.evaluation.perplexity import DomainScore

    return {**domains, **({WHOLE: DomainScore.joined(list(domains.values()))} if len(domains) > 1 else {})}


def _texts(report: Mapping[str, Any]) -> set[str]:
    return {name for entry in report["checkpoints"].values() for name in entry["perplexity"]}


def _by_context(report: Mapping[str, Any]) -> Any:
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("tokens of context")
    columns = {}
    for name, entry in report["checkpoints"].items():
        shown.add_column(f"loss of {name}", justify="right")
        texts = entry["perplexity"]
        columns[name] = {p["from"]: p for p in texts[WHOLE if WHOLE in texts else next(iter(texts))]["by_context"]}
    for start in sorted({start for places in columns.values() for start in places}):
        stop = min(2 * start - 1, report["context"])
        cells = [f"{places[start]['loss']:.4f}" if start in places else "" for places in columns.values()]
        shown.add_row(f"{start}-{stop}" if stop > start else str(start), *cells)
    return shown


def _by_trips(report: Mapping[str, Any]) -> Any:
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("under a budget", "trips at most", "trips per token", "loss"):
        shown.add_column(title, justify="left" if title == "under a budget" else "right")
    for name, entry in report["checkpoints"].items():
        for text, score in entry["perplexity"].items():
            made = score.get("trips_per_token")
            cells = [str(entry["max_trips"]), "" if made is None else f"{made:.3f}", f"{score['loss']:.4f}"]
            shown.add_row(f"{name.rpartition('@')[0]}, {text}", *cells)
    return shown


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return (path.name, status.st_size, status.st_mtime_ns)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()

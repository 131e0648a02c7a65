"""Score every checkpoint on every task and text, store the results, and print one table.

`tasks.py` finds tasks and their documents, `harness.py` runs lm-eval and keeps the metrics that can be paired,
`perplexity.py` reads texts and cuts them into windows, `paired.py` computes differences and intervals, and
`scores_page.py` makes tables and notes. `training/jacobi_gap.py` compares Jacobi rounds with decoding, and
`kvcache/policy.py` puts a cache into a model while it reads tasks.
"""

from __future__ import annotations

import hashlib
import json
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom._version import __version__
from fathom.checkpoints.file_names import CONFIG, GENERATION_CONFIG, PAGE
from fathom.checkpoints.find import find_model, name_of
from fathom.checkpoints.int8 import WEIGHTS
from fathom.checkpoints.open import DTYPES, Opening, check_device, own_context
from fathom.checkpoints.places import require_folder
from fathom.checkpoints.untrusted import check_checkpoint
from fathom.data.sources import CLUSTER, Reading
from fathom.errors import FathomError, ModelError, SettingsError, to_install
from fathom.evaluation.harness import TaskResult, TaskSettings, fitted, items_of, open_lm, run_task, tables
from fathom.evaluation.paired import Scored, rows
from fathom.evaluation.perplexity import LONGEST_DEFAULT_CONTEXT, Cut, Domain, DomainScore, read_domains, read_sample
from fathom.evaluation.perplexity import score as score_domain
from fathom.evaluation.results import WHOLE, CheckpointScores, ScoresReport, TextScore
from fathom.evaluation.scores_page import context_table, interval_notes, page, score_table
from fathom.evaluation.tasks import file_task, task_names
from fathom.iterations import limited
from fathom.kvcache import METHODS
from fathom.kvcache.build import base
from fathom.kvcache.policy import CacheOptions, Policy, cache_policy
from fathom.report import html
from fathom.report.files import asdict, read_json, write_json
from fathom.report.provenance import provenance
from fathom.report.results import restored
from fathom.report.tables import line_width, terminal_table
from fathom.training.jacobi_gap import Sample, gap_of
from fathom.training.results import DecodingGap

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from rich.table import Table

T = TypeVar("T")
Opener = Callable[[Path], tuple[PreTrainedModel, PreTrainedTokenizerBase]]


@dataclass(frozen=True)
class EvaluationSettings(Opening):
    """The settings of an evaluation: the tasks and texts, and how checkpoints are opened."""

    tasks: str | None = None
    """lm-eval's tasks, groups and tags, comma-separated; * is a wildcard; `choice:FILE` and `cloze:FILE` are yours."""
    include: Path | None = None
    """A folder of further tasks, as lm-eval YAML files."""
    task_data: Path | None = None
    """A folder with the tasks' documents, for use without a network."""
    num_fewshot: int | None = None
    """Few-shot examples; by default the task's number."""
    apply_chat_template: bool = False
    """Apply the chat template to prompts."""
    perplexity: Sequence[str] = ()
    """`[NAME=]INPUT`: text, JSONL or Parquet files, directories, globs, hf:..., or prepared corpora."""
    split: str = "val"
    """The split of prepared corpora to score."""
    text_field: str = "text"
    """The text field of JSONL and Parquet files."""
    domain_field: str | None = None
    """The field that names the domain."""
    context: int | None = None
    """Context length; by default the model's, for text at most 2,048."""
    stride: int | None = None
    """Tokens between the starts of two windows of text; by default the context."""
    max_trips: str | None = None
    """Comma-separated limits on iterations per token; each checkpoint is scored with each limit."""
    kvcache: str | None = None
    """Comma-separated caches through which tasks are read; each checkpoint is scored with each. `full` is the ordinary
    one."""
    kvcache_window: int | None = None
    """Entries that a compressed cache may hold; by default as tuned."""
    kvcache_sinks: int | None = None
    """First entries that it keeps; by default as tuned, or 4."""
    kvcache_ratio: float | None = None
    """Share of its window that a compression leaves; by default as tuned, or 0.5."""
    kvcache_kept: int | None = None
    """Entries that a compression leaves beside the sinks, instead of a ratio."""
    limit: int | None = None
    """Maximum documents of each task and domain."""
    batch_size: int | None = None
    """Batch size; by default as large as memory allows."""
    out: Path | None = None
    """Directory for results, so that a second call resumes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "perplexity", _texts(self.perplexity))
        for key in ("context", "stride", "limit", "batch_size"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise SettingsError(f"{key}={value}: allowed: 1 or more")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise SettingsError(f"num_fewshot={self.num_fewshot}: allowed: 0 or more")
        if self.weights not in WEIGHTS:
            raise SettingsError(f"weights={self.weights}: allowed: {', '.join(WEIGHTS)}")
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype={self.dtype}: allowed: {', '.join(DTYPES)}")
        if self.device is not None:
            check_device(self.device)
        if self.out is not None:
            require_folder(self.out, "an evaluation")

    def texts(self) -> list[Domain]:
        """The texts that the setting `perplexity` names, by domain."""
        # No separator: it would divide a text file, which is one document here.
        reading = Reading(text_field=self.text_field, domain_field=self.domain_field)
        return read_domains(self.perplexity, reading, self.split, self.limit) if self.perplexity else []


@dataclass
class Checkpoint:
    """A model directory to score, with its scores; the model is opened only if something is left to compute."""

    name: str
    directory: Path
    opener: Opener
    opened: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
    lm: HFLM | None = None
    max_trips: int | None = None
    """A limit on iterations per token."""
    cache: Policy | None = None
    """The compressed cache through which it reads; None for an ordinary one."""
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Errors of tasks that could not be scored, by task."""
    domains: dict[str, DomainScore] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)
    """For a model that reads text by Jacobi rounds: the gap to decoding, by domain."""

    def open(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Model and tokenizer."""
        if self.opened is None:
            print(f"{self.name}: opening {self.directory}", file=sys.stderr)
            model, tokenizer = self.opener(self.directory)
            self.opened = limited(model, self.max_trips), tokenizer
        return self.opened

    def close(self) -> None:
        """Release the model."""
        self.opened = self.lm = None

    def scored(self) -> dict[tuple[str, str], Scored]:
        """The per-document items of every score, by task or text and by metric."""
        found = items_of(self.tasks.values())
        for name, score in _with_whole(self.domains).items():
            found.update({(name, metric): [items] for metric, items in score.items().items()})
        return found

    def fingerprint(self) -> str:
        """A hash that changes with the directory's weights, configurations, tokenizer or chat template."""
        names = ("*.safetensors", CONFIG, "tokenizer*", "vocab*", "merges.txt")
        # Optional files; generated answers depend on the end tokens and penalties of the last one.
        templates = ("chat_template*", "additional_chat_templates/*")
        more = (*templates, "special_tokens_map.json", "added_tokens.json", GENERATION_CONFIG)
        return _digest([_stamp(path) for pattern in names + more for path in sorted(self.directory.glob(pattern))])

    def key(self, settings: EvaluationSettings) -> dict[str, object]:
        """The key under which this checkpoint's results are stored: everything that the results depend on."""
        trips = {} if self.max_trips is None else {"max_trips": self.max_trips}
        cache = {} if self.cache is None else {"kvcache": asdict(self.cache)}
        return {"checkpoint": self.fingerprint(), "dtype": settings.numbers, **trips, **cache}


def evaluate(
    checkpoints: str | PathLike[str] | Iterable[str | PathLike[str]],
    settings: EvaluationSettings | None = None,
    *,
    perplexity: str | PathLike[str] | Iterable[str | PathLike[str]] | None = (),
    tasks: str | None = None,
) -> ScoresReport:
    """Score checkpoints on tasks and texts, with paired differences; returns the contents of `report.json`.

    Args:
        checkpoints: A model directory, run or comparison, or `NAME=PATH`, or several; all are compared with the first.
        settings: All other options. With `out`, results are stored and a second call resumes.
        perplexity: Texts: files, directories, globs, `hf:...` or prepared corpora, each with an optional `NAME=`;
            replaces the settings' texts.
        tasks: lm-eval's tasks, groups and tags, separated by commas; replaces the settings' tasks.
    """
    chosen = settings or EvaluationSettings()
    given = (checkpoints,) if isinstance(checkpoints, str | PathLike) else tuple(checkpoints)
    if wrong := [one for one in given if not isinstance(one, str | PathLike)]:
        raise SettingsError(f"evaluate takes names and directories; export a {type(wrong[0]).__name__} first")
    chosen = replace(chosen, perplexity=_texts(perplexity) or chosen.perplexity, tasks=tasks or chosen.tasks)
    return run([one if isinstance(one, str) else Path(one) for one in given], chosen)[1]


def _texts(given: str | PathLike[str] | Iterable[str | PathLike[str]] | None) -> tuple[str, ...]:
    """The names of texts: one name is one text, not its letters, and None is no text."""
    texts = (given,) if isinstance(given, str | PathLike) else given or ()
    return tuple(map(str, texts))


def run(checkpoints: Sequence[str | Path], settings: EvaluationSettings) -> tuple[list[Checkpoint], ScoresReport]:
    """Like `evaluate`, but returns the checkpoints with their scores as well as the report.

    With `out`, the report is `report.json` and `report.html` there, and lm-eval's JSON of a task is `NAME/TASK.json`.
    """
    if not settings.tasks and not settings.perplexity:
        raise SettingsError("nothing to do: give `tasks`, `perplexity` or `kvcache`")
    found = under_budgets(name_checkpoints(checkpoints, settings), settings.max_trips)
    found = under_caches(found, settings)
    names = _task_names(settings.tasks, settings.include) if settings.tasks else []
    domains = settings.texts()
    context = settings.context or _common_context(found, settings)
    for checkpoint in found:
        for name in names:
            _try_task(checkpoint, name, settings)
        for domain in domains:
            _score_text(checkpoint, domain, context, settings)
        checkpoint.close()
    report = summarize(found, context if domains else None, settings.stride)
    if settings.out is not None:
        html.write(settings.out, report, page(report, provenance()))
    return found, report


def name_checkpoints(entries: Sequence[str | Path], settings: EvaluationSettings) -> list[Checkpoint]:
    """Parse `[NAME=]PATH` entries into checkpoints; by default a checkpoint has its directory's name."""
    made: list[Checkpoint] = []
    for entry in map(str, entries):
        name, equals, path = entry.partition("=")
        if not equals or "/" in name or Path(entry).exists():
            name, path = "", entry
        directory = find_model(path)
        check_checkpoint(directory)
        name = name or name_of(directory)
        if name in (".", ".."):  # its results would collide with those of all checkpoints
            raise SettingsError(f"a checkpoint cannot be called {name!r}; give another name: NAME=PATH")
        if any(other.name == name for other in made):
            raise SettingsError(f"two checkpoints are called {name!r}; name them: NAME=PATH")
        made.append(Checkpoint(name, directory, settings.open))
    return made


def under_budgets(checkpoints: Sequence[Checkpoint], words: str | None) -> list[Checkpoint]:
    """A copy of each checkpoint for each limit on loop iterations in a list such as `1,2,3`.

    The copies are called `NAME@1`, `NAME@2`, …, and are compared with the first.
    """
    if words is None:
        return list(checkpoints)
    budgets = [word.strip() for word in words.split(",")]
    if not all(word.isdecimal() and int(word) for word in budgets) or len(set(budgets)) < len(budgets):
        raise SettingsError(f"max_trips={words}: expected different numbers of at least 1, separated by commas")
    return [
        Checkpoint(f"{checkpoint.name}@{budget}", checkpoint.directory, checkpoint.opener, max_trips=int(budget))
        for checkpoint in checkpoints
        for budget in budgets
    ]


def under_caches(checkpoints: Sequence[Checkpoint], settings: EvaluationSettings) -> list[Checkpoint]:
    """A copy of each checkpoint for each cache method in a list such as `full,snapkv`.

    The copies are called `NAME@full`, `NAME@snapkv`, and are compared with the first.
    """
    options = CacheOptions.of(settings)
    if settings.kvcache is None:
        for name, value in options.given().items():
            raise SettingsError(f"kvcache_{name}={value}: give `kvcache` with it")
        return list(checkpoints)
    if not settings.tasks or settings.perplexity:
        raise SettingsError(
            "`kvcache` needs `tasks` and excludes `perplexity`; to evaluate caches on texts: `fathom evaluate caches`"
        )
    methods = [word.strip() for word in settings.kvcache.split(",")]
    if len(set(methods)) < len(methods):
        raise SettingsError(f"kvcache={settings.kvcache}: expected different caches, separated by commas")
    if methods == ["full"]:
        for name, value in options.given().items():
            raise SettingsError(f"kvcache_{name}={value}: `kvcache=full` keeps every entry and has no such option")
    shared = any(METHODS[base(method)].has_ratio for method in methods if base(method) in METHODS)
    return [
        Checkpoint(
            f"{one.name}@{method}",
            one.directory,
            one.opener,
            max_trips=one.max_trips,
            cache=_policy(one, method, options, shared),
        )
        for one in checkpoints
        for method in methods
    ]


def _policy(checkpoint: Checkpoint, method: str, options: CacheOptions, shared: bool) -> Policy | None:
    """The schedule of a cache. A ratio that is `shared` with other methods is not for those that have none."""
    if method == "full":
        return None
    if base(method) not in METHODS:
        raise SettingsError(f"kvcache={method}: allowed with `tasks`: full, {', '.join(METHODS)}")
    if shared and not METHODS[base(method)].has_ratio:
        options = replace(options, ratio=None)
    return cache_policy(method, read_json(checkpoint.directory / CONFIG).get("kvcache"), options)


def summarize(checkpoints: Sequence[Checkpoint], context: int | None, stride: int | None) -> ScoresReport:
    """The report for programs: lm-eval's JSON unchanged, the text scores, and the table's rows."""
    entries = {
        checkpoint.name: CheckpointScores(
            directory=str(checkpoint.directory),
            max_trips=checkpoint.max_trips,
            kvcache=checkpoint.cache,
            tasks={name: result.results for name, result in checkpoint.tasks.items()},
            failed=dict(checkpoint.failed),
            notes=[note for result in checkpoint.tasks.values() for note in result.notes],
            perplexity=_perplexity(checkpoint),
        )
        for checkpoint in checkpoints
    }
    stride = (stride or context) if context else None
    found = rows({checkpoint.name: checkpoint.scored() for checkpoint in checkpoints})
    return ScoresReport(__version__, entries, context, stride, found)


def show(report: ScoresReport, out: Path | None = None) -> None:
    """Print lm-eval's tables, then one table for all checkpoints, and the path of the page."""
    from rich.console import Console

    console = Console(highlight=False, width=line_width())
    for name, entry in report.checkpoints.items():
        if entry.tasks:
            print(f"{name} ({entry.directory})\n")
            console.print(*fitted(tables(entry.tasks.values()), console.width), sep="\n\n")
        for note in entry.notes:
            print(note)
    several, texts = len(report.checkpoints) > 1, {text for _, text, _ in report.texts()}
    if several or texts:
        shown = [row for row in report.rows if several or row.task in texts]  # lm-eval's tables have the others
        console.print(terminal_table(*score_table(list(report.checkpoints), shown), left=2))
    if texts:
        console.print("", terminal_table(*context_table(report)))
    scores = [score for *_, score in report.texts()]
    if any(score.trips_per_token is not None for score in scores):
        console.print("", _by_trips(report))
    if any(score.decoding is not None for score in scores):
        print(
            "\nA model whose iterations read later iterations of earlier tokens (view ALL) reads text in Jacobi "
            "rounds, which approximate decoding. The gap to decoding is measured on a sample, with 95 % intervals "
            "over windows."
        )
    if notes := " ".join(interval_notes(report.rows)):
        print(f"\n{notes}")
    if out is not None:
        console.print(f"\nreport: {(out / PAGE).resolve()}", markup=False, soft_wrap=True)


def _try_task(checkpoint: Checkpoint, name: str, settings: EvaluationSettings) -> None:
    """Score a task; if it fails, the error is recorded and the other tasks continue.

    `failed` in the report keeps the reason, and the exit code of `cli/evaluate.py` and `cli/evaluate_deepened.py` is
    then 1.
    """
    try:
        checkpoint.tasks[name] = _task(checkpoint, name, settings)
    except (torch.OutOfMemoryError, OSError, ModelError):  # an error of the model, not of the task
        raise
    except Exception as error:  # a task runs lm-eval's code, templates and data, which may raise anything
        kind = "" if isinstance(error, FathomError) else f"{type(error).__name__}: "
        checkpoint.failed[name] = reason = kind + " ".join(str(error).split())
        print(f"fathom: {checkpoint.name}: {name} failed: {reason}", file=sys.stderr)


def _task(checkpoint: Checkpoint, name: str, settings: EvaluationSettings) -> TaskResult:
    asked = TaskSettings(settings.num_fewshot, settings.limit, settings.context, settings.apply_chat_template)
    data = settings.task_data
    # lm-eval versions its data sets by task; a folder is identified by its files.
    own = file_task(name)
    places = [own[1]] if own else [place for place in (data, settings.include) if place]
    found = [path for place in places for path in (place, *sorted(place.rglob("*"))) if path.is_file()]
    stamps = [_stamp(path) for path in found]
    key = {
        **checkpoint.key(settings),
        "settings": asdict(asked),
        "data": _digest(stamps),
        "lm_eval": version("lm_eval"),
    }

    def make() -> TaskResult:
        model, tokenizer = checkpoint.open()
        if checkpoint.lm is None:
            checkpoint.lm = open_lm(model, tokenizer, settings.batch_size, settings.context)
            if checkpoint.cache is not None:
                checkpoint.cache.try_on(model)
        with nullcontext() if checkpoint.cache is None else checkpoint.cache.throughout(model):
            return run_task(checkpoint.lm, name, asked, data, settings.include)

    result: TaskResult = kept(TaskResult, checkpoint, settings.out, "tasks", name, key, make)
    if settings.out is not None:
        write_json(settings.out / quote(checkpoint.name, safe=" ") / f"{quote(name, safe=' ')}.json", result.results)
    return result


def _score_text(checkpoint: Checkpoint, domain: Domain, context: int, settings: EvaluationSettings) -> None:
    """Score a domain of text; if the model reads in Jacobi rounds, also decode a part of the text token by token."""
    text, cut = hashlib.sha256(), Cut(context, settings.stride)
    for document in domain.documents:
        text.update(document.text.encode() if document.text is not None else document.ids.tobytes())  # type: ignore[union-attr]
        text.update(b"\0")
        if document.cluster is not None:
            text.update(f"{CLUSTER}={document.cluster}\0".encode("utf-8", "surrogatepass"))
    key = {
        **checkpoint.key(settings),
        "context": context,
        "stride": settings.stride or context,
        "data": text.hexdigest(),
    }

    def whole() -> DomainScore:
        return score_domain(*checkpoint.open(), domain, cut, settings.batch_size)

    def sample() -> Sample | None:
        return read_sample(*checkpoint.open(), domain, score.tokens, cut)

    score = kept(DomainScore, checkpoint, settings.out, "perplexity", domain.name, key, whole)
    checkpoint.domains[domain.name] = score
    if not score.trips:
        return
    decoded = kept(Sample | None, checkpoint, settings.out, "decoded", domain.name, key, sample)
    if decoded is not None:
        checkpoint.samples[domain.name] = decoded


def kept(
    kind: Any,
    checkpoint: Checkpoint,
    out: Path | None,
    group: str,
    name: str,
    key: Mapping[str, object],
    make: Callable[[], T],
) -> T:
    """The stored result for the same conditions if there is one, else a new result, which is stored if there is an
    output directory.

    Args:
        kind: The type of the result.
        checkpoint: The checkpoint.
        out: The output directory.
        group: The part of the evaluation.
        name: Its name within the part.
        key: The conditions.
        make: Computes it.
    """
    path = out and out / quote(checkpoint.name, safe=" ") / ".done" / f"{group}-{quote(name, safe=' ')}.json"
    if path and path.is_file():
        try:
            kept = read_json(path)
            before: T | None = restored(kind, kept["value"]) if (same := kept["key"] == asdict(key)) else None
        except (ValueError, KeyError) as error:
            raise SettingsError(f"{path} is damaged ({error}); delete it to compute it again") from None
        if same:
            print(f"{checkpoint.name}: {name}: done before", file=sys.stderr)
            return typing.cast("T", before)
        print(f"{checkpoint.name}: {name}: stored under other conditions; computing it again", file=sys.stderr)
    print(f"{checkpoint.name}: {name}", file=sys.stderr)
    value = make()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": key, "value": value})
    return value


def _task_names(words: str, include: Path | None) -> list[str]:
    if find_spec("lm_eval") is None:
        raise SettingsError(f"`tasks` needs lm-eval: {to_install('evaluate')}")
    return task_names((word.strip() for word in words.split(",") if word.strip()), include)


def _common_context(checkpoints: Sequence[Checkpoint], opening: Opening) -> int:
    """The largest context length common to all models, at most 2,048, so that they predict the same tokens from the
    same context."""
    trusted, ignored = opening.trust_remote_code, opening.ignore_keys
    own = [own_context(checkpoint.directory, trusted, ignored) for checkpoint in checkpoints]
    return min([LONGEST_DEFAULT_CONTEXT, *(size for size in own if size is not None)])


def _with_whole(domains: Mapping[str, DomainScore]) -> dict[str, DomainScore]:
    return {**domains, **({WHOLE: DomainScore.joined(list(domains.values()))} if len(domains) > 1 else {})}


def _perplexity(checkpoint: Checkpoint) -> dict[str, TextScore]:
    """The score of each text and, for models that read in Jacobi rounds, the gap to token-by-token decoding."""
    found = {name: score.summary() for name, score in _with_whole(checkpoint.domains).items()}
    gaps = {name: gap_of([sample]) for name, sample in checkpoint.samples.items()}
    if WHOLE in found and checkpoint.samples:
        sizes = [sum(checkpoint.domains[name].tokens) for name in checkpoint.samples]
        gaps[WHOLE] = gap_of(list(checkpoint.samples.values()), sizes)
    for name, gap in gaps.items():
        found[name].decoding = gap
    return found


def _by_trips(report: ScoresReport) -> Table:
    """The table of recurrent models: for each model and text the loss, the loop iterations, and the gap to
    token-by-token decoding."""
    lines, solved = [], False
    for name, text, score in report.texts():
        if score.trips_per_token is None:
            continue
        most = report.checkpoints[name].max_trips
        cells = [str(most or ""), f"{score.trips_per_token:.3f}", f"{score.loss:.4f}"]
        solved |= score.decoding is not None
        lines.append([f"{name.partition('@')[0]}, {text}", *cells, *_gap_cells(score.decoding)])
    columns = ["model and text", "max iterations", "iterations per token", "loss"]
    columns += ["Jacobi rounds", "loss − decoding's", "on tokens"] if solved else []
    return terminal_table("", columns, [line[: len(columns)] for line in lines])


def _gap_cells(gap: DecodingGap | None) -> list[str]:
    if gap is None:
        return ["", "", ""]
    return [f"{gap.rounds:g}", gap.with_interval, f"{gap.tokens:,}"]


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return (path.name, status.st_size, status.st_mtime_ns)


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()

"""lm-eval on a loaded model, with lm-eval's prompts, metrics, tables and JSON unchanged.

`tasks.py` finds the tasks, also those of `--include`. With `--task-data` it reads their documents, and decides which
splits are scored and where few-shot examples come from. `paired.py` decides which metrics are means over items
(`aggregated`); others, such as BLEU, appear only in lm-eval's tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom.data.sources import CLUSTER
from fathom.errors import DataError
from fathom.evaluation.paired import Items, Scored, aggregated, same
from fathom.evaluation.tasks import file_task, load_task, task_manager
from fathom.report.provenance import commit
from fathom.report.tables import terminal_table

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from rich.table import Table
    from rich.text import Text
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CPU_BATCH = 16
LARGEST_BATCH = 256
BOOTSTRAP_ITERATIONS = 100_000  # lm-eval's own default


@dataclass(frozen=True)
class TaskSettings:
    """Settings that a task's results depend on, besides the model."""

    num_fewshot: int | None = None
    limit: int | None = None
    max_length: int | None = None
    chat_template: bool = False
    bootstrap_iters: int = BOOTSTRAP_ITERATIONS


@dataclass
class TaskResult:
    """lm-eval's results for one task, group or tag, and each item's contribution to the scores."""

    results: dict[str, Any]
    """lm-eval's JSON, without its samples."""
    items: dict[str, Items]
    """Items by `TASK/METRIC`, for metrics that are means or perplexities over items."""
    notes: list[str] = field(default_factory=list)


def open_lm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int | None = None,
    max_length: int | None = None,
) -> HFLM:
    """lm-eval's wrapper around a model that is already loaded.

    Without a batch size lm-eval halves one until it fits; on a CPU, where memory runs out too late to notice, it is 16.
    lm-eval itself truncates prompts longer than `max_length`, from the left.
    """
    _quiet()
    from lm_eval.models.huggingface import HFLM

    size = batch_size or (CPU_BATCH if model.device.type == "cpu" else "auto")
    return HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=size,
        max_batch_size=LARGEST_BATCH,
        max_length=max_length,
    )


def run_task(
    lm: HFLM, name: str, settings: TaskSettings, task_data: Path | None = None, include: Path | None = None
) -> TaskResult:
    """Score one task, group or tag of lm-eval.

    Args:
        lm: From `open_lm`.
        name: Its name in lm-eval.
        settings: Settings of the task.
        task_data: A folder with the documents; without one lm-eval fetches them.
        include: A folder with further tasks, as lm-eval's own YAML.
    """
    from lm_eval import evaluator
    from lm_eval.utils import handle_non_serializable

    evaluator.get_git_commit_hash = commit  # lm-eval's own version makes git complain outside a checkout
    # lm-eval prints to standard output, which is for results: send that to the log.
    with redirect_stdout(sys.stderr):
        loaded, notes = load_task(name, task_data, include)
        if task_data is not None and file_task(name) is None:
            _require_examples(loaded["tasks"], settings.num_fewshot, task_data)
        top = loaded["groups"].get(name)
        found = evaluator.simple_evaluate(
            model=lm,
            tasks=[top] if top is not None else list(loaded["tasks"].values()),
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            bootstrap_iters=settings.bootstrap_iters,
            task_manager=task_manager(include, named=file_task(name) is None),
            apply_chat_template=settings.chat_template,
        )
    samples = found.pop("samples")
    items = {}
    for task, documents in samples.items():
        for metric, aggregation in loaded["tasks"][task].aggregation().items():
            made = _items(documents, metric, getattr(aggregation, "__name__", ""), found["results"][task])
            items.update({f"{task}/{key}": value for key, value in made.items()})
    # As lm-eval's own command writes them to a file.
    results = json.loads(json.dumps(found, default=handle_non_serializable, ensure_ascii=False))
    return TaskResult(results, items, notes)


def items_of(results: Iterable[TaskResult]) -> dict[tuple[str, str], Scored]:
    """Items by task and metric."""
    made: dict[tuple[str, str], Scored] = {}
    for result in results:
        named = ((key.rpartition("/"), items) for key, items in result.items.items())
        own = {(task, metric): items for (task, _, metric), items in named}
        groups = result.results.get("groups", {})
        for group, numbers in groups.items():
            leaves = _leaves(result.results["group_subtasks"], group)
            for metric in (key for key in numbers if isinstance(numbers[key], float) and "_stderr" not in key):
                label = metric.removesuffix(",none")
                parts = [own[leaf, label] for leaf in leaves if (leaf, label) in own]
                if len(parts) == len(leaves) and (whole := _whole(parts, numbers[metric])) is not None:
                    made[group, label] = whole
        # The tasks of a group are in lm-eval's own table and are left out here.
        hidden = {leaf for group in groups for leaf in _leaves(result.results["group_subtasks"], group)}
        made.update({key: [items] for key, items in own.items() if key[0] not in hidden})
    return made


def tables(results: Iterable[Mapping[str, Any]]) -> str:
    """lm-eval's own tables, made from the JSON of several tasks as if they had been run together."""
    from lm_eval.utils import make_table

    keys = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better")
    whole: dict[str, dict[str, object]] = {key: {} for key in keys}
    for result in results:
        for key in keys:
            whole[key].update(result.get(key, {}))
    text = make_table(whole)
    return f"{text}\n{make_table(whole, 'groups')}" if whole["groups"] else text


def fitted(markdown: str, width: int) -> list[Text | Table]:
    """Tables in Markdown. If a line is wider than the terminal, their cells are folded."""
    from rich.text import Text

    if max(map(len, markdown.splitlines())) <= width:
        return [Text(markdown)]
    made: list[Text | Table] = []
    for text in markdown.strip().split("\n\n"):
        columns, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
        made.append(terminal_table("", columns, rows))
    return made


def _items(
    documents: list[dict[str, Any]], metric: str, aggregation: str, numbers: Mapping[str, object]
) -> dict[str, Items]:
    """Each document's contribution to a metric, if Fathom's aggregation reproduces lm-eval's number."""
    made: dict[str, Items] = {}
    for chosen in dict.fromkeys(document["filter"] for document in documents):
        mine = [d for d in documents if d["filter"] == chosen and metric in d]
        clusters = [d.get("doc", {}).get(CLUSTER) for d in mine]
        reported = numbers.get(f"{metric},{chosen}")
        items = aggregated([d[metric] for d in mine], aggregation) if mine else None
        if items is not None and isinstance(reported, float) and same(items.score, reported):
            named = any(one is not None for one in clusters)
            made[metric if chosen == "none" else f"{metric},{chosen}"] = replace(
                items, clusters=clusters if named else None
            )
    return made


def _whole(parts: list[Items], reported: float) -> Scored | None:
    """A group's items, pooled or task by task, whichever reproduces lm-eval's number."""
    pooled = Items([value for part in parts for value in part.values], clusters=_pooled_clusters(parts))
    if any(part.weights is not None or part.log for part in parts):
        return None
    if same(pooled.score, reported):
        return [pooled]
    return parts if same(sum(part.score for part in parts) / len(parts), reported) else None


def _pooled_clusters(parts: list[Items]) -> list[object] | None:
    """The clusters of the items of several tasks; items of different tasks are never in one cluster."""
    if all(part.clusters is None for part in parts):
        return None
    return [
        None if one is None or one == "" else f"{number}/{one}"
        for number, part in enumerate(parts)
        for one in part.clusters or [None] * len(part.values)
    ]


def _leaves(children: Mapping[str, Sequence[str]], group: str) -> list[str]:
    return [leaf for child in children[group] for leaf in (_leaves(children, child) if child in children else [child])]


def _require_examples(tasks: Mapping[str, Any], num_fewshot: int | None, folder: Path) -> None:
    for name, task in tasks.items():
        shots = task.config.num_fewshot if num_fewshot is None or task.config.num_fewshot == 0 else num_fewshot
        fixed = task.config.fewshot_split or task.config.training_split or task.fewshot_cfg.samples
        if shots and not fixed:
            raise DataError(f"{name}: {shots} few-shot examples need a train split, which {folder} lacks")


def _quiet() -> None:
    """Silence lm-eval's warnings about options that do not apply to an open model."""
    import logging

    logging.getLogger("lm_eval.models.huggingface").addFilter(lambda record: "pretrained" not in record.getMessage())

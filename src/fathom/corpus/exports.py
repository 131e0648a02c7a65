"""Exports kept documents to the formats of other training programs and of lm-eval, without importing these programs.

TRL and LLaMA-Factory cannot express loss masks, so their exports leave out conversations with an untrained answer.
Preference pairs are exported to TRL alone. `card.py` says how many are left out, and `publish.py` puts the files into
`exports/NAME/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from fathom.corpus.benchmarks import LETTERS, Item
from fathom.corpus.contamination import read_index_items
from fathom.corpus.documents import ConversationMessage, write_lines
from fathom.corpus.kept import KeptPart, kept_documents, kept_parts, part_task, parts_of
from fathom.corpus.stage import Stage, Task
from fathom.corpus.templates import is_trained
from fathom.data.sources import CLUSTER
from fathom.report.files import write_json

SCORES = ("acc", "acc_norm")
PIECE = re.compile(r"(.*)#\d+\Z", re.DOTALL)
"""The path of a piece of a document that was cut."""


class Export(Stage):
    """One task for each format that the recipe names."""

    name = "export"
    version = 3

    def tasks(self) -> list[Task]:
        """This stage's tasks; call it only after the earlier stages have finished."""
        parts = kept_parts(self.workspace)
        items = tuple(self.workspace.outputs("benchmarks", "items.jsonl"))
        names = [task.arguments["name"] for task in self.workspace.manifest("benchmarks").tasks]
        return [
            Task(items, {"form": form, "benchmarks": names}) if form == "lm_eval" else part_task(parts, form=form)
            for form in self.recipe.exports
        ]

    def run(self, task: Task, folder: Path) -> dict[str, int]:
        """Run one task and return its counts."""
        form = task.arguments["form"]
        if form == "lm_eval":
            return self._tasks_of_lm_eval(task, folder)
        kinds: dict[str, str] = {}
        rows: dict[str, list[KeptPart]] = {}
        for part in parts_of(task):
            kinds[part.collection] = part.kind
            rows.setdefault(part.collection, []).append(part)
        counts = {"rows": 0, **{f"left out of {collection}": 0 for collection in rows}}
        for collection, mine in rows.items():
            left_out: list[str] = []
            counts["rows"] += write_lines(folder / f"{collection}.jsonl", self._rows(form, mine, left_out))
            counts[f"left out of {collection}"] = len(left_out)
        if form == "llamafactory":
            write_json(folder / "dataset_info.json", {name: dataset_info(name, kind) for name, kind in kinds.items()})
        elif form == "axolotl":
            datasets = [axolotl_dataset(name, kind) for name, kind in kinds.items()]
            (folder / "datasets.yaml").write_text(yaml.safe_dump({"datasets": datasets}, sort_keys=False), "utf-8")
        return counts

    def _rows(self, form: str, parts: list[KeptPart], left_out: list[str]) -> Iterator[dict[str, object]]:
        """Kept documents and conversations as rows of a format; the paths of those that the format cannot represent are
        appended to `left_out`."""
        for part in parts:
            for document in kept_documents(self.workspace, part):
                if document.messages is None:
                    whole = PIECE.match(document.path)
                    yield {"text": document.text, **({CLUSTER: whole[1]} if whole else {})}
                elif document.rejected is not None:
                    if (pair := preference_row(form, document.messages, document.rejected)) is not None:
                        yield pair
                    else:
                        left_out.append(document.path)
                elif (row := conversation_row(form, document.messages)) is not None:
                    yield row
                else:
                    left_out.append(document.path)

    def _tasks_of_lm_eval(self, task: Task, folder: Path) -> dict[str, int]:
        counts = {"rows": 0}
        for name, one in zip(task.arguments["benchmarks"], task.inputs, strict=True):
            items = [item for item in read_index_items(self.workspace.path(one)) if item.answer is not None]
            if not items:
                continue
            counts["rows"] += write_lines(folder / f"{name}.jsonl", map(task_row, items))
            for rule in ("letter", "text"):
                text = yaml.safe_dump(task_yaml(name, rule), sort_keys=False)
                (folder / f"{name}_{rule}.yaml").write_text(text, "utf-8")
        return counts


def conversation_row(form: str, messages: Sequence[ConversationMessage]) -> dict[str, object] | None:
    """A conversation as a row; None if this format would train on an answer that is excluded from the loss."""
    plain = [{"role": one["role"], "content": one["content"]} for one in messages]
    if form == "axolotl":
        return {"messages": [{**row, "train": is_trained(one)} for row, one in zip(plain, messages, strict=True)]}
    if any(one["role"] == "assistant" and not is_trained(one) for one in messages):
        return None
    return {"messages": plain}


def preference_row(
    form: str, messages: Sequence[ConversationMessage], rejected: Sequence[ConversationMessage]
) -> dict[str, object] | None:
    """A row with a prompt, a chosen and a rejected answer, as TRL's preference trainers read it; None for other
    formats."""
    if form != "trl":
        return None
    plain, other = ([{"role": one["role"], "content": one["content"]} for one in some] for some in (messages, rejected))
    at = max(number for number, one in enumerate(plain) if one["role"] == "user") + 1
    return {"prompt": plain[:at], "chosen": plain[at:], "rejected": other}


def dataset_info(name: str, kind: str) -> dict[str, object]:
    """An entry of LLaMA-Factory's `dataset_info.json`."""
    if kind == "documents":
        return {"file_name": f"{name}.jsonl", "columns": {"prompt": "text"}}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    tags |= {"observation_tag": "tool", "system_tag": "system"}
    return {
        "file_name": f"{name}.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }


def axolotl_dataset(name: str, kind: str) -> dict[str, object]:
    """An entry of `datasets` in axolotl's configuration."""
    place = {"path": f"{name}.jsonl", "ds_type": "json"}
    if kind == "documents":
        return {**place, "type": "completion", "field": "text"}
    trained = {"roles_to_train": ["assistant"], "message_field_training": "train"}
    return {**place, "type": "chat_template", "field_messages": "messages", **trained}


def task_row(item: Item) -> dict[str, object]:
    """A benchmark item as a row that lm-eval's tasks read."""
    count = len(item.choices)
    letters = list(LETTERS[:count]) if count <= len(LETTERS) else [str(number) for number in range(1, count + 1)]
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, item.choices, strict=True))
    head = f"{item.context}\n\n{item.stem}" if item.context else item.stem
    return {
        "id": item.id,
        "letter_prompt": f"Question: {head}\n{listed}\nAnswer:",
        "text_prompt": f"Question: {head}\nAnswer:",
        "letters": letters,
        "choices": list(item.choices),
        "answer": item.answer,
    }


def task_yaml(name: str, rule: str) -> dict[str, object]:
    """An lm-eval multiple-choice task: scored by option letters with the options listed in the prompt, or by the
    options' texts without a list."""
    return {
        "task": f"{name}_{rule}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": f"{{{{{rule}_prompt}}}}",
        "doc_to_choice": "{{letters}}" if rule == "letter" else "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in (SCORES if rule == "text" else SCORES[:1])
        ],
        "metadata": {"version": 1.0},
    }

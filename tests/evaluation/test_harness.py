"""lm-eval on our models gives lm-eval's numbers, also when the documents come from a folder and no network is there."""

from __future__ import annotations

import json
import lzma
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fathom.checkpoints.export import export
from fathom.checkpoints.open import open_checkpoint
from fathom.cli.main import main
from fathom.data.tokenizer import train_bpe
from fathom.kvcache import build_cache, compressed
from fathom.models import FathomConfig, FathomForCausalLM

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[evaluate]'")
pytest.importorskip("accelerate", reason="lm-eval's Hugging Face models need accelerate")

from lm_eval.api.instance import Instance

from fathom.errors import DataError
from fathom.evaluation.harness import TaskSettings, items_of, open_lm, run_task, tables
from fathom.evaluation.paired import rows
from fathom.evaluation.tasks import task_manager, task_names
from fathom.evaluation.tuned import Quizzed, task_rows

SETTINGS = TaskSettings(bootstrap_iters=10)
ARTICLES = (
    " \n = The Lead = \n \n The lead is a weight , some @-@ times armed . \n \n = = Use = = \n \n It sinks . \n"
    " \n = Depth = \n \n Depth is measured in fathoms of 6 ft ( 1 @.@ 8 m ) . \n"
)


def question(i: int) -> dict[str, Any]:
    texts = ["with a lead", "by its colour", "by asking", "at noon"]
    return {
        "id": str(i),
        "question": f"How is depth {i} measured?",
        "choices": {"text": texts[: 4 - i % 2], "label": list("ABCD")[: 4 - i % 2]},
        "answerKey": "ABC"[i % 3],
    }


def pair(i: int) -> dict[str, Any]:
    return {"sentence_good": f"The {i} sailors sink.", "sentence_bad": f"The {i} sailors sinks.", "UID": "x"}


FILES: dict[str, list[dict[str, Any]]] = {
    "lambada_openai/test": [
        {"text": f"The lead went down {i} fathoms into the {w}"} for i, w in enumerate(("sea", "dark"))
    ],
    "hellaswag/validation": [
        {"query": f"Sounding: {i} sailors", "choices": ["swing", "the lead is", "sleep on", "sing"], "gold": i % 4}
        for i in range(6)
    ],
    "piqa/validation": [
        {"goal": f"Sound {i}", "sol1": "use a rope", "sol2": "use a hat", "label": i % 2} for i in range(9)
    ],
    "piqa/train_500": [{"goal": f"Row {i}", "sol1": "with an oar", "sol2": "with a cat", "label": 0} for i in range(9)],
    "arc_easy/validation": [question(i) for i in range(6)],
    "arc_challenge/validation": [question(i) for i in range(3, 7)],
    "blimp/passive_2": [pair(i) for i in range(6)],
    "blimp/wh_island": [pair(i) for i in range(9)],
    "mmlu/validation": [
        {"question": f"What is {i}?", "subject": s, "choices": ["a", "b", "c", "d"], "answer": i % 4}
        for s in ("anatomy", "astronomy")
        for i in range(3)
    ],
    "boolq/validation": [{"passage": "It is deep.", "question": f"is it {i} deep", "answer": i > 1} for i in range(4)],
}


FOLDERS = (
    *("arc", "blimp", "hellaswag", "lambada", "mmlu", "openbookqa"),
    *("longbench", "piqa", "sciq", "super_glue", "wikitext"),
)


@pytest.fixture(scope="module", autouse=True)
def few_tasks() -> Iterator[None]:
    """Those folders of lm-eval's tasks that are named here: to list all takes 13 seconds."""
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent

    class Few(lm_eval.tasks.TaskManager):
        def __init__(self, include_path: str | None = None, include_defaults: bool = True) -> None:
            folders = [home / name for name in FOLDERS if include_defaults]
            super().__init__(include_path=[*folders, *([include_path] if include_path else [])], include_defaults=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, "TaskManager", Few)
        task_manager.cache_clear()
        yield
    task_manager.cache_clear()


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of docs/how-to/evaluate.md."""
    folder = tmp_path_factory.mktemp("task-data")
    for name, lines in FILES.items():
        path = folder / f"{name}.jsonl.xz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    (folder / "wikitext2").mkdir()
    (folder / "wikitext2/wiki.test.raw.xz").write_bytes(lzma.compress(ARTICLES.encode()))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A vanilla model as we export it, and transformers' Qwen3 with the same weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_bpe([json.dumps(line) for lines in FILES.values() for line in lines], 400)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2}
    torch.manual_seed(0)
    ours = FathomForCausalLM(FathomConfig(vocab_size=len(tokenizer), **shape))
    export(ours, folder / "fathom", tokenizer)
    theirs = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **shape))
    theirs.load_state_dict(ours.state_dict())
    theirs.save_pretrained(folder / "qwen3")
    tokenizer.save_pretrained(folder / "qwen3")
    return folder / "fathom", folder / "qwen3"


@pytest.fixture
def lm(checkpoints: tuple[Path, Path]) -> Any:
    return open_lm(*open_checkpoint(checkpoints[0], "cpu"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_numbers_are_lm_evals_own(checkpoints: tuple[Path, Path], task_data: Path, tmp_path: Path, lm: Any) -> None:
    """Our export and our folder against lm-eval alone: its own model class, Qwen3, its own loading of the data."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    home = Path(lm_eval.__file__).parent / "tasks"
    yamls = {"piqa": "piqa/piqa", "lambada_openai": "lambada/lambada_openai", "arc_easy": "arc/arc_easy"}
    yamls |= {"wikitext": "wikitext/wikitext"}
    pages = ["\n".join(ARTICLES.split("\n")[1:9]), "\n".join(ARTICLES.split("\n")[9:])]
    lines = {"wikitext": [{"page": page} for page in pages]}
    for name, path in yamls.items():
        lines.setdefault(name, FILES.get(f"{name}/validation", FILES.get(f"{name}/test", [])))
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines[name]))
        splits = {"validation": str(data), **({} if name in ("piqa", "arc_easy") else {"test": str(data)})}
        spec = {"include": str(home / f"{path}.yaml"), "task": f"{name}_alone", "tag": None, "training_split": None}
        spec |= {"dataset_path": "json", "dataset_name": None, "test_split": "test" if "test" in splits else None}
        spec |= {"dataset_kwargs": {"data_files": splits, "cache_dir": str(tmp_path / "cache")}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(spec))
    alone = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(checkpoints[1]), "dtype": "float32"},
        device="cpu",
        batch_size=16,
        tasks=[f"{name}_alone" for name in yamls],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=10,
    )
    for name in yamls:
        ours = run_task(lm, name, SETTINGS, task_data).results
        theirs = alone["results"][f"{name}_alone"]
        strip = ("name", "alias")
        assert {k: v for k, v in ours["results"][name].items() if k not in strip} == {
            k: v for k, v in theirs.items() if k not in strip
        }
        assert ours["versions"][name] == alone["versions"][f"{name}_alone"]


TASKS = ["lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "blimp", "wikitext"]


def test_tasks_run_without_a_network(
    checkpoints: tuple[Path, Path], task_data: Path, lm: Any, no_network: None
) -> None:
    """All tasks, bit for bit the same on both models; and a comparison of a model with itself finds nothing."""
    other = open_lm(*open_checkpoint(checkpoints[1], "cpu"))
    ours, theirs = ([run_task(each, name, SETTINGS, task_data) for name in TASKS] for each in (lm, other))
    for a, b in zip(ours, theirs, strict=True):
        assert a.results["results"] == b.results["results"] and a.items == b.items
    found = rows({"ours": items_of(ours), "theirs": items_of(theirs)})
    assert {row.task for row in found} == set(TASKS)
    for row in found:
        gap = row.differences["theirs"]
        assert gap.value == (1 if gap.kind == "ratio" else 0) and gap.low is None, "equal scores show no spread"
    numbers = {name: value for result in ours for name, value in result.results["results"].items()}
    for row in found:
        assert row.scores["ours"] == pytest.approx(numbers[row.task][f"{row.metric},none"], rel=1e-9)
    text = tables(result.results for result in ours)
    assert "|piqa" in text and "|blimp" in text and "Groups" in text
    assert [note for result in ours for note in result.notes] == [
        "arc_easy: scored on validation because there is no test split",
        "arc_challenge: scored on validation because there is no test split",
        "blimp: 2 of its 67 tasks have data here and are averaged",
    ]


def test_prepared_hellaswag_equals_the_original(task_data: Path, tmp_path: Path, lm: Any, no_network: None) -> None:
    lines = [
        {"ctx_a": line["query"].split(": ")[1], "ctx_b": "", "activity_label": "Sounding", "endings": line["choices"]}
        | {"label": str(line["gold"])}
        for line in FILES["hellaswag/validation"]
    ]
    (tmp_path / "hellaswag").mkdir()
    (tmp_path / "hellaswag/validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    theirs = run_task(lm, "hellaswag", SETTINGS, tmp_path).results["results"]
    # Its empty ctx_b leaves a blank at the end of the query, which the next token would see.
    (tmp_path / "hellaswag/validation.jsonl").write_text(
        "".join(json.dumps({**line, "query": line["query"] + " "}) + "\n" for line in FILES["hellaswag/validation"])
    )
    assert run_task(lm, "hellaswag", SETTINGS, tmp_path).results["results"] == theirs


def test_subjects_and_other_fields(task_data: Path, lm: Any, no_network: None) -> None:
    mmlu = run_task(lm, "mmlu_anatomy", TaskSettings(num_fewshot=0, bootstrap_iters=10), task_data)
    assert mmlu.results["n-samples"]["mmlu_anatomy"]["original"] == 3
    boolq = run_task(lm, "boolq", SETTINGS, task_data)
    assert len(boolq.items["boolq/acc"].values) == 4


def test_examples_come_from_train_or_not_at_all(task_data: Path, lm: Any, no_network: None) -> None:
    shots = TaskSettings(num_fewshot=2, limit=3, bootstrap_iters=10)
    assert run_task(lm, "piqa", shots, task_data).results["n-shot"]["piqa"] == 2
    with pytest.raises(DataError, match="hellaswag: 2 few-shot examples need a train split"):
        run_task(lm, "hellaswag", shots, task_data)


def test_what_is_missing_is_named(task_data: Path, lm: Any) -> None:
    with pytest.raises(DataError, match=r"sciq: no data in .* expected sciq/SPLIT.jsonl"):
        run_task(lm, "sciq", SETTINGS, task_data)
    with pytest.raises(DataError, match="helaswag: lm-eval has no such task; near: hellaswag"):
        task_names(["piqa", "helaswag"])
    assert task_names(["blimp_passive_*", "piqa", "piqa"]) == ["blimp_passive_1", "blimp_passive_2", "piqa"]


def test_the_command_goes_on_where_it_was(
    checkpoints: tuple[Path, Path], task_data: Path, tmp_path: Path, capsys
) -> None:
    ours, theirs = map(str, checkpoints)
    words = ["evaluate", ours, theirs, "--tasks", "piqa", "--task-data", str(task_data), "--device", "cpu"]
    words += ["--out", str(tmp_path), "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "fathom/piqa.json").read_text())
    assert report["checkpoints"]["fathom"]["tasks"]["piqa"] == kept
    assert kept["results"] == report["checkpoints"]["qwen3"]["tasks"]["piqa"]["results"]
    assert "acc,none" in kept["results"]["piqa"] and "samples" not in kept
    (tmp_path / "qwen3/.done/tasks-piqa.json").unlink()  # killed between the two
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.err.count("done before") == 1 and "opening" in printed.err
    assert json.loads(printed.out)["rows"] == report["rows"]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_task_that_fails_does_not_cost_the_others(
    checkpoints: tuple[Path, Path], task_data: Path, tmp_path: Path, capsys, no_network: None
) -> None:
    """Documents with other fields than the task's templates read: named in one line, the rest printed and kept."""
    write_lines(task_data / "openbookqa/test.jsonl", [{"stem": "x", "answer": 1}] * 3)
    words = ["evaluate", f"ours={checkpoints[0]}", "--tasks", "openbookqa,piqa,sciq", "--task-data", str(task_data)]
    words += ["--device", "cpu", "--limit", "4", "--out", str(tmp_path)]
    assert main(words) == 1
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("fathom: ")]
    assert len(lines) == 2 and "Traceback" not in printed.err
    assert "fathom: ours: openbookqa failed: UndefinedError: " in lines[0] and "sciq failed: sciq: no data" in lines[1]
    assert "|piqa" in printed.out and "openbookqa" not in printed.out
    report = json.loads((tmp_path / "report.json").read_text())["checkpoints"]["ours"]
    assert set(report["tasks"]) == {"piqa"} and set(report["failed"]) == {"openbookqa", "sciq"}
    (task_data / "openbookqa/test.jsonl").unlink()


def test_own_tasks_need_no_yaml(task_data: Path, tmp_path: Path, lm: Any, no_network: None) -> None:
    """The generic tasks on the documents of PIQA-like and LAMBADA-like tasks against sums of the model's own logits."""
    questions = [{"question": f"Sound {i}", "choices": ["use a rope", "use a hat"], "answer": i % 2} for i in range(9)]
    gaps = [{"text": f"The lead went down {i} fathoms into the", "answer": w} for i, w in enumerate(("sea", "dark"))]
    choice = f"choice:{write_lines(tmp_path / 'q.jsonl', questions)}"
    cloze = f"cloze:{write_lines(tmp_path / 'c.jsonl', gaps)}"
    assert task_names([choice, cloze]) == [choice, cloze]

    def loss(before: str, after: str) -> float:
        start = lm.tokenizer(before)["input_ids"]
        ids = torch.tensor([lm.tokenizer(before + after)["input_ids"]])
        with torch.no_grad():
            picked = lm.model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        return float(picked[len(start) - 1 :].sum())

    right = [
        max((0, 1), key=lambda c: loss(row["question"], " " + row["choices"][c])) == row["answer"] for row in questions
    ]
    found = run_task(lm, choice, SETTINGS)
    assert found.items[f"{choice}/acc"].values == [float(value) for value in right]
    assert found.results["results"][choice]["acc,none"] == pytest.approx(sum(right) / 9)
    made = run_task(lm, cloze, SETTINGS).items[f"{cloze}/perplexity"].values
    assert made == pytest.approx([-loss(row["text"], " " + row["answer"]) for row in gaps], abs=1e-4)


ITEMS = [Quizzed(str(n), f"The colour of item {n} is", ("red", "white", "orange", "violets"), n % 3) for n in range(7)]
"""Every choice has another length; A is right three times of seven."""


def told(known: list[tuple[str, str]]) -> Any:
    """A model that goes on as it was told, byte by byte, and finds all bytes alike where it was told nothing."""
    tokenizer = train_bpe(["a"], 258)
    config = FathomConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    pairs = [[tokenizer(text)["input_ids"] for text in pair] for pair in known]

    def say(_: object, args: tuple[torch.Tensor, ...], found: Any) -> Any:
        found.logits = torch.zeros_like(found.logits)
        for row, ids in enumerate(args[0].tolist()):
            for before, after in pairs:
                if ids[: len(before)] == before:
                    for place, token in enumerate(after, len(before) - 1):
                        found.logits[row, place : place + 1, token] = 30
        return found

    model = FathomForCausalLM(config).eval()
    model.register_forward_hook(say)
    return open_lm(model, tokenizer)


def answered(lm: Any, items: list[Quizzed], way: str, place: Path) -> tuple[list[float], list[float]]:
    """What each question is worth, by the likelihood of its choices and by that for each character."""
    task = f"choice:{write_lines(place / f'{way}.jsonl', task_rows(items, way))}"
    found = run_task(lm, task, SETTINGS).items
    return found[f"{task}/acc"].values, found[f"{task}/acc_norm"].values


@pytest.mark.slow
@pytest.mark.parametrize("way", ["text", "letter", "shuffled"])
def test_a_rigged_model_is_always_right_or_never(way: str, tmp_path: Path, no_network: None) -> None:
    rows = task_rows(ITEMS, way)
    for off, value in ((0, 1.0), (1, 0.0)):
        known = [(row["question"], f" {row['choices'][(row['answer'] + off) % 4]}") for row in rows]
        assert answered(told(known), ITEMS, way, tmp_path)[0] == [value] * len(ITEMS)


def test_a_model_that_knows_nothing_takes_the_first_letter_and_a_length(tmp_path: Path, no_network: None) -> None:
    """The first of letters that are all as likely; the shortest text, and by character the longest, since the blank
    before a text is scored and not counted.
    """
    lm = told([])
    firsts = [float(item.answer == 0) for item in ITEMS]
    assert answered(lm, ITEMS, "letter", tmp_path)[0] == firsts and sum(firsts) == 3
    turned = [replace(item, choices=item.choices[::-1], answer=number % 4) for number, item in enumerate(ITEMS)]
    shortest, longest = ([item.choices[item.answer] == text for item in turned] for text in ("red", "violets"))
    assert answered(lm, turned, "text", tmp_path) == (shortest, longest)
    assert 0 < sum(shortest) < 7 and 0 < sum(longest) < 7


@pytest.mark.slow
def test_the_order_of_choices_changes_no_answer_by_text(lm: Any, tmp_path: Path, no_network: None) -> None:
    asked = [replace(item, question=f"Sound {item.id}") for item in ITEMS]
    plain = answered(lm, asked, "text", tmp_path)
    for turn in (1, 2, 3):
        turned = [
            replace(item, choices=item.choices[turn:] + item.choices[:turn], answer=(item.answer - turn) % 4)
            for item in asked
        ]
        assert [one.choices[one.answer] for one in turned] == [one.choices[one.answer] for one in asked]
        assert answered(lm, turned, "text", tmp_path) == plain
    assert all(0 < sum(values) < len(values) for values in plain), "or the same answer to all would do"


@pytest.mark.parametrize(
    "kind,row,says",
    [
        ("choice", {"question": "x", "choices": ["a", "b"], "answer": 2}, "`answer`, the index of the right choice"),
        ("cloze", {"text": "x"}, "needs `answer`"),
    ],
)
def test_own_documents_are_checked(kind: str, row: dict[str, Any], says: str, tmp_path: Path, lm: Any) -> None:
    path = write_lines(tmp_path / "x.jsonl", [row])
    with pytest.raises(DataError, match=says):
        run_task(lm, f"{kind}:{path}", SETTINGS)


def test_own_lm_eval_tasks_are_included(checkpoints: tuple[Path, Path], tmp_path: Path, capsys, no_network) -> None:
    lines = [{"q": f"Sound {i}", "a": ["use a rope", "use a hat"], "k": i % 2} for i in range(4)]
    data = write_lines(tmp_path / "data/mine.jsonl", lines)
    spec = {"task": "mine", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    spec |= {"dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}}
    spec |= {"doc_to_text": "{{q}}", "doc_to_choice": "a", "doc_to_target": "k", "metric_list": [{"metric": "acc"}]}
    (tmp_path / "data/mine.yaml").write_text(json.dumps(spec))
    words = ["evaluate", str(checkpoints[0]), "--tasks", "mine", "--device", "cpu", "--json"]
    assert main([*words, "--include", str(tmp_path / "no")]) == 2
    assert "no: no such folder" in capsys.readouterr().err
    assert main([*words, "--include", str(tmp_path / "data")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoints"]["fathom"]["tasks"]["mine"]["n-samples"]["mine"]["original"] == 4


CACHES = [("drop", {}), ("snapkv", {"observed": 2}), ("tova", {})]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), CACHES)
def test_tasks_under_a_cache(
    checkpoints: tuple[Path, Path], tmp_path: Path, lm: Any, method: str, options: dict[str, int]
) -> None:
    """lm-eval's likelihoods of PIQA's solutions are those of one solution at a time through the cache."""
    lines = [
        {"goal": f"Sound {i} fathoms", "sol1": f"use a rope of {7 * i} ft", "sol2": f"use a hat of {i}", "label": i % 2}
        for i in range(36)
    ]
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"window": 16, "ratio": 0.5, **options}
    requests = [Instance("loglikelihood", {}, asked(line, 0), 0) for line in lines]
    full = lm.loglikelihood(requests)
    with compressed(lm.model, method, **given):
        found = run_task(lm, "piqa", SETTINGS, tmp_path)
        told = lm.loglikelihood(requests)
    likelihoods = [
        [likelihood(lm, build_cache(lm.model, method, **given), *asked(line, n)) for n in (0, 1)] for line in lines
    ]
    assert max(abs(a[0] - b[0]) for (a, *_), b in zip(likelihoods, told, strict=True)) < 1e-4
    right = [float((one[0][0] < one[1][0]) == line["label"]) for one, line in zip(likelihoods, lines, strict=True)]
    assert found.items["piqa/acc"].values == right
    assert all(abs(a[0] - b[0]) > 1e-3 for a, b in zip(full, told, strict=True))
    assert min(count for one in likelihoods for _, count in one) > 16


def test_the_command_reads_tasks_through_caches(
    checkpoints: tuple[Path, Path], task_data: Path, tmp_path: Path, lm: Any, capsys, no_network: None
) -> None:
    words = ["evaluate", str(checkpoints[0]), "--task-data", str(task_data), "--device", "cpu", "--json"]
    words += ["--tasks", "piqa,arc_easy", "--out", str(tmp_path)]
    cache = ["--kvcache", "full,drop", "--kvcache-window", "16", "--kvcache-kept", "3"]
    assert main([*words, *cache]) == 0
    report = json.loads(capsys.readouterr().out)
    full, drop = report["checkpoints"]["fathom@full"], report["checkpoints"]["fathom@drop"]
    assert full["kvcache"] is None and drop["kvcache"]["window"] == 16
    with compressed(lm.model, "drop", window=16, kept=3):
        expected = [run_task(lm, name, SETTINGS, task_data).results["results"][name] for name in ("piqa", "arc_easy")]
    plain = [run_task(lm, name, SETTINGS, task_data).results["results"][name] for name in ("piqa", "arc_easy")]
    for told, numbers in ((drop, expected), (full, plain)):
        assert [told["tasks"][name]["results"][name]["acc,none"] for name in told["tasks"]] == [
            one["acc,none"] for one in numbers
        ]
    assert {row["task"] for row in report["rows"]} == {"piqa", "arc_easy"}
    assert all(set(row["differences"]) == {"fathom@drop"} for row in report["rows"])
    assert main([*words, *cache[:3], "16"]) == 0  # another schedule is another result
    assert capsys.readouterr().err.count("stored under other conditions") == 2
    for given, says in (
        (["--kvcache", "drop"], "--kvcache drop needs --kvcache-window"),
        (["--kvcache", "full_fp8"], "--kvcache full_fp8: allowed with --tasks: full, "),
        (["--kvcache", "drop,drop", "--kvcache-window", "16"], "expected different caches"),
        (["--kvcache-window", "16"], "--kvcache-window 16: give --kvcache with it"),
        (["--kvcache", "full", "--kvcache-window", "16"], "--kvcache full keeps every entry and has no such option"),
        (
            ["--kvcache", "sinks,full", *cache[2:4], "--kvcache-ratio", "0.5"],
            "--kvcache-ratio 0.5: method sinks removes one",
        ),
        (
            ["--kvcache", "drop", "--kvcache-window", "16", "--perplexity", "x"],
            "caches on texts: `fathom evaluate caches`",
        ),
    ):
        assert main([*words, *given]) == 2
        assert says in capsys.readouterr().err, says


LONGBENCH = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), "a lead line"),
    **dict.fromkeys(("multifieldqa_zh", "dureader", "vcsum"), "用铅锤测量水深"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "The crew measured the depth with a lead line ."),
    **{"trec": "Number", "triviaqa": "a lead line", "lsht": "科技", "passage_count": "7"},
    **{"passage_retrieval_en": "Paragraph 3", "passage_retrieval_zh": "段落3", "lcc": "x = 1", "repobench-p": "x = 1"},
}
"""LongBench's 21 subsets, each with an answer of its kind."""


def longbench(folder: Path) -> None:
    """Made rows in the layout of LongBench's own files, one a subset."""
    for name, answer in LONGBENCH.items():
        for subset in (name, f"{name}_e"):
            classes = {"trec": ["Number", "Person"], "lsht": ["科技", "体育"]}.get(name)
            row = {"input": f"What of {name}?", "context": f"The depth is 6 fathoms. {name}\n" * 3, "answers": [answer]}
            row |= {"length": 18, "dataset": subset, "language": "en", "all_classes": classes, "_id": f"{name}-1"}
            write_lines(folder / f"LongBench/{subset}.jsonl", [row, {**row, "_id": f"{name}-2"}])


@pytest.mark.slow
def test_longbench_in_its_own_layout(tmp_path: Path, no_network: None) -> None:
    """Who answers each row as it says gets every point, who answers otherwise none; prompts hold what rows hold."""
    for package in ("jieba", "fuzzywuzzy", "rouge"):
        pytest.importorskip(package, reason="lm-eval's LongBench needs jieba, fuzzywuzzy and rouge")
    from lm_eval.api.model import LM

    longbench(tmp_path)

    class Rigged(LM):
        def __init__(self, knows: bool) -> None:
            super().__init__()
            self.knows = knows
            self.prompts: list[str] = []

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            self.prompts += [one.args[0] for one in requests]
            return [one.doc["answers"][0] if self.knows else "~" for one in requests]

        loglikelihood = loglikelihood_rolling = None

    for knows, score in ((True, 1.0), (False, 0.0)):
        lm = Rigged(knows)
        found = run_task(lm, "longbench", SETTINGS, tmp_path)
        scores = {name: one["score,none"] for name, one in found.results["results"].items() if name in TOLD}
        assert set(scores) == set(TOLD) and found.notes == []
        assert scores == pytest.approx(dict.fromkeys(TOLD, score), abs=1e-3)
    for name in LONGBENCH:
        texts = [prompt for prompt in lm.prompts if f"fathoms. {name}\n" in prompt]
        assert len(texts) == 2
        asks = name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        assert all((f"What of {name}?" in text) == asks for text in texts), name
    even = run_task(Rigged(True), "longbench_e", SETTINGS, tmp_path).results["results"]
    assert even["longbench_e"]["score,none"] == pytest.approx(1, abs=1e-3) and "longbench_qasper_e" in even


TOLD = [f"longbench_{name}" for name in LONGBENCH]


@pytest.mark.slow
def test_longbench_through_a_cache(checkpoints: tuple[Path, Path], tmp_path: Path, lm: Any, no_network: None) -> None:
    """What is generated is what the model generates through that cache; without it, something else."""
    pytest.importorskip("jieba")
    longbench(tmp_path)
    said: list[list[str]] = []
    for policy in ({"window": 16, "ratio": 0.5}, None):
        with compressed(lm.model, "drop", **policy) if policy else nullcontext():
            (prompt, text), *_ = overheard(lm, "longbench_hotpotqa", tmp_path)
        ids = torch.tensor([lm.tok_encode(prompt)[-(lm.max_length - 32) :]])
        cache = {"past_key_values": build_cache(lm.model, "drop", **policy)} if policy else {}
        more = lm.model.generate(ids, max_new_tokens=32, do_sample=False, **cache)[0, ids.shape[1] :]
        assert text and lm.tokenizer.decode(more, skip_special_tokens=True).startswith(text)
        said.append(text)
    assert said[0] != said[1]


def overheard(lm: Any, name: str, folder: Path) -> list[tuple[str, str]]:
    """Prompts of a task, and what the model generates."""
    heard: list[tuple[str, str]] = []
    generate = lm.generate_until

    def listening(requests: list[Any], **named: Any) -> list[str]:
        texts: list[str] = generate(requests, **named)
        heard.extend((one.args[0], text) for one, text in zip(requests, texts, strict=True))
        return texts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "generate_until", listening)
        run_task(lm, name, SETTINGS, folder)
    return heard


def asked(line: dict[str, Any], choice: int) -> tuple[str, str]:
    """A question of PIQA as lm-eval asks it, and a solution."""
    return f"Question: {line['goal']}\nAnswer:", f" {line[f'sol{choice + 1}']}"


@torch.no_grad()
def likelihood(lm: Any, cache: Any, context: str, continuation: str) -> tuple[float, int]:
    """The log likelihood of a continuation after its context, one token at a time; and the tokens."""
    ids = lm.tok_encode(context + continuation)
    start, total = len(lm.tok_encode(context)), 0.0
    for place, (read, following) in enumerate(pairwise(ids)):
        logits = lm.model(torch.tensor([[read]]), past_key_values=cache).logits[0, -1]
        if place + 1 >= start:
            total += float(logits.log_softmax(-1)[following])
    return total, len(ids)

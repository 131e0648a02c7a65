"""The published corpus in the output directory: token shards for `fathom train`, the mixture, and benchmark flags.

A damaged file in `shards/` or `conversations/` is named and written again. `data/mixture.py` decides the order in
`mixture.u8`. `contamination.py` makes the benchmark flags, and `exports.py` the exports. `upload` in `data/cloud.py`
carries out `--upload`.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fathom.checkpoints.file_names import TOKENIZER, TOKENIZER_JSON
from fathom.checkpoints.tokenizers import identity
from fathom.corpus.budget import Budget, plan_budget
from fathom.corpus.stage import Workspace
from fathom.corpus.tokens import FACTS, SHARDS
from fathom.data.mixture import row_order
from fathom.data.shards import (
    INDEX,
    VERIFIED,
    CorpusIndex,
    Shard,
    Shards,
    extents,
    file_crc32,
    read_index,
    shard_files,
    targets_file,
    token_dtype,
    write_index,
)
from fathom.data.tokenizer import tokenizer_checksums
from fathom.errors import DataError
from fathom.report.files import digest, read_json, write_json
from fathom.report.results import restored

SHARD_FOLDER, CONVERSATION_FOLDER, BENCHMARK_FOLDER = "shards", "conversations", "benchmark"
EXPORT_FOLDER = "exports"
MIXTURE, ORDERS = "mixture.json", {1: "mixture.u8", 2: "mixture.u16"}
"""Facts, and the collection of every row, by the bytes that a row takes."""
PUBLISHED = ".published.json"
"""The names of the files that a run has published in a folder."""
PARTIAL = ".index.json"
"""The index of shards that are being moved in or removed: some of its files are there."""


def available_tokens(workspace: Workspace) -> dict[str, int]:
    """Training tokens of each collection of documents."""
    counts = workspace.manifest("tokenize").counts
    names = [name for name, one in workspace.recipe.collections.items() if one.kind == "documents"]
    return {name: counts.get(f"{name} train tokens", 0) for name in names}


def budget_of(workspace: Workspace) -> Budget:
    """The mixture's budget; a `DataError` if it is infeasible."""
    mix = workspace.recipe.mix
    return plan_budget(available_tokens(workspace), mix.shares, mix.tokens, mix.epochs)


def publish(workspace: Workspace) -> Budget | None:
    """Write the files that a training run reads. An infeasible mixture is refused before anything is written.

    Files that an earlier recipe published and this one does not are removed.

    Returns the budget of the documents; None if there are only conversations.
    """
    kinds = {one.kind for one in workspace.recipe.collections.values()}
    budget = budget_of(workspace) if "documents" in kinds else None
    if budget is not None:
        _publish_shards(workspace, "tokenize", SHARD_FOLDER)
        _publish_mixture(workspace, budget)
    else:
        _withdraw_shards(workspace.directory / SHARD_FOLDER)
        _withdraw_mixture(workspace.directory)
    if kinds - {"documents"}:
        _publish_shards(workspace, "converse", CONVERSATION_FOLDER)
    else:
        _withdraw_shards(workspace.directory / CONVERSATION_FOLDER)
    _publish_flags(workspace)
    _publish_exports(workspace)
    return budget


def _publish_mixture(workspace: Workspace, budget: Budget) -> None:
    block = workspace.recipe.mix.block
    weights = list(budget.weights.values())
    period = sum(weights)
    mixture = {**vars(budget), "collections": list(budget.weights), "block": block}
    mixture |= {"rows": -(-budget.tokens // block), "period": period}
    order = row_order(weights, period)
    for width, name in ORDERS.items():
        if width == order.itemsize:
            (workspace.directory / name).write_bytes(order.astype(order.dtype.newbyteorder("<")).tobytes())
        else:
            (workspace.directory / name).unlink(missing_ok=True)
    write_json(workspace.directory / MIXTURE, mixture)


def _publish_shards(workspace: Workspace, stage: str, name: str) -> None:
    """The shards of all tasks of a stage as one corpus: hard links, or copies if the file system has no links."""
    (facts_file,) = workspace.outputs("tokenizer", FACTS)
    tokenizer = workspace.path(facts_file).parent
    splits: dict[str, Shards] = {}
    places: list[tuple[Path, tuple[str, str, int]]] = []
    targets: dict[str, int] = {}
    for one in workspace.outputs(stage, SHARDS):
        shards = read_json(workspace.path(one))
        collection = shards["collection"]
        for split, entry in shards["shards"].items():
            entries = splits.setdefault(split, {}).setdefault(collection, [])
            files = list(shard_files(workspace.path(one).parent, split, collection, 0))
            if (bits := targets_file(files[0])).is_file():
                targets[f"{split}/{collection}/{len(entries):05d}{bits.suffix}"] = file_crc32(bits)
                files.append(bits)
            places += [(file, (split, collection, len(entries))) for file in files]
            entries.append(restored(Shard, entry))
    if not splits.get("train"):
        raise DataError(f"{name}: every document was held out or removed: nothing is left to train on")
    index = index_of(tokenizer, splits, {"corpus": workspace.recipe.to_dict() | {"executor": None}}, targets or None)
    draft, folder = workspace.directory / f".{name}.new", workspace.directory / name
    if repr(_published(folder)) == repr(index):  # in the same order, too
        copies = [(file, shard_files(folder, *place)[0].with_suffix(file.suffix)) for file, place in places]
        copies += [(file, folder / TOKENIZER / file.name) for file in (tokenizer / TOKENIZER).iterdir()]
        damaged = [copy for file, copy in copies if not _is_copy(file, copy)]
        if not damaged:
            return
        for copy in damaged:
            warnings.warn(f"{copy}: damaged: it is not what the corpus holds; it is written again", stacklevel=2)
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(tokenizer / TOKENIZER, draft / TOKENIZER)
    for file, place in places:
        target = shard_files(draft, *place)[0].with_suffix(file.suffix)
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(file, target)
    write_index(draft, index)
    _withdraw_shards(folder)  # not before the new ones are complete
    _move(draft, folder)


def index_of(
    tokenizer: Path,
    splits: dict[str, Shards],
    settings: dict[str, object],
    targets: dict[str, int] | None = None,
    left_out: int = 0,
) -> CorpusIndex:
    """The index of published shards; `tokenizer` is a folder with the tokenizer and its facts."""
    facts = read_json(tokenizer / FACTS)
    return CorpusIndex(
        settings=settings,
        left_out=left_out,
        **facts,
        dtype=token_dtype(facts["vocab_size"]).name,
        tokenizer_crc32=tokenizer_checksums(tokenizer),
        tokenizer_sha256=identity((tokenizer / TOKENIZER / TOKENIZER_JSON).read_text(encoding="utf-8")),
        splits={split: dict(sorted(splits[split].items())) for split in sorted(splits)},
        targets_crc32=targets,
    )


def _is_copy(file: Path, target: Path) -> bool:
    """Whether a published file is the one that a stage wrote: a hard link to it, or a file with the same contents."""
    return target.is_file() and (target.samefile(file) or digest(target) == digest(file))


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without links
        shutil.copyfile(file, target)


def _move(draft: Path, folder: Path) -> None:
    """Move finished shards into a folder that may hold other files. What a stop leaves is removed by
    `_withdraw_shards`."""
    folder.mkdir(exist_ok=True)
    (draft / INDEX).replace(folder / PARTIAL)
    for file in [path for path in draft.rglob("*") if path.is_file()]:
        target = folder / file.relative_to(draft)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
    (folder / PARTIAL).replace(folder / INDEX)
    shutil.rmtree(draft)


def _published(folder: Path, name: str = INDEX) -> CorpusIndex | None:
    """The index of a published corpus; None if there is none, or a damaged one."""
    try:
        return read_index(folder, name)
    except DataError:
        return None


def _withdraw_shards(folder: Path) -> None:
    """Remove the files of a published corpus, also if a stopped run has left only some of them. Other files in its
    folder stay."""
    if _published(folder) is not None:
        (folder / INDEX).replace(folder / PARTIAL)
    if (index := _published(folder, PARTIAL)) is None:
        return
    files = [folder / TOKENIZER / name for name in index.tokenizer_crc32]
    for split, collections in index.splits.items():
        for collection in collections:
            files += extents(folder, index, split, collection)
    for file in (folder / VERIFIED, *files, folder / PARTIAL):
        file.unlink(missing_ok=True)
    places = {file.parent for file in files} | {folder / split for split in index.splits}
    for place in (*sorted(places, reverse=True), folder):
        with suppress(OSError):  # it holds other files
            place.rmdir()


def _withdraw_mixture(directory: Path) -> None:
    if (directory / MIXTURE).is_file() and "period" in read_json(directory / MIXTURE):
        for name in (*ORDERS.values(), MIXTURE):
            (directory / name).unlink(missing_ok=True)


def _publish_exports(workspace: Workspace) -> None:
    """Publish one folder for each export format."""
    files = {
        f"{task.arguments['form']}/{name}": workspace.stage("export") / task.key / name
        for task in workspace.manifest("export").tasks
        for name in task.outputs
    }
    _publish_files(workspace.directory / EXPORT_FOLDER, files)


def _publish_flags(workspace: Workspace) -> None:
    """Publish the self-check of every benchmark, and which of its items are contaminated."""
    flags = [workspace.path(one) for one in workspace.outputs("flags", ".jsonl")]
    checks = [workspace.path(one) for one in workspace.outputs("benchmarks", "check.json")]
    named = {f"{read_json(check)['benchmark']}.check.json": check for check in checks}
    _publish_files(workspace.directory / BENCHMARK_FOLDER, {file.name: file for file in flags} | named)


def _publish_files(place: Path, files: Mapping[str, Path]) -> None:
    """Publish files under these names, and remove what an earlier run published under other names. Files of others,
    such as results of a program that was run there, stay."""
    record = place / PUBLISHED
    before = read_json(record)["files"] if record.is_file() else []
    if not files and not before:
        return
    place.mkdir(exist_ok=True)
    write_json(record, {"files": sorted({*before, *files})})
    for name in {*before, *files}:
        (place / name).unlink(missing_ok=True)
        with suppress(OSError):  # it holds other files
            (place / name).parent.rmdir()
    for name, file in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        _link(file, place / name)
    if files:
        write_json(record, {"files": sorted(files)})
        return
    record.unlink()
    with suppress(OSError):
        place.rmdir()

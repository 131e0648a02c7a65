"""Check output paths: a folder must not hold another command's output, a file must be new or of the kind to be
written.

`export.py` (`require_replaceable`) decides which directory an export may replace. `find.py` and `untrusted.py` check
models that are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from fathom.checkpoints.file_names import (
    ADAPTER_CONFIG,
    CONFIG,
    HISTORY,
    IDENTITY,
    LADDER,
    MANIFEST,
    METRICS,
    PAGE,
    PLAN,
    RECIPE,
    REPORT,
    RESULT,
    TRAINER,
)
from fathom.errors import SettingsError
from fathom.report.files import read_json

Kind = Literal[
    "a checkpoint",
    "a run",
    "a corpus",
    "a recipe",
    "an audit",
    "a model",
    "token shards",
    "a ladder",
    "a comparison",
    "a paper's table",
    "a trial",
    "a search",
    "an evaluation",
    "a lineage report",
    "candidates of a lineage",
    "other files",
]
MARKS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("a checkpoint", (MANIFEST, TRAINER)),
    ("a run", (HISTORY,)),  # a branch has it before its recipe
    *(("a run", (RECIPE, name)) for name in (METRICS, RESULT, IDENTITY, f"step-*/{MANIFEST}")),
    *(("a corpus", (RECIPE, name)) for name in ("stages/ingest", "run.json")),
    ("a recipe", (RECIPE,)),
    ("an audit", ("stages/ingest",)),
    *(("a model", (name,)) for name in (CONFIG, ADAPTER_CONFIG)),
    ("a ladder", (LADDER,)),
    ("a comparison", (PLAN,)),
    ("a trial", ("try.json",)),
    *(("a search", (name,)) for name in ("spans.json", "spans.jsonl", "screen.json")),
    *(("an evaluation", (name,)) for name in ("deepened.json", "*/.done")),
)
"""The files, or patterns of them, that a folder of each kind has; the first row whose files are all there counts."""
KEYS: tuple[tuple[Kind, str, str], ...] = (
    ("token shards", "index.json", "format"),
    ("a paper's table", "table.json", "tier"),
    ("a lineage report", REPORT, "fathom_lineage_report"),
    ("candidates of a lineage", REPORT, "candidates"),
    *(("an evaluation", REPORT, key) for key in ("checkpoints", "guessing")),
)
"""JSON files whose names do not tell the kind, and a key that does."""
WRITTEN = (METRICS, RESULT, REPORT, PAGE, "card.md", "portrait-a.png", "portrait-b.png", "spans.html", "screen.html")
"""Files that a command writes, which are somebody else's where nothing tells the kind of folder."""
LITTER = {".DS_Store", "Thumbs.db", "desktop.ini"}
"""Files that desktops leave in every folder that they show."""


def contents(folder: Path) -> tuple[Kind, str] | None:
    """The kind of output that a folder holds, and a file that shows it; None if it holds no output of any command."""
    for kind, names in MARKS:
        found = [next(folder.glob(name), None) for name in names]
        if (shown := found[-1]) is not None and None not in found:
            return kind, shown.relative_to(folder).as_posix()
    for kind, name, key in KEYS:
        if is_file_with(key)(folder / name):
            return kind, name
    return next((("other files", name) for name in WRITTEN if (folder / name).exists()), None)


def is_empty(folder: Path) -> bool:
    """Whether a folder holds nothing but what a desktop left."""
    return {path.name for path in folder.iterdir()} <= LITTER


def require_folder(folder: Path, *own: Kind) -> None:
    """Refuse an output folder that holds files of another command, or whose path cannot be a folder.

    Args:
        folder: The folder, which need not exist.
        own: What the command may find there: it resumes it or writes it again.
    """
    _require_below_folder(folder)
    if (held := contents(folder)) is not None and held[0] not in own:
        raise SettingsError(f"{folder} holds {held[0]} ({held[1]}); choose another directory")


def require_file(file: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Refuse to overwrite a file that is not of the kind that the command writes.

    Args:
        file: The file, which need not exist.
        what: The kind that the command writes, in words.
        is_own: Whether a file is of this kind.
    """
    _require_below_folder(file.parent)
    if file.is_dir():
        raise SettingsError(f"{file} is a directory; choose a file")
    if file.exists() and not (file.is_file() and (file.stat().st_size == 0 or is_own(file))):
        raise SettingsError(f"{file} exists and is not {what}; delete it, or choose another file")


def is_page(file: Path) -> bool:
    """Whether a file is an HTML page that Fathom wrote."""
    with file.open("rb") as opened:
        return b'<meta name="generator" content="Fathom">' in opened.read(500)


def is_file_with(key: str) -> Callable[[Path], bool]:
    """A test for whether a path is a JSON file whose object has the given key."""

    def is_one(file: Path) -> bool:
        try:
            return file.is_file() and key in read_json(file)
        except ValueError:
            return False

    return is_one


def _require_below_folder(folder: Path) -> None:
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise SettingsError(f"{folder}: {above} is not a directory" if above != folder else f"{folder} is a file")

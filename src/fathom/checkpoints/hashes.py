"""`weights.sha256`: the SHA-256 of each weight file of an export, in the format of `sha256sum`, one file a line.

`sha256sum -c weights.sha256`, run inside the directory, checks the same. A model that is saved again with
`save_pretrained` keeps the old file; every message mentions this.

`fathom train` on a finished run (`training/loop.py`) and `model.from_pretrained` (`training/source.py`) refuse weights
that differ. Other commands only warn (`warn_if_changed`), and check more than 2 GB only with `--verify`.
`lineage/publishing/commitments.py` makes the hash tree of `fathom lineage commit`.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from fathom.checkpoints.file_names import WEIGHT_HASHES
from fathom.errors import ModelError
from fathom.report.files import digest

ALWAYS_CHECKED = 2 << 30
"""Weights of at most this many bytes are checked whenever a model is opened: a few seconds."""


def write_hashes(directory: Path) -> None:
    """Write the hash of every weight file of a directory."""
    files = sorted(directory.glob("*.safetensors"))
    lines = [f"{digest(file).sha256}  {file.name}\n" for file in files]
    (directory / WEIGHT_HASHES).write_text("".join(lines), encoding="utf-8")


def read_hashes(directory: Path) -> dict[str, str]:
    """The hashes in `weights.sha256` by file name; empty if the directory does not have this file."""
    path = directory / WEIGHT_HASHES
    if not path.is_file():
        return {}
    lines = [line.split("  ", 1) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    if any(len(words) != 2 or Path(words[1]).name != words[1] for words in lines):
        raise ModelError(f"{path} is damaged: delete this file if you trust the weights")
    return {name: found for found, name in lines}


def changed(directory: Path) -> str | None:
    """A message about the first weight file that is missing or differs from its hash in `weights.sha256`; None if all
    match or there are no hashes."""
    for name, expected in read_hashes(directory).items():
        file = directory / name
        if file.is_file() and digest(file).sha256 == expected:
            continue
        what = (
            f"does not have the hash in {WEIGHT_HASHES}" if file.is_file() else f"is missing; {WEIGHT_HASHES} lists it"
        )
        return f"{file} {what}: the file is damaged, or was saved again after the export (then delete {WEIGHT_HASHES})"
    return None


def warn_if_changed(directory: Path, verify: bool = False) -> None:
    """Warn if weight files differ from their hashes; weights above 2 GB in total are checked only with `verify`."""
    size = sum(file.stat().st_size for name in read_hashes(directory) if (file := directory / name).is_file())
    if (verify or size <= ALWAYS_CHECKED) and (problem := changed(directory)):
        warnings.warn(problem, stacklevel=2)

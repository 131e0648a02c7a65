"""Repositories of the Hugging Face Hub instead of directories: `org/name` or `org/name@revision`.

HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply as in every tool of the Hub. Gated repositories are reported
here; `find.py` reports a path that is neither a model nor a run nor a comparison.

`untrusted.py` checks the downloaded files. `origin.py` reads single tensors of a repository by HTTP range requests, for
`fathom lineage`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging

from fathom.checkpoints.origin import repository_of
from fathom.errors import ModelError

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""The files to download: no pickles, and Python only where it is trusted."""


def repository(where: str | Path) -> tuple[str, str] | None:
    """Repository and revision of a name; None for a path.

    Whatever exists is a path, and so is `runs/tiny` if there is a directory `runs`.
    """
    path = Path(where)
    named = repository_of(str(where))
    file = path.suffix == ".gguf" or path.exists() or path.parent.is_dir()
    return None if named is None or file else named


def local(where: str | Path, code: bool = False, files: tuple[str, ...] = WANTED) -> Path:
    """The directory of a model: the path itself, or a repository's snapshot, downloaded to the Hub's cache.

    Args:
        where: A path, `org/name` or `org/name@revision`.
        code: Whether to download Python files too.
        files: Patterns of the files to download; without weights among them, the repository needs none.
    """
    named = repository(where)
    return Path(where) if named is None else _snapshot(*named, (*files, *(("*.py",) if code else ())))


@lru_cache
def _snapshot(repo: str, revision: str, files: tuple[str, ...]) -> Path:
    """Download a repository's snapshot; the result is cached, so that a process always gets the same commit."""
    name = repo if revision == "main" else f"{repo}@{revision}"
    where = f"{name}: no such directory, and the Hub ({constants.ENDPOINT})"
    logging.set_verbosity_error()  # it warns of every retry; failures are reported as errors here
    try:
        found = Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except GatedRepoError:
        raise ModelError(f"{name}: a gated repository: accept its terms, then `hf auth login`, or HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelError(f"{where} has no revision {revision} of {repo}") from None
    except RepositoryNotFoundError:
        raise ModelError(f"{where} has no such repository; a private one needs `hf auth login`, or HF_TOKEN") from None
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "it cannot be reached"
        raise ModelError(f"{where} cannot be asked: {why}; the cache does not hold the model either") from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{where} does not provide the model: {str(error).strip().splitlines()[0]}") from error
    if WANTED[0] in files and not any(found.glob("*.safetensors")):
        raise ModelError(f"{name}: the repository holds no safetensors weights, and Fathom opens no other format")
    return found

"""Other people's code that the outside tests run, fetched when they are set up: none of it is kept in this repository.

python -m tests.outside.sources     fetches what is not there yet, into the virtual environment that runs it
"""

from __future__ import annotations

import importlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from types import ModuleType

SOURCES = Path(sys.prefix) / "sources"
TRANSFORMERS = version("transformers")
COMMON = SOURCES / f"transformers-{TRANSFORMERS}" / "transformers_tests"
"""transformers' `tests/`, under a name that is not our own tests'."""
ARCHIVE = f"https://github.com/huggingface/transformers/archive/refs/tags/v{TRANSFORMERS}.tar.gz"
LLAMA_CPP_PYTHON = "0.3.36"
LLAMA_CPP = SOURCES / f"llama-cpp-python-{LLAMA_CPP_PYTHON}" / "llama.cpp"
ABSENT = {
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": {}},
}
"""What the source distribution lacks and its common tests import; an empty stand-in unless the tag's archive has it."""


def fetch() -> None:
    """Everything, saying what is downloaded; what is there already is left alone."""
    if not (COMMON / "test_modeling_common.py").exists():
        print(
            f"downloading the source distribution of transformers {TRANSFORMERS} (11 MB): its common tests", flush=True
        )
        unpack(source_distribution("transformers", TRANSFORMERS), "tests", COMMON)
    if missing():
        print(f"downloading {ARCHIVE}: {', '.join(missing())}", flush=True)
        try:
            with urllib.request.urlopen(ARCHIVE, timeout=60) as answer:
                unpack(answer.read(), "tests", COMMON)
        except urllib.error.URLError as error:
            print(f"not reached ({error.reason}): {', '.join(missing())} stay empty stand-ins", flush=True)
    if not (LLAMA_CPP / "convert_hf_to_gguf.py").exists():
        print(
            f"downloading the source distribution of llama-cpp-python {LLAMA_CPP_PYTHON} (77 MB): llama.cpp's converter"
        )
        unpack(source_distribution("llama-cpp-python", LLAMA_CPP_PYTHON), "vendor/llama.cpp", LLAMA_CPP)


def source_distribution(name: str, number: str) -> bytes:
    """The archive that the package index calls the source of this version."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--no-binary", name, "--dest", scratch, f"{name}=={number}"], check=True)
        (file,) = Path(scratch).iterdir()
        return file.read_bytes()


def unpack(archive: bytes, folder: str, target: Path) -> None:
    """Add the Python files and vocabularies under `folder` of an archive whose files all stand in one directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        for member in tar:
            inner = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not (member.isfile() and inner.is_relative_to(folder) and inner.suffix in (".py", ".gguf")):
                continue
            if ".." in inner.parts:
                raise ValueError(f"{member.name} leaves the archive's directory")
            content = tar.extractfile(member)
            assert content is not None, "a file has content"
            file = whole / inner.relative_to(folder)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.read())
        (whole / "__init__.py").touch()
        if target.exists():
            shutil.copytree(whole, target, dirs_exist_ok=True)
        else:
            whole.rename(target)


def missing() -> list[str]:
    """Modules of the common tests that have not been fetched."""
    return [name for name in ABSENT if not (COMMON / name.replace(".", "/")).with_suffix(".py").exists()]


def common(name: str) -> ModuleType:
    """A module of transformers' tests, by its name inside that folder."""
    if str(COMMON.parent) not in sys.path:
        sys.path.insert(0, str(COMMON.parent))
        for module in missing():
            stand_in = ModuleType(f"{COMMON.name}.{module}")
            vars(stand_in).update(ABSENT[module])
            sys.modules[stand_in.__name__] = stand_in
    return importlib.import_module(f"{COMMON.name}.{name}")


if __name__ == "__main__":
    fetch()

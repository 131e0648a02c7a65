"""The same bytes through datatrove: its own processes, a local Ray, and the scripts that it writes for Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fathom.corpus.pipeline import build
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.errors import DataError
from tests.corpus.files import write
from tests.corpus.prose import Prose, recipe_values, tree, write_jsonl

pytestmark = pytest.mark.slow

# What a cluster's programs would do, done here and now: every task of the array, one after the other.
SBATCH = """#!/bin/bash
file="${@: -1}"
echo "$@" >> "$JOBS"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$file")
if grep -q launch_pickled "$file"; then
    for task in $(seq 0 "$last"); do
        SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here RUN_OFFSET=0 bash "$file" >> "$JOBS.out" 2>&1
    done
fi
echo "Submitted batch job 17"
"""
SRUN = '#!/bin/bash\nwhile [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done\nexec "$@"\n'
PROGRAMS = {"sbatch": SBATCH, "srun": SRUN, "squeue": "#!/bin/bash\n", "scontrol": "#!/bin/bash\necho here\n"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> tuple[dict[str, object], dict[str, bytes]]:
    """A recipe, and what the local pool makes of it."""
    pytest.importorskip("datatrove")
    folder, prose = tmp_path_factory.mktemp("remote"), Prose(31)
    texts = [prose.document(100) for _ in range(40)]
    files = [write_jsonl(folder / f"{n}.jsonl", [*texts[20 * n : 20 * n + 20], texts[n]]) for n in range(2)]
    quiz = write_jsonl(folder / "quiz.jsonl", [{"question": texts[3][:120]}])
    values = recipe_values(
        {"a": {"inputs": [str(files[0])]}, "b": {"inputs": [str(files[1])]}},
        tokenize={"tokenizer": tokenizer},
        deduplicate={"bands": 2, "rows": 4},
        decontaminate={"benchmarks": {"quiz": str(quiz)}},
    )
    build(parse_corpus_recipe(values), folder / "out")
    return values, tree(folder / "out")


@pytest.fixture(autouse=True)
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler gets every stage, however small."""
    monkeypatch.setattr("fathom.corpus.executor.POOL_BYTES", 0)


def made(values: dict[str, object], out: Path, name: str) -> dict[str, bytes]:
    build(parse_corpus_recipe({**values, "executor": {"name": name, "workers": 2, "memory_gb": 1}}), out)
    return {path: data for path, data in tree(out).items() if not path.startswith("logs/")}


def test_datatrove_local(whole: tuple[dict[str, object], dict[str, bytes]], tmp_path: Path) -> None:
    assert made(whole[0], tmp_path / "out", "datatrove") == whole[1]


def test_ray(whole: tuple[dict[str, object], dict[str, bytes]], tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    source = os.pathsep.join(path for path in sys.path if path)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": source}})
    try:
        assert made(whole[0], tmp_path / "out", "ray") == whole[1]
    finally:
        ray.shutdown()


def test_slurm(
    whole: tuple[dict[str, object], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in PROGRAMS.items():
        write(tmp_path / "bin" / name, text).chmod(0o755)
    # As for `.venv/bin/fathom` in a shell that has not activated .venv: the job must find datatrove's program itself.
    here = str(Path(sys.executable).parent)
    others = [place for place in os.environ["PATH"].split(os.pathsep) if place != here]
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path / "bin"), *others)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("JOBS", str(tmp_path / "jobs"))
    assert made(whole[0], tmp_path / "out", "slurm") == whole[1]
    script = (tmp_path / "out" / "logs" / "clean" / "launch_script.slurm").read_text()
    assert "#SBATCH --array=0-1%2" in script and "#SBATCH --mem-per-cpu=1G" in script
    # Jobs that end without having done their tasks are no success.
    write(tmp_path / "bin" / "sbatch", '#!/bin/bash\necho "Submitted batch job 18"\n').chmod(0o755)
    with pytest.raises(DataError, match="ingest: 2 of 2 tasks are not done; run the same command to resume"):
        made(whole[0], tmp_path / "other", "slurm")

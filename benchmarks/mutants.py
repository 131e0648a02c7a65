"""How many planted faults the tests of a folder find: 100 seeded mutants of code that two checkouts share.

    python benchmarks/mutants.py ../before . --out benchmarks/results/mutants.json

A mutant changes one comparison, sign, constant or returned value inside a function that both checkouts have, letter for
letter. For each checkout the test files that mirror the changed file, or import it, run in a process of their own; the
mutant is killed if a test fails that passes without it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# What every test loads is loaded once; Fathom itself is not.
import pytest
import torch  # noqa: F401
import transformers.models.auto  # noqa: F401

FOLDERS = ("checkpoints", "corpus", "data", "evaluation", "kvcache", "lineage", "models", "report")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
    },
}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}
SECONDS = 200
"""Processor time of one file's tests, or a sixth of the clock's; a mutant that runs longer counts as killed."""


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    file: str
    """Below `src/fathom`."""
    function: str
    kind: str
    number: int
    """Which of the places of its kind in the function."""
    before: str
    after: str


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file by their qualified names."""
    found = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                found[prefix + child.name] = child
            elif isinstance(child, ast.ClassDef):
                walk(child, f"{prefix}{child.name}.")

    walk(ast.parse(source), "")
    return found


def places(function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST]]:
    """Nodes that can be changed, with the kind of the change; docstrings, annotations and messages are left out."""
    for node in [inner for statement in function.body for inner in ast.walk(statement)]:
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield "comparison", node
        elif (
            isinstance(node, ast.BinOp)
            and type(node.op) in SIGNS
            and not isinstance(node.left, (ast.Constant, ast.JoinedStr))
        ):
            yield "sign", node
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            yield "constant", node
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield "return", node


def change(kind: str, node: ast.AST) -> None:
    """Plant the fault."""
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp):
        node.op = SIGNS[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Return):
        node.value = ast.Constant(None)
    assert kind


def planted(source: str, mutant: Mutant) -> str:
    """A file with its fault."""
    tree = ast.parse(source)
    function = functions(source)[mutant.function]
    (same,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.name, node.lineno) == (function.name, function.lineno)
    )
    node = [node for kind, node in places(same) if kind == mutant.kind][mutant.number]
    change(mutant.kind, node)
    return ast.unparse(tree)


def shared(trees: Sequence[Path], folder: str) -> list[Mutant]:
    """Every mutant of a folder's functions that all checkouts have, and whose file a test mirrors in all of them."""
    found = []
    for path in sorted((trees[0] / "src" / "fathom" / folder).rglob("*.py")):
        file = path.relative_to(trees[0] / "src" / "fathom").as_posix()
        if not all((tree / "src" / "fathom" / file).is_file() and tests_of(tree, file) for tree in trees):
            continue
        each = [functions((tree / "src" / "fathom" / file).read_text(encoding="utf-8")) for tree in trees]
        for name, function in each[0].items():
            if any(name not in other or ast.dump(other[name]) != ast.dump(function) for other in each[1:]):
                continue
            count: dict[str, int] = {}
            for kind, node in places(function):
                before = ast.unparse(node)
                changed = ast.parse(before).body[0]
                change(kind, next(n for n in ast.walk(changed) if type(n) is type(node)))
                found.append(Mutant(file, name, kind, count.get(kind, 0), before, ast.unparse(changed)))
                count[kind] = count.get(kind, 0) + 1
    return found


def tests_of(tree: Path, file: str) -> list[str]:
    """The test file that mirrors a source file; where there is none, those of its folder that import it."""
    place = Path("tests") / Path(file).parent
    mirror = place / f"test_{Path(file).stem}.py"
    if (tree / mirror).is_file():
        return [str(mirror)]
    module = "fathom." + file.removesuffix(".py").replace("/", ".")
    importing = re.compile(rf"^(from|import) {re.escape(module)}\b", re.M)
    return [
        str(path.relative_to(tree))
        for path in sorted((tree / place).glob("test_*.py"))
        if importing.search(path.read_text(encoding="utf-8"))
    ]


def outcome(tree: Path, tests: Sequence[str]) -> int:
    """The exit code of the tests in a forked process, which finds torch and transformers loaded."""
    child = os.fork()
    if not child:
        os.setsid()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.chdir(tree)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        sys.path[:0] = [str(tree / "src"), str(tree)]
        os.environ["PYTHONPATH"] = f"{tree / 'src'}:{tree}"
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", *tests])
        os._exit(int(code))
    end = time.monotonic() + 6 * SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def run(trees: Sequence[Path], mutants: Sequence[Mutant]) -> list[dict[str, object]]:
    """What each checkout's tests say of each mutant; a file whose tests fail anyway is left out."""
    rows: list[dict[str, object]] = []
    sound: dict[tuple[Path, str], bool] = {}
    for mutant in mutants:
        killed = []
        for tree in trees:
            file, tests = tree / "src" / "fathom" / mutant.file, tests_of(tree, mutant.file)
            if (tree, mutant.file) not in sound:
                sound[tree, mutant.file] = outcome(tree, tests) == 0
            source = file.read_text(encoding="utf-8")
            file.write_text(planted(source, mutant), encoding="utf-8")
            try:
                killed.append(outcome(tree, tests) != 0 if sound[tree, mutant.file] else None)
            finally:
                file.write_text(source, encoding="utf-8")
        rows.append({**asdict(mutant), "killed": killed})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path, help="checkouts, the earlier one first")
    parser.add_argument("--count", type=int, default=100, help="mutants, spread evenly over the folders (default: 100)")
    parser.add_argument("--files", type=int, default=4, help="files of a folder that are changed (default: 4)")
    parser.add_argument("--only", nargs="+", help="change these files alone, below src/fathom (default: by chance)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the log goes")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        trees = []
        for number, tree in enumerate(options.trees):
            ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info")
            trees.append(Path(shutil.copytree(tree, Path(place) / str(number), ignore=ignored)))
        pools = []
        for every in (shared(trees, folder) for folder in FOLDERS):
            files = sorted({one.file for one in every})
            some = options.only or chance.sample(files, min(options.files, len(files)))
            pools.append([one for one in every if one.file in some])
        pools = [pool for pool in pools if pool]
        kinds = ("comparison", "sign", "constant", "return")
        chosen: list[Mutant] = []
        for number in range(options.count):  # folders in turn, kinds in turn
            pool, kind = pools[number % len(pools)], kinds[number // len(pools) % len(kinds)]
            free = [one for one in pool if one not in chosen]
            if left := [one for one in free if one.kind == kind] or free:
                chosen.append(chance.choice(left))
        rows = run(trees, chosen)
    judged = [row["killed"] for row in rows if None not in row["killed"]]  # type: ignore[operator]
    shares = [sum(killed[i] for killed in judged) / len(judged) for i in range(len(trees))]  # type: ignore[index]
    print(f"{len(judged)} of {len(rows)} judged; killed: {', '.join(f'{share:.1%}' for share in shares)}")
    if options.out:
        log = {"seed": options.seed, "judged": len(judged), "killed": shares, "mutants": rows}
        options.out.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

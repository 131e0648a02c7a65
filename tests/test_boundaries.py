"""Who may import whom: no room from below, no circle, nothing of ours inside functions, nothing heavy by accident.

Every import of our own counts: inside functions, relative, by `importlib`, and for type hints.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import fathom
from tests import processes

ROOT = Path(fathom.__file__).parent
ROOMS = (
    *(
        "_version",
        "errors",
        "values",
        "models",
        "iterations",
        "kernels",
        "kvcache",
        "report",
        "checkpoints",
        "testing",
        "data",
        "settings",
        "recipe",
        "corpus",
    ),
    *("training", "evaluation", "deepen", "inference", "lens", "lineage", "experiments", "cli", "__main__"),
)
"""Each may import those before it."""
MODELS = (
    *("axes", "decoder", "mixers", "residuals", "recurrences", "registry", "sublayers", "foreign", "configuration"),
    *("trips", "hosts", "loading", "pretrained", "generation", "modeling", "cost", "packages", "__init__"),
)
"""The order inside `models`, of folders and of the files beside them."""
STRANGERS = {
    "models.residuals": {"models.mixers"},
    "models.recurrences": {"models.mixers", "models.residuals"},
    "kvcache": {"kernels"},
    "report": {"models", "kernels", "kvcache"},
    "checkpoints": {"kernels", "kvcache"},
    "data": {"models", "kernels", "kvcache"},
    "corpus": {"models", "kernels", "kvcache"},
    "inference": {"evaluation", "deepen"},
    "lineage": {
        "kernels",
        "kvcache",
        "data",
        "settings",
        "recipe",
        "corpus",
        "training",
        "evaluation",
        "inference",
        "lens",
    },
}
"""Rooms above that a room must not know all the same."""
COMPUTING = "models kernels kvcache checkpoints testing training evaluation deepen inference lens experiments"
FOREIGN = {
    "torch": f"{COMPUTING} iterations data.batches report.provenance",
    "transformers": "models kvcache checkpoints testing data.tokenizer corpus.chat_template training evaluation "
    "inference deepen lens cli.export",
    **dict.fromkeys(("triton", "liger_kernel"), "kernels"),
    "numpy": "report checkpoints data corpus training evaluation deepen lens lineage experiments inference.draws "
    "inference.structure inference.prefixes",
    "scipy": "report.statistics corpus lineage experiments",
    "huggingface_hub": "models checkpoints recipe inference.generate",
    "safetensors": "checkpoints.families.tensor_names kvcache.stored lineage.attacks training.adapters",
    "tokenizers": "data evaluation.perplexity inference.control",
    "yaml": "checkpoints.find checkpoints.runs settings corpus deepen.heal experiments.compare_page "
    "experiments.ladder_page",
    "jinja2": "report.templates corpus.chat_template inference.prompt",
    "markupsafe": "report evaluation.caches.page evaluation.tuned_page evaluation.scores_page experiments.compare_page "
    "experiments.ladder_page",
    "filelock": "report.files",
    "rich": "report training.tracking evaluation deepen experiments cli",
    # Of the extras.
    "datasets": "evaluation.tasks",
    "lm_eval": "evaluation",
    "peft": "training.adapters training.build",
    "gguf": "checkpoints.to_gguf checkpoints.gguf",
    "vllm": "inference.vllm_model",
    "llguidance": "inference.structure inference.grammar",
    **dict.fromkeys(("trafilatura", "pypdfium2", "py3langid", "warcio", "datatrove"), "corpus"),
    "fsspec": "data.cloud",
    "fastapi": "inference lens.live",
    **dict.fromkeys(("starlette", "pydantic", "pydantic_core", "uvicorn", "h11"), "inference"),
    **dict.fromkeys(("wandb", "trackio"), "training.tracking"),
}
"""The rooms, or the files in them, that may import what is other people's; nobody imports what is not listed."""
INSIDE_FUNCTIONS = {
    ("fathom.recipe", "_config", "fathom.models.configuration"): "a recipe is read without torch, a configuration not",
    ("fathom.recipe", "_config", "fathom.checkpoints.runs"): "as above: a model block that goes on from a run's",
    ("fathom.recipe", ".rules", "fathom.kvcache"): "as above: the methods that may be named",
    ("fathom.recipe", ".rules", "fathom.kernels"): "as above: the kernels that may be named",
}
"""Imports of our own inside functions, and why; at the top of a command's `run` they need no reason."""
BY_NAME = {
    *(("fathom", "__getattr__"), ("fathom", "register"), ("fathom.lineage", "__getattr__")),
    ("fathom.lineage.publishing", "__getattr__"),
    ("fathom.cli.main", "_command"),
    ("fathom.kernels", "use"),
    *(("fathom.data.sources", "_require"), ("fathom.kvcache.rope", "_modelling")),  # of other people's
}
"""Functions that import a module by a name that they look up."""


@dataclass(frozen=True)
class Import:
    """One module that a file imports."""

    file: str
    """The importing module, as `fathom.room.name`."""
    target: str
    name: str
    """What is taken from it, or nothing."""
    function: str
    """The function that it stands in, or nothing."""
    first: bool
    """Whether only imports, and the docstring, stand before it in that function."""
    hint: bool = False
    """Whether it is for type hints alone."""


def room_of(module: str) -> str:
    """`fathom.models.axes.roles` to `models`; the package's own face is called `fathom`."""
    return [*module.split("."), "fathom"][1]


def place_of(module: str) -> str:
    """The room; inside `models` with the folder or file there, as `models.axes`."""
    room, *inside = module.split(".")[1:] or ["fathom"]
    return f"{room}.{inside[0] if inside else '__init__'}" if room == "models" else room


ORDER = [place for room in ROOMS for place in ([f"models.{name}" for name in MODELS] if room == "models" else [room])]


def imports(root: Path, ours: bool = True) -> list[Import]:
    """All imports in a source tree of our own, or of what is other people's."""
    paths = {path: (root.name, *path.relative_to(root).with_suffix("").parts) for path in sorted(root.rglob("*.py"))}
    modules = {".".join(parts).removesuffix(".__init__") for parts in paths.values()}
    every = [found for path, parts in paths.items() for found in of_file(path, parts, modules)]
    return [one for one in every if (one.target.split(".")[0] == root.name) == ours]


def of_file(path: Path, parts: tuple[str, ...], modules: set[str]) -> Iterator[Import]:
    module = ".".join(parts).removesuffix(".__init__")
    for target, name, function, first, hint in read(path.read_text(encoding="utf-8"), parts[:-1]):
        inner = f"{target}.{name}" if name else target
        is_module = inner in modules
        yield Import(module, inner if is_module else target, "" if is_module else name, function, first, hint)


@cache
def read(source: str, package: tuple[str, ...]) -> list[tuple[str, str, str, bool, bool]]:
    """(module, name, function, first, hint) of all that a file imports, and of what it touches inside those by
    `._name`."""
    tree = ast.parse(source)
    every = [
        (target, name, function, first, hint)
        for node, function, first, hint in statements(tree)
        for target, name in targets(node, package)
    ]
    return every + [(target, name, "", True, False) for target, name in touched(tree, package)]


def touched(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(module, name) of `module._name` and `Class._name`, where the module or the class was imported."""
    bound, nodes = {}, list(ast.walk(tree))
    for node in nodes:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            (module, _), *_ = targets(node, package)
            bound[alias.asname or alias.name] = f"{module}.{alias.name}"
        for alias in node.names if isinstance(node, ast.Import) else ():
            bound[alias.asname or alias.name] = alias.name
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            named = isinstance(node.value, (ast.Name, ast.Attribute))
            if named and (owner := ast.unparse(node.value)) in bound:
                yield bound[owner], node.attr


def _for_type_checkers(test: ast.expr) -> bool:
    named = isinstance(test, (ast.Name, ast.Attribute))
    return named and ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(tree: ast.Module) -> Iterator[tuple[ast.AST, str, bool, bool]]:
    """Every node, with the function around it, and whether only type checkers read it."""

    def walk(node: ast.AST, function: str, first: bool, hint: bool) -> Iterator[tuple[ast.AST, str, bool, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and _for_type_checkers(child.test):
                for other in (*child.body, *child.orelse):
                    yield from visit(other, function, first, hint or other in child.body)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = (
                    child.name
                    if isinstance(node, ast.Module) or child.name == "__getattr__"
                    else f"{function}.{child.name}"
                )
                leading = True
                for statement in child.body:
                    leading = leading and isinstance(statement, LEADING) and not _calls(statement)
                    yield from visit(statement, name, leading, hint)
            else:
                yield from visit(child, function, first, hint)

    def visit(node: ast.AST, function: str, first: bool, hint: bool) -> Iterator[tuple[ast.AST, str, bool, bool]]:
        yield node, function, first, hint
        yield from walk(node, function, first, hint)

    return walk(tree, "", True, False)


LEADING = (ast.Import, ast.ImportFrom, ast.Expr, ast.Try)


def _calls(statement: ast.stmt) -> bool:
    """Whether anything but an import, or the complaint about one that is missing, is done."""
    done = statement.body if isinstance(statement, ast.Try) else [statement]
    return any(isinstance(inner, ast.Call) for one in done for inner in ast.walk(one))


def targets(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(module, name) of an import statement or of a call that imports; a name that is computed counts as `fathom.?`."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else ()
        module = ".".join([*base, *([node.module] if node.module else [])])
        yield from ((module, alias.name) for alias in node.names)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
        given = [*node.args, *(word.value for word in node.keywords if word.arg == "name")]
        text = given[0] if given else None
        named = isinstance(text, ast.Constant) and isinstance(text.value, str)
        yield (str(text.value) if named and not str(text.value).startswith(".") else f"{package[0]}.?"), ""


IMPORTERS = ("import_module", "__import__", "resolve_name", "load_module")


def climbs(found: list[Import]) -> list[str]:
    """Imports that go up, or to a stranger."""
    wrong = []
    for one in found:
        here, there = place_of(one.file), place_of(one.target)
        if here in (there, "fathom") or (one.file, one.function) in BY_NAME:
            continue
        up = there not in ORDER or here not in ORDER or ORDER.index(there) > ORDER.index(here)
        if up or room_of(one.target) in STRANGERS.get(here, ()) or there in STRANGERS.get(here, ()):
            wrong.append(f"{one.file} imports {one.target}")
    return wrong


def circles(found: list[Import]) -> list[list[str]]:
    """Groups of modules that reach one another."""
    edges: dict[str, set[str]] = {}
    for one in found:
        edges.setdefault(one.file, set()).add(one.target)

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for target in edges.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    reach = {module: reached(module) for module in edges}
    return sorted({tuple(sorted(m for m in reach if n in reach[m] and m in reach[n])) for n in reach if n in reach[n]})


def hidden(found: list[Import]) -> list[str]:
    """Imports inside functions that need a reason."""
    wrong = []
    for one in found:
        # A command's `run`, what `generate` and `chat` share, and the functions of its file that it calls.
        command = room_of(one.file) == "cli" and re.fullmatch("run|ready|_[a-z_]+", one.function) and one.first
        if one.function == "" or command or (one.file, one.function) in BY_NAME:
            continue
        if (one.file, one.function, one.target) not in INSIDE_FUNCTIONS:
            wrong.append(f"{one.file}.{one.function} imports {one.target}")
    return wrong


def private(found: list[Import]) -> list[str]:
    """Names with an underscore that are taken from another room, or touched there."""
    return [
        f"{one.file} takes {one.target}.{one.name}"
        for one in found
        if one.name.startswith("_") and not one.name.startswith("__") and room_of(one.file) != room_of(one.target)
    ]


def foreign(found: list[Import]) -> list[str]:
    """Packages of other people's where they do not belong."""
    wrong = []
    for one in found:
        package, place = one.target.split(".")[0], one.file.removeprefix("fathom.")
        homes = FOREIGN.get(package, "").split()
        home = one.hint or any(f"{place}.".startswith(f"{home}.") for home in homes)
        if not home and package not in sys.stdlib_module_names:
            wrong.append(f"{one.file} imports {package}")
    return wrong


CHECKS = {"climbs": climbs, "circles": circles, "hidden": hidden, "private": private, "foreign": foreign}


def complaints(check: str, root: Path) -> set[str]:
    """What one of the checks says of a source tree."""
    return set(map(str, CHECKS[check](imports(root, ours=check != "foreign"))))


@pytest.mark.parametrize("check", CHECKS)
def test_boundaries(check):
    assert not complaints(check, ROOT)


def test_what_is_listed_is_used():
    used = {(one.file, one.function, one.target) for one in imports(ROOT) if one.function}
    assert set(INSIDE_FUNCTIONS) <= used
    assert set(FOREIGN) <= {one.target.split(".")[0] for one in imports(ROOT, ours=False)}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A copy of the tree with one file more, and what each check says of it."""
    tree = tmp_path_factory.mktemp("copy") / "fathom"
    shutil.copytree(ROOT, tree, ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(".py")])
    (tree / "report" / "planted2.py").write_text("from .planted import f\n\ndef g(): ...\n")
    return tree, {check: complaints(check, tree) for check in CHECKS}


@pytest.mark.parametrize(
    ("file", "text", "check"),
    [
        ("data/planted.py", "from fathom.training import loop", "climbs"),
        ("data/planted.py", "def f():\n    from fathom.training import loop", "climbs"),
        ("data/planted.py", "import importlib\nimportlib.import_module('fathom.training.loop')", "climbs"),
        ("models/planted.py", "from ..report import plots", "climbs"),
        ("models/axes/planted.py", "from ..decoder.loss import shifted", "climbs"),
        ("models/axes/planted.py", "if TYPE_CHECKING:\n    from ..configuration import FathomConfig", "climbs"),
        ("models/residuals/planted.py", "from ..mixers.schedule import GridMixer", "climbs"),
        ("models/axes/visit.py", "if TYPE_CHECKING:\n    from .roles import Residual", "circles"),
        ("lineage/planted.py", "import fathom.training.loop", "climbs"),
        ("inference/planted.py", "from fathom.evaluation.scoring import show", "climbs"),
        ("training/planted.py", "from fathom.cli.parser import Parser", "climbs"),
        ("training/planted.py", "import fathom", "climbs"),
        ("errors.py", "def f():\n    from fathom.report.files import lock", "circles"),
        ("report/planted.py", "def f():\n    from .planted2 import g", "circles"),
        ("training/planted.py", "def f():\n    from fathom.data.shards import DataError", "hidden"),
        ("cli/planted.py", "def run(options):\n    x = 1\n    from fathom.recipe import Recipe", "hidden"),
        ("cli/planted.py", "def run(options):\n    slow()\n    from fathom.recipe import Recipe", "hidden"),
        ("cli/planted.py", "class A:\n    def run(self):\n        from fathom.recipe import Recipe", "hidden"),
        ("data/planted.py", "def register():\n    from fathom.data.shards import DataError", "hidden"),
        ("recipe.py", "def f():\n    from fathom.kvcache import METHODS", "hidden"),
        ("data/planted.py", "if not TYPE_CHECKING:\n    from fathom.training import loop", "climbs"),
        ("data/planted.py", "import importlib as i\ni.import_module(name='fathom.training.loop')", "climbs"),
        ("data/planted.py", "from importlib import import_module\nimport_module('.training.loop', 'fathom')", "climbs"),
        ("data/planted.py", "from importlib import import_module\nimport_module(somewhere)", "climbs"),
        ("data/planted.py", "import pkgutil\npkgutil.resolve_name('fathom.training.loop')", "climbs"),
        ("training/planted.py", "from fathom.data.shards import _shard", "private"),
        ("lineage/planted.py", "import torch", "foreign"),
        ("data/planted.py", "def f():\n    from transformers import AutoTokenizer", "foreign"),
        ("report/planted.py", "import yaml", "foreign"),
        ("training/planted.py", "import requests", "foreign"),
        ("training/planted.py", "from fathom.data import shards\nshards._seal({})", "private"),
        ("training/planted.py", "import fathom.data.shards as s\n\ndef f():\n    return s._seal", "private"),
        ("training/planted.py", "import fathom.data.shards\nfathom.data.shards._seal({})", "private"),
        ("training/planted.py", "from fathom.data.shards import TokenDataset\nTokenDataset._open()", "private"),
    ],
)
def test_the_checks_can_see(planted, file, text, check):
    """A planted file goes through the real check, beside the real tree."""
    tree, before = planted
    (tree / file).write_text(text)
    found = complaints(check, tree)
    (tree / file).unlink()
    if (ROOT / file).exists():
        shutil.copy(ROOT / file, tree / file)
    assert found - before[check]


def test_evidence_knows_nothing_of_its_publication():
    """The lineage room beside its inner one: reports are made of evidence, not the other way round."""
    inner = "fathom.lineage.publishing"
    found = [
        one for one in imports(ROOT) if room_of(one.file) == "lineage" and one.target.startswith(inner) and not one.hint
    ]
    assert found and all(one.file.startswith(inner) for one in found)


def test_models_travel_alone():
    """Exported code is copied file by file into one folder: stems are unique, and of ours only `values.py` is imported
    from outside, which imports nothing of ours."""
    files = [path for path in (ROOT / "models").rglob("*.py") if path.stem != "__init__"]
    assert not [one for one in imports(ROOT) if one.file == "fathom.values"]
    assert {one.target for one in imports(ROOT) if room_of(one.file) == "models" != room_of(one.target)} == {
        "fathom.values"
    }
    files.append(ROOT / "values.py")
    assert len({path.stem for path in files}) == len(files)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 2 and not (node.level == 0 and (node.module or "").startswith("fathom")), path
                assert node.level == 0 or node.module, f"{path}: name the file, `from ..axes.roles import …`"


def test_the_lens_knows_no_mechanism():
    """It asks the roles: a mixer or residual of somebody else is seen as ours are."""
    rooms = ("models.mixers", "models.residuals", "models.recurrences")
    found = [one for one in imports(ROOT) if place_of(one.target) in rooms and room_of(one.file) != "models"]
    assert found and not [one for one in found if room_of(one.file) == "lens"]


OPTIONAL = {"datasets", "lm_eval", "vllm", "wandb", "trackio", "matplotlib"}
OPTIONAL |= {"peft", "fastapi", "liger_kernel", "llguidance"}


def import_all(modules):
    for module in modules:
        importlib.import_module(module)
    assert not OPTIONAL & set(sys.modules)
    import fastapi  # noqa: F401  (the control)

    assert OPTIONAL & set(sys.modules)


def test_optional_packages_stay_out():
    """Training and inference run without any of them; torch itself may bring triton."""
    ours = ("training", "inference.generate", "experiments.compare", "lens.look", "lineage")
    assert processes.run(import_all, [f"fathom.{name}" for name in ours]) == 0

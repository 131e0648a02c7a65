"""Source files to copy into an exported model, and mechanisms from other packages, added by `add_mechanism` or found
by entry point.

An export is flat, since transformers copies a checkpoint's code by the names of its files. So the name of every file in
this folder is unique, and `exported` rewrites their imports.

An export opens without Fathom and without the package of a mechanism. So a mechanism's file may only import what this
folder does: torch, transformers, the standard library, files of this folder by their full name, and siblings
(`from .shared import ...`). `travelling` returns such files.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from ..values import hints_of, storable
from .axes.roles import Mechanism
from .registry import AXES, MECHANISMS, VANILLA, late

GROUP = "fathom.mechanisms"
"""The group of entry points: each names a `Mechanism`, as `package.file:NAME`."""
FOLDER = Path(__file__).parent
STAYS = {"__init__", Path(__file__).stem}
"""Files of this folder that are not part of an export."""
BELOW = FOLDER.parent / "values.py"
"""The only file outside this folder that travels: it needs neither this folder nor torch, as its other readers do."""
FILES = {path.stem: path for path in (BELOW, *sorted(FOLDER.rglob("*.py"))) if path.stem not in STAYS}
MODULES = {
    ".".join([__name__.split(".")[0], *path.relative_to(FOLDER.parent).with_suffix("").parts]): stem
    for stem, path in FILES.items()
}
"""The file of an export that holds a module, by the module's full name."""


def add_mechanism(mechanism: Mechanism) -> None:
    """Register a mechanism of your own, so that recipes, the command line and exports know it by name.

    Registering it twice has no effect. A package can declare it by an entry point in the group `fathom.mechanisms`
    instead.

    Args:
        mechanism: The declaration, a named variable in the mechanism's file, as at the end of every file in `models/`.
    """
    name = mechanism.name
    if MECHANISMS.get(name) is mechanism:
        return
    if not name.isidentifier() or name in (VANILLA, *MECHANISMS):
        raise ValueError(f"a mechanism's name must be a Python identifier that no other mechanism has, got {name!r}")
    if mechanism.axis not in AXES:
        raise ValueError(f"mechanism {name}: axis must be one of {', '.join(AXES)}, got {mechanism.axis!r}")
    check_options(mechanism)
    files = travelling(mechanism)
    for other in MECHANISMS.values():
        theirs = {} if is_ours(other) else travelling(other)
        for file in files.keys() & theirs.keys():
            if files[file] != theirs[file]:
                raise ValueError(
                    f"mechanism {name}: {other.name} has a different file {file}; an export can hold only one"
                )
    MECHANISMS[name] = mechanism


def check_options(mechanism: Mechanism) -> None:
    """Refuse a mechanism whose options have unresolvable type hints, or types that JSON cannot store."""
    named = f"mechanism {mechanism.name}: {mechanism.options.__name__}"
    try:
        hints = hints_of(mechanism.options)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise ValueError(f"{named}: the types of the options must be known at run time: {error}") from error
    for option, hint in hints.items():
        if not storable(hint):
            raise ValueError(f"{named}.{option}: config.json cannot store values of the type {hint}")


def find_mechanisms() -> None:
    """Add the mechanisms that installed packages declare; warn about those that cannot be added."""
    for point in entry_points(group=GROUP):
        try:
            add_mechanism(point.load())
        except Exception as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            warnings.warn(f"{GROUP}: {point.name} = {point.value} is left out: {line}", stacklevel=2)


def is_ours(mechanism: Mechanism) -> bool:
    """Whether a mechanism is defined in Fathom's own `models/` folder."""
    return mechanism.build.__module__ in MODULES


def home(mechanism: Mechanism) -> Path:
    """The path of the source file that defines a mechanism's class."""
    file = getattr(sys.modules.get(mechanism.build.__module__), "__file__", None)
    if file is None or mechanism.build.__module__ == "__main__":
        raise ValueError(f"mechanism {mechanism.name}: its class must stand in a file that can be imported")
    return Path(file).resolve()


def declared_as(mechanism: Mechanism) -> str:
    """The name of the module-level variable that holds a mechanism's declaration."""
    for name, value in vars(sys.modules[mechanism.build.__module__]).items():
        if value is mechanism:
            return name
    raise ValueError(f"mechanism {mechanism.name}: {home(mechanism).name} must assign it to a name at module level")


def travelling(mechanism: Mechanism) -> dict[str, str]:
    """The source files of a mechanism from another package, by name, rewritten for an export's flat folder."""
    declared_as(mechanism)
    found: dict[str, str] = {}
    waiting = [home(mechanism)]
    while waiting:
        path = waiting.pop()
        if path.name in found:
            continue
        source = path.read_text(encoding="utf-8")
        try:
            found[path.name], siblings = flattened(source)
            if path.stem in FILES:
                raise ValueError("Fathom has a file of this name in every export; rename yours")
            if missing := [name for name in siblings if not (path.parent / f"{name}.py").is_file()]:
                raise ValueError(f"there is no {missing[0]}.py next to it")
        except (ValueError, SyntaxError) as error:
            raise ValueError(
                f"mechanism {mechanism.name}: {path.name} cannot be put into an export: {error}"
            ) from error
        waiting += [path.parent / f"{name}.py" for name in siblings]
    return found


def flattened(source: str) -> tuple[str, list[str]]:
    """Rewrite a source file's imports of `fathom.models` and of its own package as imports from the same flat
    folder."""
    lines, siblings, tree = source.splitlines(keepends=True), [], ast.parse(source)
    at_once = set(_run_on_import(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _require_known(alias.name, f"import {alias.name}")
        elif isinstance(node, ast.ImportFrom):
            module, line = node.module or "", node.lineno - 1
            says = f"from {'.' * node.level}{module} import {node.names[0].name}"
            if node.level == 1 and module.isidentifier():
                siblings.append(module)
            elif node.level == 0 and module in MODULES:
                if node in at_once and reaches_registry(MODULES[module]):
                    raise ValueError(
                        f"{says}: it imports the registry, which imports this file; use `if TYPE_CHECKING`"
                    )
                changed = re.sub(rf"\bfrom +{re.escape(module)}\b", f"from .{MODULES[module]}", lines[line], count=1)
                if changed == lines[line]:
                    raise ValueError(f"{says}: write the import at the start of a line")
                lines[line] = changed
            else:
                _require_known(module if node.level == 0 else ".", says)
    return "".join(lines), siblings


def _run_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The syntax-tree nodes that run when a file is imported, without function bodies and `TYPE_CHECKING` blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node = ast.Module(node.orelse, [])
        yield node
        yield from _run_on_import(node)


@cache
def exported(file: str) -> str:
    """The source of a file in `models/`, with its relative imports rewritten for an export's flat folder."""
    return re.sub(r"^( *from )\.+(?:\w+\.)*(?=\w+ import\b)", r"\1.", FILES[file].read_text("utf-8"), flags=re.M)


@cache
def needed(file: str) -> frozenset[str]:
    """The names of all files in `models/` that one of them imports, directly or indirectly, and its own name."""
    found, waiting = set(), [file]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += _imported(ast.walk(ast.parse(exported(name))))
    return frozenset(found)


@cache
def reaches_registry(file: str) -> bool:
    """Whether importing a file in `models/` also imports `registry.py`, which in an export imports every mechanism."""
    return file == "registry" or any(map(reaches_registry, _imported(_run_on_import(ast.parse(exported(file))))))


def _imported(nodes: Iterable[ast.AST]) -> list[str]:
    """The names of the modules that these syntax-tree nodes import relatively."""
    return [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level and node.module]


def _require_known(module: str, says: str) -> None:
    """Refuse an import in a mechanism's file that an exported model could not resolve."""
    top = module.split(".")[0]
    if top == "fathom":
        raise ValueError(f"{says}: allowed from Fathom: only `from fathom.models.FOLDER.FILE import NAME`")
    if top not in ("torch", "transformers", *sys.stdlib_module_names):
        raise ValueError(
            f"{says}: allowed imports: torch, transformers, the standard library, fathom.models, and files of the same "
            "folder by `.`"
        )


late.append(find_mechanisms)

"""The reference of the Python API: signatures, docstrings, fields and methods, read from the code."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from types import FunctionType, MethodType

import fathom
from fathom.settings import help_of
from tests.reference import table

SECTIONS = {
    "Data": ("prepare", "PrepareOptions", "data.shards.TokenDataset", "data.batches.BatchPlan"),
    "Batches": ("data.batches.evaluation_batches",),
    "Recipes and training": ("load_recipe", "Recipe", "train", "training.loop.TrainResult", "Hook"),
    "Steps, branches, probes": (
        "training.build_training",
        "training.evaluate",
        "training.branch",
        "training.probe.read_probe",
        "training.callback.FollowSteps",
    ),
    "Models": (
        *("load", "checkpoints.open.Opening", "checkpoints.open.open_checkpoint", "FathomForCausalLM", "FathomConfig"),
        *("export", "check", "checkpoints.untrusted.check_checkpoint", "checkpoints.same_logits.Check"),
    ),
    "Mechanisms and families": (
        *("add_mechanism", "models.axes.roles.Mechanism", "models.axes.roles.Cost", "models.axes.roles.ValueMixer"),
        *("models.axes.roles.Residual", "models.axes.roles.Recurrence", "testing.Conformance"),
        *("add_family", "models.hosts.layout.Layout", "checkpoints.families.family.Family"),
        *("models.recurrences.exit_gate.threshold_for",),
    ),
    "Caches": (
        *("kvcache.build_cache", "kvcache.compressed", "kvcache.METHODS", "kvcache.method.Held"),
        *("kvcache.method.Selection", "kvcache.method.Method", "kvcache.matrix.Fixed"),
    ),
    "Comparing and evaluating": ("compare", "evaluate", "EvaluationSettings"),
    "Generating and looking inside": ("generate", "Sampling", "look", "lens.page.lens_page", "kernels.use"),
    "Lineage": ("open_weights",),
    "Errors and registration": ("FathomError", "register"),
}
"""Every name that a guide imports, below `fathom`."""
LONGEST = 100
PARTS = ("Args:", "Returns:", "Raises:", "Yields:")


def found(name: str) -> object:
    """What a dotted name below `fathom` stands for."""
    home, _, last = name.rpartition(".")
    return getattr(importlib.import_module(f"fathom.{home}") if home else fathom, last)


def prose(text: str) -> str:
    """A docstring as Markdown: its lists of arguments become lists."""
    lines, inside = [], False
    for line in inspect.cleandoc(text).splitlines():
        if line in PARTS:
            lines, inside = [*lines, f"**{line}**", ""], True
        elif inside and (entry := re.match(r"    (\*{0,2}\w+)(?: \(.*?\))?: (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            inside = inside and (line.startswith("    ") or not line)
            lines.append(f"  {line.strip()}" if inside and line else line)
    return "\n".join(lines)


def first_sentence(text: str) -> str:
    """How a docstring begins."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(inspect.cleandoc(text).partition("\n\n")[0].split()))[0]


def signature(name: str, what: object) -> str:
    """A call as it is declared, an argument a line if it is long."""
    if not callable(what):
        return name
    declared = inspect.signature(what)
    kept = [_shown(one) for one in _marked(one for one in declared.parameters.values() if one.name != "self")]
    returned = declared.return_annotation
    after = "" if isinstance(what, type) or returned is inspect.Signature.empty else f" -> {_name(returned)}"
    short = f"{name}({', '.join(kept)}){after}"
    inner = ",\n".join(f"    {one}" for one in kept)
    return short if len(short) <= LONGEST else f"{name}(\n{inner},\n){after}"


def _name(annotation: object) -> str:
    """An annotation as its source has it."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _marked(given: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter | str]:
    """Parameters, with the star that begins those by keyword alone."""
    star = False
    for one in given:
        if one.kind is one.KEYWORD_ONLY and not star:
            yield "*"
        star = star or one.kind in (one.VAR_POSITIONAL, one.KEYWORD_ONLY)
        yield one


def _shown(one: inspect.Parameter | str) -> str:
    if isinstance(one, str):
        return one
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {_name(one.annotation)}"
    default = "" if one.default is one.empty else f" = {_value(one.default)}"
    return f"{stars}{one.name}{kind}{default if kind else default.replace(' ', '')}"


def _value(default: object) -> str:
    """A default as it would be typed; an ellipsis for one that has no such form."""
    return "..." if (shown := repr(default)).startswith("<") else shown


def members(what: type) -> Iterator[str]:
    """Fields of a dataclass, then methods, each with its meaning."""
    if is_dataclass(what):
        texts = help_of(what)
        rows = [
            (f"`{one.name}`", f"`{_value(one.default)}`" if one.default is not MISSING else "", texts.get(one.name, ""))
            for one in fields(what)
            if not one.name.startswith("_") and one.init and (texts.get(one.name) or one.name in vars(what))
        ]
        yield from [*table(("field", "default", "meaning"), rows), ""] if rows else []
    methods = [
        (f"`{name}{_arguments(one)}`", first_sentence(one.__doc__))
        for name, one in ((name, _plain(one)) for name, one in vars(what).items() if not name.startswith("_"))
        if one is not None and one.__doc__
    ]
    yield from [*table(("method", "what it does"), methods), ""] if methods else []


def _plain(one: object) -> FunctionType | None:
    """The function behind a method, a class method or a property."""
    one = getattr(one, "__func__", None) or getattr(one, "fget", None) or one
    return one if isinstance(one, FunctionType | MethodType) else None


def _arguments(one: FunctionType) -> str:
    names = [name for name in inspect.signature(one).parameters if name not in ("self", "cls")]
    return f"({', '.join(names)})"


def entry(name: str) -> Iterator[str]:
    """One object: heading, signature, docstring, members."""
    what = found(name)
    shown = f"fathom.{name}"
    yield from (f"### {shown}", "")
    if isinstance(what, dict):
        yield from ("A dictionary by name: " + ", ".join(f"`{one}`" for one in what) + ".", "")
        return
    if not (isinstance(what, type) and is_dataclass(what)):
        yield from ("```py", signature(shown, what), "```", "")
    own = what.__doc__ if not isinstance(what, type) else vars(what).get("__doc__")
    yield from (prose(own or ""), "")
    if isinstance(what, type):
        yield from members(what)


def api() -> str:
    """The whole page."""
    lines: list[str] = []
    for title, names in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += entry(name)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"

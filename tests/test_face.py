"""The public face: names that come when they are touched, and an import that costs nothing and changes nothing."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import fathom
from tests.inference.tiny import export_tiny

ROOT = Path(fathom.__file__).parent
HEAVY = {"torch", "transformers", "numpy", "scipy", "yaml", "rich", "huggingface_hub"}


def run(*words: str, **options: typing.Any) -> str:
    """Standard output of a Python process that ends well."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_and_registers_nothing() -> None:
    """In a script of any name: `sys.argv` is not looked at."""
    code = (
        "import sys; before = set(sys.modules); import fathom; print(*set(sys.modules) - before)\n"
        "hooks = sys.meta_path, sys.path_hooks\n"
        "print(*(h for hook in hooks for h in hook if 'fathom' in getattr(h, '__module__', '')), sep='')\n"
    )
    loaded, *hooks = run("-c", code).splitlines()
    assert not set(loaded.split()) & HEAVY and not any(hooks)
    assert {name for name in loaded.split() if name.startswith("fathom")} == {"fathom", "fathom._version"}
    unregistered = "import fathom; from transformers import AutoConfig; AutoConfig.for_model('fathom')"
    done = subprocess.run([sys.executable, "-c", unregistered], capture_output=True, text=True, timeout=300)
    assert "Unrecognized model identifier: fathom" in done.stderr


@pytest.mark.parametrize("late", [False, True], ids=["transformers first", "fathom first"])
@pytest.mark.parametrize(
    "touch", ["from fathom import FathomForCausalLM", "import fathom; fathom.register()", "import fathom.models"]
)
def test_touching_a_model_registers(touch: str, late: bool, tmp_path: Path) -> None:
    """With transformers loaded before or after, an export opens as our class without any code of its directory."""
    directory = export_tiny(tmp_path / "export")
    opening = (
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(directory)!r})\n"
        "print(type(model).__module__, type(model).__name__)"
    )
    transformers = "import transformers.models.auto"
    order = (touch, transformers) if late else (transformers, touch)
    assert run("-c", "\n".join([*order, opening])) == "fathom.models.modeling FathomForCausalLM"


def test_a_script_that_is_called_fathom(tmp_path: Path) -> None:
    script = tmp_path / "fathom"
    script.write_text(
        "import fathom\nfrom fathom import FathomForCausalLM\nfrom transformers import AutoConfig\n"
        "print(FathomForCausalLM.__name__, type(AutoConfig.for_model('fathom')).__name__)"
    )
    assert run(str(script)) == "FathomForCausalLM FathomConfig"


def test_every_name_is_there_typed_and_documented() -> None:
    for name in fathom.__all__:
        assert name in dir(fathom)
        value = getattr(fathom, name)
        if name == "__version__":
            continue
        assert value.__doc__, name
        if not isinstance(value, type):
            hints = typing.get_type_hints(value)
            arguments = value.__code__.co_varnames[: value.__code__.co_argcount + value.__code__.co_kwonlyargcount]
            assert set(arguments) <= hints.keys() and "return" in hints, name
            assert all(f"\n    {argument}: " in value.__doc__.replace("\n        ", "\n    ") for argument in arguments)
    with pytest.raises(AttributeError, match="module 'fathom' has no attribute 'trian'"):
        fathom.trian  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """The block that only they read, held against what the names turn out to be."""
    seen: dict[str, object] = {}
    for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom) and line.module
                home = importlib.import_module(line.module)
                seen |= {alias.asname or alias.name: getattr(home, alias.name) for alias in line.names}
    assert seen == {name: getattr(fathom, name) for name in fathom.__all__ if name not in ("__version__", "register")}


def test_no_name_is_a_module_s() -> None:
    """`import fathom.NAME` would put the module in the name's place."""
    taken = {path.stem for path in ROOT.iterdir()}
    assert not taken & set(fathom.__all__)
    assert "models" in taken, "the check sees folders"


def test_python_m_fathom() -> None:
    assert run("-m", "fathom", "--version") == f"fathom {fathom.__version__}"
    done = subprocess.run([sys.executable, "-m", "fathom", "tain"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("fathom: tain: no such command")

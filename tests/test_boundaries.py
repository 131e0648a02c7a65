"""Who may import whom, and what nobody imports by accident."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fathom

ROOT = Path(fathom.__file__).parent
MAY_IMPORT = {
    "models": set(),
    "kernels": {"models"},
    "kvcache": {"models"},
    "lineage": {"models"},
    "report": set(),
    "data": {"report"},
    "corpus": {"data"},
    "training": {
        "models",
        "kernels",
        "kvcache",
        "lineage",
        "report",
        "data",
        "corpus",
        "recipe",
        "export",
        "evaluation",
    },
    "evaluation": {
        "models",
        "kernels",
        "kvcache",
        "lineage",
        "report",
        "data",
        "corpus",
        "recipe",
        "export",
        "training",
    },
    "inference": {
        "models",
        "kernels",
        "kvcache",
        "lineage",
        "report",
        "data",
        "corpus",
        "recipe",
        "export",
        "evaluation",
    },
}
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Names of our own packages that a file imports, absolute and relative."""
    package = ["fathom", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found.add(".".join([*base, *([node.module] if node.module else [])]))
    return {name.split(".")[1] for name in found if name.startswith("fathom.") and not name.startswith("fathom._")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_boundaries(path):
    part = path.relative_to(ROOT).parts[0]
    if part in MAY_IMPORT:
        assert imported(path) - {part} <= MAY_IMPORT[part]


def test_models_travel_alone():
    """Exported code is copied file by file: siblings by a single dot, and nothing else of ours."""
    for path in (ROOT / "models").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1 and not (node.level == 0 and (node.module or "").startswith("fathom")), path
                assert node.level == 0 or node.module, f"{path}: name the sibling, `from .sibling import …`"


def test_jsonargparse_is_met_in_two_places():
    users = {str(p.relative_to(ROOT)) for p in FILES if "jsonargparse" in p.read_text()}
    assert users <= {"recipe.py", "cli.py"}


def test_the_check_can_see(tmp_path):
    planted = ROOT / "models" / "roles.py"
    tree = planted.read_text() + "\nfrom fathom.training import loop\n"
    assert "training" in {
        node.module.split(".")[1]
        for node in ast.walk(ast.parse(tree))
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("fathom.")
    }


def test_import_is_light():
    heavy = ["datasets", "lm_eval", "triton", "vllm", "wandb", "trackio", "matplotlib"]
    code = f"import sys, fathom; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr

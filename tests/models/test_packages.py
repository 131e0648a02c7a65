"""Mechanisms from other packages: found by name everywhere, held by the conformance suite, and carried in exports."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fathom
from fathom.checkpoints.export import export
from fathom.experiments.arms import parse_arms
from fathom.experiments.catalogue import mechanism_rows
from fathom.models import registry
from fathom.models.packages import FILES, add_mechanism, find_mechanisms, flattened, reaches_registry, travelling
from fathom.models.registry import MECHANISMS, mechanism_name
from fathom.recipe import Recipe

from . import test_mechanisms as suite
from .cases import CASES, build, config_of

MIXER = '''\
"""A share of the value below, the share being a parameter of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fathom.models.axes.roles import Mechanism, ValueMixer
from torch import nn

from .pricing import BelowOptions, cost

if TYPE_CHECKING:
    from fathom.models.axes.fields import DecoderConfig


class Below(ValueMixer):
    """v + s · ṽ of the layer below."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sign = {"add": 1, "subtract": -1}[BelowOptions.of(config).mode]
        if layer_idx:
            self.share = nn.Parameter(torch.zeros(1))

    def init_weights(self, std: float) -> None:
        if self.layer_idx:
            nn.init.zeros_(self.share)

    @staticmethod
    def source_layers(config: DecoderConfig, layer_idx: int) -> tuple[int, ...]:
        return (layer_idx - 1,) if layer_idx else ()

    def forward(self, query, key, value, sources):
        return value + self.sign * self.share * sources[1] if sources else value


OUTSIDE_BELOW = Mechanism(
    "outside_below", "mixer", "a share of the value below", "a test", Below, cost, BelowOptions, closed={}
)
'''
PRICING = '''\
"""What it costs, and its options, whose annotations are no text."""

from dataclasses import dataclass
from typing import Literal, Optional

from fathom.models.axes.roles import Cost, MixerOptions

Mode = Literal["add", "subtract"]


@dataclass(frozen=True)
class BelowOptions(MixerOptions):
    mode: Mode = "add"
    reach: int = 1
    share: Optional[float] = None
    levels: tuple[int, ...] = (1, 2)


def cost(config, visits, scalar):
    width, mixing = config.num_key_value_heads * config.head_dim, sum(bool(visit.sources) for visit in visits)
    return Cost(
        parameters=config.num_hidden_layers - 1,
        flops=2 * width * mixing,
        transient_bytes=2 * width * scalar * sum(visit.kept for visit in visits),
        io_bytes=3 * width * scalar * mixing,
    )
'''
ENTRY = "[fathom.mechanisms]\noutside_below = outside_package.mixer:OUTSIDE_BELOW\n"


def make_package(folder: Path, entry: str = ENTRY) -> Path:
    """What `pip install` of such a package leaves."""
    place, info = folder / "outside_package", folder / "outside_package-1.0.dist-info"
    place.mkdir(parents=True)
    info.mkdir()
    for name, text in (("__init__.py", ""), ("mixer.py", MIXER), ("pricing.py", PRICING)):
        (place / name).write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry)
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package on the path, and no trace of it afterwards."""
    monkeypatch.syspath_prepend(str(make_package(tmp_path / "site")))
    before = dict(MECHANISMS)
    yield tmp_path / "site" / "outside_package"
    MECHANISMS.clear()
    MECHANISMS.update(before)
    for name in [name for name in sys.modules if name.startswith("outside_package")]:
        del sys.modules[name]


@pytest.fixture
def added(package, monkeypatch):
    """Its mechanism, and a case of the conformance suite."""
    from outside_package.mixer import OUTSIDE_BELOW

    fathom.add_mechanism(OUTSIDE_BELOW)
    monkeypatch.setitem(CASES, "outside_below", ("outside_below", {}))
    return OUTSIDE_BELOW


def test_found_by_entry_point_when_a_name_is_asked_for(package, monkeypatch):
    """Not before: the package imports `fathom.models`, which may be what is being imported."""
    monkeypatch.setattr(registry, "late", [find_mechanisms])
    assert "outside_below" not in MECHANISMS and "outside_package" not in sys.modules
    assert registry.parse_mechanism("loop+outside_below") == {
        "mixer": "outside_below",
        "residual": "plain",
        "recurrence": "loop",
    }
    assert registry.late == []


def test_a_package_that_fails_is_named_and_left_out(tmp_path, monkeypatch):
    broken = "[fathom.mechanisms]\nbad = outside_package.nothing:X\n"
    monkeypatch.syspath_prepend(str(make_package(tmp_path / "broken", broken)))
    with pytest.warns(UserWarning, match="bad = outside_package.nothing:X is left out: ModuleNotFoundError"):
        find_mechanisms()
    for name in [name for name in sys.modules if name.startswith("outside_package")]:
        del sys.modules[name]


def test_its_name_works_everywhere(added, recipe: Recipe):
    chosen = recipe.override("model.mixer=outside_below")
    assert mechanism_name(chosen.config()) == "outside_below"
    arms = parse_arms("vanilla,outside_below,both=loop+outside_below;model.recurrence_options.trips=2")
    assert arms[2].recipe(recipe).config().mixer == "outside_below"
    (row,) = [row for row in mechanism_rows(recipe.config()) if row.name == "outside_below"]
    assert row.parameters == 1 and row.summary == "a share of the value below"
    add_mechanism(added)  # twice is once


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mode": "mean"}, "mode must be one of add, subtract, got 'mean'"),
        ({"reach": 2.5}, "reach must be an integer, got 2.5"),
        ({"reach": True}, "reach must be an integer, got True"),
        ({"share": "half"}, "share must be a number or null, got 'half'"),
        ({"share": float("nan")}, "share must be a number, got nan"),
        ({"levels": [1, "2"]}, "levels must be a list of integers, got [1, '2']"),
        ({"more": 1}, "more is not an option of outside_below (it has: mode, reach, share, levels)"),
    ],
)
def test_its_options_have_the_types_that_it_declares(added, given, says):
    """A Literal by an alias, and annotations that are classes and not text."""
    fits = {"mode": "subtract", "reach": 2, "share": 1, "levels": [3]}
    assert config_of("outside_below", mixer_options=fits).mixer_options == fits
    assert config_of("outside_below").mixer_options == {"mode": "add", "reach": 1, "share": None, "levels": [1, 2]}
    with pytest.raises(ValueError) as refused:
        config_of("outside_below", mixer_options=given)
    assert str(refused.value) == f"mixer_options.{says}"


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        ("'Elsewhere'", "BelowOptions: the types of the options must be known at run time: name 'Elsewhere' is not"),
        ("set[int]", "BelowOptions.reach: config.json cannot store values of the type set[int]"),
        ("dict[int, float]", "BelowOptions.reach: config.json cannot store values of the type dict[int, float]"),
    ],
)
def test_options_that_no_configuration_can_hold_are_refused_when_it_is_added(package, annotation, says):
    (package / "pricing.py").write_text(PRICING.replace("reach: int", f"reach: {annotation}"))
    from outside_package.mixer import OUTSIDE_BELOW

    with pytest.raises(ValueError) as refused:
        add_mechanism(OUTSIDE_BELOW)
    assert str(refused.value).startswith(f"mechanism outside_below: {says}") and "outside_below" not in MECHANISMS


def test_the_cheap_half_of_the_conformance_suite(added):
    """The rest stands behind `slow`."""
    for check in (
        *(suite.test_left_padded_rows_are_single_rows, suite.test_prefix_invariance),
        *(suite.test_every_parameter_gets_a_gradient, suite.test_packed_documents_are_single_rows),
        *(suite.test_declared_cost_is_measured, suite.test_the_start_is_exact_where_declared),
    ):
        check("outside_below")


def foreign_imports(directory: Path) -> list[str]:
    """Imports that would not be there without Fathom and the package."""
    found = []
    for path in directory.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                there = node.level == 1 and (directory / f"{node.module}.py").exists()
                if not there and (node.level or node.module.split(".")[0] in ("fathom", "outside_package")):
                    found.append(f"{path.name}: {node.module}")
    return found


def test_its_file_travels(added, package, tmp_path):
    directory = export(build(config_of("outside_below")), tmp_path / "export")
    assert {"mixer.py", "pricing.py", "registry.py", "modeling.py"} <= {p.name for p in directory.iterdir()}
    assert "packages.py" not in {p.name for p in directory.iterdir()}
    assert foreign_imports(directory) == []
    (directory / "mixer.py").write_text((package / "mixer.py").read_text())
    assert len(foreign_imports(directory)) == 2, "what was not rewritten is seen"
    ours = export(build(config_of("vanilla")), tmp_path / "ours")
    assert not (ours / "mixer.py").exists() and "mixer import" not in (ours / "registry.py").read_text()


def test_flattened():
    source = "from fathom.models.axes.roles import (\n    Cost,\n)\nfrom .pricing import cost\nimport math, torch.nn\n"
    text, siblings = flattened(source)
    assert text == source.replace("fathom.models.axes", "") and siblings == ["pricing"]


@pytest.mark.parametrize(
    ("file", "name"),
    [("configuration", "FathomConfig"), ("trips.slots", "plan"), ("pretrained", "FathomPreTrainedModel")],
)
def test_an_export_that_would_not_open_is_refused(package, file, name):
    """The export's registry imports the mechanism's file, which must not wait for the registry."""
    line, mixer = f"from fathom.models.{file} import {name}\n", package / "mixer.py"
    text = mixer.read_text()
    assert flattened(text.replace("if TYPE_CHECKING:\n", f"if TYPE_CHECKING:\n    {line}")), "for type checkers it may"
    mixer.write_text(text.replace("import torch\n", f"import torch\n{line}", 1))
    from outside_package.mixer import OUTSIDE_BELOW

    with pytest.raises(ValueError) as refused:
        add_mechanism(OUTSIDE_BELOW)
    assert str(refused.value).startswith("mechanism outside_below: mixer.py cannot be put into an export: ")
    assert f"{line.strip()}: it imports the registry" in str(refused.value) and "\n" not in str(refused.value)
    assert "outside_below" not in MECHANISMS


def test_what_reaches_the_registry():
    """The declared cycle, found in this folder: of its files, only those that a mechanism's file cannot use."""
    found = set(filter(reaches_registry, FILES))
    assert {"registry", "configuration", "slots", "modeling"} <= found
    assert not found & {"roles", "blend", "schedule", "pondering", "rms_norm", "numerics", "arithmetic"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import numpy as np", "import numpy: allowed imports: torch, transformers, the standard library"),
        ("from scipy.stats import norm", "from scipy.stats import norm: allowed imports: torch"),
        (
            "from fathom.models import FathomConfig",
            "allowed from Fathom: only `from fathom.models.FOLDER.FILE import NAME`",
        ),
        ("from fathom.models.packages import add_mechanism", "allowed from Fathom: only"),
        ("import fathom", "import fathom: allowed from Fathom: only"),
        ("from fathom.training.loop import train", "allowed from Fathom: only"),
        ("from ..elsewhere import x", "from ..elsewhere import x: allowed imports: torch"),
        ("from . import pricing", "from . import pricing: allowed imports: torch"),
        ("from .gone import x", "there is no gone.py next to it"),
        (
            "from .numerics import x",
            "numerics.py cannot be put into an export: Fathom has a file of this name in every export",
        ),
        ("x = 1; from fathom.models.axes.roles \\\n  import Cost", None),
        ("from \\\n  fathom.models.axes.roles import Cost", "write the import at the start of a line"),
    ],
)
def test_what_cannot_travel_is_refused_when_it_is_added(package, line, says):
    (package / "numerics.py").write_text("x = 1\n")
    file = package / "mixer.py"
    inside = "".join(f"    {part}\n" for part in line.splitlines())
    file.write_text(f"{file.read_text()}\n\ndef later():\n{inside}")
    from outside_package.mixer import OUTSIDE_BELOW

    if says is None:
        assert "from .roles \\\n      import Cost" in travelling(OUTSIDE_BELOW)["mixer.py"]
        return
    with pytest.raises(ValueError) as refused:
        add_mechanism(OUTSIDE_BELOW)
    assert str(refused.value).startswith("mechanism outside_below: ") and says in str(refused.value)
    assert "\n" not in str(refused.value) and "outside_below" not in MECHANISMS


def test_names_and_places(added, package):
    from dataclasses import replace

    for changes, says in (
        ({"name": "loop"}, "a Python identifier that no other mechanism has, got 'loop'"),
        ({"name": "outside_below"}, "a Python identifier that no other mechanism has"),
        ({"name": "a+b"}, "a Python identifier that no other mechanism has, got 'a\\+b'"),
        ({"name": "vanilla"}, "a Python identifier that no other mechanism has"),
        ({"name": "other", "axis": "width"}, "mechanism other: axis must be one of mixer, residual, recurrence"),
        ({"name": "other"}, "mechanism other: mixer.py must assign it to a name at module level"),
    ):
        with pytest.raises(ValueError, match=says):
            add_mechanism(replace(added, **changes))
    here = type("Here", (added.build,), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="its class must stand in a file that can be imported"):
        add_mechanism(replace(added, name="here", build=here))


def test_two_files_of_one_name(added, tmp_path, monkeypatch):
    """Fine while they say the same."""
    other = tmp_path / "other" / "outside_package_too"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    renamed = MIXER.replace('"outside_below"', '"outside_too"')
    (other / "mixer.py").write_text(renamed)
    (other / "pricing.py").write_text(PRICING)
    monkeypatch.syspath_prepend(str(other.parent))
    from outside_package_too.mixer import OUTSIDE_BELOW

    with pytest.raises(ValueError, match=r"outside_below has a different file mixer\.py; an export can hold only one"):
        add_mechanism(OUTSIDE_BELOW)


@pytest.mark.slow
def test_the_whole_conformance_suite_and_an_export(tmp_path, corpus):
    """In processes that find the package by its entry point, and one that has neither it nor Fathom."""
    root = Path(__file__).parents[2]
    site = make_package(tmp_path / "site")
    paths = [str(site), str(root), str(Path(fathom.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def run(*words, **changes):
        done = subprocess.run([sys.executable, *words], env={**environment, **changes}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    words = ("-m", "pytest", str(root / "tests/models/test_mechanisms.py"), "-p", "no:xdist", "-p", "no:cacheprovider")
    said = run(*words, "-k", "outside_below")
    assert int(said.split(" passed")[0].split()[-1]) > 20 and "failed" not in said
    assert '"outside_below"' in run("-m", "fathom", "mechanisms", "--json")
    short = (
        "train.steps=2",
        "model.vocab_size=304",
        f"data.directory={corpus}",
        "train.device=cpu",
        "evaluate.every=0",
    )
    short += ("train.tokens_per_step=512", "train.micro_batch=2", "evaluate.tokens=512", "model.mixer=outside_below")
    short += ("model.mixer_options.mode=subtract",)
    run("-m", "fathom", "train", "tiny", *short, "--run", str(tmp_path / "run"))
    code = (
        "import sys, torch; sys.modules['fathom'] = None\n"
        "from transformers import AutoModelForCausalLM as A\n"
        "m = A.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "mixer = m.model.layers[1].self_attn.mixer\n"
        "print(float(m(torch.tensor([[5, 6, 7]])).logits.double().sum()), m.config.mixer, mixer.sign)"
    )
    modules = str(tmp_path / "modules")
    alone = run("-c", code, str(tmp_path / "run" / "model"), PYTHONPATH="", HF_MODULES_CACHE=modules)
    here = run(
        "-c", code.replace("sys.modules['fathom'] = None", "import fathom.models"), str(tmp_path / "run" / "model")
    )
    assert alone == here and alone.split()[1:] == ["outside_below", "-1"]

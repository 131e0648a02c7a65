"""The public face: names that come when they are touched, and an import that costs nothing and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import fathom
from fathom.models.registry import mechanism_name
from fathom.recipe import Recipe
from fathom.report.results import to_json
from tests.tiny import export_tiny

ROOT = Path(fathom.__file__).parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ARMS = "vanilla,depth_attention"
SHORT = (
    *("model.vocab_size=304", "train.steps=2", "train.tokens_per_step=512", "train.micro_batch=2", "train.device=cpu"),
    *("train.compile=false", "evaluate.tokens=512", "track.display=none"),
)
HEAVY = {"torch", "transformers", "numpy", "scipy", "yaml", "rich", "huggingface_hub", "datasets", "lm_eval", "vllm"}
HEAVY |= {"wandb", "trackio", "matplotlib"}


def run(*words: str, **options: typing.Any) -> str:
    """Standard output of a Python process that ends well."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_and_registers_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import fathom; print(*set(sys.modules) - before)\n"
        "hooks = sys.meta_path, sys.path_hooks\n"
        "print(*(h for hook in hooks for h in hook if 'fathom' in getattr(h, '__module__', '')), sep='')\n"
    )
    loaded, *hooks = run("-c", code).splitlines()
    assert not set(loaded.split()) & HEAVY and not any(hooks)
    assert {name for name in loaded.split() if name.startswith("fathom")} == {"fathom", "fathom._version"}


OPENING = (
    "from transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained({!r})\n"
    "print(type(model).__module__, type(model).__name__)"
)
OURS_OPENED = "fathom.models.modeling FathomForCausalLM"


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "touch", ["from fathom import FathomForCausalLM", "import fathom; fathom.register()", "import fathom.models"]
)
def test_touching_a_model_registers(touch: str, late: bool, tmp_path: Path) -> None:
    """With transformers loaded before or after, an export opens as our class without any code of its directory."""
    transformers = "import transformers.models.auto"
    order = (touch, transformers) if late else (transformers, touch)
    opening = OPENING.format(str(export_tiny(tmp_path / "export")))
    assert run("-c", "\n".join([*order, opening])) == OURS_OPENED


def test_every_name_is_there_and_documented() -> None:
    assert all(getattr(fathom, name).__doc__ for name in fathom.__all__)
    with pytest.raises(AttributeError, match="module 'fathom' has no attribute 'trian'"):
        fathom.trian  # noqa: B018


def test_a_name_where_an_object_belongs(tmp_path: Path) -> None:
    """A recipe's name is the recipe, one text is one text, and what cannot be meant is one line."""
    with pytest.raises(fathom.FathomError, match=r"data\.directory=data/tiny: no such directory"):
        fathom.train("tiny", tmp_path / "run")
    with pytest.raises(fathom.FathomError, match="the recipe comes first"):
        fathom.train(str(tmp_path), fathom.load_recipe("tiny"))
    with pytest.raises(fathom.FathomError, match=r"overrides=.*allowed: a list of strings"):
        fathom.load_recipe("tiny", "train.steps=2")
    with pytest.raises(fathom.FathomError, match=r"nowhere: no such file|nowhere: .*(no such|nothing)"):
        fathom.evaluate(export_tiny(tmp_path / "model"), perplexity=str(tmp_path / "nowhere"))
    with pytest.raises(fathom.FathomError, match=r"fathom\.load\(DIRECTORY\)"):
        fathom.generate("runs/mine", "gpt2", "It was")


@pytest.mark.slow
def test_from_a_corpus_to_a_score(corpus: Path, tmp_path: Path) -> None:
    """The names as a script uses them, one after the other."""
    recipe = fathom.load_recipe("tiny", [*SHORT, f"data.directory={corpus}"])
    assert fathom.train(recipe, tmp_path / "run").finished
    model, tokenizer = fathom.load(tmp_path / "run", "cpu")
    assert isinstance(model, fathom.FathomForCausalLM) and not model.training
    assert fathom.generate(model, tokenizer, "the depth", fathom.Sampling(4, temperature=0)).tokens <= 4
    settings = fathom.EvaluationSettings(device="cpu", limit=2)
    report = fathom.evaluate([tmp_path / "run"], settings, perplexity=[str(corpus)])
    assert report.checkpoints["run"].perplexity
    assert fathom.look(model, tokenizer, "the depth of").tokens
    assert fathom.open_weights(tmp_path / "run" / "model").has("q", 0)
    written = fathom.export(model, tmp_path / "export", tokenizer)
    assert torch.equal(fathom.load(written, "cpu")[0].lm_head.weight, model.lm_head.weight)


@pytest.mark.slow
def test_comparing_from_a_script(small: Recipe, tmp_path: Path) -> None:
    """And the best arm of what it made."""
    report = fathom.compare(small.override("train.export=true", "train.steps=2"), ARMS, tmp_path, seeds=1, pairs=0)
    assert [arm.name for arm in report.arms] == ARMS.split(",")
    assert json.loads(to_json(report)) == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    model, _ = fathom.load(tmp_path, "cpu")
    best = min(report.arms, key=lambda arm: arm.loss).name
    assert mechanism_name(model.config) == best


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, str]:
    """The environment of a process without a network, whose Hub cache holds `org/tiny` as the Hub lays it out."""
    home = tmp_path / "hub" / "models--org--tiny"
    snapshot = home / "snapshots" / COMMIT
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(export_tiny(tmp_path / "export").iterdir())):
        shutil.copy(path, home / "blobs" / str(number))
        (snapshot / path.name).symlink_to(home / "blobs" / str(number))
    return {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_a_script_that_is_called_fathom(cached: dict[str, str], tmp_path: Path) -> None:
    """Importing us registers nothing, whatever `sys.argv` is, and touching a model does: an export opens as ours
    without any code of its directory. A name on the Hub loads with or without a revision; one that is not to be had is
    one line, and a directory goes first."""
    script = tmp_path / "fathom"
    script.write_text(
        "import fathom, os\nfrom transformers import AutoConfig\n"
        "try: AutoConfig.for_model('fathom')\n"
        "except ValueError as error: print(error)\n"
        "from fathom import FathomForCausalLM\n"
        + OPENING.format(str(tmp_path / "export"))
        + "\nprint(FathomForCausalLM.__name__, type(AutoConfig.for_model('fathom')).__name__)\n"
        "from fathom.errors import FathomError\n"
        f"for name in ('org/tiny', 'org/tiny@{COMMIT}'):\n"
        "    model, tokenizer = fathom.load(name, 'cpu'); print(type(model).__name__, len(tokenizer) > 1)\n"
        "for name in ('org/absent', 'org/tiny@other'):\n"
        "    try: fathom.load(name)\n"
        "    except FathomError as error: print(error)\n"
        "os.makedirs('org/tiny')\n"
        "try: fathom.load('org/tiny')\n"
        "except FathomError as error: print(error)\n"
    )
    before, *ours, first, second, absent, other, directory = run(str(script), env=cached, cwd=tmp_path).splitlines()
    assert before.startswith("Unrecognized model identifier: fathom")
    assert ours == [OURS_OPENED, "FathomForCausalLM FathomConfig"]
    assert first == second == "FathomForCausalLM True"
    assert absent.startswith("org/absent: no such directory, and the Hub (")
    assert other.startswith("org/tiny@other: ")
    assert directory.startswith("org/tiny: neither a model directory")


def test_no_name_is_a_module_s() -> None:
    """`import fathom.NAME` would put the module in the name's place."""
    taken = {path.stem for path in ROOT.iterdir()}
    assert not taken & set(fathom.__all__)
    assert "models" in taken, "the check sees folders"


def test_python_m_fathom() -> None:
    done = subprocess.run([sys.executable, "-m", "fathom", "tain"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("fathom: tain: no such command")


def test_an_argument_of_another_kind_is_one_line(tmp_path: Path) -> None:
    """A path serves where its name does; what cannot be read is refused by an error that says what is wanted."""
    model, tokenizer = fathom.load(export_tiny(tmp_path / "model"), "cpu")
    text = tmp_path / "text.txt"
    text.write_text("A deep sea.\n" * 9)
    fathom.prepare(text, tmp_path / "data", tokenizer=tmp_path / "model", held_out=0.0, workers=1)
    assert fathom.EvaluationSettings(perplexity=str(text)).perplexity == (str(text),)
    for given, wanted in ((None, ()), (text, (str(text),))):  # a command without --perplexity gives None
        assert fathom.EvaluationSettings(perplexity=given).perplexity == wanted  # type: ignore[arg-type]
    scores = fathom.evaluate(
        (path for path in [tmp_path / "model"]), fathom.EvaluationSettings(device="cpu"), perplexity=text
    )
    assert all(one.perplexity for one in scores.checkpoints.values())
    wrong = {
        "evaluate takes names and directories; export a FathomForCausalLM": lambda: fathom.evaluate([model]),  # type: ignore[list-item]
        "export takes a model of Fathom, got a Linear": lambda: fathom.export(torch.nn.Linear(2, 2), tmp_path / "out"),  # type: ignore[arg-type]
        "generate takes a model and a tokenizer": lambda: fathom.generate(model, None, "A"),  # type: ignore[arg-type]
        "recipe must be a Recipe, its file or name, got {}": lambda: fathom.train({}, tmp_path / "run"),  # type: ignore[arg-type]
        "tokenizer must be a path or a name": lambda: fathom.prepare(text, tmp_path / "out", tokenizer=tokenizer),  # type: ignore[arg-type]
    }
    for says, call in wrong.items():
        with pytest.raises(fathom.FathomError) as caught:
            call()
        assert says in str(caught.value)
    assert not (tmp_path / "out").exists()

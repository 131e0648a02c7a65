"""Recipes: what is wrong is said in one line, and what is written is read back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.errors import SettingsError
from fathom.models.cost import cache_bytes_per_token
from fathom.models.recurrences.looping import Loop
from fathom.models.trips.slots import plan
from fathom.recipe import (
    Data,
    KVCache,
    Optim,
    Recipe,
    Track,
    Train,
    describe,
    differences,
    load_recipe,
    parse_recipe,
)
from fathom.settings import convert, packaged_recipes, read_values
from fathom.training.estimate import Estimate, estimate
from fathom.training.optimizer import OPTIMIZERS
from fathom.values import allowed

RECIPES = Path(__file__).parent.parent / "recipes"
PAPER = {
    "360m": 360_672_192,
    "500m": 498_165_888,
    "710m": 716_068_096,
    "1.5b": 1_343_774_208,
    "3b": 2_747_998_208,
}
RECURRENCES = ("loop", "ponder", "ponder2", "ponder3", "adaponder", "latent_cot")
MECHANISMS = [
    ("mixer", "depth_attention"),
    *(("residual", name) for name in ("denseformer", "attention_residuals", "hyper_connections")),
]


@cache
def cost_of(name: str) -> Estimate:
    """The cost of a recipe, for all that ask."""
    return estimate(load_recipe(name))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=abc", "optim.lr=abc: allowed: a number"),
        ("optim.lr=-1", "optim.lr=-1.0: allowed: a positive number"),
        ("optim.lr=null", "optim.lr=null: allowed: a number"),
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean optim.lr?"),
        ("lora.colour=1", "lora.colour: unknown key; allowed: rank, alpha, dropout, targets, whole, mechanisms"),
        ("optm.lr=1", "optm: unknown key; did you mean optim?"),
        ("optim.name=sgd", f"optim.name=sgd: allowed: one of {', '.join(OPTIMIZERS)}"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: allowed: a list of 2 numbers"),
        ("train.steps=0", "train.steps=0: allowed: 1 or more"),
        ("train.steps=2.5", "train.steps=2.5: allowed: an integer"),
        ("train.compile=maybe", "train.compile=maybe: allowed: true or false"),
        (
            "train.tokens_per_step=1000",
            "train.tokens_per_step=1000: allowed: a multiple of data.sequence_length=2048",
        ),
        ("track.backends=[abacus]", "track.backends=[abacus]: allowed: any of wandb, trackio, tensorboard"),
        ("optim", "optim: an override is written key=value, as in optim.lr=3e-4"),
        ("model=3", "model=3: allowed: a mapping of names to any value"),
    ],
)
def test_errors(override: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_recipe({}, [override])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(optim=Optim(lr=-1.0)), "optim.lr=-1.0: allowed: a positive number"),
        (lambda: Optim(lr=float("nan")), "optim.lr=nan: allowed: a finite number"),
        (lambda: Optim(lr=float("inf")), "optim.lr=inf: allowed: a finite number"),
        (lambda: Optim(betas=(0.9, float("nan"))), "optim.betas=[0.9, nan]: allowed: a finite number"),
        (lambda: Optim(lr="fast"), "optim.lr=fast: allowed: a number"),  # type: ignore[arg-type]
        (lambda: Train(steps=0), "train.steps=0: allowed: 1 or more"),
        (lambda: Track(peak_flops=-1.0), "track.peak_flops=-1.0: allowed: a positive number, or null"),
        (lambda: KVCache(method="freqkv"), "kvcache.window=null: kvcache.method=freqkv needs it"),
        (lambda: Recipe(data=Data(sequence_length=7)), "train.tokens_per_step=524288: allowed: a multiple of"),
        (lambda: Recipe(optim={"lr": 1}), "optim={lr: 1}: expected keys: name, lr"),  # type: ignore[arg-type]
        (lambda: dataclasses.replace(Recipe(), model=[1]), "model=[1]: allowed: a mapping of names to any value"),
    ],
)
def test_what_is_built_in_python_is_checked_too(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_values_built_in_python_become_what_their_types_say() -> None:
    assert Optim(lr=1, betas=[0.5, 0.9]) == Optim(lr=1.0, betas=(0.5, 0.9))  # type: ignore[arg-type]
    assert type(Optim(lr=1).lr) is float


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hiden_size=8", "model.hiden_size: unknown key; did you mean model.hidden_size?"),
        ("model.colour=8", "model.colour: unknown key; allowed: "),
        ("model.hidden_size=wide", "hidden_size"),
        ("model.mixer=blender", "mixer must be one of none, depth_attention"),
        ("model.mixer_options={stride: 2}", "mixer_options.stride is not an option of none"),
        ("model.num_key_value_heads=7", "must be a multiple of num_key_value_heads"),
        ("model.from_pretrained=/nowhere", "model.from_pretrained=/nowhere: neither a directory with a config.json"),
        ("data.sequence_length=4096", "at most model.max_position_embeddings=2048"),
    ],
)
def test_errors_in_the_model_block(override: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(RECIPES / "500m.yaml", [override]).config()
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_values_of_yaml() -> None:
    recipe = parse_recipe({"optim": {"lr": "3e-4"}}, ["optim.eps=1e-9", "optim.clip=null", "model.rms_norm_eps=1e-5"])
    assert (recipe.optim.lr, recipe.optim.eps, recipe.optim.clip) == (3e-4, 1e-9, None)
    assert recipe.model == {"rms_norm_eps": 1e-5}


GOOD = [
    (int, 3, 3),
    (int, "3", 3),
    (int, "1_000", 1000),
    (float, 3, 3.0),
    (float, "3e-4", 3e-4),
    (bool, "true", True),
    (bool, False, False),
    (str, "true", "true"),
    (str | None, "null", "null"),
    (int | None, "null", None),
    (int | None, None, None),
    (float | str, "3", 3.0),
    (Literal["3", "x"], "3", "3"),
    (Path | None, "a/b", Path("a/b")),
    (tuple[float, float], [1, "2"], (1.0, 2.0)),
    (tuple[float, float], "[1, 2]", (1.0, 2.0)),
    (tuple[str, ...], [], ()),
    (tuple[str, ...], "wandb", ("wandb",)),
    (Sequence[str], ("a", "b"), ["a", "b"]),
]
BAD = [
    (int, 3.0, "an integer"),
    (int, True, "an integer"),
    (int, "3.5", "an integer"),
    (int, "", "an integer"),
    (float, "wide", "a number"),
    (float, False, "a number"),
    (bool, 1, "true or false"),
    (str, 5, "text"),
    (int | None, [], "an integer or null"),
    (Literal["x", "y"], "z", "one of x, y"),
    (tuple[float, float], [1], "a list of 2 numbers"),
    (tuple[float, float], [1, None], "a list of 2 numbers"),
    (tuple[str, ...], [3], "a list of names"),
    (tuple[int, ...], "many", "a list of integers"),
    (tuple[float, ...], ["x"], "a list of numbers"),
    (tuple[Literal["x", "y"], ...], ["z"], "a list of names, of x, y"),
    (tuple[dict[str, float], ...], 3, "a list of mappings"),
    (Path, 3, "a path"),
]


@pytest.mark.parametrize(("hint", "value", "expected"), GOOD, ids=str)
def test_values_become_what_the_hint_says(hint: Any, value: Any, expected: Any) -> None:
    made = convert(hint, value)
    assert made == expected and type(made) is type(expected)


@pytest.mark.parametrize(("hint", "value", "words"), BAD, ids=str)
def test_other_values_are_refused(hint: Any, value: Any, words: str) -> None:
    with pytest.raises(ValueError):
        convert(hint, value)
    assert allowed(hint) == words


def test_overrides_reach_into_options() -> None:
    recipe = load_recipe(RECIPES / "500m.yaml", ["model.mixer=depth_attention", "model.mixer_options.stride=4"])
    assert recipe.config().mixer_options["stride"] == 4


def test_a_mixture_and_groups_are_replaced_as_a_whole(tmp_path: Path) -> None:
    """Or a mixture of one collection keeps the shares of those that it leaves out."""
    recipe = parse_recipe({}, ["data.mixture={web: 0.8, papers: 0.2}", "optim.groups={norm: {lr: 2}}"])
    assert recipe.override("data.mixture={papers: 1}").data.mixture == {"papers": 1}
    assert recipe.override("data={mixture: {papers: 1}}").data.mixture == {"papers": 1}
    assert recipe.override("data.mixture.papers=1").data.mixture == {"web": 0.8, "papers": 1}
    assert recipe.override("optim.groups={}").optim.groups == {}
    (tmp_path / "below.yaml").write_text(recipe.to_yaml())
    (tmp_path / "above.yaml").write_text("base: below.yaml\ndata: {mixture: {code: 1}}\n")
    assert load_recipe(tmp_path / "above.yaml").data.mixture == {"code": 1}


def test_base(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("optim: {lr: 1, eps: 1e-6}\nmodel: {hidden_size: 8}\n")
    (tmp_path / "above.yaml").write_text("base: below.yaml\noptim: {lr: 2}\n")
    recipe = load_recipe(tmp_path / "above.yaml")
    assert (recipe.optim.lr, recipe.optim.eps, recipe.model["hidden_size"]) == (2.0, 1e-6, 8)
    (tmp_path / "below.yaml").write_text("base: above.yaml\n")
    with pytest.raises(SettingsError, match="refers back to the file itself"):
        load_recipe(tmp_path / "above.yaml")
    with pytest.raises(SettingsError, match="no such file"):
        load_recipe(tmp_path / "missing.yaml")
    (tmp_path / "above.yaml").write_text("base: missing.yaml\n")
    with pytest.raises(SettingsError, match=r"above\.yaml: base: .*missing\.yaml: no such file"):
        load_recipe(tmp_path / "above.yaml")


def test_recipes_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {name: path.resolve() for name, path in packaged_recipes().items()} == {
        path.relative_to(RECIPES).as_posix().removesuffix(".yaml"): path for path in RECIPES.rglob("*.yaml")
    }
    assert {"tiny", "specialise/continue", "ladders/evening"} <= packaged_recipes().keys()
    assert load_recipe("1.5b") == load_recipe(RECIPES / "1.5b.yaml")
    (tmp_path / "tiny").write_text("train: {steps: 3}\n")
    assert load_recipe("tiny").train.steps == 3, "a file goes first"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("6om", "6om: no such recipe; did you mean 60m?"),
        ("recipes/60m.yml", "recipes/60m.yml: no such file; did you mean 60m?"),
        ("colossal", "colossal: no such recipe; `fathom recipes` lists them"),
    ],
)
def test_a_misspelt_recipe(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as caught:
        load_recipe(name)
    assert str(caught.value) == words


@pytest.mark.parametrize("name", ["60m_pondering", "tiny_grid", "specialise/h200_base"])
def test_a_copy_stands_on_the_same_base(name: str, tmp_path: Path) -> None:
    """Wherever it lies; a base beside it goes first."""
    copy = tmp_path / "folder" / "copy.yaml"
    copy.parent.mkdir()
    copy.write_text(packaged_recipes()[name].read_text(encoding="utf-8"), encoding="utf-8")
    assert load_recipe(copy) == load_recipe(name)
    base = copy.parent / yaml.safe_load(copy.read_text(encoding="utf-8"))["base"]
    base.resolve().write_text("train: {seed: 7}\n")
    assert load_recipe(copy).train.seed == 7


@settings(max_examples=20, deadline=None)
@given(
    lr=st.floats(1e-12, 1e3),
    eps=st.floats(1e-20, 1),
    clip=st.none() | st.floats(1e-6, 1e6),
    steps=st.integers(1, 10**9),
    project=st.text(min_size=1),
    backends=st.lists(st.sampled_from(["wandb", "trackio", "tensorboard"]), unique=True),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    lr: float,
    eps: float,
    clip: float | None,
    steps: int,
    project: str,
    backends: list[str],
) -> None:
    values = {"optim": {"lr": lr, "eps": eps, "clip": clip}, "train": {"steps": steps}}
    recipe = parse_recipe({**values, "track": {"project": project, "backends": backends}})
    path = tmp_path_factory.mktemp("recipes") / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(path) == recipe


@pytest.mark.parametrize("project", ["\x85", "a\u2028b", "é\u2029", "café", "null", "5", "1e-3", "0E0"])
def test_text_is_read_back_as_it_was(project: str, tmp_path: Path) -> None:
    """Unicode's own line breaks too."""
    recipe = parse_recipe({"track": {"project": project}})
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert project != "café" or "café" in recipe.to_yaml()


def test_the_order_of_a_mixture_is_a_difference() -> None:
    """The collections of equal shares take turns in this order, and each has the seed of its place."""
    phases = "data.phases=[{at: 5, mixture: {a: 1, b: 1}}]"
    one = parse_recipe({}, ["data.mixture={a: 0.5, b: 0.5}", phases])
    assert differences(one, one.override("data.mixture={b: 0.5, a: 0.5}")) == ["data.mixture"]
    assert differences(one, one.override("data.mixture={b: 0.6, a: 0.5}")) == ["data.mixture.b"]
    assert differences(one, one.override("data.phases=[{at: 5, mixture: {b: 1, a: 1}}]")) == ["data.phases"]


def test_differences() -> None:
    a = parse_recipe({"model": {"mixer": "none"}})
    b = a.override("optim.lr=1", "model.mixer_options.stride=2", "train.micro_batch=1", "parallel.name=fsdp")
    assert differences(a, b) == ["optim.lr", "model.mixer_options.stride"] or set(differences(a, b)) == {
        "optim.lr",
        "model.mixer_options.stride",
    }
    assert differences(a, a) == []


def test_every_key_is_explained() -> None:
    assert all(text for _, _, _, text in describe())


@pytest.mark.quick("500m_looped", "60m*", "demo", "llama_410m", "pythia_70m", "tiny", "tiny_*grid", "tiny_ponder2")
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes(path: Path) -> None:
    """Each is valid and has a row on the page, with its cost."""
    recipe, cost = load_recipe(path), cost_of(path.stem)
    assert recipe == parse_recipe(recipe.to_dict())
    least, mean, most = cost.training_multiple
    assert 1 <= least <= mean <= most < 40
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{path.name}` \| ([\d,]+|the checkpoint's) \| ([\d.]+) ([MB]) \|", page, re.M)
    digits = len(row[1].partition(".")[2])
    assert row[0] in (f"{cost.parameters:,}", "the checkpoint's")
    assert f"{cost.tokens / {'M': 1e6, 'B': 1e9}[row[2]]:.{digits}f}" == row[1]


def test_one_fair_set_of_defaults() -> None:
    recipes = [load_recipe(path) for path in RECIPES.glob("*.yaml")]
    pondering = [recipe for recipe in recipes if recipe.model.get("output_init") == "depth"]
    for recipe in pondering:
        config = recipe.config()
        assert config.embedding_scale == pytest.approx((2.5 * config.hidden_size) ** 0.5, rel=1e-3)
        assert config.initializer_range == pytest.approx((0.4 / config.hidden_size) ** 0.5, rel=1e-3)
        assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-6, False)
        assert (recipe.optim.name, recipe.optim.weight_decay) == ("adamw", 0.1)
    assert len(pondering) > 10


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("name", ["60m_pondering", "llama_410m"])
def test_every_recurrence_is_one_override(name: str, recurrence: str) -> None:
    assert load_recipe(name, [f"model.recurrence={recurrence}"]).config().recurrence == recurrence


@pytest.mark.parametrize("size", PAPER)
def test_sizes_of_the_paper(size: str) -> None:
    recipe = load_recipe(RECIPES / f"{size}.yaml")
    cost = cost_of(size)
    assert cost.parameters == PAPER[size]
    assert cost.tokens == 32_768_000_000
    assert recipe.rows_per_step == 1024 and recipe.optim.lr == (1.5e-3 if size == "360m" else 1e-3)


@pytest.mark.parametrize(("axis", "mechanism"), MECHANISMS)
def test_every_published_mechanism_is_one_override(axis: str, mechanism: str) -> None:
    assert getattr(load_recipe("360m", [f"model.{axis}={mechanism}"]).config(), axis) == mechanism


@pytest.mark.parametrize("size", PAPER)
def test_the_stride_is_the_paper_s(size: str) -> None:
    config = load_recipe(size, ["model.mixer=depth_attention"]).config()
    assert config.mixer_options["stride"] == config.num_hidden_layers // 2


def test_looped() -> None:
    plain, looped = cost_of("500m"), cost_of("500m_looped")
    assert looped.parameters == plain.parameters and looped.flops_per_token > 2.5 * plain.flops_per_token
    both = estimate(load_recipe(RECIPES / "500m_looped.yaml", ["model.mixer=depth_attention"]))
    assert both.mechanism == "loop+depth_attention" and both.parameters == plain.parameters


def test_loops_in_production() -> None:
    """Ouro's number of parameters is that of its released weights. Nanbeige's switches visit 44 layers however it is
    split, since LoopSplit says so."""
    assert cost_of("ouro_2.6b").parameters == 2_667_974_657
    whole = load_recipe(RECIPES / "nanbeige_3b.yaml").config()
    split = "model.recurrence_options={trips: 3, prelude: 5, coda: 6, norm_between: none, kv: first}"
    parted = load_recipe(RECIPES / "nanbeige_3b.yaml", [split]).config()
    assert [sum(map(len, plan(config))) for config in (whole, parted)] == [44, 44]
    assert cache_bytes_per_token(whole) == 2 * cache_bytes_per_token(parted)


def test_logits_without_a_mixture_have_no_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a recurrence of another package that feeds on logits."""
    monkeypatch.setattr(Loop, "needs_head", staticmethod(lambda config: True))
    assert estimate(load_recipe(RECIPES / "500m_looped.yaml")).mechanism == "loop"


def test_a_recipe_is_immutable() -> None:
    with pytest.raises(AttributeError):
        Recipe().train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("text", ["optim: {lr: 1.0}\ntrain: {}\noptim: {floor: 0.5}\n", "optim: {lr: 1.0, lr: 2.0}\n"])
def test_a_key_given_twice_is_no_recipe(tmp_path, text):
    """YAML's reader takes the last and says nothing: the first section, or the first value, would be lost."""
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(SettingsError, match=r"r\.yaml: .*key '(optim|lr)' is given twice"):
        read_values(tmp_path / "r.yaml")
    merged = "a: &a {lr: 1}\nb: {inner: &b {<<: *a, lr: 2}}\nc: {<<: *b}\n"
    assert read_values_of(merged, tmp_path) == {"a": {"lr": 1}, "b": {"inner": {"lr": 2}}, "c": {"lr": 2}}


def read_values_of(text, folder):
    (folder / "other.yaml").write_text(text)
    return read_values(folder / "other.yaml")

"""`fathom deepen` writes a model that computes what it was given, of any family, and a recipe that trains it."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fathom.checkpoints.export import export
from fathom.checkpoints.file_names import HEAL
from fathom.checkpoints.runs import open_source
from fathom.cli.main import main
from fathom.deepen import write
from fathom.deepen.request import parse_request
from fathom.deepen.write import Sizes, deepen
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import AXES
from fathom.recipe import load_recipe
from fathom.training.estimate import estimate
from tests.models.cases import BACKBONES, SHAPE, build, tokens
from tests.tiny import export_tiny

KINDS = {
    "qwen3": {},
    "llama": BACKBONES["llama"] | {"attention_scale": None},
    "gpt_neox": {**BACKBONES["neox"], "num_key_value_heads": 4},
}
KINDS["gpt2"] = {
    **{"norm": "layer", "qk_norm": "none", "gated_mlp": False, "attention_bias": True, "mlp_bias": True},
    **{"positions": "learned", "hidden_act": "gelu_new", "num_key_value_heads": 4, "tie_word_embeddings": True},
}
REQUESTS = (
    ("depth_attention", None),
    ("loop:damping=0.5+depth_attention:stride=1", "1-2"),
    ("attention_residuals+uniform_depth", None),
    ("ponder:trips=3", None),
)


def both(directory):
    """The overrides of the commands in a recipe's header that train the model and its control."""
    lines = (shlex.split(line.lstrip("# ")) for line in (directory / HEAL).read_text().splitlines()[:9])
    return [words[3:-2] for words in lines if words[:2] == ["fathom", "train"]]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A model of every kind in its family's own format, without a tokenizer."""
    folder, made = tmp_path_factory.mktemp("bases"), {}
    for kind, keys in KINDS.items():
        model = build(FathomConfig(**SHAPE | keys))
        made[kind] = export(model, folder / kind, form=kind)
    return made


@pytest.mark.quick("qwen3-depth_attention-None", "llama-loop*", "gpt_neox-att*", "gpt2-ponder*")
@pytest.mark.parametrize(
    ("kind", "text", "layers"),
    [(kind, *request) for kind in KINDS for request in REQUESTS],
)
def test_every_family_starts_as_itself(bases, kind, text, layers, tmp_path):
    made = deepen(bases[kind], parse_request(text, layers), tmp_path / "deeper")
    assert made.exact and made.deviation <= (1e-5 if kind == "gpt_neox" and "residuals" in text else 0)
    base, deeper = (open_source(place).model.eval() for place in (bases[kind], made.directory))
    for part in parse_request(text).parts:
        assert getattr(deeper.config, part.axis) == part.name
    ids = tokens(2, 17)
    with torch.no_grad():
        assert (base(ids).logits - deeper(ids).logits).abs().max() <= made.deviation * 10
    if kind == "qwen3":
        text_of = [m.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None) for m in (base, deeper)]
        assert torch.equal(*text_of)


def test_the_recipe_opens_what_was_closed(bases, tmp_path):
    made = deepen(bases["llama"], parse_request("loop:trips=2+denseformer"), tmp_path / "deeper")
    recipe = load_recipe(made.recipe, ["data.directory=elsewhere", "train.export=true"])
    config = recipe.config()
    assert (config.recurrence_options["blend"], config.recurrence_options["blend_steps"]) == (1.0, 300)
    assert recipe.lora.mechanisms and recipe.distill.teacher == str(bases["llama"])
    cost = estimate(recipe)
    assert cost.mechanism == "loop+denseformer" and cost.changed["recurrence_options.blend"] == (0.0, 1.0)
    alone = estimate(recipe.override("distill.teacher=null"))
    assert cost.state_bytes - alone.state_bytes == 4 * Sizes.of(open_source(bases["llama"]).model.config).parameters
    assert cost.activation_bytes > alone.activation_bytes


def test_a_second_recipe_opens_what_an_untrained_first_one_left_closed(tmp_path, capsys):
    base = export_tiny(tmp_path / "base", mixer="depth_attention", mixer_options={"blend": 0})
    assert main(["deepen", str(base), "--with", "loop", "--out", str(tmp_path / "deeper")]) == 0
    assert "opened too       mixer=depth_attention, which the base model holds closed" in capsys.readouterr().out
    config, control = (load_recipe(tmp_path / "deeper" / HEAL, keys).config() for keys in both(tmp_path / "deeper"))
    for options in (config.mixer_options, config.recurrence_options, control.mixer_options):
        assert (options["blend"], options["blend_steps"]) == (1.0, 300)
    assert control.recurrence == "once"


def test_what_a_base_model_has_in_the_place_of_gains_stays_in_the_control(tmp_path):
    base = export_tiny(tmp_path / "base", residual="attention_residuals", residual_options={"blend": 0})
    made = deepen(base, parse_request("loop:blend=learned"), tmp_path / "deeper")
    control = load_recipe(made.recipe, both(tmp_path / "deeper")[1])
    assert not control.optim.groups and control.config().residual == "attention_residuals"
    assert control.config().residual_options["blend"] == 1.0


def test_learnt_gates_have_a_rate_of_their_own(bases, tmp_path):
    """A recipe with them trains them faster and opens nothing by schedule; without them there is no group."""
    learned = parse_request("depth_attention:blend=learned,gates=head+branch_gain")
    made = deepen(bases["llama"], learned, tmp_path / "deeper")
    recipe = load_recipe(made.recipe, ["data.directory=DATA", "train.device=cpu"])
    assert made.deviation == 0 and recipe.optim.groups == {"*gates*": {"lr": 500.0}}
    assert "blend_steps" not in recipe.model.get("mixer_options", {})
    again = load_recipe(deepen(made.directory, parse_request("loop", "1-3"), tmp_path / "again").recipe)
    assert again.optim.groups == recipe.optim.groups, "the base model's gates"
    assert not load_recipe(deepen(bases["llama"], parse_request("loop"), tmp_path / "again").recipe).optim.groups
    assert not parse_request("depth_attention").learns and not parse_request("loop:blend=0.5").learns


def test_a_loop_gives_the_first_layer_of_a_gated_model_a_closed_weight(bases, tmp_path):
    """Looped, layer 0 has something to read: its own earlier iteration."""
    gated = deepen(bases["llama"], parse_request("depth_attention:blend=learned"), tmp_path / "gated")
    made = deepen(gated.directory, parse_request("loop"), tmp_path / "looped")
    gates = open_source(made.directory).model.model.layers[0].self_attn.mixer.blend_gates
    assert made.deviation == 0 and gates.mix.tolist() == [0.0]


def test_what_does_not_start_exactly_is_said(bases, tmp_path, capsys):
    assert main(["deepen", str(bases["llama"]), "--with", "ponder2", "--out", str(tmp_path / "deeper")]) == 0
    printed = capsys.readouterr().out
    assert f"tokenizer        none: the base model has none; put one into {tmp_path / 'deeper'} first" in printed
    assert ": ponder2 does not start closed" in printed and "logits differ from the base model's by up to" in printed
    recipe = load_recipe(tmp_path / "deeper" / HEAL)
    assert "recurrence_options" not in recipe.model


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("ponder:feed=pause,view=all", False),
        ("ponder:view=all", False),
        ("ponder:feed=pause,view=duo", True),
        ("loop:blend=0.5", False),
        ("loop:blend=1,blend_steps=9", True),
        ("loop:growth=linear,blend=1", False),
        ("depth_attention:blend=learned", True),
    ],
)
def test_an_exact_start_is_claimed_only_where_logits_stay(bases, tmp_path, text, exact):
    """Under view ALL a token reads earlier tokens once for each iteration, and itself once."""
    made = deepen(bases["llama"], parse_request(text), tmp_path / "deeper")
    assert made.exact == exact == (made.deviation < 1e-4)


def test_the_command_says_what_it_added(tmp_path, capsys):
    base = export_tiny(tmp_path / "base", mixer="none")
    words = ["deepen", str(base), "--with", "loop:damping=0.5", "--layers", "1-2", "--out", str(tmp_path / "deeper")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "tokenizer  " not in printed
    assert "logits equal the base model's to the last bit" in printed and "(+0)" in printed and "(+50.0%)" in printed
    assert f"fathom train {tmp_path / 'deeper' / HEAL} data.directory={tmp_path / 'deeper-data'} --run" in printed
    recipe = tmp_path / "deeper" / HEAL
    for mine in ("mine", "mine", "mine too"):  # edited recipes are kept, each once
        recipe.write_text(mine)
        written = write._earlier(recipe, b"new")
        assert written[0] is not None and written[1][written[0].name] == mine.encode()
        for name, content in written[1].items():
            (recipe.parent / name).write_bytes(content)
    assert [path.read_text() for path in sorted(recipe.parent.glob("heal.yaml.*"))] == ["mine", "mine too"]
    assert main([*words, "--steps", "7"]) == 0
    assert f"kept             {recipe}.old1, the recipe that was there" in capsys.readouterr().out
    assert [path.read_text() for path in sorted(recipe.parent.glob("heal.yaml.*"))] == ["mine", "mine too"]
    assert main([*words, "--steps", "7", "--json"]) == 0, "an earlier one is replaced"
    found = json.loads(capsys.readouterr().out)
    assert (
        found["deviation"] == 0
        and found["kept"] is None
        and found["deeper"]["cache_bytes_per_token"] == 1.5 * found["base"]["cache_bytes_per_token"]
    )
    model = FathomForCausalLM.from_pretrained(tmp_path / "deeper")
    assert [getattr(model.config, axis) for axis in AXES] == ["none", "plain", "loop"]


@pytest.mark.parametrize(
    "words,says",
    [
        (["--with", "loop", "--layers", "3-9"], "--layers 3-9: this model has the layers 0 to 3"),
        (["--with", "lop"], "--with lop: no such mechanism; did you mean loop?"),
        (["--with", "loop", "--search"], "--search needs --text"),
        (["--with", "ponder", "--search", "--text", "x"], "--search ranks the layers of --with loop"),
        (["--with", "loop", "--text", "x"], "--text needs --search"),
        (
            ["--with", "loop", "--search", "--text", "x", "--sizes", "2"],
            "--sizes 2: allowed: two whole numbers, as in 2-6",
        ),
    ],
)
def test_bad_requests_are_one_line(words, says, tmp_path, capsys, bases):
    assert main(["deepen", str(bases["llama"]), *words, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--screen"], ["--with", "loop", "--search"], ["--exit"]])
def test_text_that_is_not_there_is_refused_before_the_model_is_opened(words, tmp_path, capsys):
    text, out = tmp_path / "text.txt", str(tmp_path / "out")
    assert main(["deepen", "no/model", *words, "--text", str(text), "--out", out]) == 2
    assert "text.txt" in capsys.readouterr().err
    text.write_text("A document.")
    assert main(["deepen", "no/model", *words, "--text", str(text), "--out", out]) == 2
    assert "no/model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind,says", [("t5", "is a t5 model; Fathom opens"), (None, "neither a directory nor a name on the Hub")]
)
def test_families_that_cannot_are_one_line(kind, says, tmp_path, capsys):
    place = tmp_path / "model"
    if kind is not None:
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"model_type": kind}))
        save_file({"shared.weight": torch.zeros(4, 4)}, place / "model.safetensors")
    assert main(["deepen", str(place), "--with", "loop", "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1


def test_the_model_itself_is_not_overwritten(bases, capsys):
    before = (Path(bases["llama"]) / "config.json").read_text()
    assert main(["deepen", str(bases["llama"]), "--with", "loop", "--out", str(bases["llama"])]) == 2
    assert "is the input model itself" in capsys.readouterr().err
    assert (Path(bases["llama"]) / "config.json").read_text() == before


def test_the_model_of_a_run_and_an_export_are_not_overwritten(tmp_path, capsys):
    """Refused before the model is read, so these need be none."""
    for place, said in (("run/model", "is the input model itself"), ("exported", "did not write")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
        (tmp_path / place / "README.md").write_text("Exported by Fathom")
        assert main(["deepen", str(tmp_path / "run"), "--with", "loop", "--out", str(tmp_path / place)]) == 2
        assert said in capsys.readouterr().err and (tmp_path / place / "config.json").read_text() == "{}"


def test_a_search_prints_a_table_and_keeps_a_figure(tmp_path, capsys):
    base = export_tiny(tmp_path / "base", mixer="none")
    text = tmp_path / "text.jsonl"
    rows = [{"text": f"{i} fathoms of a dark sea, measured with lead and line " * 2} for i in range(9)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["deepen", str(base), "--with", "loop", "--search", "--text", str(text), "--out", str(tmp_path / "spans")]
    words += ["--sizes", "1-2", "--documents", "4,5", "--tokens", "24"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "spans" / "spans.json").read_text())
    best = report["spans"][0]
    assert f"--layers {best['layers']}" in printed and len(report["spans"]) == 2 * (4 + 3)
    assert best["again"]["pairs"] == 5 and best["again"]["low"] < best["again"]["high"]
    assert "costs least: " in (page := (tmp_path / "spans" / "spans.html").read_text()) and page.count("<polyline") > 1
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["layers"] == best["layers"]

"""A screen's gradients are autograd's; planted gains are projected out, and planted mixing is found."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from fathom.cli.main import main
from fathom.deepen.screen import BATCH, Screen, gradients, scores, z_score
from fathom.errors import SettingsError
from fathom.models import FathomConfig, FathomForCausalLM
from tests.models.cases import BACKBONES, SHAPE, with_gains
from tests.tiny import export_tiny

LAYERS, TOKENS, DOCUMENTS = 4, 24, 48
GATED = {"blend": "learned", "gates": "head"}


def base(seed: int = 0, **keys: object) -> FathomForCausalLM:
    """A model without mechanisms whose words depend on what went before."""
    torch.manual_seed(seed)
    shape = SHAPE | {"tie_word_embeddings": False} | keys
    return with_gains(FathomForCausalLM(FathomConfig(**shape, initializer_range=0.25)).eval())


def with_gates(model: FathomForCausalLM, gates: dict[str, list[float]], **keys: object) -> FathomForCausalLM:
    """The same weights with a mechanism, some of its gates open."""
    torch.manual_seed(0)
    other = FathomForCausalLM(FathomConfig.from_dict(model.config.to_dict(), **keys)).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for name, values in gates.items():
            other.get_parameter(name).copy_(torch.tensor(values))
    return other


@torch.no_grad()
def written(model: FathomForCausalLM, count: int, tokens: int, seed: int) -> torch.Tensor:
    """Documents that a model writes, `[count, tokens + 1]`."""
    torch.manual_seed(seed)
    ids = torch.randint(3, SHAPE["vocab_size"], (count, 1))
    cache = None
    for _ in range(tokens):
        out = model(ids[:, -1:], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        ids = torch.cat([ids, torch.multinomial(out.logits[:, -1].softmax(-1), 1)], 1)
    return ids


def gate_of(layer: int, what: str) -> str:
    """A mixer's gate by name."""
    return f"model.layers.{layer}.self_attn.mixer.{what}"


def at(found, name: str, layer: int, head: int | None = None) -> int:
    """The index of a place among a mechanism's gates."""
    return next(i for i, place in enumerate(found[name].places) if (place.layer, place.head) == (layer, head))


@pytest.mark.parametrize("backbone", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in BACKBONES)])
def test_gradients_are_those_of_the_gates(backbone):
    """Of λ of both mixers on a grid, a value's gain and a layer that runs twice, document by document."""
    model = base(**BACKBONES.get(backbone, {})).double()
    rows = torch.randint(3, SHAPE["vocab_size"], (BATCH, 9), generator=torch.Generator().manual_seed(1))
    found = gradients(model, rows)
    cases = [
        ({"mixer": name, "mixer_options": GATED | {"stride": 4}}, name) for name in ("depth_attention", "uniform_depth")
    ]
    for keys, name in [*cases, ({"mixer": "value_residual", "mixer_options": GATED}, "value_residual")]:
        open_ = with_gates(model, {}, **keys).double()
        for b in (0, BATCH - 1):
            open_.zero_grad()
            open_(rows[b : b + 1, :-1], labels=rows[b : b + 1, :-1], shift_labels=rows[b : b + 1, 1:]).loss.backward()
            for layer in (1, LAYERS - 1):
                mix = open_.get_parameter(gate_of(layer, "blend_gates.mix")).grad
                gain = open_.get_parameter(gate_of(layer, "blend_gates.gain")).grad
                for head in range(2):
                    i = at(found, name, layer, head)
                    assert abs(found[name].drawn(i)[b] - mix[head]) < 1e-9, (name, layer, head)
                    assert abs(found[name].gains[i][b, 0] - gain[head]) < 1e-9
    for layer in (0, 2):
        options = {"trips": 2, "prelude": layer, "coda": LAYERS - 1 - layer, "blend": "learned"}
        looped = with_gates(model, {}, recurrence="loop", recurrence_options=options).double()
        looped(rows[:1, :-1], shift_labels=rows[:1, 1:]).loss.backward()
        grad = looped.get_parameter("model.recurrence.blend_gates.mix").grad
        assert abs(found["loop"].drawn(layer)[0] - grad) < 1e-9
    assert all(parameter.requires_grad for parameter in model.parameters()), "the model is as it was"
    again = gradients(model, rows)
    assert all(np.array_equal(a, b) for a, b in zip(again["loop"].own, found["loop"].own, strict=True))


def planted(seed: int, gates: dict[str, list[float]], documents: int = DOCUMENTS, **keys: object):
    """The screen of a model on what it would write if some gates were open."""
    model = base(seed)
    rows = written(with_gates(model, gates, **keys), documents, TOKENS, seed)
    return gradients(model, rows)


@pytest.mark.slow
def test_a_planted_gain_is_projected_out():
    """The text asks for a smaller or larger value: λ's raw z² is far from chance, without the gain it is near."""
    raw, rest = [], []
    for seed in range(12):
        gain = {gate_of(2, "gates.gain"): [1.5, -0.9]}
        found = planted(seed, gain, mixer="value_gain")
        for head in range(2):
            i = at(found, "uniform_depth", 2, head)
            one = found["uniform_depth"]
            raw.append(z_score(one.gains[i][:, 0]) ** 2)
            rest.append(z_score(one.without(one.drawn(i), i), 1) ** 2)
    assert np.mean(raw) > 5, "the gain itself is found"
    assert np.mean(rest) < 2.5, "24 draws of z² with a mean near 1.07"


@pytest.mark.slow
def test_planted_mixing_is_found():
    """λ = 1.5 at one head, 48 documents of 24 tokens: |z| without gain is above 2.5 at that place in 80 %."""
    hits = []
    for seed in range(20):
        found = planted(
            seed,
            {gate_of(2, "blend_gates.mix"): [1.5, 0.0]},
            mixer="depth_attention",
            mixer_options=GATED | {"stride": 1},
        )
        one = found["depth_attention"]
        i = at(found, "depth_attention", 2, 0)
        hits.append(-z_score(one.without(one.drawn(i), i), 1) > 2.5)
    assert np.mean(hits) >= 0.8


@pytest.mark.slow
def test_shuffled_sources_are_at_chance():
    """1,000 draws: with another document's sources in place of its own, a gate's content has a z² of chance."""
    found = planted(0, {gate_of(2, "blend_gates.mix"): [1.5, 0.0]}, mixer="depth_attention", mixer_options=GATED)
    numbers, squares = np.random.default_rng(0), []
    one = found["depth_attention"]
    for _ in range(1000):
        columns = numbers.integers(1, BATCH, DOCUMENTS)
        i = int(numbers.integers(len(one.places)))
        crossed = one.own[i][:, 1:]  # the own source takes no part
        picked = crossed[np.arange(DOCUMENTS), columns - 1]
        squares.append(z_score(picked - (crossed.sum(1) - picked) / (BATCH - 2)) ** 2)
    chance = (DOCUMENTS - 1) / (DOCUMENTS - 3)
    assert abs(np.mean(squares) - chance) < 4 * np.std(squares) / np.sqrt(1000) + 0.1


@pytest.mark.slow
def test_strong_gates_are_those_that_training_opens():
    """Four models with six planted λ each: |z| ranks the gates as |λ| of gates that are trained on the text."""
    strengths, reached = [], []
    sizes = np.array([0.0, 0.3, 0.6, -0.9, 1.2, -1.5])
    for seed in range(4):
        model = base(seed)
        drawn = np.random.default_rng(seed).permutation(sizes).reshape(3, 2)
        keys = {"mixer": "uniform_depth", "mixer_options": GATED | {"stride": 4}}
        planted_in = {gate_of(i + 1, "blend_gates.mix"): drawn[i].tolist() for i in range(3)}
        rows = written(with_gates(model, planted_in, **keys), 96, TOKENS, seed)
        one = gradients(model, rows)["uniform_depth"]
        z = [z_score(one.without(one.drawn(i), i), 1) for i in range(len(one.places))]
        learned = with_gates(model, {}, **keys)
        gates = [p for name, p in learned.named_parameters() if "gates" in name]
        optimizer = torch.optim.Adam(gates, lr=0.05)
        for step in range(80):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 80)
            learned(rows, labels=rows, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        strengths += np.abs(z).tolist()
        reached += [abs(float(learned.get_parameter(gate_of(p.layer, "blend_gates.mix"))[p.head])) for p in one.places]
    assert spearmanr(strengths, reached).statistic >= 0.8


def test_chance_is_chance():
    """z² of noise is (n - 1) / (n - 3), and a constant has no z."""
    numbers = np.random.default_rng(0).standard_normal((4000, 32))
    assert abs(np.mean([z_score(row) ** 2 for row in numbers]) - 31 / 29) < 0.1
    assert z_score(np.ones(5)) == 0.0


@pytest.mark.slow
def test_scores_have_the_gates_sign():
    """What lowers the loss wants more: a negative gradient is a positive z."""
    found = planted(
        1, {gate_of(2, "blend_gates.mix"): [2.0, 0.0]}, 16, mixer="depth_attention", mixer_options=GATED | {"stride": 1}
    )
    made = scores(found, 16)
    one = found["depth_attention"]
    gate = next(g for g in made.gates if (g.mechanism, *g.place[:2]) == ("depth_attention", 2, 0))
    assert np.sign(gate.z) == -np.sign(one.drawn(at(found, "depth_attention", 2, 0)).mean())
    assert {summary.mechanism for summary in made.summaries} == {
        "depth_attention",
        "uniform_depth",
        "value_residual",
        "stream",
        "loop",
    }


def test_the_command_writes_a_page(tmp_path, capsys):
    model = export_tiny(tmp_path / "model", mixer="none", mixer_options={})
    text = tmp_path / "text.jsonl"
    words = "the deep sea is measured in fathoms and thoughts are too "
    text.write_text("".join(json.dumps({"text": f"{i} " + words * 3}) + "\n" for i in range(20)), encoding="utf-8")
    command = ["deepen", str(model), "--screen", "--text", str(text), "--documents", "16", "--tokens", "12"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "CPU seconds" in said and "depth_attention" in said
    report = json.loads((tmp_path / "out" / "screen.json").read_text(encoding="utf-8"))
    asked = [gate["content"] < 0 for gate in report["gates"] if f"{gate['mechanism']} responds" in said]
    assert f"{sum(asked)} of the gates ask for less of it, {len(asked) - sum(asked)} for more" in " ".join(said.split())
    assert report["documents"] == 16 and len(report["gates"]) == sum(s["gates"] for s in report["summaries"])
    assert "<table" in (tmp_path / "out" / "screen.html").read_text(encoding="utf-8")
    assert main([*command, "--with", "loop", "--out", str(tmp_path / "out")]) != 0
    assert main(["deepen", str(model), "--out", str(tmp_path / "out")]) != 0


@pytest.mark.parametrize("wrong", [{"documents": 12}, {"documents": 20}, {"tokens": 1}])
def test_too_little_text_is_refused(wrong):
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        Screen(**wrong)

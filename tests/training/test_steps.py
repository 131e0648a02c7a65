"""What one step does: skips what is broken, decays what should decay, starts every arm from the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fathom.errors import SettingsError, TrainingError
from fathom.recipe import Optim, Recipe
from fathom.training import build_training, train
from fathom.training.build import build_model
from fathom.training.guard import SETTLED, Guard
from fathom.training.optimizer import OPTIMIZERS, Optimizer, decays, learning_rate, leaves_peak
from tests import processes
from tests.tiny import tiny_recipe

KINDS = {"adamw": {"exp_avg", "exp_avg_sq", "step"}, "muon": {"exp_avg", "exp_avg_sq", "step", "momentum_buffer"}}
"""Of an optimizer's state."""


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], harm: Callable[[Tensor], Tensor]) -> None:
    """Harm the loss at some steps."""
    from fathom.training import build

    original = build.forward
    seen: list[int] = []

    def forward(model: Any, batch: Any) -> Any:
        out = original(model, batch)
        if len(seen) // 2 in steps:  # two micro-batches a step
            out.loss = harm(out.loss)
        seen.append(1)
        return out

    monkeypatch.setattr(build, "forward", forward)


def weights(training: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in training.state().items() if not name.startswith("guard")}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_broken_step_leaves_no_trace(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    training = build_training(recipe.override(f"optim.name={optimizer}"))
    training.step(0)
    before = weights(training)
    poison(monkeypatch, {0}, lambda loss: loss * float("nan"))
    metrics = training.step(1)
    assert metrics.skipped.item() == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(training).items())
    assert training.step(2).skipped.item() == 0
    assert not all(torch.equal(tensor, before[name]) for name, tensor in weights(training).items())


def test_without_the_guard_it_would(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    training = build_training(recipe)
    poison(monkeypatch, {0}, lambda loss: loss * float("nan"))
    monkeypatch.setattr(Guard, "refuse", lambda self, loss, norm: torch.zeros(()))
    training.step(0)
    assert any(tensor.isnan().any() for tensor in weights(training).values())


def test_a_run_logs_a_broken_step_and_goes_on(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {2, 5}, lambda loss: loss / 0)
    assert train(recipe, tmp_path).finished
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("skipped")] == [3, 6]


def test_a_run_stops_after_too_many(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the limit is reached, not at the next look for the log."""
    poison(monkeypatch, {4, 5, 6, 7}, lambda loss: loss * float("nan"))
    with pytest.raises(TrainingError, match=r"stopped at step 7: 3 steps in a row .* checkpoint of step 4 is intact"):
        train(recipe.override("train.max_skipped=3", "train.checkpoint_every=4", "train.log_every=100"), tmp_path)


def test_spikes_are_refused_once_norms_have_settled() -> None:
    guard = Guard(10.0, torch.device("cpu"))
    loss = torch.tensor(1.0)
    assert guard.refuse(loss, torch.tensor(1.0)) == 0
    assert guard.refuse(loss, torch.tensor(50.0)) == 0, "too early to tell"
    for _ in range(2 * SETTLED):
        assert guard.refuse(loss, torch.tensor(1.0)) == 0
    mean = guard.mean_norm.clone()
    assert guard.refuse(loss, torch.tensor(float("inf"))) == 1 and guard.mean_norm == mean
    assert guard.refuse(loss, torch.tensor(1e9)) == 1
    assert guard.mean_norm.item() == pytest.approx(mean.item() * (1 + 0.02 * 9), rel=1e-5), (
        "a spike counts as one at the limit"
    )
    assert guard.refused_in_a_row == 2
    assert guard.refuse(loss, torch.tensor(1.1)) == 0
    assert guard.refused_in_a_row == 0
    assert Guard(None, torch.device("cpu")).refuse(loss, torch.tensor(1e9)) == 0


def settled(clip: float, norm: float) -> Guard:
    guard = Guard(10.0, torch.device("cpu"), clip)
    for _ in range(400):
        guard.refuse(torch.tensor(1.0), torch.tensor(norm))
    return guard


def test_a_rise_of_the_norm_that_lasts_is_no_spike() -> None:
    guard = settled(0.0, 1.0)
    refused = [bool(guard.refuse(torch.tensor(1.0), torch.tensor(30.0))) for _ in range(20)]
    assert refused[0] and sum(refused) < 10 and refused == sorted(refused, reverse=True)


def test_what_clipping_bounds_is_no_spike() -> None:
    """Of a puzzle that is all but solved: its gradients vanish, and one mistake is a thousand times their mean."""
    norms = [0.005, 9.0, 0.2, 0.005, 7.0, 1.7, 5.0]
    assert not any(settled(1.0, 0.005).refuse(torch.tensor(0.1), torch.tensor(norm)) for norm in norms)
    assert any(settled(0.0, 0.005).refuse(torch.tensor(0.1), torch.tensor(norm)) for norm in norms), "the control"
    assert settled(1.0, 0.005).refuse(torch.tensor(0.1), torch.tensor(11.0)) == 1


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules(schedule: Any) -> None:
    optim = Optim(lr=2.0, schedule=schedule, warmup=0.1, decay=0.2, floor=0.1)
    rates = [learning_rate(optim, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(2.0 / 11)
    assert all(later > earlier for earlier, later in pairwise(rates[:11]))
    assert rates[10] == max(rates) == 2.0
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 0.2)
    middle = {"cosine": 1.1, "linear": 1.1, "wsd": 2.0, "constant": 2.0}[schedule]
    assert rates[54] == pytest.approx(middle, abs=0.03)
    if schedule == "wsd":
        assert rates[79] == 2.0 > rates[80]
    assert 0 < learning_rate(Optim(schedule=schedule, warmup=0.0), 0, 1) <= Optim().lr, "of one step"


def test_warm_up_and_decay_in_steps() -> None:
    """As the shares that they are of 100 steps; and of any number of steps they stay what they are."""
    shares, steps = Optim(schedule="wsd", warmup=0.1, decay=0.2), Optim(schedule="wsd", warmup_steps=10, decay_steps=20)
    assert [learning_rate(shares, s, 100) for s in range(100)] == [learning_rate(steps, s, 100) for s in range(100)]
    longer = [learning_rate(steps, s, 300) for s in range(300)]
    assert longer[:80] == [learning_rate(steps, s, 100) for s in range(80)] and longer[279] == 1e-3 > longer[280]
    assert [leaves_peak(steps, s, 300) for s in (5, 150, 279, 280)] == [False, False, False, True]


def test_what_decays(recipe: Recipe) -> None:
    model = build_model(recipe, recipe.config(), torch.device("cpu"))
    decaying = {name for name, yes in decays(model).items() if yes}
    assert "model.layers.0.self_attn.q_proj.weight" in decaying and "model.embed_tokens.weight" in decaying
    assert not any("norm" in name for name in decaying)


def test_a_module_may_exempt_its_matrices() -> None:
    class Exempt(nn.Module):
        no_weight_decay = ("kept",)

        def __init__(self) -> None:
            super().__init__()
            self.kept, self.decayed = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
            self.vector = nn.Parameter(torch.zeros(2))

    assert decays(nn.Sequential(Exempt())) == {"0.kept": False, "0.decayed": True, "0.vector": False}


def test_tied_weights_count_once(recipe: Recipe) -> None:
    recipe = recipe.override("model.tie_word_embeddings=true")
    training = build_training(recipe)
    assert "lm_head.weight" not in training.optimizer.parameters
    training.step(0)
    assert training.model.lm_head.weight is training.model.model.embed_tokens.weight


def test_muon_takes_the_matrices_of_layers_and_nothing_else(recipe: Recipe) -> None:
    model = build_model(recipe, recipe.config(), torch.device("cpu"))
    optimizer = Optimizer(model, Optim(name="muon"))
    adamw, muon = optimizer.parts
    names = {id(parameter): name for name, parameter in optimizer.parameters.items()}
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    of_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert of_muon == {n for n in names.values() if ".layers." in n and "norm" not in n}
    assert of_adamw == set(names.values()) - of_muon


class RMSprop(torch.optim.RMSprop):
    """A third optimizer, whose step knows nothing of `found_inf`."""

    only_matrices = False
    reads_found_inf = False

    @classmethod
    def of(cls, groups, optim: Optim) -> RMSprop:
        return cls(groups, lr=optim.lr)


@pytest.mark.parametrize("only_matrices", [False, True])
@pytest.mark.parametrize("declared", [False, None])
def test_a_third_optimizer_does_not_move_weights_on_a_skipped_step(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, only_matrices: bool, declared: bool | None
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "rmsprop", RMSprop)
    monkeypatch.setattr(RMSprop, "only_matrices", only_matrices)
    if declared is None:  # one that forgets to say counts as one that does not
        monkeypatch.delattr(RMSprop, "reads_found_inf")
    model = build_model(recipe, recipe.config(), torch.device("cpu"))
    optim = Optim()
    object.__setattr__(optim, "name", "rmsprop")  # which a recipe would have to list
    optimizer = Optimizer(model, optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer.step(0.1, torch.ones(()))
    assert all(torch.equal(now, old) for now, old in zip(model.parameters(), before, strict=True))
    optimizer.step(0.1, torch.zeros(()))
    assert not any(torch.equal(now, old) for now, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_holds_every_parameter_before_a_first_step(recipe: Recipe, name: Any) -> None:
    training = build_training(recipe.override(f"optim.name={name}"))
    before = {key: tensor.clone() for key, tensor in training.weights().items()}
    training.model.model.norm.weight.grad = torch.ones(32)
    state = training.optimizer.state()
    assert training.model.model.norm.weight.grad.sum() == 32
    assert all(torch.equal(tensor, before[key]) for key, tensor in training.weights().items())
    assert {key.partition(".")[2] for key in state} == set(training.optimizer.parameters)
    assert not any(tensor.any() for tensor in state.values())
    assert {key.split(".")[0] for key in state} >= KINDS.get(name, set())


class Sign(torch.optim.Optimizer):
    """Steps by signs of momentum; asks the host whether to skip, and before it makes its state."""

    only_matrices, reads_found_inf = False, True

    @classmethod
    def of(cls, groups: Any, optim: Optim) -> Sign:
        return cls(groups, {"lr": optim.lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.found_inf.item():  # type: ignore[attr-defined]
            return
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.data -= group["lr"] * momentum.lerp_(p.grad, 0.1).sign()


def test_the_state_is_complete_before_and_after_a_skipped_first_step(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "sign", Sign)
    optim = Optim()
    object.__setattr__(optim, "name", "sign")
    model = build_model(recipe, recipe.config(), torch.device("cpu"))
    every = {f"momentum.{name}" for name, _ in model.named_parameters()}
    assert Optimizer(model, optim).state().keys() == every
    optimizer = Optimizer(model, optim)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step(0.1, torch.ones(()))
    state = optimizer.state()
    assert state.keys() == every and not any(tensor.any() for tensor in state.values())


def test_state_that_a_checkpoint_cannot_hold_is_named(recipe: Recipe) -> None:
    optimizer = Optimizer(build_model(recipe, recipe.config(), torch.device("cpu")), Optim())
    optimizer.state()
    (part,) = optimizer.parts
    part.state[optimizer.parameters["model.norm.weight"]]["count"] = 3
    with pytest.raises(TypeError, match=r"AdamW: the state count of model\.norm\.weight is not a tensor: 3"):
        optimizer.state()


@pytest.mark.parametrize("arm", ["model.residual=denseformer", "model.residual=hyper_connections", "model.mixer=none"])
def test_arms_start_from_equal_shared_weights(recipe: Recipe, arm: str) -> None:
    ours, theirs = (build_training(r).weights() for r in (recipe, recipe.override(arm)))
    shared = ours.keys() & theirs.keys()
    assert len(shared) >= 20
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    another = build_training(recipe.override("train.seed=1")).weights()
    assert not torch.equal(another["lm_head.weight"], ours["lm_head.weight"])


def test_accumulation_changes_nothing(corpus: Path) -> None:
    found = []
    for rows in (1, 2, 8):
        training = build_training(tiny_recipe(corpus, f"train.micro_batch={rows}"))
        found.append([training.step(step).loss.item() for step in range(4)])
    assert found[1] == pytest.approx(found[0], rel=1e-6) and found[2] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.slow
def test_compiled_layers_train_like_eager_ones(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's own arithmetic left to eager: what is tested is that layers are compiled, and whole."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda layer: layer.__setattr__(
            "_compiled_call_impl", torch.compile(layer._call_impl, backend=backend, fullgraph=True)
        ),
    )
    compiled = build_training(recipe.override("train.compile=true"))
    eager = build_training(recipe)
    for step in range(2):
        assert compiled.step(step).loss.item() == pytest.approx(eager.step(step).loss.item(), rel=1e-6)
    assert graphs


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.attention=flex_attention", "no backward pass on cpu; allowed: sdpa, eager"),
        ("track.backends=[wandb]", "not installed"),
    ],
)
def test_errors_before_work(recipe: Recipe, tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(Exception, match=words.replace("[", r"\[")) as caught:
        train(recipe.override(override), tmp_path / "run")
    assert type(caught.value).__module__.startswith("fathom.")
    assert len(str(caught.value).splitlines()) == 1
    assert not list(tmp_path.glob("run/step-*"))


def test_ranks_are_not_ignored(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match=r"parallel\.name=single: allowed with 2 ranks"):
        train(recipe.override("parallel.name=single"), tmp_path)


def test_metrics_survive_a_full_disk(tmp_path: Path) -> None:
    from fathom.training.tracking import JsonLines, read_metrics

    said: list[str] = []
    (tmp_path / "metrics.jsonl").mkdir()  # a path that cannot be written
    lines = JsonLines.__new__(JsonLines)
    lines.path, lines.say, lines._waiting, lines._complained = tmp_path / "metrics.jsonl", said.append, [], False
    lines.log(1, {"loss": 1.0})
    lines.log(2, {"loss": 2.0})
    assert len(said) == 1
    (tmp_path / "metrics.jsonl").rmdir()
    lines.log(3, {"loss": 3.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_loss_falls(recipe: Recipe, tmp_path: Path) -> None:
    result = train(recipe.override("train.steps=30", "train.checkpoint_every=30", "evaluate.every=0"), tmp_path)
    losses = processes.losses(tmp_path)
    assert losses[-1] < losses[0] - 1.5
    assert result.evaluation is not None and result.evaluation.loss < losses[0]
    assert result.evaluation.perplexity == pytest.approx(2.718281828**result.evaluation.loss)


def test_a_term_that_some_steps_lack_is_logged_for_the_others(recipe: Recipe, tmp_path: Path) -> None:
    """A step that draws one trip has no early readouts."""
    looped = recipe.override(
        "model.recurrence=loop",
        "model.recurrence_options={trips: 2, trips_range: [1, 3], early_loss: 0.5}",
        "train.steps=12",
        "train.checkpoint_every=12",
        "train.log_every=6",
    )
    assert train(looped, tmp_path).finished
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = ["early" in line for line in lines if "grad_norm" in line]
    assert len(steps) == 12 and set(steps) == {True, False}

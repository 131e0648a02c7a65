"""The one table: what stands in for what, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import fathom.kernels
from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.kernels import NAMES, use
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.replaceable import REPLACEABLE, replace
from fathom.recipe import Recipe, Train
from tests.models.cases import SHAPE

from .held import DEVICE


@pytest.fixture(autouse=True)
def empty_table():
    yield
    replace({}, DEVICE)


def model_of(**axes) -> FathomForCausalLM:
    torch.manual_seed(0)
    return FathomForCausalLM(FathomConfig(**SHAPE | {"num_hidden_layers": 2}, **axes)).to(DEVICE)


def test_names_are_those_of_the_table():
    assert set(NAMES) == set(REPLACEABLE)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_called_and_nothing_else(name):
    """With a stand-in that counts, and without."""
    calls = []

    def counting(*arguments, **named):
        calls.append(name)
        raise InterruptedError

    model = model_of(mixer="depth_attention", residual="attention_residuals").train()
    ids = torch.zeros(1, 3, dtype=torch.long, device=DEVICE)
    replace({name: counting}, "elsewhere")
    model(ids, labels=ids)
    assert not calls
    replace({name: counting}, DEVICE)
    with pytest.raises(InterruptedError):
        model(ids, labels=ids)
    assert calls == [name]
    model.double()(ids, labels=ids)
    replace({}, DEVICE)
    model.float()(ids, labels=ids)
    assert calls == [name]


@pytest.mark.parametrize("part", ["mixer", "k_norm"])
def test_a_call_that_a_hook_waits_for_is_made(part):
    """The lens looks at mixers; the one kernel that would leave their calls out lets them be."""
    calls, model = [], model_of(mixer="depth_attention", mixer_options={"stride": 1})
    attention, ids = model.model.layers[1].self_attn, torch.zeros(1, 3, dtype=torch.long, device=DEVICE)
    replace({"norm_rotate_mix": lambda *arguments, **named: calls.append("kernel")}, DEVICE)
    with pytest.raises(TypeError):
        model(ids)
    getattr(attention, part).register_forward_hook(lambda *arguments: calls.append(part))
    model(ids)
    assert calls == ["kernel", part]


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_each_is_refused_by_name(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SettingsError, match=f"^kernel {name} needs an NVIDIA GPU, and the model would be on cpu"):
        use([name], "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_without_its_package_each_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(fathom.kernels.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(SettingsError, match=rf"^kernel {name} needs (triton|liger-kernel): pip install '\.\[gpu\]'"):
        use([name], "cuda:0")


def test_other_names_are_refused(capsys, monkeypatch):
    with pytest.raises(SettingsError, match=r"^kernel 'flash': allowed: any of depth_mix, depth_pool"):
        use(["depth_mix", "flash"], "cuda")
    with pytest.raises(SettingsError, match=r"train\.kernels=.*allowed: any of depth_mix"):
        Train(kernels=("flash",))
    assert Recipe(train=Train(kernels=["rms_norm"])).train.kernels == ("rms_norm",)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    serve = [["serve", "nowhere"]] if find_spec("uvicorn") else []  # an extra, which a machine with a GPU may lack
    for command in (["generate", "nowhere", "a"], ["evaluate", "nowhere"], *serve):
        assert main([*command, "--device", "cpu", "--kernels", "depth_mix"]) == 2
        assert capsys.readouterr().err.startswith("fathom: kernel depth_mix needs an NVIDIA GPU")


def test_a_training_run_refuses_before_it_starts(recipe, monkeypatch):
    from fathom.training.build import build_training

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SettingsError, match="kernel swiglu needs an NVIDIA GPU"):
        build_training(recipe.override("train.kernels=[swiglu]", "train.device=cpu"))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("depth_mix", {"mixer": "depth_attention", "mixer_options": {"stride": 1, "self_bias": 0.5}}),
        ("norm_rotate_mix", {"mixer": "depth_attention", "mixer_options": {"stride": 1, "self_bias": 0.5}}),
        ("norm_rotate_mix", {"mixer": "depth_attention", "k_norm_position": "after_rope"}),
        ("depth_mix", {"mixer": "depth_attention", "mixer_options": {"stride": 1, "blend": 0.25}}),
        ("norm_rotate_mix", {"mixer": "depth_attention", "mixer_options": {"stride": 1, "blend": 0.25}}),
        ("depth_pool", {"residual": "attention_residuals", "residual_options": {"block_size": 3, "blend": 0.25}}),
        ("depth_pool", {"residual": "attention_residuals", "residual_options": {"block_size": 3}}),
        ("depth_pool", {"residual": "attention_residuals", "residual_options": {"variant": "snapshot"}}),
        ("depth_mix", {"mixer": "depth_attention", "recurrence": "loop", "recurrence_options": {"trips": 2}}),
    ],
)
def test_a_model_trains_and_decodes_as_with_the_reference(name, axes):
    pytest.importorskip("triton")
    ids = torch.randint(3, SHAPE["vocab_size"], (1, 5), generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def results(checkpointed: bool = False) -> list[torch.Tensor]:
        model = model_of(**axes).train()
        for query in (p for n, p in model.named_parameters() if "pseudo_query" in n):
            torch.nn.init.normal_(query, generator=torch.Generator(DEVICE).manual_seed(4))
        if checkpointed:
            model.activation_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        text = model.eval().generate(ids, max_new_tokens=2, do_sample=False)
        return [model(ids).logits, *(p.grad for p in model.parameters()), text]

    wanted = results()
    use([name], DEVICE)
    for a, b in zip(results(checkpointed=True), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-4)

"""Every family's own model, opened as ours: equal to the last bit, and back again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fathom.checkpoints.export import export
from fathom.checkpoints.families import FAMILIES
from fathom.checkpoints.file_names import INDEX
from fathom.checkpoints.origin import LocalOrigin
from fathom.checkpoints.tensors import open_safetensors
from fathom.checkpoints.untrusted import check_checkpoint
from fathom.models import FathomForCausalLM

from .cases import CASES, stock, stock_config

TYPES = ("dtype", "torch_dtype")
CAPPED = "gemma2"
"""Attention's logits are capped, which SDPA cannot do: transformers refuses it, and so do we."""
STRIDED = {("phi3", torch.float32): 4e-6}
"""Largest difference of a logit where theirs applies SiLU to one half of a fused product: torch's SiLU of a strided
tensor is another in the last bit than that of a contiguous one, as the test below shows."""
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
FUSED = {("gpt2-unscaled", torch.bfloat16): 0.0 if WIDE else 0.03}
"""Without AVX-512 torch sums a column of one wide bfloat16 product in another order than that of three narrow ones;
scores that are not scaled down make the most of it."""
FEW = ("llama-gqa", "smollm3", "gpt2", "gpt_neox", "opt", "olmo2", "gemma3", "phi3")
"""Families whose tensors or layers differ most; tests/checkpoints/test_same_logits.py compares the logits of all."""


def open_tensors(place: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in place.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module", params=CASES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family's own checkpoint, which no test writes to."""
    path = tmp_path_factory.mktemp(request.param)
    stock(request.param).save_pretrained(path)
    return request.param, path


@pytest.mark.quick(*(f"{name}-dtype0-sdpa" for name in FEW), "llama-gqa-dtype1-eager", "gemma2-dtype1-eager")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_family_s_own(directory: tuple[str, Path], dtype: torch.dtype, attention: str) -> None:
    name, path = directory
    settings = {"dtype": dtype, "attn_implementation": attention}
    if name == CAPPED and attention == "sdpa":
        with pytest.raises(ValueError, match="attn_implementation"):
            FathomForCausalLM.from_pretrained(path, **settings)
        return
    theirs = AutoModelForCausalLM.from_pretrained(path, **settings).eval()
    ours = FathomForCausalLM.from_pretrained(path, **settings).eval()
    ids = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = ours(ids).logits, theirs(ids).logits
    if most := STRIDED.get((name.split("-")[0], dtype)) or FUSED.get((name, dtype)):
        assert (found - expected).abs().max() < most
    else:
        assert torch.equal(found, expected)


def test_every_family_has_a_case() -> None:
    assert {stock(name).config.model_type for name in CASES} == set(FAMILIES)


def test_why_phi3_differs_in_the_last_bit() -> None:
    gate = torch.randn(26, 160, generator=torch.Generator().manual_seed(0)).chunk(2, -1)[0]
    difference = (F.silu(gate) - F.silu(gate.contiguous())).abs().max()
    assert 0 < difference < 1e-6 if WIDE else difference < 1e-6


@pytest.mark.quick(*FEW)
def test_back_again_tensor_for_tensor(directory: tuple[str, Path], tmp_path: Path) -> None:
    _, path = directory
    ours = FathomForCausalLM.from_pretrained(path)
    export(ours, tmp_path / "back", form="native")
    before, after = (open_tensors(place) for place in (path, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    theirs, again = (AutoModelForCausalLM.from_pretrained(place).eval() for place in (path, tmp_path / "back"))
    assert type(again) is type(theirs)
    ids = torch.randint(0, 97, (1, 9))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, again(ids).logits)
    before, after = ({**model.config.to_dict(), "_name_or_path": ""} for model in (theirs, again))
    assert before == after


@pytest.mark.parametrize("window", [5, None])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_gemma_without_windows_runs_after_its_export(name: str, window: int | None, tmp_path: Path) -> None:
    """The class makes a mask with a window whether or not a layer takes it."""
    theirs = AutoModelForCausalLM.from_config(
        stock_config(name, layer_types=["full_attention"] * 3), attn_implementation="eager"
    ).eval()
    theirs.config.sliding_window = window
    theirs.save_pretrained(tmp_path / "theirs")
    ours = FathomForCausalLM.from_pretrained(tmp_path / "theirs")
    back = AutoModelForCausalLM.from_pretrained(
        export(ours, tmp_path / "back", form="native"), attn_implementation="eager"
    )
    assert back.config.sliding_window == (window or 4096)
    theirs.config.sliding_window, ids = 5, torch.randint(0, 97, (1, 9))
    with torch.no_grad():
        assert torch.equal(back(ids).logits, theirs(ids).logits)


@pytest.mark.quick("llama-gqa", "gpt2")
def test_the_stored_type_is_kept_where_it_is_asked_for(directory: tuple[str, Path], tmp_path: Path) -> None:
    _, path = directory
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert FathomForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    # As older checkpoints have it, which do not name the type.
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in TYPES}))
    assert FathomForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def their_gradients(theirs: torch.nn.Module, ids: torch.Tensor, place: Path) -> dict[str, torch.Tensor]:
    """Each parameter's gradient in the family's own class, by our names."""
    theirs(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():  # their gradients as the weights of a checkpoint, which opens under our names
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(place)
    return dict(FathomForCausalLM.from_pretrained(place, dtype=torch.float32).named_parameters())


def deviation(ours: FathomForCausalLM, ids: torch.Tensor, theirs: dict[str, torch.Tensor]) -> float:
    """The length of the difference of both gradients, in lengths of the gradient."""
    ours.zero_grad()
    ours(input_ids=ids, labels=ids).loss.backward()
    found, expected = (
        torch.cat([part.detach().flatten() for part in parts])
        for parts in ([p.grad for p in ours.parameters()], [theirs[name] for name, _ in ours.named_parameters()])
    )
    return float((found - expected).norm() / expected.norm())


@pytest.mark.quick("llama-gqa", "gpt_neox", "gpt2", "gemma2", "phi3")
def test_gradients_are_the_family_s_own(directory: tuple[str, Path], tmp_path: Path) -> None:
    """But for the order of sums: backward passes of norms, rotation and loss are written by hand."""
    _, path = directory
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    ids = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(2))
    theirs, ours = (kind.from_pretrained(path, **settings).eval() for kind in (AutoModelForCausalLM, FathomForCausalLM))
    expected = their_gradients(theirs, ids, tmp_path)
    assert deviation(ours, ids, expected) < 1e-6 and all(one.abs().max() > 0 for one in expected.values())
    with torch.no_grad():
        ours.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    assert deviation(ours, ids, expected) > 1e-5


@pytest.mark.quick("llama-gqa-*", "phi3-kept")
@pytest.mark.parametrize("old", ["kept", "gone"])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gpt_neox", "opt", "phi3"])
def test_a_single_file_wins_over_an_index_left_behind(name: str, old: str, tmp_path: Path) -> None:
    """Saved in shards, then again in one file with other weights: transformers leaves the index."""
    stock(name, seed=1).save_pretrained(tmp_path, max_shard_size="20KB")
    index, shards = (tmp_path / INDEX).read_bytes(), {f: f.read_bytes() for f in tmp_path.glob("model-*.safetensors")}
    theirs = stock(name)
    theirs.save_pretrained(tmp_path)
    for file, held in shards.items() if old == "kept" else ():
        file.write_bytes(held)
    (tmp_path / INDEX).write_bytes(index)
    check_checkpoint(tmp_path)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        found = FathomForCausalLM.from_pretrained(tmp_path).eval()(ids).logits
        assert (found - theirs(ids).logits).abs().max() < 1e-5
    assert {one.file for one in open_safetensors(LocalOrigin(tmp_path)).tensors.values()} == {"model.safetensors"}
    if old == "kept":  # the control: without the single file the shards are read, and hold other weights
        (tmp_path / "model.safetensors").unlink()
        with torch.no_grad():
            other = FathomForCausalLM.from_pretrained(tmp_path).eval()(ids).logits
        assert (other - theirs(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_a_folder_of_a_directory_opens_with_its_own_weights(name: str, tmp_path: Path) -> None:
    """Another model of the same shape is in the directory itself."""
    stock(name, seed=1).save_pretrained(tmp_path)
    theirs, ids = stock(name), torch.arange(1, 9)[None]
    theirs.save_pretrained(tmp_path / "inner")
    with torch.no_grad():
        found = FathomForCausalLM.from_pretrained(tmp_path, subfolder="inner").eval()(ids).logits
        assert (found - theirs(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gemma", "gpt2", "phi3-window"])
def test_a_decoder_saved_without_its_head_opens(name: str, tmp_path: Path) -> None:
    """Its tensors have no prefix; the head is the embedding."""
    theirs, ids = stock(name), torch.arange(1, 9)[None]
    theirs.base_model.save_pretrained(tmp_path)
    with torch.no_grad():
        found = FathomForCausalLM.from_pretrained(tmp_path).eval()(ids).logits
        assert (found - theirs(ids).logits).abs().max() < 1e-5

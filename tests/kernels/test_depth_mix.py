"""The depth mix in Triton, held to its reference: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fathom.kernels import depth_mix as ours
from fathom.models.mixers import depth_attention

from .held import DEVICE, hold, hold_no_zeros

GROUPS = (1, 4, 8)
COUNTS = (1, 2, 7, 24)
"""Of earlier layers; the layer itself comes last."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def drawn(group: int, count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Query, bias, key, value and sources of a random shape, laid out as projections make them or head by head."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, length, heads = choose.choice((1, 2)), choose.choice((1, 3, 11)), choose.choice((1, 2))
    width = choose.choice((4, 8, 20))

    def tensor(heads: int) -> Tensor:
        shape = (batch, length, heads, width) if choose.random() < 0.8 else (batch, heads, length, width)
        x = torch.randn(shape, generator=generator).to(dtype)
        return (x.transpose(1, 2) if shape[1] == length and shape[2] == heads else x).requires_grad_()

    bias = torch.randn((), generator=generator)
    query, *rest = tensor(group * heads), *(tensor(heads) for _ in range(2 * count + 2))
    return [query, bias, *rest]


def reference(query: Tensor, bias: Tensor, key: Tensor, value: Tensor, *sources: Tensor) -> Tensor:
    return depth_attention.mix(query, key, value, sources, bias)[0]


def mixed_by(module):
    def kernel(query: Tensor, bias: Tensor, key: Tensor, value: Tensor, *sources: Tensor) -> Tensor:
        return module.depth_mix(query, key, value, sources, bias)

    return kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_equals_the_reference(group, dtype):
    for seed, count in enumerate(COUNTS):
        hold(mixed_by(ours), reference, drawn(group, count, dtype, 10 * group + seed), dtype)


def test_without_a_bias_and_with_weights():
    query, _, key, value, *sources = (x.to(DEVICE) for x in drawn(4, 3, torch.float32, 5))
    mixed, weights = ours.mix(query, [*sources[::2], key], [*sources[1::2], value], None)
    wanted, alpha, _ = depth_attention.mix(query, key, value, tuple(sources))
    torch.testing.assert_close(mixed, wanted)
    torch.testing.assert_close(weights, torch.stack([w.squeeze(-1).transpose(1, 2) for w in alpha]))
    assert not weights.requires_grad


def test_under_autocast_queries_and_values_differ_in_type():
    query, bias, key, *rest = drawn(4, 2, torch.bfloat16, 6)
    wide = [x.detach().float().requires_grad_() for x in (query, key)]
    hold(mixed_by(ours), reference, [wide[0], bias, wide[1], *rest], torch.bfloat16)


def test_nothing_to_mix_is_no_error():
    empty = torch.zeros(1, 2, 0, 8, device=DEVICE, requires_grad=True)
    mixed, _ = ours.mix(empty, [empty, empty], [empty, empty], None)
    mixed.sum().backward()
    assert mixed.shape == empty.shape == empty.grad.shape


@pytest.mark.parametrize("biased", [True, False])
def test_is_an_operator_of_torch(biased):
    query, bias, key, value, *sources = (x.to(DEVICE) for x in drawn(4, 2, torch.float32, 7))
    call = (query, [*sources[::2], key], [*sources[1::2], value], bias if biased else None)
    torch.library.opcheck(ours.mix, call)


def test_the_weights_get_no_gradient_of_zeros():
    query, bias, key, value, *sources = (x.to(DEVICE) for x in drawn(4, 2, torch.float32, 7))
    mixed, _ = ours.mix(query, [*sources[::2], key], [*sources[1::2], value], bias)
    hold_no_zeros(mixed, (query, key, value, *sources))


PLANTED = (
    ("(gains[j] - mean)", "(gains[j] + mean)"),
    ("tl.load(bias)", "-tl.load(bias)"),
    ("return total / GROUP", "return total"),
    ("(score[:, None] * q)", "(-score[:, None] * q)"),
)


@pytest.mark.parametrize(("right", "wrong"), PLANTED)
def test_a_planted_fault_is_seen(right, wrong, tmp_path):
    planted = planted_in(ours, right, wrong, tmp_path)
    with pytest.raises(AssertionError, match="is off by"):
        hold(mixed_by(planted), reference, drawn(4, 2, torch.float32, 8), torch.float32)


def planted_in(module, right: str, wrong: str, folder: Path):
    """A kernel's file with a fault, imported under another name."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1
    file = folder / f"planted_{abs(hash(wrong))}.py"
    file.write_text(source.replace(right, wrong).replace('"fathom::', f'"{file.stem}::'), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    return planted

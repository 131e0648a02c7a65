"""FreqKV (arXiv 2505.00570): keep the low frequencies of the memory.

    C = √(L/M) · D_Lᵀ · D_M[:L]         D_n the orthonormal DCT-II matrix

The inverse transform of length L resamples; the factor makes a constant signal a fixed point, so that compressions do
not amplify. The product has a closed form: the basis, summed over t < L, is a Christoffel–Darboux kernel, and the
angles of the L entries are zeros of the next polynomial, cos Lα = 0. What is left is one term for each entry:

    C_im = (−1)^i sin α cos Lβ / (M (cos β − cos α)),  L/M where α = β      α = π(2i + 1)/2L, β = π(2m + 1)/2M
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .method import Fixed, Reducer
from .rope import Rope
from .schedule import Schedule

TRANSFORMS = ("auto", "matrix", "fft")
FFT_FROM = 3000
"""`auto` takes the FFT if a compression reads at least this many entries."""


class FreqKV(Fixed):
    """The lowest L of M frequencies. `transform` by a `matrix` made once, by `fft`, or by the faster one (`auto`)."""

    name = "freqkv"

    def __init__(self, schedule: Schedule, rope: Rope, transform: str = "auto") -> None:
        super().__init__(schedule, rope)
        if transform not in TRANSFORMS:
            raise ValueError(f"transform must be one of {', '.join(TRANSFORMS)}, got {transform!r}")
        large = schedule.compressed >= FFT_FROM
        self.transform = ("fft" if large else "matrix") if transform == "auto" else transform

    @staticmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """The rows `i` of C, `[rows, M]`, in float64."""
        # α and β are a and b in units of π / 2LM. These are whole numbers, so their difference is exact, and so is the
        # quotient where numerator and denominator are small.
        unit = math.pi / (4 * kept * compressed)  # of α / 2 and β / 2
        m = torch.arange(compressed)
        a, b = ((2 * i + 1) * compressed).unsqueeze(1), (2 * m + 1) * kept
        sin_a, cos_a, sin_b, cos_b = (
            torch.sin(unit * angle.double()) for x in (a, b) for angle in (x, 2 * kept * compressed - x)
        )
        turns, rest = b // (2 * compressed), b % (2 * compressed)
        cos_lb = (1 - 2 * (turns % 2)) * torch.sin(math.pi / (2 * compressed) * (compressed - rest).double())
        sign = (1 - 2 * (i % 2)).unsqueeze(1)
        both, apart = sin_a * cos_b + cos_a * sin_b, torch.sin(unit * (a - b).double())  # of (α ± β) / 2
        c = sign * sin_a * cos_a * cos_lb / (compressed * both * apart)
        return torch.where(a == b, kept / compressed, c)

    def reducer(self, keys: Tensor, queries: Tensor | None) -> Reducer:
        """x → C x."""
        if self.transform == "matrix":
            return super().reducer(keys, queries)
        kept, scale = self.schedule.kept, math.sqrt(self.schedule.kept / self.schedule.compressed)
        return lambda x: inverse_dct(dct(x)[..., :kept, :]) * scale


def dct_matrix(n: int, rows: int | None = None) -> Tensor:
    """D, `[n, n]` or its first rows: D_tm = a_t cos(π t (2m + 1) / 2n), a_0 = √(1/n), a_t = √(2/n), in float64."""
    t = torch.arange(n if rows is None else rows, dtype=torch.float64).unsqueeze(1)
    m = torch.arange(n, dtype=torch.float64)
    d = math.sqrt(2 / n) * torch.cos(torch.pi / (2 * n) * (t * (2 * m + 1) % (4 * n)))
    d[0] /= math.sqrt(2)
    return d


def dct(x: Tensor) -> Tensor:
    """D x along the last but one dimension by one FFT of the same length: even entries up, odd ones down."""
    n = x.shape[-2]
    folded = torch.cat([x[..., 0::2, :], x[..., 1::2, :].flip(-2)], dim=-2)
    spectrum = torch.fft.fft(folded, dim=-2) * _twiddle(n, x)
    return spectrum.real * _norm(n, x)


def inverse_dct(y: Tensor) -> Tensor:
    """Dᵀ y along the last but one dimension."""
    n = y.shape[-2]
    y = y / _norm(n, y)
    # For real x the missing imaginary part of coefficient t is minus coefficient n − t.
    mirrored = torch.cat([torch.zeros_like(y[..., :1, :]), y[..., 1:, :].flip(-2)], dim=-2)
    folded = torch.fft.ifft(torch.complex(y, -mirrored) * _twiddle(n, y).conj(), dim=-2).real
    x = torch.empty_like(folded)
    half = (n + 1) // 2
    x[..., 0::2, :] = folded[..., :half, :]
    x[..., 1::2, :] = folded[..., half:, :].flip(-2)
    return x


def _twiddle(n: int, like: Tensor) -> Tensor:
    angle = -torch.pi / (2 * n) * torch.arange(n, dtype=torch.float64, device=like.device)
    return torch.polar(torch.ones_like(angle), angle).to(like.dtype.to_complex()).unsqueeze(-1)


def _norm(n: int, like: Tensor) -> Tensor:
    norm = torch.full((n, 1), math.sqrt(2 / n), dtype=like.dtype, device=like.device)
    norm[0] = math.sqrt(1 / n)
    return norm

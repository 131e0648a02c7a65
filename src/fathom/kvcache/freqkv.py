"""FreqKV (arXiv 2505.00570): keep the low frequencies of the memory.

    C = √(L/M) · D_Lᵀ · D_M[:L]         D_n the orthonormal DCT-II matrix

The inverse transform of length L resamples; the factor makes a constant signal a fixed point, so that compressions do
not amplify. The product has a closed form: the basis, summed over t < L, is a Christoffel–Darboux kernel, and the
angles of the L entries are zeros of the next polynomial, cos Lα = 0. What is left is one term for each entry:

    C_im = (−1)^i sin α cos Lβ / (M (cos β − cos α)),  L/M where α = β      α = π(2i + 1)/2L, β = π(2m + 1)/2M

`schedule.py` decides when the memory is compressed, and how many tokens fit until then. `Linear` in `method.py` applies
C to values, and to keys without their rotation. `build.py` warns about a model that was not tuned for this method.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .matrix import Fixed
from .rope import Rope
from .schedule import Schedule

TRANSFORMS = ("auto", "matrix", "fft")
FFT_FROM = 512
"""`auto` takes the FFT if a compression reads at least this many entries."""


class FreqKV(Fixed):
    """Keeps the lowest L of M frequencies of the entries. `transform`: `matrix` (built once), `fft`, or the faster of
    both (`auto`)."""

    name = "freqkv"

    def __init__(self, schedule: Schedule, rope: Rope, transform: str = "auto") -> None:
        super().__init__(schedule, rope)
        if transform not in TRANSFORMS:
            raise ValueError(f"transform must be one of {', '.join(TRANSFORMS)}, got {transform!r}")
        large = schedule.compressed >= FFT_FROM
        self.transform = ("fft" if large else "matrix") if transform == "auto" else transform

    @staticmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """Rows `i` of the compression matrix C, `[rows, M]`, in float64."""
        # α and β are a and b in units of π / 2LM. a and b are integers, so their difference is exact, and so is the
        # quotient if numerator and denominator are small.
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

    def reduce(self, x: Tensor) -> Tensor:
        """C x."""
        if self.transform == "matrix":
            return super().reduce(x)
        return inverse_dct(self.spectrum(x)) * self.factor

    def spectrum(self, x: Tensor) -> Tensor:
        """The DCT coefficients of the lowest frequencies, `[B, H_kv, L, D]`."""
        return dct(x, self.schedule.kept)

    @property
    def factor(self) -> float:
        """√(L/M)."""
        return math.sqrt(self.schedule.kept / self.schedule.compressed)


def dct_matrix(n: int, rows: int | None = None) -> Tensor:
    """The DCT matrix D, `[n, n]` or its first rows: D_tm = a_t cos(π t (2m + 1) / 2n), a_0 = √(1/n), a_t = √(2/n), in
    float64."""
    t = torch.arange(n if rows is None else rows, dtype=torch.float64).unsqueeze(1)
    m = torch.arange(n, dtype=torch.float64)
    d = math.sqrt(2 / n) * torch.cos(torch.pi / (2 * n) * (t * (2 * m + 1) % (4 * n)))
    d[0] /= math.sqrt(2)
    return d


def dct(x: Tensor, rows: int | None = None) -> Tensor:
    """The DCT D x along the second-to-last dimension, or its first rows: a real FFT of the even entries ascending, then
    the odd ones descending."""
    n = x.shape[-2]
    rows = n if rows is None else rows
    x = x.mT
    spectrum = torch.fft.rfft(torch.cat([x[..., 0::2], x[..., 1::2].flip(-1)], dim=-1))
    turn = _turn(n, x.dtype, x.device)
    half = min(rows, n // 2 + 1)
    found = (spectrum[..., :half] * turn[:half]).real
    if rows > half:  # up to its factor, coefficient t is the conjugate of coefficient n − t
        rest = spectrum[..., n - rows + 1 : (n + 1) // 2].flip(-1).conj() * turn[half:rows]
        found = torch.cat([found, rest.real], dim=-1)
    return found.mT


def inverse_dct(y: Tensor) -> Tensor:
    """The inverse DCT Dᵀ y along the second-to-last dimension."""
    n = y.shape[-2]
    y, half = y.mT, n // 2 + 1
    mirrored = torch.cat([torch.zeros_like(y[..., :1]), y.flip(-1)[..., : half - 1]], dim=-1)
    folded = torch.fft.irfft(torch.complex(y[..., :half], -mirrored) * _back(n, y.dtype, y.device), n=n)
    x = torch.empty_like(folded)
    x[..., 0::2] = folded[..., : (n + 1) // 2]
    x[..., 1::2] = folded[..., (n + 1) // 2 :].flip(-1)
    return x.mT


@lru_cache(maxsize=16)
def _turn(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The factors a_t exp(−iπt / 2n) for every DCT coefficient t, where a_t is the DCT's norm."""
    with torch.inference_mode(False):  # training may use it later
        angle = -torch.pi / (2 * n) * torch.arange(n, dtype=dtype, device=device)
        norm = torch.full((n,), math.sqrt(2 / n), dtype=dtype, device=device)
        norm[0] = math.sqrt(1 / n)
        return torch.polar(norm, angle)


@lru_cache(maxsize=16)
def _back(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The factors exp(iπt / 2n) / a_t of the inverse DCT, for the first half of the coefficients."""
    with torch.inference_mode(False):
        turn = _turn(n, dtype, device)[: n // 2 + 1]
        back = turn.conj() / turn.abs() * math.sqrt(n / 2)
        back[0] *= math.sqrt(2)
        return back

"""The portrait: the same pixels everywhere, close for close sketches, far for far ones."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from scipy.stats import norm, spearmanr

from fathom.lineage.huref import quantised
from fathom.lineage.publishing import portrait

GOLDEN = "d419dbd96ff895ff0bfb9c02feab6d23f9c83e0e233622062cd9460b5b2d1779"
GOLDEN_FILE = "c54739d280ee38ef4799c835e886c18f4378a1ef9f9dd0d0df09f0c3620e2c41"


def fixed_sketch() -> np.ndarray:
    """Signed bytes that no random generator can change: bell-shaped sums of hash bytes."""
    raw = b"".join(hashlib.sha256(b"portrait %d" % i).digest() for i in range(64))
    return (np.frombuffer(raw, np.uint8).astype(np.int64).reshape(512, 4).sum(1) - 510 >> 2).astype(np.int8)


def related(draw, rho):
    a = draw.normal(size=512)
    return quantised(a), quantised(rho * a + np.sqrt(1 - rho * rho) * draw.normal(size=512))


def likeness(a, b):
    """Structural similarity (SSIM) of luminance, Gaussian window of 1.5 pixels."""
    a, b = (image.astype(float) @ [0.299, 0.587, 0.114] for image in (a, b))
    mean_a, mean_b = gaussian_filter(a, 1.5), gaussian_filter(b, 1.5)
    var_a, var_b = gaussian_filter(a * a, 1.5) - mean_a**2, gaussian_filter(b * b, 1.5) - mean_b**2
    cov = gaussian_filter(a * b, 1.5) - mean_a * mean_b
    c1, c2 = 6.5025, 58.5225
    return np.mean((2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))


def test_the_table_is_the_normal_distribution():
    exact = norm.cdf(np.arange(-128, 129) / 32) * portrait.ONE
    assert (np.array(portrait._normal_table()) == np.floor(exact)).all()


def test_golden_pixels_and_file():
    image = portrait.pixels(fixed_sketch())
    assert portrait.pixel_hash(image) == GOLDEN
    assert hashlib.sha256(portrait.png(image)).hexdigest() == GOLDEN_FILE
    assert portrait.pixels(fixed_sketch()) is image, "drawn once"


def test_one_changed_number_is_seen_by_the_hash_and_hardly_by_the_eye():
    z = fixed_sketch()
    other = z.copy()
    other[100] += 4
    images = [portrait.pixels(value).astype(int) for value in (z, other)]
    assert portrait.pixel_hash(images[0]) != portrait.pixel_hash(images[1])
    assert np.abs(images[0] - images[1]).mean() < 1.5
    assert portrait.words(z) != portrait.words(other)


@pytest.mark.slow
def test_likeness_of_pictures_follows_likeness_of_sketches():
    draw, cosines, pictures = np.random.default_rng(0), [], []
    for rho in draw.uniform(0, 1, 200):
        a, b = related(draw, rho)
        cosines.append(np.dot(a.astype(float), b) / np.linalg.norm(a.astype(float)) / np.linalg.norm(b.astype(float)))
        pictures.append(likeness(portrait.pixels(a), portrait.pixels(b)))
    assert spearmanr(cosines, pictures).statistic >= 0.95


@pytest.mark.parametrize(("rho", "want"), [(0.99, 0.032), (0.95, 0.071), (0.7, 0.176), (0.2, 0.295), (0.0, 0.333)])
def test_traits_move_as_the_card_says(rho, want):
    draw = np.random.default_rng(1)
    moved = [np.abs(np.subtract(*map(portrait.traits, related(draw, rho)))).mean() / 65536 for _ in range(60)]
    assert np.mean(moved) == pytest.approx(want, abs=0.015)


def test_traits_are_uniform():
    draw = np.random.default_rng(2)
    u = np.array([portrait.traits(quantised(draw.normal(size=512))) for _ in range(200)]) / 65536
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.std() - np.sqrt(1 / 12)) < 0.01
    assert u.min() >= 0 and u.max() < 1


def test_the_png_is_one_that_others_read():
    imread = pytest.importorskip("matplotlib.image").imread
    image = portrait.pixels(fixed_sketch())
    back = imread(io.BytesIO(portrait.png(image)), format="png")
    assert np.array_equal(np.rint(back[..., :3] * 255).astype(np.uint8), image)


def test_extreme_sketches_still_draw():
    for value in (127, -127, 0):
        image = portrait.pixels(np.full(512, value, np.int8))
        assert image.shape == (320, 320, 3) and image.dtype == np.uint8
    with pytest.raises(ValueError, match="512"):
        portrait.pixels(np.zeros(3, np.int8))


def test_words():
    assert len(set(portrait.WORDS)) == 256 and all(word.isascii() and word.islower() for word in portrait.WORDS)
    assert len(portrait.words(fixed_sketch())) == 6

"""A picture and six words for a sketch: a visual checksum, not a verdict.

All arithmetic from the 512 signed bytes to the pixels uses integers, so the picture is the same on every machine. The
bytes are rotated by signed Hadamard transforms; sums of nine coordinates become the 56 traits of an animal (through
the normal distribution function, so that each trait is uniform over models), and the single coordinates paint its
coat and the light behind it. A small change of the sketch is a small change of the picture, since all traits are
blended and none is chosen by a maximum.

`cards.py` makes the sketch (`sketch`). To verify one, `commitments.py` and `verification.py` take cosines of sketches.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from fathom.checkpoints.tensors import Array

SIZE = 320
SIGNATURE = b"\x89PNG\r\n\x1a\n"
TRAITS = 56
ONE = 1 << 16
CAPTION = (
    "A visual checksum of the weights' sketch. Near-identical pictures mean a sketch correlation of about 0.95 or "
    "more; a model trained on for long looks different from its base; different pictures prove nothing. "
    "The six words are a hash of the sketch: the least change gives six others."
)

Colour = tuple[int, int, int]


def coordinates(z: Array, key: bytes) -> Array:
    """A fixed rotation of z (times √512), in integers: random signs, then a Walsh–Hadamard transform, twice."""
    values = np.asarray(z, np.int64).copy()
    if values.shape != (512,):
        raise ValueError("a portrait needs a vector of 512 numbers")
    for turn in range(2):
        bits = hashlib.blake2b(key + bytes([turn]), digest_size=64).digest()
        values *= 1 - 2 * np.unpackbits(np.frombuffer(bits, np.uint8)).astype(np.int64)
        step = 1
        while step < 512:
            pairs = values.reshape(-1, 2, step)
            values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
            step *= 2
    return values >> 4  # the second transform would grow 22.6-fold; keep about the scale of one


@lru_cache(maxsize=1)
def _normal_table() -> tuple[int, ...]:
    """A table of the normal distribution, Φ(j/32) · 2¹⁶ for j = −128 … 128, rounded down. No entry is within 0.004 of a
    whole number, except Φ(0), which is exact, so every machine has the same table."""
    return tuple(int(NormalDist().cdf(j / 32) * ONE) for j in range(-128, 129))


def traits(z: Array) -> list[int]:
    """The 56 numbers in [0, 2¹⁶) that determine a portrait: u = Φ(√m · mean of m = 9 rotated coordinates)."""
    sums = coordinates(z, b"traits")[: TRAITS * 9].reshape(TRAITS, 9).sum(1)
    table, out = _normal_table(), []
    for value in sums.tolist():
        # one coordinate has sd 32·512/16 = 1024, a sum of nine 3072; x in units of 1/1024
        x = min(max(value * 1024 // 3072 + 4096, 0), 8191)
        low, part = x >> 5, x & 31
        out.append(min(table[low] + (table[low + 1] - table[low]) * part // 32, ONE - 1))
    return out


def between(low: int, high: int, u: int) -> int:
    """The point at fraction u between low and high."""
    return low + ((high - low) * u >> 16)


def blend(corners: tuple[Colour, Colour, Colour, Colour], u: int, v: int) -> Colour:
    """Bilinear mix of four colours."""
    top = [between(a, b, u) for a, b in zip(corners[0], corners[1], strict=True)]
    low = [between(a, b, u) for a, b in zip(corners[2], corners[3], strict=True)]
    r, g, b = (between(a, c, v) for a, c in zip(top, low, strict=True))
    return r, g, b


def smooth(t: Array) -> Array:
    """Smoothstep on [0, 2¹⁶]."""
    t = np.clip(t, 0, ONE)
    return (t * t >> 16) * (3 * ONE - 2 * t) >> 16


def field(values: Array, x: Array, y: Array) -> Array:
    """The values at (x, y) of a quadratic B-spline through a square grid of numbers that covers [−1024, 1024]²."""
    side = len(values)
    (ix, wx), (iy, wy) = _spline(x, side), _spline(y, side)
    total = np.zeros(np.broadcast_shapes(x.shape, y.shape), np.int64)
    for j in range(3):
        row = sum(values[iy + j, ix + i] * wx[i] for i in range(3)) >> 16
        total += row * wy[j] >> 16
    return total


def _spline(c: Array, side: int) -> tuple[Array, list[Array]]:
    """For each coordinate, the first of three spline knots, and the knots' weights (½(½−t)², ¾−t², ½(½+t)²) in units of
    2⁻¹⁶."""
    g = np.clip(c + 1024, 0, 2047) * (side - 2) << 5  # cells of 2¹⁶
    index = np.minimum(g >> 16, side - 3)
    t = g - (index << 16)  # 0 … 2¹⁶
    left, right = (ONE - t) * (ONE - t) >> 17, t * t >> 17
    return index, [left, ONE - left - right, right]


def noise(x: Array, y: Array, seed: int) -> Array:
    """Pseudo-random noise: a hash of integer lattice points, in [0, 2¹⁶)."""
    h = (x * 374761393 + y * 668265263 + seed * 2147483647) & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 1274126177 & 0xFFFFFFFF
    return (h ^ (h >> 16)) & 0xFFFF


def value_noise(x: Array, y: Array, cell: int, seed: int) -> Array:
    """Smoothly interpolated lattice noise, in [0, 2¹⁶)."""
    ix, iy = x // cell, y // cell
    fx, fy = (smooth(((c - i * cell) << 16) // cell) for c, i in ((x, ix), (y, iy)))
    top = noise(ix, iy, seed) * (ONE - fx) + noise(ix + 1, iy, seed) * fx >> 16
    low = noise(ix, iy + 1, seed) * (ONE - fx) + noise(ix + 1, iy + 1, seed) * fx >> 16
    return top * (ONE - fy) + low * fy >> 16


@dataclass
class Canvas:
    """Pixels [S, S, 3] as integers; x [1, S] and y [S, 1] run from −1024 to 1024, y down, and broadcast."""

    pixels: Array
    x: Array
    y: Array

    @classmethod
    def blank(cls) -> Canvas:
        """A black canvas."""
        line = ((2 * np.arange(SIZE, dtype=np.int64) + 1 - SIZE) * 1024) // SIZE
        return cls(np.zeros((SIZE, SIZE, 3), np.int64), line[None, :], line[:, None])

    def paint(self, alpha: Array, colour: Colour | Array) -> None:
        """Blend a colour into the picture with weight alpha (0 … 2¹⁶)."""
        alpha = np.broadcast_to(alpha, (SIZE, SIZE))
        rows, columns = np.flatnonzero(alpha.any(1)), np.flatnonzero(alpha.any(0))
        if not len(rows):
            return
        box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)  # nothing changes outside it
        top = np.asarray(colour, np.int64)
        top = top[box] if top.ndim == 3 else top
        self.pixels[box] += (top - self.pixels[box]) * alpha[box][..., None] >> 16

    def ellipse(self, cx: int, cy: int, rx: int, ry: int, soft: int = 8) -> Array:
        """Soft mask of an ellipse; `soft` is the half-width of its edge."""
        dx, dy = ((self.x - cx) << 8) // max(rx, 1), ((self.y - cy) << 8) // max(ry, 1)
        return _inside(dx * dx + dy * dy, min(rx, ry), soft)

    def leaf(self, cx: int, cy: int, ux: int, uy: int, length: int, width: int, taper: int, soft: int = 8) -> Array:
        """Soft mask of an ellipse along the direction (ux, uy)/1024 that narrows towards its tip."""
        along = ((self.x - cx) * ux + (self.y - cy) * uy) >> 10
        across = ((self.y - cy) * ux - (self.x - cx) * uy) >> 10
        a = (along << 8) // max(length, 1)
        girth = np.maximum(width * (ONE - (taper * np.clip(a, -256, 256) >> 8)) >> 16, 4)
        b = (across << 8) // girth
        return _inside(a * a + b * b, width, soft)


def _inside(square: Array, radius: int, soft: int) -> Array:
    # square is 2¹⁶ on the outline and rises by 2·2¹⁶/radius per unit outside it
    edge = max(2 * ONE * soft // max(radius, 1), 1)
    return smooth(((ONE + edge - square) << 15) // edge)


COAT = ((38, 34, 38), (150, 78, 36), (150, 152, 160), (240, 222, 190))
SECOND = ((250, 246, 238), (214, 160, 92), (70, 52, 46), (118, 124, 140))
IRIS = ((72, 42, 20), (214, 150, 40), (60, 130, 80), (96, 156, 214))
COLLAR = ((206, 40, 48), (36, 96, 200), (244, 196, 48), (40, 150, 96))
SCENERY = ((122, 182, 232), (104, 166, 84), (222, 164, 118), (112, 92, 158))


def pixels(z: Array) -> Array:
    """The portrait, read-only uint8 [320, 320, 3]."""
    return _drawn(np.asarray(z, np.int64).tobytes())


@lru_cache(maxsize=8)  # a comparison hashes both portraits, then shows and writes them
def _drawn(sketch: bytes) -> Array:
    z = np.frombuffer(sketch, np.int64)
    u = iter(traits(z))
    light = coordinates(z, b"light")[:256].reshape(16, 16)
    coat = coordinates(z, b"coat")[:256].reshape(16, 16)
    canvas = Canvas.blank()
    _background(canvas, u, light)
    _animal(canvas, u, coat)
    image = np.clip(canvas.pixels, 0, 255).astype(np.uint8)
    image.flags.writeable = False
    return image


def _background(canvas: Canvas, u: Iterator[int], light: Array) -> None:
    upper, lower = blend(SCENERY, next(u), next(u)), blend(SCENERY, next(u), next(u))
    fall = smooth((canvas.y + 1024 << 5) + between(-24000, 24000, next(u)))
    canvas.paint(np.full((1, 1), ONE), upper)
    canvas.paint(fall, lower)
    dapple = field(light, canvas.x, canvas.y)
    canvas.pixels += (dapple * 62 >> 10)[..., None] * np.array([10, 9, 7]) // 10


def _animal(canvas: Canvas, u: Iterator[int], coat: Array) -> None:
    base, second = blend(COAT, next(u), next(u)), blend(SECOND, next(u), next(u))
    head_x, head_y = between(350, 500, next(u)), between(370, 480, next(u))
    top = between(-150, -30, next(u))
    texture = _Coat(canvas, base, second, coat, u)
    _body(canvas, texture, u)
    _ears(canvas, texture, u, head_x, head_y, top)
    _face(canvas, texture, u, head_x, head_y, top)
    _muzzle(canvas, u, head_y, top)


class _Coat:
    """Colour of the fur at every pixel: two colours in patches, spots, strokes, and light from one side."""

    def __init__(self, canvas: Canvas, base: Colour, second: Colour, coat: Array, u: Iterator[int]):
        x, y = canvas.x, canvas.y
        patches = 2 * field(coat, x, y) + between(-1500, 900, next(u))
        mask = smooth((patches << 5) + ONE // 2)
        colour = np.array(base) + ((np.array(second) - np.array(base)) * mask[..., None] >> 16)
        spots = smooth((value_noise(x, y, 110, 7) - between(60000, 38000, next(u))) * 6)
        colour -= colour * (spots * between(0, 36000, next(u)) >> 16)[..., None] >> 17
        # strokes run outwards from between the eyes: long cells along the radius, thin ones around it
        length = between(40, 150, next(u))
        radius = np.abs(x) + np.abs(y)
        turn = (x << 9) // (radius + 64) + ((y << 8) // (radius + 64))
        strokes = value_noise(turn, radius, 12, 3) + value_noise(turn * 2, radius + 5000, length, 5) - ONE
        colour += (colour * (strokes * between(8000, 22000, next(u)) >> 16)[..., None]) >> 16
        side, above = between(-16, 16, next(u)), between(0, 18, next(u))
        self.shade = (x * side - y * above) >> 10
        self.colour = colour + self.shade[..., None]
        self.base, self.second = base, second

    def darker(self, amount: int) -> Array:
        """The coat, darkened by amount/2¹⁶."""
        return self.colour - (self.colour * amount >> 16)


def _body(canvas: Canvas, coat: _Coat, u: Iterator[int]) -> None:
    canvas.paint(canvas.ellipse(0, 1040, between(520, 760, next(u)), 600), coat.darker(9000))
    neck = between(230, 300, next(u))
    canvas.paint(canvas.ellipse(0, 520, neck, 420), coat.darker(14000))
    chest = canvas.ellipse(0, 960, between(60, 340, next(u)), 380, 60)
    canvas.paint(chest * 3 // 4, coat.second)
    collar = blend(COLLAR, next(u), next(u))
    band = between(30, 66, next(u))
    ring = canvas.ellipse(0, 400, neck + 20, 160 + band) - canvas.ellipse(0, 400 - band, neck + 34, 160)
    canvas.paint(np.clip(ring, 0, ONE), collar)
    tag = between(28, 66, next(u))
    canvas.paint(canvas.ellipse(0, 566 + band + tag // 2, tag, tag), (150, 116, 60))
    canvas.paint(canvas.ellipse(0, 564 + band + tag // 2, tag - 7, tag - 7), (236, 204, 120))


def _ears(canvas: Canvas, coat: _Coat, u: Iterator[int], head_x: int, head_y: int, top: int) -> None:
    length, width = between(150, 330, next(u)), between(95, 190, next(u))
    t = between(150, 2100, next(u))  # tangent of half the angle from upright, in 1/1024: pricked … hanging
    square = 1024 * 1024
    ux, uy = 2 * t * 1024 * 1024 // (square + t * t), -1024 * (square - t * t) // (square + t * t)
    taper, pink = between(0, 40000, next(u)), between(20000, 60000, next(u))
    for side in (-1, 1):
        cx = side * (head_x * 3 // 5) + side * (ux * length * 5 // 8 >> 10)
        cy = top - head_y * 3 // 5 + (uy * length * 5 // 8 >> 10)
        canvas.paint(canvas.leaf(cx, cy, side * ux, uy, length, width, taper), coat.darker(16000))
        inner = canvas.leaf(cx, cy, side * ux, uy, length * 5 // 8, width * 9 // 16, taper, 20)
        canvas.paint(inner * pink >> 16, (222, 152, 140))


def _face(canvas: Canvas, coat: _Coat, u: Iterator[int], head_x: int, head_y: int, top: int) -> None:
    outline = np.maximum(
        canvas.ellipse(0, top, head_x, head_y),
        canvas.ellipse(0, top + head_y // 2, between(head_x * 3 // 4, head_x * 9 // 8, next(u)), head_y * 3 // 5),
    )
    shadow = np.maximum(canvas.ellipse(0, top + 70, head_x + 20, head_y + 20, 60) - outline, 0)
    canvas.paint(shadow * 3 // 8, (20, 16, 16))
    canvas.paint(outline, coat.colour)
    blaze = canvas.ellipse(0, top - 40, between(8, 120, next(u)), head_y, 40) * outline >> 16
    canvas.paint(blaze * between(0, ONE, next(u)) >> 16, (248, 242, 232))
    gap, eye_y = between(150, 235, next(u)), top + between(-90, 30, next(u))
    size, mask = between(46, 84, next(u)), between(0, 56000, next(u))
    iris, pupil = blend(IRIS, next(u), next(u)), between(28, 68, next(u))
    lid = between(-20, 60, next(u))
    brow = between(0, 52000, next(u))
    for side in (-1, 1):
        patch = canvas.ellipse(side * gap, eye_y + 10, size * 2, size * 2, 70) * outline >> 16
        canvas.paint(patch * mask >> 16, (34, 28, 30))
        canvas.paint(canvas.ellipse(side * (gap - 20), eye_y - size * 2, 60, 34, 16) * brow >> 16, (238, 196, 130))
        canvas.paint(canvas.ellipse(side * gap, eye_y, size + 14, size + 12), (24, 18, 18))
        ball = canvas.ellipse(side * gap, eye_y, size, size)
        canvas.paint(ball, iris)
        canvas.paint(canvas.ellipse(side * gap, eye_y, size * pupil // 100, size * 7 // 10), (10, 8, 10))
        canvas.paint(canvas.ellipse(side * gap - size // 3, eye_y - size // 3, size // 4, size // 4), (255, 255, 255))
        drop = smooth((eye_y - size + lid - canvas.y + 8 << 16) // 16)
        canvas.paint(np.minimum(canvas.ellipse(side * gap, eye_y, size + 14, size + 12), drop), coat.darker(20000))


def _muzzle(canvas: Canvas, u: Iterator[int], head_y: int, top: int) -> None:
    wide, tall = between(130, 235, next(u)), between(110, 190, next(u))
    middle = top + head_y * 9 // 16
    pale = blend(((250, 244, 234), (226, 190, 150), (120, 96, 84), (176, 176, 182)), next(u), next(u))
    tongue = between(-40, 130, next(u))
    canvas.paint(canvas.ellipse(0, middle + tall - 10, 62, max(tongue + 40, 8), 10), (226, 106, 118))
    canvas.paint(canvas.ellipse(0, middle, wide, tall, 26), pale)
    for side in (-1, 1):
        lip = canvas.ellipse(side * 62, middle + tall // 4, 64, 58) - canvas.ellipse(
            side * 62, middle + tall // 4 - 10, 66, 58
        )
        canvas.paint(np.clip(lip, 0, ONE), (40, 28, 28))
    nose = blend(((24, 20, 22), (84, 54, 44), (206, 130, 126), (60, 56, 66)), next(u), next(u))
    size = between(52, 98, next(u))
    canvas.paint(canvas.ellipse(0, middle - tall // 2, size, size * 5 // 8), nose)
    canvas.paint(
        canvas.ellipse(-size // 3, middle - tall // 2 - size // 4, size // 4, size // 8, 12) // 2, (255, 255, 255)
    )
    _whiskers(canvas, middle, wide, between(60, 330, next(u)), between(12000, 60000, next(u)))


def _whiskers(canvas: Canvas, middle: int, wide: int, length: int, strength: int) -> None:
    for side in (-1, 1):
        for rise in (-90, 0, 90):
            along = side * canvas.x - wide * 5 // 8
            drift = canvas.y - middle - along * rise // 330
            line = smooth(((9 - np.abs(drift)) << 16) // 9)
            ends = np.minimum(smooth(along << 12), smooth((length - along) << 10))
            canvas.paint((line * ends >> 16) * strength >> 16, (250, 248, 244))


def png(image: Array, stored: bool = True) -> bytes:
    """A PNG. With `stored` (uncompressed) blocks its bytes depend only on the pixels, not on a zlib version."""
    height, width, _ = image.shape
    lines = b"".join(b"\0" + line.tobytes() for line in np.ascontiguousarray(image))
    body = _stored(lines) if stored else zlib.compress(lines, 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    )


def is_portrait(file: Path) -> bool:
    """Whether a file is a PNG of a portrait's size."""
    head = SIGNATURE + struct.pack(">I4sII", 13, b"IHDR", SIZE, SIZE)
    with file.open("rb") as opened:
        return opened.read(len(head)) == head


def _stored(lines: bytes) -> bytes:
    """A zlib stream without compression."""
    blocks = [lines[start : start + 65535] for start in range(0, len(lines), 65535)]
    body = b"\x78\x01"
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        body += struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF) + block
    return body + struct.pack(">I", zlib.adler32(lines))


def pixel_hash(image: Array) -> str:
    """SHA-256 of the pixels, which the golden test compares."""
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()


def sketch_hash(z: Array) -> str:
    """SHA-256 of the published sketch, which identifies it."""
    return hashlib.sha256(np.asarray(z, np.int8).tobytes()).hexdigest()


def words(z: Array) -> list[str]:
    """Six words to read aloud: 48 bits of the sketch's hash. One changed byte changes all of them."""
    digest = hashlib.sha256(np.asarray(z, np.int8).tobytes()).digest()
    return [WORDS[byte] for byte in digest[:6]]


_WORDS = """
acorn alder amber anchor apple apron arrow aspen atlas attic autumn badge baker bamboo banjo barley basil basket
beacon beaver bell berry birch bishop blanket bonfire bottle branch bread breeze brick bridge bronze brook broom
bucket butter button cabin cactus camel candle canoe canyon carbon carpet carrot castle cedar cellar chalk cherry
chestnut chimney cider cinder circle citrus clay cliff clover cobalt coffee comet compass copper coral cotton
cradle crane cricket crystal curtain daisy dancer desert diamond dolphin domino donkey dragon drum eagle earth
echo elbow ember emerald engine falcon feather fennel fern ferry fiddle finch flame flint flute forest fountain
fox garden garlic garnet ginger glacier glove goblet gold granite grape gravel hammer harbor harp harvest hazel
hedge heron hickory hill honey hornet igloo indigo iris iron island ivory ivy jacket jade jasmine jewel jungle
juniper kayak kettle kiwi kite knot ladder lagoon lantern larch laurel lava lemon lilac lily linen lion lizard
lotus lumber magnet mango maple marble meadow melon mint mirror monsoon moon moss mountain mustard nectar needle
nest nickel north nutmeg oak oasis oat ocean olive onion opal orbit orchard otter owl oyster paddle palm panda
paper parrot peach pearl pebble pepper piano pigeon pillow pine planet plum pocket pond poplar prairie prism
pumpkin quartz quilt rabbit raft rain raven reef ribbon river robin rocket rose ruby saddle saffron sail salmon
sand sapphire shell silver slate snow sparrow spruce stone sugar summit swan tiger timber tulip turtle velvet
violet walnut willow winter wolf yarrow zebra zephyr
anvil barrel bison cobra delta zinnia
"""
WORDS = tuple(_WORDS.split())

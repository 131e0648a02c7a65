"""The reader against hostile, damaged and foreign files."""

from __future__ import annotations

import json
import random
import struct
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fathom.checkpoints.origin import LocalOrigin, safe_name
from fathom.checkpoints.tensors import ITEM_BYTES, SafetensorsStore, open_safetensors, read_header
from fathom.errors import ModelError
from fathom.lineage.weights import open_weights


def write(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def header_of(path):
    return read_header(LocalOrigin(path.parent), path.name)


def entry(start, stop, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


class Watched(LocalOrigin):
    """Fails the test on a read outside the file or far larger than it."""

    def read(self, path, start, stop):
        assert 0 <= start <= stop <= self.size(path)
        return super().read(path, start, stop)


GOOD = {"a": entry(0, 16, [2, 2]), "b": entry(16, 24, [2])}


def test_a_good_header_is_read(tmp_path):
    found = header_of(write(tmp_path / "x.safetensors", GOOD, bytes(24)))
    assert found["b"].shape == (2,) and found["b"].stop - found["b"].start == 8


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"a": entry(0, 16, [2, 2]), "b": entry(8, 16, [2])}, 16, "overlaps"),
        ({"a": entry(0, 16, [2, 2]), "b": entry(20, 28, [2])}, 28, "hole"),
        (GOOD, 25, "describes"),
        (GOOD, 20, "outside"),
        ({"a": entry(0, 16, [2, 3])}, 16, "cannot hold"),
        ({"a": entry(0, 16, [-2, -2])}, 16, "natural"),
        ({"a": entry(0, 16, [True, 4])}, 16, "natural"),
        ({"a": entry(16, 0, [2, 2])}, 16, "outside"),
        ({"a": entry(0, 16, [2, 2], "PICKLE")}, 16, "not known"),
        ({"a": 7}, 0, "not a JSON object"),
        (b'{"a": {"dtype": "F32"}, "a": {}}', 0, "twice"),
        (b'{"\xff": 1}', 0, "UTF-8"),
        (b"[" * 100_000, 0, "nested|not JSON"),
        (b"[1]", 0, "not a JSON object"),
        (b'{"a": {"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', 4, "natural|not JSON"),
    ],
)
def test_hostile_headers_are_refused_with_a_reason(tmp_path, header, data, reason):
    with pytest.raises(ModelError, match=reason):
        header_of(write(tmp_path / "x.safetensors", header, bytes(data)))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 200_000_000, 1000])
def test_huge_header_lengths_are_refused_without_reading(tmp_path, length):
    with pytest.raises(ModelError, match="does not fit"):
        header_of(write(tmp_path / "x.safetensors", GOOD, bytes(24), length))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "..\\x", "C:x", "a\0b", "", "x" * 300, 7])
def test_names_that_leave_the_directory(name):
    with pytest.raises(ModelError):
        safe_name(name)


def test_index_and_shards_must_agree(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    for weight_map, reason in (
        ({"a": "one.safetensors", "b": "one.safetensors"}, "does not have"),
        ({"b": "one.safetensors"}, "not where the index says"),
        ({"a": "one.bin"}, "not a safetensors file"),
        ({}, "no weight_map"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=reason):
            open_safetensors(LocalOrigin(tmp_path))


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_files_neither_crash_nor_hang(count, tmp_path):
    """Headers and indices with random damage: read or refused, quickly, and never outside the file."""
    draw = random.Random(7)
    path, seen = tmp_path / "x.safetensors", {"read": 0, "refused": 0}
    origin = Watched(tmp_path)
    started = time.monotonic()
    for case in range(count):
        kinds = [draw.choice([("F32", [2]), ("BF16", [2, 2]), ("I64", [1])]) for _ in range(draw.randrange(5))]
        header = {f"t{i}": entry(8 * i, 8 * i + 8, shape, dtype) for i, (dtype, shape) in enumerate(kinds)}
        raw = bytearray(json.dumps(header).encode())
        for _ in range(draw.randrange(4) if len(raw) > 8 else 0):
            at = draw.randrange(len(raw))
            raw[at : at + 1] = draw.choice([b"", bytes([draw.randrange(256)]), b"-", b"9"])
        length = draw.choice([len(raw)] * 6 + [draw.getrandbits(64), draw.randrange(1, 200)])
        write(path, bytes(raw), bytes(draw.choice([8 * len(kinds)] * 4 + [draw.randrange(40)])), length)
        if case % 4 == 0:
            (tmp_path / "model.safetensors.index.json").write_bytes(
                b'{"weight_map": ' + bytes(raw[: draw.randrange(len(raw) + 1)]) + b"}"
            )
        try:
            if case % 4 == 0:
                open_safetensors(origin)
            else:
                store = SafetensorsStore(origin, ["x.safetensors"])
                for name, info in store.tensors.items():
                    if info.dtype in {"F32", "BF16"}:
                        store.read(name)
            seen["read"] += 1
        except ModelError:
            seen["refused"] += 1
    assert time.monotonic() - started < 60
    assert seen["refused"] > 0.3 * count and seen["read"] > 0.05 * count  # the damage is real, and so are the good ones


def test_truncation_pickles_and_packed_weights(tmp_path, models):
    whole = (models() / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "config.json").write_bytes((models() / "config.json").read_bytes())
    with pytest.raises(ModelError, match="outside the file"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=r"never opened.*save_pretrained"):
        open_weights(tmp_path)
    save_file(
        {"model.layers.0.self_attn.q_proj.qweight": torch.ones(2, dtype=torch.int32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelError, match="dequantise"):
        open_weights(tmp_path)
    with pytest.raises(ModelError, match="no such directory"):
        open_weights(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_and_row_ranges(tmp_path, dtype):
    value = torch.randn(7, 5).to(dtype)
    save_file({"w": value}, tmp_path / "model.safetensors")
    store = open_safetensors(LocalOrigin(tmp_path))
    assert np.array_equal(store.read("w"), value.double() if dtype == torch.float64 else value.float())
    rows = store.read("w", [(1, 3), (3, 4), (6, 7)])
    assert np.array_equal(rows, value[[1, 2, 3, 6]].to(torch.float64))
    with pytest.raises(ModelError, match="outside"):
        store.read("w", [(5, 8)])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(tmp_path, dtype):
    weight = (torch.randn(6, 8)).to(dtype)
    scales = {"scale_inv": torch.tensor([[2.0, 3.0]]), "scale": torch.arange(1.0, 7)[:, None]}
    for name, scale in scales.items():
        save_file({"m.weight": weight, f"m.weight_{name}": scale}, tmp_path / "model.safetensors")
        store = open_safetensors(LocalOrigin(tmp_path))
        spread = scale.repeat_interleave(4, 1) if name == "scale_inv" else scale
        assert np.allclose(store.read("m.weight"), weight.float() * spread)
        assert np.allclose(store.read("m.weight", [(2, 5)]), (weight.float() * spread)[2:5])


def test_item_sizes_agree_with_torch():
    names = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    assert all(ITEM_BYTES[name] == dtype.itemsize for name, dtype in names.items())

"""The time of steps, and the peak of a device by its name, which MFU is measured against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.recipe import Recipe
from fathom.training import Hook, train
from fathom.training.meter import peak_flops


class LongPreparation(Hook):
    """Takes a thousand seconds before the first step, by the run's clock."""

    def before_run(self, run: Any) -> None:
        run.meter._since -= 1000


def test_what_comes_before_the_first_step_is_not_counted(recipe: Recipe, tmp_path: Path) -> None:
    brief = recipe.override("train.steps=1", "evaluate.every=0", "evaluate.tokens=32")
    assert train(brief, tmp_path / "run", callbacks=[LongPreparation()]).seconds < 500


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_a_name_is_matched_by_whole_words(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak and peak_flops(torch.device("cpu")) is None

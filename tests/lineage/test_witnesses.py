"""Evidence that is none: one matrix seen twice, ties, and rows so loud that nothing else is heard."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fathom.checkpoints.tensors import Array
from fathom.lineage import evidence
from fathom.lineage.comparison import Comparison, Options, compare
from fathom.lineage.weights import open_model

FOUND = {evidence.SHARED, evidence.INITIALISATION, evidence.PARTIAL}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edited(source: Path, target: Path, **settings: object) -> dict[str, Array]:
    """A copy of a checkpoint whose tensors the caller changes and saves; `settings` go into its config."""
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return load_file(source / "model.safetensors")


def said(a: Path, b: Path, *controls: Path, **options: object) -> Comparison:
    return compare(open_model(a), open_model(b), controls, None, Options(extras=False, **options))  # type: ignore[arg-type]


def named(found: Comparison) -> set[str]:
    return {test.name for test in found.tests}


def with_head(source: Path, target: Path, noise: float, tied: bool) -> Path:
    """The embedding stored a second time as the head, with noise of so many standard deviations."""
    tensors = edited(source, target, tie_word_embeddings=tied)
    draw = np.random.default_rng(int(noise * 10) + sum(source.name.encode()))
    tensors[HEAD] = tensors[EMBED] + noise * tensors[EMBED].std() * draw.normal(size=tensors[EMBED].shape)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(("noise", "tied"), [(0.0, True), (0.0, False), (0.3, False), (1.0, False)])
def test_a_head_that_is_the_embedding_is_no_second_witness(models, tmp_path, noise, tied):
    """Two strangers that store a tied head compare one matrix with itself: always 64 of 64 channels."""
    pair = [with_head(models(seed=seed), tmp_path / str(seed), noise, tied) for seed in (30, 31)]
    found = said(*pair)
    assert found.verdict.label not in FOUND
    assert "T2 embedding and output head" not in named(found)
    assert any("no second witness" in why for why in found.pair.skipped)


def test_a_head_of_its_own_is_a_second_witness(models):
    found = said(models(seed=30), models(seed=30))
    assert "T2 embedding and output head" in named(found) and not found.pair.skipped


def test_a_gate_that_is_its_up_projection_is_no_second_witness(models, tmp_path):
    """T4 compares what gate and up say; where they say the same, unrelated models agree with themselves."""
    pair = []
    for seed in (32, 33):
        tensors = edited(models(seed=seed), tmp_path / str(seed))
        for name in [n for n in tensors if "gate_proj" in n]:
            tensors[name] = tensors[name.replace("gate", "up")].copy()
        save_file(tensors, tmp_path / str(seed) / "model.safetensors")
        pair.append(tmp_path / str(seed))
    found = said(*pair, models(seed=34))
    assert found.verdict.label not in FOUND and "T4 gate/up agreement" not in named(found)
    assert any("gate" in why and "no second witness" in why for why in found.pair.skipped)

"""Hosted models in a live batch: sequences that come and go have the tokens of each alone."""

from __future__ import annotations

import pytest
import torch

from fathom.inference.batches import batch_for
from tests.models.hosts.cases import ours_of, theirs_of, tokens

LOOP = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
KINDS = ("lfm2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_5_text", "llama4_text", "deepseek_v3")))


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_rows_of_a_batch_are_those_of_each_alone(name):
    model, ids = ours_of(theirs_of(name), **LOOP), tokens(2, 12)
    batch = batch_for(model)
    batch.reserve(2, 16)
    for row, length in zip(ids, (9, 5), strict=True):
        batch.read(row[:4].tolist())
        batch.read(row[4:length].tolist())
        batch.join()
    found = batch.step([int(ids[0, 9]), int(ids[1, 5])])
    for row, logits, length in zip(ids, found, (10, 6), strict=True):
        assert (logits - model(row[None, :length]).logits[0, -1]).abs().max() < 1e-4

"""The seeded edits of configurations: repeatable, of the kind that was asked for, and made on a copy."""

import copy
import json

import pytest

from .edits import KINDS, draw
from .families.cases import stock_config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt2"])
def test_a_seed_is_one_edit(name, kind):
    config = stock_config(name).to_dict()
    before = copy.deepcopy(config)
    edits = [draw(config, seed, kind) for seed in (0, *range(20))]
    assert edits[0] == edits[1] and config == before
    assert all(edit.kind == kind and edit.words for edit in edits)
    changed = [json.dumps(edit.config) != json.dumps(before) for edit in edits]
    assert all(changed) if kind in ("drop", "undeclared", "order") else sum(changed) > 12
    assert len({json.dumps(edit.config) for edit in edits}) > 5

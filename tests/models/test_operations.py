"""The decoder without a mechanism runs the operations that `operations.json` lists, in their number.

Equal bits do not show an operation that is made twice, or a copy. Written by `python -m tests.models.test_operations`,
whose result belongs in a commit of its own, with the reason.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.models import FathomForCausalLM

from .cases import config_of, tokens

LISTED = Path(__file__).with_name("operations.json")


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations() -> dict[str, Counter]:
    """Of a training step, a prompt and a decoded token."""
    model, ids, found = FathomForCausalLM(config_of("vanilla")).train(), tokens(2, 9), {}
    with Operations() as made:
        model(ids, labels=ids).loss.backward()
    found["train"] = made.seen
    model.eval()
    with torch.no_grad():
        with Operations() as made:
            cache = model(ids, use_cache=True).past_key_values
        found["prompt"] = made.seen
        with Operations() as made:
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        found["token"] = made.seen
    return found


@pytest.mark.parametrize("kind", ["train", "prompt", "token"])
def test_vanilla_makes_no_other_operations(kind):
    listed = json.loads(LISTED.read_text())
    if torch.__version__.split("+")[0] != listed["torch"]:
        pytest.skip(f"listed for torch {listed['torch']}")
    assert dict(operations()[kind]) == listed[kind]


def test_a_further_operation_is_seen(monkeypatch):
    forward = FathomForCausalLM.forward
    monkeypatch.setattr(FathomForCausalLM, "forward", lambda self, ids, **given: forward(self, ids + 0, **given))
    with pytest.raises(AssertionError):
        test_vanilla_makes_no_other_operations("train")


if __name__ == "__main__":
    LISTED.write_text(json.dumps({"torch": torch.__version__.split("+")[0], **operations()}, indent=1) + "\n")

"""One thread and poisoned memory: a test that passes by luck of fresh pages does not pass here."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` is NaN, so that whatever nobody initialises is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)

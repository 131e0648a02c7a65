"""One thread and poisoned memory: a test that passes by luck of fresh pages does not pass here."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, and for the processes that tests start

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fathom", deadline=None, print_blob=True)  # a shared machine is no reason to fail
settings.load_profile("fathom")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` is NaN, so that whatever nobody initialises is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)

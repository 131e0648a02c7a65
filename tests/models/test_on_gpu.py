"""The conformance suite on CUDA, where there is one: what test_mechanisms.py asks of every case, on another device."""

import pytest
import torch

from . import test_mechanisms as suite
from .cases import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

# Those that compute in this process and take a case alone; the others follow below.
CHECKS = (
    suite.test_full_is_chunked_is_static,
    suite.test_token_by_token_in_single_precision,
    suite.test_left_padded_rows_are_single_rows,
    suite.test_prefix_invariance,
    suite.test_every_parameter_gets_a_gradient,
    suite.test_initialised_from_nothing,
    suite.test_declared_cost_is_measured,
)


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    """Whatever is made is made there, and no model of the CPU is taken for one."""
    monkeypatch.setattr(suite, "_models", {})
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
def test_every_case(check):
    for case in CASES:
        check(case)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_and_masked(use_cache):
    for case in CASES:
        suite.test_packed_documents_are_single_rows(case)
        suite.test_with_a_mask_nothing_is_packed(case, use_cache)


@pytest.mark.parametrize("how", ["greedy", "sampled", "beam"])
def test_generate(how):
    for case in CASES:
        suite.test_generate_is_its_uncached_self(case, how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_vanilla_is_qwen3(dtype, backend):
    suite.test_vanilla_is_qwen3_bitwise(dtype, backend, {})


def test_compiled():
    for case in CASES:
        suite.test_training_is_one_graph(case)
        suite.test_evaluation_is_one_graph(case)


def test_the_faults_are_seen_here_too():
    suite.test_the_published_faults_are_seen()

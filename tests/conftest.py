"""One thread and poisoned memory: a test that passes by luck of fresh pages does not pass here."""

from __future__ import annotations

import gc
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Generator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, and for the processes that tests start
os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval else starts a pool of processes for every standard error

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    import torch
    from _pytest.python import CallSpec2

    from fathom.lineage.weights import Weights
    from fathom.recipe import Recipe

settings.register_profile("fathom", deadline=None, print_blob=True)  # a shared machine is no reason to fail
settings.load_profile("fathom")
# Hypothesis also draws constants that stand in local code: it reads those of the package, not of 300 files of tests.
providers.is_local_module_file = lambda path: f"{os.sep}src{os.sep}fathom{os.sep}" in path


def pytest_configure(config: pytest.Config) -> None:
    """Torch on one thread, in the processes that run tests: not in the one that hands them out."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    if not torch.cuda.is_available():  # kernels then run in an interpreter, which triton asks for as it is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    if device := os.environ.get("FATHOM_TEST_DEVICE"):  # where tests then make whatever names no device
        torch.set_default_device(device)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Of ten thousand slow cases the fast suite makes no items, but one where all cases of a test are slow."""
    result = yield
    calls = metafunc._calls
    if calls and metafunc.config.option.markexpr == "not slow":
        quick = [mark.args for mark in metafunc.definition.iter_markers("quick")]
        slow = metafunc.definition.get_closest_marker("slow")

        def fast(call: CallSpec2) -> bool:
            named = all(any(fnmatchcase(call.id, name) for name in names) for names in quick)
            return named and not slow and all(mark.name != "slow" for mark in call.marks)

        metafunc._calls = [call for call in calls if fast(call)] or calls[:1]
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked `quick`, the fast suite runs the cases that the mark names; the others are slow."""
    unknown: dict[str, set[str]] = defaultdict(set)
    for item in items:
        for mark in item.iter_markers("quick"):
            test, case = item.nodeid.split("[")[0], item.callspec.id  # type: ignore[attr-defined]
            found = {name for name in mark.args if fnmatchcase(case, name)}
            unknown[test] = unknown.get(test, set(mark.args)) - found
            if not found:
                item.add_marker(pytest.mark.slow)
    missing = {test: names for test, names in unknown.items() if names}
    if missing and not any("::" in word for word in config.args):
        raise pytest.UsageError(f"no cases of these names: {missing}")


def pytest_collectstart() -> None:
    """Until all is imported, nothing is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported is there to stay: half a million objects that no collection need walk through."""
    gc.freeze()
    gc.set_threshold(10_000)  # models and configurations are made by thousands of objects at a time
    gc.enable()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` is NaN, so that whatever nobody initialises is seen."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def loud_handlers() -> None:
    """A message whose arguments do not fit it fails the test; `logging` would print a traceback and go on."""

    def fails(handler: logging.Handler, record: logging.LogRecord) -> None:
        raise  # what a handler calls in its `except`

    logging.Handler.handleError = fails  # type: ignore[method-assign]


@pytest.fixture
def logged() -> Generator[Callable[[str], list[str]], None, None]:
    """`logged(NAME)` is a list of what a logger and those below it warn from now on, whatever other tests told them."""
    attached: list[tuple[logging.Logger, logging.Handler, int]] = []

    def begin(name: str) -> list[str]:
        lines: list[str] = []
        logger, handler = logging.getLogger(name), logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        attached.append((logger, handler, logger.level))
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        return lines

    yield begin
    for logger, handler, level in attached:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus of two domains."""
    from tests.tiny import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def recipe(corpus: Path) -> Recipe:
    """A run of milliseconds."""
    from tests.tiny import tiny_recipe

    return tiny_recipe(corpus)


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template, exported: to be copied."""
    from tests.inference.talker import export_talker

    return export_talker(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture(scope="session")
def small(corpus: Path) -> Recipe:
    """A recipe to compare arms on."""
    from tests.tiny import comparable_recipe

    return comparable_recipe(corpus)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """models("qwen3", seed=1, num_hidden_layers=2): a cached checkpoint directory of another architecture."""
    import torch

    from tests.lineage.zoo import build, save, tiny_config

    made: dict[tuple, Path] = {}

    def make(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Path:
        key = (kind, seed, dtype, tuple(sorted(changes.items())))
        if key not in made:
            config = tiny_config(kind, **changes)
            made[key] = save(build(config, seed, dtype), tmp_path_factory.mktemp(kind), config.vocab_size)
        return made[key]

    return make


@pytest.fixture(scope="session")
def opened(models: Callable[..., Path]) -> Callable[..., Weights]:
    """The same, opened by the lineage reader."""
    from fathom.lineage.weights import open_weights

    return lambda *args, **kwargs: open_weights(models(*args, **kwargs))

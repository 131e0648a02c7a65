"""Outside tests are collected by `-m outside` alone; what each suite came to is printed at the end."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.outside.accepted import ACCEPTED, SKIPPED, UNSEEN

OURS = Path(__file__).parent
REPORTS: dict[str, list[pytest.TestReport]] = defaultdict(list)
"""By suite: the last word of each test."""


def pytest_configure(config: pytest.Config) -> None:
    """Know the marks of transformers' own tests, which ours forbid to be unknown."""
    if not _chosen(config):
        return
    from transformers import testing_utils

    from tests.outside.sources import COMMON

    for file in (Path(testing_utils.__file__), *COMMON.glob("test_*.py")):
        for mark in set(re.findall(r"\bmark\.(\w+)", file.read_text(encoding="utf-8"))):
            config.addinivalue_line("markers", f"{mark}: of transformers' own tests")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Nothing here is even imported by an ordinary run."""
    return None if _chosen(config) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what stands here, and what is accepted to fail: it must."""
    ours = [item for item in items if str(item.path).startswith(f"{OURS}{os.sep}")]
    if not ours:
        return
    from tests.outside.models import SEVERAL_TRIPS

    for item in ours:
        item.add_marker(pytest.mark.outside)
        case, name = _suite(item.nodeid).partition(", ")[2], item.name.partition("[")[0]
        if reason := ACCEPTED.get(case, {}).get(name):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        elif case in SEVERAL_TRIPS and name in vars(item.module.MODELING.GenerationTesterMixin):
            item.add_marker(pytest.mark.xfail(reason=UNSEEN, strict=False))


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Other people's tests run in the memory that they are used to."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the last word of each test: its call, or the set-up that went wrong or skipped it."""
    if "tests/outside/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        REPORTS[_suite(report.nodeid)].append(report)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that runs on Qwen3 and skips a Fathom model is a difference, accepted or an error."""
    if _unlike_qwen3() and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each suite, then what is accepted, what did not run and why."""
    if not REPORTS:
        return
    write = terminalreporter.write_line
    terminalreporter.section("outside")
    write(f"{'suite':34} {'passed':>7} {'accepted':>9} {'skipped':>8} {'failed':>7} {'seconds':>8}")
    for suite, reports in REPORTS.items():
        kinds = Counter(_kind(report) for report in reports)
        counts = f"{kinds['passed']:7} {kinds['accepted']:9} {kinds['skipped']:8} {kinds['failed']:7}"
        write(f"{suite:34} {counts} {sum(report.duration for report in reports):8.0f}")
    write(f"\nskipped, unlike Qwen3, and accepted\n  {'; '.join(f'{name} {why}' for name, why in SKIPPED.items())}")
    for title, kind in (("accepted differences", "accepted"), ("skipped", "skipped")):
        write(f"\n{title}")
        for reason, names in sorted(_by_reason(kind).items()):
            write(f"  {reason}: {', '.join(sorted(names)) if kind == 'accepted' else _count(names)}")
    for suite, names in _unlike_qwen3().items():
        write(f"\nFAILED: {suite} skips what Qwen3 does not, or no longer what is listed: {', '.join(sorted(names))}")
    if any(suite.startswith("transformers") for suite in REPORTS):
        from tests.outside.sources import ABSENT, missing
        from tests.outside.test_transformers import MIXINS

        ran = [mixin.__name__ for mixin in MIXINS if len(vars(mixin)) > 5]
        write(f"\nmixins that ran: {', '.join(ran)}")
        write(f"not in the source distribution, empty stand-ins: {', '.join(n for n in ABSENT if n in missing())}")


def _chosen(config: pytest.Config) -> bool:
    return "outside" in config.option.markexpr.split()


def _suite(nodeid: str) -> str:
    """`tests/outside/test_transformers.py::Test_loop::test_x` to `transformers, loop`."""
    file, *rest = nodeid.split("::")
    case = rest[0].removeprefix("Test_") if len(rest) > 1 and rest[0].startswith("Test_") else ""
    return f"{Path(file).stem.removeprefix('test_')}{', ' if case else ''}{case}"


def _kind(report: pytest.TestReport) -> str:
    return "accepted" if report.skipped and hasattr(report, "wasxfail") else report.outcome


def _by_reason(kind: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for suite, reports in REPORTS.items():
        for report in reports:
            if _kind(report) == kind:
                why = report.wasxfail if kind == "accepted" else report.longrepr[2].removeprefix("Skipped: ")
                found[" ".join(why.split())].add(f"{report.nodeid.rpartition('::')[2]} ({suite.rpartition(', ')[2]})")
    return found


def _count(names: set[str]) -> str:
    return f"{len(names)} test{'s' if names else ''}"


def _unlike_qwen3() -> dict[str, set[str]]:
    """By suite: tests that skip it and not Qwen3 and are not on the list, and those on the list that do not skip it."""
    skipped = {
        suite: {report.nodeid.rpartition("::")[2] for report in reports if _kind(report) == "skipped"}
        for suite, reports in REPORTS.items()
        if suite.startswith("transformers, ")
    }
    theirs = skipped.pop("transformers, qwen3", None)
    skipped.pop("transformers, configuration", None)
    if theirs is None:
        return {}
    unlike = {}
    for suite, names in skipped.items():
        ran = {report.nodeid.rpartition("::")[2] for report in REPORTS[suite]}
        unlike[suite] = (names - theirs) ^ (SKIPPED.keys() & ran)
    return {suite: names for suite, names in unlike.items() if names}

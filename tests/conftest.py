"""Skip tests of tiers that this machine lacks, or fail them where the tier is required; order the tests."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from mesh.daemon import stack
from tests import forks
from tests.cleanup import cleanup
from tests.container_images import remove_images
from tests.tiers import PROBES, REQUIRE, required

LEFT_OUT = "tier "  # prefix of the reason of such a skip
DESELECTED = {"slow": "make test-slow runs them", "long": f"{REQUIRE}=long make test runs them, as CI does"}
FIRST = ("tests/integrations/", "tests/mutants/", "tests/netns/", "tests/sim/")  # tests of up to a minute
_left_out: Counter[str] = Counter()
_deselected: dict[str, int] = {}

# The time of an example depends on the load of the machine, so no deadline applies.
settings.register_profile("mesh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mesh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that all workers end together."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None and not item.nodeid.startswith(FIRST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for tier, probe in PROBES.items():
        if item.get_closest_marker(tier) is None:
            continue
        problem = probe()
        if problem and tier in required():
            pytest.fail(f"tier {tier} is required by {REQUIRE}, but {problem}", pytrace=False)
        if problem:
            pytest.skip(f"{LEFT_OUT}{tier}: {problem}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    if LEFT_OUT in reason:
        _left_out[reason.partition(LEFT_OUT)[2]] += 1


def pytest_deselected(items: list[pytest.Item]) -> None:
    marks = [{mark.name for mark in item.iter_markers()} for item in items]
    counts = Counter(next((tier for tier in DESELECTED if tier in names), None) for names in marks)
    _deselected.update({f"{tier}: {how}": counts[tier] for tier, how in DESELECTED.items() if counts[tier]})


@pytest.hookimpl(optionalhook=True)  # of xdist: only its workers collect
def pytest_testnodedown(node: Any) -> None:
    _deselected.update(getattr(node, "workeroutput", {}).get(LEFT_OUT, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for tier, count in {**_left_out, **_deselected}.items():
        terminalreporter.write_line(f"left out {count} tests of tier {tier}", yellow=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[LEFT_OUT] = _deselected
    remove_images()
    cleanup().close()


def pytest_sessionstart(session: pytest.Session) -> None:
    unknown = required() - PROBES.keys()
    if unknown:
        raise pytest.UsageError(f"{REQUIRE} names tiers that do not exist: {', '.join(sorted(unknown))}")
    cleanup()
    stack.start_daemon = forks.start_daemon

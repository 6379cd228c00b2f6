"""Tiers: tests marked with one are left out, by name, where the machine cannot run them, and fail where it must."""

from collections import Counter

import pytest

from tests.images import remove_images
from tests.tiers import PROBES, REQUIRE, required

_left_out: Counter[str] = Counter()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for tier, probe in PROBES.items():
        if item.get_closest_marker(tier) is None:
            continue
        problem = probe()
        if problem and tier in required():
            pytest.fail(f"tier {tier} is required by {REQUIRE}, but {problem}", pytrace=False)
        if problem:
            _left_out[f"{tier}: {problem}"] += 1
            pytest.skip(f"tier {tier}: {problem}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for tier, count in _left_out.items():
        terminalreporter.write_line(f"left out {count} tests of tier {tier}", yellow=True)
    unknown = required() - PROBES.keys()
    if unknown:
        terminalreporter.write_line(f"{REQUIRE} names tiers that do not exist: {', '.join(sorted(unknown))}", red=True)


def pytest_sessionfinish() -> None:
    remove_images()


def pytest_sessionstart(session: pytest.Session) -> None:
    unknown = required() - PROBES.keys()
    if unknown:
        raise pytest.UsageError(f"{REQUIRE} names tiers that do not exist: {', '.join(sorted(unknown))}")

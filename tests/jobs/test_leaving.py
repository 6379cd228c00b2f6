"""The shell of destinations: an owner's notice never waits for a plan."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh.jobs.leaving import Leaving
from mesh.jobs.reports import VacateWanted
from mesh.jobs.service import JobService
from tests.jobs.worlds import JOB, at


def test_a_plan_that_fails_keeps_no_notice_from_a_guest(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise RuntimeError("a fault in the plan")

    jobs = SimpleNamespace(participant=SimpleNamespace(runners={}), outlook=SimpleNamespace(look=broken))
    leaving = Leaving(cast(JobService, jobs), lambda: at(0.0))
    assert leaving.notices([JOB], 30.0, "the owner") == {JOB: VacateWanted(30.0, "the owner", None)}
    assert "each goes to its heir" in caplog.text

"""Departure planner: a failing plan does not delay a notice."""

from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.bandwidth import Bandwidth
from mesh.consensus.reports import VacateWanted
from mesh.jobs.departure_planner import DeparturePlanner
from tests.consensus.worlds import JOB


def test_failing_plan_keeps_no_notice_from_a_guest(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise RuntimeError("a fault in the plan")

    participant: Any = SimpleNamespace(runners={})
    mesh_view: Any = SimpleNamespace(look=broken)
    none: Any = None
    planner = DeparturePlanner(participant, {}, Bandwidth(), none, mesh_view, none, none, none)
    assert planner.notices([JOB], 30.0, "the owner") == {JOB: VacateWanted(30.0, "the owner", None)}
    assert "each goes to its standby" in caplog.text

"""Zones in `mesh nodes --zones` and `mesh why`, flat and past 200 nodes."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from click.testing import CliRunner

from mesh.api.handlers.placement import PlacementHandlers
from mesh.cli import describe, nodes
from mesh.consensus.submission_retry import HeldSubmissions
from placement.zones import Hierarchy
from tests.consensus.worlds import JOB, make_advert
from tests.placement.test_zones import request

ADVERTS = tuple(
    make_advert(number.to_bytes(32, "big"), zone="ab"[number % 2], nick=f"n{number}") for number in range(1, 202)
)


def handlers(since: int, told: dict[bytes, HeldSubmissions] | None = None) -> PlacementHandlers:
    view = SimpleNamespace(hierarchy=lambda: Hierarchy(since, ADVERTS), adverts=lambda: ADVERTS)
    submissions, membership = Mock(), Mock()
    submissions.held_by_node.return_value = told or {}
    membership.members.return_value = []
    jobs: Any = SimpleNamespace(mesh_view=view)
    return PlacementHandlers(membership, jobs, submissions, Mock(), Mock(), Mock(), Mock())


def test_zones_list_coordinators_and_submissions() -> None:
    submits = {ADVERTS[0].node: HeldSubmissions(2, (JOB,)), ADVERTS[2].node: HeldSubmissions(1, (JOB,))}
    b, a = sorted(handlers(0, submits).zones().zones, key=lambda row: row.zone, reverse=True)
    assert a.doing == "flat" and b.doing == "flat; n1 submits 2 jobs for others; n3 submits 1 job for others"
    assert len(b.nodes) == 101 and b.weight == 808 and b.coordinator == b.line[0]
    assert handlers(201).zones().zones[0].doing == "two-level since 201 nodes"


def test_a_placement_by_zone_names_zone_and_coordinator() -> None:
    hierarchy = Hierarchy(201, ADVERTS)
    ranking = hierarchy.rank(request(JOB), ADVERTS)
    found = handlers(201).placing(hierarchy, ranking)
    zone = next(zone for zone in hierarchy.zones if ranking.candidates[0].node in zone.nodes)
    nicks = {advert.node: advert.nick for advert in ADVERTS}
    assert zone.coordinator is not None and found.zone == zone.name
    assert found.mode == "two-level" and found.coordinator == nicks[zone.coordinator]
    flat = Hierarchy(0, ADVERTS)
    assert handlers(0).placing(flat, flat.rank(request(JOB), ADVERTS)).zone is None


def test_commands_print_zones_and_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(answer: dict[str, Any]) -> Any:
        return lambda ctx: SimpleNamespace(get=lambda path: answer)

    monkeypatch.setattr(
        nodes, "client", answers(msgspec.to_builtins(handlers(201, {ADVERTS[0].node: HeldSubmissions(1, ())}).zones()))
    )
    shown = CliRunner().invoke(nodes.nodes, ["--zones"], env={"COLUMNS": "160"}).output
    assert "101: n1, n101, " in shown and ", ..." in shown
    assert "two-level since 201 nodes; n1 submits 1 job for others" in shown
    why = {
        "job": "abc",
        "array": None,
        "state": "pending",
        "detail": "",
        "node": None,
        "witnesses": ["n1"],
        "standby": None,
        "attempts": [],
        "explanation": ["n5 is first"],
        "candidates": [],
        "refused": [],
        "submitted_by": "n7 submits it",
        "decision": {
            "by": "n1",
            "attempt": 0,
            "order": [
                {"nick": "n5", "advert_version": 3, "weight": 60, "advert_now": 3},
                {"nick": "n6", "advert_version": 7, "weight": 20, "advert_now": 9},
            ],
        },
        "would": [
            {"of": "request", "text": "--gpus 1", "in_s": None},
            {"of": "campus", "text": "when n5 is lent", "in_s": 1},
        ],
        "placement": {"mode": "two-level", "two_level_since": 230, "zone": "a", "coordinator": "n2"},
    }
    monkeypatch.setattr(describe, "client", answers(why))
    shown = CliRunner().invoke(describe.why, ["abc"]).output
    assert (
        "placed by zone first (the mesh has had 230 nodes): zone a, coordinator n2" in shown
        and "n7 submits it" in shown
    )
    assert (
        "n1 placed attempt 0 on n5 (ranked first of 2: then n6)" in shown and "the advert of n6 changed since" in shown
    )
    assert "it could start:\n  with --gpus 1\n  when n5 is lent" in shown

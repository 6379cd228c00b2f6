"""What people are shown of zones: `mesh nodes --zones` and `mesh why`, flat and past 200 nodes."""

from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mesh.api.zones import placing, zone_list
from mesh.cli import nodes
from mesh.cli import why as why_module
from mesh.jobs.errands import Told
from placement.zones import Hierarchy
from tests.jobs.worlds import JOB, make_advert
from tests.placement.test_zones import request

ADVERTS = tuple(
    make_advert(number.to_bytes(32, "big"), zone="ab"[number % 2], nick=f"n{number}") for number in range(1, 202)
)


def daemon(since: int, told: dict[bytes, Told] | None = None) -> Any:
    return SimpleNamespace(
        jobs=SimpleNamespace(
            outlook=SimpleNamespace(hierarchy=lambda: Hierarchy(since, ADVERTS), adverts=lambda: ADVERTS)
        ),
        deputy=SimpleNamespace(told=lambda: told or {}),
        membership=SimpleNamespace(members=lambda: []),
    )


def test_zones_are_listed_with_who_coordinates_them_and_what_is_done() -> None:
    submits = {ADVERTS[0].node: Told(2, (JOB,)), ADVERTS[2].node: Told(1, (JOB,))}
    b, a = sorted(zone_list(daemon(0, submits))["zones"], key=lambda row: row["zone"], reverse=True)
    assert a["doing"] == "flat" and b["doing"] == "flat; n1 submits 2 jobs for others; n3 submits 1 job for others"
    assert len(b["nodes"]) == 101 and b["weight"] == 808 and b["coordinator"] == b["line"][0]
    assert zone_list(daemon(201))["zones"][0]["doing"] == "two-level since 201 nodes"


def test_a_placement_by_zone_names_zone_and_coordinator() -> None:
    hierarchy = Hierarchy(201, ADVERTS)
    ranking = hierarchy.rank(request(JOB), ADVERTS)
    found = placing(daemon(201), hierarchy, ranking)
    zone = next(zone for zone in hierarchy.zones if ranking.candidates[0].node in zone.nodes)
    nicks = {advert.node: advert.nick for advert in ADVERTS}
    assert zone.coordinator is not None and found["zone"] == zone.name
    assert found["mode"] == "two-level" and found["coordinator"] == nicks[zone.coordinator]
    flat = Hierarchy(0, ADVERTS)
    assert placing(daemon(0), flat, flat.rank(request(JOB), ADVERTS))["zone"] is None


def test_the_command_line_says_it_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(answer: dict[str, Any]) -> Any:
        return lambda ctx: SimpleNamespace(get=lambda path: answer)

    monkeypatch.setattr(nodes, "client", answers(zone_list(daemon(201, {ADVERTS[0].node: Told(1, ())}))))
    shown = CliRunner().invoke(nodes.nodes, ["--zones"], env={"COLUMNS": "160"}).output
    assert "101: n1, n101, " in shown and ", ..." in shown
    assert "two-level since 201 nodes; n1 submits 1 job for others" in shown
    why = {
        "job": "abc",
        "state": "pending",
        "detail": "",
        "node": None,
        "witnesses": ["n1"],
        "heir": None,
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
    monkeypatch.setattr(why_module, "client", answers(why))
    shown = CliRunner().invoke(why_module.why, ["abc"]).output
    assert "zone first (since there were 230 nodes): zone a, coordinator n2" in shown and "n7 submits it" in shown
    assert "n1 gave attempt 0 to n5 (advert 3), before n6; changed since: the advert of n6" in shown
    assert "it could start:\n  with --gpus 1\n  when n5 is lent" in shown

"""Answers about where a job runs and how long a node stays."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mesh.api.handlers import placement as module
from mesh.api.handlers.placement import PlacementHandlers, _data_lines, _left_s, _quartiles
from mesh.util.errors import ExitCode, MeshError
from placement.request import Request, WantedData
from placement.summary import UNIT, UNSEEN
from tests.placement.test_placement import NODES, advert


def test_time_left_of_a_job_is_by_its_own_pace() -> None:
    def job(step: int | None, of: int | None, *attempts: tuple[float, str]) -> Any:
        runs = [SimpleNamespace(running_unix_ms=1000_000, ran_s=ran_s, reason=reason) for ran_s, reason in attempts]
        return SimpleNamespace(step=step, of=of, attempts=runs)

    assert _left_s(job(10, 40, (0.0, "")), 1020.0) == 60.0
    assert _left_s(job(10, 40, (30.0, "left"), (0.0, "")), 1020.0) == 150.0, "with what it ran before"
    assert _left_s(job(40, 40, (0.0, "")), 1020.0) == 0.0
    assert _left_s(job(10, 40, (30.0, "left"), (0.0, "")), 900.0) == 90.0, "a clock that is ahead"
    for unknown in (None, job(None, 40), job(0, 40), job(10, None), job(50, 40)):
        assert _left_s(unknown, 1020.0) is None


def test_quartiles_are_those_that_were_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "spans_of", lambda stays: stays)
    ended: Any = [(float(length), True) for length in (10, 20, 30, 40)]
    assert [(row.part, row.after_s) for row in _quartiles(ended)] == [(0.75, 10.0), (0.5, 20.0), (0.25, 30.0)]
    lasting: Any = [(10.0, True), (20.0, False), (30.0, False), (40.0, False)]
    assert [row.part for row in _quartiles(lasting)] == [0.75] and _quartiles([]) == []


def test_node_that_lacks_data_says_what_that_costs_it() -> None:
    asked = Request(b"j" * 16, 0, "ada", data=(WantedData("books", b"id", 200_000),), remaining_s=900)
    has, lacks, full = (advert(node, weight=32) for node in NODES[:3])
    has = msgspec.structs.replace(has, data_ids=(b"id",))
    full = msgspec.structs.replace(full, slots_free=0)
    (line,) = _data_lines(asked, [has, lacks, full])
    assert line.startswith("n2 would fetch 195.3 GiB of data sets (about 2000 s)") and "28 instead of 32" in line


class Stays:
    """Handlers on node `me`, which has heard of `den`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, since: float | None = 100.0) -> None:
        self.met: list[bytes] = []
        self.summary: Any = SimpleNamespace(
            until_unix=0, as_of_unix=50, events=[3 * UNIT], lent=2 * UNIT, week=(UNSEEN, 40)
        )
        known = SimpleNamespace(since=since, zone=SimpleNamespace(recent=SimpleNamespace(rate=0.12345)))
        self.asked: list[float] = []

        def survival(node: bytes, now: float, horizon_s: float, until: Any) -> Any:
            self.asked.append(horizon_s)
            return SimpleNamespace(probability=0.50346, low=0.9, high=0.99)

        nodes = {b"me" * 16: known, b"de" * 16: known}
        attendance: Any = SimpleNamespace(
            summary=lambda now: self.summary,
            told_by=lambda node: self.summary,
            meet=lambda node, summary, now: self.met.append(node),
            estimator=SimpleNamespace(nodes=nodes, survival=survival),
            stays=[],
        )
        members = {"me": b"me" * 16, "den": b"de" * 16}
        found = lambda membership, text: SimpleNamespace(node_id=members[text], nick=text)  # noqa: E731
        monkeypatch.setattr(module, "find_node", found)
        nothing: Any = None
        lookup: Any = SimpleNamespace(me=b"me" * 16)
        self.handlers = PlacementHandlers(nothing, nothing, nothing, attendance, lookup, nothing, nothing)


def test_node_that_told_nothing_of_its_stays_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    stays = Stays(monkeypatch)
    stays.summary = None
    with pytest.raises(MeshError, match="den has told nothing of its stays") as told:
        stays.handlers.survival("den")
    assert told.value.code == ExitCode.NOT_FOUND and not stays.met


def test_stay_of_a_node_is_estimated_for_each_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    stays = Stays(monkeypatch)
    own = stays.handlers.survival("me")
    assert own.me and own.lent and not stays.met and own.lent_since_unix == 100.0
    assert [row.horizon_min * 60 for row in own.survival] == stays.asked[:-1] and own.survival[0].probability == 0.5035
    assert (own.departures, own.lent_h, own.rate_of_zone, own.week, own.until_unix) == (
        3.0,
        2.0,
        0.123,
        [None, 40],
        None,
    )
    assert own.weight == 32
    other = stays.handlers.survival("den")
    assert not other.me and stays.met == [b"de" * 16] and other.told_unix == 50


def test_node_that_is_not_lent_stays_for_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Stays(monkeypatch, since=None).handlers.survival("me")
    assert not away.lent and away.lent_since_unix is None and away.weight == 0
    assert {row.probability for row in away.survival} == {0.0}

"""The steps of a rehearsal: what it waits for, when it gives up, and which runs are worth an undisturbed one."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mesh.rehearsal import rehearsal as module
from mesh.rehearsal.observations import Departure, Run
from mesh.rehearsal.rehearsal import Plan, Rehearsal
from tests.rehearsal.test_evaluation import BEGUN, alone, attempt, checkpoint


class Clock:
    """Time that passes only while the rehearsal sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        told = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(module, "time", told)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def rehearsal(mode: str = "rename", after_s: float = 0.0, checkpoints: int = 1) -> tuple[Any, list[str]]:
    said: list[str] = []

    @contextmanager
    def waiting(what: str) -> Iterator[None]:
        yield

    mesh: Any = SimpleNamespace(published=lambda observer: {"a": "b"}, cancel=lambda observer: said.append("cancel"))
    order = {"ckpt": "c", "ckpt_mode": mode}
    made: Any = Rehearsal(mesh, order, Plan(after_s, checkpoints, 600.0, 30.0), said.append, waiting)
    made._deadline = 1600.0
    return made, said


def observer(**fields: Any) -> Any:
    told = {"poll": lambda: None, "over": False, "state": {}, "attempts": [{"node": "node1", "number": 0}]}
    return SimpleNamespace(**told | fields)


def test_waiting_ends_with_the_condition_the_job_or_the_time(clock: Clock) -> None:
    made, _ = rehearsal()
    assert made._until(observer(), lambda: clock.now > 1010, "x") and clock.now < 1020
    assert made._until(observer(over=True), lambda: True, "x"), "it is looked at before that is given up"
    assert not made._until(observer(over=True), lambda: False, "x") and clock.now < 1020
    assert not made._until(observer(), lambda: False, "x", 1100.0) and 1100 < clock.now < 1101
    assert not made._until(observer(), lambda: False, "x") and 1600 < clock.now < 1601


def test_departure_is_due_after_its_time_and_checkpoints(clock: Clock) -> None:
    made, said = rehearsal(after_s=100.0, checkpoints=2)
    row = {"running_unix_ms": 1_000_000}
    seen = observer(started=lambda number: row, running=lambda number: row, commits=lambda number: 2)
    assert made._due(seen, 0) and 1100 <= clock.now < 1102 and "node1 runs it" in said[0]
    seen.commits = lambda number: 1 if clock.now < 1200 else 2
    assert made._due(seen, 1) and clock.now >= 1200
    seen.running = lambda number: None
    assert not made._due(seen, 1) and clock.now > 1600, "it does not run"


def test_run_that_cannot_end_in_time_is_not_awaited(clock: Clock) -> None:
    made, said = rehearsal()
    steps = ((1000.0, 10), (1010.0, 20))
    seen = observer(run=lambda: SimpleNamespace(attempts=[SimpleNamespace(steps=steps)]), state={"of": 1000})
    made._wait_for_end(seen)
    assert said == ["it cannot end within the limit: comparing what exists"] and clock.now == 1000
    seen.state = {"of": 100}
    made._wait_for_end(seen)
    assert 1300 < clock.now < 1301, "half of what is left is for the other run"
    seen.over = True
    made._wait_for_end(seen)
    assert clock.now < 1301 and len(said) == 1


def disturbed(**changes: Any) -> Run:
    run = Run(
        attempts=(attempt(0, BEGUN, 1, 10, "left", None), attempt(1, BEGUN + 20, 10, 30, "done", 0)),
        checkpoints=(checkpoint(1, 0, 10, BEGUN + 9), checkpoint(2, 1, 20, BEGUN + 25)),
        noticed=Departure(0, BEGUN + 10, 30.0),
        outcome="done",
        exit_code=0,
    )
    return msgspec.structs.replace(run, **changes)


def test_undisturbed_run_is_made_only_where_it_can_tell_something(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = rehearsal()
    restarts = {"kind": "resumed"}
    monkeypatch.setattr(module, "evaluate_restart", lambda run, number: SimpleNamespace(**restarts))
    assert made._worth_comparing(disturbed()) and made._worth_comparing(disturbed(outcome="failed"))
    assert not made._worth_comparing(disturbed(noticed=None)) and not made._worth_comparing(alone())
    assert not made._worth_comparing(disturbed(attempts=disturbed().attempts[:1]))
    fails = disturbed(outcome="failed", checkpoints=disturbed().checkpoints[:1])
    assert not made._worth_comparing(fails), "it failed because of its restart"
    unended = disturbed(outcome="")
    assert made._worth_comparing(unended) and not rehearsal("stable")[0]._worth_comparing(unended)
    restarts["kind"] = "started over"
    assert not made._worth_comparing(disturbed())
    restarts["kind"] = "resumed"
    clock.now = 1600.0
    assert not made._worth_comparing(disturbed()), "no time is left"


def test_run_is_cancelled_so_that_the_next_one_has_the_node(clock: Clock) -> None:
    made, said = rehearsal()
    made._clear(observer(over=True))
    assert not said
    made._clear(observer())
    assert said == ["cancel"] and clock.now < 1600, "it is not awaited for ever"


def test_published_files_are_fetched_of_a_job_that_is_done() -> None:
    made, _ = rehearsal()
    for kind, files in (("done", {"a": "b"}), ("failed", None), (None, None)):
        seen = observer(state={"outcome": {"kind": kind}} if kind else {}, run=lambda *given: given[2])
        assert made._seen(seen, None, None) == files

"""The rows of the benchmarks: what did not happen, or went wrong, never counts as met."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench import guard, jobs, membership, seize, wire
from tests.bench.harness import commit, row
from tests.bench.training import Beat


def test_trials_without_a_value_miss_the_goal() -> None:
    assert row("m", [1.0, 1.0], "s", goal="<= 2 s", met=True)["met"]
    missed = row("m", [1.0, 1.0], "s", goal="<= 2 s", met=True, missed=1)
    assert (missed["met"], missed["n"], missed["missed"]) == (False, 3, 1)
    none = row("m", [], "s", goal="<= 2 s", met=True, missed=2)
    assert (none["met"], none["value"], none["n"]) == (False, None, 2)
    assert row("m", [1.0], "s", goal="-", met=None, missed=1)["met"] is None


def test_trees_that_differ_have_different_names(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    names = [commit(tmp_path)]
    for path, text in (("a", "2"), ("a", "3"), ("b", "1"), ("b", "2")):
        (tmp_path / path).write_text(text)
        names.append(commit(tmp_path))
        assert commit(tmp_path) == names[-1]
    assert len(set(names)) == len(names)
    assert [name.count("-dirty") for name in names] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("4 passed in 1.00s", 0, (True, 4)),
        ("3 passed, 2 errors in 1.00s", 1, (False, 5)),
        ("3 passed, 1 error in 1.00s", 1, (False, 4)),
        ("1 failed, 3 passed in 1.00s", 1, (False, 4)),
        ("2 errors in 1.00s", 1, (False, 2)),
        ("3 passed in 1.00s", 3, (False, 3)),
        ("4 skipped in 1.00s", 0, (None, 0)),
        ("", 4, (None, 0)),
    ],
)
def test_escapes_counts_errors_as_misses(output: str, code: int, expected: tuple[bool | None, int]) -> None:
    found = seize.escaped(f"...\n{output}\n", code)
    assert (found["met"], found["n"]) == expected


@pytest.mark.parametrize(("torn", "shown", "met"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_checkpoint_shown_before_it_is_whole_misses_the_goal(torn: int, shown: int, met: bool) -> None:
    done: Any = SimpleNamespace(torn=torn, shown=shown, met=[True, True], hopeless=1)
    found = wire.visible(done)
    assert (found["value"], found["met"], found["n"]) == (torn + shown, met, 3)


def test_kill_that_one_node_does_not_see_misses_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert membership.by_all([11.0, 12.0, 14.0], 3, 10.0) == 4.0
    assert membership.by_all([11.0, 12.0], 3, 10.0) == membership.MISSED
    options: Any = SimpleNamespace(minutes=10)
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(membership, "write", lambda area, rows: written.extend(rows))
    figures = {"mesh": {60: {"detect_all_s": [4.0, 4.0, membership.MISSED]}}}
    membership.report(figures, {}, {}, [], options)
    found = next(line for line in written if line["measure"] == "detect_all_s N=60")
    assert (found["met"], found["n"], found["missed"], found["value"]) == (False, 3, 1, 4.0)


def test_share_settles_when_it_stays_near() -> None:
    assert guard.settled([10, 30, 49, 51, 50], 50, 3) == 2
    assert guard.settled([50, 50, 50], 50, 3) == 0
    assert guard.settled([10, 50, 70, 50], 50, 3) == 3, "a first crossing is not the end"
    assert guard.settled([50, 50, 10], 50, 3) == 3


def test_memory_freed_above_the_quota_may_not_be_taken_again() -> None:
    assert guard.overshot(100, 150, [150, 140, 140, 120, 90, 100]) == ([0] * 6, 100)
    assert guard.overshot(100, 150, [151])[0] == [1]
    assert guard.overshot(100, 150, [140, 145])[0] == [0, 5]
    assert guard.overshot(100, 150, [90, 101])[0] == [0, 1]


def beats(*attempts: tuple[float, str, list[int]]) -> list[Beat]:
    """Make the trace of attempts that began at a time on a node and took these steps."""
    return [
        Beat(at + number / 10, node, attempt, step)
        for attempt, (at, node, steps) in enumerate(attempts)
        for number, step in enumerate([jobs.STARTED, *steps])
    ]


def test_departure_is_judged_by_the_steps_of_the_guests() -> None:
    good = jobs.survived(beats((0, "a", [1, 2, 3]), (10, "b", [4, 5]), (20, "c", [6])), [9.5, 19.0])
    assert (good.lost_steps, good.away_s, good.missed, good.whole) == ([0, 0], [0.5, 1.0], 0, 2)
    again = jobs.survived(beats((0, "a", [1, 2, 3]), (10, "b", [2, 3])), [9.0])
    assert (again.lost_steps, again.whole) == ([2], 0)
    skipped = jobs.survived(beats((0, "a", [1, 2, 3]), (10, "b", [5])), [9.0])
    assert (skipped.lost_steps, skipped.whole) == ([-1], 0)
    for stays in (
        beats((0, "a", [1, 2, 3])),  # it went nowhere
        beats((0, "a", [1, 2, 3]), (10, "a", [4])),  # to the same node
        beats((0, "a", [1, 2, 3]), (10, "b", [])),  # and took no step there
    ):
        assert (jobs.survived(stays, [9.0]).whole, jobs.survived(stays, [9.0]).missed) == (0, 1)
    twice = jobs.survived(beats((0, "a", [1]), (10, "b", [2])), [8.0, 9.0])
    assert (twice.whole, twice.missed) == (1, 1), "one move answers one notice"


@pytest.mark.parametrize(
    ("lost", "missed", "met"),
    [([0.0, 0.0], 0, True), ([0.0, 1.0], 0, False), ([0.0], 1, False), ([0.0, -1.0], 0, False)],
)
def test_departure_that_loses_a_step_or_moves_nothing_misses_the_goal(
    lost: list[float], missed: int, met: bool
) -> None:
    share, steps, _ = jobs.departed(jobs.Survived(lost, [0.1] * len(lost), missed))
    assert (share["met"], steps["met"], share["n"]) == (met, met, 2)


def test_host_whose_job_went_nowhere_misses_the_goal() -> None:
    good = jobs.Survived([0.0], [1.0])
    assert [line["met"] for line in jobs.ended(good, good, [0.7])] == [True, None, True, True]
    assert [line["met"] for line in jobs.ended(jobs.Survived(missed=1), good, [0.7])] == [False, None, True, True]
    assert not jobs.ended(jobs.Survived([9.0], [4.1]), good, [0.7])[0]["met"]


def test_training_whose_moves_did_not_happen_misses_the_goal() -> None:
    assert jobs.moved("m", 0.1, True, jobs.Survived([0.0], [0.1]))["met"]
    assert not jobs.moved("m", 0.1, True, jobs.Survived([0.0], [0.1], 1))["met"]
    assert not jobs.moved("m", 0.1, False, jobs.Survived([0.0], [0.1]))["met"]

"""What an observer reads of a job: steps, entries of its checkpoint directory, attempts and their output."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.daemon.layout import Layout
from mesh.rehearsal import observer as module
from mesh.rehearsal import private_mesh
from mesh.rehearsal.observations import Attempt, Checkpoint, Departure, Run
from mesh.rehearsal.observer import LINES_KEPT, Observer, _tree
from mesh.rehearsal.private_mesh import PrivateMesh
from mesh.util.errors import ExitCode, MeshError

JOB = "j" * 26


def attempt(number: int, **fields: Any) -> dict[str, Any]:
    told = {"number": number, "term": number + 10, "node": "node1", "running_unix_ms": 1000, "ended_unix_ms": 0}
    return told | {"exit_code": None, "reason": "", **fields}


class Rehearsed:
    """A job on one node whose directories the test fills."""

    def __init__(self, root: Path, mode: str = "rename") -> None:
        where = Layout(root)
        self.state: dict[str, Any] = {}
        node = SimpleNamespace(nick="node1", where=where)
        stack: Any = SimpleNamespace(nodes=[node], node=lambda nick: node, job=lambda job: self.state)
        self.observer = Observer(stack, JOB, b"m" * 16, mode)
        self.base = where.jobs / JOB / "10"
        self.ckpt = self.base / "ckpt"
        self.logs = where.logs / JOB
        for path in (self.ckpt, self.base / "ctl", self.base / "work", self.logs):
            path.mkdir(parents=True)

    def poll(self) -> None:
        self.observer._due = dict.fromkeys(self.observer._due, 0.0)
        self.observer.poll()

    def run(self) -> Run:
        return self.observer.run()


@pytest.fixture
def rehearsed(tmp_path: Path) -> Rehearsed:
    return Rehearsed(tmp_path)


def test_each_step_is_read_once(rehearsed: Rehearsed) -> None:
    rehearsed.state = {"attempts": [attempt(0)], "state": "running"}
    progress = rehearsed.base / "ctl" / "progress.json"
    rehearsed.poll()
    for step in (3, 3, 5):
        progress.write_text(json.dumps({"step": step}))
        rehearsed.poll()
    progress.write_text("no progress")
    rehearsed.poll()
    (seen,) = rehearsed.run().attempts
    assert [step for _, step in seen.steps] == [3, 5] and seen.steps[0][0] == pytest.approx(time.time(), abs=60)
    assert seen.step_at(seen.steps[1][0]) == 5 and seen.step_at(0.0) is None


def test_entry_that_changes_after_it_looked_complete_is_torn(rehearsed: Rehearsed) -> None:
    (rehearsed.ckpt / "step-1").mkdir()
    (rehearsed.ckpt / "step-1" / "weights").write_text("a")
    (rehearsed.ckpt / "step-2.tmp").mkdir()
    rehearsed.poll()
    assert rehearsed.run().torn == () and rehearsed.observer._files[10].unfinished == ("step-2.tmp",)
    (rehearsed.ckpt / "step-2.tmp").rename(rehearsed.ckpt / "step-2")
    (rehearsed.ckpt / "step-1" / "weights").write_text("longer")
    rehearsed.poll()
    assert rehearsed.run().torn == ("step-1",)
    (rehearsed.ckpt / "step-3").mkdir()
    for name in ("weights", "old"):
        (rehearsed.ckpt / "step-3" / name).write_text("a")
    rehearsed.poll()
    (rehearsed.ckpt / "step-3" / "old").unlink()
    rehearsed.poll()
    assert rehearsed.run().torn == ("step-1",), "a job may prune"


def test_entry_is_complete_with_its_marker_only(tmp_path: Path) -> None:
    from mesh.checkpoints.commit_modes import MARKER

    rehearsed = Rehearsed(tmp_path, "marker")
    entry = rehearsed.ckpt / "step-1"
    entry.mkdir()
    for words in ("a", "longer"):
        (entry / "weights").write_text(words)
        rehearsed.poll()
    assert rehearsed.run().torn == (), "it is still being written"
    (entry / MARKER).touch()
    rehearsed.poll()
    (entry / "weights").write_text("longer still")
    rehearsed.poll()
    assert rehearsed.run().torn == ("step-1",)


def test_only_entries_written_by_the_attempt_are_its_own(rehearsed: Rehearsed) -> None:
    begun = time.time() - 100
    rehearsed.state = {"attempts": [attempt(0, running_unix_ms=begun * 1000)], "state": "running"}
    for name, at in (("later", begun + 20), ("restored", begun - 50), ("sooner", begun + 10)):
        (rehearsed.ckpt / name).write_text("x")
        os.utime(rehearsed.ckpt / name, (at, at))
    rehearsed.poll()
    assert rehearsed.run().attempts[0].written == ("sooner", "later")


def test_files_outside_are_listed_by_size_while_nothing_is_stored(rehearsed: Rehearsed) -> None:
    begun = time.time() - 100
    rehearsed.state = {"attempts": [attempt(0, running_unix_ms=begun * 1000)], "state": "running"}
    rehearsed.state["detail"] = "checkpoint not stored: no room"
    for number in range(7):
        (rehearsed.base / "work" / f"f{number}").write_text("x" * number)
    old = rehearsed.base / "work" / "data"
    old.write_text("x" * 1000)
    os.utime(old, (begun - 10, begun - 10))
    rehearsed.poll()
    rehearsed.poll()
    state = rehearsed.observer.directory_state()
    assert state.outside == (("f6", 6), ("f5", 5), ("f4", 4), ("f3", 3), ("f2", 2)) and state.trouble == "no room"
    assert not state.open and state.entries == ()


def test_tree_is_listed_to_a_bound_and_a_file_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("xx")
    assert {name: size for name, (size, _) in _tree(tmp_path / "file").items()} == {"": 2, "file": 2}
    monkeypatch.setattr(module, "FILES_SCANNED", 2)
    for number in range(5):
        (tmp_path / "d" / f"e{number}").mkdir(parents=True)
        (tmp_path / "d" / f"e{number}" / "f").touch()
    assert len(_tree(tmp_path / "d")) == 3


def test_running_attempt_is_one_that_has_begun_and_not_ended(rehearsed: Rehearsed) -> None:
    rows = [attempt(0, reason="its node left"), attempt(1), attempt(2, running_unix_ms=0)]
    rehearsed.state = {"attempts": rows, "state": "running", "outcome": None}
    rehearsed.poll()
    observer = rehearsed.observer
    assert observer.running(0) == observer.running(1) == rows[1] and observer.running(2) is None
    assert observer.started(0) == rows[0] and observer.started(2) is observer.started(3) is None and not observer.over
    rehearsed.state = {"attempts": [attempt(1, reason="its node left")], "state": "running", "outcome": None}
    rehearsed.poll()
    assert observer.running(0) is None
    rehearsed.state = {"attempts": rows[2:], "state": "suspended", "outcome": {"kind": "failed", "exit_code": 3}}
    rehearsed.poll()
    assert [row["number"] for row in observer.attempts] == [0, 1, 2], "nodes list only the last few"
    assert observer.running(1) is None and observer.over
    run = rehearsed.run()
    assert (run.outcome, run.exit_code, run.done, run.attempts[0].running_unix) == ("failed", 3, False, 1.0)
    rehearsed.state = {}
    rehearsed.poll()
    assert observer.over, "an answer of no node changes nothing"


def test_commits_are_counted_from_an_attempt_on(rehearsed: Rehearsed) -> None:
    rehearsed.state = {"attempts": [attempt(0), attempt(1)], "state": "running"}
    rehearsed.poll()
    observer = rehearsed.observer
    assert observer.commits(0) == 0
    for seq, term in ((2, 10), (5, 11), (9, 99)):
        observer._commits[str(seq)] = (term, Checkpoint(seq, -1, 0.0, 0.0, 0, ""))
    assert [(one.seq, one.attempt) for one in observer.checkpoints()] == [(2, 0), (5, 1)], "of attempts that are known"
    assert observer.commits(0) == 5 and observer.commits(1) == 3 and observer.commits(2) == 0


def test_middle_of_a_long_output_is_left_out(rehearsed: Rehearsed) -> None:
    rehearsed.state = {"attempts": [attempt(0), attempt(7)], "state": "running"}
    rehearsed.poll()
    lines = [f"line {number}" for number in range(2 * LINES_KEPT + 1)]
    (rehearsed.logs / "007.txt").write_text("\n".join(lines))
    none, whole = (one.output for one in rehearsed.run().attempts)
    assert none == () and whole == (*lines[:LINES_KEPT], *lines[-LINES_KEPT:])
    for some in (lines[1:], lines[: LINES_KEPT + 9]):
        (rehearsed.logs / "007.txt").write_text("\n".join(some))
        assert rehearsed.run().attempts[1].output == tuple(some)


def test_run_knows_what_each_attempt_resumed_from() -> None:
    points = tuple(Checkpoint(seq, number, 0.0, 0.0, 0, "") for seq, number in ((1, 0), (2, 0), (4, 2)))
    ended = Attempt(0, "a", 10.0, 15.0, output=("one", " "))
    run = Run((ended, Attempt(2, "b", 20.0)), points, Departure(0, 5.0), detail="x")
    assert run.resumed_by(0) is None and run.resumed_by(1) == run.resumed_by(2) == points[1]
    assert run.of_attempt(0) == list(points[:2]) and run.moved == [points[2]] and run.ran_s == 5.0
    assert run.last_line == "one" and run.attempt(1) is None and not Run().last_line
    assert not ended.failed and Attempt(0, "a", reason="failed (exit 1)").failed


def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, post: Any) -> PrivateMesh:
    node = SimpleNamespace(running=True, client=SimpleNamespace(post=post), process=SimpleNamespace(pid=1))
    stack = SimpleNamespace(nodes=[SimpleNamespace(running=False), node], node=lambda nick: node, directory=tmp_path)
    monkeypatch.setattr(private_mesh, "Stack", lambda count, overrides: stack)
    monkeypatch.setattr(private_mesh, "_catches_term", lambda node: True)
    return PrivateMesh("process")


def test_submission_waits_for_images_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 4.0

    monkeypatch.setattr(private_mesh.time, "monotonic", lambda: now)
    monkeypatch.setattr(private_mesh.time, "sleep", sleep)
    errors: list[MeshError] = []

    def post(path: str, order: dict[str, Any], timeout_s: float) -> dict[str, str]:
        if errors:
            raise errors.pop()
        return {"job": JOB}

    mesh = private(monkeypatch, tmp_path, post)
    order: dict[str, Any] = {"image": "torch", "ckpt_mode": "rename"}
    impossible = MeshError("no node has it", ExitCode.IMPOSSIBLE)
    errors += [impossible, impossible]
    assert mesh.submit(order).job == JOB and now == 8.0
    errors += [impossible] * 9
    with pytest.raises(MeshError, match="a rehearsal has only what this machine has") as told:
        mesh.submit(order)
    assert told.value.code == ExitCode.IMPOSSIBLE and len(errors) == 5
    with pytest.raises(MeshError, match="a rehearsal has only"):
        mesh.submit(order | {"image": None})
    assert len(errors) == 4, "without an image there is nothing to wait for"
    errors[:] = [MeshError("wrong", ExitCode.USAGE)]
    with pytest.raises(MeshError, match=r"^wrong$"):
        mesh.submit(order)


def test_notice_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    fails: list[MeshError] = []

    def post(path: str, body: dict[str, Any], timeout_s: float) -> None:
        asked.append((path, body, timeout_s))
        if fails:
            raise fails.pop()

    mesh = private(monkeypatch, tmp_path, post)
    left = mesh.notice("node1", 2, 7.0, lambda: None)
    assert asked == [("/v1/reclaim", {"grace_s": 7.0}, 67.0)]
    assert (left.attempt, left.grace_s, left.catches_term) == (2, 7.0, True)
    fails.append(MeshError("it hangs"))
    with pytest.raises(MeshError, match="it hangs"):
        mesh.notice("node1", 2, 7.0, lambda: None)


def test_published_files_are_compared_by_their_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fails: list[MeshError] = []

    def post(path: str, body: dict[str, Any], timeout_s: float) -> None:
        if fails:
            raise fails.pop()
        target = Path(body["destination"])
        (target / "inner").mkdir(parents=True)
        (target / "inner" / "a").write_text("x")
        (target / "b").write_text("x")
        (target / "link").symlink_to("b")

    mesh = private(monkeypatch, tmp_path, post)
    observer: Any = SimpleNamespace(job=JOB)
    found = mesh.published(observer)
    assert found is not None and sorted(found) == ["b", "inner/a"] and found["b"] == found["inner/a"]
    fails.append(MeshError("gone"))
    assert mesh.published(observer) is None

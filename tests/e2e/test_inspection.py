"""Inspection of a job on real daemons: describe, events, files, and the log of a dead host."""

import re
import signal
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack
from mesh.jobs.log_times import read_marks
from tests.e2e.commands import (
    ENDLESS,
    WAIT_S,
    finished,
    job_state,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    start,
    submit_endless,
    until,
)

pytestmark = pytest.mark.e2e


def test_any_node_describes_a_running_and_a_finished_job(shared: Stack, tmp_path: Path) -> None:
    node, other = shared.nodes[:2]
    job = submit_endless(node, tmp_path / "end", "--name", "counted", "--out", str(tmp_path / "home"))
    watch = start(other, "job", "events", job, "-w")
    assert watch.stdout is not None
    running_with_checkpoint(other, job)
    assert job_state(other, job)["at_risk_s"] < 60

    text = until(
        lambda: "can save before" in (t := ok(other, "describe", "counted")) and t,
        "describe to show the guest's details",
    )
    for word in ("counted", f"count.py {ENDLESS}", "kept by", "running", "at step"):
        assert word in text
    asked = next(line for line in text.splitlines() if line.startswith("asks for"))
    assert re.fullmatch(r"asks for    --env UNTIL=\S+; --ckpt ckpts; --ckpt-mode rename(; --grace 10s)?", asked)
    ok(other, "cp", f"{job}:count.py", str(tmp_path / "copied.py"))
    assert (tmp_path / "copied.py").read_text() == (Path(__file__).parent / "project" / "count.py").read_text()
    ok(other, "cp", f"{job}:ckpt", str(tmp_path))
    assert any(path.name.startswith("step-") for path in (tmp_path / "ckpt").iterdir())
    for path, word in (("../../journal.sqlite", "no file"), ("nothing", "no file"), ("work/../../..", "no file")):
        refused = mesh(other, "cp", f"{job}:{path}", str(tmp_path / "x"))
        assert refused.returncode == 4 and word in refused.stderr

    (tmp_path / "end").touch()
    assert finished(node, job)["state"] == finished(other, job)["state"] == "done"
    heard, _ = watch.communicate(timeout=WAIT_S)
    assert watch.returncode == 0
    for word in (
        "submitted: by",
        "running",
        "checkpoint 1 at step",
        "attempt ended here: done",
        "the job is over: done",
    ):
        assert word in heard, heard
    events = read(shared.nodes[3], "job", "events", job)["events"]
    assert [event["unix_ms"] for event in events] == sorted(event["unix_ms"] for event in events)
    assert {"submitted", "state", "checkpoint", "attempt", "end"} <= {event["kind"] for event in events}
    assert not any(event["gap"] for event in events) and [event["kind"] for event in events].count("end") == 1

    until((tmp_path / "home" / "digest.txt").exists, "the output files to be delivered")
    ok(other, "cp", f"{job}:out/digest.txt", str(tmp_path))
    assert (tmp_path / "digest.txt").read_text() == (tmp_path / "home" / "digest.txt").read_text()
    gone = mesh(other, "cp", f"{job}:count.py", str(tmp_path / "x"))
    assert gone.returncode == 1 and "ckpt/" in gone.stderr and "out/" in gone.stderr
    full = mesh(node, "submit", "--out", str(tmp_path), "--", "true")
    assert full.returncode == 2 and "not empty" in full.stderr


def marked_to_the_end(stack: Stack, job: str) -> bool:
    """Tell whether the log of the job's only attempt has a time for its last byte, which stays when more is printed."""
    (log,) = (path for node in stack.nodes for path in (node.where.logs / job).glob("*.txt"))
    marks = read_marks(log)
    return bool(marks) and marks[-1][1] == log.stat().st_size


def test_logs_are_stamped_and_selected_by_time(shared: Stack, tmp_path: Path) -> None:
    node, other = shared.nodes[:2]
    program = (
        "import pathlib, sys, time\n"
        "print('early', flush=True); time.sleep(3); print('late', time.time(), flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.1)\n"
        "print('end', flush=True)\n"
    )
    job = ok(node, "submit", "--no-workdir", "--", sys.executable, "-c", program, str(tmp_path / "end")).strip()
    until(lambda: "late" in ok(other, "logs", job), "the job to print its second line")
    until(lambda: marked_to_the_end(shared, job), "its node to note when it did")
    stamped = ok(other, "logs", "-t", job)
    (early, text), (late, printed) = (line.split(" ", 1) for line in stamped.splitlines())
    early_at, late_at = datetime.fromisoformat(early), datetime.fromisoformat(late)
    assert text == "early" and (late_at - early_at).total_seconds() > 2
    assert abs(late_at.timestamp() - float(printed.split()[1])) < 1.5

    between = (late_at - timedelta(seconds=1)).isoformat()
    for place in (node, other):
        assert ok(place, "logs", "--since", between, job) == f"{printed}\n"
        assert ok(place, "logs", "-t", "--since", "1h", job) == stamped
        assert ok(place, "logs", "-t", "-n", "1", job) == f"{late} {printed}\n"
    wrong = mesh(node, "logs", "--since", "yesterday", job)
    assert wrong.returncode == 2 and "neither a duration" in wrong.stderr

    follower = start(other, "logs", "-f", "-t", "-n", "1", "--since", between, job)
    assert follower.stdout is not None and follower.stdout.readline() == f"{late} {printed}\n"
    (tmp_path / "end").touch()
    rest, _ = follower.communicate(timeout=WAIT_S)
    assert follower.returncode == 0 and [line.split()[1] for line in rest.splitlines()] == ["end"]
    assert ok(other, "logs", "-t", job).startswith(stamped), "times stay the same when the job has ended"


def test_witnesses_hold_the_log_of_a_dead_host(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    program = "import time\nfor i in range(9999): print('line', i, flush=True); time.sleep(0.05)"
    job = ok(user, "submit", "--no-workdir", "--", sys.executable, "-c", program).strip()
    state = until(lambda: (s := job_state(user, job)) and s["state"] == "running" and s, "the job to run")
    host = stack.node(state["node"])
    until(lambda: "line 100\n" in ok(user, "logs", job), "100 lines of output")
    copied = until(lambda: list(user.where.logs.rglob("*.copy")), "a copy of the log")
    before = copied[0].read_text()
    send(signal.SIGKILL, host)
    until(lambda: job_state(user, job)["attempts"][-1]["number"] == 1, "the job to resume on another node")
    kept = ok(user, "logs", job)
    assert kept.startswith("line 0\nline 1\n") and len(kept) >= len(before) - 16
    copied_lines = ok(user, "logs", "--attempt", "0", "-t", job).splitlines()
    times = [datetime.fromisoformat(line.split()[0]) for line in copied_lines]
    assert times == sorted(times) and len(set(times)) >= len(times) // 20 - 3, "a time for each second, from the host"
    assert (
        ok(user, "logs", "--attempt", "0", "--since", times[60].isoformat(), job).splitlines()[-1]
        == (copied_lines[-1].split(maxsplit=1)[1])
    )
    ok(user, "cancel", job)

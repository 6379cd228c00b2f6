"""One job, looked at closely: describe, events, files, and the log of a host that died. Real daemons."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.stack import Stack
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


def test_all_about_a_job_from_any_node_while_it_runs_and_after(shared: Stack, tmp_path: Path) -> None:
    node, other = shared.nodes[:2]
    job = submit_endless(node, tmp_path / "end", "--name", "counted", "--out", str(tmp_path / "home"))
    watch = start(other, "events", job, "-w")
    assert watch.stdout is not None
    running_with_checkpoint(other, job)
    assert job_state(other, job)["at_risk_s"] < 60

    text = until(
        lambda: "can save before" in (t := ok(other, "describe", "counted")) and t, "its guest to be looked at"
    )
    for word in ("counted", f"count.py {ENDLESS}", "kept by", "under way", "at step", "checkpoints"):
        assert word in text
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
    events = read(shared.nodes[3], "events", job)["events"]
    assert [event["unix_ms"] for event in events] == sorted(event["unix_ms"] for event in events)
    assert {"submitted", "state", "checkpoint", "attempt", "end"} <= {event["kind"] for event in events}
    assert not any(event["gap"] for event in events) and [event["kind"] for event in events].count("end") == 1

    until((tmp_path / "home" / "digest.txt").exists, "its files to come home")
    ok(other, "cp", f"{job}:out/digest.txt", str(tmp_path))
    assert (tmp_path / "digest.txt").read_text() == (tmp_path / "home" / "digest.txt").read_text()
    gone = mesh(other, "cp", f"{job}:count.py", str(tmp_path / "x"))
    assert gone.returncode == 1 and "ckpt/" in gone.stderr and "out/" in gone.stderr
    full = mesh(node, "submit", "--out", str(tmp_path), "--", "true")
    assert full.returncode == 2 and "not empty" in full.stderr


def test_what_a_host_printed_before_it_died_is_with_the_witnesses(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    program = "import time\nfor i in range(9999): print('line', i, flush=True); time.sleep(0.05)"
    job = ok(user, "submit", "--no-workdir", "--", sys.executable, "-c", program).strip()
    state = until(lambda: (s := job_state(user, job)) and s["state"] == "running" and s, "the job to run")
    host = stack.node(state["node"])
    until(lambda: "line 100\n" in ok(user, "logs", job), "a hundred lines")
    copied = until(lambda: list(user.where.logs.rglob("*.copy")), "a copy of the log")
    before = copied[0].read_text()
    send(signal.SIGKILL, host)
    until(lambda: job_state(user, job)["attempts"][-1]["number"] == 1, "the job to go on elsewhere")
    kept = ok(user, "logs", job)
    assert kept.startswith("line 0\nline 1\n") and len(kept) >= len(before) - 16
    ok(user, "cancel", job)

"""The demo (three departures, one result), and the devstack that it runs on."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import ok, read, start, until

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
LIMIT_S = 660.0  # one minute above the demo's own limit


def demo(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run `make demo` with a shorter training; return its facts and output."""
    file = tmp_path / "demo.json"
    arguments = " ".join(["--json", str(file), "--epochs", "12", *options])
    command = ["make", "--no-print-directory", "demo", f"DEMO_ARGS={arguments}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(file.read_text()), done.stdout


def check(facts: dict[str, Any], text: str) -> None:
    assert facts["passed"] is True and facts["digest"] == facts["undisturbed_digest"] and len(facts["digest"]) == 64
    assert facts["accuracy"] > 0.9
    attempts = facts["attempts"]
    assert (
        len(attempts) >= 3 and attempts[0]["reason"] == "vacated: its node leaves" and attempts[-1]["reason"] == "done"
    )
    assert {attempt["reason"] for attempt in attempts[1:-1]} & {"node lost", "lease expired"}
    for attempt in attempts[:-1]:
        assert attempt["downtime_s"] >= 0 and attempt["steps_lost"] >= 0 and attempt["node"].startswith("node")
    assert attempts[0]["steps_lost"] == 0, "a graceful leave must lose no step"
    assert attempts[-1]["downtime_s"] is None and attempts[-1]["steps_lost"] is None
    for word in ("SIGTERM", "SIGKILL", "submitter", "resumes the job", "EQUAL", facts["digest"]):
        assert word in text
    saved = [line.partition(" s  ")[2] for line in text.splitlines() if " checkpoint " in line and " saved " in line]
    assert saved and len(set(saved)) == len(saved), "witnesses must report each event of other nodes once"


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_demo_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    check(*demo(tmp_path))


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(LIMIT_S + 60)
def test_demo_in_containers(tmp_path: Path) -> None:
    """The same story takes a minute of computation again; test_containers.py moves a job between containers."""
    check(*demo(tmp_path, "--engine", "docker"))


@pytest.mark.parametrize("as_json", [False, True])
def test_devstack_runs_until_ctrl_c_or_hangup_and_leaves_nothing(as_json: bool) -> None:
    process = start(None, "debug", "devstack", "-n", "2", "--slots", "3", *(["--json"] if as_json else []))
    assert process.stdout is not None
    if as_json:
        document = "".join(iter(process.stdout.readline, "}\n")) + "}"
        states = [Path(row["state"]) for row in json.loads(document)["nodes"]]
    else:
        states = [Path(process.stdout.readline().split("MESH_STATE=")[1].strip()) for _ in range(2)]
    rows = read(states[0], "nodes")["nodes"]
    assert [row["nick"] for row in rows] == ["node1", "node2"] and rows[0]["slots"] == 3
    assert ok(None, "run", "--no-workdir", "--", "echo", "hello", MESH_STATE=str(states[1])) == "hello\n"
    pids = [read(state, "status")["pid"] for state in states]
    process.send_signal(signal.SIGHUP if as_json else signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0 and not any(state.exists() for state in states)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_interrupted_demo_leaves_nothing() -> None:
    process = start(None, "debug", "demo")
    assert process.stdout is not None
    line = ""
    while "submits job" not in line:
        line = process.stdout.readline()
        assert line, "the demo ended early"
    daemons = mine(process.pid)
    assert len(daemons) == 5
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=90)
    assert process.returncode == 130
    until(lambda: not [pid for pid in daemons if exists(pid)], "the demo's daemons to end")


def mine(pid: int) -> list[int]:
    text = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in text.splitlines()[1:]]
    return [int(row[0]) for row in rows if int(row[1]) == pid and "mesh.daemon.entry" in row[2]]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""The real `mesh` command against real daemons, and conditions to wait for."""

import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from mesh.cli.main import cli
from mesh.stack import LOOPBACK, StackNode

WAIT_S = 60.0
ENDLESS = 1_000_000  # steps, of a fiftieth of a second each
PROJECT = Path(__file__).parent / "project"
Done = subprocess.CompletedProcess[str]


def command(state: StackNode | Path | None, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "mesh.cli", *_chosen(state), *arguments]


def _chosen(state: StackNode | Path | None) -> list[str]:
    where = state.where.root if isinstance(state, StackNode) else state
    return ["--state", str(where)] if where is not None else []


def mesh(
    state: StackNode | Path | None,
    *arguments: str,
    within: tuple[str, ...] = (),
    cwd: Path = PROJECT,
    timeout_s: float = WAIT_S,
    **env: str,
) -> Done:
    """Run one command to its end; `within`: a command that runs it, as `ip netns exec`."""
    return subprocess.run(
        [*within, *command(state, *arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "COLUMNS": "160", **env},
    )


def ok(state: StackNode | Path | None, *arguments: str, **options: Any) -> str:
    """Standard output of a command that must succeed."""
    done = mesh(state, *arguments, **options)
    assert done.returncode == 0, f"mesh {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def read(state: StackNode | Path | None, *arguments: str) -> Any:
    """The JSON of a read, by the same command in this process: conditions are looked at often, and its start takes a tenth of a
    second of work."""
    done = CliRunner().invoke(cli, [*_chosen(state), *arguments, "--json"], prog_name="mesh")
    assert done.exit_code == 0, f"mesh {' '.join(arguments)}: {done.exit_code}\n{done.output}"
    return json.loads(done.stdout)


def start(state: StackNode | Path | None, *arguments: str, cwd: Path = PROJECT) -> subprocess.Popen[str]:
    """A command that goes on; Ctrl-C reaches it even where the tests themselves were started with it ignored (`nohup`, `&`)."""
    return subprocess.Popen(
        ["env", "--default-signal=INT", *command(state, *arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )


def until(ready: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """What `ready` gives once that is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = ready()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.1)


UNHEARD: dict[str, Any] = {
    "state": "",
    "detail": "",
    "node": None,
    "heir": None,
    "step": None,
    "of": None,
    "checkpoint": None,
    "gpu_portions": [],
    "attempts": [],
}


def job_state(node: StackNode, job: str) -> dict[str, Any]:
    """The job as this node sees it; `UNHEARD` while it does not know it."""
    found = [row for row in read(node, "ps", "-a")["jobs"] if row["job"] == job]
    return found[0] if found else UNHEARD


def submit_count(node: StackNode, steps: int, *options: str, pace_s: float = 0.02) -> str:
    """Submit the counting job; its id. What is done to it must take less time than it does: see `submit_endless`."""
    order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename", *options)
    return ok(node, *order, "--", sys.executable, "count.py", str(steps), str(pace_s)).strip()


def submit_endless(node: StackNode, end: Path, *options: str) -> str:
    """Submit a counting job that ends once there is a file `end`; its id."""
    return submit_count(node, ENDLESS, "--env", f"UNTIL={end}", *options)


def count_of(node: StackNode, job: str) -> tuple[int, str]:
    """How far one has counted that was ended so, and its digest."""
    *_, counted, digest = ok(node, "logs", job).splitlines()
    return int(counted.removeprefix("counted ")), digest.removeprefix("digest ")


def exact(node: StackNode, job: str) -> bool:
    """Whether it has ended so with what an undisturbed count ends with."""
    steps, digest = count_of(node, job)
    return digest == count_digest(steps)


def free_port() -> int:
    """None of those that the kernel gives out by itself (Linux: from 32768 on), so that nobody is given it before it is used."""
    while True:
        with suppress(OSError), socket.create_server((LOOPBACK, secrets.choice(range(20_000, 32_000)))) as free:
            return int(free.getsockname()[1])


def count_digest(steps: int) -> str:
    """What an undisturbed count ends with."""
    digest = ""
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    return digest


def running_with_checkpoint(node: StackNode, job: str, elsewhere: str | None = None) -> dict[str, Any]:
    """Wait until it runs (not on `elsewhere`) and has committed a checkpoint since its last move; its state."""

    def there() -> dict[str, Any] | None:
        state = job_state(node, job)
        assert not (state and state.get("outcome")), f"{state['outcome']}\n{ok(node, 'logs', job)}"
        if not state or state["state"] != "running" or state["node"] in {None, elsewhere} or not state["checkpoint"]:
            return None
        resumed = state["attempts"][-1]["resumed_step"] or 0
        return state if (state["checkpoint"]["step"] or 0) > resumed else None

    state: dict[str, Any] = until(there, "the job to run and to commit a checkpoint")
    return state


def finished(node: StackNode, job: str) -> dict[str, Any]:
    state: dict[str, Any] = until(
        lambda: (state := job_state(node, job)) and state.get("outcome") and state, "the job to end"
    )
    return state


def send(number: signal.Signals, *nodes: StackNode) -> None:
    """A signal to these daemons, by their pids."""
    for node in nodes:
        assert node.process is not None
        os.kill(node.process.pid, number)


def descendants(pid: int) -> list[tuple[int, str]]:
    lines = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]
    table = {int(line.split()[0]): (int(line.split()[1]), line) for line in lines}
    found = []
    for child, (parent, line) in table.items():
        ancestor = parent
        while ancestor in table and ancestor != pid:
            ancestor = table[ancestor][0]
        if ancestor == pid:
            found.append((child, line))
    return found


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def as_documented(node: StackNode, job: str) -> int:
    """Every read that answers JSON answers what the API's document says of it; how many there are."""
    from mesh.api.openapi import answers_of
    from mesh.api.routes import ROUTES

    there = {"job": job, "node": node.nick}
    reads = [route for route in ROUTES if route.method == "GET" and "{name}" not in route.path and answers_of(route)]
    for route in reads:
        (answer,) = answers_of(route)
        msgspec.json.decode(node.client.read(route.path.format_map(there)), type=answer)
    return len(reads)

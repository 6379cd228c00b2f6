"""The real `mesh` command against real daemons, and conditions to wait for."""

import hashlib
import json
import os
import secrets
import shlex
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
from click.testing import CliRunner, Result

from mesh.cli.main import cli
from mesh.daemon.stack import LOOPBACK, Stack, StackNode
from mesh.util import cgroups
from tests import forks
from tests.execution.bench import WAIT_S

ENDLESS = 1_000_000  # steps of 1/50 s each
PROJECT = Path(__file__).parent / "project"
Done = subprocess.CompletedProcess[str]


def command(state: StackNode | Path | None, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "mesh.cli", *chosen(state), *arguments]


def chosen(state: StackNode | Path | None) -> list[str]:
    where = state.where.root if isinstance(state, StackNode) else state
    return ["--state", str(where)] if where is not None else []


def suggestion(state: StackNode, words: str) -> str:
    """Return how a message suggests this command to somebody who names their node by --state."""
    return f"`mesh --state {shlex.quote(str(state.where.root))} {words}"


def mesh(
    state: StackNode | Path | None,
    *arguments: str,
    within: tuple[str, ...] = (),
    cwd: Path = PROJECT,
    timeout_s: float = WAIT_S,
    input_text: str = "",
    **env: str,
) -> Done:
    """Run one command to its end. `within` is a wrapper command such as `ip netns exec`."""
    env = {**os.environ, "COLUMNS": "160", **env}
    if not within:
        return forks.run([*chosen(state), *arguments], input_text, cwd, timeout_s, env)
    return subprocess.run(
        [*within, *command(state, *arguments)],
        input=input_text,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout_s,
        check=False,
        env=env,
    )


def ok(state: StackNode | Path | None, *arguments: str, **options: Any) -> str:
    """Return the standard output of a command that must succeed."""
    done = mesh(state, *arguments, **options)
    assert done.returncode == 0, f"mesh {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def here(state: StackNode | Path | None, *arguments: str) -> Result:
    """Run one command inside this process, for calls that are many: a new process takes 0.1 s of CPU time."""
    return CliRunner().invoke(cli, [*chosen(state), *arguments], prog_name="mesh", env={"COLUMNS": "160"})


def read(state: StackNode | Path | None, *arguments: str) -> Any:
    """Return the JSON of a read command. Conditions are polled often, so it runs inside this process."""
    done = here(state, *arguments, "--json")
    assert done.exit_code == 0, f"mesh {' '.join(arguments)}: {done.exit_code}\n{done.output}"
    return json.loads(done.stdout)


def start(state: StackNode | Path | None, *arguments: str, cwd: Path = PROJECT) -> subprocess.Popen[str]:
    """Start a command in the background. It receives Ctrl-C and hangups even if the test run ignores them (`nohup`, `&`)."""
    return subprocess.Popen(
        ["env", "--default-signal=INT,HUP", *command(state, *arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )


def until(ready: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait until `ready` returns a true value, and return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = ready()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.1)


def metric(node: StackNode, name: str) -> float:
    """Return the sum of a metric's samples, of which there must be some."""
    lines = node.client.read("/metrics").decode().splitlines()
    found = [float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    assert found, f"the daemon has no metric {name}"
    return sum(found)


UNHEARD: dict[str, Any] = {
    "state": "",
    "detail": "",
    "node": None,
    "standby": None,
    "step": None,
    "of": None,
    "checkpoint": None,
    "gpu_portions": [],
    "attempts": [],
}


def job_state(node: StackNode, job: str) -> dict[str, Any]:
    """Return the job as this node sees it, or `UNHEARD` while the node does not know the job."""
    found = [row for row in read(node, "ps", "-a")["jobs"] if row["job"] == job]
    return found[0] if found else UNHEARD


def submit_count(node: StackNode, steps: int, *options: str, pace_s: float = 0.02) -> str:
    """Submit the counting job and return its id. It may end before a slow test acts on it; see `submit_endless`."""
    order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename", *options)
    return ok(node, *order, "--", sys.executable, "count.py", str(steps), str(pace_s)).strip()


def end_of(stack: Stack) -> Path:
    """Return the file that ends this stack's counting job, in a directory that its guests see."""
    return Path(stack.overrides["process_sees"][0]) / f"{stack.directory.name}-end"


def submit_endless(node: StackNode, end: Path, *options: str, pace_s: float = 0.02) -> str:
    """Submit a counting job that ends when the file `end` exists, and return its id."""
    return submit_count(node, ENDLESS, "--env", f"UNTIL={end}", *options, pace_s=pace_s)


def count_of(node: StackNode, job: str) -> tuple[int, str]:
    """Return the last number and the digest that an ended counting job printed."""
    *_, counted, digest = ok(node, "logs", job).splitlines()
    return int(counted.removeprefix("counted ")), digest.removeprefix("digest ")


def exact(node: StackNode, job: str) -> bool:
    """Return True if the counting job ended with the digest of an undisturbed count."""
    steps, digest = count_of(node, job)
    return digest == count_digest(steps)


def free_port() -> int:
    """Return a free port below the ephemeral range (Linux: from 32768), so that the kernel assigns it to no other socket."""
    while True:
        with suppress(OSError), socket.create_server((LOOPBACK, secrets.choice(range(20_000, 32_000)))) as free:
            return int(free.getsockname()[1])


def count_digest(steps: int) -> str:
    """Return the digest of an undisturbed count."""
    digest = ""
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    return digest


def running_with_checkpoint(node: StackNode, job: str, elsewhere: str | None = None) -> dict[str, Any]:
    """Wait until the job runs (not on `elsewhere`) and has committed a checkpoint since its last move; return its state."""

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
    """Send a signal to these daemons."""
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
    """Return a process's state as in `ps`: T also if its group is frozen."""
    group = cgroups.groups_of(pid).get("")
    if group is not None and cgroups.are_frozen((group,)):
        return "T"
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def json_reads() -> list[Any]:
    """Return the reads that answer with JSON and ask for no more than a job or a node."""
    from mesh.api.openapi import answers_of
    from mesh.api.routes import ROUTES

    return [
        route
        for route in ROUTES
        if route.method == "GET"
        and "{name}" not in route.path
        and answers_of(route)
        and not any(field.required for field in msgspec.structs.fields(route.asked))
    ]


def as_documented(node: StackNode, job: str) -> int:
    """Check that every JSON read conforms to the API document; return the number of reads."""
    from mesh.api.openapi import answers_of

    there, reads = {"job": job, "node": node.nick}, json_reads()
    for route in reads:
        (answer,) = answers_of(route)
        msgspec.json.decode(node.client.read(route.path.format_map(there)), type=answer)
    return len(reads)

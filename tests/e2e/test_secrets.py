"""A job with secrets moves between real daemons; no file, log, event, answer, dump or argument ever has a value."""

import base64
import hashlib
import os
import pty
import secrets as random
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from membership.identity import Identity
from mesh.daemon.launcher import wait_ready
from mesh.daemon.stack import Stack, StackNode
from mesh.execution.secret_files import SecretFiles, memory_bases
from mesh.util.redaction import spellings
from tests.container_images import busybox_image
from tests.e2e.commands import (
    command,
    end_of,
    finished,
    job_state,
    json_reads,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    suggestion,
    until,
)

pytestmark = pytest.mark.e2e
MakeStack = Callable[..., Stack]

# Counts for ever like count.py, and proves at each start that it has its secrets, without printing them.
PROOF = """
import hashlib, os, pathlib
key, file = os.environ["API_KEY"], pathlib.Path("/run/secrets/cloud.json")
print("secrets", hashlib.sha256(key.encode() + file.read_bytes()).hexdigest(), flush=True)
os.execvp("{python}", ["{python}", "count.py", "1000000", "0.02"])
"""


def canaries(key: str, cloud: bytes) -> list[bytes]:
    return [spelling for one in (key.encode(), cloud) for spelling in spellings(one)]


def files_below(root: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(root):
        yield from (Path(directory) / name for name in names)


def found_in(root: Path, wanted: list[bytes]) -> list[str]:
    """Return the files that have one of these byte strings in them, or in their names."""
    found = []
    for path in files_below(root):
        try:
            data = path.read_bytes() if path.is_file() else b""
        except OSError:
            continue
        if any(one in data or one in os.fsencode(path) for one in wanted):
            found.append(str(path))
    return found


def arguments_of_all() -> bytes:
    shown = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown += path.read_bytes() + b"\n"
        except OSError:
            continue
    return shown


def answers_of(node: StackNode, job: str) -> bytes:
    """Return every answer of the daemon that can be read, as JSON."""
    reads = [route.path for route in json_reads()]
    there = {"job": job, "node": node.nick}
    return b"".join(str(node.client.get(path.format_map(there))).encode() for path in [*reads, "/v1/events?audit=true"])


@pytest.mark.long
def test_canary_is_nowhere_while_its_job_moves(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(4, slots=1)
    user = stack.nodes[0]
    ok(user, "pause")  # its own node runs nothing, and will be away
    key, cloud = f"canary-{random.token_hex(12)}", f'{{"key": "canary-{random.token_hex(12)}"}}\n'.encode()
    wanted = canaries(key, cloud)
    assert base64.b64encode(key.encode())[:-4] in b"".join(wanted) and key.encode().hex().encode() in wanted
    ok(user, "secret", "set", "WANDB", input_text=key + "\n")
    (tmp_path / "cloud.json").write_bytes(cloud)
    ok(user, "secret", "set", "CLOUD", "--file", str(tmp_path / "cloud.json"))
    (tmp_path / "cloud.json").unlink()
    assert [row["name"] for row in read(user, "secret", "ls")["secrets"]] == ["CLOUD", "WANDB"]

    options = ("--secret", "WANDB=API_KEY", "--secret", "CLOUD:/run/secrets/cloud.json", "--secret-nodes", "mine")
    saves = ("--ckpt", "ckpts", "--ckpt-mode", "rename", "--env", f"UNTIL={end_of(stack)}")
    script = PROOF.format(python=sys.executable)
    job = ok(user, "submit", *options, *saves, "--", sys.executable, "-c", script).strip()
    first = stack.node(running_with_checkpoint(user, job)["node"])
    (attempt,) = attempts_with_secrets(first)
    assert [path.name for path in attempt.iterdir()] == ["cloud.json"]
    searched(stack, job, wanted)

    ok(user, "down")  # whoever runs it next cannot ask its submitter
    others = [node for node in stack.nodes if node is not user]
    watcher = next(node for node in others if node is not first)
    ok(first, "reclaim")
    second = stack.node(running_with_checkpoint(watcher, job, elsewhere=first.nick)["node"])
    until(lambda: not attempts_with_secrets(first), "the first node to remove its copy")
    searched(stack, job, wanted)
    ok(second, "reclaim", "--now")
    third = stack.node(running_with_checkpoint(first, job, elsewhere=second.nick)["node"])
    assert third not in (user, second)
    end_of(stack).touch()
    end = finished(first, job)
    shown = ok(first, "logs", job)
    proof = hashlib.sha256(key.encode() + cloud).hexdigest()
    assert shown.count(f"secrets {proof}") == len(end["attempts"]) >= 3
    until(lambda: not attempts_with_secrets(third), "the last node to remove its copy")

    for node in (first, watcher):
        dump = tmp_path / f"{node.nick}.tar.gz"
        ok(node, "debug", "dump", "-o", str(dump))
        with tarfile.open(dump) as tar:
            tar.extractall(tmp_path / node.nick, filter="data")
        ok(node, "ckpt", "extract", job, str(tmp_path / f"{node.nick}-ckpt"))
    assert not found_in(tmp_path, wanted)
    searched(stack, job, wanted)


def searched(stack: Stack, job: str, wanted: list[bytes]) -> None:
    """Search every state directory, every answer and the arguments of every process."""
    assert not found_in(stack.directory, wanted)
    shown = arguments_of_all() + b"".join(answers_of(node, job) for node in stack.nodes if node.running)
    assert job.encode() in shown and not [one for one in wanted if one in shown]


def secrets_of(node: StackNode) -> SecretFiles:
    return SecretFiles(Identity.load(node.where.key).node_id)


def attempts_with_secrets(node: StackNode) -> list[Path]:
    return [attempt for place in secrets_of(node).left() for attempt in place.iterdir()]


def test_killed_daemon_leaves_secrets_in_memory_only_until_its_next_start(make_stack: MakeStack) -> None:
    stack = make_stack(1)
    node = stack.nodes[0]
    ok(node, "secret", "set", "KEY", input_text="canary-of-one")
    job = ok(node, "submit", "--secret", "KEY:/run/secrets/key", "--no-workdir", "--", "sleep", "600").strip()
    until(lambda: job_state(node, job)["state"] == "running", "the job to run")
    (left,) = attempts_with_secrets(node)
    assert left.parents[1].as_posix() in memory_bases() and (left / "key").read_bytes() == b"canary-of-one"
    assert node.process is not None
    node.process.kill()
    node.process.wait()
    assert not found_in(stack.directory, canaries("canary-of-one", b"canary-of-one"))
    assert "secrets of jobs in memory" in mesh(node, "doctor").stdout
    stack.start(node)
    wait_ready(node.where, node.process)
    assert not left.exists()
    ok(node, "cancel", job)
    finished(node, job)
    until(lambda: not attempts_with_secrets(node), "the end to remove them")
    secrets_of(node).put("left", {})  # the job may have ended before it started again, and made nothing
    send(signal.SIGKILL, node)
    node.process.wait()
    assert mesh(node, "down").returncode == 0
    assert not secrets_of(node).left()


@pytest.mark.docker
def test_container_moves_with_its_secrets(make_stack: MakeStack) -> None:
    """The variable and the file have one value, so that the guest can tell that they are right without a word of it."""
    image = busybox_image()
    stack = make_stack(3, slots=1, engines=["process", "docker"])
    user, key = stack.nodes[0], f"canary-{random.token_hex(12)} '$x`"
    ok(user, "secret", "set", "KEY", input_text=key)
    script = """
        [ -n "$KEY" ] && [ "$(cat /run/secrets/key)" = "$KEY" ] && echo "same ${#KEY}"
        echo x > $MESH_CKPT_DIR/step-$MESH_ATTEMPT; while :; do sleep 0.1; done
    """
    options = ("--no-workdir", "--ckpt", "ckpts", "--ckpt-mode", "rename", "--image", image)
    given = ("--secret", "KEY", "--secret", "KEY:/run/secrets/key")

    def submitted() -> str:
        done = mesh(user, "submit", *options, *given, "--", "sh", "-c", script)
        return done.stdout.strip() if done.returncode == 0 else ""

    job = until(submitted, "the image to be known")
    wanted = canaries(key, key.encode())

    def runs(attempts: int) -> str:
        state = job_state(user, job)
        ready = state["state"] == "running" and len(state["attempts"]) >= attempts and state["checkpoint"]
        return str(state["node"]) if ready else ""

    first = stack.node(until(lambda: runs(1), "the job to run and save"))
    searched(stack, job, wanted)
    ok(first, "reclaim")
    until(lambda: runs(2) not in {"", first.nick}, "the job to move")
    until(lambda: not attempts_with_secrets(first), "the first node to remove its copy")
    until(lambda: ok(user, "logs", job).count(f"same {len(key)}") == 2, "both guests to have their secrets")
    searched(stack, job, wanted)
    ok(user, "cancel", job)
    finished(user, job)


def typed(node: StackNode, text: bytes, *arguments: str) -> tuple[bytes, int]:
    """Run a command on a terminal, type a line when it asks, and return what the terminal showed and the exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command(node, *arguments))
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            if b"Value of" in piece and b"Value of" not in shown:
                os.write(terminal, text + b"\n")
            shown += piece
    except OSError:  # the command has ended
        pass
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_value_is_asked_for_without_an_echo(shared: Stack) -> None:
    node = shared.nodes[0]
    shown, code = typed(node, b"canary-typed", "secret", "set", "TYPED")
    assert code == 0 and b"TYPED is set" in shown and b"canary" not in shown, shown
    given = ok(node, "run", "--no-workdir", "--secret", "TYPED", "--", "sh", "-c", 'echo "${#TYPED}"')
    assert given.splitlines()[-1] == "12"
    ok(node, "secret", "rm", "TYPED")


def test_orders_that_cannot_be_met_say_what_to_do(shared: Stack) -> None:
    node = shared.nodes[0]
    for arguments, words in [
        (("--secret", "NONE"), f"there is no secret NONE on this node: {suggestion(node, 'secret set NONE`')}"),
        (("--secret", "A=B C"), "a secret cannot be the variable 'B C'"),
        (("--secret-nodes", "mine"), "--secret-nodes is for a job with --secret NAME"),
        (
            ("--secret", "KEPT", "--secret-nodes", "trusted"),
            f"no node is trusted: {suggestion(node, 'config set trusted USER NODE ...`')}",
        ),
    ]:
        if "KEPT" in arguments:
            ok(node, "secret", "set", "KEPT", input_text="x")
        done = mesh(node, "run", "--no-workdir", *arguments, "--", "true")
        assert done.returncode != 0 and words in done.stderr, done.stderr
    assert mesh(node, "secret", "set", "KEPT", input_text="").returncode == 2
    assert mesh(node, "secret", "set", "no-name", input_text="x").returncode == 2
    only = shared.nodes[2]
    script = "echo $KEPT on $MESH_NODE"
    shown = ok(node, "run", "--no-workdir", "--secret", "KEPT", "--secret-nodes", only.nick, "--", "sh", "-c", script)
    assert shown.splitlines()[-1] == f"x on {only.nick}"
    job = read(node, "ps", "-a")["jobs"][-1]["job"]
    asked = read(node, "describe", job)["asked"]
    assert asked["secrets"] == ["KEPT"] and asked["secret_nodes"] == [only.nick]
    ok(node, "secret", "rm", "KEPT")
    assert not read(node, "secret", "ls")["secrets"]
    assert mesh(node, "secret", "rm", "KEPT").returncode == 4

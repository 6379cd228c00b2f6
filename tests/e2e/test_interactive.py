"""Interactive sessions with running jobs between real daemons: exec, attach and forward."""

import asyncio
import fcntl
import hashlib
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from membership.identity import Identity
from mesh.cli.demo_image import python_root
from mesh.daemon.layout import save_membership
from mesh.daemon.stack import Stack, StackNode
from mesh.model.spec import parse_job
from mesh.rpc.client import PeerError
from mesh.rpc.frames import Exit, Failed, Opened, Order
from tests.chains import admitted
from tests.container_images import REPOSITORY, busybox_image
from tests.e2e.commands import command, free_port, job_state, mesh, ok, read, start, until
from tests.e2e.test_hostile import Insider
from tests.execution.bench import processes_with

pytestmark = pytest.mark.e2e

WAIT_S = 60.0
WAITING = "echo ready; while :; do sleep 0.2; done"
ECHO = """
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
server = Server(("127.0.0.1", int(sys.argv[1])), Echo)
print("listening", flush=True)
server.serve_forever()
"""


def submit(node: StackNode, *order: str) -> str:
    return ok(node, "submit", "--no-workdir", *order).strip()


def running(node: StackNode, job: str, text: str = "ready") -> dict[str, Any]:
    state: dict[str, Any] = until(
        lambda: (s := job_state(node, job)) and s["state"] == "running" and text in ok(node, "logs", job) and s,
        "the job to run",
    )
    return state


@pytest.fixture(scope="module")
def going(shared: Stack) -> Iterator[tuple[StackNode, str, StackNode]]:
    """A waiting job: its host, its id, and another node."""
    job = submit(shared.nodes[0], "--name", "waits", "--env", "SEED=7", "--", "sh", "-c", WAITING)
    host = shared.node(running(shared.nodes[0], job)["node"])
    other = next(node for node in shared.nodes if node is not host)
    until(lambda: job_state(other, job).get("state") == "running", "the other node to know the job")
    yield host, job, other
    ok(shared.nodes[0], "cancel", job)


def test_exec_runs_a_command_in_the_job_from_any_node(going: tuple[StackNode, str, StackNode]) -> None:
    host, job, other = going
    script = 'echo "$MESH_JOB_ID $MESH_NODE $SEED"; pwd; echo wrong >&2; exit 7'
    for node in (host, other):
        done = mesh(node, "exec", job, "--", "sh", "-c", script)
        assert (done.returncode, done.stderr) == (7, "wrong\n"), done
        assert done.stdout.split()[:3] == [job, host.nick, "7"] and done.stdout.rstrip().endswith("/work")
    assert mesh(other, "exec", job, "no-such-command").returncode == 127
    assert mesh(other, "exec", "nobody", "true").returncode == 4
    assert mesh(other, "exec", job).returncode == 2
    assert job_state(other, job)["state"] == "running"


def test_exec_passes_large_input_and_output_through_pipes(going: tuple[StackNode, str, StackNode]) -> None:
    _, job, other = going
    data = os.urandom(4 << 20)
    done = subprocess.run(
        command(other, "exec", job, "--", "cat"), input=data, capture_output=True, check=True, timeout=WAIT_S
    )
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()
    done = subprocess.run(
        command(other, "exec", job, "wc", "-c"), input=data, capture_output=True, check=True, timeout=WAIT_S
    )
    assert int(done.stdout) == len(data)


def test_first_interrupt_reaches_the_command_and_second_ends_the_session(
    going: tuple[StackNode, str, StackNode],
) -> None:
    _, job, other = going
    script = "trap 'echo told; test -e $MESH_OUT_DIR/end && exit 3' INT; echo ready; while :; do sleep 0.1; done"
    process = start(other, "exec", job, "--", "sh", "-c", script)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "told\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert job_state(other, job)["state"] == "running"


class Terminal:
    """A command on its own pseudoterminal."""

    def __init__(self, argv: list[str]) -> None:
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.execvpe(argv[0], argv, {**os.environ, "TERM": "xterm"})
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.screen, keys)

    def until_seen(self, text: bytes) -> None:
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen:
            ready, _, _ = select.select([self.screen], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.seen
            try:
                piece = os.read(self.screen, 65_536)
            except OSError:
                piece = b""
            assert piece, self.seen
            self.seen += piece

    def end(self) -> int:
        """Wait for the command to end and return its exit code."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if select.select([self.screen], [], [], 0.05)[0]:
                with suppress(OSError):
                    self.seen += os.read(self.screen, 65_536)
            pid, result = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                with suppress(OSError):  # drain its final output
                    while select.select([self.screen], [], [], WAIT_S)[0] and (piece := os.read(self.screen, 65_536)):
                        self.seen += piece
                os.close(self.screen)
                return os.waitstatus_to_exitcode(result)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"it did not end: {self.seen!r}")


def test_exec_on_a_terminal_gives_the_command_a_terminal(going: tuple[StackNode, str, StackNode]) -> None:
    _, job, other = going
    terminal = Terminal(
        ["sh", "-c", f"stty rows 33 cols 99; {' '.join(command(other, 'exec', job, 'sh'))}; echo code=$?; stty -a"]
    )
    terminal.type(b"stty size; echo term=$TERM\r")
    terminal.until_seen(b"term=xterm")
    assert b"33 99" in terminal.seen
    terminal.resize(40, 120)
    terminal.type(b"while [ \"$(stty size)\" != '40 120' ]; do sleep 0.1; done; echo big''ger\r")
    terminal.until_seen(b"bigger")
    mark = f"7{time.time_ns()}"[-9:]
    terminal.type(b"sleep %s\r" % mark.encode())
    until(lambda: processes_with(mark), "the command to interrupt to run")
    terminal.type(b"\x03")
    terminal.until_seen(b"^C")
    terminal.type(b"echo af''ter\r")
    terminal.until_seen(b"after")
    terminal.type(b"exit 9\r")
    terminal.until_seen(b"code=9")
    assert terminal.end() == 0
    assert re.search(rb"[^-]icanon", terminal.seen) and re.search(rb"[^-]echo\b", terminal.seen), (
        "the terminal mode must be restored"
    )


def test_terminal_session_can_be_left_when_the_peer_is_silent(going: tuple[StackNode, str, StackNode]) -> None:
    _, job, other = going
    terminal = Terminal(command(other, "exec", job, "--", "sh", "-c", "stty raw -echo; echo ready; sleep 1000"))
    terminal.until_seen(b"ready")
    terminal.type(b"\x03~")
    terminal.type(b".")
    assert terminal.end() == 0


def test_attach_shows_output_and_state_and_detaches(going: tuple[StackNode, str, StackNode]) -> None:
    _, job, other = going
    process = start(other, "job", "attach", job)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0 and f"job {job[:8]} is running on" in told
    assert "detached" in told and f" cancel {job[:8]}" in told
    assert job_state(other, job)["state"] == "running"


def test_attach_exits_with_the_result_of_the_job(shared: Stack) -> None:
    job = submit(shared.nodes[1], "--", "sh", "-c", "echo one; sleep 1; echo two; exit 4")
    done = mesh(shared.nodes[1], "job", "attach", job)
    assert done.returncode == 4 and done.stdout == "one\ntwo\n" and f"job {job[:8]} failed (exit 4)" in done.stderr, (
        done
    )


# --- forward


def listening(node: StackNode) -> tuple[str, int, str]:
    """Start an echo job; return its id, its port, and the nick of its host."""
    port = free_port()
    job = submit(node, "--home", "none", "--", sys.executable, "-c", ECHO, str(port))
    return job, port, running(node, job, "listening")["node"]


def forwarded(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"127\.0\.0\.1:(\d+) leads to", line)
    assert found, f"{line} {process.stderr.read() if process.stderr is not None and process.poll() is not None else ''}"
    return int(found[1])


def echoed(port: int, data: bytes) -> bytes:
    """Send the data and return the echo. Half is read before the rest is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        received = bytearray()

        def take(count: int) -> None:
            while len(received) < count and (piece := sock.recv(65_536)):
                received.extend(piece)

        for begin in range(0, len(data), 50_000):
            sock.sendall(data[begin : begin + 50_000])
            take(begin)
        sock.shutdown(socket.SHUT_WR)
        take(len(data))
        assert sock.recv(1) == b""
    return bytes(received)


def interrupted(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, told
    return told


def test_forwarded_port_reaches_the_job_and_listens_on_loopback_only(shared: Stack) -> None:
    job, inside, host = listening(shared.nodes[0])
    other = next(node for node in shared.nodes if node.nick != host)
    until(lambda: job_state(other, job).get("state") == "running", "the other node to know the job")
    process = start(other, "job", "forward", job, f"{free_port()}:{inside}")
    port = forwarded(process)
    data = os.urandom(1 << 20)
    assert echoed(port, data) == data
    tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    assert re.findall(rf"(\w+):{port:04X} 0+:0000 0A", tables) == ["0100007F"], (
        "the tunnel must listen on 127.0.0.1 only"
    )
    assert mesh(other, "job", "forward", job, f"{port}:{inside}").returncode == 2, "the port must be reported as taken"
    told = interrupted(process)
    assert f"job {job[:8]} continues" in told and job_state(other, job)["state"] == "running"
    ok(other, "cancel", job)


def test_forward_reports_a_port_without_listener(going: tuple[StackNode, str, StackNode]) -> None:
    _, job, other = going
    process = start(other, "job", "forward", job, f"{free_port()}:{free_port()}")
    forwarded(process)
    assert "nothing in the job answers on port" in interrupted(process)


def test_forward_prints_its_ports_as_json(going: tuple[StackNode, str, StackNode]) -> None:
    host, job, other = going
    first, second = free_port(), free_port()
    process = start(other, "job", "forward", "--json", job, f"{first}:80", f"{second}:app.sock")
    assert process.stdout is not None
    answer = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
    ports = [{"local": first, "target": "port 80"}, {"local": second, "target": "socket app.sock"}]
    assert answer == {"schema": 1, "job": job, "node": host.nick, "ports": ports}
    interrupted(process)


def test_tunnel_follows_a_job_that_moves(shared: Stack) -> None:
    job, inside, first = listening(shared.nodes[0])
    until(lambda: job_state(shared.nodes[3], job).get("state") == "running", "the other node to know the job")
    process = start(shared.nodes[3], "job", "forward", job, f"{free_port()}:{inside}")
    port = forwarded(process)
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        sock.sendall(b"before")
        assert sock.recv(6) == b"before"
        ok(shared.nodes[0], "job", "migrate", "--force", job)
        with suppress(ConnectionError):
            assert sock.recv(10) == b"", "the connection must end with its node"
    assert echoed(port, b"after") == b"after"
    second = job_state(shared.nodes[0], job)["node"]
    assert second != first
    assert process.stderr is not None
    while f"runs on {second} now" not in (line := process.stderr.readline()):
        assert line, "the tunnel command ended early"
    interrupted(process)
    ok(shared.nodes[0], "cancel", job)


# --- permissions


@pytest.fixture
def two_users(make_stack: Callable[..., Stack]) -> Stack:
    """Two nodes of two users. The first belongs to the test's user; it lends but allows no sessions."""
    stack = Stack(2, overrides={"slots": 2, "grace_s": 10.0})
    stack.found()
    mine, theirs = stack.nodes
    founder, now = Identity.load(mine.where.key), time.time()
    genesis = mine.where.genesis.read_bytes()
    identity = Identity.load(theirs.where.key)
    chain = admitted(founder, genesis, mine.where.chain.read_bytes(), identity.node_id, "theirs", "mallory", now)
    save_membership(theirs.where, genesis, chain, ())
    make_stack.stacks.append(stack)  # type: ignore[attr-defined]
    stack.start_all()
    return stack


async def test_session_requires_the_job_user_and_the_owner_consent(two_users: Stack) -> None:
    mine, theirs = two_users.nodes
    job = submit(mine, "--engine", "process", "--", "sh", "-c", WAITING)
    assert running(mine, job)["node"] == mine.nick
    until(lambda: job_state(theirs, job)["state"], "the other node to know the job")
    for words in (["exec", job, "true"], ["job", "forward", job, "80"], ["job", "jupyter", "--job", job]):
        done = await asyncio.to_thread(mesh, theirs, *words)
        assert done.returncode == 5 and "not yours" in done.stderr, done
    insider = Insider(theirs, mine)
    await insider.peers.open()
    try:
        path = f"/v1/jobs/{parse_job(job).hex()}"
        for way in ("exec", "port-80", "socket-jupyter.sock"):
            async with insider.peers.tunnel(insider.victim_id, f"{path}/tunnel/{way}") as line:
                await line.send(Order(("true",)))
                answer = await line.receive()
                assert isinstance(answer, Failed) and answer.code == 5 and "not yours" in answer.text
        with pytest.raises(PeerError) as refused:
            await insider.call("GET", f"{path}/control/notice.json")
        assert refused.value.status == 403
    finally:
        await insider.peers.close()


async def test_revoked_member_loses_a_tunnel_that_it_does_not_read(make_stack: Callable[..., Stack]) -> None:
    host, other = make_stack(2).nodes
    ok(other, "pause")
    job = submit(host, "--", "sh", "-c", WAITING)
    assert running(host, job)["node"] == host.nick
    mark = f"7{time.time_ns()}"[-9:]
    insider = Insider(other, host)
    await insider.peers.open()
    try:
        async with insider.peers.tunnel(insider.victim_id, f"/v1/jobs/{parse_job(job).hex()}/tunnel/exec") as line:
            await line.send(Order(("sh", "-c", f"sleep {mark} & while :; do echo {'x' * 4000}; done")))
            assert isinstance(await line.receive(), Opened)
            await asyncio.to_thread(until, lambda: sleeps(mark), "it to run")
            await asyncio.sleep(1.0)  # until all buffers on the path are full
            await asyncio.to_thread(ok, host, "member", "revoke", "--yes", other.nick)
            await asyncio.to_thread(until, lambda: not sleeps(mark), "it to be hung up")
    finally:
        await insider.peers.close()
    assert job_state(host, job)["state"] == "running"


def sleeps(mark: str) -> bool:
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return f"sleep {mark}" in lines


async def test_hostile_frames_end_only_their_tunnel(going: tuple[StackNode, str, StackNode]) -> None:
    host, job, other = going
    insider = Insider(other, host)
    await insider.peers.open()
    path = f"/v1/jobs/{parse_job(job).hex()}/tunnel"
    try:
        for way, first in (("exec", b"\3{}"), ("exec", b""), ("exec", b"\x00early"), ("exec", b"\xff" * 1000)):
            async with insider.peers.tunnel(insider.victim_id, f"{path}/{way}") as line:
                await line.send_bytes(first)
                assert isinstance(await line.receive(), Failed)
                assert await line.receive() is None
        for way in ("port-0", "port-70000", "socket-..", "what", "port-8e1"):
            async with insider.peers.tunnel(insider.victim_id, f"{path}/{way}") as line:
                assert isinstance(answer := await line.receive(), Failed) and answer.code == 2, answer
        async with insider.peers.tunnel(insider.victim_id, f"{path}/exec") as line:
            await line.send(Order(("cat",)))
            assert isinstance(await line.receive(), Opened)
            await line.send(Exit(0))
            assert isinstance(await line.receive(), Failed)
        with pytest.raises(PeerError):
            await insider.call("GET", f"/v1/jobs/{parse_job(job).hex()}/control/..")
    finally:
        await insider.peers.close()
    assert mesh(other, "exec", job, "true").returncode == 0


def test_symlink_in_the_control_directory_is_refused(going: tuple[StackNode, str, StackNode], tmp_path: Path) -> None:
    _, job, other = going
    secret = tmp_path / "secret"
    secret.write_text("the owner's")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen()
        script = f"cd $MESH_CTL_DIR; ln -sf {tmp_path}/s app.sock; ln -sf {secret} jupyter.token; mkfifo p"
        assert mesh(other, "exec", job, "--", "sh", "-c", script).returncode == 0
        done = mesh(other, "job", "forward", job, "app.sock")
        assert done.returncode == 4 and "not a socket" in done.stderr, done
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.accept()
    for name in ("jupyter.token", "p"):
        with pytest.raises(Exception, match=r"no jupyter|not a file"):
            other.client.get(f"/v1/jobs/{job}/control/{name}")


def test_owner_can_disable_interactive_sessions(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(1, interactive=False)
    node = stack.nodes[0]
    job = submit(node, "--", "sh", "-c", WAITING)
    running(node, job)
    for words in (["exec", job, "true"], ["job", "forward", job, "80"], ["job", "jupyter", "--job", job]):
        done = mesh(node, *words)
        assert done.returncode == 5 and "interactive = false" in done.stderr, done
    assert [row["interactive"] for row in read(node, "nodes")["nodes"]] == [False]
    assert "no sessions" in ok(node, "nodes")
    done = mesh(node, "job", "jupyter", "--no-workdir")
    assert done.returncode == 6 and "allows no interactive sessions" in done.stderr, (
        "the refusal must come before submission"
    )


def test_node_without_jupyterlab_reports_it_with_the_next_step(
    make_stack: Callable[..., Stack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python3").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", str(tmp_path))
    stack = make_stack(1)
    done = mesh(stack.nodes[0], "job", "jupyter", "--no-workdir")
    assert done.returncode == 127, done
    assert "JupyterLab is not installed on" in done.stderr and "pip install jupyterlab" in done.stderr


def test_reclaim_now_ends_exec_commands(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(1)
    node = stack.nodes[0]
    job = submit(node, "--", "sh", "-c", WAITING)
    running(node, job)
    mark = f"7{time.time_ns()}"[-9:]
    process = start(node, "exec", job, "--", "sh", "-c", f"trap '' TERM HUP INT; echo ready; sleep {mark}; sleep 1000")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    ok(node, "reclaim", "--now")
    assert not sleeps(mark)
    process.communicate(timeout=WAIT_S)
    assert process.returncode not in {0, 130}


SERVERS = """
import socket, threading
def echo(server):
    while True:
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(65536):
                peer.sendall(data)
tcp, local = socket.create_server(("127.0.0.1", 7070)), socket.socket(socket.AF_UNIX)
local.bind(__import__("os").environ["MESH_CTL_DIR"] + "/app.sock")
local.listen()
threading.Thread(target=echo, args=(tcp,), daemon=True).start()
print("listening", flush=True)
echo(local)
"""


class Containers:
    """Two nodes that have two images from the start."""

    def __init__(self, stack: Stack, shell: str, python: str) -> None:
        self.stack, self.shell, self.python = stack, shell, python

    def going(self, image: str, text: str, *order: str) -> tuple[str, StackNode]:
        """Start a job, wait until it prints `text`, and return its id and the node that does not run it."""
        node = self.stack.nodes[0]
        ready = ("run", "--no-workdir", "--image", image, "--", order[0], "-c", "")
        until(lambda: mesh(node, *ready).returncode == 0, "the image to be known")
        job = submit(node, "--image", image, "--", *order)
        host = running(node, job, text)["node"]
        return job, next(each for each in self.stack.nodes if each.nick != host)


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    shell = busybox_image(Path(shutil.which("stty") or ""))
    settings = {"slots": 4, "engines": ["docker"]}
    with python_image(tmp_path_factory.mktemp("image") / "image.tar") as python, Stack(2, overrides=settings) as stack:
        stack.start_all()
        yield Containers(stack, shell, python)


@pytest.mark.docker
def test_exec_in_a_container_supports_terminal_and_pipes(containers: Containers) -> None:
    job, other = containers.going(containers.shell, "ready", "sh", "-c", WAITING)
    done = mesh(other, "exec", job, "--", "sh", "-c", "id -u; ls /sys/class/net; cat; exit 6")
    assert done.returncode == 6 and done.stdout.split()[0] != "0" and "eth0" not in done.stdout
    terminal = Terminal(command(other, "exec", job, "sh"))
    terminal.resize(40, 120)
    terminal.type(b"while [ \"$(stty size)\" != '40 120' ]; do sleep 0.1; done; echo big''ger; exit 3\r")
    terminal.until_seen(b"bigger")
    assert terminal.end() == 3
    done = mesh(other, "job", "forward", job, "8080")
    assert done.returncode == 1 and "has no python3" in done.stderr


@pytest.mark.docker
def test_container_without_network_is_reachable_by_port_and_socket(containers: Containers) -> None:
    job, other = containers.going(containers.python, "listening", "python3", "-c", SERVERS)
    for way in ("7070", "app.sock"):
        process = start(other, "job", "forward", job, f"{free_port()}:{way}")
        data = os.urandom(1 << 20)
        assert echoed(forwarded(process), data) == data
        interrupted(process)


@contextmanager
def python_image(tar: Path) -> Iterator[str]:
    import docker

    python_root(tar, [], [])
    client: Any = docker.from_env()
    tag = os.urandom(6).hex()
    try:
        client.api.import_image_from_data(tar.read_bytes(), repository=REPOSITORY, tag=tag)
        tar.unlink()
        yield f"{REPOSITORY}:{tag}"
    finally:
        client.images.remove(f"{REPOSITORY}:{tag}", force=True)
        client.close()

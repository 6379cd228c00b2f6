"""Bad input to the command line, the local socket and the peer interface: each gives an error and changes nothing."""

import contextlib
import http.client
import json
import os
import random
import shlex
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from membership.identity import Identity
from mesh.daemon.stack import Stack, StackNode
from mesh.rpc.tls import client_context
from tests.adversary.neighbour import plain_context
from tests.e2e.commands import chosen, here, ok, read, until

pytestmark = pytest.mark.e2e
SHARE = ("--gpu-share", "30", "--vram", "6g")


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("--no-such-option",), 2, "--no-such-option"),
        (("nodez",), 2, "mesh nodes"),
        (("qqqq",), 2, "mesh --help"),
        (("run",), 125, "COMMAND"),
        (("submit", "--gpuz", "1", "--", "x"), 2, "--gpu"),
        (("submit", "--gpus", "many", "--", "x"), 2, "many"),
        (("submit", "--gpus", "-1", "--", "x"), 2, "-1"),
        (("submit", "--vram", "big", "--", "x"), 2, "6g"),
        (("submit", "--grace", "soon", "--", "x"), 2, "30s"),
        (("submit", "--env", "NOEQUALS", "--", "x"), 2, "KEY=VALUE"),
        (("run", "--gpus", "many", "--", "x"), 125, "many"),
        (("run", "--no-workdir", "--gpus", "99", "--", "x"), 125, "99"),
        (("run", "--no-workdir", "--", "no-such-program"), 127, "no-such-program"),
        (("submit", "--no-workdir", "--zone", "atlantis", "--", "x"), 6, "atlantis"),
        (("submit", "--workdir", "/no/such/dir", "--", "x"), 2, "/no/such/dir"),
        (("submit", "--no-workdir", "--ckpt", "/etc", "--", "x"), 2, "checkpoint directory"),
        (("submit", "--no-workdir", "--ckpt", "../x", "--", "x"), 2, "checkpoint directory"),
        (("submit", "--no-workdir", "--ckpt-to", "node2", "--", "x"), 2, "--ckpt"),
        (("submit", "--no-workdir", "--ckpt", "c", "--ckpt-to", "nobody", "--", "x"), 4, "nobody"),
        (("submit", "--no-workdir", "--gpus", "99", "--", "x"), 6, "99"),
        (("submit", "--no-workdir", "--vram", "900g", "--gpus", "1", "--", "x"), 6, "GPU"),
        (
            ("submit", "--gpu-share", "0", "--", "x"),
            2,
            "Invalid value for '--gpu-share': 0 is not in the range 1<=x<=100.",
        ),
        (
            ("submit", "--gpu-share-limit", "101", "--", "x"),
            2,
            "'--gpu-share-limit': 101 is not in the range 1<=x<=100.",
        ),
        (("submit", "--no-workdir", "--gpus", "0", *SHARE, "--", "x"), 2, "a share of no GPU: add --gpus 1"),
        (
            ("submit", "--no-workdir", "--gpu-share", "30", "--", "x"),
            2,
            "add --vram, as --vram 6g, or leave out --gpu-share",
        ),
        (
            ("submit", "--no-workdir", "--gpu-share-limit", "90", "--", "x"),
            2,
            "guaranteed 100 per cent of a GPU and be held to 90",
        ),
        (
            ("submit", "--no-workdir", *SHARE, "--gpu-share-limit", "20", "--", "x"),
            2,
            "choose a smaller --gpu-share, or a --gpu-share-limit that",
        ),
        (
            ("submit", "--no-workdir", *SHARE, "--vram-limit", "5g", "--", "x"),
            2,
            "choose a smaller --vram, or a --vram-limit that",
        ),
        (
            ("submit", "--no-workdir", "--gpus", "1", "--vram-limit", "6g", "--", "x"),
            2,
            "add --gpu-share, or leave out",
        ),
        (("submit", "--no-workdir", *SHARE, "--", "x"), 6, "no node that lends has a GPU"),
        (("submit", "--no-workdir", "--image", "no/such:image", "--", "x"), 6, "no/such:image"),
        (("submit", "--no-workdir", "--engine", "docker", "--image", "a b", "--", "x"), 6, "a b"),
        (("run", "--no-workdir", "--", "a" * 300_000), 125, "may hold 262144 bytes"),
        (("logs", "zzzz"), 4, "mesh ps -a"),
        (("why", ""), 4, "mesh ps -a"),
        (("cancel", "../../etc/passwd"), 4, ""),
        (("cp", "zzzz:out/", "/no-such-place"), 4, "mesh ps -a"),
        (("reclaim", "--grace", "-3s"), 2, ""),
        (("wait", "zzzz"), 4, "mesh ps -a"),
        (("wait",), 2, "JOBS"),
        (("submit", "--no-workdir", "--after", "zzzz", "--", "x"), 4, "mesh ps -a"),
        (("submit", "--no-workdir", "--priority", "101", "--", "x"), 2, "101"),
        (("submit", "--no-workdir", "--max-time", "0.1s", "--", "x"), 2, "1 second"),
        (("submit", "--no-workdir", "--array", "5-1", "--", "x"), 2, "no indices"),
        (("submit", "--no-workdir", "--array", "1-9%0", "--", "x"), 2, "not an array"),
        (("run", "--no-workdir", "--array", "1-9", "--", "x"), 125, "mesh submit --array"),
        (("submit", "--no-workdir", "--deadline", "2001-01-01T00:00", "--", "x"), 2, "future"),
        (("submit", "--no-workdir", "--ckpt", "c", "--home", "nobody", "--", "x"), 4, "nobody"),
        (("submit", "--no-workdir", "--ckpt", "c", "--home", "", "--", "x"), 4, "no node"),
        (("submit", "--no-workdir", "--home", "first", "--", "x"), 2, "leave out --home"),
        (("submit", "--no-workdir", "--ckpt", "c", "--nodes", "2", "--home", "node1", "--", "x"), 2, "several nodes"),
        (("submit", "--no-workdir", "--retry-on", "0", "--", "x"), 2, "1<=x<=255"),
        (("ps", "zzzz"), 4, "mesh ps -a"),
        (("wait", "zzzz"), 4, "mesh ps -a"),
        (("job", "migrate", "zzzz"), 4, "mesh ps -a"),
        (("job", "migrate", ""), 4, "mesh ps -a"),
        (("job", "recover", "zzzz", "--yes"), 4, "mesh ps -a"),
        (("member", "invite", "--ttl", "1s"), 2, "minute"),
        (("member", "invite", "--role", "king"), 2, "king"),
        (("member", "invite", "u" * 65), 2, "64"),
        (("member", "invite", "bob", "--uses", "0"), 2, "uses"),
        (("member", "invite", "bob", "--mine"), 2, "not both"),
        (("member", "approve", ""), 4, "no pending join requests match"),
        (("member", "approve", "nobody", "--role", "king"), 2, "king"),
        (("member", "revoke", "", "--yes"), 4, "no node"),
        (("data", "add", "x", ".", "--reader", "nobody"), 4, "no user nobody"),
        (("up",), 1, "already"),
        (("debug", "devstack", "-n", "0"), 2, "0"),
        (("debug", "demo", "--epochs", "1"), 2, "1"),
    ],
)
def test_command_line_reports_bad_arguments(shared: Stack, arguments: tuple[str, ...], code: int, word: str) -> None:
    node = shared.nodes[0]
    done = here(node, *arguments)
    assert done.exit_code == code, (done.exit_code, done.stderr)
    told = done.stderr.replace(f" {shlex.join(chosen(node))}", "")
    assert word in told and "Traceback" not in told and len(told) < 2000


def test_help_fits_one_page() -> None:
    text = ok(None, "--help")
    for word in ("run", "submit", "why", "reclaim", "member", "debug"):
        assert word in text
    assert len(text.splitlines()) <= 42
    for name in ("run", "up", "reclaim", "why"):
        assert "Usage: mesh " in ok(None, name, "--help")


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("mesh", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


def ask(node: StackNode, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = Unix(node.where.socket)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


BODIES = [
    "/v1/jobs",
    "/v1/jobs/zzzz/pull",
    "/v1/pause",
    "/v1/reclaim",
    "/v1/lend",
    "/v1/invite",
    "/v1/approve",
    "/v1/revoke",
    "/v1/promote",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["argv", "paused", "x", "env"]), inner, max_size=3)
    ),
    max_leaves=6,
).map(lambda value: json.dumps(value).encode())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(path=st.sampled_from(BODIES), body=st.one_of(st.binary(max_size=100), json_values))
def test_local_socket_refuses_hostile_bodies(shared: Stack, path: str, body: bytes) -> None:
    if path in {"/v1/pause", "/v1/reclaim", "/v1/lend", "/v1/invite"}:
        body = b"\xff" + body  # a well-formed body would take effect
    status, answer = ask(shared.nodes[1], "POST", path, body)
    assert 400 <= status < 500, (status, answer)
    assert json.loads(answer)["detail"] and json.loads(answer)["exit_code"] in {2, 4, 5}


def test_local_socket_is_accessible_to_its_owner_only(shared: Stack) -> None:
    for node in shared.nodes:
        assert node.where.socket.stat().st_mode & 0o777 == 0o600
    assert ask(shared.nodes[0], "GET", "/v1/nothing")[0] == 404
    assert ask(shared.nodes[0], "POST", "/v1/jobs", b"x" * (2 << 20))[0] in {400, 413}


# --- between nodes


class Peer:
    """A sender of hostile requests to a node's port, as a stranger or as a member."""

    def __init__(self, node: StackNode) -> None:
        self.node = node
        status = read(node, "status")
        self.host, self.port = "127.0.0.1", status["api_port"]
        self.mesh_id = bytes.fromhex(status["mesh_id"])

    def call(self, identity: Identity | None, method: str, path: str, body: bytes) -> int:
        """Return the status of the answer; 0 if the node ends the connection."""
        context = plain_context() if identity is None else client_context(identity, self.mesh_id)
        connection = http.client.HTTPSConnection(self.host, self.port, context=context, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            response.read()
            return response.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def refused(self) -> dict[str, int]:
        counters = read(self.node, "status")["counters"]
        return {key: count for key, count in counters.items() if key.startswith("refused")}

    def state(self) -> Any:
        rows = read(self.node, "nodes")["nodes"]
        return [(row["node"], row["state"], row["lending"]) for row in rows], read(self.node, "ps", "-a")["jobs"]


def test_calls_of_strangers_and_malformed_calls_are_refused_and_counted(shared: Stack) -> None:
    peer = Peer(shared.nodes[0])
    before, state = peer.refused(), peer.state()
    stranger, member = Identity.generate(), Identity.load(shared.nodes[1].where.key)
    path, body = "/v1/messages", msgspec.msgpack.encode([b"x"])
    assert peer.call(None, "POST", path, body) == 0, "a call without a certificate"
    assert peer.call(stranger, "POST", path, body) == 0
    assert peer.call(member, "POST", path, msgspec.msgpack.encode([])) == 200
    assert peer.call(member, "POST", path, body) == 400, "a malformed call of a member must be refused too"
    after = peer.refused()
    for kind in ("handshakes", "foreign", "malformed"):
        assert after[f"refused_{kind}"] == before.get(f"refused_{kind}", 0) + 1, kind
    assert peer.state() == state


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    call=st.sampled_from(
        [
            ("POST", "/v1/messages"),
            ("POST", "/v1/chunks/missing"),
            ("POST", "/v1/chunks/frames"),
            ("POST", "/v1/packages"),
            ("POST", "/v1/packages/" + "ab" * 32),
            ("PUT", "/v1/manifests/" + "ab" * 32),
            ("GET", "/v1/manifests/" + "zz" * 32),
            ("GET", "/v1/jobs/" + "ab" * 16 + "/spec"),
            ("GET", "/v1/jobs/" + "ab" * 16 + "/log/x/" + "ab" * 32 + "?offset=-1"),
            ("GET", "/v1/jobs/" + "ab" * 16 + "/log/0/" + "ab" * 32 + "?offset=99"),
        ]
    ),
    body=st.one_of(st.binary(max_size=200), st.lists(st.binary(max_size=40), max_size=4).map(msgspec.msgpack.encode)),
)
def test_hostile_bodies_from_a_member_are_refused(shared: Stack, call: tuple[str, str], body: bytes) -> None:
    peer = _peer(shared)
    member = Identity.load(shared.nodes[1].where.key)
    status = peer.call(member, *call, body)
    harmless = call[1] in {"/v1/messages", "/v1/chunks/missing", "/v1/chunks/frames", "/v1/packages"} and status == 200
    assert harmless or 400 <= status < 500, (call, body, status)


_peers: dict[int, Peer] = {}


def _peer(shared: Stack) -> Peer:
    return _peers.setdefault(id(shared), Peer(shared.nodes[0]))


def test_hostile_chunk_streams_do_not_change_the_store(shared: Stack) -> None:
    peer = Peer(shared.nodes[0])
    member = Identity.load(shared.nodes[1].where.key)
    for data in (b"", b"\0" * 100, os.urandom(5000), b"\xff" * 70_000):
        assert peer.call(member, "PUT", "/v1/chunks", data) in {200, 409}
    done = ok(shared.nodes[0], "run", "--no-workdir", "--", "echo", "still here")
    assert done == "still here\n"


def test_noise_on_the_gossip_port_is_counted_and_ignored(shared: Stack) -> None:
    peer = Peer(shared.nodes[0])
    host, port = read(peer.node, "status")["address"].rsplit(":", 1)
    state, before = peer.state(), sum(peer.refused().values())
    draw = random.Random(5)

    def counted() -> bool:
        """Send more noise; the kernel may drop some. Return True once the node has counted enough."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise:
            for _ in range(20):
                noise.sendto(draw.randbytes(draw.randrange(1, 1400)), (host, int(port)))
        return sum(peer.refused().values()) >= before + 100

    for data in (b"", b"\0" * 64, draw.randbytes(4000), b"\xff\xff\xff\xff"):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.settimeout(10)
            with contextlib.suppress(OSError):  # the node may have ended the connection
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(10)
    until(counted, "the noise to be counted")
    assert peer.state() == state

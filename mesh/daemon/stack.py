"""Several real daemons on this machine: one mesh, one state directory each, found by mDNS on loopback.

For `mesh debug devstack`, `mesh debug demo` and the tests. Nothing is simulated but the distance.
"""

import getpass
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from mesh.api.client import Client
from mesh.daemon.launcher import start_daemon, wait_ready
from mesh.daemon.layout import Layout, save_membership
from mesh.util.errors import MeshError

LOOPBACK = "127.0.0.1"


class StackNode:
    """One daemon: its state, its process, a client for it; `within`: a command that runs it, as `env`."""

    def __init__(self, nick: str, where: Layout) -> None:
        self.nick = nick
        self.where = where
        self.process: subprocess.Popen[bytes] | None = None
        self.within: tuple[str, ...] = ()
        self.client = Client(where.socket)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Stack:
    """Use as a context manager: every daemon it started is gone afterwards, and so is their state unless kept."""

    def __init__(self, count: int, *, directory: Path | None = None, overrides: dict[str, Any] | None = None) -> None:
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="mesh-"))
        self.nodes = [
            StackNode(f"node{number}", Layout(self.directory / f"node{number}")) for number in range(1, count + 1)
        ]
        self.overrides = {
            "bind": LOOPBACK,
            "port": 0,
            "api_port": 0,
            "profile": "local",
            "lend": True,
            "engines": ["process"],
            **(overrides or {}),
        }

    def __enter__(self) -> "Stack":
        self.found()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def found(self) -> None:
        """Make the mesh: the first node founds it and admits the others, as machines of one user."""
        from membership.envelope import MeshSealer
        from membership.identity import Identity
        from membership.trust import ROLES, TrustStore, admit_node, found_mesh

        now, user = time.time(), getpass.getuser()
        founder = Identity.generate()
        genesis, chain = found_mesh(founder, "devstack", self.nodes[0].nick, user, now)
        trust = TrustStore(genesis)
        root, binding = MeshSealer(founder, trust.mesh_id), trust.admit_chain(chain, now).binding
        for number, node in enumerate(self.nodes):
            node.where.make()
            if node.where.genesis.exists():
                continue
            identity = founder if number == 0 else Identity.generate()
            identity.save(node.where.key)
            own = chain
            if number > 0:
                own = admit_node(root, trust, chain, identity.node_id, node.nick, binding, ROLES, False, now)
            save_membership(node.where, genesis, own, ())

    def start(self, node: StackNode) -> None:
        node.process = start_daemon(node.where, self.overrides, node.within)

    def start_all(self, timeout_s: float = 60.0) -> None:
        """Start every node and wait until each sees all others alive and lending; MeshError if they do not find each other."""
        for node in self.nodes:
            self.start(node)
        for node in self.nodes:
            assert node.process is not None
            wait_ready(node.where, node.process, timeout_s)
        deadline = time.monotonic() + timeout_s
        while not all(self.sees(node, len(self.nodes)) for node in self.nodes):
            if time.monotonic() > deadline:
                raise MeshError(
                    f"the nodes did not find each other within {timeout_s:g} s; their logs are in {self.directory}"
                )
            time.sleep(0.1)

    @staticmethod
    def sees(node: StackNode, count: int) -> bool:
        """Return whether `node` sees `count` nodes alive, each with its offer."""
        rows = node.client.get("/v1/nodes")["nodes"]
        return len([row for row in rows if row["state"] == "alive" and row["engines"]]) >= count

    def node(self, nick: str) -> StackNode:
        return next(node for node in self.nodes if node.nick == nick)

    def job(self, job: str) -> dict[str, Any]:
        """The most advanced view that any living node has of it; empty while none knows it."""
        best: dict[str, Any] = {}
        for node in self.nodes:
            if node.running:
                try:
                    seen = node.client.get(f"/v1/jobs/{job}", timeout_s=5)["job"]
                except MeshError:
                    continue
                if not best or _advance(seen) > _advance(best):
                    best = seen
        return best

    def close(self) -> None:
        """End what runs, politely first, by pid; then remove the state."""
        for node in self.nodes:
            if node.running:
                assert node.process is not None
                try:
                    node.client.post("/v1/down", {"now": True})
                except MeshError:
                    node.process.send_signal(signal.SIGTERM)
        for node in self.nodes:
            if node.process is not None:
                try:
                    node.process.wait(15)
                except subprocess.TimeoutExpired:
                    node.process.kill()
                    node.process.wait()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def _advance(state: dict[str, Any]) -> tuple[int, int, int, int]:
    attempts = state["attempts"]
    commit = state["checkpoint"]
    last = attempts[-1] if attempts else {"term": 0, "running_unix_ms": 0}
    return (
        int(state["outcome"] is not None),
        last["term"],
        int(bool(last["running_unix_ms"])),
        commit["seq"] if commit is not None else 0,
    )

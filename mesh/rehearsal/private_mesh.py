"""The private mesh of a rehearsal: three real daemons on this machine, removed afterwards.

Three, because the job has to move twice: the first host is reclaimed, the second is killed.
"""

import hashlib
import os
import signal
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

from mesh.daemon.stack import Stack, StackNode
from mesh.rehearsal.observations import Departure
from mesh.rehearsal.observer import Observer
from mesh.util.errors import ExitCode, MeshError

NODES = 3
CALL_S = 60.0  # for an answer, in addition to the grace of a notice
SUBMIT_S = PULL_S = 600.0  # a large working directory, or result
IMAGES_S = 10.0


class PrivateMesh:
    def __init__(self, engine: str) -> None:
        self.stack = Stack(NODES, overrides={"slots": 1, "engines": [engine], "encrypt": False})
        self._mesh_id = b""

    def open(self) -> None:
        self.stack.found()
        self.stack.start_all()
        self._mesh_id = bytes.fromhex(self.stack.nodes[0].client.get("/v1/status")["mesh_id"])

    def close(self) -> None:
        self.stack.close()

    def submit(self, order: dict[str, Any]) -> Observer:
        deadline = time.monotonic() + IMAGES_S
        while True:
            try:
                answer = self._reader().client.post("/v1/jobs", order, timeout_s=SUBMIT_S)
            except MeshError as error:
                if error.code is not ExitCode.IMPOSSIBLE:
                    raise
                if order["image"] is None or time.monotonic() > deadline:
                    here = "a rehearsal has only what this machine has: use a larger machine, or request less"
                    raise MeshError(f"{error} ({here})", error.code) from error
                time.sleep(0.2)  # the nodes may not have listed their images yet
            else:
                return Observer(self.stack, answer["job"], self._mesh_id, order["ckpt_mode"])

    def notice(self, nick: str, attempt: int, grace_s: float, meanwhile: Callable[[], None]) -> Departure:
        """Reclaim the node as its owner; return when the guest has gone."""
        node = self.stack.node(nick)
        catches = _catches_term(node)
        problems: list[MeshError] = []

        def reclaim() -> None:
            try:
                node.client.post("/v1/reclaim", {"grace_s": grace_s}, timeout_s=grace_s + CALL_S)
            except MeshError as error:
                problems.append(error)

        begun = time.time()
        owner = Thread(target=reclaim, name="owner", daemon=True)
        owner.start()
        while owner.is_alive():
            meanwhile()
            owner.join(0.02)
        if problems:
            raise problems[0]
        return Departure(attempt, begun, grace_s, catches)

    def kill(self, nick: str, attempt: int) -> Departure:
        node = self.stack.node(nick)
        assert node.process is not None
        os.kill(node.process.pid, signal.SIGKILL)
        begun = time.time()
        node.process.wait()
        return Departure(attempt, begun)

    def cancel(self, observer: Observer) -> None:
        self._reader().client.post(f"/v1/jobs/{observer.job}/cancel")

    def published(self, observer: Observer) -> dict[str, str] | None:
        """Return a digest of each published file, by path; None if they cannot be fetched."""
        target = self.stack.directory / f"published-{observer.job}"
        try:
            self._reader().client.post(f"/v1/jobs/{observer.job}/pull", {"destination": str(target)}, timeout_s=PULL_S)
        except MeshError:
            return None
        found = {}
        for path in sorted(target.rglob("*")):
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    found[path.relative_to(target).as_posix()] = hashlib.file_digest(file, "blake2b").hexdigest()
        return found

    def _reader(self) -> StackNode:
        return next(node for node in self.stack.nodes if node.running)


def _catches_term(node: StackNode) -> bool | None:
    """Return whether a process of this node's guest catches SIGTERM; None if the daemon does not start it itself."""
    from mesh.util.processes import catches, children_of

    assert node.process is not None
    # Below the daemon: the watcher, then the guest's first process, then the job's own.
    pids = [
        pid for watcher in children_of(node.process.pid) for first in children_of(watcher) for pid in children_of(first)
    ]
    if not pids:
        return None
    found = False
    while pids:
        pid = pids.pop()
        found = found or catches(pid, signal.SIGTERM)
        pids += children_of(pid)
    return found

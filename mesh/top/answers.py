"""Answers of the daemon that `mesh top` shows: status, nodes, jobs, GPUs, events and this node's transfers."""

import time
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from membership.malformed import MALFORMED
from mesh.api.client import Client
from mesh.api.schemas.gpus import Gpu, Gpus
from mesh.api.schemas.jobs import Described, Event, Events, Job, Jobs
from mesh.api.schemas.mesh import Node, Nodes, Status, Transfer, Transfers
from mesh.api.schemas.owner import Rehearsed
from mesh.util.errors import MeshError

ANSWER_S = 5.0  # for a daemon that hangs; `Client.alive` waits as long
PATHS = {  # by the name that `mesh top --json` has for each
    "node": "/v1/status",
    "nodes": "/v1/nodes",
    "jobs": "/v1/jobs",
    "gpus": "/v1/gpus",
    "transfers": "/v1/transfers",
}


class Look(msgspec.Struct, frozen=True):
    """One look at the daemon; `events` are those since the look before."""

    at_unix: float
    status: Status
    nodes: list[Node]
    jobs: list[Job]
    gpus: list[Gpu]
    transfers: list[Transfer]
    events: list[Event]


T = TypeVar("T")


def understood(data: bytes, kind: type[T]) -> T:
    """MeshError if it is no such answer."""
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise MeshError(f"the daemon's answer is not understood ({error}): is it of another version?") from error


class Source:
    """Looks at one daemon, again and again. What has not changed is not decoded again: in a large mesh, most of it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._known: dict[str, tuple[bytes, Any]] = {}
        self._seen = 0  # the last event's id
        self._pid = 0

    def look(self) -> Look:
        status = self._ask("node", Status)
        if status.pid != self._pid:  # another daemon, perhaps on another journal
            self._pid, self._seen = status.pid, 0
        events = understood(self.client.read(f"/v1/events?after={self._seen}", ANSWER_S), Events).events
        self._seen = max([self._seen, *(event.id for event in events if event.id is not UNSET)])
        return Look(
            time.time(),
            status,
            self._ask("nodes", Nodes).nodes,
            self._ask("jobs", Jobs).jobs,
            self._ask("gpus", Gpus).gpus,
            self._ask("transfers", Transfers).transfers,
            events,
        )

    def describe(self, job: str) -> Described:
        return understood(self.client.read(f"/v1/jobs/{job}/describe", ANSWER_S), Described)

    def cost(self) -> Rehearsed:
        """Return the plan of a reclaim; changes nothing."""
        return understood(msgspec.json.encode(self.client.post("/v1/reclaim", {"dry_run": True})), Rehearsed)

    def _ask(self, name: str, kind: type[T]) -> T:
        data = self.client.read(PATHS[name], ANSWER_S)
        before = self._known.get(name)
        if before is None or before[0] != data:
            before = self._known[name] = (data, understood(data, kind))
        answer: T = before[1]
        return answer

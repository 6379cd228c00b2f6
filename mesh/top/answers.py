"""What the daemon answers, as far as `mesh top` shows it: the endpoints of `mesh status`, `nodes`, `ps`, `gpus` and `events`, and
what this node sends. Fields that an older daemon does not know have defaults; others are passed over."""

import time
from typing import Any, TypeVar

import msgspec

from mesh.api.errors import MeshError
from mesh.client import Client

ANSWER_S = 5.0  # for a daemon that hangs; `Client.alive` waits as long
PATHS = {  # by the name that `mesh top --json` has for each
    "node": "/v1/status",
    "nodes": "/v1/nodes",
    "jobs": "/v1/jobs",
    "gpus": "/v1/gpus",
    "transfers": "/v1/transfers",
}


class Stand(msgspec.Struct, frozen=True):
    """What the owner's presence means for the machine or a GPU (docs/provider.md)."""

    level: str = "lend"
    why: str = ""
    next_s: float | None = None


class Program(msgspec.Struct, frozen=True):
    pid: int = 0
    name: str = ""


class LentGpu(Stand, frozen=True):
    uuid: str = ""
    withheld: bool = False
    programs: list[Program] = []


class Lend(msgspec.Struct, frozen=True):
    now: bool = False
    hours: str = "always"
    machine: Stand = Stand()
    gpus: list[LentGpu] = []


class Status(msgspec.Struct, frozen=True):
    node: str
    nick: str
    user: str = ""
    mesh: str = ""
    pid: int = 0
    lending: bool = False
    paused: bool = False
    leaving: bool = False
    lend: Lend = Lend()
    guests: list[str] = []
    problems: dict[str, str] = {}


class Device(msgspec.Struct, frozen=True):
    uuid: str
    model: str = ""
    vram_mib: int = 0


class Room(msgspec.Struct, frozen=True):
    """What is left of a GPU: per cent of its time, and MiB."""

    uuid: str
    share: int = 0
    vram_mib: int = 0


class Node(msgspec.Struct, frozen=True):
    node: str
    nick: str
    user: str = ""
    state: str = ""
    me: bool = False
    since_unix: float = 0
    zone: str = ""
    lending: bool = False
    paused: bool = False
    held_by: str = ""
    back_unix: float = 0
    gpus: list[Device] = []
    gpu_room: list[Room] = []
    slots: int = 0
    slots_free: int = 0
    engines: list[str] = []
    jobs: int = 0


class ArrayPlace(msgspec.Struct, frozen=True):
    array: str
    index: int
    of: int = 0


class Due(msgspec.Struct, frozen=True):
    due_unix: float = 0
    why: str = ""


class Saving(msgspec.Struct, frozen=True):
    kind: str = ""
    seq: int = 0
    sent: int = 0
    bytes: int = 0
    nodes: int = 0


class Checkpoint(msgspec.Struct, frozen=True):
    seq: int = 0
    step: int | None = None
    holders: list[str | None] = []
    created_unix_ms: int = 0


class Attempt(msgspec.Struct, frozen=True):
    number: int = 0
    node: str = ""
    started_unix_ms: int = 0
    running_unix_ms: int = 0
    ended_unix_ms: int = 0
    seen_unix_ms: int = 0
    reason: str = ""
    exit_code: int | None = None
    resumed_step: int | None = None
    last_step: int | None = None


class Job(msgspec.Struct, frozen=True):
    job: str
    state: str
    name: str = ""
    array: ArrayPlace | None = None
    user: str = ""
    submitter: str | None = ""
    command: str = ""
    created_unix_ms: int = 0
    detail: str = ""
    node: str | None = None
    mates: list[str] = []
    heir: str | None = None
    gpus: int = 0
    gpu_share: int = 100
    step: int | None = None
    of: int | None = None
    at_risk_s: float | None = None
    next_checkpoint: Due | None = None
    saving: Saving | None = None
    checkpoint: Checkpoint | None = None
    attempts: list[Attempt] = []


class Tenant(msgspec.Struct, frozen=True):
    """A job on one of this node's GPUs; the fields with None are known of guarded ones only."""

    job: str
    name: str = ""
    user: str = ""
    share: int = 100
    vram_mib: int = 0
    share_now: float | None = None
    memory: int | None = None
    gate: str = "open"


class Foreign(msgspec.Struct, frozen=True):
    """What uses a GPU and is no guest."""

    vram_mib: int = 0


class Gpu(Device, frozen=True):
    share_free: int = 0
    vram_free_mib: int = 0
    jobs: list[Tenant] = []


class Gpus(msgspec.Struct, frozen=True):
    gpus: list[Gpu] = []
    problem: str = ""


class Transfer(msgspec.Struct, frozen=True):
    """A stream that leaves this node: bytes that `to` has acknowledged of `bytes`, in `seconds` since it began."""

    id: int
    to: str
    kind: str = ""
    job: str = ""
    name: str = ""
    sent: int = 0
    bytes: int | None = None
    seconds: float = 0
    urgent: bool = False


class Event(msgspec.Struct, frozen=True):
    unix_ms: int = 0
    id: int = 0
    job: str | None = None
    actor: str = ""
    kind: str = ""
    text: str = ""


class Nodes(msgspec.Struct, frozen=True):
    nodes: list[Node]


class Jobs(msgspec.Struct, frozen=True):
    jobs: list[Job]


class Transfers(msgspec.Struct, frozen=True):
    transfers: list[Transfer] = []


class Events(msgspec.Struct, frozen=True):
    events: list[Event]


class Described(msgspec.Struct, frozen=True):
    """All about one job."""

    job: Job
    events: list[Event] = []


class Guest(msgspec.Struct, frozen=True):
    """What taking the machine back would cost one guest."""

    job: str
    name: str = ""
    user: str = ""
    gpus: list[str] = []
    ran_s: float = 0
    at_risk_s: float = 0
    leads: bool = True
    save_s: float | None = None
    ship_s: float | None = None
    ship_bytes: int | None = None
    chance: float | None = None
    goes_to: str | None = None
    loses: str = ""


class Cost(msgspec.Struct, frozen=True):
    """`mesh reclaim --dry-run`."""

    guests: list[Guest] = []


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
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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
        self._seen = max([self._seen, *(event.id for event in events)])
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

    def cost(self) -> Cost:
        """Of taking the machine back; changes nothing."""
        return understood(msgspec.json.encode(self.client.post("/v1/reclaim", {"dry_run": True})), Cost)

    def _ask(self, name: str, kind: type[T]) -> T:
        data = self.client.read(PATHS[name], ANSWER_S)
        before = self._known.get(name)
        if before is None or before[0] != data:
            before = self._known[name] = (data, understood(data, kind))
        answer: T = before[1]
        return answer

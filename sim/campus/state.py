"""State of a job and of a machine during a run."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from mesh.model.record import Attempt
from placement.advert import HORIZONS_S, HOUR, WHOLE, Advert, Gpu, Portion
from placement.request import Request, expected_s
from sim.campus.churn import Absence, Machine
from sim.campus.network import Flow
from sim.campus.workload import Submission

WEIGHT_EPOCH_S = 900.0  # as in mesh/provider: a node publishes new weights at each quarter of an hour
STORE_MIB = 1 << 24
UNLIKELY = (1,) * len(HORIZONS_S)  # weights of machines that are not lent
ALL_HORIZONS = (1 << len(HORIZONS_S)) - 1


@dataclass(slots=True, eq=False)
class Job:
    """A job and its present attempt.

    At time `resumes`, `base` seconds of its work were done, and it computes from then on. `safe` seconds of work survive a
    departure of its machine. `epoch` grows with each change of state, so that callbacks recognise that they are stale.
    """

    submission: Submission
    state: str = "waiting"
    epoch: int = 0
    host: "Host | None" = None
    origin: "Host | None" = None
    base: float = 0.0
    safe: float = 0.0
    saving: float = 0.0
    resumes: float = 0.0
    since: float = 0.0
    allocated: float = 0.0
    began: float = 0.0
    stopped: float | None = None  # time of the last useful step, while the job is down
    first_run: float | None = None
    departures: int = 0
    holders: "tuple[Host, ...]" = ()  # machines with the last safe checkpoint; empty also with a file server
    sent_to: tuple[int, ...] = ()
    upload: Flow | None = None
    prefetch: Flow | None = None
    warming: Flow | None = None  # transfer of the last checkpoint to the next host in advance
    warm: "tuple[Host, float] | None" = None  # host that has a checkpoint in advance, and the work it contains
    fetch: Flow | None = None
    upload_s: float = 0.0
    due_late: bool = False
    copying: bool = False
    standby: "Host | None" = None
    first_holder: "Host | None" = None  # first receiver of the last state under notice
    prefer: "Host | None" = None
    buddy: "Host | None" = None
    buddy_from: float = 0.0
    safe_here: bool = False  # the new host is the redundant one and already has the state
    noticed: bool = False
    in_time: bool = False
    came_back: float | None = None  # when its first machine was lent again
    reason: str = ""
    attempts: list[Attempt] = field(default_factory=list)

    def is_warm(self, host: "Host") -> bool:
        """Tell whether the host has the last checkpoint in advance."""
        return self.warm == (host, self.safe)

    def done(self, now: float, rate: float) -> float:
        """Return the work done by now, in seconds."""
        return min(self.submission.work_s, self.base + max(0.0, now - self.resumes) * rate)

    def note_start(self, now: float) -> None:
        """Record the start of an attempt, as the job record does."""
        assert self.host is not None
        ms = int(now * 1000)
        self.attempts.append(
            Attempt(
                number=len(self.attempts),
                node=self.host.id,
                nick=self.host.machine.name,
                term=1,
                started_unix_ms=ms,
                running_unix_ms=ms,
            )
        )

    def note_end(self, reason: str, now: float) -> None:
        last = self.attempts[-1]
        self.attempts[-1] = msgspec.structs.replace(last, reason=reason, ended_unix_ms=int(now * 1000))

    def request(self, user: str | None = None) -> Request:
        """Return the placement request, for its own user or for `user`."""
        left = self.attempts[-1].node if self.attempts else None
        return Request(
            self.submission.id,
            len(self.attempts),
            self.submission.user if user is None else user,
            gpus=self.submission.gpus,
            vram_mib=self.submission.vram_mib,
            avoid=() if left is None else (left,),
            prefer=None if self.prefer is None else self.prefer.id,
            near=tuple(host.id for host in self.holders),
            remaining_s=expected_s(self.base),
        )


@dataclass(slots=True, eq=False)
class Host:
    """A machine. `stay` counts its stays; it is `leaving` between notice and departure, `reachable` while on the network."""

    number: int
    machine: Machine
    absences: list[Absence]
    id: bytes = field(init=False)
    free: int = field(init=False)
    rooms: list[tuple[Portion, ...]] = field(init=False)
    adverts: list[Advert | None] = field(init=False)  # the last advert for each number of free GPUs
    plain: Advert = field(init=False)
    lent: bool = True
    reachable: bool = True
    leaving: bool = False
    stay: int = 0
    departs_at: float = 0.0
    guests: dict[Job, None] = field(default_factory=dict)
    keeps: dict[Job, None] = field(default_factory=dict)
    displaced: dict[Job, None] = field(default_factory=dict)
    buddies: dict[Job, None] = field(default_factory=dict)
    line: list[Job] = field(default_factory=list)  # jobs whose last checkpoints it sends under notice, in this order
    sending: Job | None = None
    weights: tuple[int, ...] = UNLIKELY
    weighed: int = 0  # bit set of horizons whose weights are up to date in this epoch
    weight_epoch: int = -1

    def __post_init__(self) -> None:
        machine = self.machine
        self.id = machine.name.encode().ljust(32, b"\0")
        self.free = machine.gpus
        gpus = tuple(Gpu(f"{machine.name}/{n}", "gpu", machine.vram_mib) for n in range(machine.gpus))
        self.rooms = [
            tuple(Portion(gpu.uuid, WHOLE, gpu.vram_mib) for gpu in gpus[:count]) for count in range(len(gpus) + 1)
        ]
        self.adverts = [None] * (machine.gpus + 1)
        self.plain = Advert(
            version=0,
            node=self.id,
            nick=machine.name,
            user=machine.owners,
            zone=machine.building,
            weight=1,
            up_since_unix=0,
            lending=True,
            paused=False,
            gpus=gpus,
            free_portions=self.rooms[-1],
            guards=False,
            gpu_sharing=False,
            slots=0,
            slots_free=0,
            cpus=8,
            memory_mib=1 << 20,
            engines=("process",),
            own_only=(),
            images=(),
            accepts=("*",),
            store_free_mib=STORE_MIB,
        )

    def advert(self) -> Advert:
        """Return the present advert. Callers keep `weights` up to date; cached matches do not depend on them."""
        last = self.adverts[self.free]
        if last is not None and last.weights is self.weights:
            return last
        room = self.rooms[self.free]
        found = msgspec.structs.replace(self.plain, weight=self.weights[HOUR], weights=self.weights, free_portions=room)
        if last is not None:
            vars(found).update(vars(last))  # cached matches of requests
        self.adverts[self.free] = found
        return found


def fitting(hosts: Iterable[Host], submission: Submission) -> list[Host]:
    """Return the hosts that can start the job now."""
    gpus, vram_mib = submission.gpus, submission.vram_mib
    return [
        host
        for host in hosts
        if host.free >= gpus and host.lent and not host.leaving and host.machine.vram_mib >= vram_mib
    ]

"""A job and a machine, as the campus sees them while it runs."""

from collections.abc import Iterable

import msgspec

from mesh.jobs.ledger import Attempt
from placement.advert import HORIZONS_S, HOUR, WHOLE, Advert, Gpu, Portion
from placement.request import Request, expected_s
from sim.campus.churn import Absence, Machine
from sim.campus.demand import Order
from sim.campus.network import Flow

WEIGHT_EPOCH_S = 900.0  # as mesh/provider/attendance.py: a node tells new weights as the quarter of an hour begins
STORE_MIB = 1 << 24
UNLIKELY = (1,) * len(HORIZONS_S)  # to stay: said of those who are not lent
ALL_HORIZONS = (1 << len(HORIZONS_S)) - 1


class Job:
    """`base` of its work was done at `resumes`, and it computes from then on; `safe` of it no departure of its machine takes.

    `epoch` grows with each change of state: a timer that was set before is stale.
    """

    __slots__ = (
        "allocated",
        "attempts",
        "base",
        "began",
        "buddy",
        "buddy_from",
        "came_back",
        "copying",
        "departures",
        "due_late",
        "epoch",
        "fetch",
        "first_run",
        "heir",
        "holders",
        "host",
        "in_time",
        "keeper",
        "noticed",
        "order",
        "origin",
        "prefer",
        "prefetch",
        "reason",
        "resumes",
        "safe",
        "safe_here",
        "saving",
        "sent_to",
        "since",
        "state",
        "stopped",
        "upload",
        "upload_s",
        "waiting_since",
        "warm",
        "warming",
    )

    def __init__(self, order: Order) -> None:
        self.order = order
        self.state = "waiting"
        self.epoch = 0
        self.host: Host | None = None
        self.origin: Host | None = None
        self.base = self.safe = self.saving = 0.0
        self.resumes = self.since = self.allocated = self.began = 0.0
        self.waiting_since = order.at
        self.stopped: float | None = None  # when its last useful step was, until it computes again
        self.first_run: float | None = None
        self.departures = 0
        self.holders: tuple[Host, ...] = ()  # who has the last safe checkpoint; empty too if a file server has it
        self.sent_to: tuple[int, ...] = ()
        self.upload: Flow | None = None
        self.prefetch: Flow | None = None
        self.warming: Flow | None = None  # its last checkpoint on its way to where it would go next
        self.warm: tuple[Host, float] | None = (
            None  # who was brought one beforehand, and how much of its work that holds
        )
        self.fetch: Flow | None = None
        self.upload_s = 0.0
        self.due_late = self.copying = False
        self.heir: Host | None = None
        self.keeper: Host | None = None  # who gets its last state first, when it has notice
        self.prefer: Host | None = None
        self.buddy: Host | None = None
        self.buddy_from = 0.0
        self.safe_here = False  # a machine that computed it too has its state: nothing is to be fetched
        self.noticed = self.in_time = False
        self.came_back: float | None = None  # when the machine that sent it away was lent again
        self.reason = ""
        self.attempts: list[Attempt] = []

    def is_warm(self, host: "Host") -> bool:
        """Whether its last checkpoint was brought there beforehand."""
        return self.warm == (host, self.safe)

    def done(self, now: float, rate: float) -> float:
        """Of its work, by now."""
        return min(self.order.work_s, self.base + max(0.0, now - self.resumes) * rate)

    def note_start(self, now: float) -> None:
        """As the ledger has it: an attempt on this host."""
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
        """Of its user, or in the place of that one."""
        left = self.attempts[-1].node if self.attempts else None
        return Request(
            self.order.id,
            len(self.attempts),
            self.order.user if user is None else user,
            gpus=self.order.gpus,
            vram_mib=self.order.vram_mib,
            avoid=() if left is None else (left,),
            prefer=None if self.prefer is None else self.prefer.id,
            near=tuple(host.id for host in self.holders),
            remaining_s=expected_s(self.base),
        )


class Host:
    """`stay` counts its stays; `leaving` between a notice and the departure; `reachable` while it is on the network."""

    __slots__ = (
        "absences",
        "adverts",
        "buddies",
        "departs_at",
        "displaced",
        "free",
        "guests",
        "id",
        "keeps",
        "leaving",
        "lent",
        "line",
        "machine",
        "number",
        "plain",
        "reachable",
        "rooms",
        "sending",
        "stay",
        "weighed",
        "weight_epoch",
        "weights",
    )

    def __init__(self, number: int, machine: Machine, absences: list[Absence]) -> None:
        self.number, self.machine, self.absences = number, machine, absences
        self.id = machine.name.encode().ljust(32, b"\0")
        self.free = machine.gpus
        self.lent = self.reachable = True
        self.leaving = False
        self.stay = 0
        self.departs_at = 0.0
        self.guests: dict[Job, None] = {}
        self.keeps: dict[Job, None] = {}
        self.displaced: dict[Job, None] = {}
        self.buddies: dict[Job, None] = {}
        self.line: list[Job] = []  # whose last checkpoints leave with it, in this order
        self.sending: Job | None = None
        self.weights = UNLIKELY
        self.weighed = 0  # which of the horizons, in this epoch: a bit of each
        self.weight_epoch = -1
        gpus = tuple(Gpu(f"{machine.name}/{n}", "gpu", machine.vram_mib) for n in range(machine.gpus))
        self.rooms = [
            tuple(Portion(gpu.uuid, WHOLE, gpu.vram_mib) for gpu in gpus[:count]) for count in range(len(gpus) + 1)
        ]
        self.adverts: list[Advert | None] = [None] * (
            machine.gpus + 1
        )  # the last one for each number of GPUs that are free
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
            room=self.rooms[-1],
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
        """As it is now; `weights` are kept up to date by whoever asks. How it suits requests does not depend on them."""
        last = self.adverts[self.free]
        if last is not None and last.stays is self.weights:
            return last
        room = self.rooms[self.free]
        found = msgspec.structs.replace(self.plain, weight=self.weights[HOUR], stays=self.weights, room=room)
        if last is not None:
            vars(found).update(vars(last))  # what has been found out about it
        self.adverts[self.free] = found
        return found


def fitting(hosts: Iterable[Host], order: Order) -> list[Host]:
    """Those of them who can take it now."""
    gpus, vram_mib = order.gpus, order.vram_mib
    return [
        host
        for host in hosts
        if host.free >= gpus and host.lent and not host.leaving and host.machine.vram_mib >= vram_mib
    ]

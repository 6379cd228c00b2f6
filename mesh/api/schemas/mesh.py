"""Nodes, their offers, how long they stay, and hours lent and borrowed."""

import msgspec
from msgspec import UNSET, UnsetType

from mesh.api.schemas.gpus import Device, Room
from mesh.api.schemas.owner import Lend
from mesh.execution.engine import Availability
from mesh.network.edge import EdgeState
from mesh.provider.usage import By


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Another node's report of reaching this one; `node` is its id; `tcp`: acked, refused or silent."""

    node: str
    nick: str
    udp: bool
    tcp: str
    seen_host: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`node`, `mesh_id`: ids; `wire`: version of the protocol between nodes; `versions`: software of each present node;
    `guests`: jobs; `waiting`: open join requests; `clock_offset_s`: by which the others' clocks are ahead, None before any has
    answered; `problems`: by the part that has it."""

    version: str
    wire: int = 0
    versions: dict[str, str] = {}
    pid: int
    node: str
    nick: str
    user: str
    mesh: str
    mesh_id: str
    roles: list[str] = []
    may_admit: bool
    open: bool
    address: str
    api_port: int
    lending: bool
    paused: bool
    lend: Lend
    leaving: bool
    alive: int
    edge: EdgeState
    engines: dict[str, Availability]
    guests: list[str]
    certificate_ends_unix: int
    clock_offset_s: float | None
    waiting: int
    problem: str
    problems: dict[str, str]
    reached_by: list[Reach]
    counters: dict[str, int]


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidth to a node: bytes a second (the median), the standard deviation of their logarithm, and
    what that is known from: so many `transfers`, the last `age_s` ago."""

    bps: int
    spread: float
    source: str
    transfers: int
    age_s: float


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node and what it offers. `node`: its id; `state`: alive, draining, suspect, unreachable, dead, left or revoked.
    `lending`: it takes guests; `paused`: it lends, but not now, because of `held_by` (`owner`, `hours`, or empty), until
    `back_unix` (0: not known). `gpu_room`: what is left of each GPU that has anything left; `weight`: how likely it stays for
    an hour, 1 to 64, 0 if it does not say; `jobs`: that run there; `network`: hosts that its owner lets them reach by a proxy;
    `path`: None of this node itself."""

    node: str
    nick: str
    user: str
    state: str
    address: str
    me: bool
    since_unix: float
    zone: str
    lending: bool
    paused: bool
    held_by: str
    back_unix: int
    gpus: list[Device]
    gpus_free: int
    gpu_room: list[Room]
    gpu_pauses: bool
    gpu_shares: bool
    slots: int
    slots_free: int
    engines: list[str]
    interactive: bool
    network: list[str]
    weight: int
    jobs: int
    path: Path | None


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[Node]


class Zone(msgspec.Struct, frozen=True, kw_only=True):
    """`line`: candidates for coordinator, best first; `weight`: the sum of its nodes'; `submits_for_others`: jobs, by node."""

    zone: str
    nodes: list[str]
    weight: int
    coordinator: str | None
    line: list[str]
    submits_for_others: dict[str, int]
    doing: str


class Zones(msgspec.Struct, frozen=True, kw_only=True):
    """`two_level_since`: number of nodes at which placement by zone began; 0 without it."""

    placement: str
    two_level_since: int
    zones: list[Zone]


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that leaves this node: bytes `sent` that the other end has acknowledged, of `bytes` (None: not known), in
    `seconds` since it began."""

    id: int
    kind: str
    to: str
    job: str
    name: str
    sent: int
    bytes: int | None
    seconds: float
    urgent: bool


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """`budget_bps`: of all background streams together; None for no limit."""

    transfers: list[Transfer]
    budget_bps: float | None


class Stays(msgspec.Struct, frozen=True, kw_only=True):
    """The probability of staying for `horizon_min` minutes, with a 90 % interval."""

    horizon_min: int
    probability: float
    low: float
    high: float


class Quantile(msgspec.Struct, frozen=True, kw_only=True):
    """`part` of the stays were longer than `after_s`."""

    part: float
    after_s: float


class Survival(msgspec.Struct, frozen=True, kw_only=True):
    """`node`: its id. `stays`: of this node's own; `week`: per cent of each hour of the week, from Monday, in which it was
    lent; None where that is not known. `departures`, `lent_h`: what the estimate has seen; the rates:
    docs/explanation/survival.md."""

    node: str
    nick: str
    me: bool
    lent: bool
    lent_since_unix: float | None
    until_unix: int | None
    told_unix: int
    weight: int
    survival: list[Stays]
    departures: float
    lent_h: float
    rate_of_zone: float
    stays: list[Quantile]
    week: list[int | None]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one user, node, zone or month; hours of whole GPUs, and of slots (docs/explanation/usage.md).
    The last two of users only."""

    name: str
    lent_gpu_h: float
    lent_slot_h: float
    borrowed_gpu_h: float
    borrowed_slot_h: float
    own_gpu_h: float
    own_slot_h: float
    measured_gpu_h: float
    lost_h: float
    attempts: int
    decayed_gpu_h: float | UnsetType = UNSET
    fair_points: int | UnsetType = UNSET


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that ran on this node. `submitter`: a nick, or the id of a node that is not known any more; `measured_gpu_s`:
    None without a guard; `end`: why it ended, empty while it runs."""

    job: str
    name: str
    attempt: int
    user: str
    submitter: str
    engine: str
    from_unix_ms: int
    until_unix_ms: int
    gpu_percent: int
    measured_gpu_s: float | None
    end: str
    lost_s: float


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`asked`: number of nodes; `silent`: nodes that did not answer; `cut`: nodes of which only the newest receipts count;
    `refused`: receipts that were none."""

    by: By
    since_unix_ms: int
    rows: list[Account]
    asked: int
    silent: list[str]
    cut: list[str]
    refused: int
    half_life_s: float
    runs: list[Run]

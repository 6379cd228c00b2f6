"""Nodes, what they offer, how long they stay, and who has lent what to whom."""

from typing import NotRequired, TypedDict

from membership.whereabouts import Asked
from mesh.api.answers.gpus import Device, Room
from mesh.api.answers.owner import Lend
from mesh.edge.edge import Standing
from mesh.engine.engine import Availability
from mesh.provider.usage import By


class Reach(TypedDict):
    """What another node said of reaching this one; `node` is its id; `tcp`: acked, refused or silent."""

    node: str
    nick: str
    udp: bool
    tcp: str
    seen_host: str


class Status(TypedDict):
    """`node`, `mesh_id`: ids; `wire`: version of what nodes say to each other; `versions`: what each node that is there runs;
    `guests`: jobs; `waiting`: how many knock; `clock_offset_s`: by which the others' clocks are ahead, None before any has
    answered; `problems`: by the part that has it."""

    version: str
    wire: int
    versions: dict[str, str]
    pid: int
    node: str
    nick: str
    user: str
    mesh: str
    mesh_id: str
    roles: list[str]
    may_admit: bool
    open: bool
    address: str
    api_port: int
    lending: bool
    paused: bool
    lend: Lend
    leaving: bool
    alive: int
    edge: Standing
    engines: dict[str, Availability]
    guests: list[str]
    certificate_ends_unix: int
    clock_offset_s: float | None
    waiting: int
    problem: str
    problems: dict[str, str]
    reached_by: list[Reach]
    counters: dict[str, int]


class Path(TypedDict):
    """How fast a node takes what this one sends: bytes a second (the median), the standard deviation of their logarithm, and
    what that is known from: so many `transfers`, the last `age_s` ago."""

    bps: int
    spread: float
    source: str
    transfers: int
    age_s: float


class Node(TypedDict):
    """A node and what it offers. `node`: its id; `state`: alive, draining, suspect, unreachable, dead, left or revoked.
    `lending`: it takes guests; `paused`: it lends, but not now, because of `held_by` (`owner`, `hours`, or empty), until
    `back_unix` (0: not known). `gpu_room`: what is left of each GPU that has anything left; `weight`: how likely it stays for
    an hour, 1 to 64, 0 if it does not say; `jobs`: that run there; `path`: None of this node itself."""

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
    weight: int
    jobs: int
    path: Path | None


class Nodes(TypedDict):
    nodes: list[Node]


class Zone(TypedDict):
    """`line`: who coordinates it, best first; `weight`: the sum of its nodes'; `submits_for_others`: jobs, by node."""

    zone: str
    nodes: list[str]
    weight: int
    coordinator: str | None
    line: list[str]
    submits_for_others: dict[str, int]
    doing: str


class Zones(TypedDict):
    """`two_level_since`: how many nodes there were when zones began to come first; 0 while they do not."""

    placement: str
    two_level_since: int
    zones: list[Zone]


class Transfer(TypedDict):
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


class Transfers(TypedDict):
    """`budget_bps`: for all streams in the background together; None is no limit."""

    transfers: list[Transfer]
    budget_bps: float | None


class Stays(TypedDict):
    """How likely it is to stay so long, with an interval of 90 per cent."""

    horizon_min: int
    probability: float
    low: float
    high: float


class Quantile(TypedDict):
    """`part` of the stays were longer than `after_s`."""

    part: float
    after_s: float


class Survival(TypedDict):
    """`node`: its id. `stays`: of this node's own; `week`: per cent of each hour of the week, from Monday, in which it was
    lent; None where that is not known. `departures`, `lent_h`: what the estimate has seen; the rates: docs/survival.md."""

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
    rate_of_room: float
    leave_together: float
    stays: list[Quantile]
    week: list[int | None]


class Network(TypedDict):
    """`others`: nodes; `asked`: what some of them said; `neighbours`: those on this node's own networks."""

    others: int
    asked: tuple[Asked, ...]
    mdns_problem: str
    neighbours: int
    neighbours_by_mdns: int
    clock_offset_s: float | None
    clock_peers: int


class Account(TypedDict):
    """Of one user, node, zone or month; hours of whole GPUs, and of slots (docs/metrics.md). The last two of users only."""

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
    decayed_gpu_h: NotRequired[float]
    fair_points: NotRequired[int]


class Run(TypedDict):
    """What ran on this node. `submitter`: a nick, or the id of a node that is not known any more; `measured_gpu_s`: None
    without a guard; `end`: why it ended, empty while it goes on."""

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


class Usage(TypedDict):
    """`asked`: how many nodes; `silent`: those that did not answer; `cut`: those of which only the newest receipts are counted;
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

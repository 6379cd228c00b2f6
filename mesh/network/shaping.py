"""Classes of outgoing traffic on the machine's interface, and the tc(8) commands that make, change and remove them. No I/O.

HTB (tc-htb(8)) gives each class its rate first and the rest to the lowest `prio` that wants it: the machine's own traffic comes
first, except for what checkpoints need to meet their deadlines, and it never has less than half.

A packet's priority alone selects its class (HTB then uses no filter); our sockets set it with SO_PRIORITY. A port would not do: a
stream goes to a port that another node chose, from one that also carries calls. A mark would not do: owners use marks for their
firewalls and routes. The kernel lets only processes with CAP_NET_ADMIN set a priority above 6, and clears it when a packet leaves
a network namespace, so no guest can set it.
"""

import json
from typing import Literal

import msgspec

from membership.malformed import MALFORMED

MAJOR = 0x6D65  # "me"
HANDLE = f"{MAJOR:x}:"
FIRST = 1  # before other programs' filters, so that they cannot pass what is cut off
USABLE = 0.98  # of a link: the kernel does not count Ethernet's 24 bytes a packet, and the queue must form here, not in the card
OWNER_SHARE = 0.5  # of the link, which urgent checkpoints never take from the machine's own traffic (own choice)
FLOOR_SHARE = 0.01  # of the link, for each other class, so that none looks broken (own choice)
OVERHEAD = 1.06  # of TLS, TCP, IP and Ethernet over the bytes of a stream (own estimate)
STEP = 0.15  # relative change of a need, or of the link, before classes are changed (own choice)
BURST_S = 0.001  # seconds of its rate that a class may send at once: the timer's resolution (own choice)
BURST_BYTES = 64 << 10  # one packet as the kernel hands it to a card that segments
QUANTUM = 60_000  # bytes per turn of a class; HTB warns above this
KEPT_LEAVES = frozenset(
    {"fq_codel", "fq", "cake"}
)  # default queues (net.core.default_qdisc) that the machine's class keeps


class Band(msgspec.Struct, frozen=True):
    """A traffic class. `prio`: spare bandwidth goes to the lowest first."""

    minor: int
    prio: int

    @property
    def priority(self) -> int:
        """Return the priority of sockets (SO_PRIORITY) and packets in this class."""
        return MAJOR << 16 | self.minor

    @property
    def classid(self) -> str:
        return f"{MAJOR:x}:{self.minor:x}"


ROOT = Band(0x1, 0)
HOST = Band(0x10, 0)  # the machine's own traffic, and our acknowledgements of incoming checkpoints
URGENT = Band(0x20, 1)  # checkpoints with a deadline
BULK = Band(0x30, 2)  # other checkpoints
GUEST = Band(0x40, 2)  # what guests send to the network


class Command(msgspec.Struct, frozen=True):
    """Arguments of tc. `must`: stop if this command fails."""

    words: tuple[str, ...]
    must: bool = True


class Qdisc(msgspec.Struct, frozen=True):
    """A queue as `tc -json qdisc show` lists it; later versions of tc may add fields."""

    kind: str
    handle: str
    dev: str = ""
    root: bool = False
    parent: str = ""


class Filter(msgspec.Struct, frozen=True):
    """A BPF program at a hook, with the program's name."""

    pref: int
    handle: int
    name: str
    hook: str


class ReportError(ValueError):
    """The output of tc or ip is not understood."""


Whose = Literal["nobody", "ours", "another"]


def read_qdiscs(text: str) -> list[Qdisc]:
    try:
        return msgspec.json.decode(text or "[]", type=list[Qdisc], strict=False)
    except MALFORMED as error:
        raise ReportError(f"the output of `tc qdisc show` is not understood: {error}") from error


def root_of(qdiscs: list[Qdisc], device: str) -> Qdisc | None:
    return next((qdisc for qdisc in qdiscs if qdisc.root and qdisc.dev == device), None)


def whose(root: Qdisc | None) -> Whose:
    """Return who added a device's queue. The kernel's defaults have the handle 0: and may be replaced."""
    if root is None or root.handle == "0:" or root.kind == "noqueue":
        return "nobody"
    return "ours" if root.kind == "htb" and root.handle == HANDLE else "another"


def hooked(qdiscs: list[Qdisc], device: str) -> str:
    """Return the kind of qdisc in the place of the hooks: clsact, ingress (which has no egress hook), or empty."""
    return next((qdisc.kind for qdisc in qdiscs if qdisc.dev == device and qdisc.handle == "ffff:"), "")


def read_filters(text: str, hook: str) -> list[Filter]:
    """Return the BPF filters that `tc -json filter show` lists."""
    try:
        rows = json.loads(text or "[]")
        found = []
        for row in rows:
            options = row.get("options", {})
            if row.get("kind") == "bpf" and "handle" in options:
                handle = int(str(options["handle"]), 16)
                name = str(options.get("bpf_name", "")).partition(":")[0]
                found.append(Filter(int(row["pref"]), handle, name, hook))
        return found
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ReportError(f"the output of `tc filter show` is not understood: {error}") from error


def attach(device: str, hook: str, pinned: str, tag: int) -> Command:
    """Return the command that attaches a program. `tag` identifies the node's own filters among those of other daemons."""
    place = ("filter", "replace", "dev", device, hook, "pref", str(FIRST), "handle", f"{tag:#x}")
    return Command((*place, "protocol", "all", "bpf", "object-pinned", pinned, "direct-action"))


def detach(device: str, found: Filter) -> Command:
    place = ("filter", "del", "dev", device, found.hook, "pref", str(found.pref), "handle", f"{found.handle:#x}")
    return Command((*place, "protocol", "all", "bpf"))


def build(device: str, link_bps: float, leaf: str) -> list[Command]:
    """Return the commands that add the classes to a device. `leaf`: the kernel's default queue (`net.core`)."""
    whole = USABLE * link_bps
    commands = [
        Command(("qdisc", "add", "dev", device, "root", "handle", HANDLE, "htb", "default", f"{HOST.minor:x}")),
        _class("add", device, HANDLE, ROOT, whole, whole),
        *rates(device, link_bps, 0.0, "add"),
    ]
    if leaf in KEPT_LEAVES:
        commands.append(Command(("qdisc", "add", "dev", device, "parent", HOST.classid, leaf), must=False))
    return commands


def remove(device: str) -> Command:
    return Command(("qdisc", "del", "dev", device, "root", "handle", HANDLE))


def rates(device: str, link_bps: float, urgent_bps: float, verb: str = "change") -> list[Command]:
    """Return the commands that set the rates. `urgent_bps`: for checkpoints with a deadline, from `reserved`."""
    whole = USABLE * link_bps
    floor = FLOOR_SHARE * whole
    urgent = max(floor, urgent_bps)
    given = ((HOST, whole - urgent - 2 * floor), (URGENT, urgent), (BULK, floor), (GUEST, floor))
    changing = given if verb == "add" else given[:2]
    return [_class(verb, device, ROOT.classid, band, rate, whole) for band, rate in changing]


def reserved(need_bytes_s: float, link_bps: float) -> float:
    """Return the bits per second for checkpoints that need `need_bytes_s` to be in time (infinity: all they can get)."""
    return min(need_bytes_s * 8 * OVERHEAD, (1 - OWNER_SHARE) * USABLE * link_bps)


def worth(given_bps: float, wanted_bps: float, link_bps: float) -> bool:
    """Return whether to change the classes: not for small changes, but at once when the need ends."""
    return abs(wanted_bps - given_bps) > STEP * min(given_bps, link_bps)


def _class(verb: str, device: str, parent: str, band: Band, rate_bps: float, ceil_bps: float) -> Command:
    words = ["class", verb, "dev", device, "parent", parent, "classid", band.classid, "htb"]
    for name, burst, bps in (("rate", "burst", rate_bps), ("ceil", "cburst", ceil_bps)):
        words += [name, f"{max(8, int(bps))}bit", burst, f"{BURST_BYTES + int(bps / 8 * BURST_S)}b"]
    return Command((*words, "quantum", str(QUANTUM), "prio", str(band.prio)))

"""The classes of what leaves by the machine's own interface, and the commands of tc(8) that make, change and remove them. No I/O.

HTB (tc-htb(8)) gives each class its rate first, and then what is left to the lowest `prio` that wants it: the machine's own
traffic comes first but for what checkpoints need to be in time, and never has less than half.

Packets come into a class by their priority alone, which is the class's number (HTB looks at no filter then). Our sockets set it
with SO_PRIORITY. A port would not do: a stream is sent to a port of another node's choice, and from one that also carries calls.
Nor a mark, which owners use for their own firewalls and routes. The kernel lets nobody without CAP_NET_ADMIN set a priority
above 6, and clears it when a packet leaves a network namespace: so no guest can set it.
"""

import json
from typing import Literal

import msgspec

MAJOR = 0x6D65  # "me"
HANDLE = f"{MAJOR:x}:"
FIRST = 1  # before filters of others: what is cut is cut, whatever they would have done with it
USABLE = 0.98  # of a link: the kernel does not count Ethernet's own 24 bytes a packet; the queue must be here, not in the card
OWNER_SHARE = 0.5  # of the link, that checkpoints in a hurry never take from the machine's own traffic; ours
FLOOR_SHARE = 0.01  # for each of the others, so that none is taken for broken; ours
OVERHEAD = 1.06  # TLS, TCP, IP and Ethernet, over what a stream counts as sent; ours
STEP = 0.15  # a need must change by so much of the link or of itself, before the classes are changed; ours
BURST_S = 0.001  # of its rate that a class may send at once: the timer's grain; ours
BURST_BYTES = 64 << 10  # one packet as the kernel hands it to a card that segments
QUANTUM = 60_000  # bytes a class sends in its turn; below what HTB warns of
KEPT_LEAVES = frozenset(
    {"fq_codel", "fq", "cake"}
)  # of net.core.default_qdisc: the machine's own class keeps such a queue


class Band(msgspec.Struct, frozen=True):
    """A class. `prio`: who has what is left over; the lowest first."""

    minor: int
    prio: int

    @property
    def priority(self) -> int:
        """Of a socket (SO_PRIORITY) or a packet, to be in it."""
        return MAJOR << 16 | self.minor

    @property
    def classid(self) -> str:
        return f"{MAJOR:x}:{self.minor:x}"


ROOT = Band(0x1, 0)
HOST = Band(0x10, 0)  # the machine's own, and what our sockets answer to those who send checkpoints here
URGENT = Band(0x20, 1)  # checkpoints with a deadline
BULK = Band(0x30, 2)  # other checkpoints
GUEST = Band(0x40, 2)  # what guests send to the network


class Command(msgspec.Struct, frozen=True):
    """`must`: without it the rest makes no sense."""

    words: tuple[str, ...]
    must: bool = True


class Qdisc(msgspec.Struct, frozen=True):
    """As `tc -json qdisc show` has it; later versions of tc may say more."""

    kind: str
    handle: str
    dev: str = ""
    root: bool = False
    parent: str = ""


class Filter(msgspec.Struct, frozen=True):
    """A BPF program at a hook. `name`: the program's."""

    pref: int
    handle: int
    name: str
    hook: str


class ReportError(ValueError):
    """tc or ip said something that is not what they say."""


Whose = Literal["nobody", "ours", "another"]


def read_qdiscs(text: str) -> list[Qdisc]:
    try:
        return msgspec.json.decode(text or "[]", type=list[Qdisc], strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ReportError(f"tc lists queues in a way that is not known: {error}") from error


def root_of(qdiscs: list[Qdisc], device: str) -> Qdisc | None:
    return next((qdisc for qdisc in qdiscs if qdisc.root and qdisc.dev == device), None)


def whose(root: Qdisc | None) -> Whose:
    """Whose the queue of a device is. The kernel's own defaults have the handle 0: and nobody misses them."""
    if root is None or root.handle == "0:" or root.kind == "noqueue":
        return "nobody"
    return "ours" if root.kind == "htb" and root.handle == HANDLE else "another"


def hooked(qdiscs: list[Qdisc], device: str) -> str:
    """The kind of the qdisc that has the place of the hooks: clsact, ingress (which has no hook for what leaves), or none."""
    return next((qdisc.kind for qdisc in qdiscs if qdisc.dev == device and qdisc.handle == "ffff:"), "")


def read_filters(text: str, hook: str) -> list[Filter]:
    """The BPF filters among those that `tc -json filter show` lists."""
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
        raise ReportError(f"tc lists filters in a way that is not known: {error}") from error


def attach(device: str, hook: str, pinned: str, tag: int) -> Command:
    """`tag` names the node, so that it finds its own again, and leaves those of another daemon here alone."""
    place = ("filter", "replace", "dev", device, hook, "pref", str(FIRST), "handle", f"{tag:#x}")
    return Command((*place, "protocol", "all", "bpf", "object-pinned", pinned, "direct-action"))


def detach(device: str, found: Filter) -> Command:
    place = ("filter", "del", "dev", device, found.hook, "pref", str(found.pref), "handle", f"{found.handle:#x}")
    return Command((*place, "protocol", "all", "bpf"))


def build(device: str, link_bps: float, leaf: str) -> list[Command]:
    """Put the classes on a device that carries so many bits a second. `leaf`: the kernel's default queue (`net.core`)."""
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
    """`urgent_bps`: what checkpoints with a deadline are given, as `reserved` found it."""
    whole = USABLE * link_bps
    floor = FLOOR_SHARE * whole
    urgent = max(floor, urgent_bps)
    given = ((HOST, whole - urgent - 2 * floor), (URGENT, urgent), (BULK, floor), (GUEST, floor))
    changing = given if verb == "add" else given[:2]
    return [_class(verb, device, ROOT.classid, band, rate, whole) for band, rate in changing]


def reserved(need_bytes_s: float, link_bps: float) -> float:
    """Bits a second for checkpoints that need so many bytes a second to be in time; infinity: as fast as it goes."""
    return min(need_bytes_s * 8 * OVERHEAD, (1 - OWNER_SHARE) * USABLE * link_bps)


def worth(given_bps: float, wanted_bps: float, link_bps: float) -> bool:
    """Whether the classes are to be changed: not for a trifle, but at once when there is no need any more."""
    if wanted_bps == given_bps:
        return False
    return wanted_bps == 0 or not given_bps or abs(wanted_bps - given_bps) > STEP * min(given_bps, link_bps)


def _class(verb: str, device: str, parent: str, band: Band, rate_bps: float, ceil_bps: float) -> Command:
    words = ["class", verb, "dev", device, "parent", parent, "classid", band.classid, "htb"]
    for name, burst, bps in (("rate", "burst", rate_bps), ("ceil", "cburst", ceil_bps)):
        words += [name, f"{max(8, int(bps))}bit", burst, f"{BURST_BYTES + int(bps / 8 * BURST_S)}b"]
    return Command((*words, "quantum", str(QUANTUM), "prio", str(band.prio)))

"""The invariants of membership (M1 to M13) and of its state (S1 to S6), each watched by a checker of its own.

A checker knows nothing of what causes faults. It is shown what nodes sign, send and learn, looks at all of them at one
instant every ten virtual seconds, and once more at the end. docs/protocol.md has the invariants in words; M4, M5, M7 and M8
are bounds on time, which `sim.gossip` waits for.
"""

from collections import defaultdict
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING

from membership.effects import MemberChanged
from membership.envelope import Recent
from membership.member import MemberTable
from membership.suspicion import Suspicion
from membership.wire import Alive, AnyEvidence, Left, decode_evidence

if TYPE_CHECKING:
    from sim.gossip import GossipNode, GossipWorld

BYTES_BUDGET = 20_000  # a node and second, on average over a run, in any weather
RUMOURS_KEPT = 4096
EVIDENCE_KEPT = 3000


class Violation(AssertionError):
    """An invariant does not hold; the text names it, the nodes and the virtual time."""


class Checker:
    name = ""

    def wrote(self, world: "GossipWorld", node: "GossipNode", kind: str, payload: bytes, sealed: bytes) -> None:
        """`node` has signed something."""

    def sent(self, world: "GossipWorld", node: "GossipNode", data: bytes) -> None:
        """`node` sends a datagram."""

    def changed(self, world: "GossipWorld", node: "GossipNode", change: MemberChanged) -> None:
        """`node` believes something else of a member."""

    def audit(self, world: "GossipWorld") -> None:
        """All nodes at one instant."""

    def end(self, world: "GossipWorld") -> None:
        """After the last event."""

    def violated(self, world: "GossipWorld", text: str) -> Violation:
        return Violation(f"{self.name} at {world.kernel.now:.3f} s: {text}")


class OwnWord(Checker):
    """M1: what anybody holds of a member's life, its epoch, incarnation and farewell, that member has said itself."""

    name = "M1"

    def __init__(self) -> None:
        self._said: dict[bytes, set[tuple[int, int]]] = defaultdict(set)
        self._left: set[tuple[bytes, int, int]] = set()

    def wrote(self, world: "GossipWorld", node: "GossipNode", kind: str, payload: bytes, sealed: bytes) -> None:
        if kind != "member":
            return
        evidence = decode_evidence(node.id, payload)
        if isinstance(evidence, Alive):
            self._said[node.id].add((evidence.epoch, evidence.incarnation))
        elif isinstance(evidence, Left):
            self._left.add((node.id, evidence.epoch, evidence.incarnation))

    def audit(self, world: "GossipWorld") -> None:
        for node in world.nodes:
            for member in node.core.swim.table.all() if node.up else ():
                if (member.epoch, member.incarnation) not in self._said[member.node]:
                    raise self.violated(
                        world, f"{node.name} holds a life of {_name(world, member.node)} that it never had"
                    )
                if member.state == "left" and (member.node, member.epoch, member.incarnation) not in self._left:
                    raise self.violated(
                        world, f"{node.name} holds that {_name(world, member.node)} left; it never said so"
                    )


class OnlyForward(Checker):
    """M2: within one life of an observer, what it holds of a member only advances."""

    name = "M2"

    def __init__(self) -> None:
        self._seen: dict[tuple[bytes, int, bytes], tuple[int, int, int]] = {}

    def audit(self, world: "GossipWorld") -> None:
        for node in world.nodes:
            for member in node.core.swim.table.all() if node.up else ():
                key = (node.id, node.life, member.node)
                if member.order < self._seen.get(key, member.order):
                    raise self.violated(world, f"{node.name} went back on {_name(world, member.node)}")
                self._seen[key] = member.order


class OrderFree(Checker):
    """M3: the evidence of the whole run, in other orders and with repetitions, gives one table."""

    name = "M3"

    def __init__(self) -> None:
        self._first: dict[bytes, AnyEvidence] = {}
        self._evidence: list[AnyEvidence] = []

    def wrote(self, world: "GossipWorld", node: "GossipNode", kind: str, payload: bytes, sealed: bytes) -> None:
        if kind == "member" and len(self._evidence) < EVIDENCE_KEPT:
            evidence = decode_evidence(node.id, payload)
            self._evidence.append(evidence)
            if isinstance(evidence, Alive):
                self._first.setdefault(evidence.node, evidence)

    def end(self, world: "GossipWorld") -> None:
        rng = Random(world.seed)
        tables = set()
        for _ in range(3):
            table = MemberTable(1000)
            rng.shuffle(self._evidence)
            # Whom nobody has heard of cannot be accused: every table begins with each member's first word.
            for evidence in [*self._first.values(), *self._evidence, *self._evidence[:50]]:
                table.apply(evidence, b"", 0.0)
            tables.add(tuple(sorted((member.node, member.order) for member in table.all())))
        if len(tables) != 1:
            raise self.violated(world, "the order in which evidence arrives decides what is believed")


class NeverOwnDeath(Checker):
    """M6: a node that runs holds itself alive, and its word outranks all that others hold against it once it has heard that."""

    name = "M6"

    def audit(self, world: "GossipWorld") -> None:
        for node in world.nodes:
            me = node.core.swim.table.get(node.id) if node.up else None
            if me is not None and me.state != "alive" and not node.core.swim.left:
                raise self.violated(world, f"{node.name} holds itself {me.state}")


class Bounds(Checker):
    """M9: packets fit, queues and tables have bounds, a node's share of the network is small, whoever spams."""

    name = "M9"

    def sent(self, world: "GossipWorld", node: "GossipNode", data: bytes) -> None:
        if len(data) > world.config.packet_bytes:
            raise self.violated(world, f"{node.name} sent {len(data)} bytes in one packet")

    def audit(self, world: "GossipWorld") -> None:
        for node in world.nodes:
            if not node.up:
                continue
            swim = node.core.swim
            if len(swim.rumours) > RUMOURS_KEPT or len(swim.table) > world.config.max_members:
                raise self.violated(world, f"{node.name} has {len(swim.rumours)} rumours, {len(swim.table)} members")
            if len(swim.relays) > 2000 or len(node.core._strangers) > 600:
                raise self.violated(world, f"{node.name} lets what others ask of it grow without bound")

    def end(self, world: "GossipWorld") -> None:
        share = world.bytes_carried / len(world.nodes) / max(60.0, world.kernel.now)
        if share > BYTES_BUDGET:
            raise self.violated(world, f"{share:.0f} bytes a second and node")


class Hostile(Checker):
    """M10 and M11: bytes that no member signed for this node, and packets it has had before, change nothing it knows.

    The window of recent packets is emptied first, so that it is the order of evidence that holds, not the window.
    """

    name = "M10"

    def __init__(self) -> None:
        self.tried = 0

    def audit(self, world: "GossipWorld") -> None:
        rng = world.streams.get("checkers", "hostile")
        running = [node for node in world.nodes if node.up and not node.still and node.taken]
        if not running:
            return
        node = rng.choice(running)
        again = rng.sample(node.taken, min(10, len(node.taken)))
        for _ in range(2):
            # The first may teach it what it could not verify when it came.
            before = _knowledge(node)
            node.core._packets = Recent(8192)
            for data, source in again:
                node.core.on_datagram(data, source)
        if _knowledge(node) != before:
            raise self.violated(world, f"(M11) packets that {node.name} had before taught it something")
        other = rng.choice(world.nodes)
        for data, _ in again:
            spoilt = bytearray(data.ljust(100, b"\0"))
            spoilt[rng.randrange(9, len(spoilt))] ^= 1 << rng.randrange(8)
            node.core.on_datagram(bytes(spoilt), other.address)
            if other is not node and other.up:
                other_before = _knowledge(other)
                other.core.on_datagram(data, node.address)
                if _knowledge(other) != other_before:
                    raise self.violated(world, f"{other.name} took in what was signed for {node.name}")
            self.tried += 1
        if _knowledge(node) != before:
            raise self.violated(world, f"altered packets taught {node.name} something")


class NoFalseDeath(Checker):
    """M12: with losses and fewer than a quarter of the nodes standing still, no healthy node is given up by a healthy one."""

    name = "M12"
    healthy_s = 60.0  # since it stood still last: what it missed has reached it again

    def changed(self, world: "GossipWorld", node: "GossipNode", change: MemberChanged) -> None:
        if change.state != "dead" or not world.mix.gentle or world.kernel.now >= world.mix.until_s:
            return
        subject = world.by_id[change.node]
        if subject.up and min(node.healthy_for_s, subject.healthy_for_s) > self.healthy_s:
            raise self.violated(world, f"{node.name} gave up {subject.name}; both were healthy")


class Deadlines(Checker):
    """M13: a suspicion's deadline lies within its bounds, and only comes nearer."""

    name = "M13"

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Suspicion, float]] = {}

    def audit(self, world: "GossipWorld") -> None:
        watched: dict[int, tuple[Suspicion, float]] = {}
        for node in world.nodes:
            for suspicion in node.core.swim._suspicions.values() if node.up else ():
                earliest, latest = suspicion.bounds
                deadline = suspicion.deadline
                if not earliest <= deadline <= latest:
                    raise self.violated(world, f"{node.name} waits until {deadline}, not {earliest} to {latest}")
                if deadline > self._latest.get(id(suspicion), (suspicion, deadline))[1]:
                    raise self.violated(world, f"{node.name} put a deadline off")
                watched[id(suspicion)] = (suspicion, deadline)  # kept, so that the id stays its own
        self._latest = watched


class SingleWriter(Checker):
    """S1 and S6: every section anybody holds is, byte for byte, one its owner has published; never half of one.

    And what a node holds of itself is what it said last in this life, no former one's word.
    """

    name = "S1"

    def __init__(self) -> None:
        self._published: set[bytes] = set()

    def wrote(self, world: "GossipWorld", node: "GossipNode", kind: str, payload: bytes, sealed: bytes) -> None:
        if kind == "record":
            self._published.add(node.id + blake2b(sealed, digest_size=16).digest())

    def audit(self, world: "GossipWorld") -> None:
        for node in world.nodes:
            for record in node.core.records._all() if node.up else ():
                if record.node + blake2b(record.sealed, digest_size=16).digest() not in self._published:
                    raise self.violated(world, f"{node.name} holds {record.section} of nobody's making")
            for section, version in node.core._versions.items() if node.up else ():
                own = node.core.records.get(node.id, section, node.unix())
                if own is not None and own.order != (node.core.swim.epoch, version):
                    raise self.violated(world, f"{node.name} lets a former life speak for it in {section}")


class SectionsForward(Checker):
    """S2: within one life of a replica, each section only advances, or ends.

    What ended may come back as its owner's former life has said it, until the owner hears of that.
    """

    name = "S2"

    def __init__(self) -> None:
        self._seen: dict[tuple[bytes, int, bytes, str], tuple[int, int]] = {}

    def audit(self, world: "GossipWorld") -> None:
        for node in world.nodes:
            for record in node.core.records._all() if node.up else ():
                key = (node.id, node.life, record.node, record.section)
                epoch, version = self._seen.get(key, record.order)
                if record.epoch == epoch and record.version < version:
                    raise self.violated(world, f"{node.name} went back on {record.section}")
                self._seen[key] = record.order


class Roots(Checker):
    """S3: equal roots mean equal state, and the other way round."""

    name = "S3"

    def audit(self, world: "GossipWorld") -> None:
        states: dict[bytes, tuple[bytes, str]] = {}
        by_state: dict[bytes, bytes] = {}
        for node in world.nodes:
            if not node.up:
                continue
            root, state = node.core.swim.root(), _state(node)
            known = states.setdefault(root, (state, node.name))
            if known[0] != state:
                raise self.violated(world, f"{node.name} and {known[1]} have one root for different states")
            if by_state.setdefault(state, root) != root:
                raise self.violated(world, f"{node.name} has another root for a state that another has too")


class Expired(Checker):
    """S4: what has expired is not served, and does not stay."""

    name = "S4"

    def audit(self, world: "GossipWorld") -> None:
        for node in world.nodes:
            if not node.up or node.still:
                continue
            now = node.unix()
            served = [*node.core.records.section("facts", now), *node.core.records.section("jobs/", now)]
            if any(record.not_after_unix <= now for record in served):
                raise self.violated(world, f"{node.name} serves what has expired")
            if node.healthy_for_s > 60 and any(r.not_after_unix < now - 60 for r in node.core.records._all()):
                raise self.violated(world, f"{node.name} keeps what has expired")


class Revoked(Checker):
    """S5: from the moment a node knows of a revocation, nothing new of that key is acted on there."""

    name = "S5"

    def __init__(self) -> None:
        self._frozen: dict[tuple[bytes, int, bytes], frozenset[object]] = {}

    def audit(self, world: "GossipWorld") -> None:
        for node in world.nodes:
            for outcast in node.core.trust.revoked if node.up else ():
                if outcast == node.id:
                    continue
                key = (node.id, node.life, outcast)
                now = _said_by(node, outcast)
                known = self._frozen.setdefault(key, now)
                if not now <= known:
                    raise self.violated(
                        world, f"{node.name} acted on the word of {_name(world, outcast)}, who was revoked"
                    )


def all_checkers() -> list[Checker]:
    return [
        OwnWord(),
        OnlyForward(),
        OrderFree(),
        NeverOwnDeath(),
        Bounds(),
        Hostile(),
        NoFalseDeath(),
        Deadlines(),
        SingleWriter(),
        SectionsForward(),
        Roots(),
        Expired(),
        Revoked(),
    ]


def _name(world: "GossipWorld", node: bytes) -> str:
    return world.by_id[node].name if node in world.by_id else node.hex()[:8]


def _knowledge(node: "GossipNode") -> bytes:
    """All that a node holds of others, but for itself: a refutation of its own is allowed to be news."""
    digest = blake2b(digest_size=16)
    for member in node.core.swim.table.all():
        if member.node != node.id:
            digest.update(member.node + b"%d.%d.%d" % member.order)
    for record in node.core.records._all():
        if record.node != node.id:
            digest.update(record.node + record.section.encode() + b"%d.%d" % record.order)
    for outcast in sorted(node.core.trust.revoked):
        digest.update(outcast)
    return digest.digest()


def _state(node: "GossipNode") -> bytes:
    """What a root speaks of: who is present, in which life, and all sections."""
    digest = blake2b(digest_size=16)
    for member in sorted(node.core.swim.table.present(), key=lambda m: m.node):
        digest.update(member.node + b"%d.%d" % (member.epoch, member.incarnation))
    for entry in sorted(node.core.records.digest()):
        digest.update(repr(entry).encode())
    return digest.digest()


def _said_by(node: "GossipNode", author: bytes) -> frozenset[object]:
    """What a node holds on this author's own word."""
    member = node.core.swim.table.get(author)
    life = {(member.epoch, member.incarnation)} if member is not None else set()
    records = {(r.section, r.epoch, r.version) for r in node.core.records._all() if r.node == author}
    return frozenset(life | records)

"""Checkers of the invariants of membership (M1 to M13) and of its records (S1 to S6); docs/reference/protocol.md states them.

A checker knows nothing of the injected faults. It sees what nodes sign, send and learn as it happens, all nodes together at each
audit, and the final state. M4, M5, M7 and M8 are bounds on time: the run in `sim.protocol.membership` waits for them itself.
"""

from collections import defaultdict
from hashlib import blake2b
from random import Random

from membership.effects import MemberChanged
from membership.envelope import Recent
from membership.member import MemberTable
from membership.suspicion import Suspicion
from membership.wire import Alive, AnyEvidence, Left, decode_evidence
from sim.protocol.membership import Checker, MembershipNode, MembershipWorld

BYTES_BUDGET = 20_000  # bytes a second and node, on average over a run, under all faults
RUMOURS_KEPT = 4096
EVIDENCE_KEPT = 3000


class OwnStatements(Checker):
    """M1: every epoch, incarnation and departure that a node holds of a member was announced by that member itself.

    Found by: accusations that count though they name what their subject never announced.
    """

    name = "M1"

    def __init__(self) -> None:
        self._said: dict[bytes, set[tuple[int, int]]] = defaultdict(set)
        self._left: set[tuple[bytes, int, int]] = set()

    def signed(self, world: MembershipWorld, node: MembershipNode, kind: str, payload: bytes, sealed: bytes) -> None:
        if kind != "member":
            return
        evidence = decode_evidence(node.id, payload)
        if isinstance(evidence, Alive):
            self._said[node.id].add((evidence.epoch, evidence.incarnation))
        elif isinstance(evidence, Left):
            self._left.add((node.id, evidence.epoch, evidence.incarnation))

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            for member in node.core.swim.table.all() if node.up else ():
                if (member.epoch, member.incarnation) not in self._said[member.node]:
                    raise self.violated(
                        world, f"{node.name} holds an incarnation that {_name(world, member.node)} never announced"
                    )
                if member.state == "left" and (member.node, member.epoch, member.incarnation) not in self._left:
                    raise self.violated(
                        world, f"{node.name} believes that {_name(world, member.node)} left; it never announced that"
                    )


class MonotonicBelief(Checker):
    """M2: within one run of an observer, its belief about a member only advances.

    Found by: a member table that accepts older evidence.
    """

    name = "M2"

    def __init__(self) -> None:
        self._seen: dict[tuple[bytes, int, bytes], tuple[int, int, int]] = {}

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            for member in node.core.swim.table.all() if node.up else ():
                key = (node.id, node.life, member.node)
                if member.order < self._seen.get(key, member.order):
                    raise self.violated(world, f"{node.name} regressed on {_name(world, member.node)}")
                self._seen[key] = member.order


class OrderIndependence(Checker):
    """M3: the same evidence, in any order and with repetitions, gives the same table.

    Found by: a member table that accepts older evidence.
    """

    name = "M3"

    def __init__(self) -> None:
        self._first: dict[bytes, AnyEvidence] = {}
        self._evidence: list[AnyEvidence] = []

    def signed(self, world: MembershipWorld, node: MembershipNode, kind: str, payload: bytes, sealed: bytes) -> None:
        if kind == "member" and len(self._evidence) < EVIDENCE_KEPT:
            evidence = decode_evidence(node.id, payload)
            self._evidence.append(evidence)
            if isinstance(evidence, Alive):
                self._first.setdefault(evidence.node, evidence)

    def end(self, world: MembershipWorld) -> None:
        rng = Random(world.seed)
        tables = set()
        for _ in range(3):
            table = MemberTable(1000)
            rng.shuffle(self._evidence)
            # An unknown member cannot be accused, so every table starts with each member's first announcement.
            for evidence in [*self._first.values(), *self._evidence, *self._evidence[:50]]:
                table.apply(evidence, b"", 0.0)
            tables.add(tuple(sorted((member.node, member.order) for member in table.all())))
        if len(tables) != 1:
            raise self.violated(world, "the same evidence in another order gives another table")


class AliveToItself(Checker):
    """M6: a running node believes itself alive; it refutes every accusation that it has heard.

    Found by: nodes that do not refute (which M4 reports first).
    """

    name = "M6"

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            me = node.core.swim.table.get(node.id) if node.up else None
            if me is not None and me.state != "alive" and not node.core.swim.left:
                raise self.violated(world, f"{node.name} believes itself {me.state}")


class Bounds(Checker):
    """M9: packets fit into `packet_bytes`, queues and tables are bounded, and a node sends at most BYTES_BUDGET a second.

    Found by: packets of more than 1200 bytes.
    """

    name = "M9"

    def sent(self, world: MembershipWorld, node: MembershipNode, data: bytes) -> None:
        if len(data) > world.config.packet_bytes:
            raise self.violated(world, f"{node.name} sent {len(data)} bytes in one packet")

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            if not node.up:
                continue
            swim = node.core.swim
            if len(swim.rumours) > RUMOURS_KEPT or len(swim.table) > world.config.max_members:
                raise self.violated(world, f"{node.name} has {len(swim.rumours)} rumours, {len(swim.table)} members")
            if len(swim.relays) > 2000 or len(node.core._unknown) > 600:
                raise self.violated(world, f"{node.name} has unbounded queues of requests from others")

    def end(self, world: MembershipWorld) -> None:
        share = world.bytes_carried / len(world.nodes) / max(60.0, world.kernel.now)
        if share > BYTES_BUDGET:
            raise self.violated(world, f"each node sends {share:.0f} bytes a second")


class HostilePackets(Checker):
    """M10 and M11: bytes that no member signed for this node, and packets received before, do not change what it knows.

    The window of recent packets is cleared first, so that the order of evidence protects the node, not the window.
    Found by: signatures that are not checked; a member table that accepts older evidence.
    """

    name = "M10"

    def audit(self, world: MembershipWorld) -> None:
        rng = world.streams.get("checkers", "hostile")
        running = [node for node in world.nodes if node.up and not node.stalled and node.taken]
        if not running:
            return
        node = rng.choice(running)
        again = rng.sample(node.taken, min(10, len(node.taken)))
        for _ in range(2):
            # The first pass may teach the node what it could not verify when the packet came.
            before = _knowledge(node)
            node.core._packets = Recent(8192)
            for data, source in again:
                node.core.on_datagram(data, source)
        if _knowledge(node) != before:
            raise self.violated(world, f"(M11) packets received before changed what {node.name} knows")
        other = rng.choice(world.nodes)
        for data, _ in again:
            corrupted = bytearray(data.ljust(100, b"\0"))
            corrupted[rng.randrange(9, len(corrupted))] ^= 1 << rng.randrange(8)
            node.core.on_datagram(bytes(corrupted), other.address)
            if other is not node and other.up:
                other_before = _knowledge(other)
                other.core.on_datagram(data, node.address)
                if _knowledge(other) != other_before:
                    raise self.violated(world, f"{other.name} accepted a packet signed for {node.name}")
        if _knowledge(node) != before:
            raise self.violated(world, f"altered packets changed what {node.name} knows")


class NoFalseDeath(Checker):
    """M12: with packet loss and fewer than a quarter of the nodes stalled, no healthy node declares a healthy node dead.

    Found by: membership without Lifeguard's local health and confirmations; verdicts of others that are believed.
    """

    name = "M12"
    healthy_s = 60.0  # after a stall, a node counts as healthy again: it has received what it missed

    def changed(self, world: MembershipWorld, node: MembershipNode, change: MemberChanged) -> None:
        if change.state != "dead" or not world.faults.gentle or world.kernel.now >= world.faults.until_s:
            return
        subject = world.by_id[change.node]
        if subject.up and min(node.healthy_for_s, subject.healthy_for_s) > self.healthy_s:
            raise self.violated(world, f"{node.name} declared {subject.name} dead; both were healthy")


class SuspicionDeadlines(Checker):
    """M13: the deadline of a suspicion lies within its bounds and only moves earlier.

    Found by: suspicions that move their deadline back.
    """

    name = "M13"

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Suspicion, float]] = {}

    def audit(self, world: MembershipWorld) -> None:
        watched: dict[int, tuple[Suspicion, float]] = {}
        for node in world.nodes:
            for suspicion in node.core.swim._suspicions.values() if node.up else ():
                earliest, latest = suspicion.bounds
                deadline = suspicion.deadline
                if not earliest <= deadline <= latest:
                    raise self.violated(
                        world, f"{node.name} has a deadline of {deadline}, outside {earliest} to {latest}"
                    )
                if deadline > self._latest.get(id(suspicion), (suspicion, deadline))[1]:
                    raise self.violated(world, f"{node.name} moved a deadline back")
                watched[id(suspicion)] = (suspicion, deadline)  # holding the object keeps its id unique
        self._latest = watched


class SingleWriter(Checker):
    """S1 and S6: every section that a node holds is byte for byte one that its owner published, never a part of one.

    A node's own sections are those of its present run, not of an earlier one. Found by: tables that alter a record.
    """

    name = "S1"

    def __init__(self) -> None:
        self._published: set[bytes] = set()

    def signed(self, world: MembershipWorld, node: MembershipNode, kind: str, payload: bytes, sealed: bytes) -> None:
        if kind == "record":
            self._published.add(node.id + blake2b(sealed, digest_size=16).digest())

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            for record in node.core.records._all() if node.up else ():
                if record.node + blake2b(record.sealed, digest_size=16).digest() not in self._published:
                    raise self.violated(
                        world, f"{node.name} holds a section {record.section} that its owner never published"
                    )
            for section, version in node.core._versions.items() if node.up else ():
                own = node.core.records.get(node.id, section, node.unix())
                if own is not None and own.order != (node.core.swim.epoch, version):
                    raise self.violated(world, f"{node.name} holds its own section {section} from an earlier run")


class MonotonicSections(Checker):
    """S2: within one run of a replica, each section only advances, or ends.

    An expired section may return in the version of its owner's earlier run, until the owner learns of it.
    Found by: records ordered by falling version.
    """

    name = "S2"

    def __init__(self) -> None:
        self._seen: dict[tuple[bytes, int, bytes, str], tuple[int, int]] = {}

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            for record in node.core.records._all() if node.up else ():
                key = (node.id, node.life, record.node, record.section)
                epoch, version = self._seen.get(key, record.order)
                if record.epoch == epoch and record.version < version:
                    raise self.violated(world, f"{node.name} regressed on {record.section}")
                self._seen[key] = record.order


class EqualRoots(Checker):
    """S3: nodes have equal roots exactly if they have equal state.

    Found by: roots that leave the records out.
    """

    name = "S3"

    def audit(self, world: MembershipWorld) -> None:
        states: dict[bytes, tuple[bytes, str]] = {}
        by_state: dict[bytes, bytes] = {}
        for node in world.nodes:
            if not node.up:
                continue
            root, state = node.core.swim.root(), _state(node)
            known = states.setdefault(root, (state, node.name))
            if known[0] != state:
                raise self.violated(world, f"{node.name} and {known[1]} have equal roots for different states")
            if by_state.setdefault(state, root) != root:
                raise self.violated(world, f"{node.name} has another root than a node with the same state")


class ExpiredSections(Checker):
    """S4: expired sections are not served, and are removed.

    Found by: tables that never expire records.
    """

    name = "S4"

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            if not node.up or node.stalled:
                continue
            now = node.unix()
            served = [*node.core.records.section("facts", now), *node.core.records.section("jobs/", now)]
            if any(record.not_after_unix <= now for record in served):
                raise self.violated(world, f"{node.name} serves an expired section")
            if node.healthy_for_s > 60 and any(r.not_after_unix < now - 60 for r in node.core.records._all()):
                raise self.violated(world, f"{node.name} keeps an expired section")


class RevokedKeys(Checker):
    """S5: after a node learns of a revocation, nothing new signed by that key has an effect there.

    Found by: nodes that keep revoked members.
    """

    name = "S5"

    def __init__(self) -> None:
        self._frozen: dict[tuple[bytes, int, bytes], frozenset[object]] = {}

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            for outcast in node.core.trust.revoked if node.up else ():
                if outcast == node.id:
                    continue
                key = (node.id, node.life, outcast)
                now = _said_by(node, outcast)
                known = self._frozen.setdefault(key, now)
                if not now <= known:
                    raise self.violated(
                        world, f"{node.name} accepted new statements of {_name(world, outcast)}, which is revoked"
                    )


class CameThroughRevoked(Checker):
    """S7: on a node that knows of a revocation, nothing is a member that the key has admitted or endorsed, itself or through
    others, whatever renewals it had since.

    Found by: renewals that do not name the keys that a member came in through.
    """

    name = "S7"

    def audit(self, world: MembershipWorld) -> None:
        for node in world.nodes:
            if not node.up or not node.core.trust.revoked:
                continue
            for one, keys in world.bound_by.items():
                if not keys.isdisjoint(node.core.trust.revoked) and node.core.is_member(one):
                    text = f"{_name(world, one)} is a member at {node.name}, and came in through a revoked key"
                    raise self.violated(world, text)


def all_checkers() -> list[Checker]:
    return [
        OwnStatements(),
        MonotonicBelief(),
        OrderIndependence(),
        AliveToItself(),
        Bounds(),
        HostilePackets(),
        NoFalseDeath(),
        SuspicionDeadlines(),
        SingleWriter(),
        MonotonicSections(),
        EqualRoots(),
        ExpiredSections(),
        RevokedKeys(),
        CameThroughRevoked(),
    ]


def _name(world: MembershipWorld, node: bytes) -> str:
    return world.by_id[node].name if node in world.by_id else node.hex()[:8]


def _knowledge(node: MembershipNode) -> bytes:
    """Return a digest of what a node knows of others. Its own entry is left out: it may refute at any time."""
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


def _state(node: MembershipNode) -> bytes:
    """Return a digest of the state that a root covers: present members, their incarnations, and all sections."""
    digest = blake2b(digest_size=16)
    for member in sorted(node.core.swim.table.present(), key=lambda m: m.node):
        digest.update(member.node + b"%d.%d" % (member.epoch, member.incarnation))
    for entry in sorted(node.core.records.digest()):
        digest.update(repr(entry).encode())
    return digest.digest()


def _said_by(node: MembershipNode, author: bytes) -> frozenset[object]:
    """Return what a node holds that this author has signed."""
    member = node.core.swim.table.get(author)
    life = {(member.epoch, member.incarnation)} if member is not None else set()
    records = {(r.section, r.epoch, r.version) for r in node.core.records._all() if r.node == author}
    return frozenset(life | records)

"""Mesh view: what this node sees of the mesh, gathered for the job cores: members, adverts, disks and the queue."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from membership.events import MemberView
from membership.identity import NodeId, short_id
from membership.node import MembershipNode
from membership.records import Record
from membership.trust import PROVIDER
from mesh.consensus.view import Instant, View
from mesh.jobs.job_table import JobTable
from mesh.rpc.client import decode_facts
from mesh.util.boottime import boot_s
from placement.advert import Advert, AdvertError, decode_advert
from placement.observed import Caps, capped
from placement.queue import Patience
from placement.zones import Hierarchy, two_level_since

log = logging.getLogger(__name__)


class MeshView:
    """`caps` gives the limits to what nodes claim about their stays."""

    def __init__(
        self,
        me: NodeId,
        membership: MembershipNode,
        job_table: JobTable,
        caps: Callable[[], Mapping[bytes, Caps]],
    ) -> None:
        self._me, self._membership, self._job_table, self._caps = me, membership, job_table, caps
        self._adverts: dict[NodeId, tuple[Record, Advert | None, Caps | None, bytes]] = {}
        self._patience = Patience()
        self.last = View(me)
        self._two_level_since = 0

    def adverts(self) -> list[Advert]:
        """Return the valid advert of each provider that can be reached, with the nick and user that its certificate names."""
        found, all_caps = [], self._caps()
        present = {
            member.node_id: member
            for member in self._membership.members()
            if member.present and member.state != "unreachable" and PROVIDER in member.roles
        }
        for record in self._membership.records("advert"):
            if record.node in present:
                member = present[record.node]
                known = self._adverts.get(record.node)
                caps = all_caps.get(record.node)
                if known is None or known[0] is not record or known[2:] != (caps, member.user_key):
                    known = (record, _advert_of(record, member, caps), caps, member.user_key)
                    self._adverts[record.node] = known
                if known[1] is not None:
                    found.append(known[1])
        return found

    def disks(self) -> dict[NodeId, bytes]:
        """Return the name of each node's journal disk."""
        found = ((record.node, decode_facts(record.body)) for record in self._membership.records("facts"))
        return {node: facts.disk for node, facts in found if facts is not None and facts.disk}

    def look(self) -> View:
        """Build the present view of the mesh."""
        members = self._membership.members()
        alive = frozenset(m.node_id for m in members if m.present)
        leaving = frozenset(m.node_id for m in members if m.draining)
        left = frozenset(m.node_id for m in members if m.state == "left")
        adverts = tuple(sorted(self.adverts(), key=lambda advert: advert.node))
        if adverts == self.last.adverts:
            adverts = tuple(self.last.adverts)  # the same object, so that comparisons are fast
        hierarchy = self._hierarchy(members, adverts)
        view = View(self._me, alive, leaving, left, adverts, self.disks(), hierarchy=hierarchy)
        self.last = with_jobs(view, self._job_table, self._patience, time.monotonic(), time.time())
        return self.last

    def hierarchy(self) -> Hierarchy:
        """Return the present zones, and whether placement considers zones first."""
        return self._hierarchy(self._membership.members(), tuple(self.adverts()))

    def _hierarchy(self, members: Sequence[MemberView], adverts: tuple[Advert, ...]) -> Hierarchy:
        self._two_level_since = two_level_since(self._two_level_since, sum(m.present for m in members))
        leaving = frozenset(m.node_id for m in members if m.draining)
        return Hierarchy(self._two_level_since, adverts, {m.node_id: m.host for m in members}, leaving)


def with_jobs(view: View, job_table: JobTable, patience: Patience, now: float, now_unix: float) -> View:
    """Return the view with what is known of other jobs: their ends and, while any job waits, the queue and who runs.

    `now` is seconds of a monotonic clock.
    """
    ends, array_ends = job_table.ends, job_table.array_ends
    if not job_table.waiting:
        return replace(view, ends=ends, array_ends=array_ends)
    queue = job_table.queue(view.adverts, now_unix, patience.idle(now), view.hierarchy.rank)
    patience.saw(queue.kept, now)
    return replace(view, ends=ends, array_ends=array_ends, queue=queue, running=tuple(job_table.running))


def instant() -> Instant:
    """Read both clocks."""
    return Instant(boot_s(), time.time_ns() // 1_000_000)


def _advert_of(record: Record, member: MemberView, caps: Caps | None) -> Advert | None:
    try:
        advert = decode_advert(record.node, record.body)
        certified = replace(advert, nick=member.nick, user=member.user, user_key=member.user_key)
        return capped(certified, caps)
    except AdvertError as error:
        log.debug("ignored the advert of %s: %s", short_id(record.node), error)
    except Exception:  # a fault of this program: it must not hide all other nodes
        log.exception("ignored the advert of %s", short_id(record.node))
    return None

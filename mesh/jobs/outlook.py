"""What this node sees around it, put together for the job cores: members, adverts, disks, and who waits for what."""

import logging
import time
from collections.abc import Mapping, Sequence

from membership.events import MemberView
from membership.identity import NodeId, short_id
from membership.node import MembershipNode
from membership.records import Record
from membership.trust import PROVIDER
from mesh.api.peer import decode_facts
from mesh.jobs.board import Board
from mesh.jobs.view import View
from placement.advert import Advert, AdvertError, decode_advert
from placement.observed import Caps, believed
from placement.queue import Patience, Queue
from placement.zones import Hierarchy, two_level_since

log = logging.getLogger(__name__)


class Outlook:
    def __init__(self, me: NodeId, membership: MembershipNode, board: Board) -> None:
        self._me, self._membership, self._board = me, membership, board
        self._adverts: dict[NodeId, tuple[Record, Advert | None, Caps | None]] = {}
        self._patience = Patience()
        self.last = View(me)
        self._two_level_since = 0
        self.caps: Mapping[bytes, Caps] = {}  # how much is believed of what nodes say of their stays

    def adverts(self) -> list[Advert]:
        """The valid adverts of members who may lend and can be reached, one each."""
        found = []
        present = {
            member.node_id
            for member in self._membership.members()
            if member.present and member.state != "unreachable" and PROVIDER in member.roles
        }
        for record in self._membership.records("advert"):
            if record.node in present:
                known = self._adverts.get(record.node)
                caps = self.caps.get(record.node)
                if known is None or known[0] is not record or known[2] != caps:
                    told = _advert_of(record)
                    known = (record, None if told is None else believed(told, caps), caps)
                    self._adverts[record.node] = known
                if known[1] is not None:
                    found.append(known[1])
        return found

    def disks(self) -> dict[NodeId, bytes]:
        """On which disk each node keeps its promises."""
        found = ((record.node, decode_facts(record.body)) for record in self._membership.records("facts"))
        return {node: facts.disk for node, facts in found if facts is not None and facts.disk}

    def look(self) -> View:
        """The mesh as it is now."""
        members = self._membership.members()
        alive = frozenset(m.node_id for m in members if m.present)
        leaving = frozenset(m.node_id for m in members if m.draining)
        left = frozenset(m.node_id for m in members if m.state == "left")
        adverts = tuple(sorted(self.adverts(), key=lambda advert: advert.node))
        if adverts == self.last.adverts:
            adverts = tuple(self.last.adverts)  # the very same, so that comparing them is quick
        hierarchy = self._hierarchy(members, adverts)
        board, queue = self._board, None
        if board.waiting:
            queue = self._queue(hierarchy)
        stays = tuple(board.stays) if queue is not None else ()
        ends, array_ends, disks = board.ends, board.array_ends, self.disks()
        self.last = View(self._me, alive, leaving, left, adverts, disks, queue, ends, array_ends, stays, hierarchy)
        return self.last

    def hierarchy(self) -> Hierarchy:
        """The zones as they are now, and whether they come first."""
        return self._hierarchy(self._membership.members(), tuple(self.adverts()))

    def _hierarchy(self, members: Sequence[MemberView], adverts: tuple[Advert, ...]) -> Hierarchy:
        self._two_level_since = two_level_since(self._two_level_since, sum(m.present for m in members))
        leaving = frozenset(m.node_id for m in members if m.draining)
        return Hierarchy(self._two_level_since, adverts, {m.node_id: m.host for m in members}, leaving)

    def _queue(self, hierarchy: Hierarchy) -> Queue:
        now = time.monotonic()
        adverts = hierarchy.adverts
        queue = self._board.queue(adverts, time.time(), self._patience.idle(now), hierarchy.rank)
        self._patience.saw(queue.kept, now)
        return queue


def _advert_of(record: Record) -> Advert | None:
    try:
        return decode_advert(record.node, record.body)
    except AdvertError as error:
        log.debug("ignored the advert of %s: %s", short_id(record.node), error)
        return None

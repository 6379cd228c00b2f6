"""Who is let in at this node, and what is shown of those who wait: `admission` put to work on the mesh's sections."""

import logging
from pathlib import Path

import msgspec

from membership.admission import (
    ADMITTED,
    ADMITTED_KEPT,
    ADMITTED_TTL_S,
    PENDING,
    PENDING_TTL_S,
    Allowed,
    Knock,
    Porch,
    Waiting,
    decode_admitted,
    decode_waiting,
    encode_admitted,
    encode_waiting,
    read_allow_list,
)
from membership.core import Clock, Core
from membership.envelope import Seals
from membership.identity import Identity, NodeId, format_id
from membership.trust import ROLES, TrustError, admit_node

log = logging.getLogger(__name__)


class Policy(msgspec.Struct, frozen=True):
    """Whom a node that may admit lets in by itself: those on a list, or, `open`, everybody who knocks."""

    allow_list: Path | None = None
    open: bool = False


class Gate:
    def __init__(self, identity: Identity, core: Core, policy: Policy, problems: dict[str, str], clock: Clock) -> None:
        self._identity, self._core, self._policy = identity, core, policy
        self._problems, self._clock = problems, clock
        self._porch = Porch(identity, core.trust)
        self._shown_at = -1e9

    def answer(self, data: bytes, host: str) -> bytes:
        """The sealed answer to a sealed knock."""
        before, now = self._porch.waiting(), self._clock.boot()
        answer = self._porch.answer(data, host, self._core.chain, self._clock.unix(), self._decide)
        if self._porch.waiting() != before or now - self._shown_at > PENDING_TTL_S / 4:
            self._shown_at = now
            self._core.publish(PENDING, encode_waiting(self._porch.waiting()), PENDING_TTL_S, urgent=True)
        return answer

    def waiting(self) -> dict[NodeId, Waiting]:
        """Everybody who has knocked anywhere in the mesh, and is no member."""
        now_unix, admitted = self._clock.unix(), self._admitted()
        found: dict[NodeId, Waiting] = {}
        for record in self._core.records.section(PENDING, now_unix):
            for entry in decode_waiting(record.body):
                if self._core.trust.standing(entry.node, now_unix) is None and entry.node not in admitted:
                    found.setdefault(entry.node, entry)
        return found

    def approve(self, node: NodeId, nick: str, user: str, roles: tuple[str, ...] = ROLES, admit: bool = False) -> None:
        """Let in one who waits; TrustError if this node may not."""
        core, now_unix = self._core, self._clock.unix()
        signer = Seals(self._identity, core.trust.mesh_id)
        chain = admit_node(signer, core.trust, core.chain, node, nick, user, roles, admit, now_unix)
        mine = core.records.get(core.me, ADMITTED, now_unix)
        granted = decode_admitted(mine.body) if mine is not None else {}
        granted.pop(node, None)
        granted = dict([*granted.items(), (node, chain)][-ADMITTED_KEPT:])
        core.publish(ADMITTED, encode_admitted(granted), ADMITTED_TTL_S, urgent=True)

    def _decide(self, node: NodeId, knock: Knock) -> bytes:
        granted = self._admitted().get(node)
        me = self._core.trust.standing(self._core.me, self._clock.unix())
        if granted is None and me is not None and me.can_admit:
            allowed = self._allowed().get(node)
            if allowed is not None:
                self.approve(node, allowed.nick or knock.nick, allowed.user or knock.user, allowed.roles)
            elif self._policy.open:
                self.approve(node, knock.nick, knock.user)
                log.warning("let in %s (%s, %s): this mesh is open", knock.nick, knock.user, format_id(node))
            granted = self._admitted().get(node)
        return granted or b""

    def _allowed(self) -> dict[NodeId, Allowed]:
        """Read anew each time: the owner edits the list while the daemon runs. A mistake in it lets nobody in."""
        path = self._policy.allow_list
        self._problems.pop("allow list", None)
        try:
            return read_allow_list(path) if path is not None else {}
        except TrustError as error:
            self._problems["allow list"] = str(error)
            return {}

    def _admitted(self) -> dict[NodeId, bytes]:
        """All chains that admitters have granted lately. Who gets one checks it; others could only send it nonsense."""
        found: dict[NodeId, bytes] = {}
        seen = self._core.trust.seen()
        for record in self._core.records.section(ADMITTED, self._clock.unix()):
            if seen[record.node].can_admit:
                found |= decode_admitted(record.body)
        return found

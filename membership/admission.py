"""Admission: join requests, and the nodes that decide on them.

The requesting node knows nothing of the mesh, so the request and its answer are signed outside of any mesh. The answer shows
the genesis document and the answering member's certificates. Pending requests and decisions are published as sections, so that
a request made at any node reaches the node that decides:

- without an invite, any admitter: a person approves, or the allow list does;
- with an invite, the node that issued it, and no other. It writes the use of the invite to disk before it admits, so an invite
  admits as many machines as it says, and none after its end by that node's clock. An issuer that may not admit endorses the
  request after that, and admitters admit the machine to the issuer's user. The machine's own signature is its owner's consent:
  an endorsement is the request itself, with an invite of the endorser for a machine of its user.
"""

import asyncio
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from membership.addresses import address_group
from membership.core import Clock, Core
from membership.envelope import EnvelopeError, MeshSealer, open_envelope, seal
from membership.framing import connected, read_frame, write_frame
from membership.identity import Identity, NodeId, format_id, parse_id
from membership.malformed import MALFORMED
from membership.ratelimit import TokenBuckets
from membership.reconcile import FrameError
from membership.records import MAX_BODY_BYTES, TRUST
from membership.snapshot import UsedInvites
from membership.trust import (
    MAX_NAME_BYTES,
    MAX_THROUGH,
    ROLES,
    Credentials,
    Grant,
    TrustError,
    TrustStore,
    User,
    admit_node,
    renew_chain,
)

PENDING = "pending"  # section with the join requests of strangers made at a node
INVITED = "invited"  # section with the join requests made with an invite
ENDORSED = "endorsed"  # section with the join requests of machines that a member adds to its user
DECIDED = "admitted"  # section with the chains that an admitter has granted, and the refusals of invites
MAX_PENDING, MAX_PENDING_PER_ADDRESS = 32, 4  # strangers; one laboratory asks at a time
MAX_INVITED, MAX_INVITED_PER_ISSUER = 20, 16  # so that they fit into a section
LIST_HEAD_BYTES = 3  # of an array of up to 65,535 elements (MessagePack)
MAX_ENDORSED = 16
MAX_MACHINES = 32  # of a user, admitted by endorsements; an approval may add more (own choice)
REQUESTS_PER_S = 5.0  # of one address, before signatures are checked; `mesh join` sends one in two seconds
PENDING_EXPIRY_S = 3600.0  # after the last request of the node
# Minimum interval of changed lists, so that requests are no flood of gossip: of strangers, for whom a person decides, and others.
PUBLISH_S = {PENDING: 10.0, INVITED: 1.0}
PENDING_TTL_S, DECIDED_TTL_S = PENDING_EXPIRY_S, 7 * 86_400.0
JOIN_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 4096  # with the longest names and the proof of a large RSA key it has 2,000
OPENED = 1024  # verified requests kept: each look at the sections of all nodes verifies only new ones (own choice)
_NO_MESH = b"\0" * 16
_MARK = b"J"

log = logging.getLogger(__name__)


class JoinRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`grant` and `proof`, of a machine with an invite: what the issuer signed, and the signature of the invite's key.

    `ssh_proof`: the signature by the SSH key, if the invite is bound to one.
    """

    nonce: int
    nick: str
    user: str
    grant: bytes
    proof: bytes
    ssh_proof: bytes


class JoinAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`chain` belongs to the answering member, `granted` to the requesting node once it is admitted; `answers` is its nonce.

    `problem` is the reason of a refusal.
    """

    answers: int
    state: Literal["waiting", "admitted", "full", "revoked", "refused"]
    genesis: bytes
    chain: bytes
    granted: bytes = b""
    problem: str = ""


class PendingJoin(msgspec.Struct, frozen=True):
    """A machine's join request, the address that it came from, and since when it waits.

    `sealed` is the request as the machine signed it: a node that publishes it can change nothing that it asks for.
    """

    node: bytes
    nick: str
    user: str
    host: str
    since_unix: int
    sealed: bytes
    grant: bytes = b""
    proof: bytes = b""
    ssh_proof: bytes = b""


class Published(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pending join in a section. `host` and `since_unix` are the word of the node that publishes it."""

    sealed: bytes
    host: str
    since_unix: int


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """A granted chain, or the reason of a refusal; with neither, the request waits.

    A refusal is of the invite with this `grant_digest`, and of no other; nodes of 0.1 do not name it.
    """

    chain: bytes = b""
    problem: str = ""
    grant_digest: bytes = b""


class Allowed(msgspec.Struct, frozen=True):
    """A line of an allow list: a node admitted without approval. `nick` and `user`, if given, replace what it asks for."""

    node: bytes
    nick: str = ""
    user: str = ""
    roles: tuple[str, ...] = ROLES


class AdmissionPolicy(msgspec.Struct, frozen=True):
    """Nodes that an admitter admits by itself: those on its allow list or, if `open`, every node that asks."""

    allow_list: Path | None = None
    open: bool = False


_request_decoder = msgspec.msgpack.Decoder(JoinRequest)
_answer_decoder = msgspec.msgpack.Decoder(JoinAnswer)
_published_decoder = msgspec.msgpack.Decoder(list[Published])
_decisions_decoder = msgspec.msgpack.Decoder(dict[bytes, Decision])


class WaitingList:
    """Pending requests, oldest first, in `most` places, of which one group (an address, an issuer) has at most `most_of_one`.

    A request that is larger than a place takes several, so that a full list fits into a section. A newcomer to a full list takes
    the places of the newest requests of the largest group, if its own group is smaller. So a group cannot keep others out, and a
    request that is the only one of its group stays.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._place_bytes = (MAX_BODY_BYTES - LIST_HEAD_BYTES) // most
        self._entries: OrderedDict[NodeId, tuple[PendingJoin, str, float]] = OrderedDict()

    def entries(self) -> list[PendingJoin]:
        return [entry for entry, *_ in self._entries.values()]

    def keep(self, entry: PendingJoin, group: str, now_unix: float) -> bool:
        """Add or refresh a request; False if there is no place for it."""
        known, needed = self._entries.get(entry.node), self._places(entry)
        if known is not None and needed <= self._places(known[0]):
            # A machine signs each of its requests anew; the first of equal ones stays, so that the section does not change.
            same = msgspec.structs.replace(entry, since_unix=known[0].since_unix, sealed=known[0].sealed)
            if same != known[0]:
                same = msgspec.structs.replace(same, sealed=entry.sealed)
            self._entries[entry.node] = (same, known[1], now_unix)
            return True
        self.drop(entry.node)
        sizes = Counter[str]()
        for one, its_group, _ in self._entries.values():
            sizes[its_group] += self._places(one)
        if sizes[group] + needed > self._most_of_one:
            return False
        while sizes.total() + needed > self._most:
            largest, size = sizes.most_common(1)[0]
            if size <= sizes[group] + needed:
                return False
            newest = next(node for node in reversed(self._entries) if self._entries[node][1] == largest)
            sizes[largest] -= self._places(self._entries.pop(newest)[0])
        self._entries[entry.node] = (entry, group, now_unix)
        return True

    def _places(self, entry: PendingJoin) -> int:
        return -(-len(encode_pending([entry])) // self._place_bytes)

    def drop(self, node: NodeId) -> None:
        self._entries.pop(node, None)

    def expire(self, is_member: Callable[[NodeId], bool], now_unix: float) -> None:
        """Drop nodes that have not asked again for an hour, and nodes that have become members."""
        for node, (_, _, last) in list(self._entries.items()):
            if now_unix - last > PENDING_EXPIRY_S or is_member(node):
                del self._entries[node]


class JoinRequests:
    """Join requests pending at this node. Strangers and machines with an invite do not compete for places."""

    def __init__(self, identity: Identity, trust: TrustStore) -> None:
        self._identity, self._trust = identity, trust
        self._strangers = WaitingList(MAX_PENDING, MAX_PENDING_PER_ADDRESS)
        self._invited = WaitingList(MAX_INVITED, MAX_INVITED_PER_ISSUER)

    def answer(
        self,
        data: bytes,
        host: str,
        chain: bytes,
        now_unix: float,
        decide: Callable[[PendingJoin], Decision],
    ) -> bytes:
        """Return the sealed answer to a sealed request from `host`; EnvelopeError or FrameError for anything else."""
        sealed = data.removeprefix(_MARK)
        entry, nonce = open_join_request(sealed, host, int(now_unix))
        state, decision = self._judge(entry, now_unix, decide)
        answer = JoinAnswer(nonce, state, self._trust.genesis_bytes, chain, decision.chain, decision.problem)
        return seal(self._identity, _NO_MESH, "join-answer", msgspec.msgpack.encode(answer))

    def pending(self) -> list[PendingJoin]:
        return self._strangers.entries()

    def invited(self) -> list[PendingJoin]:
        return self._invited.entries()

    def expire(self, now_unix: float) -> None:
        for waiting in (self._strangers, self._invited):
            waiting.expire(lambda node: self._trust.credentials(node, now_unix) is not None, now_unix)

    def _judge(
        self, entry: PendingJoin, now_unix: float, decide: Callable[[PendingJoin], Decision]
    ) -> tuple[Literal["waiting", "admitted", "full", "revoked", "refused"], Decision]:
        self.expire(now_unix)
        if entry.node in self._trust.revoked:
            return "revoked", Decision()
        waiting, group = self._strangers, address_group(entry.host)
        if entry.grant:
            try:
                issuer, _ = verify_invited(self._trust, entry, now_unix)
            except TrustError as error:
                return "refused", Decision(problem=str(error))
            waiting, group = self._invited, issuer.hex()
        decision = decide(entry)
        if decision.chain:
            waiting.drop(entry.node)
            return "admitted", decision
        if decision.problem:
            waiting.drop(entry.node)
            return "refused", decision
        return "waiting" if waiting.keep(entry, group, now_unix) else "full", decision


def verify_invited(trust: TrustStore, entry: PendingJoin, now_unix: float) -> tuple[NodeId, Grant]:
    """Return the issuer and the grant of a request with an invite; TrustError if it proves nothing or the invite has ended."""
    issuer, grant = trust.open_grant(entry.grant)
    if not trust.proves(grant, entry.proof, entry.node, entry.user):
        raise TrustError("the request is not signed with the invite's key")
    if not trust.proves_ssh_key(grant, entry.ssh_proof, entry.node):
        raise TrustError(
            "the request is not signed with the SSH key that the invite is for: see `mesh join --ssh-identity`"
        )
    if now_unix > grant.not_after:
        raise TrustError("the invite has expired: ask for a new one (`mesh member invite`)")
    if trust.credentials(issuer, now_unix) is None:
        raise TrustError("the node that made the invite is no member of the mesh: ask another one for an invite")
    return issuer, grant


class Admission:
    """Answers join requests at this node, publishes them, and decides on those that are this node's to decide.

    `problems` is shared with the node: it maps a topic to a message for the user.
    """

    def __init__(
        self,
        identity: Identity,
        core: Core,
        policy: AdmissionPolicy,
        used: UsedInvites,
        problems: dict[str, str],
        clock: Clock,
    ) -> None:
        self._identity, self._core, self._policy, self._used = identity, core, policy, used
        self._problems, self._clock = problems, clock
        self._requests = JoinRequests(identity, core.trust)
        self._buckets = TokenBuckets(REQUESTS_PER_S)
        self._published: dict[str, list[PendingJoin]] = {PENDING: [], INVITED: []}
        self._published_at = dict.fromkeys(self._published, -1e9)
        self._look = False

    def answer(self, data: bytes, host: str) -> bytes:
        """Return the sealed answer to a sealed join request from `host`."""
        if not self._buckets.allow(address_group(host), self._clock.boot()):
            raise FrameError("too many join requests from one address")
        answer = self._requests.answer(data, host, self._core.chain, self._clock.unix(), self._decide)
        self._publish_pending()
        return answer

    def noticed(self, section: str) -> None:
        """Note that another node has published join requests."""
        self._look = self._look or section in {INVITED, ENDORSED}

    def tick(self) -> None:
        """Decide on requests made at other nodes, and publish changed lists; to be called each second."""
        self._requests.expire(self._clock.unix())
        self._publish_pending()
        if self._look and not self._used.held:
            self._look = False
            self._decide_elsewhere()

    def pending(self) -> dict[NodeId, PendingJoin]:
        """Return the strangers' requests pending at any node of the mesh."""
        now_unix, found = self._clock.unix(), dict[NodeId, PendingJoin]()
        for record in self._core.records.section(PENDING, now_unix):
            for entry in decode_pending(record.body, MAX_PENDING):
                is_open = not entry.grant and self._core.trust.credentials(entry.node, now_unix) is None
                if is_open and not self._decision(entry).chain:
                    found.setdefault(entry.node, entry)
        return found

    def approve(
        self,
        node: NodeId,
        nick: str,
        user: str,
        roles: tuple[str, ...] = (),
        admit: bool = False,
        existing: bool = False,
    ) -> None:
        """Admit a node and publish its chain; with `admit` it may admit others. TrustError if this node may not do that.

        With `existing` it becomes a machine of the user who has the name. Without `roles`, a former member has those that it had,
        and another node both.
        """
        trust = self._core.trust
        former = trust.seen().get(node)
        bound = trust.bind(user, node, self._clock.unix(), existing)
        self._admit(node, nick, bound, roles or (ROLES if former is None else former.roles), admit)

    def _admit(
        self,
        node: NodeId,
        nick: str,
        user: User,
        roles: tuple[str, ...],
        admit: bool = False,
        through: tuple[bytes, ...] = (),
    ) -> Decision:
        core, now_unix = self._core, self._clock.unix()
        signer = MeshSealer(self._identity, core.trust.mesh_id)
        chain = admit_node(signer, core.trust, core.chain, node, nick, user, roles, admit, now_unix, through=through)
        core.trust.admit_chain(chain, self._clock.unix())  # its name is taken from now on
        return self._publish_decision(node, Decision(chain))

    def _publish_decision(self, node: NodeId, decision: Decision) -> Decision:
        core, now_unix = self._core, self._clock.unix()
        known = self._own_decisions()
        known.pop(node, None)
        # A node that publishes its certificate has collected it.
        kept = {one: was for one, was in known.items() if core.records.get(one, TRUST, now_unix) is None}
        kept[node] = decision
        while len(body := msgspec.msgpack.encode(kept)) > MAX_BODY_BYTES:
            del kept[next(iter(kept))]
        core.publish(DECIDED, body, DECIDED_TTL_S, urgent=True)
        return decision

    def _decide(self, entry: PendingJoin) -> Decision:
        """Decide on a request made here. One with an invite is its issuer's to decide."""
        decision = self._decision(entry)
        if decision != Decision():
            return decision
        if entry.grant:
            return self._decide_invited(entry, here=True)
        if not self._may_admit():
            return Decision()
        if self._core.trust.credentials(entry.node, self._clock.unix()) is not None:
            # A member that has lost its certificate, but not its key, gets it again.
            signer, trust = MeshSealer(self._identity, self._core.trust.mesh_id), self._core.trust
            return Decision(renew_chain(signer, trust, self._core.chain, entry.node, self._clock.unix()))
        allowed = self._allow_list().get(entry.node)
        if allowed is None and entry.node in self._core.trust.genesis.roots:
            allowed = Allowed(entry.node)
        if allowed is None and not self._policy.open:
            return Decision()
        trust, name, now_unix = self._core.trust, entry.user, self._clock.unix()
        if allowed is not None:
            name = allowed.user or entry.user
            # The owner of this node has written the name down: it may be one that exists.
            existing = bool(allowed.user) and trust.holder(name, now_unix) is not None
            roles, nick = allowed.roles, allowed.nick or entry.nick
        else:
            existing, roles, nick = False, ROLES, entry.nick
        try:
            decision = self._admit(entry.node, nick, trust.bind(name, entry.node, now_unix, existing), roles)
        except TrustError as error:
            return Decision(problem=f"{error}: join with another name (`mesh join HOST --user NAME`)")
        if allowed is None:
            log.warning("admitted %s (%s, %s): this mesh is open", entry.nick, entry.user, format_id(entry.node))
        return decision

    def _decide_invited(self, entry: PendingJoin, here: bool = False) -> Decision:
        """Decide on a request with an invite of this node: write the use to disk, then admit or endorse.

        `here`: this node gives the answer, so a refusal is not published. A machine with several invites makes no flood of them.
        """
        trust, now_unix = self._core.trust, self._clock.unix()
        issuer, grant = verify_invited(trust, entry, now_unix)
        me = trust.credentials(self._core.me, now_unix)
        if issuer != self._core.me or me is None or self._used.held:
            return Decision()
        try:
            if len(me.through) >= MAX_THROUGH:
                raise TrustError(
                    f"the node that made the invite came in through {MAX_THROUGH} others, the most there may be"
                )
            if grant.mine:
                user = me.binding
            elif not me.can_admit:
                raise TrustError("the node that made the invite may not admit users any more")
            elif grant.uses == 1:
                user = trust.bind(grant.user, entry.node, now_unix)
            else:
                user = self._numbered(f"{grant.user}-{entry.user}", entry.node, now_unix)
        except TrustError as error:
            return self._refuse(entry, f"{error}: ask for another invite", here)
        if not self._used.take(grant, entry.node, now_unix):
            used = "the invite has been used" if grant.uses == 1 else f"all {grant.uses} uses of the invite are used up"
            return self._refuse(entry, f"{used}: ask for a new one", here)
        if me.can_admit:
            return self._admit(entry.node, entry.nick, user, _common_roles(grant, me))
        self._endorse(entry)
        return Decision()

    def _refuse(self, entry: PendingJoin, problem: str, here: bool) -> Decision:
        decision = Decision(problem=problem, grant_digest=grant_digest(entry.grant))
        return decision if here else self._publish_decision(entry.node, decision)

    def _numbered(self, name: str, node: NodeId, now_unix: float) -> User:
        """Return a new user with this name, or with a number after it if it is taken."""
        for number in range(2, MAX_PENDING):
            try:
                return self._core.trust.bind(name, node, now_unix)
            except TrustError:
                name = f"{name.rpartition('-')[0] if number > 2 else name}-{number}"
        return self._core.trust.bind(name, node, now_unix)

    def _endorse(self, entry: PendingJoin) -> None:
        record = self._core.records.get(self._core.me, ENDORSED, self._clock.unix())
        known = decode_pending(record.body if record else b"", MAX_ENDORSED)
        endorsed = [*(one for one in known if one.node != entry.node), entry][-MAX_ENDORSED:]
        while len(body := encode_pending(endorsed)) > MAX_BODY_BYTES:
            del endorsed[0]
        self._core.publish(ENDORSED, body, PENDING_TTL_S, urgent=True)

    def _admit_endorsed(self, entry: PendingJoin, endorser: Credentials) -> Decision:
        """Admit a machine to the endorser's user. The machine has asked for that itself, with an invite of the endorser."""
        issuer, grant = verify_invited(self._core.trust, entry, self._clock.unix())
        if issuer != endorser.node_id or not grant.mine:
            raise TrustError(f"{endorser.nick} endorses a machine that has no invite of it for a machine of its user")
        through = (*endorser.through, endorser.node_id)
        return self._admit(entry.node, entry.nick, endorser.binding, _common_roles(grant, endorser), through=through)

    def _decide_elsewhere(self) -> None:
        now_unix, trust = self._clock.unix(), self._core.trust
        for record in self._core.records.section(INVITED, now_unix):
            for entry in decode_pending(record.body, MAX_INVITED):
                if self._is_open(entry.node, now_unix, grant_digest(entry.grant)):
                    self._try(partial(self._decide_invited, entry))
        if not self._may_admit():
            return
        for record in self._core.records.section(ENDORSED, now_unix):
            endorser = trust.credentials(record.node, now_unix)
            for entry in decode_pending(record.body, MAX_ENDORSED):
                if endorser is None or not self._is_open(entry.node, now_unix):
                    continue
                if len(trust.machines(endorser.user_key, now_unix)) >= MAX_MACHINES:
                    log.warning("%s has %d machines: approve more of them by hand", endorser.user, MAX_MACHINES)
                    break
                self._try(partial(self._admit_endorsed, entry, endorser))

    def _try(self, decide: Callable[[], Decision]) -> None:
        try:
            decide()
        except TrustError as error:
            log.info("refused a join request: %s", error)
        except OSError as error:
            self._look = True  # decide again with the next tick
            log.error("could not note the use of an invite: %s", error)

    def _is_open(self, node: NodeId, now_unix: float, grant: bytes = b"") -> bool:
        decision = self._own_decisions().get(node)
        return (
            (decision is None or not (decision.chain or decision.grant_digest in {grant, b""}))
            and node not in self._core.trust.revoked
            and self._core.trust.credentials(node, now_unix) is None
        )

    def _may_admit(self) -> bool:
        me = self._core.trust.credentials(self._core.me, self._clock.unix())
        return me is not None and me.can_admit

    def _allow_list(self) -> dict[NodeId, Allowed]:
        """Read the allow list, each time anew: the owner edits it while the daemon runs. A list with a mistake admits nobody."""
        path = self._policy.allow_list
        self._problems.pop("allow list", None)
        try:
            return read_allow_list(path) if path is not None else {}
        except TrustError as error:
            self._problems["allow list"] = str(error)
            return {}

    def _own_decisions(self) -> dict[NodeId, Decision]:
        mine = self._core.records.get(self._core.me, DECIDED, self._clock.unix())
        return decode_decisions(mine.body) if mine is not None else {}

    def _decision(self, entry: PendingJoin) -> Decision:
        """Return the decision of any admitter on this node, or the refusal by the issuer of its invite.

        The node that receives a chain verifies it itself.
        """
        issuer, now_unix, found = b"", self._clock.unix(), Decision()
        if entry.grant:
            issuer, _ = self._core.trust.open_grant(entry.grant)
        for record in self._core.records.section(DECIDED, now_unix):
            decision = decode_decisions(record.body).get(entry.node, Decision())
            author = self._core.trust.credentials(record.node, now_unix)
            if (
                decision.chain
                and author is not None
                and author.can_admit
                and self._is_valid(decision.chain, entry.node)
            ):
                return decision
            about = decision.grant_digest in {grant_digest(entry.grant), b""}
            if decision.problem and record.node == issuer and about:
                found = Decision(problem=decision.problem)
        return found

    def _is_valid(self, chain: bytes, node: NodeId) -> bool:
        try:
            return self._core.trust.check_chain(chain, self._clock.unix()).node_id == node
        except TrustError:
            return False

    def _publish_pending(self) -> None:
        now = self._clock.boot()
        for section, entries in ((PENDING, self._requests.pending()), (INVITED, self._requests.invited())):
            age_s = now - self._published_at[section]
            changed = entries != self._published[section]
            if (changed and age_s >= PUBLISH_S[section]) or (entries and age_s > PENDING_TTL_S / 4):
                self._published[section], self._published_at[section] = entries, now
                self._core.publish(section, encode_pending(entries), PENDING_TTL_S, urgent=section == INVITED)


def _common_roles(grant: Grant, issuer: Credentials) -> tuple[str, ...]:
    """Return what an invite gives: no role that its issuer lacks now."""
    return tuple(role for role in grant.roles if role in issuer.roles)


def is_join_request(data: bytes) -> bool:
    return data.startswith(_MARK)


def make_join_request(
    identity: Identity, nonce: int, nick: str, user: str, grant: bytes = b"", proof: bytes = b"", ssh_proof: bytes = b""
) -> bytes:
    request = JoinRequest(nonce, nick, user, grant, proof, ssh_proof)
    return _MARK + seal(identity, _NO_MESH, "join-request", msgspec.msgpack.encode(request))


def read_answer(data: bytes, nonce: int, now_unix: float) -> tuple[NodeId, TrustStore, JoinAnswer]:
    """Return the answering node, its mesh and the answer; TrustError if they contradict each other."""
    try:
        node, payload = open_envelope(data, _NO_MESH, "join-answer")
        answer = _answer_decoder.decode(payload)
    except (EnvelopeError, *MALFORMED) as error:
        raise TrustError("the program at that address is not a mesh node, or runs another version") from error
    store = TrustStore(answer.genesis)
    if answer.answers != nonce or store.check_chain(answer.chain, now_unix).node_id != node:
        raise TrustError("the answer is not from the node that it names")
    return node, store, answer


async def request_join(
    host: str,
    port: int,
    identity: Identity,
    nick: str,
    user: str,
    nonce: int,
    now_unix: float,
    grant: bytes = b"",
    proof: bytes = b"",
    ssh_proof: bytes = b"",
) -> tuple[NodeId, TrustStore, JoinAnswer]:
    """Send one join request to the node at this address. OSError, TimeoutError or TrustError if that fails."""
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        async with connected(host, port) as (reader, writer):
            await write_frame(writer, make_join_request(identity, nonce, nick, user, grant, proof, ssh_proof))
            try:
                return read_answer(await read_frame(reader), nonce, now_unix)
            except FrameError as error:
                raise TrustError("the program at that address is not a mesh node") from error
            except asyncio.IncompleteReadError as error:
                raise TrustError(
                    "the connection was closed: not a mesh node, a node of another version, or a busy one"
                ) from error


@lru_cache(OPENED)
def _open_request(sealed: bytes) -> tuple[NodeId, JoinRequest]:
    if len(sealed) > MAX_REQUEST_BYTES:
        raise FrameError(f"a join request holds at most {MAX_REQUEST_BYTES} bytes")
    node, payload = open_envelope(sealed, _NO_MESH, "join-request")
    try:
        request = _request_decoder.decode(payload)
    except MALFORMED as error:
        raise FrameError(f"not a join request: {error}") from error
    if not all(0 < len(name.encode()) <= MAX_NAME_BYTES for name in (request.nick, request.user)):
        raise FrameError(f"a join request needs a nick and a user of 1 to {MAX_NAME_BYTES} bytes")
    return node, request


def open_join_request(sealed: bytes, host: str, since_unix: int) -> tuple[PendingJoin, int]:
    """Verify and decode a join request; return it with its nonce. EnvelopeError or FrameError for anything else."""
    node, request = _open_request(sealed)
    entry = PendingJoin(
        node, request.nick, request.user, host, since_unix, sealed, request.grant, request.proof, request.ssh_proof
    )
    return entry, request.nonce


def encode_pending(entries: list[PendingJoin]) -> bytes:
    return msgspec.msgpack.encode([Published(entry.sealed, entry.host, entry.since_unix) for entry in entries])


def decode_pending(body: bytes, most: int) -> list[PendingJoin]:
    """Decode the requests that another node publishes, each as its machine signed it; invalid ones, or an invalid body, are
    dropped.
    """
    try:
        published = _published_decoder.decode(body) if body else []
    except MALFORMED:
        return []
    found: list[PendingJoin] = []
    for one in published[:most]:
        with suppress(EnvelopeError, FrameError):
            found.append(open_join_request(one.sealed, one.host, one.since_unix)[0])
    return found


def grant_digest(grant: bytes) -> bytes:
    """Return what a refusal names an invite by."""
    return blake2b(grant, digest_size=16, person=b"mesh-refusal").digest()


def decode_decisions(body: bytes) -> dict[bytes, Decision]:
    try:
        return _decisions_decoder.decode(body) if body else {}
    except MALFORMED:
        return {}


def read_allow_list(path: Path) -> dict[NodeId, Allowed]:
    """Read an allow list; TrustError with the file, the line and the mistake.

    A line is `ID [nick=NAME] [user=NAME] [roles=provider,user]`; a # begins a comment.
    """
    if not path.exists():
        return {}
    allowed: dict[NodeId, Allowed] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrustError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            entry = _parse_allowed(words)
        except ValueError as error:
            raise TrustError(f"{path}, line {number}: {error}") from error
        allowed[entry.node] = entry
    return allowed


def _parse_allowed(words: list[str]) -> Allowed:
    fields: dict[str, str] = {}
    for word in words[1:]:
        found = re.fullmatch(r"(nick|user|roles)=(\S{1,64})", word)
        if found is None:
            raise ValueError(f"{word!r} is not nick=NAME, user=NAME or roles={','.join(ROLES)}")
        fields[found[1]] = found[2]
    roles = tuple(fields.get("roles", ",".join(ROLES)).split(","))
    if not set(roles) <= set(ROLES):
        raise ValueError(f"roles are {' and '.join(ROLES)}, not {fields['roles']!r}")
    return Allowed(parse_id(words[0]), fields.get("nick", ""), fields.get("user", ""), roles)

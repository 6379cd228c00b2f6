"""Trust: a signed genesis document, and certificates that bind nodes and users to a mesh.

The genesis document defines a mesh; its hash is the mesh id and part of every signature. A node is admitted by a chain root ->
node or root -> admitter -> node. Each certificate must be valid now, and grants only roles that its issuer has.

A member names the keys that it came in through: those of the nodes that admitted it, endorsed it (a machine added to their user)
or renewed its certificate, and those that these came in through themselves. A renewal copies them and adds its signer; founders
are left out, since they cannot be revoked. A revocation of one ends all that came in through it, until they are admitted anew.

A user is a key: the key of the first machine of theirs that was admitted. A certificate binds the user's name to that key. A
name belongs to one key: of two bindings the older one holds, on every node alike, and the members of the other key have no
credentials. An admitter binds no name that belongs to another key.

An invite signs no certificate. Its one-time key proves that a join request comes from the invited machine, and only the node
that issued the invite decides (`membership.admission`).
"""

import base64
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Literal, Protocol

import msgspec

from membership.envelope import TAG_BYTES, EnvelopeError, open_envelope, seal
from membership.identity import Identity, NodeId, short_id
from membership.malformed import MALFORMED

MAX_CHAIN = 2
MAX_THROUGH = 8  # keys that a member came in through; a chain that names as many has less than 1 KiB (own choice)
MAX_ROOTS = 16  # own choice
MAX_STATEMENTS = 4096  # of the founders: a campus with 400 machines for ten years (own choice)
MAX_REASON_BYTES = 100
LAST_UNIX = 253_402_300_799  # the end of the year 9999, the last one that every program can display (RFC 3339)
CLOCK_GRACE_S = 120  # tolerated clock skew
NODE_CERTIFICATE_S = 90 * 86_400  # short, so that a lost laptop drops out by itself; Let's Encrypt's lifetime
RENEW_BEFORE_S = 30 * 86_400  # remaining lifetime at which renewal starts
CERTIFICATE_WARN_S = 7 * 86_400  # remaining lifetime at which a failed renewal is reported
ROOT_CERTIFICATE_S = 10 * 365 * 86_400  # an expired root ends its mesh (Nebula issue 712)
MAX_NAME_BYTES = 64
MAX_USES = 1000  # of an invite: a large lecture (own choice)
SSH_NAMESPACE = b"join@campus-mesh"  # of signatures by SSH keys, so that they serve no other purpose (PROTOCOL.sshsig)
_GENESIS_ID = b"\0" * 16  # the mesh id does not exist yet when the genesis is signed
# POSIX's portable user names, and what directories of a university use besides. Look-alikes of other scripts are no names.
_USER_NAME = re.compile(rf"[A-Za-z0-9_.@+-]{{1,{MAX_NAME_BYTES}}}")


PROVIDER, USER = "provider", "user"
ROLES = (PROVIDER, USER)  # may lend GPUs, may submit jobs


class TrustError(ValueError):
    """A node, chain or invite is not valid in this mesh; the message names the rule that refused it."""


class WrongTerms(TrustError):
    """The request itself is wrong, whoever sends it: a damaged invite, or a text that is not a valid name."""


class NameTaken(TrustError):
    """The user's name belongs to another key."""


class TooManyStatements(TrustError):
    """Nodes keep no more statements of this founder. Others of the same section count."""


class Genesis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`quorum` of the roots, the mesh's founders, must agree to revoke a key or to let a node admit others."""

    name: str
    roots: tuple[bytes, ...]
    quorum: int
    created_unix: int
    salt: bytes


class User(msgspec.Struct, frozen=True):
    """A user of the mesh: their key, and the name that an admitter bound to it."""

    name: str
    key: bytes
    bound_unix: int


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An issuer's word on a node and its user. `through`: the keys that it came in through, besides those that sign the chain."""

    subject: bytes
    nick: str
    user: str
    user_key: bytes
    bound_unix: int
    roles: tuple[str, ...]
    can_admit: bool
    not_before: int
    not_after: int
    serial: bytes
    through: tuple[bytes, ...] = ()


class Revocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A root's statement that a key is not a member, whatever certificates it has. It cannot be undone."""

    subject: bytes
    revoked_unix: int
    reason: str


class Promotion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A root's statement that a node may admit others. It takes effect with a certificate that says so."""

    subject: bytes
    promoted_unix: int


class Credentials(msgspec.Struct, frozen=True):
    """A member's attributes, verified by its chain. `admitter` signed its certificate.

    `not_before` and `not_after`: the time in which the whole chain is valid. `through`: the keys that it came in through.
    """

    node_id: bytes
    nick: str
    user: str
    user_key: bytes
    bound_unix: int
    roles: tuple[str, ...]
    can_admit: bool
    admitter: bytes
    not_before: int
    not_after: int
    through: tuple[bytes, ...] = ()

    @property
    def binding(self) -> User:
        return User(self.user, self.user_key, self.bound_unix)


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An issuer's promise to admit machines that prove `key`. `mine`: as machines of the issuer's own user.

    `user` is the name that the newcomer gets; with several `uses`, the first part of it; 0.1.0 left it empty with `mine`.
    `ssh_key`, unless it is empty, is the fingerprint of an SSH key that the newcomer must prove, too.
    """

    key: bytes
    user: str
    mine: bool
    roles: tuple[str, ...]
    uses: int
    made_unix: int
    not_after: int
    ssh_key: bytes


class Invite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The mesh, addresses to ask and, if it admits by itself, a one-time key with the issuer's grant.

    `issuer` is the issuer's name, for display.
    """

    genesis: bytes
    seeds: tuple[str, ...]
    not_after: int
    issuer: str
    seed: bytes = b""
    grant: bytes = b""


class Signer(Protocol):
    """Signs certificates: `MeshSealer`, or the simulator's."""

    node_id: NodeId

    def seal(self, kind: str, payload: bytes) -> bytes: ...


_genesis_decoder = msgspec.msgpack.Decoder(Genesis)
_certificate_decoder = msgspec.msgpack.Decoder(Certificate)
_chain_decoder = msgspec.msgpack.Decoder(list[bytes])
_revocation_decoder = msgspec.msgpack.Decoder(Revocation)
_promotion_decoder = msgspec.msgpack.Decoder(Promotion)
_invite_decoder = msgspec.msgpack.Decoder(Invite)
_grant_decoder = msgspec.msgpack.Decoder(Grant)


def genesis_id(genesis_bytes: bytes) -> bytes:
    return blake2b(genesis_bytes, digest_size=16, person=b"mesh-genesis").digest()


class TrustStore:
    """The mesh's rules, and the members and revocations this node knows; all of them were verified by `admit_*`."""

    def __init__(self, genesis_bytes: bytes) -> None:
        try:
            self.founder, payload = open_envelope(genesis_bytes, _GENESIS_ID, "genesis")
            self.genesis = _genesis_decoder.decode(payload)
        except (EnvelopeError, *MALFORMED) as error:
            raise TrustError(f"not a mesh's genesis document: {error}") from error
        roots = self.genesis.roots
        if self.founder not in roots:
            raise TrustError("the genesis document is not signed by one of its roots")
        if len(roots) > MAX_ROOTS or len(set(roots)) < len(roots) or any(len(root) != 32 for root in roots):
            raise TrustError(f"a mesh has 1 to {MAX_ROOTS} founders, each once")
        if not 1 <= self.genesis.quorum <= len(roots):
            raise TrustError(f"the quorum is a number of founders: 1 to {len(roots)}")
        self.genesis_bytes = genesis_bytes
        self.mesh_id = genesis_id(genesis_bytes)
        self.revoked: set[NodeId] = set()
        self.revocations: dict[NodeId, Revocation] = {}  # for display
        self.promoted: set[NodeId] = set()
        self._certified: set[NodeId] = set()  # nodes with a root's certificate that they may admit others
        self.statements: dict[bytes, NodeId] = {}  # of the founders, sealed, to relay, with their subjects
        self.most_statements = MAX_STATEMENTS // len(roots)  # of each founder, so that none takes the others' places
        self._stated = Counter[NodeId]()  # founder -> statements
        self._votes: dict[tuple[str, NodeId], set[NodeId]] = {}  # kind and subject -> roots
        self._members: dict[NodeId, Credentials] = {}
        self._by_tag: dict[bytes, list[NodeId]] = {}
        self._by_name: dict[str, dict[bytes, set[NodeId]]] = {}  # a user's name -> keys -> machines

    def admit_chain(self, chain: bytes, now_unix: float) -> Credentials:
        """Verify a chain and add its node; TrustError names the failed link and the reason."""
        credentials = self.check_chain(chain, now_unix)
        node = credentials.node_id
        known = self._members.get(node)
        if known is None or credentials.not_after >= known.not_after or self.refusal(known, now_unix):
            if known is not None:
                self._by_name[known.user][known.user_key].discard(node)
            self._members[node] = credentials
            self._by_name.setdefault(credentials.user, {}).setdefault(credentials.user_key, set()).add(node)
            same_tag = self._by_tag.setdefault(node[:TAG_BYTES], [])
            if node not in same_tag:
                same_tag.append(node)
        return self._members[node]

    def admit_statement(self, sealed: bytes) -> bool:
        """Apply a founder's revocation or promotion; True if it is new. TrustError if it is invalid.

        It takes effect with the statements of a quorum of founders, whatever time they name: that is for display, since the
        clock of a founder may have been wrong.
        """
        if sealed in self.statements:
            return False
        author, kind, statement = self._open_statement(sealed)
        if author not in self.genesis.roots:
            raise TrustError("only a founder of the mesh may revoke a key or let a node admit others")
        at_unix = statement.revoked_unix if isinstance(statement, Revocation) else statement.promoted_unix
        reason = statement.reason if isinstance(statement, Revocation) else ""
        if len(statement.subject) != 32 or len(reason.encode()) > MAX_REASON_BYTES or not 0 <= at_unix <= LAST_UNIX:
            raise TrustError("not a revocation: invalid key, time or reason")
        if kind == "revocation" and statement.subject in self.genesis.roots:
            raise TrustError("a root cannot be revoked: found a new mesh instead")
        voters = self._votes.setdefault((kind, statement.subject), set())
        if author in voters:
            return False
        if self._stated[author] >= self.most_statements:
            raise TooManyStatements(
                f"this founder has signed {self.most_statements} statements, the most that nodes keep"
            )
        self._stated[author] += 1
        voters.add(author)
        self.statements[sealed] = statement.subject
        if isinstance(statement, Revocation):
            self.revocations.setdefault(statement.subject, statement)
        if len(voters) >= self.genesis.quorum:
            (self.revoked if kind == "revocation" else self.promoted).add(statement.subject)
            member = self._members.get(statement.subject)
            if member is not None and statement.subject in self._certified & self.promoted:
                self._members[statement.subject] = msgspec.structs.replace(member, can_admit=True)
        return True

    def statements_about(self, subject: NodeId) -> set[bytes]:
        """Return the founders' sealed statements about this key."""
        return {sealed for sealed, about in self.statements.items() if about == subject}

    def stated(self, founder: NodeId) -> int:
        """Return how many statements of this founder are kept."""
        return self._stated[founder]

    def votes(self, kind: Literal["revocation", "promotion"], subject: NodeId) -> int:
        """Return how many founders have signed this; the mesh's quorum is enough."""
        return len(self._votes.get((kind, subject), ()))

    def may_admit(self, node: NodeId) -> bool:
        """Tell whether a node whose certificate says so may admit others."""
        return self.genesis.quorum == 1 or node in self.genesis.roots or node in self.promoted

    def seen(self) -> dict[NodeId, Credentials]:
        """Return every node whose chain was ever verified, for display: it may have expired or been revoked since."""
        return dict(self._members)

    def with_tag(self, tag: bytes) -> list[NodeId]:
        """Return the known nodes whose keys begin with this tag."""
        return self._by_tag.get(tag, [])

    def check_chain(self, chain: bytes, now_unix: float) -> Credentials:
        """Verify a chain that must be valid now; TrustError names the failed link and the reason."""
        credentials = self.read_chain(chain)
        if now_unix < credentials.not_before - CLOCK_GRACE_S:
            raise TrustError(f"the certificate of {credentials.nick!r} is not valid yet: is the clock right?")
        if reason := self.refusal(credentials, now_unix):
            raise TrustError(reason)
        return credentials

    def read_chain(self, chain: bytes) -> Credentials:
        """Verify the signatures and rights of a chain, which may have expired; TrustError names what failed."""
        try:
            links = _chain_decoder.decode(chain)
        except MALFORMED as error:
            raise TrustError(f"not a certificate chain: {error}") from error
        if not 1 <= len(links) <= MAX_CHAIN:
            raise TrustError(f"a chain has 1 to {MAX_CHAIN} certificates, this one has {len(links)}")
        issuer, certificate = self._open_link(links[0])
        if issuer not in self.genesis.roots:
            raise TrustError(f"{short_id(issuer)} may not admit nodes to mesh {self.genesis.name!r}")
        starts, ends, came = certificate.not_before, certificate.not_after, [*certificate.through, issuer]
        if len(links) > 1:
            admitter = certificate
            issuer, certificate = self._open_link(links[1])
            if issuer != admitter.subject or not admitter.can_admit or not self.may_admit(issuer):
                raise TrustError(f"{short_id(issuer)} may not admit nodes to mesh {self.genesis.name!r}")
            if certificate.can_admit or not set(admitter.roles).issuperset(certificate.roles):
                raise TrustError(f"{certificate.nick!r} claims a role that its admitter does not have")
            if certificate.bound_unix <= self.genesis.created_unix:
                raise TrustError(f"the name {certificate.user!r} was bound before the mesh was founded")
            starts, ends = max(starts, certificate.not_before), min(ends, certificate.not_after)
            came += [issuer, *certificate.through]
        through = tuple(dict.fromkeys(key for key in came if key not in self.genesis.roots))
        if len(through) > MAX_THROUGH:
            raise TrustError(
                f"{certificate.nick!r} came in through more than {MAX_THROUGH} nodes: ask for an approval "
                f"(`mesh member approve {certificate.nick}`)"
            )
        credentials = Credentials(
            node_id=certificate.subject,
            nick=certificate.nick,
            user=certificate.user,
            user_key=certificate.user_key,
            bound_unix=certificate.bound_unix,
            roles=certificate.roles,
            can_admit=certificate.subject in self.genesis.roots
            or (certificate.can_admit and self.may_admit(certificate.subject)),
            admitter=issuer,
            not_before=starts,
            not_after=ends,
            through=through,
        )
        if reason := self._revoked(credentials):
            raise TrustError(reason)
        if certificate.can_admit:
            self._certified.add(certificate.subject)
        return credentials

    def revoked_in(self, chain: bytes) -> NodeId | None:
        """Return the revoked key that a chain, else genuine, is for or comes through; None if there is none."""
        try:
            links = [self._open_link(link) for link in _chain_decoder.decode(chain)[:MAX_CHAIN]]
        except (*MALFORMED, TrustError):
            return None
        if not links or links[0][0] not in self.genesis.roots:
            return None
        return next((key for _, link in links for key in (link.subject, *link.through) if key in self.revoked), None)

    def credentials(self, node_id: NodeId, now_unix: float) -> Credentials | None:
        """Return the member with this key; None if it is none now (`refusal` has the reason)."""
        credentials = self._members.get(node_id)
        return None if credentials is None or self.refusal(credentials, now_unix) else credentials

    def refusal(self, credentials: Credentials, now_unix: float) -> str:
        """Return why a node with these credentials is no member now; empty if it is one."""
        if reason := self._ended(credentials, now_unix):
            return reason
        keys = self._by_name.get(credentials.user)
        if keys is None or (len(keys) == 1 and credentials.user_key in keys):
            return ""
        holder = self.holder(credentials.user, now_unix)
        if holder is None or holder.key == credentials.user_key or _order(holder) > _order(credentials.binding):
            return ""
        day = time.strftime("%Y-%m-%d", time.localtime(holder.bound_unix))
        return (
            f"the name {credentials.user!r} belongs to another user, since {day}: ask for an approval under another name "
            "(`mesh member approve KEY --user NAME`)"
        )

    def holder(self, name: str, now_unix: float) -> User | None:
        """Return the user to whom this name belongs now: the oldest binding among the members."""
        bindings = [
            self._members[node].binding
            for machines in self._by_name.get(name, {}).values()
            for node in machines
            if not self._ended(self._members[node], now_unix)
        ]
        return min(bindings, key=_order, default=None)

    def machines(self, user_key: bytes, now_unix: float) -> list[NodeId]:
        """Return the members that are machines of this user."""
        return [
            node
            for node, one in self._members.items()
            if one.user_key == user_key and self.credentials(node, now_unix) is not None
        ]

    def bind(self, name: str, node: NodeId, now_unix: float, existing: bool = False) -> User:
        """Return the user that `node` gets under this name; TrustError if the name belongs to another key.

        With `existing`, the node becomes a machine of the user who has the name. Names of users whose certificates have expired
        still belong to them here. A node that came in through a revoked key as a further machine of a user, and maybe never was
        one, becomes that again with `existing` alone.
        """
        if not _USER_NAME.fullmatch(name):
            raise WrongTerms(
                f"{name!r} is not a user's name: letters, digits and _.@+- only, at most {MAX_NAME_BYTES} of them"
            )
        taken = [
            self._members[machine].binding
            for machines in self._by_name.get(name, {}).values()
            for machine in machines
            if not self._revoked(self._members[machine])
        ]
        holder = self.holder(name, now_unix) or min(taken, key=_order, default=None)
        key, before = node, self._members.get(node)
        if before is not None and before.user == name:
            # A revoked admitter may have given this node the key of another user.
            names = {one.user for one in self._members.values() if one.user_key == before.user_key}
            key = before.user_key if names == {name} else node
        if existing and holder is None and key == node:
            raise TrustError(f"{name!r} is not a user yet: leave out --existing")
        if before is not None and key != node and self._revoked(before) and not existing:
            raise NameTaken(f"a node whose key was revoked made this a machine of {name}")
        if holder is not None and holder.key not in {node, key} and not existing:
            raise NameTaken(f"{name} is a user already")
        # A root alone binds at the founding, so that nobody can claim an older binding than the founders'.
        return holder or User(name, key, max(int(now_unix), self.genesis.created_unix + 1))

    def open_grant(self, sealed: bytes) -> tuple[NodeId, Grant]:
        """Return the issuer of an invite and what it grants; TrustError if the signature is invalid."""
        try:
            issuer, payload = open_envelope(sealed, self.mesh_id, "grant")
            grant = _grant_decoder.decode(payload)
        except (EnvelopeError, *MALFORMED) as error:
            raise TrustError(f"not an invite of this mesh: {error}") from error
        names_fit = len(grant.user) <= MAX_NAME_BYTES and set(grant.roles) <= set(ROLES)
        if len(grant.key) != 32 or len(grant.ssh_key) not in {0, 32} or not names_fit:
            raise TrustError("not an invite of this mesh: invalid fields")
        return issuer, grant

    def proves(self, grant: Grant, proof: bytes, node: NodeId, user: str) -> bool:
        """Tell whether the invite's key has signed this node and the name that it asks for."""
        try:
            key, payload = open_envelope(proof, self.mesh_id, "invite")
        except EnvelopeError:
            return False
        return key == grant.key and payload == node + user.encode()

    def proves_ssh_key(self, grant: Grant, ssh_proof: bytes, node: NodeId) -> bool:
        """Tell whether the SSH key that the invite is bound to has signed this node."""
        if not grant.ssh_key:
            return not ssh_proof
        from membership.ssh_keys import has_signed  # 50 ms, which few commands need

        return has_signed(grant.ssh_key, ssh_proof, SSH_NAMESPACE, ssh_message(self.mesh_id, grant, node))

    def _ended(self, credentials: Credentials, now_unix: float) -> str:
        if reason := self._revoked(credentials):
            return reason
        if now_unix > credentials.not_after + CLOCK_GRACE_S:
            return (
                f"the certificate of {credentials.nick!r} has expired: ask to be admitted again (`mesh doctor` there)"
            )
        return ""

    def _revoked(self, credentials: Credentials) -> str:
        """Return whose revocation ends these credentials, in words; empty if there is none."""
        nick = credentials.nick
        if credentials.node_id in self.revoked:
            return f"the key of {nick!r} was revoked"
        if not self.revoked.isdisjoint(credentials.through):
            return (
                f"a node that admitted, added or renewed {nick!r} was revoked: ask for an approval again "
                f"(`mesh member approve {nick}`)"
            )
        return ""

    def _open_statement(self, sealed: bytes) -> tuple[NodeId, str, Revocation | Promotion]:
        try:
            try:
                author, payload = open_envelope(sealed, self.mesh_id, "revocation")
                return author, "revocation", _revocation_decoder.decode(payload)
            except EnvelopeError:
                author, payload = open_envelope(sealed, self.mesh_id, "promotion")
                return author, "promotion", _promotion_decoder.decode(payload)
        except (EnvelopeError, *MALFORMED) as error:
            raise TrustError(f"not a revocation: {error}") from error

    def _open_link(self, link: bytes) -> tuple[NodeId, Certificate]:
        try:
            issuer, payload = open_envelope(link, self.mesh_id, "certificate")
            certificate = _certificate_decoder.decode(payload)
        except (EnvelopeError, *MALFORMED) as error:
            raise TrustError(f"a certificate of the chain is not valid in this mesh: {error}") from error
        names_fit = len(certificate.nick.encode()) <= MAX_NAME_BYTES and _USER_NAME.fullmatch(certificate.user)
        times_fit = all(
            0 <= at_unix <= LAST_UNIX
            for at_unix in (certificate.bound_unix, certificate.not_before, certificate.not_after)
        )
        if len(certificate.subject) != 32 or len(certificate.user_key) != 32 or not names_fit or not times_fit:
            raise TrustError("a certificate of the chain has invalid fields")
        if len(certificate.through) > MAX_THROUGH or any(len(key) != 32 for key in certificate.through):
            raise TrustError(f"{certificate.nick!r} came in through more than {MAX_THROUGH} nodes, or invalid ones")
        if not set(certificate.roles) <= set(ROLES):
            raise TrustError(f"{certificate.nick!r} claims a role that does not exist")
        if certificate.bound_unix < self.genesis.created_unix:
            raise TrustError(f"the name {certificate.user!r} was bound before the mesh was founded")
        return issuer, certificate


def found_mesh(
    identity: Identity,
    name: str,
    nick: str,
    user: str,
    now_unix: float,
    founders: Sequence[NodeId] = (),
    quorum: int = 1,
    draw: Callable[[int], bytes] = os.urandom,
) -> tuple[bytes, bytes]:
    """Create a mesh with this node and the other `founders` as its roots; return the genesis document and this node's chain.

    `draw` gives random bytes.
    """
    if not 1 <= len(name) <= 64:
        raise TrustError("a mesh's name has 1 to 64 characters")
    genesis = Genesis(name, (identity.node_id, *founders), quorum, int(now_unix), draw(16))
    genesis_bytes = seal(identity, _GENESIS_ID, "genesis", msgspec.msgpack.encode(genesis))
    store = TrustStore(genesis_bytes)
    founder = msgspec.structs.replace(
        store.bind(user, identity.node_id, now_unix), bound_unix=store.genesis.created_unix
    )
    own = _certificate(identity.node_id, nick, founder, ROLES, True, now_unix, ROOT_CERTIFICATE_S, draw)
    chain = msgspec.msgpack.encode([seal(identity, store.mesh_id, "certificate", msgspec.msgpack.encode(own))])
    store.check_chain(chain, now_unix)
    return genesis_bytes, chain


def make_revocation(identity: Identity, store: TrustStore, subject: NodeId, reason: str, now_unix: float) -> bytes:
    """Return this founder's signed revocation of a key; TrustError if this node may not revoke it."""
    if identity.node_id not in store.genesis.roots:
        raise TrustError("only a node that founded the mesh may revoke: run `mesh member revoke` there")
    if subject in store.genesis.roots:
        raise TrustError("a root cannot be revoked: found a new mesh instead")
    if len(reason.encode()) > MAX_REASON_BYTES:
        raise TrustError(f"a reason holds at most {MAX_REASON_BYTES} bytes")
    return _statement(identity, store, "revocation", Revocation(subject, int(now_unix), reason))


def make_promotion(identity: Identity, store: TrustStore, subject: NodeId, now_unix: float) -> bytes:
    """Return this founder's signed statement that a node may admit others; TrustError if this node is no founder."""
    if identity.node_id not in store.genesis.roots:
        raise TrustError("only a node that founded the mesh may make admitters")
    return _statement(identity, store, "promotion", Promotion(subject, int(now_unix)))


def _statement(identity: Identity, store: TrustStore, kind: str, statement: Revocation | Promotion) -> bytes:
    if store.stated(identity.node_id) >= store.most_statements:
        raise TrustError(
            f"this founder has signed {store.most_statements} revocations and promotions, the most that nodes keep: "
            "found a new mesh"
        )
    return seal(identity, store.mesh_id, kind, msgspec.msgpack.encode(statement))


def make_invite(
    identity: Identity,
    store: TrustStore,
    issuer: Credentials,
    seeds: tuple[str, ...],
    ttl_s: float,
    now_unix: float,
    *,
    user: str = "",
    mine: bool = False,
    roles: tuple[str, ...] = ROLES,
    uses: int = 1,
    ssh_key: bytes = b"",
) -> str:
    """Return an invite, one string. With `user` or `mine` it admits machines; else it only names the mesh and addresses.

    `ssh_key`: the fingerprint of an SSH key that the newcomer must prove.
    """
    invite = Invite(store.genesis_bytes, seeds, int(now_unix + ttl_s), issuer.nick)
    if user and not issuer.can_admit:
        raise TrustError(
            "this node may not admit other users: ask on the node that founded the mesh, or add a machine of your own "
            "(`mesh member invite --mine`)"
        )
    if user:
        store.bind(user, b"", now_unix)  # refuses a name that is not one, or taken
    if not 1 <= uses <= MAX_USES:
        raise WrongTerms(f"an invite has 1 to {MAX_USES} uses")
    if ssh_key and (uses != 1 or not (user or mine)):
        raise WrongTerms("an invite bound to an SSH key admits one machine: give a NAME or --mine, and no --uses")
    if not set(issuer.roles).issuperset(roles):
        raise TrustError("this node cannot give a role that it does not have")
    if user or mine:
        guest = Identity.generate()
        grant = Grant(
            guest.node_id, issuer.user if mine else user, mine, roles, uses, int(now_unix), invite.not_after, ssh_key
        )
        sealed = seal(identity, store.mesh_id, "grant", msgspec.msgpack.encode(grant))
        invite = msgspec.structs.replace(invite, seed=guest.seed, grant=sealed)
    body = msgspec.msgpack.encode(invite)
    return "mesh1-" + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def parse_invite(text: str, now_unix: float) -> Invite:
    """Parse an invite; WrongTerms if it is cut off or damaged, TrustError if it has expired."""
    text = "".join(text.split())
    if not text.startswith("mesh1-"):
        raise WrongTerms("an invite starts with 'mesh1-': copy the whole line that `mesh member invite` printed")
    try:
        plain = text.removeprefix("mesh1-")
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), altchars=b"-_", validate=True)
    except ValueError as error:
        raise WrongTerms("the invite is damaged or cut off: copy it again, whole") from error
    body, checksum = data[:-4], data[-4:]
    if _checksum(body) != checksum:
        raise WrongTerms("the invite is damaged or cut off: copy it again, whole")
    try:
        invite = _invite_decoder.decode(body)
    except MALFORMED as error:
        raise WrongTerms(f"the invite was made by another version of campus-mesh: {error}") from error
    if len(invite.seed) not in {0, 32}:
        raise WrongTerms("the invite holds no key")
    if now_unix > invite.not_after + CLOCK_GRACE_S:
        raise TrustError("the invite has expired: ask for a new one (`mesh member invite`)")
    return invite


def prove_invite(invite: Invite, node: NodeId, user: str) -> bytes:
    """Return the signature of the invite's key over the joining node and the name that it asks for."""
    if not invite.grant:
        return b""
    return seal(Identity(invite.seed), genesis_id(invite.genesis), "invite", node + user.encode())


def ssh_message(mesh_id: bytes, grant: Grant, node: NodeId) -> bytes:
    """Return what the SSH key signs: that this machine may use this invite of this mesh."""
    return mesh_id + grant.key + node


def admit_node(
    signer: Signer,
    store: TrustStore,
    chain: bytes,
    subject: NodeId,
    nick: str,
    user: User,
    roles: tuple[str, ...],
    can_admit: bool,
    now_unix: float,
    draw: Callable[[int], bytes] = os.urandom,
    through: tuple[bytes, ...] = (),
) -> bytes:
    """Admit `subject`, and return its chain; `chain` is the signer's own, `draw` gives random bytes. TrustError if the
    signer may not admit it.

    `through`: the keys that it came in through, besides the signer's and those that the signer came in through.
    """
    if subject in store.revoked:
        raise TrustError("that key was revoked: join with a new key")
    if can_admit and signer.node_id not in store.genesis.roots:
        raise TrustError("only the node that founded the mesh may make admitters")
    own = store.check_chain(chain, now_unix)
    if not own.can_admit:
        raise TrustError("this node may not admit others: ask on the node that founded the mesh, or on an admitter")
    life_s = ROOT_CERTIFICATE_S if subject == signer.node_id else NODE_CERTIFICATE_S
    certificate = _certificate(subject, nick, user, roles, can_admit, now_unix, life_s, draw, through)
    # A root's signature needs no certificate.
    links = [] if signer.node_id in store.genesis.roots else _chain_decoder.decode(chain)
    links.append(signer.seal("certificate", msgspec.msgpack.encode(certificate)))
    granted = msgspec.msgpack.encode(links)
    store.check_chain(granted, now_unix)
    return granted


def renew_chain(signer: Signer, store: TrustStore, chain: bytes, subject: NodeId, now_unix: float) -> bytes:
    """Return a chain with a new certificate for a member whose current one is valid.

    It names the same user, roles and keys that the member came in through; a member cannot shed them so.
    """
    credentials = store.credentials(subject, now_unix)
    if credentials is None:
        raise TrustError("its certificate has expired or was revoked")
    is_root = signer.node_id in store.genesis.roots
    return admit_node(
        signer,
        store,
        chain,
        subject,
        credentials.nick,
        credentials.binding,
        credentials.roles,
        credentials.can_admit and is_root,
        now_unix,
        through=credentials.through,
    )


def _certificate(
    subject: NodeId,
    nick: str,
    user: User,
    roles: tuple[str, ...],
    can_admit: bool,
    now: float,
    life_s: float,
    draw: Callable[[int], bytes],
    through: tuple[bytes, ...] = (),
) -> Certificate:
    return Certificate(
        subject=subject,
        nick=nick,
        user=user.name,
        user_key=user.key,
        bound_unix=user.bound_unix,
        roles=roles,
        can_admit=can_admit,
        not_before=int(now),
        not_after=int(now + life_s),
        serial=draw(8),
        through=through,
    )


def _order(user: User) -> tuple[int, bytes]:
    """Return the order of two bindings of one name: the older one holds, and of equally old ones the lower key."""
    return (user.bound_unix, user.key)


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=4, person=b"mesh-invite").digest()

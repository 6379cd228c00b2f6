"""Who belongs: a signed genesis, and chains of certificates from its roots to each node.

A mesh is its genesis document; the mesh id is the document's hash and stands in every signature. A node is admitted by a
chain root -> admitter -> node of at most three certificates, each of which must hold now, for roles that its issuer has.
An invite is a certificate for a throw-away key that may sign exactly one more level, together with that key, the genesis
and some addresses: whoever holds the string can join without any server, for as long as the invite lasts. The first
admitter that the new node meets replaces that by a certificate of its own hand, and renews it before it ends. "Single
use" cannot be enforced without a coordinator and is not claimed.
"""

import base64
import os
from hashlib import blake2b
from typing import Protocol

import msgspec

from membership.envelope import TAG_BYTES, EnvelopeError, Seals, open_envelope, seal
from membership.identity import Identity, NodeId, short_id

MAX_CHAIN = 3
MAX_REVOCATIONS, MAX_REASON_BYTES = 50, 100  # all of them fit into one section
CLOCK_GRACE_S = 120  # certificates of nodes whose clocks differ by this much still hold
NODE_CERTIFICATE_S = 90 * 86_400  # short enough that a lost laptop ends by itself; as Let's Encrypt
RENEW_BEFORE_S = 30 * 86_400  # an admitter is asked for a new one from then on
CERTIFICATE_WARN_S = 7 * 86_400  # its end is near, and nobody has renewed it
ROOT_CERTIFICATE_S = 10 * 365 * 86_400  # a root that ends kills its mesh (Nebula issue 712)
_GENESIS_ID = b"\0" * 16  # the genesis is signed before its own id exists


PROVIDER, USER = "provider", "user"
ROLES = (PROVIDER, USER)  # may lend, may submit


class TrustError(ValueError):
    """This node, chain or invite is not one of the mesh's; the text says which rule refused it."""


class Genesis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    roots: tuple[bytes, ...]
    created_unix: int
    salt: bytes


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    subject: bytes
    nick: str
    user: str
    roles: tuple[str, ...]
    can_admit: bool
    not_before: int
    not_after: int
    serial: bytes
    for_user: str = ""  # of an invite: who joins by it can only be this user


class Revocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A root's word that a key is no member any more, whatever certificates it has. It cannot be taken back."""

    subject: bytes
    revoked_unix: int
    reason: str


class Standing(msgspec.Struct, frozen=True):
    """A member as its chain shows it. `not_after`: the first end of any link of it; `links`: how many there are to a root."""

    node_id: bytes
    nick: str
    user: str
    roles: tuple[str, ...]
    can_admit: bool
    not_after: int
    links: int = MAX_CHAIN

    @property
    def speaks_for_mesh(self) -> bool:
        """A root, or who was made an admitter by a root's own hand. The keys of invites admit too, and name no user."""
        return self.can_admit and self.links == 1 and bool(self.user)


class Invite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    genesis: bytes
    seed: bytes
    chain: bytes
    seeds: tuple[str, ...]
    not_after: int


class Signer(Protocol):
    """What signs certificates: `Seals`."""

    node_id: NodeId

    def seal(self, kind: str, payload: bytes) -> bytes: ...


_genesis_decoder = msgspec.msgpack.Decoder(Genesis)
_certificate_decoder = msgspec.msgpack.Decoder(Certificate)
_chain_decoder = msgspec.msgpack.Decoder(list[bytes])
_revocation_decoder = msgspec.msgpack.Decoder(Revocation)
_invite_decoder = msgspec.msgpack.Decoder(Invite)


def genesis_id(genesis_bytes: bytes) -> bytes:
    return blake2b(genesis_bytes, digest_size=16, person=b"mesh-genesis").digest()


class TrustStore:
    """The mesh's rules and the chains this node has seen. Nothing enters but through `admit_chain`."""

    def __init__(self, genesis_bytes: bytes) -> None:
        try:
            self.founder, payload = open_envelope(genesis_bytes, _GENESIS_ID, "genesis")
            self.genesis = _genesis_decoder.decode(payload)
        except (EnvelopeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TrustError(f"not a mesh's genesis document: {error}") from error
        if self.founder not in self.genesis.roots:
            raise TrustError("the genesis document is not signed by one of its roots")
        self.genesis_bytes = genesis_bytes
        self.mesh_id = genesis_id(genesis_bytes)
        self.revoked: set[NodeId] = set()
        self.revocations: dict[NodeId, tuple[Revocation, bytes]] = {}  # with the sealed bytes, to be shown to others
        self._members: dict[NodeId, Standing] = {}
        self._by_tag: dict[bytes, list[NodeId]] = {}

    def admit_chain(self, chain: bytes, now_unix: float) -> Standing:
        """Check a chain and remember its node; TrustError says which link failed and why."""
        standing = self.check_chain(chain, now_unix)
        known = self._members.get(standing.node_id)
        if known is None or standing.not_after >= known.not_after:
            self._members[standing.node_id] = standing
            same_tag = self._by_tag.setdefault(standing.node_id[:TAG_BYTES], [])
            if standing.node_id not in same_tag:
                same_tag.append(standing.node_id)
        return self._members[standing.node_id]

    def admit_revocation(self, sealed: bytes, now_unix: float) -> bool:
        """Take in a root's revocation; whether it is news. TrustError if it is none."""
        try:
            author, payload = open_envelope(sealed, self.mesh_id, "revocation")
            revocation = _revocation_decoder.decode(payload)
        except (EnvelopeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TrustError(f"not a revocation: {error}") from error
        if author not in self.genesis.roots:
            raise TrustError("only a root of the mesh may revoke a key")
        if len(revocation.subject) != 32 or len(revocation.reason.encode()) > MAX_REASON_BYTES:
            raise TrustError("not a revocation: impossible key or reason")
        if revocation.revoked_unix > now_unix + CLOCK_GRACE_S:
            raise TrustError("a revocation from the future: is the clock right?")
        if revocation.subject in self.revoked or len(self.revocations) >= MAX_REVOCATIONS:
            return False
        self.revoked.add(revocation.subject)
        self.revocations[revocation.subject] = (revocation, sealed)
        return True

    def invited_user(self, invite: Invite) -> str:
        """The only user that this invite is for; empty if it is for anybody."""
        link = _chain_decoder.decode(invite.chain)[-1]
        return self._open_link(link)[1].for_user

    def seen(self) -> dict[NodeId, Standing]:
        """Everybody whose certificate was seen, for showing: it may have ended or been revoked since."""
        return dict(self._members)

    def with_tag(self, tag: bytes) -> list[NodeId]:
        """The known nodes whose keys begin so."""
        return self._by_tag.get(tag, [])

    def check_chain(self, chain: bytes, now_unix: float) -> Standing:
        try:
            links = _chain_decoder.decode(chain)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TrustError(f"not a certificate chain: {error}") from error
        if not 1 <= len(links) <= MAX_CHAIN:
            raise TrustError(f"a chain has 1 to {MAX_CHAIN} certificates, this one has {len(links)}")
        issuers, certificate = set(self.genesis.roots), None
        roles, for_user, ends = set(ROLES), "", 2**62
        for link in links:
            issuer, certificate = self._open_link(link)
            if issuer not in issuers:
                raise TrustError(f"{short_id(issuer)} may not admit nodes to mesh {self.genesis.name!r}")
            if issuer in self.revoked or certificate.subject in self.revoked:
                raise TrustError(f"the key of {certificate.nick or short_id(certificate.subject)} was revoked")
            if now_unix < certificate.not_before - CLOCK_GRACE_S:
                raise TrustError(f"the certificate of {certificate.nick!r} is not valid yet: is the clock right?")
            if now_unix > certificate.not_after + CLOCK_GRACE_S:
                raise TrustError(f"the certificate of {certificate.nick!r} has ended: ask for a new `mesh invite`")
            if not roles.issuperset(certificate.roles):
                raise TrustError(f"{certificate.nick!r} claims a role that its admitter could not give")
            if for_user and certificate.user != for_user:
                raise TrustError(f"this invite is for user {for_user!r}, not {certificate.user!r}")
            issuers = {certificate.subject} if certificate.can_admit else set()
            roles, for_user, ends = set(certificate.roles), certificate.for_user, min(ends, certificate.not_after)
        assert certificate is not None
        return Standing(
            node_id=certificate.subject,
            nick=certificate.nick,
            user=certificate.user,
            roles=certificate.roles,
            can_admit=certificate.can_admit,
            not_after=ends,
            links=len(links),
        )

    def standing(self, node_id: NodeId, now_unix: float) -> Standing | None:
        """The member with this key, while its certificate holds and it is not revoked."""
        standing = self._members.get(node_id)
        if standing is None or node_id in self.revoked or now_unix > standing.not_after + CLOCK_GRACE_S:
            return None
        return standing

    def _open_link(self, link: bytes) -> tuple[NodeId, Certificate]:
        try:
            issuer, payload = open_envelope(link, self.mesh_id, "certificate")
            certificate = _certificate_decoder.decode(payload)
        except (EnvelopeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TrustError(f"a certificate of the chain is not valid in this mesh: {error}") from error
        if len(certificate.subject) != 32 or len(certificate.nick) > 64 or len(certificate.user) > 64:
            raise TrustError("a certificate of the chain has impossible fields")
        return issuer, certificate


def found_mesh(identity: Identity, name: str, nick: str, user: str, now_unix: float) -> tuple[bytes, bytes]:
    """A new mesh whose only root is this node: its genesis document and the founder's own chain."""
    if not 1 <= len(name) <= 64:
        raise TrustError("a mesh's name has 1 to 64 characters")
    genesis = Genesis(name=name, roots=(identity.node_id,), created_unix=int(now_unix), salt=os.urandom(16))
    genesis_bytes = seal(identity, _GENESIS_ID, "genesis", msgspec.msgpack.encode(genesis))
    own = _certificate(identity.node_id, nick, user, ROLES, True, now_unix, ROOT_CERTIFICATE_S)
    sealed = seal(identity, genesis_id(genesis_bytes), "certificate", msgspec.msgpack.encode(own))
    return genesis_bytes, msgspec.msgpack.encode([sealed])


def make_revocation(identity: Identity, store: TrustStore, subject: NodeId, reason: str, now_unix: float) -> bytes:
    """The signed revocation of a key; TrustError if this node may not give it."""
    if identity.node_id not in store.genesis.roots:
        raise TrustError("only the node that founded the mesh may revoke: run `mesh revoke` there")
    if subject in store.genesis.roots:
        raise TrustError("a root cannot be revoked: that takes a new mesh")
    if len(reason.encode()) > MAX_REASON_BYTES:
        raise TrustError(f"a reason holds at most {MAX_REASON_BYTES} bytes")
    payload = msgspec.msgpack.encode(Revocation(subject, int(now_unix), reason))
    return seal(identity, store.mesh_id, "revocation", payload)


def make_invite(
    identity: Identity,
    chain: bytes,
    genesis_bytes: bytes,
    seeds: tuple[str, ...],
    ttl_s: float,
    now_unix: float,
    roles: tuple[str, ...] = ROLES,
    for_user: str = "",
) -> str:
    """One string that lets its holder join until `ttl_s` from now."""
    store = TrustStore(genesis_bytes)
    guest = Identity.generate()
    link = Certificate(
        subject=guest.node_id,
        nick="invite",
        user="",
        roles=roles,
        can_admit=True,
        not_before=int(now_unix),
        not_after=int(now_unix + ttl_s),
        serial=os.urandom(8),
        for_user=for_user,
    )
    invite = Invite(
        genesis=genesis_bytes,
        seed=guest.seed,
        chain=_grant(Seals(identity, store.mesh_id), store, chain, link, now_unix),
        seeds=seeds,
        not_after=int(now_unix + ttl_s),
    )
    body = msgspec.msgpack.encode(invite)
    return "mesh1-" + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def parse_invite(text: str, now_unix: float) -> Invite:
    """Read an invite string; TrustError that says whether it is cut off, damaged or too old."""
    text = "".join(text.split())
    if not text.startswith("mesh1-"):
        raise TrustError("an invite starts with 'mesh1-': copy the whole line that `mesh invite` printed")
    try:
        plain = text.removeprefix("mesh1-")
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), altchars=b"-_", validate=True)
    except ValueError as error:
        raise TrustError("the invite is damaged or cut off: copy it again, whole") from error
    body, checksum = data[:-4], data[-4:]
    if _checksum(body) != checksum:
        raise TrustError("the invite is damaged or cut off: copy it again, whole")
    try:
        invite = _invite_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TrustError(f"the invite was made by another version of campus-mesh: {error}") from error
    if len(invite.seed) != 32:
        raise TrustError("the invite holds no key")
    if now_unix > invite.not_after + CLOCK_GRACE_S:
        raise TrustError("the invite has ended: ask for a new one (`mesh invite`)")
    return invite


def accept_invite(invite: Invite, node_id: NodeId, nick: str, user: str, now_unix: float) -> bytes:
    """The joiner's own chain, signed with the invite's key."""
    store = TrustStore(invite.genesis)
    host = Identity(invite.seed)
    guest = store.check_chain(invite.chain, now_unix)
    own = _certificate(node_id, nick, user, guest.roles, False, now_unix, NODE_CERTIFICATE_S)
    sealed = seal(host, store.mesh_id, "certificate", msgspec.msgpack.encode(own))
    chain = msgspec.msgpack.encode([*_chain_decoder.decode(invite.chain), sealed])
    store.check_chain(chain, now_unix)
    return chain


def admit_node(
    signer: Signer,
    store: TrustStore,
    chain: bytes,
    subject: NodeId,
    nick: str,
    user: str,
    roles: tuple[str, ...],
    can_admit: bool,
    now_unix: float,
) -> bytes:
    """The chain of a node that this one, whose own chain is `chain`, admits; TrustError if it may not."""
    if subject in store.revoked:
        raise TrustError("that key was revoked: it takes a new one to come back")
    if can_admit and signer.node_id not in store.genesis.roots:
        raise TrustError("only the node that founded the mesh makes admitters")
    return _grant(
        signer,
        store,
        chain,
        _certificate(subject, nick, user, roles, can_admit, now_unix, NODE_CERTIFICATE_S),
        now_unix,
    )


def renew_chain(signer: Signer, store: TrustStore, chain: bytes, subject: NodeId, now_unix: float) -> bytes:
    """A new certificate for a member whose present one still holds, with the same name and roles."""
    standing = store.standing(subject, now_unix)
    if standing is None:
        raise TrustError("its certificate has ended, or was revoked")
    is_root = signer.node_id in store.genesis.roots
    return admit_node(
        signer,
        store,
        chain,
        subject,
        standing.nick,
        standing.user,
        standing.roles,
        standing.speaks_for_mesh and is_root,  # not the holder of an invite, who may have written so himself
        now_unix,
    )


def _grant(signer: Signer, store: TrustStore, chain: bytes, certificate: Certificate, now_unix: float) -> bytes:
    own = store.check_chain(chain, now_unix)
    if not own.can_admit:
        raise TrustError("this node may not admit others: ask on the node that founded the mesh, or on an admitter")
    # A root's own certificate is not needed to prove what the root signed.
    links = [] if signer.node_id in store.genesis.roots else _chain_decoder.decode(chain)
    links.append(signer.seal("certificate", msgspec.msgpack.encode(certificate)))
    granted = msgspec.msgpack.encode(links)
    store.check_chain(granted, now_unix)
    return granted


def _certificate(
    subject: NodeId,
    nick: str,
    user: str,
    roles: tuple[str, ...],
    can_admit: bool,
    now: float,
    life_s: float,
) -> Certificate:
    return Certificate(
        subject=subject,
        nick=nick[:64],
        user=user[:64],
        roles=roles,
        can_admit=can_admit,
        not_before=int(now),
        not_after=int(now + life_s),
        serial=os.urandom(8),
    )


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=4, person=b"mesh-invite").digest()

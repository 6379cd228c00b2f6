"""Records of lane 2: signed, expiring sections of state with a single writer, replaced whole and relayed verbatim.

Whole replacement needs no tombstones: an entry absent from the next version is deleted. A signed expiry makes garbage collection
deterministic: no node can spread an expired record again (a problem of scuttlebutt and chitchat, chitchat issue 161).
"""

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import blake2b
from typing import Literal

import msgspec

from membership.envelope import OVERHEAD, EnvelopeError, open_envelope
from membership.identity import ID_BYTES, NodeId
from membership.malformed import MALFORMED
from membership.trust import TrustError, TrustStore

MAX_BODY_BYTES = 16 * 1024
MAX_RECORD_BYTES = MAX_BODY_BYTES + 1024  # envelope, name, and fields of later versions
MAX_SECTIONS = 4096  # per node; bounds the jobs that one node runs or watches
# Of the nodes of one user together, since a member may add machines to its user. A digest fits into a frame of 4 MiB beside
# 1 MiB of records; a quarter of it holds 15,000 sections of 68 bytes, more than all of the 500 nodes with 10,000 jobs that
# docs/explanation/scale.md measures.
MAX_USER_DIGEST_BYTES = 1024 * 1024
MAX_USER_BYTES = 64 * 1024 * 1024  # sealed, in memory: 4 KiB for each of these sections (own choice)
MAX_LIFE_S = 30 * 86_400
MAX_NODES = 4096
CLOCK_GRACE_S = 120  # tolerated clock skew of the author
ROOT_BYTES = 8
TRUST = "trust"  # section with the author's certificates
STATEMENTS = "revoked/"  # sections with the founders' revocations and promotions that the author relays


class Body(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    version: int
    section: str
    not_after_unix: int
    body: bytes


class Record(msgspec.Struct, frozen=True):
    """A record and its sealed form, which holds the body from `start` for `size` bytes: a table of thousands keeps it once."""

    node: bytes
    epoch: int
    version: int
    section: str
    not_after_unix: int
    sealed: bytes
    start: int
    size: int
    user_key: bytes = b""  # of the user that it counts against; empty: it does not count

    @property
    def body(self) -> bytes:
        return self.sealed[self.start : self.start + self.size]

    @property
    def order(self) -> tuple[int, int]:
        return (self.epoch, self.version)

    @property
    def entry(self) -> tuple[bytes, str, int, int]:
        return (self.node, self.section, self.epoch, self.version)

    @property
    def entry_bytes(self) -> int:
        return len(msgspec.msgpack.encode(self.entry))


Ignored = Literal["invalid", "unknown author", "not newer", "outlives", "expired", "full"]
Entry = tuple[bytes, str, int, int]  # node, section, epoch, version
Digest = list[Entry]

_decoder = msgspec.msgpack.Decoder(Body)
decode_body = _decoder.decode
_revocations_decoder = msgspec.msgpack.Decoder(list[bytes])


def decode_statements(body: bytes) -> list[bytes]:
    """Decode a section of founders' statements; an invalid body holds none."""
    try:
        return _revocations_decoder.decode(body) if body else []
    except MALFORMED:
        return []


def encode_body(epoch: int, version: int, section: str, not_after_unix: int, body: bytes) -> bytes:
    """Return the payload to seal as kind `record`; ValueError if the body is too large."""
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a section holds at most {MAX_BODY_BYTES} bytes, {section!r} has {len(body)}")
    return msgspec.msgpack.encode(Body(epoch, version, section, not_after_unix, body))


class RecordTable:
    """The newest record of each section. `open_sealed` returns author and payload of a sealed record, or raises EnvelopeError."""

    def __init__(self, trust: TrustStore, open_sealed: Callable[[bytes], tuple[NodeId, bytes]] | None = None) -> None:
        self._trust = trust
        self._open = open_sealed or (lambda sealed: open_envelope(sealed, trust.mesh_id, "record"))
        self._records: dict[bytes, dict[str, Record]] = {}
        self._by_entry: dict[Entry, Record] = {}  # the digest, as it is sent
        self._by_signature: dict[bytes, Record] = {}
        self._digest_bytes, self._sealed_bytes = Counter[bytes](), Counter[bytes]()  # user's key -> of their records
        self._root = 0

    def apply(self, sealed: bytes, now_unix: float) -> Record | Ignored:
        """Apply a record from any source; return it if it is new, else the reason it was ignored.

        `outlives`: an older version that expires after the newer one known here, and would come back then.
        """
        if len(sealed) > MAX_RECORD_BYTES:
            return "invalid"
        known = self._by_signature.get(_signature(sealed))
        if known is not None and known.sealed == sealed:
            return "not newer"  # the same bytes were verified before; gossip repeats them
        try:
            node, payload = self._open(sealed)
            body = _decoder.decode(payload)
        except (EnvelopeError, *MALFORMED):
            return "invalid"
        if not body.section or len(body.section.encode()) > 128 or len(body.body) > MAX_BODY_BYTES:
            return "invalid"
        if body.version < 0 or body.epoch < 0 or body.not_after_unix > now_unix + MAX_LIFE_S + CLOCK_GRACE_S:
            return "invalid"
        if body.not_after_unix <= now_unix:
            return "expired"
        if body.section == TRUST and not self._admit(node, body.body, now_unix):
            return "invalid"
        author = self._trust.credentials(node, now_unix)
        if author is None:
            return "unknown author"
        if body.section.startswith(STATEMENTS) and not self._apply_statements(body.body):
            return "invalid"
        sections = self._records.get(node)
        if sections:
            node = next(iter(sections.values())).node  # one object for all
        start, size = sealed.rfind(body.body), len(body.body)
        # Certificates are one of a node, and a founder's revocations come through whatever its user's other machines publish.
        counts = body.section != TRUST and node not in self._trust.genesis.roots
        user = author.user_key if counts else b""
        record = Record(node, body.epoch, body.version, body.section, body.not_after_unix, sealed, start, size, user)
        known = sections.get(body.section) if sections is not None else None
        if known is not None and record.order <= known.order:
            return "outlives" if body.not_after_unix > known.not_after_unix else "not newer"
        if known is None and (len(sections or ()) >= MAX_SECTIONS or len(self._records) >= MAX_NODES):
            return "full"
        if user and not self._has_room(record, known):
            return "full"
        self._put(record)
        return record

    def get(self, node: bytes, section: str, now_unix: float) -> Record | None:
        record = self._records.get(node, {}).get(section)
        return record if record is not None and record.not_after_unix > now_unix else None

    def section(self, prefix: str, now_unix: float) -> list[Record]:
        """Return the records of this section, or of all sections below `prefix` if it ends with a slash."""
        if prefix.endswith("/"):
            each = (sections.items() for sections in self._records.values())
            found = [record for sections in each for name, record in sections if name.startswith(prefix)]
        else:
            found = [sections[prefix] for sections in self._records.values() if prefix in sections]
        return [record for record in found if record.not_after_unix > now_unix]

    def expire(self, now_unix: float) -> list[Record]:
        """Drop and return expired records."""
        gone = [r for r in self._all() if r.not_after_unix <= now_unix]
        for record in gone:
            self._remove(record)
            sections = self._records[record.node]
            del sections[record.section]
            if not sections:
                del self._records[record.node]
        return gone

    def drop(self, node: bytes) -> list[Record]:
        """Drop and return the records of a former member, which new members could not verify."""
        gone = list(self._records.pop(node, {}).values())
        for record in gone:
            self._remove(record)
        return gone

    def authors(self) -> list[bytes]:
        return list(self._records)

    @property
    def root(self) -> int:
        """Hash of the table: equal tables have equal roots."""
        return self._root

    def state(self, after_unix: float) -> frozenset[Entry]:
        """Return the entries that expire after this time."""
        return frozenset(entry for entry, r in self._by_entry.items() if r.not_after_unix > after_unix)

    def digest(self) -> Digest:
        return list(self._by_entry)

    def missing_from(self, digest: Digest, limit_bytes: int, now_unix: float) -> list[bytes]:
        """Return what a peer with this digest lacks, up to a size.

        The order is: revocations, certificates, nodes new to the peer, jobs, the rest.
        """
        entries = set(digest)
        news = [r for entry, r in self._by_entry.items() if entry not in entries and r.not_after_unix > now_unix]
        if not news:
            return []
        theirs = {(node, section): (epoch, version) for node, section, epoch, version in digest}
        nodes = {node for node, *_ in digest}
        news = [r for r in news if r.order > theirs.get((r.node, r.section), (-1, -1))]
        news.sort(
            key=lambda r: (
                not r.section.startswith(STATEMENTS),
                r.section != TRUST,
                r.node in nodes,
                not r.section.startswith("jobs/"),
            )
        )
        chosen: list[bytes] = []
        for record in news:
            limit_bytes -= len(record.sealed) + 8
            if limit_bytes < 0:
                break
            chosen.append(record.sealed)
        return chosen

    def _all(self) -> Collection[Record]:
        return self._by_entry.values()

    def _has_room(self, record: Record, known: Record | None) -> bool:
        """Tell whether the author's user has room for a record, or it is no larger than the one that it replaces."""
        size = len(record.sealed) - (len(known.sealed) if known is not None else 0)
        fits = size <= 0 or self._sealed_bytes[record.user_key] + size <= MAX_USER_BYTES
        entry = record.entry_bytes if known is None else 0
        return fits and (not entry or self._digest_bytes[record.user_key] + entry <= MAX_USER_DIGEST_BYTES)

    def _count(self, record: Record, sign: int) -> None:
        for counter, size in (
            (self._digest_bytes, record.entry_bytes),
            (self._sealed_bytes, len(record.sealed)),
        ):
            counter[record.user_key] += sign * size
            if not counter[record.user_key]:
                del counter[record.user_key]

    def _put(self, record: Record) -> None:
        sections = self._records.setdefault(record.node, {})
        before = sections.get(record.section)
        if before is not None:
            assert record.order > before.order, "S2: sections only advance"
            self._remove(before)
        sections[record.section] = record
        self._by_entry[record.entry] = record
        self._by_signature[_signature(record.sealed)] = record
        self._count(record, 1)
        self._root ^= _fingerprint(record)

    def _remove(self, record: Record) -> None:
        del self._by_entry[record.entry]
        self._count(record, -1)
        self._by_signature.pop(_signature(record.sealed), None)
        self._root ^= _fingerprint(record)

    def _apply_statements(self, body: bytes) -> bool:
        """Apply the founders' statements of a section, before any later message is handled (invariant S5)."""
        try:
            statements = _revocations_decoder.decode(body)
        except MALFORMED:
            return False
        for sealed in statements:
            # An invalid one, or one of a founder who has signed too many, does not stop those of the others.
            with suppress(TrustError):
                self._trust.admit_statement(sealed)
        return True

    def _admit(self, node: bytes, chain: bytes, now_unix: float) -> bool:
        try:
            return self._trust.admit_chain(chain, now_unix).node_id == node
        except TrustError:
            return False


def _signature(sealed: bytes) -> bytes:
    return sealed[1 + ID_BYTES : OVERHEAD]


def _fingerprint(record: Record) -> int:
    key = record.node + record.section.encode() + b"\0%d.%d" % (record.epoch, record.version)
    return int.from_bytes(blake2b(key, digest_size=ROOT_BYTES).digest(), "big")

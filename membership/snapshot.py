"""State a node keeps over restarts: its epoch, the addresses of known peers, the revocations, and the used invites.

The epoch is written and fsynced before the first packet of a run and grows with each run, so that a restarted node outranks
every rumour about its earlier runs. Addresses of dead peers are kept too: after a complete outage they are the only way back
(serf issue 333).
"""

from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgspec

from membership.durable import write_durably
from membership.identity import NodeId
from membership.malformed import MALFORMED
from membership.trust import CLOCK_GRACE_S, Grant, TooManyStatements, TrustError, TrustStore
from membership.wire import EPOCH_AHEAD_MS

MAX_PEERS = 256


class Peer(msgspec.Struct, frozen=True):
    node: bytes
    host: str
    port: int
    seen_unix: int


class Snapshot(msgspec.Struct, frozen=True):
    epoch: int = 0
    peers: tuple[Peer, ...] = ()


_decoder = msgspec.json.Decoder(Snapshot)


class SnapshotFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.warning = ""
        self._epoch = 0
        self._writing = Lock()

    def read(self) -> Snapshot:
        """Read the last snapshot. A damaged file is moved aside with a warning; only known addresses are lost."""
        try:
            return _decoder.decode(self.path.read_bytes())
        except FileNotFoundError:
            return Snapshot()
        except MALFORMED as error:
            aside = self.path.with_suffix(".damaged")
            self.path.replace(aside)
            self.warning = f"{self.path} could not be read ({error}); moved to {aside}, starting with an empty one"
            return Snapshot()

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot; the epoch on disk never decreases."""
        with self._writing:
            self._epoch = max(self._epoch, snapshot.epoch)
            snapshot = msgspec.structs.replace(snapshot, epoch=self._epoch)
            write_durably(self.path, msgspec.json.encode(snapshot))


class RevocationFile:
    """The signed revocations that this node knows; the set only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_into(self, trust: TrustStore) -> None:
        """Load the revocations before any message is accepted. A damaged file is an error: a revoked key must stay revoked."""
        try:
            for sealed in _sealed_decoder.decode(self.path.read_bytes()):
                with suppress(TooManyStatements):  # a file of 0.1.0, which had one bound for all founders
                    trust.admit_statement(sealed)
        except FileNotFoundError:
            return
        except (TrustError, *MALFORMED) as error:
            raise TrustError(
                f"{self.path} is damaged ({error}): restore it from a backup, or remove it; the other nodes send the "
                "revocations that they know again"
            ) from error

    def write(self, sealed: list[bytes]) -> None:
        write_durably(self.path, msgspec.msgpack.encode(sealed))


class InviteUse(msgspec.Struct, frozen=True):
    key: bytes
    not_after: int
    nodes: tuple[bytes, ...]


class _Uses(msgspec.Struct, frozen=True):
    since_unix: int
    uses: tuple[InviteUse, ...] = ()
    count: int = 0


class UsedInvites:
    """The machines that each invite of this node has admitted, until it ends.

    An invite older than the file is void: a lost file must not make used invites valid again. Nor must an old copy of it: `count`
    tells its age, the uses in all, and while `held`, until somebody has compared it, no invite is decided on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self.held = False
        self._since_unix = 0
        self._uses: dict[bytes, InviteUse] = {}

    def read(self, now_unix: float) -> None:
        """Read the file. If there is none, or it is damaged, invites of before now are void."""
        try:
            found = _uses_decoder.decode(self._path.read_bytes())
        except (FileNotFoundError, *MALFORMED):
            found = _Uses(int(now_unix))
            write_durably(self._path, msgspec.msgpack.encode(found))
        self._since_unix, self._uses, self.count = found.since_unix, {use.key: use for use in found.uses}, found.count

    def void(self, count: int, now_unix: float) -> None:
        """Void the invites made until now, on disk on return: this file is a copy from before there were `count` uses."""
        self._write(int(now_unix) + 1, self._uses, max(count, self.count))

    def take(self, grant: Grant, node: NodeId, now_unix: float) -> bool:
        """Use an invite for a node, on disk on return; False if it has no use left. The same node uses it once."""
        known = self._uses.get(grant.key, InviteUse(grant.key, grant.not_after, ()))
        if node in known.nodes:
            return True
        if len(known.nodes) >= grant.uses or grant.made_unix < self._since_unix:
            return False
        uses = {key: use for key, use in self._uses.items() if now_unix <= use.not_after + CLOCK_GRACE_S}
        uses[grant.key] = InviteUse(grant.key, grant.not_after, (*known.nodes, node))
        self._write(self._since_unix, uses, self.count + 1)
        return True

    def _write(self, since_unix: int, uses: dict[bytes, InviteUse], count: int) -> None:
        write_durably(self._path, msgspec.msgpack.encode(_Uses(since_unix, tuple(uses.values()), count)))
        self._since_unix, self._uses, self.count = since_unix, uses, count


_uses_decoder = msgspec.msgpack.Decoder(_Uses)
_sealed_decoder = msgspec.msgpack.Decoder(list[bytes])


def next_epoch(saved: int, wall_ms: int) -> int:
    """Return an epoch above every one this node has used, even after a lost disk if the clock is roughly right.

    A saved epoch too far ahead of the clock comes from a clock that was wrong by years. No peer accepted it, so it is ignored.
    """
    return wall_ms if saved > wall_ms + EPOCH_AHEAD_MS else max(saved + 1, wall_ms)

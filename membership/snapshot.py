"""What a node must not forget: its epoch, and the addresses of peers it has seen.

The epoch is written and fsynced before the first packet of a run, and grows with every run, so that a reborn node
outranks every rumour about its former life. Dead peers' addresses are kept too: after an outage of everything they are
the way back (serf issue 333).
"""

from pathlib import Path
from threading import Lock

import msgspec

from membership.durable import write_durably
from membership.trust import TrustError, TrustStore
from membership.wire import EPOCH_AHEAD_MS

PEERS_KEPT = 256


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
        """The last snapshot; a damaged one is moved aside, with a warning, and costs only some discovery."""
        try:
            return _decoder.decode(self.path.read_bytes())
        except FileNotFoundError:
            return Snapshot()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            aside = self.path.with_suffix(".damaged")
            self.path.replace(aside)
            self.warning = f"{self.path} could not be read ({error}); moved to {aside}, starting afresh"
            return Snapshot()

    def write(self, snapshot: Snapshot) -> None:
        """An epoch once written never falls."""
        with self._writing:
            self._epoch = max(self._epoch, snapshot.epoch)
            snapshot = msgspec.structs.replace(snapshot, epoch=self._epoch)
            write_durably(self.path, msgspec.json.encode(snapshot))


class RevocationFile:
    """The revocations a node knows. They only grow, and each proves itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_into(self, trust: TrustStore, now_unix: float) -> None:
        """Before anything is heard: what was revoked stays revoked. A damaged file is an error, not an amnesty."""
        try:
            for sealed in _sealed_decoder.decode(self.path.read_bytes()):
                trust.admit_revocation(sealed, now_unix)
        except FileNotFoundError:
            return
        except (msgspec.MsgspecError, UnicodeDecodeError, TrustError) as error:
            raise TrustError(
                f"{self.path} is damaged ({error}): remove it, and the revocations come back from other nodes"
            ) from error

    def write(self, sealed: list[bytes]) -> None:
        write_durably(self.path, msgspec.msgpack.encode(sealed))


_sealed_decoder = msgspec.msgpack.Decoder(list[bytes])


def next_epoch(saved: int, wall_ms: int) -> int:
    """Above every epoch this node has used, even if its disk was wiped and its clock is merely roughly right.

    One that is so far ahead that nobody can have taken it for true, since a clock was wrong by years, does not count.
    """
    return wall_ms if saved > wall_ms + EPOCH_AHEAD_MS else max(saved + 1, wall_ms)

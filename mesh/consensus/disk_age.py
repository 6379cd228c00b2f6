"""Disk age: how many times a journal has saved promises, and how often invites of its node were used, as it tells the others.

A journal that was restored from an older copy has forgotten promises. If another node has heard of more saves than the journal
has, its disk takes another name: it counts as lost, and is another voter (`record.Voter`). A file of used invites that others
know newer, or that comes with an older journal, has forgotten uses: the node voids its invites.
"""

import msgspec

from membership.lengths import Id
from membership.malformed import MALFORMED

SECTION = "disk"
TTL_S = 29 * 86_400.0  # nearly as long as membership lets a section live: a machine may be away for weeks
PUBLISH_EVERY_S = 10.0  # at most (own choice); what was saved since is not noticed to be missing
HEAR_WITHIN_S = 2.0  # at a start, to be told by another node (own choice)


class DiskAge(msgspec.Struct, frozen=True):
    """The name of a journal's disk, the number of its saves that are certainly on it, and of the uses of this node's invites."""

    disk: Id
    saves: int
    uses: int = 0


_decoder = msgspec.msgpack.Decoder(DiskAge)


def encode_disk_age(age: DiskAge) -> bytes:
    return msgspec.msgpack.encode(age)


def is_old_copy(own: DiskAge, heard: bytes | None) -> bool:
    """Tell whether this journal was copied before its node published what others have heard."""
    published = _decode(heard)
    return published is not None and published.disk == own.disk and published.saves > own.saves


def uses_heard(heard: bytes | None) -> int:
    """Return how many uses of this node's invites others have heard of."""
    published = _decode(heard)
    return published.uses if published is not None else 0


def _decode(heard: bytes | None) -> DiskAge | None:
    try:
        return _decoder.decode(heard or b"")
    except MALFORMED:
        return None

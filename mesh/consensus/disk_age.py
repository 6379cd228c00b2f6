"""Disk age: how many times a journal has saved promises, as its node tells the others.

A journal that was restored from an older copy has forgotten promises. If another node has heard of more saves than the journal
has, its disk takes another name: it counts as lost, and is another voter (`record.Voter`).
"""

import msgspec

from membership.lengths import Id
from membership.malformed import MALFORMED

SECTION = "disk"
TTL_S = 29 * 86_400.0  # nearly as long as membership lets a section live: a machine may be away for weeks
PUBLISH_EVERY_S = 10.0  # at most (own choice); what was saved since is not noticed to be missing
HEAR_WITHIN_S = 2.0  # at a start, to be told by another node (own choice)


class DiskAge(msgspec.Struct, frozen=True):
    """The name of a journal's disk, and the number of its saves that are certainly on it."""

    disk: Id
    saves: int


_decoder = msgspec.msgpack.Decoder(DiskAge)


def encode_disk_age(age: DiskAge) -> bytes:
    return msgspec.msgpack.encode(age)


def is_old_copy(own: DiskAge, heard: bytes | None) -> bool:
    """Tell whether this journal was copied before its node published what others have heard."""
    try:
        published = _decoder.decode(heard or b"")
    except MALFORMED:
        return False
    return published.disk == own.disk and published.saves > own.saves

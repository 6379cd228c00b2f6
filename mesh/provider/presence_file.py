"""The owner's presence across restarts of the daemon: `presence.json` in the state directory.

An owner who was present two minutes ago still counts as present after a restart. The file is written when the presence changes.
Its times stay valid within one boot; after a reboot they are shifted by the wall clock.
"""

from pathlib import Path

import msgspec

from membership.durable import write_durably
from mesh.provider.presence import Memory

MOST_BYTES = 1 << 16


class Moment(msgspec.Struct, frozen=True):
    """One moment on two clocks: CLOCK_BOOTTIME of one boot, and the wall clock."""

    boot: str
    boot_s: float
    unix_s: float


class _Kept(msgspec.Struct, frozen=True):
    at: Moment
    memories: tuple[Memory, ...]


def save_memories(path: Path, memories: tuple[Memory, ...], now: Moment) -> None:
    """Write the file durably. OSError on failure."""
    write_durably(path, msgspec.json.encode(_Kept(now, memories)))


def load_memories(path: Path, now: Moment) -> tuple[Memory, ...]:
    """Read the file and shift its times to `now`; empty if there is none. OSError or ValueError if it cannot be read."""
    try:
        with path.open("rb") as file:
            kept = msgspec.json.decode(file.read(MOST_BYTES), type=_Kept)
    except FileNotFoundError:
        return ()
    if kept.at.boot == now.boot:
        return kept.memories
    away_s = max(0.0, now.unix_s - kept.at.unix_s)
    return tuple(memory.moved(now.boot_s - away_s - kept.at.boot_s) for memory in kept.memories)

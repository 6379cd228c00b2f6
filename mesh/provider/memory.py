"""The owner's presence over restarts of the daemon: `presence.json` in the state directory.

Who was here two minutes ago is no stranger because the daemon was started anew. Written when something in it changes, which is
when somebody comes or goes. On the same boot its times mean the same; after another one they are moved by the wall clock.
"""

from pathlib import Path

import msgspec

from membership.durable import write_durably
from mesh.provider.presence import Memory

MOST_BYTES = 1 << 16


class Moment(msgspec.Struct, frozen=True):
    """One moment by both clocks: CLOCK_BOOTTIME of this boot of the machine, and the wall's."""

    boot: str
    boot_s: float
    unix_s: float


class _Kept(msgspec.Struct, frozen=True):
    at: Moment
    memories: tuple[Memory, ...]


def save_memories(path: Path, memories: tuple[Memory, ...], now: Moment) -> None:
    """OSError if it cannot be written."""
    write_durably(path, msgspec.json.encode(_Kept(now, memories)))


def load_memories(path: Path, now: Moment) -> tuple[Memory, ...]:
    """As of `now`; nothing if nothing was kept. OSError or ValueError if it cannot be read."""
    try:
        with path.open("rb") as file:
            kept = msgspec.json.decode(file.read(MOST_BYTES), type=_Kept)
    except FileNotFoundError:
        return ()
    if kept.at.boot == now.boot:
        return kept.memories
    away_s = max(0.0, now.unix_s - kept.at.unix_s)
    return tuple(memory.moved(now.boot_s - away_s - kept.at.boot_s) for memory in kept.memories)

"""Versions of the wire protocol and of state directories (docs/explanation/compatibility.md)."""

from pathlib import Path

from membership.durable import write_durably
from mesh.util.errors import ConfigError

WIRE = 1  # of messages between nodes: the version byte of an envelope (`membership.envelope.VERSION`)
STATE = 1  # of a state directory; raised when an older daemon would damage a newer one's state


def claim_state(path: Path) -> None:
    """Check and update the version of a state directory, in `path`.

    ConfigError, with nothing changed, if a newer campus-mesh wrote it or its version is unreadable.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = "0"  # before there were versions
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    digits = text.strip(" \r\n")
    found = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
    if found is None:
        raise ConfigError(f"{path} holds {text[:40]!r}, which is not a version; a newer campus-mesh may know it")
    if found > STATE:
        raise ConfigError(
            f"{path.parent} was written by a newer campus-mesh (state {found}; this one knows {STATE}), and an older one would "
            "damage it. Upgrade this node again, or start with another directory: `mesh --state DIR up`"
        )
    if found < STATE:
        write_durably(path, f"{STATE}\n".encode())

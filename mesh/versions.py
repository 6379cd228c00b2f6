"""The versions that nodes and their state directories tell and check (docs/upgrade.md)."""

from pathlib import Path

from membership.durable import write_durably
from mesh.api.errors import ConfigError

WIRE = 1  # of what nodes say to each other: the version byte of an envelope (`membership.envelope.VERSION`)
STATE = 1  # of a state directory; grows when an older daemon would damage what a newer one has written


def claim_state(path: Path) -> None:
    """Take this directory's state over: `path` says of which version it is. ConfigError, and nothing is changed, if a newer
    campus-mesh has written it, or it cannot be told."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = "0"  # before there were versions
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    found = int(text) if text.strip().isascii() and text.strip().isdigit() and len(text) < 10 else None
    if found is None:
        raise ConfigError(f"{path} says {text[:40]!r}, which is no version; a newer campus-mesh may know it")
    if found > STATE:
        raise ConfigError(
            f"{path.parent} was written by a newer campus-mesh (state {found}; this one knows {STATE}), and an older one would "
            "damage it. Upgrade this node again, or start with another directory: `mesh --state DIR up`"
        )
    if found < STATE:
        write_durably(path, f"{STATE}\n".encode())

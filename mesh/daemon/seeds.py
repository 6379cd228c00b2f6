"""Addresses of others that a node starts with: what its owner wrote down, and what came with the invite."""

import logging
from pathlib import Path

from membership.addresses import parse_seed
from mesh.daemon.config import GOSSIP_PORT
from mesh.util.errors import ConfigError

log = logging.getLogger(__name__)


def checked_seeds(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses of config.toml; ConfigError if one is wrong."""
    for address in addresses:
        try:
            parse_seed(address, GOSSIP_PORT)
        except ValueError as error:
            raise ConfigError(f"join: {error}") from error
    return addresses


def read_seeds(path: Path) -> list[str]:
    """Return the addresses that came with the invite; skip and log those that cannot be read."""
    usable = []
    for text in path.read_text(errors="replace").split() if path.exists() else []:
        try:
            parse_seed(text, GOSSIP_PORT)
        except ValueError as error:
            log.warning("%s: %s", path, error)
        else:
            usable.append(text)
    return usable

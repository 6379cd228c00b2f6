"""campus-mesh: lend and borrow lab GPUs on a campus LAN. No server, no admin."""

__version__ = "0.1.0"

"""Where a node keeps its state: a directory that is one user's. Light at import, as all that each command begins with."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from membership.durable import write_durably
from mesh.api.errors import ConfigError

if TYPE_CHECKING:
    from membership.identity import Identity

CLOSED = 0o700  # of the state directory


def state_directory(explicit: str | None = None) -> Path:
    """`--state`, else $MESH_STATE, else $XDG_STATE_HOME/campus-mesh, else ~/.local/state/campus-mesh."""
    chosen = explicit or os.environ.get("MESH_STATE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "campus-mesh"


class Layout(NamedTuple):
    """The files of one node's state directory."""

    root: Path

    def make(self) -> None:
        """Create the directory, or close one that others may look into: keys, journals and what jobs print lie in it.

        ConfigError if it belongs to somebody else, or something in it does: files of two users end in errors much later.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=CLOSED)
        for path in (self.root, *self.root.iterdir()):
            try:
                found = path.lstat()
            except FileNotFoundError:  # a file that was just replaced
                continue
            if found.st_uid != os.geteuid():
                theirs, mine = _user(found.st_uid), _user(os.geteuid())
                raise ConfigError(
                    f"{path} belongs to {theirs}, not to {mine}, as whom this runs. "
                    f"Run it as {theirs}; or, if that was a slip (sudo?): sudo chown -R {mine} {self.root}"
                )
        if self.root.stat().st_mode & 0o077:
            self.root.chmod(CLOSED)

    def exposed(self) -> str:
        """Where somebody else could put another directory in the place of this one, in words; empty if nowhere."""
        for parent in self.root.parents:
            mode = parent.stat().st_mode
            if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
                return f"others may rename what is in {parent}, and so replace {self.root}"
        return ""

    @property
    def needs(self) -> Path:
        """What Python functions have needed (`gpus="auto"`)."""
        return self.root / "needs.sqlite"

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def policy(self) -> Path:
        """When this machine is lent, and how it is taken back."""
        return self.root / "policy.toml"

    @property
    def lending(self) -> Path:
        """What its owner has said last: lend, pause, which GPUs not."""
        return self.root / "lending.json"

    @property
    def presence(self) -> Path:
        """That its owner was here a moment ago, for a daemon that starts anew."""
        return self.root / "presence.json"

    @property
    def key(self) -> Path:
        return self.root / "node.key"

    @property
    def genesis(self) -> Path:
        return self.root / "genesis"

    @property
    def chain(self) -> Path:
        return self.root / "chain"

    @property
    def version(self) -> Path:
        """Which version of the state this is."""
        return self.root / "version"

    @property
    def seeds(self) -> Path:
        return self.root / "seeds"

    @property
    def allow_list(self) -> Path:
        """Keys that are let in without asking, where this node may admit."""
        return self.root / "allow"

    @property
    def tls(self) -> Path:
        return self.root / "tls.pem"

    @property
    def journal(self) -> Path:
        return self.root / "journal.sqlite"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def gossip(self) -> Path:
        return self.root / "gossip"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def log(self) -> Path:
        return self.root / "daemon.log"

    @property
    def lock(self) -> Path:
        return self.root / "daemon.lock"

    @property
    def guests(self) -> Path:
        """The register of live guests, for the kill-switch."""
        return self.root / "guests"

    @property
    def edge(self) -> Path:
        """Where the edge's switch is, while it is in use; like the edge itself it is gone when the machine starts anew."""
        return Path("/run/campus-mesh") / f"edge-{self._tag}"

    @property
    def socket(self) -> Path:
        """The daemon's local socket."""
        return self._socket("mesh.sock")

    @property
    def kill_socket(self) -> Path:
        """The kill-switch's own."""
        return self._socket("kill.sock")

    def _socket(self, name: str) -> Path:
        """A long state path falls back to a short name (107 bytes fit in sun_path)."""
        near = self.root / name
        if len(os.fsencode(near)) <= 100:
            return near
        return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/campus-mesh-{os.getuid()}") / f"{self._tag}-{name}"

    @property
    def _tag(self) -> str:
        from hashlib import blake2b

        return blake2b(os.fsencode(self.root), digest_size=8).hexdigest()


def save_membership(where: Layout, identity: "Identity", genesis: bytes, chain: bytes, seeds: tuple[str, ...]) -> None:
    """The files that make a node a member; the genesis last, since it is what says that there is one."""
    from membership.identity import short_id
    from mesh.api.tls import make_certificate

    write_durably(where.seeds, "\n".join(seeds).encode())
    write_durably(where.chain, chain)
    if not where.tls.exists():
        make_certificate(where.tls, identity.seed, short_id(identity.node_id))
    write_durably(where.genesis, genesis)


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"

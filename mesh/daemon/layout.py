"""The files of a node's state and configuration. Light at import, since every command begins here."""

import os
import stat
from pathlib import Path
from typing import NamedTuple

from membership.durable import write_durably
from membership.own_cache import make_own
from mesh.util.errors import ConfigError, MeshError

CLOSED = 0o700  # of the state directory


def node_layout(explicit: str | None = None) -> "Layout":
    """Return the files of the node that `--state` names, else $MESH_STATE, else of this user's own node.

    A named node keeps its configuration in its state directory, so that several nodes fit on one machine. The user's own node
    follows the XDG base directories: its configuration is in $XDG_CONFIG_HOME/campus-mesh (~/.config), its state in
    $XDG_STATE_HOME/campus-mesh (~/.local/state).
    """
    chosen = explicit or os.environ.get("MESH_STATE")
    if chosen:
        return Layout(Path(chosen).expanduser().resolve())
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Layout(Path(state).expanduser() / "campus-mesh", Path(config).expanduser() / "campus-mesh")


class Layout(NamedTuple):
    """The files of one node. `config_root` holds its configuration; None: the state directory does."""

    root: Path
    config_root: Path | None = None

    def make(self) -> None:
        """Create both directories; close a state directory that others may read: it holds keys, journals and job output.

        ConfigError if it belongs to somebody else, or something in it does: files of two users end in errors much later.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=CLOSED)
        self.config.parent.mkdir(parents=True, exist_ok=True, mode=CLOSED)
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
        """Return a warning if another user could replace this directory; empty if not."""
        for directory in dict.fromkeys((self.root, self.config.parent)):
            for parent in directory.parents:
                mode = parent.stat().st_mode if parent.exists() else 0
                if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
                    return f"other users can rename files in {parent}, and so replace {directory}"
        return ""

    @property
    def needs(self) -> Path:
        """Resources that Python functions have needed (`gpus="auto"`)."""
        return self.root / "needs.sqlite"

    @property
    def config(self) -> Path:
        return (self.config_root or self.root) / "config.toml"

    @property
    def policy(self) -> Path:
        """The owner's policy: when this machine is lent, and how it is reclaimed."""
        return (self.config_root or self.root) / "policy.toml"

    @property
    def lending(self) -> Path:
        """The owner's last order: lend, pause, withheld GPUs."""
        return self.root / "lending.json"

    @property
    def presence(self) -> Path:
        """The owner's last presence, for a daemon that restarts."""
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
        """The version of the state format."""
        return self.root / "version"

    @property
    def seeds(self) -> Path:
        return self.root / "seeds"

    @property
    def allow_list(self) -> Path:
        """Keys that are let in without asking, where this node may admit."""
        return self.root / "allow"

    @property
    def journal(self) -> Path:
        return self.root / "journal.sqlite"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def secrets(self) -> Path:
        """The user's secrets, sealed to the node's key."""
        return self.root / "secrets"

    @property
    def data(self) -> Path:
        """Data sets: chunks, and trees of files for guests."""
        return self.root / "data"

    @property
    def environments(self) -> Path:
        """Python environments of jobs."""
        return self.root / "environments"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def apptainer_images(self) -> Path:
        """Unpacked images of the `apptainer` engine."""
        return self.images / "apptainer"

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
        """The BPF file system of the network edge; like the edge itself it does not survive a reboot."""
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
        """A long state path falls back to a short name (107 bytes fit in sun_path). MeshError if others could listen there."""
        near = self.root / name
        if len(os.fsencode(near)) <= 100:
            return near
        given = os.environ.get("XDG_RUNTIME_DIR")
        place = Path(given or f"/tmp/campus-mesh-{os.geteuid()}")
        if not given:
            try:
                make_own(place)
            except OSError as error:
                raise MeshError(
                    f"{error}, and the path of the state directory is too long for sockets: choose a shorter one with --state, "
                    "or set XDG_RUNTIME_DIR"
                ) from error
        return place / f"{self._tag}-{name}"

    @property
    def _tag(self) -> str:
        from hashlib import blake2b

        return blake2b(os.fsencode(self.root), digest_size=8).hexdigest()


def save_membership(where: Layout, genesis: bytes, chain: bytes, seeds: tuple[str, ...]) -> None:
    """The files that make a node a member; the genesis last, since it is what says that there is one."""
    write_durably(where.seeds, "\n".join(seeds).encode())
    write_durably(where.chain, chain)
    write_durably(where.genesis, genesis)


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"

"""Where a node keeps its state, and the few settings its owner may write down (TOML, `config.toml` in the state directory).

Unknown keys and wrong types are errors that name the line's key: a typo must never silently mean "default".
"""

import math
import os
import stat
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from membership.durable import write_durably

GOSSIP_PORT = 7373  # unassigned at IANA in this range; UDP and TCP
API_PORT = 7374
CLOSED = 0o700  # of the state directory

Profile = Literal["lan", "local"]


class ConfigError(ValueError):
    """The configuration cannot be used; the text names the file, the key and the reason."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node's settings. `profile` picks the gossip timings: `lan`, or `local` for many daemons on one machine."""

    nick: str = ""
    bind: str = "0.0.0.0"
    advertise: str = ""
    port: int = GOSSIP_PORT
    api_port: int = API_PORT
    zone: str = ""
    profile: Profile = "lan"
    join: tuple[str, ...] = ()
    mdns: bool = True
    lend: bool = False
    slots: int = 1
    gpu_sharing: bool = True  # whether a GPU may have several guests, each with a share
    gpu_bypass: Literal["warn", "pause", "kill"] = "pause"  # what happens to a job that is past the guard of its GPUs
    accepts: tuple[str, ...] = ("*",)
    process_engine_for: Literal["own", "all"] = "own"
    process_network: Literal["host", "none"] = "host"  # of guests of the process engine
    engines: tuple[str, ...] = ("process", "docker")
    open: bool = False
    lease_s: float = 15.0
    grace_s: float = 30.0
    store_quota_gib: float | None = None
    foreign_quota_gib: float | None = None
    encrypt: bool = True
    max_memory_gib: float | None = (
        None  # of one job, as all up to `egress`; without it, an eighth of the memory stays the owner's
    )
    max_cpus: float | None = None
    max_pids: int = 4096
    shm_gib: float | None = None  # without it, half of the job's memory
    max_disk_gib: float | None = None  # without it, half of what is free when a job starts
    egress: Literal["none", "campus", "list"] = "none"  # what containers may reach
    egress_allow: tuple[str, ...] = ()
    upload_mbps: float = 0.0  # megabits per second for checkpoints that are not urgent; 0 is no limit


def state_directory(explicit: str | None = None) -> Path:
    """`--state`, else $MESH_STATE, else $XDG_STATE_HOME/campus-mesh, else ~/.local/state/campus-mesh."""
    chosen = explicit or os.environ.get("MESH_STATE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "campus-mesh"


class Layout(msgspec.Struct, frozen=True):
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
    def config(self) -> Path:
        return self.root / "config.toml"

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
    def paused(self) -> Path:
        """There while the owner has paused lending."""
        return self.root / "paused"

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
        from hashlib import blake2b

        tag = blake2b(os.fsencode(self.root), digest_size=8).hexdigest()
        return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/campus-mesh-{os.getuid()}") / f"{tag}-{name}"


def load_settings(path: Path, overrides: dict[str, object]) -> Settings:
    """The file's settings, if there is one, with `overrides` (from the command line) on top."""
    values: dict[str, object] = {}
    if path.exists():
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
    values |= overrides
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    for label, port in [("port", settings.port), ("api_port", settings.api_port)]:
        if not 0 <= port <= 65535:
            raise ConfigError(f"{path}: {label} must be 0 to 65535, not {port}")
    for label, quota in [
        ("store_quota_gib", settings.store_quota_gib),
        ("foreign_quota_gib", settings.foreign_quota_gib),
    ]:
        if quota is not None and not 0 <= quota < 2**30:
            raise ConfigError(f"{path}: {label} must be a number of GiB from 0, not {quota}")
    _check_ceilings(path, settings)
    if not 0 <= settings.slots <= 1024:
        raise ConfigError(f"{path}: slots must be 0 to 1024, not {settings.slots}")
    if not (math.isfinite(settings.upload_mbps) and settings.upload_mbps >= 0):
        raise ConfigError(
            f"{path}: upload_mbps must be 0 (no limit) or megabits per second, not {settings.upload_mbps:g}"
        )
    return settings


def _check_ceilings(path: Path, settings: Settings) -> None:
    for label in ("max_memory_gib", "max_cpus", "shm_gib", "max_disk_gib"):
        ceiling = getattr(settings, label)
        if ceiling is not None and not 0.01 <= ceiling < 2**20:
            raise ConfigError(f"{path}: {label} must be a number from 0.01, not {ceiling}")
    if not 16 <= settings.max_pids <= 2**22:
        raise ConfigError(f"{path}: max_pids must be 16 to {2**22}, not {settings.max_pids}")
    from mesh.engine.egress import policy_of

    try:
        policy_of(settings.egress, settings.egress_allow)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def save_membership(where: Layout, genesis: bytes, chain: bytes, seeds: tuple[str, ...]) -> None:
    """The three files that make a node a member; the genesis last, since it is what says that there is one."""
    for path, data in ((where.seeds, "\n".join(seeds).encode()), (where.chain, chain), (where.genesis, genesis)):
        write_durably(path, data)

"""The few settings that a node's owner may write down (TOML, `config.toml` in the state directory).

Unknown keys and wrong types are errors that name the line's key: a typo must never silently mean "default".
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from mesh.api.errors import ConfigError

GOSSIP_PORT = 7373  # unassigned at IANA in this range; UDP and TCP
API_PORT = 7374

INTERFACE = re.compile(r"(?!\.{1,2}$)[^\s/:\0]{1,15}")  # dev_valid_name in the kernel; and what tc can be told

Profile = Literal["lan", "local"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node's settings. `profile` picks the gossip timings: `lan`, or `local` for many daemons on one machine."""

    nick: str = ""  # with which it founds or joins a mesh; from then on its certificate has it
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
    interactive: bool = True  # whether guests' users may go into them: exec, forward, jupyter
    process_engine_for: Literal["own", "all"] = "own"
    process_network: Literal["host", "none"] = "host"  # of guests of the process engine
    process_home: Literal["private", "shared"] = "private"  # whether they have a home of their own, or see the owner's
    process_sees: tuple[str, ...] = ()  # what they may read of the owner's home all the same
    engines: tuple[str, ...] = ("process", "docker")
    web: bool = True  # whether `mesh web` may open this node's page, on loopback (docs/web.md)
    web_port: int = 0  # of that page; 0: any that is free
    open: bool = False
    lease_s: float = 15.0
    grace_s: float = 30.0
    store_quota_gib: float | None = None
    foreign_quota_gib: float | None = None
    keep_days: float = 7.0  # for which what a job has left here stays once it is over, however short room gets
    encrypt: bool = True
    max_memory_gib: float | None = (
        None  # of one job, as all up to `egress`; without it, an eighth of the memory stays the owner's
    )
    max_cpus: float | None = None
    max_pids: int = 4096
    shm_gib: float | None = None  # without it, half of the job's memory
    max_disk_gib: float | None = None  # without it, half of what is free when a job starts
    max_log_gib: float = 1.0  # of what a job prints; the rest is not kept
    egress: Literal["none", "campus", "list"] = "none"  # what containers may reach
    egress_allow: tuple[str, ...] = ()
    system_checkpoints: bool = (
        False  # whether CRIU may restore here, as root, what other nodes have saved (docs/isolation.md)
    )
    image_fetch: bool = True  # whether images on the mesh's list are fetched from other nodes when a job needs them
    image_cache_gib: float = 20.0  # of disk for layers of images that are given to others
    image_keep_gib: float = 100.0  # of images that were fetched; above it, the longest unused go
    image_keep_days: float = 30.0  # for which a fetched image stays that no job uses
    upload_mbps: float = 0.0  # megabits per second for checkpoints that are not urgent; 0 is no limit
    edge: Literal["auto", "off"] = (
        "auto"  # whether the kernel may watch the interfaces of guests, where that can be (docs/edge.md)
    )
    edge_device: str = (
        ""  # this machine's own interface, if what leaves by it is to be shaped too; none is touched otherwise
    )
    metrics_port: int = (
        0  # over HTTP, where Prometheus fetches what is measured here; 0: only on the daemon's own socket
    )
    metrics_address: str = "127.0.0.1"
    edge_mbps: float = 0.0  # megabits per second that its link carries; 0: as the card says


def load_settings(path: Path, overrides: dict[str, object]) -> Settings:
    """The file's settings, if there is one, with `overrides` (from the command line) on top."""
    return check_settings(written_settings(path) | overrides, path)


def written_settings(path: Path) -> dict[str, object]:
    """What the file says, whatever it is."""
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def parsed_setting(key: str, words: Sequence[str]) -> object:
    """A setting from words of a command line, as its type reads them."""
    hint = get_type_hints(Settings)[key]
    given: object = words[0]
    if get_origin(hint) is tuple:
        given = () if list(words) == [""] else tuple(words)
    elif len(words) != 1:
        raise ConfigError(f"{key} has one value, not {len(words)}")
    try:
        return msgspec.convert(given, hint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key} is {_kind(hint)}, not {' '.join(words)!r}") from error


def _kind(hint: object) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    kinds: dict[object, str] = {bool: "true or false", int: "a whole number", str: "a text"}
    return kinds.get(hint, "a number")


def check_settings(values: Mapping[str, object], path: Path) -> Settings:
    """What `path` says, if it can be used."""
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    for label, port in [
        ("port", settings.port),
        ("api_port", settings.api_port),
        ("metrics_port", settings.metrics_port),
        ("web_port", settings.web_port),
    ]:
        if not 0 <= port <= 65535:
            raise ConfigError(f"{path}: {label} must be 0 to 65535, not {port}")
    from ipaddress import ip_address

    try:
        ip_address(settings.metrics_address)
    except ValueError:
        raise ConfigError(
            f"{path}: metrics_address must be an address of this machine, as 127.0.0.1, not {settings.metrics_address!r}"
        ) from None
    for label, quota in [
        ("store_quota_gib", settings.store_quota_gib),
        ("foreign_quota_gib", settings.foreign_quota_gib),
        ("image_cache_gib", settings.image_cache_gib),
        ("image_keep_gib", settings.image_keep_gib),
    ]:
        if quota is not None and not 0 <= quota < 2**30:
            raise ConfigError(f"{path}: {label} must be a number of GiB from 0, not {quota}")
    for label, days in (("image_keep_days", settings.image_keep_days), ("keep_days", settings.keep_days)):
        if not 0 <= days < 2**20:
            raise ConfigError(f"{path}: {label} must be a number of days from 0, not {days:g}")
    _check_ceilings(path, settings)
    if not 0 <= settings.slots <= 1024:
        raise ConfigError(f"{path}: slots must be 0 to 1024, not {settings.slots}")
    if not (math.isfinite(settings.upload_mbps) and settings.upload_mbps >= 0):
        raise ConfigError(
            f"{path}: upload_mbps must be 0 (no limit) or megabits per second, not {settings.upload_mbps:g}"
        )
    if not (math.isfinite(settings.edge_mbps) and 0 <= settings.edge_mbps <= 1e6):
        raise ConfigError(
            f"{path}: edge_mbps must be 0 (what the card says) or megabits per second, not {settings.edge_mbps:g}"
        )
    if settings.edge_device and settings.edge == "off":
        raise ConfigError(f"{path}: edge_device names {settings.edge_device!r}, but edge is off: remove one of the two")
    if settings.edge_device and not INTERFACE.fullmatch(settings.edge_device):
        raise ConfigError(
            f"{path}: edge_device must be the name of a network interface (`ip link`), not {settings.edge_device!r}"
        )
    return settings


def _check_ceilings(path: Path, settings: Settings) -> None:
    for label in ("max_memory_gib", "max_cpus", "shm_gib", "max_disk_gib", "max_log_gib"):
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

"""The few settings that a node's owner may write down (`config.toml`, in TOML).

Unknown keys and wrong types are errors that name the line's key: a typo must never silently mean "default".
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

import msgspec

from membership.config import MAX_RELAYED
from mesh.util.errors import ConfigError
from placement.bounds import MAX_SLOTS

if TYPE_CHECKING:
    from mesh.execution.ceilings import Ceilings

GOSSIP_PORT = 7373  # unassigned at IANA in this range; UDP and TCP

INTERFACE = re.compile(r"(?!\.{1,2}$)[^\s/:\0]{1,15}")  # dev_valid_name in the kernel; and what tc can be told
REGISTRY = re.compile(
    r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?"
)  # the domain of an image's name, without capitals

Profile = Literal["lan", "local"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one node. The page of settings in the docs is made from these comments."""

    nick: str = ""  # name with which `mesh init` and `mesh join` register the node
    bind: str = ""  # address to listen on; empty: all, IPv4 and IPv6
    advertise: str = ""  # address that other nodes use; empty: detected
    port: int = GOSSIP_PORT  # UDP and TCP: gossip, and calls between nodes
    api_port: int = 0  # a TCP port of its own for calls between nodes; 0: none, they use `port`
    zone: str = ""  # zone of this node; empty: its subnet
    profile: Profile = "lan"  # gossip timings; `local` for several daemons on one machine
    join: tuple[str, ...] = ()  # addresses of nodes to contact at the start
    mdns: bool = True  # find nodes by multicast DNS
    lend: bool = False  # lend this machine
    slots: int = 1  # guests without a GPU at the same time
    gpu_sharing: bool = True  # let several guests share a GPU
    gpu_bypass: Literal["warn", "pause", "kill"] = "pause"  # reaction to a job that bypasses the GPU guard
    accepts: tuple[str, ...] = ("*",)  # users whose jobs run here
    trusted: tuple[str, ...] = ()  # users and nodes that `trusted` means in lists of nodes, for jobs submitted here
    interactive: bool = True  # let users enter their jobs here (exec, forward, jupyter)
    process_engine_for: Literal["own", "all"] = "own"  # whose jobs may run as plain processes, and by Apptainer
    process_network: Literal["host", "none"] = "host"  # network of plain processes
    process_home: Literal["private", "shared"] = (
        "private"  # home, /tmp and /run of plain processes: their own, or the owner's
    )
    process_sees: tuple[str, ...] = ()  # hidden paths that plain processes may read
    engines: tuple[str, ...] = (
        "process",
        "docker",
        "apptainer",
    )  # engines to offer; apptainer without a ready docker only
    web: bool = True  # allow `mesh top --web`, on loopback (docs/how-to/web.md)
    web_port: int = 0  # port of the page of `mesh top --web`; 0: any free port
    open: bool = False  # admit every node that asks to join
    lease_s: float = 15.0  # lease of jobs submitted here
    grace_s: float = 30.0  # time that guests have to save
    # size of the checkpoint store; default: as much as leaves a tenth of the disk free
    store_quota_gib: float | None = None
    foreign_quota_gib: float | None = None  # part of the store for jobs of other users; default: all of it
    keep_days: float = 7.0  # time for which data of finished jobs stays, even if space is low
    encrypt: bool = True  # encrypt the data of jobs submitted here
    max_memory_gib: float | None = None  # memory of one job; default: all but an eighth of the machine's
    max_cpus: float | None = None  # CPUs of one job; default: no limit
    max_pids: int = 4096  # processes and threads of one job
    shm_gib: float | None = None  # /dev/shm of one job; default: half of its memory
    max_disk_gib: float | None = None  # disk of one job; default: half of what is free when it starts
    # rate of one job's reads and of its writes on its directories; default: no limit
    max_disk_mib_s: float | None = None
    max_log_gib: float = 1.0  # log of one attempt; further output is dropped
    egress: Literal["none", "campus", "list"] = "none"  # networks that containers may reach
    egress_allow: tuple[str, ...] = ()  # networks for `egress = "list"`
    # Hosts that jobs may ask for by name, as api.wandb.ai:443, or groups of them: pypi (docs/how-to/network.md).
    network: tuple[str, ...] = ()
    # bytes that one job may exchange with hosts of `network`, both ways, until the daemon restarts
    network_gib: float = 50.0
    # Let CRIU restore checkpoints of other nodes as root (docs/explanation/isolation.md).
    system_checkpoints: bool = False
    image_fetch: bool = True  # fetch allowed images from other nodes when a job needs them
    image_registries: tuple[str, ...] = ()  # hosts of public registries to fetch listed images from, as docker.io
    image_users: tuple[str, ...] = ("mine",)  # users whose own images run here, unlisted; "*": everybody's
    image_cache_gib: float = 20.0  # disk for image layers that other nodes can fetch
    registry_port: int = 0  # port of the node's image registry, on loopback; 0: any free port, kept for later starts
    image_keep_gib: float = 100.0  # disk for fetched images; above it, the longest unused are removed
    image_keep_days: float = 30.0  # time for which an unused fetched image stays
    # disk for data sets; above it, those unused for longest that others have are removed; default: no limit
    data_quota_gib: float | None = None
    data: dict[str, str] = {}  # directories of this machine that stand for data sets, by name (docs/how-to/data.md)
    # Where `mesh run --uv` gets packages that no node has: an index (https://pypi.org/simple), a directory of wheels, or nowhere.
    uv_index: str = ""
    # Channels from which `mesh run --conda` gets packages that no node has, such as https://conda.anaconda.org/conda-forge.
    conda_channels: tuple[str, ...] = ()
    env_cache_gib: float = 20.0  # disk for environments of jobs; the longest unused are removed
    # nodes behind NAT or a firewall to which this one lends a port, the next ones above `port` (docs/how-to/connect.md); 0: none
    relay_nodes: int = 4
    relay_mbps: float = 100.0  # bandwidth of what it passes on for all of them
    upload_mbps: float = 0.0  # bandwidth of background checkpoints; 0: no limit
    # Cut guests off in the kernel (docs/explanation/edge.md), where it can.
    edge: Literal["auto", "off"] = "auto"
    # Interface of this machine on which outgoing traffic is shaped; empty: none.
    edge_device: str = ""
    edge_mbps: float = 0.0  # speed of the link of `edge_device`; 0: as the card reports
    metrics_port: int = 0  # TCP port for Prometheus; 0: metrics on the daemon's socket only
    metrics_address: str = "127.0.0.1"  # address of `metrics_port`


def load_settings(path: Path, overrides: dict[str, object]) -> Settings:
    """The file's settings, if there is one, with `overrides` (from the command line) on top."""
    written = written_settings(path)
    try:
        return check_settings(written | overrides, path)
    except ConfigError as error:
        text = str(error).removeprefix(f"{path}: ")
        found = re.match(r"(?:there is no setting ')?([A-Za-z0-9_-]+)", text)
        line = _line_of(path, found[1]) if found and found[1] in written and found[1] not in overrides else 0
        raise ConfigError(f"{path}, line {line}: {text}" if line else str(error)) from error


def _line_of(path: Path, key: str) -> int:
    """Return the line that sets a key; 0 if none is found."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begins = re.compile(rf"""\s*(?:\[\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((number for number, line in enumerate(lines, 1) if begins.match(line)), 0)


def written_settings(path: Path) -> dict[str, object]:
    """Return the file's values, unchecked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Correct that, or name another node with --state."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def parsed_setting(key: str, words: Sequence[str]) -> object:
    """A setting from words of a command line, as its type reads them."""
    hint = get_type_hints(Settings)[key]
    if get_origin(hint) is dict:
        raise ConfigError(f'{key} is a table: write it into the file, as [{key}] and lines NAME = "/path"')
    given: object = words[0]
    if get_origin(hint) is tuple:
        given = () if list(words) == [""] else tuple(words)
    elif len(words) != 1:
        raise ConfigError(f"{key} has one value, not {len(words)}")
    try:
        value: object = msgspec.convert(given, hint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key} is {_kind(hint)}, not {' '.join(words)!r}") from error
    if value is None:  # msgspec reads `null` so
        raise ConfigError(f"{key} is a number, not {words[0]!r}: `mesh config unset {key}` restores its default")
    return value


def _kind(hint: object) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) in {tuple, dict}:
        return (
            'a list of texts, as ["a", "b"]' if get_origin(hint) is tuple else 'a table of texts, as {name = "/path"}'
        )
    kinds: dict[object, str] = {bool: "true or false", int: "a whole number", str: "a text"}
    return kinds.get(hint, "a number")


def no_setting(key: str) -> str:
    """Return that there is no such setting, with one that reads alike."""
    from difflib import get_close_matches

    near = get_close_matches(key, Settings.__struct_fields__, 1)
    hint = f"did you mean {near[0]!r}?" if near else "`mesh config ls` lists them"
    return f"there is no setting {key!r}: {hint}"


def _wrong(values: Mapping[str, object]) -> str:
    """Return what is wrong with the first key that does not exist or has a value of another kind; empty if none is found."""
    hints = get_type_hints(Settings)
    for key, value in values.items():
        if key not in hints:
            return no_setting(key)
        try:
            msgspec.convert(value, hints[key])
        except msgspec.ValidationError:
            return f"{key} is {_kind(hints[key])}, not {value!r}"
    return ""


def check_settings(values: Mapping[str, object], path: Path) -> Settings:
    """Return the checked settings of `path`; ConfigError names the key that is wrong."""
    from mesh.model.bounds import MAX_GRACE_S, MAX_LEASE_S, MIN_LEASE_S
    from mesh.model.destinations import DestinationError, destinations

    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_wrong(values) or error}") from error
    for label, port in [
        ("port", settings.port),
        ("api_port", settings.api_port),
        ("metrics_port", settings.metrics_port),
        ("web_port", settings.web_port),
        ("registry_port", settings.registry_port),
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
        ("data_quota_gib", settings.data_quota_gib),
        ("image_keep_gib", settings.image_keep_gib),
        ("env_cache_gib", settings.env_cache_gib),
    ]:
        if quota is not None and not 0 <= quota < 2**30:
            raise ConfigError(f"{path}: {label} must be a number of GiB from 0, not {quota}")
    for label, seconds, least, most in [
        ("lease_s", settings.lease_s, MIN_LEASE_S, MAX_LEASE_S),
        ("grace_s", settings.grace_s, 0, MAX_GRACE_S),
    ]:
        if not least <= seconds <= most:
            raise ConfigError(f"{path}: {label} must be {least:g} to {most:g} seconds, not {seconds:g}")
    for label, days in (("image_keep_days", settings.image_keep_days), ("keep_days", settings.keep_days)):
        if not 0 <= days < 2**20:
            raise ConfigError(f"{path}: {label} must be a number of days from 0, not {days:g}")
    if not 0 <= settings.network_gib < 2**30:
        raise ConfigError(f"{path}: network_gib must be a number of GiB from 0, not {settings.network_gib}")
    try:
        destinations(settings.network)
    except DestinationError as error:
        raise ConfigError(f"{path}: network: {error}") from error
    for registry in settings.image_registries:
        if not REGISTRY.fullmatch(registry):
            raise ConfigError(f"{path}: image_registries holds names of hosts, as docker.io, not {registry!r}")
    _check_ceilings(path, settings)
    _check_data(path, settings.data)
    if not 0 <= settings.slots <= MAX_SLOTS:
        raise ConfigError(f"{path}: slots must be 0 to {MAX_SLOTS}, not {settings.slots}")
    if not (math.isfinite(settings.upload_mbps) and settings.upload_mbps >= 0):
        raise ConfigError(
            f"{path}: upload_mbps must be 0 (no limit) or megabits per second, not {settings.upload_mbps:g}"
        )
    if not 0 <= settings.relay_nodes <= MAX_RELAYED:
        raise ConfigError(f"{path}: relay_nodes must be 0 to {MAX_RELAYED}, not {settings.relay_nodes}")
    if not 0.1 <= settings.relay_mbps <= 1e6:
        raise ConfigError(f"{path}: relay_mbps must be megabits per second from 0.1, not {settings.relay_mbps:g}")
    if settings.uv_index and not settings.uv_index.startswith(("https://", "http://", "/")):
        raise ConfigError(f"{path}: uv_index must be an address or an absolute path, not {settings.uv_index!r}")
    for channel in settings.conda_channels:
        if not channel.startswith(("https://", "http://")):
            raise ConfigError(f"{path}: conda_channels holds addresses of channels, not {channel!r}")
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


def _check_data(path: Path, data: Mapping[str, str]) -> None:
    from mesh.model.spec import DATA_NAME

    for name, directory in data.items():
        if not DATA_NAME.fullmatch(name):
            raise ConfigError(f"{path}: data: {name[:80]!r} does not name a data set: NAME or USER/NAME")
        if not directory.startswith("/") or "\0" in directory or directory.strip("/.") == "":
            raise ConfigError(
                f"{path}: data: {name} must be a directory of this machine by its absolute path, not {directory!r}"
            )
    if len(data) > 64:
        raise ConfigError(f"{path}: data: at most 64 directories")


def _check_ceilings(path: Path, settings: Settings) -> None:
    for label in ("max_memory_gib", "max_cpus", "shm_gib", "max_disk_gib", "max_disk_mib_s", "max_log_gib"):
        ceiling = getattr(settings, label)
        if ceiling is not None and not 0.01 <= ceiling < 2**20:
            raise ConfigError(f"{path}: {label} must be a number from 0.01, not {ceiling}")
    if not 16 <= settings.max_pids <= 2**22:
        raise ConfigError(f"{path}: max_pids must be 16 to {2**22}, not {settings.max_pids}")
    from mesh.network.egress import policy_of

    try:
        policy_of(settings.egress, settings.egress_allow)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def ceilings_of(machine_mib: int, settings: Settings) -> "Ceilings":
    """Return what the owner lets one guest have, on a machine with `machine_mib` MiB of memory."""
    from mesh.execution.ceilings import GIB, KEPT_MIB, KEPT_SHARE, Ceilings

    kept, most = max(KEPT_MIB, machine_mib // KEPT_SHARE), settings.max_memory_gib
    memory = max(1, machine_mib - kept) if most is None else min(machine_mib, int(most * GIB))
    shm, disk = (None if gib is None else int(gib * GIB) for gib in (settings.shm_gib, settings.max_disk_gib))
    rate = None if settings.max_disk_mib_s is None else int(settings.max_disk_mib_s * 2**20)
    return Ceilings(memory, settings.max_pids, settings.max_cpus, shm, disk, int(settings.max_log_gib * GIB), rate)

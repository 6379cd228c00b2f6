"""Container settings with the fewest rights that the job contract needs (docs/explanation/isolation.md).

All capabilities dropped, no new privileges, Docker's default seccomp profile, read-only root, a user other than root, no network
unless the owner allows it (`egress.py`), no namespace of the host, no engine socket, and nothing of the host but the attempt's
directories, its data sets and environment (read-only), and the mounts of the node's guard. There is no setting for
privileged containers.
"""

import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import docker.types
import msgspec

from cuda_guard.guard import Mount
from mesh.execution.disk_usage import disk_of
from mesh.execution.engine import CKPT, CTL, INSIDE, NO_GPUS, OUT, WORK, Launch, contract_env
from mesh.execution.secret_files import VARIABLES
from mesh.util import trees
from mesh.util.processes import core_limit, user_limits

GUEST_UID = 65_532  # "nonroot" in distroless images; owns nothing on a normal host
# With this mapping of Podman a guest has the user of a rootless engine on both sides (podman-create(1)). Docker has none like it.
KEEP_ID = "keep-id"
LIKE_OURS = "0:0"  # which a rootless Docker maps to its own user
LIMITED_BY = frozenset({"memory", "pids", "cpu"})  # controllers without which a ceiling would not hold
DOCKER_LIMITS = {"memory": "MemoryLimit", "pids": "PidsLimit", "cpu": "CpuCfsQuota"}  # in the answer to GET /info
REMAPPED = re.compile(r"/(\d+)\.(\d+)$")  # how the data directory of an engine ends that maps users
NO_DISK_RATE = "No io.max (rbps) support"  # in its warnings
LABEL_JOB = "campus-mesh.job"
ULIMITS = {resource.RLIMIT_SIGPENDING: "sigpending", resource.RLIMIT_MSGQUEUE: "msgqueue"}
IN_MEMORY = "rw,nosuid,nodev,mode=1777,size=1g"  # counted as the guest's
INITS = {"Docker": ("docker-init",), "Podman": ("catatonit",)}
INIT_PATH = "/usr/libexec/docker:/usr/libexec/podman"
CDI, CDI_KIND = "cdi", "nvidia.com/gpu="
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of an image that names none (Docker's default)
SECRETS, SHELL = "/run/secrets", "/bin/sh"
GATE = ".gate"  # a FIFO in the control directory


class Traits(msgspec.Struct, frozen=True):
    """Properties of an engine.

    `init`: it has a program that reaps orphans and forwards signals; `cdi`: devices that it lists by the Container Device
    Interface; `experimental`: it can save and restore containers; `root`: its data directory; `rootless`: an ordinary user runs
    it; `remapped`: the user and the group outside that are a container's root (`userns-remap`); `disk_rate`: it can limit that;
    `unified`: its control groups have version 2; `runtime`: its OCI runtime; `problem`: why it can run no guests, empty if it
    can.
    """

    name: str = "Docker"
    version: str = ""
    init: bool = False
    cdi: frozenset[str] = frozenset()
    experimental: bool = False
    root: str = ""
    rootless: bool = False
    remapped: tuple[int, int] = (0, 0)
    disk_rate: bool = True
    unified: bool = False
    runtime: str = ""
    problem: str = ""

    @property
    def is_podman(self) -> bool:
        return self.name == "Podman"

    @property
    def userns(self) -> str:
        """The mapping of users that a container has to ask for; empty if it needs none."""
        return KEEP_ID if self.rootless and self.is_podman else ""

    @property
    def user(self) -> str:
        """A guest's user in the container. Outside, it is `GUEST_UID`, or this daemon's own user if that is not root."""
        if self.rootless and not self.is_podman:
            return LIKE_OURS
        return f"{GUEST_UID}:{GUEST_UID}" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"


def arguments(
    launch: Launch, labels: dict[str, str], network: str, traits: Traits, image: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of the SDK's `containers.create`.

    `network`: the container's own bridge, or "none". `image`: the configuration of its image. A volume that it declares would be
    a directory of the engine's, which no limit counts and which stays: an empty one in memory takes its place.
    """
    image = image or {}
    environment, devices = contract_env(launch, WORK, CKPT, OUT, CTL), _devices(launch.gpu_uuids, traits)
    environment |= {one.variable: one.target for one in launch.data}
    shown = [Mount(Path(one.source), Path(one.target)) for one in launch.data]
    if launch.environment is not None:
        environment["PATH"] = f"{INSIDE}/bin:{environment.get('PATH', _path_of(image))}"
        environment["VIRTUAL_ENV"] = INSIDE
        environment = {"PYTHONPATH": "", "PYTHONHOME": "", **environment}  # those of the image would hide packages
        shown.append(Mount(Path(launch.environment), Path(INSIDE)))
    if any(device.driver == CDI for device in devices):
        environment["NVIDIA_VISIBLE_DEVICES"] = (
            NO_GPUS  # or NVIDIA's runtime would add them a second time (the CDI files say so)
        )
    volumes = {host: {"bind": inside, "mode": "rw"} for host, inside in launch.directories.items()} | _secrets(launch)
    mounts = (*launch.injection.mounts, *shown)
    own = {*(volume["bind"] for volume in volumes.values()), *(str(mount.target) for mount in mounts)}
    declared = {os.path.normpath("/" + place.lstrip("/")) for place in image.get("Volumes") or ()}
    chosen: dict[str, Any] = {
        "command": command_of(launch),
        "entrypoint": "",
        "healthcheck": {"test": ["NONE"]},  # its process would be none of the guest's
        "environment": environment,
        "working_dir": WORK,
        "user": traits.user,
        "volumes": volumes,
        "mounts": [
            docker.types.Mount(str(mount.target), str(mount.source), "bind", read_only=mount.read_only)
            for mount in mounts
        ],
        "labels": {**labels, LABEL_JOB: launch.job},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "privileged": False,
        "read_only": True,
        "tmpfs": dict.fromkeys({"/tmp", *declared} - own, IN_MEMORY),
        "shm_size": launch.shm_mib << 20,
        "network_mode": network,
        "ipc_mode": "private",
        "pids_limit": launch.pids,
        "device_requests": devices,
        "init": traits.init and not launch.system,  # Debian's is a link, and CRIU would mount the link
        "log_config": docker.types.LogConfig(type="none"),  # the attempt's log file is the only copy
    }
    if not traits.is_podman:  # which sets other limits with it, and may not be allowed those (4.3: open files)
        limits = {"core": core_limit(), **{ULIMITS[kind]: most for kind, most in user_limits().items()}}
        chosen["ulimits"] = [docker.types.Ulimit(name=name, soft=most, hard=most) for name, most in limits.items()]
    if launch.memory_mib is not None:
        chosen |= {"mem_limit": launch.memory_mib << 20, "memswap_limit": launch.memory_mib << 20}
    if launch.cpus is not None:
        chosen["nano_cpus"] = int(launch.cpus * 1e9)
    if launch.disk_bps is not None and traits.disk_rate and (disk := disk_of(launch.work_dir)) is not None:
        rates = [{"Path": disk.path, "Rate": launch.disk_bps}]
        chosen |= {"device_read_bps": rates, "device_write_bps": rates}
    return chosen


def _path_of(image: dict[str, Any]) -> str:
    """Return the PATH of an image."""
    found = [text.removeprefix("PATH=") for text in image.get("Env") or () if text.startswith("PATH=")]
    return found[-1] if found else PATH


def not_limited(launch: Launch, limits: dict[str, float]) -> list[str]:
    """Return what the control groups of a guest that has started do not limit as wanted (`cgroups.limits_of`)."""
    wanted: dict[str, float] = {"pids.max": launch.pids}
    if launch.memory_mib is not None:
        wanted |= {"memory.max": launch.memory_mib << 20, "memory.swap.max": 0}
    if launch.cpus is not None:
        wanted["cpu.max"] = launch.cpus
    return [file for file, most in wanted.items() if limits[file] > most]


def command_of(launch: Launch) -> list[str]:
    """Return the container's command. The engine keeps it and the environment on a disk, so a shell reads variables that are
    secrets from a file in memory. It also waits until the container's network has its proxy: a line comes through the gate.
    """
    steps = [f"read -r mesh < {CTL}/{GATE}"] if launch.proxy is not None else []
    steps += [f". {SECRETS}/{VARIABLES}"] if launch.secrets.variables else []
    if not steps:
        return list(launch.argv)
    return [SHELL, "-c", " && ".join([*steps, 'exec "$@"']), "mesh", *launch.argv]


def open_gate(launch: Launch, remapped: tuple[int, int]) -> int | None:
    """Make the gate at which a container with a proxy waits, and open it; what is written stays while the descriptor does."""
    if launch.proxy is None:
        return None
    path = Path(launch.ctl_dir, GATE)
    os.mkfifo(path, 0o600)
    gate = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if os.getuid() == 0:
        os.fchown(gate, *(GUEST_UID + root for root in remapped))
    return gate


def give_files(launch: Launch, remapped: tuple[int, int]) -> None:
    """Give the attempt's files to the container's user if the daemon runs as another user. `remapped`: as in `Traits`."""
    if os.getuid() == 0:
        for path in (
            *launch.directories,
            *_secrets(launch),
            *(str(m.source) for m in launch.injection.mounts if not m.read_only),
        ):
            _give(Path(path), *(GUEST_UID + root for root in remapped))


def _secrets(launch: Launch) -> dict[str, dict[str, str]]:
    place = launch.secrets.directory
    return {} if place is None else {place: {"bind": SECRETS, "mode": "ro"}}


def traits_of(version: dict[str, Any], info: dict[str, Any], host: dict[str, Any], lingers: bool) -> Traits:
    """Return the properties of an engine from its version and info; looks for its init program on this machine.

    `host`: what a rootless engine says of its machine, as Podman does (its own API, `/libpod/info`); `lingers`: this user's
    services outlive their logins.
    """
    parts = [str(part.get("Name", "")) for part in version.get("Components") or []]
    name = "Podman" if any("podman" in part.lower() for part in parts) else "Docker"
    found = [shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{INIT_PATH}") for program in INITS[name]]
    experimental, root = bool(info.get("ExperimentalBuild")), str(info.get("DockerRootDir", ""))
    unified, said = info.get("CgroupVersion") == "2", str(version.get("Version", ""))
    runtime = str(info.get("DefaultRuntime", ""))
    traits = Traits(name, said, any(found), cdi_devices(info), experimental, root, unified=unified, runtime=runtime)
    if is_rootless(info):
        problem, controllers = _rootless_problem(name, host, lingers), host.get("cgroupControllers") or ()
        return msgspec.structs.replace(traits, rootless=True, disk_rate="io" in controllers, problem=problem)
    if "name=userns" in _options(info):
        if os.getuid() == 0 and (ids := REMAPPED.search(root)):
            return msgspec.structs.replace(traits, remapped=tuple(map(int, ids.groups())))
        why = "maps users (userns-remap): only a daemon that root runs can give a guest its directories"
        return msgspec.structs.replace(traits, problem=f"{name} {why} (docs/explanation/isolation.md)")
    return traits


def is_rootless(info: dict[str, Any]) -> bool:
    return bool(info.get("Rootless")) or "name=rootless" in _options(info)


def docker_host(info: dict[str, Any], owner: int) -> dict[str, Any]:
    """Return what a rootless Docker says of its machine, in Podman's words. `owner`: the user of its socket, so its own."""
    controllers = [name for name, key in DOCKER_LIMITS.items() if info.get(key)]
    if not any(NO_DISK_RATE in warning for warning in info.get("Warnings") or ()):
        controllers.append("io")
    return {
        "idMappings": {"uidmap": [{"container_id": 0, "host_id": owner}]},
        "cgroupVersion": f"v{info.get('CgroupVersion')}",
        "cgroupManager": info.get("CgroupDriver"),
        "cgroupControllers": controllers,
    }


def _options(info: dict[str, Any]) -> set[str]:
    return {part for text in info.get("SecurityOptions") or () for part in str(text).split(",")}


def _rootless_problem(name: str, host: dict[str, Any], lingers: bool) -> str:
    """Return why a rootless engine can run no guests; empty if it can."""
    maps = (host.get("idMappings") or {}).get("uidmap") or ()
    missing = LIMITED_BY.difference(host.get("cgroupControllers") or ())
    if (0, os.getuid()) not in {(part.get("container_id"), part.get("host_id")) for part in maps}:
        why = "it is not of this daemon's user, so a guest could not write its own directories"
    elif host.get("cgroupVersion") != "v2" or host.get("cgroupManager") != "systemd":
        why = "its containers have limits only by control groups of version 2 and this user's systemd"
    elif missing:
        why = f"this user's systemd may not limit {', '.join(sorted(missing))}, so no ceiling would hold"
    elif not lingers:
        why = "its guests would end with this user's last login: `sudo loginctl enable-linger $USER`"
    else:
        return ""
    return f"{name} runs rootless: {why} (docs/explanation/isolation.md)"


def cdi_devices(info: dict[str, Any]) -> frozenset[str]:
    """Return the devices that the engine discovered by the Container Device Interface (Docker 28)."""
    found = info.get("DiscoveredDevices") or []
    return frozenset(str(device.get("ID")) for device in found if device.get("Source") == "cdi")


def _devices(uuids: tuple[str, ...], traits: Traits) -> list[Any]:
    """Request GPUs by UUID, never by index; by CDI, NVIDIA's preferred way, if the engine lists them or is Podman, which lists
    none and ignores other requests.
    """
    if not uuids:
        return []
    names = [CDI_KIND + uuid for uuid in uuids]
    if traits.is_podman or traits.cdi.issuperset(names):
        return [docker.types.DeviceRequest(driver=CDI, device_ids=names)]
    return [docker.types.DeviceRequest(device_ids=list(uuids), capabilities=[["gpu", "compute", "utility"]])]


def _give(path: Path, user: int, group: int) -> None:
    os.chown(path, user, group)
    for entry in trees.walk(path):
        os.chown(entry.path, user, group, follow_symlinks=False)

"""Container settings with the fewest rights that the job contract needs (docs/explanation/isolation.md).

All capabilities dropped, no new privileges, Docker's default seccomp profile, read-only root, a user other than root, no network
unless the owner allows it (`egress.py`), no namespace of the host, no engine socket, and nothing of the host but the attempt's
four directories, its data sets (read-only) and the mounts of the node's guard. There is no setting for privileged containers.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import docker.types
import msgspec

from cuda_guard.guard import Mount
from mesh.execution.disk_usage import disk_of
from mesh.execution.docker.watchdog import LABEL_NODE
from mesh.execution.engine import NO_GPUS, Launch, contract_env
from mesh.execution.secret_files import VARIABLES
from mesh.util import trees

GUEST_UID = 65_532  # "nonroot" in distroless images; owns nothing on a normal host
ROOTLESS = "rootless"
LABEL_JOB = "campus-mesh.job"
TMPFS = {"/tmp": "rw,nosuid,nodev,mode=1777,size=1g"}  # in memory, counted as the guest's
INITS = {"Docker": ("docker-init",), "Podman": ("catatonit",)}
INIT_PATH = "/usr/libexec/docker:/usr/libexec/podman"
CDI, CDI_KIND = "cdi", "nvidia.com/gpu="
WORK, CKPT, OUT, CTL = "/mesh/work", "/mesh/ckpt", "/mesh/out", "/mesh/ctl"
SECRETS, SHELL = "/run/secrets", "/bin/sh"
GATE = ".gate"  # a FIFO in the control directory


class Traits(msgspec.Struct, frozen=True):
    """Properties of an engine.

    `init`: it has a program that reaps orphans and forwards signals; `cdi`: devices that it lists by the Container Device
    Interface; `experimental`: it can save and restore containers; `root`: its data directory; `maps`: how it maps users, empty
    if it does not.
    """

    name: str = "Docker"
    version: str = ""
    init: bool = False
    cdi: frozenset[str] = frozenset()
    experimental: bool = False
    root: str = ""
    maps: str = ""

    @property
    def problem(self) -> str:
        """Return why this engine can run no guests; empty if it can."""
        if self.maps == ROOTLESS:
            return (
                f"{self.name} runs rootless: a guest could not write its own directories, and on control groups of version 1 no "
                "ceiling holds. Guests need an engine that root runs; this daemon itself needs no root "
                "(docs/explanation/isolation.md)"
            )
        if self.maps:
            return (
                f"{self.name} maps users ({self.maps}), so a guest could not write its own directories "
                "(docs/explanation/isolation.md)"
            )
        return ""


def arguments(launch: Launch, node: str, network: str, traits: Traits) -> dict[str, Any]:
    """Return the arguments of the SDK's `containers.create`. `network`: the container's own bridge, or "none"."""
    user = f"{GUEST_UID}:{GUEST_UID}" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"
    environment, devices = contract_env(launch, WORK, CKPT, OUT, CTL), _devices(launch.gpu_uuids, traits.cdi)
    environment |= {shown.variable: shown.target for shown in launch.data}
    if any(device.driver == CDI for device in devices):
        environment["NVIDIA_VISIBLE_DEVICES"] = (
            NO_GPUS  # or NVIDIA's runtime would add them a second time (the CDI files say so)
        )
    chosen: dict[str, Any] = {
        "command": command_of(launch),
        "entrypoint": "",
        "environment": environment,
        "working_dir": WORK,
        "user": user,
        "volumes": {host: {"bind": inside, "mode": "rw"} for host, inside in _directories(launch).items()}
        | _secrets(launch),
        "mounts": [
            docker.types.Mount(str(mount.target), str(mount.source), "bind", read_only=mount.read_only)
            for mount in (*launch.injection.mounts, *(Mount(Path(s.source), Path(s.target)) for s in launch.data))
        ],
        "labels": {LABEL_NODE: node, LABEL_JOB: launch.job},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "privileged": False,
        "read_only": True,
        "tmpfs": TMPFS,
        "shm_size": launch.shm_mib << 20,
        "network_mode": network,
        "ipc_mode": "private",
        "pids_limit": launch.pids,
        "device_requests": devices,
        "init": traits.init and not launch.system,  # Debian's is a link, and CRIU would mount the link
        "log_config": docker.types.LogConfig(type="none"),  # the attempt's log file is the only copy
    }
    if launch.memory_mib is not None:
        chosen |= {"mem_limit": launch.memory_mib << 20, "memswap_limit": launch.memory_mib << 20}
    if launch.cpus is not None:
        chosen["nano_cpus"] = int(launch.cpus * 1e9)
    if launch.disk_bps is not None and (disk := disk_of(launch.work_dir)) is not None:
        rates = [{"Path": disk.path, "Rate": launch.disk_bps}]
        chosen |= {"device_read_bps": rates, "device_write_bps": rates}
    return chosen


def command_of(launch: Launch) -> list[str]:
    """Return the container's command. The engine keeps it and the environment on a disk, so a shell reads variables that are
    secrets from a file in memory. It also waits until the container's network has its proxy: a line comes through the gate.
    """
    steps = [f"read -r mesh < {CTL}/{GATE}"] if launch.proxy is not None else []
    steps += [f". {SECRETS}/{VARIABLES}"] if launch.secrets.variables else []
    if not steps:
        return list(launch.argv)
    return [SHELL, "-c", " && ".join([*steps, 'exec "$@"']), "mesh", *launch.argv]


def open_gate(launch: Launch) -> int | None:
    """Make the gate at which a container with a proxy waits, and open it; what is written stays while the descriptor does."""
    if launch.proxy is None:
        return None
    path = Path(launch.ctl_dir, GATE)
    os.mkfifo(path, 0o600)
    gate = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if os.getuid() == 0:
        os.fchown(gate, GUEST_UID, GUEST_UID)
    return gate


def give_files(launch: Launch) -> None:
    """Give the attempt's files to the container's user if the daemon runs as another user."""
    if os.getuid() == 0:
        for path in (
            *_directories(launch),
            *_secrets(launch),
            *(str(m.source) for m in launch.injection.mounts if not m.read_only),
        ):
            _give(Path(path))


def _directories(launch: Launch) -> dict[str, str]:
    return {launch.work_dir: WORK, launch.ckpt_dir: CKPT, launch.out_dir: OUT, launch.ctl_dir: CTL}


def _secrets(launch: Launch) -> dict[str, dict[str, str]]:
    place = launch.secrets.directory
    return {} if place is None else {place: {"bind": SECRETS, "mode": "ro"}}


def traits_of(version: dict[str, Any], info: dict[str, Any]) -> Traits:
    """Return the properties of an engine from its version and info; looks for its init program on this machine."""
    parts = [str(part.get("Name", "")) for part in version.get("Components") or []]
    name = "Podman" if any("podman" in part.lower() for part in parts) else "Docker"
    found = [shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{INIT_PATH}") for program in INITS[name]]
    experimental, root = bool(info.get("ExperimentalBuild")), str(info.get("DockerRootDir", ""))
    return Traits(name, str(version.get("Version", "")), any(found), cdi_devices(info), experimental, root, _maps(info))


def _maps(info: dict[str, Any]) -> str:
    options = {part for text in info.get("SecurityOptions") or () for part in str(text).split(",")}
    if info.get("Rootless") or "name=rootless" in options:
        return ROOTLESS
    return "userns-remap" if "name=userns" in options else ""


def cdi_devices(info: dict[str, Any]) -> frozenset[str]:
    """Return the devices that the engine discovered by the Container Device Interface (Docker 28)."""
    found = info.get("DiscoveredDevices") or []
    return frozenset(str(device.get("ID")) for device in found if device.get("Source") == "cdi")


def _devices(uuids: tuple[str, ...], cdi: frozenset[str]) -> list[Any]:
    """Request GPUs by UUID, never by index; by CDI, NVIDIA's preferred way, if the engine lists them."""
    if not uuids:
        return []
    names = [CDI_KIND + uuid for uuid in uuids]
    if cdi.issuperset(names):
        return [docker.types.DeviceRequest(driver=CDI, device_ids=names)]
    return [docker.types.DeviceRequest(device_ids=list(uuids), capabilities=[["gpu", "compute", "utility"]])]


def _give(path: Path) -> None:
    os.chown(path, GUEST_UID, GUEST_UID)
    for directory, names, files in trees.walk(path):
        for name in (*names, *files):
            os.chown(Path(directory) / name, GUEST_UID, GUEST_UID, follow_symlinks=False)

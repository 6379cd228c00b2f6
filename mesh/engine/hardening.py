"""What a container may do: the least that the job contract needs (docs/isolation.md).

All capabilities dropped, no new privileges, Docker's own seccomp profile, read-only root, a user that is not root, no network
unless the owner says which (`egress.py`), no namespace of the host, no socket of the engine, nothing of the host but the
attempt's four directories and what the node's guard brings. There is no setting for a privileged one.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import docker.types
import msgspec

from mesh import trees
from mesh.engine.engine import Launch, contract_env
from mesh.engine.warden import LABEL_NODE

GUEST_UID = 65_532  # "nonroot" of distroless images; owns nothing on a normal host
ROOTLESS = "rootless"
LABEL_JOB = "campus-mesh.job"
TMPFS = {"/tmp": "rw,nosuid,nodev,mode=1777,size=1g"}  # in memory, and counted as the guest's
INITS = {"Docker": ("docker-init",), "Podman": ("catatonit",)}
INIT_PATH = "/usr/libexec/docker:/usr/libexec/podman"
CDI_KIND = "nvidia.com/gpu="
WORK, CKPT, OUT, CTL = "/mesh/work", "/mesh/ckpt", "/mesh/out", "/mesh/ctl"


class Traits(msgspec.Struct, frozen=True):
    """What an engine is and has. `init`: a program that reaps orphans and passes signals on; `cdi`: devices that it knows by the
    Container Device Interface; `experimental`: it saves and restores containers; `root`: where it keeps them; `maps`: how users
    in its containers are others than on the machine, empty if they are the same."""

    name: str = "Docker"
    version: str = ""
    init: bool = False
    cdi: frozenset[str] = frozenset()
    experimental: bool = False
    root: str = ""
    maps: str = ""

    @property
    def problem(self) -> str:
        """Why no guest can run by it; empty if they can."""
        if self.maps == ROOTLESS:
            return (
                f"{self.name} runs rootless: a guest could not write its own directories, and on control groups of version 1 no "
                "ceiling holds. Guests need an engine that root runs; this daemon itself needs no root (docs/isolation.md)"
            )
        if self.maps:
            return f"{self.name} maps users ({self.maps}), so a guest could not write its own directories (docs/isolation.md)"
        return ""


def arguments(launch: Launch, node: str, network: str, traits: Traits) -> dict[str, Any]:
    """For the SDK's `containers.create`. `network`: a bridge of its own, or none."""
    user = f"{GUEST_UID}:{GUEST_UID}" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"
    chosen: dict[str, Any] = {
        "command": list(launch.argv),
        "entrypoint": "",
        "environment": contract_env(launch, WORK, CKPT, OUT, CTL),
        "working_dir": WORK,
        "user": user,
        "volumes": {host: {"bind": inside, "mode": "rw"} for host, inside in _directories(launch).items()},
        "mounts": [
            docker.types.Mount(str(mount.target), str(mount.source), "bind", read_only=mount.read_only)
            for mount in launch.injection.mounts
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
        "device_requests": _devices(launch.gpu_uuids, traits.cdi),
        "init": traits.init and not launch.system,  # Debian's is a link, which CRIU mounts instead of the program
        "log_config": docker.types.LogConfig(type="none"),  # the attempt's log file is the one copy
    }
    if launch.memory_mib is not None:
        chosen |= {"mem_limit": launch.memory_mib << 20, "memswap_limit": launch.memory_mib << 20}
    if launch.cpus is not None:
        chosen["nano_cpus"] = int(launch.cpus * 1e9)
    return chosen


def give_files(launch: Launch) -> None:
    """To the user that the container runs as, where the daemon is another one."""
    if os.getuid() == 0:
        for path in (*_directories(launch), *(str(m.source) for m in launch.injection.mounts if not m.read_only)):
            _give(Path(path))


def _directories(launch: Launch) -> dict[str, str]:
    return {launch.work_dir: WORK, launch.ckpt_dir: CKPT, launch.out_dir: OUT, launch.ctl_dir: CTL}


def traits_of(version: dict[str, Any], info: dict[str, Any]) -> Traits:
    """Of an engine that answers so. Looks for its init on this machine."""
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
    """What an engine of Docker 28 says of the devices that it has found by the Container Device Interface."""
    found = info.get("DiscoveredDevices") or []
    return frozenset(str(device.get("ID")) for device in found if device.get("Source") == "cdi")


def _devices(uuids: tuple[str, ...], cdi: frozenset[str]) -> list[Any]:
    """By UUID, never by number. By CDI where the engine lists them so, which NVIDIA wants to be the one way."""
    if not uuids:
        return []
    names = [CDI_KIND + uuid for uuid in uuids]
    if cdi.issuperset(names):
        return [docker.types.DeviceRequest(driver="cdi", device_ids=names)]
    return [docker.types.DeviceRequest(device_ids=list(uuids), capabilities=[["gpu", "compute", "utility"]])]


def _give(path: Path) -> None:
    os.chown(path, GUEST_UID, GUEST_UID)
    for directory, names, files in trees.walk(path):
        for name in (*names, *files):
            os.chown(Path(directory) / name, GUEST_UID, GUEST_UID, follow_symlinks=False)

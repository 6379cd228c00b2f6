"""The files by which a guest of the `apptainer` engine uses its GPUs: device files, and the libraries of NVIDIA's driver.

Apptainer's own option `--nv` shows every GPU of the machine. The files here are those that NVIDIA's container toolkit shows for
the capabilities `compute` and `utility` (libnvidia-container, nvc_info.c). The guard's library stands in for the driver's.
"""

import re
import shutil
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from cuda_guard.driver import CUDA, NVML, Driver, find_driver
from cuda_guard.guard import Mount
from mesh.execution.engine import EngineError

DEVICES = Path("/dev")  # Apptainer binds what lies there at its own path only
LIBRARIES = Path("/.singularity.d/libs")  # on the LD_LIBRARY_PATH of every image that Apptainer has unpacked
CONTROLS = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")  # of all GPUs together
OURS = ("libcuda", "libnvidia-")
VERSION = re.compile(r"\d+(\.\d+)+")  # of the driver, after `.so.` in the names of its libraries
PROGRAM = "nvidia-smi"


def mounts_of(uuids: Iterable[str], injected: Collection[Mount]) -> tuple[Mount, ...]:
    """Return what a guest with these GPUs sees. `injected`: the files of its guard. EngineError if the machine lacks some."""
    driver = find_driver()
    if driver is None:
        raise EngineError(f"its GPUs cannot be used: {CUDA} and {NVML} are not on this node's library path")
    guards = {mount.target.resolve(): mount.source for mount in injected}
    found = [Mount(path, path, read_only=False) for path in device_files(uuids)]
    found += [Mount(guards.get(path, path), LIBRARIES / name) for name, path in libraries(driver).items()]
    if (program := shutil.which(PROGRAM)) is not None:
        found.append(Mount(Path(program).resolve(), Path("/usr/bin") / PROGRAM))
    return (*found, *injected)


def device_files(uuids: Iterable[str]) -> list[Path]:
    """Return the device files of these GPUs, and those of the driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            names = [f"nvidia{pynvml.nvmlDeviceGetMinorNumber(handle)}" for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise EngineError(f"its GPUs cannot be found: {error}") from error
    found = [DEVICES / name for name in (*names, *CONTROLS)]
    if missing := [path for path in found if not _is_device(path)]:
        how = "`nvidia-modprobe -u -c 0`, as root, makes it"
        raise EngineError(f"its GPUs cannot be used: {missing[0]} is not there ({how})")
    return found


def libraries(driver: Driver) -> dict[str, Path]:
    """Return the driver's libraries by the names under which programs load them."""
    found = {CUDA: driver.cuda, NVML: driver.nvml}
    version = driver.cuda.name.partition(".so.")[2]
    if VERSION.fullmatch(version):  # all of one driver have it; its directory has libraries of others, too
        for link in driver.cuda.parent.glob("lib*.so*"):
            library = link.resolve()
            if link.name.startswith(OURS) and library.name.endswith(f".so.{version}"):
                found[link.name] = library
    return found


def _is_device(path: Path) -> bool:
    try:
        return stat.S_ISCHR(path.stat().st_mode)
    except OSError:
        return False

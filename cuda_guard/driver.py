"""Location of NVIDIA's driver libraries on this machine."""

import os
import platform
import subprocess
from pathlib import Path

import msgspec

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"


class Driver(msgspec.Struct, frozen=True):
    """The real libraries, which a job's guard loads; absolute paths without symbolic links."""

    cuda: Path
    nvml: Path


def find_driver() -> Driver | None:
    """Search as the dynamic loader does: `LD_LIBRARY_PATH`, its cache, then the usual directories. None without a driver."""
    cuda, nvml = _find(CUDA), _find(NVML)
    return Driver(cuda, nvml) if cuda and nvml else None


def _find(name: str) -> Path | None:
    for candidate in (*_in_environment(name), *_in_cache(name), *_usual(name)):
        if candidate.is_file():
            return candidate.resolve()
    return None


def _in_environment(name: str) -> list[Path]:
    return [Path(directory) / name for directory in os.environ.get("LD_LIBRARY_PATH", "").split(":") if directory]


def _in_cache(name: str) -> list[Path]:
    """Parse `ldconfig -p`, with lines like `libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1`."""
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            output = subprocess.run([program, "-p"], capture_output=True, text=True, check=False, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        kind = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(platform.machine(), "")
        lines = [
            line.split(" => ") for line in output.splitlines() if line.strip().startswith(f"{name} (") and kind in line
        ]
        return [Path(parts[1].strip()) for parts in lines if len(parts) == 2]
    return []


def _usual(name: str) -> list[Path]:
    multiarch = f"/usr/lib/{platform.machine()}-linux-gnu"
    usual = (multiarch, "/usr/lib64", "/usr/lib", f"{multiarch}/nvidia/current")
    injected = ("/usr/local/nvidia/lib64", "/usr/lib/wsl/lib")  # by container runtimes, and by WSL
    return [Path(directory) / name for directory in (*usual, *injected)]

"""Where this machine keeps NVIDIA's libraries."""

import os
import platform
import subprocess
from pathlib import Path

import msgspec

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"


class Driver(msgspec.Struct, frozen=True):
    """The real libraries, absolute and with no symbolic link in them: what a job's guard loads."""

    cuda: Path
    nvml: Path


def find_driver() -> Driver | None:
    """As the dynamic loader would: `LD_LIBRARY_PATH`, its cache, then where distributions put them. None without a driver."""
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
    """From `ldconfig -p`: lines like `libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1`."""
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            told = subprocess.run([program, "-p"], capture_output=True, text=True, check=False, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        kind = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(platform.machine(), "")
        lines = [
            line.split(" => ") for line in told.splitlines() if line.strip().startswith(f"{name} (") and kind in line
        ]
        return [Path(parts[1].strip()) for parts in lines if len(parts) == 2]
    return []


def _usual(name: str) -> list[Path]:
    multiarch = f"/usr/lib/{platform.machine()}-linux-gnu"
    usual = (multiarch, "/usr/lib64", "/usr/lib", f"{multiarch}/nvidia/current")
    injected = ("/usr/local/nvidia/lib64", "/usr/lib/wsl/lib")  # by those who run containers, and by Windows
    return [Path(directory) / name for directory in (*usual, *injected)]

"""The libraries' glibc requirements, and their sources in the package."""

import platform
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from cuda_guard.build import GLIBC_FLOOR, NATIVE, Libraries, compile_into, portable_compiler

pytestmark = pytest.mark.cc

ROOT = Path(__file__).parents[2]


def newest_glibc(library: Path) -> tuple[int, ...]:
    told = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    return max(tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", told))


@pytest.mark.skipif(portable_compiler() is None, reason="ziglang is not installed")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_shipped_libraries_need_at_most_the_glibc_of_manylinux2014(tmp_path: Path, machine: str) -> None:
    made = compile_into(tmp_path / "lib", portable_compiler(machine))
    if machine == platform.machine():
        for library in (made.cuda, made.nvml, made.host):
            assert newest_glibc(library) <= tuple(map(int, GLIBC_FLOOR.split(".")))
    assert all(library.stat().st_size > 10_000 for library in (made.cuda, made.nvml, made.host))


def test_libraries_of_the_local_compiler_need_at_most_the_local_glibc(built: Libraries) -> None:
    """Such a library is for containers of this machine; a container with an older glibc fails to load it with an error."""
    here = tuple(map(int, platform.libc_ver()[1].split(".")[:2]))
    assert (2, 2) < newest_glibc(built.cuda) <= here


def test_sources_are_in_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["cuda_guard"]
    packed = {path for pattern in patterns for path in NATIVE.parent.glob(pattern)}
    assert set(NATIVE.iterdir()) <= packed

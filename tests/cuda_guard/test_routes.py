"""Any way to look up a driver function gives the guard's hook if there is one, else the driver's own function."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_guard.build import NATIVE, Libraries, find_compiler
from tests.cuda_guard.guests import Bench
from tests.cuda_guard.resolution import misresolved, pairs
from tests.fake.build import exports
from tests.fake.client import Driver

pytestmark = pytest.mark.cc


def test_guard_exports_the_drivers_symbols(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    ours = machine.run(machine.job(), lambda driver: {name for name in exports() if driver.export(name)})
    assert len(ours) == len(exports()) > 700


def test_every_name_version_and_flag_resolves_to_the_right_function(make_bench: Callable[..., Bench]) -> None:
    """For all of cuda.h: the guard's function if it is hooked, else the driver's, with the driver's status."""
    machine = make_bench(driver_version=13050)  # which knows all of that
    fake = machine.world.fakes.cuda

    def swapped(driver: Driver) -> int:
        real = Driver(fake)
        return sum(driver.address(*pair)[1] != real.address(*pair)[1] for pair in pairs())

    assert len(pairs()) >= 634
    assert machine.run(machine.job(), lambda driver: misresolved(driver, fake)) == []
    assert machine.run(machine.job(), swapped) > 100


def test_old_cugetprocaddress_gives_the_same(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()

    def ask(driver: Driver) -> Any:
        found = {}
        for name in ("cuMemAlloc", "cuLaunchKernel", "cuGetProcAddress", "cuDeviceGet"):
            pointer = ctypes.c_void_p()
            driver.cuGetProcAddress(name.encode(), ctypes.byref(pointer), 11030, 0)
            found[name] = pointer.value
        real = Driver(machine.world.fakes.cuda)
        return found == {
            "cuMemAlloc": driver.export("cuMemAlloc_v2"),
            "cuLaunchKernel": driver.export("cuLaunchKernel"),
            "cuGetProcAddress": driver.export("cuGetProcAddress"),
            "cuDeviceGet": real.export("cuDeviceGet"),
        }

    assert machine.run(machine.job(), ask)


def test_function_unknown_to_the_guard_is_reported(make_bench: Callable[..., Bench]) -> None:
    """A newer driver offers an allocation function that older ones do not export."""
    machine = make_bench()
    job = machine.job()

    def ask(driver: Driver) -> None:
        swap = driver.library.cuGetProcAddress_v2
        pointer, status = ctypes.c_void_p(), ctypes.c_int()
        swap(b"cuMemAllocSomehow", ctypes.byref(pointer), 99000, ctypes.c_uint64(0), ctypes.byref(status))

    machine.run(job, ask)
    assert job.pages.audited() == [], "the function does not exist and cannot be called"


ROUTES = {
    "by soname": "ctypes.CDLL('libcuda.so.1')",
    "by the name that linkers use": "ctypes.CDLL('libcuda.so')",
    "by both": "[ctypes.CDLL(f'libcuda.so{end}', mode=ctypes.RTLD_GLOBAL) for end in ('', '.1')][0]",
    "by soname, deep binding": "ctypes.CDLL('libcuda.so.1', mode=os.RTLD_NOW | os.RTLD_DEEPBIND)",
    "global": "ctypes.CDLL(None)",
}

PROGRAM = """
import ctypes, os
library = {route}
free, total, context = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
assert library.cuInit(0) == 0
assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert library.cuCtxSetCurrent(context) == 0
assert library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(total.value >> 20)
"""


@pytest.mark.parametrize("route", ROUTES)
def test_process_with_the_preload_is_guarded(make_bench: Callable[..., Bench], tmp_path: Path, route: str) -> None:
    """The preloaded libraries have the driver's names, so a later dlopen by one of them finds the guard."""
    machine = make_bench()
    job = machine.job(memory=777 << 20)
    for name in ("libcuda.so", "libcuda.so.1"):
        (tmp_path / name).symlink_to(machine.world.fakes.cuda)
    found = {"LD_LIBRARY_PATH": str(tmp_path)}  # as frameworks and images set it
    env = {**os.environ, **machine.environment(job), **job.process_env(), **found}
    command = [sys.executable, "-c", PROGRAM.format(route=ROUTES[route])]
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip() == "777"


def test_driver_of_an_image_for_forward_compatibility_is_used(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    """NVIDIA's images bring a newer driver library than the machine has; here the machine's is missing."""
    machine = make_bench()
    job = machine.job(memory=777 << 20)
    job.pages.policy.driver = b"/nowhere/libcuda.so.1"
    compat = tmp_path / "cuda" / "compat" / "lib"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.1").symlink_to(machine.world.fakes.cuda)
    env = {**os.environ, **machine.environment(job), **job.process_env(), "LD_LIBRARY_PATH": f"/nowhere:{compat}"}
    command = [sys.executable, "-c", PROGRAM.format(route=ROUTES["by soname"])]
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip() == "777"


def test_program_linked_with_the_driver_is_guarded(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    machine = make_bench()
    job = machine.job(memory=777 << 20)
    source = tmp_path / "linked.c"
    source.write_text(
        '#include "abi.h"\n#include <stdio.h>\n'
        "CUresult cuInit(unsigned int); CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);\n"
        "CUresult cuCtxSetCurrent(CUcontext); CUresult cuMemGetInfo_v2(size_t *, size_t *);\n"
        "int main(void) { CUcontext c; size_t f = 0, t = 0; cuInit(0); cuDevicePrimaryCtxRetain(&c, 0); cuCtxSetCurrent(c);\n"
        'cuMemGetInfo_v2(&f, &t); printf("%zu\\n", t >> 20); return 0; }\n'
    )
    fake = machine.world.fakes.cuda
    link = [f"-L{fake.parent}", "-l:libcuda.so.1"]
    command = [*find_compiler(), f"-I{NATIVE}", str(source), "-o", str(tmp_path / "linked"), *link]
    subprocess.run(command, check=True, capture_output=True)
    env = {**os.environ, **machine.environment(job), "LD_LIBRARY_PATH": str(machine.libraries.cuda.parent)}
    result = subprocess.run([tmp_path / "linked"], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "777"


def test_program_without_pages_has_no_driver_and_continues(built: Libraries) -> None:
    """No library is loaded by a name that the environment can change, and the process is not ended."""
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cuInit(0))"
    env = {name: value for name, value in os.environ.items() if name != "MESH_GUARD_DIR"}
    command = [sys.executable, "-c", program, str(built.cuda)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "34", "CUDA_ERROR_STUB_LIBRARY"
    assert "/run/mesh/guard/policy" in result.stderr and "no CUDA for this program" in result.stderr


@pytest.mark.parametrize("size", [0, 1, 4095, 100_000])
def test_invalid_pages_are_refused_with_a_message(built: Libraries, tmp_path: Path, size: int) -> None:
    for name in ("policy", "job"):
        (tmp_path / name).write_bytes(os.urandom(size))
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cuInit(0))"
    env = {**os.environ, "MESH_GUARD_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program, str(built.cuda)], env=env, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "34" and str(tmp_path) in result.stderr


def test_libraries_need_no_newer_symbols_than_allowed(built: Libraries) -> None:
    """Golden: only the driver's names are exported, so the guard cannot replace symbols of other libraries."""
    told = subprocess.run(
        ["nm", "-D", "--defined-only", str(built.cuda)], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in told.splitlines()}
    assert names == set(exports())

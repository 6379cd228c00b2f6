"""Lookup of the fake driver's functions by name, version and flag, as in the real one as far as known."""

import ctypes
from collections.abc import Callable

import pytest

from tests.fake.build import exports, typedefs
from tests.fake.child import run
from tests.fake.client import Driver
from tests.fake.world import World

pytestmark = pytest.mark.cc

NOT_FOUND = 500
MakeWorld = Callable[..., World]


def all_addresses(driver: Driver) -> list[int | None]:
    return [driver.export(name) for name in exports()]


def test_each_export_has_its_own_address(world: World) -> None:
    addresses = run(world, all_addresses)
    assert len(addresses) > 700
    assert len(set(addresses)) == len(addresses)


# (name, version, flags) and the answer of driver 535 on a machine without a GPU
RESOLVED = {
    ("cuMemAlloc", 2000, 0): "cuMemAlloc",
    ("cuMemAlloc", 3010, 0): "cuMemAlloc",
    ("cuMemAlloc", 3020, 0): "cuMemAlloc_v2",
    ("cuMemAlloc", -1, 0): "cuMemAlloc_v2",
    ("cuMemAlloc", 99999, 2): "cuMemAlloc_v2",
    ("cuLaunchKernel", 4000, 1): "cuLaunchKernel",
    ("cuLaunchKernel", 7000, 2): "cuLaunchKernel_ptsz",
    ("cuLaunchKernel", 12000, 3): "cuLaunchKernel_ptsz",
    ("cuMemcpyHtoD", 12000, 2): "cuMemcpyHtoD_v2_ptds",
    ("cuGetProcAddress", 11030, 2): "cuGetProcAddress",
    ("cuGetProcAddress", 12000, 0): "cuGetProcAddress_v2",
    ("cuStreamBeginCapture", 10000, 2): "cuStreamBeginCapture_ptsz",
    ("cuStreamBeginCapture", 10010, 0): "cuStreamBeginCapture_v2",
    ("cuCtxCreate", 11040, 0): "cuCtxCreate_v3",
    ("cuGraphInstantiate", 11000, 0): "cuGraphInstantiate_v2",
    ("cuDeviceGetUuid", 9020, 0): "cuDeviceGetUuid",
}


UNRESOLVED = {
    ("", 12000, 0): 1,
    ("cuNope", 12000, 0): 1,
    ("cuMemAlloc_v2", 12000, 0): 1,
    ("cuLaunchKernel_ptsz", 12000, 0): 1,
    ("cuMemAlloc", 1000, 0): 2,
    ("cuLaunchKernel", 6000, 2): 2,
    ("cuMemcpyHtoD", 3000, 2): 2,
    ("cuGetProcAddress", 11020, 0): 2,
}


def resolve_known(driver: Driver) -> None:
    for query, symbol in RESOLVED.items():
        assert driver.address(*query) == (0, driver.export(symbol)), query
        pointer = ctypes.c_void_p()
        driver.cuGetProcAddress(query[0].encode(), ctypes.byref(pointer), *query[1:])
        assert pointer.value == driver.export(symbol), query
    for query, status in UNRESOLVED.items():
        assert driver.address(*query) == (status, None), query
        pointer = ctypes.c_void_p(77)
        assert driver.code("cuGetProcAddress", query[0].encode(), ctypes.byref(pointer), *query[1:]) == NOT_FOUND
        assert pointer.value == 77
    assert driver.code("cuGetProcAddress_v2", b"cuInit", ctypes.byref(ctypes.c_void_p()), 12000, 4, None) == 1


def resolve_listed(driver: Driver) -> int:
    addresses = {driver.export(name) for name in exports()}
    found = set()
    for name, version, suffix in typedefs():
        status, address = driver.address(name, version, 2 if suffix else 0)
        assert status == 0 and address in addresses, (name, version, suffix)
        found.add(address)
    return len(found)


def test_name_is_resolved_as_by_the_real_driver(make_world: MakeWorld) -> None:
    if not typedefs():
        pytest.skip("nvidia-cuda-runtime is not installed")
    run(make_world(driver_version=12020), resolve_known)


def test_each_documented_variant_resolves_to_its_own_export(make_world: MakeWorld) -> None:
    if not typedefs():
        pytest.skip("nvidia-cuda-runtime is not installed")
    assert run(make_world(driver_version=13050), resolve_listed) == len(typedefs())


def resolve_newer(driver: Driver) -> tuple[int, int]:
    return driver.address("cuCheckpointProcessLock", 12080)[0], driver.address("cuMemAlloc", 12080)[0]


def test_driver_knows_no_newer_names(make_world: MakeWorld) -> None:
    if not typedefs():
        pytest.skip("nvidia-cuda-runtime is not installed")
    assert run(make_world(driver_version=12020), resolve_newer) == (1, 0)

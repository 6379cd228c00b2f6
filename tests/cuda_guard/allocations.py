"""Every kind of device memory allocation, and its release."""

import ctypes
from collections.abc import Callable
from typing import Any

from tests.cuda_guard.guests import MIB
from tests.fake.client import CudaError, Driver

OUT_OF_MEMORY, NOT_PERMITTED, NOT_SUPPORTED = 2, 800, 801
DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE


class AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", ctypes.c_int * 2),
        ("security", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class PoolProps(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", ctypes.c_int * 2),
        ("security", ctypes.c_void_p),
        ("max_size", ctypes.c_size_t),
        ("rest", ctypes.c_ubyte * 56),
    ]


class Shape3D(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("width", "height", "depth")),
        *((name, ctypes.c_uint) for name in ("format", "channels", "flags")),
    ]


class Shape2D(ctypes.Structure):
    _fields_ = [
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("format", ctypes.c_uint),
        ("channels", ctypes.c_uint),
    ]


def pinned(device: int = 0) -> AllocationProp:
    return AllocationProp(type=1, location=(DEVICE, device))


def alloc(driver: Driver, size: int) -> Callable[[], None]:
    pointer = driver.out("cuMemAlloc_v2", size)
    return lambda: driver.cuMemFree_v2(pointer)


def managed(driver: Driver, size: int) -> Callable[[], None]:
    pointer = driver.out("cuMemAllocManaged", size, 1)
    return lambda: driver.cuMemFree_v2(pointer)


def pitched(driver: Driver, size: int) -> Callable[[], None]:
    pitch = ctypes.c_size_t()
    pointer = driver.out("cuMemAllocPitch_v2", ctypes.byref(pitch), 4096, size // 4096, 4)
    return lambda: driver.cuMemFree_v2(pointer)


def physical(driver: Driver, size: int) -> Callable[[], None]:
    handle = driver.out("cuMemCreate", size, ctypes.byref(pinned()), 0)
    return lambda: driver.cuMemRelease(handle)


def mapped(driver: Driver, size: int) -> Callable[[], None]:
    """Allocate like PyTorch's expandable segments: the handle is released at once, the mapping keeps the memory."""
    at = driver.out("cuMemAddressReserve", size, 0, 0, 0)
    handle = driver.out("cuMemCreate", size, ctypes.byref(pinned()), 0)
    driver.cuMemMap(at, size, 0, handle, 0)
    driver.cuMemRelease(handle)

    def free() -> None:
        driver.cuMemUnmap(at, size)
        driver.cuMemAddressFree(at, size)

    return free


def array(driver: Driver, size: int) -> Callable[[], None]:
    shape = Shape2D(4096, size // 4096, 0x01, 1)
    made = driver.out("cuArrayCreate_v2", ctypes.byref(shape))
    return lambda: driver.cuArrayDestroy(made)


def solid(driver: Driver, size: int) -> Callable[[], None]:
    shape = Shape3D(4096, 64, size // 4096 // 64, 0x01, 1, 0)
    made = driver.out("cuArray3DCreate_v2", ctypes.byref(shape))
    return lambda: driver.cuArrayDestroy(made)


def from_default_pool(driver: Driver, size: int) -> Callable[[], None]:
    pointer = driver.out("cuMemAllocAsync", size, 0)

    def free() -> None:
        driver.cuMemFreeAsync(pointer, 0)
        driver.cuStreamSynchronize(0)

    return free


def from_own_pool(driver: Driver, size: int) -> Callable[[], None]:
    pool = driver.out("cuMemPoolCreate", ctypes.byref(PoolProps(type=1, location=(DEVICE, 0))))
    pointer = driver.out("cuMemAllocFromPoolAsync", size, pool, 0)

    def free() -> None:
        driver.cuMemFreeAsync(pointer, 0)
        driver.cuStreamSynchronize(0)
        driver.cuMemPoolDestroy(pool)

    return free


def context(driver: Driver, size: int) -> None:
    driver.out("cuDevicePrimaryCtxRetain", 0)


KINDS = [alloc, managed, pitched, physical, mapped, array, solid, from_default_pool, from_own_pool]
QUOTA = 1024 * MIB


def refused(driver: Driver, kind: Callable[[Driver, int], Any], size: int) -> bool:
    try:
        kind(driver, size)
    except CudaError as error:
        assert error.code == OUT_OF_MEMORY
        return True
    return False

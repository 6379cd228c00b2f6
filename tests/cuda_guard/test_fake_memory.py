"""All kinds of memory of the fake driver, as in the real one as far as known."""

import ctypes
from collections.abc import Callable

import pytest

from tests.cuda_guard.guests import CONTEXT
from tests.cuda_guard.zoo import READ_AND_WRITE
from tests.fake.child import Child, Talk, run
from tests.fake.client import NON_BLOCKING, CudaError, Driver
from tests.fake.structs import Location, PoolProps
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

OUT_OF_MEMORY = 2
MakeWorld = Callable[..., World]


def exhaust(driver: Driver) -> None:
    driver.start()
    free, total = driver.free_memory()
    assert total == 1024 * MIB and free == total - CONTEXT
    big = driver.out("cuMemAlloc_v2", 700 * MIB + 1)  # whole granules of 2 MiB
    assert driver.free_memory()[0] == free - 702 * MIB
    with pytest.raises(CudaError) as refused:
        driver.out("cuMemAlloc_v2", 23 * MIB)
    assert refused.value.code == OUT_OF_MEMORY
    small = [driver.out("cuMemAlloc_v2", 1) for _ in range(2 * MIB // 512)]  # one granule, to the last
    assert len(set(small)) == len(small)
    assert driver.free_memory()[0] == free - 704 * MIB
    for pointer in [big, *small]:
        driver.cuMemFree_v2(pointer)
    assert driver.free_memory()[0] == free
    assert driver.code("cuMemFree_v2", big) == 1
    pitch = ctypes.c_size_t()
    row = driver.out("cuMemAllocPitch_v2", ctypes.byref(pitch), 1000, 4096, 4)
    assert pitch.value == 1024 and driver.free_memory()[0] == free - 4 * MIB
    driver.cuMemFree_v2(row)
    managed = driver.out("cuMemAllocManaged", 10 * MIB, 1)
    assert driver.free_memory()[0] == free - 10 * MIB
    driver.cuMemFree_v2(managed)


def test_memory_is_counted_in_granules_and_is_finite(make_world: MakeWorld) -> None:
    world = make_world(memory=1024 * MIB)
    with Child(world, exhaust) as child:
        child.result()
    assert world.used() == 0


def copies(driver: Driver) -> bytes:
    driver.start()
    device, other = driver.out("cuMemAlloc_v2", 4096), driver.out("cuMemAlloc_v2", 4096)
    driver.cuMemcpyHtoD_v2(device, b"fair share", 10)
    driver.cuMemcpyDtoD_v2(other, device, 10)
    driver.cuMemsetD8_v2(other, ord("F"), 1)
    back = ctypes.create_string_buffer(10)
    driver.cuMemcpyDtoHAsync_v2(back, other, 10, 0)
    driver.cuStreamSynchronize(0)
    assert driver.code("cuMemcpyDtoD_v2", device + (1 << 30), device, 10) == 1
    return back.raw


def test_small_copies_move_data(world: World) -> None:
    assert run(world, copies) == b"Fair share"


RESERVED, USED, THRESHOLD = 5, 7, 4


def pools(driver: Driver) -> None:
    driver.start()
    stream, other = (driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    pool = driver.out("cuDeviceGetDefaultMemPool", 0)
    free = driver.free_memory()[0]

    def attribute(which: int, of: int = pool) -> int:
        value = ctypes.c_uint64()
        driver.cuMemPoolGetAttribute(of, which, ctypes.byref(value))
        return value.value

    first = driver.out("cuMemAllocAsync", MIB, stream)
    assert (attribute(RESERVED), attribute(USED)) == (32 * MIB, MIB)
    assert driver.free_memory()[0] == free - 32 * MIB
    second = driver.out("cuMemAllocAsync", 40 * MIB, stream)
    assert (attribute(RESERVED), attribute(USED)) == (64 * MIB, 41 * MIB)  # across two chunks
    driver.launch(driver.kernel("k_5ms"), stream)
    driver.cuMemFreeAsync(second, stream)
    assert attribute(RESERVED) == 64 * MIB  # kept, and available again in stream order
    assert driver.out("cuMemAllocAsync", 40 * MIB, stream) == second
    driver.cuMemFreeAsync(second, stream)
    elsewhere = driver.out("cuMemAllocAsync", 40 * MIB, other)
    assert elsewhere != second  # on another stream only after the kernel
    driver.cuMemFreeAsync(elsewhere, other)
    driver.cuStreamSynchronize(stream)
    assert attribute(RESERVED) == 32 * MIB  # above the threshold of 0, so released
    driver.cuMemPoolSetAttribute(pool, THRESHOLD, ctypes.byref(ctypes.c_uint64(1 << 40)))
    driver.cuMemFreeAsync(first, stream)
    driver.cuStreamSynchronize(stream)
    assert (attribute(RESERVED), attribute(USED)) == (32 * MIB, 0)
    driver.cuMemPoolTrimTo(pool, 0)
    assert attribute(RESERVED) == 0 and driver.free_memory()[0] == free

    own = driver.out(
        "cuMemPoolCreate", ctypes.byref(PoolProps(alloc_type=1, location=Location(1, 0), max_size=64 * MIB))
    )
    pointer = driver.out("cuMemAllocFromPoolAsync", 48 * MIB, own, stream)
    assert attribute(RESERVED, own) == 64 * MIB
    with pytest.raises(CudaError):
        driver.out("cuMemAllocFromPoolAsync", 32 * MIB, own, stream)
    driver.cuMemFree_v2(pointer)
    driver.cuMemPoolDestroy(own)
    assert driver.free_memory()[0] == free


def test_pools_grow_by_chunks_and_keep_freed_memory_until_trimmed(world: World) -> None:
    run(world, pools)


class Prop(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


def virtual_memory(driver: Driver) -> None:
    driver.start()
    free = driver.free_memory()[0]
    prop = Prop(type=1, location=Location(1, 0))
    assert driver.out("cuMemGetAllocationGranularity", ctypes.byref(prop), 0) == 2 * MIB
    assert driver.code("cuMemCreate", ctypes.byref(ctypes.c_uint64()), 3 * MIB, ctypes.byref(prop), 0) == 1
    handle = driver.out("cuMemCreate", 4 * MIB, ctypes.byref(prop), 0)
    assert driver.free_memory()[0] == free - 4 * MIB
    place, second = (driver.out("cuMemAddressReserve", 8 * MIB, 0, 0, 0) for _ in range(2))
    assert driver.code("cuMemMap", place + 6 * MIB, 4 * MIB, 0, handle, 0) == 1  # beyond the reservation
    driver.cuMemMap(place, 4 * MIB, 0, handle, 0)
    driver.cuMemMap(second, 4 * MIB, 0, handle, 0)
    assert driver.code("cuMemMap", place, 4 * MIB, 0, handle, 0) == 1  # already mapped
    assert driver.code("cuMemcpyHtoD_v2", place, b"too soon", 8) == 1
    for mapped in (place, second):
        driver.cuMemSetAccess(mapped, 4 * MIB, ctypes.byref(READ_AND_WRITE), 1)
    driver.cuMemcpyHtoD_v2(place, b"seen twice", 10)
    back = ctypes.create_string_buffer(10)
    driver.cuMemcpyDtoH_v2(back, second, 10)
    assert back.raw == b"seen twice"
    driver.cuMemRelease(handle)
    assert driver.free_memory()[0] == free - 4 * MIB  # still mapped
    driver.cuMemUnmap(place, 4 * MIB)
    assert driver.out("cuMemRetainAllocationHandle", second) == handle
    driver.cuMemUnmap(second, 4 * MIB)
    assert driver.free_memory()[0] == free - 4 * MIB  # a handle still exists
    driver.cuMemRelease(handle)
    assert driver.free_memory()[0] == free
    assert driver.code("cuMemRelease", handle) == 1
    driver.cuMemAddressFree(place, 8 * MIB)
    on_host = driver.out("cuMemCreate", 4 * MIB, ctypes.byref(Prop(type=1, location=Location(2, 0))), 0)
    assert driver.free_memory()[0] == free
    driver.cuMemRelease(on_host)


def test_physical_memory_lives_until_its_handle_and_mappings_are_gone(world: World) -> None:
    run(world, virtual_memory)


class Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("width", "height", "depth")),
        *((name, ctypes.c_uint) for name in ("format", "channels", "flags")),
    )


def arrays(driver: Driver) -> None:
    driver.start()
    free = driver.free_memory()[0]
    shape = Shape(1024, 1024, 4, 0x20, 4, 0)
    needs = (ctypes.c_size_t * 4)()
    cube = driver.out("cuArray3DCreate_v2", ctypes.byref(shape))
    driver.cuArrayGetMemoryRequirements(needs, cube, 0)
    assert needs[0] == 64 * MIB and driver.free_memory()[0] == free - 64 * MIB
    levels = driver.out("cuMipmappedArrayCreate", ctypes.byref(shape), 3)
    driver.cuMipmappedArrayGetMemoryRequirements(needs, levels, 0)
    assert 64 * MIB + 8 * MIB < needs[0] <= 80 * MIB
    driver.cuArrayDestroy(cube)
    driver.cuMipmappedArrayDestroy(levels)
    assert driver.free_memory()[0] == free


def test_arrays_use_memory(world: World) -> None:
    run(world, arrays)


class Ticket(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def lend(driver: Driver, talk: Talk) -> None:
    driver.start()
    ticket = Ticket()
    driver.cuIpcGetMemHandle(ctypes.byref(ticket), driver.out("cuMemAlloc_v2", 100 * MIB))
    talk.say(bytes(ticket.bytes))
    talk.hear()


def borrow(driver: Driver, handle: bytes) -> None:
    driver.start()
    free = driver.free_memory()[0]
    pointer = driver.out("cuIpcOpenMemHandle_v2", Ticket.from_buffer_copy(handle), 1)
    driver.cuMemsetD8_v2(pointer, 1, 10)
    assert driver.free_memory()[0] == free
    driver.cuIpcCloseMemHandle(pointer)
    assert driver.code("cuIpcCloseMemHandle", pointer) == 1


def test_memory_of_another_process_is_charged_to_its_owner(world: World) -> None:
    with Child(world, lend) as owner:
        run(world, borrow, owner.hear())
        assert world.memory(owner.pid) == CONTEXT + 100 * MIB

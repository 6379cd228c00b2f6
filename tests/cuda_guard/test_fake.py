"""The double of NVIDIA's driver must not lie: these hold of the real one too, as far as they are known."""

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mesh.telemetry.gpu import inventory
from tests.fake.build import exports, typedefs
from tests.fake.child import Child, Talk, run
from tests.fake.client import LEGACY, PER_THREAD, CudaError, Driver
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

MakeWorld = Callable[..., World]
OUT_OF_MEMORY, NOT_INITIALIZED, NOT_READY, NOT_FOUND = 2, 3, 600, 500
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_IMPLICIT = 900, 901, 904, 906
CONTEXT = 300 * MIB
NON_BLOCKING = 1


def timed(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


# What it exports, and how that is found


def all_addresses(driver: Driver) -> list[int | None]:
    return [driver.export(name) for name in exports()]


def test_each_export_has_an_address_of_its_own(world: World) -> None:
    addresses = run(world, all_addresses)
    assert len(addresses) > 700
    assert len(set(addresses)) == len(addresses)


# (name, version, flags) and what the driver 535 answered, on a machine without a GPU
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


def test_a_name_is_resolved_as_the_real_driver_does(make_world: MakeWorld) -> None:
    if not typedefs():
        pytest.skip("nvidia-cuda-runtime is not installed")
    run(make_world(driver_version=13050), resolve_known)


def test_each_form_that_nvidia_lists_is_resolved_to_an_export_of_its_own(make_world: MakeWorld) -> None:
    if not typedefs():
        pytest.skip("nvidia-cuda-runtime is not installed")
    assert run(make_world(driver_version=13050), resolve_listed) == len(typedefs())


def resolve_newer(driver: Driver) -> tuple[int, int]:
    return driver.address("cuCheckpointProcessLock", 12080)[0], driver.address("cuMemAlloc", 12080)[0]


def test_a_driver_knows_no_names_that_are_newer_than_itself(make_world: MakeWorld) -> None:
    if not typedefs():
        pytest.skip("nvidia-cuda-runtime is not installed")
    assert run(make_world(driver_version=12020), resolve_newer) == (1, 0)


def begin(driver: Driver) -> list[int]:
    codes = [driver.code("cuDeviceGetCount", None), driver.code("cuCtxSynchronize")]
    driver.cuInit(0)
    return [*codes, driver.code("cuCtxSynchronize"), driver.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 1)]


def test_calls_need_cuinit_and_a_context(world: World) -> None:
    assert run(world, begin) == [NOT_INITIALIZED, NOT_INITIALIZED, 201, 201]


def fork_after_init(driver: Driver) -> int:
    driver.start()
    child = os.fork()
    if child == 0:
        os._exit(driver.code("cuCtxSynchronize") * 10 + driver.code("cuInit", 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_context_does_not_survive_a_fork(world: World) -> None:
    assert run(world, fork_after_init) == NOT_INITIALIZED * 10 + NOT_INITIALIZED


def contexts(driver: Driver) -> None:
    primary = driver.start()
    own = driver.out("cuCtxCreate_v2", 0, 1)
    assert driver.out("cuCtxGetCurrent") == own
    assert driver.out("cuCtxGetDevice") & 0xFFFFFFFF == 1
    assert driver.out("cuCtxPopCurrent_v2") == own
    assert driver.out("cuCtxGetCurrent") == primary
    driver.cuCtxPushCurrent_v2(own)
    driver.cuCtxDestroy_v2(own)
    assert driver.out("cuCtxGetCurrent") == primary
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(driver.out("cuCtxGetCurrent")))
    thread.start()
    thread.join()
    assert seen == [0]
    driver.cuDevicePrimaryCtxRelease_v2(0)
    assert driver.code("cuCtxSynchronize") == 709


def test_contexts_are_a_stack_of_each_thread(make_world: MakeWorld) -> None:
    run(make_world(devices=2), contexts)


# Time


def in_order(driver: Driver) -> tuple[float, float]:
    driver.start()
    stream, kernel = driver.out("cuStreamCreate", NON_BLOCKING), driver.kernel("k_5ms")
    began = time.monotonic()
    driver.launch(driver.kernel("k_200ms"), stream)
    first = driver.record(stream)
    driver.launch(kernel, stream)
    driver.launch(kernel, stream)
    last = driver.record(stream)
    assert driver.code("cuEventQuery", last) == NOT_READY
    assert driver.code("cuStreamQuery", stream) == NOT_READY
    driver.cuStreamSynchronize(stream)
    assert driver.code("cuEventQuery", last) == 0
    return time.monotonic() - began, driver.elapsed_ms(first, last)


def test_a_stream_is_in_order_and_events_tell_the_devices_time(world: World) -> None:
    took, elapsed = run(world, in_order)
    assert elapsed == pytest.approx(10, abs=0.001)
    assert took >= 0.21


def overlapping(driver: Driver) -> tuple[float, float]:
    driver.start()
    kernel = driver.kernel("k_100ms")
    streams = [driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(4)]

    def aside() -> None:
        for stream in streams:
            driver.launch(kernel, stream)
        driver.cuCtxSynchronize()

    def through_default() -> None:
        blocking = driver.out("cuStreamCreate", 0)
        driver.launch(kernel, blocking)
        driver.launch(kernel)
        driver.launch(kernel, blocking)
        driver.cuStreamSynchronize(blocking)

    return timed(aside), timed(through_default)


def test_streams_overlap_unless_the_default_one_comes_between(world: World) -> None:
    aside, through_default = run(world, overlapping)
    assert 0.1 <= aside < 0.4, "one after the other they would take 0.4 s"
    assert through_default >= 0.3


def per_thread(driver: Driver) -> float:
    driver.start()
    kernel = driver.kernel("k_200ms")
    driver.launch(kernel, suffix="_ptsz")

    def launch() -> None:
        driver.start()
        driver.launch(kernel, PER_THREAD)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert driver.code("cuStreamQuery", PER_THREAD) == driver.code("cuStreamQuery_ptsz", 0) == NOT_READY
    return timed(driver.cuCtxSynchronize)


def test_threads_have_default_streams_of_their_own(world: World) -> None:
    assert run(world, per_thread) < 0.38, "one after the other they would take 0.4 s"


def dependent(driver: Driver) -> float:
    driver.start()
    kernel = driver.kernel("k_40ms")
    one, other = (driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    start = driver.record(one)
    driver.launch(kernel, one)
    driver.cuStreamWaitEvent(other, driver.record(one), 0)
    driver.launch(kernel, other)
    end = driver.record(other)
    driver.cuEventSynchronize(end)
    return driver.elapsed_ms(start, end)


def test_a_stream_waits_for_an_event_of_another(world: World) -> None:
    assert run(world, dependent) >= 80


def grids(driver: Driver) -> float:
    driver.start()
    kernel = driver.kernel("k_10us_per_block")
    start = driver.record()
    driver.launch(kernel, grid=200)
    end = driver.record()
    driver.cuEventSynchronize(end)
    assert (
        driver.code(
            "cuModuleGetFunction", ctypes.byref(ctypes.c_uint64()), driver.out("cuModuleLoadData", b""), b"gemm"
        )
        == 500
    )
    return driver.elapsed_ms(start, end)


def test_a_kernel_may_take_its_time_by_the_block(world: World) -> None:
    assert run(world, grids) == pytest.approx(2, abs=0.3)


def fill_the_queue(driver: Driver) -> tuple[float, float]:
    driver.start()
    kernel, stream = driver.kernel("k_200ms"), driver.out("cuStreamCreate", 0)

    def launch(count: int) -> None:
        for _ in range(count):
            driver.launch(kernel, stream)

    return timed(lambda: launch(16)), timed(lambda: launch(1))


def test_a_full_queue_makes_the_launch_wait(make_world: MakeWorld) -> None:
    room, full = run(make_world(queue_depth=16), fill_the_queue)
    assert room < 0.2 <= room + full


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def host_function(driver: Driver) -> list[int]:
    driver.start()
    stream = driver.out("cuStreamCreate", 0)
    order: list[int] = []
    done = driver.out("cuEventCreate", 0)
    called = threading.Event()

    def function(_: int | None) -> None:
        time.sleep(0.005)
        order.append(driver.code("cuEventQuery", done))
        called.set()

    pointer = CALLBACK(function)
    driver.launch(driver.kernel("k_1ms"), stream)
    driver.cuLaunchHostFunc(stream, pointer, None)
    driver.cuEventRecord(done, stream)
    assert called.wait(5)  # without any further call of this thread
    driver.cuStreamSynchronize(stream)
    return [*order, driver.code("cuEventQuery", done)]


def test_a_host_function_runs_in_its_place(world: World) -> None:
    assert run(world, host_function) == [NOT_READY, 0]


def busy(driver: Driver, name: str, seconds: float, talk: Talk) -> int:
    """Never lets its stream run dry. Returns how many kernels it has done."""
    driver.start()
    kernel, stream = driver.kernel(name), driver.out("cuStreamCreate", NON_BLOCKING)
    talk.say("ready")
    talk.hear()
    events: list[int] = []
    count = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        driver.launch(kernel, stream)
        events.append(driver.record(stream))
        if len(events) > 8:
            driver.cuEventSynchronize(events[0])
            driver.cuEventDestroy_v2(events.pop(0))
            count += 1
    return count


def test_processes_take_turns_and_each_gets_its_part(world: World) -> None:
    names = ["k_300us", "k_700us", "k_5ms"]
    children = [Child(world, busy, name, 0.6) for name in names]
    try:
        for child in children:
            child.hear()
        before = world.busy_ns()
        for child in children:
            child.tell()
        time.sleep(0.1)
        shares = [world.executed_ns(child.pid) for child in children]
        time.sleep(0.4)
        shares = [world.executed_ns(child.pid) - share for child, share in zip(children, shares, strict=True)]
        counts = [child.result() for child in children]
    finally:
        for child in children:
            child.kill()
    total = sum(shares)
    assert [share / total for share in shares] == pytest.approx([1 / 3] * 3, abs=0.02)
    assert sum(world.executed_ns(child.pid) for child in children) == world.busy_ns() - before  # never two at once
    for child, count, each in zip(children, counts, [0.3e6, 0.7e6, 5e6], strict=True):
        assert world.executed_ns(child.pid) >= count * each


def stretched(driver: Driver, talk: Talk) -> float:
    driver.start()
    kernel = driver.kernel("k_400ms")
    talk.say("ready")
    talk.hear()
    start = driver.record()
    driver.launch(kernel)
    end = driver.record()
    driver.cuEventSynchronize(end)
    return driver.elapsed_ms(start, end)


def test_another_process_stretches_the_time_between_events(world: World) -> None:
    with Child(world, stretched) as one, Child(world, stretched) as other:
        for child in (one, other):
            child.hear()
        one.tell()
        other.tell()
        times = sorted([one.result(), other.result()])
    assert 500 <= times[0] <= times[1] < 810  # 400 alone; they began nearly at once


# Memory


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


def test_memory_is_counted_in_granules_and_ends(make_world: MakeWorld) -> None:
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


def test_small_copies_are_really_made(world: World) -> None:
    assert run(world, copies) == b"Fair share"


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class PoolProps(ctypes.Structure):
    _fields_ = (
        ("alloc_type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("security", ctypes.c_void_p),
        ("max_size", ctypes.c_size_t),
        ("rest", ctypes.c_ubyte * 56),
    )


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
    assert (attribute(RESERVED), attribute(USED)) == (96 * MIB, 41 * MIB)
    driver.launch(driver.kernel("k_5ms"), stream)
    driver.cuMemFreeAsync(second, stream)
    assert attribute(RESERVED) == 96 * MIB  # kept, and in its stream's order at hand again
    assert driver.out("cuMemAllocAsync", 40 * MIB, stream) == second
    driver.cuMemFreeAsync(second, stream)
    elsewhere = driver.out("cuMemAllocAsync", 40 * MIB, other)
    assert elsewhere != second  # for another one not before the kernel is done
    driver.cuMemFreeAsync(elsewhere, other)
    driver.cuStreamSynchronize(stream)
    assert attribute(RESERVED) == 32 * MIB  # above the threshold of 0: gone
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


def test_pools_grow_by_chunks_and_keep_what_is_freed_until_trimmed(world: World) -> None:
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
    assert driver.code("cuMemMap", place + 6 * MIB, 4 * MIB, 0, handle, 0) == 1  # beyond what is reserved
    driver.cuMemMap(place, 4 * MIB, 0, handle, 0)
    driver.cuMemMap(second, 4 * MIB, 0, handle, 0)
    assert driver.code("cuMemMap", place, 4 * MIB, 0, handle, 0) == 1  # something is there
    driver.cuMemSetAccess(place, 4 * MIB, b"\0" * 12, 1)
    driver.cuMemcpyHtoD_v2(place, b"seen twice", 10)
    back = ctypes.create_string_buffer(10)
    driver.cuMemcpyDtoH_v2(back, second, 10)
    assert back.raw == b"seen twice"
    driver.cuMemRelease(handle)
    assert driver.free_memory()[0] == free - 4 * MIB  # still mapped
    driver.cuMemUnmap(place, 4 * MIB)
    assert driver.out("cuMemRetainAllocationHandle", second) == handle
    driver.cuMemUnmap(second, 4 * MIB)
    assert driver.free_memory()[0] == free - 4 * MIB  # a handle is left
    driver.cuMemRelease(handle)
    assert driver.free_memory()[0] == free
    assert driver.code("cuMemRelease", handle) == 1
    driver.cuMemAddressFree(place, 8 * MIB)
    on_host = driver.out("cuMemCreate", 4 * MIB, ctypes.byref(Prop(type=1, location=Location(2, 0))), 0)
    assert driver.free_memory()[0] == free
    driver.cuMemRelease(on_host)


def test_physical_memory_lives_until_no_handle_and_no_mapping_is_left(world: World) -> None:
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


def test_arrays_take_memory(world: World) -> None:
    run(world, arrays)


def hold(driver: Driver, talk: Talk) -> None:
    driver.start()
    driver.out("cuMemAlloc_v2", 600 * MIB)
    kernel = driver.kernel("k_1s")
    for _ in range(10):
        driver.launch(kernel)
    talk.say("holding")
    talk.hear()


def want(driver: Driver) -> float:
    driver.start()
    driver.out("cuMemAlloc_v2", 600 * MIB)
    driver.launch(driver.kernel("k_10ms"))
    return timed(driver.cuCtxSynchronize)


def test_a_killed_process_gives_back_memory_and_device(make_world: MakeWorld) -> None:
    world = make_world(memory=1500 * MIB)
    with Child(world, hold) as holder:
        holder.hear()
        assert world.memory(holder.pid) == 900 * MIB
        with pytest.raises(AssertionError, match="cuMemAlloc_v2 gave 2"):
            run(world, want)
        os.kill(holder.pid, signal.SIGKILL)
        holder.kill()
        assert run(world, want) < 0.02
        assert world.memory(holder.pid) == 0
        assert 0 < world.executed_ns(holder.pid) < 3e9  # remembered; the rest of its ten seconds will never run
        assert world.pending(holder.pid) == 0


def hammer(driver: Driver, seed: int, talk: Talk) -> None:
    """Keeps the world's lock busy until it is killed."""
    driver.start()
    dice = random.Random(seed)
    kernels = [driver.kernel(name) for name in ("k_5us", "k_50us", "k_500us")]
    streams = [driver.out("cuStreamCreate", kind) for kind in (0, NON_BLOCKING)]
    talk.say("ready")
    while True:
        driver.launch(dice.choice(kernels), dice.choice([*streams, LEGACY, PER_THREAD]))
        event = driver.record(dice.choice(streams))
        driver.cuStreamWaitEvent(dice.choice(streams), event, 0)
        driver.cuEventDestroy_v2(event)
        driver.cuMemFreeAsync(driver.out("cuMemAllocAsync", dice.randrange(1, 5 * MIB), streams[0]), streams[1])


def test_a_process_killed_at_any_moment_harms_no_other(world: World) -> None:
    dice = random.Random(6)
    children = [Child(world, hammer, seed) for seed in range(2)]
    for seed in range(2, 22):
        children[0].hear()
        time.sleep(dice.random() * 0.02)
        children.pop(0).kill()
        children.append(Child(world, hammer, seed))
    for child in children:
        child.kill()
    assert world.used() == 0
    assert run(world, want) < 0.02


class Ticket(ctypes.Structure):
    """CUipcMemHandle, which goes by value."""

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


def test_memory_of_another_process_is_charged_to_that(world: World) -> None:
    with Child(world, lend) as owner:
        run(world, borrow, owner.hear())
        assert world.memory(owner.pid) == CONTEXT + 100 * MIB


# Graphs


class AllocNode(ctypes.Structure):
    _fields_ = (
        ("pool", PoolProps),
        ("access", ctypes.c_void_p),
        ("access_count", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
        ("pointer", ctypes.c_uint64),
    )


class KernelNode(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


def device_graphs(driver: Driver) -> tuple[float, float]:
    driver.start()
    short, long = driver.kernel("k_1ms"), driver.kernel("k_3ms")
    graph = driver.out("cuGraphCreate", 0)

    def add(kernel: int, *after: int) -> int:
        node = KernelNode(kernel, 1, 1, 1, 1, 1, 1, 0, None, None)
        return driver.out(
            "cuGraphAddKernelNode", graph, (ctypes.c_void_p * len(after))(*after), len(after), ctypes.byref(node)
        )

    root = add(short)
    add(short, add(short, root), add(long, root))
    whole = driver.out("cuGraphCreate", 0)
    child = driver.out("cuGraphAddChildGraphNode", whole, None, 0, graph)
    driver.out("cuGraphAddChildGraphNode", whole, (ctypes.c_void_p * 1)(child), 1, driver.out("cuGraphClone", graph))
    driver.cuGraphDestroy(graph)

    def took(of: int) -> float:
        start = driver.record()
        driver.cuGraphLaunch(of, 0)
        end = driver.record()
        driver.cuEventSynchronize(end)
        return driver.elapsed_ms(start, end)

    return took(driver.out("cuGraphInstantiateWithFlags", whole, 0)), took(
        driver.out("cuGraphInstantiate_v2", whole, 0, 0, 0)
    )


def test_a_graph_takes_as_long_as_its_longest_path(world: World) -> None:
    for elapsed in run(world, device_graphs):
        assert elapsed == pytest.approx(10, abs=0.5)


def graph_memory(driver: Driver) -> None:
    driver.start()
    stream = driver.out("cuStreamCreate", NON_BLOCKING)
    free = driver.free_memory()[0]

    def attribute(which: int) -> int:
        value = ctypes.c_uint64()
        driver.cuDeviceGetGraphMemAttribute(0, which, ctypes.byref(value))
        return value.value

    graph = driver.out("cuGraphCreate", 0)
    node = AllocNode(pool=PoolProps(alloc_type=1, location=Location(1, 0)), bytes=8 * MIB)
    driver.out("cuGraphAddMemAllocNode", graph, None, 0, ctypes.byref(node))
    assert node.pointer != 0 and driver.free_memory()[0] == free
    ready = driver.out("cuGraphInstantiateWithFlags", graph, 0)
    assert driver.code("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), graph, 0) == 1  # one at a time
    assert driver.free_memory()[0] == free
    driver.cuGraphLaunch(ready, stream)
    assert driver.free_memory()[0] == free - 8 * MIB and (attribute(0), attribute(2)) == (8 * MIB, 8 * MIB)
    assert driver.code("cuGraphLaunch", ready, stream) == 1  # what it has allocated is not freed
    driver.cuDeviceGraphMemTrim(0)
    assert attribute(2) == 8 * MIB
    driver.cuMemFreeAsync(node.pointer, stream)
    assert (attribute(0), attribute(2)) == (0, 8 * MIB)
    driver.cuGraphLaunch(ready, stream)
    driver.cuMemFreeAsync(node.pointer, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuDeviceGraphMemTrim(0)
    assert attribute(2) == 0 and driver.free_memory()[0] == free


def test_a_graphs_memory_is_reserved_at_its_first_launch_until_trimmed(world: World) -> None:
    run(world, graph_memory)


def begin_capture(driver: Driver, mode: int = 0) -> int:
    stream = driver.out("cuStreamCreate", 0)
    driver.cuStreamBeginCapture_v2(stream, mode)
    return stream


def end_capture(driver: Driver, stream: int) -> int:
    graph = ctypes.c_uint64()
    driver.cuStreamEndCapture(stream, ctypes.byref(graph))
    return graph.value


def capture_status(driver: Driver, stream: int) -> int:
    status = ctypes.c_int(-1)
    driver.cuStreamIsCapturing(stream, ctypes.byref(status))
    return status.value


def captured(driver: Driver) -> float:
    driver.start()
    stream, side = begin_capture(driver), driver.out("cuStreamCreate", NON_BLOCKING)
    kernel = driver.kernel("k_2ms")
    driver.launch(kernel, stream)
    fork, join = driver.out("cuEventCreate", 2), driver.out("cuEventCreate", 2)
    driver.cuEventRecord(fork, stream)
    driver.cuStreamWaitEvent(side, fork, 0)
    driver.launch(kernel, side)
    driver.launch(kernel, stream)
    pointer = driver.out("cuMemAllocAsync", MIB, stream)
    driver.cuMemFreeAsync(pointer, stream)
    driver.cuEventRecord(join, side)
    assert capture_status(driver, side) == 1
    driver.cuStreamWaitEvent(stream, join, 0)
    graph = end_capture(driver, stream)
    assert capture_status(driver, side) == 0
    count = ctypes.c_size_t()
    driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
    assert count.value == 5
    ready = driver.out("cuGraphInstantiateWithFlags", graph, 0)
    assert driver.code("cuStreamQuery", stream) == 0  # nothing has run yet
    start = driver.record(stream)
    driver.cuGraphLaunch(ready, stream)
    end = driver.record(stream)
    driver.cuStreamSynchronize(stream)
    return driver.elapsed_ms(start, end)


def test_what_is_captured_runs_when_its_graph_is_launched(world: World) -> None:
    assert 4 <= run(world, captured) < 5


def unsafe_calls(driver: Driver) -> None:
    driver.start()
    done = driver.record()
    driver.cuCtxSynchronize()
    number = ctypes.byref(ctypes.c_uint64())

    def attempt(mode: int, act: Callable[[int], int]) -> tuple[int, int]:
        """What the call and the end of the capture say."""
        stream = begin_capture(driver, mode)
        code = act(stream)
        return code, driver.code("cuStreamEndCapture", stream, number)

    spoilt = (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)
    for mode in (0, 1):
        assert attempt(mode, lambda _: driver.code("cuMemAlloc_v2", number, 1)) == spoilt
        assert attempt(mode, lambda _: driver.code("cuEventQuery", done)) == spoilt
        assert attempt(mode, lambda _: driver.code("cuCtxSynchronize")) == spoilt
    assert attempt(2, lambda _: driver.code("cuMemAlloc_v2", number, 1)) == (0, 0)
    for mode in (0, 1, 2):
        assert attempt(mode, lambda stream: driver.code("cuStreamSynchronize", stream)) == spoilt
        assert attempt(mode, lambda stream: driver.code("cuStreamQuery", stream)) == spoilt
        assert attempt(mode, lambda _: driver.code("cuStreamQuery", LEGACY)) == (CAPTURE_IMPLICIT, CAPTURE_INVALIDATED)

    def in_thread(mode: int) -> Callable[[int], int]:
        def act(_: int) -> int:
            codes: list[int] = []

            def other() -> None:
                driver.start()
                driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(mode)))
                codes.append(driver.code("cuEventQuery", done))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return codes[0]

        return act

    assert attempt(0, in_thread(0)) == spoilt
    assert attempt(0, in_thread(1)) == (0, 0)
    assert attempt(0, in_thread(2)) == (0, 0)
    assert attempt(1, in_thread(0)) == (0, 0)

    stream, side = begin_capture(driver), driver.out("cuStreamCreate", NON_BLOCKING)
    fork = driver.out("cuEventCreate", 2)
    driver.cuEventRecord(fork, stream)
    driver.cuStreamWaitEvent(side, fork, 0)
    driver.launch(driver.kernel("k_1us"), side)
    assert driver.code("cuStreamEndCapture", stream, number) == CAPTURE_UNJOINED


def test_unsafe_calls_end_a_capture_by_its_mode(world: World) -> None:
    run(world, unsafe_calls)


# What tests do to it


def fail_some(driver: Driver) -> list[int]:
    driver.start()
    number = ctypes.byref(ctypes.c_uint64())
    codes = [driver.code("cuMemAlloc_v2", number, 1) for _ in range(4)]
    return [*codes, driver.code("cuCtxSynchronize"), driver.code("cuCtxSynchronize")]


def test_calls_are_counted_and_fail_on_demand(world: World) -> None:
    assert run(world, fail_some, fail="cuMemAlloc_v2:3=2,cuCtxSynchronize:1=719") == [0, 0, 2, 0, 719, 0]
    assert world.calls("cuMemAlloc_v2") == 4
    assert world.calls("cuInit") == 1
    with pytest.raises(KeyError):
        world.calls("cuNope")


def virtual_time(driver: Driver, talk: Talk) -> list[float]:
    driver.start()
    kernel, stream = driver.kernel("k_3s"), driver.out("cuStreamCreate", NON_BLOCKING)
    start = driver.record(stream)
    driver.launch(kernel, stream)
    end = driver.record(stream)
    talk.say(driver.code("cuEventQuery", end))
    talk.hear()
    talk.say(driver.code("cuEventQuery", end))
    driver.launch(kernel, stream)
    later = driver.record(stream)
    driver.cuStreamSynchronize(stream)
    return [driver.elapsed_ms(start, end), driver.elapsed_ms(end, later)]


def test_virtual_time_moves_by_hand_and_when_a_process_waits(make_world: MakeWorld) -> None:
    world = make_world(virtual=True)
    began = time.monotonic()
    with Child(world, virtual_time) as child:
        assert child.hear() == NOT_READY
        now = world.now_ns()
        world.advance(4_000_000_000)
        assert world.now_ns() == now + 4_000_000_000
        assert world.executed_ns(child.pid) == 3_000_000_000
        child.tell()
        assert child.hear() == 0
        assert child.result() == [3000, 4000]  # idle for a second between
        assert world.now_ns() == now + 7_000_000_000
    assert time.monotonic() - began < 6, "the seven seconds were not waited for"


def work_in_steps(driver: Driver, talk: Talk) -> int:
    driver.start()
    driver.out("cuMemAlloc_v2", 100 * MIB)
    driver.launch(driver.kernel("k_2s"))
    talk.say("launched")
    talk.hear()
    talk.say("calling")
    return driver.code("cuCtxSynchronize")


def checkpoint(driver: Driver, pid: int, talk: Talk) -> None:
    """Never calls cuInit, as a daemon would not."""

    def state() -> int:
        value = ctypes.c_int(-1)
        driver.cuCheckpointProcessGetState(pid, ctypes.byref(value))
        return value.value

    timeout = (ctypes.c_uint * 16)(1)
    assert driver.code("cuCheckpointProcessLock", pid, timeout) == NOT_READY  # its kernel takes longer
    assert state() == 0
    driver.cuCheckpointProcessLock(pid, None)
    assert state() == 1
    assert driver.code("cuCheckpointProcessLock", pid, None) == 401
    driver.cuCheckpointProcessCheckpoint(pid, None)
    assert state() == 2
    talk.say("put away")
    talk.hear()
    driver.cuCheckpointProcessRestore(pid, None)
    talk.say("brought back")
    talk.hear()
    driver.cuCheckpointProcessUnlock(pid, None)
    assert driver.code("cuCheckpointProcessLock", 1, None) == 1


def test_a_process_is_put_away_and_brought_back(world: World) -> None:
    with Child(world, work_in_steps) as worker:
        worker.hear()
        with Child(world, checkpoint, worker.pid) as owner:
            assert owner.hear() == "put away"
            assert world.used() == 0
            worker.tell()
            assert worker.hear() == "calling"
            assert worker.silent(0.05)
            owner.tell()
            assert owner.hear() == "brought back"
            assert world.memory(worker.pid) == CONTEXT + 100 * MIB
            assert worker.silent(0.05)
            owner.tell()
            assert worker.result() == 0
            owner.result()


# NVML


@pytest.fixture
def nvml(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> tuple[World, Any]:
    import pynvml

    world = make_world(devices=2, memory=24576 * MIB, name="Fake L4", capability=89)
    own = tmp_path / "libnvidia-ml.so.1"  # it stays with the world that it has found first
    own.write_bytes(world.fakes.nvml.read_bytes())
    monkeypatch.setenv("FAKE_GPU_WORLD", str(world.path))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(own)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return world, pynvml


def test_the_mesh_finds_the_gpus(nvml: tuple[World, Any]) -> None:
    world, _ = nvml
    assert [(gpu.uuid, gpu.model, gpu.vram_mib, gpu.capability) for gpu in inventory()] == [
        (f"GPU-{number}", "Fake L4", 24576, (8, 9)) for number in world.uuids
    ]


def test_nvml_tells_of_memory_processes_and_utilisation(nvml: tuple[World, Any]) -> None:
    world, pynvml = nvml
    pynvml.nvmlInit()
    first, second = (pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(2))
    assert (
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{world.uuids[1]}")) == f"GPU-{world.uuids[1]}"
    )
    assert pynvml.nvmlSystemGetCudaDriverVersion() == 13000
    assert pynvml.nvmlSystemGetDriverVersion().startswith("580")
    with Child(world, busy, "k_1ms", 0.6) as child:
        child.hear()
        child.tell()
        for call in (pynvml.nvmlDeviceGetComputeRunningProcesses_v2, pynvml.nvmlDeviceGetComputeRunningProcesses_v3):
            assert [(entry.pid, entry.usedGpuMemory) for entry in call(first)] == [(child.pid, CONTEXT)]
            assert call(second) == []
        for version in (None, pynvml.nvmlMemory_v2):
            info = pynvml.nvmlDeviceGetMemoryInfo(first, version)
            assert (info.total, info.used, info.free) == (24576 * MIB, CONTEXT, 24576 * MIB - CONTEXT)
        child.result()
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(first) == []
    samples = pynvml.nvmlDeviceGetProcessUtilization(first, 0)
    assert [entry.pid for entry in samples] == [child.pid]
    assert abs(samples[0].timeStamp / 1e6 - time.time()) < 5
    infos = pynvml.nvmlDeviceGetProcessesUtilizationInfo(first, 0)
    assert [(entry.pid, entry.smUtil) for entry in infos] == [(child.pid, samples[0].smUtil)]
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetProcessUtilization(first, samples[0].timeStamp)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetFanSpeed(first)
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()

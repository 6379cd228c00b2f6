"""Honest programs of many kinds. Each returns what it computed, which must be the same with and without the guard."""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.cuda_guard.allocations import DEVICE, AllocationProp, pinned
from tests.cuda_guard.guests import MIB, be_a_guest
from tests.fake.client import NON_BLOCKING, PER_THREAD, CudaError, Driver, timed

Program = Callable[[Driver], Any]
HERE = Path(__file__).parent
WORDS = 1024
NOT_READY, NOT_INITIALIZED = 600, 3
EQ = 1  # CU_STREAM_WAIT_VALUE_EQ
CAPTURE_RELAXED = 2
DEVICE_MAP = 2  # CU_MEMHOSTALLOC_DEVICEMAP
READ_AND_WRITE = (ctypes.c_int * 3)(DEVICE, 0, 3)  # a CUmemAccessDesc with CU_MEM_ACCESS_FLAGS_PROT_READWRITE
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def pattern(seed: int) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(bytes((seed * 31 + n * 7) % 256 for n in range(4 * WORDS)), 4 * WORDS)


def checked(driver: Driver, pointer: int, seed: int) -> int:
    """Move a pattern through device memory, half of it overwritten there; return a checksum of what comes back."""
    back = ctypes.create_string_buffer(4 * WORDS)
    driver.cuMemcpyHtoD_v2(pointer, pattern(seed), 4 * WORDS)
    driver.cuMemsetD32_v2(pointer, seed, WORDS // 2)
    driver.cuMemcpyDtoH_v2(back, pointer, 4 * WORDS)
    return sum((n + 1) * byte for n, byte in enumerate(back.raw)) % (1 << 31)


def eager(driver: Driver) -> list[int]:
    """Launch kernel by kernel, as PyTorch does without a compiler."""
    driver.start()
    kernels = [driver.kernel(f"k_{us}us") for us in (10, 50, 200)]
    pointer, sums = driver.out("cuMemAlloc_v2", MIB), []
    for step in range(20):
        for kernel in kernels * 5:
            driver.launch(kernel)
        driver.cuStreamSynchronize(0)
        sums.append(checked(driver, pointer, step))
    driver.cuMemFree_v2(pointer)
    return sums


def graph_launches(driver: Driver) -> list[int]:
    """Capture two streams that fork and join, and launch the graph again and again."""
    driver.start()
    kernel, pointer = driver.kernel("k_50us"), driver.out("cuMemAlloc_v2", MIB)
    one, other = (driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    captured = ctypes.c_uint64()
    driver.launch(kernel, one)
    driver.cuStreamSynchronize(one)
    driver.cuStreamBeginCapture_v2(one, CAPTURE_RELAXED)
    driver.launch(kernel, one)
    driver.cuStreamWaitEvent(other, driver.record(one), 0)
    driver.launch(kernel, other)
    driver.cuStreamWaitEvent(one, driver.record(other), 0)
    driver.launch(kernel, one)
    driver.cuStreamEndCapture(one, ctypes.byref(captured))
    run = driver.out("cuGraphInstantiateWithFlags", captured.value, 0)
    for _ in range(50):
        driver.cuGraphLaunch(run, one)
    driver.cuStreamSynchronize(one)
    driver.cuGraphExecDestroy(run)
    return [checked(driver, pointer, 3)]


def pool(driver: Driver) -> list[int]:
    """Allocate in stream order."""
    driver.start()
    kernel, stream, sums = driver.kernel("k_20us"), driver.out("cuStreamCreate", NON_BLOCKING), []
    for step in range(10):
        pointer = driver.out("cuMemAllocAsync", (step + 1) * MIB, stream)
        driver.launch(kernel, stream)
        driver.cuStreamSynchronize(stream)
        sums.append(checked(driver, pointer, step))
        driver.cuMemFreeAsync(pointer, stream)
    driver.cuStreamSynchronize(stream)
    return sums


def expandable(driver: Driver) -> list[int]:
    """Grow a segment by mapping memory at its end, as PyTorch's expandable segments do."""
    driver.start()
    step, count, sums = 2 * MIB, 6, []
    at = driver.out("cuMemAddressReserve", count * step, 0, 0, 0)
    prop: AllocationProp = pinned()
    for n in range(count):
        handle = driver.out("cuMemCreate", step, ctypes.byref(prop), 0)
        driver.cuMemMap(at + n * step, step, 0, handle, 0)
        driver.cuMemRelease(handle)
        driver.cuMemSetAccess(at + n * step, step, ctypes.byref(READ_AND_WRITE), 1)
        sums.append(checked(driver, at + n * step, n))
    driver.cuMemUnmap(at, count * step)
    driver.cuMemAddressFree(at, count * step)
    return sums


def managed(driver: Driver) -> list[int]:
    """Write managed memory on the host, as programs without copies do."""
    driver.start()
    pointer = driver.out("cuMemAllocManaged", 4 * MIB, 1)
    ctypes.memmove(pointer, pattern(5), 4 * WORDS)
    driver.launch(driver.kernel("k_100us"))
    driver.cuCtxSynchronize()
    seen = ctypes.string_at(pointer, 4 * WORDS) == pattern(5).raw
    found = checked(driver, pointer, 5)
    driver.cuMemFree_v2(pointer)
    return [int(seen), found]


def polling(driver: Driver) -> int:
    """Wait by asking, as schedulers with many streams do."""
    driver.start()
    kernel, streams = driver.kernel("k_100us"), [driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(4)]
    done = 0
    for _ in range(30):
        for stream in streams:
            driver.launch(kernel, stream)
        events = [driver.record(stream) for stream in streams]
        for event in events:
            while driver.code("cuEventQuery", event) == NOT_READY:
                pass
            driver.cuEventDestroy_v2(event)
            done += 1
    return done


def per_thread(driver: Driver) -> list[int]:
    """Use the default streams of several threads, as programs built for them do."""
    context = driver.start()
    kernel, results = driver.kernel("k_50us"), [0] * 4

    def work(number: int) -> None:
        driver.cuCtxSetCurrent(context)
        pointer = driver.out("cuMemAlloc_v2", MIB)
        for _ in range(50):
            driver.launch(kernel, suffix="_ptsz")
        driver.cuStreamSynchronize(PER_THREAD)
        results[number] = checked(driver, pointer, number)

    in_threads(work, 4)
    return results


def own_contexts(driver: Driver) -> list[int]:
    """Serve clients from one process, each in a context of its own, as an MPS server does."""
    driver.cuInit(0)
    results = [0] * 3

    def serve(number: int) -> None:
        context = driver.out("cuCtxCreate_v2", 0, 0)
        kernel, pointer = driver.kernel("k_50us"), driver.out("cuMemAlloc_v2", MIB)
        for _ in range(50):
            driver.launch(kernel)
        driver.cuCtxSynchronize()
        results[number] = checked(driver, pointer, number)
        driver.cuCtxDestroy_v2(context)

    in_threads(serve, 3)
    return results


def in_threads(work: Callable[[int], None], count: int) -> None:
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))


def in_children(work: Callable[[int], int], count: int) -> list[int]:
    """Run the work in forked processes and return what each gives, below 2^31."""
    lines = []
    for number in range(count):
        reading, writing = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                be_a_guest()
                os.write(writing, work(number).to_bytes(4, "little"))
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        lines.append(reading)
    found = [int.from_bytes(os.read(line, 4), "little") for line in lines]
    assert all(os.wait()[1] == 0 for _ in lines)
    return found


def workers(driver: Driver) -> list[int]:
    """Fork workers before the first CUDA call, as data-parallel launchers do."""

    def work(number: int) -> int:
        driver.start()
        pointer, kernel = driver.out("cuMemAlloc_v2", MIB), driver.kernel("k_100us")
        for _ in range(50):
            driver.launch(kernel)
        driver.cuCtxSynchronize()
        return checked(driver, pointer, number)

    return in_children(work, 3)


def forks(driver: Driver) -> list[int]:
    """Fork after the first CUDA call: the child must not use CUDA, the parent goes on."""
    driver.start()
    kernel, pointer = driver.kernel("k_100us"), driver.out("cuMemAlloc_v2", MIB)
    driver.launch(kernel)
    (refused,) = in_children(lambda _: driver.code("cuCtxSynchronize"), 1)
    for _ in range(20):
        driver.launch(kernel)
    driver.cuCtxSynchronize()
    return [refused, checked(driver, pointer, 1)]


Gate = Callable[[Driver, int], Callable[[], object]]  # stops a stream; what it returns lets the stream go on


gates: list[object] = []


def by_function(driver: Driver, stream: int) -> Callable[[], object]:
    """Stop the stream by a function on the host that another thread releases."""
    go = threading.Event()
    gate = CALLBACK(lambda _: go.wait() and None)
    driver.cuLaunchHostFunc(stream, gate, None)
    gates.append(gate)  # the driver calls it later
    return go.set


def by_value(driver: Driver, stream: int) -> Callable[[], object]:
    """Stop it until a word in memory has a value, as libraries for communication do."""
    address = driver.out("cuMemHostAlloc", ctypes.sizeof(ctypes.c_uint32), DEVICE_MAP)
    word = ctypes.c_uint32.from_address(address)
    word.value = 0
    driver.cuStreamWaitValue32_v2(stream, address, 1, EQ)
    return lambda: setattr(word, "value", 1)


def by_event(driver: Driver, stream: int) -> Callable[[], object]:
    """Stop it until another stream has gone on, which waits for the host."""
    other = driver.out("cuStreamCreate", NON_BLOCKING)
    go = by_function(driver, other)
    driver.cuStreamWaitEvent(stream, driver.record(other), 0)
    return go


def gated_s(driver: Driver, gate: Gate) -> float:
    """Queue 40 ms of work behind a gate that this thread opens only afterwards; return the seconds until it is done."""
    driver.start()
    kernel, stream = driver.kernel("k_1ms"), driver.out("cuStreamCreate", NON_BLOCKING)
    for _ in range(20):
        driver.launch(kernel, stream)
    driver.cuStreamSynchronize(stream)

    def work() -> None:
        go = gate(driver, stream)
        for _ in range(40):
            driver.launch(kernel, stream)
        go()
        driver.cuStreamSynchronize(stream)

    return timed(work)


def host_gated(driver: Driver) -> bool:
    return gated_s(driver, by_function) > 0


def value_gated(driver: Driver) -> bool:
    return gated_s(driver, by_value) > 0


def event_gated(driver: Driver) -> bool:
    return gated_s(driver, by_event) > 0


def green(driver: Driver) -> list[int]:
    """Work in a part of the device's multiprocessors."""
    driver.start()
    kernel = driver.kernel("k_50us")
    whole, part, rest = ((ctypes.c_ubyte * 144)() for _ in range(3))
    count = ctypes.c_uint(1)
    driver.cuDeviceGetDevResource(0, whole, 1)
    driver.cuDevSmResourceSplitByCount(part, ctypes.byref(count), whole, rest, 0, 64)
    made = driver.out("cuGreenCtxCreate", driver.out("cuDevResourceGenerateDesc", part, 1), 0, 1)
    driver.cuCtxSetCurrent(driver.out("cuCtxFromGreenCtx", made))
    stream, pointer = driver.out("cuGreenCtxStreamCreate", made, NON_BLOCKING, 0), driver.out("cuMemAlloc_v2", MIB)
    for _ in range(100):
        driver.launch(kernel, stream)
    driver.cuStreamSynchronize(stream)
    found = checked(driver, pointer, 2)
    driver.cuGreenCtxDestroy(made)
    return [int.from_bytes(part[96:100], "little"), found]


def collectives(driver: Driver) -> list[int]:
    """Train on two GPUs, with a collective after each step, as with NCCL in one process."""
    driver.cuInit(0)
    results = [0] * 2

    def rank(device: int) -> None:
        driver.start(device)
        step, reduce = driver.kernel("k_200us"), driver.kernel("k_100us_of2")
        stream, pointer = driver.out("cuStreamCreate", NON_BLOCKING), driver.out("cuMemAlloc_v2", MIB)
        for _ in range(20):
            for _ in range(5):
                driver.launch(step, stream)
            driver.launch(reduce, stream)
        driver.cuStreamSynchronize(stream)
        results[device] = checked(driver, pointer, device)

    in_threads(rank, 2)
    return results


def pinned_copies(driver: Driver) -> list[int]:
    """Overlap copies from pinned memory with kernels, as data loaders do."""
    driver.start()
    kernel, sums = driver.kernel("k_200us"), []
    copies, works = (driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    host, pointer = driver.out("cuMemHostAlloc", 8 * MIB, 0), driver.out("cuMemAlloc_v2", 8 * MIB)
    for step in range(20):
        driver.cuMemcpyHtoDAsync_v2(pointer, host, 8 * MIB, copies)
        driver.cuStreamWaitEvent(works, driver.record(copies), 0)
        driver.launch(kernel, works)
        driver.cuStreamSynchronize(works)
        sums.append(checked(driver, pointer, step))
    driver.cuMemFreeHost(host)
    return sums


def refused_and_recovers(driver: Driver) -> list[int]:
    """Make calls that the driver refuses, and go on."""
    driver.start()
    pointer, codes = driver.out("cuMemAlloc_v2", MIB), []
    for call in (
        lambda: driver.cuMemFree_v2(pointer + 1),
        lambda: driver.launch(driver.kernel("gemm")),
        lambda: driver.out("cuMemAlloc_v2", 1 << 50),
    ):
        try:
            call()
            codes.append(0)
        except CudaError as error:
            codes.append(error.code)
    return [*codes, checked(driver, pointer, 4)]


PROGRAMS: tuple[Program, ...] = (
    eager, graph_launches, pool, expandable, managed, polling, per_thread, own_contexts, workers, forks, host_gated, value_gated,
    event_gated, green, collectives, pinned_copies, refused_and_recovers,
)  # fmt: skip


# --- programs in C, which link the driver or look it up as a static cudart does

C_PROGRAMS = ("static", "dynamic")


def compiled(directory: Path, kind: str, driver: Path, compiler: Sequence[str]) -> Path:
    """Return the program zoo.c, which looks its calls up (`static`) or links the driver (`dynamic`)."""
    path = directory / kind
    link = ["-DLOOKED_UP", "-ldl"] if kind == "static" else [str(driver)]
    subprocess.run([*compiler, "-std=c11", "-O2", "-Wall", str(HERE / "zoo.c"), *link, "-o", str(path)], check=True)
    return path

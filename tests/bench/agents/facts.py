"""The answers of a driver to the questions on which the guard depends. `facts.py [NAME ...]` prints them as a JSON object.

The fake driver answers likewise: a test compares it with what a real one answered (`tests/fake/h100.json`). Each question has
a process of its own.
"""

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.agents.honest import TimedDriver
from tests.cuda_guard.allocations import pinned
from tests.cuda_guard.zoo import READ_AND_WRITE
from tests.fake.client import LEGACY, NON_BLOCKING, PER_THREAD, CudaError, Driver
from tests.fake.structs import PoolProps

MIB = 1 << 20
MODES = {"global": 0, "thread-local": 1, "relaxed": 2}  # CUstreamCaptureMode
RESERVED, USED, THRESHOLD = 5, 7, 4  # CUmemPool_attribute
GRAPH_USED, GRAPH_RESERVED = 0, 2  # CUgraphMem_attribute
UPLOAD = 2  # CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
EQ = 1  # CU_STREAM_WAIT_VALUE_EQ


def in_thread(driver: Driver, context: int, act: Callable[[], Any]) -> Any:
    """Return what `act` gives in another thread with this context."""
    found: list[Any] = []

    def run() -> None:
        driver.cuCtxSetCurrent(context)
        found.append(act())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def relaxed(driver: Driver, act: Callable[[], int]) -> int:
    mode = ctypes.c_int(MODES["relaxed"])
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        return act()
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def beside(driver: Driver, kernel: int, flags: int, mode: int, call: Callable[[int], int]) -> list[int]:
    """Codes of a call beside a capture, whose stream it is given, and of the end of that capture."""
    captured, graph = driver.out("cuStreamCreate", flags), ctypes.c_uint64()
    driver.cuStreamBeginCapture_v2(captured, mode)
    driver.launch(kernel, captured)
    code = call(captured)
    end = driver.code("cuStreamEndCapture", captured, ctypes.byref(graph))
    driver.cuStreamDestroy_v2(captured)
    driver.cuCtxSynchronize()
    return [code, end]


def captures(driver: Driver) -> dict[str, list[int]]:
    """Codes of a call beside a capture in another stream, and of the end of that capture."""
    context, found = driver.start(), {}
    kernel, other = driver.kernel("k_1us"), driver.out("cuStreamCreate", NON_BLOCKING)
    blocking = driver.out("cuStreamCreate", 0)
    driver.launch(kernel, other)
    first, done = driver.record(other), driver.record(other)
    driver.cuCtxSynchronize()
    value, ms = ctypes.c_uint64(), ctypes.c_float()
    calls: dict[str, Callable[[], int]] = {
        "cuEventQuery": lambda: driver.code("cuEventQuery", done),
        "cuEventRecord": lambda: driver.code("cuEventRecord", first, other),
        "cuEventRecord, a blocking stream": lambda: driver.code("cuEventRecord", first, blocking),
        "cuEventRecord, the legacy stream": lambda: driver.code("cuEventRecord", first, LEGACY),
        "cuEventCreate": lambda: driver.code("cuEventCreate", ctypes.byref(value), 0),
        "cuEventElapsedTime": lambda: driver.code("cuEventElapsedTime", ctypes.byref(ms), done, done),
        "cuStreamQuery": lambda: driver.code("cuStreamQuery", other),
        "cuStreamQuery, the legacy stream": lambda: driver.code("cuStreamQuery", LEGACY),
        "cuStreamIsCapturing, the legacy stream": lambda: driver.code(
            "cuStreamIsCapturing", LEGACY, ctypes.byref(value)
        ),
        "cuStreamSynchronize": lambda: driver.code("cuStreamSynchronize", other),
        "cuCtxSynchronize": lambda: driver.code("cuCtxSynchronize"),
        "cuMemAlloc_v2": lambda: driver.code("cuMemAlloc_v2", ctypes.byref(value), 1),
        "cuLaunchKernel": lambda: driver.code("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, other, None, None),
    }
    ways: dict[str, Callable[[Callable[[], int]], int]] = {
        "same thread": lambda call: call(),
        "same thread, relaxed": lambda call: relaxed(driver, call),
        "other thread": lambda call: int(in_thread(driver, context, call)),
        "other thread, relaxed": lambda call: int(in_thread(driver, context, lambda: relaxed(driver, call))),
    }
    for kind, flags in (("", NON_BLOCKING), (" of a blocking stream", 0)):
        for mode, number in MODES.items():
            for way, make in ways.items():
                for name, call in calls.items():
                    found[f"{mode}{kind}, {way}, {name}"] = beside(
                        driver, kernel, flags, number, lambda _, make=make, call=call: make(call)
                    )
    return found


def accounts(driver: Driver) -> dict[str, list[int]]:
    """Codes of the guard's calls about memory beside a global capture of the same thread, and of the end of that capture."""
    driver.start()
    kernel, other = driver.kernel("k_1us"), driver.out("cuStreamCreate", NON_BLOCKING)
    pool, run = driver.out("cuDeviceGetDefaultMemPool", 0), launchable(driver, allocating(driver, other))
    spare, pointer = driver.record(other), driver.out("cuMemAllocAsync", MIB, other)
    driver.cuCtxSynchronize()
    value, more = ctypes.c_uint64(), ctypes.c_uint64()
    calls: dict[str, Callable[[int], int]] = {
        "cuStreamGetCtx of its stream": lambda stream: driver.code("cuStreamGetCtx", stream, ctypes.byref(value)),
        "cuMemPoolGetAttribute": lambda _: driver.code("cuMemPoolGetAttribute", pool, RESERVED, ctypes.byref(value)),
        "cuDeviceGetGraphMemAttribute": lambda _: driver.code(
            "cuDeviceGetGraphMemAttribute", 0, GRAPH_RESERVED, ctypes.byref(value)
        ),
        "cuMemGetInfo_v2": lambda _: driver.code("cuMemGetInfo_v2", ctypes.byref(value), ctypes.byref(more)),
        "cuMemAllocAsync": lambda _: driver.code("cuMemAllocAsync", ctypes.byref(value), MIB, other),
        "cuMemFreeAsync": lambda _: driver.code("cuMemFreeAsync", pointer, other),
        "cuMemPoolTrimTo": lambda _: driver.code("cuMemPoolTrimTo", pool, 0),
        "cuGraphUpload": lambda _: driver.code("cuGraphUpload", run, other),
        "cuGraphLaunch": lambda _: driver.code("cuGraphLaunch", run, other),
        "cuDeviceGraphMemTrim": lambda _: driver.code("cuDeviceGraphMemTrim", 0),
        "cuEventDestroy_v2": lambda _: driver.code("cuEventDestroy_v2", spare),
    }
    return {name: beside(driver, kernel, NON_BLOCKING, MODES["global"], call) for name, call in calls.items()}


def capturing(driver: Driver) -> tuple[int, int]:
    """Return a stream in a capture with one kernel, and an event that is not recorded yet."""
    driver.start()
    kernel, stream, event = (
        driver.kernel("k_1us"),
        driver.out("cuStreamCreate", NON_BLOCKING),
        driver.out("cuEventCreate", 0),
    )
    driver.cuStreamBeginCapture_v2(stream, MODES["relaxed"])
    driver.launch(kernel, stream)
    return stream, event


def captured_event(driver: Driver) -> list[int]:
    """Codes of questions about an event recorded in a capture: during it, after it, and once the event is recorded again."""
    stream, event = capturing(driver)
    codes = [driver.code("cuEventRecord", event, stream), driver.code("cuEventQuery", event)]
    codes.append(driver.code("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_uint64())))
    codes.append(driver.code("cuEventQuery", event))
    codes.append(driver.code("cuEventRecord", event, stream))
    driver.cuCtxSynchronize()
    return [*codes, driver.code("cuEventQuery", event)]


def kept_event(driver: Driver) -> list[int]:
    """Codes of the end of a capture that has recorded an event, and of a question about that event."""
    stream, event = capturing(driver)
    driver.cuEventRecord(event, stream)
    end = driver.code("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_uint64()))
    return [end, driver.code("cuEventQuery", event)]


def waits(driver: Driver) -> dict[str, bool]:
    """Return whether work waits for 50 ms of work in another stream: then it ends later."""
    context = driver.start()
    slow, quick = driver.kernel("k_50ms"), driver.kernel("k_1us")
    streams = {
        "legacy": LEGACY,
        "per-thread": PER_THREAD,
        "blocking": driver.out("cuStreamCreate", 0),
        "another blocking": driver.out("cuStreamCreate", 0),
        "non-blocking": driver.out("cuStreamCreate", NON_BLOCKING),
    }
    for kernel in (slow, quick):
        driver.launch(kernel)
    driver.cuCtxSynchronize()
    found = {}
    for first, one in streams.items():
        for second, other in streams.items():
            if first != second:
                driver.launch(slow, one)
                behind = driver.record(one)
                driver.launch(quick, other)
                event = driver.record(other)
                driver.cuCtxSynchronize()
                found[f"{second} for {first}"] = driver.elapsed_ms(behind, event) >= 0
    driver.launch(slow, streams["blocking"])
    behind, mark = driver.record(streams["blocking"]), driver.record(LEGACY)
    driver.launch(quick, streams["another blocking"])
    event = driver.record(streams["another blocking"])
    driver.cuCtxSynchronize()
    found["an event in the legacy stream for blocking"] = driver.elapsed_ms(behind, mark) >= 0
    found["another blocking behind an event in the legacy stream"] = driver.elapsed_ms(behind, event) >= 0
    driver.launch(slow, PER_THREAD)
    found["the per-thread stream of another thread is idle"] = (
        in_thread(driver, context, lambda: driver.code("cuStreamQuery", PER_THREAD)) == 0
    )
    driver.cuCtxSynchronize()
    return found


def ended(driver: Driver) -> dict[str, int]:
    """Codes of calls about events whose stream or context has ended, and between contexts."""
    driver.start()
    kernel, long, found = driver.kernel("k_1ms"), driver.kernel("k_50ms"), {}
    stream = driver.out("cuStreamCreate", NON_BLOCKING)
    driver.launch(kernel, stream)
    first = driver.record(stream)
    driver.launch(kernel, stream)
    second = driver.record(stream)
    driver.launch(long, stream)
    last = driver.record(stream)
    found["cuStreamDestroy_v2 of a busy stream"] = driver.code("cuStreamDestroy_v2", stream)
    found["cuEventQuery after its stream, at once"] = driver.code("cuEventQuery", last)
    driver.cuCtxSynchronize()
    value = ctypes.c_float()
    found["cuEventQuery after its stream"] = driver.code("cuEventQuery", last)
    found["cuEventElapsedTime after their stream"] = driver.code(
        "cuEventElapsedTime", ctypes.byref(value), first, second
    )
    found["cuEventElapsedTime after their stream, us"] = round(value.value * 1000) // 100 * 100
    own = driver.out("cuCtxCreate_v2", 0, 0)
    theirs = driver.record(0)
    driver.cuCtxSynchronize()
    found["cuEventElapsedTime between contexts"] = driver.code("cuEventElapsedTime", ctypes.byref(value), first, theirs)
    found["cuEventQuery in another context"] = driver.code("cuEventQuery", first)
    found["cuEventRecord in a stream of another context"] = driver.code("cuEventRecord", first, 0)
    found["cuCtxDestroy_v2"] = driver.code("cuCtxDestroy_v2", own)
    current = ctypes.c_uint64()
    found["cuCtxGetCurrent after it"] = driver.code("cuCtxGetCurrent", ctypes.byref(current))
    found["a context is current after it"] = int(current.value != 0)
    return found


def values(driver: Driver) -> dict[str, int]:
    """Codes of waits for a word in memory that is not pinned, and in memory that is."""
    driver.start()
    stream, found = driver.out("cuStreamCreate", NON_BLOCKING), {}
    word = ctypes.c_uint32(1)
    found["not pinned"] = driver.code("cuStreamWaitValue32_v2", stream, ctypes.addressof(word), 1, EQ)
    own = driver.out("cuMemHostAlloc", 4096, 2)
    ctypes.c_uint32.from_address(own).value = 1
    found["pinned"] = driver.code("cuStreamWaitValue32_v2", stream, own, 1, EQ)
    found["synchronize"] = driver.code("cuStreamSynchronize", stream)
    return found


def mapped(driver: Driver) -> dict[str, int]:
    """Codes of copies to mapped memory, before and after access to it is set."""
    driver.start()
    at, size = driver.out("cuMemAddressReserve", 2 * MIB, 0, 0, 0), 2 * MIB
    driver.cuMemMap(at, size, 0, driver.out("cuMemCreate", size, ctypes.byref(pinned()), 0), 0)
    found = {"before": driver.code("cuMemcpyHtoD_v2", at, b"word", 4)}
    driver.cuMemSetAccess(at, size, ctypes.byref(READ_AND_WRITE), 1)
    found["after"] = driver.code("cuMemcpyHtoD_v2", at, b"word", 4)
    return found


def green(driver: Driver) -> dict[str, Any]:
    """Handles of green contexts and of their streams' contexts."""
    primary = driver.start()
    whole, part, rest = ((ctypes.c_ubyte * 144)() for _ in range(3))
    count = ctypes.c_uint(1)
    driver.cuDeviceGetDevResource(0, whole, 1)
    driver.cuDevSmResourceSplitByCount(part, ctypes.byref(count), whole, rest, 0, 16)
    made = driver.out("cuGreenCtxCreate", driver.out("cuDevResourceGenerateDesc", part, 1), 0, 1)
    first, second = (driver.out("cuCtxFromGreenCtx", made) for _ in range(2))
    stream = driver.out("cuGreenCtxStreamCreate", made, NON_BLOCKING, 0)
    of_stream, green_of_stream, current, device = (ctypes.c_uint64() for _ in range(4))
    kernel = driver.kernel("k_1us")
    found: dict[str, Any] = {"multiprocessors": int.from_bytes(part[96:100], "little")}
    found["one handle"] = first == second
    found["differs from the primary context"] = first != primary
    found["cuStreamGetCtx"] = driver.code("cuStreamGetCtx", stream, ctypes.byref(of_stream))
    found["cuStreamGetCtx gives the primary context"] = of_stream.value == primary
    found["cuStreamGetCtx gives the green context's"] = of_stream.value == first
    found["cuStreamGetGreenCtx"] = driver.code("cuStreamGetGreenCtx", stream, ctypes.byref(green_of_stream))
    found["cuStreamGetGreenCtx gives it"] = green_of_stream.value == made
    found["launch with the primary context current"] = driver.code(
        "cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None
    )
    event = driver.out("cuEventCreate", 0)
    found["record there with the primary context current"] = driver.code("cuEventRecord", event, stream)
    driver.cuCtxSetCurrent(first)
    driver.cuCtxGetCurrent(ctypes.byref(current))
    found["cuCtxGetCurrent gives it back"] = current.value == first
    found["cuCtxGetDevice"] = driver.code("cuCtxGetDevice", ctypes.byref(device))
    found["record there with it current"] = driver.code("cuEventRecord", event, stream)
    found["launch with it current"] = driver.code("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
    own = driver.out("cuEventCreate", 0)
    found["an event of it in its stream"] = driver.code("cuEventRecord", own, stream)
    found["an event of it in the legacy stream"] = driver.code("cuEventRecord", own, LEGACY)
    driver.cuStreamSynchronize(stream)
    ms = ctypes.c_float()
    found["elapsed between events of both"] = driver.code("cuEventElapsedTime", ctypes.byref(ms), event, own)
    return found


def allocating(driver: Driver, stream: int) -> int:
    """A graph that allocates 64 MiB and frees them."""
    kernel, graph = driver.kernel("k_1us"), ctypes.c_uint64()
    driver.cuStreamBeginCapture_v2(stream, MODES["relaxed"])
    pointer = driver.out("cuMemAllocAsync", 64 * MIB, stream)
    driver.launch(kernel, stream)
    driver.cuMemFreeAsync(pointer, stream)
    driver.cuStreamEndCapture(stream, ctypes.byref(graph))
    return graph.value


def launchable(driver: Driver, graph: int) -> int:
    return driver.out("cuGraphInstantiateWithFlags", graph, 0)


def graph_mib(driver: Driver, attribute: int) -> int:
    value = ctypes.c_uint64()
    driver.cuDeviceGetGraphMemAttribute(0, attribute, ctypes.byref(value))
    return value.value // MIB


def graph_memory_at_once(driver: Driver) -> dict[str, int]:
    """MiB that the driver has reserved for a graph when the call returns, behind 50 ms of work in its stream."""
    driver.start()
    slow, found = driver.kernel("k_50ms"), {}
    for name in ("cuGraphUpload", "cuGraphLaunch"):
        stream = driver.out("cuStreamCreate", NON_BLOCKING)
        run = launchable(driver, allocating(driver, stream))
        driver.launch(slow, stream)
        driver.call(name, run, stream)
        found[f"after {name}"] = graph_mib(driver, GRAPH_RESERVED)
        driver.cuCtxSynchronize()
        driver.cuGraphExecDestroy(run)
        driver.cuDeviceGraphMemTrim(0)
        found[f"trimmed after {name}"] = graph_mib(driver, GRAPH_RESERVED)
    return found


def graph_memory(driver: Driver) -> dict[str, int]:
    """MiB that the driver has reserved for graphs, after each call about one that allocates 64 MiB."""
    driver.start()
    stream, found = driver.out("cuStreamCreate", NON_BLOCKING), {}

    def tell(when: str) -> None:
        driver.cuCtxSynchronize()
        found[f"reserved after {when}"] = graph_mib(driver, GRAPH_RESERVED)
        found[f"used after {when}"] = graph_mib(driver, GRAPH_USED)

    class Params(ctypes.Structure):
        _fields_ = (
            ("flags", ctypes.c_uint64),
            ("stream", ctypes.c_uint64),
            ("node", ctypes.c_uint64),
            ("result", ctypes.c_int),
        )

    graph = allocating(driver, stream)
    tell("capture")
    run = launchable(driver, graph)
    tell("instantiation")
    driver.cuGraphUpload(run, stream)
    tell("upload")
    driver.cuGraphLaunch(run, stream)
    tell("launch")
    driver.cuDeviceGraphMemTrim(0)
    tell("trim")
    driver.cuGraphLaunch(run, stream)
    tell("launch after trim")
    driver.cuGraphExecDestroy(run)
    tell("destruction")
    driver.cuDeviceGraphMemTrim(0)
    tell("trim after destruction")
    params = Params(flags=UPLOAD, stream=stream)
    run = driver.out("cuGraphInstantiateWithParams", graph, ctypes.byref(params))
    tell("instantiation with upload")
    driver.cuGraphExecDestroy(run)
    return found


def pools(driver: Driver) -> dict[str, list[int]]:
    """KiB that a pool has reserved and uses after each allocation, after its release, and after a wait."""
    driver.start()
    stream = driver.out("cuStreamCreate", NON_BLOCKING)
    pool, found = driver.out("cuDeviceGetDefaultMemPool", 0), {}

    def state() -> list[int]:
        values = [ctypes.c_uint64(), ctypes.c_uint64()]
        for value, attribute in zip(values, (RESERVED, USED), strict=True):
            driver.cuMemPoolGetAttribute(pool, attribute, ctypes.byref(value))
        return [value.value // 1024 for value in values]

    for kib in (1, 512, 1024, 3 << 10, 20 << 10, 32 << 10, 33 << 10, 100 << 10):
        pointer = driver.out("cuMemAllocAsync", kib << 10, stream)
        states = state()
        driver.cuMemFreeAsync(pointer, stream)
        states += state()
        driver.cuStreamSynchronize(stream)
        found[f"{kib} KiB"] = states + state()
    several = [driver.out("cuMemAllocAsync", 20 * MIB, stream) for _ in range(4)]
    found["4 x 20 MiB"] = state()
    for pointer in several:
        driver.cuMemFreeAsync(pointer, stream)
    props = PoolProps(alloc_type=1)
    props.location.type = 1
    own = driver.out("cuMemPoolCreate", ctypes.byref(props))
    pointer, pool = driver.out("cuMemAllocFromPoolAsync", MIB, own, stream), own
    found["1 MiB of an own pool"] = state()
    driver.cuMemFreeAsync(pointer, stream)
    driver.cuStreamSynchronize(stream)
    found["its release"] = state()
    found["cuMemPoolTrimTo"] = [driver.code("cuMemPoolTrimTo", own, 0), *state()]
    return found


def granularity(driver: Driver) -> dict[str, int]:
    """KiB by which free memory shrinks with each kind of allocation."""
    driver.start()
    found = {}

    def cost(name: str, act: Callable[[], Any]) -> None:
        before = driver.free_memory()[0]
        act()
        found[name] = (before - driver.free_memory()[0]) // 1024

    for bytes_ in (1, 512, MIB, 2 * MIB, 3 * MIB, 5 * MIB, 33 * MIB):
        cost(f"cuMemAlloc_v2 of {bytes_}", lambda bytes_=bytes_: driver.out("cuMemAlloc_v2", bytes_))
        cost(f"a second one of {bytes_}", lambda bytes_=bytes_: driver.out("cuMemAlloc_v2", bytes_))
    prop = pinned()
    least = ctypes.c_size_t()
    driver.cuMemGetAllocationGranularity(ctypes.byref(least), ctypes.byref(prop), 0)
    found["granularity of cuMemCreate"] = least.value // 1024
    cost("cuMemCreate of that", lambda: driver.out("cuMemCreate", least.value, ctypes.byref(prop), 0))
    cost("cuMemHostAlloc of 64 MiB", lambda: driver.out("cuMemHostAlloc", 64 * MIB, 0))
    cost("cuStreamCreate", lambda: driver.out("cuStreamCreate", NON_BLOCKING))
    cost("100 streams", lambda: [driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(100)])
    cost("1,000 events", lambda: [driver.out("cuEventCreate", 0) for _ in range(1000)])
    cost("a module", lambda: driver.kernel("k_1us"))
    cost("a second context", lambda: driver.out("cuCtxCreate_v2", 0, 0))
    return found


def identities(driver: Driver) -> dict[str, Any]:
    """Return what cuGetProcAddress says of names and versions that are not usual."""
    driver.cuInit(0)
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    exported = driver.export("cuMemAlloc_v2")
    return {
        "version": version.value,
        "cuMemAlloc at 3020 is the export": driver.address("cuMemAlloc", 3020)[1] == exported,
        "cuMemAlloc at 2000": driver.address("cuMemAlloc", 2000)[0],
        "nothing": attempt(lambda: driver.address("cuNothing", 13000)[0]),
        "a later version": attempt(lambda: driver.address("cuMemAlloc", version.value + 1000)[0]),
    }


def attempt(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except CudaError as error:
        return f"error {error.code}"


FACTS: dict[str, Callable[[Driver], Any]] = {
    function.__name__: function
    for function in (
        captures,
        accounts,
        captured_event,
        kept_event,
        waits,
        ended,
        values,
        mapped,
        green,
        graph_memory,
        graph_memory_at_once,
        pools,
        granularity,
        identities,
    )
}


def asked(name: str) -> Any:
    """Return the answer of a process of its own, or why there is none."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            answer = FACTS[name](TimedDriver("libcuda.so.1"))
        except Exception as error:  # the answer is then the error
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else f"ended with {status}"


if __name__ == "__main__":
    print(json.dumps({name: asked(name) for name in sys.argv[1:] or FACTS}))

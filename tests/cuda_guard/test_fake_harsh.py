"""Traits of the fake driver's profile `harsh`, each by itself and beside a device without it."""

import ctypes
import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.fake.child import Child, run
from tests.fake.client import NON_BLOCKING, Driver
from tests.fake.profiles import HARSH, PROFILES, Traits
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

INVALID_VALUE, NOT_READY = 1, 600
MakeWorld = Callable[..., World]
GEQ, EQ, AND, NOR = range(4)  # CUstreamWaitValue_flags


def only(*names: str) -> dict[str, int]:
    """Return these traits as `harsh` has them."""
    return {name: getattr(HARSH, name) for name in names}


def spans(driver: Driver, act: Callable[[], object], count: int) -> list[float]:
    """Return the ms between events around each of several acts in the default stream."""
    pairs = []
    for _ in range(count):
        start = driver.record()
        act()
        pairs.append((start, driver.record()))
    driver.cuCtxSynchronize()
    return [driver.elapsed_ms(*pair) for pair in pairs]


def test_harsh_has_every_trait() -> None:
    plain = Traits()
    same = [
        field.name for field in dataclasses.fields(Traits) if getattr(HARSH, field.name) == getattr(plain, field.name)
    ]
    assert same == ["seed"] and set(PROFILES) == {"plain", "harsh"}


def test_profile_is_chosen_by_name_and_by_environment(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_world().traits == Traits() and make_world(profile="harsh", seed=2).traits.seed == 2
    monkeypatch.setenv("FAKE_GPU_PROFILE", "harsh")
    assert make_world().traits == HARSH and make_world(profile="plain").traits == Traits()


# --- durations


def launches(driver: Driver) -> list[float]:
    driver.start()
    kernel = driver.kernel("k_100us")
    return spans(driver, lambda: driver.launch(kernel), 400)


def test_kernel_times_are_log_normal_with_a_second_mode(make_world: MakeWorld) -> None:
    assert run(make_world(virtual=True), launches) == pytest.approx([0.1] * 400, abs=0.001)
    spread = run(make_world(virtual=True, **only("spread_ppm")), launches)
    assert statistics.mean(spread) == pytest.approx(0.1, rel=0.1) and statistics.stdev(spread) > 0.02
    slow = [ms for ms in run(make_world(virtual=True, **only("slow_one_in", "slow_times")), launches) if ms > 0.3]
    assert 1 <= len(slow) <= 24 and slow == pytest.approx([0.4] * len(slow), abs=0.001)


def test_seed_decides_the_chances(make_world: MakeWorld) -> None:
    one, again, other = (run(make_world(virtual=True, seed=seed, **only("spread_ppm")), launches) for seed in (1, 1, 2))
    assert one == again != other


def shaped(driver: Driver) -> list[float]:
    driver.start()
    per_thread, per_argument = driver.kernel("k_10us_per_thread"), driver.kernel("k_10us_per_arg")
    number = ctypes.c_uint32(30)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(number))

    def launch(kernel: int, threads: int, params: Any) -> Callable[[], object]:
        return lambda: driver.cuLaunchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, 0, params, None)

    return [spans(driver, launch(*which), 1)[0] for which in ((per_thread, 20, None), (per_argument, 1, params))]


def test_kernel_times_depend_on_blocks_and_arguments(make_world: MakeWorld) -> None:
    assert run(make_world(virtual=True), shaped) == [pytest.approx(0.2, abs=0.001), pytest.approx(0.3, abs=0.001)]


def first_launches(driver: Driver) -> list[list[float]]:
    driver.start()
    kernels = [driver.kernel(f"k_{us}us") for us in range(10, 40)]
    return [spans(driver, partial(driver.launch, kernel), 2) for kernel in kernels]


def test_first_launch_loads_the_kernel(make_world: MakeWorld) -> None:
    plain = run(make_world(virtual=True), first_launches)
    assert max(first for first, _ in plain) < 0.1
    harsh = run(make_world(virtual=True, **only("load_least_ns", "load_most_ns")), first_launches)
    loads = [first - second for first, second in harsh]
    assert min(loads) >= 0.3 and max(loads) <= 200 and max(loads) > 10 * min(loads)
    assert max(second for _, second in harsh) < 0.1


# --- events


def record_after_a_wait(driver: Driver) -> tuple[int, int]:
    driver.start()
    driver.launch(driver.kernel("k_100us"))
    before = driver.record()
    driver.cuStreamSynchronize(0)
    after = driver.record()
    return driver.code("cuEventQuery", before), driver.code("cuEventQuery", after)


def test_event_is_not_ready_at_once(make_world: MakeWorld) -> None:
    assert run(make_world(virtual=True), record_after_a_wait) == (0, 0)
    assert run(make_world(virtual=True, **only("record_ns")), record_after_a_wait) == (0, NOT_READY)


def asked(driver: Driver, count: int) -> None:
    driver.start()
    event = driver.record()
    for _ in range(count):
        driver.code("cuEventQuery", event)
        driver.code("cuStreamQuery", 0)


def test_queries_take_the_host_time(make_world: MakeWorld) -> None:
    for traits, least, most in (({}, 0, 0), (only("call_ns"), 200_000, 202_000)):
        world = make_world(virtual=True, **traits)
        before = world.now_ns()
        run(world, asked, 100)
        assert least <= world.now_ns() - before <= most


# --- streams that wait for the host


def waiting(driver: Driver, width: int, flags: int, wanted: int, values: tuple[int, ...]) -> list[int]:
    """Return whether the kernel behind the wait was done after each value."""
    driver.start()
    address = driver.out("cuMemHostAlloc", 8, 0)
    memory = (ctypes.c_uint64 * 1).from_address(address)
    memory[0] = values[0]
    waits, runs = driver.out("cuStreamCreate", NON_BLOCKING), driver.out("cuStreamCreate", NON_BLOCKING)
    driver.call(f"cuStreamWaitValue{width}_v2", waits, address, wanted, flags)
    driver.launch(driver.kernel("k_10us"), waits)
    done = []
    for value in values:
        memory[0] = value
        for _ in range(20):  # the device looks now and then
            driver.launch(driver.kernel("k_1ms"), runs)
            driver.cuStreamSynchronize(runs)
        done.append(driver.code("cuStreamQuery", waits))
    return done


@pytest.mark.parametrize(
    ("width", "flags", "wanted", "values"),
    [
        (32, GEQ, 5, (4, 6)),
        (32, GEQ, 0, (0xFFFFFFFF, 1)),
        (64, GEQ, 1 << 40, (1 << 39, 1 << 40)),
        (32, EQ, 7, (8, 7)),
        (64, AND, 1 << 40, (1, 1 << 40)),
        (32, NOR, 0xFFFFFFFE, (1, 0)),
    ],
)
def test_stream_waits_for_a_value(world: World, width: int, flags: int, wanted: int, values: tuple[int, ...]) -> None:
    assert run(world, waiting, width, flags, wanted, values) == [NOT_READY, 0]


def written(driver: Driver) -> tuple[int, int, int]:
    driver.start()
    memory = driver.out("cuMemAlloc_v2", 4 * MIB)
    word, early = ctypes.c_uint32(0), ctypes.c_uint32(0)
    driver.cuMemsetD32_v2(memory, 0, 1)
    stream, other = (driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    driver.launch(driver.kernel("k_100ms"), stream)
    driver.cuStreamWriteValue32_v2(stream, memory, 9, 0)
    driver.cuStreamWaitValue32_v2(other, memory, 9, EQ)
    driver.cuMemcpyDtoH_v2(ctypes.byref(early), memory, 4)
    driver.cuStreamSynchronize(other)
    driver.cuMemcpyDtoH_v2(ctypes.byref(word), memory, 4)
    return early.value, word.value, driver.code("cuStreamWaitValue32_v2", stream, 0, 9, EQ)


def test_stream_writes_a_value_for_another(world: World) -> None:
    assert run(world, written) == (0, 9, INVALID_VALUE)


# --- copies and fills


def moved(driver: Driver) -> dict[str, float]:
    """Return the ms of a copy each way, of one within the device, of a fill, and of two copies one way at once."""
    driver.start()
    size = 100 * MIB
    to, also = (driver.out("cuMemAlloc_v2", size) for _ in range(2))
    host = ctypes.create_string_buffer(size)
    streams = [driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(2)]
    kinds = {
        "in": lambda: driver.cuMemcpyHtoD_v2(to, host, size),
        "out": lambda: driver.cuMemcpyDtoH_v2(host, to, size),
        "within": lambda: driver.cuMemcpyDtoD_v2(also, to, size),
        "fill": lambda: driver.cuMemsetD8_v2(to, 0, size),
    }
    found = {name: spans(driver, act, 1)[0] for name, act in kinds.items()}
    start = driver.record()
    for stream in streams:
        driver.cuMemcpyHtoDAsync_v2(to, host, size, stream)
    for stream in streams:
        driver.cuStreamSynchronize(stream)
    end = driver.record()
    driver.cuEventSynchronize(end)
    return {**found, "two": driver.elapsed_ms(start, end)}


def test_copies_take_time_by_their_bytes_and_share_the_link(make_world: MakeWorld) -> None:
    assert set(run(make_world(virtual=True), moved).values()) == {0.0}
    world = make_world(virtual=True, **only("copy_ns", "link_bps", "memory_bps"))
    found = run(world, moved)
    link, memory = (100 * MIB / bps * 1e3 + 0.002 for bps in (HARSH.link_bps, HARSH.memory_bps))
    assert found == pytest.approx(
        {"in": link, "out": link, "within": memory, "fill": memory, "two": 2 * link}, abs=0.005
    )
    assert world.busy_ns() == pytest.approx(2 * memory * 1e6, rel=0.01), (
        "copies from and to the host need no kernel's time"
    )
    assert world.copied_ns() == pytest.approx(4 * link * 1e6, rel=0.01)


# --- parts of a device


def beside(driver: Driver) -> tuple[float, float]:
    """Return the ms of one kernel alone, and of four of them in streams of their own."""
    driver.start()
    kernel, streams = driver.kernel("k_1ms"), [driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(4)]

    def launch(some: list[int]) -> float:
        start = driver.record()
        for stream in some:
            driver.launch(kernel, stream)
        driver.cuCtxSynchronize()
        end = driver.record()
        driver.cuEventSynchronize(end)
        return driver.elapsed_ms(start, end)

    return launch(streams[:1]), launch(streams)


def test_concurrent_kernels_share_the_device(make_world: MakeWorld) -> None:
    assert run(make_world(virtual=True), beside) == pytest.approx((1, 1), abs=0.001)
    alone, together = run(make_world(virtual=True, **only("width_least_ppm")), beside)
    assert alone == pytest.approx(1, abs=0.001) and 1.2 <= together <= 4.001


def partitioned(driver: Driver) -> tuple[float, float, int]:
    """Return the ms of a kernel on the whole device and in 16 multiprocessors, and how many those are."""
    driver.start()
    kernel = driver.kernel("k_1ms")
    whole, part, rest = ((ctypes.c_ubyte * 144)() for _ in range(3))
    count = ctypes.c_uint(1)
    driver.cuDeviceGetDevResource(0, whole, 1)
    driver.cuDevSmResourceSplitByCount(part, ctypes.byref(count), whole, rest, 0, 12)
    description = driver.out("cuDevResourceGenerateDesc", part, 1)
    green = driver.out("cuGreenCtxCreate", description, 0, 1)
    driver.cuCtxSetCurrent(driver.out("cuCtxFromGreenCtx", green))
    stream = driver.out("cuGreenCtxStreamCreate", green, NON_BLOCKING, 0)

    def took(stream: int) -> float:
        start = driver.record(stream)
        driver.launch(kernel, stream)
        end = driver.record(stream)
        driver.cuEventSynchronize(end)
        return driver.elapsed_ms(start, end)

    inside = took(stream)
    driver.cuGreenCtxDestroy(green)
    driver.cuCtxSetCurrent(driver.out("cuDevicePrimaryCtxRetain", 0))
    return took(0), inside, int.from_bytes(part[96:100], "little")


def test_green_context_has_a_part_of_the_device(make_world: MakeWorld) -> None:
    assert run(make_world(virtual=True), partitioned) == pytest.approx((1, 1, 16), abs=0.001)
    whole, part, _ = run(make_world(virtual=True, **only("width_least_ppm")), partitioned)
    assert whole == pytest.approx(1, abs=0.001) and part >= 0.3 * 132 / 16


# --- clocks and what NVML tells


def long_kernels(driver: Driver) -> list[float]:
    driver.start()
    kernel = driver.kernel("k_20ms")
    return spans(driver, lambda: driver.launch(kernel), 100)


def test_clock_changes(make_world: MakeWorld) -> None:
    assert run(make_world(virtual=True), long_kernels) == pytest.approx([20] * 100, abs=0.001)
    took = run(make_world(virtual=True, **only("clock_ns", "clock_least_ppm")), long_kernels)
    assert min(took) >= 20 and max(took) <= 20 / 0.69 + 0.001 and max(took) > min(took) + 2


class Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def seen_by_nvml(driver: Driver, path: str, locked: bool) -> tuple[list[int], set[int]]:
    """Work a tenth of the time for 1.2 s after 0.4 s of rest; return NVML's different utilisations in turn, and its clocks."""
    nvml, device, rates, clock = ctypes.CDLL(path), ctypes.c_void_p(), Rates(), ctypes.c_uint()
    assert nvml.nvmlInit_v2() == nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert not locked or nvml.nvmlDeviceSetGpuLockedClocks(device, 1980, 1980) == 0
    driver.start()
    kernel, event, seen, clocks = driver.kernel("k_100us"), driver.record(), [0], set()
    for ms in range(1600):
        if ms >= 400:
            driver.launch(kernel)
            driver.cuStreamSynchronize(0)
        driver.code("cuEventQuery", event)  # takes 0.9 ms
        assert nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) == 0
        assert nvml.nvmlDeviceGetClockInfo(device, 1, ctypes.byref(clock)) == 0
        clocks.add(clock.value)
        if rates.gpu != seen[-1]:
            seen.append(rates.gpu)
    return seen, clocks


def test_nvml_tells_slots_in_which_anything_ran_and_late(make_world: MakeWorld) -> None:
    path = str(make_world().fakes.nvml)
    plain, _ = run(make_world(virtual=True, call_ns=900_000), seen_by_nvml, path, False)
    assert max(plain) <= 11
    harsh, _ = run(make_world(virtual=True, call_ns=900_000, **only("slot_ns")), seen_by_nvml, path, False)
    assert max(harsh) >= 99


def test_nvml_reads_and_locks_clocks(make_world: MakeWorld) -> None:
    path, traits = str(make_world().fakes.nvml), only("clock_ns", "clock_least_ppm")
    _, free = run(make_world(virtual=True, call_ns=900_000, **traits), seen_by_nvml, path, False)
    assert len(free) > 5 and min(free) >= 0.69 * 1979 and max(free) <= 1980
    _, locked = run(make_world(virtual=True, call_ns=900_000, **traits), seen_by_nvml, path, True)
    assert locked == {1980}


# --- addresses


def looked_up(driver: Driver) -> tuple[set[str], int]:
    """Return which calls have an address of their own beside their export's, and how often one of them counts as called."""
    driver.start()
    names = ("cuLaunchKernel", "cuMemAlloc", "cuMemsetD8Async", "cuGraphLaunch", "cuEventRecord")
    exports = {name: driver.export(name + ("_v2" if name == "cuMemAlloc" else "")) for name in names}
    found = {name: driver.address(name, 12000)[1] for name in names}
    address = found["cuLaunchKernel"]
    assert address
    launch = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    return {name for name in names if found[name] != exports[name]}, launch(
        *(ctypes.c_uint64(word) for word in (driver.kernel("k_1us"), 1, 1, 1, 1, 1, 1, 0, 0)), None, None
    )


def test_driver_may_give_other_addresses(make_world: MakeWorld) -> None:
    assert run(make_world(), looked_up) == (set(), 0)
    world = make_world(**only("aliases"))
    assert run(world, looked_up) == ({"cuLaunchKernel", "cuMemAlloc", "cuMemsetD8Async", "cuGraphLaunch"}, 0)
    assert world.calls("cuLaunchKernel") == 1


# --- collectives


def collective(driver: Driver) -> tuple[list[int], float]:
    """Launch one rank on the first GPU and, 5 ms later, the other on the second."""
    driver.start(1)
    second = driver.out("cuStreamCreate", NON_BLOCKING)
    theirs, slow = driver.kernel("k_1ms_of2"), driver.kernel("k_5ms")
    driver.start(0)
    first = driver.out("cuStreamCreate", NON_BLOCKING)
    group = ctypes.c_uint32(7)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(group))

    def launch(device: int, stream: int) -> None:
        driver.start(device)
        driver.cuLaunchKernel(theirs, 1, 1, 1, 1, 1, 1, 0, stream, params, None)

    begun = driver.record(first)
    launch(0, first)
    codes = [driver.code("cuStreamQuery", first)]
    driver.start(1)
    driver.launch(slow, second)
    driver.cuStreamSynchronize(second)
    codes.append(driver.code("cuStreamQuery", first))
    launch(1, second)
    driver.cuStreamSynchronize(second)
    driver.cuStreamSynchronize(first)
    driver.start(0)
    ended = driver.record(first)
    driver.cuEventSynchronize(ended)
    return codes, driver.elapsed_ms(begun, ended)


def test_collective_spins_until_all_its_ranks_run(make_world: MakeWorld) -> None:
    world = make_world(virtual=True, devices=2)
    codes, ms = run(world, collective)
    assert codes == [NOT_READY, NOT_READY] and ms == pytest.approx(6, abs=0.01)
    assert world.busy_ns(0) == pytest.approx(6e6, abs=1e4), "a rank that spins has its device"
    assert world.busy_ns(1) == pytest.approx(6e6, abs=1e4)


def rank(driver: Driver, device: int, rounds: int) -> int:
    driver.start(device)
    kernel, stream = driver.kernel("k_1ms_of3"), driver.out("cuStreamCreate", NON_BLOCKING)
    for _ in range(rounds):
        driver.launch(kernel, stream)
    driver.cuStreamSynchronize(stream)
    return rounds


def test_ranks_may_be_processes(make_world: MakeWorld) -> None:
    world = make_world(devices=3)
    with Child(world, rank, 0, 5) as first, Child(world, rank, 1, 5) as second:
        assert first.silent(0.2) and second.silent(0), "the third is missing"
        with Child(world, rank, 2, 5) as third:
            assert [child.result() for child in (first, second, third)] == [5, 5, 5]

"""What the profile `harsh` of the fake driver adds, each by itself and beside a device without it."""

import ctypes
import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.fake.child import run
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
    memory = (ctypes.c_uint64 * 1)(0)
    address = ctypes.addressof(memory)
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

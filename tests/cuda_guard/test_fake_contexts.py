"""Contexts of the fake driver, as in the real one."""

import ctypes
import os
import threading
from collections.abc import Callable

import pytest

from tests.fake.child import run
from tests.fake.client import Driver
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

NOT_INITIALIZED = 3
MakeWorld = Callable[..., World]


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


def test_context_does_not_survive_a_fork(world: World) -> None:
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


def crowd(driver: Driver) -> list[int]:
    """Return the MiB taken after 100 streams, after a context, after 33 streams in it, and once it has ended."""
    driver.start()
    taken, free = [], driver.free_memory()[0]

    def count() -> None:
        taken.append((free - driver.free_memory()[0]) // MIB)

    for _ in range(100):
        driver.out("cuStreamCreate", 0)
    count()
    own = driver.out("cuCtxCreate_v2", 0, 0)
    count()
    for _ in range(33):
        driver.out("cuStreamCreate", 0)
    count()
    driver.cuCtxDestroy_v2(own)
    count()
    return taken


def test_contexts_and_many_streams_take_memory(world: World) -> None:
    assert run(world, crowd) == [54, 354, 372, 54]


def test_each_thread_has_a_stack_of_contexts(make_world: MakeWorld) -> None:
    run(make_world(devices=2), contexts)

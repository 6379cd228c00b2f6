"""The counter of a job's memory: never above the limit in races, and exact again after a kill at any point."""

import ctypes
import fcntl
import multiprocessing
import os
import random
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_guard.build import COMPILE, HOST, NATIVE, Libraries, compile_one, find_compiler
from cuda_guard.host import load
from cuda_guard.page import DEVICES, SLOTS, UNIT, Pages

pytestmark = pytest.mark.cc

LIMIT = 1000
LOCKS = 1 << 20  # offset of the lock of slot 0 in the page's file; the byte before it is the sweeper's
CRASH_POINTS = range(1, 10)
fork = multiprocessing.get_context("fork")


def address(page: ctypes.Structure) -> int:
    return ctypes.addressof(page)


def held(pages: Pages, place: int = 0) -> int:
    return sum(slot.used[place] for slot in pages.job.table)


@pytest.fixture(scope="session")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the daemon's library compiled with crash points."""
    path = tmp_path_factory.mktemp("crash") / "libhost.so"
    compile_one(HOST, path, find_compiler(), ("-DGUARD_CRASH_POINTS", str(Path(__file__).parent / "crash.c")))
    return path


def race(directory: Path, library: Path, seed: int, rounds: int, start: Barrier) -> None:
    """Reserve and release at random, ending with nothing held. Exit with 1 if the counter ever exceeds the limit."""
    pages, native, rng = Pages(directory), load(library), random.Random(seed)
    job = address(pages.job)
    slot = native.ledger_claim(job, pages.job_file, os.getpid())
    start.wait()
    mine, over = 0, False
    for _ in range(rounds):
        units = rng.randrange(1, LIMIT // 2)
        if native.ledger_change(job, slot, 0, units, LIMIT):
            mine += units
        over = over or native.ledger_used(job, 0) > LIMIT
        if mine and rng.random() < 0.7:
            native.ledger_change(job, slot, 0, -mine, LIMIT)
            mine = 0
    native.ledger_change(job, slot, 0, -mine, LIMIT)
    os._exit(over)


def test_eight_racing_processes_never_exceed_the_limit(built: Libraries, make_pages: Callable[..., Pages]) -> None:
    pages = make_pages()
    start = fork.Barrier(8)
    racers = [fork.Process(target=race, args=(pages.directory, built.host, n, 20_000, start)) for n in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0] * 8
    assert pages.memory_used(0) == 0 == held(pages)
    assert LIMIT // 2 < pages.job.uses[0].peak <= LIMIT


def die_at(directory: Path, library: Path, point: int, after: int, changes: list[int]) -> int:
    """Run a process that makes these changes and dies the `after`th time it reaches a crash point; return its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            native, pages = load(library), Pages(directory)
            job = address(pages.job)
            slot = native.ledger_claim(job, pages.job_file, os.getpid())
            ctypes.c_int.in_dll(native, "guard_crash_after").value = after
            ctypes.c_int.in_dll(native, "guard_crash_at").value = point
            for units in changes:
                native.ledger_change(job, slot, 0, units, LIMIT)
            native.ledger_sweep(job, pages.job_file, slot)
            os._exit(0)
        finally:  # it must never return to pytest: each child would run, and fork, all tests that follow
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_memory_of_a_killed_process_is_released_exactly(
    built: Libraries, crashing: Path, make_pages: Callable[..., Pages], point: int, after: int
) -> None:
    """A process dies at each point while another changes the counter, and the sweepers die as well."""
    pages = make_pages()
    native, job = load(built.host), address(pages.job)
    mine = native.ledger_claim(job, pages.job_file, os.getpid())
    assert native.ledger_change(job, mine, 0, 100, LIMIT)
    code = die_at(pages.directory, crashing, point, after, [50, 60, -110, 70, 2 * LIMIT])
    assert code == (-signal.SIGKILL if point <= 7 else 0)
    assert native.ledger_change(job, mine, 0, 1, LIMIT), "the last change of a dead process can be overwritten"
    for sweeper in (8, 3, 5, 6, 9):
        die_at(pages.directory, crashing, sweeper, 0, [])
    assert native.ledger_sweep(job, pages.job_file, mine) >= 0
    assert pages.memory_used(0) == 101 * UNIT and held(pages) == 101
    assert [n for n in range(SLOTS) if pages.job.table[n].pid] == [mine]


def test_living_process_is_never_swept(built: Libraries, make_pages: Callable[..., Pages]) -> None:
    pages = make_pages()
    native, job = load(built.host), address(pages.job)
    ready, done = fork.Event(), fork.Event()

    def live() -> None:
        own = Pages(pages.directory)
        slot = native.ledger_claim(address(own.job), own.job_file, os.getpid())
        native.ledger_change(address(own.job), slot, 0, 42, LIMIT)
        ready.set()
        done.wait()
        os._exit(0)

    child = fork.Process(target=live)
    child.start()
    ready.wait()
    slot = next(n for n in range(SLOTS) if pages.job.table[n].pid)
    assert native.ledger_owner(pages.job_file, slot) == child.pid
    assert native.ledger_sweep(job, pages.job_file, -1) == 0 and held(pages) == 42
    done.set()
    child.join()
    assert native.ledger_owner(pages.job_file, slot) == 0
    assert native.ledger_sweep(job, pages.job_file, -1) == 1 and held(pages) == 0 == pages.memory_used(0)


def test_processes_beyond_the_slots_are_refused_until_one_ends(
    built: Libraries, make_pages: Callable[..., Pages]
) -> None:
    pages = make_pages()
    native, job = load(built.host), address(pages.job)
    for n in range(1, SLOTS):
        pages.job.table[n].pid = 1  # no process holds their locks, so they are dead
    slot = native.ledger_claim(job, pages.job_file, os.getpid())
    assert slot > 0, "dead processes are swept when all slots are taken"
    assert sum(1 for n in range(SLOTS) if pages.job.table[n].pid) == 1


def test_counter_forged_by_the_job_never_falls_below_nothing(
    built: Libraries, make_pages: Callable[..., Pages]
) -> None:
    pages = make_pages()
    native, job = load(built.host), address(pages.job)
    slot = native.ledger_claim(job, pages.job_file, os.getpid())
    assert native.ledger_change(job, slot, 0, 10, LIMIT)
    pages.job.uses[0].memory = 3 << 26
    assert native.ledger_change(job, slot, 0, -10, LIMIT) and native.ledger_used(job, 0) == 0


def test_slot_of_a_dead_process_is_free_only_once_it_is_swept(
    built: Libraries, make_pages: Callable[..., Pages]
) -> None:
    """Its charges would pass to the new process."""
    pages = make_pages()
    native, job = load(built.host), address(pages.job)
    pages.job.table[5].pid = 1
    assert not native.ledger_claim_slot(job, pages.job_file, 5, os.getpid())
    assert native.ledger_sweep(job, pages.job_file, -1) == 1
    assert native.ledger_claim_slot(job, pages.job_file, 5, os.getpid())


def test_only_one_process_sweeps_at_a_time(built: Libraries, make_pages: Callable[..., Pages]) -> None:
    pages = make_pages()
    native, job = load(built.host), address(pages.job)
    pages.job.table[5].pid = 1
    ready, done = fork.Event(), fork.Event()

    def sweep_slowly() -> None:
        with Path(pages.directory / "job").open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, LOCKS - 1)
            ready.set()
            done.wait()

    other = fork.Process(target=sweep_slowly)
    other.start()
    ready.wait()
    swept = native.ledger_sweep(job, pages.job_file, -1)
    done.set()
    other.join()
    assert swept == -1 and pages.job.table[5].pid == 1
    assert native.ledger_sweep(job, pages.job_file, -1) == 1


def test_threads_of_a_process_release_a_dead_one_once(
    built: Libraries, make_pages: Callable[..., Pages], tmp_path: Path
) -> None:
    """A lock of a file is the process's, so it keeps no other thread of it out."""
    source, program = Path(__file__).parent / "sweepers.c", tmp_path / "sweepers"
    sources = [str(NATIVE / "ledger.c"), str(source)]
    options = (*COMPILE, "-DGUARD_CRASH_POINTS", f"-I{NATIVE}")
    subprocess.run([*find_compiler(), *options, *sources, "-o", str(program)], check=True)
    done = subprocess.run([program, make_pages().directory / "job"], check=False)
    assert done.returncode == 0, "the counter is wrong after a sweep by two threads"


changes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, DEVICES - 1), st.integers(-LIMIT, LIMIT)), max_size=60)


@settings(max_examples=60)
@given(changes)
def test_counter_matches_an_oracle(built: Libraries, made: list[tuple[int, int, int]]) -> None:
    """Several slots of one process on all devices: a change is refused exactly when the sum would exceed the limit."""
    native, page = load(built.host), ctypes.create_string_buffer(4096 + SLOTS * 320 + 64)
    job = (ctypes.addressof(page) + 63) // 64 * 64
    own = {(slot, device): 0 for slot in range(1, 6) for device in range(DEVICES)}
    for slot, device, wished in made:
        units = max(wished, -own[slot, device])
        total = sum(value for (_, other), value in own.items() if other == device)
        allowed = units <= 0 or total + units <= LIMIT
        assert native.ledger_change(job, slot, device, units, LIMIT) == allowed
        if allowed:
            own[slot, device] += units
        assert native.ledger_used(job, device) == sum(value for (_, other), value in own.items() if other == device)

"""A job that spoils what it shares with the guard harms itself at most: not the daemon, and not what others are counted."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cuda_guard import guard
from cuda_guard.build import COMPILE, NATIVE, find_compiler
from cuda_guard.page import SLOTS, JobPage
from mesh.provider.receipts import DeviceUse, Tally
from tests.cuda_guard.guests import CONTEXT, MIB, Bench
from tests.fake.client import Driver

pytestmark = pytest.mark.cc


def test_a_page_that_is_cut_off_harms_nobody_else(make_bench: Callable[..., Bench]) -> None:
    """Whoever touches a page whose file has been made shorter is killed, if nothing is done about it."""
    machine = make_bench()
    liar, honest = machine.job(), machine.job()
    file = liar.pages.directory / "job"
    assert not liar.pages.restore_length()
    os.truncate(file, 0)
    liar.sweep()
    assert liar.usage()[0].memory == 0 and liar.charges() == {} and liar.pages.restore_length()
    os.truncate(file, 1 << 30)
    assert liar.pages.restore_length() and file.stat().st_size == ctypes.sizeof(JobPage)
    liar.set_share(0, 20, 20)

    def work(driver: Driver) -> None:
        driver.start()
        driver.out("cuMemAlloc_v2", MIB)

    machine.run(honest, work)
    assert honest.usage()[0].peak == CONTEXT + MIB


def test_a_page_that_is_clogged_with_locks_is_given_up(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask who has a place takes time for each lock there is, and there is no end to them: 20 000 take 50 ms."""
    job = make_bench().job()
    assert job.charges() == {} and not job.clogged
    monkeypatch.setattr(guard, "LOCKS_S", 0.0)
    for slot in job.pages.job.table:
        slot.pid = 1
    del slot
    assert job.charges() == {} and job.clogged


def test_what_a_job_claims_to_have_used_can_be_told(make_bench: Callable[..., Bench]) -> None:
    """A receipt has 64 bits for a number."""
    job = make_bench().job()
    use = job.pages.job.uses[0]
    use.busy_ns = use.launches = use.peak = use.memory = 2**64 - 1
    del use
    tally = Tally(1, 0.0)
    tally.advance(1.0, job.usage())
    (told,) = tally.uses(job.usage())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=DeviceUse) == told
    assert told.gpu_ns < 3600 * SLOTS * 10**9, "no more than its processes can have had"


def test_a_counter_that_is_written_to_without_end_holds_nobody_up(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """With as many dead processes as there is room for, whose memory is to be given back."""
    source, program = Path(__file__).parent / "hammer.c", tmp_path / "hammer"
    subprocess.run([*find_compiler(), *COMPILE, f"-I{NATIVE}", str(source), "-o", str(program)], check=True)
    machine = make_bench()
    job = machine.job()
    with subprocess.Popen([program, job.pages.directory / "job"], stdout=subprocess.PIPE) as hammer:
        try:
            assert hammer.stdout and hammer.stdout.readline()
            for _ in range(20):
                job.sweep()
                job.correct(0, 1 << 20)
                job.set_share(0, 50, 50)
        finally:
            hammer.kill()
    job.sweep()
    assert job.sweep() == 0

"""A job that corrupts its shared page can only harm itself, not the daemon or the accounts of others."""

import ctypes
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cuda_guard import guard
from cuda_guard.build import COMPILE, NATIVE, Libraries, find_compiler
from cuda_guard.page import DEVICES, LAYOUT, SLOTS, JobPage
from mesh.gpus.receipts import DeviceUse, Tally
from tests.cuda_guard.guests import CONTEXT, MIB, Bench, bench, sweep
from tests.fake.build import Fakes
from tests.fake.client import Driver

STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY

pytestmark = pytest.mark.cc


def test_truncated_page_affects_no_other_job(make_bench: Callable[..., Bench]) -> None:
    """Without protection, an access to a mapped page whose file was truncated kills the process."""
    machine = make_bench()
    liar, honest = machine.job(), machine.job()
    file = liar.pages.directory / "job"
    assert not liar.pages.restore_length()
    os.truncate(file, 0)
    sweep(liar)
    assert liar.usage()[0].memory == 0 and liar.charges() == {} and liar.pages.restore_length()
    os.truncate(file, 1 << 30)
    assert liar.pages.restore_length() and file.stat().st_size == ctypes.sizeof(JobPage)
    liar.set_share(0, 20, 20)

    def work(driver: Driver) -> None:
        driver.start()
        driver.out("cuMemAlloc_v2", MIB)

    machine.run(honest, work)
    assert honest.usage()[0].peak == CONTEXT + MIB


def outlive(folder: Path, built: Libraries, fakes: Fakes) -> None:
    """Be a daemon whose job truncates its policy."""

    def work(driver: Driver) -> None:
        driver.start()
        driver.launch(driver.kernel("k_1ms"))
        driver.cuCtxSynchronize()

    with bench(folder, built, fakes) as machine:
        liar, honest = machine.job(share=50), machine.job(share=40)
        os.truncate(liar.pages.directory / "policy", 0)
        liar.set_gate(True)
        liar.set_share(0, 20, 20)
        machine.run(honest, work)
        assert liar.usage()[0].memory == 0 and honest.usage()[0].launches == 1


def test_truncated_policy_ends_no_daemon(folder: Path, built: Libraries, fakes: Fakes) -> None:
    """A guest that nothing keeps from the daemon's files can truncate its policy, too."""
    daemon = multiprocessing.get_context("fork").Process(target=outlive, args=(folder, built, fakes))
    daemon.start()
    daemon.join()
    assert daemon.exitcode == 0


def test_page_flooded_with_locks_is_not_read(make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a lock's owner takes time for each lock on the file, and their number is unlimited: 20,000 take 50 ms."""
    job = make_bench().job()
    assert job.charges() == {} and not job.lock_flooded
    monkeypatch.setattr(guard, "LOCKS_S", 0.0)
    for slot in job.pages.job.table:
        slot.pid = 1
    del slot
    assert job.charges() == {} and job.lock_flooded


@pytest.mark.parametrize(
    ("page", "field", "value"),
    [
        ("policy", "magic", 0),
        ("policy", "layout", LAYOUT + 1),
        ("policy", "devices", DEVICES + 1),
        ("policy", "driver", b"libcuda.so.1"),
        ("job", "magic", 0),
        ("job", "layout", LAYOUT + 1),
        ("job", "slots", SLOTS + 1),
    ],
)
def test_program_computes_with_no_pages_of_another_layout(
    make_bench: Callable[..., Bench], page: str, field: str, value: object
) -> None:
    machine = make_bench()
    job = machine.job()
    setattr(getattr(job.pages, page), field, value)
    assert machine.run(job, lambda driver: driver.code("cuInit", 0)) == STUB_LIBRARY
    assert machine.world.calls("cuInit") == 0


def test_reported_usage_is_clamped(make_bench: Callable[..., Bench]) -> None:
    """A number in a receipt has 64 bits."""
    job = make_bench().job()
    use = job.pages.job.uses[0]
    use.busy_ns = use.launches = use.peak = use.memory = 2**64 - 1
    del use
    tally = Tally(1, 0.0)
    tally.advance(1.0, job.usage())
    (told,) = tally.uses(job.usage())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=DeviceUse) == told
    assert told.gpu_ns < 3600 * SLOTS * 10**9, "the use is at most what the job's processes can reach"


def test_counter_written_without_end_blocks_no_one(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    """The table is full of dead processes whose memory has to be released."""
    source, program = Path(__file__).parent / "hammer.c", tmp_path / "hammer"
    subprocess.run([*find_compiler(), *COMPILE, f"-I{NATIVE}", str(source), "-o", str(program)], check=True)
    machine = make_bench()
    job = machine.job()
    with subprocess.Popen([program, job.pages.directory / "job"], stdout=subprocess.PIPE) as hammer:
        try:
            assert hammer.stdout and hammer.stdout.readline()
            for _ in range(20):
                sweep(job)
                job.set_overhead(0, 1 << 20)
                job.set_share(0, 50, 50)
        finally:
            hammer.kill()
    sweep(job)
    assert sweep(job) == 0

"""A node with fake GPUs and a guard, and processes that run as its jobs."""

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuda_guard.build import Libraries
from cuda_guard.driver import Driver as Real
from cuda_guard.guard import Guard, GuardedJob
from cuda_guard.host import load
from cuda_guard.page import Quota
from tests.fake.build import Fakes
from tests.fake.client import Driver
from tests.fake.world import World

MIB = 1 << 20
CONTEXT = 300 * MIB  # size of a context on the fake devices
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Bench:
    """`world`: the devices' real state; `guard`: the daemon's guard."""

    def __init__(self, directory: Path, built: Libraries, fakes: Fakes, **world: Any) -> None:
        self.libraries = built
        self.world = World(directory / "world", fakes, **world)
        self.uuids = tuple(f"GPU-{uuid}" for uuid in self.world.uuids)
        sizes = (self.world.device_memory,) * len(self.uuids)
        self.guard = Guard(directory / "pages", built, Real(fakes.cuda, fakes.nvml), self.uuids, sizes)
        self._names = (f"job{n}" for n in range(10_000))
        self._jobs: list[GuardedJob] = []

    def job(
        self,
        memory: int | None = 2048 * MIB,
        share: float = 100,
        limit: float | None = None,
        host_memory: int | None = None,
        **quota: Any,
    ) -> GuardedJob:
        """Admit a job with these quotas and this limit of pinned host memory."""
        made = {"context_bytes": CONTEXT, **quota, "memory": memory, "share": share, "limit": limit or share}
        quotas = tuple(Quota(uuid=uuid, **made) for uuid in self.uuids)
        job = self.guard.admit(next(self._names), quotas, in_container=False, host_memory=host_memory)
        self._jobs.append(job)
        return job

    def end(self, job: GuardedJob) -> None:
        self._jobs.remove(job)
        job.close()

    def environment(self, job: GuardedJob | None, fail: str = "") -> dict[str, str]:
        pages = {"MESH_GUARD_DIR": str(job.pages.directory)} if job else {}
        return {**pages, **self.world.environment(fail=fail)}

    def start(self, job: GuardedJob | None, work: Callable[[Driver], Any], fail: str = "") -> "Guest":
        """Start a process of the job that runs `work` with the guard's driver, or without a job with the fake itself."""
        return Guest(self, job, work, fail)

    def run(self, job: GuardedJob | None, work: Callable[[Driver], Any], fail: str = "") -> Any:
        """Return the result of `work` in a process of the job."""
        return self.start(job, work, fail).result()

    def close(self) -> None:
        for job in self._jobs:
            job.close()
        self.guard.close()
        self.world.close()


def sweep(job: GuardedJob) -> int:
    """Release what dead processes of a job held, as the daemon does four times a second; return their number."""
    native = load(job._libraries.host)
    return max(0, int(native.ledger_sweep(ctypes.addressof(job.pages.job), job.pages.job_file, 0)))


def be_a_guest() -> None:
    """End with the test, and leave no core dump of an intended crash."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()


class Guest:
    """A forked process whose result is what its work returned or raised.

    The driver's libraries are loaded only here: the fake uses the world of the environment in which it is loaded.
    """

    def __init__(self, bench: Bench, job: GuardedJob | None, work: Callable[[Driver], Any], fail: str) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:  # it must never return to pytest: each guest would run, and fork, all tests that follow
                os.close(reading)
                be_a_guest()
                os.environ.update(bench.environment(job, fail))
                path = bench.libraries.cuda if job else bench.world.fakes.cuda
                try:
                    answer: tuple[bool, Any] = (True, work(Driver(path)))
                    status = 0
                except BaseException:
                    answer = (False, traceback.format_exc())
                with os.fdopen(writing, "wb") as stream:
                    pickle.dump(answer, stream)
            finally:
                os._exit(status)
        os.close(writing)
        self._answer = os.fdopen(reading, "rb")
        self._ended = False

    def result(self) -> Any:
        data = self._answer.read()
        code = self.wait()
        assert data, f"the guest ended with {code} and no message"
        good, value = pickle.loads(data)
        assert good, value
        return value

    def wait(self) -> int:
        if not self._ended:
            self._ended = True
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)


@contextmanager
def bench(directory: Path, built: Libraries, fakes: Fakes, **world: Any) -> Iterator[Bench]:
    made = Bench(directory, built, fakes, **world)
    try:
        yield made
    finally:
        made.close()

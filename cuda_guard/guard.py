"""The guard of one machine: the pages of its jobs, how jobs are made to use it, and what the owner can do to them at once."""

import logging
import os
import shutil
import time
from pathlib import Path

import msgspec

from cuda_guard.build import Libraries
from cuda_guard.driver import CUDA, NVML, Driver
from cuda_guard.host import Host
from cuda_guard.page import NO_LIMIT, PPM, SLOTS, UNIT, UNITS_MOST, Pages, Quota

log = logging.getLogger(__name__)

PAGES_AT = Path("/run/mesh/guard")  # in a container; `native/pages.c` looks there first
GUARD_AT = Path("/opt/mesh/guard")
DRIVER_AT = Path("/opt/mesh/driver")
PRELOAD_AT = Path("/etc/ld.so.preload")
PRELOAD = "preload"  # the file of that name beside the pages
LOCKS_S = 0.02  # of processor time to ask who has which place; 20 000 locks make it 50 ms, none 0.2; ours
LAUNCHES_MOST = 2**53  # that any number of ours can tell
PAGES_ENV = "MESH_GUARD_DIR"  # for jobs of the process engine, which see the machine's own files


class Mount(msgspec.Struct, frozen=True):
    """A file or directory of this machine, and where a container has it."""

    source: Path
    target: Path
    read_only: bool = True


class Usage(msgspec.Struct, frozen=True):
    """What a job has used of one device: `gpu_s` as measured by events; memory in bytes, with its peak.

    `memory_now`: what it may have at this moment, with what is lent to it; None if it has no quota. `refused` counts
    allocations that this forbade; `processes` those of it that use the device now.
    """

    uuid: str
    gpu_s: float
    launches: int
    memory: int
    peak: int
    refused: int
    processes: int
    memory_now: int | None = None


class GuardedJob:
    """One job's pages, and what is done to it. `devices` are the machine's own numbers of them."""

    def __init__(
        self, pages: Pages, quotas: tuple[Quota, ...], devices: tuple[int, ...], libraries: Libraries, host: Host
    ) -> None:
        self.pages = pages
        self.quotas = quotas
        self._devices = devices
        self._libraries = libraries
        self._host = host
        self.clogged = False
        self._began_ns = time.monotonic_ns()

    def process_env(self) -> dict[str, str]:
        """For a job that runs as a process of this machine. Cooperative: it can do without these variables."""
        preload = os.pathsep.join([str(self._libraries.cuda), str(self._libraries.nvml)])
        return {"LD_PRELOAD": preload, PAGES_ENV: str(self.pages.directory)}

    def container_mounts(self, driver: Driver) -> tuple[Mount, ...]:
        """For a job in a container: the guard over the driver's place and before every program, the driver itself out of the way,
        the policy read-only."""
        directory = self.pages.directory
        over = [
            Mount(self._libraries.cuda, driver.cuda.parent / CUDA),
            Mount(self._libraries.nvml, driver.nvml.parent / NVML),
        ]
        return (
            Mount(self._libraries.cuda, GUARD_AT / CUDA),
            Mount(self._libraries.nvml, GUARD_AT / NVML),
            Mount(driver.cuda, DRIVER_AT / CUDA),
            Mount(driver.nvml, DRIVER_AT / NVML),
            Mount(directory / "policy", PAGES_AT / "policy"),
            Mount(directory / "job", PAGES_AT / "job", read_only=False),
            Mount(directory / PRELOAD, PRELOAD_AT),
            *over,
        )

    def set_gate(self, closed: bool) -> None:
        """Nothing that the job has not launched yet starts while its gate is closed. Takes effect at once, on every device."""
        self._host.set_gate(self.pages, closed)

    def join(self) -> None:
        """Be looked after on all its devices. OSError if too many jobs share one, ValueError for what is no share."""
        for place, quota in enumerate(self.quotas):
            self._host.join(self.pages, place, self._devices[place], quota)

    def set_share(self, place: int, share: float, limit: float) -> None:
        """Another share of its device of this place, in per cent, from now on."""
        self._set(place, msgspec.structs.replace(self.quotas[place], share=share, limit=limit))

    def set_memory(self, place: int, memory: int, limit: int | None = None) -> None:
        """Another quota in bytes, from now on, and what it may have while no guarantee needs it. What the job has already stays
        with it; more than before it has once there is room."""
        self._set(place, msgspec.structs.replace(self.quotas[place], memory=memory, memory_limit=limit))

    def _set(self, place: int, quota: Quota) -> None:
        self._host.join(self.pages, place, self._devices[place], quota)
        self.quotas = (*self.quotas[:place], quota, *self.quotas[place + 1 :])

    def put_away(self) -> None:
        """The driver has brought to the host what its processes had: of what was lent to it, nothing is kept for it."""
        for device in self._devices:
            self._host.away(self.pages, device, True)

    def bring_back(self) -> bool:
        """Whether there is room for what it had; then it is its again."""
        fits = all([self._host.away(self.pages, device, False) for device in self._devices])
        if not fits:
            self.put_away()
        return fits

    def memory_most(self, place: int) -> int | None:
        """What it may ever have, in bytes; None if it has no quota."""
        quota = self.quotas[place]
        return quota.memory if quota.memory_limit is None else quota.memory_limit

    @property
    def has_room(self) -> bool:
        """It may have all that it is guaranteed, now."""
        return all(self._is_there(place, quota) for place, quota in enumerate(self.quotas))

    def _is_there(self, place: int, quota: Quota) -> bool:
        limit = self.memory_limit(place)
        return limit is None or quota.memory is None or limit >= quota.memory

    def over(self, place: int) -> int:
        """Bytes beyond both its guarantee and what it may have now: they were lent to it, and are needed."""
        now, least, most = self.memory_limit(place), self.quotas[place].memory, self.memory_most(place)
        if now is None or least is None or most is None:
            return 0
        return max(0, min(self.pages.memory_used(place), most) - max(now, least))

    def usage(self) -> tuple[Usage, ...]:
        """Of each device. The job can write anything to its page: nothing is told that cannot be."""
        job = self.pages.job
        pids = [slot.pid for slot in job.table]
        most_ns = SLOTS * (time.monotonic_ns() - self._began_ns)
        return tuple(
            Usage(
                uuid=quota.uuid,
                gpu_s=min(job.uses[place].busy_ns, most_ns) / 1e9,
                launches=min(job.uses[place].launches, LAUNCHES_MOST),
                memory=self.pages.memory_used(place),
                peak=min(job.uses[place].peak, UNITS_MOST) * UNIT,
                refused=job.uses[place].refused,
                memory_now=self.memory_limit(place),
                processes=sum(1 for n, pid in enumerate(pids) if n and pid and job.table[n].used[place]),
            )
            for place, quota in enumerate(self.quotas)
        )

    def charges(self) -> dict[int, tuple[int, ...]]:
        """Bytes that each living process has charged to the job, on each of its devices, by its pid as seen here. Of one that has
        clogged its page with locks, nothing."""
        found: dict[int, tuple[int, ...]] = {}
        begun = time.thread_time()
        for number, slot in enumerate(self.pages.job.table):
            self.clogged = self.clogged or time.thread_time() - begun > LOCKS_S
            if self.clogged:
                return {}
            owner = self._host.owner(self.pages, number) if number and slot.pid else 0
            if owner:
                found[owner] = tuple(max(0, slot.used[place]) * UNIT for place in range(len(self.quotas)))
        return found

    def context_bytes(self, place: int) -> int:
        """Of that, for each context."""
        return int(self.pages.policy.allowances[place].context_bytes)

    def memory_limit(self, place: int) -> int | None:
        """What it may have now, in bytes, with what is lent to it; None if it has no quota."""
        limit = int(self.pages.policy.allowances[place].memory_limit)
        return limit if limit < NO_LIMIT else None

    def correct(self, place: int, overhead: int) -> None:
        """Charge the job so many bytes beside what its processes charge themselves, from now on."""
        self._host.correct(self.pages, place, -(-overhead // UNIT))

    def trim(self, place: int, factor: float) -> None:
        """Let its share be `factor` times what was agreed."""
        self._host.trim(self.pages, self._devices[place], factor)

    def sweep(self) -> int:
        """Give back what dead processes of the job held; how many there were."""
        return self._host.sweep(self.pages)

    def close(self) -> None:
        self._host.leave(self.pages)
        self.pages.close()
        shutil.rmtree(self.pages.directory, ignore_errors=True)


class Guard:
    """`directory` should be on a tmpfs: pages are shared memory. `uuids`: the machine's devices, in its order; `sizes`: their
    memory in bytes. Of one of which that is not known no memory is lent."""

    def __init__(
        self, directory: Path, libraries: Libraries, driver: Driver, uuids: tuple[str, ...], sizes: tuple[int, ...] = ()
    ) -> None:
        self.driver = driver
        self.libraries = libraries
        self._directory = directory
        self._numbers = {uuid: number for number, uuid in enumerate(uuids)}
        self._host = Host(libraries.host)
        shutil.rmtree(directory, ignore_errors=True)  # of an earlier daemon, whose jobs have ended with it
        directory.mkdir(parents=True, mode=0o711)
        self._sizes = dict(zip(uuids, sizes, strict=False))
        for uuid in self._sizes:
            self.set_foreign(uuid, 0)

    def set_foreign(self, uuid: str, used: int) -> None:
        """Bytes of a device that are in the hands of who is no job: so much less of it is lent."""
        if uuid in self._sizes:
            self._host.size(self._numbers[uuid], self._sizes[uuid], used)

    def admit(
        self, name: str, quotas: tuple[Quota, ...], in_container: bool, host_memory: int | None = None
    ) -> GuardedJob:
        """Pages for a job, whose processes are to be started with them, once it `has_room`. `host_memory`: bytes of the machine's
        memory that it may have pinned. ValueError for a quota that says nothing sensible or a
        device that is not here; OSError when a page cannot be written or too many jobs share a device."""
        missing = [quota.uuid for quota in quotas if quota.uuid not in self._numbers]
        if missing:
            raise ValueError(f"not a GPU of this machine: {missing[0]}")
        devices = tuple(self._numbers[quota.uuid] for quota in quotas)
        seen = Driver(DRIVER_AT / CUDA, DRIVER_AT / NVML) if in_container else self.driver
        directory = self._directory / name
        pages = Pages.create(directory, quotas, seen.cuda, seen.nvml, time.monotonic_ns(), host_memory)
        (directory / PRELOAD).write_text(f"{GUARD_AT / CUDA}\n{GUARD_AT / NVML}\n")
        job = GuardedJob(pages, quotas, devices, self.libraries, self._host)
        if not self._host.claim(pages, os.getpid()):
            log.warning("another daemon looks after the pages of job %s", name)
        try:
            job.join()
        except (OSError, ValueError):
            job.close()  # its other devices must not be looked after in pages that are gone
            raise
        return job

    def close(self) -> None:
        self._host.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def share_of(pages: Pages, place: int) -> float:
    """The share in force now, with what is lent, in per cent."""
    allowance = pages.policy.allowances[place]
    return float(allowance.rates[allowance.rate_index & 1].share_ppm) * 100 / PPM

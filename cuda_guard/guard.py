"""Guard of one machine: the shared pages of its jobs, their environment and mounts, and the owner's controls over them."""

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
LOCKS_S = (
    0.02  # of CPU time to read the lock owners (measured: 0.2 ms without foreign locks, 50 ms with 20,000; own choice)
)
LAUNCHES_MOST = 2**53  # largest plausible count
PAGES_ENV = "MESH_GUARD_DIR"  # for jobs of the process engine, which see the machine's file system


class Mount(msgspec.Struct, frozen=True):
    """A file or directory of this machine, and its path in a container."""

    source: Path
    target: Path
    read_only: bool = True


class Usage(msgspec.Struct, frozen=True):
    """A job's use of one device: `gpu_s` measured by events; memory and its peak in bytes.

    `memory_now`: its current limit in bytes, including lent memory; None without a quota. `refused` counts allocations over that
    limit, `processes` the job's processes that use the device now.
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
    """One job under the guard: its pages and its controls. `devices` are the machine's device numbers."""

    def __init__(
        self, pages: Pages, quotas: tuple[Quota, ...], devices: tuple[int, ...], libraries: Libraries, host: Host
    ) -> None:
        self.pages = pages
        self.quotas = quotas
        self._devices = devices
        self._libraries = libraries
        self._host = host
        self.lock_flooded = False
        self._began_ns = time.monotonic_ns()

    def process_env(self) -> dict[str, str]:
        """Return the environment of a job that runs as a process. It is cooperative: the job can unset it."""
        preload = os.pathsep.join(map(str, self._libraries.preloaded))
        return {"LD_PRELOAD": preload, PAGES_ENV: str(self.pages.directory)}

    def process_files(self) -> tuple[Mount, ...]:
        """Return the files that such a job uses, at their own paths. Only its page is writable: others load the libraries too."""
        pages = self.pages.directory
        read = (*self._libraries.preloaded, pages / "policy")
        return (*(Mount(path, path) for path in read), Mount(pages / "job", pages / "job", read_only=False))

    def container_mounts(self, driver: Driver) -> tuple[Mount, ...]:
        """Return the mounts of a job in a container.

        The guard replaces the driver's libraries and is preloaded into every program, the driver moves to another path, and the
        policy page is read-only.
        """
        directory = self.pages.directory
        over = [
            Mount(self._libraries.cuda, driver.cuda.parent / CUDA),
            Mount(self._libraries.nvml, driver.nvml.parent / NVML),
        ]
        return (
            *(Mount(library, GUARD_AT / library.name) for library in self._libraries.preloaded),
            Mount(driver.cuda, DRIVER_AT / CUDA),
            Mount(driver.nvml, DRIVER_AT / NVML),
            Mount(directory / "policy", PAGES_AT / "policy"),
            Mount(directory / "job", PAGES_AT / "job", read_only=False),
            Mount(directory / PRELOAD, PRELOAD_AT),
            *over,
        )

    def set_gate(self, closed: bool) -> None:
        """Close or open the gate. While it is closed no launch of the job starts, on any device; this takes effect at once."""
        self._host.set_gate(self.pages, closed)

    def join(self) -> None:
        """Join the arbiter on all devices. OSError if too many jobs share one, ValueError for an invalid share."""
        for place, quota in enumerate(self.quotas):
            self._host.join(self.pages, place, self._devices[place], quota)

    def set_share(self, place: int, share: float, limit: float) -> None:
        """Change the share of the device at `place`, in per cent."""
        self._set(place, msgspec.structs.replace(self.quotas[place], share=share, limit=limit))

    def set_memory(self, place: int, memory: int, limit: int | None = None) -> None:
        """Change the guaranteed memory in bytes, and the limit up to which free memory is lent to the job.

        Memory that the job already has stays with it; an increase takes effect once there is free memory.
        """
        self._set(place, msgspec.structs.replace(self.quotas[place], memory=memory, memory_limit=limit))

    def _set(self, place: int, quota: Quota) -> None:
        self._host.join(self.pages, place, self._devices[place], quota)
        self.quotas = (*self.quotas[:place], quota, *self.quotas[place + 1 :])

    def release_memory(self) -> None:
        """Record that the driver moved the job's memory to the host; nothing stays reserved beyond the guarantee."""
        for device in self._devices:
            self._host.away(self.pages, device, True)

    def reserve_memory(self) -> bool:
        """Reserve the memory that the job had before `release_memory`; False if it is not free."""
        fits = all([self._host.away(self.pages, device, False) for device in self._devices])
        if not fits:
            self.release_memory()
        return fits

    def memory_max(self, place: int) -> int | None:
        """Return the highest limit the job can get, in bytes; None without a quota."""
        quota = self.quotas[place]
        return quota.memory if quota.memory_limit is None else quota.memory_limit

    @property
    def has_guarantee(self) -> bool:
        """True if the job can use all its guaranteed memory now."""
        return all(self._is_available(place, quota) for place, quota in enumerate(self.quotas))

    def _is_available(self, place: int, quota: Quota) -> bool:
        limit = self.memory_limit(place)
        return limit is None or quota.memory is None or limit >= quota.memory

    def excess(self, place: int) -> int:
        """Return the bytes beyond both the guarantee and the current limit: they were lent and are needed elsewhere."""
        now, least, most = self.memory_limit(place), self.quotas[place].memory, self.memory_max(place)
        if now is None or least is None or most is None:
            return 0
        return max(0, min(self.pages.memory_used(place), most) - max(now, least))

    def usage(self) -> tuple[Usage, ...]:
        """Return the use of each device. The job can write anything to its page, so values are clamped to possible ones."""
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
        """Return the bytes that each living process has charged to the job on each device, by pid in this namespace.

        Empty for a job that has flooded its page with locks.
        """
        found: dict[int, tuple[int, ...]] = {}
        begun = time.thread_time()
        for number, slot in enumerate(self.pages.job.table):
            self.lock_flooded = self.lock_flooded or time.thread_time() - begun > LOCKS_S
            if self.lock_flooded:
                return {}
            owner = self._host.owner(self.pages, number) if number and slot.pid else 0
            if owner:
                found[owner] = tuple(max(0, slot.used[place]) * UNIT for place in range(len(self.quotas)))
        return found

    def context_bytes(self, place: int) -> int:
        """Return the bytes charged for each CUDA context."""
        return int(self.pages.policy.allowances[place].context_bytes)

    def memory_limit(self, place: int) -> int | None:
        """Return the current limit in bytes, including lent memory; None without a quota."""
        limit = int(self.pages.policy.allowances[place].memory_limit)
        return limit if limit < NO_LIMIT else None

    def set_overhead(self, place: int, overhead: int) -> None:
        """Charge the job `overhead` bytes in addition to what its processes charge themselves."""
        self._host.set_overhead(self.pages, place, -(-overhead // UNIT))

    def close(self) -> None:
        self._host.leave(self.pages)
        self.pages.close()
        shutil.rmtree(self.pages.directory, ignore_errors=True)


class Guard:
    """The guard of all jobs on this machine.

    `directory` should be on a tmpfs, since pages are shared memory. `uuids`: the machine's devices in order; `sizes`: their
    memory in bytes. No memory is lent on a device without a size.
    """

    def __init__(
        self, directory: Path, libraries: Libraries, driver: Driver, uuids: tuple[str, ...], sizes: tuple[int, ...] = ()
    ) -> None:
        self.driver = driver
        self.libraries = libraries
        self._directory = directory
        self._numbers = {uuid: number for number, uuid in enumerate(uuids)}
        self._host = Host(libraries.host)
        directory.mkdir(parents=True, mode=0o711)
        self._sizes = dict(zip(uuids, sizes, strict=False))
        for uuid in self._sizes:
            self.set_foreign(uuid, 0)

    def set_foreign(self, uuid: str, used: int) -> None:
        """Set the bytes of a device used outside of the mesh's jobs; they are not lendable."""
        if uuid in self._sizes:
            self._host.size(self._numbers[uuid], self._sizes[uuid], used)

    def admit(
        self, name: str, quotas: tuple[Quota, ...], in_container: bool, host_memory: int | None = None
    ) -> GuardedJob:
        """Create the pages of a job; start its processes once it `has_guarantee`.

        `host_memory`: limit of pinned host memory in bytes. ValueError for an invalid quota or an unknown device; OSError if a
        page cannot be written or too many jobs share a device.
        """
        missing = [quota.uuid for quota in quotas if quota.uuid not in self._numbers]
        if missing:
            raise ValueError(f"not a GPU of this machine: {missing[0]}")
        devices = tuple(self._numbers[quota.uuid] for quota in quotas)
        seen = Driver(DRIVER_AT / CUDA, DRIVER_AT / NVML) if in_container else self.driver
        directory = self._directory / name
        pages = Pages.create(directory, quotas, seen.cuda, seen.nvml, time.monotonic_ns(), host_memory)
        (directory / PRELOAD).write_text(
            "".join(f"{GUARD_AT / library.name}\n" for library in self.libraries.preloaded)
        )
        job = GuardedJob(pages, quotas, devices, self.libraries, self._host)
        if not self._host.claim(pages, os.getpid()):
            log.warning("another daemon manages the pages of job %s", name)
        try:
            job.join()
        except (OSError, ValueError):
            job.close()  # leaves the arbiter on the devices already joined
            raise
        return job

    def close(self) -> None:
        self._host.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def share_of(pages: Pages, place: int) -> float:
    """Return the share in force now, including what is lent, in per cent."""
    allowance = pages.policy.allowances[place]
    return float(allowance.rates[allowance.rate_index & 1].share_ppm) * 100 / PPM

"""Auditor: compares NVML's view of the GPUs with what the guarded jobs report themselves. Pure.

A job writes its own pages; NVML's figures come from the driver. A difference is either memory that the guard cannot count
(contexts, modules), which is charged to the job, or a program that bypasses the guard, which is a finding.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Kind = Literal["unguarded", "memory", "utilisation", "page"]

UNGUARDED_SAMPLES = 2  # one is not enough: a process may start or end while NVML and the pages are read
OVER_S = 10.0  # a quota or share exceeded for this long is not a sampling error
SHARE_MARGIN = 10.0  # per cent of the device; NVML samples over 1/6 s to 1 s
CONTEXT_MAX = 1 << 30  # bytes of a context and its modules; twice an H100's context (measured: 520 MiB)
PROCESS_MAX = 2 * CONTEXT_MAX  # of all contexts of a process; few have two (own choice)
CONTEXT_MIN = 16 << 20  # bytes of the smallest context (own choice)
STEADY_SAMPLES = 3


class GpuProcess(msgspec.Struct, frozen=True):
    """A process on a device, from NVML. `memory` in bytes and `busy` in per cent of the device's time are None where NVML does
    not report them. `computes`: it has a compute context, not only graphics."""

    pid: int
    memory: int | None = None
    busy: float | None = None
    computes: bool = True


class DeviceSample(msgspec.Struct, frozen=True):
    """A device, from NVML; sizes in bytes. `reports_busy`: it reports utilisation by process; a process not listed is idle."""

    uuid: str
    total: int
    used: int
    processes: tuple[GpuProcess, ...] = ()
    reports_busy: bool = False


class Claim(msgspec.Struct, frozen=True):
    """A guarded job on one device, from the daemon and the job's pages.

    `pids`: all its processes. `charged`: bytes that each guarded process has charged to itself, None if that changed while NVML
    was read, or the process is ending. `context`: bytes of that for each context. `limit`: the job's largest possible memory in
    bytes, None without a quota. `share`: of the device's time, in per cent, including what is lent to it. `reported`: the job's
    total bytes by its page, None if nothing relies on it.
    """

    job: str
    uuid: str
    pids: frozenset[int]
    charged: Mapping[int, int | None]
    context: int = 0
    limit: int | None = None
    share: float = 100.0
    reported: int | None = None


class Finding(msgspec.Struct, frozen=True):
    """A job's program bypasses the guard. `unguarded`: it uses a device without the guard; `memory`, `utilisation`: it uses more
    than allowed; `page`: it has falsified its page."""

    kind: Kind
    job: str
    uuid: str
    pid: int
    detail: str

    @property
    def proves(self) -> bool:
        """Return True if no honest job can give this finding. Utilisation is advice: NVML reads above the time of kernels."""
        return self.kind != "utilisation"


class Foreign(msgspec.Struct, frozen=True):
    """Processes on a device outside of guarded jobs, so the owner's. `memory` in bytes, as far as NVML reports it."""

    processes: int = 0
    memory: int = 0


class Measured(msgspec.Struct, frozen=True):
    """A job's use of a device by NVML: bytes, and per cent of the device's time; None where NVML does not report it."""

    memory: int | None
    busy: float | None


class AuditReport(msgspec.Struct, frozen=True):
    """By job and device: `overheads` are bytes to charge in addition to the job's own charges, `measured` is its real use. By
    device: `outsiders` are the processes outside of guarded jobs."""

    findings: tuple[Finding, ...]
    overheads: dict[tuple[str, str], int]
    measured: dict[tuple[str, str], Measured]
    outsiders: dict[str, tuple[GpuProcess, ...]]

    @property
    def foreign(self) -> dict[str, Foreign]:
        """The outsiders of each device, summed up."""
        return {
            uuid: Foreign(len(processes), sum(process.memory or 0 for process in processes))
            for uuid, processes in self.outsiders.items()
        }


class Auditor:
    """`contexts`: bytes of a CUDA context by device, once one was measured there."""

    def __init__(self) -> None:
        self.contexts: dict[str, int] = {}
        self._over_since: dict[tuple[Kind, str, str], float] = {}
        self._unguarded: dict[tuple[str, str, int], int] = {}
        self._excess: dict[tuple[str, str, int], deque[int]] = {}

    def audit(self, devices: Sequence[DeviceSample], claims: Sequence[Claim], now: float) -> AuditReport:
        """Audit one sample of all devices and jobs, taken at `now`, in seconds of a monotonic clock."""
        samples = {device.uuid: device for device in devices}
        present = [(claim, samples[claim.uuid]) for claim in claims if claim.uuid in samples]
        self._forget(present)
        return AuditReport(
            findings=tuple(found for claim, device in present for found in self._find(claim, device, now)),
            overheads={(claim.job, claim.uuid): self._overhead(claim, device) for claim, device in present},
            measured={(claim.job, claim.uuid): measure(claim, device) for claim, device in present},
            outsiders={device.uuid: outsiders(device, claims) for device in devices},
        )

    def _forget(self, present: Sequence[tuple[Claim, DeviceSample]]) -> None:
        """Drop the state of processes and jobs that are gone."""
        jobs = {(claim.job, claim.uuid) for claim, _ in present}
        here = {
            (claim.job, claim.uuid, process.pid) for claim, device in present for process in processes_of(claim, device)
        }
        self._excess = {key: value for key, value in self._excess.items() if key in here}
        self._unguarded = {key: value for key, value in self._unguarded.items() if key in here}
        self._over_since = {key: since for key, since in self._over_since.items() if key[1:] in jobs}

    def _overhead(self, claim: Claim, device: DeviceSample) -> int:
        """Return the bytes that the job's processes hold beyond their own charges.

        A charge precedes the allocation and is dropped after the release, so each difference is a lower bound, and the largest of
        the recent ones is the best estimate.
        """
        total = 0
        for process in processes_of(claim, device):
            charged = claim.charged.get(process.pid, 0)
            last = self._excess.setdefault((claim.job, claim.uuid, process.pid), deque(maxlen=STEADY_SAMPLES))
            if charged is not None and process.memory is not None:
                last.append(process.memory - charged)
            nearest = max(last, default=0)
            total += max(0, nearest)
            if process.pid not in claim.charged or len(last) < STEADY_SAMPLES:
                continue
            if claim.context == 0 and nearest >= CONTEXT_MIN:
                self.contexts[claim.uuid] = min(nearest, self.contexts.get(claim.uuid, CONTEXT_MAX))
            elif claim.context > 0 and nearest < 0:  # it was learned from a false report
                self.contexts.pop(claim.uuid, None)
        return total

    def _find(self, claim: Claim, device: DeviceSample, now: float) -> list[Finding]:
        found = []
        for process in processes_of(claim, device):
            key = (claim.job, claim.uuid, process.pid)
            if process.pid in claim.charged:
                self._unguarded.pop(key, None)
                continue
            self._unguarded[key] = self._unguarded.get(key, 0) + 1
            if self._unguarded[key] >= UNGUARDED_SAMPLES:
                found.append(self._finding("unguarded", claim, process.pid, f"{_used(process)} without the guard"))
        has, largest = measure(claim, device), _largest(claim, device)
        processes = sum(process.pid in claim.charged for process in processes_of(claim, device))
        most = None if claim.limit is None else claim.limit + PROCESS_MAX * max(1, processes)
        if self._is_over("memory", claim, has.memory, most, now):
            detail = f"{_mib(has.memory or 0)} of a device where its limit is {_mib(claim.limit or 0)}"
            found.append(self._finding("memory", claim, largest, detail))
        reported = None if claim.reported is None else claim.reported + PROCESS_MAX * max(1, processes)
        if self._is_over("page", claim, has.memory, reported, now):
            detail = f"{_mib(has.memory or 0)} of a device where its page reports {_mib(claim.reported or 0)}"
            found.append(self._finding("page", claim, largest, detail))
        share = None if claim.share >= 100 else claim.share + SHARE_MARGIN
        if self._is_over("utilisation", claim, has.busy, share, now):
            detail = f"{has.busy:.0f} % of a device's time where its share is {claim.share:.0f} %"
            found.append(self._finding("utilisation", claim, largest, detail))
        return found

    def _is_over(self, kind: Kind, claim: Claim, has: float | None, most: float | None, now: float) -> bool:
        """Return True if the limit has been exceeded for OVER_S."""
        key = (kind, claim.job, claim.uuid)
        if has is None or most is None or has <= most:
            self._over_since.pop(key, None)
            return False
        return now - self._over_since.setdefault(key, now) >= OVER_S

    @staticmethod
    def _finding(kind: Kind, claim: Claim, pid: int, detail: str) -> Finding:
        return Finding(kind, claim.job, claim.uuid, pid, f"process {pid} uses {detail}")


def processes_of(claim: Claim, device: DeviceSample) -> list[GpuProcess]:
    """Return the job's processes on the device."""
    return [process for process in device.processes if process.pid in claim.pids or process.pid in claim.charged]


def measure(claim: Claim, device: DeviceSample) -> Measured:
    mine = processes_of(claim, device)
    known = all(process.memory is not None for process in mine)
    return Measured(
        memory=sum(process.memory or 0 for process in mine) if known else None,
        busy=sum(process.busy or 0.0 for process in mine) if device.reports_busy else None,
    )


def outsiders(device: DeviceSample, claims: Sequence[Claim]) -> tuple[GpuProcess, ...]:
    """Return the processes on the device that belong to no guarded job and hold memory."""
    jobs = {process.pid for claim in claims if claim.uuid == device.uuid for process in processes_of(claim, device)}
    return tuple(process for process in device.processes if process.pid not in jobs and process.memory != 0)


def _largest(claim: Claim, device: DeviceSample) -> int:
    mine = sorted(processes_of(claim, device), key=lambda process: (process.busy or 0, process.memory or 0))
    return mine[-1].pid if mine else 0


def _used(process: GpuProcess) -> str:
    return "the GPU" if process.memory is None else f"{_mib(process.memory)} of the GPU"


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"

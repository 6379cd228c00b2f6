"""What NVML says of a machine's GPUs, held against what the guarded jobs on it say of themselves. Pure: looks in, a verdict out.

The pages of a job are written by the job; NVML is told by the driver. Where the two differ, the difference is either what the
guard cannot count (contexts, modules), which the job is charged with, or a program that is past the guard, which is a finding.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Kind = Literal["unguarded", "memory", "utilisation", "page"]

UNGUARDED_LOOKS = 2  # a process may begin or end while NVML and the pages are read
OVER_S = 10.0  # past a quota or share for so long is no accident of sampling
SHARE_MARGIN = 10.0  # per cent of the device: NVML's samples are of 1/6 s to 1 s
CONTEXT_MOST = 1 << 30  # bytes that no process's contexts and modules need; twice what large ones take (cuDNN and all)
CONTEXT_LEAST = 16 << 20  # what one takes at least; ours
STEADY_LOOKS = 3


class Seen(msgspec.Struct, frozen=True):
    """A process on a device, by NVML. `memory` in bytes and `busy` in per cent of the device's time are None where NVML does
    not tell. `computes`: it has a context to compute with, and does not only draw."""

    pid: int
    memory: int | None = None
    busy: float | None = None
    computes: bool = True


class DeviceLook(msgspec.Struct, frozen=True):
    """A device by NVML, bytes. `tells_busy`: it says how busy each process keeps it; one that it does not name is idle."""

    uuid: str
    total: int
    used: int
    processes: tuple[Seen, ...] = ()
    tells_busy: bool = False


class Claim(msgspec.Struct, frozen=True):
    """What is known of a guarded job on one device, beside NVML.

    `pids`: all of its processes. `charged`: bytes that each process under the guard has charged itself with, None where that
    changed while NVML was asked, or the process is ending. `context`: bytes of that for each context. `limit`: what it may
    ever have, None if it has no quota. `share`: of the device's time, in per cent, with what is lent to it. `told`: bytes
    that its page says it has in all, None if nobody relies on that.
    """

    job: str
    uuid: str
    pids: frozenset[int]
    charged: Mapping[int, int | None]
    context: int = 0
    limit: int | None = None
    share: float = 100.0
    told: int | None = None


class Finding(msgspec.Struct, frozen=True):
    """A job's program is past the guard: `unguarded` uses a device without it; `memory`, `utilisation`: more than the job may;
    `page`: has spoilt what it tells the guard."""

    kind: Kind
    job: str
    uuid: str
    pid: int
    detail: str


class Foreign(msgspec.Struct, frozen=True):
    """Processes on a device that are of no guarded job: the owner's own. `memory` in bytes, as far as NVML tells."""

    processes: int = 0
    memory: int = 0


class Held(msgspec.Struct, frozen=True):
    """A job on a device by NVML: bytes, and per cent of the device's time; None where NVML does not tell."""

    memory: int | None
    busy: float | None


class Verdict(msgspec.Struct, frozen=True):
    """By job and device: `overheads`, bytes to charge beside what the job charges itself, and what it really holds. By device:
    `strangers`, of no guarded job."""

    findings: tuple[Finding, ...]
    overheads: dict[tuple[str, str], int]
    held: dict[tuple[str, str], Held]
    strangers: dict[str, tuple[Seen, ...]]

    @property
    def foreign(self) -> dict[str, Foreign]:
        """The strangers, counted."""
        return {
            uuid: Foreign(len(some), sum(seen.memory or 0 for seen in some)) for uuid, some in self.strangers.items()
        }


class Auditor:
    """`contexts`: bytes that a context takes of a device, once one has been seen there."""

    def __init__(self) -> None:
        self.contexts: dict[str, int] = {}
        self._over_since: dict[tuple[Kind, str, str], float] = {}
        self._unguarded: dict[tuple[str, str, int], int] = {}
        self._excess: dict[tuple[str, str, int], deque[int]] = {}

    def judge(self, devices: Sequence[DeviceLook], claims: Sequence[Claim], now: float) -> Verdict:
        """One look of all devices and jobs, at `now` of a monotonic clock, in seconds."""
        looks = {device.uuid: device for device in devices}
        present = [(claim, looks[claim.uuid]) for claim in claims if claim.uuid in looks]
        self._forget(present)
        return Verdict(
            findings=tuple(found for claim, device in present for found in self._find(claim, device, now)),
            overheads={(claim.job, claim.uuid): self._overhead(claim, device) for claim, device in present},
            held={(claim.job, claim.uuid): held(claim, device) for claim, device in present},
            strangers={device.uuid: strangers(device, claims) for device in devices},
        )

    def _forget(self, present: Sequence[tuple[Claim, DeviceLook]]) -> None:
        """Processes that are gone, and jobs with them."""
        jobs = {(claim.job, claim.uuid) for claim, _ in present}
        here = {(claim.job, claim.uuid, seen.pid) for claim, device in present for seen in of(claim, device)}
        self._excess = {key: value for key, value in self._excess.items() if key in here}
        self._unguarded = {key: value for key, value in self._unguarded.items() if key in here}
        self._over_since = {key: since for key, since in self._over_since.items() if key[1:] in jobs}

    def _overhead(self, claim: Claim, device: DeviceLook) -> int:
        """What the job's processes have beyond what they charge themselves. Each figure is a lower bound, for a charge is made
        before the memory is taken and dropped after it is given back; so the largest of the last is the nearest."""
        total = 0
        for seen in of(claim, device):
            charged = claim.charged.get(seen.pid, 0)
            last = self._excess.setdefault((claim.job, claim.uuid, seen.pid), deque(maxlen=STEADY_LOOKS))
            if charged is not None and seen.memory is not None:
                last.append(seen.memory - charged)
            nearest = max(last, default=0)
            total += max(0, nearest)
            if seen.pid not in claim.charged or len(last) < STEADY_LOOKS:
                continue
            if claim.context == 0 and nearest >= CONTEXT_LEAST:
                self.contexts[claim.uuid] = min(nearest, self.contexts.get(claim.uuid, CONTEXT_MOST))
            elif claim.context > 0 and nearest < 0:  # it was learned from a job that lied
                self.contexts.pop(claim.uuid, None)
        return total

    def _find(self, claim: Claim, device: DeviceLook, now: float) -> list[Finding]:
        found = []
        for seen in of(claim, device):
            key = (claim.job, claim.uuid, seen.pid)
            if seen.pid in claim.charged:
                self._unguarded.pop(key, None)
                continue
            self._unguarded[key] = self._unguarded.get(key, 0) + 1
            if self._unguarded[key] >= UNGUARDED_LOOKS:
                found.append(self._finding("unguarded", claim, seen.pid, f"{_used(seen)} without the guard"))
        has, largest = held(claim, device), _largest(claim, device)
        contexts = sum(seen.pid in claim.charged for seen in of(claim, device))  # who is not on the device has none
        most = None if claim.limit is None else claim.limit + CONTEXT_MOST * max(1, contexts)
        if self._is_over("memory", claim, has.memory, most, now):
            detail = f"{_mib(has.memory or 0)} of a device where it may have {_mib(claim.limit or 0)}"
            found.append(self._finding("memory", claim, largest, detail))
        told = None if claim.told is None else claim.told + CONTEXT_MOST * max(1, contexts)
        if self._is_over("page", claim, has.memory, told, now):
            detail = f"{_mib(has.memory or 0)} of a device where its page says {_mib(claim.told or 0)}"
            found.append(self._finding("page", claim, largest, detail))
        share = None if claim.share >= 100 else claim.share + SHARE_MARGIN
        if self._is_over("utilisation", claim, has.busy, share, now):
            detail = f"{has.busy:.0f} % of a device's time where it may have {claim.share:.0f} %"
            found.append(self._finding("utilisation", claim, largest, detail))
        return found

    def _is_over(self, kind: Kind, claim: Claim, has: float | None, most: float | None, now: float) -> bool:
        """Whether it has been, for long enough."""
        key = (kind, claim.job, claim.uuid)
        if has is None or most is None or has <= most:
            self._over_since.pop(key, None)
            return False
        return now - self._over_since.setdefault(key, now) >= OVER_S

    @staticmethod
    def _finding(kind: Kind, claim: Claim, pid: int, detail: str) -> Finding:
        return Finding(kind, claim.job, claim.uuid, pid, f"process {pid} uses {detail}")


def of(claim: Claim, device: DeviceLook) -> list[Seen]:
    """The job's processes on the device."""
    return [seen for seen in device.processes if seen.pid in claim.pids or seen.pid in claim.charged]


def held(claim: Claim, device: DeviceLook) -> Held:
    mine = of(claim, device)
    known = all(seen.memory is not None for seen in mine)
    return Held(
        memory=sum(seen.memory or 0 for seen in mine) if known else None,
        busy=sum(seen.busy or 0.0 for seen in mine) if device.tells_busy else None,
    )


def strangers(device: DeviceLook, claims: Sequence[Claim]) -> tuple[Seen, ...]:
    mine = {seen.pid for claim in claims if claim.uuid == device.uuid for seen in of(claim, device)}
    return tuple(seen for seen in device.processes if seen.pid not in mine and seen.memory != 0)


def _largest(claim: Claim, device: DeviceLook) -> int:
    mine = sorted(of(claim, device), key=lambda seen: (seen.busy or 0, seen.memory or 0))
    return mine[-1].pid if mine else 0


def _used(seen: Seen) -> str:
    return "the GPU" if seen.memory is None else f"{_mib(seen.memory)} of the GPU"


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"

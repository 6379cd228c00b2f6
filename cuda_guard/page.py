"""Shared pages of a guarded job and the daemon, in the layout of `native/page.h`, and the files that hold them."""

import ctypes
import mmap
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Self
from uuid import UUID

import msgspec

MAGIC = 0x6472617567736D31
LAYOUT = 3
DEVICES = 16
HOST = DEVICES  # index of pinned host memory
SLOTS = 256
UNIT = 512
AUDITS = 32
NAME = 64
TIMELINE = 1024
UNITS_MOST = 2**38 - 1  # largest value of a counter; native/ledger.c
PPM = 1_000_000
NO_LIMIT = 2**63
POLICY, JOB = "policy", "job"

_u32, _u64, _i64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64


class Rate(ctypes.Structure):
    _fields_ = [
        ("t0_ns", _i64),
        ("v0_ns", _i64),
        ("share_ppm", _u32),
        ("reserved", _u32),
        ("burst_ns", _i64),
    ]


class Allowance(ctypes.Structure):
    _fields_ = [
        ("uuid", ctypes.c_ubyte * 16),
        ("memory_limit", _u64),
        ("context_bytes", _u64),
        ("window_ns", _i64),
        ("turn", _u32),
        ("rate_index", _u32),
        ("rates", Rate * 2),
        ("reserved", ctypes.c_ubyte * 16),
    ]


class PolicyPage(ctypes.Structure):
    _fields_ = [
        ("magic", _u64),
        ("layout", _u32),
        ("devices", _u32),
        ("gate", _u32),
        ("reserved", _u32),
        ("heartbeat_ns", _i64),
        ("host_limit", _u64),
        ("spare", ctypes.c_ubyte * 24),
        ("driver", ctypes.c_char * 256),
        ("nvml", ctypes.c_char * 256),
        ("pad", ctypes.c_ubyte * 64),
        ("allowances", Allowance * DEVICES),
        ("rest", ctypes.c_ubyte * 1408),
    ]


class Use(ctypes.Structure):
    _fields_ = [
        ("memory", _u64),
        ("spent_ns", _i64),
        ("busy_ns", _u64),
        ("launches", _u64),
        ("reserved", _u32),
        ("refused", _u32),
        ("last_launch_ns", _i64),
        ("peak", _u64),
        ("borrowed", _u64),
    ]


class Slot(ctypes.Structure):
    _fields_ = [
        ("pid", _u32),
        ("generation", _u32),
        ("seq", _u64),
        ("done", _u64),
        ("pending", _u64),
        ("pending_used", _i64),
        ("waiting", ctypes.c_ubyte * DEVICES),
        ("used", _i64 * (DEVICES + 1)),
        ("under_way", _i64 * DEVICES),
    ]


class JobPage(ctypes.Structure):
    _fields_ = [
        ("magic", _u64),
        ("layout", _u32),
        ("slots", _u32),
        ("audits", _u32),
        ("reserved", ctypes.c_ubyte * 44),
        ("uses", Use * (DEVICES + 1)),
        ("audit", (ctypes.c_char * NAME) * AUDITS),
        ("rest", ctypes.c_ubyte * 896),
        ("table", Slot * SLOTS),
        ("timelines", (_u64 * TIMELINE) * DEVICES),
    ]


# Measured: a training that waits after each step takes 2.5 % longer with a window of 4 ms, and not longer with 16 ms (40 runs
# each, on the fake driver). With other jobs on the device, turns of 10 ms make a longer window useless.
WINDOW_MS, ALONE_WINDOW_MS = 4.0, 16.0


class Quota(msgspec.Struct, frozen=True):
    """A job's part of one device. `memory` in bytes (None: all of it), shares in per cent of the device's time.

    `share` and `memory` are guaranteed. Up to `limit` and `memory_limit` (None: `memory`) are lent while nothing else needs
    them. `window_ms`: GPU time in flight at once; a short window makes a closed gate take effect sooner, a long one keeps a
    device busier. `context_bytes`: memory charged for a CUDA context until NVML has measured it.
    """

    uuid: str
    memory: int | None = None
    share: float = 100
    limit: float = 100
    memory_limit: int | None = None
    window_ms: float = WINDOW_MS
    burst_ms: float = 30
    context_bytes: int = 0


def uuid_bytes(uuid: str) -> bytes:
    """Parse a device's "GPU-..." or "MIG-..." UUID. ValueError if it is invalid."""
    kind, _, digits = uuid.partition("-")
    if kind not in {"GPU", "MIG"}:
        raise ValueError(f"not a device's UUID: {uuid!r}")
    return UUID(digits).bytes


class Pages:
    """The mapped files `policy` and `job` of a directory. While the job runs, change them through `Host`, which orders writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._policy_map, self._job_map = _map(directory / POLICY), _map(directory / JOB)
        self.policy = PolicyPage.from_buffer(self._policy_map)
        self.job = JobPage.from_buffer(self._job_map)
        self.job_file = os.open(directory / JOB, os.O_RDWR | os.O_CLOEXEC)

    @classmethod
    def create(
        cls,
        directory: Path,
        quotas: tuple[Quota, ...],
        driver: Path,
        nvml: Path,
        now_ns: int,
        host_memory: int | None = None,
    ) -> Self:
        """Create the pages of a job.

        `driver` and `nvml`: paths of the real libraries as the job sees them; `host_memory`: limit of pinned host memory in
        bytes. Only this user can write the job page. ValueError for values that do not fit into a page.
        """
        if len(quotas) > DEVICES:
            raise ValueError(f"a job has at most {DEVICES} devices, not {len(quotas)}")
        policy, job = PolicyPage(), JobPage()
        policy.magic = job.magic = MAGIC
        policy.layout = job.layout = LAYOUT
        policy.devices, job.slots = len(quotas), SLOTS
        policy.driver, policy.nvml = _path(driver), _path(nvml)
        policy.host_limit = NO_LIMIT if host_memory is None else host_memory
        for quota, allowance in zip(quotas, policy.allowances, strict=False):
            _fill(allowance, quota, now_ns)
        directory.mkdir(parents=True, exist_ok=True)
        for name, page, mode in ((POLICY, policy, 0o644), (JOB, job, 0o600)):
            file = os.open(directory / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode)
            with os.fdopen(file, "wb") as stream:
                stream.write(bytes(page))
        return cls(directory)

    def restore_length(self) -> bool:
        """Reset the length of the job's page file; True if the job had changed it. Bytes that were cut off are zero."""
        if os.fstat(self.job_file).st_size == ctypes.sizeof(JobPage):
            return False
        os.ftruncate(self.job_file, ctypes.sizeof(JobPage))
        return True

    def audited(self) -> list[str]:
        """Return calls unknown to the guard that may allocate memory or launch work, and so may bypass it."""
        names = self.job.audit[: min(self.job.audits, AUDITS)]
        return [re.sub(rb"\W", b"?", name.value).decode() for name in names]  # the job can write anything there

    def memory_used(self, place: int) -> int:
        """Return the bytes charged to the job on the device at `place`, or for HOST its pinned memory."""
        return int(self.job.uses[place].memory >> 26) * UNIT

    def close(self) -> None:
        os.close(self.job_file)
        del self.policy, self.job
        with suppress(BufferError):  # still referenced elsewhere; the last reference unmaps them
            self._policy_map.close()
            self._job_map.close()


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _path(path: Path) -> bytes:
    text = os.fsencode(path)
    if not text.startswith(b"/") or len(text) >= 256:
        raise ValueError(f"not a path that fits into a page: {path}")
    return text


def _fill(allowance: Allowance, quota: Quota, now_ns: int) -> None:
    most = NO_LIMIT if quota.memory is None else quota.memory
    allowance.uuid[:] = uuid_bytes(quota.uuid)
    allowance.memory_limit = most
    allowance.context_bytes = quota.context_bytes
    allowance.window_ns = int(quota.window_ms * 1e6)
    rate = allowance.rates[0]
    rate.t0_ns = now_ns
    rate.share_ppm = ppm(quota.share)
    rate.burst_ns = int(quota.burst_ms * 1e6)


def ppm(per_cent: float) -> int:
    """Convert per cent to millionths. ValueError outside of 0 to 100."""
    if not 0 <= per_cent <= 100:
        raise ValueError(f"not a share of a device: {per_cent} %")
    return round(per_cent * PPM / 100)

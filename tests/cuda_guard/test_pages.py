"""Shared pages of a job: what they say when they are created, what does not fit, and what is read from them."""

import ctypes
import os
from contextlib import nullcontext
from pathlib import Path
from uuid import UUID

import pytest

from cuda_guard.page import (
    AUDITS,
    DEVICES,
    HOST,
    LAYOUT,
    MAGIC,
    NO_LIMIT,
    PPM,
    SLOTS,
    UNIT,
    JobPage,
    Pages,
    Quota,
    ppm,
    uuid_bytes,
)

UUIDS = [f"01234567-89ab-cdef-0123-4567890000{number:02x}" for number in range(DEVICES + 1)]
FIRST = Quota(f"GPU-{UUIDS[1]}", 3 << 30, share=12.5, limit=50, window_ms=2.5, burst_ms=7.5, context_bytes=300 << 20)
SECOND = Quota(f"MIG-{UUIDS[2]}")


def create(directory: Path, *quotas: Quota, driver: str = "/driver", host_memory: int | None = None) -> Pages:
    return Pages.create(directory, quotas or (FIRST,), Path(driver), Path("/nvml"), 12_345, host_memory)


def test_pages_say_what_a_job_may_use(tmp_path: Path) -> None:
    pages = create(tmp_path / "new" / "job", FIRST, SECOND)
    for page in (pages.policy, pages.job):
        assert (page.magic, page.layout) == (MAGIC, LAYOUT)
    assert (pages.policy.devices, pages.job.slots) == (2, SLOTS)
    assert (pages.policy.driver, pages.policy.nvml) == (b"/driver", b"/nvml") and pages.policy.host_limit == NO_LIMIT
    one, two, rest = pages.policy.allowances[:3]
    assert [bytes(found.uuid) for found in (one, two, rest)] == [UUID(UUIDS[1]).bytes, UUID(UUIDS[2]).bytes, bytes(16)]
    assert (one.memory_limit, one.context_bytes, one.window_ns) == (3 << 30, 300 << 20, 2_500_000)
    rate = one.rates[0]
    assert (rate.t0_ns, rate.share_ppm, rate.burst_ns) == (12_345, 125_000, 7_500_000)
    assert (two.memory_limit, two.rates[0].share_ppm) == (NO_LIMIT, PPM)
    job = Pages(pages.directory)
    job.policy.gate, job.job.audits = 1, 2
    assert (pages.policy.gate, pages.job.audits) == (1, 2), "they share the files"
    job.close()
    pages.close()


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_limit_may_be_zero(tmp_path: Path, limit: int) -> None:
    pages = create(tmp_path, Quota(f"GPU-{UUIDS[0]}", limit), host_memory=limit)
    assert (pages.policy.host_limit, pages.policy.allowances[0].memory_limit) == (limit, limit)
    pages.close()


def test_only_this_user_writes_and_pages_of_an_earlier_attempt_are_replaced(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        pages = create(tmp_path)
    finally:
        os.umask(mask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("policy", "job")] == [0o644, 0o600]
    pages.job.audits = 7
    os.ftruncate(pages.job_file, 2 * ctypes.sizeof(JobPage))
    pages.close()
    again = create(tmp_path)
    assert again.job.audits == 0 and not again.restore_length()
    assert not os.get_inheritable(again.job_file)
    again.close()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for driver, fits in (("/" + "d" * 254, True), ("/" + "d" * 255, False), ("driver", False)):
        with nullcontext() if fits else pytest.raises(ValueError, match="not a path that fits into a page"):
            create(tmp_path, driver=driver).close()
    many = [Quota(f"GPU-{uuid}") for uuid in UUIDS]
    create(tmp_path, *many[:DEVICES]).close()
    with pytest.raises(ValueError, match="at most 16 devices, not 17"):
        create(tmp_path, *many)
    for uuid in (UUIDS[0], f"CPU-{UUIDS[0]}", "GPU-1"):
        with pytest.raises(ValueError, match="UUID"):
            uuid_bytes(uuid)


def test_shares_are_of_100_per_cent() -> None:
    assert [ppm(share) for share in (0, 0.29, 33.3333, 99.99999, 100)] == [0, 2900, 333_333, PPM, PPM]
    for share in (-0.1, 100.1, float("nan")):
        with pytest.raises(ValueError, match="not a share"):
            ppm(share)


@pytest.mark.parametrize("length", [0, 4096, ctypes.sizeof(JobPage) + 1])
def test_length_that_a_job_changed_is_restored(tmp_path: Path, length: int) -> None:
    pages = create(tmp_path)
    assert not pages.restore_length()
    os.truncate(tmp_path / "job", length)
    assert pages.restore_length() and not pages.restore_length()
    assert (tmp_path / "job").stat().st_size == ctypes.sizeof(JobPage)
    assert pages.job.magic == (0 if length == 0 else MAGIC)
    pages.close()


def test_what_a_job_writes_is_bounded_and_readable(tmp_path: Path) -> None:
    pages = create(tmp_path)
    writer = Pages(tmp_path)
    writer.job.audit[0].value, writer.job.audit[1].value = b"cuMemFoo", b"\x1b]0;\xff"
    writer.job.audits = 2
    assert pages.audited() == ["cuMemFoo", "??0??"]
    writer.job.audits = 2**32 - 1
    assert len(pages.audited()) == AUDITS
    writer.job.uses[3].memory, writer.job.uses[HOST].memory = (5 << 26) | 9, 2**64 - 1
    assert [pages.memory_used(place) for place in (0, 3, HOST)] == [0, 5 * UNIT, (2**38 - 1) * UNIT]
    writer.close()
    pages.close()


def test_page_that_is_in_use_stays_mapped(tmp_path: Path) -> None:
    pages = create(tmp_path)
    file, job = pages.job_file, pages.job
    pages.close()
    assert job.magic == MAGIC and not hasattr(pages, "job")
    with pytest.raises(OSError):
        os.fstat(file)
    pages = create(tmp_path / "other")
    policy, job_map = pages._policy_map, pages._job_map
    pages.close()
    assert policy.closed and job_map.closed

"""Guard: what a container gets of a job's pages, and jobs on several devices."""

from collections.abc import Callable
from typing import Any

import pytest

from cuda_guard.guard import PAGES_AT, PRELOAD_AT, GuardedJob
from cuda_guard.host import Host
from cuda_guard.page import Pages, Quota
from tests.cuda_guard.conftest import device_uuid
from tests.cuda_guard.guests import Bench

pytestmark = pytest.mark.cc


def test_container_can_write_its_own_page_only(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    mounts = {mount.target: mount for mount in bench.job().container_mounts(bench.guard.driver)}
    writable = {target for target, mount in mounts.items() if not mount.read_only}
    assert writable == {PAGES_AT / "job"} and PAGES_AT / "policy" in mounts
    assert mounts[PRELOAD_AT].source.read_text().splitlines()[0].endswith("libcuda.so.1")


def test_job_on_an_unknown_device_is_refused(make_bench: Callable[..., Bench]) -> None:
    with pytest.raises(ValueError, match="not a GPU of this machine"):
        make_bench().guard.admit("job", (Quota(device_uuid(7), memory=1 << 30),), in_container=False)


class Rooms:
    """Stands in for the arbiter: only the first device has room for a job that returns."""

    def __init__(self) -> None:
        self.away_from = {0, 1}

    def away(self, pages: object, device: int, away: bool) -> bool:
        (self.away_from.add if away else self.away_from.discard)(device)
        return away or device == 0


def test_job_returns_to_all_its_devices_or_to_none() -> None:
    rooms: Any = Rooms()
    job = GuardedJob(Any, (), (0, 1), Any, rooms)  # type: ignore[arg-type]
    assert not job.reserve_memory() and rooms.away_from == {0, 1}


def test_job_that_cannot_join_all_its_devices_joins_none(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, joined = make_bench(devices=2), list[int]()

    def join(self: Host, pages: Pages, place: int, *given: object) -> None:
        if place == 1:
            raise OSError("too many jobs share device 1")
        joined.append(place)

    monkeypatch.setattr(Host, "join", join)
    monkeypatch.setattr(Host, "leave", lambda self, pages: joined.clear())
    with pytest.raises(OSError, match="too many jobs"):
        bench.job()
    assert joined == [] and not list(bench.guard._directory.iterdir())


def test_pages_of_an_ended_job_are_removed(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    job = bench.job()
    assert job.pages.directory.exists()
    bench.end(job)
    assert not job.pages.directory.exists()

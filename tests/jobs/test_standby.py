"""Transfers of checkpoints, images and working directories to the standby."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.checkpoints.replicator import Replicated
from mesh.jobs import standby as standby_sync_module
from mesh.jobs.standby import StandbySync
from mesh.model.record import Commit
from mesh.model.spec import DataNeed, JobSpec
from mesh.rpc.client import PeerError
from tests.consensus.worlds import JOB, A, B, C, make_spec

WORKDIR = b"w" * 32
SPEC = make_spec(workdir=WORKDIR, workdir_holders=(A,))


def commit(seq: int, holders: tuple[bytes, ...] = ()) -> Commit:
    return Commit(seq, 3, b"%032d" % seq, None, holders, None, 0)


class Copies:
    """A replicator that records its calls and finishes when the gate opens."""

    def __init__(self) -> None:
        self.begun: list[tuple[bytes, bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.full = self.cut = False
        self.images: dict[tuple[bytes, bytes], bool] = {}

    async def bring_image(self, peer: bytes, image: bytes) -> bool:
        """Return True from the second call for this image on."""
        asked = (peer, image) in self.images
        self.images[peer, image] = asked
        return asked

    async def bring_data(self, peer: bytes, data: bytes) -> bool:
        """Return True from the second call for this data set on."""
        return await self.bring_image(peer, data)

    async def replicate(self, manifest: bytes, chosen: object, fallback: tuple[bytes, ...], want: int) -> Replicated:
        self.begun.append((fallback[0], manifest))
        await self.gate.wait()
        if self.cut:
            raise PeerError("it does not answer")
        return Replicated(() if self.full else fallback, "it is full" if self.full else "", ())


@pytest.fixture
def copies() -> Copies:
    return Copies()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def warm(standby_sync: StandbySync, standby: bytes | None, last: Commit | None, spec: JobSpec = SPEC) -> bool:
    standby_sync.look(JOB, spec, standby, last)
    await settle()
    return standby_sync.is_warm(JOB, spec, standby, last)


async def test_standby_receives_the_working_directory_once_and_each_checkpoint(copies: Copies) -> None:
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]
    assert not await warm(standby_sync, None, commit(1)) and not await warm(standby_sync, B, None) and not copies.begun
    assert await warm(standby_sync, B, commit(1)) and await warm(standby_sync, B, commit(1))
    assert not standby_sync.is_warm(JOB, SPEC, B, commit(2)) and await warm(standby_sync, B, commit(2))
    assert copies.begun == [
        (B, WORKDIR),
        (B, commit(1).manifest),
        (B, commit(2).manifest),
    ]


async def test_standby_fetches_the_image_and_is_warm_when_it_has_it(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_sync_module, "IMAGE_S", 0.0)
    standby_sync, spec = StandbySync(copies), make_spec(image="tool", image_id=b"i" * 32)  # type: ignore[arg-type]
    assert not await warm(standby_sync, B, commit(1), spec) and copies.begun == [(B, commit(1).manifest)]
    assert await warm(standby_sync, B, commit(1), spec) and copies.images == {(B, b"i" * 32): True}
    assert not standby_sync.is_warm(JOB, spec, C, commit(1, holders=(C,)))
    standby_sync.forget(JOB)
    assert not standby_sync.is_warm(JOB, spec, B, commit(1, holders=(B,)))


async def test_standby_fetches_data_sets_and_is_warm_when_it_has_them(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_sync_module, "IMAGE_S", 0.0)
    needs = (DataNeed("ada/pictures", b"d" * 32), DataNeed("offered"))
    standby_sync, spec = StandbySync(copies), make_spec(data=needs)  # type: ignore[arg-type]
    assert not await warm(standby_sync, B, commit(1), spec) and copies.begun == [(B, commit(1).manifest)]
    assert await warm(standby_sync, B, commit(1), spec) and copies.images == {(B, b"d" * 32): True}


async def test_only_a_settled_checkpoint_of_a_running_job_is_copied(copies: Copies) -> None:
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]

    def runner(state: str = "running", settled: int = 1) -> Any:
        record = SimpleNamespace(commit=commit(1), settled=settled)
        return SimpleNamespace(state=state, record=record, spec=SPEC, next_placement=SimpleNamespace(standby=B))

    for other in (None, runner(settled=0), runner("vacating")):
        standby_sync.follow(JOB, other)
        await settle()
    assert not copies.begun
    standby_sync.follow(JOB, runner())
    await settle()
    assert copies.begun == [(B, WORKDIR), (B, commit(1).manifest)]


async def test_holder_of_the_checkpoint_receives_no_copy(copies: Copies) -> None:
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]
    assert await warm(standby_sync, A, commit(1, holders=(A, C))) and not copies.begun
    assert await warm(standby_sync, C, commit(1, holders=(A, C))) and copies.begun == [(C, WORKDIR)]


async def test_standby_receives_one_copy_at_a_time_then_the_newest(copies: Copies) -> None:
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]
    copies.gate.clear()
    for seq in range(1, 6):
        assert not await warm(standby_sync, A, commit(seq))
    copies.gate.set()
    await settle()
    assert await warm(standby_sync, A, commit(5)) and [what[1] for what in copies.begun] == [
        commit(1).manifest,
        commit(5).manifest,
    ]


async def test_copy_stops_for_a_former_standby_and_at_notice(copies: Copies) -> None:
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]
    copies.gate.clear()
    await warm(standby_sync, A, commit(1))
    await warm(standby_sync, B, commit(1, holders=(B,)))
    copies.gate.set()
    assert await warm(standby_sync, B, commit(1, holders=(B,)))
    copies.gate.clear()
    await warm(standby_sync, A, commit(2))
    standby_sync.stop(JOB)
    await settle()
    copies.gate.set()
    await settle()
    assert not standby_sync.is_warm(JOB, SPEC, A, commit(2))
    await standby_sync.close()


@pytest.mark.parametrize("trouble", ["full", "cut"])
async def test_failed_copy_is_tried_again_later(copies: Copies, trouble: str) -> None:
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]
    setattr(copies, trouble, True)
    assert not await warm(standby_sync, B, commit(1))
    count = len(copies.begun)
    assert not await warm(standby_sync, B, commit(2)) and len(copies.begun) == count, (
        "a failed copy is not retried at once"
    )
    setattr(copies, trouble, False)
    assert await warm(standby_sync, C, commit(2)), "the failure does not count against another standby"
    standby_sync.forget(JOB)
    assert not standby_sync.is_warm(JOB, SPEC, C, commit(2)) and await warm(standby_sync, B, commit(2))


async def test_jobs_of_one_node_are_copied_in_turn(copies: Copies) -> None:
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]
    copies.gate.clear()
    standby_sync.look(JOB, SPEC, A, commit(1))
    standby_sync.look(b"k" * 16, SPEC, A, commit(1))
    await settle()
    assert len(copies.begun) == 1
    copies.gate.set()
    await settle()
    assert len(copies.begun) == 2


async def test_checkpoint_is_held_where_it_was_copied(copies: Copies) -> None:
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]
    assert standby_sync.holders(JOB, None) == frozenset()
    assert await warm(standby_sync, B, commit(1)) and await warm(standby_sync, C, commit(2))
    standby_sync.look(b"k" * 16, SPEC, A, commit(2))
    await settle()
    assert standby_sync.holders(JOB, commit(2)) == {C}


async def test_failed_copy_is_tried_again_after_its_pause(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(standby_sync_module.time, "monotonic", lambda: clock)
    standby_sync = StandbySync(copies)  # type: ignore[arg-type]
    copies.cut = True
    for passed, begun in ((0.0, 1), (standby_sync_module.AGAIN_S - 1, 1), (1.0, 2)):
        clock += passed
        await warm(standby_sync, B, commit(1))
        assert len(copies.begun) == begun


async def test_forgotten_job_is_brought_everything_again(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_sync_module, "IMAGE_S", 0.0)
    needs, image = (DataNeed("ada/pictures", b"d" * 32),), b"i" * 32
    spec = make_spec(workdir=WORKDIR, workdir_holders=(A,), image="tool", image_id=image, data=needs)
    standby_sync, other = StandbySync(copies), b"k" * 16  # type: ignore[arg-type]
    for job in (JOB, other):
        for _ in range(2):
            standby_sync.look(job, spec, B, commit(1))
            await settle()
        assert standby_sync.is_warm(job, spec, B, commit(1))
    standby_sync.forget(JOB)
    assert standby_sync.is_warm(other, spec, B, commit(1)) and standby_sync.holders(JOB, commit(1)) == frozenset()
    copies.begun.clear()
    copies.images.clear()
    standby_sync.look(JOB, spec, B, commit(1))
    await settle()
    assert copies.begun == [(B, WORKDIR), (B, commit(1).manifest)] and set(copies.images) == {
        (B, image),
        (B, b"d" * 32),
    }


async def test_standby_is_asked_now_and_then_whether_it_has_image_and_data(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr(standby_sync_module.time, "monotonic", lambda: clock)
    for spec in (make_spec(image="tool", image_id=b"i" * 32), make_spec(data=(DataNeed("ada/pictures", b"d" * 32),))):
        standby_sync = StandbySync(copies)  # type: ignore[arg-type]
        for passed, ready in ((0.0, False), (standby_sync_module.IMAGE_S - 1, False), (1.0, True)):
            clock += passed
            assert await warm(standby_sync, B, commit(1), spec) is ready

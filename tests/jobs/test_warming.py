"""What is brought to the heir, and that nothing depends on it."""

import asyncio

import pytest

from mesh.api.peer import PeerError
from mesh.jobs import warming as warming_module
from mesh.jobs.courier import Replicated
from mesh.jobs.ledger import Commit
from mesh.jobs.spec import JobSpec
from mesh.jobs.warming import Warming
from tests.jobs.worlds import JOB, A, B, C, make_spec

WORKDIR = b"w" * 32
SPEC = make_spec(workdir=WORKDIR, workdir_holders=(A,))


def commit(seq: int, holders: tuple[bytes, ...] = ()) -> Commit:
    return Commit(seq, 3, b"%032d" % seq, None, holders, None, 0)


class Copies:
    """A courier that notes what it is given, and ends when it may."""

    def __init__(self) -> None:
        self.begun: list[tuple[bytes, bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.full = self.cut = False
        self.images: dict[tuple[bytes, bytes], bool] = {}

    async def bring_image(self, peer: bytes, image: bytes) -> bool:
        """It has it when it is asked for the second time."""
        asked = (peer, image) in self.images
        self.images[peer, image] = asked
        return asked

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


async def warm(warming: Warming, heir: bytes | None, last: Commit | None, spec: JobSpec = SPEC) -> bool:
    warming.look(JOB, spec, heir, last)
    await settle()
    return warming.is_warm(JOB, spec, heir, last)


async def test_the_heir_gets_the_working_directory_once_and_each_checkpoint(copies: Copies) -> None:
    warming = Warming(copies)  # type: ignore[arg-type]
    assert not await warm(warming, None, commit(1)) and not await warm(warming, B, None) and not copies.begun
    assert await warm(warming, B, commit(1)) and await warm(warming, B, commit(1))
    assert not warming.is_warm(JOB, SPEC, B, commit(2)) and await warm(warming, B, commit(2))
    assert copies.begun == [
        (B, WORKDIR),
        (B, commit(1).manifest),
        (B, commit(2).manifest),
    ]


async def test_the_heir_fetches_the_image_beside_the_copies_and_is_warm_when_it_has_it(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming_module, "IMAGE_S", 0.0)
    warming, spec = Warming(copies), make_spec(image="tool", image_id=b"i" * 32)  # type: ignore[arg-type]
    assert not await warm(warming, B, commit(1), spec) and copies.begun == [(B, commit(1).manifest)]
    assert await warm(warming, B, commit(1), spec) and copies.images == {(B, b"i" * 32): True}
    assert not warming.is_warm(JOB, spec, C, commit(1, holders=(C,)))
    warming.forget(JOB)
    assert not warming.is_warm(JOB, spec, B, commit(1, holders=(B,)))


async def test_who_holds_it_already_gets_nothing(copies: Copies) -> None:
    warming = Warming(copies)  # type: ignore[arg-type]
    assert await warm(warming, A, commit(1, holders=(A, C))) and not copies.begun
    assert await warm(warming, C, commit(1, holders=(A, C))) and copies.begun == [(C, WORKDIR)]


async def test_one_copy_at_a_time_then_the_newest(copies: Copies) -> None:
    warming = Warming(copies)  # type: ignore[arg-type]
    copies.gate.clear()
    for seq in range(1, 6):
        assert not await warm(warming, A, commit(seq))
    copies.gate.set()
    await settle()
    assert await warm(warming, A, commit(5)) and [what[1] for what in copies.begun] == [
        commit(1).manifest,
        commit(5).manifest,
    ]


async def test_a_copy_for_a_former_heir_or_of_a_job_with_notice_is_given_up(copies: Copies) -> None:
    warming = Warming(copies)  # type: ignore[arg-type]
    copies.gate.clear()
    await warm(warming, A, commit(1))
    await warm(warming, B, commit(1, holders=(B,)))
    copies.gate.set()
    assert await warm(warming, B, commit(1, holders=(B,)))
    copies.gate.clear()
    await warm(warming, A, commit(2))
    warming.stop(JOB)
    await settle()
    copies.gate.set()
    await settle()
    assert not warming.is_warm(JOB, SPEC, A, commit(2))
    await warming.close()


@pytest.mark.parametrize("trouble", ["full", "cut"])
async def test_a_copy_that_fails_is_tried_again_later(copies: Copies, trouble: str) -> None:
    warming = Warming(copies)  # type: ignore[arg-type]
    setattr(copies, trouble, True)
    assert not await warm(warming, B, commit(1))
    count = len(copies.begun)
    assert not await warm(warming, B, commit(2)) and len(copies.begun) == count, "not at once"
    setattr(copies, trouble, False)
    assert await warm(warming, C, commit(2)), "another heir is not to blame"
    warming.forget(JOB)
    assert not warming.is_warm(JOB, SPEC, C, commit(2)) and await warm(warming, B, commit(2))


async def test_jobs_of_one_node_take_turns(copies: Copies) -> None:
    warming = Warming(copies)  # type: ignore[arg-type]
    copies.gate.clear()
    warming.look(JOB, SPEC, A, commit(1))
    warming.look(b"k" * 16, SPEC, A, commit(1))
    await settle()
    assert len(copies.begun) == 1
    copies.gate.set()
    await settle()
    assert len(copies.begun) == 2

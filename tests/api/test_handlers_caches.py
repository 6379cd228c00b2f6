"""Write-back of caches: only what most witnesses of a job that is done state comes into them."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mesh.api.handlers.caches import CacheWriter
from mesh.checkpoints.witness_group import Words
from mesh.consensus.effects import WitnessRecord
from mesh.data.cache_files import Grown
from mesh.data.manifest import FetchFailed
from mesh.model.record import JobRecord, Outcome
from mesh.util.errors import MeshError
from tests.consensus.worlds import A, B, C, make_witness

JOB, MADE_UP = b"j" * 16, b"made up by a member"
DONE = Outcome("done", "exit 0", 0, b"result", (A,), 1)


def record(outcome: Outcome | None) -> WitnessRecord:
    final = outcome is not None
    return msgspec.structs.replace(make_witness().witness_record, record=JobRecord(outcome=outcome), final=final)


class World:
    """A node that submitted a job. `restored`: manifest and prefix of what was taken over, by the name of the cache."""

    def __init__(self, *outcomes: Outcome | None) -> None:
        self.words = Words(dict(zip((A, B, C), map(record, outcomes), strict=False)))
        self.restored: dict[str, tuple[bytes, str]] = {}
        self.problem: Exception | None = None
        jobs: Any = SimpleNamespace(vouching=SimpleNamespace(words=self._words))
        lookup: Any = SimpleNamespace(find_job=lambda text: "status", restore=self._restore)
        library: Any = SimpleNamespace(write_back=self._write_back)
        self.writer = CacheWriter(jobs, lookup, library)

    async def _words(self, job: bytes) -> Words:
        return self.words

    async def _restore(self, status: object, manifest: bytes, holders: object, prefix: str, new: Path) -> None:
        self.restored[new.name] = (manifest, prefix)

    async def _write_back(self, name: str, restore: Callable[[Path], Awaitable[None]]) -> Grown:
        if self.problem is not None:
            raise self.problem
        await restore(Path(name))
        return Grown(int(name != "pip"), 1 << 20)


async def test_result_that_most_witnesses_state_is_taken_over() -> None:
    world = World(DONE, DONE, None)
    claimed = msgspec.structs.replace(DONE, manifest=MADE_UP)
    assert await world.writer.write_back(JOB, "pip,torch", claimed) == "torch has 1 new file with 1.0 MiB"
    assert world.restored == {"pip": (b"result", "cache.pip"), "torch": (b"result", "cache.torch")}


@pytest.mark.parametrize("outcomes", [(None, None, None), (DONE, None, None), ()])
async def test_status_alone_counts_for_nothing(outcomes: tuple[Outcome | None, ...]) -> None:
    world = World(*outcomes)
    with pytest.raises(MeshError, match="witnesses"):
        await world.writer.write_back(JOB, "pip", DONE)
    assert not world.restored


@pytest.mark.parametrize("kind", ["failed", "cancelled"])
async def test_job_that_is_not_done_adds_nothing(kind: Any) -> None:
    world = World(*[msgspec.structs.replace(DONE, kind=kind)] * 3)
    assert await world.writer.write_back(JOB, "pip", DONE) == "" and not world.restored


async def test_failure_names_the_cache() -> None:
    world = World(DONE, DONE, DONE)
    world.problem = FetchFailed("no node gives it")
    with pytest.raises(MeshError, match="cache pip: no node gives it"):
        await world.writer.write_back(JOB, "pip", DONE)

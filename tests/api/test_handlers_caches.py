"""Write-back of caches: only the result of a job that is done comes into them."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mesh.api.handlers.caches import CacheWriter
from mesh.data.cache_files import MAX_ENTRIES, Grown
from mesh.data.manifest import FetchFailed
from mesh.model.record import Outcome
from mesh.model.spec import DataNeed
from mesh.util.errors import MeshError
from tests.consensus.worlds import A

JOB = b"j" * 16
DONE = Outcome("done", "exit 0", 0, b"result", (A,), 1)


class World:
    """A node that submitted a job. `restored`: manifest and prefix of what was taken over, by the name of the cache.

    `fetched`: manifests that were here before other adds had to wait for them.
    """

    def __init__(self) -> None:
        self.restored: dict[str, tuple[bytes, str]] = {}
        self.fetched: list[bytes] = []
        self.problem: Exception | None = None
        lookup: Any = SimpleNamespace(find_job=lambda text: "status", fetch=self._fetch, restore=self._restore)
        lookup.spec_of = self._spec_of
        library: Any = SimpleNamespace(write_back=self._write_back)
        self.writer = CacheWriter(lookup, library)

    async def _fetch(self, status: object, manifest: bytes, holders: object) -> None:
        self.fetched.append(manifest)

    async def _restore(
        self, status: object, manifest: bytes, holders: object, prefix: str, new: Path, *, part: int, most: int
    ) -> None:
        assert manifest in self.fetched and part == 2 and most == MAX_ENTRIES
        self.restored[new.name] = (manifest, prefix)

    async def _spec_of(self, status: object) -> Any:
        return SimpleNamespace(data=(DataNeed("ada/torch", b"version", cache=True), DataNeed("pip", cache=True)))

    async def _write_back(self, name: str, restore: Callable[[Path], Awaitable[None]], had: bytes) -> Grown:
        assert had == {"torch": b"version", "pip": b""}[name]
        if self.problem is not None:
            raise self.problem
        await restore(Path(name))
        return Grown(int(name != "pip"), 1 << 20)


async def test_each_cache_gets_its_own_part_of_the_result() -> None:
    world = World()
    assert await world.writer.write_back(JOB, "pip,torch", DONE) == "torch has 1 new file with 1.0 MiB"
    assert world.restored == {"pip": (b"result", "cache.pip"), "torch": (b"result", "cache.torch")}


@pytest.mark.parametrize("kind", ["failed", "cancelled"])
async def test_job_that_is_not_done_adds_nothing(kind: Any) -> None:
    world = World()
    assert await world.writer.write_back(JOB, "pip", msgspec.structs.replace(DONE, kind=kind)) == ""
    assert not world.restored


async def test_failure_names_the_cache() -> None:
    world = World()
    world.problem = FetchFailed("no node gives it")
    with pytest.raises(MeshError, match="cache pip: no node gives it"):
        await world.writer.write_back(JOB, "pip", DONE)

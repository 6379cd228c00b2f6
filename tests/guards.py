"""A node's GPU guard as the daemon constructs it, and GPUs for it."""

import asyncio
from pathlib import Path
from uuid import UUID

import pytest

from cuda_guard.build import Libraries, libraries
from mesh.gpus.guard import Bypass, NodeGuard
from mesh.gpus.receipts import DeviceUse
from placement.advert import Gpu
from tests.fake.build import locked

BUILT = Path(__file__).parents[1] / "build" / "guard"
WAIT_S = 60.0


def gpu(uuid: UUID, vram_mib: int = 16_384) -> Gpu:
    return Gpu(f"GPU-{uuid}", "Fake H200", vram_mib)


def built() -> Libraries:
    """Return the guard's libraries as a daemon gets them, compiled once for all workers and runs."""
    with locked(BUILT):
        return libraries(BUILT)


def use_driver(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let a guard find the driver in this directory, and its own libraries already built."""
    patch.setenv("LD_LIBRARY_PATH", str(directory))
    patch.setattr("mesh.gpus.guard.libraries", built)


class Watched:
    """A running guard that records its reports."""

    def __init__(self, directory: Path, gpus: tuple[Gpu, ...], bypass: Bypass = "pause") -> None:
        self.told: list[str] = []
        self.warned: list[str] = []
        self.found: list[str] = []
        self.used: list[DeviceUse] = []
        self.guard = NodeGuard(
            directory,
            gpus,
            self.told.append,
            self.warned.append,
            bypass=bypass,
            found=lambda tenant, text: self.found.append(text),
            ended=lambda tenant, used: self.used.extend(used),
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Watched":
        self._task = asyncio.create_task(self.guard.run(), name="guard")
        async with asyncio.timeout(10 * WAIT_S):  # the libraries may have to be compiled
            while not self.told and not self._task.done():
                await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.guard.close()

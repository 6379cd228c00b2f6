"""A guest that stands in for another one: what it does not do its own way, the other does."""

from pathlib import Path

from mesh.execution.engine import Exit, Guest
from mesh.execution.session import Session
from mesh.rpc.frames import Order


class WrappedGuest:
    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    async def wait(self) -> Exit:
        return await self._guest.wait()

    async def catches_term(self) -> bool:
        return await self._guest.catches_term()

    async def terminate(self) -> bool:
        return await self._guest.terminate()

    async def pids(self) -> frozenset[int]:
        return await self._guest.pids()

    async def stands_still(self) -> bool:
        return await self._guest.stands_still()

    def allow_until(self, boot_s: float) -> None:
        self._guest.allow_until(boot_s)

    async def open_session(self, order: Order) -> Session:
        return await self._guest.open_session(order)

    async def dump(self, directory: Path) -> str:
        return await self._guest.dump(directory)

    async def kill(self) -> None:
        await self._guest.kill()

"""Guest starts that were cancelled: the work in threads and other processes finishes and is then undone."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from mesh.execution.engine import Guest

log = logging.getLogger(__name__)
G = TypeVar("G", bound=Guest)


class Starts:
    """Cancellable starts of one engine's guests."""

    def __init__(self) -> None:
        self._undoing: set[asyncio.Task[None]] = set()

    async def finish(self, start: Coroutine[Any, Any, G], job: str) -> G:
        """Return the result of `start`. If cancelled, undo it in the background."""
        starting = asyncio.create_task(start, name=f"start {job[:8]}")
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            undoing = asyncio.create_task(_undo(starting, job), name=f"undo {job[:8]}")
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise

    async def close(self, within_s: float) -> None:
        """Wait up to `within_s` seconds for starts that are being undone."""
        if self._undoing:
            _, late = await asyncio.wait(self._undoing, timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def _undo(starting: "asyncio.Task[G]", job: str) -> None:
    try:
        guest = await starting
    except Exception as error:
        log.info("job %s: a cancelled start failed: %s", job[:8], error)
        return
    try:
        await guest.kill()
    except Exception:
        log.exception("job %s: a cancelled start could not be undone", job[:8])

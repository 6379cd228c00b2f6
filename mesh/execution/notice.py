"""Notice to a guest that it must leave, if any of its processes reacts to notices."""

import asyncio
from collections.abc import Callable

from mesh.execution.engine import Guest

LOOKS, LOOK_S = 200, 0.005  # polls until a guest is stopped: a process takes milliseconds, a container a little longer


async def give_notice(guest: Guest, until: float, watches: Callable[[], bool]) -> bool:
    """Return whether the guest reacts to notices: it got the SIGTERM that it catches, or it `watches` for them another way.

    A guest that has just started may install its handler at any moment. So it is stopped and checked once more: one that still
    does not react stays stopped, so that it does nothing more before it is killed; any other may run `until` then.
    """
    if await guest.terminate() or watches():
        return True
    guest.allow_until(0.0)
    for _ in range(LOOKS):
        if await guest.stands_still():
            break
        await asyncio.sleep(LOOK_S)
    heeds = await guest.terminate() or watches()
    if heeds:
        guest.allow_until(until)
    return heeds

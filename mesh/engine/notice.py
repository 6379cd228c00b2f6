"""Telling a guest that it must go, if anything in it would hear that."""

import asyncio
from collections.abc import Callable

from mesh.engine.engine import Guest

LOOKS, LOOK_S = 200, 0.005  # until a guest stands still: it takes a process milliseconds, a container some more


async def give_notice(guest: Guest, until: float, watches: Callable[[], bool]) -> bool:
    """Whether it heeds notices: it has been sent the SIGTERM that it catches, or it `watches` for them in its own way.

    One that has just started begins to heed any moment. So it is looked at once more while it stands still: one that does not
    heed then is left like that, to be killed without having done anything since; any other may run `until` then.
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

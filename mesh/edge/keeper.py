"""Holds the edge to what the daemon knows: the rate that departing checkpoints need, and whether streams say of which class they
are.
"""

import asyncio
import time
from collections.abc import Callable

from ckptstore.pacing import TICK_S
from mesh.api.wire import Wire
from mesh.edge.edge import Edge
from mesh.edge.tc import EdgeError
from mesh.jobs.departures import Departures

LOOK_S = 15.0  # at whether everything is still there; ours


async def keep(edge: Edge, wire: Wire, departures: Departures, tell: Callable[[str], None]) -> None:
    """As long as the daemon lives. `tell`: the owner, of what others did to the edge."""
    look_at = time.monotonic() + LOOK_S
    while True:
        wire.classed = edge.watches
        try:
            need = departures.need_bps()
            if edge.needs(need):
                await asyncio.to_thread(edge.give, need)
            if time.monotonic() >= look_at:
                for text in await asyncio.to_thread(edge.look):
                    tell(f"network edge: {text}")
                look_at = time.monotonic() + LOOK_S
        except EdgeError as error:
            tell(f"network edge: {error}")
            look_at = time.monotonic()
        await asyncio.sleep(TICK_S)

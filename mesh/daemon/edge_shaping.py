"""Holds the edge to what the daemon knows: the rate that departing checkpoints need, and whether streams say of which class they
are.
"""

import asyncio
import time
from collections.abc import Callable

from ckptstore.pacing import TICK_S
from mesh.checkpoints.departure_transfers import Departures
from mesh.network.edge import Edge
from mesh.network.tc import EdgeError
from mesh.rpc.pacing import Wire

LOOK_S = 15.0  # between two checks that everything is still attached (own choice)


async def keep(edge: Edge, wire: Wire, departures: Departures, tell: Callable[[str], None]) -> None:
    """Shape until cancelled. `tell` reports to the owner what others changed."""
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

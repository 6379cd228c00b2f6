"""One membership node of campus-mesh for benchmarks. Prints the status changes of other nodes.

Lines: `up`, `joined NICK`, `dead NICK`, `left NICK`, `suspect NICK`. On SIGTERM it leaves the mesh.
"""

import asyncio
import signal
import sys
from pathlib import Path

from membership.config import SwimConfig
from membership.effects import MemberChanged
from membership.events import EventsLost
from membership.identity import Identity
from membership.node import MembershipNode
from membership.trust import TrustStore


async def main() -> None:
    state, host, port, *seeds = sys.argv[1:]
    directory = Path(state)
    trust = TrustStore((directory / "genesis").read_bytes())
    chain = (directory / "chain").read_bytes()
    node = MembershipNode(
        Identity.load(directory / "node.key"),
        trust,
        chain,
        SwimConfig.lan(),
        directory / "gossip",
        bind_host=host,
        port=int(port),
        seeds=seeds,
    )
    events = node.subscribe()
    gone = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, gone.set)
    await node.start()
    print("up", flush=True)
    telling = asyncio.create_task(tell(node, events), name="tell")
    await gone.wait()
    await node.leave()
    telling.cancel()
    await node.stop()


async def tell(node: MembershipNode, events: object) -> None:
    words = {"alive": "joined", "dead": "dead", "left": "left", "suspect": "suspect", "unreachable": "suspect"}
    while True:
        event = await events.get()  # type: ignore[attr-defined]
        if isinstance(event, EventsLost):
            print("lost-events", flush=True)
        if isinstance(event, MemberChanged) and event.node != node.identity.node_id and event.state != event.was:
            nick = next(view.nick for view in node.members() if view.node_id == event.node)
            print(f"{words[event.state]} {nick}", flush=True)


asyncio.run(main())

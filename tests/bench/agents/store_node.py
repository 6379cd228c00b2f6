"""One node's store behind its real API, for benchmarks: nothing else of a daemon runs.

    python store_node.py STATE STORE RATE

STATE lies beside the other members' (`mesh.stack.Stack.found` makes them). Connections are paced at RATE bytes a second each, if
it is not 0. Besides the API there is `PUT /sink`, with TLS and without, which throws away what comes. Prints one line of JSON
when it listens; ends when its standard input does.
"""

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[3]))

from ckptstore.store import Store
from membership.envelope import open_envelope
from membership.identity import Identity
from membership.trust import TrustStore
from mesh.api.auth import Gatekeeper
from mesh.api.peer import READ_BYTES
from mesh.api.peers import PeerApi
from mesh.api.refusals import Refusals
from mesh.api.streams import taken
from mesh.api.tls import server_context
from mesh.api.wire import Wire
from mesh.layout import Layout

SO_MAX_PACING_RATE = 47  # not in Python's socket module


class Nowhere:
    """Stands in for a receiver."""

    def feed(self, data: Any) -> int:
        return 0

    def finish(self) -> int:
        return 0

    keep = abort = finish


async def sink(request: web.Request) -> web.Response:
    await taken(request.content, Nowhere())  # type: ignore[arg-type]
    return web.Response()


def listening(rate: int) -> socket.socket:
    """A socket whose connections inherit the pace."""
    made = socket.socket()
    if rate:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")  # bbr misses a pace by up to 13 %
        made.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
    made.bind(("127.0.0.1", 0))
    return made


def open_store(state: Path, directory: Path) -> tuple[Identity, TrustStore, Store]:
    """A member's key, all members, and its store."""
    layout = Layout(state)
    identity, trust = Identity.load(layout.key), TrustStore(layout.genesis.read_bytes())
    for each in state.parent.iterdir():
        trust.admit_chain(Layout(each).chain.read_bytes(), time.time())
    return identity, trust, Store(directory, lambda sealed: open_envelope(sealed, trust.mesh_id, "manifest"))


async def main() -> None:
    state, directory, rate = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    identity, trust, store = open_store(state, directory)
    context, fingerprint = server_context(Layout(state).tls, identity.seed, state.name)
    jobs = SimpleNamespace(courier=SimpleNamespace(refusals=Refusals()))
    daemon: Any = SimpleNamespace(store=store, jobs=jobs, wire=Wire())
    app = PeerApi(daemon, Gatekeeper(identity.node_id, trust.mesh_id, trust)).application()
    app.add_routes([web.put("/sink", sink)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, read_bufsize=READ_BYTES)
    await runner.setup()
    sockets = [listening(rate), listening(rate)]
    for made, secured in zip(sockets, (context, None), strict=True):
        await web.SockSite(runner, made, ssl_context=secured).start()
    ports = [made.getsockname()[1] for made in sockets]
    print(json.dumps({"port": ports[0], "open_port": ports[1], "fingerprint": fingerprint.hex()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()
    store.close()


if __name__ == "__main__":
    asyncio.run(main())

"""One node's store behind its real API, for benchmarks, without the rest of a daemon.

    python store_node.py STATE STORE RATE

STATE lies beside those of the other members (`mesh.daemon.stack.Stack.found` makes them). Each connection is paced at RATE
bytes a second, unless it is 0. The API also has `PUT /sink`, with TLS and without, which discards the body. Prints one line of
JSON when it listens, and ends when its standard input ends.
"""

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[3]))

from ckptstore.store import Store
from membership.envelope import open_envelope
from membership.identity import Identity
from membership.trust import TrustStore
from mesh.api.handlers.peers import PeerHandlers
from mesh.daemon.layout import Layout
from mesh.rpc.pacing import Wire
from mesh.rpc.refusals import Refusals
from mesh.rpc.server import READ_BYTES, PeerServer

SO_MAX_PACING_RATE = 47  # not in Python's socket module


async def sink(request: web.Request) -> web.Response:
    async for _ in request.content.iter_any():
        pass
    return web.Response()


def listening(rate: int) -> socket.socket:
    """Return a listening socket whose connections inherit the pacing rate."""
    made = socket.socket()
    if rate:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")  # bbr misses a pacing rate by up to 13 %
        made.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
    made.bind(("127.0.0.1", 0))
    return made


def open_store(state: Path, directory: Path) -> tuple[Identity, TrustStore, Store]:
    """Return a member's key, all members, and its store."""
    layout = Layout(state)
    identity, trust = Identity.load(layout.key), TrustStore(layout.genesis.read_bytes())
    for each in state.parent.iterdir():
        trust.admit_chain(Layout(each).chain.read_bytes(), time.time())
    return identity, trust, Store(directory, lambda sealed: open_envelope(sealed, trust.mesh_id, "manifest"))


async def main() -> None:
    state, directory, rate = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    identity, trust, store = open_store(state, directory)
    replicator = SimpleNamespace(refusals=Refusals(), bandwidth=Mock())
    jobs: Any = SimpleNamespace(replicator=replicator, vouching=SimpleNamespace(judge=AsyncMock(return_value=True)))
    absent = Mock(credentials=trust.credentials(identity.node_id, time.time()))  # so that copies are the user's own
    app = PeerHandlers(
        trust,
        absent,
        absent,
        store,
        jobs,
        absent,
        absent,
        Wire(),
        (),
        absent,
        absent,
        absent,
        absent,
        absent,
        absent,
        absent,
    ).application()
    without_tls = web.Application()
    for each in (app, without_tls):
        each.add_routes([web.put("/sink", sink)])
    server = PeerServer(app, identity, trust.mesh_id, lambda node: "")
    secured, plain = listening(rate), listening(rate)
    await server.start(secured)
    runner = web.AppRunner(without_tls, access_log=None, handler_cancellation=True, read_bufsize=READ_BYTES)
    await runner.setup()
    await web.SockSite(runner, plain).start()
    ports = [made.getsockname()[1] for made in (secured, plain)]
    print(json.dumps({"port": ports[0], "open_port": ports[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await runner.cleanup()
    store.close()


if __name__ == "__main__":
    asyncio.run(main())

"""Nodes that give pieces of blobs on real connections, and the client of a node that asks them."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from membership.identity import Identity
from mesh.images import blobs, fetcher
from mesh.rpc import client
from mesh.rpc.client import Address, PeerClient
from tests.rpc.nodes import client_of, node_named, serve


class Holder:
    """A node that gives blobs, in its `manner`. `given`: pieces."""

    def __init__(self, manner: str, routes: Mapping[str, Handler]) -> None:
        self.manner, self.given, self._routes = manner, 0, routes

    async def serve(self, identity: Identity) -> Address:
        app = web.Application()
        app.add_routes([web.post(path, handler) for path, handler in self._routes.items()])
        self._server, address = await serve(app, identity)
        return address

    async def close(self) -> None:
        await self._server.close()


H = TypeVar("H", bound=Holder)


class Holders(Generic[H]):
    """The holders of a test, by their ids. `blamed`: the first complaint about each."""

    def __init__(self) -> None:
        self.holders: dict[bytes, H] = {}
        self.blamed: dict[bytes, str] = {}
        self._peers: list[PeerClient] = []

    async def serve(self, **holders: H) -> tuple[PeerClient, list[bytes]]:
        """Return a client that reaches these holders, and their ids. Names are one letter."""
        addresses = {}
        for name, holder in holders.items():
            node = node_named(name)
            self.holders[node.node_id] = holder
            addresses[node.node_id] = await holder.serve(node)
        peers = await client_of(addresses)
        self._peers.append(peers)
        return peers, list(addresses)

    def blame(self, node: bytes, what: str) -> None:
        self.blamed.setdefault(node, what)

    async def close(self) -> None:
        for peers in self._peers:
            await peers.close()
        for holder in self.holders.values():
            await holder.close()


def hurry(monkeypatch: pytest.MonkeyPatch, piece_s: float) -> None:
    """Have the fetcher wait less, and leave no part of the disk free."""
    monkeypatch.setattr(fetcher, "RETRY_S", 0.05)
    monkeypatch.setattr(fetcher, "PIECE_S", piece_s)
    monkeypatch.setattr(client, "IDLE_S", piece_s)
    monkeypatch.setattr(blobs, "SPARE_BYTES", 0)

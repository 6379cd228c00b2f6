"""A checkpoint fetched from several real holders, of whom some lie, break off, stand still, or have not got it all."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from ckptstore.errors import DiskFull
from ckptstore.questions import decode_order
from ckptstore.receiver import Receiver
from ckptstore.store import SavedManifest, Store
from membership.identity import Identity
from mesh.api import streams
from mesh.api.peer import Address
from mesh.api.tls import server_context
from mesh.jobs import courier as courier_module
from mesh.jobs.courier import Courier, FetchError
from tests.api.nodes import client_of
from tests.ckptstore.worlds import VAULT, open_store, read_tree, save, write_tree

HONEST, OTHER = b"h" * 32, b"o" * 32


class Holder:
    """A node that gives what the store has, in its `manner`."""

    def __init__(self, store: Store, manner: str) -> None:
        self.store, self.manner = store, manner
        self.asked = 0

    async def serve(self, directory: Path) -> Address:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post("/v1/chunks/frames", self._frames), web.get("/v1/manifests/{id}", self._manifest)])
        directory.mkdir()
        context, fingerprint = server_context(directory / "tls.pem", Identity.generate().seed, "holder")
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        return Address("127.0.0.1", self._runner.addresses[0][1], fingerprint)

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _manifest(self, request: web.Request) -> web.Response:
        return web.Response(body=self.store.sealed(bytes.fromhex(request.match_info["id"])))

    async def _frames(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        order = decode_order(await request.read())
        response = web.StreamResponse()
        await response.prepare(request)
        for number, frame in enumerate(self.store.frames(list(order.ids))):
            piece = bytearray(frame)
            if self.manner == "lies":
                piece[-1] ^= 1
            if self.manner == "ends inside a chunk" and number == len(order.ids) - 1:
                del piece[-10:]
            if self.manner == "has not got it all" and number:
                break
            await response.write(piece)
            if self.manner == "breaks off":
                assert request.transport is not None
                request.transport.abort()
                return response
            if self.manner == "stands still":
                await asyncio.Event().wait()
            if self.manner == "never ends":
                while True:
                    await response.write(piece)
                    await asyncio.sleep(0)  # writing to a connection that was shut may neither wait nor fail
        await response.write_eof()
        return response


class World:
    """Two who hold the checkpoint, the second in its manner, and a store that lacks it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.theirs, self.ours = open_store(root / "theirs"), open_store(root / "ours")
        self.holders: dict[bytes, Holder] = {}

    async def courier(self, **manners: str) -> Courier:
        names = {"honest": HONEST, "other": OTHER}
        self.holders = {names[name]: Holder(self.theirs, manner) for name, manner in manners.items()}
        found = {node: await holder.serve(self.root / node.hex()) for node, holder in self.holders.items()}
        self.peers = await client_of(found)
        return Courier(self.peers, self.ours)

    def checkpoint(self) -> SavedManifest:
        write_tree(self.root / "in", {f"{number}.bin": os.urandom(700_000) for number in range(24)})
        return save(self.theirs, self.root / "in", vault=VAULT)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.peers.close()
    for holder in world.holders.values():
        await holder.close()
    world.ours.close()
    world.theirs.close()


def restored(world: World, saved: SavedManifest) -> bool:
    world.ours.restore(saved.id, world.root / "out", prefix="ckpt", vault=VAULT)
    return read_tree(world.root / "out") == read_tree(world.root / "in")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "IDLE_S", 0.5)
    monkeypatch.setattr(courier_module, "IDLE_S", 0.5)


MANNERS = ["lies", "ends inside a chunk", "has not got it all", "breaks off", "stands still", "never ends"]


@pytest.mark.parametrize("manner", MANNERS)
async def test_what_one_holder_does_not_give_comes_from_another(manner: str, world: World, impatient: None) -> None:
    saved = world.checkpoint()
    courier = await world.courier(other=manner, honest="")
    await courier.fetch(saved.id, [OTHER, HONEST])
    assert restored(world, saved) and all(holder.asked for holder in world.holders.values())
    assert courier.refusals.counters["refused_chunks"] == int(manner in {"lies", "never ends"})
    assert not list((world.root / "ours" / "tmp").iterdir())


@pytest.mark.parametrize("manner", MANNERS)
async def test_without_another_it_is_told_why_and_nothing_shows(manner: str, world: World, impatient: None) -> None:
    saved = world.checkpoint()
    courier = await world.courier(other=manner)
    with pytest.raises(FetchError, match="chunks could not be fetched"):
        await courier.fetch(saved.id, [OTHER, HONEST])
    assert not world.ours.has(saved.id) and not list((world.root / "ours" / "tmp").iterdir())


async def test_a_disk_that_is_full_is_no_fault_of_the_holders(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(receiver: Receiver) -> int:
        receiver.abort()
        raise DiskFull("no room left")

    monkeypatch.setattr(Receiver, "keep", full)
    saved = world.checkpoint()
    courier = await world.courier(honest="", other="")
    with pytest.raises(DiskFull):
        await courier.fetch(saved.id, [OTHER, HONEST])
    assert not world.ours.has(saved.id) and not courier.refusals.counters


async def test_a_fetch_that_is_given_up_leaves_nothing_open(world: World) -> None:
    saved = world.checkpoint()
    courier = await world.courier(other="stands still")
    fetch = asyncio.create_task(courier.fetch(saved.id, [OTHER]))
    while not world.holders[OTHER].asked:
        await asyncio.sleep(0.01)
    fetch.cancel()
    await asyncio.gather(fetch, return_exceptions=True)
    async with asyncio.timeout(60):
        while list((world.root / "ours" / "tmp").iterdir()):
            await asyncio.sleep(0.01)
    assert not world.ours.has(saved.id)

"""A checkpoint fetched from several real holders; some lie, break off, hang or lack parts."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from ckptstore.errors import DiskFull, QuotaExceeded
from ckptstore.fetch import Request
from ckptstore.manifest import decode_manifest
from ckptstore.messages import decode_chunk_request
from ckptstore.pack import Location, ObjectStream, StoredObject
from ckptstore.receiver import Receiver
from ckptstore.store import SavedManifest, Store
from membership.identity import Identity
from mesh.checkpoints import replicator as replicator_module
from mesh.checkpoints.replicator import Expected, FetchError, Replicator
from mesh.rpc import parallel_fetch, streams
from mesh.rpc.client import Address
from mesh.rpc.direct import DirectBody
from tests.ckptstore.worlds import CIPHER, JOB, damage, open_store, read_tree, save, write_tree
from tests.consensus.worlds import make_spec
from tests.rpc.nodes import client_of, node_named, serve

HONEST, OTHER = node_named("h").node_id, node_named("o").node_id
OF = Expected(JOB, "ada")


class Holder:
    """A node that gives what the store has, in its `manner`, and `says_length` first."""

    def __init__(self, store: Store, manner: str, says_length: bool) -> None:
        self.store, self.manner, self.says_length = store, manner, says_length
        self.asked = 0
        self.connections: list[asyncio.Transport | None] = []

    async def serve(self, identity: Identity) -> Address:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post("/v1/chunks/frames", self._frames), web.get("/v1/manifests/{id}", self._manifest)])
        self._server, address = await serve(app, identity)
        return address

    async def close(self) -> None:
        await self._server.close()

    async def _manifest(self, request: web.Request) -> web.Response:
        if self.manner == "has lost it":
            raise web.HTTPNotFound
        if self.manner == "fails":
            raise web.HTTPServiceUnavailable
        if self.manner == "gives another manifest":
            return web.Response(body=self.store.sealed_manifest(self.store.manifests()[-1].id))
        return web.Response(body=self.store.sealed_manifest(bytes.fromhex(request.match_info["id"])))

    async def _frames(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        order = decode_chunk_request(await request.read())
        if request.transport not in self.connections:
            self.connections.append(request.transport)
        response = web.StreamResponse()
        if self.says_length:
            response.content_length = {
                "ends inside a chunk": self.store.stream_size(order.ids) - 10,
                "has not got it all": self.store.stream_size(order.ids[:1]),
                "never ends": 10**12,
            }.get(self.manner, self.store.stream_size(order.ids))
        await response.prepare(request)
        for number, frame in enumerate(self.store.stream(list(order.ids))):
            piece = bytearray(frame)
            if self.manner == "lies":
                piece[-1] ^= 1
            if self.manner == "ends inside a chunk" and number == len(order.ids) - 1:
                del piece[-10:]
            if self.manner == "has not got it all" and number:
                break
            while self.manner == "drips" and piece:
                await response.write(piece[:1])
                del piece[:1]
                await asyncio.sleep(0.01)
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
        if self.manner == "sends more after the end":
            assert request.transport is not None
            request.transport.write(bytes(1 << 20))
        return response


class World:
    """Two who hold the checkpoint, the second in its manner, and a store that lacks it."""

    def __init__(self, root: Path, says_length: bool) -> None:
        self.root, self.says_length = root, says_length
        self.theirs, self.ours = open_store(root / "theirs"), open_store(root / "ours")
        self.holders: dict[bytes, Holder] = {}

    async def replicator(self, **manners: str) -> Replicator:
        identities = {"honest": node_named("h"), "other": node_named("o")}
        self.holders, found = {}, {}
        for name, manner in manners.items():
            node = identities[name].node_id
            self.holders[node] = Holder(self.theirs, manner, self.says_length)
            found[node] = await self.holders[node].serve(identities[name])
        self.peers = await client_of(found)
        return Replicator(self.peers, self.ours)

    def checkpoint(self) -> SavedManifest:
        write_tree(self.root / "in", {f"{number}.bin": os.urandom(700_000) for number in range(24)})
        return save(self.theirs, self.root / "in", cipher=CIPHER, user="ada")


@pytest.fixture(params=[True, False], ids=["length", "chunked"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(tmp_path, request.param)
    yield world
    await world.peers.close()
    for holder in world.holders.values():
        await holder.close()
    world.ours.close()
    world.theirs.close()


def restored(world: World, saved: SavedManifest) -> bool:
    world.ours.restore(saved.id, world.root / "out", prefix="ckpt", cipher=CIPHER)
    return read_tree(world.root / "out") == read_tree(world.root / "in")


def place_of(world: World, chunk: bytes) -> Location:
    where = world.ours.index.find(chunk)
    assert where is not None
    return where


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALL_S", 0.5)
    monkeypatch.setattr(replicator_module, "IDLE_S", 0.5)


MANNERS = [
    "drips",
    "lies",
    "sends more after the end",
    "ends inside a chunk",
    "has not got it all",
    "breaks off",
    "stands still",
    "never ends",
]


async def test_manifest_of_another_job_or_user_is_not_fetched(world: World) -> None:
    saved = world.checkpoint()
    replicator = await world.replicator(honest="honest")
    for another in (Expected(b"o" * 16, "ada"), Expected(JOB, "another")):
        with pytest.raises(FetchError, match="not of this job and user"):
            await replicator.fetch(saved.id, [HONEST], another)
    assert not world.holders[HONEST].asked
    await replicator.fetch(saved.id, [HONEST], OF)
    assert restored(world, saved)


async def test_manifest_of_a_node_that_is_not_to_run_the_job_is_not_fetched(world: World) -> None:
    """A witness may have named it in the job's record."""
    saved = world.checkpoint()
    replicator = await world.replicator(honest="honest")
    signer, _ = decode_manifest(world.theirs.sealed_manifest(saved.id), world.theirs.unseal)
    spec = make_spec(not_on=(signer,))
    with pytest.raises(FetchError, match="signed by a node that the job's user does not let run it"):
        await replicator.fetch(saved.id, [HONEST], Expected.of(JOB, spec))
    assert not world.ours.manifests() and not list(world.ours.packs.iterdir())
    await replicator.fetch(saved.id, [HONEST], Expected.of(JOB, make_spec(on=(signer,))))
    assert restored(world, saved)


async def test_fetch_evades_no_quota_by_the_name_of_the_nodes_user(world: World) -> None:
    """A hostile runner signs what its job has saved, and may name any user there."""
    saved, world.ours.user, world.ours.foreign_quota_bytes = world.checkpoint(), "ada", 1 << 20
    replicator = await world.replicator(honest="honest")
    with pytest.raises(FetchError, match="not of this job and user"):
        await replicator.fetch(saved.id, [HONEST], Expected(JOB, "eve"))
    assert not world.ours.manifests() and not list(world.ours.packs.iterdir())
    world.ours.user = "eve"
    with pytest.raises(QuotaExceeded):
        await replicator.fetch(saved.id, [HONEST], OF)
    world.ours.user = "ada"
    await replicator.fetch(saved.id, [HONEST], OF)
    assert restored(world, saved) and not world.ours.foreign_bytes()


async def test_checkpoint_that_lost_a_chunk_is_fetched_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = world.checkpoint()
    replicator = await world.replicator(honest="")
    await replicator.fetch(saved.id, [HONEST], OF)
    world.holders[HONEST].asked = 0
    await replicator.fetch(saved.id, [HONEST], OF)
    assert not world.holders[HONEST].asked
    lost = world.ours.manifest(saved.id).chunks[0]
    monkeypatch.setattr(world.ours, "missing", lambda chunks: [chunk for chunk in chunks if chunk == lost])
    await replicator.fetch(saved.id, [HONEST], OF)
    assert world.holders[HONEST].asked


async def test_chunk_found_damaged_is_fetched_again(world: World) -> None:
    saved = world.checkpoint()
    replicator = await world.replicator(honest="")
    await replicator.fetch(saved.id, [HONEST], OF)
    where = place_of(world, saved.manifest.chunks[3])
    damage(world.ours.packs / f"{where.pack}.pack", where.offset + where.length - 1)
    fetch = partial(replicator.fetch, saved.id, [HONEST], OF)
    assert await replicator.mended(saved.id, fetch, lambda: restored(world, saved))
    where = place_of(world, saved.manifest.chunks[3])
    damage(world.ours.packs / f"{where.pack}.pack", where.offset + where.length - 1)
    with pytest.raises(FetchError):
        await replicator.mended(saved.id, partial(replicator.fetch, saved.id, [], OF), lambda: restored(world, saved))


async def test_fetch_keeps_its_chunks_from_being_collected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch may take longer than the age at which a pack without a manifest is removed."""
    saved = world.checkpoint()
    replicator = await world.replicator(honest="")
    accept = world.ours.accept_manifest

    def later(*given: Any) -> bytes:
        world.ours.collect(min_age_s=0, now_unix=time.time() + 1000)
        return accept(*given)

    monkeypatch.setattr(world.ours, "accept_manifest", later)
    await replicator.fetch(saved.id, [HONEST], OF)
    assert restored(world, saved)


@pytest.mark.parametrize("manner", MANNERS)
async def test_fetch_falls_back_to_other_holder(manner: str, world: World, impatient: None) -> None:
    saved = world.checkpoint()
    replicator = await world.replicator(other=manner, honest="")
    await replicator.fetch(saved.id, [OTHER, HONEST], OF)
    assert restored(world, saved) and all(holder.asked for holder in world.holders.values())
    assert replicator.refusals.counters["refused_chunks"] == int(manner in {"lies", "never ends"})
    assert not list((world.root / "ours" / "tmp").iterdir())


async def test_fetch_keeps_its_connection(world: World) -> None:
    saved = world.checkpoint()
    replicator = await world.replicator(honest="")
    await replicator.fetch(saved.id, [HONEST], OF)
    holder = world.holders[HONEST]
    assert restored(world, saved) and holder.asked > 1 and len(holder.connections) == 1


@pytest.mark.parametrize("manner", [manner for manner in MANNERS if manner != "sends more after the end"])
async def test_fetch_without_holders_reports_reason(manner: str, world: World, impatient: None) -> None:
    saved = world.checkpoint()
    replicator = await world.replicator(other=manner)
    with pytest.raises(FetchError, match="chunks could not be fetched"):
        async with asyncio.timeout(30):
            await replicator.fetch(saved.id, [OTHER, HONEST], OF)
    assert not world.ours.has(saved.id) and not list((world.root / "ours" / "tmp").iterdir())


async def test_stream_that_breaks_while_it_closes_leaves_nothing(tmp_path: Path) -> None:
    """All has come, but the connection is still to be given back, and a revocation or a cancellation ends that."""
    theirs, ours = open_store(tmp_path / "theirs"), open_store(tmp_path / "ours")
    write_tree(tmp_path / "in", {"file": os.urandom(100_000)})
    chunks = save(theirs, tmp_path / "in").manifest.chunks
    pieces = [*map(bytes, theirs.stream(chunks)), b""]

    async def read() -> bytes:
        return pieces.pop(0)

    @asynccontextmanager
    async def stream(*call: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(connection=None, content_length=None, content=SimpleNamespace(readany=read))
        raise ConnectionResetError

    peers: Any = SimpleNamespace(stream=stream, wire=SimpleNamespace(taking=nullcontext))
    receiver = ours.receive(1 << 20)
    with pytest.raises(ConnectionResetError):
        await parallel_fetch.pulled(peers, Request(OTHER, tuple(chunks)), "", b"", receiver)
    assert receiver.arrived and not ours.incoming and not list(ours.tmp.iterdir())
    theirs.close()
    ours.close()


async def test_end_inside_a_chunk_wakes_who_reads() -> None:
    """By hand, since over a socket a short body may come whole with the head."""
    transport = SimpleNamespace(set_protocol=lambda protocol: None)
    content = SimpleNamespace(read_nowait=lambda: b"", total_bytes=0, feed_eof=lambda: None)
    connection = SimpleNamespace(transport=transport, protocol=None)
    response: Any = SimpleNamespace(content=content, content_length=10, connection=connection)
    body = DirectBody(response, ObjectStream())
    reading = asyncio.create_task(body.read())
    await asyncio.sleep(0)
    body.get_buffer(-1)[:10] = bytes(10)
    body.buffer_updated(10)
    async with asyncio.timeout(20):
        assert await reading == []


@pytest.mark.parametrize("world", [True], indirect=True)
async def test_body_that_ends_inside_a_chunk_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALL_S", 3600.0)
    saved = world.checkpoint()
    replicator = await world.replicator(other="ends inside a chunk")
    with pytest.raises(FetchError, match="chunks could not be fetched"):
        async with asyncio.timeout(60):
            await replicator.fetch(saved.id, [OTHER], OF)


@pytest.mark.parametrize("world", [True], indirect=True)
async def test_holder_waits_for_a_slow_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[DirectBody] = []
    disk, take = threading.Event(), Receiver.take

    class Body(DirectBody):
        def __enter__(self) -> DirectBody:
            bodies.append(self)
            return super().__enter__()

    def slow(receiver: Receiver, objects: Iterable[StoredObject]) -> int:
        assert disk.wait(60)
        return take(receiver, objects)

    monkeypatch.setattr(parallel_fetch, "DirectBody", Body)
    monkeypatch.setattr(Receiver, "take", slow)
    saved = world.checkpoint()
    replicator = await world.replicator(honest="")
    fetch = asyncio.create_task(replicator.fetch(saved.id, [HONEST], OF))
    async with asyncio.timeout(60):
        while not bodies or bodies[0]._transport.is_reading():
            assert not bodies or len(bodies[0]._whole) <= 1
            await asyncio.sleep(0.01)
    assert len(bodies[0]._whole) == 1, "one waits while the disk has one"
    disk.set()
    await fetch
    assert restored(world, saved)


async def test_full_disk_blames_no_holder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(receiver: Receiver) -> int:
        receiver.abort()
        raise DiskFull("no room left")

    monkeypatch.setattr(Receiver, "keep", full)
    saved = world.checkpoint()
    replicator = await world.replicator(honest="", other="")
    with pytest.raises(DiskFull):
        await replicator.fetch(saved.id, [OTHER, HONEST], OF)
    assert not world.ours.has(saved.id) and not replicator.refusals.counters


async def test_cancelled_fetch_leaves_nothing_open(world: World) -> None:
    saved = world.checkpoint()
    replicator = await world.replicator(other="stands still")
    fetch = asyncio.create_task(replicator.fetch(saved.id, [OTHER], OF))
    while not world.holders[OTHER].asked:
        await asyncio.sleep(0.01)
    fetch.cancel()
    await asyncio.gather(fetch, return_exceptions=True)
    async with asyncio.timeout(60):
        while list((world.root / "ours" / "tmp").iterdir()):
            await asyncio.sleep(0.01)
    assert not world.ours.has(saved.id)


@pytest.mark.parametrize(
    ("manner", "unsure"), [("has lost it", False), ("fails", True), ("has not got it all", False), ("breaks off", True)]
)
async def test_fetch_tells_who_may_still_have_it(manner: str, unsure: bool, world: World, impatient: None) -> None:
    saved = world.checkpoint()
    replicator = await world.replicator(other=manner)
    with pytest.raises(FetchError) as failed:
        await replicator.fetch(saved.id, [OTHER], OF)
    assert failed.value.unsure == ({OTHER} if unsure else set())


async def test_holder_that_gives_another_manifest_is_not_believed(world: World) -> None:
    saved, replicator = world.checkpoint(), await world.replicator(other="gives another manifest", honest="is honest")
    another = save(world.theirs, world.root / "in", seq=99)
    with pytest.raises(FetchError, match="answered with something else"):
        await replicator.fetch(saved.id, [OTHER], OF)
    await replicator.fetch(saved.id, [OTHER, HONEST], OF)
    assert restored(world, saved) and not world.ours.has(another.id)
    assert replicator.refusals.counters["refused_manifests"] == 2


async def test_node_that_cannot_be_reached_may_still_have_it(world: World) -> None:
    replicator = await world.replicator(other="has lost it")
    with pytest.raises(FetchError) as failed:
        await replicator.fetch(world.checkpoint().id, [OTHER, HONEST], OF)
    assert failed.value.unsure == {HONEST}


async def test_store_with_a_later_uncommitted_checkpoint_fetches_the_committed_one(world: World) -> None:
    committed = world.checkpoint()
    write_tree(world.root / "later", {"a": os.urandom(1000)})
    save(world.ours, world.root / "later", seq=2, term=5)
    fence = world.ours.fence(JOB)
    replicator = await world.replicator(honest="")
    await replicator.fetch(committed.id, [HONEST], OF)
    assert restored(world, committed) and world.ours.fence(JOB) == fence

"""An image brought from real holders: some lie, break off, stand still, or have only a part of it."""

import asyncio
import os
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest
from aiohttp import web

from membership.identity import Identity
from mesh.execution.engine import BadImage, EngineError
from mesh.images import blobs as blobs_module
from mesh.images import fetcher as fetcher_module
from mesh.images.allowlist import Image
from mesh.images.blobs import PIECE_BYTES, BlobStore
from mesh.images.fetcher import ImageFetcher, piece_id
from mesh.images.messages import decode_pieces
from mesh.rpc.client import Address, PeerClient
from tests.images.samples import image_of, index_of, manifest_of
from tests.rpc.nodes import client_of, node_named, serve

CONFIG, LAYERS = b'{"rootfs":{}}', (os.urandom(2 * PIECE_BYTES + 1000), b"small", b"")
MANIFEST = manifest_of(CONFIG, LAYERS)
BLOBS = {sha256(data).digest(): data for data in (CONFIG, MANIFEST, *LAYERS)}
IMAGE = image_of(CONFIG, MANIFEST)
PIECES = 6  # of the configuration and the layers
A, B, C = (node_named(letter).node_id for letter in "abc")


class Holder:
    """A node that gives the image, in its `manner`."""

    def __init__(self, manner: str, blobs: dict[bytes, bytes]) -> None:
        self.manner, self.blobs = manner, blobs
        self.given = 0

    async def serve(self, identity: Identity) -> Address:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/images/{image}/blobs/{digest}", self._blob),
                web.post("/v1/images/{image}/pieces", self._pieces),
            ]
        )
        self._server, address = await serve(app, identity)
        return address

    async def close(self) -> None:
        await self._server.close()

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        if self.manner == "gives another manifest":
            return web.Response(body=manifest_of(b"{}", ()))
        if self.manner == "never stops talking":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(1 << 20))
                await asyncio.sleep(0)  # a write that need not wait lets nobody else run
        return web.Response(body=self.blobs[bytes.fromhex(request.match_info["digest"])])

    async def _pieces(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        wanted = decode_pieces(await request.read())
        if self.manner == "has only a part" and any(piece[:32] == sha256(LAYERS[0]).digest() for piece in wanted):
            raise web.HTTPNotFound
        await response.prepare(request)
        for number, asked in enumerate(wanted):
            if self.manner == "breaks off after two" and self.given >= 2:
                break
            at = int.from_bytes(asked[32:]) * PIECE_BYTES
            piece = bytearray(self.blobs[asked[:32]][at : at + PIECE_BYTES])
            if self.manner == "lies" and piece:
                piece[-1] ^= 1
            if self.manner == "ends inside a piece" and number == len(wanted) - 1:
                del piece[-10:]
            while self.manner == "drips":
                await response.write(b"drop")
                await asyncio.sleep(0.05)
            await response.write(bytes(piece))
            self.given += 1
            if self.manner == "stands still":
                await asyncio.Event().wait()
        await response.write_eof()
        return response


class World:
    """A node without the image, and holders with different behaviour."""

    def __init__(self, directory: Path) -> None:
        self.blamed: dict[bytes, str] = {}
        self.loaded: list[Image] = []
        self.store = BlobStore(directory, 1 << 40)
        self.holders: dict[bytes, Holder] = {}
        self._peers: list[PeerClient] = []

    async def fetcher(self, blobs: dict[bytes, bytes] = BLOBS, **manners: str) -> ImageFetcher:
        """Names are one letter."""
        addresses = {}
        for name, manner in manners.items():
            node = node_named(name).node_id
            self.holders[node] = Holder(manner, blobs)
            addresses[node] = await self.holders[node].serve(node_named(name))
        peers = await client_of(addresses)
        self._peers.append(peers)

        async def load(image: Image) -> None:
            self.loaded.append(image)

        def blame(node: bytes, what: str) -> None:
            self.blamed.setdefault(node, what)

        return ImageFetcher(b"me" * 16, self.store, peers, lambda config: list(addresses), blame, load)

    def has(self, *contents: bytes) -> bool:
        paths = [self.store.path(sha256(data).digest()) for data in contents]
        return all(path.exists() and path.read_bytes() == data for path, data in zip(paths, contents, strict=True))

    async def close(self) -> None:
        for peers in self._peers:
            await peers.close()
        for holder in self.holders.values():
            await holder.close()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(fetcher_module, "RETRY_S", 0.05)
    monkeypatch.setattr(fetcher_module, "IDLE_S", 1.5)
    monkeypatch.setattr(fetcher_module, "PIECE_S", 2.0)
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)
    found = World(tmp_path)
    yield found
    await found.close()


async def test_image_comes_from_several_nodes(world: World) -> None:
    fetcher, told = await world.fetcher(a="", b=""), list[str]()
    await fetcher.bring(IMAGE, "tool", told.append)
    assert world.has(CONFIG, MANIFEST, *LAYERS) and world.loaded == [IMAGE] and not world.blamed
    assert world.holders[A].given and world.holders[B].given and told[0] == "is looked for on other nodes"


@pytest.mark.parametrize(
    ("manner", "blame"),
    [
        ("lies", "is not what its hash says"),
        ("gives another manifest", "the manifest is not what its hash says"),
        ("breaks off after two", ""),
        ("ends inside a piece", ""),
        ("has only a part", ""),
        ("stands still", ""),
        ("drips", ""),
        ("never stops talking", ""),
    ],
)
async def test_wrong_data_does_not_stop_fetch(world: World, manner: str, blame: str) -> None:
    fetcher = await world.fetcher(a=manner, b="", c="")
    await fetcher.bring(IMAGE, "tool")
    assert world.has(CONFIG, MANIFEST, *LAYERS)
    assert set(world.blamed) <= {A}, "nobody honest is blamed"
    # A node that is not asked for the manifest first gives no wrong one.
    assert manner != "lies" or blame in world.blamed[A]
    assert bool(blame) or not world.blamed


async def test_two_liars_among_three_are_found(world: World) -> None:
    fetcher = await world.fetcher(a="lies", b="", c="lies")
    await fetcher.bring(IMAGE, "tool")
    assert world.has(CONFIG, MANIFEST, *LAYERS) and set(world.blamed) == {A, C}


async def test_fetch_from_liars_only_fails(world: World) -> None:
    fetcher = await world.fetcher(a="lies", b="lies")
    with pytest.raises(BadImage, match="nobody has it now"):
        await fetcher.bring(IMAGE, "tool")
    assert set(world.blamed) == {A, B} and not world.store.has(sha256(LAYERS[0]).digest())


async def test_received_pieces_are_not_fetched_again(world: World) -> None:
    fetcher = await world.fetcher(a="breaks off after two")
    with pytest.raises(EngineError, match="could not be fetched"):
        await fetcher.bring(IMAGE, "tool")
    before, moved = fetcher.pulls[IMAGE.config].done, fetcher.moved
    assert before > 0
    world.holders[A].manner = ""
    await fetcher.bring(IMAGE, "tool")
    assert world.has(CONFIG, MANIFEST, *LAYERS)
    assert fetcher.moved - moved <= sum(map(len, (CONFIG, *LAYERS))) - before


async def test_second_image_moves_only_its_new_layers(world: World) -> None:
    new = os.urandom(1 << 20)
    config = b'{"rootfs":{"more":1}}'
    manifest = manifest_of(config, (*LAYERS, new))
    other = image_of(config, manifest)
    fetcher = await world.fetcher(BLOBS | {sha256(data).digest(): data for data in (config, manifest, new)}, a="", b="")
    await fetcher.bring(IMAGE, "tool")
    moved = fetcher.moved
    await fetcher.bring(other, "tool2")
    assert len(new) <= fetcher.moved - moved <= 1.02 * len(new) and world.has(config, manifest, new)


async def test_index_brings_image_of_this_machine(world: World) -> None:
    foreign = manifest_of(b"{}", ())
    index = index_of(riscv64=foreign, amd64=MANIFEST, arm64=MANIFEST)
    blobs = BLOBS | {sha256(data).digest(): data for data in (index, foreign)}
    fetcher = await world.fetcher(blobs, a="")
    await fetcher.bring(image_of(CONFIG, index), "tool")
    assert world.has(index, CONFIG, MANIFEST, *LAYERS) and not world.has(foreign)
    other = index_of(riscv64=foreign)
    fetcher = await world.fetcher(blobs | {sha256(other).digest(): other}, b="")
    with pytest.raises(BadImage, match="is for other machines"):
        await fetcher.bring(image_of(b"{}", other), "tool")


async def test_blob_is_awaited_until_it_comes_or_fetch_ends(world: World) -> None:
    fetcher, layer = await world.fetcher(a="stands still"), sha256(LAYERS[0]).digest()
    assert not await fetcher.arrival(IMAGE, layer), "nobody fetches it"
    pull = fetcher.begin(IMAGE, "tool")
    waiting = asyncio.create_task(fetcher.arrival(IMAGE, layer))
    while len(pull.wanted) == 1:
        await asyncio.sleep(0)
        await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done() and not await fetcher.arrival(IMAGE, b"x" * 32), "it is not a part of the image"
    world.holders[A].manner = ""
    async with asyncio.timeout(30):
        assert await waiting and world.has(LAYERS[0])


async def test_failed_engine_ends_fetch_and_unlisted_image_is_dropped(world: World) -> None:
    fetcher = await world.fetcher(a="stands still")

    async def load(image: Image) -> None:
        raise EngineError("the engine is full")

    fetcher._load = load
    with pytest.raises(EngineError, match="the engine is full"):
        await fetcher.bring(IMAGE, "tool")
    fetcher._load = lambda image: asyncio.sleep(0)
    pull = fetcher.begin(IMAGE, "tool")
    fetcher.keep_only({})
    await asyncio.wait([pull.task])
    assert pull.task.cancelled()
    await fetcher.close()


def test_piece_is_named_by_blob_and_number() -> None:
    assert piece_id(b"d" * 32, 258) == b"d" * 32 + b"\0\0\1\2"

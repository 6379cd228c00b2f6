"""Blobs of an image fetched from real holders: some lie, break off, stand still, or have only a part of it."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from membership.identity import NodeId
from mesh.images import fetcher as fetcher_module
from mesh.images.blobs import PIECE_BYTES, BlobStore, FetchFailed
from mesh.images.fetcher import BlobFetcher, Origin
from mesh.images.messages import decode_pieces
from tests.images.holders import Holder, Holders, hurry
from tests.images.samples import manifest_of
from tests.rpc.nodes import node_named

CONFIG, LAYERS = b'{"rootfs":{}}', (os.urandom(5 * PIECE_BYTES + 1000), b"small", b"")
MANIFEST = manifest_of(CONFIG, LAYERS)
BLOBS = {sha256(data).digest(): data for data in (CONFIG, MANIFEST, *LAYERS)}
A, B, C = (node_named(letter).node_id for letter in "abc")


def digest(data: bytes) -> bytes:
    return sha256(data).digest()


class ImageHolder(Holder):
    """A node that gives the image, in its `manner`."""

    def __init__(self, manner: str, blobs: dict[bytes, bytes]) -> None:
        super().__init__(manner, {"/v1/images/blobs/{digest}": self._pieces})
        self.blobs = blobs
        self.asked: list[bytes] = []  # the blob of each piece

    async def _pieces(self, request: web.Request) -> web.StreamResponse:
        wanted, asked = decode_pieces(await request.read()), bytes.fromhex(request.match_info["digest"])
        self.asked += [asked] * len(wanted)
        if self.manner == "never answers":
            await asyncio.Event().wait()
        if asked == digest(MANIFEST) and self.manner == "gives another manifest":
            return web.Response(body=manifest_of(b"{}", ()))
        if self.manner == "has only a part" and asked == digest(LAYERS[0]):
            raise web.HTTPNotFound
        response = web.StreamResponse()
        await response.prepare(request)
        if asked == digest(MANIFEST):
            while self.manner == "never stops talking":
                await response.write(bytes(1 << 20))
                await asyncio.sleep(0)  # a write that need not wait lets nobody else run
            await response.write(MANIFEST)
            return response
        for number in wanted:
            if self.manner == "breaks off after two" and self.given >= 2:
                break
            piece = bytearray(self.blobs[asked][number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
            if self.manner == "lies" and piece:
                piece[-1] ^= 1
            if self.manner == "ends inside a piece" and number == wanted[-1]:
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


class World(Holders[ImageHolder]):
    """A node without the image, and holders with different behaviour."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.store = BlobStore(directory, 1 << 40)
        self.listed = True
        self.lengths: dict[bytes, int] = {}  # that nodes give, if not the right one

    async def fetcher(self, blobs: dict[bytes, bytes] = BLOBS, **manners: str) -> BlobFetcher:
        peers, nodes = await self.serve(**{name: ImageHolder(manner, blobs) for name, manner in manners.items()})

        def origin(digest: bytes, name: str) -> Origin:
            if not self.listed:
                raise FetchFailed("it is not on the list of images")
            size = (self.store.described(digest) or (None,))[0]
            return Origin({node: self.lengths.get(node, size) for node in nodes})

        return BlobFetcher(b"me" * 16, self.store, peers, "/v1/images/blobs", origin, self.blame)

    async def brings(self, fetcher: BlobFetcher, *contents: bytes) -> None:
        """Have the image fetched as an engine asks for it: the manifest, then all blobs at once."""
        manifest, *blobs = contents or (MANIFEST, CONFIG, *LAYERS)
        await fetcher.bring(digest(manifest))
        assert self.store.manifest(digest(manifest)) is not None
        results = await asyncio.gather(*(fetcher.bring(digest(blob)) for blob in blobs), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for data in (manifest, *blobs):
            assert self.store.path(digest(data)).read_bytes() == data


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    hurry(monkeypatch, 2.0)
    found = World(tmp_path)
    yield found
    await found.close()


async def test_blobs_come_from_several_nodes(world: World, tmp_path: Path) -> None:
    await world.brings(await world.fetcher(a="", b=""))
    assert world.holders[A].given and world.holders[B].given and not world.blamed
    assert not list((tmp_path / "blobs").glob("*.part"))


@pytest.mark.parametrize(
    ("manner", "blame"),
    [
        ("lies", "is not what its hash says"),
        ("gives another manifest", "is not what its hash says"),
        ("breaks off after two", ""),
        ("ends inside a piece", ""),
        ("has only a part", ""),
        ("stands still", ""),
        ("never answers", ""),
        ("drips", ""),
        ("never stops talking", ""),
    ],
)
async def test_wrong_data_does_not_stop_fetch(world: World, manner: str, blame: str) -> None:
    async with asyncio.timeout(40):
        await world.brings(await world.fetcher(a=manner, b="", c=""))
    assert set(world.blamed) <= {A}, "nobody honest is blamed"
    # A node that is not asked for the manifest first gives no wrong one.
    assert manner != "lies" or blame in world.blamed[A]
    assert bool(blame) or not world.blamed


async def test_two_liars_among_three_are_found(world: World, tmp_path: Path) -> None:
    await world.brings(await world.fetcher(a="lies", b="", c="lies"))
    assert set(world.blamed) == {A, C} and not list((tmp_path / "blobs").glob("*.part"))


@pytest.mark.parametrize("length", [1, len(LAYERS[0]) - 1, len(LAYERS[0]) + 10 * PIECE_BYTES])
async def test_nodes_that_give_another_length_keep_no_blob_away(
    world: World, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = await world.fetcher(a="", b="", c="")
    await world.brings(fetcher, MANIFEST)
    world.lengths = {A: length, C: length}
    gather, asked = fetcher._gather, list[tuple[int | None, NodeId]]()

    async def recorded(digest: bytes, blob: Any, size: int | None, sources: Sequence[NodeId]) -> None:
        asked.extend((size, node) for node in sources)
        await gather(digest, blob, size, sources)

    monkeypatch.setattr(fetcher, "_gather", recorded)
    await world.brings(fetcher, MANIFEST, LAYERS[0])
    assert B not in world.blamed
    assert set(asked) <= {(length, A), (length, C), (len(LAYERS[0]), B)}, "lengths of different nodes are not mixed"


async def test_fetch_from_liars_only_fails(world: World) -> None:
    fetcher = await world.fetcher(a="lies", b="lies")
    with pytest.raises(FetchFailed, match="nobody has it now, but for those who gave it wrongly"):
        await world.brings(fetcher)
    assert set(world.blamed) == {A, B} and not world.store.has(digest(LAYERS[0]))


async def test_received_pieces_are_not_fetched_again(world: World) -> None:
    fetcher = await world.fetcher(a="breaks off after two")
    with pytest.raises(FetchFailed, match="it broke off"):
        await world.brings(fetcher, MANIFEST, LAYERS[0])
    before, moved = fetcher.state(digest(LAYERS[0]))[0], fetcher.moved
    assert before == 2 * PIECE_BYTES and "it broke off" in fetcher.state(digest(LAYERS[0]))[1]
    world.holders[A].manner = ""
    await world.brings(fetcher)
    assert fetcher.moved - moved <= sum(map(len, (CONFIG, *LAYERS))) - before
    assert fetcher.state(digest(LAYERS[0])) == (0, "")


async def test_unfinished_blobs_are_bounded(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "UNFINISHED", 1)
    layers = [os.urandom(2 * PIECE_BYTES + 1) for _ in range(3)]
    manifest = manifest_of(CONFIG, layers)
    blobs = {digest(data): data for data in (CONFIG, *layers)}
    world.store.keep(manifest)
    world.store.manifest(digest(manifest))
    fetcher = await world.fetcher(blobs, a="breaks off after two")
    for layer in layers:
        world.holders[A].given = 0
        with pytest.raises(FetchFailed):
            await fetcher.bring(digest(layer))
    assert len(list((tmp_path / "blobs").glob("*.part"))) == 1


async def test_second_image_moves_only_its_new_layers(world: World) -> None:
    new, config = os.urandom(1 << 20), b'{"rootfs":{"more":1}}'
    manifest = manifest_of(config, (*LAYERS, new))
    blobs = BLOBS | {digest(data): data for data in (config, manifest, new)}
    world.store.keep(manifest)
    fetcher = await world.fetcher(blobs, a="", b="")
    await world.brings(fetcher)
    moved = fetcher.moved
    await world.brings(fetcher, manifest, config, *LAYERS, new)
    assert len(new) <= fetcher.moved - moved <= 1.02 * len(new)


@pytest.mark.parametrize("manner", ["", "breaks off after two", "never answers"])
async def test_pieces_of_an_earlier_blob_are_requested_first(world: World, manner: str) -> None:
    """An engine unpacks one layer after the other. What is one piece waits for none of them."""
    layers = [os.urandom(6 * PIECE_BYTES) for _ in range(2)]
    first, later, small = (digest(data) for data in (*layers, CONFIG))
    world.store.keep(manifest := manifest_of(CONFIG, layers))
    world.store.manifest(digest(manifest))
    fetcher = await world.fetcher({digest(data): data for data in (CONFIG, *layers)}, a=manner)
    one, other, config = (asyncio.create_task(fetcher.bring(blob)) for blob in (first, later, small))
    holder = world.holders[A]
    async with asyncio.timeout(40):
        if not manner:
            await asyncio.gather(one, other, config)
            asked = [blob for blob in holder.asked if blob != small]
            assert asked == [first] * 6 + [later] * 6 and small in holder.asked[:-6]
        else:
            while not (first in holder.asked and small in holder.asked):
                await asyncio.wait([one], timeout=0.01)
            assert later not in holder.asked
            one.cancel()
            while later not in holder.asked:  # the next one's turn has come
                await asyncio.wait([other], timeout=0.01)
    for task in (one, other, config):
        task.cancel()
    await asyncio.wait([one, other, config])
    await fetcher.close()


async def test_fetch_ends_with_its_last_waiter_and_off_the_list(world: World) -> None:
    fetcher = await world.fetcher(a="stands still")
    await world.brings(fetcher, MANIFEST)
    one, other = (asyncio.create_task(fetcher.bring(digest(LAYERS[0]))) for _ in range(2))
    while not world.holders[A].given:
        await asyncio.wait([one], timeout=0.01)
    one.cancel()
    await asyncio.wait([one])
    assert not other.done() and world.holders[A].given == 1, "both wait for one fetch"
    other.cancel()
    await asyncio.wait([other])
    early = asyncio.create_task(fetcher.bring(digest(LAYERS[1])))
    await asyncio.sleep(0)  # it has begun, and the fetch has not
    early.cancel()
    await asyncio.wait([early])
    async with asyncio.timeout(60):
        await fetcher.bring(digest(LAYERS[1]))
    world.listed = False
    with pytest.raises(FetchFailed, match="not on the list"):
        await fetcher.bring(digest(LAYERS[0]))
    await fetcher.close()

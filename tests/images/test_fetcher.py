"""An image brought from real holders onto a real engine: some lie, break off, stand still, or have only a part of it."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
from aiohttp import web
from blake3 import blake3

from membership.identity import Identity
from mesh.execution.engine import BadImage, EngineError
from mesh.images import fetcher as fetcher_module
from mesh.images import layer_cache as layers_module
from mesh.images.allowlist import Image
from mesh.images.engine_store import TAG, ImageStore, StoredImage
from mesh.images.fetcher import ImageFetcher
from mesh.images.image_manifest import PIECE_BYTES, ImageManifest, Layer, encode_image_manifest
from mesh.images.layer_cache import LayerStore
from mesh.images.messages import Answer, Offer, decode_pieces, encode
from mesh.images.provider import ImageProvider, NotGiven, TooBusy
from mesh.rpc.client import Address, PeerClient
from tests.container_images import layered_image
from tests.dockerd import client_of as docker_client
from tests.dockerd import dockerd
from tests.rpc.nodes import client_of, node_named, serve

pytestmark = pytest.mark.dockerd

SIZE = 3 * PIECE_BYTES


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[str, str]]:
    """One that has the image, one that lacks it."""
    with dockerd() as one, dockerd() as two:
        yield one.host, two.host


@pytest.fixture(scope="module")
def made(engines: tuple[str, str]) -> Image:
    with docker_client(engines[0]) as client:
        name = layered_image(client, "lab/tool:1", os.urandom(SIZE), b"same in every piece" * 100_000)
        return Image(bytes.fromhex(name.removeprefix("sha256:")))


@pytest.fixture(scope="module")
def saved(
    engines: tuple[str, str], made: Image, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LayerStore, ImageManifest]:
    """Return the archive that the engine saves; made once for all tests."""
    store = LayerStore(tmp_path_factory.mktemp("saved"), 1 << 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engines[0])
        engine = ImageStore()
        read: list[int] = []
        image_manifest = asyncio.run(_saved(engine, made, store, read))
        engine.close()
    assert read == sorted(read) and read[-1] > SIZE
    assert store.image_manifest(made.config) == image_manifest
    return store, image_manifest


async def _saved(engine: ImageStore, made: Image, store: LayerStore, read: list[int]) -> ImageManifest:
    found = await engine.find("lab/tool:1")
    assert found is not None and found.id == made.config and found.names == ("lab/tool:1",)
    return await engine.save(found, store, read.append)


async def test_only_unused_fetched_images_are_removed(
    engines: tuple[str, str], made: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engines[0])
    name = f"sha256:{made.config.hex()}"
    store = ImageStore()

    async def now() -> StoredImage:
        found = await store.find(name)
        assert found is not None
        return found

    with docker_client(engines[0]) as client:
        image = client.images.get(name)
        assert not (await now()).fetched
        image.tag(TAG, made.config.hex()[:32])
        assert not (await now()).fetched, "the owner's name for it stays"
        client.images.remove("lab/tool:1")
        try:
            assert (await now()).fetched
            container = client.containers.create(name, "true")
            assert await store.remove(await now()) is False
            container.remove()
            image.tag("lab/tool", "1")
            assert await store.remove(await now()) is True
            assert (await now()).names == ("lab/tool:1",)
        finally:
            client.api.tag(name, "lab/tool", "1")
    store.close()


class Holder:
    """A node that gives the image, in its `manner`."""

    def __init__(self, manner: str, store: LayerStore, image_manifest: ImageManifest, image: Image) -> None:
        self.manner, self.store, self.image_manifest, self.image = manner, store, image_manifest, image
        stored = StoredImage(image.config, (), (), 0)
        self.provider = ImageProvider(ImageStore(), store, lambda config: stored if config == image.config else None)
        self.given = self.asked = 0

    async def serve(self, identity: Identity) -> Address:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/images/{image}", self._offer),
                web.get("/v1/images/{image}/manifest", self._image_manifest),
                web.post("/v1/images/{image}/pieces", self._pieces),
            ]
        )
        self._server, address = await serve(app, identity)
        return address

    async def close(self) -> None:
        await self.provider.close()
        await self._server.close()

    async def _offer(self, request: web.Request) -> web.Response:
        if self.manner == "talks nonsense":
            return web.Response(body=b"\xc1" * 50)
        return web.Response(body=encode(Offer(True, 0)))

    async def _image_manifest(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        image_manifest, last = self.image_manifest, self.image_manifest.layers[-1]
        match self.manner:
            case "makes up layers":
                noise = bytes(last.size)
                self.noise = {blake3(noise).digest(): noise}
                assert last.size <= PIECE_BYTES
                lie = Layer(last.digest, last.size, blake3(noise).digest())
                image_manifest = ImageManifest(image_manifest.config, (*image_manifest.layers[:-1], lie))
            case "has another image":
                image_manifest = ImageManifest(image_manifest.config.replace(b"amd64", b"arm64"), image_manifest.layers)
            case "promises too much":
                image_manifest = ImageManifest(
                    image_manifest.config, (*image_manifest.layers[:-1], Layer(last.digest, 2**40, bytes(32 * 2**18)))
                )
            case "never stops talking":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(bytes(1 << 20))
                    await asyncio.sleep(0)  # a write that need not wait lets nobody else run
            case "gets no further":
                return web.Response(body=encode(Answer(done=1, total=9)))
        return web.Response(body=encode(Answer(encode_image_manifest(image_manifest))))

    async def _pieces(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        wanted = decode_pieces(await request.read())
        noise = getattr(self, "noise", {})
        real = [piece for piece in wanted if piece not in noise]
        pieces = iter(await self.provider.pieces(self.image.config, real))
        await response.prepare(request)
        for number, asked in enumerate(wanted):
            piece = bytearray(noise[asked] if asked in noise else next(pieces))
            if self.manner == "lies":
                piece[-1] ^= 1
            if self.manner == "has only a part" and number:
                break
            if self.manner == "ends inside a piece" and number == len(wanted) - 1:
                del piece[-10:]
            while self.manner == "drips":
                await response.write(b"drop")
                await asyncio.sleep(0.05)
            await response.write(bytes(piece))
            self.given += 1
            if self.manner == "breaks off after two" and self.given >= 2:
                assert request.transport is not None
                request.transport.abort()
                return response
            if self.manner == "stands still":
                await asyncio.Event().wait()
        await response.write_eof()
        return response


class World:
    """An engine without the image, and holders with different behaviour."""

    def __init__(self, directory: Path, image: Image) -> None:
        self.image, self.blamed = image, dict[bytes, str]()
        self.arrived: list[StoredImage] = []
        self.layers = LayerStore(directory / "layers", 1 << 40)
        self.engine = ImageStore()
        self.holders: dict[bytes, Holder] = {}
        self._peers: list[PeerClient] = []

    async def fetcher(self, **manners: str) -> ImageFetcher:
        """Names are one letter."""
        store, image_manifest = self.source
        addresses = {}
        for name, manner in manners.items():
            node = node_named(name).node_id
            self.holders[node] = Holder(manner, store, image_manifest, self.image)
            addresses[node] = await self.holders[node].serve(node_named(name))
        peers = await client_of(addresses)
        self._peers.append(peers)
        return ImageFetcher(
            b"me" * 16,
            self.engine,
            self.layers,
            peers,
            lambda config: list(addresses) if config == self.image.config else [],
            lambda node, what: self.blamed.setdefault(node, what) and None,
            self.arrived.append,
        )

    source: tuple[LayerStore, ImageManifest]

    async def here(self) -> StoredImage | None:
        return await self.engine.find(f"sha256:{self.image.config.hex()}")

    async def close(self) -> None:
        for peers in self._peers:
            await peers.close()
        for holder in self.holders.values():
            await holder.close()
        self.engine.close()


@pytest.fixture
async def world(
    tmp_path: Path,
    engines: tuple[str, str],
    made: Image,
    saved: tuple[LayerStore, ImageManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[World]:
    monkeypatch.setenv("DOCKER_HOST", engines[1])
    monkeypatch.setattr(fetcher_module, "RETRY_S", 0.05)
    monkeypatch.setattr(fetcher_module, "IDLE_S", 1.5)
    monkeypatch.setattr(fetcher_module, "PIECE_S", 2.0)
    monkeypatch.setattr(fetcher_module, "STILL_S", 1.0)
    monkeypatch.setattr(layers_module, "SPARE_BYTES", 0)
    found = World(tmp_path, made)
    found.source = saved
    with docker_client(engines[1]) as client:
        assert client.images.list(all=True) == []
    yield found
    await found.close()
    with docker_client(engines[1]) as client:
        for image in client.images.list():
            client.images.remove(image.id, force=True)


async def test_fetched_image_is_complete_and_named(world: World, engines: tuple[str, str]) -> None:
    fetcher, told = await world.fetcher(a="", b=""), list[str]()
    await fetcher.bring(world.image, "tool", told.append)
    found = await world.here()
    assert found is not None and found.id == world.image.config and [one.id for one in world.arrived] == [found.id]
    with docker_client(engines[1]) as client:
        assert any(tag.startswith("campus-mesh/fetched:") for tag in client.images.get(found.id.hex()).tags)
        words = client.containers.run(
            f"sha256:{found.id.hex()}", ["/bin/busybox", "ls", "-l", "/data0"], network_mode="none", remove=True
        )
        assert str(SIZE).encode() in words
    assert not world.blamed and all(holder.given for holder in world.holders.values()), "both gave a part"
    assert world.layers.image_manifest(world.image.config) is not None, "it can be given on at once"
    assert told[0] == "is looked for on other nodes"


@pytest.mark.parametrize(
    ("manner", "blame"),
    [
        ("lies", "a piece is not what its hash says"),
        ("has another image", "the image manifest is of another image"),
        ("promises too much", "more than the image has"),
        ("breaks off after two", ""),
        ("ends inside a piece", ""),
        ("has only a part", ""),
        ("stands still", ""),
        ("drips", ""),
        ("never stops talking", ""),
        ("gets no further", ""),
        ("talks nonsense", ""),
    ],
)
async def test_wrong_data_does_not_stop_fetch(world: World, manner: str, blame: str) -> None:
    image = world.image
    if manner == "promises too much":
        world.image = image = Image(image.config, b"", SIZE)
    fetcher = await world.fetcher(a=manner, b="")
    await fetcher.bring(image, "tool")
    assert await world.here() is not None
    assert set(world.blamed) <= {node_named("a").node_id}, "nobody honest is blamed"
    if blame:
        assert blame in world.blamed[node_named("a").node_id]
    assert bool(world.blamed) == bool(blame)


async def test_colluding_liars_are_detected(world: World) -> None:
    fetcher = await world.fetcher(a="makes up layers", b="", c="makes up layers")
    await fetcher.bring(world.image, "tool")
    assert await world.here() is not None and set(world.blamed) == {node_named("a").node_id, node_named("c").node_id}
    assert all("is not what its hash says" in what for what in world.blamed.values())


async def test_received_pieces_are_not_fetched_again(world: World) -> None:
    fetcher = await world.fetcher(a="breaks off after two")
    pull = fetcher.begin(world.image, "tool")
    with pytest.raises(EngineError, match="could not be fetched"):
        await fetcher.bring(world.image, "tool")
    assert 0 < pull.done < pull.total
    layers = world.source[1].layers
    pieces = {piece for layer in layers for piece in layer.hashes}
    have = {piece for layer in layers if not world.layers.has(layer) for piece in world.layers.begun(layer)}
    assert have
    again = await world.fetcher(b="")
    await again.bring(world.image, "tool")
    assert world.holders[node_named("b").node_id].given == len(pieces) - len(have) and await world.here() is not None


async def test_fetch_from_liars_only_fails(world: World) -> None:
    fetcher = await world.fetcher(a="lies", b="makes up layers")
    with pytest.raises(BadImage, match=r"tool \([0-9a-f]{12}\).*nobody has it now, but for those who gave it wrongly"):
        await fetcher.bring(world.image, "tool")
    assert set(world.blamed) == {node_named("a").node_id, node_named("b").node_id} and await world.here() is None
    assert not any(path.suffix != ".part" for path in world.layers._layers.glob("*") if _is_lie(path, world))


def _is_lie(path: Path, world: World) -> bool:
    return sha256(path.read_bytes()).hexdigest() != path.name.removesuffix(".part")


async def test_fetch_without_holder_fails(world: World) -> None:
    fetcher = await world.fetcher()
    with pytest.raises(BadImage, match=r"is not on this node, and nobody has it now$"):
        await fetcher.bring(world.image, "tool")


async def test_known_layer_is_not_fetched(world: World, engines: tuple[str, str]) -> None:
    fetcher = await world.fetcher(a="")
    with docker_client(engines[0]) as source, docker_client(engines[1]) as target:
        # The same lowest layers, under another image: what is below is shared.
        below = source.images.get("lab/tool:1").history()[1]["Id"]
        source.images.get(below).tag("lab/base:1")
        target.images.load(b"".join(source.images.get("lab/base:1").save(named=True)))
        source.images.remove("lab/base:1")
    pull = fetcher.begin(world.image, "tool")
    await fetcher.bring(world.image, "tool")
    last = world.source[1].layers[-1]
    assert pull.total == last.size and world.holders[node_named("a").node_id].given == len(set(last.hashes))
    assert await world.here() is not None


async def test_damaged_layers_are_fetched_again(world: World, engines: tuple[str, str]) -> None:
    fetcher = await world.fetcher(a="")
    await fetcher.bring(world.image, "tool")
    with docker_client(engines[1]) as client:
        client.images.remove(f"sha256:{world.image.config.hex()}", force=True)
    largest = max(world.source[1].layers, key=lambda layer: layer.size)
    with world.layers._whole(largest.digest).open("r+b") as file:
        file.seek(PIECE_BYTES)
        file.write(b"damage")
    given = world.holders[node_named("a").node_id].given
    await fetcher.bring(world.image, "tool")
    assert await world.here() is not None and world.holders[node_named("a").node_id].given == given + len(
        largest.hashes
    )
    assert not world.blamed


async def test_vanished_layer_is_fetched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = await world.fetcher(a="")
    digests = tuple(layer.digest for layer in world.source[1].layers)

    async def there() -> list[tuple[bytes, ...]]:
        return [digests[:-1]]

    monkeypatch.setattr(world.engine, "layers", there)  # it said so, a moment before they were removed
    await fetcher.bring(world.image, "tool")
    assert await world.here() is not None


async def test_unawaited_fetch_stops_unless_kept(world: World) -> None:
    fetcher = await world.fetcher(a="stands still")
    waiting = [asyncio.create_task(fetcher.bring(world.image, "tool")) for _ in range(2)]
    async with asyncio.timeout(60):
        while not world.holders[node_named("a").node_id].asked:
            await asyncio.sleep(0.01)
    pull = fetcher.pulls[world.image.config]
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert not pull.task.done() and not pull.task.cancelling()
    waiting[1].cancel()
    await asyncio.wait([waiting[1], pull.task], timeout=60)
    assert pull.task.cancelled()
    kept = fetcher.begin(world.image, "tool")
    kept.kept = True
    assert kept is not pull
    once = asyncio.create_task(fetcher.bring(world.image, "tool"))
    await asyncio.sleep(0)
    once.cancel()
    await asyncio.wait([once])
    assert not kept.task.cancelling()
    fetcher.keep_only({world.image.config})
    assert not kept.task.cancelling()
    denied = asyncio.create_task(fetcher.bring(world.image, "tool"))
    await asyncio.sleep(0)
    fetcher.keep_only(set())
    with pytest.raises(EngineError, match="image tool is not fetched any more"):
        await denied
    kept = fetcher.begin(world.image, "tool")
    await fetcher.close()
    assert kept.task.cancelled()


async def test_wrong_image_after_load_is_removed(world: World, engines: tuple[str, str]) -> None:
    store, image_manifest = world.source
    with pytest.raises(EngineError, match="in place of sha256:7777"):
        await world.engine.load(image_manifest, image_manifest.layers, store, Image(b"w" * 32))
    with docker_client(engines[1]) as client:
        assert client.images.list() == []


async def test_missing_space_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = await world.fetcher(a="")
    monkeypatch.setattr(layers_module, "SPARE_BYTES", 1 << 60)
    with pytest.raises(EngineError, match="could not be kept here: no space for"):
        await fetcher.bring(world.image, "tool")
    assert await world.here() is None


async def test_oversized_manifest_does_not_block_honest_one(world: World) -> None:
    fetcher = await world.fetcher(a="promises too much", b="", c="promises too much")
    await fetcher.bring(world.image, "tool")
    assert await world.here() is not None and not world.blamed, (
        "the list does not say how large it is, so nobody has lied"
    )


async def test_silent_engine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    engine = ImageStore()
    for ask in (engine.images(), engine.find("x"), engine.layers()):
        with pytest.raises(EngineError, match="the container engine"):
            await ask
    engine.close()


async def test_unknown_names_are_not_found(world: World) -> None:
    for name in ("no/such:image", "a b", "..", "", "x" * 5000, "sha256:" + "0" * 64, "-v", "a\0b", "%2e%2e/x", "ü"):
        assert await world.engine.find(name) is None


async def test_provider_saves_at_first_request(
    engines: tuple[str, str], made: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engines[0])
    engine, store = ImageStore(), LayerStore(tmp_path, 1 << 40)
    image = await engine.find("lab/tool:1")
    assert image is not None
    allowed = {made.config: image}
    giving = ImageProvider(engine, store, allowed.get)
    assert await giving.offer(made.config) == Offer(False, 0)
    async with asyncio.timeout(60):
        while not (answer := await giving.answer(made.config)).image_manifest:
            assert answer.total >= answer.done
            await asyncio.sleep(0.02)
    image_manifest = store.image_manifest(made.config)
    assert image_manifest is not None and (await giving.offer(made.config)).ready
    first = image_manifest.layers[0].hashes[0]
    assert [blake3(piece).digest() for piece in await giving.pieces(made.config, [first])] == [first]
    with pytest.raises(NotGiven, match="no such pieces"):
        await giving.pieces(made.config, [b"x" * 32])
    with pytest.raises(TooBusy), ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(giving.stream())
    assert giving.busy == 0
    allowed.clear()
    for ask in (giving.offer(made.config), giving.answer(made.config), giving.pieces(made.config, [first])):
        with pytest.raises(NotGiven, match="does not give that image"):
            await ask
    await giving.close()
    engine.close()

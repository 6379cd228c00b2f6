"""Chunks on real connections: whole, broken off, damaged, and standing still."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from ckptstore.chunker import CHUNK_BYTES
from ckptstore.errors import StoreError
from ckptstore.pack import StoredObject
from ckptstore.receiver import Receiver
from ckptstore.store import SavedManifest, Store
from mesh.rpc import streams
from mesh.rpc.streams import sliced
from tests.ckptstore.worlds import chunk_id, frame, open_store, save, write_tree
from tests.rpc.nodes import taken

CHUNKS = 3


class Taker:
    """A node that takes chunks; what each stream came to is in `ends`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ends: asyncio.Queue[int | str] = asyncio.Queue()
        self.port = 0

    async def serve(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.put("/", self._take)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    async def _take(self, request: web.Request) -> web.Response:
        try:
            new = await taken(request.content, self.store.receive(10**9))
        except (StoreError, TimeoutError) as error:
            self.ends.put_nowait(type(error).__name__)
            raise web.HTTPConflict(text=str(error)) from error
        except BaseException as error:
            self.ends.put_nowait(type(error).__name__)
            raise
        self.ends.put_nowait(new)
        return web.Response()


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[tuple[Store, SavedManifest]]:
    write_tree(tmp_path / "in", {"noise": os.urandom(CHUNKS * CHUNK_BYTES)})
    store = open_store(tmp_path / "ours")
    yield store, save(store, tmp_path / "in")
    store.close()


@pytest.fixture
async def taker(tmp_path: Path) -> AsyncIterator[Taker]:
    taker = Taker(open_store(tmp_path / "theirs"))
    runner = await taker.serve()
    yield taker
    await runner.cleanup()
    taker.store.close()


async def put(taker: Taker, body: AsyncIterator[memoryview]) -> int:
    async with aiohttp.ClientSession() as session, session.put(f"http://127.0.0.1:{taker.port}/", data=body) as answer:
        return answer.status


async def test_complete_stream_is_durable(ours: tuple[Store, SavedManifest], taker: Taker) -> None:
    store, saved = ours
    assert await put(taker, sliced(store.stream(saved.manifest.chunks))) == 200
    assert await taker.ends.get() == CHUNKS and taker.store.missing(saved.manifest.chunks) == []


async def test_whole_chunks_of_broken_stream_are_kept(ours: tuple[Store, SavedManifest], taker: Taker) -> None:
    store, saved = ours

    async def broken() -> AsyncIterator[memoryview]:
        sent = 0
        async for piece in sliced(store.stream(saved.manifest.chunks)):
            if sent > 2.5 * CHUNK_BYTES:
                raise ConnectionResetError("the cable is pulled")
            sent += len(piece)
            yield piece

    with pytest.raises((aiohttp.ClientError, ConnectionResetError)):
        await put(taker, broken())
    assert isinstance(await taker.ends.get(), str)
    async with asyncio.timeout(60):
        while len(missing := taker.store.missing(saved.manifest.chunks)) != 1:
            await asyncio.sleep(0.01)
    assert not list((taker.store.root / "tmp").iterdir())
    assert await put(taker, sliced(store.stream(missing))) == 200
    assert await taker.ends.get() == 1, "a chunk, and no more, was sent twice"


async def test_damaged_stream_keeps_nothing(ours: tuple[Store, SavedManifest], taker: Taker) -> None:
    store, saved = ours

    async def damaged() -> AsyncIterator[memoryview]:
        for number, whole in enumerate(store.stream(saved.manifest.chunks)):
            data = bytearray(whole)
            if number == 1:
                data[5000] ^= 1
            yield memoryview(data)

    assert await put(taker, damaged()) == 409
    assert await taker.ends.get() == "CorruptChunk"
    assert len(taker.store.missing(saved.manifest.chunks)) == CHUNKS


async def test_idle_stream_ends_and_keeps_chunks(
    ours: tuple[Store, SavedManifest], taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "IDLE_S", 0.3)
    store, saved = ours
    ended = asyncio.Event()

    async def stalled() -> AsyncIterator[memoryview]:
        frames = store.stream(saved.manifest.chunks)
        yield next(frames)
        await ended.wait()

    sending = asyncio.create_task(put(taker, stalled()))
    assert await taker.ends.get() == "TimeoutError"
    assert len(taker.store.missing(saved.manifest.chunks)) == CHUNKS - 1
    ended.set()
    await asyncio.gather(sending, return_exceptions=True)


class Pieces:
    """A connection that gives these, and then breaks."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = iter(pieces)
        self.asked, self.given = threading.Semaphore(0), 0

    async def readany(self) -> bytes:
        self.asked.release()
        self.given += 1
        try:
            return next(self._pieces)
        except StopIteration:
            raise aiohttp.ClientPayloadError("broken") from None


class Watched(Receiver):
    """Stores objects only once the next ones have been asked for."""

    pieces: Pieces

    def take(self, objects: Iterable[StoredObject]) -> int:
        self.taken = getattr(self, "taken", 0) + 1
        for _ in range(2 if self.taken == 1 else 1):
            assert self.pieces.asked.acquire(timeout=60), "the connection waits for the disk"
        return super().take(objects)


async def test_receive_overlaps_storing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    chunks = [os.urandom(1000) for _ in range(3)]
    receiver = Watched(store, 10**9)
    receiver.pieces = Pieces(*map(frame, chunks), b"")
    assert await taken(receiver.pieces, receiver) == 3
    assert store.missing([chunk_id(chunk) for chunk in chunks]) == []
    store.close()


async def test_damaged_then_broken_stream_keeps_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    good, bad = os.urandom(1000), bytearray(frame(os.urandom(1000)))
    bad[500] ^= 1
    receiver = Watched(store, 10**9)
    receiver.pieces = Pieces(frame(good), bytes(bad))
    with pytest.raises(aiohttp.ClientPayloadError):
        await taken(receiver.pieces, receiver)
    assert store.missing([chunk_id(good)]) and not list((tmp_path / "packs").iterdir())
    assert not list((tmp_path / "tmp").iterdir())
    store.close()


async def test_stream_that_nobody_waits_for_any_more_leaves_nothing_open(tmp_path: Path) -> None:
    """A peer hangs up while its upload begins, or while it ends, and all threads of this node have other work."""
    store, free = open_store(tmp_path), threading.Event()
    thread = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(thread)
    begun = await asyncio.gather(*(asyncio.to_thread(store.receive, 10**9) for _ in range(3)))
    assert not store.incoming and not list(store.tmp.iterdir())

    pieces = Pieces(frame(b"one"), b"")
    busy = thread.submit(free.wait)
    ending = asyncio.create_task(taken(pieces, begun[0]))
    while pieces.given < 2 or begun[0].arrived != {chunk_id(b"one")}:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    free.set()
    async with asyncio.timeout(60):
        while store.incoming or list(store.tmp.iterdir()):
            await asyncio.sleep(0.01)
    assert busy.result()
    store.close()

"""Data sets that are read while they come: between real stores, by a file system that is a process of its own."""

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.cipher import StateCipher
from mesh.data import fetcher as fetcher_module
from mesh.data import fuse, streams
from mesh.data.library import DataLibrary
from mesh.data.manifest import FetchFailed
from mesh.data.streams import PLACE, Guest, Stream, Streams, problem, sweep
from mesh.model.spec import DataNeed
from mesh.rpc.client import PeerError
from tests.data.test_fetcher import CIPHER, FILES, FIRST, JOB, SIZE, Fetching
from tests.data.test_stream_server import content

pytestmark = pytest.mark.skipif(bool(problem()), reason="needs /dev/fuse and the right to mount")


class Streaming(Fetching):
    """A node that streams. Requests for chunks in `held_back` fail, one after the other, as long as they are in there."""

    def __init__(self, root: Path, cipher: StateCipher | None) -> None:
        super().__init__(root, cipher)
        self.streams = Streams(self.holdings, self.fetcher)
        self.source = root / "source"
        self.held_back: set[bytes] = set()
        self.notes: list[str] = []
        self.guest = Guest(JOB, self.notes.append)

    @property
    def place(self) -> Path:
        return self.holdings.root / PLACE

    def hold_back_all_but(self, *names: str) -> None:
        """Hold back every chunk of the files but these."""
        store = self.holders[FIRST]
        for page, entry in store.entries(self.root, self.cipher):
            chunks = {page.chunk(ref.number) for ref in entry.refs}
            self.held_back |= chunks if entry.name.decode() not in names else set()

    async def pulled(self, *order: Any) -> Any:
        if not self.held_back.isdisjoint(order[1].ids):
            raise PeerError("it is off")
        return await super().pulled(*order)

    async def join(self, guest: Guest | None = None) -> Stream:
        return await self.streams.join(self.identity, self.manifest, guest or self.guest, lambda words: None)


@pytest.fixture
async def streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    streaming = Streaming(tmp_path, getattr(request, "param", CIPHER))
    monkeypatch.setattr(fetcher_module, "pulled", streaming.pulled)
    monkeypatch.setattr(fetcher_module, "RETRY_S", 0.001)
    monkeypatch.setattr(streams, "AGAIN_S", 0.01)
    await streaming.holdings.open()
    yield streaming
    await streaming.streams.close()
    await streaming.fetcher.close()
    await streaming.holdings.close()
    for store in streaming.holders.values():
        store.close()
    left = fuse.mounts_below(tmp_path)
    sweep(tmp_path)
    assert not left and (not streaming.place.exists() or not list(streaming.place.iterdir()))


async def until(ready: Callable[[], Any]) -> None:
    while not ready():
        await asyncio.sleep(0.01)


def server_of(stream: Stream) -> int:
    assert stream._process is not None
    return stream._process.pid


@pytest.mark.parametrize("streaming", [None, CIPHER], ids=["public", "private"], indirect=True)
async def test_file_is_read_before_the_others_have_come(streaming: Streaming) -> None:
    streaming.hold_back_all_but("4")
    stream = await streaming.join()
    for part in ("cmdline", "environ"):
        shown = Path(f"/proc/{server_of(stream)}/{part}").read_bytes()
        assert shown and CIPHER.key not in shown and CIPHER.key.hex().encode() not in shown
    assert sorted(path.name for path in stream.path.iterdir()) == [str(number) for number in range(FILES)]
    assert await content(stream.path / "4") == (streaming.source / "4").read_bytes()
    assert not streaming.arrived
    waiting = asyncio.create_task(content(stream.path / "0"))
    await until(lambda: any("it is off; a read of what is missing waits 30 s" in words for words in streaming.notes))
    assert not waiting.done()
    streaming.held_back.clear()
    assert await waiting == (streaming.source / "0").read_bytes()
    await until(lambda: streaming.arrived)
    await until(lambda: any("is whole on this node" in words for words in streaming.notes))
    assert streaming.blamed == [] and stream.failed == ""
    await streaming.streams.leave(stream, streaming.guest)
    assert fuse.mounts_below(streaming.place) == []


async def test_read_that_no_holder_can_serve_fails_and_is_told(
    streaming: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming.hold_back_all_but("4")
    with monkeypatch.context() as impatient:
        impatient.setattr(streams, "READ_S", 0.3)
        stream = await streaming.join()
        with pytest.raises(OSError) as failed:
            await content(stream.path / "0")
        assert failed.value.errno == errno.EIO
        await until(lambda: stream.failed)
    assert "a read of data set ada/set failed" in stream.failed and "it is off" in stream.failed
    assert stream.failed in streaming.notes
    # The next guest gets a stream of its own, whose reads have not failed.
    streaming.held_back.clear()
    second = Guest(b"k" * 16, lambda words: None)
    other = await streaming.join(second)
    assert other is not stream and await content(other.path / "0") == (streaming.source / "0").read_bytes()


async def test_guests_share_a_stream_until_the_last_has_gone(streaming: Streaming) -> None:
    streaming.hold_back_all_but("4")
    second = Guest(b"k" * 16, lambda words: None)
    stream, other = await asyncio.gather(streaming.join(), streaming.join(second))
    assert stream is other and fuse.mounts_below(streaming.place) == [stream.path]
    await streaming.streams.leave(stream, streaming.guest)
    assert await content(stream.path / "4") == (streaming.source / "4").read_bytes()
    await streaming.streams.leave(stream, second)
    assert fuse.mounts_below(streaming.place) == [] and not streaming.fetcher.words(streaming.identity)


async def test_nothing_is_mounted_before_a_holder_gives_the_first_page(streaming: Streaming) -> None:
    streaming.fails[FIRST] = [PeerError("the data set is not for you")] * 99
    streaming.listed = [FIRST]
    with pytest.raises(FetchFailed, match="not for you"):
        await streaming.join()
    assert not streaming.place.exists()


async def test_cancelled_start_leaves_nothing(streaming: Streaming) -> None:
    streaming.hang = asyncio.Event()
    joining = asyncio.create_task(streaming.join())
    await until(lambda: streaming.asked)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    streaming.hang.set()
    assert not streaming.fetcher.words(streaming.identity) and not streaming.place.exists()


async def test_killed_file_system_is_unmounted_and_fails_its_guests(streaming: Streaming) -> None:
    streaming.hold_back_all_but("4")
    stream = await streaming.join()
    reading = asyncio.create_task(content(stream.path / "0"))
    await until(lambda: stream._why)
    os.kill(server_of(stream), signal.SIGKILL)
    with pytest.raises(OSError):
        await reading
    await until(lambda: stream.failed)
    assert "has ended" in stream.failed and fuse.mounts_below(streaming.place) == []


async def test_stopped_file_system_does_not_hold_a_killed_guest(streaming: Streaming) -> None:
    stream = await streaming.join()
    os.kill(server_of(stream), signal.SIGSTOP)
    reading = asyncio.create_task(content(stream.path / "0"))
    await asyncio.wait([reading], timeout=0.2)
    assert not reading.done()
    stream.abort()
    with pytest.raises(OSError):
        await reading


async def test_file_system_ends_with_its_daemon(streaming: Streaming) -> None:
    """A daemon that was killed closes its end of the pipe."""
    stream = await streaming.join()
    assert stream._process is not None and stream._process.stdin is not None
    stream._process.stdin.close()
    await stream._process.wait()
    assert fuse.mounts_below(streaming.place) == []


async def test_start_takes_away_what_a_killed_daemon_has_left(streaming: Streaming) -> None:
    left = streaming.place / "left"
    left.mkdir(parents=True)
    os.close(fuse.mounted(left))
    assert fuse.mounts_below(streaming.place) == [left]
    await streaming.streams.open()
    assert fuse.mounts_below(streaming.place) == [] and not left.exists()


async def test_set_is_mounted_for_its_readers_alone_and_is_in_use_meanwhile(
    streaming: Streaming, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mesh.data.library.LEAST_BYTES", SIZE)
    nothing: Any = SimpleNamespace(node_id=b"n" * 32)
    library = DataLibrary(
        tmp_path / "library", None, 1.0, {}, nothing, nothing, nothing, nothing, nothing, lambda: None
    )
    library.holdings, library.streams, library.fetcher = streaming.holdings, streaming.streams, streaming.fetcher

    library.directory.known[streaming.identity] = streaming.manifest
    need = DataNeed("ada/set", streaming.identity)

    async def no_key() -> bytes:
        return b""

    def bring(user_key: bytes) -> Awaitable[Any]:
        return library.bring(need, no_key, user_key, streaming.guest, lambda words: None, True)

    with pytest.raises(FetchFailed, match="is not for this job's user"):
        await bring(b"b" * 32)
    assert not streaming.place.exists() and not streaming.asked
    brought = await bring(b"a" * 32)
    assert brought.stream is not None and streaming.holdings.used[streaming.identity] == 1
    await library.release(brought)
    assert streaming.holdings.used[streaming.identity] == 0 and fuse.mounts_below(streaming.place) == []

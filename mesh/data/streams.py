"""Data sets that guests read while they are still being fetched: the daemon's side of `stream_server`.

One file system serves all guests of a data set on this node. The whole is fetched in order, and what a read waits for at once,
by a request of its own. When the last guest has gone, the file system goes, too.
"""

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from ckptstore.cipher import KEY_BYTES
from ckptstore.errors import StoreError
from mesh.data import fuse
from mesh.data.fetcher import DataFetcher, Tell
from mesh.data.holdings import Holdings
from mesh.data.manifest import DataManifest, FetchFailed
from mesh.data.stream_server import FAILED, HERE, OPENS, RECORD, WANT
from mesh.util import capabilities
from mesh.util.isolated import isolated
from mesh.util.mounts import mounts

LEAST_BYTES = 64 << 20  # of a data set that is streamed: a Gigabit link brings less in half a second (own choice)
READ_S = 30.0  # for which a read waits for a chunk: longer than a holder's restart (own choice)
AGAIN_S = 1.0  # after a failed fetch (own choice)
START_S = 10.0  # for the file system to start, which takes 0.2 s (own choice)
END_S = 1.0  # for it to end by itself (own choice)
REQUESTS = 4  # at a time for what reads wait for (own choice)
PLACE = "streams"  # in the directory of data sets
RECORDS = 1024  # chunks that reads may wait for; more are asked for again (own choice)

log = logging.getLogger(__name__)


class MountFailed(RuntimeError):
    """This machine does not let the daemon mount; the text says what."""


def problem(process: int | str = "self") -> str:
    """Return why a daemon cannot stream; empty if it can, as far as can be told without a mount."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse that the daemon may open"
    with suppress(OSError):
        if capabilities.has(capabilities.SYS_ADMIN, process):
            return ""
    return "the daemon may not mount, since it does not run as root"


def seen_by_engine(process: int | str = "self") -> bool:
    """Tell whether a container engine sees what a daemon mounts: both are in the mount namespace of the first process.

    Where that cannot be read, a service's own namespace is known by its mounts, which only receive others' (`master`).
    """
    with suppress(OSError):
        return Path(f"/proc/{process}/ns/mnt").readlink() == Path("/proc/1/ns/mnt").readlink()
    with suppress(OSError):
        return not any(word.startswith("master:") for mount in mounts(process) for word in mount.propagation)
    return False


def sweep(place: Path) -> None:
    """Take away what is mounted at a place or below it, with the directories where that was."""
    for path in fuse.mounts_below(place):
        try:
            fuse.unmounted(path)
        except OSError as error:
            log.warning("a data set is still mounted: %s", error)
    for path in (*place.glob("*"), place):
        with suppress(OSError):
            path.rmdir()


class Guest(NamedTuple):
    """A guest that reads a stream: its job, by whose rights chunks are fetched, and how to tell its user something."""

    job: bytes | None
    note: Tell


class Stream:
    """One data set's file system at `path`. `failed`: why reads have failed."""

    def __init__(self, identity: bytes, manifest: DataManifest, holdings: Holdings, fetcher: DataFetcher) -> None:
        self.identity, self.guests, self.failed = identity, list[Guest](), ""
        self.path = holdings.root / PLACE / f"{identity.hex()}.{os.urandom(4).hex()}"
        self._manifest, self._holdings, self._fetcher = manifest, holdings, fetcher
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wanted: dict[bytes, tuple[int, float]] = {}  # chunks that reads wait for: their length, and since when
        self._asked, self._requests = asyncio.Event(), asyncio.Semaphore(REQUESTS)
        self._came = 0  # bytes that reads have waited for
        self._why = ""
        self.starting: asyncio.Task[None]

    def _note(self, words: str) -> None:
        log.info("%s", words)
        for guest in self.guests:
            guest.note(words)

    def _fetch_all(self, tell: Tell = lambda words: None) -> asyncio.Task[None]:
        fetch = self._fetcher.fetch(self.identity, self._manifest, lambda: self._job, tell)
        return asyncio.create_task(fetch, name=f"fetch streamed data set {self._manifest.full_name}")

    @property
    def _job(self) -> bytes | None:
        return next((guest.job for guest in self.guests), None)

    async def start(self, tell: Tell) -> None:
        """Begin the fetch, and mount once there is room and a holder has given the first page. FetchFailed."""
        self._fetcher.streamed[self.identity] += 1
        whole = self._fetch_all(lambda words: tell(words) if not self._tasks else None)
        begun = asyncio.create_task(self._fetcher.begun(self.identity), name="wait for room")
        try:
            await asyncio.wait([whole, begun], return_when=asyncio.FIRST_COMPLETED)
            if whole.done():
                whole.result()
            await self._first_page(whole)
            await self._mount()
        except BaseException:
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)
            raise
        finally:
            begun.cancel()
        for work, name in ((self._keep(whole), "fetch"), (self._hear(), "hear reads of"), (self._serve(), "serve")):
            self._tasks.append(asyncio.create_task(work, name=f"{name} streamed data set {self._manifest.full_name}"))
        self._note(f"data set {self._manifest.full_name} is read while it is fetched")

    async def _first_page(self, whole: asyncio.Task[None]) -> None:
        assert self._manifest.root is not None
        while True:
            try:
                await self._fetcher.at_once(
                    self.identity, self._job, {self._manifest.root.id: self._manifest.root.length}
                )
                return None
            except FetchFailed:
                await asyncio.wait([whole], timeout=AGAIN_S)
                if whole.done():
                    return whole.result()

    async def _mount(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        root = msgspec.msgpack.encode(self._manifest.root).hex()
        arguments = (str(self.path), str(self._holdings.root), str(self._manifest.created_unix), root, str(READ_S))
        cipher = await self._fetcher.cipher(self.identity, self._manifest)
        key = (bytes(KEY_BYTES), 0) if cipher is None else (cipher.key, KEY_BYTES)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *isolated("mesh.data", "stream_server", packages=True),
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(RECORD.pack(OPENS, *key))
            async with asyncio.timeout(START_S):
                await process.stdout.readexactly(RECORD.size)
                await asyncio.to_thread(os.stat, self.path)  # from now on the kernel answers that by itself
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            await self._end_process()
            raise MountFailed(f"data set {self._manifest.full_name} cannot be mounted while it is fetched") from error

    async def close(self) -> None:
        """End the file system and the fetch. Reads that wait fail."""
        self._fetcher.streamed[self.identity] -= 1
        self.starting.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self.starting, *self._tasks, return_exceptions=True)
        await self._end_process()

    def abort(self) -> None:
        """Fail all reads at once. A guest that is killed ends only after its reads, and the file system may be stopped."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _end_process(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                self.abort()
                await process.wait()
        await asyncio.to_thread(sweep, self.path)

    # --- while it is on

    async def _keep(self, whole: asyncio.Task[None]) -> None:
        """Fetch until all is here."""
        begun = time.monotonic()
        with self._holdings.store.working():
            try:
                while True:
                    try:
                        await whole
                        break
                    except (FetchFailed, StoreError, OSError) as error:
                        self._waits(str(error))
                    await asyncio.sleep(AGAIN_S)
                    whole = self._fetch_all()
            finally:
                whole.cancel()
        took_s = time.monotonic() - begun
        self._note(f"data set {self._manifest.full_name} is whole on this node, {took_s:.1f} s after it was mounted")

    def _waits(self, why: str) -> None:
        if not self._why:
            self._note(f"{why}; a read of what is missing waits {READ_S:g} s and then fails")
        self._why = why

    async def _hear(self) -> None:
        """Hear what reads wait for, until the file system ends."""
        process = self._process
        assert process is not None and process.stdout is not None
        with suppress(asyncio.IncompleteReadError):
            while True:
                kind, identity, length = RECORD.unpack(await process.stdout.readexactly(RECORD.size))
                if kind == WANT and len(self._wanted) < RECORDS:
                    self._wanted[identity] = (length, time.monotonic())
                    self._asked.set()
                elif kind == FAILED:
                    self._fail(self._why or "a part of it did not come in time, or is damaged here")
        await process.wait()
        self._fail("its file system has ended")
        await asyncio.to_thread(sweep, self.path)

    def _fail(self, why: str) -> None:
        if not self.failed:
            self.failed = f"a read of data set {self._manifest.full_name} failed: {why}"
            self._note(self.failed)

    async def _serve(self) -> None:
        """Fetch what reads wait for, in a few requests at a time."""
        async with asyncio.TaskGroup() as requests:
            while True:
                await self._requests.acquire()
                await self._asked.wait()
                self._asked.clear()
                wanted, self._wanted = self._wanted, {}
                requests.create_task(self._bring(wanted), name="fetch what reads wait for")

    async def _bring(self, wanted: dict[bytes, tuple[int, float]]) -> None:
        try:
            if self._came > self._manifest.chunk_bytes:
                raise FetchFailed(f"data set {self._manifest.full_name} names more than its manifest says")
            lengths = {identity: length for identity, (length, _) in wanted.items()}
            self._came += await self._fetcher.at_once(self.identity, self._job, lengths)
            self._why = ""
            for identity in wanted:
                self._say(identity)
        except (FetchFailed, StoreError, OSError) as error:
            self._waits(str(error))
            await asyncio.sleep(AGAIN_S)
            self._wanted = {
                one: had for one, had in wanted.items() if had[1] > time.monotonic() - READ_S
            } | self._wanted
            if self._wanted:
                self._asked.set()
        finally:
            self._requests.release()

    def _say(self, identity: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(RECORD.pack(HERE, identity, 0))


class Streams:
    """The streams of this node."""

    def __init__(self, holdings: Holdings, fetcher: DataFetcher) -> None:
        self._holdings, self._fetcher = holdings, fetcher
        self._streams: list[Stream] = []

    async def open(self) -> None:
        await asyncio.to_thread(sweep, self._holdings.root / PLACE)

    async def join(self, identity: bytes, manifest: DataManifest, guest: Guest, tell: Tell) -> Stream:
        """Return the stream of a data set for one more guest, until `leave`. FetchFailed, MountFailed."""
        stream = next((one for one in self._streams if one.identity == identity and not one.failed), None)
        if stream is None:
            stream = Stream(identity, manifest, self._holdings, self._fetcher)
            self._streams.append(stream)
            stream.guests.append(guest)
            stream.starting = asyncio.create_task(stream.start(tell), name=f"start to stream {manifest.full_name}")
        else:
            stream.guests.append(guest)
        try:
            await asyncio.shield(stream.starting)
        except BaseException:
            await self.leave(stream, guest)
            raise
        return stream

    async def leave(self, stream: Stream, guest: Guest) -> None:
        """End a stream with its last guest."""
        stream.guests.remove(guest)
        if not stream.guests and stream in self._streams:
            self._streams.remove(stream)
            await stream.close()

    async def close(self) -> None:
        streams, self._streams = self._streams, []
        await asyncio.gather(*(stream.close() for stream in streams), return_exceptions=True)

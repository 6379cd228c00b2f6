"""The file system of a streamed data set, mounted for real: its tree, reads that wait, end in an error, or are interrupted."""

import asyncio
import errno
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from ckptstore.dataset import Entry, Link, Page, Ref, put_page
from ckptstore.dataset_adder import Adder
from ckptstore.dataset_store import DataSets
from ckptstore.errors import MissingChunks
from mesh.data import fuse, stream_server
from mesh.data.stream_server import FAILED, WANT, StreamServer
from mesh.data.streams import problem, sweep
from tests.cleanup import cleanup

pytestmark = pytest.mark.skipif(bool(problem()), reason="needs /dev/fuse and the right to mount")

IDENTITY = b"i" * 32
UNIX = 1_700_000_000


class Mounted:
    """A server in this process on a real store. Chunks in `held_back` are not here until `come` is called."""

    def __init__(self, store: DataSets, root: Link, path: Path, read_s: float) -> None:
        self.store, self.path = store, path
        self.held_back: set[bytes] = set()
        self.told: list[tuple[bytes, bytes]] = []
        self.loaded: list[bytes] = []
        self.kernel = fuse.mounted(path)
        self.interrupts = 0
        self.server = StreamServer(self.kernel, root, UNIX, self._load, self._tell, read_s)
        self._handle, self.server._handle = self.server._handle, self._heard  # type: ignore[method-assign]
        cleanup().undo("umount", "--lazy", str(path))
        asyncio.get_running_loop().add_reader(self.kernel, self.server.asked)

    def _heard(self, request: fuse.Request) -> None:
        self.interrupts += request.opcode == fuse.INTERRUPT
        self._handle(request)

    def _load(self, identity: bytes) -> object:
        self.loaded.append(identity)
        if identity in self.held_back:
            raise MissingChunks("not here yet", [identity])
        return self.store.chunk(identity)

    def _tell(self, kind: bytes, identity: bytes, length: int) -> None:
        self.told.append((kind, identity))

    def come(self) -> None:
        held_back, self.held_back = self.held_back, set()
        for identity in held_back:
            self.server.here(identity)

    async def waits_for(self, kind: bytes) -> bytes:
        while True:
            found = next((identity for told, identity in self.told if told == kind), None)
            if found is not None:
                return found
            await asyncio.sleep(0.01)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree with all there is: index pages, an empty directory and file, links, a large file with a hole, execute bits."""
    root, rng = tmp_path / "source", random.Random(7)
    (root / "many").mkdir(parents=True)
    for number in range(1500):
        (root / "many" / f"{number:05d}").write_bytes(rng.randbytes(20))
    (root / "empty").mkdir()
    (root / "a" / "b" / "c").mkdir(parents=True)
    (root / "a" / "b" / "c" / "none").touch()
    (root / "a" / "b" / "tool").write_text("#!/bin/sh\necho ran\n")
    (root / "a" / "b" / "tool").chmod(0o755)
    (root / "a" / "link").symlink_to("b/tool")
    with (root / "large").open("wb") as file:
        file.write(rng.randbytes(9_000_000))
        file.seek(80_000_000)
        file.write(rng.randbytes(1_000_000))
    (root / "z").write_text("last")
    return root


@pytest.fixture
def kept(source: Path, tmp_path: Path) -> tuple[DataSets, Link]:
    store = DataSets(tmp_path / "store")
    with store.working():
        added = Adder(store, lambda progress: None, False).add(source)
        store.publish(IDENTITY, b"sealed", added.root)
    return store, added.root


@asynccontextmanager
async def mounted(kept: tuple[DataSets, Link], where: Path, read_s: float = 1000.0) -> AsyncIterator[Mounted]:
    where.mkdir()
    found = Mounted(*kept, where, read_s)
    try:
        yield found
    finally:
        asyncio.get_running_loop().remove_reader(found.kernel)
        os.close(found.kernel)
        sweep(where)
        found.store.close()


def listing(root: Path) -> list[str]:
    """Return each path with its type, permissions that count, size, and content or target."""
    found = []
    for path in sorted(root.rglob("*")):
        state = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else "" if path.is_dir() else path.read_bytes().hex()[-200:]
        executable = bool(state.st_mode & 0o111) and not path.is_symlink()
        found.append(
            f"{path.relative_to(root)} {state.st_mode >> 12} {executable} {0 if path.is_dir() else state.st_size} {content}"
        )
    return found


async def content(path: Path) -> bytes:
    """Return a file's content, read by a process of its own as a guest is. OSError."""
    code = "import sys\ntry: sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())\n"
    code += "except OSError as error: sys.exit(error.errno)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", code, path, stdout=asyncio.subprocess.PIPE
    )
    data, _ = await process.communicate()
    if process.returncode:
        raise OSError(process.returncode, os.strerror(process.returncode))
    return data


async def test_tree_is_the_one_that_was_added(kept: tuple[DataSets, Link], source: Path, tmp_path: Path) -> None:
    async with mounted(kept, tmp_path / "mnt") as found:
        assert await asyncio.to_thread(listing, found.path) == listing(source)
        compared = await asyncio.to_thread(subprocess.run, ["diff", "-r", source, found.path], check=False)
        assert compared.returncode == 0
        ran = await asyncio.to_thread(subprocess.check_output, [found.path / "a" / "link"])
        assert ran == b"ran\n"
        numbers = await asyncio.to_thread(lambda: [path.lstat().st_ino for path in found.path.rglob("*")])
        assert len(set(numbers)) == len(numbers) == kept[1].entries
        with pytest.raises(FileNotFoundError):
            await asyncio.to_thread((found.path / "a" / "nothing").stat)
        assert (await asyncio.to_thread(os.statvfs, found.path)).f_flag & os.ST_RDONLY


async def test_nothing_can_be_written(kept: tuple[DataSets, Link], tmp_path: Path) -> None:
    async with mounted(kept, tmp_path / "mnt") as found:
        attempts: list[Callable[[], object]] = [
            (found.path / "new").touch,
            lambda: (found.path / "z").write_text("x"),
            (found.path / "z").unlink,
            lambda: (found.path / "z").rename(found.path / "y"),
            (found.path / "new").mkdir,
            lambda: (found.path / "z").chmod(0o777),
        ]
        for attempt in attempts:
            with pytest.raises(OSError) as refused:
                await asyncio.to_thread(attempt)
            assert refused.value.errno == errno.EROFS


async def test_read_waits_for_its_chunk_and_others_do_not_wait_for_it(
    kept: tuple[DataSets, Link], tmp_path: Path
) -> None:
    async with mounted(kept, tmp_path / "mnt") as found:
        assert await content(found.path / "z") == b"last"
        found.held_back = {one for one, _ in kept[0].chunks(kept[1])} - set(found.loaded)
        reading = asyncio.create_task(content(found.path / "large"))
        await found.waits_for(WANT)
        assert await content(found.path / "z") == b"last"
        assert not reading.done()
        found.come()
        data = await reading
        assert len(data) == 81_000_000 and data[9_000_000:80_000_000].count(0) == 71_000_000


async def test_read_of_a_chunk_that_does_not_come_fails(kept: tuple[DataSets, Link], tmp_path: Path) -> None:
    async with mounted(kept, tmp_path / "mnt", read_s=0.3) as found:
        await asyncio.to_thread((found.path / "large").stat)
        found.held_back = {one for one, _ in kept[0].chunks(kept[1])} - set(found.loaded)
        with pytest.raises(OSError) as failed:
            await content(found.path / "large")
        assert failed.value.errno == errno.EIO and await found.waits_for(FAILED)


async def read_of_sixteen_chunks(load: Callable[[], object]) -> tuple[int, int]:
    """Return the error of a read of a file of 16 chunks, and how many chunks were loaded for it; `load` is called for each."""
    chunks: dict[bytes, bytes] = {}
    loaded: list[bytes] = []

    def put(data: bytes) -> bytes:
        identity = blake3(data).digest()
        chunks[identity] = data
        return identity

    def give(identity: bytes) -> bytes:
        load()
        loaded.append(identity)
        return chunks[identity]

    ids = b"".join(put(bytes([number]) * 9) for number in range(16))
    refs = tuple(Ref(number, 0, 9) for number in range(16))
    root = put_page(put, Page(ids, (9,) * 16, (Entry(b"f", stat.S_IFREG | 0o644, 144, refs),)), 144, 1)
    answers, kernel = os.pipe()
    try:
        server = StreamServer(kernel, root, UNIX, give, lambda kind, identity, length: None, read_s=0.4)
        request: Any = SimpleNamespace(opcode=fuse.READ, unique=7, node=2, pid=0, span=(0, 4096))
        async with asyncio.timeout(60):
            await server._wait(request)
        await asyncio.gather(*server._coming.values(), return_exceptions=True)
        return -struct.unpack_from("=Ii", os.read(answers, 4096))[1], len(loaded)
    finally:
        os.close(answers)
        os.close(kernel)


async def test_read_whose_chunks_evict_each_other_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await read_of_sixteen_chunks(lambda: None) == (0, 17)
    monkeypatch.setattr(stream_server, "CACHE_BYTES", 1)
    monkeypatch.setattr(stream_server, "MOST_BROUGHT", 100)
    assert await read_of_sixteen_chunks(lambda: None) == (errno.EIO, 100)


async def test_all_chunks_of_a_read_have_one_deadline() -> None:
    error, loaded = await read_of_sixteen_chunks(lambda: time.sleep(0.1))
    assert error == errno.EIO and loaded < 12


async def test_damaged_chunk_is_not_given_to_a_guest(kept: tuple[DataSets, Link], tmp_path: Path) -> None:
    async with mounted(kept, tmp_path / "mnt") as found:
        await asyncio.to_thread((found.path / "large").stat)
        where = kept[0].index.find(next(one for one, n in kept[0].chunks(kept[1]) if n == 4 << 20))
        assert where is not None
        with (kept[0].packs / f"{where.pack}.pack").open("r+b") as file:
            file.seek(where.offset + where.length - 1)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(OSError) as failed:
            await content(found.path / "large")
        assert failed.value.errno == errno.EIO


@asynccontextmanager
async def reader(path: Path, code: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", code, path, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


READ = (
    "import sys; file = open(sys.argv[1], 'rb'); print('opened', flush=True); file.read(1); print('read', flush=True)"
)
# A random access through a map is no read ahead, so the reader itself waits for the answer.
MAP = """
import mmap, sys
file = open(sys.argv[1], "rb")
data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
data.madvise(mmap.MADV_RANDOM)
print("opened", flush=True)
data[5000]
print("read", flush=True)
"""


# A call of the C library, since Python repeats some after EINTR.
CALL = """
import ctypes, os, sys
print("begun", flush=True)
print(ctypes.CDLL(None).access(os.fsencode(sys.argv[1]), 0), flush=True)
"""


@pytest.mark.parametrize("code", [READ, MAP])
async def test_killed_reader_ends_at_once(kept: tuple[DataSets, Link], tmp_path: Path, code: str) -> None:
    async with mounted(kept, tmp_path / "mnt") as found:
        await asyncio.to_thread((found.path / "large").stat)
        found.held_back = {one for one, _ in kept[0].chunks(kept[1])} - set(found.loaded)
        async with reader(found.path / "large", code) as process:
            await found.waits_for(WANT)
            process.kill()
            await process.wait()  # not before the answer, if none were given to the interrupt
        assert process.returncode == -signal.SIGKILL and found.held_back


async def test_reader_that_was_stopped_goes_on_to_wait(kept: tuple[DataSets, Link], tmp_path: Path) -> None:
    async with mounted(kept, tmp_path / "mnt") as found:
        await asyncio.to_thread((found.path / "large").stat)
        found.held_back = {one for one, _ in kept[0].chunks(kept[1])} - set(found.loaded)
        async with reader(found.path / "a" / "b" / "tool", CALL) as process:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"begun\n"
            await found.waits_for(WANT)
            process.send_signal(signal.SIGSTOP)
            while not found.interrupts:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGCONT)
            found.come()
            assert await process.stdout.readline() == b"0\n"
            assert await process.wait() == 0


async def test_end_of_the_file_system_fails_reads_and_leaves_no_mount(
    kept: tuple[DataSets, Link], tmp_path: Path
) -> None:
    async with mounted(kept, tmp_path / "mnt") as found:
        await asyncio.to_thread((found.path / "large").stat)
        found.held_back = {one for one, _ in kept[0].chunks(kept[1])} - set(found.loaded)
        async with reader(found.path / "large", READ) as process:
            await found.waits_for(WANT)
            asyncio.get_running_loop().remove_reader(found.kernel)
            os.dup2(os.open(os.devnull, os.O_RDONLY), found.kernel)  # as the kernel does for a process that was killed
            assert await process.wait() == 1
        assert fuse.mounts_below(tmp_path) == [found.path]
        sweep(tmp_path)
        assert fuse.mounts_below(tmp_path) == [] and not found.path.exists()

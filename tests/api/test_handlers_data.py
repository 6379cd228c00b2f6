"""Data sets given to other nodes, over real connections from a real store."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ckptstore.cipher import StateCipher
from ckptstore.dataset import Link
from ckptstore.dataset_adder import Adder
from ckptstore.dataset_store import DataSets
from ckptstore.messages import (
    ChunkRequest,
    MissingQuery,
    decode_ids,
    encode_chunk_request,
    encode_missing_query,
)
from membership.ratelimit import TokenBuckets
from mesh.api.handlers.data import DataHandlers, DataProvider
from mesh.data.directory import DataDirectory
from mesh.data.manifest import SECTION, DataManifest, Held, Reader, encode_announced
from mesh.model.spec import DataNeed
from mesh.rpc import memory, streams
from mesh.rpc.pacing import GIVEN, GIVEN_TO_ONE, Wire

ADA, EVE, LENDER = b"a" * 32, b"e" * 32, b"l" * 32
EVES = Reader(EVE, "eve")


class Giver:
    """A node of ada's that has data sets. `user` and `node`: who asks. A job of ada's and one of eve's runs at the lender's."""

    def __init__(self, root: Path) -> None:
        self.cipher = StateCipher.generate()
        source = root / "source"
        source.mkdir()
        (source / "file").write_bytes(os.urandom(24 << 20))  # more than the buffers of connections take
        self.store = DataSets(root / "store")
        with self.store.working():
            self.added = Adder(self.store, lambda progress: None, False, self.cipher).add(source)
        self.chunks = tuple(one for one, _ in self.store.chunks(self.added.root, self.cipher))
        self.user, self.node = EVE, EVE
        self.coming: list[bytes] = []
        self.refused: list[bytes] = []
        self.runs: dict[bytes, Any] = {}
        nothing: Any = None
        self.directory = DataDirectory(nothing, nothing, nothing, self.store.has, nothing, nothing)
        library: Any = SimpleNamespace(
            directory=self.directory,
            holdings=SimpleNamespace(is_here=self.store.has, store=self.store),
            fetcher=SimpleNamespace(coming=lambda: self.coming),
            keys=SimpleNamespace(known={self.cipher.realm: self.cipher}.get),
        )
        jobs: Any = SimpleNamespace(
            replicator=SimpleNamespace(
                refusals=SimpleNamespace(count=lambda kind, node, what: self.refused.append(node))
            ),
            vouching=SimpleNamespace(read_by_runner=self._read_by_runner),
        )
        self.wire = Wire()
        self.provider = DataProvider(nothing, nothing, library, jobs, self.wire, ())

    async def _read_by_runner(self, job: bytes, node: bytes) -> Any:
        return self.runs.get(job) if node == LENDER else None

    async def _admit(self, request: web.Request) -> Any:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        caller = SimpleNamespace(user_key=self.user, node_id=self.node, user="who asks")
        return caller, await request.read()

    async def serve(self) -> web.AppRunner:
        app = web.Application()
        for method, path, handler, _ in self.provider.routes(self._admit):
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def version(self, number: int, *readers: Reader, removed: bool = False, coming: bool = False) -> bytes:
        identity, root = bytes([number]) * 32, None if removed else self.added.root
        realm = b"" if removed else self.cipher.realm
        manifest = DataManifest(
            1, "pictures", "ada", ADA, b"", number, 1, root, self.added.chunk_bytes, readers, False, realm
        )
        if root is not None and not coming:
            await asyncio.to_thread(self.store.publish, identity, b"sealed", root, self.cipher)
        self.directory.remember(identity, b"sealed", manifest)
        return identity

    async def asked_key(self, identity: bytes, user: bytes) -> tuple[int, bytes]:
        self.user = self.node = user
        url = f"{self.url}/v1/data/{identity.hex()}/key"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.read()

    async def asked(self, identity: bytes, user: bytes, node: bytes, job: bytes = b"") -> int:
        return (await self.post(identity, "chunks", encode_chunk_request(ChunkRequest(self.chunks)), user, node, job))[
            0
        ]

    async def post(
        self, identity: bytes, what: str, body: bytes, user: bytes, node: bytes, job: bytes = b""
    ) -> tuple[int, bytes]:
        self.user, self.node = user, node
        url = f"{self.url}/v1/data/{identity.hex()}/{what}?job={job.hex()}"
        async with aiohttp.ClientSession() as session, session.post(url, data=body) as answer:
            return answer.status, await answer.read()


@pytest.fixture
async def giver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Giver]:
    giver = Giver(tmp_path)
    monkeypatch.setattr("mesh.api.handlers.data.peer_of", lambda request: giver.node)
    runner = await giver.serve()
    yield giver
    await runner.cleanup()
    giver.store.close()


async def test_key_is_for_the_owner_and_for_readers_of_that_and_the_newest_version(giver: Giver) -> None:
    old = await giver.version(1, EVES)
    for user in (ADA, EVE):
        assert await giver.asked_key(old, user) == (200, giver.cipher.key)
    status, body = await giver.asked_key(old, LENDER)
    assert status == 403 and giver.cipher.key not in body and giver.refused == [LENDER]
    giver.runs[b"e" * 16] = SimpleNamespace(user_key=EVE, data=(DataNeed("ada/pictures", old),))
    assert (await giver.asked_key(old, LENDER))[0] == 403, "a job brings the key to who runs it"
    new = await giver.version(2, Reader(LENDER, "lender"))
    for identity, user, expected in ((old, EVE, 403), (new, EVE, 403), (old, LENDER, 403), (new, LENDER, 200)):
        assert (await giver.asked_key(identity, user))[0] == expected
    assert (await giver.asked_key(b"?" * 32, ADA))[0] == 404
    gone = await giver.version(3, removed=True)
    assert (await giver.asked_key(gone, ADA))[0] == 404 and (await giver.asked_key(new, LENDER))[0] == 403


async def test_calls_for_keys_are_bounded_for_each_node(giver: Giver, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = await giver.version(1, EVES)
    monkeypatch.setattr(giver.provider, "_key_calls", TokenBuckets(1e-9, 2.0))
    assert [(await giver.asked_key(identity, EVE))[0] for _ in range(3)] == [200, 200, 503]
    assert (await giver.asked_key(identity, ADA))[0] == 200


@pytest.mark.parametrize("removed", [False, True])
async def test_withdrawn_reader_gets_no_older_version(giver: Giver, removed: bool) -> None:
    old = await giver.version(1, EVES)
    for user, job in ((ADA, b"a" * 16), (EVE, b"e" * 16)):
        giver.runs[job] = SimpleNamespace(user_key=user, data=(DataNeed("ada/pictures", old),))
    assert await giver.asked(old, EVE, EVE) == 200
    assert await giver.asked(old, LENDER, LENDER, b"e" * 16) == 200
    await giver.version(2, removed=removed)
    assert await giver.asked(old, EVE, EVE) == 403
    assert await giver.asked(old, LENDER, LENDER, b"e" * 16) == 403, "eve's job has no right that eve has lost"
    assert await giver.asked(old, ADA, ADA) == 200
    assert await giver.asked(old, LENDER, LENDER, b"a" * 16) == 200, "ada's job keeps the version it was submitted with"
    assert giver.refused == [EVE, LENDER]


async def test_new_reader_gets_no_older_version(giver: Giver) -> None:
    old = await giver.version(1)
    new = await giver.version(2, EVES)
    assert await giver.asked(new, EVE, EVE) == 200
    assert await giver.asked(old, EVE, EVE) == 403


async def test_node_gives_on_what_has_come_of_a_set_that_it_fetches(giver: Giver) -> None:
    pictures = await giver.version(1, EVES)
    coming = await giver.version(2, EVES, coming=True)
    other, secret = os.urandom(32), giver.chunks[-1]
    body = encode_missing_query(MissingQuery((*giver.chunks[:2], other, secret)))
    assert (await giver.post(coming, "missing", body, EVE, EVE))[0] == 404, "it is neither here nor fetched"
    giver.coming = [coming]
    giver.store.members.note(coming, [(giver.chunks[0], 1), (other, 1)])
    status, answer = await giver.post(coming, "missing", body, EVE, EVE)
    assert status == 200 and decode_ids(answer) == [giver.chunks[1], other, secret]
    assert (await giver.post(coming, "missing", body, LENDER, LENDER))[0] == 403 and giver.refused == [LENDER]
    assert (await giver.post(coming, "missing", b"?", EVE, EVE))[0] == 400
    assert decode_ids((await giver.post(pictures, "missing", body, EVE, EVE))[1]) == [other]
    for ids, expected in (((giver.chunks[0],), 200), ((secret,), 403), ((other,), 404)):
        order = encode_chunk_request(ChunkRequest(ids))
        assert (await giver.post(coming, "chunks", order, EVE, EVE))[0] == expected
    assert (await giver.post(coming, "chunks", order, LENDER, LENDER))[0] == 403


async def test_reader_that_does_not_read_is_dropped_and_holds_no_other_up(
    giver: Giver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STALL_S", 2.0)
    pictures = await giver.version(1, EVES, Reader(LENDER, "lender"))
    body = encode_chunk_request(ChunkRequest(giver.chunks))
    head = f"POST /v1/data/{pictures.hex()}/chunks HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = giver.url.removeprefix("http://").split(":")
    giver.user = giver.node = EVE
    idle = [await asyncio.open_connection(host, int(port), limit=1 << 10) for _ in range(GIVEN)]
    for _, writer in idle:
        writer.write(head.encode() + body)
    giving = giver.wire.giving
    async with asyncio.timeout(60):
        while len(giving._waiting) < GIVEN - GIVEN_TO_ONE:
            await asyncio.sleep(0.01)
    assert len(giving._held) == GIVEN_TO_ONE
    assert await giver.asked(pictures, LENDER, LENDER) == 200, "another node still gets it"
    async with asyncio.timeout(60):
        while giving._held:
            await asyncio.sleep(0.01)
    for _, writer in idle:
        writer.transport.abort()


async def test_readers_that_drip_keep_no_other_out(giver: Giver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WINDOW_S", 0.5)
    monkeypatch.setattr(streams, "STALL_S", 3600.0)
    pictures = await giver.version(1, EVES, Reader(LENDER, "lender"))
    body = encode_chunk_request(ChunkRequest(giver.chunks))
    head = f"POST /v1/data/{pictures.hex()}/chunks HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = giver.url.removeprefix("http://").split(":")
    idle, giving = list[asyncio.StreamWriter](), giver.wire.giving
    for reader in (EVE, LENDER):
        giver.user = giver.node = reader
        for _ in range(GIVEN_TO_ONE):
            idle.append((await asyncio.open_connection(host, int(port), limit=1 << 10))[1])
            idle[-1].write(head.encode() + body)
            async with asyncio.timeout(60):
                while len(giving._held) < len(idle):
                    await asyncio.sleep(0.01)
    assert len(idle) == GIVEN
    async with asyncio.timeout(60):
        assert await giver.asked(pictures, ADA, ADA) == 200
    for writer in idle:
        writer.transport.abort()


async def test_reader_is_not_dropped_for_the_limit_of_this_node(giver: Giver, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a low `upload_mbps`, one piece of an answer takes longer than STALL_S."""
    monkeypatch.setattr(streams, "STALL_S", 1.0)
    pictures = await giver.version(1)
    giver.wire.budget_bps, giver.chunks = 0.8e6, giver.chunks[-1:]
    assert await giver.asked(pictures, ADA, ADA) == 200


def test_list_of_data_sets_reads_what_nodes_announce_once() -> None:
    nothing: Any = None
    looks: list[str] = []
    names = [f"set{number}" for number in range(50)]
    rows = [Held(name.encode().ljust(32), ADA, "ada", name, 1) for name in names]
    record = SimpleNamespace(node=LENDER, section=SECTION, body=encode_announced(rows[:2]))
    membership: Any = SimpleNamespace(
        credentials=SimpleNamespace(node_id=EVE, user_key=EVE, nick="eves"),
        members=lambda: [SimpleNamespace(node_id=LENDER, present=True, nick="lenders")],
        records=lambda section: looks.append(section) or [record],
    )
    directory = DataDirectory(nothing, membership, nothing, lambda identity: True, nothing, nothing)
    for row in rows:
        directory.remember(row.id, b"sealed", DataManifest(1, row.name, "ada", ADA, b"", 1, 1, Link(row.id, 1, 1, 1)))
    no: Any = lambda *given: None  # noqa: E731
    holdings = SimpleNamespace(is_here=no, pinned=no, used_bytes=lambda: 0, store=SimpleNamespace(quota_bytes=None))
    fetcher = SimpleNamespace(words=lambda identity: "")
    library: Any = SimpleNamespace(directory=directory, paths={}, path_of=no, holdings=holdings, fetcher=fetcher)
    shown = DataHandlers(EVE, nothing, membership, library).all().data
    assert len(looks) == 1
    assert {one.name: one.nodes for one in shown} == {
        f"ada/{name}": ["lenders"] if name in names[:2] else [] for name in names
    }

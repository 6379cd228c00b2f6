"""Messages of peers, a batch in one call, and their uploads."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from ckptstore.messages import MAX_IDS, MissingQuery, encode_ids, encode_missing_query
from mesh.api.handlers import peers
from mesh.api.handlers.peers import MANIFESTS, UPLOADS, UPLOADS_PER_PEER, PeerHandlers
from mesh.consensus.messages import MessageError
from mesh.images.library import NotGiven
from mesh.rpc import memory
from mesh.rpc.client import PeerClient
from mesh.rpc.pacing import Wire
from mesh.rpc.streams import sliced
from tests.ckptstore.worlds import open_store, save, write_tree
from tests.rpc.nodes import MESH, node_named, serve

ME = b"m" * 32
BUSY, UNKNOWN = b"start", b"of a newer version"


class Receiver:
    """A node that is too busy for `BUSY` and does not know `UNKNOWN`."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.room = True
        nothing: Any = None
        jobs: Any = SimpleNamespace(
            deliver=self._deliver,
            room_for=self._room_for,
            replicator=SimpleNamespace(refusals=SimpleNamespace(counters={"refused_malformed": 0})),
        )
        others: Any = [nothing] * 10
        self.handlers: Any = PeerHandlers(
            nothing, nothing, nothing, nothing, jobs, nothing, nothing, nothing, (), *others[:7]
        )
        self.handlers._admit = self._admit

    async def _admit(self, request: bytes) -> tuple[Any, bytes]:
        return SimpleNamespace(node_id=ME), request

    async def _room_for(self, sender: bytes) -> bool:
        assert sender == ME
        return self.room

    def _deliver(self, sender: bytes, message: bytes) -> bool:
        assert sender == ME
        if message == UNKNOWN:
            raise MessageError("no such message")
        if message == BUSY:
            return False
        self.taken.append(message)
        return True

    async def post(self, *messages: bytes) -> int:
        answer = await self.handlers._messages(msgspec.msgpack.encode(messages))
        return int(answer.status)


@pytest.mark.parametrize(("refused", "status"), [((BUSY,), 503), ((UNKNOWN,), 400), ((), 200)])
async def test_refused_message_takes_no_other_of_its_batch_with_it(refused: tuple[bytes, ...], status: int) -> None:
    receiver = Receiver()
    assert await receiver.post(b"one", *refused, b"two") == status and receiver.taken == [b"one", b"two"]
    assert receiver.handlers._counters["refused_malformed"] == refused.count(UNKNOWN)


async def test_messages_of_a_member_of_which_many_wait_are_turned_away() -> None:
    receiver = Receiver()
    receiver.room = False
    assert await receiver.post(b"one", b"two") == 503 and not receiver.taken


def test_longest_answer_about_chunks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[tuple[str, str], Any] = {}
    monkeypatch.setattr(
        peers, "bounded", lambda bounds, memory: found.update(bounds) or peers.web.normalize_path_middleware()
    )
    receiver = Receiver()
    data: Any = SimpleNamespace(routes=lambda admit: [])
    receiver.handlers._data = data
    receiver.handlers.application()
    longest = len(encode_ids([number.to_bytes(32) for number in range(MAX_IDS)]))
    assert found["POST", "/v1/chunks/missing"].answer >= longest


async def test_members_that_drip_their_uploads_keep_no_other_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "WINDOW_S", 0.5)
    write_tree(tmp_path / "in", {"noise": os.urandom(1 << 20)})
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    saved = save(ours, tmp_path / "in")
    nothing, host = Receiver().handlers._jobs, node_named("h")
    trust: Any = SimpleNamespace(credentials=lambda peer, now: SimpleNamespace(node_id=peer))
    none: Any = None
    handlers = PeerHandlers(
        trust, none, none, theirs, nothing, none, none, Wire(), (), none, none, none, none, none, none, none
    )
    app, over = web.Application(), asyncio.Event()
    app.add_routes([web.put("/v1/chunks", handlers._put_chunks)])
    server, address = await serve(app, host)

    async def drips() -> AsyncIterator[bytes]:
        while not over.is_set():
            yield b"M"
            await asyncio.sleep(0.2)

    async def put(peers: PeerClient, body: AsyncIterator[bytes | memoryview]) -> bytes:
        async with peers.stream(host.node_id, "PUT", "/v1/chunks?of=" + b"ada".hex(), body) as response:
            return await response.read()

    async with AsyncExitStack() as stack:
        members = [PeerClient(node_named(letter), MESH, lambda node: address) for letter in "abcde"]
        for peers in members:
            await peers.open()
            stack.push_async_callback(peers.close)
        calls = [asyncio.create_task(put(peers, drips())) for peers in members[:4] for _ in range(UPLOADS_PER_PEER)]
        async with asyncio.timeout(60):
            while len(handlers._uploads._held) < UPLOADS:
                await asyncio.sleep(0.01)
            assert await put(members[4], sliced(ours.stream(saved.manifest.chunks))) == b"1"
        over.set()
        await asyncio.gather(*calls, return_exceptions=True)
    await server.close()
    assert theirs.missing(saved.manifest.chunks) == [] and theirs.foreign_bytes() > 0
    ours.close()
    theirs.close()


async def test_member_evades_no_quota_by_the_name_of_the_nodes_user(tmp_path: Path) -> None:
    """A lender brings home what it runs, and may not fill the store with anything else."""
    own, stranger, job = b"o" * 32, b"s" * 32, b"j" * 16
    runs: list[tuple[bytes, bytes, bytes]] = []  # a job, its runner and the key of its user, as its witnesses say

    async def read_by_runner(asked: bytes, node: bytes) -> Any:
        found = [key for known, runner, key in runs if (known, runner) == (asked, node)]
        return SimpleNamespace(user_key=found[0]) if found else None

    receiver: Any = Receiver()
    handlers = receiver.handlers
    handlers._store = store = open_store(tmp_path / "store")
    store.user = "ada"
    handlers._membership = SimpleNamespace(credentials=SimpleNamespace(user_key=own))
    receiver.handlers._jobs.vouching = SimpleNamespace(read_by_runner=read_by_runner)

    async def is_own(user: str, key: bytes, **query: str) -> bool:
        request: Any = SimpleNamespace(query={"of": user.encode().hex(), **query})
        caller: Any = SimpleNamespace(node_id=ME, user_key=key)
        return bool(await handlers._is_own(request, caller))

    assert await is_own("ada", own) and not await is_own("eve", own)
    assert not await is_own("ada", stranger) and not await is_own("ada", stranger, job=job.hex())
    runs.append((job, ME, stranger))
    assert not await is_own("ada", stranger, job=job.hex()), "it runs a job of another user"
    runs[0] = (job, ME, own)
    assert await is_own("ada", stranger, job=job.hex()) and not await is_own("ada", stranger)
    assert not await is_own("ada", stranger, job="00")
    with pytest.raises(web.HTTPBadRequest):
        await is_own("ada", stranger, job="no job")
    store.close()


async def test_manifests_are_worked_on_in_turn_even_for_members_that_leave() -> None:
    handlers: Any = Receiver().handlers
    free, running = threading.Event(), list[bytes]()

    def work(member: bytes) -> None:
        running.append(member)
        free.wait(60)
        running.remove(member)

    calls = [
        asyncio.create_task(handlers._in_turn(member, partial(work, member))) for member in (b"a", b"a", b"b", b"c")
    ]
    async with asyncio.timeout(60):
        while len(running) < MANIFESTS:
            await asyncio.sleep(0.01)
        assert sorted(running) == [b"a", b"b"]
        calls[0].cancel()
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert sorted(running) == [b"a", b"b"] and not calls[0].done()
        free.set()
        await asyncio.gather(*calls, return_exceptions=True)
    assert not running and calls[0].cancelled() and not handlers._manifests._held


async def test_blobs_are_compared_with_their_hashes_in_turn() -> None:
    """It takes seconds for the first use of a large one, and the daemon has few threads."""
    handlers: Any = Receiver().handlers
    free, asked, senders = threading.Event(), list[bytes](), iter((b"a", b"a", b"b", b"c", b"d", b"e"))

    async def admit(request: Any) -> tuple[Any, bytes]:
        return SimpleNamespace(node_id=next(senders)), msgspec.msgpack.encode([0])

    def given(digest: bytes, numbers: list[int]) -> None:
        asked.append(digest)
        free.wait(60)
        raise NotGiven("it is damaged")

    handlers._admit = admit
    handlers._packages = handlers._library = SimpleNamespace(given=given)
    request: Any = SimpleNamespace(match_info={"hash": "ab" * 32})
    calls = [asyncio.create_task(call(request)) for call in (handlers._package, handlers._image_blob) * 3]
    async with asyncio.timeout(60):
        while len(asked) < MANIFESTS:
            await asyncio.sleep(0.01)
        waiting = len(handlers._blobs._waiting)
        assert await handlers._in_turn(b"f", lambda: "a manifest") == "a manifest", "none waits for large blobs"
        free.set()
        await asyncio.gather(*calls, return_exceptions=True)
    assert waiting == len(calls) - MANIFESTS and len(asked) == len(calls)


async def test_lists_of_chunks_are_looked_up_in_turn() -> None:
    handlers: Any = Receiver().handlers
    free, asked = threading.Event(), list[bytes]()
    senders = iter((b"a", b"b", b"c"))

    async def admit(body: bytes) -> tuple[Any, bytes]:
        return SimpleNamespace(node_id=next(senders)), body

    def missing(ids: tuple[bytes, ...], not_delta: frozenset[bytes]) -> list[bytes]:
        asked.extend(ids)
        free.wait(60)
        return list(ids)

    handlers._admit, handlers._store = admit, SimpleNamespace(missing=missing)
    calls = [
        asyncio.create_task(handlers._missing(encode_missing_query(MissingQuery((bytes([number]) * 32,)))))
        for number in range(3)
    ]
    async with asyncio.timeout(60):
        while len(asked) < MANIFESTS:
            await asyncio.sleep(0.01)
        assert len(handlers._manifests._waiting) == 3 - MANIFESTS
        free.set()
        assert [(await call).body for call in calls] == [encode_ids([bytes([number]) * 32]) for number in range(3)]

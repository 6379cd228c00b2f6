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
from membership.identity import Identity
from membership.ratelimit import TokenBuckets
from mesh.api.handlers.data import DataHandlers, DataProvider
from mesh.api.requests import AddData, SetGroup
from mesh.data.directory import DataDirectory
from mesh.data.manifest import MAX_GROUPS, SECTION, DataManifest, Group, Held, Reader, encode_announced
from mesh.model.spec import DataNeed
from mesh.rpc import memory, streams
from mesh.rpc.pacing import GIVEN, GIVEN_TO_ONE, Wire
from mesh.util.errors import ExitCode, MeshError
from tests.data import test_directory as mesh
from tests.data.test_directory import Mesh

ADA, EVE, LENDER = b"a" * 32, b"e" * 32, b"l" * 32
EVES = Reader(EVE, "eve")
PROF = b"p" * 32
VISION = Group(PROF, "prof", "vision")


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

    async def version(
        self,
        number: int,
        *readers: Reader,
        removed: bool = False,
        coming: bool = False,
        groups: tuple[Group, ...] = (),
    ) -> bytes:
        identity, root = bytes([number]) * 32, None if removed else self.added.root
        realm = b"" if removed else self.cipher.realm
        manifest = DataManifest(
            1,
            "pictures",
            "ada",
            ADA,
            b"",
            number,
            1,
            root,
            self.added.chunk_bytes,
            readers,
            False,
            realm,
            groups=groups,
        )
        if root is not None and not coming:
            await asyncio.to_thread(self.store.publish, identity, b"sealed", root, self.cipher)
        self.directory.remember(identity, b"sealed", manifest)
        return identity

    def set_group(self, number: int, *members: Reader) -> None:
        group = DataManifest(1, "group:vision", "prof", PROF, b"", number, 1, readers=members)
        self.directory.remember(bytes([number]) * 31 + b"g", b"sealed", group)

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


async def test_members_of_the_newest_group_get_key_and_chunks(giver: Giver) -> None:
    pictures = await giver.version(1, groups=(VISION,))
    giver.runs[b"e" * 16] = SimpleNamespace(user_key=EVE, data=(DataNeed("ada/pictures", pictures),))

    async def gets(user: bytes) -> list[int]:
        chunks = await giver.asked(pictures, user, user), (await giver.asked_key(pictures, user))[0]
        return [*chunks, await giver.asked(pictures, LENDER, LENDER, b"e" * 16)]

    assert await gets(EVE) == [403, 403, 403], "the group is not known"
    giver.set_group(2, EVES)
    assert await gets(EVE) == [200, 200, 200] and (await gets(PROF))[:2] == [403, 403]
    giver.set_group(4, Reader(PROF, "prof"))
    assert await gets(EVE) == [403, 403, 403] and (await gets(PROF))[:2] == [200, 200]
    giver.set_group(3, EVES)
    assert await gets(EVE) == [403, 403, 403], "an older version that comes late"
    giver.set_group(5)
    assert (await gets(PROF))[:2] == [403, 403] and await giver.asked(pictures, ADA, ADA) == 200, "it is removed"
    giver.set_group(6, EVES)
    await giver.version(7)
    assert await gets(EVE) == [403, 403, 403], "the newest version does not name the group"


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
    monkeypatch.setattr(streams, "SLICE_BYTES", 1 << 20)
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


class Owner:
    """The orders of ada on her node, in a mesh with bob and eve. `set`, `added`: what the library is told to do."""

    def __init__(self) -> None:
        self.mesh = Mesh()
        self.set: list[tuple[str, tuple[Reader, ...]]] = []
        self.added: list[tuple[Reader | Group, ...]] = []
        library: Any = SimpleNamespace(directory=self.mesh.directory, set_group=self._set_group, add=self._add)
        membership: Any = SimpleNamespace(credentials=self.mesh.credentials[mesh.ADA.node_id])
        self.handlers = DataHandlers(mesh.ADA.node_id, self.mesh.trust, membership, library)

    async def _set_group(self, name: str, members: tuple[Reader, ...]) -> None:
        self.set.append((name, members))
        self.mesh.directory.remember(*self.made(mesh.ADA, name, len(self.set), members))

    def made(
        self, by: Identity, name: str, number: int, members: tuple[Reader, ...]
    ) -> tuple[bytes, bytes, DataManifest]:
        return self.mesh.made(by, f"group:{name}", number, root=None, chunk_bytes=0, readers=members)

    def _add(self, name: str, path: Path, readers: tuple[Reader | Group, ...], everybody: bool, rehash: bool) -> Any:
        self.added.append(readers)
        task = SimpleNamespace(done=lambda: False)
        return SimpleNamespace(task=task, result={}, problem="", kind="add", name=name, words="")

    def user(self, one: Identity) -> Reader:
        own = self.mesh.credentials[one.node_id]
        return Reader(own.user_key, own.user)


async def test_group_is_set_shown_and_removed() -> None:
    owner = Owner()
    told = await owner.handlers.set_group(SetGroup("vision", ["bob", "eve", "bob"]))
    assert owner.set == [("vision", (owner.user(mesh.BOB), owner.user(mesh.EVE)))]
    (row,) = told.groups
    assert (row.name, row.members, row.mine, row.data) == ("ada/vision", ["bob", "eve"], True, [])
    vision = Group(owner.user(mesh.ADA).key, "ada", "vision")
    owner.mesh.directory.remember(*owner.mesh.made(mesh.BOB, groups=(vision,)))
    owner.mesh.directory.remember(*owner.made(mesh.BOB, "speech", 1, (owner.user(mesh.EVE),)))
    assert [one.name for one in (await owner.handlers.groups("")).groups] == ["ada/vision", "bob/speech"]
    for name in ("vision", "ada/vision"):
        (row,) = (await owner.handlers.groups(name)).groups
        assert row.name == "ada/vision" and row.data == ["bob/pictures"]
    assert not (await owner.handlers.set_group(SetGroup("ada/vision"))).groups and owner.set[-1] == ("vision", ())
    assert [one.name for one in (await owner.handlers.groups("")).groups] == ["bob/speech"]
    for asked in (owner.handlers.groups("vision"), owner.handlers.set_group(SetGroup("vision"))):
        with pytest.raises(MeshError, match="there is no group vision: `mesh data group ls`") as refused:
            await asked
        assert refused.value.code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (SetGroup("bob/vision", ["ada"]), "group bob/vision is bob's: only they can change it"),
        (SetGroup("vision", ["nobody"]), "there is no user nobody"),
        (SetGroup("vision", ["group:speech"]), "there is no user group:speech"),
        (SetGroup("vision", [f"user{number}" for number in range(257)]), "at most 256 members"),
    ],
)
async def test_group_that_cannot_be_is_refused(order: SetGroup, words: str) -> None:
    owner = Owner()
    with pytest.raises(MeshError, match=words):
        await owner.handlers.set_group(order)
    assert not owner.set


async def test_groups_of_a_user_are_bounded() -> None:
    owner = Owner()
    for number in range(MAX_GROUPS):
        await owner.handlers.set_group(SetGroup(f"group{number}", ["bob"]))
    with pytest.raises(MeshError, match=f"at most {MAX_GROUPS} groups"):
        await owner.handlers.set_group(SetGroup("vision", ["bob"]))
    await owner.handlers.set_group(SetGroup("group0", ["eve"]))
    await owner.handlers.set_group(SetGroup("group0"))
    await owner.handlers.set_group(SetGroup("vision", ["bob"]))
    assert len((await owner.handlers.groups("")).groups) == MAX_GROUPS


async def test_data_set_names_groups_as_readers(tmp_path: Path) -> None:
    owner = Owner()
    await owner.handlers.set_group(SetGroup("vision", ["bob"]))
    owner.mesh.directory.remember(*owner.made(mesh.BOB, "speech", 1, (owner.user(mesh.EVE),)))
    readers = ["group:vision", "eve", "group:bob/speech", "group:ada/vision"]
    await owner.handlers.add(AddData("pictures", str(tmp_path), readers))
    ada, bob = (owner.user(one).key for one in (mesh.ADA, mesh.BOB))
    assert owner.added == [(owner.user(mesh.EVE), Group(ada, "ada", "vision"), Group(bob, "bob", "speech"))]
    for readers, words in (
        (["group:speech"], "there is no group speech"),
        (["group:eve/vision"], "there is no group eve/vision"),
        (["group:"], "there is no group"),
        ([f"group:group{number}" for number in range(MAX_GROUPS + 1)], f"at most {MAX_GROUPS} groups"),
    ):
        with pytest.raises(MeshError, match=words):
            await owner.handlers.add(AddData("pictures", str(tmp_path), readers))
    assert len(owner.added) == 1


async def test_list_says_what_the_groups_of_a_node_may_read() -> None:
    owner = Owner()
    vision = Group(owner.user(mesh.BOB).key, "bob", "vision")
    one, _, manifest = owner.mesh.made(mesh.EVE, groups=(vision,), readers=(owner.user(mesh.BOB),))
    owner.mesh.directory.remember(one, b"sealed", manifest)
    no: Any = lambda *given: None  # noqa: E731
    owner.handlers._library.holdings = SimpleNamespace(is_here=no, pinned=no)  # type: ignore[assignment]
    owner.handlers._library.fetcher = SimpleNamespace(words=lambda identity: "")  # type: ignore[assignment]
    owner.handlers._library.path_of = no  # type: ignore[method-assign]
    row = owner.handlers._row(one, manifest, {})
    assert row["readers"] == ["bob", "group:bob/vision"] and row["readable"] is False
    with pytest.raises(MeshError, match="data set eve/pictures is not for you"):
        await owner.handlers.needs(["eve/pictures"])
    owner.mesh.directory.remember(*owner.made(mesh.BOB, "vision", 1, (owner.user(mesh.ADA),)))
    assert owner.handlers._row(one, manifest, {})["readable"] is True
    assert [need.manifest for need in await owner.handlers.needs(["eve/pictures"])] == [one]

"""Data sets: for this machine's user, for jobs that name them, and for other nodes."""

import asyncio
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from ckptstore.cipher import StateCipher
from ckptstore.dataset import Entry
from ckptstore.errors import NotFound, StoreError
from ckptstore.messages import MAX_IDS_BYTES, decode_chunk_request, decode_missing_query, encode_ids
from membership.identity import NodeId
from membership.node import MembershipNode
from membership.ratelimit import TokenBuckets
from membership.trust import USER, Credentials, TrustStore
from mesh.api import schemas
from mesh.api.handlers.lookup import nick_in, nicks_of
from mesh.api.queries import DataQuery, WorkQuery
from mesh.api.requests import AddData, PinData, RemoveData, SetGroup, StopData
from mesh.data.fetcher import QUERY_BYTES
from mesh.data.library import DataLibrary, Work
from mesh.data.manifest import (
    GROUP,
    MAX_GROUPS,
    MAX_READERS,
    MAX_SEALED,
    DataError,
    DataManifest,
    FetchFailed,
    Group,
    Reader,
    check_name,
)
from mesh.jobs.authority import may_order_image, may_read_data
from mesh.jobs.service import JobService
from mesh.model.spec import JOB_ID_BYTES, DataNeed, JobSpec
from mesh.rpc.pacing import Wire
from mesh.rpc.server import Bound, id_in, peer_of
from mesh.rpc.streams import given
from mesh.util.errors import ExitCode, MeshError

MOST_SHOWN = 1000  # entries of a directory
RUNS_S, MOST_RUNS = (
    30.0,
    1024,
)  # for which a witness group's word about a runner counts, and words remembered (own choice)
KEY_CALLS_PER_S = 4.0  # of one node, 32 at once: it keeps what it gets (own choice)
MIB = 1 << 20

T = TypeVar("T")


class DataHandlers:
    def __init__(self, me: NodeId, trust: TrustStore, membership: MembershipNode, library: DataLibrary) -> None:
        self._me, self._trust, self._membership, self._library = me, trust, membership, library

    # --- for jobs

    async def needs(self, texts: Sequence[str], caches: Sequence[str] = ()) -> tuple[DataNeed, ...]:
        """Return what a job asks for with `NAME[:/data/DIR]`, and its caches. MeshError if one is not there or not to be read."""
        found = [await self._cache(name) for name in caches]
        for text in texts:
            name, _, path = text.partition(":")
            known = await self._library.directory.resolve(name)
            if known is not None:
                identity, manifest = known
                if not self._library.directory.may_read(identity, self._membership.credentials.user_key):
                    raise MeshError(
                        f"data set {manifest.full_name} is not for you: {manifest.user} can add you with "
                        f"`mesh data add {manifest.name} PATH --reader {self._membership.credentials.user}`",
                        ExitCode.REFUSED,
                    )
                found.append(DataNeed(manifest.full_name, identity, -(-manifest.chunk_bytes // MIB), path))
            elif "/" not in name:
                try:
                    check_name(name)
                except DataError as error:
                    raise MeshError(str(error), ExitCode.USAGE) from error
                found.append(DataNeed(name, path=path))  # a directory that some nodes offer
            else:
                raise MeshError(
                    f"there is no data set {name}, or no node that has it is there: `mesh data ls`", ExitCode.NOT_FOUND
                )
        return tuple(found)

    async def _cache(self, name: str) -> DataNeed:
        """Return what a job asks for as one of its user's caches, which there need not be yet."""
        try:
            known = await self._library.directory.resolve(check_name(name))
        except DataError as error:
            raise MeshError(f"--cache: {error}", ExitCode.USAGE) from error
        if known is None:
            return DataNeed(name, cache=True)
        identity, manifest = known
        if not manifest.cache:
            raise MeshError(
                f"{manifest.full_name} is a data set that you added with `mesh data add`, and no job changes it: choose another "
                f"name for the cache, or read it with --data {name}",
                ExitCode.USAGE,
            )
        return DataNeed(manifest.full_name, identity, -(-manifest.chunk_bytes // MIB), cache=True)

    async def keys(self, needs: Sequence[DataNeed]) -> dict[bytes, StateCipher]:
        """Return the keys of those that are encrypted, by their versions. MeshError if one cannot be had."""
        found = {}
        for need in needs:
            manifest = self._library.directory.known[need.manifest] if need.manifest else None
            try:
                cipher = None if manifest is None else await self._library.keys.cipher(need.manifest, manifest)
            except FetchFailed as error:
                raise MeshError(str(error)) from error
            if cipher is not None:
                found[need.manifest] = cipher
        return found

    # --- what there is

    def all(self) -> schemas.data.DataSets:
        library, holders = self._library, self._holders()
        rows = [
            schemas.data.DataSet(**self._row(identity, manifest, holders))
            for identity, manifest in library.directory.newest()
        ]
        return schemas.data.DataSets(
            data=rows,
            paths={name: path for name, path in library.paths.items() if "/" not in name},
            used_bytes=library.holdings.used_bytes(),
            quota_bytes=library.holdings.store.quota_bytes,
        )

    def _holders(self) -> dict[bytes, list[str]]:
        """Return the nicks of the other nodes that say they have a data set, by its id."""
        nicks, holders = nicks_of(self._membership), dict[bytes, list[str]]()
        for node, held in self._library.directory.claims():
            holders.setdefault(held.id, []).append(nick_in(nicks, node))
        return holders

    def _row(self, identity: bytes, manifest: DataManifest, holders: Mapping[bytes, list[str]]) -> dict[str, Any]:
        library, own = self._library, self._membership.credentials
        nodes = holders.get(identity, [])
        here = library.holdings.is_here(identity)
        return {
            "name": manifest.full_name,
            "id": identity.hex(),
            "bytes": manifest.size,
            "files": manifest.root.entries if manifest.root is not None else 0,
            "created_unix": manifest.created_unix,
            "readers": [*(one.name for one in manifest.readers), *(group.full_name for group in manifest.groups)],
            "everybody": manifest.everybody,
            "cache": manifest.cache,
            "encrypted": bool(manifest.realm),
            "mine": manifest.user_key == own.user_key,
            "readable": library.directory.may_read(identity, own.user_key),
            "here": here,
            "pinned": library.holdings.pinned(identity),
            "path": library.path_of(manifest),
            "fetching": library.fetcher.words(identity),
            "nodes": sorted([*nodes, own.nick] if here else nodes),
        }

    async def show(self, asked: DataQuery) -> schemas.data.ShownData:
        identity, manifest = await self._find(asked.name)
        entries: list[schemas.data.DataFile] | None = None
        if self._library.holdings.is_here(identity):
            path = [part for part in os.fsencode(asked.path).split(b"/") if part]
            try:
                cipher = await self._library.keys.cipher(identity, manifest)
                entries = await asyncio.to_thread(self._entries, manifest, path, cipher)
            except FetchFailed as error:
                if path:
                    raise MeshError(str(error), ExitCode.REFUSED) from error
            except NotFound as error:
                raise MeshError(str(error), ExitCode.NOT_FOUND) from error
            except StoreError as error:
                raise MeshError(f"{error}; `mesh data verify {asked.name}` repairs it") from error
        elif asked.path:
            raise MeshError(
                f"{manifest.full_name} is not on this node: `mesh data pin {manifest.full_name}` brings it",
                ExitCode.NOT_FOUND,
            )
        more = entries is not None and len(entries) > MOST_SHOWN
        return schemas.data.ShownData(
            **self._row(identity, manifest, self._holders()),
            entries=None if entries is None else entries[:MOST_SHOWN],
            more=more,
        )

    def _entries(
        self, manifest: DataManifest, path: list[bytes], cipher: StateCipher | None
    ) -> list[schemas.data.DataFile]:
        store, link = self._library.holdings.store, manifest.root
        assert link is not None
        if path:
            entry = store.find(link, path, cipher)
            if not stat.S_ISDIR(entry.mode):
                return [_file(entry)]
            link = entry.lists[0]
        return [_file(entry) for _, entry in islice(store.entries(link, cipher), MOST_SHOWN + 1)]

    async def _find(self, name: str) -> tuple[bytes, DataManifest]:
        found = await self._library.directory.resolve(name)
        if found is None:
            raise MeshError(f"there is no data set {name}: `mesh data ls` lists them", ExitCode.NOT_FOUND)
        return found

    async def groups(self, name: str) -> schemas.data.Groups:
        """Return the groups with members, or one of them."""
        directory, data = self._library.directory, dict[tuple[bytes, str], list[str]]()
        found = [await self._find_group(name)] if name else [one for _, one in directory.groups() if one.readers]
        for _, one in directory.newest():
            for group in one.groups:
                data.setdefault(group.key, []).append(one.full_name)
        rows = [
            schemas.data.Group(
                name=f"{one.user}/{one.name.removeprefix(GROUP)}",
                members=[reader.name for reader in one.readers],
                changed_unix=one.created_unix,
                changed_on=self._trust.read_chain(one.chain).nick,
                mine=one.user_key == self._membership.credentials.user_key,
                data=data.get(one.key, []),
            )
            for one in found
        ]
        return schemas.data.Groups(groups=rows)

    async def _find_group(self, name: str) -> DataManifest:
        found = await self._library.directory.resolve_group(name)
        if found is None:
            raise MeshError(f"there is no group {name}: `mesh data group ls` lists them", ExitCode.NOT_FOUND)
        return found[1]

    # --- orders

    def _check_owns(self) -> None:
        if USER not in self._membership.credentials.roles:
            raise MeshError("this node may lend, but own no data sets: its certificate says so", ExitCode.REFUSED)

    def _users(self, names: Sequence[str]) -> tuple[Reader, ...]:
        readers = []
        for name in dict.fromkeys(names):
            holder = self._trust.holder(name, time.time())
            if holder is None:
                raise MeshError(
                    f"there is no user {name} in this mesh: `mesh member ls` lists them", ExitCode.NOT_FOUND
                )
            readers.append(Reader(holder.key, name))
        return tuple(readers)

    async def set_group(self, order: SetGroup) -> schemas.data.Groups:
        """Sign who is in a group of this node's user from now on. Without members it is removed, and no group is returned."""
        self._check_owns()
        own, directory = self._membership.credentials, self._library.directory
        user, _, name = order.name.rpartition("/")
        if user not in {"", own.user}:
            raise MeshError(f"group {order.name} is {user}'s: only they can change it", ExitCode.REFUSED)
        if len(order.members) > MAX_READERS:
            raise MeshError(f"a group has at most {MAX_READERS} members: make a second one", ExitCode.USAGE)
        if not order.members:
            await self._find_group(name)
        elif await directory.resolve_group(name) is None:
            mine = [one for _, one in directory.groups() if one.readers and one.user_key == own.user_key]
            if len(mine) >= MAX_GROUPS:
                raise MeshError(f"a user has at most {MAX_GROUPS} groups: `mesh data group rm` one", ExitCode.USAGE)
        try:
            await self._library.set_group(name, self._users(order.members))
        except DataError as error:
            raise MeshError(str(error), ExitCode.USAGE) from error
        return await self.groups(name) if order.members else schemas.data.Groups(groups=[])

    async def add(self, order: AddData) -> schemas.data.DataWork:
        self._check_owns()
        if not await asyncio.to_thread(Path(order.path).exists):
            raise MeshError(f"{order.path} does not exist", ExitCode.NOT_FOUND)
        if len(order.readers) > MAX_READERS:
            raise MeshError(f"a data set has at most {MAX_READERS} readers: add it for --everybody", ExitCode.USAGE)
        users = self._users([name for name in order.readers if not name.startswith(GROUP)])
        named = [name.removeprefix(GROUP) for name in dict.fromkeys(order.readers) if name.startswith(GROUP)]
        if len(named) > MAX_GROUPS:
            raise MeshError(f"a data set has at most {MAX_GROUPS} groups of readers", ExitCode.USAGE)
        found = [await self._find_group(name) for name in named]
        groups = dict.fromkeys(Group(one.user_key, one.user, one.name.removeprefix(GROUP)) for one in found)
        try:
            work = self._library.add(order.name, Path(order.path), (*users, *groups), order.everybody, order.rehash)
        except DataError as error:
            raise MeshError(str(error), ExitCode.USAGE) from error
        return _shown(work)

    def work(self, asked: WorkQuery) -> schemas.data.DataWork:
        return _shown(self._work(asked))

    async def stop(self, order: StopData) -> schemas.data.DataWork:
        work = self._work(order)
        await self._library.stop(work)
        return _shown(work)

    def _work(self, asked: WorkQuery | StopData) -> Work:
        work = self._library.works.get((asked.kind, asked.name))
        if work is None:
            raise MeshError(
                "the daemon was restarted meanwhile: give the order again, it continues", ExitCode.NOT_FOUND
            )
        return work

    async def remove(self, order: RemoveData) -> schemas.data.RemovedData:
        identity, manifest = await self._find(order.name)
        if not order.here:
            if manifest.user_key != self._membership.credentials.user_key:
                raise MeshError(
                    f"{manifest.full_name} is {manifest.user}'s: only they can remove it from the mesh; --here drops it "
                    "from this node",
                    ExitCode.REFUSED,
                )
            await self._library.remove(manifest)
            return schemas.data.RemovedData(name=manifest.full_name, here=False)
        if not self._library.holdings.is_here(identity):
            raise MeshError(f"{manifest.full_name} is not on this node", ExitCode.NOT_FOUND)
        if not order.force and await self._library.space.is_last_copy(identity):
            raise MeshError(
                f"no other node that is there has {manifest.full_name} whole: --force drops the last copy",
                ExitCode.REFUSED,
            )
        try:
            await self._library.drop_here(identity)
        except FetchFailed as error:
            raise MeshError(str(error), ExitCode.REFUSED) from error
        return schemas.data.RemovedData(name=manifest.full_name, here=True)

    async def verify(self, name: str) -> schemas.data.DataWork:
        identity, manifest = await self._find(name)
        if not self._library.holdings.is_here(identity):
            raise MeshError(
                f"{manifest.full_name} is not on this node: `mesh data pin {manifest.full_name}` brings it",
                ExitCode.NOT_FOUND,
            )
        return _shown(self._library.verify(identity, manifest))

    async def pin(self, order: PinData) -> schemas.data.DataWork:
        identity, manifest = await self._find(order.name)
        own = self._membership.credentials
        if order.off:
            self._library.holdings.pin(identity, False)
        elif not self._library.directory.may_read(identity, own.user_key):
            raise MeshError(f"data set {manifest.full_name} is not for {own.user}", ExitCode.REFUSED)
        else:
            self._library.holdings.pin(identity, True)
            if not self._library.holdings.is_here(identity):
                return _shown(self._library.pull(identity, manifest))
            if not self._library.holdings.is_whole(identity):
                return _shown(self._library.verify(identity, manifest))
        return schemas.data.DataWork(kind="pin", name=manifest.full_name, over=True)


def _file(entry: Entry) -> schemas.data.DataFile:
    kind = "directory" if stat.S_ISDIR(entry.mode) else "link" if stat.S_ISLNK(entry.mode) else "file"
    return schemas.data.DataFile(
        name=_text(entry.name),
        kind=kind,
        bytes=entry.size,
        files=sum(link.entries for link in entry.lists),
        target=_text(entry.target),
    )


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _shown(work: Work) -> schemas.data.DataWork:
    over = work.task.done()
    counts = work.result if over and not work.problem else {}
    counts = {key: value for key, value in counts.items() if key in schemas.data.DataWork.__struct_fields__}
    return schemas.data.DataWork(
        kind=work.kind,
        name=work.name,
        over=over,
        words=work.words,
        problem=work.problem,
        **counts,  # type: ignore[arg-type]
    )


Admit = Callable[[web.Request], Awaitable[tuple[Credentials, bytes]]]


class DataProvider:
    """Gives data sets to other nodes: manifests to every member, content to those who may read it."""

    def __init__(
        self,
        trust: TrustStore,
        membership: MembershipNode,
        library: DataLibrary,
        jobs: JobService,
        wire: Wire,
        accepts: tuple[str, ...],
    ) -> None:
        self._trust, self._membership, self._library, self._jobs = trust, membership, library, jobs
        self._wire, self._accepts = wire, accepts
        self._runs = OrderedDict[tuple[bytes, NodeId], tuple[JobSpec, float]]()
        self._key_calls = TokenBuckets(KEY_CALLS_PER_S)

    def routes(self, admit: Admit) -> list[tuple[str, str, Handler, Bound | None]]:
        self._admit = admit
        return [
            ("GET", "/v1/data/{id}", self._manifest, Bound(answer=MAX_SEALED)),
            ("GET", "/v1/data/{id}/held", self._held, Bound()),
            ("GET", "/v1/data/{id}/key", self._key, Bound()),
            ("POST", "/v1/data/{id}/fetch", self._fetch, Bound()),
            ("POST", "/v1/data/{id}/chunks", self._chunks, Bound(MAX_IDS_BYTES)),
            ("POST", "/v1/data/{id}/missing", self._missing, Bound(QUERY_BYTES, QUERY_BYTES)),
        ]

    async def _manifest(self, request: web.Request) -> web.Response:
        await self._admit(request)
        sealed = self._library.directory.sealed(id_in(request, "id", 32))
        if sealed is None:
            raise web.HTTPNotFound(text="this node does not know the data set")
        return web.Response(body=sealed)

    async def _held(self, request: web.Request) -> web.Response:
        await self._admit(request)
        return web.Response(body=self._library.space.held_answer(id_in(request, "id", 32)))

    async def _key(self, request: web.Request) -> web.Response:
        """Give the key of a version to a node whose user may read it. A job brings the key itself."""
        if not self._key_calls.allow(peer_of(request), time.monotonic()):
            raise web.HTTPServiceUnavailable(text="this node makes too many calls for keys of data sets")
        credentials, _ = await self._admit(request)
        identity = id_in(request, "id", 32)
        manifest = self._library.directory.known.get(identity)
        if manifest is None:
            raise web.HTTPNotFound(text="this node does not know the data set")
        directory = self._library.directory
        if not may_read_data(credentials, directory.with_newest(identity), identity, members=directory.members):
            self._refuse(credentials, "the key", manifest)
        cipher = self._library.keys.known(manifest.realm)
        if cipher is None:
            raise web.HTTPNotFound(text="this node does not have the key of the data set")
        return web.Response(body=cipher.key)

    def _refuse(self, caller: Credentials, what: str, manifest: DataManifest) -> NoReturn:
        self._jobs.replicator.refusals.count(
            "foreign", caller.node_id, f"it asked for {what} of data set {manifest.full_name}"
        )
        raise web.HTTPForbidden(text=f"data set {manifest.full_name} is not for {caller.user}")

    async def _fetch(self, request: web.Request) -> web.Response:
        """Start to fetch a data set for another node, whose job may come here; as far as this node's user may read it."""
        credentials, _ = await self._admit(request)
        identity, own = id_in(request, "id", 32), self._membership.credentials
        if not may_order_image(credentials, own, self._accepts):
            raise web.HTTPForbidden(text=f"this node takes nothing of {credentials.user}")
        if self._library.holdings.is_whole(identity):
            return web.Response(body=b"whole")
        manifest = self._library.directory.known.get(identity)
        if manifest is None or manifest.root is None:
            raise web.HTTPNotFound(text="this node does not know the data set")
        if not self._library.directory.may_read(identity, own.user_key):
            raise web.HTTPForbidden(text="the data set is not for this node's user: it comes with the job")
        self._library.pull(identity, manifest)
        return web.Response(body=b"fetching")

    async def _order(self, request: web.Request, decode: Callable[[bytes], T]) -> tuple[Credentials, bytes, T]:
        """Return who asks, the data set's id and the decoded body, if they may read its chunks and it is here or coming."""
        credentials, body = await self._admit(request)
        identity = id_in(request, "id", 32)
        manifest = self._library.directory.known.get(identity)
        here = self._library.holdings.is_here(identity) or identity in self._library.fetcher.coming()
        if manifest is None or not here:
            raise web.HTTPNotFound(text="this node does not have the data set")
        if not await self._may_read(credentials, identity, request.query.get("job", "")):
            self._refuse(credentials, "chunks", manifest)
        try:
            return credentials, identity, decode(body)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error

    async def _missing(self, request: web.Request) -> web.Response:
        """Say which of some chunks have not come yet, to a node that fetches the same data set."""
        _, identity, query = await self._order(request, decode_missing_query)
        missing = await asyncio.to_thread(self._library.holdings.store.lacks, identity, query.ids)
        return web.Response(body=encode_ids(missing))

    async def _chunks(self, request: web.Request) -> web.StreamResponse:
        credentials, identity, order = await self._order(request, decode_chunk_request)
        try:
            if not await asyncio.to_thread(self._library.holdings.store.belongs, identity, order.ids):
                raise web.HTTPForbidden(text="these are not chunks of the data set")
            store = self._library.holdings.store
            frames = await asyncio.to_thread(store.stream, order.ids)
            size = await asyncio.to_thread(store.stream_size, order.ids)
            answer = await given(request, self._wire, frames, "data", credentials.node_id, size)
        except StoreError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return answer.response

    async def _may_read(self, caller: Credentials, identity: bytes, job: str) -> bool:
        members, versions = self._library.directory.members, self._library.directory.with_newest(identity)
        if may_read_data(caller, versions, identity, members=members):
            return True
        try:
            wanted = bytes.fromhex(job)
        except ValueError:
            return False
        if len(wanted) != JOB_ID_BYTES:
            return False
        running = await self._running(wanted, caller.node_id)
        return may_read_data(caller, versions, identity, running, members)

    async def _running(self, job: bytes, node: NodeId) -> JobSpec | None:
        known = self._runs.get((job, node))
        if known is not None and known[1] > time.monotonic():
            return known[0]
        spec = await self._jobs.vouching.read_by_runner(job, node)
        if spec is not None:
            self._runs[job, node] = (spec, time.monotonic() + RUNS_S)
            while len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
        return spec

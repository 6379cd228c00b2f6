"""Fetching of data sets, between real stores: from several holders, again after failures, and no more than was said."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.cipher import StateCipher
from ckptstore.dataset_adder import Adder
from ckptstore.dataset_store import DataSets
from ckptstore.errors import CorruptChunk
from ckptstore.fetch import Request
from ckptstore.messages import decode_missing_query, encode_ids
from mesh.data import fetcher as fetcher_module
from mesh.data.fetcher import FETCHES, LEAST_MEASURED, ROUNDS, DataFetcher, Speed
from mesh.data.holdings import Holdings
from mesh.data.manifest import DataManifest, FetchFailed
from mesh.data.space import Room
from mesh.rpc.client import PeerError
from tests.ckptstore.worlds import feed

FIRST, SECOND = b"1" * 32, b"2" * 32
JOB, CIPHER = b"j" * 16, StateCipher(b"the key of a private data set..!")
FILES, SIZE = 6, 600_000  # a chunk each


class Fetching:
    """A node that fetches from holders, each with a real store. `fails`: errors that a holder raises, one for each request."""

    def __init__(self, root: Path, cipher: StateCipher | None = None) -> None:
        self.cipher = cipher
        self.holders = {node: DataSets(root / name) for node, name in ((FIRST, "first"), (SECOND, "second"))}
        source = root / "source"
        source.mkdir()
        for number in range(FILES):
            (source / f"{number}").write_bytes(os.urandom(SIZE))
        for store in self.holders.values():
            with store.working():
                added = Adder(store, lambda progress: None, False, cipher).add(source)
                self.root, self.bytes = added.root, added.chunk_bytes
                store.publish(b"i" * 32, b"sealed", self.root, cipher)
        self.manifest = DataManifest(1, "set", "ada", b"a" * 32, b"chain", 1, 1000, self.root, self.bytes)
        if cipher is not None:
            self.manifest = msgspec.structs.replace(self.manifest, realm=cipher.realm)
        self.identity = b"i" * 32
        self.listed, self.fetching = [FIRST, SECOND], list[bytes]()
        self.lacks: dict[bytes, int] = {}  # first chunks that a node which fetches says it lacks, too
        self.fails: dict[bytes, list[Exception]] = {FIRST: [], SECOND: []}
        self.asked: list[Request] = []
        self.paths: set[str] = set()
        self.blamed: list[bytes] = []
        self.told: list[list[bytes]] = []
        self.arrived: list[bytes] = []
        self.room: list[int] = []
        self.arriving: list[Room] = []
        self.hang: asyncio.Event | None = None
        self.known = {self.identity: self.manifest}
        self.spared: set[bytes] = set()  # holders that do not lend now
        directory: Any = SimpleNamespace(
            known=self.known,
            sealed=lambda identity: b"sealed",
            holders=lambda identity: list(self.listed),
            fetching=lambda identity: list(self.fetching),
            lends=lambda node: node not in self.spared,
        )
        space: Any = SimpleNamespace(room=self._make_room, arrival=self._arrive)
        self.holdings = Holdings(root / "here", None, directory, lambda realm: self.cipher)
        peers: Any = SimpleNamespace(call=self._call)
        self.fetcher = DataFetcher(
            self.holdings,
            directory,
            space,
            peers,
            self._cipher,
            lambda node, what: self.blamed.append(node),
            lambda: self.told.append(self.fetcher.coming()),
            lambda identity, sealed, manifest: self.arrived.append(identity),
        )

    async def _cipher(self, identity: bytes, manifest: DataManifest) -> StateCipher | None:
        return self.cipher

    async def _call(
        self, node: bytes, method: str, path: str, body: bytes, timeout_s: float, answer_bytes: int
    ) -> bytes:
        """Answer as a node that fetches the same, and has all but the first chunks of a question."""
        assert (method, path) == ("POST", f"/v1/data/{self.identity.hex()}/missing?job={JOB.hex()}")
        ids = decode_missing_query(body).ids
        answer = encode_ids([*ids[: self.lacks[node]], *self.holders[node].lacks(self.identity, ids)])
        assert len(answer) <= answer_bytes
        return answer

    @asynccontextmanager
    async def _make_room(self, more: int, what: str, identity: bytes) -> AsyncIterator[Room]:
        self.room.append(more)
        self.promised = Room(more)
        yield self.promised

    @asynccontextmanager
    async def _arrive(self, more: int, what: str, identity: bytes) -> AsyncIterator[Room]:
        self.arriving.append(Room(more))
        yield self.arriving[-1]

    async def pulled(self, peers: None, request: Request, path: str, body: bytes, receiver: Any) -> Any:
        """Stand for the network: hand over what the holder's store streams."""
        self.asked.append(request)
        self.paths.add(path)
        try:
            if self.hang is not None:
                await self.hang.wait()
            if self.fails[request.source]:
                raise self.fails[request.source].pop(0)
            for data in self.holders[request.source].stream(request.ids):
                feed(receiver, data)
        except BaseException:
            receiver.abort()
            raise
        finish = asyncio.create_task(asyncio.to_thread(receiver.keep))
        return [one for one in request.ids if one in receiver.arrived], finish

    async def fetch(self, job: bytes | None = JOB, identity: bytes = b"i" * 32, **changes: Any) -> None:
        manifest = msgspec.structs.replace(self.manifest, **changes)
        await self.fetcher.fetch(identity, manifest, lambda: job, lambda words: None)


@pytest.fixture
async def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    fetching = Fetching(tmp_path, getattr(request, "param", CIPHER))
    monkeypatch.setattr(fetcher_module, "pulled", fetching.pulled)
    monkeypatch.setattr(fetcher_module, "RETRY_S", 0.001)
    await fetching.holdings.open()
    yield fetching
    await fetching.fetcher.close()
    await fetching.holdings.close()
    for store in fetching.holders.values():
        store.close()


@pytest.mark.parametrize("fetching", [None, CIPHER], ids=["public", "private"], indirect=True)
async def test_data_set_comes_from_all_holders(fetching: Fetching) -> None:
    await fetching.fetch()
    assert fetching.arrived == [fetching.identity] and fetching.holdings.store.has(fetching.identity)
    assert {request.source for request in fetching.asked} == {FIRST, SECOND}
    assert fetching.room == [fetching.bytes] and fetching.promised.left == 0
    assert len(fetching.arriving) > 1 and not any(room.left for room in fetching.arriving)
    assert fetching.paths == {f"/v1/data/{fetching.identity.hex()}/chunks?job={JOB.hex()}"}
    tree = fetching.holdings.store.make_tree(fetching.identity, fetching.root, cipher=fetching.cipher)
    assert sum(1 for _ in tree.iterdir()) == FILES


async def test_fetch_measures_its_speed(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "LEAST_MEASURED", 1)
    await fetching.fetch()
    assert fetching.fetcher.speed.mib_s


async def test_holder_that_fails_is_replaced_by_another(fetching: Fetching) -> None:
    fetching.fails[FIRST] = [PeerError("it is off")] * 50
    await fetching.fetch()
    assert fetching.arrived and not fetching.blamed


async def test_holder_that_does_not_lend_now_is_asked_only_for_what_others_do_not_give(fetching: Fetching) -> None:
    fetching.spared = {SECOND}
    await fetching.fetch()
    assert fetching.arrived and {request.source for request in fetching.asked} == {FIRST}


async def test_holder_that_does_not_lend_now_gives_what_no_other_does(fetching: Fetching) -> None:
    fetching.spared, fetching.fails[FIRST] = {SECOND}, [PeerError("it is off")] * 50
    await fetching.fetch()
    assert fetching.arrived and {request.source for request in fetching.asked} == {FIRST, SECOND}


async def test_holder_that_sends_wrong_data_is_blamed(fetching: Fetching) -> None:
    fetching.fails[FIRST] = [CorruptChunk("not what was asked for")]
    await fetching.fetch()
    assert fetching.arrived and fetching.blamed == [FIRST]


async def test_data_set_comes_from_nodes_that_fetch_it_as_far_as_they_have_it(fetching: Fetching) -> None:
    fetching.listed, fetching.fetching, fetching.lacks = [FIRST], [SECOND], {SECOND: 1}
    await fetching.fetch()
    assert fetching.arrived and {request.source for request in fetching.asked} == {FIRST, SECOND}


async def test_nodes_that_fetch_it_are_enough_if_they_have_it(fetching: Fetching) -> None:
    fetching.listed, fetching.fetching, fetching.lacks = [], [SECOND], {SECOND: 0}
    await fetching.fetch()
    assert fetching.arrived and {request.source for request in fetching.asked} == {SECOND}


async def test_node_that_answers_nonsense_about_what_it_has_is_dropped(fetching: Fetching) -> None:
    async def nonsense(*order: Any, **bounds: Any) -> bytes:
        return b"\xc1"

    fetching.listed, fetching.fetching = [FIRST], [SECOND]
    fetching.fetcher._peers.call = nonsense  # type: ignore[method-assign]
    await fetching.fetch()
    assert fetching.arrived and {request.source for request in fetching.asked} == {FIRST}


async def test_chunks_count_as_those_of_the_set_as_they_come(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it gives them on, and need not walk the tree again at the end."""
    monkeypatch.setattr(fetcher_module, "LEAST_GIVEN_ON", 1)
    fetching.hang = asyncio.Event()
    ids = [one for one, _ in fetching.holders[FIRST].chunks(fetching.root, fetching.cipher)]
    whole = asyncio.create_task(fetching.fetch())
    while not fetching.asked:
        await asyncio.sleep(0)
    store = fetching.holdings.store
    assert fetching.fetcher.coming() == [fetching.identity] and fetching.told == [[fetching.identity]]
    assert store.belongs(fetching.identity, [fetching.root.id]) and store.lacks(fetching.identity, ids) == ids
    monkeypatch.setattr(store, "enter", None)
    fetching.hang.set()
    await whole
    assert fetching.fetcher.coming() == [] and store.lacks(fetching.identity, ids) == []
    assert store.known() == fetching.holders[FIRST].known()


async def test_small_data_set_is_not_given_on_while_it_comes(fetching: Fetching) -> None:
    fetching.hang = asyncio.Event()
    whole = asyncio.create_task(fetching.fetch())
    while not fetching.asked:
        await asyncio.sleep(0)
    assert fetching.fetcher.coming() == []
    whole.cancel()
    await asyncio.gather(whole, return_exceptions=True)


async def test_fetch_is_tried_again_and_then_given_up(fetching: Fetching) -> None:
    fetching.listed = [FIRST]
    fetching.fails[FIRST] = [PeerError("it is off")] * (ROUNDS - 1)
    await fetching.fetch()
    assert len(fetching.arrived) == 1
    fetching.listed = []
    with pytest.raises(FetchFailed, match="no node that is there has it whole"):
        await fetching.fetch(root=msgspec.structs.replace(fetching.root, id=b"?" * 32))


async def test_fetch_goes_on_where_it_was(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that arrived before a failure are not requested again."""
    fetching.listed = [FIRST]
    real = fetching.pulled
    requests = 0

    async def once(*order: Any) -> Any:
        nonlocal requests
        requests += 1
        if requests == 2:
            raise PeerError("it is off")
        return await real(*order)

    monkeypatch.setattr(fetcher_module, "pulled", once)
    await fetching.fetch()
    asked = [one for request in fetching.asked for one in request.ids]
    assert len(asked) == len(set(asked)) and requests > 2


async def test_data_set_with_more_than_its_manifest_says_is_given_up(fetching: Fetching) -> None:
    with pytest.raises(FetchFailed, match=r"more than the .* that its manifest says"):
        await fetching.fetch(chunk_bytes=fetching.bytes - 1)
    assert not fetching.arrived and not fetching.holdings.store.has(fetching.identity)
    assert fetching.holdings.store.stored_bytes() < fetching.bytes


async def test_fetch_is_shared_and_ends_with_the_last_that_waits(fetching: Fetching) -> None:
    fetching.hang = asyncio.Event()
    waiters = [asyncio.create_task(fetching.fetch()) for _ in range(2)]
    while not fetching.asked:
        await asyncio.sleep(0)
    assert fetching.fetcher.words(fetching.identity)
    waiters[0].cancel()
    await asyncio.gather(waiters[0], return_exceptions=True)
    assert fetching.fetcher.words(fetching.identity), "another waits for it"
    waiters[1].cancel()
    await asyncio.gather(waiters[1], return_exceptions=True)
    fetching.hang.set()
    assert not fetching.fetcher.words(fetching.identity) and not fetching.arrived
    await fetching.fetch()
    assert fetching.arrived == [fetching.identity], "a later one begins anew"


async def test_end_of_a_fetch_does_not_end_the_sharing_of_the_next(fetching: Fetching) -> None:
    """The first caller tries again before the second has heard of the failure."""
    fetching.listed = []

    async def twice() -> None:
        with pytest.raises(FetchFailed):
            await fetching.fetch()
        fetching.listed = [FIRST]
        await fetching.fetch()

    first, second = asyncio.create_task(twice()), asyncio.create_task(fetching.fetch())
    with pytest.raises(FetchFailed):
        await second
    assert fetching.fetcher.words(fetching.identity)
    await asyncio.gather(first, fetching.fetch())
    assert fetching.arrived == [fetching.identity]


async def test_shared_fetch_has_the_rights_of_a_job_that_still_waits(fetching: Fetching) -> None:
    fetching.hang = asyncio.Event()
    first, second, user = (asyncio.create_task(fetching.fetch(job)) for job in (JOB, b"k" * 16, None))
    while not fetching.asked:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    asked = len(fetching.asked)
    fetching.paths.clear()
    fetching.hang.set()
    await asyncio.gather(second, user)
    assert len(fetching.asked) > asked and {path.partition("=")[2] for path in fetching.paths} == {"6b" * 16}


async def test_job_does_not_wait_for_what_others_have_ordered(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "LEAST_GIVEN_ON", 1)
    fetching.hang = asyncio.Event()
    others = [bytes([number]) * 32 for number in range(FETCHES + 1)]
    fetching.known |= dict.fromkeys(others, fetching.manifest)
    ordered = [asyncio.create_task(fetching.fetch(None, identity=one)) for one in others]
    while len(fetching.paths) < FETCHES:
        await asyncio.sleep(0)
    assert fetching.fetcher.coming() == others[:FETCHES], "the last waits, so it has nothing to give"
    for identity in (others[-1], fetching.identity):  # one that waits already, and another one
        wanted = asyncio.create_task(fetching.fetch(identity=identity))
        async with asyncio.timeout(60):
            while not any(identity.hex() in path for path in fetching.paths):
                await asyncio.sleep(0)
        wanted.cancel()
        await asyncio.gather(wanted, return_exceptions=True)
    for task in ordered:
        task.cancel()
    await asyncio.gather(*ordered, return_exceptions=True)


async def test_node_that_leaves_ends_its_fetches(fetching: Fetching) -> None:
    fetching.hang = asyncio.Event()
    waiter = asyncio.create_task(fetching.fetch())
    while not fetching.asked:
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await fetching.fetcher.close()
        with pytest.raises(FetchFailed, match="this node is leaving"):
            await waiter


async def test_awaited_chunk_on_its_way_is_not_requested_twice(fetching: Fetching) -> None:
    fetching.hang = asyncio.Event()
    whole = asyncio.create_task(fetching.fetch())
    while not fetching.asked:
        await asyncio.sleep(0)
    first = {fetching.root.id: fetching.root.length}
    awaited = asyncio.create_task(fetching.fetcher.at_once(fetching.identity, JOB, first))
    await asyncio.sleep(0)
    fetching.hang.set()
    assert await awaited == 0
    await whole
    asked = [one for request in fetching.asked for one in request.ids]
    assert asked.count(fetching.root.id) == 1 and fetching.arrived


async def test_awaited_chunk_that_does_not_come_is_requested_anew(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "COMING_S", 0.001)
    fetching.hang = hang = asyncio.Event()
    whole = asyncio.create_task(fetching.fetch())
    while not fetching.asked:
        await asyncio.sleep(0)
    fetching.hang = None
    first = {fetching.root.id: fetching.root.length}
    async with asyncio.timeout(60):
        assert await fetching.fetcher.at_once(fetching.identity, JOB, first) == fetching.root.length
    hang.set()
    await whole


async def test_read_that_is_given_up_ends_all_its_requests(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for one chunk that is on its way, and has requested another."""
    monkeypatch.setattr(fetcher_module, "COMING_S", 60.0)
    (page,) = {page for page, _ in fetching.holders[FIRST].entries(fetching.root, fetching.cipher)}
    fetching.hang = asyncio.Event()
    whole = asyncio.create_task(fetching.fetch())
    while not fetching.asked:
        await asyncio.sleep(0)
    wanted = {fetching.root.id: fetching.root.length, **dict([list(page.chunks)[-1]])}
    awaited = asyncio.create_task(fetching.fetcher.at_once(fetching.identity, JOB, wanted))
    while len(fetching.asked) < 2:
        await asyncio.sleep(0)
    awaited.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(awaited, return_exceptions=True)
    assert awaited.cancelled()
    fetching.hang.set()
    await whole


async def test_awaited_chunk_comes_first(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "COMING_S", 60.0)
    (page,) = {page for page, _ in fetching.holders[FIRST].entries(fetching.root, fetching.cipher)}
    last = dict([list(page.chunks)[-1]])
    fetching.hang = asyncio.Event()
    awaited = asyncio.create_task(fetching.fetcher.at_once(fetching.identity, JOB, last))
    while not fetching.asked:
        await asyncio.sleep(0)
    whole = asyncio.create_task(fetching.fetch())
    while not fetching.fetcher.words(fetching.identity):
        await asyncio.sleep(0)
    fetching.hang.set()
    assert await awaited == sum(last.values())
    await whole
    asked = [one for request in fetching.asked for one in request.ids]
    assert asked[0] in last and asked.count(asked[0]) == 1 and fetching.arrived


class Everything:
    def __contains__(self, one: object) -> bool:
        return True


async def test_awaited_chunks_stay_while_one_comes(fetching: Fetching) -> None:
    """They belong to no data set that is here."""
    (page,) = {page for page, _ in fetching.holders[FIRST].entries(fetching.root, fetching.cipher)}
    (first, *_, last), store = page.chunks, fetching.holdings.store
    await fetching.fetcher.at_once(fetching.identity, JOB, dict([first]))
    fetching.hang = asyncio.Event()
    awaited = asyncio.create_task(fetching.fetcher.at_once(fetching.identity, JOB, dict([last])))
    while len(fetching.asked) < 2:
        await asyncio.sleep(0)
    store.free(time.time(), Everything())
    assert not store.missing([first[0]])
    fetching.hang.set()
    await awaited
    store.free(time.time(), Everything())
    assert set(store.missing([first[0], last[0]])) == {first[0], last[0]}, "nobody waits for them any more"


async def test_awaited_chunk_comes_from_a_node_that_fetches_the_set(fetching: Fetching) -> None:
    """The holder is asked first, and fails."""
    fetching.listed, fetching.fetching, fetching.lacks = [FIRST], [SECOND], {SECOND: 0}
    fetching.fails[FIRST] = [PeerError("it is off")]
    awaited = {fetching.root.id: fetching.root.length}
    assert await fetching.fetcher.at_once(fetching.identity, JOB, awaited) == fetching.root.length
    assert [request.source for request in fetching.asked] == [FIRST, SECOND]


async def test_space_is_made_for_what_comes_and_not_for_what_is_claimed(fetching: Fetching) -> None:
    """Nobody gives the first page of a set that claims a TiB."""
    for node in (FIRST, SECOND):
        fetching.fails[node] = [PeerError("it is off")] * 50
    with pytest.raises(FetchFailed, match="it is off"):
        await fetching.fetch(chunk_bytes=1 << 40)
    assert fetching.room == [1 << 40] and [room.left for room in fetching.arriving] == [fetching.root.length] * ROUNDS
    fetching.arriving.clear()
    fetching.fails = {FIRST: [], SECOND: []}
    await fetching.fetcher.at_once(fetching.identity, JOB, {fetching.root.id: fetching.root.length})
    assert [room.left for room in fetching.arriving] == [fetching.root.length], "also for what a read waits for"


async def test_awaited_chunk_that_no_node_has_yet_is_an_error_at_once(fetching: Fetching) -> None:
    fetching.listed, fetching.fetching, fetching.lacks = [], [SECOND], {SECOND: 1}
    with pytest.raises(FetchFailed, match="does not have it yet"):
        await fetching.fetcher.at_once(fetching.identity, JOB, {fetching.root.id: fetching.root.length})
    assert not fetching.asked


async def test_all_nodes_that_fetch_a_set_are_asked_in_turn(fetching: Fetching) -> None:
    """Many only say that they fetch it."""
    idle = [bytes([number]) * 32 for number in range(100, 150)]
    fetching.listed, fetching.fetching, fetching.lacks = [], [*idle, SECOND], dict.fromkeys(idle, 99) | {SECOND: 0}
    fetching.holders |= dict.fromkeys(idle, fetching.holders[FIRST])
    await fetching.fetch()
    assert fetching.arrived and {request.source for request in fetching.asked} == {SECOND}


async def test_awaited_chunk_that_nobody_has_is_an_error(fetching: Fetching) -> None:
    fetching.listed = []
    with pytest.raises(FetchFailed, match="no node that is there has it whole"):
        await fetching.fetcher.at_once(fetching.identity, JOB, {b"?" * 32: 10})


async def test_chunk_in_the_clear_is_not_taken_for_a_private_set(fetching: Fetching) -> None:
    """Its owner names chunks of others, which a holder has in the clear."""
    with fetching.holders[FIRST].working():
        clear = Adder(fetching.holders[FIRST]).add(fetching.holders[FIRST].root.parent / "source" / "0")
    fetching.listed = [FIRST]
    with pytest.raises(FetchFailed, match="with another key than what it belongs to"):
        await fetching.fetch(root=clear.root, chunk_bytes=clear.chunk_bytes)
    assert fetching.blamed and not fetching.arrived and fetching.holdings.store.stored_bytes() == 0


def test_speed_is_of_the_last_bytes_and_unknown_at_first() -> None:
    speed = Speed()
    assert speed.mib_s == 0
    speed.note(LEAST_MEASURED - 1, 0.5)
    assert speed.mib_s == 0, "too little to tell"
    speed.note(LEAST_MEASURED, 0.5)
    assert speed.mib_s == 127
    speed.note(1 << 33, 1.0)
    for _ in range(200):
        speed.note(64 << 20, 1.0)
    assert 64 <= speed.mib_s <= 65, "what came twelve half-lives ago hardly counts"
    stalled = Speed()
    stalled.note(LEAST_MEASURED, 10**6)
    assert stalled.mib_s == 1, "slow, not unknown"
    at_once = Speed()
    at_once.note(LEAST_MEASURED, 0.0)
    assert at_once.mib_s == 0, "the clock did not move"

"""Witness group: the present group is what majorities say, one after the other, from a known group on."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from mesh.checkpoints.witness_group import GROUPS_FOLLOWED, WitnessGroup, Words, is_outdated, last_words
from mesh.consensus.effects import WitnessRecord
from mesh.model.record import Config, Voter
from mesh.rpc.client import PeerError
from tests.consensus.worlds import JOB, A, B, C, D, E, make_witness, voters

F = b"\x06" * 32
OLD, NEW, ALONE = Config(0, 0, voters(A, B, C)), Config(1, 1, voters(A, D, E)), Config(1, 1, voters(A))


def record(config: Config = OLD, **changes: Any) -> WitnessRecord:
    return msgspec.structs.replace(make_witness().witness_record, config=config, **changes)


class Records:
    """Stands in for the network: each node's record of the job."""

    def __init__(self, records: dict[bytes, WitnessRecord]) -> None:
        self.records = records
        self.asked = 0

    async def call(self, node: bytes, method: str, path: str, timeout_s: float) -> bytes:
        self.asked += 1
        await asyncio.sleep(0)
        if node not in self.records:
            raise PeerError("it is gone")
        return msgspec.msgpack.encode(self.records[node])


async def present(
    records: dict[bytes, WitnessRecord],
    *,
    me: bytes = F,
    known: Config = OLD,
    recovered: Callable[[WitnessRecord], Config | None] = lambda record: None,
) -> Config | None:
    peers: Any = Records({node: kept for node, kept in records.items() if node != me})
    own = {JOB: SimpleNamespace(witness_record=records[me])} if me in records else {}
    participant: Any = SimpleNamespace(witnesses=own)
    found = await WitnessGroup(me, peers, participant, recovered).present(JOB, known)
    return found[0] if found is not None else None


async def test_majority_of_the_known_group_is_needed() -> None:
    assert await present({A: record(), B: record()}) == OLD
    assert await present({A: record()}) is None
    pair = Config(0, 0, voters(A, B))
    assert await present({A: record(pair)}, known=pair) is None, "half of a group is no majority"


async def test_old_copy_of_a_journal_counts_only_for_what_stays_true() -> None:
    """Regression: the only first witness, with an old copy, hid the later group and the end that this one knew."""
    alone, old = Config(0, 0, voters(A)), b"old copy"
    assert await present({A: record(alone, disk=old)}, known=alone) is None
    assert await present({A: record(disk=old), B: record()}) is None, "one vote of three"
    assert await present({A: record(disk=old), B: record(), C: record()}) == OLD
    assert await present({A: record(alone, disk=old, final=True)}, known=alone) == alone, "a job stays over"
    assert await present({A: record(NEW, disk=old), B: record()}) == OLD, "the later group is still to be found"
    again = alone.joint((Voter(A, old),), 1)
    assert await present({A: record(again, disk=old)}, known=again) == again, "its new disk votes"


async def test_newer_group_counts_once_a_majority_of_the_older_one_knows_it() -> None:
    new = dict.fromkeys((A, D, E), record(NEW))
    assert await present({**new, B: record(NEW), C: record()}) == NEW
    liar = {A: record(Config(9, 9, voters(A))), B: record(), C: record()}
    assert await present(liar) == OLD, "one witness alone cannot name a group"


async def test_change_that_was_given_up_ends_no_search() -> None:
    given_up = OLD.joint(voters(B, C, D), 1)
    newer = Config(1, 2, voters(A, C, E))
    records = {B: record(given_up), D: record(given_up), A: record(newer), C: record(newer), E: record(newer)}
    assert await present(records, known=given_up) == newer, "most of the old group went another way"
    assert await present({**records, C: record(given_up)}, known=given_up) == given_up, "one of the old group alone"
    done = given_up.settled()
    records = {A: record(), B: record(done), C: record(done), D: record(done)}
    assert await present(records, known=given_up) == done
    assert await present({A: record(), C: record(done)}, known=given_up) is None, (
        "half of the old ones, too few new ones"
    )


async def test_only_a_members_own_record_counts() -> None:
    for own in (record(), record(final=True), record(NEW)):
        assert await present({F: own, A: record()}) is None
    assert await present({B: record(), A: record()}, me=B) == OLD


async def test_record_of_another_job_is_no_answer() -> None:
    assert await present({A: record(), B: record(job=b"k" * 16)}) is None


async def test_recovered_group_is_followed_forwards_only() -> None:
    new = dict.fromkeys((A, D, E), record(NEW))
    assert await present({A: record(), **new}, recovered=lambda one: NEW) == NEW, "one witness has the user's order"
    assert await present(new, known=NEW, recovered=lambda one: OLD) == NEW, "an older order is over"


async def test_groups_are_followed_a_limited_number_of_times() -> None:
    """Whoever is asked names a newer group each time."""
    peers: Any = Records({})

    async def call(node: bytes, method: str, path: str, timeout_s: float) -> bytes:
        peers.asked += 1
        assert peers.asked <= GROUPS_FOLLOWED
        return msgspec.msgpack.encode(record(Config(peers.asked, peers.asked, voters(A))))

    peers.call = call
    group = WitnessGroup(F, peers, SimpleNamespace(witnesses={}))  # type: ignore[arg-type]
    assert await group.present(JOB, Config(0, 0, voters(A))) is None


def test_group_is_outdated_if_one_of_it_knows_a_later_one() -> None:
    assert not is_outdated((NEW, {A: record(), D: record(NEW)}))
    assert is_outdated((OLD, {A: record(), B: record(NEW)}))


def test_later_group_counts_by_the_word_of_most_of_it() -> None:
    new, present = dict.fromkeys((A, D), record(NEW)), (OLD, {A: record(), B: record(), C: record(NEW)})
    for known in (present, None):
        assert last_words(known, {**new, B: record()}, 3, set()) == Words(new)
    old_copy = {**new, A: record(NEW, disk=b"old copy")}
    assert last_words(None, old_copy, 3, set()) == Words(old_copy, few=True)
    for made_up in ({A: record(NEW), B: record(), D: record()}, {A: record(ALONE)}, {}):
        words = last_words(present, made_up, 3, set())
        assert words == Words({**present[1], **made_up}, few=True), "one former witness has made it up"
        assert last_words(None, made_up, 3, set()) == Words(made_up, few=True)


def test_small_later_group_counts_if_it_is_agreed_on() -> None:
    """Regression: of a job that was recovered on one node, or that has one witness left, nobody learned the end."""
    known = {A: record(ALONE)}
    for agreed, few in ({ALONE.members, NEW.members}, False), ({voters(B), NEW.members}, True), (set(), True):
        assert last_words(None, known, 3, agreed) == Words(known, few)

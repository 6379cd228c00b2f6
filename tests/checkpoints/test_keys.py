"""Distribution of job keys to entitled nodes, with real cores, journals and node keys; calls are direct."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from ckptstore.cipher import StateCipher
from membership.identity import Identity
from membership.trust import Credentials
from mesh.checkpoints.key_shares import Held, Share, combine_shares, decode_share, encode_held, seal_shares
from mesh.checkpoints.keys import SPLITS_KEPT, STATE_KEY, Keyring, KeyRules, NoKey
from mesh.checkpoints.witness_group import WitnessGroup
from mesh.consensus.participant import Participant, Rules
from mesh.consensus.witness import Witness
from mesh.jobs.authority import is_user, may_give_share, runs
from mesh.journal import Journal
from mesh.model.record import Attempt, Config, JobRecord, Voter
from mesh.model.spec import JobSpec
from mesh.rpc.client import PeerError
from tests.consensus.worlds import JOB, key_of, make_spec, make_witness, voters

NAMES = "ABCDEF"
KEY_RULES = KeyRules(is_user, runs, may_give_share)
USERS = {"A": "ada"}  # A belongs to the job's user; each other node belongs to a user of its own


class Campus:
    """Six nodes. By default the job belongs to A, its witnesses are A, B and C, and D runs it."""

    rules, kind = KEY_RULES, STATE_KEY

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ids = {name: Identity.generate() for name in NAMES}
        self.names = {identity.node_id: name for name, identity in self.ids.items()}
        self.cipher = StateCipher.generate()
        self.gone: set[str] = set()
        self.stuck: set[str] = set()  # they never answer
        self.garbled: set[str] = set()  # they answer what is no answer
        self.calls: list[str] = []
        self.rings: dict[str, Keyring] = {}
        self.parts: dict[str, Participant] = {}
        self.journals: list[Journal] = []
        witnesses = self.nodes("ABC")
        self.spec = make_spec(
            submitter=witnesses[0], witnesses=voters(*witnesses), lock=seal_shares(self.cipher, witnesses, b"author")
        )

    async def start(self) -> None:
        for name in NAMES:
            await self.boot(name)
        for name in "ABC":
            self.witness(name, "ABC", holder="D")

    async def boot(self, name: str) -> None:
        identity = self.ids[name]
        journal = Journal(self.root / f"{name}.sqlite")
        await journal.open()
        self.journals.append(journal)
        rules = Rules(lambda job, sealed: self.spec, lambda job, spec, order: None, lambda sender, user, spec: True)
        self.parts[name] = Participant(identity.node_id, b"", name, rules, Random(0))
        peers: Any = Hands(self, name)
        part = self.parts[name]
        group = WitnessGroup(identity.node_id, peers, part)
        ring = self.rings[name] = Keyring(
            identity, peers, journal, part, lambda: self.names, self.rules, group, self.kind
        )
        await ring.restore()

    def nodes(self, names: str) -> list[bytes]:
        return [self.ids[name].node_id for name in names]

    def witness(self, name: str, group: str, holder: str | None, number: int = 0, gang: str = "") -> Witness:
        made: Witness = make_witness(tuple(self.nodes(group)), self.spec)
        attempt = Attempt(0, self.ids[holder].node_id, holder, 1, 0) if holder else None
        if attempt is not None:
            attempt = msgspec.structs.replace(
                attempt, gang=tuple((self.ids[member].node_id, member) for member in gang)
            )
        made.witness_record = msgspec.structs.replace(
            made.witness_record,
            config=Config(number, number, voters(*self.nodes(group))),
            holder=self.ids[holder].node_id if holder else None,
            record=JobRecord(attempts=(attempt,) if attempt else ()),
        )
        self.parts[name].witnesses[JOB] = made
        return made

    def credentials(self, name: str) -> Credentials:
        user = USERS.get(name, name)
        return Credentials(self.ids[name].node_id, name, user, key_of(user), 0, (), False, b"", 0, 0)

    async def key(self, name: str) -> bytes:
        cipher = await self.rings[name].cipher(JOB, self.spec, ())
        assert cipher is not None
        return cipher.key


class Hands:
    """Stands in for the network: one node's calls."""

    def __init__(self, campus: Campus, caller: str) -> None:
        self.campus, self.caller = campus, caller

    async def call(self, node: bytes, method: str, path: str, body: bytes = b"", timeout_s: float = 0) -> bytes:
        campus, name, what = self.campus, self.campus.names[node], path.rsplit("/", 1)[1]
        campus.calls.append(f"{self.caller}->{name} {what}")
        assert what in {"witness-record", campus.kind.key_call, campus.kind.share_call} and 0 < timeout_s < 60
        try:
            await (asyncio.Event().wait() if name in campus.stuck else asyncio.sleep(0))
        except asyncio.CancelledError:
            campus.calls.append(f"{self.caller}->{name} given up")
            raise
        if name in campus.gone:
            raise PeerError("it is gone")
        if name in campus.garbled:
            return b"\xc1"
        credentials, ring = campus.credentials(self.caller), campus.rings[name]
        if path.endswith("/witness-record"):
            witness = campus.parts[name].witnesses.get(JOB)
            if witness is None:
                raise PeerError("no record", 404)
            return msgspec.msgpack.encode(witness.witness_record)
        if path.endswith("share"):
            if not await ring.store_share(JOB, credentials, decode_share(body)):
                raise PeerError("not yours", 403)
            return b""
        held = await ring.held_for(JOB, credentials)
        if held is None:
            raise PeerError("not for you", 403)
        return encode_held(held)


@pytest.fixture
async def campus(tmp_path: Path) -> AsyncIterator[Campus]:
    made = Campus(tmp_path)
    await made.start()
    yield made
    for journal in made.journals:
        await journal.close()


async def test_runner_asks_the_witnesses_first_and_each_node_once(campus: Campus) -> None:
    await campus.key("D")
    assert {*campus.calls} == {f"D->{name} key" for name in "ABC"}
    campus.gone = {*"ABC"}
    campus.calls.clear()
    with pytest.raises(NoKey):
        await campus.key("E")
    assert sorted(campus.calls) == [f"E->{name} key" for name in "ABCDF"]


async def test_witness_that_is_stuck_or_garbles_delays_nothing(campus: Campus) -> None:
    campus.stuck = {"A"}
    async with asyncio.timeout(60):
        assert await campus.key("D") == campus.cipher.key
        await asyncio.sleep(0)
    assert "D->A given up" in campus.calls
    await campus.boot("D")
    campus.stuck, campus.garbled = set(), {"A"}
    campus.rings["D"]._keys.clear()
    campus.gone = {"B"}
    with pytest.raises(NoKey, match=r"not shares of a key.*it is gone|it is gone.*not shares of a key"):
        await campus.key("D")
    campus.gone = set()
    assert await campus.key("D") == campus.cipher.key


async def test_runner_gives_the_whole_key_to_its_gang_and_its_user(campus: Campus) -> None:
    """It is no witness of the job."""
    await campus.key("D")
    runs: Any = Runs(campus.spec, Config(0, 0, voters(*campus.nodes("ABC"))))
    runs.record = campus.witness("A", "ABC", holder="D", gang="F").witness_record.record
    assert await campus.rings["D"].held_for(JOB, campus.credentials("F")) is None, "the job does not run there"
    campus.parts["D"].runners[JOB] = runs
    assert await campus.rings["D"].held_for(JOB, campus.credentials("E")) is None
    for name in "AF":
        held = await campus.rings["D"].held_for(JOB, campus.credentials(name))
        assert held is not None and held.key == campus.cipher.key
    campus.gone = {*"ABC"}
    found = await campus.rings["F"].cipher(JOB, campus.spec, campus.nodes("D"))
    assert found is not None and found.key == campus.cipher.key
    assert "F->E key" not in campus.calls, "its gang is asked first"


async def test_runner_gets_the_key_from_a_majority_of_witnesses(campus: Campus) -> None:
    campus.gone = {"A"}
    assert await campus.key("D") == campus.cipher.key
    campus.gone = {"A", "B"}
    campus.rings["D"].forget(campus.spec)
    assert await campus.key("D") == campus.cipher.key, "the runner keeps the key in memory"
    await campus.boot("D")
    assert await campus.key("D") == campus.cipher.key, "the runner keeps the key on disk"


async def test_error_reports_too_few_witnesses(campus: Campus) -> None:
    campus.gone = {"A", "B"}
    with pytest.raises(NoKey, match=r"most of its witnesses are needed.*it is gone"):
        await campus.key("D")


@pytest.mark.parametrize("who", ["B", "E"])
async def test_a_single_witness_and_a_checkpoint_holder_get_no_key(campus: Campus, who: str) -> None:
    with pytest.raises(NoKey, match="not for you"):
        await campus.key(who)
    held = await campus.rings["C"].held_for(JOB, campus.credentials(who))
    assert held is None


async def test_other_nodes_of_the_user_and_gang_members_get_the_key(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ABC":
        campus.witness(name, "ABC", holder="D", gang="F")
    assert await campus.key("F") == campus.cipher.key
    monkeypatch.setitem(USERS, "E", "ada")
    assert await campus.key("E") == campus.cipher.key


async def test_key_is_found_despite_one_lying_witness(campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    real = campus.rings["B"].held_for

    async def lies(job: bytes, caller: Credentials) -> Any:
        held = await real(job, caller)
        assert held is not None
        wrong = tuple(msgspec.structs.replace(share, value=bytes(32)) for share in held.shares)
        return msgspec.structs.replace(held, shares=wrong, key=bytes(32))

    monkeypatch.setattr(campus.rings["B"], "held_for", lies)
    assert await campus.key("D") == campus.cipher.key


async def test_shares_are_combined_beside_the_event_loop(campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def combine(realm: bytes, shares: Iterable[Share]) -> StateCipher | None:
        threads.add(threading.get_ident())
        return combine_shares(realm, shares)

    monkeypatch.setattr("mesh.checkpoints.keys.combine_shares", combine)
    assert await campus.key("D") == campus.cipher.key
    assert threads and threading.get_ident() not in threads


async def test_key_of_another_realm_is_not_taken(campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (bytes(32), b"short"):

        async def lies(job: bytes, caller: Credentials, key: bytes = key) -> Held:
            return Held(key=key)

        for name in "AB":
            monkeypatch.setattr(campus.rings[name], "held_for", lies)
        with pytest.raises(NoKey):
            await campus.key("D")


async def test_replaced_witness_follows_the_groups_to_the_current_runner(campus: Campus) -> None:
    """E and F replaced B and C while the job waited; they have no shares, and C does not know that it was replaced."""
    for name in "AEF":
        campus.witness(name, "AEF", holder="D", number=1)
    campus.witness("B", "AEF", holder=None, number=1)
    campus.witness("C", "ABC", holder=None)
    assert await campus.rings["C"].held_for(JOB, campus.credentials("D")) is not None
    assert await campus.rings["C"].held_for(JOB, campus.credentials("E")) is None, "E is a witness but not the runner"
    campus.gone = {"F"}
    assert await campus.key("D") == campus.cipher.key


async def test_replaced_witness_sends_no_share_unless_a_majority_names_the_runner(campus: Campus) -> None:
    for name in "ABCEF":
        campus.witness(name, "AEF", holder=None if name in "BC" else "D", number=1)
    campus.gone = {"E", "F"}
    assert await campus.rings["B"].held_for(JOB, campus.credentials("D")) is None, (
        "a majority of the group must confirm the runner"
    )
    campus.gone = set()
    assert await campus.rings["B"].held_for(JOB, campus.credentials("D")) is not None
    for name in "EF":
        campus.witness(name, "AEF", holder=None, number=1)
    assert await campus.rings["B"].held_for(JOB, campus.credentials("D")) is None


async def test_runner_gives_new_witnesses_enough_shares_for_the_key(campus: Campus) -> None:
    await campus.key("D")
    for name in "DEF":
        campus.witness(name, "DEF", holder="D", number=1)
    runner: Any = Runs(campus.spec, Config(1, 1, voters(*campus.nodes("DEF"))))
    ring = campus.rings["D"]
    campus.gone = {"F"}
    for _ in range(2):
        ring.share_with_new_witnesses(JOB, runner)
    await ring._sharing[JOB]
    assert [call for call in campus.calls if "share" in call] == ["D->E share", "D->F share"]
    ring.share_with_new_witnesses(JOB, runner)
    campus.gone = set()
    await ring._sharing[JOB]  # the runner tries F again
    calls = len(campus.calls)
    ring.share_with_new_witnesses(JOB, runner)
    await asyncio.gather(*ring._sharing.values())
    assert len(campus.calls) == calls, "the runner sends no share twice"

    lost = msgspec.structs.replace(
        runner.config, members=(*runner.config.members[:2], Voter(campus.nodes("F")[0], b"new"))
    )
    runner.config = lost
    ring.share_with_new_witnesses(JOB, runner)
    await ring._sharing[JOB]
    assert len(campus.calls) > calls, "a witness with a new disk needs a new share"
    ring.share_with_new_witnesses(JOB, None)
    assert not ring._shared, "the job runs elsewhere"

    campus.gone = {*"ABCD"}
    for name in "EF":
        await campus.boot(name)
        campus.witness(name, "DEF", holder="E", number=1)
    assert await campus.key("E") == campus.cipher.key


async def test_no_shares_are_given_while_the_group_changes(campus: Campus) -> None:
    await campus.key("D")
    joint = Config(0, 0, voters(*campus.nodes("ABC"))).joint(voters(*campus.nodes("DEF")), 1)
    runner: Any = Runs(campus.spec, joint)
    campus.rings["D"].share_with_new_witnesses(JOB, runner)
    assert not campus.rings["D"]._sharing
    runner.config = Config(0, 0, voters(*campus.nodes("ABC")))
    campus.rings["D"].share_with_new_witnesses(JOB, runner)
    assert not campus.rings["D"]._sharing, "the first group has the shares of the job's description"


async def test_close_gives_up_what_it_shares(campus: Campus) -> None:
    await campus.key("D")
    runner: Any = Runs(campus.spec, Config(1, 1, voters(*campus.nodes("DEF"))))
    campus.stuck = {*"EF"}
    campus.rings["D"].share_with_new_witnesses(JOB, runner)
    async with asyncio.timeout(60):
        while "D->F share" not in campus.calls:
            await asyncio.sleep(0)
        await campus.rings["D"].close()
    assert {"D->E given up", "D->F given up"} <= {*campus.calls}


async def test_few_of_many_keys_are_ready_in_memory(campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.checkpoints.keys.CIPHERS", 2)
    await campus.boot("A")
    ring = campus.rings["A"]
    made = [await ring.create() for _ in range(5)]
    for cipher in (*made, *made):
        known = ring.known(cipher.realm)
        assert known is not None and known.key == cipher.key
    assert len(ring._ciphers) == 2 and ring.known(b"r" * 32) is None


async def test_collected_key_goes_with_the_job_and_the_last_data_that_it_opens(campus: Campus) -> None:
    realm, config = campus.cipher.realm, Config(0, 0, voters(*campus.nodes("ABC")))
    created = await campus.rings["D"].create()

    async def kept(*here: bytes) -> bool:
        ring = campus.rings["D"]
        await ring.tidy(lambda: {*here})
        on_disk = await ring._journal.keys()
        assert created.realm in on_disk and ring.known(created.realm), "its user has no other"
        assert (realm in on_disk) == (ring.known(realm) is not None) == (realm in await ring._journal.collected_keys())
        return realm in on_disk

    await campus.key("D")
    for place in (campus.parts["D"].runners, campus.parts["D"].members):
        hosts: Any = place
        hosts[JOB] = Runs(campus.spec, config)
        assert await kept(), "the job runs here"
        del hosts[JOB]
    assert await kept(realm), "the store has something that it opens"
    await campus.boot("D")
    assert await kept(realm)
    await campus.boot("D")
    assert not await kept(), "the last data went before the restart"
    await campus.boot("D")
    assert not await kept()
    assert await campus.key("D") == campus.cipher.key, "its witnesses give it again"
    assert campus.rings["D"].known(realm) is not None
    assert not await kept(), "without a restart, too"


@pytest.mark.parametrize("change", ["INSERT", "DELETE"])
async def test_crash_leaves_no_key_that_stays_for_ever(campus: Campus, change: str) -> None:
    """A key and its mark are written in one transaction, and removed in one."""
    realm = campus.cipher.realm
    if change == "DELETE":
        await campus.key("D")
    with closing(sqlite3.connect(campus.root / "D.sqlite")) as database:
        fails = "BEGIN SELECT RAISE(ABORT, 'crash'); END"
        database.execute(f"CREATE TRIGGER crash BEFORE {change} ON collected_keys {fails}")
    with pytest.raises(sqlite3.IntegrityError):
        await (campus.rings["D"].tidy(frozenset) if change == "DELETE" else campus.key("D"))
    await campus.boot("D")
    assert (campus.rings["D"].known(realm) is not None) == (change == "DELETE")
    with closing(sqlite3.connect(campus.root / "D.sqlite")) as database:
        database.execute("DROP TRIGGER crash")
    await campus.rings["D"].tidy(frozenset)
    assert await campus.rings["D"]._journal.keys() == {} and not await campus.rings["D"]._journal.collected_keys()


async def test_key_of_a_job_that_comes_while_others_are_removed_stays(campus: Campus) -> None:
    await campus.key("D")
    hosts: Any = campus.parts["D"].runners

    def realms() -> frozenset[bytes]:
        hosts[JOB] = Runs(campus.spec, Config(0, 0, voters(*campus.nodes("ABC"))))
        return frozenset()

    await campus.rings["D"].tidy(realms)
    assert campus.rings["D"].known(campus.cipher.realm) is not None


async def test_shares_of_a_deleted_job_leave_memory(campus: Campus) -> None:
    ring, part = campus.rings["B"], campus.parts["B"]
    assert await ring.store_share(JOB, campus.credentials("D"), Share(b"later...", 1, 1, bytes(32)))
    await ring.tidy(frozenset)
    del part.witnesses[JOB]
    for known in (part.archived, part.forgotten):
        known.add(JOB)
        await ring.tidy(frozenset)
        assert ring._shares
        known.remove(JOB)
    await ring.tidy(frozenset)
    assert not ring._shares


async def test_half_of_a_group_does_not_give_the_key(campus: Campus) -> None:
    campus.rings["A"]._keys[campus.cipher.realm] = campus.cipher.key
    for name in "ABCE":
        campus.witness(name, "ABCE", holder="D" if name in "AB" else None)
    assert await campus.rings["A"].held_for(JOB, campus.credentials("D")) is None


async def test_most_of_those_that_answer_are_no_majority_of_a_group(campus: Campus) -> None:
    for name in "ABCEF":
        campus.witness(name, "ABCEF", holder="D" if name in "EF" else None)
    campus.gone = {"B", "C"}
    assert await campus.rings["A"].held_for(JOB, campus.credentials("D")) is None


async def test_share_is_on_disk_before_it_is_confirmed(campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, written = campus.rings["B"], asyncio.Event()
    save = ring._journal.save_shares

    async def saves_slowly(job: bytes, shares: list[bytes], kind: str) -> None:
        await written.wait()
        await save(job, shares, kind)

    monkeypatch.setattr(ring._journal, "save_shares", saves_slowly)
    share = Share(b"split...", 1, 1, bytes(32))
    storing = asyncio.create_task(ring.store_share(JOB, campus.credentials("D"), share))
    await asyncio.sleep(0.05)
    assert not storing.done()
    written.set()
    assert await storing
    for number in range(2 * SPLITS_KEPT):
        await ring.store_share(JOB, campus.credentials("D"), msgspec.structs.replace(share, split_id=bytes([number])))
    kept = [decode_share(one).split_id for one in (await ring._journal.shares())[JOB]]
    assert kept == [bytes([number]) for number in range(SPLITS_KEPT, 2 * SPLITS_KEPT)], "the newest"


async def test_witness_takes_shares_only_from_the_runner_or_the_user(campus: Campus) -> None:
    share = Share(b"evil....", 1, 1, bytes(32))
    store = campus.rings["B"].store_share
    assert not await store(JOB, campus.credentials("E"), share) and not await store(
        b"?" * 16, campus.credentials("A"), share
    )
    assert await store(JOB, campus.credentials("D"), share) and await store(JOB, campus.credentials("A"), share)
    assert await campus.key("D") == campus.cipher.key, "a wrong share does not hide the right one"


async def test_share_is_on_disk_when_its_giver_is_told(campus: Campus) -> None:
    share = Share(b"later...", 1, 1, bytes(32))
    assert await campus.rings["B"].store_share(JOB, campus.credentials("D"), share)
    with closing(sqlite3.connect(campus.root / "B.sqlite")) as database:  # at once: no other task has run since
        ((kept,),) = database.execute("SELECT shares FROM shares WHERE job = ?", [JOB]).fetchall()
    assert decode_share(msgspec.msgpack.decode(kept, type=list[bytes])[-1]) == share


async def test_job_without_encryption_has_no_key(campus: Campus) -> None:
    spec: JobSpec = msgspec.structs.replace(campus.spec, lock=None)
    assert await campus.rings["D"].cipher(JOB, spec) is None
    campus.parts["B"].witnesses[JOB].spec = spec
    assert await campus.rings["B"].held_for(JOB, campus.credentials("A")) is None


async def test_unreadable_share_is_ignored(campus: Campus) -> None:
    lock = msgspec.structs.replace(campus.spec.lock, shares=(b"nonsense",) * 3)  # type: ignore[arg-type]
    campus.parts["B"].witnesses[JOB].spec = msgspec.structs.replace(campus.spec, lock=lock)
    held = await campus.rings["B"].held_for(JOB, campus.credentials("A"))
    assert held is not None and held.shares == () and combine_shares(campus.cipher.realm, held.shares) is None


class Runs:
    """The attributes of a runner that the keyring reads."""

    def __init__(self, spec: JobSpec, config: Config) -> None:
        self.spec, self.config = spec, config


async def test_all_of_the_key_goes_only_to_a_runner_of_a_majority(campus: Campus) -> None:
    """The submitter's node is a witness, too, and has the whole key; what it alone has accepted is not enough."""
    campus.rings["A"]._keys[campus.cipher.realm] = campus.cipher.key
    campus.witness("A", "ABC", holder="E")
    assert await campus.rings["A"].held_for(JOB, campus.credentials("E")) is None
    held = await campus.rings["A"].held_for(JOB, campus.credentials("D"))
    assert held is not None and held.key == campus.cipher.key
    campus.gone = {"B", "C"}
    assert await campus.rings["A"].held_for(JOB, campus.credentials("E")) is None, "nobody else can be asked"
    held = await campus.rings["A"].held_for(JOB, campus.credentials("A"))
    assert held is not None and held.key == campus.cipher.key

"""Vouching for manifests and starts, with a group of witnesses that changes, is away, or lies."""

import asyncio
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.manifest import Manifest
from membership.identity import Identity
from membership.trust import TrustStore, found_mesh
from mesh.checkpoints.witness_group import ANSWER_S, WitnessGroup, Words
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.messages import Accept, Introduce, MakeRoom
from mesh.consensus.participant import Participant
from mesh.consensus.status import status_of
from mesh.jobs import vouching as vouching_module
from mesh.jobs.authority import Witnesses
from mesh.jobs.job_table import JobTable
from mesh.jobs.vouching import AT_ONCE, REMEMBERED, Refused, Vouching
from mesh.model.record import Attempt, Config, JobRecord
from mesh.model.spec import JobSpec, SpecError
from mesh.rpc.client import PeerError
from tests.consensus.worlds import JOB, A, B, C, D, E, make_spec, make_start, make_witness, voters

ID = b"i" * 32
SPEC = make_spec()


class Peers:
    """The nodes that answer: the records of witnesses, and the description of the job."""

    def __init__(self) -> None:
        self.records: dict[bytes, WitnessRecord] = {}
        self.specs: set[bytes] = {D}
        self.calls: list[bytes] = []

    async def call(self, node: bytes, method: str, path: str, timeout_s: float) -> bytes:
        self.calls.append(node)
        if path.endswith("/spec") and node in self.specs:
            return b"the sealed spec"
        if path.endswith("/witness-record") and node in self.records:
            return msgspec.msgpack.encode(self.records[node])
        raise PeerError("it does not answer")


class Judge:
    """The part of `Authority` that needs keys: `lenders` may lend, and every spec is the job's."""

    lenders: frozenset[bytes] = frozenset({D})
    proven: frozenset[bytes] = frozenset()  # witnesses, besides those of the first group
    spec = SPEC
    ended = False  # the certificate of the job's submitter
    taken = 0  # witnesses by whose word the job was taken on

    def may_lend(self, node: bytes) -> bool:
        return node in self.lenders

    def read_members_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        if job != JOB:
            raise SpecError("another job")
        return self.spec

    read_ended_spec = read_members_spec

    def witnesses_by(self, records: Collection[WitnessRecord], spec: JobSpec) -> Witnesses:
        return Witnesses({voter.node for voter in spec.witnesses} | self.proven, set())

    def open_spec(self, job: bytes, sealed: bytes) -> JobSpec:
        if self.ended:
            raise SpecError("its submitter is no member")
        return self.read_members_spec(job, sealed)

    def take_word(self, job: bytes, records: Sequence[WitnessRecord]) -> bool:
        self.taken = len(records)
        return job == JOB


def named_by_the_user(record: WitnessRecord) -> Config | None:
    return record.config if record.reconfiguration else None


class Node:
    """A node E that witnesses nothing; D runs the job under term 4, by the word of A, B and C."""

    def __init__(self) -> None:
        self.peers: Any = Peers()
        self.judges: Any = Judge()
        rules: Any = None
        participant = Participant(E, b"", "e", rules, rules)
        self.group(0, (A, B, C))
        trust = TrustStore(found_mesh(Identity(b"1" * 32), "lab", "root", "ada", 1e9)[0])
        group = WitnessGroup(E, self.peers, participant, named_by_the_user)
        self.table = JobTable()
        self.vouching = Vouching(self.judges, trust, participant, group, self.peers, self.table)

    def group(self, number: int, members: tuple[bytes, ...], holder: bytes = D, term: int = 4) -> None:
        record = JobRecord(attempts=(Attempt(0, holder, "", term, 0),))
        for node in members:
            self.peers.records[node] = msgspec.structs.replace(
                make_witness(members).witness_record,
                config=Config(number, number, voters(*members)),
                promised=term,
                holder=holder,
                record=record,
            )

    async def judge(self, signer: bytes = D, sender: bytes = D, **changes: object) -> bool:
        whole = Manifest(2, JOB, 0, 4, 1, None, "checkpoint", 0, b"", (), 0, 0, b"", user="ada")
        return await self.vouching.judge(sender, ID, signer, msgspec.structs.replace(whole, **changes))


async def test_store_that_is_no_witness_asks_the_witnesses_once_for_a_term() -> None:
    node = Node()
    assert await node.judge() and set(node.peers.calls) == {A, B, C, D}
    node.peers.calls.clear()
    assert await node.judge(seq=2) and not node.peers.calls


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signer": A}, "know no lease of its signer"),
        ({"term": 5}, "know no lease of its signer"),
        ({"term": 1 << 40}, "know no lease of its signer"),
        ({"user": "mallory"}, "another user than its job"),
        ({"job": b"k" * 16}, "cannot get the job's description"),
        ({"kind": "workdir"}, "signed by a node of its user"),
    ],
)
async def test_manifest_without_a_majority_behind_it_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        await Node().judge(**changes)


@pytest.mark.parametrize("away", [False, True])
async def test_manifest_of_a_node_that_is_not_to_run_the_job_is_refused(away: bool) -> None:
    node = Node()
    node.judges.spec = msgspec.structs.replace(SPEC, not_on=(D,))
    if away:
        node.peers.records.clear()
    with pytest.raises(Refused, match="does not let the manifest's signer run it"):
        await node.judge()


async def test_half_of_an_even_group_is_no_majority() -> None:
    node = Node()
    node.group(1, (A, B))
    node.peers.records[C] = node.peers.records[A]
    assert await node.judge() and await node.vouching.read_by_runner(JOB, D) == SPEC
    fresh = Node()
    fresh.peers.records = node.peers.records
    fresh.peers.records[B] = msgspec.structs.replace(node.peers.records[B], holder=A, record=JobRecord())
    with pytest.raises(Refused, match="know no lease of its signer"):
        await fresh.judge()
    assert await fresh.vouching.read_by_runner(JOB, D) is None


async def test_runner_is_who_holds_the_lease_at_most_witnesses() -> None:
    node = Node()
    assert await node.vouching.runner_of(JOB) is None, "nobody has its description"
    assert await node.vouching.describe(JOB, D) == SPEC and await node.vouching.runner_of(JOB) == D
    node.peers.records[A] = msgspec.structs.replace(node.peers.records[A], holder=E)
    assert await node.vouching.runner_of(JOB) == D, "one witness lies"
    node.peers.records[B] = msgspec.structs.replace(node.peers.records[B], holder=None)
    assert await node.vouching.runner_of(JOB) is None
    node.peers.records.clear()
    assert await node.vouching.runner_of(JOB) is None, "nobody answers"
    even = Node()
    assert await even.vouching.describe(JOB, D) == SPEC
    even.group(1, (A, B))
    even.peers.records[C] = even.peers.records[A]
    even.peers.records[B] = msgspec.structs.replace(even.peers.records[B], holder=A)
    assert await even.vouching.runner_of(JOB) is None, "half of a group"


async def test_vouching_for_one_term_holds_for_no_other() -> None:
    node = Node()
    assert await node.judge()
    with pytest.raises(Refused, match="know no lease of its signer"):
        await node.judge(term=5)
    with pytest.raises(Refused, match="know no lease of its signer"):
        await node.judge(signer=A)


async def test_vouching_for_one_user_holds_for_no_other() -> None:
    """The user's quota is charged for a manifest."""
    node = Node()
    assert await node.judge()
    with pytest.raises(Refused, match="another user than its job"):
        await node.judge(user="mallory")
    assert await node.judge(seq=2)


async def test_one_lying_witness_vouches_for_nobody() -> None:
    node = Node()
    liar = node.peers.records[A]
    node.peers.records[A] = msgspec.structs.replace(liar, holder=A, promised=9)
    with pytest.raises(Refused):
        await node.judge(signer=A, term=9)
    node.peers.records[A] = msgspec.structs.replace(liar, config=Config(9, 9, voters(A)), holder=A, promised=9)
    with pytest.raises(Refused):
        await node.judge(signer=A, term=9)
    assert await node.judge()


async def test_manifest_of_a_later_group_is_followed_to_it() -> None:
    node = Node()
    node.group(2, (C, D, E), holder=B, term=9)
    for old in (A, B):  # replaced since, and they know it
        node.peers.records[old] = msgspec.structs.replace(node.peers.records[C], promised=5)
    assert await node.judge(signer=B, term=9)
    with pytest.raises(Refused):
        await node.judge(signer=A, term=8)
    for gone in (A, B):
        del node.peers.records[gone]
    assert await node.judge(signer=B, term=9, seq=2), "the later group is known now"


async def test_witness_that_never_answers_keeps_nobody_waiting() -> None:
    """A stopped daemon keeps its connections and says nothing; a leader waits for the answer to its start for 3 s."""
    node = Node()
    call, never = node.peers.call, asyncio.Event()

    async def stopped(asked: bytes, *args: Any, **named: Any) -> bytes:
        if asked == C:
            await never.wait()
        answer: bytes = await call(asked, *args, **named)
        return answer

    node.peers.call = stopped
    async with asyncio.timeout(ANSWER_S / 2):
        assert await node.judge()


async def test_group_that_the_user_has_named_is_followed() -> None:
    """A recovery needs no majority of the lost group, also once its members are back with what they knew."""
    node = Node()
    recovered = Config(1 << 20, 1 << 20, voters(C, E))
    node.group(0, (A, B, C))
    term = (1 << 20) + 1
    lost = dict(node.peers.records)
    node.group(1 << 20, (C, E), holder=B, term=term)
    del node.peers.records[A], node.peers.records[B]
    held = node.peers.records[C]
    node.peers.records[C] = msgspec.structs.replace(held, config=recovered, reconfiguration=b"the user's word")
    node.vouching._group._me = D  # so that E is asked, too
    assert await node.judge(signer=B, term=term)
    node.peers.records |= {A: lost[A], B: lost[B]}
    assert await node.judge(signer=B, term=term, seq=2)
    fresh = Node()
    fresh.peers.records = node.peers.records
    fresh.vouching._group._me = D
    assert await fresh.judge(signer=B, term=term)
    fresh.peers.records[C] = msgspec.structs.replace(fresh.peers.records[C], reconfiguration=b"")
    fresh.vouching._groups.clear()
    fresh.vouching._writers.clear()
    with pytest.raises(Refused):
        await fresh.judge(signer=B, term=term)


async def test_nobody_is_vouched_for_while_most_witnesses_are_away() -> None:
    node = Node()
    for gone in (A, B):
        del node.peers.records[gone]
    assert await node.judge() is False, "kept, and no fence moves"
    with pytest.raises(Refused, match="may not run jobs"):
        await node.judge(signer=B)
    node.group(0, (A, B, C))
    assert await node.judge() is True


async def test_start_by_another_node_than_the_leader_is_not_allowed() -> None:
    node = Node()
    start = make_start(term=4)
    assert await node.vouching.allows(A, start) and not await node.vouching.allows(D, start)
    forged = msgspec.structs.replace(start, config=Config(1, 4, voters(D)))
    assert not await node.vouching.allows(D, forged), "the witnesses know no such group"
    later = msgspec.structs.replace(start, config=Config(0, 0, voters(A, B, C)).joint(voters(A, B, D), 4))
    assert await node.vouching.allows(B, later)
    assert not await node.vouching.allows(B, msgspec.structs.replace(later, term=5)), "a term that B has not won"
    node.peers.records.clear()
    assert await node.vouching.allows(D, forged), "taken on trust while nobody can be asked"


async def test_job_of_an_ended_certificate_is_judged_by_its_witnesses() -> None:
    node = Node()
    node.judges.ended = True
    start = make_start(term=4)
    assert await node.vouching.allows(A, start) and node.judges.taken >= 2
    assert not await node.vouching.allows(D, start), "it has not won the term"
    first = msgspec.structs.replace(start, term=5)
    assert first.config.number == 0
    assert not await node.vouching.allows(A, first), "the first group is asked, too: the description is no proof"
    node.judges.taken = 0
    node.peers.records.clear()
    assert await node.vouching.allows(A, start) and not node.judges.taken, "the core refuses it"


async def test_node_joins_no_group_that_the_witnesses_do_not_know() -> None:
    node = Node()
    present = Config(0, 0, voters(A, B, C))
    joint = present.joint(voters(A, B, E), 4)
    accept, records = Accept(JOB, 4, 1, joint, JobRecord(1), D, b"the sealed spec"), dict[bytes, WitnessRecord]()
    assert await node.vouching.allows(D, accept) and await node.vouching.allows(
        A, msgspec.structs.replace(accept, config=Config(1, 4, voters(A, B, C)))
    )
    for forged in (Config(1, 4, voters(D, E)), Config(1, 4, voters(E), voters(D)), Config(1, 4, voters(A, B, E))):
        assert not await node.vouching.allows(D, msgspec.structs.replace(accept, config=forged)), forged
    assert not await node.vouching.allows(E, accept), "E neither leads nor runs the job"
    for silent in (A, B):
        records[silent] = node.peers.records.pop(silent)
    assert not await node.vouching.allows(D, accept), "nobody knows the group"
    node.peers.records |= records
    node.group(1, (A, B, E))
    node.peers.records[C] = node.peers.records[A]
    node.vouching._group._me = D
    assert await node.vouching.allows(D, msgspec.structs.replace(accept, config=joint.settled()))


def needing(record: WitnessRecord, *numbers: int) -> WitnessRecord:
    return msgspec.structs.replace(record, record=msgspec.structs.replace(record.record, needed=numbers))


async def test_what_a_job_needs_is_what_its_present_witnesses_say() -> None:
    node = Node()
    assert await node.vouching.needed(JOB) == frozenset(), "nobody gives its description"
    assert await node.judge()
    for name, numbers in ((A, (6, 7)), (B, (5, 6)), (C, (2**30,))):
        node.peers.records[name] = needing(node.peers.records[name], *numbers)
    assert await node.vouching.needed(JOB) == {5, 6}
    node.peers.records.clear()
    assert not await node.vouching.needed(JOB)


async def test_job_relies_on_the_checkpoint_that_its_witnesses_name() -> None:
    node = Node()
    node.table.update(D, JOB, status_of(JOB, make_witness(), None, "", "", None))
    assert await node.vouching.relied_on(JOB, ID) is None, "nobody gives its description"
    assert await node.judge()
    assert await node.vouching.relied_on(JOB, ID) is None
    record = node.peers.records[A]
    named = record.record.with_commit(4, ID, (E,), None, 0)
    node.peers.records |= {A: msgspec.structs.replace(record, record=named)}
    assert await node.vouching.relied_on(JOB, ID) == SPEC and await node.vouching.relied_on(JOB, b"o" * 32) is None


async def test_later_witnesses_are_asked_while_most_of_the_first_are_lost() -> None:
    node = Node()
    assert await node.judge()
    later = needing(node.peers.records[A], 7)
    node.peers.records = {D: later}
    status = status_of(JOB, make_witness((D, B)), None, "running", "", None)
    false = status_of(JOB, make_witness((E,)), None, "running", "", None)
    node.table.update(C, JOB, msgspec.structs.replace(false, rank=(0, 2**50, 0, 2)))
    node.table.update(D, JOB, status)
    assert not (await node.vouching.words(JOB)).records, "it does not prove that it is a witness"
    node.judges.proven = {D}
    assert await node.vouching.words(JOB) == Words({D: later}, few=True)
    assert not await node.vouching.needed(JOB), "it alone removes nothing"
    node.peers.records = {D: msgspec.structs.replace(later, job=b"k" * 16)}
    assert not (await node.vouching.words(JOB)).records


async def test_question_that_no_start_depends_on_takes_no_turn_of_theirs() -> None:
    """Statuses that name silent nodes have a node ask in vain for seconds."""
    node = Node()
    for _ in range(AT_ONCE):
        await node.vouching._turns.acquire()
    async with asyncio.timeout(10.0):
        assert await node.vouching.describe(JOB, D) == SPEC and len((await node.vouching.words(JOB)).records) == 3


async def test_later_group_is_heard_if_the_present_one_may_have_lost_its_memory() -> None:
    node = Node()
    assert await node.judge(), "now it knows the description"
    node.judges.proven = {D, E}
    stale = list(node.peers.records.values())
    later = msgspec.structs.replace(needing(stale[0], 7), config=Config(2, 2, voters(B, D, E)))
    node.peers.records |= dict.fromkeys((C, D), later)
    assert (await node.vouching.words(JOB)).few, "most of the later group say nothing"
    node.peers.records |= {E: later}
    assert await node.vouching.words(JOB) == Words({D: later, E: later})
    node.judges.proven = {D}
    assert (await node.vouching.words(JOB)).few, "only one proves to be a witness"


async def test_old_copies_of_journals_hide_no_later_group() -> None:
    """A store would refuse the checkpoints of the runner that this group knows."""
    node = Node()
    node.judges.proven = {D, E}
    later = msgspec.structs.replace(node.peers.records[C], config=Config(2, 2, voters(C, D, E)))
    for witness in (A, B):
        old = node.peers.records[witness]
        node.peers.records[witness] = msgspec.structs.replace(old, holder=A, record=JobRecord(), disk=b"old copy")
    del node.peers.records[C]
    node.peers.records |= dict.fromkeys((D, E), later)
    assert not await node.judge(), "nobody is asked who knows"
    node.table.update(D, JOB, status_of(JOB, make_witness((C, D, E)), None, "running", "", None))
    assert await node.vouching.words(JOB) == Words({D: later, E: later})


@pytest.mark.parametrize("remembered", [False, True])
async def test_witnesses_before_a_lost_group_prove_the_later_ones(remembered: bool) -> None:
    """Regression: a job waited for the end of another for ever. No status names those who agreed to the first change."""
    node, (f, g) = Node(), (bytes([6]) * 32, bytes([7]) * 32)
    between, last = Config(1, 1, voters(D)), Config(2, 2, voters(D, f, g))
    before, later = (msgspec.structs.replace(node.peers.records[A], config=group) for group in (between, last))
    node.peers.records = dict.fromkeys((A, B, C, D), before)
    assert not remembered or await node.judge()
    node.peers.records = dict.fromkeys((A, B, C), before) | dict.fromkeys((f, g), later)
    node.table.update(f, JOB, status_of(JOB, make_witness((D, f, g)), None, "running", "", None))

    def proven(records: Collection[WitnessRecord], spec: JobSpec) -> Witnesses:
        return Witnesses({A, B, C, *((D, f, g) if before in records else ())}, set())

    node.judges.witnesses_by = proven
    assert await node.vouching.words(JOB) == Words({f: later, g: later})


async def test_only_the_leader_and_the_runner_seek_a_witness() -> None:
    node = Node()
    ask = Introduce(JOB, b"the sealed spec")
    assert await node.vouching.allows(A, ask) and await node.vouching.allows(D, ask)
    assert not await node.vouching.allows(E, ask)


async def test_only_witnesses_of_a_waiting_job_ask_for_room() -> None:
    node = Node()
    room = MakeRoom(job=b"k" * 16, wanted_by=JOB, spec=b"the sealed spec")
    assert not await node.vouching.allows(A, room), "it runs"
    for witness, record in list(node.peers.records.items()):
        node.peers.records[witness] = msgspec.structs.replace(record, holder=None)
    assert await node.vouching.allows(A, room)
    assert not await node.vouching.allows(D, room), "no witness of it"
    for witness, record in list(node.peers.records.items()):
        node.peers.records[witness] = msgspec.structs.replace(record, final=True)
    assert not await node.vouching.allows(A, room), "it is over"


async def test_what_vouching_remembers_is_bounded() -> None:
    node = Node()
    node.peers.specs |= {D}
    for term in range(REMEMBERED + 10):
        node.vouching._writers[(JOB, term, A, "ada")] = None
    assert await node.judge()
    assert len(node.vouching._writers) == REMEMBERED


async def test_judged_writers_are_kept_by_their_last_use() -> None:
    node = Node()
    assert await node.judge()
    for term in range(REMEMBERED - 1):
        node.vouching._writers.keep((JOB, term, A, "ada"), None)
    assert await node.judge(seq=2)
    node.vouching._writers.keep((JOB, REMEMBERED, A, "ada"), None)
    node.peers.calls.clear()
    assert await node.judge(seq=3) and not node.peers.calls


async def test_working_directory_of_a_user_needs_no_witness() -> None:
    node = Node()
    manifest: dict[str, Any] = {"kind": "workdir", "job": bytes(16), "term": 0, "seq": 0}
    member: Any = SimpleNamespace(user="ada", roles=("user",))
    node.vouching._trust.credentials = lambda signer, now: member  # type: ignore[method-assign]
    assert await node.judge(**manifest) and not node.peers.calls
    with pytest.raises(Refused, match="signed by a node of its user"):
        await node.judge(**manifest, user="mallory")


def test_requests_that_wait_to_be_judged_are_bounded_for_one_and_for_all() -> None:
    vouching = Node().vouching
    assert [vouching.enter(A) for _ in range(33)] == [True] * 32 + [False]
    senders = [bytes([number]) * 32 for number in range(100, 164)]
    assert sum(vouching.enter(sender) for sender in senders) == 64 - 32
    vouching.leave(A)
    assert vouching.enter(B) and not vouching.enter(A)
    for _ in range(31):
        vouching.leave(A)
    assert A not in vouching._waiting and vouching.enter(A)


async def test_slow_witnesses_of_one_member_hold_up_nobody_else() -> None:
    node, gate = Node(), asyncio.Event()
    call = node.peers.call

    async def slow(*args: Any, **named: Any) -> bytes:
        await gate.wait()
        answer: bytes = await call(*args, **named)
        return answer

    node.peers.call = slow
    later = msgspec.structs.replace(make_start(term=4), config=Config(1, 4, voters(A, B, C)))
    asking = [asyncio.create_task(node.vouching.allows(A, later)) for _ in range(32)]
    await asyncio.sleep(0)
    node.peers.call = call
    async with asyncio.timeout(10.0):
        assert not await node.vouching.allows(E, later), "it is judged meanwhile"
    gate.set()
    assert all(await asyncio.gather(*asking)) and not node.vouching._turns_of


@pytest.mark.parametrize(("senders", "judged"), [(1, 4), (8, 16)])
async def test_starts_are_judged_a_few_at_a_time(senders: int, judged: int) -> None:
    node, gate, asked = Node(), asyncio.Event(), list[bytes]()

    async def silent(witness: bytes, *rest: Any, **named: Any) -> bytes:
        asked.append(witness)
        await gate.wait()
        raise PeerError("it does not answer")

    node.peers.call = silent
    later = msgspec.structs.replace(make_start(term=4), config=Config(1, 4, voters(A, B, C)))
    asking = [
        asyncio.create_task(node.vouching.allows(bytes([number]) * 32, later))
        for number in range(100, 100 + senders)
        for _ in range(8)
    ]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(asked) == 3 * judged, "each asks three witnesses"
    gate.set()
    await asyncio.gather(*asking)


async def test_witnesses_that_lead_on_and_on_are_followed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vouching_module, "FOUND_WITHIN_S", 0.05)
    node = Node()

    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(node.vouching._group, "present", never)
    later = msgspec.structs.replace(make_start(term=4), config=Config(1, 4, voters(A, B, C)))
    async with asyncio.timeout(10.0):
        assert await node.vouching.allows(A, later), "as if its witnesses did not answer"


async def test_start_in_the_first_group_costs_no_question() -> None:
    node = Node()
    assert await node.vouching.allows(A, make_start(term=4)) and not node.peers.calls


async def test_description_is_asked_for_once_and_of_witnesses_if_the_sender_lacks_it() -> None:
    node = Node()
    assert await node.vouching.read_by_runner(JOB, D) == SPEC
    node.peers.specs.clear()
    assert await node.vouching.describe(JOB) == SPEC

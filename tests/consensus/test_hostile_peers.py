"""Well-formed nonsense from members: no sequence of messages fails a core or breaks a rule."""

import gc
from collections.abc import Callable
from random import Random
from types import FunctionType, ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.consensus.effects import SaveWitnessRecord, Send, WitnessRecord
from mesh.consensus.messages import (
    Accept,
    Accepted,
    AnyMessage,
    Cancel,
    Closed,
    MakeRoom,
    Migrate,
    Prepare,
    PreVoteGranted,
    Promised,
    Refused,
    Released,
    Start,
    StartAnswer,
    encode_message,
)
from mesh.consensus.participant import Directed, Participant, Rules
from mesh.consensus.proposer import Proposer
from mesh.consensus.reports import (
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestStarted,
    ResultStored,
    VacateWanted,
)
from mesh.consensus.view import Timer
from mesh.model.record import Attempt, Commit, Config, JobRecord, Outcome, Voter
from tests.consensus.test_participant import make_participant, open_spec
from tests.consensus.worlds import (
    DISK,
    JOB,
    SPEC_BYTES,
    A,
    B,
    C,
    D,
    E,
    RunnerWorld,
    at,
    make_leader,
    make_spec,
    make_view,
    voters,
)

nodes = st.sampled_from([A, B, C, D, E, b"", b"x" * 32])
numbers = st.one_of(st.integers(-2, 12), st.sampled_from([-(2**63), 2**63 - 1]))
groups = st.lists(nodes, max_size=5).map(tuple)
texts = st.sampled_from(["", "ada", "mallory", "\N{SNOWMAN}" * 50])
benches = st.lists(st.builds(Voter, node=nodes, disk=st.sampled_from([DISK, b"", b"another!"])), max_size=5).map(tuple)
configs = st.builds(Config, number=numbers, term=numbers, members=benches, previous=benches)
commits = st.builds(
    Commit,
    seq=numbers,
    term=numbers,
    manifest=st.binary(max_size=4),
    parent=st.none() | st.binary(max_size=4),
    holders=groups,
    step=st.none() | numbers,
    created_unix_ms=numbers,
)
attempts = st.builds(
    Attempt, number=numbers, node=nodes, nick=texts, term=numbers, started_unix_ms=numbers, reason=texts
)
outcomes = st.builds(
    Outcome,
    kind=st.sampled_from(["done", "failed", "cancelled"]),
    detail=texts,
    exit_code=st.none() | numbers,
    manifest=st.none() | st.binary(max_size=4),
    holders=groups,
    ended_unix_ms=numbers,
)
records = st.builds(
    JobRecord,
    version=numbers,
    commit=st.none() | commits,
    attempts=st.lists(attempts, max_size=3).map(tuple),
    outcome=st.none() | outcomes,
    errors=numbers,
)
jobs = st.sampled_from([JOB, b"other job 16 byt"])
specs = st.sampled_from([SPEC_BYTES, b"forged"])
messages = st.one_of(
    st.builds(Prepare, job=jobs, term=numbers),
    st.builds(
        Promised,
        job=jobs,
        term=numbers,
        config=configs,
        accepted_term=numbers,
        record=records,
        cancel_wanted=st.booleans(),
    ),
    st.builds(
        Accept,
        job=jobs,
        term=numbers,
        round=numbers,
        config=configs,
        record=records,
        holder=st.none() | nodes,
        spec=st.none() | specs,
    ),
    st.builds(Accepted, job=jobs, term=numbers, round=numbers, cancel_wanted=st.booleans()),
    st.builds(
        Refused,
        job=jobs,
        term=numbers,
        round=numbers,
        promised=numbers,
        config=st.none() | configs,
        lease_left_s=st.floats(),
        needs_spec=st.booleans(),
        finished=st.booleans(),
        record=st.none() | records,
    ),
    st.builds(Start, job=jobs, term=numbers, config=configs, record=records, spec=specs),
    st.builds(StartAnswer, job=jobs, term=numbers, taken=st.booleans(), reason=texts),
    st.builds(Released, job=jobs, term=numbers),
    st.builds(Cancel, job=jobs, user=texts),
    st.builds(Closed, job=jobs, term=numbers, record=records),
    st.builds(Migrate, job=jobs, user=texts, to=st.none() | nodes),
    st.builds(MakeRoom, job=jobs, wanted_by=jobs, spec=specs),
)
facts = st.sampled_from(
    [
        GuestStarted(None),
        GuestExited(code=0, oom=False, forced_done=False),
        CheckpointFound(),
        CheckpointStored(b"m", (B,), 3),
        ResultStored(None, ()),
        VacateWanted(5.0, "owner"),
    ]
)


@settings(max_examples=100)
@given(
    script=st.lists(st.tuples(nodes, st.one_of(messages, facts, st.none())), max_size=25), seconds=st.floats(0.0, 20.0)
)
def test_no_sequence_of_messages_fails_a_node(script: list[tuple[bytes, object]], seconds: float) -> None:
    rules = Rules(
        open_spec=open_spec, admit=lambda job, spec, start: None, may_cancel=lambda s, user, spec: user == spec.user
    )
    participant = Participant(A, DISK, "a", rules, Random(1))
    now = 0.0
    timers: dict[tuple[bytes, str, str], tuple[float, Timer]] = {}
    promised: dict[bytes, int] = {}
    ended: dict[bytes, Outcome] = {}

    def absorb(out: list[Directed]) -> None:
        for item in out:
            effect = item.effect
            if isinstance(effect, Send):
                encode_message(effect.message)
            elif isinstance(effect, SaveWitnessRecord):
                check(effect.witness_record)
            elif hasattr(effect, "token"):
                timers[item.job, item.role, effect.name] = (effect.at, Timer(effect.name, effect.token))

    def check(witness_record: WitnessRecord) -> None:
        assert witness_record.promised >= promised.get(witness_record.job, 0)
        promised[witness_record.job] = witness_record.promised
        if witness_record.final:
            assert ended.setdefault(witness_record.job, witness_record.record.outcome) == witness_record.record.outcome

    absorb(participant.observe(make_view(A, (A, B, C, D)), at(now)))
    absorb(participant.submit(JOB, SPEC_BYTES, make_spec(), at(now)))
    for sender, thing in script:
        now += seconds
        if thing is None:
            for (job, role, _), (due, timer) in list(timers.items()):
                if due <= now:
                    absorb(participant.on_timer(job, role, timer, at(now)))  # type: ignore[arg-type]
        elif isinstance(thing, AnyMessage):
            absorb(participant.receive(sender, thing, at(now)))
        else:
            absorb(participant.report(JOB, thing, at(now)))  # type: ignore[arg-type]
        absorb(participant.observe(make_view(A, (A, B, C, D)), at(now)))


FLOOD = 100
GROUP = Config(number=0, term=1, members=voters(A, B, C))
Core = tuple[object, Callable[[bytes], object]]  # and what gives it an answer of B with this disk


def accepted(term: int, disk: bytes) -> Accepted:
    return Accepted(job=JOB, term=term, disk=disk, round=1, cancel_wanted=True)


def refused(term: int, disk: bytes) -> Refused:
    return Refused(JOB, term, disk, 1, term + 1, None, 0.0, needs_spec=False, finished=False)


def proposer(answer: Callable[[int, bytes], Accepted | Refused]) -> Core:
    core = Proposer(JOB, SPEC_BYTES, 1, GROUP, JobRecord(), D)
    core.propose(0.0)

    def hear(disk: bytes) -> object:
        message = answer(1, disk)
        return core.on_accepted(B, message) if isinstance(message, Accepted) else core.on_refused(B, message)

    return core, hear


def leased(disk: bytes) -> Refused:
    return Refused(JOB, 1, disk, 0, 0, None, 5.0, needs_spec=False, finished=False)


def runner() -> Core:
    world = RunnerWorld()
    world.begin()
    core = world.runner
    return core, lambda disk: core.on_accepted(B, accepted(core.term, disk), at(0))


def leader(answer: Callable[[bytes], PreVoteGranted | Refused]) -> Core:
    core = make_leader()
    core.observe(make_view(A, (A, B, C)), at(0))
    return core, lambda disk: core.handle(B, answer(disk), at(0))


def submitter(answer: Callable[[int, bytes], Accepted | Refused]) -> Core:
    core = make_participant()
    core.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    return core, lambda disk: core.receive(B, answer(1, disk), at(0))


def voters_in(core: object) -> int:
    """Return how many voters a core keeps."""
    seen: dict[int, object] = {}
    found = [core]
    while found:
        thing = found.pop()
        if id(thing) not in seen and not isinstance(thing, type | FunctionType | ModuleType):
            seen[id(thing)] = thing
            found += gc.get_referents(thing)
    return sum(isinstance(thing, Voter) for thing in seen.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: proposer(accepted),
        lambda: proposer(refused),
        runner,
        lambda: leader(lambda disk: PreVoteGranted(JOB, 1, disk)),
        lambda: leader(leased),
        lambda: submitter(accepted),
        lambda: submitter(refused),
    ],
    ids=["accepted", "refused", "cancelled", "granted", "leased", "submitted", "submission-refused"],
)
def test_voter_that_invents_disks_is_kept_once(make: Callable[[], Core]) -> None:
    core, hear = make()
    before = voters_in(core)
    for number in range(FLOOD):
        hear(number.to_bytes(8))
    assert voters_in(core) <= before

"""Jobs under all faults for many seeds, and negative controls for every rule.

`MESH_SIM_SEEDS=400 make test` runs more seeds. A failure prints its seed and the command that replays it.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from membership.envelope import OVERHEAD
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.consensus.durable_order import SaveRecords, Step, in_durable_order
from mesh.consensus.effects import Effect, RunUntil, WitnessRecord
from mesh.consensus.gang import Gang, GangMember
from mesh.consensus.leader import Leader
from mesh.consensus.messages import Accept, Accepted, AnyMessage, Prepare, PreVote, Refused, RunGranted
from mesh.consensus.participant import Directed, Participant
from mesh.consensus.reports import GuestExited
from mesh.consensus.runner import Runner
from mesh.consensus.view import Instant
from mesh.consensus.witness import Witness
from mesh.jobs.authority import Authority
from mesh.model.record import Config, JobRecord, Outcome, Voter
from mesh.model.spec import JobSpec, decode_spec
from placement.advert import Advert
from placement.ranking import Ranking, rank_nodes
from placement.request import Request
from sim.protocol.checkpoint_checkers import ResumesFromCommit
from sim.protocol.checkpoints import StoringNode
from sim.protocol.faults import (
    CLOCK_INCIDENTS,
    GOSSIP_INCIDENTS,
    INCIDENTS,
    JOB_INCIDENTS,
    LIES,
    STORE_INCIDENTS,
    FaultPlan,
    MeshPlan,
    draw_job_faults,
    draw_mesh,
    draw_work_plan,
)
from sim.protocol.guests import Guest
from sim.protocol.job_checkers import OneGroup, SignedSpec, all_job_checkers
from sim.protocol.jobs import LIE, JobDisk, JobNode, JobsWorld
from sim.protocol.journal_faults import INCIDENTS as DISK_INCIDENTS
from sim.protocol.lease_checkers import NoDuplicates, OneEnd, OneLease, StepsInLease
from sim.protocol.membership import MembershipNode, Violation
from sim.protocol.memory_store import Saved
from tests.sim.replay import digests
from tests.sim.seeds import seeds

SEEDS = int(os.environ.get("MESH_SIM_SEEDS", "20"))
BATCH = 10  # seeds of one test
DRAWN = max(SEEDS, 40)  # seeds whose draws are looked at without playing them
LATER = () if "MESH_SIM_SEEDS" in os.environ else pytest.mark.slow
CONTROL_SEEDS = 200  # within which a broken rule must be detected


def checked(seed: int, **options: Any) -> JobsWorld:
    """Return a world with all checkers."""
    return JobsWorld(seed, job_checkers=all_job_checkers(), **options)


def play(seed: int) -> tuple[str, int, int, int, int, Counter[str], int]:
    """Return (violation, incidents, commits, accepted jobs, lost jobs, ends, gang members)."""
    world = checked(seed)
    try:
        world.run()
    except Violation as violation:
        return str(violation), 0, 0, 0, 0, Counter(), 0
    ends = Counter(world.outcome(job) or "" for job in world.accepted)
    return (
        "",
        world.incidents,
        world.commits,
        len(world.accepted),
        len(world.lost - world.recovered),
        ends,
        world.gang_members,
    )


def test_member_of_a_mesh_of_two_can_lie_about_the_other() -> None:
    """Regression (seeds 20 to 29): the fault wanted three nodes."""
    world = checked(
        1, faults=FaultPlan(incidents=(), news_every_s=0.0, until_s=60.0), mesh=MeshPlan(nodes=2, gangs=0.0)
    )
    world.run()
    world._accuse_falsely(world.nodes[0], world.nodes[1], Random(1))


@pytest.mark.parametrize("first", [0, *(pytest.param(seed, marks=LATER) for seed in range(BATCH, SEEDS, BATCH))])
def test_job_invariants_hold_under_all_faults(first: int) -> None:
    played = [play(seed) for seed in range(first, first + BATCH)]
    violations = [text for text, *_ in played if text]
    assert not violations, "\n".join(violations)
    incidents, commits, accepted, lost = (sum(row[column] for row in played) for column in range(1, 5))  # type: ignore[misc]
    # Bounds that any ten seeds keep: of 100 seeds, the worst ten had 162 incidents, 222 commits, 33 jobs, 29 members of gangs.
    assert incidents > 8 * BATCH and commits > 10 * BATCH, "too few incidents or commits to test anything"
    assert accepted > 2 * BATCH and lost < 0.4 * accepted
    assert sum(row[6] for row in played) > BATCH, "no gang was tried"
    ends = sum((row[5] for row in played), Counter())
    assert ends["done"] > 0.1 * accepted and ends["failed"]


@pytest.mark.long
@pytest.mark.parametrize("played", [(13, 25), pytest.param((10, 13, 14, 25), marks=pytest.mark.slow)])
def test_jobs_that_migrate_back_all_end(monkeypatch: pytest.MonkeyPatch, played: tuple[int, ...]) -> None:
    monkeypatch.setattr("sim.protocol.jobs.HOME_SHARE", 1.0)
    worlds = [checked(seed, mesh=MeshPlan()) for seed in played]  # many of their jobs return
    for world in worlds:
        world.run()
    assert sum(world.returns for world in worlds) > 5


def test_every_fault_is_drawn_by_some_seed() -> None:
    plans = [draw_job_faults(seed, 10.0) for seed in range(DRAWN)]
    drawn = Counter(incident for faults in plans for incident in faults.incidents)
    known = {*INCIDENTS, *LIES, *JOB_INCIDENTS, *CLOCK_INCIDENTS, *DISK_INCIDENTS, *STORE_INCIDENTS, *GOSSIP_INCIDENTS}
    assert set(drawn) == known
    assert min(drawn.values()) >= DRAWN // 8 and DRAWN // 3 < sum(plan.broken_calls > 0 for plan in plans) < DRAWN
    meshes = [draw_mesh(seed) for seed in range(DRAWN)]
    assert len({mesh.nodes for mesh in meshes}) == 11 and sum(mesh.gangs == 1.0 for mesh in meshes) >= DRAWN // 8
    assert DRAWN // 3 < sum(mesh.late > 0 for mesh in meshes) < DRAWN


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_old_copies_of_journals_are_noticed(count: int) -> None:
    faults = FaultPlan(
        incidents=("old copy", "crash", "notice"), incident_every_s=10.0, news_every_s=0.0, until_s=300.0
    )
    worlds = [checked(seed, faults=faults, mesh=MeshPlan()) for seed in range(count)]
    for world in worlds:
        world.run()
    copies = sum((world.old_copies for world in worlds), Counter[str]())
    assert copies["noticed"] > count and copies["noticed"] > 4 * copies["unnoticed"]


def test_one_seed_gives_one_digest_in_any_process() -> None:
    played = digests("jobs", "--seed", "11", "--minutes", "4", "--jobs", "3")
    assert len(played) == 1
    assert checked(12, minutes=4.0, jobs=3).run() not in played, "another seed gives another history"


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_guests_keep_their_lease_on_a_slow_partitioned_network(seed: int) -> None:
    """Regression: a guest started after its lease had expired, and a timer fired a rounding error early."""
    # Gangs hardly get on here: an answer takes as long as a lease.
    mesh = msgspec.structs.replace(draw_mesh(seed), gangs=0.0)
    world = checked(seed, faults=SLOW, mesh=mesh)
    world.run()
    assert world.commits > 0


class Usurped(JobsWorld):
    """A world in which one node answers each end that a runner asks it to record with another end, by a group of its own."""

    answered = 0

    def saved(self, node: JobNode, witness_record: WitnessRecord) -> None:
        super().saved(node, witness_record)
        record, config, liar = witness_record.record, witness_record.config, self.nodes[1]
        last = record.attempts[-1] if record.attempts else None
        ends = record.outcome is not None and not witness_record.final and last is not None
        if node is not liar or not ends or len(config.nodes) < 3 or last.term != witness_record.accepted_term:
            return
        if last.node == liar.id:
            return  # a hostile runner may end its job
        term = witness_record.promised + 1
        alone = Config(config.number + 1, term, (Voter(liar.id, liar.disk.name),))
        lie = msgspec.structs.replace(record, outcome=Outcome("failed", f"{LIE} of {liar.name}", None, None, (), 0))
        self.answered += 1
        for other in self.nodes:
            if other is not liar:
                liar.send(other.id, Accept(witness_record.job, term, 1, alone, lie, None))


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_no_witness_has_another_end_accepted_before_the_first_is_known(seed: int) -> None:
    """Regression: the lease ended with the end's proposal, and any witness could propose in the round trip after it."""
    world = Usurped(seed, faults=FaultPlan(incidents=(), until_s=200.0), job_checkers=all_job_checkers())
    world.run()
    assert world.answered


@pytest.mark.parametrize(("seed", "claims"), [(0, "group"), (9, "group"), (0, "term"), (9, "term")])
def test_jobs_end_beside_a_witness_that_lies_to_leaders(
    seed: int, claims: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells every leader that a later group has replaced them, or that it has promised the last term that there is, and leads
    nothing itself.
    """
    hear, send, lies = JobNode.handle_message, JobNode.send, Counter[bytes]()

    def denies(node: JobNode, job: bytes) -> WitnessRecord | None:
        witness = node.participant.witnesses.get(job) if node is node.world.nodes[0] else None
        known = witness.witness_record if witness is not None and not witness.finished else None
        return known if known is not None and len(known.config.members) > 2 else None

    def lie(self: JobNode, sender: bytes, message: AnyMessage) -> None:
        known = denies(self, message.job) if isinstance(message, PreVote | Prepare) and sender != self.id else None
        if known is None:
            hear(self, sender, message)
            return
        assert isinstance(message, PreVote | Prepare)
        others = tuple(voter for voter in known.config.members if voter.node != sender)
        group, promised = Config(known.config.number + 1, known.config.term + 1, others), known.promised
        if claims == "term":
            group, promised = known.config, (1 << 53) - 1
        facts = {"needs_spec": False, "finished": False}
        self.send(sender, Refused(message.job, message.term, self.disk.name, 0, promised, group, 0.0, **facts))
        lies[sender] += 1

    def lead_nothing(self: JobNode, to: bytes, message: AnyMessage) -> None:
        if not isinstance(message, PreVote | Prepare) or denies(self, message.job) is None:
            send(self, to, message)

    monkeypatch.setattr(JobNode, "handle_message", lie)
    monkeypatch.setattr(JobNode, "send", lead_nothing)
    assert play(seed)[0] == "" and lies


GANGS = MeshPlan(gangs=1.0)
SLOW = FaultPlan(
    loss=0.3,
    delay_s=(0.2, 2.8),
    drift=0.01,
    incidents=("partition", "one way", "notice", "crash"),
    incident_every_s=10.0,
    news_every_s=0.0,
    until_s=200.0,
)


def harsh(seed: int, **changes: Any) -> JobsWorld:
    """Return a world with the seed's faults, changed by these values."""
    faults = draw_job_faults(seed, 10.0)
    return checked(seed, faults=msgspec.structs.replace(faults, **changes))


def found(make: Any, first: int = 0) -> str:
    """Return the first violation among the control's seeds from `first` on, or ""."""
    for seed in range(first, CONTROL_SEEDS):
        try:
            make(seed).run()
        except Violation as violation:
            return str(violation)
    return ""


def few_disks(seed: int, *incidents: str) -> JobsWorld:
    """Return a world with three nodes, each a witness of every job, that often have these incidents."""
    faults = msgspec.structs.replace(draw_job_faults(seed, 10.0), incidents=incidents, incident_every_s=2.0)
    return checked(seed, faults=faults, mesh=MeshPlan(nodes=3))


CRASHES = ("crash", "partition", "stall", "leave", "notice", "crash at a save")


@pytest.mark.slow
class TestNegativeControls:
    """Each test removes one rule of the protocol, which a checker must detect."""

    def test_witnesses_that_ignore_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Witness, "lease_left_s", lambda self, now: 0.0)
        assert found(checked).startswith("J1 ")

    def test_witnesses_that_take_any_members_word(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Authority, "may_propose", lambda *asked: True)
        assert found(lambda seed: harsh(seed, incidents=("theft", "partition"))).startswith("J13 ")

    def test_witnesses_that_take_a_lease_which_the_user_forbids(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobSpec, "allows", lambda self, node: True)
        hostile = ("lie", "crash", "notice")
        assert found(lambda seed: harsh(seed, incidents=hostile, incident_every_s=3.0)).startswith("J13 ")

    def test_order_to_recover_is_good_for_any_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mesh.consensus.participant.record_hash", lambda record: ANY)
        lossy = ("wipe", "crash", "leave")
        assert found(lambda seed: harsh(seed, incidents=lossy, incident_every_s=4.0)).startswith("J14 ")

    def test_witnesses_that_take_any_members_warrant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Authority.may_propose

        def credulous(self: Authority, sender: bytes, message: Accept, known: WitnessRecord, *more: Any) -> bool:
            everybody = tuple(Voter(node, b"") for node in self._trust.seen())
            group = msgspec.structs.replace(known.config, members=everybody)
            return real(self, sender, message, msgspec.structs.replace(known, config=group), *more)

        monkeypatch.setattr(Authority, "may_propose", credulous)
        assert found(lambda seed: harsh(seed, incidents=("theft", "crash"))).startswith("J13 ")

    def test_witnesses_that_believe_one_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            Witness, "_believes", lambda self, sender, message: sender in self.witness_record.config.nodes
        )
        assert found(lambda seed: harsh(seed, incidents=("lie", "crash"))).startswith("J14 ")

    def test_witnesses_that_forget_leases_at_a_restart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = JobsWorld.restored

        def forgetful(self: JobsWorld, witness_record: WitnessRecord, node: JobNode) -> Witness:
            witness = real(self, witness_record, node)
            witness.lease_until = 0.0
            return witness

        monkeypatch.setattr(JobsWorld, "restored", forgetful)
        monkeypatch.setattr("sim.protocol.jobs.LEASE_S", 60.0)
        assert found(lambda seed: harsh(seed, incidents=("crash",), incident_every_s=2.0)).startswith(("J1 ", "J12"))

    def test_witnesses_that_accept_lower_terms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Witness._accept

        def forgetful(self: Witness, sender: bytes, message: Accept, now: float) -> list[Effect]:
            self.witness_record = msgspec.structs.replace(self.witness_record, promised=0, accepted_term=0)
            return real(self, sender, message, now)

        monkeypatch.setattr(Witness, "_accept", forgetful)
        assert found(checked).startswith(("group", "J13", "J4"))

    def test_witnesses_that_accept_stale_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Witness._accept

        def forgetful(self: Witness, sender: bytes, message: Accept, now: float) -> list[Effect]:
            if message.config.order < self.witness_record.config.order:
                self.witness_record = msgspec.structs.replace(self.witness_record, config=message.config)
            return real(self, sender, message, now)

        monkeypatch.setattr(Witness, "_accept", forgetful)
        assert found(lambda seed: harsh(seed, incidents=CRASHES, reorder=0.3)).startswith("J15")

    def test_promises_sent_before_they_are_on_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def careless(outputs: Sequence[Directed]) -> list[Step]:
            steps = in_durable_order(outputs)
            return sorted(steps, key=lambda step: isinstance(step, SaveRecords))

        monkeypatch.setattr("sim.protocol.worker.in_durable_order", careless)
        assert found(lambda seed: few_disks(seed, "slow disk", "crash")).startswith("on disk")

    def test_witnesses_that_go_on_after_a_failed_save(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobNode, "save_failed", lambda self, saved: saved())
        assert found(lambda seed: few_disks(seed, "disk error", "full disk", "crash")).startswith("on disk")

    def test_old_copies_of_journals_that_go_unnoticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobNode, "check_disk", lambda self: setattr(self.disk, "old_copy", False))
        monkeypatch.setattr("sim.protocol.jobs.MIN_WIPE_INTERVAL_S", 10.0)
        assert found(lambda seed: few_disks(seed, "old copy", "notice", "crash")).startswith("J4")

    def test_leases_that_outlast_a_pause_of_their_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Participant, "look_at_clocks", lambda self, at: [])
        monkeypatch.setattr("sim.protocol.jobs.LEASE_S", 30.0)

        def paused(seed: int) -> JobsWorld:
            faults = msgspec.structs.replace(draw_job_faults(seed, 10.0), incidents=("pause",), incident_every_s=12.0)
            return JobsWorld(seed, faults=faults, mesh=MeshPlan(nodes=9), job_checkers=[StepsInLease(), NoDuplicates()])

        assert found(paused).startswith("J1")

    def test_promises_that_are_not_saved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = JobNode.keep

        def lazy(self: JobNode, witness_record: WitnessRecord) -> None:
            self.after(2.0, real, self, witness_record)

        monkeypatch.setattr(JobNode, "keep", lazy)
        assert found(lambda seed: harsh(seed, incidents=("mass restart", *CRASHES), incident_every_s=6.0)).startswith(
            "on disk"
        )

    def test_gangs_that_are_done_when_their_first_guest_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Gang, "running", property(lambda self: []))
        assert found(lambda seed: checked(seed, mesh=GANGS)).startswith("end")

    def test_gang_member_that_counts_its_lease_from_the_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = GangMember.on_run

        def generous(self: GangMember, message: RunGranted, at: Instant) -> list[Effect]:
            self._asked = dict.fromkeys(self._asked, at.now)
            return real(self, message, at)

        monkeypatch.setattr(GangMember, "on_run", generous)
        # Guests of members that never end by themselves, and runners that do not wait for them, show it within few seeds.
        monkeypatch.setattr(
            Guest, "done", property(lambda guest: guest.step >= guest._work.steps and not guest.gang_member)
        )
        monkeypatch.setattr(Gang, "running", property(lambda gang: []))
        late = msgspec.structs.replace(SLOW, loss=0.1, delay_s=(0.0, 4.0))
        checkers = [NoDuplicates(), OneEnd()]
        assert found(lambda seed: JobsWorld(seed, faults=late, mesh=GANGS, jobs=8, job_checkers=checkers)).startswith(
            ("J12", "J5 ")
        )

    def test_job_description_that_is_not_verified(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def gullible(self: Authority, job: bytes, sealed: bytes) -> JobSpec:
            return decode_spec(sealed[OVERHEAD:])

        monkeypatch.setattr(Authority, "open_spec", gullible)
        monkeypatch.setattr(Authority, "read_spec", gullible)
        monkeypatch.setattr(Authority, "may_propose", lambda *asked: True)  # else the forger's runner gets no lease
        forged = msgspec.structs.replace(draw_job_faults(0, 10.0), incidents=("forgery",), incident_every_s=3.0)
        assert found(lambda seed: JobsWorld(seed, faults=forged, job_checkers=[SignedSpec()])).startswith("J8")

    def test_leader_that_ranks_hosts_for_another_attempt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def by_taste(request: Request, adverts: Sequence[Advert], homes: object) -> Ranking:
            return rank_nodes(msgspec.structs.replace(request, attempt=request.attempt + 1), adverts)

        monkeypatch.setattr("placement.zones.rank_nodes", by_taste)
        assert found(checked).startswith("J11")

    def test_lost_disk_that_goes_unnoticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobNode, "new_disk", lambda self: JobDisk(name=b"the disk"))
        monkeypatch.setattr("sim.protocol.jobs.MIN_WIPE_INTERVAL_S", 0.0)
        assert found(lambda seed: harsh(seed, incidents=("wipe", *CRASHES), incident_every_s=4.0)).startswith(
            ("J4", "restorable")
        )

    def test_lease_counted_from_the_receipt_of_its_grant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Runner.on_accepted

        def generous(self: Runner, sender: bytes, message: Accepted, at: Instant) -> list[Effect]:
            late = {
                number: (msgspec.structs.replace(decided, sent_at=at.now), acks)
                for number, (decided, acks) in self._proposer._open.items()
            }
            self._proposer._open = late
            return real(self, sender, message, at)

        monkeypatch.setattr(Runner, "on_accepted", generous)
        late = msgspec.structs.replace(SLOW, loss=0.0, delay_s=(0.0, 1.2), incidents=("one way", "partition", "stall"))
        late = msgspec.structs.replace(late, incident_every_s=3.0, until_s=300.0)
        monkeypatch.setattr("sim.protocol.jobs.LEASE_S", 2.0)

        def world(seed: int) -> JobsWorld:
            work = msgspec.structs.replace(draw_work_plan(seed), selective=0.0)
            return JobsWorld(seed, faults=late, work=work, job_checkers=[OneLease(), NoDuplicates()])

        assert found(world).startswith("J1")

    def test_leases_on_a_clock_that_stops_during_suspend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace CLOCK_BOOTTIME by CLOCK_MONOTONIC."""
        asleep: dict[MembershipNode, float] = {}
        boot, stall = MembershipNode.boot, MembershipNode.stall

        def monotonic(self: MembershipNode) -> float:
            return boot(self) - asleep.get(self, 0.0)

        def sleeps(self: MembershipNode, for_s: float, asleep_too: bool) -> None:
            stall(self, for_s, asleep_too)
            if asleep_too:
                self.world.kernel.at(self.stalled_until, lambda: asleep.update({self: asleep.get(self, 0.0) + for_s}))

        monkeypatch.setattr(MembershipNode, "boot", monotonic)
        monkeypatch.setattr(MembershipNode, "stall", sleeps)
        assert found(lambda seed: harsh(seed, incidents=("suspend",), incident_every_s=5.0)).startswith("J10")

    def test_reconfiguration_without_a_joint_quorum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hasty(self: Config, members: tuple[Voter, ...], term: int) -> Config:
            return Config(number=self.number + 1, term=term, members=members)

        monkeypatch.setattr(Config, "joint", hasty)
        assert found(lambda seed: harsh(seed, incidents=CRASHES, incident_every_s=5.0)).startswith("group")
        faults = FaultPlan(incidents=CRASHES, incident_every_s=5.0, news_every_s=0.0, until_s=300.0)
        assert found(lambda seed: JobsWorld(seed, faults=faults, job_checkers=[OneGroup()])).startswith("group")

    def test_leaders_that_do_not_read_earlier_decisions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Leader._closed

        def ignorant(self: Leader, record: JobRecord, at: Instant) -> JobRecord:
            return real(self, self.witness.witness_record.record, at)

        monkeypatch.setattr(Leader, "_closed", ignorant)
        assert found(lambda seed: harsh(seed, incidents=CRASHES, incident_every_s=5.0)).startswith("lost work")

    def test_leaders_that_leave_late_voters_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Leader, "_install", lambda self, voter: [])
        assert found(checked).startswith("J4")

    def test_end_that_counts_before_a_majority_holds_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Witness, "finished", property(lambda self: self.witness_record.record.outcome is not None))
        assert found(checked).startswith("J4")

    def test_witnesses_that_forget_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = JobsWorld.restored

        def forgetful(self: JobsWorld, witness_record: WitnessRecord, node: JobNode) -> Witness:
            record = msgspec.structs.replace(witness_record.record, outcome=None)
            return real(self, msgspec.structs.replace(witness_record, record=record, final=False), node)

        monkeypatch.setattr(JobsWorld, "restored", forgetful)
        assert found(lambda seed: harsh(seed, incidents=("mass restart", *CRASHES), incident_every_s=6.0)).startswith(
            "J5"
        )

    def test_guests_without_lease_enforcement(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Runner, "_allow", lambda self: RunUntil(math.inf))
        assert found(checked).startswith("J10")

    def test_guests_without_lease_enforcement_compute_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Runner, "_allow", lambda self: RunUntil(math.inf))
        assert found(lambda seed: JobsWorld(seed, job_checkers=[NoDuplicates()])).startswith("J12")

    def test_kill_switch_that_waits_for_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobNode, "kill_guests", lambda self: None)
        slow = ("switch", "slow disk")
        assert found(lambda seed: harsh(seed, incidents=slow, incident_every_s=3.0)).startswith("J7")

    def test_attempts_that_start_from_scratch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = JobNode._launch

        def forgetful(self: JobNode, job: bytes, record: JobRecord, host: Any) -> None:
            real(self, job, msgspec.structs.replace(record, commit=None), host)

        monkeypatch.setattr(JobNode, "_launch", forgetful)
        assert found(checked).startswith(("lost work", "departure"))
        assert found(lambda seed: JobsWorld(seed, job_checkers=[ResumesFromCommit()])).startswith("lost work")

    def test_no_last_save_at_a_notice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hasty(self: Runner, event: GuestExited, at: Instant) -> list[Effect]:
            self._exited, self.state = event, "saving"
            return self._conclude(at)

        monkeypatch.setattr(Runner, "_on_exit", hasty)
        assert found(checked).startswith("departure")

    def test_commit_called_settled_before_any_witness_has_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = JobRecord.with_commit

        def hasty(self: JobRecord, *commit: Any) -> JobRecord:
            record = real(self, *commit)
            assert record.commit is not None
            return msgspec.structs.replace(record, settled=record.commit.seq)

        monkeypatch.setattr(JobRecord, "with_commit", hasty)
        assert found(checked).startswith("settled")

    def test_copies_that_count_before_the_peer_has_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = JobNode._copy

        def hasty(self: JobNode, saved: Saved, other: StoringNode) -> str:
            real(self, saved, other)
            return ""

        monkeypatch.setattr(JobNode, "_copy", hasty)
        broken = {"incidents": CRASHES, "broken_calls": 0.3}
        assert found(lambda seed: harsh(seed, **broken)).startswith("restorable")

    def test_checkpoint_given_up_although_a_holder_has_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ReplicaPolicy, "sources", lambda *asked: [])
        assert found(lambda seed: checked(seed, mesh=MeshPlan(gangs=0.0))).startswith("restorable")

    def test_pruning_that_keeps_only_what_is_newest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def greedy(self: JobNode, job: bytes, records: object) -> None:
            self.store.forget_old(
                job, [info.seq for info in self.store.manifests(job) if info.kind == "checkpoint"][-1:]
            )

        monkeypatch.setattr(JobNode, "_forget", greedy)
        assert found(lambda seed: harsh(seed, broken_calls=0.3)).startswith(("restorable", "lost work"))

    def test_pruning_by_what_any_member_publishes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def credulous(self: JobNode, job: bytes, records: object) -> None:
            needed = max((view.needed for view in self.board.table.views_of(job)), key=lambda one: max(one, default=0))
            self.store.forget_old(job, needed)

        monkeypatch.setattr(JobNode, "_forget", credulous)
        assert found(lambda seed: harsh(seed, incidents=("rumour", "crash"))).startswith("restorable")

    def test_pruning_by_the_word_of_one_witness(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def furthest(records: Sequence[Sequence[int]]) -> Sequence[int]:
            return max(records, key=lambda needed: max(needed, default=0), default=())

        monkeypatch.setattr("sim.protocol.upkeep.needed_by_all", furthest)
        assert found(lambda seed: harsh(seed, incidents=("rumour", "crash"))).startswith("restorable")

    def test_nodes_that_repair_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sim.protocol.jobs.SELDOM_SHARE", 1.0)
        monkeypatch.setattr("sim.protocol.jobs.STEPS", (150, 250))
        monkeypatch.setattr(JobNode, "_repair", lambda self, shortage: None)
        assert found(lambda seed: checked(seed, nodes=5)).startswith("replicas")

    def test_holders_that_bring_nothing_back_to_a_new_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sim.protocol.jobs.SELDOM_SHARE", 1.0)
        monkeypatch.setattr("sim.protocol.jobs.STEPS", (150, 250))
        monkeypatch.setattr(JobNode, "_bring_back", lambda self, job, found: None)
        faults = msgspec.structs.replace(draw_job_faults(0, 10.0), incidents=("wipe", "notice"), incident_every_s=10.0)
        assert found(lambda seed: checked(seed, nodes=5, faults=faults)).startswith("replicas")

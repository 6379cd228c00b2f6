"""Simulation tier B: jobs under the full fault menu, many seeds; and proof that each rule would be missed.

`MESH_SIM_SEEDS=400 make test` runs more; a failure prints its seed and the command that replays it.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mesh.jobs.effects import Cell, Effect, RunUntil, SaveCell
from mesh.jobs.gang import Gang, Member
from mesh.jobs.ledger import Config, Ledger, Seat
from mesh.jobs.messages import Accept, Accepted, Run
from mesh.jobs.reports import KillWanted, RunnerEvent
from mesh.jobs.runner import Runner
from mesh.jobs.spec import decode_spec
from mesh.jobs.steward import Steward
from mesh.jobs.view import Instant
from mesh.jobs.witness import Witness
from placement.advert import Advert
from placement.ranking import Ranking, rank_nodes
from placement.request import Request
from sim.checkers import Violation
from sim.gossip import GossipNode
from sim.invariants import AsSubmitted, NoDuplicates, OneEnd
from sim.mix import JOB_STRIKES, Mix, draw_job_mix
from sim.world import JobDisk, JobNode, World
from tests.sim.replay import digests

SEEDS = int(os.environ.get("MESH_SIM_SEEDS", "40"))
BATCH = 20  # seeds of one test
CONTROL_SEEDS = 200  # a broken rule must be found within so many


def play(seed: int) -> tuple[str, int, int, int, int, Counter[str], int]:
    """What was violated, strikes, commits, jobs accepted, those of which nothing is left, ends, mates of gangs."""
    world = World(seed)
    try:
        world.run()
    except Violation as violation:
        return str(violation), 0, 0, 0, 0, Counter(), 0
    ends = Counter(world.outcome(job) or "" for job in world.accepted)
    return "", world.strikes, world.commits, len(world.accepted), len(world.lost - world.recovered), ends, world.mates


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_invariant_of_jobs_holds_in_every_weather(first: int) -> None:
    played = [play(seed) for seed in range(first, first + BATCH)]
    violations = [text for text, *_ in played if text]
    assert not violations, "\n".join(violations)
    strikes, commits, accepted, lost = (sum(row[column] for row in played) for column in range(1, 5))  # type: ignore[misc]
    assert strikes > 8 * BATCH and commits > 20 * BATCH, "too little happens to test anything"
    assert accepted > 4 * BATCH and lost < 0.05 * accepted
    assert sum(row[6] for row in played) > BATCH, "no gang was tried"
    ends = sum((row[5] for row in played), Counter())
    assert ends["done"] > 0.7 * accepted and ends["cancelled"] > 0
    assert not ends["failed"], "no guest here ever fails by itself"


def test_where_every_job_has_a_home_they_return_and_end_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.world.HOME_SHARE", 1.0)
    worlds = [World(seed) for seed in range(6)]
    for world in worlds:
        world.run()
    assert sum(world.returns for world in worlds) > 5


def test_every_fault_is_drawn_by_some_seed() -> None:
    mixes = [draw_job_mix(seed, 10.0) for seed in range(SEEDS)]
    drawn = Counter(strike for mix in mixes for strike in mix.strikes)
    assert len(drawn) == 12 + len(JOB_STRIKES) and min(drawn.values()) >= SEEDS // 8


def test_one_seed_gives_one_history_in_any_process() -> None:
    played = digests("jobs", "--seed", "11", "--minutes", "7", "--jobs", "3")
    assert len(played) == 1
    assert World(12, minutes=7.0, jobs=3).run() not in played, "another seed, another history"


@pytest.mark.parametrize("seed", range(4))
def test_no_guest_outruns_its_lease_where_the_network_is_slow_and_cut(seed: int) -> None:
    """Such networks found two that did: started after its lease had run out, and a timer that came a rounding error early."""
    world = World(seed, mix=SLOW)
    world.run()
    assert world.commits > 0


SLOW = Mix(
    loss=0.3,
    delay_s=(0.2, 2.8),
    drift=0.01,
    strikes=("partition", "one way", "notice", "crash"),
    strike_every_s=10.0,
    news_every_s=0.0,
    until_s=200.0,
)


def harsh(seed: int, **changes: Any) -> World:
    """A seed's own mix, with these faults for certain."""
    mix = draw_job_mix(seed, 10.0)
    return World(seed, mix=msgspec.structs.replace(mix, **changes))


def found(make: Any, first: int = 0) -> str:
    """The first violation that the control's seeds find; nothing if they find none. Those before `first` are known to."""
    for seed in range(first, CONTROL_SEEDS):
        try:
            make(seed).run()
        except Violation as violation:
            return str(violation)
    return ""


CRASHES = ("crash", "partition", "stall", "leave", "notice", "crash at a save")


class TestNegativeControls:
    """Each rule taken away must be missed: a checker that cannot fail checks nothing."""

    def test_witnesses_that_ignore_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Witness, "lease_left_s", lambda self, now: 0.0)
        assert found(World).startswith("J1 ")

    def test_witnesses_that_forget_a_lease_when_they_restart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = World.restored

        def forgetful(self: World, cell: Cell, node: JobNode) -> Witness:
            witness = real(self, cell, node)
            witness.lease_until = 0.0
            return witness

        monkeypatch.setattr(World, "restored", forgetful)
        monkeypatch.setattr("sim.world.LEASE_S", 60.0)
        assert found(lambda seed: harsh(seed, strikes=("crash",), strike_every_s=2.0)).startswith(("J1 ", "J12"))

    def test_witnesses_that_accept_lower_terms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Witness._accept

        def forgetful(self: Witness, sender: bytes, message: Accept, now: float) -> list[Effect]:
            self.cell = msgspec.structs.replace(self.cell, promised=0, accepted_term=0)
            return real(self, sender, message, now)

        monkeypatch.setattr(Witness, "_accept", forgetful)
        assert found(World)

    def test_promises_that_are_given_before_they_are_on_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = JobNode._save

        def lazy(self: JobNode, cell: Cell) -> None:
            self.after(2.0, real, self, cell)

        monkeypatch.setattr(JobNode, "_save", lazy)
        assert found(lambda seed: harsh(seed, strikes=("mass restart", *CRASHES), strike_every_s=6.0))

    def test_a_lease_that_is_given_back_while_mates_of_the_gang_still_run(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Gang, "quiet", lambda self, now: True)
        monkeypatch.setattr("sim.world.GANG_SHARE", 1.0)
        monkeypatch.setattr("sim.world.LEASE_S", 12.0)
        assert found(lambda seed: World(seed, job_checkers=[NoDuplicates()])).startswith("J12")

    def test_a_mate_that_counts_its_time_from_the_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Member.on_run

        def generous(self: Member, message: Run, at: Instant) -> list[Effect]:
            self._asked = dict.fromkeys(self._asked, at.now)
            return real(self, message, at)

        monkeypatch.setattr(Member, "on_run", generous)
        monkeypatch.setattr("sim.world.GANG_SHARE", 1.0)
        late = msgspec.structs.replace(SLOW, loss=0.1, delay_s=(0.0, 4.0))
        checkers = [NoDuplicates(), OneEnd()]
        assert found(lambda seed: World(seed, mix=late, jobs=8, job_checkers=checkers)).startswith(("J12", "J5 "))

    def test_a_description_that_is_taken_on_trust(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sim.world._open_spec", lambda job, payload: decode_spec(payload))
        forged = msgspec.structs.replace(draw_job_mix(0, 10.0), strikes=("forgery",), strike_every_s=3.0)
        assert found(lambda seed: World(seed, mix=forged, job_checkers=[AsSubmitted()])).startswith("J8")

    def test_a_steward_that_likes_another_host_better(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def by_taste(request: Request, adverts: Sequence[Advert], homes: object) -> Ranking:
            return rank_nodes(msgspec.structs.replace(request, attempt=request.attempt + 1), adverts)

        monkeypatch.setattr("placement.zones.rank_nodes", by_taste)
        assert found(World).startswith("J11")

    def test_a_lost_disk_that_goes_unnoticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobNode, "new_disk", lambda self: JobDisk(name=b"the disk"))
        monkeypatch.setattr("sim.world.WIPE_PAUSE_S", 0.0)
        assert found(lambda seed: harsh(seed, strikes=("wipe", *CRASHES), strike_every_s=4.0))

    def test_a_lease_that_counts_from_the_receipt_of_its_grant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Runner.on_accepted

        def generous(self: Runner, sender: bytes, message: Accepted, at: Instant) -> list[Effect]:
            rounds = self._proposer._open
            self._proposer._open = {number: (at.now, *rest) for number, (_, *rest) in rounds.items()}  # type: ignore[misc]
            return real(self, sender, message, at)

        monkeypatch.setattr(Runner, "on_accepted", generous)
        late = msgspec.structs.replace(SLOW, loss=0.0, delay_s=(0.0, 1.2), strikes=("one way", "partition", "stall"))
        late = msgspec.structs.replace(late, strike_every_s=3.0, until_s=300.0)
        monkeypatch.setattr("sim.world.LEASE_S", 2.0)
        assert found(lambda seed: World(seed, mix=late)).startswith(("J1 ", "J12"))

    def test_leases_by_a_clock_that_sleeps_with_the_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CLOCK_MONOTONIC in place of CLOCK_BOOTTIME."""
        asleep: dict[GossipNode, float] = {}
        boot, stand_still = GossipNode.boot, GossipNode.stand_still

        def monotonic(self: GossipNode) -> float:
            return boot(self) - asleep.get(self, 0.0)

        def sleeps(self: GossipNode, for_s: float, asleep_too: bool) -> None:
            stand_still(self, for_s, asleep_too)
            if asleep_too:
                self.world.kernel.at(self.still_until, lambda: asleep.update({self: asleep.get(self, 0.0) + for_s}))

        monkeypatch.setattr(GossipNode, "boot", monotonic)
        monkeypatch.setattr(GossipNode, "stand_still", sleeps)
        assert found(lambda seed: harsh(seed, strikes=("suspend",), strike_every_s=5.0))

    def test_groups_that_change_without_a_joint_vote(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hasty(self: Config, members: tuple[Seat, ...], term: int) -> Config:
            return Config(number=self.number + 1, term=term, members=members)

        monkeypatch.setattr(Config, "joint", hasty)
        assert found(lambda seed: harsh(seed, strikes=CRASHES, strike_every_s=5.0))

    def test_stewards_that_do_not_ask_what_was_decided(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Steward._closed

        def ignorant(self: Steward, ledger: Ledger, at: Instant) -> Ledger:
            return real(self, self.witness.cell.ledger, at)

        monkeypatch.setattr(Steward, "_closed", ignorant)
        assert found(lambda seed: harsh(seed, strikes=CRASHES, strike_every_s=5.0))

    def test_stewards_that_leave_late_members_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Steward, "_install", lambda self, seat: [])
        assert found(World).startswith("J4")

    def test_an_end_that_counts_before_a_majority_holds_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Witness, "finished", property(lambda self: self.cell.ledger.outcome is not None))
        assert found(World)

    def test_ends_that_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Witness._save

        def forgetful(self: Witness, **changes: Any) -> SaveCell:
            if changes.get("ledger") is not None and changes["ledger"].outcome is not None:
                changes["ledger"] = msgspec.structs.replace(changes["ledger"], outcome=None)
                changes.pop("final", None)
            return real(self, **changes)

        monkeypatch.setattr(Witness, "_save", forgetful)
        assert found(lambda seed: harsh(seed, strikes=("mass restart", *CRASHES), strike_every_s=6.0))

    def test_guests_that_nobody_holds_to_their_lease(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Runner, "_allow", lambda self: RunUntil(math.inf))
        assert found(World).startswith("J10")

    def test_what_such_guests_compute_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Runner, "_allow", lambda self: RunUntil(math.inf))
        assert found(lambda seed: World(seed, job_checkers=[NoDuplicates()])).startswith("J12")

    def test_a_switch_that_asks_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Runner.handle

        def hesitant(self: Runner, event: RunnerEvent, at: Instant) -> list[Effect]:
            return [] if isinstance(event, KillWanted) and not self.holds_lease(at.now + 5.0) else real(self, event, at)

        monkeypatch.setattr(Runner, "handle", hesitant)
        assert found(lambda seed: harsh(seed, strikes=("switch",), strike_every_s=3.0)).startswith("J7")

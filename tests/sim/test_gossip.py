"""Simulation tier A: membership under the full fault menu, many seeds; and proof that each rule would be missed.

`MESH_SIM_SEEDS=200 make test` runs more; a failure prints its seed and the command that replays it.
"""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from membership.config import SwimConfig
from membership.core import Core
from membership.effects import Effect
from membership.health import Health
from membership.member import MemberTable, _fingerprint
from membership.records import Record, RecordTable
from membership.search import Search
from membership.suspicion import Suspicion
from membership.swim import Swim
from sim.checkers import Violation
from sim.gossip import GossipWorld
from sim.mix import Mix, draw_mix
from tests.sim.replay import digests

SEEDS = int(os.environ.get("MESH_SIM_SEEDS", "12"))
BATCH = 6  # seeds of one test
NODES, MINUTES = 20, 30.0
CONTROL_SEEDS = 200  # a broken rule must be found within so many


def play(seed: int) -> tuple[int, str, int, int]:
    """The seed, what was violated, strikes, exchanges that broke off."""
    world = GossipWorld(seed, nodes=NODES, minutes=MINUTES)
    try:
        world.run()
    except Violation as violation:
        return seed, str(violation), world.strikes, world.broken_conversations
    return seed, "", world.strikes, world.broken_conversations


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_invariant_holds_in_every_weather(first: int) -> None:
    played = [play(seed) for seed in range(first, first + BATCH)]
    violations = [text for _, text, _, _ in played if text]
    assert not violations, "\n".join(violations)
    assert sum(strikes for _, _, strikes, _ in played) > 10 * BATCH, "the faults are too few to test anything"
    assert sum(broken for _, _, _, broken in played) > BATCH, "no exchange broke off: S6 was not tried"


def test_every_fault_is_drawn_by_some_seed() -> None:
    count = max(SEEDS, 20)
    mixes = [draw_mix(seed, MINUTES) for seed in range(count)]
    for name in ("loss", "duplicate", "reorder", "replay", "garbage", "slow", "offset_s", "drift"):
        assert sum(getattr(mix, name) > 0 for mix in mixes) >= count // 6, name
    drawn = {strike for mix in mixes for strike in mix.strikes}
    assert len(drawn) == 13 and sum(mix.gentle for mix in mixes) >= count // 6


def test_one_seed_gives_one_history_in_any_process() -> None:
    assert len(digests("gossip", "--seed", "7", "--minutes", "8")) == 1


def found(make: Callable[[int], GossipWorld]) -> str:
    """The first violation that the control's seeds find; nothing if they find none."""
    for seed in range(CONTROL_SEEDS):
        try:
            make(seed).run()
        except Violation as violation:
            return str(violation)
    return ""


def harsh(seed: int, **changes: Any) -> GossipWorld:
    """Ten virtual minutes of the faults that need refutations, epochs and knocks."""
    mix = Mix(
        loss=0.2,
        replay=0.02,
        strikes=("crash", "wipe", "stall", "suspend", "partition", "revoke", "power cut"),
        strike_every_s=15.0,
        until_s=300.0,
    )
    return GossipWorld(seed, nodes=12, mix=msgspec.structs.replace(mix, **changes), minutes=10)


class TestNegativeControls:
    """Each rule taken away must be missed: a checker that cannot fail checks nothing."""

    def test_as_it_is_nothing_is_found(self) -> None:
        for seed in range(5):
            harsh(seed).run()

    def test_without_refutation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def silent(self: Swim, evidence: Any, now: float) -> list[Effect]:
            return []

        monkeypatch.setattr(Swim, "_about_me", silent)
        assert found(harsh).startswith("M4")

    def test_a_refutation_that_does_not_advance_the_incarnation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Swim._announce

        def stuck(self: Swim, now: float) -> None:
            self._incarnation = 0
            real(self, now)

        monkeypatch.setattr(Swim, "_announce", stuck)
        assert found(harsh).startswith("M4")

    def test_accusers_that_speak_for_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Swim._accuse

        def inventive(self: Swim, member: Any, now: float, refused: bool) -> list[Effect]:
            return real(self, msgspec.structs.replace(member, incarnation=member.incarnation + 1), now, refused)

        monkeypatch.setattr(Swim, "_accuse", inventive)
        assert found(harsh).startswith("M1")

    def test_without_knocking_at_the_dead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Swim.on_timer

        def deaf(self: Swim, name: str, token: int, now: float) -> list[Effect]:
            return [] if name == "knock" else real(self, name, token, now)

        monkeypatch.setattr(Swim, "on_timer", deaf)
        # Nobody who has company looks for strangers either: that would be a second way back.
        searched = Search.next
        monkeypatch.setattr(
            Search, "next", lambda self, present: searched(self, present) if len(present) <= 1 else ([], 15.0)
        )
        assert found(lambda seed: harsh(seed, strikes=("partition",), strike_every_s=60.0)).startswith("M4")

    def test_an_epoch_that_is_not_persisted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(GossipWorld, "first_epoch", lambda self, epoch: 1)
        assert found(lambda seed: harsh(seed, strikes=("crash",), strike_every_s=4.0))

    def test_without_lifeguard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Health, "worse", lambda self, by=1: None)
        monkeypatch.setattr(Swim, "on_lag", lambda self, late_s, now: [])
        monkeypatch.setattr(Suspicion, "_by_confirmations", property(lambda self: self.started + self._shortest / 4))

        def stalls(seed: int) -> GossipWorld:
            return GossipWorld(
                seed,
                nodes=20,
                mix=Mix(loss=0.25, strikes=("stall",), strike_every_s=5.0, gentle=True, until_s=600.0),
                minutes=12,
            )

        assert found(stalls).startswith(("M12", "M13"))

    def test_beliefs_that_go_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MemberTable, "apply", _apply_anything)
        assert found(harsh).startswith(("M2", "M3", "M10"))

    def test_packets_that_do_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def large(self: Core, to: bytes, packet: Any) -> bytes:
            from membership.wire import encode

            return self._seals.seal_to(to, encode(packet) + bytes(1200))

        monkeypatch.setattr(Core, "seal_packet", large)
        assert found(harsh).startswith("M9")

    def test_signatures_that_are_not_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sim import paper

        def trusting(self: Any, data: bytes, resolve: Any) -> tuple[bytes, bytes]:
            senders = resolve(data[1:9])
            if not senders:
                raise paper.UnknownSender("not known")
            return senders[0], data[paper.ADDRESSED_OVERHEAD :]

        monkeypatch.setattr(paper.PaperSeals, "open_addressed", trusting)
        assert "M10" in found(lambda seed: harsh(seed, strikes=("crash", "stall"), strike_every_s=5.0))

    def test_deadlines_that_are_put_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Suspicion.confirm

        def later(self: Suspicion, accuser: bytes, now: float = 0.0, refused: bool = False) -> bool:
            self._longest += 1.0
            self._shortest += 40.0
            return real(self, accuser, now, refused)

        monkeypatch.setattr(Suspicion, "confirm", later)
        monkeypatch.setattr(Suspicion, "bounds", property(lambda self: (self.started, self.started + 31.3)))
        assert found(lambda seed: harsh(seed, strikes=("power cut",), strike_every_s=5.0)).startswith("M13")

    def test_sections_that_anybody_may_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = RecordTable._put

        def altered(self: RecordTable, record: Record) -> None:
            real(self, msgspec.structs.replace(record, sealed=record.sealed + b"!"))

        monkeypatch.setattr(RecordTable, "_put", altered)
        assert found(harsh).startswith("S1")

    def test_sections_that_go_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Record, "order", property(lambda self: (self.epoch, -self.version)))
        assert found(harsh).startswith(("S1", "S2"))

    def test_roots_that_leave_something_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RecordTable, "root", property(lambda self: 0))
        assert found(harsh).startswith("S3")

    def test_what_has_expired_is_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RecordTable, "expire", lambda self, now_unix: [])
        assert found(harsh).startswith("S4")

    def test_the_revoked_are_heard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from membership.trust import TrustStore

        monkeypatch.setattr(Core, "_expel", lambda self, node: None)
        monkeypatch.setattr(TrustStore, "standing", lambda self, node, now_unix: self._members.get(node))
        assert found(lambda seed: harsh(seed, strikes=("revoke", "crash"))).startswith(("S5", "M4"))


def _apply_anything(self: MemberTable, evidence: Any, sealed: bytes, now: float) -> Any:
    """Believes whatever it hears last."""
    before = self._members.get(evidence.node)
    after = self._merged(None, evidence, sealed, now)
    if after is None or after == before:
        return None
    self._members[evidence.node] = after
    if before is None or not before.present:
        self._place[after.node] = len(self._present)
        self._present.append(after.node)
    self.root ^= _fingerprint(before) ^ _fingerprint(after)
    return (before, after)


def test_the_same_rules_hold_with_the_timings_for_one_machine() -> None:
    for seed in range(3):
        GossipWorld(1000 + seed, nodes=8, minutes=8, config=SwimConfig.local()).run()

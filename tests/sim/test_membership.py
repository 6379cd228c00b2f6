"""Membership under all faults for many seeds, and negative controls for every rule.

`MESH_SIM_SEEDS=200 make test` runs more seeds. A failure prints its seed and the command that replays it.
"""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from membership.bootstrap import Bootstrap
from membership.config import SwimConfig
from membership.core import Core
from membership.effects import Effect
from membership.member import MemberTable, _fingerprint
from membership.probe import LocalHealth
from membership.records import Record, RecordTable, decode_statements
from membership.suspicion import Suspicion
from membership.swim import Swim
from membership.trust import admit_node
from membership.wire import Dead
from sim.protocol.fakes import UNIX
from sim.protocol.faults import FaultPlan, draw_faults
from sim.protocol.membership import MembershipWorld, Violation
from sim.protocol.membership_checkers import all_checkers
from tests.sim.replay import digests

SEEDS = int(os.environ.get("MESH_SIM_SEEDS", "12"))
BATCH = 3  # seeds of one test
LATER = () if "MESH_SIM_SEEDS" in os.environ else pytest.mark.slow
NODES, MINUTES = 20, 30.0
CONTROL_SEEDS = 200  # within which a broken rule must be detected


def play(seed: int, minutes: float) -> tuple[int, str, int, int]:
    """Return (seed, violation, incidents, broken exchanges)."""
    world = MembershipWorld(seed, nodes=NODES, minutes=minutes, checkers=all_checkers())
    try:
        world.run()
    except Violation as violation:
        return seed, str(violation), world.incidents, world.broken_exchanges
    return seed, "", world.incidents, world.broken_exchanges


@pytest.mark.parametrize(
    ("first", "minutes"), [(0, 10.0), *(pytest.param(seed, MINUTES, marks=LATER) for seed in range(0, SEEDS, BATCH))]
)
def test_membership_invariants_hold_under_all_faults(first: int, minutes: float) -> None:
    played = [play(seed, minutes) for seed in range(first, first + BATCH)]
    violations = [text for _, text, _, _ in played if text]
    assert not violations, "\n".join(violations)
    incidents = sum(row[2] for row in played)
    assert incidents > BATCH * minutes / 3, "the faults are too few to test anything"
    assert sum(broken for _, _, _, broken in played) > BATCH, "no exchange broke off: S6 was not tried"


def test_every_fault_is_drawn_by_some_seed() -> None:
    count = max(SEEDS, 20)
    plans = [draw_faults(seed, MINUTES) for seed in range(count)]
    for name in ("loss", "duplicate", "reorder", "replay", "garbage", "slow", "offset_s", "drift"):
        assert sum(getattr(faults, name) > 0 for faults in plans) >= count // 6, name
    drawn = {incident for faults in plans for incident in faults.incidents}
    assert len(drawn) == 15 and sum(faults.gentle for faults in plans) >= count // 6


def test_one_seed_gives_one_digest_in_any_process() -> None:
    assert len(digests("membership", "--seed", "7", "--minutes", "4")) == 1


def found(make: Callable[[int], MembershipWorld]) -> str:
    """Return the first violation among the control's seeds, or ""."""
    for seed in range(CONTROL_SEEDS):
        try:
            make(seed).run()
        except Violation as violation:
            return str(violation)
    return ""


def harsh(seed: int, **changes: Any) -> MembershipWorld:
    """Return ten virtual minutes with faults that need refutations, epochs and reconciliation with the dead."""
    faults = FaultPlan(
        loss=0.2,
        replay=0.02,
        incidents=("crash", "wipe", "stall", "suspend", "partition", "revoke", "power cut", "false accusation"),
        incident_every_s=15.0,
        until_s=300.0,
    )
    return MembershipWorld(
        seed, nodes=12, faults=msgspec.structs.replace(faults, **changes), minutes=10, checkers=all_checkers()
    )


class TestNegativeControls:
    """Each test removes one rule of the protocol, which a checker must detect."""

    def test_unchanged_protocol_has_no_violation(self) -> None:
        for seed in range(2):
            harsh(seed).run()

    def test_missing_refutation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def silent(self: Swim, evidence: Any, now: float) -> list[Effect]:
            return []

        monkeypatch.setattr(Swim, "_on_own_evidence", silent)
        assert found(harsh).startswith("M4")

    def test_refutation_without_a_new_incarnation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Swim._announce

        def stuck(self: Swim, now: float) -> None:
            self._incarnation = 0
            real(self, now)

        monkeypatch.setattr(Swim, "_announce", stuck)
        assert found(harsh).startswith("M4")

    def test_accusations_of_what_nobody_announced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            Swim, "_on_accusation", lambda self, author, word, sealed, now: self._apply(author, word, sealed, now)
        )
        assert found(harsh).startswith("M1")

    def test_verdicts_of_others_that_are_believed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Swim._on_accusation

        def trusting(self: Swim, author: bytes, word: Any, sealed: bytes, now: float) -> list[Effect]:
            if isinstance(word, Dead):
                return self._apply(author, word, sealed, now)
            return real(self, author, word, sealed, now)

        monkeypatch.setattr(Swim, "_on_accusation", trusting)
        assert found(lambda seed: harsh(seed, incidents=("false accusation",), gentle=True)).startswith("M12")

    @pytest.mark.slow
    def test_missing_reconciliation_with_the_dead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Swim.on_timer

        def deaf(self: Swim, name: str, token: int, now: float) -> list[Effect]:
            return [] if name == "reconcile-dead" else real(self, name, token, now)

        monkeypatch.setattr(Swim, "on_timer", deaf)
        # Discovery is off for nodes that have peers, because it would heal the partition too.
        searched = Bootstrap.next
        monkeypatch.setattr(
            Bootstrap, "next", lambda self, present: searched(self, present) if len(present) <= 1 else ([], 15.0)
        )
        assert found(lambda seed: harsh(seed, incidents=("partition",), incident_every_s=60.0)).startswith("M4")

    @pytest.mark.slow
    def test_epoch_that_is_not_persisted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MembershipWorld, "epoch_to_use", lambda self, epoch: 1)
        assert found(lambda seed: harsh(seed, incidents=("crash",), incident_every_s=4.0)).startswith("S1")

    @pytest.mark.slow
    def test_missing_lifeguard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LocalHealth, "degrade", lambda self, by=1: None)
        monkeypatch.setattr(Swim, "on_lag", lambda self, late_s, now: [])
        monkeypatch.setattr(Suspicion, "_confirmed_deadline", property(lambda self: self.started + self._shortest / 4))

        def stalls(seed: int) -> MembershipWorld:
            return MembershipWorld(
                seed,
                nodes=20,
                faults=FaultPlan(loss=0.25, incidents=("stall",), incident_every_s=5.0, gentle=True, until_s=600.0),
                minutes=12,
                checkers=all_checkers(),
            )

        assert found(stalls).startswith(("M12", "M13"))

    @pytest.mark.slow
    def test_member_table_that_accepts_older_evidence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MemberTable, "apply", _apply_anything)
        assert found(harsh).startswith(("M2", "M3", "M10"))

    def test_packets_that_are_too_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def large(self: Core, to: bytes, packet: Any) -> bytes:
            from membership.wire import encode

            return self._sealer.seal_to(to, encode(packet) + bytes(1200))

        monkeypatch.setattr(Core, "seal_packet", large)
        assert found(harsh).startswith("M9")

    @pytest.mark.slow
    def test_signatures_that_are_not_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sim.protocol import fakes

        def trusting(self: Any, data: bytes, resolve: Any) -> tuple[bytes, bytes]:
            senders = resolve(data[1:9])
            if not senders:
                raise fakes.UnknownSender("not known")
            return senders[0], data[fakes.ADDRESSED_OVERHEAD :]

        monkeypatch.setattr(fakes.ChecksumSealer, "open_addressed", trusting)
        assert "M10" in found(lambda seed: harsh(seed, incidents=("crash", "stall"), incident_every_s=5.0))

    def test_suspicion_deadlines_that_move_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Suspicion.confirm

        def later(self: Suspicion, accuser: bytes, now: float = 0.0, refused: bool = False) -> bool:
            self._longest += 1.0
            self._shortest += 40.0
            return real(self, accuser, now, refused)

        monkeypatch.setattr(Suspicion, "confirm", later)
        monkeypatch.setattr(Suspicion, "bounds", property(lambda self: (self.started, self.started + 31.3)))
        assert found(lambda seed: harsh(seed, incidents=("power cut",), incident_every_s=5.0)).startswith("M13")

    def test_records_altered_by_replicas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = RecordTable._put

        def altered(self: RecordTable, record: Record) -> None:
            real(self, msgspec.structs.replace(record, sealed=record.sealed + b"!"))

        monkeypatch.setattr(RecordTable, "_put", altered)
        assert found(harsh).startswith("S1")

    def test_records_ordered_by_falling_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Record, "order", property(lambda self: (self.epoch, -self.version)))
        assert found(harsh).startswith(("S1", "S2"))

    def test_roots_that_leave_records_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RecordTable, "root", property(lambda self: 0))
        assert found(harsh).startswith("S3")

    def test_records_that_never_expire(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RecordTable, "expire", lambda self, now_unix: [])
        assert found(harsh).startswith("S4")

    @pytest.mark.slow
    def test_revoked_members_that_are_still_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from membership.trust import TrustStore

        monkeypatch.setattr(Core, "_expel", lambda self, node: None)
        monkeypatch.setattr(TrustStore, "credentials", lambda self, node, now_unix: self._members.get(node))
        assert found(lambda seed: harsh(seed, incidents=("revoke", "crash"))).startswith(("S5", "M4"))

    def test_renewals_that_do_not_name_whom_a_member_came_in_through(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forgetful(*told: Any, through: tuple[bytes, ...] = ()) -> bytes:
            return admit_node(*told)

        monkeypatch.setattr("membership.trust.admit_node", forgetful)
        assert found(lambda seed: harsh(seed, incidents=("revoke", "renew"))).startswith("S7")

    def test_revocations_judged_by_their_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = RecordTable._apply_statements

        def late(self: RecordTable, body: bytes) -> bool:
            opened = [self._trust._open_statement(sealed)[2] for sealed in decode_statements(body)]
            return all(one.revoked_unix < UNIX + 86_400 for one in opened) and real(self, body)

        monkeypatch.setattr(RecordTable, "_apply_statements", late)
        assert found(lambda seed: harsh(seed, incidents=("revoke", "crash"), wrong_clock_s=2 * 86_400.0)).startswith(
            "M4"
        )


def _apply_anything(self: MemberTable, evidence: Any, sealed: bytes, now: float) -> Any:
    """Apply any evidence, even if it is older."""
    before = self._members.get(evidence.node)
    after = self._merged(None, evidence, sealed, now)
    if after is None or after == before:
        return None
    self._members[evidence.node] = after
    if before is None or not before.present:
        self._position[after.node] = len(self._present)
        self._present.append(after.node)
    self.root ^= _fingerprint(before) ^ _fingerprint(after)
    return (before, after)


def test_membership_invariants_hold_with_local_timings() -> None:
    for seed in range(3):
        MembershipWorld(1000 + seed, nodes=8, minutes=8, config=SwimConfig.local(), checkers=all_checkers()).run()

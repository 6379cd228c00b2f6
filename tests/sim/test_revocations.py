"""Nodes that are revoked under running jobs in the simulated world, and negative controls for what a revocation ends."""

import math

import msgspec
import pytest

from membership.identity import NodeId
from membership.trust import Credentials, TrustStore
from mesh.consensus.effects import RunUntil
from mesh.consensus.runner import Runner
from mesh.jobs.authority import Authority
from sim.protocol.faults import FaultPlan, WorkPlan
from sim.protocol.jobs import JobsWorld
from sim.protocol.revocation_checkers import RevokedNodes
from tests.sim.test_jobs import checked, found

REVOKING = FaultPlan(incidents=("revoke", "notice", "crash"), incident_every_s=8.0, news_every_s=0.0, until_s=300.0)


def revoking(seed: int) -> JobsWorld:
    return JobsWorld(seed, faults=REVOKING, work=WorkPlan(), job_checkers=[RevokedNodes()])


@pytest.mark.long
def test_jobs_go_on_without_nodes_that_are_revoked() -> None:
    worlds = [checked(seed, faults=REVOKING, work=WorkPlan()) for seed in range(5)]
    revoked, submitted = 0, 0
    for world in worlds:
        world.run()
        revoked += len(world.revocations)
        submitted += sum(world.specs[job].submitter in world.revocations for job in world.accepted)
    assert revoked > 10 and submitted > 0


@pytest.mark.slow
class TestNegativeControls:
    """Each test removes one rule, which the checker must detect."""

    def test_nodes_that_go_by_certificates_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def trusting(self: TrustStore, node_id: NodeId, now_unix: float) -> Credentials | None:
            return self._members.get(node_id)

        monkeypatch.setattr(TrustStore, "credentials", trusting)
        assert "which it knows to be revoked" in found(revoking)

    def test_nodes_that_take_any_signed_description(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Authority, "open_spec", Authority.read_spec)
        assert "a job whose submitter it knows to be revoked" in found(revoking)

    def test_guests_of_revoked_nodes_that_nothing_stops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Runner, "_allow", lambda self: RunUntil(math.inf))
        monkeypatch.setattr("sim.protocol.jobs.STEPS", (200, 250))
        alone = msgspec.structs.replace(REVOKING, incidents=("revoke",))
        checkers = [RevokedNodes()]
        assert "which its witnesses know to be revoked" in found(
            lambda seed: JobsWorld(seed, faults=alone, work=WorkPlan(), job_checkers=checkers)
        )

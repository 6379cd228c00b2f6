"""Departure planner: chooses a destination for every guest of this node that has notice, for all of them at once.

The shell around `destinations.assignment`: it gathers what this node knows and keeps each choice until the guest has gone.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptstore.bandwidth import Bandwidth, PathEstimate
from membership.identity import short_id
from membership.node import MembershipNode
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.consensus.participant import Participant
from mesh.consensus.reports import RunnerEvent, VacateWanted
from mesh.consensus.view import Instant
from mesh.jobs.attempt import Attempt
from mesh.jobs.destinations import Guest, assignment
from mesh.jobs.mesh_view import MeshView, instant
from mesh.jobs.standby import StandbySync
from placement.allocation import gpu_percent
from placement.destination import HORIZON_S, Destination, Plan, describe, worth

log = logging.getLogger(__name__)


class DeparturePlanner:
    """`policy` gives a job's replica policy; `note` writes an event of a job."""

    def __init__(
        self,
        participant: Participant,
        attempts: Mapping[bytes, Attempt],
        bandwidth: Bandwidth,
        standby_sync: StandbySync,
        mesh_view: MeshView,
        membership: MembershipNode,
        policy: Callable[[bytes], ReplicaPolicy],
        note: Callable[..., Any],
    ) -> None:
        self._participant, self._attempts, self._bandwidth = participant, attempts, bandwidth
        self._standby_sync, self._mesh_view, self._membership = standby_sync, mesh_view, membership
        self._policy, self._note = policy, note
        self._chosen: dict[bytes, tuple[int, Destination]] = {}  # with the term of the attempt it was chosen for

    def settle(self, jobs: Sequence[bytes], window_s: float) -> None:
        """Choose a destination for each job that has none yet and must be gone within `window_s`; inform the users.

        A failure here is logged and delays no notice: the jobs then go to their standbys.
        """
        try:
            self._settle(jobs, window_s)
        except Exception:
            log.exception("no plan of where %d jobs go; each goes to its standby", len(jobs))

    def _settle(self, jobs: Sequence[bytes], window_s: float) -> None:
        self._chosen = {job: known for job, known in self._chosen.items() if self.of(job) is not None}
        guests, found = self.plan([job for job in jobs if job not in self._chosen], window_s)
        for guest, destination in zip(guests, found.destinations, strict=True):
            job = destination.job
            self._chosen[job] = self._participant.runners[job].term, destination
            self._note(job, "state", self.describe(guest, destination, window_s), new="destination")

    def of(self, job: bytes) -> Destination | None:
        """Return what was chosen for the attempt that runs here."""
        runner = self._participant.runners.get(job)
        term, destination = self._chosen.get(job, (None, None))
        return destination if runner is not None and runner.term == term else None

    def notices(self, jobs: Sequence[bytes], grace_s: float, reason: str) -> dict[bytes, RunnerEvent]:
        """Return the notice for each job; it names the chosen destination."""
        self.settle(jobs, grace_s)
        found = {job: self.of(job) for job in jobs}
        return {job: VacateWanted(grace_s, reason, None if to is None else to.place) for job, to in found.items()}

    def plan(self, jobs: Sequence[bytes], window_s: float) -> tuple[list[Guest], Plan]:
        """Plan destinations without choosing them. Gangs and jobs that have not started are left out."""
        view, at = self._mesh_view.look(), instant()
        guests = [guest for job in jobs if (guest := self._guest(job, at)) is not None]
        runners = self._participant.runners
        taken = [
            (found.place, runners[job].next_placement.request(runners[job].record, at))
            for job in self._chosen
            if job not in jobs and (found := self.of(job)) is not None and found.place is not None
        ]
        return guests, assignment(guests, view, self.path, window_s, taken)

    def slowest_first(self, jobs: Iterable[bytes]) -> list[bytes]:
        """Sort jobs by the time in which their state reaches their standby, longest first: they gain most from a copy."""
        return sorted(jobs, key=lambda job: (-self._transfer_s(job), job))

    def _transfer_s(self, job: bytes) -> float:
        runner, attempt = self._participant.runners.get(job), self._attempts.get(job)
        if runner is None or attempt is None or runner.next_placement.standby is None:
            return 0.0
        return (attempt.writer.state_bytes or 0) / self.path(runner.next_placement.standby).bps

    def path(self, node: bytes, neighbours: Sequence[bytes] = ()) -> PathEstimate:
        return self._bandwidth.path(node, neighbours, time.monotonic())

    def order(self, job: bytes, fallback: Sequence[bytes], prefer: bytes | None) -> list[bytes]:
        """Put the chosen destination, then `prefer`, before the other nodes that may hold the job's checkpoints."""
        found = self.of(job)
        first = [node for node in (found.to if found is not None else None, prefer) if node is not None]
        return sorted(fallback, key=lambda node: first.index(node) if node in first else len(first))

    def describe(self, guest: Guest, destination: Destination, window_s: float) -> str:
        """Return the text of a destination for the job's user."""
        nicks = {member.node_id: member.nick for member in self._membership.members()}
        if guest.state is None and destination.place is not None:
            place = nicks.get(destination.place) or short_id(destination.place)
            return f"continues on {place}; it has saved nothing yet, so the size of its state is unknown"
        return describe(destination, lambda node: nicks.get(node) or short_id(node), window_s)

    def _guest(self, job: bytes, at: Instant) -> Guest | None:
        runner, attempt = self._participant.runners.get(job), self._attempts.get(job)
        if runner is None or attempt is None or runner.spec.most_nodes > 1:
            return None
        spec, commit = runner.spec, runner.record.commit
        difference, save_s = attempt.writer.last_save or (None, 0.0)
        warm = self._standby_sync.holders(job, commit)
        return Guest(
            spec=spec,
            request=runner.next_placement.request(runner.record, at),
            value=worth(attempt.lost().seconds, gpu_percent(spec.gpus, spec.gpu_share), spec.priority),
            ready_s=save_s,
            difference=attempt.writer.state_bytes if difference is None else difference,
            state=attempt.writer.state_bytes,
            holders=frozenset(commit.holders if commit is not None else ()) | warm,
            horizon_s=attempt.save_schedule.next.interval_s if attempt.save_schedule.next is not None else HORIZON_S,
            keepers=self._policy(job).fallback,
            standby=runner.next_placement.standby,
        )

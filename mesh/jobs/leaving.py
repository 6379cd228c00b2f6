"""Gives this node's guests their destinations when they have notice: gathers what is known here, plans for all of them at once
(`destinations.py`), and keeps what was chosen until they have gone."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ckptstore.bandwidth import Path
from membership.identity import short_id
from mesh.jobs.destinations import Guest, assignment
from mesh.jobs.reports import RunnerEvent, VacateWanted
from mesh.jobs.view import Instant
from placement.allotment import percent
from placement.destination import HORIZON_S, Assignment, Destination, told, worth

if TYPE_CHECKING:
    from mesh.jobs.service import JobService

log = logging.getLogger(__name__)


class Leaving:
    def __init__(self, jobs: "JobService", instant: Callable[[], Instant]) -> None:
        self._jobs, self._instant = jobs, instant
        self._chosen: dict[bytes, tuple[int, Destination]] = {}  # and of which term

    async def restore(self) -> None:
        """Recall the paths that were measured before this daemon began, and keep what is measured from now on."""
        bandwidth, now = self._jobs.courier.bandwidth, time.monotonic()
        for peer, learnt, ago_s in await self._jobs.journal.paths():
            bandwidth.recall(peer, learnt, now - ago_s)
        bandwidth.keep = self._jobs.journal.note_path

    def settle(self, jobs: Sequence[bytes], window_s: float) -> None:
        """These have to be gone in so long: choose where each goes, unless that is settled, and tell their users.

        Whatever fails here, they get their notice: then their heirs have to do.
        """
        try:
            self._settle(jobs, window_s)
        except Exception:
            log.exception("no plan of where %d jobs go; each goes to its heir", len(jobs))

    def _settle(self, jobs: Sequence[bytes], window_s: float) -> None:
        runners = self._jobs.participant.runners
        self._chosen = {job: known for job, known in self._chosen.items() if self.of(job) is not None}
        guests, found = self.plan([job for job in jobs if job not in self._chosen], window_s)
        for guest, destination in zip(guests, found.destinations, strict=True):
            job = destination.job
            self._chosen[job] = runners[job].term, destination
            self._jobs.note(job, "state", self.words(guest, destination, window_s), new="destination")

    def of(self, job: bytes) -> Destination | None:
        """What was chosen for the attempt that runs here."""
        runner = self._jobs.participant.runners.get(job)
        term, destination = self._chosen.get(job, (None, None))
        return destination if runner is not None and runner.term == term else None

    def notices(self, jobs: Sequence[bytes], grace_s: float, reason: str) -> dict[bytes, RunnerEvent]:
        """What each is told: where it should go, too."""
        self.settle(jobs, grace_s)
        found = {job: self.of(job) for job in jobs}
        return {job: VacateWanted(grace_s, reason, None if to is None else to.place) for job, to in found.items()}

    def plan(self, jobs: Sequence[bytes], window_s: float) -> tuple[list[Guest], Assignment]:
        """Where they would go. Gangs, and who has not begun, are left out."""
        view = self._jobs.outlook.look()
        at = self._instant()
        guests = [guest for job in jobs if (guest := self._guest(job, at)) is not None]
        runners = self._jobs.participant.runners
        taken = [
            (found.place, runners[job].onward.request(runners[job].ledger, at))
            for job in self._chosen
            if job not in jobs and (found := self.of(job)) is not None and found.place is not None
        ]
        return guests, assignment(guests, view, self.path, window_s, taken)

    def slowest_first(self, jobs: Iterable[bytes]) -> list[bytes]:
        """Those first whose whole state would take longest to their heirs: they need most to be brought there beforehand."""
        return sorted(jobs, key=lambda job: (-self._whole_s(job), job))

    def _whole_s(self, job: bytes) -> float:
        runner, attempt = self._jobs.participant.runners.get(job), self._jobs.attempts.get(job)
        if runner is None or attempt is None or runner.onward.heir is None:
            return 0.0
        return (attempt.deposits.state_bytes or 0) / self.path(runner.onward.heir).bps

    def path(self, node: bytes, neighbours: Sequence[bytes] = ()) -> Path:
        return self._jobs.courier.bandwidth.path(node, neighbours, time.monotonic())

    def order(self, job: bytes, fallback: Sequence[bytes], prefer: bytes | None) -> list[bytes]:
        """Who holds its checkpoints: once it has notice, who can take its state soonest, and where it goes, before the others."""
        found = self.of(job)
        first = [node for node in (found.to if found is not None else None, prefer) if node is not None]
        return sorted(fallback, key=lambda node: first.index(node) if node in first else len(first))

    def words(self, guest: Guest, destination: Destination, window_s: float) -> str:
        """For its user."""
        nicks = {member.node_id: member.nick for member in self._jobs.membership.members()}
        if guest.state is None and destination.place is not None:
            place = nicks.get(destination.place) or short_id(destination.place)
            return f"goes on at {place}; it has saved nothing yet, so nobody knows how much it has to send"
        return told(destination, lambda node: nicks.get(node) or short_id(node), window_s)

    def _guest(self, job: bytes, at: Instant) -> Guest | None:
        runner, attempt = self._jobs.participant.runners.get(job), self._jobs.attempts.get(job)
        if runner is None or attempt is None or runner.spec.most_nodes > 1:
            return None
        spec, commit = runner.spec, runner.ledger.commit
        difference, save_s = attempt.deposits.last_save or (None, 0.0)
        warm = self._jobs.warming.holders(job, commit)
        return Guest(
            spec=spec,
            request=runner.onward.request(runner.ledger, at),
            value=worth(attempt.lost().seconds, percent(spec.gpus, spec.gpu_share), spec.priority),
            ready_s=save_s,
            difference=attempt.deposits.state_bytes if difference is None else difference,
            state=attempt.deposits.state_bytes,
            holders=frozenset(commit.holders if commit is not None else ()) | warm,
            horizon_s=attempt.cadence.next.interval_s if attempt.cadence.next is not None else HORIZON_S,
            keepers=self._jobs.custody(job).fallback,
            heir=runner.onward.heir,
        )

"""Submission retry: brings jobs to witnesses that do not answer yet, for this node's user and for other nodes.

The shell around `PendingSubmissions`. A submission is on disk before it is acknowledged, and is retried after a restart. Several
nodes may bring one job: a witness takes it in once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from membership.identity import NodeId, short_id
from membership.malformed import MALFORMED
from membership.node import MembershipNode
from mesh.consensus.participant import UNANSWERED
from mesh.consensus.submission_retry import (
    Around,
    Entrust,
    GiveUp,
    HeldSubmissions,
    PendingSubmission,
    PendingSubmissions,
    Try,
    line,
    pending_submission,
)
from mesh.jobs.mesh_view import instant
from mesh.jobs.service import JobService
from mesh.journal import Journal
from mesh.model.spec import JobSpec, SpecError, format_job
from mesh.rpc.client import PeerClient, PeerError
from mesh.util.task_set import TaskSet

SECTION, TTL_S, REPEAT_S = "submissions", 3600.0, 900.0
JOBS_PUBLISHED = 64
LOOK_S = 1.0
ASK_WITHIN_S = 3.0  # a peer answers after one fsync
AT_ONCE = 64

log = logging.getLogger(__name__)


class Refused(RuntimeError):
    """This node does not retry the job for another; the text names the reason."""


class SubmissionRetry:
    """`open_spec` checks a sealed spec; `note` writes an event of a job."""

    def __init__(
        self,
        me: NodeId,
        membership: MembershipNode,
        journal: Journal,
        jobs: JobService,
        peers: PeerClient,
        open_spec: Callable[[bytes, bytes], JobSpec],
        note: Callable[[bytes, str], object],
    ) -> None:
        self.pending = PendingSubmissions(me)
        self._me, self._membership, self._journal = me, membership, journal
        self._jobs, self._peers = jobs, peers
        self._open_spec, self._note = open_spec, note
        self._tasks, self._busy = TaskSet(log), set[tuple[str, bytes]]()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._published: tuple[HeldSubmissions, float] = (HeldSubmissions(0, ()), 0.0)
        self._leaving = False

    async def restore(self) -> None:
        for data in await self._journal.pending_submissions():
            with suppress(msgspec.MsgspecError):
                self.pending.keep(_decoder.decode(data))

    async def run(self) -> None:
        """Retry until cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            await self._tasks.close()

    # --- for this node's user

    async def submit(self, spec: JobSpec) -> tuple[bytes, str]:
        """Bring a job to its witnesses; return its id, and a text for its user if no majority has it yet."""
        job, sealed, problem = await self._jobs.submit(spec)
        if problem is None:
            return job, ""
        submission = await self._keep(pending_submission(job, sealed, spec))
        await self._entrust(submission, line(submission, self._me, self._around()))
        return job, self.describe(job) if problem == UNANSWERED else f"{problem}; it is submitted again for a day"

    def describe(self, job: bytes) -> str:
        """Describe which node retries the job, as far as this node knows; empty if its witnesses have it."""
        submission = self.pending.get(job)
        if submission is not None and submission.submitter == self._me:
            if not submission.keeper:
                return (
                    "no majority of its witnesses answers, and no other node keeps it for them; this node submits it "
                    "when they do, while it is up"
                )
            return f"no majority of its witnesses answers; {self._describe_keeper(submission)}, submits it when they do"
        keepers = [self._nick(node) for node, held in self.held_by_node().items() if job in held.jobs]
        return (
            f"no majority of its witnesses answers; {', '.join(sorted(keepers))} submits it when they do"
            if keepers
            else ""
        )

    def _describe_keeper(self, submission: PendingSubmission) -> str:
        zone = next((zone for zone in self._around().zones if zone.name == submission.zone), None)
        role = "coordinator" if zone is not None and zone.coordinator == submission.keeper else "next in line"
        return f"{self._nick(submission.keeper)}, {role} of zone {submission.zone or '(none)'}"

    async def withdraw(self, job: bytes) -> None:
        """Stop retrying a cancelled job, here and on its keeper."""
        submission = self.pending.get(job)
        if submission is None:
            return
        await self._drop(submission)
        if submission.keeper:
            await self._take_back(submission.keeper, job)

    # --- for others

    async def take(self, sender: NodeId, job: bytes, sealed: bytes) -> None:
        """Retry a job for its submitter; it is on disk when this returns. Refused or SpecError otherwise."""
        spec = self._open_spec(job, sealed)
        submission = pending_submission(job, sealed, spec)
        if self._leaving:
            raise Refused("this node leaves")
        if time.time() * 1000 >= submission.ends_unix_ms:
            raise Refused("it was submitted too long ago")
        if self.pending.get(job) is None:
            if self.pending.is_full_for(submission.user):
                raise Refused("this node keeps enough jobs for others, or for this user")
            await self._keep(submission)
            self._note(job, f"kept for {self._nick(sender)}, until a majority of its witnesses has it")

    async def release(self, sender: NodeId, job: bytes) -> None:
        """Stop retrying a job that its submitter withdraws."""
        submission = self.pending.get(job)
        if submission is not None and submission.submitter == sender:
            await self._drop(submission)

    def held_by_node(self) -> dict[NodeId, HeldSubmissions]:
        """Return what each node publishes about the jobs that it retries for others."""
        found = {}
        for record in self._membership.records(SECTION):
            with suppress(*MALFORMED):
                found[record.node] = _held_decoder.decode(record.body)
        return found

    async def leave(self, timeout_s: float) -> None:
        """Before leaving: hand the jobs of other nodes to further nodes."""
        self._leaving = True
        around = self._around()
        kept = self.pending.for_others
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(
                    *(self._ask(submission, line(submission, self._me, around)) for submission in kept)
                )

    # --- doing it

    def _around(self) -> Around:
        members = self._membership.members()
        reached = frozenset(m.node_id for m in members if m.state in {"alive", "suspect"})
        staying = reached - {m.node_id for m in members if m.draining}
        return Around(reached, staying, self._jobs.mesh_view.hierarchy().zones)

    def _look(self) -> None:
        self._publish()
        if not self.pending.any or self._leaving:
            return
        at = instant()
        for action in self.pending.due(self._around(), at.now, at.unix_ms):
            match action:
                case Try(submission=submission):
                    self._spawn("try", submission, self._bring(submission))
                case Entrust(submission=submission, line=whom):
                    self._spawn("entrust", submission, self._entrust(submission, whom))
                case GiveUp(submission=submission):
                    self._note(submission.job, "given up: no majority of its witnesses answered for a day")
                    self._spawn("give up", submission, self._drop(submission))

    async def _bring(self, submission: PendingSubmission) -> None:
        async with self._turns:
            try:
                spec = self._open_spec(submission.job, submission.spec)
            except SpecError as error:
                self._note(submission.job, f"not submitted any more: {error}")
                await self._drop(submission)
                return
            if await self._jobs.submit_sealed(submission.job, submission.spec, spec) is None:
                self._note(submission.job, "a majority of its witnesses has it now")
                await self._drop(submission)

    async def _entrust(self, submission: PendingSubmission, whom: Sequence[tuple[NodeId, str]]) -> None:
        async with self._turns:
            found = await self._ask(submission, whom)
        if found is None:
            return
        kept = self.pending.entrusted(submission.job, *found)
        if kept is None:  # withdrawn, or with its witnesses, while the keeper was asked
            await self._take_back(found[0], submission.job)
        else:
            await self._journal.save_pending_submission(kept.job, _encode(kept))
            self._note(kept.job, self.describe(kept.job))

    async def _ask(
        self, submission: PendingSubmission, whom: Sequence[tuple[NodeId, str]]
    ) -> tuple[NodeId, str] | None:
        """Ask these nodes in turn to retry the job too; return the first that does."""
        for node, zone in whom:
            try:
                await self._peers.call(node, "PUT", _path(submission.job), submission.spec, timeout_s=ASK_WITHIN_S)
            except PeerError as error:
                log.info("%s does not keep job %s: %s", short_id(node), format_job(submission.job)[:8], error)
                if error.status is None and submission.submitter == self._me:  # it may keep the job all the same
                    what = f"take back from {short_id(node)}"
                    self._spawn(what, submission, self._take_back(node, submission.job))
                continue
            return node, zone
        return None

    async def _take_back(self, node: NodeId, job: bytes) -> None:
        with suppress(PeerError):
            await self._peers.call(node, "DELETE", _path(job), timeout_s=ASK_WITHIN_S)

    async def _keep(self, submission: PendingSubmission) -> PendingSubmission:
        await self._journal.save_pending_submission(submission.job, _encode(submission))
        return self.pending.keep(submission)

    async def _drop(self, submission: PendingSubmission) -> None:
        self.pending.drop(submission.job)
        await self._journal.drop_pending_submission(submission.job)

    def _publish(self) -> None:
        held, now = self.pending.for_gossip(JOBS_PUBLISHED), time.monotonic()
        before, at = self._published
        if held == before and (not held.count or now - at < REPEAT_S):
            return
        self._published = (held, now)
        if held.count:
            self._membership.publish(SECTION, msgspec.msgpack.encode(held), TTL_S)
        else:
            self._membership.withdraw(SECTION)

    def _spawn(self, what: str, submission: PendingSubmission, work: Coroutine[Any, Any, None]) -> None:
        key = (what, submission.job)
        if key in self._busy:
            work.close()
            return
        self._busy.add(key)
        task = self._tasks.start(work, f"{what} {format_job(submission.job)[:8]}")
        task.add_done_callback(lambda done: self._busy.discard(key))

    def _nick(self, node: NodeId) -> str:
        nicks = {member.node_id: member.nick for member in self._membership.members()}
        return nicks.get(node, short_id(node))


_decoder = msgspec.msgpack.Decoder(PendingSubmission)
_held_decoder = msgspec.msgpack.Decoder(HeldSubmissions)


def _encode(submission: PendingSubmission) -> bytes:
    return msgspec.msgpack.encode(submission)


def _path(job: bytes) -> str:
    return f"/v1/submissions/{job.hex()}"

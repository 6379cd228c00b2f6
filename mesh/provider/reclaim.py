"""The reclaim stages: how guests are removed for the owner, and resumed when the owner is gone.

    suspend   the GPU gate closes and all processes stop; if the owner needs GPU memory and the driver can, it moves to the host
    notice    guests may run for the notice, to save, and their saves are shipped; a guest that ignores notices is killed at once
    pause     a guest that is still there is stopped again while its saves are shipped; it may resume if the owner leaves
    kill      by the runner, when notice and pause are over

Every check of the owner also checks every guest, so a guest that starts meanwhile, or a step that failed, is handled. An order to
leave is carried out even if its caller stops waiting (Ctrl-C of `mesh reclaim`). Each stage logs how long it took.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from mesh.checkpoints.loss_estimate import Lost
from mesh.consensus.contract import VACATED
from mesh.gpus.guard import NodeGuard
from mesh.jobs.attempt import Attempt
from mesh.jobs.service import JobService
from mesh.model.spec import format_job
from mesh.provider.presence import Stand
from mesh.util.boottime import boot_s
from mesh.util.task_set import TaskSet

STILL_LOOKS, STILL_LOOK_S = 1000, 0.005  # polls until a guest is stopped: milliseconds, in a container a little longer
AGAIN_S = 5.0  # before another try to resume a guest (own choice)
NOT_BACK = "its GPU memory could not be brought back for it to save"
LATE_S = 0.5  # after the end of its time, which its runner enforces to the second (own choice)
DEPARTED_KEPT = 256  # reports about attempts that were taken back (own choice)

log = logging.getLogger(__name__)


class Leave(msgspec.Struct, frozen=True):
    """An order to leave: seconds of notice and pause, the reason for users and the owner's own words (`why`).

    `by_hand`: the order holds even if the owner goes away meanwhile.
    """

    notice: float
    pause: float
    reason: str
    why: str
    by_hand: bool = False


class Gone(msgspec.Struct, frozen=True):
    """The departure of a guest that was taken back. `stages_ms`: milliseconds from the order to each stage."""

    user: str
    name: str
    reason: str
    lost: Lost
    stages_ms: dict[str, float]


class _Guest:
    """The state of one attempt in the reclaim stages."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.state: Literal["free", "still"] = "free"
        self.tried_memory = False
        self.leave: Leave | None = None
        self.noticed_at: float | None = None
        self.pressed = True  # the owner was present at the last check
        self.ordered_at = 0.0
        self.again_at = 0.0
        self.work: asyncio.Task[Any] | None = None
        self.sending: asyncio.Task[list[bytes]] | None = None  # carries out `leave`

    @property
    def busy(self) -> bool:
        return self.work is not None and not self.work.done()

    @property
    def unasked(self) -> bool:
        """Tell whether an order to leave has not reached the guest, and nobody is carrying it out."""
        return self.noticed_at is None and (self.sending is None or self.sending.done())


class Reclaimer:
    """Takes guests through the reclaim stages.

    `owner`, `nick`: named in messages to users. `departed`: the latest departures by job. `reclaimed`: called with the seconds
    from the order to each stage of an attempt that was taken back.
    """

    def __init__(
        self,
        jobs: JobService,
        guard: NodeGuard,
        owner: str,
        nick: str,
        reclaimed: Callable[[dict[str, float]], None] = lambda stages_s: None,
    ) -> None:
        self._jobs, self._guard = jobs, guard
        self._owner, self._nick = owner, nick
        self._guests: dict[bytes, _Guest] = {}
        self._tasks = TaskSet(log)
        self.departed: dict[bytes, Gone] = {}
        self._reclaimed = reclaimed

    # --- orders

    def look(self, stand_of: Callable[[tuple[str, ...]], Stand], leave: Callable[[Stand], Leave]) -> None:
        """Start the stage that every guest should be in now. Gates are closed before this returns; slower steps follow."""
        leaving: dict[Leave, list[bytes]] = {}
        for job, attempt in self._jobs.attempts.items():
            guest = self._guest(job, attempt)
            stand = stand_of(tuple(portion.uuid for portion in attempt.portions))
            if guest.leave is not None:
                guest.pressed = stand.pressing
                if guest.unasked:  # what carried the order out has failed
                    leaving.setdefault(guest.leave, []).append(job)
                self._see_to_leaving(job, guest, guest.leave)
            elif stand.level == "vacate":
                asked = leave(stand)
                guest.leave = asked
                leaving.setdefault(asked, []).append(job)
            elif stand.level == "suspend" and not _saves(attempt, leave(stand).notice):
                self._stop(job, guest, stand.why, "gpu" in stand.causes, "suspended")
            else:
                self._let_go(job, guest)
        for asked, jobs in leaving.items():
            names = ", ".join(format_job(job)[:8] for job in jobs)
            task = self._tasks.start(self.leave(jobs, asked), f"leave {names}")
            for job in jobs:
                self._guests[job].sending = task

    async def leave(self, jobs: Sequence[bytes], leave: Leave) -> list[bytes]:
        """Ask these jobs to leave, with one plan for all destinations, and wait until they have left or were killed."""
        self._jobs.departure_planner.settle(jobs, leave.notice + leave.pause)
        tasks = {job: self._tasks.start(self._leave(job, leave), f"leave {format_job(job)[:8]}") for job in jobs}
        for job, task in tasks.items():
            if job in self._jobs.attempts:
                guest = self._guest(job, self._jobs.attempts[job])
                guest.leave, guest.sending = leave, task
        left = await asyncio.gather(*(asyncio.shield(task) for task in tasks.values()))
        return [job for some in left for job in some]

    async def _leave(self, job: bytes, leave: Leave) -> list[bytes]:
        attempt, left_s = self._jobs.attempts.get(job), leave.notice
        if attempt is not None:
            guest = self._guest(job, attempt)
            if guest.noticed_at is None:  # else it is leaving already, in the time that it was given
                self.departed.pop(job, None)
                guest.ordered_at = guest.ordered_at or boot_s()
                ends_at = guest.ordered_at + leave.notice
                back = await self._bring_back(job, guest, max(0.0, ends_at - boot_s()))
                left_s = max(0.0, round(ends_at - boot_s(), 1))
                if not back:
                    return await self._jobs.kill(f"{leave.reason}; {NOT_BACK}", [job])
                attempt.reserve_s, guest.noticed_at = leave.pause, boot_s()
            loop = asyncio.get_running_loop()
            loop.call_later(left_s, self._see_to_leaving, job, guest, leave)
            loop.call_later(left_s + leave.pause + LATE_S, self._see_that_it_left, job, guest, leave)
        return await self._jobs.vacate(left_s + leave.pause, leave.reason, [job])

    async def kill(self, jobs: Sequence[bytes] | None, reason: str, why: str) -> list[bytes]:
        """Kill these jobs, or all, at once."""
        killing = self._tasks.start(self._jobs.kill(reason, jobs), f"kill: {reason}")
        for job, attempt in self._jobs.attempts.items():
            if jobs is None or job in jobs:
                guest = self._guest(job, attempt)
                self.departed.pop(job, None)
                guest.leave = guest.leave or Leave(0.0, 0.0, reason, why, by_hand=True)
                guest.ordered_at = guest.ordered_at or boot_s()
                guest.sending = killing
        return await asyncio.shield(killing)

    async def close(self) -> None:
        await self._tasks.close()

    # --- the stages

    def _see_to_leaving(self, job: bytes, guest: _Guest, leave: Leave) -> None:
        """Enter the pause stage: after its notice a guest is stopped for as long as the owner is present."""
        if guest.noticed_at is None or leave.pause <= 0 or "exited" in guest.attempt.stages:
            return
        if self._guests.get(job) is not guest or boot_s() < guest.ordered_at + leave.notice:
            return
        if leave.by_hand or guest.pressed:
            self._stop(job, guest, leave.reason, memory=True, stage="paused")
        else:
            self._let_go(job, guest)

    def _see_that_it_left(self, job: bytes, guest: _Guest, leave: Leave) -> None:
        """Kill a guest whose time is over, whatever notice it had before."""
        if self._guests.get(job) is guest and "exited" not in guest.attempt.stages:
            name = format_job(job)[:8]
            self._tasks.start(
                self._jobs.kill(f"{leave.reason}; it had notice, and its time is over", [job]), f"end {name}"
            )

    def _stop(self, job: bytes, guest: _Guest, why: str, memory: bool, stage: str) -> None:
        frees = memory and not guest.tried_memory and self._can_free(job)
        if guest.state == "still" and (guest.busy or not frees):
            return  # also while it resumes: the driver needs its processes to run then, and a later look stops it
        tenant = self._guard.tenant(format_job(job))
        begun = boot_s()
        if tenant is not None:
            tenant.set_gate(True, why, by="presence")
        guest.attempt.mark(stage)
        if not frees:
            guest.attempt.hold(why)
        guest.state = "still"
        guest.work = self._tasks.start(
            self._stopped(job, guest, why, stage, frees, begun), f"{stage} {format_job(job)[:8]}"
        )

    async def _stopped(self, job: bytes, guest: _Guest, why: str, stage: str, frees: bool, begun: float) -> None:
        attempt, words = guest.attempt, ""
        tenant = self._guard.tenant(format_job(job))
        if frees and tenant is not None:
            guest.tried_memory = True
            attempt.hold("")  # the driver cannot suspend a stopped process
            problem = await self._guard.pause(tenant, by="presence")
            words = f"; its GPU memory stays: {problem}" if problem else "; its GPU memory is free for the owner"
        attempt.hold(why)
        for _ in range(STILL_LOOKS):
            if not attempt.held or await attempt.stands_still():
                break
            await asyncio.sleep(STILL_LOOK_S)
        took_ms = (boot_s() - begun) * 1e3
        log.info("job %s: stage %s: stopped after %.0f ms: %s%s", format_job(job)[:8], stage, took_ms, why, words)
        self._jobs.event_log.add(job, "state", f"{why}{words}", attempt=attempt.number, new=stage)

    def _let_go(self, job: bytes, guest: _Guest) -> None:
        if guest.state == "still" and not guest.busy and boot_s() >= guest.again_at:
            guest.work = self._tasks.start(self._go_on(job, guest), f"go on {format_job(job)[:8]}")

    async def _go_on(self, job: bytes, guest: _Guest) -> bool:
        """Resume a guest; return whether it runs again."""
        begun, attempt = boot_s(), guest.attempt
        why = attempt.held
        attempt.hold("")  # the driver needs its processes to run
        tenant = self._guard.tenant(format_job(job))
        if tenant is not None and "presence" in tenant.closed_by:
            problem = "interrupted"
            try:
                problem = await self._guard.resume(tenant, by="presence")
            finally:
                if problem:
                    attempt.hold(why)
            if problem:
                guest.again_at = boot_s() + AGAIN_S
                log.warning("job %s: it cannot resume yet: %s", format_job(job)[:8], problem)
                return False
        guest.state, guest.tried_memory = "free", False
        since = max(attempt.stages.pop("suspended", 0.0), attempt.stages.pop("paused", 0.0))
        stood_s = begun - since
        log.info("job %s: resumed after %.0f ms", format_job(job)[:8], (boot_s() - begun) * 1e3)
        self._jobs.event_log.add(
            job, "state", f"it was stopped for {stood_s:.1f} s", attempt=attempt.number, new="goes on"
        )
        return True

    async def _bring_back(self, job: bytes, guest: _Guest, within_s: float) -> bool:
        """Return whether it can be given notice: it runs and has its GPU memory."""
        try:
            async with asyncio.timeout(within_s):
                while guest.work is not None and guest.busy:
                    await asyncio.wait([guest.work])
                if guest.state == "free":
                    return True
                work = self._tasks.start(self._go_on(job, guest), f"go on {format_job(job)[:8]}")
                guest.work = work
                return await work
        except Exception:  # the time is over, or the task failed and logged it: the guest must not stay for that
            return False

    # --- reports

    def on_attempt_ended(self, job: bytes, attempt: Attempt, reason: str) -> None:
        """Report an attempt that the owner sent away: by whom, why, and what is lost."""
        guest = self._guests.get(job)
        if guest is None or guest.attempt is not attempt:
            return
        del self._guests[job]
        if guest.leave is None:
            return
        lost = attempt.lost()
        words = f"by {self._owner}, the owner of {self._nick}: {guest.leave.why}"
        if reason.startswith(VACATED):
            words += f"; lost: {lost.text}" if lost.text else "; nothing is lost"
            self._jobs.event_log.add(job, "state", words, attempt=attempt.number, new="taken back")
            attempt.log_line(f"taken back {words}")
        now = boot_s()
        stages = {
            name: round((at - guest.ordered_at) * 1e3, 1)
            for name, at in attempt.stages.items()
            if at >= guest.ordered_at
        }
        stages["gone"] = round((now - guest.ordered_at) * 1e3, 1)
        times = ", ".join(f"{name} {ms:.0f} ms" for name, ms in stages.items())
        log.info("job %s: %s; from the order: %s", format_job(job)[:8], words, times)
        self._reclaimed({name: ms / 1e3 for name, ms in stages.items()})
        while len(self.departed) >= DEPARTED_KEPT:
            self.departed.pop(next(iter(self.departed)))
        self.departed[job] = Gone(attempt.spec.user, attempt.spec.name, reason, lost, stages)

    def _can_free(self, job: bytes) -> bool:
        return self._guard.tenant(format_job(job)) is not None and not self._guard.pause_problem

    def _guest(self, job: bytes, attempt: Attempt) -> _Guest:
        guest = self._guests.get(job)
        if guest is None or guest.attempt is not attempt:
            guest = self._guests[job] = _Guest(attempt)
        return guest


def _saves(attempt: Attempt, within_s: float) -> bool:
    """Tell whether a guest has notice from elsewhere, and has had no more time to save than the owner would give it.

    Its own grace may be a day.
    """
    return "notice" in attempt.stages and boot_s() < attempt.stages["notice"] + within_s

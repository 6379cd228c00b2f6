"""How guests are got out of their owner's way, rung by rung, and let go on when he is gone.

    suspend   the GPU gate shuts, all processes stand still; where the owner needs it and the driver can, GPU memory goes to the
              host
    notice    they may run for the notice, to save; what they save is shipped; who heeds no notice is killed at once
    pause     who is still there stands still as above, what it has saved goes on being shipped; it may go on if the owner leaves
    kill      by the runner, when the notice and the pause are over

How a guest stands is looked at anew with each look at the owner, so one that starts meanwhile, or a step that failed, is seen to.
Each rung leaves a line in the log with what it took.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from mesh.chores import Chores
from mesh.engine.alarm import boot_s
from mesh.jobs.attempt import Attempt
from mesh.jobs.contract import VACATED
from mesh.jobs.service import JobService
from mesh.jobs.spec import format_job
from mesh.jobs.stake import Lost
from mesh.provider.guard import NodeGuard
from mesh.provider.presence import Stand

STILL_LOOKS, STILL_LOOK_S = 1000, 0.005  # until a guest stands still: milliseconds, in a container some more
AGAIN_S = 5.0  # before a guest that could not go on is tried again; ours
NOT_BACK = "its GPU memory could not be brought back for it to save"
LATE_S = 0.5  # after its time, which its runner ends to the second; ours
TOLD_KEPT = 256  # attempts that were taken back; ours

log = logging.getLogger(__name__)


class Leave(msgspec.Struct, frozen=True):
    """How guests are asked to go, in seconds; `why` in their owner's terms. `by_hand`: whatever he does meanwhile."""

    notice: float
    pause: float
    reason: str
    why: str
    by_hand: bool = False


class Gone(msgspec.Struct, frozen=True):
    """How a guest that was taken back has left. `rungs_ms`: from the order until it was there, by rung."""

    user: str
    name: str
    reason: str
    lost: Lost
    rungs_ms: dict[str, float]


class _Guest:
    """What its owner has done with one attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.state: Literal["free", "still"] = "free"
        self.tried_memory = False
        self.leave: Leave | None = None
        self.noticed_at: float | None = None
        self.pressed = True  # whether its owner was there at the last look
        self.ordered_at = 0.0
        self.again_at = 0.0
        self.work: asyncio.Task[Any] | None = None

    @property
    def busy(self) -> bool:
        return self.work is not None and not self.work.done()


class Ladder:
    """`owner`, `nick`: whom users are told of. `told`: how the last that were taken back left, by job."""

    def __init__(self, jobs: JobService, guard: NodeGuard, owner: str, nick: str) -> None:
        self._jobs, self._guard = jobs, guard
        self._owner, self._nick = owner, nick
        self._guests: dict[bytes, _Guest] = {}
        self._chores = Chores(log)
        self.told: dict[bytes, Gone] = {}
        self.reclaimed: Callable[[dict[str, float]], None] = lambda rungs_s: None  # each rung's seconds from the order
        jobs.left = self._left

    # --- what the owner's presence asks for

    def look(self, stand_of: Callable[[tuple[str, ...]], Stand], leave: Callable[[Stand], Leave]) -> None:
        """Bring every guest to where it should stand now. Gates are shut before this returns; what takes longer follows."""
        leaving: dict[Leave, list[bytes]] = {}
        for job, attempt in self._jobs.attempts.items():
            guest = self._guest(job, attempt)
            stand = stand_of(tuple(portion.uuid for portion in attempt.portions))
            if guest.leave is not None:
                guest.pressed = stand.pressing
                self._see_to_leaving(job, guest, guest.leave)
            elif stand.level == "vacate":
                asked = leave(stand)
                guest.leave = asked
                leaving.setdefault(asked, []).append(job)
            elif stand.level == "suspend" and "notice" not in attempt.rungs:
                self._stop(job, guest, stand.why, "gpu" in stand.causes, "suspended")
            else:  # also one that was given notice by somebody else: it may save, and is gone soon
                self._let_go(job, guest)
        for asked, jobs in leaving.items():
            self._chores.start(self.leave(jobs, asked), f"leave {', '.join(format_job(job)[:8] for job in jobs)}")

    async def leave(self, jobs: Sequence[bytes], leave: Leave) -> list[bytes]:
        """Ask these to go, each to where one plan for all of them sends it, and wait until they have gone (or were killed)."""
        self._jobs.leaving.settle(jobs, leave.notice + leave.pause)
        left = await asyncio.gather(*(self._leave(job, leave) for job in jobs))
        return [job for some in left for job in some]

    async def _leave(self, job: bytes, leave: Leave) -> list[bytes]:
        attempt, left_s = self._jobs.attempts.get(job), leave.notice
        if attempt is not None:
            guest = self._guest(job, attempt)
            guest.leave = leave
            if guest.noticed_at is None:  # else it is on its way already, and has no more time than it was given
                self.told.pop(job, None)
                guest.ordered_at = boot_s()
                back = await self._bring_back(job, guest, leave.notice)
                spent_s = boot_s() - guest.ordered_at  # of its owner's time
                left_s = max(0.0, round(leave.notice - spent_s, 1))
                if not back:
                    return await self._jobs.kill(f"{leave.reason}; {NOT_BACK}", [job])
                attempt.reserve_s, guest.noticed_at = leave.pause, boot_s()
            loop = asyncio.get_running_loop()
            loop.call_later(left_s, self._see_to_leaving, job, guest, leave)
            loop.call_later(left_s + leave.pause + LATE_S, self._see_that_it_left, job, guest, leave)
        return await self._jobs.vacate(left_s + leave.pause, leave.reason, [job])

    async def kill(self, jobs: Sequence[bytes] | None, reason: str, why: str) -> list[bytes]:
        """End these, or all, at once."""
        for job, attempt in self._jobs.attempts.items():
            if jobs is None or job in jobs:
                guest = self._guest(job, attempt)
                self.told.pop(job, None)
                guest.leave = guest.leave or Leave(0.0, 0.0, reason, why, by_hand=True)
                guest.ordered_at = guest.ordered_at or boot_s()
        return await self._jobs.kill(reason, jobs)

    async def close(self) -> None:
        await self._chores.close()

    # --- the rungs

    def _see_to_leaving(self, job: bytes, guest: _Guest, leave: Leave) -> None:
        """The pause rung: when its notice is over it stands still for as long as the owner is there."""
        if guest.noticed_at is None or leave.pause <= 0 or "exited" in guest.attempt.rungs:
            return
        if self._guests.get(job) is not guest or boot_s() < guest.ordered_at + leave.notice:
            return
        if leave.by_hand or guest.pressed:
            self._stop(job, guest, leave.reason, memory=True, rung="paused")
        else:
            self._let_go(job, guest)

    def _see_that_it_left(self, job: bytes, guest: _Guest, leave: Leave) -> None:
        """Whoever gave it notice before, and for however long."""
        if self._guests.get(job) is guest and "exited" not in guest.attempt.rungs:
            name = format_job(job)[:8]
            self._chores.start(
                self._jobs.kill(f"{leave.reason}; it had notice, and its time is over", [job]), f"end {name}"
            )

    def _stop(self, job: bytes, guest: _Guest, why: str, memory: bool, rung: str) -> None:
        frees = memory and not guest.tried_memory and self._can_free(job)
        if guest.state == "still" and (guest.busy or not frees):
            return
        tenant = self._guard.tenant(format_job(job))
        begun = boot_s()
        if tenant is not None:
            tenant.set_gate(True, why, by="presence")
        guest.attempt.mark(rung)
        if not frees:
            guest.attempt.hold(why)
        if guest.busy:
            return  # it is being let go, and is stopped when that is done
        if guest.state == "free":
            guest.state = "still"
        guest.work = self._chores.start(
            self._stopped(job, guest, why, rung, frees, begun), f"{rung} {format_job(job)[:8]}"
        )

    async def _stopped(self, job: bytes, guest: _Guest, why: str, rung: str, frees: bool, begun: float) -> None:
        attempt, words = guest.attempt, ""
        tenant = self._guard.tenant(format_job(job))
        if frees and tenant is not None:
            guest.tried_memory = True
            attempt.hold("")  # the driver cannot put away what stands still
            problem = await self._guard.pause(tenant, by="presence")
            words = f"; its GPU memory stays: {problem}" if problem else "; its GPU memory is the owner's"
        attempt.hold(why)
        for _ in range(STILL_LOOKS):
            if not attempt.held or await attempt.stands_still():
                break
            await asyncio.sleep(STILL_LOOK_S)
        took_ms = (boot_s() - begun) * 1e3
        log.info("job %s: rung %s: it stands still after %.0f ms: %s%s", format_job(job)[:8], rung, took_ms, why, words)
        self._jobs.chronicle.say(job, "state", f"{why}{words}", attempt=attempt.number, new=rung)

    def _let_go(self, job: bytes, guest: _Guest) -> None:
        if guest.state == "still" and not guest.busy and boot_s() >= guest.again_at:
            guest.work = self._chores.start(self._go_on(job, guest), f"go on {format_job(job)[:8]}")

    async def _go_on(self, job: bytes, guest: _Guest) -> bool:
        """Whether it goes on where it stood."""
        begun, attempt = boot_s(), guest.attempt
        attempt.hold("")
        tenant = self._guard.tenant(format_job(job))
        if tenant is not None and "presence" in tenant.closed_by:
            problem = await self._guard.resume(tenant, by="presence")
            if problem:
                guest.again_at = boot_s() + AGAIN_S
                log.warning("job %s: it cannot go on yet: %s", format_job(job)[:8], problem)
                return False
        guest.state, guest.tried_memory = "free", False
        since = max(attempt.rungs.pop("suspended", 0.0), attempt.rungs.pop("paused", 0.0))
        stood_s = begun - since
        log.info("job %s: it goes on %.0f ms after it was let go", format_job(job)[:8], (boot_s() - begun) * 1e3)
        self._jobs.chronicle.say(
            job, "state", f"it stood still for {stood_s:.1f} s", attempt=attempt.number, new="goes on"
        )
        return True

    async def _bring_back(self, job: bytes, guest: _Guest, within_s: float) -> bool:
        """Whether it can be given notice: it runs, and has its memory."""
        try:
            async with asyncio.timeout(within_s):
                if guest.work is not None and guest.busy:
                    await asyncio.wait([guest.work])
                return guest.state == "free" or await self._go_on(job, guest)
        except TimeoutError:
            return False

    # --- what is told

    def _left(self, job: bytes, attempt: Attempt, reason: str) -> None:
        """An attempt has ended here; if its owner sent it away, its user is told who, why and what is lost."""
        guest = self._guests.pop(job, None)
        if guest is None or guest.leave is None or guest.attempt is not attempt:
            return
        lost = attempt.lost()
        words = f"by {self._owner}, the owner of {self._nick}: {guest.leave.why}"
        if reason.startswith(VACATED):
            words += f"; lost: {lost.words}" if lost.words else "; nothing is lost"
            self._jobs.chronicle.say(job, "state", words, attempt=attempt.number, new="taken back")
            attempt.log_line(f"taken back {words}")
        now = boot_s()
        rungs = {
            name: round((at - guest.ordered_at) * 1e3, 1)
            for name, at in attempt.rungs.items()
            if at >= guest.ordered_at
        }
        rungs["gone"] = round((now - guest.ordered_at) * 1e3, 1)
        told = ", ".join(f"{name} {ms:.0f} ms" for name, ms in rungs.items())
        log.info("job %s: %s; from the order: %s", format_job(job)[:8], words, told)
        self.reclaimed({name: ms / 1e3 for name, ms in rungs.items()})
        self.told.pop(job, None)
        while len(self.told) >= TOLD_KEPT:
            self.told.pop(next(iter(self.told)))
        self.told[job] = Gone(attempt.spec.user, attempt.spec.name, reason, lost, rungs)

    def _can_free(self, job: bytes) -> bool:
        return self._guard.tenant(format_job(job)) is not None and not self._guard.pause_problem

    def _guest(self, job: bytes, attempt: Attempt) -> _Guest:
        guest = self._guests.get(job)
        if guest is None or guest.attempt is not attempt:
            guest = self._guests[job] = _Guest(attempt)
        return guest

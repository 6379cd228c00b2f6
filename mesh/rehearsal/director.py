"""The plays of a rehearsal, in their order: one with two departures, then, if time is left, one without, for comparison.

First a notice, as when an owner comes back; then a sudden death, half way between two checkpoints, which is what a death costs
on average. Once the job has shown that it does not resume, the rest is left out.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from mesh.rehearsal.comparison import common_checkpoint, compare, results_differ
from mesh.rehearsal.cost import interval_s
from mesh.rehearsal.facts import Departure, Facts, Play
from mesh.rehearsal.observer import Observer
from mesh.rehearsal.restart import judge_restart
from mesh.rehearsal.stage import Stage

POLL_S = 0.04
WAIT_SHARE = 0.1  # of the limit, at most, is spent on coming half way to the next checkpoint
AGAIN = 1.2  # times the first undisturbed run must be left for a second
ALIKE, ALIKE_S = 1.5, 5.0  # an undisturbed run that outlives a failed one by so much did not fail as that did
CANCEL_S = 15.0

Waiting = Callable[[str], AbstractContextManager[None]]


class Plan(msgspec.Struct, frozen=True):
    """When a departure is due: so long after the attempt began to run, and after so many of its checkpoints."""

    after_s: float
    checkpoints: int
    limit_s: float
    grace_s: float


class Director:
    def __init__(
        self, stage: Stage, order: dict[str, Any], plan: Plan, tell: Callable[[str], None], waiting: Waiting
    ) -> None:
        self._stage, self._order, self._plan, self._tell, self._waiting = stage, order, plan, tell, waiting
        self._deadline = time.monotonic() + plan.limit_s

    def direct(self) -> Facts:
        observer = self._stage.submit(self._order)
        disturbed = self._disturbed(observer)
        limit_hit = self._left_s() <= 0
        undisturbed: list[Play] = []
        if self._worth_comparing(disturbed):
            self._clear(observer)
            self._tell("once more, undisturbed, for comparison")
            undisturbed.append(self._undisturbed(disturbed))
            first = undisturbed[0]
            differ = disturbed.done and first.done and results_differ(compare(disturbed, first))
            if differ and self._left_s() > AGAIN * first.ran_s:
                self._tell("its files differ: undisturbed once more, to see whether it is deterministic")
                undisturbed.append(self._undisturbed(disturbed))
        return Facts(
            directory=self._order["ckpt"],
            mode=self._order["ckpt_mode"],
            disturbed=disturbed,
            undisturbed=tuple(undisturbed),
            sight=observer.sight(),
            limit_s=self._plan.limit_s,
            limit_hit=limit_hit,
        )

    # --- the play with departures

    def _disturbed(self, observer: Observer) -> Play:
        noticed = sudden = None
        if self._due(observer, 0):
            noticed = self._notice(observer)
            back = noticed.attempt + 1
            if self._back(observer, back, noticed) and self._due(observer, back) and self._half_way(observer):
                sudden = self._kill(observer)
                back = sudden.attempt + 1
                if self._back(observer, back, noticed):
                    self._until(observer, lambda: observer.commits(back) > 0, "waiting for its next checkpoint")
                    self._wait_for_end(observer)
        return self._seen(observer, noticed, sudden)

    def _due(self, observer: Observer, number: int) -> bool:
        """Wait until it has run for long enough since an attempt began; whether it comes to that."""

        def due() -> bool:
            first = observer.started(number)
            if first is None or observer.running(number) is None:
                return False
            ran_s = time.time() - first["running_unix_ms"] / 1000
            return ran_s >= self._plan.after_s and observer.commits(number) >= self._plan.checkpoints

        if number == 0 and self._until(observer, lambda: observer.started(0) is not None, "waiting for it to start"):
            self._tell(f"{observer.attempts[0]['node']} runs it; waiting for a checkpoint")
        return self._until(observer, due, f"waiting for a checkpoint in {self._order['ckpt']}")

    def _half_way(self, observer: Observer) -> bool:
        """Let half the time to the next checkpoint pass."""
        play = observer.play()
        gap = min((interval_s(play) or 0.0) / 2, WAIT_SHARE * self._plan.limit_s)
        at = play.checkpoints[-1].written_unix + gap
        return self._until(observer, lambda: time.time() >= at, "letting it work on")

    def _notice(self, observer: Observer) -> Departure:
        attempt, grace_s = observer.attempts[-1], self._plan.grace_s
        nick, number = attempt["node"], attempt["number"]
        self._tell(f"checkpoint {observer.state['checkpoint']['seq']} is committed; {nick} gives notice, {grace_s:g} s")
        with self._waiting("waiting for it to save and to leave"):
            notice = self._stage.notice(nick, number, grace_s, observer.look)
        self._tell(f"it has left {nick} after {time.time() - notice.unix:.1f} s")
        return msgspec.structs.replace(notice, writing=observer.unfinished(number))

    def _kill(self, observer: Observer) -> Departure:
        nick, number = observer.attempts[-1]["node"], observer.attempts[-1]["number"]
        self._tell(f"checkpoint {observer.state['checkpoint']['seq']} is committed; {nick} is killed (SIGKILL)")
        observer.look()
        return self._stage.kill(nick, number)

    def _back(self, observer: Observer, number: int, noticed: Departure) -> bool:
        """Wait until it runs again and shows whether it goes on; whether there is a point in disturbing it further."""
        if not self._until(observer, lambda: observer.started(number) is not None, "waiting for it to run again"):
            return False
        self._tell(f"{observer.attempts[-1]['node']} runs it again")

        def shown() -> bool:
            return judge_restart(observer.play(noticed), number).kind != "unknown" or observer.commits(number) > 0

        self._until(observer, shown, "waiting to see whether it goes on")
        restart = judge_restart(observer.play(noticed), number)
        if restart.why:
            self._tell(f"it {restart.why}")
        return restart.kind != "anew" and not observer.over

    def _wait_for_end(self, observer: Observer) -> None:
        """If that leaves as much time for an undisturbed run; a job that tells how far it is need not be waited for in vain."""
        allowed_s = self._left_s() / 2
        steps, of = observer.play().attempts[-1].steps, observer.state.get("of")
        if of and len(steps) > 1:
            rate = (steps[-1][1] - steps[0][1]) / max(0.001, steps[-1][0] - steps[0][0])
            if rate > 0 and (of - steps[-1][1]) / rate > allowed_s:
                self._tell("its end is too far for the limit: what there is will be compared")
                return
        self._until(observer, lambda: observer.over, "waiting for its end", time.monotonic() + allowed_s)

    # --- the play without

    def _worth_comparing(self, play: Play) -> bool:
        if self._left_s() <= 0 or play.noticed is None or len(play.attempts) < 2 or play.ended_in_grace:
            return False
        back = [departure.attempt + 1 for departure in (play.noticed, play.sudden) if departure is not None]
        if any(judge_restart(play, number).kind == "anew" for number in back):
            return False
        if play.outcome == "failed":
            return bool(play.of_attempt(play.attempts[-1].number))  # else it failed for its restart
        return play.done or (self._order["ckpt_mode"] != "stable" and bool(play.of_attempt(play.attempts[-1].number)))

    def _undisturbed(self, disturbed: Play) -> Play:
        observer = self._stage.submit(self._order)
        deadline = self._deadline
        if disturbed.outcome == "failed":
            deadline = min(deadline, time.monotonic() + ALIKE * disturbed.ran_s + ALIKE_S)

        def enough() -> bool:
            both = not disturbed.outcome and common_checkpoint(disturbed, observer.play())
            return observer.over or bool(both)

        self._until(observer, enough, "waiting for the undisturbed run", deadline)
        play = self._seen(observer, None, None)
        if not observer.over:
            self._clear(observer)
        return play

    # --- waiting

    def _until(self, observer: Observer, ready: Callable[[], bool], what: str, deadline: float | None = None) -> bool:
        """Look until that is so; False if the job or the time is over first."""
        with self._waiting(what):
            while True:
                observer.look()
                if ready():
                    return True
                if observer.over or time.monotonic() > (self._deadline if deadline is None else deadline):
                    return False
                time.sleep(POLL_S)

    def _clear(self, observer: Observer) -> None:
        """Make room for the next play."""
        if not observer.over:
            self._stage.cancel(observer)
            self._until(observer, lambda: observer.over, "ending it", time.monotonic() + CANCEL_S)

    def _seen(self, observer: Observer, noticed: Departure | None, sudden: Departure | None) -> Play:
        done = (observer.state.get("outcome") or {}).get("kind") == "done"
        return observer.play(noticed, sudden, self._stage.published(observer) if done else None)

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

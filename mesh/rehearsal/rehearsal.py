"""A rehearsal: a run with two departures, then, if time is left, an undisturbed run for comparison.

The first departure has a notice, as when an owner returns. The second is a sudden death half way between two checkpoints, which
is its average cost. If the job shows that it does not resume, the rest is skipped.
"""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from mesh.rehearsal.evaluation import common_checkpoint, compare, evaluate_restart, interval_s, results_differ
from mesh.rehearsal.observations import Departure, Observations, Run
from mesh.rehearsal.observer import Observer
from mesh.rehearsal.private_mesh import PrivateMesh

POLL_S = 0.04
WAIT_SHARE = 0.1  # of the limit: longest wait for the middle between two checkpoints
AGAIN = 1.2  # times the duration of the first undisturbed run that a second one needs
ALIKE, ALIKE_S = 1.5, 5.0  # an undisturbed run that lasts so much longer than a failed one did not fail in the same way
CANCEL_S = 15.0

Waiting = Callable[[str], AbstractContextManager[None]]


class Plan(msgspec.Struct, frozen=True):
    """Conditions of a departure: after this time of an attempt, and after this number of its checkpoints."""

    after_s: float
    checkpoints: int
    limit_s: float
    grace_s: float


class Rehearsal:
    def __init__(
        self, mesh: PrivateMesh, order: dict[str, Any], plan: Plan, report: Callable[[str], None], waiting: Waiting
    ) -> None:
        self._mesh, self._order, self._plan, self._report, self._waiting = mesh, order, plan, report, waiting
        self._deadline = time.monotonic() + plan.limit_s

    def run(self) -> Observations:
        observer = self._mesh.submit(self._order)
        disturbed = self._disturbed(observer)
        limit_hit = self._left_s() <= 0
        undisturbed: list[Run] = []
        if self._worth_comparing(disturbed):
            self._clear(observer)
            self._report("running it undisturbed, for comparison")
            undisturbed.append(self._undisturbed(disturbed))
            first = undisturbed[0]
            differ = disturbed.done and first.done and results_differ(compare(disturbed, first))
            if differ and self._left_s() > AGAIN * first.ran_s:
                self._report("its files differ: running it undisturbed again, to see whether it is deterministic")
                undisturbed.append(self._undisturbed(disturbed))
        return Observations(
            directory=self._order["ckpt"],
            mode=self._order["ckpt_mode"],
            disturbed=disturbed,
            undisturbed=tuple(undisturbed),
            directory_state=observer.directory_state(),
            limit_s=self._plan.limit_s,
            limit_hit=limit_hit,
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
        )

    # --- the disturbed run

    def _disturbed(self, observer: Observer) -> Run:
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
        """Wait until a departure is due in an attempt; return False if the job or the limit ends first."""

        def due() -> bool:
            first = observer.started(number)
            if first is None or observer.running(number) is None:
                return False
            ran_s = time.time() - first["running_unix_ms"] / 1000
            return ran_s >= self._plan.after_s and observer.commits(number) >= self._plan.checkpoints

        if number == 0 and self._until(observer, lambda: observer.started(0) is not None, "waiting for it to start"):
            self._report(f"{observer.attempts[0]['node']} runs it; waiting for a checkpoint")
        return self._until(observer, due, f"waiting for a checkpoint in {self._order['ckpt']}")

    def _half_way(self, observer: Observer) -> bool:
        """Wait for the middle between two checkpoints."""
        run = observer.run()
        gap = min((interval_s(run) or 0.0) / 2, WAIT_SHARE * self._plan.limit_s)
        at = run.checkpoints[-1].written_unix + gap
        return self._until(observer, lambda: time.time() >= at, "letting it compute")

    def _notice(self, observer: Observer) -> Departure:
        attempt, grace_s = observer.attempts[-1], self._plan.grace_s
        nick, number = attempt["node"], attempt["number"]
        self._report(
            f"checkpoint {observer.state['checkpoint']['seq']} is committed; {nick} gives notice of {grace_s:g} s"
        )
        with self._waiting("waiting for it to save and leave"):
            notice = self._mesh.notice(nick, number, grace_s, observer.poll)
        self._report(f"it left {nick} after {time.time() - notice.unix:.1f} s")
        return msgspec.structs.replace(notice, writing=observer.unfinished(number))

    def _kill(self, observer: Observer) -> Departure:
        nick, number = observer.attempts[-1]["node"], observer.attempts[-1]["number"]
        self._report(f"checkpoint {observer.state['checkpoint']['seq']} is committed; {nick} is killed (SIGKILL)")
        observer.poll()
        return self._mesh.kill(nick, number)

    def _back(self, observer: Observer, number: int, noticed: Departure) -> bool:
        """Wait until it runs again and shows whether it resumed; return whether to continue the rehearsal."""
        if not self._until(observer, lambda: observer.started(number) is not None, "waiting for it to run again"):
            return False
        self._report(f"{observer.attempts[-1]['node']} runs it again")

        def shown() -> bool:
            return evaluate_restart(observer.run(noticed), number).kind != "unknown" or observer.commits(number) > 0

        self._until(observer, shown, "waiting to see whether it resumed")
        restart = evaluate_restart(observer.run(noticed), number)
        if restart.why:
            self._report(f"it {restart.why}")
        return restart.kind != "started over" and not observer.over

    def _wait_for_end(self, observer: Observer) -> None:
        """Wait for the end, if that leaves as much time for an undisturbed run; use reported progress to give up early."""
        allowed_s = self._left_s() / 2
        steps, of = observer.run().attempts[-1].steps, observer.state.get("of")
        if of and len(steps) > 1:
            rate = (steps[-1][1] - steps[0][1]) / max(0.001, steps[-1][0] - steps[0][0])
            if rate > 0 and (of - steps[-1][1]) / rate > allowed_s:
                self._report("it cannot end within the limit: comparing what exists")
                return
        self._until(observer, lambda: observer.over, "waiting for its end", time.monotonic() + allowed_s)

    # --- the undisturbed run

    def _worth_comparing(self, run: Run) -> bool:
        if self._left_s() <= 0 or run.noticed is None or len(run.attempts) < 2 or run.ended_in_grace:
            return False
        back = [departure.attempt + 1 for departure in (run.noticed, run.sudden) if departure is not None]
        if any(evaluate_restart(run, number).kind == "started over" for number in back):
            return False
        if run.outcome == "failed":
            return bool(run.of_attempt(run.attempts[-1].number))  # else it failed because of its restart
        return run.done or (self._order["ckpt_mode"] != "stable" and bool(run.of_attempt(run.attempts[-1].number)))

    def _undisturbed(self, disturbed: Run) -> Run:
        observer = self._mesh.submit(self._order)
        deadline = self._deadline
        if disturbed.outcome == "failed":
            deadline = min(deadline, time.monotonic() + ALIKE * disturbed.ran_s + ALIKE_S)

        def enough() -> bool:
            both = not disturbed.outcome and common_checkpoint(disturbed, observer.run())
            return observer.over or bool(both)

        self._until(observer, enough, "waiting for the undisturbed run", deadline)
        run = self._seen(observer, None, None)
        if not observer.over:
            self._clear(observer)
        return run

    # --- waiting

    def _until(self, observer: Observer, ready: Callable[[], bool], what: str, deadline: float | None = None) -> bool:
        """Poll until ready; return False if the job or the time ends first."""
        with self._waiting(what):
            while True:
                observer.poll()
                if ready():
                    return True
                if observer.over or time.monotonic() > (self._deadline if deadline is None else deadline):
                    return False
                time.sleep(POLL_S)

    def _clear(self, observer: Observer) -> None:
        """Cancel the run, so that the next one has the node."""
        if not observer.over:
            self._mesh.cancel(observer)
            self._until(observer, lambda: observer.over, "ending it", time.monotonic() + CANCEL_S)

    def _seen(self, observer: Observer, noticed: Departure | None, sudden: Departure | None) -> Run:
        done = (observer.state.get("outcome") or {}).get("kind") == "done"
        return observer.run(noticed, sudden, self._mesh.published(observer) if done else None)

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

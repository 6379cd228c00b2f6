"""From what was seen of a rehearsed job to a verdict, with what is at fault and what to do about it. Pure.

A fault decides the verdict; a warning makes departures dearer than they need be; `unchecked` says what was not played.
"""

from typing import Literal

import msgspec

from mesh.rehearsal import sight
from mesh.rehearsal.comparison import Compared, compare, results_differ
from mesh.rehearsal.cost import KILLED, Checkpoints, Cost, checkpoints, costs, saved_at_notice
from mesh.rehearsal.facts import Attempt, Departure, Facts, Play
from mesh.rehearsal.restart import Restart, judge_restart

Verdict = Literal[
    "resumes", "does not resume", "never checkpoints", "fails by itself", "cannot tell", "resumes inexactly"
]
EXIT_CODES: dict[Verdict, int] = {
    "resumes": 0,
    "does not resume": 10,
    "never checkpoints": 11,
    "fails by itself": 12,
    "cannot tell": 13,
    "resumes inexactly": 14,
}
LINES_TOLD = 5
AT_ONCE_S = 2.0  # a guest that was killed instead of waited for is gone by then; ours
NARROW_SHARE = 0.7  # of its grace that a save may take before a slower disk or network makes it too long; ours
UNDISTURBED_FIRST = "make it run undisturbed first"
LOOK_AT_RESUME = (
    "at its start, load the checkpoint that $MESH_RESUME names, if that is not empty (docs/job-contract.md; "
    "with mesh/job.py: `resume_path()`)"
)


class Finding(msgspec.Struct, frozen=True):
    level: Literal["fault", "warning", "note"]
    text: str
    next: str = ""
    said: tuple[str, ...] = ()  # by the job, at that time


class Judgement(msgspec.Struct, frozen=True):
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    restarts: tuple[Restart, ...] = ()
    costs: tuple[Cost, ...] = ()
    checkpoints: Checkpoints | None = None
    compared: tuple[Compared, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


def judge(facts: Facts) -> Judgement:
    play = facts.disturbed
    reference = facts.undisturbed[0] if facts.undisturbed else None
    whole_s = reference.ran_s if reference is not None and reference.done else None
    departures = [departure for departure in (play.noticed, play.sudden) if departure is not None]
    restarts = tuple(
        judge_restart(play, departure.attempt + 1, whole_s)
        for departure in departures
        if (attempt := play.attempt(departure.attempt + 1)) is not None and attempt.running_unix
    )
    compared = tuple(compare(play, reference)) if reference is not None else ()
    verdict, reason = _verdict(facts, restarts, compared)
    return Judgement(
        verdict=verdict,
        findings=(*([reason] if reason is not None else []), *_warnings(facts, compared, verdict)),
        restarts=restarts,
        costs=tuple(costs(play)),
        checkpoints=checkpoints(play),
        compared=compared,
        unchecked=tuple(_unchecked(facts, compared)) if verdict in {"resumes", "resumes inexactly"} else (),
    )


def _verdict(
    facts: Facts, restarts: tuple[Restart, ...], compared: tuple[Compared, ...]
) -> tuple[Verdict, Finding | None]:
    play = facts.disturbed
    first = play.attempt(0)
    if first is None or not first.running_unix:
        text = f"it did not start: {play.detail or 'no node took it'}"
        return "fails by itself", Finding("fault", text, "correct the command or its options")
    if play.noticed is None and play.outcome == "failed":
        text = f"{play.detail or 'it failed'} after {_seconds(play.ran_s)}, before anything was done to it"
        return "fails by itself", Finding("fault", text, UNDISTURBED_FIRST, _said(play.attempts[-1]))
    if not play.checkpoints:
        return "never checkpoints", _never(facts, first)
    if play.noticed is None:
        return "cannot tell", _too_short(facts)
    failure = _failure(facts)
    if failure is not None:
        return failure
    left = play.attempt(play.noticed.attempt)
    if left is None or (play.outcome and not restarts):
        return "cannot tell", _too_short(facts)  # it came to its end just then
    if play.ended_in_grace:
        stay = _seconds(_stay(play.noticed, left))
        text = f"it went on after its notice and came to its end {stay} later, within its grace"
        return "cannot tell", Finding("fault", text, "rehearse it with more to do, or with a shorter --grace")
    anew = next((restart for restart in restarts if restart.kind == "anew"), None)
    if anew is not None:
        return "does not resume", Finding("fault", f"it starts over: attempt {anew.attempt} {anew.why}", LOOK_AT_RESUME)
    if not any(restart.kind == "resumed" for restart in restarts):
        return "cannot tell", _silent(facts, restarts)
    if results_differ([*compared]) and _is_steady(facts):
        return "resumes inexactly", Finding(
            "fault",
            "two undisturbed runs made the same files, and the disturbed one made others: its checkpoint does not hold all "
            "of its state",
            "save and load what a step depends on: optimizer, learning rate schedule, random generators, place in the data",
        )
    return "resumes", None


def _failure(facts: Facts) -> tuple[Verdict, Finding] | None:
    """An attempt that failed once it had been disturbed."""
    play = facts.disturbed
    failed = next((attempt for attempt in play.attempts if attempt.failed), None)
    if failed is None or play.noticed is None:
        return None
    if failed.number == play.noticed.attempt:
        stay = _seconds(_stay(play.noticed, failed))
        text = f"it fails at a notice: exit {failed.exit_code} {stay} after SIGTERM"
        then = "save, then exit with 85 (or 0): docs/job-contract.md"
        return "does not resume", Finding("fault", text, then, _said(failed))
    alone = facts.undisturbed[0] if facts.undisturbed else None
    if alone is not None and alone.outcome == "failed":
        text = f"it fails undisturbed too, with exit {alone.exit_code}"
        return "fails by itself", Finding("fault", text, UNDISTURBED_FIRST, _said(alone.attempts[-1]))
    stay = _seconds(failed.ended_unix - failed.running_unix)
    text = f"it fails after a restart: attempt {failed.number} ended with exit {failed.exit_code} after {stay}"
    kept = play.resumed_by(failed.number)
    given = (
        f"$MESH_RESUME was {facts.directory}/{kept.resume}".rstrip("/") if kept is not None else "it had a checkpoint"
    )
    then = f"{given}, in a new directory on another node: run it once by hand with a checkpoint like that"
    return "does not resume", Finding("fault", text, then, _said(failed))


def _never(facts: Facts, first: Attempt) -> Finding:
    play = facts.disturbed
    ended = f"it ended after {_seconds(play.ran_s)}" if play.outcome else f"it ran for {_seconds(facts.limit_s)}"
    why, then = sight.diagnose(facts.sight, facts.directory, facts.mode, bool(play.outcome))
    return Finding("fault", f"{ended} and committed no checkpoint: {why}", then)


def _too_short(facts: Facts) -> Finding:
    play = facts.disturbed
    if facts.limit_hit:
        return Finding(
            "fault", f"the limit of {_seconds(facts.limit_s)} was over before it could be disturbed", "raise --limit"
        )
    text = f"it ended after {_seconds(play.ran_s)}, before it could be disturbed"
    return Finding("fault", text, "rehearse it with more to do, or let it write checkpoints more often")


def _silent(facts: Facts, restarts: tuple[Restart, ...]) -> Finding:
    play = facts.disturbed
    again = play.attempt(play.noticed.attempt + 1) if play.noticed is not None else None
    if not restarts or again is None:
        text = f"it had not started again when the limit of {_seconds(facts.limit_s)} was over"
        return Finding("fault", text + (f" ({play.detail})" if play.detail else ""), "raise --limit")
    why = "it reports no steps, and its checkpoints bear no rising numbers"
    if again.steps:
        why = "it was disturbed too near its beginning, or the limit was over too soon"
    text = f"nothing shows whether it went on or began anew: {why}"
    return Finding(
        "fault",
        text,
        "let it report steps (docs/job-contract.md, Progress), disturb it later with --after or --checkpoints, or raise "
        "--limit until it comes to its end",
        again.output[:LINES_TOLD],
    )


def _warnings(facts: Facts, compared: tuple[Compared, ...], verdict: Verdict) -> list[Finding]:
    play, found = facts.disturbed, []
    noticed = play.attempt(play.noticed.attempt) if play.noticed is not None else None
    if play.noticed is not None and noticed is not None and noticed.ended_unix and not noticed.failed:
        at_notice = _at_notice(play, play.noticed, noticed)
        found += [at_notice] if at_notice is not None else []
    if play.torn:
        found.append(
            Finding(
                "warning",
                f"{', '.join(play.torn[:LINES_TOLD])} changed after it had looked complete: a departure at that moment "
                "would keep a torn one",
                "write under a name that begins with a dot, then rename it (--ckpt-mode rename); or write COMMITTED last "
                "(--ckpt-mode marker)",
            )
        )
    if facts.sight.trouble and play.checkpoints:
        found.append(Finding("warning", f"a checkpoint could not be stored: {facts.sight.trouble}"))
    if verdict == "resumes" and results_differ([*compared]):
        found.append(_differs(facts))
    return found


def _at_notice(play: Play, notice: Departure, attempt: Attempt) -> Finding | None:
    stay, grace = _stay(notice, attempt), notice.grace_s or 0.0
    interval = checkpoints(play)
    risk = (
        f"up to {_seconds(interval.interval_s)} of work"
        if interval and interval.interval_s
        else "the work since its last checkpoint"
    )
    handle = "catch SIGTERM, save, exit with 85 (docs/job-contract.md; with mesh/job.py: `should_yield()`)"
    if attempt.exit_code == KILLED and stay >= min(grace, AT_ONCE_S):
        if saved_at_notice(play) or notice.writing:
            what = f"it was still writing {notice.writing[0]}" if notice.writing else "it had saved, and ran on"
            return Finding(
                "warning",
                f"it was killed when its grace of {_seconds(grace)} was over: {what}; each departure loses {risk}",
                "raise --grace if a save takes longer than that; exit with 85 as soon as it is done",
            )
        caught = (
            "it catches SIGTERM, but had not left"
            if notice.catches_term
            else "it acts on neither SIGTERM nor notice.json"
        )
        return Finding(
            "warning",
            f"it was killed when its grace of {_seconds(grace)} was over: {caught}; each departure loses {risk}",
            f"{handle}; raise --grace if a step and a save take longer than that",
        )
    if attempt.exit_code == KILLED:
        return Finding(
            "warning", f"it does not catch SIGTERM: each departure loses {risk}, even one with notice", handle
        )
    if not saved_at_notice(play):
        text = f"it leaves at a notice without saving: each departure loses {risk}"
        return Finding("warning", text, "save before it exits, or it might as well be killed")
    if stay > NARROW_SHARE * grace:
        text = f"it took {_seconds(stay)} of its grace of {_seconds(grace)} to save and to be copied"
        return Finding("warning", text, "raise --grace, or save less")
    return None


def _differs(facts: Facts) -> Finding:
    if len(facts.undisturbed) > 1 and all(play.done for play in facts.undisturbed[:2]):
        return Finding(
            "note",
            "it is not deterministic: two undisturbed runs differ from each other as well. That the disturbed one differs is "
            "no fault in itself",
            "compare what counts, as losses: the last lines are below",
        )
    return Finding(
        "warning",
        "the disturbed run made other files than the undisturbed one: either it is not deterministic, which is no fault if the "
        "losses agree, or its checkpoint does not hold all of its state",
        "raise --limit, so that a second undisturbed run can tell which",
    )


def _is_steady(facts: Facts) -> bool:
    """Whether two undisturbed runs made the same files."""
    return (
        len(facts.undisturbed) > 1 and not results_differ(compare(*facts.undisturbed[:2])) and facts.undisturbed[1].done
    )


def _unchecked(facts: Facts, compared: tuple[Compared, ...]) -> list[str]:
    play, found = facts.disturbed, []
    if play.sudden is None:
        why = "it ended before that" if play.outcome else "the limit was over"
        found.append(f"a sudden death of its host: {why}")
    elif (again := play.attempt(play.sudden.attempt + 1)) is None or not again.running_unix:
        found.append("whether it goes on after a sudden death: the limit was over")
    elif not play.of_attempt(again.number) and not play.done:
        found.append("that it writes checkpoints again after a sudden death: the limit was over")
    if not play.done:
        found.append("that it comes to its end: it was not waited for")
    if not compared:
        found.append("its result against that of an undisturbed run")
    elif all(found.what == "checkpoint of the same name" for found in compared):
        found.append("its final result against that of an undisturbed run: one checkpoint of both was compared")
    return found


def _stay(notice: Departure, attempt: Attempt) -> float:
    return max(0.0, attempt.ended_unix - notice.unix)


def _said(attempt: Attempt) -> tuple[str, ...]:
    return tuple([line for line in attempt.output if line.strip()][-LINES_TOLD:])


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"

"""Evaluation of a rehearsed job: its result, what is at fault, the next step, and the cost of a departure. Pure.

A fault decides the result. A warning makes departures more expensive than necessary. `unchecked` lists what was not tested.
"""

import re
from itertools import pairwise
from math import inf
from statistics import median
from typing import Literal

import msgspec

from mesh.rehearsal.observations import Attempt, Checkpoint, Departure, DirectoryState, Observations, Run

Result = Literal[
    "resumes", "does not resume", "never checkpoints", "fails by itself", "inconclusive", "resumes inexactly"
]
EXIT_CODES: dict[Result, int] = {
    "resumes": 0,
    "does not resume": 10,
    "never checkpoints": 11,
    "fails by itself": 12,
    "inconclusive": 13,
    "resumes inexactly": 14,
}
LINES_TOLD = 5
BUSY = 2.0  # programs that want each CPU: the nodes then run at half their speed (own choice)
AT_ONCE_S = 2.0  # a guest that ignores the notice has been killed by then (own choice)
NARROW_SHARE = (
    0.7  # of its grace that a save may take; on a slower disk or network, more would be too long (own choice)
)
UNDISTURBED_FIRST = "first make it run undisturbed"
LOOK_AT_RESUME = (
    "at its start, load the checkpoint that $MESH_RESUME names, unless that is empty (docs/reference/job-contract.md; "
    "with mesh/job.py: `resume_path()`)"
)


Kind = Literal["resumed", "started over", "unknown"]
BEGINNING_S = 0.5  # seconds of a fresh start's first steps: ten times the polling interval (own choice)
CLEAR_SHARE, CLEAR_S = (
    0.2,
    1.0,
)  # of a whole run's time that checkpoints must have saved to show in the remaining time (own choice)


class Restart(msgspec.Struct, frozen=True):
    """The start of an attempt. `why` completes "attempt N ...". `step`: the first step it reported."""

    kind: Kind
    why: str = ""
    step: int | None = None
    attempt: int = -1


KILLED = 137  # 128 + SIGKILL


class Cost(msgspec.Struct, frozen=True):
    """The cost of a departure, in seconds.

    `left_s`: from the notice until the job had saved, copied and left. `lost_s`, `lost_steps`: work in no checkpoint. `back_s`:
    until it ran elsewhere. `first_step_s`: from then until it reported a step.
    """

    kind: Literal["noticed", "sudden"]
    attempt: int  # that the departure ended
    left_s: float | None
    lost_s: float
    lost_steps: int | None
    back_s: float
    first_step_s: float | None

    @property
    def total_s(self) -> float:
        return (self.left_s or 0.0) + self.lost_s + self.back_s


class Checkpoints(msgspec.Struct, frozen=True):
    """Size of the newest checkpoint, and seconds between two commits."""

    bytes: int
    interval_s: float | None


What = Literal["published files", "last checkpoint", "checkpoint of the same name", "last line of output"]


class Compared(msgspec.Struct, frozen=True):
    """A comparison of two runs. `differs`: names that differ, of `count`; for lines of output, both lines."""

    what: What
    count: int
    differs: tuple[str, ...] = ()
    name: str = ""

    @property
    def equal(self) -> bool:
        return not self.differs


class Finding(msgspec.Struct, frozen=True):
    level: Literal["fault", "warning", "note"]
    text: str
    next: str = ""
    said: tuple[str, ...] = ()  # output of the job at that time


class Evaluation(msgspec.Struct, frozen=True):
    result: Result
    findings: tuple[Finding, ...] = ()
    restarts: tuple[Restart, ...] = ()
    costs: tuple[Cost, ...] = ()
    checkpoints: Checkpoints | None = None
    compared: tuple[Compared, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.result]


def evaluate(observations: Observations) -> Evaluation:
    run = observations.disturbed
    reference = observations.undisturbed[0] if observations.undisturbed else None
    whole_s = reference.ran_s if reference is not None and reference.done else None
    departures = [departure for departure in (run.noticed, run.sudden) if departure is not None]
    restarts = tuple(
        evaluate_restart(run, departure.attempt + 1, whole_s)
        for departure in departures
        if (attempt := run.attempt(departure.attempt + 1)) is not None and attempt.running_unix
    )
    compared = tuple(compare(run, reference)) if reference is not None else ()
    result, reason = _result(observations, restarts, compared)
    return Evaluation(
        result=result,
        findings=(*([reason] if reason is not None else []), *_warnings(observations, compared, result)),
        restarts=restarts,
        costs=tuple(costs(run)),
        checkpoints=checkpoints(run),
        compared=compared,
        unchecked=tuple(_unchecked(observations, compared)) if result in {"resumes", "resumes inexactly"} else (),
    )


def _result(
    observations: Observations, restarts: tuple[Restart, ...], compared: tuple[Compared, ...]
) -> tuple[Result, Finding | None]:
    run = observations.disturbed
    first = run.attempt(0)
    if first is None or not first.running_unix:
        text = f"it did not start: {run.detail or 'no node accepted it'}"
        return "fails by itself", Finding("fault", text, "correct the command or its options")
    if run.noticed is None and run.outcome == "failed":
        text = f"{run.detail or 'it failed'} after {_seconds(run.ran_s)}, before the first departure"
        return "fails by itself", Finding("fault", text, UNDISTURBED_FIRST, _said(run.attempts[-1]))
    if not run.checkpoints:
        return "never checkpoints", _never(observations, first)
    if run.noticed is None:
        return "inconclusive", _too_short(observations)
    failure = _failure(observations)
    if failure is not None:
        return failure
    left = run.attempt(run.noticed.attempt)
    if left is None or (run.outcome and not restarts):
        return "inconclusive", _too_short(observations)  # it ended at that moment
    if run.ended_in_grace:
        after = _seconds(_departure_s(run.noticed, left))
        text = f"it ended {after} after its notice, within its grace, without moving"
        return "inconclusive", Finding("fault", text, "rehearse a longer job, or use a shorter --grace")
    anew = next((restart for restart in restarts if restart.kind == "started over"), None)
    if anew is not None:
        return "does not resume", Finding("fault", f"it starts over: attempt {anew.attempt} {anew.why}", LOOK_AT_RESUME)
    if not any(restart.kind == "resumed" for restart in restarts):
        return "inconclusive", _silent(observations, restarts)
    if results_differ([*compared]) and _is_steady(observations):
        return "resumes inexactly", Finding(
            "fault",
            "two undisturbed runs wrote equal files, and the disturbed run wrote others: its checkpoint lacks a part of its "
            "state",
            "save and load everything that a step depends on: optimizer, learning rate schedule, random generators, position in "
            "the data",
        )
    return "resumes", None


def _failure(observations: Observations) -> tuple[Result, Finding] | None:
    """Return the fault if an attempt failed after the first departure."""
    run = observations.disturbed
    failed = next((attempt for attempt in run.attempts if attempt.failed), None)
    if failed is None or run.noticed is None:
        return None
    if failed.number == run.noticed.attempt:
        after = _seconds(_departure_s(run.noticed, failed))
        text = f"it fails at a notice: exit {failed.exit_code} {after} after SIGTERM"
        then = "save, then exit with 85 (or 0): docs/reference/job-contract.md"
        return "does not resume", Finding("fault", text, then, _said(failed))
    alone = observations.undisturbed[0] if observations.undisturbed else None
    if alone is not None and alone.outcome == "failed":
        text = f"it fails undisturbed too, with exit {alone.exit_code}"
        return "fails by itself", Finding("fault", text, UNDISTURBED_FIRST, _said(alone.attempts[-1]))
    after = _seconds(failed.ended_unix - failed.running_unix)
    text = f"it fails after a restart: attempt {failed.number} ended with exit {failed.exit_code} after {after}"
    kept = run.resumed_by(failed.number)
    given = (
        f"$MESH_RESUME was {observations.directory}/{kept.resume}".rstrip("/")
        if kept is not None
        else "it had a checkpoint"
    )
    then = f"{given}, in a new directory on another node: run it by hand with such a checkpoint"
    return "does not resume", Finding("fault", text, then, _said(failed))


def _never(observations: Observations, first: Attempt) -> Finding:
    run = observations.disturbed
    ended = f"it ended after {_seconds(run.ran_s)}" if run.outcome else f"it ran for {_seconds(observations.limit_s)}"
    why, then = _why_no_checkpoint(
        observations.directory_state, observations.directory, observations.mode, bool(run.outcome)
    )
    return Finding("fault", f"{ended} and committed no checkpoint: {why}", then)


def _too_short(observations: Observations) -> Finding:
    run = observations.disturbed
    if observations.limit_hit:
        return Finding(
            "fault",
            f"the limit of {_seconds(observations.limit_s)} passed before the first departure",
            "raise --limit",
        )
    text = f"it ended after {_seconds(run.ran_s)}, before the first departure"
    return Finding("fault", text, "rehearse a longer job, or let it write checkpoints more often")


def _silent(observations: Observations, restarts: tuple[Restart, ...]) -> Finding:
    run = observations.disturbed
    again = run.attempt(run.noticed.attempt + 1) if run.noticed is not None else None
    if not restarts or again is None:
        text = f"it had not started again when the limit of {_seconds(observations.limit_s)} had passed"
        return Finding("fault", text + (f" ({run.detail})" if run.detail else ""), "raise --limit")
    why = "it reports no steps, and the names of its checkpoints have no increasing numbers"
    if again.steps:
        why = "it was disturbed too soon after its start, or the limit was too short"
    text = f"nothing shows whether it resumed or started over: {why}"
    return Finding(
        "fault",
        text,
        "let it report steps (docs/reference/job-contract.md, Progress), disturb it later with --after or --checkpoints, "
        "or raise --limit so that it can end",
        again.output[:LINES_TOLD],
    )


def _warnings(observations: Observations, compared: tuple[Compared, ...], result: Result) -> list[Finding]:
    run, found = observations.disturbed, []
    noticed = run.attempt(run.noticed.attempt) if run.noticed is not None else None
    if run.noticed is not None and noticed is not None and noticed.ended_unix and not noticed.failed:
        at_notice = _at_notice(run, run.noticed, noticed)
        found += [at_notice] if at_notice is not None else []
    if run.torn:
        found.append(
            Finding(
                "warning",
                f"{', '.join(run.torn[:LINES_TOLD])} changed after it looked complete: a departure at that moment "
                "would keep a damaged checkpoint",
                "write under a name that begins with a dot, then rename it (--ckpt-mode rename); or write COMMITTED last "
                "(--ckpt-mode marker)",
            )
        )
    if observations.directory_state.trouble and run.checkpoints:
        found.append(Finding("warning", f"a checkpoint could not be stored: {observations.directory_state.trouble}"))
    if result == "resumes" and results_differ([*compared]):
        found.append(_differs(observations))
    if result in {"inconclusive", "never checkpoints"} and observations.load >= BUSY:
        found.append(
            Finding(
                "note",
                f"this machine is busy: {observations.load:.0f} programs want each of its CPUs, so its nodes see and store "
                "late what the job does, and a short job is over by then",
                "rehearse it again when the machine has less to do, or rehearse a longer job, with a higher --limit",
            )
        )
    return found


def _at_notice(run: Run, notice: Departure, attempt: Attempt) -> Finding | None:
    left_s, grace = _departure_s(notice, attempt), notice.grace_s or 0.0
    interval = checkpoints(run)
    risk = (
        f"up to {_seconds(interval.interval_s)} of work"
        if interval and interval.interval_s
        else "the work since its last checkpoint"
    )
    handle = "catch SIGTERM, save, exit with 85 (docs/reference/job-contract.md; with mesh/job.py: `should_yield()`)"
    if attempt.exit_code == KILLED and left_s >= min(grace, AT_ONCE_S):
        if saved_at_notice(run) or notice.writing:
            what = f"it was still writing {notice.writing[0]}" if notice.writing else "it had saved, but did not exit"
            return Finding(
                "warning",
                f"it was killed when its grace of {_seconds(grace)} ended: {what}; each departure loses {risk}",
                "raise --grace if a save takes longer; exit with 85 as soon as it is done",
            )
        caught = (
            "it catches SIGTERM, but did not exit"
            if notice.catches_term
            else "it reacts to neither SIGTERM nor notice.json"
        )
        return Finding(
            "warning",
            f"it was killed when its grace of {_seconds(grace)} ended: {caught}; each departure loses {risk}",
            f"{handle}; raise --grace if a step and a save take longer",
        )
    if attempt.exit_code == KILLED:
        return Finding(
            "warning", f"it does not catch SIGTERM: each departure loses {risk}, even one with notice", handle
        )
    if not saved_at_notice(run):
        text = f"it leaves at a notice without saving: each departure loses {risk}"
        return Finding("warning", text, "save before it exits")
    if left_s > NARROW_SHARE * grace:
        text = f"it took {_seconds(left_s)} of its grace of {_seconds(grace)} to save and copy"
        return Finding("warning", text, "raise --grace, or save less")
    return None


def _differs(observations: Observations) -> Finding:
    if len(observations.undisturbed) > 1 and all(run.done for run in observations.undisturbed[:2]):
        return Finding(
            "note",
            "it is not deterministic: two undisturbed runs differ from each other too, so the difference of the disturbed run is "
            "no fault",
            "compare what matters, such as losses: the last lines are below",
        )
    return Finding(
        "warning",
        "the disturbed run wrote other files than the undisturbed one: either it is not deterministic, which is no fault if the "
        "losses agree, or its checkpoint lacks a part of its state",
        "raise --limit, so that a second undisturbed run can show which",
    )


def _is_steady(observations: Observations) -> bool:
    """Return whether two undisturbed runs wrote equal files."""
    return (
        len(observations.undisturbed) > 1
        and not results_differ(compare(*observations.undisturbed[:2]))
        and observations.undisturbed[1].done
    )


def _unchecked(observations: Observations, compared: tuple[Compared, ...]) -> list[str]:
    run, found = observations.disturbed, []
    why = "it ended before that" if run.outcome else "the limit had passed"
    if run.sudden is None:
        found.append(f"a sudden death of its host: {why}")
    elif (again := run.attempt(run.sudden.attempt + 1)) is None or not again.running_unix:
        found.append(f"whether it resumes after a sudden death: {why}")
    elif not run.of_attempt(again.number) and not run.done:
        found.append(f"that it writes checkpoints again after a sudden death: {why}")
    if not run.done:
        found.append("that it ends: the rehearsal did not wait for it")
    if not compared:
        found.append("its result compared with an undisturbed run")
    elif all(found.what == "checkpoint of the same name" for found in compared):
        found.append("its final result compared with an undisturbed run: only one checkpoint of both was compared")
    return found


def _departure_s(notice: Departure, attempt: Attempt) -> float:
    return max(0.0, attempt.ended_unix - notice.unix)


def _said(attempt: Attempt) -> tuple[str, ...]:
    return tuple([line for line in attempt.output if line.strip()][-LINES_TOLD:])


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


# --- restarts


def evaluate_restart(run: Run, number: int, whole_s: float | None = None) -> Restart:
    """Judge whether an attempt resumed or started over, from what the job shows.

    In this order: the first step that it reports, the first checkpoint that it writes, the time until its end. `whole_s` is the
    duration of an undisturbed run, if known.
    """
    first, attempt, kept = run.attempt(0), run.attempt(number), run.resumed_by(number)
    if first is None or attempt is None or kept is None:
        return Restart("unknown", attempt=number)
    step = attempt.steps[0][1] if attempt.steps else None
    found = _by_steps(run, first, attempt, kept)
    if found is None:
        found = _by_names(first, attempt, kept)
    if found is None and whole_s is not None:
        found = _by_time(run, attempt, whole_s)
    return msgspec.structs.replace(found or Restart("unknown", step=step), attempt=number)


def step_of(run: Run, checkpoint: Checkpoint) -> int | None:
    """Return the step that the job had reported when it wrote this checkpoint."""
    author = run.attempt(checkpoint.attempt)
    return author.step_at(checkpoint.written_unix) if author is not None else None


def _by_steps(run: Run, first: Attempt, attempt: Attempt, kept: Checkpoint) -> Restart | None:
    if not first.steps or not attempt.steps:
        return None
    seen, step = attempt.steps[0]
    # The step of a fresh start after the same time, in case the first reading came late.
    until = max(first.steps[0][0], first.running_unix + seen - attempt.running_unix) + BEGINNING_S
    beginning = max(step for at, step in first.steps if at <= until)
    if step > beginning:
        return Restart("resumed", f"resumed at step {step}", step)
    saved = step_of(run, kept)
    if saved is not None and saved > beginning:
        why = f"began at step {step}, like a fresh start, although its checkpoint was written at step {saved}"
        return Restart("started over", why, step)
    return None


def _by_names(first: Attempt, attempt: Attempt, kept: Checkpoint) -> Restart | None:
    shape, number = _numbered(kept.resume)
    if not number:
        return None
    early = [found for kind, found in map(_numbered, first.written) if kind == shape]
    late = [(name, found) for name in attempt.written for kind, found in [_numbered(name)] if kind == shape]
    if not early or not late:
        return None
    name, found = late[0]
    step = attempt.steps[0][1] if attempt.steps else None
    if found <= min(early):
        why = f"wrote {name} first, like a fresh start, although it was given {kept.resume}"
        return Restart("started over", why, step) if found < number else None
    return Restart("resumed", f"wrote {name} after {kept.resume}", step)


def _by_time(run: Run, attempt: Attempt, whole_s: float) -> Restart | None:
    """Compare the time of the last attempt with that of an undisturbed run, less the work that checkpoints had saved."""
    if attempt is not run.attempts[-1] or not run.done or not attempt.running_unix:
        return None
    saved_s = 0.0
    for before in run.attempts[:-1]:
        commits = run.of_attempt(before.number)
        if commits:
            saved_s += max(0.0, commits[-1].written_unix - before.running_unix)
    if saved_s < max(CLEAR_S, CLEAR_SHARE * whole_s):
        return None
    took_s = attempt.ended_unix - attempt.running_unix
    text = f"took {took_s:.1f} s until its end; an undisturbed run takes {whole_s:.1f} s"
    if took_s > whole_s - saved_s / 2:
        return Restart("started over", f"{text}, although its checkpoints had saved {saved_s:.1f} s of work")
    return Restart("resumed", text)


def _numbered(name: str) -> tuple[str, tuple[int, ...]]:
    """Split `epoch=3-step=400.ckpt` into its shape and its numbers."""
    return re.sub(r"\d+", "#", name), tuple(int(digits) for digits in re.findall(r"\d+", name))


# --- costs


def costs(run: Run) -> list[Cost]:
    found = [_cost(run, "noticed", run.noticed), _cost(run, "sudden", run.sudden)]
    return [cost for cost in found if cost is not None]


def saved_at_notice(run: Run) -> bool:
    """Return whether it wrote a checkpoint after its notice."""
    notice = run.noticed
    return notice is not None and any(c.written_unix >= notice.unix for c in run.of_attempt(notice.attempt))


def checkpoints(run: Run) -> Checkpoints | None:
    if not run.checkpoints:
        return None
    return Checkpoints(run.checkpoints[-1].bytes, interval_s(run))


def interval_s(run: Run) -> float | None:
    """Return the median time between checkpoints; with a single checkpoint, the time until it."""
    between, until_first = [], []
    for attempt in run.attempts:
        # A checkpoint made for the notice does not count.
        until = run.noticed.unix if run.noticed is not None and attempt.number == run.noticed.attempt else inf
        found = [checkpoint for checkpoint in run.of_attempt(attempt.number) if checkpoint.written_unix < until]
        between += [(b.written_unix - a.written_unix) / (b.seq - a.seq) for a, b in pairwise(found)]
        until_first += [found[0].written_unix - attempt.running_unix] if found else []
    gaps = [gap for gap in between if gap > 0] or [gap for gap in until_first if gap > 0]
    return median(gaps) if gaps else None


def _cost(run: Run, kind: Literal["noticed", "sudden"], departure: Departure | None) -> Cost | None:
    if departure is None:
        return None
    left, back = run.attempt(departure.attempt), run.attempt(departure.attempt + 1)
    kept = run.resumed_by(departure.attempt + 1)
    if left is None or back is None or kept is None or not back.running_unix:
        return None
    noticed = departure.grace_s is not None
    gone = left.ended_unix if noticed else departure.unix
    saved = noticed and saved_at_notice(run)
    # A job that saves and exits may report its last step after that; a killed job lost its last steps.
    reached = left.step_at(kept.written_unix if saved and left.exit_code != KILLED else gone)
    at = step_of(run, kept)
    lost_steps = None if reached is None or at is None else max(0, reached - at)
    return Cost(
        kind=kind,
        attempt=departure.attempt,
        left_s=max(0.0, gone - departure.unix) if noticed else None,
        lost_s=0.0 if saved else max(0.0, (departure.unix if noticed else gone) - kept.written_unix),
        lost_steps=lost_steps,
        back_s=max(0.0, back.running_unix - gone),
        first_step_s=max(0.0, back.steps[0][0] - back.running_unix) if back.steps else None,
    )


# --- comparison with an undisturbed run


def compare(one: Run, other: Run) -> list[Compared]:
    """Compare two runs: their results if both ended, else the newest checkpoint that both wrote under one name."""
    if not (one.done and other.done):
        name = common_checkpoint(one, other)
        if name is None:
            return []
        return [_files("checkpoint of the same name", _holding(one, name), _holding(other, name), name)]
    found = []
    if one.published is not None and other.published is not None and (one.published or other.published):
        found.append(_files("published files", one.published, other.published))
    if one.checkpoints and other.checkpoints:
        mine, theirs = (_entry(run.checkpoints[-1], run.checkpoints[-1].resume) for run in (one, other))
        found.append(_files("last checkpoint", mine, theirs))
    if one.last_line or other.last_line:
        same = one.last_line == other.last_line
        found.append(Compared("last line of output", 1, () if same else (one.last_line, other.last_line)))
    return found


def results_differ(compared: list[Compared]) -> bool:
    """Return whether files differ. Lines of output may contain times, so they do not count."""
    return any(not found.equal for found in compared if found.what != "last line of output")


def common_checkpoint(disturbed: Run, undisturbed: Run) -> str | None:
    """Return the newest entry that both runs wrote, the disturbed one after its move. Names without a number do not count."""
    late = disturbed.moved
    before = {_top(path) for checkpoint in disturbed.checkpoints if checkpoint not in late for path in checkpoint.files}
    theirs = {_top(path) for checkpoint in undisturbed.checkpoints for path in checkpoint.files}
    moved = [_top(path) for checkpoint in late for path in checkpoint.files]
    shared = [name for name in moved if name in theirs - before and any(character.isdigit() for character in name)]
    return shared[-1] if shared else None


def _entry(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """Return an entry's own files, without other entries of the checkpoint; all files, if it has no name."""
    return {path: digest for path, digest in checkpoint.files.items() if name in {"", _top(path)}}


def _holding(run: Run, name: str) -> dict[str, str]:
    return next(found for checkpoint in reversed(run.checkpoints) if (found := _entry(checkpoint, name)))


def _top(path: str) -> str:
    return path.partition("/")[0]


def _files(what: What, one: dict[str, str], other: dict[str, str], name: str = "") -> Compared:
    differs = [path for path in sorted({*one, *other}) if one.get(path) != other.get(path)]
    return Compared(what, len({*one, *other}), tuple(differs), name)


# --- no checkpoint

TOLD = 4
STABLE_S = 2.0  # the quiet that `--ckpt-mode stable` waits for (mesh/model/spec.py)
KEPT = "docs/reference/job-contract.md, Checkpoints"


def _why_no_checkpoint(state: DirectoryState, directory: str, mode: str, ended: bool) -> tuple[str, str]:
    """Return the reason, and what to do."""
    if state.trouble:
        return (
            f"it could not be stored: {state.trouble}",
            "check the free space of the temporary directory ($TMPDIR)",
        )
    if not state.entries:
        return _nothing_there(state, directory, ended)
    names = _listed([entry.name for entry in state.entries])
    unfinished = [entry.name for entry in state.entries if not entry.final]
    if len(unfinished) == len(state.entries) or (mode == "stable" and unfinished):
        return (
            f"in {directory} {_listed(unfinished)} looks unfinished by its name",
            f"rename it when it is complete, without a leading dot and without .tmp, .part, .partial, .incomplete ({KEPT})",
        )
    if mode == "marker":
        return (
            f"none of {names} in {directory} holds a file COMMITTED, which --ckpt-mode marker waits for",
            "write an empty file COMMITTED into it at the end, or use --ckpt-mode rename or stable",
        )
    if mode == "stable":
        return _never_quiet(state, directory)
    return f"{names} in {directory} came too late to be stored", "raise --limit, or rehearse a longer job"


def _nothing_there(state: DirectoryState, directory: str, ended: bool) -> tuple[str, str]:
    if state.outside:
        files = _listed([f"{path} ({size} bytes)" for path, size in state.outside])
        parent = state.outside[0][0].rpartition("/")[0]
        other = f"use --ckpt {parent}, or let it write" if parent else "let it write"
        return (
            f"{directory} stays empty, but it wrote {files} in its working directory",
            f"if that is the checkpoint: {other} to $MESH_CKPT_DIR",
        )
    later = "if its first checkpoint would come later, " + ("rehearse a longer job" if ended else "raise --limit")
    return (
        f"{directory} stays empty, and it wrote no other file in its working directory",
        f"if it writes to an absolute path, let it write to $MESH_CKPT_DIR; {later}",
    )


def _never_quiet(state: DirectoryState, directory: str) -> tuple[str, str]:
    names = _listed([entry.name for entry in state.entries])
    if state.open:
        return (
            f"a file in {directory} ({names}) stays open for writing",
            f"close it when it is complete; or write new files and rename them, with --ckpt-mode rename ({KEPT})",
        )
    newest = min(entry.age_s for entry in state.entries)
    if newest < STABLE_S:
        return (
            f"something in {directory} ({names}) changes more often than every {STABLE_S:g} s, "
            "and --ckpt-mode stable waits until nothing changes for that long",
            f"write new files under a temporary name and rename them, with --ckpt-mode rename ({KEPT})",
        )
    return f"{names} in {directory} came too late to be stored", "raise --limit"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return ", ".join(names[:TOLD]) + more

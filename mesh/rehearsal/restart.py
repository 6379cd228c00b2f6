"""Did an attempt go on from its checkpoint, or did it begin anew? Judged from what the job shows of itself.

In this order: the first step that it reports, the first checkpoint that it writes, the time that it takes to its end. A job that
shows none of them can do either; then that is said.
"""

import re
from typing import Literal

import msgspec

from mesh.rehearsal.facts import Attempt, Checkpoint, Play

Kind = Literal["resumed", "anew", "unknown"]
BEGINNING_S = 0.5  # a fresh start's first steps; ten times as long as between two looks; ours
CLEAR_SHARE, CLEAR_S = (
    0.2,
    1.0,
)  # of a whole run's time a checkpoint must have saved to show in the time of the rest; ours


class Restart(msgspec.Struct, frozen=True):
    """`why` completes "attempt N ...". `step`: the first one it reported."""

    kind: Kind
    why: str = ""
    step: int | None = None
    attempt: int = -1


def judge_restart(play: Play, number: int, whole_s: float | None = None) -> Restart:
    """`whole_s`: how long an undisturbed run takes, once that is known."""
    first, attempt, kept = play.attempt(0), play.attempt(number), play.resumed_by(number)
    if first is None or attempt is None or kept is None:
        return Restart("unknown", attempt=number)
    step = attempt.steps[0][1] if attempt.steps else None
    found = _by_steps(play, first, attempt, kept)
    if found is None:
        found = _by_names(first, attempt, kept)
    if found is None and whole_s is not None:
        found = _by_time(play, attempt, whole_s)
    return msgspec.structs.replace(found or Restart("unknown", step=step), attempt=number)


def step_of(play: Play, checkpoint: Checkpoint) -> int | None:
    """How far the job was, by its own report, when it wrote this."""
    author = play.attempt(checkpoint.attempt)
    return author.step_at(checkpoint.written_unix) if author is not None else None


def _by_steps(play: Play, first: Attempt, attempt: Attempt, kept: Checkpoint) -> Restart | None:
    if not first.steps or not attempt.steps:
        return None
    seen, step = attempt.steps[0]
    # As far as a fresh start comes in the time that had passed, should the first look have come late.
    until = max(first.steps[0][0], first.running_unix + seen - attempt.running_unix) + BEGINNING_S
    beginning = max(step for at, step in first.steps if at <= until)
    if step > beginning:
        return Restart("resumed", f"went on with step {step}", step)
    saved = step_of(play, kept)
    if saved is not None and saved > beginning:
        why = f"began with step {step}, as at a fresh start, though its checkpoint was written at step {saved}"
        return Restart("anew", why, step)
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
        why = f"wrote {name} as its first checkpoint, as at a fresh start, though it was given {kept.resume}"
        return Restart("anew", why, step) if found < number else None
    return Restart("resumed", f"went on to write {name} after {kept.resume}", step)


def _by_time(play: Play, attempt: Attempt, whole_s: float) -> Restart | None:
    """An attempt that came to the end took about the whole time, or about what its checkpoint had left of it."""
    if attempt is not play.attempts[-1] or not play.done or not attempt.running_unix:
        return None
    saved_s = 0.0
    for before in play.attempts[:-1]:
        commits = play.of_attempt(before.number)
        if commits:
            saved_s += max(0.0, commits[-1].written_unix - before.running_unix)
    if saved_s < max(CLEAR_S, CLEAR_SHARE * whole_s):
        return None
    took_s = attempt.ended_unix - attempt.running_unix
    words = f"took {took_s:.1f} s to its end, where an undisturbed run takes {whole_s:.1f} s in all"
    if took_s > whole_s - saved_s / 2:
        return Restart("anew", f"{words}, though its checkpoints had saved {saved_s:.1f} s of work")
    return Restart("resumed", words)


def _numbered(name: str) -> tuple[str, tuple[int, ...]]:
    """`epoch=3-step=400.ckpt` as its shape and its numbers."""
    return re.sub(r"\d+", "#", name), tuple(int(digits) for digits in re.findall(r"\d+", name))

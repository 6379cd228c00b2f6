"""Evaluation of a rehearsal from its observations: results, diagnoses and costs."""

from typing import Any

import msgspec
import pytest

from mesh.rehearsal.evaluation import (
    EXIT_CODES,
    Evaluation,
    common_checkpoint,
    compare,
    costs,
    evaluate,
    evaluate_restart,
    interval_s,
    results_differ,
)
from mesh.rehearsal.observations import Attempt, Checkpoint, Departure, DirectoryState, Entry, Observations, Run

PACE_S = 0.1
BEGUN = 1000.0
KILLED, LEFT_ITSELF = 137, 85


def steps(since: float, first: int, last: int) -> tuple[tuple[float, int], ...]:
    return tuple((since + (step - first) * PACE_S, step) for step in range(first, last + 1))


def attempt(number: int, since: float, first: int, last: int, reason: str, code: int | None = None) -> Attempt:
    """Return an attempt that runs 10 steps per second and writes a checkpoint at every tenth step."""
    names = tuple(f"step-{step}" for step in range(first, last + 1) if step % 10 == 0)
    ended = since + (last - first) * PACE_S
    return Attempt(number, f"node{number + 1}", since, ended, code, reason, steps(since, first, last), names)


def checkpoint(seq: int, number: int, step: int, written: float, **digests: str) -> Checkpoint:
    return Checkpoint(seq, number, written + 0.3, written, 100, f"step-{step}", digests or {f"step-{step}": f"d{step}"})


def good(**changes: Any) -> Run:
    """Return a run with a saved notice at step 25, a kill at step 47 after the checkpoint of step 40, and 100 steps."""
    run = Run(
        attempts=(
            attempt(0, BEGUN, 1, 25, "vacated: its owner took the machine back", LEFT_ITSELF),
            attempt(1, BEGUN + 4, 26, 47, "node lost"),
            attempt(2, BEGUN + 12, 41, 100, "done", 0),
        ),
        checkpoints=(
            checkpoint(1, 0, 10, BEGUN + 0.9),
            checkpoint(2, 0, 20, BEGUN + 1.9),
            checkpoint(3, 0, 25, BEGUN + 2.4),
            checkpoint(4, 1, 30, BEGUN + 4.4),
            checkpoint(5, 1, 40, BEGUN + 5.4),
            checkpoint(6, 2, 100, BEGUN + 17.9),
        ),
        noticed=Departure(0, BEGUN + 2.3, 30.0, True),
        sudden=Departure(1, BEGUN + 6.1),
        outcome="done",
        exit_code=0,
        published={"weights": "w"},
    )
    return msgspec.structs.replace(run, **changes)


def alone(**changes: Any) -> Run:
    run = Run(
        attempts=(attempt(0, BEGUN + 30, 1, 100, "done", 0),),
        checkpoints=(checkpoint(1, 0, 10, BEGUN + 30.9), checkpoint(10, 0, 100, BEGUN + 39.9)),
        outcome="done",
        exit_code=0,
        published={"weights": "w"},
    )
    return msgspec.structs.replace(run, **changes)


def evaluated(disturbed: Run, *undisturbed: Run, **others: Any) -> Evaluation:
    return evaluate(Observations("ckpts", others.pop("mode", "rename"), disturbed, undisturbed, limit_s=60, **others))


def changed(run: Run, number: int, **changes: Any) -> Run:
    """Return the run with one attempt changed."""
    attempts = tuple(msgspec.structs.replace(a, **changes) if a.number == number else a for a in run.attempts)
    return msgspec.structs.replace(run, attempts=attempts)


def only(evaluation: Evaluation) -> tuple[str, str, str]:
    (finding,) = evaluation.findings
    return finding.level, finding.text, finding.next


def test_job_that_resumes_has_no_findings() -> None:
    evaluation = evaluated(good(), alone())
    assert evaluation.result == "resumes" and evaluation.exit_code == 0
    assert evaluation.findings == () and evaluation.unchecked == ()
    assert [restart.kind for restart in evaluation.restarts] == ["resumed", "resumed"]
    assert {found.what: found.equal for found in evaluation.compared} == {
        "published files": True,
        "last checkpoint": True,
    }


def test_cost_of_departures() -> None:
    noticed, sudden = costs(good())
    assert noticed.left_s == pytest.approx(0.1) and noticed.lost_s == 0 and noticed.lost_steps == 0
    assert noticed.back_s == pytest.approx(1.6)
    assert sudden.left_s is None and sudden.lost_s == pytest.approx(0.7) and sudden.lost_steps == 7
    assert sudden.back_s == pytest.approx(5.9) and sudden.total_s == pytest.approx(6.6)
    assert interval_s(good()) == pytest.approx(1.0), "a save for a notice must not count towards the interval"


def test_restart_from_zero_is_detected_by_steps_names_or_time() -> None:
    anew = changed(good(sudden=None, outcome=""), 1, steps=steps(BEGUN + 4, 1, 20), written=("step-10", "step-20"))
    evaluation = evaluated(anew)
    assert evaluation.result == "does not resume" and evaluation.exit_code == 10
    assert "attempt 1 began at step 1, like a fresh start" in evaluation.findings[0].text
    assert "MESH_RESUME" in evaluation.findings[0].next
    silent = changed(changed(anew, 0, steps=()), 1, steps=())
    assert "wrote step-10 first" in evaluate_restart(silent, 1).why
    unnamed = good(
        attempts=tuple(msgspec.structs.replace(a, steps=(), written=()) for a in good().attempts),
        checkpoints=tuple(msgspec.structs.replace(c, resume="") for c in good().checkpoints),
    )
    assert evaluate_restart(unnamed, 2).kind == "unknown"
    # The checkpoint held 4 s of work; the last attempt took 6 s.
    assert evaluate_restart(unnamed, 2, whole_s=9.9).kind == "resumed"
    assert evaluate_restart(unnamed, 2, whole_s=6.2).kind == "started over"
    assert evaluate_restart(unnamed, 2, whole_s=30.0).kind == "unknown", "too little work was saved for a verdict"


def test_late_first_reading_does_not_hide_a_restart_from_zero() -> None:
    """The first reading comes after 2 s, when the job has reached step 21 again."""
    late = changed(good(sudden=None, outcome=""), 1, steps=steps(BEGUN + 6, 21, 40), written=())
    assert evaluate_restart(late, 1).kind == "unknown"


def test_job_that_reports_only_whole_epochs() -> None:
    def epochs(first: int, saved: int) -> Run:
        one = Attempt(0, "node1", BEGUN, BEGUN + 10, 137, "vacated: x", ((BEGUN + 5, 1),), ())
        two = Attempt(1, "node2", BEGUN + 12, 0.0, None, "", ((BEGUN + 17, first),), ())
        kept = Checkpoint(1, 0, BEGUN + 6, BEGUN + 5 + saved, 1, "", {})
        return Run((one, two), (kept,), Departure(0, BEGUN + 9, 30.0, False))

    assert evaluate_restart(epochs(2, 1), 1).kind == "resumed"
    assert evaluate_restart(epochs(1, 1), 1).kind == "unknown", "a repeated report does not show a repeated epoch"


def test_failures_are_attributed_to_start_notice_or_restart() -> None:
    crash = changed(good(sudden=None, outcome="failed"), 1, reason="failed (exit 1)", exit_code=1, output=("KeyError",))
    evaluation = evaluated(crash)
    assert evaluation.result == "does not resume" and "attempt 1 ended with exit 1" in evaluation.findings[0].text
    assert evaluation.findings[0].said == ("KeyError",) and "ckpts/step-25" in evaluation.findings[0].next
    broken = changed(alone(outcome="failed", exit_code=1), 0, reason="failed (exit 1)", exit_code=1)
    assert evaluated(crash, broken).result == "fails by itself"
    assert evaluated(crash, alone()).result == "does not resume"
    at_notice = changed(good(attempts=good().attempts[:1], sudden=None, outcome="failed"), 0, reason="failed (exit 1)")
    evaluation = evaluated(at_notice)
    assert evaluation.result == "does not resume" and "fails at a notice" in evaluation.findings[0].text
    assert "85" in evaluation.findings[0].next
    early = Run(good().attempts[:1], outcome="failed", detail="failed (exit 3)", exit_code=3)
    assert evaluated(early).result == "fails by itself" and "exit 3" in evaluated(early).findings[0].text
    assert evaluated(Run(detail="failed (command 'x' is not on this node's PATH)")).exit_code == 12


def test_job_that_ends_too_soon_is_inconclusive() -> None:
    quick = good(attempts=good().attempts[:1], noticed=None, sudden=None)
    assert evaluated(quick).result == "inconclusive" and "a longer job" in only(evaluated(quick))[2]
    assert "--limit" in only(evaluated(good(noticed=None, outcome=""), limit_hit=True))[2]
    just_then = good(attempts=good().attempts[:1], sudden=None)
    assert evaluated(just_then).result == "inconclusive" and "a longer job" in only(evaluated(just_then))[2]
    stuck = good(attempts=good().attempts[:1], sudden=None, outcome="", detail="nobody can take it")
    assert evaluated(stuck).exit_code == 13 and "nobody can take it" in only(evaluated(stuck))[1]


def test_job_that_requests_another_attempt_is_evaluated() -> None:
    """Exit code 85 without a notice adds an attempt, so later attempts have higher numbers."""
    first = attempt(0, BEGUN - 3, 1, 9, "checkpointed", LEFT_ITSELF)
    later = tuple(msgspec.structs.replace(a, number=a.number + 1) for a in good().attempts)
    kept = tuple(msgspec.structs.replace(c, attempt=c.attempt + 1) for c in good().checkpoints)
    notice, death = Departure(1, BEGUN + 2.3, 30.0, True), Departure(2, BEGUN + 6.1)
    evaluation = evaluated(good(attempts=(first, *later), checkpoints=kept, noticed=notice, sudden=death), alone())
    assert evaluation.result == "resumes" and evaluation.findings == ()
    assert [cost.attempt for cost in evaluation.costs] == [1, 2] and evaluation.costs[1].lost_steps == 7


def test_job_that_ends_within_its_grace_is_inconclusive() -> None:
    ended = changed(good(attempts=good().attempts[:2], sudden=None), 0, exit_code=0)
    ended = msgspec.structs.replace(ended, checkpoints=ended.checkpoints[:3])
    evaluation = evaluated(ended)
    assert evaluation.result == "inconclusive" and "within its grace" in evaluation.findings[0].text
    moved = msgspec.structs.replace(ended, checkpoints=good().checkpoints[:5])
    assert evaluated(moved).result == "resumes", "exit code 0 after a save must also be accepted"


def test_job_that_reports_nothing_is_inconclusive() -> None:
    silent = good(
        attempts=tuple(msgspec.structs.replace(a, steps=(), written=(), output=("hello",)) for a in good().attempts),
        outcome="",
    )
    evaluation = evaluated(silent)
    assert evaluation.result == "inconclusive" and "reports no steps" in evaluation.findings[0].text
    assert evaluation.findings[0].said == ("hello",) and "Progress" in evaluation.findings[0].next


@pytest.mark.parametrize(("load", "told"), [(0.9, 1), (7.4, 2)])
def test_busy_machine_is_named_where_it_may_be_why_nothing_shows(load: float, told: int) -> None:
    quick = good(attempts=good().attempts[:1], noticed=None, sudden=None, outcome="done")
    evaluation = evaluated(quick, load=load)
    assert evaluation.result == "inconclusive" and len(evaluation.findings) == told
    assert told == 1 or "7 programs want each of its CPUs" in evaluation.findings[1].text
    assert evaluated(good(), alone(), load=load).findings == (), "a clear result needs no excuse"


NOTHING = ("stays empty", "absolute path")


@pytest.mark.parametrize(
    ("mode", "state", "words"),
    [
        ("rename", DirectoryState(), NOTHING),
        ("rename", DirectoryState(outside=(("out/model.pt", 9),)), ("out/model.pt (9 bytes)", "--ckpt out")),
        ("rename", DirectoryState(outside=(("model.pt", 9),)), ("model.pt (9 bytes)", "MESH_CKPT_DIR")),
        ("rename", DirectoryState((Entry("a.tmp", False, False, 1.0),)), ("a.tmp", "rename it")),
        ("marker", DirectoryState((Entry("a", True, False, 1.0),)), ("COMMITTED", "at the end")),
        (
            "stable",
            DirectoryState((Entry("a", True, False, 0.4),)),
            ("more often than every 2 s", "--ckpt-mode rename"),
        ),
        ("stable", DirectoryState((Entry("a", True, False, 9.0),), open=True), ("open for writing", "close it")),
        ("stable", DirectoryState((Entry("a", True, False, 9.0), Entry(".b", False, False, 1.0))), (".b", "rename it")),
        ("stable", DirectoryState((Entry("a", True, False, 9.0),)), ("too late", "--limit")),
        ("rename", DirectoryState((Entry("a", True, False, 0.1),)), ("too late", "--limit")),
        ("rename", DirectoryState((Entry("a", True, False, 1.0),), trouble="disk full"), ("disk full", "TMPDIR")),
    ],
)
def test_reason_for_a_missing_checkpoint(mode: str, state: DirectoryState, words: tuple[str, str]) -> None:
    run = good(checkpoints=(), noticed=None, sudden=None, outcome="", attempts=good().attempts[:1])
    evaluation = evaluated(run, mode=mode, directory_state=state)
    assert evaluation.result == "never checkpoints" and evaluation.exit_code == 11
    level, text, then = only(evaluation)
    assert level == "fault" and words[0] in text and words[1] in then


def at_notice(**changes: Any) -> Run:
    """Return the run without a save at the notice."""
    kept = tuple(c for c in good().checkpoints if c.seq != 3)
    return changed(good(checkpoints=kept), 0, **changes)


@pytest.mark.parametrize(
    ("run", "text", "then"),
    [
        (at_notice(exit_code=KILLED), "does not catch SIGTERM: each departure loses up to 1.0 s", "exit with 85"),
        (at_notice(exit_code=LEFT_ITSELF), "without saving", "save before"),
        (at_notice(exit_code=KILLED, ended_unix=BEGUN + 32.4), "it catches SIGTERM, but", "--grace"),
        (
            msgspec.structs.replace(
                at_notice(exit_code=KILLED, ended_unix=BEGUN + 32.4), noticed=Departure(0, BEGUN + 2.3, 30.0, False)
            ),
            "neither SIGTERM nor notice.json",
            "exit with 85",
        ),
        (
            msgspec.structs.replace(
                at_notice(exit_code=KILLED, ended_unix=BEGUN + 32.4),
                noticed=Departure(0, BEGUN + 2.3, 30.0, True, (".step-25.tmp",)),
            ),
            "still writing .step-25.tmp",
            "raise --grace",
        ),
        (
            changed(good(), 0, exit_code=KILLED, ended_unix=BEGUN + 32.4),
            "it had saved, but did not exit",
            "exit with 85",
        ),
        (changed(good(), 0, ended_unix=BEGUN + 26), "24 s of its grace of 30 s", "--grace"),
        (good(torn=("step-10",)), "step-10 changed after", "rename"),
    ],
)
def test_expensive_departures_are_warnings(run: Run, text: str, then: str) -> None:
    evaluation = evaluated(run, alone())
    assert evaluation.result == "resumes" and evaluation.exit_code == 0
    assert only(evaluation)[0] == "warning" and text in only(evaluation)[1] and then in only(evaluation)[2]


def test_different_results_are_a_fault_only_if_undisturbed_runs_agree() -> None:
    other = good(published={"weights": "x"})
    assert evaluated(other, alone(), alone()).exit_code == EXIT_CODES["resumes inexactly"] == 14
    assert "optimizer" in evaluated(other, alone(), alone()).findings[0].next
    lots = evaluated(other, alone(), alone(published={"weights": "y"}))
    assert lots.result == "resumes" and only(lots)[0] == "note" and "not deterministic" in only(lots)[1]
    once = evaluated(other, alone())
    assert once.result == "resumes" and only(once)[0] == "warning" and "--limit" in only(once)[2]
    lines = changed(good(), 2, output=("took 3 s",)), changed(alone(), 0, output=("took 4 s",))
    assert evaluated(*lines).findings == (), "lines may differ by a time"
    assert not results_differ(compare(*lines)) and compare(*lines)[-1].differs == ("took 3 s", "took 4 s")


def test_long_jobs_are_compared_at_a_checkpoint_of_the_same_name() -> None:
    cut = good(outcome="", published=None)
    shared = alone(outcome="", checkpoints=(checkpoint(3, 0, 30, BEGUN + 33), checkpoint(4, 0, 40, BEGUN + 34)))
    assert common_checkpoint(cut, shared) == "step-40"
    evaluation = evaluated(cut, shared)
    assert [(found.what, found.name, found.equal) for found in evaluation.compared] == [
        ("checkpoint of the same name", "step-40", True)
    ]
    assert evaluation.result == "resumes" and len(evaluation.unchecked) == 2
    early = alone(outcome="", checkpoints=(checkpoint(1, 0, 10, BEGUN + 31),))
    assert common_checkpoint(cut, early) is None, "a checkpoint from before the first departure must not be compared"


def test_unchecked_parts_are_listed() -> None:
    short = good(attempts=good().attempts[:2], checkpoints=good().checkpoints[:5], sudden=None)
    assert any("a sudden death" in text for text in evaluated(short, alone()).unchecked)
    unseen = good(attempts=good().attempts[:2], checkpoints=good().checkpoints[:5], outcome="")
    assert any("whether it resumes after a sudden death" in text for text in evaluated(unseen).unchecked)
    failed = good(attempts=good().attempts[:2], checkpoints=good().checkpoints[:5], outcome="failed")
    why = [text for text in evaluated(failed).unchecked if "whether it resumes" in text]
    assert why == ["whether it resumes after a sudden death: it ended before that"], "there was no limit"
    idle = good(checkpoints=good().checkpoints[:5], outcome="")
    assert any("writes checkpoints again" in text for text in evaluated(idle).unchecked)

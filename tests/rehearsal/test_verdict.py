"""The judgement of a rehearsal, from facts alone: each verdict, each diagnosis, each cost."""

from typing import Any

import msgspec
import pytest

from mesh.rehearsal.comparison import common_checkpoint, compare, results_differ
from mesh.rehearsal.cost import costs, interval_s
from mesh.rehearsal.facts import Attempt, Checkpoint, Departure, Entry, Facts, Play, Sight
from mesh.rehearsal.restart import judge_restart
from mesh.rehearsal.verdict import EXIT_CODES, Judgement, judge

PACE_S = 0.1
BEGUN = 1000.0
KILLED, LEFT_ITSELF = 137, 85


def steps(since: float, first: int, last: int) -> tuple[tuple[float, int], ...]:
    return tuple((since + (step - first) * PACE_S, step) for step in range(first, last + 1))


def attempt(number: int, since: float, first: int, last: int, reason: str, code: int | None = None) -> Attempt:
    """One that does a step each tenth of a second and writes a checkpoint at each tenth step."""
    names = tuple(f"step-{step}" for step in range(first, last + 1) if step % 10 == 0)
    ended = since + (last - first) * PACE_S
    return Attempt(number, f"node{number + 1}", since, ended, code, reason, steps(since, first, last), names)


def checkpoint(seq: int, number: int, step: int, written: float, **digests: str) -> Checkpoint:
    return Checkpoint(seq, number, written + 0.3, written, 100, f"step-{step}", digests or {f"step-{step}": f"d{step}"})


def good(**changes: Any) -> Play:
    """Notice at step 25, saved; killed at step 47 after the checkpoint of step 40; done at step 100."""
    play = Play(
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
    return msgspec.structs.replace(play, **changes)


def alone(**changes: Any) -> Play:
    play = Play(
        attempts=(attempt(0, BEGUN + 30, 1, 100, "done", 0),),
        checkpoints=(checkpoint(1, 0, 10, BEGUN + 30.9), checkpoint(10, 0, 100, BEGUN + 39.9)),
        outcome="done",
        exit_code=0,
        published={"weights": "w"},
    )
    return msgspec.structs.replace(play, **changes)


def judged(disturbed: Play, *undisturbed: Play, **others: Any) -> Judgement:
    return judge(Facts("ckpts", others.pop("mode", "rename"), disturbed, undisturbed, limit_s=60, **others))


def changed(play: Play, number: int, **changes: Any) -> Play:
    """The play with one attempt changed."""
    attempts = tuple(msgspec.structs.replace(a, **changes) if a.number == number else a for a in play.attempts)
    return msgspec.structs.replace(play, attempts=attempts)


def only(judgement: Judgement) -> tuple[str, str, str]:
    (finding,) = judgement.findings
    return finding.level, finding.text, finding.next


def test_a_good_job_resumes_and_nothing_is_said_against_it() -> None:
    judgement = judged(good(), alone())
    assert judgement.verdict == "resumes" and judgement.exit_code == 0
    assert judgement.findings == () and judgement.unchecked == ()
    assert [restart.kind for restart in judgement.restarts] == ["resumed", "resumed"]
    assert {found.what: found.equal for found in judgement.compared} == {
        "published files": True,
        "last checkpoint": True,
    }


def test_what_departures_cost() -> None:
    noticed, sudden = costs(good())
    assert noticed.left_s == pytest.approx(0.1) and noticed.lost_s == 0 and noticed.lost_steps == 0
    assert noticed.back_s == pytest.approx(1.6)
    assert sudden.left_s is None and sudden.lost_s == pytest.approx(0.7) and sudden.lost_steps == 7
    assert sudden.back_s == pytest.approx(5.9) and sudden.total_s == pytest.approx(6.6)
    assert interval_s(good()) == pytest.approx(1.0), "what was saved for the notice is no habit"


def test_a_job_that_begins_anew_is_found_by_its_steps_its_names_or_its_time() -> None:
    anew = changed(good(sudden=None, outcome=""), 1, steps=steps(BEGUN + 4, 1, 20), written=("step-10", "step-20"))
    judgement = judged(anew)
    assert judgement.verdict == "does not resume" and judgement.exit_code == 10
    assert "attempt 1 began with step 1, as at a fresh start" in judgement.findings[0].text
    assert "MESH_RESUME" in judgement.findings[0].next
    silent = changed(changed(anew, 0, steps=()), 1, steps=())
    assert "wrote step-10 as its first checkpoint" in judge_restart(silent, 1).why
    unnamed = good(
        attempts=tuple(msgspec.structs.replace(a, steps=(), written=()) for a in good().attempts),
        checkpoints=tuple(msgspec.structs.replace(c, resume="") for c in good().checkpoints),
    )
    assert judge_restart(unnamed, 2).kind == "unknown"
    # Four seconds' work was in the checkpoint; the last attempt took six.
    assert judge_restart(unnamed, 2, whole_s=9.9).kind == "resumed"
    assert judge_restart(unnamed, 2, whole_s=6.2).kind == "anew"
    assert judge_restart(unnamed, 2, whole_s=30.0).kind == "unknown", "too little was saved to show"


def test_a_late_look_at_a_job_that_began_anew_does_not_take_it_for_a_good_one() -> None:
    """Nobody looked for two seconds: it had come to step 21 again by then."""
    late = changed(good(sudden=None, outcome=""), 1, steps=steps(BEGUN + 6, 21, 40), written=())
    assert judge_restart(late, 1).kind == "unknown"


def test_a_job_that_reports_whole_epochs_only() -> None:
    def epochs(first: int, saved: int) -> Play:
        one = Attempt(0, "node1", BEGUN, BEGUN + 10, 137, "vacated: x", ((BEGUN + 5, 1),), ())
        two = Attempt(1, "node2", BEGUN + 12, 0.0, None, "", ((BEGUN + 17, first),), ())
        kept = Checkpoint(1, 0, BEGUN + 6, BEGUN + 5 + saved, 1, "", {})
        return Play((one, two), (kept,), Departure(0, BEGUN + 9, 30.0, False))

    assert judge_restart(epochs(2, 1), 1).kind == "resumed"
    assert judge_restart(epochs(1, 1), 1).kind == "unknown", "told again after the restart, or done again?"


def test_a_failure_is_laid_at_the_right_door() -> None:
    crash = changed(good(sudden=None, outcome="failed"), 1, reason="failed (exit 1)", exit_code=1, output=("KeyError",))
    judgement = judged(crash)
    assert judgement.verdict == "does not resume" and "attempt 1 ended with exit 1" in judgement.findings[0].text
    assert judgement.findings[0].said == ("KeyError",) and "ckpts/step-25" in judgement.findings[0].next
    broken = changed(alone(outcome="failed", exit_code=1), 0, reason="failed (exit 1)", exit_code=1)
    assert judged(crash, broken).verdict == "fails by itself"
    assert judged(crash, alone()).verdict == "does not resume"
    at_notice = changed(good(attempts=good().attempts[:1], sudden=None, outcome="failed"), 0, reason="failed (exit 1)")
    judgement = judged(at_notice)
    assert judgement.verdict == "does not resume" and "fails at a notice" in judgement.findings[0].text
    assert "85" in judgement.findings[0].next
    early = Play(good().attempts[:1], outcome="failed", detail="failed (exit 3)", exit_code=3)
    assert judged(early).verdict == "fails by itself" and "exit 3" in judged(early).findings[0].text
    assert judged(Play(detail="failed (command 'x' is not on this node's PATH)")).exit_code == 12


def test_a_job_that_was_over_too_soon_cannot_be_judged() -> None:
    quick = good(attempts=good().attempts[:1], noticed=None, sudden=None)
    assert judged(quick).verdict == "cannot tell" and "more to do" in only(judged(quick))[2]
    assert "--limit" in only(judged(good(noticed=None, outcome=""), limit_hit=True))[2]
    just_then = good(attempts=good().attempts[:1], sudden=None)
    assert judged(just_then).verdict == "cannot tell" and "more to do" in only(judged(just_then))[2]
    stuck = good(attempts=good().attempts[:1], sudden=None, outcome="", detail="nobody can take it")
    assert judged(stuck).exit_code == 13 and "nobody can take it" in only(judged(stuck))[1]


def test_a_job_that_asks_to_be_run_again_by_itself_is_judged_alike() -> None:
    """Exit 85 without a notice: each attempt has a higher number than it would have had."""
    first = attempt(0, BEGUN - 3, 1, 9, "checkpointed", LEFT_ITSELF)
    later = tuple(msgspec.structs.replace(a, number=a.number + 1) for a in good().attempts)
    kept = tuple(msgspec.structs.replace(c, attempt=c.attempt + 1) for c in good().checkpoints)
    notice, death = Departure(1, BEGUN + 2.3, 30.0, True), Departure(2, BEGUN + 6.1)
    judgement = judged(good(attempts=(first, *later), checkpoints=kept, noticed=notice, sudden=death), alone())
    assert judgement.verdict == "resumes" and judgement.findings == ()
    assert [cost.attempt for cost in judgement.costs] == [1, 2] and judgement.costs[1].lost_steps == 7


def test_one_that_ends_within_its_grace_has_shown_nothing() -> None:
    ended = changed(good(attempts=good().attempts[:2], sudden=None), 0, exit_code=0)
    ended = msgspec.structs.replace(ended, checkpoints=ended.checkpoints[:3])
    judgement = judged(ended)
    assert judgement.verdict == "cannot tell" and "within its grace" in judgement.findings[0].text
    moved = msgspec.structs.replace(ended, checkpoints=good().checkpoints[:5])
    assert judged(moved).verdict == "resumes", "to save and to exit with 0 is good too"


def test_one_that_shows_nothing_is_not_called_good() -> None:
    silent = good(
        attempts=tuple(msgspec.structs.replace(a, steps=(), written=(), output=("hello",)) for a in good().attempts),
        outcome="",
    )
    judgement = judged(silent)
    assert judgement.verdict == "cannot tell" and "reports no steps" in judgement.findings[0].text
    assert judgement.findings[0].said == ("hello",) and "Progress" in judgement.findings[0].next


NOTHING = ("stays empty", "absolute path")


@pytest.mark.parametrize(
    ("mode", "sight", "words"),
    [
        ("rename", Sight(), NOTHING),
        ("rename", Sight(strays=(("out/model.pt", 9),)), ("out/model.pt (9 bytes)", "--ckpt out")),
        ("rename", Sight(strays=(("model.pt", 9),)), ("model.pt (9 bytes)", "MESH_CKPT_DIR")),
        ("rename", Sight((Entry("a.tmp", False, False, 1.0),)), ("a.tmp", "rename it")),
        ("marker", Sight((Entry("a", True, False, 1.0),)), ("COMMITTED", "last of all")),
        ("stable", Sight((Entry("a", True, False, 0.4),)), ("more often than every 2 s", "--ckpt-mode rename")),
        ("stable", Sight((Entry("a", True, False, 9.0),), open=True), ("open for writing", "close it")),
        ("stable", Sight((Entry("a", True, False, 9.0), Entry(".b", False, False, 1.0))), (".b", "rename it")),
        ("stable", Sight((Entry("a", True, False, 9.0),)), ("too late", "--limit")),
        ("rename", Sight((Entry("a", True, False, 0.1),)), ("too late", "--limit")),
        ("rename", Sight((Entry("a", True, False, 1.0),), trouble="disk full"), ("disk full", "TMPDIR")),
    ],
)
def test_why_no_checkpoint_came(mode: str, sight: Sight, words: tuple[str, str]) -> None:
    play = good(checkpoints=(), noticed=None, sudden=None, outcome="", attempts=good().attempts[:1])
    judgement = judged(play, mode=mode, sight=sight)
    assert judgement.verdict == "never checkpoints" and judgement.exit_code == 11
    level, text, then = only(judgement)
    assert level == "fault" and words[0] in text and words[1] in then


def at_notice(**changes: Any) -> Play:
    """The play, but nothing was saved at the notice."""
    kept = tuple(c for c in good().checkpoints if c.seq != 3)
    return changed(good(checkpoints=kept), 0, **changes)


@pytest.mark.parametrize(
    ("play", "text", "then"),
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
        (changed(good(), 0, exit_code=KILLED, ended_unix=BEGUN + 32.4), "it had saved, and ran on", "exit with 85"),
        (changed(good(), 0, ended_unix=BEGUN + 26), "24 s of its grace of 30 s", "--grace"),
        (good(torn=("step-10",)), "step-10 changed after", "rename"),
    ],
)
def test_what_makes_departures_dearer_is_a_warning(play: Play, text: str, then: str) -> None:
    judgement = judged(play, alone())
    assert judgement.verdict == "resumes" and judgement.exit_code == 0
    assert only(judgement)[0] == "warning" and text in only(judgement)[1] and then in only(judgement)[2]


def test_other_results_are_a_fault_only_where_undisturbed_runs_agree() -> None:
    other = good(published={"weights": "x"})
    assert judged(other, alone(), alone()).exit_code == EXIT_CODES["resumes inexactly"] == 14
    assert "optimizer" in judged(other, alone(), alone()).findings[0].next
    lots = judged(other, alone(), alone(published={"weights": "y"}))
    assert lots.verdict == "resumes" and only(lots)[0] == "note" and "not deterministic" in only(lots)[1]
    once = judged(other, alone())
    assert once.verdict == "resumes" and only(once)[0] == "warning" and "--limit" in only(once)[2]
    lines = changed(good(), 2, output=("took 3 s",)), changed(alone(), 0, output=("took 4 s",))
    assert judged(*lines).findings == (), "a line may tell the time"
    assert not results_differ(compare(*lines)) and compare(*lines)[-1].differs == ("took 3 s", "took 4 s")


def test_long_jobs_are_compared_at_a_checkpoint_of_the_same_name() -> None:
    cut = good(outcome="", published=None)
    shared = alone(outcome="", checkpoints=(checkpoint(3, 0, 30, BEGUN + 33), checkpoint(4, 0, 40, BEGUN + 34)))
    assert common_checkpoint(cut, shared) == "step-40"
    judgement = judged(cut, shared)
    assert [(found.what, found.name, found.equal) for found in judgement.compared] == [
        ("checkpoint of the same name", "step-40", True)
    ]
    assert judgement.verdict == "resumes" and len(judgement.unchecked) == 2
    early = alone(outcome="", checkpoints=(checkpoint(1, 0, 10, BEGUN + 31),))
    assert common_checkpoint(cut, early) is None, "that one was written before the first departure"


def test_what_was_not_played_is_said() -> None:
    short = good(attempts=good().attempts[:2], checkpoints=good().checkpoints[:5], sudden=None)
    assert any("a sudden death" in text for text in judged(short, alone()).unchecked)
    unseen = good(attempts=good().attempts[:2], checkpoints=good().checkpoints[:5], outcome="")
    assert any("whether it goes on after a sudden death" in text for text in judged(unseen).unchecked)
    idle = good(checkpoints=good().checkpoints[:5], outcome="")
    assert any("writes checkpoints again" in text for text in judged(idle).unchecked)

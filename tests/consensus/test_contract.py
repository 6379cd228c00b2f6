"""Verdicts on guest exits, and decoding of the progress that a guest reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.consensus.contract import ExitFacts, Progress, Verdict, decode_progress, describe_exit, judge


def facts(code: int, **changes: object) -> ExitFacts:
    fields: dict[str, object] = {
        "oom": False,
        "vacating": False,
        "has_checkpoints": True,
        "forced_done": False,
        "on_exit_0": "resume",
    }
    return ExitFacts(code=code, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given_facts", "verdict"),
    [
        (facts(0), "done"),
        (facts(0, vacating=True), "vacated"),
        (facts(0, vacating=True, on_exit_0="done"), "done"),
        (facts(0, vacating=True, has_checkpoints=False), "done"),
        (facts(0, vacating=True, forced_done=True), "done"),
        (facts(85), "checkpointed"),
        (facts(85, vacating=True), "vacated"),
        (facts(75), "elsewhere"),
        (facts(75, vacating=True), "elsewhere"),
        (facts(137, vacating=True), "vacated"),
        (facts(143, vacating=True), "vacated"),
        (facts(137), "failed"),
        (facts(143), "failed"),
        (facts(1), "failed"),
        (facts(1, vacating=True), "failed"),
        (facts(1, forced_done=True), "failed"),
        (facts(139, vacating=True), "failed"),
    ],
)
def test_exit_facts_give_the_documented_verdict(given_facts: ExitFacts, verdict: Verdict) -> None:
    assert judge(given_facts) == verdict


@given(st.integers(0, 255), st.booleans(), st.booleans())
def test_only_a_failure_can_spend_the_error_budget(code: int, vacating: bool, checkpoints: bool) -> None:
    verdict = judge(facts(code, vacating=vacating, has_checkpoints=checkpoints))
    assert (verdict == "failed") <= (code not in {0, 75, 85})


def test_exit_descriptions_name_the_cause() -> None:
    assert "137, killed for memory" in describe_exit(137, oom=True)
    assert describe_exit(1, oom=True).startswith("exit 1, one of its processes was killed for memory")
    assert describe_exit(139, oom=False) == "exit 139, as after SIGSEGV"
    assert describe_exit(143, oom=False) == "exit 143, as after SIGTERM"
    assert describe_exit(3, oom=False) == "exit 3"


def test_code_that_a_program_may_have_chosen_is_no_fact() -> None:
    assert describe_exit(127, oom=False).startswith("exit 127, as of a shell that does not find a command")
    assert describe_exit(126, oom=False).startswith("exit 126, as of a shell that cannot execute")
    assert describe_exit(137, oom=False) == "exit 137, as after SIGKILL; its node saw no kill for memory"
    assert describe_exit(255, oom=False) == "exit 255", "there is no signal 127"


@given(st.binary(max_size=300))
def test_hostile_progress_decodes_to_none_or_valid_values(data: bytes) -> None:
    progress = decode_progress(data)
    assert progress is None or (progress.step >= 0 and progress.of >= 0)


def test_progress_decodes_steps_and_rejects_nonsense() -> None:
    assert decode_progress(b'{"step": 3, "of": 9, "loss": 0.5}') == Progress(3, 9)
    assert decode_progress(b'{"step": 3}') == Progress(3, 0)
    for nonsense in (
        b'{"step": -1}',
        b'{"step": 1e400}',
        b'{"step": "3"}',
        b"[" * 5000,
        b'{"step": 1' + b" " * 5000 + b"}",
    ):
        assert decode_progress(nonsense) is None

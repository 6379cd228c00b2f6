"""Texts of jobs for people."""

from typing import Any

import pytest

from mesh.model.events import Event, describe
from mesh.util.text import job_text, state_text


@pytest.mark.parametrize(
    ("state", "detail", "short", "sentence"),
    [
        ("failed", "failed (exit 1)", "failed (exit 1)", "job 7kq2abcd failed (exit 1)"),
        (
            "failed",
            "its deadline has passed",
            "failed: its deadline has passed",
            "job 7kq2abcd failed: its deadline has passed",
        ),
        ("cancelled", "", "cancelled", "job 7kq2abcd was cancelled"),
        ("done", "", "done", "job 7kq2abcd is done"),
        ("pending", "no node fits", "pending: no node fits", "job 7kq2abcd is pending: no node fits"),
    ],
)
def test_state_is_not_said_twice(state: str, detail: str, short: str, sentence: str) -> None:
    job: dict[str, Any] = {"job": "7kq2abcdefgh", "array": None, "node": None, "state": state, "detail": detail}
    assert (state_text(job), job_text(job)) == (short, sentence)


def test_end_of_a_job_is_not_said_twice() -> None:
    def end(reason: str) -> str:
        return describe(Event(b"j" * 16, 0, unix_ms=0, kind="end", new="failed", reason=reason), "")

    assert end("failed (exit 1)") == "the job is over: failed (exit 1)"
    assert end("its deadline has passed") == "the job is over: failed (its deadline has passed)"

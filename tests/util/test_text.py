"""Texts of jobs for people."""

import time
from typing import Any

import pytest

from mesh.model.events import Event, describe
from mesh.util.byte_text import amount, part
from mesh.util.text import (
    COST,
    cost_cells,
    doing,
    hours,
    job_text,
    plural,
    saving_words,
    short_id,
    standby_text,
    state_text,
    waiting_text,
    when,
)


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


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        ([], "pending: node2: failed it"),
        (
            ["could not start: no uv", "could not start: no wheels"],
            "pending: node2: failed it; its last attempt could not start: no wheels",
        ),
        (["could not start: no uv", "its node left"], "pending: node2: failed it"),
    ],
)
def test_job_that_waits_says_why_it_could_not_start(reasons: list[str], text: str) -> None:
    attempts = [{"reason": reason} for reason in reasons]
    assert waiting_text({"state": "pending", "detail": "node2: failed it", "attempts": attempts}) == text


def test_end_of_a_job_is_not_said_twice() -> None:
    def end(reason: str) -> str:
        return describe(Event(b"j" * 16, 0, unix_ms=0, kind="end", new="failed", reason=reason), "")

    assert end("failed (exit 1)") == "the job is over: failed (exit 1)"
    assert end("its deadline has passed") == "the job is over: failed (its deadline has passed)"


def test_counts_and_amounts_have_their_words() -> None:
    assert [plural(count, "guest") for count in (0, 1, 2)] == ["0 guests", "1 guest", "2 guests"]
    assert plural(2, "process", "processes") == "2 processes" and plural(1, "process", "processes") == "1 process"
    assert [amount(count) for count in (0, 1023, 1024, 1536 * 2**20, 2**50)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "1024.0 TiB",
    ]
    assert part(3 * 2**29, 3 * 2**30) == "1.5 of 3.0 GiB" and part(700, 800) == "700 of 800 bytes"
    assert part(2**20, 2**30) == "0.0 of 1.0 GiB" and part(5 * 2**30, 3 * 2**30) == "3.0 of 3.0 GiB"
    assert hours(12.34, 0) == "12.3" and hours(1, 0.25) == "1 + 0.25" and hours(1, 0.0005) == "1 + 0.0005"


def test_job_of_an_array_is_named_by_its_label() -> None:
    assert short_id({"job": "7kq2abcdefgh", "array": None}) == "7kq2abcd"
    assert short_id({"job": "7kq2abcdefgh", "array": {"array": "x3aaaaaabbbb", "label": "12"}}) == "x3aaaaaa_12"


def test_running_job_is_said_with_its_node_and_its_save() -> None:
    job: dict[str, Any] = {"job": "7kq2abcdefgh", "array": None, "node": "desk", "state": "running", "detail": ""}
    assert job_text(job) == "job 7kq2abcd is running on desk"
    assert job_text(job | {"detail": "saving"}) == "job 7kq2abcd is running on desk: saving"
    saving: dict[str, Any] = {"kind": "checkpoint", "seq": 4, "bytes": 0, "sent": 0, "nodes": 2}
    assert doing("has notice", saving) == "has notice; checkpoint 4 is being stored" and doing("", None) == ""
    saving |= {"bytes": 3 * 2**30, "sent": 2**30}
    assert saving_words(saving) == "checkpoint 4: 1.0 of 3.0 GiB sent to 2 nodes"
    assert saving_words(saving | {"kind": "result", "nodes": 1}) == "result: 1.0 of 3.0 GiB sent to 1 node"
    assert standby_text("den", True).endswith(", and has its last checkpoint")
    assert standby_text("den", False) == "den would take over if its node were lost"


def test_cost_of_a_guest_says_what_is_not_known() -> None:
    guest: dict[str, Any] = {"ran_s": 7200, "at_risk_s": 65, "leads": True, "save_s": 1.25, "ship_s": None}
    guest |= {"ship_bytes": 2**30, "chance": 0.954, "goes_to": "den", "loses": ""}
    assert cost_cells(guest) == ["2h", "1m5s", "1.2 s", "?", "1.0 GiB", "95%", "den", "nothing"]
    unknown = guest | {"leads": False, "save_s": None, "ship_s": 0.0, "ship_bytes": None, "chance": None}
    assert cost_cells(unknown | {"goes_to": "", "loses": "its last hour"}) == [
        "2h",
        "-",
        "?",
        "0.0 s",
        "?",
        "?",
        "-",
        "its last hour",
    ]
    assert len(COST) == len(cost_cells(guest))


def test_day_of_the_week_is_said_of_the_next_days_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.mktime((2026, 3, 2, 12, 0, 0, 0, 0, -1))  # a Monday
    monkeypatch.setattr(time, "time", lambda: now)
    assert when(now + 5 * 86_400) == "Sat 12:00" and when(now + 6.5 * 86_400) == "2026-03-09 00:00"

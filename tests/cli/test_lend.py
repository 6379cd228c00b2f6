"""Text output of the lending state."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mesh.cli import lend
from mesh.cli.nodes import _draw_status, _not_lent
from mesh.util.text import lend_lines

QUIET: dict[str, Any] = {"level": "lend", "why": "", "next_s": None}


def answer(**changes: Any) -> dict[str, Any]:
    bare: dict[str, Any] = {"barred": "", "paused": False, "paused_until_unix": 0}
    bare |= {"lending": True, "now": True, "guests": 2, "hours": "always", "hours_change_unix": None}
    seen: dict[str, Any] = {"typed_s": None, "typing_seen_by": [], "load": None, "machine": QUIET, "gpus": []}
    return {**bare, **seen, "problem": "", "warnings": [], **changes}


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as here:
        here.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def machine(level: str, next_s: float | None = None) -> dict[str, Any]:
    return {"level": level, "why": "its keyboard or mouse is in use", "next_s": next_s}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "lending"),
        ({"paused": True}, "lending paused (`mesh lend` ends that)"),
        (
            {"paused": True, "paused_until_unix": 4_000_000_000},
            "lending paused until 2096-10-02 07:06 (`mesh lend` ends that)",
        ),
        ({"now": False}, "not lent now: outside its hours"),
        ({"now": False, "hours_change_unix": 4e9}, "not lent now: outside its hours, lent again 2096-10-02 07:06"),
        ({"lending": False}, "not lending (`mesh lend`)"),
        ({"lending": False, "barred": "no role"}, "not lending: no role"),
        (
            {"now": False, "machine": machine("suspend", 100)},
            "not lent now: its keyboard or mouse is in use; guests stand still, and are asked to leave in 1m40s",
        ),
        (
            {"now": False, "machine": machine("suspend", 100), "guests": 0},
            "not lent now: its keyboard or mouse is in use",
        ),
        (
            {"now": False, "machine": machine("vacate", 50)},
            "not lent now: its keyboard or mouse is in use; guests are asked to leave; lent again in 50s if it stays quiet",
        ),
        (
            {"now": False, "machine": machine("calm", 50)},
            "not lent now: guests go on, new ones come in 50s; before: its keyboard or mouse is in use",
        ),
    ],
)
def test_lend_status_line(changes: dict[str, Any], line: str, utc: None) -> None:
    assert lend_lines(answer(**changes)) == [line]


def test_lend_status_has_lines_for_hours_typing_load_and_gpus() -> None:
    gpus = [
        {"index": 0, "withheld": True, "programs": [], **QUIET},
        {"index": 1, "withheld": False, "programs": [{"pid": 7, "name": "python"}], **machine("vacate")},
        {"index": 2, "withheld": False, "programs": [], **QUIET},
    ]
    lines = lend_lines(
        answer(hours="never", typed_s=12.0, typing_seen_by=["USB"], load=1.52, memory_wait=7.4, gpus=gpus)
    )
    assert lines[1:] == [
        "  hours: never",
        "  last typed 12s ago (seen by USB)",
        "  1.5 cores used by others than guests",
        "  others than guests wait for memory 7 % of the time",
        "  GPU 0: taken back (`mesh lend --gpu 0`)",
        "  GPU 1: its keyboard or mouse is in use; guests are asked to leave [python (7)]",
    ]


def test_lend_prints_warnings_and_sends_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def post(path: str, body: Any, **_: Any) -> dict[str, Any]:
        asked.append((path, body))
        return answer(warnings=["never lends: hours is never"])

    monkeypatch.setattr(lend, "client", lambda ctx: SimpleNamespace(post=post, get=lambda path: answer()))
    done = CliRunner().invoke(lend.lend, ["--hours", "never", "--hours", "Sat"])
    assert done.exit_code == 0 and "mesh: never lends: hours is never" in done.stderr
    CliRunner().invoke(lend.lend, [])
    assert asked == [("/v1/lend", {"on": True, "hours": ["never", "Sat"]}), ("/v1/lend", {"on": True, "hours": None})]
    assert CliRunner().invoke(lend.lend, ["--gpu", "1"]).output == "lending\n"
    assert asked[2:] == [("/v1/pause", {"paused": False, "gpu": "1"})]
    assert CliRunner().invoke(lend.lend, ["maybe"]).exit_code == 2 and len(asked) == 3


@pytest.mark.parametrize("problem", ["", "lending.json cannot be written: a restart forgets what you said"])
@pytest.mark.parametrize(
    ("command", "words"),
    [(lend.pause, "paused"), (lend.reclaim, "yours; there were no guests"), (lend.pause, "--json")],
)
def test_order_that_is_not_stored_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, command: Any, words: str, problem: str
) -> None:
    told = {
        "paused": True,
        "guests": [] if command is lend.reclaim else 0,
        "until_unix": 0,
        "reclaimed": [],
        "seconds": 1,
    }
    daemon = SimpleNamespace(post=lambda *asked, **how: {**told, "problem": problem})
    monkeypatch.setattr(lend, "client", lambda ctx: daemon)
    done = CliRunner().invoke(command, ["--json"] if words == "--json" else [])
    assert done.exit_code == bool(problem) and done.stderr == (f"mesh: {problem}\n" if problem else "")
    assert words == "--json" or done.stdout == f"{words}\n"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({}, "-"),
        ({"paused": False, "held_by": "owner", "back_unix": 0}, "-"),
        ({"paused": True, "held_by": "", "back_unix": 0}, "paused"),
        ({"paused": True, "held_by": "", "back_unix": 4_000_000_000}, "from 2096-10-02 07:06"),
        ({"paused": True, "held_by": "owner", "back_unix": 0}, "owner present"),
        ({"paused": True, "held_by": "hours", "back_unix": 0}, "outside hours"),
    ],
)
def test_nodes_gives_the_reason_for_not_lending(node: dict[str, Any], words: str, utc: None) -> None:
    assert _not_lent(node) == words
    assert _not_lent({"paused": True, "held_by": "hours", "back_unix": 1_800_000_000}).startswith("from ")


@pytest.mark.parametrize("changes", [{"now": False, "hours_change_unix": 4e9}, {"paused": True}, {"lending": False}])
def test_status_says_once_why_it_does_not_lend(
    changes: dict[str, Any], utc: None, capsys: pytest.CaptureFixture[str]
) -> None:
    lend = answer(**changes)
    status = {"nick": "desk", "node": "abc", "user": "ada", "mesh": "lab", "address": "10.0.0.1:7373", "alive": 1}
    status |= {"guests": [], "counters": {}, "engines": {}, "waiting": 0, "problems": {}, "open": False, "lend": lend}
    _draw_status({**status, "edge": {"off": True}})
    shown = capsys.readouterr().out
    assert f"10.0.0.1:7373, {lend_lines(lend)[0]}\n" in shown
    assert shown.count("lent now") + shown.count("lending") == 1

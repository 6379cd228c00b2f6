"""`mesh top`, driven by textual's pilot, with recorded answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from mesh.api.client import Client
from mesh.top import app as module
from mesh.top.answers import Source
from mesh.top.app import Confirmation, Help, Top
from mesh.top.job_page import JobPage
from mesh.top.widgets import TableWidget
from tests.top.recorded import Recorded, daemon

WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refresh each tenth of a second."""
    monkeypatch.setattr(module, "LOOK_S", 0.1)
    monkeypatch.delenv("NO_COLOR", raising=False)


@asynccontextmanager
async def opened(directory: Path, size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[Recorded, Top, Pilot[Any]]]:
    async with daemon(directory) as answering:
        top = Top(Source(Client(answering.socket_path)), lambda: "2 guests ended")
        async with top.run_test(size=size) as pilot:
            await until(pilot, lambda: "node2" in text(top), "the first answers of the daemon")
            yield answering, top, pilot


async def until(pilot: Pilot[Any], ready: Callable[[], Any], what: str) -> None:
    try:
        async with asyncio.timeout(WITHIN_S):
            while not ready():
                await pilot.pause(0.02)
    except TimeoutError:
        raise AssertionError(f"waited for {what}\n{text(pilot.app)}") from None


def text(top: Any) -> str:
    """Return the text on the screen."""
    return "\n".join(strip.text for strip in top.screen._compositor.render_strips())


def foot(top: Top) -> str:
    return text(top).split("\n")[-1]


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 12)])
async def test_screen_shows_all_panels_within_its_size(tmp_path: Path, size: tuple[int, int]) -> None:
    async with opened(tmp_path, size) as (_, top, pilot):
        await pilot.pause()
        lines = text(top).split("\n")
        assert len(lines) == size[1] and all(len(line) <= size[0] for line in lines)
        wanted = ["JOBS", "NODES"] if size[0] < 80 else ["GPU 0", "JOBS", "NODES", "SENDS TO", "EVENTS", "? help"]
        assert all(word in text(top) for word in [*wanted, "alive", "lending"]), text(top)


async def test_top_pauses_and_resumes_lending(tmp_path: Path) -> None:
    async with opened(tmp_path) as (answering, top, pilot):
        await pilot.press("p")
        await until(pilot, lambda: "PAUSED" in text(top) and "no new guests" in foot(top), "the pause to be shown")
        await pilot.press("u")
        await until(pilot, lambda: "PAUSED" not in text(top), "the end of the pause to be shown")
        assert answering.orders == [("/v1/pause", {"paused": True}), ("/v1/pause", {"paused": False})]


async def test_reclaim_shows_the_cost_and_asks_for_confirmation(tmp_path: Path) -> None:
    async with opened(tmp_path, (120, 30)) as (answering, top, pilot):
        for key in ("n", "escape", "q"):
            await pilot.press("r")
            await until(
                pilot,
                lambda: isinstance(top.screen, Confirmation) and "GOES TO" in text(top),
                "the question",
            )
            assert "AT RISK" in text(top) and "LOSES" in text(top)
            await pilot.press(key)
            await until(pilot, lambda: not isinstance(top.screen, Confirmation), "the question to close")
        assert answering.orders == [("/v1/reclaim", {"dry_run": True})] * 3, "no reclaim was sent"
        await pilot.press("r")
        await until(pilot, lambda: isinstance(top.screen, Confirmation), "the question to open again")
        await pilot.press("y")
        await until(pilot, lambda: "yours again after 1.2 s" in foot(top), "the report of the reclaim")
        assert answering.orders[-1] == ("/v1/reclaim", {})


async def test_reclaim_now_does_not_ask_and_needs_no_daemon(tmp_path: Path) -> None:
    async with opened(tmp_path) as (answering, top, pilot):
        await answering.stop()
        await pilot.press("R")
        await until(pilot, lambda: "2 guests ended" in foot(top), "the report of the reclaim")
        assert answering.orders == []


async def test_cancel_asks_for_confirmation_and_needs_own_job(tmp_path: Path) -> None:
    async with opened(tmp_path) as (answering, top, pilot):
        job = top.query_one("#jobs", TableWidget).cursor
        for key in ("n", "y"):
            await pilot.press("c")
            await until(pilot, lambda: isinstance(top.screen, Confirmation), "the question whether to cancel")
            assert answering.orders == []
            await pilot.press(key)
            await until(pilot, lambda: not isinstance(top.screen, Confirmation), "the question to close")
        await until(pilot, lambda: "is cancelling" in foot(top), "the report that the job is cancelling")
        assert answering.orders == [(f"/v1/jobs/{job}/cancel", {})]
        for row in answering.answers["/v1/jobs"]["jobs"]:
            row["user"] = "[red]bob\x1b[0m"
        await until(
            pilot, lambda: top.view.look and "bob" in top.view.look.jobs[0].user, "the next answers of the daemon"
        )
        await pilot.press("c")
        await until(pilot, lambda: "is [red]bob�[0m's, not yours" in foot(top), "the refusal to be shown")


async def test_top_shows_job_page(tmp_path: Path) -> None:
    async with opened(tmp_path, (100, 30)) as (answering, top, pilot):
        described = next(path for path in answering.answers if path.endswith("/describe"))
        widget = top.query_one("#jobs", TableWidget)
        while widget.cursor != described.split("/")[3]:
            await pilot.press("down")
        await pilot.press("enter")
        await until(
            pilot, lambda: isinstance(top.screen, JobPage) and "FROM STEP" in text(top), "the job's page to open"
        )
        last = answering.answers["log"].splitlines()[-1]
        await until(pilot, lambda: last in text(top), "the job's output to be shown")
        assert "ATTEMPT" in text(top) and "committed" in text(top) and "checkpoint " in text(top)
        page = top.screen
        assert isinstance(page, JobPage) and page.log_end is not None
        await pilot.press("escape")
        await until(pilot, lambda: top.screen is not page, "the job's page to close")
        await until(pilot, lambda: not page.log_end.under_way, "the reader of the job's output to end")


async def test_top_filters_and_sorts_nodes(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, top, pilot):
        nodes = top.query_one("#nodes", TableWidget)
        await pilot.press("slash", *"node3")
        await until(pilot, lambda: len(nodes.rows) == 1, "one node to be left")
        await pilot.press("enter")
        await until(pilot, lambda: "filter 'node3'" in text(top), "the filter to be shown")
        await pilot.press("escape")
        await until(pilot, lambda: len(nodes.rows) == 3, "all nodes to be shown")
        await pilot.press("s")
        await until(pilot, lambda: foot(top).startswith("sorted by state"), "the new order to be shown")
        await pilot.press("tab", "down", "enter")
        await until(pilot, lambda: len(nodes.rows) == 1, "only the chosen node to be left")


async def test_top_shows_help_and_quits(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, top, pilot):
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(top.screen, Help) and "reclaim now" in text(top), "the help to open")
        assert "…" not in text(top).partition("╭")[2].partition("╰")[0], "no help text is cut"
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(top.screen, Help), "the help to close")
        await pilot.press("r")
        await until(pilot, lambda: isinstance(top.screen, Confirmation), "the question whether to reclaim")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: top.return_code is not None, "the program to end")
        assert top.return_code == 0


async def test_top_reports_lost_daemon_and_reconnects(tmp_path: Path) -> None:
    async with opened(tmp_path) as (answering, top, pilot):
        await answering.stop()
        await until(pilot, lambda: "no daemon answers" in text(top), "the loss of the daemon to be shown")
        assert "no answer for" in text(top) and "node2" in text(top), "the last answers stay visible"
        await pilot.press("p")
        await until(pilot, lambda: "no daemon answers" in foot(top), "the refusal to be shown")
        answering.answers["/v1/status"]["pid"] += 1
        await answering.start()
        await until(pilot, lambda: "no answer" not in text(top), "the daemon to answer again")
        answering.answers["/v1/nodes"] = {"nodes": "rubbish"}
        await until(pilot, lambda: "is not understood" in text(top), "the broken answer to be shown")


async def test_hostile_names_are_drawn_harmlessly(tmp_path: Path) -> None:
    async with opened(tmp_path, (120, 30)) as (answering, top, pilot):
        evil = "[blink]\x1b[2J\u202e[/nope]" + "漢" * 500
        answering.answers["/v1/status"]["problems"] = {"x": evil}
        for row in answering.answers["/v1/nodes"]["nodes"]:
            row["nick"] = evil
        for row in answering.answers["/v1/jobs"]["jobs"]:
            row["name"] = row["command"] = row["detail"] = evil
        await until(pilot, lambda: "[blink]�[2J�[/nope]" in text(top), "the names to be shown")
        assert "\x1b" not in text(top) and "\u202e" not in text(top)


async def test_states_are_readable_without_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(tmp_path) as (answering, top, pilot):
        assert top.no_color
        answering.answers["/v1/nodes"]["nodes"][1]["state"] = "dead"
        await until(pilot, lambda: "dead" in text(top), "the node's state to be shown")

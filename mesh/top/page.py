"""One job's page in `mesh top`: what it is, its attempts, what happened to it, and the end of its output as it comes."""

import asyncio
import socket
import threading
from contextlib import suppress
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from mesh.api.errors import MeshError
from mesh.caller import in_thread
from mesh.client import opened
from mesh.harmless import harmless
from mesh.logtext import LogText, lines
from mesh.top.answers import Described, Source
from mesh.top.lines import Lines
from mesh.top.rows import ATTEMPT_COLUMNS, EVENT_COLUMNS, attempts, event_row, job_lines
from mesh.top.sheet import Sheet
from mesh.top.table import Cell, Column, Row, Table

DESCRIBE_S = 2.0  # every job's witnesses are asked for what they saw; ours
LOG_S = 0.25  # between two drawings of what came; ours
LOG_KEPT = 1 << 16  # characters of output, at its end; ours
LOG_LINES = 500
LOG_COLUMNS = (Column("OUTPUT", 400),)
KEYS = "Escape back   Tab next table   c cancel   r reclaim   q quit"


class Log:
    """The end of a job's output, followed by a thread of its own until `close`."""

    def __init__(self, source: Source, job: str) -> None:
        self._source, self._path = source, f"/v1/jobs/{job}/log?follow=1"
        self._cleaner, self._text = LogText(), ""
        self._connection: socket.socket | None = None
        self._closed = False
        self.changed = True
        self.problem = ""
        self._thread = threading.Thread(target=self._follow, daemon=True, name="follows a job's output")
        self._thread.start()

    def _follow(self) -> None:
        opened.set(self._opened)
        try:
            for piece in self._source.client.stream(self._path):
                self._text = (self._text + self._cleaner.feed(piece))[-LOG_KEPT:]
                self.changed = True
        except (MeshError, OSError) as error:
            if not self._closed:
                self.problem, self.changed = str(error), True

    def _opened(self, connection: socket.socket) -> None:
        self._connection = connection
        if self._closed:
            self.close()

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def lines(self) -> list[str]:
        return [harmless(line) for line in lines(self._text).removesuffix("\n").split("\n")[-LOG_LINES:]]


class JobPage(Screen[None]):
    CSS = """
    JobPage { background: ansi_default; layout: vertical; }
    JobPage #about { margin-bottom: 1; }
    JobPage #attempts { height: 1fr; }
    JobPage #told { height: 2fr; margin-top: 1; }
    JobPage #output { height: 3fr; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace", "back", "back")]

    def __init__(self, source: Source, job: str) -> None:
        super().__init__()
        self.source, self.job = source, job
        self.log_end: Log | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def compose(self) -> ComposeResult:
        yield Lines("about")
        yield Sheet("attempts", chooses=False)
        yield Sheet("told", chooses=False)
        yield Sheet("output", chooses=False)
        yield Lines("keys")

    def on_mount(self) -> None:
        self.query_one("#about", Lines).show([[Cell(f"asking about {harmless(self.job[:8])} ...", "dim")]])
        self.query_one("#keys", Lines).show([[Cell(KEYS, "dim")]])
        self.log_end = Log(self.source, self.job)
        self._tasks = [asyncio.create_task(work, name="job page") for work in (self._describe_on(), self._log_on())]
        self.query_one("#output", Sheet).focus()

    def on_unmount(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.log_end is not None:
            self.log_end.close()

    async def _describe_on(self) -> None:
        while True:
            try:
                described = await in_thread(lambda: self.source.describe(self.job))
                self._show(described)
            except MeshError as error:
                self.query_one("#about", Lines).show([[Cell(harmless(str(error)), "bad")]])
            await asyncio.sleep(DESCRIBE_S)

    def _show(self, described: Described) -> None:
        import time

        now = time.time()
        self.query_one("#about", Lines).show(job_lines(described, now))
        tried = attempts(described, now)
        self.query_one("#attempts", Sheet).show(Table("attempts", ATTEMPT_COLUMNS, tried, None, len(tried)))
        told = [event_row(event) for event in reversed(described.events)]
        self.query_one("#told", Sheet).show(Table("told", EVENT_COLUMNS, told, None, len(told)))

    async def _log_on(self) -> None:
        while True:
            log = self.log_end
            if log is not None and log.changed:
                log.changed = False
                sheet = self.query_one("#output", Sheet)
                at_end = sheet.scroll_offset.y >= sheet.max_scroll_y
                texts = log.lines() + ([f"({harmless(log.problem)})"] if log.problem else [])
                rows = [Row(str(place), (Cell(text),)) for place, text in enumerate(texts)]
                sheet.show(Table("output", LOG_COLUMNS, rows, None, len(rows)))
                if at_end:
                    sheet.scroll_end(animate=False)
            await asyncio.sleep(LOG_S)

    def action_back(self) -> None:
        self.dismiss()

"""A job's page in `mesh top`: its state, attempts, events, and the end of its output."""

import asyncio
import socket
import threading
from contextlib import suppress
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from mesh.api.async_client import in_thread
from mesh.api.client import opened
from mesh.api.schemas.jobs import Described
from mesh.top.answers import Source
from mesh.top.table import Cell, Column, Row, Table
from mesh.top.table_rows import ATTEMPT_COLUMNS, EVENT_COLUMNS, attempts, event_row, job_lines
from mesh.top.widgets import Lines, TableWidget
from mesh.util.errors import MeshError
from mesh.util.log_text import LogText, lines

DESCRIBE_S = 2.0  # each call asks the job's witnesses (own choice)
LOG_S = 0.25  # between two refreshes of the output (own choice)
LOG_KEPT = 1 << 16  # characters at the end of the output (own choice)
LOG_LINES = 500
LOG_COLUMNS = (Column("OUTPUT", 400),)
KEYS = "Escape back   Tab next table   c cancel   r reclaim   q quit"


class Log:
    """The end of a job's output, read by a thread until `close`."""

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
        return lines(self._text).removesuffix("\n").split("\n")[-LOG_LINES:]


class JobPage(Screen[None]):
    CSS = """
    JobPage { background: ansi_default; layout: vertical; }
    JobPage #about { margin-bottom: 1; }
    JobPage #attempts { height: 1fr; }
    JobPage #events { height: 2fr; margin-top: 1; }
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
        yield TableWidget("attempts", chooses=False)
        yield TableWidget("events", chooses=False)
        yield TableWidget("output", chooses=False)
        yield Lines("keys")

    def on_mount(self) -> None:
        self.query_one("#about", Lines).show([[Cell(f"asking about {self.job[:8]} ...", "dim")]])
        self.query_one("#keys", Lines).show([[Cell(KEYS, "dim")]])
        self.log_end = Log(self.source, self.job)
        self._tasks = [asyncio.create_task(work, name="job page") for work in (self._describe_on(), self._log_on())]
        self.query_one("#output", TableWidget).focus()

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
                self.query_one("#about", Lines).show([[Cell(str(error), "bad")]])
            await asyncio.sleep(DESCRIBE_S)

    def _show(self, described: Described) -> None:
        import time

        now = time.time()
        self.query_one("#about", Lines).show(job_lines(described, now))
        tried = attempts(described, now)
        self.query_one("#attempts", TableWidget).show(Table("attempts", ATTEMPT_COLUMNS, tried, None, len(tried)))
        events = [event_row(event) for event in reversed(described.events)]
        self.query_one("#events", TableWidget).show(Table("events", EVENT_COLUMNS, events, None, len(events)))

    async def _log_on(self) -> None:
        while True:
            log = self.log_end
            if log is not None and log.changed:
                log.changed = False
                widget = self.query_one("#output", TableWidget)
                at_end = widget.scroll_offset.y >= widget.max_scroll_y
                texts = log.lines() + ([f"({log.problem})"] if log.problem else [])
                rows = [Row(str(place), (Cell(text),)) for place, text in enumerate(texts)]
                widget.show(Table("output", LOG_COLUMNS, rows, None, len(rows)))
                if at_end:
                    widget.scroll_end(animate=False)
            await asyncio.sleep(LOG_S)

    def action_back(self) -> None:
        self.dismiss()

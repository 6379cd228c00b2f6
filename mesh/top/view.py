"""State of `mesh top`: sorted and filtered tables, totals, recent changes, rates of streams. No I/O.

The time comes with each `Look`, a set of answers of the daemon.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mesh.top.answers import Look
from mesh.top.table import GAP, Column, Row, Sorting, Table, age, titles_of, widths_of
from mesh.top.table_rows import (
    EVENT_COLUMNS,
    GPU_COLUMNS,
    JOB_COLUMNS,
    JOB_SORTINGS,
    NODE_COLUMNS,
    NODE_SORTINGS,
    TRANSFER_COLUMNS,
    event_row,
    gpu_row,
    gpus_free,
    job_row,
    node_row,
    slots_row,
    transfer_row,
)
from mesh.util.byte_text import amount
from mesh.util.duration import lasting
from mesh.util.sanitize import cut, sanitize
from mesh.util.text import OVER, plural

NEWS_S = 5.0  # for which a change is marked (own choice)
EVENTS_KEPT = 500  # own choice


class Totals(NamedTuple):
    nodes: int
    alive: int
    lending: int
    gpus: int
    gpus_free: float
    slots: int
    slots_free: int
    running: int
    waiting: int
    at_risk_s: float
    sending_bps: float

    @property
    def words(self) -> str:
        alive = f"{self.alive}/{plural(self.nodes, 'node')} alive, {self.lending} lend"
        free = [f"{self.gpus_free:.3g}/{self.gpus} GPUs"] if self.gpus else []
        free += [f"{self.slots_free}/{self.slots} slots"] if self.slots else []
        parts = [alive, f"free: {', '.join(free)}" if free else "nothing is lent"]
        parts.append(f"{plural(self.running, 'job')} running, {self.waiting} waiting")
        parts.append(f"at risk {lasting(self.at_risk_s)}")
        if self.sending_bps:
            parts.append(f"sends {amount(self.sending_bps)}/s")
        return " · ".join(parts)


class View:
    """The view of one daemon over many looks."""

    def __init__(self) -> None:
        self.look: Look | None = None
        self.events: deque[Row] = deque(maxlen=EVENTS_KEPT)  # the newest first
        self.filter = ""
        self.sortings = {"nodes": NODE_SORTINGS[0], "jobs": JOB_SORTINGS[0]}
        self._states: dict[str, tuple[object, ...]] = {}
        self._news: dict[str, float] = {}  # time of the last change, by key
        self._rates: dict[int, float] = {}
        self._rows: dict[str, tuple[object, Row]] = {}

    def take(self, look: Look) -> None:
        """Take in a new look."""
        before = self.look
        if before is None or before.status.pid != look.status.pid:
            self.events.clear()
            self._states, self._news = {}, {}
        first = not self._states
        states: dict[str, tuple[object, ...]] = {
            node.node: (node.state, node.lending, node.jobs) for node in look.nodes
        }
        for job in look.jobs:
            states[job.job] = (job.state, job.node, job.checkpoint.seq if job.checkpoint is not None else None)
        changed = {} if first else {key: look.at_unix for key, what in states.items() if self._states.get(key) != what}
        self._news = {key: at for key, at in (self._news | changed).items() if look.at_unix - at < NEWS_S}
        self._states = states
        self._rows = {key: row for key, row in self._rows.items() if key in states}
        self._rates = self._measured(before, look)
        self.events.extendleft(map(event_row, look.events))
        self.look = look

    def _measured(self, before: Look | None, look: Look) -> dict[int, float]:
        earlier = {one.id: one for one in before.transfers} if before is not None else {}
        rates = {}
        for one in look.transfers:
            was = earlier.get(one.id)
            if was is None or was.to != one.to or was.sent > one.sent or was.seconds >= one.seconds:
                rates[one.id] = one.sent / one.seconds if one.seconds > 0 else 0.0
            else:
                rates[one.id] = (one.sent - was.sent) / (one.seconds - was.seconds)
        return rates

    def totals(self) -> Totals:
        look = self.look
        assert look is not None
        lending = [node for node in look.nodes if node.lending and node.state == "alive"]
        going = [job for job in look.jobs if job.state not in OVER]
        return Totals(
            nodes=len(look.nodes),
            alive=sum(node.state == "alive" for node in look.nodes),
            lending=len(lending),
            gpus=sum(len(node.gpus) for node in lending),
            gpus_free=sum(map(gpus_free, lending)),
            slots=sum(node.slots for node in lending),
            slots_free=sum(node.slots_free for node in lending),
            running=sum(job.node is not None for job in going),
            waiting=sum(job.node is None for job in going),
            at_risk_s=sum(job.at_risk_s or 0 for job in going),
            sending_bps=sum(self._rates.values()),
        )

    def sort_next(self, name: str) -> Sorting | None:
        """Choose the next order of a table; None if it has a single order."""
        choices: dict[str, tuple[Sorting, ...]] = {"nodes": NODE_SORTINGS, "jobs": JOB_SORTINGS}
        if name not in choices:
            return None
        those = choices[name]
        self.sortings[name] = those[(those.index(self.sortings[name]) + 1) % len(those)]
        return self.sortings[name]

    def tables(self) -> dict[str, Table]:
        look = self.look
        assert look is not None
        now = look.at_unix
        nodes = sorted(look.nodes, key=self.sortings["nodes"].key)
        jobs = sorted(look.jobs, key=self.sortings["jobs"].key)
        slots = slots_row(look)
        here = [*(gpu_row(index, gpu, look) for index, gpu in enumerate(look.gpus)), *([slots] if slots else [])]
        sent = [transfer_row(one, self._rates.get(one.id, 0.0)) for one in look.transfers]
        return {
            "here": Table("here", GPU_COLUMNS, here, None, len(here)),
            "nodes": self._table("nodes", NODE_COLUMNS, self._kept("nodes", nodes, now, node_row), len(nodes)),
            "jobs": self._table("jobs", JOB_COLUMNS, self._kept("jobs", jobs, now, job_row), len(jobs)),
            "transfers": Table("transfers", TRANSFER_COLUMNS, sent, None, len(sent)),
            "events": self._table("events", EVENT_COLUMNS, self.events, len(self.events)),
        }

    def _kept(
        self, name: str, things: Iterable[Any], now: float, row: Callable[[Any, float, bool], Row]
    ) -> Iterable[Row]:
        for thing in things:
            key = thing.node if name == "nodes" else thing.job
            news = key in self._news
            if name == "jobs":
                yield row(thing, now, news)
                continue
            # A node's row is cached: it seldom changes.
            made_from = (thing, news, age(now - thing.since_unix))
            found = self._rows.get(key)
            if found is None or found[0] != made_from:
                found = self._rows[key] = (made_from, row(thing, now, news))
            yield found[1]

    def _table(self, name: str, columns: tuple[Column, ...], rows: Iterable[Row], count: int) -> Table:
        wanted = self.filter.casefold()
        kept = [row for row in rows if not wanted or any(wanted in cell.text.casefold() for cell in row.cells)]
        return Table(name, columns, kept, self.sortings.get(name), count)


def text_lines(view: View, width: int, events: int) -> list[str]:
    """Return all tables that are not empty as lines of text, for a pipe or a script; at most so many events."""
    look = view.look
    assert look is not None
    status = look.status
    state = "paused" if status.paused else "lending" if status.lend.now else "not lending now"
    lines = [f"{sanitize(status.nick)} of {sanitize(status.user)}, mesh {sanitize(status.mesh)}, {state}"]
    lines.append(view.totals().words)
    for table in view.tables().values():
        shown = table._replace(rows=table.rows[:events]) if table.name == "events" else table
        if shown.rows:
            lines += ["", *table_lines(shown, width)]
    return lines


def table_lines(table: Table, width: int) -> list[str]:
    widths = widths_of(table, width)
    lines = []
    for texts in (titles_of(table), *([cell.text for cell in row.cells] for row in table.rows)):
        columns = zip(texts, widths, table.columns, strict=True)
        lines.append(GAP.join(cut(text, room, column.right) for text, room, column in columns if room).rstrip())
    return lines

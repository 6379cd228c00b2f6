"""What `mesh top` shows of its looks at the daemon: tables in an order, totals, what has changed, how fast streams are. No I/O;
the time comes with each look."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mesh.amount import amount
from mesh.duration import lasting
from mesh.top.answers import Look
from mesh.top.rows import (
    EVENT_COLUMNS,
    GPU_COLUMNS,
    JOB_COLUMNS,
    JOB_SORTINGS,
    NODE_COLUMNS,
    NODE_SORTINGS,
    OVER,
    TRANSFER_COLUMNS,
    event_row,
    gpu_row,
    gpus_free,
    job_row,
    node_row,
    slots_row,
    transfer_row,
)
from mesh.top.table import Column, Row, Sorting, Table, age, many

NEWS_S = 5.0  # that what has changed is marked; ours
EVENTS_KEPT = 500  # ours


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
        alive = f"{self.alive}/{many(self.nodes, 'node')} alive, {self.lending} lend"
        free = [f"{self.gpus_free:.3g}/{self.gpus} GPUs"] if self.gpus else []
        free += [f"{self.slots_free}/{self.slots} slots"] if self.slots else []
        parts = [alive, f"free: {', '.join(free)}" if free else "nothing is lent"]
        parts.append(f"{many(self.running, 'job')} run, {self.waiting} wait")
        parts.append(f"at risk {lasting(self.at_risk_s)}")
        if self.sending_bps:
            parts.append(f"sends {amount(self.sending_bps)}/s")
        return " · ".join(parts)


class View:
    """Of one daemon, over many looks: what changed between them, how fast streams are, the last events."""

    def __init__(self) -> None:
        self.look: Look | None = None
        self.events: deque[Row] = deque(maxlen=EVENTS_KEPT)  # the newest first
        self.filter = ""
        self.sortings = {"nodes": NODE_SORTINGS[0], "jobs": JOB_SORTINGS[0]}
        self._said: dict[str, tuple[object, ...]] = {}
        self._news: dict[str, float] = {}  # by key: when it changed
        self._rates: dict[int, float] = {}
        self._rows: dict[str, tuple[object, Row]] = {}

    def take(self, look: Look) -> None:
        """A new look."""
        before = self.look
        if before is None or before.status.pid != look.status.pid:
            self.events.clear()
            self._said, self._news = {}, {}
        first = not self._said
        said: dict[str, tuple[object, ...]] = {node.node: (node.state, node.lending, node.jobs) for node in look.nodes}
        for job in look.jobs:
            said[job.job] = (job.state, job.node, job.checkpoint.seq if job.checkpoint is not None else None)
        changed = {} if first else {key: look.at_unix for key, what in said.items() if self._said.get(key) != what}
        self._news = {key: at for key, at in (self._news | changed).items() if look.at_unix - at < NEWS_S}
        self._said = said
        self._rows = {key: row for key, row in self._rows.items() if key in said}
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
        """Another order for a table; None for one that has a single order."""
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
            # A node's row changes with its answer, and with its age; both seldom.
            made_from = (thing, news, age(now - thing.since_unix))
            found = self._rows.get(key)
            if found is None or found[0] != made_from:
                found = self._rows[key] = (made_from, row(thing, now, news))
            yield found[1]

    def _table(self, name: str, columns: tuple[Column, ...], rows: Iterable[Row], count: int) -> Table:
        wanted = self.filter.casefold()
        kept = [row for row in rows if not wanted or any(wanted in cell.text.casefold() for cell in row.cells)]
        return Table(name, columns, kept, self.sortings.get(name), count)

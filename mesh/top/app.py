"""`mesh top` on a terminal, by textual: panels over `view.View`, and keys. All that waits for the daemon does so in threads, so
that keys are heard while it hangs; each is a daemon thread, so that leaving waits for none."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize
from textual.widgets import Input

from mesh.api.errors import MeshError
from mesh.caller import in_thread
from mesh.duration import lasting
from mesh.harmless import harmless
from mesh.top.answers import Cost, Look, Source
from mesh.top.lines import Lines
from mesh.top.page import JobPage
from mesh.top.question import Help, Question
from mesh.top.rows import COST_COLUMNS, OVER, cost_rows, short
from mesh.top.sheet import Sheet
from mesh.top.table import Cell, Table, many
from mesh.top.view import View

LOOK_S = 1.0
SAID_S = 8.0  # that an answer to a key is shown; ours
WIDE = 140  # columns from which panels stand beside each other; ours
LOW = 20  # lines below which there is room for jobs and nodes only; ours
KEYS = "p pause  u resume  r reclaim  R now  c cancel  ⏎ job  / find  s sort  ? help"


class Top(App[None]):
    """`strike`: what `mesh reclaim --now` does; gives its result in words."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "mesh top"
    CSS = """
    Screen { background: ansi_default; layout: vertical; }
    #head, #foot { width: 100%; }
    #here { height: auto; max-height: 30%; margin-top: 1; }
    #jobs, #nodes, #transfers, #events { margin-top: 1; }
    #body { height: 1fr; layout: grid; grid-size: 1; grid-rows: 3fr 3fr 1fr 2fr; }
    #body.wide { grid-size: 2; grid-columns: 1fr 1fr; grid-rows: 2fr 1fr; grid-gutter: 0 2; }
    Screen.low #here, .low #transfers, .low #events { display: none; }
    .low #body, .low #body.wide { grid-rows: 1fr; }
    .low #jobs, .low #nodes { margin-top: 0; }
    #filter { display: none; height: 1; border: none; padding: 0; background: transparent; }
    #filter.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
        Binding("p", "lend(False)", "pause"),
        Binding("u", "lend(True)", "resume"),
        Binding("r", "reclaim", "reclaim"),
        Binding("R", "strike", "reclaim now"),
        Binding("c", "cancel", "cancel a job"),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("question_mark", "help", "help"),
        Binding("escape", "unfilter", "no filter", show=False),
    ]

    def __init__(self, source: Source, strike: Callable[[], str]) -> None:
        super().__init__()
        self.source, self.strike = source, strike
        self.view = View()
        self.problem = ""
        self._lost_at = 0.0
        self._said: tuple[float, Cell] | None = None
        self._hot: set[asyncio.Task[None]] = set()

    def compose(self) -> ComposeResult:
        yield Lines("head")
        yield Sheet("here", chooses=False)
        with Container(id="body"):
            yield Sheet("jobs")
            yield Sheet("nodes")
            yield Sheet("transfers", chooses=False)
            yield Sheet("events", chooses=False)
        yield Input(id="filter", placeholder="only what has this in it; Enter keeps it, Escape ends it", compact=True)
        yield Lines("foot")

    def on_mount(self) -> None:
        self.theme = "ansi-dark"  # the terminal's own colours, on its own background
        self._draw()
        self.query_one("#jobs", Sheet).focus()
        self._go(self._look_on())

    def on_unmount(self) -> None:
        for task in self._hot:
            task.cancel()

    def on_resize(self, event: Resize) -> None:
        base = self.screen_stack[0]
        base.query_one("#body").set_class(event.size.width >= WIDE, "wide")
        base.set_class(event.size.height < LOW, "low")

    def _go(self, work: Any) -> None:
        """A task that is not lost while it runs."""
        task = asyncio.create_task(work, name="mesh top")
        self._hot.add(task)
        task.add_done_callback(self._hot.discard)

    # --- what is seen

    async def _look_on(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                self.view.take(await in_thread(self.source.look))
                if self.problem:
                    self.say(f"the daemon answers again, after {lasting(time.monotonic() - self._lost_at)}", "good")
                self.problem = ""
            except MeshError as error:
                if not self.problem:
                    self._lost_at = time.monotonic()
                self.problem = str(error)
            self._draw()
            await asyncio.sleep(max(0.1, begun + LOOK_S - time.monotonic()))

    def say(self, words: str, tone: Any = "") -> None:
        """In the last line, for a while."""
        self._said = (time.monotonic(), Cell(harmless(words), tone))
        self._draw_foot()
        if isinstance(self.screen, JobPage):
            self.screen.query_one("#keys", Lines).show([[self._said[1]]])

    def _draw(self) -> None:
        base = self.screen_stack[0]
        base.query_one("#head", Lines).show(self._head())
        self._draw_foot()
        if self.view.look is None:
            return
        for name, table in self.view.tables().items():
            sheet = base.query_one(f"#{name}", Sheet)
            if name == "here":
                sheet.display = bool(table.rows) and not base.has_class("low")
                if sheet.styles.height is None or sheet.styles.height.value != len(table.rows) + 1:
                    sheet.styles.height = len(table.rows) + 1
            sheet.show(table)

    def _draw_foot(self) -> None:
        foot = [Cell(KEYS, "dim")]
        if self._said is not None and time.monotonic() - self._said[0] < SAID_S:
            foot = [self._said[1]]
        self.screen_stack[0].query_one("#foot", Lines).show([foot])

    def _head(self) -> list[list[Cell]]:
        look = self.view.look
        lines: list[list[Cell]] = []
        if look is not None:
            status = look.status
            lines.append(
                [
                    Cell(harmless(status.nick), "bold"),
                    Cell(f" of {harmless(status.user)}, mesh {harmless(status.mesh)}  "),
                    *self._lending(look),
                    Cell(f"  {many(len(status.guests), 'guest')} here"),
                    Cell(f"  only what has {harmless(self.view.filter)!r}" if self.view.filter else "", "warn"),
                ]
            )
            lines.append([Cell(self.view.totals().words)])
            lines += [[Cell(harmless(problem), "warn")] for problem in [*status.problems.values()][:2]]
        if self.problem:
            since = lasting(time.monotonic() - self._lost_at)
            old = "" if look is None else "; below is what it said last"
            lines.append([Cell(harmless(f"no answer for {since}: {self.problem}") + old, "bad")])
        return lines or [[Cell("asking the daemon ...", "dim")]]

    @staticmethod
    def _lending(look: Look) -> list[Cell]:
        status = look.status
        if status.leaving:
            return [Cell("leaving", "warn")]
        if status.paused:
            return [Cell("PAUSED", "warn"), Cell(" (u lends again)", "dim")]
        if not status.lending:
            return [Cell("not lending", "dim")]
        if status.lend.now and status.lend.machine.level == "lend":
            return [Cell("lending", "good")]
        why = harmless(status.lend.machine.why) or f"hours: {harmless(status.lend.hours)}"
        return [Cell("lending" if status.lend.now else "not lent now", "warn"), Cell(f" ({why})")]

    # --- keys

    def action_lend(self, on: bool) -> None:
        self._order(lambda: self._lent(on))

    def _lent(self, on: bool) -> str:
        answer = self.source.client.post("/v1/pause", {"paused": not on})
        if on:
            return "lent again" if answer["lending"] else "not lending: `mesh lend on`"
        guests = answer["guests"]
        return "paused: no new guests" + (f"; {many(guests, 'guest')} still run (r sends them away)" if guests else "")

    def action_reclaim(self) -> None:
        self._go(self._ask_reclaim())

    async def _ask_reclaim(self) -> None:
        try:
            cost: Cost = await in_thread(self.source.cost)
        except MeshError as error:
            self.say(str(error), "bad")
            return
        title = "Take this machine back?  Guests are given notice, save and move on."
        if not cost.guests:
            title = "Take this machine back?  Nobody is here: it costs nothing."
        rows = cost_rows(cost)
        table = Table("cost", COST_COLUMNS, rows, None, len(rows)) if rows else None
        if await self._answer(Question(title, table)):
            self.say("waiting for guests to save and move on ...")
            self._order(self._reclaimed)

    async def _answer(self, question: Question) -> bool:
        """What was answered."""
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def answer(yes: bool | None) -> None:
            if not answered.done():
                answered.set_result(bool(yes))

        self.push_screen(question, answer)
        return await answered

    def _reclaimed(self) -> str:
        answer = self.source.client.post("/v1/reclaim", {}, timeout_s=None)
        count = len(answer["reclaimed"])
        if not count:
            return "yours; nobody was here (u lends again)"
        return f"yours again after {answer['seconds']:.1f} s; {many(count, 'guest')} gone (u lends again)"

    def action_strike(self) -> None:
        self._order(self.strike)

    def action_cancel(self) -> None:
        look, job = self.view.look, self._chosen_job()
        found = next((one for one in look.jobs if one.job == job), None) if look is not None else None
        if look is None or found is None:
            self.say("no job is chosen: Tab goes to the jobs, the arrows choose one")
        elif found.user != look.status.user:
            self.say(f"job {short(found)} is {found.user}'s, not yours", "warn")
        elif found.state in OVER:
            self.say(f"job {short(found)} is {found.state} already")
        else:
            self._go(self._ask_cancel(found.job, f"{short(found)} {harmless(found.name)}".strip()))

    async def _ask_cancel(self, job: str, name: str) -> None:
        if await self._answer(Question(f"Cancel job {name}?  What it has saved stays readable.")):
            self._order(lambda: self._cancelled(job))

    def _cancelled(self, job: str) -> str:
        rows = self.source.client.post(f"/v1/jobs/{job}/cancel")["jobs"]
        return "; ".join(f"job {row['job'][:8]} is {row['state']}" for row in rows)

    def _order(self, work: Callable[[], str]) -> None:
        """Do it in a thread, and say what came of it."""
        self._go(self._ordered(work))

    async def _ordered(self, work: Callable[[], str]) -> None:
        try:
            self.say(await in_thread(work))
        except (MeshError, OSError) as error:
            self.say(str(error), "bad")

    def _chosen_job(self) -> str | None:
        if isinstance(self.screen, JobPage):
            return self.screen.job
        jobs = self.query_one("#jobs", Sheet)
        return jobs.cursor if self.focused is jobs else None

    def on_sheet_chosen(self, message: Sheet.Chosen) -> None:
        if message.sheet.id == "jobs":
            self.push_screen(JobPage(self.source, message.key))
        elif message.sheet.id == "nodes" and self.view.look is not None:
            node = next((node for node in self.view.look.nodes if node.node == message.key), None)
            if node is not None:
                self._filter(node.nick)

    def action_sort(self) -> None:
        if isinstance(self.focused, Sheet) and self.focused.id is not None:
            sorting = self.view.sort_next(self.focused.id)
            self.say("this has one order" if sorting is None else f"sorted by {sorting.name}")
            self._draw()

    def action_filter(self) -> None:
        if len(self.screen_stack) > 1:
            return
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.value = self.view.filter
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_filter()

    def action_unfilter(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._filter("")
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("shown")
        self.query_one("#jobs", Sheet).focus()

    def _filter(self, text: str) -> None:
        self.view.filter = text
        self._draw()

    def action_help(self) -> None:
        if len(self.screen_stack) == 1:
            self.push_screen(Help())

"""`mesh top` on a terminal, with textual: panels over `view.View`, and keys.

Calls to the daemon run in daemon threads, so that keys work while it hangs, and quitting waits for none of them.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Input

from mesh.api.async_client import in_thread
from mesh.api.schemas.owner import Rehearsed
from mesh.top.answers import Look, Source
from mesh.top.job_page import JobPage
from mesh.top.table import Cell, Table
from mesh.top.table_rows import COST_COLUMNS, cost_rows, short
from mesh.top.view import View
from mesh.top.widgets import Lines, TableWidget
from mesh.util.duration import lasting
from mesh.util.errors import MeshError
from mesh.util.text import OVER, plural

LOOK_S = 1.0
MESSAGE_S = 8.0  # for which the result of a key is shown (own choice)
WIDE = 140  # columns from which panels are side by side (own choice)
LOW = 20  # lines below which only jobs and nodes are shown (own choice)
KEYS = "p pause  u resume  r reclaim  R now  c cancel  ⏎ job  / find  s sort  ? help"


BOX = """
{kind} {{ align: center middle; background: ansi_default 0%; }}
{kind} Vertical {{ width: 96%; max-width: 130; height: auto; max-height: 90%; }}
{kind} Vertical {{ border: round ansi_default; padding: 0 1; background: ansi_default; }}
{kind} TableWidget {{ height: auto; margin: 1 0; }}
"""


class Confirmation(ModalScreen[bool]):
    """A question that only y confirms. `table`: the information to decide on."""

    DEFAULT_CSS = BOX.format(kind="Confirmation")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, words: str, table: Table | None = None) -> None:
        super().__init__()
        self.words, self.table = words, table

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines("asked")
            if self.table is not None:
                yield TableWidget("cost", chooses=False)
            yield Lines("answers")

    def on_mount(self) -> None:
        self.query_one("#asked", Lines).show([[Cell(self.words, "bold")]])
        self.query_one("#answers", Lines).show([[Cell("y", "bold"), Cell(" yes   "), Cell("n", "bold"), Cell(" no")]])
        if self.table is not None:
            widget = self.query_one("#cost", TableWidget)
            widget.styles.height = min(len(self.table.rows) + 1, 14)
            widget.show(self.table)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


HELP = (
    ("p", "pause: accept no new guests; present guests stay"),
    ("u", "lend again"),
    ("r", "reclaim: shows affected jobs and their cost; asks first"),
    ("R", "reclaim now: kills every guest at once, without asking"),
    ("c", "cancel the selected job, if it is yours; asks first"),
    ("Enter", "a job's page; on a node: filter by its name"),
    ("/", "filter by a text; Escape shows everything again"),
    ("s", "sort the jobs, or the nodes, by the next column"),
    ("Tab", "the next table; arrows, PageUp, PageDown, Home, End"),
    ("q", "quit, as Ctrl-C; jobs and daemon continue"),
)
LEGEND = (
    "AT RISK: the loss if the host died now: the time since the last",
    "checkpoint that other nodes hold, times GPUs and nodes.",
    "SAVED: the age of that checkpoint, and its number of copies.",
    "A job or node in bold has changed in the last seconds.",
)


class Help(ModalScreen[None]):
    DEFAULT_CSS = BOX.format(kind="Help")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "leave", "back")]

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines("help")

    def on_mount(self) -> None:
        rows = [[Cell(f"{key:<7}", "bold"), Cell(words)] for key, words in HELP]
        self.query_one("#help", Lines).show([*rows, [], *([Cell(words, "dim")] for words in LEGEND)])

    def action_leave(self) -> None:
        self.dismiss()


class Top(App[None]):
    """The application. `kill`: runs `mesh reclaim --now` and returns its result as text."""

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
        Binding("R", "kill", "reclaim now"),
        Binding("c", "cancel", "cancel a job"),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("question_mark", "help", "help"),
        Binding("escape", "unfilter", "no filter", show=False),
    ]

    def __init__(self, source: Source, kill: Callable[[], str]) -> None:
        super().__init__()
        self.source, self.kill = source, kill
        self.view = View()
        self.problem = ""
        self._lost_at = 0.0
        self._message: tuple[float, Cell] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def compose(self) -> ComposeResult:
        yield Lines("head")
        yield TableWidget("here", chooses=False)
        with Container(id="body"):
            yield TableWidget("jobs")
            yield TableWidget("nodes")
            yield TableWidget("transfers", chooses=False)
            yield TableWidget("events", chooses=False)
        yield Input(id="filter", placeholder="filter by this text; Enter keeps it, Escape clears it", compact=True)
        yield Lines("foot")

    def on_mount(self) -> None:
        self.theme = "ansi-dark"  # the terminal's own colours, on its own background
        self._draw()
        self.query_one("#jobs", TableWidget).focus()
        self._start(self._look_on())

    def on_unmount(self) -> None:
        for task in self._tasks:
            task.cancel()

    def on_resize(self, event: Resize) -> None:
        base = self.screen_stack[0]
        base.query_one("#body").set_class(event.size.width >= WIDE, "wide")
        base.set_class(event.size.height < LOW, "low")

    def _start(self, work: Any) -> None:
        """Start a task and keep a reference to it."""
        task = asyncio.create_task(work, name="mesh top")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- display

    async def _look_on(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                self.view.take(await in_thread(self.source.look))
                if self.problem:
                    self.notify_user(
                        f"the daemon answers again after {lasting(time.monotonic() - self._lost_at)}", "good"
                    )
                self.problem = ""
            except MeshError as error:
                if not self.problem:
                    self._lost_at = time.monotonic()
                self.problem = str(error)
            self._draw()
            await asyncio.sleep(max(0.1, begun + LOOK_S - time.monotonic()))

    def notify_user(self, words: str, tone: Any = "") -> None:
        """Show a message in the last line for a while."""
        self._message = (time.monotonic(), Cell(words, tone))
        self._draw_foot()
        if isinstance(self.screen, JobPage):
            self.screen.query_one("#keys", Lines).show([[self._message[1]]])

    def _draw(self) -> None:
        base = self.screen_stack[0]
        base.query_one("#head", Lines).show(self._head())
        self._draw_foot()
        if self.view.look is None:
            return
        for name, table in self.view.tables().items():
            widget = base.query_one(f"#{name}", TableWidget)
            if name == "here":
                widget.display = bool(table.rows) and not base.has_class("low")
                if widget.styles.height is None or widget.styles.height.value != len(table.rows) + 1:
                    widget.styles.height = len(table.rows) + 1
            widget.show(table)

    def _draw_foot(self) -> None:
        foot = [Cell(KEYS, "dim")]
        if self._message is not None and time.monotonic() - self._message[0] < MESSAGE_S:
            foot = [self._message[1]]
        self.screen_stack[0].query_one("#foot", Lines).show([foot])

    def _head(self) -> list[list[Cell]]:
        look = self.view.look
        lines: list[list[Cell]] = []
        if look is not None:
            status = look.status
            lines.append(
                [
                    Cell(status.nick, "bold"),
                    Cell(f" of {status.user}, mesh {status.mesh}  "),
                    *self._lending(look),
                    Cell(f"  {plural(len(status.guests), 'guest')} here"),
                    Cell(f"  filter {self.view.filter!r}" if self.view.filter else "", "warn"),
                ]
            )
            lines.append([Cell(self.view.totals().words)])
            lines += [[Cell(problem, "warn")] for problem in [*status.problems.values()][:2]]
        if self.problem:
            since = lasting(time.monotonic() - self._lost_at)
            old = "" if look is None else "; below is its last answer"
            lines.append([Cell(f"no answer for {since}: {self.problem}" + old, "bad")])
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
        why = status.lend.machine.why or f"hours: {status.lend.hours}"
        return [Cell("lending" if status.lend.now else "not lent now", "warn"), Cell(f" ({why})")]

    # --- keys

    def action_lend(self, on: bool) -> None:
        self._order(lambda: self._lent(on))

    def _lent(self, on: bool) -> str:
        answer = self.source.client.post("/v1/pause", {"paused": not on})
        if on:
            return "lending again" if answer["lending"] else "not lending: `mesh lend`"
        guests = answer["guests"]
        verb = "runs" if guests == 1 else "run"
        return "paused: no new guests" + (
            f"; {plural(guests, 'guest')} still {verb} (r sends them away)" if guests else ""
        )

    def action_reclaim(self) -> None:
        self._start(self._ask_reclaim())

    async def _ask_reclaim(self) -> None:
        try:
            cost: Rehearsed = await in_thread(self.source.cost)
        except MeshError as error:
            self.notify_user(str(error), "bad")
            return
        title = "Take this machine back?  Guests get a notice, save and move on."
        if not cost.guests:
            title = "Take this machine back?  There are no guests: it costs nothing."
        rows = cost_rows(cost)
        table = Table("cost", COST_COLUMNS, rows, None, len(rows)) if rows else None
        if await self._answer(Confirmation(title, table)):
            self.notify_user("waiting for guests to save and move on ...")
            self._order(self._reclaimed)

    async def _answer(self, question: Confirmation) -> bool:
        """Ask, and return the answer."""
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
            return "yours; there were no guests (u lends again)"
        return f"yours again after {answer['seconds']:.1f} s; {plural(count, 'guest')} left (u lends again)"

    def action_kill(self) -> None:
        self._order(self.kill)

    def action_cancel(self) -> None:
        look, job = self.view.look, self._chosen_job()
        found = next((one for one in look.jobs if one.job == job), None) if look is not None else None
        if look is None or found is None:
            self.notify_user("no job is selected: Tab goes to the jobs, arrows select one")
        elif found.user != look.status.user:
            self.notify_user(f"job {short(found)} is {found.user}'s, not yours", "warn")
        elif found.state in OVER:
            self.notify_user(f"job {short(found)} is {found.state} already")
        else:
            self._start(self._ask_cancel(found.job, f"{short(found)} {found.name}".strip()))

    async def _ask_cancel(self, job: str, name: str) -> None:
        if await self._answer(Confirmation(f"Cancel job {name}?  Its saved files stay readable.")):
            self._order(lambda: self._cancelled(job))

    def _cancelled(self, job: str) -> str:
        rows = self.source.client.post(f"/v1/jobs/{job}/cancel")["jobs"]
        return "; ".join(f"job {row['job'][:8]} is {row['state']}" for row in rows)

    def _order(self, work: Callable[[], str]) -> None:
        """Run an order in a thread and show its result."""
        self._start(self._ordered(work))

    async def _ordered(self, work: Callable[[], str]) -> None:
        try:
            self.notify_user(await in_thread(work))
        except (MeshError, OSError) as error:
            self.notify_user(str(error), "bad")

    def _chosen_job(self) -> str | None:
        if isinstance(self.screen, JobPage):
            return self.screen.job
        jobs = self.query_one("#jobs", TableWidget)
        return jobs.cursor if self.focused is jobs else None

    def on_table_widget_chosen(self, message: TableWidget.Chosen) -> None:
        if message.widget.id == "jobs":
            self.push_screen(JobPage(self.source, message.key))
        elif message.widget.id == "nodes" and self.view.look is not None:
            node = next((node for node in self.view.look.nodes if node.node == message.key), None)
            if node is not None:
                self._filter(node.nick)

    def action_sort(self) -> None:
        if isinstance(self.focused, TableWidget) and self.focused.id is not None:
            sorting = self.view.sort_next(self.focused.id)
            self.notify_user("this table has a single order" if sorting is None else f"sorted by {sorting.name}")
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
        self.query_one("#jobs", TableWidget).focus()

    def _filter(self, text: str) -> None:
        self.view.filter = text
        self._draw()

    def action_help(self) -> None:
        if len(self.screen_stack) == 1:
            self.push_screen(Help())

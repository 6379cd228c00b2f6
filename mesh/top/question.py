"""Screens of `mesh top` that wait for a key: a question that y answers, and the help."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from mesh.top.lines import Lines
from mesh.top.sheet import Sheet
from mesh.top.table import Cell, Table

BOX = """
{kind} {{ align: center middle; background: ansi_default 0%; }}
{kind} Vertical {{ width: 96%; max-width: 130; height: auto; max-height: 90%; }}
{kind} Vertical {{ border: round ansi_default; padding: 0 1; background: ansi_default; }}
{kind} Sheet {{ height: auto; margin: 1 0; }}
"""


class Question(ModalScreen[bool]):
    """Only y is yes. `table`: what it is decided by."""

    DEFAULT_CSS = BOX.format(kind="Question")
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
                yield Sheet("cost", chooses=False)
            yield Lines("answers")

    def on_mount(self) -> None:
        self.query_one("#asked", Lines).show([[Cell(self.words, "bold")]])
        self.query_one("#answers", Lines).show([[Cell("y", "bold"), Cell(" yes   "), Cell("n", "bold"), Cell(" no")]])
        if self.table is not None:
            sheet = self.query_one("#cost", Sheet)
            sheet.styles.height = min(len(self.table.rows) + 1, 14)
            sheet.show(self.table)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


HELP = (
    ("p", "pause: take no new guests; those that run stay"),
    ("u", "resume: lend again"),
    ("r", "reclaim: shows whose work would go and its cost; asks"),
    ("R", "reclaim now: ends every guest at once; does not ask"),
    ("c", "cancel the chosen job, if it is yours; asks"),
    ("Enter", "a job's page; on a node: only what has its name in it"),
    ("/", "only what has some text in it; Escape shows all again"),
    ("s", "another order for the jobs, or the nodes"),
    ("Tab", "the next table; arrows, PageUp, PageDown, Home, End"),
    ("q", "leave, as Ctrl-C; nothing ends but this display"),
)
LEGEND = (
    "AT RISK: what would be lost if the host died now: the time since",
    "the last checkpoint that others hold, times GPUs and nodes.",
    "SAVED: how old that is, and on how many other nodes.",
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

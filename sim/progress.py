"""How far a study is, on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import click

from mesh.duration import lasting

if TYPE_CHECKING:
    import rich.progress

QUIET_S, EVERY_S = 2.0, 5.0  # nothing is said of what is over before that; and between two lines; ours


class Progress:
    """Of so many replications. `kept` ones were there before and cost nothing: they do not count for what is left."""

    def __init__(self, count: int) -> None:
        self.count, self.done, self.kept = count, 0, 0
        self._begun = time.monotonic()
        self._next = self._begun + QUIET_S
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, kept: bool = False) -> None:
        self.done += 1
        self.kept += kept
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done)
        elif now >= self._next and self.done < self.count:
            self._next = now + EVERY_S
            if sys.stderr.isatty():
                self._bar = self._shown()
            else:
                spent, computed = now - self._begun, max(1, self.done - self.kept)
                left = lasting(spent / computed * (self.count - self.done))
                click.echo(f"mesh: {self.done} of {self.count} replications, {left} left ...", err=True)

    def _shown(self) -> "rich.progress.Progress":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("replications"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task("", total=self.count, completed=self.done)
        bar.start()
        return bar

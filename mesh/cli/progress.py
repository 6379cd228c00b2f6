"""Progress on standard error: what a command waits for, and how far that is."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from mesh.cli.output import say

FIRST_S = 2.0  # nobody wonders about a shorter wait (own choice)
AGAIN_S = 5.0
POLL_S = 0.5
BAR = 24  # characters (own choice)

active = 0  # number of reporters that run now


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Report what the command waits for, once that takes more than two seconds, and every five seconds from then on."""
    begun = time.monotonic()
    with progress(lambda: f"{what} ... {time.monotonic() - begun:.0f} s", AGAIN_S):
        yield


@contextmanager
def progress(read: Callable[[], str], every_s: float = POLL_S, first_s: float = FIRST_S) -> Iterator[None]:
    """Report what `read` returns, from a thread, whenever it is new and not empty; first after two seconds."""
    global active  # noqa: PLW0603 - there is one standard error
    done = Event()

    def run() -> None:
        last, pause = "", first_s
        while not done.wait(pause):
            text = read()
            pause = every_s
            if text and text != last:
                last = text
                report(text)

    reporter = Thread(target=run, name="progress", daemon=True)
    active += 1
    reporter.start()
    try:
        yield
    finally:
        active -= 1
        done.set()
        reporter.join()


def report(text: str) -> None:
    """Print a line of progress; on a terminal with a bar in front, if the text names a part of an amount."""
    found = re.search(r"(\d+\.?\d*) of (\d+\.?\d*) (?:bytes|[KMGT]iB)", text)  # as mesh.util.byte_text.part writes it
    bar = ""
    if found and float(found[2]) and sys.stderr.isatty():
        full = round(BAR * min(1.0, float(found[1]) / float(found[2])))
        bar = f"[{'#' * full}{'.' * (BAR - full)}] "
    say(f"mesh: {bar}{text}", err=True)

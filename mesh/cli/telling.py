"""Telling on standard error what is being waited for, and how far it is."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import click

FIRST_S = 2.0  # below it, nobody wonders; ours
AGAIN_S = 5.0
LOOK_S = 0.5
BAR = 24  # characters; ours

under_way = 0  # that tell something now, or soon


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Say what is being waited for, once that takes more than two seconds, and every five from then on."""
    begun = time.monotonic()
    with telling(lambda: f"{what} ... {time.monotonic() - begun:.0f} s", AGAIN_S):
        yield


@contextmanager
def telling(look: Callable[[], str], every_s: float = LOOK_S, first_s: float = FIRST_S) -> Iterator[None]:
    """Say what `look` answers, from a thread, when that is new and not empty; first after two seconds."""
    global under_way  # noqa: PLW0603 - there is one standard error
    done = Event()

    def tell() -> None:
        told, pause = "", first_s
        while not done.wait(pause):
            words = look()
            pause = every_s
            if words and words != told:
                told = words
                say(words)

    teller = Thread(target=tell, name="telling", daemon=True)
    under_way += 1
    teller.start()
    try:
        yield
    finally:
        under_way -= 1
        done.set()
        teller.join()


def say(words: str) -> None:
    """A line of progress; with a bar before it on a terminal, if the words are about a part of something."""
    found = re.search(r"(\d+\.?\d*) of (\d+\.?\d*) (?:bytes|[KMGT]iB)", words)  # as mesh.amount.part writes it
    bar = ""
    if found and float(found[2]) and sys.stderr.isatty():
        full = round(BAR * min(1.0, float(found[1]) / float(found[2])))
        bar = f"[{'#' * full}{'.' * (BAR - full)}] "
    click.echo(f"mesh: {bar}{words}", err=True)

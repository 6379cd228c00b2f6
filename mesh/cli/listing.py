"""Reads that list things: as a table, as JSON, as ids alone (`-q`), once or over and over (`-w`)."""

import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import click

from mesh.cli.terminal import json_option, print_json

WATCH_S = 1.0  # as often as people look; ours
HOME_AND_CLEAR = "\x1b[H\x1b[J"  # ECMA-48: cursor to the top left, erase to the end of the screen


watch_option = click.option("-w", "--watch", is_flag=True, help="Show it again as it changes, until Ctrl-C.")


def listing(function: Any) -> Any:
    """The options of a list: its function gets `form`."""
    for option in (
        watch_option,
        click.option("-q", "--quiet", is_flag=True, help="Print ids alone, one a line."),
        json_option,
    ):
        function = option(function)
    return function


def show(
    form: dict[str, bool],
    ask: Callable[[], dict[str, Any]],
    ids: Callable[[dict[str, Any]], Iterable[str]],
    draw: Callable[[dict[str, Any]], None],
) -> None:
    """Print what `ask` answers in the form that the options of `listing` say."""
    if form["quiet"] and form["as_json"]:
        raise click.UsageError("-q prints ids and --json everything: choose one")

    def draw_ids(answer: dict[str, Any]) -> None:
        for identity in ids(answer):
            click.echo(identity)

    show_answer(ask, draw_ids if form["quiet"] else draw, form["watch"], form["as_json"])


def show_answer(
    ask: Callable[[], dict[str, Any]], draw: Callable[[dict[str, Any]], None], watch: bool, as_json: bool
) -> None:
    """Print what `ask` answers; to `watch`, again and again: on a terminal in place, on a pipe when it has changed."""
    answered = print_json if as_json else draw
    if not watch:
        answered(ask())
        return
    shown = None
    while True:
        with redirect_stdout(StringIO()) as page:
            answered(ask())
        text = page.getvalue()
        if sys.stdout.isatty():
            click.echo(HOME_AND_CLEAR + text, nl=False)
        elif text != shown:
            click.echo(json.dumps(json.loads(text)) if as_json else text.rstrip("\n"))
        sys.stdout.flush()
        shown = text
        time.sleep(WATCH_S)

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

    def once() -> None:
        answer = ask()
        if form["as_json"]:
            print_json(answer)
        elif form["quiet"]:
            for identity in ids(answer):
                click.echo(identity)
        else:
            draw(answer)

    show_again(once, form["watch"], form["as_json"])


def show_again(once: Callable[[], None], watch: bool, as_json: bool) -> None:
    """Print what `once` prints; to `watch`, again and again: on a terminal in place, on a pipe when it has changed."""
    if not watch:
        once()
        return
    shown = None
    while True:
        with redirect_stdout(StringIO()) as page:
            once()
        text = page.getvalue()
        if sys.stdout.isatty():
            click.echo(HOME_AND_CLEAR + text, nl=False)
        elif text != shown:
            click.echo(json.dumps(json.loads(text)) if as_json else text.rstrip("\n"))
        sys.stdout.flush()
        shown = text
        time.sleep(WATCH_S)

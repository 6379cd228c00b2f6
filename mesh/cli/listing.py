"""Options of commands that show something: as a table, as JSON, ids only (`-q`), once or again and again (`-w`)."""

import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import click

from mesh.cli.output import print_json, say
from mesh.cli.terminal import json_option

WATCH_S = 1.0  # own choice
HOME_AND_CLEAR = "\x1b[H\x1b[J"  # ECMA-48: cursor to the top left, erase to the end of the screen


watch_option = click.option("-w", "--watch", is_flag=True, help="Show it again when it changes, until Ctrl-C.")


def listing(function: Any) -> Any:
    """Add the options of a list; the command passes them to `show` as `form`."""
    for option in (
        watch_option,
        click.option("-q", "--quiet", is_flag=True, help="Print only ids, one per line."),
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
    """Print the answer of `ask` in the form that the options of `listing` choose."""
    if form["quiet"] and form["as_json"]:
        raise click.UsageError("-q prints ids and --json prints everything: use one of them")

    def draw_ids(answer: dict[str, Any]) -> None:
        for identity in ids(answer):
            say(identity)

    show_answer(ask, draw_ids if form["quiet"] else draw, form["watch"], form["as_json"])


def show_answer(
    ask: Callable[[], dict[str, Any]], draw: Callable[[dict[str, Any]], None], watch: bool, as_json: bool
) -> None:
    """Print the answer of `ask`; with `watch` repeatedly: in place on a terminal, when it changed on a pipe."""
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
            sys.stdout.write(HOME_AND_CLEAR + text)
        elif text != shown:
            sys.stdout.write((json.dumps(json.loads(text)) if as_json else text.rstrip("\n")) + "\n")
        sys.stdout.flush()
        shown = text
        time.sleep(WATCH_S)

"""Hostile names, reasons, commands and file names reach every command, view and page: none controls the terminal (finding 14)."""

import contextlib
import itertools
import json
import os
import pty
import re
import subprocess
import sys
import tracemalloc
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mesh.api.client import Client
from mesh.cli.jobs import TAIL_BYTES, TAIL_LINE_BYTES, _print_tail
from mesh.cli.main import _show_crash, cli
from mesh.cli.names import IMAGE, NODE_LIST, WAITING, ZONE
from mesh.cli.names import JOB as JOB_NAME
from mesh.cli.names import NODE as NODE_NAME
from mesh.cli.output import CELL, LINE, say, table
from mesh.top import app
from mesh.top.answers import Source
from tests.adversary.answers import LOG, HostileDaemon, hostile_daemon
from tests.adversary.lender import HOSTILE_NAME, HOSTILE_NAMES
from tests.web.test_pages import pages, whole

JOB = "abcd2345"
# The arguments with which each command shows what the daemon tells it, once or more.
SHOWN: dict[str, list[list[str]]] = {
    "submit": [["--", "true"]],
    "ps": [["-a"], ["-q"], [JOB]],
    "describe": [[JOB]],
    "why": [[JOB], [JOB, "--would"]],
    "wait": [[JOB]],
    "cancel": [[JOB]],
    "cp": [[f"{JOB}:out", "here"]],
    "job migrate": [[JOB]],
    "job events": [[JOB], ["--audit"]],
    "job recover": [[JOB], [JOB, "--yes"]],
    "member ls": [[], ["-q"]],
    "member invite": [[]],
    "member pending": [[], ["-q"]],
    "member approve": [["somebody"]],
    "member promote": [["somebody"]],
    "member revoke": [["somebody", "--yes"], [HOSTILE_NAME]],
    "member usage": [[], ["--runs"]],
    "nodes": [[], ["-q"], ["--zones"]],
    "top": [["--once"], ["--web"]],
    "ckpt ls": [[], ["-q"]],
    "ckpt verify": [[]],
    "ckpt extract": [[JOB, "new"]],
    "ckpt rm": [[JOB]],
    "ckpt gc": [[]],
    "data add": [["sample", "."]],
    "data ls": [[]],
    "data show": [["sample"], ["sample", "inside"]],
    "data pin": [["sample"]],
    "data verify": [["sample"]],
    "data rm": [["sample"]],
    "data group ls": [[]],
    "data group show": [["sample"]],
    "data group set": [["sample", "sample"]],
    "data group rm": [["sample"]],
    "secret set": [["KEY"]],
    "secret ls": [[]],
    "secret rm": [["KEY"]],
    "image ls": [[], ["-q"]],
    "image allow": [["alias"]],
    "image deny": [["alias"]],
    "image pull": [["alias"]],
    "image push": [["alias", "node"]],
    "image prune": [["--dry-run"]],
    "image registry": [[]],
    "debug survive show": [["node"]],
    "debug dump": [[]],
    "down": [[]],
    "status": [[]],
    "lend": [[]],
    "pause": [[]],
    "reclaim": [[], ["--dry-run"]],
    "gpus pause": [[JOB]],
    "gpus resume": [[JOB]],
    "gpus set": [[JOB, "--share", "50"]],
    "doctor": [[]],
    "up": [[]],
}
# These show numbers only, or what their user typed.
NUMBERS = {
    "cp",
    "job migrate",
    "ckpt gc",
    "data group rm",
    "image deny",
    "debug dump",
    "down",
    "pause",
    "gpus pause",
    "gpus resume",
    "gpus set",
    "secret set",
    "up",
}
# These end with the daemon's own problem when it has one, as this one has.
TROUBLED = {"data add", "data pin", "data verify"}
# These show the output of a job, which a pipe gets as it is: see the tests with a terminal.
OUTPUT: dict[str, list[str]] = {
    "run": ["--", "true"],
    "logs": [JOB],
    "job attach": [JOB],
    "exec": ["-T", JOB, "--", "true"],
}
# These show nothing of anybody else: they found, configure, simulate or test on this machine.
OWN = {
    "init", "join", "member key", "killall", "install-service", "config get", "config ls", "config set", "config unset",
    "job rehearse", "job sdk", "debug demo", "debug devstack", "debug survive eval", "debug api", "debug completion",
    *(f"debug sim {name}" for name in
      ("claims", "compare", "history", "policies", "report", "run", "sensitivity", "show", "sweep", "worlds")),
}  # fmt: skip
# These run until Ctrl-C; what they print goes through `_report` and `say`, as in the others.
ENDLESS = {"job jupyter", "job forward"}
# This shows them before it does anything, if the node is a member: tests/cli/test_leave.py.
MEMBERS = {"leave"}


def commands(group: click.Group, prefix: str = "") -> Iterator[str]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def check(shown: str, allowed: str = "\n") -> None:
    """Check that a terminal shows this as it is: no control character, and no line that the daemon's texts began."""
    for sign in set(shown) - set(allowed):
        category = unicodedata.category(sign)
        assert category not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}, (sign, category)
    for line in re.split("[\r\n]", shown):
        assert not line.lstrip().startswith("SPOOFED"), line
    assert not re.search("[\u0300-\u036f]{3}", shown), "stacked marks"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def daemon(state: Path) -> Iterator[HostileDaemon]:
    with hostile_daemon(state) as one:
        yield one


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(state: Path, name: str, arguments: list[str], columns: int | None = None) -> Any:
    env = {"MESH_STATE": str(state), "NO_COLOR": "1", "COLUMNS": str(columns) if columns else None}
    words = name.replace("debug survive show", "debug survive").split()
    return CliRunner().invoke(cli, [*words, *arguments], prog_name="mesh", env=env, input="n\n")


def test_every_command_is_tried() -> None:
    assert set(commands(cli)) == {*SHOWN, *OUTPUT, *OWN, *ENDLESS, *MEMBERS}


@pytest.mark.parametrize("columns", [None, 60])
@pytest.mark.parametrize(("name", "arguments"), [(name, one) for name, many in SHOWN.items() for one in many])
def test_command_shows_hostile_names_harmlessly(
    name: str, arguments: list[str], columns: int | None, state: Path, daemon: HostileDaemon
) -> None:
    daemon.asked.clear()
    done = invoke(state, name, arguments, columns)
    assert done.exception is None or isinstance(done.exception, SystemExit), (done.exception, done.exc_info)
    assert daemon.asked and done.output
    assert "\ufffd" in done.output or name in NUMBERS or arguments == ["--web"]
    check(done.stdout_bytes.decode())
    check(done.stderr_bytes.decode())


@pytest.mark.parametrize("name", [name for name in SHOWN if name not in {"up", "debug dump", *TROUBLED}])
def test_json_keeps_hostile_names_as_they_are(name: str, state: Path, daemon: HostileDaemon) -> None:
    arguments = SHOWN[name][0]
    if "-q" in arguments or name == "submit":
        arguments = []
    done = invoke(state, name, ["--json", *arguments] if name != "submit" else ["--json", "--", "true"])
    told = json.loads(done.stdout)
    assert told["schema"] and (name in NUMBERS or any(HOSTILE_NAME in text for text in texts(told)))
    check(done.stdout_bytes.decode())


def texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, one in value.items():
                yield key
                yield from texts(one)
        case list():
            for one in value:
                yield from texts(one)


@pytest.mark.parametrize("name", sorted({*SHOWN, *OUTPUT} - {"debug dump"}))  # it collects what it can get
def test_error_with_a_hostile_text_is_one_line(name: str, state: Path, daemon: HostileDaemon) -> None:
    daemon.fails = True
    try:
        done = invoke(state, name, OUTPUT[name] if name in OUTPUT else SHOWN[name][0])
    finally:
        daemon.fails = False
    assert done.exit_code
    check(done.stdout_bytes.decode())
    check(done.stderr_bytes.decode())


def test_long_text_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    say("x" * 10**6)
    say("\x1b" * 10**6)
    table(["NAME", "LAST"], [["y" * 10**6, "z" * 10**6]])
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) for line in lines[:2]] == [LINE, LINE] and lines[0].endswith("…")
    assert all(len(line) <= CELL + 2 + LINE for line in lines[2:])


# --- the output of a job


def on_a_terminal(state: Path, name: str, arguments: list[str]) -> bytes:
    """Return all that a command writes to a terminal that is its standard output and error."""
    own, its = pty.openpty()
    words = [sys.executable, "-m", "mesh.cli", *name.split(), *arguments]
    env = {**os.environ, "MESH_STATE": str(state)}
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=its, stderr=its, env=env) as process:
        os.close(its)
        shown = b""
        with contextlib.suppress(OSError):  # EIO at its end (Linux, pty(7))
            while data := os.read(own, 65_536):
                shown += data
        os.close(own)
        assert process.wait() in {0, 1}, shown[-2000:]
    return shown


@pytest.mark.parametrize("name", OUTPUT)
@pytest.mark.parametrize("more", [[], ["-n", "100"]], ids=["all", "tail"])
def test_output_on_a_terminal_keeps_its_colours_only(
    name: str, more: list[str], state: Path, daemon: HostileDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    if more and name != "logs":
        more = []
    monkeypatch.setattr(daemon, "named", True)
    monkeypatch.setattr(daemon, "runs", name == "exec")
    shown = on_a_terminal(state, name, [*more, *OUTPUT[name]]).decode()
    assert "\x1b[31mcoloured\x1b[0m" in shown and "progress 1\rprogress 2" in shown and "\x1b[m" in shown
    plain = re.sub(r"\x1b\[[0-9;:]*m", "", shown)
    assert not re.search("[^\n\r\t\x20-\x7e\xa0-\U0010ffff]", plain) and not re.search(
        "[\u2028-\u202e\u2066-\u2069]", plain
    )


def test_raw_output_reaches_a_terminal_only_if_asked_for(state: Path, daemon: HostileDaemon) -> None:
    assert b"\x1b]0;title" in on_a_terminal(state, "logs", ["--raw", JOB])
    assert b"\x1b]0;title" not in on_a_terminal(state, "logs", [JOB])


def test_pipe_gets_the_bytes_of_the_output(state: Path, daemon: HostileDaemon) -> None:
    words = [sys.executable, "-m", "mesh.cli", "logs", JOB]
    done = subprocess.run(words, env={**os.environ, "MESH_STATE": str(state)}, capture_output=True, check=True)
    assert done.stdout == LOG


def test_tail_of_endless_lines_is_bounded(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A lender that never ends a line, and one whose lines are long, do not fill the memory of `mesh logs -n`."""
    piece = b"x" * 65_536
    tracemalloc.start()
    assert _print_tail(itertools.repeat(piece, 1600), 3) == 1600 * 65_536
    line = b"y" * (1 << 20) + b"\n"
    assert _print_tail(itertools.repeat(line, 200), 1000) == 200 * len(line)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * TAIL_BYTES
    assert len(capfdbinary.readouterr().out) <= TAIL_BYTES + TAIL_LINE_BYTES


# --- completion, crashes, views


@pytest.mark.parametrize(
    "name", [*HOSTILE_NAMES[:5], "$(touch x)", "`x`", "a;b", "a b", "*", "~", "a&b", "a|b", "a>b", "a'b", '"']
)
def test_completion_offers_no_name_that_a_shell_would_read(name: str, tmp_path: Path) -> None:
    with hostile_daemon(tmp_path / "s", name):
        context = click.Context(cli, info_name="mesh")
        context.params["state"] = str(tmp_path / "s")
        for kind in (JOB_NAME, NODE_NAME, NODE_LIST, ZONE, IMAGE, WAITING):
            for item in kind.shell_complete(context, click.Argument(["x"]), ""):
                assert re.fullmatch(r"[\w@%+=:,./-]+", item.value)
                check(item.help or "")


def test_completion_offers_plain_names(tmp_path: Path) -> None:
    with hostile_daemon(tmp_path / "s", "lab-7.uni"):
        context = click.Context(cli, info_name="mesh")
        context.params["state"] = str(tmp_path / "s")
        assert [item.value for item in NODE_NAME.shell_complete(context, click.Argument(["x"]), "lab")] == ["lab-7.uni"]


def test_crash_with_a_hostile_text_is_shown_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError(HOSTILE_NAME)
    except ValueError as error:
        _show_crash(ValueError, error, error.__traceback__)
    shown = capsys.readouterr().err
    assert "ValueError" in shown
    check(re.sub("(?m)^SPOOFED", "", shown))  # a trace has the lines of its exception


async def test_top_shows_hostile_names_harmlessly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of the terminal view, drawn by textual from the answers of the daemon."""
    monkeypatch.setattr(app, "LOOK_S", 0.1)
    with hostile_daemon(tmp_path / "s"):
        view = app.Top(Source(Client(tmp_path / "s" / "mesh.sock")), lambda: HOSTILE_NAME)
        async with view.run_test(size=(250, 50)) as pilot:
            for keys in (
                [],
                ["?"],
                ["escape", "r"],
                ["escape", "tab", "tab", "enter"],
                ["escape", "/", "x", "enter"],
                ["K"],
            ):
                await pilot.press(*keys)
                await pilot.pause(0.5)
                shown = [strip.text for strip in view.screen._compositor.render_strips()]
                for line in shown:
                    check(line)
        assert view.view.look is not None


def test_hostile_names_stay_inert_in_pages() -> None:
    for page in pages(HOSTILE_NAME):
        text = whole(page, HOSTILE_NAME)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", text.replace("\r", ""))

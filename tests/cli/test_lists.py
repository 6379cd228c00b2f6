"""Lists in every format, and completion of names, with a daemon that gives fixed answers."""

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

import mesh.cli.listing
import mesh.cli.names
from mesh.cli.main import SECTIONS, cli
from mesh.cli.nodes import _warn_of_unknown
from mesh.cli.output import ask_secret, confirm
from mesh.cli.suggest import ELSEWHERE
from mesh.util.version import VERSION

MEMBER = {"nick": "desk", "user": "ada", "node": "abc234", "founder": True, "ends_unix": None, "revoked_unix": None}
MEMBER |= {"ended": False, "problem": "", "through": []}
JOBS = [
    {"job": "7kq2abcdefgh", "name": "bert", "state": "running", "command": "python3 train.py", "array": None},
    {"job": "7kzzabcdefgh", "name": "", "state": "done", "command": "true", "array": None},
]
SAID: dict[str, dict[str, Any]] = {
    "/v1/trust": {"schema": 1, "members": [MEMBER, {**MEMBER, "nick": "lab", "node": "def567"}]},
    "/v1/jobs": {"schema": 1, "jobs": JOBS, "archived": 0},
    "/v1/jobs?over=true": {"schema": 1, "jobs": JOBS, "archived": 0},
    "/v1/jobs?over=false": {"schema": 1, "jobs": JOBS[:1], "archived": 0},
    "/v1/nodes": {
        "nodes": [
            {"nick": nick, "node": node, "state": "alive", "user": "ada"}
            for nick, node in (("desk", "abc234"), ("den", "bcd345"), ("lab", "def567"))
        ]
    },
    "/v1/images": {"images": [{"alias": "torch", "by": "desk"}], "by_name": []},
}


@contextmanager
def daemon(state: Path, said: dict[str, dict[str, Any]]) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(said[self.path]).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        def address_string(self) -> str:
            return ""

        def log_message(self, format: str, *args: Any) -> None:
            pass

    state.mkdir(exist_ok=True)
    with socketserver.ThreadingUnixStreamServer(str(state / "mesh.sock"), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    with daemon(tmp_path / "s", SAID):
        yield tmp_path / "s"


def run(state: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--state", str(state), *words], prog_name="mesh")


def test_list_prints_table_ids_or_json(state: Path) -> None:
    assert "STANDING" in run(state, "member", "ls").stdout
    assert run(state, "member", "ls", "-q").stdout == "abc234\ndef567\n"
    assert (
        run(state, "ps", "-aq").stdout == "7kq2abcdefgh\n7kzzabcdefgh\n" and run(state, "ps", "-q").stdout[:4] == "7kq2"
    )
    answer = json.loads(run(state, "member", "ls", "--json").stdout)
    assert answer["schema"] == 1 and len(answer["members"]) == 2
    both = run(state, "ps", "-q", "--json")
    assert both.exit_code == 2 and "use one of them" in both.stderr


def test_revoke_needs_an_exact_name_and_confirmation(state: Path) -> None:
    for words, code, said in (
        (["nobody"], 4, "no node called 'nobody'"),
        (["la"], 4, "la"),
        (["lab"], 1, "revoke lab ("),
    ):
        done = CliRunner().invoke(
            cli, ["--state", str(state), "member", "revoke", *words], prog_name="mesh", input="n\n"
        )
        assert done.exit_code == code and said in done.output, words


def test_once_shows_jobs_under_way_and_the_last_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [None, *range(10)]
    jobs = [
        SimpleNamespace(job=f"job{end}", outcome=None if end is None else SimpleNamespace(ended_unix_ms=end))
        for end in ends
    ]

    class Look(msgspec.Struct):
        jobs: list[Any]

    shown: list[str] = []
    view = SimpleNamespace(take=lambda look: shown.extend(job.job for job in look.jobs))
    monkeypatch.setattr("mesh.top.view.View", lambda: view)
    monkeypatch.setattr("mesh.top.view.text_lines", lambda *given: [])
    monkeypatch.setattr("mesh.top.answers.Source.look", lambda self: Look(jobs))
    assert CliRunner().invoke(cli, ["top", "--once"]).exit_code == 0
    assert shown == ["jobNone", *(f"job{end}" for end in range(5, 10))]
    shown.clear()
    assert CliRunner().invoke(cli, ["top", "--once", "-a"]).exit_code == 0 and len(shown) == 11


def test_pause_needs_a_length(state: Path) -> None:
    for duration in ("0", "400d"):
        done = run(state, "pause", duration)
        assert done.exit_code == 2 and "a pause lasts longer than 0s and at most 366d" in done.stderr


@pytest.mark.parametrize(("ends", "error"), [(KeyboardInterrupt, KeyboardInterrupt), (EOFError, click.Abort)])
def test_ctrl_c_at_a_prompt_is_an_interruption(
    ends: type[BaseException], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(text: str) -> str:
        raise ends

    for read in ("visible_prompt_func", "hidden_prompt_func"):
        monkeypatch.setattr(f"click.termui.{read}", asked)
    for ask in (ask_secret, confirm):
        with pytest.raises(error):
            ask("?")


def test_host_that_has_no_address_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unknown(host: str, port: int) -> None:
        if host == "desk.invalid":
            raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    _warn_of_unknown(("desk.invalid:7373", "127.0.0.1", "a:b:c"))
    assert capsys.readouterr().err == (
        "mesh: --join desk.invalid:7373: desk.invalid has no address now (Name or service not known): check its name\n"
    )


def test_wait_refuses_an_empty_name(state: Path) -> None:
    done = run(state, "wait", "")
    assert done.exit_code == 4 and "the name of the job is empty" in done.stderr


def test_watched_list_prints_changes_until_ctrl_c(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:  # the second read was unchanged
            monkeypatch.setitem(SAID["/v1/trust"], "members", [MEMBER])
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(mesh.cli.listing.time, "sleep", sleep)
    done = run(state, "member", "ls", "-w", "--json")
    assert done.exit_code == 130
    assert [len(json.loads(line)["members"]) for line in done.stdout.splitlines()] == [2, 1]


@pytest.mark.parametrize(("words", "path"), [(["status"], "/v1/status"), (["describe", "x"], "/v1/jobs/x/describe")])
def test_watch_works_for_commands_other_than_lists(
    tmp_path: Path, words: list[str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {path: {"looks": 1}}

    def sleep(seconds: float) -> None:
        said[path]["looks"] += 1
        if said[path]["looks"] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(mesh.cli.listing.time, "sleep", sleep)
    with daemon(tmp_path / "s", said):
        done = run(tmp_path / "s", *words, "-w", "--json")
    assert [json.loads(line)["looks"] for line in done.stdout.splitlines()] == [1, 2] and done.exit_code == 130


def completed(words: list[str], incomplete: str) -> list[str]:
    items = ShellComplete(cli, {}, "mesh", "_MESH_COMPLETE").get_completions(words, incomplete)
    return [item.value for item in items]


def test_completion_offers_names(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.cli.names, "ANSWER_S", 60.0)
    here = ["--state", str(state)]
    assert completed([*here, "logs"], "7k") == ["7kq2abcd", "7kzzabcd"] and completed([*here, "why"], "be") == ["bert"]
    assert completed([*here, "cancel"], "") == ["7kq2abcd", "bert", "7kzzabcd"]
    assert completed([*here, "job", "migrate", "x", "--to"], "de") == ["desk", "den"]
    assert completed([*here, "submit", "--ckpt-to"], "lab,de") == ["lab,desk", "lab,den"]
    assert completed([*here, "run", "--image"], "") == ["torch"]
    assert "pending" in completed([*here, "member", "pend"], "") and completed([*here, "member"], "pend") == ["pending"]
    assert completed([*here, "config", "get"], "image_k") == ["image_keep_gib", "image_keep_days"]


@pytest.mark.parametrize("said", [{}, {"/v1/jobs": {"jobs": 7}}, {"/v1/jobs": {}}])
def test_completion_is_silent_when_daemon_fails(
    tmp_path: Path, said: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert completed(["--state", str(tmp_path), "logs"], "") == [], "no daemon"
    if said:
        with daemon(tmp_path / "s", said):
            assert completed(["--state", str(tmp_path / "s"), "logs"], "") == []
    assert capfd.readouterr().err == ""


def test_every_command_is_listed_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise AssertionError(f"{name} is imported for a list of names")

    monkeypatch.setattr("importlib.import_module", refused)
    assert set(completed([], "")) == {name for rows in SECTIONS.values() for name, _, _ in rows}


def test_each_name_from_elsewhere_stands_for_a_command() -> None:
    root = click.Context(cli)
    for word, path in ELSEWHERE.items():
        assert cli.get_command(root, word) is None, word
        name, *rest = path.split()
        command = cli.get_command(root, name)
        assert command is not None, path
        if isinstance(command, click.Group):
            assert command.get_command(click.Context(command), rest[0]) is not None, path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed_for_each_shell(tmp_path: Path, shell: str) -> None:
    done = run(tmp_path, "debug", "completion", shell)
    assert done.exit_code == 0 and "_MESH_COMPLETE" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("version", ["0.0.9", VERSION])
def test_unreadable_answer_names_the_release_of_the_daemon(tmp_path: Path, version: str) -> None:
    said: dict[str, Any] = {"/v1/trust": {"schema": 1}, "/v1/status": {"version": version}}
    with daemon(tmp_path, said):
        done = run(tmp_path, "member", "ls")
    if version == VERSION:
        assert isinstance(done.exception, KeyError), "an error in this release is not hidden"
    else:
        assert done.exit_code == 1 and done.stderr == (
            f"mesh: the daemon here runs campus-mesh 0.0.9, this command is {VERSION}: "
            f"restart the daemon with `mesh --state {tmp_path} down` and `mesh --state {tmp_path} up`\n"
        )


def test_events_are_chosen_by_number_and_time_and_have_one_form_of_time(tmp_path: Path) -> None:
    told = {"node": "abc234", "actor": "desk", "kind": "audit"}
    rows = [
        {**told, "id": n, "seq": n, "job": "7kq2abcd" if n % 2 else None, "unix_ms": n * 86_400_000, "text": f"e{n}"}
        for n in range(1, 5)
    ]
    with daemon(tmp_path, {"/v1/events?audit=false&after=0": {"events": rows}}):
        lines = run(tmp_path, "job", "events").stdout.splitlines()
        assert [line.split()[0] for line in lines] == [f"1970-01-0{n}" for n in range(2, 6)]
        assert [line.split()[-1] for line in run(tmp_path, "job", "events", "-n", "2").stdout.splitlines()] == [
            "e3",
            "e4",
        ]
        assert run(tmp_path, "job", "events", "-n", "0").stdout == ""
        late = json.loads(run(tmp_path, "job", "events", "--since", "1970-01-04T00:00Z", "--json").stdout)
        assert [event["text"] for event in late["events"]] == ["e3", "e4"]
        assert run(tmp_path, "job", "events", "--since", "1970-01-04T12:00Z", "-n", "9").stdout.split()[-1] == "e4"


def test_watched_audit_asks_for_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(number: int) -> dict[str, Any]:
        told = {"id": number, "seq": number, "node": "abc234", "job": None, "actor": "desk"}
        return {"events": [{**told, "unix_ms": 0, "text": f"entry {number}"}]}

    waits = iter([None])

    def wait(seconds: float) -> None:
        if next(waits, "over"):
            raise KeyboardInterrupt

    monkeypatch.setattr("mesh.cli.jobs.time.sleep", wait)
    path = "/v1/events?audit=true&after="
    with daemon(tmp_path, {f"{path}0": entry(7), f"{path}7": entry(8)}):
        done = run(tmp_path, "job", "events", "--audit", "-w")
    assert [line.rpartition("  ")[2] for line in done.stdout.splitlines()] == ["entry 7", "entry 8"]

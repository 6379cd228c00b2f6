"""The start of a daemon: what it leaves of its environment, what it does not load, and the form of its log."""

import errno
import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.daemon import launcher, process
from mesh.daemon.launcher import last_words, log_tail
from mesh.daemon.layout import Layout
from mesh.daemon.process import LogFormatter, _words
from mesh.gpus.inventory import load_lending
from mesh.util.errors import MeshError

RARE = {"cryptography", "h11", "packaging", "pathspec", "zeroconf"}
START = f"""
import os, sys
from mesh.daemon.entry import load
load()
print(os.environ.get("SSL_CERT_FILE"))
print(*sorted({RARE} & set(sys.modules)))
"""


@pytest.mark.parametrize("authorities", [None, "/etc/lab.pem"])
def test_start_keeps_environment_and_loads_no_library_that_few_nodes_need(authorities: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    if authorities is not None:
        environment["SSL_CERT_FILE"] = authorities
    loaded = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert loaded.stdout.splitlines() == [str(authorities), ""], loaded.stderr


@pytest.mark.parametrize(("overrides", "lends"), [('{"lend": true}', True), ("{}", False)])
def test_lend_option_of_a_start_holds_for_later_ones(overrides: str, lends: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mesh.daemon.entry", "--state", str(tmp_path), "--overrides", overrides]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "belongs to no mesh" in ended.stderr
    assert load_lending(tmp_path / "lending.json", lends=False).lending is lends


@pytest.mark.parametrize(
    ("number", "place", "words"),
    [
        (
            errno.EACCES,
            "/home/ada/mesh/journal",
            "/home/ada/mesh/journal: Permission denied. Name another place with --state.",
        ),
        (errno.EACCES, "/home/ada", "/home/ada: Permission denied. Name another place with --state."),
        (errno.ENOSPC, None, "/home/ada/mesh: No space left on device. Name another place with --state."),
        (errno.EACCES, "/etc/mesh/config.toml", "/etc/mesh/config.toml: Permission denied."),
        (errno.EACCES, None, "Permission denied"),
    ],
)
def test_state_directory_is_blamed_for_its_own_files_only(number: int, place: str | None, words: str) -> None:
    error = OSError(number, os.strerror(number), place)
    assert _words(error, Layout(Path("/home/ada/mesh"), Path("/etc/mesh"))) == words


def test_large_log_is_moved_aside(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    code = f"""
import logging, os
from pathlib import Path
from mesh.daemon import process
process.MAX_LOG_BYTES = 1000
process._write_to(Path({str(log)!r}))
logging.basicConfig(level=logging.INFO, handlers=[process.LogFile(Path({str(log)!r}))])
for number in range(100):
    logging.info("line %d %s", number, "x" * 50)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    old = log.with_suffix(".log.old")
    assert log.stat().st_size <= 1000 and old.stat().st_size <= 1100
    assert f"{old.read_text()}{log.read_text()}".count("line") < 40 and sorted(tmp_path.iterdir()) == [log, old]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x85", "\u2028"])
def test_text_of_others_makes_no_log_line_of_its_own(end: str) -> None:
    forged = f"x{end}2026-01-01 00:00:00,000 ERROR mesh: forged \x1b[2J"
    try:
        raise ValueError(forged)
    except ValueError:
        told = logging.LogRecord("mesh", logging.INFO, "", 0, "a session begins: %s", (forged,), sys.exc_info())
    said = LogFormatter("%(asctime)s %(message)s").format(told)
    first, *more = said.splitlines()
    assert "a session begins: x" in first and "\x1b" not in said and more
    assert all(line.startswith("    ") for line in more)


def test_last_words_of_a_daemon_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "daemon.log"
    assert "without a word" in last_words(log) and log_tail(log, 20) == []
    log.write_text("mesh: an old end\n2026 INFO one\nmesh: the port is in use\nTraceback\n  at the end\n")
    assert last_words(log) == "the port is in use"
    assert log_tail(log, 2) == ["Traceback", "  at the end"]
    log.write_text("one\nboom\n")
    assert last_words(log) == f"the daemon ended at once (boom); its log is {log}"
    monkeypatch.setattr(launcher, "TAIL_BYTES", 5)
    assert log_tail(log, 20) == ["boom"], "a large log is not read whole"
    for user, free in ((0, "f_bfree"), (1000, "f_bavail")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        for left in (0, 1):
            disk = SimpleNamespace(**{"f_bfree": 1, "f_bavail": 0 if user else 1} | {free: left})
            monkeypatch.setattr(os, "statvfs", lambda path, disk=disk: disk)
            assert ("its disk is full" in last_words(log)) != bool(left), (user, left)


def test_daemon_is_ready_once_the_process_that_was_started_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Layout(tmp_path)
    where.socket.touch()
    answers = [{"pid": 6}, MeshError("it does not answer yet"), {"pid": 7}]

    def get(path: str, timeout_s: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, MeshError):
            raise answer
        return answer

    monkeypatch.setattr(launcher, "Client", lambda socket: SimpleNamespace(get=get))
    running: Any = SimpleNamespace(pid=7, poll=lambda: None)
    assert launcher.wait_ready(where, running, 5) == {"pid": 7}, "an older daemon ends and answers meanwhile"
    where.log.write_text("mesh: the port is in use\n")
    ended: Any = SimpleNamespace(pid=7, poll=lambda: 1)
    with pytest.raises(MeshError, match="the port is in use"):
        launcher.wait_ready(where, ended, 5)
    where.socket.unlink()
    with pytest.raises(MeshError, match=r"did not answer within 0.01 s; its log is .*daemon.log"):
        launcher.wait_ready(where, running, 0.01)


def test_daemon_outlives_the_terminal_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "daemon_command", lambda where, overrides: ["sh", "-c", "ps -o sid= -p $$; echo $X"])
    began = launcher.start_daemon(Layout(tmp_path), {}, ("env", "X=8"))
    assert began.wait(60) == 0 and Layout(tmp_path).log.read_text().split() == [str(began.pid), "8"]


def test_command_of_a_daemon_names_its_directories_and_settings(tmp_path: Path) -> None:
    where = Layout(tmp_path / "state", tmp_path / "config")
    command = launcher.daemon_command(where, {"lend": True})
    assert command[command.index("--state") + 1] == str(where.root)
    assert command[command.index("--config") + 1] == str(where.config_root) and command[-1] == '{"lend": true}'
    assert "--config" not in launcher.daemon_command(Layout(tmp_path), {})


def test_second_daemon_of_a_node_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with Layout(tmp_path).lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "mesh.daemon.entry", "--state", str(tmp_path), "--overrides", '{"lend": true}']
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "another daemon runs" in done.stderr
    assert not Layout(tmp_path).lending.exists()


def test_log_of_others_is_not_moved(tmp_path: Path) -> None:
    """Standard error is the terminal of `mesh up --foreground`, and the state has a log of another start."""
    log, other = tmp_path / "daemon.log", tmp_path / "terminal"
    log.write_text("x" * 100)
    code = f"""
import logging
from pathlib import Path
from mesh.daemon import process
process.MAX_LOG_BYTES = 10
logging.basicConfig(level=logging.INFO, handlers=[process.LogFile(Path({str(log)!r}))])
logging.info("a line that is longer")
"""
    with other.open("w") as stderr:
        subprocess.run([sys.executable, "-c", code], stderr=stderr, timeout=60, check=True)
    assert sorted(tmp_path.iterdir()) == [log, other] and log.read_text() == "x" * 100
    assert "a line that is longer" in other.read_text()


def test_log_is_closed_to_others(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path\nfrom mesh.daemon import process\nprocess._write_to(Path({str(tmp_path / 'log')!r}))"
    )
    subprocess.run([sys.executable, "-c", code], umask=0, timeout=60, check=True)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


async def test_daemon_that_fails_to_start_gives_back_the_network_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class Node:
        fails = ""
        edge = SimpleNamespace(close=lambda: steps.append("edge"))
        membership = SimpleNamespace(credentials=SimpleNamespace(nick="desk"))
        trust = SimpleNamespace(genesis=SimpleNamespace(name="lab"))

        def __init__(self, *given: object) -> None:
            pass

        async def _step(self, name: str) -> None:
            steps.append(name)
            if name == self.fails:
                raise MeshError(name)

        async def start(self) -> None:
            await self._step("start")

        async def run(self) -> None:
            await self._step("run")

        async def stop(self) -> None:
            await self._step("stop")

    monkeypatch.setattr(process, "Daemon", Node)
    monkeypatch.setattr(process, "notify", lambda text: steps.append(text.partition("\n")[0]))
    nothing: Any = None
    for fails, taken in (("start", ["start", "edge"]), ("run", ["start", "READY=1", "run", "stop"])):
        Node.fails = fails
        steps.clear()
        with pytest.raises(MeshError):
            await process._run(nothing, nothing)
        assert steps == taken


def test_first_failure_of_a_part_is_the_one_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    inner = ExceptionGroup("", [MeshError("the disk is full"), ValueError("later")])
    assert str(process._first(ExceptionGroup("", [inner, OSError("other")]))) == "the disk is full" and not caplog.text
    assert isinstance(process._first(ExceptionGroup("", [KeyError("x")])), KeyError)
    assert "a part of the daemon failed" in caplog.text, "its traceback is in the log"

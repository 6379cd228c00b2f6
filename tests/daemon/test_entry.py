"""The start of a daemon: what it leaves of its environment, what it does not load, and the form of its log."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.daemon.layout import Layout
from mesh.daemon.process import LogFormatter, _words
from mesh.gpus.inventory import load_lending

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

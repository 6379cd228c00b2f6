"""A fork behaves as the program that it stands for."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack
from tests import forks


def both(cwd: Path, *arguments: str, **changes: str) -> list[tuple[int, str, str]]:
    """Return the code and output of a command as a fork and as a program of its own."""
    env = {**os.environ, **changes}
    fork = forks.run([*arguments], "given\n", cwd, 60.0, env)
    command = [sys.executable, "-m", forks.COMMAND, *arguments]
    own = subprocess.run(command, input="given\n", capture_output=True, text=True, cwd=cwd, env=env, check=False)
    return [(done.returncode, done.stdout, done.stderr) for done in (fork, own)]


@pytest.mark.parametrize("words", ["--help", "ps", "no-such-command", "secret set KEY", "up --now", "config ls --json"])
def test_command_ends_and_says_the_same(words: str, tmp_path: Path) -> None:
    fork, own = both(tmp_path, "--state", "here", *words.split(), COLUMNS="70")
    assert fork == own and any(own[1:])


def test_variables_that_are_read_once_are_those_of_the_order(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'customized')")
    fork, own = both(tmp_path, "--version", PYTHONPATH=str(tmp_path))
    assert fork == own and own[1].endswith("customized\n")


def test_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run(["--help"], "", tmp_path, 0.0, dict(os.environ))


@pytest.mark.e2e
def test_daemon_has_its_own_session_limits_and_exit_code() -> None:
    before = os.umask(0o027)
    try:
        with Stack(2) as stack:
            stack.start_all()
            ended, killed = (node.process for node in stack.nodes)
            assert isinstance(ended, forks.Fork) and isinstance(killed, forks.Fork)
            for process in (ended, killed):
                assert os.getsid(process.pid) == process.pid != os.getsid(0)
                assert resource.prlimit(process.pid, resource.RLIMIT_CPU) == resource.getrlimit(resource.RLIMIT_CPU)
                assert "Umask:\t0027" in Path(f"/proc/{process.pid}/status").read_text()
                opened = {path.readlink() for path in Path(f"/proc/{process.pid}/fd").iterdir() if int(path.name) < 3}
                assert len(opened) == 2
            assert ended.poll() is None
            ended.send_signal(signal.SIGTERM)
            killed.kill()
            assert killed.wait(30) == -signal.SIGKILL and ended.wait(60) == 0
            assert not Path(f"/proc/{killed.pid}").exists(), "its server has reaped it"
    finally:
        os.umask(before)

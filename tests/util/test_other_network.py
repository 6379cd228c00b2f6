"""Sockets that listen in another network: how a network is entered, and what fails. test_guest_network.py enters real ones."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mesh.util import other_network
from mesh.util.other_network import has_own_network, listen_in
from mesh.util.processes import Process

USERS, NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of setns(2)


def entered(monkeypatch: pytest.MonkeyPatch, user: int, same_users: bool, result: int = 0) -> tuple[list[int], str]:
    """Enter a network as this user; return the flags of setns(2) and the address that is listened at."""
    flags: list[int] = []
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(Path, "samefile", lambda path, other: path.name == other.rpartition("/")[2] and same_users)
    monkeypatch.setattr(other_network, "has_own_network", lambda pid: True)
    monkeypatch.setattr(other_network, "Process", lambda pid, started: SimpleNamespace(open=lambda: 77))
    libc = SimpleNamespace(setns=lambda descriptor, kinds: flags.append(kinds) or (result if descriptor == 77 else -1))
    monkeypatch.setattr(other_network.ctypes, "CDLL", lambda name, use_errno: libc)
    monkeypatch.setattr(sys, "argv", ["", "7", "1", "0", str(theirs.detach())])
    with ours:
        other_network.main()
        said, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
        with socket.socket(fileno=descriptor) as listener:
            assert said == b"!" and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return flags, listener.getsockname()[0]


@pytest.mark.parametrize(
    ("user", "same_users", "flags"),
    [(0, True, NETWORK), (0, False, NETWORK), (1000, True, NETWORK), (1000, False, USERS | NETWORK)],
)
def test_users_are_joined_only_where_the_network_is_of_other_users(
    user: int, same_users: bool, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entered(monkeypatch, user, same_users) == ([flags], "127.0.0.1")


def test_network_that_cannot_be_entered_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="the network of process 7 cannot be entered"):
        entered(monkeypatch, 0, True, result=-1)


def test_failed_or_slow_entry_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=1, stderr=b"x" * 400 + b"no entry\n")
    monkeypatch.setattr(subprocess, "run", lambda *asked, **how: done)
    with pytest.raises(OSError, match="no entry") as told:
        listen_in(Process(7, 1), 80)
    assert len(str(told.value)) == 300

    def hangs(*asked: object, timeout: float, **how: object) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(OSError, match="the network of process 7 was not entered within 10 s"):
        listen_in(Process(7, 1), 80)


def test_process_that_is_gone_has_no_network_of_its_own() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not has_own_network(child.pid) and not has_own_network(os.getpid())

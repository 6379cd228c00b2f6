"""Access to the page: tokens, sessions, hosts, origins, and the user of the client."""

import os
import socket
import subprocess
import sys
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.rpc.peer_credentials import is_ours, user_of
from mesh.web.session import MOST, SESSION_S, TOKEN_S, Sessions, is_word, objection

PORT = 7375
OWN = {"Host": f"127.0.0.1:{PORT}"}
NOBODY = 65534


def sessions() -> Sessions:
    numbers = count(1)
    return Sessions(lambda size: next(numbers).to_bytes(size, "big"))


def test_token_works_once_and_expires() -> None:
    door = sessions()
    token = door.invite(0.0)
    visit = door.enter(token, TOKEN_S)
    assert visit is not None and door.find(visit.cookie, TOKEN_S) is visit.session
    assert door.enter(token, TOKEN_S) is None
    assert door.enter(door.invite(0.0), TOKEN_S + 0.1) is None
    assert door.find(token, 0.0) is None and door.enter(visit.cookie, 0.0) is None


def test_session_ends_on_sign_out_or_when_unused() -> None:
    door = sessions()
    visit = door.enter(door.invite(0.0), 0.0)
    assert visit is not None
    assert door.find(visit.cookie, SESSION_S) and door.find(visit.cookie, 2 * SESSION_S)
    assert door.find(visit.cookie, 3 * SESSION_S + 1) is None and not door.holds(visit.session)
    other = door.enter(door.invite(0.0), 0.0)
    assert other is not None and is_word(other.session, other.session.word)
    assert not is_word(other.session, visit.session.word) and not is_word(other.session, "")
    door.end(other.session)
    assert door.find(other.cookie, 0.0) is None


def test_numbers_of_tokens_and_sessions_are_bounded() -> None:
    door = sessions()
    first = door.enter(door.invite(0.0), 0.0)
    assert first is not None
    for now in range(MOST):
        assert door.enter(door.invite(float(now)), now + 1.0)
    assert door.find(first.cookie, 1.0) is None
    old = door.invite(0.0)
    for _ in range(MOST):
        door.invite(0.0)
    assert door.enter(old, 0.0) is None


@given(st.text(), st.text())
def test_guessed_tokens_open_no_session(token: str, word: str) -> None:
    door = sessions()
    visit = door.enter(door.invite(0.0), 0.0)
    assert visit is not None
    assert door.enter(token, 0.0) is None and door.find(word, 0.0) is None and not is_word(visit.session, word)


@pytest.mark.parametrize(
    ("method", "headers", "refused"),
    [
        ("GET", OWN, False),
        ("GET", {"Host": f"localhost:{PORT}"}, False),
        ("GET", {}, True),
        ("GET", {"Host": f"localhost:{PORT + 1}"}, True),
        ("GET", {"Host": "127.0.0.1"}, True),
        ("GET", {"Host": f"attacker.example:{PORT}"}, True),  # DNS rebinding
        ("GET", {"Host": f"127.0.0.1.attacker.example:{PORT}"}, True),
        ("GET", {**OWN, "Sec-Fetch-Site": "same-origin"}, False),
        ("GET", {**OWN, "Sec-Fetch-Site": "none"}, False),
        ("GET", {**OWN, "Sec-Fetch-Site": "cross-site"}, True),
        ("GET", {**OWN, "Sec-Fetch-Site": "same-site"}, True),  # another port of this machine
        (
            "GET",
            {**OWN, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
            False,
        ),
        (
            "GET",
            {**OWN, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
            True,
        ),
        ("POST", OWN, True),
        ("DELETE", OWN, True),
        ("PUT", OWN, True),
        ("POST", {**OWN, "Origin": f"http://127.0.0.1:{PORT}"}, False),
        ("POST", {**OWN, "Origin": "null"}, True),
        ("POST", {**OWN, "Origin": f"http://localhost:{PORT}"}, True),
        ("POST", {**OWN, "Origin": f"http://127.0.0.1:{PORT + 1}"}, True),
        ("POST", {**OWN, "Origin": f"http://127.0.0.1:{PORT}", "Sec-Fetch-Site": "cross-site"}, True),
        (
            "POST",
            {
                **OWN,
                "Origin": f"http://127.0.0.1:{PORT}",
                "Sec-Fetch-Site": "same-site",
                "Sec-Fetch-Mode": "navigate",
                "Sec-Fetch-Dest": "document",
            },
            True,
        ),
    ],
)
def test_requests_of_other_sites_are_refused(method: str, headers: dict[str, str], refused: bool) -> None:
    assert bool(objection(method, headers, PORT)) == refused


CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket() as one:
    one.connect(("127.0.0.1", int(sys.argv[1])))
    one.recv(1)
"""


@pytest.mark.parametrize("uid", [os.geteuid(), *([NOBODY] if os.geteuid() == 0 else [])])
def test_kernel_names_the_user_of_a_connection(uid: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        command = [sys.executable, "-I", "-S", "-c", CONNECT, str(server.getsockname()[1]), str(uid)]
        with subprocess.Popen(command) as process:
            connection, peer = server.accept()
            with connection:
                found = user_of(peer, connection.getsockname())
                assert found == uid and is_ours(found) == (uid == os.geteuid())
                assert user_of((peer[0], peer[1] ^ 1), connection.getsockname()) is None
                process.kill()
                process.wait()
                assert user_of(peer, connection.getsockname()) is None, "a closed connection belongs to no user"
    assert not is_ours(None)

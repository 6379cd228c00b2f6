"""Keys on a session's terminal, and its command-line options."""

import asyncio
import errno
import os
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.interactive import _parse_forward
from mesh.cli.tunnel import Escape, Forwarder
from mesh.jobs.tunnel_targets import TunnelTarget, parse_target
from mesh.util.errors import MeshError


@pytest.mark.parametrize(
    ("typed", "through", "over"),
    [
        (b"~.", b"", True),
        (b"ls\r~.", b"ls\r", True),
        (b"ls~.", b"ls~.", False),
        (b"~~.", b"~.", False),
        (b"~x", b"~x", False),
        (b"\r~\r~.", b"\r~\r", True),
        (b"\x03~.", b"\x03", True),
    ],
)
def test_tilde_and_point_at_line_start_end_the_session(typed: bytes, through: bytes, over: bool) -> None:
    assert Escape().take(typed) == (through, over)
    escape, found, ended = Escape(), b"", False
    for byte in typed:
        piece, ended = escape.take(bytes([byte]))
        found += piece
    assert (found, ended) == (through, over), "one byte at a time"


@given(st.binary().filter(lambda typed: b"~" not in typed))
def test_other_input_passes_through(typed: bytes) -> None:
    assert Escape().take(typed) == (typed, False)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("80", (80, "port-80")),
        ("8080:80", (8080, "port-80")),
        ("app.sock", (0, "socket-app.sock")),
        ("8080:app.sock", (8080, "socket-app.sock")),
    ],
)
def test_forward_option_is_parsed(text: str, meant: tuple[int, str]) -> None:
    assert _parse_forward(text) == meant
    parse_target(meant[1])


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,6}(:[0-9a-z./]{1,6})?", fullmatch=True))
def test_forward_parser_accepts_or_raises(text: str) -> None:
    try:
        local, way = _parse_forward(text)
    except click.BadParameter as error:
        assert "is neither" in error.message
        return
    assert 0 <= local <= 65_535 and parse_target(way) != TunnelTarget()


@given(st.text(max_size=80) | st.text(max_size=20).map(lambda text: f"port-{text}") | st.text().map("socket-{}".format))
def test_tunnel_target_parser_accepts_or_raises(text: str) -> None:
    try:
        way = parse_target(text)
    except ValueError:
        return
    assert text == "exec" or 1 <= way.port <= 65_535 or "/" not in way.socket not in {"", ".", ".."}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EADDRINUSE, errno.EADDRNOTAVAIL])
async def test_port_that_cannot_be_used_is_refused_with_the_reason(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*arguments: object, **more: object) -> None:
        raise OSError(number, "error while attempting to bind on address ('127.0.0.1', 80): refused")

    monkeypatch.setattr(asyncio, "start_server", refused)
    nothing: Any = None
    with pytest.raises(MeshError) as caught:
        await Forwarder(nothing, "job", "port-80", print).listen(80)
    assert f"port 80 on 127.0.0.1 cannot be used ({os.strerror(number)}): choose another" in str(caught.value)

"""What a person types on a session's terminal and on its command line."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.api.ways import Way, parse_way
from mesh.cli.interactive import _parse_forward
from mesh.cli.tunnel import Escape


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
def test_a_tilde_and_a_point_at_the_beginning_of_a_line_leave(typed: bytes, through: bytes, over: bool) -> None:
    assert Escape().take(typed) == (through, over)
    escape, found, ended = Escape(), b"", False
    for byte in typed:
        piece, ended = escape.take(bytes([byte]))
        found += piece
    assert (found, ended) == (through, over), "however it comes"


@given(st.binary().filter(lambda typed: b"~" not in typed))
def test_everything_else_goes_through(typed: bytes) -> None:
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
def test_what_is_forwarded(text: str, meant: tuple[int, str]) -> None:
    assert _parse_forward(text) == meant
    parse_way(meant[1])


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,6}(:[0-9a-z./]{1,6})?", fullmatch=True))
def test_any_text_is_a_forward_or_refused_in_words(text: str) -> None:
    try:
        local, way = _parse_forward(text)
    except click.BadParameter as error:
        assert "is neither" in error.message
        return
    assert 0 <= local <= 65_535 and parse_way(way) != Way()


@given(st.text(max_size=80) | st.text(max_size=20).map(lambda text: f"port-{text}") | st.text().map("socket-{}".format))
def test_any_text_is_a_way_or_refused(text: str) -> None:
    try:
        way = parse_way(text)
    except ValueError:
        return
    assert text == "exec" or 1 <= way.port <= 65_535 or "/" not in way.socket not in {"", ".", ".."}

"""The parser of ClientHellos: names are found whatever pieces they come in, and nothing that hides a name passes."""

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.network.client_hello import MOST_BYTES, HelloReader, HelloRefused
from tests.network.hellos import SERVER_NAME, block, hello, message, of_python, records, server_name

LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=2, max_size=6).map(".".join)
OTHERS = st.lists(st.tuples(st.integers(1, 0xF000), st.binary(max_size=200)), max_size=8)


def fed(data: bytes, cuts: list[int]) -> str | None:
    """Return what a reader finds that gets the data in pieces."""
    reader, name, edges = HelloReader(), None, [0, *sorted(cuts), len(data)]
    for start, end in pairwise(edges):
        name = reader.feed(data[start:end])
        if name is not None:
            break
    return name


@given(NAME, OTHERS, OTHERS, st.data())
def test_name_is_found_in_all_fragmentations(
    name: str, before: list[tuple[int, bytes]], after: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    whole = message([*before, (SERVER_NAME, server_name(name.upper().encode())), *after])
    split = records(whole, *data.draw(st.lists(st.integers(1, len(whole) - 1), max_size=12)))
    assert fed(split, data.draw(st.lists(st.integers(0, len(split)), max_size=12))) == name
    early = split + b"\x17\x03\x03\0\x05early"  # data of the first flight, beyond the hello
    assert fed(early, []) == name


@given(NAME, st.data())
def test_part_of_a_hello_names_nothing(name: str, data: st.DataObject) -> None:
    whole = hello(name.encode())
    assert fed(whole[: data.draw(st.integers(0, len(whole) - 1))], []) is None


@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=5))
def test_any_bytes_are_refused_or_incomplete(junk: bytes, cuts: list[int]) -> None:
    for data in (junk, b"\x16\x03\x01" + block(2, b"\x01" + block(3, junk))):
        with contextlib.suppress(HelloRefused):
            assert fed(data, [cut for cut in cuts if cut < len(data)]) is None


@given(NAME, st.integers(0, 10_000), st.integers(0, 255))
def test_changed_byte_never_yields_a_wrong_kind_of_answer(name: str, at: int, value: int) -> None:
    data = bytearray(hello(name.encode()))
    data[at % len(data)] = value
    try:
        found = fed(bytes(data), [])
    except HelloRefused:
        return
    assert found is None or (found.isascii() and found == found.lower())


def test_hello_of_pythons_own_tls_is_read() -> None:
    assert fed(of_python("files.pythonhosted.org"), []) == "files.pythonhosted.org"


NAMED = (SERVER_NAME, server_name(b"a.example"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (records(message([])), "no server name"),
        (records(message([(1, b""), NAMED, NAMED])), "several server names"),
        (records(message([(SERVER_NAME, block(2, 2 * (b"\0" + block(2, b"a.example"))))])), "several server names"),
        (records(message([(SERVER_NAME, server_name(b"a.example") + b"x")])), "after its end"),
        (records(message([(SERVER_NAME, server_name(b"a.example", kind=1))])), "unknown kind"),
        (records(message([(SERVER_NAME, server_name("ä.example".encode()))])), "not ASCII"),
        (records(message([NAMED, (0xFE0D, b"x")])), "encrypted hello"),
        (records(message([(0xFFCE, b"x"), NAMED])), "encrypted server name"),
        (records(message([NAMED]) + message([NAMED])), "more than a ClientHello"),
        (records(b"\x02" + message([NAMED])[1:]), "no ClientHello"),
        (b"\x17" + hello(b"a.example")[1:], "no TLS"),
        (b"\x16\x02" + hello(b"a.example")[2:], "no TLS"),
        (b"\x16\x03\x01\0\0" + hello(b"a.example"), "no TLS"),
        (records(message([(SERVER_NAME, block(2, b"\0" + (90).to_bytes(2) + b"a.example"))])), "cut off"),
        (b"GET / HTTP/1.1\r\n\r\n", "no TLS"),
        (b"GET /", "no TLS"),
    ],
    ids=lambda part: part.replace(" ", "-") if isinstance(part, str) else "",
)
def test_what_hides_a_name_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(HelloRefused, match=reason):
        fed(data, [])


def test_endless_hello_is_refused_at_its_bound() -> None:
    huge = message([NAMED], ciphers=30_000)
    assert HelloReader().feed(records(huge)[:MOST_BYTES]) is None
    reader, given_bytes = HelloReader(), 0
    with pytest.raises(HelloRefused, match=f"within {MOST_BYTES} bytes"):
        for at in range(0, len(huge), 8):
            reader.feed(records(huge[at : at + 8]))
            given_bytes += 13
    assert given_bytes <= MOST_BYTES and len(reader.received) <= MOST_BYTES

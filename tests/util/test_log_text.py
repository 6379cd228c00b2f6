"""Program output as plain text."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.util.log_text import LogText, lines

ORDERS = [b"\x1b[31m", b"\x1b[0m", b"\x1b]0;title\x07", b"\x1b[2K", b"\r", b"\n", b"\r\n", b"\x1bPq\x1b\\", b"\xc3\xa4"]
PRINTED = st.lists(st.sampled_from(ORDERS) | st.binary(max_size=8)).map(b"".join)


def text_of(*pieces: bytes) -> str:
    reader = LogText()
    return "".join(reader.feed(piece) for piece in pieces)


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        (b"\x1b[1;31mred\x1b[0m plain\n", "red plain\n"),
        (b"\x1b]0;a title\x07text\x1b]8;;http://x\x1b\\link\n", "textlink\n"),
        (b"one\r\ntwo\n", "one\ntwo\n"),
        (b"bell\x07 null\x00\n", "bell\ufffd null\ufffd\n"),
        (b"<script>alert(1)</script>\n", "<script>alert(1)</script>\n"),  # which the markup escapes
        (b"\xff\xc3\xa4\n", "\ufffdä\n"),
    ],
)
def test_escape_sequences_are_removed(printed: bytes, seen: str) -> None:
    assert text_of(printed) == seen


def test_progress_bar_shows_last_state() -> None:
    assert lines(text_of(b"10%\r", b"20%\r", b"30%\nnext\n")) == "30%\nnext\n"


@given(PRINTED, st.lists(st.integers(0, 60)))
def test_log_text_accepts_any_split(printed: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(printed), *(cut for cut in cuts if cut < len(printed))})
    pieces = [printed[start:end] for start, end in pairwise(places)]
    whole = text_of(*pieces, b".\n")
    assert whole == text_of(printed, b".\n") == text_of(printed + b".\n")
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", whole)


def test_colours_are_kept_where_wanted_and_ended() -> None:
    reader = LogText(colours=True)
    assert reader.feed(b"\x1b[31mred\x1b[2K\x08 x") + reader.finish() == "\x1b[31mred x\x1b[m"
    assert LogText(colours=True).finish() == "", "none has begun"
    reader = LogText(colours=True)
    assert reader.feed(b"plain") + reader.finish() == "plain"


def test_end_of_the_output_cuts_a_character_short_and_nothing_else() -> None:
    reader = LogText()
    assert reader.feed(b"one\xc3") + reader.finish() == "one\ufffd" and reader.finish() == ""
    held = LogText()
    assert held.feed(b"one\r") == "one" and held.finish() == "\r"


def test_sequence_that_never_ends_holds_up_no_output() -> None:
    reader = LogText()
    assert reader.feed(b"\x1b]" + b"x" * 100) == ""
    assert len(reader.feed(b"y" * 5000)) == 5102

"""Frames of sessions: whatever bytes come, they are a frame or refused; and a stream gives them back however it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.execution.process.session_agent import MAX_FRAME_BYTES as OF_THE_AGENT
from mesh.execution.session_framing import TooLong, Unframer, framed
from mesh.rpc.frames import (
    ERRORS,
    INPUT,
    MAX_FRAME_BYTES,
    OUTPUT,
    Data,
    Exit,
    Failed,
    Frame,
    FrameError,
    InputEnd,
    Note,
    Opened,
    Order,
    Resize,
    Signal,
    decode_frame,
    encode_frame,
    failed,
)

texts = st.text(max_size=200)
sides = st.integers(1, 65_535)
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Data, st.sampled_from([INPUT, OUTPUT, ERRORS]), st.binary(max_size=4000)),
    st.builds(
        Order,
        st.lists(texts, min_size=1, max_size=5).map(tuple),
        st.booleans(),
        st.sampled_from(["", "xterm-256color"]),
        sides,
        sides,
    ),
    st.builds(Resize, sides, sides),
    st.sampled_from([Signal("INT"), Signal("KILL"), InputEnd(), Exit(0), Exit(255)]),
    st.builds(Opened, texts),
    st.builds(Note, texts),
    st.builds(failed, st.text(), st.integers(1, 255), st.sampled_from([0.0, 10.0])),
)


@given(frames)
def test_frame_round_trips(frame: Frame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: b"\x03" + data))
def test_frame_decoder_accepts_or_raises(data: bytes) -> None:
    try:
        frame = decode_frame(data)
    except FrameError:
        return
    assert isinstance(frame, Data) or decode_frame(encode_frame(frame)) == frame


@pytest.mark.parametrize(
    "word",
    [
        b'{"type":"exit","code":256}',
        b'{"type":"exit","code":-1}',
        b'{"type":"order","argv":[]}',
        b'{"type":"order","argv":["x"],"term":"a b"}',
        b'{"type":"order","argv":["x"],"uid":0}',
        b'{"type":"resize","rows":0,"columns":80}',
        b'{"type":"resize","rows":70000,"columns":80}',
        b'{"type":"signal","name":"SEGV"}',
        b'{"type":"failed","text":"","again_s":1e9}',
        b'{"type":"other"}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_out_of_range_control_is_refused(word: bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(b"\x03" + word)


def test_frame_length_is_limited() -> None:
    assert isinstance(decode_frame(bytes(MAX_FRAME_BYTES)), Data)
    for data in (b"", bytes(MAX_FRAME_BYTES + 1)):
        with pytest.raises(FrameError):
            decode_frame(data)
    assert len(failed("x" * 10**6).text) < MAX_FRAME_BYTES and isinstance(failed(""), Failed)
    assert OF_THE_AGENT == MAX_FRAME_BYTES


@given(st.lists(st.binary(max_size=100), max_size=10), st.lists(st.integers(1, 50), min_size=1))
def test_unframer_accepts_any_split(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, pieces))
    unframer, found, place = Unframer(100), [], 0
    for number in range(len(stream)):
        size = cuts[number % len(cuts)]
        found += unframer.feed(stream[place : place + size])
        place += size
        if place >= len(stream):
            break
    assert found == pieces


@given(st.binary(max_size=400))
def test_unframer_buffer_is_bounded(data: bytes) -> None:
    unframer = Unframer(64)
    try:
        for byte in data:
            assert all(len(frame) <= 64 for frame in unframer.feed(bytes([byte])))
            assert len(unframer._rest) <= 68
    except TooLong:
        return

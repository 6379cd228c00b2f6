"""A session of the process engine over real sockets; the test takes the place of the guest's watcher and of the command."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from mesh.execution.session import FULL_BYTES, ProcessSession, SessionError, open_process_session
from mesh.execution.session_framing import HEADER, framed
from mesh.rpc.frames import (
    INPUT,
    MAX_FRAME_BYTES,
    MOVES_S,
    OUTPUT,
    PIECE_BYTES,
    Data,
    Exit,
    Failed,
    Frame,
    Opened,
    Order,
    encode_frame,
)

pytestmark = pytest.mark.timeout(60)  # a broken session would wait for ever
ORDER = Order(("true",))
LONG = 256 * PIECE_BYTES  # more than sockets and buffers hold


class Command:
    """The end that the watcher hands to the command."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        end.setblocking(False)

    async def tell(self, *frames: Frame) -> None:
        await self.write(b"".join(framed(encode_frame(frame)) for frame in frames))

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.end, data)

    async def read(self, size: int) -> bytes:
        """Return so many bytes; fewer if the session ends before."""
        found = b""
        while len(found) < size:
            try:
                some = await asyncio.get_running_loop().sock_recv(self.end, size - len(found))
            except ConnectionError:
                return found
            if not some:
                return found
            found += some
        return found


@pytest.fixture
async def opened() -> AsyncIterator[tuple[ProcessSession, Command]]:
    doors, watcher = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with doors, watcher:
        session = await open_process_session(doors, ORDER)
        assert isinstance(session, ProcessSession)
        word, (descriptor,), _, _ = socket.recv_fds(watcher, 16, 1)
        assert word == b"session"
        with socket.socket(fileno=descriptor) as end:
            command = Command(end)
            order = framed(encode_frame(ORDER))
            assert await command.read(len(order)) == order
            yield session, command
            await session.close()


async def test_output_comes_in_order_and_then_the_end_alone(opened: tuple[ProcessSession, Command]) -> None:
    session, command = opened
    longest = Data(OUTPUT, bytes(MAX_FRAME_BYTES - 1))
    telling = asyncio.create_task(command.tell(Opened(), Opened("node"), Data(OUTPUT, b"out"), longest, Exit(3)))
    assert [await session.receive() for _ in range(5)] == [Data(OUTPUT, b"out"), longest, Exit(3), None, None]
    await telling
    assert await command.read(1) == b"", "the command hears that it was heard"


async def test_failure_that_the_command_tells_is_the_end(opened: tuple[ProcessSession, Command]) -> None:
    session, command = opened
    await command.tell(Failed("no such program", 127))
    assert [await session.receive() for _ in range(2)] == [Failed("no such program", 127), None]
    assert await command.read(1) == b""


@pytest.mark.parametrize("heard", [False, True])
async def test_end_without_a_word_is_a_failure_to_try_again(
    opened: tuple[ProcessSession, Command], heard: bool
) -> None:
    session, command = opened
    if heard:
        await command.tell(Opened())
    await session.send(Data(INPUT, b"not read, so the connection is reset"))
    command.end.close()
    failed = await session.receive()
    assert isinstance(failed, Failed) and failed.again_s == MOVES_S
    assert ("the session ended with the job" if heard else "the job may not run now") in failed.text
    assert await session.receive() is None
    await session.send(Data(INPUT, b"nobody takes it"))


@pytest.mark.parametrize(
    "data", [framed(b"\x07"), framed(b""), HEADER.pack(MAX_FRAME_BYTES + 1)], ids=["kind", "empty", "long"]
)
async def test_what_is_no_frame_ends_the_session(opened: tuple[ProcessSession, Command], data: bytes) -> None:
    """At once: nothing more is read."""
    session, command = opened
    await command.write(data)
    async with asyncio.timeout(60):
        assert isinstance(await session.receive(), Failed) and await session.receive() is None
    assert await command.read(1) == b""


async def test_input_is_bounded_while_the_command_reads_none(opened: tuple[ProcessSession, Command]) -> None:
    session, command = opened

    async def send() -> None:
        for _ in range(LONG // PIECE_BYTES):
            await session.send(Data(INPUT, bytes(PIECE_BYTES)))

    sending, came = asyncio.create_task(send()), 0
    await asyncio.sleep(0)
    while not sending.done():
        assert session._writer.transport.get_write_buffer_size() <= FULL_BYTES + 2 * PIECE_BYTES
        came += len(await command.read(PIECE_BYTES))
    assert came > LONG - (1 << 20)


async def test_output_is_bounded_while_nobody_receives_it(opened: tuple[ProcessSession, Command]) -> None:
    session, command = opened
    telling = asyncio.create_task(command.tell(*[Data(OUTPUT, bytes(PIECE_BYTES))] * (LONG // PIECE_BYTES), Exit(0)))
    for _ in range(200):
        await asyncio.sleep(0)
    assert not telling.done()
    came = 0
    while isinstance(frame := await session.receive(), Data):
        came += len(frame.data)
    assert (frame, came) == (Exit(0), LONG)
    await telling


async def test_session_that_is_closed_does_not_wait_for_its_input(opened: tuple[ProcessSession, Command]) -> None:
    session, command = opened
    sending = asyncio.create_task(session.send(Data(INPUT, bytes(LONG))))
    await asyncio.sleep(0)
    closing = asyncio.create_task(session.close())
    assert len(await command.read(LONG)) < LONG
    await asyncio.gather(sending, closing)
    assert await session.receive() is None


async def test_guest_that_takes_no_session_refuses_it() -> None:
    doors, watcher = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watcher.close()
    with doors, pytest.raises(SessionError, match="the job has ended here"):
        await open_process_session(doors, ORDER)


async def test_guest_that_stands_still_holds_up_no_other() -> None:
    """Its watcher takes nothing, so the call would block."""
    doors, watcher = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with doors, watcher:
        doors.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                doors.send(b"session")
        doors.setblocking(True)
        with pytest.raises(SessionError, match="does not answer"):
            await open_process_session(doors, ORDER)

"""Frames on a TCP stream: a 4-byte big-endian length, then the frame."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from membership.addresses import address_text
from membership.reconcile import FRAME_LIMIT, FrameError

PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 10, 5, 3  # detects after 25 s that the other machine is gone (own choice)


def keep_alive(sock: Any) -> None:
    """Have the kernel notice that the machine at the other end of a TCP connection is gone, and send at once."""
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@asynccontextmanager
async def connected(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a node, and close the connection at the end. OSError."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except (ValueError, OverflowError) as error:  # of a seed that no name can be written as, or a port of mDNS
        raise OSError(f"{address_text(host, port)} is not an address") from error
    try:
        yield reader, writer
    finally:
        writer.close()


async def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def read_frame(
    reader: asyncio.StreamReader, limit: int = FRAME_LIMIT, take: Callable[[int], bool] = lambda length: True
) -> bytes:
    """Read one frame, if `take` has room for its length.

    FrameError if it is too long or there is no room, asyncio.IncompleteReadError if it is cut off.
    """
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is over the limit of {limit}")
    if not take(length):
        raise FrameError(f"no room for a frame of {length} bytes from this address")
    return await reader.readexactly(length)

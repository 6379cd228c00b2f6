"""A TCP socket with a rate limit and a traffic class, both enforced by the kernel.

Linux only; elsewhere streams are not paced, and a warning says so once.
"""

import errno
import logging
import socket
import struct
from typing import Any

import msgspec

SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)  # socket(7), Linux 3.13
UNLIMITED = (1 << 8 * struct.calcsize("@L")) - 1
# These keep the rate within 1 % (own measurement); BBR, the default of some systems, misses it by up to 13 %. Not every process
# may choose CUBIC (`tcp_allowed_congestion_control`).
STEADY = (b"cubic", b"reno")
NAME_BYTES = 16  # TCP_CA_NAME_MAX
# Offsets in struct tcp_info of linux/tcp.h: microseconds, then bytes.
RTT_AT, ACKED_AT, RECEIVED_AT, NOT_SENT_AT, LEAST_RTT_AT = 68, 120, 128, 144, 148
INFO_BYTES = 152

log = logging.getLogger(__name__)
_warned: set[str] = set()


class TcpInfo(msgspec.Struct, frozen=True):
    """The kernel's view of a connection: round-trip times in seconds, bytes acknowledged, received, and not sent yet."""

    smoothed_s: float
    least_s: float
    acked: int
    received: int
    not_sent: int


class PacedSocket:
    """A socket, or asyncio's view of one. Nothing is changed before the first limit."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._before: bytes | None = None  # its original congestion control
        self._limited = False
        self._priority = 0

    def enter(self, priority: int) -> None:
        """Set the traffic class of what it sends from now on (`mesh.network.shaping`); 0 is none."""
        if priority == self._priority:
            return
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        except (OSError, AttributeError) as error:
            _warn("streams have no traffic class", error)
            return
        self._priority = priority

    def limit(self, rate_bps: float | None) -> bool:
        """Limit the rate, in bytes per second; None removes the limit. False if this system cannot."""
        if rate_bps is None and not self._limited:
            return True
        try:
            if self._before is None:
                self._steady()
            rate = UNLIMITED if rate_bps is None else max(1, min(int(rate_bps), UNLIMITED - 1))
            self._sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("@L", rate))
        except (OSError, AttributeError) as error:
            _warn("streams are not paced", error)
            return False
        self._limited = rate_bps is not None
        return True

    def info(self) -> TcpInfo | None:
        """Return the kernel's view of the connection; None if it is not available."""
        try:
            data = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        except (OSError, AttributeError) as error:
            _warn("round-trip times of streams are unknown", error)
            return None
        if len(data) < INFO_BYTES:  # before Linux 4.6
            return None
        (smoothed,), (least,) = struct.unpack_from("@I", data, RTT_AT), struct.unpack_from("@I", data, LEAST_RTT_AT)
        (acked,), (received,) = struct.unpack_from("@Q", data, ACKED_AT), struct.unpack_from("@Q", data, RECEIVED_AT)
        (not_sent,) = struct.unpack_from("@I", data, NOT_SENT_AT)
        # The least time is all ones before the first measurement.
        return TcpInfo(smoothed / 1e6, min(least, smoothed) / 1e6, acked, received, not_sent)

    def release(self) -> None:
        """Restore the original settings, for the next request on the same connection."""
        self.limit(None)
        self.enter(0)
        if self._before:
            try:
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._before)
            except OSError as error:
                _warn("the congestion control of a connection could not be restored", error)

    def _steady(self) -> None:
        self._before = b""
        before = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_BYTES).split(b"\0")[0]
        for name in STEADY:
            if name == before:
                return
            try:
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            except OSError:
                continue
            self._before = before
            return


def _warn(what: str, error: Exception) -> None:
    """Warn once about each thing that this system cannot do. A closed connection is not a reason."""
    if getattr(error, "errno", None) in {errno.EBADF, errno.ENOTCONN, errno.EINVAL} or what in _warned:
        return
    _warned.add(what)
    log.warning("%s: %s", what, error)

"""A TCP socket whose kernel sends no faster than it is told, and in the class it is told. Linux; elsewhere nothing is held back,
and that is said once."""

import errno
import logging
import socket
import struct
from typing import Any

import msgspec

SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)  # socket(7), Linux 3.13
UNLIMITED = (1 << 8 * struct.calcsize("@L")) - 1
# They keep to the rate within 1 % (own measurement); BBR, the default of some systems, misses it by up to 13 %. Not every
# process may choose CUBIC (`tcp_allowed_congestion_control`).
STEADY = (b"cubic", b"reno")
NAME_BYTES = 16  # TCP_CA_NAME_MAX
# Of struct tcp_info in linux/tcp.h: microseconds, then bytes.
RTT_AT, ACKED_AT, NOT_SENT_AT, LEAST_RTT_AT = 68, 120, 144, 148
INFO_BYTES = 152

log = logging.getLogger(__name__)
_told: set[str] = set()


class TcpInfo(msgspec.Struct, frozen=True):
    """What the kernel knows of a connection: round-trip times in seconds, bytes acknowledged, bytes it has not sent yet."""

    smoothed_s: float
    least_s: float
    acked: int
    not_sent: int


class PacedSocket:
    """`sock`: a socket, or what asyncio shows of one. Nothing is changed before the first limit."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._before: bytes | None = None  # the congestion control that it had
        self._limited = False
        self._priority = 0

    def enter(self, priority: int) -> None:
        """What it sends from now on is of this class (`mesh.edge.shaping`); 0 is none."""
        if priority == self._priority:
            return
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        except (OSError, AttributeError) as error:
            _tell("streams are of no class", error)
            return
        self._priority = priority

    def limit(self, rate_bps: float | None) -> bool:
        """Send no more bytes a second than that; None: as it goes. False if this system cannot."""
        if rate_bps is None and not self._limited:
            return True
        try:
            if self._before is None:
                self._steady()
            rate = UNLIMITED if rate_bps is None else max(1, min(int(rate_bps), UNLIMITED - 1))
            self._sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("@L", rate))
        except (OSError, AttributeError) as error:
            _tell("streams are not paced", error)
            return False
        self._limited = rate_bps is not None
        return True

    def info(self) -> TcpInfo | None:
        """None where the kernel does not say."""
        try:
            data = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        except (OSError, AttributeError) as error:
            _tell("round-trip times of streams are not known", error)
            return None
        if len(data) < INFO_BYTES:  # before Linux 4.6
            return None
        (smoothed,), (least,) = struct.unpack_from("@I", data, RTT_AT), struct.unpack_from("@I", data, LEAST_RTT_AT)
        (acked,), (not_sent,) = struct.unpack_from("@Q", data, ACKED_AT), struct.unpack_from("@I", data, NOT_SENT_AT)
        # All ones: it has seen none yet.
        return TcpInfo(smoothed / 1e6, min(least, smoothed) / 1e6, acked, not_sent)

    def release(self) -> None:
        """As it was before: the next request on the same connection is not held back."""
        self.limit(None)
        self.enter(0)
        if self._before:
            try:
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._before)
            except OSError as error:
                _tell("the congestion control of a connection could not be restored", error)

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


def _tell(what: str, error: Exception) -> None:
    """Once for each thing that this system cannot do; a connection that is gone is no such thing."""
    if getattr(error, "errno", None) in {errno.EBADF, errno.ENOTCONN, errno.EINVAL} or what in _told:
        return
    _told.add(what)
    log.warning("%s: %s", what, error)

"""One end of a flow, as its own process in a network namespace, so that nothing else takes its time.

flow.py flood ADDRESS PORT MBPS          datagrams of 1,400 bytes, until it is ended
flow.py stream ADDRESS PORT MBPS         TCP at a fixed rate; data that cannot be sent in time is dropped
flow.py take ADDRESS                     receives one stream; prints its port, and at the end of its input (t, bytes) as JSON
"""

import contextlib
import ctypes
import json
import os
import select
import socket
import sys
import time

DATAGRAM = 1400
TOGETHER = 16  # datagrams in one call
LATE_S = 0.05  # older data of a stream is dropped, as in a live stream, which does not catch up
TICK_S = 0.002


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("vectors", ctypes.POINTER(_Vector)),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("sent", ctypes.c_uint))


def flood(address: str, port: int, mbps: float) -> None:
    libc = ctypes.CDLL(None)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((address, port))
    body = ctypes.create_string_buffer(DATAGRAM)
    vector = _Vector(ctypes.addressof(body), DATAGRAM)
    header = _Header(vectors=ctypes.pointer(vector), count=1)
    messages = (_Message * TOGETHER)(*[_Message(header)] * TOGETHER)
    step, fd = TOGETHER * DATAGRAM * 8 / (mbps * 1e6), sock.fileno()
    due = time.monotonic()
    while True:
        now = time.monotonic()
        if now < due:
            continue  # a sleep would take longer than the step
        libc.sendmmsg(fd, messages, TOGETHER, 0)
        due = max(due + step, now - 0.01)


def stream(address: str, port: int, mbps: float) -> None:
    sock = socket.create_connection((address, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    rate, begun, given = mbps * 1e6 / 8, time.monotonic(), 0.0
    block = bytes(1 << 20)
    while True:
        due = (time.monotonic() - begun) * rate
        given = max(given, due - LATE_S * rate)
        if due - given >= 1:
            try:
                given += sock.send(block[: min(len(block), int(due - given))])
            except BlockingIOError:
                pass
            except ConnectionError:
                return
        time.sleep(TICK_S)


def take(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        sock, _ = server.accept()
    seen, count = [(time.monotonic(), 0)], 0
    while sys.stdin not in select.select([sock, sys.stdin], [], [])[0]:
        count += len(sock.recv(1 << 20))
        if time.monotonic() - seen[-1][0] >= TICK_S:
            seen.append((time.monotonic(), count))
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # other load on this machine should not change the result
    match sys.argv[1:]:
        case ["flood", address, port, mbps]:
            flood(address, int(port), float(mbps))
        case ["stream", address, port, mbps]:
            stream(address, int(port), float(mbps))
        case ["take", address]:
            take(address)

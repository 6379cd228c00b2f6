"""The kill-switch: a thread of its own that ends guests, whatever else this process waits for.

It listens on a socket of its own in the state directory (one line is the order, one line of JSON the answer), so that
`mesh reclaim --now` works while the event loop is blocked; and it does what the loop orders for single guests, so that there is
one way in which a guest is killed. It waits for no network, no engine, no disk and no lock that is held across any of these.
`mesh killall` does the same from outside, by the same register, where this process is stopped or gone.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.engine.engine import EngineError
from mesh.engine.guestgroup import remove_groups
from mesh.engine.hunt import LONGEST_PAUSE_S, PAUSE_S, Hunt, Struck, run
from mesh.engine.register import Entry, Register

LINE_LIMIT, CLIENTS = 256, 16  # bytes of an order; who is heard at once; ours
BY_OWNER = "its owner took the machine back at once"

log = logging.getLogger(__name__)
Outcome = concurrent.futures.Future[list[Struck]]


@dataclass
class _Order:
    """Hunts that are answered for together. `tell`: once their first signals are sent."""

    hunts: list[Hunt]
    done: Outcome
    said: str
    begun: float = field(default_factory=time.monotonic)
    tell: Callable[[], object] | None = None
    pause_s: float = PAUSE_S
    due: float = 0.0


class KillSwitch:
    """`first` is called before the signals of an owner's order, in the switch's thread: it must not wait (a gate to shut, a flag
    in a map). `struck` is called after them, to let the rest of the daemon know; also from that thread. Not before: who is told
    may clear guests away, and nobody would know any more that they were ended."""

    def __init__(self, register: Register | None = None, socket_path: Path | None = None) -> None:
        """Without a register, guests are known to this process alone, as in tests of an engine."""
        self.holding = False
        self.first: list[Callable[[], object]] = []
        self.struck: Callable[[], object] = lambda: None
        self.register, self._socket_path = register, socket_path
        self._lock = threading.Lock()  # of the guests and the orders; never held across a system call that can wait
        self._guests: dict[str, Entry] = {}
        self._by_owner: set[str] = set()
        self._orders: list[_Order] = []
        self._wake_here, self._wake_there = os.pipe()
        os.set_blocking(self._wake_there, False)
        self._closing = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    # --- for the daemon

    def open(self) -> None:
        """Begin to listen. OSError if the socket cannot be made."""
        if self._socket_path is not None:
            self._socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._socket_path.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                self._listener.bind(str(self._socket_path))
            finally:
                os.umask(before)
            self._listener.listen(CLIENTS)
            self._listener.setblocking(False)
        self._run()

    def close(self) -> None:
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
        for descriptor in (self._wake_here, self._wake_there):
            os.close(descriptor)

    def release(self) -> None:
        """The owner lends again."""
        self.holding = False

    def strike(self) -> Outcome:
        """End every guest for the owner, and start none until `release`."""
        done: Outcome = concurrent.futures.Future()
        self._strike(done)
        return done

    # --- for engines

    def enter(self, entry: Entry) -> str:
        """Before any program of the guest can run: the key by which it is known. EngineError if it must not start."""
        key = f"{entry.job[:8]}-{secrets.token_hex(8)}"
        self.amend(key, entry)
        if self.holding:
            self.leave(key)
            raise EngineError("its owner has taken this machine back")
        return key

    def amend(self, key: str, entry: Entry) -> None:
        """More is known of it. EngineError if that cannot be noted."""
        with self._lock:
            self._guests[key] = entry
        if self.register is not None:
            try:
                self.register.keep(key, entry)
            except OSError as error:
                self.leave(key)
                raise EngineError(f"the guest cannot be noted where `mesh killall` looks: {error}") from error

    def started(self, key: str) -> None:
        """EngineError, and it has been ended, if its owner took the machine back while it started. Not on the loop: it waits."""
        if self.holding or (self.register is not None and self.register.is_struck(key)):
            self.kill(key).result()
            raise EngineError("its owner has taken this machine back")

    def leave(self, key: str) -> str:
        """Nothing of it is left: why it was ended, if it was for its owner."""
        with self._lock:
            self._guests.pop(key, None)
            by_owner = key in self._by_owner
            self._by_owner.discard(key)
        if self.register is not None and self.register.drop(key):
            by_owner = True
        return BY_OWNER if by_owner else ""

    def kill(self, key: str) -> Outcome:
        """End one guest; done at once where it is none any more."""
        done: Outcome = concurrent.futures.Future()
        with self._lock:
            entry = self._guests.get(key)
            if entry is not None:
                self._orders.append(_Order([Hunt(entry, time.monotonic())], done, "killed"))
        if entry is None:
            done.set_result([])
        else:
            self._run()
            self._wake()
        return done

    async def killed(self, key: str) -> list[Struck]:
        return await asyncio.shield(asyncio.wrap_future(self.kill(key)))

    # --- the thread

    def _run(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kill-switch", daemon=True)
                self._thread.start()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_there, b"!")

    def _strike(self, done: Outcome) -> None:
        begun = time.monotonic()
        self.holding = True
        for action in self.first:
            _do(action)
        with self._lock:
            self._by_owner |= self._guests.keys()
            hunts = [Hunt(entry, begun) for entry in self._guests.values()]
            self._orders.append(_Order(hunts, done, "killed for the owner", begun, self.struck))
        self._run()
        self._wake()

    def _work(self) -> None:
        clients: dict[int, tuple[socket.socket, bytes]] = {}
        poller = select.poll()
        poller.register(self._wake_here, select.POLLIN)
        if self._listener is not None:
            poller.register(self._listener, select.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(self._pause_ms()))
            if self._wake_here in ready:
                os.read(self._wake_here, 4096)
            if self._listener is not None and self._listener.fileno() in ready:
                with contextlib.suppress(OSError):
                    client, _ = self._listener.accept()
                    client.setblocking(False)
                    if len(clients) < CLIENTS:
                        clients[client.fileno()] = (client, b"")
                        poller.register(client, select.POLLIN)
                    else:
                        client.close()
            for number in [number for number in clients if number in ready]:
                client, heard = clients.pop(number)
                more = self._hear(client, heard)
                if more is None:
                    poller.unregister(number)
                else:
                    clients[number] = (client, more)
            self._press()
        for client, _ in clients.values():
            client.close()

    def _hear(self, client: socket.socket, heard: bytes) -> bytes | None:
        """What it has said so far; None once it has given its order, or nothing more is to be had from it."""
        try:
            heard += client.recv(LINE_LIMIT) or b"\n"
        except BlockingIOError:
            return heard
        except OSError:
            client.close()
            return None
        if b"\n" not in heard and len(heard) < LINE_LIMIT:
            return heard
        order = heard.partition(b"\n")[0]
        if order == b"kill":
            done: Outcome = concurrent.futures.Future()
            done.add_done_callback(lambda done: _answer(client, {"killed": [one.plain() for one in done.result()]}))
            self._strike(done)
        else:
            _answer(client, {"error": "the orders are: kill"})
        return None

    def _pause_ms(self) -> float | None:
        with self._lock:
            dues = [order.due for order in self._orders]
        return None if not dues else max(0.0, min(dues) - time.monotonic()) * 1e3

    def _press(self) -> None:
        with self._lock:
            orders = list(self._orders)
        for order in orders:
            if time.monotonic() < order.due:
                continue
            waiting = [hunt for hunt in order.hunts if hunt.outcome is None]
            over = all([hunt.press() for hunt in waiting])
            if order.tell is not None:
                _do(order.tell)
                order.tell = None
            if over:
                with self._lock:
                    self._orders.remove(order)
                struck = [hunt.outcome for hunt in order.hunts if hunt.outcome is not None]
                order.done.set_result(struck)
                _say(order.said, struck)
            else:
                order.due = time.monotonic() + order.pause_s
                order.pause_s = min(2 * order.pause_s, LONGEST_PAUSE_S)


def _do(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # whatever it is, guests are ended
        threading.Thread(target=log.error, args=("at a kill: %s", error), daemon=True).start()


def open_switch(register: Register, socket_path: Path) -> KillSwitch:
    """For a daemon that starts: what an earlier one left alive is ended first. OSError if its socket cannot be made."""
    entries, problems = register.entries()
    for problem in problems:
        log.warning("the register of guests: %s", problem)
    for struck in run(entries.values()):
        if struck.processes:
            log.warning("left by an earlier run: %s", struck)
    remove_groups(tuple(group for entry in entries.values() if not entry.container for group in entry.groups))
    register.clear()
    switch = KillSwitch(register, socket_path)
    switch.open()
    return switch


def _say(what: str, struck: list[Struck]) -> None:
    """A log may be slow (a full pipe, a lock that the loop holds), so it has its own thread for as long as that takes."""

    def say() -> None:
        for one in filter(lambda one: one.processes, struck):
            log.log(logging.WARNING if one.left else logging.INFO, "%s: %s", what, one)

    if any(one.processes for one in struck):
        threading.Thread(target=say, name="kill-switch log", daemon=True).start()


def _answer(client: socket.socket, answer: dict[str, Any]) -> None:
    """To a client that reads; one that does not is left."""
    with contextlib.suppress(OSError):
        client.send(json.dumps(answer).encode() + b"\n")
    client.close()

"""The kill-switch: a thread that kills guests, whatever else this process waits for.

It listens on its own socket in the state directory (the order is one line, the answer one line of JSON), so `mesh reclaim --now`
works while the event loop is blocked. The event loop kills single guests through it too, so there is one way to kill a guest. It
waits for no network, engine or disk, and for no lock held across any of these. `mesh killall` does the same from outside, from
the same registry, when this process is stopped or gone.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.execution.engine import EngineError
from mesh.execution.guest_registry import KILLED, LAPSED, GuestEntry, GuestRegistry
from mesh.execution.process_killer import LONGEST_PAUSE_S, PAUSE_S, Grip, GuestKill, KillResult, run
from mesh.util.cgroups import remove_groups

LINE_LIMIT, CLIENTS = 256, 16  # bytes of an order; clients at a time (own choice)
SPARES = 4  # descriptors: a client, and what a step of a kill opens at a time
BY_OWNER = "its owner took the machine back at once"
WHY = {KILLED: BY_OWNER, LAPSED: "its lease ended, and its container could not be paused"}

log = logging.getLogger(__name__)
Outcome = concurrent.futures.Future[list[KillResult]]


@dataclass
class _Order:
    """Kills that are answered together. `tell` is called once the first signals are sent."""

    kills: dict[str, GuestKill]  # by key
    done: Outcome
    said: str
    begun: float = field(default_factory=time.monotonic)
    tell: Callable[[], object] | None = None
    pause_s: float = PAUSE_S
    due: float = 0.0

    @property
    def waiting(self) -> list[GuestKill]:
        return [kill for kill in self.kills.values() if kill.outcome is None]


class KillSwitch:
    """Kills guests in its own thread.

    On an owner's order, the callables in `first` run before the signals; they must not block (close a gate, set a flag in a
    map). `struck` runs after the signals and lets the rest of the daemon know. It must not run before: its receiver may remove
    guests, and the record that they were killed would be lost. Both run in the switch's thread.
    """

    def __init__(
        self,
        register: GuestRegistry | None = None,
        socket_path: Path | None = None,
        first: Sequence[Callable[[], object]] = (),
        struck: Callable[[], object] = lambda: None,
    ) -> None:
        """Without a registry, only this process knows its guests, as in tests of an engine."""
        self.holding = False
        self._first, self._struck = first, struck
        self.register, self._socket_path = register, socket_path
        self._lock = threading.Lock()  # guards guests and orders; never held across a system call that can block
        self._guests: dict[str, tuple[GuestEntry, Grip]] = {}
        self._by_owner: set[str] = set()
        self._left: set[str] = set()  # guests of which a kill has left something, or may have
        self._orders: list[_Order] = []
        self._wake_here, self._wake_there = os.pipe()
        os.set_blocking(self._wake_there, False)
        self._spares: list[int] = []
        self._take_spares()
        self._closing = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    # --- for the daemon

    def open(self) -> None:
        """Start listening. OSError if the socket cannot be made."""
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
        for descriptor in (self._wake_here, self._wake_there, *self._spares):
            os.close(descriptor)

    def release(self) -> None:
        """Allow starts again: the owner lends."""
        self.holding = False

    def kill_all(self) -> Outcome:
        """Kill every guest for the owner, and refuse starts until `release`."""
        done: Outcome = concurrent.futures.Future()
        self._kill_all(done)
        return done

    def adopt(self, key: str, entry: GuestEntry) -> None:
        """Take on a guest of an earlier run that could not be killed: each order for all tries again."""
        with contextlib.suppress(EngineError):  # no descriptor is free: its entry stays on disk
            self._guests[key] = (entry, _grip(entry))
        self._left.add(key)

    # --- for engines

    def add(self, entry: GuestEntry) -> str:
        """Register a guest before any of its programs can run; return its key. EngineError if it must not start."""
        key = f"{entry.job[:8]}-{secrets.token_hex(8)}"
        grip = _grip(entry)
        with self._lock:
            self._guests[key] = (entry, grip)
        self._keep(key, entry)
        if self.holding:
            self.remove(key)
            raise EngineError("its owner has taken this machine back")
        return key

    def update(self, key: str, entry: GuestEntry) -> None:
        """Replace a guest's entry unless it was removed. EngineError if it cannot be written."""
        grip = _grip(entry)
        with self._lock:
            before = self._guests.get(key)
            if before is not None:
                self._guests[key] = (entry, grip)
        if before is None:
            grip.close()
        else:
            before[1].close()
            self._keep(key, entry)

    def _keep(self, key: str, entry: GuestEntry) -> None:
        if self.register is not None:
            try:
                self.register.keep(key, entry)
            except OSError as error:
                self.remove(key)
                raise EngineError(f"the guest cannot be registered for `mesh killall`: {error}") from error
            with self._lock:
                removed = key not in self._guests
            if removed:  # while it was written
                self.register.drop(key)

    def check_started(self, key: str) -> None:
        """Kill a guest and raise EngineError if the owner took the machine back while it started. Blocks."""
        if self.holding or (self.register is not None and self.register.is_killed(key)):
            self.kill(key).result()
            raise EngineError("its owner has taken this machine back")

    def remove(self, key: str) -> str:
        """Remove a guest that has ended; return why this node killed it, or an empty text.

        One of which a kill has left something stays, on disk too, until a later kill leaves nothing.
        """
        with self._lock:
            why = BY_OWNER if key in self._by_owner else ""
            if key in self._left:
                return why
            known = self._guests.pop(key, None)
            self._by_owner.discard(key)
        if known is not None:
            known[1].close()
        mark = self.register.drop(key) if self.register is not None else ""
        return why or WHY.get(mark, "")

    def kill(self, key: str) -> Outcome:
        """Kill one guest; done at once if it is already gone."""
        done: Outcome = concurrent.futures.Future()
        with self._lock:
            known = self._guests.get(key)
            if known is not None:
                kill = GuestKill(known[0], time.monotonic(), known[1])
                self._orders.append(_Order({key: kill}, done, "killed"))
        if known is None:
            done.set_result([])
        else:
            self._run()
            self._wake()
        return done

    async def kill_and_wait(self, key: str) -> list[KillResult]:
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

    def _kill_all(self, done: Outcome) -> None:
        begun = time.monotonic()
        self.holding = True
        for action in self._first:
            _do(action)
        with self._lock:
            self._by_owner |= self._guests.keys()
            kills = {key: GuestKill(entry, begun, grip) for key, (entry, grip) in self._guests.items()}
            self._orders.append(_Order(kills, done, "killed for the owner", begun, self._struck))
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
            while self._spares:
                os.close(self._spares.pop())
            try:
                self._serve(ready, poller, clients)
                self._step()
            except Exception as error:  # the thread must not end
                _log_apart(log.error, "the kill-switch: %r", error)
            self._take_spares()
        for client, _ in clients.values():
            client.close()

    def _take_spares(self) -> None:
        """Keep descriptors for the time of a kill: a daemon that has no other free must still kill."""
        with contextlib.suppress(OSError):
            while len(self._spares) < SPARES:
                self._spares.append(os.dup(self._wake_here))

    def _serve(
        self, ready: dict[int, int], poller: select.poll, clients: dict[int, tuple[socket.socket, bytes]]
    ) -> None:
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
            more = self._receive(client, heard)
            if more is None:
                poller.unregister(number)
            else:
                clients[number] = (client, more)

    def _receive(self, client: socket.socket, heard: bytes) -> bytes | None:
        """Return the bytes received so far; None once the order is complete or the connection is closed."""
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
            self._kill_all(done)
        else:
            _answer(client, {"error": "the orders are: kill"})
        return None

    def _pause_ms(self) -> float | None:
        with self._lock:
            dues = [order.due for order in self._orders]
        return None if not dues else max(0.0, min(dues) - time.monotonic()) * 1e3

    def _step(self) -> None:
        with self._lock:
            orders = [order for order in self._orders if time.monotonic() >= order.due]
        for order in orders:
            for kill in order.waiting:
                kill.strike()
        for order in orders:
            over = all([kill.look() for kill in order.waiting])
            if order.tell is not None:
                tell, order.tell = order.tell, None
                _do(tell)
            if over:
                outcomes = {key: kill.outcome for key, kill in order.kills.items() if kill.outcome is not None}
                with self._lock:
                    self._orders.remove(order)
                    gone = {key for key in self._left & outcomes.keys() if not outcomes[key].problem}
                    self._left |= {key for key, outcome in outcomes.items() if outcome.problem}
                    self._left -= gone
                for key in gone:
                    self.remove(key)
                results = list(outcomes.values())
                order.done.set_result(results)
                _log_results(order.said, results)
            else:
                order.due = time.monotonic() + order.pause_s
                order.pause_s = min(2 * order.pause_s, LONGEST_PAUSE_S)


def _grip(entry: GuestEntry) -> Grip:
    try:
        return Grip(entry)
    except OSError as error:
        raise EngineError(f"the guest cannot be held for the kill-switch: {error}") from error


def _do(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # in any case, the guests are killed
        _log_apart(log.error, "at a kill: %s", error)


def open_switch(
    register: GuestRegistry,
    socket_path: Path,
    first: Sequence[Callable[[], object]] = (),
    struck: Callable[[], object] = lambda: None,
) -> KillSwitch:
    """Open the switch of a starting daemon and kill what an earlier run left alive. OSError if its socket cannot be made."""
    entries, problems = register.entries()
    for problem in problems:
        log.warning("guest registry: %s", problem)
    results = dict(zip(entries, run(entries.values()), strict=True))
    for result in results.values():
        if result.processes:
            log.warning("left by an earlier run: %s", result)
    left = {key: entry for key, entry in entries.items() if results[key].problem}
    gone = [entry for key, entry in entries.items() if key not in left and not entry.container]
    remove_groups(tuple(group for entry in gone for group in entry.groups))
    register.clear(left)
    switch = KillSwitch(register, socket_path, first, struck)
    for key, entry in left.items():
        switch.adopt(key, entry)
    switch.open()
    return switch


def _log_results(what: str, results: list[KillResult]) -> None:
    def write() -> None:
        for one in filter(lambda one: one.processes, results):
            log.log(logging.WARNING if one.problem else logging.INFO, "%s: %s", what, one)

    if any(one.processes for one in results):
        _log_apart(write)


def _log_apart(write: Callable[..., object], *what: object) -> None:
    """Log in a separate thread: the log may block (a full pipe, a lock that the event loop holds)."""
    with contextlib.suppress(RuntimeError):  # no thread can start, and killing goes on without a log
        threading.Thread(target=write, args=what, name="kill-switch log", daemon=True).start()


def _answer(client: socket.socket, answer: dict[str, Any]) -> None:
    """Answer a client that reads; drop one that does not."""
    with contextlib.suppress(OSError):
        client.send(json.dumps(answer).encode() + b"\n")
    client.close()

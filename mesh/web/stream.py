"""Updates of a page for all its viewers: server-sent events (HTML Living Standard, 9.2).

A page's parts are rendered once a second for all its viewers, and not at all while there are none. A viewer that is slow is
given the parts as they are when it reads again, so nothing waits for it in memory and nothing stays wrong. A job's output
must not lose a line: each viewer has its place in it, also over a reconnection (`Last-Event-ID`); who falls behind what is kept
is told to start again from there.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from mesh.util.log_text import MOST, LogText, lines
from mesh.web.frame import Shown

TICK_S = 1.0
BEAT_TICKS = 15  # after which a silent stream says that it is there; proxies and browsers close those that do not
LINGER_S = 20.0  # after its last viewer; a reload returns to the same place in the log (own choice)
SENT_MOST = 16
WRITE_S = 30.0  # a viewer that reads nothing for this long is gone (own choice)
BEAT = b": still here\n\n"

log = logging.getLogger(__name__)

Write = Callable[[bytes], Awaitable[None]]
Output = Callable[[], AsyncGenerator[bytes, None]]


class LogTail:
    """The end of a job's output, read once for all. Places count characters from its beginning; `epoch` says of which reading."""

    def __init__(self) -> None:
        self.epoch = os.urandom(4).hex()
        self.text = ""
        self.end = 0

    @property
    def place(self) -> str:
        return f"{self.epoch}.{self.end}"

    def add(self, text: str) -> None:
        self.end += len(text)
        self.text = (self.text + text)[-MOST:]

    def after(self, place: str) -> tuple[bool, str]:
        """Return whether the text starts at the beginning of what is kept, and the text after a place."""
        epoch, _, number = place.partition(".")
        start = self.end - len(self.text)
        at = int(number) if number.isascii() and number.isdecimal() and len(number) < 20 else -1
        if epoch != self.epoch or not start <= at <= self.end:
            return True, self.text
        return False, self.text[at - start :]

    def shown(self) -> str:
        return lines(self.text)


class Topic:
    """One page and all who look at it. `render` gives its parts, `output` the bytes of a log if the page has one."""

    def __init__(
        self,
        render: Callable[[], Awaitable[Shown]],
        output: Output | None,
        over: Callable[[], None],
    ) -> None:
        self._render, self._output, self._over = render, output, over
        self._parts: dict[str, tuple[int, bytes]] = {}  # id: version, event
        self._facts: dict[str, str] = {}
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=SENT_MOST)
        self._number = 0
        self._viewers: set[asyncio.Event] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self.tail = LogTail() if output is not None else None
        self._tail_read = asyncio.Event()  # as far as it was there at first
        self._left_at = asyncio.get_running_loop().time()

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def open(self) -> None:
        self._tasks.append(asyncio.create_task(self._keep(), name="page"))
        if self._output is not None:
            self._tasks.append(asyncio.create_task(self._read(), name="page's log"))

    async def close(self) -> None:
        self._closed = True
        self._wake()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        await asyncio.gather(*(task for task in self._tasks if task is not current), return_exceptions=True)

    async def follow(self, write: Write, place: str) -> None:
        """Tell a viewer all changes, from what is shown now and from `place` in the log, until it goes or the page closes."""
        wake = asyncio.Event()
        wake.set()
        self._viewers.add(wake)
        seen: dict[str, int] = {}
        sent_number = self._number
        try:
            while True:
                await wake.wait()
                wake.clear()
                if self._closed:
                    return
                pieces = [made for name, (version, made) in self._parts.items() if seen.get(name) != version]
                seen = {name: version for name, (version, _) in self._parts.items()}
                pieces += [made for number, made in self._sent if number > sent_number]
                sent_number = self._number
                if self.tail is not None and place != self.tail.place:
                    from_start, text = self.tail.after(place)
                    place = self.tail.place
                    change = {"from": "start" if from_start else "", "text": text, "most": MOST}
                    pieces.append(event("log", change, place))
                async with asyncio.timeout(WRITE_S):
                    await write(b"".join(pieces) or BEAT)
        finally:
            self._viewers.discard(wake)
            self._left_at = asyncio.get_running_loop().time()

    async def ready(self) -> None:
        """There is something to tell; what is older than a second is renewed within one."""
        if not self._parts:
            await self.look()

    async def read_some(self, patience_s: float) -> None:
        """The log, as far as it comes in that time; at once if there is none."""
        if self.tail is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._tail_read.wait(), patience_s)

    async def look(self) -> Shown:
        """Render the page now."""
        shown = await self._render()
        self._take(shown)
        return shown

    def _take(self, shown: Shown) -> None:
        changed = False
        for name, made in shown.parts.items():
            new = event("part", {"id": name, "html": made})
            version, old = self._parts.get(name, (0, b""))
            if new != old:
                self._parts[name] = (version + 1, new)
                changed = True
        news = [words for about, words in shown.facts.items() if self._facts and self._facts.get(about) != words]
        self._facts = dict(shown.facts)
        if news:
            self._number += 1
            self._sent.append((self._number, event("say", "; ".join(news[:5]))))
        if changed or news:
            self._wake()

    def _wake(self) -> None:
        for wake in self._viewers:
            wake.set()

    async def _keep(self) -> None:
        ticks = 0
        loop = asyncio.get_running_loop()
        while self._viewers or loop.time() - self._left_at < LINGER_S:
            await asyncio.sleep(TICK_S)
            if not self._viewers:
                continue
            ticks += 1
            try:
                self._take(await self._render())
            except Exception:
                log.exception("a page cannot be shown")
            if ticks % BEAT_TICKS == 0:
                self._wake()
        self._over()
        await self.close()

    async def _read(self) -> None:
        assert self._output is not None and self.tail is not None
        text = LogText()
        try:
            async with contextlib.aclosing(self._output()) as pieces:
                async for piece in pieces:
                    self.tail.add(text.feed(piece))
                    self._tail_read.set()
                    self._wake()
        except Exception as error:
            log.warning("a job's output cannot be followed: %s", error)
        self._tail_read.set()


def event(kind: str, data: Any, place: str = "") -> bytes:
    """JSON has no line ends in it, which would end the event."""
    identity = f"id: {place}\n" if place else ""
    return f"event: {kind}\n{identity}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
